"""The registry of objects with state: parts by name, in the order in which they are restored.

A fit and an `Accelerator` list their parts in such a mapping, which saving and loading iterate
over. A torch or user object is a part itself, or is wrapped in one of the adapters here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from trainer.checkpoint.sharded_state import ShardedTensor, resharded, state_like
from trainer.checkpoint.storage import reading
from trainer.errors import CheckpointError
from trainer.optim.state import load_state, state_of
from trainer.tree import leaves


class Stateful(Protocol):
    """Any object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


@dataclass(frozen=True, slots=True)
class StateFunctions:
    """A `Stateful` made of two functions."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


class PlacedState:
    """An object whose saved tensors get the device, sharding and dtype of its own tensors.

    Args:
        owner: An optimizer, a scheduler, or any other object with a state.
        models: The bare modules that own an optimizer's parameters.
        dtypes: See `trainer.optim.state.load_state`.

    Attributes:
        kind: The name of its class, for errors.
    """

    def __init__(
        self,
        owner: Stateful,
        models: Iterable[nn.Module] = (),
        dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        self._owner, self._models, self._dtypes = owner, models, dtypes
        self.kind = type(owner).__name__

    def state_dict(self) -> Any:
        """Return the state; an optimizer's state uses the modules' own parameter names."""
        return state_of(self._owner, self._models)

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a state, as read: tensors may be `ShardedTensor` objects."""
        if isinstance(state_dict, Mapping) and hasattr(self._owner, "param_groups"):
            state_dict = state_like(self._owner, state_dict)
        elif any(isinstance(leaf, ShardedTensor) for leaf in leaves(state_dict)):
            state_dict = resharded(state_dict, self._owner.state_dict())
        load_state(self._owner, state_dict, self._dtypes)


def dtypes_of(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[int, torch.dtype]:
    """Return the dtypes of saved weights by the ``id`` of the parameters that they load into."""
    named = model.named_parameters()
    return {id(parameter): weights[name].dtype for name, parameter in named if name in weights}


Parts: TypeAlias = "Mapping[Any, Stateful | None]"
"""Parts by their key in a tree.

A part whose key is a tuple has several keys there; if it is empty, all that no other part has.
"""


@dataclass(frozen=True, slots=True)
class RankStates:
    """The states of all processes that saved, for parts in which they differ.

    Attributes:
        states: The states in the order of ranks.
        data_size: `dp_size` at the save. Ranks that share data have saved the same data state.
        rank: The rank of this process. This and the following fields describe the run that loads.
        world_size: The number of processes.
        dp_rank: The index of the data share that this process reads.
        dp_size: The number of shares.
    """

    states: Sequence[Any]
    data_size: int
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int

    @property
    def same(self) -> bool:
        """Whether the numbers of processes and of data shares are unchanged since the save."""
        return len(self.states) == self.world_size and self.data_size == self.dp_size

    @property
    def own(self) -> Any:
        """This rank's state, else that of its data share's first rank; None if there is none."""
        if self.same:
            return self.states[self.rank]
        first = self.dp_rank * (len(self.states) // self.data_size)
        return self.states[first] if self.dp_rank < self.data_size else None

    @property
    def to_merge(self) -> Sequence[Any]:
        """The states that the processes of this rank's share of the data have to merge.

        If the number of shares has changed, these are all states, and rank 0 holds the merged
        result.
        """
        if self.same:
            return self.states[self.rank : self.rank + 1]
        if self.data_size != self.dp_size:
            return self.states
        ranks = len(self.states) // self.data_size  # ranks per share
        return self.states[self.dp_rank * ranks : (self.dp_rank + 1) * ranks]


def collect(parts: Parts) -> dict[str, Any]:
    """Return the states of all parts as one tree; the state of a part that is None is None."""
    states: dict[str, Any] = {}
    for key, part in parts.items():
        state: Any = None if part is None else part.state_dict()
        states.update(state if isinstance(key, tuple) else {key: state})
    return states


def restore(
    parts: Parts,
    saved: Mapping[str, Any] | RankStates,
    where: object = "",
    *,
    optional: Collection[Any] = (),
) -> None:
    """Restore parts in order, from one tree of `collect`, or from the trees of all ranks.

    Args:
        parts: The parts.
        saved: The tree, or the trees of all ranks; parts are then given `RankStates`.
        where: The checkpoint, for errors; empty if the caller names it.
        optional: Keys of parts that stay unchanged if the tree lacks them, because earlier
            releases, other engines and other libraries do not save them.

    Raises:
        CheckpointError: A state is missing or does not fit its part.
    """
    trees = saved.states if isinstance(saved, RankStates) else [saved]
    listed = {name for key in parts for name in _names(key)}
    others = tuple(dict.fromkeys(name for tree in trees for name in tree if name not in listed))
    for key, part in parts.items():
        names = others if key == () else _names(key)
        is_saved = any(name in tree for tree in trees for name in names)
        if part is None or (not is_saved and (key in optional or not names)):
            continue
        try:
            with reading(f"the state of {', '.join(names)}", "cannot be restored"):
                states = [
                    tree[key] if isinstance(key, str) else {n: tree[n] for n in names if n in tree}
                    for tree in trees
                ]
                if isinstance(saved, RankStates):
                    part.load_state_dict(replace(saved, states=states))
                else:
                    part.load_state_dict(states[0])
        except CheckpointError as error:
            if not where:
                raise
            # Keep the cause of a part's error; an error of ours already says everything.
            raise CheckpointError(f"{where}: {error}") from error.__cause__


def _names(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key
