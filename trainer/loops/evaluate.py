"""The evaluation loop of validation and test.

Every sample counts once. Metrics are (sum, count) pairs, summed over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.data.epoch_iterator import EpochIterator
from trainer.distributed.objects import all_gather_object
from trainer.loops.buffers import isolated_dummy
from trainer.loops.device_transfer import batch_hooks, items_of
from trainer.loops.state import FitRun, Run
from trainer.metrics import Scope
from trainer.metrics.computing import computing
from trainer.tree import detach

# The phases; these words are part of the names of hooks and steps.
VALIDATION, TEST, PREDICT = "validation", "test", "predict"

ENDED_EARLY = (
    "A map-style dataset that raises StopIteration ends the epoch only on its process. Return "
    "the number of samples from __len__, or make it an IterableDataset, which ends on all "
    "processes alike."
)


class EvaluationAbandoned(Exception):
    """Raised on all ranks between two batches, after one of them received the exit signal."""


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put the module in eval mode under `no_grad`; restore the mode of every submodule on exit."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def buffers_kept_if_abandoned(module: nn.Module) -> Iterator[None]:
    """Restore the buffers' values if an exit signal ends the evaluation inside.

    Values are copied into the present buffers instead of restoring buffer objects, since a callback
    such as weight averaging may have swapped buffers, and swaps them back later.
    """
    before = {n: buffer.clone() for n, buffer in module.named_buffers() if not is_lazy(buffer)}
    try:
        yield
    except EvaluationAbandoned:
        for name, buffer in module.named_buffers():
            value = before.get(name, buffer)
            # Unchanged buffers are left alone: an expanded tensor cannot be written to.
            if buffer.shape == value.shape and not torch.equal(buffer, value):
                buffer.copy_(value)
        raise


def evaluate(run: Run, phase: str) -> list[dict[str, float]]:
    """Evaluate the module on the `Run.eval_iterators`, and record what it logged; collective.

    The module is called without the DDP wrapper. If only other ranks have a batch, this rank runs a
    dummy batch, since the step may be collective; see `trainer.engines.lockstep`. Hooks are called
    in the order that the docstring of `callbacks.Callback` shows.

    Args:
        run: The run.
        phase: ``"validation"`` or ``"test"``.

    Returns:
        The metrics of each loader by recorded name; see `by_loader`.

    Raises:
        EvaluationAbandoned: A rank received the exit signal, in a fit.
        ValueError: A loader gave no batch, or ended on some ranks before the others.
    """
    hooks, metrics, epoch_iterators = run.hooks, run.metrics, run.eval_iterators
    scope_before, batch_before = metrics.scope, run.batch_idx
    run.batch_idx = 0
    with evaluation_mode(run.module):
        metrics.scope = Scope(phase, None)
        metrics.begin_epoch_values()  # no longer logs for the training batch
        getattr(hooks, f"on_{phase}_start_callbacks")()
        fits = isinstance(run, FitRun)  # which an exit signal saves
        with buffers_kept_if_abandoned(run.module) if fits else nullcontext():
            getattr(hooks, f"on_{phase}_start_module")()
            getattr(hooks, f"on_{phase}_epoch_start")()
            metrics.scope = Scope(phase, False)
            global_batches = [
                evaluate_loader(run, phase, epoch_iterator, index, several=len(epoch_iterators) > 1)
                for index, epoch_iterator in enumerate(epoch_iterators)
            ]
        check_all_have_batches(run, phase, global_batches)
        read = record_epoch(run, phase)
        getattr(hooks, f"on_{phase}_end")()
    metrics.scope, run.batch_idx = scope_before, batch_before
    return by_loader(read, len(epoch_iterators), metrics.loader_of)


def record_epoch(run: Run, phase: str) -> dict[str, float]:
    """Call the epoch-end hooks of a phase and record what was logged over the epoch; collective.

    The values are reduced after the module's hook and before those of the callbacks, which can read
    them. Values that callbacks log are reduced and recorded after their hooks, even if this rank
    has no callbacks: a progress bar may exist on one rank only.

    Returns:
        The recorded values by name; none in a sanity check.
    """
    metrics, counters, read = run.metrics, run.counters, dict[str, float]()
    for by_callbacks in (False, True):
        hook = f"on_{phase}_epoch_end_{'callbacks' if by_callbacks else 'module'}"
        metrics.scope = Scope(phase, None, by_callbacks)
        metrics.begin_epoch_values()
        owners = run.hooks.attributes_of_callbacks() if by_callbacks else ()
        with computing(run.module, *owners, counts=run.engine.parallel.is_log_primary):
            getattr(run.hooks, hook)()
        values = metrics.reduce_epoch(metrics.scope)
        read |= run.recorder.record(values, step=counters.global_step, epoch=counters.epoch)
    metrics.scope = None  # already reduced: a later value would count for the next epoch
    metrics.reset_objects()
    return read


def evaluate_loader(
    run: Run, phase: str, epoch_iterator: EpochIterator, index: int, *, several: bool
) -> int:
    """Evaluate every batch of one loader.

    Args:
        run: The run.
        phase: ``"validation"`` or ``"test"``.
        epoch_iterator: The epoch iterator of the loader.
        index: The index of the loader.
        several: Whether there are several loaders, so that steps and hooks take the index.

    Returns:
        The number of global batches until this rank's data ended.
    """
    step = run.bare_step(f"{phase}_step")
    suffix = f"/dataloader_idx_{index}" if several else ""
    read_here, aligned = 0, epoch_iterator.num_global_batches is not None
    with (
        run.engine.evaluating(),
        epoch_iterator.isolated_epoch(run.counters.epoch),
        closing(run.device_transfer.global_batches(epoch_iterator, index)) as global_batches,
    ):
        for batch_idx, current in enumerate(global_batches):
            if run.should_end(batch_idx, aligned=aligned):
                raise EvaluationAbandoned
            read_here += not current.ended
            run.batch_idx = batch_idx
            batch, items = items_of(current)
            where = (batch_idx, index) if several else (batch_idx,)
            if not current.present:
                evaluate_dummy(run, step, batch, where)
                continue
            run.metrics.begin_batch(items, suffix)
            hooks = batch_hooks(run.hooks, phase, epoch_iterator, current)
            getattr(hooks, f"on_{phase}_batch_start")(batch, *where)
            with run.precision.autocast():
                outputs = step(batch, *where)
            getattr(hooks, f"on_{phase}_batch_end")(outputs, batch, *where)
            run.engine.mark_step()
    return read_here


def evaluate_dummy(run: Run, step: Callable[..., Any], batch: Any, where: tuple[int, ...]) -> None:
    """Run a step on a dummy batch, or do nothing if this rank's data has no batch at all."""
    if batch is not None:
        with isolated_dummy(run):
            step(detach(batch), *where)


def check_all_have_batches(run: Run, phase: str, global_batches: list[int]) -> None:
    """Raise if a loader gave no batch, or ended on some ranks before the others; collective.

    Args:
        run: The run.
        phase: ``"validation"`` or ``"test"``.
        global_batches: The number of global batches that this rank had of each loader. Loaders may
            be known to be empty.

    Raises:
        ValueError: There was no batch, or samples are missing; raised on all ranks.
    """
    of_all = all_gather_object(global_batches) if run.world_size > 1 else [global_batches]
    for index, of_loader in enumerate(zip(*of_all, strict=True)):
        which = f"The {phase} loader number {index}"
        if ended := [str(rank) for rank, number in enumerate(of_loader) if number < max(of_loader)]:
            raise ValueError(
                f"{which} ended in epoch {run.counters.shown_epoch} on rank {', '.join(ended)} "
                f"before the others. {ENDED_EARLY}"
            )
        if of_loader[0] == 0 and run.eval_iterators[index].num_batches != 0:
            raise ValueError(
                f"{which} gave no batch. Check its dataset; an iterator can be read only once, so "
                "pass an object that can be iterated again."
            )


def by_loader(
    values: dict[str, float], epoch_iterators: int, loader_of: Mapping[str, str]
) -> list[dict[str, float]]:
    """Return one dict of values per loader; values logged outside the steps are in every dict.

    Args:
        values: All values by name; with several loaders, ``/dataloader_idx_N`` ends the names.
        epoch_iterators: The number of loaders.
        loader_of: The loader suffix of values logged with ``add_dataloader_idx=False``, by name.
    """
    if epoch_iterators == 1:
        return [values]
    suffixes = tuple(f"/dataloader_idx_{index}" for index in range(epoch_iterators))
    whose = {name: name + loader_of.get(name, "") for name in values}
    return [
        {
            name: value
            for name, value in values.items()
            if whose[name].endswith(suffix) or not whose[name].endswith(suffixes)
        }
        for suffix in suffixes
    ]
