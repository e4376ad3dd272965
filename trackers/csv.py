"""The CSV tracker: a table with one row per step and one column per metric."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trackers.base import GeneralTracker
from trackers.jsonl import is_at, unused_name
from trackers.media import flatten
from trackers.registry import register_tracker
from trainer.errors import module_logger
from trainer.files import hidden_beside, regular

_logger = module_logger("trackers")


@register_tracker
class CSVTracker(GeneralTracker):
    """Writes `logging_dir/run_name/metrics.csv`, with a column for each name logged so far.

    Consecutive values of one step share a row, even from different calls. A new name adds a column:
    a new file is written and atomically replaces the old one, so that a reader always finds a
    complete table. The table is only for reading; a run resumes from the local record,
    `metrics.jsonl`.

    Several processes may add to one table, for example a fit and an evaluation. Each changes it
    under a file lock, ``.metrics.csv.lock`` beside the table, which is removed afterwards. Without
    file locks (on Windows, and with a warning on some network file systems), concurrent writers may
    lose rows.

    An existing table is only extended by a run that continues another one: a `Trainer` that resumes
    or evaluates, or a run with a `purge_step`. Any other run renames the existing table first,
    because rows of two runs could not be distinguished. It logs a warning, except for a fit of a
    `Trainer`.

    Example::

        trainer = Trainer(max_epochs=10, log_with=CSVTracker("digits", "runs"))

    Args:
        run_name: the name of the run and of its folder.
        logging_dir: the folder of all runs.
        purge_step: for a custom loop that resumes, the first step that it logs again. Rows of this
            step and later ones are dropped.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, purge_step: int | None = None
    ) -> None:
        self.path = Path(os.path.expanduser(logging_dir)).absolute() / run_name / "metrics.csv"
        self.purge_step = purge_step
        self._resume_step: int | None = None  # like `purge_step`, but from `resume`
        self._renames_existing = False
        self._extends_last_row = True  # values of the last row's step are added to that row
        self._file: io.FileIO | None = None
        self._columns = ["step"]
        self._last_row: dict[str, Any] = {}
        self._last_offset = self._end_offset = 0  # the byte offsets of its beginning and end

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    def resume(self, run_id: str | None, step: int | None) -> None:  # noqa: ARG002  # an interface
        """Keep the rows up to a step, or all rows, unless `purge_step` was passed.

        Values of an evaluation get their own rows, because the last row may hold values of the same
        step on other data.
        """
        self._resume_step = sys.maxsize if step is None else step + 1
        self._extends_last_row = step is not None

    def begin_anew(self) -> None:
        """Let `start` rename an existing table without a warning, unless `purge_step` is given."""
        self._renames_existing = True

    def start(self) -> None:
        """Open the table and drop the rows that will be logged again."""
        rows: list[dict[str, Any]] = []
        self._columns = ["step"]  # this object may have written another table
        purge_step = self._resume_step if self.purge_step is None else self.purge_step
        with _locked(self.path):
            if self.path.exists():
                if purge_step is None:
                    self._quarantine()
                else:
                    rows = [row for row in self._read() if int(row["step"] or 0) < purge_step]
            self._rewrite(rows, self._columns)
        if not self._extends_last_row:
            self._last_row = {}
        self._resume_step, self._renames_existing, self._extends_last_row = None, False, True

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Add values to the row of their step.

        Args:
            values: names and numbers or texts; an entry of a dict gets the name ``"outer/inner"``.
            step: the number of optimizer updates so far. None takes the value named "step" if it is
                an int; otherwise the values get their own row.

        Raises:
            RuntimeError: the tracker is not started, or is finished.
            ValueError: a value "step" differs from the step. The others are recorded.
            OSError: the disk failed.
        """
        values = flatten(values)
        named = values.pop("step", step)
        if step is None and type(named) is int:  # a resumed run can read it
            step = named
        row: dict[str, Any] = {"step": step, **values}
        if self._file is None:
            raise RuntimeError(f"The table {self.path} is not open. Call `start` first.")
        with _locked(self.path):
            # Values written to a deleted file would be lost.
            if not is_at(os.fstat(self._file.fileno()), self.path):
                self._reopen()
            self._add_row(row, self._file)
        if named != step:
            raise ValueError(
                f"The value 'step' is {named!r}, but the step is {step}. Log it under another name."
            )

    def finish(self) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_row(self, row: dict[str, Any], file: io.FileIO) -> None:
        step = row["step"]
        offset = file.seek(0, os.SEEK_END)
        # Steps are compared as texts, since a resumed run reads its rows as texts. The last row may
        # no longer be at the end, if another process (an evaluation) has added rows.
        is_last = offset == self._end_offset
        same = step is not None and is_last and str(self._last_row.get("step")) == str(step)
        merged = {**self._last_row, **row} if same else row
        offset = self._last_offset if same else offset
        if new := [name for name in merged if name not in self._columns]:
            rows = self._read()
            self._rewrite([*(rows[:-1] if same else rows), merged], self._columns + new)
            return
        self._write_row(merged, offset, file)

    def _quarantine(self) -> None:
        renamed = self.path.rename(unused_name(self.path))
        if not self._renames_existing:
            _logger.warning(
                "%s was renamed to %s. To continue a table, pass the first step that is logged "
                "again as `purge_step`.",
                self.path,
                renamed.name,
            )

    def _write_row(self, row: dict[str, Any], offset: int, file: io.FileIO) -> None:
        line = _csv_line(row, self._columns)
        file.seek(offset)
        written = file.write(line)
        if written != len(line):  # a full disk: leave no partial row, and restore the old one
            file.truncate(offset)
            if self._last_row and offset == self._last_offset:
                file.seek(offset)
                file.write(_csv_line(self._last_row, self._columns))
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written.")
        file.truncate(offset + len(line))
        self._last_row, self._last_offset, self._end_offset = row, offset, offset + len(line)

    def _rewrite(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        """Replace the table with these rows under these columns."""
        lines = [_csv_line(row, columns) for row in ({name: name for name in columns}, *rows)]
        temporary = hidden_beside(self.path)
        try:
            temporary.write_bytes(b"".join(lines))
            self._close()
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)  # on a full disk
        self._file, self._columns = io.FileIO(self.path, "r+", opener=regular), columns
        self._last_row = rows[-1] if rows else {}
        self._end_offset = sum(map(len, lines))
        self._last_offset = self._end_offset - len(lines[-1]) if rows else 0

    def _read(self) -> list[dict[str, Any]]:
        with open(self.path, "rb", opener=regular) as file:
            text = file.read().decode()  # keeps line ends inside texts as they are
        complete = text[: text.rfind("\n") + 1]  # a crash may have cut off the last row
        limit = csv.field_size_limit(sys.maxsize)  # texts may be longer than the default for cells
        try:
            table = csv.DictReader(io.StringIO(complete, newline=""))
            rows = list(table)
        finally:
            csv.field_size_limit(limit)
        self._columns = list(table.fieldnames or self._columns)
        return rows

    def _reopen(self) -> None:
        """Continue with the table that replaced the open one; create it if there is none."""
        if not self.path.exists():
            self._rewrite([], self._columns)
            _logger.warning(
                "The table %s was deleted or moved. Later rows are written to a new table.",
                self.path,
            )
            return
        other = io.FileIO(self.path, "r+", opener=regular)
        self._close()
        self._file = other
        self._read()
        self._last_row = {}  # it was in the old file, even if both files have the same length


@contextlib.contextmanager
def _locked(table: Path) -> Iterator[None]:
    """Lock a table against changes by other processes and by other trackers in this process.

    The holder deletes the lock file at the end. A waiting process that then gets the lock of the
    deleted file tries again with a new file.
    """
    table.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    lock = table.with_name(f".{table.name}.lock")
    while True:
        with (
            open(lock, "ab", buffering=0, opener=regular) as file,
            contextlib.ExitStack() as held,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Unlock explicitly: a process forked in between also has the file open.
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)
            except OSError as error:
                _warn_without_lock(table, str(error))
            else:
                if not is_at(os.fstat(file.fileno()), lock):
                    continue
            held.callback(lock.unlink, missing_ok=True)
            yield
            return


@functools.cache
def _warn_without_lock(table: Path, why: str) -> None:
    _logger.warning(
        "%s cannot be locked (%s): rows may be lost if another process writes to it.", table, why
    )


def _csv_line(row: dict[str, Any], columns: list[str]) -> bytes:
    text = io.StringIO()
    cells = ["" if row.get(name) is None else row[name] for name in columns]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
