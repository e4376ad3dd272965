"""Pipeline parallelism: each process runs some consecutive layers of a model, a stage.

A batch is split into micro-batches, which pass from stage to stage. torch traces the model with
``torch.export``, splits the graph at the beginning of modules that the user names, and runs the
schedule (`torch.distributed.pipelining`). Rank 0 has the inputs; see GPipe (Huang et al., 2019) and
1F1B (PipeDream-Flush, Narayanan et al., 2021) for the schedules.
"""

from __future__ import annotations

import copy
import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.checkpoint.save import run_on_all_ranks
from trainer.checkpoint.weights import save_stages
from trainer.checks import check_bools, check_choice, check_counts
from trainer.distributed import transport
from trainer.distributed.objects import broadcast_object
from trainer.distributed.process_control import exchange
from trainer.files import with_home
from trainer.state import PartialState
from trainer.torch_compat import check_pipelining
from trainer.tree import (
    leaves,
    map_tree,
    required_batch_size,
    send_to_device,
    slice_tensors,
)

_TENSOR = object()  # a placeholder for a tensor of an output
_SCHEDULES = {"1F1B": "Schedule1F1B", "GPipe": "ScheduleGPipe"}


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Make each process run a part of a model's layers, for inference.

    The model is then called on every process, in ``torch.no_grad()``. Only rank 0's arguments are
    used; batches may have any size. The output is on the last process, and None on the others. With
    one process the model is unchanged. Do not pass it to `Accelerator.prepare`.

    Example::

        model = prepare_pippy(model, example_args=(inputs,))
        with torch.no_grad():
            outputs = model(inputs)  # on the last process

    Args:
        model: The whole model on the CPU of every process, with the same weights. The stage of each
            process is moved to its device.
        split_points: Names of the modules at which stages begin, one fewer than processes, in the
            order of the forward pass; ``"auto"`` chooses them so that stages have about the same
            size. The names are stored in ``model.hf_split_points``.
        no_split_module_classes: Names of classes inside which ``"auto"`` never splits; None takes
            the model's own (``_no_split_modules`` of transformers).
        example_args: Arguments of one micro-batch, of which only shapes and dtypes are used.
        example_kwargs: Keyword arguments of one micro-batch.
        num_chunks: The number of micro-batches of a batch; None is the number of processes.
        gather_output: Send the output to every process.

    Returns:
        The model, with another ``forward``.

    Raises:
        ValueError: A name is unknown, or the model cannot be split there.
        RuntimeError: torch cannot trace the model.
    """
    check_bools(gather_output=gather_output)
    state = PartialState()
    stages = _Stages(
        model, split_points, no_split_module_classes, num_chunks, example_args, example_kwargs
    )
    model.hf_split_points = stages.split_points  # type: ignore[assignment] # not a tensor
    if state.num_processes == 1:
        return model.to(state.device)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stages.run(args, kwargs)
        last = state.num_processes - 1
        return broadcast_object(output, last) if gather_output else output

    vars(model)["_original_forward"] = model.forward
    vars(model)["forward"] = forward
    return model


class PipelineParallel:
    """Pipeline parallelism in a custom loop: each process has some layers of the model.

    Every process runs the same loop and calls `step` for each batch; only rank 0's batches are
    used. Do not prepare the loaders or this object, since its processes share one batch. Gradients,
    losses and norms equal those of one process on the whole batch. With one process the
    micro-batches run one after another.

    Example::

        loss_function = torch.nn.functional.cross_entropy
        pipeline = PipelineParallel(model, loss_function, example_args=(inputs,))
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for inputs, targets in train_loader:
            loss = pipeline.step(inputs, target=targets)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: See `prepare_pippy`. Dropout and batch norm operate on micro-batches.
        loss_function: Called with the output and the target of a micro-batch; returns the mean
            loss over its items, a tensor of shape ().
        example_args: See `prepare_pippy`.
        example_kwargs: See `prepare_pippy`.
        split_points: See `prepare_pippy`.
        no_split_module_classes: See `prepare_pippy`.
        num_microbatches: The number of micro-batches of a batch, at least the number of processes;
            None is that number. With more micro-batches, processes wait less.
        schedule: ``"1F1B"``, which keeps activations of at most as many micro-batches as there are
            stages, or ``"GPipe"``, which keeps those of all micro-batches.
        count_items: The number of items of a target that the loss averages over, such as unmasked
            tokens; None counts its rows.

    Attributes:
        model: The model.
        split_points: The names of the modules at which stages begin.
        stage_index: The stage of this process, which is its rank.

    Raises:
        ValueError: An argument is wrong, a trained parameter is used in several stages, or a stage
            has no trained parameters.
        RuntimeError: torch cannot trace the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: Callable[[Any, Any], Tensor],
        example_args: tuple[Any, ...] = (),
        example_kwargs: dict[str, Any] | None = None,
        *,
        split_points: str | Sequence[str] = "auto",
        no_split_module_classes: Sequence[str] | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1F1B",
        count_items: Callable[[Any], float] | None = None,
    ) -> None:
        state = PartialState()
        check_choice("schedule", schedule, _SCHEDULES)
        if num_microbatches is not None:
            check_counts(1, num_microbatches=num_microbatches)
            if num_microbatches < state.num_processes:
                raise ValueError(
                    f"num_microbatches is {num_microbatches}, for {state.num_processes} "
                    "processes; some would be idle. Pass at least one micro-batch for each "
                    "process."
                )
        self.model, self.stage_index = model, state.process_index
        self._stages = _Stages(
            model,
            split_points,
            no_split_module_classes,
            num_microbatches,
            example_args,
            example_kwargs,
            loss=_Loss(loss_function, count_items),
            schedule=schedule,
        )
        self.split_points = self._stages.split_points
        self._stages.check_trainable()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process's stage, under their names in the whole model."""
        yield from self._stages.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process's stage, for its optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def step(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch, accumulating the parameters' gradients.

        Args:
            *args: Arguments of the model. Only those of rank 0 are used.
            target: Tensors in nested containers, for the loss, with as many rows as the batch.
            **kwargs: Arguments of the model.

        Returns:
            The loss, a tensor of shape () without a graph, the same on all processes.

        Raises:
            ValueError: The tensors differ in their number of rows, or `step` runs under autocast.
            Exception: An error in the forward pass of this process's layers, or on the last process
                in `loss_function` or `count_items`. The gradients of the batch must then be
                dropped.
            RuntimeError: On the other processes; it names the rank that failed and its error.
        """
        with torch.enable_grad():
            return self._stages.run_loss(args, kwargs, target, backward=True)

    def evaluate(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch without gradients; see `step`.

        Call ``model.eval()`` on all processes before, and ``model.train()`` after.
        """
        with torch.no_grad():
            return self._stages.run_loss(args, kwargs, target, backward=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for a batch on the last process, and None elsewhere."""
        with torch.no_grad():
            return self._stages.run(args, kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages to a total norm of at most `max_norm`; collective.

        Returns:
            The total norm before, a tensor of shape (), the same on all processes.
        """
        parameters = list(self.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        norm = norm.to(PartialState().device, torch.float32)  # powers of float16 soon overflow
        if PartialState().num_processes > 1 and norm_type == torch.inf:
            dist.all_reduce(norm, dist.ReduceOp.MAX)
        elif PartialState().num_processes > 1:
            norm = norm**norm_type
            dist.all_reduce(norm)
            norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of this process's stage, under their names in the whole model."""
        return {name: tensor.detach() for name, tensor in self._stages.weights().items()}

    def save_model(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the weights of all stages, one safetensors file per stage and an index; collective.

        Transformers, `load_checkpoint_in_model` and other tools read the folder like that of one
        model.

        Raises:
            CheckpointError: Saving failed on one process; raised on all.
        """
        folder = Path(with_home("save_directory", save_directory))
        state = PartialState()
        run = partial(run_on_all_ranks, "Saving the stages", state=state, operation="save_model")
        save_stages(
            self._stages.weights(), folder, state.process_index, state.num_processes, run=run
        )


@dataclass(frozen=True)
class _BatchSpec:
    """The structure of a batch, known to all processes: meta tensors without the row dimension."""

    rows: int
    args: Any
    kwargs: Any
    target: Any = None
    training: bool = False


class _Loss:
    """The loss of micro-batches, each weighted by its share of the batch's items.

    Attributes:
        rebuild: Converts the last stage's result to the model's output.
    """

    def __init__(
        self, function: Callable[[Any, Any], Tensor], count: Callable[[Any], float] | None
    ) -> None:
        self._function, self._count = function, count
        self.rebuild: Callable[[Any], Any] = lambda output: output
        self._parts: list[tuple[int, Any, float]] = []

    def begin(self, target: Any, rows: int, size: int, number: int) -> None:
        """Split the target of a batch into micro-batches of `size` rows, the last ones shorter."""
        count = self._count or required_batch_size
        total = count(target)
        self._parts = []
        for start in range(0, size * number, size):
            real = min(size, max(rows - start, 0))
            # Padded with repeated rows, so that every micro-batch has a loss.
            part = slice_tensors(target, slice(start, start + real) if real else slice(0, 1))
            weight = float(count(part) / total) if real and total else 0.0
            self._parts.append((real or 1, part, weight))

    def __call__(self, output: Any, index: Tensor) -> Tensor:
        """Return the weighted loss of a micro-batch, by its number."""
        real, target, weight = self._parts[int(index)]
        loss = self._function(slice_tensors(self.rebuild(output), slice(real)), target) * weight
        if loss.shape:
            raise ValueError(
                f"loss_function returned a tensor of shape {tuple(loss.shape)}; it must return the "
                "mean over the items, of shape ()."
            )
        return loss


class _Stages:
    """A model split into stages, traced once for each shape of micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        split_points: str | Sequence[str],
        no_split_module_classes: Sequence[str] | None,
        number: int | None,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None,
        *,
        loss: _Loss | None = None,
        schedule: str = "GPipe",
    ) -> None:
        state = PartialState()
        if number is not None:
            check_counts(1, num_chunks=number)
        self._num_microbatches = number or state.num_processes
        self._model = model
        self._traced = copy.copy(model)  # since `prepare_pippy` replaces the forward of `model`
        self._forward = self._traced.forward
        self._loss, self._schedule = loss, schedule
        self._device = state.device
        self._rank, self._last_rank = state.process_index, state.num_processes - 1
        self._schedules: dict[Any, Any] = {}
        self._error: Exception | None = None  # the first error of this process in a batch
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._tensors: dict[str, Tensor] = dict(named)
        self._stage_tensors: dict[int, Tensor] = {}  # tensors on the device, by id in the model
        self._stages_of: dict[int, set[int]] = {}  # stages that use a tensor, by its id
        self.split_points = _check_split_points(
            model, split_points, no_split_module_classes, state.num_processes
        )
        if self._last_rank == 0:
            model.to(self._device)
            return
        check_pipelining()
        args, kwargs = send_to_device((example_args, example_kwargs or {}), "cpu")
        rows = required_batch_size((args, kwargs))
        spec = _batch_spec(rows, args, kwargs, None, model.training)
        self._prepare(spec, rows, "output" if loss is None else "gradient")

    def check_trainable(self) -> None:
        """Raise if a trained parameter is in several stages, or a stage has none.

        Raises:
            ValueError: See above.
        """
        if self._last_rank == 0:
            return
        stages: set[int] = set()
        for name, parameter in self._model.named_parameters():
            users = self._stages_of.get(id(parameter), set())
            if parameter.requires_grad and len(users) > 1:
                raise ValueError(
                    f"{name} is used in the stages {sorted(users)}, whose copies would become "
                    "different weights (tied weights). Untie them, split where one stage has all "
                    "uses, or shard the model instead (fsdp_plugin, --use_fsdp)."
                )
            stages |= users if parameter.requires_grad else set()
        if missing := sorted({*range(self._last_rank + 1)} - stages):
            raise ValueError(
                f"No parameter of stage {missing[0]} is trained: split at other modules than "
                f"{self.split_points}, so that each stage has some."
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process, under their names in the whole model."""
        for name, parameter in self._model.named_parameters():
            tensor = parameter if self._last_rank == 0 else self._stage_tensors.get(id(parameter))
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def weights(self) -> dict[str, Tensor]:
        """Return the entries of the model's state dict that this process saves."""
        weights = self._model.state_dict(keep_vars=True)
        return {
            name: self._stage_tensors.get(id(tensor), tensor)
            for name, tensor in weights.items()
            if min(self._stages_of.get(id(tensor), {0})) == self._rank
        }

    # -- running ---------------------------------------------------------------------------------

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the model's output on the last process, and None on the others."""
        if self._last_rank == 0:
            args, kwargs = send_to_device((args, kwargs), self._device)
            return self._model(*args, **kwargs)
        spec = self._broadcast_spec(args, kwargs, None)
        size = -(-spec.rows // self._num_microbatches)
        schedule, rebuild = self._prepare(spec, size, "output")
        args, kwargs = self._pad_inputs(args, kwargs, spec.rows, size)
        output = schedule.eval(*args, **kwargs)
        exchange(self._error, "pipeline")
        if self._rank < self._last_rank:
            return None
        return slice_tensors(rebuild(output), slice(spec.rows))

    def run_loss(self, args: Any, kwargs: Any, target: Any, *, backward: bool) -> Tensor:
        """Return the loss of a batch, and with `backward` accumulate gradients."""
        loss = self._loss
        assert loss is not None
        if self._last_rank == 0:
            return self._run_alone(loss, args, kwargs, target, backward=backward)
        spec = self._broadcast_spec(args, kwargs, target)
        size = -(-spec.rows // self._num_microbatches)
        schedule, loss.rebuild = self._prepare(spec, size, "gradient" if backward else "loss")
        args, kwargs = self._pad_inputs(args, kwargs, spec.rows, size)
        target = self._send_target(spec.target, spec.rows, target)
        losses: list[Tensor] | None = None
        numbers = None
        if self._rank == self._last_rank:
            losses, numbers = [], torch.arange(self._num_microbatches)
            try:
                loss.begin(target, spec.rows, size, self._num_microbatches)
            except Exception as error:  # noqa: BLE001 - raised below
                self._error = error
        run = schedule.step if backward else schedule.eval
        run(*args, target=numbers, losses=losses, return_outputs=False, **kwargs)
        exchange(self._error, "pipeline")
        total = torch.zeros((), device=self._device)
        if losses:
            total += torch.stack([loss.detach().float() for loss in losses]).sum()
        transport.send(total, self._last_rank)
        return total

    def _run_alone(
        self, loss: _Loss, args: Any, kwargs: Any, target: Any, *, backward: bool
    ) -> Tensor:
        args, kwargs, target = send_to_device((args, kwargs, target), self._device)
        rows = _check_rows(args, kwargs, target)
        size = -(-rows // self._num_microbatches)
        number = -(-rows // size)
        loss.begin(target, rows, size, number)
        total = torch.zeros((), device=self._device)
        for index in range(number):
            part = slice(index * size, (index + 1) * size)
            inputs, keywords = slice_tensors((args, kwargs), part)
            value = loss(self._model(*inputs, **keywords), torch.tensor(index))
            if backward:
                value.backward()
            total += value.detach().float()
        return total

    def _broadcast_spec(self, args: Any, kwargs: Any, target: Any) -> _BatchSpec:
        """Return the spec of rank 0's batch; collective. Errors of rank 0 are raised on all."""
        if torch.is_autocast_enabled(self._device.type):
            raise ValueError(
                "A pipeline does not run under autocast: the stages send float32. Convert the "
                "model instead: model.to(torch.bfloat16)."
            )
        self._error = None
        spec: _BatchSpec | Exception | None = None
        if self._rank == 0:
            try:
                rows = _check_rows(args, kwargs, target)
                spec = _batch_spec(rows, args, kwargs, target, self._model.training)
            except (TypeError, ValueError) as error:
                spec = error
        spec = broadcast_object(spec)
        if isinstance(spec, Exception):
            raise spec
        assert spec is not None
        return spec

    def _pad_inputs(self, args: Any, kwargs: Any, rows: int, size: int) -> tuple[Any, Any]:
        """Return rank 0's inputs with the last row repeated to fill all micro-batches."""
        if self._rank > 0:
            return (), {}
        args, kwargs = send_to_device((args, kwargs), self._device)
        missing = size * self._num_microbatches - rows
        if not missing:
            return args, kwargs

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            return torch.cat([leaf, leaf[-1:].expand(missing, *leaf.shape[1:])])

        filled: tuple[Any, Any] = map_tree(fill, (args, kwargs))
        return filled

    def _send_target(self, shapes: Any, rows: int, target: Any) -> Any:
        """Return rank 0's target on every process."""
        if self._rank == 0:
            target = send_to_device(target, self._device)
        else:
            target = _empty(shapes, rows, self._device)
        for leaf in leaves(target):
            if isinstance(leaf, Tensor):
                transport.send(leaf.contiguous(), 0)
        return target

    # -- tracing ---------------------------------------------------------------------------------

    def _prepare(self, spec: _BatchSpec, size: int, operation: str) -> Any:
        """Return the schedule for micro-batches of `size` rows, created when first needed.

        Args:
            spec: The batch.
            size: The rows.
            operation: ``"output"``, ``"loss"`` or ``"gradient"``.

        Returns:
            The schedule, and a function that converts the last stage's result to the model's
            output.
        """
        modes = [part.training for part in self._model.modules()]  # the graph keeps them
        key = repr((spec.args, spec.kwargs, spec.training, modes, size, operation))
        if key not in self._schedules:
            self._schedules[key] = self._trace(spec, size, operation)
        return self._schedules[key]

    def _trace(self, spec: _BatchSpec, size: int, operation: str) -> Any:
        from torch.distributed import pipelining

        def split(*_: Any) -> None:
            pipelining.pipe_split()

        hooks = [
            self._traced.get_submodule(name).register_forward_pre_hook(split)
            for name in self.split_points
        ]
        skeleton: Any = None

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> list[Tensor]:
            nonlocal skeleton  # stages return flat lists of tensors
            output = self._forward(*args, **kwargs)
            skeleton = map_tree(lambda leaf: _TENSOR if isinstance(leaf, Tensor) else leaf, output)
            return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]

        self._traced.training = self._model.training
        vars(self._traced)["forward"] = forward
        args, kwargs = _empty((spec.args, spec.kwargs), size, torch.device("cpu"))
        try:
            with warnings.catch_warnings():  # torch's tracing uses deprecated torch functions
                warnings.simplefilter("ignore", FutureWarning)
                pipe = pipelining.pipeline(self._traced, mb_args=args, mb_kwargs=kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        output_indices = self._check_stages(pipe)
        for index in range(pipe.num_stages):
            part = pipe.get_stage_module(index)
            for name in {*dict(part.named_parameters()), *dict(part.named_buffers())}:
                if name in self._tensors:
                    self._stages_of.setdefault(id(self._tensors[name]), set()).add(index)
        stage_module = pipe.get_stage_module(self._rank)
        self._place_tensors(stage_module)
        _send_contiguous(stage_module)
        vars(stage_module)["forward"] = self._zeros_after_error(
            stage_module.forward, partial(_zero_outputs, stage_module)
        )
        stage = pipe.build_stage(self._rank, self._device)
        kind = getattr(
            pipelining, _SCHEDULES[self._schedule if operation == "gradient" else "GPipe"]
        )
        loss = None if operation == "output" else self._zeros_after_error(self._loss, _zeros)
        rebuild = partial(_rebuild_output, skeleton, output_indices)
        return kind(stage, self._num_microbatches, loss_fn=loss, scale_grads=False), rebuild

    def _zeros_after_error(self, function: Any, zeros: Callable[[], Any]) -> Callable[..., Any]:
        """Make a function return zeros after an error, since other stages wait for its result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._error is None:
                try:
                    return function(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - raised once the schedule has ended
                    self._error = error
            return zeros()

        return call

    def _check_stages(self, pipe: Any) -> list[int]:
        """Return, for each output tensor of the model, its index among the last stage's outputs.

        Raises:
            ValueError: The model cannot run as these stages.
        """
        if pipe.num_stages != self._last_rank + 1:
            raise ValueError(
                f"split_points {self.split_points} cut {type(self._model).__name__} into "
                f"{pipe.num_stages} stages, for {self._last_rank + 1} processes. Name modules that "
                "forward calls once, with layers before each."
            )
        _relay_values(pipe)
        (output,) = pipe.split_gm.graph.find_nodes(op="output")
        return [_output_index(node) for node in leaves(output.args)]

    def _place_tensors(self, part: nn.Module) -> None:
        """Set the parameters and buffers of a traced stage to this process's, on its device."""
        for place, _ in [*part.named_parameters(), *part.named_buffers()]:
            if place not in self._tensors:
                continue  # a constant of the graph
            tensor = self._tensors[place]
            if id(tensor) not in self._stage_tensors:
                placed = tensor
                if tensor.device != self._device:
                    placed = tensor.detach().to(self._device)
                    if isinstance(tensor, nn.Parameter):
                        placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
                self._stage_tensors[id(tensor)] = placed
            parent, _, name = place.rpartition(".")
            setattr(part.get_submodule(parent), name, self._stage_tensors[id(tensor)])


def _output_index(value: Any) -> int:
    """Return the index of a value of the stages' graph among the outputs of its stage."""
    return 0 if value.op == "call_module" else int(value.args[1])


def _relay_values(pipe: Any) -> None:
    """Make each stage pass on values of earlier stages that later stages need.

    Torch can send a value to several stages, but sends no gradients back. It passes the model's
    arguments to the first stage by position, although that stage takes only the arguments it uses,
    in order of use; here it takes all of them. In the graph of stages, a value is a stage, an item
    of a stage's result, or an argument.
    """
    graph = pipe.split_gm.graph
    arguments = graph.find_nodes(op="placeholder")
    *stages, output = (node for node in graph.nodes if node.op in ("call_module", "output"))
    returned: dict[Any, list[Any]] = {}  # nodes inside each stage
    for index, stage in enumerate(stages):
        part, later = pipe.get_stage_module(index).graph, {*stages[index + 1 :], output}
        before = list(graph.nodes)[: list(graph.nodes).index(stage)]
        relayed = [value for value in before if not later.isdisjoint(value.users)]
        taken = dict(zip(stage.args, part.find_nodes(op="placeholder"), strict=True))
        for value in relayed if index else arguments:
            if value in taken:
                continue
            with part.inserting_before(next(iter(part.nodes))):
                if value.op == "placeholder":
                    taken[value] = part.placeholder(value.target)
                    taken[value].meta["val"] = value.meta["val"]
                    continue
                source = value if value.op == "call_module" else value.args[0]
                taken[value] = part.placeholder(f"relayed_{value.name}")
                taken[value].meta["val"] = returned[source][_output_index(value)].meta["val"]
        # Tensors arrive in the order in which the previous stage returns them.
        stage.args = tuple(sorted(taken, key=_output_index) if index else arguments)
        body = next(node for node in part.nodes if node.op != "placeholder")
        for value in stage.args:
            body.prepend(taken[value])
        (inner,) = part.find_nodes(op="output")
        stage_input = inner.args[0]
        returned[stage] = (
            list(stage_input) if isinstance(stage_input, (list, tuple)) else [stage_input]
        )
        if relayed and not isinstance(stage_input, (list, tuple)):  # it is a tuple from now on
            users = list(stage.users)
            with graph.inserting_after(stage):
                item = graph.call_function(operator.getitem, (stage, 0))
            for user in users:
                user.replace_input_with(stage, item)
        for value in relayed:
            with graph.inserting_after(stage):
                item = graph.call_function(operator.getitem, (stage, len(returned[stage])))
            returned[stage].append(taken[value])
            value.replace_all_uses_with(item, delete_user_cb=later.__contains__)
        if relayed:
            inner.args = (tuple(returned[stage]),)
        part.lint()
        pipe.get_stage_module(index).recompile()
    graph.lint()


def _send_contiguous(stage: Any) -> None:
    """Make a traced stage return and expect contiguous tensors, since gloo requires them."""
    (output,) = stage.graph.find_nodes(op="output")
    for node in (*stage.graph.find_nodes(op="placeholder"), *output.all_input_nodes):
        value = node.meta["val"]
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    stage.register_forward_hook(lambda _, __, out: tuple(leaf.contiguous() for leaf in leaves(out)))


def _zero_outputs(stage: Any) -> list[Tensor]:
    (output,) = stage.graph.find_nodes(op="output")
    return [_zeros(node.meta["val"]) for node in leaves(output.args)]


def _zeros(like: Tensor | None = None) -> Tensor:
    """Return zeros, by default of shape (), from which backward can start."""
    shape, dtype = ((), torch.float32) if like is None else (like.shape, like.dtype)
    trained = dtype.is_floating_point and torch.is_grad_enabled()
    device = PartialState().device
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=trained)


def _rebuild_output(skeleton: Any, output_indices: list[int], output: Sequence[Tensor]) -> Any:
    values = iter([output[index] for index in output_indices])
    return map_tree(lambda leaf: next(values) if leaf is _TENSOR else leaf, skeleton)


def _batch_spec(rows: int, args: Any, kwargs: Any, target: Any, training: bool) -> _BatchSpec:
    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.new_empty((0, *leaf.shape[1:]), device="meta", requires_grad=False)
        return leaf

    args, kwargs, target = map_tree(shape, (args, kwargs, target))
    return _BatchSpec(rows, args, kwargs, target, training)


def _empty(shapes: Any, rows: int, device: torch.device) -> Any:
    """Return zeros with this number of rows for each meta tensor."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device)

    return map_tree(make, shapes)


def _check_rows(*trees: Any) -> int:
    rows = required_batch_size(trees)
    for leaf in leaves(trees):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) != rows:
            raise ValueError(
                f"A batch of {rows} rows has a tensor of shape {tuple(leaf.shape)}: the first "
                "dimension of all, of the target too, must count the rows."
            )
    return rows


def _check_split_points(
    model: nn.Module,
    split_points: str | Sequence[str],
    no_split_module_classes: Sequence[str] | None,
    stages: int,
) -> list[str]:
    if isinstance(split_points, str):
        if split_points != "auto":
            raise ValueError(
                f"split_points is {split_points!r}; it must be 'auto' or a list of names."
            )
        classes = no_split_module_classes or getattr(model, "_no_split_modules", None) or ()
        return choose_split_points(model, stages, classes)
    names = {name for name, _ in model.named_modules() if name}
    for name in split_points:
        check_choice("split_points", name, names)
    if len(split_points) != stages - 1:
        raise ValueError(
            f"split_points has {len(split_points)} names, which make {len(split_points) + 1} "
            f"stages, for {stages} processes: give one fewer than processes."
        )
    return list(split_points)


def choose_split_points(
    model: nn.Module, stages: int, no_split_module_classes: Sequence[str] = ()
) -> list[str]:
    """Return the modules at which to split a model into stages of about equal size.

    Submodules are assumed to be called in the order in which they were assigned. A submodule is
    split only if it is larger than the target size of a stage.

    Args:
        model: The model.
        stages: The number of stages.
        no_split_module_classes: Names of classes of submodules that are never split.

    Raises:
        ValueError: There are fewer such submodules than stages.
    """
    share = _num_bytes(model) / stages
    parts: list[tuple[str, int]] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            size, child_path = _num_bytes(child), f"{path}.{name}".removeprefix(".")
            container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            cut = size > share and type(child).__name__ not in no_split_module_classes
            if container or (cut and any(map(_num_bytes, child.children()))):
                visit(child_path, child)
            elif size:
                parts.append((child_path, size))

    visit("", model)
    begins = [0, *accumulate(size for _, size in parts)]
    chosen: list[int] = [0]
    for stage in range(1, stages):
        candidates = range(chosen[-1] + 1, len(parts) - (stages - stage) + 1)
        if not candidates:
            raise ValueError(
                f"split_points='auto' finds {len(parts)} modules in {type(model).__name__} to "
                f"distribute over {stages} processes. Start fewer processes, or pass a list of "
                "names as split_points."
            )
        chosen.append(min(candidates, key=lambda i: abs(begins[i] - stage * begins[-1] / stages)))
    return [parts[i][0] for i in chosen[1:]]


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
