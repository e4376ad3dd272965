"""What metric objects of torchmetrics' kind need to compute on several processes.

torchmetrics gathers a list element by element, so processes whose lists differ in length, because
the batches do not divide evenly, would wait for each other or read other types than were sent. Here
the shorter lists are filled up with placeholders, which the gathering leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.distributed.objects import all_gather_object
from trainer.state import PartialState


class _Placeholder(Tensor):
    """Stands for an element that other processes have; its copies are placeholders too."""


@contextmanager
def computing(objects: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Inside, metric objects may compute over all processes; collective at its beginning.

    Args:
        objects: Modules that are or have metric objects, each under a name that is the same on all
            processes; others are left alone. Their states are restored at the end.
    """
    if PartialState().num_processes == 1:
        yield
        return
    parts = {
        f"{name}.{path}": part
        for name, one in objects
        if isinstance(one, nn.Module)
        for path, part in one.named_modules()
        if hasattr(part, "sync_on_compute") and hasattr(part, "_reductions")
    }
    for part in parts.values():
        _forget_computed(part)
    own = Counter(
        {
            (path, name): _pieces(part, name)
            for path, part in parts.items()
            for name in part._reductions
        }
    )
    wanted: Counter[tuple[str, str]] = Counter()
    for counts in all_gather_object(own):
        wanted |= counts
    ours = [p for p in parts.values() if p.dist_sync_fn is None and p.process_group is None]
    for part in ours:
        part.dist_sync_fn = _gather_piece
    for (path, name), count in (wanted - own).items():
        if path in parts:
            _fill(parts[path], name, count)
    try:
        yield
    finally:
        for part in ours:
            part.dist_sync_fn = None
        for path, name in wanted - own:
            if path in parts:
                _empty(parts[path], name)


def _forget_computed(part: Any) -> None:
    """Let a metric object compute anew.

    It keeps the result until its next update. A process without a batch would take the kept one,
    and the others would wait for it in the reduction of their states.
    """
    if getattr(part, "_computed", None) is not None:
        part._computed = None  # torchmetrics has no public name for it


def _pieces(part: Any, name: str) -> int:
    """Return how many tensors of a state torchmetrics gathers one by one; 0 if it is no list."""
    state = getattr(part, name)
    if not isinstance(state, list):
        return 0
    concatenated = getattr(part._reductions[name], "__name__", "") == "dim_zero_cat"
    return min(len(state), 1) if concatenated else len(state)


def _fill(part: Any, name: str, count: int) -> None:
    state = getattr(part, name)
    if isinstance(state, list):
        filler = torch.empty(0, device=part.device).as_subclass(_Placeholder)
        setattr(part, name, [*state, *[filler] * count])


def _empty(part: Any, name: str) -> None:
    state = getattr(part, name)
    if isinstance(state, list):
        setattr(part, name, [each for each in state if not isinstance(each, _Placeholder)])


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
