"""Save and choose checkpoints on all ranks: each step succeeds on all ranks or fails on all.

Most functions here are collective: all ranks call them, in the same order. Either all ranks share
one disk and rank 0 writes the checkpoints, or each machine has its own disk and its first rank
writes there.
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
    open_staging,
    remove,
    step_of,
    without_manifest,
)
from trainer.checkpoint.manifest import is_newer, peek, read_manifest, verify
from trainer.distributed.meeting import parted, share
from trainer.errors import CheckpointError, DistributedOperationException, LaterReleaseError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT = "checkpoint"  # the operation's name in errors, where no public name is known


class Ranks(Protocol):
    """The required attributes of the processes; ``PartialState`` has them."""

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
        """Make the rank's device the current one of the calling thread."""


def keeps(state: Ranks, on_each_node: bool) -> bool:
    """Return whether this rank writes and removes the checkpoints on its disk."""
    return state.is_local_main_process if on_each_node else state.is_main_process


def keeper_of(
    state: Ranks,
    on_each_node: bool,
    group: dist.ProcessGroup | None = None,
    *,
    operation: str = CHECKPOINT,
) -> int:
    """Return the rank that writes the checkpoints on this rank's disk.

    With ``on_each_node`` this is collective: launchers assign ranks in any order, for example
    SLURM's ``--distribution=cyclic`` one to each machine in turn.

    Args:
        state: The ranks.
        on_each_node: The machines share no disk.
        group: The process group of the collectives.
        operation: See :func:`together`.

    Raises:
        CheckpointError: If a machine has no local rank 0; raised on every rank.
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
            "there. Make the launcher set LOCAL_RANK, as torchrun does."
        )
    host, _ = homes[state.process_index]
    firsts = [rank for rank, home in enumerate(homes) if home == (host, 0)]
    # Machines may share a host name (containers do); their ranks are then consecutive.
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
        write_shared: Called with the staging folder on the ranks that write checkpoints.
        write_rank: Called with the staging folder on every rank, after ``write_shared``. Its files'
            names contain the rank (:func:`trainer.checkpoint.rank_stem`).
        manifest: Fields for the manifest, taken from the rank that writes it.
        state: The ranks.
        group: The process group of the collectives. A background save needs its own group, since
            its collectives would mix with those of training.
        on_each_node: The machines share no disk: each keeps a checkpoint.
        needs: Bytes that will be written to a disk; they must be free.
        displaces: Checkpoints to remove after the commit. A failure to remove one is logged.

    Returns:
        The checkpoint; every rank returns only after it is committed.

    Raises:
        CheckpointError: If any rank failed; raised on every rank, and the message names the ranks.
            Nothing is committed then, and ``target`` is unchanged, except that if each machine has
            its own disk and only a commit failed, the other machines have committed.
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
                f"{staging.absolute()}, which rank {first} has created, does not exist on "
                f"{socket.gethostname()}. If machines share no disk, let each keep checkpoints: "
                "project_config=ProjectConfiguration(save_on_each_node=True). If they do, give a "
                "folder on it, by a path that is the same on all machines"
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
    """Delete an obsolete checkpoint; a failure is only logged, so that the run continues."""
    try:
        remove(path)
    except (CheckpointError, OSError):
        logger.warning("An old checkpoint was not removed.", exc_info=True)


def require_space(folder: Path, needs: int) -> None:
    """Check that ``needs`` bytes can be written to a folder, which may not exist yet.

    Raises:
        CheckpointError: The folder is not writable, or too few bytes are free.
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
    """Return the newest intact checkpoint of a run, alike on all ranks; collective.

    The candidates are read in full and verified, newest first, until one is intact (on all
    machines, if each has its own disk). Damage is logged as a warning. A later release's checkpoint
    is not skipped as damaged: resuming from an older one would discard training. Checkpoints of
    weights only are left out. Call :func:`trainer.checkpoint.sweep` first.

    Args:
        root: The folder of checkpoints.
        state: The ranks.
        group: The process group of the collectives.
        on_each_node: The machines share no disk.

    Returns:
        The checkpoint, on all ranks in rank 0's `root` unless the machines share no disk, or None
        if there are no checkpoints.

    Raises:
        CheckpointError: If there are checkpoints but none is intact, since starting from scratch
            would discard a run; raised on every rank.
        LaterReleaseError: If a later release wrote a newer checkpoint; raised on every rank.
    """
    keeper, what = keeps(state, on_each_node), f"Choosing a checkpoint in {root}"

    def list_() -> dict[int, tuple[Path, Any]]:
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
        path, _ = listed[first][step]  # of rank 0, whose working directory may be another one
        if on_each_node:
            path = root / path.name
        verdicts = together(what, lambda: _verdict(path) if keeper else None, state, group)  # noqa: B023
        if later := [verdict for verdict in verdicts if verdict and not verdict.damaged]:
            raise LaterReleaseError(
                f"{what} failed: {later[0].text} To resume from an older checkpoint anyway, pass "
                "its path."
            )
        if not any(verdicts):
            return path
    if some:
        several = len(listed) > 1
        raise CheckpointError(
            f"{what} failed: none of the {len(some)} checkpoints there is intact"
            f"{' on every machine' if several else ''} (the log says what is wrong with each). "
            f"{'Copy one to the machines that lack it, or move' if several else 'Move'} them away "
            "to start a new run."
        )
    return None


def holds_weights_only(path: Path) -> bool:
    """Return whether a checkpoint holds only weights, from which no run can be resumed."""
    try:
        return bool(read_manifest(path).get("weights_only", False))
    except CheckpointError:
        return False  # damaged: reported when it is used


def refuse_weights_alone(
    roots: Iterable[Path], state: Ranks, *, instead: str, on_each_node: bool = False
) -> None:
    """Raise if there are checkpoints of weights only, for use if no other was found; collective.

    Args:
        roots: The folders of checkpoints.
        state: The ranks.
        instead: The advice at the end of the message.
        on_each_node: The machines share no disk.

    Raises:
        CheckpointError: If there is such a checkpoint; raised on every rank.
    """

    def find() -> list[Path]:
        here = (path for root in roots for path in committed(root))
        return [path for path in here if keeps(state, on_each_node) and holds_weights_only(path)]

    lists = together("Looking for checkpoints", find, state)
    if found := [path for paths in lists for path in paths]:
        raise CheckpointError(
            f"{found[-1]} holds only weights (save_weights_only=True), as do all checkpoints "
            f"there; no run can be resumed from them. {instead}"
        )


def refuse_together(
    check: Callable[[], object], state: Ranks, *, here: bool, operation: str = CHECKPOINT
) -> None:
    """Check the user's input on some ranks, and raise on all ranks if one refuses it; collective.

    Args:
        check: Raises a ``ValueError`` to refuse.
        state: The ranks.
        here: Whether this rank checks.
        operation: See :func:`together`.

    Raises:
        ValueError: If any rank refused; raised on every rank.
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
    """Return how a checkpoint differs between the disks; None if it is the same on all.

    Args:
        step: The checkpoint's step.
        listed: For each rank that writes checkpoints, the path and run id by step.
    """
    if lacking := [str(rank) for rank, here in listed.items() if step not in here]:
        return f"the machine of rank {', '.join(lacking)} does not have it"
    runs = {rank: here[step][1] for rank, here in listed.items()}
    if len(set(runs.values()) - {None}) > 1:  # None: a damaged one, whose run is unknown
        told = ", ".join(f"that of rank {rank} from {run_id}" for rank, run_id in runs.items())
        return f"the machines have it from different runs ({told})"
    return None


class _Verdict(NamedTuple):
    """The reason why a checkpoint is not used."""

    text: str
    damaged: bool  # False: a later release wrote it


def _verdict(path: Path) -> _Verdict | None:
    """Return why a checkpoint cannot be used, and log damage; None if it is intact."""
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
    """Run ``work`` on each rank and return all ranks' results; if one fails, raise on all.

    Args:
        what: A description of the action, which begins the error message.
        work: This rank's part. Its result is sent to the other ranks and must be picklable.
        state: The ranks.
        group: The process group of the collectives.
        operation: The function that users called and, in parentheses, its step; the same on all
            ranks.

    Raises:
        CheckpointError: Some rank failed; raised on every rank, with each failed rank's error.
        DistributedOperationException: A rank called another operation; raised on every rank.
    """
    outcome: tuple[T | None, str | None]
    cause, payload = None, b""
    try:
        outcome = work(), None
        if state.num_processes > 1:
            payload = pickle.dumps(outcome)
    except Exception as error:  # of any type: the other ranks are waiting for the outcome
        if parted(error, operation):
            raise
        cause = error
        outcome = None, _told(error)
        payload = pickle.dumps(outcome)
    outcomes: list[Any] = [outcome]
    if state.num_processes > 1:
        payloads = share(operation, payload, group)
        outcomes = [pickle.loads(each) for each in payloads]  # noqa: S301 - from this run's ranks
    told: dict[str, list[str]] = {}  # each text once: a hundred ranks may have the same
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
            f"{error!r}. The disk is full or its quota is exhausted; earlier checkpoints are "
            "unchanged. Free some space, or keep fewer: ModelCheckpoint(save_top_k=…)"
        )
    return repr(error)
