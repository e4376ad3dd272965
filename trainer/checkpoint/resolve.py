"""Choose the checkpoint to resume from, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer.checkpoint.save import Ranks, is_writer_rank, run_on_all_ranks, writer_rank_of
from trainer.checkpoint.storage import (
    committed,
    is_newer,
    read_manifest,
    run_id_of,
    step_of,
    verify,
    without_manifest,
)
from trainer.errors import CheckpointError, LaterReleaseError, module_logger

logger = module_logger(__name__)


def newest_sound(
    root: Path,
    state: Ranks,
    *,
    group: dist.ProcessGroup | None = None,
    on_each_node: bool = False,
    check: Callable[[Path, dict[str, Any]], object] = lambda _, manifest: manifest,
) -> Path | None:
    """Return the newest intact checkpoint of a run, the same on all ranks; collective.

    The checkpoints are read in full and verified, newest first, until one is intact. If each
    machine has its own disk, it must be intact on all of them. A damaged one is skipped with a
    warning. A checkpoint of a later release is an error and is not skipped, because resuming from
    an older one would discard training. Checkpoints of weights only are left out. Call
    :func:`trainer.checkpoint.sweep` first.

    Args:
        root: The folder of checkpoints.
        state: The ranks.
        group: The process group of the collectives.
        on_each_node: The machines share no disk.
        check: Called with a checkpoint whose hashes are correct, and its manifest. It raises a
            CheckpointError if the contents are malformed.

    Returns:
        The checkpoint's path, below the `root` of the writer rank of this rank's disk; None if
        there are no checkpoints.

    Raises:
        CheckpointError: If there are checkpoints but none is intact, since starting from scratch
            would discard a run; raised on every rank.
        LaterReleaseError: If a later release wrote a newer checkpoint; raised on every rank.
    """
    is_writer, what = is_writer_rank(state, on_each_node), f"Choosing a checkpoint in {root}"

    def list_() -> dict[int, tuple[Path, Any]]:
        for path in without_manifest(root) if is_writer else ():
            logger.warning("%s is not used: it has no manifest.json, so it is damaged.", path)
        here = [path for path in committed(root) if not holds_weights_only(path)]
        return {step_of(path) or 0: (path, run_id_of(path)) for path in here}

    first = writer_rank_of(state, on_each_node, group)
    found = run_on_all_ranks(what, lambda: list_() if is_writer else None, state, group)
    listed = {rank: each for rank, each in enumerate(found) if each is not None}
    some = set[int]().union(*listed.values())
    for step in sorted(some, reverse=True):
        if problem := _differs(step, listed):
            if state.is_main_process:
                logger.warning("Step %d of %s is not used: %s.", step, root, problem)
            continue
        path, _ = listed[first][step]  # the writer rank's path: working directories may differ
        verdicts = run_on_all_ranks(
            what,
            lambda: _verdict(path, check) if is_writer else None,  # noqa: B023 - called at once
            state,
            group,
        )
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
    """Return whether a checkpoint holds only weights, so that no run can resume from it."""
    try:
        return bool(read_manifest(path).get("weights_only", False))
    except CheckpointError:
        return False  # damaged, which is reported when it is used


def check_not_weights_only(
    roots: Iterable[Path], state: Ranks, *, instead: str, on_each_node: bool = False
) -> None:
    """Raise if the only checkpoints hold weights alone; call it if no full one exists; collective.

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
        return [
            path
            for path in here
            if is_writer_rank(state, on_each_node) and holds_weights_only(path)
        ]

    lists = run_on_all_ranks("Looking for checkpoints", find, state)
    if found := [path for paths in lists for path in paths]:
        raise CheckpointError(
            f"{found[-1]} holds only weights (save_weights_only=True), as do all checkpoints "
            f"there; no run can be resumed from them. {instead}"
        )


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
        listing = ", ".join(f"that of rank {rank} from {run_id}" for rank, run_id in runs.items())
        return f"the machines have it from different runs ({listing})"
    return None


class _Verdict(NamedTuple):
    """Why a checkpoint is not used."""

    text: str
    damaged: bool  # False: a later release wrote it


def _verdict(path: Path, check: Callable[[Path, dict[str, Any]], object]) -> _Verdict | None:
    """Return why a checkpoint cannot be used, and log damage; None if it is intact."""
    try:
        check(path, verify(path))
    except CheckpointError as error:
        damaged = not is_newer(path)
        if damaged:
            logger.warning("%s is not used: %s", path, error)
        return _Verdict(str(error), damaged)
    return None
