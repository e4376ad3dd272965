"""Manual optimisation, in which ``training_step`` makes the updates.

A window is one global batch. Losses are not weighted by items. Gradients are averaged over the
processes, without weights, when an optimizer steps.
"""

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
    leave_batch_out,
    without_collectives,
)
from trainer.loops.update import check_parameters
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.tree import detach

logger = module_logger(__name__)


class ManualOptimization:
    """Runs the batches of a fit in manual optimisation, and the calls of ``training_step``.

    Args:
        run: The fit.
    """

    def __init__(self, run: FitRun) -> None:
        self._run = run
        # The hooks of the current batch: collectives in them are forbidden if some ranks have none.
        self._hooks: Any = run.hooks
        self._in_dummy = False
        # On an accelerator: whether a gradient of the current step is non-finite, of shape ().
        self._non_finite: Tensor | None = None
        for optimizer in run.optim.optimizers:
            optimizer.before_step = self.before_step

    def train_window(self, window: Iterator[GlobalBatch]) -> bool:
        """Call `training_step` on one batch; it runs its own backward passes and optimizer steps.

        A rank without a batch runs a dummy batch, to join the collectives of the other ranks.

        Args:
            window: Exactly one global batch.

        Returns:
            Whether the work after an update is due: an optimizer stepped, or the epoch ends.
        """
        run = self._run
        engine, metrics, counters = run.engine, run.metrics, run.counters
        (micro_batch,) = window
        batch, items = items_of(micro_batch)
        batch_idx = run.batch_idx = counters.epoch_global_batches
        steps = sum(optimizer.steps for optimizer in run.optim.optimizers)
        outputs: Any = None
        ends_epoch = False
        metrics.begin_window()
        run.hooks.on_train_step_start()
        complete = micro_batch.batches == run.dp_size
        engine.begin_micro_batch(sync=True, complete=complete, source=micro_batch.first)
        # `training_step` runs on all ranks (see `_run_dummy`), hooks only where there is a batch.
        hooks = self._hooks = run.hooks if complete else without_collectives(run, micro_batch)
        if micro_batch.present:
            metrics.begin_batch(items)
            if hooks.on_train_batch_start(batch, batch_idx):
                leave_batch_out(run, micro_batch)
                items, ends_epoch = 0.0, True
            else:
                with run.precision.autocast():
                    outputs = engine.forward("training_step", batch, batch_idx)
        else:
            self._run_dummy(batch)
        counters.count(micro_batch, run.dp_size)
        engine.sync_stats(run.own_stats(micro_batch, items, ends_epoch=ends_epoch))
        stepped = sum(optimizer.steps for optimizer in run.optim.optimizers) > steps
        if stepped:
            if run.optim.guard is not None and self._non_finite is not None:
                run.optim.guard.should_step(self._non_finite, counters.global_step + 1, None)
                self._non_finite = None
            run.intervals.see_if_log_is_due(counters.global_step + 1, run.progress)
            counters.global_step += 1
        elif micro_batch.last and counters.epoch == counters.global_step == 0 and run.rank == 0:
            logger.warning(
                "training_step of %s made no update in the first epoch. In manual optimisation, "
                "call self.manual_backward(loss) and self.optimizers().step() in it.",
                type(run.module).__name__,
            )
        if micro_batch.present:
            hooks.on_train_batch_end(run.module._outputs_of_step(outputs, 1), batch, batch_idx)
        self._hooks = run.hooks
        metrics.items = items
        run.hooks.on_train_step_end()
        return stepped or micro_batch.last or ends_epoch

    def _run_dummy(self, batch: Any) -> None:
        """Run a dummy batch on a rank without a batch, to join the collectives of the other ranks.

        Its gradients are zeroed before they are reduced, when an optimizer steps.

        Args:
            batch: The dummy batch; None if the data ended here before the first batch.

        Raises:
            ValueError: There is no dummy batch.
        """
        run = self._run
        if batch is None:
            check_needs_no_dummy(run)
        self._in_dummy = True
        for optimizer in run.optim.optimizers:
            optimizer.is_dummy = True
        try:
            with isolated_dummy(run), run.engine.dummy():
                run.engine.forward("training_step", detach(batch), run.batch_idx)
        finally:
            self._in_dummy = False
            for optimizer in run.optim.optimizers:
                optimizer.is_dummy = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss, with its hooks; see `TrainModule.manual_backward`."""
        run = self._run
        for optimizer in run.optim.optimizers:
            optimizer.note_backward()
        if self._in_dummy:
            run.engine.backward(run.precision.scale(loss * 0.0), None, *args, **kwargs)
            return
        self._hooks.on_before_backward(loss)
        run.engine.backward(run.precision.scale(loss), None, *args, **kwargs)
        self._hooks.on_after_backward()

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Call `on_before_optimizer_step` and check the gradients, before an optimizer steps.

        Args:
            optimizer: The optimizer that steps.

        Raises:
            FloatingPointError: A gradient is not finite, see `FiniteGuard.should_step`. On an
                accelerator the error is raised later, to avoid a device sync.
        """
        run = self._run
        if run.optim.parameters.refresh(run.counters.epoch):
            check_parameters(run)
        if not self._in_dummy:
            self._hooks.on_before_optimizer_step(optimizer)
        if run.optim.guard is None or run.precision.scales:
            return
        non_finite = run.engine.gradients.found_non_finite(parameters_of([optimizer]))
        if non_finite is None:
            return
        if not isinstance(non_finite, Tensor):
            run.optim.guard.should_step(non_finite, run.counters.global_step + 1, None)
        elif self._non_finite is None:
            self._non_finite = non_finite
        else:  # the results of all optimizers are combined, and read back in one transfer
            self._non_finite = torch.maximum(self._non_finite, non_finite.to(self._non_finite))


def manual_of(run: FitRun) -> ManualOptimization:
    """Return the run's `ManualOptimization`, created once, even if a hook turns it on later."""
    if run.manual is None:
        run.manual = ManualOptimization(run)
    return run.manual
