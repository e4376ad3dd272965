"""Tensors of another process: shapes without values.

On a stage of a pipeline the layers of other stages have such tensors as weights. An operation that
takes one returns one. So the code of a model runs without the layers that another process has, at
the cost of finding shapes, and nothing that depends on them is ever taken for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from trainer.tree import map_tree

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}
# Operations whose values depend on no other tensor's.
_CONSTANT = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
_only_shapes: ContextVar[bool] = ContextVar("only_shapes", default=False)


class Absent(Tensor):
    """A tensor that another process has; see the module.

    Args:
        like: Has its shape, strides and dtype; its values are not kept.
        device: Where it seems to be.
    """

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Absent:
        """Return one."""
        # Torch's notes on extending it make a tensor without memory so.
        made: Absent = Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            dtype=like.dtype,
            device=device,
            requires_grad=like.requires_grad,
        )
        return made

    # ARG002: `__new__` has taken them
    def __init__(self, like: Tensor, device: torch.device) -> None:  # noqa: ARG002
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes contents
        """Return the shape and dtype."""
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is no class method
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on shapes alone.

        Raises:
            RuntimeError: It needs values, or writes into a tensor that has some.
        """
        del types
        name = str(function).removeprefix("aten.").partition(".")[0]
        found: list[tuple[Tensor, Tensor]] = []  # tensors, and what stands for each

        def to_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            size, stride = value.size(), value.stride()
            made = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
            found.append((value, made))
            return made

        inputs, options = map_tree(to_meta, list(args)), map_tree(to_meta, dict(kwargs or {}))
        device = next(value.device for value, _ in found if isinstance(value, cls))
        if name in _CONSTANT:
            like = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            return function(like.to(device), *args[1:], **(kwargs or {}))
        if options.get("device") is not None:
            options["device"] = torch.device("meta")
        try:
            outputs = function(*inputs, **options)
        except (RuntimeError, NotImplementedError) as error:
            if name not in _READS:
                raise
            raise RuntimeError(
                "A value is read that another stage of the pipeline computes. Of what layers "
                "return, stages before the last know shapes alone: compute with tensors in the "
                "model, and read values in training_step, after the model is called."
            ) from error

        def to_absent(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            origin = next((tensor for tensor, made in found if made is value), None)
            if isinstance(origin, cls):
                return origin
            if origin is not None and not _only_shapes.get():
                raise RuntimeError(
                    f"{name} writes what another stage of the pipeline computes into a tensor that "
                    "has values: return a new tensor, instead of changing one in place."
                )
            return cls(value, device)

        return map_tree(to_absent, outputs)


def absent(tree: Any, device: torch.device) -> Any:
    """Return nested containers in which absent tensors take the place of others.

    Args:
        tree: The containers.
        device: Where the tensors seem to be.
    """

    def replaced(value: Any) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, Absent)
        return Absent(value, device) if plain else value

    return map_tree(replaced, tree)


@contextmanager
def only_shapes() -> Iterator[None]:
    """Run code inside for shapes alone: what it writes into tensors does not count."""
    token = _only_shapes.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _only_shapes.reset(token)
