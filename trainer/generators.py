"""Save, seed and restore the global generators of Python, numpy and torch, fast.

Each ``isolate_...`` function saves the state of a generator, seeds it unless `seed` is None, and
returns a function that restores the saved state. This runs for every batch that is fetched without
workers, so microseconds count. It cannot be skipped even if the generators do not advance: a
dataset may read the state of a generator and draw from a copy.
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
"""Whether this build of torch supports devices besides the CPU."""


def devices() -> dict[str, Any]:
    """Return the torch modules of the device types that have one generator per device."""
    return {"cuda": torch.cuda, "xpu": torch.xpu}


def started() -> dict[str, Any]:
    """Return the entries of `devices` that are initialised."""
    if not (torch.cuda.is_initialized() or torch.xpu.is_initialized()):
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
    for name, state in states.items():
        getattr(torch, name).set_rng_state(*state)
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
