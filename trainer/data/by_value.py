"""Batches on their way from a worker to the main process, small tensors through the pipe.

torch puts every tensor that a worker sends into a piece of shared memory of its own, and passes a
file descriptor over a new connection for it: hundreds of microseconds each, whatever their size,
half of them spent by the main process. To write the bytes of a small tensor into the pipe, with
the rest of the batch, takes a tenth of that, and none of the descriptors of which a process has
few.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor
from torch.utils.data import get_worker_info

LIMIT = 1 << 18
"""Bytes of the largest storage that is written out; from some 2 MB on shared memory is faster."""


def sent(batch: Any) -> Any:
    """What a worker is to return for a batch, so that the batch arrives; without workers itself.

    It is pickled at once, not by the queue's thread some time later: the dataset may use the memory
    again, and what cannot be pickled is an error of the batch instead of one that nobody hears of.
    """
    return batch if get_worker_info() is None else _Sent(bytes(_Pickler.dumps(batch)))


class _Sent:
    """Becomes the batch when it is unpickled."""

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.pickled,)


class _Pickler(ForkingPickler):
    """As torch's workers pickle, but for small tensors.

    A storage is an object of its own in the pickle: what shares one here shares one there.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        table: dict[type, Callable[[Any], Any]] = dict(self.dispatch_table)
        table[Tensor], table[torch.UntypedStorage] = _reduce_tensor, _reduce_storage
        self.dispatch_table = table


def _reduce_tensor(tensor: Tensor) -> Any:
    """Those that are more than numbers in memory are left to torch."""
    if (
        not tensor.is_cpu
        or tensor.layout is not torch.strided
        or (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        or any(getattr(tensor, "names", ()))  # until torch 2.12
    ):
        return reduce_tensor(tensor)
    tensor = tensor.resolve_conj().resolve_neg()  # bits beside the memory, which torch loses
    storage = tensor.untyped_storage()
    if not _is_small(storage):
        return reduce_tensor(tensor)
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _tensor, (storage, tensor.dtype, *place)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if not _is_small(storage):
        return reduce_storage(storage)
    return _storage, (ctypes.string_at(storage.data_ptr(), storage.nbytes()),)


def _is_small(storage: torch.UntypedStorage) -> bool:
    return storage.nbytes() <= LIMIT and storage.device.type == "cpu"


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def _storage(data: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data), device="cpu")  # aligned as any tensor's
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage
