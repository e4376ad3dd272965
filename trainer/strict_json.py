"""Write JSON that every parser accepts (RFC 8259, and I-JSON, RFC 7493).

JSON has no NaN and no infinity, and parsers differ for integers of more than 64 bits and for
strings that are not valid Unicode. In records for people and other programs, such values are
written as texts, see `to_json`. State that must be restored exactly is encoded by
`trainer.checkpoint.serialization`.
"""

import json
import math
from collections.abc import Callable
from typing import Any

# Texts for numbers that JSON does not have; `float` parses them.
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}


def dumps(
    value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None
) -> str:
    """Return a value as ASCII JSON; see `json.dumps` and `to_json` for the arguments."""
    return json.dumps(to_json(value, default), indent=indent, allow_nan=False)


def to_json(value: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """Convert a value to types that every JSON parser reads back unchanged.

    Non-finite floats become the texts "NaN", "Infinity" and "-Infinity", and integers of more than
    64 bits become texts of their digits. Tensors and arrays of one element become numbers, longer
    ones lists. Keys become strings. Lone surrogates in strings, which occur in file names that are
    not UTF-8, are escaped.

    Args:
        value: the value.
        default: called with a value of any other type; its result is converted instead.

    Raises:
        TypeError: a value has another type, and `default` is not given.
    """
    value = python_number(value)
    if isinstance(value, str):
        return value if is_unicode(value) else value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not fits_64_bits(value):
        return str(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, dict):
        return {to_json(str(key)): to_json(item, default) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, default) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist(), default)
    if default is None:
        raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")
    return to_json(default(value))


def from_json(value: Any) -> Any:
    """Convert a value from `to_json` back, with non-finite numbers as floats."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if isinstance(value, str) and value in _NON_FINITE else value


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fits_64_bits(value: int) -> bool:
    """Return whether an integer fits into 64 bits, signed or unsigned."""
    return -(2**63) <= value < 2**64


def python_number(value: Any) -> Any:
    """Convert a tensor or array of one element to a Python number; return other values as is."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 else value
