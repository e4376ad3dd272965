"""The training step in manual optimisation, where `training_step` makes the updates itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.data.rounds import Round
from trainer.distributed.objects import broadcast_object
from trainer.loops.apart import Apart, reason
from trainer.loops.batch_norm import kept_metrics
from trainer.loops.evaluate import ENDED_EARLY, kept_buffers
from trainer.loops.moving import items_of
from trainer.loops.run import FitRun
from trainer.loops.window import count_round, see_if_log_is_due, take_note
from trainer.optim.finite import find_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.rng import isolated_rng
from trainer.tree import detach, to_host

logger = logging.getLogger(__name__)


def manual_window(run: FitRun, window: Iterator[Round]) -> bool:
    """Call `training_step` on one batch; it runs its own backward passes and optimizer steps.

    A rank without a batch runs a dummy batch, to join the collectives of the other ranks.

    Args:
        run: The fit.
        window: Exactly one global batch.

    Returns:
        Whether the work after an update is due: an optimizer stepped, or the epoch is over.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    (micro,) = window
    batch, items = items_of(micro)
    batch_idx = run.batch_idx = counters.rounds
    steps = sum(optimizer.steps for optimizer in run.optimizers)
    outputs: Any = None
    metrics.begin_window()
    hooks.on_train_step_start()
    if micro.batches < run.world_size and run.last_batch is None:
        # The epoch has fewer batches than ranks. Broadcast rank 0's, through host memory.
        run.last_batch = run.mover.move(broadcast_object(to_host(batch)))
    # `training_step` runs on all ranks (see `stand_in`), hooks only where there is a batch.
    own: Any = hooks
    if micro.batches < run.world_size:
        own = Apart(hooks, reason(run.feed, micro.batches, "a hook of a batch"))
    run.own_hooks = own
    if micro.present:
        metrics.begin_batch(items)
        own.on_train_batch_start(batch, batch_idx)
        with run.precision.autocast():
            outputs = engine.step("training_step", batch, batch_idx)
        run.last_batch = batch if run.world_size > 1 else None
    else:
        stand_in(run, batch_idx)
    count_round(run, micro, None)
    engine.finish_window(None, run.own_tally(items))
    stepped = sum(optimizer.steps for optimizer in run.optimizers) > steps
    if stepped:
        if run.guard is not None and run.found is not None:
            run.guard.admits(run.found, counters.global_step + 1, None)
            run.found = None
        see_if_log_is_due(run)
        counters.global_step += 1
    elif micro.last and counters.epoch == counters.global_step == 0 and run.rank == 0:
        logger.warning(
            "training_step of %s made no update in the first epoch: in manual optimisation it "
            "must call self.manual_backward(loss) and step() of self.optimizers().",
            type(run.module).__name__,
        )
    if micro.present:
        own.on_train_batch_end(detach(outputs), batch, batch_idx)
    run.own_hooks = hooks
    metrics.items = items
    hooks.on_train_step_end()
    return stepped or micro.last


def before_manual_step(run: FitRun, optimizer: AcceleratedOptimizer) -> None:
    """Call `on_before_optimizer_step` and check the gradients, before the user's optimizer steps.

    Args:
        run: The fit.
        optimizer: The optimizer that steps.

    Raises:
        FloatingPointError: A gradient is not finite, see `FiniteGuard.admits`. On an accelerator
            the error is raised later, to avoid a device sync.
    """
    take_note(run)
    if not run.weightless:
        run.own_hooks.on_before_optimizer_step(optimizer)
    if run.guard is None or run.precision.scales:
        return
    found = find_non_finite(parameter.grad for parameter in parameters_of([optimizer]))
    if found is None:
        return
    if not isinstance(found, Tensor):
        run.guard.admits(found, run.counters.global_step + 1, None)
    else:  # the results of all optimizers are combined, and read back in one transfer
        run.found = found if run.found is None else torch.maximum(run.found, found.to(run.found))


def stand_in(run: FitRun, batch_idx: int) -> None:
    """Run a dummy batch on a rank without a batch, to join the other ranks' gradient reductions.

    The dummy batch is the latest batch of this rank. Its gradients are zeroed before the reduction
    and `log` does nothing. Buffers, metric objects and RNG states are restored afterwards.

    Args:
        run: The fit.
        batch_idx: The index of the current batch.

    Raises:
        ValueError: This rank has had no batch yet, since its dataset ended before the first one.
    """
    if run.last_batch is None:
        raise ValueError(
            f"In epoch {run.counters.epoch} the training data ended before the first batch, on "
            f"rank {run.rank}. {ENDED_EARLY}"
        )
    run.weightless = True
    for optimizer in run.optimizers:
        optimizer.weightless = True
    try:
        with (
            kept_buffers(run.module),
            kept_metrics(run.module),
            isolated_rng(),
            run.metrics.muted(),
            run.precision.autocast(),
        ):
            run.engine.step("training_step", run.last_batch, batch_idx)
    finally:
        run.weightless = False
        for optimizer in run.optimizers:
            optimizer.weightless = False
