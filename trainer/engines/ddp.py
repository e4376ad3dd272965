"""Data-parallel engines: every process has a replica of the module.

`DataParallel` uses torch's ``DistributedDataParallel`` (DDP; Li et al., "PyTorch Distributed", VLDB
2020), which all-reduces the gradients during backward. `Replicas` is for manual optimisation, where
each optimizer all-reduces its own gradients when it steps.

`StaticDataParallel` is for a module whose autograd graph is the same in every update.
`fix_layout` fixes the order in which DDP reduces gradients: the layout of its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import all_gather_object
from trainer.distributed.step_sync import NOTHING, StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines import comm_hooks
from trainer.engines.averaging import (
    add_zeros,
    average_gradients,
    average_gradients_of,
    give_nothing,
    look_up_nothing,
    sparse_weights,
    tied_sparse_weights,
    zeros_for,
)
from trainer.engines.base import EngineOptions
from trainer.engines.compile import uncompiled
from trainer.engines.exchange import exchange_if_few
from trainer.engines.lockstep import has_sync_batch_norm
from trainer.engines.single import SingleDevice
from trainer.names import bare_names
from trainer.state import PartialState
from trainer.torch_compat import ddp_arguments


def fix_layout(
    wrapped: DistributedDataParallel,
    order: Sequence[nn.Parameter] | None = None,
    times: Sequence[int] | None = None,
) -> None:
    """Make DDP rebuild its buckets now, with zero gradients; a collective call.

    By itself, DDP rebuilds its buckets once, after the first backward, in the order in which the
    gradients arrived. With three or more processes, another layout means another order of
    summation. A resumed run would then sum in a different order than the original run, and
    differ in the last bits. The order must still be that of backward: a bucket is all-reduced when
    its last gradient is ready, and with another order the all-reduce would not overlap with
    backward.

    DDP rebuilds its buckets by itself in three cases: to find unused parameters, with a static
    graph that is not known yet, and if parameters are updated in backward. Existing gradients are
    kept. Parameter hooks are not called, because they may update the parameter, as those of LOMO
    do.

    Args:
        wrapped: The model in DDP, without a communication hook (a hook would count an iteration).
        order: All parameters that DDP reduces, in the order of backward; by default the module's
            trained parameters, reversed.
        times: How often backward accumulates into each of these parameters, if a static graph is
            known; DDP learns the graph from this.
    """
    if wrapped.find_unused_parameters or (wrapped.static_graph and times is None):
        return
    ignored = wrapped.parameters_to_ignore
    named = [(n, p) for n, p in wrapped.module.named_parameters() if p.requires_grad]
    trained = order or [parameter for name, parameter in reversed(named) if name not in ignored]
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained):
        return
    held = [(p.grad, p._backward_hooks, p._post_accumulate_grad_hooks) for p in trained]
    values = [None if p.grad is None else p.grad.clone() for p in trained]  # may be in a bucket
    try:
        for parameter in trained:
            parameter._backward_hooks = parameter._post_accumulate_grad_hooks = {}
        if times is not None:
            _backward_of_zeros(wrapped, trained, times)
            # DDP's forward would do this itself, after the first backward.
            wrapped.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # in no stub
            wrapped._static_graph_delay_allreduce_enqueued = True
        _backward_of_zeros(wrapped, trained, times or [1] * len(trained))
        wrapped.reducer._rebuild_buckets()
    finally:
        for parameter, (gradient, hooks, later), value in zip(trained, held, values, strict=True):
            parameter.grad = None if gradient is None or value is None else gradient.copy_(value)
            parameter._backward_hooks = hooks
            parameter._post_accumulate_grad_hooks = later


def _backward_of_zeros(
    wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter], times: Sequence[int]
) -> None:
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    for parameter in parameters:
        parameter.grad = None
    add_zeros(wrapped.module, parameters, times)


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
    The caller registers the communication hook; see `trainer.engines.comm_hooks`.

    Args:
        module: The module, on its device.
        kwargs: Arguments of DDP.
        moves_inputs: Whether DDP moves the inputs of the forward pass to the accelerator.

    Raises:
        ValueError: The module is not on the kind of device that this process uses.
    """
    arguments = ddp_arguments((kwargs or DistributedDataParallelKwargs()).to_kwargs())
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
    if elsewhere := {device for device in devices if device.type != expected.type}:
        raise ValueError(
            f"{type(module).__name__} has parameters on {', '.join(map(str, elsewhere))}, but the "
            f"processes reduce gradients on {expected.type}. Leave device_placement on, or move "
            f"the model to {expected} before it is prepared."
        )
    (device, *others) = devices
    return None if others or device.index is None or device.type == "cpu" else [device.index]


def _take_unsendable(module: nn.Module) -> None:
    """Broadcast the tensors whose dtype DDP cannot send, and make DDP ignore them."""
    named = chain(module.named_parameters(), module.named_buffers())
    unsendable = {name: tensor for name, tensor in named if tensor.dtype not in _SENDABLE}
    if not unsendable:
        return
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, sorted({*ignored, *unsendable})
    )
    broadcast([tensor for name, tensor in unsendable.items() if name not in ignored])


class _DDPRoot(nn.Module):
    """The module that DDP wraps: calls any method of the user's module, and holds the sync vector.

    The sync vector `sync_vector` is a parameter that belongs to no optimizer. Its "gradient" holds
    this process's step stats, so the all-reduce of the gradients sums the step stats too.

    Attributes:
        searched: Whether DDP searches the graph of the outputs for unused parameters.
        tables: Weights of sparse embeddings, which are always added to the graph.
    """

    def __init__(self, module: nn.Module, sync_vector: Tensor) -> None:
        super().__init__()
        # Registered before the module: DDP expects sparse or dense gradients of a weight by the
        # first submodule that has it.
        self.tied = nn.ParameterList(tied_sparse_weights(module))
        self.module = module
        self.sync_vector = nn.Parameter(torch.zeros_like(sync_vector))
        self.searched = False
        self.tables: list[Tensor] = []

    def forward(self, name: str | None, *args: Any) -> tuple[Any, list[Tensor]]:
        output = None if name is None else getattr(self.module, name)(*args)
        # Cloned where DDP searches the graph: a leaf has none.
        sync_vector = self.sync_vector.clone() if self.searched else self.sync_vector
        return output, [sync_vector, *map(look_up_nothing, self.tables)]


class Replicas(SingleDevice):
    """Engine of several processes that each have a replica of the module.

    A module of a loop of your own is wrapped in DDP. In a fit, this engine is for manual
    optimisation: gradients are not averaged in backward, but when an optimizer steps.
    """

    _source = 0  # the process whose buffers are everybody's
    _begins_window = False  # whether the next micro-batch does; not set for the first one

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._kwargs = options.ddp_kwargs
        self._sends_buffers = self._kwargs is None or self._kwargs.broadcast_buffers
        # Parameters that DDP does not reduce, since they were frozen when it was made.
        self._frozen: list[nn.Parameter] = []

    # -- the models of a loop of your own ----------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Wrap a module that has trained parameters in DDP, unless it is already."""
        super().prepare_module(module, device=device)
        if evaluation_mode:
            return module
        parameters = list(module.parameters())
        self._frozen += [parameter for parameter in parameters if not parameter.requires_grad]
        if find_ddp(module) is not None or not any(
            parameter.requires_grad for parameter in parameters
        ):
            return module
        wrapped = wrap(module, self._kwargs)
        vars(wrapped)[_HOOK] = _register(wrapped, self._kwargs)
        return wrapped

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Disable DDP's all-reduce in forward and backward passes.

        With ``static_graph`` the first backward of a process is reduced nevertheless, since DDP
        learns the graph from it; the sum is the same up to rounding.
        """
        wrapped = find_ddp(module)
        if wrapped is None:
            return super().no_sync(module)
        if wrapped.static_graph and not wrapped._static_graph_delay_allreduce_enqueued:
            return nullcontext()
        return wrapped.no_sync()

    @contextmanager
    def trigger_sync(self, module: nn.Module) -> Iterator[None]:
        """Make backward all-reduce gradients even though the forward passes were under `no_sync`.

        All accumulated gradients are averaged, normally during the backward in the block. With
        ``find_unused_parameters`` or ``static_graph``, DDP would have to know the forward pass, so
        the gradients are averaged when the block ends.

        Args:
            module: The model as prepared. The block may contain one backward.
        """
        wrapped = find_ddp(module)
        if wrapped is None:
            yield
        elif wrapped.find_unused_parameters or wrapped.static_graph:
            yield
            average_gradients_of(wrapped.parameters(), sparse_weights(wrapped))
        else:
            before = wrapped.require_backward_grad_sync
            wrapped.require_backward_grad_sync = True
            # The next forward must broadcast rank 0's buffers, as after any update.
            wrapped.require_forward_param_sync = True
            wrapped.reducer.prepare_for_backward([])
            try:
                yield
            finally:
                wrapped.require_backward_grad_sync = before

    def check_unknown_parameters(self) -> None:
        """Check that no parameter was unfrozen after its module was prepared.

        Raises:
            RuntimeError: Some were, and the processes would not average their gradients.
        """
        count = sum(parameter.requires_grad for parameter in self._frozen)
        if count:
            raise RuntimeError(
                f"{count} parameter(s) that required no gradients when their model was prepared "
                f"do now, but the {self.parallel.dp_size} processes would not average their "
                "gradients. Unfreeze them before prepare; or prepare a model that is not trained "
                "here with prepare_model(model, evaluation_mode=True)."
            )

    # -- the steps of a fit ------------------------------------------------------------------------

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Broadcast rank 0's weights; optimizers average their gradients when they step.

        Raises:
            ValueError: A communication hook is requested, which needs DDP's own all-reduce.
        """
        if step_sync is not None and self._kwargs is not None and self._kwargs.comm_hook != "no":
            raise ValueError(
                f"DistributedDataParallelKwargs(comm_hook={self._kwargs.comm_hook.value!r}) cannot "
                "be used in manual optimisation, where each optimizer averages its own gradients, "
                "uncompressed, when it steps. Leave it out."
            )
        super().start(module, step_sync)
        self.gradients.average = partial(average_gradients, sparse=sparse_weights(module))
        broadcast([*module.parameters(), *module.buffers()])

    # ARG002: an interface
    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:  # noqa: ARG002
        """Broadcast the buffers once a window, so that a save, which does too, changes nothing."""
        if self._begins_window and self._sends_buffers:
            self._send_buffers()
        self._begins_window, self._source = sync, source

    def _send_buffers(self) -> None:
        """Broadcast buffers coalesced, as DDP does: this is faster than one by one."""
        from torch._C._distributed_c10d import _broadcast_coalesced  # not in all builds of torch

        joined = [buffer for buffer in self.module.buffers() if buffer.dtype in _SENDABLE]
        if joined:
            group = dist.distributed_c10d._get_default_group()
            _broadcast_coalesced(group, joined, _SENT_AT_ONCE, self._source)
        if others := [buffer for buffer in self.module.buffers() if buffer.dtype not in _SENDABLE]:
            broadcast(others, self._source)

    def broadcast_buffers(self) -> None:
        """Broadcast one process's buffers to all, before an evaluation or a save."""
        broadcast(list(self.module.buffers()), self._source)


_HOOK = "_communication"  # an attribute that `Replicas.prepare_module` sets on the DDP wrapper


def _register(
    wrapped: DistributedDataParallel, kwargs: DistributedDataParallelKwargs | None
) -> comm_hooks.Hook | None:
    """Register the communication hook; return it if its state can be saved and resumed.

    PowerSGD keeps residuals by bucket. So the bucket layout is fixed before the hook is registered,
    and a resumed run has the same layout. With a static graph, the layout is unknown before the
    first update, so the state cannot be resumed. Models without PowerSGD keep the layout that DDP
    finds in their first backward.
    """
    kind = "no" if kwargs is None else kwargs.comm_hook
    keeps = kind in comm_hooks.POWER_SGD and not wrapped.static_graph
    if keeps:
        fix_layout(wrapped)  # before the hook is registered: it counts iterations
    hook = comm_hooks.register(wrapped, kwargs)
    return hook if keeps else None


def communication_of(model: nn.Module) -> comm_hooks.Hook | None:
    """Return the communication hook of a prepared model if its state must be saved; else None."""
    hook: comm_hooks.Hook | None = vars(find_ddp(model) or model).get(_HOOK)
    return hook


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, without a compile wrapper; None if there is no DDP."""
    model = uncompiled(model)
    return model if isinstance(model, DistributedDataParallel) else None


class _AttachSyncVector(torch.autograd.Function):
    """A loss whose graph also gives the sync vector to DDP, for a backward pass of the user's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, sync_vector: Tensor, *sync_outputs: Tensor) -> Tensor:
        ctx.save_for_backward(sync_vector, *map(torch.zeros_like, sync_outputs[1:]))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, *ctx.saved_tensors


class DataParallel(Replicas):
    """Engine on DDP: gradients are averaged in the last backward of an accumulation window.

    The sync vector of the step sync (`StepSync`) is reduced together with the gradients, in the
    same bucket if that is float32. A communication hook would compress the sync vector, so with a
    hook it has its own all-reduce.

    DDP's arguments are those of the user, or ``gradient_as_bucket_view=True``, which saves a copy
    of the reduced gradients.
    """

    _reduces_after = False  # see `begin_micro_batch`

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Wrap the module.

        Raises:
            ValueError: torch cannot run the communication hook here.
        """
        SingleDevice.start(self, module, step_sync)
        self.parallel = replace(self.parallel, forward_is_collective=has_sync_batch_norm(module))
        self._arguments = self._kwargs or DistributedDataParallelKwargs(
            gradient_as_bucket_view=True
        )
        self._saved: dict[str, Any] = {}
        self._wrap()

    def _wrap(self) -> None:
        trained = self._trained()
        hooked = self._arguments.comm_hook != "no"
        dtype = self.step_sync.dtype_beside(trained, self.parallel.dp_size)
        # With a hook, the sync vector in DDP is unused. Give it the gradients' dtype, so that it
        # does not need a bucket of its own.
        if hooked and trained:
            dtype = trained[0].dtype
        root = _DDPRoot(self.module, self.step_sync.sync_vector(NOTHING, dtype))
        self._wrapped = {id(parameter) for parameter in trained}
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._vector: Tensor = root.sync_vector
        # The loop's transfer hooks move the inputs.
        self._ddp = wrap(root, self._arguments, moves_inputs=False)
        # `begin_micro_batch` does it: not always from rank 0, and where DDP's forward comes late.
        self._ddp.broadcast_buffers = False
        self._searches = root.searched = self._ddp.find_unused_parameters
        self._tables: list[nn.Parameter] = []
        # For parameters that the graph does not reach, DDP reduces zeros, which are always dense.
        # So the weights of sparse embeddings are added to every graph.
        if self._searches:
            sparse = sparse_weights(self.module)
            self._tables = [parameter for parameter in trained if id(parameter) in sparse]
            root.tables = [*self._tables]
        else:
            self._fix_layout([root.sync_vector, *reversed(trained)])
        # After fixing the layout, which takes an iteration that PowerSGD would count.
        self._hook = comm_hooks.register(self._ddp, self._arguments)
        self._separate_vector = None if self._hook is None else torch.zeros_like(self._vector)
        if self._hook is None:
            exchange_if_few(self._ddp, self.module)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay out DDP's buckets in the order in which backward reaches the parameters."""
        fix_layout(self._ddp, order)

    def _backward_nothing(self, sync_output: Tensor, sync_vector: Tensor) -> None:
        """Run backward with zero gradients and this sync vector, so that all buckets are filled."""
        parameters = self._trained()
        zeros = zeros_for(self.module, parameters)
        torch.autograd.backward([*parameters, sync_output], [*zeros, sync_vector])

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name, through DDP's forward."""
        output, self._sync_outputs = self._ddp(name, *args)
        return output

    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:
        """Broadcast buffers once a window, and set whether the next backward reduces gradients.

        Where DDP searches for unused parameters and a process runs a dummy batch, whose use of
        parameters must not count, all processes reduce after their backward passes.
        """
        super().begin_micro_batch(sync=sync, source=source)
        self._reduces_after = self._searches and sync and not complete
        reduces = sync and not self._reduces_after
        if self._ddp.require_backward_grad_sync is not reduces:  # setting attributes of it is slow
            self._ddp.require_backward_grad_sync = reduces

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Run backward; the last one of a window reduces the gradients and the step stats."""
        if loss is None:
            return 0.0 if stats is None else self._reduce(stats)
        if self._in_dummy and self._searches and (stats is None or self._reduces_after):
            # Not backward: DDP counts each accumulation as a use of the parameter.
            torch.autograd.grad(loss, self._trained(), allow_unused=True)
            return 0.0 if stats is None else self._reduce(stats)
        if stats is None or self._reduces_after:
            self._run_backward(loss, *args, **kwargs)
            return 0.0 if stats is None else self._reduce(stats)
        vector = self._vector_of(stats)
        if self._run_backward is not Tensor.backward:
            loss = _AttachSyncVector.apply(loss, vector, *self._sync_outputs)  # type: ignore[no-untyped-call]  # as in torch
            self._run_backward(loss)
            return self._reduced(stats)
        nothing = map(torch.zeros_like, self._sync_outputs[1:])
        torch.autograd.backward([loss, *self._sync_outputs], [None, vector, *nothing])
        return self._reduced(stats)

    def _reduce(self, stats: StepStats) -> float | Tensor:
        """Reduce the gradients of a window that backward has left unreduced, or that has none."""
        self._ddp.require_backward_grad_sync = True
        vector = self._vector_of(stats)
        _, sync_outputs = self._ddp(None)
        if self._searches:
            torch.autograd.backward(
                sync_outputs, [vector, *map(torch.zeros_like, sync_outputs[1:])]
            )
        else:
            self._backward_nothing(sync_outputs[0], vector)
        return self._reduced(stats)

    def _vector_of(self, stats: StepStats) -> Tensor:
        """Return the sync vector that is reduced with the gradients."""
        if self._separate_vector is not None:
            return self._separate_vector
        # DDP divides by the number of processes.
        return self.step_sync.sync_vector(stats, self._vector.dtype, times=self.parallel.dp_size)

    def _reduced(self, stats: StepStats) -> float | Tensor:
        """Check the reduction that has just ended, and return the window's number of items."""
        self._check_reduced()
        if any(p.requires_grad and p.grad is not None for p in self._frozen):
            self.check_unknown_parameters()
        if self._separate_vector is None:
            assert self._vector.grad is not None
            total = self._vector.grad
        else:
            total = self.step_sync.sync_vector(stats)
            sum_numbers(total)
        self._vector.grad = None
        items = self.step_sync.count(total)
        for table in self._tables:
            if table.grad is not None and table.grad.is_sparse and not table.grad._nnz():
                table.grad = None  # unused on all processes: no gradient, as with one process
        if not stats.items and not items:  # DDP gives unused parameters no gradient
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
                f"The loss does not depend on {', '.join(unused) or 'some parameters'}, so the "
                "gradients could not be averaged over the processes. Freeze parameters that are "
                "not trained with requires_grad_(False), or pass "
                "Trainer(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
            ) from error

    def check_unknown_parameters(self) -> None:
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
        super().close()
        self._ddp._remove_autograd_hooks()

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take the states that all ranks saved; they are restored when the next epoch begins.

        Only then are the trained parameters known.
        """
        hooks = [rank.get("communication", {}) for rank in saved]
        self._saved = comm_hooks.for_processes(hooks, dist.get_rank(), self.parallel.dp_size)


class StaticDataParallel(DataParallel):
    """`DataParallel` with ``static_graph=True``.

    With a static graph, DDP considers a gradient complete when it has been accumulated as often as
    in the first update. That is zero times if the loss does not use the parameter, and several
    times if modules that are checkpointed with ``use_reentrant=True`` share it. Two cases do not
    fit: DDP would count all micro-batches of the first accumulation window as one graph, and a
    process without a batch has no graph.

    So this class counts the accumulations itself, in the first update in which every process has a
    batch, and averages the gradients of the updates until then after backward. DDP then learns the
    graph from an equivalent backward of zeros. Processes that have no batch later use the same
    backward of zeros as their dummy batch. DDP's own forward covers only the sync vector, at the
    end of a window.

    Attributes:
        graph: How often backward accumulates into each trained parameter, by name; empty until
            known. A resumed run takes it from the checkpoint.
    """

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Wrap the module, in a new run once its graph is known.

        Raises:
            ValueError: torch cannot run the communication hook here, or an embedding has sparse
                gradients.
        """
        if sparse_weights(module):
            raise ValueError(
                "static_graph=True cannot be used with an embedding with sparse=True: torch's "
                "DDP fails if the loss does not use it. Create it without sparse=True, or leave "
                "out static_graph."
            )
        assert self._kwargs is not None
        # A static graph already says which parameters are unused.
        self._kwargs = replace(self._kwargs, find_unused_parameters=False)
        comm_hooks.check(module, self._kwargs)  # the hook is registered later
        self.graph: dict[str, int] = {}
        super().start(module, step_sync)

    def _names(self) -> list[str]:
        named = bare_names(self.module, self.module.named_parameters())
        return [name for name, p in named if p.requires_grad]

    def _wrap(self) -> None:
        self._graph_known = set(self.graph) == set(self._names())
        self._seen: list[int] = []  # the counts of `graph`, as found by this process
        self._held_to = False  # whether an update has been compared with the graph
        if self._graph_known:
            super()._wrap()
            return
        self.graph = {}
        self._hook = None
        self._wrapped = {id(parameter) for parameter in self._trained()}
        broadcast([*self.module.parameters(), *self.module.buffers()])

    def _fix_layout(self, order: list[nn.Parameter]) -> None:
        """Lay out DDP's buckets and teach DDP the static graph."""
        times = [1, *(self.graph[name] for name in reversed(self._names()))]
        fix_layout(self._ddp, order, times)

    def _backward_nothing(self, sync_output: Tensor, sync_vector: Tensor) -> None:
        """Accumulate zeros as often as the graph says, then run backward of the sync vector."""
        add_zeros(self.module, self._trained(), [self.graph[name] for name in self._names()])
        torch.autograd.backward(sync_output, sync_vector)

    def begin_epoch(self) -> None:
        """Take over the static graph of a resumed run; see `DataParallel.begin_epoch`."""
        trained = {id(parameter) for parameter in self._trained()}
        if trained != self._wrapped or (self.graph and not self._graph_known):
            self._wrap()
        if self._graph_known:
            super().begin_epoch()

    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:
        """Set, before the forward pass, whether the next backward ends the accumulation window."""
        if self._graph_known:
            super().begin_micro_batch(sync=sync, complete=complete, source=source)
        else:
            Replicas.begin_micro_batch(self, sync=sync, source=source)

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        return SingleDevice.forward(self, name, *args)

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """See `DataParallel.backward`.

        Raises:
            RuntimeError: The loss does not use each parameter as often as the static graph says.
        """
        if not self._graph_known:
            if loss is not None and not self._in_dummy:
                with _counted(self._trained()) as self._seen:
                    self._run_backward(loss, *args, **kwargs)
            elif loss is not None:
                loss.backward()
            return 0.0 if stats is None else self._learn(stats)
        if stats is None or loss is None:
            return super().backward(loss, stats, *args, **kwargs)
        _, self._sync_outputs = self._ddp(None)
        if self._held_to or self._in_dummy:
            return super().backward(loss, stats)
        with _counted(self._trained()) as times:
            items = super().backward(loss, stats)
        self._check(times)
        return items

    def _learn(self, stats: StepStats) -> float | Tensor:
        """Average gradients without DDP; set the graph once every process has run a backward."""
        average_gradients_of(self._trained())
        items = self.sync_stats(stats)
        if not items:
            give_nothing(self.module)
        if all(all_gather_object(bool(self._seen))):
            self.graph = dict(zip(self._names(), self._seen, strict=True))
            buffers = [] if self._sends_buffers else [(b, b.clone()) for b in self.module.buffers()]
            self.begin_epoch()
            for buffer, value in buffers:  # DDP's constructor has broadcast rank 0's buffers
                buffer.data.copy_(value)
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return the graph too: how often backward accumulates into each parameter."""
        return {**super().state_dict(), "graph": self.graph}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Adopt the process's own graph, or on another number of processes that of all."""
        super().load_state_dicts(saved)
        graphs = [rank.get("graph", {}) for rank in saved]
        if len(graphs) == self.parallel.dp_size:
            self.graph = graphs[dist.get_rank()]
        elif all(graph == graphs[0] for graph in graphs):
            self.graph = graphs[0]

    def close(self) -> None:
        """See `DataParallel.close`."""
        if self._graph_known:
            super().close()
        else:
            SingleDevice.close(self)

    def _check(self, times: list[int]) -> None:
        """Compare the first update with the graph, because DDP does not notice extra accumulations.

        Raises:
            RuntimeError: A parameter was used more or less often than in the graph.
        """
        for name, used in zip(self._names(), times, strict=True):
            expected = self.graph[name]
            if used != expected:
                raise RuntimeError(
                    "With static_graph=True backward must accumulate into each parameter as "
                    "often as in the first update, or in the run that is resumed. It accumulated "
                    f"{used} times into {name}, but {expected} times in the first update. Make "
                    "all updates alike, or leave out static_graph."
                )
        self._held_to = True

    def _check_reduced(self) -> None:
        """Check that DDP has reduced all buckets, and does not wait for missing gradients.

        Raises:
            RuntimeError: The loss uses fewer parameters than the static graph, so DDP waits for
                gradients and has averaged nothing.
        """
        try:
            super()._check_reduced()
        except RuntimeError as error:
            raise RuntimeError(
                "With static_graph=True each loss must depend on the same parameters as the "
                "first update's, equally often. This loss depends on fewer parameters, or on "
                "some less often, so the gradients could not be averaged. Pass Trainer("
                "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]) "
                "instead."
            ) from error.__cause__


@contextmanager
def _counted(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Count how often backward accumulates into each parameter inside the block."""
    times = [0] * len(parameters)

    def count(index: int) -> None:
        times[index] += 1

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: count(index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
