"""Saving and choosing checkpoints on all ranks together: each step succeeds on all or fails on all.

Every function here is collective: all ranks call it, in the same order. Either they share one disk,
and rank 0 keeps the checkpoints, or each machine has its own, and the first rank of each does.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from trainer.checkpoint.layout import (
    commit,
    committed,
    discard,
    is_newer,
    open_staging,
    peek,
    read_manifest,
    remove,
    step_of,
    verify,
    without_manifest,
)
from trainer.distributed.meeting import parted, share
from trainer.errors import CheckpointError, DistributedOperationException, LaterReleaseError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT = "checkpoint"  # what is said to be called where no public name is known


class Ranks(Protocol):
    """What is needed to know of the processes; ``PartialState`` has it."""

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
        """How many ranks there are."""


def keeps(state: Ranks, on_each_node: bool) -> bool:
    """Whether this rank keeps the checkpoints of its disk."""
    return state.is_local_main_process if on_each_node else state.is_main_process


def keeper_of(
    state: Ranks,
    on_each_node: bool,
    group: dist.ProcessGroup | None = None,
    *,
    operation: str = CHECKPOINT,
) -> int:
    """The rank that keeps the checkpoints of this rank's disk.

    Where each machine has a disk of its own this is collective: launchers give out ranks in any
    order, SLURM's ``--distribution=cyclic`` for example one to each machine in turn.

    Args:
        state: The ranks.
        on_each_node: The machines share no disk.
        group: The process group to agree over.
        operation: See :func:`together`.

    Raises:
        CheckpointError: On every rank alike, if a machine has no rank that is its first one.
    """
    if not on_each_node or state.num_processes == 1:
        return 0
    homes = together(
        "Finding the processes of each machine",
        lambda: (socket.gethostname(), state.local_process_index),
        state,
        group,
        operation=operation,
    )
    if lacking := {host for host, _ in homes} - {host for host, local in homes if local == 0}:
        raise CheckpointError(
            f"No process on {', '.join(sorted(lacking))} has the local rank 0, so none would save "
            "there. Let the launcher set LOCAL_RANK, as torchrun does."
        )
    host, _ = homes[state.process_index]
    firsts = [rank for rank, home in enumerate(homes) if home == (host, 0)]
    # Machines may bear one name (containers do); then their ranks follow each other.
    before = [rank for rank in firsts if rank <= state.process_index]
    return before[-1] if before else firsts[0]


def save_checkpoint(
    target: Path,
    *,
    write_shared: Callable[[Path], object],
    write_rank: Callable[[Path], object],
    manifest: Mapping[str, Any],
    state: Ranks,
    group: dist.ProcessGroup | None = None,
    on_each_node: bool = False,
    needs: int = 0,
    displaces: Iterable[Path] = (),
) -> Path:
    """Save a checkpoint on all ranks and commit it once every rank has written its part.

    Args:
        target: The checkpoint's path; a checkpoint there is replaced.
        write_shared: Called on the ranks that keep checkpoints with the staging folder.
        write_rank: Called on every rank with the staging folder, after ``write_shared``. Its files'
            names hold the rank (:func:`trainer.checkpoint.rank_stem`).
        manifest: Fields for the manifest; those of the rank that keeps it are written.
        state: The ranks.
        group: The process group to agree over. A save in the background needs one of its own, since
            the collectives of training would mix with these.
        on_each_node: The machines share no disk: each keeps a checkpoint.
        needs: Bytes that will be written to a disk; they must be free.
        displaces: Checkpoints to remove after the commit. What cannot be removed is told in the
            log.

    Returns:
        The committed checkpoint, on every rank and not before it is committed.

    Raises:
        CheckpointError: On every rank alike, if any rank failed; the text names the rank. Nothing
            is committed then, and what was at ``target`` is still there; but where each machine has
            its disk and only the commit failed, the others have committed.
    """
    keeper = keeps(state, on_each_node)

    def open_() -> Path:
        if not keeper:
            return target
        require_space(target.parent, needs)
        return open_staging(target)

    def write() -> None:
        if keeper:
            write_shared(staging)
        try:
            write_rank(staging)
        except FileNotFoundError as error:
            if staging.exists():
                raise
            raise CheckpointError(
                f"{staging.absolute()}, which rank {first} has made, is not there on "
                f"{socket.gethostname()}. Where machines share no disk, let each keep checkpoints: "
                "project_config=ProjectConfiguration(save_on_each_node=True). Where they do, give "
                "a folder on it, by a path that means the same to all"
            ) from error

    what = f"Saving {target}"
    first = keeper_of(state, on_each_node, group)
    staging = together(what, open_, state, group)[first]
    try:
        together(what, write, state, group)
        together(what, lambda: commit(staging, target, manifest) if keeper else None, state, group)
    except (CheckpointError, DistributedOperationException):
        if keeper:
            discard(staging)
        raise
    for path in displaces if keeper else ():
        remove_or_tell(path)
    return target


def remove_or_tell(path: Path) -> None:
    """Delete a checkpoint that is not wanted any more; failing, told in the log, costs no run."""
    try:
        remove(path)
    except (CheckpointError, OSError):
        logger.warning("An old checkpoint was not removed.", exc_info=True)


def require_space(folder: Path, needs: int) -> None:
    """See that so many bytes can be written where a folder is, or will be made.

    Raises:
        CheckpointError: They cannot.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {there} is not a folder that this user "
            "may write to. Change its permissions, or give another project_dir or dirpath."
        )
    free = shutil.disk_usage(there).free
    if free < needs:
        raise CheckpointError(
            f"a checkpoint takes {needs / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free in "
            f"{there}. Free some space, or keep fewer checkpoints: ModelCheckpoint(save_top_k=…)"
        )


def newest_sound(
    root: Path,
    state: Ranks,
    *,
    group: dist.ProcessGroup | None = None,
    on_each_node: bool = False,
) -> Path | None:
    """The newest checkpoint of a run whose every byte is as it was written; alike on all ranks.

    The candidates are read in full, newest first, until one is sound; where each machine has its
    disk, one that all have. Damage is told in a warning of the log. A later release's is no damage:
    to go back behind it would throw away what it has trained. Folders that hold weights alone are
    left out. Call :func:`trainer.checkpoint.sweep` before.

    Args:
        root: The folder of checkpoints.
        state: The ranks.
        group: The process group to agree over.
        on_each_node: The machines share no disk.

    Returns:
        The checkpoint, or None where there is none at all.

    Raises:
        CheckpointError: On every rank alike, if there are checkpoints but none is sound: to start
            from nothing then would throw a run away.
        LaterReleaseError: On every rank alike, if a later release has written a newer one.
    """
    keeper, what = keeps(state, on_each_node), f"Choosing a checkpoint in {root}"

    def list_() -> dict[int, tuple[Path, Any]] | None:
        for path in without_manifest(root) if keeper else ():
            logger.warning("%s is not used: it has no manifest.json, so it is damaged.", path)
        here = [path for path in committed(root) if not holds_weights_only(path)]
        return {step_of(path) or 0: (path, peek(path).get("run_id")) for path in here}

    first = keeper_of(state, on_each_node, group)
    found = together(what, lambda: list_() if keeper else None, state, group)
    listed = {rank: each for rank, each in enumerate(found) if each is not None}
    some = set[int]().union(*listed.values())
    for step in sorted(some, reverse=True):
        if problem := _differs(step, listed):
            if state.is_main_process:
                logger.warning("Step %d of %s is not used: %s.", step, root, problem)
            continue
        path, _ = listed[first][step]
        verdicts = together(what, lambda: _verdict(path) if keeper else None, state, group)  # noqa: B023
        if later := [verdict for verdict in verdicts if verdict and not verdict.damaged]:
            raise LaterReleaseError(
                f"{what} failed: {later[0].text} To go on from an older checkpoint all the same, "
                "pass its path."
            )
        if not any(verdicts):
            return path
    if some:
        several = len(listed) > 1
        raise CheckpointError(
            f"{what} failed: none of the {len(some)} checkpoints there is sound"
            f"{' on every machine' if several else ''} (the log says what is wrong with each). "
            f"{'Copy one to the machines that lack it, or move' if several else 'Move'} them away "
            "to start anew."
        )
    return None


def holds_weights_only(path: Path) -> bool:
    """Whether a checkpoint was saved without what a run needs to go on."""
    try:
        return bool(read_manifest(path).get("weights_only", False))
    except CheckpointError:
        return False  # damaged: whoever wants to use it will be told


def refuse_weights_alone(
    roots: Iterable[Path], state: Ranks, *, instead: str, on_each_node: bool = False
) -> None:
    """Tell that there is nothing but checkpoints of weights, from which no run goes on; collective.

    Args:
        roots: The folders of checkpoints.
        state: The ranks.
        instead: What to do.
        on_each_node: The machines share no disk.

    Raises:
        CheckpointError: On every rank alike, if there are such.
    """

    def find() -> list[Path]:
        here = (path for root in roots for path in committed(root))
        return [path for path in here if keeps(state, on_each_node) and holds_weights_only(path)]

    lists = together("Looking for checkpoints", find, state)
    if found := [path for paths in lists for path in paths]:
        raise CheckpointError(
            f"{found[-1]} holds weights alone (save_weights_only=True), as do all checkpoints "
            f"there; no run can go on from them. {instead}"
        )


def refuse_together(
    check: Callable[[], object], state: Ranks, *, here: bool, operation: str = CHECKPOINT
) -> None:
    """Check the user's input where it can be checked; what is refused there is refused everywhere.

    Args:
        check: Raises a ``ValueError`` to refuse.
        state: The ranks.
        here: Whether this rank checks.
        operation: See :func:`together`.

    Raises:
        ValueError: On every rank alike, if any refused.
    """

    def refusal() -> str | None:
        try:
            if here:
                check()
        except ValueError as error:
            return str(error)
        return None

    refusals = together("Checking the arguments", refusal, state, operation=operation)
    if refused := [text for text in refusals if text]:
        raise ValueError(refused[0])


def _differs(step: int, listed: Mapping[int, Mapping[int, tuple[Path, Any]]]) -> str | None:
    """Why a checkpoint is not the same on all disks; None if it is, or there is one disk.

    Args:
        step: Its step.
        listed: What each rank that keeps checkpoints has, by step: its path and its run's id.
    """
    if lacking := [str(rank) for rank, here in listed.items() if step not in here]:
        return f"the machine of rank {', '.join(lacking)} does not have it"
    runs = {rank: here[step][1] for rank, here in listed.items()}
    if len(set(runs.values()) - {None}) > 1:  # of a damaged one it is not known
        told = ", ".join(f"that of rank {rank} from {run_id}" for rank, run_id in runs.items())
        return f"the machines have it from different runs ({told})"
    return None


class _Verdict(NamedTuple):
    """Why a checkpoint is not used."""

    text: str
    damaged: bool  # else a later release wrote it


def _verdict(path: Path) -> _Verdict | None:
    """None of a sound checkpoint; damage is told in the log."""
    try:
        verify(path)
    except CheckpointError as error:
        damaged = not is_newer(path)
        if damaged:
            logger.warning("%s is not used: %s", path, error)
        return _Verdict(str(error), damaged)
    return None


def together(
    what: str,
    work: Callable[[], T],
    state: Ranks,
    group: dist.ProcessGroup | None = None,
    *,
    operation: str = CHECKPOINT,
) -> list[T]:
    """Each rank's result of ``work``, once all are done; if one failed, its error on all.

    Args:
        what: What is done, to begin the error with.
        work: This rank's part. Its result must be picklable: it travels between the processes.
        state: The ranks.
        group: The process group to agree over.
        operation: What users called, and in parentheses which step of it; the same on all ranks.

    Raises:
        CheckpointError: On every rank alike, naming each rank that failed and its error.
        DistributedOperationException: On every rank alike, if another one called something else.
    """
    outcome: tuple[T | None, str | None]
    cause, payload = None, b""
    try:
        outcome = work(), None
        if state.num_processes > 1:
            payload = pickle.dumps(outcome)
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        if parted(error, operation):
            raise
        cause = error
        outcome = None, _told(error)
        payload = pickle.dumps(outcome)
    outcomes: list[Any] = [outcome]
    if state.num_processes > 1:
        payloads = share(operation, payload, group)
        outcomes = [pickle.loads(each) for each in payloads]  # noqa: S301 - from this run's ranks
    told: dict[str, list[str]] = {}  # the same once: it may be that of a hundred ranks
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            told.setdefault(text.rstrip("."), []).append(str(rank))
    failures = [
        f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
        for text, ranks in told.items()
    ]
    if failures:
        raise CheckpointError(f"{what} failed {'; '.join(failures)}.") from cause
    return [result for result, _ in outcomes]


def _told(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{error!r}. The disk, or the quota on it, is full; earlier checkpoints are as they "
            "were. Free some space, or keep fewer: ModelCheckpoint(save_top_k=…)"
        )
    return repr(error)
