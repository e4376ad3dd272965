"""Few gradients, which processes on the CPU send to each other at once instead of reducing them.

For *N* processes an all-reduce of gloo is 2 (N - 1) messages one after another, around a ring. Each
carries an N-th of the numbers, which is best for many. For few, what counts is how often a process
waits for another: once if each sends everything to every other (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005).
"""

# Without `from __future__ import annotations`: torch checks a hook's annotations, but not as text.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its __all__
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.transport import sum_numbers
from trainer.strategies.zeros import sparse_weights

# In bytes that a process receives. On one machine a step is faster up to four times as many; over
# a network of 1 Gbit/s they take about as long as the waits that they spare.
_FEW = 2**19


def exchange_if_few(model: DistributedDataParallel) -> None:
    """Let DDP exchange its gradients if they are few, dense and on the CPU.

    The average is that of DDP to the last bit on two processes; on more it is summed in the order
    of the ranks, however the gradients are laid out in buckets.

    Args:
        model: Without a communication hook.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if (
        sum(parameter.nbytes for parameter in trained) * dist.get_world_size() <= _FEW
        and all(parameter.device.type == "cpu" for parameter in trained)
        and sparse_weights(model).isdisjoint(map(id, trained))
    ):
        model.register_comm_hook(None, _average)


def _average(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket now: there is nothing to be gained by doing it beside the backward pass."""
    gradients = bucket.buffer()
    gradients /= dist.get_world_size()  # before they are summed, as DDP does
    sum_numbers(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
