"""The life cycle of a stage: check, set up and tear down its module, datamodule and callbacks."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from callbacks import Callback, ModelCheckpoint
from trackers.base import Status
from trainer.accelerator import Accelerator
from trainer.checkpoint.resolve import CheckpointFolders
from trainer.checks import raise_findings
from trainer.datamodule import DataModule
from trainer.distributed.process_control import on_all
from trainer.errors import Preempted, module_logger
from trainer.hooks import (
    PARTS_OF_UPDATE,
    HookTable,
    call_if_there,
    check_signature,
    check_state_dict_methods,
    hook_typo,
    is_overridden,
    uncalled_hooks,
    warn_of_hook_typos,
    with_loader_number,
    without_batch_idx,
)
from trainer.loops.config import Length, Settings, check_callbacks, drop_replaced_defaults
from trainer.loops.dataloaders import STEPS
from trainer.loops.run_directory import Project
from trainer.module import TrainModule
from trainer.state import PartialState

logger = module_logger(__name__)

# Hooks whose signatures are checked if a module, a datamodule or a callback overrides them.
_HOOKS = (
    *("prepare_data", "setup", "teardown", "configure_model", "configure_optimizers"),
    *(name for name in vars(Callback) if name.startswith("on_")),
    *PARTS_OF_UPDATE,
)

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
        added: Callbacks that ``setup`` hooks have added; each stage calls these hooks again.
        may_be_empty: Whether loaders without a batch are skipped instead of raising an error.
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

    @cached_property
    def warns(self) -> bool:
        """Whether to print warnings about the set-up: on rank 0, and not in trials."""
        return self.trial_steps is None and self.accelerator.is_main_process

    @cached_property
    def length(self) -> Length:
        """When a fit ends.

        A trial ends earlier than its settings say. The settings keep the user's length, because
        schedulers depend on it.
        """
        if self.trial_steps is not None:
            return Length(max_steps=self.trial_steps)
        return self.settings.length

    @property
    def folders(self) -> CheckpointFolders:
        """The folders with checkpoints: the project's, and those of the present callbacks."""
        savers = [each for each in self.callbacks if isinstance(each, ModelCheckpoint)]
        return self.project.folders_with(
            [saver.root for saver in savers if saver.root is not None],
            [(saver.monitor, saver.mode) for saver in savers if saver.monitor is not None],
            [(saver.root, saver.mirror) for saver in savers if saver.mirror is not None],
        )


@dataclass(frozen=True)
class Stage:
    """The module, data and hooks of a fit, validate, test or predict, after set-up.

    Attributes:
        context: The Trainer's components.
        name: fit, validate, test or predict.
        module: The user's module.
        datamodule: The user's datamodule, or None.
        hooks: The hooks of the module and the callbacks.
    """

    context: RunContext
    name: str
    module: TrainModule
    datamodule: Any
    hooks: HookTable


def one_module(stage: str, module: Any, model: Any) -> TrainModule:
    """Return the module that a stage received under one of two argument names.

    Raises:
        TypeError: Both were given.
    """
    if module is not None and model is not None:
        raise TypeError(
            f"{stage} got both module= and model=, which have the same meaning: pass one."
        )
    chosen: TrainModule = module if model is None else model
    check_is_module(chosen, stage)
    return chosen


def check_module(module: Any, stage: str) -> None:
    """Check that a stage can run a module.

    Args:
        module: What the user passed as the module.
        stage: fit, validate, test or predict.

    Raises:
        TypeError: It is not a `TrainModule`, or lacks methods that the stage needs.
    """
    check_is_module(module, stage)
    raise_findings(_lacking(module, stage))


def check_is_module(module: Any, stage: str) -> None:
    """Check the type of a module.

    Args:
        module: What the user passed as the module.
        stage: fit, validate, test or predict.

    Raises:
        TypeError: It is not a `TrainModule`.
    """
    if isinstance(getattr(module, "_orig_mod", None), TrainModule):
        raise TypeError(
            f"{stage} got the result of torch.compile. Pass the original module; to compile its "
            "steps pass Trainer(dynamo_backend='inductor')."
        )
    if not isinstance(module, TrainModule):
        what = f"{reprlib.repr(module)} of type {type(module).__name__}"  # reprs of models are long
        if isinstance(module, type):
            what = f"the class {module.__name__}"
        raise TypeError(
            f"{stage} got {what}; it needs an instance of a subclass of trainer.TrainModule that "
            "defines its steps."
        )


def _lacking(module: TrainModule, stage: str) -> list[str]:
    """Return a sentence for each method that a stage needs and the module lacks."""
    return [
        f"{type(module).__name__} does not define {name}, which {stage} needs: "
        f"def {name}(self{', batch, batch_idx' if name.endswith('_step') else ''})."
        f"{hook_typo(module, name, TrainModule)}"
        for name in _needed(stage)
        if not _defines(module, name)
    ]


def _defines(module: TrainModule | None, name: str) -> bool:
    return is_overridden(module, name, TrainModule)


def _needed(stage: str) -> list[str]:
    """Return the names of the methods that a stage needs."""
    if stage == "fit":
        return ["training_step", "configure_optimizers"]
    return [] if stage == "predict" else [STEPS[stage][0]]


def steps_of(stage: str, module: TrainModule) -> list[str]:
    """Return the names of the steps that this stage calls."""
    names = ["training_step", "validation_step"] if stage == "fit" else [STEPS[stage][0]]
    return [n for n in names if n == "predict_step" or _defines(module, n)]


def check_hooks(
    context: RunContext,
    stage: str,
    module: TrainModule | None,
    callbacks: Iterable[Callback],
    datamodule: Any = None,
) -> None:
    """Check the signatures and names of the user's hooks, and warn of likely typos in names.

    All problems are reported in one error.

    Args:
        context: The Trainer's components.
        stage: fit, validate, test or predict.
        module: The user's module; None to check only callbacks that `setup` hooks have added.
        callbacks: The callbacks.
        datamodule: The user's datamodule, or None.

    Raises:
        TypeError: The module lacks a method that the stage needs, a hook or a step has a wrong
            signature, or a hook is one of another trainer, which nobody calls; the message says
            what to use.
    """
    findings: list[str] = []

    def find(check: Callable[..., object], *arguments: Any) -> None:
        try:
            check(*arguments)
        except TypeError as error:
            findings.append(str(error))

    # If they are missing, the error names a likely typo; validation_step is needed if there is
    # data.
    named = [n for n in (*_needed(stage), "validation_step") if not _defines(module, n)]
    owners: list[tuple[object, str, type]] = [(module, "module", TrainModule)]
    owners += [(callback, "callback", Callback) for callback in callbacks]
    owners += [(datamodule, "datamodule", DataModule)]
    for owner, kind, base in owners:
        if owner is None:
            continue
        findings += context.uncalled(owner, kind)
        for name in _HOOKS:
            if hasattr(base, name) and is_overridden(owner, name, base):
                hook = with_loader_number(getattr(owner, name))
                find(check_signature, hook, name, getattr(base, name))
        if context.warns:
            warn_of_hook_typos(owner, base, named)
    if module is not None:
        find(without_batch_idx, module)
        findings += _lacking(module, stage)
        if stage == "fit":
            find(check_state_dict_methods, module)
    raise_findings(findings)


@contextmanager
def warn_of_concurrent_runs() -> Iterator[None]:
    """Warn if another thread runs a Trainer, since both change process-wide settings of torch."""
    current = threading.current_thread()  # its hooks may run another Trainer
    _threads.append(current)
    if any(thread is not current and thread.is_alive() for thread in _threads):  # a fork has none
        logger.warning(
            "Another thread of this process runs a Trainer too. Both draw from the same random "
            "generators, so neither run can be repeated or resumed exactly: run each in its own "
            "process (n_jobs=1 in Optuna, backend='loky' in joblib)."
        )
    try:
        yield
    finally:
        _threads.remove(current)


@contextmanager
def stage_of(
    context: RunContext,
    name: str,
    module: TrainModule,
    datamodule: Any,
    *,
    finish: Callable[[Status, BaseException | None], None],
) -> Iterator[Stage]:
    """Set up the module, the datamodule and the callbacks; tear them down on exit or error.

    Args:
        context: The Trainer's components. Callbacks that ``setup`` hooks add are appended to its
            callbacks, which are sorted so that callbacks that save run last.
        name: The stage: fit, validate, test or predict.
        module: The user's module.
        datamodule: The user's datamodule, or None.
        finish: Called last in every case, with the status and the error, if any.

    Yields:
        The stage, with the hooks of the module and the callbacks.
    """
    trainer, callbacks = context.trainer, context.callbacks
    check_hooks(context, name, module, callbacks, datamodule)
    hooks = HookTable(trainer, module, callbacks, TrainModule)
    status: Status = "finished"
    cause: BaseException | None = None
    with _attached(trainer, module, datamodule):
        try:
            _set_up(context, name, module, datamodule)
            _attach_trainer(trainer, module)
            callbacks.sort(key=lambda callback: callback.runs_last)
            hooks = HookTable(trainer, module, callbacks, TrainModule)  # `setup` may add some
            yield Stage(context, name, module, datamodule, hooks)
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
                    partial(call_if_there, callback, "teardown", trainer, module, name)
                    for callback in callbacks
                ),
                partial(module.teardown, name),
            ]
            errors = _errors_of(tear_down)
            cause = cause or next(iter(errors), None)
            errors += _errors_of([partial(finish, "failed" if errors else status, cause)])
            # If the run failed, its error is already being raised.
            failure = errors.pop(0) if errors and status == "finished" else None
            for other in errors:
                logger.error("The teardown after %s failed.", name, exc_info=other)
            if failure is not None:
                raise failure


@contextmanager
def _attached(trainer: Any, module: TrainModule, datamodule: Any) -> Iterator[None]:
    """Set `trainer` on the module and the datamodule, and make every step accept `batch_idx`.

    On exit the earlier values are restored, since this may run in a hook of another Trainer.
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
    """Call the hooks of a set-up: ``prepare_data``, ``setup`` and ``configure_model``.

    `setup` may add callbacks at any position; these are set up too.
    """
    before, done = set(map(id, context.callbacks)), set[int]()
    earlier = {added.state_key for added in context.added if id(added) in before}
    with PartialState().local_main_process_first():
        call_if_there(datamodule, "prepare_data")
        module.prepare_data()

    def set_up_callbacks() -> None:
        while True:
            _drop_repeated(context.callbacks, before, earlier, name)
            drop_replaced_defaults(context.callbacks)
            check_callbacks(context.callbacks)
            callback = next((one for one in context.callbacks if id(one) not in done), None)
            if callback is None:
                return
            done.add(id(callback))
            if id(callback) not in before:
                context.added.append(callback)
                check_hooks(context, name, None, [callback])
            callback.setup(context.trainer, module, name)

    def call_hooks() -> None:
        call_if_there(datamodule, "setup", name)
        set_up_callbacks()
        module.setup(name)
        set_up_callbacks()
        with context.accelerator.precision.new_tensors():
            module.configure_model()
        set_up_callbacks()

    on_all(call_hooks, name)


def _drop_repeated(
    callbacks: list[Callback], before: set[int], earlier: set[str], stage: str
) -> None:
    """Drop callbacks that `setup` has added again: the same object, or one with the same state key.

    The callback added in an earlier stage stays.

    Args:
        callbacks: The callbacks, changed in place.
        before: The ids of the callbacks before this stage.
        earlier: The state keys of callbacks that earlier stages have added.
        stage: This stage.
    """
    for callback in {id(one): one for one in callbacks}.values():
        if id(callback) not in before and getattr(callback, "state_key", None) in earlier:
            callbacks[:] = [one for one in callbacks if one is not callback]
            if PartialState().is_main_process:
                logger.warning(
                    "setup added another %s (%s) for %s; the first one, added for an earlier "
                    "stage, is used. Add it in one stage only, as in if stage == 'fit'.",
                    type(callback).__name__,
                    callback.state_key,
                    stage,
                )
    callbacks[:] = {id(one): one for one in callbacks}.values()


def _errors_of(calls: Sequence[Callable[[], Any]]) -> list[BaseException]:
    """Make every call even if others raise, including KeyboardInterrupt; return the errors."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised or logged by the caller
            errors.append(error)
    return errors
