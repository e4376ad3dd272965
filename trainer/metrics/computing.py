"""What metric objects of torchmetrics' kind need to compute on several processes.

torchmetrics gathers a list element by element, so processes whose lists differ in length, because
the batches do not divide evenly, would wait for each other or read other types than were sent. Here
all states are exchanged at once, and torchmetrics is answered from that. Shorter lists are filled
up with placeholders, so that it asks for as many elements on each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from itertools import zip_longest
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
def _synced_by(kind: Any, original: Callable[..., None]) -> Iterator[None]:
    own = vars(kind).get("_sync_dist")
    kind._sync_dist = partialmethod(_sync, original)
    try:
        yield
    finally:
        if own is None:
            del kind._sync_dist
        else:
            kind._sync_dist = own


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
    return [part for part in parts.values() if hasattr(type(part), "_sync_dist")]


def _sync(part: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replace the states by those of all processes, as torchmetrics would; collective.

    torchmetrics has copied them by then, and restores them after computing.

    Args:
        part: The metric object.
        original: What its class has in place of this.
        *args: Of `original`: what to gather by, and the group.
        **kwargs: Likewise.
    """
    if "dist_sync_fn" in kwargs:
        args = (kwargs.pop("dist_sync_fn"), *args)
    by, group = (*args, None, None)[:2]
    group = kwargs.get("process_group", group)
    usual = (
        by is None
        or getattr(by, "func", None) is _gather_piece
        or str(by.__module__).startswith("torchmetrics.")
    )
    if not usual or any(own is not None for own in (group, part.dist_sync_fn, part.process_group)):
        original(part, *args, **kwargs)  # its own, or what a class that extends its class gives
        return
    before = {name: getattr(part, name) for name in part._reductions}
    own = {
        name: pieces
        for name, state in before.items()
        if (pieces := _pieces(state, part._reductions[name])) is not None
    }
    of_all = all_gather_object(
        {name: [piece.detach() for piece in pieces] for name, pieces in own.items()}
    )
    of_all[PartialState().process_index] = own  # with their graphs, as torchmetrics keeps them
    empty = torch.empty(0, device=part.device)
    gathered: dict[Tensor, list[list[Tensor]]] = {}
    try:
        for name, pieces in own.items():
            if any(name not in each for each in of_all):
                continue
            rows = list(zip_longest(*(each[name] for each in of_all)))
            missing = len(rows) - len(pieces)
            filled = pieces + [empty.as_subclass(_Placeholder) for _ in range(missing)]
            if isinstance(before[name], list):
                setattr(part, name, filled)
            for piece, row in zip(filled, rows, strict=True):
                there = [each for each in row if each is not None]
                gathered.setdefault(piece, []).append(there)  # a list may have one twice
        original(part, partial(_gather_piece, gathered), *args[1:], **kwargs)
    except BaseException:
        for name, state in before.items():
            setattr(part, name, state)
        raise


def _pieces(state: Any, reduction: Any) -> list[Tensor] | None:
    """Return the tensors of a state that are gathered one by one; None if it has other things."""
    if isinstance(state, Tensor):
        return [state]
    if not isinstance(state, list) or not all(isinstance(each, Tensor) for each in state):
        return None
    pieces = [each for each in state if not isinstance(each, _Placeholder)]  # of a class above
    concatenated = getattr(reduction, "__name__", "") == "dim_zero_cat"
    return [reduction(pieces)] if concatenated and len(pieces) > 1 else pieces


def _gather_piece(
    gathered: dict[Tensor, list[list[Tensor]]],
    piece: Tensor,
    group: Any = None,
) -> list[Tensor]:
    """Return a tensor of all processes in the order of their ranks; of any shapes and types.

    Args:
        gathered: What is known already, by the piece of this process.
        piece: This process's; its graph is kept, as torchmetrics does.
        group: Only that of a class that extends `_sync_dist`, and gathered by torchmetrics, as are
            parts with a group of their own.
    """
    if group is not None:
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(piece, group)
    if known := gathered.get(piece):
        return known.pop(0)
    # A class that extends `_sync_dist` has made another tensor of what was exchanged.
    missing = isinstance(piece, _Placeholder) and not piece.numel()
    pieces = all_gather_object(None if missing else piece.detach())
    if not missing:
        pieces[PartialState().process_index] = piece
    return [each for each in pieces if each is not None]
