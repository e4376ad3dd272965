"""Profile the CPU and the accelerator during a few updates, with torch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, schedule

from callbacks.base import Callback
from trainer.checks import check_counts
from trainer.files import absolute_folder, regular

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


class Profiler(Callback):
    """Profile a few updates of a ``fit`` with ``torch.profiler`` and write the results.

    The schedule counts the updates since this start: ``wait`` updates are skipped, ``warmup`` warm
    up the profiler and ``active`` are recorded; this is repeated ``repeat`` times, and then the
    profiler is off. An update includes all of its micro-batches, its data loading, and validations
    or saves after it.

    Every recording writes two files, named after its last update:
    ``trace-step-00000005-rank-00000.json.gz`` for https://ui.perfetto.dev or ``chrome://tracing``,
    and ``operators-….txt``, a table of the operators that took longest, which is also printed. If
    the run ends during a recording, the incomplete recording is written. If the run fails, nothing
    is written. With ``fast_dev_run`` nothing is recorded.

    Example::

        trainer = Trainer(max_steps=20, callbacks=[Profiler(wait=5, warmup=2, active=3)])

    Args:
        dirpath: The folder, by default ``profile`` in the Trainer's ``project_dir``.
        wait: Updates to skip before each recording, because the first ones compile and allocate.
        warmup: Updates that warm up the profiler, at least 1.
        active: Updates to record.
        repeat: The number of recordings.
        all_ranks: Record every process, each to its own files; otherwise only the main process.
        top_operators: The number of rows in the table of operators.
        record_shapes: Record the shapes of inputs, and group operators by them.
        profile_memory: Record the memory that operators allocate.
        with_stack: Record source lines; slow.
        with_flops: Estimate the FLOPs of matrix products and convolutions.

    Attributes:
        traces: The traces that this process has written.

    Raises:
        ValueError: If a number is invalid.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        all_ranks: bool = False,
        top_operators: int = 20,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        check_counts(0, wait=wait)
        check_counts(1, warmup=warmup, active=active, repeat=repeat)
        check_counts(1, top_operators=top_operators)
        self.dirpath = absolute_folder(dirpath)
        self.all_ranks = all_ranks
        self.top_operators = top_operators
        self.traces: list[Path] = []
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self._options = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self._prefix, self._exports = "", True  # settings for subclasses: names, traces
        self._grouped = record_shapes
        self._table: dict[str, Any] = {}
        self._profile: profile | None = None  # only while it warms up or records
        self._updates: int | None = None  # since this start; None if nothing is recorded

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start counting updates."""
        self.traces, self._updates = [], None
        if not trainer.fast_dev_run and (self.all_ranks or trainer.accelerator.is_main_process):
            self._updates = 0
            self._begin_if_due()

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Count an update, and start or stop the profiler if due."""
        if self._updates is None:
            return
        self._updates += 1
        if self._profile is not None:
            # If its `step` fails, the profiler cannot be stopped.
            running, self._profile = self._profile, None
            running.step()
            self._profile = running
            if running.step_num == self.warmup + self.active:
                self._stop(trainer)
        self._begin_if_due()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Write a recording that is incomplete at the end of the run."""
        self._stop(trainer)

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """Count the update, as at a boundary, and write an incomplete recording."""
        self.on_boundary(trainer, module)
        self._stop(trainer)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop a profiler that an error left running."""
        self._stop(None)

    def _begin_if_due(self) -> None:
        """Start a new profiler when a cycle's wait is over."""
        cycle, position = divmod(self._updates or 0, self.wait + self.warmup + self.active)
        if position == self.wait and cycle < self.repeat:
            self._profile = profile(
                schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
                acc_events=True,  # otherwise torch 2.11 warns that events are discarded
                **self._options,  # type: ignore[arg-type]  # all of them are bool
            )
            self._profile.start()

    def _stop(self, trainer: Trainer | None) -> None:
        """Stop the profiler and, given a trainer, write what was recorded, if anything."""
        if self._profile is not None:
            stopped, self._profile = self._profile, None
            stopped.stop()
            if trainer is not None and stopped.step_num > self.warmup:
                self._write(stopped, trainer)

    def _write(self, finished: profile, trainer: Trainer) -> None:
        folder = self.dirpath or trainer.project_dir / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.accelerator.process_index
        name = f"step-{trainer.global_step:08d}-rank-{rank:05d}"
        where = "cpu" if trainer.accelerator.device.type == "cpu" else "device"
        averages = finished.key_averages(group_by_input_shape=self._grouped)
        shown = {"sort_by": f"self_{where}_time_total", "row_limit": self.top_operators}
        text = averages.table(**shown | self._table)
        operators = folder / f"{self._prefix}operators-{name}.txt"
        with open(operators, "w", encoding="utf-8", opener=regular) as file:
            file.write(text)
        if self._exports:
            trace = folder / f"{self._prefix}trace-{name}.json.gz"
            finished.export_chrome_trace(str(trace))
            self.traces.append(trace)
            text += f"\nThe trace is in {trace}."
        trainer.accelerator.print(text)
