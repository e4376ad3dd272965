"""Every promise on every engine, against a plain loop on whole batches, or an uninterrupted run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from tests.helpers import isolation
from tests.helpers.promises import (
    BATCH,
    ENGINES,
    GPT_ON_ONE,
    ONE,
    TOKENS,
    TOLERANCE,
    EngineCase,
    Net,
    Outcome,
    data,
    fit,
    loader,
    losses,
    plain,
    plain_module,
    trainer_and_module,
    whole,
)
from tests.helpers.ranks import RankError
from trainer import Accelerator, Preempted
from trainer.checkpoint.weights import load_weights
from trainer.cli import main


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_this_file(ranks):
    """megatron-core never frees its groups, whose threads would slow all later tests."""
    yield
    for size in (1, 2):
        ranks(size).kill()


@pytest.fixture(params=ENGINES)
def case(request):
    return ENGINES[request.param]


# What is no step of training is the same code with other options of DDP, and in DeepSpeed's stage 1
# that of its stage 2.
by_kind = pytest.mark.parametrize(
    "case",
    [name for name in ENGINES if not name.startswith("ddp,") and name != "zero1"],
    indirect=True,
)


@pytest.fixture
def run(ranks, case):
    """Runs a function on the processes of the engine; returns one value for each."""
    return lambda function: on_processes(ranks, case, function)


@pytest.fixture
def reference(ranks, case):
    """Runs a function on one process, which has no engine but may have megatron-core."""
    one = GPT_ON_ONE if case.is_gpt else ONE
    return lambda function: on_processes(ranks, one, function)[0]


@pytest.fixture
def refused(case):
    """Returns a context in which the engine raises its error, if it cannot keep a promise."""

    def context(promise: str) -> Any:
        known = promise in case.refuses
        return pytest.raises(RankError, match=case.refuses[promise]) if known else nullcontext()

    return context


def on_processes(ranks: Any, case: EngineCase, function: Callable[[], Any]) -> list[Any]:
    def body() -> Any:
        with case.around():
            return function()

    if case.processes == 1 and not case.is_gpt:
        isolation.reset_trainer_state()
        return [body()]
    return ranks(case.processes)(body)  # type: ignore[no-any-return]


def assert_equal(found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE) -> None:
    """Assert that the ranks agree to the last bit, and rank 0 with a plain loop."""
    first = found[0]
    for other in found[1:]:
        bits = {"rtol": 0, "atol": 0}
        both = other.copies.keys() & first.copies.keys()
        for name in both:
            torch.testing.assert_close(other.copies[name], first.copies[name], **bits)
        for name in ("gradients", "rates", "metrics", "counters"):
            torch.testing.assert_close(getattr(other, name), getattr(first, name), **bits)
    trained = {name: first.weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=tolerance)
    assert first.metrics == pytest.approx(expected.metrics, abs=tolerance)
    counters = {name: first.counters[name] for name in expected.counters}
    assert counters == expected.counters
    assert first.rates == pytest.approx(expected.rates, rel=1e-12)
    if first.gradients:
        torch.testing.assert_close(first.gradients, expected.gradients, rtol=0, atol=tolerance)


# -- the gradient is that of the whole batch (P4), an update is one tick (P6) ----------------------


class NoItemsOnRank1(Net):
    """The first three batches of rank 1 have no items."""

    def kept(self, batch: Any) -> Tensor:
        without = (batch[1] % 8 >= 4) & (batch[1] < 24)
        return super().kept(batch) & ~without[:, None]


class InfiniteDummy(Net):
    """The loss of a dummy batch, which the last rank has at the end of each epoch, is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        several = self.trainer.accelerator.engine.parallel.dp_size > 1
        last = several and dist.get_rank() == dist.get_world_size() - 1
        return loss * torch.inf if last and batch_idx == 5 else loss


class Grouped(Net):
    """Two groups and a schedule of steps; one parameter is never trained."""

    def made(self) -> None:
        next(self.model.parameters()).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        others = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.3, "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


PLANS: dict[str, tuple[type[Net], int, dict[str, Any]]] = {
    "accumulated, clipped by norm": (
        Net,
        44,
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    ),
    "short last window, clipped by value": (
        Net,
        44,
        {"gradient_accumulation_steps": 4, "max_grad_value": 0.02},
    ),
    "no items on one rank": (NoItemsOnRank1, 44, {"gradient_accumulation_steps": 2}),
    "no batch on one rank": (Net, 4, {}),
    "a short batch on one rank": (Net, 6, {}),
    "uneven data, an infinite loss of the dummy batch": (InfiniteDummy, 44, {}),
    "groups and a schedule": (Grouped, 44, {"max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_process_on_whole_batches(run, reference, case, plan, tmp_path):
    kind, samples, options = PLANS[plan]
    expected = reference(lambda: plain(case, kind, samples, **options))
    found = run(lambda: fit(case, tmp_path, kind, samples, **options))
    assert_equal(found, expected)


def test_bfloat16_training_updates_float32_weights(run, reference, case, tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_grad_value": 0.02}
    expected = reference(lambda: plain(case, **options))
    found = run(lambda: fit(case, tmp_path, mixed_precision="bf16", **options))
    assert_equal(found, expected, 3e-2)
    assert {each.dtype for each in found[0].weights.values()} == {torch.float32}


class Unfrozen(Net):
    """The first parameter is not trained in the first epoch."""

    def epoch_starts(self, epoch: int) -> None:
        next(self.model.parameters()).requires_grad_(epoch > 0)

    def on_train_epoch_start(self) -> None:
        self.epoch_starts(self.trainer.current_epoch)


def test_parameters_unfrozen_later_are_trained(run, reference, case, refused, tmp_path):
    expected = reference(lambda: plain(case, Unfrozen))
    with refused("unfrozen"):
        assert_equal(run(lambda: fit(case, tmp_path, Unfrozen)), expected)


class TwoOptimizers(Net):
    """Each step makes an update of the last parameters, and then one of all others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        shares = self.trainer.accelerator.engine.parallel.dp_size
        for optimizer in self.optimizers():
            # The mean over the ranks is that of the whole batch, also where a rank has none.
            loss = losses(self.model, batch[0], self.is_gpt).sum() * shares / (8 * BATCH)
            for each in self.optimizers():
                each.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, max_grad_norm=0.5)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.parameters())
        return [torch.optim.SGD(part, lr=0.3) for part in (parameters[-2:], parameters[:-2])]


def by_hand(case: EngineCase) -> dict[str, Tensor]:
    """What `TwoOptimizers` does, in a plain loop on whole batches."""
    module = plain_module(case, TwoOptimizers)
    optimizers = module.configure_optimizers()
    for first in [*range(0, 44, BATCH)] * 2:
        for optimizer in optimizers:
            module.zero_grad()
            tokens = TOKENS[first : min(first + BATCH, 44)]
            (losses(module.model, tokens, case.is_gpt).sum() / (8 * BATCH)).backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_two_optimizers_step_in_manual_optimisation(run, reference, case, refused, tmp_path):
    expected = reference(lambda: by_hand(case))
    with refused("manual"):
        found = run(lambda: fit(case, tmp_path, TwoOptimizers, reads_gradients=False))
        weights = {name: found[0].weights[name] for name in expected}
        torch.testing.assert_close(weights, expected, rtol=0, atol=TOLERANCE)
        assert {each.counters["global_step"] for each in found} == {12}
        for other in found[1:]:
            torch.testing.assert_close(other.copies, found[0].copies, rtol=0, atol=0)


# -- no hangs (P7) ---------------------------------------------------------------------------------


class Collective(Net):
    """Its steps wait for all processes, and feed a BatchNorm; nothing is trained."""

    def made(self) -> None:
        self.norm = nn.BatchNorm1d(8, affine=False)

    def mean(self, batch: Any) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(()))
        self.norm(batch[0][:, 1:].float())
        return super().mean(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Counting(Collective):
    """And count the samples of each epoch in metric objects."""

    def made(self) -> None:
        super().made()
        self.trained, self.validated = SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.update(len(batch[0]))
        self.log("train/samples", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.update(len(batch[0]))
        self.log("val/samples", self.validated)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "samples"), [(Counting, 44), (Collective, 4)])
def test_a_rank_without_a_batch_joins_the_collectives_of_the_step(
    run, case, refused, kind, samples, tmp_path
):
    """Its dummy batch counts in no metric and no statistics; those of rank 0 are everybody's."""

    def fitted() -> tuple[list[Tensor], list[float]]:
        trainer, module = trainer_and_module(case, tmp_path, kind)
        trainer.fit(module, loader(case, samples), loader(case, samples))
        metrics = trainer.callback_metrics.items()
        return list(module.norm.buffers()), [n for name, n in metrics if name.endswith("samples")]

    norm = nn.BatchNorm1d(8, affine=False)
    for first in [*range(0, samples, BATCH)] * 2:
        norm(TOKENS[first : min(first + BATCH // case.shares, samples), 1:].float())
    with refused("collectives"):
        for buffers, counted in run(fitted):
            torch.testing.assert_close(buffers, list(norm.buffers()), rtol=0, atol=1e-5)
            assert counted == ([samples, samples] if kind is Counting else [])


# -- bad numbers (P10) -----------------------------------------------------------------------------


class NanLoss(Net):
    """The loss of one sample in the second update is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.spoilt(loss) if 13 in batch[1] else loss

    def spoilt(self, loss: Tensor) -> Tensor:
        return loss * torch.nan


class NanGradient(NanLoss):
    """The loss is finite, its gradient is not."""

    def spoilt(self, loss: Tensor) -> Tensor:
        loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss


@pytest.mark.parametrize("kind", [NanLoss, NanGradient])
def test_a_nan_on_one_rank_skips_the_update_on_all_ranks(run, reference, case, kind, tmp_path):
    expected = reference(lambda: plain(case, Net, max_epochs=1, without=[2]))
    found = run(lambda: fit(case, tmp_path, kind, max_epochs=1, non_finite="skip"))
    for outcome in found:
        assert outcome.metrics.pop("skipped_updates") == 1
        del outcome.gradients[:], outcome.metrics["train/loss"]
    del expected.metrics["train/loss"]
    assert_equal(found, expected)


@by_kind
@pytest.mark.parametrize("kind", [NanLoss, NanGradient])
def test_a_nan_on_one_rank_stops_all_ranks(run, case, kind, tmp_path):
    def stopped() -> tuple[int, str]:
        trainer, module = trainer_and_module(case, tmp_path, kind)
        with pytest.raises(FloatingPointError) as caught:
            trainer.fit(module, loader(case))
        return trainer.global_step, str(caught.value)

    for steps, message in run(stopped):
        assert steps == 1
        assert "update 2" in message or "step 2" in message


# -- evaluation is exact (P5) ----------------------------------------------------------------------


@by_kind
@pytest.mark.parametrize("fits", [0, 2])
def test_evaluation_counts_each_sample_once(run, reference, case, fits, tmp_path):
    sizes = 3, 20, 44

    def evaluate() -> Any:
        trainer, module = trainer_and_module(case, tmp_path, max_epochs=1)
        several = [loader(case, samples) for samples in sizes]
        for _ in range(fits):
            trainer.fit(module, loader(case), several)
        metrics = [*trainer.validate(module, several), *trainer.test(module, several[0])]
        predicted = trainer.predict(module, several[1])
        return metrics, None if predicted is None else torch.cat(predicted)

    def expect() -> Any:
        module = plain_module(case)
        for _ in range(fits):
            optimizer = module.configure_optimizers()
            for first in range(0, 44, BATCH):
                optimizer.zero_grad()
                module.mean([TOKENS[first : min(first + BATCH, 44)]]).backward()
                optimizer.step()
        with torch.no_grad():
            means = [float(module.mean([TOKENS[:samples]])) for samples in sizes]
            return means, losses(module.model, TOKENS[:20], case.is_gpt)

    means, expected = reference(expect)
    for rank, (metrics, predicted) in enumerate(run(evaluate)):
        validated = {name: value for each in metrics[:-1] for name, value in each.items()}
        names = (f"val/loss/dataloader_idx_{index}" for index in range(3))
        assert validated == pytest.approx(dict(zip(names, means, strict=True)), abs=1e-5)
        assert metrics[-1] == pytest.approx({"test/loss": means[0]}, abs=1e-5)
        if rank == 0:
            # Of the GPT with any engine or none: one process that sums the gradients of each batch
            # in two halves differs from whole batches by 6e-5 too. The layers divide by small
            # deviations, and a loss moves by 30 times the difference of the weights (2e-6).
            tolerance = 1e-4 if case.is_gpt else 1e-5
            torch.testing.assert_close(predicted, expected, rtol=0, atol=tolerance)
        else:
            assert predicted is None


# -- a run goes on (P1, P2, P3, P11, P12) ----------------------------------------------------------


class Adam(Grouped):
    """With Adam and a schedule, all of whose state a run that goes on needs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Dropout(Adam):
    dropout = 0.1


class Terminated(Dropout):
    """The last process receives SIGTERM in the second update."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if last and self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_process_saves_and_the_run_resumes_bit_for_bit(run, case, tmp_path):
    options = {"shuffle": True, "checkpointing": True, "gradient_accumulation_steps": 2}

    def runs() -> tuple[Outcome, Outcome, int]:
        once = fit(case, tmp_path / "whole", Dropout, **options)
        with pytest.raises(Preempted) as ended:
            fit(case, tmp_path / "cut", Terminated, **options)
        again = fit(case, tmp_path / "cut", Dropout, ckpt_path="auto", **options)
        return once, again, ended.value.code

    for once, again, code in run(runs):
        assert code == 143
        made = len(again.rates)
        assert 3 <= made < len(once.rates) == 6
        for name in ("weights", "copies", "metrics", "counters"):
            torch.testing.assert_close(getattr(again, name), getattr(once, name), rtol=0, atol=0)
        torch.testing.assert_close(again.gradients, once.gradients[-made:], rtol=0, atol=0)
        assert again.rates == once.rates[-made:]
        assert again.seen == once.seen[-len(again.seen) :]
    files = {file.suffix for file in (tmp_path / "cut").rglob("step-*/*")}
    assert files == {".json", ".safetensors"}


def samples_of(outcomes: list[Outcome]) -> list[tuple[int, int]]:
    return [(epoch, i) for each in outcomes for epoch, ids in each.seen for i in ids]


@by_kind
@pytest.mark.parametrize("saved", ["alone", "together"])
def test_a_run_resumes_on_another_number_of_processes(ranks, case, saved, tmp_path):
    """Each sample is seen once, and the weights on disk have the module's own names."""
    one = GPT_ON_ONE if case.is_gpt else ONE
    batch = BATCH // case.shares  # of each process, in windows as large over all of them

    def part(layout: EngineCase, name: str, **options: Any) -> list[Outcome]:
        options |= {"shuffle": True, "checkpointing": True, "batch": batch}
        options["gradient_accumulation_steps"] = case.shares // layout.shares
        return on_processes(ranks, layout, lambda: fit(layout, tmp_path / name, Adam, **options))

    first, second = (one, case) if saved == "alone" else (case, one)
    (expected,) = part(one, "whole")
    before = part(first, "cut", max_steps=3)
    step = next((tmp_path / "cut" / "checkpoints").glob("step-*"))
    assert main(["merge-weights", str(step), str(tmp_path / "merged.safetensors")]) == 0
    merged = tensors(load_weights(tmp_path / "merged.safetensors"))
    torch.testing.assert_close(merged, before[0].weights, rtol=0, atol=0)
    found = part(second, "cut", ckpt_path="auto")
    torch.testing.assert_close(found[0].weights, expected.weights, rtol=0, atol=1e-4)
    assert found[0].metrics == pytest.approx(expected.metrics, abs=1e-4)
    assert found[0].rates == expected.rates[3:]
    assert found[0].counters == expected.counters
    seen = [  # by the processes that have data of their own
        *samples_of(before[:: first.processes // first.shares]),
        *samples_of(found[:: second.processes // second.shares]),
    ]
    assert sorted(seen) == sorted(samples_of([expected]))


# -- a loop of one's own ---------------------------------------------------------------------------


def train(case: EngineCase, folder: Path, steps: range) -> Any:
    """Train with an Accelerator in windows of two batches, and save the state."""
    chosen = case.options()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, scheduler_tick="update", **chosen
    )
    module = Net(chosen.get("megatron_lm_plugin"), case.is_gpt)
    module.configure_model()
    model, batches = module.model, DataLoader(data(40), 4 // case.shares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    if steps.start:
        accelerator.load_state(folder)
    norms, parts = [], []
    reduced = case.has_gradients and accelerator.engine.gradients.average is None
    for step, (tokens, _) in enumerate(batches):
        if step not in steps:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(losses(model, tokens, case.is_gpt).mean())
            if accelerator.sync_gradients:
                if reduced:
                    gradients = map(accelerator.engine.gradients.of, model.parameters())
                    parts += [float(whole(gradient).norm()) for gradient in gradients]
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.save_model(model, folder / "model")
    return accelerator.get_state_dict(model), norms, schedule.get_last_lr(), parts


def train_plainly(case: EngineCase) -> Any:
    """The same on whole batches."""
    model = plain_module(case).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
    norms, parts = [], []
    for first in range(0, 40, 8):
        losses(model, TOKENS[first : first + 8], case.is_gpt).mean().backward()
        parts += [float(p.grad.norm()) for p in model.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, norms, schedule.get_last_lr(), parts


def test_a_custom_loop_trains_saves_and_resumes_like_one_process(
    run, reference, case, refused, tmp_path
):
    def loops() -> Any:
        found = []
        for name, steps in (("whole", range(10)), ("cut", range(4)), ("cut", range(4, 10))):
            isolation.reset_trainer_state()
            found.append(train(case, tmp_path / name, steps))
        return found[0], found[2]

    if "own loop" in case.refuses:
        with refused("own loop"):
            run(loops)
        return
    weights, norms, rate, parts = reference(lambda: train_plainly(case))
    (once, again), *others = run(loops)
    torch.testing.assert_close({n: once[0][n] for n in weights}, weights, rtol=0, atol=TOLERANCE)
    assert once[1] == pytest.approx(norms, abs=1e-6)
    assert once[2] == pytest.approx(rate)
    if once[3]:
        assert once[3] == pytest.approx(parts, abs=1e-6)
    written = load_weights(tmp_path / "whole" / "model")
    torch.testing.assert_close(tensors(written), tensors(once[0]))
    resumed = tensors(again[0])
    torch.testing.assert_close(resumed, tensors(once[0]), rtol=0, atol=case.differs)
    assert again[1] == pytest.approx(once[1][2:], rel=0, abs=case.differs)
    assert again[2] == once[2]
    for other in others:
        assert [each[1:] for each in other] == [once[1:], again[1:]]


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
