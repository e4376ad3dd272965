"""Everything that a loop works with, put together once before it begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from callbacks import Progress
from trainer.checkpoint.writer import Writer
from trainer.data.loader import Feed, Round
from trainer.datamodule import DataModule
from trainer.distributed.agreement import Agreement, Tally
from trainer.distributed.collectives import reduce
from trainer.hooks import HookTable, is_overridden
from trainer.loops.asked import AskedSaves
from trainer.loops.lengths import Length, Schedule
from trainer.loops.record import Recorder
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import Limits
from trainer.optim.configure import SchedulerEntry
from trainer.optim.finite import FiniteGuard
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.weighting import LossWeighting
from trainer.precision import Precision
from trainer.rng import isolated_rng, mix

logger = logging.getLogger(__name__)

_DRAWS_BY_HOOKS = 4  # tells their seeds from those of an epoch's order
_UNTIMED = nullcontext()
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

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's."""


class Timing(Protocol):
    """What takes the time of a part of the loop."""

    def part(self, part: str) -> AbstractContextManager[None]:
        """Inside, the time is this part's."""


class Untimed:
    """Takes no time."""

    def part(self, part: str) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Nothing."""
        return _UNTIMED


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
    sanity_checking: bool = False
    datamodule: Any = None
    timing: Timing = field(default_factory=Untimed)

    def __post_init__(self) -> None:
        """Resolve once whether the user counts items, moves and changes batches on their own."""
        self._counts = is_overridden(self.module, "count_items", TrainModule)
        moves = self._batch_hook("transfer_batch_to_device")
        if moves is None and self.device.type != "cpu":
            moves = self.module.transfer_batch_to_device
        self._moves = moves
        self._before = self._batch_hook("on_before_batch_transfer")
        self._after = self._batch_hook("on_after_batch_transfer")

    def _batch_hook(self, name: str) -> Callable[..., Any] | None:
        """The datamodule's own method, else the module's own; None where neither has one."""
        bases = ((self.datamodule, DataModule), (self.module, TrainModule))
        owners = [owner for owner, base in bases if is_overridden(owner, name, base)]
        if len(owners) > 1:
            logger.warning("%s of the datamodule is used, not that of the module.", name)
        return getattr(owners[0], name) if owners else None

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Put a batch on the device."""
        if self._moves is None:
            return batch
        return self._moves(batch, self.device, dataloader_idx)

    def mover(self, feed: Feed, dataloader_idx: int = 0) -> Callable[[Any], Any]:
        """What puts the batches of one pass on the device, changed as the user's hooks do.

        It is called one batch ahead of their use, in their order. What the hooks draw is a function
        of the batch's number, as what the dataset draws is: the generators are the training's, and
        a run that is resumed would draw for the batch ahead a second time.
        """
        if self._before is None and self._after is None:
            if self._moves is None:
                return _as_it_is
            return lambda batch: self.move(batch, dataloader_idx)
        numbers = count(feed.start_batch + self.rank, self.world_size)

        def change(batch: Any) -> Any:
            with isolated_rng(mix(feed.seed, feed.epoch, _DRAWS_BY_HOOKS, next(numbers))):
                batch = _changed(self._before, batch, dataloader_idx)
                return _changed(self._after, self.move(batch, dataloader_idx), dataloader_idx)

        return change

    def transfer(self, feed: Feed, dataloader_idx: int = 0) -> Callable[[Any], Any]:
        """As `mover`; it also asks how many items each batch has.

        Returns:
            What gives the batch and a function that gives the number; None stands for its samples.
        """
        move = self.mover(feed, dataloader_idx)
        if not self._counts:
            return _uncounted if move is _as_it_is else lambda batch: (move(batch), None)

        def transfer(batch: Any) -> Any:
            batch = move(batch)
            return batch, _start_reading(self.module.count_items(batch))

        return transfer

    def rounds(self, feed: Feed, transfer: Callable[[Any], Any]) -> Generator[Round, None, None]:
        """The rounds of a feed's epoch; see `Feed.rounds`."""
        return feed.rounds(transfer)

    def bare_step(self, name: str) -> Callable[..., Any]:
        """A step of the user's module in which the engine has no part."""
        step: Callable[..., Any] = getattr(self.module, name)
        return step

    def told_to_end(self, round_idx: int) -> bool:
        """Whether to abandon the evaluation at hand before this round, alike on all processes."""
        del round_idx  # outside a fit nothing would be saved: signals do what they do
        return False

    @property
    def counts_items(self) -> bool:
        """The user's `count_items` decides, not the number of samples."""
        return self._counts


def _nothing(*_: Any, **__: Any) -> None:
    """Saves nothing."""


def _as_it_is(batch: Any) -> Any:
    return batch


def _uncounted(batch: Any) -> Any:
    return batch, None


def _changed(hook: Callable[..., Any] | None, batch: Any, dataloader_idx: int) -> Any:
    """What a batch hook returned."""
    if hook is None:
        return batch
    changed = hook(batch, dataloader_idx)
    if changed is None:
        name = getattr(hook, "__name__", "A batch hook")
        raise TypeError(f"{name} returned None; it must return the batch.")
    return changed


def items_of(current: Round) -> tuple[Any, float]:
    """The batch of a round and its items; nothing for a round without a batch here."""
    if not current.present:
        return None, 0.0
    batch, read = current.batch
    return batch, float(current.samples) if read is None else read()


def _start_reading(count: float | Tensor) -> Callable[[], float]:
    """Ask for a number that may still be on the device.

    It is asked for a batch ahead, so that reading it later need not wait for the device.
    """
    if not isinstance(count, Tensor):
        return lambda: _checked(count)
    if count.device.type == "cpu":
        return lambda: _checked(float(count))
    host = torch.empty((), dtype=count.dtype, pin_memory=count.device.type == "cuda")
    host.copy_(count.reshape(()), non_blocking=True)
    event = torch.Event(count.device)
    event.record()

    def read() -> float:
        event.synchronize()
        return _checked(float(host))

    return read


def _checked(items: float) -> float:
    if not 0 <= items < float("inf"):
        raise ValueError(
            f"count_items returned {items}; it must be the number of items that the loss is a "
            "mean over: 0 or more, and finite."
        )
    return float(items)


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
        parameters: All of the module's.
        unused: Those of them that no optimizer has, as of the latest update.
        optimized: How many parameters the optimizers had then.
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
        weightless: What runs now is such a stand-in: its loss counts for nothing.
        saved_rng: The generators' states of the checkpoint that the run resumes from.
        loaders: Where the run stood when its loaders were made; see `trainer.loops.reload`.
        renew_loaders: Called as an epoch begins, to make others if it is time.
        validates: There is validation data, and the run is long enough for a validation.
        monitored: See `trainer.loops.due.monitors_of`.
        last_logged: The update whose values were recorded last.
        epoch_length: Batches of all processes in the epoch at hand, None where only reading tells.
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
    optimized: int = -1
    unfinished: bool = False
    last_batch: Any = None
    weightless: bool = False
    saved_rng: dict[str, Any] | None = None
    loaders: dict[str, int] = field(default_factory=dict)
    renew_loaders: Callable[[], None] = lambda: None
    validates: bool = True
    monitored: list[tuple[str, str]] = field(default_factory=list)
    in_boundary: bool = False
    log_due: bool = False
    last_logged: int = 0
    epoch_length: int | None = _UNKNOWN
    started: float = field(default_factory=time.monotonic)

    @property
    def clock(self) -> float:
        """Training time of the whole run by this process's clock, in seconds."""
        return self.counters.seconds + time.monotonic() - self.started

    def own_tally(self, items: float, bad_losses: float | Tensor = 0.0) -> Tally:
        """What this process tells the others about its window."""
        first = self.rank == 0
        return Tally(
            items,
            stop_votes=1.0 if self.stop_requested() else 0.0,
            signals=0.0 if self.told() is None else 1.0,
            seconds=self.clock if first else 0.0,
            ended=1.0 if self.counters.epoch_complete else 0.0,
            witness=1.0 if first else 0.0,
            failed_saves=1.0 if self.writer.failed else 0.0,
            asked_saves=float(len(self.asked)),
            bad_losses=bad_losses,
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
