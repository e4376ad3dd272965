"""Stages that are sharded by FSDP2 or split by tensor parallelism, against one process."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from callbacks import Callback
from tests.distributed.test_pipeline_trainer import (
    Checkpointed,
    Gpt2,
    Llama,
    NotCheckpointed,
    run_of,
)
from tests.helpers import isolation
from tests.helpers.promises import (
    ENGINES,
    ONE,
    TOLERANCE,
    EngineCase,
    Net,
    Outcome,
    Watch,
    fit,
    loader,
    pipeline,
    plain,
    trainer_and_module,
)
from trainer import FullyShardedDataParallelPlugin, ParallelismConfig
from trainer.checkpoint.weights import load_weights
from trainer.engines.absent import Absent
from trainer.tree import part_here

SHARED = ["pp, fsdp", "pp, tp"]
INTERLEAVED = {
    "pp_split": ["model.drop", "model.blocks", "model.last"],
    "dp_replicate_size": 1,
}


def same_run(found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE) -> None:
    trained = {name: found[0].weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=tolerance)
    assert found[0].metrics == pytest.approx(expected.metrics, abs=tolerance)


# -- the mesh --------------------------------------------------------------------------------------

MESH = """
import json, torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
dist.init_process_group("fake", rank=0, world_size=16)
from trainer import ParallelismConfig
from trainer.configuration.parallelism import device_mesh
from trainer.engines.pipeline import _mesh_sizes
config = ParallelismConfig(pp_size=2, dp_shard_size=2, tp_size=2, dp_replicate_size=2)
mesh = device_mesh("cpu", _mesh_sizes(config))
print(json.dumps([mesh.mesh_dim_names, mesh.mesh.tolist()]))
"""


def test_processes_that_read_the_same_data_have_consecutive_ranks():
    made = subprocess.run([sys.executable, "-c", MESH], check=True, capture_output=True, text=True)
    names, ranks = json.loads(made.stdout.splitlines()[-1])
    assert names == ["dp_replicate", "dp_shard", "pp", "tp"]
    assert ranks == torch.arange(16).reshape(2, 2, 2, 2).tolist()


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ({"dp_shard_size": 2}, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]),
        ({"tp_size": 2}, [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
    ],
)
def test_each_process_knows_its_place(ranks, sizes, places):
    from trainer import Accelerator

    def look() -> Any:
        config = ParallelismConfig(pp_size=2, **sizes)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        parallel = accelerator.engine.parallel
        assert parallel.dp_rank == accelerator.data_parallel_shard_rank
        place = accelerator.pipeline_parallel_rank
        assert parallel.is_data_primary == (place == 1 and accelerator.tensor_parallel_rank == 0)
        return parallel.dp_rank, place, accelerator.tensor_parallel_rank

    assert ranks(4)(look) == [(data, *rest) for data, *rest in places]


# -- training --------------------------------------------------------------------------------------


class SplitEnds(Net):
    """The layers before and after the blocks are split, too."""

    tp_plan = {
        **Net.tp_plan,
        "model.embedding": RowwiseParallel(input_layouts=Replicate()),
        "model.last": ColwiseParallel(output_layouts=Replicate()),
    }


class SplitTied(SplitEnds):
    """They have the same weight, split alike."""

    def made(self) -> None:
        model: Any = self.model
        model.last = nn.Linear(16, 32, bias=False)
        model.last.weight = model.embedding.weight


class SplitLayers(Net):
    """The layers that are divided into stages are split themselves."""

    tp_plan = {
        "model.blocks.0": ColwiseParallel(),
        "model.blocks.1": RowwiseParallel(),
        "model.blocks.2": ColwiseParallel(output_layouts=Replicate()),
        "model.blocks.3": RowwiseParallel(input_layouts=Replicate()),
    }

    def made(self) -> None:
        model: Any = self.model
        model.blocks = nn.Sequential(
            nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        )


class TakesOne(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, *, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class ByKeyword(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(TakesOne, blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x)
        return x


class SplitInputs(Net):
    """The layers get their inputs by name, which a style of theirs divides and gathers again."""

    tp_plan = {
        "model.blocks.layers.*": PrepareModuleInput(
            input_kwarg_layouts={"x": Replicate()},
            desired_input_kwarg_layouts={"x": Replicate()},
            use_local_output=True,
        ),
        "model.blocks.layers.*.block.first": ColwiseParallel(),
        "model.blocks.layers.*.block.second": RowwiseParallel(),
    }

    def made(self) -> None:
        model: Any = self.model
        model.blocks = ByKeyword(model.blocks)


@pytest.mark.parametrize("kind", [SplitEnds, SplitTied, SplitLayers, SplitInputs])
def test_tensor_parallel_stages_train_like_one_process(ranks, kind, tmp_path):
    isolation.reset_trainer_state()
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    expected = plain(ONE, kind, **options)
    found = ranks(4)(lambda: fit(ENGINES["pp, tp"], tmp_path, kind, **options))
    same_run(found, expected)
    torch.testing.assert_close(found[0].gradients, expected.gradients, rtol=0, atol=TOLERANCE)


CASES: dict[str, EngineCase] = {
    "fsdp, interleaved": pipeline("interleaved", shares=2, dp_shard_size=2, **INTERLEAVED),
    "fsdp, gpipe": pipeline("gpipe", shares=2, dp_replicate_size=1, dp_shard_size=2),
    "tp, interleaved": pipeline("interleaved", width=2, tp_size=2, **INTERLEAVED),
    "tp, gpipe": pipeline("gpipe", width=2, tp_size=2),
}


FEW_PARTS: dict[str, EngineCase] = {
    "pp, fsdp": pipeline("1f1b", shares=2, dp_replicate_size=1, dp_shard_size=2, pp_microbatches=2),
    "pp, tp": pipeline("1f1b", width=2, tp_size=2, pp_microbatches=2),
}


class WithAdam(Net):
    """Its two kinds of states, and parameters of several meshes in one group."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_other_schedules_train_like_one_process(ranks, name, tmp_path):
    isolation.reset_trainer_state()
    expected = plain(ONE, WithAdam, max_grad_norm=0.5)
    same_run(ranks(4)(lambda: fit(CASES[name], tmp_path, WithAdam, max_grad_norm=0.5)), expected)


LAYERS = "model.blocks.layers.*.0"
RECOMPUTED_PLAN = {
    f"{LAYERS}.first": ColwiseParallel(),
    f"{LAYERS}.second": RowwiseParallel(),
}


class SplitKept(NotCheckpointed):
    tp_plan = RECOMPUTED_PLAN


class SplitCheckpointed(Checkpointed):
    tp_plan = RECOMPUTED_PLAN


@pytest.mark.parametrize("name", SHARED)
def test_activations_that_are_computed_again_give_the_same_run(ranks, name, tmp_path):
    kept = ranks(4)(lambda: fit(ENGINES[name], tmp_path, SplitKept))
    found = ranks(4)(lambda: fit(ENGINES[name], tmp_path, SplitCheckpointed))
    torch.testing.assert_close(found[0].weights, kept[0].weights, rtol=0, atol=0)
    assert found[0].metrics == kept[0].metrics


@pytest.mark.parametrize(
    ("kind", "name"), [(Llama, "pp, fsdp"), (Llama, "pp, tp"), (Gpt2, "pp, fsdp")]
)
def test_sharded_transformers_models_train_like_one_process(ranks, kind, name, tmp_path):
    pytest.importorskip("transformers")
    isolation.reset_trainer_state()
    short: dict[str, Any] = {"samples": 24, "max_epochs": 1, "max_grad_norm": 0.5}
    expected = plain(ONE, kind, **short)

    def run() -> Outcome:
        class Planned(kind):  # type: ignore[misc, valid-type]
            tp_plan = "auto"  # the model's own

        return fit(FEW_PARTS[name], tmp_path, Planned, **short)

    same_run(ranks(4)(run), expected, 1e-5)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SHARED)
def two_epochs(request, ranks, tmp_path_factory) -> Path:
    """A run of two epochs with its checkpoint; each test goes on in a copy of its folder."""
    case, folder = ENGINES[request.param], tmp_path_factory.mktemp("run")
    ranks(4)(lambda: fit(case, folder, checkpointing=True, reads_gradients=False) and None)
    return folder


@pytest.fixture(scope="module")
def third_epoch() -> dict[str, Tensor]:
    """The weights of one process after three epochs."""
    isolation.reset_trainer_state()
    isolation.reset_torch()
    return plain(ONE, max_epochs=3).weights


@pytest.mark.parametrize("other", ["one device", "ddp", "fsdp", "pp", "tp", "pp, tp", "pp, fsdp"])
def test_a_run_resumes_on_any_layout(ranks, two_epochs, third_epoch, other, tmp_path):
    """The third epoch is that of one process, with momentum from the checkpoint."""
    again, folder = ENGINES[other], shutil.copytree(two_epochs, tmp_path / "run")

    def resume() -> Outcome:
        options: dict[str, Any] = {"checkpointing": True, "max_epochs": 3}
        return fit(again, folder, ckpt_path="auto", reads_gradients=False, **options)

    found = [resume()] if again.processes == 1 else ranks(again.processes)(resume)
    assert {epoch for epoch, _ in found[0].seen} == {2}
    trained = {n: found[0].weights[n] for n in third_epoch}
    torch.testing.assert_close(trained, third_epoch, rtol=0, atol=2 * TOLERANCE)


@pytest.mark.parametrize("name", SHARED)
def test_the_whole_model_is_saved(ranks, name, tmp_path):
    class Saves(Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            trainer.accelerator.save_model(module, tmp_path / "saved")

    ranks(4)(lambda: run_of(ENGINES[name], tmp_path, Net, callbacks=[Saves()]) and None)
    isolation.reset_trainer_state()
    saved = load_weights(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(saved, plain(ONE).weights, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", SHARED)
def test_the_same_module_is_fitted_and_validated_again(ranks, name, tmp_path):
    case = ENGINES[name]

    def run() -> Any:
        first, module = run_of(case, tmp_path / "first", Net)
        before = {n: part_here(p).clone() for n, p in held(module)}
        (metrics,) = first.validate(module, loader(case))
        same = [torch.equal(before[n], part_here(p)) for n, p in held(module)]
        second, _ = trainer_and_module(case, tmp_path / "second")
        second.fit(module, loader(case))
        return metrics, all(same), float(second.callback_metrics["train/loss"])

    found = ranks(4)(run)
    isolation.reset_trainer_state()
    expected = plain(ONE)
    for metrics, same, loss in found:
        assert metrics == pytest.approx({"val/loss": expected.metrics["val/loss"]}, abs=TOLERANCE)
        assert same
        assert loss < expected.metrics["train/loss"]


def held(module: nn.Module) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in module.named_parameters() if not isinstance(p, Absent)]


# -- memory and communication ----------------------------------------------------------------------


GATHERS = ("all_gather_into_tensor", "all_gather_single")  # the latter from torch 2.13
REDUCES = ("reduce_scatter_tensor", "reduce_scatter_single")


class Sizes(Callback):
    """What a process holds between updates, and how often it communicates in each window."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.gathers: list[int] = []
        self.reduces: list[int] = []
        self.counts = dict.fromkeys((*GATHERS, *REDUCES), 0)
        self.before = {name: getattr(dist, name) for name in self.counts if hasattr(dist, name)}
        for name in self.before:
            setattr(dist, name, self.counted(name))

    def counted(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return self.before[name](*args, **kwargs)

        return run

    def on_train_step_end(self, *_: Any) -> None:
        self.gathers.append(sum(self.counts[name] for name in GATHERS))
        self.reduces.append(sum(self.counts[name] for name in REDUCES))
        self.counts.update(dict.fromkeys(self.counts, 0))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for name, function in self.before.items():
            setattr(dist, name, function)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.weights = sum(part_here(p).numel() for _, p in held(module))
        optimizer = trainer.optimizers[0].optimizer
        self.states = sum(part_here(s["momentum_buffer"]).numel() for s in optimizer.state.values())


BLOCK = 2 * 16 + 16 * 32 + 32 + 32 * 16 + 16
STAGES = (32 * 16 + BLOCK, BLOCK + 16 * 32 + 32)


def test_a_process_holds_half_of_its_stage_and_gathers_it_once_a_batch(ranks, tmp_path):
    def run() -> Any:
        sizes = Sizes()
        options = {"gradient_accumulation_steps": 2, "max_epochs": 1, "callbacks": [sizes]}
        run_of(ENGINES["pp, fsdp"], tmp_path, Net, **options)
        return sizes.weights, sizes.states, sizes.gathers, sizes.reduces

    found = ranks(4)(run)
    first, last = (size // 2 for size in STAGES)
    assert [each[:2] for each in found] == [(first, first), (last, last)] * 2
    # A message for the layer, and one for what is beside it, whatever the number of micro-batches;
    # also on the processes that lack the last batch of the two of a window.
    for _, _, gathers, reduces in found:
        assert gathers == [2 + 2] * 3
        assert reduces == [2] * 3


def test_a_process_holds_its_part_of_the_split_layers_of_its_stage(ranks, tmp_path):
    def run() -> Any:
        sizes = Sizes()
        run_of(ENGINES["pp, tp"], tmp_path, Net, callbacks=[sizes])
        return sizes.weights, sizes.states

    split = 16 * 32 + 32 + 32 * 16  # but not the bias of the layer that is split by rows
    first, last = (size - split // 2 for size in STAGES)
    assert ranks(4)(run) == [(first, first)] * 2 + [(last, last)] * 2


def memory() -> int:
    """Return the bytes of all floating point numbers that tensors of this process have."""
    gc.collect()
    held: dict[int, int] = {}
    for value in gc.get_objects():
        plain = type(value) in (Tensor, nn.Parameter) and not value.is_meta
        if plain and value.is_floating_point():
            storage = value.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


class Held(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.held = memory()


@pytest.mark.parametrize("name", ["pp", *SHARED])
def test_nothing_keeps_what_other_processes_have(ranks, name, tmp_path):
    def run() -> Any:
        before, watch = memory(), Held()
        trainer, module = trainer_and_module(ENGINES[name], tmp_path, callbacks=[watch])
        parameters = list(module.parameters())
        assert memory() - before == sum(p.nbytes for p in parameters)
        trainer.fit(module, loader(ENGINES[name]))
        own = sum(part_here(p).nbytes for _, p in held(module))
        return watch.held - before - own

    for more in ranks(ENGINES[name].processes)(run):
        assert 0 <= more < 512  # the smallest weight of a layer is larger


class HasState(Net):
    """Its optimizer has state before the first update."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.1)


class Own(Callback):
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        own = {p for _, p in held(module)}
        assert set(trainer.optimizers[0].optimizer.state) == own


@pytest.mark.parametrize("name", ["pp", *SHARED])
def test_each_rank_keeps_optimizer_state_of_its_own_layers_only(ranks, name, tmp_path):
    case = ENGINES[name]

    def run() -> Outcome:
        watch = Watch(reads_gradients=False)
        callbacks = [Own(), watch]
        trainer, module = trainer_and_module(case, tmp_path, HasState, callbacks=callbacks)
        trainer.fit(module, loader(case), loader(case))
        watch.outcome.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        return watch.outcome

    found = ranks(case.processes)(run)
    isolation.reset_trainer_state()
    same_run(found, plain(ONE, HasState), 1e-5)


@pytest.mark.parametrize("name", ["pp", *SHARED])
def test_gradients_of_parameters_that_were_replaced(ranks, name, tmp_path):
    class Reads(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for old, new in zip(self.before, module.parameters(), strict=True):
                assert torch.equal(trainer.gradient(old), trainer.gradient(new))

    def run() -> None:
        reads = Reads()
        trainer, module = trainer_and_module(ENGINES[name], tmp_path, callbacks=[reads])
        reads.before = list(module.parameters())
        trainer.fit(module, loader(ENGINES[name]))

    ranks(ENGINES[name].processes)(run)


# -- what cannot be --------------------------------------------------------------------------------


class SplitByHand(Net):
    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = self.trainer.accelerator.torch_device_mesh["tp"]
        parallelize_module(self.model.blocks, mesh, {"0.first": ColwiseParallel()})


class NoPlan(Net):
    tp_plan = None  # type: ignore[assignment]

    def made(self) -> None:
        self.model.tp_plan = None  # type: ignore[assignment]


class TiedByHalves(SplitTied):
    """One of the two is split."""

    tp_plan = {name: style for name, style in SplitTied.tp_plan.items() if "last" not in name}


class GivesShards(SplitLayers):
    """What goes to the next stage is a part."""

    tp_plan = {
        "model.blocks.0": ColwiseParallel(),
        "model.blocks.1": RowwiseParallel(output_layouts=Shard(-1)),
    }


class Whole(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters())


REFUSED: dict[str, tuple[str, type[Net], dict[str, Any], str]] = {
    "split by hand": ("pp, tp", SplitByHand, {}, "split already: give it a tp_plan"),
    "no plan": ("pp, tp", NoPlan, {}, "does not say which layers to split"),
    "tied, split in two ways": ("pp, tp", TiedByHalves, {}, "are the same parameter, but tp_plan"),
    "parts between stages": ("pp, tp", GivesShards, {}, "Stage 0 returned a tensor of shape"),
    "whole tensors": ("pp, fsdp", Whole, {}, "Rprop cannot update sharded parameters"),
    "a plugin": (
        "pp, fsdp",
        Net,
        {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "does not support fsdp_plugin: dp_shard_size shards the layers of each stage",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unsupported_sharding_is_refused_by_name(ranks, why, tmp_path):
    name, kind, options, message = REFUSED[why]

    def run() -> str:
        with pytest.raises(Exception, match=message):
            run_of(ENGINES[name], tmp_path, kind, **options)

    ranks(4)(run)


def test_a_module_stays_in_the_layout_of_its_first_fit(ranks, tmp_path):
    def run() -> None:
        _, module = run_of(ENGINES["pp, fsdp"], tmp_path / "first", Net)
        assert any(isinstance(p, DTensor) for p in module.parameters())
        trainer, _ = trainer_and_module(ENGINES["pp, gpipe, dp"], tmp_path / "second")
        with pytest.raises(ValueError, match="was divided over other processes before"):
            trainer.fit(module, loader(ENGINES["pp, gpipe, dp"]))

    ranks(4)(run)
