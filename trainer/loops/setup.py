"""From a Trainer's settings and a user's module to a run, and the teardown after it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from callbacks import Callback, Interval, ModelCheckpoint
from trackers.base import Status
from trainer.accelerator import Accelerator
from trainer.checkpoint.accelerator_state import check_shared_disk
from trainer.checkpoint.async_writer import Writer
from trainer.checkpoint.resolve import WORDS, holds_weights_only, may_rewind
from trainer.data.epoch_iterator import EpochIterator
from trainer.datamodule import DataModule
from trainer.distributed.objects import broadcast_object
from trainer.distributed.process_control import on_all, on_main
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import Engine
from trainer.engines.choose import choose_engine
from trainer.engines.model import check_same_model
from trainer.environment import defaulting
from trainer.errors import Preempted, module_logger
from trainer.hooks import HookTable, uncalled_hooks
from trainer.hparams import logged, to_manifest
from trainer.loops.config import Length, Schedule, Settings, check_callbacks, drop_replaced_defaults
from trainer.loops.dataloaders import (
    call_if_there,
    check_hooks,
    check_step,
    loaders_for,
    make_epoch_iterators,
)
from trainer.loops.device_transfer import counts_items
from trainer.loops.fit_state import load_datamodule, load_run, load_weights
from trainer.loops.module_flags import frozen_and_eval_flags
from trainer.loops.pending_saves import PendingSaves
from trainer.loops.preflight import (
    can_be_due,
    check_callbacks_of,
    check_one_pass_loaders,
    check_optimizer_fingerprints,
    check_rank_consistency,
    monitors_of,
    warn_of_no_validation,
)
from trainer.loops.recorder import Recorder
from trainer.loops.run_directory import Project
from trainer.loops.run_metadata import name_of, versions
from trainer.loops.state import Counters, FitData, FitRun, Optimization, Plan, Run, Saving, Stopping
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.names import bare_names
from trainer.optim.clipping import NO_LIMITS, Limits
from trainer.optim.configure import OptimizerEntry, SchedulerEntry, names_of, read_optimizers
from trainer.optim.fingerprint import options_of
from trainer.optim.finite import FiniteGuard
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.optim.weighting import LossWeighting
from trainer.rng import load_rng_state, mix, rng_state, seed_generators
from trainer.signatures import without_batch_idx
from trainer.state import PartialState

# Without it cuBLAS is not deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_CLIP = (
    "In manual optimisation training_step does the clipping: call self.clip_gradients(optimizer, "
    "...) there."
)

logger = module_logger(__name__)

_threads: list[threading.Thread] = []  # the threads that run a Trainer at present


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The components of a Trainer, from which a run is created.

    Attributes:
        settings: The Trainer's arguments.
        accelerator: Its accelerator.
        project: Its project folder.
        callbacks: Its callbacks, in the order of calls.
        trainer: The Trainer itself, passed to hooks.
        trial_steps: The number of updates in a trial of the `Tuner`; None if this is no trial.
        added: Callbacks that ``setup`` hooks have added; each stage calls those again.
        may_be_empty: Whether data without a batch is left out, instead of an error.
        uncalled: Returns a sentence for each hook of another trainer that a module, callback or
            datamodule defines; see `uncalled_hooks`.
    """

    settings: Settings
    accelerator: Accelerator
    project: Project
    callbacks: list[Callback]
    trainer: Any
    trial_steps: int | None = None
    added: list[Callback] = field(default_factory=list)
    may_be_empty: bool = False
    uncalled: Callable[[object, str], Iterable[str]] = uncalled_hooks

    @property
    def warns(self) -> bool:
        """Whether to print warnings about the set-up: on rank 0, and not in trials."""
        return self.trial_steps is None and self.accelerator.is_main_process

    @property
    def length(self) -> Length:
        """When a fit ends.

        A trial ends earlier than its settings say: those keep the user's length, since schedulers
        depend on it.
        """
        if self.trial_steps is not None:
            return Length(max_steps=self.trial_steps)
        return self.settings.length

    def roots(self) -> list[Path]:
        """Return the folders of `ModelCheckpoint` callbacks that have their own `dirpath`."""
        savers = [one for one in self.callbacks if isinstance(one, ModelCheckpoint)]
        return [one.root for one in savers if one.root is not None]

    def choose(self, ckpt_path: Any, *, sweeps: bool = False) -> Path | None:
        """Resolve ``ckpt_path`` to a checkpoint; see `CheckpointFolders.choose`; collective."""
        monitors = [
            (callback.monitor, callback.mode)
            for callback in self.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
        ]
        return self.project.folders.choose(ckpt_path, self.roots(), monitors, sweeps=sweeps)


@contextmanager
def warn_of_concurrent_runs() -> Iterator[None]:
    """Warn if another thread runs a Trainer, since both change process-wide settings of torch."""
    own = threading.current_thread()  # its hooks may run another Trainer: no warning for that
    _threads.append(own)
    if any(each is not own and each.is_alive() for each in _threads):  # dead in a forked process
        logger.warning(
            "Another thread of this process runs a Trainer too. Both draw from the same random "
            "generators, so neither run can be repeated or resumed exactly: run each in its own "
            "process (n_jobs=1 in Optuna, backend='loky' in joblib)."
        )
    try:
        yield
    finally:
        _threads.remove(own)


@contextmanager
def deterministic(mode: bool | Literal["warn"]) -> Iterator[None]:
    """Use deterministic algorithms inside; restore the previous settings on exit.

    Operations without a deterministic implementation raise, or with ``"warn"`` only warn.

    Args:
        mode: True, ``"warn"``, or False to change nothing.
    """
    if not mode:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with defaulting(*_CUBLAS):
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
        torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
            torch.backends.cudnn.benchmark = benchmark


def prepare_optimizers(
    module: TrainModule, accelerator: Accelerator, engine: Engine
) -> tuple[list[AcceleratedOptimizer], list[OptimizerEntry], list[SchedulerEntry]]:
    """Call ``configure_optimizers`` and prepare the optimizers that it returned; collective.

    Args:
        module: The user's module.
        accelerator: The accelerator.
        engine: Says whether each optimizer averages its gradients over the ranks when it steps.

    Returns:
        The prepared optimizers, the user's optimizers with their options, and the schedulers.

    Raises:
        TypeError: The hook's result is malformed; see `read_optimizers`.
        ValueError: An optimizer has none of the module's parameters, two optimizers share one, a
            scheduler belongs to another optimizer, or an optimizer does not support this mode.
        RuntimeError: The hook failed on another rank.
    """
    entries, schedulers = on_all(lambda: read_optimizers(module.configure_optimizers()), "fit")
    optimizers, names = [entry.optimizer for entry in entries], names_of(entries)
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and module.automatic_optimization:
            raise ValueError(
                "configure_optimizers returned LBFGS, which evaluates the loss several times per "
                "update; set automatic_optimization = False and call optimizer.step(closure)."
            )
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer).__name__} that has none of the "
                f"parameters of {type(module).__name__}; pass it self.parameters()."
            )
    _check_attached(schedulers, optimizers)
    if module.automatic_optimization:
        _check_separate(optimizers, names, module)
    else:
        _check_no_limits(entries, names)
    prepared = [
        AcceleratedOptimizer(
            engine.prepare_optimizer(optimizer),
            precision=accelerator.precision,
            reduce=engine.reduce_gradients,
            driver=engine.optimizer_driver,
        )
        for optimizer in optimizers
    ]
    schedulers = [
        replace(entry, scheduler=engine.prepare_scheduler(entry.scheduler)) for entry in schedulers
    ]
    return prepared, entries, schedulers


def _check_attached(schedulers: list[SchedulerEntry], optimizers: list[Optimizer]) -> None:
    """Raise if a scheduler belongs to an optimizer that was not returned: it has no effect.

    An optimizer counts as returned if a returned optimizer that is not torch's may wrap it. That
    one may have groups of its own, so parameters are compared.

    Raises:
        ValueError: There is such a scheduler.
    """
    trained = set(map(id, parameters_of(optimizers)))
    wrapped = any(not type(each).__module__.startswith("torch.optim.") for each in optimizers)
    for entry in schedulers:
        scheduled = getattr(entry.scheduler, "optimizer", None)
        if not isinstance(scheduled, Optimizer) or any(scheduled is each for each in optimizers):
            continue
        if not wrapped or trained.isdisjoint(map(id, parameters_of([scheduled]))):
            raise ValueError(
                f"configure_optimizers returned a {type(entry.scheduler).__name__} of a "
                f"{type(scheduled).__name__} that it did not return, whose learning rates have no "
                "effect: create the scheduler with the optimizer that you return."
            )


def _check_no_limits(entries: list[OptimizerEntry], names: list[str]) -> None:
    """Raise for clipping limits in manual optimisation, where the loop does not clip.

    Raises:
        ValueError: An optimizer has limits.
    """
    for entry, name in zip(entries, names, strict=True):
        if entry.max_grad_norm is not None or entry.max_grad_value is not None:
            raise ValueError(
                f"configure_optimizers returned limits on the gradients of {name!r}. {_CLIP}"
            )


def _check_separate(optimizers: list[Optimizer], names: list[str], module: TrainModule) -> None:
    """Raise if two optimizers share a parameter, which each update would change twice.

    Raises:
        ValueError: There is such a parameter.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of([optimizer]):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                named = bare_names(module, module.named_parameters())
                name = next((n for n, p in named if p is parameter), "?")
                raise ValueError(
                    f"The optimizers {names[other]!r} and {names[number]!r} that "
                    f"configure_optimizers returned both have the parameter {name!r}, and every "
                    "optimizer steps at every update: give each its own parameters. To alternate "
                    "between losses set automatic_optimization = False."
                )


@contextmanager
def stage_of(
    context: RunContext,
    name: str,
    module: TrainModule,
    datamodule: Any,
    *,
    finish: Callable[[Status, BaseException | None], None],
) -> Iterator[HookTable]:
    """Set up the module, the datamodule and the callbacks; tear them down on exit or error.

    Args:
        context: What the run is made of. Its callbacks are extended by those that ``setup`` hooks
            add, and sorted so that those that save run last.
        name: The stage: fit, validate, test or predict.
        module: The user's module.
        datamodule: The user's datamodule, or None.
        finish: Called last in every case, with the status and the error, if any.

    Yields:
        The hooks of the module and the callbacks.
    """
    trainer, callbacks = context.trainer, context.callbacks
    check = partial(check_hooks, stage=name, warns=context.warns, uncalled=context.uncalled)
    check(module, callbacks, datamodule)
    hooks = HookTable(trainer, module, callbacks, TrainModule)
    status: Status = "finished"
    cause: BaseException | None = None
    with _attached(trainer, module, datamodule):
        try:
            _set_up(context, name, module, datamodule)
            _attach_trainer(trainer, module)
            callbacks.sort(key=lambda callback: callback.runs_last)
            hooks = HookTable(trainer, module, callbacks, TrainModule)  # `setup` may add some
            yield hooks
        except Preempted:
            status = "preempted"
            raise
        except BaseException as error:
            status, cause = "failed", error
            hooks.on_exception(error)
            for failed in _errors_of([partial(call_if_there, datamodule, "on_exception", error)]):
                logger.error("on_exception of the datamodule failed.", exc_info=failed)
            raise
        finally:
            tear_down: list[Callable[[], Any]] = [
                partial(call_if_there, datamodule, "teardown", name),
                *(
                    partial(call_if_there, each, "teardown", trainer, module, name)
                    for each in callbacks
                ),
                partial(module.teardown, name),
            ]
            errors = _errors_of(tear_down)
            cause = cause or next(iter(errors), None)
            errors += _errors_of([partial(finish, "failed" if errors else status, cause)])
            # If the run itself has failed, that error is already being raised.
            failure = errors.pop(0) if errors and status == "finished" else None
            for other in errors:
                logger.error("The teardown after %s failed.", name, exc_info=other)
            if failure is not None:
                raise failure


@contextmanager
def _attached(trainer: Any, module: TrainModule, datamodule: Any) -> Iterator[None]:
    """Set `trainer` on the module and the datamodule, and make every step accept `batch_idx`.

    On exit the earlier values are restored: this may run in a hook of another Trainer.
    """
    steps = without_batch_idx(module)
    owns_data = isinstance(datamodule, DataModule)
    outer = {
        part: part.__dict__.get("_trainer")
        for part in module.modules()
        if isinstance(part, TrainModule)
    }
    outer_of_data = datamodule.trainer if owns_data else None
    module.__dict__.update(steps)
    _attach_trainer(trainer, module)
    if owns_data:
        datamodule.trainer = trainer
    try:
        yield
    finally:
        _attach_trainer(None, module)
        for part, trainer_before in outer.items():
            part.__dict__["_trainer"] = trainer_before
        for step in steps:
            module.__dict__.pop(step, None)
        if owns_data:
            datamodule.trainer = outer_of_data
        if outer[module] is None:
            TrainModule.untoggle_optimizer(module)  # a step may have failed while one was toggled


def _attach_trainer(trainer: Any, module: TrainModule) -> None:
    """Set the trainer of a module and of the `TrainModule`s inside it."""
    for part in module.modules():
        if isinstance(part, TrainModule):
            part.__dict__["_trainer"] = trainer


def _set_up(context: RunContext, name: str, module: TrainModule, datamodule: Any) -> None:
    callbacks, added = context.callbacks, context.added
    given, done = set(map(id, callbacks)), set[int]()
    earlier = {one.state_key for one in added if id(one) in given}
    with PartialState().local_main_process_first():
        call_if_there(datamodule, "prepare_data")
        module.prepare_data()

    def next_callback() -> Callback | None:
        """Return the next callback to set up, or None.

        `setup` may append the same object in every stage, or another one with the same state key:
        the one that an earlier stage has added stays.
        """
        callbacks[:] = {id(each): each for each in callbacks}.values()
        for one in callbacks.copy():
            if id(one) not in given and getattr(one, "state_key", None) in earlier:
                callbacks[:] = [each for each in callbacks if each is not one]
                if PartialState().is_main_process:
                    logger.warning(
                        "setup has added another %s (%s) for %s: the one that it added for an "
                        "earlier stage is used. Add it in one stage only, if stage == 'fit'.",
                        type(one).__name__,
                        one.state_key,
                        name,
                    )
        drop_replaced_defaults(callbacks)
        check_callbacks(callbacks)
        return next((each for each in callbacks if id(each) not in done), None)

    def set_up_callbacks() -> None:
        """Set up the callbacks not set up yet; each may add others, at any position."""
        while (callback := next_callback()) is not None:
            done.add(id(callback))
            if id(callback) not in given:
                added.append(callback)
                check_hooks(
                    None,
                    [callback],
                    None,
                    stage=name,
                    warns=context.warns,
                    uncalled=context.uncalled,
                )
            callback.setup(context.trainer, module, name)

    def hooks() -> None:
        call_if_there(datamodule, "setup", name)
        set_up_callbacks()
        module.setup(name)
        set_up_callbacks()  # the callbacks that the module's setup has added
        with context.accelerator.precision.new_tensors():
            module.configure_model()
        set_up_callbacks()

    on_all(hooks, name)


def _errors_of(calls: Sequence[Callable[[], Any]]) -> list[BaseException]:
    """Make every call even if others raise, also KeyboardInterrupt; return the errors."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised or logged by the caller
            errors.append(error)
    return errors


def choose_start(
    context: RunContext, ckpt_path: Any, module: TrainModule, datamodule: Any
) -> tuple[Path | None, Path | None]:
    """Return the checkpoint that a fit resumes from, and restore the datamodule; collective.

    This is called before the loaders are created, since they may depend on the datamodule's state.
    If `ckpt_path` is the path of a weights-only checkpoint, its weights are loaded and a new run
    starts.

    Args:
        context: What the run is made of.
        ckpt_path: The argument of `Trainer.fit`.
        module: The user's module.
        datamodule: The user's datamodule, or None.

    Returns:
        The checkpoint to resume from; None for a new run. And one whose weights `start_fit` loads,
        since only an engine that divides layers can.

    Raises:
        ValueError: The folder has another run's checkpoints, arguments differ between ranks, or
            the model is sharded over machines that share no disk, or with a callback that cannot
            work on shards.
        TypeError: Hyper-parameters that were set after ``__init__`` are not plain data.
        CheckpointError: The requested checkpoint is missing or damaged, or does not match the
            module.
    """
    check_rank_consistency(context.settings, context.callbacks, ckpt_path)
    if (
        context.accelerator.engine.parallel.mesh is not None
        or context.accelerator.engine.full_state_on_rank0
    ):
        check_shared_disk(context.project.on_each_node)
    check_callbacks_of(context.accelerator.engine, context.callbacks)
    on_all(lambda: to_manifest(module), "fit")  # fail before the first step, not at the first save
    if ckpt_path is None:
        context.project.folders.check_fresh(context.roots())
    chosen = context.choose(ckpt_path, sweeps=True)
    if chosen is not None and ckpt_path not in WORDS and holds_weights_only(chosen):
        context.project.folders.check_fresh(context.roots())
        context.accelerator.print(f"Starting a new run with the weights of {chosen}.")
        if context.accelerator.engine.is_model_parallel:
            return None, chosen
        on_all(partial(load_weights, module, chosen), "fit")
        return None, None
    if chosen is not None:
        if may_rewind(ckpt_path):
            context.project.folders.check_branch(chosen, context.roots())
        load_datamodule(datamodule, chosen)
    return chosen, None


def _convert(context: RunContext, module: TrainModule) -> None:
    """Convert a module as `sync_batchnorm`, `dtype` and `mixed_precision` ask, in place."""
    if context.settings.sync_batchnorm and context.accelerator.num_processes > 1:
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                    setattr(part, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
    context.accelerator.precision.convert(module)


def make_fit_run(
    context: RunContext,
    hooks: HookTable,
    data: FitData,
    chosen: Path | None,
    begun: Counters,
    stopping: Stopping,
) -> FitRun:
    """Create the `FitRun` of a fit at its start; `start_fit` then restores the checkpoint into it.

    The model is prepared before the optimizers, because sharding replaces parameters.

    Args:
        context: What the run is made of.
        hooks: The hooks of the module and the callbacks.
        data: The loaders.
        chosen: The checkpoint to resume from; None for a new run.
        begun: The progress with which a new run begins.
        stopping: Who wants the run to stop.

    Raises:
        ValueError: The module's optimizers or the Trainer's settings cannot be used.
        TypeError: ``training_step`` has a wrong signature.
    """
    settings, accelerator, module = context.settings, context.accelerator, data.sources.module
    check_step("fit", module, [data.epoch_iterator])
    if not module.automatic_optimization:
        _check_manual(settings)
    accelerator.gradient_state.sync_gradients = True
    accelerator.precision.begin()
    if chosen is None:
        context.project.begin_record()
    recorder = context.project.make_recorder()
    # The user's `count_items` may return fractions.
    step_sync = StepSync(accelerator.device, whole_items=not counts_items(module))
    between = {"on_after_backward", "on_before_optimizer_step"} & dict(hooks.overridden()).keys()
    options = replace(
        accelerator.engine.options,
        run_backward=hooks.module_overrides.get("backward", Tensor.backward),
        checks_gradients=(
            settings.non_finite != "ignore"
            and module.automatic_optimization
            and not accelerator.precision.scales
            and not between
        ),
    )
    engine = choose_engine(options, automatic=module.automatic_optimization)
    _convert(context, module)
    own_parts = hooks.module_overrides.keys() - {"lr_scheduler_step"}
    if engine.optimizer_driver is not None and own_parts:
        assert engine.distributed_type is not None
        raise NotImplementedError(
            f"{type(module).__name__} overrides {', '.join(sorted(own_parts))}, but the step of "
            f"{engine.distributed_type.value} reduces, clips and updates at once: leave them out, "
            f"or the plugin (--use_{engine.distributed_type.value.lower()})."
        )
    check_same_model(module, engine)
    engine.start(module, step_sync)
    optimizers, entries, schedulers = prepare_optimizers(module, accelerator, engine)
    names = names_of(entries)
    fingerprints = options_of(names, optimizers, schedulers)
    check_optimizer_fingerprints(fingerprints, alike=not engine.is_model_parallel)
    own = [Limits(max_norm=one.max_grad_norm, max_value=one.max_grad_value) for one in entries]
    guard = _guard(module, [each.optimizer for each in optimizers], accelerator, settings)
    common = _common(
        context, module, data.sources.datamodule, hooks, recorder, engine, quiet=settings.barebones
    )
    return FitRun(
        **common,
        counters=replace(begun),
        step_sync=step_sync,
        optim=Optimization(
            optimizers=optimizers,
            names=names,
            schedulers=schedulers,
            weighting=LossWeighting(
                micro_batches=settings.gradient_accumulation_steps,
                world_size=engine.parallel.dp_size,
                reference=_nominal_items(module, data.epoch_iterator),
            ),
            guard=guard,
            limits=Limits(max_norm=settings.max_grad_norm, max_value=settings.max_grad_value),
            own_limits=[pair for pair in zip(optimizers, own, strict=True) if pair[1] != NO_LIMITS],
            fingerprint=fingerprints,
            accumulation=settings.gradient_accumulation_steps,
            parameters=list(module.parameters()),
        ),
        data=data,
        plan=Plan(
            length=context.length,
            val_schedule=Schedule(Interval.parse(settings.val_every)),
            log_schedule=Schedule(Interval.parse(settings.log_every)),
            sanity_steps=settings.num_sanity_val_steps,
            validates=bool(data.val_iterators) and _reaches_validation(context, data),
            monitored=monitors_of(schedulers, context.callbacks),
        ),
        stopping=stopping,
        saving=Saving(
            writer=Writer(accelerator.state),
            pending_saves=PendingSaves(context.trainer.save_checkpoint),
            run_id=broadcast_object(uuid.uuid4().hex),
            begun=frozen_and_eval_flags(module),
        ),
        warns=context.warns,
    )


def _nominal_items(module: TrainModule, epoch_iterator: EpochIterator) -> float | None:
    """Return the items of a full micro-batch; None if unknown before the first one is read."""
    if (
        epoch_iterator.sampler is None
        or not epoch_iterator.sampler.batch_size
        or counts_items(module)
    ):
        return None
    return float(epoch_iterator.sampler.batch_size)


def _reaches_validation(context: RunContext, data: FitData) -> bool:
    """Return whether the run is long enough for a validation; True if that is unknown."""
    if context.trial_steps is not None:  # too short, and no warning is needed
        return False
    settings, trainer = context.settings, context.trainer
    reloads = settings.reload_dataloaders_every_n_epochs > 0
    return can_be_due(
        Interval.parse(settings.val_every),
        settings.length,
        updates=settings.max_steps if reloads else trainer.estimated_stepping_batches,
        epoch_iterator=None if reloads else data.epoch_iterator,
        accumulation=trainer.accumulation_in,
    )


def start_fit(
    context: RunContext, run: FitRun, chosen: Path | None, weights: Path | None, ckpt_path: Any
) -> None:
    """Restore a fit from its checkpoint, if any, and start the local record and the trackers.

    Args:
        context: What the run is made of.
        run: The fit at its start.
        chosen: The checkpoint to resume from; None for a new run.
        weights: One whose weights a new run starts with, if they are not loaded yet.
        ckpt_path: The argument of `Trainer.fit`.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the run.
    """
    lasts = not run.plan.length.reached(run.progress)
    if run.warns and lasts:
        warn_of_no_validation(run, context.settings)
    offset = None
    if chosen is not None:
        offset = _resume(context, run, chosen, back=may_rewind(ckpt_path))
    else:
        if ckpt_path == "auto":  # so that the user notices a wrong folder
            empty = ", ".join(map(str, context.project.folders.all_roots(context.roots())))
            context.accelerator.print(f"No checkpoint in {empty}: starting a new run.")
        if run.warns and not lasts:
            context.accelerator.print("There is nothing to do: max_epochs or max_steps is 0.")
        run.recorder.begin_anew()
        if run.counters.global_step:  # what an earlier run was due for is not due again
            run.plan.val_schedule.before = run.plan.log_schedule.before = run.progress
            run.plan.last_logged = run.counters.global_step
        if weights is not None:
            on_all(partial(load_weights, run.module, weights, run.engine), "fit")
        if run.dp_size < run.world_size:  # parts of one model may have drawn other numbers
            load_rng_state(broadcast_object(rng_state()))
        if run.dp_rank > 0:
            # Rank 0 draws the same random numbers as a single process. The other ranks are seeded
            # differently, so that their dropout masks differ, except where they read the same data.
            seed_generators(mix(run.data.epoch_iterator.seed, run.dp_rank) % 2**32)
    check_one_pass_loaders(run, context.settings.reload_dataloaders_every_n_epochs)
    hparams = logged(run.module)
    if isinstance(run.datamodule, DataModule):
        hparams = logged(run.datamodule) | hparams
    configuration, step = context.settings.describe(), run.counters.global_step
    start = partial(
        run.recorder.start,
        configuration | hparams,
        run_metadata={
            "run_id": run.saving.run_id,
            "module": type(run.module).__qualname__,
            "world_size": run.world_size,
            "device": name_of(run.device),
            "versions": versions(),
            "configuration": configuration,
            "hyper_parameters": hparams,
        },
        step=step,
        cut_at=offset,
        cut_behind=None if chosen is None else step,
        source=chosen,
    )
    with _finished_on_error(run.recorder):
        on_main(start)
        # Not in a single-process trial: it may end while the other ranks still connect.
        if run.world_size > 1:
            run.saving.writer.open()  # last: nothing can fail between this and its close


@contextmanager
def _finished_on_error(recorder: Recorder) -> Iterator[None]:
    """Finish the record and the trackers if the code inside fails, on this rank or another."""
    try:
        yield
    except BaseException as error:
        recorder.finish("failed", error)  # the Trainer, which usually does it, has no run yet
        raise


def _resume(context: RunContext, run: FitRun, chosen: Path, *, back: bool) -> int | None:
    """Restore a fit from a checkpoint, on all ranks or none, and print where it resumes.

    Args:
        context: What the run is made of.
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
        trainer=context.trainer,
        callbacks=context.callbacks,
        stays_stopped=not back,
    )
    offset = on_all(load, "fit")
    # Only after loading has succeeded: the checkpoint may not match the run.
    if back and context.project.leave_branch(chosen, context.roots(), offset):
        run.recorder.resume({}, run.counters.global_step)  # services cannot delete logged steps
    context.accelerator.print(_resume_message(run, chosen))
    return offset


def _check_manual(settings: Settings) -> None:
    """Raise for settings that have no effect in manual optimisation.

    Raises:
        ValueError: Accumulation, clipping, or skipping of non-finite updates is configured.
    """
    findings = []
    steps = settings.gradient_accumulation_steps
    if steps > 1:
        findings.append(
            f"gradient_accumulation_steps is {steps}, but in manual optimisation training_step "
            "decides when to step; pass gradient_accumulation_steps=1. (The value may come from "
            "the launcher, by ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or from a ready Accelerator.)"
        )
    if settings.non_finite == "skip":
        findings.append(
            "non_finite is 'skip', but in manual optimisation training_step decides about updates: "
            "check the loss there, or leave non_finite at 'stop'."
        )
    limits = ("max_grad_norm", "max_grad_value")
    findings += [f"{name} is set. {_CLIP}" for name in limits if getattr(settings, name)]
    if findings:
        raise ValueError("\n".join(findings))


def _resume_message(run: FitRun, chosen: Path) -> str:
    """Return the message of a resumed run: where it resumes, or why nothing is left to do."""
    counters = run.counters
    text = f"Resuming from {chosen} (epoch {counters.epoch + 1}, update {counters.global_step})."
    if run.plan.length.reached(run.progress):
        return f"{text} Nothing is left to do: the length that the Trainer was given is reached."
    if run.stopping.now:
        return (
            f"{text} Nothing is left to do: the run had decided to stop there. To train further, "
            "pass the checkpoint's path as ckpt_path."
        )
    return text


def prepare_evaluation(
    context: RunContext,
    stage: str,
    module: TrainModule,
    hooks: HookTable,
    dataloaders: Any,
    datamodule: Any,
    ckpt_path: Any,
    counters: Counters,
) -> tuple[Run, list[EpochIterator]]:
    """Create the `Run` of validate, test or predict, and its epoch iterators; collective.

    Args:
        context: What the run is made of.
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
    chosen = context.choose(ckpt_path)
    if chosen is not None:
        load_datamodule(datamodule, chosen)
    loaders = on_all(lambda: loaders_for(stage, dataloaders, module, datamodule), stage)
    epoch_iterators = make_epoch_iterators(
        stage,
        loaders,
        context.settings,
        context.accelerator,
        seed=0,
        may_be_empty=context.may_be_empty,
    )
    check_step(stage, module, epoch_iterators)
    engine = choose_engine(context.accelerator.engine.options)

    def start() -> None:
        _convert(context, module)
        check_same_model(module, engine)
        engine.start(module, None)  # initial weights may differ between ranks

    if engine.is_model_parallel:  # which the saved weights are not
        start()
    if chosen is not None:
        own = engine if engine.is_model_parallel else None
        manifest = on_all(partial(load_weights, module, chosen, own), stage)
        counters = Counters(global_step=manifest["step"], epoch=manifest["epoch"])
    if not engine.is_model_parallel:
        start()
    recorder = context.project.make_recorder(evaluates=True)
    run = Run(**_common(context, module, datamodule, hooks, recorder, engine), counters=counters)
    with _finished_on_error(recorder):
        on_main(lambda: recorder.start(context.settings.describe()))
    return run, epoch_iterators


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
    context: RunContext,
    module: TrainModule,
    datamodule: Any,
    hooks: HookTable,
    recorder: Recorder,
    engine: Engine,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `Run`, which a fit and an evaluation have in common."""
    accelerator = context.accelerator
    metrics = MetricStore(
        accelerator.device,
        world_size=accelerator.num_processes,
        counts=engine.parallel.is_log_primary,
        quiet_training=quiet,
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
        "dp_size": engine.parallel.dp_size,
        "dp_rank": engine.parallel.dp_rank,
        "engine": engine,
    }
