"""Models of megatron-core: layers divided over processes, stage after stage, and replicas of both.

Tensor parallel processes share each layer, pipeline parallel ones have different layers, and data
parallel ones have replicas (Shoeybi et al., "Megatron-LM", 2019; Narayanan et al., SC 2021).

The Trainer cuts each batch into micro-batches, which go through the stages by megatron-core's own
schedule: forward and backward passes of different micro-batches overlap. ``training_step`` runs for
each of them on every stage. On the stages before the last it ends where it calls the model, whose
output is sent on; the last stage computes the loss. `Megatron.forward` runs all of this, so that
gradients are there before the loop knows the weight of the batch: they are summed with the items of
each micro-batch as weights, and `Megatron._end_window` multiplies by what the loop has applied to
the loss. Elsewhere, such as in an evaluation, all stages get the output of the last one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.configuration import MegatronLMPlugin
from trainer.configuration.dummy_optimizers import MegatronLMDummyScheduler
from trainer.distributed.guards import forbid_collectives
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.process_control import on_all
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.base import EngineOptions, Gradients
from trainer.engines.driving import DrivenWeights, DrivesOptimizer, Prepared
from trainer.engines.micro_batches import (
    StageLogs,
    gather_outcomes,
    required_loss,
    split_batch,
)
from trainer.engines.single import attribute_restorer
from trainer.enums import DistributedType, DynamoBackend
from trainer.names import EXTRA_STATE, bare_names
from trainer.optim.finite import find_non_finite
from trainer.optim.optimizer import parameters_of, twin_of
from trainer.optim.state import keeps_on_host
from trainer.optim.weighting import scale_
from trainer.precision import unwrap_forward
from trainer.rng import isolated_rng, mix, register_generators, seed_local
from trainer.tree import LocalShards, fill_, find_batch_size

_TRACKER = "megatron_rng"
_GRADIENT = attrgetter("main_grad")
_OTHER_STAGES = (
    "is called in training_step, but with pp_degree above 1 the processes run different "
    "micro-batches at the same time, so the call would hang. Call it in on_train_step_end."
)


@dataclass(frozen=True)
class _Groups:
    """The process groups that megatron-core has made, and of what.

    Attributes:
        world: The group of all processes at that time.
        sizes: The sizes of the tensor and the pipeline dimension.
    """

    world: Any
    sizes: tuple[int, int]


_made: _Groups | None = None


def import_megatron(device: torch.device) -> Any:
    """Import megatron-core; return its ``parallel_state``.

    Raises:
        ImportError: It is not installed.
        ValueError: The run uses another kind of device than megatron-core does.
    """
    try:
        with warnings.catch_warnings():
            # Of fused kernels that are not installed.
            warnings.simplefilter("ignore")
            from megatron.core import parallel_state
            from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401 - warn, too
    except ImportError as error:
        raise ImportError(
            "megatron_lm_plugin needs megatron-core, which is not installed: pip install "
            "'cadence-trainer[megatron]'."
        ) from error
    try:
        kind = torch.device(torch.cuda.current_device()).type
    except (AssertionError, RuntimeError):  # of a torch without CUDA, or a machine
        kind = None
    if kind != device.type:
        raise ValueError(
            f"megatron-core trains on CUDA devices, but this run uses {device.type!r}: leave out "
            "megatron_lm_plugin, or shard with fsdp_plugin."
        )
    return parallel_state


class _Described(NamedTuple):
    """What a checkpoint has of a weight, or of an extra state.

    Attributes:
        stage: The stage that saves it; -1 if it is a copy of another stage's.
        first: The first of its names; tied weights have several.
        shape: The shape of the whole tensor.
        dtype: Its dtype; None for an extra state.
        extra: What ``get_extra_state`` gave.
    """

    stage: int
    first: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    extra: Any = None


class _StageEnded(BaseException):  # not an Exception: the user's code must not catch it
    """Ends ``training_step`` on a stage before the last one.

    Attributes:
        output: What goes to the next stage.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


@dataclass
class _MicroBatch:
    """A part of a batch on its way through the stages.

    Attributes:
        number: Its number in the batch.
        batch: Its data.
        items: What its loss is a mean over.
        calls: How often its step has called the model.
    """

    number: int
    batch: Any
    items: float
    calls: int = 0


@dataclass
class _Window:
    """What is known of a window so far.

    Attributes:
        clipped: Whether its gradients are clipped.
        loss: The loss of a batch whose backward passes have run, until the loop runs backward.
        items: What it is a mean over.
        reference: The items of the window's first batch, to which weights are relative.
        scale: What all gradients are multiplied by at the end; None without a schedule.
    """

    clipped: bool = False
    loss: Tensor | None = None
    items: float = 0.0
    reference: float = 0.0
    scale: Tensor | None = None


class Megatron(DrivesOptimizer):
    """Engine on megatron-core; see `trainer.engines.base.Engine` for the methods.

    It has one model and its optimizer.
    """

    distributed_type = DistributedType.MEGATRON_LM
    library, argument = "megatron-core", "megatron_lm_plugin"
    dummy_scheduler = MegatronLMDummyScheduler
    plugin: MegatronLMPlugin

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        assert options.megatron_lm_plugin is not None
        self.plugin = options.megatron_lm_plugin
        self.plugin.check_supported()
        self._states = import_megatron(options.device)
        self._make_groups()
        states = self._states
        self._tp_rank = states.get_tensor_model_parallel_rank()
        self._stage = states.get_pipeline_model_parallel_rank()
        self._stages = states.get_pipeline_model_parallel_world_size()
        self._is_last = self._stage == self._stages - 1
        counts = self._is_last and self._tp_rank == 0
        self.parallel = replace(
            self.parallel,
            dp_rank=states.get_data_parallel_rank(),
            dp_size=states.get_data_parallel_world_size(),
            is_data_primary=counts,
            is_log_primary=counts,
            is_model_parallel=True,
        )
        self.driver = self
        self.gradients = MegatronGradients(self)
        self.weights = MegatronWeights(self)
        self._model: Any = None
        self._replica: Any = None  # megatron-core's DDP around the model, in training
        self._twin: Any = None  # what is stepped; it has the state
        self._masters: dict[int, Tensor] = {}  # what the twin updates, by the parameter's id
        self._orders: list[list[str]] = []  # the names in each group of the optimizer
        self._micro: _MicroBatch | None = None  # the one whose step runs, inside a schedule
        self._input: Tensor | None = None  # of its model, from the stage before
        self._error: Exception | None = None  # of one of the steps
        self._seed = 0  # of the micro-batches of a batch, with several stages
        self._logs = StageLogs(nn.Module())  # of the batch that runs
        self._window = _Window()
        self._share_seed()

    def _unsupported(self, options: EngineOptions) -> str | None:
        """See `DrivesOptimizer`."""
        if problem := super()._unsupported(options):
            return problem
        if (compiler := options.dynamo_plugin) and compiler.backend != DynamoBackend.NO:
            return f"dynamo_backend={str(compiler.backend).lower()!r}: leave it out"
        if options.sync_each_batch:
            return "sync_each_batch=True: gradients are reduced once an update"
        return None

    # -- process groups ----------------------------------------------------------------------------

    def _make_groups(self) -> None:
        global _made
        plugin, world = self.plugin, self.options.world_size
        sizes = (plugin.tp_degree or 1, plugin.pp_degree or 1)
        if world % (sizes[0] * sizes[1]):
            raise ValueError(
                f"megatron_lm_plugin has tp_degree={sizes[0]} and pp_degree={sizes[1]}, whose "
                f"product must divide the number of processes, which is {world}."
            )
        self._make_group()
        wanted = _Groups(dist.group.WORLD, sizes)
        states = self._states
        if states.model_parallel_is_initialized():
            if _made is not None and _made.world is wanted.world and _made.sizes == sizes:
                return
            states.destroy_model_parallel()
        limit, limits = self.options.timeout, {}
        if limit is not None:
            limits["distributed_timeout_minutes"] = limit.total_seconds() / 60
        # Processes that read the same data have consecutive ranks, as with the other engines.
        states.initialize_model_parallel(*sizes, order="tp-cp-ep-pp-dp", **limits)
        _made = wanted

    def _share_seed(self) -> None:
        """Seed megatron-core's own generators, such as for the dropout inside divided layers."""
        from megatron.core.tensor_parallel import (
            get_cuda_rng_tracker,
            model_parallel_cuda_manual_seed,
        )

        seed = (
            mix(broadcast_object(torch.initial_seed()), self.parallel.dp_rank, self._stage) % 2**31
        )
        with isolated_rng(libraries=False):  # it seeds the global one, too
            model_parallel_cuda_manual_seed(seed)
        register_generators(
            "megatron-core",
            lambda: get_cuda_rng_tracker().get_states(),
            lambda states: get_cuda_rng_tracker().set_states(states),
        )

    # -- placing -----------------------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,  # noqa: ARG002 - that of the process groups
        evaluation_mode: bool = False,  # noqa: ARG002 - an interface
    ) -> nn.Module:
        """Return a wrapper; all processes that share data call it together.

        Raises:
            NotImplementedError: The model has stages, or batches are to be cut.
            ValueError: There is a model already.
        """
        if isinstance(module, Prepared):
            return module
        if self._stages > 1 or self.plugin.num_micro_batches != 1:
            raise NotImplementedError(
                f"pp_degree is {self._stages} and num_micro_batches "
                f"{self.plugin.num_micro_batches}, but a custom loop runs forward and backward "
                "itself, and cannot overlap those of several micro-batches. Use the Trainer, "
                "whose training_step is the step of a schedule; or set both to 1."
            )
        self._check_first(module)
        unwrap_forward(module)  # the model computes in the dtype of its weights
        self._place(module)
        return Prepared(module, module)

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Find the model in the module, and make its replicas equal.

        Raises:
            ValueError: The module is optimised manually, or its model does not fit the plugin.
        """
        super().start(module, step_sync)
        self._share_seed()
        self._place(module)

    def _place(self, module: nn.Module) -> None:
        module.to(self.options.device)
        self._owner, self._model = module, _model_in(module)
        self._check_model()
        if self.options.mixed_precision == "bf16":  # norms and positions are float32 at first
            self._model.to(torch.bfloat16)
        self._broadcast_weights()
        self._config = config = self._model.config
        changed = ("finalize_model_grads_func", "variable_seq_lengths")
        self._undo += [attribute_restorer(config, name) for name in changed]
        config.finalize_model_grads_func = None  # windows are the loop's
        model = self._model
        self._undo += [attribute_restorer(model, name) for name in ("forward", "set_input_tensor")]
        model.forward = wraps(model.forward)(partial(self._run_model, model.forward))
        take_input = partial(self._take_input, model.set_input_tensor)
        model.set_input_tensor = wraps(model.set_input_tensor)(take_input)

    def _check_model(self) -> None:
        """Check that the model is as the plugin and the precision say.

        Raises:
            ValueError: It is not.
            NotImplementedError: It has experts, or weighs its loss by itself.
        """
        assert self._owner is not None
        config, plugin, name = self._model.config, self.plugin, type(self._model).__name__
        wanted = plugin.transformer_arguments(self.options.mixed_precision)
        differs = [
            f"{key} is {getattr(config, key)!r}, not {value!r}"
            for key, value in wanted.items()
            if getattr(config, key) != value and not (key == "pipeline_dtype" and self._stages == 1)
        ]
        kind = getattr(self._model, "position_embedding_type", None)
        if plugin.use_rotary_position_embeddings not in (None, kind == "rope"):
            differs.append(f"position_embedding_type is {kind!r}")
        if differs:
            raise ValueError(
                f"The configuration of {name} differs from megatron_lm_plugin and mixed_precision="
                f"{self.options.mixed_precision!r}: {'; '.join(differs)}. Build the model with "
                "TransformerConfig(..., **plugin.transformer_arguments(mixed_precision))."
            )
        if config.num_moe_experts or config.calculate_per_token_loss or config.mtp_num_layers:
            raise NotImplementedError(
                f"The configuration of {name} has num_moe_experts={config.num_moe_experts}, "
                f"mtp_num_layers={config.mtp_num_layers} and "
                f"calculate_per_token_loss={config.calculate_per_token_loss}. Experts and the "
                "prediction of several tokens are not supported yet; for a loss per token return "
                "the number of tokens from count_items."
            )

    def _broadcast_weights(self) -> None:
        """Make the first replica's weights everybody's, and what divided layers have in common."""
        assert self._owner is not None
        states = self._states
        of_model = set(map(id, chain(self._model.parameters(), self._model.buffers())))
        for tensor in chain(self._owner.parameters(), self._owner.buffers()):
            if id(tensor) not in of_model:
                dist.broadcast(tensor.data, src=0)
                continue
            if not _is_divided(tensor):
                source = states.get_tensor_model_parallel_src_rank()
                group = states.get_tensor_model_parallel_group()
                dist.broadcast(tensor.data, src=source, group=group)
            source = states.get_data_parallel_src_rank()
            dist.broadcast(tensor.data, src=source, group=states.get_data_parallel_group())

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make what is stepped: in bfloat16 it updates float32 copies of the weights.

        Returns:
            The optimizer itself, with the user's groups and parameters. A copy of it is stepped,
            which takes the options of the groups before each step.

        Raises:
            ValueError: See `DrivesOptimizer`; or trained parameters are outside the model.
        """
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        self._take(optimizer)
        assert self._owner is not None
        of_model = set(map(id, self._model.parameters()))
        named = bare_names(self._owner, self._owner.named_parameters())
        if others := [n for n, p in named if p.requires_grad and id(p) not in of_model]:
            raise ValueError(
                f"{', '.join(others)} are trained, but are outside the "
                f"{type(self._model).__name__} of megatron-core, and only the parameters of that "
                "model are divided over the processes: put them into the model, or freeze them."
            )
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
        )
        self._replica = DistributedDataParallel(self._config, how, self._model)
        self._masters = {
            id(p): p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for p in parameters_of([optimizer])
            if id(p) in self._trains
        }
        self._twin = twin_of(optimizer, self._masters)
        names = self._parameter_names()
        order = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        # In the order of ranks, hence of stages: as one process has them.
        self._orders = [
            list(dict.fromkeys(chain(*groups)))
            for groups in zip(*all_gather_object(order), strict=True)
        ]
        return optimizer

    # -- the steps ---------------------------------------------------------------------------------

    @property
    def _has_schedule(self) -> bool:
        """Whether batches are cut, and go through a schedule."""
        return self._stages > 1 or self.plugin.num_micro_batches != 1

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module; a training step also runs its backward passes."""
        if name != "training_step" or not self._has_schedule:
            return super().forward(name, *args)
        if self._in_dummy:
            return None  # all processes of a schedule share its data, so none of them waits
        batch, *others = args
        number = self.plugin.num_micro_batches or 1
        parts = split_batch(self.module, batch, number, "num_micro_batches")
        micro_batches = [_MicroBatch(*part) for part in parts]
        items = sum(micro.items for micro in micro_batches)
        self._begin_window()
        window, self._error = self._window, None
        self._logs = StageLogs(self.module)
        window.reference = window.reference or items
        if self._stages > 1:  # steps of all stages draw the same numbers
            self._seed = int(torch.randint(2**31, ()))
        losses: list[tuple[Tensor, float]] = []
        self._run_schedule(micro_batches, partial(self._step, len(micro_batches), losses, others))
        mean = torch.zeros((), device=self.options.device)
        for loss, weight in losses:
            mean = mean + loss.detach().float() * (weight / items)
        if self._stages > 1:
            mean = self._share_loss(mean)
        window.loss, window.items = mean.requires_grad_(), items
        return window.loss

    def _run_schedule(self, micro_batches: Sequence[_MicroBatch], step: Callable[..., Any]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sizes = {find_batch_size(micro.batch) or 1 for micro in micro_batches}
        length = self.plugin.seq_length
        self._config.variable_seq_lengths = self._stages > 1 and (length is None or len(sizes) > 1)
        kind = self.options.device.type
        autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
        )
        put_back = attribute_restorer(self.module, "log")
        try:
            # Layers that backward computes again are then computed as before.
            with torch.autocast(kind, enabled=False):
                get_forward_backward_func()(
                    forward_step_func=partial(step, autocast),
                    data_iterator=iter(micro_batches),
                    model=[self._replica],
                    num_microbatches=len(micro_batches),
                    seq_length=length or 1,
                    micro_batch_size=max(sizes),
                    forward_only=False,
                )
        finally:
            self._micro = None
            put_back()

    def _step(
        self,
        number: int,
        losses: list[tuple[Tensor, float]],
        others: Sequence[Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        micro_batches: Iterator[_MicroBatch],
        _model: Any,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run ``training_step`` on a micro-batch, as far as this stage goes.

        With stages, an error is kept for `_share_loss`: others wait for what goes to them.

        Returns:
            What goes to the next stage; on the last one, the weighted loss.
        """
        self._micro = micro = next(micro_batches)
        if self._stages == 1:
            with autocast():
                loss = self._loss(micro, others)
        else:
            try:
                if self._error is not None:
                    return self._zero_output(), _without_metrics
                with (
                    autocast(),
                    isolated_rng(mix(self._seed, micro.number), libraries=False),
                    forbid_collectives(_OTHER_STAGES),
                ):
                    loss = self._loss(micro, others)
            except _StageEnded as ended:
                return ended.output, _without_metrics
            except Exception as error:  # noqa: BLE001 - raised on all stages
                self._error = error
                return self._zero_output(), _without_metrics
        losses.append((loss, micro.items))
        weight = micro.items * number / self._window.reference  # the schedule divides by the number
        return loss * weight, _without_metrics

    def _loss(self, micro: _MicroBatch, others: Sequence[Any]) -> Tensor:
        """Return the loss of a micro-batch.

        Raises:
            RuntimeError: ``training_step`` has not called the model once.
            TypeError: It has returned no loss.
        """
        self._logs.record(micro.items, lambda: self._is_last, shared=self._stages > 1)
        outputs = super().forward("training_step", micro.batch, *others)
        if micro.calls != 1:
            raise RuntimeError(
                f"training_step called the {type(self._model).__name__} {micro.calls} times; with "
                "stages or micro-batches it must call it once for each batch."
            )
        return required_loss(outputs)

    def _zero_output(self) -> Tensor:
        """Return what goes on after an error, with gradients of zero."""
        if self._input is None:  # on the first stage
            assert self._micro is not None
            length = self.plugin.seq_length or 1
            if self._config.sequence_parallel:
                length = max(length // self._config.tensor_model_parallel_size, 1)
            shape = length, find_batch_size(self._micro.batch) or 1, self._config.hidden_size
            dtype, device = self._config.pipeline_dtype, self.options.device
            return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        nothing = self._input * 0
        return nothing.float().sum() if self._is_last else nothing

    def _take_input(self, take: Callable[..., Any], inputs: Any) -> Any:
        """Take the place of the model's ``set_input_tensor``."""
        self._input = inputs[0] if isinstance(inputs, list) else inputs
        return take(inputs)

    def _share_loss(self, mean: Tensor) -> Tensor:
        """Give all stages the loss of the last one, and log what it has logged."""
        loss, logged = self._of_last_stage((mean.item(), self._logs.to_send()), self._error)
        if self._is_last:
            return mean
        self._logs.repeat(logged)
        return torch.full_like(mean, loss)

    def _of_last_stage(self, value: Any, error: Exception | None) -> Any:
        """Return what the last stage gives here; see `gather_outcomes`."""
        group = self._states.get_pipeline_model_parallel_group()
        return gather_outcomes(group, value, error)[-1]

    def _run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of the model's ``forward``."""
        # It computes in the dtype of its weights.
        with torch.autocast(self.options.device.type, enabled=False):
            if self._micro is None:
                alone = self._stages == 1
                return (
                    forward(*args, **kwargs) if alone else self._run_stages(forward, args, kwargs)
                )
            self._micro.calls += 1
            if self._stages > 1:  # each stage drops other values; see `_step`
                seed_local(mix(self._seed, self._micro.number, 1 + self._stage))
            output = forward(*args, **kwargs)
        if self._is_last:
            return output
        length = self.plugin.seq_length
        if self._config.sequence_parallel and length:
            length //= self._config.tensor_model_parallel_size
        if not self._config.variable_seq_lengths and len(output) != length:
            raise ValueError(
                f"seq_length of megatron_lm_plugin is {self.plugin.seq_length}, but a micro-batch "
                f"goes to the next stage as a tensor of the shape {tuple(output.shape)}, whose "
                f"first dimension should be {length}: set it to the length of all sequences, or "
                "leave it out."
            )
        raise _StageEnded(output)

    def _run_stages(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run all stages outside a schedule, one after the other; all get the last one's output.

        Raises:
            Exception: See `_of_last_stage`.
            RuntimeError: Gradients are asked for.
        """
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self._model).__name__} was called with gradients outside training_step, "
                "where no schedule runs its stages backward: call it under torch.no_grad()."
            )
        states = self._states
        group = states.get_pipeline_model_parallel_group()
        self._config.variable_seq_lengths = True
        between = P2PCommunicator(pp_group=group, config=self._config)
        self._model.set_input_tensor(between.recv_forward([()], self._stage == 0))
        error = None
        try:
            output = forward(*args, **kwargs)
        except Exception as caught:  # noqa: BLE001 - raised on all stages
            size, dtype = (1, 1, self._config.hidden_size), self._config.pipeline_dtype
            error, output = caught, torch.zeros(size, dtype=dtype, device=self.options.device)
        between.send_forward([output], self._is_last)
        shape, dtype = self._of_last_stage((output.shape, output.dtype), error)
        if not self._is_last:
            output = torch.empty(shape, dtype=dtype, device=self.options.device)
        output = output.contiguous()
        source = states.get_pipeline_model_parallel_last_rank()
        dist.broadcast(output, src=source, group=group)
        return output

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a batch; in a schedule, learn their factor."""
        if loss is None:
            if stats is not None:
                self._begin_window()
            return self._end_micro_batch(stats)
        if self._ended:
            self.optimizer_zero_grad()
        self._begin_window()
        window = self._window
        loss.backward(*args, **kwargs)
        if window.loss is not None:
            applied = window.loss.grad
            assert applied is not None
            # The loop's factor for one item, which is the same for all batches of a window.
            window.scale = applied * (window.reference / window.items)
            window.loss = None
        return self._end_micro_batch(stats)

    def _begin_window(self) -> None:
        """Drop gradients of the user's own backward passes before the first one of a window."""
        if not self._pending and self._replica is not None:
            self._replica.zero_grad_buffer()
        self._pending = True

    def _end_window(self) -> None:
        """Reduce the gradients of a window; collective, once a window."""
        if self._ended:
            return
        from megatron.core.distributed import finalize_model_grads

        self._ended = True
        if self._window.scale is not None:
            self._replica.scale_gradients(self._window.scale)
        finalize_model_grads([self._replica])

    def begin_epoch(self) -> None:
        """Check that the same parameters are trained, and that the plugin's schedule is used.

        Raises:
            ValueError: It is not.
        """
        super().begin_epoch()
        if not self._scheduled and (schedule := self.plugin.of_schedule()):
            raise ValueError(
                f"megatron_lm_plugin has {', '.join(schedule)}, but there is no scheduler to use "
                "them: return MegatronLMDummyScheduler(optimizer) from configure_optimizers, or "
                "leave them out."
            )

    # -- the update --------------------------------------------------------------------------------

    def _reduced(self, parameters: Iterable[Any]) -> list[Any]:
        """Return trained parameters with reduced gradients; none in a window without a loss."""
        self._end_window()
        if not self._pending and hasattr(self, "step_sync"):  # in a fit
            return []
        return [p for p in parameters if id(p) in self._trains]

    @torch.no_grad()
    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Make an update, clipped by the plugin's norm if nothing else has clipped it."""
        self.check_unknown_parameters()
        parameters = parameters_of([optimizer])
        if self.plugin.gradient_clipping and not self._window.clipped:
            self.gradients.clip_grad_norm_(parameters, self.plugin.gradient_clipping)
        self._give_options(self._twin)
        for name in ("grad_scale", "found_inf"):  # by which a fused optimizer skips an update
            vars(self._twin).pop(name, None)
            if name in vars(optimizer):
                setattr(self._twin, name, vars(optimizer)[name])
        updated = self._reduced(parameters)
        for parameter in updated:
            self._masters[id(parameter)].grad = parameter.main_grad
        self._twin.step()
        for parameter in updated:
            master = self._masters[id(parameter)]
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)
        self._step_schedules()

    def optimizer_zero_grad(self, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002 - there is one
        """Drop the gradients."""
        if self._pending and self._replica is not None:
            self._replica.zero_grad_buffer()
        self._pending = self._ended = False
        self._window = _Window()

    # -- state -------------------------------------------------------------------------------------

    def _keys(self) -> list[tuple[str, str, Any]]:
        """Return this process's state dict: each key, its name in the whole model, and the value.

        It may fail on one process: hooks and ``get_extra_state`` are the user's.

        Raises:
            RuntimeError: There is no model.
        """
        if self._owner is None:
            raise RuntimeError(
                "No megatron-core model is prepared: prepare it with this Accelerator, or, with "
                "a Trainer, read its weights in a callback while fit runs."
            )
        state = self._owner.state_dict(keep_vars=True)
        pairs = zip(state, self._whole_names(state.items()), strict=True)
        return [(key, name, value) for key, (name, value) in pairs]

    def _whole_names(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Rename what has a name in the module to its name in the whole model."""
        owner = self._owner
        assert owner is not None
        layers: dict[str, str] = {}  # each stage numbers its own from 0
        for path, part in bare_names(owner, owner.named_modules(remove_duplicate=False)):
            parent, _, index = path.rpartition(".")
            number = getattr(part, "layer_number", None)
            if index.isdecimal() and number is not None:
                layers[path + "."] = f"{parent}.{number - 1}."
        for name, value in bare_names(owner, named):
            layer = next((path for path in layers if name.startswith(path)), "")
            whole = layers.get(layer, "") + name.removeprefix(layer)
            if _is_copy(value):
                whole = whole.replace("output_layer.weight", "embedding.word_embeddings.weight")
            yield whole, value

    def _parameter_names(self) -> dict[int, str]:
        """Return the first name of each parameter in the whole model, by its id."""
        assert self._owner is not None
        return _first_names(self._whole_names(self._owner.named_parameters(remove_duplicate=False)))

    def _described(self, state: Mapping[str, Any]) -> dict[str, _Described]:
        """Return what all processes have, by name; collective.

        Of what several stages have it is that of the last one, which computes the loss.

        Args:
            state: What this process has.
        """
        weights = {name: value for name, value in state.items() if _is_weight(name, value)}
        names = _first_names(weights.items())
        described = {
            name: _Described(
                -1 if _is_copy(value) else self._stage,
                names[id(value)],
                self._whole_shape(value),
                self._masters.get(id(value), value).dtype,
            )
            if name in weights
            else _Described(self._stage, name, extra=value)
            for name, value in state.items()
        }
        of_all: dict[str, _Described] = {}
        for of_rank in all_gather_object(described):
            for name, each in of_rank.items():
                if name not in of_all or each.stage > of_all[name].stage:
                    of_all[name] = each
        return of_all

    def _whole_shape(self, tensor: Any) -> tuple[int, ...]:
        shape = list(tensor.shape)
        if _is_divided(tensor):
            shape[tensor.partition_dim] *= self._states.get_tensor_model_parallel_world_size()
        return tuple(shape)

    def _shards(
        self, like: Any, part: Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> LocalShards:
        """Return this process's part of a whole tensor.

        Args:
            like: The weight that is divided in the same way.
            part: The values; None on processes that have none.
            shape: The shape of the whole tensor.
            dtype: Its dtype.
        """
        device, shards = self.options.device, []
        if part is None:
            return LocalShards(shape, dtype, device)
        values, offsets = part.detach(), [0] * part.ndim
        if _is_divided(like):
            processes = self._states.get_tensor_model_parallel_world_size()
            pieces, dim = like.partition_stride, like.partition_dim
            for number, piece in enumerate(values.chunk(pieces, dim)):
                here = list(offsets)
                here[dim] = (number * processes + self._tp_rank) * piece.shape[dim]
                shards.append((here, piece))
        else:
            shards.append((offsets, values))
        first = self._tp_rank == 0 or _is_divided(like)
        saved = first and self.parallel.dp_rank == 0 and not _is_copy(like)
        return LocalShards(shape, dtype, device, shards, saved=saved)

    def _named_masters(self) -> Iterator[tuple[str, Any, Tensor]]:
        """Yield the name of each trained parameter, it, and the tensor that is updated."""
        assert self._client is not None
        names = self._parameter_names()
        for parameter in parameters_of([self._client]):
            if id(parameter) in self._masters:
                yield names[id(parameter)], parameter, self._masters[id(parameter)]

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what this process holds of the state, as one process numbers it; collective."""
        state = Optimizer.state_dict(optimizer)
        state["state"] = {}
        numbers = self._numbers()
        for group, order in zip(state["param_groups"], self._orders, strict=True):
            group["params"] = [numbers[name] for name in order]
        of_process = {
            name: (p, self._twin.state.get(master, {})) for name, p, master in self._named_masters()
        }
        notes = {
            name: (self._whole_shape(p), {key: _note(value, p) for key, value in values.items()})
            for name, (p, values) in of_process.items()
        }
        of_all: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        for of_rank in all_gather_object(notes):
            of_all = of_rank | of_all
        for name in of_all:
            number = numbers[name]
            like, values = of_process.get(name, (None, {}))
            shape, notes_of = of_all[name]
            held = {
                key: self._shards(like, values.get(key), shape, note)
                if isinstance(note, torch.dtype)  # of a tensor that is divided as the weight is
                else note
                for key, note in notes_of.items()
            }
            if held:
                state["state"][number] = held
        return state

    def _numbers(self) -> dict[str, int]:
        """Return the numbers that one process gives to the optimizer's parameters."""
        return {name: number for number, name in enumerate(chain(*self._orders))}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this process's parts of a state that is numbered as one process numbers it."""
        Optimizer.load_state_dict(
            optimizer,
            {
                **state,
                "state": {},
                "param_groups": [
                    {**saved, "params": present["params"]}
                    for saved, present in zip(
                        state["param_groups"],
                        Optimizer.state_dict(optimizer)["param_groups"],
                        strict=True,
                    )
                ],
            },
        )
        numbers = self._numbers()
        self._twin.state.clear()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter, master in self._named_masters():
            loaded, shape = {}, self._whole_shape(parameter)
            for key, value in state["state"].get(numbers[name], {}).items():
                loaded[key] = value
                if not hasattr(value, "shape"):
                    continue
                on_host = keeps_on_host(key, groups[id(parameter)])
                device = torch.device("cpu") if on_host else master.device
                if value.shape and tuple(value.shape) == shape:
                    loaded[key] = torch.empty(parameter.shape, dtype=value.dtype, device=device)
                    fill_(self._shards(parameter, loaded[key], shape, value.dtype), value)
                else:
                    loaded[key] = torch.empty(value.shape, dtype=value.dtype, device=device)
                    fill_(loaded[key], value)
            if loaded:
                self._twin.state[master] = loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the states of megatron-core's own generators."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return {_TRACKER: dict(get_cuda_rng_tracker().get_states())}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the generators, on the layout that has saved; others are seeded anew."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if len(saved) == self.options.world_size and _TRACKER in saved[self.options.rank]:
            get_cuda_rng_tracker().set_states(saved[self.options.rank][_TRACKER])

    def broadcast_buffers(self) -> None:
        """Make the first replica's buffers everybody's."""
        states = self._states
        for buffer in self.module.buffers():
            source = states.get_data_parallel_src_rank()
            dist.broadcast(buffer, src=source, group=states.get_data_parallel_group())

    def close(self) -> None:
        """Leave the model to other engines."""
        super().close()
        if self._replica is not None:
            self._replica.param_to_bucket_group.clear()  # whose gradients its hooks take
            self._replica.grad_accs.clear()
            for parameter in self._replica.params_with_grad:
                del parameter.main_grad, parameter.grad_added_to_main_grad
        self._replica = None


class MegatronGradients(Gradients):
    """Gradients in the buffers of megatron-core.

    Args:
        engine: The engine on megatron-core.
    """

    def __init__(self, engine: Megatron) -> None:
        self._engine = engine

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Raise: no process has the whole gradient.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "gradient: the processes have gradients of other layers, or of parts of them. "
            "parameter.main_grad is this process's."
        )

    def scale_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a tensor of shape (), in place."""
        scale_(map(_GRADIENT, self._engine._reduced(parameters)), factor)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        non_finite = find_non_finite(map(_GRADIENT, self._engine._reduced(parameters)))
        anywhere = torch.zeros(1, device=self._engine.options.device) + (
            0.0 if non_finite is None else non_finite
        )
        sum_numbers(anywhere)
        flag = anywhere[0].clamp(max=1.0)
        return bool(flag) if flag.is_cpu else flag

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before.

        What several processes of a model have is counted once.
        """
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        chosen = self._engine._reduced(parameters)
        gradients = [
            p.main_grad
            for p in chosen
            if param_is_not_tensor_parallel_duplicate(p) and not _is_copy(p)
        ]
        total = torch.zeros(1, dtype=torch.float64, device=self._engine.options.device)
        if gradients:
            total += torch.nn.utils.get_total_norm(gradients, norm_type)
        group = self._engine._states.get_model_parallel_group()
        if norm_type == inf:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        else:
            total = total**norm_type
            dist.all_reduce(total, group=group)
            total = total ** (1 / norm_type)
        whole = total[0].float()
        factor = (max_norm / (whole + 1e-6)).clamp(max=1.0)  # as in torch
        scale_(map(_GRADIENT, chosen), factor)
        self._engine._window.clipped = True
        return whole

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients."""
        for parameter in self._engine._reduced(parameters):
            parameter.main_grad.clamp_(-max_value, max_value)
        self._engine._window.clipped = True


class MegatronWeights(DrivenWeights):
    """Weights of which each process has other layers, or parts of them."""

    _engine: Megatron

    # ARG002: there is one
    def parts(self, module: nn.Module, *, to_fill: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """Return what this process holds of the weights, by the names of all of them.

        Of trained ones it is the float32 copies that the optimizer updates. Names of tied weights
        have the same object. What ``get_extra_state`` gave is itself, on all processes. The call is
        collective: the processes have other names.
        """
        engine = self._engine
        keys = on_all(engine._keys, "state_dict")
        state = {name: value for _, name, value in keys}
        described = engine._described(state)
        here = {each.first: state[name] for name, each in described.items() if name in state}
        parts: dict[str, Any] = {}
        for first in dict.fromkeys(each.first for each in described.values()):
            stage, _, shape, dtype, parts[first] = described[first]
            if dtype is not None:
                tensor = here.get(first)
                held = None if tensor is None else engine._masters.get(id(tensor), tensor)
                parts[first] = engine._shards(tensor, held, shape, dtype)
                parts[first].saved &= stage == engine._stage
        return {name: parts[each.first] for name, each in described.items()}

    # ARG002: there is one
    def load_extra_states(self, module: nn.Module, states: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Give this process's parts of the module the states of their names in the whole model."""
        owner = self._engine._owner
        assert owner is not None
        here = {key: states[name] for key, name, _ in self._engine._keys() if name in states}
        owner.load_state_dict(here, strict=False)

    @torch.no_grad()
    def refresh(self, module: nn.Module) -> None:  # noqa: ARG002 - there is one
        """Give the model the weights that were loaded into the copies."""
        assert self._engine._owner is not None
        for parameter in self._engine._owner.parameters():
            if id(parameter) in self._engine._masters:
                parameter.copy_(self._engine._masters[id(parameter)])


def _without_metrics(loss: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return loss, {}


def _note(value: Any, parameter: Tensor) -> Any:
    """Return the dtype of a state that is divided as its parameter is; else its value."""
    if not isinstance(value, Tensor):
        return value
    divided = value.ndim and value.shape == parameter.shape
    return value.dtype if divided else value.detach().cpu()


def _is_divided(tensor: Any) -> bool:
    """Return whether the processes of a layer have different parts of a weight."""
    return bool(getattr(tensor, "tensor_model_parallel", False))


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Return the first name of each tensor by its id."""
    return {id(tensor): name for name, tensor in reversed(list(named))}


def _is_weight(name: str, value: Any) -> bool:
    """Return whether an entry of a state dict is no extra state, as which tensors may be, too."""
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA_STATE


def _is_copy(parameter: Any) -> bool:
    """Return whether it is the last stage's copy of the embedding on the first."""
    return bool(getattr(parameter, "shared", False))


def _model_in(module: nn.Module) -> Any:
    """Return the model of megatron-core that a module is or has.

    Raises:
        ValueError: It has none, or several.
    """
    from megatron.core.transformer.module import MegatronModule

    found = [
        part
        for part in module.modules()
        if isinstance(part, MegatronModule) and hasattr(part, "set_input_tensor")
    ]
    inside = {id(inner) for part in found for inner in part.modules() if inner is not part}
    models = [part for part in found if id(part) not in inside]
    if len(models) != 1:
        names = ", ".join(type(part).__name__ for part in models) or "none"
        raise ValueError(
            f"{type(module).__name__} has {names} of the models of megatron-core, and "
            "megatron_lm_plugin trains one: build a GPTModel in configure_model and assign it to "
            "an attribute."
        )
    return models[0]
