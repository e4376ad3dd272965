"""`save_state`, `save_model` and the tools on sharded models: the same tensors on any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callbacks import ModelCheckpoint
from tests.distributed.test_fsdp import Block, fit
from tests.distributed.test_fsdp import Net as FitNet
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    load_checkpoint_in_model,
)
from trainer.checkpoint import storage
from trainer.checkpoint.resolve import CheckpointFolders
from trainer.checkpoint.sharded_state import ShardedTensor
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.weights import load_weights
from trainer.cli import main
from trainer.errors import CheckpointError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(auto_wrap_policy=lambda part: isinstance(part, Block))


class Net(nn.Module):
    """Blocks with a frozen layer, tied weights, an odd number of rows and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.first, self.tied = nn.Linear(16, 7), nn.Linear(16, 7)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.frozen(self.first(self.blocks(x)) + self.tied(x))


def whole(state: Any) -> Any:
    """Return nested state with whole tensors on this rank; collective."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    if isinstance(state, Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).detach().clone()
    return state


class Loop:
    """An own loop of two models with an optimizer each."""

    def __init__(self, sharded: bool, **options: Any) -> None:
        given = {"fsdp_plugin": plugin()} if sharded else {}
        self.accelerator = Accelerator(cpu=True, **given, **options)
        models = Net(), nn.Linear(16, 3)
        optimizers = [
            torch.optim.AdamW(models[0].parameters(), lr=1e-2),
            torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
        *self.models, self.scheduler = self.accelerator.prepare(*models, scheduler)
        self.optimizers = [self.accelerator.prepare(each) for each in optimizers]

    def backward(self) -> None:
        out = sum(model(X) for model in self.models)
        self.accelerator.backward((out - 1).square().mean())

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()

    def train(self, steps: int) -> Loop:
        for _ in range(steps):
            self.backward()
            self.update()
        return self

    def state(self) -> Any:
        bare = [self.accelerator.unwrap_model(model) for model in self.models]
        gradients = [{n: p.grad for n, p in model.named_parameters()} for model in bare]
        states = [each.state_dict() for each in (*bare, *self.optimizers, self.scheduler)]
        return whole([states, gradients])


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_a_sharded_own_loop_resumes_bit_for_bit(ranks2, tmp_path):
    def uninterrupted() -> Any:
        loop = Loop(sharded=True).train(2)
        loop.accelerator.save_state(tmp_path / "state")
        return loop.train(2).state()

    def resumed() -> Any:
        loop = Loop(sharded=True).train(1)
        loop.accelerator.load_state(tmp_path / "state")
        return loop.train(2).state()

    expected = ranks2(uninterrupted)
    assert_equal(ranks2(resumed), expected)


LAYOUTS = [("fsdp", "one"), ("one", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "four")]


@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS)
def test_every_tensor_is_equal_on_another_layout(ranks2, ranks, saved, loaded, tmp_path):
    def on(kind: str, job: Any) -> Any:
        if kind == "one":
            return job()
        return (ranks(4) if kind == "four" else ranks2)(job)[0]

    def save() -> Any:
        loop = Loop(sharded=saved == "fsdp").train(2)
        loop.backward()  # gradients that the optimizers have not used yet
        loop.accelerator.save_state(tmp_path / "state")
        return loop.state()

    def load() -> Any:
        loop = Loop(sharded=loaded in ("fsdp", "four"))
        loop.accelerator.load_state(tmp_path / "state")
        return loop.state()

    expected = on(saved, save)
    assert_equal(on(loaded, load), expected)


def test_replicas_of_shards_write_each_part_once(ranks, tmp_path):
    def save() -> None:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), parallelism_config=config)
        accelerator.prepare(nn.Linear(16, 8))
        accelerator.save_state(tmp_path / "state")

    ranks(4)(save)
    files = [load_file(file) for file in (tmp_path / "state").glob("shard-*.safetensors")]
    parts = [part for tensors in files for part in tensors.values()]
    assert sum(part.numel() for part in parts) == 16 * 8 + 8


def test_gradients_that_are_whole_on_each_process_are_not_saved(ranks2, tmp_path):
    def save(**options: Any) -> Any:
        loop = Loop(sharded=True, **options)
        with loop.accelerator.accumulate(*loop.models):
            loop.backward()
        loop.accelerator.save_state(tmp_path / "state")
        return loop.state()

    with pytest.raises(RankError, match=r"Net has gradients .* without.*end of a window"):
        ranks2(lambda: save(gradient_accumulation_steps=2))
    assert not (tmp_path / "state").exists()
    window = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    assert ranks2(lambda: save(gradient_accumulation_plugin=window))  # reduced ones are


def test_loading_forgets_gradients_of_an_open_window(ranks2, tmp_path):
    def run() -> Any:
        loop = Loop(sharded=True).train(1)
        loop.accelerator.save_state(tmp_path / "state")
        expected = loop.train(1).state()
        with loop.accelerator.no_sync():
            loop.backward()
        loop.accelerator.load_state(tmp_path / "state")
        return loop.train(1).state(), expected

    for found, expected in ranks2(run):
        assert_equal(found, expected)


class Kept:
    """A registered object with a sharded tensor of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach() * 2 for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(isinstance(each, DTensor) for each in state.values())
        self.values = state


def test_registered_objects_and_engines_keep_their_own_state(ranks2, tmp_path):
    from trainer.engines.fsdp import FullyShard

    class Counting(FullyShard):
        count: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"count": dist.get_rank() + 5}

        def load_state_dicts(self, saved: Any) -> None:
            self.count = saved

    def run() -> Any:
        loop = Loop(sharded=True, engine=Counting)
        kept = Kept(loop.models[1])
        loop.accelerator.register_for_checkpointing(kept)
        loop.accelerator.save_state(tmp_path / "state")
        expected = whole(kept.values)
        kept.values = {name: each * 0 for name, each in kept.values.items()}
        loop.accelerator.load_state(tmp_path / "state")
        return whole(kept.values), expected, loop.accelerator.engine.count

    for found, expected, count in ranks2(run):
        assert_equal(found, expected)
        assert count == [{"count": 5}, {"count": 6}]


def test_unsafe_saves_of_shards_are_refused(ranks2, tmp_path):
    def save(config: Any = None, hook: Any = None, **options: Any) -> None:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), project_config=config)
        accelerator.prepare(nn.Linear(16, 3))
        if hook is not None:
            accelerator.register_save_state_pre_hook(hook)
        accelerator.save_state(tmp_path / "state", **options)

    def drop_on_one(models: Any, weights: list[Any], folder: str) -> None:
        if dist.get_rank() == 1:
            weights.clear()

    each_node = ProjectConfiguration(project_dir=tmp_path, save_on_each_node=True)
    shares = "save_on_each_node=True is for machines that share no"
    with pytest.raises(RankError, match=shares):
        ranks2(lambda: save(each_node))
    with pytest.raises(RankError, match=shares):
        ranks2(lambda: fit(None, fsdp_plugin=plugin(), project_config=each_node))
    with pytest.raises(RankError, match=r"safe_serialization is False.*leave it out"):
        ranks2(lambda: save(safe_serialization=False))
    with pytest.raises(RankError, match=r"left the models \[\[0\], \[\]\] .*remove the same"):
        ranks2(lambda: save(hook=drop_on_one))
    assert not (tmp_path / "state").exists()


# -- whole weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_saved_models_load_into_plain_modules(ranks2, safe, tmp_path):
    def save() -> Any:
        loop = Loop(sharded=True).train(1)
        loop.accelerator.save_model(loop.models[0], tmp_path, "1KB", safe)
        held = loop.accelerator.get_state_dict(loop.models[0])
        return whole(loop.models[0].state_dict()), held

    (expected, held), (_, other) = ranks2(save)
    assert other == {}
    assert held["tied.weight"] is held["first.weight"]
    assert_equal(held, dict(expected))
    kind = "safetensors" if safe else "bin"
    assert len(list(tmp_path.glob(f"*-of-*.{kind}"))) > 3
    model = Net()
    load_checkpoint_in_model(model, tmp_path)
    assert_equal(dict(model.state_dict()), dict(expected))


def test_a_model_that_rank_0_cannot_write_raises_on_all_ranks(ranks2, tmp_path):
    def save() -> str:
        loop = Loop(sharded=True)
        folder = "/dev/full" if dist.get_rank() == 0 else tmp_path
        with pytest.raises(CheckpointError, match=r"failed on rank 0: .*is a file"):
            loop.accelerator.save_model(loop.models[0], folder)
        place = "trainer.checkpoint.serialization.struct.pack"  # on rank 0 alone is it called
        with (
            mock.patch(place, side_effect=OSError(28, "No space")),
            pytest.raises(CheckpointError, match=r"failed on rank 0: .*disk is full"),
        ):
            loop.accelerator.save_model(loop.models[0], tmp_path)
        return "raised"

    assert ranks2(save) == ["raised", "raised"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["save_model", "get_state_dict"])
def test_gathering_on_one_process_alone_is_an_error_on_all(ranks2, name, tmp_path):
    def alone() -> None:
        loop = Loop(sharded=True)
        if loop.accelerator.is_main_process:
            folder = [tmp_path] if name == "save_model" else []
            getattr(loop.accelerator, name)(loop.models[0], *folder)
        loop.accelerator.wait_for_everyone()

    with pytest.raises(RankError, match=rf"(?s)2 of 2 ranks failed.*{name}.*wait_for_everyone"):
        ranks2(alone)


# -- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state", "fit"])
def test_weights_of_shards_are_merged_a_tensor_at_a_time(ranks2, kind, tmp_path, capsys):
    def save() -> Any:
        if kind == "fit":
            weights, _ = fit(tmp_path, fsdp_plugin=plugin(), checkpointing=True)
            return weights
        loop = Loop(sharded=True).train(1)
        loop.accelerator.save_state(tmp_path / "state")
        return whole(loop.models[0].state_dict())

    expected = ranks2(save)[0]
    folder = max((tmp_path / "checkpoints").iterdir()) if kind == "fit" else tmp_path / "state"
    assert main(["merge-weights", str(folder), str(tmp_path / "merged.safetensors")]) == 0
    assert "from 2 files" in capsys.readouterr().out
    assert_equal(load_weights(tmp_path / "merged.safetensors"), dict(expected))
    read = ShardedTensor.read
    with mock.patch.object(ShardedTensor, "read", autospec=True, side_effect=read) as reads:
        merge_weights(folder, tmp_path / "again.safetensors")
    largest = max(math.prod(call.args[2]) for call in reads.call_args_list)
    assert largest <= 16 * 16  # never more than the largest weight

    shard = folder / "shard-00001.safetensors"
    shard.rename(tmp_path / "away")
    assert main(["merge-weights", str(folder), str(tmp_path / "no.safetensors")]) == 1
    assert "shard-00001.safetensors is missing" in capsys.readouterr().err
    assert main(["checkpoints", str(folder)]) == 1
    assert "shard-00001.safetensors is missing" in capsys.readouterr().out
    (tmp_path / "away").rename(shard)
    assert main(["checkpoints", str(folder), "--verify"]) == 0
    damage(shard)
    assert main(["checkpoints", str(folder), "--verify"]) == 1
    assert "shard-00001.safetensors is damaged" in capsys.readouterr().out
    assert main(["merge-weights", str(folder), str(tmp_path / "no.safetensors")]) == 1
    assert "shard-00001.safetensors is damaged" in capsys.readouterr().err


def test_a_sharded_checkpoint_loads_into_a_plain_module(ranks2, tmp_path):
    expected = ranks2(lambda: fit(tmp_path, fsdp_plugin=plugin(), checkpointing=True))[0][0]
    folder = max((tmp_path / "checkpoints").iterdir())
    assert_equal(dict(FitNet.load_from_checkpoint(folder).state_dict()), expected)
    with pytest.raises(ValueError, match=f"sharded model.*trainer merge-weights {folder}"):
        load_checkpoint_in_model(FitNet(), folder)


class Translating(FitNet):
    """Loads through its own hook, which may rename weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: None)


def test_modules_with_load_hooks_resume_from_shards(ranks2, tmp_path):
    options = {"fsdp_plugin": plugin(), "checkpointing": True}
    expected = ranks2(lambda: fit(tmp_path / "whole", Translating, max_epochs=2, **options))
    ranks2(lambda: fit(tmp_path / "cut", Translating, max_epochs=1, **options))
    found = ranks2(lambda: fit(tmp_path / "cut", Translating, ckpt_path="auto", **options))
    assert_equal(found[0][0], expected[0][0])


def damage(file: Path) -> None:
    """Change one byte of a tensor."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_run_resumes_from_the_newest_checkpoint_with_all_its_shards(ranks2, how, tmp_path):
    keep = {
        "fsdp_plugin": plugin(),
        "callbacks": [ModelCheckpoint(save_top_k=-1, every="1 epoch")],
    }
    expected = ranks2(lambda: fit(tmp_path, max_epochs=3, **keep))
    *_, newest = sorted((tmp_path / "checkpoints").iterdir())
    shard = newest / "shard-00001.safetensors"
    damage(shard) if how == "damaged" else shard.unlink()

    def resume() -> Any:
        hashed: list[str] = []
        digest = storage._digest

        def note(stream: Any) -> str:
            hashed.append(stream.name)
            return digest(stream)

        with mock.patch.object(storage, "_digest", note):
            state = Accelerator(cpu=True).state
            chosen = CheckpointFolders(own=newest.parent, state=state).choose("auto")
        return chosen, hashed

    (chosen, first), (other, second) = ranks2(resume)
    assert chosen == other == sorted(newest.parent.iterdir())[-2]
    files = [name for name in (*first, *second) if str(chosen) in name]
    assert len(files) == len(set(files)) == len(list(chosen.iterdir())) - 1  # each once
    assert all(any(str(chosen) in name for name in each) for each in (first, second))
    found = ranks2(lambda: fit(tmp_path, max_epochs=3, ckpt_path="auto", **keep))
    assert_equal(found[0][0], expected[0][0])


# -- the mesh ------------------------------------------------------------------------------------


def test_each_process_knows_its_place_in_the_mesh(ranks):
    def look() -> Any:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), parallelism_config=config)
        assert accelerator.distributed_type == DistributedType.FSDP
        assert accelerator.is_fsdp2
        assert accelerator.state.is_fsdp2
        assert accelerator.is_composable_parallelism_enabled
        assert accelerator.should_save_model
        assert not accelerator.multi_device
        assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
        assert accelerator.pipeline_parallel_rank == 0
        assert accelerator.context_parallel_rank == 0
        places = accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank
        return *places, accelerator.tensor_parallel_rank

    assert ranks(4)(look) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_without_shards_there_is_no_mesh(ranks2):
    def look() -> Any:
        accelerator = Accelerator(cpu=True)
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        assert not accelerator.is_fsdp2
        assert not accelerator.state.is_fsdp2
        assert not accelerator.is_composable_parallelism_enabled
        assert not accelerator.multi_device
        assert accelerator.torch_device_mesh is None
        for name in ("tensor_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank"):
            with pytest.raises(RuntimeError, match="pass a ParallelismConfig"):
                getattr(accelerator, name)
        return accelerator.should_save_model

    assert ranks2(look) == [True, False]
