"""Turning a Trainer's settings and a user's module into a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from callbacks import Callback, Interval, ModelCheckpoint
from trainer.accelerator import Accelerator
from trainer.checkpoint.writer import Writer
from trainer.data.feed import Feed
from trainer.datamodule import DataModule
from trainer.distributed.agreement import Agreement
from trainer.distributed.collectives import broadcast, broadcast_object
from trainer.distributed.control import on_all, on_main
from trainer.hooks import HookTable
from trainer.hparams import logged
from trainer.loops.about import name_of, versions
from trainer.loops.differing import refuse_differing
from trainer.loops.due import can_be_due, monitors_of, tell_of_no_validation
from trainer.loops.lengths import Schedule
from trainer.loops.loaders import check_step, feeds_for, loaders_for
from trainer.loops.moving import counts_items
from trainer.loops.optimizers import prepare_optimizers
from trainer.loops.project import Project
from trainer.loops.record import Recorder
from trainer.loops.resume import load_datamodule, load_run, load_weights
from trainer.loops.run import Counters, FitRun, Run
from trainer.loops.settings import Settings
from trainer.loops.switches import switches_of
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import NO_LIMITS, Limits
from trainer.optim.configure import names_of
from trainer.optim.finite import FiniteGuard
from trainer.optim.weighting import LossWeighting
from trainer.rng import mix, seed_generators
from trainer.strategies.choose import choose_engine


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a Trainer is made of, for whoever puts a run together.

    Attributes:
        settings: Its arguments.
        accelerator: The process's devices and peers.
        project: Its folder.
        callbacks: In the order in which they are called.
        trainer: Itself, for the hooks.
        tells: Whether the user is told what is missing; the trials of a `Tuner` keep silent.
    """

    settings: Settings
    accelerator: Accelerator
    project: Project
    callbacks: list[Callback]
    trainer: Any
    tells: bool = True

    def roots(self) -> list[Path]:
        """The folders of callbacks that save elsewhere than in the project."""
        savers = [one for one in self.callbacks if isinstance(one, ModelCheckpoint)]
        return [Path(one.dirpath).expanduser() for one in savers if one.dirpath is not None]

    def choose(self, ckpt_path: Any, *, sweeps: bool = False) -> Path | None:
        """The checkpoint that ``ckpt_path`` means; see `Project.choose`; collective."""
        monitors = [
            (callback.monitor.name, callback.monitor.mode)
            for callback in self.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
        ]
        return self.project.choose(ckpt_path, self.roots(), monitors, sweeps=sweeps)


def choose_start(parts: Parts, ckpt_path: Any, datamodule: Any) -> Path | None:
    """The checkpoint that a fit goes on from; the datamodule is put back to it; collective.

    Before the loaders are made, which may depend on the datamodule's state.

    Raises:
        ValueError: Another run's checkpoints are in the folder; or each process was told otherwise.
        CheckpointError: The checkpoint asked for is missing, damaged or does not fit.
    """
    refuse_differing(parts.settings, parts.callbacks, ckpt_path)
    if ckpt_path is None:
        parts.project.check_fresh(parts.roots())
    chosen = parts.choose(ckpt_path, sweeps=True)
    if chosen is not None:
        if _goes_back(ckpt_path):
            parts.project.check_branch(chosen, parts.roots())
        load_datamodule(datamodule, chosen)
    return chosen


def _goes_back(ckpt_path: Any) -> bool:
    """Whether there may be later checkpoints than the one that was asked for."""
    return ckpt_path not in ("auto", "last")


def prepare_fit(
    parts: Parts,
    module: TrainModule,
    hooks: HookTable,
    ckpt_path: Any,
    *,
    chosen: Path | None,
    datamodule: Any,
    feed: Feed,
    val_feeds: list[Feed],
    stop_requested: Callable[[], bool],
) -> FitRun:
    """The run of a fit: model, then optimizers, then the checkpoint; sharding replaces parameters.

    Raises:
        ValueError: The module's answers cannot make a run.
        TypeError: ``training_step`` takes other arguments.
        CheckpointError: The checkpoint is damaged or does not fit.
    """
    settings, accelerator = parts.settings, parts.accelerator
    check_step("fit", module, [feed])
    if not module.automatic_optimization:
        _check_manual(settings)
    accelerator.gradient_state.sync_gradients = True
    accelerator.precision.begin()
    module.to(accelerator.device)
    if chosen is None:
        parts.project.begin_record()
    recorder = parts.project.make_recorder()
    if chosen is None:
        recorder.begin_anew()
    run = make_fit_run(
        module,
        hooks,
        recorder,
        accelerator,
        settings,
        datamodule=datamodule,
        feed=feed,
        val_feeds=val_feeds,
        stop_requested=stop_requested,
    )
    run.run_id = broadcast_object(uuid.uuid4().hex)
    foresee_validations(run, parts, datamodule)
    offset = None
    if chosen is not None:
        offset = _go_on(parts, run, chosen, back=_goes_back(ckpt_path))
    elif run.rank > 0:
        # Rank 0 goes on as one process would; the others must not draw the same dropout masks.
        seed_generators(mix(feed.seed, run.rank) % 2**32)
    told = logged(module)
    if isinstance(datamodule, DataModule):
        told = logged(datamodule) | told
    behind = None if chosen is None else run.counters.global_step
    start = partial(
        recorder.start,
        settings.describe() | told,
        about=_about(run, settings, accelerator, told),
        step=run.counters.global_step,
        cut_at=offset,
        cut_behind=behind,
    )
    on_main(start)
    run.writer.open()  # now that nothing can fail before somebody is there to close it
    return run


def _go_on(parts: Parts, run: FitRun, chosen: Path, *, back: bool) -> int | None:
    """Put a run back to a checkpoint, on all processes or none, and say so.

    Args:
        parts: The Trainer's.
        run: The run.
        chosen: The checkpoint.
        back: There may be later ones, which the run leaves behind.

    Returns:
        Where the local record ended then; None if it was not known.
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
    # Not before it is loaded: it may not fit.
    if back and parts.project.leave_branch(chosen, parts.roots(), offset):
        run.recorder.resume({}, run.counters.global_step)  # no service takes steps back
    parts.accelerator.print(_going_on(run, chosen))
    return offset


def _about(
    run: FitRun, settings: Settings, accelerator: Accelerator, told: dict[str, Any]
) -> dict[str, Any]:
    """What `run.json` says of a run."""
    return {
        "run_id": run.run_id,
        "module": type(run.module).__qualname__,
        "world_size": run.world_size,
        "device": name_of(accelerator.device),
        "versions": versions(),
        "configuration": settings.describe(),
        "hyper_parameters": told,
    }


def foresee_validations(run: FitRun, parts: Parts, datamodule: Any) -> None:
    """Find out whether the run comes to a validation, and tell it if not."""
    settings, trainer = parts.settings, parts.trainer
    reloads = settings.reload_dataloaders_every_n_epochs > 0
    run.monitored = monitors_of(run, parts.callbacks)
    run.validates = bool(run.val_feeds) and can_be_due(
        run.val_schedule.interval,
        run.length,
        updates=settings.max_steps if reloads else trainer.estimated_stepping_batches,
        feed=None if reloads else run.feed,
        accumulation=trainer.accumulation_in,
    )
    if parts.tells:
        tell_of_no_validation(run, settings, datamodule)


def _check_manual(settings: Settings) -> None:
    """Refuse what the loop cannot do where `training_step` makes the updates itself."""
    steps = settings.gradient_accumulation_steps
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {steps}, but in manual optimisation training_step "
            "decides when to step; pass gradient_accumulation_steps=1. (It may come from the "
            "launcher, by ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or from a ready Accelerator.)"
        )
    if settings.non_finite == "skip":
        raise ValueError(
            "non_finite is 'skip', but in manual optimisation training_step decides about updates: "
            "look at the loss there, or leave it at 'stop'."
        )
    for name in ("max_grad_norm", "max_grad_value"):
        if getattr(settings, name):
            raise ValueError(
                f"{name} is set, but in manual optimisation training_step clips for itself: call "
                "self.clip_gradients(optimizer, ...) there."
            )


def _going_on(run: FitRun, chosen: Path) -> str:
    """What a resumed run says: from where it goes on, or why it does not."""
    counters = run.counters
    text = f"Going on from {chosen} (epoch {counters.epoch + 1}, update {counters.global_step})."
    if run.length.reached(run.progress):
        return f"{text} Nothing is left to do: the length that the Trainer was given is reached."
    if run.stop_now:
        return (
            f"{text} Nothing is left to do: the run had decided to stop there. To train on, pass "
            "the checkpoint's path as ckpt_path."
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
    """The run of validate, test or predict, and the feeds that it reads.

    Raises:
        ValueError: There is no data, or a loader is empty.
        CheckpointError: The checkpoint asked for is missing, damaged or does not fit.
    """
    chosen = parts.choose(ckpt_path)
    if chosen is not None:
        load_datamodule(datamodule, chosen)
    loaders = on_all(lambda: loaders_for(stage, dataloaders, module, datamodule), stage)
    feeds = feeds_for(stage, loaders, parts.settings, parts.accelerator, seed=0)
    check_step(stage, module, feeds)
    module.to(parts.accelerator.device)
    if chosen is not None:
        manifest = on_all(partial(load_weights, module, chosen), stage)
        counters = Counters(global_step=manifest["step"], epoch=manifest["epoch"])
    elif parts.accelerator.use_distributed:  # each process may have drawn other initial weights
        broadcast([*module.parameters(), *module.buffers()])
    recorder = parts.project.make_recorder(evaluates=True)
    common = _common(module, hooks, recorder, parts.accelerator, datamodule)
    run = Run(**common, counters=counters)
    on_main(lambda: recorder.start(parts.settings.describe()))
    return run, feeds


def make_fit_run(
    module: TrainModule,
    hooks: HookTable,
    recorder: Recorder,
    accelerator: Accelerator,
    settings: Settings,
    *,
    datamodule: Any,
    feed: Feed,
    val_feeds: list[Feed],
    stop_requested: Callable[[], bool],
) -> FitRun:
    """A run that trains: the model prepared first, then the optimizers over its parameters."""
    world_size = accelerator.num_processes
    # What the user counts may have fractions.
    agreement = Agreement(accelerator.device, whole_items=not counts_items(module))
    engine = choose_engine(
        module,
        agreement,
        world_size=world_size,
        automatic=module.automatic_optimization,
        ddp_kwargs=accelerator.ddp_kwargs,
    )
    optimizers, entries, schedulers = prepare_optimizers(module, accelerator)
    own = [Limits(max_norm=one.max_grad_norm, max_value=one.max_grad_value) for one in entries]
    run = FitRun(
        **_common(module, hooks, recorder, accelerator, datamodule, quiet=settings.barebones),
        engine=engine,
        agreement=agreement,
        begun=switches_of(module),
        weighting=LossWeighting(
            micro_batches=settings.gradient_accumulation_steps, world_size=world_size
        ),
        feed=feed,
        val_feeds=val_feeds,
        optimizers=optimizers,
        schedulers=schedulers,
        parameters=list(module.parameters()),
        length=settings.length,
        accumulation=settings.gradient_accumulation_steps,
        limits=Limits(max_norm=settings.max_grad_norm, max_value=settings.max_grad_value),
        own_limits=[pair for pair in zip(optimizers, own, strict=True) if pair[1] != NO_LIMITS],
        optimizer_names=names_of(entries),
        val_schedule=Schedule(Interval.parse(settings.val_every)),
        log_schedule=Schedule(Interval.parse(settings.log_every)),
        sanity_steps=settings.num_sanity_val_steps,
        stop_requested=stop_requested,
        writer=Writer(accelerator.state),
        guard=_guard(module, [each.optimizer for each in optimizers], accelerator, settings),
    )
    if feed.sampler is not None and feed.sampler.batch_size and not run.mover.counts_items:
        run.weighting.reference = float(feed.sampler.batch_size)
    return run


def _guard(
    module: TrainModule, optimizers: list[Optimizer], accelerator: Accelerator, settings: Settings
) -> FiniteGuard | None:
    """What looks for gradients that are not finite."""
    if settings.non_finite == "ignore":
        return None
    return FiniteGuard(
        settings.non_finite,
        settings.max_skipped_in_row,
        optimizers=optimizers,
        named_parameters=module.named_parameters,
        rank=accelerator.process_index,
        manual=not module.automatic_optimization,
    )


def _common(
    module: TrainModule,
    hooks: HookTable,
    recorder: Recorder,
    accelerator: Accelerator,
    datamodule: Any,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
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
