"""Random number generators that loaders, samplers and datasets keep, beside the global ones.

A sampler draws its order from them, a dataset and its transforms their augmentation. No checkpoint
holds where they stand, and those of a worker go with it; so each is seeded where it is used from.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from trainer.rng import mix

LONGEST = 1_000  # containers that have more in them hold samples, not transforms
_MOST = 20_000  # things that are looked at, in some 20 ms


def of_samplers(source: Any) -> list[Any]:
    """Those that a loader and its samplers draw from, by whatever name a sampler has them.

    They are torch's, Python's and numpy's; not the global ones, which others draw from too.
    """
    batches = getattr(source, "batch_sampler", None)
    samplers = getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (source, *samplers)]
    for sampler in samplers:
        found += getattr(sampler, "__dict__", {}).values()
    return _distinct(found)


def held_by(owner: Any) -> list[Any]:
    """Those that can be reached from something by attributes, containers and functions.

    Of a dataset they are its own, those of its transforms and theirs, and those that a `lambda` or
    a `partial` among them has been given. Modules, classes, sets and containers of more than
    `LONGEST` things are not looked into.

    Returns:
        They, nearest first: in the same order wherever a copy of `owner` is looked at.
    """
    kinds, found = _kinds(), []
    seen, waiting = {id(owner)}, deque([owner])
    while waiting and len(seen) < _MOST:
        thing = waiting.popleft()
        if issubclass(type(thing), kinds):
            found.append(thing)
            continue
        for part in _parts(thing):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return _distinct(found)


def seed_all(generators: Iterable[Any], seed: int) -> None:
    """Seed several, each with a seed of its own."""
    for number, generator in enumerate(generators):
        _seed(generator, mix(seed, number) if number else seed)


def set_aside(generators: Iterable[Any]) -> Callable[[], None]:
    """What brings them back to where they are."""
    again = [_set_aside(generator) for generator in generators]

    def put_back() -> None:
        for each in again:
            each()

    return put_back


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state") and type(_bits_of(generator)).__name__ == "MT19937":
        generator.seed(seed % 2**32)
    else:  # numpy's newer kinds have no method
        bits = _bits_of(generator)
        bits.state = type(bits)(seed).state


def _set_aside(generator: Any) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "get_state"):  # numpy's older kind, which may keep half a pair
        return partial(generator.set_state, generator.get_state(legacy=False))
    bits = _bits_of(generator)
    return partial(setattr, bits, "state", bits.state)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _kinds() -> tuple[type, ...]:
    kinds: tuple[type, ...] = torch.Generator, random.Random
    if numpy := sys.modules.get("numpy"):
        kinds += numpy.random.Generator, numpy.random.RandomState
    return kinds


def _distinct(things: Iterable[Any]) -> list[Any]:
    """The generators among them that can be seeded here, without the global ones."""
    kinds = _kinds()
    everybodys: list[Any] = [torch.default_generator, getattr(random.random, "__self__", None)]
    if numpy := sys.modules.get("numpy"):
        everybodys.append(numpy.random.mtrand._rand)
    own = {id(thing): thing for thing in things if isinstance(thing, kinds)}
    for each in everybodys:
        own.pop(id(each), None)
    return [thing for thing in own.values() if _can_be_seeded(thing)]


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        # One of a device: a worker that was forked may not ask for it.
        return generator.device.type == "cpu" or get_worker_info() is None
    return not isinstance(generator, random.SystemRandom)


def _parts(thing: Any) -> Iterable[Any]:
    """What a thing consists of, found without running code of its class."""
    kind = type(thing)  # isinstance would ask a proxy for its class
    if issubclass(kind, (type, ModuleType, torch.Tensor, str, bytes, int, float)):
        return ()
    if issubclass(kind, (list, tuple, deque)):
        parts: Iterable[Any] = thing if len(thing) <= LONGEST else ()
    elif issubclass(kind, dict):
        parts = list(thing.values()) if len(thing) <= LONGEST else ()
    elif kind is MethodType:
        return thing.__self__, thing.__func__
    elif kind is BuiltinMethodType:
        return (thing.__self__,)
    elif kind is FunctionType:
        named = (thing.__kwdefaults__ or {}).values()
        cells = map(_content, thing.__closure__ or ())
        parts = *(thing.__defaults__ or ()), *named, *cells
    elif kind is partial:
        parts = thing.func, *thing.args, *thing.keywords.values()
    else:
        parts = ()
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:  # it has none
        return parts
    return chain(parts, list(attributes.values()))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None
