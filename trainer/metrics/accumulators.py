"""Save metric accumulators, merge them over ranks, and isolate them from a validation."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import CheckpointError, module_logger
from trainer.metrics.cells import EMPTY, Cell
from trainer.metrics.store import MetricStore
from trainer.names import bare_names
from trainer.tree import map_tree, to_device

logger = module_logger(__name__)

_UPDATE = "update"  # used as a phase: the values of the last update, whether recorded yet or not


class MetricAccumulators:
    """The values of an epoch that are not reduced yet, for a checkpoint inside the epoch.

    Each rank saves its own. On another number of processes, rank 0 loads those of all ranks, and
    the other ranks load the metric names only. Totals are summed over the ranks, so the epoch's
    value does not depend on which rank holds them.

    Args:
        store: The logged values.
        module: The user's module, whose attributes are the metric objects.
    """

    def __init__(self, store: MetricStore, module: nn.Module) -> None:
        self._store, self._module = store, module

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's accumulators, as a tree that a checkpoint can hold.

        The tree includes the states of torchmetrics objects that are attributes of the module. A
        warning names other objects that were logged: a resumed run could not find them.
        """
        store, objects = self._store, list(metric_objects(self._module))
        paths = {id(metric): path for path, metric in objects}
        epochs = {}
        for phase, cells in {**store.epochs, _UPDATE: store.step}.items():
            outside = [name for name, metric in cells.objects.items() if id(metric) not in paths]
            if outside:
                logger.warning(
                    "The metric objects %s are not attributes of the module, so a checkpoint does "
                    "not hold their state: after a resume from here, the epoch's value covers only "
                    "the remaining batches.",
                    outside,
                )
            epochs[phase] = {
                "cells": {
                    name: [cell.kind, cell.total, cell.weight, cell.prog_bar, cell.last]
                    for name, cell in cells.cells.items()
                },
                "objects": _paths_of(cells.objects, paths),
                "ran": sorted(cells.ran),
            }
        states = {
            path: [metric.update_count, dict(metric.metric_state)]
            for path, metric in objects
            if metric.update_count
        }
        stepwise = _paths_of(store.stepwise, paths)
        names = sorted(store.names)
        return {"epochs": epochs, "stepwise": stepwise, "states": states, "names": names}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]], *, holds: bool = True) -> None:
        """Load the accumulators of one rank, or those of several ranks merged.

        Args:
            saved: The states of these ranks, in their order; empty leaves the store empty.
            holds: Whether this rank takes the values. Otherwise it takes the names only, with empty
                accumulators, so that all ranks reduce the same names.

        Raises:
            CheckpointError: The states of a metric object cannot be merged.
        """
        store = self._store
        # From the compiled wrapper if there is one, not from the module inside.
        objects = dict(reversed([*metric_objects(self._module)]))
        states = defaultdict(list)
        for rank_state in saved:
            for phase, of_phase in rank_state["epochs"].items():
                cells = store.step if phase == _UPDATE else store.epoch(phase)
                cells.ran.update(of_phase["ran"] if holds else ())
                for name, fields in of_phase["cells"].items():
                    kind, *_, prog_bar, _ = fields
                    if holds:
                        _merge_cell(cells.cells, name, Cell(*to_device(fields, store.device)))
                    else:
                        cells.cells.setdefault(name, Cell(kind, EMPTY[kind], prog_bar=prog_bar))
                loaded_objects = _named(of_phase["objects"], objects)
                cells.objects.update(loaded_objects)
                cells.all_objects.update(loaded_objects)
            # Checkpoints of earlier releases do not have "stepwise".
            store.stepwise.update(_named(rank_state.get("stepwise", {}), objects))
            for path, (count, state) in rank_state["states"].items():
                if path in objects:
                    states[path].append((count, to_device(state, store.device)))
        for path, rank_states in states.items():
            if len(rank_states) > 1:
                _check_mergeable(path, objects[path])
            if holds:
                _put_merged(objects[path], rank_states)


def _paths_of(objects: Mapping[str, Any], paths: Mapping[int, str]) -> dict[str, str]:
    """Return the path in the module of each metric object that has one."""
    return {name: paths[id(metric)] for name, metric in objects.items() if id(metric) in paths}


def _named(paths: Mapping[str, str], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each path by the metric object there; paths that the module lacks are left out."""
    return {name: objects[path] for name, path in paths.items() if path in objects}


def metric_states(module: nn.Module) -> list[tuple[Any, int, dict[str, Any]]]:
    """Return copies of the states of a module's metric objects, for `put_metrics_back`."""
    return [
        (metric, metric.update_count, map_tree(_copied, dict(metric.metric_state)))
        for _, metric in metric_objects(module)
    ]


def _copied(value: Any) -> Any:
    # Detached: an object may keep a tensor together with its autograd graph.
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def put_metrics_back(states: Sequence[tuple[Any, int, dict[str, Any]]]) -> None:
    """Restore the states that `metric_states` returned."""
    for metric, *_ in states:  # reset all first: a metric collection resets its members, too
        metric.reset()
    for metric, count, state in states:
        put_metric_state(metric, count, map_tree(_copied, state))


@contextmanager
def isolated_training_metrics(metrics: MetricStore, module: nn.Module) -> Iterator[None]:
    """Save and reset the metric objects that training has logged; restore them on exit.

    This lets the same object serve training and the validations inside an epoch.
    `MetricStore.outer_updates` records objects whose state is inaccessible, and objects that may or
    may not be used by training.
    """
    logged = [*metrics.epoch("train").objects.values(), *metrics.step.objects.values()]
    by_id = {id(metric): metric for metric in [*logged, *metrics.stepwise.values()]}
    states = [
        state
        for metric in by_id.values()
        if hasattr(metric, "metric_state")
        for state in metric_states(metric)
    ]
    counts = {id(metric): metric.update_count for _, metric in metric_objects(module)}
    updated = {key: count for key, count in counts.items() if count}
    metrics.outer_updates = dict.fromkeys(by_id, -1) | updated
    for metric, *_ in states:
        metrics.outer_updates.pop(id(metric), None)
        metric.reset()
    try:
        yield
    finally:
        metrics.outer_updates.clear()
        put_metrics_back(states)


def metric_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of each torchmetrics-like metric in a module."""
    for path, part in bare_names(module, module.named_modules()):
        if hasattr(part, "metric_state") and hasattr(part, "merge_state"):
            yield path, part


def _merge_cell(cells: dict[str, Cell], name: str, saved: Cell) -> None:
    cell = cells.setdefault(name, saved)
    if cell is saved:
        return
    if saved.kind == "mean":
        cell.total = cell.total + saved.total
        cell.weight += saved.weight
    else:
        cell.add(saved.total, saved.weight)


def _merges_itself(metric: Any) -> bool:
    """Return whether its class overrides `merge_state`.

    The method of torchmetrics merges states of one process only, without `dist_reduce_fx`.
    """
    defined_in: str = type(metric).merge_state.__module__
    return defined_in != "torchmetrics.metric"


def _check_mergeable(path: str, metric: Any) -> None:
    """Raise if the states of a metric object on several ranks cannot be merged into one.

    Raises:
        CheckpointError: A state has no `dist_reduce_fx`: the object combines it only in `compute`.
    """
    if _merges_itself(metric):
        return
    for name, reduction in metric._reductions.items():
        if reduction is None and not isinstance(getattr(metric, name), list):
            raise CheckpointError(
                f"The metric object {path!r}, a {type(metric).__name__}, cannot resume inside an "
                f"epoch with a different number of processes: its state {name!r} has no "
                "dist_reduce_fx to merge the states of the processes. Resume with the same "
                "number of processes, or from a checkpoint at the end of an epoch, or define its "
                "merge_state."
            )


def _put_merged(metric: Any, states: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Merge the states of several ranks as the object does in `compute`, and load the result.

    Args:
        metric: The metric object.
        states: For each rank, the number of updates and the state.
    """
    (count, merged), *others = states
    if others and not _merges_itself(metric):
        merged = {
            name: _merged([state[name] for _, state in states], metric._reductions[name])
            for name in merged
        }
    put_metric_state(metric, count, merged)
    for further, state in others:
        if _merges_itself(metric):
            metric.merge_state(state)
        metric._update_count += further


def _merged(parts: Sequence[Any], reduction: Any) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    if getattr(reduction, "__name__", "") == "dim_zero_cat":  # it does not concatenate a tensor
        return torch.cat(tuple(parts))
    return reduction(torch.stack(tuple(parts)))


def put_metric_state(metric: Any, count: int, state: dict[str, Any]) -> None:
    """Set the state and the number of updates of a torchmetrics-like metric object."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = count
