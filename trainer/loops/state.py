"""The state of one run: the objects and counters that the training and evaluation loops use.

`Run` serves validate, test and predict. `FitRun` adds what training needs. Both are created once,
before the loop begins, by `trainer.loops.setup`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from callbacks import Interval, Progress
from trainer.checkpoint.async_writer import Writer
from trainer.checkpoint.mirror import LOOKS, Mirror, Remote
from trainer.data.epoch_iterator import EpochIterator, GlobalBatch
from trainer.data.seeding import RunGenerators
from trainer.distributed.objects import broadcast_object
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.base import Engine
from trainer.hooks import HookTable
from trainer.loops.config import Schedule
from trainer.loops.device_transfer import DeviceTransfer
from trainer.loops.pending_saves import PendingSaves
from trainer.loops.preemption import Stopping
from trainer.loops.recorder import Recorder
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import Clipping
from trainer.optim.configure import SchedulerEntry
from trainer.optim.finite import FiniteGuard, is_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer, ParameterLists
from trainer.optim.weighting import LossWeighting
from trainer.precision import Precision

if TYPE_CHECKING:
    from trainer.loops.buffers import FrozenParameters
    from trainer.loops.dataloaders import FitLoaders
    from trainer.loops.lifecycle import RunContext, Stage
    from trainer.loops.manual import ManualOptimization
    from trainer.loops.module_flags import ModuleState
    from trainer.loops.optimizer_states import OptimizerStates


class Timing(Protocol):
    """Measures how much time each part of the loop takes."""

    def part(self, part: str) -> AbstractContextManager[None]:
        """Return a context manager that adds the time spent inside it to this part."""

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function and add its time to this part."""


class Untimed:
    """A no-op `Timing`."""

    def part(self, part: str) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Return a context manager that does nothing."""
        return nullcontext()

    # ARG002: an interface
    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:  # noqa: ARG002
        """Call the function; at every update this is faster than entering a context manager."""
        function(*args)


@dataclass
class Counters:
    """The progress counters of a fit; a checkpoint holds them.

    Attributes:
        global_step: Optimizer updates so far.
        epoch: The current epoch, from 0.
        epoch_global_batches: Global batches of the current epoch so far. A global batch has one
            batch per rank.
        epoch_batches: Batches in those global batches, over all processes.
        epoch_complete: Whether the current epoch is over.
        batches_seen: Micro-batches so far, over all processes.
        samples_seen: Samples so far, over all processes.
        validations: Validations so far, without the sanity check.
    """

    global_step: int = 0
    epoch: int = 0
    epoch_global_batches: int = 0
    epoch_batches: int = 0
    epoch_complete: bool = False
    batches_seen: int = 0
    samples_seen: int = 0
    validations: int = 0

    @property
    def shown_epoch(self) -> int:
        """The current epoch as messages print it, from 1 like progress bars."""
        return self.epoch + 1

    def begin_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.epoch_global_batches = self.epoch_batches = 0
        self.epoch_complete = False

    def count(self, micro_batch: GlobalBatch, dp_size: int) -> int | None:
        """Count one global batch of `dp_size` data shards.

        Returns:
            Its samples over all ranks; None if this rank does not know them.
        """
        self.epoch_global_batches += 1
        self.epoch_batches += micro_batch.batches
        self.epoch_complete = micro_batch.last
        self.batches_seen += micro_batch.batches
        self.samples_seen += (
            micro_batch.global_samples
            or micro_batch.real_samples
            or micro_batch.samples * micro_batch.batches
        )
        # A user's collate_fn may drop samples, which only the rank of the batch knows. Batches that
        # the dataset itself assembles are assumed to have the same size on other ranks.
        return micro_batch.samples if dp_size == 1 else micro_batch.global_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, except the one that depends on the number of processes."""
        values = asdict(self)
        del values["epoch_global_batches"]
        return values

    def load_state_dict(self, state: Mapping[str, Any], dp_size: int) -> None:
        """Restore the counters, for `dp_size` data shards."""
        vars(self).update(vars(Counters(**state)))
        self.epoch_global_batches = -(-self.epoch_batches // dp_size)


@dataclass(kw_only=True)
class Run:
    """One call of `Trainer.fit`, `validate`, `test` or `predict`.

    Attributes:
        stage: The module, the datamodule, the hooks, and the Trainer's arguments and components.
        metrics: Logged values that are not reduced yet.
        recorder: Receives the reduced values.
        engine: Runs the module and reduces its gradients.
        device_transfer: Brings batches to the device.
        counters: The progress of the fit. In an evaluation: that of the loaded checkpoint, or of
            the last fit.
        eval_iterators: The epoch iterators of the data to evaluate; in a fit those of the
            validation data, empty if there is none.
        batch_idx: The index of the current batch, as passed to the user's step.
        timing: Measures the parts of the loop that are not calls of the objects above; see
            `trainer.loops.profiler`.
    """

    stage: Final[Stage]
    metrics: Final[MetricStore]
    recorder: Final[Recorder]
    engine: Final[Engine]
    device_transfer: Final[DeviceTransfer]
    eval_iterators: list[EpochIterator]
    counters: Final[Counters] = field(default_factory=Counters)
    batch_idx: int = 0
    timing: Timing = field(default_factory=Untimed)

    @cached_property
    def context(self) -> RunContext:
        """The Trainer's arguments and components."""
        return self.stage.context

    @cached_property
    def module(self) -> TrainModule:
        """The user's module."""
        return self.stage.module

    @cached_property
    def hooks(self) -> HookTable:
        """The hooks of the module and the callbacks."""
        return self.stage.hooks

    @cached_property
    def precision(self) -> Precision:
        """Autocast and gradient scaler."""
        return self.context.accelerator.precision

    # Constant in a run: this process, and its data shard, `dp_rank` of `dp_size`; see
    # `trainer.distributed.parallel`.

    @cached_property
    def device(self) -> torch.device:
        """The device that batches are moved to."""
        return self.engine.options.device

    @cached_property
    def rank(self) -> int:
        """The rank of this process."""
        return self.engine.options.rank

    @cached_property
    def world_size(self) -> int:
        """The number of processes."""
        return self.engine.options.world_size

    @cached_property
    def dp_rank(self) -> int:
        """The index of the data shard that this process reads."""
        return self.engine.parallel.dp_rank

    @cached_property
    def dp_size(self) -> int:
        """The number of data shards."""
        return self.engine.parallel.dp_size

    @property
    def num_eval_batches(self) -> list[int | None]:
        """This rank's batches of each of the `eval_iterators`."""
        return [epoch_iterator.num_own_batches for epoch_iterator in self.eval_iterators]

    def bare_step(self, name: str) -> Callable[..., Any]:
        """Return a step of the user's module, to be called directly, without the engine."""
        step: Callable[..., Any] = getattr(self.module, name)
        return step

    def place(self, stage: str) -> str:
        """Describe this process's position, for errors and for the watchdog (on its thread).

        Args:
            stage: fit, validate, test or predict.
        """
        return f"{stage}, {self.reading(self.eval_iterators) or f'batch {self.batch_idx}'}"

    @staticmethod
    def reading(epoch_iterators: Iterable[EpochIterator], phase: str = "") -> str:
        """Describe the batch that is read, which is a later one than that of the step; or ""."""
        for each in epoch_iterators:
            if (number := each.reading) is not None:
                number += -(-each.start_batch // each.world_size)
                return f"reading {phase}batch {number}"
        return ""

    def should_end(self, batch_idx: int, *, aligned: bool) -> bool:  # noqa: ARG002 - an interface
        """Return whether all ranks must abandon the evaluation before this global batch."""
        return False  # outside a fit there is nothing to save: signals keep their default handler


@dataclass(kw_only=True)
class Optimization:
    """The optimizers, schedulers and checks that turn gradients into updates.

    Attributes:
        optimizers: The prepared optimizers, in the user's order.
        states: The state of optimizers and schedulers in checkpoints, and their names.
        schedulers: The learning rate schedulers, each with its interval and frequency.
        schedulers_paused: Whether a callback sets the learning rates, not the schedulers.
        weighting: Weights each micro-batch's loss by its items.
        guard: Finds non-finite gradients; None if they are ignored.
        clipping: Which gradients are clipped.
        accumulation: Micro-batches in the next gradient accumulation window.
        parameters: The parameters of the module and the optimizers, as of the latest update.
    """

    optimizers: Final[list[AcceleratedOptimizer]]
    states: Final[OptimizerStates]
    schedulers: Final[list[SchedulerEntry]]
    weighting: Final[LossWeighting]
    guard: Final[FiniteGuard | None]
    clipping: Final[Clipping]
    parameters: Final[ParameterLists]
    accumulation: int
    schedulers_paused: bool = False

    def accumulate(self, micro_batches: int) -> None:
        """Set the number of micro-batches per window, from the next window on."""
        self.accumulation = micro_batches

    def pause_schedulers(self) -> None:
        """Leave the learning rates to a callback for the rest of the fit."""
        self.schedulers_paused = True


class Intervals:
    """When the run validates and logs.

    Args:
        val_every: How often to validate.
        log_every: How often the values of an update are recorded.
        validates: Whether there is validation data and the run is long enough for a validation.

    Attributes:
        validates: The argument.
        log_due: Whether the values of the current update will be recorded.
    """

    def __init__(self, val_every: Interval, log_every: Interval, *, validates: bool) -> None:
        self._val, self._log = Schedule(val_every), Schedule(log_every)
        self._last_logged = 0
        self._before_validation = Progress()
        self.validates = validates
        self.log_due = False

    def see_if_log_is_due(self, step: int, progress_at: Callable[[int], Progress]) -> None:
        """Set `log_due` for the update in progress, which is not counted yet.

        Args:
            step: The number of the update.
            progress_at: Returns the progress of the run after a given update.
        """
        every, before = self._log.interval.every, self._log.before.steps
        if self._log.interval.unit == "steps" and before // every >= step // every:
            self.log_due = False  # skips computing the progress, which takes longer
        else:
            self.log_due = self._log.due(progress_at(step))

    def logged(self, step: int) -> None:
        """Remember that the values of an update are recorded."""
        self._last_logged, self.log_due = step, False

    def is_logged(self, step: int) -> bool:
        """Return whether the values of an update, or of a later one, are recorded."""
        return step <= self._last_logged

    def validation_due(self, now: Progress) -> bool:
        """Return whether a validation is due; call once per update."""
        self._before_validation = self._val.before
        return self._val.due(now)

    def validate_again(self) -> None:
        """Make the validation that was found due be due again in the resumed run."""
        self._val.before = self._before_validation

    def begin(self, now: Progress) -> None:
        """Count intervals from this progress on."""
        self._val.before = self._log.before = now
        self._last_logged = now.steps

    def state_dict(self) -> dict[str, Any]:
        """Return when the run last logged and validated."""
        schedules = {"val": self._val.state_dict(), "log": self._log.state_dict()}
        return {"last_logged": self._last_logged, "schedules": schedules}

    def load_state_dict(self, state: Mapping[str, Any], now: Progress) -> None:
        """Restore the schedules, at this progress of the run."""
        self._last_logged = state["last_logged"]
        self._val.load_state_dict(state["schedules"]["val"], now)
        self._log.load_state_dict(state["schedules"]["log"], now)


@dataclass(kw_only=True)
class CheckpointState:
    """The objects that saving and resuming need; see `trainer.loops.fit_state`.

    Attributes:
        writer: Writes checkpoints, also in the background.
        pending_saves: Pending saves, to be made at the next update boundary.
        run_id: Identifies the run, also in later starts that resume it.
        update_unfinished: Whether a signal ended the run before the work due after its last update,
            such as a validation; see `trainer.loops.fit.finish_update`.
        module_state: State that hooks set on the module besides its weights.
        generators: The random generators whose states a checkpoint holds.
        mirrors: The uploader of each checkpoint folder; on rank 0.
        mirrored: Whether there are mirrors; on all ranks.
    """

    writer: Final[Writer]
    pending_saves: Final[PendingSaves]
    run_id: str
    module_state: Final[ModuleState]
    generators: Final[RunGenerators]
    update_unfinished: bool = False
    mirrors: dict[Path, Mirror] = field(default_factory=dict)
    mirrored: bool = False

    def begin_mirrors(self, urls: Mapping[Path, str], step: int) -> None:
        """Upload the checkpoints of folders from now on; `step` is where the run starts."""
        for root, url in urls.items():
            self.mirrors[root] = Mirror(root, Remote(url), self.run_id, step)

    def wait_for_uploads(self) -> None:
        """Wait on all ranks until rank 0 has finished its uploads, or given up; collective.

        A launcher may end all processes as soon as one ends, so all must wait. Code after the fit
        may call a collective, whose time-out a long wait would exceed, so ranks synchronise often
        while waiting.

        Raises:
            CheckpointError: The save in flight failed; raised on all ranks.
        """
        if self.mirrored:
            self.writer.wait()
        ended = not self.mirrored
        while not ended:
            of_mirrors = [mirror.finish(LOOKS) for mirror in self.mirrors.values()]
            ended = broadcast_object(all(of_mirrors))

    def close(self) -> None:
        """Wait for the save in flight, and for the uploads.

        Raises:
            CheckpointError: The save failed; raised on all ranks.
        """
        try:
            self.writer.close()
        finally:
            for mirror in self.mirrors.values():
                mirror.close()

    def abandon(self) -> None:
        """Do not wait for the save in flight or for uploads, because the process is ending."""
        self.writer.abandon()
        for mirror in self.mirrors.values():
            mirror.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id, and whether a signal ended it with work still due."""
        return {"run_id": self.run_id, "unfinished": self.update_unfinished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the run's id, and whether work is still due."""
        self.run_id, self.update_unfinished = state["run_id"], state["unfinished"]


@dataclass(kw_only=True)
class FitRun(Run):
    """The state of one `Trainer.fit`; `trainer.loops.setup.make_fit_run` creates it.

    Attributes:
        step_sync: Sums, once per update, the values that all ranks must agree on.
        optim: Optimizers, schedulers, clipping, loss weights.
        data: The loaders, which may be replaced every few epochs.
        intervals: When the run validates and logs.
        stopping: Stop requests.
        saving: The objects that saving and resuming need.
        boundary_thread: The training thread while it is at an update boundary, where callbacks may
            save or stop; else None.
        manual: In manual optimisation, the object through which `training_step` makes updates.
        started: The `time.monotonic` in seconds at which the run would have begun without restarts.
        frozen: Keeps untrained parameters equal on all ranks; see `trainer.loops.buffers`.
    """

    step_sync: Final[StepSync]
    optim: Final[Optimization]
    data: Final[FitLoaders]
    intervals: Final[Intervals]
    stopping: Final[Stopping]
    saving: Final[CheckpointState]
    started: float
    boundary_thread: int | None = None
    manual: ManualOptimization | None = None
    frozen: Final[FrozenParameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the clock and the step sync."""
        counters = self.counters.state_dict() | {"seconds": self.seconds()}
        return {"counters": counters, **self.step_sync.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters, the clock and the step sync."""
        counters = dict(state["counters"])
        seconds = counters.pop("seconds", 0.0)
        self.counters.load_state_dict(counters, self.dp_size)
        self.started -= seconds
        self.step_sync.load_state_dict(state, seconds)

    def enter_boundary(self) -> None:
        """Reach the update boundary."""
        self.boundary_thread = threading.get_ident()

    def leave_boundary(self) -> None:
        """Leave the update boundary, for the next update."""
        self.boundary_thread = None

    @property
    def deciding(self) -> bool:
        """Whether the calling thread is at an update boundary, where all ranks run callbacks."""
        return self.boundary_thread == threading.get_ident()

    def seconds(self) -> float:
        """Training time of the whole run in seconds, the same on all ranks."""
        if self.world_size > 1:
            return self.step_sync.latest.seconds
        return time.monotonic() - self.started

    def place(self, stage: str) -> str:
        """See `Run.place`."""
        scope, counters = self.metrics.scope, self.counters
        where = f"{stage}, epoch {counters.shown_epoch}, after update {counters.global_step}"
        if self.recorder.sanity_checking:
            where = f"{stage}, sanity check"
        if scope is not None and scope.phase != "train":
            phase = f"{scope.phase} "
            reading = self.reading(self.eval_iterators, phase)
            return f"{where}, {reading or f'{phase}batch {self.batch_idx}'}"
        if reading := self.reading([self.data.epoch_iterator]):
            return f"{where}, {reading}"
        if counters.epoch_global_batches - self.batch_idx not in (0, 1):  # of an earlier epoch
            return where
        return f"{where}, batch {self.batch_idx}"

    def own_stats(
        self,
        micro_batch: GlobalBatch,
        items: float,
        loss: Tensor | None = None,
        *,
        ends_epoch: bool,
    ) -> StepStats:
        """Return this rank's step stats of a window, to be summed over all ranks.

        Args:
            micro_batch: The window's last global batch.
            items: The window's items on this rank.
            loss: A scalar that is finite only if all losses of the window are; None without loss.
            ends_epoch: Whether ``on_train_batch_start`` returned -1 on this rank in the window.
        """
        # Items are counted once by processes that read the same data.
        counts = self.engine.parallel.is_data_primary
        # Only this rank knows that its iterable dataset has ended, perhaps earlier than expected.
        is_stream = self.data.epoch_iterator.sampler is None
        ended = counts and (micro_batch.ended or (micro_batch.last and is_stream))
        guard, saving = self.optim.guard, self.saving
        stop_votes, signals = self.stopping.votes()
        # A single process reads its own clock when it needs the time.
        tells_time = self.rank == 0 and self.world_size > 1
        waiting = saving.pending_saves.waiting
        bad_losses: float | Tensor = 0.0
        if guard is not None:
            guard.window_loss = loss
            if loss is not None:
                bad_losses = is_non_finite(loss)
        return StepStats(
            items if counts else 0.0,
            stop_votes=stop_votes,
            signals=signals,
            seconds=time.monotonic() - self.started if tells_time else 0.0,
            ended=1.0 if ended else 0.0,
            failed_saves=1.0 if saving.writer.failed else 0.0,
            requested_saves=float(len(waiting)) if waiting else 0.0,
            ended_ranks=float(self.rank) if ended else 0.0,
            epoch_votes=1.0 if ends_epoch else 0.0,
            bad_losses=bad_losses,
        )

    def should_end(self, batch_idx: int, *, aligned: bool) -> bool:
        """Return whether any rank received the exit signal; exchanged every few batches."""
        if self.world_size == 1:
            return self.stopping.exit_code() is not None
        return self.stopping.any_rank_exits(
            batch_idx, rank=self.rank, device=self.device, aligned=aligned
        )

    def reload_loaders(self) -> None:
        """Create the loaders again if that is due in this epoch."""
        self.eval_iterators = self.data.reload_if_due(self.counters, self.eval_iterators)

    def progress(self, step: int | None = None) -> Progress:
        """Return the progress of the run, the same on all ranks.

        Args:
            step: The update in progress; by default the latest one.
        """
        counters, batches = self.counters, self.data.num_batches()
        epochs = float(counters.epoch)
        if counters.epoch_complete:
            epochs += 1.0
        elif batches:  # counted over all ranks: the same fraction for any number of ranks
            epochs += min(counters.epoch_batches / batches, 0.999_999)  # 1.0 only when it is over
        here = -(-(batches or 0) // self.dp_size)
        return Progress(
            counters.global_step if step is None else step,
            epochs,
            self.step_sync.items_seen,
            self.seconds(),
            counters.epoch,
            counters.epoch_global_batches,
            here,
        )
