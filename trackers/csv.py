"""A table for spreadsheets and data frames: one row a step, one column a metric."""

from __future__ import annotations

import csv
import io
import os
import sys
from pathlib import Path
from typing import Any

from trackers.base import GeneralTracker, register_tracker
from trackers.jsonl import unused_name
from trackers.media import one_level


@register_tracker
class CSVTracker(GeneralTracker):
    """Writes `logging_dir/run_name/metrics.csv`, with a column for each name logged so far.

    Values of one step share a row, whichever call they come from. A name that was not seen before
    adds a column: the file is written anew beside the old one, which it then replaces, so that a
    reader always finds a whole table. The local record, `metrics.jsonl`, is what a run resumes
    from; this file is for reading.

    Args:
        run_name: the name of the run and of its folder.
        logging_dir: the folder of all runs.
        purge_step: for a run that resumes, the first step that it logs again: the rows from there
            on are dropped. None begins a new table, and keeps one that is there under another name.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, purge_step: int | None = None
    ) -> None:
        self.path = Path(logging_dir) / run_name / "metrics.csv"
        self.purge_step = purge_step
        self._kept: int | None = None  # the same, as `resume` says
        self._file: io.FileIO | None = None
        self._columns = ["step"]
        self._last: dict[str, Any] = {}  # the row that values of the same step are added to
        self._last_at = 0  # where it begins, in bytes

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    def resume(self, run_id: str | None, step: int | None) -> None:  # noqa: ARG002
        """Keep the rows up to a step, or all, unless the arguments give a `purge_step`."""
        self._kept = sys.maxsize if step is None else step + 1

    def start(self) -> None:
        """Open the table, after dropping what is logged again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        purge_step = self._kept if self.purge_step is None else self.purge_step
        self._kept = None
        if self.path.exists():
            if purge_step is None:
                self.path.rename(unused_name(self.path))
            else:
                rows = [row for row in self._read() if int(row["step"] or 0) < purge_step]
        self._write_anew(rows, self._columns)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Add values to the row of their step.

        Args:
            values: names and numbers or texts; of a dict each entry becomes ``"outer/inner"``.
            step: the number of optimizer updates so far. Without one, values have a row of their
                own.

        Raises:
            RuntimeError: the tracker is not started, or finished.
            OSError: the disk refused.
        """
        row: dict[str, Any] = {"step": step, **one_level(values)}
        # As texts: a row that a resumed run has read is of these.
        same = step is not None and str(self._last.get("step")) == str(step)
        merged = {**self._last, **row} if same else row
        at = self._last_at if same else self._opened().seek(0, os.SEEK_END)
        if new := [name for name in merged if name not in self._columns]:
            rows = self._read()
            self._write_anew([*(rows[:-1] if same else rows), merged], self._columns + new)
            return
        self._write(merged, at)

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: dict[str, Any], at: int) -> None:
        line = _line(row, self._columns)
        file = self._opened()
        file.seek(at)
        written = file.write(line)
        if written != len(line):  # a full disk: leave no half of a row, and the one that was there
            file.truncate(at)
            if self._last and at == self._last_at:
                file.seek(at)
                file.write(_line(self._last, self._columns))
            raise OSError(f"{self.path}: {written} of {len(line)} bytes could be written.")
        file.truncate(at + len(line))
        self._last, self._last_at = row, at

    def _write_anew(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        """Replace the table by these rows under these columns."""
        lines = [_line(row, columns) for row in ({name: name for name in columns}, *rows)]
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes(b"".join(lines))
        self.finish()
        os.replace(beside, self.path)
        self._file, self._columns = io.FileIO(self.path, "r+"), columns
        self._last = rows[-1] if rows else {}
        self._last_at = sum(map(len, lines[:-1])) if rows else 0

    def _read(self) -> list[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a crash may have torn the last row
        table = csv.DictReader(io.StringIO(whole, newline=""))
        rows = list(table)
        self._columns = list(table.fieldnames or self._columns)
        return rows

    def _opened(self) -> io.FileIO:
        if self._file is None:
            raise RuntimeError(f"The table {self.path} is not open. Call `start` first.")
        return self._file


def _line(row: dict[str, Any], columns: list[str]) -> bytes:
    text = io.StringIO()
    cells = ["" if row.get(name) is None else row[name] for name in columns]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
