import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, ModelCheckpoint, SlowRankDetector, slow_rank_detector
from trainer import Trainer, TrainModule


class Clock:
    """Time that passes only when somebody says so."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Data(Dataset):
    """One sample a batch; reading it takes this process so long."""

    def __init__(self, clock, seconds, samples):
        self.clock, self.seconds, self.samples = clock, seconds, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.clock.now += self.seconds
        return torch.ones(1)


class Line(TrainModule):
    def __init__(self, clock, seconds):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch, batch_idx):
        self.clock.now += self.seconds[min(self.global_step, len(self.seconds) - 1)]
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slow(Callback):
    """Takes long on one process where that says nothing about data or forward pass."""

    def __init__(self, clock, rank):
        self.clock, self.rank = clock, rank

    def pass_time(self, trainer, *_):
        if trainer.accelerator.process_index == self.rank:
            self.clock.now += 100.0

    on_train_epoch_start = on_after_backward = on_train_step_end = pass_time
    on_save_checkpoint = pass_time


class Keep(Callback):
    def __init__(self, detector):
        self.detector, self.found = detector, {}

    def on_boundary(self, trainer, module):
        self.found[trainer.global_step] = list(self.detector.slow)


def watch(data, forward, *, samples=24, arguments=None, others=(), validate=False, **options):
    """A fit in which each process takes its own seconds; what it found, and the metrics."""
    clock = Clock()
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Handler(logging.WARNING)
    slow_rank_detector.logger.addHandler(handler)
    slow_rank_detector.time = clock
    try:
        detector = SlowRankDetector(**(arguments or {}))
        keep = Keep(detector)
        trainer = Trainer(
            cpu=True,
            progress_bar=False,
            num_sanity_val_steps=0,
            project_dir="run",
            callbacks=[detector, keep, *[make(clock) for make in others]],
            **({"log_every": 2, "max_epochs": 1, "checkpointing": False} | options),
        )
        rank = trainer.accelerator.process_index
        own = forward[rank] if isinstance(forward[rank], list) else [forward[rank]]
        val = DataLoader(Data(clock, 0, 4)) if validate else None
        trainer.fit(Line(clock, own), DataLoader(Data(clock, data[rank], samples)), val)
    finally:
        slow_rank_detector.time = __import__("time")
        slow_rank_detector.logger.removeHandler(handler)
    metrics = {name: v for name, v in trainer.callback_metrics.items() if "slow" in name}
    found = {step: [(s.rank, s.work) for s in slow] for step, slow in keep.found.items() if slow}
    # The last update of an epoch does not wait for data: they are read one batch ahead.
    return found, metrics, messages, [tuple(s) for s in keep.found[2]]


def test_a_process_that_waits_for_its_data_is_named(ranks3):
    results = ranks3(watch, [1.0, 4.0, 1.5], [2.0, 2.0, 2.0])
    found, metrics, messages, slow = results[0]
    # 8 updates; recorded every 2: the record of step 2 and all that follow
    assert found == {step: [(1, "data")] for step in range(2, 9)}
    assert metrics == {
        "slow_rank/data": pytest.approx(4.0 / 1.25),  # slowest by the median of the others
        "slow_rank/forward": pytest.approx(1.0),
    }
    ((rank, host, work, seconds, others),) = slow
    assert (rank, work) == (1, "data")
    assert (seconds, others) == (pytest.approx(4.0), pytest.approx(1.25))
    assert len(messages) == 1  # once, at the second record in a row
    logged = f"Step 4: rank 1 on {host} spends 4000.0 ms per update waiting for data"
    assert messages[0].startswith(logged)
    for other in results[1:]:
        assert other[0] == found
        assert other[1] == metrics
        assert other[2] == []  # the main process speaks
        assert other[3] == slow


def test_a_process_with_a_slow_forward_pass_is_named_and_of_two_each_is_the_others(ranks2):
    (found, metrics, messages, _), (other, *_) = ranks2(watch, [0.0, 0.0], [6.0, 2.0])
    assert found == other == {step: [(0, "forward")] for step in range(2, 13)}
    assert metrics["slow_rank/forward"] == pytest.approx(3.0)
    assert metrics["slow_rank/data"] == 1.0  # nobody waits at all
    assert "6000.0 ms per update in the forward pass, the others 2000.0 ms" in messages[0]


def test_one_that_recovers_is_named_again_when_it_slows_down_again(ranks2):
    seconds = [5.0] * 4 + [1.0] * 4 + [5.0] * 4
    found, _, messages, _ = ranks2(watch, [0.0, 0.0], [1.0, seconds])[0]
    assert sorted(found) == [2, 3, 4, 5, 10, 11, 12]
    assert [text[:7] for text in messages] == ["Step 4:", "Step 12"]


def test_micro_batches_add_up_to_the_update(ranks2):
    options = {"gradient_accumulation_steps": 3}
    found, metrics, _, slow = watch_with(ranks2, [1.0, 3.0], [2.0, 2.0], options)[0]
    assert {name for step in found.values() for name in step} == {(1, "data")}
    assert slow[0][3:] == (pytest.approx(9.0), pytest.approx(3.0))
    assert metrics["slow_rank/forward"] == 1.0


def watch_with(pool, data, forward, options):
    return pool(lambda: watch(data, forward, **options), timeout=60)


def test_small_differences_are_not_reported(ranks2):
    data, forward = [0.1, 0.4], [10.0, 10.0]
    assert ranks2(watch, data, forward)[0][0] == {}
    found = watch_with(ranks2, data, forward, {"arguments": {"min_share": 0.01}})[0][0]
    assert {name for step in found.values() for name in step} == {(1, "data")}
    options = {"arguments": {"min_share": 0.01, "threshold": 5.0}}
    assert watch_with(ranks2, data, forward, options)[0][0] == {}


def test_only_data_and_forward_pass_count(ranks2):
    def run():
        return watch(
            [1.0, 1.0],
            [1.0, 1.0],
            others=[lambda clock: Slow(clock, 1), lambda clock: ModelCheckpoint(every=1)],
            validate=True,
            val_every=3,
            max_epochs=2,
            samples=12,
            checkpointing=True,
        )

    (found, metrics, messages, _), _ = ranks2(run, timeout=60)
    assert (found, messages) == ({}, [])
    assert metrics == {"slow_rank/data": pytest.approx(1.0), "slow_rank/forward": 1.0}


def test_unequal_numbers_of_batches_hang_nobody(ranks2):
    results = ranks2(lambda: watch([1.0, 1.0], [1.0, 1.0], samples=5, log_every=1), timeout=60)
    assert results[0][0] == results[1][0]


def test_one_process_compares_nothing():
    detector = SlowRankDetector()
    trainer = Trainer(
        cpu=True,
        max_epochs=1,
        progress_bar=False,
        checkpointing=False,
        log_every=1,
        callbacks=[detector],
    )
    trainer.fit(Line(Clock(), [1.0]), DataLoader(Data(Clock(), 1.0, 4)))
    assert detector.slow == []
    assert trainer.callback_metrics == {}


class Event:
    """An event on a time line of which the host knows what has passed."""

    line = SimpleNamespace(now=0.0, passed=0.0)

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == torch.device("cuda", 0)
        self.at = self.line.now

    def query(self):
        return self.at <= self.line.passed

    def synchronize(self):
        raise AssertionError("nobody may wait for the device")

    def elapsed_time(self, end):
        assert end.query()
        return (end.at - self.at) * 1e3


def test_pending_device_events_are_read_later(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    line = Event.line = SimpleNamespace(now=0.0, passed=0.0)
    watch = slow_rank_detector._Stopwatch(torch.device("cuda", 0))
    for seconds in (1.0, 2.0, 4.0):
        watch.start()
        line.now += seconds
        watch.stop()
        line.now += 100.0
        line.passed = 1.5
    assert (watch.seconds, watch.count) == (1.0, 1)
    line.passed = math.inf
    watch.reset()
    watch.stop()  # without a start: nothing
    watch.start()
    watch.stop()
    assert (watch.seconds, watch.count) == (6.0, 3)
