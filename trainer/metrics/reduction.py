"""Reduce logged values over the ranks, in one all-reduce over names agreed on beforehand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.guards import read_back
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.transport import all_reduce, sum_numbers
from trainer.errors import MetricError
from trainer.metrics.cells import EMPTY, Cells, Value, as_tensor, computed, is_collective
from trainer.metrics.computing import computing, forget_computed
from trainer.tree import leaves


class Reduction:
    """Reduces cells and metric objects over the ranks.

    Args:
        device: The device of the totals.
        dtype: The dtype of the totals.
        world_size: The number of processes.
        counts: Whether this process's values count; False if another one reads the same data.

    Attributes:
        names: All names logged so far; names of other ranks as of the latest exchange.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, world_size: int, *, counts: bool = True
    ) -> None:
        self._device, self._dtype, self._world_size = device, dtype, world_size
        self._counts = counts
        self.names: set[str] = set()
        self._shared_names: set[str] = set()  # the names that all ranks know

    def reduce(self, cells: Cells, interval: str) -> dict[str, Value]:
        """Return the values reduced over all ranks; collective.

        With a single process, values on a device are not read back.

        Args:
            cells: The cells of the interval.
            interval: The interval, for errors: "this update" or "this epoch of train".

        Raises:
            MetricError: A rank did not log a name that the others logged; raised on all ranks.
        """
        if self._world_size == 1:
            reduced = cells.own_values()
        else:
            values = self._all_reduce(cells, interval)
            reduced = {name: values[name] for name, _ in cells.agreed if name in values}
        names = [name for name, kind in self.pairs(cells) if kind == "object"]
        if names:
            with computing(*(cells.all_objects[name] for name in names), counts=self._counts):
                for name in names:
                    if self._world_size > 1:  # compute again if the object has several names
                        forget_computed(cells.all_objects[name])
                    reduced[name] = computed(name, cells.all_objects[name].compute())
        return reduced

    def pairs(self, cells: Cells) -> Sequence[tuple[str, str]]:
        """Return the (name, kind) pairs to reduce, in the same order on all ranks."""
        return cells.names() if self._world_size == 1 else cells.agreed

    def _all_reduce(self, cells: Cells, interval: str) -> dict[str, Value]:
        """Reduce means and sums in one all-reduce; min and max, if used, in one more each.

        The ranks use the names agreed on before. A flag in the sum tells whether any rank has
        different names now, or has logged a name unknown to others. Only then the names are
        exchanged, and the all-reduce is repeated.
        """
        while True:
            totals: list[Value] = [float(cells.differs() or self.names != self._shared_names)]
            for name, kind in cells.agreed:
                if kind in ("mean", "sum"):
                    cell = cells.cells.get(name)
                    totals += [cell.total, cell.weight] if cell and self._counts else [0.0, 0.0]
            summed = self._vector(totals)
            sum_numbers(summed)
            summed_values = read_back(summed).tolist()
            if not summed_values[0]:
                break
            local = cells.names()
            cells.agreed, self.names = _share_names(local, cells.ran, self.names, interval)
            # A copy, so that a rank without a batch takes the same decisions.
            self._shared_names = set(self.names)
            self._share_objects(cells)
        reduced: dict[str, Value] = {}
        position = 1
        for name, kind in cells.agreed:
            if kind in ("mean", "sum"):
                total, weight = summed[position], summed[position + 1]
                if kind == "sum" or summed_values[position + 1] > 0:
                    reduced[name] = total / weight if kind == "mean" else total
                position += 2
        for kind, operation in (("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
            names = [name for name, other in cells.agreed if other == kind]
            if names:
                empty = EMPTY[kind]
                vector = self._vector(
                    [cells.cells[name].total if name in cells.cells else empty for name in names]
                )
                all_reduce(vector, operation)
                reduced.update(zip(names, vector, strict=True))
        return reduced

    def _share_objects(self, cells: Cells) -> None:
        """Give every rank a copy of each metric object, since ``compute`` is collective.

        A rank that has run no batch may lack an object. It gets an empty copy.
        """
        names = [name for name, kind in cells.agreed if kind == "object"]
        if not names:
            return
        names_by_rank = all_gather_object(set(cells.all_objects))
        for name in names:
            if all(name in rank_names for rank_names in names_by_rank):
                continue
            owner = [name in rank_names for rank_names in names_by_rank].index(True)
            shared = broadcast_object(_reset_copy(cells.all_objects.get(name)), owner)
            cells.all_objects.setdefault(name, shared.to(self._device))

    def _vector(self, values: list[Value]) -> Tensor:
        if not any(isinstance(value, Tensor) for value in values):
            # Created on the host: creating it on an accelerator would wait for the device.
            return torch.tensor(values, dtype=self._dtype).to(self._device, non_blocking=True)
        like = torch.empty((), dtype=self._dtype, device=self._device)
        return torch.stack([as_tensor(value, like).reshape(()) for value in values])


def _share_names(
    local: list[tuple[str, str]], ran: set[str], logged_names: set[str], interval: str
) -> tuple[tuple[tuple[str, str], ...], set[str]]:
    """Exchange the names between ranks, and check that no rank lacks a name; collective.

    Args:
        local: This rank's (name, kind) pairs.
        ran: The name suffixes of the loaders from which this rank has run a batch.
        logged_names: All names that this rank knows.
        interval: The interval, for the error.

    Returns:
        The (name, kind) pairs to reduce, and all names that any rank knows.

    Raises:
        MetricError: A rank that has run batches of a loader lacks one of its names; raised on all
            ranks.
    """
    reports = all_gather_object((local, ran, logged_names))
    union = tuple(dict.fromkeys(pair for names, *_ in reports for pair in names))
    for rank, (names, rank_ran, _) in enumerate(reports):
        missing = [pair for pair in union if pair not in names and is_collective(pair[0], rank_ran)]
        if missing:
            other_rank = next(r for r, (logged, *_) in enumerate(reports) if missing[0] in logged)
            raise MetricError(
                f"Rank {rank} did not log {', '.join(repr(name) for name, _ in missing)} in "
                f"{interval}, but rank {other_rank} did. Every rank that runs a batch must log "
                "the same names with the same `reduce`: move the call out of the condition that "
                "is true only on some ranks."
            )
    return union, set().union(*(names for *_, names in reports))


def _reset_copy(metric: Any) -> Any:
    """Return an empty copy of a torchmetrics object on the CPU, without hooks."""
    if metric is None:
        return None
    parts = [vars(part) for part in metric.modules()]
    # Hooks, such as DeepSpeed's, need not be picklable.
    memo: dict[int, Any] = {
        id(hooks): type(hooks)()
        for part in parts
        for name, hooks in part.items()
        if name.endswith("_hooks")
    }
    # Detach its tensors: `deepcopy` fails for tensors with an autograd graph.
    with_graph = [leaf for leaf in leaves(parts) if isinstance(leaf, Tensor) and leaf.grad_fn]
    memo |= {id(leaf): leaf.detach() for leaf in with_graph}
    emptied = copy.deepcopy(metric, memo).cpu()
    emptied.reset()
    return emptied
