"""What metric objects of torchmetrics' kind need to compute on several processes.

torchmetrics gathers a list element by element, so processes whose lists differ in length, because
the batches do not divide evenly, would wait for each other or read other types than were sent. Here
the shorter lists are filled up with placeholders, which the gathering leaves out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from trainer.distributed.objects import all_gather_object
from trainer.state import PartialState


class _Placeholder(Tensor):
    """Stands for an element that other processes have."""


@contextmanager
def computing(*owners: Any) -> Iterator[None]:
    """Inside, metric objects may compute over all processes.

    Args:
        *owners: Modules that are or have metric objects; others are left alone.
    """
    if PartialState().num_processes == 1:
        yield
        return
    parts = _parts(owners)
    for part in parts:
        forget_computed(part)
    kinds = {type(part): type(part)._sync_dist for part in parts}  # it has no public name
    with ExitStack() as patched:
        for kind, original in kinds.items():  # not the objects: a hook may copy them
            patched.enter_context(_synced_by(kind, original))
        yield


@contextmanager
def _synced_by(kind: type, original: Callable[..., None]) -> Iterator[None]:
    own = vars(kind).get("_sync_dist")
    kind._sync_dist = partialmethod(_sync, original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if own is None:
            del kind._sync_dist  # type: ignore[attr-defined]
        else:
            kind._sync_dist = own  # type: ignore[attr-defined]


def forget_computed(metric: Any) -> None:
    """Let a metric object compute anew.

    It keeps the result until its next update. A process without a batch would take the kept one,
    and the others would wait for it in the reduction of their states.
    """
    for part in _parts([metric]):
        part._computed = None  # torchmetrics has no public name for it


def _parts(owners: Iterable[Any]) -> list[Any]:
    """Return the metric objects in some modules, each once."""
    modules = [part for one in owners if isinstance(one, nn.Module) for part in one.modules()]
    parts = {id(part): part for part in modules if hasattr(part, "sync_on_compute")}
    return [part for part in parts.values() if hasattr(part, "_sync_dist")]


def _sync(
    part: Any,
    original: Callable[..., None],
    dist_sync_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> None:
    """Replace the states by those of all processes, as torchmetrics would; collective.

    torchmetrics has copied them by then, and restores them after computing.

    Args:
        part: The metric object.
        original: What its class has in place of this.
        dist_sync_fn: What torchmetrics would gather by.
        **kwargs: Of `original`.
    """
    if part.dist_sync_fn is not None or part.process_group is not None:
        original(part, dist_sync_fn, **kwargs)
        return
    before = {name: getattr(part, name) for name in part._reductions}
    own = {name: _length(part, name) for name in before}
    of_all = all_gather_object(own)
    try:
        for name, length in own.items():
            lengths = [each.get(name) for each in of_all]
            if length is not None and None not in lengths and max(lengths) > length:
                filler = torch.empty(0, device=part.device).as_subclass(_Placeholder)
                setattr(part, name, [*before[name], *[filler] * (max(lengths) - length)])
        original(part, _gather_piece, **kwargs)
    except BaseException:
        for name, state in before.items():
            setattr(part, name, state)
        raise


def _length(part: Any, name: str) -> int | None:
    """Return how many tensors of a state are gathered one by one; None if not by us."""
    state = getattr(part, name)
    if not isinstance(state, list) or not all(isinstance(each, Tensor) for each in state):
        return None
    concatenated = getattr(part._reductions[name], "__name__", "") == "dim_zero_cat"
    return min(len(state), 1) if concatenated else len(state)


def _gather_piece(piece: Tensor, group: Any = None) -> list[Tensor]:  # noqa: ARG001 - an interface
    """Gather tensors of any shapes and types in the order of the ranks, without placeholders.

    Args:
        piece: This process's; its graph is kept, as torchmetrics does.
        group: Not used: parts with a group of their own are gathered by torchmetrics.
    """
    missing = isinstance(piece, _Placeholder)
    pieces = all_gather_object(None if missing else piece.detach())
    if not missing:
        pieces[PartialState().process_index] = piece
    return [each for each in pieces if each is not None]
