"""Saving and choosing checkpoints on all ranks together: each step succeeds on all or fails on all.

Every function here is collective: all ranks call it, in the same order. They share one disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from trainer.checkpoint.layout import commit, committed, discard, open_staging, verify
from trainer.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ranks(Protocol):
    """What is needed to know of the processes; ``PartialState`` has it."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def num_processes(self) -> int:
        """How many ranks there are."""


def save(
    target: Path,
    *,
    write_shared: Callable[[Path], object],
    write_rank: Callable[[Path], object],
    manifest: Mapping[str, Any],
    state: Ranks,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint on all ranks and commit it once every rank has written its part.

    Args:
        target: The checkpoint's path; a checkpoint there is replaced.
        write_shared: Called on rank 0 with the staging folder.
        write_rank: Called on every rank with the staging folder, on rank 0 after ``write_shared``.
            Its files' names hold the rank (:func:`trainer.checkpoint.rank_stem`).
        manifest: Fields for the manifest; those of rank 0 are written.
        state: The ranks.
        group: The process group to agree over. A save in the background needs one of its own, since
            the collectives of training would mix with these.

    Returns:
        The committed checkpoint, on every rank and not before it is committed.

    Raises:
        CheckpointError: On every rank alike, if any rank failed; the text names the rank. Nothing
            is committed then, and what was at ``target`` is still there.
    """
    main = state.is_main_process

    def write() -> None:
        if main:
            write_shared(staging)
        write_rank(staging)

    what = f"Saving {target}"
    opened = together(what, lambda: open_staging(target) if main else target, state, group)
    staging = opened[0]
    try:
        together(what, write, state, group)
        done = together(
            what, lambda: commit(staging, target, manifest) if main else target, state, group
        )
    except CheckpointError:
        if main:
            discard(staging)
        raise
    return done[0]


def newest_sound(
    root: Path, state: Ranks, *, group: dist.ProcessGroup | None = None
) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; the same on all ranks.

    Rank 0 reads the candidates in full, newest first. A damaged one is told in a warning of the
    log. Call :func:`trainer.checkpoint.sweep` before, on rank 0.

    Args:
        root: The folder of checkpoints.
        state: The ranks.
        group: The process group to agree over.

    Returns:
        The checkpoint, or None where there is none at all.

    Raises:
        CheckpointError: On every rank alike, if there are checkpoints but none is sound: to start
            from nothing then would throw a run away.
    """

    def choose() -> Path | None:
        candidates = committed(root)
        sound = next(filter(_is_sound, reversed(candidates)), None)
        if candidates and sound is None:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints there is sound (the log says what is "
                "wrong with each). Move them away to start anew."
            )
        return sound

    what = f"Choosing a checkpoint in {root}"
    return together(what, lambda: choose() if state.is_main_process else None, state, group)[0]


def refuse_together(check: Callable[[], object], state: Ranks, *, here: bool) -> None:
    """Check the user's input where it can be checked; what is refused there is refused everywhere.

    Args:
        check: Raises a ``ValueError`` to refuse.
        state: The ranks.
        here: Whether this rank checks.

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

    refused = [text for text in together("Checking the arguments", refusal, state) if text]
    if refused:
        raise ValueError(refused[0])


def _is_sound(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError as error:
        logger.warning("%s is not used: %s", path, error)
        return False
    return True


def together(
    what: str, work: Callable[[], T], state: Ranks, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Each rank's result of ``work``, once all are done; if one failed, its error on all.

    Args:
        what: What is done, to begin the error with.
        work: This rank's part. Its result must be picklable: it travels between the processes.
        state: The ranks.
        group: The process group to agree over.

    Raises:
        CheckpointError: On every rank alike, naming each rank that failed and its error.
    """
    outcome: tuple[T | None, str | None]
    cause = None
    try:
        outcome = work(), None
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait to hear of it
        cause = error
        outcome = None, str(error) if isinstance(error, CheckpointError) else repr(error)
    outcomes: list[Any] = [outcome]
    if state.num_processes > 1:
        outcomes = [None] * state.num_processes
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = [
        f"on rank {rank}: {text.rstrip('.')}"
        for rank, (_, text) in enumerate(outcomes)
        if text is not None
    ]
    if failures:
        raise CheckpointError(f"{what} failed {'; '.join(failures)}.") from cause
    return [result for result, _ in outcomes]
