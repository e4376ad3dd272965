"""Save the state of a fit in a checkpoint; `trainer.loops.resume` loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from callbacks import Callback
from trackers.masking import masked
from trainer import checkpoint as disk
from trainer.checkpoint import gradients
from trainer.checkpoint.manifest import count
from trainer.checkpoint.portions import (
    Encoded,
    Portion,
    encoded_portion,
    tree_portion,
    weights_portion,
    write_portions,
)
from trainer.checkpoint.tensors import encode_tree
from trainer.errors import CheckpointError
from trainer.hparams import to_manifest
from trainer.loops.about import versions
from trainer.loops.accumulators import accumulators_of
from trainer.loops.randomness import generators_of
from trainer.loops.run import FitRun
from trainer.loops.switches import switches_of
from trainer.loops.untrained import share_untrained
from trainer.names import bare_names, bare_state_dict
from trainer.optim.groups import names_of_groups
from trainer.optim.state import state_of
from trainer.rng import is_rng_state
from trainer.state import PartialState

logger = logging.getLogger(__name__)

OPTIMIZER, TRAINER, RECORD, DATA = "optimizer", "trainer", "record", "datamodule"
# The trained weights, if model.safetensors holds other ones, such as averaged weights.
TRAINED_NAME = "trained.safetensors"

# The schemas of the saved files, see `trainer.checkpoint.manifest.check_form`. State dicts of other
# objects are opaque here: only their type, dict, is checked.
_NUMBER = (int, float)
_SWITCHES = {"frozen": [str], "evaluating": [str]}
MANIFEST_FORM = {
    **dict.fromkeys(("step", "epoch"), count),
    "world_size": lambda n: count(n) and n > 0,
    "files": {disk.WEIGHTS_NAME: dict},
}
RECORD_FORM = {"offset": (int, NoneType), "trackers?": dict}


def _are_sizes(values: Any, *numbers: int) -> bool:
    fits = isinstance(values, list) and len(values) in numbers
    return fits and all(value is None or count(value) for value in values)


STATE_FORM = {
    "run_id": str,
    "counters": {
        **dict.fromkeys(("global_step", "epoch", "epoch_batches", "validations"), count),
        **dict.fromkeys(("batches_seen", "samples_seen"), count),
        "epoch_complete": bool,
        "seconds": _NUMBER,
    },
    "items_seen": _NUMBER,
    "last_logged": count,
    "data": lambda sizes: _are_sizes(sizes, 2, 3),
    "length?": lambda sizes: _are_sizes(sizes, 2),
    "validated?": dict,
    "order?": (int, NoneType),
    "options?": dict,
    "switches?": {"begun": _SWITCHES, "now": _SWITCHES},
    **dict.fromkeys(("should_stop", "unfinished"), bool),
    "boundary?": list,
    **dict.fromkeys(("latest", "updates", "callbacks", "extra"), dict),
    "schedules": {"val": list, "log": list},
    "optimizers": [str],
    "groups": [list],
    "schedulers": [dict],
    **dict.fromkeys(("scaler", "guard"), (dict, NoneType)),
}
RANK_FORM = {
    "rng": lambda state: is_rng_state(state) and isinstance(state.get("own", {}), dict),
    "metrics": {"epochs": dict, "states": dict, "names": [str], "stepwise?": dict},
    "stream": (dict, NoneType),
    **dict.fromkeys(("communication?", "gradients?"), dict),
}


def save_run(
    run: FitRun,
    target: Path,
    *,
    trainer: Any,
    callbacks: Sequence[Callback],
    configuration: Mapping[str, Any],
    weights_only: bool = False,
    background: bool = False,
    required: bool = True,
    displaces: Sequence[Path] = (),
    on_each_node: bool = False,
) -> bool:
    """Save the state of a fit at an update boundary; collective.

    Args:
        run: The fit.
        target: The checkpoint's folder.
        trainer: Passed to the callbacks' ``on_save_checkpoint``.
        callbacks: The callbacks, whose states are saved.
        configuration: The resolved configuration, recorded in the manifest.
        weights_only: Save only the weights, from which no run can resume.
        background: Copy the state to host memory, return, and write it on another thread while
            training continues.
        required: Whether to raise if the checkpoint cannot be written; otherwise the error is
            logged.
        displaces: Checkpoints to delete once this one is committed.
        on_each_node: Whether each machine keeps a complete checkpoint, since they share no disk.

    Returns:
        Whether the checkpoint is committed, or being written in the background.

    Raises:
        CheckpointError: The state of some rank cannot be saved, or the files cannot be written.
            Raised on all ranks. An error of a background save is raised at the next update.
    """
    _settle(run)
    state = PartialState()
    extra = {} if weights_only else _told_by_hooks(run, trainer, callbacks, target)
    shared: list[Portion] = []
    own: list[Encoded] = []
    keeper = disk.keeps(state, on_each_node)

    def capture() -> Encoded | None:
        others, trained = _weights_of(run, trainer, callbacks)
        if keeper:
            shared.append(weights_portion(others))
        if weights_only:
            return None
        if keeper:
            shared.extend(_shared_portions(run, callbacks, trained, extra))
        own.append(encode_tree(_state_of_rank(run), disk.rank_stem(run.rank)))
        return own[0] if on_each_node else None

    of_all = disk.together(f"Saving {target}", capture, state, run.writer.group)
    if on_each_node:
        ranks = [(rank, each) for rank, each in enumerate(of_all) if each is not None and keeper]
    else:
        ranks = [(run.rank, each) for each in own]
    of_ranks = [encoded_portion(*each, disk.rank_stem(rank)) for rank, each in ranks]
    portions = [*shared, *of_ranks]
    needs = sum(portion.size for portion in portions)
    if not on_each_node:  # each other rank writes about as many bytes to the same disk
        needs += (run.world_size - 1) * sum(portion.size for portion in of_ranks)
    write = run.writer.copies.hold(portions) if background else write_portions(portions)
    run.writer.start(
        partial(
            disk.save_checkpoint,
            target.absolute(),  # hooks may change the working directory while it is written
            write_shared=_nothing if weights_only else _writer_of_record(run),
            write_rank=write,
            manifest=_manifest_of(run, configuration) | {"weights_only": weights_only},
            state=state,
            on_each_node=on_each_node,
            needs=needs,
            displaces=[path.absolute() for path in displaces],
        ),
        name=target,
        required=required,
        background=background,
    )
    return background or run.writer.wait()


def _settle(run: FitRun) -> None:
    """Wait for pending work, so that the state is consistent: of one update, on all ranks."""
    run.writer.wait()
    if run.guard is not None:
        run.guard.settle()  # never save weights that non-finite gradients have updated
    share_untrained(run)
    run.agreement.settle()
    run.recorder.flush()


def _told_by_hooks(
    run: FitRun, trainer: Any, callbacks: Sequence[Callback], target: Path
) -> dict[str, Any]:
    """Return what the ``on_save_checkpoint`` hooks add to the checkpoint; collective.

    Raises:
        CheckpointError: A hook failed on one of several ranks; raised on all ranks. With a single
            process, the hook's own error is raised.
    """
    extra: dict[str, Any] = {"epoch": run.counters.epoch, "global_step": run.counters.global_step}

    def ask() -> None:
        for callback in callbacks:
            callback.on_save_checkpoint(trainer, run.module, extra)
        run.module.on_save_checkpoint(extra)

    if run.world_size == 1:
        ask()
    else:
        disk.together(f"Saving {target}", ask, PartialState(), run.writer.group)
    return extra


def _shared_portions(
    run: FitRun,
    callbacks: Sequence[Callback],
    trained: Mapping[str, object] | None,
    extra: Mapping[str, Any],
) -> list[Portion]:
    """Return the state parts that are equal on all ranks, except the file of the model's weights.

    Args:
        run: The fit.
        callbacks: The callbacks, whose states are saved.
        trained: The trained weights if the model's file holds other ones, else None.
        extra: What the ``on_save_checkpoint`` hooks have added.
    """
    optimizers = [state_of(optimizer, [run.module]) for optimizer in run.optimizers]
    portions = [tree_portion(optimizers, OPTIMIZER)]
    if trained is not None:
        portions.append(weights_portion(trained, TRAINED_NAME))
    portions.append(tree_portion(_state_of(run, callbacks) | {"extra": extra}, TRAINER))
    if data := _state_of_data(run.datamodule):
        portions.append(tree_portion(data, DATA))
    return portions


def _state_of_rank(run: FitRun) -> dict[str, Any]:
    """Return the state that differs between ranks: RNG, metrics, stream position and more."""
    state = {
        "rng": generators_of(run),
        "metrics": accumulators_of(run.metrics, run.module),
        "stream": run.feed.position(),
        **run.engine.state_dict(),
    }
    if not run.module.automatic_optimization:
        run.precision.state_dict()  # rescales the gradients to the saved loss scale
        state["gradients"] = gradients.take(named_gradients(run))
    return state


def named_gradients(run: FitRun) -> dict[str, nn.Parameter]:
    """Return the parameters that may have gradients at a boundary in manual optimisation."""
    return gradients.named_parameters([run.module], run.optimizers)


def _writer_of_record(run: FitRun) -> Callable[[Path], None]:
    """Start to sync the local record to disk; return a function that waits, then saves its length.

    The function also saves the trackers' run ids, so that a resumed run continues the same tracker
    runs.
    """
    offset = run.recorder.sync()

    def write(folder: Path) -> None:
        record = {"offset": offset(), "trackers": run.recorder.run_ids}
        disk.save_tree(record, folder, RECORD)

    return write


def _nothing(_: Path) -> None:
    """Write no record file: no run resumes from a weights-only checkpoint."""


def require_space(run: FitRun, folder: Path, *, on_each_node: bool) -> None:
    """Check before the first update that the disk has space for a checkpoint; collective.

    The size of the optimizers' state is not known yet. A warning is logged if there is no space for
    twice the bytes of the trained parameters, which Adam's moments need. Uninitialised parameters
    of lazy modules are not counted.

    Args:
        run: The fit.
        folder: The folder of the checkpoints.
        on_each_node: Whether each machine keeps a complete checkpoint.

    Raises:
        CheckpointError: There is no space for the present state; raised on all ranks.
    """
    state = PartialState()

    def check() -> None:
        if not disk.keeps(state, on_each_node):
            return
        kept = [optimizer.state_dict() for optimizer in run.optimizers]
        now = weights_portion(bare_state_dict(run.module)).size + tree_portion(kept, OPTIMIZER).size
        later = now + 2 * sum(
            p.nbytes for p in run.parameters if p.requires_grad and not is_lazy(p)
        )
        disk.require_space(folder, now)
        try:
            disk.require_space(folder, later)
        except CheckpointError as error:
            logger.warning("There may not be enough space for checkpoints: %s.", error)

    disk.together(f"Checking the free space in {folder}", check, state)


def save_weights_alone(run: FitRun, target: Path, configuration: Mapping[str, Any]) -> Path:
    """Save the weights of this rank alone; not collective, for use after an error.

    Args:
        run: The fit.
        target: The checkpoint's folder.
        configuration: The resolved configuration, recorded in the manifest.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CheckpointError: The target exists and is not a checkpoint.
        OSError: The weights cannot be written.
    """
    staging = disk.open_staging(target)
    disk.save_weights(bare_state_dict(run.module), staging)
    return disk.commit(staging, target, _manifest_of(run, configuration) | {"weights_only": True})


def _weights_of(
    run: FitRun, trainer: Any, callbacks: Sequence[Callback]
) -> tuple[Mapping[str, object], Mapping[str, object] | None]:
    """Return the weights of the model's file and, if they differ, the trained weights.

    A callback such as weight averaging may give the weights for use outside this run. The trained
    weights are then saved beside them, to resume with.

    Raises:
        ValueError: More than one callback returns weights from `weights_to_save`.
    """
    asked = [(callback, callback.weights_to_save(trainer, run.module)) for callback in callbacks]
    given = [(callback.state_key, weights) for callback, weights in asked if weights is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(key for key, _ in given)} both return weights_to_save; a checkpoint "
            "can hold those of only one. Leave out the others."
        )
    others, trained = given[0][1] if given else (run.module.state_dict(), None)
    bare = dict(bare_names(run.module, others.items()))
    return bare, None if trained is None else dict(bare_names(run.module, trained.items()))


def _manifest_of(run: FitRun, configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": run.counters.global_step,
        "epoch": run.counters.epoch,
        "world_size": run.world_size,
        "run_id": run.run_id,
        "loaders": run.origin.describe(),
        "metrics": {  # only metrics of these weights, that is, of the latest update
            name: value
            for name in run.recorder.latest
            for value, update in (run.recorder.monitored(name) or (0.0, -1),)
            if update == run.counters.global_step
        },
        "versions": versions(),
        "configuration": masked(dict(configuration)),
        "hyper_parameters": to_manifest(run.module),
    }


def _state_of(run: FitRun, callbacks: Sequence[Callback]) -> dict[str, Any]:
    counters = asdict(run.counters) | {"seconds": run.progress.seconds}
    del counters["rounds"]  # depends on the number of processes
    return {
        "run_id": run.run_id,
        "counters": counters,
        "items_seen": run.agreement.items_seen,
        "reference": run.weighting.reference,
        "data": data_of(run),
        "order": run.feed.mark,
        "length": list(run.feed.length),
        "options": run.options,
        "switches": {"begun": run.begun, "now": run.ended or switches_of(run.module)},
        "should_stop": run.stop_now or run.agreement.latest.stop_votes > 0,
        "unfinished": run.unfinished,
        "boundary": run.hooks.boundary.left,
        "last_logged": run.last_logged,
        "latest": run.recorder.latest,
        "updates": run.recorder.updates,
        "validated": run.recorder.validated,
        "schedules": {
            name: [str(schedule.interval), schedule.before._asdict()]
            for name, schedule in (("val", run.val_schedule), ("log", run.log_schedule))
        },
        "optimizers": run.optimizer_names,
        "groups": [names_of_groups(optimizer, run.module) for optimizer in run.optimizers],
        "schedulers": [entry.scheduler.state_dict() for entry in run.schedulers],
        "scaler": run.precision.state_dict(),
        "guard": None if run.guard is None else run.guard.state_dict(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in callbacks},
    }


def _state_of_data(datamodule: Any) -> dict[str, Any]:
    """Return a datamodule's state under the name of its class; empty if it has none."""
    state = datamodule.state_dict() if has_state(datamodule) else None
    return {type(datamodule).__qualname__: state} if state else {}


def has_state(datamodule: Any) -> bool:
    """Return whether a datamodule's state can be saved and restored."""
    return hasattr(datamodule, "state_dict") and hasattr(datamodule, "load_state_dict")


def data_of(run: FitRun) -> list[int | None]:
    """Return what makes a position in an epoch comparable: [batch size, samples, batches].

    Each is None where unknown. The number of batches, which may change with the epoch, is given
    only for a batch sampler that has no fixed batch size.
    """
    sampler = run.feed.sampler
    if sampler is None:
        size = getattr(run.feed.loader, "batch_size", None)
        return [size if isinstance(size, int) else None, None, None]
    data, size = run.feed.dataset, sampler.batch_size
    samples = len(data) if hasattr(data, "__len__") else None
    return [size, samples, run.feed.num_all_batches if size is None else None]
