"""The lifecycle of an entry point: set-up before fit, validate, test or predict, then teardown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from callbacks import Callback
from trackers.base import Status
from trainer.datamodule import DataModule
from trainer.distributed.control import on_all
from trainer.errors import CheckpointError, Preempted
from trainer.hooks import HookTable
from trainer.loops.arguments import check_callbacks, make_way
from trainer.loops.loaders import call_if_there
from trainer.module import TrainModule
from trainer.ported.signatures import without_batch_idx
from trainer.state import PartialState

logger = logging.getLogger(__name__)


@contextmanager
def stage_of(
    name: str,
    trainer: Any,
    module: TrainModule,
    datamodule: Any,
    callbacks: list[Callback],
    *,
    added: list[Callback],
    check: Callable[..., None],
    finish: Callable[[Status, BaseException | None], None],
) -> Iterator[HookTable]:
    """Set up the module, the datamodule and the callbacks; tear them down on exit or error.

    Args:
        name: The stage: fit, validate, test or predict.
        trainer: Passed to the hooks.
        module: The user's module.
        datamodule: The user's datamodule, or None.
        callbacks: The callbacks in the order of calls. Extended by those that `setup` hooks add,
            and sorted so that those that save run last.
        added: Callbacks that `setup` hooks have added in earlier stages; extended in place.
        check: See `check_hooks`; called for the callbacks that `setup` hooks add.
        finish: Called last in every case, with the status and the error, if any.

    Yields:
        The hooks of the module and the callbacks.
    """
    hooks = HookTable(trainer, module, callbacks, TrainModule)
    status: Status = "finished"
    cause: BaseException | None = None
    with _belonging_to(trainer, module, datamodule):
        try:
            _set_up(name, trainer, module, datamodule, callbacks, added, check)
            _tell_of_trainer(trainer, module)
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
                _tell_of_another(other, name)
            if failure is not None:
                raise failure


def _tell_of_another(error: BaseException, name: str) -> None:
    """Log a teardown error that is not raised, because another error is."""
    if isinstance(error, CheckpointError):  # no traceback: the message says all
        logger.error("The teardown after %s failed, too: %s", name, error)
    else:
        logger.error("The teardown after %s failed.", name, exc_info=error)


@contextmanager
def _belonging_to(trainer: Any, module: TrainModule, datamodule: Any) -> Iterator[None]:
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
    _tell_of_trainer(trainer, module)
    if owns_data:
        datamodule.trainer = trainer
    try:
        yield
    finally:
        _tell_of_trainer(None, module)
        for part, trainer_before in outer.items():
            part.__dict__["_trainer"] = trainer_before
        for step in steps:
            module.__dict__.pop(step, None)
        if owns_data:
            datamodule.trainer = outer_of_data
        if outer[module] is None:
            TrainModule.untoggle_optimizer(module)  # a step may have failed while one was toggled


def _tell_of_trainer(trainer: Any, module: TrainModule) -> None:
    """Set the trainer of a module and of the `TrainModule`s inside it."""
    for part in module.modules():
        if isinstance(part, TrainModule):
            part.__dict__["_trainer"] = trainer


def _set_up(
    name: str,
    trainer: Any,
    module: TrainModule,
    datamodule: Any,
    callbacks: list[Callback],
    added: list[Callback],
    check: Callable[..., None],
) -> None:
    given, done = set(map(id, callbacks)), set[int]()
    earlier = {one.state_key for one in added if id(one) in given}
    with PartialState().local_main_process_first():
        call_if_there(datamodule, "prepare_data")
        module.prepare_data()

    def next_callback() -> Callback | None:
        """Return the next callback to set up, or None.

        A callback that `setup` adds again is dropped if an earlier stage has added the same.
        """
        # `setup` may append the same object in every stage.
        callbacks[:] = {id(each): each for each in callbacks}.values()
        new = [each for each in callbacks if id(each) not in given]
        for one in [each for each in new if getattr(each, "state_key", None) in earlier]:
            callbacks[:] = [each for each in callbacks if each is not one]
            if PartialState().is_main_process:
                logger.warning(
                    "setup has added another %s (%s) for %s: the one that it added for an earlier "
                    "stage is used. Add it in one stage only, if stage == 'fit'.",
                    type(one).__name__,
                    one.state_key,
                    name,
                )
        make_way(callbacks)
        check_callbacks(callbacks)
        return next((each for each in callbacks if id(each) not in done), None)

    def set_up_callbacks() -> None:
        """Set up the callbacks not set up yet; each may add others, at any position."""
        while (callback := next_callback()) is not None:
            done.add(id(callback))
            if id(callback) not in given:
                added.append(callback)
                check(None, [callback], None)
            callback.setup(trainer, module, name)

    def hooks() -> None:
        call_if_there(datamodule, "setup", name)
        set_up_callbacks()
        module.setup(name)
        set_up_callbacks()  # the callbacks that the module's setup has added
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
