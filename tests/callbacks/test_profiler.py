import gzip
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from callbacks import Callback, LambdaCallback, ModelCheckpoint, Profiler
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer
from trainer import Preempted


class Traced(Line):
    def training_step(self, batch, batch_idx):
        with torch.profiler.record_function(f"user step {self.global_step}"):
            return super().training_step(batch, batch_idx)


def make(*callbacks, **options):
    return quiet_trainer(**{"max_epochs": 1, "callbacks": list(callbacks)} | options)


def fit(profiler, *callbacks, batches=12, **options):
    make(profiler, *callbacks, **options).fit(Traced(), loader(2 * batches))


def steps_in(trace):
    """The updates that a trace has seen."""
    with gzip.open(trace, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return sorted({int(name.split()[-1]) for name in names if name.startswith("user step")})


def running():
    return torch.autograd._profiler_enabled()


class Seeing(Callback):
    """Whether the profiler records, in every micro-batch."""

    def __init__(self):
        self.recording = []

    def on_before_backward(self, trainer, module, loss):
        self.recording.append(running())


def test_the_updates_of_the_schedule_are_recorded_and_no_other():
    profiler, seeing = Profiler(wait=2, warmup=1, active=3), Seeing()
    fit(profiler, seeing)
    assert sorted(os.listdir("run/profile")) == [
        "operators-step-00000006-rank-00000.txt",
        "trace-step-00000006-rank-00000.json.gz",
    ]
    assert profiler.traces == [
        Path("run/profile/trace-step-00000006-rank-00000.json.gz").absolute()
    ]
    assert steps_in(profiler.traces[0]) == [3, 4, 5]
    assert seeing.recording[6:] == [False] * 6


def test_every_cycle_is_a_recording():
    profiler = Profiler("out", wait=1, warmup=1, active=1, repeat=3)
    fit(profiler)
    assert [steps_in(trace) for trace in profiler.traces] == [[2], [5], [8]]
    assert {trace.parent for trace in profiler.traces} == {Path("out").absolute()}
    assert not running()


def test_an_update_is_recorded_with_all_of_its_micro_batches():
    profiler, seeing = Profiler(wait=0, warmup=1, active=1), Seeing()
    fit(profiler, seeing, gradient_accumulation_steps=3)
    assert steps_in(profiler.traces[0]) == [1]
    assert seeing.recording[6:] == [False] * 6
    with gzip.open(profiler.traces[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(e.get("name") == "user step 1" and e.get("ph") == "X" for e in events) == 3


def test_the_table_has_the_top_operators_and_is_printed(capsys):
    fit(Profiler(wait=0, warmup=1, active=2, top_operators=3, record_shapes=True))
    with open("run/profile/operators-step-00000003-rank-00000.txt") as file:
        table = file.read()
    assert "Self CPU" in table
    assert "Input Shapes" in table
    body = table.split("\n---")[1:] if "\n---" in table else table.split("---\n")
    rows = [line for part in body for line in part.splitlines() if "  " in line.strip()]
    assert len([row for row in rows if "%" in row and "Self" not in row]) == 3
    assert table in capsys.readouterr().out


def test_a_run_that_ends_within_a_recording_writes_what_there_is():
    profiler = Profiler(wait=1, warmup=1, active=50)
    fit(profiler, batches=4)
    assert steps_in(profiler.traces[0]) == [2, 3]
    assert not running()


@pytest.mark.parametrize(("wait", "warmup"), [(10, 1), (1, 10), (1, 3)])
def test_a_run_that_ends_before_writes_nothing(wait, warmup):
    profiler = Profiler(wait=wait, warmup=warmup)
    fit(profiler, batches=4)
    assert profiler.traces == []
    assert not running()
    assert not os.path.exists("run/profile")


def fail(trainer):
    raise KeyError("stop")


def preempt(trainer):
    signal.raise_signal(signal.SIGTERM)


def at(index, action):
    """Calls the action at the end of a batch."""
    return LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: (
            action(trainer) if batch_idx == index else None
        )
    )


@pytest.mark.parametrize("index", [0, 2, 4])
def test_an_error_leaves_no_profiler_and_no_file(index):
    profiler = Profiler(wait=1, warmup=1, active=2)
    with pytest.raises(KeyError, match="stop"):
        fit(profiler, at(index, fail))
    assert not running()
    assert len(profiler.traces) == (1 if index == 4 else 0)
    fit(profiler, project_dir="again")
    assert steps_in(profiler.traces[0]) == [2, 3]


def test_an_error_in_the_writing_leaves_no_profiler(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        fit(Profiler(tmp_path / "file", wait=0, warmup=1, active=1))
    assert not running()


@pytest.mark.parametrize("index", [1, 3])
def test_a_signal_within_a_recording_writes_what_there_is(index):
    """Also where only the update that it comes behind was recorded."""
    profiler = Profiler(wait=1, warmup=1, active=50)
    with pytest.raises(Preempted):
        fit(profiler, at(index, preempt))
    assert steps_in(profiler.traces[0]) == list(range(2, index + 2))
    assert not running()


def test_a_resumed_run_counts_its_own_updates_and_may_have_none_left():
    options = {"max_epochs": None, "max_steps": 4}
    fit(Profiler("first", wait=1, warmup=1, active=1), ModelCheckpoint(), **options)
    again = Profiler("second", wait=1, warmup=1, active=1)
    trainer = make(again, ModelCheckpoint(), **(options | {"max_steps": 8}))
    trainer.fit(Traced(), loader(24), ckpt_path="last")
    assert steps_in(again.traces[0]) == [6]
    done = Profiler("third", wait=1, warmup=1, active=1)
    make(done, ModelCheckpoint(), **(options | {"max_steps": 8})).fit(
        Traced(), loader(24), ckpt_path="last"
    )
    assert done.traces == []
    assert not running()


def test_profiling_changes_no_weights():
    weights = []
    for callbacks in ([], [Profiler(wait=1, warmup=1, active=2)]):
        torch.manual_seed(0)
        module = Traced()
        make(*callbacks, project_dir=f"run{len(weights)}").fit(module, loader(24))
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


def on_ranks(all_ranks):
    profiler = Profiler(wait=0, warmup=1, active=1, all_ranks=all_ranks)
    fit(profiler)
    return [path.name for path in profiler.traces], running()


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_main_process_or_all_are_recorded(ranks2, all_ranks):
    traces = [[f"trace-step-00000002-rank-0000{rank}.json.gz"] for rank in range(2)]
    expected = traces if all_ranks else [traces[0], []]
    assert ranks2(on_ranks, all_ranks, timeout=60) == [(names, False) for names in expected]
    assert len(os.listdir("run/profile")) == (4 if all_ranks else 2)


def test_a_trial_records_nothing(tmp_path):
    profiler = Profiler(tmp_path / "out", wait=0, warmup=1, active=1)
    fit(profiler, fast_dev_run=3, max_epochs=None)
    assert profiler.traces == []
    assert not (tmp_path / "out").exists()
