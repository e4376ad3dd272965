"""Fully sharded data parallelism: each process holds a part of every parameter (FSDP2).

Parameters, gradients and optimizer state are split over the processes by torch's ``fully_shard``
(Zhao et al., "PyTorch FSDP", VLDB 2023; Rajbhandari et al., "ZeRO", SC 2020). A unit, such as a
block of a transformer, gathers its parameters before its forward and backward passes, and
reduce-scatters its gradients after backward. So a forward pass is collective: a process without a
batch runs a dummy batch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import chain, pairwise, zip_longest
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from trainer.checks import choice_error
from trainer.configuration import FullyShardedDataParallelPlugin, ParallelismConfig
from trainer.configuration.parallelism import device_mesh
from trainer.distributed.collectives import broadcast
from trainer.distributed.guards import read_back
from trainer.distributed.objects import all_gather_object
from trainer.distributed.parallel import Parallel
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import HostCopy, sum_numbers
from trainer.engines.base import EngineOptions, Gradients, Weights, gathered_on_first
from trainer.engines.compile import is_compiled, torch_arguments
from trainer.engines.context_parallel import checkpoint_options
from trainer.engines.single import STEPS, SingleDevice, attribute_restorer
from trainer.engines.tensor_parallel import keep_ties, split_layers
from trainer.enums import DynamoBackend
from trainer.errors import module_logger
from trainer.names import bare_names
from trainer.optim.finite import find_non_finite
from trainer.optim.lomo import is_lomo
from trainer.optim.weighting import scale_
from trainer.rng import load_rng_state, rng_state
from trainer.state import PartialState
from trainer.torch_compat import fsdp_groups, reduce_unused_parameters
from trainer.tree import fill_, part_here

logger = module_logger(__name__)

_NEED_WHOLE_TENSORS = {  # optimizers by name, and why
    "Adafactor": "torch cannot compute its row and column norms on shards",
    "LBFGS": "the loss of one process decides how often all processes run forward",
    "Rprop": "torch cannot compute its sign-based steps on shards",
}


class FullyShard(SingleDevice):
    """Engine on torch's FSDP2; see `trainer.engines.base.Engine` for the methods."""

    gradients: ShardedGradients

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if options.ddp_kwargs is not None and options.ddp_kwargs.comm_hook != "no":
            raise ValueError(
                f"DistributedDataParallelKwargs(comm_hook={options.ddp_kwargs.comm_hook.value!r}) "
                "compresses the all-reduce of DDP, which sharded models do not have. Leave it out; "
                "FullyShardedDataParallelPlugin(mixed_precision_policy=...) has a reduce_dtype."
            )
        self.plugin = options.fsdp_plugin or FullyShardedDataParallelPlugin()
        self.plugin.tell_transformers()
        mesh = options.mesh or _root_mesh(options, self.plugin)
        self.options = replace(options, mesh=mesh)  # a fit's engine has the same one
        names = mesh.mesh_dim_names or ()
        shards = tuple(name for name in names if name != "tp")
        # The mesh for sharding; parameters are replicated over its first dimension.
        self._data_mesh = mesh[shards]
        rank, size = rank_along(mesh, shards)
        # Processes that share sequences read the same data, and have different parts of the model.
        config = options.parallelism_config
        sharing = 1 if config is None or config.cp_size is None else config.cp_size
        dp_rank, part = divmod(rank, sharing)
        self._tp_mesh = mesh["tp"] if "tp" in names else None
        if self._tp_mesh is not None and options.fp8_layers is not None:
            raise NotImplementedError(
                "mixed_precision='fp8' is not supported with tensor parallel layers (tp_size "
                "above 1): use mixed_precision='bf16', or shard the model only with "
                "dp_shard_size."
            )
        logs = self._tp_mesh is None or self._tp_mesh.get_local_rank() == 0
        self.parallel = Parallel(
            dp_rank=dp_rank,
            dp_size=size // sharing,
            is_data_primary=logs and part == 0,
            is_log_primary=logs,
            mesh=mesh,
            forward_is_collective=True,
        )
        # Replaced parameters by id. The old ones are kept, without their memory, so that ids stay
        # unique.
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.gradients = ShardedGradients(options, self._replaced)
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._ignored: list[nn.Parameter] = []  # frozen and not sharded
        self._roots: list[Any] = []  # which gather their parameters and those of units inside them
        self._units: list[Any] = []  # roots and the units inside them, in the same order everywhere
        self._ran: list[int] = []  # the units that ran in this window or evaluation, by index
        self._held: list[Any] = []  # torch's records of the parameters of all units
        self._used: set[Any] = set()  # parameters with a local gradient that is not yet reduced
        self.weights = ShardedWeights(options.rank, self._used)
        self._reduced: list[Any] = []  # those that had no gradient before the latest backward
        self._watches: dict[Any, Any] = {}  # handles of hooks that note which are used
        self._checked: tuple[HostCopy, list[int]] | None = None
        self._reduces: bool | None = None  # in the next backward; None if that is not known
        self._handles: list[Any] = []
        self._undo: list[Callable[[], Any]] = []

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put the sharded parameters into an optimizer that was made with the whole ones.

        Parameters of modules that are prepared later are replaced at that time.

        Raises:
            ValueError: It needs whole tensors.
        """
        check_takes_shards(optimizer, "fsdp_plugin (--use_fsdp)")
        self._replace_parameters(optimizer)
        if isinstance(optimizer, Optimizer):
            self._optimizers.add(optimizer)
            # A forward pass between backward and the update has gathered the old parameters.
            optimizer.register_step_post_hook(self._release)
        return optimizer

    def _replace_parameters(self, optimizer: Optimizer) -> None:
        """Put sharded parameters, and the state of whole ones, into an optimizer."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in self._replaced:
                    group["params"][index] = new = self._replaced[id(parameter)][1]
                    if parameter in optimizer.state:
                        state = optimizer.state.pop(parameter)
                        optimizer.state[new] = {
                            name: _as_shards(value, new) for name, value in state.items()
                        }
        disable_mixed_foreach(optimizer)

    def _release(self, *_: Any) -> None:
        """Put the shards in the place of gathered parameters."""
        for unit in self._units:
            unit.reshard()

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
            self._shard(module, [module])
        self._units += _units_in(module)
        self._held = [held for unit in self._units for held in _held(unit)]
        return module

    def _shard(self, module: nn.Module, roots: list[nn.Module]) -> None:
        _check_dense(module)
        self._check_not_shared(roots)
        self._share_generators()
        before = dict(module.named_parameters(remove_duplicate=False))
        whole = self._rank_0s_weights(module)
        if self.options.fp8_layers is not None:
            self.options.fp8_layers.gather_in_fp8(module)
        split_layers(module, self._tp_mesh)
        units: list[Any] = self._units_to_shard(module)
        self._fully_shard(module, roots, [unit for unit in units if unit not in roots])
        for name, parameter in module.named_parameters(remove_duplicate=False):
            old = before.get(name, parameter)
            if old is not parameter:
                self._replaced[id(old)] = old, parameter
                free(old)
        if whole is not None:
            self._materialise(module, whole)
        for optimizer in self._optimizers:
            self._replace_parameters(optimizer)

    def _fully_shard(self, module: nn.Module, roots: list[nn.Module], units: list[Any]) -> None:
        """Call torch's `fully_shard` on each unit and root."""
        plugin = self.plugin
        for parameter in module.parameters():  # `fully_shard` needs contiguous tensors
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.contiguous()
        ignored = self._ignored_parameters(module)
        arguments: dict[str, Any] = {
            "mesh": self._data_mesh,
            "mp_policy": plugin.policy(self.options.mixed_precision),
            "offload_policy": plugin.offload(self.options.device),
            "ignored_params": ignored,
        }
        norms: list[Any] = []
        if arguments["mp_policy"].param_dtype is not None:
            # Batch normalisation needs weights with the dtype of its statistics.
            sharded = {*units, *roots}
            norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
            norms = [each for each in norms if each.affine and each not in sharded]
        check_dtypes(module, {*units, *roots, *norms}, ignored)
        wide = MixedPrecisionPolicy(cast_forward_inputs=False)
        for norm in norms:
            shard_unit(norm, **{**arguments, "mp_policy": wide})
        for unit in reversed(units):  # inner ones first
            shard_unit(unit, reshard_after_forward=plugin.reshard_after_forward, **arguments)
        for root in roots:
            # Inner roots may run forward without backward, and are stepped even then.
            released = None if root is module else True
            shard_unit(root, reshard_after_forward=released, **arguments)
        for part in _units_in(module):
            # All processes must reduce the same tensors, even if one does not use a parameter.
            reduce_unused_parameters(part)
        self._prefetch(units)

    def _ignored_parameters(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of ignored modules, on the device.

        Raises:
            ValueError: Some are trained.
        """
        ignored = {
            parameter
            for name, part in module.named_modules()
            if self.plugin.ignores(name, part)
            for parameter in part.parameters()
        }
        named = bare_names(module, module.named_parameters())
        if trained := [name for name, p in named if p in ignored and p.requires_grad]:
            raise ValueError(
                f"{', '.join(trained)} are trained, but the plugin's ignored_modules excludes "
                "them: FSDP would not average their gradients over the processes. Freeze them "
                "with requires_grad_(False), or do not ignore them."
            )
        for parameter in ignored:  # which `fully_shard` leaves where they are
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.options.device)
        self._ignored += ignored
        return ignored

    def _units_to_shard(self, module: nn.Module) -> list[nn.Module]:
        """Return the units; recompute their activations in backward if the plugin requests it.

        Units that share a parameter with modules outside are skipped; their parents gather it.

        Raises:
            ValueError: Activations are to be recomputed, but there are no units.
        """
        owners: dict[int, set[int]] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(id(part))
        kept: list[nn.Module] = []
        left: list[nn.Module] = []
        for unit in units_of(module, self.plugin):
            inside = set(map(id, unit.modules()))
            alone = all(owners[id(parameter)] <= inside for parameter in unit.parameters())
            (kept if alone else left).append(unit)
        if left and self.options.rank == 0:
            names = {part: name for name, part in module.named_modules()}
            logger.warning(
                "%s share parameters with other submodules of %s, and are gathered together "
                "with them.",
                ", ".join(names[unit] for unit in left),
                type(module).__name__,
            )
        if self.plugin.activation_checkpointing:
            if not kept + left:
                raise ValueError(
                    "activation_checkpointing recomputes the activations of each unit, but the "
                    f"plugin creates no units in {type(module).__name__}: choose an "
                    "auto_wrap_policy, such as transformer_cls_names_to_wrap "
                    "(--fsdp_transformer_layer_cls_to_wrap), or leave it out."
                )
            for unit in kept + left:
                checkpoint_activations(
                    unit, offload=bool(self.plugin.activation_checkpointing_offload)
                )
        return kept

    def _check_not_shared(self, roots: list[nn.Module]) -> None:
        """Raise a ValueError if a parameter is also in another model, or in two roots."""
        owners: dict[int, nn.Module] = {}
        for root in roots:
            for name, parameter in root.named_parameters():
                other = owners.setdefault(id(parameter), root)
                if other is not root or id(parameter) in self._replaced:
                    where = f"{type(other).__name__} and {type(root).__name__}, which"
                    if other is root:
                        where = f"{type(root).__name__} and a model that was prepared before, which"
                    raise ValueError(
                        f"The parameter {name!r} is shared by {where} gather their parameters "
                        "separately. Put both into one module and prepare that module (in manual "
                        "optimisation, call its forward)."
                    )

    def _share_generators(self) -> None:
        """Make processes that share layers draw the same numbers, such as for dropout."""
        if self._tp_mesh is not None:
            states: list[Any] = [None] * self._tp_mesh.size()
            group = self._tp_mesh.get_group()
            torch.distributed.all_gather_object(states, rng_state(), group=group)
            load_rng_state(states[0])

    def _prefetch(self, units: list[Any]) -> None:
        """Gather the next unit's parameters while a unit runs, if the plugin requests it."""
        if self.plugin.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])

    def _rank_0s_weights(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Broadcast rank 0's weights before the module is sharded; collective.

        Returns:
            None if the weights were broadcast. If a process has tensors on the meta device: on rank
            0 the whole weights, from which `_materialise` fills the shards, and {} on other ranks.
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
                f"Some parameters of {type(module).__name__} are on the meta device, and others "
                "are already split over processes: use an attribute tp_plan instead of calling "
                "parallelize_module."
            )
        whole: dict[str, Tensor] = {}
        with keep_ties(module):
            if self.options.rank == 0:
                if on_meta:
                    _initialise(module, self.plugin.param_init_fn)
                whole = {name: value.detach().cpu() for name, value in _named_tensors(module)}
            module.to("meta")
        return whole

    def _materialise(self, module: nn.Module, whole: dict[str, Tensor]) -> None:
        """Fill the shards with rank 0's weights, one tensor at a time; collective."""
        offloads = isinstance(self.plugin.offload(self.options.device), CPUOffloadPolicy)
        with keep_ties(module):
            module.to_empty(device="cpu" if offloads else self.options.device)
        with torch.no_grad():
            for name, target in _named_tensors(module):
                source = whole.pop(name, None)
                if source is None:
                    source = torch.empty(target.shape, dtype=target.dtype)
                source = source.to(self.options.device)
                if isinstance(target, DTensor) and self._tp_mesh is not None:
                    broadcast([source])
                    fill_(target, source)
                elif isinstance(target, DTensor):
                    part = distribute_tensor(source, target.device_mesh, target.placements)
                    part_here(target).copy_(part.to_local())
                else:
                    broadcast([source])
                    target.copy_(source)
        for owner in module.modules() if offloads else ():  # only parameters are
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(self.options.device))

    def _broadcast_part(self, part: Tensor) -> None:
        """Make the first replica's part of a layer everybody's who holds this part; collective."""
        for name in reversed(self._data_mesh.mesh_dim_names or ()):
            torch.distributed.broadcast(part, group=self.parallel.mesh.get_group(name), group_src=0)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep whole gradients in backward, instead of reducing them."""
        self._reduces = None
        return _unsynced(module) if isinstance(module, FSDPModule) else nullcontext()

    @contextmanager
    def trigger_sync(self, module: nn.Module) -> Iterator[None]:
        """Reduce all gradients in the next backward."""
        self._reduces = None
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True)
        yield

    # -- the steps of a fit ------------------------------------------------------------------------

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Shard the module, and gather its parameters around its steps.

        In manual optimisation ``training_step`` may run several forward and backward passes, so
        that each child of the module gathers its own parameters.

        Raises:
            ValueError: In manual optimisation, the module has trained parameters of its own. Or the
                user has compiled a unit.
        """
        self.module, self._reduces = module, None
        if step_sync is not None:
            self.step_sync = step_sync
        automatic = getattr(module, "automatic_optimization", True)
        self._roots = [module] if automatic else list(_children_of_manual(module))
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            self._shard(module, self._roots)
        self._units = _units_in(module)
        self._held = [held for unit in self._units for held in _held(unit)]
        _check_not_compiled(module)
        for root in self._roots:
            # `unshard` of a unit inside does not do it; there is no public name.
            root._get_fsdp_state()._lazy_init()
        for index, unit in enumerate(self._units):
            if unit is not module:
                note = partial(self._note, index)
                self._undo.append(unit.register_forward_pre_hook(note, prepend=True).remove)
        self._compile_units()
        if automatic:
            # The hook is on the loss; on the module's output, a view could lose it.
            kind = re.escape(f"FSDP2-wrapped module ({type(module).__name__}) returned a view")
            warnings.filterwarnings("ignore", kind)
            for name in STEPS:
                self._undo.append(attribute_restorer(module, name))
                vars(module)[name] = self._watched(getattr(module, name))
                register_fsdp_forward_method(module, name)

    def compiled_steps(
        self, module: nn.Module, names: Iterable[str]
    ) -> AbstractContextManager[None]:
        """Compile no whole step: `start` compiles the units."""
        del names
        return super().compiled_steps(module, ())

    def _compile_units(self) -> None:
        """Compile the forward of each unit, which FSDP's hooks surround.

        Raises:
            ValueError: There are no units besides the whole module.
        """
        compiler = self.options.dynamo_plugin
        if compiler is None or compiler.backend == DynamoBackend.NO or compiler.disable:
            return
        arguments = torch_arguments(compiler)
        units = [unit for unit in self._units if unit is not self.module]
        if not units:
            raise ValueError(
                f"dynamo_backend is {str(compiler.backend).lower()!r}, which compiles each unit "
                "of a sharded model, but the plugin creates no units: choose an "
                "auto_wrap_policy, such as transformer_cls_names_to_wrap "
                "(--fsdp_transformer_layer_cls_to_wrap), or leave dynamo_backend out."
            )
        for unit in units:
            self._undo.append(attribute_restorer(unit, "forward"))
            unit.forward = torch.compile(unit.forward, **arguments)

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step so that the gradients of a dummy batch are zero."""

        @wraps(step)
        def run(*args: Any) -> Any:
            output = step(*args)
            if self._in_dummy:
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

    def check_unknown_parameters(self) -> None:
        """Check that each gradient belongs to a parameter that was sharded.

        Raises:
            RuntimeError: Parameters were added or unfrozen that FSDP does not reduce.
        """
        trained = any(parameter.requires_grad for parameter in self._ignored)
        named = self.module.named_parameters() if hasattr(self, "module") else ()
        plain = [n for n, p in named if p.grad is not None and not isinstance(p, DTensor)]
        if trained or plain:
            raise RuntimeError(
                f"{', '.join(plain) or 'Some parameters of ignored_modules'} got gradients that "
                "FSDP does not average over the processes: they were added after the model was "
                "sharded, or belong to ignored_modules and were unfrozen. Add parameters in "
                "configure_model or before, and remove modules that are trained later from "
                "ignored_modules."
            )

    # ARG002: an interface
    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:  # noqa: ARG002
        """Reduce gradients only in the last backward of a window."""
        sync = sync or self.options.sync_each_batch
        if sync is not self._reduces:  # torch visits all submodules to set it
            for root in self._roots:
                root.set_requires_gradient_sync(sync)
            self._reduces = sync

    def begin_epoch(self) -> None:
        """Replace parameters that a hook has gathered by their shards."""
        self._release()

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a micro-batch; unused parameters have none."""
        self._complete_windows()
        before = self._without_gradient()
        if loss is not None:
            self._run_backward(loss, *args, **kwargs)
        self._reduced = [held for held in before if held.sharded_param.grad is not None]
        items: float | Tensor = 0.0
        if stats is not None:
            items = self.sync_stats(stats)
        elif self._reduced:  # the same on all processes, as each unit reduces all that it has
            counts = self._on_device(self._flags_of_use())
            sum_numbers(counts)
            self._drop_unused(counts)
        # In place: `weights` has the same set.
        self._used -= {held for held in self._used if not _is_unreduced(held)}
        return items

    def _complete_windows(self) -> None:
        """Prepare parameters that a window of micro-batches does not use, as torch expects.

        If torch accumulates gradients in another dtype than that of the gathered parameters, it
        fails at parameters that were never gathered, or adds zeros of the wrong dtype.
        """
        for unit in self._units:
            held = [
                parameter for parameter in _held(unit) if getattr(parameter, "reduce_dtype", None)
            ]
            if not all(map(_was_gathered, held)):  # a unit that has not run yet
                unit.unshard()
                unit.reshard()
            if any(parameter.unsharded_accumulated_grad is not None for parameter in held):
                for parameter in held:
                    whole, dtype = parameter._unsharded_param, parameter.reduce_dtype
                    if whole.requires_grad and parameter.unsharded_accumulated_grad is None:
                        parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)

    def _without_gradient(self) -> list[Any]:
        """Return the trained parameters without a gradient, and record which ones backward uses."""
        without: list[Any] = []
        for held in filter(_was_gathered, self._held):
            whole = held._unsharded_param
            if not whole.requires_grad:
                continue
            if held.sharded_param.grad is None:
                without.append(held)
            if held not in self._watches:
                note = partial(self._note_use, held)
                self._watches[held] = whole.register_post_accumulate_grad_hook(note)
        return without

    def _note_use(self, held: Any, _: Tensor) -> None:
        if not self._in_dummy:  # its use of parameters does not count
            self._used.add(held)

    def _flags_of_use(self) -> list[float]:
        """Return 1 for each parameter that backward used here since it was reduced, else 0."""
        return [float(held in self._used) for held in self._held]

    def _on_device(self, numbers: list[float]) -> Tensor:
        vector = torch.tensor(numbers, dtype=torch.float64)
        return vector.to(self.options.device, non_blocking=True)

    def _drop_unused(self, counts: Tensor) -> None:
        """Remove gradients of unused parameters, which FSDP made zero, so they are not stepped.

        Args:
            counts: The sum of `_flags_of_use` over the processes. The host reads it only if this
                process lacks a gradient.
        """
        reduced, self._reduced = self._reduced, []
        unused = [held for held in reduced if held not in self._used]
        if unused:
            used_by = dict(zip(self._held, read_back(counts).tolist(), strict=True))
            for held in unused:
                if not used_by[held]:
                    held.sharded_param.grad = None

    @contextmanager
    def dummy(self) -> Iterator[None]:
        """Make the gradients of all parameters zero in backward passes inside the block."""
        self._in_dummy = True
        # They run before FSDP's own hooks, which release the gathered parameters.
        self._handles = [
            unit.register_forward_hook(lambda part, *_: self._zero_gradients_of(part), prepend=True)
            for unit in self._units
            if unit is not self.module
        ]
        try:
            yield
        finally:
            self._in_dummy = False
            for handle in self._handles:
                handle.remove()

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """All-reduce the step stats of a window; compare which units ran and what was used.

        If no hook changes gradients, the finite check is included, which saves an all-reduce.
        """
        vector = self.step_sync.sync_vector(stats)
        flags = self._on_device([*self._flags_of_use(), *self._digest()])
        bad = flags.new_zeros(1)
        if self.options.checks_gradients:
            updated = (
                group["params"]
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            )
            non_finite = find_non_finite(self.gradients.parts_of(chain.from_iterable(updated)))
            bad += 0.0 if non_finite is None else non_finite
        total = torch.cat([vector, bad, flags])
        sum_numbers(total)
        ran, self._ran = self._ran, []
        self._check_units()
        if total.is_cpu:
            self._compare(total, ran)
        else:
            self._checked = HostCopy(total[-2:]), ran
        self._drop_unused(total[len(vector) + 1 : -2])
        if self.options.checks_gradients:
            self.gradients.checked = _as_flag(total[len(vector)])
        return self.step_sync.count(total[: len(vector)])

    # -- check that all processes run the same units -----------------------------------------------

    def _note(self, index: int, *_: Any) -> None:
        self._ran.append(index)

    def _digest(self) -> list[float]:
        """Return a hash of the units that ran, and its square, whose sums float64 holds exactly."""
        digest = float(hash(tuple(self._ran)) % 2**20)
        return [digest, digest**2]

    def _check_units(self) -> None:
        """Compare the units of the last window, if they are still on an accelerator."""
        if self._checked is not None:
            (copied, ran), self._checked = self._checked, None
            self._compare(copied.read(), ran)

    def _compare(self, sums: Tensor, ran: list[int]) -> None:
        """Raise if processes ran different units; collective.

        Numbers are equal if and only if the square of their sum is their count times the sum of
        squares.

        Args:
            sums: The sums of `_digest` over the processes, at the end of the tensor.
            ran: The units that ran here.

        Raises:
            RuntimeError: They ran different units, so parameters of different units were mixed.
        """
        first, squares = map(int, sums[-2:].tolist())
        if first * first == self.options.world_size * squares:
            return
        names = {part: name for name, part in self.module.named_modules()}
        units = [names[self._units[index]] for index in ran]
        of_ranks = all_gather_object(units)
        other = next(rank for rank, of_rank in enumerate(of_ranks) if of_rank != of_ranks[0])
        pairs = zip_longest(of_ranks[0], of_ranks[other])
        start = next(number for number, pair in enumerate(pairs) if len({*pair}) > 1)
        shown = "; ".join(
            f"rank {rank}: {', '.join(of_ranks[rank][start : start + 3]) or 'none'}"
            for rank in (0, other)
        )
        raise RuntimeError(
            f"The processes ran different units of the sharded model (from call {start + 1} on, "
            f"{shown}), and gathered the wrong parameters. Every process must run each unit in "
            "the same order: wrap larger units, which contain the branches "
            '(transformer_cls_names_to_wrap, or auto_wrap_policy="no_wrap").'
        )

    # -- evaluation --------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Release gathered parameters before and after: a callback may change the sharded ones."""
        self._check_units()
        self._ran = []
        self._release()
        try:
            yield
            sums = self._on_device(self._digest())
            sum_numbers(sums)
            self._compare(sums, self._ran)
        finally:
            self._ran = []
            self._release()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes."""
        self._check_units()
        broadcast(list(self.module.buffers()))

    def close(self) -> None:
        """Leave the module sharded, and undo everything else."""
        while self._watches:
            self._watches.popitem()[1].remove()
        while self._undo:
            self._undo.pop()()


class ShardedGradients(Gradients):
    """The gradients of sharded parameters.

    Args:
        options: The process.
        replaced: The parameters that were sharded and what took their place, by the id of each.

    Attributes:
        checked: What `found_non_finite` returns next, if it is known already.
    """

    def __init__(
        self, options: EngineOptions, replaced: Mapping[int, tuple[nn.Parameter, nn.Parameter]]
    ) -> None:
        self._options, self._replaced = options, replaced
        self.checked: bool | Tensor | None = None

    def _trained(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those with a gradient; the sharded ones in the place of replaced ones."""
        trained = (self._replaced.get(id(p), (p, p))[1] for p in parameters)
        return [parameter for parameter in trained if parameter.grad is not None]

    def parts_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return this process's parts of the gradients."""
        return [part_here(p.grad) for p in self._trained(parameters) if p.grad is not None]

    def scale_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a tensor of shape (), in place."""
        _scale_parts(self.parts_of(parameters), factor)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        if self.checked is not None:
            of_all_ranks, self.checked = self.checked, None
            return of_all_ranks
        non_finite = find_non_finite(self.parts_of(parameters))
        if non_finite is None:
            return None
        # Torch's check includes only the processes that share the first tensor.
        anywhere = torch.zeros(1, device=self._options.device) + non_finite
        sum_numbers(anywhere)
        return _as_flag(anywhere[0])

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before.

        Each process sums the norms of its parts, each divided by the number of processes with the
        same part. So one all-reduce is enough for any meshes.
        """
        trained = self._trained(parameters)
        parts = self.parts_of(trained)
        by_kind: dict[Any, list[Tensor]] = {}
        for parameter, part in zip(trained, parts, strict=True):
            if part.numel():  # the largest magnitude needs an element
                by_kind.setdefault((self._copies_of(parameter), part.dtype), []).append(part)
        total = torch.zeros(1, dtype=torch.float64, device=self._options.device)
        for (copies, _), alike in by_kind.items():
            norm = torch.nn.utils.get_total_norm(alike, norm_type).to(total)
            if norm_type == inf:
                total = torch.maximum(total, norm)
            else:
                total += norm**norm_type / copies
        if norm_type == inf:
            torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX)
        else:
            sum_numbers(total)
            total = total ** (1 / norm_type)
        whole = total[0].float()
        _scale_parts(parts, (max_norm / (whole + 1e-6)).clamp(max=1.0))  # as in torch
        return whole

    # ARG002: others have processes without it
    def _holders_of(self, parameter: Tensor) -> int:  # noqa: ARG002
        """Return how many processes have a parameter, or a part of it."""
        return self._options.world_size

    def _copies_of(self, parameter: Tensor) -> int:
        """Return how many processes have the same part of a parameter, and of its gradient."""
        copies = self._holders_of(parameter)
        if isinstance(parameter, DTensor):
            for size, placement in zip(
                parameter.device_mesh.shape, parameter.placements, strict=True
            ):
                copies //= 1 if placement.is_replicate() else size
        return copies

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients."""
        for part in self.parts_of(parameters):
            part.clamp_(-max_value, max_value)


class ShardedWeights(Weights):
    """Sharded parameters.

    Args:
        rank: The rank of this process.
        used: The engine's records of parameters that have a gradient from backward.
    """

    def __init__(self, rank: int, used: set[Any]) -> None:
        self._rank, self._used = rank, used

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors on the host of rank 0, and {} elsewhere; collective."""
        named = bare_names(module, module.state_dict(keep_vars=True).items())
        return gathered_on_first(named, self._rank)

    def reshard(self, module: nn.Module, *, drops_gradients: bool = False) -> None:
        """Put the shards in the place of gathered parameters.

        Raises:
            RuntimeError: Gradients of micro-batches were not reduced yet: each process keeps its
                own whole ones, outside the parameters.
        """
        parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.reshard()
            for held in filter(_was_gathered, _held(part)):
                if drops_gradients:
                    held.unsharded_accumulated_grad = held._unsharded_param.grad = None
                    self._used.discard(held)
                elif _is_unreduced(held):
                    raise RuntimeError(
                        f"{type(module).__name__} has gradients of micro-batches without "
                        "synchronisation (no_sync, or accumulate before the end of its window), "
                        "which FSDP keeps whole on each process: save at the end of a window, "
                        "under `if accelerator.sync_gradients:`, or pass "
                        "GradientAccumulationPlugin(sync_each_batch=True)."
                    )


def check_takes_shards(optimizer: Optimizer, option: str) -> None:
    """Check that an optimizer can update sharded parameters.

    Args:
        optimizer: The optimizer.
        option: What to train without, if it cannot.

    Raises:
        ValueError: It needs whole tensors, or updates in backward.
    """
    names = {kind.__name__ for kind in type(optimizer).__mro__} & _NEED_WHOLE_TENSORS.keys()
    why = "it updates in backward" if is_lomo(optimizer) else None
    for name in names:
        why = _NEED_WHOLE_TENSORS[name]
    if why is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot update sharded parameters: {why}. Use AdamW or "
            f"SGD, or train without {option}."
        )


def disable_mixed_foreach(
    optimizer: Optimizer, updates: Callable[[Tensor], bool] = lambda _: True
) -> None:
    """Turn off foreach for tensors of several meshes, since foreach needs a single mesh.

    Args:
        optimizer: The optimizer.
        updates: Says which of its parameters this process updates.
    """
    groups = [filter(updates, group["params"]) for group in optimizer.param_groups]
    if any(len(set(map(mesh_of, parameters))) > 1 for parameters in groups):
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False


def rank_along(mesh: DeviceMesh, names: Iterable[str]) -> tuple[int, int]:
    """Return the rank of this process, and their number, along some dimensions of a mesh."""
    rank, size = 0, 1
    for name in names:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
        size *= mesh[name].size()
    return rank, size


def _as_flag(count: Tensor) -> bool | Tensor:
    """Return whether a number of processes is not zero; on an accelerator as float32, 1 or 0."""
    return bool(count) if count.is_cpu else count.clamp(max=1.0).float()


def _scale_parts(parts: list[Tensor], factor: float | Tensor) -> None:
    if parts and isinstance(factor, Tensor) and factor.device != parts[0].device:
        factor = factor.to(parts[0].device)  # the host: they are offloaded
    scale_(parts, factor)


def shard_unit(part: nn.Module, **arguments: Any) -> None:
    """Shard one unit, and free its whole parameters, which `fully_shard` put on the device."""
    before, kind = list(own_parameters(part)), type(part)
    fully_shard(part, **arguments)
    made = type(part)  # a subclass, whose name would appear in messages and records
    made.__name__, made.__qualname__, made.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    for whole, shard in zip(before, own_parameters(part), strict=True):
        if whole is not shard:
            free(whole)


def free(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter that was replaced; an optimizer may hold it still."""
    if not (isinstance(parameter, DTensor) or parameter.is_meta):
        parameter.data = parameter.data.new_empty(0)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, also those that the module's ``state_dict`` leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _root_mesh(options: EngineOptions, plugin: FullyShardedDataParallelPlugin) -> DeviceMesh:
    """Return the mesh of all processes: replicas, shards, and parts of layers.

    Processes that share sequences are along ``"dp_shard"``; in the mesh of `ParallelismConfig` they
    have a separate dimension.
    """
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
    sizes["dp_shard"] *= config.cp_size or 1
    kept = {name: size for name, size in sizes.items() if size != 1 or name == "dp_shard"}
    mesh = device_mesh(options.device.type, kept)
    if given is not None:
        given.device_mesh = mesh
        if given.cp_enabled:
            given.build_device_mesh(options.device.type)
    return mesh


def _units_in(module: nn.Module) -> list[Any]:
    """Return the units of a sharded module, itself first, in the same order on all processes."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _as_shards(value: Any, parameter: nn.Parameter) -> Any:
    """Return this process's part of an optimizer's state, if it is as large as its parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    target = torch.empty_like(parameter, dtype=value.dtype)
    fill_(target, value)
    return target


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
        else:
            classes = {type(part).__name__ for part in parts}
            for name in names:
                if name not in classes:
                    what = f"A class of {type(module).__name__} in transformer_cls_names_to_wrap"
                    raise ValueError(choice_error(what, name, classes))
        yield from (part for part in parts if type(part).__name__ in names)


def _by_size(module: nn.Module, least: int) -> Iterator[nn.Module]:
    """Yield submodules with at least `least` parameters outside of inner units."""
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


def checkpoint_activations(unit: nn.Module, *, offload: bool = False) -> None:
    """Recompute a submodule's activations in backward; the names of its parameters stay.

    Args:
        unit: The submodule.
        offload: Keep its inputs, from which they are recomputed, in host memory until backward.
    """
    forward = unit.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True) if offload else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **checkpoint_options(), **kwargs)

    unit.forward = run


def _initialise(module: nn.Module, function: Callable[[nn.Module], None] | None) -> None:
    """Give the parts of a module that are on the meta device memory and initial values.

    Raises:
        ValueError: A part has no ``reset_parameters``.
    """
    for part in list(module.modules()):
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in tensors):
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


def _held(unit: Any) -> Iterator[Any]:
    """Yield torch's private records of the parameters of a unit; there is no public API."""
    for group in fsdp_groups(unit):
        yield from group.fsdp_params


def _was_gathered(held: Any) -> bool:
    """Return whether a parameter was gathered before, so that it may have a gradient."""
    return hasattr(held, "_unsharded_param")


def _is_unreduced(held: Any) -> bool:
    """Return whether this process has a gradient of its own for a parameter, a whole one."""
    gradients = held.unsharded_accumulated_grad, held._unsharded_param.grad
    return any(gradient is not None for gradient in gradients)


@contextmanager
def _unsynced(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _children_of_manual(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that have parameters and a forward method.

    Raises:
        ValueError: A trained parameter is outside them.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            raise ValueError(
                f"{type(module).__name__} has a trained parameter {name!r} outside its "
                "submodules. In manual optimisation with a sharded model each submodule gathers "
                "its parameters around its forward: move the parameter into a submodule that "
                "uses it in forward."
            )
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield from _children_of_manual(child)
        elif any(True for _ in child.parameters()):
            yield child


def _check_not_compiled(module: nn.Module) -> None:
    """Raise a ValueError if the user has compiled a unit: such code skips hooks that come later."""
    for name, part in module.named_modules():
        if is_compiled(part) and _units_in(part):
            raise ValueError(
                f"{name or type(module).__name__} is compiled as a whole, including the hooks "
                "that gather its sharded parameters, which fit needs to run uncompiled: pass "
                "dynamo_backend=..., which compiles the forward of each unit, instead."
            )


def _check_dense(module: nn.Module) -> None:
    """Raise a ValueError for embeddings whose gradients are sparse."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ValueError(
                f"{name or type(part).__name__} has sparse gradients, which FSDP cannot reduce: "
                "pass sparse=False."
            )


def check_dtypes(
    module: nn.Module, units: Collection[nn.Module], ignored: Collection[nn.Parameter]
) -> None:
    """Raise a ValueError if trained parameters of one unit, reduced together, differ in dtype."""
    starts = [name and f"{name}." for name, part in module.named_modules() if part in units]
    dtypes: dict[str, dict[torch.dtype, str]] = {}  # of each unit, with the first parameter's name
    for name, parameter in module.named_parameters():
        inside = [start for start in starts if name.startswith(start)]
        if inside and parameter.requires_grad and parameter not in ignored:
            dtypes.setdefault(max(inside, key=len), {}).setdefault(parameter.dtype, name)
    for start, present in dtypes.items():
        if len(present) > 1:
            shown = " and ".join(f"{dtype} ({name})" for dtype, name in present.items())
            raise ValueError(
                f"Trained parameters in the unit {start[:-1] or type(module).__name__} are "
                f"{shown}, but FSDP reduces the gradients of a unit in one dtype. Convert the "
                "model with .to(torch.float32), which mixed_precision='bf16' casts for the forward "
                "pass; or freeze those of one dtype, or put them into a unit of their own "
                "(transformer_cls_names_to_wrap, auto_wrap_policy)."
            )


def own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that are not those of a unit inside it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh of a sharded tensor; None for a plain one."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
