"""Several loaders read together: each batch is a joint batch, with one batch of each loader.

If all are loaders of map-style datasets, they are read as one: a single ``DataLoader`` whose batch
sampler yields the keys of all parts of a joint batch. The position in the epoch is then the number
of joint batches, and sharding, seeds, workers and resuming are those of a single loader. Other
loaders are read as one stream of joint batches.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainer.checks import check_choice
from trainer.data.iterable import initial_state, stateful_source
from trainer.data.libraries import user_shard
from trainer.data.sampler import MODES, JointBatches, joint_length, joint_rounds, length_of
from trainer.data.seeding import identity_collate
from trainer.data.tensor_dataset import TensorRows, seeded_dataset
from trainer.data.workers import has_torch_iteration, reading_kwargs, signal_safe
from trainer.tree import children, rebuild


def holds_loaders(value: Any) -> bool:
    """Return whether this is a dict or list of loaders; a list of batches is a single loader."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(value, (tuple, MutableSequence, Mapping)):  # Hydra's lists are not lists
        return False
    if not all(hasattr(part, "__iter__") and not hasattr(part, "shape") for part in parts):
        return False
    batches = isinstance(value, Sequence) and all(
        isinstance(part, (list, tuple, Mapping)) for part in parts
    )
    return bool(parts) and not batches


def _leaves(tree: Any) -> list[Any]:
    if not holds_loaders(tree):
        return [tree]
    return [leaf for _, part in children(tree) or () for leaf in _leaves(part)]


def _with_batches(tree: Any, batches: Iterator[Any]) -> Any:
    """Return a container like `tree`, with a batch in place of each loader."""
    if not holds_loaders(tree):
        return next(batches)
    return rebuild(tree, [_with_batches(part, batches) for _, part in children(tree) or ()])


class CombinedLoader:
    """Loaders whose batches come together, such as labelled and unlabelled data.

    A batch has the structure of `iterables`, with a batch in place of each loader. A list or dict
    of training loaders becomes a `CombinedLoader` with the mode ``"max_size_cycle"``.

    Example::

        loader = CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, "max_size_cycle")
        trainer.fit(module, loader)  # training_step gets {"labelled": ..., "unlabelled": ...}

    Args:
        iterables: A dict or list of loaders, perhaps nested.
        mode: ``"min_size"`` ends with the shortest loader. ``"max_size_cycle"`` ends with the
            longest one, and restarts the others, in a new order if they shuffle. ``"max_size"``
            also ends with the longest one, with None for loaders that have ended. ``"sequential"``
            reads one loader after another, so each batch comes from one loader.

    Attributes:
        iterables: As given.
        mode: As given.
        flattened: The loaders in a list.

    Raises:
        ValueError: There is no such mode.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        check_choice("The mode of a CombinedLoader", mode, MODES)
        self.iterables, self.mode = iterables, mode
        self.flattened = _leaves(iterables)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield triples (batch, index of the batch, index of the loader), as Lightning does."""
        before = number = 0
        for index, parts in enumerate(joint_rounds(self._passes(), self.mode)):
            if self.mode == "sequential":
                if parts[0][0] != number:
                    before, number = index, parts[0][0]
                yield parts[0][1], index - before, number
            else:
                yield self.joined(parts), index, 0

    def __len__(self) -> int:
        length = joint_length([length_of(loader) for loader in self.flattened], self.mode)
        if length is None:
            raise TypeError("A loader of the CombinedLoader has no length.")
        return length

    def _passes(self) -> list[Callable[[int], Iterable[Any]]]:
        return [partial(_unchanged, loader) for loader in self.flattened]

    def joined(self, parts: Sequence[tuple[int, Any]]) -> Any:
        """Return the joint batch, given (loader index, batch) pairs.

        Args:
            parts: One pair for each loader that has a batch; in the mode ``"sequential"`` a single
                pair.
        """
        if self.mode == "sequential":
            return parts[0][1]
        batches = dict(parts)
        return _with_batches(self.iterables, map(batches.get, range(len(self.flattened))))

    def as_single_loader(self) -> Any:
        """Return the loader, or iterable of joint batches, that is read instead."""
        loaders = self.flattened
        if not all(
            isinstance(loader, DataLoader)
            and has_torch_iteration(type(loader))
            and not isinstance(loader.dataset, IterableDataset)
            for loader in loaders
        ):
            return JointStream(self)
        batches = JointBatches(
            [
                (loader.sampler, True)
                if loader.batch_sampler is None
                else (loader.batch_sampler, False)
                for loader in loaders
            ],
            self.mode,
        )
        sized = all(length_of(loader.dataset) is not None for loader in loaders)
        data = SizedJointData(self) if sized else JointData(self)
        return DataLoader(**_kwargs_of(loaders), dataset=data, batch_sampler=batches)


def _unchanged(loader: Any, number: int) -> Iterable[Any]:
    """Return the loader for a pass; `number` counts the passes of an epoch."""
    del number
    return loader  # type: ignore[no-any-return]  # whatever the user gave


def _kwargs_of(loaders: Sequence[DataLoader[Any]]) -> dict[str, Any]:
    """Return the arguments of a loader with the total number of workers of these loaders."""
    options = [reading_kwargs(loader) for loader in loaders]

    def all_of(name: str) -> list[Any]:
        return [kwargs[name] for kwargs in options if kwargs[name] is not None]

    contexts = all_of("multiprocessing_context")
    init = partial(_init_worker_of_all, [kwargs["worker_init_fn"] for kwargs in options])
    return {
        "num_workers": sum(all_of("num_workers")),
        "collate_fn": identity_collate,
        "pin_memory": any(all_of("pin_memory")),
        "timeout": max(all_of("timeout")),
        "worker_init_fn": init if all_of("worker_init_fn") else None,
        "multiprocessing_context": contexts[0] if contexts else None,
        "prefetch_factor": max(all_of("prefetch_factor"), default=None),
        "persistent_workers": any(all_of("persistent_workers")),
    }


def _init_worker_of_all(functions: Sequence[Callable[[int], Any] | None], worker: int) -> None:
    """Call the ``worker_init_fn`` of each loader, with its own dataset in ``get_worker_info``."""
    info: Any = get_worker_info()
    joint = info.dataset
    for dataset, function in zip(joint.datasets, functions, strict=True):
        if function is not None:
            object.__setattr__(info, "dataset", dataset)  # its __setattr__ raises
            function(worker)
    object.__setattr__(info, "dataset", joint)


class JointData(Dataset[Any]):
    """The datasets of several loaders; fetches and collates joint batches.

    Args:
        combined: The loaders.

    Raises:
        ValueError: Some of the loaders read streams that were split by process, and others do not.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        loaders = combined.flattened
        self.datasets = [loader.dataset for loader in loaders]
        self._collate = [loader.collate_fn for loader in loaders]
        self._single = [loader.batch_sampler is None for loader in loaders]
        datasets = map(seeded_dataset, loaders)  # batches of a TensorDataset are indexed whole
        self._rows = [data if isinstance(data, TensorRows) else None for data in datasets]
        shape = combined.iterables  # without the loaders, which would be sent to workers
        numbers = iter(range(len(loaders)))
        self._join = partial(_join_batches, _with_batches(shape, numbers), combined.mode)

    def set_epoch(self, epoch: int) -> None:
        """Call the ``set_epoch`` of the datasets that have one."""
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def __getitems__(self, keys: Sequence[tuple[int, Any]]) -> Any:
        keys_of: dict[int, list[Any]] = {}
        for number, key in keys:
            keys_of.setdefault(number, []).append(key)
        return self._join({n: self._fetch(n, keys) for n, keys in keys_of.items()})

    def _fetch(self, number: int, keys: list[Any]) -> Any:
        dataset, collate, rows = self.datasets[number], self._collate[number], self._rows[number]
        if rows is not None:
            return rows.__getitems__(keys)  # type: ignore[arg-type]  # no seed is needed
        if self._single[number]:
            return collate(dataset[keys[0]])
        fetch = getattr(dataset, "__getitems__", None)
        return collate(fetch(keys) if fetch else [dataset[key] for key in keys])


class SizedJointData(JointData):
    """Joint data of datasets with lengths; its length is their sum."""

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


def _join_batches(shape: Any, mode: str, batches: Mapping[int, Any]) -> Any:
    """Return a joint batch; `shape` has loader numbers in place of batches."""
    if mode == "sequential":
        return next(iter(batches.values()))
    if isinstance(shape, int):
        return batches.get(shape)
    parts = [_join_batches(part, mode, batches) for _, part in children(shape) or ()]
    return rebuild(shape, parts)


def _restarted(loader: Any, initial: bytes | None, number: int) -> Iterable[Any]:
    """Return the loader for a pass of a `JointStream`; see `_unchanged`."""
    del number
    if initial is not None:
        stateful_source(loader).load_state_dict(pickle.loads(initial))  # noqa: S301 - made here
    rebuilds = isinstance(loader, DataLoader) and has_torch_iteration(type(loader))
    return signal_safe(loader) if rebuilds else loader


class JointStream:
    """Yields joint batches of loaders, some of which are streams.

    A resume reads the epoch again from its beginning, so each pass of a stream begins like its
    first one, even if the stream itself would continue from its state.

    Args:
        combined: The loaders.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        if len({user_shard(loader) is None for loader in combined.flattened}) > 1:
            raise ValueError(
                "Some loaders of the CombinedLoader read streams that are split by process, but "
                "the others are not: each process would read all of their data. Split all "
                "streams or none."
            )
        self._combined = combined
        self._initial: list[bytes | None] | None = None  # the streams' states before the first pass

    def __iter__(self) -> Iterator[Any]:
        loaders = self._combined.flattened
        if self._initial is None:
            self._initial = [initial_state(stateful_source(loader)) for loader in loaders]
        passes = [partial(_restarted, *pair) for pair in zip(loaders, self._initial, strict=True)]
        for parts in joint_rounds(passes, self._combined.mode):
            yield self._combined.joined(parts)

    def __len__(self) -> int:
        return len(self._combined)

    def set_epoch(self, epoch: int) -> None:
        """Call the ``set_epoch`` of the loaders, their samplers and datasets that have one.

        It is called with seeded generators, as for any loader.
        """
        for loader in self._combined.flattened:
            names = "batch_sampler", "sampler", "dataset"
            parts = loader, *(getattr(loader, name, None) for name in names)
            for part in {id(p): p for p in parts if hasattr(p, "set_epoch")}.values():
                part.set_epoch(epoch)
