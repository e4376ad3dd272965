"""Names, arguments and defaults are those of accelerate."""

from __future__ import annotations

import dataclasses
import inspect

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.utils.bnb
import accelerate.utils.modeling
import accelerate.utils.offload
import pytest

from trainer import big_models

PLACES = (
    accelerate,
    accelerate.big_modeling,
    accelerate.hooks,
    accelerate.utils,
    accelerate.utils.modeling,
    accelerate.utils.offload,
)
THEIRS = {
    name: next(getattr(place, name) for place in PLACES if hasattr(place, name))
    for name in big_models.__all__
}


def arguments(function):
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in found if each.kind is not each.VAR_KEYWORD]


@pytest.mark.parametrize("name", [n for n in big_models.__all__ if n != "CustomDtype"])
def test_arguments_are_those_of_accelerate(name):
    ours, theirs = getattr(big_models, name), THEIRS[name]
    assert arguments(ours) == arguments(theirs)
    if inspect.isclass(ours):
        public = {n for n, value in vars(theirs).items() if n[0] != "_" and callable(value)}
        assert public <= set(dir(ours))
        for method in public:
            assert arguments(getattr(ours, method)) == arguments(getattr(theirs, method))
    if dataclasses.is_dataclass(ours):
        fields = [field.name for field in dataclasses.fields(ours)]
        assert fields == [field.name for field in dataclasses.fields(theirs)]


def test_types_of_few_bits_are_those_of_accelerate():
    assert {each.name: each.value for each in big_models.CustomDtype} == {
        each.name: each.value for each in THEIRS["CustomDtype"]
    }
