"""Datasets whose samples are rows of tensors: a ``TensorDataset``, or a class that does the same.

Most classes over tensors in memory have a ``__getitem__`` like ``return self.x[i], self.y[i]``. If
its bytecode does nothing but read attributes, index them and build containers, then it cannot draw
a random number or depend on anything else, and a trial call with stand-ins shows what a sample
consists of.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from operator import is_
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

INDEX = object()
"""Stands for the index of a sample."""

# Of Python 3.10 to 3.14. No jump, no call, no global name, nothing that is stored in an object.
_HARMLESS = frozenset(
    [
        *("NOP", "RESUME", "EXTENDED_ARG", "RETURN_VALUE"),
        *("COPY", "SWAP", "DUP_TOP", "ROT_TWO", "ROT_THREE"),
        *("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR", "BINARY_SUBSCR", "BINARY_OP"),
        *("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_CHECK"),
        *("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
        *("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"),
        *("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"),
    ]
)

# Of these, torch makes the same of an array as of a list of its numbers.
_NUMBERS = [numpy.dtype(name) for name in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?")]


class Columns:
    """The tensors that a dataset's samples are rows of.

    Args:
        sample: A sample as ``default_collate`` returns it, tuples as lists, with whole tensors in
            place of their rows and `INDEX` in place of the index.
        code: What was run to find it.
        read: The attributes that were read, by name.

    Attributes:
        tensors: Those in the sample, in its order.
        is_flat: The sample is a list of these.
    """

    def __init__(self, sample: Any, code: CodeType, read: dict[str, Any]) -> None:
        self.sample, self.code = sample, code
        self.names, self.values = tuple(read), tuple(read.values())
        self.tensors = list(_tensors(sample))
        self.is_flat = type(sample) is list and all(map(is_, sample, self.tensors))


def columns_of(dataset: Any) -> Columns | None:
    """Return the tensors that the samples are rows of; None if they may be something else."""
    kind: Any = type(dataset)
    function = getattr(kind, "__getitem__", None)
    attributes = getattr(dataset, "__dict__", {})
    if (
        type(function) is not FunctionType
        or kind.__getattribute__ is not object.__getattribute__
        or hasattr(dataset, "set_epoch")  # it may draw
    ):
        return None
    code = function.__code__
    if kind is TensorDataset:
        tensors = attributes["tensors"]
        plain = all(type(tensor) is Tensor for tensor in tensors)
        return Columns(list(tensors), code, {"tensors": tensors}) if plain else None
    if hasattr(dataset, "__getitems__") or not _is_harmless(code):
        return None
    columns = {
        name: _Column(tensor)
        for name in code.co_names
        if (tensor := _as_tensor(attributes.get(name))) is not None
        and not hasattr(kind, name)  # a property
    }
    read = {name: attributes[name] for name in columns}
    stand_in = SimpleNamespace(**columns)
    try:
        sample = _collated(function(stand_in, INDEX))
    except (TypeError, AttributeError, NameError, LookupError, ArithmeticError):
        # Whatever else it does, to the stand-ins or to constants, is not indexing.
        return None
    return Columns(sample, code, read)


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or the memory of an array of numbers as one; None for anything else."""
    if type(value) is numpy.ndarray and value.dtype in _NUMBERS:
        # torch warns of an array that it may not write to.
        plain = value.ndim > 0 and value.flags.c_contiguous and value.flags.writeable
        return torch.from_numpy(value) if plain else None
    return value if type(value) is Tensor else None


def _is_harmless(code: CodeType) -> bool:
    return _HARMLESS.issuperset(step.opname for step in dis.get_instructions(code))


class _Column:
    """Stands for a tensor that can only be indexed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: object) -> _Row:
        if index is not INDEX:
            raise TypeError("not the sample's row")
        return _Row(self._tensor)


class _Row:
    """Stands for a tensor's row that can only be returned."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor


def _collated(sample: Any) -> Any:
    """Return a sample of stand-ins as `Columns.sample`.

    Raises:
        TypeError: It contains something else.
    """
    if sample is INDEX:
        return sample
    if type(sample) is _Row:
        return sample._tensor
    if type(sample) is dict and {*map(type, sample)} <= {str, int}:
        return {key: _collated(part) for key, part in sample.items()}
    if type(sample) in (list, tuple):
        return [_collated(part) for part in sample]
    raise TypeError(f"a sample contains {sample!r}")


def _tensors(sample: Any) -> Iterator[Tensor]:
    if type(sample) is Tensor:
        yield sample
    elif type(sample) in (dict, list):
        for part in sample.values() if type(sample) is dict else sample:
            yield from _tensors(part)
