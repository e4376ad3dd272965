"""Layers that are split over processes train as whole ones, and no sample counts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    Trainer,
    TrainModule,
)

SAMPLES = 44  # with batches of 4, two shares of the data have 6 and 5 batches
X = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
PLAN = {"blocks.*.first": ColwiseParallel(), "blocks.*.second": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(TrainModule):
    tp_plan = PLAN

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's are taken
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.blocks = nn.Sequential(Block(), Block())
        self.draws: list[float] = []
        self.data: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draws.append(torch.rand(()).item())
        self.data.append(batch[0].sum().item())
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        self.log("train/samples", len(batch[0]), reduce="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.log("val/samples", len(batch[0]), reduce="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0][:, 0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Net):
    tp_plan = None

    def configure_model(self) -> None:
        mesh = self.trainer.accelerator.torch_device_mesh
        if mesh is not None:
            parallelize_module(self, mesh["tp"], PLAN)


class OnMeta(Net):
    def __init__(self) -> None:
        with torch.device("meta" if dist.is_initialized() and dist.get_rank() else "cpu"):
            super().__init__()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


def whole(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in state.items()
    }


def fit(folder: Path, module: type[Net] = Net, *, shares: int = 1, **options: Any) -> Any:
    """Train two epochs on batches that are as large over all shares of the data."""
    ckpt_path = options.pop("ckpt_path", None)
    options = {"max_epochs": 2, "checkpointing": False, "log_every": 1, **options}
    trainer = Trainer(cpu=True, seed=3, progress_bar=False, project_dir=folder, **options)
    data, model = TensorDataset(X, Y), module()
    loader = DataLoader(data, 8 // shares, shuffle=True)
    trainer.fit(model, loader, DataLoader(data, 8 // shares), ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return whole(model), metrics, trainer.samples_seen, model.draws, model.data


def assert_close(found: list[Any], expected: Any, tolerance: float = 1e-4) -> None:
    for weights, metrics, samples, *_ in found:
        for name, value in expected[0].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)
        assert metrics == pytest.approx(expected[1], abs=tolerance)
        assert samples == expected[2]


@pytest.mark.parametrize("module", [Net, ByHand, OnMeta, Frozen])
def test_tensor_parallel_training_equals_one_process(ranks2, module, tmp_path):
    expected = fit(tmp_path / "one", module, max_grad_norm=0.5)
    config = ParallelismConfig(tp_size=2)
    options = {"parallelism_config": config, "max_grad_norm": 0.5}
    found = ranks2(lambda: fit(tmp_path / "two", module, **options))
    assert_close(found, expected, 1e-5)
    assert found[0][3:] == found[1][3:] == expected[3:]  # random numbers and batches


@pytest.mark.parametrize("first", ["dp_shard_size", "dp_replicate_size"])
def test_tensor_parallelism_with_shards_and_replicas_equals_one_process(ranks, first, tmp_path):
    plan = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    expected = fit(tmp_path / "one", **plan)
    options = {
        "parallelism_config": ParallelismConfig(tp_size=2, **{first: 2}),
        "fsdp_plugin": FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]),
        "shares": 2,
        **plan,
    }
    found = ranks(4)(lambda: fit(tmp_path / "four", **options))
    assert_close(found, expected)
    assert found[0][3:] == found[1][3:] != found[2][3:] == found[3][3:]


def test_each_process_holds_its_part_of_a_layer(ranks2, tmp_path):
    def sizes() -> dict[str, int]:
        accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        model = accelerator.prepare(Net())
        return {name: p.to_local().numel() for name, p in model.named_parameters()}

    (one, other), whole_ones = ranks2(sizes), dict(Net().named_parameters())
    split = ("first.weight", "first.bias", "second.weight")
    for name, size in one.items():
        parts = 2 if name.startswith("blocks") and name.endswith(split) else 1
        assert size == other[name] == whole_ones[name].numel() // parts


def test_coordinates_on_the_mesh(ranks):
    def told() -> list[Any]:
        config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
        one = Accelerator(cpu=True, parallelism_config=config)
        assert config.get_device_mesh() is one.torch_device_mesh
        assert one.is_fsdp2
        assert one.is_composable_parallelism_enabled
        parts = one.data_parallel_rank, one.data_parallel_shard_rank, one.tensor_parallel_rank
        return [*parts, one.should_save_model]

    assert ranks(4)(told) == [[0, 0, 0, True], [0, 0, 1, True], [1, 0, 0, True], [1, 0, 1, True]]
    alone = Accelerator(cpu=True)
    assert alone.torch_device_mesh is None
    assert not alone.is_composable_parallelism_enabled
    assert alone.should_save_model


def test_a_second_run_of_a_layout_makes_no_process_groups(ranks):
    def same() -> bool:
        configs = [ParallelismConfig(dp_shard_size=2, tp_size=2) for _ in range(2)]
        one, other = (config.get_device_mesh("cpu") for config in configs)
        return one is other

    assert ranks(4)(same) == [True] * 4


def test_an_own_loop_trains_as_one_process_and_gathers_each_sample_once(ranks2):
    def train() -> list[Any]:
        several = dist.is_initialized()
        config = {"parallelism_config": ParallelismConfig(tp_size=2)} if several else {}
        accelerator = Accelerator(cpu=True, **config)
        torch.manual_seed(7 * accelerator.process_index)  # the order of the data is rank 0's
        loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True)
        model, loader = accelerator.prepare(Net(), loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        seen, norms = [], []
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(x[:, 0]).tolist()
            seen += accelerator.gather_for_metrics([*map(str, x[:, 1].tolist())])
        return [accelerator.get_state_dict(model), norms, seen, schedule.get_last_lr()]

    weights, norms, seen, lr = train()
    (found, *others), (_, *on_rank_1) = ranks2(train)
    assert others == on_rank_1
    assert others[0] == pytest.approx(norms, abs=1e-6)
    assert others[1:] == [seen, lr]
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_a_metric_object_counts_each_sample_once(ranks2, tmp_path):
    class Counting(Net):
        def __init__(self) -> None:
            from torchmetrics import SumMetric

            super().__init__()
            self.count = SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.count.update(len(batch[0]))
            self.log("val/count", self.count)

    options = {"parallelism_config": ParallelismConfig(tp_size=2)}
    found = ranks2(lambda: fit(tmp_path, Counting, **options))
    assert [metrics["val/count"] for _, metrics, *_ in found] == [SAMPLES, SAMPLES]


def test_predictions_are_returned_and_written_once(ranks, tmp_path):
    from callbacks import PredictionWriter

    def predict() -> Any:
        config = ParallelismConfig(dp_shard_size=2, tp_size=2)
        writer = PredictionWriter(tmp_path / "out")
        trainer = Trainer(
            cpu=True, progress_bar=False, parallelism_config=config, callbacks=[writer]
        )
        loader = DataLoader(TensorDataset(X, Y), 4)
        parts = trainer.predict(Net(), loader, return_predictions=True)
        return None if parts is None else torch.cat(parts)

    from safetensors.torch import load_file

    found, *others = ranks(4)(predict)
    assert torch.equal(found, X[:, 0])
    assert others == [None, None, None]
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(next(iter(load_file(file).values())), X[:, 0])


# -- checkpoints -----------------------------------------------------------------------------------

SPLIT = {"parallelism_config": ParallelismConfig(tp_size=2)}


@pytest.mark.parametrize("saved", ["one", "split"])
def test_a_run_resumes_without_tensor_parallelism_and_back(ranks2, saved, tmp_path):
    def run(split: bool, folder: str, **options: Any) -> Any:
        options = {"checkpointing": True, "max_steps": 9, **options}
        if split:
            return ranks2(lambda: fit(tmp_path / folder, **SPLIT, **options))
        return [fit(tmp_path / folder, **options)]

    split = saved == "split"
    expected = run(split, "whole")[0]
    run(split, "cut", max_steps=4)
    found = run(not split, "cut", ckpt_path="auto")
    assert_close(found, expected, 1e-5)
    assert all(draws == expected[3][4:] for *_, draws, _ in found)


# -- refusals --------------------------------------------------------------------------------------


class Unplanned(Net):
    tp_plan = None


class Mistyped(Net):
    tp_plan = {"block.*.first": ColwiseParallel()}


class Misnamed(Net):
    tp_plan = {"blocks.*.first": "column"}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Unplanned, "does not say which layers to split.*tp_plan"),
        (Mistyped, r"'block.\*.first'.* Did you mean 'blocks.\*.first'"),
        (Misnamed, r"a style of tp_plan.*'column'.*colwise"),
    ],
)
def test_plans_that_split_no_layer_are_refused(ranks2, module, message, tmp_path):
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path, module, **SPLIT))


def test_tensor_parallel_state_loads_into_one_process_and_back(ranks, tmp_path):
    def loop(**options: Any) -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True, **options)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        return accelerator, model, optimizer

    def on_four(job: str) -> dict[str, Tensor]:
        config = ParallelismConfig(tp_size=2, dp_shard_size=2)
        accelerator, model, optimizer = loop(parallelism_config=config)
        if job == "save":
            accelerator.backward(nn.functional.cross_entropy(model(X), Y))
            optimizer.step()
            accelerator.save_state(tmp_path / "four")
        else:
            accelerator.load_state(tmp_path / "one")
        return whole(model) | moments(model, optimizer)

    def moments(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        states = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
        return {
            f"moment of {n}": v.full_tensor() if isinstance(v, DTensor) else v
            for n, v in states.items()
        }

    expected = ranks(4)(lambda: on_four("save"))[0]
    accelerator, model, optimizer = loop()
    accelerator.load_state(tmp_path / "four")
    here = whole(model) | moments(model, optimizer)
    accelerator.save_state(tmp_path / "one")
    back = ranks(4)(lambda: on_four("load"))[3]
    for name, value in expected.items():
        assert torch.equal(here[name], value)
        assert torch.equal(back[name], value)


# -- what only one part of a layer has -------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_nan_in_one_shard_of_a_layer_skips_the_update_on_all_ranks(
    ranks2, ranks, precision, shards, tmp_path
):
    class Spoils(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            last = dist.get_rank() == dist.get_world_size() - 1
            if self.trainer.global_step == 2 and last:
                self.blocks[0].first.weight.grad.to_local().fill_(torch.nan)

        def on_after_backward(self) -> None:
            last = dist.get_rank() == dist.get_world_size() - 1
            if self.trainer.global_step == 2 and last and precision == "fp16":
                self.blocks[0].first.weight.grad.to_local().fill_(torch.inf)

    def run() -> Any:
        config = ParallelismConfig(tp_size=2, dp_shard_size=shards)
        trainer = Trainer(
            cpu=True,
            seed=3,
            progress_bar=False,
            checkpointing=False,
            project_dir=tmp_path,
            max_epochs=1,
            parallelism_config=config,
            mixed_precision=precision,
            non_finite="skip",
            max_grad_norm=0.5,
        )
        model = Spoils()
        trainer.fit(model, DataLoader(TensorDataset(X, Y), 8))
        finite = all(bool(v.isfinite().all()) for v in whole(model).values())
        return trainer.skipped_updates, finite

    pool = ranks2 if shards == 1 else ranks(4)
    assert pool(run) == [(1, True)] * (2 * shards)


class Dropped(Net):
    """Dropout on what all parts of a layer share."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.blocks(self.first(x)), 0.5, self.training))


def replicas(model: nn.Module) -> list[Tensor]:
    """Return this process's parts of parameters that are not split."""
    split = ("first.weight", "first.bias", "second.weight")
    own = [p for n, p in model.named_parameters() if not (n[:6] == "blocks" and n.endswith(split))]
    return [p.detach().to_local().clone() for p in own]


@pytest.mark.parametrize("kind", ["Trainer", "Accelerator"])
def test_parts_of_a_layer_draw_the_same_dropout_without_a_seed(ranks2, kind, tmp_path):
    def train() -> Any:
        torch.manual_seed(17 * dist.get_rank())  # as in processes that nobody seeds
        model = Dropped()
        torch.manual_seed(29 * dist.get_rank())
        if kind == "Trainer":
            trainer = Trainer(
                cpu=True,
                progress_bar=False,
                checkpointing=False,
                project_dir=tmp_path,
                max_epochs=1,
                parallelism_config=ParallelismConfig(tp_size=2),
            )
            trainer.fit(model, DataLoader(TensorDataset(X, Y), 8))
            return replicas(model)
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            accelerator.backward(nn.functional.cross_entropy(model(X), Y))
            optimizer.step()
            optimizer.zero_grad()
        return replicas(model)

    one, other = ranks2(train)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shards", [1, 2])
def test_averages_and_norms_span_split_and_whole_layers(ranks2, ranks, shards, tmp_path):
    from callbacks import GradientNormMonitor, WeightAveraging

    def run(folder: str, **options: Any) -> Any:
        callbacks = [WeightAveraging(decay=0.7), GradientNormMonitor(per="parameter")]
        return fit(tmp_path / folder, callbacks=callbacks, max_grad_norm=0.5, **options)

    config = ParallelismConfig(tp_size=2, dp_shard_size=shards)
    pool = ranks2 if shards == 1 else ranks(4)
    found = pool(lambda: run("parts", shares=shards, parallelism_config=config))
    assert_close(found, run("one"))


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_step_split_and_whole_layers(ranks2, optimizer, precision, tmp_path):
    class Own(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[optimizer](self.parameters())  # type: ignore[no-any-return]

    options = {"max_grad_norm": 0.5, "mixed_precision": precision}
    expected = fit(tmp_path / "one", Own, **options)
    found = ranks2(lambda: fit(tmp_path / "two", Own, **SPLIT, **options))
    assert_close(found, expected, 1e-5 if precision == "no" else 5e-2)
