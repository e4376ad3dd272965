"""Rounds in which only some processes have a batch: there its hooks and its step run apart."""

from __future__ import annotations

from typing import Any

from trainer.data.feed import Feed
from trainer.distributed import meeting

ALL_COME = "on_train_step_end"  # of training
WITHOUT_ITEMS = (
    "is called in a hook of the backward pass, which a process whose batch has no items (see "
    f"count_items) does not call. Call it in training_step or {ALL_COME}."
)


def reason(feed: Feed, batches: int, where: str, instead: str = ALL_COME) -> str:
    """Return why collectives are refused in a round in which not all processes have a batch.

    Args:
        feed: The data.
        batches: How many processes have a batch.
        where: What runs on the batch.
        instead: A hook that all processes call.
    """
    fit = f"a multiple of {feed.world_size} that the data have"
    if feed.limited_by == "fast_dev_run":  # which counts the batches of each process
        fit = "no more batches than the data have for each process"
    lacking = ", ".join(map(str, range(batches, feed.world_size)))
    return (
        f"is called in {where}, but rank {lacking} has no batch in this round and does not call "
        "it: the batches do not divide evenly among the processes. Set "
        f"{feed.limited_by} to {fit}, or call it where all processes come, such as {instead}."
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
