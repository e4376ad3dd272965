"""Reproducible augmentation: seed the random generators for each batch that is fetched.

Each batch of a map-style dataset is fetched with generators seeded from (seed, epoch, position of
its first sample), and ``set_epoch`` is called with generators seeded from (seed, epoch). So random
numbers do not depend on the number of workers or processes, or on where a run was resumed.

This covers the global generators of torch, Python and numpy, and the generators that samplers,
datasets and transforms keep, which are found first. No checkpoint holds the states of the latter,
and a worker's copies end with the worker, so each generator is seeded where it is used. Its seed
also depends on the path of attributes and items that leads to it, and not on unrelated objects.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import (
    BuiltinMethodType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from trainer.data.inline_pickling import pickled_inline
from trainer.data.sampler import BatchIndices, JointBatches, SampleKey
from trainer.errors import module_logger
from trainer.rng import (
    isolate_rng,
    isolated_rng,
    load_rng_state,
    mix,
    rng_state,
    seed_local,
)
from trainer.tracebacks import shorten

logger = module_logger(__name__)

LONGEST = 1_000  # items; longer containers hold samples, not transforms, and are not searched
_LONG = 50  # items; longer containers may hold samples, so they are searched last
_MAX_OBJECTS = 20_000  # the largest number of objects to search, which takes about 50 ms
_OF_TORCH = (nn.Module().__dict__.keys() - {"_modules"}) | {"_trainer"}  # plus the Trainer
_SEARCHES = 2  # searches: after each of the first two batches of a process, or of its first passes
_LEAVES = ModuleType, torch.Tensor, str, bytes, int, float, type(None)

NamedGenerators = dict[str, Any]
"""Generators by their paths."""


def sampler_generators(source: Any) -> NamedGenerators:
    """Find the generators in the attributes of a loader's samplers, and the loader's own.

    They may be generators of torch, Python or numpy. The global ones are left out, because other
    code uses them too.
    """
    batches = getattr(source, "batch_sampler", None)
    samplers = getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)
    generators = [getattr(owner, "generator", None) for owner in (source, *samplers)]
    parts = batches.parts if isinstance(batches, JointBatches) else []
    inside = [owner for part, _ in parts for owner in (part, getattr(part, "sampler", None))]
    for sampler in (*samplers, *inside):
        generators += getattr(sampler, "__dict__", {}).values()
    return _select_seedable((str(number), thing) for number, thing in enumerate(generators))


def order_generator(loader: Any) -> torch.Generator | None:
    """Return the ``generator`` that determines a loader's order; None if it has none."""
    batches = loader.batch_sampler
    owners = (loader.sampler, getattr(batches, "sampler", None), batches)
    return next(
        (g for owner in owners if (g := getattr(owner, "generator", None)) is not None), None
    )


def generators_in(besides: Iterable[Any] = (), **owners: Any) -> NamedGenerators:
    """Find the generators that are reachable through attributes, containers and functions.

    For a dataset, these are its own generators, those of its transforms (recursively), and those
    bound in a `lambda` or a `partial`. If a dataset holds the module of a run or its methods, the
    module is not searched; from a ``collate_fn`` it is. Sets, containers of more than `LONGEST`
    items, and Python modules are not searched either.

    Args:
        besides: Objects that are not searched.
        **owners: The objects to start from; the argument names begin the paths.
    """
    return _select_seedable(
        (path, thing)
        for path, thing in reachable(besides, **owners)
        if issubclass(type(thing), _kinds())
    )


def reachable(besides: Iterable[Any] = (), **owners: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that `generators_in` searches, each with its path, `owners` first."""
    slots: dict[type, list[str]] = {}  # not cached: that would keep the classes alive
    near, far = deque(owners.items()), deque[tuple[str, Any]]()
    seen = {*map(id, besides), *map(id, owners.values())}
    # In a worker there is a copy of the module, which no checkpoint holds.
    of_data = get_worker_info() is None and not any(
        _is_run_module("", owner) for owner in owners.values()
    )
    for _ in range(_MAX_OBJECTS):
        if not (near or far):
            break
        path, thing = (near or far).popleft()
        yield path, thing
        if issubclass(type(thing), _kinds()) or (of_data and _is_run_module(path, thing)):
            continue
        long = _is_long(thing)
        for name, part in _parts(thing, slots):
            if id(part) not in seen and not issubclass(type(part), _LEAVES):
                seen.add(id(part))
                later = far if long or _is_long(part) else near
                prefix = f"{part.__module__}." if issubclass(type(part), type) else f"{path}."
                later.append((prefix + name, part))


def _is_run_module(path: str, thing: Any) -> bool:
    """Return whether an object is the module of a run, reached from a dataset.

    Its generators continue from step to step, and the checkpoint holds them. Only its
    ``collate_fn`` belongs to the loader.
    """
    is_module = issubclass(type(thing), nn.Module) and "_trainer" in thing.__dict__
    return is_module and not path.endswith("collate_fn.self")


def group_equal(generators: NamedGenerators) -> dict[str, str]:
    """Group generators of the same kind with the same state.

    Such generators were created to draw the same numbers, for an image and its mask for example.

    Returns:
        For the path of each generator, the path of the first generator in its group.
    """
    first: dict[str, str] = {}
    states = {path: repr([_kind(g), _as_lists(_state(g))]) for path, g in generators.items()}
    return {path: first.setdefault(state, path) for path, state in states.items()}


def seed_all(generators: NamedGenerators, seed: int, names: Mapping[str, str]) -> None:
    """Seed each generator with its own seed; generators of one `group_equal` group share it.

    Args:
        generators: The generators by their paths.
        seed: The seed from which each generator's seed is derived, together with its path.
        names: The result of `group_equal` for the generators.
    """
    for path, generator in generators.items():
        _seed(generator, mix(seed, crc32(names.get(path, path).encode())))


@contextmanager
def isolated_generators(
    generators: NamedGenerators, seed: int | None = None, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Save the generators' states, and restore them after the block.

    Args:
        generators: The generators that `generators_in` or `sampler_generators` found.
        seed: The seed for the generators inside the block, see `seed_all`; None keeps their states.
        names: See `seed_all`.
    """
    states = states_of(generators)
    try:
        if seed is not None:
            seed_all(generators, seed, names or {})
        yield
    finally:
        load_states(generators, states)


def states_of(generators: NamedGenerators) -> dict[str, list[Any]]:
    """Return the kind and the state of each generator, by path, as a tree for a checkpoint."""
    return {path: [_kind(generator), _state(generator)] for path, generator in generators.items()}


def load_states(generators: NamedGenerators, states: Mapping[str, Any]) -> list[str]:
    """Restore the result of `states_of`.

    Returns:
        The paths of saved generators that no longer exist or have another kind.
    """
    missing = []
    for path, (kind, state) in states.items():
        generator = generators.get(path)
        if generator is None or _kind(generator) != kind:
            missing.append(path)
        else:
            _load(generator, state)
    return missing


def module_generators(module: nn.Module, datamodule: Any = None) -> NamedGenerators:
    """Return the generators held by a module and a datamodule, without those of their Trainer."""
    return generators_in((module.__dict__.get("_trainer"),), module=module, datamodule=datamodule)


class RunGenerators:
    """The global generators and those of a module, which a checkpoint holds.

    Args:
        module: The user's module, searched for generators at each call.
        of_data: Returns generators that are seeded by the data in each epoch; they are left out.
    """

    def __init__(self, module: nn.Module, of_data: Callable[[], NamedGenerators]) -> None:
        self._module, self._of_data = module, of_data
        self._saved: dict[str, Any] | None = None

    def named(self) -> NamedGenerators:
        """Return the generators of the module by their paths."""
        data_ids = set(map(id, self._of_data().values()))
        generators = module_generators(self._module)
        return {path: g for path, g in generators.items() if id(g) not in data_ids}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, as a tree that a checkpoint can hold."""
        return rng_state() | {"own": states_of(self.named())}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the states; return the paths where the module has no such generator now."""
        load_rng_state(state)
        # "own" is missing on a rank that the run did not have when it was saved.
        return load_states(self.named(), state.get("own", {}))

    def restore_later(self, state: dict[str, Any]) -> None:
        """Keep states for `restore`, since the set-up of a run still draws random numbers."""
        self._saved = state

    def restore(self) -> list[str]:
        """Restore the kept states, once; returns the same as `load_state_dict`."""
        if self._saved is None:
            return []
        missing = self.load_state_dict(self._saved)
        self._saved = None
        return missing


def _kind(generator: Any) -> str:
    name = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return f"{name} {generator.device.type}"
    return name if isinstance(generator, random.Random) else f"{name} {_bit_kind(generator)}"


def _as_lists(state: Any) -> Any:
    """Convert arrays in a state to lists: the `repr` of a long array is abbreviated."""
    if isinstance(state, dict):
        return {name: _as_lists(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state") and _bit_kind(generator) == "MT19937":
        generator.seed(seed % 2**32)
    else:  # numpy.random.Generator has no method to seed it
        bits = _bit_generator(generator)
        bits.state = type(bits)(seed).state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # RandomState; legacy=False includes a cached Gaussian
        return generator.get_state(legacy=False)
    return _bit_generator(generator).state


def _load(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, left_over = state
        generator.setstate((version, tuple(words), left_over))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        _bit_generator(generator).state = state


def _bit_kind(generator: Any) -> str:
    return type(_bit_generator(generator)).__name__


def _bit_generator(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


@cache  # not at import: numpy loads its random module lazily
def _kinds() -> tuple[type, ...]:
    return torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState


def _select_seedable(things: Iterable[tuple[str, Any]]) -> NamedGenerators:
    """Select the generators that can be seeded here, without duplicates and the global ones."""
    python = getattr(random.random, "__self__", None)
    seen = {id(torch.default_generator), id(python), id(numpy.random.mtrand._rand)}
    generators: NamedGenerators = {}
    for path, thing in things:
        if issubclass(type(thing), _kinds()) and id(thing) not in seen and _can_be_seeded(thing):
            seen.add(id(thing))
            generators[path] = thing
    return generators


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        # A forked worker must not use an accelerator, nor an accelerator's generator.
        return generator.device.type == "cpu" or get_worker_info() is None
    if isinstance(generator, random.Random):  # not SystemRandom, nor one with an unknown state
        names = "seed", "getstate", "setstate"
        return all(getattr(type(generator), n) is getattr(random.Random, n) for n in names)
    return type(_bit_generator(generator)).__module__.startswith("numpy.")


def _container(thing: Any) -> Any:
    """Return the builtin container type of an object; None if it is no container."""
    kind = type(thing)  # isinstance would query a proxy's __class__
    return next((base for base in (list, tuple, deque, dict) if issubclass(kind, base)), None)


def _is_long(thing: Any) -> bool:
    held = _container(thing)
    return held is not None and held.__len__(thing) > _LONG


def _parts(thing: Any, slots: dict[type, list[str]]) -> Iterable[tuple[str, Any]]:
    """Return the attributes, items and classes of an object, without running code of its class.

    Of the attributes that torch gives an ``nn.Module``, only the submodules are returned. A
    container is copied before it is iterated, because other threads may change it.
    """
    kind = type(thing)
    if issubclass(kind, type):  # of class attributes, only generators
        shared = list(vars(thing).items())
        return [(name, value) for name, value in shared if issubclass(type(value), _kinds())]
    if kind is MethodType:
        return ("self", thing.__self__), ("function", thing.__func__)
    if kind is BuiltinMethodType:
        return (("self", thing.__self__),)
    parts: list[tuple[str, Any]] = []
    held = _container(thing)
    if held is not None and held.__len__(thing) <= LONGEST:
        if held is dict:
            items = enumerate(list(dict.items(thing)))
            parts += [(f"[{k if isinstance(k, str) else n}]", value) for n, (k, value) in items]
        else:
            parts += _indexed(list(held.__iter__(thing)))
    elif kind is FunctionType:
        parts += _indexed(thing.__defaults__ or ())
        parts += (thing.__kwdefaults__ or {}).items()
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with suppress(ValueError):  # the variable is unset
                parts.append((name, cell.cell_contents))
    elif kind is partial:
        parts += [("function", thing.func), *_indexed(thing.args), *thing.keywords.items()]
    with suppress(AttributeError):
        attributes = list(object.__getattribute__(thing, "__dict__").items())
        skipped = _OF_TORCH if issubclass(kind, nn.Module) else ()
        parts += [(name, value) for name, value in attributes if name not in skipped]
    if kind not in slots:
        slots[kind] = _slots(kind)
    for name in slots[kind]:
        with suppress(AttributeError):  # the slot is unset
            parts.append((name, object.__getattribute__(thing, name)))
    return parts + [(cls.__qualname__, cls) for cls in kind.__mro__]


def _indexed(things: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"[{number}]", thing) for number, thing in enumerate(things)]


def _slots(kind: type) -> list[str]:
    return [
        name
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for name, value in vars(cls).items()
        if type(value) is MemberDescriptorType
    ]


class LazyGenerators:
    """Finds random generators that a process creates while it reads its first batch or pass.

    They can be seeded from the second batch on, but not for the first one, so a warning is logged.

    Args:
        owner: The object that creates the generators, for the warning.
        part: The unit between two searches: ``"batch"`` or ``"pass"``.

    Attributes:
        is_pending: Whether to call `search` after the next batch or pass.
    """

    def __init__(self, owner: str, part: str = "batch") -> None:
        self._owner, self._part = owner, part
        self.is_pending = True
        self._searches = 0
        self._late: NamedGenerators = {}

    def search(
        self, find: Callable[[], NamedGenerators], before: NamedGenerators
    ) -> NamedGenerators:
        """Search after a batch or pass; return the known generators and the new ones.

        Args:
            find: Searches for the generators.
            before: The generators that were found before the batch or pass.
        """
        self._searches += 1
        self.is_pending = self._searches < _SEARCHES
        generators = find()
        if self._searches == 1:
            self._late = {path: g for path, g in generators.items() if path not in before}
            return {**before, **generators}
        late = [path for path, g in self._late.items() if generators.get(path) is g]
        worker = get_worker_info()
        if late and (worker is None or worker.id == 0):
            logger.warning(
                "%s created a random generator (%s) in its first %s. %s that %s draws from it "
                "does not depend on the seed, and differs after a resume: create the generator "
                "in __init__.",
                self._owner,
                ", ".join(late),
                self._part,
                "What" if worker is None else "In each worker, what",
                self._part,
            )
        return before


def set_epoch_of(dataset: Any, seed: int, epoch: int) -> None:
    """Call a dataset's ``set_epoch``, if any, with seeded generators.

    ``set_epoch`` may draw random numbers. Every process and worker calls this function itself, and
    all draw the same numbers.

    Args:
        dataset: A loader's dataset.
        seed: The run's seed.
        epoch: The epoch that is read next.
    """
    if isinstance(dataset, SeededDataset):
        dataset.last_epoch, dataset._search_again = (seed, epoch), True
    if hasattr(dataset, "set_epoch"):
        epoch_seed = mix(seed, epoch, -1)  # no batch has this position
        seeded = isinstance(dataset, SeededDataset)  # a stream is seeded for the whole pass
        generators = dataset._find() if seeded else {}
        with (
            isolated_rng(epoch_seed),
            isolated_generators(
                generators, mix(epoch_seed, 1), dataset._equal_generators if seeded else {}
            ),
        ):
            dataset.set_epoch(epoch)


def identity_collate(batch: Any) -> Any:
    """The ``collate_fn`` of a rebuilt loader: `SeededDataset` has collated the batch already."""
    return batch


def _shorten_in_worker(error: Exception) -> None:
    """Hide our frames in a worker, which passes the traceback on as text.

    It is called in the outermost of these frames, as only that one's traceback has all of them.
    """
    if get_worker_info() is not None:
        shorten(error)


class SeededDataset(Dataset[Any]):
    """Wraps a map-style dataset; fetches each batch with the seed that comes with its indices.

    It also collates the batch, because a ``collate_fn`` may draw random numbers (for masked
    language modelling, for example). All other attributes are those of the wrapped dataset.

    Args:
        dataset: The user's dataset.
        collate_fn: The user's ``collate_fn``. The rebuilt loader's own one is `identity_collate`.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.last_epoch: tuple[int, int] | None = (
            None  # the run's seed and the epoch of the latest set_epoch; workers inherit it
        )
        self._equal_generators = group_equal(self._find())
        self._search_again = True
        self._own: NamedGenerators = {}  # generators of the dataset and the collate_fn
        self._lazy = LazyGenerators(f"The dataset ({type(dataset).__name__}) or its collate_fn")

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # looked up during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: BatchIndices | SampleKey) -> Any:
        # The loader has no batch_sampler, so it asks for one item.
        plain = index.key if isinstance(index, SampleKey) else list(index)
        try:
            return self._seeded(index.seed_key, lambda: self.collate_fn(self.dataset[plain]))
        except Exception as error:
            _shorten_in_worker(error)
            raise

    def __getitems__(self, indices: BatchIndices) -> Any:
        try:
            return self._seeded(
                indices.seed_key, lambda: self.collate_fn(self._fetch(list(indices)))
            )
        except Exception as error:
            _shorten_in_worker(error)
            raise

    def _fetch(self, indices: list[int]) -> Any:
        dataset = self.dataset
        fetch = getattr(dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def _seeded(self, seed_key: tuple[int, int, int], fetch: Callable[[], Any]) -> Any:
        seed = mix(*seed_key)
        if get_worker_info() is not None:  # in a worker nothing else uses the generators
            run_seed, epoch, _ = seed_key
            if self.last_epoch != (run_seed, epoch):  # a persistent worker, in a later epoch
                set_epoch_of(self, run_seed, epoch)
            seed_local(seed)
            if generators := self._generators():
                seed_all(generators, mix(seed, 1), self._equal_generators)
            batch = pickled_inline(fetch())
        else:
            put_back = isolate_rng(seed)
            try:
                if generators := self._generators():
                    with isolated_generators(generators, mix(seed, 1), self._equal_generators):
                        batch = fetch()
                else:
                    batch = fetch()
            finally:
                put_back()
        if self._lazy.is_pending:
            self._own = self._lazy.search(self._find, self._own)
        return batch

    def _find(self) -> NamedGenerators:
        """Find the random generators that the dataset and the ``collate_fn`` keep."""
        return generators_in(dataset=self.dataset, collate_fn=self.collate_fn)

    def _generators(self) -> NamedGenerators:
        """Return the generators of the dataset and the ``collate_fn``; search once per epoch."""
        if self._search_again:
            self._search_again = False
            # Keep generators that were found before: the search skips long containers, and a
            # container of the dataset may have grown.
            self._own = {**self._own, **self._find()}
        return self._own
