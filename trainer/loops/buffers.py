"""Buffers, which no gradient reduction keeps equal: broadcast, kept aside, recomputed.

`sync_buffers` broadcasts rank 0's buffers and untrained parameters. `update_batch_norm` recomputes
the running statistics of batch normalisation, for example for averaged weights. They become the
mean of the batch statistics over one epoch, as in ``torch.optim.swa_utils.update_bn``, on any
number of processes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from trainer.data.seeding import group_equal, isolated_generators, module_generators
from trainer.distributed.collectives import broadcast, reduce
from trainer.distributed.objects import all_gather_object
from trainer.engines.lockstep import isolated_batch_norm
from trainer.errors import module_logger
from trainer.loops.device_transfer import items_of
from trainer.loops.state import FitRun, Run
from trainer.metrics.accumulators import metric_states, put_metrics_back
from trainer.names import bare_names
from trainer.optim.optimizer import parameters_of
from trainer.rng import isolated_rng, mix
from trainer.state import GradientState
from trainer.tree import as_bytes, dense, is_sharded

logger = module_logger(__name__)

_AT_ONCE = 2**20  # 32-bit words hashed at a time: the hashing needs eight times their memory
_SMALL = 2**16  # words of a parameter that is always hashed
_LOOKED_AT = 64  # words of a larger parameter that are compared before it is hashed again
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's, signed


def sync_buffers(run: FitRun) -> None:
    """Broadcast rank 0's buffers and untrained parameters to all ranks; collective.

    This is done before an evaluation, so that all ranks evaluate the same module. It is also done
    before a save, which stores rank 0's values, so that this run continues with the same values as
    a resumed run.
    """
    run.engine.broadcast_buffers()
    if run.world_size > 1 and not run.engine.parallel.is_model_parallel:
        run.frozen.sync(run)


class FrozenParameters:
    """Keeps parameters that are frozen, or in no optimizer, equal on all ranks.

    They are compared by hashes. Only parameters that differ are sent, with a warning, so a large
    frozen base model costs no communication. It is hashed only once; see `_digests`.
    """

    def __init__(self) -> None:
        self._known: Digests = {}
        self._warned = False

    def sync(self, run: FitRun) -> None:
        """Broadcast rank 0's parameters where ranks differ; collective."""
        trained = set(map(id, parameters_of(run.optim.optimizers)))
        frozen = {
            name: parameter
            for name, parameter in bare_names(run.module, run.module.named_parameters())
            if not (parameter.requires_grad and id(parameter) in trained)
            and not is_lazy(parameter)
            and not is_sharded(parameter)  # each process has its own part
        }
        self._known = _digests(frozen, self._known)
        of_ranks = all_gather_object({name: digest for name, (_, digest) in self._known.items()})
        differing = [
            name
            for name, digest in of_ranks[0].items()
            if all(name in digests for digests in of_ranks)
            and any(digests[name] != digest for digests in of_ranks)
        ]
        if not differing:
            return
        broadcast([frozen[name] for name in differing])
        for name in differing:
            del self._known[name]
        if run.rank == 0 and not self._warned:
            logger.warning(
                "Frozen parameters differ between the processes (%s): rank 0's are used from "
                "here on. Code that changes them must run on all processes in each update: use "
                "on_train_step_end, because a process without a batch calls no batch hooks.",
                ", ".join(differing[:3]) + (", …" if len(differing) > 3 else ""),
            )
        self._warned = True


Digests = dict[str, tuple[tuple[object, ...], int]]  # by name: (change signature, hash)


def _digests(parameters: Mapping[str, Tensor], known: Digests) -> Digests:
    """Return the change signature of each parameter, and a 64-bit hash of its bits, by name.

    The hash depends on values and positions. Different tensors rarely have equal hashes.

    Args:
        parameters: The parameters.
        known: Earlier results, which are reused for parameters with an unchanged signature.
    """
    signs = {name: _signs_of_change(parameter) for name, parameter in parameters.items()}
    kept = {
        name: pair
        for name, pair in known.items()
        if pair[0] == signs.get(name) and parameters[name].nbytes > 4 * _SMALL
    }
    sums = {
        name: _mixed_sum(_words(parameter))
        for name, parameter in parameters.items()
        if name not in kept
    }
    new = {
        name: (signs[name], int(total)) for name, total in sums.items()
    }  # after all kernels are launched, so that the host waits once
    return kept | new


def _signs_of_change(parameter: Tensor) -> tuple[object, ...]:
    """Return the address, the version and some values of a parameter, which reveal changes.

    Torch's version counter misses changes through ``parameter.data``, which are common in updates
    of teacher models. They change most values, so comparing a few is enough.
    """
    words = _words(parameter)
    some = words[:: max(len(words) // _LOOKED_AT, 1)].cpu().numpy().tobytes()
    version = None if parameter.is_inference() else parameter._version  # documented, yet private
    return parameter.data_ptr(), version, parameter.shape, parameter.dtype, some


def _mixed_sum(words: Tensor) -> Tensor:
    """Return the sum of the words' hashes, an int64 tensor of shape ().

    Each word is hashed with its position by two rounds of shift and multiplication, as in
    SplitMix64. A linear sum would not change if two values were swapped, for example in a mask.

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


@contextmanager
def kept_buffers(module: nn.Module, *, besides: Collection[nn.Module] = ()) -> Iterator[None]:
    """Restore the buffers on exit, including buffers that were replaced.

    Args:
        module: The module.
        besides: Submodules whose buffers are not restored.
    """
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        if part not in besides
        for name, buffer in part.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in before:
                buffer.copy_(value)
                setattr(part, name, buffer)


def require_readable(run: FitRun) -> None:
    """Check that `update_batch_norm` can run.

    Raises:
        ValueError: The module has batch normalisation, and the training data is a stream, which
            cannot be read twice, or optimisation is manual, where `training_step` makes updates.
    """
    if not _trained_norms(run.module):
        return
    if not run.module.automatic_optimization:
        raise ValueError(
            "The statistics of batch normalisation cannot be recomputed in manual optimisation, "
            "because running training_step would make updates. Call "
            "torch.optim.swa_utils.update_bn instead."
        )
    if run.data.epoch_iterator.sampler is None:
        raise ValueError(
            "The statistics of batch normalisation cannot be recomputed: the training data is a "
            "stream, which cannot be read twice. Use a dataset with a length, or pass "
            "update_batch_norm=False."
        )


def update_batch_norm(run: FitRun) -> None:
    """Recompute the running statistics over one epoch of the training data; collective.

    `training_step` runs under autocast on every batch, without a backward pass, and the modes of
    submodules are not changed. Autograd is on, so that the step may compute gradients, for example
    for a gradient penalty. Layers in eval mode, and layers that `training_step` does not use, keep
    their statistics. `log` does nothing. RNG states, other buffers and the states of metric objects
    are restored.

    Args:
        run: The fit.

    Raises:
        ValueError: See `require_readable`.
    """
    require_readable(run)
    norms = _trained_norms(run.module)
    if not norms:
        return
    before = [[buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in norms]
    epoch_iterator = run.data.epoch_iterator.independent_copy()
    # Independent of the RNG state, since a resumed run may call this at another point.
    seed = mix(run.data.epoch_iterator.seed, run.counters.epoch, run.dp_rank)
    generators = run.saving.generators.named()
    with (
        kept_buffers(run.module, besides=set(norms)),
        kept_metrics(run.module),
        _cumulative(norms),
        isolated_rng(seed),
        isolated_generators(generators, mix(seed, 1), group_equal(generators)),
        run.metrics.muted(),
        run.engine.evaluating(),
        epoch_iterator.isolated_epoch(run.counters.epoch),
        closing(run.device_transfer.global_batches(epoch_iterator)) as global_batches,
    ):
        for batch_idx, current in enumerate(global_batches):
            batch, _ = items_of(current)
            context = run.precision.autocast() if current.present else isolated_dummy(run)
            with context:
                run.module.training_step(batch, batch_idx)
    for norm, earlier in zip(norms, before, strict=True):
        _average(norm, earlier)


def _trained_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalisation layers whose running statistics training updates."""
    return [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        and part.training
        and part.running_mean is not None
        and not is_lazy(part.running_mean)
    ]


def _average(norm: _BatchNorm, earlier: list[Tensor]) -> None:
    """Average a layer's statistics over the batches of all ranks; collective.

    Args:
        norm: The layer, with the mean over this rank's batches.
        earlier: Its buffers before, which are restored if no rank had a batch.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    batches = norm.num_batches_tracked
    total = reduce(batches)
    if not total:
        for buffer, value in zip(norm.buffers(recurse=False), earlier, strict=True):
            buffer.copy_(value)
        return
    for statistic in (norm.running_mean, norm.running_var):
        statistic.copy_(reduce(statistic * batches) / total)
    batches.copy_(total)


@contextmanager
def _cumulative(norms: list[_BatchNorm]) -> Iterator[None]:
    """Reset the statistics and use cumulative averages inside (``momentum=None``)."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@contextmanager
def isolated_dummy(run: Run) -> Iterator[None]:
    """Isolate a dummy batch that is run inside: it logs nothing and changes nothing.

    Buffers, metric objects, generators and the module's own numbers, tensors and containers are
    restored, for example a list to which `validation_step` appends. Changes outside the module
    remain. See `trainer.engines.lockstep`.
    """
    with (
        kept_attributes(run.module),
        kept_buffers(run.module),
        kept_metrics(run.module),
        isolated_rng(),
        isolated_generators(module_generators(run.module)),
        run.metrics.muted(),
        isolated_batch_norm(run.module, counts=False),
        run.precision.autocast(),
    ):
        yield


_CONTAINERS = (list, deque, set, dict, defaultdict, OrderedDict, Counter)
_OF_TORCH = vars(nn.Module()).keys()


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the module's attributes that are built-in containers (lists, dicts, …) on exit.

    In evaluation, numbers and tensors are restored too. If the step calls `gather_for_metrics`,
    everything is restored at the first call instead: gathered values have no rows of dummy batches,
    and belong in the lists of all ranks. In training, numbers and tensors are kept, since counters
    of updates must stay equal on all ranks; with manual optimisation, containers are kept too.
    """
    kinds: tuple[type, ...] = (int, float, Tensor, *_CONTAINERS)
    if module.training:
        kinds = _CONTAINERS if getattr(module, "automatic_optimization", True) else ()
    attributes = vars(module)
    before = {n: v for n, v in attributes.items() if n not in _OF_TORCH and type(v) in kinds}
    tensors = [(v.data, v.data.clone()) for v in before.values() if isinstance(v, Tensor)]
    restorers = [_restorer(value) for value in before.values()]

    def restore() -> None:
        attributes.update(before)
        for tensor, content in tensors:  # only in an evaluation
            tensor.copy_(content)
        for put_back in restorers:
            put_back()

    if module.training:
        try:
            yield
        finally:
            restore()
        return
    with GradientState()._before_gathering(restore):
        yield


def _restorer(value: Any) -> Callable[[], object]:
    """Return a function that restores the present items of a container and of nested containers."""
    if type(value) not in _CONTAINERS:
        return lambda: None
    items, inner = copy(value), value.values() if isinstance(value, dict) else value
    restorers = [_restorer(item) for item in inner if type(item) in _CONTAINERS]

    def restore() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(items)
        for put_back in restorers:
            put_back()

    return restore


@contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the states of a module's metric objects on exit; they are not buffers."""
    before = metric_states(module)
    try:
        yield
    finally:
        put_metrics_back(before)
