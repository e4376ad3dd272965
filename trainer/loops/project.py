"""The folder of a run: its checkpoints, its record, its trackers."""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from trackers.jsonl import unused_name
from trainer import checkpoint as disk
from trainer.distributed.collectives import all_gather_object, broadcast_object
from trainer.distributed.control import on_main
from trainer.loops.about import AboutRun
from trainer.loops.choosing import WORDS, choose_checkpoint
from trainer.loops.record import Recorder
from trainer.state import PartialState

_CAPACITY = 1_000_000  # records that may wait to be written: the local record should lose none
_TO_EVALUATE = "To evaluate them pass the path of one."
_TO_TRAIN = (
    "Begin a new run in another project_dir, with them if you wish (load_from_checkpoint). To have "
    "a run that can be gone on with, add a ModelCheckpoint without save_weights_only, with a "
    "dirpath of its own."
)


def _refuse_in_import() -> None:
    """Refuse a run in a process that another one has started anew, while it imports the script.

    `multiprocessing` refuses only that such a process starts others, which comes later.

    Raises:
        RuntimeError: It is one.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "fit was called in a new process, a worker of a loader for example, which only imports "
            "the script to know its classes and would begin the run once more. Put what the script "
            "does below `if __name__ == '__main__':`."
        )


class Project:
    """Where a Trainer's files go.

    Args:
        folder: Given by the user; None stands for a new one under ``runs/``.
        name: The project's name for trackers; the folder's unless given.
        run_name: The run's name for trackers.
        log_with: See `trackers.resolve_trackers`.
        writes: False for a trial that leaves nothing behind.
        on_each_node: The machines share no disk: each keeps checkpoints.

    Attributes:
        folder: The same on all processes.

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
        on_each_node: bool = False,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike, type(None))):
            raise TypeError(f"project_dir is {folder!r}; it must be a path.")
        if folder is None:  # named at once, where all processes are; made when it is needed
            name = datetime.now().astimezone().strftime("run-%Y%m%d-%H%M%S")
            self.folder: Path = Path("runs") / broadcast_object(f"{name}-{uuid.uuid4().hex[:4]}")
        else:
            self.folder = Path(folder).expanduser()
        self._fixed = folder is not None
        self._name, self._run_name = name, run_name
        self._log_with = select_trackers(log_with if writes else None, logging_dir=folder or "runs")
        self._writes = writes
        self._fitted: Recorder | None = None
        self.on_each_node = on_each_node

    def unwritten(self) -> Project:
        """The same for a trial that leaves nothing behind."""
        trial = copy.copy(self)
        trial._writes = False
        return trial

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoints"

    @property
    def record(self) -> Path:
        """The local record of metrics."""
        return self.folder / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """The local record of evaluations outside a training."""
        return self.folder / "evaluations.jsonl"

    @property
    def about(self) -> Path:
        """What the run is, and how it ended."""
        return self.folder / "run.json"

    @property
    def logs(self) -> Path:
        """Where trackers that write files do."""
        return self.folder / "logs"

    def check_ckpt_path(self, ckpt_path: Any) -> None:
        """Refuse what names no checkpoint, and words where there is no fixed folder to look in.

        Raises:
            TypeError: It is neither None nor a text or path.
            ValueError: The folder would be a new one.
        """
        if not isinstance(ckpt_path, (str, os.PathLike, type(None))):
            raise TypeError(
                f"ckpt_path is {ckpt_path!r} of type {type(ckpt_path).__name__}; it is None, the "
                "folder of a checkpoint, 'last', 'best' or 'auto'."
            )
        if ckpt_path in WORDS and not self._fixed and not self.checkpoints.exists():
            raise ValueError(
                f"ckpt_path={ckpt_path!r} looks for the checkpoints of an earlier start, but "
                "without project_dir every start has a new folder. Pass "
                "Trainer(project_dir='runs/…')."
            )

    @contextmanager
    def alone(self, roots: Sequence[Path]) -> Iterator[Callable[[str], None]]:
        """Inside, no other run may write to the folder; collective.

        Args:
            roots: The folders that the run's callbacks save to.

        Yields:
            A function to tell the run's id, for whoever is refused.

        Raises:
            ValueError: Another run does; on all processes alike.
            RuntimeError: It does since this very process is one of its workers.
        """
        _refuse_in_import()
        own = self.folder.resolve()
        others = {root.resolve(): root for root in roots}
        folders = [self.folder, *(o for at, o in others.items() if not at.is_relative_to(own))]
        tells: list[Callable[[str], None]] = []
        state = PartialState()
        with ExitStack() as held:

            def take() -> None:
                # A run may save to another one's folder by a `dirpath`, whichever began first.
                for near in (self.checkpoints, *(folder.parent for folder in folders[1:])):
                    if holder := disk.holder_of(near):
                        raise ValueError(
                            f"{near} is in use by {holder}. Wait for its end, or give one of the "
                            "runs another project_dir or dirpath."
                        )
                tells.extend(held.enter_context(disk.alone_in(folder)) for folder in folders)

            here = self._writes and disk.keeps(state, self.on_each_node)
            disk.refuse_together(take, state, here=here)

            def tell_all(run_id: str) -> None:
                for tell in tells:
                    tell(run_id)

            yield tell_all

    def check_fresh(self, roots: Sequence[Path]) -> None:
        """Refuse to begin a run where another one's checkpoints lie; collective.

        Args:
            roots: The folders that the run's callbacks save to.

        Raises:
            ValueError: There are some.
        """
        here = [root for root in (self.checkpoints, *roots) if disk.committed(root)]
        taken = [root for roots in all_gather_object(here) for root in roots]
        if taken and self._writes:
            raise ValueError(
                f"{taken[0]} has the checkpoints of another run. To go on with it pass "
                "fit(ckpt_path='auto'); to start a new one give another project_dir."
            )

    def choose(
        self,
        ckpt_path: Any,
        roots: Sequence[Path],
        monitors: Sequence[tuple[str, str]],
        *,
        sweeps: bool = False,
    ) -> Path | None:
        """The checkpoint that ``ckpt_path`` means, the same on all processes; collective.

        Args:
            ckpt_path: None, a path, ``"last"``, ``"best"`` or ``"auto"``.
            roots: The folders that the run's callbacks save to, where that is not `checkpoints`.
            monitors: Metric and mode of each callback that ranks checkpoints.
            sweeps: Clear what killed saves have left: for whoever saves there next. An evaluation
                may run beside the training, whose save it must not take for a leftover.

        Raises:
            CheckpointError: The path is no checkpoint, or ``"last"`` and ``"best"`` find none; or
                there are weights alone.
            ValueError: ``"best"`` without a metric to rank by.
        """
        roots = list(dict.fromkeys([self.checkpoints, *roots]))
        if sweeps and self._writes:
            state = PartialState()
            keeper = disk.keeps(state, self.on_each_node)
            what = "Clearing what killed saves have left"
            disk.together(what, lambda: [disk.sweep(r) for r in roots if keeper], state)
        return choose_checkpoint(
            ckpt_path,
            roots,
            monitors,
            on_each_node=self.on_each_node,
            instead=_TO_TRAIN if sweeps else _TO_EVALUATE,
        )

    def check_branch(self, chosen: Path, roots: Sequence[Path]) -> None:
        """Refuse to go on from a checkpoint where another run's checkpoints lie; collective.

        Raises:
            CheckpointError: It cannot be read.
            ValueError: There are some.
        """
        state, roots = PartialState(), [self.checkpoints, *roots]
        here = self._writes and disk.keeps(state, self.on_each_node)
        disk.refuse_together(lambda: disk.refuse_other_runs(chosen, roots), state, here=here)

    def leave_branch(self, chosen: Path, roots: Sequence[Path], offset: int | None) -> bool:
        """Set aside the checkpoints later than this one, and keep the record of theirs; collective.

        Args:
            chosen: The checkpoint.
            roots: The folders that the run's callbacks save to.
            offset: Where the record will be cut.

        Returns:
            Whether there were any, on a process that keeps checkpoints.

        Raises:
            CheckpointError: The disk refuses.
        """
        state, roots = PartialState(), list(dict.fromkeys([self.checkpoints, *roots]))

        def leave() -> bool:
            if not self._writes or not disk.keeps(state, self.on_each_node):
                return False
            later = disk.later_than(chosen, roots)
            # The record first: once there are no later checkpoints, nobody knows that it is theirs.
            if self.record.exists():
                if not JsonlTracker(self.record).ends_record(offset or 0):
                    self.record.rename(unused_name(self.record))  # not the one of this checkpoint
                elif later:
                    shutil.copy2(self.record, unused_name(self.record))
            disk.leave_branch(chosen, later)
            return bool(later)

        left = disk.together("Setting aside later checkpoints", leave, state)
        return left[state.process_index]

    def begin_record(self) -> None:
        """Make the folder and an empty record in it, on rank 0; collective.

        Raises:
            ValueError: The folder cannot be made.
        """
        if self._writes:
            on_main(self._begin_record)

    def _begin_record(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"project_dir is {str(self.folder)!r}, which cannot be used as a folder: {error}."
            ) from error
        if self.record.exists() or self.about.exists():  # another run's, and so is the rest
            for file in (self.record, self.evaluations, self.about):
                if file.exists():
                    file.rename(unused_name(file))

    def make_recorder(self, *, evaluates: bool = False) -> Recorder:
        """The record and the trackers on rank 0; elsewhere objects that do nothing; collective.

        Args:
            evaluates: For an evaluation: a training, which may be under way or go on later, cuts
                and continues a record of its own. Behind a fit the values go to the same runs of
                the trackers, else to runs of their own.
        """
        made: list[Recorder] = []
        if self._writes:
            on_main(lambda: made.append(self._make_recorder(evaluates)))
        return made[0] if made else Recorder(NullTracker(), [])

    def _make_recorder(self, evaluates: bool) -> Recorder:
        alone = evaluates and self._fitted is None
        run_ids = {} if self._fitted is None else self._fitted.run_ids
        trackers = resolve_trackers(
            self._log_with,
            project_name=self._name or self.folder.name,
            run_name=self._run_name,
            logging_dir=self.logs / "evaluations" if alone else self.logs,
        )
        file = self.evaluations if evaluates else self.record
        record = BackgroundTracker(JsonlTracker(file), capacity=_CAPACITY)
        services = [BackgroundTracker(tracker) for tracker in trackers]
        recorder = Recorder(record, services, AboutRun(self.about))
        if not evaluates:
            self._fitted = recorder
        else:
            recorder.resume(run_ids, None)
        return recorder
