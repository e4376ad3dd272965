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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.base import EngineOptions
from trainer.engines.single import SingleDevice, attribute_restorer
from trainer.enums import DistributedType, DynamoBackend
from trainer.megatron_plugin import MegatronLMDummyScheduler
from trainer.names import bare_names
from trainer.optim.finite import find_non_finite
from trainer.optim.lomo import is_lomo
from trainer.optim.optimizer import parameters_of, twin_of
from trainer.optim.weighting import loss_of, scale_
from trainer.precision import unwrap_forward
from trainer.rng import isolated_rng, mix, seed_local
from trainer.tree import as_bytes, find_batch_size, map_tree

# These look at whole tensors; tensor parallel processes have parts.
_NEED_WHOLE_TENSORS = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
_TRACKER = "megatron_rng"


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
            "megatron_lm_plugin asks for megatron-core, which is not installed: "
            "pip install 'cadence-trainer[megatron]'."
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
    """The gradients of a window so far.

    Attributes:
        pending: Whether there are gradients that no zero_grad has dropped.
        ended: Whether they are reduced.
        clipped: Whether they are clipped.
        loss: The loss of a batch whose backward passes have run, until the loop runs backward.
        items: What it is a mean over.
        reference: The items of the window's first batch, to which weights are relative.
        scale: What all gradients are multiplied by at the end; None without a schedule.
    """

    pending: bool = False
    ended: bool = False
    clipped: bool = False
    loss: Tensor | None = None
    items: float = 0.0
    reference: float = 0.0
    scale: Tensor | None = None


class _Prepared(nn.Module):
    """What an own loop calls: the user's module."""

    wrapped_child = "module"  # see `trainer.names.wrapped_child`

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Megatron(SingleDevice):
    """Engine on megatron-core; see `trainer.engines.base.Engine` for the methods.

    It has one model and its optimizer.
    """

    distributed_type: DistributedType | None = DistributedType.MEGATRON_LM
    gathers_state = True
    divides_layers = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        assert options.megatron_lm_plugin is not None
        self.plugin = options.megatron_lm_plugin
        _check_options(options)
        self._states = import_megatron(options.device)
        self._make_groups()
        states = self._states
        self._tp_rank = states.get_tensor_model_parallel_rank()
        self._stage = states.get_pipeline_model_parallel_rank()
        self._stages = states.get_pipeline_model_parallel_world_size()
        self._is_last = self._stage == self._stages - 1
        self.data_rank = states.get_data_parallel_rank()
        self.data_size = states.get_data_parallel_world_size()
        self.counts_data = self.counts_values = self._is_last and self._tp_rank == 0
        self.optimizer_driver = self
        self._owner: nn.Module | None = None  # the user's module, which has the model
        self._model: Any = None
        self._replica: Any = None  # megatron-core's DDP around the model, in training
        self._client: Optimizer | None = None
        self._twin: Any = None  # what is stepped; it has the state
        self._masters: dict[int, Tensor] = {}  # what the twin updates, by the parameter's id
        self._shapes: dict[str, tuple[int, ...]] = {}  # of whole weights, by their names
        self._orders: list[list[str]] = []  # the names in each group of the optimizer
        self._undo: list[Callable[[], Any]] = []
        self._micro: _MicroBatch | None = None  # the one whose step runs, inside a schedule
        self._seed = 0  # of the micro-batches of a batch, with several stages
        self._logged: list[tuple[Any, ...]] = []
        self._window = _Window()
        self._trains: set[int] = set()
        self._share_seed()

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
        if not dist.is_initialized():  # with one process
            kind = "nccl" if self.options.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
            dist.init_process_group(kind, store=store, rank=0, world_size=1)
        wanted = _Groups(dist.group.WORLD, sizes)
        states = self._states
        if states.model_parallel_is_initialized():
            if _made is not None and _made.world is wanted.world and _made.sizes == sizes:
                return
            states.destroy_model_parallel()
        # Processes that read the same data have consecutive ranks, as with the other engines.
        states.initialize_model_parallel(*sizes, order="tp-cp-ep-pp-dp")
        _made = wanted

    def _share_seed(self) -> None:
        """Seed megatron-core's own generators, such as for the dropout inside divided layers."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        seed = mix(broadcast_object(torch.initial_seed()), self.data_rank, self._stage) % 2**31
        with isolated_rng():  # it seeds the global one, too
            model_parallel_cuda_manual_seed(seed)

    # -- placing -----------------------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,  # noqa: ARG002 - that of the process groups
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return a wrapper; all processes that share data call it together.

        Raises:
            NotImplementedError: The model has stages, or batches are to be cut.
            ValueError: There is a model already.
        """
        if isinstance(module, _Prepared):
            return module
        if self._stages > 1 or self.plugin.num_micro_batches != 1:
            raise NotImplementedError(
                f"pp_degree is {self._stages} and num_micro_batches {self.plugin.num_micro_batches}"
                ", but a loop of your own runs forward and backward by itself, and cannot overlap "
                "those of several micro-batches. Use the Trainer, whose training_step is the step "
                "of a schedule; or set both to 1."
            )
        if self._owner is not None and self._owner is not module:
            raise ValueError(
                f"megatron_lm_plugin trains one model with its optimizer, and has prepared a "
                f"{type(self._owner).__name__} already: use another Accelerator for the "
                f"{type(module).__name__}."
            )
        unwrap_forward(module)  # the model computes in the dtype of its weights
        self._place(module, trains=not evaluation_mode)
        return _Prepared(module)

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Find the model in the module, and make its replicas equal.

        Raises:
            ValueError: The module is optimised manually, or its model does not fit the plugin.
        """
        if step_sync is not None and not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} sets automatic_optimization = False, but with "
                "megatron_lm_plugin a schedule runs backward: leave it out, or let the Trainer "
                "optimise."
            )
        super().start(module, step_sync)
        self._share_seed()
        self._place(module, trains=step_sync is not None)

    def _place(self, module: nn.Module, *, trains: bool) -> None:
        module.to(self.options.device)
        self._owner, self._model = module, _model_in(module)
        self._check_model()
        if self.options.mixed_precision == "bf16":  # norms and positions are float32 at first
            self._model.to(torch.bfloat16)
        self._make_equal()
        self._names = self._global_names()
        self._inside = set(map(id, self._model.state_dict(keep_vars=True).values()))
        own = self._state()
        shapes = {name: self._whole_shape(value) for name, value in own.items()}
        self._shapes = {n: s for each in all_gather_object(shapes) for n, s in each.items()}
        self._config = config = self._model.config
        kept = ("finalize_model_grads_func", "variable_seq_lengths")
        self._undo += [attribute_restorer(config, name) for name in kept]
        config.finalize_model_grads_func = None  # windows are the loop's
        forward = self._model.forward
        self._undo.append(attribute_restorer(self._model, "forward"))
        self._model.forward = wraps(forward)(partial(self._run_model, forward))
        if trains:
            from megatron.core.distributed import (
                DistributedDataParallel,
                DistributedDataParallelConfig,
            )

            how = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
            )
            self._replica = DistributedDataParallel(config, how, self._model)
            self._replica.zero_grad_buffer()

    def _check_model(self) -> None:
        """Check that the model is as the plugin and the precision say, and has all parameters.

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
        own = set(map(id, self._model.parameters()))
        named = bare_names(self._owner, self._owner.named_parameters())
        if others := [n for n, p in named if p.requires_grad and id(p) not in own]:
            raise ValueError(
                f"{', '.join(others)} are trained, but are outside the {name} of megatron-core, "
                "whose parameters alone are divided over the processes: put them into the model, "
                "or freeze them."
            )

    def _make_equal(self) -> None:
        """Make the first replica's weights everybody's, and what divided layers have in common."""
        assert self._owner is not None
        states = self._states
        own = set(map(id, self._model.state_dict(keep_vars=True).values()))
        for tensor in chain(self._owner.parameters(), self._owner.buffers()):
            if id(tensor) not in own:
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
            ValueError: The optimizer needs whole tensors, has parameters that the model has not, or
                is the second one; or there is no model yet.
        """
        if self._replica is None:
            raise ValueError(
                "megatron_lm_plugin prepares a model before its optimizer: prepare the model "
                "first, or both in one call."
            )
        if self._client is not None:
            raise ValueError(
                f"megatron_lm_plugin has one optimizer, a {type(self._client).__name__}, and was "
                f"given another, a {type(optimizer).__name__}: put all parameters into groups of "
                "one."
            )
        names = {kind.__name__ for kind in type(optimizer).__mro__} & _NEED_WHOLE_TENSORS
        if names or is_lomo(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot update parts of divided layers, because it "
                "needs whole tensors. Use AdamW or SGD, or train without megatron_lm_plugin."
            )
        own = set(map(id, self._model.parameters()))
        unknown = [tuple(p.shape) for p in parameters_of([optimizer]) if id(p) not in own]
        if unknown:
            raise ValueError(
                f"The optimizer has parameters of the shapes {unknown} that "
                f"{type(self._model).__name__} has not. Assign them to an attribute of the model."
            )
        self._client = optimizer
        self._trains = self._trained_now()
        self._masters = {
            id(p): p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for p in parameters_of([optimizer])
            if id(p) in self._trains
        }
        self._twin = twin_of(optimizer, self._masters)
        order = [
            [self._names[id(p)] for p in group["params"] if id(p) in self._masters]
            for group in optimizer.param_groups
        ]
        # In the order of ranks, hence of stages: as one process has them.
        self._orders = [
            list(dict.fromkeys(chain(*groups)))
            for groups in zip(*all_gather_object(order), strict=True)
        ]
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the plugin's schedule in the place of `MegatronLMDummyScheduler`."""
        if not isinstance(scheduler, MegatronLMDummyScheduler):
            return scheduler
        return scheduler.make(self.plugin, self._client or scheduler.optimizer)

    # -- the steps ---------------------------------------------------------------------------------

    @property
    def _cuts(self) -> bool:
        """Whether batches are cut, and go through a schedule."""
        return self._stages > 1 or self.plugin.num_micro_batches != 1

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module; a training step also runs its backward passes."""
        if name != "training_step" or not self._cuts:
            return super().forward(name, *args)
        batch, *others = args
        micro_batches = self._cut(batch)
        items = sum(micro.items for micro in micro_batches)
        window, self._logged = self._window, []
        window.reference = window.reference or items
        window.pending = True
        if self._stages > 1:  # steps of all stages draw the same numbers
            self._seed = int(torch.randint(2**31, ()))
        losses: list[tuple[Tensor, float]] = []
        step = partial(self._step, len(micro_batches), losses, others)
        self._run_schedule(micro_batches, step)
        mean = torch.zeros((), device=self.options.device)
        for loss, weight in losses:
            mean = mean + loss.detach().float() * (weight / items)
        if self._stages > 1:
            mean = self._tell_stages(mean)
        window.loss, window.items = mean.requires_grad_(), items
        return window.loss

    def _cut(self, batch: Any) -> list[_MicroBatch]:
        """Cut a batch into micro-batches, and leave out those without items.

        Raises:
            ValueError: It holds no tensor with a first dimension.
        """
        size = find_batch_size(batch)
        if size is None:
            raise ValueError(
                "A batch has no tensor with a first dimension, along which it could be cut into "
                f"num_micro_batches={self.plugin.num_micro_batches}: set it to 1."
            )
        each = -(-size // min(self.plugin.num_micro_batches or 1, size))
        parts = [_rows(batch, size, slice(at, at + each)) for at in range(0, size, each)]
        count: Any = getattr(self.module, "count_items", find_batch_size)
        micros = [_MicroBatch(n, part, float(count(part))) for n, part in enumerate(parts)]
        return [micro for micro in micros if micro.items]

    def _run_schedule(self, micro_batches: Sequence[_MicroBatch], step: Callable[..., Any]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sizes = {find_batch_size(micro.batch) or 1 for micro in micro_batches}
        length = self.plugin.seq_length
        self._config.variable_seq_lengths = self._stages > 1 and (length is None or len(sizes) > 1)
        put_back = attribute_restorer(self.module, "log")
        try:
            get_forward_backward_func()(
                forward_step_func=step,
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
        micro_batches: Iterator[_MicroBatch],
        _model: Any,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run ``training_step`` on a micro-batch, as far as this stage goes.

        Returns:
            What goes to the next stage; on the last one, the weighted loss.
        """
        self._micro = micro = next(micro_batches)
        module: Any = self.module
        vars(module)["log"] = self._recording(type(module).log, micro.items)
        alike: AbstractContextManager[None] = nullcontext()
        if self._stages > 1:
            alike = isolated_rng(mix(self._seed, micro.number))
        try:
            with alike:
                outputs = super().forward("training_step", micro.batch, *others)
        except _StageEnded as ended:
            return ended.output, _unused
        if micro.calls != 1:
            raise RuntimeError(
                f"training_step called the {type(self._model).__name__} {micro.calls} times; with "
                "stages or micro-batches it must call it once for each batch."
            )
        if outputs is None:
            raise TypeError(
                "training_step returned None, which would skip one of the micro-batches that a "
                "schedule needs: define count_items, and return 0 from it for what must not count."
            )
        loss = loss_of(outputs)
        losses.append((loss, micro.items))
        weight = micro.items * number / self._window.reference  # the schedule divides by the number
        return loss * weight, _with_nothing

    def _recording(self, log: Callable[..., Any], items: float) -> Callable[..., None]:
        """Return what stands for ``log`` in a schedule: values have the items as their weight.

        Only the last stage logs: the others get its values afterwards.
        """
        module = self.module

        def record(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_last:
                return
            if kwargs.get("batch_size") is None:
                kwargs["batch_size"] = items
            own = vars(module).pop("log")  # it may call itself
            try:
                log(module, name, value, *args, **kwargs)
            finally:
                vars(module)["log"] = own
            if self._stages > 1:
                self._logged.append((name, value, args, kwargs))

        return record

    def _tell_stages(self, mean: Tensor) -> Tensor:
        """Give all stages the loss of the last one, and log what it has logged."""
        states = self._states
        source = states.get_pipeline_model_parallel_last_rank()
        group = states.get_pipeline_model_parallel_group()
        dist.broadcast(mean, src=source, group=group)
        parts = {id(part): name for name, part in self.module.named_modules()}
        sent = [
            (name, *_described(name, value, parts), args, kwargs)
            for name, value, args, kwargs in self._logged
        ]
        told: list[Any] = [sent]
        dist.broadcast_object_list(told, src=source, group=group)
        if not self._is_last:
            module: Any = self.module
            for name, path, value, args, kwargs in told[0]:
                shown = value if path is None else module.get_submodule(path)
                module.log(name, shown, *args, **kwargs)
        return mean

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
        if not self._is_last:
            raise _StageEnded(output)
        return output

    def _run_stages(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run all stages outside a schedule, one after the other; all get the last one's output.

        Raises:
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
        output = forward(*args, **kwargs)
        between.send_forward([output], self._is_last)
        source = states.get_pipeline_model_parallel_last_rank()
        shape: list[Any] = [(output.shape, output.dtype)]
        dist.broadcast_object_list(shape, src=source, group=group)
        if not self._is_last:
            output = torch.empty(*shape[0][:1], dtype=shape[0][1], device=self.options.device)
        output = output.contiguous()
        dist.broadcast(output, src=source, group=group)
        return output

    def begin_micro_batch(self, *, sync: bool) -> None:  # noqa: ARG002 - an interface
        """Drop gradients of a window whose update was skipped."""
        if self._window.ended:
            self.optimizer_zero_grad()

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: gradients are reduced when they are needed."""
        return SingleDevice.trigger_sync(self, module)

    def backward(
        self, loss: Tensor, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a batch; in a schedule, learn their factor."""
        if self._window.ended:
            self.optimizer_zero_grad()
        window = self._window
        window.pending = True
        loss.backward(*args, **kwargs)
        if window.loss is not None:
            applied = window.loss.grad
            assert applied is not None
            # The loop's factor for one item, which is the same for all batches of a window.
            window.scale = applied * (window.reference / window.items)
            window.loss = None
        if stats is None:
            return 0.0
        self._end_window()
        return self.sync_stats(stats)

    def dummy_step(
        self,
        rerun: Callable[[], Tensor],  # noqa: ARG002 - those that share layers share their data
        stats: StepStats | None = None,
    ) -> float | Tensor:
        """Contribute zero gradients."""
        if stats is None:
            return 0.0
        self._window.pending = True
        self._end_window()
        return self.sync_stats(stats)

    def _end_window(self) -> None:
        """Reduce the gradients of a window; collective, once a window."""
        window = self._window
        if window.ended:
            return
        from megatron.core.distributed import finalize_model_grads

        window.ended = window.pending = True
        if window.scale is not None:
            self._replica.scale_gradients(window.scale)
        finalize_model_grads([self._replica])

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """All-reduce the step stats of a window."""
        total = self.step_sync.sync_vector(stats)
        sum_numbers(total)
        return self.step_sync.count(total)

    def check_unknown_parameters(self) -> None:
        """Check that the same parameters are trained as at the start.

        Raises:
            RuntimeError: Some were added, frozen or unfrozen.
        """
        if self._client is None:
            return
        now = self._trained_now()
        if now != self._trains:
            assert self._owner is not None
            named = bare_names(self._owner, self._owner.named_parameters())
            changed = [name for name, p in named if (id(p) in now) != (id(p) in self._trains)]
            raise RuntimeError(
                f"{', '.join(changed) or 'Parameters'} were added, frozen or unfrozen after "
                "megatron-core has made its buffers of gradients: decide what is trained in "
                "configure_model or configure_optimizers, or before prepare."
            )

    def _trained_now(self) -> set[int]:
        """Return the ids of the trained parameters of the optimizer."""
        assert self._client is not None
        return {id(p) for p in parameters_of([self._client]) if p.requires_grad}

    def begin_epoch(self) -> None:
        """See `check_unknown_parameters`."""
        self.check_unknown_parameters()

    # -- the update --------------------------------------------------------------------------------

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Raise: no process has the whole gradient.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "gradient: the processes have gradients of other layers, or of parts of them. "
            "parameter.main_grad is this process's, before its loss weight."
        )

    def _gradients(self, parameters: Iterable[Any]) -> list[Tensor]:
        """Return the reduced gradients, in float32."""
        self._end_window()
        return [p.main_grad for p in parameters if id(p) in self._trains]

    def scale_gradients_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a tensor of shape (), in place."""
        scale_(self._gradients(parameters), factor)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        here = find_non_finite(self._gradients(parameters))
        anywhere = torch.zeros(1, device=self.options.device) + (0.0 if here is None else here)
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

        chosen: list[Any] = [p for p in parameters if id(p) in self._trains]
        gradients = self._gradients(chosen)
        own = [
            p.main_grad
            for p in chosen
            if param_is_not_tensor_parallel_duplicate(p) and not _is_copy(p)
        ]
        total = torch.zeros(1, dtype=torch.float64, device=self.options.device)
        if own:
            total += torch.nn.utils.get_total_norm(own, norm_type)
        group = self._states.get_model_parallel_group()
        if norm_type == inf:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        else:
            total = total**norm_type
            dist.all_reduce(total, group=group)
            total = total ** (1 / norm_type)
        whole = total[0].float()
        scale_(gradients, (max_norm / (whole + 1e-6)).clamp(max=1.0))  # as in torch
        self._window.clipped = True
        return whole

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients."""
        for gradient in self._gradients(parameters):
            gradient.clamp_(-max_value, max_value)
        self._window.clipped = True

    @torch.no_grad()
    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Make an update, clipped by the plugin's norm if nothing else has clipped it."""
        self.check_unknown_parameters()
        parameters = parameters_of([optimizer])
        self._end_window()
        if self.plugin.gradient_clipping and not self._window.clipped:
            self.clip_grad_norm_(parameters, self.plugin.gradient_clipping)
        for own, group in zip(self._twin.param_groups, self._groups(optimizer), strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for name in ("grad_scale", "found_inf"):  # by which a fused optimizer skips an update
            vars(self._twin).pop(name, None)
            if name in vars(optimizer):
                setattr(self._twin, name, vars(optimizer)[name])
        trained: list[Any] = [p for p in parameters if id(p) in self._masters]
        for parameter in trained:
            self._masters[id(parameter)].grad = parameter.main_grad
        self._twin.step()
        for parameter in trained:
            master = self._masters[id(parameter)]
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the user's groups that have trained parameters."""
        groups = optimizer.param_groups
        return [g for g in groups if any(id(p) in self._masters for p in g["params"])]

    def optimizer_zero_grad(self, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002 - there is one
        """Drop the gradients."""
        if self._window.pending:
            self._replica.zero_grad_buffer()
        self._window = _Window()

    # -- state -------------------------------------------------------------------------------------

    def _global_names(self) -> dict[int, str]:
        """Return the names that the model's tensors have where one process has all layers."""
        renamed: dict[str, str] = {}  # of layers, which each stage numbers from 0
        assert self._owner is not None
        prefix = next(n for n, p in self._owner.named_modules() if p is self._model)
        for path, part in self._owner.named_modules():
            parent, _, index = path.rpartition(".")
            number = getattr(part, "layer_number", None)
            if index.isdecimal() and number is not None:
                renamed[path + "."] = f"{parent}.{number - 1}."
        names = {}
        for name, tensor in self._owner.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            layer = next((path for path in renamed if name.startswith(path)), "")
            whole = renamed.get(layer, "") + name.removeprefix(layer)
            if _is_copy(tensor):
                whole = f"{prefix}.embedding.word_embeddings.weight".removeprefix(".")
            names[id(tensor)] = next(bare_names(self._owner, [(whole, None)]))[0]
        return names

    def _state(self) -> dict[str, Tensor]:
        """Return this process's tensors by their names in the whole model."""
        assert self._owner is not None
        tensors = self._owner.state_dict(keep_vars=True).values()
        return {self._names[id(t)]: t for t in tensors if isinstance(t, Tensor)}

    def _whole_shape(self, tensor: Any) -> tuple[int, ...]:
        shape = list(tensor.shape)
        if _is_divided(tensor):
            shape[tensor.partition_dim] *= self._states.get_tensor_model_parallel_world_size()
        return tuple(shape)

    def _chunks(self, like: Any, part: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of a part and of the same values in the whole tensor.

        Args:
            like: The weight that is divided in the same way.
            part: What this process has.
            whole: What all processes of the layer have.
        """
        if not _is_divided(like):
            yield part, whole
            return
        processes = self._states.get_tensor_model_parallel_world_size()
        pieces, dim = like.partition_stride, like.partition_dim
        there = whole.chunk(processes * pieces, dim)[self._tp_rank :: processes]
        yield from zip(part.chunk(pieces, dim), there, strict=True)

    @torch.no_grad()
    def _gathered(self, name: str, like: Any, part: Tensor | None, dtype: torch.dtype) -> Any:
        """Return a whole tensor on the host of rank 0, and None elsewhere; collective.

        Args:
            name: The name of the weight of the same shape.
            like: That weight; None on processes without it.
            part: What this process has.
            dtype: The dtype on all processes.
        """
        whole = torch.zeros(self._shapes[name], dtype=dtype, device=self.options.device)
        writes = part is not None and self.data_rank == 0 and not _is_copy(like)
        if writes and id(like) not in self._inside:  # all stages have it, the last one uses it
            writes = self._is_last
        if writes and (_is_divided(like) or self._tp_rank == 0):
            assert part is not None
            for here, there in self._chunks(like, part, whole):
                there.copy_(here)
        dist.reduce(as_bytes(whole), dst=0)  # the bits: exact for any dtype
        return whole.cpu() if self.options.rank == 0 else None

    def _part_of(self, like: Tensor, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor, on the device."""
        part = torch.empty(like.shape, dtype=whole.dtype, device=self.options.device)
        for here, there in self._chunks(like, part, whole):
            here.copy_(there)
        return part

    def described_weights(self, module: nn.Module) -> Mapping[str, Any]:  # noqa: ARG002 - there is one
        """Return tensors without values of the names and shapes of the whole weights."""
        return {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:  # noqa: ARG002 - there is one
        """Return whole weights on the host of rank 0, and {} elsewhere; collective.

        They are the float32 ones that the optimizer updates.
        """
        own = self._state()
        kept = {name: self._masters.get(id(tensor), tensor) for name, tensor in own.items()}
        here = {name: tensor.dtype for name, tensor in kept.items()}
        dtypes = {n: d for each in all_gather_object(here) for n, d in each.items()}
        whole = {
            name: self._gathered(name, own.get(name), kept.get(name), dtypes[name])
            for name in self._shapes
        }
        return whole if self.options.rank == 0 else {}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, weights: Mapping[str, Any]) -> None:  # noqa: ARG002 - there is one
        """Copy this process's parts of whole weights into the model."""
        for name, tensor in self._state_with_copies():
            if name in weights:
                part = self._part_of(tensor, weights[name])
                tensor.copy_(part)
                if id(tensor) in self._masters:
                    self._masters[id(tensor)].copy_(part)

    def _state_with_copies(self) -> Iterator[tuple[str, Tensor]]:
        assert self._owner is not None
        for tensor in self._owner.state_dict(keep_vars=True).values():
            if isinstance(tensor, Tensor):
                yield self._names[id(tensor)], tensor

    def _stepped(self) -> Iterator[tuple[str, Any, Tensor]]:
        """Yield the name of each trained parameter, it, and the tensor that is updated."""
        assert self._client is not None
        for parameter in parameters_of([self._client]):
            if id(parameter) in self._masters:
                yield self._names[id(parameter)], parameter, self._masters[id(parameter)]

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state on rank 0, as one process has it; collective."""
        state = Optimizer.state_dict(optimizer)
        state["state"] = {}
        numbers = self._numbers()
        for group, order in zip(state["param_groups"], self._orders, strict=True):
            group["params"] = [numbers[name] for name in order]
        own = {name: (p, self._twin.state.get(master, {})) for name, p, master in self._stepped()}
        notes = {
            name: {key: _note(value, p) for key, value in values.items()}
            for name, (p, values) in own.items()
        }
        known: dict[str, dict[str, Any]] = {}
        for each in all_gather_object(notes):
            known = {**each, **known}
        for name, number in numbers.items():
            whole = {}
            for key, note in known.get(name, {}).items():
                whole[key] = note
                if isinstance(note, torch.dtype):  # of a tensor that is divided as the weight is
                    like, values = own.get(name, (None, {}))
                    whole[key] = self._gathered(name, like, values.get(key), note)
            if whole and self.options.rank == 0:
                state["state"][number] = whole
        return state

    def _numbers(self) -> dict[str, int]:
        """Return the numbers that one process gives to the optimizer's parameters."""
        return {name: number for number, name in enumerate(chain(*self._orders))}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state as one process has it, given on each process."""
        Optimizer.load_state_dict(
            optimizer,
            {
                **state,
                "state": {},
                "param_groups": [
                    {**saved, "params": own["params"]}
                    for saved, own in zip(
                        state["param_groups"],
                        Optimizer.state_dict(optimizer)["param_groups"],
                        strict=True,
                    )
                ],
            },
        )
        numbers = self._numbers()
        self._twin.state.clear()
        for name, parameter, master in self._stepped():
            saved = state["state"].get(numbers[name], {})
            loaded = {}
            for key, value in saved.items():
                loaded[key] = value.clone() if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.ndim and value.shape == self._shapes[name]:
                    loaded[key] = self._part_of(parameter, value)
            if loaded:
                self._twin.state[master] = loaded

    def settle(self, module: nn.Module, *, drops_gradients: bool = False) -> None:
        """Notice gradients that no update has used.

        Raises:
            RuntimeError: There are some, which are in megatron-core's buffers.
        """
        if drops_gradients and self._replica is not None:
            self.optimizer_zero_grad()
        elif self._window.pending:
            raise RuntimeError(
                f"{type(module).__name__} has gradients that no update has used, in buffers of "
                "megatron-core: save after optimizer.step() and optimizer.zero_grad() at the end "
                "of a window, under `if accelerator.sync_gradients:`."
            )

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
        while self._undo:
            self._undo.pop()()
        self._replica = None


def _unused(_: Tensor) -> Any:
    raise AssertionError("only the last stage has a loss")


def _with_nothing(loss: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return loss, {}


def _rows(batch: Any, size: int, rows: slice) -> Any:
    """Return rows of the tensors of a batch that have as many as it; others are shared."""
    return map_tree(
        lambda leaf: (
            leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else leaf
        ),
        batch,
    )


def _described(name: str, value: Any, parts: Mapping[int, str]) -> tuple[str | None, Any]:
    """Return the place of a logged metric object in the module, or a logged number.

    Raises:
        TypeError: It is an object that is not part of the module.
    """
    if not hasattr(value, "compute"):
        return None, value.item() if isinstance(value, Tensor) else value
    if id(value) not in parts:
        raise TypeError(
            f"The metric {name!r} is a {type(value).__name__} that is not an attribute of the "
            "module, where the other stages could find theirs: assign it in __init__."
        )
    return parts[id(value)], None


def _note(value: Any, parameter: Tensor) -> Any:
    """Return the dtype of a state that is divided as its parameter is; else its value."""
    if not isinstance(value, Tensor):
        return value
    divided = value.ndim and value.shape == parameter.shape
    return value.dtype if divided else value.detach().cpu()


def _is_divided(tensor: Any) -> bool:
    """Return whether the processes of a layer have different parts of a weight."""
    return bool(getattr(tensor, "tensor_model_parallel", False))


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
    inside = {id(each) for part in found for each in part.modules() if each is not part}
    models = [part for part in found if id(part) not in inside]
    if len(models) != 1:
        names = ", ".join(type(part).__name__ for part in models) or "none"
        raise ValueError(
            f"{type(module).__name__} has {names} of the models of megatron-core, and "
            "megatron_lm_plugin trains one: build a GPTModel in configure_model and assign it to "
            "an attribute."
        )
    return models[0]


def _check_options(options: EngineOptions) -> None:
    """Check that nothing is asked for that the engine has not.

    Raises:
        NotImplementedError: Something is.
    """
    assert options.megatron_lm_plugin is not None
    options.megatron_lm_plugin.check_supported()
    problem = None
    if options.mixed_precision in ("fp16", "fp8"):
        problem = f"mixed_precision={options.mixed_precision!r}: use 'bf16' or 'no'"
    elif options.ddp_kwargs is not None and options.ddp_kwargs.comm_hook != "no":
        problem = f"comm_hook={options.ddp_kwargs.comm_hook.value!r}: leave it out"
    elif (compiler := options.dynamo_plugin) and compiler.backend != DynamoBackend.NO:
        problem = f"dynamo_backend={str(compiler.backend).lower()!r}: leave it out"
    elif options.sync_each_batch:
        problem = "sync_each_batch=True: gradients are reduced once an update"
    if problem is not None:
        raise NotImplementedError(f"megatron_lm_plugin does not support {problem}.")
