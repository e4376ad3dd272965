"""What DDP sends instead of the gradients as they are: torch's communication hooks.

Halving: gradients in 16 bits. PowerSGD: products of thin matrices, with what they leave out added
to the next gradients (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.configuration import DDPCommunicationHookType as Kind
from trainer.configuration import DistributedDataParallelKwargs
from trainer.strategies.zeros import sparse_weights

logger = logging.getLogger(__name__)

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
_FIRST_BUCKET = 2**20  # bytes, DDP's own limit for the gradients that it sends first
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class Hook:
    """A hook that is registered, and what it carries from one update to the next.

    Args:
        made_by: What its state depends on.
        state: Of PowerSGD; the others have none.
        device: Where the gradients are.
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
        """What this process goes on from: tensors by bucket, the iteration, the generator."""
        if self._state is None:
            return {}
        kept: dict[str, Any] = {name: dict(getattr(self._state, name)) for name in _BY_BUCKET}
        kept |= {"iter": self._state.iter, "rng": self._state.rng.get_state()}
        return kept | {"made_by": self._made_by}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put it back; that of other options, or of other buckets, is left out and told of."""
        if self._state is None or not saved:
            return
        if saved["made_by"] != self._made_by:
            logger.warning(
                "PowerSGD begins anew: the checkpoint has its state for %s, this run is with %s.",
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
    """See that torch can run the hook that the arguments name, as far as it is known before.

    Args:
        model: Whose gradients are sent.
        kwargs: Arguments of DDP.
        searches: DDP searches for unused parameters.

    Raises:
        ValueError: It cannot.
    """
    if kwargs.comm_hook == Kind.NO:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    _check_dense(model, trained, kwargs.comm_hook)
    if kwargs.comm_hook == Kind.BATCHED_POWER_SGD:
        _check_batched()
    if trained and kwargs.comm_hook in POWER_SGD:
        _check_over_gloo(trained, searches=searches)


def register(
    model: DistributedDataParallel, kwargs: DistributedDataParallelKwargs | None
) -> Hook | None:
    """Register the hook that the arguments name; None if they name none.

    Raises:
        ValueError: torch cannot run it here.
    """
    if kwargs is None or kwargs.comm_hook == Kind.NO:
        return None
    check(model, kwargs, searches=model.find_unused_parameters)
    trained = [p for p in model.parameters() if p.requires_grad]
    hook, state = _HOOKS[kwargs.comm_hook], None
    if kwargs.comm_wrapper != Kind.NO:
        hook = _WRAPPERS[kwargs.comm_wrapper](hook)
    if kwargs.comm_hook in POWER_SGD:
        state = powerSGD_hook.PowerSGDState(None, **kwargs.comm_state_option)
    try:
        model.register_comm_hook(state, hook)
    except TypeError as error:
        raise ValueError(
            f"Gradients cannot be sent in bfloat16 here (comm_hook={kwargs.comm_hook.value!r}, "
            f"comm_wrapper={kwargs.comm_wrapper.value!r}): torch does that with NCCL or XCCL "
            "alone. Use 'fp16', which every backend can send, or 'no'."
        ) from error
    made_by = {
        "comm_hook": kwargs.comm_hook.value,
        "comm_wrapper": kwargs.comm_wrapper.value,
        "comm_state_option": dict(kwargs.comm_state_option),
        "bucket_cap_mb": kwargs.bucket_cap_mb,
        "gradients": sum(p.numel() for p in trained),
    }
    return Hook(made_by, state, trained[0].device)


def _check_dense(model: nn.Module, trained: Sequence[Tensor], kind: str) -> None:
    """Refuse a hook for gradients that it cannot send.

    Those of 16 bits fail on a sparse gradient in backward; PowerSGD leaves it as it is on each
    process, so that their weights part.

    Raises:
        ValueError: A sparse embedding is trained.
    """
    if not sparse_weights(model).isdisjoint(map(id, trained)):
        raise ValueError(
            f"comm_hook={str(kind)!r} cannot send the sparse gradients of an embedding with "
            "sparse=True. Make it without sparse=True, or leave out comm_hook."
        )


def _check_over_gloo(trained: Sequence[Tensor], *, searches: bool) -> None:
    """Refuse PowerSGD over gloo where it would hang, or end the process.

    While its hook waits for what it has sent it keeps one of gloo's two threads, so that two
    buckets wait for each other. DDP puts a megabyte of one type into its first. What it sends from
    that thread also meets, on another process, DDP's own exchange of which parameters were unused.

    Raises:
        ValueError: The gradients may need several buckets, or DDP searches for unused parameters.
    """
    if not (trained[0].device.type == "cpu" or dist.get_backend() == "gloo"):
        return
    if searches:
        raise ValueError(
            "PowerSGD over gloo fails inside torch with find_unused_parameters=True: what both "
            "send is taken for one another. Use NCCL, comm_hook='fp16', or a loss that depends on "
            "every parameter."
        )
    size, types = sum(p.nbytes for p in trained), {p.dtype for p in trained}
    if size > _FIRST_BUCKET or len(types) > 1:
        raise ValueError(
            f"PowerSGD over gloo hangs inside torch as soon as gradients fill several buckets, and "
            f"these are {size} bytes of {len(types)} types; one bucket is "
            f"{_FIRST_BUCKET} bytes of one type. Use NCCL, or comm_hook='fp16'."
        )


def _check_batched() -> None:
    """Refuse torch's batched PowerSGD where it fails at the first update that it compresses.

    Its releases up to 2.13 give a matrix to a function that takes a stack of them.

    Raises:
        ValueError: It does.
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
    """What one of so many processes goes on from, given the states of those that saved.

    Only what was left out of the gradients is each process's own. It comes back through the mean
    over the processes: given to others in equal parts, its sum there is right.
    """
    if len(ranks) == world_size or not all(ranks):
        return ranks[rank] if rank < len(ranks) else {}
    errors: dict[int, Tensor] = {
        index: torch.stack([each["error_dict"][index] for each in ranks]).mean(0)
        for index in ranks[0]["error_dict"]
    }
    return ranks[0] | {"error_dict": errors}
