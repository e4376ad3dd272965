"""A faster all-reduce for small gradients on the CPU: one all-to-all exchange and a local sum.

An all-reduce of gloo over N processes takes 2 (N - 1) consecutive messages around a ring, each with
1/N of the data. This is best for large data, where bandwidth counts. For small data, latency
counts: how often a process waits for another. If each process sends all its data to every other
process, it waits only once (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 2005).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its __all__
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.transport import sum_numbers
from trainer.engines.averaging import sparse_weights
from trainer.state import PartialState

# No `from __future__ import annotations` here: torch checks a hook's annotations, and does not
# accept strings.


# Bytes of the gradients, summed over all processes. A step was still faster with four times this.
_FEW = 2**19


def exchange_if_few(model: DistributedDataParallel, module: nn.Module) -> None:
    """Make DDP exchange its gradients all-to-all if that is faster; a collective call.

    It is faster if the gradients are small, have one dtype, and all processes run on the CPU of one
    machine. The gradients then fill one bucket, which is complete only at the end of backward, so
    an all-reduce would not overlap with backward. A sync vector of another dtype gets its own
    exchange.

    With two processes, the average equals DDP's in every bit. With more, it is summed in the order
    of the ranks, so it does not depend on the layout of the bucket.

    Args:
        model: The model in DDP, without a communication hook.
        module: The user's module inside `model`.
    """
    if PartialState().device.type != "cpu":  # the group may have no CPU backend
        return
    faster = torch.tensor(_is_faster([p for p in module.parameters() if p.requires_grad], module))
    # Reduced, because launchers may describe the machines differently to different processes.
    dist.all_reduce(faster, dist.ReduceOp.MIN)
    if faster:
        model.register_comm_hook(None, _average)


def _is_faster(trained: list[nn.Parameter], module: nn.Module) -> bool:
    state = PartialState()
    return (
        state._local_world_size == state.num_processes
        and sum(parameter.nbytes for parameter in trained) * state.num_processes <= _FEW
        and len({parameter.dtype for parameter in trained}) == 1
        and sparse_weights(module).isdisjoint(map(id, trained))
        # Optimizers that step in backward use a DDP hook of their own.
        and not any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained)
    )


def _average(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    gradients /= dist.get_world_size()  # divided before the sum, as in DDP
    sum_numbers(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
