"""Set-up: create a `Run` or `FitRun` from the Trainer's settings and the user's module."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from callbacks import Interval
from trainer.accelerator import Accelerator
from trainer.checkpoint.newest import holds_weights_only
from trainer.checkpoint.writer import Writer
from trainer.data.feed import Feed
from trainer.datamodule import DataModule
from trainer.distributed.agreement import Agreement
from trainer.distributed.collectives import broadcast
from trainer.distributed.control import on_all, on_main
from trainer.distributed.objects import broadcast_object
from trainer.hooks import HookTable
from trainer.hparams import logged, to_manifest
from trainer.loops.about import name_of, versions
from trainer.loops.asked import AskedSaves
from trainer.loops.choosing import WORDS
from trainer.loops.differing import refuse_differing, refuse_differing_options
from trainer.loops.due import (
    can_be_due,
    monitors_of,
    refuse_second_pass,
    tell_of_modes,
    tell_of_no_validation,
)
from trainer.loops.lengths import Schedule
from trainer.loops.loaders import check_step, feeds_for, loaders_for
from trainer.loops.moving import counts_items
from trainer.loops.optimizers import prepare_optimizers
from trainer.loops.options import options_of
from trainer.loops.parts import Parts
from trainer.loops.record import Recorder
from trainer.loops.reload import Origin, Sources
from trainer.loops.resume import load_datamodule, load_run, load_weights
from trainer.loops.run import Counters, FitRun, Run
from trainer.loops.settings import Settings
from trainer.loops.switches import switches_of
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.names import bare_names
from trainer.optim.clipping import NO_LIMITS, Limits
from trainer.optim.configure import names_of
from trainer.optim.finite import FiniteGuard
from trainer.optim.weighting import LossWeighting
from trainer.rng import mix, seed_generators
from trainer.strategies.choose import choose_engine
from trainer.tree import own_memory


def choose_start(parts: Parts, ckpt_path: Any, module: TrainModule, datamodule: Any) -> Path | None:
    """Return the checkpoint that a fit resumes from, and restore the datamodule; collective.

    This is called before the loaders are created, since they may depend on the datamodule's state.
    If `ckpt_path` is the path of a weights-only checkpoint, its weights are loaded and a new run
    starts.

    Args:
        parts: The Trainer's components.
        ckpt_path: The argument of `Trainer.fit`.
        module: The user's module.
        datamodule: The user's datamodule, or None.

    Returns:
        The checkpoint to resume from; None for a new run.

    Raises:
        ValueError: The folder has another run's checkpoints, or arguments differ between ranks.
        TypeError: Hyper-parameters that were set after ``__init__`` are not plain data.
        CheckpointError: The requested checkpoint is missing or damaged, or does not match the
            module.
    """
    refuse_differing(parts.settings, parts.callbacks, ckpt_path)
    on_all(lambda: to_manifest(module), "fit")  # fail before the first step, not at the first save
    if ckpt_path is None:
        parts.project.check_fresh(parts.roots())
    chosen = parts.choose(ckpt_path, sweeps=True)
    if chosen is not None and ckpt_path not in WORDS and holds_weights_only(chosen):
        parts.project.check_fresh(parts.roots())
        on_all(partial(load_weights, module, chosen), "fit")
        parts.accelerator.print(f"Starting a new run with the weights of {chosen}.")
        return None
    if chosen is not None:
        if _goes_back(ckpt_path):
            parts.project.check_branch(chosen, parts.roots())
        load_datamodule(datamodule, chosen)
    return chosen


def _goes_back(ckpt_path: Any) -> bool:
    """Return whether checkpoints later than the requested one may exist."""
    return ckpt_path not in ("auto", "last")


def make_fit_run(
    parts: Parts,
    hooks: HookTable,
    sources: Sources,
    chosen: Path | None,
    *,
    origin: Origin,
    feed: Feed,
    val_feeds: list[Feed],
    stop_requested: Callable[[], bool],
    told: Callable[[], int | None],
) -> FitRun:
    """Create the `FitRun` of a fit at its start; `start_fit` then restores the checkpoint into it.

    The model is prepared before the optimizers, because sharding replaces parameters.

    Args:
        parts: The Trainer's components.
        hooks: The hooks of the module and the callbacks.
        sources: Where the data loaders come from.
        chosen: The checkpoint to resume from; None for a new run.
        origin: The run's progress when the loaders were created.
        feed: The epoch iterator of the training data.
        val_feeds: The epoch iterators of the validation data; empty if there is none.
        stop_requested: Returns whether this process requests a stop.
        told: Returns the exit code if this process received the exit signal, else None.

    Raises:
        ValueError: The module's optimizers or the Trainer's settings cannot be used.
        TypeError: ``training_step`` has a wrong signature.
    """
    settings, accelerator, module = parts.settings, parts.accelerator, sources.module
    check_step("fit", module, [feed])
    if not module.automatic_optimization:
        _check_manual(settings)
    accelerator.gradient_state.sync_gradients = True
    accelerator.precision.begin()
    module.to(accelerator.device)
    own_memory(module)
    if chosen is None:
        parts.project.begin_record()
    recorder = parts.project.make_recorder()
    world_size = accelerator.num_processes
    # The user's `count_items` may return fractions.
    agreement = Agreement(accelerator.device, whole_items=not counts_items(module))
    engine = choose_engine(
        module,
        agreement,
        world_size=world_size,
        automatic=module.automatic_optimization,
        ddp_kwargs=accelerator.ddp_kwargs,
    )
    optimizers, entries, schedulers = prepare_optimizers(module, accelerator)
    names = names_of(entries)
    options = options_of(names, optimizers, schedulers)
    refuse_differing_options(options)
    own = [Limits(max_norm=one.max_grad_norm, max_value=one.max_grad_value) for one in entries]
    common = _common(parts, module, sources.datamodule, hooks, recorder, quiet=settings.barebones)
    return FitRun(
        **common,
        engine=engine,
        agreement=agreement,
        weighting=LossWeighting(
            micro_batches=settings.gradient_accumulation_steps,
            world_size=world_size,
            reference=_nominal_items(module, feed),
        ),
        guard=_guard(module, [each.optimizer for each in optimizers], accelerator, settings),
        optimizers=optimizers,
        optimizer_names=names,
        schedulers=schedulers,
        limits=Limits(max_norm=settings.max_grad_norm, max_value=settings.max_grad_value),
        own_limits=[pair for pair in zip(optimizers, own, strict=True) if pair[1] != NO_LIMITS],
        writer=Writer(accelerator.state),
        asked=AskedSaves(parts.trainer.save_checkpoint),
        length=parts.length,
        val_schedule=Schedule(Interval.parse(settings.val_every)),
        log_schedule=Schedule(Interval.parse(settings.log_every)),
        sanity_steps=settings.num_sanity_val_steps,
        validates=bool(val_feeds) and _comes_to_validation(parts, feed),
        monitored=monitors_of(schedulers, parts.callbacks),
        stop_requested=stop_requested,
        tells=parts.tells and accelerator.is_main_process,
        begun=switches_of(module),
        options=options,
        sources=sources,
        origin=origin,
        feed=feed,
        val_feeds=val_feeds,
        told=told,
        accumulation=settings.gradient_accumulation_steps,
        run_id=broadcast_object(uuid.uuid4().hex),
        parameters=list(module.parameters()),
    )


def _nominal_items(module: TrainModule, feed: Feed) -> float | None:
    """Return the items of a full micro-batch; None if unknown before the first one is read."""
    if feed.sampler is None or not feed.sampler.batch_size or counts_items(module):
        return None
    return float(feed.sampler.batch_size)


def _comes_to_validation(parts: Parts, feed: Feed) -> bool:
    """Return whether the run is long enough for a validation; True if that is unknown."""
    if parts.trial_steps is not None:  # too short, and no warning is needed
        return False
    settings, trainer = parts.settings, parts.trainer
    reloads = settings.reload_dataloaders_every_n_epochs > 0
    return can_be_due(
        Interval.parse(settings.val_every),
        settings.length,
        updates=settings.max_steps if reloads else trainer.estimated_stepping_batches,
        feed=None if reloads else feed,
        accumulation=trainer.accumulation_in,
    )


def start_fit(parts: Parts, run: FitRun, chosen: Path | None, ckpt_path: Any) -> None:
    """Restore a fit from its checkpoint, if any, and start the local record and the trackers.

    Args:
        parts: The Trainer's components.
        run: The fit at its start.
        chosen: The checkpoint to resume from; None for a new run.
        ckpt_path: The argument of `Trainer.fit`.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the run.
    """
    lasts = not run.length.reached(run.progress)
    if run.tells and lasts:
        tell_of_no_validation(run, parts.settings)
        tell_of_modes(run.schedulers, parts.callbacks)
    offset = None
    if chosen is not None:
        offset = _go_on(parts, run, chosen, back=_goes_back(ckpt_path))
    else:
        if ckpt_path == "auto":  # so that the user notices a wrong folder
            empty = ", ".join(map(str, parts.project.looks_in(parts.roots())))
            parts.accelerator.print(f"No checkpoint in {empty}: starting a new run.")
        if run.tells and not lasts:
            parts.accelerator.print("There is nothing to do: max_epochs or max_steps is 0.")
        run.recorder.begin_anew()
        if run.rank > 0:
            # Rank 0 draws the same random numbers as a single process. The other ranks are seeded
            # differently, so that their dropout masks differ.
            seed_generators(mix(run.feed.seed, run.rank) % 2**32)
    refuse_second_pass(run, parts.settings.reload_dataloaders_every_n_epochs)
    told = logged(run.module)
    if isinstance(run.datamodule, DataModule):
        told = logged(run.datamodule) | told
    configuration, step = parts.settings.describe(), run.counters.global_step
    start = partial(
        run.recorder.start,
        configuration | told,
        about=_about(run, configuration, told),
        step=step,
        cut_at=offset,
        cut_behind=None if chosen is None else step,
    )
    with _finished_on_error(run.recorder):
        on_main(start)
        # Not in a single-process trial: it may end while the other ranks still connect.
        if run.world_size > 1:
            run.writer.open()  # last: nothing can fail between this and the code that closes it


@contextmanager
def _finished_on_error(recorder: Recorder) -> Iterator[None]:
    """Finish the record and the trackers if the code inside fails, on this rank or another."""
    try:
        yield
    except BaseException as error:
        recorder.finish("failed", error)  # the Trainer, which usually does it, has no run yet
        raise


def _go_on(parts: Parts, run: FitRun, chosen: Path, *, back: bool) -> int | None:
    """Restore a fit from a checkpoint, on all ranks or none, and print where it resumes.

    Args:
        parts: The Trainer's components.
        run: The fit.
        chosen: The checkpoint.
        back: Whether later checkpoints may exist; they are quarantined.

    Returns:
        The length of the local record at that checkpoint in bytes; None if unknown.
    """
    load = partial(
        load_run,
        run,
        chosen,
        trainer=parts.trainer,
        callbacks=parts.callbacks,
        stays_stopped=not back,
    )
    offset = on_all(load, "fit")
    # Only after loading has succeeded: the checkpoint may not match the run.
    if back and parts.project.leave_branch(chosen, parts.roots(), offset):
        run.recorder.resume({}, run.counters.global_step)  # services cannot delete logged steps
    parts.accelerator.print(_going_on(run, chosen))
    return offset


def _about(run: FitRun, configuration: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Return the run metadata for `run.json`."""
    return {
        "run_id": run.run_id,
        "module": type(run.module).__qualname__,
        "world_size": run.world_size,
        "device": name_of(run.device),
        "versions": versions(),
        "configuration": configuration,
        "hyper_parameters": told,
    }


def _check_manual(settings: Settings) -> None:
    """Raise for settings that have no effect in manual optimisation.

    Raises:
        ValueError: Accumulation, clipping, or skipping of non-finite updates is configured.
    """
    steps = settings.gradient_accumulation_steps
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {steps}, but in manual optimisation training_step "
            "decides when to step; pass gradient_accumulation_steps=1. (The value may come from "
            "the launcher, by ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or from a ready Accelerator.)"
        )
    if settings.non_finite == "skip":
        raise ValueError(
            "non_finite is 'skip', but in manual optimisation training_step decides about updates: "
            "check the loss there, or leave non_finite at 'stop'."
        )
    for name in ("max_grad_norm", "max_grad_value"):
        if getattr(settings, name):
            raise ValueError(
                f"{name} is set, but in manual optimisation training_step does the clipping: call "
                "self.clip_gradients(optimizer, ...) there."
            )


def _going_on(run: FitRun, chosen: Path) -> str:
    """Return the message of a resumed run: where it resumes, or why nothing is left to do."""
    counters = run.counters
    text = f"Resuming from {chosen} (epoch {counters.epoch + 1}, update {counters.global_step})."
    if run.length.reached(run.progress):
        return f"{text} Nothing is left to do: the length that the Trainer was given is reached."
    if run.stop_now:
        return (
            f"{text} Nothing is left to do: the run had decided to stop there. To train further, "
            "pass the checkpoint's path as ckpt_path."
        )
    return text


def prepare_evaluation(
    parts: Parts,
    stage: str,
    module: TrainModule,
    hooks: HookTable,
    dataloaders: Any,
    datamodule: Any,
    ckpt_path: Any,
    counters: Counters,
) -> tuple[Run, list[Feed]]:
    """Create the `Run` of validate, test or predict, and its epoch iterators; collective.

    Args:
        parts: The Trainer's components.
        stage: validate, test or predict.
        module: The user's module.
        hooks: The hooks of the module and the callbacks.
        dataloaders: The data loaders given by the user, or None.
        datamodule: The user's datamodule, or None.
        ckpt_path: The checkpoint whose weights are loaded; None for the module's present weights.
        counters: The progress of the last fit; replaced by the checkpoint's if one is loaded.

    Raises:
        ValueError: There is no data, or a loader is empty.
        CheckpointError: The requested checkpoint is missing or damaged, or does not match the
            module.
    """
    chosen = parts.choose(ckpt_path)
    if chosen is not None:
        load_datamodule(datamodule, chosen)
    loaders = on_all(lambda: loaders_for(stage, dataloaders, module, datamodule), stage)
    feeds = feeds_for(stage, loaders, parts.settings, parts.accelerator, seed=0)
    check_step(stage, module, feeds)
    module.to(parts.accelerator.device)
    own_memory(module)
    if chosen is not None:
        manifest = on_all(partial(load_weights, module, chosen), stage)
        counters = Counters(global_step=manifest["step"], epoch=manifest["epoch"])
    elif parts.accelerator.use_distributed:  # initial weights may differ between ranks
        broadcast([*module.parameters(), *module.buffers()])
    recorder = parts.project.make_recorder(evaluates=True)
    run = Run(**_common(parts, module, datamodule, hooks, recorder), counters=counters)
    with _finished_on_error(recorder):
        on_main(lambda: recorder.start(parts.settings.describe()))
    return run, feeds


def _guard(
    module: TrainModule, optimizers: list[Optimizer], accelerator: Accelerator, settings: Settings
) -> FiniteGuard | None:
    """Return the check for non-finite gradients; None if the user ignores them."""
    if settings.non_finite == "ignore":
        return None
    return FiniteGuard(
        settings.non_finite,
        settings.max_skipped_in_row,
        optimizers=optimizers,
        named_parameters=lambda: bare_names(module, module.named_parameters()),
        rank=accelerator.process_index,
        manual=not module.automatic_optimization,
    )


def _common(
    parts: Parts,
    module: TrainModule,
    datamodule: Any,
    hooks: HookTable,
    recorder: Recorder,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `Run`, which a fit and an evaluation have in common."""
    accelerator = parts.accelerator
    metrics = MetricStore(
        accelerator.device, world_size=accelerator.num_processes, quiet_training=quiet
    )
    recorder.private = metrics.private
    return {
        "module": module,
        "datamodule": datamodule,
        "hooks": hooks,
        "metrics": metrics,
        "recorder": recorder,
        "precision": accelerator.precision,
        "device": accelerator.device,
        "world_size": accelerator.num_processes,
        "rank": accelerator.process_index,
    }
