"""Several processes with a copy each of a module whose graph is the same in every update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed import collectives
from trainer.distributed.agreement import Agreement, Tally
from trainer.strategies import communication
from trainer.strategies.buckets import fix_layout
from trainer.strategies.ddp import DataParallel, average_gradients_of
from trainer.strategies.zeros import add_zeros, give_nothing, sparse_weights


class StaticDataParallel(DataParallel):
    """`DataParallel` with ``static_graph=True``.

    DDP takes a gradient for complete when it has been added to as often as in the first update: not
    at all where the loss leaves the parameter out, several times where parts that are checkpointed
    with ``use_reentrant=True`` share it. But it would count the micro-batches of the first window
    as one, and a process without a batch has no graph to show.

    So the first update for which every process has a batch is averaged behind backward and counted
    here. Then DDP is given a backward pass that is alike, of zeros, as are the processes that have
    no batch later. Its forward pass is that of the ballot alone, at the end of a window.

    Args:
        module: The user's module, on its device.
        agreement: Told the sums over the processes.
        kwargs: Arguments of DDP.

    Attributes:
        graph: How often backward adds to each trained parameter, by name; empty until it is known.
            A resumed run is given that of the run before.

    Raises:
        ValueError: There is a communication hook that torch cannot run here, or an embedding with
            sparse gradients.
    """

    def __init__(
        self, module: nn.Module, agreement: Agreement, kwargs: DistributedDataParallelKwargs
    ) -> None:
        if sparse_weights(module):
            raise ValueError(
                "static_graph=True cannot be used with an embedding with sparse=True: torch's DDP "
                "fails where the loss leaves one out. Make it without sparse=True, or leave out "
                "static_graph."
            )
        # A static graph shows by itself which parameters are not used.
        kwargs = replace(kwargs, find_unused_parameters=False)
        communication.check(module, kwargs)  # it is registered later
        self.graph: dict[str, int] = {}
        self._sends_buffers = kwargs.broadcast_buffers
        self._is_first = False  # micro-batch of its window; in the first window they are sent
        super().__init__(module, agreement, kwargs)

    def _names(self) -> list[str]:
        return [name for name, p in self.module.named_parameters() if p.requires_grad]

    def _wrap(self) -> None:
        self._told = set(self.graph) == set(self._names())
        self._seen: list[int] = []  # as `graph`, by this process alone
        self._held_to = False  # an update has been as the graph says
        if self._told:
            super()._wrap()
            self._ddp.broadcast_buffers = False  # behind the user's forward pass it would be late
            return
        self.graph = {}
        self._hook = None
        self._wrapped = {id(parameter) for parameter in self._trained()}
        collectives.broadcast([*self.module.parameters(), *self.module.buffers()])

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay the buckets out, and tell DDP the graph."""
        ballot_and_parameters = [1, *(self.graph[name] for name in reversed(self._names()))]
        fix_layout(self._ddp, order, ballot_and_parameters)

    def _backward_nothing(self, ride: Tensor, ballot: Tensor) -> None:
        """Backward through the ballot, and zero as often as a loss would add to each parameter."""
        add_zeros(self.module, self._trained(), [self.graph[name] for name in self._names()])
        torch.autograd.backward(ride, ballot)

    def begin_epoch(self) -> None:
        """Take up the graph of a run that is resumed; see `DataParallel.begin_epoch`."""
        trained = {id(parameter) for parameter in self._trained()}
        if trained != self._wrapped or (self.graph and not self._told):
            self._wrap()
        if self._told:
            super().begin_epoch()

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Say whether the coming backward ends its window, before the forward pass."""
        if self._is_first and self._sends_buffers:
            self.broadcast_buffers()
        self._is_first = sync
        if self._told:
            super().begin_micro_batch(sync=sync)

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by its name."""
        return getattr(self.module, name)(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch that does not end its window."""
        if self._told:
            super().backward(loss, *args, **kwargs)
        else:
            with _counted(self._trained()) as self._seen:
                super().backward(loss, *args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """See `DataParallel.finish_window`.

        Raises:
            RuntimeError: The loss does not add to the parameters as the graph says.
        """
        if not self._told:
            return self._learn(loss, own)
        if loss is None:
            return super().finish_window(loss, own)
        _, self._rides = self._ddp(None)
        if self._held_to:
            return super().finish_window(loss, own)
        with _counted(self._trained()) as times:
            items = super().finish_window(loss, own)
        self._check(times)
        return items

    def _learn(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """An update without DDP, which is told the graph as soon as each process has seen it."""
        if loss is not None:
            self.backward(loss)
        average_gradients_of(self._trained())
        total = self._agreement.ballot(own)
        dist.all_reduce(total)
        items = self._agreement.count(total)
        if not items:
            give_nothing(self.module)
        if all(collectives.all_gather_object(bool(self._seen))):
            self.graph = dict(zip(self._names(), self._seen, strict=True))
            kept = [] if self._sends_buffers else [(b, b.clone()) for b in self.module.buffers()]
            self.begin_epoch()
            for buffer, value in kept:  # DDP begins with rank 0's in any case
                buffer.data.copy_(value)
        return items

    def _check(self, times: list[int]) -> None:
        """Hold the first update to the graph: DDP does not notice what is added too often."""
        for name, found in zip(self._names(), times, strict=True):
            known = self.graph[name]
            if found != known:
                raise RuntimeError(
                    f"With static_graph=True backward must add to each parameter as often as in "
                    f"the run that is resumed, or in the first update. It has added {found} times "
                    f"to {name}, and did {known} times then. Let it be as it was, or leave out "
                    "static_graph."
                )
        self._held_to = True

    def _check_reduced(self) -> None:
        """See that DDP has not kept waiting for gradients that this loss does not have.

        Raises:
            RuntimeError: It has: nothing was averaged.
        """
        try:
            super()._check_reduced()
        except RuntimeError as error:
            raise RuntimeError(
                "With static_graph=True each loss must depend on the parameters that the first "
                "update's did, as often, and this one depends on fewer, or on some less often, so "
                "that the gradients could not be averaged. Pass Trainer(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)]) instead."
            ) from error.__cause__


@contextmanager
def _counted(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """How often backward adds to each parameter inside; the numbers grow as it does."""
    times = [0] * len(parameters)

    def count(index: int) -> None:
        times[index] += 1

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: count(index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
