"""RNG states of a fit: the global generators, and generators that the module's attributes hold."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer.data.own_generators import Found, held_by, load_states, states_of
from trainer.module import TrainModule
from trainer.rng import load_rng_state, rng_state

if TYPE_CHECKING:  # `run` imports `moving`, which imports this module
    from trainer.loops.run import FitRun

logger = logging.getLogger(__name__)


def kept_by(module: TrainModule, datamodule: Any = None) -> Found:
    """Return the generators held by a module and a datamodule, without those of their Trainer."""
    return held_by((module.__dict__.get("_trainer"),), module=module, datamodule=datamodule)


def generators_of(run: FitRun) -> dict[str, Any]:
    """Return the states of all generators of a fit, as a tree that a checkpoint can hold."""
    return rng_state() | {"own": states_of(of_module(run))}


def load_generators(run: FitRun, state: dict[str, Any]) -> list[str]:
    """Restore the states that `generators_of` returned.

    Args:
        run: The fit.
        state: The states.

    Returns:
        The attribute paths where the module had a generator then, but has none of that kind now.
    """
    load_rng_state(state)
    # "own" is missing on a rank that the run did not have when it was saved.
    return load_states(of_module(run), state.get("own", {}))


def restore_generators(run: FitRun, state: dict[str, Any]) -> None:
    """Restore the RNG states of a checkpoint; warn of generators that the module no longer has."""
    if missing := load_generators(run, state):
        logger.warning(
            "%s had random generators when the checkpoint was saved (%s) that it does not have "
            "now; those that it creates later start with new states. Create them in __init__ or "
            "configure_model.",
            type(run.module).__name__,
            ", ".join(missing),
        )


def of_module(run: FitRun) -> Found:
    """Return the module's generators, without those that the data seed anew in each epoch."""
    of_data = set(map(id, run.feed.users_generators.values()))
    return {path: each for path, each in kept_by(run.module).items() if id(each) not in of_data}
