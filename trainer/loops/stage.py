"""What surrounds every entry point: set-up before, tear-down after, also after an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from callbacks import Callback
from trackers.base import Status
from trainer.datamodule import DataModule
from trainer.errors import Preempted
from trainer.hooks import HookTable
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
    callbacks: Sequence[Callback],
    *,
    finish: Callable[[Status, BaseException | None], None],
) -> Iterator[HookTable]:
    """Inside, the module belongs to the trainer and is set up.

    Args:
        name: fit, validate, test or predict.
        trainer: For the hooks.
        module: The user's.
        datamodule: Or None.
        callbacks: In the order in which they are called.
        finish: Called last, whatever happened, with how it ended, and by which error.
    """
    hooks = HookTable(trainer, module, callbacks, TrainModule)
    steps = without_batch_idx(module)
    # Another Trainer's, if one of its hooks called this one: the module goes on there.
    owns_data = isinstance(datamodule, DataModule)
    outer = module.__dict__.get("_trainer"), datamodule.trainer if owns_data else None
    module.__dict__.update(steps, _trainer=trainer)
    if owns_data:
        datamodule.trainer = trainer
    status: Status = "finished"
    cause: BaseException | None = None
    try:
        with PartialState().local_main_process_first():
            call_if_there(datamodule, "prepare_data")
            module.prepare_data()
        call_if_there(datamodule, "setup", name)
        for callback in callbacks:
            callback.setup(trainer, module, name)
        module.setup(name)
        module.configure_model()
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
            *(partial(callback.teardown, trainer, module, name) for callback in callbacks),
            partial(module.teardown, name),
        ]
        errors = _errors_of(tear_down)
        cause = cause or next(iter(errors), None)
        errors += _errors_of([partial(finish, "failed" if errors else status, cause)])
        module.__dict__["_trainer"] = outer[0]
        for step in steps:
            module.__dict__.pop(step, None)
        if owns_data:
            datamodule.trainer = outer[1]
        # Where the run has failed something is on its way up already.
        failure = errors.pop(0) if errors and status == "finished" else None
        for other in errors:
            logger.error("Tearing down after %s failed.", name, exc_info=other)
        if failure is not None:
            raise failure


def _errors_of(calls: Sequence[Callable[[], Any]]) -> list[BaseException]:
    """Make every call, whatever the others raise: after a KeyboardInterrupt too the run is over."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised or logged by the caller
            errors.append(error)
    return errors
