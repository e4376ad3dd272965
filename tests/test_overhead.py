"""What a step costs beside torch's own work, counted so that no machine's speed matters (P9).

Counted are the calls of Python functions in our packages on the training thread, also each time
that a generator goes on, and the calls that these make of anything else: Python's and torch's
functions, and those in C. A ceiling is a little above the number that was counted; whoever comes to
it looks for what can be decided once instead of at each step, or says in a commit why the step has
to do more.
"""

from __future__ import annotations

import gc
import io
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint, ProgressBar
from callbacks import progress_bar as bars
from trainer import Accelerator, Trainer, TrainModule
from trainer.loops.recorder import Recorder

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("trainer", "callbacks", "trackers"))
PERIOD = 50  # updates between two records


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))


class Module(TrainModule):
    """Logs as many metrics as it is told."""

    def __init__(self, metrics=1):
        super().__init__()
        self.net = model()
        self.metrics = [f"loss/{number}" for number in range(metrics)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        for name in self.metrics:
            self.log(name, loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Count:
    """Counts calls between the beginnings of two updates."""

    def __init__(self, start, stop):
        self.calls = Counter()  # by their code
        self.outside = Counter()  # by the code of ours that makes them, and what it calls
        self._start, self._stop = start, stop
        self._updates = stop - start

    def begin(self, update):
        """An update begins, or a batch of a loop of one's own."""
        if update == self._start:
            sys.setprofile(self._event)
        elif update == self._stop:
            sys.setprofile(None)

    def _event(self, frame, event, function):
        if event == "call":
            if is_ours(frame):
                self.calls[frame.f_code] += 1
            elif frame.f_back is not None and is_ours(frame.f_back):
                self.outside[frame.f_back.f_code, frame.f_code.co_name] += 1
        elif event == "c_call" and is_ours(frame):
            self.outside[frame.f_code, function.__name__] += 1

    @property
    def per_step(self):
        return self.calls.total() / self._updates

    @property
    def outside_per_step(self):
        return self.outside.total() / self._updates


def is_ours(frame):
    return frame.f_code.co_filename.startswith(OURS)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def data(batches):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * batches, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.argmax(1) % 2), 8, shuffle=True)


def fitted(monkeypatch, module, *, period=PERIOD, **kwargs):
    """Calls of a run on a terminal whose clock stands, from one record to the next."""
    count = Count(period, 2 * period)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(bars, "monotonic", lambda: 0.0)
    step = module.training_step

    def training_step(batch, batch_idx):
        count.begin(batch_idx)
        return step(batch, batch_idx)

    module.training_step = training_step
    folder = f"run-{id(count)}"
    trainer = Trainer(cpu=True, max_epochs=1, project_dir=folder, log_every=period, **kwargs)
    trainer.fit(module, data(2 * period + 1))
    assert trainer.global_step == 2 * period + 1
    return count


def accelerated():
    """Calls in a loop of one's own, over an accelerator's loader."""
    count = Count(PERIOD, 2 * PERIOD)
    accelerator = Accelerator(cpu=True)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer, loader = accelerator.prepare(module, optimizer, data(2 * PERIOD + 1))
    for number, (x, y) in enumerate(loader):
        count.begin(number)
        with accelerator.accumulate(module):
            loss = torch.nn.functional.cross_entropy(module(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return count


def most_common(count):
    return "\n".join(
        f"{number / PERIOD:6.1f} {code.co_name} {code.co_filename}:{code.co_firstlineno}"
        for code, number in count.calls.most_common()
    )


def most_common_outside(count):
    return "\n".join(
        f"{number / PERIOD:6.1f} {name} in {code.co_name} {code.co_filename}:{code.co_firstlineno}"
        for (code, name), number in count.outside.most_common()
    )


def test_calls_a_step_with_everything_off(monkeypatch):
    count = fitted(monkeypatch, Module(), barebones=True)
    assert count.per_step <= 67, most_common(count)
    assert count.outside_per_step <= 49, most_common_outside(count)


def test_calls_a_step_without_bar_and_checkpoints(monkeypatch):
    """Gradients are still checked for NaN."""
    count = fitted(monkeypatch, Module(0), progress_bar=False, checkpointing=False)
    assert count.per_step <= 68, most_common(count)
    assert count.outside_per_step <= 53, most_common_outside(count)


def test_calls_a_step_by_default(monkeypatch):
    """With a progress bar, metrics, checkpoints, the local record and TensorBoard."""
    pytest.importorskip("tensorboard")
    count = fitted(monkeypatch, Module(), log_with="tensorboard")
    assert count.calls[ProgressBar.on_train_batch_end.__code__] == PERIOD
    assert count.calls[ModelCheckpoint.on_boundary.__code__] == PERIOD
    assert count.calls[Recorder.record_later.__code__] == 1
    assert count.per_step <= 90, most_common(count)
    assert count.outside_per_step <= 75, most_common_outside(count)


def test_calls_a_step_in_a_loop_of_ones_own():
    count = accelerated()
    assert count.per_step <= 35, most_common(count)
    assert count.outside_per_step <= 41, most_common_outside(count)


class Idle(Callback):
    """Overrides no hook."""

    @property
    def state_key(self):
        return f"{type(self).__name__} {id(self)}"


def test_callbacks_without_hooks_cost_nothing(monkeypatch):
    without, many = (
        fitted(monkeypatch, Module(), callbacks=[Idle() for _ in range(number)])
        for number in (0, 100)
    )
    assert many.calls == without.calls


def test_metrics_cost_alike_however_many_there_are(monkeypatch):
    one, hundred, thousand = (
        fitted(monkeypatch, Module(number), period=5).calls.total() for number in (1, 100, 1000)
    )
    each = (hundred - one) / 99
    assert (thousand - hundred) / 900 == pytest.approx(each)


def traced(monkeypatch, callback, updates):
    """A run on a terminal under tracemalloc."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(bars, "monotonic", lambda: 0.0)
    trainer = Trainer(cpu=True, max_epochs=1, project_dir="run", callbacks=[callback])
    tracemalloc.start()
    try:
        trainer.fit(Module(), data(updates))
    finally:
        tracemalloc.stop()


def test_a_long_run_takes_no_more_memory(monkeypatch):
    """Nothing stays of each of 1,000 further updates, of what our own lines have allocated.

    Some records may be on their way to the disk, more of them on a busy machine; a number kept of
    each update would be 24,000 bytes.
    """
    taken = []

    class Look(Callback):
        def on_boundary(self, trainer, module):
            if trainer.global_step in (300, 1300):
                gc.collect()
                snapshot = tracemalloc.take_snapshot()
                ours = [tracemalloc.Filter(True, f"{path}*") for path in OURS[:2]]
                taken.append(snapshot.filter_traces(ours))

    traced(monkeypatch, Look(), 1400)
    before, after = taken
    grown = after.compare_to(before, "lineno")
    assert sum(each.size_diff for each in grown) < 5000, "\n".join(map(str, grown[:10]))


def test_what_a_step_allocates_for_a_while(monkeypatch):
    """The most that Python's memory grows by from one boundary to the next, torch's included."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        pytest.skip("coverage allocates with each line that it sees for the first time")
    taken = []

    class Look(Callback):
        def on_boundary(self, trainer, module):
            now, peak = tracemalloc.get_traced_memory()
            taken.append(peak - self.before)
            tracemalloc.reset_peak()
            self.before = now

        before = 0

    traced(monkeypatch, Look(), 2 * PERIOD)
    assert median(taken) <= 2500  # threads of trackers take some now and then
