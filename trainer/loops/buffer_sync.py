"""Buffer sync: broadcast rank 0's buffers and untrained parameters to all ranks.

Gradient reduction keeps trained parameters equal on all ranks. Nothing does that for these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import all_gather_object
from trainer.errors import module_logger
from trainer.loops.state import FitRun
from trainer.names import bare_names
from trainer.optim.optimizer import parameters_of
from trainer.tree import as_bytes, dense

logger = module_logger(__name__)

_AT_ONCE = 2**20  # 32-bit words hashed at a time: the hashing needs eight times their memory
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's, signed


def sync_buffers(run: FitRun) -> None:
    """Broadcast rank 0's buffers and untrained parameters to all ranks; collective.

    Untrained parameters are frozen, or in no optimizer. This is done before an evaluation, so that
    all ranks evaluate the same module. It is also done before a save, which holds rank 0's values:
    so the run continues with what a resumed run will load.

    Parameters are compared by hashes. Only those that differ are sent, with a warning, so a large
    frozen base model costs no communication.
    """
    run.engine.broadcast_buffers()
    if run.world_size == 1:
        return
    trained = set(map(id, parameters_of(run.optimizers)))
    frozen = {
        name: parameter
        for name, parameter in bare_names(run.module, run.module.named_parameters())
        if not (parameter.requires_grad and id(parameter) in trained) and not is_lazy(parameter)
    }
    everybody = all_gather_object(_digests(frozen))
    differing = [
        name
        for name, own in everybody[0].items()
        if all(name in each for each in everybody) and any(each[name] != own for each in everybody)
    ]
    if not differing:
        return
    broadcast([frozen[name] for name in differing])
    if run.rank == 0 and not run.warned_of_buffers:
        logger.warning(
            "Frozen parameters differ between the processes (%s): rank 0's are used from here on. "
            "What moves them must run on all processes in each update: use on_train_step_end, "
            "since a process without a batch calls no hook of a batch.",
            ", ".join(differing[:3]) + (", …" if len(differing) > 3 else ""),
        )
    run.warned_of_buffers = True


def _digests(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a 64-bit hash of the bits of each parameter, by name.

    It depends on values and positions. Different tensors have equal hashes only by rare collision.
    """
    sums = {name: _mixed_sum(_words(each)) for name, each in parameters.items()}
    return {name: int(total) for name, total in sums.items()}  # after launching all: one wait


def _mixed_sum(words: Tensor) -> Tensor:
    """Return the sum of the words' hashes, an int64 tensor of shape ().

    Each word is hashed with its position by two rounds of shift and multiplication, as in
    SplitMix64. A sum that is linear in the words would not notice when two values are swapped, as
    in a mask.

    Args:
        words: Integers of shape (N,).
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    places = torch.arange(1, min(len(words), _AT_ONCE) + 1, device=words.device) * _ODD[0]
    for part in words.split(_AT_ONCE):
        mixed = places[: len(part)] + part  # int64 arithmetic wraps around
        for odd in _ODD[1:]:
            mixed ^= mixed >> 31
            mixed *= odd
        total = 31 * total + mixed.sum()
    return total


def _words(parameter: Tensor) -> Tensor:
    bits = as_bytes(dense(parameter))
    if bits.numel() % 4:
        return bits
    # An int32 view must begin at a multiple of 4 bytes; a slice of another tensor may not.
    return (bits if bits.storage_offset() % 4 == 0 else bits.clone()).view(torch.int32)
