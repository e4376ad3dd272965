from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from callbacks import LearningRateMonitor
from tests.helpers.line import Line, loader
from tests.helpers.stand_in import TrainerStandIn
from tests.numerics.running import quiet_trainer
from trackers import read_metrics
from trainer.optim.configure import OptimizerEntry, names_of


def parameters(count=1):
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]


def logged(optimizers, *, names=(), schedulers=(), log_due=True, **arguments):
    bare = [getattr(each, "optimizer", each) for each in optimizers]
    entries = [
        OptimizerEntry(optimizer=optimizer, name=name)
        for optimizer, name in zip(bare, names or [None] * len(bare), strict=True)
    ]
    trainer = TrainerStandIn(
        optimizers=list(optimizers),
        optimizer_names=names_of(entries),
        schedulers=list(schedulers),
        log_due=log_due,
    )
    LearningRateMonitor(**arguments).on_train_step_end(trainer, trainer.module)
    return trainer.module.logged


def test_one_optimizer_is_named_by_its_class():
    optimizers = [torch.optim.AdamW(parameters(), lr=0.25)]
    assert logged(optimizers) == {"lr-AdamW": 0.25}
    assert logged(optimizers, log_due=False) == {}


def test_groups_and_optimizers_have_different_names():
    groups = [{"params": parameters(), "lr": lr} for lr in (0.1, 0.2)]
    named = [{"params": parameters(), "lr": lr, "name": f"part{lr}"} for lr in (0.5, 0.75)]
    optimizers = [
        torch.optim.SGD(parameters(), lr=0.3),
        torch.optim.SGD(groups),
        torch.optim.SGD(parameters(), lr=0.4),
        torch.optim.Adam(named),
    ]
    assert logged(optimizers) == {
        "lr-SGD": 0.3,
        "lr-SGD-1/pg1": 0.1,
        "lr-SGD-1/pg2": 0.2,
        "lr-SGD-2": 0.4,
        "lr-Adam/part0.5": 0.5,
        "lr-Adam/part0.75": 0.75,
    }


def test_an_optimizers_own_name_takes_the_place_of_its_class():
    groups = [{"params": parameters(), "lr": lr} for lr in (0.5, 0.25)]
    optimizers = [torch.optim.SGD(parameters(), lr=0.1), torch.optim.SGD(groups)]
    assert logged(optimizers, names=["body", "head"]) == {
        "lr-body": 0.1,
        "lr-head/pg1": 0.5,
        "lr-head/pg2": 0.25,
    }


def test_groups_that_share_a_name_are_refused():
    groups = [{"params": parameters(), "name": "head"} for _ in range(2)]
    with pytest.raises(ValueError, match="'head'"):
        logged([torch.optim.SGD(groups, lr=0.1)])


def test_the_name_of_a_schedule_wins_and_its_value_is_current():
    sgd, adam = torch.optim.SGD(parameters(), lr=1.0), torch.optim.Adam(parameters(), lr=0.5)
    halve = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    unnamed = torch.optim.lr_scheduler.ConstantLR(adam, factor=1.0)
    schedulers = [
        SimpleNamespace(scheduler=halve, name="warm"),
        SimpleNamespace(scheduler=unnamed, name=None),
    ]
    # a prepared optimizer holds the one that the schedule knows
    prepared = SimpleNamespace(optimizer=sgd, param_groups=sgd.param_groups)
    sgd.step()
    halve.step()
    assert logged([prepared, adam], schedulers=schedulers) == {"warm": 0.5, "lr-Adam": 0.5}


def test_momentum_and_weight_decay():
    optimizers = [
        torch.optim.SGD(parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters(), lr=0.2, betas=(0.8, 0.99), weight_decay=0.01),
        torch.optim.Adadelta(parameters(), lr=0.3),
    ]
    assert logged(optimizers, log_momentum=True, log_weight_decay=True) == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.9,
        "lr-SGD-weight_decay": 0.0,
        "lr-AdamW": 0.2,
        "lr-AdamW-momentum": 0.8,
        "lr-AdamW-weight_decay": 0.01,
        "lr-Adadelta": 0.3,
        "lr-Adadelta-momentum": 0.0,
        "lr-Adadelta-weight_decay": 0.0,
    }


def test_a_rate_in_a_tensor_is_logged_as_it_was():
    optimizer = torch.optim.AdamW(parameters(), lr=torch.tensor(0.5), foreach=False)
    value = logged([optimizer])["lr-AdamW"]
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert value == 0.5


class Counted(Line):
    """Counts what is in the batch."""

    def count_items(self, batch):
        return int(batch[0].sum())


def test_the_rate_does_not_depend_on_the_items_of_the_batch(tmp_path):
    trainer = quiet_trainer(
        project_dir=tmp_path, max_epochs=1, log_every=1, callbacks=[LearningRateMonitor()]
    )
    trainer.fit(Counted(), [[torch.full((3, 2), float(items))] for items in (1, 0, 1)])
    records = read_metrics(trainer.project_dir / "metrics.jsonl")
    assert [record["lr-SGD"] for record in records] == [0.1, 0.1, 0.1]


class Logging(Line):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def reductions_and_rates(monitored):
    """How often a fit reduces over the processes, and the rates that it recorded."""
    count, reduce = 0, dist.all_reduce

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return reduce(*args, **kwargs)

    callbacks = [LearningRateMonitor()] if monitored else []
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, project_dir=f"run-{monitored}")
    dist.all_reduce = counting
    try:
        trainer.fit(Logging(), loader(24))
    finally:
        dist.all_reduce = reduce
    records = read_metrics(trainer.project_dir / "metrics.jsonl")
    return count, [record.get("lr-SGD") for record in records]


def test_several_processes_record_the_rate_without_a_reduction(ranks3):
    bare = [count for count, _ in ranks3(reductions_and_rates, False)]
    counts, rates = zip(*ranks3(reductions_and_rates, True), strict=True)
    assert list(counts) == bare
    assert rates[0] == [0.1] * 4  # the mean over three would be 0.10000000000000002


def test_a_named_schedule_that_knows_no_optimizer():
    sgd = torch.optim.SGD(parameters(), lr=0.5)
    schedule = SimpleNamespace(scheduler=SimpleNamespace(step=print), name="own")
    assert logged([sgd], schedulers=[schedule]) == {"lr-SGD": 0.5}


def test_schedules_of_one_name_get_different_names():
    optimizers = [torch.optim.SGD(parameters(), lr=lr) for lr in (0.5, 0.25)]
    schedules = [torch.optim.lr_scheduler.ConstantLR(each, factor=1.0) for each in optimizers]
    schedulers = [SimpleNamespace(scheduler=each, name="warm") for each in schedules]
    assert logged(optimizers, schedulers=schedulers) == {"warm": 0.5, "warm-1": 0.25}
