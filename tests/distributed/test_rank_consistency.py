"""Processes that are told different things: refused on all before one waits in vain."""

from __future__ import annotations

import inspect
import os
import re
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, EarlyStopping, ModelCheckpoint, SpikeDetection, Timer
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    ProjectConfiguration,
    Trainer,
    TrainModule,
)


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].tolist()
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("score", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(messages, ckpt_path=(None, None)):
    """A fit of which each of two processes is told its own; the samples that it saw."""
    rank = PartialState(cpu=True).process_index
    arguments = {"max_epochs": 2, "project_dir": "run", "progress_bar": False, "cpu": True}
    trainer = Trainer(**(arguments | messages[rank]))
    module = Line()
    samples = torch.arange(16.0)[:, None].expand(16, 2)
    trainer.fit(module, DataLoader(samples, 2, shuffle=True), ckpt_path=ckpt_path[rank])
    return module.seen[: len(module.seen) // 2]  # of the first epoch


def failures(ranks2, function, *args):
    """Return the message of each rank, both of which must fail."""
    with pytest.raises(RankError) as error:
        ranks2(function, *args)
    assert sorted(error.value.failures) == [0, 1]
    return error.value.failures.values()


@pytest.mark.parametrize(
    ("own", "others", "message"),
    [
        ({"max_epochs": 2}, {"max_epochs": 3}, "max_epochs: rank 0: 2; rank 1: 3."),
        ({}, {"max_grad_norm": 1.0}, "max_grad_norm: rank 0: None; rank 1: 1.0."),
        ({"seed": 1}, {"seed": 2}, "seed: rank 0: 1; rank 1: 2."),  # of the order of the data
        (
            {"max_epochs": None, "max_time": "1 hour"},
            {"max_epochs": None, "max_time": "2 hours"},
            "max_time: rank 0: '1 hour'; rank 1: '2 hours'.",
        ),
    ],
)
def test_differing_fit_arguments_raise_on_all_ranks(ranks2, own, others, message):
    for text in failures(ranks2, fit, (own, others)):
        assert message in text


def test_differing_ckpt_paths_raise_on_all_ranks(ranks2):
    for text in failures(ranks2, fit, ({}, {}), ("auto", None)):
        assert "ckpt_path: rank 0: 'auto'; rank 1: None." in text


@pytest.mark.parametrize(
    ("own", "others", "shown"),
    [
        (
            lambda: ModelCheckpoint(every=2),
            lambda: Timer(None),
            "ModelCheckpoint(mode=min, every=2 steps",
        ),
        (
            lambda: ModelCheckpoint(every=2),
            lambda: ModelCheckpoint(every=2, on_preemption=False),
            "saves_on_preemption=False",
        ),
        (
            lambda: EarlyStopping("loss"),
            lambda: EarlyStopping("loss", mode="max"),
            "EarlyStopping(monitor=loss, mode=max",
        ),
        (
            lambda: SpikeDetection("loss", action="log"),
            lambda: SpikeDetection("loss", action="stop"),
            "rank 1: SpikeDetection(monitor=loss, mode=min, window=50",
        ),
        (
            lambda: Timer({"seconds": 3600.001}),
            lambda: Timer({"seconds": 3600.002}),
            "Timer(duration=3600.002, interval=step)",
        ),
    ],
    ids=["one alone", "on_preemption", "mode", "action", "time"],
)
def test_differing_deciding_callbacks_raise_on_all_ranks(ranks2, own, others, shown):
    def run():
        rank = PartialState(cpu=True).process_index
        callbacks = {"callbacks": [(own, others)[rank]()]}
        fit((callbacks, callbacks))

    for text in failures(ranks2, run):
        assert "The processes called fit with different values of callbacks that save" in text
        assert shown in text


def of_sgd(**changed):
    """A module with SGD and a schedule, which may differ in the given arguments."""

    class Differs(Line):
        def configure_optimizers(self):
            options = {"lr": 0.1, "interval": "step"} | changed
            weights = [self.layer.weight] if "weight" in changed else list(self.parameters())
            kind = torch.optim.Adam if "adam" in changed else torch.optim.SGD
            optimizer = kind(weights, lr=options["lr"])
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, changed.get("every", 2))
            return {"optimizer": optimizer, "scheduler": scheduler, "interval": options["interval"]}

    return Differs()


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"lr": 0.2}, "lr of SGD: rank 0: 0.1; rank 1: 0.2."),
        ({"adam": True}, "optimizers: rank 0: SGD; rank 1: Adam."),
        ({"weight": True}, "the number of parameters of SGD: rank 0: 2; rank 1: 1."),
        ({"interval": "epoch"}, "scheduler 0: rank 0: StepLR, every 1 step, monitor=None;"),
        ({"every": 3}, "step_size of scheduler 0 (StepLR): rank 0: 2; rank 1: 3."),
        ({"lr": numpy.float32(0.2)}, "lr of SGD: rank 0: 0.1; rank 1: 0.2."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_differing_optimizers_raise_on_all_ranks(ranks2, changed, named, automatic):
    def run():
        module = of_sgd(**({}, changed)[PartialState(cpu=True).process_index])
        module.automatic_optimization = automatic
        trainer = Trainer(max_epochs=1, project_dir="run", progress_bar=False, cpu=True)
        trainer.fit(module, DataLoader(torch.ones(8, 2), 2))

    for text in failures(ranks2, run):
        assert f"configure_optimizers returned different values of {named}" in text
        assert "broadcast_object_list([value])[0] is rank 0's" in text


def test_optimizer_options_without_effect_may_differ(ranks2):
    def run():
        module = Line()
        rank = PartialState(cpu=True).process_index

        def configure_optimizers():
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            optimizer.param_groups[0]["name"] = f"of rank {rank}"
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            scheduler.verbose = rank == 0
            return optimizer, scheduler

        module.configure_optimizers = configure_optimizers
        options = {"max_epochs": 1, "checkpointing": False, "progress_bar": False}
        trainer = Trainer(project_dir="run", cpu=True, **options)
        trainer.fit(module, DataLoader(torch.ones(8, 2), 2))
        return module.layer.weight.detach()

    first, second = ranks2(run)
    assert torch.equal(first, second)


def in_folders_of_their_own(tmp_path):
    """Enter another working directory on each of two processes, and return that of rank 0."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir(exist_ok=True)
    os.chdir(tmp_path / ("first", "second")[PartialState(cpu=True).process_index])
    return tmp_path / "first"


@pytest.mark.parametrize("word", ["auto", "last", "best"])
@pytest.mark.parametrize("on_each_node", [False, True], ids=["one disk", "disks of their own"])
def test_ranks_in_different_working_directories_resume_from_that_of_rank_0(
    ranks2, tmp_path, word, on_each_node
):
    def run():
        in_folders_of_their_own(tmp_path)
        config = ProjectConfiguration(save_on_each_node=on_each_node)
        for epochs in (1, 2):
            saver = ModelCheckpoint(monitor="loss_epoch")
            other = ModelCheckpoint(every=2, dirpath="often")
            messages = {"callbacks": [saver, other], "max_epochs": epochs, "project_config": config}
            fit((messages, messages), (word,) * 2 if epochs > 1 else (None, None))
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/**/step-*"))

    found = ranks2(run)[0]
    assert "first/run/checkpoints/step-00000008" in found
    assert not any(path.startswith("second") for path in found)


@pytest.mark.parametrize("on_each_node", [False, True], ids=["one disk", "disks of their own"])
@pytest.mark.parametrize("of", ["the user", "save_checkpoint", "the callback"])
def test_a_relative_ckpt_path_is_that_of_the_rank_that_saved(ranks2, tmp_path, of, on_each_node):
    def run():
        rank = PartialState(cpu=True).process_index
        in_folders_of_their_own(tmp_path)
        saver = ModelCheckpoint()
        config = ProjectConfiguration(save_on_each_node=on_each_node)
        arguments = {"project_dir": "run", "progress_bar": False, "cpu": True}
        arguments |= {"max_epochs": 1, "callbacks": [saver], "project_config": config}
        samples = torch.ones(16, 2)
        trainer, module = Trainer(**arguments), Line()
        trainer.fit(module, DataLoader(samples, 2))
        saved = trainer.save_checkpoint("x")
        path = {"the user": "x", "save_checkpoint": saved, "the callback": saver.last_model_path}
        if rank:
            Path("x").mkdir()  # another one's
        trainer.test(module, DataLoader(samples, 2), ckpt_path=path[of])
        trainer = Trainer(**arguments | {"max_epochs": 2, "project_dir": "again"})
        trainer.fit(module, DataLoader(samples, 2), ckpt_path=path[of])
        return trainer.global_step

    assert ranks2(run) == [8, 8]


def test_dirpath_on_one_rank_alone_raises_on_all(ranks2):
    def run():
        rank = PartialState(cpu=True).process_index
        saver = ModelCheckpoint(dirpath=None if rank else "best")
        fit(({"callbacks": [saver]},) * 2, ("auto", "auto"))

    for text in failures(ranks2, run):
        assert (
            "ModelCheckpoint callbacks with dirpath differs between the processes: 1, 0. Pass"
            in text
        )


@pytest.mark.parametrize(
    ("callback", "of_a_process"),
    [
        (EarlyStopping("loss"), {"verbose"}),
        (ModelCheckpoint(), {"on_exception", "dirpath", "log_model"}),
        (SpikeDetection("loss", action="stop"), {"action"}),  # the others count only with "stop"
        (Timer("1 hour"), {"verbose"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else "",
)
def test_every_deciding_argument_of_a_callback_is_compared(callback, of_a_process):
    arguments = set(inspect.signature(type(callback)).parameters)
    compared = {name.removeprefix("saves_") for name in callback.decides_by}
    assert compared == arguments - of_a_process
    for name in callback.decides_by:
        getattr(callback, name)


class Look(Callback):
    def __init__(self, every):
        self.every = every


def test_arguments_that_concern_one_process_may_differ(ranks2):

    def run():
        rank = PartialState(cpu=True).process_index
        torch.manual_seed(rank)
        own = {
            "callbacks": [EarlyStopping("loss", verbose=rank == 0), *[Look(2)] * rank],
            "project_dir": Path(f"run-{rank}"),
            "progress_bar": rank == 0,
            "deterministic": rank == 0,
            "max_time": timedelta(hours=1, microseconds=rank),
            "checkpointing": False,
            "limit_test_batches": rank + 1,
            "limit_predict_batches": rank + 1,
        }
        own["callbacks"][0].on_boundary = lambda *_: None  # its metric never comes
        return fit((own, own))

    first, second = ranks2(run)
    assert sorted(first + second) == list(range(16))  # the order is that of rank 0


class Stamped(ModelCheckpoint):
    def __init__(self, number):
        super().__init__(every=2)
        self.began, self.loud = float(number), number == 0


class Ranked(EarlyStopping):
    def __init__(self, number):
        super().__init__("lr")
        self.rank = number

    def on_boundary(self, trainer, module):
        """Its metric never comes."""


def test_attributes_of_subclasses_and_other_callbacks_may_differ(ranks2):

    def start(max_epochs, ckpt_path):
        rank = PartialState(cpu=True).process_index
        spikes = SpikeDetection("lr", action="log")
        spikes.on_boundary = lambda *_: None
        alone = [Timer(interval="epoch"), spikes] if rank == 0 else []
        own = {"callbacks": [Stamped(rank), Ranked(rank), *alone], "max_epochs": max_epochs}
        return len(fit((own, own), (ckpt_path, ckpt_path)))

    assert ranks2(lambda: [start(2, None), start(3, "auto")]) == [[8, 4], [8, 4]]


def test_checkpoint_names_that_differ_between_ranks_raise(ranks2, tmp_path):
    def run():
        in_folders_of_their_own(tmp_path)
        trainer = Trainer(max_epochs=1, checkpointing=False, progress_bar=False, cpu=True)
        trainer.fit(Line(), DataLoader(torch.ones(8, 2), 2))
        with pytest.raises(ValueError, match=r"different names: rank 0: at-0; rank 1: at-1\. All"):
            trainer.save_checkpoint(f"at-{PartialState().process_index}")
        trainer.save_checkpoint("at")

    ranks2(run)
    assert [path.name for path in tmp_path.glob("*/at*")] == ["at"]


# -- the model -----------------------------------------------------------------------------------


class Wide(Line):
    """A model that rank 1 builds in another way."""

    tp_plan = {"layer": "colwise", "next": "rowwise"}

    def __init__(self, change):
        super().__init__()
        self.layer, self.next = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.tied = self.next
        if PartialState().process_index == 1:
            change(self)

    def forward(self, x):
        return self.norm(self.tied(self.next(self.layer(x)).relu().repeat(1, 2)))

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def untied_on_meta(model):
    model.to("meta")
    model.tied = torch.nn.Linear(4, 2, device="meta")


def in_another_order(model):
    first, second = model._modules.pop("layer"), model._modules.pop("norm")
    model.norm, model.layer = second, first


CHANGES = {
    "shape": (
        lambda model: setattr(model, "next", torch.nn.Linear(4, 3)),
        r"next.weight is a trained tensor of shape \(3, 4\) and dtype torch.float32 on rank 1, but "
        r"a trained tensor of shape \(2, 4\) and dtype torch.float32 on rank 0",
    ),
    "dtype": (lambda model: model.layer.double(), "layer.weight is .*torch.float64 on rank 1"),
    "a layer more": (
        lambda model: setattr(model, "more", torch.nn.Linear(2, 2)),
        "more.weight is a trained .* on rank 1, but missing on rank 0",
    ),
    "a layer less": (lambda model: delattr(model, "norm"), "norm.weight is missing on rank 1, but"),
    "frozen": (
        lambda model: model.layer.requires_grad_(False),
        "layer.weight is an untrained .* on rank 1, but a trained .* on rank 0",
    ),
    "buffer": (
        lambda model: model.norm.register_buffer("running_mean", torch.zeros(3)),
        r"norm.running_mean is an untrained tensor of shape \(3,\)",
    ),
    "untied on meta": (
        untied_on_meta,
        r"tied.weight is a trained tensor .* on rank 1, but tied to next.weight on rank 0",
    ),
    "order": (in_another_order, "layer.weight has a different position on rank 1 than on rank 0"),
}
ENGINES = {
    "DDP": dict,
    "FSDP": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tensor parallel": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "DeepSpeed": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)},
}


def prepare(change, options, **kwargs):
    model = Wide(change)
    return Accelerator(cpu=True, **options).prepare_model(model, **kwargs)


def train(change, options, stage):
    trainer = Trainer(cpu=True, max_steps=1, project_dir="run", progress_bar=False, **options)
    getattr(trainer, stage)(Wide(change), DataLoader(torch.ones(4, 2), 2))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_models_that_differ_between_ranks_raise_on_all_before_they_are_sent(ranks2, engine, change):
    """In the time limit of the ranks: without the comparison some of them hang."""
    if engine == "DeepSpeed":
        pytest.importorskip("deepspeed")
    make, message = CHANGES[change]
    for text in failures(ranks2, lambda: prepare(make, ENGINES[engine]())):
        assert re.search(f"ValueError: Wide differs between the processes: {message}", text)


@pytest.mark.parametrize("stage", ["fit", "test"])
@pytest.mark.parametrize("engine", ["DDP", "FSDP", "tensor parallel"])
def test_models_of_a_run_that_differ_raise_on_all(ranks2, engine, stage):
    make, message = CHANGES["shape"]
    for text in failures(ranks2, lambda: train(make, ENGINES[engine](), stage)):
        assert re.search(f"ValueError: Wide differs between the processes: {message}", text)


def test_the_rank_that_differs_from_most_is_named(ranks3):
    def body():
        rank = PartialState(cpu=True).process_index
        return Accelerator(cpu=True).prepare(torch.nn.Linear(2, 1 if rank else 2))

    with pytest.raises(RankError) as error:
        ranks3(body)
    assert len(error.value.failures) == 3
    for text in error.value.failures.values():
        assert re.search(r"weight is .*\(2, 2\) .* on rank 0, but .*\(1, 2\) .* on rank 1", text)


def test_what_ddp_does_not_send_may_differ(ranks2):
    def body():
        own = DistributedDataParallelKwargs(broadcast_buffers=False)
        buffer = CHANGES["buffer"][0]
        prepare(buffer, {"kwargs_handlers": [own]})
        evaluated = Accelerator(cpu=True)
        evaluated.prepare_model(torch.nn.Linear(2, 1 + evaluated.process_index), None, True)
        model = Wide(lambda model: model.norm.register_buffer("own", torch.zeros(3)))
        model._ddp_params_and_buffers_to_ignore = ["norm.own"]
        evaluated.prepare_model(model)
        return True

    assert ranks2(body) == [True, True]
