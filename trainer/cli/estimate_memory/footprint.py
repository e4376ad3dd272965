"""The memory that the training of a module takes, found without having it.

The module is made on the meta device, where tensors have shapes and types, but no data. The parts
over several processes follow ZeRO (Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5): of N processes each
keeps an N-th of the optimizer's state (stage 1), of the gradients too (stage 2), of the parameters
too (stage 3); the first of these is what a process would keep alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.cli.parsing import CommandError

# name: (what the weights are converted to, what autocast computes in), None for as they are
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "no": (None, None),
    "fp16": (None, torch.float16),
    "bf16": (None, torch.bfloat16),
    "pure-bf16": (torch.bfloat16, None),
}


@dataclass(frozen=True, kw_only=True)
class Input:
    """One argument of a module's ``forward``.

    Attributes:
        shape: Of one sample.
        dtype: Its type.
        name: For an argument by name; None for one by position.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one process.

    Attributes:
        parameters: Each once, whatever number of names it has.
        gradients: Of the parameters that are trained.
        optimizer: Its state after a step.
        buffers: Like the parameters; every process keeps them whole.
        activations: What the forward pass keeps for the backward pass; None where no input is
            known.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None = None

    @property
    def total(self) -> int:
        """Of all that is known."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buffers
            + (self.activations or 0)
        )

    def sharded(self, stage: int, processes: int) -> Footprint:
        """The part of one of several processes, by a stage of ZeRO from 1 to 3."""
        return replace(
            self,
            optimizer=-(-self.optimizer // processes),
            gradients=-(-self.gradients // processes) if stage >= 2 else self.gradients,
            parameters=-(-self.parameters // processes) if stage >= 3 else self.parameters,
        )


def measure(
    make: Callable[[], nn.Module],
    *,
    precision: str,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    inputs: Sequence[Input] = (),
    batch: int = 1,
) -> Footprint:
    """What the training of a module takes on one process.

    Args:
        make: Makes the module; called where new tensors have no data.
        precision: A key of `PRECISIONS`.
        make_optimizer: Makes the optimizer of some parameters.
        inputs: Of ``forward``; without any the activations stay unknown.
        batch: Samples in each input.

    Raises:
        CommandError: The optimizer does not take the parameters, or cannot make a step on them.
        Exception: What the module raises, such as where it reads a tensor's value.
    """
    weights, computed = PRECISIONS[precision]
    with torch.device("meta"):
        module = make().to(weights).train()
    activations = None
    if inputs:
        activations = _kept_for_backward(module, inputs, batch, weights, computed)
    trained = [p for p in module.parameters() if p.requires_grad]
    return Footprint(
        parameters=_bytes(module.parameters()),
        gradients=_bytes(trained),
        optimizer=_optimizer_state(trained, make_optimizer),
        buffers=_bytes(module.buffers()),
        activations=activations,
    )


def count(make: Callable[[], nn.Module]) -> tuple[int, int, int]:
    """The numbers of parameters, of those that are trained, and of elements of buffers."""
    with torch.device("meta"):
        module = make()
    parameters = list(module.parameters())
    return (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(b.numel() for b in module.buffers()),
    )


def _kept_for_backward(
    module: nn.Module,
    inputs: Sequence[Input],
    batch: int,
    weights: torch.dtype | None,
    computed: torch.dtype | None,
) -> int:
    """The bytes that a forward pass keeps and that are no parameter's or buffer's.

    It runs on fake tensors of the CPU, since those of the meta device take other kernels: there
    attention would keep its whole matrix. oneDNN's stay out of it: what its LSTM keeps is not known
    to fake tensors, and they would count nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no two have the same address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with FakeTensorMode():
        state = {
            name: torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
            )
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
        }
        positional, named = _batch_of(inputs, batch, weights)
        casting = torch.autocast("cpu", computed) if computed else nullcontext()
        with (
            casting,
            _without_onednn(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            torch.func.functional_call(module, state, tuple(positional), named)
        own = {tensor.untyped_storage()._cdata for tensor in state.values()}
        return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


@contextmanager
def _without_onednn() -> Iterator[None]:
    # Not `flags`: that sets all of them, and warns of one.
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def _batch_of(
    inputs: Sequence[Input], batch: int, weights: torch.dtype | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    positional, named = [], {}
    for each in inputs:
        dtype = weights if weights and each.dtype.is_floating_point else each.dtype
        tensor = torch.zeros((batch, *each.shape), dtype=dtype)
        if each.name is None:
            positional.append(tensor)
        else:
            named[each.name] = tensor
    return positional, named


def _optimizer_state(
    parameters: list[nn.Parameter],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> int:
    """The bytes of an optimizer's state after a step, which costs nothing on the meta device."""
    if not parameters:
        return 0
    for each in parameters:
        each.grad = torch.empty_like(each)
    try:
        optimizer = make_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        with _AnyValue():  # type: ignore[no-untyped-call]  # torch leaves its base untyped
            optimizer.step()
    except Exception as error:
        raise CommandError(
            f"The optimizer cannot be measured: {type(error).__name__}: {error}\n"
            "It makes one step, on dense gradients of all parameters that are trained. Pass what "
            "it needs as --optimizer-init NAME=VALUE, or name another by --optimizer: one of "
            "torch.optim, or MODULE:NAME, a class or a function that makes an optimizer of a list "
            "of parameters."
        ) from error
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes(value for value in tensors if isinstance(value, torch.Tensor))


class _AnyValue(TorchDispatchMode):
    """Inside, a value that is read of a tensor without data is 1.

    Some optimizers read the norm of a parameter, or their own count of steps; that says how far a
    step goes, not how large their state is.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
