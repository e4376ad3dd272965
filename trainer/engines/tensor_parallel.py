"""Tensor parallelism: the layers of a model are split over processes that read the same data.

A column-wise layer is followed by a row-wise one, so that a pair needs one all-reduce (Shoeybi et
al., "Megatron-LM", 2019). Torch's ``parallelize_module`` splits the layers by a plan, a dict from
patterns of submodule names to a `ParallelStyle`. The plan is the attribute ``tp_plan`` of the
module or of submodules, such as the models of transformers. Without one, the user has split the
layers in ``configure_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.checks import choice_error

# The names of styles in the plans of transformers.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}


def split_layers(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Split the layers of a module by its plan, in place; tied weights stay tied.

    Args:
        module: The module, with the same weights on all processes.
        mesh: The mesh of the processes that share each layer; None if layers are whole.

    Raises:
        ValueError: There is no plan, or a plan has an unknown style, names no submodule, or
            splits tied weights in different ways.
    """
    if mesh is None:
        return
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = False
    for part, plan in _plans(module):
        found = True
        of_transformers = all(isinstance(style, str) for style in plan.values())
        for pattern, style in plan.items():
            if any(fnmatch(name, pattern) for name, _ in part.named_modules()):
                parallelize_module(part, mesh, {pattern: _style(style)})
            elif not of_transformers:
                raise ValueError(
                    f"tp_plan of {type(part).__name__} has the key {pattern!r}, which no submodule "
                    f"matches. Its submodules are {', '.join(n for n, _ in part.named_children())}."
                )
    if not found and not any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            f"tp_size is {mesh.size()}, but {type(module).__name__} does not say which layers to "
            "split. Give it an attribute tp_plan, such as {'blocks.*.first': ColwiseParallel(), "
            "'blocks.*.second': RowwiseParallel()}; or call torch's parallelize_module in "
            "configure_model, with the mesh self.trainer.accelerator.torch_device_mesh['tp']."
        )
    for tied in names.values():
        _tie(module, tied)


def _plans(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the outermost modules with a plan, and their plans."""
    plan = getattr(module, "tp_plan", None)
    if isinstance(plan, dict) and plan:
        yield module, plan
        return
    if plan not in (None, "auto", {}):
        raise ValueError(
            f"tp_plan of {type(module).__name__} is {plan!r}; it must be a dict from names of "
            "submodules to styles, or 'auto', which takes the plans of its submodules."
        )
    for child in module.children():
        yield from _plans(child)


def _style(style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in _STYLES:
        raise ValueError(choice_error("a style of tp_plan", style, _STYLES))
    return _STYLES[style]()


def _tie(module: nn.Module, names: list[str]) -> None:
    """Make parameters of these names one object again, after each was split by itself."""
    first, *others = (module.get_parameter(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other is first:
            continue
        if getattr(other, "placements", None) != getattr(first, "placements", None):
            raise ValueError(
                f"{names[0]} and {name} are the same parameter, but tp_plan splits them in "
                "different ways. An embedding by rows fits a linear layer by columns."
            )
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, first)
