"""Indexing whole batches of datasets whose samples are rows of tensors.

A loader asks a dataset for one sample after another and stacks them. If the samples are nothing but
rows of tensors, so is the batch: the same values in the same containers, without creating
a tensor per sample, and without seeding, as nothing draws.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate

from trainer.data.by_value import sent
from trainer.data.columns import INDEX, Row, Sample, sample_of
from trainer.data.sampling import BatchIndices
from trainer.data.seeding import SeededDataset

# Users may register other ways, also before we are imported.
_AS_SHIPPED = {
    Tensor: collate.collate_tensor_fn,
    numpy.ndarray: collate.collate_numpy_array_fn,
    (numpy.bool_, numpy.number, numpy.object_): collate.collate_numpy_scalar_fn,
    float: collate.collate_float_fn,
    int: collate.collate_int_fn,
    str: collate.collate_str_fn,
    bytes: collate.collate_str_fn,
}
_ALL = Sample([])
"""Stands for the sample of a ``TensorDataset``: a row of each of its tensors."""
_PLAIN = (list, tuple, range, Tensor, numpy.ndarray)


def wrapped(loader: Any) -> SeededDataset:
    """Return a loader's dataset for reading by a `ShardedSampler`, batches already collated."""
    data = loader.dataset
    while type(data) is Subset:
        data = data.dataset
    told = hasattr(loader.dataset, "set_epoch")  # which may change anything
    collates = loader.batch_sampler is not None and loader.collate_fn is default_collate
    kind = TensorRows if collates and not told and _sample_of(data) is not None else SeededDataset
    return kind(loader.dataset, loader.collate_fn)


class TensorRows(SeededDataset):
    """A dataset whose samples are rows of tensors, in batches as ``default_collate`` makes them.

    The tensors are looked up and checked for each batch, and the class for each epoch, so that
    users may change them. Whenever a sample may be something else, it is read as any other.
    """

    _looked_at: tuple[Any, ...] = ()
    _sample: Sample | None = None

    def __getitems__(self, indices: BatchIndices) -> Any:
        data: Any = self.dataset
        rows: list[int] = indices
        while type(data) is Subset:
            places = data.indices
            if type(places) not in _PLAIN:
                return super().__getitems__(indices)
            rows, data = [places[row] for row in rows], data.dataset
        kind, epoch = type(data), indices.place[1]
        code = getattr(getattr(kind, "__getitem__", None), "__code__", None)
        if self._looked_at != (kind, code, epoch):
            self._looked_at = kind, code, epoch
            self._sample = _sample_of(data)
        sample = self._sample
        if sample is None or collate.default_collate_fn_map != _AS_SHIPPED:
            return super().__getitems__(indices)
        tensors = data.tensors if sample is _ALL else sample.tensors_of(data)
        if tensors is None or not {*map(type, tensors)} <= {Tensor}:
            return super().__getitems__(indices)
        if {*map(type, rows)} == {int} and min(rows) >= 0:
            try:
                taken = torch.frombuffer(array("q", rows), dtype=torch.int64)
                batch = [
                    tensor.index_select(0, taken)
                    for tensor in tensors
                    if tensor.is_cpu  # no device has to wait
                    and tensor.layout is torch.strided
                    and tensor.is_contiguous()
                    and 0 < tensor.ndim < 5  # torch.stack keeps other memory formats of more
                    and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
                ]
            except (IndexError, OverflowError, RuntimeError):
                pass  # the dataset's own error names the index; some types have no index_select
            else:
                if len(batch) == len(tensors):
                    return sent(batch if sample.is_flat else _shaped(sample.shape, batch, taken))
        return sent(default_collate(self._fetch(list(indices))))

    def __getstate__(self) -> dict[str, Any]:
        # A copy looks anew: code cannot be pickled.
        return vars(self) | {"_looked_at": (), "_sample": None}


def _sample_of(data: Any) -> Sample | None:
    return _ALL if type(data) is TensorDataset else sample_of(data)


def _shaped(shape: Any, batch: list[Tensor], taken: Tensor) -> Any:
    """Return the batch in the shape of a sample; empties the list of its tensors."""
    if shape is INDEX:
        return taken.clone()
    if type(shape) is Row:
        return batch.pop(0)
    if type(shape) is dict:
        return {key: _shaped(part, batch, taken) for key, part in shape.items()}
    return [_shaped(part, batch, taken) for part in shape]
