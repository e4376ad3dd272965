"""Fully sharded data parallelism: each process holds a part of every parameter (FSDP2).

Parameters, gradients and optimizer state are split over the processes by torch's ``fully_shard``
(Zhao et al., "PyTorch FSDP", VLDB 2023; Rajbhandari et al., "ZeRO", SC 2020). A unit, such as a
block of a transformer, gathers its parameters before its forward and backward passes, and
reduce-scatters its gradients after backward. So a forward pass is collective: a process without a
batch runs a dummy batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import all_gather_object
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.base import EngineOptions
from trainer.engines.single import SingleDevice
from trainer.engines.tensor_parallel import split_layers
from trainer.names import bare_names
from trainer.optim.clipping import clip_
from trainer.optim.finite import find_non_finite
from trainer.optim.weighting import scale_
from trainer.parallelism import FullyShardedDataParallelPlugin, ParallelismConfig
from trainer.state import PartialState

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_GRADIENT = attrgetter("grad")


class FullyShard(SingleDevice):
    """Engine on torch's FSDP2; see `trainer.engines.base.Engine` for the methods."""

    forward_is_collective = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.plugin = options.fsdp_plugin or FullyShardedDataParallelPlugin()
        self.mesh = options.mesh or _root_mesh(options, self.plugin)
        self.options = replace(options, mesh=self.mesh)  # a fit's engine has the same one
        names = self.mesh.mesh_dim_names or ()
        shards = tuple(name for name in names if name != "tp")
        # The mesh over which parameters are sharded and, in its first dimension, replicated.
        self._data_mesh = self.mesh[shards]
        self.data_rank, self.data_size = 0, 1
        for name in shards:
            self.data_rank = self.data_rank * self.mesh[name].size() + self.mesh.get_local_rank(
                name
            )
            self.data_size *= self.mesh[name].size()
        self._tp_mesh = self.mesh["tp"] if "tp" in names else None
        self.counts_data = self._tp_mesh is None or self._tp_mesh.get_local_rank() == 0
        # By the id of each parameter that was replaced; the old ones are kept so that no id recurs.
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._dummy = False
        self._handles: list[Any] = []
        self._order: list[Any] = []
        self._noting: list[Any] = []

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put the sharded parameters into an optimizer that was made with the whole ones."""
        mixed = False
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(id(p), (p, p))[1] for p in group["params"]]
            mixed |= len(set(map(mesh_of, group["params"]))) > 1
        if mixed:  # foreach kernels take only tensors of one mesh
            for group in optimizer.param_groups:
                if "foreach" in group:
                    group["foreach"] = False
        return optimizer

    # -- placing -----------------------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,  # noqa: ARG002 - the shards are on the mesh's device
        evaluation_mode: bool = False,  # noqa: ARG002 - an interface
    ) -> nn.Module:
        """Shard a module in place."""
        if not isinstance(module, FSDPModule):
            self._shard(module)
        return module

    def _shard(self, module: nn.Module) -> None:
        plugin = self.plugin
        before = dict(module.named_parameters(remove_duplicate=False))
        whole = self._rank_0s_weights(module)
        split_layers(module, self._tp_mesh)
        units: list[Any] = list(units_of(module, plugin))
        if plugin.activation_checkpointing:
            for unit in units:
                _checkpoint_activations(unit)
        ignored = {
            parameter
            for name, part in module.named_modules()
            if plugin.ignores(name, part)
            for parameter in part.parameters()
        }
        named = bare_names(module, module.named_parameters())
        if trained := [name for name, p in named if p in ignored and p.requires_grad]:
            raise ValueError(
                f"{', '.join(trained)} are trained, but are ignored by the plugin's "
                "ignored_modules: FSDP would not average their gradients over the processes. "
                "Freeze them with requires_grad_(False), or do not ignore them."
            )
        arguments: dict[str, Any] = {
            "mesh": self._data_mesh,
            "mp_policy": plugin.policy(),
            "offload_policy": plugin.offload(self.options.device),
            "ignored_params": ignored,
        }
        for unit in reversed(units):  # inner ones first
            fully_shard(unit, reshard_after_forward=plugin.reshard_after_forward, **arguments)
        fully_shard(module, **arguments)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # A process may leave out a parameter that others use: all reduce the same tensors.
                part.set_reduce_scatter_unused_params(True)
        if plugin.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in before:
                self._replaced[id(before[name])] = before[name], parameter
        if whole is not None:
            self._materialise(module, whole)

    def _rank_0s_weights(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Make rank 0's weights everybody's, before the module is sharded; collective.

        Returns:
            None if it is done. If a process has tensors on the meta device: rank 0's whole weights,
            from which `_materialise` fills the shards; {} on the other processes.
        """
        tensors = [*module.parameters(), *module.buffers()]
        on_meta = any(tensor.is_meta for tensor in tensors)
        if not any(all_gather_object(on_meta)):
            # `fully_shard` takes each process's own rows, without a broadcast. Only one tensor at a
            # time is on the device, where the whole module may not fit.
            for tensor in tensors:
                if isinstance(tensor, DTensor):  # the user has split it over tp
                    self._broadcast_part(tensor.to_local())
                    continue
                sent = tensor.detach().to(self.options.device)
                broadcast([sent])
                if sent is not tensor:
                    tensor.data.copy_(sent)
            return None
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ValueError(
                f"Parameters of {type(module).__name__} are on the meta device, and others are "
                "split over processes already: leave parallelize_module to an attribute tp_plan."
            )
        whole: dict[str, Tensor] = {}
        if self.options.rank == 0:
            if on_meta:
                _initialise(module, self.plugin.param_init_fn)
            whole = {name: each.detach().cpu() for name, each in module.state_dict().items()}
        module.to("meta")
        return whole

    def _materialise(self, module: nn.Module, whole: dict[str, Tensor]) -> None:
        """Fill the shards with rank 0's weights, one tensor at a time; collective."""
        module.to_empty(device=self.options.device)
        with torch.no_grad():
            for name, target in module.state_dict().items():
                source = whole.pop(name, None)
                if source is None:
                    source = torch.empty(target.shape, dtype=target.dtype)
                source = source.to(self.options.device)
                if isinstance(target, DTensor) and self._tp_mesh is not None:
                    broadcast([source])
                    _fill_part(target, source)
                elif isinstance(target, DTensor):
                    part = distribute_tensor(source, target.device_mesh, target.placements)
                    target.to_local().copy_(part.to_local())
                else:
                    broadcast([source])
                    target.copy_(source)

    def _broadcast_part(self, part: Tensor) -> None:
        """Make the first replica's part of a layer everybody's who holds this part; collective."""
        for name in reversed(self._data_mesh.mesh_dim_names or ()):
            torch.distributed.broadcast(part, group=self.mesh.get_group(name), group_src=0)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep whole gradients in backward, instead of reducing them."""
        return _unsynced(module) if isinstance(module, FSDPModule) else nullcontext()

    @contextmanager
    def trigger_sync(self, module: nn.Module) -> Iterator[None]:
        """Reduce all gradients in the next backward."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True)
        yield

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors on the host of rank 0, and {} elsewhere; collective."""
        whole: dict[str, Any] = {}
        tied: dict[int, Any] = {}
        for name, value in bare_names(module, module.state_dict(keep_vars=True).items()):
            here = tied.get(id(value), value)
            if isinstance(value, Tensor) and id(value) not in tied:
                here = value.full_tensor() if isinstance(value, DTensor) else value
                tied[id(value)] = here = here.detach().cpu() if self.options.rank == 0 else None
            if self.options.rank == 0:
                whole[name] = here
        return whole

    def settle(self, module: nn.Module, *, drops_gradients: bool = False) -> None:
        """Put the shards in the place of gathered parameters.

        Raises:
            RuntimeError: Gradients of micro-batches were not reduced yet: each process keeps its
                own whole ones, outside the parameters.
        """
        parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.reshard()
            for held in _held(part):
                gradients = held.unsharded_accumulated_grad, held._unsharded_param.grad
                if drops_gradients:
                    held.unsharded_accumulated_grad = held._unsharded_param.grad = None
                elif any(each is not None for each in gradients):
                    raise RuntimeError(
                        f"{type(module).__name__} has gradients of micro-batches without "
                        "synchronisation (no_sync, or accumulate before the end of its window), "
                        "which FSDP keeps whole on each process: save at the end of a window, "
                        "under `if accelerator.sync_gradients:`, or pass "
                        "GradientAccumulationPlugin(sync_each_batch=True)."
                    )

    # -- the steps of a fit ------------------------------------------------------------------------

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Shard the module, and gather its parameters around its steps."""
        self.module = module
        if step_sync is not None:
            self.step_sync = step_sync
        if not isinstance(module, FSDPModule):
            self._shard(module)
        self._noting = [
            unit.register_forward_pre_hook(lambda part, _: self._note(part))
            for unit in self._all_units()
            if unit is not module
        ]
        for name in _STEPS:
            vars(module)[name] = self._watched(getattr(type(module), name).__get__(module))
            register_fsdp_forward_method(module, name)

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step so that the gradients of a dummy batch are zero."""

        @wraps(step)
        def run(*args: Any) -> Any:
            self._note(self.module)
            output = step(*args)
            if self._dummy:
                self._zero_gradients_of(self.module)
            return output

        return run

    def _zero_gradients_of(self, unit: nn.Module) -> None:
        """Make the next gradients of a unit's gathered parameters zero.

        They are replaced, not multiplied: infinity × 0 is NaN.
        """
        for parameter in own_parameters(unit):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(torch.zeros_like))

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Reduce gradients only in the last backward of a window."""
        root: Any = self.module
        root.set_requires_gradient_sync(sync)

    def dummy_step(
        self, rerun: Callable[[], Tensor], stats: StepStats | None = None
    ) -> float | Tensor:
        """Run the dummy batch with zero gradients, to join the collectives of the others."""
        self._dummy = True
        # They run before FSDP's own hooks, which release the gathered parameters.
        self._handles = [
            unit.register_forward_hook(lambda part, *_: self._zero_gradients_of(part), prepend=True)
            for unit in self._all_units()
            if unit is not self.module
        ]
        try:
            rerun().backward()
        finally:
            self._dummy = False
            for handle in self._handles:
                handle.remove()
        return 0.0 if stats is None else self.sync_stats(stats)

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """All-reduce the step stats of a window."""
        total = self.step_sync.sync_vector(stats)
        sum_numbers(total)
        return self.step_sync.count(total)

    # -- evaluation --------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Release gathered parameters at the end: a callback may change the sharded ones."""
        self._order = []
        try:
            yield
        finally:
            for unit in self._all_units():
                unit.reshard()

    def evaluate_without_batch(self) -> None:
        """Gather and release the parameters of all units, in the order of the last forward pass."""
        for unit in self._order or self._all_units():
            unit.unshard()
            if unit is not self.module:  # whose parameters stay gathered between forward passes
                unit.reshard()

    def _all_units(self) -> list[Any]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def _note(self, unit: nn.Module) -> None:
        """Note the order in which units run in a forward pass."""
        if unit is self.module:
            self._order = []
        self._order.append(unit)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes."""
        broadcast(list(self.module.buffers()))

    def close(self) -> None:
        """Stop to note the order of units; the module stays sharded."""
        for handle in self._noting:
            handle.remove()

    # -- the update --------------------------------------------------------------------------------

    def scale_gradients_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a tensor of shape (), in place."""
        for group in by_mesh(parameters):
            scale_(map(_GRADIENT, group), factor)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        found: bool | Tensor | None = None
        for group in by_mesh(parameters):
            here = find_non_finite(map(_GRADIENT, group))
            if isinstance(found, Tensor) and isinstance(here, Tensor):
                here = torch.maximum(found, here)
            found = here if found is None or isinstance(here, Tensor) else found or bool(here)
        return found

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before."""
        groups = by_mesh(parameters)
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], norm_type)
            for group in groups
        ]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(whole), norm_type)
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients."""
        for group in by_mesh(parameters):
            clip_(group, max_value=max_value)


def _fill_part(target: Any, whole: Tensor) -> None:
    """Copy this process's part of a tensor into a sharded one."""
    local = target.to_local()
    if local.numel():
        (chunk,) = target.__create_chunk_list__()  # what torch.distributed.checkpoint asks, too
        places = zip(chunk.offsets, chunk.sizes, strict=True)
        local.copy_(whole[tuple(slice(start, start + size) for start, size in places)])


def _root_mesh(options: EngineOptions, plugin: FullyShardedDataParallelPlugin) -> DeviceMesh:
    """Return the mesh of all processes: replicas, shards of one, and parts of a layer."""
    given = config = options.parallelism_config
    if config is None:
        replicas = options.world_size // PartialState()._local_world_size if plugin.hybrid else 1
        config = ParallelismConfig(
            dp_replicate_size=replicas,
            dp_shard_size=options.world_size // replicas,
            tp_size=1,
            cp_size=1,
            sp_size=1,
        )
    sizes: dict[str, int] = {
        name: getattr(config, f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp")
    }
    kept = {name: size for name, size in sizes.items() if size != 1 or name == "dp_shard"}
    mesh = init_device_mesh(options.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if given is not None:
        given.device_mesh = mesh
    return mesh


def units_of(module: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Iterator[nn.Module]:
    """Yield the submodules that gather their parameters by themselves, outer ones first.

    Raises:
        ValueError: No submodule has one of the classes that were named.
    """
    policy = plugin.auto_wrap_policy
    if policy == "NO_WRAP":
        return
    parts = [part for part in module.modules() if part is not module]
    if callable(policy):
        yield from filter(policy, parts)
    elif policy == "SIZE_BASED_WRAP":
        yield from _by_size(module, plugin.min_num_params or 0)
    else:
        names = plugin.transformer_cls_names_to_wrap
        if names is None:
            names = [
                n for part in module.modules() for n in getattr(part, "_no_split_modules", ()) or ()
            ]
        found = [part for part in parts if type(part).__name__ in names]
        if names and not found:
            raise ValueError(
                f"transformer_cls_names_to_wrap names {', '.join(names)}, but "
                f"{type(module).__name__} has no submodule of such a class."
            )
        yield from found


def _by_size(module: nn.Module, least: int) -> Iterator[nn.Module]:
    """Yield submodules of at least so many parameters that no unit inside them holds."""
    chosen: list[nn.Module] = []

    def rest(part: nn.Module) -> int:
        left = sum(p.numel() for p in part.parameters(recurse=False))
        left += sum(map(rest, part.children()))
        if left < least or part is module or isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            return left
        chosen.append(part)
        return 0

    rest(module)
    yield from reversed(chosen)


def _checkpoint_activations(unit: nn.Module) -> None:
    """Recompute a submodule's activations in backward; the names of its parameters stay."""
    forward = unit.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    unit.forward = run


def _initialise(module: nn.Module, function: Callable[[nn.Module], None] | None) -> None:
    """Give the parts of a module that are on the meta device memory and initial values.

    Raises:
        ValueError: A part has no ``reset_parameters``.
    """
    for part in list(module.modules()):
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        part.to_empty(device="cpu", recurse=False)
        reset: Any = getattr(part, "reset_parameters", None)
        if function is not None:
            function(part)
        elif reset is not None:
            reset()
        else:
            raise ValueError(
                f"{type(part).__name__} is on the meta device and has no reset_parameters; pass "
                "FullyShardedDataParallelPlugin(param_init_fn=...), which initialises a module."
            )


def _held(part: Any) -> Iterator[Any]:
    """Yield torch's records of the parameters that a unit has gathered before."""
    for group in part._get_fsdp_state()._fsdp_param_groups:
        yield from (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))


@contextmanager
def _unsynced(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that are not those of a unit inside it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh of a sharded tensor; None for a plain one."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group parameters that have gradients by their mesh, as torch's foreach kernels need it."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(mesh_of(parameter), []).append(parameter)
    return list(groups.values())
