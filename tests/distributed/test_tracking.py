"""Trackers among several processes: who has one, and who hears of its failure."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.ranks import RankError
from trackers import GeneralTracker
from trainer import PartialState, Trainer, TrainModule
from trainer.distributed.objects import all_gather_object
from trainer.tracking import RunTrackers, on_main_process


class Listed(GeneralTracker):
    name = "listed"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name):
        self.seen = [run_name]

    @property
    def tracker(self):
        return self.seen

    def store_init_configuration(self, values):
        self.seen.append(values)

    def log(self, values, step):
        self.seen.append((values["rank"], step))

    def finish(self):
        self.seen.append(self.status)


class Everywhere(Listed):
    name = "everywhere"
    main_process_only = False


def seen_by(log_with, *, on_main_alone=False):
    """A loop as scripts write it; what each tracker of this process has seen, None without it."""
    state = PartialState(cpu=True)
    tracking = RunTrackers(log_with, "logs")
    if state.is_main_process or not on_main_alone:
        tracking.init_trackers("project", {"lr": 1})
    all_gather_object(None)  # what was called before was no collective, or one of all processes
    for step in range(2):
        tracking.log({"rank": state.process_index}, step)
    tracking.log({"image": torch.zeros(1, 2, 2)}, step=1, method="log_images")
    tracking.record("log_table", "table", ["a"], [[1]])
    names = [one.name for one in log_with]
    assert [tracking.get_tracker(name).name for name in names] == names
    objects = [tracking.get_tracker(name, unwrap=True) for name in names]
    tracking.end_training()
    return [one or None for one in objects]


def full(rank):
    return ["project", {"lr": 1}, (rank, 0), (rank, 1), "finished"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_trackers_run_on_the_main_process_or_on_each(ranks, size):
    def both():
        return seen_by([Listed, Everywhere])

    assert ranks(size)(both) == [
        [full(rank) if rank == 0 else None, full(rank)] for rank in range(size)
    ]


def test_init_trackers_may_be_called_on_the_main_process_alone(ranks2):
    def alone():
        return seen_by([Listed], on_main_alone=True)

    assert ranks2(alone) == [[full(0)], [None]]


def test_on_main_process_constructs_a_tracker_on_the_main_process_only(ranks2):
    class Mine(Listed):
        @on_main_process
        def __init__(self, run_name):
            super().__init__(run_name)

    def instances():
        PartialState(cpu=True)
        mine = Mine("project")
        return getattr(mine, "seen", None), seen_by([mine])

    assert ranks2(instances) == [(full(0), [full(0)]), (None, [None])]


def test_a_tracker_that_fails_to_start_raises_on_all_ranks(ranks4):
    class Failing(Listed):
        def __init__(self, run_name):
            raise ConnectionError("no server")

    def fails():
        PartialState(cpu=True)
        RunTrackers([Everywhere, Failing], None).init_trackers("project")

    with pytest.raises(RankError) as caught:
        ranks4(fails)
    failures = caught.value.failures
    assert "ConnectionError: no server" in failures[0]
    for rank in (1, 2, 3):
        assert (
            "RuntimeError: Rank 0 failed while the others waited for it: "
            "ConnectionError: no server" in failures[rank]
        )


def test_logging_before_init_trackers_raises_on_the_main_process_only(ranks2):
    def early():
        PartialState(cpu=True)
        tracking = RunTrackers([Listed], None)
        try:
            tracking.log({"rank": 0})
        except RuntimeError as error:
            return str(error)
        return bool(tracking.get_tracker("listed", unwrap=True).run.id)

    first, second = ranks2(early)
    assert "call init_trackers" in first
    assert second is False


def test_tensorboard_writes_one_run(ranks2, tmp_path):
    def write():
        state = PartialState(cpu=True)
        tracking = RunTrackers("tensorboard", tmp_path)
        tracking.init_trackers("project", {"lr": 0.1})
        for step in range(3):
            tracking.log({"loss": torch.tensor(step + 10.0 * state.process_index)}, step=step)
        tracking.get_tracker("tensorboard", unwrap=True).add_scalar("own", 1.0, 7)
        tracking.end_training()

    ranks2(write)
    (file,) = (tmp_path / "project").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(0, 0), (1, 1), (2, 2)]
    assert [(one.step, one.value) for one in events.Scalars("own")] == [(7, 1)]


class Net(TrainModule):
    def __init__(self, error):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None:
            raise self.error
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (ValueError("bad"), "failed"), (KeyboardInterrupt(), "failed")],
)
def test_a_tracker_gets_the_status_of_the_run(ranks2, error, status):
    def fit():
        tracker = Listed("run")
        trainer = Trainer(
            max_epochs=1,
            cpu=True,
            progress_bar=False,
            checkpointing=False,
            log_with=tracker,
            project_dir="run",
        )
        expected = nullcontext() if error is None else pytest.raises(type(error))
        with expected:
            trainer.fit(Net(error), [torch.ones(2, 1)] * 4)
        return tracker.seen[-1]

    assert ranks2(fit) == [status, "run"]


def test_a_run_that_fails_at_start_up_is_recorded_as_failed(ranks2, tmp_path):
    def fit():
        tracker = Listed("run")
        trainer = Trainer(
            max_epochs=1, cpu=True, progress_bar=False, log_with=tracker, project_dir=tmp_path
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", no_connection)  # when the trackers have started
            with pytest.raises(ConnectionError):
                trainer.fit(Net(None), [torch.ones(2, 1)] * 4)
        return tracker.seen[-1]

    assert ranks2(fit) == ["failed", "run"]
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (start["status"], start["error"]) == ("failed", "ConnectionError: gone")


def no_connection(**_):
    raise ConnectionError("gone")
