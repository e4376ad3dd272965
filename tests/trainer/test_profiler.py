"""`Trainer(profile="simple")`: where the time goes, by a clock that only the user's code moves."""

import json
import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, ModelCheckpoint
from trainer import Trainer, TrainModule
from trainer.loops import profiler
from trainer.loops.profiler import DeviceLedger, HostLedger, Report, Stopwatch

# Different powers of two times a count below 256 add up to one sum only: nothing is confused.
READ, MOVE, STEP, BACK = 2**8, 2**16, 2**24, 2**32
UPDATE, HOOK, COMPUTE, EVALUATE = 2**40, 2**48, 2**56, 2**64
SAVE, SCHEDULE = 2**72, 2**80


class Clock:
    """Stands still unless the user's code takes its time."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def take(self, ticks):
        self.now += ticks


class Slow(Dataset):
    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.clock.take(READ)
        return torch.tensor([float(index)])


class SlowBack(torch.autograd.Function):
    clock: Clock

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        SlowBack.clock.take(BACK)
        return gradient


class SlowSum:
    """A metric object: it computes when the epoch's values are reduced."""

    def __init__(self, clock):
        self.clock = clock

    def update(self):
        pass

    def compute(self):
        self.clock.take(COMPUTE)
        return 1.0

    def reset(self):
        pass


class SlowSGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure=None):
        self.clock.take(UPDATE)
        return super().step(closure)


class Module(TrainModule):
    def __init__(self, clock):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.clock = clock
        self.sum = SlowSum(clock)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.clock.take(MOVE)
        return batch

    def training_step(self, batch, batch_idx):
        self.clock.take(STEP)
        self.log("sum", self.sum, on_epoch=True)
        return SlowBack.apply(self.net(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.clock.take(EVALUATE)
        self.log("val", self.net(batch).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.clock.take(EVALUATE)
        return batch

    def configure_optimizers(self):
        optimizer = SlowSGD(self.parameters(), lr=0.01)
        optimizer.clock = self.clock
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}

    def rate(self, step):
        self.clock.take(SCHEDULE)
        return 1.0


class SlowHook(Callback):
    def __init__(self, clock, ticks=HOOK):
        self.clock, self.ticks = clock, ticks

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.clock.take(self.ticks)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.clock.take(self.ticks)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.clock.take(SAVE)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    SlowBack.clock = clock
    monkeypatch.setattr(profiler, "ledger_for", lambda device: HostLedger(clock))
    return clock


def trainer_for(**kwargs):
    settings = {"cpu": True, "progress_bar": False, "checkpointing": False, "project_dir": "run"}
    return Trainer(**(settings | {"profile": "simple", "num_sanity_val_steps": 0} | kwargs))


def loader(clock, batch_size=2):
    return DataLoader(Slow(clock), batch_size=batch_size)


def written(stage="fit", folder="run"):
    with open(f"{folder}/profile-{stage}.json") as file:
        return json.load(file)


def seconds(record):
    # Integers of more than 64 bits are written as their digits.
    found = {name: int(part["seconds"]) for name, part in record["parts"].items()}
    return {name: value for name, value in found.items() if value}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_part_has_its_own_time_over_several_epochs(clock, accumulation):
    """6 batches an epoch; windows of 4 and 2 with accumulation; the last checkpoint each epoch."""
    begun = clock.now
    module = Module(clock)
    scheduled = SCHEDULE  # torch calls it once as the schedule is made, before the run begins
    trainer_for(
        max_epochs=3,
        gradient_accumulation_steps=accumulation,
        callbacks=[SlowHook(clock), ModelCheckpoint(background=False)],
    ).fit(module, loader(clock), loader(clock))
    updates = 3 * (6 if accumulation == 1 else 2)
    record = written()
    saves = 3
    assert seconds(record) == {
        "data wait": 3 * 12 * READ,
        "transfer": 18 * MOVE,
        "forward": 18 * STEP,
        "backward": 18 * BACK,
        "optimizer": updates * (UPDATE + SCHEDULE),
        "callbacks": updates * HOOK,
        "logging": 3 * COMPUTE,
        "validation": 18 * (EVALUATE + HOOK + MOVE) + 3 * 12 * READ,
        "saving": saves * SAVE,
    }
    assert record["updates"] == updates
    assert int(record["seconds"]) == clock.now - begun - scheduled == sum(seconds(record).values())
    assert sum(part["share"] for part in record["parts"].values()) == pytest.approx(1)
    assert record["hooks"]["on_before_optimizer_step"] == updates * HOOK


def test_the_check_before_the_training_is_a_validation(clock):
    trainer_for(max_steps=1, num_sanity_val_steps=2, val_every="1 epoch").fit(
        Module(clock), loader(clock), loader(clock)
    )
    # The batch ahead of the two is read as well as those.
    assert seconds(written())["validation"] == 2 * (EVALUATE + MOVE) + 4 * READ


def test_forward_backward_and_optimizer_are_timed_in_manual_optimisation(clock):
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.clock.take(STEP)
            self.manual_backward(SlowBack.apply(self.net(batch)).square().mean())
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    trainer_for(max_epochs=1).fit(Manual(clock), loader(clock))
    found = seconds(written())
    assert found["forward"] == 6 * STEP
    assert found["backward"] == 6 * BACK
    assert found["optimizer"] == 6 * UPDATE


def test_an_error_in_the_middle_still_shows_the_table(clock, capsys):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                self.clock.take(STEP)
                raise RuntimeError("the step failed")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="the step failed"):
        trainer_for(max_epochs=1).fit(Failing(clock), loader(clock))
    record = written()
    assert record["updates"] == 2
    assert seconds(record)["forward"] == 3 * STEP
    assert int(record["seconds"]) == sum(seconds(record).values())
    assert "Time of fit by part" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_is_timed_by_the_batch(clock, stage, capsys):
    getattr(trainer_for(), stage)(Module(clock), loader(clock))
    record = written(stage)
    assert seconds(record) == {
        "data wait": 12 * READ,
        "transfer": 6 * MOVE,
        "forward": 6 * EVALUATE,
    }
    assert record["batches"] == 6
    assert "ms per batch" in capsys.readouterr().out


def test_each_fit_is_timed_by_itself(clock):
    for epochs in (1, 3):
        callbacks = [ModelCheckpoint(background=False)]
        trainer = trainer_for(max_epochs=epochs, callbacks=callbacks)
        trainer.fit(Module(clock), loader(clock), ckpt_path="auto")
    assert trainer.global_step == 18
    assert written()["updates"] == 12
    assert seconds(written())["forward"] == 12 * STEP


class Quiet(Module):
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()


def test_on_two_processes_the_first_is_timed_and_reports(ranks2):
    def body():
        clock = SlowBack.clock = Clock()  # by the host's clock here: the ranks are other processes
        trainer = trainer_for(max_epochs=1)
        trainer.fit(Quiet(clock), loader(clock))
        timed = "global_batches" in vars(trainer._fit.device_transfer)
        return timed, trainer.is_global_zero and written()["updates"]

    assert ranks2(body) == [(True, 3), (False, False)]


def test_time_of_other_threads_is_not_taken_for_the_run_s():
    """A hook of the module on a thread of autograd must not change what the main thread is at."""
    clock = Clock()
    stopwatch = Stopwatch(HostLedger(clock))

    def other():
        with stopwatch.part("logging"):
            clock.take(5)

    with stopwatch.part("forward"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    stopwatch.stop()
    assert stopwatch.ledger.seconds["forward"] == 5
    assert "logging" not in stopwatch.ledger.seconds


class FakeEvent:
    """An event of a device that has done everything up to `done`; used ones are told by `uses`."""

    done = 0

    def __init__(self, time):
        self.time, self.uses = time, 1

    def query(self):
        return self.time <= FakeEvent.done

    def synchronize(self):
        FakeEvent.waits += 1
        FakeEvent.done = max(FakeEvent.done, self.time)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()  # else CUDA raises
        return 1000.0 * (end.time - self.time)


def test_events_of_a_device_are_read_when_they_have_passed():
    FakeEvent.done, FakeEvent.waits = 0, 0
    clock = Clock()
    stopwatch = Stopwatch(DeviceLedger(lambda: FakeEvent(clock.now)))
    for _ in range(50):
        for part, ticks in (("forward", 2), ("backward", 5), ("optimizer", 1)):
            with stopwatch.part(part):
                clock.take(ticks)
        clock.take(1)
        FakeEvent.done = clock.now - 20  # the device is behind
    assert FakeEvent.waits == 0
    assert len(stopwatch.ledger._pending) < 30
    stopwatch.stop()
    assert FakeEvent.waits == 1
    assert stopwatch.ledger.seconds == {
        "forward": 100,
        "backward": 250,
        "optimizer": 50,
        "rest": 50,
    }


# -- what is said ----------------------------------------------------------------------------------


def report(num_workers=0, stage="fit", **parts):
    parts = {name.replace("_", " "): value for name, value in parts.items()}
    return Report(
        stage=stage,
        clock="the host's clock",
        unit="update" if stage == "fit" else "batch",
        steps=10,
        seconds=parts,
        calls=dict.fromkeys(parts, 10),
        hooks={"on_boundary": 1.0},
        num_workers=num_workers,
    )


ADVICE = [
    ({"data_wait": 61, "forward": 39}, "waits for data 61 % of the time: raise num_workers"),
    ({"data_wait": 61, "forward": 39}, "of the DataLoader (it is 0)"),
    ({"transfer": 60, "forward": 40}, "60 % of the time: set pin_memory=True"),
    ({"callbacks": 60, "forward": 40}, "most of it in on_boundary"),
    ({"logging": 60, "forward": 40}, "larger log_every"),
    ({"validation": 60, "forward": 40}, "larger val_every"),
    ({"saving": 60, "forward": 40}, "give ModelCheckpoint a larger every"),
    ({"rest": 60, "forward": 40}, "larger batches"),
    (
        {"data_wait": 30, "forward": 25, "backward": 25, "optimizer": 20},
        "spends 70 % of the time computing: it waits for data 30 %",
    ),
    ({"data_wait": 5, "forward": 95}, "95 % of the time computing: mixed_precision, dynamo_b"),
]


@pytest.mark.parametrize(("parts", "said"), ADVICE)
def test_the_bottleneck_is_named_with_what_to_do(parts, said):
    assert said in report(**parts).bottleneck()


def test_a_stream_without_workers_and_an_evaluation_have_words_of_their_own():
    assert "num_workers" not in report(num_workers=None, data_wait=9).bottleneck()
    compiled = replace(report(forward=95, data_wait=5), compiles=True)
    assert "dynamo_backend" not in compiled.bottleneck()  # only what is not in use is advised
    assert report(stage="test", data_wait=9).bottleneck().startswith("The evaluation waits")


@pytest.mark.parametrize(("stage", "unit"), [("fit", "update"), ("validate", "batch")])
def test_of_a_few_updates_or_batches_nothing_is_concluded(stage, unit):
    slow = report(stage=stage, data_wait=61, forward=39)
    few = "updates" if unit == "update" else "batches"
    assert "waits for data" in slow.bottleneck()
    assert replace(slow, steps=9).bottleneck().startswith(f"Too few {few}")
    brief = replace(slow, seconds={"data wait": 0.9, "forward": 0.09})
    assert brief.bottleneck().startswith(f"Too few {few}, or too short")


def test_processes_that_wait_for_each_other_are_not_taken_to_compute():
    parts = {"forward": 15, "backward": 75, "optimizer": 5, "data_wait": 5}
    waits = replace(report(**parts), processes=2).bottleneck()
    assert "75 % of the time in backward, most of it probably waiting" in waits
    assert "SlowRankDetector" in waits
    assert "95 % of the time computing" in report(**parts).bottleneck()  # alone it cannot wait
    for others in (
        {"forward": 30, "backward": 60},
        {"forward": 5, "backward": 16, "optimizer": 74},
    ):
        computes = replace(report(**(parts | others)), processes=2)
        assert "95 % of the time computing" in computes.bottleneck()


class Plain(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_the_report_knows_how_the_run_was_set_up(monkeypatch):
    reports = []
    monkeypatch.setattr(Report, "text", lambda made: reports.append(made) or "")
    settings = {"dynamo_backend": "eager", "mixed_precision": "bf16"}
    for epochs, workers, options in ((2, 1, settings), (1, 1, {}), (2, 0, {})):
        data = DataLoader(torch.zeros(4, 1), 2, num_workers=workers)
        trainer_for(max_epochs=epochs, **options).fit(Plain(), data)
    assert [made.num_workers for made in reports] == [1, 1, 0]
    assert [made.compiles for made in reports] == [True, False, False]
    assert {made.processes for made in reports} == {1}


def test_the_table_has_the_mean_the_total_and_the_share():
    lines = report(data_wait=6.1, forward=3.9).text().splitlines()
    assert "10 updates in 10.000 s" in lines[0]
    assert lines[1].split() == ["ms", "per", "update", "seconds", "share"]
    assert lines[2].split() == ["data", "wait", "610.000", "6.100", "61.0", "%"]
    assert lines[3].split() == ["forward", "390.000", "3.900", "39.0", "%"]
    assert lines[4].split() == ["total", "1000.000", "10.000", "100.0", "%"]
    assert "waits for data" in lines[5]


# -- the argument ----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["advanced", "pytorch", True, 1, ""])
def test_another_profile_is_refused_and_torch_s_is_named(profile):
    with pytest.raises(ValueError, match=r"it must be 'simple', ProfileKwargs"):
        Trainer(cpu=True, profile=profile)


def test_without_profile_nothing_is_wrapped_or_written(clock, tmp_path, capsys):
    seen = []

    class Look(Callback):
        def on_boundary(self, trainer, module):
            run = trainer._run
            owners = (run, run.device_transfer, run.engine, run.metrics, run.recorder)
            owners += (run.saving.writer,)
            seen.extend(name for each in owners for name in vars(each) if name in timed)

    timed = ("global_batches", "transfer", "bare_step", "backward", "log", "flush", "wait")
    trainer = trainer_for(max_steps=1, profile=None, callbacks=[Look()])
    trainer.fit(Module(clock), loader(clock))
    assert seen == []
    trainer = trainer_for(max_steps=1, callbacks=[Look()])
    trainer.fit(Module(clock), loader(clock))
    assert set(seen) == set(timed)
    assert capsys.readouterr().out.count("Time of fit by part") == 1


def test_a_trial_run_prints_its_profile_and_writes_nothing(clock, tmp_path, capsys):
    trainer_for(fast_dev_run=True).fit(Module(clock), loader(clock))
    assert "Time of fit by part" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_disk_that_refuses_the_file_does_not_fail_the_run(clock, tmp_path, caplog):
    (tmp_path / "run" / "profile-fit.json").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        trainer_for(max_steps=1).fit(Module(clock), loader(clock))
    assert "profile-fit.json could not be written" in caplog.text
