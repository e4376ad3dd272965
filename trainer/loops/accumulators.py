"""The states of an epoch's metrics, for a checkpoint inside the epoch.

Each process saves its own part. On another number of processes, rank 0 loads all parts: totals add
up, so the epoch's value does not depend on which process holds them. The others load the names.
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
_UPDATE = "update"  # in place of a phase: what the last update logged, recorded yet or not


def accumulators_of(metrics: MetricStore, module: nn.Module) -> dict[str, Any]:
    """Return this process's part, as a tree that a checkpoint can hold.

    It includes metric objects of torchmetrics' kind that belong to the module; a warning names any
    others, since nothing says where a resumed run would find them.
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
    """Load one process's part, or several together; no part leaves everything empty.

    The caller restores the names of the metrics, since every process has to know all of them.

    Args:
        metrics: Must be empty.
        module: With the same metric objects as when the parts were saved.
        parts: What `accumulators_of` returned, in the order of the ranks.
        holds: False if another process holds the values: this one has logged the same names then,
            with nothing in them.

    Raises:
        CheckpointError: The states of a metric object cannot be merged.
    """
    objects = dict(reversed([*metric_objects(module)]))  # a compiled one, not what is in it
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
        # A checkpoint of an earlier release does not have them.
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
    """Return the objects at these paths, of which the module may lack some, by the paths' names."""
    return {name: objects[path] for name, path in paths.items() if path in objects}


def metric_states(module: nn.Module) -> list[tuple[Any, int, dict[str, Any]]]:
    """Return a copy of the states of a module's metric objects, for `put_metrics_back`."""
    return [
        (metric, metric.update_count, map_tree(_copied, dict(metric.metric_state)))
        for _, metric in metric_objects(module)
    ]


def _copied(value: Any) -> Any:
    # Detached: an object may keep what it was given, with its graph.
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def put_metrics_back(states: Sequence[tuple[Any, int, dict[str, Any]]]) -> None:
    """Restore the states that `metric_states` returned."""
    for metric, *_ in states:  # all of them first: one may reset others that it consists of
        metric.reset()
    for metric, count, state in states:
        put_metric_state(metric, count, map_tree(_copied, state))


@contextmanager
def training_set_aside(metrics: MetricStore, module: nn.Module) -> Iterator[None]:
    """Inside, metric objects that training has logged start empty; then they go on as before.

    So one object may serve training and the validations inside an epoch. Objects of which this is
    not known, or whose state is not, are noted in `MetricStore.held`.
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
    """Yield the paths and metric objects of torchmetrics' kind in a module."""
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
    """Return whether its class has a way of its own; torchmetrics' is for parts of one process."""
    way: str = type(metric).merge_state.__module__
    return way != "torchmetrics.metric"


def _refuse_to_merge(path: str, metric: Any) -> None:
    """Refuse a metric object whose states on several processes cannot become one to go on with.

    Raises:
        CheckpointError: It combines a state of several processes only when it computes.
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
    """Set the states of several processes, merged as the object merges them when it computes."""
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
    if getattr(reduction, "__name__", "") == "dim_zero_cat":  # which leaves a tensor as it is
        return torch.cat(tuple(parts))
    return reduction(torch.stack(tuple(parts)))


def put_metric_state(metric: Any, count: int, state: dict[str, Any]) -> None:
    """Set the state and the number of updates of a metric object of torchmetrics' kind."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = count
