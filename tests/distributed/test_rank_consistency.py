"""Processes that are told different things: refused on all before one waits in vain."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, EarlyStopping, ModelCheckpoint, SpikeDetection, Timer
from tests.helpers.ranks import RankError
from trainer import PartialState, ProjectConfiguration, Trainer, TrainModule


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


@pytest.mark.parametrize(
    ("messages", "name", "values"),
    [
        (({"max_epochs": 2}, {"max_epochs": 3}), "max_epochs", ("2", "3")),
        (({}, {"max_steps": 4}), "max_steps", ("None", "4")),
        (({}, {"max_grad_norm": 1.0}), "max_grad_norm", ("None", "1.0")),
        (({"seed": 1}, {"seed": 2}), "seed", ("1", "2")),  # of the order of the data
        (({"log_every": 2}, {"log_every": 3}), "log_every", ("'2 steps'", "'3 steps'")),
        (
            (
                {"max_epochs": None, "max_time": "1 hour"},
                {"max_epochs": None, "max_time": "2 hours"},
            ),
            "max_time",
            ("'1 hour'", "'2 hours'"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_differing_fit_arguments_raise_on_all_ranks(ranks2, messages, name, values):
    with pytest.raises(RankError) as error:
        ranks2(fit, messages)
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
        assert f"{name}: rank 0: {values[0]}; rank 1: {values[1]}." in text


@pytest.mark.parametrize(
    ("own", "others", "shown"),
    [
        (lambda: ModelCheckpoint(every=2), lambda: Timer(None), "ModelCheckpoint(every=2 steps"),
        (
            lambda: ModelCheckpoint(every=2),
            lambda: ModelCheckpoint(every=3),
            "ModelCheckpoint(every=3 steps",
        ),
        (
            lambda: EarlyStopping("loss"),
            lambda: EarlyStopping("loss", mode="max"),
            "EarlyStopping(monitor=loss max",
        ),
        (
            lambda: EarlyStopping("loss"),
            lambda: EarlyStopping("loss", check_finite=False),
            "check_finite=False",
        ),
        (
            lambda: ModelCheckpoint(every=2),
            lambda: ModelCheckpoint(every=2, on_preemption=False),
            "saves_on_preemption=False",
        ),
        (
            lambda: SpikeDetection("loss", action="log"),
            lambda: SpikeDetection("loss", action="stop"),
            "rank 1: SpikeDetection(monitor=loss min, window=50",
        ),
        (
            lambda: Timer("1 hour", interval="step"),
            lambda: Timer("1 hour", interval="epoch"),
            "Timer(duration=3600.0, interval=epoch)",
        ),
        (
            lambda: Timer({"seconds": 3600.001}),
            lambda: Timer({"seconds": 3600.002}),
            "Timer(duration=3600.002, interval=step)",
        ),
    ],
    ids=[
        "one alone",
        "interval",
        "mode",
        "check_finite",
        "on_preemption",
        "action",
        "when the clock is looked at",
        "time",
    ],
)
def test_differing_deciding_callbacks_raise_on_all_ranks(ranks2, own, others, shown):
    def run():
        rank = PartialState(cpu=True).process_index
        callbacks = {"callbacks": [(own, others)[rank]()]}
        fit((callbacks, callbacks))

    with pytest.raises(RankError) as error:
        ranks2(run)
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
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
            if changed.get("alone"):
                return optimizer
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
        (
            {"interval": "epoch"},
            "scheduler 0: rank 0: StepLR, every 1 step, monitor=None;",
        ),
        ({"every": 3}, "step_size of scheduler 0 (StepLR): rank 0: 2; rank 1: 3."),
        ({"lr": numpy.float32(0.2)}, "lr of SGD: rank 0: 0.1; rank 1: 0.2."),
        ({"alone": True}, "scheduler 0: rank 0: StepLR, every 1 step"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_differing_optimizers_raise_on_all_ranks(ranks2, changed, named, automatic):
    def run():
        module = of_sgd(**({}, changed)[PartialState(cpu=True).process_index])
        module.automatic_optimization = automatic
        trainer = Trainer(max_epochs=1, project_dir="run", progress_bar=False, cpu=True)
        trainer.fit(module, DataLoader(torch.ones(8, 2), 2))

    with pytest.raises(RankError) as error:
        ranks2(run)
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
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


def test_processes_in_different_working_directories_save_to_that_of_rank_0_and_resume(
    ranks2, tmp_path
):
    def run(working, epochs, ckpt_path=None):
        os.chdir(working[PartialState(cpu=True).process_index])
        fit(({"max_epochs": epochs},) * 2, (ckpt_path, ckpt_path))

    folders = [tmp_path / "10-15-00", tmp_path / "10-15-01"]  # as Hydra makes them
    for folder in folders:
        folder.mkdir()
    ranks2(run, folders, 2)
    assert [each.name for each in (folders[0] / "run/checkpoints").iterdir()] == ["step-00000008"]
    assert not any(folders[1].iterdir())
    ranks2(run, folders, 3, "auto")
    assert [each.name for each in (folders[0] / "run/checkpoints").iterdir()] == ["step-00000012"]
    assert not any(folders[1].iterdir())


def in_folders_of_their_own(tmp_path):
    """Enter another working directory on each of two processes, and return that of rank 0."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir(exist_ok=True)
    os.chdir(tmp_path / ("first", "second")[PartialState(cpu=True).process_index])
    return tmp_path / "first"


@pytest.mark.parametrize("word", ["auto", "best"])
def test_folders_that_are_one_on_rank_0_alone_are_looked_at_once_on_all(ranks2, tmp_path, word):
    def run():
        project = in_folders_of_their_own(tmp_path) / "run"
        for epochs in (1, 2):
            saver = ModelCheckpoint(monitor="loss_epoch", dirpath="run/checkpoints")
            messages = {"project_dir": project, "callbacks": [saver], "max_epochs": epochs}
            fit((messages, messages), (word,) * 2 if epochs > 1 else (None, None))
        return sorted(path.name for path in (project / "checkpoints").glob("step-*"))

    assert "step-00000008" in ranks2(run)[0]


@pytest.mark.parametrize("word", ["auto", "last", "best"])
@pytest.mark.parametrize("on_each_node", [False, True], ids=["one disk", "disks of their own"])
def test_processes_in_other_working_directories_find_what_their_machine_keeps(
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
def test_a_path_of_a_process_in_another_working_directory_is_that_of_the_one_that_saved(
    ranks2, tmp_path, of, on_each_node
):
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


def test_an_old_run_where_no_process_saves_is_not_in_the_way(ranks2, tmp_path):
    def run():
        first = in_folders_of_their_own(tmp_path)
        messages = {"project_dir": first.parent / "second" / "run", "max_epochs": 1}
        fit((messages, messages))
        fit(({"max_epochs": 1},) * 2)
        with pytest.raises(ValueError, match="has the checkpoints of another run"):
            fit(({"max_epochs": 1},) * 2)
        return sorted(path.parent.parent.parent.name for path in tmp_path.glob("*/*/*/step-*"))

    assert ranks2(run) == [["first", "second"]] * 2


def test_a_checkpoint_callback_with_a_folder_on_one_process_alone_is_refused_on_all(ranks2):
    def run():
        rank = PartialState(cpu=True).process_index
        saver = ModelCheckpoint(dirpath=None if rank else "best")
        fit(({"callbacks": [saver]},) * 2, ("auto", "auto"))

    with pytest.raises(RankError) as error:
        ranks2(run)
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
        assert "a ModelCheckpoint with dirpath in different numbers: 1, 0. Pass" in text


def test_machines_that_share_a_disk_keep_what_rank_0_finds(ranks2, tmp_path):
    def run():
        rank = os.environ["LOCAL_RANK"]
        os.environ["LOCAL_RANK"] = "0"  # as on machines of one process each
        try:
            PartialState._reset_state()
            in_folders_of_their_own(tmp_path)
            for epochs in (2, 3):
                saver = ModelCheckpoint(monitor="loss_epoch", save_top_k=-1)
                messages = {"callbacks": [saver], "max_epochs": epochs}
                fit((messages, messages), ("auto", "auto"))
            return [path.name for path in saver.best_k_models]
        finally:
            os.environ["LOCAL_RANK"] = rank

    names = [f"step-{step:08d}" for step in (4, 8, 12)]
    assert [sorted(each) for each in ranks2(run)] == [names, names]


def test_a_word_after_a_fit_in_a_folder_that_nobody_named_is_asked_of_rank_0(ranks2, tmp_path):
    def run():
        in_folders_of_their_own(tmp_path)
        trainer = Trainer(max_epochs=1, progress_bar=False, cpu=True)
        data = DataLoader(torch.arange(16.0)[:, None].expand(16, 2), 2)
        with pytest.raises(ValueError, match="every start has a new folder"):
            trainer.test(Line(), data, ckpt_path="last")
        trainer.fit(Line(), data)
        return trainer.test(Line(), data, ckpt_path="last")

    first, second = ranks2(run)
    assert first == second


def test_another_place_to_go_on_from_is_named_on_all(ranks2):
    with pytest.raises(RankError) as error:
        ranks2(fit, ({}, {}), ("auto", None))
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
        assert "ckpt_path: rank 0: 'auto'; rank 1: None." in text


@pytest.mark.parametrize(
    ("callback", "of_a_process"),
    [
        (EarlyStopping("loss"), {"verbose"}),
        (ModelCheckpoint(), {"on_exception", "dirpath"}),
        (SpikeDetection("loss", action="stop"), {"action"}),  # the others count only with "stop"
        (Timer("1 hour"), {"verbose"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else "",
)
def test_every_argument_of_a_callback_that_saves_or_stops_is_compared(callback, of_a_process):
    arguments = set(inspect.signature(type(callback)).parameters)
    compared = {name.removeprefix("saves_") for name in callback.decides_by}
    assert compared == arguments - {"mode"} - of_a_process  # which is of the monitor
    for name in callback.decides_by:
        getattr(callback, name)


class Look(Callback):
    def __init__(self, every):
        self.every = every


def test_arguments_of_a_single_process_may_differ(ranks2):
    """Its folder, its generators, how loud it is, when its time is over, callbacks that look on."""

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


def test_other_callbacks_may_differ_between_ranks(ranks2):
    """Nor is it looked at what subclasses keep for themselves."""

    def start(max_epochs, ckpt_path):
        rank = PartialState(cpu=True).process_index
        spikes = SpikeDetection("lr", action="log")
        spikes.on_boundary = lambda *_: None
        alone = [Timer(interval="epoch"), spikes] if rank == 0 else []
        own = {"callbacks": [Stamped(rank), Ranked(rank), *alone], "max_epochs": max_epochs}
        return len(fit((own, own), (ckpt_path, ckpt_path)))

    assert ranks2(lambda: [start(2, None), start(3, "auto")]) == [[8, 4], [8, 4]]


def test_a_save_that_one_process_alone_makes_at_the_end_is_told_on_all(ranks2):
    class Saves(Callback):
        pass

    def save(self, trainer, module):
        if trainer.is_global_zero and trainer.should_stop:
            trainer.save_checkpoint("extra")

    def run():
        Saves.on_train_end = save
        module = Line()
        module.on_train_step_end = lambda: setattr(module.trainer, "should_stop", True)
        options = {"max_epochs": 1, "project_dir": "run", "checkpointing": False}
        trainer = Trainer(**options, callbacks=Saves(), progress_bar=False, cpu=True)
        trainer.fit(module, DataLoader(torch.ones(8, 2), 2))

    with pytest.raises(RankError) as error:
        ranks2(run)
    assert sorted(error.value.failures) == [0, 1]
    for text in error.value.failures.values():
        assert "rank 0: save_checkpoint" in text


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
