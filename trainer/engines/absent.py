"""Absent tensors: shapes without values, for tensors that only another process has.

On a pipeline stage, the weights of other stages' layers are absent. An operation on an absent
tensor computes only the shape of its result, which is absent too. So a model's code runs without
the layers of other processes, and a value that depends on them can never be read by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from trainer.tree import children, leaves, map_tree

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}
# Operations whose values do not depend on the input's values.
_CONSTANT = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
_PLAIN = (
    *(int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_KEPT = 10_000
_RESULTS: dict[Any, Any] = {}  # results of operations, by their inputs
_only_shapes: ContextVar[bool] = ContextVar("only_shapes", default=False)


class Absent(Tensor):
    """A tensor that only another process has; see the module.

    Args:
        like: A tensor with its shape, strides and dtype; the values are not kept.
        device: The device that it reports.
    """

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Absent:
        """Return one."""
        # The documented way to make a tensor without memory (torch's notes on extending it).
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
            RuntimeError: It needs values, or writes into a tensor that has values.
        """
        del types
        name = str(function).removeprefix("aten.").partition(".")[0]
        given = [value for value in leaves([args, kwargs or {}]) if isinstance(value, Tensor)]
        device = next(value.device for value in given if isinstance(value, cls))
        if name in _CONSTANT:
            like = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            return function(like.to(device), *args[1:], **(kwargs or {}))
        key = function, signature([args, kwargs or {}])
        if key not in _RESULTS:
            if len(_RESULTS) > _KEPT:
                _RESULTS.clear()
            _RESULTS[key] = _run_on_meta(name, function, given, args, kwargs or {})

        def to_absent(value: Any) -> Any:
            if isinstance(value, _Argument):
                origin = given[value.number]
                if isinstance(origin, cls):
                    return origin
                if not _only_shapes.get():
                    raise RuntimeError(
                        f"{name} writes what another stage of the pipeline computes into a tensor "
                        "that has values: return a new tensor, instead of changing one in place."
                    )
                value = origin
            return cls(value, device) if isinstance(value, Tensor) else value

        return map_tree(to_absent, _RESULTS[key])


class _Argument:
    """Stands for an argument that an operation has changed and returned.

    Attributes:
        number: Its index among the operation's tensor inputs.
    """

    def __init__(self, number: int) -> None:
        self.number = number


def _run_on_meta(
    name: str, function: Any, given: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation on tensors without memory.

    Returns:
        Its outputs, with an `_Argument` for each output that is an input.

    Raises:
        RuntimeError: It needs values.
    """
    made = [
        torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        for each in given
    ]
    instead = iter(made)
    inputs, options = map_tree(
        lambda value: next(instead) if isinstance(value, Tensor) else value, [list(args), kwargs]
    )
    if options.get("device") is not None:
        options["device"] = torch.device("meta")
    try:
        outputs = function(*inputs, **options)
    except (RuntimeError, NotImplementedError) as error:
        if name not in _READS:
            raise
        raise RuntimeError(
            "A value was read that another stage of the pipeline computes. Stages before the "
            "last know only the shapes of what layers return: read values (item, tolist) in "
            "training_step after calling the model, not in the model. Define submodules in the "
            "order in which they run: embedding, layers, head."
        ) from error
    numbers = {id(each): number for number, each in enumerate(made)}
    return map_tree(
        lambda value: _Argument(numbers[id(value)]) if id(value) in numbers else value, outputs
    )


def signature(tree: Any) -> Any:
    """Return a key that differs between trees with different shapes, dtypes, numbers or classes."""
    parts = children(tree)
    if parts is not None:
        return type(tree).__name__, tuple((str(key), signature(part)) for key, part in parts)
    if isinstance(tree, Tensor):
        strides = tree.stride() if tree.layout == torch.strided else ()
        return tuple(tree.shape), strides, tree.dtype, isinstance(tree, Absent)
    return (type(tree), tree) if isinstance(tree, _PLAIN) else type(tree)


def absent(tree: Any, device: torch.device) -> Any:
    """Return nested containers with absent tensors in place of all tensors.

    Args:
        tree: The containers.
        device: The device that the absent tensors report.
    """

    def replaced(value: Any) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, Absent)
        return Absent(value, device) if plain else value

    return map_tree(replaced, tree)


@contextmanager
def only_shapes() -> Iterator[None]:
    """Run the code inside only for shapes; writes into tensors are ignored."""
    token = _only_shapes.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _only_shapes.reset(token)
