"""Random number generators: seeds, their states, and stretches of code that leave them alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

import numpy
import torch

from trainer.configuration import RNGType
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
    """Seed Python's, numpy's and torch's generators, on every kind of device.

    Args:
        seed: From 0 to 2**32 - 1, the range that numpy takes.
        device_specific: Give every process a seed of its own, ``seed + process_index``.
        deterministic: Make torch refuse operations that have no deterministic form.

    Raises:
        ValueError: The seed is outside the range.
        TypeError: It is no integer.
    """
    if not isinstance(seed, Integral):
        raise TypeError(f"seed is {seed!r}; it must be an integer between 0 and 2**32 - 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must lie between 0 and 2**32 - 1.")
    seed = int(seed)  # Python's generator takes none of numpy's integers
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
    """A seed for something with draws of its own: torch's own at first, then others made from it.

    They are counted anew after `set_seed`, with another seed, and for a new `Accelerator`: a script
    that begins again gets the same ones.

    Args:
        *place: What is counted for itself.
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
    """The state of every global generator of this process, to be given to `load_rng_state`.

    Of devices that have not been started there is none to be asked for: that would take memory.
    """
    state = _local_state()
    for name, device in started().items():
        states = [device.get_rng_state(number) for number in range(device.device_count())]
        state[name] = {"current": device.current_device(), "states": states}
    return state


def _local_state() -> dict[str, Any]:
    """As `rng_state`, but of the current device alone, which code draws from by default."""
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
    """Put the generators back to what `rng_state` returned."""
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


def _load_device_state(device: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):  # of the current one alone
        device.set_rng_state(saved)
        return
    for number, state in enumerate(saved["states"][: device.device_count()]):
        device.set_rng_state(state, number)
    # Last, since this process may be given a device of another number than then.
    device.set_rng_state(saved["states"][saved["current"]])


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Give the generators of all processes the states of rank 0's; collective.

    Args:
        rng_types: Which: ``"torch"`` (the CPU's), ``"cuda"``, ``"xpu"``, ``"mps"`` (the device's),
            ``"generator"`` for the one given.
        generator: For ``"generator"``.

    Raises:
        ValueError: A type is unknown, belongs to a device that this process does not use, or is
            ``"generator"`` without one.
    """
    if isinstance(rng_types, str):
        rng_types = [rng_types]
    kinds = [_parse_rng_type(kind, generator) for kind in rng_types]
    for kind in kinds:  # each is right: no process is left waiting
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
        raise ValueError("rng_types names 'generator', but none was given: pass generator=.")
    return str(kind)


def _from_main(state: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = broadcast(state.to(PartialState().device))
    return shared.cpu()


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on outside as if nothing had been.

    Of torch's, those are the CPU's and that of the current device, if it has been started. A device
    that is started inside goes on outside as if it were started there.

    Args:
        seed: Inside, they begin with it; None leaves them where they are. `seed_generators` would
            seed devices that are not put back.
    """
    put_back = set_rng_aside(seed)
    try:
        yield
    finally:
        put_back()


def set_rng_aside(seed: int | None = None) -> Callable[[], None]:
    """As entering `isolated_rng`; leaving it is to call what this returns."""
    again: list[Callable[[], object]] = []

    def put_back() -> None:
        for each in reversed(again):
            each()

    try:
        again.append(set_devices_aside(seed))  # put back last: new ones ask for torch's seed
        again.append(set_torch_aside(seed))
        again.append(set_python_aside(seed))
        again.append(set_numpy_aside(seed))
    except BaseException:
        put_back()
        raise
    return put_back


def seed_local(seed: int) -> None:
    """As `seed_generators`, of torch's only the CPU's and those of devices that have been started.

    It takes a few microseconds. To tell devices that have not been started of a seed that they may
    want one day takes torch hundreds.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    for device in started().values():
        device.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def seeded_iteration(iterable: Iterable[T], seed: int) -> Iterator[T]:
    """Iterate with global generators of its own, seeded with `seed`.

    For iterators that draw from the global generators whenever they please: they then yield the
    same on every process, and leave the caller's generators alone.
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
