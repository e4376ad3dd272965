"""The weights of a stage that its processes share: sharded by FSDP2, split by tensor parallelism.

A stage runs many micro-batches forward and backward, in an order of its own. So its layers do not
gather their weights by themselves: `StageShards.gather` gathers those of the whole stage before a
batch, all of its micro-batches run with them, and `StageShards.reduce` reduce-scatters the
gradients once for a window. Torch's ``fully_shard`` does both, for modules that contain the layers
and are called for nothing else than a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.distributed.guards import read_back
from trainer.engines.absent import Absent
from trainer.engines.averaging import average_gradients_of
from trainer.engines.fsdp import check_dtypes, shard_unit
from trainer.engines.single import attribute_restorer
from trainer.engines.stage_layers import StageLayers
from trainer.engines.tensor_parallel import split_layers
from trainer.tree import leaves


class StageWeights:
    """The weights of a stage that each of its processes has whole.

    Args:
        layers: The layers of this process.
        replicas: The processes with the same layers, which read different data; None without any.
    """

    def __init__(self, layers: StageLayers, replicas: dist.ProcessGroup | None) -> None:
        self.layers, self._replicas = layers, replicas

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters with which micro-batches run, in the order of `StageLayers.own`."""
        return self.layers.own

    def gather(self) -> None:
        """Make the weights whole on each process, for micro-batches; collective."""

    def release(self) -> None:
        """Free the whole weights, if there are parts of them."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights for the block, if they are not already; collective."""
        yield

    def reduce(self) -> None:
        """Average the gradients of `parameters` over the replicas; they are in `StageLayers.own`.

        A missing gradient counts as zero; what no process has a gradient of keeps none. The call
        is collective.
        """
        if self._replicas is not None:
            average_gradients_of(self.layers.own, group=self._replicas)


class _Unit(nn.Module):
    """Modules whose parameters are gathered, and whose gradients are reduced, in one message.

    Args:
        parts: The modules.
        units: Other units, in the order in which they are gathered.
    """

    def __init__(self, parts: Iterable[nn.Module], units: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.units, self.parts = nn.ModuleList(units), nn.ModuleList(parts)

    def forward(self, nothing: Tensor) -> Tensor:
        """Let the backward pass reach all units, in which ``fully_shard`` reduces gradients."""
        for unit in self.units:
            nothing = unit(nothing)
        return nothing * 1


class StageShards(StageWeights):
    """The weights of a stage of which each process has parts.

    Args:
        module: The user's module, divided into stages.
        layers: The layers of this process.
        mesh: The mesh over which they are sharded and, in a first dimension, replicated.
    """

    def __init__(self, module: nn.Module, layers: StageLayers, mesh: DeviceMesh) -> None:
        self.layers, self.mesh = layers, mesh
        places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                places.setdefault(parameter, (part, name))  # tied parameters have several
        self._places = [places[parameter] for parameter in layers.own]
        before = list(layers.own)
        for parameter in before:  # `fully_shard` takes no other strides
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.contiguous()
        alone = _alone(module, layers)
        absent = {p for p in module.parameters() if isinstance(p, Absent)}
        check_dtypes(module, [*alone, module], absent)
        arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False}
        units: list[Any] = [_Unit([part]) for part in alone]
        for unit in units:
            shard_unit(unit, ignored_params=absent, **arguments)
        self._root: Any = _Unit([module], units)
        rest = absent | {p for unit in units for p in unit.parameters()}
        shard_unit(self._root, ignored_params=rest, **arguments)
        self._units = [*units, self._root]
        layers.replace(before, self._registered())
        with torch.no_grad():
            # Torch makes units of one root share their streams in the first forward pass alone; and
            # whole parameters must not be made in inference mode, where an evaluation may be.
            self._root(torch.zeros(1, device=mesh.device_type))
        self.release()

    def _registered(self) -> list[nn.Parameter]:
        return [getattr(part, key) for part, key in self._places]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The gathered parameters."""
        return self._registered()

    def _is_gathered(self) -> bool:
        return not any(
            found is own for found, own in zip(self._registered(), self.layers.own, strict=True)
        )

    def gather(self) -> None:
        """Gather the weights of the stage, one layer after the other; collective."""
        if self._is_gathered():
            return
        for unit in self._units:
            unit.unshard()
        for whole, own in zip(self.parameters, self.layers.own, strict=True):
            whole.requires_grad_(own.requires_grad)  # which may have changed since

    def release(self) -> None:
        """Put the shards in the place of the gathered weights."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights for the block, if they are not already; collective."""
        before = self._is_gathered()
        self.gather()
        try:
            yield
        finally:
            if not before:
                self.release()

    def reduce(self) -> None:
        """Reduce-scatter the gradients of gathered weights, and release these; collective."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        present = [parameter.grad is not None for parameter in trained]
        used = self._used_anywhere(present)
        for parameter, has, has_anywhere in zip(trained, present, used, strict=True):
            if has_anywhere and not has:  # all reduce the same tensors
                parameter.grad = torch.zeros_like(parameter)
        with torch.enable_grad():
            nothing = torch.zeros(1, device=self.mesh.device_type, requires_grad=True)
            self._root(nothing).backward()
        self.release()

    def _used_anywhere(self, present: list[bool]) -> list[bool]:
        """Return which parameters have a gradient on any process that has the same part of them."""
        if self.mesh.size() == 1:
            return present
        counts = torch.tensor(present, dtype=torch.float32)
        counts = counts.to(self.mesh.device_type, non_blocking=True)
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(counts, group=self.mesh.get_group(dimension))
        return present if all(present) else [count > 0 for count in read_back(counts).tolist()]


def _alone(module: nn.Module, layers: StageLayers) -> list[nn.Module]:
    """Return the layers of this process that share no parameter with other modules."""
    parts, plan = dict(module.named_modules()), layers.plan
    users: dict[int, set[int]] = {}
    for part in parts.values():
        for parameter in part.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(part))
    found = []
    for stage in layers.here:
        for layer in (parts[plan.layers[index]] for index in plan.range_of(stage)):
            inside = set(map(id, layer.modules()))
            own = list(layer.parameters())
            if own and all(users[id(parameter)] <= inside for parameter in own):
                found.append(layer)
    return found


# -- tensor parallelism ----------------------------------------------------------------------------


def split_stage(module: nn.Module, layers: StageLayers, mesh: DeviceMesh) -> None:
    """Split the layers of this process by the module's ``tp_plan``; collective.

    Args:
        module: The user's module, divided into stages.
        layers: The layers of this process.
        mesh: The processes that share each layer.

    Raises:
        ValueError: See `trainer.engines.tensor_parallel.split_layers`.
    """
    parts = list(module.modules())
    before = [dict(part.named_parameters(recurse=False)) for part in parts]
    here = {module.get_submodule(name) for name in layers.names_here()}
    # Tied weights are split alike where any of the modules that have them is.
    held = {id(part) for part in parts if any(_has_values(p) for p in part.parameters())}
    split_layers(
        module,
        mesh,
        only=lambda part: part in here or id(part) in held,
        around=_hooks_inside_forward,
    )
    replaced = {
        id(old): (old, getattr(part, key))
        for part, found in zip(parts, before, strict=True)
        for key, old in found.items()
        if getattr(part, key) is not old
    }
    if replaced:
        layers.replace(*map(list, zip(*replaced.values(), strict=True)))


def _has_values(parameter: Tensor) -> bool:
    return not isinstance(parameter, Absent)


@contextmanager
def _hooks_inside_forward(layer: nn.Module) -> Iterator[None]:
    """Let hooks that the block registers run inside the layer's ``forward``.

    There they are part of what a stage runs or leaves out. Where shapes alone are looked for, the
    layer runs without them, with its whole weights: its inputs and outputs are whole there.
    """
    whole = {
        (part, key): nn.Parameter(
            parameter if isinstance(parameter, Absent) else Absent(parameter, parameter.device),
            requires_grad=parameter.requires_grad,
        )
        for part in layer.modules()
        for key, parameter in part.named_parameters(recurse=False)
    }
    absent = [
        (part, key, parameter)
        for part in layer.modules()
        for key, parameter in part.named_parameters(recurse=False)
        if isinstance(parameter, Absent)
    ]
    before: list[tuple[Callable[..., Any], bool]] = []
    after: list[tuple[Callable[..., Any], bool]] = []
    undo = []
    for name, hooks in (("register_forward_pre_hook", before), ("register_forward_hook", after)):
        undo.append(attribute_restorer(layer, name))
        vars(layer)[name] = partial(_keep_hook, hooks)
    try:
        yield
    finally:
        for put_back in undo:
            put_back()
    for part, key, parameter in absent:
        setattr(part, key, parameter)
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Absent) for value in leaves([args, kwargs])):
            with _exchanged(whole):
                return forward(*args, **kwargs)
        for hook, with_kwargs in before:
            changed = hook(layer, args, kwargs) if with_kwargs else hook(layer, args)
            if with_kwargs and changed is not None:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        outputs = forward(*args, **kwargs)
        for hook, with_kwargs in after:
            given = (args, kwargs, outputs) if with_kwargs else (args, outputs)
            changed = hook(layer, *given)
            outputs = outputs if changed is None else changed
        return outputs

    layer.forward = run


def _keep_hook(
    hooks: list[tuple[Callable[..., Any], bool]],
    hook: Callable[..., Any],
    *,
    with_kwargs: bool = False,
) -> None:
    """Take the place of the methods that register forward hooks of a module."""
    hooks.append((hook, with_kwargs))


@contextmanager
def _exchanged(parameters: dict[tuple[nn.Module, str], nn.Parameter]) -> Iterator[None]:
    """Put other parameters in the place of those of modules, inside the block."""
    before = {(part, key): getattr(part, key) for part, key in parameters}
    try:
        for (part, key), parameter in parameters.items():
            setattr(part, key, parameter)
        yield
    finally:
        for (part, key), parameter in before.items():
            setattr(part, key, parameter)
