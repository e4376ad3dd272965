"""A window of micro-batches: forward and backward of each, then one update."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from trainer.data.epoch_iterator import GlobalBatch
from trainer.distributed.step_sync import StepStats
from trainer.engines.lockstep import isolated_batch_norm
from trainer.errors import module_logger
from trainer.loops.buffers import isolated_dummy
from trainer.loops.device_transfer import (
    HOOK_OF_BATCH,
    WITHOUT_ITEMS,
    NoCollectives,
    items_of,
    missing_batch_error,
)
from trainer.loops.evaluate import ENDED_EARLY
from trainer.loops.profiler import OPTIMIZER
from trainer.loops.state import FitRun
from trainer.loops.update import drop_gradients, update
from trainer.optim.weighting import loss_of
from trainer.tree import detach

logger = module_logger(__name__)

_GRADIENT = attrgetter("grad")


def train_window(run: FitRun, window: Iterator[GlobalBatch]) -> bool:  # noqa: PLR0915  # one algorithm
    """Run forward and backward on a window of micro-batches and make one optimizer update.

    Args:
        run: The fit.
        window: The global batches of the window, one per micro-batch. In the last one of the epoch,
            this rank may have no batch; it still takes part in the gradient reduction.

    Returns:
        True, always; see `ManualOptimization.train_window`.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    weighting = run.optim.weighting
    size = weighting.micro_batches = run.optim.accumulation  # a hook may change it for the next one
    items_here = 0.0
    # The samples of all ranks if this rank knows them before the reduction, else None. Knowing them
    # saves computing a factor on the device. On the CPU the reduced sum is used, which is available
    # at once and excludes batches that other ranks skipped.
    unknown = run.dp_size > 1 and (run.device.type == "cpu" or hooks.may_end_epoch)
    global_items = None if unknown or run.device_transfer.counts_items else 0.0
    # Finite only if all losses of the window are. It is not a sum, which may overflow.
    finite_probe: Tensor | None = None
    last_loss: Tensor | None = None
    ends_epoch = False  # whether on_train_batch_start returned -1 in this window, on this rank
    metrics.begin_window()
    hooks.on_train_step_start()
    for number, micro_batch in enumerate(window, 1):
        sync = micro_batch.last or number == size
        engine.begin_micro_batch(
            sync=sync, complete=micro_batch.batches == run.dp_size, source=micro_batch.first
        )
        batch, items = items_of(micro_batch)
        if weighting.reference is None:
            weighting.refer_to(items)
        batch_idx = run.batch_idx = counters.epoch_global_batches
        batch_hooks, backward_hooks, ends_epoch = begin_batch(
            run, micro_batch, batch, items, ends_epoch
        )
        trains = micro_batch.present and items > 0
        outputs: Any = None
        if trains:
            with run.precision.autocast():
                outputs = engine.forward("training_step", batch, batch_idx)
        loss = None if outputs is None else loss_of(outputs)
        drop_leftover_gradients(run, number)
        if loss is not None:
            last_loss = loss.detach()
            finite_probe = last_loss if size == 1 else finite_probe_of(run, finite_probe, last_loss)
            items_here += items
            backward_hooks.on_before_backward(loss)
        elif trains:
            check_may_skip(run)
        samples = counters.count(micro_batch, run.dp_size)
        if loss is None and (trains or ends_epoch):
            samples = None  # other ranks do not know that this batch is skipped
        global_items = None if global_items is None or samples is None else global_items + samples
        stats = None
        if sync:
            stats = run.own_stats(micro_batch, items_here, finite_probe, ends_epoch=ends_epoch)
        if loss is not None:
            window_items = engine.backward(run.precision.scale(weighting.weigh(loss, items)), stats)
            backward_hooks.on_after_backward()
        elif trains:
            window_items = skip_backward(run, stats)
        else:
            outputs, window_items = zero_gradient_step(
                run, micro_batch, batch, number, stats, left_out=ends_epoch
            )
        if sync:
            metrics.items = items_here  # the weight of values logged in the update
            window_items = window_items if global_items is None else global_items
            run.timing.call(OPTIMIZER, update, run, window_items, items_here, last_loss)
        if micro_batch.present and hooks.takes_outputs:
            metrics.items = 0.0 if loss is None else items
            hook_outputs = run.module._outputs_of_step(outputs, size)
            batch_hooks.on_train_batch_end(hook_outputs, batch, batch_idx)
    metrics.items = items_here
    hooks.on_train_step_end()
    run.timing.call(OPTIMIZER, drop_gradients, run)
    return True


def zero_gradient_step(
    run: FitRun,
    micro_batch: GlobalBatch,
    batch: Any,
    number: int,
    stats: StepStats | None,
    *,
    left_out: bool,
) -> tuple[Any, float | Tensor]:
    """Take part in a micro-batch to which this rank contributes no gradient.

    If this rank has no batch, or ``on_train_batch_start`` has skipped it, a dummy batch joins the
    collectives of other ranks; see `trainer.engines.lockstep`. If its batch has no items
    (`count_items` is 0), the step may still log values, with weight 0, but its loss is a mean over
    no items.

    Args:
        run: The fit.
        micro_batch: The global batch.
        batch: The batch, or the dummy batch; None if the data ended here before the first one.
        number: The micro-batch's number in its window, from 1.
        stats: See `Engine.backward`.
        left_out: Whether the batch was skipped. It may be invalid, so an earlier batch is run
            instead.

    Returns:
        What `training_step` returned, None if it did not run; and the result of `Engine.backward`.
    """
    if run.dp_size == 1 and not micro_batch.present:
        return None, skip_backward(run, stats)
    if left_out and run.data.epoch_iterator.dummy_batch is not None:
        batch = run.data.epoch_iterator.dummy_batch
    if batch is None:
        check_needs_no_dummy(run)
        return None, skip_backward(run, stats)
    if stats is not None:
        run.precision.scale_nothing(run.device)
    if run.dp_size == 1:
        with torch.no_grad(), run.precision.autocast():
            outputs = run.bare_step("training_step")(batch, run.batch_idx)
        drop_leftover_gradients(run, number)
        return outputs, run.engine.backward(None, stats)
    if micro_batch.present:
        with run.precision.autocast(), isolated_batch_norm(run.module, counts=True):
            return run_dummy(run, batch, number, stats)
    with isolated_dummy(run):
        return None, run_dummy(run, detach(batch), number, stats)[1]


def run_dummy(
    run: FitRun, batch: Any, number: int, stats: StepStats | None
) -> tuple[Any, float | Tensor]:
    """Run forward and backward of a batch with a loss of 0; see `zero_gradient_step`."""
    with run.engine.dummy():
        outputs = run.engine.forward("training_step", batch, run.batch_idx)
        drop_leftover_gradients(run, number)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.requires_grad:
            return outputs, run.engine.backward(loss * 0.0, stats)
        return outputs, run.engine.backward(None, stats)


def skip_backward(run: FitRun, stats: StepStats | None) -> float | Tensor:
    """End a micro-batch without a backward pass; returns as `Engine.backward`.

    If no other rank has data, gradients stay unchanged; a parameter without one is not updated.

    Args:
        run: The fit.
        stats: See `Engine.backward`.
    """
    if stats is not None:
        run.precision.scale_nothing(run.device)
    if run.dp_size == 1:
        return 0.0 if stats is None else run.engine.sync_stats(stats)
    return run.engine.backward(None, stats)


def check_needs_no_dummy(run: FitRun) -> None:
    """Check that a rank that never had a batch needs no dummy batch.

    Raises:
        ValueError: Other ranks wait for this one in their forward pass, or in an optimizer.
    """
    if run.engine.parallel.forward_is_collective or not run.module.automatic_optimization:
        raise ValueError(
            f"In epoch {run.counters.shown_epoch} the training data ended before the first batch, "
            f"on rank {run.rank}. {ENDED_EARLY}"
        )


def drop_leftover_gradients(run: FitRun, number: int) -> None:
    """Zero left-over gradients before a window's first backward pass.

    They come from the user's own backward passes: in hooks, in validation, or in `training_step`
    (adversarial examples). After the first micro-batch they can no longer be told from the window's
    own gradients, so nothing is done.

    Args:
        run: The fit.
        number: The micro-batch's number in its window, from 1.
    """
    if number > 1:
        return
    for optimizer in run.optim.optimizers:
        for group in optimizer.optimizer.param_groups:
            if any(map(is_not, map(_GRADIENT, group["params"]), repeat(None))):
                optimizer.zero_grad()


def finite_probe_of(run: FitRun, finite_probe: Tensor | None, loss: Tensor) -> Tensor | None:
    """Return the maximum of a window's absolute losses so far; None if no guard needs it."""
    if run.optim.guard is None:
        return None
    return loss.abs() if finite_probe is None else torch.maximum(finite_probe, loss.abs())


def begin_batch(
    run: FitRun, micro_batch: GlobalBatch, batch: Any, items: float, ends_epoch: bool
) -> tuple[Any, Any, bool]:
    """Begin a batch and call ``on_train_batch_start``.

    Args:
        run: The fit.
        micro_batch: The global batch.
        batch: This rank's batch, or its dummy batch.
        items: Its items.
        ends_epoch: Whether this rank has voted to end the epoch in an earlier batch of the window.

    Returns:
        The hooks of the batch, and those of its backward pass, which forbid collectives where not
        all ranks call them; and whether this rank has voted to end the epoch.
    """
    batch_hooks: Any = run.hooks
    backward_hooks: Any = run.hooks
    if micro_batch.batches < run.dp_size:
        batch_hooks = backward_hooks = without_collectives(run, micro_batch)
    elif run.device_transfer.may_lack_items:
        backward_hooks = NoCollectives(run.hooks, WITHOUT_ITEMS)
    if micro_batch.present:
        run.metrics.begin_batch(items)
        # The window continues after a vote without this rank's batches, since others wait for its
        # collectives.
        if ends_epoch or batch_hooks.on_train_batch_start(batch, run.batch_idx):
            leave_batch_out(run, micro_batch)
            ends_epoch = True
    return batch_hooks, backward_hooks, ends_epoch


def without_collectives(run: FitRun, micro_batch: GlobalBatch) -> Any:
    """Return the hooks of a global batch that some ranks lack; collectives in them raise."""
    why = missing_batch_error(run.data.epoch_iterator, micro_batch.batches, HOOK_OF_BATCH)
    return NoCollectives(run.hooks, why)


def leave_batch_out(run: FitRun, micro_batch: GlobalBatch) -> None:
    """Skip a batch, because ``on_train_batch_start`` returned -1.

    The rank continues like one without a batch.

    Args:
        run: The fit.
        micro_batch: The global batch.

    Raises:
        RuntimeError: Other ranks run collectives that need this rank.
    """
    micro_batch.present = False
    run.metrics.leave_batch()
    manual = not run.module.automatic_optimization
    shared = run.engine.parallel.forward_is_collective and run.dp_size < run.world_size
    if run.engine.driver is not None or shared or (manual and run.world_size > 1):
        mode = "manual optimisation" if manual else type(run.engine).__name__
        raise RuntimeError(
            f"on_train_batch_start returned -1 on rank {run.rank} at batch {run.batch_idx}, "
            f"which cannot end an epoch with {mode} on {run.world_size} processes: the other "
            "processes would wait for this one. Use Trainer(limit_train_batches=...), or "
            "trainer.should_stop to end the run."
        )


def check_may_skip(run: FitRun) -> None:
    """Check that `training_step` may return None, which gives its batch the weight 0.

    A warning about a run's first batch is for those who forgot to return the loss.

    Raises:
        TypeError: The engine's passes are collective, so other ranks would hang.
    """
    if run.counters.epoch == run.counters.epoch_global_batches == 0:
        logger.warning(
            "training_step of %s returned None for the first batch, which is skipped. Return the "
            "loss, or set automatic_optimization = False if it steps the optimizers itself, unless "
            "this is intended.",
            type(run.module).__name__,
        )
    if run.engine.parallel.forward_is_collective or (
        run.dp_size > 1 and run.device.type != "cpu" and not run.device_transfer.counts_items
    ):
        raise TypeError(
            f"training_step of {type(run.module).__name__} returned None on rank {run.rank} at "
            f"update {run.counters.global_step + 1}, which would skip its batch only on this "
            "process. Define count_items, and return 0 from it for a batch that must not count."
        )
