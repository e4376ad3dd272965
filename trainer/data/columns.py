"""Classes of datasets whose samples are rows of tensors in their attributes.

Most datasets in memory have a ``__getitem__`` like ``return self.x[i], self.y[i]``. If its bytecode
does nothing but read such attributes, index and build containers, then a sample depends on nothing
else, and a trial call with stand-ins shows what it consists of.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

INDEX = object()
"""Stands for the index of a sample."""

# Of Python 3.10 to 3.14: no jump, call, operator or global name, and nothing stored in an object.
_HARMLESS = frozenset(
    [
        *("NOP", "RESUME", "EXTENDED_ARG", "RETURN_VALUE"),
        *("COPY", "SWAP", "DUP_TOP", "ROT_TWO", "ROT_THREE"),
        *("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR", "BINARY_SUBSCR"),
        *("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_CHECK"),
        *("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
        *("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"),
        *("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"),
    ]
)
_NUMBERS = frozenset(map(numpy.dtype, ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"]))


class Row:
    """The row of a tensor.

    Args:
        name: The attribute that is the tensor.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class Sample:
    """What the samples of a class consist of.

    Args:
        shape: A sample as ``default_collate`` returns it, tuples as lists, with a `Row` for each
            tensor and `INDEX` for the index.

    Attributes:
        names: The attributes whose rows are in it, in its order.
        is_flat: It is a list of rows.
    """

    def __init__(self, shape: Any) -> None:
        self.shape = shape
        parts = list(_parts(shape))
        self.names = [part.name for part in parts if type(part) is Row]
        self.is_flat = type(shape) is list and {*map(type, shape)} <= {Row}
        self._has_index = INDEX in parts

    def tensors_of(self, dataset: Any) -> list[Tensor] | None:
        """Return the tensors whose rows make a batch; None if they are something else now."""
        if self._has_index and not _are_on_cpu():
            return None
        attributes = getattr(dataset, "__dict__", {})
        found = [_as_tensor(attributes.get(name)) for name in self.names]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None


def sample_of(dataset: Any) -> Sample | None:
    """Return what the samples of a dataset consist of; None if that is anything else than rows."""
    kind: Any = type(dataset)
    function = inspect.getattr_static(kind, "__getitem__", None)
    if (
        not isinstance(function, FunctionType)
        or kind.__getattribute__ is not object.__getattribute__
        or hasattr(dataset, "__getitems__")
        or hasattr(dataset, "set_epoch")  # it may draw
    ):
        return None
    attributes = getattr(dataset, "__dict__", {})
    names = function.__code__.co_names
    if not _is_harmless(function) or not all(
        _as_tensor(attributes.get(name)) is not None and not hasattr(kind, name)  # a property
        for name in names
    ):
        return None
    rows: list[Row] = []
    stand_in = SimpleNamespace(**{name: _Column(name, rows) for name in names})
    try:
        shape = _collated(function(stand_in, INDEX))
    except (TypeError, LookupError, NameError):  # it does something else
        return None
    # A row that is only read may be missing, which is an error.
    return Sample(shape) if {*rows} <= {*_parts(shape)} else None


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or the memory of an array of numbers as one; None for anything else."""
    if type(value) is not numpy.ndarray:
        return value if type(value) is Tensor else None
    # torch warns of an array that it may not write to.
    plain = value.ndim > 0 and value.flags.c_contiguous and value.flags.writeable
    if not plain or value.dtype not in _NUMBERS or not _are_on_cpu():
        return None
    try:
        return torch.from_numpy(value)
    except ValueError:  # a single row may have any strides
        return None


def _are_on_cpu() -> bool:
    """Return whether the tensors that torch makes of arrays and numbers are on the CPU."""
    return torch.get_default_device().type == "cpu"


def _is_harmless(function: FunctionType) -> bool:
    code = function.__code__
    return (
        (function.__defaults__, function.__kwdefaults__) == (None, None)
        and (code.co_argcount, code.co_kwonlyargcount) == (2, 0)
        and not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        and all(
            step.opname in _HARMLESS or (step.opname, step.argrepr) == ("BINARY_OP", "[]")
            for step in dis.get_instructions(code)
        )
    )


class _Column:
    """Stands for a tensor that can only be indexed by `INDEX`, and notes its rows."""

    def __init__(self, name: str, rows: list[Row]) -> None:
        self._name, self._rows = name, rows

    def __getitem__(self, index: object) -> Row:
        if index is not INDEX:
            raise TypeError("not the sample's row")
        self._rows.append(Row(self._name))
        return self._rows[-1]


def _collated(sample: Any) -> Any:
    """Return a sample as `Sample.shape`.

    Raises:
        TypeError: It contains something else.
    """
    if sample is INDEX or type(sample) is Row:
        return sample
    if type(sample) is dict and {*map(type, sample)} <= {str, int}:
        return {key: _collated(part) for key, part in sample.items()}
    if type(sample) in (list, tuple):
        return [_collated(part) for part in sample]
    raise TypeError(f"a sample contains {sample!r}")


def _parts(shape: Any) -> Iterator[Any]:
    """Yield the rows and indices in a shape."""
    if type(shape) not in (dict, list):
        yield shape
    else:
        for part in shape.values() if type(shape) is dict else shape:
            yield from _parts(part)
