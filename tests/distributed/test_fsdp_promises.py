"""What is particular to shards in training: each run equals that of one process."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    GradientNormMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from callbacks.model_summary import summarize
from tests.distributed import test_fsdp
from tests.distributed.test_fsdp import Block, X, Y, plugin, whole
from tests.helpers.ranks import RankError
from trainer import GradScalerKwargs, Preempted, Trainer, TrainModule
from trainer.engines import fsdp
from trainer.tuning import Tuner

DATA = TensorDataset(X, Y)
NEEDS_A_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU"
)


class Net(test_fsdp.Net):
    """With SGD, since Adam inflates the rounding of gradients that are nearly 0."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def trainer(folder: Path, **options: Any) -> Trainer:
    """Return a Trainer that shards the model if there are several processes."""
    sharded = {"fsdp_plugin": plugin()} if world() > 1 else {}
    defaults = {"max_epochs": 2, "checkpointing": False, "log_every": 1, "seed": 3}
    return Trainer(
        cpu=True, progress_bar=False, project_dir=folder, **{**defaults, **sharded, **options}
    )


def loader(data: Any = DATA, batch: int = 8) -> DataLoader[Any]:
    """Return a loader whose batches are as large over all processes."""
    return DataLoader(data, batch // world())


def metrics_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(folder: Path, module: type[Net] = Net, data: Any = DATA, **options: Any) -> Any:
    batch = options.pop("batch", 8)
    own, model = trainer(folder, **options), module()
    own.fit(model, loader(data, batch), loader(data, batch))
    return whole(model), metrics_of(own)


def assert_equal(
    ranks: Callable[..., list[Any]],
    run: Callable[[str], Any],
    tolerance: float = 1e-5,
    *,
    only_on_rank_0: int = 0,
) -> Any:
    """Assert that `run` returns on each rank what it returns here; the last values on rank 0."""
    expected = run("one")
    for index, found in enumerate(ranks(lambda: run("shards"))):
        if index and only_on_rank_0:
            found, expected = found[:-only_on_rank_0], expected[:-only_on_rank_0]
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    return expected


# -- evaluation is exact ------------------------------------------------------------------------


class Evaluated(Net):
    """Blocks are called in another order than that of their definition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.early = Block(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[0](self.blocks[2](self.blocks[1](self.first(self.early(x))))))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self(batch[0])
        self.log("val/loss", nn.functional.cross_entropy(out, batch[1]))
        self.log("val/accuracy", (out.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def test_evaluation_is_exact_while_weights_stay_gathered(ranks2, tmp_path):
    def run(name: str) -> Any:
        given = plugin(sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True)
        options = {"fsdp_plugin": given} if world() > 1 else {}
        own, model = trainer(tmp_path / name, **options), Evaluated()
        several = [loader(TensorDataset(X[:n], Y[:n])) for n in (3, 20, 44)]
        for _ in range(2):
            own.fit(model, loader(), several)
        metrics = own.validate(model, several), own.test(model, several[0])
        predicted = own.predict(model, several[1])
        return whole(model), metrics, None if predicted is None else torch.cat(predicted)

    assert_equal(ranks2, run, only_on_rank_0=1)


# -- numbers that are not finite, and mixed precision -------------------------------------------


class Repaired(Net):
    """A sample of rank 1 makes the gradient of the second update NaN; a hook repairs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if bool((batch[0][:, 0] == X[13, 0]).any()):
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1:  # as many updates were made before the bad one
            for parameter in self.parameters():
                parameter.grad.zero_()


class Extra(Net):
    """Has a parameter that no optimizer updates, and whose gradient is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.extra.sqrt().sum() * 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        updated = [p for name, p in self.named_parameters() if name != "extra"]
        return torch.optim.SGD(updated, lr=0.1)


@pytest.mark.parametrize("module", [Repaired, Extra])
def test_gradients_are_checked_just_before_the_optimizer_uses_them(ranks2, module, tmp_path):
    assert_equal(ranks2, lambda name: fit(tmp_path / name, module, max_epochs=1))


def test_an_update_sums_its_step_stats_and_checks_gradients_in_one_message(ranks2, tmp_path):
    def messages() -> int:
        own, before = trainer(tmp_path, max_epochs=1), fsdp.sum_numbers
        with patch.object(fsdp, "sum_numbers", side_effect=before) as counted:
            own.fit(Net(), loader())
        return counted.call_count - own.global_step

    assert ranks2(messages) == [0, 0]


class Dtypes(Net):
    """Logs the dtypes in a forward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = {batch[0].dtype, *(p.dtype for p in self.blocks[0].parameters())}
        return super().training_step(batch, batch_idx)


def test_updates_that_overflow_float16_are_skipped(ranks2, tmp_path):
    options = {"mixed_precision": "fp16", "max_epochs": 1, "gradient_accumulation_steps": 2}
    options |= {"max_grad_norm": 1.0}
    options["kwargs_handlers"] = [GradScalerKwargs(init_scale=2.0**24, growth_interval=2)]

    def run(name: str) -> Any:
        own, model = trainer(tmp_path / name, **options), Net()
        own.fit(model, loader())
        return whole(model), own.skipped_updates

    expected = assert_equal(ranks2, run, 2e-3)
    assert expected[1] > 0


def test_parameters_are_gathered_in_the_precision_and_gradients_reduced_in_float32(
    ranks2, tmp_path
):
    def dtypes() -> Any:
        own, model, seen = trainer(tmp_path, mixed_precision="bf16", max_steps=1), Net(), {}

        def look(block: nn.Module, args: Any) -> None:
            seen["gathered"], seen["input"] = block.first.weight.dtype, args[0].dtype

        model.blocks[0].register_forward_pre_hook(look)
        model.blocks[0].norm.register_forward_pre_hook(
            lambda part, args: seen.update(batch=part.weight.dtype)
        )
        own.fit(model, loader())
        return seen, {p.dtype for p in model.parameters()}

    (seen, kept), _ = ranks2(dtypes)
    assert (seen["batch"], kept) == (torch.bfloat16, {torch.float32})


# -- what cannot work is refused ----------------------------------------------------------------


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


def optimized(make: Any) -> type[Net]:
    class Optimized(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = make(self.parameters())
            return optimizer

    return Optimized


class Compiled(Net):
    def configure_model(self) -> None:
        self.blocks[1].compile(backend="eager")


REFUSED = {
    "compiled": (Compiled, "blocks.1 is compiled as a whole"),
    "LBFGS": (optimized(torch.optim.LBFGS), "LBFGS"),
    "Rprop": (optimized(torch.optim.Rprop), "Rprop cannot update sharded"),
    "Adafactor": (optimized(torch.optim.Adafactor), "Adafactor cannot update sharded"),
    "sparse": (Sparse, "table has sparse gradients"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_features_are_refused_by_name(ranks2, what, tmp_path):
    module, message = REFUSED[what]
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path, module))


class LayerDrop(Net):
    """Each rank leaves out another block, from the second step on, or in validation."""

    drops_in = "training"

    def run(self, x: Tensor, *, drops: bool) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if not drops or index != rank():
                x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drops = self.drops_in == "training" and batch_idx > 0
        return nn.functional.cross_entropy(self.run(batch[0], drops=drops), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/out", self.run(batch[0], drops=self.drops_in == "validation").mean())


class DropInValidation(LayerDrop):
    drops_in = "validation"


@pytest.mark.parametrize("module", [LayerDrop, DropInValidation])
def test_ranks_that_run_different_units_raise_before_they_step(ranks2, module, tmp_path):
    def drop() -> tuple[str, int]:
        own, model = trainer(tmp_path, num_sanity_val_steps=0), module()
        with pytest.raises(RuntimeError) as caught:
            own.fit(model, loader(), loader())
        return str(caught.value), own.global_step

    (found, steps), other = ranks2(drop)
    assert other == (found, steps)
    assert "rank 0: blocks.1, " in found
    assert "rank 1: blocks.0, " in found
    assert "wrap larger units" in found
    assert steps == (1 if module is LayerDrop else 6)


# -- manual optimisation ------------------------------------------------------------------------


class Gan(TrainModule):
    """Two optimizers in one step, of which one waits for a forward pass without backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.makes = nn.Sequential(nn.Linear(8, 16), Block(), nn.Linear(16, 8))
        self.judges = nn.ModuleList([nn.Linear(8, 16), nn.Sequential(Block(), nn.Linear(16, 1))])

    def judge(self, x: Tensor) -> Tensor:
        return self.judges[1](self.judges[0](x).relu())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        real, made = batch[0], self.makes(batch[0].flip(1))
        for optimizer, loss in (
            (judges, lambda: (self.judge(made.detach()) - self.judge(real)).mean()),
            (judges, lambda: self.judge(self.makes(real).detach()).square().mean()),
            (makes, lambda: -self.judge(made).mean()),
            (makes, lambda: (self.makes(real) - real).square().mean()),
        ):
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            self.clip_gradients(optimizer, max_grad_norm=0.5)
            optimizer.step()
            self.log("train/loss", value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/judged", self.judge(self.makes(batch[0])).mean())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.makes, self.judges)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_two_optimizers_in_one_step_train_as_one_process(ranks2, sharding, tmp_path):
    def run(name: str) -> Any:
        given = plugin(sharding_strategy=sharding)
        options = {"fsdp_plugin": given} if world() > 1 else {}
        own, model = trainer(tmp_path / name, **options), Gan()
        data = TensorDataset(X[:40], Y[:40])
        own.fit(model, loader(data), loader())
        return whole(model), metrics_of(own)

    assert_equal(ranks2, run)


class OwnParameter(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_trained_parameters_of_the_module_itself_are_refused_in_manual(ranks2, tmp_path):
    with pytest.raises(
        RankError, match="OwnParameter has a trained parameter 'scale' outside its submodules"
    ):
        ranks2(lambda: trainer(tmp_path).fit(OwnParameter(), loader()))


# -- callbacks ----------------------------------------------------------------------------------


class Scheduled(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


CALLBACKS: dict[str, tuple[type[Net], Callable[[], Any]]] = {
    "average": (Net, lambda: WeightAveraging(decay=0.7)),
    "swa": (Net, lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)),
    "norms": (Net, lambda: GradientNormMonitor(per="module")),
    "accumulation": (Net, lambda: GradientAccumulationScheduler({0: 1, 1: 3})),
    "finetuning": (
        Scheduled,
        lambda: BackboneFinetuning(backbone="blocks", unfreeze_backbone_at_epoch=1),
    ),
    "summary": (Net, lambda: ModelSummary()),
}


@pytest.mark.parametrize("callback", CALLBACKS)
def test_callbacks_do_on_shards_what_they_do_on_one_process(ranks2, callback, tmp_path):
    module, make = CALLBACKS[callback]
    options = {"max_epochs": 3, "checkpointing": True}

    def run(name: str) -> Any:
        own, model = trainer(tmp_path / name, callbacks=[make()], **options), module()
        own.fit(model, loader(), loader())
        return whole(model), metrics_of(own)

    def resumed(name: str) -> Any:
        folder = tmp_path / f"cut {name}"
        for epochs in (2, 3):
            own = trainer(folder, callbacks=[make()], **{**options, "max_epochs": epochs})
            model = module()
            own.fit(model, loader(), loader(), ckpt_path="auto")
        return whole(model), metrics_of(own)

    expected = assert_equal(ranks2, run)
    if callback in ("average", "finetuning"):  # SWA's plan depends on max_epochs
        for found in ranks2(lambda: resumed("shards")):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("saved", ["shards", "one"])
def test_averages_go_on_from_a_checkpoint_between_two_of_them(ranks2, saved, tmp_path):
    def run(ckpt_path: Path | None = None) -> Any:
        keep = ModelCheckpoint(save_top_k=-1, every="1 epoch")
        averages = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        own, model = trainer(tmp_path, callbacks=[keep, averages], max_epochs=4), Net()
        own.fit(model, loader(), loader(), ckpt_path=ckpt_path)
        return whole(model)

    expected = run() if saved == "one" else ranks2(run)[0]
    *_, middle, _, _ = sorted((tmp_path / "checkpoints").iterdir())  # of the second of four epochs
    for found in ranks2(lambda: run(ckpt_path=middle)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("flops", [False, True])
def test_the_summary_has_the_sizes_of_the_whole_and_of_the_part(ranks2, flops, tmp_path):
    def summaries() -> tuple[str, str, int]:
        own, model = trainer(tmp_path / "two", callbacks=[ModelSummary(flops=flops)]), Net()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            own.fit(model, loader())
        held = sum(p.to_local().nbytes for p in model.parameters())
        return printed.getvalue(), summarize(model), held

    (printed, first, held), (silent, second, other) = ranks2(summaries)
    assert silent == ""
    assert first.splitlines()[-1] in printed.splitlines()
    whole = summarize(Net()).splitlines()
    assert [each.splitlines()[:-1] for each in (first, second)] == [whole, whole]
    number = int(whole[-1].partition(" parameters")[0].replace(",", ""))
    parts = [each.splitlines()[-1].split(" of them on this process, ") for each in (first, second)]
    assert sum(int(part.replace(",", "")) for part, _ in parts) == number
    assert [size for _, size in parts] == [f"{each / 1e6:,.3f} MB" for each in (held, other)]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))


def test_batch_statistics_of_averaged_weights_are_those_of_ddp(ranks2, tmp_path):
    def run(name: str, **options: Any) -> Any:
        averages = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
        own = trainer(tmp_path / name, callbacks=[averages], max_epochs=3, **options)
        model = Normed()
        own.fit(model, loader())
        return whole(model)

    expected = ranks2(lambda: run("ddp", fsdp_plugin=None))
    found = ranks2(lambda: run("shards"))
    for part in ("first.1.running_mean", "first.1.running_var", "blocks.1.first.weight"):
        torch.testing.assert_close(found[1][part], expected[1][part], rtol=0, atol=1e-5)


def terminated_at(step: int) -> type[Net]:
    class Terminated(Net):
        """One rank receives SIGTERM."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if rank() == 1 and self.trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    return Terminated


def test_sigterm_on_one_rank_saves_averages_and_the_run_resumes(ranks2, tmp_path):
    """It comes in the third of four epochs, of which the last three are averaged."""

    def run(name: str, module: type[Net] = Net, **resumes: Any) -> Any:
        swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
        own = trainer(tmp_path / name, callbacks=[swa], checkpointing=True, max_epochs=4)
        model = module()
        own.fit(model, loader(), loader(), **resumes)
        return whole(model), metrics_of(own)

    def preempted() -> Any:
        with pytest.raises(Preempted):
            run("shards", terminated_at(14))
        return run("shards", ckpt_path="auto")

    expected = run("one")
    for found in ranks2(preempted):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class OutOfTime(Net):
    """The clock of rank 0 reaches `max_time` in the fourth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3 and rank() == 0:
            self.trainer._run.started -= 10_000.0


def test_the_end_of_max_time_saves_shards_and_the_run_resumes(ranks2, tmp_path):
    expected = fit(tmp_path / "one")

    def timed() -> Any:
        options = {"checkpointing": True, "max_epochs": None, "max_time": "2 hours"}
        own = trainer(tmp_path / "shards", **options)
        with suppress(Preempted):
            own.fit(OutOfTime(), loader(), loader())
        steps = own.global_step
        own, model = trainer(tmp_path / "shards", checkpointing=True), Net()
        own.fit(model, loader(), loader(), ckpt_path="auto")
        return steps, (whole(model), metrics_of(own))

    (steps, found), other = ranks2(timed)
    assert 4 <= steps == other[0] <= 6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it itself
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {}),
        ("aot_eager", {"activation_checkpointing": True}),
        pytest.param("inductor", {}, marks=[pytest.mark.long, NEEDS_A_COMPILER]),
    ],
)
def test_units_are_compiled(ranks2, backend, options, tmp_path):
    expected = fit(tmp_path / "one")

    def compiled() -> Any:
        tqdm.monitor_interval = 0  # torch makes bars that it does not show
        own = trainer(tmp_path / "two", fsdp_plugin=plugin(**options), dynamo_backend=backend)
        model, forward = Net(), []
        model.on_train_start = lambda: forward.append(model.blocks[0].forward)
        own.fit(model, loader(), loader())
        made = hasattr(forward[0], "_torchdynamo_orig_callable")
        return made, (whole(model), metrics_of(own))

    for made, found in ranks2(compiled, timeout=250):
        assert made
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_learning_rate_finder_tries_the_same_on_shards(ranks2, tmp_path):
    def find(name: str) -> Any:
        own, model = trainer(tmp_path / name), Net()
        found = Tuner(own).lr_find(model, loader(), num_training=8)
        own.fit(model, loader(), loader())
        return found.losses, whole(model)

    assert_equal(ranks2, find)
