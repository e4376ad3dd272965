"""Gradient compression: torch's communication hooks for DDP.

The fp16 and bf16 hooks halve the bytes that are sent. PowerSGD sends low-rank factors of each
gradient and adds the residual (the compression error) to the next gradient (Vogels, Karimireddy and
Jaggi, "PowerSGD", NeurIPS 2019).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.configuration import DistributedDataParallelKwargs
from trainer.engines.averaging import sparse_weights
from trainer.enums import DDPCommunicationHookType as Kind
from trainer.errors import module_logger
from trainer.names import bare_names

logger = module_logger(__name__)

_HOOKS: dict[str, Any] = {
    Kind.FP16: default_hooks.fp16_compress_hook,
    Kind.BF16: default_hooks.bf16_compress_hook,
    Kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
    Kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[str, Any] = {
    Kind.FP16: default_hooks.fp16_compress_wrapper,
    Kind.BF16: default_hooks.bf16_compress_wrapper,
}
POWER_SGD = (Kind.POWER_SGD, Kind.BATCHED_POWER_SGD)
_FIRST_BUCKET = 2**20  # bytes: DDP's limit for its first bucket
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class Hook:
    """A registered communication hook, with the state that it keeps between updates.

    Args:
        made_by: The settings on which the state depends.
        state: The state of PowerSGD; None for the other hooks.
        device: The device of the gradients.
    """

    def __init__(
        self,
        made_by: dict[str, Any],
        state: powerSGD_hook.PowerSGDState | None,
        device: torch.device,
    ) -> None:
        self._made_by = made_by
        self._state = state
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state: tensors by bucket, iteration and RNG state.

        It is empty for hooks without a state.
        """
        if self._state is None:
            return {}
        state: dict[str, Any] = {name: dict(getattr(self._state, name)) for name in _BY_BUCKET}
        state |= {"iter": self._state.iter, "rng": self._state.rng.get_state()}
        return state | {"made_by": self._made_by}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state; a state of other settings is ignored with a warning."""
        if self._state is None or not saved:
            return
        # States of an earlier release have no "parameters".
        if {**self._made_by, **saved["made_by"]} != self._made_by:
            logger.warning(
                "PowerSGD starts with a new state: the checkpoint has its state for %s, this "
                "run uses %s.",
                saved["made_by"],
                self._made_by,
            )
            return
        for name in _BY_BUCKET:
            tensors = {index: tensor.to(self._device) for index, tensor in saved[name].items()}
            setattr(self._state, name, tensors)
        self._state.iter = saved["iter"]
        self._state.rng.set_state(tuple(saved["rng"]))


def check(
    model: nn.Module, kwargs: DistributedDataParallelKwargs, *, searches: bool = False
) -> None:
    """Check that torch can run the requested hook on this model, as far as is known in advance.

    Args:
        model: The model whose gradients are reduced.
        kwargs: Arguments of DDP.
        searches: Whether DDP searches for unused parameters.

    Raises:
        ValueError: torch cannot run the hook.
    """
    if kwargs.comm_hook == Kind.NO:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    _check_dense(model, trained, kwargs.comm_hook)
    if kwargs.comm_hook == Kind.BATCHED_POWER_SGD:
        _check_batched()
    if trained and kwargs.comm_hook in POWER_SGD:
        _check_dimensions(model)
        _check_over_gloo(trained, searches=searches)


def register(
    model: DistributedDataParallel, kwargs: DistributedDataParallelKwargs | None
) -> Hook | None:
    """Register the requested hook and return it; None if none is requested.

    Raises:
        ValueError: torch cannot run the hook here.
    """
    if kwargs is None or kwargs.comm_hook == Kind.NO:
        return None
    check(model, kwargs, searches=model.find_unused_parameters)
    trained = [p for p in model.parameters() if p.requires_grad]
    hook, state = _HOOKS[kwargs.comm_hook], None
    if kwargs.comm_hook in POWER_SGD:
        hook = _mending(hook)
        state = powerSGD_hook.PowerSGDState(None, **kwargs.comm_state_option)
    if kwargs.comm_wrapper != Kind.NO:
        hook = _WRAPPERS[kwargs.comm_wrapper](hook)
    try:
        model.register_comm_hook(state, hook)
    except TypeError as error:
        raise ValueError(
            f"Gradients cannot be sent in bfloat16 here (comm_hook={kwargs.comm_hook.value!r}, "
            f"comm_wrapper={kwargs.comm_wrapper.value!r}): torch supports it only with NCCL or "
            "XCCL. Use 'fp16', which every backend can send, or 'no'."
        ) from error
    made_by = {
        "comm_hook": kwargs.comm_hook.value,
        "comm_wrapper": kwargs.comm_wrapper.value,
        "comm_state_option": dict(kwargs.comm_state_option),
        "bucket_cap_mb": kwargs.bucket_cap_mb,
        "gradients": sum(p.numel() for p in trained),
        "parameters": _digest(model),
    }
    return Hook(made_by, state, trained[0].device)


def _digest(model: nn.Module) -> str:
    """Return a hash of the names and shapes of the trained parameters, in their order."""
    named = [
        (name, *p.shape)
        for name, p in bare_names(model, model.named_parameters())
        if p.requires_grad
    ]
    return hashlib.sha256(repr(named).encode()).hexdigest()[:16]


def _mending(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a PowerSGD hook so that it recovers from an update with NaN or infinity."""
    # A lambda has no annotations. torch checks a hook's annotations and does not accept strings,
    # which `from __future__ import annotations` makes of them.
    return lambda state, bucket: hook(_mended(state, bucket.index()), bucket)


def _mended(state: powerSGD_hook.PowerSGDState, index: int) -> powerSGD_hook.PowerSGDState:
    """Reset PowerSGD's residual and factors of a bucket if they are not finite.

    The optimizer skips an update with NaN or infinity, but a NaN in this state would make all later
    gradients NaN. The factors are the same on all processes, so all processes decide alike. The
    check runs on the device without synchronizing.
    """
    error, factor = state.error_dict.get(index), state.q_memory_dict.get(index)
    tensors = [tensor for tensor in (error, factor) if tensor is not None]
    if tensors:
        sound = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    if error is not None:
        error.masked_fill_(~sound, 0)
    if factor is not None:
        generator = torch.Generator(factor.device).manual_seed(state.iter)
        anew = torch.empty_like(factor).normal_(generator=generator)
        factor.copy_(torch.where(sound, factor, anew))
    return state


def _check_dense(model: nn.Module, trained: Sequence[Tensor], kind: str) -> None:
    """Check that no gradient is sparse.

    The fp16 and bf16 hooks fail in backward on a sparse gradient. PowerSGD does not reduce it, and
    the weights of the processes diverge.

    Raises:
        ValueError: A sparse embedding is trained.
    """
    if not sparse_weights(model).isdisjoint(map(id, trained)):
        raise ValueError(
            f"comm_hook={str(kind)!r} cannot send the sparse gradients of an embedding with "
            "sparse=True. Make it without sparse=True, or leave out comm_hook."
        )


def _check_dimensions(model: nn.Module) -> None:
    """Check that no trained parameter is a 0-d tensor: torch's PowerSGD fails at these.

    Raises:
        ValueError: A 0-d parameter is trained.
    """
    named = bare_names(model, model.named_parameters())
    numbers = [name for name, p in named if p.requires_grad and p.dim() == 0]
    if numbers:
        # "module." comes from the engine's wrapper.
        names = ", ".join(name.removeprefix("module.") for name in numbers)
        raise ValueError(
            f"PowerSGD fails inside torch at parameters without a dimension: {names}. Give each "
            "the shape (1,), or use comm_hook='fp16'."
        )


def _check_over_gloo(trained: Sequence[Tensor], *, searches: bool) -> None:
    """Check that PowerSGD over gloo would not hang or crash.

    The hook waits for its own all-reduce and occupies one of gloo's two threads meanwhile, so two
    buckets deadlock. DDP's first bucket holds 1 MiB of one dtype. With a search for unused
    parameters, the hook's all-reduce on one process can also be matched with DDP's own collective
    on another.

    Raises:
        ValueError: The gradients may need several buckets, or DDP searches for unused parameters.
    """
    if not (trained[0].device.type == "cpu" or dist.get_backend() == "gloo"):
        return
    if searches:
        raise ValueError(
            "PowerSGD over gloo fails inside torch with find_unused_parameters=True: their "
            "collectives get mixed up. Use NCCL, comm_hook='fp16', or a loss that depends on "
            "every parameter."
        )
    size, types = sum(p.nbytes for p in trained), {p.dtype for p in trained}
    if size > _FIRST_BUCKET or len(types) > 1:
        raise ValueError(
            f"PowerSGD over gloo hangs inside torch as soon as gradients fill several buckets. "
            f"These are {size} bytes of {len(types)} types; one bucket holds "
            f"{_FIRST_BUCKET} bytes of one type. Use NCCL, or comm_hook='fp16'."
        )


def _check_batched() -> None:
    """Check that this torch's batched PowerSGD works.

    Up to torch 2.13 it fails at the first compressed update: it passes a single matrix to a
    function that takes a batch of matrices.

    Raises:
        ValueError: This torch has the bug.
    """
    try:
        powerSGD_hook._orthogonalize(torch.ones(1, 1))
    except AssertionError as error:
        raise ValueError(
            f"comm_hook='batched_power_sgd' does not work in torch {torch.__version__}: its hook "
            "fails as soon as it compresses, after start_powerSGD_iter updates. Use "
            "comm_hook='power_sgd'; comm_state_option={'batch_tensors_with_same_shape': True} "
            "makes it compress gradients of one shape together."
        ) from error


def for_processes(ranks: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state with which a rank resumes, also on a different number of processes.

    Only the residuals differ between ranks. They enter the gradients through the mean over the
    ranks. So, on a different number of processes, every rank gets the mean of the saved residuals,
    which preserves their effect.

    Args:
        ranks: The saved state of each rank of the earlier run.
        rank: The rank of this process.
        world_size: The number of processes of this run.
    """
    if len(ranks) == world_size or not all(ranks):
        return ranks[rank] if rank < len(ranks) else {}
    errors: dict[int, Tensor] = {
        index: torch.stack([state["error_dict"][index] for state in ranks]).mean(0)
        for index in ranks[0]["error_dict"]
    }
    return ranks[0] | {"error_dict": errors}
