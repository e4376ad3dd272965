"""A batch of manual optimisation, in which ``training_step`` makes the updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.data.epoch_iterator import GlobalBatch
from trainer.errors import module_logger
from trainer.loops.buffers import isolated_dummy
from trainer.loops.device_transfer import items_of
from trainer.loops.state import FitRun
from trainer.loops.train_step import (
    check_needs_no_dummy,
    count_global_batch,
    leave_batch_out,
    without_collectives,
)
from trainer.loops.update import refresh_parameter_lists, see_if_log_is_due
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.tree import detach

logger = module_logger(__name__)


def manual_window(run: FitRun, window: Iterator[GlobalBatch]) -> bool:
    """Call `training_step` on one batch; it runs its own backward passes and optimizer steps.

    A rank without a batch runs a dummy batch, to join the collectives of the other ranks.

    Args:
        run: The fit.
        window: Exactly one global batch.

    Returns:
        Whether the work after an update is due: an optimizer stepped, or the epoch ends.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    (micro,) = window
    batch, items = items_of(micro)
    batch_idx = run.batch_idx = counters.global_batches
    steps = sum(optimizer.steps for optimizer in run.optim.optimizers)
    outputs: Any = None
    metrics.begin_window()
    hooks.on_train_step_start()
    engine.begin_micro_batch(sync=True, complete=micro.batches == run.dp_size, source=micro.first)
    # `training_step` runs on all ranks (see `manual_dummy`), hooks only where there is a batch.
    own: Any = hooks if micro.batches == run.dp_size else without_collectives(run, micro)
    run.step.hooks, run.step.ends_epoch = own, False
    if micro.present:
        metrics.begin_batch(items)
        if own.on_train_batch_start(batch, batch_idx):
            leave_batch_out(run, micro)
            items = 0.0
        else:
            with run.precision.autocast():
                outputs = engine.forward("training_step", batch, batch_idx)
    else:
        manual_dummy(run, batch)
    count_global_batch(run, micro, None)
    engine.sync_stats(run.own_stats(items))
    stepped = sum(optimizer.steps for optimizer in run.optim.optimizers) > steps
    if stepped:
        if run.optim.guard is not None and run.step.non_finite is not None:
            run.optim.guard.should_step(run.step.non_finite, counters.global_step + 1, None)
            run.step.non_finite = None
        see_if_log_is_due(run)
        counters.global_step += 1
    elif micro.last and counters.epoch == counters.global_step == 0 and run.rank == 0:
        logger.warning(
            "training_step of %s made no update in the first epoch: in manual optimisation it "
            "must call self.manual_backward(loss) and step() of self.optimizers().",
            type(run.module).__name__,
        )
    if micro.present:
        own.on_train_batch_end(run.module._outputs_of_step(outputs, 1), batch, batch_idx)
    run.step.hooks = hooks
    metrics.items = items
    hooks.on_train_step_end()
    return stepped or micro.last or run.step.ends_epoch


def manual_dummy(run: FitRun, batch: Any) -> None:
    """Run a dummy batch on a rank without a batch, to join the collectives of the other ranks.

    Its gradients are zeroed before they are reduced, when an optimizer steps.

    Args:
        run: The fit.
        batch: The dummy batch; None if the data ended here before the first batch.

    Raises:
        ValueError: There is none.
    """
    if batch is None:
        check_needs_no_dummy(run)
    run.step.is_dummy = True
    for optimizer in run.optim.optimizers:
        optimizer.is_dummy = True
    try:
        with isolated_dummy(run), run.engine.dummy():
            run.engine.forward("training_step", detach(batch), run.batch_idx)
    finally:
        run.step.is_dummy = False
        for optimizer in run.optim.optimizers:
            optimizer.is_dummy = False


def before_manual_step(run: FitRun, optimizer: AcceleratedOptimizer) -> None:
    """Call `on_before_optimizer_step` and check the gradients, before the user's optimizer steps.

    Args:
        run: The fit.
        optimizer: The optimizer that steps.

    Raises:
        FloatingPointError: A gradient is not finite, see `FiniteGuard.should_step`. On an
            accelerator the error is raised later, to avoid a device sync.
    """
    refresh_parameter_lists(run)
    if not run.step.is_dummy:
        run.step.hooks.on_before_optimizer_step(optimizer)
    if run.optim.guard is None or run.precision.scales:
        return
    found = run.engine.found_non_finite(parameters_of([optimizer]))
    if found is None:
        return
    if not isinstance(found, Tensor):
        run.optim.guard.should_step(found, run.counters.global_step + 1, None)
    else:  # the results of all optimizers are combined, and read back in one transfer
        run.step.non_finite = (
            found
            if run.step.non_finite is None
            else torch.maximum(run.step.non_finite, found.to(run.step.non_finite))
        )
