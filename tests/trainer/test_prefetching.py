"""A Trainer's batches come by the device's side stream, and nothing else changes.

On a device whose copies come late, see `tests.helpers.streams`; and on a real one.
"""

import json
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from callbacks import Callback
from tests.helpers.device import OnDevice, counted_waits
from tests.helpers.requires import requires_cuda
from tests.helpers.streams import LateStreams, Stream
from tests.trainer import test_device_waits as with_everything
from trainer import DataModule, Trainer, TrainModule
from trainer.loops import device_transfer as moving
from trainer.loops import profiler
from trainer.loops.profiler import HostLedger

DATA = TensorDataset(
    torch.randn(22, 3, generator=torch.Generator().manual_seed(1)), torch.arange(22) % 2
)


class Module(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 2)
        self.streams = None

    def compute(self, batch):
        if self.streams is not None:
            self.streams.note("use")
        x, y = batch
        return torch.nn.functional.cross_entropy(self.head(self.net(x)), y)

    def training_step(self, batch, batch_idx):
        loss = self.compute(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.compute(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.compute(batch))

    def predict_step(self, batch, batch_idx):
        return self.head(self.net(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Counting(Module):
    """Counts what has another sum in every batch, with a part of the module."""

    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def count_items(self, batch):
        return (batch[1] * 2 + 1).sum() * self.one


class Moving(Module):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [part.to(device, non_blocking=True) for part in batch]


class Before(Module):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [part * 1 for part in batch]


class After(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [part * 1 for part in batch]


class MovingData(DataModule):
    def train_dataloader(self):
        return DataLoader(DATA, 4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [part * 1 for part in batch]


class Stream22(IterableDataset):
    def __iter__(self):
        yield from DATA


class Failing(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 8:
            raise OSError("no such sample")
        return DATA[index]


class Stop(Callback):
    """Reads the data a second time, then ends the training inside an epoch, a batch under way."""

    def on_boundary(self, trainer, module):
        if trainer.global_step == 8:
            trainer.update_batch_norm()
            trainer.should_stop = True


def trainer_for(**kwargs):
    settings = {"max_epochs": 2, "cpu": True, "progress_bar": False, "checkpointing": False}
    settings |= {"project_dir": f"run{trainer_for.runs}"}
    trainer_for.runs += 1
    return Trainer(**(settings | kwargs))


trainer_for.runs = 0


def results(module, source, *, callbacks=(), **kwargs):
    """All that a run has to show: weights, buffers, metrics, predictions."""
    trainer = trainer_for(callbacks=[each() for each in callbacks], **kwargs)
    evaluated = DataLoader(DATA, 5)
    trainer.fit(module, source, evaluated)
    state = {
        name: getattr(value, "host", value).detach().cpu().clone()
        for name, value in module.state_dict().items()
    }
    metrics = [dict(trainer.callback_metrics)]
    metrics += trainer.validate(module, evaluated) + trainer.test(module, evaluated)
    predicted = [getattr(each, "host", each) for each in trainer.predict(module, evaluated)]
    return state, metrics, predicted


def check_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=0)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs)
    for ours, theirs in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.fixture
def streams(monkeypatch):
    streams = LateStreams()
    monkeypatch.setattr(moving, "streams_for", streams.copying)
    return streams


RUNS = [
    (Module, lambda: DataLoader(DATA, 4, shuffle=True), {}),
    (Module, lambda: DataLoader(Stream22(), 4), {}),
    (Module, lambda: [list(DATA[:4]), list(DATA[4:9]), list(DATA[9:])], {}),
    (Module, lambda: DataLoader(DATA, 4), {"gradient_accumulation_steps": 4}),
    (Module, lambda: DataLoader(DATA, 4), {"callbacks": (Stop,), "max_epochs": 3}),
    (Counting, lambda: DataLoader(DATA, 4), {"gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("make", "source", "options"), RUNS)
def test_a_run_is_the_one_without_a_side_stream(monkeypatch, streams, make, source, options):
    expected = results(make(), source(), **options)
    assert streams.log == []
    with counted_waits(monkeypatch):
        module = make()
        module.streams = streams
        found = results(module, source(), **options)
    check_same(found, expected)
    assert all(torch.isfinite(value).all() for value in expected[0].values())
    asked = Counter(entry[0] for entry in streams.log)
    assert asked["wait"] > 0
    assert asked["keep"] == 2 * asked["wait"]
    assert asked["follow"] == (asked["event"] - 5 if make is Counting else 0)  # predict counts none


@pytest.mark.parametrize("make", [Module, Counting])
def test_the_next_copy_is_under_way_before_a_batch_is_waited_for(monkeypatch, streams, make):
    with counted_waits(monkeypatch):
        module = make()
        module.streams = streams
        trainer_for(max_epochs=1).fit(module, DataLoader(DATA, 8))
    follow = [("follow", "computing", "side")] if make is Counting else []
    copies = [[*follow, ("event", number, "side")] for number in range(3)]
    used = [
        [("wait", number, "computing"), *[("keep", "computing")] * 2, ("use",)]
        for number in range(3)
    ]
    order = [copies[0], copies[1], used[0], copies[2], used[1], used[2]]
    assert streams.log == [entry for part in order for entry in part]
    assert all(isinstance(each, OnDevice) for each in streams.kept)


@pytest.mark.parametrize("make", [Moving, Before, After, MovingData])
def test_code_of_the_user_is_run_by_the_computing_stream(monkeypatch, streams, make):
    with counted_waits(monkeypatch):
        if make is MovingData:
            trainer_for().fit(Module(), datamodule=MovingData())
        else:
            trainer_for().fit(make(), DataLoader(DATA, 4))
    assert streams.log == []


def test_an_error_while_reading_ahead_comes_behind_the_batch_before(monkeypatch, streams):
    module = Module()
    module.streams = streams
    trainer = trainer_for()
    with counted_waits(monkeypatch), pytest.raises(OSError, match="no such sample"):
        trainer.fit(module, DataLoader(Failing(), 4))
    assert trainer.global_step == 2
    assert [entry[0] for entry in streams.log].count("use") == 2


class Clock:
    now = 0

    def __call__(self):
        return self.now


def test_waiting_for_a_late_copy_is_the_transfers_time(monkeypatch, streams):
    clock = Clock()
    monkeypatch.setattr(profiler, "ledger_for", lambda device: HostLedger(clock))
    wait = Stream.wait_event

    def slow(self, event):
        clock.now += 1
        wait(self, event)

    monkeypatch.setattr(Stream, "wait_event", slow)
    with counted_waits(monkeypatch):
        trainer_for(max_epochs=1, profile="simple", project_dir="run").fit(
            Module(), DataLoader(DATA, 4)
        )
    with open("run/profile-fit.json") as file:
        parts = json.load(file)["parts"]
    assert {name: part["seconds"] for name, part in parts.items() if part["seconds"]} == {
        "transfer": 6
    }


# -- on a real one -----------------------------------------------------------------------------


def on_cuda(module, source):
    trainer_for(cpu=False).fit(module, source)
    return [parameter.detach().cpu() for parameter in module.parameters()]


@requires_cuda
@pytest.mark.parametrize("pin", [False, True])
def test_weights_on_a_device_are_those_without_a_side_stream(pin):
    found = [
        on_cuda(make(), DataLoader(DATA, 4, pin_memory=pin))
        for make in (Module, Moving)  # whose own hook is called by the stream that computes
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class Strict(Callback):
    """Makes whatever waits for the device an error, from the third update to the fifth."""

    def on_train_step_start(self, trainer, module):
        if trainer.global_step == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 5:
            torch.cuda.set_sync_debug_mode("default")


def fit_strictly(module, **settings):
    trainer = trainer_for(cpu=False, max_epochs=1, **settings)
    try:
        trainer.fit(module, DataLoader(DATA, 2, pin_memory=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return trainer.global_step


@requires_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("make", [Module, Counting])
def test_updates_on_cuda_do_not_synchronise(make):
    assert fit_strictly(make(), callbacks=[Strict()], log_every=1000) == 11


@requires_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("recorded", [False, True])
def test_updates_on_cuda_with_everything_on_do_not_synchronise(monkeypatch, recorded):
    """What is recorded was sent an update before: only its event is waited for.

    That is no error in this mode. The check for finite gradients does the same in every update.
    """
    screen = with_everything.screen_that_is_drawn(monkeypatch)
    settings = with_everything.everything(Strict(), recorded=recorded)
    assert fit_strictly(with_everything.Module(), **settings) == 6
    assert "loss" in screen.getvalue()


class Heavy(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2048, 2048)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for _ in range(20):
            x = self.net(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@requires_cuda
def test_in_a_trace_kernels_run_while_a_batch_is_copied(tmp_path):
    from benchmarks.transformer import Trace, overlap

    path = tmp_path / "trace.json"
    data = TensorDataset(torch.ones(1024 * 16, 2048))
    trainer = trainer_for(cpu=False, max_epochs=1, callbacks=[Trace(path, 4, 8)])
    trainer.fit(Heavy(), DataLoader(data, 1024, pin_memory=True))
    assert overlap(json.loads(path.read_text())) > 0
