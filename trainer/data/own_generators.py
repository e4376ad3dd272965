"""Random number generators that loaders, samplers and datasets keep, beside the global ones.

A sampler draws its order from them, a dataset and its transforms their augmentation. No checkpoint
holds where they stand, and those of a worker go with it; so each is seeded where it is used from.

They are known by their paths, the attributes and places by which they were reached: other things
that come and go beside them change nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import nn
from torch.utils.data import get_worker_info

from trainer.rng import mix

LONGEST = 1_000  # containers that have more in them hold samples, not transforms
_LONG = 50  # those of more are looked into last: they may
_MOST = 20_000  # things that are looked into, in some 50 ms
_OF_TORCH = nn.Module().__dict__.keys() - {"_modules"}
_LEAVES = ModuleType, torch.Tensor, str, bytes, int, float, type(None)
_CONTAINERS = list, tuple, deque, dict

Descriptors = dict[type, list[tuple[str, Any]]]

Found = dict[str, Any]
"""Generators by their paths."""


def of_samplers(source: Any) -> Found:
    """Those that a loader and its samplers draw from, by whatever name a sampler has them.

    They are torch's, Python's and numpy's; not the global ones, which others draw from too.
    """
    batches = getattr(source, "batch_sampler", None)
    samplers = getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (source, *samplers)]
    for sampler in samplers:
        found += getattr(sampler, "__dict__", {}).values()
    return _seedable((str(number), thing) for number, thing in enumerate(found))


def of_order(loader: Any) -> torch.Generator | None:
    """The generator that a loader's own order is drawn from, if it has been given one."""
    batches = loader.batch_sampler
    owners = (loader.sampler, getattr(batches, "sampler", None), batches)
    return next((g for each in owners if (g := getattr(each, "generator", None)) is not None), None)


def held_by(besides: Iterable[Any] = (), **owners: Any) -> Found:
    """Those that can be reached from some things by attributes, containers and functions.

    Of a dataset they are its own, those of its transforms and theirs, and those that a `lambda` or
    a `partial` among them has been given. Sets and containers of more than `LONGEST` things are not
    looked into, nor are packages.

    Args:
        besides: Things that are not looked into either.
        **owners: Where the search begins, by names, with which the paths begin.
    """
    descriptors: Descriptors = {}  # of one search: kept for longer, they would keep the classes
    found: list[tuple[str, Any]] = []
    near, far = deque(owners.items()), deque[tuple[str, Any]]()
    seen = {*map(id, besides), *map(id, owners.values())}
    for _ in range(_MOST):
        if not (near or far):
            break
        path, thing = (near or far).popleft()
        if issubclass(type(thing), _kinds()):
            found.append((path, thing))
            continue
        long = _is_long(thing)
        for name, part in _parts(thing, descriptors):
            if id(part) not in seen and not issubclass(type(part), _LEAVES):
                seen.add(id(part))
                later = far if long or _is_long(part) else near
                place = f"{part.__module__}." if issubclass(type(part), type) else f"{path}."
                later.append((place + name, part))
    return _seedable(found)


def alike(found: Found) -> dict[str, str]:
    """To the path of each generator that stands as an earlier one of its kind, that one's path.

    They were made so to draw alike, for an image and its mask for example.
    """
    first: dict[str, str] = {}
    places = {path: repr([_kind(each), _plain(_state(each))]) for path, each in found.items()}
    return {path: first.setdefault(place, path) for path, place in places.items()}


def seed_all(found: Found, seed: int, names: Mapping[str, str]) -> None:
    """Seed several, each with a seed of its own, but for those that are `alike`.

    Args:
        found: They.
        seed: Theirs are made from it.
        names: What `alike` returned, when they were given.
    """
    for path, generator in found.items():
        _seed(generator, mix(seed, crc32(names.get(path, path).encode())))


@contextmanager
def set_aside(
    found: Found, seed: int | None = None, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Whatever is drawn inside, they go on outside as if nothing had been.

    Args:
        found: Those that `held_by` or `of_samplers` found.
        seed: Inside, they begin with it, see `seed_all`; None leaves them where they are.
        names: See `seed_all`.
    """
    states = states_of(found)
    try:
        if seed is not None:
            seed_all(found, seed, names or {})
        yield
    finally:
        load_states(found, states)


def states_of(found: Found) -> dict[str, list[Any]]:
    """Where they stand, each with the name of its kind, as a tree to be saved."""
    return {path: [_kind(generator), _state(generator)] for path, generator in found.items()}


def load_states(found: Found, states: Mapping[str, Any]) -> list[str]:
    """Put them back to what `states_of` returned.

    Returns:
        The paths of what was saved and is not there any more, or is of another kind.
    """
    missing = []
    for path, (kind, state) in states.items():
        generator = found.get(path)
        if generator is None or _kind(generator) != kind:
            missing.append(path)
        else:
            _load(generator, state)
    return missing


def _kind(generator: Any) -> str:
    name = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return f"{name} {generator.device.type}"
    return name if isinstance(generator, random.Random) else f"{name} {_bits_name(generator)}"


def _plain(state: Any) -> Any:
    """A state whose text is all of it."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


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


@cache  # not at once: numpy imports this part of itself when it is used
def _kinds() -> tuple[type, ...]:
    return torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState


def _seedable(things: Iterable[tuple[str, Any]]) -> Found:
    """The generators among them that can be seeded here, each once, without the global ones."""
    python = getattr(random.random, "__self__", None)
    seen = {id(torch.default_generator), id(python), id(numpy.random.mtrand._rand)}
    own: Found = {}
    for path, thing in things:
        if issubclass(type(thing), _kinds()) and id(thing) not in seen and _can_be_seeded(thing):
            seen.add(id(thing))
            own[path] = thing
    return own


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        # One of a device: a worker that was forked may not ask for it.
        return generator.device.type == "cpu" or get_worker_info() is None
    if isinstance(generator, random.Random):  # not one of the hardware's, or with a state unknown
        names = "seed", "getstate", "setstate"
        return all(getattr(type(generator), n) is getattr(random.Random, n) for n in names)
    return type(_bits_of(generator)).__module__.startswith("numpy.")


def _container(thing: Any) -> Any:
    """The kind of container that a thing is; None if it is none."""
    kind = type(thing)  # isinstance would ask a proxy for its class
    return next((each for each in _CONTAINERS if issubclass(kind, each)), None)


def _is_long(thing: Any) -> bool:
    held = _container(thing)
    return held is not None and held.__len__(thing) > _LONG


def _parts(thing: Any, descriptors: Descriptors) -> Iterable[tuple[str, Any]]:
    """What a thing consists of, with names, found without running code of its class.

    Of what torch keeps in a module only its submodules are. Copies: other threads go on.
    """
    kind = type(thing)
    if issubclass(kind, type):  # what its instances share, of which a generator alone counts
        shared = list(vars(thing).items())
        return [(name, value) for name, value in shared if issubclass(type(value), _kinds())]
    if kind is MethodType:
        return ("self", thing.__self__), ("function", thing.__func__)
    if kind is BuiltinMethodType:
        return (("self", thing.__self__),)
    parts: list[tuple[str, Any]] = []
    held = _container(thing)
    if held is dict and dict.__len__(thing) <= LONGEST:
        items = list(dict.items(thing))
        parts += [
            (f"[{key if isinstance(key, str) else number}]", value)
            for number, (key, value) in enumerate(items)
        ]
    elif held not in (dict, None) and held.__len__(thing) <= LONGEST:
        parts += _numbered(list(held.__iter__(thing)))
    elif kind is FunctionType:
        parts += _numbered(thing.__defaults__ or ())
        parts += (thing.__kwdefaults__ or {}).items()
        cells = thing.__closure__ or ()
        parts += zip(thing.__code__.co_freevars, map(_content, cells), strict=True)
    elif kind is partial:
        parts += [("function", thing.func), *_numbered(thing.args), *thing.keywords.items()]
    if kind not in descriptors:
        descriptors[kind] = _descriptors(kind)
    parts += _attributes(thing, descriptors[kind])
    return parts + [(each.__qualname__, each) for each in kind.__mro__]


def _numbered(things: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"[{number}]", thing) for number, thing in enumerate(things)]


def _attributes(thing: Any, descriptors: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Those in its ``__dict__``, unless its class has put something else there, and its slots."""
    skipped = _OF_TORCH if issubclass(type(thing), nn.Module) else ()
    for name, descriptor in descriptors:
        with suppress(AttributeError):  # a slot that has no value yet
            value = descriptor.__get__(thing)
            if name != "__dict__":
                yield name, value
                continue
            yield from ((n, part) for n, part in list(value.items()) if n not in skipped)


def _descriptors(kind: type) -> list[tuple[str, Any]]:
    """What gives the attributes of a class's instances without a function of Python's."""
    return [
        (name, value)
        for each in kind.__mro__
        for name, value in list(vars(each).items())
        if type(value) in (GetSetDescriptorType, MemberDescriptorType)
        and (name == "__dict__" or "__slots__" in vars(each))
    ]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None
