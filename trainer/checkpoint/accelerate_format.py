"""Read folders written by accelerate's ``save_state`` (0.31 to 1.x), without running their code.

::

    model.safetensors or pytorch_model.bin          model_1.safetensors …
    optimizer.bin  scheduler.bin  scaler.pt         optimizer_1.bin …
    custom_checkpoint_0.pkl
    random_states_0.pkl                             for each rank

Two files are not loaded, with a warning: ``sampler.bin`` holds pickled sampler objects, and
``dl_state_dict.bin`` holds positions of torchdata's loaders, which do not apply to our loaders.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.loading import read_torch_file
from trainer.checkpoint.weights import CONVERTS, load_weights
from trainer.errors import CheckpointError

_STATE = re.compile(r"(optimizer|scheduler)(_\d+)?\.bin|(custom_checkpoint|random_states)_\d+\.pkl")
_RANK = re.compile(r"random_states_(\d+)\.pkl")
_LOST = re.compile(r"(sampler|dl_state_dict)(_\d+)?\.bin")


def recognised(path: Path) -> bool:
    """Return whether a folder without a manifest was written by accelerate."""
    return path.is_dir() and any(_STATE.fullmatch(file.name) for file in path.iterdir())


def read(path: Path, rank: int, local_rank: int) -> dict[str, Any]:
    """Read a folder into memory; return the fields of `accelerator_state.Stored`.

    Args:
        path: The folder.
        rank: The rank whose RNG states to read.
        local_rank: The index of this rank's accelerator on its machine.

    Raises:
        CheckpointError: If it holds shards of FSDP, or if a file is damaged or holds objects that
            are not plain values; the message names it.
    """
    if sharded := sorted(file.parent for file in path.glob("*/.metadata")):
        raise CheckpointError(
            f"{path} holds a sharded model in torch.distributed.checkpoint's format "
            f"({', '.join(part.name for part in sharded)}), whose .metadata is a pickle: reading "
            "it can run any code. If you trust it, let torch convert the weights: "
            f"{CONVERTS.format(path / 'pytorch_model_fsdp_0')}, and load them before prepare: "
            "load_checkpoint_in_model(model, 'weights.bin'). The optimizers start fresh."
        )
    ranks = sorted(
        int(match[1]) for file in path.iterdir() if (match := _RANK.fullmatch(file.name))
    )
    if ranks and rank not in ranks and rank < ranks[-1]:
        raise CheckpointError(f"{_random_states_file(path, rank)} is missing.")
    states = _random_states(path, rank) if rank in ranks else None
    first = _random_states(path, ranks[0]) if ranks and states is None else states
    files = {
        "optimizers": _numbered(path, "optimizer"),
        "schedulers": _numbered(path, "scheduler"),
        "custom_objects": [
            path / f"custom_checkpoint_{number}.pkl"
            for number in range(len(list(path.glob("custom_checkpoint_*.pkl"))))
        ],
    }
    scaler = [path / "scaler.pt"] if (path / "scaler.pt").exists() else []
    return {
        "weights": [_read_model(path, number) for number in range(_count_models(path))],
        "trees": {
            file.stem: read_torch_file(file)
            for file in (*chain.from_iterable(files.values()), *scaler)
        },
        "counts": {kind: len(numbered) for kind, numbered in files.items()},
        "own": {"step": (first or {}).get("step", 0), "gradients": None}
        | ({"rng": _generators(states, local_rank)} if states else {}),
        "first_rng": _generators(first, local_rank),
        "lost": [
            f"{file.name} holds the state of a sampler or loader, which cannot be loaded: the "
            "loader prepared here starts from the beginning. Use skip_first_batches to resume "
            "inside a pass."
            for file in sorted(path.iterdir())
            if _LOST.fullmatch(file.name)
        ],
    }


def _read_model(path: Path, number: int) -> dict[str, torch.Tensor]:
    """Read the weights of one model, preferring safetensors to ``torch.save``'s file."""
    suffix = f"_{number}" if number else ""
    safe = path / f"model{suffix}.safetensors"
    if safe.exists():
        return load_weights(safe)
    weights: dict[str, torch.Tensor] = read_torch_file(path / f"pytorch_model{suffix}.bin")
    return weights


def _count_models(path: Path) -> int:
    number = 0
    while any(
        (path / name.format(f"_{number}" if number else "")).exists()
        for name in ("model{}.safetensors", "pytorch_model{}.bin")
    ):
        number += 1
    return number


def _numbered(path: Path, name: str) -> list[Path]:
    files = [path / f"{name}.bin"]
    while files[-1].exists():
        files.append(path / f"{name}_{len(files)}.bin")
    return files[:-1]


def _random_states_file(path: Path, rank: int) -> Path:
    return path / f"random_states_{rank}.pkl"


def _random_states(path: Path, rank: int) -> dict[str, Any]:
    states: dict[str, Any] = read_torch_file(_random_states_file(path, rank))
    return states


def _generators(states: dict[str, Any] | None, local_rank: int) -> dict[str, Any] | None:
    """Return the RNG states under the names of `trainer.rng.rng_state`."""
    if states is None:
        return None
    rng = {"python": states["random_state"], "torch": states["torch_manual_seed"]}
    if "numpy_random_seed" in states:
        rng["numpy"] = states["numpy_random_seed"]
    cuda = states.get("torch_cuda_manual_seed") or []
    if local_rank < len(cuda):
        rng["cuda"] = cuda[local_rank]
    return rng
