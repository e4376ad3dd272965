"""A rank without a batch runs a dummy batch, so that no collective of a step waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import SumMetric

from tests.helpers.ranks import RankError
from trainer import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    Trainer,
    TrainModule,
)

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


class Summed(torch.autograd.Function):
    """Zero, whose gradient is that of a sum over all ranks: collective in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        total = rows.sum(0)
        if dist.is_initialized():
            dist.all_reduce(total)
        ctx.rows = len(rows)
        return total * 0.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.expand(ctx.rows, -1)


class Collective(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows + Summed.apply(rows)


class Net(TrainModule):
    def __init__(self, layer: type[nn.Module] = Collective) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The gradient of a bias before a normalisation is 0, of which AdamW makes noise.
        first = nn.Linear(4, 3, bias=layer is Collective)
        self.net = nn.Sequential(first, layer(), nn.Linear(3, 1))
        self.outputs: dict[str, list[float]] = {"mean": []}
        self.samples = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - 1.0).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net(batch[0]).mean())
        self.samples.update(float(len(batch[0])))
        self.log("samples", self.samples)
        self.outputs["mean"].append(float(batch[0].mean()))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05, weight_decay=0.1)


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward((self.net(batch[0]) - 1.0).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(zip(X[: self.samples], strict=True))


def loader(samples: int, size: int = 4) -> DataLoader:
    return DataLoader(TensorDataset(X[:samples]), size)


def quiet(**options: Any) -> Trainer:
    return Trainer(
        **{"max_epochs": 2, "cpu": True, "progress_bar": False, "checkpointing": False} | options
    )


def fitted(data: Any, kind: type[Net] = Net, **options: Any) -> list[float]:
    module = kind()
    quiet(**options).fit(module, data)
    return flat(module)


def flat(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def ddp(**options: Any) -> dict[str, Any]:
    return {"kwargs_handlers": [DistributedDataParallelKwargs(**options)]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        ddp(find_unused_parameters=True),
        ddp(static_graph=True),
        ddp(broadcast_buffers=False) | {"max_grad_norm": 0.1},
    ],
    ids=["plain", "accumulate", "find_unused", "static", "clip"],
)
@pytest.mark.parametrize("samples", [20, 4])  # 4: one batch, so rank 0's is broadcast
def test_a_layer_that_is_collective_trains_as_on_one_process(ranks2, options, samples):
    """Gradients of a dummy batch do not reach other ranks through the layer's backward either."""
    whole = fitted(loader(samples, 8), **options)
    for weights in ranks2(lambda: fitted(loader(samples), **options)):
        assert weights == pytest.approx(whole, abs=2e-6)


def test_three_ranks_of_which_two_have_no_batch(ranks3):
    whole = fitted(loader(16, 12))
    for weights in ranks3(fitted, loader(16)):
        assert weights == pytest.approx(whole, abs=2e-6)


def test_a_stream_and_manual_optimisation(ranks2):
    whole = fitted(DataLoader(Stream(20), 8))
    for weights in ranks2(fitted, DataLoader(Stream(20), 4)):
        assert weights == pytest.approx(whole, abs=2e-6)
    # In manual optimisation each optimizer averages over the ranks, with the zeros of the dummy.
    for weights in ranks2(fitted, loader(20), ByHand):
        assert weights == pytest.approx(halved(), abs=2e-6)


def halved() -> list[float]:
    module = Net()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for rows, share in ((X[:8], 1.0), (X[8:16], 1.0), (X[16:20], 0.5)):
            (module.training_step([rows], 0) * share).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(module)


class TwoHeads(Net):
    """The first value of a batch chooses its head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = self.heads[int(batch[1][0])]
        return (head(self.net[:2](batch[0])) + self.net(batch[0])).square().mean()


def test_the_use_of_a_parameter_by_a_dummy_batch_does_not_count(ranks2):
    """Rank 1's latest batch is of head 0, the last batch of head 1: head 0 has no gradient."""
    head = torch.arange(20) // 16
    data = TensorDataset(X[:20], head)
    options = {"max_epochs": 1} | ddp(find_unused_parameters=True)
    whole = fitted(DataLoader(data, 8), TwoHeads, **options)
    for weights in ranks2(lambda: fitted(DataLoader(data, 4), TwoHeads, **options)):
        assert weights == pytest.approx(whole, abs=2e-6)


def test_a_batch_without_items_keeps_its_nan_from_the_others(ranks2):
    class Counted(Net):
        def count_items(self, batch: Any) -> int:
            return 0 if batch[0][0, 0] == X[12, 0] else 4

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            own = batch[0][: self.count_items(batch)]  # the mean over no rows is NaN
            return (self.net[2](self.net[0](batch[0]) + own.sum() * 0)[: len(own)]).square().mean()

    one, other = ranks2(fitted, loader(20), Counted)
    assert one == other
    assert torch.tensor(one).isfinite().all()


@pytest.mark.parametrize("who", [[1], [0, 1]])
def test_minus_one_ends_the_epoch_though_the_forward_is_collective(ranks2, who):
    class Ending(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 and self.trainer.global_rank in who else None

    def fit() -> tuple[int, list[float]]:
        module = Ending()
        trainer = quiet()
        trainer.fit(module, loader(40))
        return trainer.global_step, flat(module)

    one, other = ranks2(fit)
    assert one == other
    assert one[0] == (6 if who == [1] else 4)  # rank 0's third batch makes an update


def test_minus_one_leaves_out_a_batch_that_cannot_be_run(ranks2):
    """The dummy batch is the latest one that was run, as it was before its step."""

    class Ending(Normal):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if len(batch[0]) == 1 else None  # too few for batch normalisation

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch.pop()], batch_idx)

    assert ranks2(fitted, loader(9, 2), Ending) == ranks2(fitted, loader(8, 2), Normal)


class Normal(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(3))


class Reentrant(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = checkpoint(self.net, batch[0].requires_grad_(), use_reentrant=True)
        return (hidden - 1.0).square().mean()


def test_a_dummy_batch_of_a_module_that_is_checkpointed_by_reentering(ranks2):
    options = ddp(static_graph=True)
    whole = fitted(loader(4), Reentrant)
    for weights in ranks2(lambda: fitted(loader(4), Reentrant, **options)):
        assert weights == pytest.approx(whole, abs=2e-6)


class NormalByHand(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Normal, {}), (Normal, ddp(static_graph=True)), (NormalByHand, {})],
    ids=["plain", "static", "manual"],
)
def test_statistics_go_on_where_rank_0_has_the_fewest_batches(ranks2, kind, options):
    """Buffers come from a rank that has a batch; of streams, rank 0 may have the fewest."""

    def fit() -> list[float]:
        module = kind()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)
        own = Stream(4) if dist.get_rank() == 0 else Stream(16)
        config = DataLoaderConfiguration(presharded=True)
        quiet(dataloader_config=config, **options).fit(module, DataLoader(own, 4))
        return module.net[1].running_mean.tolist()

    alone = kind()
    for _ in range(2):
        for rows in X[:16].split(4):
            alone.net(rows)
    expected = alone.net[1].running_mean.tolist()
    for means in ranks2(fit):
        assert means == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("samples", [20, 4])
@pytest.mark.parametrize("stage", ["validate", "test", "fit", "predict"])
def test_an_evaluation_step_may_be_collective(ranks2, stage, samples):
    """And a dummy batch leaves no value, no prediction and no entry in the module's own lists."""

    def evaluate() -> Any:
        module, trainer = Net(), quiet(num_sanity_val_steps=0, max_epochs=1)
        if stage == "fit":
            trainer.fit(module, loader(16), loader(samples))
            return trainer.callback_metrics["score"], trainer.callback_metrics["samples"], 0
        result = getattr(trainer, stage)(module, loader(samples))
        if stage == "predict":
            return result and torch.cat(result).flatten().tolist()
        return [*result[0].values()], len(module.outputs["mean"])

    one, other = ranks2(evaluate)
    if stage == "predict":
        with torch.no_grad():
            assert one == pytest.approx(Net().net(X[:samples]).flatten().tolist(), abs=1e-6)
        assert other is None
        return
    assert one[:-1] == other[:-1]
    if stage != "fit":
        assert one[0] == pytest.approx([Net().net(X[:samples]).mean().item(), samples], abs=1e-6)
        assert (one[1], other[1]) == ((3, 2) if samples == 20 else (1, 0))
    else:
        assert one[1] == samples


def test_what_a_step_gathers_for_metrics_has_no_rows_of_dummy_batches(ranks2):
    class Gathering(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            gather = self.trainer.accelerator.gather_for_metrics
            self.seen = [*getattr(self, "seen", []), *gather(batch[0][:, 0]).tolist()]
            self.names = [*getattr(self, "names", []), *gather([*map(str, batch[0][:, 0])])]

    def evaluate() -> Any:
        module = Gathering()
        quiet().validate(module, loader(19))
        return module.seen, len(module.names)

    assert ranks2(evaluate) == [(X[:19, 0].tolist(), 19)] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)},
    ],
    ids=["fsdp", "zero3", "zero1"],
)
def test_sharded_models_evaluate_with_collectives_of_the_users(ranks2, options):
    def fit() -> list[float]:
        module = Net()
        trainer = quiet(max_epochs=1, **options)
        trainer.fit(module, loader(20), loader(12))
        return [trainer.callback_metrics["score"], trainer.callback_metrics["samples"]]

    trainer = quiet(max_epochs=1)
    trainer.fit(Net(), loader(20, 8), loader(12))
    for found in ranks2(fit):
        assert found == pytest.approx([trainer.callback_metrics["score"], 12.0], abs=1e-5)


# -- SyncBatchNorm, which torch refuses on the CPU: its kernels are written out here ---------------


def stats(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rows.mean(0), (rows.var(0, unbiased=False) + eps).rsqrt()


def gather_stats(rows, means, invstds, running_mean, running_var, momentum, eps, counts):
    counts = counts.view(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((invstds**-2 - eps + (means - mean) ** 2) * counts).sum(0) / total
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def elementwise(rows, weight, bias, mean, invstd, eps):
    return (rows - mean) * invstd * weight + bias


def backward_reduce(gradient, rows, mean, invstd, weight, *_):
    centred = gradient * (rows - mean)
    return gradient.sum(0), centred.sum(0), (centred * invstd).sum(0), gradient.sum(0)


def backward_elementwise(gradient, rows, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    total = counts.sum()
    centred = gradient - sum_dy / total - (rows - mean) * invstd**2 * sum_dy_xmu / total
    return centred * invstd * weight


class OnCPU(nn.SyncBatchNorm):
    """The layer without its check of the device."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return nn.BatchNorm1d.forward(self, rows)
        self.num_batches_tracked.add_(1)
        from torch.nn.modules._functions import SyncBatchNorm

        group = dist.group.WORLD
        return SyncBatchNorm.apply(
            rows.contiguous(),
            *(self.weight, self.bias, self.running_mean, self.running_var, self.eps),
            *(self.momentum, group, dist.get_world_size()),
        )


class Normed(Net):
    def __init__(self, layer: Any = OnCPU) -> None:
        super().__init__(layer)


def normed(samples: int, kind: type[Net] = Normed, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, function in KERNELS.items():
            patch.setattr(torch, name, function)
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
        module = kind()
        quiet(**options).fit(module, loader(samples))
        norm = module.net[1]
        return flat(module), norm.running_mean.tolist(), norm.running_var.tolist()


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elementwise,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elementwise,
}


@pytest.mark.parametrize("samples", [20, 18, 4])
@pytest.mark.parametrize("options", [{}, ddp(find_unused_parameters=True)], ids=["", "unused"])
def test_a_dummy_batch_does_not_count_in_sync_batch_norm(ranks2, samples, options):
    module = Net(lambda: nn.BatchNorm1d(3))
    quiet().fit(module, loader(samples, 8))
    norm = module.net[1]
    (weights, means, variances), (others, *_) = ranks2(lambda: normed(samples, **options))
    assert weights == others
    assert weights == pytest.approx(flat(module), abs=1e-5)
    assert means == pytest.approx(norm.running_mean.tolist(), abs=1e-5)
    assert variances == pytest.approx(norm.running_var.tolist(), abs=1e-5)


def test_none_from_a_step_with_sync_batch_norm_is_an_error_that_names_the_rank(ranks2):
    class Skipping(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if self.trainer.global_rank else super().training_step(batch, batch_idx)

    with pytest.raises(RankError, match="returned None on rank 1 at update 1"):
        ranks2(normed, 20, Skipping, timeout=30)


@pytest.mark.gpu
def test_sync_batch_norm_with_uneven_data_on_gpus():
    """One process per GPU: `torchrun --nproc_per_node N -m pytest -m gpu` runs it on several."""
    module = Net(lambda: nn.SyncBatchNorm(3))
    trainer = Trainer(max_epochs=2, progress_bar=False, checkpointing=False)
    trainer.fit(module, loader(4 * (2 * trainer.world_size - 1)))
    assert torch.tensor(flat(module)).isfinite().all()
