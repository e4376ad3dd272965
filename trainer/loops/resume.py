"""Load the state of a fit from a checkpoint; `trainer.loops.snapshot` saves it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from callbacks import Callback, Interval, Progress
from trainer import checkpoint as disk
from trainer.checkpoint import gradients
from trainer.checkpoint.manifest import MANIFEST, check_form, reading
from trainer.checkpoint.restore import OPTIMIZER_FORM, dtypes_of
from trainer.checkpoint.weightfiles import read_shapes
from trainer.checkpoint.weights import own_names
from trainer.data.sampling import EpochLength
from trainer.errors import CheckpointError
from trainer.loops.accumulators import restore_accumulators
from trainer.loops.lengths import Schedule
from trainer.loops.options import keep_options, options_of, refuse_other_schedules
from trainer.loops.run import Counters, FitRun
from trainer.loops.snapshot import (
    DATA,
    MANIFEST_FORM,
    OPTIMIZER,
    RANK_FORM,
    RECORD,
    RECORD_FORM,
    STATE_FORM,
    TRAINED_NAME,
    TRAINER,
    data_of,
    has_state,
    named_gradients,
)
from trainer.loops.switches import load_switches
from trainer.module import TrainModule
from trainer.optim.groups import restore_groups
from trainer.optim.optimizer import parameters_of
from trainer.optim.state import load_state
from trainer.rng import isolated_rng, mix, rng_state
from trainer.state import PartialState

logger = logging.getLogger(__name__)

_UNFIT = "cannot be restored"


def load_datamodule(datamodule: Any, path: Path) -> None:
    """Restore a datamodule from a checkpoint that holds its state; collective.

    Nothing is done for a datamodule without `state_dict` and `load_state_dict`.

    Args:
        datamodule: The user's datamodule, or None.
        path: The checkpoint.

    Raises:
        CheckpointError: The state cannot be read, or `load_state_dict` failed; raised on all ranks.
    """

    def load() -> None:
        files = disk.read_manifest(path)["files"]
        if f"{DATA}.json" not in files:
            return
        state = disk.load_tree(path, DATA, files, dict)
        if type(datamodule).__qualname__ in state:
            datamodule.load_state_dict(state[type(datamodule).__qualname__])
        else:
            logger.warning(
                "%s holds the state of a datamodule %s, which is not used.", path, *state
            )

    if has_state(datamodule):
        disk.together(f"Restoring the datamodule from {path}", load, PartialState())


def load_run(
    run: FitRun, path: Path, *, trainer: Any, callbacks: Sequence[Callback], stays_stopped: bool
) -> int | None:
    """Restore a fit from a checkpoint.

    Args:
        run: The fit at its start.
        path: The checkpoint.
        trainer: Passed to the callbacks' ``on_load_checkpoint``.
        callbacks: The callbacks, whose states are restored.
        stays_stopped: Whether a run that had decided to stop (such as by `EarlyStopping`) stays
            stopped. False lets it train on.

    Returns:
        The length of the local record at that checkpoint in bytes; None if unknown.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not match the module, the optimizers,
            the data or the number of processes.
    """
    manifest = disk.verify(path)
    if manifest.get("weights_only"):
        raise CheckpointError(
            f"{path} holds only weights, from which no run can resume. Start a new run with them: "
            "pass its path as ckpt_path, in another project_dir."
        )
    saved = read_saved(path, manifest)
    state = saved.state
    trained = set(map(id, parameters_of(run.optimizers)))
    trained &= set(map(id, run.module.parameters()))
    run.module.on_load_checkpoint(state["extra"])  # before the weights: it may resize buffers
    if not trained <= set(map(id, run.module.parameters())):
        raise CheckpointError(
            f"on_load_checkpoint of {type(run.module).__name__} has replaced parameters that are "
            "trained, but the optimizers have the old ones: create them in __init__ or "
            "configure_model. Buffers and frozen parameters may be replaced."
        )
    file = path / disk.WEIGHTS_NAME
    weights = disk.load_weights(file)
    disk.load_into(run.module, weights, where=file)
    if "switches" in state:  # checkpoints of earlier releases do not have it
        load_switches(run.module, run.begun, state["switches"], tell=run.rank == 0)
    apart = path / TRAINED_NAME
    if differs := TRAINED_NAME in manifest["files"]:
        weights = disk.load_weights(apart)
    with reading(path / f"{OPTIMIZER}.json", _UNFIT):
        _restore_optimizers(run, path, saved, weights)
    restored = options_of(run.optimizer_names, run.optimizers, run.schedulers)
    keep_options(run.options, state.get("options", {}), restored, tell=run.rank == 0)
    with reading(path / f"{TRAINER}.json", _UNFIT):
        run.precision.load_state_dict(state["scaler"])
        _restore_counters(run, state)
    for callback in callbacks:
        if callback.state_key in state["callbacks"]:
            with reading(f"The state of {callback.state_key} in {path}", _UNFIT):
                callback.load_state_dict(state["callbacks"][callback.state_key])
    if differs:
        disk.load_into(run.module, weights, where=apart)
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, run.module, state["extra"])
    with reading(f"The states of the processes in {path}", _UNFIT):
        _restore_ranks(run, path, saved.ranks)
    run.stop_now = stays_stopped and state["should_stop"]
    run.unfinished = state["unfinished"]
    run.hooks.boundary.left = state.get("boundary", [])
    run.last_logged = state["last_logged"]
    run.run_id = state["run_id"]
    _restore_epoch(run, state)  # after the callbacks' hooks, which may restore the data
    with reading(path / f"{TRAINER}.json", _UNFIT):
        for name, schedule in (("val", run.val_schedule), ("log", run.log_schedule)):
            interval, before = state["schedules"][name]
            _restore_schedule(schedule, Interval.parse(interval), Progress(**before), run)
    run.recorder.resume(saved.record.get("trackers", {}), run.counters.global_step)
    offset: int | None = saved.record["offset"]
    return offset


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The contents of a checkpoint except the weights, read and checked against the schemas.

    Attributes:
        state: The state that is equal on all ranks.
        optimizers: The optimizers' state dicts.
        ranks: The state of each rank, in the order of ranks.
        record: The length of the local record in bytes, and the run ids of the trackers.
    """

    state: dict[str, Any]
    optimizers: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    record: dict[str, Any]


def read_saved(path: Path, manifest: Mapping[str, Any], *, copy: bool = True) -> Saved:
    """Read a checkpoint except its weights, of which only the headers are read and checked.

    Args:
        path: The checkpoint, whose hashes are already verified.
        manifest: Its manifest.
        copy: See `trainer.checkpoint.tensors.read_tensors`.

    Raises:
        CheckpointError: A file is malformed, or the checkpoint is not one of a fit.
    """
    check_form(manifest, MANIFEST_FORM, path / MANIFEST)
    files = manifest["files"]

    def tree(stem: str, form: Any) -> Any:
        return disk.load_tree(path, stem, files, form, copy=copy)

    for name in {disk.WEIGHTS_NAME, TRAINED_NAME} & files.keys():
        read_shapes(path / name)
    if f"{DATA}.json" in files:
        tree(DATA, dict)
    return Saved(
        state=tree(TRAINER, STATE_FORM),
        optimizers=tree(OPTIMIZER, [OPTIMIZER_FORM]),
        ranks=[tree(disk.rank_stem(rank), RANK_FORM) for rank in range(manifest["world_size"])],
        record=tree(RECORD, RECORD_FORM),
    )


def _restore_optimizers(
    run: FitRun, path: Path, read: Saved, weights: Mapping[str, torch.Tensor]
) -> None:
    """Restore the optimizers and the schedulers.

    Args:
        run: The fit.
        path: The checkpoint, for errors.
        read: Its contents.
        weights: The saved trained weights by name, whose dtypes the optimizer states refer to.
    """
    state, optimizers = read.state, read.optimizers
    _same_number(path, "optimizers", run.optimizers, optimizers)
    _same_names(path, run.optimizer_names, state["optimizers"])
    schedulers = [entry.scheduler for entry in run.schedulers]
    for optimizer, groups in zip(run.optimizers, state["groups"], strict=True):
        restore_groups(optimizer, groups, run.module, schedulers=schedulers)
    dtypes = dtypes_of(run.module, own_names(run.module, weights))
    for optimizer, saved in zip(run.optimizers, optimizers, strict=True):
        load_state(optimizer, saved, dtypes)
    _same_number(path, "schedulers", run.schedulers, state["schedulers"])
    refuse_other_schedules(run.options, state.get("options", {}), len(run.schedulers))
    for entry, saved in zip(run.schedulers, state["schedulers"], strict=True):
        entry.scheduler.load_state_dict(saved)


def _restore_ranks(run: FitRun, path: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Restore this rank's state; if the number of processes has changed, redistribute the states.

    Args:
        run: The fit.
        path: The checkpoint, for warnings.
        ranks: The saved state of each rank.
    """
    run.feed.resume_at(ranks[0]["stream"])  # equal on all ranks
    taken_in = [rank["metrics"] for rank in ranks]
    for part in taken_in:  # decisions depend on which names were logged: equal on all ranks
        run.metrics.names.update(part["names"])
    if len(ranks) == run.world_size:
        restore_accumulators(run.metrics, run.module, [taken_in[run.rank]])
    else:
        restore_accumulators(run.metrics, run.module, taken_in, holds=run.rank == 0)
    _restore_gradients(run, [rank.get("gradients", {}) for rank in ranks])
    run.engine.load_state_dicts(ranks)
    if run.rank < len(ranks):
        run.saved_rng = ranks[run.rank]["rng"]
    else:
        logger.warning(
            "%s was saved by fewer processes: rank %d starts with freshly seeded generators.",
            path,
            run.rank,
        )
        with isolated_rng(mix(run.feed.seed, run.rank, run.counters.global_step) % 2**32):
            run.saved_rng = rng_state()


def _restore_gradients(run: FitRun, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore accumulated gradients, which only manual optimisation has at an update boundary."""
    if run.module.automatic_optimization:
        return
    named = named_gradients(run)
    here = gradients.given(ranks, run.rank, run.world_size)
    for note in gradients.check(named, here):
        logger.warning(note)
    gradients.put(named, here)


def _restore_counters(run: FitRun, state: dict[str, Any]) -> None:
    counters = Counters(**state["counters"])
    counters.rounds = -(-counters.epoch_batches // run.world_size)
    run.counters.__dict__.update(vars(counters))
    run.agreement.items_seen = state["items_seen"]
    run.agreement.latest = run.agreement.latest._replace(seconds=counters.seconds)
    if run.guard is not None and state["guard"] is not None:
        run.guard.load_state_dict(state["guard"])
    run.weighting.reference = state["reference"]
    run.recorder.latest.update(state["latest"])
    run.recorder.updates.update(state["updates"])
    run.recorder.validated.update(state.get("validated", {}))  # missing in earlier releases


def _restore_epoch(run: FitRun, state: Mapping[str, Any]) -> None:
    """Continue the saved epoch, with the length that it had when it began.

    Raises:
        CheckpointError: The batch size, the number of samples or the number of batches differs from
            the saved one: samples would be skipped or seen twice.
    """
    if run.counters.epoch_batches == 0 or run.counters.epoch_complete:
        return
    run.feed.mark = state.get("order")  # missing in checkpoints of earlier releases
    if "length" in state:  # likewise
        run.feed.resume_length(run.counters.epoch, EpochLength(*state["length"]))
    saved = [*state["data"], None][:3]  # an earlier release did not save the number of batches
    with run.feed.apart(run.counters.epoch):  # the length of the data may depend on the epoch
        here = data_of(run)
        if None in (saved[2], here[2]):
            here[2] = saved[2]
        elif here != saved and run.feed.sampler is not None:
            next(iter(run.feed.sampler), None)  # it may count its batches when iteration starts
            here = data_of(run)
    of_streams = saved[1] is here[1] is None
    if here == saved or (of_streams and here[2] == saved[2] and None in (saved[0], here[0])):
        return
    raise CheckpointError(
        f"The checkpoint was saved inside an epoch in {_described(saved)}, but the training "
        f"loader now has {_described(here)}. Use the same, even with another number of "
        "processes, or resume from a checkpoint at the end of an epoch. Data that change during "
        "the run are part of its state: save and load them in on_save_checkpoint and "
        "on_load_checkpoint, or in a DataModule's state_dict and load_state_dict."
    )


def _described(data: Sequence[int | None]) -> str:
    size, samples, batches = data
    words = f"batches of {size}" if batches is None else f"{batches} batches"
    return words if samples is None else f"{words} of {samples} samples"


def _restore_schedule(schedule: Schedule, saved: Interval, before: Progress, run: FitRun) -> None:
    """Restore a schedule; if its interval has changed, it counts from the run's progress."""
    schedule.before = before if schedule.interval == saved else run.progress


def _same_number(path: Path, what: str, here: Sequence[Any], saved: Sequence[Any]) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"{path} holds {len(saved)} {what}, but configure_optimizers returned {len(here)}."
        )


def _same_names(path: Path, here: Sequence[str], saved: Sequence[str]) -> None:
    """Raise if the saved optimizers' names or their order differ from the present ones."""
    if list(here) != list(saved):
        raise CheckpointError(
            f"{path} holds the state of the optimizers {', '.join(map(repr, saved))}, but "
            f"configure_optimizers returned {', '.join(map(repr, here))}. Return the same in that "
            "order; an optimizer is named by the 'name' beside it, else by its class."
        )


def load_weights(module: TrainModule, path: Path) -> dict[str, Any]:
    """Load a module's weights from a checkpoint, and call its `on_load_checkpoint` first.

    Args:
        module: The user's module.
        path: The checkpoint.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the module.
    """
    manifest = disk.verify(path)
    files = manifest["files"]
    check_form(manifest, MANIFEST_FORM, path / MANIFEST)
    if f"{TRAINER}.json" in files:  # missing in a weights-only checkpoint
        module.on_load_checkpoint(disk.load_tree(path, TRAINER, files, {"extra": dict})["extra"])
    weights, file = disk.load_weights(path), path / disk.WEIGHTS_NAME
    disk.load_into(module, weights, where=file, strict=module.strict_loading)
    return manifest
