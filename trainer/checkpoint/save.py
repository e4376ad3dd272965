"""Save a checkpoint on all ranks.

Each step runs on all ranks, and raises on all of them if it fails on one. The writer rank writes
the files that are not per rank. If all ranks share one disk, it is rank 0. If each machine has its
own disk, it is the rank with local rank 0 on each machine.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from trainer.checkpoint.storage import (
    commit,
    describe_files,
    discard,
    link,
    open_staging,
    remove,
)
from trainer.distributed.guards import all_gather_payloads, collective_mismatch
from trainer.errors import CheckpointError, DistributedOperationException, module_logger

if TYPE_CHECKING:
    from trainer.checkpoint.mirror import Mirror

logger = module_logger(__name__)

T = TypeVar("T")

CHECKPOINT = "checkpoint"  # the operation's name in errors, if the caller gives no public name
_FREE_SPACE = "Free some space; a smaller save_top_k or save_last of ModelCheckpoint keeps fewer"


class Ranks(Protocol):
    """The process information that this package needs; ``PartialState`` has it."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""

    @property
    def process_index(self) -> int:
        """The rank."""

    @property
    def local_process_index(self) -> int:
        """The rank within its machine."""

    @property
    def num_processes(self) -> int:
        """The number of ranks."""

    def set_device(self) -> None:
        """Make the rank's device the current device of the calling thread."""


def is_writer_rank(state: Ranks, on_each_node: bool) -> bool:
    """Return whether this rank is a writer rank: it writes and removes the checkpoints."""
    return state.is_local_main_process if on_each_node else state.is_main_process


def share_of(state: Ranks, on_each_node: bool) -> tuple[int, int] | None:
    """Return the share of a checkpoint that this rank checks, see `trainer.checkpoint.verify`.

    Ranks that share a disk check each file once. If each machine has its own, its writer rank
    checks all, and the result is None on the other ranks.
    """
    if not on_each_node:
        return state.process_index, state.num_processes
    return (0, 1) if state.is_local_main_process else None


def writer_rank_of(
    state: Ranks,
    on_each_node: bool,
    group: dist.ProcessGroup | None = None,
    *,
    operation: str = CHECKPOINT,
) -> int:
    """Return the writer rank of this rank's disk.

    With ``on_each_node`` this is collective, because launchers assign ranks to machines in any
    order. For example, SLURM's ``--distribution=cyclic`` assigns them to the machines in turn.

    Args:
        state: The ranks.
        on_each_node: The machines share no disk.
        group: The process group of the collectives.
        operation: See :func:`run_on_all_ranks`.

    Raises:
        CheckpointError: If a machine has no local rank 0; raised on every rank.
    """
    if not on_each_node or state.num_processes == 1:
        return 0
    homes = run_on_all_ranks(
        "Finding the processes of each machine",
        lambda: (socket.gethostname(), state.local_process_index),
        state,
        group,
        operation=operation,
    )
    if lacking := {host for host, _ in homes} - {host for host, local in homes if local == 0}:
        raise CheckpointError(
            f"No process on {', '.join(sorted(lacking))} has the local rank 0, so none would save "
            "there. Make the launcher set LOCAL_RANK, as torchrun does."
        )
    host, _ = homes[state.process_index]
    firsts = [rank for rank, home in enumerate(homes) if home == (host, 0)]
    # Machines may share a host name (containers do); their ranks are then consecutive.
    before = [rank for rank in firsts if rank <= state.process_index]
    return before[-1] if before else firsts[0]


def run_on_all_ranks(
    what: str,
    work: Callable[[], T],
    state: Ranks,
    group: dist.ProcessGroup | None = None,
    *,
    operation: str = CHECKPOINT,
) -> list[T]:
    """Run ``work`` on all ranks and return all results, by rank; collective.

    If it raises on any rank, a `CheckpointError` is raised on every rank, so that no rank waits for
    one that failed.

    Args:
        what: A description of the action; the error message begins with it.
        work: Called on this rank. Its result is sent to the other ranks and must be picklable.
        state: The ranks.
        group: The process group of the collectives.
        operation: The public function that the user called and, in parentheses, its step. It must
            be the same on all ranks: ranks check that they are in the same collective.

    Raises:
        CheckpointError: ``work`` failed on some rank; raised on every rank, with the error of each
            rank that failed.
        DistributedOperationException: A rank called another operation; raised on every rank.
    """
    outcome: tuple[T | None, str | None]
    cause, payload = None, b""
    try:
        outcome = work(), None
        if state.num_processes > 1:
            payload = pickle.dumps(outcome)
    except Exception as error:  # any type: the other ranks wait for the outcome
        if collective_mismatch(error, operation):
            raise
        # A CheckpointError's message is complete, and would be printed twice.
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        outcome = None, _describe(error)
        payload = pickle.dumps(outcome)
    outcomes: list[Any] = [outcome]
    if state.num_processes > 1:
        payloads = all_gather_payloads(operation, payload, group)
        outcomes = [pickle.loads(data) for data in payloads]  # noqa: S301 - from this run's ranks
    by_text: dict[str, list[str]] = {}  # ranks by error text; many may fail alike
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            by_text.setdefault(text.rstrip("."), []).append(str(rank))
    alone = state.num_processes == 1
    failures = [
        f": {text}" if alone else f" on rank{'s' if ranks[1:] else ''} {', '.join(ranks)}: {text}"
        for text, ranks in by_text.items()
    ]
    if failures:
        raise CheckpointError(f"{what} failed{';'.join(failures)}.") from cause
    return [result for result, _ in outcomes]


def raise_on_all_ranks(
    check: Callable[[], object], state: Ranks, *, here: bool, operation: str = CHECKPOINT
) -> None:
    """Check user input on some ranks, and raise on all ranks if the check fails; collective.

    Args:
        check: Raises a ``ValueError`` if the input is invalid.
        state: The ranks.
        here: Whether to run the check on this rank.
        operation: See :func:`run_on_all_ranks`.

    Raises:
        ValueError: If the check failed on any rank; raised on every rank.
    """

    def refusal() -> str | None:
        try:
            if here:
                check()
        except ValueError as error:
            return str(error)
        return None

    refusals = run_on_all_ranks("Checking the arguments", refusal, state, operation=operation)
    if refused := [text for text in refusals if text]:
        raise ValueError(refused[0])


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{error!r}. The disk is full or its quota is exhausted; earlier checkpoints are "
            f"unchanged. {_FREE_SPACE}"
        )
    return repr(error)


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The path of a checkpoint to save, and the other paths that its commit changes.

    Attributes:
        target: The checkpoint's folder; a checkpoint there is replaced. The writer rank's value is
            used.
        on_each_node: The machines share no disk, so each keeps a complete checkpoint.
        shared: ``target`` may hold the user's files, which stay.
        links: Symlinks by path. True creates one after the commit, see
            `trainer.checkpoint.storage.link`; False removes a dangling one at the end.
        displaces: Checkpoints to remove after the links are made. Failures are logged.
        mirror: Uploads the checkpoint after the commit; None without a mirror, and on ranks other
            than 0.
        operation: The public function that the user called, for :func:`run_on_all_ranks`.
    """

    target: Path
    on_each_node: bool = False
    shared: bool = False
    links: Mapping[Path, bool] = field(default_factory=dict)
    displaces: Sequence[Path] = ()
    mirror: Mirror | None = None
    operation: str = CHECKPOINT

    def absolute(self) -> SaveRequest:
        """Return a copy with absolute paths, since hooks may change the working directory."""
        return replace(
            self,
            target=self.target.absolute(),
            links={path.absolute(): wanted for path, wanted in self.links.items()},
            displaces=[path.absolute() for path in self.displaces],
        )


def save_checkpoint(
    request: SaveRequest,
    write: Callable[[Path], Iterable[str] | None],
    *,
    manifest: Callable[[], Mapping[str, Any]],
    state: Ranks,
    group: dist.ProcessGroup | None = None,
    before: Sequence[Callable[[Path], object]] = (),
    needs: int = 0,
) -> Path:
    """Save a checkpoint on all ranks and commit it once every rank has written its part.

    Args:
        request: Where it is saved.
        write: Writes this rank's part into the staging folder. Names of files that several ranks
            write must contain the rank. If it returns the names, this rank syncs and hashes these
            files, else the writer rank does.
        manifest: Called on the writer ranks at the commit; returns fields for the manifest.
        state: The ranks.
        group: The process group of the collectives. A background save needs its own group, since
            its collectives would mix with those of training.
        before: Functions called with the staging folder before ``write``. Each starts after the
            previous one has ended on all ranks, so they may call collectives. Their number may
            differ between ranks.
        needs: The number of bytes that must be free; 0 if unknown.

    Returns:
        The writer rank's ``request.target``; every rank returns only after it is committed.

    Raises:
        CheckpointError: If any rank failed; raised on every rank, and the message names the ranks.
            Nothing is then committed, and the target is unchanged. One exception: if each machine
            has its own disk and only the commit on one of them failed, the other machines have
            committed.
    """
    path = Path(os.path.abspath(request.target))  # hooks may change the working directory
    on_each_node, operation = request.on_each_node, request.operation
    is_writer = is_writer_rank(state, on_each_node)

    def step(name: str, work: Callable[[], T]) -> list[T]:
        what = f"Saving {request.target}"
        return run_on_all_ranks(what, work, state, group, operation=f"{operation} ({name})")

    def open_() -> tuple[Path, Path]:
        if not is_writer:
            return path, request.target
        if needs:
            check_space(path.parent, needs)
        return open_staging(path, shared=request.shared), request.target

    def fill(work: Callable[[Path], Any]) -> Any:
        try:
            return work(staging)
        except FileNotFoundError as error:
            if staging.exists():
                raise
            raise CheckpointError(no_shared_disk(staging, writer_rank)) from error

    # Nothing is written if a rank is in another operation.
    hook_count = max(step("begin", lambda: len(before)))
    writer_rank = writer_rank_of(state, on_each_node, group, operation=f"{operation} (machines)")
    staging, target = step("folder", open_)[writer_rank]
    try:
        for number in range(hook_count):
            step(
                f"hook {number}",
                # B023: it is called at once
                lambda: fill(before[number]) if number < len(before) else None,  # noqa: B023
            )
        written = step("write", lambda: describe_files(staging, fill(write) or ()))
        on_this_disk = [written[state.process_index]] if on_each_node else written
        described = {name: entry for files in on_this_disk for name, entry in files.items()}
        step("commit", lambda: commit(staging, path, manifest(), described) if is_writer else None)
    except (CheckpointError, DistributedOperationException):
        if is_writer:
            discard(staging)
        raise
    if is_writer:
        _link_and_remove(path, request)
    return target


def no_shared_disk(staging: Path, writer_rank: int) -> str:
    """Return the error message for a rank that cannot see the writer rank's staging folder."""
    return (
        f"{staging}, which rank {writer_rank} has created, does not exist on "
        f"{socket.gethostname()}. If the machines share no disk, save on each of them: "
        "project_config=ProjectConfiguration(save_on_each_node=True). If they share one, give a "
        "folder on it, under the same path on all machines"
    )


def _link_and_remove(target: Path, request: SaveRequest) -> None:
    """Point links to a committed checkpoint, then remove the checkpoints that it displaces."""
    for link_path in (path for path, wanted in request.links.items() if wanted):
        link_or_warn(target, link_path)
    if request.mirror is not None:
        request.mirror.committed(target, request.displaces)
    for displaced in request.displaces:
        remove_or_warn(displaced)
    for link_path in (path for path, wanted in request.links.items() if not wanted):
        if link_path.is_symlink() and not link_path.exists():
            link_path.unlink(missing_ok=True)


def link_or_warn(target: Path, name: Path) -> None:
    """Link another name to a checkpoint; a failure is only logged."""
    try:
        link(target, name)
    except OSError as error:
        logger.warning("%s could not be linked as %s: %s.", target, name, error)


def remove_or_warn(path: Path) -> None:
    """Delete an obsolete checkpoint; a failure is only logged, so that the run continues."""
    try:
        if path.exists():  # otherwise someone else deleted it
            remove(path)
    except (CheckpointError, OSError) as error:
        logger.warning("An old checkpoint was not removed: %s", error)


def check_space(folder: Path, needs: int) -> None:
    """Check that ``needs`` bytes can be written to a folder, which may not exist yet.

    Raises:
        CheckpointError: The folder is not writable, or too few bytes are free.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {existing} is not a folder that this user "
            "can write to. Give another project_dir or dirpath."
        )
    free = shutil.disk_usage(existing).free
    if free < needs:
        raise CheckpointError(
            f"a checkpoint takes {needs / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free in "
            f"{existing}. {_FREE_SPACE}"
        )
