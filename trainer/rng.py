"""Random number generators: seeding, saving and restoring states, and isolating blocks of code."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

import numpy
import torch

from trainer.choices import RNGType
from trainer.distributed.collectives import broadcast
from trainer.errors import choose
from trainer.generators import (
    devices,
    set_devices_aside,
    set_numpy_aside,
    set_python_aside,
    set_torch_aside,
    started,
)
from trainer.state import PartialState

T = TypeVar("T")
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a 63-bit seed from several numbers; similar inputs give unrelated seeds.

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
    """Seed Python's, numpy's and torch's generators, on every kind of device.

    Args:
        seed: From 0 to 2**32 - 1, the range that numpy takes.
        device_specific: Give every process a different seed, ``seed + process_index``.
        deterministic: Make torch raise for operations without a deterministic implementation.

    Raises:
        ValueError: The seed is outside the range.
        TypeError: The seed is not an integer.
    """
    if not isinstance(seed, Integral):
        raise TypeError(f"seed is {seed!r}; it must be an integer between 0 and 2**32 - 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must lie between 0 and 2**32 - 1.")
    seed = int(seed)  # Python's generator does not take numpy integers
    if device_specific:
        seed = (seed + PartialState().process_index) % 2**32
    seed_generators(seed)
    PartialState._shared_state.pop("_seeds_taken", None)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_generators(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def next_seed(*place: int) -> int:
    """Return a seed for a new private generator: torch's seed first, then ones derived from it.

    The count restarts after `set_seed`, with another seed, and for a new `Accelerator`: a restarted
    script gets the same seeds.

    Args:
        *place: The key under which calls are counted; each key has its own sequence.
    """
    seed = torch.initial_seed()
    taken: dict[int, Counter[Any]] = PartialState().__dict__.setdefault("_seeds_taken", {})
    if seed not in taken:
        taken.clear()
        taken[seed] = Counter()
    number = taken[seed][place]
    taken[seed][place] += 1
    return mix(seed, number) if number else seed


def rng_state() -> dict[str, Any]:
    """Return the states of all global generators of this process, for `load_rng_state`.

    Devices that are not initialised are left out: reading their state would allocate memory.
    """
    state = _local_state()
    for name, device in started().items():
        states = [device.get_rng_state(number) for number in range(device.device_count())]
        state[name] = {"current": device.current_device(), "states": states}
    return state


def _local_state() -> dict[str, Any]:
    """As `rng_state`, but only for the current device, from which code draws by default."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),
    }
    for name, device in started().items():
        state[name] = device.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def load_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators to the states that `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    for name, device in devices().items():
        if name in state and device.is_available():
            _load_device_state(device, state[name])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def is_rng_state(state: Any) -> bool:
    """Return whether the CPU's generators take a state of `rng_state`; they are left alone."""
    try:
        version, internal, gauss = state["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        torch.Generator().set_state(state["torch"])
        if "numpy" in state:
            numpy.random.RandomState().set_state(tuple(state["numpy"]))
    except Exception:  # noqa: BLE001 - of any type, as the state may have any form
        return False
    return True


def _load_device_state(device: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):  # only the current device's
        device.set_rng_state(saved)
        return
    for number, state in enumerate(saved["states"][: device.device_count()]):
        device.set_rng_state(state, number)
    # Last: the current device may have a different index than when the states were saved.
    device.set_rng_state(saved["states"][saved["current"]])


def as_types(rng_types: Iterable[str | RNGType] | str) -> list[str | RNGType]:
    """Return one type of generator or several as a list.

    Raises:
        TypeError: The argument is something else.
    """
    if isinstance(rng_types, str):
        return [rng_types]
    if not isinstance(rng_types, Iterable):
        raise TypeError(
            f"rng_types is {rng_types!r}; it must be 'torch', 'cuda', 'xpu', 'mps' or 'generator', "
            "or a list of them."
        )
    return list(rng_types)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Copy rank 0's generator states to all processes; collective.

    Args:
        rng_types: The generators: ``"torch"`` (the CPU's), ``"cuda"``, ``"xpu"``, ``"mps"`` (the
            device's), ``"generator"`` for `generator`.
        generator: The generator for ``"generator"``.

    Raises:
        ValueError: A type is unknown, belongs to a device that this process does not use, or is
            ``"generator"`` while `generator` is None.
        TypeError: `rng_types` is neither a type nor a list of them.
    """
    kinds = [_parse_rng_type(kind, generator) for kind in as_types(rng_types)]
    for kind in kinds:  # all are valid by now: no process is left waiting in a broadcast
        if kind == RNGType.GENERATOR:
            assert generator is not None
            generator.set_state(_from_main(generator.get_state()))
        elif kind == RNGType.TORCH:
            torch.set_rng_state(_from_main(torch.get_rng_state()))
        else:
            device = getattr(torch, kind)
            device.set_rng_state(_from_main(device.get_rng_state()))


def _parse_rng_type(kind: str | RNGType, generator: torch.Generator | None) -> str:
    used = PartialState().device.type
    choices = ["torch", "generator", *({used} & {"cuda", "xpu", "mps"})]
    if str(kind) not in choices:
        raise ValueError(f"{choose('rng_types', str(kind), choices)} This process uses {used}.")
    if kind == RNGType.GENERATOR and generator is None:
        raise ValueError("rng_types has 'generator', but no generator was given: pass generator=.")
    return str(kind)


def _from_main(state: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = broadcast(state.to(PartialState().device))
    return shared.cpu()


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Restore the global generators after the block, whatever was drawn in it.

    Of torch's generators these are the CPU's and the current device's, if it is initialised. A
    device initialised in the block is seeded afterwards as if it were initialised after the block.

    Args:
        seed: Seeds the generators for the block; None keeps their states. Do not call
            `seed_generators` in the block: it seeds devices that are not restored.
    """
    put_back = set_rng_aside(seed)
    try:
        yield
    finally:
        put_back()


def set_rng_aside(seed: int | None = None) -> Callable[[], None]:
    """Enter `isolated_rng`, and return the function that leaves it."""
    again: list[Callable[[], object]] = []

    def put_back() -> None:
        for each in reversed(again):
            each()

    try:
        again.append(set_devices_aside(seed))  # restored last: new devices need torch's seed
        again.append(set_torch_aside(seed))
        again.append(set_python_aside(seed))
        again.append(set_numpy_aside(seed))
    except BaseException:
        put_back()
        raise
    return put_back


def seed_local(seed: int) -> None:
    """As `seed_generators`, but of torch's only the CPU's and initialised devices' generators.

    This takes a few microseconds. Registering a seed for devices that may be initialised later
    takes torch hundreds.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    for device in started().values():
        device.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def seeded_iteration(iterable: Iterable[T], seed: int) -> Iterator[T]:
    """Iterate with private states of the global generators, seeded with `seed`.

    For iterators that draw from the global generators at any time: they then yield the same on
    every process, and leave the caller's states alone.
    """
    iterator = None
    inside: dict[str, Any] | None = None
    while True:
        with isolated_rng(seed if inside is None else None):
            if inside is not None:
                load_rng_state(inside)
            iterator = iter(iterable) if iterator is None else iterator
            try:
                value = next(iterator)
            except StopIteration:
                return
            inside = _local_state()
        yield value
