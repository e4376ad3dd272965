"""Uneven inputs in the user's own loop: processes with different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.guards import read_back
from trainer.engines.compile import uncompiled
from trainer.state import GradientState, PartialState


class Window(Protocol):
    """The position in a gradient accumulation window, as kept by the `Accelerator`.

    Attributes:
        step: The number of micro-batches so far in the window.
    """

    step: int

    @property
    def sync_gradients(self) -> bool:
        """Whether the latest micro-batch was the last of its window."""

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None: ...


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any],
    loaders: Sequence[Any],
    even_batches: bool | None = None,
    window: Window | None = None,
) -> Iterator[None]:
    """Let a process that runs out of batches take part in the collectives of the others.

    It uses torch's ``Join``: a process without a batch contributes zero gradients, the sum is
    divided by the number of all processes, and at the end all processes take the weights of the
    last active one. With one process, this function does nothing.

    With `Accelerator.accumulate`, a process that runs out of batches inside an accumulation window
    contributes its accumulated gradients when the others reach the end of the window. The window
    ends after `num_steps` micro-batches of the process with the most batches, or at the last batch
    over all processes. The last batch is unknown if each process reads a loader of its own or
    leaves its loop early. In that case, and with ``sync_with_dataloader=False``, the window stays
    open on all processes and continues with their next batches.

    Args:
        joinables: Models in DDP and optimizers that are ``Joinable``, such as
            ``ZeroRedundancyOptimizer``, as `prepare` returned them.
        loaders: The prepared loaders.
        even_batches: Overrides the loaders' setting inside the block; None keeps it. With True,
            every process has the same number of batches, and nothing is joined.
        window: The position in the accumulation window; it is made equal on all processes when the
            block ends.

    Raises:
        TypeError: One of `joinables` cannot take part.
        ValueError: A model is sharded, and processes may have different numbers of batches. Or one
            of `joinables` is an optimizer, and gradients are accumulated: a process without batches
            would step the optimizer at every micro-batch, the others only at the end of a window.
    """
    if PartialState().num_processes == 1:
        yield
        return
    taking_part = [module for joinable in joinables if (module := _joinable(joinable)) is not None]
    with ExitStack() as stack:
        if even_batches is not None:
            _override(loaders, even_batches, stack)
        if even_batches is False or any(not _is_even(loader) for loader in loaders):
            _check_whole(joinables)
        if even_batches or not taking_part:
            yield
            return
        if window is not None:
            _check_optimizers(taking_part)
            taking_part.append(_InStep(window, taking_part[0]))
        stack.callback(_disable, taking_part)
        join = Join(taking_part)
        state = GradientState()
        stack.callback(setattr, state, "_joins", state._joins)
        state._joins = True
        yield
        # Not in a finally block: after an error, the other processes may not take part. The call
        # changes the warning filters, so these are saved and restored.
        with warnings.catch_warnings(), ExitStack() as sending:
            if window is not None and not window.sync_gradients:
                for joinable in taking_part:
                    if isinstance(joinable, DistributedDataParallel):
                        sending.enter_context(_sends_what_it_has(joinable))
            join.__exit__(None, None, None)


class _InStep(Joinable, JoinHook):
    """Copies the window position of the last process that had a batch to all processes."""

    def __init__(self, window: Window, beside: Joinable) -> None:
        super().__init__()
        self._window = window
        self._device, self._group = beside.join_device, beside.join_process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002 - torch's signature
        return self

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return self._group

    def post_hook(self, is_last_joiner: bool) -> None:
        window = self._window
        counts = [window.step, window.sync_gradients] if is_last_joiner else [0, 0]
        position = torch.tensor(counts, dtype=torch.long).to(self._device)
        dist.all_reduce(position, dist.ReduceOp.MAX, group=self._group)
        step, sync = read_back(position).tolist()
        window.step, window.sync_gradients = step, bool(sync)


@contextmanager
def _sends_what_it_has(model: DistributedDataParallel) -> Iterator[None]:
    """Let a process without batches contribute its accumulated gradients to the next all-reduce.

    Afterwards it contributes zeros. torch's ``Join`` contributes zeros from the start, so gradients
    that were accumulated before the window's end would be lost.
    """
    contributed = False

    def reduce() -> None:
        nonlocal contributed
        works = []
        for bucket in model.reducer._get_zeros_like_grad_buckets():
            if not contributed:
                _fill(model, bucket)
            works.append(model.reducer._run_comm_hook(bucket))
        for work in works:
            work.wait()
        if not contributed:  # like zero_grad after the update, on the others
            for parameter in model.parameters():
                parameter.grad = None
        contributed = True

    vars(model)["_match_all_reduce_for_bwd_pass"] = reduce
    try:
        yield
    finally:
        del vars(model)["_match_all_reduce_for_bwd_pass"]


def _fill(model: DistributedDataParallel, bucket: Any) -> None:
    """Add the accumulated gradients to a ``GradBucket`` of zeros, divided by the world size."""
    # With a communication hook, the hook divides.
    divisor = 1 if model._comm_hooks else dist.get_world_size(model.process_group)
    for sent, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        if parameter.grad is not None:
            sent.add_(parameter.grad, alpha=1 / divisor)


def _check_optimizers(joinables: Sequence[Joinable]) -> None:
    steps = GradientState().num_steps
    for joinable in joinables:
        if steps > 1 and not isinstance(joinable, DistributedDataParallel):
            raise ValueError(
                f"join_uneven_inputs was given a {type(joinable).__name__}, with "
                f"gradient_accumulation_steps={steps}. A process without batches would step the "
                "optimizer in every round, but the others only at the end of a window. Use "
                "gradient_accumulation_steps=1, or leave it out and pass even_batches=True."
            )


def _joinable(candidate: Any) -> Joinable | None:
    """Return the ``Joinable`` of a prepared object; None for a model without DDP.

    Raises:
        TypeError: The object is neither a model nor ``Joinable``.
    """
    inner = getattr(candidate, "optimizer", candidate)
    if isinstance(inner, nn.Module):
        inner = uncompiled(inner)
    if isinstance(inner, Joinable):
        return inner
    if isinstance(inner, nn.Module):
        return None
    raise TypeError(
        f"joinables contains a {type(inner).__name__}; it takes prepared models, and optimizers "
        "that are torch.distributed.algorithms.Joinable."
    )


def _is_even(loader: Any) -> bool:
    return getattr(loader, "even_batches", True) is not False


def _check_whole(joinables: Sequence[Any]) -> None:
    if PartialState().device.type == "xla":
        raise ValueError(
            "join_uneven_inputs needs DDP, which does not support XLA devices. Use "
            "even_batches=True, or the Trainer, in which a process without a batch runs a dummy "
            "batch."
        )
    for joinable in joinables:
        if isinstance(joinable, nn.Module) and any(
            hasattr(p, "to_local") for p in joinable.parameters()
        ):
            raise ValueError(
                f"join_uneven_inputs was given a {type(joinable).__name__} that is sharded, whose "
                "forward pass needs every process. Use even_batches=True, or the Trainer, in which "
                "a process without a batch runs a dummy batch."
            )


def _override(loaders: Sequence[Any], even_batches: bool, stack: ExitStack) -> None:
    settable = [loader for loader in loaders if hasattr(loader, "even_batches")]
    if len(settable) < len(loaders):
        warnings.warn(
            "Overriding even_batches is only supported for map-style datasets, yet some "
            "dataloaders given were iterable",
            UserWarning,
            stacklevel=4,
        )
    for loader in settable:
        stack.callback(setattr, loader, "even_batches", loader.even_batches)
        loader.even_batches = even_batches


def _disable(joinables: list[Joinable]) -> None:
    """Disable joining again, which torch does not do: later forwards would wait for all ranks."""
    for joinable in joinables:
        joinable._join_config = _JoinConfig.construct_disabled_join_config()
