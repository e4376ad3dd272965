"""Save a checkpoint on all ranks."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint.jointly import Ranks, keeper_of, keeps, together
from trainer.checkpoint.layout import commit, discard, open_staging, remove
from trainer.errors import CheckpointError, DistributedOperationException

logger = logging.getLogger(__name__)


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
        write_shared: Called with the staging folder on the writer ranks.
        write_rank: Called with the staging folder on every rank, after ``write_shared``. The names
            of its files must contain the rank (:func:`trainer.checkpoint.rank_stem`).
        manifest: Fields for the manifest, taken from the writer rank.
        state: The ranks.
        group: The process group of the collectives. A background save needs its own group, since
            its collectives would mix with those of training.
        on_each_node: The machines share no disk, so each keeps a complete checkpoint.
        needs: The number of bytes that will be written to a disk; they must be free.
        displaces: Checkpoints to remove after the commit. A failure to remove one is logged.

    Returns:
        The checkpoint; every rank returns only after it is committed.

    Raises:
        CheckpointError: If any rank failed; raised on every rank, and the message names the ranks.
            Nothing is then committed, and ``target`` is unchanged. One exception: if each machine
            has its own disk and only the commit on one of them failed, the other machines have
            committed.
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
        if path.exists():  # otherwise it was deleted by somebody else
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
