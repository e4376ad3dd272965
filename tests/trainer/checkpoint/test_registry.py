"""Parts that have state: collected in a tree, restored in their order, also from several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.checkpoint.state import (
    PlacedState,
    RankStates,
    StateFunctions,
    collect,
    restore,
)
from trainer.errors import CheckpointError


def part(state: Any, taken: list[Any]) -> StateFunctions:
    return StateFunctions(lambda: state, taken.append)


def test_parts_are_restored_in_their_order_from_the_tree_that_they_gave():
    taken: list[Any] = []
    parts = {
        "last": part({"a": 1}, taken),
        ("x", "y"): part({"x": 2, "y": None}, taken),
        "none": None,
        "first": part(None, taken),
    }
    tree = collect(parts)
    assert tree == {"last": {"a": 1}, "x": 2, "y": None, "none": None, "first": None}
    restore(dict(reversed(parts.items())), tree, "step-1")
    assert taken == [None, {"x": 2, "y": None}, {"a": 1}]


def test_a_missing_state_is_an_error_that_names_it_unless_it_may_be_missing():
    taken: list[Any] = []
    parts = {"clock": part(1, taken), ("x", "y"): part({}, taken)}
    with pytest.raises(CheckpointError, match=r"^step-1: the state of clock cannot be restored"):
        restore(parts, {"x": 3}, "step-1")
    restore(parts, {"x": 3}, "step-1", optional=["clock"])
    assert taken == [{"x": 3}]  # a key that a later release has added


def test_the_part_without_keys_takes_what_no_other_has_and_is_not_asked_for_its_state():
    taken: list[Any] = []

    def gather() -> Any:
        raise AssertionError("it is collective")

    parts = {"clock": part(1, taken), (): StateFunctions(gather, taken.append)}
    restore(parts, {"clock": 1, "graph": 2, "hook": 3})
    assert taken == [1, {"graph": 2, "hook": 3}]
    restore(parts, {"clock": 4})
    assert taken[2:] == [4]


def test_what_a_part_refuses_names_the_checkpoint_once():
    def refuse(state: Any) -> None:
        raise CheckpointError("it holds 2 optimizers")

    with pytest.raises(CheckpointError, match=r"^step-1: it holds 2 optimizers$"):
        restore({"a": StateFunctions(dict, refuse)}, {"a": 1}, "step-1")


# Of 4 processes that saved, 2 read each share of the data; here they are numbered.
@pytest.mark.parametrize(
    ("world", "shares", "own", "to_merge"),
    [
        (4, 2, ["0", "1", "2", "3"], ["0", "1", "2", "3"]),  # the same layout: each its own
        (2, 2, ["0", "2"], ["01", "23"]),  # one process for each share
        (8, 2, [*"00002222"], ["01"] * 4 + ["23"] * 4),
        (4, 4, ["0", "2", None, None], ["0123"] * 4),  # other shares: all are merged
        (1, 1, ["0"], ["0123"]),
    ],
)
def test_which_states_a_rank_takes_on_another_layout(world, shares, own, to_merge):
    taken: list[RankStates] = []
    trees = [{"a": str(rank)} for rank in range(4)]
    for rank in range(world):
        saved = RankStates(trees, 2, rank, world, rank // (world // shares), shares)
        restore({"a": StateFunctions(dict, taken.append)}, saved, "step-1")
    assert [each.own for each in taken] == own
    assert ["".join(each.to_merge) for each in taken] == to_merge


def test_the_state_of_an_optimizer_keeps_its_dtype():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.tensor([0.1, 0.2])}}  # in float32
    PlacedState(optimizer).load_state_dict(state)
    loaded = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(loaded, torch.tensor([0.1, 0.2]))
