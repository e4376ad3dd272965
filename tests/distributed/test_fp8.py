"""fp8 training of several processes, emulated on the CPU: near float32, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import RankError
from tests.trainer.test_fp8 import LOOSE, Net, X, Y
from trainer import (
    Accelerator,
    AORecipeKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
)

pytest.importorskip("torchao")


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **options)


def whole(module: nn.Module) -> dict[str, Tensor]:
    found = module.state_dict().items()
    tensors = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class OnMeta(Net):
    """Rank 1 has no weights of its own."""

    def __init__(self) -> None:
        with torch.device("meta" if dist.get_rank() else "cpu"):
            super().__init__()


def fit(
    folder: Path,
    module: type[Net] = Net,
    *,
    gather: bool = True,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the weights of a run whose batches are alike in any layout."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    options = {"max_epochs": 2, "mixed_precision": "fp8", "checkpointing": False, **options}
    if options["mixed_precision"] == "fp8":
        recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=gather)
        options["kwargs_handlers"] = [recipe]
    trainer = Trainer(
        cpu=True, seed=3, progress_bar=False, log_every=1, project_dir=folder, **options
    )
    model = module()
    trainer.fit(model, DataLoader(TensorDataset(X, Y), 8 // world), ckpt_path=ckpt_path)
    return [float(v) for v in trainer.callback_metrics.values()], whole(model)


LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP": {"fsdp_plugin": plugin()},
    "FSDP, gathered in bfloat16": {"fsdp_plugin": plugin(), "gather": False},
    "FSDP, offloaded": {"fsdp_plugin": plugin(cpu_offload=True)},
    "FSDP, recomputed": {"fsdp_plugin": plugin(activation_checkpointing=True), "max_grad_norm": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_near_float32(ranks2, layout, tmp_path):
    expected, _ = fit(tmp_path / "one", mixed_precision="no")
    for losses, _ in ranks2(lambda: fit(tmp_path / "two", **LAYOUTS[layout])):
        assert losses == pytest.approx(expected, abs=LOOSE)


@pytest.mark.parametrize("layout", ["DDP", "FSDP"])
def test_a_resumed_run_is_bit_identical(ranks2, layout, tmp_path):
    def run() -> tuple[Any, Any]:
        options = {"checkpointing": True, **LAYOUTS[layout]}
        straight = fit(tmp_path / "straight", **options)
        fit(tmp_path / "cut", **options, max_steps=5)
        return straight, fit(tmp_path / "cut", **options, ckpt_path="last")

    for (losses, weights), (again, resumed) in ranks2(run):
        assert losses == again
        for name, value in weights.items():
            assert torch.equal(resumed[name], value), name


def test_processes_without_weights_receive_rank_0s(ranks2, tmp_path):
    expected = ranks2(lambda: fit(tmp_path / "plain", **LAYOUTS["FSDP"]))
    found = ranks2(lambda: fit(tmp_path / "meta", OnMeta, **LAYOUTS["FSDP"]))
    for (losses, weights), (others, values) in zip(found, expected, strict=True):
        assert losses == others
        assert all(torch.equal(weights[name], value) for name, value in values.items())


@pytest.mark.parametrize(("saved", "resumed"), [("FSDP", "one"), ("one", "FSDP")])
def test_a_run_resumes_on_another_number_of_processes(ranks2, saved, resumed, tmp_path):
    def run(layout: str, folder: str, **options: Any) -> Any:
        options = {"checkpointing": True, **LAYOUTS.get(layout, {}), **options}
        if layout == "one":
            return fit(tmp_path / folder, **options)
        return ranks2(lambda: fit(tmp_path / folder, **options))[0]

    losses, weights = run(saved, "whole")
    run(saved, "cut", max_epochs=1)
    others, values = run(resumed, "cut", ckpt_path="auto")
    assert others == pytest.approx(losses, abs=LOOSE)
    for name, value in weights.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=LOOSE)


def test_sharded_weights_are_plain_on_disk(ranks2, tmp_path):
    def run() -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", fsdp_plugin=plugin())
        model = Net()
        before = torch.optim.AdamW(model.parameters(), lr=1e-2)  # with the whole parameters
        model, optimizer = accelerator.prepare(model, before)
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, tmp_path)
        return whole(model)

    expected, _ = ranks2(run)
    saved = load_file(tmp_path / "model.safetensors")
    plain = Net()
    assert not torch.equal(plain.blocks[0].first.weight, expected["blocks.0.first.weight"])
    plain.load_state_dict(saved)  # strict
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name].float()), name


def test_tensor_parallelism_is_refused(ranks2, tmp_path):
    config = ParallelismConfig(tp_size=2)
    with pytest.raises(RankError, match=r"fp8.* tensor parallel"):
        ranks2(lambda: fit(tmp_path, parallelism_config=config))
