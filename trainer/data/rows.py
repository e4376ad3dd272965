"""Indexing whole batches of datasets whose samples are rows of tensors.

A loader asks a dataset for one sample after another and stacks them. If the samples are nothing but
rows of tensors, so is the batch: the same values in the same containers, without creating
a tensor per sample, and without seeding, as nothing draws.
"""

from __future__ import annotations

from array import array
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate
from torch.utils.data._utils.collate import (
    collate_int_fn,
    collate_numpy_array_fn,
    collate_numpy_scalar_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

from trainer.data.by_value import sent
from trainer.data.columns import INDEX, Columns, columns_of
from trainer.data.sampling import BatchIndices
from trainer.data.seeding import SeededDataset

_AS_SHIPPED: list[tuple[Any, Any]] = [
    (Tensor, collate_tensor_fn),
    (numpy.ndarray, collate_numpy_array_fn),
    ((numpy.bool_, numpy.number, numpy.object_), collate_numpy_scalar_fn),
    (int, collate_int_fn),
]


def wrapped(loader: Any) -> SeededDataset:
    """Return a loader's dataset for reading by a `ShardedSampler`, batches already collated."""
    by_rows = loader.batch_sampler is not None and loader.collate_fn is default_collate
    found = columns_of(_innermost(loader.dataset)) if by_rows else None
    kind = SeededDataset if found is None else TensorRows
    return kind(loader.dataset, loader.collate_fn)


class TensorRows(SeededDataset):
    """A dataset whose samples are rows of tensors, in batches as ``default_collate`` makes them.

    Should its samples become something else, it is read as any other.
    """

    _columns: Columns | None = None
    _can_be_taken = False

    def __getitems__(self, indices: BatchIndices) -> Any:
        data: Any = self.dataset
        rows: list[int] = indices
        while type(data) is Subset:
            places = data.indices
            rows, data = [places[row] for row in rows], data.dataset
        columns = self._columns
        if (
            columns is None
            or not all(map(is_, map(data.__dict__.get, columns.names), columns.values))
            or type(data).__getitem__.__code__ is not columns.code
        ):
            columns = self._look_at(data)
        if columns is None:
            return super().__getitems__(indices)
        if self._can_be_taken and {*map(type, rows)} == {int} and min(rows) >= 0:
            try:
                taken = torch.frombuffer(array("q", rows), dtype=torch.int64)
                batch = [tensor.index_select(0, taken) for tensor in columns.tensors]
            except (IndexError, OverflowError):
                pass  # the dataset's own error names the index
            else:
                return sent(batch if columns.is_flat else _shaped(columns.sample, batch, taken))
        return sent(default_collate([self.dataset[index] for index in indices]))

    def __getstate__(self) -> dict[str, Any]:
        # A copy looks anew, at the copied tensors.
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    def _look_at(self, data: Any) -> Columns | None:
        columns = columns_of(data) if _collates_as_shipped() else None
        self._columns = columns
        self._can_be_taken = columns is not None and all(map(_can_be_taken, columns.tensors))
        return columns


def _innermost(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _shaped(sample: Any, batch: list[Tensor], taken: Tensor) -> Any:
    """Return the batch in the shape of a sample; empties the list of its tensors."""
    if sample is INDEX:
        return taken.clone()
    if type(sample) is Tensor:
        return batch.pop(0)
    if type(sample) is dict:
        return {key: _shaped(part, batch, taken) for key, part in sample.items()}
    return [_shaped(part, batch, taken) for part in sample]


def _collates_as_shipped() -> bool:
    """Return whether ``default_collate`` does what it did; users may register other ways."""
    ways = default_collate_fn_map
    return all(ways.get(kind) is way for kind, way in _AS_SHIPPED) and not any(
        issubclass(kind, key) for key in ways for kind in (dict, list, tuple)
    )


def _can_be_taken(tensor: Tensor) -> bool:
    """Return whether rows of the tensor equal stacked samples, and no device has to wait."""
    return (
        tensor.is_cpu
        and tensor.ndim > 0
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )
