"""The random generators of a fit: the global ones, and those that its module keeps for itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer.data.own_generators import held_by, load_states, states_of
from trainer.module import TrainModule
from trainer.rng import load_rng_state, rng_state

if TYPE_CHECKING:  # a run has a `Mover`, which asks here
    from trainer.loops.run import FitRun

logger = logging.getLogger(__name__)


def kept_by(module: TrainModule, datamodule: Any = None) -> list[Any]:
    """The generators that a module and a datamodule keep; not those of the Trainer around them."""
    return held_by((module, datamodule), besides=(module.__dict__.get("_trainer"),))


def generators_of(run: FitRun) -> dict[str, Any]:
    """Where they all stand, as a tree to be saved."""
    return rng_state() | {"own": states_of(_of_module(run))}


def load_generators(run: FitRun, state: dict[str, Any]) -> None:
    """Put them back to what `generators_of` returned.

    The module's are known by their order and kinds. Others than were saved are left as they are,
    which the log tells.
    """
    load_rng_state(state)
    saved = state.get("own")  # not there for a process that the run did not have before
    if saved is not None and not load_states(_of_module(run), saved):
        logger.warning(
            "%s keeps other random generators than it did when the checkpoint was saved; they "
            "begin as they were made. Make them in __init__ or configure_model.",
            type(run.module).__name__,
        )


def _of_module(run: FitRun) -> list[Any]:
    """Without those that loaders draw from, too: these are seeded when an epoch begins."""
    feeds = {id(each) for feed in (run.feed, *run.val_feeds) for each in feed.users_generators}
    return [each for each in kept_by(run.module) if id(each) not in feeds]
