"""Device transfer: the user's transfer hooks and the copy to the device, one batch ahead.

Without user hooks the copy runs on a side stream, so that it overlaps with the computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trainer.data.epoch_iterator import EpochIterator, GlobalBatch
from trainer.data.prefetch import InFlight, send, streams_for
from trainer.data.seeding import group_equal, isolated_generators, module_generators
from trainer.datamodule import DataModule
from trainer.distributed import guards
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.transport import HostCopy
from trainer.errors import module_logger
from trainer.hooks import is_overridden
from trainer.module import TrainModule
from trainer.rng import isolated_rng, mix
from trainer.state import GradientState
from trainer.tree import detach, map_tree, to_host

logger = module_logger(__name__)

_HERE = "a hook of a batch's transfer or count_items"
_INSTEAD = "a step, on_train_step_end or a hook of an epoch's end"
_DRAWS_BY_HOOKS = 4  # mixed into the hooks' seeds, so that they differ from the shuffle seeds


class DeviceTransfer:
    """Device transfer of the batches of a run.

    Args:
        module: The user's module.
        datamodule: The user's datamodule, or None.
        device: The device that batches are moved to.
        rank: The rank of this process.
        world_size: The number of processes.
        dtype: What floating-point tensors are converted to; None leaves them as they are.

    Attributes:
        counts_items: Whether the module overrides `count_items`; otherwise items are samples.
        may_lack_items: Whether this rank may have a batch without items while other ranks have
            items.
    """

    def __init__(
        self,
        module: TrainModule,
        datamodule: Any,
        *,
        device: torch.device,
        rank: int,
        world_size: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._module, self._datamodule, self._device = module, datamodule, device
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._equal_generators = group_equal(module_generators(module, datamodule))
        self.counts_items = counts_items(module)
        self.may_lack_items = self.counts_items and world_size > 1

        def own(name: str) -> Callable[..., Any] | None:
            return _batch_hook(name, module, datamodule)

        moves = own("transfer_batch_to_device")
        self._before, self._after = own("on_before_batch_transfer"), own("on_after_batch_transfer")
        no_hooks = moves is None and self._before is None and self._after is None
        self._runs_users_code = self.counts_items or not no_hooks
        if moves is None and device.type != "cpu":
            moves = module.transfer_batch_to_device
        self._moves = moves
        # The user's hooks must run on the default compute stream, as they expect.
        self._streams = streams_for(device) if no_hooks else None

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, and convert its floating-point tensors."""
        if self._moves is not None:
            batch = self._moves(batch, self._device, dataloader_idx)
        return batch if self._dtype is None else map_tree(partial(_as_dtype, self._dtype), batch)

    def global_batches(
        self,
        epoch_iterator: EpochIterator,
        dataloader_idx: int = 0,
        *,
        counted: bool = True,
        keeps_latest: bool = False,
    ) -> Generator[GlobalBatch, None, None]:
        """Yield an epoch's global batches on the device; see `EpochIterator.global_batches`.

        Args:
            epoch_iterator: The epoch iterator.
            dataloader_idx: The index of its loader among several, passed to the hooks.
            counted: Whether each batch is paired with its number of items, for `items_of`.
            keeps_latest: Whether any batch may become the dummy batch, not only the last one.
        """
        if epoch_iterator.weighted_by_samples is None:
            epoch_iterator.weighted_by_samples = counted and not self.counts_items
        transfer = self.transfer(epoch_iterator, dataloader_idx, counted=counted)
        global_batches = epoch_iterator.global_batches(
            self._without_collectives(epoch_iterator, transfer)
        )
        if self._streams is not None:
            global_batches = self._with_arrived_batches(global_batches)
        if epoch_iterator.world_size == 1:
            return global_batches
        return self._with_dummy_batches(
            epoch_iterator, global_batches, dataloader_idx, counted=counted, keeps=keeps_latest
        )

    def _with_arrived_batches(
        self, global_batches: Generator[GlobalBatch, None, None]
    ) -> Generator[GlobalBatch, None, None]:
        with closing(global_batches):
            for current in global_batches:
                if current.present:
                    current.batch = self.hand_over(current.batch)
                yield current

    def _with_dummy_batches(
        self,
        epoch_iterator: EpochIterator,
        global_batches: Generator[GlobalBatch, None, None],
        dataloader_idx: int,
        *,
        counted: bool,
        keeps: bool,
    ) -> Generator[GlobalBatch, None, None]:
        """Give a rank without a batch a dummy batch: its latest, or another rank's."""
        latest: Any = None
        gradient_state, is_stream = GradientState(), epoch_iterator.sampler is None
        with closing(global_batches), gradient_state._incomplete_batches():
            for number, current in enumerate(global_batches):
                whole = current.batches == self._world_size or epoch_iterator.presharded
                gradient_state._set_batches(None if whole else current.batches)
                if number == 0:
                    epoch_iterator.check_same_order()
                if number == 0 and current.batches < self._world_size:
                    batch = current.batch[0] if current.present and counted else current.batch
                    source = all_gather_object(current.present).index(True)
                    sent = broadcast_object(to_host(batch), from_process=source)
                    latest = self.move(sent, dataloader_idx)
                # The previous batch is the latest until this one has been run.
                epoch_iterator.dummy_batch = latest
                if not current.present:
                    current.batch = latest
                elif keeps or current.next_missing or (current.last and is_stream):
                    # Copy the containers, since the step may replace tensors in the batch.
                    latest = detach(current.batch[0] if counted else current.batch)
                yield current
                epoch_iterator.dummy_batch = latest

    def _without_collectives(
        self, epoch_iterator: EpochIterator, transfer: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Wrap `transfer` to forbid collectives in it when some ranks have no batch."""
        if epoch_iterator.world_size == 1 or not self._runs_users_code:
            return transfer

        def guarded(batch: Any) -> Any:
            if epoch_iterator.batches_read == epoch_iterator.world_size:
                return transfer(batch)
            with guards.forbid_collectives(
                missing_batch_error(epoch_iterator, epoch_iterator.batches_read, _HERE, _INSTEAD)
            ):
                return transfer(batch)

        return guarded

    def hand_over(self, batch: InFlight) -> Any:
        """Make the compute stream wait for a copied batch; see `InFlight.arrive`."""
        return batch.arrive()

    def transfer(
        self, epoch_iterator: EpochIterator, dataloader_idx: int, *, counted: bool
    ) -> Callable[[Any], Any]:
        """Return the function that is called with each batch, one batch ahead of its use.

        Args:
            epoch_iterator: The epoch iterator.
            dataloader_idx: The index of its loader among several, passed to the hooks.
            counted: Whether the function returns (batch, items reader) or the batch alone.
        """
        change = self._transform(epoch_iterator, dataloader_idx)
        if not counted:
            return self._on_side_stream(change)
        if not self.counts_items:
            if change is _unchanged:
                return _uncounted
            return self._on_side_stream(lambda batch: (change(batch), None))

        def transfer(batch: Any) -> Any:
            batch = change(batch)
            return batch, _start_reading(self._module.count_items(batch))

        # `count_items` runs on the side stream, right after the copy: run later, its result would
        # make the host wait. It may read tensors that the previous step writes, such as a buffer,
        # so the side stream first waits for the compute stream.
        return self._on_side_stream(transfer, follow=True)

    def _on_side_stream(
        self, move: Callable[[Any], Any], *, follow: bool = False
    ) -> Callable[[Any], Any]:
        """Return `move` wrapped to run on the side stream, if there is one.

        `hand_over` then makes its results available to the compute stream.
        """
        if self._streams is None:
            return move
        return partial(send, move=move, streams=self._streams, follow=follow)

    def _transform(
        self, epoch_iterator: EpochIterator, dataloader_idx: int
    ) -> Callable[[Any], Any]:
        """Return the function that applies the user's hooks and moves a batch to the device.

        Random numbers in the hooks are seeded from the batch's number, like those of the dataset.
        If the hooks used the training's RNG, a resumed run would draw different numbers, because it
        prefetches a batch again that the interrupted run had already prefetched.
        """
        if self._before is None and self._after is None:
            if self._moves is None and self._dtype is None:
                return _unchanged
            return lambda batch: self.move(batch, dataloader_idx)
        numbers = count(epoch_iterator.first_position + self._rank, self._world_size)
        generators = module_generators(self._module, self._datamodule)

        def change(batch: Any) -> Any:
            seed = mix(epoch_iterator.seed, epoch_iterator.epoch, _DRAWS_BY_HOOKS, next(numbers))
            with (
                isolated_rng(seed),
                isolated_generators(generators, mix(seed, 1), self._equal_generators),
            ):
                batch = _call_batch_hook(self._before, batch, dataloader_idx)
                return _call_batch_hook(
                    self._after, self.move(batch, dataloader_idx), dataloader_idx
                )

        return change


def counts_items(module: TrainModule) -> bool:
    """Return whether the module overrides `count_items`."""
    return is_overridden(module, "count_items", TrainModule)


def _batch_hook(name: str, module: TrainModule, datamodule: Any) -> Callable[..., Any] | None:
    """Return the datamodule's override of a hook, else the module's override, else None."""
    bases = ((datamodule, DataModule), (module, TrainModule))
    owners = [owner for owner, base in bases if is_overridden(owner, name, base)]
    if len(owners) > 1:
        logger.warning("%s of the datamodule is used, not that of the module.", name)
    return getattr(owners[0], name) if owners else None


def _unchanged(batch: Any) -> Any:
    return batch


def _as_dtype(dtype: torch.dtype, leaf: Any) -> Any:
    floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if floats else leaf


def _uncounted(batch: Any) -> Any:
    return batch, None


def _call_batch_hook(hook: Callable[..., Any] | None, batch: Any, dataloader_idx: int) -> Any:
    """Return the result of a batch hook; the batch itself if there is no hook."""
    if hook is None:
        return batch
    changed = hook(batch, dataloader_idx)
    if changed is None:
        name = getattr(hook, "__name__", "A batch hook")
        raise TypeError(f"{name} returned None; it must return the batch.")
    return changed


def items_of(current: GlobalBatch) -> tuple[Any, float]:
    """Return this rank's batch of a training global batch, and its number of items.

    In training, `GlobalBatch.batch` is a pair: the batch, and a function that reads the result of
    `count_items`, or None. On a rank without a batch it is only the dummy batch, with 0.0 items.
    """
    if not current.present:
        return current.batch, 0.0
    batch, read = current.batch
    return batch, float(current.samples) if read is None else read()


def _start_reading(count: float | Tensor) -> Callable[[], float]:
    """Start copying a number from the device to the host; return a function that reads it.

    The copy starts one batch ahead, so that reading does not wait for the device.

    Args:
        count: What `count_items` returned: a number, or a tensor of one element on any device.

    Raises:
        ValueError: It is a tensor of several elements, or negative or not finite (when read).
        TypeError: It is not a number.
    """
    if not isinstance(count, Tensor):
        return lambda: _valid_items(count)
    if count.numel() != 1:
        raise ValueError(
            f"count_items returned a tensor of shape {tuple(count.shape)}; it must be one number, "
            "for example its .sum()."
        )
    if count.device.type == "cpu":
        return lambda: _valid_items(float(count))
    copied = HostCopy(count)
    return lambda: _valid_items(float(copied.read()))


def _valid_items(items: Any) -> float:
    number = float(items) if hasattr(items, "__float__") else None
    if number is not None and 0 <= number < math.inf:
        return number
    raise (TypeError if number is None else ValueError)(
        f"count_items returned {items!r}; it must be the number of items that the loss is a mean "
        "over: 0 or more, and finite."
    )


# In the last global batch of an epoch, some ranks may have no batch. They skip its hooks, so a
# collective in such a hook would hang. It raises an error instead.

HOOK_OF_BATCH = "a hook of a batch"
ALL_COME = "training_step or on_train_step_end"  # all ranks call these
WITHOUT_ITEMS = (
    "is called in a hook of the backward pass, which does not run on a process whose batch has "
    f"no items (see count_items). Call it in {ALL_COME}."
)


def missing_batch_error(
    epoch_iterator: EpochIterator, batches: int, where: str, instead: str = ALL_COME
) -> str:
    """Return the error message for collectives in a global batch that some ranks lack.

    Args:
        epoch_iterator: The epoch iterator.
        batches: How many ranks have a batch.
        where: The user's code that runs on the batch, such as "a hook of a batch".
        instead: A hook that all ranks call, where a collective is allowed.
    """
    fit = f"a multiple of {epoch_iterator.world_size} within the data"
    if epoch_iterator.limited_by == "fast_dev_run":  # it limits the batches of each rank
        fit = "at most the number of batches of each process"
    lacking = "rank " + ", ".join(map(str, range(batches, epoch_iterator.world_size)))
    if epoch_iterator.presharded:  # any rank may lack a batch
        lacking = f"{epoch_iterator.world_size - batches} of {epoch_iterator.world_size} ranks"
    return (
        f"is called in {where}, but {lacking} has no batch at this point and does not call it: "
        f"the batches do not divide evenly among the processes. Set {epoch_iterator.limited_by} "
        f"to {fit}, or call it where all processes are, such as {instead}."
    )


class NoCollectives:
    """Proxy of an object in whose methods collectives are forbidden: they raise.

    Args:
        target: The object whose methods are called.
        why: The error message; see `missing_batch_error`.
    """

    def __init__(self, target: Any, why: str) -> None:
        self._target, self._why = target, why

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def guarded(*arguments: Any) -> Any:
            with guards.forbid_collectives(self._why):
                return method(*arguments)

        return guarded


def batch_hooks(hooks: Any, phase: str, epoch_iterator: EpochIterator, current: GlobalBatch) -> Any:
    """Return the hooks for a batch of an evaluation; they forbid collectives if some ranks lack it.

    Args:
        hooks: The hooks of the run.
        phase: ``"validation"``, ``"test"`` or ``"predict"``.
        epoch_iterator: The epoch iterator.
        current: The global batch.
    """
    if current.batches == epoch_iterator.world_size:
        return hooks
    instead = f"{phase}_step or on_{phase}_epoch_end"
    return NoCollectives(
        hooks, missing_batch_error(epoch_iterator, current.batches, HOOK_OF_BATCH, instead)
    )
