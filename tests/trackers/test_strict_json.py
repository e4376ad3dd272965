"""The encoding of JSON files that every parser reads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from trainer.strict_json import dumps, from_json, to_json


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (math.nan, "NaN"),
        (np.float32("-inf"), "-Infinity"),
        (torch.tensor([[math.inf]]), "Infinity"),
        (np.array([1.5, math.nan]), [1.5, "NaN"]),
        (np.bool_(True), True),
        (2**64 - 1, 2**64 - 1),
        (-(2**63) - 1, "-9223372036854775809"),
        ("caf\udce9", "caf\\udce9"),
        ("é\x00😀", "é\x00😀"),
        ({1: None, (2, "\ud800"): (3,)}, {"1": None, "(2, '\\ud800')": [3]}),
    ],
)
def test_values_have_a_form_that_every_parser_reads(value, encoded):
    assert json.loads(dumps(value), parse_constant=refuse) == encoded
    json.dumps(encoded, ensure_ascii=False).encode()


def test_non_finite_numbers_are_read_back():
    values = {"a": [math.inf, {"b": -math.inf}], "c": 1.5, "d": "text"}
    assert from_json(to_json(values)) == values


def test_anything_else_is_refused_or_replaced():
    with pytest.raises(TypeError, match="complex cannot be written as JSON"):
        dumps([np.complex64(1j)])
    assert json.loads(dumps({"a": {1j}, "b": 2}, default=str)) == {"a": "{1j}", "b": 2}
