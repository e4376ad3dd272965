"""What a process goes on from of what each one that saved an `Accelerator`'s state wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import gradients
from trainer.checkpoint.tensors import load_tree
from trainer.errors import CheckpointError
from trainer.strategies.communication import for_processes


def name_of(rank: int) -> str:
    """The stem of a rank's own file."""
    return f"random_states_{rank}"


def gradients_of(
    path: Path,
    own: dict[str, Any] | None,
    first: dict[str, Any],
    rank: int,
    saved_by: int,
    here: int,
) -> dict[str, torch.Tensor] | None:
    """This rank's gradients, or what stands for those of another number of processes."""
    if (own or first).get("gradients") is None:
        return None
    if own is not None and saved_by == here:
        return gradients.given([own["gradients"]], 0, 1)
    ranks = _every_rank(path, saved_by, "inside a window of micro-batches", "their gradients")
    return gradients.given([each["gradients"] for each in ranks], rank, here)


def communication_of(
    path: Path,
    own: dict[str, Any] | None,
    first: dict[str, Any],
    rank: int,
    saved_by: int,
    here: int,
) -> list[dict[str, Any]]:
    """This rank's states of the communication hooks, or what stands for those of others."""
    if saved_by == here or not first.get("communication"):
        states: list[dict[str, Any]] = (own or first).get("communication", [])
        return states
    ranks = _every_rank(path, saved_by, "with a communication hook", "its state on each")
    by_hook = zip(*(each["communication"] for each in ranks), strict=True)
    return [for_processes(states, rank, here) for states in by_hook]


def _every_rank(path: Path, saved_by: int, how: str, what: str) -> list[dict[str, Any]]:
    """What each rank has saved of its own."""
    files = [path / f"{name_of(rank)}.json" for rank in range(saved_by)]
    if missing := [file.name for file in files if not file.exists()]:  # on another machine's disk
        raise CheckpointError(
            f"{path} was saved {how} by {saved_by} processes, and {', '.join(missing)} with {what} "
            f"are not here. Load it with {saved_by} processes."
        )
    return [load_tree(path, file.stem) for file in files]
