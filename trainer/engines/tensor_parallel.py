"""Tensor parallelism: the layers of a model are split over processes that read the same data.

A column-wise layer is followed by a row-wise one, so that a pair needs one all-reduce (Shoeybi et
al., "Megatron-LM", 2019). Torch's ``parallelize_module`` splits the layers by a plan, a dict from
patterns of submodule names to a `ParallelStyle`. The plan is the attribute ``tp_plan`` of the
module or of submodules, such as the models of transformers. Without one, the user has split the
layers in ``configure_model``.

A layer with LoRA adapters of peft (Hu et al., 2021) is split with them: by columns together with
``lora_B``, whose outputs are added to the layer's; by rows with ``lora_A``, which reads its inputs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
)

from trainer.checks import choice_error
from trainer.torch_compat import parallelize_module

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
    # Norms of the heads that a process has: whichever dimension but the last is said to be split,
    # the computation is local, and the gradients of the whole weights are summed.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=0, use_local_output=True
    ),
}
# Those of the experts of a mixture, in plans for tensor and for expert parallelism.
_EXPERT_STYLES = {"moe_tp_experts", "packed_colwise", "grouped_gemm", "ep_dispatch_experts"}


def split_layers(
    module: nn.Module,
    mesh: DeviceMesh | None,
    *,
    only: Callable[[nn.Module], bool] = lambda _: True,
    around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Split the layers of a module by its plan, in place; tied weights stay tied.

    Args:
        module: The module, with the same weights on all processes.
        mesh: The mesh of the processes that share each layer; None if layers are whole.
        only: Says which layers to split, of those that the plan names; by default all.
        around: Returns a context in which a layer is split.

    Raises:
        ValueError: There is no plan, or a plan has an unknown style, names no submodule or one that
            its style cannot split, or splits tied weights in different ways.
    """
    if mesh is None:
        return
    plans = list(_plans(module))
    with keep_ties(module):
        for part, plan in plans:
            for name, layer, style in _named_by(part, plan):
                if only(layer):
                    _split(name, layer, style, mesh, around)
    if not plans and not any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            f"tp_size is {mesh.size()}, but {type(module).__name__} does not say which layers to "
            "split. Give it an attribute tp_plan, such as {'blocks.*.first': ColwiseParallel(), "
            "'blocks.*.second': RowwiseParallel()}; or call torch's parallelize_module in "
            "configure_model, with the mesh self.trainer.accelerator.torch_device_mesh['tp']."
        )


@contextmanager
def keep_ties(module: nn.Module) -> Iterator[None]:
    """Make tied weights one object again, if the block replaces each by itself.

    Raises:
        ValueError: The block has split them in different ways.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield
    for tied in names.values():
        _tie(module, tied)


def _named_by(
    part: nn.Module, plan: dict[str, Any]
) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """Yield the layers of a module that a plan names, and their styles."""
    for pattern, style in plan.items():
        layers = list(_matching(part, pattern))
        for name, layer in layers:
            yield name, layer, _style(style)
        if not layers and not _of_transformers(part):
            names = {re.sub(r"\b\d+\b", "*", name) for name, _ in part.named_modules() if name}
            key = f"A key of the tp_plan of {type(part).__name__}"
            raise ValueError(choice_error(key, pattern, names))


def _plans(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the outermost modules with a plan, and their plans."""
    plan = getattr(module, "tp_plan", None)
    if isinstance(plan, dict) and plan:
        # What wraps a model, as peft does, may show the model's plan as its own.
        if not _of_transformers(module) or any(any(_matching(module, key)) for key in plan):
            yield module, plan
            return
    elif plan not in (None, "auto", {}):
        raise ValueError(
            f"tp_plan of {type(module).__name__} is {plan!r}; it must be a dict from names of "
            "submodules to styles, or 'auto', which takes the plans of its submodules."
        )
    for child in module.children():
        yield from _plans(child)


def _of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, whose plan may name parts it lacks."""
    return hasattr(module, "supports_tp_plan")


def _matching(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules whose names match a pattern, part by part between the dots."""
    tokens = pattern.split(".")
    for name, part in module.named_modules():
        path = name.split(".")
        if len(path) == len(tokens) and all(map(fnmatch, path, tokens)):
            yield name, part


def _split(
    name: str,
    layer: nn.Module,
    style: ParallelStyle,
    mesh: DeviceMesh,
    around: Callable[[nn.Module], AbstractContextManager[Any]],
) -> None:
    """Split a layer, and adapters of peft in it."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # a layer with adapters has imported it
    if peft is not None and isinstance(layer, peft.BaseTunerLayer):
        for path, inner in _lora(name, layer, style):
            _split(path, inner, style, mesh, around)
        return
    try:
        with around(layer):
            parallelize_module(layer, mesh, style)
    except NotImplementedError as error:
        raise ValueError(
            f"tp_plan splits {name}, a {type(layer).__name__}, with {type(style).__name__}, "
            "which splits only nn.Linear and nn.Embedding. Leave it out to keep it whole, or use "
            "a custom ParallelStyle."
        ) from error


def _lora(name: str, layer: Any, style: ParallelStyle) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers that are split in a layer with LoRA adapters.

    Raises:
        ValueError: It has adapters of another kind.
    """
    layouts = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    by_columns = isinstance(style, ColwiseParallel) and layouts[0] == (Replicate(),)
    by_rows = isinstance(style, RowwiseParallel) and layouts[1] == (Replicate(),)
    adapters = {kind for kind in layer.adapter_layer_names if len(getattr(layer, kind, ()))}
    if adapters - {"lora_A", "lora_B"} or not (by_columns or by_rows):
        raise ValueError(
            f"tp_plan splits {name}, a {type(layer).__module__}.{type(layer).__name__} with "
            f"{', '.join(sorted(adapters))}, by {style!r}: only LoRA without DoRA, in linear "
            "layers by columns of whole inputs or by rows to whole outputs, can be split."
        )
    yield f"{name}.base_layer", layer.base_layer
    kind = "lora_B" if by_columns else "lora_A"
    yield from ((f"{name}.{kind}.{key}", part) for key, part in getattr(layer, kind).items())


def _style(style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style in _EXPERT_STYLES:
        raise NotImplementedError(
            f"The model's tp_plan splits its experts ({style!r}), which is not supported: leave "
            "tp_size out and shard them (fsdp_plugin), or give the module a tp_plan without them."
        )
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
