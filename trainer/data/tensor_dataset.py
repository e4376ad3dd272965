"""The fast path for tensor datasets: whole batches are indexed, instead of sample by sample.

A loader asks a ``TensorDataset`` for one sample after another and stacks them. Indexing its tensors
once per batch gives the same batch, without a tensor per sample. It also needs no seeding, since no
random numbers are drawn.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from trainer.data.inline_pickling import pickled_inline
from trainer.data.sampler import BatchIndices
from trainer.data.seeding import SeededDataset


def seeded_dataset(loader: Any) -> SeededDataset:
    """Return a loader's dataset for reading by a `ShardedSampler`; it yields collated batches."""
    data = loader.dataset
    while type(data) is Subset:
        data = data.dataset
    collates = loader.batch_sampler is not None and loader.collate_fn is default_collate
    kind = TensorRows if collates and type(data) is TensorDataset else SeededDataset
    return kind(loader.dataset, loader.collate_fn)


class TensorRows(SeededDataset):
    """A ``TensorDataset``, or a ``Subset`` of one, in batches like those of ``default_collate``.

    The tensors are looked up for each batch, so that users may replace them. Tensors of unusual
    kinds are read sample by sample, as torch does.
    """

    _checked: tuple[Tensor, ...] | None = None  # the tensors that `_is_rows` has accepted

    def __getitems__(self, indices: BatchIndices) -> Any:
        data: Any = self.dataset
        rows: list[int] = indices
        while type(data) is Subset:
            subset_indices = data.indices
            rows, data = [subset_indices[row] for row in rows], data.dataset
        try:
            if data.tensors is not self._checked:
                self._checked = data.tensors if all(map(_is_rows, data.tensors)) else None
            if self._checked:
                taken = torch.frombuffer(array("q", rows), dtype=torch.int64)
                return pickled_inline([tensor.index_select(0, taken) for tensor in self._checked])
        except (IndexError, OverflowError, RuntimeError, TypeError):
            pass  # torch's own error names the index; some dtypes have no index_select
        return pickled_inline(default_collate(self._fetch(list(indices))))


def _is_rows(tensor: Tensor) -> bool:
    """Return whether ``index_select`` gives the same result as indexing rows and stacking them."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        and tensor.is_contiguous()
        and 0 < tensor.ndim < 5  # torch.stack keeps other memory formats of more
    )
