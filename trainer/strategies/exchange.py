"""Few gradients, which processes on the CPU send to each other at once instead of reducing them.

For *N* processes an all-reduce of gloo is 2 (N - 1) messages one after another, around a ring. Each
carries an N-th of the numbers, which is best for many. For few, what counts is how often a process
waits for another: once if each sends everything to every other (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005).
"""

# Without `from __future__ import annotations`: torch checks a hook's annotations, but not as text.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its __all__
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.transport import sum_numbers
from trainer.state import PartialState
from trainer.strategies.zeros import sparse_weights

_FEW = 2**19  # bytes, of all processes together; a step was still faster with four times as many


def exchange_if_few(model: DistributedDataParallel, module: nn.Module) -> None:
    """Let DDP exchange its gradients if that is faster; collective.

    It is if they are few, on one machine's CPU, and of one dtype: their bucket is not complete
    before backward is. A ballot of another dtype is exchanged apart. The average is that of DDP to
    the last bit on two processes; on more it is summed in the order of the ranks, however the
    gradients are laid out in the bucket.

    Args:
        model: Without a communication hook.
        module: The user's module in it.
    """
    if PartialState().device.type != "cpu":  # whose group may have no backend for the host
        return
    faster = torch.tensor(_is_faster([p for p in module.parameters() if p.requires_grad], module))
    dist.all_reduce(faster, dist.ReduceOp.MIN)  # launchers may describe the machines differently
    if faster:
        model.register_comm_hook(None, _average)


def _is_faster(trained: list[nn.Parameter], module: nn.Module) -> bool:
    state = PartialState()
    return (
        state._local_world_size == state.num_processes
        and sum(parameter.nbytes for parameter in trained) * state.num_processes <= _FEW
        and len({parameter.dtype for parameter in trained}) == 1
        and sparse_weights(module).isdisjoint(map(id, trained))
        # Optimizers that step in backward have a hook of DDP's.
        and not any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained)
    )


def _average(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    gradients /= dist.get_world_size()  # before they are summed, as DDP does
    sum_numbers(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
