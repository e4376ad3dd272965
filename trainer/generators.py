"""Python's, numpy's and torch's global generators, each seeded and set aside by itself.

Each ``set_..._aside`` seeds its generator, unless `seed` is None, and returns what brings it back
to where it was. It is done for every batch that is fetched without workers: microseconds count.
To leave it out where generators have not moved meanwhile would not do: a dataset may read one
without moving it, and draw from a copy.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy
import torch

_Words = ctypes.Array[ctypes.c_char]
DEVICES_CAN_START = torch.backends.mps.is_built() or any(
    getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")
)
"""This build of torch knows devices besides the CPU."""


def devices() -> dict[str, Any]:
    """The modules of devices that have a generator each."""
    return {"cuda": torch.cuda, "xpu": torch.xpu}


def started() -> dict[str, Any]:
    """Those of them that have been started."""
    if not (torch.cuda.is_initialized() or torch.xpu.is_initialized()):
        return {}  # at once: it is asked for every batch
    return {name: device for name, device in devices().items() if device.is_initialized()}


def set_torch_aside(seed: int | None) -> Callable[[], object]:
    """That of the CPU."""
    generator = torch.default_generator
    state = generator.get_state()
    if seed is not None:
        generator.manual_seed(seed)
    return partial(generator.set_state, state)


def set_devices_aside(seed: int | None) -> Callable[[], object]:
    """That of the current device of each kind that has been started."""
    if not DEVICES_CAN_START:
        return _nothing
    states: dict[str, tuple[Any, ...]] = {}
    for name, device in started().items():
        number = device.current_device()  # inside, another may become the current one
        states[name] = device.get_rng_state(number), number
        if seed is not None:
            device.manual_seed(seed)
    if torch.backends.mps.is_available():
        states["mps"] = (torch.mps.get_rng_state(),)
        if seed is not None:
            torch.mps.manual_seed(seed)
    return partial(_put_devices_back, states)


def _put_devices_back(states: dict[str, tuple[Any, ...]]) -> None:
    for name, state in states.items():
        getattr(torch, name).set_rng_state(*state)
    for name, device in started().items():
        if name not in states:
            device.manual_seed_all(torch.initial_seed())


# Python's and numpy's are Mersenne twisters both: 624 words of 32 bits, and which one comes next.
_SIZE_OF_MT19937 = 625 * 4


def set_python_aside(seed: int | None) -> Callable[[], object]:
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


def _write_python(generator: Any, memory: _Words, words: bytes, left_over: float | None) -> None:
    memory.raw = words
    generator.gauss_next = left_over


@lru_cache(maxsize=1)  # which keeps the generator alive as long as its address
def _memory_of(generator: Any) -> _Words | None:
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
def _memory_at(address: int) -> _Words:
    """The words of a Mersenne twister, to be read and written as bytes while its owner lives."""
    return (ctypes.c_char * _SIZE_OF_MT19937).from_address(address)


# To read numpy's state through numpy and to write it takes 50 µs; to copy the words is as easy as
# Python's. But besides them there may be a normal number, left over from the last pair that `randn`
# made. Whether there is one is found by drawing one: a number that was left over comes without the
# words moving. To be given its own bit generator again makes numpy forget the number.


def set_numpy_aside(seed: int | None) -> Callable[[], object]:
    """Numpy's global generator."""
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
    """What brings back a generator that is not there."""
