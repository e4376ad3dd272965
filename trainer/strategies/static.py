"""Data-parallel engine for ``static_graph``: the autograd graph is the same in every update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.agreement import Agreement, Tally
from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import all_gather_object
from trainer.distributed.transport import sum_numbers
from trainer.names import bare_names
from trainer.strategies import communication
from trainer.strategies.averaging import average_gradients_of
from trainer.strategies.buckets import fix_layout
from trainer.strategies.ddp import DataParallel
from trainer.strategies.zeros import add_zeros, give_nothing, sparse_weights


class StaticDataParallel(DataParallel):
    """`DataParallel` with ``static_graph=True``.

    With a static graph, DDP considers a gradient complete when it has been accumulated as often as
    in the first update. That is zero times if the loss does not use the parameter, and several
    times if modules that are checkpointed with ``use_reentrant=True`` share it. Two cases do not
    fit: DDP would count all micro-batches of the first accumulation window as one graph, and a
    process without a batch has no graph.

    So this class counts the accumulations itself, in the first update in which every process has a
    batch, and averages the gradients of the updates until then after backward. DDP then learns the
    graph from an equivalent backward of zeros. Processes that have no batch later use the same
    backward of zeros as their dummy batch. DDP's own forward covers only the sync vector, at the
    end of a window.

    Args:
        module: The user's module, on its device.
        agreement: The step sync, which receives the sums over the processes.
        kwargs: Arguments of DDP.

    Attributes:
        graph: How often backward accumulates into each trained parameter, by name; empty until
            known. A resumed run takes it from the checkpoint.

    Raises:
        ValueError: torch cannot run the communication hook here, or an embedding has sparse
            gradients.
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
        # A static graph already says which parameters are unused.
        kwargs = replace(kwargs, find_unused_parameters=False)
        communication.check(module, kwargs)  # the hook is registered later
        self.graph: dict[str, int] = {}
        self._sends_buffers = kwargs.broadcast_buffers
        self._is_first = False  # whether the next micro-batch begins a window: broadcast buffers
        super().__init__(module, agreement, kwargs)

    def _names(self) -> list[str]:
        named = bare_names(self.module, self.module.named_parameters())
        return [name for name, p in named if p.requires_grad]

    def _wrap(self) -> None:
        self._told = set(self.graph) == set(self._names())
        self._seen: list[int] = []  # the counts of `graph`, as found by this process
        self._held_to = False  # whether an update has been compared with the graph
        if self._told:
            super()._wrap()
            # DDP's forward runs after the user's, so it would broadcast the buffers too late.
            self._ddp.broadcast_buffers = False
            return
        self.graph = {}
        self._hook = None
        self._wrapped = {id(parameter) for parameter in self._trained()}
        broadcast([*self.module.parameters(), *self.module.buffers()])

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay out DDP's buckets and teach DDP the static graph."""
        ballot_and_parameters = [1, *(self.graph[name] for name in reversed(self._names()))]
        fix_layout(self._ddp, order, ballot_and_parameters)

    def _backward_nothing(self, ride: Tensor, ballot: Tensor) -> None:
        """Accumulate zeros as often as the graph says, then run backward of the sync vector."""
        add_zeros(self.module, self._trained(), [self.graph[name] for name in self._names()])
        torch.autograd.backward(ride, ballot)

    def begin_epoch(self) -> None:
        """Take over the static graph of a resumed run; see `DataParallel.begin_epoch`."""
        trained = {id(parameter) for parameter in self._trained()}
        if trained != self._wrapped or (self.graph and not self._told):
            self._wrap()
        if self._told:
            super().begin_epoch()

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Set, before the forward pass, whether the next backward ends the accumulation window."""
        if self._is_first and self._sends_buffers:
            self.broadcast_buffers()
        self._is_first = sync
        if self._told:
            super().begin_micro_batch(sync=sync)

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        return getattr(self.module, name)(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a micro-batch that is not the last of its accumulation window."""
        if self._told:
            super().backward(loss, *args, **kwargs)
        else:
            with _counted(self._trained()) as self._seen:
                super().backward(loss, *args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """See `DataParallel.finish_window`.

        Raises:
            RuntimeError: The loss does not use each parameter as often as the static graph says.
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
        """Average gradients without DDP; set the graph once every process has run a backward."""
        if loss is not None:
            self.backward(loss)
        average_gradients_of(self._trained())
        total = self._agreement.ballot(own)
        sum_numbers(total)
        items = self._agreement.count(total)
        if not items:
            give_nothing(self.module)
        if all(all_gather_object(bool(self._seen))):
            self.graph = dict(zip(self._names(), self._seen, strict=True))
            kept = [] if self._sends_buffers else [(b, b.clone()) for b in self.module.buffers()]
            self.begin_epoch()
            for buffer, value in kept:  # DDP's constructor has broadcast rank 0's buffers
                buffer.data.copy_(value)
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return the graph too: how often backward accumulates into each parameter."""
        return {**super().state_dict(), "graph": self.graph}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Adopt the process's own graph, or on another number of processes that of all."""
        super().load_state_dicts(saved)
        graphs = [rank.get("graph", {}) for rank in saved]
        if len(graphs) == self._world_size:
            self.graph = graphs[dist.get_rank()]
        elif all(graph == graphs[0] for graph in graphs):
            self.graph = graphs[0]

    def close(self) -> None:
        """See `DataParallel.close`."""
        if self._told:
            super().close()

    def _check(self, times: list[int]) -> None:
        """Compare the first update with the graph, because DDP does not notice extra accumulations.

        Raises:
            RuntimeError: A parameter was used more or less often than in the graph.
        """
        for name, found in zip(self._names(), times, strict=True):
            known = self.graph[name]
            if found != known:
                raise RuntimeError(
                    f"With static_graph=True backward must accumulate into each parameter as often "
                    f"as in the first update, or in the run that is resumed. It accumulated "
                    f"{found} times into {name}; then it was {known} times. Restore that, or leave "
                    "out static_graph."
                )
        self._held_to = True

    def _check_reduced(self) -> None:
        """Check that DDP has reduced all buckets, and does not wait for missing gradients.

        Raises:
            RuntimeError: The loss uses fewer parameters than the static graph, so DDP waits for
                gradients and has averaged nothing.
        """
        try:
            super()._check_reduced()
        except RuntimeError as error:
            raise RuntimeError(
                "With static_graph=True each loss must depend on the same parameters as the first "
                "update's, equally often. This one depends on fewer, or on some less often, so "
                "the gradients could not be averaged. Pass Trainer(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)]) instead."
            ) from error.__cause__


@contextmanager
def _counted(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Count how often backward accumulates into each parameter inside the block."""
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
