"""Training: epochs of windows of micro-batches, each window one update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import chain, islice
from typing import NoReturn

from trainer.checkpoint.manifest import reading
from trainer.data.rounds import Round
from trainer.distributed.meeting import meet
from trainer.distributed.objects import all_gather_object
from trainer.errors import Preempted
from trainer.loops.accumulators import metric_states, put_metrics_back, training_set_aside
from trainer.loops.due import refuse_missed, tell_of_missed, warn_of_shared_names
from trainer.loops.evaluate import ENDED_EARLY, VALIDATION, EvaluationAbandoned, evaluate
from trainer.loops.loaders import check_same_length
from trainer.loops.manual import before_manual_step, manual_window
from trainer.loops.randomness import generators_of, load_generators, restore_generators
from trainer.loops.reload import reload_if_due
from trainer.loops.run import FitRun
from trainer.loops.switches import switches_of
from trainer.loops.timing import DATA, VALIDATING
from trainer.loops.untrained import share_untrained
from trainer.loops.window import reduce_update, tick, train_window
from trainer.metrics import TRAIN_EPOCH
from trainer.metrics.computing import computing


def fit(run: FitRun) -> None:
    """Train until the length is reached or the run is stopped.

    Hooks are called in the order given in `callbacks.Callback`, where ``[m]`` and ``[c]`` say
    whether the module or the callbacks are called first.
    """
    hooks, metrics, counters = run.hooks, run.metrics, run.counters
    if not run.module.automatic_optimization:
        for optimizer in run.optimizers:
            optimizer.before_step = partial(before_manual_step, run)
    hooks.on_fit_start()
    sanity_check(run)
    metrics.scope = TRAIN_EPOCH
    if not run.module.training:  # the whole module; parts that the user set to eval mode stay so
        run.module.train()
    with logged_before(run, again=counters.batches_seen > 0):
        hooks.on_train_start()
    if hooks.boundary.left:
        finish_boundary(run)
    while run.unfinished or not finished(run):
        if counters.epoch_complete and not run.unfinished:
            counters.begin_epoch()
            run.timing.call(DATA, reload_if_due, run)
        train_epoch(run)
    restore_rng(run)
    metrics.scope = None  # no epoch is left to record what is logged
    run.in_boundary = True
    meet_before(run, "on_train_end")
    run.asked.make(run.world_size)
    if hooks.monitors_due:  # the last save is ranked too
        reduce_update(run)
    hooks.on_train_end()
    meet_before(run, "on_fit_end")
    if counters.global_step > run.last_logged:
        record_update(run)  # the last update is always recorded
        run.recorder.flush(arrived=counters.global_step)
    tell_of_missed(run)
    hooks.on_fit_end()
    run.ended = switches_of(run.module)


def meet_before(run: FitRun, hook: str) -> None:
    """Let processes that come alone wait for the others, or be told of what those wait in.

    Args:
        run: The run.
        hook: What all come to; in the one before it, a process may have called a collective alone.
    """
    if run.world_size > 1:
        meet(hook)


def finished(run: FitRun) -> bool:
    """Return whether the run is over, the same on all processes."""
    progress = run.progress
    if run.length.reached(progress):
        return True
    if run.agreement.latest.stop_votes > 0:
        run.stop_now = True
    return run.stop_now and run.length.may_stop_early(progress)


def train_epoch(run: FitRun) -> None:
    """Make one pass over the training data, or over what is left of it."""
    feed, counters = run.feed, run.counters
    feed.set_epoch(counters.epoch)
    feed.start_batch = counters.epoch_batches
    run.metrics.scope = TRAIN_EPOCH
    # After a resume inside the epoch, its beginning must not advance the generators a second time,
    # as the uninterrupted run did not either.
    if counters.rounds == 0:
        restore_rng(run)
    run.metrics.begin_epoch_values()
    with logged_before(run, again=counters.rounds > 0):
        run.hooks.on_train_epoch_start()
    run.engine.begin_epoch()
    if run.world_size > 1:
        check_same_length(feed, f"train loader in epoch {counters.epoch}")
    run.epoch_length = feed.num_batches
    restore_rng(run)
    if run.unfinished:
        run.unfinished = False
        finish_update(run)
        if counters.epoch_complete or finished(run):
            return
    step = train_window if run.module.automatic_optimization else manual_window
    begun_at = counters.rounds
    with closing(run.mover.rounds(feed)) as rounds:  # workers end with the epoch
        for window in windows(run, rounds):
            if step(run, window):
                finish_update(run)
                if finished(run):
                    break
    if counters.rounds == begun_at:
        which = f" after its first {counters.epoch_batches}" if begun_at else ""
        where = f" on rank {run.rank}" if run.world_size > 1 else ""
        limit = "" if feed.limit is None else f", and {feed.limited_by}"
        raise ValueError(
            f"The training loader gave no batch in epoch {counters.epoch}{which}{where}. Check its "
            f"dataset, its sampler and drop_last{limit}; an iterator can be read only once, so "
            "pass an object that can be iterated again."
        )


def logged_before(run: FitRun, *, again: bool) -> AbstractContextManager[None]:
    """Inside, `log` does nothing if a resumed run calls the hook again.

    What it logged the first time is in the record, or in the checkpoint's accumulators.
    """
    return run.metrics.muted() if again else nullcontext()


def restore_rng(run: FitRun) -> None:
    """Restore the generators from the checkpoint that the run resumes from, once."""
    if run.saved_rng is not None:
        with reading("The state of the random generators", "cannot be restored"):
            restore_generators(run, run.saved_rng)
        run.saved_rng = None


def windows(run: FitRun, rounds: Iterator[Round]) -> Iterator[Iterator[Round]]:
    """Yield the rounds in windows of `FitRun.accumulation`, fewer at the end of the data."""
    for first in rounds:
        yield chain([first], islice(rounds, run.accumulation - 1))


def finish_update(run: FitRun) -> None:
    """Do everything that is due after an update; at the end callbacks may save or stop the run."""
    counters = run.counters
    refuse_ends_apart(run)
    run.recorder.flush(arrived=counters.global_step)
    if run.agreement.latest.failed_saves:
        run.writer.wait()  # raises what went wrong, on all processes at this very update
    if run.log_due:
        record_update(run)
        run.log_due = False
    if run.agreement.latest.signals:
        preempt(run)
    before = run.val_schedule.before
    together = counters.epoch_complete  # processes may exchange the saves that they requested
    if run.val_feeds and run.val_schedule.due(run.progress):
        together = True
        try:
            validate(run)
        except EvaluationAbandoned:
            run.val_schedule.before = before  # still due
            preempt(run)
    if counters.epoch_complete:
        end_epoch(run)
    if run.schedulers and run.module.automatic_optimization:
        # The metrics that they monitor may come from this update's validation.
        tick(run, "step", counters.global_step, by_metric=True)
    boundary(run, together=together)


def boundary(run: FitRun, *, together: bool) -> None:
    """Let the callbacks save or stop, and make the saves that were requested before."""
    run.metrics.scope = None
    run.in_boundary = True
    if run.hooks.monitors_due and any(due() for due in run.hooks.monitors_due):
        reduce_update(run)
    run.hooks.on_boundary()
    if together or run.world_size == 1 or run.agreement.latest.asked_saves:
        run.asked.make(run.world_size)
    run.in_boundary = False


def finish_boundary(run: FitRun) -> None:
    """Resume inside the boundary at which a callback saved the checkpoint."""
    restore_rng(run)
    boundary(run, together=True)
    run.saved_rng = generators_of(run)  # so that hooks that are called again do not advance them


def preempt(run: FitRun) -> NoReturn:
    """Save after a process was told to end, with this update's work still due, and exit.

    Raises:
        Preempted: Always.
    """
    run.unfinished = run.in_boundary = True
    run.hooks.on_preemption()
    run.asked.make(run.world_size)
    raise preempted(run)


def preempted(run: FitRun) -> Preempted:
    """Return the exception that ends all processes, with the code of the first one told to end."""
    codes = [code for code in all_gather_object(run.told()) if code is not None]
    return Preempted(codes[0])


def refuse_ends_apart(run: FitRun) -> None:
    """Refuse data that end on some processes only, before the processes deadlock.

    Raises:
        ValueError: On all processes alike; for a map-style dataset on an accelerator, one update
            later, until which processes whose data have ended take part without a batch.
    """
    if run.world_size == 1:
        return
    stream = run.feed.sampler is None
    if stream or run.counters.epoch_complete:
        run.agreement.settle()  # which processes' data ended must be known now, not an update later
    known, epoch = run.agreement.latest, run.counters.epoch
    if not known.ended or (stream and known.ended == run.world_size):
        return
    where = f"{known.ended} of {run.world_size} processes"
    if known.ended == 1:
        where += f", on rank {known.ended_ranks},"
    if stream:
        raise ValueError(
            f"In epoch {epoch} the training stream ended on {where} before the others. Each reads "
            "the whole stream and keeps its own batches: give all the same stream, not a part each."
        )
    raise ValueError(
        f"In epoch {epoch} the training data ended on {where} before all batches of the epoch "
        f"had been read. {ENDED_EARLY}"
    )


def record_update(run: FitRun) -> None:
    """Reduce what this update logged and start its transfer to the record."""
    counters, values = run.counters, run.metrics.reduce_step()
    if run.guard is not None and run.guard.skipped:
        values = {**values, "skipped_updates": float(run.guard.skipped)}
    run.recorder.record_later(values, step=counters.global_step, epoch=counters.epoch)
    run.last_logged = counters.global_step


def validate(run: FitRun) -> None:
    """Run a validation inside the fit; its values are recorded under this update.

    Raises:
        EvaluationAbandoned: A process was told to end; all is as if the validation had not begun.
    """
    if run.guard is not None:
        run.guard.settle()
    share_untrained(run)
    generators, metrics = generators_of(run), metric_states(run.module)
    try:
        with run.timing.part(VALIDATING), training_set_aside(run.metrics, run.module):
            values = evaluate(run, VALIDATION, run.val_feeds)
    except EvaluationAbandoned:
        run.metrics.forget(VALIDATION)
        load_generators(run, generators)
        put_metrics_back(metrics)
        raise
    step = run.counters.global_step
    for of_loader in values:
        run.recorder.validated.update({name: (of_loader[name], step) for name in of_loader})
    if run.counters.validations == 0:
        warn_of_shared_names(run)
    run.counters.validations += 1


def end_epoch(run: FitRun) -> None:
    """Call the hooks of the epoch's end, record its metrics and advance its schedulers."""
    counters = run.counters
    reduce_update(run)
    run.metrics.scope = TRAIN_EPOCH
    run.metrics.begin_epoch_values()
    with computing(run.module):
        run.hooks.on_train_epoch_end_module()
    run.recorder.record(
        run.metrics.reduce_epoch("train"), step=counters.global_step, epoch=counters.epoch
    )
    run.metrics.scope = None  # reduced: what is logged from here on would fall into the next epoch
    run.hooks.on_train_epoch_end_callbacks()
    if run.module.automatic_optimization:
        tick(run, "epoch", counters.epoch + 1)


def sanity_check(run: FitRun) -> None:
    """Run a few validation batches before training, so that a mistake there shows at once.

    Generators and metric objects are restored, and its values are dropped.
    """
    if not run.val_feeds or run.sanity_steps == 0 or run.counters.batches_seen > 0:
        return
    limits = [feed.limit for feed in run.val_feeds]
    generators, names = generators_of(run), set(run.metrics.names)
    metrics = metric_states(run.module)
    run.sanity_checking = True
    try:
        if run.sanity_steps > 0:
            rounded = run.sanity_steps + -run.sanity_steps % run.world_size  # all have a share
            for feed in run.val_feeds:
                known = feed.num_batches
                feed.limit = rounded if known is None else min(rounded, known)
        run.hooks.on_sanity_check_start()
        share_untrained(run)
        with run.timing.part(VALIDATING):
            evaluate(run, VALIDATION, run.val_feeds)
        run.metrics.forget_shown()
        run.recorder.validated = dict.fromkeys(run.metrics.names - names)
        refuse_missed(run, run.recorder.validated)
        run.metrics.names = names  # the sanity check's names do not count as logged
        run.hooks.on_sanity_check_end()
    except EvaluationAbandoned:  # there is nothing to save
        raise preempted(run) from None
    finally:
        run.sanity_checking = False
        for feed, limit in zip(run.val_feeds, limits, strict=True):
            feed.limit = limit
        load_generators(run, generators)
        put_metrics_back(metrics)
