"""The no-collectives guard: collectives are forbidden where only some ranks have a batch.

In the last global batch of an epoch some ranks may have no batch. They skip the batch's hooks and
step, so a collective there would hang. It raises an error instead.
"""

from __future__ import annotations

from typing import Any

from trainer.data.epoch_iterator import EpochIterator
from trainer.distributed import guards

ALL_COME = "on_train_step_end"  # the hook of training that all ranks call
WITHOUT_ITEMS = (
    "is called in a hook of the backward pass, which a process whose batch has no items (see "
    f"count_items) does not call. Call it in training_step or {ALL_COME}."
)


def reason(epoch_iterator: EpochIterator, batches: int, where: str, instead: str = ALL_COME) -> str:
    """Return the error message for collectives in a global batch that some ranks lack.

    Args:
        epoch_iterator: The epoch iterator.
        batches: How many ranks have a batch.
        where: The user's code that runs on the batch, such as "training_step".
        instead: A hook that all ranks call, where a collective is allowed.
    """
    fit = f"a multiple of {epoch_iterator.world_size} that the data have"
    if epoch_iterator.limited_by == "fast_dev_run":  # it limits the batches of each rank
        fit = "no more batches than the data have for each process"
    lacking = ", ".join(map(str, range(batches, epoch_iterator.world_size)))
    return (
        f"is called in {where}, but rank {lacking} has no batch at this point and does not call "
        "it: the batches do not divide evenly among the processes. Set "
        f"{epoch_iterator.limited_by} to {fit}, or call it where all processes come, such as "
        f"{instead}."
    )


class NoCollectives:
    """Proxy of an object in whose methods collectives are forbidden: they raise.

    Args:
        target: The object whose methods are called.
        why: The error message; see `reason`.
    """

    def __init__(self, target: Any, why: str) -> None:
        self._target, self._why = target, why

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def guarded(*arguments: Any) -> Any:
            with guards.forbid_collectives(self._why):
                return method(*arguments)

        return guarded
