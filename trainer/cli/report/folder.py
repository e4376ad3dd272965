"""Read the folder of a run; the page lists what cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trackers.media import one_level
from trackers.redaction import redact
from trainer.checkpoint.lock import holder_of
from trainer.cli.inventory import Entry, ranked_by, read_folder
from trainer.cli.parsing import CommandError, named
from trainer.cli.record import ABOUT, CHECKPOINTS, RECORD, Record, Series, read_about

EVALUATIONS = "evaluations.jsonl"
_SHOWN = 5  # examples named in a message

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD = 24  # bytes up to the end of its size
_TAGS = 24
_STEPS = 4  # images of each tag: the first and the latest
_LARGEST = 1_000_000  # bytes of an image


@dataclass(kw_only=True)
class Run:
    """What is known about a run.

    Attributes:
        folder: Where it is.
        name: Its name, unique on the page.
        record: Its record.
        metrics: The metrics in it, in order of first appearance.
        about: The content of `run.json`; empty without one.
        evaluations: The metrics in `evaluations.jsonl`.
        checkpoints: In order of their steps.
        ranking: Metric and mode of each callback that ranks checkpoints.
        images: PNG by tag and step.
        problems: Messages about what could not be read.
        holder: The process that locks the folder now.
    """

    folder: Path
    name: str
    record: Record
    metrics: dict[str, Series]
    about: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Series] = field(default_factory=dict)
    checkpoints: list[Entry] = field(default_factory=list)
    ranking: list[tuple[str, str]] = field(default_factory=list)
    images: dict[str, dict[int, bytes]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    holder: str | None = None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, as recorded in `run.json`."""
        return list(self.about.get("starts", ()))

    @property
    def status(self) -> str:
        """How it ended: finished, failed, preempted, killed, running, or unknown."""
        if self.holder is not None:
            return "running"
        status = str(self.starts[-1].get("status")) if self.starts else "unknown"
        return "killed" if status == "running" else status

    @property
    def times(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """When its records were written, in order."""
        times = np.unique(self.record.columns()[1])
        return times[np.isfinite(times)]

    @property
    def began(self) -> float | None:
        """When it began, in seconds since 1970."""
        known = [float(start["begin"]) for start in self.starts] + self.times[:1].tolist()
        return min(known, default=None)

    @property
    def seconds(self) -> float | None:
        """How long it ran, without the time between starts; at least until each last record."""
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
        """The last update that has a record or a checkpoint."""
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

        It is the one that ranks the checkpoints, else a loss, preferably of the validation.
        """
        losses = [name for name in self.metrics if "loss" in name.lower()]
        losses.sort(key=lambda name: not name.lower().startswith("val"))
        for name, mode in [*self.ranking, *((name, "min") for name in losses)]:
            found = self.metrics[name].extreme(mode) if name in self.metrics else None
            if found is not None:
                return name, mode, *found
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
        return one_level(redact(values), ".") if isinstance(values, dict) else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders, each once.

    Raises:
        CommandError: One is not that of a run.
        OSError: A record cannot be read.
    """
    return [_read(path, name) for path, name in named(folders)]


def _read(folder: Path, name: str) -> Run:
    problems: list[str] = []
    if folder.is_file() and folder.suffix == ".jsonl":
        record = _read_record(folder, problems)
        return Run(
            folder=folder, name=name, record=record, metrics=record.series(), problems=problems
        )
    _check(folder)
    record = _read_record(folder / RECORD, problems)
    run = Run(folder=folder, name=name, record=record, metrics=record.series(), problems=problems)
    run.holder = holder_of(folder)
    try:
        run.about = read_about(folder)
    except (OSError, ValueError) as error:
        problems.append(f"{ABOUT} cannot be read: {error}.")
    run.evaluations = _read_record(folder / EVALUATIONS, problems).series()
    if (folder / CHECKPOINTS).is_dir():
        run.checkpoints, _ = read_folder(folder / CHECKPOINTS, hashes=False)
        run.ranking = ranked_by([entry for entry in run.checkpoints if entry.is_step])
        problems += [f"{each.name}: {each.note}" for each in run.checkpoints if each.note]
    run.images = _read_images(folder, problems)
    return run


def _check(folder: Path) -> None:
    """Raise unless the path is the folder of a run."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CommandError(
            f"{folder} {what}; give the folder of a run, its project_dir, or a record (.jsonl)."
        )
    parts = (RECORD, EVALUATIONS, ABOUT, CHECKPOINTS)
    if any((folder / part).exists() for part in parts):
        return
    inside = dict.fromkeys(each.parent.name for part in parts for each in folder.glob(f"*/{part}"))
    hint = f" There are runs in it: {', '.join(sorted(inside)[:_SHOWN])}." if inside else ""
    raise CommandError(
        f"{folder} is not the folder of a run: it has neither {RECORD} nor {ABOUT} nor "
        f"{CHECKPOINTS}.{hint}"
    )


def _read_record(path: Path, problems: list[str]) -> Record:
    record = Record(path)
    record.read()
    if record.incomplete:
        problems.append(f"The last line of {path.name} is incomplete and left out.")
    if lines := list(record.damaged):
        shown = ", ".join(map(str, lines[:_SHOWN])) + ", …" * (len(lines) > _SHOWN)
        problems.append(f"{len(lines)} lines of {path.name} are not records: {shown}.")
    if record.others:
        shown = ", ".join(list(record.others)[:_SHOWN])
        problems.append(f"{path.name} has values that are not numbers, left out here: {shown}.")
    return record


def _read_images(folder: Path, problems: list[str]) -> dict[str, dict[int, bytes]]:
    """Return the images in TensorBoard's files: of each tag the first and the latest ones."""
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
    found: dict[str, dict[int, bytes]] = {}
    left_out: set[str] = set()
    for file in files:
        for raw in RawEventFileLoader(str(file)).Load():
            if _PNG not in raw:  # most are numbers, which metrics.jsonl has too
                continue
            event = Event.FromString(raw)
            for value in event.summary.value:
                image = value.image.encoded_image_string  # empty where it is something else
                if not image.startswith(_PNG) or len(image) < _PNG_HEAD:
                    continue
                if len(image) > _LARGEST or (value.tag not in found and len(found) == _TAGS):
                    left_out.add(value.tag)
                    continue
                steps = found.setdefault(value.tag, {})
                steps[event.step] = image
                if len(steps) > _STEPS:
                    del steps[sorted(steps)[1]]
    if left_out:
        problems.append(
            f"Images of more than 1 MB, or of more than {_TAGS} names, are left out: "
            f"{', '.join(sorted(left_out)[:_SHOWN])}."
        )
    return found
