"""The cost of callbacks, logged metrics and trackers on the training thread."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import contestants, services
from benchmarks.report import Result
from benchmarks.task import Task
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns
from callbacks import Callback
from trackers import BackgroundTracker, GeneralTracker, JsonlTracker, TensorBoardTracker

STEPS, REPEATS = 500, 10
METRICS = (10, 100, 1000)
QUIET = {"log_with": None, "progress_bar": False, "checkpointing": False}


class Silent(Callback):
    """Override the hooks of a step and do nothing in them."""

    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        """Nothing."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Nothing."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing."""

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        """Nothing."""


class Counting(Callback):
    """Do about the least that a callback can do, once per step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        """Count the step."""
        self.steps += 1


def turn(steps: int, *, metrics: int = 0, callbacks: Callable[[], list[Callback]] = list) -> Lap:
    """Run one fit without progress bar, trackers and checkpoints."""
    task = Task(steps)
    contestants.defaults(task, metrics=metrics, callbacks=callbacks(), **QUIET)
    return task.lap()


def callback_rows(steps: int) -> list[Contender]:
    """Return the contenders with no callback and with a hundred."""
    kinds: dict[str, Callable[[], list[Callback]]] = {
        "no callback": list,
        "100 callbacks that override no hook": lambda: [Callback() for _ in range(100)],
        "100 callbacks with 4 empty hooks per step": lambda: [Silent() for _ in range(100)],
        "100 callbacks that count the steps": lambda: [Counting() for _ in range(100)],
    }
    return [
        Contender(name=name, run=partial(turn, steps, callbacks=make))
        for name, make in kinds.items()
    ]


def metric_rows(steps: int) -> list[Contender]:
    """Return the contenders by number of metrics, logged in each step and written every 50."""
    return [
        Contender(name=f"{1 + number} metrics per step", run=partial(turn, steps, metrics=number))
        for number in (0, *METRICS)
    ]


@contextmanager
def summary_writer(folder: Path) -> Iterator[Callable[[int], None]]:
    """Yield a call of TensorBoard's own writer."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        yield lambda step: writer.add_scalar("train/loss", 0.5, step)


@contextmanager
def tracker(
    make: Callable[[Path], GeneralTracker], folder: Path
) -> Iterator[Callable[[int], None]]:
    """Yield a call of one of Cadence's trackers, in the background as in a `Trainer`."""
    background = BackgroundTracker(make(folder), capacity=1_000_000)
    background.start()
    try:
        yield lambda step: background.log({"train/loss": 0.5}, step)
    finally:
        background.finish()


def calls(steps: int, log: Callable[[Path], Any], *, pause: float = 0.0) -> Lap:
    """Time `steps` calls that log; the pause after each is not counted."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        call = stack.enter_context(log(Path(name)))
        wall = cpu = 0.0
        for step in range(steps):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            call(step)
            wall += time.perf_counter() - begin
            cpu += time.thread_time() - begin_cpu
            time.sleep(pause)
        return Lap(wall=wall / steps, cpu=cpu / steps)


def tracker_rows(steps: int) -> list[Contender]:
    """Return the contenders that log one number, directly and through the queue."""
    kinds: dict[str, Any] = {
        "SummaryWriter.add_scalar": summary_writer,
        "Cadence, TensorBoard": partial(tracker, lambda folder: TensorBoardTracker("r", folder)),
        "Cadence, JSONL": partial(tracker, lambda folder: JsonlTracker(folder / "r.jsonl")),
    }
    needs = {"SummaryWriter.add_scalar": ("tensorboard",), "Cadence, TensorBoard": ("tensorboard",)}
    return [
        Contender(name=name, run=partial(calls, steps, log), needs=needs.get(name, ()))
        for name, log in kinds.items()
    ]


def service_rows(steps: int) -> list[Contender]:
    """Return the contenders that log to CSV, TensorBoard, W&B and Comet, the last two offline."""
    kinds: dict[str, Any] = {
        "the four, called directly": services.sdks,
        "Cadence, Accelerator.log": services.accelerator_log,
        "Cadence, Trainer": services.trainer_record,
    }
    needs = ("tensorboard", "wandb", "comet_ml")
    return [
        # The pause stands for a step, during which the threads of the trackers can work.
        Contender(name=name, run=partial(calls, steps, log, pause=0.002), needs=needs)
        for name, log in kinds.items()
    ]


GROUPS: dict[str, Callable[[int], list[Contender]]] = {
    "callbacks, per step": callback_rows,
    "metrics, per step": metric_rows,
    "trackers, per call on the calling thread": tracker_rows,
    "four numbers to TensorBoard, W&B, Comet and a CSV, offline": service_rows,
}


def names() -> list[str]:
    """Return the names of all rows."""
    return [contender.name for make in GROUPS.values() for contender in make(STEPS)]


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    found = []
    for group, make in GROUPS.items():
        contenders = chosen(make(options.steps), options.rows)
        found += take_turns(contenders, options.repeats, group=group)
    return Result(
        benchmark="logging",
        title="Time per step with callbacks and metrics, and per logging call",
        columns=MICROSECONDS,
        rows=found,
        settings={"steps": options.steps, "repeats": options.repeats},
        notes=[f"torch {torch.__version__}; metrics are tensors of one element."],
    )
