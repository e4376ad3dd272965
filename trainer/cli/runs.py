"""Read the files of a run: its (growing) record, `run.json`, checkpoints and images."""

from __future__ import annotations

import argparse
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trackers.jsonl import FIELDS, parse_record
from trackers.media import flatten
from trackers.redaction import redact
from trainer.checkpoint import storage
from trainer.checkpoint.lock import holder_of
from trainer.cli.inventory import Entry, ranked_by, read_folder
from trainer.cli.parsing import CommandError, named
from trainer.files import read_json, regular

Floats = NDArray[np.float64]

RECORD, ABOUT, CHECKPOINTS = "metrics.jsonl", "run.json", "checkpoints"
EVALUATIONS = "evaluations.jsonl"
_SHOWN = 5  # maximum number of examples in a message
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD = 24  # bytes up to the end of the image's size
_TAGS = 24
_STEPS = 4  # images of each tag: the first and the latest ones
_LARGEST = 1_000_000  # maximum size of an image in bytes
_DATES_END = 253_402_214_400  # seconds since 1970: the last day of the year 9999


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """All values of a metric, in the order recorded; the arrays have shape (values,).

    Attributes:
        steps: Updates; the line number if a record has none.
        times: In seconds since 1970; NaN if a record has none.
        epochs: From 0; NaN if a record has none.
        values: As recorded, including NaN and infinity.
    """

    steps: Floats
    times: Floats
    epochs: Floats
    values: Floats

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """Which values are finite."""
        return np.isfinite(self.values)

    def at(self, index: int) -> tuple[float, int]:
        """Return a value and its step."""
        return float(self.values[index]), int(self.steps[index])

    def extreme(self, mode: str) -> tuple[float, int] | None:
        """Return the smallest ("min") or largest finite value and its step; of equals the first."""
        if not self.finite.any():
            return None
        values = np.where(self.finite, self.values, np.inf if mode == "min" else -np.inf)
        return self.at(int(values.argmin() if mode == "min" else values.argmax()))


class Record:
    """The record of a run, read piece by piece.

    Args:
        path: The file; it may not exist yet.

    Attributes:
        exists: Whether the file was there at the last `read`.
        damaged: A description of each line that is not a record, by line number.
        others: Names of values that are not numbers.
        incomplete: Whether the last line has no end, because it is being written or was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._records = (array("d"), array("d"), array("d"))  # step, time and epoch of each line
        self._values: dict[str, tuple[array[int], array[float]]] = {}  # lines and values
        self.damaged: dict[int, str] = {}
        self.others: dict[str, None] = {}
        self.incomplete = False
        self._offset, self._last_line = 0, b""

    @property
    def exists(self) -> bool:
        """Whether the file was there at the last `read`; it may be empty."""
        return self._inode is not None

    def read(self) -> bool:
        """Read what was added since the last call; return whether anything has changed.

        A record that was truncated or replaced, for example by a run that resumes from a
        checkpoint, is read from the start.

        Raises:
            OSError: The record exists and cannot be read.
        """
        try:
            with open(self.path, "rb", opener=regular) as content:
                return self._read_from(content)
        except (FileNotFoundError, NotADirectoryError):
            gone, self._inode = self.exists, None
            self._reset()
            return gone

    def _read_from(self, content: BinaryIO) -> bool:
        inode = os.fstat(content.fileno()).st_ino
        # The last line, which includes the time, is compared, since a truncated record may have
        # grown again.
        content.seek(self._offset - len(self._last_line))
        anew = inode != self._inode or content.read(len(self._last_line)) != self._last_line
        if anew:
            self._reset()
        self._inode, before = inode, self._offset
        content.seek(self._offset)
        for line in content:
            self.incomplete = not line.endswith(b"\n")
            if self.incomplete:
                break
            self._offset += len(line)
            self._last_line = line
            self._take(line)
        return anew or self._offset != before

    def _take(self, line: bytes) -> None:
        number = len(self._records[0]) + 1
        where = f"{self.path.name}, line {number}"
        record: Any = {}
        try:
            record = parse_record(line, where)
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a record: {line!r}")
        except ValueError as error:
            self.damaged[number] = str(error)
            record = {}
        place = [_number(record.get(name)) for name in ("step", "time", "epoch")]
        if place[1] is not None and not is_date(place[1]):
            place[1] = None
        for column, each in zip(self._records, place, strict=True):
            column.append(np.nan if each is None or not np.isfinite(each) else each)
        for name, value in record.items():
            if name in FIELDS:
                continue
            if (known := _number(value)) is None:
                self.others[name] = None
                continue
            lines, values = self._values.setdefault(name, (array("q"), array("d")))
            lines.append(number - 1)
            values.append(known)

    @property
    def damage(self) -> str | None:
        """A description of lines that are not records, with the problem of the first one."""
        if not self.damaged:
            return None
        lines = [*map(str, self.damaged)]
        shown = ", ".join(lines[:_SHOWN]) + ", …" * (len(lines) > _SHOWN)
        many = "1 line is not a record" if len(lines) == 1 else f"{len(lines)} lines are no records"
        return f"{many}: {shown}. {next(iter(self.damaged.values()))}"

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Return the steps, times and epochs of all lines, NaN where they have none."""
        steps, times, epochs = (np.array(column) for column in self._records)
        return steps, times, epochs

    def series(self) -> dict[str, Series]:
        """Return the metrics by name, in order of first appearance."""
        steps, times, epochs = self.columns()
        steps = np.where(np.isfinite(steps), steps, np.arange(1.0, len(steps) + 1))
        return {
            name: Series(
                steps=steps[rows], times=times[rows], epochs=epochs[rows], values=np.array(values)
            )
            for name, (lines, values) in self._values.items()
            for rows in (np.array(lines),)
        }

    def speed(self, last: int = 0) -> float | None:
        """Return the updates per second: the median over the `last` intervals (0: all)."""
        steps, times, _ = self.columns()
        finite = np.isfinite(steps) & np.isfinite(times)
        steps, times = steps[finite], times[finite]
        order = np.lexsort((times, steps))
        steps, first = np.unique(steps[order], return_index=True)
        steps, seconds = np.diff(steps)[-last:], np.diff(times[order][first])[-last:]
        rates = steps[seconds > 0] / seconds[seconds > 0]
        return float(np.median(rates)) if len(rates) else None


def _number(value: Any) -> float | None:
    """Return a number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return None


def is_date(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970, of a year that Python supports."""
    return isinstance(value, (int, float)) and 0 <= value < _DATES_END


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `run.json`; empty if there is none.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, or has another form.
    """
    try:
        about = read_json(folder / ABOUT)
    except FileNotFoundError:
        return {}
    try:
        begins = [start["begin"] for start in about["starts"]]
        others = [start.get("end") for start in about["starts"]]
        others += [warning.get("time") for warning in about.get("warnings", ())]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is damaged, or not a file of Cadence: {error!r}") from error
    if not all(map(is_date, begins + [time for time in others if time is not None])):
        raise ValueError(
            "it is damaged, or not a file of Cadence: a time is no number of seconds since 1970"
        )
    return dict(about)


class Run:
    """A run that has not begun, is running, or has ended.

    Args:
        path: The run's folder, or a record. A record with a name other than ``metrics.jsonl`` is
            read alone.
        name: The name to show.

    Attributes:
        record: The run's record.
        metrics: The metrics in the record, in order of first appearance.
        about: The content of `run.json`; empty without one.
        checkpoint: The newest checkpoint's name, if any.
        evaluations: After `examine`, the metrics in `evaluations.jsonl`.
        checkpoints: After `examine`, the checkpoints in order of their steps.
        ranking: After `examine`, metric and mode of each callback that ranks checkpoints.
        images: After `examine`, PNG by tag and step.

    Raises:
        argparse.ArgumentTypeError: The path is some other file.
    """

    def __init__(self, path: Path, name: str) -> None:
        alone = path.is_file()
        if alone and path.suffix != ".jsonl":
            raise argparse.ArgumentTypeError(
                f"{path} is a file; give the folder of a run, or its {RECORD}."
            )
        self.path, self.name = path, name
        self.record = Record(path if alone else path / RECORD)
        self._folder = None if alone and path.name != RECORD else self.record.path.parent
        self.metrics: dict[str, Series] = {}
        self.evaluations: dict[str, Series] = {}
        self.checkpoints: list[Entry] = []
        self.ranking: list[tuple[str, str]] = []
        self.images: dict[str, dict[int, bytes]] = {}
        self._unread: list[str] = []  # files that `examine` could not read
        self._look()

    def read(self) -> bool:
        """Read what was added since the last call; return whether anything has changed.

        Raises:
            OSError: The record exists and cannot be read.
        """
        before = (self.status, self.error, self.checkpoint)
        if came := self.record.read():
            self.metrics = self.record.series()
        self._look()
        return came or before != (self.status, self.error, self.checkpoint)

    def _look(self) -> None:
        self.checkpoint: str | None = None
        self._is_held = False
        self.about: dict[str, Any] = {}
        self._no_about: str | None = None
        if self._folder is None:
            return
        if saved := storage.committed(self._folder / CHECKPOINTS):
            self.checkpoint = saved[-1].name
        self._is_held = holder_of(self._folder) is not None
        try:
            self.about = read_about(self._folder)
        except (OSError, ValueError) as error:
            self._no_about = f"{ABOUT} cannot be read: {error}."

    def examine(self) -> None:
        """Read evaluations, checkpoints and images.

        Raises:
            OSError: A record exists and cannot be read.
        """
        if self._folder is None:
            return
        evaluations = Record(self._folder / EVALUATIONS)
        evaluations.read()
        self.evaluations = evaluations.series()
        self._unread = _problems_of(evaluations)
        if (self._folder / CHECKPOINTS).is_dir():
            self.checkpoints, _ = read_folder(self._folder / CHECKPOINTS, hashes=False)
            self.ranking = ranked_by([entry for entry in self.checkpoints if entry.is_step])
            self._unread += [
                f"{checkpoint.name}: {checkpoint.note}"
                for checkpoint in self.checkpoints
                if checkpoint.note
            ]
        self.images = _read_images(self._folder, self._unread)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, as recorded in `run.json`."""
        return list(self.about.get("starts", ()))

    @property
    def status(self) -> str:
        """Whether the run is running, or how it ended.

        "running" while a process of this machine locks the folder; then "finished", "failed",
        "preempted" or "killed" according to `run.json`; without `run.json` "waiting" if there is no
        record yet, else "not running"; "unknown" if only a record was given.
        """
        if self._is_held:
            return "running"
        if self.starts:
            status = str(self.starts[-1].get("status"))
            return "killed" if status == "running" else status  # the folder is not locked
        if not self.record.exists and self.checkpoint is None:
            return "waiting"
        return "unknown" if self._folder is None else "not running"

    @property
    def error(self) -> str | None:
        """The error that ended the run."""
        return self.starts[-1].get("error") if self.starts and not self._is_held else None

    @property
    def problems(self) -> list[str]:
        """Messages about what could not be read."""
        about = [self._no_about] if self._no_about else []
        return [*_problems_of(self.record), *about, *self._unread]

    @property
    def times(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The times at which its records were written, in order."""
        times = np.unique(self.record.columns()[1])
        return times[np.isfinite(times)]

    @property
    def began(self) -> float | None:
        """The time when it began, in seconds since 1970."""
        times = [float(start["begin"]) for start in self.starts] + self.times[:1].tolist()
        return min(times, default=None)

    @property
    def seconds(self) -> float | None:
        """The running time without the time between starts, at least up to each last record."""
        times = self.times
        if not self.starts:
            return float(times[-1] - times[0]) if len(times) else None
        begins = [float(start["begin"]) for start in self.starts]
        total = 0.0
        for start, begin, following in zip(self.starts, begins, [*begins[1:], np.inf], strict=True):
            within = times[(times >= begin) & (times < following)]
            last = float(within[-1]) if len(within) else begin
            total += float(start.get("end") or last) - begin
        return total

    @property
    def updates(self) -> int | None:
        """The last update with a record or a checkpoint."""
        steps = [int(series.steps.max()) for series in self.metrics.values()]
        steps += [int(e.manifest["step"]) for e in self.checkpoints if "step" in e.manifest]
        return max(steps, default=None)

    @property
    def epochs(self) -> int | None:
        """The number of epochs that it has begun."""
        epochs = self.record.columns()[2]
        return int(np.nanmax(epochs)) + 1 if np.isfinite(epochs).any() else None

    @property
    def best(self) -> tuple[str, str, float, int] | None:
        """The metric that measures the run's quality: name, mode, best value and its step.

        It is the metric that ranks the checkpoints, else a loss, preferably of validation.
        """
        losses = [name for name in self.metrics if "loss" in name.lower()]
        losses.sort(key=lambda name: not name.lower().startswith("val"))
        for name, mode in [*self.ranking, *((name, "min") for name in losses)]:
            best = self.metrics[name].extreme(mode) if name in self.metrics else None
            if best is not None:
                return name, mode, *best
        return None

    def parameters(self, kind: str) -> dict[str, Any]:
        """Return the ``configuration`` or the ``hyper_parameters``, flattened to one level.

        They are read from `run.json`, else from the newest checkpoint that has them.
        """
        values = self.about.get(kind)
        manifests = [entry.manifest for entry in self.checkpoints if kind in entry.manifest]
        if values is None and manifests:
            values = manifests[-1][kind]
            if kind == "hyper_parameters":  # see `trainer.hparams`
                values = {**values.get("arguments", {}), **values.get("others", {})}
        return flatten(redact(values), ".") if isinstance(values, dict) else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders, each once; a folder may be a run or contain runs.

    Raises:
        CommandError: A folder neither is nor contains a run.
        OSError: A record cannot be read.
    """
    runs = []
    for path, name in named([run for folder in folders for run in _runs_at(folder.expanduser())]):
        runs.append(run := Run(path, name))
        run.read()
        run.examine()
    return runs


def _runs_at(path: Path) -> list[Path]:
    """Return the path if it is a run or a record, else the folders of runs inside it."""
    if path.is_file() and path.suffix == ".jsonl":
        return [path]
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise CommandError(
            f"{path} {problem}; give the folder of a run, its project_dir, or a record (.jsonl)."
        )
    if any((path / part).exists() for part in (RECORD, EVALUATIONS, ABOUT, CHECKPOINTS)):
        return [path]
    inside = []
    for folder, folders, files in os.walk(path):
        if RECORD in files or ABOUT in files:
            inside.append(Path(folder))
            folders.clear()  # a run contains no runs
        folders[:] = [name for name in folders if not name.startswith(".")]
    if not inside:
        raise CommandError(
            f"{path} is not the folder of a run: it has neither {RECORD} nor {ABOUT} nor "
            f"{CHECKPOINTS}, and there are no runs in it."
        )
    return sorted(inside, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts trial 10 after trial 9."""
    pieces = re.split(r"(\d+)", str(path))
    return [(int(piece) if piece.isdigit() else 0, piece) for piece in pieces]


def _problems_of(record: Record) -> list[str]:
    problems = []
    if record.incomplete:
        problems.append(f"The last line of {record.path.name} is incomplete and was left out.")
    if (damage := record.damage) is not None:
        problems.append(damage)
    if record.others:
        shown = ", ".join(list(record.others)[:_SHOWN])
        problems.append(
            f"{record.path.name} has values that are not numbers, left out here: {shown}."
        )
    return problems


def _read_images(folder: Path, problems: list[str]) -> dict[str, dict[int, bytes]]:
    """Return the images in TensorBoard's files: the first and the latest ones of each tag."""
    files = sorted((folder / "logs").rglob("events.out.tfevents.*"))
    if not files:
        return {}
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        problems.append(
            "Any images in TensorBoard's files are left out: tensorboard is not installed "
            "(pip install 'cadence-trainer[tensorboard]')."
        )
        return {}
    images: dict[str, dict[int, bytes]] = {}
    left_out: set[str] = set()
    for file in files:
        for raw in RawEventFileLoader(str(file)).Load():
            if _PNG not in raw:  # most events are numbers, which metrics.jsonl has too
                continue
            event = Event.FromString(raw)
            for value in event.summary.value:
                image = value.image.encoded_image_string  # empty if the value is not an image
                if not image.startswith(_PNG) or len(image) < _PNG_HEAD:
                    continue
                if len(image) > _LARGEST or (value.tag not in images and len(images) == _TAGS):
                    left_out.add(value.tag)
                    continue
                steps = images.setdefault(value.tag, {})
                steps[event.step] = image
                if len(steps) > _STEPS:
                    del steps[sorted(steps)[1]]
    if left_out:
        problems.append(
            f"Images of more than 1 MB, or of more than {_TAGS} names, are left out: "
            f"{', '.join(sorted(left_out)[:_SHOWN])}."
        )
    return images
