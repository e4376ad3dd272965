"""DeepSpeed's ZeRO: optimizer state, gradients and parameters are partitioned over the processes.

Stage 0 is data parallelism. Stage 1 partitions the optimizer's state, stage 2 also the gradients,
and stage 3 also the parameters, which each module gathers before its forward and backward passes
(Rajbhandari et al., "ZeRO", SC 2020). In bf16 the module computes with bfloat16 weights, and the
optimizer updates float32 ones.

DeepSpeed's own step unscales, clips and updates in one call. So factors and limits are collected
here and passed to DeepSpeed when the optimizer steps. Cadence manages the windows of micro-batches:
for DeepSpeed, no backward pass ends a window, and `_end_window` reduces the remaining gradients.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import environment
from trainer.configuration import DeepSpeedPlugin
from trainer.configuration.dummy_optimizers import DummyOptim, DummyScheduler
from trainer.distributed.collectives import broadcast
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.base import EngineOptions, Gradients
from trainer.engines.driving import DrivenWeights, DrivesOptimizer, Prepared, trained
from trainer.engines.single import STEPS, attribute_restorer
from trainer.enums import DistributedType
from trainer.optim.optimizer import twin_of
from trainer.state import GradientState
from trainer.tree import LocalShards, fill_, shards_of_range


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed without compiling extensions, for this device.

    Raises:
        ImportError: It is not installed.
        ValueError: It was imported for another kind of device.
    """
    try:
        with environment.patch_environment(
            **({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})
        ):
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            kind = get_accelerator().device_name()
    except ImportError as error:
        raise ImportError(
            "deepspeed_plugin (--use_deepspeed) needs DeepSpeed, which is not installed: pip "
            "install 'cadence-trainer[deepspeed]'."
        ) from error
    if kind != device.type:
        raise ValueError(
            f"DeepSpeed was imported for {kind!r} devices, but this run uses {device.type!r}: "
            "import it after the Accelerator or the Trainer is created."
        )
    # An all-reduce through shared memory, which would be compiled at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class _Root(nn.Module):
    """The module that DeepSpeed wraps: calls any function of the user's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class ZeroRedundancy(DrivesOptimizer):
    """Engine on DeepSpeed; see `trainer.engines.base.Engine` for the methods.

    It has one model and its optimizer.
    """

    distributed_type = DistributedType.DEEPSPEED
    library, argument = "DeepSpeed", "deepspeed_plugin (--use_deepspeed)"
    dummy_scheduler = DummyScheduler
    plugin: DeepSpeedPlugin
    gradients: ZeroGradients

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        assert options.deepspeed_plugin is not None
        self.plugin = options.deepspeed_plugin
        self.stage = self.plugin.stage
        # A backward pass of stages 2 and 3 reduces gradients, in the order in which they arrive.
        self.parallel = replace(
            self.parallel, divides_state=self.stage > 0, forward_is_collective=self.stage >= 2
        )
        self._half = options.mixed_precision == "bf16"
        self._deepspeed = import_deepspeed(options.device)
        self.driver = self
        self.gradients = ZeroGradients(self)
        self.weights = ZeroWeights(self)
        self._engine: Any = None  # DeepSpeed's
        self._root: _Root | None = None
        self._linear: Callable[..., Tensor] | None = None  # DeepSpeed's for stage 3
        # The trained parameters of stages 1 and 2, and where DeepSpeed keeps their values.
        self._views: list[tuple[nn.Parameter, Tensor]] = []

        if self.plugin.zero3_init_flag and options.world_size > 1:
            # `from_pretrained` of transformers needs these before anything is prepared.
            environment.export(**_location())
            self._connect()

    def _connect(self) -> None:
        """Let DeepSpeed use the process group, which is created for a single process."""
        self._make_group()
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)

    # -- placing -----------------------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return a wrapper, which DeepSpeed runs once the model's optimizer is prepared.

        Raises:
            ValueError: There is a model already.
        """
        if isinstance(module, Prepared):
            return module
        super().prepare_module(module, device=device)
        if evaluation_mode and self.stage < 3:
            return module
        self._check_first(module)
        self._place(module)
        if evaluation_mode:
            self._initialize(None)
        return Prepared(module, partial(self.run, module))

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Take the module; DeepSpeed partitions it when its optimizer is prepared.

        Raises:
            ValueError: The module is optimised manually.
        """
        super().start(module, step_sync)
        self._place(module)
        if self.stage == 3:
            for name in STEPS:
                step = getattr(module, name)
                self._undo.append(attribute_restorer(module, name))
                vars(module)[name] = wraps(step)(partial(self.run, step))
            if step_sync is None:
                self._initialize(None)

    def _place(self, module: nn.Module) -> None:
        whole = [t for t in (*module.parameters(), *module.buffers()) if not hasattr(t, "ds_id")]
        if dist.is_initialized():
            broadcast(whole)
        self._owner, self._root = module, _Root(module)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Partition the model and the optimizer's state.

        Returns:
            The optimizer itself, with the user's groups and parameters. DeepSpeed steps a copy,
            which takes over the options of the groups before each step.

        Raises:
            ValueError: The optimizer needs whole tensors, has parameters that are not in the model,
                or is the second one; or there is no model yet.
        """
        self._take(optimizer)
        self._initialize(optimizer)
        return optimizer

    def _initialize(self, optimizer: Optimizer | None) -> None:
        assert self._root is not None
        config = self.plugin.final_config(self._root.module, optimizer, bf16=self._half)
        _quieten(config)
        if self.stage == 3:  # its forward pass reads them too
            environment.export(**_location())
        try:
            with environment.patch_environment(**_location()):
                self._connect()
                self._engine, *_ = self._deepspeed.initialize(
                    model=self._root, config=config, **_optimizer_arguments(optimizer)
                )
        finally:
            self._linear = _take_back_torch()
        self._zero = self._engine.optimizer
        if isinstance(optimizer, DummyOptim):
            for group, made in zip(self._groups, self._basic.param_groups, strict=True):
                group.update({key: value for key, value in made.items() if key != "params"})
        if self.stage == 3:
            # Parameters that the module uses outside a submodule's forward.
            for parameter in self._root.module.parameters(recurse=False):
                self._deepspeed.zero.register_external_parameter(self._root, parameter)
            self._gather_persistent()
            self._open_to_state_dicts(self._root.module)
        elif self.stage:
            self._views = [(p, p.detach()) for p in chain(*self._zero.bit16_groups)]
            self._share_weights()

    def _own_parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's parts of the model's weights, and the tensors that are updated."""
        zero = self._zero
        if self.stage == 3:
            parts, masters = zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat
        else:
            parts = [
                of_ranks[self.options.rank] for of_ranks in zero.parallel_partitioned_bit16_groups
            ]
            masters = zero.single_partition_of_fp32_groups
        yield from zip(parts, masters, strict=True)

    def _share_weights(self) -> None:
        """Let stages 1 and 2 update the model's float32 weights, as stage 3 does, not a copy."""
        same = [part for part in self._own_parts() if _same_values(*part)]
        for part, master in same:
            master.data = part
        if same:
            self._zero._link_all_hp_params()  # to the tensors that are updated now

    # -- the steps ---------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the user's module, and let DeepSpeed see its output."""
        if self._engine is None:
            return function(*args, **kwargs)
        if self.stage < 3 and not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with self._linear_of_stage_3():
            return self._engine(function, *args, **kwargs)

    @contextmanager
    def _linear_of_stage_3(self) -> Iterator[None]:
        """Let linear layers keep the partitioned weight for backward, not the gathered one.

        DeepSpeed replaces the function for good, which then cannot be compiled in other models.
        """
        linear = nn.functional.linear
        if self._linear is not None:
            nn.functional.linear = self._linear
        try:
            yield
        finally:
            nn.functional.linear = linear

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        step = getattr(self.module, name)
        return step(*args) if self.stage == 3 else self.run(step, *args)

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a micro-batch."""
        if loss is None:
            return self._end_micro_batch(stats)
        if self._ended:
            self.optimizer_zero_grad()
        self._pending = True
        self._engine.set_gradient_accumulation_boundary(False)
        with self._linear_of_stage_3():  # checkpointed activations run forward again
            self._engine.backward(loss, *args, scale_wrt_gas=False, **kwargs)
        return self._end_micro_batch(stats)

    def _end_window(self) -> None:
        """Reduce the gradients of a window; collective, once a window."""
        if self._ended:
            return
        self._ended = self._pending = True
        self._engine.set_gradient_accumulation_boundary(True)
        if self.stage >= 2:
            self._zero.finalize_gradient_accumulation_boundary()
            return
        if self.stage == 1:
            assert self._root is not None
            self._zero.setup_buckets()
            # Each process reduces the same tensors, whatever its loss depends on.
            for parameter in self._root.parameters():
                if id(parameter) in self._trains and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._engine.allreduce_gradients()

    # -- the update --------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - there is one
        """Make an update, with the factor and the limit that were asked for; collective."""
        self.check_unknown_parameters()
        if not self._scheduled and "scheduler" in self.plugin.deepspeed_config:
            raise ValueError(
                "The DeepSpeed configuration has a scheduler, which nothing advances: prepare a "
                "DummyScheduler(optimizer), or return it from configure_optimizers."
            )
        self._end_window()
        self._take_weights()
        self._give_options(self._basic)
        gradients = self.gradients
        limit = gradients.max_norm or self.plugin.clips_at
        scale = 1.0 / gradients.factor
        if self.stage:
            self._zero.clip_grad = limit
            self._zero.custom_loss_scaler, self._zero.external_loss_scale = True, scale
        elif self._half:
            self._zero.clip_grad = limit
            self._zero.loss_scale_config.cur_scale = scale
        elif limit and not gradients.max_norm:
            gradients.clip_grad_norm_(chain(*(g["params"] for g in self._groups)), limit)
        self._engine.step()
        if self.stage:
            self._zero.custom_loss_scaler = False
        elif self._half:
            self._zero.loss_scale_config.cur_scale = 1.0
        self._begin_window()
        self._step_schedules()

    @property
    def _plain(self) -> bool:
        """Whether gradients are in the parameters, in float32."""
        return self.stage == 0 and not self._half

    def _gradient_parts(self) -> Iterator[Tensor]:
        """Yield the gradients that this process holds."""
        if self.stage == 0:
            yield from (p.grad for g in self._groups for p in g["params"] if p.grad is not None)
        elif self.plugin.offload_optimizer_device != "none":
            for flat in dict.fromkeys(self._flats().values()):
                assert flat.grad is not None
                yield flat.grad
        elif self.stage == 3:
            yield self._zero.grad_partitions_flat_buffer
        else:
            yield from chain(*self._zero.averaged_gradients.values())

    @property
    def _basic(self) -> Optimizer:
        """The optimizer that DeepSpeed steps, whose groups hold its own tensors."""
        basic: Optimizer = getattr(self._zero, "optimizer", self._zero)
        return basic

    def optimizer_zero_grad(self, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002 - there is one
        """Drop the gradients that no step has used."""
        if self._pending:
            self._drop_gradients()
        self._begin_window()

    def _drop_gradients(self) -> None:
        zero = self._zero
        if self.stage == 0:
            self._engine.zero_grad()
            return
        zero.zero_grad()  # stage 3 then overwrites the parts that it holds
        for held in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            held.update(dict.fromkeys(held))
        if self.plugin.offload_optimizer_device != "none":
            zero.reset_cpu_buffers()
        if self.stage == 3:
            # Parts of parameters that the next loss does not depend on are not overwritten.
            zero.grad_partitions_flat_buffer.zero_()
        else:
            zero.micro_step_id = -1  # as after a step: with offload, the next gradients are first

    def _begin_window(self) -> None:
        self._ended = self._pending = False
        self.gradients.begin_window()

    # -- state -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Make the update start from the model's weights, including weights that user code has set.

        DeepSpeed updates copies, unless these would be identical. This neither communicates nor
        waits for the device.
        """
        self._attach_weights()
        for weight, master in self._copies():
            _take(weight, master)

    @torch.no_grad()
    def _attach_weights(self) -> None:
        """Copy weights that user code has set to where DeepSpeed keeps the model's weights."""
        if self.stage == 3:
            for parameter in self._offload.persistent_parameters:
                if not _is_empty(parameter):
                    parameter.ds_tensor.copy_(self._part_of(parameter, parameter))
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():  # its `data` is another tensor
                view.copy_(parameter)
                parameter.data = view

    @torch.no_grad()
    def _give_weights(self) -> None:
        """Give the model the weights that were loaded into the copies; collective."""
        for weight, master in self._copies():
            weight.copy_(master)
        if self.stage in (1, 2) and self._client is not None:
            for of_ranks in self._zero.parallel_partitioned_bit16_groups:
                dist.all_gather(list(of_ranks), of_ranks[self.options.rank])
        if self._root is not None and self.stage == 3:
            divided: list[Any] = [p for p in self._root.parameters() if hasattr(p, "ds_id")]
            for parameter in divided:
                parameter.partition()  # drops gathered values, which are outdated
        self._gather_persistent()

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the weights of which DeepSpeed updates copies, and these copies."""
        if self._client is None:
            return
        if self.stage:
            pairs = self._own_parts()
        else:
            masters = self._masters
            parameters = chain(*(group["params"] for group in self._groups))
            pairs = ((p, masters[id(p)]) for p in parameters if id(p) in masters)
        for weight, master in pairs:
            if weight.data_ptr() != master.data_ptr():
                yield weight, master

    @property
    def _masters(self) -> dict[int, Tensor]:
        """The float32 copies of stage 0 by the id of the bfloat16 parameter."""
        if not self._half:
            return {}
        pairs = zip(chain(*self._zero.fp16_groups), chain(*self._zero.fp32_groups), strict=True)
        return {id(half): master for half, master in pairs}

    def _part_of(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor, padded, as stage 3 divides a parameter."""
        size, flat = parameter.ds_tensor.numel(), whole.detach().flatten()
        part = flat[size * self.options.rank :][:size]
        return nn.functional.pad(part, (0, size - part.numel()))

    def _gather_persistent(self) -> None:
        """Gather the small parameters that stage 3 leaves whole on each process; collective."""
        initialized = self.stage == 3 and self._engine is not None
        if initialized and (parameters := self._offload.persistent_parameters):
            parameters[0].all_gather(parameters)

    def _open_to_state_dicts(self, module: nn.Module) -> None:
        """Let ``load_state_dict`` find whole parameters, and ``state_dict`` refuse empty ones."""
        gathered: dict[nn.Module, Any] = {}

        def gather(part: nn.Module, *_: Any) -> None:
            if empty := [p for p in part.parameters(recurse=False) if _is_empty(p)]:
                gathered[part] = self._deepspeed.zero.GatheredParameters(empty, modifier_rank=0)
                gathered[part].__enter__()

        def release(part: nn.Module, *_: Any) -> None:
            if part in gathered:
                gathered.pop(part).__exit__(None, None, None)

        for part in module.modules():
            self._undo.append(part.register_load_state_dict_pre_hook(gather).remove)
            self._undo.append(part.register_load_state_dict_post_hook(release).remove)
            part.register_state_dict_pre_hook(_refuse_empty)  # for good: they stay partitioned

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's part of the state, numbered as in a single process."""
        state = Optimizer.state_dict(optimizer)
        state["state"] = {
            number: {
                key: self._shards(parameter, value) if self._is_flat(value, flat) else value
                for key, value in self._basic.state[flat].items()
            }
            for number, parameter, flat in self._numbered(optimizer)
            if self._basic.state.get(flat)
        }
        return state

    def _is_flat(self, value: Any, flat: Tensor) -> bool:
        """Return whether a state tensor has one value for each value of the updated tensor."""
        return self.stage > 0 and isinstance(value, Tensor) and value.shape == flat.shape

    def _shards(self, parameter: Any, flat: Tensor, weights: Tensor | None = None) -> LocalShards:
        """Return this process's part of a parameter, or of its state.

        Args:
            parameter: The parameter.
            flat: The values of its group that this process updates, or a state of them.
            weights: The model's own values of this part, if they are stored separately.
        """
        start, where = self._ranges[id(parameter)]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        values = _current(flat.detach()[where], None if weights is None else weights[where])
        shards = shards_of_range(shape, values, start)
        return LocalShards(shape, flat.dtype, self.options.device, shards)

    @cached_property
    def _ranges(self) -> dict[int, tuple[int, slice]]:
        """Where each trained parameter has values that this process updates, by its id.

        They are the index of the first in the flattened parameter, and their place in its group.
        """
        found = {}
        views = {id(parameter): view for parameter, view in self._views}
        groups = self._zero.fp16_groups if self.stage == 3 else self._zero.bit16_groups
        for group, (part, _) in zip(groups, self._own_parts(), strict=True):
            for parameter in group:
                held, first = views.get(id(parameter)), 0
                if held is None:
                    held, first = parameter.ds_tensor, self._first_of(parameter)
                begin = (held.data_ptr() - part.data_ptr()) // part.element_size()
                size = min(held.numel(), _numel(parameter) - first)
                low, high = max(begin, 0), min(begin + size, part.numel())
                found[id(parameter)] = first + low - begin, slice(low, max(low, high))
        return found

    def _first_of(self, parameter: Any) -> int:
        """Return the index of this process's first value where stage 3 divides a parameter."""
        size: int = parameter.ds_tensor.numel()
        return size * self.options.rank

    def _numbered(self, optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Yield the number of each trained parameter, it, and the tensor that DeepSpeed updates."""
        flats = self._flats()
        numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = next(numbers)
                if id(parameter) in self._trains:
                    yield number, parameter, flats[id(parameter)]

    def _flats(self) -> dict[int, Tensor]:
        zero = self._zero
        if self.stage == 0:
            masters = self._masters
            return {id(p): masters.get(id(p), p) for g in self._groups for p in g["params"]}
        if self.stage == 3:
            parts = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            parts = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        return {id(parameter): flat for group, flat in parts for parameter in group}

    @torch.no_grad()
    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this process's part of a state that is numbered as in a single process."""
        saved = state["state"]
        Optimizer.load_state_dict(optimizer, {**state, "state": {}})
        if not any(saved.values()):
            self._basic.state.clear()
        elif not all(self._basic.state.get(flat) for flat in self._flats().values()):
            self._make_state()
        for number, parameter, flat in self._numbered(optimizer):
            values = self._basic.state.get(flat, {})
            for key, value in saved.get(number, {}).items():
                present = values.get(key)
                if self._is_flat(present, flat):
                    fill_(self._shards(parameter, present), value)
                elif isinstance(present, Tensor) and hasattr(value, "shape"):
                    fill_(present, value)
                elif isinstance(present, Tensor):
                    present.fill_(value)
                else:  # some optimizers count steps in a number, others in a tensor
                    whole = torch.clone(value) if hasattr(value, "shape") else value
                    number = isinstance(present, (int, float)) and isinstance(whole, Tensor)
                    values[key] = type(present)(whole.item()) if number else whole

    def _make_state(self) -> None:
        """Let the optimizer make its state, by an update of nothing with a rate of 0."""
        self._take_weights()
        if self.stage == 0:
            for flat in self._flats().values():
                flat.grad = torch.zeros_like(flat)
        else:
            for number, flat in enumerate(dict.fromkeys(self._flats().values())):
                zeros = torch.zeros_like(flat, dtype=self._zero.gradient_accumulation_dtype)
                self._zero.averaged_gradients[number] = [zeros]
        rates = [group.get("lr") for group in self._basic.param_groups]
        for group in self._basic.param_groups:
            group["lr"] = 0.0
        (self._zero if self.stage else self._basic).step()
        for group, rate in zip(self._basic.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.stage == 0:
            for flat in self._flats().values():
                flat.grad = None

    @property
    def _offload(self) -> Any:
        """What gathers and releases the parameters of stage 3."""
        return getattr(self._zero, "parameter_offload", self._zero)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes."""
        broadcast(list(self.module.buffers()))

    def close(self) -> None:
        """Leave the module to other engines; parameters of stage 3 stay partitioned."""
        super().close()
        _take_back_torch()
        if self._engine is not None:
            if self.stage == 3:
                from deepspeed.runtime.zero import parameter_offload

                self._offload.get_param_coordinator().reset_step()
                assert self._root is not None
                modules, stack = set(self._root.modules()), parameter_offload.FWD_MODULE_STACK
                stack[:] = [
                    part for part in stack if part not in modules
                ]  # it would keep the model
            self._engine.module_forward_pre_hook.remove()
            self._engine.module_forward_post_hook.remove()
            self._engine.destroy()
            self._engine = None


class ZeroGradients(Gradients):
    """Gradients that DeepSpeed scales and clips when its optimizer steps.

    Args:
        engine: The engine on DeepSpeed.

    Attributes:
        factor: What the step multiplies all gradients by.
        max_norm: The norm to which it clips them; 0 does not clip.
    """

    factor: float | Tensor
    max_norm: float

    def __init__(self, engine: ZeroRedundancy) -> None:
        self._engine = engine
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the factor and the limit."""
        self.factor, self.max_norm = 1.0, 0.0

    def scale_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients, when the optimizer steps."""
        if self._engine._plain:
            super().scale_(parameters, factor)
        else:
            self.factor = self.factor * factor

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the whole gradient of a parameter in float32; collective.

        There is one until the optimizer steps.

        Raises:
            RuntimeError: The window of micro-batches goes on.
        """
        if (
            self._engine._client is None
            or id(parameter) not in self._engine._trains
            or not self._engine._pending
        ):
            return None
        if not self._engine._ended:
            if hasattr(self._engine, "step_sync") or not GradientState().sync_gradients:
                raise RuntimeError(
                    "Gradients were read inside a window of micro-batches, before DeepSpeed has "
                    "reduced them: read them in on_before_optimizer_step, or in a custom loop "
                    "under `if accelerator.sync_gradients:`."
                )
            self._engine._end_window()
        if self._engine._plain:
            return parameter.grad
        whole = parameter.grad
        if self._engine.stage:
            whole = self._engine._deepspeed.utils.safe_get_full_grad(parameter)
        return None if whole is None else whole.float() * self.factor

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        self._engine._end_window()
        if self._engine.stage == 0:
            return super().found_non_finite(parameters)
        return bool(self._engine._zero.has_overflow())

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip when the optimizer steps; return the norm before.

        Raises:
            NotImplementedError: DeepSpeed has no such norm, or these are not all parameters.
        """
        self._engine._end_window()
        if self._engine._plain:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self._are_all(parameters):
            return torch.zeros((), device=self._engine.options.device)
        if norm_type != 2.0:
            raise NotImplementedError(
                f"Clipping was requested with norm_type={norm_type}, but DeepSpeed clips by the "
                "2-norm: leave norm_type out."
            )
        if self._engine.plugin.clips_at not in (0.0, max_norm):
            raise ValueError(
                f"Clipping was requested at a norm of {max_norm}, but gradient_clipping of the "
                f"DeepSpeed configuration is {self._engine.plugin.clips_at}: set it to 'auto'."
            )
        self.max_norm = float(max_norm)
        if self._engine.stage == 0:
            return torch.nn.utils.get_total_norm(list(self._engine._gradient_parts())) * self.factor
        squares = torch.stack(
            [part.double().square().sum() for part in self._engine._gradient_parts()]
        )
        total = squares.sum().to(self._engine.options.device)
        dist.all_reduce(total)
        return (total.sqrt() * self.factor).float()

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients.

        Raises:
            NotImplementedError: These are not all parameters, or DeepSpeed has taken the norm of
                gradients in host memory already.
        """
        self._engine._end_window()
        if self._engine._plain:
            super().clip_grad_value_(parameters, max_value)
            return
        if not self._are_all(parameters):
            return
        if self._engine.plugin.offload_optimizer_device != "none":
            raise NotImplementedError(
                "Clipping by value was requested, but offload_optimizer_device is "
                f"{self._engine.plugin.offload_optimizer_device!r}: use max_grad_norm or "
                "clip_grad_norm_."
            )
        limit = torch.as_tensor(max_value / self.factor, device=self._engine.options.device)
        for part in self._engine._gradient_parts():
            part.clamp_(-limit, limit)

    def _are_all(self, parameters: Iterable[Tensor]) -> bool:
        """Return False if none of the trained parameters are given, and True if all are.

        Raises:
            NotImplementedError: Some are.
        """
        chosen = {id(parameter) for parameter in parameters} & self._engine._trains
        if chosen and chosen != self._engine._trains:
            raise NotImplementedError(
                "Clipping was requested for some parameters, but DeepSpeed clips the gradients "
                "of all trained parameters together: pass model.parameters()."
            )
        return bool(chosen)


class ZeroWeights(DrivenWeights):
    """Weights that DeepSpeed partitions, or of which it updates copies."""

    _engine: ZeroRedundancy

    def parts(self, module: nn.Module, *, to_fill: bool = False) -> dict[str, Any]:
        """Return this process's part of the weights; trained weights are in float32.

        The next update starts from these, so they include weights that user code has set since the
        last update.
        """
        engine = self._engine
        if engine._engine is not None:
            engine._take_weights() if to_fill else engine._attach_weights()
        updated = {} if engine._client is None else engine._flats()
        # To be filled are the masters themselves, whatever the model has.
        copies = () if to_fill else engine._copies()
        copied = {id(master): weights for weights, master in copies}

        def held(value: Any) -> Any:
            master = updated.get(id(value))
            return self._held(value, master, copied.get(id(master)))

        return _each_once(held, module)

    def exported_parts(self, module: nn.Module) -> dict[str, Any]:
        """Return this process's part of the weights for export.

        They are the model's 16-bit weights if the plugin's `zero3_save_16bit_model` is True.
        """
        engine = self._engine
        if not engine.plugin.zero3_save_16bit_model:
            return self.parts(module)
        if engine._engine is not None:
            engine._attach_weights()
        return _each_once(partial(self._held, master=None, weights=None), module)

    def _held(self, value: Any, master: Tensor | None, weights: Tensor | None) -> Any:
        """Return what this process holds of a weight, or of the master that is updated."""
        engine = self._engine
        if master is not None and engine.stage:
            return engine._shards(value, master, weights)
        if master is not None:
            return _current(master.detach(), weights)
        if hasattr(value, "ds_id"):
            first = engine._first_of(value)
            part = value.ds_tensor[: max(_numel(value) - first, 0)]
            shards = shards_of_range(value.ds_shape, part, first)
            return LocalShards(value.ds_shape, value.dtype, engine.options.device, shards)
        return value.detach() if isinstance(value, Tensor) else value

    def refresh(self, module: nn.Module) -> None:  # noqa: ARG002 - there is one
        """Give the model the weights that were loaded; collective."""
        self._engine._give_weights()


def _each_once(function: Callable[[Any], Any], module: nn.Module) -> dict[str, Any]:
    """Return the function's result for each value of a state dict; tied ones have the same."""
    state = module.state_dict(keep_vars=True)
    found = {id(value): function(value) for value in state.values()}
    return {name: found[id(value)] for name, value in state.items()}


def _take_back_torch() -> Callable[..., Tensor] | None:
    """Undo what stage 3 and ``deepspeed.zero.Init`` leave in torch for the whole process.

    Returns:
        DeepSpeed's ``torch.nn.functional.linear``; None if it was not in use.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import Init

    if vars(nn.Module).get("_old_init_subclass") is not None:
        # Bound to Module, the second one hides those of other bases of a subclass.
        for name in ("_old_init_subclass", "__init_subclass__"):
            delattr(nn.Module, name)
    if nn.functional.linear is not zero3_linear_wrap:
        return None
    nn.functional.linear = Init.linear_bk
    return zero3_linear_wrap


def _is_empty(parameter: Any) -> bool:
    """Return whether stage 3 holds the values of a parameter elsewhere, in parts."""
    return hasattr(parameter, "ds_id") and parameter.shape != parameter.ds_shape


def _refuse_empty(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise before ``state_dict`` returns tensors without values.

    Raises:
        RuntimeError: Parameters of the module are partitioned, and their values are asked for.
    """
    named = module.named_parameters(recurse=False)
    if not keep_vars and (empty := [prefix + name for name, p in named if _is_empty(p)]):
        raise RuntimeError(
            f"state_dict() would hold empty tensors for {', '.join(empty)}, since ZeRO stage 3 has "
            "partitioned them: call accelerator.get_state_dict(model) or save_model on all "
            "processes, or use deepspeed.zero.GatheredParameters(model.parameters())."
        )


def _take(weight: Tensor, master: Tensor) -> None:
    """Copy values that user code has set in a weight to its float32 master, in place.

    All other values equal the rounded master value, which is then kept.
    """
    if weight.dtype == master.dtype:
        master.copy_(weight)
        return
    pieces = [(weight, master)]
    if weight.dim() == 1:  # so that intermediate results stay in the cache
        pieces = list(zip(weight.split(2**22), master.split(2**22), strict=True))
    for new, piece in pieces:
        new = new.to(piece.device)
        torch.where(piece.to(new.dtype) == new, piece, new, out=piece)


def _current(master: Tensor, weight: Tensor | None) -> Tensor:
    """Return the values from which an update starts: a copy if user code has set the weight."""
    if weight is None or torch.equal(master.to(weight.dtype), weight.detach().to(master.device)):
        return master
    current = master.clone()
    _take(weight.detach(), current)
    return current


def _same_values(part: Tensor, master: Tensor) -> bool:
    return (part.dtype, part.device) == (master.dtype, master.device)


def _numel(parameter: Any) -> int:
    """Return the number of values of a whole parameter."""
    count: int = getattr(parameter, "ds_numel", parameter.numel())
    return count


def _optimizer_arguments(optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the arguments of ``deepspeed.initialize`` for an optimizer."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, DummyOptim):
        return {"optimizer": twin_of(optimizer)}
    return {
        "model_parameters": [
            {**group, "params": trained(group["params"])}
            for group in optimizer.given
            if trained(group["params"])
        ]
    }


def _location() -> Mapping[str, str]:
    """Return the variables from which DeepSpeed reads where a process is."""
    from trainer.state import PartialState

    return {"LOCAL_RANK": str(PartialState().local_process_index)}


def _quieten(config: Mapping[str, Any]) -> None:
    """Log only DeepSpeed's warnings, unless the configuration enables timers or sets a level."""
    options = ("log_level", "wall_clock_breakdown", "dump_state", "memory_breakdown")
    if not any(config.get(name) for name in options):
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed itself calls these in each update, so users cannot act on the warnings.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        message = f"`torch.distributed.{name}` is deprecated"
        warnings.filterwarnings("ignore", message, FutureWarning)
