"""The states of an epoch's metrics, for a checkpoint inside the epoch.

Each process saves its own part. On another number of processes, rank 0 loads all parts: totals add
up, so the epoch's value does not depend on which process holds them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.metrics import Cell, MetricStore
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
    return {"epochs": epochs, "states": states, "names": sorted(metrics.names)}


def restore_accumulators(
    metrics: MetricStore, module: nn.Module, parts: Sequence[dict[str, Any]]
) -> None:
    """Load one process's part, or several together; no part leaves everything empty.

    The caller restores the names of the metrics, since every process has to know all of them.

    Args:
        metrics: Must be empty.
        module: With the same metric objects as when the parts were saved.
        parts: What `accumulators_of` returned, in the order of the ranks.
    """
    objects = dict(metric_objects(module))
    for part in parts:
        for phase, saved in part["epochs"].items():
            cells = metrics.step if phase == _UPDATE else metrics.epoch(phase)
            cells.ran.update(saved["ran"])
            for name, fields in saved["cells"].items():
                _take(cells.cells, name, Cell(*to_device(fields, metrics.device)))
            for name, path in saved["objects"].items():
                if path in objects:
                    cells.objects[name] = cells.known[name] = objects[path]
        for path, (count, state) in part["states"].items():
            if path in objects:
                _merge(objects[path], count, to_device(state, metrics.device))


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


def metric_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the paths and metric objects of torchmetrics' kind in a module."""
    for path, part in module.named_modules():
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


def _merge(metric: Any, count: int, state: dict[str, Any]) -> None:
    if metric.update_count:
        metric.merge_state(state)
        metric._update_count += count
    else:
        put_metric_state(metric, count, state)


def put_metric_state(metric: Any, count: int, state: dict[str, Any]) -> None:
    """Set the state and the number of updates of a metric object of torchmetrics' kind."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = count
