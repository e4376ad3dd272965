"""Limits on gradients, against arithmetic."""

from __future__ import annotations

import re

import pytest
import torch

from trainer.engines.base import Gradients
from trainer.optim.clipping import Clipping, Limits, clip_, validate_limits


@pytest.fixture
def parameters():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[2].grad = torch.tensor([0.0, -4.0])
    return parameters  # the one in the middle has no gradient


def gradients(parameters) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_the_norm_is_that_of_all_gradients_as_one_vector(parameters):
    assert clip_(parameters, max_norm=2.5).item() == 5.0
    assert gradients(parameters) == [
        pytest.approx([1.5, 0.0], rel=1e-5),
        None,
        pytest.approx([0.0, -2.0], rel=1e-5),
    ]


def test_gradients_within_the_norm_stay_as_they_are(parameters):
    assert clip_(parameters, max_norm=6.0).item() == 5.0
    assert gradients(parameters) == [[3.0, 0.0], None, [0.0, -4.0]]


def test_the_order_of_the_norm_is_taken(parameters):
    assert clip_(parameters, max_norm=100.0, norm_type=1.0).item() == 7.0
    assert clip_(parameters, max_norm=100.0, norm_type=float("inf")).item() == 4.0


def test_values_are_limited_one_by_one(parameters):
    assert clip_(parameters, max_value=3.5) is None
    assert gradients(parameters) == [[3.0, 0.0], None, [0.0, -3.5]]


def test_values_are_limited_before_the_norm_is_taken(parameters):
    norm = clip_((p for p in parameters), max_value=1.0, max_norm=10.0)
    assert norm.item() == pytest.approx(2**0.5)


def test_without_gradients_no_value_is_limited(parameters):
    assert clip_([], max_value=1.0) is None
    assert clip_([parameters[1]], max_value=1.0, max_norm=1.0).item() == 0.0
    # All have limits of their own, and one of them no gradient: nothing is left for the others.
    own = [
        (torch.optim.SGD([parameter]), Limits(max_value=number + 1.0))
        for number, parameter in enumerate(parameters)
    ]
    Clipping(Limits(max_value=0.5), own).clip_(Gradients(), parameters)
    assert gradients(parameters) == [[1.0, 0.0], None, [0.0, -3.0]]


def test_an_optimizer_with_a_norm_of_its_own_is_left_out_of_the_norm_of_the_others(parameters):
    own = [(torch.optim.SGD(parameters[:1]), Limits(max_norm=1.0))]
    Clipping(Limits(max_norm=2.0), own).clip_(Gradients(), parameters)
    assert gradients(parameters) == [
        pytest.approx([1.0, 0.0], rel=1e-5),
        None,
        pytest.approx([0.0, -2.0], rel=1e-5),
    ]


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
def test_limits_that_are_not_positive_are_refused(name, limit):
    given = {"max_grad_norm": None, "max_grad_value": None, name: limit}
    with pytest.raises(ValueError, match=f"{name} is {limit}; it must be above 0, or None"):
        validate_limits(**given)


def sparse_and_dense():
    """The parameter of a sparse embedding, and of a dense one, with equal gradients."""
    tables = [torch.nn.Embedding(3, 2, sparse=sparse) for sparse in (True, False)]
    for table in tables:
        table(torch.tensor([1, 1, 2])).sum().backward()
    return [table.weight for table in tables]


def test_sparse_gradients_are_clipped_by_norm_or_refused_with_what_to_do():
    sparse, dense = sparse_and_dense()
    norm, refusal = None, ""
    try:
        norm = clip_([sparse], max_norm=1.0)
    except ValueError as error:  # torch before 2.14 has no norm of them
        refusal = str(error)
    if norm is None:
        assert re.match(r"Sparse gradients.*put 'max_grad_norm'", refusal)
    else:
        assert norm == clip_([dense], max_norm=1.0)
        torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)


def test_sparse_gradients_are_not_clipped_by_value():
    with pytest.raises(ValueError, match=r"Sparse gradients.*put 'max_grad_norm'"):
        clip_(sparse_and_dense()[:1], max_value=1.0)
