"""Stages of layers in the Trainer, against one process: what the promises' suite does not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import isolation
from tests.helpers.promises import ENGINES, ONE, TOLERANCE, Net, fit, plain
from trainer import ParallelismConfig
from trainer.engines.absent import Absent, only_shapes
from trainer.engines.stages import plan_stages

CPU = torch.device("cpu")
PIPELINES = [name for name in ENGINES if name.startswith("pp")]


# -- tensors without values ------------------------------------------------------------------------


def test_what_depends_on_an_absent_tensor_is_absent_and_has_its_shape():
    weight = nn.Parameter(Absent(torch.randn(4, 3), CPU))
    layer = nn.Linear(3, 4)
    layer.weight = weight
    found = layer(torch.ones(2, 3))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(found, Absent)
    assert (found.shape, found.dtype, found.device) == ((2, 4), torch.float32, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 3)).dtype == torch.bfloat16
    assert not isinstance(found.new_zeros(3), Absent)  # a mask has values
    assert not isinstance(torch.arange(found.shape[1], device=found.device), Absent)


def test_values_of_an_absent_tensor_are_neither_read_nor_written():
    tensor, plain_tensor = Absent(torch.randn(4), CPU), torch.zeros(4)
    for read in (lambda: tensor.sum().item(), lambda: bool(tensor.any()), lambda: float(tensor[0])):
        with pytest.raises(RuntimeError, match="another stage of the pipeline computes"):
            read()
    with pytest.raises(RuntimeError, match="copy_ writes"):
        plain_tensor.copy_(tensor)
    with only_shapes():
        plain_tensor.copy_(tensor)
    assert not plain_tensor.any()


# -- which layers are on which stage ---------------------------------------------------------------


def test_blocks_are_found_and_divided_by_their_parameters():
    found = plan_stages(Net(), None, 2)
    assert found.layers == ["model.blocks.0", "model.blocks.1"]
    assert [list(found.range_of(stage)) for stage in (0, 1)] == [[0], [1]]
    assert found.stages_with("model.embedding") == {0}
    assert found.stages_with("model.last") == {1}
    assert found.stages_with("model") == {0, 1}


@pytest.mark.parametrize(
    ("split", "stages", "message"),
    [
        (["model.block.1"], 2, "model.blocks.1"),
        (["model.blocks.1", "model.last"], 3, "children of one module"),
        (["model.blocks.0"], 2, "not the order of the layers"),
        (None, 3, "no nn.ModuleList or nn.Sequential of at least 3 layers"),
    ],
)
def test_a_split_that_cannot_be_is_an_error_by_name(split, stages, message):
    with pytest.raises(ValueError, match=message):
        plan_stages(Net(), split, stages)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pp_schedule": "zb"}, ValueError, "gpipe"),
        ({"pp_stages_per_rank": 2}, ValueError, "'interleaved'"),
        ({"pp_split": ["a", "b"]}, ValueError, "2 names"),
        ({"dp_shard_size": 2}, NotImplementedError, "dp_shard_size=2"),
        ({"tp_size": 2}, NotImplementedError, "tp_size=2"),
        ({"cp_size": 2}, NotImplementedError, "cp_size=2"),
    ],
)
def test_what_stages_do_not_work_with_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        ParallelismConfig(pp_size=2, **options)


# -- training --------------------------------------------------------------------------------------


class Tied(Net):
    """The last layer's weight is the embedding's, which the first and the last stage have."""

    def made(self) -> None:
        model: Any = self.model
        model.last.weight = model.embedding.weight


class HeadOutside(Net):
    """What runs before and after the model is not in it."""

    def made(self) -> None:
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Linear(8, 8)

    def mean(self, batch: Any) -> Tensor:
        kept = self.kept(batch)
        each = self.shift(self.model(batch[0]) * self.scale)
        return (each.square() * kept).sum() / kept.sum()


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", [Tied, HeadOutside])
def test_parameters_of_several_stages_train_alike(ranks, name, kind, tmp_path):
    case = ENGINES[name]
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    isolation.reset_trainer_state()
    expected = plain(ONE, kind, **options)
    found = ranks(case.processes)(lambda: fit(case, tmp_path, kind, **options))
    trained = {name: found[0].weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found[0].gradients, expected.gradients, rtol=0, atol=TOLERANCE)
    assert found[0].metrics == pytest.approx(expected.metrics, abs=TOLERANCE)
    for other in found[1:]:
        for shared in other.copies.keys() & found[0].copies.keys():
            torch.testing.assert_close(
                other.copies[shared], found[0].copies[shared], rtol=0, atol=0
            )
