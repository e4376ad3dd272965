"""The layers of a stage: a module's own code, run with what one process has of it.

Weights of other stages are tensors without values. Layers of other stages return such tensors, and
so does the last layer of the stage, until the model returns: nothing leaves a layer by an
exception, which activation checkpointing would not survive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.engines.absent import Absent, absent, only_shapes, signature
from trainer.engines.single import attribute_restorer
from trainer.engines.stages import StagePlan
from trainer.rng import seed_local
from trainer.tree import leaves, map_tree

SHAPES = 10_000  # shapes of batches, and of what modules return, that are kept


class Boundary:  # no dataclass, which would be a container of tensors
    """The shape of a tensor that goes from a stage to others.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    @property
    def size(self) -> int:
        """The number of values."""
        return torch.Size(self.shape).numel()

    def __eq__(self, other: object) -> bool:
        """Return whether shapes and dtypes are equal."""
        return isinstance(other, Boundary) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return a hash of both."""
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        """Return the shape and dtype."""
        return f"a tensor of shape {self.shape} and {self.dtype}"


class StageEnded(BaseException):  # not an Exception: the user's code must not catch it
    """Ends a step where the model returns, on a stage before the last one."""


@dataclass
class StagePass:
    """A micro-batch in a stage: a call of the user's step.

    Attributes:
        stage: The stage; None if only shapes are looked for.
        trains: Whether gradients are needed.
        received: What the stage before has sent.
        sends: The shape of what goes to the next stage, if it is known.
        seed: What the layers draw their random numbers from.
        output: What the stage's last layer returned.
        latest: What the layer that ran last returned to the code around it.
        calls: How often the stage's first layer was called.
        inside: How many modules that contain the layers run.
        recomputes: Whether backward runs, in which layers may be computed again.
        found: What goes into each layer, by its index.
    """

    stage: int | None
    trains: bool = False
    received: Tensor | None = None
    sends: Boundary | None = None
    seed: int | None = None
    output: Tensor | None = None
    latest: Tensor | None = None
    calls: int = 0
    inside: int = 0
    recomputes: bool = False
    found: dict[int, Boundary] = field(default_factory=dict)


class StageLayers:
    """What a process has of a module, and the stage that runs.

    Args:
        module: The user's module.
        plan: The stages.
        place: The rank of this process in its pipeline, of `ranks`. It has each stage whose number
            has this remainder.
        ranks: The number of processes of a pipeline.
        device: Where the module is.
        run_stages: Runs all stages outside a schedule: called with the ``forward`` of what contains
            the layers and its arguments, it returns what the last stage does.

    Attributes:
        plan: The argument.
        here: The numbers of the stages of this process.
        own: The parameters that have values here.
        owners: The ranks in a pipeline that have each parameter, by its ``id``.
        replaced: The parameters that were replaced and what took their place, by the ``id`` of
            each; the old ones are kept, so that no ``id`` recurs, but not their values.
        current: The pass that runs; None outside of steps.
        in_own_layer: Whether a layer of this process runs, and not the code around the layers.

    Raises:
        ValueError: It was divided into other stages before.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        place: int,
        ranks: int,
        device: torch.device,
        run_stages: Callable[..., Any],
    ) -> None:
        self.module, self.plan, self._device = module, plan, device
        self._place, self._ranks, self._run_stages = place, ranks, run_stages
        self.here = range(place, plan.stages, ranks)
        self.own: list[nn.Parameter] = []
        self.owners: dict[int, tuple[int, ...]] = {}
        self.replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.current: StagePass | None = None
        self.in_own_layer = False
        # What modules of other stages return, by what they get.
        self._shapes: OrderedDict[Any, Any] = OrderedDict()
        self._undo: list[Callable[[], Any]] = []
        self._divide(module, plan)

    def names_here(self) -> Iterator[str]:
        """Yield the names of modules that run on a stage of this process."""
        for name, _ in self.module.named_modules():
            if not self.plan.stages_with(name).isdisjoint(self.here):
                yield name

    def replace(self, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
        """Note that other parameters, such as parts of them, took the place of own ones.

        Args:
            before: The parameters that were replaced.
            after: What took the place of each.
        """
        new = {id(old): (old, made) for old, made in zip(before, after, strict=True)}
        self.own = [new.get(id(old), (old, old))[1] for old in self.own]
        for old, made in new.values():
            self.owners[id(made)] = self.owners.pop(id(old))
        # What had taken the place of another is known to nobody else, so nothing keeps it.
        for number, (old, made) in self.replaced.items():
            self.replaced[number] = old, new.pop(id(made), (made, made))[1]
        self.replaced |= new

    def _divide(self, module: nn.Module, plan: StagePlan) -> None:
        """Replace the weights of other stages by absent ones, and note who has which."""
        parts = dict(module.named_modules())
        owners: dict[int, set[int]] = {}
        tensors: dict[int, nn.Parameter] = {}
        for name, part in parts.items():
            for parameter in part.parameters(recurse=False):
                stages = plan.stages_with(name)
                owners.setdefault(id(parameter), set()).update(s % self._ranks for s in stages)
                tensors[id(parameter)] = parameter
        made: dict[int, Any] = {}
        for number, ranks in owners.items():
            parameter = tensors[number]
            if self._place in ranks:
                if isinstance(parameter, Absent):
                    raise ValueError(
                        f"{type(module).__name__} was divided into other stages before: create it "
                        "again, and load its weights from a checkpoint."
                    )
                made[number] = parameter
            elif isinstance(parameter, Absent):
                made[number] = parameter
            else:
                value = nn.Parameter(Absent(parameter.detach(), parameter.device))
                made[number] = value.requires_grad_(parameter.requires_grad)
                self.replaced[number] = parameter, made[number]
            self.owners[id(made[number])] = tuple(sorted(ranks))
        of_layers = {name for name in parts if any(_within(name, layer) for layer in plan.layers)}
        for name, part in parts.items():
            own = list(part.named_parameters(recurse=False, remove_duplicate=False))
            for key, parameter in own:
                setattr(part, key, made[id(parameter)])
            here = any(stage % self._ranks == self._place for stage in plan.stages_with(name))
            if not here and (own or name in of_layers):
                for key, buffer in part.named_buffers(recurse=False):
                    part._buffers[key] = absent(buffer, buffer.device)
        self.own = [p for p in module.parameters() if not isinstance(p, Absent)]

    def wrap(self) -> None:
        """Let layers, what contains them, and what runs before or after them, know the stage."""
        plan, parts = self.plan, dict(self.module.named_modules())
        for index, name in enumerate(plan.layers):
            self._replace_forward(parts[name], partial(self._run_layer, index))
        for name in plan.runners:
            self._replace_forward(parts[name], self._run_model)
        for name, part in parts.items():
            inside = any(_within(name, layer) for layer in plan.layers)
            if not inside and name not in plan.everywhere and _has_parameters(part):
                self._replace_forward(part, partial(self._run_beside, name))

    def _replace_forward(self, part: nn.Module, run: Callable[..., Any]) -> None:
        self._undo.append(attribute_restorer(part, "forward"))
        part.forward = wraps(part.forward)(partial(run, part.forward))

    def _run_layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a layer's ``forward``."""
        current = self.current
        if current is None:
            return forward(*args, **kwargs)
        if not current.recomputes:
            self._check_place(index, current, args, kwargs)
        outputs = self._outputs_of(index, forward, args, kwargs)
        if not current.recomputes:
            current.latest = _first_tensor(outputs)
        return outputs

    def _check_place(self, index: int, current: StagePass, args: Any, kwargs: Any) -> None:
        """Check that a layer can begin a stage, if it does; note the shape of what it gets.

        Raises:
            RuntimeError: It gets something else than the layer before it returned, no module that
                contains the layers runs, or a training step runs it without gradients.
        """
        layers, given = self.plan.layers, _first_tensor([args, kwargs])
        if not current.inside:
            raise RuntimeError(
                f"{layers[index]} was called outside of the forward of a module that contains "
                "all layers, so no stage knows where the model begins and ends: call the layers "
                "in that module's forward."
            )
        if (current.trains or current.stage is None) and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{layers[index]} runs without gradients in training_step, so the stages before "
                "it could not be trained. Reentrant activation checkpointing does this: pass "
                "use_reentrant=False."
            )
        if index in self.plan.starts[1:] and given is not current.latest:
            raise RuntimeError(
                f"{layers[index]}, the first layer of a stage, does not get the output of "
                f"{layers[index - 1]} as its input: no stage would run the code between them. "
                "Put it into a layer, or let the stages begin elsewhere (pp_split)."
            )
        if current.stage is None and given is not None:
            current.found.setdefault(index, Boundary(given))

    def _outputs_of(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a layer does; of another stage's, and of the last one here, shapes alone."""
        current, plan = self.current, self.plan
        assert current is not None
        stage = current.stage
        if stage is None or index not in plan.range_of(stage):
            return self._shapes_of(plan.layers[index], forward, args, kwargs)
        here = plan.range_of(stage)
        if index == here[0]:
            if not current.recomputes:
                current.calls += 1
                if current.calls > 1:
                    raise RuntimeError(
                        f"training_step runs {plan.layers[index]} several times, but a stage gets "
                        "its input once for each micro-batch: call the model once."
                    )
            if current.received is not None:
                args, kwargs = _received_in(args, kwargs, current.received, plan.layers[index])
        check_known(args, kwargs, plan.layers[index])
        output = self._run_own(forward, args, kwargs)
        if index != here[-1] or stage == self.plan.stages - 1:
            return output
        if not current.recomputes:
            current.output = _first_tensor(output)
            self._check_sent(current)
            if not current.trains:
                raise StageEnded
        return _with_gradient(absent(output, self._device))

    def _run_own(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self.in_own_layer = self.in_own_layer, True
        try:
            return forward(*args, **kwargs)
        finally:
            self.in_own_layer = before

    def _check_sent(self, current: StagePass) -> None:
        """Check that a stage returns what was found from the shapes of the batch.

        Raises:
            RuntimeError: It has another shape, or is a ``DTensor``.
        """
        if current.sends is None or current.output is None:
            return
        found = Boundary(current.output)
        if found != current.sends or isinstance(current.output, DTensor):
            kind = "a DTensor, not" if isinstance(current.output, DTensor) else "whereas"
            raise RuntimeError(
                f"Stage {current.stage} returned {found}, {kind} {current.sends}, which was "
                "derived from the shapes of the batch. Activations passed between stages must "
                "not depend on values, and must be whole tensors where layers are split (cut the "
                "model elsewhere with pp_split, or end a stage with a row-wise layer)."
            )

    def _run_beside(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of the ``forward`` of what runs before or after the layers."""
        current = self.current
        if current is None or current.stage == self.plan.homes[name]:
            return self._run_own(forward, args, kwargs)
        return self._shapes_of(name, forward, args, kwargs)

    def _shapes_of(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a module would; it runs once for the shapes of what it gets."""
        device = self._device
        autocast = torch.is_autocast_enabled(device.type)
        key = name, signature([args, kwargs]), autocast, self.module.training
        if key not in self._shapes:
            with only_shapes(), _kept_buffers(self.module.get_submodule(name)):
                outputs = forward(*absent(args, device), **absent(kwargs, device))
                self._shapes[key] = absent(outputs, device)
            if len(self._shapes) > SHAPES:
                self._shapes.popitem(last=False)
        return _with_gradient(self._shapes[key])

    def _run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of the ``forward`` of what contains the layers."""
        current = self.current
        if current is None:
            return self._run_stages(forward, args, kwargs)
        if current.inside or current.recomputes:
            return forward(*args, **kwargs)
        if current.seed is not None:  # each stage drops other values
            seed_local(current.seed)
        current.inside += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            current.inside -= 1
        if current.stage == self.plan.stages - 1:
            return output
        raise StageEnded

    def output_of(self, current: StagePass) -> Tensor:
        """Return what a stage sends to the next one.

        Raises:
            RuntimeError: There is nothing.
        """
        assert current.stage is not None
        output = current.output
        if output is None or not output.is_floating_point():
            last = self.plan.layers[self.plan.range_of(current.stage)[-1]]
            what = "did not run" if output is None else f"returned a tensor of {output.dtype}"
            raise RuntimeError(
                f"{last}, the last layer of stage {current.stage}, {what}, but it must return "
                "the input of the next layer, a floating point tensor (or a tuple that begins "
                "with one). Its layers run in the order of their names; see pp_split."
            )
        return output

    def close(self) -> None:
        """Give the modules back their ``forward``; layers stay on their processes."""
        while self._undo:
            self._undo.pop()()


def _received_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], received: Tensor, layer: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put what was received in the place of the first tensor that a layer gets."""
    if args and isinstance(args[0], Absent):
        return (received, *args[1:]), kwargs
    for name, value in kwargs.items():
        if not args and isinstance(value, Absent):
            return args, {**kwargs, name: received}
    raise RuntimeError(
        f"{layer}, the first layer of a stage, does not get the output of the layer before it as "
        "its first argument: start the stage at another layer."
    )


def _first_tensor(tree: Any) -> Tensor | None:
    return next((value for value in leaves(tree) if isinstance(value, Tensor)), None)


def check_known(args: Any, kwargs: Any, layer: str) -> None:
    """Check that a layer gets nothing that only other stages have.

    Raises:
        RuntimeError: It does.
    """
    if any(isinstance(value, Absent) for value in leaves([args, kwargs])):
        raise RuntimeError(
            f"{layer} needs a value from another stage of the pipeline besides the output of the "
            "layer before it, and only that output is passed between stages: let the stages "
            "begin elsewhere (pp_split), or compute the value from the batch. Caches of keys and "
            "values cannot be used (use_cache=False)."
        )


def _with_gradient(tree: Any) -> Any:
    """Return new absent tensors that require a gradient, as what layers return does."""

    def made(value: Any) -> Any:
        if not isinstance(value, Absent):
            return value
        fresh = Absent(value, value.device)
        return fresh.requires_grad_(torch.is_grad_enabled() and fresh.is_floating_point())

    return map_tree(made, tree)


@contextmanager
def _kept_buffers(module: nn.Module | None) -> Iterator[None]:
    """Put the buffers of a module back, which runs for shapes alone."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in (() if module is None else module.modules())
        for name, buffer in part.named_buffers(recurse=False)
        if not isinstance(buffer, Absent)
    ]
    try:
        yield
    finally:
        for part, name, buffer, value in before:
            buffer.copy_(value)
            part._buffers[name] = buffer


def _within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
