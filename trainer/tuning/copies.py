"""Copy a module and its data, so that a trial never changes the originals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from copyreg import dispatch_table
from mmap import mmap
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
from torch import Tensor

from trainer.module import TrainModule

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set})
_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType, Tensor, numpy.ndarray, mmap)


def copies(module: TrainModule, data: Any, known: list[Any]) -> tuple[TrainModule, Any]:
    """Return copies of a module and of the data that it is to be trained on.

    The module is copied completely. The data's memory is shared: tensors, arrays and what cannot be
    copied (open databases, locks). Positions, generators and counters are copied.

    Args:
        module: The user's.
        data: Loaders and datamodules, in any container. Objects that they share with each other or
            with the module are shared by the copies too.
        known: Objects that the copies share with the originals.

    Raises:
        TypeError: The module cannot be copied.
        ValueError: Something in the data can be read only once.
    """
    memo: dict[int, Any] = {id(each): each for each in known}
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"A {type(module).__name__} cannot be copied, and trials run on a copy so that they "
            f"leave no trace: {type(error).__name__}: {error}. Create what cannot be copied in "
            "setup() or configure_model()."
        ) from error
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, memo)
    pickler.dump(data)
    buffer.seek(0)
    return twin, _Unpickler(buffer, pickler.kept).load()


class _Pickler(pickle.Pickler):
    """Pickles an object, except for the objects that its copy shares with it.

    Attributes:
        kept: The shared objects, in the order of the references to them.
    """

    def __init__(self, file: io.BytesIO, memo: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._memo = memo
        self.kept: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) in self._memo:
            obj = self._memo[id(obj)]
        elif type(obj) in _PLAIN or not self._is_shared(obj):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1

    def _is_shared(self, obj: Any) -> bool:
        if isinstance(obj, _SHARED):
            return True
        if type(obj) in dispatch_table:
            return False
        try:
            obj.__reduce_ex__(5)
        except Exception as error:
            if isinstance(obj, Iterator):
                raise ValueError(
                    f"The data hold a {type(obj).__name__}, which can be read only once: a trial "
                    "would use up the first batches of the training. Pass a loader or another "
                    "object that can be iterated again."
                ) from error
            return True
        return False


class _Unpickler(pickle.Unpickler):
    """Reads what a `_Pickler` of this process has written."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]
