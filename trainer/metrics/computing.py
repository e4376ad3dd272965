"""Synchronise torchmetrics objects over ranks, also if the ranks had different numbers of batches.

torchmetrics gathers a list state element by element. If the batches do not divide evenly, the lists
differ in length between ranks, and the ranks deadlock or receive tensors of other dtypes. Here all
states are exchanged in one collective, and torchmetrics' gather function returns tensors from that
exchange. Shorter lists are padded with placeholders, so that torchmetrics gathers the same number
of elements on each rank.
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
    """Padding for a list element that only other ranks have."""


@contextmanager
def computing(*owners: Any, counts: bool = True) -> Iterator[None]:
    """Make ``compute`` of metric objects safe inside when ranks had different numbers of batches.

    Args:
        *owners: Modules that are or contain metric objects; other objects are ignored.
        counts: Whether this process's states count; False if another one reads the same data.
    """
    if PartialState().num_processes == 1:
        yield
        return
    parts = _parts(owners)
    for part in parts:
        forget_computed(part)
    kinds = {type(part): type(part)._sync_dist for part in parts}  # there is no public name
    with ExitStack() as patched:
        for kind, original in kinds.items():  # patch classes: the user's hook may copy objects
            patched.enter_context(_synced_by(kind, original, counts))
        yield


@contextmanager
def _synced_by(kind: Any, original: Callable[..., None], counts: bool) -> Iterator[None]:
    overridden = vars(kind).get("_sync_dist")
    kind._sync_dist = partialmethod(_sync, original, counts)
    try:
        yield
    finally:
        if overridden is None:
            del kind._sync_dist
        else:
            kind._sync_dist = overridden


def forget_computed(metric: Any) -> None:
    """Clear the cached result of a metric object.

    torchmetrics caches the result until the next update. A rank without a batch would return the
    cached result, while the other ranks wait for it in the exchange of states.
    """
    for part in _parts([metric]):
        part._computed = None  # there is no public name


def _parts(owners: Iterable[Any]) -> list[Any]:
    """Return the metric objects in the modules among `owners`, each once."""
    modules = [part for owner in owners if isinstance(owner, nn.Module) for part in owner.modules()]
    parts = {id(part): part for part in modules if hasattr(part, "sync_on_compute")}
    return [part for part in parts.values() if hasattr(type(part), "_sync_dist")]


def _sync(
    part: Any, original: Callable[..., None], counts: bool, *args: Any, **kwargs: Any
) -> None:
    """Replace a metric object's states by the synchronised ones, as torchmetrics does; collective.

    torchmetrics has copied the states before, and restores them after `compute`.

    Args:
        part: The metric object.
        original: The `_sync_dist` of its class.
        counts: See `computing`.
        *args: Positional arguments of `original`: the gather function and the process group.
        **kwargs: Keyword arguments of `original`.
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
    if not usual or any(f is not None for f in (group, part.dist_sync_fn, part.process_group)):
        original(part, *args, **kwargs)  # the user's own gather function or process group
        return
    before = {name: getattr(part, name) for name in part._reductions}
    local = {
        name: pieces
        for name, state in before.items()
        if (pieces := _pieces(state, part._reductions[name])) is not None
    }
    detached = {name: [piece.detach() for piece in pieces] for name, pieces in local.items()}
    of_all = all_gather_object(detached if counts else None)
    if counts:
        of_all[PartialState().process_index] = local  # with the autograd graph, as in torchmetrics
    of_all = [rank_pieces for rank_pieces in of_all if rank_pieces is not None]
    empty = torch.empty(0, device=part.device)
    gathered: dict[Tensor, list[list[Tensor]]] = {}
    try:
        for name, pieces in local.items():
            if any(name not in rank_pieces for rank_pieces in of_all):
                continue
            rows = list(zip_longest(*(rank_pieces[name] for rank_pieces in of_all)))
            missing = len(rows) - len(pieces)
            filled = pieces + [empty.as_subclass(_Placeholder) for _ in range(missing)]
            if isinstance(before[name], list):
                setattr(part, name, filled)
            for piece, row in zip(filled, rows, strict=True):
                there = [piece for piece in row if piece is not None]
                gathered.setdefault(piece, []).append(there)  # a tensor may be in a list twice
        original(part, partial(_gather_piece, gathered), *args[1:], **kwargs)
    except BaseException:
        for name, state in before.items():
            setattr(part, name, state)
        raise


def _pieces(state: Any, reduction: Any) -> list[Tensor] | None:
    """Return the tensors of a state that torchmetrics gathers; None if it has other objects."""
    if isinstance(state, Tensor):
        return [state]
    if not isinstance(state, list) or not all(isinstance(piece, Tensor) for piece in state):
        return None
    # Placeholders come from a subclass that calls this method again.
    pieces = [piece for piece in state if not isinstance(piece, _Placeholder)]
    concatenated = getattr(reduction, "__name__", "") == "dim_zero_cat"
    return [reduction(pieces)] if concatenated and len(pieces) > 1 else pieces


def _gather_piece(
    gathered: dict[Tensor, list[list[Tensor]]],
    piece: Tensor,
    group: Any = None,
) -> list[Tensor]:
    """Return the tensors of all ranks, in the order of ranks, of any shapes and dtypes.

    This is the gather function that torchmetrics calls.

    Args:
        gathered: The results of the exchange, by this rank's tensor.
        piece: This rank's tensor; its autograd graph is kept, as in torchmetrics.
        group: The process group, if a subclass's `_sync_dist` passes one; torchmetrics gathers
            then.
    """
    if group is not None:
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(piece, group)
    if tensors := gathered.get(piece):
        return tensors.pop(0)
    # A subclass's `_sync_dist` has computed another tensor from the exchanged states.
    missing = isinstance(piece, _Placeholder) and not piece.numel()
    pieces = all_gather_object(None if missing else piece.detach())
    if not missing:
        pieces[PartialState().process_index] = piece
    return [piece for piece in pieces if piece is not None]
