"""What a module has beside its ``state_dict``: generators, flags and metric objects.

Module flags: which parameters are frozen and which submodules are in eval mode.

A ``state_dict`` does not hold these flags, so checkpoints save them separately. A hook may have
set them once, at an update that a resumed run does not repeat.

Save and restore the epoch's metric accumulators, for a checkpoint inside an epoch.

Each rank saves its own accumulators. On another number of processes, rank 0 loads those of all
ranks, and the other ranks load the metric names only. Totals are summed over the ranks, so the
epoch's value does not depend on which rank holds them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.data.seeding import NamedGenerators, generators_in, load_states, states_of
from trainer.errors import CheckpointError, module_logger
from trainer.metrics import EMPTY, Cell, MetricStore
from trainer.module import TrainModule
from trainer.names import bare_names
from trainer.rng import load_rng_state, rng_state
from trainer.tree import map_tree, to_device

if TYPE_CHECKING:
    from trainer.loops.state import FitRun


logger = module_logger(__name__)


def kept_by(module: TrainModule, datamodule: Any = None) -> NamedGenerators:
    """Return the generators held by a module and a datamodule, without those of their Trainer."""
    return generators_in((module.__dict__.get("_trainer"),), module=module, datamodule=datamodule)


def generators_of(run: FitRun) -> dict[str, Any]:
    """Return the states of all generators of a fit, as a tree that a checkpoint can hold."""
    return rng_state() | {"own": states_of(of_module(run))}


def load_generators(run: FitRun, state: dict[str, Any]) -> list[str]:
    """Restore the states that `generators_of` returned.

    Args:
        run: The fit.
        state: The states.

    Returns:
        The attribute paths where the module had a generator then, but has none of that kind now.
    """
    load_rng_state(state)
    # "own" is missing on a rank that the run did not have when it was saved.
    return load_states(of_module(run), state.get("own", {}))


def restore_generators(run: FitRun, state: dict[str, Any]) -> None:
    """Restore the RNG states of a checkpoint; warn of generators that the module no longer has."""
    if missing := load_generators(run, state):
        logger.warning(
            "%s had random generators when the checkpoint was saved (%s) that it does not have "
            "now; those that it creates later start with new states. Create them in __init__ or "
            "configure_model.",
            type(run.module).__name__,
            ", ".join(missing),
        )


def of_module(run: FitRun) -> NamedGenerators:
    """Return the module's generators, without those that the data seed anew in each epoch."""
    of_data = set(map(id, run.data.epoch_iterator.users_generators.values()))
    return {path: each for path, each in kept_by(run.module).items() if id(each) not in of_data}


def frozen_and_eval_flags(module: nn.Module) -> dict[str, list[str]]:
    """Return the module flags: names of frozen parameters and of submodules in eval mode."""
    return {
        "frozen": [
            n
            for n, parameter in bare_names(module, module.named_parameters())
            if not parameter.requires_grad
        ],
        "evaluating": [
            n for n, part in bare_names(module, module.named_modules()) if not part.training
        ],
    }


def warn_of_dropout_off(module: nn.Module) -> None:
    """Warn of submodules that are trained in eval mode, so that their dropout is off.

    ``from_pretrained`` of transformers returns models in eval mode.
    """
    if not module.training:  # `fit` calls train() on the module, so a hook chose eval mode
        return
    parts = [
        name
        for name, part in bare_names(module, module.named_modules())
        if not part.training
        and any(
            parameter.requires_grad
            for each in part.modules()
            if not isinstance(each, _BatchNorm)  # trained alone in a frozen backbone
            for parameter in each.parameters(recurse=False)
        )
        and any(
            isinstance(each, _DropoutNd) and each.p and not each.training for each in part.modules()
        )
    ]
    outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
    if outermost:
        logger.warning(
            "%s is in evaluation mode, so its dropout is off while it is trained (from_pretrained "
            "returns models so). Call its train() before fit, or freeze its parameters.",
            ", ".join(outermost),
        )


def load_switches(
    module: nn.Module, begun: Mapping[str, Any], saved: Mapping[str, Any], *, tell: bool
) -> None:
    """Restore the module flags that hooks had set.

    If a flag list already differs between the starts of the two programs, the script was changed
    in between. Its present flags are then kept.

    Args:
        module: The user's module.
        begun: The module flags at this start of the program.
        saved: The module flags of the program that saved: ``"begun"`` at its start, ``"now"`` at
            the save.
        tell: Whether to log differences from the checkpoint.
    """
    before, now = saved["begun"], saved["now"]
    if begun["frozen"] == before["frozen"]:
        frozen = set(now["frozen"])
        for name, parameter in bare_names(module, module.named_parameters()):
            parameter.requires_grad = name not in frozen  # an assignment: it may be lazy
    elif tell and (others := set(begun["frozen"]) ^ set(now["frozen"])):
        logger.warning(
            "The script freezes different parameters than when the checkpoint was saved, and its "
            "choice is kept: %s.",
            ", ".join(sorted(others)),
        )
    # At a save the root module is in training mode, unless the user's code has called eval() on it.
    if begun["evaluating"] == before["evaluating"] and "" not in now["evaluating"]:
        evaluating = set(now["evaluating"])
        for name, part in bare_names(module, module.named_modules()):
            part.training = name not in evaluating


_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = vars(nn.Module())


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's and its parts' own attributes that are plain data, by path.

    They are numbers, texts, small tensors, or short lists or dicts of numbers and texts. They are
    copied.
    """
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        of_base = vars(TrainModule()) if part is module else _OF_TORCH
        for name, value in vars(part).items():
            if name not in of_base and _is_plain(value):
                place = f"{path}.{name}" if path else name
                found[place] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
    return found


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set attributes that `plain_attributes` returned, of the parts that the module has."""
    parts = dict(module.named_modules())
    for place, value in attributes.items():
        path, _, name = place.rpartition(".")
        if path not in parts:
            continue
        own: dict[str, Any] = parts[path].__dict__
        own[name] = value.to(own[name]) if isinstance(own.get(name), Tensor) else value


def _is_plain(value: Any) -> bool:
    if type(value) is Tensor:
        return value.numel() <= 1000 and not value.requires_grad and not value.is_sparse
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return False
        value = list(value.values())
    if type(value) is list:
        return len(value) <= 100 and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def changed_attributes(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain attributes that differ from those before."""
    now = plain_attributes(module).items()
    return {n: value for n, value in now if n not in before or _differ(before[n], value)}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return type(one) is not type(other) or bool(one != other)


_UPDATE = "update"  # used as a phase: the values of the last update, whether recorded yet or not


def accumulators_of(metrics: MetricStore, module: nn.Module) -> dict[str, Any]:
    """Return this rank's metric accumulators, as a tree that a checkpoint can hold.

    The tree includes the states of torchmetrics objects that are attributes of the module. A
    warning names other objects that were logged: a resumed run could not find them.
    """
    paths = {id(metric): path for path, metric in metric_objects(module)}
    epochs = {}
    for phase, cells in {**metrics.epochs, _UPDATE: metrics.step}.items():
        unregistered = [name for name, metric in cells.objects.items() if id(metric) not in paths]
        if unregistered:
            logger.warning(
                "The metric objects %s are not attributes of the module, so a checkpoint does not "
                "hold their state: after a resume from here, the epoch's value covers only the "
                "remaining batches.",
                unregistered,
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
            _check_mergeable(path, objects[path])
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
def isolated_training_metrics(metrics: MetricStore, module: nn.Module) -> Iterator[None]:
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
