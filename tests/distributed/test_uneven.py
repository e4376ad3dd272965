"""Windows in which a process has no loss, and gradients that are sparse."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from tests.helpers.ranks import RankError
from trainer import GradScalerKwargs, Trainer, TrainModule
from trainer.errors import DistributedOperationException
from trainer.loops import buffers


class Net(TrainModule):
    """Notes how large the gradients are of which a hook is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).float().square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(sum(p.grad.abs().sum().item() for p in self.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fitted(batches: int, precision: str) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(4 * batches, 6, generator=generator)), 4)
    module = Net()
    trainer = Trainer(
        max_epochs=2,
        cpu=True,
        barebones=True,
        mixed_precision=precision,
        max_grad_norm=0.5,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],  # under which nothing overflows
    )
    trainer.fit(module, data)
    return module.seen, module.net.weight.flatten().tolist()


@pytest.mark.parametrize("batches", [5, 1])
def test_a_rank_without_a_batch_unscales_and_clips_as_the_others(ranks2, batches):
    """Of 5 batches the second process has none in the third window; of 1 none in the first."""
    (seen, weights), (seen_there, weights_there) = ranks2(fitted, batches, "fp16")
    assert seen == seen_there
    assert weights == weights_there
    ((exact, exact_weights), _) = ranks2(fitted, batches, "no")
    assert seen == pytest.approx(exact, rel=0.02)
    assert weights == pytest.approx(exact_weights, abs=1e-3)


def gathering(where: str, *, manual: bool = False, items: int | None = None) -> type[Net]:
    """A module that gathers in one of its hooks, and notes what it is told."""

    class Gathering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].sum()

        def on_train_step_end(self) -> None:
            self.all_gather(self.net.weight)  # where all come

    def count_items(self: Any, batch: Any) -> Any:
        return len(batch[0]) if batch[0].max() < 2 else items

    if items is not None:
        Gathering.count_items = count_items
    own = getattr(Gathering, where)

    def gather(self: Gathering, *arguments: Any) -> Any:
        try:
            self.all_gather(torch.ones(()))
        except DistributedOperationException as error:
            self.messages.append(str(error))
        return own(self, *arguments)

    setattr(Gathering, where, gather)
    return Gathering


def three_batches() -> DataLoader[Any]:
    """Of which the second process has none in the second round."""
    return DataLoader(TensorDataset(torch.ones(12, 6) * torch.arange(12)[:, None].ge(8).add(1)), 4)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("on_before_backward", {}),
        ("on_train_batch_end", {}),
        ("on_after_batch_transfer", {}),
        ("count_items", {}),
        ("on_train_batch_start", {"manual": True}),
        ("on_after_backward", {"manual": True}),
        ("on_before_optimizer_step", {"manual": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_collective_in_a_hook_of_a_batch_that_one_rank_lacks_raises(
    ranks2, where, options, checked
):
    def body() -> list[str]:
        module = gathering(where, **options)()
        with pytest.MonkeyPatch.context() as patch:
            # As on accelerators, where the calls of collectives are not compared.
            patch.setattr("trainer.distributed.collectives.is_checked", lambda: checked)
            Trainer(max_epochs=1, cpu=True, barebones=True).fit(module, three_batches())
        return module.messages

    (messages,), other = ranks2(body)
    assert other == []
    assert "but rank 1 has no batch at this point" in messages
    assert "Set limit_train_batches to a multiple of 2" in messages
    assert messages.startswith("gather is called in a hook of a batch")


@pytest.mark.parametrize("where", ["on_before_backward", "on_after_backward"])
def test_a_collective_in_a_backward_hook_raises_if_a_batch_has_no_items(ranks2, where):
    """Only the process itself knows that its batch has none."""

    def body() -> list[str]:
        module = gathering(where, items=0)()
        Trainer(max_epochs=1, cpu=True, barebones=True, limit_train_batches=2).fit(module, ones())
        return module.messages

    def ones() -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.ones(8, 6) * torch.tensor([1] * 4 + [2] * 4)[:, None]), 4
        )

    (messages,), other = ranks2(body)
    assert other == []
    assert "which does not run on a process whose batch has no items (see count_items)" in messages


@pytest.mark.parametrize(
    "options", [{}, {"fast_dev_run": True}, {"fast_dev_run": 3}, {"num_sanity_val_steps": 3}]
)
def test_sanity_checks_and_fast_dev_run_have_a_batch_for_each_rank(ranks2, options):

    def body() -> list[str]:
        module = gathering("validation_step")()
        options.setdefault("num_sanity_val_steps", 1)
        trainer = Trainer(
            max_epochs=1, cpu=True, progress_bar=False, checkpointing=False, **options
        )
        data = DataLoader(TensorDataset(torch.ones(48, 6)), 4)
        trainer.fit(module, data, data)
        return [*module.messages, trainer.batches_seen]

    batches = int(options.get("fast_dev_run", 6)) * 2
    assert ranks2(body) == [[batches], [batches]]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"overfit_batches": 3}, "Set overfit_batches to a multiple of 2"),
        ({"fast_dev_run": 2}, "Set fast_dev_run to at most the number of batches of each process"),
        (
            {"fast_dev_run": 2, "overfit_batches": 3},
            "Set fast_dev_run to at most the number of batches",
        ),
    ],
)
def test_the_argument_that_limits_the_batches_is_named(ranks2, given, fix):
    def body() -> list[str]:
        module = gathering("on_train_batch_end")()
        Trainer(max_epochs=1, cpu=True, progress_bar=False, checkpointing=False, **given).fit(
            module, three_batches()
        )
        return module.messages

    (messages,), _ = ranks2(body)
    assert fix in messages


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        ("validate", "on_validation_batch_end"),
        ("predict", "on_predict_batch_start"),
    ],
)
def test_a_collective_in_a_hook_of_an_evaluation_batch_that_one_rank_lacks_raises(
    ranks2, stage, where
):
    def body() -> list[str]:
        module = gathering(where)()
        getattr(Trainer(cpu=True, barebones=True), stage)(module, three_batches())
        return module.messages

    (messages,), other = ranks2(body)
    phase = "validation" if stage == "validate" else stage
    assert other == []
    assert messages.startswith("gather is called in a hook of a batch, but rank 1 has")
    assert (
        f"Set limit_{'val' if stage == 'validate' else stage}_batches to a multiple of 2"
        in messages
    )
    assert f"such as {phase}_step or on_{phase}_epoch_end." in messages


class Taught(Net):
    """A mean teacher that moves where only processes with a batch come."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.other = nn.Parameter(torch.zeros(3), requires_grad=False)  # alike on all

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        wanted = self.teacher(batch[0]) + self.other + 1.0
        return (self.net(batch[0]) - wanted).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Frozen parameters have no gradients to note."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for own, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(trained, 0.1)


class TaughtByHand(Taught):
    """Nobody froze the teacher, but no optimizer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.teacher.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            wanted = self.teacher(batch[0]) + 1.0
        self.manual_backward((self.net(batch[0]) - wanted).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)


class TaughtInData(Taught):
    """Through ``data``, which torch's count of changes in place does not see."""

    def on_train_batch_end(self, *_: Any) -> None:
        for own, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.data.mul_(0.9).add_(trained.data, alpha=0.1)


class TaughtAnew(Taught):
    def on_train_batch_end(self, *_: Any) -> None:
        for own, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.data = own.data * 0.9 + trained.data * 0.1


@pytest.mark.parametrize("kind", [Taught, TaughtByHand, TaughtInData, TaughtAnew])
def test_untrained_parameters_that_differ_are_those_of_rank_0_from_each_checkpoint_on(ranks2, kind):
    """A run thus goes on as after a resume. Of 5 batches rank 1 has 2."""

    def body(folder: str, *epochs: int) -> tuple[list[float], list[str]]:
        messages: list[str] = []
        logger = logging.getLogger("trainer.loops.buffers")
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger.addHandler(handler)
        try:
            for count in epochs:
                data = DataLoader(TensorDataset(torch.arange(120.0).view(20, 6) / 100), 4)
                module = kind()
                options = {"progress_bar": False, "cpu": True, "seed": 0}
                trainer = Trainer(max_epochs=count, project_dir=folder, **options)
                trainer.fit(module, data, ckpt_path="auto")
        finally:
            logger.removeHandler(handler)
        values = torch.cat([each.detach().flatten() for each in module.parameters()])
        return values.tolist(), messages

    (weights, messages), (weights_there, none) = ranks2(body, "whole", 3)
    assert weights == weights_there
    assert none == []
    (text,) = messages
    assert "differ between the processes (teacher.weight, teacher.bias): rank 0's" in text
    assert [each for each, _ in ranks2(body, "parts", 1, 3)] == [weights, weights]


class Backbone(Net):
    """A frozen part of 1,000 values, of which a hook changes one now and then, on rank 0 alone."""

    changes: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(1000.0), requires_grad=False)
        self.lists: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Frozen parameters have no gradients to note."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.lists.append(self.base[[3, 5]].tolist())

    def on_train_step_end(self) -> None:
        if self.trainer.global_step in self.changes and self.trainer.is_global_zero:
            with torch.no_grad():
                self.base[[3, 5]] = self.base[[5, 3]]


@pytest.mark.parametrize(
    ("changes", "times"),
    [((), [1, 1]), ((3,), [1 + 1 + 1, 1 + 1])],  # a rank whose values are replaced hashes anew
)
def test_frozen_parameters_are_hashed_once_unless_they_change(ranks2, changes, times):
    def body() -> tuple[int, list[list[float]]]:
        with pytest.MonkeyPatch.context() as patch:
            hashed: list[int] = []
            real = buffers._mixed_sum
            patch.setattr(buffers, "_mixed_sum", lambda x: (hashed.append(len(x)), real(x))[1])
            patch.setattr(buffers, "_SMALL", 0)  # parameters as small are hashed each time
            patch.setattr(Backbone, "changes", changes)
            module = Backbone()
            options = {"progress_bar": False, "cpu": True, "val_every": 1, "max_steps": 8}
            Trainer(project_dir="run", **options).fit(module, three_batches(), three_batches())
            return hashed.count(1000), module.lists

    found = ranks2(body)
    values = [[3.0, 5.0]] * 3 + [[5.0, 3.0] if changes else [3.0, 5.0]] * 6
    assert [lists for _, lists in found] == [values] * 2
    assert [count for count, _ in found] == times


def test_a_dummy_batch_of_manual_optimisation_updates_no_metric(ranks2):
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.samples = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.samples.update(len(batch[0]))
            self.log("samples", self.samples)
            optimizer = self.optimizers()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def run() -> float:
        options = {"checkpointing": False, "progress_bar": False}
        trainer = Trainer(max_epochs=1, cpu=True, project_dir="run", **options)
        trainer.fit(Counting(), DataLoader(TensorDataset(torch.ones(6, 6)), 2))
        return trainer.callback_metrics["samples"]

    assert ranks2(run) == [6.0, 6.0]


class TwoBackwards(TrainModule):
    """Weights of which two backward passes go through one graph, as in a GAN."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.how = nn.Linear(2, 1, bias=False), how
        nn.init.ones_(self.net.weight)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(batch[0]).mean()
        for factor in (1, 2):
            if self.how == "manual_backward":
                self.manual_backward(factor * loss)
            elif self.how == "accelerator":
                self.trainer.accelerator.backward(factor * loss, retain_graph=True)
            else:
                (factor * loss).backward(retain_graph=True)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("how", ["manual_backward", "accelerator", "loss"])
def test_gradients_of_a_dummy_batch_of_manual_optimisation_are_zero(ranks2, how):
    def body() -> list[float]:
        module = TwoBackwards(how)
        data = TensorDataset(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        Trainer(max_epochs=1, cpu=True, barebones=True).fit(module, DataLoader(data))
        return module.net.weight.flatten().tolist()

    # Three times the mean of the first two samples, then half of the third one, by 0.1.
    expected = pytest.approx([1 - 0.3 * (2 + 2.5), 1 - 0.3 * (3 + 3)])
    assert ranks2(body) == [expected, expected]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_step_end", "on_train_epoch_end"])
def test_updates_in_hooks_that_all_ranks_call_may_gather(ranks2, hook):
    """In a hook, in manual optimisation; the second process has no batch in the last round."""

    class Outside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            """Updates are made in a hook."""

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(len(self.all_gather(torch.ones(()))))

    def update(self: Outside) -> None:
        self.manual_backward(self.net(torch.ones(1, 6)).sum())
        self.optimizers().step()
        self.optimizers().zero_grad()

    setattr(Outside, hook, update)

    def body() -> list[float]:
        module = Outside()
        Trainer(max_epochs=1, cpu=True, barebones=True).fit(module, three_batches())
        return module.seen

    times = 2 if hook == "on_train_step_end" else 1
    assert ranks2(body) == [[2] * times] * 2


def test_batches_of_unequal_sizes_are_gathered_by_what_the_error_names(ranks2):
    class Gathers(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # of 2 samples and of 1
                with pytest.raises(DistributedOperationException) as error:
                    self.all_gather(batch[0])
                named = "self.trainer.accelerator.gather_for_metrics"
                assert f"In a module, write {named}(...)." in str(error.value)
            self.seen += self.trainer.accelerator.gather_for_metrics(batch[0][:, 0]).tolist()

    def body() -> list[float]:
        module = Gathers()
        rows = torch.arange(7.0)[:, None].repeat(1, 6)
        trainer = Trainer(cpu=True, progress_bar=False)
        trainer.validate(module, DataLoader(TensorDataset(rows), 2))
        return sorted(module.seen)

    assert ranks2(body) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 2


def test_a_sampler_that_splits_the_data_by_rank_is_an_error(ranks2):
    """Half of the data would be missing without a word."""

    class OwnPart(Sampler):
        def __iter__(self) -> Any:
            return iter(range(dist.get_rank(), 12, 2))

        def __len__(self) -> int:
            return 6

    def run() -> None:
        data = DataLoader(TensorDataset(torch.randn(12, 2)), 2, sampler=OwnPart())
        Trainer(max_epochs=1, cpu=True, barebones=True).fit(Net(), data)

    with pytest.raises(RankError, match=r"\(OwnPart\) gives rank 1 a different order than rank 0"):
        ranks2(run)
