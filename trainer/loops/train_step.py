"""One update: a window of micro-batches, or a batch of manual optimisation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

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
from trainer.loops.module_state import warn_of_dropout_off
from trainer.loops.profiler import OPTIMIZER
from trainer.loops.state import FitRun
from trainer.metrics import to_floats
from trainer.optim.clipping import clip_each_
from trainer.optim.optimizer import AcceleratedOptimizer, LossOfUpdate, parameters_of
from trainer.optim.weighting import loss_of
from trainer.tree import detach

logger = module_logger(__name__)

_GRADIENT = attrgetter("grad")


def train_window(run: FitRun, window: Iterator[GlobalBatch]) -> bool:  # noqa: PLR0915  # one algorithm
    """Run forward and backward on a window of micro-batches and make one optimizer update.

    Args:
        run: The fit.
        window: The global batches of the window, one per micro-batch. In the last one of the epoch
            this rank may have no batch; it still takes part in the gradient reduction.

    Returns:
        True: the window makes an update, or ends the epoch.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    weighting = run.optim.weighting
    size = weighting.micro_batches = run.optim.accumulation  # a hook may change it for the next one
    items_here = 0.0
    # Items of all ranks; None if this rank cannot know the others'. On the CPU their sum is there
    # anyway, and knows of batches that others have skipped.
    may_skip = run.device.type == "cpu" or hooks.may_end_epoch
    known = None if run.dp_size > 1 and may_skip else 0.0
    largest: Tensor | None = None  # non-finite only if a loss is: unlike a sum it cannot overflow
    seen: Tensor | None = None
    run.step.ends_epoch = False
    metrics.begin_window()
    hooks.on_train_step_start()
    for number, micro in enumerate(window, 1):
        sync = micro.last or number == size
        engine.begin_micro_batch(sync=sync, complete=micro.batches == run.dp_size)
        batch, items = items_of(micro)
        weighting.refer_to(items)
        batch_idx = run.batch_idx = counters.global_batches
        outputs: Any = None
        loss: Tensor | None = None
        skips = False
        of_batch, of_backward = begin_batch(run, micro, batch, items)
        if micro.present and items:
            with run.precision.autocast():
                outputs = engine.forward("training_step", batch, batch_idx)
            if outputs is None:
                check_may_skip(run)
                skips, items, known = True, 0.0, None
        elif micro.present and run.dp_size == 1:
            outputs = step_without_gradient(run, batch, batch_idx)
        elif run.step.ends_epoch:
            items, known = 0.0, None
        drop_leftover_gradients(run, number)
        if items:
            loss = loss_of(outputs)
            seen = loss.detach()
            largest = seen if size == 1 else larger(run, largest, seen)
            of_backward.on_before_backward(loss)
        items_here += items
        known = count_global_batch(run, micro, known)
        stats = run.own_stats(items_here, largest) if sync else None
        if loss is None:
            if run.dp_size > 1 and not skips:
                outputs, total = dummy_step(run, micro, batch, number, stats)
            else:
                total = contribute_nothing(run, stats, skips=skips or not micro.present)
        else:
            total = engine.backward(run.precision.scale(weighting.weigh(loss, items)), stats)
            of_backward.on_after_backward()
        if sync:
            metrics.items = items_here  # the weight of what is logged about the update
            total = total if known is None else known
            run.timing.call(OPTIMIZER, update, run, total, items_here, seen)
        if micro.present:
            metrics.items = items
            kept = run.module._outputs_of_step(outputs, size)
            of_batch.on_train_batch_end(kept, batch, batch_idx)
    metrics.items = items_here
    hooks.on_train_step_end()
    run.timing.call(OPTIMIZER, drop_gradients, run)
    return True


def dummy_step(
    run: FitRun, micro: GlobalBatch, batch: Any, number: int, stats: StepStats | None
) -> tuple[Any, float | Tensor]:
    """Run forward and backward of a batch that must not train; see `trainer.engines.lockstep`.

    It is the dummy batch of a rank without a batch, the batch that ``on_train_batch_start`` has
    left out, or one without items. The last may log values, which have weight 0.

    Args:
        run: The fit.
        micro: The global batch.
        batch: The batch; None if the data ended here before the first one.
        number: The micro-batch's number in its window, from 1.
        stats: See `Engine.backward`.

    Returns:
        What `training_step` returned, None if it did not run; and the result of `Engine.backward`.
    """
    if run.step.ends_epoch and run.data.epoch_iterator.dummy_batch is not None:
        batch = run.data.epoch_iterator.dummy_batch  # the one left out may not be fit to run
    if batch is None:
        check_needs_no_dummy(run)
        return None, contribute_nothing(run, stats, skips=False)
    if stats is not None:
        run.precision.scale_nothing(run.device)
    if micro.present:  # only without items
        with run.precision.autocast(), isolated_batch_norm(run.module, counts=True):
            return run_dummy(run, batch, number, stats)
    with isolated_dummy(run):
        return None, run_dummy(run, detach(batch), number, stats)[1]


def run_dummy(
    run: FitRun, batch: Any, number: int, stats: StepStats | None
) -> tuple[Any, float | Tensor]:
    """Run forward and backward of a dummy batch with a loss of 0; see `dummy_step`."""
    with run.engine.dummy():
        outputs = run.engine.forward("training_step", batch, run.batch_idx)
        drop_leftover_gradients(run, number)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.requires_grad:
            return outputs, run.engine.backward(loss * 0.0, stats)
        return outputs, run.engine.backward(None, stats)


def contribute_nothing(run: FitRun, stats: StepStats | None, *, skips: bool) -> float | Tensor:
    """Take part in the reduction of a window without a loss; returns as `Engine.backward`.

    Args:
        run: The fit.
        stats: See `Engine.backward`.
        skips: Whether the batch is skipped: with one process it then leaves gradients as they are;
            optimizers leave parameters without one as they are. One without items gives zeros.
    """
    if stats is not None:
        run.precision.scale_nothing(run.device)
    if skips and run.dp_size == 1:
        return 0.0 if stats is None else run.engine.sync_stats(stats)
    return run.engine.backward(None, stats)


def check_needs_no_dummy(run: FitRun) -> None:
    """Check that a rank without any batch may do without a dummy batch.

    Raises:
        ValueError: Other ranks wait for this one in their forward pass, or in an optimizer.
    """
    if run.engine.forward_is_collective or not run.module.automatic_optimization:
        raise ValueError(
            f"In epoch {run.counters.epoch} the training data ended before the first batch, on "
            f"rank {run.rank}. {ENDED_EARLY}"
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


def larger(run: FitRun, largest: Tensor | None, loss: Tensor) -> Tensor | None:
    """Return the maximum of a window's absolute losses so far; None if no guard needs it."""
    if run.optim.guard is None:
        return None
    return loss.abs() if largest is None else torch.maximum(largest, loss.abs())


def step_without_gradient(run: FitRun, batch: Any, batch_idx: int) -> Any:
    """Run `training_step` without gradients on a batch that has no items (`count_items` is 0).

    Its loss is a mean over nothing, so its backward pass would produce NaN. The step may still log;
    its values have weight 0.

    Args:
        run: The fit, on one process.
        batch: The batch.
        batch_idx: The index of the batch.
    """
    with torch.no_grad(), run.precision.autocast():
        return run.bare_step("training_step")(batch, batch_idx)


def begin_batch(run: FitRun, micro: GlobalBatch, batch: Any, items: float) -> tuple[Any, Any]:
    """Begin a batch: call ``on_train_batch_start``.

    Args:
        run: The fit.
        micro: The global batch.
        batch: This rank's batch, or its dummy batch.
        items: Its items.

    Returns:
        The hooks of the batch, and those of its backward pass. They forbid collectives where not
        all ranks call them.
    """
    of_batch: Any = run.hooks
    of_backward: Any = run.hooks
    if micro.batches < run.dp_size:
        of_batch = of_backward = without_collectives(run, micro)
    elif run.device_transfer.may_lack_items:
        of_backward = NoCollectives(run.hooks, WITHOUT_ITEMS)
    if micro.present:
        run.metrics.begin_batch(items)
        # A window goes on after a vote, without this rank: the other ranks need its messages.
        if run.step.ends_epoch or of_batch.on_train_batch_start(batch, run.batch_idx):
            leave_batch_out(run, micro)
    return of_batch, of_backward


def without_collectives(run: FitRun, micro: GlobalBatch) -> Any:
    """Return the hooks of a global batch that some ranks lack; collectives in them raise."""
    why = missing_batch_error(run.data.epoch_iterator, micro.batches, HOOK_OF_BATCH)
    return NoCollectives(run.hooks, why)


def leave_batch_out(run: FitRun, micro: GlobalBatch) -> None:
    """Leave a batch out, because ``on_train_batch_start`` returned -1, and vote to end the epoch.

    The rank goes on as one without a batch.

    Args:
        run: The fit.
        micro: The global batch.

    Raises:
        RuntimeError: Other ranks need this one for what they run.
    """
    run.step.ends_epoch, micro.present = True, False
    run.metrics.leave_batch()
    manual = not run.module.automatic_optimization
    shared = run.engine.forward_is_collective and run.dp_size < run.world_size
    if run.engine.optimizer_driver is not None or shared or (manual and run.world_size > 1):
        what = "manual optimisation" if manual else type(run.engine).__name__
        raise RuntimeError(
            f"on_train_batch_start returned -1 on rank {run.rank} at batch {run.batch_idx}, which "
            f"cannot end an epoch with {what} on {run.world_size} processes: they would wait for "
            "this one. Use Trainer(limit_train_batches=...), or trainer.should_stop to end the run."
        )


def check_may_skip(run: FitRun) -> None:
    """Check that `training_step` may return None, which gives its batch the weight 0.

    A warning about a run's first batch is for those who forgot to return the loss.

    Raises:
        TypeError: All ranks would have to know.
    """
    if run.counters.epoch == run.counters.global_batches == 0:
        logger.warning(
            "training_step of %s returned None for the first batch, which is skipped: return the "
            "loss, unless that is meant.",
            type(run.module).__name__,
        )
    if run.engine.forward_is_collective or (
        run.dp_size > 1 and run.device.type != "cpu" and not run.device_transfer.counts_items
    ):
        raise TypeError(
            f"training_step of {type(run.module).__name__} returned None on rank {run.rank} at "
            f"update {run.counters.global_step + 1}, which would skip its batch on this process "
            "alone. Define count_items, and return 0 from it for a batch that must not count."
        )


def count_global_batch(run: FitRun, micro: GlobalBatch, known: float | None) -> float | None:
    """Advance the counters by one global batch.

    Args:
        run: The fit.
        micro: The global batch.
        known: Items of the window so far over all ranks; None if unknown.

    Returns:
        `known` plus the items of this global batch over all ranks; None if they are unknown.
    """
    counters = run.counters
    if run.dp_size > 1:
        run.engine.use_buffers_of(micro.first)
    counters.global_batches += 1
    counters.epoch_batches += micro.batches
    counters.epoch_complete = micro.last
    run.data.ended = micro.ended or (micro.last and run.data.epoch_iterator.sampler is None)
    # A user's collate_fn may drop samples: a rank knows that only of its own batches. Batches that
    # the dataset yields ready-made are assumed to be as large on the other ranks as on this one.
    items = micro.samples if run.dp_size == 1 else micro.global_samples
    read = micro.global_samples or micro.real_samples or micro.samples * micro.batches
    counters.samples_seen += read
    counters.batches_seen += micro.batches
    if run.device_transfer.counts_items or known is None or items is None:
        return None
    return known + items


def update(run: FitRun, total: float | Tensor, items: float, seen: Tensor | None) -> None:
    """Make one optimizer update: unscale, call hooks, check for non-finite values, clip, step.

    Step-wise schedulers tick and `global_step` advances, also if the update is skipped. Nothing is
    done if ``on_train_batch_start`` has left out all batches of all ranks.

    Args:
        run: The fit; its gradients are already reduced over the ranks.
        total: Items of the window over all ranks. The gradients are divided by it.
        items: Items of the window on this rank.
        seen: The last loss of this rank, for the error message.

    Raises:
        FloatingPointError: A gradient is not finite; see `trainer.optim.finite`.
    """
    if run.hooks.may_end_epoch and not items and run.step_sync.no_batch_ran():
        run.step_sync.settle()  # on all ranks, so that the epoch ends here
        return
    optim = run.optim
    refresh_parameter_lists(run)
    # No optimizer zeroes the gradients of parameters that none of them has. They would accumulate
    # from update to update, and raise the total norm by which all gradients are clipped.
    for parameter in optim.unused:
        parameter.grad = None
    if run.precision.scales:
        run.precision.unscale_together([optimizer.optimizer for optimizer in optim.optimizers])
    factor = optim.weighting.factor(total)
    if factor is not None:
        run.engine.scale_gradients_(optim.parameters, factor)
    see_if_log_is_due(run)
    for optimizer in optim.optimizers:
        run.hooks.on_before_optimizer_step(optimizer)
    if should_step(run, seen):
        if optim.clips or "configure_gradient_clipping" in run.hooks.parts:
            clip(run)
        stepped = step_optimizers(run, seen)
        if optim.guard is not None and run.precision.scales and stepped:
            skipped = [optimizer.skipped for optimizer in stepped]
            optim.guard.count_scaled(skipped, run.counters.global_step + 1)
    run.counters.global_step += 1  # first: an overridden lr_scheduler_step may read it
    tick(run, "step", run.counters.global_step, by_metric=False)


def step_optimizers(run: FitRun, seen: Tensor | None) -> list[AcceleratedOptimizer]:
    """Let each optimizer make its update, or the module's own `optimizer_step`.

    Args:
        run: The fit.
        seen: The last loss of this rank.

    Returns:
        Those that an override has not left out.
    """
    own_step = run.hooks.parts.get("optimizer_step")
    if own_step is None:
        for optimizer in run.optim.optimizers:
            optimizer.step()
        return run.optim.optimizers
    stepped = []
    for optimizer in run.optim.optimizers:
        steps = optimizer.steps
        own_step(run.counters.epoch, run.batch_idx, optimizer, LossOfUpdate(seen))
        if optimizer.steps > steps:
            stepped.append(optimizer)
            continue
        optimizer.leave_out()
        if run.optim.guard is not None:
            run.optim.guard.skipped += 1
    return stepped


def drop_gradients(run: FitRun) -> None:
    """Call `on_before_zero_grad` and zero the gradients, at the end of a window."""
    own_zero_grad = run.hooks.parts.get("optimizer_zero_grad")
    for optimizer in run.optim.optimizers:
        run.hooks.on_before_zero_grad(optimizer)
        if own_zero_grad is None:
            optimizer.zero_grad()
        else:
            own_zero_grad(run.counters.epoch, run.batch_idx, optimizer)


def refresh_parameter_lists(run: FitRun) -> None:
    """Refresh the lists of parameters of the module and the optimizers if they may have changed.

    That is: at the first update of each epoch, and whenever a parameter group is another list or
    has another length, first or last parameter. Comparing all parameters at every update would be
    slow.

    Raises:
        ValueError: See `check_unregistered_parameters`.
        RuntimeError: Gradients of some parameters are not averaged over the ranks; see
            `DataParallel.check_unknown_parameters`.
    """
    now = [run.counters.epoch]
    for optimizer in run.optim.optimizers:
        for group in optimizer.optimizer.param_groups:
            parameters = group["params"]
            now += id(parameters), len(parameters)
            if parameters:
                now += id(parameters[0]), id(parameters[-1])
    if now != run.optim.parameter_fingerprint:
        # At the first update: hooks before it may have called eval().
        if not run.optim.parameter_fingerprint and run.warns:
            warn_of_dropout_off(run.module)
        own = list(run.module.parameters())
        used = parameters_of(run.optim.optimizers)
        own_ids, used_ids = set(map(id, own)), set(map(id, used))
        run.optim.unused = [parameter for parameter in own if id(parameter) not in used_ids]
        run.optim.unregistered = [parameter for parameter in used if id(parameter) not in own_ids]
        run.optim.parameters = own + run.optim.unregistered
        run.optim.parameter_fingerprint = now
        run.engine.check_unknown_parameters()
    if run.optim.unregistered and not run.optim.warned_of_unregistered:
        check_unregistered_parameters(run)


def check_unregistered_parameters(run: FitRun) -> None:
    """Warn of unregistered parameters: an optimizer trains them, but the module does not have them.

    Parameters without a gradient are ignored: the loss does not use them.

    Raises:
        ValueError: With several processes, where nothing averages the gradients of these
            parameters.
    """
    trained = [parameter for parameter in run.optim.unregistered if parameter.grad is not None]
    if not trained:
        return
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in trained)
    what = (
        f"An optimizer trains parameters of the shapes {shapes} that "
        f"{type(run.module).__name__} does not have"
    )
    fix = (
        "Assign them, or the module that has them, to an attribute of the module; a list of "
        "them as an nn.ParameterList or nn.ModuleList."
    )
    if not all(isinstance(parameter, nn.Parameter) for parameter in trained):
        fix = "Wrap a plain tensor in nn.Parameter first. " + fix
    if run.world_size > 1 and run.module.automatic_optimization:
        raise ValueError(
            f"{what}: they would be neither averaged over the processes nor saved. {fix}"
        )
    run.optim.warned_of_unregistered = True
    if run.rank == 0:
        logger.warning(
            "%s: no checkpoint holds them, and a resumed run starts with their initial values. %s",
            what,
            fix,
        )


def clip(run: FitRun) -> None:
    """Clip the gradients: separately for each optimizer with limits of its own, the rest together.

    The optimizers' parameters are listed each time, since the user may add a parameter group at any
    time. A module that overrides `configure_gradient_clipping` clips those of each optimizer.
    """
    own_clip = run.hooks.parts.get("configure_gradient_clipping")
    if own_clip is not None:
        limits_of = {id(optimizer): limits for optimizer, limits in run.optim.own_limits}
        for optimizer in run.optim.optimizers:
            limits = limits_of.get(id(optimizer), run.optim.limits)
            given = {"norm": limits.max_norm, "value": limits.max_value}
            asked = {kind: limit for kind, limit in given.items() if limit is not None}
            for kind, limit in asked.items():
                own_clip(optimizer, limit, kind)
            if not asked:
                own_clip(optimizer, None, None)
        return
    apart = [(parameters_of([optimizer]), limits) for optimizer, limits in run.optim.own_limits]
    clip_each_(run.engine, run.optim.parameters, apart, run.optim.limits)


def should_step(run: FitRun, seen: Tensor | None) -> bool:
    """Return whether to make the update: False if a gradient or loss is non-finite on any rank.

    With loss scaling (float16) it is always True: the gradient scaler skips overflows itself.

    Args:
        run: The fit.
        seen: The last loss of this rank, for the error message.

    Raises:
        FloatingPointError: See `FiniteGuard.should_step`.
    """
    if run.optim.guard is None or run.precision.scales:
        return True
    found = run.engine.found_non_finite(run.optim.parameters)
    if found is not None:
        found = joined(found, run.step_sync.bad_losses)
    if run.optim.guard.should_step(found, run.counters.global_step + 1, seen):
        return True
    for optimizer in run.optim.optimizers:
        optimizer.leave_out()
    return False


def joined(found: bool | Tensor, bad_losses: float | Tensor) -> bool | Tensor:
    """Return whether a gradient or a loss is non-finite, without a device sync.

    Args:
        found: Whether a gradient is; on an accelerator a tensor of shape (), 1 or 0.
        bad_losses: The number of ranks with a non-finite loss; a tensor if not on the host yet.

    Returns:
        A bool, or a tensor of shape () like `found`.
    """
    if not isinstance(found, Tensor):
        return found or bool(bad_losses > 0)
    if isinstance(bad_losses, Tensor):
        bad = bad_losses.to(found, non_blocking=True).clamp(max=1.0)
        return torch.maximum(found, bad)
    return torch.ones_like(found) if bad_losses else found


def see_if_log_is_due(run: FitRun) -> None:
    """Set `Plan.log_due` for the update in progress, which `global_step` does not count yet."""
    step, schedule = run.counters.global_step + 1, run.plan.log_schedule
    run.plan.log_due = schedule.may_be_due(step) and schedule.due(run.progress_at(step))


def reduce_update(run: FitRun) -> None:
    """Reduce what the latest update logged, for decisions that depend on it; collective.

    The values are remembered, not recorded. If they are already reduced, nothing is done. If the
    validation after this update logged the same name, the validation's value is kept.
    """
    step = run.counters.global_step
    run.recorder.flush()
    if not run.metrics.step_reduced:
        values = to_floats(run.metrics.reduce_step())
        validated = {name: known for name, known in run.recorder.validated.items() if known}
        later = {name: value for name, (value, at) in validated.items() if at == step}
        run.recorder.remember(values | later, step)


def tick(run: FitRun, interval: str, number: int, *, by_metric: bool | None = None) -> None:
    """Advance the learning rate schedulers of one interval.

    Args:
        run: The fit.
        interval: ``"step"`` or ``"epoch"``.
        number: The number of the step or epoch, from 1; compared with each scheduler's frequency.
        by_metric: True: only schedulers that monitor a metric (such as ``ReduceLROnPlateau``).
            False: only the others. None: all.
    """
    if run.optim.schedulers_paused:
        return
    for entry in run.optim.schedulers:
        if entry.interval != interval or number % entry.frequency:
            continue
        if by_metric in (None, entry.takes_metric):
            latest = run.recorder.latest
            if entry.takes_metric:
                assert entry.monitor is not None
                reduce_update(run)
                known = run.recorder.monitored(entry.monitor)
                if known is None and entry.monitor in latest:
                    continue  # validation logs this name too, but none has run yet
                latest = latest if known is None else latest | {entry.monitor: known[0]}
            entry.tick(latest, run.hooks.parts.get("lr_scheduler_step"), warns=run.warns)


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
