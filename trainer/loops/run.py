"""Everything that a loop works with, assembled once before it begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from callbacks import Progress
from trainer.checkpoint.writer import Writer
from trainer.data.feed import Feed
from trainer.distributed.agreement import Agreement, Tally
from trainer.hooks import HookTable
from trainer.loops.asked import AskedSaves
from trainer.loops.lengths import Length, Schedule
from trainer.loops.moving import Mover
from trainer.loops.record import Recorder
from trainer.loops.signals import Questions
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import Limits
from trainer.optim.configure import SchedulerEntry
from trainer.optim.finite import FiniteGuard, is_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.weighting import LossWeighting
from trainer.precision import Precision

if TYPE_CHECKING:  # `reload` imports this module
    from trainer.loops.reload import Origin, Sources

_UNKNOWN = -1


class Engine(Protocol):
    """How the module runs; `trainer.strategies.single.SingleDevice` explains each method."""

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module."""

    def begin_epoch(self) -> None:
        """Called before an epoch's first window."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Called before the forward pass of a micro-batch."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch that does not end its window."""

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """Run the last backward pass of a window; return its items over all processes."""

    def refuse_unknown(self) -> None:
        """Raise if gradients were left out, of parameters that the engine does not know."""

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes."""

    def close(self) -> None:
        """Called when the fit has ended, however it did."""


class Timing(Protocol):
    """Measures the time of the parts of the loop."""

    def part(self, part: str) -> AbstractContextManager[None]:
        """Inside, the time counts for this part."""

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function, whose time counts for this part."""


class Untimed:
    """Measures no time."""

    def part(self, part: str) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Return a context that does nothing."""
        return nullcontext()

    # likewise an interface
    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:  # noqa: ARG002
        """Call the function, at each update, where a context would take longer."""
        function(*args)


@dataclass
class Counters:
    """The progress of a fit, as it is saved and restored.

    Attributes:
        global_step: Updates so far.
        epoch: The current epoch, from 0.
        rounds: Rounds of the epoch that were used.
        epoch_batches: Batches in those rounds, over all processes.
        epoch_complete: Whether the epoch is over.
        batches_seen: Micro-batches so far, over all processes.
        samples_seen: Samples so far, over all processes.
        validations: Validations so far, without the sanity check.
        seconds: Training time of the run before this start.
    """

    global_step: int = 0
    epoch: int = 0
    rounds: int = 0
    epoch_batches: int = 0
    epoch_complete: bool = False
    batches_seen: int = 0
    samples_seen: int = 0
    validations: int = 0
    seconds: float = 0.0

    def begin_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.rounds = self.epoch_batches = 0
        self.epoch_complete = False


@dataclass(kw_only=True)
class Run:
    """One call of `Trainer.fit`, `validate`, `test` or `predict`.

    Attributes:
        module: The user's.
        datamodule: The user's, or None.
        hooks: The hooks of the module and the callbacks.
        metrics: Values that were logged and not yet reduced.
        recorder: Receives the reduced values.
        precision: The autocast and the scaler.
        device: The device of the batches.
        world_size: The number of processes.
        rank: The rank of this process.
        counters: The progress of the fit; in an evaluation, of the checkpoint or the last fit.
        eval_lengths: Batches of this process from each loader of the current evaluation.
        batch_idx: The index of the current batch, as its step receives it.
        sanity_checking: Whether the current evaluation is the sanity check before training.
        timing: Measures what is not a call of the objects above; see `trainer.loops.timing`.
    """

    module: Final[TrainModule]
    datamodule: Final[Any]
    hooks: Final[HookTable]
    metrics: Final[MetricStore]
    recorder: Final[Recorder]
    precision: Final[Precision]
    device: Final[torch.device]
    world_size: Final[int]
    rank: Final[int]
    counters: Final[Counters] = field(default_factory=Counters)
    eval_lengths: list[int | None] = field(default_factory=list)
    batch_idx: int = 0
    sanity_checking: bool = False
    timing: Timing = field(default_factory=Untimed)

    def __post_init__(self) -> None:
        """Resolve once which hooks of the user change batches."""
        self.mover = Mover(
            self.module,
            self.datamodule,
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
        )

    def bare_step(self, name: str) -> Callable[..., Any]:
        """Return a step of the user's module, to be called without the engine."""
        step: Callable[..., Any] = getattr(self.module, name)
        return step

    def place(self, stage: str) -> str:
        """Describe in words where this process is; called by another thread.

        Args:
            stage: fit, validate, test or predict.
        """
        return f"{stage}, batch {self.batch_idx}"

    def told_to_end(self, round_idx: int, *, aligned: bool) -> bool:  # noqa: ARG002 - an interface
        """Return whether all processes are to abandon the current evaluation before this round."""
        return False  # outside a fit there is nothing to save: signals have their usual effect


@dataclass(kw_only=True)
class FitRun(Run):
    """A run that trains; `trainer.loops.assemble.make_fit_run` creates it.

    Attributes:
        engine: How the module runs and its gradients are reduced.
        agreement: What all processes agree on.
        weighting: How much each micro-batch counts.
        guard: Finds gradients that are not finite; None if they are ignored.
        optimizers: Prepared, in the user's order.
        optimizer_names: See `trainer.optim.configure.names_of`.
        schedulers: The schedulers, each with when it ticks.
        limits: The limits of all gradients.
        own_limits: Optimizers with limits of their own.
        writer: Writes checkpoints, also in the background.
        asked: Saves to be made at the next boundary.
        length: When the run ends.
        val_schedule: When validation is due.
        log_schedule: When values of an update are recorded.
        sanity_steps: Batches of each validation loader in the sanity check; -1 for all.
        validates: Whether there is validation data and the run is long enough for a validation.
        monitored: See `trainer.loops.due.monitors_of`.
        stop_requested: Whether this process requests a stop; the others learn of it at the next
            update.
        tells: Whether to warn the user of what is missing: on rank 0, and not in trials.
        begun: What of the module was frozen or in evaluation mode at first; see
            `trainer.loops.switches`.
        options: See `trainer.loops.options.options_of`.
        started: The time when this start began, by the monotonic clock.
        thread: The thread that trains.
        sources: Where the loaders come from; see `trainer.loops.reload`.
        origin: The run's progress when its loaders were created.
        feed: The training data.
        val_feeds: The validation data; empty if there is none.
        told: Returns the exit code once a signal or the clock has told this process to end, else
            None; the others learn of it at the next update.
        accumulation: Micro-batches of the next window.
        schedulers_paused: Whether a callback sets the learning rates instead.
        run_id: Identifies the run, also in later starts that resume it.
        last_logged: The update whose values were recorded last.
        unfinished: Whether a signal ended the run before the work due after its last update.
        stop_now: Whether all processes have decided to stop.
        saved_rng: The generators' states of the checkpoint that the run resumes from, until they
            are restored.
        ended: As `begun`, at the end of the fit: later changes to the module are not the run's.
        parameters: All of the module's and the optimizers', as of the latest update.
        unused: Those of them that no optimizer has.
        strangers: Those of them that the module does not have.
        told_of_strangers: Whether they were logged.
        told_of_untrained: Whether it was logged that frozen parameters differed.
        noted: By which `trainer.loops.window.take_note` sees that they may have changed.
        epoch_length: Batches of all processes in the current epoch, None if only reading can tell;
            -1 before the first epoch, when the feed is asked each time.
        data_ended: Whether this process has no further batch in the epoch, which only it can know:
            a stream is over, or a dataset has ended early.
        questions: Whether all are to abandon an evaluation.
        in_boundary: Whether the update is over, and what is due after it is being done.
        log_due: Whether the values of the current update will be recorded.
        found: In manual optimisation on an accelerator, whether any gradients of the current step
            are not finite.
        own_hooks: In manual optimisation, the hooks for the current batch; see
            `trainer.loops.apart`.
        last_batch: The latest batch in manual optimisation, for a round in which this process has
            none.
        weightless: Whether a batch stands in for a missing one, so that its loss counts for
            nothing.
    """

    # What it is made of, fixed until its end.
    engine: Final[Engine]
    agreement: Final[Agreement]
    weighting: Final[LossWeighting]
    guard: Final[FiniteGuard | None]
    optimizers: Final[list[AcceleratedOptimizer]]
    optimizer_names: Final[list[str]]
    schedulers: Final[list[SchedulerEntry]]
    limits: Final[Limits]
    own_limits: Final[list[tuple[AcceleratedOptimizer, Limits]]]
    writer: Final[Writer]
    asked: Final[AskedSaves]
    length: Final[Length]
    val_schedule: Final[Schedule]
    log_schedule: Final[Schedule]
    sanity_steps: Final[int]
    validates: Final[bool]
    monitored: Final[list[tuple[str, str]]]
    stop_requested: Final[Callable[[], bool]]
    tells: Final[bool]
    begun: Final[dict[str, list[str]]]
    options: Final[dict[str, str]]
    started: Final[float] = field(default_factory=time.monotonic)
    thread: Final[int] = field(default_factory=threading.get_ident)
    # What may be replaced: the data every few epochs, the rest by callbacks.
    sources: Final[Sources]
    origin: Origin
    feed: Feed
    val_feeds: list[Feed]
    told: Callable[[], int | None]
    accumulation: int
    schedulers_paused: bool = False
    # Its progress beside `counters`: at the beginning, unless `load_run` restores it.
    run_id: str
    last_logged: int = 0
    unfinished: bool = False
    stop_now: bool = False
    saved_rng: dict[str, Any] | None = None
    ended: dict[str, list[str]] | None = None
    # What the loop knows of the current epoch, window and batch.
    parameters: list[nn.Parameter]
    unused: list[nn.Parameter] = field(default_factory=list)
    strangers: list[nn.Parameter] = field(default_factory=list)
    told_of_strangers: bool = False
    told_of_untrained: bool = False
    noted: list[int] = field(default_factory=list)
    epoch_length: int | None = _UNKNOWN
    data_ended: bool = False
    questions: Final[Questions] = field(default_factory=Questions)
    in_boundary: bool = False
    log_due: bool = False
    found: Tensor | None = None
    own_hooks: Any = field(init=False)
    last_batch: Any = None
    weightless: bool = False

    def __post_init__(self) -> None:
        """Begin outside a batch, where all processes call the hooks."""
        super().__post_init__()
        self.own_hooks = self.hooks

    @property
    def deciding(self) -> bool:
        """Whether the calling thread is at a boundary, where all processes call the callbacks."""
        return self.in_boundary and self.thread == threading.get_ident()

    @property
    def clock(self) -> float:
        """Training time of the whole run by this process's clock, in seconds."""
        return self.counters.seconds + time.monotonic() - self.started

    def place(self, stage: str) -> str:
        """See `Run.place`."""
        scope, counters = self.metrics.scope, self.counters
        where = f"{stage}, epoch {counters.epoch}, step {counters.global_step}"
        if scope is not None and scope.phase != "train":
            return f"{where}, {scope.phase} batch {self.batch_idx}"
        return f"{where}, batch {self.batch_idx}"

    def own_tally(self, items: float, loss: Tensor | None = None) -> Tally:
        """Return what this process contributes to the agreement about a window.

        Args:
            items: The window's items on this process.
            loss: Finite if all losses of the window are; None if there is none.
        """
        return Tally(
            items,
            stop_votes=1.0 if self.stop_requested() else 0.0,
            signals=0.0 if self.told() is None else 1.0,
            seconds=self.clock if self.rank == 0 else 0.0,
            ended=1.0 if self.data_ended else 0.0,
            failed_saves=1.0 if self.writer.failed else 0.0,
            asked_saves=float(len(self.asked)),
            ended_ranks=float(self.rank) if self.data_ended else 0.0,
            bad_losses=0.0 if loss is None or self.guard is None else is_non_finite(loss),
        )

    def told_to_end(self, round_idx: int, *, aligned: bool) -> bool:
        """Return whether any process was told to end; several ask each other every few rounds."""
        told = self.told() is not None
        if self.world_size == 1:
            return told
        return self.questions.ask(
            round_idx, told, rank=self.rank, device=self.device, aligned=aligned
        )

    @property
    def progress(self) -> Progress:
        """How far the run is, the same on all processes."""
        return self.progress_at(self.counters.global_step)

    def progress_at(self, step: int) -> Progress:
        """Return the progress as of this update, the latest one or the one being made."""
        counters, batches = self.counters, self.epoch_length
        if batches == _UNKNOWN:  # before the first epoch; then stored, as it is needed every update
            batches = self.feed.num_batches
        epochs = float(counters.epoch)
        if counters.epoch_complete:
            epochs += 1.0
        elif batches:  # over all processes: the same fraction on any number of them
            epochs += min(counters.epoch_batches / batches, 0.999_999)  # whole only when it is over
        agreement = self.agreement
        seconds = self.clock if self.world_size == 1 else agreement.latest.seconds
        return Progress(step, epochs, agreement.items_seen, seconds)
