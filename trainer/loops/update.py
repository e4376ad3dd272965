"""One update of the weights: unscale, weight, check, clip and step, then advance schedules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.errors import module_logger
from trainer.loops.module_flags import warn_of_dropout_off
from trainer.loops.state import FitRun
from trainer.metrics import to_floats
from trainer.names import bare_names
from trainer.optim.clipping import NO_LIMITS
from trainer.optim.optimizer import AcceleratedOptimizer, LossOfUpdate

logger = module_logger(__name__)


def update(
    run: FitRun, window_items: float | Tensor, items: float, last_loss: Tensor | None
) -> None:
    """Make one optimizer update: unscale, weight, call hooks, check for NaN, clip, step.

    Step-wise schedulers step and `global_step` advances, also if the update is skipped. Nothing is
    done if ``on_train_batch_start`` has left out all batches of all ranks.

    Args:
        run: The fit; its gradients are already reduced over the ranks.
        window_items: Items of the window over all ranks, by which gradients are weighted; see
            `LossWeighting.factor`.
        items: Items of the window on this rank.
        last_loss: The last loss of this rank, for the error message.

    Raises:
        FloatingPointError: A gradient is not finite; see `trainer.optim.finite`.
    """
    if run.hooks.may_end_epoch and not items and run.step_sync.no_batch_ran():
        run.step_sync.read_pending()  # on all ranks, so that the epoch ends here
        return
    optim = run.optim
    if optim.parameters.refresh(run.counters.epoch):
        check_parameters(run)
    # No optimizer zeroes the gradients of parameters that it does not have. They would accumulate
    # over updates, and increase the total norm by which all gradients are clipped.
    for parameter in optim.parameters.unused:
        parameter.grad = None
    if run.precision.scales:
        run.precision.unscale_together([optimizer.optimizer for optimizer in optim.optimizers])
    factor = optim.weighting.factor(window_items)
    if factor is not None:
        run.engine.gradients.scale_(optim.parameters.all, factor)
    # Set before the hooks, which read `Trainer.log_due`.
    run.intervals.see_if_log_is_due(run.counters.global_step + 1, run.progress)
    for optimizer in optim.optimizers:
        run.hooks.on_before_optimizer_step(optimizer)
    if should_step(run, last_loss):
        if optim.clipping.clips or "configure_gradient_clipping" in run.hooks.module_overrides:
            clip(run)
        stepped = step_optimizers(run, last_loss)
        if optim.guard is not None and run.precision.scales and stepped:
            skipped = [optimizer.skipped for optimizer in stepped]
            optim.guard.count_scaled(skipped, run.counters.global_step + 1)
    run.counters.global_step += 1  # first: an overridden lr_scheduler_step may read it
    if optim.schedulers:
        step_schedulers(run, "step", run.counters.global_step, by_metric=False)


def should_step(run: FitRun, last_loss: Tensor | None) -> bool:
    """Return whether to make the update: False if a gradient or loss is non-finite on any rank.

    With loss scaling (float16) it is always True: the gradient scaler skips overflows itself.

    Args:
        run: The fit.
        last_loss: The last loss of this rank, for the error message.

    Raises:
        FloatingPointError: See `FiniteGuard.should_step`.
    """
    if run.optim.guard is None or run.precision.scales:
        return True
    non_finite = run.engine.gradients.found_non_finite(run.optim.parameters.all)
    bad_losses = run.step_sync.bad_losses
    if non_finite is not None and (isinstance(bad_losses, Tensor) or bad_losses):
        non_finite = joined(non_finite, bad_losses)
    if run.optim.guard.should_step(non_finite, run.counters.global_step + 1, last_loss):
        return True
    for optimizer in run.optim.optimizers:
        optimizer.skip_step()
    return False


def joined(non_finite: bool | Tensor, bad_losses: float | Tensor) -> bool | Tensor:
    """Return whether a gradient or a loss is non-finite, without a device sync.

    Args:
        non_finite: Whether a gradient is non-finite; on an accelerator a tensor of shape (), 1 or
            0.
        bad_losses: The number of ranks with a non-finite loss, above 0; a tensor, which may be 0,
            if it is not on the host yet.

    Returns:
        A bool, or a tensor of shape () like `non_finite`.
    """
    if not isinstance(non_finite, Tensor):
        return non_finite or bool(bad_losses)
    if isinstance(bad_losses, Tensor):
        bad = bad_losses.to(non_finite, non_blocking=True).clamp(max=1.0)
        return torch.maximum(non_finite, bad)
    return torch.ones_like(non_finite)


def clip(run: FitRun) -> None:
    """Clip the gradients; see `Clipping`.

    A module that overrides `configure_gradient_clipping` clips those of each optimizer.
    """
    clipping = run.optim.clipping
    own_clip = run.hooks.module_overrides.get("configure_gradient_clipping")
    if own_clip is None:
        clipping.clip_(run.engine.gradients, run.optim.parameters.all)
        return
    for optimizer in run.optim.optimizers:
        limits = clipping.limits_of(optimizer)
        if limits.max_norm is not None:
            own_clip(optimizer, limits.max_norm, "norm")
        if limits.max_value is not None:
            own_clip(optimizer, limits.max_value, "value")
        if limits == NO_LIMITS:
            own_clip(optimizer, None, None)


def step_optimizers(run: FitRun, last_loss: Tensor | None) -> list[AcceleratedOptimizer]:
    """Step each optimizer, through the module's `optimizer_step` if it overrides it.

    Args:
        run: The fit.
        last_loss: The last loss of this rank.

    Returns:
        The optimizers that an override has not skipped.
    """
    own_step = run.hooks.module_overrides.get("optimizer_step")
    if own_step is None:
        for optimizer in run.optim.optimizers:
            optimizer.step()
        return run.optim.optimizers
    stepped = []
    for optimizer in run.optim.optimizers:
        steps = optimizer.steps
        own_step(run.counters.epoch, run.batch_idx, optimizer, LossOfUpdate(last_loss))
        if optimizer.steps > steps:
            stepped.append(optimizer)
            continue
        optimizer.skip_step()
        if run.optim.guard is not None:
            run.optim.guard.skipped += 1
    return stepped


def step_schedulers(
    run: FitRun, interval: str, number: int, *, by_metric: bool | None = None
) -> None:
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
                reduce_step_metrics(run)
                monitored = run.recorder.monitored(entry.monitor)
                if monitored is None and entry.monitor in latest:
                    continue  # validation logs this name too, but none has run yet
                latest = latest if monitored is None else latest | {entry.monitor: monitored[0]}
            own_step = run.hooks.module_overrides.get("lr_scheduler_step")
            entry.step(latest, own_step or entry.step_to(number), warns=run.context.warns)


def reduce_step_metrics(run: FitRun) -> None:
    """Reduce the values that the latest update logged, for decisions that need them; collective.

    The values are remembered, not recorded. Values that are already reduced are not reduced again.
    If the validation after this update logged the same name, the validation's value is kept.
    """
    step = run.counters.global_step
    run.recorder.flush()
    if not run.metrics.step_reduced:
        values = to_floats(run.metrics.reduce_step())
        validated = {name: latest for name, latest in run.recorder.validated.items() if latest}
        later = {name: value for name, (value, at) in validated.items() if at == step}
        run.recorder.remember(values | later, step)


def drop_gradients(run: FitRun) -> None:
    """Call `on_before_zero_grad` and zero the gradients, at the end of a window."""
    own_zero_grad = run.hooks.module_overrides.get("optimizer_zero_grad")
    for optimizer in run.optim.optimizers:
        run.hooks.on_before_zero_grad(optimizer)
        if own_zero_grad is None:
            optimizer.zero_grad()
        else:
            own_zero_grad(run.counters.epoch, run.batch_idx, optimizer)


def check_parameters(run: FitRun) -> None:
    """Check the parameters before an update, if `ParameterLists.refresh` found changes.

    Raises:
        ValueError: See `check_unregistered_parameters`.
        RuntimeError: Gradients of some parameters are not averaged over the ranks; see
            `DataParallel.check_unknown_parameters`.
    """
    parameters = run.optim.parameters
    if run.context.warns:
        if parameters.first:  # earlier hooks may have called eval()
            warn_of_dropout_off(run.module)
        warn_of_unused_parameters(run)
    if parameters.changed:
        run.engine.check_unknown_parameters()
    if parameters.unregistered and not parameters.warned:
        check_unregistered_parameters(run)


def warn_of_unused_parameters(run: FitRun) -> None:
    """Warn once of each parameter with a gradient that no optimizer has.

    A hook may unfreeze parameters that `configure_optimizers` left out.
    """
    parameters = run.optim.parameters
    unused = {id(p) for p in parameters.unused if p.grad is not None} - parameters.warned_unused
    if not unused:
        return
    parameters.warned_unused |= unused
    names = [
        name
        for name, parameter in bare_names(run.module, run.module.named_parameters())
        if id(parameter) in unused
    ]
    logger.warning(
        "No optimizer has %s%s: pass them to one in configure_optimizers, or freeze them with "
        "requires_grad_(False).",
        ", ".join(names[:5]),
        f" and {len(names) - 5} more parameters" if len(names) > 5 else "",
    )


def check_unregistered_parameters(run: FitRun) -> None:
    """Warn of unregistered parameters: an optimizer trains them, but the module does not have them.

    Parameters without a gradient are ignored: the loss does not use them.

    Raises:
        ValueError: With several processes, where nothing averages the gradients of these
            parameters.
    """
    trained = [
        parameter for parameter in run.optim.parameters.unregistered if parameter.grad is not None
    ]
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
    run.optim.parameters.warned = True
    if run.rank == 0:
        logger.warning(
            "%s: no checkpoint holds them, and a resumed run starts with their initial values. %s",
            what,
            fix,
        )
