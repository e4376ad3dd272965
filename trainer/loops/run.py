"""Everything that a loop works with, put together once before it begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from callbacks import Progress
from trainer.checkpoint.writer import Writer
from trainer.data.feed import Feed
from trainer.distributed.agreement import Agreement, Tally
from trainer.distributed.collectives import reduce
from trainer.hooks import HookTable
from trainer.loops.asked import AskedSaves
from trainer.loops.lengths import Length, Schedule
from trainer.loops.moving import Mover
from trainer.loops.record import Recorder
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import Limits
from trainer.optim.configure import SchedulerEntry
from trainer.optim.finite import FiniteGuard, is_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.weighting import LossWeighting
from trainer.precision import Precision

_UNKNOWN = -1
_ROUNDS_BETWEEN_QUESTIONS = 16  # of an evaluation: a question is a reduction that all wait for


class Engine(Protocol):
    """How the module runs; `trainer.strategies.single.SingleDevice` explains each method."""

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module."""

    def begin_epoch(self) -> None:
        """Before an epoch's first window."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Before the forward pass of a micro-batch."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """A micro-batch that does not end its window."""

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """The one that does; the window's items over all processes."""

    def refuse_unknown(self) -> None:
        """Raise where it has left out gradients, of parameters that it does not know."""

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's."""


class Timing(Protocol):
    """What takes the time of a part of the loop."""

    def part(self, part: str) -> AbstractContextManager[None]:
        """Inside, the time is this part's."""

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function, whose time is this part's."""


class Untimed:
    """Takes no time."""

    def part(self, part: str) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Nothing."""
        return nullcontext()

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:  # noqa: ARG002
        """Only that: at each update, where a context would take longer."""
        function(*args)


@dataclass
class Counters:
    """Where a fit stands; saved and restored as it is.

    Attributes:
        global_step: Updates.
        epoch: The epoch at hand, from 0.
        rounds: Rounds of it that were used.
        epoch_batches: Batches in them, over all processes.
        epoch_complete: It is over.
        batches_seen: Micro-batches of all processes.
        samples_seen: Samples of all processes.
        validations: How many have run, the sanity check excluded.
        seconds: Training time of the parts of the run before this one.
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
        """The epoch is over and another one begins."""
        self.epoch += 1
        self.rounds = self.epoch_batches = 0
        self.epoch_complete = False


@dataclass(kw_only=True)
class Run:
    """One call of `Trainer.fit`, `validate`, `test` or `predict`.

    Attributes:
        module: The user's.
        hooks: Its hooks and the callbacks'.
        metrics: What is logged and not yet reduced.
        recorder: Where reduced values go.
        precision: The autocast and the scaler.
        device: Where batches go.
        world_size: Processes.
        rank: This one.
        counters: Where the fit stands; all zero outside one.
        eval_lengths: Batches of each loader in the evaluation at hand, over all processes.
        batch_idx: The number of the batch at hand, as its step receives it.
        sanity_checking: The evaluation at hand is the trial before training.
        datamodule: The user's, or None.
        timing: Told what is no call of the objects above; see `trainer.loops.timing`.
    """

    module: TrainModule
    hooks: HookTable
    metrics: MetricStore
    recorder: Recorder
    precision: Precision
    device: torch.device
    world_size: int = 1
    rank: int = 0
    counters: Counters = field(default_factory=Counters)
    eval_lengths: list[int | None] = field(default_factory=list)
    batch_idx: int = 0
    sanity_checking: bool = False
    datamodule: Any = None
    timing: Timing = field(default_factory=Untimed)

    def __post_init__(self) -> None:
        """Resolve once what the user does with batches."""
        self.mover = Mover(
            self.module,
            self.datamodule,
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
        )

    def bare_step(self, name: str) -> Callable[..., Any]:
        """A step of the user's module in which the engine has no part."""
        step: Callable[..., Any] = getattr(self.module, name)
        return step

    def place(self, stage: str) -> str:
        """Where this process is, for people; asked by another thread.

        Args:
            stage: fit, validate, test or predict.
        """
        return f"{stage}, batch {self.batch_idx}"

    def told_to_end(self, round_idx: int) -> bool:  # noqa: ARG002 - an interface
        """Whether to abandon the evaluation at hand before this round, alike on all processes."""
        return False  # outside a fit nothing would be saved: signals do what they do


def _nothing(*_: Any, **__: Any) -> None:
    """Saves nothing."""


@dataclass(kw_only=True)
class FitRun(Run):
    """A run that trains.

    Attributes:
        engine: How the module runs and its gradients are reduced.
        agreement: What the processes know alike.
        weighting: How much each micro-batch counts.
        feed: The training data.
        val_feeds: The validation data, empty without.
        optimizers: Prepared, in the user's order.
        schedulers: And when they tick.
        parameters: All of the module's and the optimizers', as of the latest update.
        unused: Those of them that no optimizer has.
        strangers: Those of them that the module does not have.
        told_of_strangers: The log has named them.
        noted: By what `trainer.loops.window.take_note` sees that there may be others.
        length: When the run ends.
        accumulation: Micro-batches of the next window.
        limits: Of all gradients.
        own_limits: Optimizers whose gradients have others.
        optimizer_names: See `trainer.optim.configure.names_of`.
        val_schedule: When validation is due.
        log_schedule: When values of an update are recorded.
        sanity_steps: Batches of each validation loader to try before training; -1 for all.
        stop_requested: Asked of this process; the others hear of it at the next update.
        told: The code to exit with once this process was told to end, by a signal or the clock; the
            others hear of it likewise.
        writer: Saves, also in the background.
        asked: Saves to be made at the next boundary.
        guard: Finds gradients that are not finite; None lets them be.
        found: In manual optimisation on an accelerator, whether there were any in the step at hand.
        schedulers_paused: A callback sets the learning rates instead.
        unfinished: The run was ended by a signal before what is due after its last update was done.
        run_id: Which run this is, whatever process goes on with it.
        stop_now: Decided by all alike.
        weightless: A batch stands in for one that this process lacks: its loss counts for nothing.
        saved_rng: The generators' states of the checkpoint that the run resumes from.
        begun: What of the module was frozen and in evaluation mode at first; see
            `trainer.loops.switches`.
        ended: The same when the fit was over: what is done to the module later is not the run's.
        loaders: Where the run stood when its loaders were made; see `trainer.loops.reload`.
        renew_loaders: Called as an epoch begins, to make others if it is time.
        validates: There is validation data, and the run is long enough for a validation.
        monitored: See `trainer.loops.due.monitors_of`.
        last_logged: The update whose values were recorded last.
        epoch_length: Batches of all processes in the epoch at hand, None where only reading tells.
        thread: The one that trains.
        data_ended: There is no further batch for this process in the epoch, and nobody but it can
            know: a stream is over, or a dataset has ended early.
        last_batch: In manual optimisation, for a round in which this process has none.
    """

    engine: Engine
    agreement: Agreement
    weighting: LossWeighting
    feed: Feed
    val_feeds: list[Feed]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[SchedulerEntry]
    parameters: list[nn.Parameter]
    length: Length
    accumulation: int
    limits: Limits
    own_limits: list[tuple[AcceleratedOptimizer, Limits]]
    optimizer_names: list[str]
    val_schedule: Schedule
    log_schedule: Schedule
    sanity_steps: int
    stop_requested: Callable[[], bool]
    writer: Writer
    asked: AskedSaves = field(default_factory=lambda: AskedSaves(_nothing))
    guard: FiniteGuard | None = None
    found: Tensor | None = None
    told: Callable[[], int | None] = lambda: None
    schedulers_paused: bool = False
    run_id: str = ""
    stop_now: bool = False
    unused: list[nn.Parameter] = field(default_factory=list)
    strangers: list[nn.Parameter] = field(default_factory=list)
    told_of_strangers: bool = False
    noted: list[int] = field(default_factory=list)
    unfinished: bool = False
    data_ended: bool = False
    last_batch: Any = None
    weightless: bool = False
    saved_rng: dict[str, Any] | None = None
    begun: dict[str, list[str]] = field(default_factory=dict)
    ended: dict[str, list[str]] | None = None
    loaders: dict[str, int] = field(default_factory=dict)
    renew_loaders: Callable[[], None] = lambda: None
    validates: bool = True
    monitored: list[tuple[str, str]] = field(default_factory=list)
    in_boundary: bool = False
    log_due: bool = False
    last_logged: int = 0
    epoch_length: int | None = _UNKNOWN
    started: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def deciding(self) -> bool:
        """A callback is asked at a boundary, on all processes; not another thread meanwhile."""
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
        """What this process tells the others about its window.

        Args:
            items: In it, here.
            loss: Is finite if all of its losses are; None where there is none.
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

    def told_to_end(self, round_idx: int) -> bool:
        """Whether any process was told to end; several ask each other now and then only."""
        told = self.told() is not None
        if self.world_size == 1:
            return told
        if round_idx % _ROUNDS_BETWEEN_QUESTIONS:
            return False
        return bool(reduce(torch.tensor(float(told), device=self.device)))

    @property
    def progress(self) -> Progress:
        """How far the run is, the same on all processes."""
        return self.progress_at(self.counters.global_step)

    def progress_at(self, step: int) -> Progress:
        """As `progress`, when this update is or will be the latest that is counted."""
        counters, batches = self.counters, self.epoch_length
        if batches == _UNKNOWN:  # before the first epoch; later kept, for it is asked every update
            batches = self.feed.num_batches
        epochs = float(counters.epoch)
        if counters.epoch_complete:
            epochs += 1.0
        elif batches:  # of all processes: the same point on any number of them
            epochs += min(counters.epoch_batches / batches, 0.999_999)  # whole only when it is over
        agreement = self.agreement
        seconds = self.clock if self.world_size == 1 else agreement.latest.seconds
        return Progress(step, epochs, agreement.items_seen, seconds)
