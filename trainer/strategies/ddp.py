"""Data-parallel engines: every process has a replica of the module.

`DataParallel` uses torch's ``DistributedDataParallel`` (DDP; Li et al., "PyTorch Distributed", VLDB
2020), which all-reduces the gradients during backward. `Replicas` is for manual optimisation, where
each optimizer all-reduces its own gradients when it steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.agreement import NOTHING, Agreement, Tally
from trainer.distributed.collectives import broadcast
from trainer.distributed.transport import sum_numbers
from trainer.names import bare_names
from trainer.state import PartialState
from trainer.strategies import communication
from trainer.strategies.buckets import fix_layout
from trainer.strategies.exchange import exchange_if_few
from trainer.strategies.single import SingleDevice
from trainer.strategies.zeros import (
    give_nothing,
    look_up_nothing,
    sparse_weights,
    tied_sparse_weights,
    zeros_for,
)

_SENT_AT_ONCE = 250 * 2**20  # bytes in one broadcast, as in DDP
# The dtypes that DDP can broadcast and reduce with every backend.
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
    "where the set of gradients that the processes average cannot change. Add, freeze and "
    "unfreeze parameters in on_train_epoch_start, or before the training."
)


def wrap(
    module: nn.Module,
    kwargs: DistributedDataParallelKwargs | None = None,
    *,
    moves_inputs: bool = True,
) -> DistributedDataParallel:
    """Wrap a module in DDP.

    Tensors whose dtype DDP cannot send with every backend, such as int16, are broadcast once, here.
    The caller registers the communication hook; see `trainer.strategies.communication`.

    Args:
        module: The module, on its device.
        kwargs: Arguments of DDP.
        moves_inputs: Whether DDP moves the inputs of the forward pass to the accelerator.

    Raises:
        ValueError: The module is not on the kind of device that this process uses.
    """
    arguments = (kwargs or DistributedDataParallelKwargs()).to_kwargs()
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        # torch 2.13 has renamed this argument; it broadcasts buffers once at the start anyway.
        arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers", True)
    _take_unsendable(module)
    device_ids = _device_ids(module)  # also checks the module's device
    return DistributedDataParallel(
        module, device_ids=device_ids if moves_inputs else None, **arguments
    )


def _device_ids(module: nn.Module) -> list[int] | None:
    """Return the device to which DDP moves inputs; None on the CPU or with several devices.

    Raises:
        ValueError: A parameter is not on the kind of device that this process uses.
    """
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
    """Broadcast the tensors whose dtype DDP cannot send, and make DDP ignore them."""
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
    """The module that DDP wraps: calls any method of the user's module, and holds the sync vector.

    The sync vector `ballot` is a parameter that belongs to no optimizer. Its "gradient" holds this
    process's step stats, so the all-reduce of the gradients sums the step stats too.

    Attributes:
        searched: Whether DDP searches the graph of the outputs for unused parameters.
        tables: Weights of sparse embeddings, which are always added to the graph.
    """

    def __init__(self, module: nn.Module, ballot: Tensor) -> None:
        super().__init__()
        # Registered before the module: DDP expects sparse or dense gradients of a weight by the
        # first submodule that has it.
        self.tied = nn.ParameterList(tied_sparse_weights(module))
        self.module = module
        self.ballot = nn.Parameter(torch.zeros_like(ballot))
        self.searched = False
        self.tables: list[Tensor] = []

    def forward(self, name: str | None, *args: Any) -> tuple[Any, list[Tensor]]:
        output = None if name is None else getattr(self.module, name)(*args)
        ballot = self.ballot.clone() if self.searched else self.ballot  # a leaf has no graph
        return output, [ballot, *map(look_up_nothing, self.tables)]


class DataParallel:
    """Engine on DDP: gradients are averaged in the last backward of an accumulation window.

    The sync vector of the step sync (`Agreement`) is reduced together with the gradients, in the
    same bucket if that is float32. A communication hook would compress the sync vector, so with a
    hook it has its own all-reduce.

    Args:
        module: The user's module, on its device.
        agreement: The step sync, which receives the sums over the processes.
        kwargs: Arguments of DDP. The default is ``gradient_as_bucket_view=True``, which saves a
            copy of the reduced gradients.

    Raises:
        ValueError: torch cannot run the communication hook here.
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
        self._kwargs = kwargs or DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        self._saved: dict[str, Any] = {}
        self._wrap()

    def _wrap(self) -> None:
        trained = self._trained()
        hooked = self._kwargs.comm_hook != "no"
        dtype = self._agreement.dtype_beside(trained, self._world_size)
        # With a hook, the sync vector in DDP is unused. Give it the gradients' dtype, so that it
        # does not need a bucket of its own.
        if hooked and trained:
            dtype = trained[0].dtype
        stage = _Stage(self.module, self._agreement.ballot(NOTHING, dtype))
        self._wrapped = {id(parameter) for parameter in trained}
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._ballot: Tensor = stage.ballot
        # The loop's transfer hooks move the inputs.
        self._ddp = wrap(stage, self._kwargs, moves_inputs=False)
        self._searches = stage.searched = self._ddp.find_unused_parameters
        self._tables: list[nn.Parameter] = []
        # For parameters that the graph does not reach, DDP reduces zeros, which are always dense.
        # So the weights of sparse embeddings are added to every graph.
        if self._searches:
            sparse = sparse_weights(self.module)
            self._tables = [parameter for parameter in trained if id(parameter) in sparse]
            stage.tables = [*self._tables]
        else:
            self._fix_layout([stage.ballot, *reversed(trained)])
        # After fixing the layout, which takes an iteration that PowerSGD would count.
        self._hook = communication.register(self._ddp, self._kwargs)
        self._apart = None if self._hook is None else torch.zeros_like(self._ballot)
        if self._hook is None:
            exchange_if_few(self._ddp, self.module)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay out DDP's buckets in the order in which backward reaches the parameters."""
        fix_layout(self._ddp, order)

    def _backward_nothing(self, ride: Tensor, ballot: Tensor) -> None:
        """Run backward with zero gradients and this sync vector, so that all buckets are filled."""
        parameters = self._trained()
        zeros = zeros_for(self.module, parameters)
        torch.autograd.backward([*parameters, ride], [*zeros, ballot])

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name, through DDP's forward."""
        output, self._rides = self._ddp(name, *args)
        return output

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Set, before the forward pass, whether the next backward ends the accumulation window."""
        if self._ddp.require_backward_grad_sync is not sync:  # setting attributes of it is slow
            self._ddp.require_backward_grad_sync = sync

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a micro-batch that is not the last of its accumulation window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """See `SingleDevice.finish_window`; a process without a loss contributes zero gradients."""
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
            sum_numbers(total)
        self._ballot.grad = None
        items = self._agreement.count(total)
        for table in self._tables:
            if table.grad is not None and table.grad.is_sparse and not table.grad._nnz():
                table.grad = None  # unused on all processes: no gradient, as with one process
        if not own.items and not items:  # DDP gives unused parameters no gradient
            give_nothing(self.module)
        return items

    def _check_reduced(self) -> None:
        """Check that DDP has reduced all buckets, and does not wait for missing gradients.

        Raises:
            RuntimeError: The loss does not depend on some parameters, so DDP waits for their
                gradients and has averaged nothing.
        """
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            named = list(bare_names(self.module, self.module.named_parameters()))
            frozen = [n for n, p in named if id(p) in self._wrapped and not p.requires_grad]
            if frozen:
                raise RuntimeError(
                    f"{', '.join(frozen)} were frozen inside an epoch, {_AT_AN_EPOCH}"
                ) from error
            unused = [n for n, p in named if p.requires_grad and p.grad is None]
            raise RuntimeError(
                f"The loss does not depend on {', '.join(unused) or 'some parameters'}, so "
                "the gradients could not be averaged over the processes. Freeze what is not "
                "trained with requires_grad_(False), or pass Trainer(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)])."
            ) from error

    def refuse_unknown(self) -> None:
        """Check that DDP has averaged all gradients (no unregistered parameters).

        Raises:
            RuntimeError: Parameters were added or unfrozen after the module was wrapped. Their
                gradients are not averaged, so the processes would diverge.
        """
        unknown = [
            (name, p)
            for name, p in self.module.named_parameters()
            if p.requires_grad and p.grad is not None and id(p) not in self._wrapped
        ]
        if unknown:
            names = dict(bare_names(self.module, unknown))
            raise RuntimeError(
                f"{', '.join(names)} were added or unfrozen inside an epoch, {_AT_AN_EPOCH}"
            )

    def begin_epoch(self) -> None:
        """Wrap the module again if the set of trained parameters has changed."""
        if {id(parameter) for parameter in self._trained()} != self._wrapped:
            self._wrap()
        if self._saved:
            if self._hook is not None:
                self._hook.load_state_dict(self._saved)
            self._saved = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's communication hook, if it has one.

        A loaded state that waits for the next epoch is returned unchanged.
        """
        state = self._saved or ({} if self._hook is None else self._hook.state_dict())
        return {"communication": state}

    def close(self) -> None:
        """Remove DDP's hooks from the parameters.

        After a failed backward, the hooks would still wait for the missing gradients.
        """
        self._ddp._remove_autograd_hooks()

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take the states that all ranks saved; they are restored when the next epoch begins.

        Only then are the trained parameters known.
        """
        hooks = [rank.get("communication", {}) for rank in saved]
        self._saved = communication.for_processes(hooks, dist.get_rank(), self._world_size)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes, before an evaluation or a save."""
        broadcast(list(self.module.buffers()))


class Replicas(SingleDevice):
    """Engine for manual optimisation on several processes: gradients are not averaged in backward.

    Args:
        module: The user's module, on its device; rank 0's weights are broadcast to all.
        agreement: The step sync, which receives the sums over the processes.
        sends_buffers: Whether to broadcast rank 0's buffers before each `training_step`, as DDP
            does before each forward.
    """

    def __init__(
        self, module: nn.Module, agreement: Agreement, *, sends_buffers: bool = True
    ) -> None:
        super().__init__(module, agreement)
        self._sends_buffers = sends_buffers
        broadcast([*module.parameters(), *module.buffers()])

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name; ``training_step`` on all processes."""
        if name == "training_step" and self._sends_buffers:
            # Otherwise saving, which broadcasts rank 0's buffers, would change the training.
            self._send_buffers()
        return super().step(name, *args)

    def _send_buffers(self) -> None:
        """Broadcast rank 0's buffers coalesced, as DDP does: this is faster than one by one."""
        from torch._C._distributed_c10d import _broadcast_coalesced  # not in all builds of torch

        joined = [each for each in self.module.buffers() if each.dtype in _SENDABLE]
        if joined:
            group = dist.distributed_c10d._get_default_group()
            _broadcast_coalesced(group, joined, _SENT_AT_ONCE, 0)
        if others := [each for each in self.module.buffers() if each.dtype not in _SENDABLE]:
            broadcast(others)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """All-reduce the step stats of the window; gradients are not changed."""
        assert loss is None
        total = self._agreement.ballot(own)
        sum_numbers(total)
        return self._agreement.count(total)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes, before an evaluation or a save."""
        broadcast(list(self.module.buffers()))
