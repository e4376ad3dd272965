"""Random number generators: seeds, their states, and stretches of code that leave them alone."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from numbers import Integral
from typing import Any, TypeVar

import torch

from trainer.configuration import RNGType
from trainer.distributed.collectives import broadcast
from trainer.errors import choose
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
    if device_specific:
        seed = (seed + PartialState().process_index) % 2**32
    seed_generators(seed)
    PartialState._shared_state.pop("_seeds_taken", None)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_generators(seed: int) -> None:
    """Seed the global generators; numpy only if something has loaded it."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
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
    for name, device in _started().items():
        states = [device.get_rng_state(number) for number in range(device.device_count())]
        state[name] = {"current": device.current_device(), "states": states}
    return state


def _local_state() -> dict[str, Any]:
    """As `rng_state`, but of the current device alone, which code draws from by default."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    for name, device in _started().items():
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
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
    for name, device in _devices().items():
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


def _devices() -> dict[str, Any]:
    """The modules of devices that have a generator each."""
    return {"cuda": torch.cuda, "xpu": torch.xpu}


def _started() -> dict[str, Any]:
    if not (torch.cuda.is_initialized() or torch.xpu.is_initialized()):
        return {}  # at once: it is asked for every batch
    return {name: device for name, device in _devices().items() if device.is_initialized()}


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
        again.append(_set_devices_aside(seed))  # put back last: new ones ask for torch's seed
        again.append(_set_torch_aside(seed))
        again.append(_set_python_aside(seed))
        again.append(_set_numpy_aside(seed))
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
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    for device in _started().values():
        device.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


# -- one generator set aside -----------------------------------------------------------------------
#
# Each function seeds its generator, unless `seed` is None, and returns what brings it back to where
# it was. It is done for every batch that is fetched without workers, so microseconds count.


def _set_torch_aside(seed: int | None) -> Callable[[], object]:
    generator = torch.default_generator
    state = generator.get_state()
    if seed is not None:
        generator.manual_seed(seed)
    return partial(generator.set_state, state)


def _set_devices_aside(seed: int | None) -> Callable[[], None]:
    """That of the current device of each kind that has been started."""
    states: dict[str, tuple[Any, ...]] = {}
    for name, device in _started().items():
        number = device.current_device()  # inside, another may become the current one
        states[name] = device.get_rng_state(number), number
        if seed is not None:
            device.manual_seed(seed)
    if torch.backends.mps.is_available():
        states["mps"] = (torch.mps.get_rng_state(),)
        if seed is not None:
            torch.mps.manual_seed(seed)

    def put_back() -> None:
        for name, state in states.items():
            getattr(torch, name).set_rng_state(*state)
        for name, device in _started().items():
            if name not in states:
                device.manual_seed_all(torch.initial_seed())

    return put_back


# Python's and numpy's are Mersenne twisters both: 624 words of 32 bits, and which one comes next.
_SIZE_OF_MT19937 = 625 * 4


def _set_python_aside(seed: int | None) -> Callable[[], object]:
    """Python's own generator.

    `random.getstate` and ``setstate`` make a tuple of 625 integers and read it again, in 10 µs. To
    copy the words takes less than one.
    """
    generator = getattr(random.getstate, "__self__", None)  # that the functions of `random` are of
    memory = _memory_of(generator)
    if memory is None or generator is None:
        put_back: Callable[[], object] = partial(random.setstate, random.getstate())
    else:
        put_back = partial(_write_python, generator, memory, memory.raw, generator.gauss_next)
    if seed is not None:
        random.seed(seed)
    return put_back


def _write_python(
    generator: Any, memory: ctypes.Array[ctypes.c_char], words: bytes, left_over: float | None
) -> None:
    memory.raw = words
    generator.gauss_next = left_over


@lru_cache(maxsize=1)  # which keeps the generator alive as long as its address
def _memory_of(generator: Any) -> ctypes.Array[ctypes.c_char] | None:
    """Where a generator of Python's keeps its words; None where they do not lie as expected.

    That is behind the head that all objects have. What is found there must be the state.
    """
    head = object.__basicsize__
    if (
        sys.implementation.name != "cpython"  # elsewhere an id is no address
        or type(generator) is not random.Random
        or random.Random.__mro__[1].__basicsize__ < head + _SIZE_OF_MT19937
    ):
        return None
    memory = _memory_at(id(generator) + head)
    *words, following = generator.getstate()[1]
    return memory if memory.raw == struct.pack("625I", following, *words) else None


@lru_cache(maxsize=8)
def _memory_at(address: int) -> ctypes.Array[ctypes.c_char]:
    """The words of a Mersenne twister, to be read and written as bytes while its owner lives."""
    return (ctypes.c_char * _SIZE_OF_MT19937).from_address(address)


# To read numpy's state through numpy and to write it takes 50 µs; to copy the words is as easy as
# Python's. But besides them there may be a normal number, left over from the last pair that `randn`
# made. Whether there is one is found by drawing one: a number that was left over comes without the
# words moving. To be given its own bit generator again makes numpy forget the number.


def _set_numpy_aside(seed: int | None) -> Callable[[], object]:
    """Numpy's global generator, if it is loaded."""
    if "numpy" not in sys.modules:
        return _nothing
    module = sys.modules["numpy"].random
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


def _write_numpy(
    module: Any, generator: Any, memory: ctypes.Array[ctypes.c_char], words: bytes
) -> None:
    memory.raw = words
    module.set_bit_generator(generator)


def _nothing() -> None:
    """What brings back a generator that is not there."""


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
