from __future__ import annotations

import torch

from callbacks import ModelPruning
from tests.helpers.line import Line, loader
from tests.numerics.running import copy_of, quiet_trainer


def draw_on_each_rank():
    torch.manual_seed(torch.distributed.get_rank())
    module = Line()
    pruning = ModelPruning(
        "random_unstructured", resample_parameters=True, make_pruning_permanent=False, amount=1
    )
    quiet_trainer(max_epochs=2, callbacks=pruning).fit(module, loader())
    return copy_of(module)


def test_what_is_drawn_is_rank_0s_on_all(ranks2):
    own, other = ranks2(draw_on_each_rank, timeout=60)
    torch.testing.assert_close(own, other, rtol=0, atol=0)
    masks = torch.cat([own["layer.weight_mask"][0], own["layer.bias_mask"]])
    assert sorted(masks.tolist()) == [0, 0, 1]
