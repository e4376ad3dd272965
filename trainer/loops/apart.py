"""Rounds in which only some processes have a batch: there its hooks and its step run apart."""

from __future__ import annotations

from typing import Any

from trainer.data.rounds import Round
from trainer.distributed import meeting
from trainer.loops.run import Run

TRAINING = {"limit": "limit_train_batches", "instead": "on_train_step_end"}  # for `reason`


def reason(run: Run, current: Round, where: str, *, limit: str, instead: str) -> str:
    """Return why collectives are refused in a round in which not all processes have a batch.

    Args:
        run: The run.
        current: The round.
        where: What runs on the batch.
        limit: The argument of the `Trainer` that limits such batches.
        instead: A hook that all processes call.
    """
    lacking = ", ".join(map(str, range(current.batches, run.world_size)))
    return (
        f"is called in {where}, but rank {lacking} has no batch in this round and does not call "
        "it: the batches do not divide evenly among the processes. Set "
        f"{limit} to a multiple of {run.world_size} that the data have, or call it where all "
        f"processes come, such as {instead}."
    )


class Apart:
    """Calls an object's methods; collectives, which others do not come to, raise in them.

    Args:
        target: The object.
        why: See `reason`.
    """

    def __init__(self, target: Any, why: str) -> None:
        self._target, self._why = target, why

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def apart(*arguments: Any) -> Any:
            with meeting.unaccompanied(self._why):
                return method(*arguments)

        return apart
