"""The random generators of a fit: the global ones, and those that its module keeps for itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer.data.own_generators import Found, held_by, load_states, states_of
from trainer.module import TrainModule
from trainer.rng import load_rng_state, rng_state

if TYPE_CHECKING:  # a run has a `Mover`, which asks here
    from trainer.loops.run import FitRun

logger = logging.getLogger(__name__)


def kept_by(module: TrainModule, datamodule: Any = None) -> Found:
    """The generators that a module and a datamodule keep; not those of the Trainer around them."""
    return held_by((module.__dict__.get("_trainer"),), module=module, datamodule=datamodule)


def generators_of(run: FitRun) -> dict[str, Any]:
    """Where they all stand, as a tree to be saved."""
    return rng_state() | {"own": states_of(_of_module(run))}


def load_generators(run: FitRun, state: dict[str, Any]) -> list[str]:
    """Put them back to what `generators_of` returned.

    Returns:
        Where the module had some that are not there now.
    """
    load_rng_state(state)
    # A process that the run did not have before has nothing of its own to go on with.
    return load_states(_of_module(run), state.get("own", {}))


def restore_generators(run: FitRun, state: dict[str, Any]) -> None:
    """As `load_generators`, from a checkpoint; what is not there is told in the log."""
    if missing := load_generators(run, state):
        logger.warning(
            "%s had random generators when the checkpoint was saved (%s) that it does not have "
            "now; those that it makes later begin anew. Make them in __init__ or configure_model.",
            type(run.module).__name__,
            ", ".join(missing),
        )


def _of_module(run: FitRun) -> Found:
    """Without those that the training data are drawn from, which are seeded for each epoch."""
    of_data = set(map(id, run.feed.users_generators.values()))
    return {path: each for path, each in kept_by(run.module).items() if id(each) not in of_data}
