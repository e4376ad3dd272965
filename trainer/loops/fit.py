"""Training: epochs of windows of micro-batches, each window one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainer.data.loader import Round
from trainer.distributed.collectives import all_gather_object, broadcast_object
from trainer.errors import Preempted
from trainer.loops.due import refuse_missed, tell_of_missed
from trainer.loops.evaluate import VALIDATION, EvaluationAbandoned, evaluate
from trainer.loops.run import FitRun, items_of
from trainer.loops.timing import OPTIMIZER, VALIDATING
from trainer.metrics import TRAIN_EPOCH, TRAIN_STEP
from trainer.optim.clipping import NO_LIMITS, clip_, clip_apart_
from trainer.optim.finite import find_non_finite, is_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.rng import isolated_rng, load_rng_state, rng_state
from trainer.tree import detach, to_host


def fit(run: FitRun) -> None:
    """Train until the length is reached or somebody stops the run.

    The order of the hooks is that of `callbacks.Callback`. ``[m]`` and ``[c]`` there say who is
    called first.
    """
    hooks, metrics, counters = run.hooks, run.metrics, run.counters
    if not run.module.automatic_optimization:
        for optimizer in run.optimizers:
            optimizer.before_step = partial(before_manual_step, run)
    hooks.on_fit_start()
    sanity_check(run)
    metrics.scope = TRAIN_EPOCH
    if not run.module.training:  # as a whole; parts that the user set to eval mode stay there
        run.module.train()
    with logged_before(run, again=counters.batches_seen > 0):
        hooks.on_train_start()
    if hooks.boundary.left:
        finish_boundary(run)
    while run.unfinished or not finished(run):
        if counters.epoch_complete and not run.unfinished:
            counters.begin_epoch()
            run.renew_loaders()
        train_epoch(run)
    restore_rng(run)
    metrics.scope = None  # no epoch is left that could record what is logged
    run.in_boundary = True
    run.asked.make(run.world_size)
    hooks.on_train_end()
    if counters.global_step > run.last_logged:
        record_update(run)  # the end of a run is worth a record, due or not
        run.recorder.flush(arrived=counters.global_step)
    tell_of_missed(run)
    hooks.on_fit_end()


def finished(run: FitRun) -> bool:
    """The run is over, for all processes alike."""
    progress = run.progress
    if run.length.reached(progress):
        return True
    if run.agreement.latest.stop_votes > 0:
        run.stop_now = True
    return run.stop_now and run.length.may_stop_early(progress)


def train_epoch(run: FitRun) -> None:
    """One pass over the training data, or what is left of it."""
    feed, counters = run.feed, run.counters
    feed.set_epoch(counters.epoch)
    feed.start_batch = counters.epoch_batches
    run.metrics.scope = TRAIN_EPOCH
    # Beginning an epoch a second time, after a resume inside it, must not draw from the generators:
    # the uninterrupted run did not do it.
    if counters.rounds == 0:
        restore_rng(run)
    run.metrics.begin_epoch_values()
    with logged_before(run, again=counters.rounds > 0):
        run.hooks.on_train_epoch_start()
    run.engine.begin_epoch()
    restore_rng(run)
    if run.unfinished:
        run.unfinished = False
        finish_update(run)
        if counters.epoch_complete or finished(run):
            return
    step = train_window if run.module.automatic_optimization else manual_window
    begun_at = counters.rounds
    with closing(run.rounds(feed, run.transfer(feed))) as rounds:  # workers end with the epoch
        for window in windows(rounds, lambda: run.accumulation):
            if step(run, window):
                finish_update(run)
                if finished(run):
                    break
    if counters.rounds == begun_at:
        which = f" behind its first {counters.epoch_batches}" if begun_at else ""
        raise ValueError(
            f"The training loader gave no batch in epoch {counters.epoch}{which}. Check its "
            "dataset, its sampler and drop_last, and limit_train_batches; an iterator can be read "
            "only once, so pass an object that can be iterated again."
        )


def logged_before(run: FitRun, *, again: bool) -> AbstractContextManager[None]:
    """Inside, `log` does nothing if the hook is called again, by a start that goes on with a run.

    What it logged the first time is in the record, or in the checkpoint's accumulators.
    """
    return run.metrics.muted() if again else nullcontext()


def restore_rng(run: FitRun) -> None:
    """Give the generators the states of the checkpoint that the run goes on from, once."""
    if run.saved_rng is not None:
        load_rng_state(run.saved_rng)
        run.saved_rng = None


def windows(rounds: Iterator[Round], size: Callable[[], int]) -> Iterator[Iterator[Round]]:
    """The rounds in groups of as many as `size` then says, fewer at the end of the data."""
    for first in rounds:
        yield chain([first], islice(rounds, size() - 1))


def train_window(run: FitRun, window: Iterator[Round]) -> bool:
    """Make one update from a window of micro-batches.

    Returns:
        True: there is an update to finish.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    size = run.weighting.micro_batches = run.accumulation  # a hook may change it for the next one
    items_here = 0.0
    items_everywhere: float | None = 0.0  # where each process knows what the others have
    losses: Tensor | None = None  # their sum, which is finite if they all are
    metrics.scope = TRAIN_STEP
    metrics.clear_step()
    metrics.begin_epoch_values()
    hooks.on_train_step_start()
    for number, micro in enumerate(window, 1):
        sync = micro.last or number == size
        engine.begin_micro_batch(sync=sync)
        batch, items = items_of(micro)
        if run.weighting.reference is None:
            run.weighting.reference = broadcast_object(items) or 1.0
        batch_idx = counters.rounds
        outputs: Any = None
        loss: Tensor | None = None
        if micro.present:
            metrics.begin_batch(items)
            hooks.on_train_batch_start(batch, batch_idx)
            with run.precision.autocast():
                if items:
                    outputs = engine.step("training_step", batch, batch_idx)
                else:
                    outputs = step_without_gradient(run, batch, batch_idx)
        if items:
            loss = loss_of(outputs)
            losses = loss.detach() if losses is None else losses + loss.detach()
            hooks.on_before_backward(loss)
            loss = run.precision.scale(run.weighting.weigh(loss, items))
        items_here += items
        items_everywhere = count_round(run, micro, items_everywhere)
        if sync:
            bad = 0.0 if run.guard is None or losses is None else is_non_finite(losses)
            total = engine.finish_window(loss, run.own_tally(items_here, bad))
        elif loss is not None:
            engine.backward(loss)
        if loss is not None:
            hooks.on_after_backward()
        if sync:
            with run.timing.part(OPTIMIZER):
                update(run, total if items_everywhere is None else items_everywhere, loss)
        if micro.present:
            hooks.on_train_batch_end(detach(outputs), batch, batch_idx)
    hooks.on_train_step_end()
    with run.timing.part(OPTIMIZER):
        for optimizer in run.optimizers:
            hooks.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
    return True


def manual_window(run: FitRun, window: Iterator[Round]) -> bool:
    """Let `training_step` do its own backward passes and updates, on one batch.

    Returns:
        Whether there is an update to finish: an optimizer stepped, or the epoch is over.
    """
    hooks, engine, metrics, counters = run.hooks, run.engine, run.metrics, run.counters
    (micro,) = window
    batch, items = items_of(micro)
    batch_idx = counters.rounds
    steps = sum(optimizer.steps for optimizer in run.optimizers)
    outputs: Any = None
    metrics.scope = TRAIN_STEP
    metrics.clear_step()
    metrics.begin_epoch_values()
    hooks.on_train_step_start()
    if not micro.complete and run.last_batch is None:
        # Fewer batches in the epoch than processes. It travels by the host.
        run.last_batch = run.move(broadcast_object(to_host(batch)))
    if micro.present:
        metrics.begin_batch(items)
        hooks.on_train_batch_start(batch, batch_idx)
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
        run.counters.global_step += 1
    if micro.present:
        hooks.on_train_batch_end(detach(outputs), batch, batch_idx)
    hooks.on_train_step_end()
    return stepped or micro.last


def before_manual_step(run: FitRun, optimizer: AcceleratedOptimizer) -> None:
    """Let the hooks see the gradients that `training_step` uses; stop if they are not finite.

    Raises:
        FloatingPointError: See `FiniteGuard.admits`; on an accelerator later.
    """
    if not run.weightless:
        run.hooks.on_before_optimizer_step(optimizer)
    if run.guard is None or run.precision.scales:
        return
    found = find_non_finite(parameter.grad for parameter in parameters_of([optimizer]))
    if found is None:
        return
    if found.device.type == "cpu":
        run.guard.admits(found, run.counters.global_step + 1, None)
    else:  # those of all optimizers are read together
        run.found = found if run.found is None else torch.maximum(run.found, found.to(run.found))


def step_without_gradient(run: FitRun, batch: Any, batch_idx: int) -> Any:
    """A micro-batch without items: it may log, with weight 0, and adds no gradient.

    Its loss is a mean over nothing, of which a backward pass would make NaN.
    """
    with torch.no_grad():
        return run.bare_step("training_step")(batch, batch_idx)


def stand_in(run: FitRun, batch_idx: int) -> None:
    """Run the last batch again where this process has none and the others reduce gradients.

    Its own gradients are zero, nothing is logged, buffers and generators are put back.
    """
    buffers = [(buffer, buffer.clone()) for buffer in run.module.buffers()]
    run.weightless = True
    try:
        with isolated_rng(), run.metrics.muted(), run.precision.autocast():
            run.engine.step("training_step", run.last_batch, batch_idx)
    finally:
        run.weightless = False
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def loss_of(outputs: Any) -> Tensor:
    """The loss that `training_step` returned, checked.

    Raises:
        TypeError: It is not a tensor, or a dict with one under ``"loss"``.
        ValueError: It has several elements, or no graph to go back through.
    """
    loss = outputs
    if isinstance(outputs, dict):
        if "loss" not in outputs:
            raise TypeError(
                f"training_step returned a dict without 'loss'; its keys are {sorted(outputs)}."
            )
        loss = outputs["loss"]
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {loss!r} of type {type(loss).__name__} as its loss; it must "
            "return a tensor of one element, or a dict with one under 'loss'. (To do backward "
            "and step yourself set automatic_optimization = False.)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; it must have one "
            "element: the mean over the batch, for example loss.mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "training_step returned a loss without a graph: nothing that it was computed from "
            "requires a gradient. Was it detached, taken with .item(), computed under no_grad, or "
            "are all parameters frozen?"
        )
    return loss.reshape(())


def count_round(run: FitRun, micro: Round, known: float | None) -> float | None:
    """Count a round, and add its items over all processes to `known` if each process knows them."""
    counters = run.counters
    counters.rounds += 1
    counters.epoch_batches += run.world_size if micro.complete else 1  # it is the last one
    counters.epoch_complete = micro.last
    samples = micro.round_samples
    if samples is None:  # only with ready-made batches: each process knows its own alone
        samples = micro.samples * (1 if run.world_size == 1 else run.world_size)
        known = None if run.world_size > 1 else known
    counters.samples_seen += samples
    counters.batches_seen += run.world_size if micro.complete else 1
    return None if run.counts_items or known is None else known + samples


def update(run: FitRun, total: float | Tensor, loss: Tensor | None) -> None:
    """Unscale, let the hooks see the gradients, look whether they are finite, clip, step, tick.

    Args:
        run: The run; its gradients are reduced.
        total: Items of the window over all processes.
        loss: The last one of this process, for an error.

    Raises:
        FloatingPointError: The gradients are not finite, see `trainer.optim.finite`.
    """
    drop_unused(run)
    run.precision.unscale_together([optimizer.optimizer for optimizer in run.optimizers])
    run.weighting.rescale_([parameter.grad for parameter in run.parameters], total)
    see_if_log_is_due(run)
    for optimizer in run.optimizers:
        run.hooks.on_before_optimizer_step(optimizer)
    if admitted(run, loss):
        clip(run)
        for optimizer in run.optimizers:
            optimizer.step()
    if run.guard is not None and run.precision.scales:
        skipped = [optimizer.skipped for optimizer in run.optimizers]
        run.guard.count_scaled(skipped, run.counters.global_step + 1)
    tick(run, "step", run.counters.global_step + 1)
    run.counters.global_step += 1


def drop_unused(run: FitRun) -> None:
    """Drop the gradients that no optimizer uses, of parameters that are trained by none.

    Nobody would zero them: they would grow from update to update, and with them the norm by which
    the others are clipped.
    """
    number = sum(len(group["params"]) for each in run.optimizers for group in each.param_groups)
    if number != run.optimized:  # since the last time a group was added
        used = {id(parameter) for parameter in parameters_of(run.optimizers)}
        run.unused = [parameter for parameter in run.parameters if id(parameter) not in used]
        run.optimized = number
    for parameter in run.unused:
        parameter.grad = None


def clip(run: FitRun) -> None:
    """Clip the gradients: those of an optimizer with limits of its own apart, the others' together.

    A group of parameters may be added to an optimizer at any time.
    """
    if run.own_limits:
        apart = [(parameters_of([optimizer]), limits) for optimizer, limits in run.own_limits]
        clip_apart_(run.parameters, apart, run.limits)
    elif run.limits != NO_LIMITS:
        clip_(run.parameters, max_norm=run.limits.max_norm, max_value=run.limits.max_value)


def admitted(run: FitRun, loss: Tensor | None) -> bool:
    """Whether to make the update; an overflow of scaled gradients is the scaler's to handle.

    Raises:
        FloatingPointError: See `FiniteGuard.admits`.
    """
    if run.guard is None or run.precision.scales:
        return True
    found = find_non_finite(parameter.grad for parameter in run.parameters)
    if found is not None:
        bad = torch.as_tensor(run.agreement.bad_losses).to(found, non_blocking=True)
        found = torch.maximum(found, bad.clamp(max=1.0))
    seen = None if loss is None else loss.detach()
    if run.guard.admits(found, run.counters.global_step + 1, seen):
        return True
    for optimizer in run.optimizers:
        optimizer.leave_out()
    return False


def see_if_log_is_due(run: FitRun) -> None:
    """Before an update is counted: is it one whose values are recorded?"""
    before = run.progress
    run.log_due = run.log_schedule.due(replace(before, steps=before.steps + 1))


def tick(run: FitRun, interval: str, number: int) -> None:
    """Advance the schedules that count steps or epochs, of which this is the n-th."""
    if run.schedulers_paused:
        return
    for entry in run.schedulers:
        if entry.interval == interval and number % entry.frequency == 0:
            entry.tick(run.recorder.latest)


def finish_update(run: FitRun) -> None:
    """Everything that is due after an update; at the end callbacks may save or stop."""
    counters = run.counters
    check_streams(run)
    run.recorder.flush(arrived=counters.global_step)
    if run.agreement.latest.failed_saves:
        run.writer.wait()  # raises what went wrong, on all processes at this very update
    if run.log_due:
        record_update(run)
        run.log_due = False
    if run.agreement.latest.signals:
        preempt(run)
    before = run.val_schedule.before
    together = counters.epoch_complete  # what one process has asked for can be told to the others
    if run.val_feeds and run.val_schedule.due(run.progress):
        together = True
        try:
            validate(run)
        except EvaluationAbandoned:
            run.val_schedule.before = before  # still due
            preempt(run)
    if counters.epoch_complete:
        end_epoch(run)
    boundary(run, together=together)


def boundary(run: FitRun, *, together: bool) -> None:
    """Let the callbacks save or stop, and make the saves that were asked for before."""
    run.metrics.scope = None
    run.in_boundary = True
    run.hooks.on_boundary()
    if together or run.world_size == 1 or run.agreement.latest.asked_saves:
        run.asked.make(run.world_size)
    run.in_boundary = False


def finish_boundary(run: FitRun) -> None:
    """Go on inside the boundary at which a callback saved what the run goes on from."""
    restore_rng(run)
    boundary(run, together=True)
    run.saved_rng = rng_state()  # the hooks before the next window have drawn already


def preempt(run: FitRun) -> NoReturn:
    """A process was told to end: save, with what is due at this update still due, and exit.

    Raises:
        Preempted: Always.
    """
    run.unfinished = run.in_boundary = True
    run.hooks.on_preemption()
    run.asked.make(run.world_size)
    raise preempted(run)


def preempted(run: FitRun) -> Preempted:
    """What ends the run on all processes: with the code of the first that was told to end."""
    codes = [code for code in all_gather_object(run.told()) if code is not None]
    return Preempted(codes[0])


def check_streams(run: FitRun) -> None:
    """Refuse streams that end on some processes only, before one waits for the others in vain.

    Raises:
        ValueError: On all processes alike.
    """
    if run.world_size == 1 or run.feed.sampler is not None:
        return
    run.agreement.settle()  # whose data have ended must be known now, not an update later
    ended = run.agreement.latest.ended
    if 0 < ended < run.world_size:
        raise ValueError(
            f"The training stream ended on {ended:.0f} of {run.world_size} processes. Each reads "
            "the whole stream and keeps its own batches: give all the same one, not a part each."
        )


def record_update(run: FitRun) -> None:
    """Reduce what this update logged and send it on its way to the record."""
    counters, values = run.counters, run.metrics.reduce_step()
    if run.guard is not None and run.guard.skipped:
        values = {**values, "skipped_updates": float(run.guard.skipped)}
    run.recorder.record_later(values, step=counters.global_step, epoch=counters.epoch)
    run.last_logged = counters.global_step


def validate(run: FitRun) -> None:
    """A validation inside the fit; its values are recorded under this update.

    Raises:
        EvaluationAbandoned: A process was told to end; it is as if the validation had not begun.
    """
    if run.guard is not None:
        run.guard.settle()
    run.engine.broadcast_buffers()
    generators = rng_state()
    try:
        with run.timing.part(VALIDATING):
            evaluate(run, VALIDATION, run.val_feeds)
    except EvaluationAbandoned:
        run.metrics.forget(VALIDATION.name)
        load_rng_state(generators)
        raise
    run.counters.validations += 1


def end_epoch(run: FitRun) -> None:
    """The epoch's hooks, metrics and schedules."""
    counters = run.counters
    run.metrics.scope = TRAIN_EPOCH
    run.metrics.begin_epoch_values()
    run.hooks.on_train_epoch_end_module()
    run.recorder.record(
        run.metrics.reduce_epoch("train"), step=counters.global_step, epoch=counters.epoch
    )
    run.metrics.scope = None  # reduced: what is logged from here on would fall into the next epoch
    run.hooks.on_train_epoch_end_callbacks()
    if run.module.automatic_optimization:
        tick(run, "epoch", counters.epoch + 1)


def sanity_check(run: FitRun) -> None:
    """Try a few validation batches before training, so that a mistake there shows at once.

    It leaves no trace: generators are put back and its values are dropped.
    """
    if not run.val_feeds or run.sanity_steps == 0 or run.counters.global_step > 0:
        return
    limits = [feed.limit for feed in run.val_feeds]
    generators, names = rng_state(), set(run.metrics.names)
    run.sanity_checking = True
    try:
        if run.sanity_steps > 0:
            for feed, limit in zip(run.val_feeds, limits, strict=True):
                feed.limit = run.sanity_steps if limit is None else min(run.sanity_steps, limit)
        run.hooks.on_sanity_check_start()
        run.engine.broadcast_buffers()
        with run.timing.part(VALIDATING):
            evaluate(run, VALIDATION, run.val_feeds)
        run.metrics.forget_shown()
        refuse_missed(run, run.metrics.names - names)
        run.metrics.names = names  # a decision may wait for them only once they come
        run.hooks.on_sanity_check_end()
    except EvaluationAbandoned:  # nothing is there to be saved
        raise preempted(run) from None
    finally:
        run.sanity_checking = False
        for feed, limit in zip(run.val_feeds, limits, strict=True):
            feed.limit = limit
        load_rng_state(generators)
