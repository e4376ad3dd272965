"""Random number generators that loaders, samplers and datasets keep, beside the global ones.

A sampler draws its order from them, a dataset and its transforms their augmentation. No checkpoint
holds where they stand, and those of a worker go with it; so each is seeded where it is used from.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from trainer.rng import mix

LONGEST = 1_000  # containers that have more in them hold samples, not transforms
_MOST = 20_000  # things that are looked into, in some 50 ms
_OF_TORCH = nn.Module().__dict__.keys() - {"_modules"}
_LEAVES = ModuleType, torch.Tensor, str, bytes, int, float, type(None)


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


def of_order(loader: Any) -> torch.Generator | None:
    """The generator that a loader's own order is drawn from, if it has been given one."""
    batches = loader.batch_sampler
    owners = (loader.sampler, getattr(batches, "sampler", None), batches)
    return next((g for each in owners if (g := getattr(each, "generator", None)) is not None), None)


def held_by(owner: Any, besides: Iterable[Any] = ()) -> list[Any]:
    """Those that can be reached from something by attributes, containers and functions.

    Of a dataset they are its own, those of its transforms and theirs, and those that a `lambda` or
    a `partial` among them has been given. Sets and containers of more than `LONGEST` things are not
    looked into, nor are packages.

    Args:
        owner: Where the search begins.
        besides: Things that are not looked into either.

    Returns:
        They, nearest first: in the same order wherever a copy of `owner` is looked at.
    """
    kinds, found = _kinds(), []
    seen, waiting = {id(owner), *map(id, besides)}, deque([owner])
    for _ in range(_MOST):
        if not waiting:
            break
        thing = waiting.popleft()
        if issubclass(type(thing), kinds):
            found.append(thing)
            continue
        for part in _parts(thing):
            if id(part) not in seen and not issubclass(type(part), _LEAVES):
                seen.add(id(part))
                waiting.append(part)
    return _distinct(found)


def seed_all(generators: Iterable[Any], seed: int) -> None:
    """Seed several, each with a seed of its own."""
    for number, generator in enumerate(generators):
        _seed(generator, mix(seed, number) if number else seed)


@contextmanager
def set_aside(generators: Sequence[Any], seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside, they go on outside as if nothing had been.

    Args:
        generators: Those that `held_by` or `of_samplers` found.
        seed: Inside, each begins with one made from it; None leaves them where they are.
    """
    states = [_state(generator) for generator in generators]
    try:
        if seed is not None:
            seed_all(generators, seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _load(generator, state)


def states_of(generators: Iterable[Any]) -> list[list[Any]]:
    """Where several stand, each with the name of its kind, as a tree to be saved."""
    return [[_kind(generator), _state(generator)] for generator in generators]


def load_states(generators: Sequence[Any], states: Sequence[Sequence[Any]]) -> bool:
    """Put several back to what `states_of` returned.

    Returns:
        They are of the kinds that were saved; else nothing is changed.
    """
    if [_kind(generator) for generator in generators] != [kind for kind, _ in states]:
        return False
    for generator, (_, state) in zip(generators, states, strict=True):
        _load(generator, state)
    return True


def _kind(generator: Any) -> str:
    name = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return f"{name} {generator.device.type}"
    return name if isinstance(generator, random.Random) else f"{name} {_bits_name(generator)}"


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state") and _bits_name(generator) == "MT19937":
        generator.seed(seed % 2**32)
    else:  # numpy's newer kinds have no method
        bits = _bits_of(generator)
        bits.state = type(bits)(seed).state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # numpy's older kind, which may keep half a pair
        return generator.get_state(legacy=False)
    return _bits_of(generator).state


def _load(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, left_over = state
        generator.setstate((version, tuple(words), left_over))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        _bits_of(generator).state = state


def _bits_name(generator: Any) -> str:
    return type(_bits_of(generator)).__name__


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
    """What a thing consists of, found without running code of its class.

    Of what torch keeps in a module only its submodules are.
    """
    kind = type(thing)  # isinstance would ask a proxy for its class
    if issubclass(kind, type):  # what its instances share, of which a generator alone counts
        return [value for value in vars(thing).values() if issubclass(type(value), _kinds())]
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
    if issubclass(kind, nn.Module):  # a deep one has more of torch's attributes than of the user's
        users = [attributes[name] for name in attributes if name not in _OF_TORCH]
        return chain(parts, users, kind.__mro__)
    return chain(parts, list(attributes.values()), kind.__mro__)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None
