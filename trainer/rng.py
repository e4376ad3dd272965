"""Random number generators: seeds, their states, and stretches of code that leave them alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A seed of 63 bits from several numbers; near inputs give unrelated seeds.

    Each number passes through the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1  # torch takes seeds up to 2**63 - 1 everywhere


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators.

    Args:
        seed: From 0 to 2**32 - 1, the range that numpy takes.
        device_specific: Give every process a seed of its own, ``seed + process_index``.
        deterministic: Make torch refuse operations that have no deterministic form.

    Raises:
        ValueError: The seed is outside the range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must lie between 0 and 2**32 - 1.")
    if device_specific:
        from trainer.state import PartialState

        seed = (seed + PartialState().process_index) % 2**32
    seed_generators(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_generators(seed: int) -> None:
    """Seed the global generators; numpy only if something has loaded it."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def rng_state() -> dict[str, Any]:
    """The state of every global generator of this process, to be given to `load_rng_state`."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on outside as if nothing had been."""
    state = rng_state()
    try:
        yield
    finally:
        load_rng_state(state)


def seeded_iteration(iterable: Iterable[T], seed: int) -> Iterator[T]:
    """Iterate with global generators of its own, seeded with `seed`.

    For iterators that draw from the global generators whenever they please: they then yield the
    same on every process, and leave the caller's generators alone.
    """
    iterator = None
    inside: dict[str, Any] | None = None
    while True:
        with isolated_rng():
            if inside is None:
                seed_generators(seed)
            else:
                load_rng_state(inside)
            iterator = iter(iterable) if iterator is None else iterator
            try:
                value = next(iterator)
            except StopIteration:
                return
            inside = rng_state()
        yield value
