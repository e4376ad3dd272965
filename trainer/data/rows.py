"""Indexing whole batches of datasets that consist of plain tensors.

A loader asks a dataset for one sample after another and stacks them. If the dataset is nothing but
tensors, the batch is rows of each tensor: the same values in the same containers, without creating
a tensor per sample.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from trainer.data.by_value import sent


def attribute_of_dataset(wrapper: Any, name: str) -> Any:
    """Forward attributes of a wrapper to the user's dataset; used as its ``__getattr__``."""
    if name == "dataset":  # looked up during unpickling, before it is set
        raise AttributeError(name)
    return getattr(wrapper.dataset, name)


class TensorRows:
    """A dataset of plain tensors, as `trainer.data.seeding.draws_nothing` knows them, in batches.

    The loader's ``collate_fn`` must leave these as they are. All other attributes are the
    dataset's.

    Args:
        dataset: The user's ``TensorDataset``, or a ``Subset`` of one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._looked_at: tuple[Tensor, ...] = ()
        self._can_be_taken = False

    __getattr__ = attribute_of_dataset

    def __getitems__(self, indices: list[int]) -> Any:
        data, rows = self.dataset, indices
        while type(data) is Subset:
            places = data.indices
            rows, data = [places[row] for row in rows], data.dataset
        if self._looked_at is not data.tensors:
            self._looked_at, self._can_be_taken = data.tensors, _can_be_taken(data.tensors)
        if not (self._can_be_taken and {*map(type, rows)} == {int} and min(rows) >= 0):
            return self._one_by_one(indices)
        try:
            taken = torch.frombuffer(array("q", rows), dtype=torch.int64)
            return sent([tensor.index_select(0, taken) for tensor in data.tensors])
        except (IndexError, OverflowError):  # the dataset's own error names the index
            return self._one_by_one(indices)

    def _one_by_one(self, indices: list[int]) -> Any:
        return sent(default_collate([self.dataset[index] for index in indices]))


def _can_be_taken(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether rows of the tensors equal stacked samples, and no device has to wait.

    Users may have registered another way to stack tensors with torch.
    """
    return default_collate_fn_map.get(Tensor) is collate_tensor_fn and all(
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        for tensor in tensors
    )
