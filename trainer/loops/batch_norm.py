"""Recompute the running statistics of batch normalisation, such as for averaged weights.

They become the mean of the batch statistics over one epoch, as in
``torch.optim.swa_utils.update_bn``. The result is the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from trainer.data.seeding import equal, isolated_generators
from trainer.distributed.collectives import reduce
from trainer.loops.device_transfer import items_of
from trainer.loops.evaluate import kept_buffers
from trainer.loops.module_state import metric_states, of_module, put_metrics_back
from trainer.loops.state import FitRun
from trainer.rng import isolated_rng, mix


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
            "where training_step, which would have to run for them, makes updates. Call "
            "torch.optim.swa_utils.update_bn instead."
        )
    if run.epoch_iterator.sampler is None:
        raise ValueError(
            "The statistics of batch normalisation cannot be recomputed: the training data is a "
            "stream, which cannot be read twice. Use a dataset with a length, or pass "
            "update_batch_norm=False."
        )


def update_batch_norm(run: FitRun) -> None:
    """Recompute the running statistics over one epoch of the training data; collective.

    `training_step` runs under autocast on every batch, without a backward pass, and the modes of
    submodules are not changed. Autograd is on, so that it may compute gradients, such as for a
    gradient penalty. Layers in eval mode, and layers that `training_step` does not use, keep their
    statistics. `log` does nothing. RNG states, other buffers and the states of metric objects are
    restored.

    Args:
        run: The fit.

    Raises:
        ValueError: See `require_readable`.
    """
    require_readable(run)
    norms = _trained_norms(run.module)
    if not norms:
        return
    # The forward pass of SyncBatchNorm is collective: it needs a batch on every rank.
    is_collective = any(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    before = [[buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in norms]
    epoch_iterator = run.epoch_iterator.another()
    # Independent of the RNG state, since a resumed run may call this at another point.
    seed = mix(run.epoch_iterator.seed, run.counters.epoch, run.rank)
    generators = of_module(run)
    with (
        kept_buffers(run.module, besides=set(norms)),
        kept_metrics(run.module),
        _cumulative(norms),
        isolated_rng(seed),
        isolated_generators(generators, mix(seed, 1), equal(generators)),
        run.metrics.muted(),
        epoch_iterator.isolated_epoch(run.counters.epoch),
        closing(run.device_transfer.global_batches(epoch_iterator)) as global_batches,
    ):
        for batch_idx, current in enumerate(global_batches):
            if current.present and (current.batches == run.world_size or not is_collective):
                batch, _ = items_of(current)
                with run.precision.autocast():
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
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the states of a module's metric objects on exit; they are not buffers."""
    before = metric_states(module)
    try:
        yield
    finally:
        put_metrics_back(before)
