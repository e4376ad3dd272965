"""The project folder of a run: checkpoints, local record, tracker files, and its lock.

`trainer.checkpoint.resolve` finds the checkpoint that a run resumes from, or an evaluation loads.
"""

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
from trainer.checkpoint.lock import alone_in, holder_of
from trainer.checkpoint.resolve import CheckpointFolders
from trainer.checkpoint.save import (
    is_writer_rank,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from trainer.checkpoint.storage import (
    later_than,
    leave_branch,
)
from trainer.distributed.objects import broadcast_object
from trainer.distributed.process_control import on_main
from trainer.errors import module_logger
from trainer.files import absolute_path
from trainer.loops.recorder import Recorder
from trainer.loops.run_metadata import RunMetadata
from trainer.state import PartialState
from trainer.tracking import check_name

logger = module_logger(__name__)

_CAPACITY = 1_000_000  # records in the queue; large, so that the local record drops none


def _check_not_importing() -> None:
    """Raise in a spawned process that is importing a main script without a main guard.

    `multiprocessing` itself raises only later, when a further process is started.

    Raises:
        RuntimeError: This is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "fit was called in a new process, for example a loader worker, which imports the "
            "script only for its classes and would start the run again. Put the script's code "
            "under `if __name__ == '__main__':`."
        )


class Project:
    """The project folder of a Trainer, and the files in it.

    Args:
        folder: The user's ``project_dir``; None for a new folder under ``runs/``.
        name: The project's name for trackers; the folder's name by default.
        run_name: The run's name for trackers.
        log_with: See `trackers.resolve_trackers`.
        writes: False for a trial run, which writes no files.
        on_each_node: Whether each machine keeps checkpoints, since they share no disk.

    Attributes:
        folder: The absolute path, resolved against the working directory at the start, which may
            differ between machines.
        checkpoints: The folder of the checkpoints.
        record: The local record of metrics.
        evaluations: The local record of evaluations outside a fit.
        run_metadata: The file with the run metadata.
        logs: The folder for trackers that write files.

    Raises:
        ValueError: A tracker is unknown.
        ImportError: A tracker's package is not installed.
        TypeError: `folder` is not a path, or an item of `log_with` is not a tracker.
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
        if folder is None:  # all ranks agree on a name; the folder is created when needed
            start = datetime.now().astimezone().strftime("run-%Y%m%d-%H%M%S")
            path = Path("runs") / broadcast_object(f"{start}-{uuid.uuid4().hex[:4]}")
        else:
            path = folder  # not converted to Path, which would alter a URL in the error
        self._place(absolute_path("project_dir", path))
        self._fixed = folder is not None
        self._name, self._run_name = name, run_name
        self._log_with = select_trackers(log_with if writes else None, logging_dir=folder or "runs")
        for argument, value in (("project_name", name), ("run_name", run_name)):
            if value is not None:
                check_name(argument, value, self._log_with)
        self._writes = writes
        self._fitted: Recorder | None = None
        self.on_each_node = on_each_node

    def _place(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.record = folder / "metrics.jsonl"
        self.evaluations = folder / "evaluations.jsonl"
        self.run_metadata = folder / "run.json"
        self.logs = folder / "logs"

    def folders_with(
        self,
        of_callbacks: Sequence[Path],
        monitors: Sequence[tuple[str, str]],
        mirrors: Sequence[tuple[Path | None, str]] = (),
    ) -> CheckpointFolders:
        """Return the folders with checkpoints; see `CheckpointFolders`."""
        return CheckpointFolders(
            own=self.checkpoints,
            of_callbacks=of_callbacks,
            monitors=monitors,
            lasting=self._fixed,
            writes=self._writes,
            on_each_node=self.on_each_node,
            mirrors={root or self.checkpoints: url for root, url in mirrors},
        )

    def moved(self, folder: Path) -> Project:
        """Return a copy in another folder, for another run."""
        other = copy.copy(self)
        other._fitted = None
        other._place(folder)
        return other

    def unwritten(self) -> Project:
        """Return a copy for a trial run, which writes no files."""
        trial = copy.copy(self)
        trial._writes = False
        return trial

    @contextmanager
    def alone(
        self, roots: Callable[[], Sequence[Path]]
    ) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
        """Lock the project folder and `roots` against other runs while inside; collective.

        Args:
            roots: Returns the folders outside the project folder that the run's callbacks save to.

        Yields:
            Two functions. The first, collective, locks the folders of callbacks that were added in
            the meantime. The second takes the run's id, which runs that are refused show in their
            error.

        Raises:
            ValueError: Another run holds a lock; raised on all ranks.
            RuntimeError: This is a spawned process that is importing the main script.
        """
        _check_not_importing()
        state, project = PartialState(), self.folder.resolve()
        locks = self._writes and is_writer_rank(state, self.on_each_node)
        warns: dict[Path, Callable[[str], None]] = {}  # per locked folder: publishes the run id
        with ExitStack() as stack:

            def take() -> None:
                others = {root.resolve(): root for root in roots()}
                folders = {project: self.folder} | {
                    at: root for at, root in others.items() if not at.is_relative_to(project)
                }
                new = {at: folder for at, folder in folders.items() if at not in warns}
                # A callback's `dirpath` may lie inside the folder of another run.
                for at, folder in new.items():
                    near = self.checkpoints if at == project else folder.parent
                    if near.resolve() not in warns and (holder := holder_of(near)):
                        raise ValueError(
                            f"{near} is in use by {holder}. Wait until it ends, or give one of "
                            "the runs a different project_dir or dirpath."
                        )
                for at, folder in new.items():
                    warns[at] = stack.enter_context(alone_in(folder))

            def lock() -> None:
                raise_on_all_ranks(take, state, here=locks)

            def warn_all(run_id: str) -> None:
                for tell in warns.values():
                    tell(run_id)

            lock()
            yield lock, warn_all

    def leave_branch(self, chosen: Path, folders: CheckpointFolders, offset: int | None) -> bool:
        """Quarantine the checkpoints later than the chosen one, and copy the record; collective.

        The run continues from an earlier checkpoint, so the later ones belong to a branch that is
        given up. They are renamed, not deleted.

        Args:
            chosen: The checkpoint to resume from.
            folders: Where the run's checkpoints lie.
            offset: The length in bytes to which the record will be truncated; None if unknown.

        Returns:
            Whether there were later checkpoints; False on a rank that writes no checkpoints.

        Raises:
            CheckpointError: A file could not be copied or renamed.
        """
        state, roots = PartialState(), folders.all_roots()

        def leave() -> bool:
            if not self._writes or not is_writer_rank(state, self.on_each_node):
                return False
            later = later_than(chosen, roots)
            # Copy the record first: after an interruption, the later checkpoints show that this is
            # still due.
            if self.record.exists():
                if not JsonlTracker(self.record).ends_record(offset or 0):
                    self.record.rename(unused_name(self.record))  # not of this checkpoint
                elif later:
                    shutil.copy2(self.record, unused_name(self.record))
            leave_branch(chosen, later)
            return bool(later)

        left = run_on_all_ranks("Setting aside later checkpoints", leave, state)
        return left[state.process_index]

    def begin_record(self) -> None:
        """Create the folder and rename an earlier run's records in it, on rank 0; collective.

        Raises:
            ValueError: The folder cannot be created.
        """
        if self._writes:
            on_main(self._begin_record)

    def _begin_record(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"project_dir is {str(self.folder)!r}, which cannot be used as a folder: "
                f"{error.strerror}: {error.filename!r}."
            ) from None  # the message says all of it
        # It belongs to another run, like all three files.
        if self.record.exists() or self.run_metadata.exists():
            for file in (self.record, self.evaluations, self.run_metadata):
                if file.exists():
                    file.rename(unused_name(file))

    def make_recorder(self, *, evaluates: bool = False) -> Recorder:
        """Return the recorder; on ranks other than 0, one that writes nothing; collective.

        Args:
            evaluates: Whether it is for an evaluation. Evaluations use a separate local record,
                because a fit that runs at the same time, or is resumed later, truncates and
                continues ``metrics.jsonl``. If this Trainer has run a fit before, values go to the
                tracker runs of that fit, otherwise to new tracker runs.
        """
        recorders: list[Recorder] = []
        if self._writes:
            on_main(lambda: recorders.append(self._make_recorder(evaluates)))
        return recorders[0] if recorders else Recorder(NullTracker(), [])

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
        recorder = Recorder(record, services, RunMetadata(self.run_metadata))
        if not evaluates:
            self._fitted = recorder
        else:
            recorder.resume(run_ids, None)
        return recorder
