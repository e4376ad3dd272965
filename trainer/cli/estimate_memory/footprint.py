"""The memory that training a module needs, computed without allocating it.

The module is created on the meta device, where tensors have shapes and dtypes, but no data. The
division over several processes follows ZeRO (Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5): each of N processes
keeps 1/N of the optimizer's state (stage 1 and above), of the gradients (stage 2 and above) and of
the parameters (stage 3), and all of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.big_models import CustomDtype, compute_module_sizes, named_module_tensors
from trainer.big_models.device_map import maximum_sizes
from trainer.cli.parsing import CommandError
from trainer.fp8 import convert_model_to_fp8_ao
from trainer.tree import is_sharded

# name: (dtype of the weights, dtype of autocast); None for no conversion, no autocast
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "no": (None, None),
    "fp16": (None, torch.float16),
    "bf16": (None, torch.bfloat16),
    "fp8": (None, torch.bfloat16),  # its layers are converted by `in_precision`
    "pure-bf16": (torch.bfloat16, None),
}


# name: the type of all floating tensors; int8 and int4 without the scales of a quantiser
DTYPES: dict[str, torch.dtype | CustomDtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": CustomDtype.FP8,
    "int8": torch.int8,
    "int4": CustomDtype.INT4,
}


@dataclass(frozen=True, kw_only=True)
class Input:
    """One argument of a module's ``forward``.

    Attributes:
        shape: The shape of one sample.
        dtype: Its dtype.
        name: The name of a keyword argument; None for a positional one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one process.

    Attributes:
        parameters: Each counted once, however many names it has.
        gradients: The gradients of the trained parameters.
        optimizer: The optimizer's state after a step.
        buffers: Each counted once; every process keeps all of them.
        gathered: Sharded parameters while they are gathered for a pass; see
            `trainer.cli.estimate_memory.sharding`.
        activations: Tensors that the forward pass keeps for the backward pass; None without an
            input.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int = 0
    activations: int | None = None

    @property
    def total(self) -> int:
        """The sum of all known values."""
        return sum(value for value in vars(self).values() if value is not None)

    def sharded(self, stage: int, processes: int) -> Footprint:
        """Return the footprint of one of several processes with ZeRO, by stage from 1 to 3."""
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
    """Return the memory that training a module needs on one process.

    Args:
        make: Creates the module; called with the meta device as the default.
        precision: A key of `PRECISIONS`.
        make_optimizer: Creates an optimizer of a list of parameters.
        inputs: The arguments of ``forward``; without any, activations are unknown.
        batch: Samples in each input.

    Raises:
        CommandError: The optimizer rejects the parameters, or cannot step on them.
        Exception: Any error of the module, for example if it reads a tensor's value.
    """
    weights, computed = PRECISIONS[precision]
    module = in_precision(make, precision)
    activations = None
    if inputs:
        activations = _kept_without_data(module, inputs, batch, weights, computed)
    trained = [p for p in module.parameters() if p.requires_grad]
    return Footprint(
        parameters=bytes_of(module.parameters()),
        gradients=bytes_of(trained),
        optimizer=optimizer_state(trained, make_optimizer),
        buffers=bytes_of(module.buffers()),
        activations=activations,
    )


def in_precision(make: Callable[[], nn.Module], precision: str) -> nn.Module:
    """Return a module on the meta device, in training mode, converted to a key of `PRECISIONS`."""
    with torch.device("meta"):
        module = make().to(PRECISIONS[precision][0]).train()
    if precision == "fp8":
        if find_spec("torchao") is None:
            raise CommandError("fp8 needs torchao: pip install 'cadence-trainer[fp8]'.")
        from torchao.float8 import Float8LinearConfig

        convert_model_to_fp8_ao(module, Float8LinearConfig(emulate=True))
    return module


def weights_in(make: Callable[[], nn.Module], dtype: str) -> tuple[int, int]:
    """Return the bytes of a module and of its largest layer, with floating tensors in a dtype.

    Args:
        make: Creates the module; called with the meta device as the default.
        dtype: A key of `DTYPES`.
    """
    with torch.device("meta"):
        module = make()
    tensors = named_module_tensors(module, recurse=True)
    special = {name: DTYPES[dtype] for name, tensor in tensors if tensor.is_floating_point()}
    sizes = compute_module_sizes(module, special_dtypes=special)
    total, (layer, _) = maximum_sizes(module, sizes)
    return total, layer


def count(make: Callable[[], nn.Module]) -> tuple[int, int, int]:
    """Return the numbers of elements in parameters, in trained parameters and in buffers."""
    with torch.device("meta"):
        module = make()
    parameters = list(module.parameters())
    return (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(b.numel() for b in module.buffers()),
    )


def _kept_without_data(
    module: nn.Module,
    inputs: Sequence[Input],
    batch: int,
    weights: torch.dtype | None,
    computed: torch.dtype | None,
) -> int:
    """Return what `kept_for_backward` returns, for a module on the meta device.

    It runs on fake CPU tensors, since meta tensors use other attention kernels, which keep the
    whole attention matrix.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

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
        arguments, keywords = arguments_of(inputs, batch, weights)
        run = partial(torch.func.functional_call, module, state, tuple(arguments), keywords)
        return kept_for_backward(run, state.values, computed)


def arguments_of(
    inputs: Sequence[Input], batch: int, weights: torch.dtype | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the positional and the named arguments of ``forward``."""
    positional, named = [], {}
    for each in inputs:
        dtype = weights if weights and each.dtype.is_floating_point else each.dtype
        tensor = torch.zeros((batch, *each.shape), dtype=dtype)
        if each.name is None:
            positional.append(tensor)
        else:
            named[each.name] = tensor
    return positional, named


def kept_for_backward(
    forward: Callable[[], object],
    held: Callable[[], Iterable[torch.Tensor]],
    computed: torch.dtype | None,
) -> int:
    """Return the bytes that a forward pass keeps for backward, except for those of `held`.

    oneDNN is disabled, since fake tensors cannot count the memory that its LSTM keeps.

    Args:
        forward: The forward pass.
        held: Returns the parameters and buffers afterwards.
        computed: The dtype of autocast; None for none.
    """
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no two share an address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            storage = _local(tensor).untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    casting = torch.autocast("cpu", computed) if computed else nullcontext()
    with (
        casting,
        _without_onednn(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        forward()
    own = {_local(tensor).untyped_storage()._cdata for tensor in held()}
    # The storages of gathered parameters that were released have no bytes.
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


@contextmanager
def _without_onednn() -> Iterator[None]:
    # Not `flags`, which sets all of them and warns about one.
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def optimizer_state(
    parameters: list[nn.Parameter],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    prepare: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None,
) -> int:
    """Return the bytes of an optimizer's state after a step, which is simulated without data.

    Args:
        parameters: Tensors without data: of the meta device, or fake.
        make_optimizer: Creates the optimizer.
        prepare: The engine's preparation of the optimizer.

    Raises:
        CommandError: The optimizer rejects the parameters, or cannot step on them.
    """
    if not parameters:
        return 0
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer = make_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        if prepare is not None:
            optimizer = prepare(optimizer)
        with _AnyValue():  # type: ignore[no-untyped-call]  # torch leaves its base untyped
            optimizer.step()
    except Exception as error:
        raise CommandError(
            f"The optimizer cannot be measured: {type(error).__name__}: {error}\n"
            "It takes one step, on dense gradients of all trained parameters. Pass its arguments "
            "as --optimizer-init NAME=VALUE, or choose another with --optimizer."
        ) from error
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return bytes_of(value for value in tensors if isinstance(value, torch.Tensor))


class _AnyValue(TorchDispatchMode):
    """In this mode, reading the value of a tensor without data returns 1.

    Some optimizers read the norm of a parameter, or their own count of steps: these affect the size
    of the step, not the size of the state.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process's parts of tensors."""
    return sum(part.numel() * part.element_size() for part in map(_local, tensors))


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part
