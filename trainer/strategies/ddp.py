"""Several processes with a copy of the module each.

`DataParallel` lets torch's ``DistributedDataParallel`` (Li et al., "PyTorch Distributed", VLDB
2020) average the gradients during backward. `Replicas` is for manual optimisation, where each
optimizer averages its own gradients when it steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Set
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.agreement import NOTHING, Agreement, Tally
from trainer.distributed.collectives import broadcast
from trainer.optim.optimizer import parameters_of
from trainer.state import PartialState
from trainer.strategies import communication
from trainer.strategies.buckets import fix_layout
from trainer.strategies.single import SingleDevice
from trainer.strategies.zeros import (
    give_nothing,
    look_up_nothing,
    no_rows,
    sparse_weights,
    zeros_for,
)

# What DDP can send with every backend.
_SENDABLE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}

_AT_AN_EPOCH = (
    "where the processes cannot be told to average other gradients than before. Add, freeze and "
    "unfreeze parameters in on_train_epoch_start, or before the training."
)


def wrap(
    module: nn.Module,
    kwargs: DistributedDataParallelKwargs | None = None,
    *,
    moves_inputs: bool = True,
) -> DistributedDataParallel:
    """Wrap a module, already on its device, for this process group.

    Buffers of types that the backend cannot send, such as int16, become rank 0's once, here. A
    communication hook is the caller's to register, see `trainer.strategies.communication`.

    Args:
        module: On its device.
        kwargs: Arguments of DDP.
        moves_inputs: DDP is to move what the module is called with to an accelerator.

    Raises:
        ValueError: The module is not on the kind of device that this process uses.
    """
    arguments = (kwargs or DistributedDataParallelKwargs()).to_kwargs()
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        # The newer name, of torch 2.13; under it buffers start alike whatever is said.
        arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers", True)
    _take_unsendable(module)
    device_ids = _device_ids(module)  # which also checks where the module is
    return DistributedDataParallel(
        module, device_ids=device_ids if moves_inputs else None, **arguments
    )


def _device_ids(module: nn.Module) -> list[int] | None:
    """The device to which DDP moves inputs; none on the CPU, or for a module on several devices."""
    expected = PartialState().device
    devices = {parameter.device for parameter in module.parameters()}
    if strangers := {device for device in devices if device.type != expected.type}:
        raise ValueError(
            f"{type(module).__name__} has parameters on {', '.join(map(str, strangers))}, but the "
            f"processes reduce gradients on {expected.type}. Leave device_placement on, or move "
            f"the model to {expected} before it is prepared."
        )
    (device, *others) = devices
    return None if others or device.index is None or device.type == "cpu" else [device.index]


def _take_unsendable(module: nn.Module) -> None:
    """Broadcast what DDP could not, and tell it to leave that alone."""
    named = chain(module.named_parameters(), module.named_buffers())
    found = {name: tensor for name, tensor in named if tensor.dtype not in _SENDABLE}
    if not found:
        return
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, sorted({*known, *found})
    )
    broadcast([tensor for name, tensor in found.items() if name not in known])


class _Stage(nn.Module):
    """What DDP wraps: calls any method of the user's module, and carries the ballot.

    The ballot is a parameter that no optimizer knows. Its "gradient" is this process's numbers,
    so that their sum comes with the gradients' own reduction.

    Attributes:
        tables: Weights of sparse embeddings that the graph is to reach in any case.
    """

    def __init__(self, module: nn.Module, ballot: Tensor) -> None:
        super().__init__()
        self.module = module
        self.ballot = nn.Parameter(torch.zeros_like(ballot))
        self.tables: list[Tensor] = []

    def forward(self, name: str | None, *args: Any) -> tuple[Any, list[Tensor]]:
        output = None if name is None else getattr(self.module, name)(*args)
        # A copy, since DDP looks for the parameters that a graph of outputs reaches.
        return output, [self.ballot.clone(), *map(look_up_nothing, self.tables)]


class DataParallel:
    """The module in every process, its gradients averaged during the last backward of a window.

    The numbers of an `Agreement` ride along, in a bucket of gradients where these are float32. With
    a communication hook, which would compress them, they have a reduction of their own.

    Args:
        module: The user's module, on its device.
        agreement: Told the sums over the processes.
        kwargs: Arguments of DDP.

    Raises:
        ValueError: There is a communication hook that torch cannot run here.
    """

    def __init__(
        self,
        module: nn.Module,
        agreement: Agreement,
        kwargs: DistributedDataParallelKwargs | None = None,
    ) -> None:
        self.module = module
        self._agreement = agreement
        self._world_size = PartialState().num_processes
        self._kwargs = kwargs
        self._saved: dict[str, Any] = {}
        self._wrap()

    def _wrap(self) -> None:
        trained = self._trained()
        hooked = self._kwargs is not None and self._kwargs.comm_hook != "no"
        dtype = self._agreement.dtype_beside(trained, self._world_size)
        if hooked and trained:  # what rides is empty, and needs no bucket of its own
            dtype = trained[0].dtype
        stage = _Stage(self.module, self._agreement.ballot(NOTHING, dtype))
        self._wrapped = {id(parameter) for parameter in trained}
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._ballot: Tensor = stage.ballot
        self._ddp = wrap(stage, self._kwargs, moves_inputs=False)  # the user's hooks have done it
        self._searches = self._ddp.find_unused_parameters
        self._tables: list[nn.Parameter] = []
        if self._searches:  # DDP fills in for what the graph does not reach, but only dense zeros
            sparse = sparse_weights(self.module)
            self._tables = [parameter for parameter in trained if id(parameter) in sparse]
            stage.tables = [*self._tables]
        else:
            self._fix_layout([stage.ballot, *reversed(trained)])
        # Not before: PowerSGD counts the iterations.
        self._hook = communication.register(self._ddp, self._kwargs)
        self._apart = None if self._hook is None else torch.zeros_like(self._ballot)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay the buckets out, in the order in which backward reaches the parameters."""
        fix_layout(self._ddp, order)

    def _backward_nothing(self, ride: Tensor, ballot: Tensor) -> None:
        """Backward through the ballot, and zero for every parameter, so that all buckets fill."""
        parameters = self._trained()
        zeros = zeros_for(self.module, parameters)
        torch.autograd.backward([*parameters, ride], [*zeros, ballot])

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by its name, through DDP's forward."""
        output, self._rides = self._ddp(name, *args)
        return output

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Say whether the coming backward ends its window, before the forward pass."""
        self._ddp.require_backward_grad_sync = sync

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch that does not end its window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """See `SingleDevice.finish_window`; without a loss the others still get their sums."""
        if self._apart is None:
            # DDP divides by the number of processes.
            ballot = self._agreement.ballot(own, self._ballot.dtype, times=self._world_size)
        else:
            ballot = self._apart
        if loss is not None:
            nothing = map(torch.zeros_like, self._rides[1:])
            torch.autograd.backward([loss, *self._rides], [None, ballot, *nothing])
        else:
            _, rides = self._ddp(None)
            if self._searches:
                torch.autograd.backward(rides, [ballot, *map(torch.zeros_like, rides[1:])])
            else:
                self._backward_nothing(rides[0], ballot)
        self._check_reduced()
        if any(p.requires_grad and p.grad is not None for p in self._frozen):
            self.refuse_unknown()
        if self._apart is None:
            assert self._ballot.grad is not None
            total = self._ballot.grad
        else:
            total = self._agreement.ballot(own)
            dist.all_reduce(total)
        self._ballot.grad = None
        items = self._agreement.count(total)
        for table in self._tables:
            if table.grad is not None and table.grad.is_sparse and not table.grad._nnz():
                table.grad = None  # as on one process: nobody has used it
        if not own.items and not items:  # to unused ones DDP has given none
            give_nothing(self.module)
        return items

    def _check_reduced(self) -> None:
        """See that DDP has not kept waiting for gradients that this loss does not have.

        Raises:
            RuntimeError: It has: nothing was averaged.
        """
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            named = list(self.module.named_parameters())
            frozen = [n for n, p in named if id(p) in self._wrapped and not p.requires_grad]
            if frozen:
                raise RuntimeError(
                    f"{', '.join(frozen)} were frozen inside an epoch, {_AT_AN_EPOCH}"
                ) from error
            unused = [n for n, p in named if p.requires_grad and p.grad is None]
            raise RuntimeError(
                f"The loss does not depend on {', '.join(unused) or 'some parameters'}, so that "
                "the gradients could not be averaged over the processes. Freeze what is not "
                "trained with requires_grad_(False), or pass Trainer(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)])."
            ) from error

    def refuse_unknown(self) -> None:
        """See that there are no gradients that DDP has not averaged.

        Raises:
            RuntimeError: There are: each process would train a parameter by itself.
        """
        names = [
            name
            for name, p in self.module.named_parameters()
            if p.requires_grad and p.grad is not None and id(p) not in self._wrapped
        ]
        if names:
            raise RuntimeError(
                f"{', '.join(names)} came, or were unfrozen, inside an epoch, {_AT_AN_EPOCH}"
            )

    def begin_epoch(self) -> None:
        """Wrap the module anew if other parameters are trained than before."""
        if {id(parameter) for parameter in self._trained()} != self._wrapped:
            self._wrap()
        if self._saved:
            if self._hook is not None:
                self._hook.load_state_dict(self._saved)
            self._saved = {}

    def state_dict(self) -> dict[str, Any]:
        """What this process's communication hook goes on from; empty for one that keeps nothing.

        Also what it was given and has not put back yet.
        """
        return self._saved or ({} if self._hook is None else self._hook.state_dict())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put it back as the next epoch begins, when it is known which parameters are trained."""
        self._saved = saved

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's, before an evaluation or a save."""
        broadcast(list(self.module.buffers()))


class Replicas(SingleDevice):
    """The module in every process, nothing averaged by itself: for manual optimisation.

    Args:
        module: The user's module, on its device; its weights become rank 0's.
        agreement: Told the sums over the processes.
    """

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        super().__init__(module, agreement)
        broadcast([*module.parameters(), *module.buffers()])

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """Sum the numbers of the window over the processes; gradients are left alone."""
        assert loss is None
        total = self._agreement.ballot(own)
        dist.all_reduce(total)
        return self._agreement.count(total)

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's, before an evaluation or a save."""
        broadcast(list(self.module.buffers()))


def average_gradients(optimizer: Optimizer, sparse: Set[int] = frozenset()) -> None:
    """Average an optimizer's gradients over the processes; see `average_gradients_of`."""
    average_gradients_of(parameters_of([optimizer]), sparse)


def average_gradients_of(
    parameters: Iterable[nn.Parameter], sparse: Set[int] = frozenset()
) -> None:
    """Average the gradients of parameters over the processes.

    A parameter without a gradient on some processes counts as zero there; one without a gradient
    anywhere keeps having none. How many have one travels behind the gradients themselves, and is
    read back only where one is missing.

    Args:
        parameters: In the same order on all processes.
        sparse: The ids of those that may have sparse gradients, see `sparse_weights`: of what
            gradient the others have, each process has to be told.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tables = [parameter for parameter in trained if id(parameter) in sparse]
    layouts = dict(zip(map(id, tables), _layouts(tables), strict=True))
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained:
        layout = layouts.get(id(parameter), _layout(parameter) or _DENSE)
        if layout == _ROWS:
            _average_rows(parameter)
        elif layout == _DENSE:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_type.values():
        _average_alike(alike)


_NO_GRADIENT, _ROWS, _DENSE = range(3)  # what a gradient of some processes is, the most counts


def _layout(parameter: nn.Parameter) -> int:
    gradient = parameter.grad
    return _NO_GRADIENT if gradient is None else _ROWS if gradient.is_sparse else _DENSE


def _layouts(tables: list[nn.Parameter]) -> list[int]:
    """What the gradient of each is, for all processes: dense where it is that on one of them."""
    if not tables:
        return []
    layouts = torch.tensor(list(map(_layout, tables)), device=tables[0].device)
    dist.all_reduce(layouts, dist.ReduceOp.MAX)
    return layouts.tolist()


def _average_rows(parameter: nn.Parameter) -> None:
    """Average a gradient that is sparse wherever there is one."""
    total = no_rows(parameter) if parameter.grad is None else parameter.grad.coalesce()
    dist.all_reduce(total)
    parameter.grad = total / dist.get_world_size()


def _average_alike(parameters: list[nn.Parameter]) -> None:
    """Average gradients of one type, all at once; they are dense behind it."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:  # on another process it is not
            parameter.grad = parameter.grad.to_dense()
    present = [parameter.grad is not None for parameter in parameters]
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    # Not made on an accelerator at once: that would wait for it.
    counts = torch.tensor(present, dtype=parts[0].dtype).to(parts[0].device, non_blocking=True)
    flat = _flatten_dense_tensors([*parts, counts])
    dist.all_reduce(flat)
    means = _unflatten_dense_tensors(flat[: -len(present)] / dist.get_world_size(), parts)
    anywhere = present if all(present) else flat[-len(present) :].tolist()
    for parameter, mean, used in zip(parameters, means, anywhere, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(mean)
        elif used:
            parameter.grad = mean.clone()
