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


class _Opaque:
    """Something that can be put into containers, but is no key, so that nothing depends on it."""

    __hash__ = None  # type: ignore[assignment]  # how Python says so


INDEX = _Opaque()
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


class Row(_Opaque):
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
        self._has_index = any(part is INDEX for part in parts)

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
        or not _is_harmless(function)
        or kind.__getattribute__ is not object.__getattribute__
        or any(hasattr(kind, name) for name in ("__getattr__", "__getitems__", "set_epoch"))
    ):
        return None
    attributes = getattr(dataset, "__dict__", {})
    names = function.__code__.co_names
    of_class = {name for each in kind.__mro__ for name in vars(each)}  # properties and the like
    own = {*vars(Row("")), *vars(_Column(""))}  # which the stand-ins have themselves
    if (of_class | own) & {*names} or {"__getitems__", "set_epoch"} & {*attributes}:
        return None
    if any(_as_tensor(attributes.get(name)) is None for name in names):
        return None
    try:
        stand_in = SimpleNamespace(**{name: _Column(name) for name in names})
        sample = Sample(_collated(function(stand_in, INDEX)))
    except (TypeError, LookupError, NameError, AttributeError):  # it does something else
        return None
    # An attribute that is only read may have no such row, which is an error.
    return sample if {*sample.names} == {*names} else None


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


class _Column(_Opaque):
    """Stands for a tensor that can only be indexed by `INDEX`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, index: object) -> Row:
        if index is not INDEX:
            raise TypeError("not the sample's row")
        return Row(self._name)


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
