"""Random number generators that loaders, samplers and datasets keep, besides the global ones.

A sampler draws its order from them, a dataset and its transforms their augmentation. No checkpoint
holds their states, and a worker's are lost with it; so each is seeded where it is used.

They are identified by the path of attributes and items that leads to them, so that unrelated
objects beside them make no difference.
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

LONGEST = 1_000  # longer containers hold samples, not transforms
_LONG = 50  # longer ones may hold samples, so they are searched last
_MOST = 20_000  # objects to search, in about 50 ms
_OF_TORCH = nn.Module().__dict__.keys() - {"_modules"}
_LEAVES = ModuleType, torch.Tensor, str, bytes, int, float, type(None)
_CONTAINERS = list, tuple, deque, dict

Descriptors = dict[type, list[tuple[str, Any]]]

Found = dict[str, Any]
"""Generators by their paths."""


def of_samplers(source: Any) -> Found:
    """Find the generators that a loader and its samplers draw from, in any attribute.

    They may be torch's, Python's or numpy's; the global ones, which others use too, are left out.
    """
    batches = getattr(source, "batch_sampler", None)
    samplers = getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (source, *samplers)]
    for sampler in samplers:
        found += getattr(sampler, "__dict__", {}).values()
    return _seedable((str(number), thing) for number, thing in enumerate(found))


def of_order(loader: Any) -> torch.Generator | None:
    """Return the generator that determines a loader's order, if it was given one."""
    batches = loader.batch_sampler
    owners = (loader.sampler, getattr(batches, "sampler", None), batches)
    return next((g for each in owners if (g := getattr(each, "generator", None)) is not None), None)


def held_by(besides: Iterable[Any] = (), **owners: Any) -> Found:
    """Find the generators that can be reached through attributes, containers and functions.

    For a dataset these are its own, those of its transforms, recursively, and those bound in a
    `lambda` or a `partial`. Sets, containers of more than `LONGEST` items, and modules are not
    searched.

    Args:
        besides: Further objects not to be searched.
        **owners: The objects to start from; their names begin the paths.
    """
    descriptors: Descriptors = {}  # not cached: that would keep the classes alive
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
    """Map the path of each generator to that of the first one of its kind with the same state.

    Such generators were created to draw the same, for an image and its mask for example.
    """
    first: dict[str, str] = {}
    places = {path: repr([_kind(each), _plain(_state(each))]) for path, each in found.items()}
    return {path: first.setdefault(place, path) for path, place in places.items()}


def seed_all(found: Found, seed: int, names: Mapping[str, str]) -> None:
    """Seed generators, each with its own seed, except for those that are `alike`.

    Args:
        found: The generators.
        seed: Their seeds are derived from it.
        names: The result of `alike` for them.
    """
    for path, generator in found.items():
        _seed(generator, mix(seed, crc32(names.get(path, path).encode())))


@contextmanager
def set_aside(
    found: Found, seed: int | None = None, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Restore the generators' states after the block.

    Args:
        found: The generators that `held_by` or `of_samplers` found.
        seed: Seeds them for the block, see `seed_all`; None keeps their states.
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
    """Return their states, each with the name of its kind, as a tree to be saved."""
    return {path: [_kind(generator), _state(generator)] for path, generator in found.items()}


def load_states(found: Found, states: Mapping[str, Any]) -> list[str]:
    """Restore what `states_of` returned.

    Returns:
        The paths of saved generators that no longer exist or are of another kind.
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
    """Return a state whose `repr` is complete."""
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
    else:  # numpy's newer kinds have no method to seed them
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


@cache  # not at import: numpy loads its random module lazily
def _kinds() -> tuple[type, ...]:
    return torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState


def _seedable(things: Iterable[tuple[str, Any]]) -> Found:
    """Keep the generators that can be seeded here, each once, without the global ones."""
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
        # A forked worker must not touch a device's generator.
        return generator.device.type == "cpu" or get_worker_info() is None
    if isinstance(generator, random.Random):  # not SystemRandom, nor one with an unknown state
        names = "seed", "getstate", "setstate"
        return all(getattr(type(generator), n) is getattr(random.Random, n) for n in names)
    return type(_bits_of(generator)).__module__.startswith("numpy.")


def _container(thing: Any) -> Any:
    """Return the builtin container type of an object; None if it is no container."""
    kind = type(thing)  # isinstance would query a proxy's __class__
    return next((each for each in _CONTAINERS if issubclass(kind, each)), None)


def _is_long(thing: Any) -> bool:
    held = _container(thing)
    return held is not None and held.__len__(thing) > _LONG


def _parts(thing: Any, descriptors: Descriptors) -> Iterable[tuple[str, Any]]:
    """Return the parts of an object with their names, without running code of its class.

    Of torch's own attributes of a module only the submodules count. Containers are copied first,
    since other threads may change them.
    """
    kind = type(thing)
    if issubclass(kind, type):  # class attributes, of which only generators count
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
    """Yield what is in its ``__dict__``, unless the class redefines that, and in its slots."""
    skipped = _OF_TORCH if issubclass(type(thing), nn.Module) else ()
    for name, descriptor in descriptors:
        with suppress(AttributeError):  # an unset slot
            value = descriptor.__get__(thing)
            if name != "__dict__":
                yield name, value
                continue
            yield from ((n, part) for n, part in list(value.items()) if n not in skipped)


def _descriptors(kind: type) -> list[tuple[str, Any]]:
    """Return the descriptors that give instance attributes without running Python code."""
    return [
        (name, value)
        for each in kind.__mro__
        for name, value in list(vars(each).items())
        if type(value) in (GetSetDescriptorType, MemberDescriptorType)
        and (name == "__dict__" or "__slots__" in vars(each))
        and name != "__weakref__"  # a dataclass with slots has another class's in Python 3.10
    ]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an unset variable
        return None
