"""The training loop: epochs of gradient accumulation windows, each window one optimizer update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from itertools import chain, islice, repeat
from typing import NoReturn

from trainer.checkpoint.storage import reading
from trainer.data.epoch_iterator import GlobalBatch
from trainer.distributed.guards import check_collective
from trainer.distributed.objects import all_gather_object
from trainer.errors import TIMEOUT_EXIT_CODE, Preempted, module_logger
from trainer.loops.buffers import sync_buffers
from trainer.loops.dataloaders import check_same_data
from trainer.loops.evaluate import (
    ENDED_EARLY,
    VALIDATION,
    EvaluationAbandoned,
    evaluate,
    record_epoch,
)
from trainer.loops.manual import manual_of
from trainer.loops.preemption import interactive
from trainer.loops.preflight import (
    check_reachable,
    warn_of_missed,
    warn_of_shared_names,
    warn_of_unlogged_metrics,
)
from trainer.loops.profiler import DATA, VALIDATING
from trainer.loops.state import FitRun
from trainer.loops.train_step import train_window
from trainer.loops.update import reduce_step_metrics, step_schedulers
from trainer.metrics import TRAIN_EPOCH
from trainer.metrics.accumulators import (
    isolated_training_metrics,
    metric_states,
    put_metrics_back,
)
from trainer.optim.schedule_free import evaluation_weights, schedule_free

logger = module_logger(__name__)


def fit(run: FitRun) -> None:
    """Train until the maximum length is reached or the run is stopped.

    Hooks are called in the order that the docstring of `callbacks.Callback` shows. There ``[m]``
    stands for the module and ``[c]`` for the callbacks.
    """
    hooks, metrics, counters = run.hooks, run.metrics, run.counters
    if not run.module.automatic_optimization:
        manual_of(run)  # from here on, optimizers call hooks before they step
    free = schedule_free(run.optim.optimizers)
    for optimizer in free:
        optimizer.train()
    hooks.on_fit_start()
    sanity_check(run)
    metrics.scope = TRAIN_EPOCH
    # If the root is in train mode, submodules that the user has set to eval() stay so.
    if not run.module.training:
        run.module.train()
    # In a resumed run, values from the first call of the hook are already recorded or restored.
    with run.metrics.muted() if counters.batches_seen > 0 else nullcontext():
        hooks.on_train_start()
    if hooks.boundary.remaining_callbacks:
        finish_boundary(run)
    while run.saving.update_unfinished or not should_end(run):
        if counters.epoch_complete and not run.saving.update_unfinished:
            counters.begin_epoch()
            run.timing.call(DATA, run.reload_loaders)
        train_epoch(run)
    check_had_loss(run)  # the last epoch may not be complete
    restore_rng(run)
    metrics.scope = None  # no epoch follows, so no hook from here on may log
    run.enter_boundary()  # and stay there: callbacks may still save, and no update follows
    check_same_hook(run, "on_train_end")
    run.saving.pending_saves.make(run.world_size)
    if hooks.monitors_due:  # callbacks rank the final checkpoint by these values
        reduce_step_metrics(run)
    hooks.on_train_end()
    check_same_hook(run, "on_fit_end")
    if not run.intervals.is_logged(counters.global_step):
        record_step_metrics(run)  # the last update is always recorded
        run.recorder.flush(arrived=counters.global_step)
    warn_of_missed(run)
    hooks.on_fit_end()
    for optimizer in free:
        optimizer.eval()  # the module keeps the weights to evaluate
    run.saving.module_state.end()


def check_same_hook(run: FitRun, hook: str) -> None:
    """Check that all ranks reach the same hook, instead of hanging in different collectives.

    Without the check, a rank that alone called a collective in the previous hook would deadlock.

    Args:
        run: The fit.
        hook: The hook that all ranks call next.
    """
    if run.world_size > 1:
        check_collective(hook)


def should_end(run: FitRun) -> bool:
    """Return whether the run is over; the same result on all ranks."""
    length, stop_votes = run.context.length, run.step_sync.latest.stop_votes
    if length.reached(run.counters, run.seconds):
        return True
    return run.stopping.decided(stop_votes) and length.may_stop_early(run.progress())


def train_epoch(run: FitRun) -> None:
    """Train one epoch, or the rest of it when the run resumed inside the epoch."""
    epoch_iterator, counters = run.data.epoch_iterator, run.counters
    epoch_iterator.set_epoch(counters.epoch)
    epoch_iterator.start_batch = counters.epoch_batches
    run.metrics.scope = TRAIN_EPOCH
    run.metrics.begin_epoch_values()
    if counters.epoch_global_batches == 0:  # else the run resumes inside the epoch
        restore_rng(run)
        # Drop votes that ended the previous epoch, or arrived in its last window.
        run.step_sync.latest = run.step_sync.latest._replace(epoch_votes=0.0)
        with run.saving.module_state.epoch_starts():
            run.hooks.on_train_epoch_start()
    elif run.saving.module_state.lacks_epoch_start:
        with run.metrics.muted(), run.saving.module_state.epoch_starts():  # already logged
            run.hooks.on_train_epoch_start()
    run.engine.begin_epoch()
    if run.world_size > 1:
        check_same_data(epoch_iterator, f"train loader in epoch {counters.shown_epoch}")
    run.data.begin_epoch()
    restore_rng(run)
    if run.saving.update_unfinished:
        run.saving.update_unfinished = False
        finish_update(run)
        if counters.epoch_complete or should_end(run):
            return
    train: Callable[[Iterator[GlobalBatch]], bool] = partial(train_window, run)
    if not run.module.automatic_optimization:
        train = manual_of(run).train_window
    begun_at = counters.epoch_global_batches
    with closing(
        run.device_transfer.global_batches(epoch_iterator, keeps_latest=run.hooks.may_end_epoch)
    ) as global_batches:  # ends the loader's workers, too
        for window in windows(run, global_batches):
            if train(window):
                finish_update(run)
                if counters.epoch_complete or should_end(run):
                    break
    if counters.epoch_global_batches == begun_at:
        which = f" after its first {counters.epoch_batches}" if begun_at else ""
        where = f" on rank {run.rank}" if run.world_size > 1 else ""
        limit = "" if epoch_iterator.limit is None else f", and {epoch_iterator.limited_by}"
        raise ValueError(
            f"The training loader gave no batch in epoch {counters.shown_epoch}{which}{where}. "
            f"Check its dataset, its sampler and drop_last{limit}; an iterator can be read only "
            "once, so pass an object that can be iterated again."
        )


def restore_rng(run: FitRun) -> None:
    """Restore the RNG states of the checkpoint being resumed, once; later calls do nothing."""
    with reading("The state of the random generators", "cannot be restored"):
        missing = run.saving.generators.restore()
    if missing:
        logger.warning(
            "%s had random generators when the checkpoint was saved (%s) that no longer exist; "
            "generators created later start with new states. Create them in __init__ or "
            "configure_model.",
            type(run.module).__name__,
            ", ".join(missing),
        )


def windows(run: FitRun, global_batches: Iterator[GlobalBatch]) -> Iterator[Iterator[GlobalBatch]]:
    """Group global batches into windows of `Optimization.accumulation`, fewer at the end."""
    had_batch = False
    for first in global_batches:
        had_batch = True
        yield chain([first], islice(global_batches, run.optim.accumulation - 1))
    # A stream may end on one rank first: until the step sync says that the epoch is over, this rank
    # runs dummy batches.
    while had_batch and not run.counters.epoch_complete:
        dummy = run.data.epoch_iterator.dummy_batch
        missing = GlobalBatch(
            present=False,
            batch=dummy,
            samples=0,
            global_samples=0,
            real_samples=0,
            batches=0,
            ended=True,
        )
        yield repeat(missing, run.optim.accumulation)


def finish_update(run: FitRun) -> None:
    """Do everything that is due after an update: log, validate, end the epoch, save, stop.

    If a rank received the exit signal, the run is saved with this work still due, and ends.
    """
    counters = run.counters
    if run.step_sync.latest.epoch_votes:  # on_train_batch_start returned -1 on some rank
        counters.epoch_complete = True
        run.data.epoch_iterator.leave()
    if run.world_size > 1:
        check_data_ends_together(run)
    run.recorder.flush(arrived=counters.global_step)
    if run.step_sync.latest.failed_saves:
        run.saving.writer.wait()  # raises the error of the background save, on all ranks alike
    ends_unlogged = counters.epoch_complete and not run.intervals.is_logged(counters.global_step)
    if run.intervals.log_due or ends_unlogged:
        record_step_metrics(run)
    run.engine.mark_step()
    if run.step_sync.latest.signals:
        preempt(run)
    # Saves requested by hooks from here on are exchanged at once if a collective is cheap, and
    # otherwise with the next step sync.
    exchange_saves = counters.epoch_complete
    if run.eval_iterators and run.intervals.validation_due(run.progress()):
        exchange_saves = True
        try:
            validate(run)
        except EvaluationAbandoned:
            run.intervals.validate_again()
            preempt(run)
    if counters.epoch_complete:
        end_epoch(run)
    if run.optim.schedulers and run.module.automatic_optimization:
        # Schedulers such as ReduceLROnPlateau may monitor a metric of this update's validation.
        step_schedulers(run, "step", counters.global_step, by_metric=True)
    boundary(run, exchange_saves=exchange_saves)


def boundary(run: FitRun, *, exchange_saves: bool) -> None:
    """Run the update boundary: callbacks may save or stop, then pending saves are made.

    Args:
        run: The fit.
        exchange_saves: Whether to exchange pending saves between ranks even if the step sync
            reported none.
    """
    run.metrics.scope = None
    run.enter_boundary()
    if run.hooks.monitors_due and any(due() for due in run.hooks.monitors_due):
        reduce_step_metrics(run)
    run.hooks.on_boundary()
    pending_saves = run.saving.pending_saves
    requested = exchange_saves or run.step_sync.latest.requested_saves > 0
    if pending_saves.waiting if run.world_size == 1 else requested:
        pending_saves.make(run.world_size)
    run.leave_boundary()


def finish_boundary(run: FitRun) -> None:
    """Finish the update boundary in which a callback saved the checkpoint being resumed.

    Only the callbacks that had not run yet at the save are called.
    """
    restore_rng(run)
    boundary(run, exchange_saves=True)
    # The RNG is restored after the hooks that are called a second time.
    run.saving.generators.restore_later(run.saving.generators.state_dict())


def preempt(run: FitRun) -> NoReturn:
    """Save after a rank received the exit signal, and end the run.

    The work due after this update (such as a validation) is done by the run that resumes.

    Raises:
        Preempted: Always.
    """
    run.saving.update_unfinished = True
    run.enter_boundary()
    ended = preempted(run)
    run.hooks.on_preemption()
    run.saving.pending_saves.make(run.world_size)
    raise ended


def preempted(run: FitRun) -> Preempted:
    """Return the exception that ends all ranks, with the exit code of the first rank that has one.

    Rank 0 logs the reason, unless it has announced its own signal. Collective.
    """
    codes = enumerate(all_gather_object(run.stopping.exit_code()))
    rank, code = next((rank, code) for rank, code in codes if code is not None)
    ended = Preempted(code)
    if run.rank == 0 and (rank > 0 or code == TIMEOUT_EXIT_CODE):
        logger.warning("Rank %d: %s.", rank, ended)
    if interactive():  # IPython adds advice to a cell that ends with SystemExit
        warnings.filterwarnings("ignore", "To exit: use 'exit'", UserWarning, r"IPython\.")
    return ended


def check_data_ends_together(run: FitRun) -> None:
    """Raise if the training data ended on some ranks only, before the ranks deadlock.

    Only a rank whose own data have ended waits for the device; the others know that the epoch
    continues.

    Raises:
        ValueError: The data ended early on some ranks; raised on all ranks. On an accelerator it is
            raised one update later, when the step sync has reached the host. Until then the ranks
            without data take part with dummy batches.
    """
    stream = run.data.epoch_iterator.sampler is None
    together = (0, run.dp_size) if stream else (0,)
    if run.counters.epoch_complete and run.step_sync.latest.ended in together:
        if stream and run.step_sync.peek().ended not in together:
            run.counters.epoch_complete = False
        else:
            run.step_sync.read_pending()
    latest, epoch = run.step_sync.latest, run.counters.shown_epoch
    if latest.ended in together:
        return
    where = f"{latest.ended} of {run.dp_size} processes"
    if latest.ended == 1:
        where += f", on rank {latest.ended_ranks},"
    if stream:
        raise ValueError(
            f"In epoch {epoch} the training stream ended on {where} before the others. Each "
            "process reads the whole stream and keeps its share of the batches: give all "
            "processes the same stream, not a part each."
        )
    raise ValueError(
        f"In epoch {epoch} the training data ended on {where} before all batches of the epoch "
        f"had been read. {ENDED_EARLY}"
    )


def record_step_metrics(run: FitRun) -> None:
    """Reduce the values that this update logged and start their transfer to the host."""
    counters, values = run.counters, run.metrics.reduce_step()
    if run.optim.guard is not None and run.optim.guard.skipped:
        values = {**values, "skipped_updates": float(run.optim.guard.skipped)}
    run.recorder.record_later(values, step=counters.global_step, epoch=counters.epoch)
    run.intervals.logged(counters.global_step)


def validate(run: FitRun) -> None:
    """Run a validation inside the fit; its values are recorded under the current `global_step`.

    Raises:
        EvaluationAbandoned: A rank received the exit signal. RNG states, metrics and buffers are
            restored as if the validation had not begun.
    """
    if run.optim.guard is not None:
        run.optim.guard.read_pending()
    sync_buffers(run)
    generators, metrics = run.saving.generators.state_dict(), metric_states(run.module)
    try:
        with (
            run.timing.part(VALIDATING),
            isolated_training_metrics(run.metrics, run.module),
            evaluation_weights(schedule_free(run.optim.optimizers)),
        ):
            values = evaluate(run, VALIDATION)
    except EvaluationAbandoned:
        run.metrics.forget(VALIDATION)
        run.saving.generators.load_state_dict(generators)
        put_metrics_back(metrics)
        raise
    step = run.counters.global_step
    for of_loader in values:
        run.recorder.validated.update({name: (of_loader[name], step) for name in of_loader})
    if run.counters.validations == 0:
        warn_of_shared_names(run)
    run.counters.validations += 1


def check_had_loss(run: FitRun) -> None:
    """Check that some batch had a loss.

    Raises:
        ValueError: No batch so far had a loss on any rank; raised on all ranks.
    """
    if not run.module.automatic_optimization or not run.counters.batches_seen:
        return
    if not run.step_sync.items_seen:
        run.step_sync.read_pending()
    if not run.step_sync.items_seen:
        raise ValueError(
            f"No batch of epoch {run.counters.shown_epoch} had a loss, so nothing was trained. "
            f"Return the loss from training_step of {type(run.module).__name__}; or set "
            "automatic_optimization = False if it steps the optimizers itself."
        )


def end_epoch(run: FitRun) -> None:
    """Call the epoch-end hooks, record the epoch's metrics and step the epoch-wise schedulers."""
    check_had_loss(run)
    reduce_step_metrics(run)
    record_epoch(run, "train")
    if run.data.epoch_iterator.presharded:
        run.engine.broadcast_buffers()  # from a rank whose data ended last
    if run.module.automatic_optimization:
        step_schedulers(run, "epoch", run.counters.epoch + 1)


def sanity_check(run: FitRun) -> None:
    """Run a few validation batches before training, so that an error in them shows at once.

    RNG states, metric objects and the latest values are restored afterwards; nothing is recorded.

    Raises:
        Preempted: A rank received the exit signal.
        ValueError: A monitored metric is logged by validation, but no validation will be due.
    """
    steps = run.context.settings.num_sanity_val_steps
    if not run.eval_iterators or steps == 0 or run.counters.batches_seen > 0:
        return
    limits = [epoch_iterator.limit for epoch_iterator in run.eval_iterators]
    generators, names = run.saving.generators.state_dict(), set(run.metrics.names)
    metrics = metric_states(run.module)
    try:
        with run.recorder.sanity_check():
            if steps > 0:
                # A multiple of the ranks, so that every rank has a batch.
                rounded = steps + -steps % run.dp_size
                for epoch_iterator in run.eval_iterators:
                    batches = epoch_iterator.num_batches
                    epoch_iterator.limit = rounded if batches is None else min(rounded, batches)
            run.hooks.on_sanity_check_start()
            sync_buffers(run)
            free = schedule_free(run.optim.optimizers)
            with run.timing.part(VALIDATING), evaluation_weights(free):
                evaluate(run, VALIDATION)
            run.metrics.forget_shown()
            run.recorder.validated = dict.fromkeys(run.metrics.names - names)
            check_reachable(run, run.recorder.validated)
            warn_of_unlogged_metrics(run, run.recorder.validated)
            run.metrics.names = names  # the sanity check's names do not count as logged
            run.hooks.on_sanity_check_end()
    except EvaluationAbandoned:  # there is nothing to save
        raise preempted(run) from None
    finally:
        for epoch_iterator, limit in zip(run.eval_iterators, limits, strict=True):
            epoch_iterator.limit = limit
        run.saving.generators.load_state_dict(generators)
        put_metrics_back(metrics)
