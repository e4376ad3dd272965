import json
import logging
import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import SpikeDetection
from tests.helpers.stand_in import TrainerStandIn
from tests.numerics.running import on_processes, quiet_trainer
from trainer import TrainModule

STEADY = [1.0, 1.1, 0.9, 1.05, 0.95]  # median 1.0, its MAD 0.05


def spikes(values, **arguments):
    """The steps (from 1) at which there was a spike."""
    callback = SpikeDetection("loss", **({"warmup": 5, "window": 5} | arguments))
    trainer = TrainerStandIn(callbacks=[callback])
    trainer.start()
    found = []
    for step, value in enumerate(values, 1):
        trainer.updates([value])
        if callback.last_spike_step == step:
            found.append(step)
    assert callback.num_spikes == len(found)
    return found


@pytest.mark.parametrize(
    ("values", "arguments", "steps"),
    [
        ([*STEADY, 1.5], {}, [6]),
        ([*STEADY, 1.0 + 6 * 1.4826 * 0.05 + 1e-6], {}, [6]),
        ([*STEADY, 1.0 + 6 * 1.4826 * 0.05 - 1e-6], {}, []),
        ([*STEADY, 1.2], {"deviations": 2.0}, [6]),
        ([*STEADY, 1.2], {"deviations": 2.0, "rtol": 0.3}, []),
        ([*STEADY, 1.2], {"deviations": 2.0, "atol": 0.3}, []),
        ([*STEADY, 1.31], {"deviations": 0, "rtol": 0.3}, [6]),
        ([*STEADY, 1.31], {"deviations": 0, "rtol": 0, "atol": 0.3}, [6]),
        ([*STEADY, 1.31], {"deviations": 0, "rtol": 0, "atol": 0.32}, []),
        ([*STEADY, 0.1], {}, []),
        ([*STEADY, 0.1], {"mode": "max"}, [6]),
        ([*STEADY, 1.5], {"mode": "max"}, []),
        ([-value for value in STEADY] + [-0.5], {}, [6]),
        ([2.0] * 5 + [2.1, 2.3], {}, [7]),  # no spread at all: a tenth of the median
        ([-1.0] * 5 + [-0.95, -0.85], {}, [7]),
        ([1.0] * 4 + [5.0], {}, []),  # the warm-up
        ([1.0] * 3 + [5.0], {"warmup": 3}, [4]),
        ([*STEADY, 1.5], {"window": 5.0, "warmup": 5.0}, [6]),  # whole numbers, as 1e2 is
        ([1.0] * 5 + [9.0] * 4, {}, [6, 7, 8]),  # a new level becomes the normal one
        ([1.0, None, 1.0, 1.0, None, 1.0, 1.0, 5.0, None], {}, [8]),
        ([math.nan, *STEADY, math.inf], {}, [1, 7]),
        ([math.nan, *STEADY, math.inf, 1.5], {"check_finite": False}, [8]),
    ],
)
def test_spikes_at(values, arguments, steps):
    assert spikes(values, **arguments) == steps


def test_the_window_forgets():
    assert spikes([9.0] * 5 + [1.0] * 5 + [5.0], window=5) == [11]
    assert spikes([9.0] * 5 + [1.0] * 5 + [5.0], window=10) == []


@pytest.mark.parametrize(
    ("action", "patience", "stopped"),
    [("log", 1, None), ("stop", 1, 6), ("stop", 2, 9), ("stop", 3, 13)],
)
def test_stops_after_patience_spikes_in_a_row(action, patience, stopped):
    values = [1.0] * 5 + [9.0, 1.0, 9.0, math.inf, 1.0, 9.0, math.nan, math.nan]
    callback = SpikeDetection("loss", warmup=5, window=20, action=action, patience=patience)
    trainer = TrainerStandIn(callbacks=[callback])
    trainer.start()
    at = None
    for step, value in enumerate(values, 1):
        trainer.updates([value])
        if trainer.should_stop and at is None:
            at = step
    assert at == stopped


def test_a_spike_is_logged_once_on_the_main_process(caplog):
    for main in (True, False):
        callback = SpikeDetection("loss", warmup=5, action="stop")
        trainer = TrainerStandIn(callbacks=[callback])
        trainer.accelerator.is_main_process = main
        with caplog.at_level(logging.WARNING):
            trainer.updates([*STEADY, 1.75])
        assert trainer.should_stop
    (record,) = caplog.records
    assert record.message == f"Step 6: {callback.reason}. The run stops."
    assert "loss = 1.75 is a spike: more than 0.445 worse than 1, the median" in record.message


@pytest.mark.parametrize("cut", range(1, 12))
def test_resumed_decisions_equal_uninterrupted_ones(cut):
    values = [*STEADY, 3.0, math.nan, 0.9, 5.0, 5.0, 5.0, 5.0, 1.0]
    arguments = {"warmup": 4, "window": 6, "action": "stop", "patience": 3}
    whole = SpikeDetection("loss", **arguments)
    TrainerStandIn(callbacks=[whole]).updates(values)
    first, second = SpikeDetection("loss", **arguments), SpikeDetection("loss", **arguments)
    TrainerStandIn(callbacks=[first]).updates(values[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trainer = TrainerStandIn(callbacks=[second], global_step=cut)
    trainer.start()
    trainer.updates(values[cut:])
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())
    assert whole.num_spikes > 2


def test_a_smaller_window_takes_the_latest_values():
    first = SpikeDetection("loss")
    TrainerStandIn(callbacks=[first]).updates([float(value) for value in range(20)])
    second = SpikeDetection("loss", window=10)
    second.load_state_dict(first.state_dict())
    assert second.window_values == list(range(10, 20))


def test_a_new_run_resets_the_state():
    callback = SpikeDetection("loss", warmup=5)
    TrainerStandIn(callbacks=[callback]).updates([*STEADY, 9.0])
    TrainerStandIn(callbacks=[callback]).start()
    assert callback.state_dict() == SpikeDetection("loss").state_dict()


class Line(TrainModule):
    """Its loss is the mean of the batch; one sample alone, of one process, is wild."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.weight * batch[0]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(log_every: int, accumulation: int) -> tuple[Any, ...]:
    values = torch.ones(80)
    values[57] = 1000.0
    callback = SpikeDetection("loss", warmup=4, window=8, action="stop")
    trainer = quiet_trainer(
        max_epochs=1,
        callbacks=[callback],
        log_every=log_every,
        gradient_accumulation_steps=accumulation,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(values), batch_size=2))
    return trainer.global_step, callback.last_spike_step, callback.window_values


@pytest.mark.parametrize(
    ("world", "log_every", "accumulation", "step"),
    [(1, 1, 1, 29), (1, 1, 2, 15), (2, 1, 1, 15), (2, 1, 2, 8), (1, 4, 1, None)],
)
def test_all_processes_stop_at_the_spike_of_one(ranks, world, log_every, accumulation, step):
    results = on_processes(ranks, world, fit, log_every, accumulation)
    assert all(result == results[0] for result in results)
    updates = -(-40 // (world * accumulation))
    assert results[0][:2] == (step or updates, step)


def test_a_metric_that_is_never_logged_is_an_error():
    trainer = quiet_trainer(max_epochs=1, callbacks=[SpikeDetection("los")])
    with pytest.raises(ValueError, match=r"'los' was never logged.*Did you mean 'loss'"):
        trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(4)), batch_size=2))
