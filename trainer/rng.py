"""Global random generators (Python, numpy, torch): seed, save, restore, and isolate blocks."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import numpy
import torch

from trainer import xla
from trainer.checks import choice_error
from trainer.distributed.collectives import broadcast
from trainer.enums import RNGType
from trainer.environment import defaulting
from trainer.state import PartialState

T = TypeVar("T")
_MASK = (1 << 64) - 1
# Without it cuBLAS is not deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_Words = ctypes.Array[ctypes.c_char]
DEVICES_CAN_START = (
    torch.backends.mps.is_built()
    or any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    or xla.is_installed()
)
"""Whether this build of torch, or torch_xla, supports devices besides the CPU."""


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

    Example::

        set_seed(42)

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
    if xla.is_initialized():
        xla.manual_seed(seed)
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
    """Like `rng_state`, but with only the current device, from which code usually draws."""
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
    """Restore the generators to states returned by `rng_state`."""
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

    Example::

        synchronize_rng_states(["torch", "generator"], generator=torch.Generator())

    Args:
        rng_types: The generators to synchronize: ``"torch"`` (torch's CPU generator), ``"cuda"``,
            ``"xpu"``, ``"mps"`` or ``"xla"`` (the generator of the device), or ``"generator"`` for
            the argument `generator`.
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
            device = torch.mps if kind == "mps" else devices()[kind]
            device.set_rng_state(_from_main(device.get_rng_state()))


def _parse_rng_type(kind: str | RNGType, generator: torch.Generator | None) -> str:
    used = PartialState().device.type
    choices = ["torch", "generator", *({used} & {"cuda", "xpu", "mps", "xla"})]
    if str(kind) not in choices:
        raise ValueError(
            f"{choice_error('rng_types', str(kind), choices)} This process uses {used}."
        )
    if kind == RNGType.GENERATOR and generator is None:
        raise ValueError("rng_types has 'generator', but no generator was passed: pass generator=.")
    return str(kind)


def _from_main(state: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = broadcast(state.to(PartialState().device))
    return shared.cpu()


# Generators of libraries: functions that return and that load their states.
_OF_LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}


def register_generators(
    library: str, state: Callable[[], Any], load_state: Callable[[Any], object]
) -> None:
    """Make `isolated_rng` also restore the generators of a library.

    Args:
        library: The library's name.
        state: Returns a copy of the states of its generators.
        load_state: Restores the result of `state`.
    """
    _OF_LIBRARIES[library] = state, load_state


@contextmanager
def isolated_rng(seed: int | None = None, *, libraries: bool = True) -> Iterator[None]:
    """Save the states of the global generators, and restore them after the block.

    Of torch's generators, these are the CPU generator and, if it is initialised, that of the
    current device. If a device is initialised in the block, it is seeded afterwards as if it had
    been initialised after the block.

    Args:
        seed: The seed for the generators inside the block; None keeps their states. Do not call
            `seed_generators` in the block: it seeds devices that are not restored.
        libraries: Whether the generators of libraries are restored, see `register_generators`; they
            are not seeded.
    """
    put_back = isolate_rng(seed, libraries=libraries)
    try:
        yield
    finally:
        put_back()


def isolate_rng(seed: int | None = None, *, libraries: bool = True) -> Callable[[], None]:
    """Like entering `isolated_rng`; return a function that restores the generators."""
    again: list[Callable[[], object]] = []

    def put_back() -> None:
        for each in reversed(again):
            each()

    try:
        if libraries:
            for state, load_state in _OF_LIBRARIES.values():
                again.append(partial(load_state, state()))
        again.append(isolate_devices(seed))  # restored last of torch's, since it needs torch's seed
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


# -- one generator at a time -----------------------------------------------------------------------
#
# Each ``isolate_...`` function saves the state of a generator, seeds it unless `seed` is None, and
# returns a function that restores the saved state. This runs for every batch that is fetched
# without workers, so microseconds count. It cannot be skipped even if the generators do not
# advance: a dataset may read the state of a generator and draw from a copy.


def devices() -> dict[str, Any]:
    """Return the modules of the device types that have one generator per device."""
    return {"cuda": torch.cuda, "xpu": torch.xpu, "xla": xla}


def started() -> dict[str, Any]:
    """Return the entries of `devices` that are initialised."""
    if not (torch.cuda.is_initialized() or torch.xpu.is_initialized() or xla.is_initialized()):
        return {}  # fast path, because this is called for every batch
    return {name: device for name, device in devices().items() if device.is_initialized()}


def isolate_torch(seed: int | None) -> Callable[[], object]:
    """Save and seed torch's CPU generator; return a function that restores it."""
    generator = torch.default_generator
    state = generator.get_state()
    if seed is not None:
        generator.manual_seed(seed)
    return partial(generator.set_state, state)


def isolate_devices(seed: int | None) -> Callable[[], object]:
    """Save and seed the generator of each initialised device type's current device."""
    if not DEVICES_CAN_START:
        return _nothing
    states: dict[str, tuple[Any, ...]] = {}
    for name, device in started().items():
        number = device.current_device()  # the current device may change before the restore
        states[name] = device.get_rng_state(number), number
        if seed is not None:
            device.manual_seed(seed)
    if torch.backends.mps.is_available():
        states["mps"] = (torch.mps.get_rng_state(),)
        if seed is not None:
            torch.mps.manual_seed(seed)
    return partial(_restore_devices, states)


def _restore_devices(states: dict[str, tuple[Any, ...]]) -> None:
    known = devices()
    for name, state in states.items():
        known.get(name, torch.mps).set_rng_state(*state)
    for name, device in started().items():
        if name not in states:
            device.manual_seed_all(torch.initial_seed())


# The size in bytes of a Mersenne Twister's state, in Python and numpy: 624 words of 32 bits and a
# position.
_SIZE_OF_MT19937 = 625 * 4


def isolate_python(seed: int | None) -> Callable[[], object]:
    """Save and seed Python's global generator; return a function that restores it.

    `random.getstate` and `random.setstate` convert to and from a tuple of 625 integers, which takes
    10 µs. Copying the memory of the state takes less than 1 µs.
    """
    generator = getattr(random.getstate, "__self__", None)  # the instance behind `random.random`
    memory = _memory_of(generator)
    if memory is None or generator is None:
        put_back: Callable[[], object] = partial(random.setstate, random.getstate())
    else:
        put_back = partial(_write_python, generator, memory, memory.raw, generator.gauss_next)
    if seed is not None:
        random.seed(seed)
    return put_back


def _write_python(generator: Any, memory: _Words, words: bytes, left_over: float | None) -> None:
    memory.raw = words
    generator.gauss_next = left_over


@lru_cache(maxsize=1)  # the cache also keeps the generator alive while its address is used
def _memory_of(generator: Any) -> _Words | None:
    """Map the memory of a Python generator's state; None if its layout is not the expected one.

    The state is expected directly after the object header, and is compared with ``getstate``.
    """
    head = object.__basicsize__
    if (
        sys.implementation.name != "cpython"  # only in CPython is an id an address
        or type(generator) is not random.Random
        or random.Random.__mro__[1].__basicsize__ < head + _SIZE_OF_MT19937
    ):
        return None
    memory = _memory_at(id(generator) + head)
    *words, following = generator.getstate()[1]
    return memory if memory.raw == struct.pack("625I", following, *words) else None


@lru_cache(maxsize=8)
def _memory_at(address: int) -> _Words:
    """Map a Mersenne Twister's state as bytes; valid only while the generator is alive."""
    return (ctypes.c_char * _SIZE_OF_MT19937).from_address(address)


# Reading and writing the state through numpy's functions takes 50 µs, so its memory is copied too.
# But numpy may also have a cached normal number: normal numbers are made in pairs, and `randn`
# keeps the second one. To detect it, draw a number: a cached one does not advance the state. To
# clear it, set the same bit generator again.


def isolate_numpy(seed: int | None) -> Callable[[], object]:
    """Save and seed numpy's global generator; return a function that restores it."""
    module: Any = numpy.random
    if seed is None:
        return partial(module.set_state, module.get_state())
    generator = module.get_bit_generator()
    if type(generator) is module.MT19937:
        memory = _memory_at(generator.ctypes.state_address)
        words = memory.raw
        number = module.standard_normal()
        if memory.raw != words:
            module.seed(seed % 2**32)
            return partial(_write_numpy, module, generator, memory, words)
        state = module.get_state(legacy=False) | {"has_gauss": 1, "gauss": number}
    else:
        state = module.get_state(legacy=False)
    module.seed(seed % 2**32)
    return partial(module.set_state, state)


def _write_numpy(module: Any, generator: Any, memory: _Words, words: bytes) -> None:
    memory.raw = words
    module.set_bit_generator(generator)


def _nothing() -> None:
    """Do nothing: there is no device generator to restore."""
