"""Creates a run from a Trainer's settings and a user's module, in the order of the set-up.

A fit: `choose_start` finds the checkpoint, `make_fit_run` prepares the model and then its
optimizers, since sharding replaces parameters, and `start_fit` restores the checkpoint. The hooks
before them, such as ``setup``, are called by `trainer.loops.lifecycle`.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from callbacks import Interval
from trainer.checkpoint.accelerator_state import check_shared_disk
from trainer.checkpoint.async_writer import Writer
from trainer.checkpoint.resolve import WORDS, holds_weights_only, may_rewind
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.seeding import RunGenerators
from trainer.datamodule import DataModule
from trainer.distributed.objects import broadcast_object
from trainer.distributed.process_control import on_all, on_main
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import Engine
from trainer.engines.choose import choose_engine
from trainer.engines.lockstep import synchronize_batch_norm
from trainer.engines.model import check_same_model
from trainer.hparams import logged, to_manifest
from trainer.loops.buffers import FrozenParameters, isolated_dummy
from trainer.loops.dataloaders import (
    FitLoaders,
    check_step,
    loaders_for,
    make_epoch_iterators,
)
from trainer.loops.device_transfer import DeviceTransfer, counts_items
from trainer.loops.fit import should_end
from trainer.loops.fit_state import load_datamodule, load_run, load_weights
from trainer.loops.lifecycle import Stage
from trainer.loops.module_flags import ModuleState
from trainer.loops.optimizer_states import OptimizerStates
from trainer.loops.pending_saves import PendingSaves
from trainer.loops.preemption import Stopping
from trainer.loops.preflight import (
    check_callbacks_of,
    check_manual,
    check_one_pass_loaders,
    check_optimizer_fingerprints,
    check_overrides,
    check_rank_consistency,
    check_units,
    reaches_validation,
    warn_of_no_validation,
    warn_of_unregistered_layers,
)
from trainer.loops.recorder import Recorder
from trainer.loops.run_metadata import name_of, versions
from trainer.loops.state import (
    CheckpointState,
    Counters,
    FitRun,
    Intervals,
    Optimization,
    Run,
)
from trainer.metrics import MetricStore
from trainer.names import bare_names
from trainer.optim.clipping import NO_LIMITS, Clipping, Limits
from trainer.optim.configure import check_optimizers, names_of, read_optimizers
from trainer.optim.fingerprint import options_of
from trainer.optim.finite import FiniteGuard
from trainer.optim.optimizer import AcceleratedOptimizer, ParameterLists
from trainer.optim.weighting import LossWeighting
from trainer.rng import load_rng_state, mix, rng_state, seed_generators


def choose_start(stage: Stage, ckpt_path: Any) -> tuple[Path | None, Path | None]:
    """Return the checkpoint that a fit resumes from, and restore the datamodule; collective.

    This is called before the loaders are created, since they may depend on the datamodule's state.
    If `ckpt_path` is the path of a weights-only checkpoint, its weights are loaded and a new run
    starts.

    Args:
        stage: The stage.
        ckpt_path: The argument of `Trainer.fit`.

    Returns:
        The checkpoint to resume from, or None for a new run; and a checkpoint whose weights
        `start_fit` loads, or None. The latter is used if layers are split, since only the started
        engine can load them.

    Raises:
        ValueError: The folder has another run's checkpoints, arguments differ between ranks, or
            the model is sharded over machines that share no disk, or with a callback that cannot
            work on shards.
        TypeError: Hyper-parameters that were set after ``__init__`` are not plain data.
        CheckpointError: The requested checkpoint is missing or damaged, or does not match the
            module.
    """
    context = stage.context
    engine, folders = context.accelerator.engine, context.folders
    check_rank_consistency(context.settings, context.callbacks, ckpt_path)
    if engine.parallel.divides_state:
        check_shared_disk(context.project.on_each_node)
    check_callbacks_of(engine, context.callbacks)
    on_all(lambda: to_manifest(stage.module), "fit")  # otherwise the first save would fail
    if ckpt_path is None:
        folders.check_fresh()
    chosen = folders.choose(ckpt_path, sweeps=True)
    if chosen is not None and ckpt_path not in WORDS and holds_weights_only(chosen):
        folders.check_fresh()
        context.accelerator.print(f"Starting a new run with the weights of {chosen}.")
        if engine.parallel.is_model_parallel:
            return None, chosen
        on_all(partial(load_weights, stage.module, chosen), "fit")
        return None, None
    if chosen is not None:
        if may_rewind(ckpt_path):
            folders.check_branch(chosen)
        load_datamodule(stage.datamodule, chosen)
    return chosen, None


def make_fit_run(
    stage: Stage,
    data: FitLoaders,
    val_iterators: list[EpochIterator],
    chosen: Path | None,
    begun: Counters,
    stopping: Stopping,
) -> FitRun:
    """Create the `FitRun` of a fit at its start; `start_fit` then restores the checkpoint into it.

    Args:
        stage: The stage.
        data: The training data.
        val_iterators: The epoch iterators of the validation data.
        chosen: The checkpoint to resume from; None for a new run.
        begun: The progress with which a new run begins.
        stopping: Stop requests.

    Raises:
        ValueError: The module's optimizers or the Trainer's settings cannot be used.
        TypeError: ``training_step`` has a wrong signature.
        NotImplementedError: The module overrides a part of the update that its engine makes.
    """
    context, module = stage.context, stage.module
    settings, accelerator = context.settings, context.accelerator
    check_step("fit", module, [data.epoch_iterator])
    if not module.automatic_optimization:
        check_manual(settings)
    accelerator.gradient_state.sync_gradients = True
    accelerator.precision.begin()
    if chosen is None:
        context.project.begin_record()
    recorder = context.project.make_recorder()
    # The user's `count_items` may return fractions.
    step_sync = StepSync(accelerator.device, whole_items=not counts_items(module))
    engine = _engine_of_fit(stage)
    _start_engine(stage, engine, step_sync)
    optim = _optimization(stage, engine, data.epoch_iterator)
    run = FitRun(
        **_common(stage, recorder, engine),
        eval_iterators=val_iterators,
        counters=replace(begun),
        step_sync=step_sync,
        optim=optim,
        data=data,
        intervals=Intervals(
            Interval.parse(settings.val_every),
            Interval.parse(settings.log_every),
            # A trial is too short for these warnings.
            validates=bool(val_iterators)
            and context.trial_steps is None
            and reaches_validation(settings, context.trainer, data.epoch_iterator),
        ),
        stopping=stopping,
        saving=CheckpointState(
            writer=Writer(accelerator.state),
            pending_saves=PendingSaves(context.trainer.save_checkpoint),
            run_id=broadcast_object(uuid.uuid4().hex),
            module_state=ModuleState(module, optim, warns=accelerator.is_main_process),
            generators=RunGenerators(module, lambda: data.epoch_iterator.users_generators),
        ),
        started=time.monotonic(),
        frozen=FrozenParameters(),
    )
    # The search for generators must not reach the run's own through a module's engine.
    itself = weakref.ref(run)

    def isolated() -> AbstractContextManager[None]:
        present = itself()
        assert present is not None
        return isolated_dummy(present)

    engine.isolated = isolated
    return run


def _engine_of_fit(stage: Stage) -> Engine:
    """Return the engine of a fit, using the module's own ``backward`` if it has one."""
    accelerator, settings = stage.context.accelerator, stage.context.settings
    module, hooks = stage.module, stage.hooks
    # These hooks may change gradients after the reduction.
    changing_hooks = {"on_after_backward", "on_before_optimizer_step"} & dict(
        hooks.overridden()
    ).keys()
    options = replace(
        accelerator.engine.options,
        run_backward=hooks.module_overrides.get("backward", Tensor.backward),
        checks_gradients=(
            settings.non_finite != "ignore"
            and module.automatic_optimization
            and not accelerator.precision.scales
            and not changing_hooks
        ),
    )
    engine = choose_engine(options, automatic=module.automatic_optimization)
    check_overrides(engine, module, hooks)
    return engine


def _start_engine(stage: Stage, engine: Engine, step_sync: StepSync | None) -> None:
    """Convert the module as `sync_batchnorm`, `dtype` and `mixed_precision` ask, and prepare it.

    Args:
        stage: The stage.
        engine: The engine.
        step_sync: See `Engine.start`.
    """
    module, accelerator = stage.module, stage.context.accelerator
    if stage.context.settings.sync_batchnorm and accelerator.num_processes > 1:
        synchronize_batch_norm(module)
    accelerator.precision.convert(module)
    check_same_model(module, engine)
    engine.start(module, step_sync)


def _optimization(stage: Stage, engine: Engine, epoch_iterator: EpochIterator) -> Optimization:
    """Call ``configure_optimizers`` and prepare what it returned; collective.

    Raises:
        TypeError: The hook's result is malformed; see `read_optimizers`.
        ValueError: See `check_optimizers`; or options differ between ranks.
        RuntimeError: The hook failed on another rank.
    """
    settings, accelerator = stage.context.settings, stage.context.accelerator
    module = stage.module
    automatic = module.automatic_optimization
    entries, schedulers = on_all(lambda: read_optimizers(module.configure_optimizers()), "fit")
    check_optimizers(entries, schedulers, module, automatic=automatic)
    optimizers = [
        AcceleratedOptimizer(
            engine.prepare_optimizer(entry.optimizer),
            precision=accelerator.precision,
            reduce=engine.gradients.average,
            driver=engine.driver,
        )
        for entry in entries
    ]
    if (driver := engine.driver) is not None:
        schedulers = [
            replace(entry, scheduler=driver.prepare_scheduler(entry.scheduler))
            for entry in schedulers
        ]
    names = names_of(entries)
    fingerprint = options_of(names, optimizers, schedulers)
    check_optimizer_fingerprints(fingerprint, alike=not engine.parallel.is_model_parallel)
    states = OptimizerStates(
        optimizers, names, schedulers, module, fingerprint, warns=accelerator.is_main_process
    )
    guard = None
    if settings.non_finite != "ignore":
        guard = FiniteGuard(
            settings.non_finite,
            settings.max_skipped_in_row,
            optimizers=[optimizer.optimizer for optimizer in optimizers],
            named_parameters=lambda: bare_names(module, module.named_parameters()),
            rank=accelerator.process_index,
            manual=not automatic,
        )
    reference = None  # the items of a full micro-batch, unknown before the first is read
    if epoch_iterator.sampler is not None and not counts_items(module):
        reference = float(epoch_iterator.sampler.batch_size or 0) or None
    return Optimization(
        optimizers=optimizers,
        states=states,
        schedulers=schedulers,
        weighting=LossWeighting(
            micro_batches=settings.gradient_accumulation_steps,
            world_size=engine.parallel.dp_size,
            reference=reference,
        ),
        guard=guard,
        clipping=Clipping(
            Limits(max_norm=settings.max_grad_norm, max_value=settings.max_grad_value),
            [
                (optimizer, entry.limits)
                for optimizer, entry in zip(optimizers, entries, strict=True)
                if entry.limits != NO_LIMITS
            ],
        ),
        accumulation=settings.gradient_accumulation_steps,
        parameters=ParameterLists(module, optimizers),
    )


def start_fit(run: FitRun, chosen: Path | None, weights: Path | None, ckpt_path: Any) -> None:
    """Restore a fit from its checkpoint, if any, and start the local record and the trackers.

    Args:
        run: The fit at its start.
        chosen: The checkpoint to resume from; None for a new run.
        weights: A checkpoint with the initial weights of a new run, if they are not loaded yet.
        ckpt_path: The argument of `Trainer.fit`.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the run.
    """
    context = run.context
    offset = None
    if chosen is not None:
        offset = _resume(run, chosen, back=may_rewind(ckpt_path))
    elif ckpt_path == "auto":  # so that the user notices a wrong folder
        empty = ", ".join(map(str, context.folders.all_roots()))
        context.accelerator.print(f"No checkpoint in {empty}: starting a new run.")
    over = _is_over(run)
    if context.warns and not over:
        warn_of_no_validation(run)
        warn_of_unregistered_layers(run)
    if chosen is None:
        if context.warns and over:
            context.accelerator.print("There is nothing to do: max_epochs or max_steps is 0.")
        _begin(run, weights)
    check_one_pass_loaders(run)
    check_units(run)
    configuration, hparams = context.settings.describe(), logged(run.module)
    if isinstance(run.stage.datamodule, DataModule):
        hparams = logged(run.stage.datamodule) | hparams
    run_metadata = {
        "run_id": run.saving.run_id,
        "module": type(run.module).__qualname__,
        "world_size": run.world_size,
        "device": name_of(run.device),
        "versions": versions(),
        "configuration": configuration,
        "hyper_parameters": hparams,
    }
    step = run.counters.global_step
    with _finished_on_error(run.recorder):
        on_main(
            lambda: run.recorder.start(
                configuration | hparams,
                run_metadata=run_metadata,
                step=step,
                cut_at=offset,
                cut_behind=None if chosen is None else step,
                source=chosen,
            )
        )
        folders = context.folders
        run.saving.mirrored = folders.writes and bool(folders.mirrors)
        if run.saving.mirrored:
            on_main(lambda: run.saving.begin_mirrors(folders.mirrors, step))
        # Not in a single-process trial, which may end while the other ranks still connect.
        if run.world_size > 1:
            run.saving.writer.open()  # last: nothing can fail between this and its close


def _begin(run: FitRun, weights: Path | None) -> None:
    """Begin a new run: load its initial weights, if there are any, and seed the generators."""
    run.recorder.begin_anew()
    if run.counters.global_step:  # events due in an earlier run are not due again
        run.intervals.begin(run.progress())
    if weights is not None:
        on_all(partial(load_weights, run.module, weights, run.engine), "fit")
    if run.dp_size < run.world_size:  # ranks that share a model may have drawn different numbers
        load_rng_state(broadcast_object(rng_state()))
    if run.dp_rank > 0:
        # Rank 0 draws the same random numbers as a single process. The other ranks are seeded
        # differently, so that their dropout masks differ, except where they read the same data.
        seed_generators(mix(run.data.epoch_iterator.seed, run.dp_rank) % 2**32)


@contextmanager
def _finished_on_error(recorder: Recorder) -> Iterator[None]:
    """Finish the record and the trackers if the code inside fails, on this rank or another."""
    try:
        yield
    except BaseException as error:
        recorder.finish("failed", error)  # the Trainer, which usually does it, has no run yet
        raise


def _resume(run: FitRun, chosen: Path, *, back: bool) -> int | None:
    """Restore a fit from a checkpoint, on all ranks or none, and print if nothing is left to do.

    Args:
        run: The fit.
        chosen: The checkpoint.
        back: Whether later checkpoints may exist, which are quarantined.

    Returns:
        The length of the local record at that checkpoint in bytes; None if unknown.
    """
    context = run.context
    load = partial(load_run, run, chosen, stays_stopped=not back)
    offset = on_all(load, "fit")
    # Only after loading has succeeded: the checkpoint may not match the run.
    if back and context.project.leave_branch(chosen, context.folders, offset):
        run.recorder.resume({}, run.counters.global_step)  # services cannot delete logged steps
    if _is_over(run):
        length = context.length
        why = "the run stopped there. To train further, pass the checkpoint's path as ckpt_path."
        if length.reached(run.counters, run.seconds):
            limits = {
                "max_epochs": length.max_epochs,
                "max_steps": length.max_steps,
                "max_time": length.max_seconds,
            }
            names = " or ".join(name for name, limit in limits.items() if limit is not None)
            why = f"the Trainer's {names} is reached."
        context.accelerator.print(f"Nothing is left to do: {why}")
    return offset


def _is_over(run: FitRun) -> bool:
    """Return whether no update is left, and no work that a signal left due after the last one."""
    return not run.saving.update_unfinished and should_end(run)


def prepare_evaluation(stage: Stage, dataloaders: Any, ckpt_path: Any, counters: Counters) -> Run:
    """Create the `Run` of validate, test or predict; collective.

    Args:
        stage: The stage.
        dataloaders: The data loaders given by the user, or None.
        ckpt_path: The checkpoint whose weights are loaded; None for the module's present weights.
        counters: The progress of the last fit; replaced by the checkpoint's if one is loaded.

    Raises:
        ValueError: There is no data, or a loader is empty.
        CheckpointError: The requested checkpoint is missing or damaged, or does not match the
            module.
    """
    context, name = stage.context, stage.name
    module, datamodule = stage.module, stage.datamodule
    chosen = context.folders.choose(ckpt_path)
    if chosen is not None:
        load_datamodule(datamodule, chosen)
    loaders = on_all(lambda: loaders_for(name, dataloaders, module, datamodule), name)
    epoch_iterators = make_epoch_iterators(
        name,
        loaders,
        context.settings,
        context.accelerator,
        seed=0,
        may_be_empty=context.may_be_empty,
    )
    check_step(name, module, epoch_iterators)
    engine = choose_engine(context.accelerator.engine.options)
    divides = engine.parallel.is_model_parallel  # the saved weights are whole
    if divides:
        _start_engine(stage, engine, None)
    if chosen is not None:
        load = partial(load_weights, module, chosen, engine if divides else None)
        manifest = on_all(load, name)
        counters = Counters(global_step=manifest["step"], epoch=manifest["epoch"])
    if not divides:
        _start_engine(stage, engine, None)  # initial weights may differ between ranks
    recorder = context.project.make_recorder(evaluates=True)
    common = _common(stage, recorder, engine)
    run = Run(**common, eval_iterators=epoch_iterators, counters=counters)
    with _finished_on_error(recorder):
        on_main(lambda: recorder.start(context.settings.describe()))
    return run


def _common(stage: Stage, recorder: Recorder, engine: Engine) -> dict[str, Any]:
    """Return the arguments of `Run`, which a fit and an evaluation have in common."""
    context, accelerator = stage.context, stage.context.accelerator
    metrics = MetricStore(
        accelerator.device,
        world_size=accelerator.num_processes,
        counts=engine.parallel.is_log_primary,
        quiet_training=stage.name == "fit" and context.settings.barebones,
    )
    recorder.private = metrics.private
    return {
        "stage": stage,
        "metrics": metrics,
        "recorder": recorder,
        "engine": engine,
        "device_transfer": DeviceTransfer(
            stage.module,
            stage.datamodule,
            device=accelerator.device,
            rank=engine.parallel.dp_rank,
            world_size=engine.parallel.dp_size,
            dtype=accelerator.precision.dtype,
        ),
    }
