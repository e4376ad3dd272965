"""Global random generators (Python, numpy, torch): seed, save, restore, and isolate blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy
import torch

from trainer.checks import choice_error
from trainer.distributed.collectives import broadcast
from trainer.enums import RNGType
from trainer.environment import defaulting
from trainer.generators import (
    devices,
    isolate_devices,
    isolate_numpy,
    isolate_python,
    isolate_torch,
    started,
)
from trainer.state import PartialState

T = TypeVar("T")
_MASK = (1 << 64) - 1
# Without it cuBLAS is not deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def mix(*values: int) -> int:
    """Derive a 63-bit seed from several numbers; similar inputs give unrelated seeds.

    Each number is mixed in with the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1  # every function of torch accepts seeds below 2**63


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the global generators of Python, numpy and torch, on all devices.

    Args:
        seed: The seed, from 0 to 2**32 - 1 (numpy's range).
        device_specific: Give every process a different seed, ``seed + process_index``.
        deterministic: Make torch raise for operations without a deterministic implementation.

    Raises:
        ValueError: The seed is outside the range.
    """
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
    """Seed the global generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def next_seed(*place: int) -> int:
    """Return a seed for a new generator: first torch's own seed, then seeds derived from it.

    Calls are counted, and each gives another seed. The count restarts after `set_seed`, after
    seeding torch with another seed, and for a new `Accelerator`. So a restarted script gets the
    same seeds.

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

    Devices that are not initialised are left out, because reading their state would allocate
    memory on them.
    """
    state = _local_state()
    for name, device in started().items():
        states = [device.get_rng_state(number) for number in range(device.device_count())]
        state[name] = {"current": device.current_device(), "states": states}
    return state


def _local_state() -> dict[str, Any]:
    """Like `rng_state`, but of the devices only the current one, from which code usually draws."""
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


def _load_device_state(device: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):  # the state of the current device only
        device.set_rng_state(saved)
        return
    for number, state in enumerate(saved["states"][: device.device_count()]):
        device.set_rng_state(state, number)
    # Set the current device's state last: its index may differ from the one at the save.
    device.set_rng_state(saved["states"][saved["current"]])


def as_types(rng_types: Iterable[str | RNGType] | str) -> list[str | RNGType]:
    """Return one generator type, or several, as a list."""
    return [rng_types] if isinstance(rng_types, str) else list(rng_types)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Broadcast rank 0's generator states to all processes; a collective call.

    Args:
        rng_types: The generators to synchronize: ``"torch"`` (torch's CPU generator), ``"cuda"``,
            ``"xpu"`` or ``"mps"`` (the generator of the device), or ``"generator"`` for the
            argument `generator`.
        generator: The generator for ``"generator"``.

    Raises:
        ValueError: A type is unknown, belongs to a device that this process does not use, or is
            ``"generator"`` while `generator` is None.
    """
    kinds = [_parse_rng_type(kind, generator) for kind in as_types(rng_types)]
    for kind in kinds:  # all validated above, so that no process waits alone in a broadcast
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
        raise ValueError(
            f"{choice_error('rng_types', str(kind), choices)} This process uses {used}."
        )
    if kind == RNGType.GENERATOR and generator is None:
        raise ValueError("rng_types has 'generator', but no generator was given: pass generator=.")
    return str(kind)


def _from_main(state: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = broadcast(state.to(PartialState().device))
    return shared.cpu()


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Save the states of the global generators, and restore them after the block.

    Of torch's generators, these are the CPU generator and, if it is initialised, that of the
    current device. A device that is initialised in the block is seeded afterwards as if it had been
    initialised after the block.

    Args:
        seed: The seed for the generators inside the block; None keeps their states. Do not call
            `seed_generators` in the block: it seeds devices that are not restored.
    """
    put_back = isolate_rng(seed)
    try:
        yield
    finally:
        put_back()


def isolate_rng(seed: int | None = None) -> Callable[[], None]:
    """Like entering `isolated_rng`; return a function that restores the generators."""
    again: list[Callable[[], object]] = []

    def put_back() -> None:
        for each in reversed(again):
            each()

    try:
        again.append(isolate_devices(seed))  # restored last: needs torch's seed
        again.append(isolate_torch(seed))
        again.append(isolate_python(seed))
        again.append(isolate_numpy(seed))
    except BaseException:
        put_back()
        raise
    return put_back


def seed_local(seed: int) -> None:
    """Like `seed_generators`, but without devices that are not initialised.

    This takes a few microseconds. `torch.manual_seed` takes hundreds, because it registers a seed
    for devices that may be initialised later.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    for device in started().values():
        device.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def seeded_iteration(iterable: Iterable[T], seed: int) -> Iterator[T]:
    """Iterate with separate states of the global generators, seeded with `seed`.

    It is for iterators that draw from the global generators. They then yield the same values on
    every process, and the caller's generator states do not change.
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


@contextmanager
def deterministic(mode: bool | Literal["warn"]) -> Iterator[None]:
    """Use deterministic algorithms inside; restore the previous settings on exit.

    Operations without a deterministic implementation raise, or with ``"warn"`` only warn.

    Args:
        mode: True, ``"warn"``, or False to change nothing.
    """
    if not mode:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with defaulting(*_CUBLAS):
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
        torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
            torch.backends.cudnn.benchmark = benchmark
