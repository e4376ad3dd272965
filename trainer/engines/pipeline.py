"""Pipeline parallelism: each process has some consecutive layers of the model, a stage.

The Trainer's engine cuts each batch of the loader into micro-batches, which go through the stages
by a schedule of ``torch.distributed.pipelining`` (GPipe: Huang et al., NeurIPS 2019; 1F1B and
interleaved: Narayanan et al., SC 2021). ``training_step`` runs for each of them on every stage.
Weights of other stages are shapes without values, see `trainer.engines.absent`. The first layer of
a stage gets what the stage before has sent, in the place of such a shape, and on a stage before the
last the step ends where the model returns. `Pipeline.forward` runs all of this, so that gradients
are there before the loop knows the weight of the batch: they are summed with the items of each
micro-batch as weights, and `Pipeline.backward` learns what the loop has applied to the loss.

Elsewhere, such as in an evaluation, the stages run one after the other, and all get the output of
the last one.

Processes that have the same stage may share its weights, see `trainer.engines.stage_shards`: they
are gathered for each batch, and then run like those of a stage that one process has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode  # documented, yet private

from trainer.configuration.parallelism import ParallelismConfig, device_mesh
from trainer.data.seeding import group_equal, isolated_generators, module_generators
from trainer.distributed.guards import forbid_collectives, read_back
from trainer.distributed.objects import all_gather_object, broadcast_object
from trainer.distributed.parallel import Parallel
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.absent import Absent, signature
from trainer.engines.base import EngineOptions, Weights, gathered_on_first
from trainer.engines.compile import is_compiled
from trainer.engines.fsdp import (
    ShardedGradients,
    check_takes_shards,
    disable_mixed_foreach,
    free,
    rank_along,
)
from trainer.engines.lockstep import has_sync_batch_norm
from trainer.engines.micro_batches import (
    StageLogs,
    gather_outcomes,
    required_loss,
    split_batch,
)
from trainer.engines.single import SingleDevice, attribute_restorer
from trainer.engines.stage_layers import (
    SHAPES,
    Boundary,
    StageEnded,
    StageLayers,
    StagePass,
    check_known,
)
from trainer.engines.stage_shards import StageShards, StageWeights, split_stage
from trainer.engines.stages import plan_stages
from trainer.enums import DynamoBackend
from trainer.errors import DistributedOperationException
from trainer.names import bare_names
from trainer.optim.finite import find_non_finite
from trainer.optim.lomo import is_lomo
from trainer.optim.optimizer import parameters_of
from trainer.optim.state import keeps_on_host
from trainer.optim.weighting import scale_
from trainer.rng import isolated_rng, mix
from trainer.tree import LocalShards, as_bytes, fill_, leaves, local_parts, map_tree, part_here

_OTHER_STAGES = (
    "is called in training_step, but the processes of a pipeline run different micro-batches at "
    "the same time, so the call would hang. Call it in on_train_step_end."
)
_KEPT = 4  # schedules of other sizes that are kept, each with what it receives into
_EXTRA = "_extra_state"
_SHARDS = "_stage_shards"  # the attribute of a module that was sharded, which stays so
# Parts of the names of optimizers that look at all parameters together.
_NEED_ALL = ("dadapt", "lbfgs", "prodigy")


@dataclass
class _MicroBatch:
    """A part of a batch.

    Attributes:
        number: Its number in the batch.
        batch: Its data.
        items: What its loss is a mean over.
        boundaries: What each stage but the last sends for it.
    """

    number: int
    batch: Any
    items: float
    boundaries: Sequence[Boundary] = ()


@dataclass
class _Window:
    """What is known of a window so far.

    Attributes:
        begun: Whether a batch has run.
        gradients: Those of batches whose schedule has run, by parameter, while others run.
        loss: The loss of a batch, until the loop runs backward.
        items: What it is a mean over.
        reference: The items of the window's first batch, to which weights are relative.
        scale: What all gradients are multiplied by at the end.
    """

    begun: bool = False
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    items: float = 0.0
    reference: float = 0.0
    scale: Tensor | None = None


class _NoCollectives(TorchDispatchMode):
    """Forbids the collectives of torch; it sees each operation, which takes time.

    Args:
        allows: Returns whether they are those of layers that processes share.
    """

    def __init__(self, allows: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._allows = allows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation.

        Raises:
            DistributedOperationException: It is a collective.
        """
        del types
        if func.namespace in ("c10d", "_c10d_functional") and not self._allows():
            raise DistributedOperationException(f"{func} {_OTHER_STAGES}")
        return func(*args, **(kwargs or {}))


class _StageModule(nn.Module):
    """What torch's schedules call as a stage.

    Args:
        run: Called with the number of the micro-batch and what was received.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        vars(self)["_run"] = run

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """Run the user's step for a micro-batch."""
        return vars(self)["_run"](int(number), *received)  # type: ignore[no-any-return]  # a tensor


class Pipeline(SingleDevice):
    """Engine with stages of layers; see `trainer.engines.base.Engine` for the methods."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if problem := _unsupported(options):
            raise NotImplementedError(f"pp_size above 1 does not support {problem}.")
        config = options.parallelism_config
        assert config is not None
        assert config.pp_size is not None
        self.config = config
        self._ranks: int = config.pp_size
        mesh = config.device_mesh = device_mesh(options.device.type, _mesh_sizes(config))
        names = mesh.mesh_dim_names or ()
        self._mesh, self._group = mesh, mesh.get_group("pp")
        replicas = config.dp_replicate_enabled
        self._replicas = mesh.get_group("dp_replicate") if replicas else None
        # The mesh over which each stage is sharded and, in its first dimension, replicated.
        data = tuple(name for name in names if name.startswith("dp_"))
        self._data_mesh = mesh[data] if "dp_shard" in names else None
        self._tp_mesh = mesh["tp"] if "tp" in names else None
        dp_rank, dp_size = rank_along(mesh, data)
        self._place: int = mesh.get_local_rank("pp")
        self._stages = config.pp_size * (config.pp_stages_per_rank or 1)
        self._here = range(self._place, self._stages, self._ranks)
        self._is_last = self._place == self._ranks - 1
        # Of processes that share layers, the first one counts.
        counts = self._is_last and not (self._tp_mesh and self._tp_mesh.get_local_rank())
        self.parallel = Parallel(
            dp_rank=dp_rank,
            dp_size=dp_size,
            is_data_primary=counts,
            is_log_primary=counts,
            is_model_parallel=True,
            divides_state=True,
        )
        self.driver = self
        self.schedules: Sequence[Any] = ()
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.gradients = PipelineGradients(self, self._replaced)
        self.weights = PipelineWeights(self)
        self.layers: StageLayers  # of the module that was started
        self.stage_weights: StageWeights  # of its layers here
        self._extra: dict[str, Any] = {}  # the extra state of all stages, by name
        self._described: dict[str, Boundary] = {}  # the buffers of all stages, by name
        self._generators: dict[str, Any] = {}
        self._names_of_generators: dict[str, str] = {}
        self._seed, self._batches, self._evaluated = 0, 0, 0
        self._boundaries: OrderedDict[Any, list[Boundary]] = OrderedDict()
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._micro_batches: list[_MicroBatch | None] = []
        self._run_step: Callable[..., Any] = _nothing
        self._losses: list[tuple[Tensor, float]] = []
        self._logs = StageLogs(nn.Module())  # of the batch that runs
        self._error: Exception | None = None  # of one of the steps
        self._checked = False  # whether a batch has run without collectives of its own
        self._window = _Window()

    # -- placing -----------------------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Raise: a loop of your own runs forward and backward by itself.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"pp_size is {self._ranks}, but a custom loop runs forward and backward of a "
            f"{type(module).__name__} itself, and cannot overlap those of micro-batches. Use the "
            "Trainer, whose training_step is the step of a schedule, or trainer.PipelineParallel."
        )

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Give each process its layers, with rank 0's weights; collective.

        Raises:
            ValueError: The module is optimised manually, or cannot be divided.
        """
        if step_sync is not None and not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} sets automatic_optimization = False, but the schedule "
                "of a pipeline runs backward: leave out pp_size, or use automatic optimisation."
            )
        _check_module(module)
        split = any(isinstance(parameter, Absent) for parameter in module.parameters())
        if not split:
            super().start(module, step_sync)
            self._broadcast(_tensors_of(module), src=0)
        self.module = module
        if step_sync is not None:
            self.step_sync = step_sync
            self._seed = broadcast_object(torch.initial_seed())
        plan = plan_stages(module, self.config.pp_split, self._stages)
        self.layers = StageLayers(
            module, plan, self._place, self._ranks, self.options.device, self._run_stages
        )
        if split and self._replicas is not None:
            self._broadcast(map(part_here, self.layers.own), src=None)
        self.stage_weights = self._share_weights(split=split)
        self.layers.wrap()
        self._replaced |= self.layers.replaced
        for old, _ in self.layers.replaced.values():
            free(old)
        self._generators = module_generators(module)
        self._names_of_generators = group_equal(self._generators)
        self.broadcast_buffers()

    def _share_weights(self, *, split: bool) -> StageWeights:
        """Shard and split the weights of this process's layers, if that is asked for; collective.

        Raises:
            ValueError: They were in another layout before.
        """
        module, layers = self.module, self.layers
        known: StageShards | None = vars(module).get(_SHARDS)
        if known is None and self._data_mesh is None:
            return StageWeights(layers, self._replicas)
        if known is None and not split:
            assert self._data_mesh is not None
            if self._tp_mesh is not None:
                split_stage(module, layers, self._tp_mesh)
            known = StageShards(module, layers, self._data_mesh)
            vars(module)[_SHARDS] = known
        if known is None or known.mesh != self._data_mesh:
            raise ValueError(
                f"{type(module).__name__} was divided over other processes before: create it "
                "again, and load its weights from a checkpoint."
            )
        known.layers = layers
        return known

    def _broadcast(self, tensors: Iterable[Tensor], src: int | None) -> None:
        """Broadcast tensors of one rank to all, or with None of the first replica to the others."""
        group, first = (self._replicas, 0) if src is None else (dist.group.WORLD, src)
        for tensor in tensors:
            _send(tensor.detach(), group, first)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put absent parameters into an optimizer that was made with those of other stages.

        Raises:
            ValueError: It looks at all parameters together, or updates in backward.
        """
        kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
        if is_lomo(optimizer) or any(part in kind for part in _NEED_ALL for kind in kinds):
            raise ValueError(
                f"{type(optimizer).__name__} cannot update the layers of one stage: it needs all "
                "parameters together, or updates during backward. Use AdamW or SGD, or train "
                "without pp_size."
            )
        replaced = self.layers.replaced
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(p), (p, p))[1] for p in group["params"]]
        for parameter in list(optimizer.state):  # some optimizers make it at once
            if isinstance(replaced.get(id(parameter), (None, parameter))[1], Absent):
                del optimizer.state[parameter]
        if self._data_mesh is not None:
            check_takes_shards(optimizer, "dp_shard_size and tp_size")
            disable_mixed_foreach(optimizer, lambda p: not isinstance(p, Absent))
        return optimizer

    # -- stages one after the other ----------------------------------------------------------------

    def _run_stages(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run all stages outside a schedule, one after the other; all get the last one's output.

        Raises:
            Exception: See `gather_outcomes`.
            RuntimeError: Gradients are asked for.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"The layers of {type(self.module).__name__} were called with gradients outside "
                "training_step, where no schedule runs its stages backward: call them under "
                "torch.no_grad()."
            )
        self._evaluated += 1
        with self.stage_weights.gathered():
            return self._run_one_by_one(forward, args, kwargs)

    def _run_one_by_one(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output, error = None, None
        seed = mix(self._seed, self.parallel.dp_rank, self._evaluated)
        for stage in range(self._stages):
            received = self._receive(stage) if stage in self._here and stage else None
            if stage not in self._here:
                continue
            if error is None and not (stage and received is None):
                self.layers.current = current = StagePass(stage, received=received)
                try:
                    with isolated_rng(mix(seed, stage), libraries=False):
                        output = self._outcome(current, forward, args, kwargs)
                except Exception as caught:  # noqa: BLE001 - raised on all stages
                    error = caught
                finally:
                    self.layers.current = None
            if stage < self._stages - 1:
                self._send(None if error else output, stage)
                output = None
        held: list[Tensor] = []
        described = map_tree(partial(_describe, held), output) if self._is_last else None
        described = gather_outcomes(self._group, described, error)[-1]
        return map_tree(partial(self._given, iter(held)), described)

    def _outcome(
        self, current: StagePass, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the output of a stage, that of the whole model for the last one."""
        current.inside = 1
        try:
            output = forward(*args, **kwargs)
        except StageEnded:
            output = current.output
        if current.stage == self._stages - 1:
            return output
        return self.layers.output_of(current)

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage % self._ranks)

    def _send(self, tensor: Tensor | None, stage: int) -> None:
        """Send a stage's output to the next one; None after an error."""
        header = torch.full((10,), -1, dtype=torch.int64)
        if tensor is not None:
            header[0] = _DTYPES.index(tensor.dtype)
            header[1] = tensor.ndim
            header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
        peer = self._peer(stage + 1)
        dist.send(header.to(self.options.device), peer)
        if tensor is not None and tensor.numel():
            dist.send(as_bytes(tensor.detach().contiguous()), peer)

    def _receive(self, stage: int) -> Tensor | None:
        """Receive the output of the stage before; None after its error."""
        header = torch.empty(10, dtype=torch.int64, device=self.options.device)
        peer = self._peer(stage - 1)
        dist.recv(header, peer)
        dtype, ndim, *shape = read_back(header).tolist()
        if dtype < 0:
            return None
        tensor = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=self.options.device)
        if tensor.numel():
            dist.recv(as_bytes(tensor), peer)
        return tensor

    def _given(self, held: Iterator[Tensor], value: Any) -> Any:
        """Return a value of the last stage's output, whose tensors are broadcast."""
        if not isinstance(value, Boundary):
            return value
        if self._is_last:
            tensor = next(held)
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.options.device)
        return _send(tensor, self._group, self._ranks - 1)

    # -- a training step ---------------------------------------------------------------------------

    # ARG002: an interface
    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:  # noqa: ARG002
        """Count a batch and gather weights, which all processes do, also those without a batch."""
        self._batches += 1
        self.stage_weights.gather()

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module; a training step also runs its backward passes."""
        if name != "training_step":
            return super().forward(name, *args)
        if self._in_dummy:
            return None  # all processes of a pipeline share its data, so none of them waits
        batch, *others = args
        number = self.config.pp_microbatches or 4 * self._ranks
        parts = split_batch(self.module, batch, number, "pp_microbatches")
        micro_batches = [_MicroBatch(*part) for part in parts]
        items = sum(micro.items for micro in micro_batches)
        window = self._window
        window.begun, window.reference = True, window.reference or items
        self._run_step = lambda micro: super(Pipeline, self).forward(name, micro.batch, *others)
        for micro in micro_batches:
            micro.boundaries = self._boundaries_of(micro)
        self._put_gradients()  # and drop those of the user's own backward passes
        self._losses, self._error = [], None
        self._logs = StageLogs(self.module)
        try:
            self._run_schedule(micro_batches)
            self._checked = True
        finally:
            self.layers.current, self._run_step, self._micro_batches = None, _nothing, []
        mean = torch.zeros((), device=self.options.device)
        for loss, weight in self._losses:
            mean = mean + loss.float() * (weight / items)
        mean = self._share_loss(mean)
        used = self.stage_weights.parameters
        window.gradients = {p: p.grad for p in used if p.grad is not None}
        for parameter in used:
            parameter.grad = None
        window.loss, window.items = mean.requires_grad_(), items
        return window.loss

    def _put_gradients(self) -> None:
        for parameter in self.stage_weights.parameters:
            parameter.grad = self._window.gradients.get(parameter)
        self._window.gradients = {}

    def _boundaries_of(self, micro: _MicroBatch) -> list[Boundary]:
        """Return what each stage sends for a micro-batch.

        For shapes that were not seen before, the step runs without values, up to the model.

        Raises:
            Exception: An error of the step on this stage.
            RuntimeError: Another stage has failed, or has found other shapes.
        """
        key = signature(
            map_tree(lambda value: "" if isinstance(value, str) else value, micro.batch)
        )
        if key in self._boundaries:
            self._boundaries.move_to_end(key)
            return self._boundaries[key]
        self.layers.current = current = StagePass(None)
        error, found = None, list[Boundary]()
        try:
            with (
                self.isolated(),
                self._seeded(micro.number),
                self._without_collectives(first=True),
            ):
                self._run_step(micro)
        except StageEnded:
            pass
        except Exception as caught:  # noqa: BLE001 - raised on all stages
            error = caught
        self.layers.current = None
        if error is None:
            starts = self.layers.plan.starts[1:]
            found = [current.found[start] for start in starts if start in current.found]
            if len(found) < self._stages - 1:
                error = RuntimeError(
                    f"training_step of {type(self.module).__name__} has not run "
                    f"{self.layers.plan.layers[0]} and the layers after it, which are divided into "
                    "stages: call the model once for each batch."
                )
        of_all = gather_outcomes(self._group, (found, _checksum(micro.batch)), error)
        for rank, (shapes, data) in enumerate(of_all):
            place = f"process {rank} of the pipeline"
            if data != of_all[-1][1]:
                raise RuntimeError(
                    f"The batch of {place} differs from that of the last stage, but all stages "
                    "need the same data: seed random choices in the dataset's __init__, and sort "
                    "its files."
                )
            if shapes != of_all[-1][0]:
                raise RuntimeError(
                    f"training_step passes {shapes} to the layers in {place}, but "
                    f"{of_all[-1][0]} in the last stage: it must be the same on all stages."
                )
        self._boundaries[key] = found
        if len(self._boundaries) > SHAPES:
            self._boundaries.popitem(last=False)
        return found

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Let the user's code draw the same numbers on all stages, whatever was drawn before."""
        seed = self._seed_of(number)
        with (
            isolated_rng(seed, libraries=False),
            isolated_generators(self._generators, mix(seed, 1), self._names_of_generators),
        ):
            yield

    @contextmanager
    def _without_collectives(self, *, first: bool) -> Iterator[None]:
        """Forbid collectives in the user's step; those of torch itself in a `first` one alone."""
        mode: Any = _NoCollectives(self._in_shared_layer) if first else nullcontext()
        with forbid_collectives(_OTHER_STAGES), mode:
            yield

    def _in_shared_layer(self) -> bool:
        return self._tp_mesh is not None and self.layers.in_own_layer

    def _seed_of(self, number: int) -> int:
        return mix(self._seed, self.parallel.dp_rank, self._batches, number)

    def _run_schedule(self, micro_batches: Sequence[_MicroBatch]) -> None:
        number = self._number_of(len(micro_batches))
        self._micro_batches = [*micro_batches, *[None] * (number - len(micro_batches))]
        wanted = []
        for stage in range(self._stages - 1):
            sent = [micro.boundaries[stage] for micro in micro_batches]
            if len({boundary.dtype for boundary in sent}) > 1:
                raise RuntimeError(f"Micro-batches go through the stages as {sent}, of one dtype.")
            wanted.append((max(boundary.size for boundary in sent), sent[0].dtype))
        schedule, self._sizes = self._schedule_for(number, wanted)
        kind = self.options.device.type
        self._autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
        )
        put_back = attribute_restorer(self.module, "log")
        numbers = torch.arange(number)
        try:
            # Layers that backward computes again are then computed as before.
            with torch.autocast(kind, enabled=False):
                schedule.step(number=numbers, target=numbers if self._is_last else None)
        finally:
            put_back()

    def _number_of(self, micro_batches: int) -> int:
        """Return how many micro-batches the schedule takes; others have no data."""
        if self.config.pp_schedule == "gpipe":
            return micro_batches
        if self.config.pp_schedule == "1f1b":
            return max(micro_batches, self._stages)
        return -(-micro_batches // self._ranks) * self._ranks

    def _schedule_for(
        self, number: int, wanted: Sequence[tuple[int, torch.dtype]]
    ) -> tuple[Any, Sequence[int]]:
        """Return a schedule for so many micro-batches and values that stages send, and its sizes.

        One for somewhat more values is taken, whose rest is not used.
        """
        for (many, dtypes, sizes), schedule in self._schedules.items():
            if (many, dtypes) == (number, tuple(dtype for _, dtype in wanted)) and all(
                values <= size <= 1.5 * values
                for size, (values, _) in zip(sizes, wanted, strict=True)
            ):
                self._schedules.move_to_end((many, dtypes, sizes))
                return schedule, sizes
        sizes = tuple(values for values, _ in wanted)
        self._schedules[number, tuple(dtype for _, dtype in wanted), sizes] = made = (
            self._make_schedule(number, wanted)
        )
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return made, sizes

    def _make_schedule(self, number: int, wanted: Sequence[tuple[int, torch.dtype]]) -> Any:
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        def like(stage: int) -> Tensor:
            size, dtype = wanted[stage]
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

        loss = torch.empty(1, device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                _StageModule(partial(self._step, stage)),
                stage,
                self._stages,
                self.options.device,
                input_args=(like(stage - 1),) if stage else (),
                output_args=(like(stage) if stage < self._stages - 1 else loss,),
                group=self._group,
            )
            for stage in self._here
        ]
        arguments: dict[str, Any] = {"loss_fn": lambda loss, _: loss.sum(), "scale_grads": False}
        if self.config.pp_schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, number, **arguments)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self.config.pp_schedule or ""]
        return kind(stages[0], number, **arguments)

    def _step(self, stage: int, number: int, *received: Tensor) -> Tensor:
        """Run ``training_step`` on a micro-batch, as far as this stage goes.

        An error is kept for `_share_loss`: others wait for what goes to them.

        Returns:
            What goes to the next stage, of shape (values,); the weighted loss on the last one, of
            shape (1,).
        """
        micro = self._micro_batches[number]
        if micro is None or self._error is not None:
            return self._zeros(stage, received)
        seed = mix(self._seed_of(number), 2, stage)
        self.layers.current = current = StagePass(stage, trains=True, seed=seed)
        if stage < self._stages - 1:
            current.sends = micro.boundaries[stage]
        if received:
            # A copy, because a layer may change its input in place.
            boundary = micro.boundaries[stage - 1]
            current.received = received[0][: boundary.size].view(boundary.shape).clone()
        try:
            self._logs.record(micro.items, self._runs_last, shared=True)
            with (
                self._autocast(),
                self._seeded(number),
                self._without_collectives(first=not self._checked),
            ):
                output = self._loss(micro, current) if stage == self._stages - 1 else None
                if output is None:
                    output = self._packed(micro, current)
        except Exception as error:  # noqa: BLE001 - raised on all stages
            self._error = error
            return self._zeros(stage, received)
        output.register_hook(partial(self._recompute, current))
        return output

    def _recompute(self, current: StagePass, _: Tensor) -> None:
        """Note the pass whose backward begins: layers may be computed again in it."""
        current.recomputes, self.layers.current = True, current

    def _loss(self, micro: _MicroBatch, current: StagePass) -> Tensor:
        """Return the weighted loss of a micro-batch.

        Raises:
            RuntimeError: ``training_step`` has not called the model.
            TypeError: It has returned no loss.
        """
        outputs = self._run_step(micro)
        if not current.calls:
            plan = self.layers.plan
            raise RuntimeError(
                f"training_step has not run {plan.layers[plan.starts[-1]]}, the first layer of "
                "the last stage: call the model once for each batch."
            )
        check_known((outputs,), {}, "training_step's loss")
        loss = required_loss(outputs)
        self._losses.append((loss.detach(), micro.items))
        return loss.reshape(1) * (micro.items / self._window.reference)

    def _packed(self, micro: _MicroBatch, current: StagePass) -> Tensor:
        """Return what goes to the next stage."""
        with suppress(StageEnded):
            self._run_step(micro)
        assert current.stage is not None
        output = self.layers.output_of(current)
        current.output = None
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        flat = output.reshape(-1)
        return nn.functional.pad(flat, (0, self._sizes[current.stage] - len(flat)))

    def _zeros(self, stage: int, received: Sequence[Tensor]) -> Tensor:
        """Return what a stage hands on without a step, with gradients of zero."""
        last = stage == self._stages - 1
        dtype = torch.float32 if last else self._dtypes[stage]
        size = 1 if last else self._sizes[stage]
        zeros = torch.zeros(size, dtype=dtype, device=self.options.device, requires_grad=True)
        return zeros + (received[0] * 0).sum().to(dtype) if received else zeros * 1

    @property
    def _dtypes(self) -> list[torch.dtype]:
        known = next(micro for micro in self._micro_batches if micro is not None)
        return [boundary.dtype for boundary in known.boundaries]

    def _runs_last(self) -> bool:
        current = self.layers.current
        return current is not None and current.stage == self._stages - 1

    def _share_loss(self, mean: Tensor) -> Tensor:
        """Give all stages the loss of the last one, and log what it has logged."""
        sent = read_back(mean).item(), self._logs.to_send()
        loss, logged = gather_outcomes(self._group, sent, self._error)[-1]
        if self._is_last:
            return mean
        self._logs.repeat(logged)
        return torch.full_like(mean, loss)

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Learn the factor of the gradients of a batch; average those of a window at its end."""
        window = self._window
        if loss is not None:
            loss.backward(*args, **kwargs)
            if window.loss is not None:
                applied = window.loss.grad
                assert applied is not None
                # The loop's factor for one item, which is the same for all batches of a window.
                window.scale = applied * (window.reference / window.items)
                window.loss = None
        if stats is None:
            self.stage_weights.release()
            return 0.0
        self.stage_weights.gather()
        self._put_gradients()
        if window.scale is not None:
            gradients = [p.grad for p in self.stage_weights.parameters if p.grad is not None]
            scale_(map(part_here, gradients), window.scale)
        self.stage_weights.reduce()
        self._add_shared()
        own = self.layers.own
        if all(parameter.grad is None for parameter in own):  # a window without items
            for parameter in own:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._window = _Window()
        return self.sync_stats(stats)

    def _add_shared(self) -> None:
        """Sum the gradients of parameters that several stages have, on those; collective.

        The first of them adds them up in the order of the stages, so that all get the same bits.
        """
        shared: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for parameter in self.layers.own:
            owners = self.layers.owners.get(id(parameter), ())
            if len(owners) > 1 and parameter.requires_grad:
                shared.setdefault((owners, parameter.dtype), []).append(parameter)
        # In the same order on all, so that none waits for another in a circle.
        for owners, dtype in sorted(shared, key=lambda key: (key[0], str(key[1]))):
            parameters = shared[owners, dtype]
            flags = [float(parameter.grad is not None) for parameter in parameters]
            parts = [
                part_here(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters
            ]
            counts = torch.tensor(flags, dtype=dtype).to(self.options.device, non_blocking=True)
            flat = torch.cat([part.reshape(-1) for part in (*parts, counts)])
            self._sum_on(owners, flat)
            present = read_back(flat[-len(parameters) :]).tolist()
            sums = flat[: -len(parameters)].split([part.numel() for part in parts])
            for parameter, total, count in zip(parameters, sums, present, strict=True):
                if count:
                    parameter.grad = torch.zeros_like(parameter)
                    part = part_here(parameter.grad)
                    part.copy_(total.view_as(part))

    def _sum_on(self, owners: Sequence[int], flat: Tensor) -> None:
        first, *others = (dist.get_global_rank(self._group, owner) for owner in owners)
        if self.options.rank != first:
            dist.send(flat, first)
            dist.recv(flat, first)
            return
        part = torch.empty_like(flat)
        for other in others:
            dist.recv(part, other)
            flat += part
        for other in others:
            dist.send(flat, other)

    def begin_epoch(self) -> None:
        """Release gathered weights; see `check_unknown_parameters`."""
        self.stage_weights.release()
        self.check_unknown_parameters()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gather the weights once for all batches."""
        with self.stage_weights.gathered():
            yield

    def check_unknown_parameters(self) -> None:
        """Check that all parameters were there when the module was divided.

        Raises:
            RuntimeError: Some were added.
        """
        named = bare_names(self.module, self.module.named_parameters())
        if unknown := [name for name, p in named if id(p) not in self.layers.owners]:
            raise RuntimeError(
                f"{', '.join(unknown)} were added after the module was divided into stages: add "
                "parameters in configure_model or before."
            )

    # -- the optimizers ----------------------------------------------------------------------------

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler itself."""
        return scheduler

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Update the layers of this process."""
        optimizer.step()

    def optimizer_zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients."""
        self._window = _Window()
        for parameter in parameters_of([optimizer]):
            parameter.grad = None

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what this process holds of the state, as one process numbers it; collective."""
        state = Optimizer.state_dict(optimizer)
        parameters = parameters_of([optimizer])
        held: dict[int, tuple[Any, Any]] = {
            number: (parameter, optimizer.state[parameter])
            for number, parameter in enumerate(parameters)
            if parameter in optimizer.state
        }
        notes = {
            number: {key: _note(value, parameter) for key, value in values.items()}
            for number, (parameter, values) in held.items()
        }
        of_all: dict[int, dict[str, Any]] = {}
        for of_rank in all_gather_object(notes):
            of_all = {**of_rank, **of_all}
        state["state"] = {
            number: {
                key: self._shards(
                    parameters[number], held.get(number, (None, {}))[1].get(key), note
                )
                if isinstance(note, torch.dtype)
                else note
                for key, note in of_all[number].items()
            }
            for number in sorted(of_all)
        }
        return state

    def _shards(self, parameter: Tensor, value: Tensor | None, dtype: torch.dtype) -> LocalShards:
        """Return what this process has of a state that is as large as its parameter."""
        shards = [] if value is None else local_parts(value.detach())
        saved = self._saves(parameter, self.layers.owners[id(parameter)][0])
        return LocalShards(parameter.shape, dtype, self.options.device, shards, saved=saved)

    def _saves(self, tensor: Tensor, owner: int) -> bool:
        """Return whether this process is the first with its part of a tensor of a stage."""
        where = self._mesh.get_coordinate()
        assert where is not None
        same = dict(zip(self._mesh.mesh_dim_names or (), where, strict=True))
        if isinstance(tensor, DTensor):
            for name, placement in zip(
                tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True
            ):
                if not placement.is_replicate():
                    same.pop(name)
        return same.pop("pp") == owner and not any(same.values())

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this process's part of a state that is numbered as one process numbers it."""
        Optimizer.load_state_dict(optimizer, {**state, "state": {}})
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        saved = [number for group in state["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, parameters_of([optimizer]), strict=True):
            if isinstance(parameter, Absent) or number not in state["state"]:
                continue
            loaded = optimizer.state[parameter] = {}
            for key, value in state["state"][number].items():
                loaded[key] = value
                if hasattr(value, "shape"):
                    on_host = keeps_on_host(key, groups[id(parameter)])
                    device = torch.device("cpu") if on_host else parameter.device
                    shape = tuple(value.shape)
                    divided = isinstance(parameter, DTensor) and shape == parameter.shape
                    loaded[key] = (
                        torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                        if divided
                        else torch.empty(shape, dtype=value.dtype, device=device)
                    )
                    fill_(loaded[key], value)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return from what steps draw their random numbers, which is the same on all stages."""
        names = ("seed", "batches", "evaluated")
        return {"pipeline": {name: getattr(self, f"_{name}") for name in names}}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on drawing where the run was saved."""
        for name, value in saved[0].get("pipeline", {}).items():
            setattr(self, f"_{name}", value)

    def _rank_of(self, place: int) -> int:
        """Return the rank of the first process with the stages of a place in the pipeline."""
        return place * (1 if self._tp_mesh is None else self._tp_mesh.size())

    def _home_of(self, name: str) -> int:
        """Return the rank in a pipeline whose buffer, or extra state, of a name counts."""
        part = name.rpartition(".")[0]
        return self.layers.plan.homes.get(part, self._stages - 1) % self._ranks

    def broadcast_buffers(self) -> None:
        """Make the first replica's buffers everybody's who has their layers; collective.

        What a step has replaced by another shape is replaced on the other processes, too. Where
        several stages have a buffer, those of the last one count, since it runs the whole step.
        """
        module = self.module
        buffers = dict(module.named_buffers(remove_duplicate=False))
        state = module.state_dict(keep_vars=True)
        extra = {name: value for name, value in state.items() if name.endswith(_EXTRA)}
        described = {
            name: Boundary(buffer)
            for name, buffer in buffers.items()
            if not isinstance(buffer, Absent)
        }
        of_ranks = all_gather_object((described, extra))
        self._described, self._extra = {}, {}
        for place in range(self._ranks):
            found, extra_there = of_ranks[self._rank_of(place)]
            self._described |= {n: b for n, b in found.items() if self._home_of(n) == place}
            self._extra |= {n: v for n, v in extra_there.items() if self._home_of(n) == place}
        for name, expected in self._described.items():
            having = [rank for rank, (found, _) in enumerate(of_ranks) if name in found]
            if len(having) == 1 or self.options.rank not in having:
                continue
            home = self._rank_of(self._home_of(name))
            buffer = buffers[name]
            if Boundary(buffer) != expected:
                shape, dtype = expected.shape, expected.dtype
                buffer = torch.empty(shape, dtype=dtype, device=self.options.device)
            self._broadcast_from(home, buffer, having)
            part, _, key = name.rpartition(".")
            module.get_submodule(part)._buffers[key] = buffer

    def _broadcast_from(self, home: int, buffer: Tensor, having: Sequence[int]) -> None:
        """Send a buffer from the first replica to the processes that have it."""
        values = buffer.detach().contiguous()
        if self.options.rank == home:
            for rank in having:
                if rank != home and values.numel():
                    dist.send(as_bytes(values), rank)
        elif values.numel():
            dist.recv(as_bytes(values), home)
            if values is not buffer:
                with torch.no_grad():
                    buffer.copy_(values)

    def close(self) -> None:
        """Give the modules back their ``forward``; layers stay on their processes."""
        super().close()
        if hasattr(self, "layers"):
            self.layers.close()
        if hasattr(self, "stage_weights"):
            self.stage_weights.release()
        self._schedules.clear()


class PipelineGradients(ShardedGradients):
    """The gradients of the layers of this process.

    Args:
        engine: The engine.
        replaced: See `ShardedGradients`.
    """

    def __init__(
        self, engine: Pipeline, replaced: Mapping[int, tuple[nn.Parameter, nn.Parameter]]
    ) -> None:
        super().__init__(engine.options, replaced)
        self._engine = engine

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, from the stage that has it; collective."""
        engine = self._engine
        parameter = self._replaced.get(id(parameter), (parameter, parameter))[1]
        owner = engine.layers.owners[id(parameter)][0]
        here = owner == engine._place
        flag = torch.tensor([float(parameter.grad is not None)], device=engine.options.device)
        _send(flag, engine._group, owner)
        if not read_back(flag).item():
            return None
        gradient: Any = parameter.grad if here else None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if gradient is None:
            gradient = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=engine.options.device
            )
        return _send(gradient.detach(), engine._group, owner)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite on any process."""
        non_finite = find_non_finite(self.parts_of(parameters))
        anywhere = torch.zeros(1, device=self._engine.options.device) + (
            0.0 if non_finite is None else non_finite
        )
        sum_numbers(anywhere)
        flag = anywhere[0].clamp(max=1.0)
        return bool(flag) if flag.is_cpu else flag

    def _holders_of(self, parameter: Tensor) -> int:
        engine = self._engine
        return len(engine.layers.owners[id(parameter)]) * (
            self._options.world_size // engine._ranks
        )


class PipelineWeights(Weights):
    """Weights of which each process has those of its layers.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Pipeline) -> None:
        self._engine = engine

    # ARG002: the present values are filled
    def parts(self, module: nn.Module, *, to_fill: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """Return what this process holds of the weights, by the names of all of them.

        Raises:
            RuntimeError: No module is divided here.
        """
        engine, made = self._engine, dict[int, LocalShards]()
        if not hasattr(engine, "layers"):
            raise RuntimeError(
                "No module is divided into stages: read its weights in a callback while fit "
                "runs, or load them from a checkpoint."
            )
        engine.stage_weights.release()
        parts: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if name.endswith(_EXTRA):
                parts[name] = engine._extra.get(name, value)
            elif isinstance(value, Tensor):
                if id(value) not in made:
                    made[id(value)] = self._part(name, value)
                parts[name] = made[id(value)]  # the same for tied weights
        return parts

    def _part(self, name: str, value: Tensor) -> LocalShards:
        engine = self._engine
        like = Boundary(value)
        owners = engine.layers.owners.get(id(value))
        home = engine._home_of(name) if owners is None else owners[0]
        if owners is None:
            like = engine._described.get(name, like)
        shards = [] if isinstance(value, Absent) else local_parts(value.detach())
        saved = engine._saves(value, home)
        return LocalShards(like.shape, like.dtype, engine.options.device, shards, saved=saved)

    # ARG002: gradients of micro-batches are with the engine
    def reshard(self, module: nn.Module, *, drops_gradients: bool = False) -> None:  # noqa: ARG002
        """Put the shards in the place of gathered weights."""
        if hasattr(self._engine, "stage_weights"):
            self._engine.stage_weights.release()

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole weights on the host of rank 0, and {} elsewhere; collective."""
        named = bare_names(module, self.parts(module).items())
        return gathered_on_first(named, self._engine.options.rank)


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _nothing(*_: Any) -> None:
    """Stand for a step while none runs."""


def _unsupported(options: EngineOptions) -> str | None:
    """Return an option that the engine does not have, and what to do; None without any."""
    if options.mixed_precision in ("fp16", "fp8"):
        return f"mixed_precision={options.mixed_precision!r}: use 'bf16' or 'no'"
    if options.fsdp_plugin is not None:
        return "fsdp_plugin: dp_shard_size shards the layers of each stage; leave the plugin out"
    if options.ddp_kwargs is not None and options.ddp_kwargs.comm_hook != "no":
        return f"comm_hook={options.ddp_kwargs.comm_hook.value!r}: leave it out"
    if (compiler := options.dynamo_plugin) and compiler.backend != DynamoBackend.NO:
        return f"dynamo_backend={str(compiler.backend).lower()!r}: leave it out"
    if options.sync_each_batch:
        return "sync_each_batch=True: gradients are reduced once an update"
    return None


def _mesh_sizes(config: ParallelismConfig) -> dict[str, int]:
    """Return the dimensions of the mesh: those with several processes, and a pipeline's.

    Processes that read the same data have consecutive ranks, as with the other engines. Layers that
    are split are sharded too, perhaps over one process: FSDP2 then averages their gradients.
    """
    shares = config.dp_shard_enabled or config.tp_enabled
    sizes = config.to_json()
    if not shares:
        return {"dp_replicate": config.data_parallel_size, "pp": sizes["pp_size"]}
    names = [
        name
        for name in ("dp_replicate", "dp_shard", "pp", "tp")
        if sizes[f"{name}_size"] > 1 or name in ("dp_shard", "pp")
    ]
    return {name: sizes[f"{name}_size"] for name in names}


def _check_module(module: nn.Module) -> None:
    """Check that a module can be divided.

    Raises:
        ValueError: It cannot.
    """
    problem = None
    if has_sync_batch_norm(module):
        problem = "has SyncBatchNorm, which waits for processes that run other layers: leave it out"
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            problem = f"has sparse gradients in {name}: pass sparse=False"
        if is_compiled(part):
            problem = (
                f"is compiled in {name or 'its whole'}, including its layers: do not compile it"
            )
    if _SHARDS not in vars(module) and any(isinstance(p, DTensor) for p in module.parameters()):
        problem = (
            "has layers that are split already: give it a tp_plan, by which each stage splits its "
            "own, instead of calling parallelize_module"
        )
    if any(p.is_meta for p in module.parameters() if not isinstance(p, Absent)):
        problem = "has parameters on the meta device, which no stage can fill: create them whole"
    if problem is not None:
        raise ValueError(f"With pp_size above 1, {type(module).__name__} {problem}.")


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _send(tensor: Tensor, group: Any, first: int) -> Tensor:
    """Broadcast a tensor from a rank of a group, in place; return it."""
    values = tensor.detach().contiguous()
    if values.numel():
        dist.broadcast(as_bytes(values), group_src=first, group=group)
    if values.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(values)
    return tensor


def _describe(held: list[Tensor], value: Any) -> Any:
    """Return what stands for a value that is sent: of a tensor its shape and dtype."""
    if not isinstance(value, Tensor):
        return value
    held.append(value)
    return Boundary(value)


def _note(value: Any, parameter: Tensor) -> Any:
    """Return the dtype of a state that is as large as its parameter; else its value."""
    if not isinstance(value, Tensor):
        return value
    divided = value.ndim and value.shape == parameter.shape
    return value.dtype if divided else value.detach().cpu()


def _checksum(batch: Any) -> int:
    """Return a number that differs between batches of other values."""
    number = 0
    for value in leaves(batch):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            number = crc32(as_bytes(value.detach().cpu().contiguous()).numpy().data, number)
    return number
