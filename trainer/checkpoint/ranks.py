"""Read the per-rank files of an `Accelerator`'s state, also with a changed number of processes."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import gradients
from trainer.checkpoint.tensors import load_tree
from trainer.errors import CheckpointError
from trainer.strategies.communication import for_processes

FILE = re.compile(r"random_states_\d+\.json")


def name_of(rank: int) -> str:
    """Return the stem of a rank's own file."""
    return f"random_states_{rank}"


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A rank that loads a state, and the per-rank state that it has read.

    Attributes:
        path: The checkpoint.
        files: The names of its files.
        own: The state saved by the same rank or, if fewer ranks saved, by another rank. Earlier
            releases saved neither gradients nor states of communication hooks.
        rank: The rank.
        saved_by: The number of processes that saved.
        here: The number of processes that load.
    """

    path: Path
    files: Container[str]
    own: dict[str, Any]
    rank: int
    saved_by: int
    here: int


def gradients_of(it: Loading) -> dict[str, torch.Tensor] | None:
    """Return this rank's gradients; with a changed number of processes, the mean of all ranks'."""
    if it.own.get("gradients") is None:
        return None
    if it.saved_by == it.here:
        return gradients.given([it.own["gradients"]], 0, 1)
    ranks = _every_rank(it, "before an update", "their gradients")
    return gradients.given([each["gradients"] or {} for each in ranks], it.rank, it.here)


def communication_of(it: Loading) -> list[dict[str, Any]]:
    """Return this rank's communication hook states, converted for the number of processes."""
    own: list[dict[str, Any]] = it.own.get("communication", [])
    if it.saved_by == it.here or not own:
        return own
    ranks = _every_rank(it, "with a communication hook", "its state on each")
    by_hook = zip(*(each["communication"] for each in ranks), strict=True)
    return [for_processes(states, it.rank, it.here) for states in by_hook]


def _every_rank(it: Loading, how: str, what: str) -> list[dict[str, Any]]:
    """Return the per-rank state of every rank that saved."""
    path, saved_by = it.path, it.saved_by
    stems = [name_of(rank) for rank in range(saved_by)]
    missing = [f"{stem}.json" for stem in stems if f"{stem}.json" not in it.files]
    if missing:  # they are on another machine's disk
        raise CheckpointError(
            f"{path} was saved {how} by {saved_by} processes, and {', '.join(missing)} with {what} "
            f"are missing here. Load it with {saved_by} processes."
        )
    return [load_tree(path, stem, it.files) for stem in stems]
