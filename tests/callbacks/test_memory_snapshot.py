import logging
import os
import signal

import pytest
import torch

from callbacks import Callback, MemorySnapshot
from tests.helpers.line import Line, loader
from tests.helpers.requires import requires_cuda
from tests.numerics.running import quiet_trainer
from trainer import Accelerator
from trainer.errors import Preempted


def fit(*callbacks, **options):
    """Eight updates."""
    trainer = quiet_trainer(**{"max_epochs": 1, "callbacks": list(callbacks)} | options)
    trainer.fit(Line(), loader(16))


def test_without_cuda_the_log_says_that_nothing_is_recorded(caplog):
    snapshot = MemorySnapshot()
    with caplog.at_level(logging.WARNING):
        fit(snapshot)
    assert "it needs a CUDA device" in caplog.text
    assert snapshot.snapshots == []
    assert not os.path.exists("run/memory")


class Allocator:
    """Stands for CUDA's, on a machine without."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.step = 0
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)

    def record(self, enabled="all", max_entries=None):
        self.calls.append((self.step, "on" if enabled else "off"))
        assert enabled is None or (type(max_entries) is int and max_entries == 100_000)

    def dump(self, filename):
        assert self.calls[-1][1] == "on"
        self.calls.append((self.step, "dump"))
        with open(filename, "w") as file:
            file.write("snapshot")


class OnCuda(Callback):
    """Lets the callbacks after it believe that the run is on a CUDA device."""

    def __init__(self, allocator, error=None, at=0):
        self.allocator, self.error, self.at = allocator, error, at

    def on_train_start(self, trainer, module):
        self.own = Accelerator.device
        Accelerator.device = property(lambda self: torch.device("cuda", 0))

    def on_train_epoch_start(self, trainer, module):
        Accelerator.device = self.own

    def on_train_step_start(self, trainer, module):
        self.allocator.step = trainer.global_step
        if self.error is not None and trainer.global_step == self.at:
            raise self.error


@pytest.fixture
def allocator(monkeypatch):
    monkeypatch.setattr(Accelerator, "device", Accelerator.device)  # is put back afterwards
    return Allocator(monkeypatch)


def files():
    return sorted(os.listdir("run/memory")) if os.path.exists("run/memory") else []


@pytest.mark.parametrize(("skip", "steps"), [(1, 3), (0, 1), (2, 4)])
def test_the_history_of_a_few_updates_is_written(allocator, skip, steps):
    snapshot = MemorySnapshot("own", skip_steps=skip, steps=steps)
    fit(OnCuda(allocator), snapshot)
    first, last = max(skip - 1, 0), skip + steps - 1  # the step is noted when an update begins
    assert allocator.calls == [(first, "on"), (last, "dump"), (last, "off")]
    assert os.listdir("own") == [f"memory-step-{skip + steps:08d}-rank-00000.pickle"]
    assert [path.name for path in snapshot.snapshots] == os.listdir("own")


def test_a_run_that_ends_before_writes_what_there_is(allocator):
    fit(OnCuda(allocator), MemorySnapshot(skip_steps=5, steps=30, max_entries=1e5))
    assert [what for _, what in allocator.calls] == ["on", "dump", "off"]
    assert files() == ["memory-step-00000008-rank-00000.pickle"]
    allocator.calls.clear()
    fit(OnCuda(allocator), MemorySnapshot(skip_steps=8, steps=1), project_dir="second")
    assert [what for _, what in allocator.calls] == ["on", "off"]


OOM = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "calls"), [(OOM, ["on", "dump", "off"]), (KeyError("other"), ["on", "off"])]
)
@pytest.mark.parametrize("steps", [None, 5])
def test_an_out_of_memory_error_writes_the_history(allocator, error, calls, steps):
    with pytest.raises(type(error)):
        fit(OnCuda(allocator, error, at=4), MemorySnapshot(steps=steps))
    assert [what for _, what in allocator.calls] == calls
    assert files() == (["memory-step-00000004-rank-00000-oom.pickle"] if error is OOM else [])


def test_without_an_end_it_is_written_only_if_memory_runs_out(allocator):
    fit(OnCuda(allocator), MemorySnapshot(steps=None))
    assert [what for _, what in allocator.calls] == ["on", "off"]
    assert files() == []
    with pytest.raises(torch.OutOfMemoryError):  # the first update is recorded too
        fit(OnCuda(allocator, OOM, at=0), MemorySnapshot(steps=None), project_dir="second")
    assert os.listdir("second/memory") == ["memory-step-00000000-rank-00000-oom.pickle"]


@pytest.mark.parametrize(
    ("at", "calls"), [(0, []), (6, ["on", "dump", "off"])], ids=["before", "after"]
)
def test_an_error_outside_the_recording_writes_nothing(allocator, at, calls):
    with pytest.raises(torch.OutOfMemoryError):
        fit(OnCuda(allocator, OOM, at=at), MemorySnapshot(skip_steps=1, steps=2))
    assert [what for _, what in allocator.calls] == calls
    assert files() == (["memory-step-00000003-rank-00000.pickle"] if calls else [])


def test_a_trial_records_nothing(allocator):
    fit(OnCuda(allocator), MemorySnapshot(skip_steps=0, steps=1), fast_dev_run=3, max_epochs=None)
    assert allocator.calls == []


@requires_cuda
def test_a_real_history_is_written():
    snapshot = MemorySnapshot()
    fit(snapshot, cpu=False)
    (file,) = snapshot.snapshots
    assert file.stat().st_size > 100


@pytest.mark.parametrize("at", [5, 6])
def test_a_run_that_a_signal_ends_writes_what_there_is(allocator, at):
    """Also where it comes with the only update that was recorded."""

    class Signal(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == at:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted):
        fit(OnCuda(allocator), Signal(), MemorySnapshot(skip_steps=5, steps=30))
    assert [what for _, what in allocator.calls] == ["on", "dump", "off"]
    assert files() == [f"memory-step-{at + 1:08d}-rank-00000.pickle"]
