"""The folder of a run: its checkpoints, its record, its trackers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trackers import (
    BackgroundTracker,
    JsonlTracker,
    NullTracker,
    resolve_trackers,
    select_trackers,
)
from trainer import checkpoint as disk
from trainer.distributed.collectives import broadcast_object
from trainer.errors import CheckpointError, choose
from trainer.loops.record import Recorder
from trainer.state import PartialState

_CAPACITY = 1_000_000  # records that may wait to be written: the local record should lose none
_WORDS = ("auto", "best", "last")


class Project:
    """Where a Trainer's files go.

    Args:
        folder: Given by the user; None makes a new one under ``runs/`` when it is first needed.
        name: The project's name for trackers; the folder's unless given.
        run_name: The run's name for trackers.
        log_with: See `trackers.resolve_trackers`.
        writes: False for a trial that leaves nothing behind.

    Raises:
        ValueError: A tracker is unknown.
        ImportError: A tracker's package is not installed.
        TypeError: Something in `log_with` is no tracker.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        name: str | None,
        run_name: str | None,
        log_with: Any,
        writes: bool,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike, type(None))):
            raise TypeError(f"project_dir is {folder!r}; it must be a path.")
        self._folder = None if folder is None else Path(folder).expanduser()
        self._fixed = folder is not None
        self._name, self._run_name = name, run_name
        self._log_with = select_trackers(log_with if writes else None, logging_dir=folder or "runs")
        self._writes = writes

    @property
    def folder(self) -> Path:
        """The folder; all processes have the same."""
        if self._folder is None:
            name = datetime.now().astimezone().strftime("run-%Y%m%d-%H%M%S")
            self._folder = Path("runs") / broadcast_object(f"{name}-{uuid.uuid4().hex[:4]}")
        return self._folder

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoints"

    @property
    def record(self) -> Path:
        """The local record of metrics."""
        return self.folder / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Where trackers that write files do."""
        return self.folder / "logs"

    def check_ckpt_path(self, ckpt_path: Any) -> None:
        """Refuse ``"auto"`` and its like where there is no fixed folder to look in.

        Raises:
            ValueError: The folder would be a new one.
        """
        if ckpt_path in _WORDS and not self._fixed and self._folder is None:
            raise ValueError(
                f"ckpt_path={ckpt_path!r} looks for the checkpoints of an earlier start, but "
                "without project_dir every start has a new folder. Pass "
                "Trainer(project_dir='runs/…')."
            )

    def check_fresh(self, roots: Sequence[Path]) -> None:
        """Refuse to begin a run where another one's checkpoints lie; collective.

        Args:
            roots: The folders that the run's callbacks save to.

        Raises:
            ValueError: There are some.
        """
        taken = [root for root in (self.checkpoints, *roots) if disk.committed(root)]
        taken = broadcast_object(taken) if self._writes else []
        if taken:
            raise ValueError(
                f"{taken[0]} has the checkpoints of another run. To go on with it pass "
                "fit(ckpt_path='auto'); to start a new one give another project_dir."
            )

    def choose(
        self, ckpt_path: Any, roots: Sequence[Path], monitors: Sequence[tuple[str, str]]
    ) -> Path | None:
        """The checkpoint that ``ckpt_path`` means, the same on all processes; collective.

        Args:
            ckpt_path: None, a path, ``"last"``, ``"best"`` or ``"auto"``.
            roots: The folders that the run's callbacks save to, where that is not `checkpoints`.
            monitors: Metric and mode of each callback that ranks checkpoints.

        Raises:
            CheckpointError: The path is no checkpoint, or ``"last"`` and ``"best"`` find none.
            ValueError: ``"best"`` without a metric to rank by.
        """
        if ckpt_path is None:
            return None
        if ckpt_path not in _WORDS:
            return _existing(ckpt_path)
        state = PartialState()
        roots = list(dict.fromkeys([self.checkpoints, *roots]))
        if state.is_main_process:
            for root in roots:
                disk.sweep(root)
        if ckpt_path == "best":
            return self._best(roots, monitors)
        newest = [path for root in roots if (path := disk.newest_sound(root, state)) is not None]
        if not newest and ckpt_path == "last":
            raise CheckpointError(f"ckpt_path='last', but there is no checkpoint in {_all(roots)}.")
        return max(newest, key=lambda path: disk.step_of(path) or 0, default=None)

    def _best(self, roots: Sequence[Path], monitors: Sequence[tuple[str, str]]) -> Path:
        if not monitors:
            raise ValueError(
                "ckpt_path='best', but no ModelCheckpoint says what is best: give it a monitor."
            )
        monitor, mode = monitors[0]
        best: Path | None = broadcast_object(best_of(roots, monitor, mode))
        if best is None:
            raise CheckpointError(
                f"ckpt_path='best', but no checkpoint in {_all(roots)} has a value of {monitor!r}."
            )
        return best

    def make_recorder(self, *, step: int | None) -> Recorder:
        """The record and the trackers on the main process; elsewhere objects that do nothing.

        Args:
            step: The update that is gone on from; None begins a new record.
        """
        if not self._writes:
            return Recorder(NullTracker(), [])
        folder = self.folder  # all processes name it together, before one of them asks alone
        if not PartialState().is_main_process:
            return Recorder(NullTracker(), [])
        if step is None and self.record.exists():
            _set_aside(self.record)
        trackers = resolve_trackers(
            self._log_with,
            project_name=self._name or folder.name,
            run_name=self._run_name,
            logging_dir=self.logs,
            # TensorBoard drops the points that a killed run wrote after its last checkpoint.
            init_kwargs=None if step is None else {"tensorboard": {"purge_step": step + 1}},
        )
        record = BackgroundTracker(JsonlTracker(self.record), capacity=_CAPACITY)
        return Recorder(record, [BackgroundTracker(tracker) for tracker in trackers])


def _existing(ckpt_path: str | os.PathLike[str]) -> Path:
    path = Path(ckpt_path).expanduser()
    if not disk.locate(path).exists():
        raise CheckpointError(
            f"There is no checkpoint at {path}. ckpt_path is None, the folder of a checkpoint, or "
            f"a word. {choose('As a word it', str(ckpt_path), _WORDS)}"
        )
    return path


def _all(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


def best_of(roots: Sequence[Path], monitor: str, mode: str) -> Path | None:
    """The checkpoint whose manifest has the best value of a metric; the oldest of equal ones."""
    scored = [
        (value if mode == "min" else -value, path)
        for root in roots
        for path in disk.committed(root)
        if (value := disk.read_manifest(path)["metrics"].get(monitor)) is not None
        and value == value  # NaN is never best
    ]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def _set_aside(path: Path) -> None:
    """Keep the record of a run that left no checkpoint, under another name."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
