"""Reduce logged values over the processes, in one reduction over names agreed on beforehand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.transport import sum_numbers
from trainer.errors import MetricError
from trainer.metrics.cells import EMPTY, Cells, Value, as_tensor, computed, owes
from trainer.metrics.computing import computing, forget_computed
from trainer.tree import leaves


class Reduction:
    """Reduces cells over the processes.

    Args:
        device: The device of the totals.
        dtype: The dtype of the totals.
        world_size: The number of processes.

    Attributes:
        names: All names logged so far; those of other processes as of the latest reduction.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, world_size: int) -> None:
        self._device, self._dtype, self._world_size = device, dtype, world_size
        self.names: set[str] = set()
        self._told: set[str] = set()  # the names that all processes know

    def reduce(self, cells: Cells, what: str) -> dict[str, Value]:
        """Return the values over all processes; collective. With one process nothing is read."""
        if self._world_size == 1:
            reduced = cells.own_values()
        else:
            found = self._all_reduce(cells, what)
            reduced = {name: found[name] for name, _ in cells.agreed if name in found}
        names = [name for name, kind in self.pairs(cells) if kind == "object"]
        if names:
            with computing(*(cells.known[name] for name in names)):
                for name in names:
                    if self._world_size > 1:  # one object may have several names
                        forget_computed(cells.known[name])
                    reduced[name] = computed(name, cells.known[name].compute())
        return reduced

    def pairs(self, cells: Cells) -> Sequence[tuple[str, str]]:
        """Return the (name, kind) pairs to reduce, in the same order on all processes."""
        return cells.names() if self._world_size == 1 else cells.agreed

    def _all_reduce(self, cells: Cells, what: str) -> dict[str, Value]:
        """Reduce means and sums in one exchange, and min and max, if used, in one more each.

        The names are those agreed on before. A flag in the sum says that some rank has different
        names now, or has logged a name unknown to others; only then are names exchanged.
        """
        while True:
            totals: list[Value] = [float(cells.differs() or self.names != self._told)]
            for name, kind in cells.agreed:
                if kind in ("mean", "sum"):
                    cell = cells.cells.get(name)
                    totals += [cell.total, cell.weight] if cell else [0.0, 0.0]
            summed = self._vector(totals)
            sum_numbers(summed)
            read = summed.tolist()
            if not read[0]:
                break
            cells.agreed, self.names = _agree(cells.names(), cells.ran, self.names, what)
            self._told = set(self.names)  # so that ranks without a batch decide as the others
            self._share_objects(cells)
        reduced: dict[str, Value] = {}
        position = 1
        for name, kind in cells.agreed:
            if kind in ("mean", "sum"):
                total, weight = summed[position], summed[position + 1]
                if kind == "sum" or read[position + 1] > 0:
                    reduced[name] = total / weight if kind == "mean" else total
                position += 2
        for kind, operation in (("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
            names = [name for name, other in cells.agreed if other == kind]
            if names:
                empty = EMPTY[kind]
                vector = self._vector(
                    [cells.cells[name].total if name in cells.cells else empty for name in names]
                )
                dist.all_reduce(vector, op=operation)
                reduced.update(zip(names, vector, strict=True))
        return reduced

    def _share_objects(self, cells: Cells) -> None:
        """Give each process every metric object, since ``compute`` is collective.

        A process that has run no batch gets a copy without data.
        """
        names = [name for name, kind in cells.agreed if kind == "object"]
        if not names:
            return
        holders = all_gather_object(set(cells.known))
        for name in names:
            if all(name in held for held in holders):
                continue
            owner = next(rank for rank, held in enumerate(holders) if name in held)
            shared = broadcast_object(_emptied(cells.known.get(name)), owner)
            cells.known.setdefault(name, shared.to(self._device))

    def _vector(self, values: list[Value]) -> Tensor:
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=self._dtype, device=self._device)
        like = torch.empty((), dtype=self._dtype, device=self._device)
        return torch.stack([as_tensor(value, like).reshape(()) for value in values])


def _agree(
    own: list[tuple[str, str]], ran: set[str], ever: set[str], what: str
) -> tuple[tuple[tuple[str, str], ...], set[str]]:
    """Exchange the names; raise on all ranks if one ran batches of a loader but lacks its names.

    Args:
        own: This process's names to reduce, with their kinds.
        ran: The loaders whose batches this process has run.
        ever: All names that this process knows.
        what: The interval being reduced, for the error.

    Returns:
        The (name, kind) pairs to reduce, and all names that any process knows.

    Raises:
        MetricError: A rank lacks a name that it should have logged.
    """
    reports = all_gather_object((own, ran, ever))
    union = tuple(dict.fromkeys(pair for names, *_ in reports for pair in names))
    for rank, (names, ran_there, _) in enumerate(reports):
        missing = [pair for pair in union if pair not in names and owes(pair[0], ran_there)]
        if missing:
            having = next(r for r, (others, *_) in enumerate(reports) if missing[0] in others)
            raise MetricError(
                f"Rank {rank} did not log {', '.join(repr(name) for name, _ in missing)} in "
                f"{what}, but rank {having} did. Every rank that runs a batch must log the same "
                "names with the same `reduce`: move the call out of the condition that only some "
                "ranks meet."
            )
    return union, set().union(*(known for *_, known in reports))


def _emptied(metric: Any) -> Any:
    """Return a copy of a torchmetrics object on the host, without data."""
    if metric is None:
        return None
    # What it was given may have a graph, which cannot be copied.
    parts = [vars(part) for part in metric.modules()]
    given = [each for each in leaves(parts) if isinstance(each, Tensor) and each.grad_fn]
    known = {id(each): each.detach() for each in given}
    emptied = copy.deepcopy(metric, known).cpu()
    emptied.reset()
    return emptied
