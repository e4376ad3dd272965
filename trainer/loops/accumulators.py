"""Save and restore the epoch's metric accumulators, for a checkpoint inside an epoch.

Each rank saves its own accumulators. On another number of processes, rank 0 loads those of all
ranks, and the other ranks load the metric names only. Totals are summed over the ranks, so the
epoch's value does not depend on which rank holds them.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import CheckpointError
from trainer.metrics import EMPTY, Cell, MetricStore
from trainer.names import bare_names
from trainer.tree import map_tree, to_device

logger = logging.getLogger(__name__)
_UPDATE = "update"  # used as a phase: the values of the last update, whether recorded yet or not


def accumulators_of(metrics: MetricStore, module: nn.Module) -> dict[str, Any]:
    """Return this rank's metric accumulators, as a tree that a checkpoint can hold.

    The tree includes the states of torchmetrics objects that are attributes of the module. A
    warning names other objects that were logged: a resumed run could not find them.
    """
    paths = {id(metric): path for path, metric in metric_objects(module)}
    epochs = {}
    for phase, cells in {**metrics.epochs, _UPDATE: metrics.step}.items():
        strangers = [name for name, metric in cells.objects.items() if id(metric) not in paths]
        if strangers:
            logger.warning(
                "The metric objects %s are not attributes of the module, so a checkpoint does not "
                "hold their state: after a resume from here, the epoch's value covers only the "
                "remaining batches.",
                strangers,
            )
        epochs[phase] = {
            "cells": {
                name: [cell.kind, cell.total, cell.weight, cell.prog_bar, cell.last]
                for name, cell in cells.cells.items()
            },
            "objects": {
                name: paths[id(metric)]
                for name, metric in cells.objects.items()
                if id(metric) in paths
            },
            "ran": sorted(cells.ran),
        }
    states = {
        path: [metric.update_count, dict(metric.metric_state)]
        for path, metric in metric_objects(module)
        if metric.update_count
    }
    stepwise = {
        name: paths[id(metric)] for name, metric in metrics.stepwise.items() if id(metric) in paths
    }
    names = sorted(metrics.names)
    return {"epochs": epochs, "stepwise": stepwise, "states": states, "names": names}


def restore_accumulators(
    metrics: MetricStore, module: nn.Module, parts: Sequence[dict[str, Any]], *, holds: bool = True
) -> None:
    """Load the metric accumulators of one rank, or those of several ranks merged.

    The caller restores `MetricStore.names`, since every rank needs the names of all ranks.

    Args:
        metrics: An empty store.
        module: The user's module, with the same metric objects as when the checkpoint was saved.
        parts: What `accumulators_of` returned on each rank, in the order of ranks. An empty
            sequence leaves the store empty.
        holds: Whether this rank takes the values. Otherwise it takes the names only, with empty
            accumulators, so that all ranks reduce the same names.

    Raises:
        CheckpointError: The states of a metric object cannot be merged.
    """
    objects = dict(reversed([*metric_objects(module)]))  # the compiled wrapper, not its content
    states = defaultdict(list)
    for part in parts:
        for phase, saved in part["epochs"].items():
            cells = metrics.step if phase == _UPDATE else metrics.epoch(phase)
            cells.ran.update(saved["ran"] if holds else ())
            for name, fields in saved["cells"].items():
                kind, *_, prog_bar, _ = fields
                if holds:
                    _take(cells.cells, name, Cell(*to_device(fields, metrics.device)))
                else:
                    cells.cells.setdefault(name, Cell(kind, EMPTY[kind], prog_bar=prog_bar))
            here = _named(saved["objects"], objects)
            cells.objects.update(here)
            cells.known.update(here)
        # Checkpoints of earlier releases do not have "stepwise".
        metrics.stepwise.update(_named(part.get("stepwise", {}), objects))
        for path, (count, state) in part["states"].items():
            if path in objects:
                states[path].append((count, to_device(state, metrics.device)))
    for path, each in states.items():
        if len(each) > 1:
            _refuse_to_merge(path, objects[path])
        if holds:
            _put_merged(objects[path], each)


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
def training_set_aside(metrics: MetricStore, module: nn.Module) -> Iterator[None]:
    """Save and reset the metric objects that training has logged; restore them on exit.

    So the same object can serve training and the validations inside an epoch. Objects that cannot
    be treated so are noted in `MetricStore.held`: those whose state is inaccessible, and those of
    which it is unknown whether training uses them.
    """
    logged = [*metrics.epoch("train").objects.values(), *metrics.step.objects.values()]
    by_id = {id(each): each for each in [*logged, *metrics.stepwise.values()]}
    states = [
        state
        for each in by_id.values()
        if hasattr(each, "metric_state")
        for state in metric_states(each)
    ]
    own = {id(each): each.update_count for _, each in metric_objects(module) if each.update_count}
    metrics.held = dict.fromkeys(by_id, -1) | own
    for metric, *_ in states:
        metrics.held.pop(id(metric), None)
        metric.reset()
    try:
        yield
    finally:
        metrics.held.clear()
        put_metrics_back(states)


def metric_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of each torchmetrics-like metric in a module."""
    for path, part in bare_names(module, module.named_modules()):
        if hasattr(part, "metric_state") and hasattr(part, "merge_state"):
            yield path, part


def _take(cells: dict[str, Cell], name: str, part: Cell) -> None:
    whole = cells.setdefault(name, part)
    if whole is part:
        return
    if part.kind == "mean":
        whole.total = whole.total + part.total
        whole.weight += part.weight
    else:
        whole.add(part.total, part.weight)


def _merges_itself(metric: Any) -> bool:
    """Return whether its class overrides `merge_state`.

    The method of torchmetrics merges states of one process only, without `dist_reduce_fx`.
    """
    way: str = type(metric).merge_state.__module__
    return way != "torchmetrics.metric"


def _refuse_to_merge(path: str, metric: Any) -> None:
    """Raise if the states of a metric object on several ranks cannot be merged into one.

    Raises:
        CheckpointError: A state has no `dist_reduce_fx`: the object combines it only in `compute`.
    """
    if _merges_itself(metric):
        return
    for name, reduction in metric._reductions.items():
        if reduction is None and not isinstance(getattr(metric, name), list):
            raise CheckpointError(
                f"The metric object {path!r}, a {type(metric).__name__}, cannot go on with another "
                f"number of processes inside an epoch: its state {name!r} has no dist_reduce_fx by "
                "which to merge those of the processes. Resume with as many as saved, or from a "
                "checkpoint at the end of an epoch, or define its merge_state."
            )


def _put_merged(metric: Any, states: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Merge the states of several ranks as the object does when it computes, and load the result.

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
        return [each for part in parts for each in part]
    if getattr(reduction, "__name__", "") == "dim_zero_cat":  # it does not concatenate a tensor
        return torch.cat(tuple(parts))
    return reduction(torch.stack(tuple(parts)))


def put_metric_state(metric: Any, count: int, state: dict[str, Any]) -> None:
    """Set the state and the number of updates of a torchmetrics-like metric object."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = count
