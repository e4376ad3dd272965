"""What a checkpoint of a fit holds, and how a fit is put back to it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from callbacks import Callback, Interval, Progress
from trainer import checkpoint as disk
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
from trainer.loops.accumulators import accumulators_of, restore_accumulators
from trainer.loops.lengths import Schedule
from trainer.loops.run import Counters, FitRun
from trainer.module import TrainModule
from trainer.optim.groups import names_of_groups, restore_groups
from trainer.rng import isolated_rng, mix, rng_state
from trainer.state import PartialState

logger = logging.getLogger(__name__)

OPTIMIZER, TRAINER, RECORD, DATA = "optimizer", "trainer", "record", "datamodule"
TRAINED_NAME = "trained.safetensors"  # what a run goes on with, where the weights are others


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
    """Save a fit as it stands at a boundary; collective.

    Args:
        run: The fit.
        target: The checkpoint's folder.
        trainer: Passed to the callbacks' ``on_save_checkpoint``.
        callbacks: Their state is saved.
        configuration: Recorded in the manifest.
        weights_only: Leave out what a run needs to go on.
        background: Return when everything is copied, and write while the training goes on.
        required: Raise if it cannot be written; otherwise tell it in the log.
        displaces: Checkpoints to remove once this one is committed.
        on_each_node: The machines share no disk: each keeps a whole checkpoint.

    Returns:
        Whether it is committed, or on its way.

    Raises:
        CheckpointError: On every process alike, if the state of any cannot be saved; or it could
            not be written, which for a save in the background is raised at the next update.
    """
    run.writer.wait()
    if run.guard is not None:
        run.guard.settle()  # gradients that were none have not made these weights
    run.engine.broadcast_buffers()
    run.agreement.settle()
    run.recorder.flush()
    state = PartialState()
    keeper = disk.keeps(state, on_each_node)
    shared: list[Portion] = []
    own: list[Encoded] = []
    # The error of a hook is the user's own; of several processes it must reach all.
    alone = run.world_size == 1
    extra = _extra_of(run, trainer, callbacks) if alone and not weights_only else {}

    def capture() -> Encoded | None:
        others, trained = _weights_of(run, trainer, callbacks)
        if keeper:
            shared.append(weights_portion(others))
        if weights_only:
            return None
        added = extra if alone else _extra_of(run, trainer, callbacks)
        if keeper:
            optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
            shared.append(tree_portion(optimizers, OPTIMIZER))
            if trained is not None:
                shared.append(weights_portion(trained, TRAINED_NAME))
            shared.append(tree_portion(_state_of(run, callbacks) | {"extra": added}, TRAINER))
            if data := _state_of_data(run.datamodule):
                shared.append(tree_portion(data, DATA))
        mine = {
            "rng": rng_state(),
            "metrics": accumulators_of(run.metrics, run.module),
            "stream": run.feed.position(),
        }
        own.append(encode_tree(mine, disk.rank_stem(run.rank)))
        return own[0] if on_each_node else None

    of_all = disk.together(f"Saving {target}", capture, state, run.writer.group)
    if on_each_node:
        ranks = [(rank, each) for rank, each in enumerate(of_all) if each is not None and keeper]
    else:
        ranks = [(run.rank, each) for each in own]
    of_ranks = [encoded_portion(*each, disk.rank_stem(rank)) for rank, each in ranks]
    portions = [*shared, *of_ranks]
    write = run.writer.copies.hold(portions) if background else write_portions(portions)
    offset = run.recorder.sync()

    def write_record(folder: Path) -> None:
        if not weights_only:
            disk.save_tree({"offset": offset()}, folder, RECORD)

    run.writer.start(
        partial(
            disk.save_checkpoint,
            target,
            write_shared=write_record,
            write_rank=write,
            manifest=_manifest_of(run, configuration) | {"weights_only": weights_only},
            state=state,
            on_each_node=on_each_node,
            needs=sum(p.size for p in shared) + run.world_size * sum(p.size for p in of_ranks),
            displaces=displaces,
        ),
        required=required,
        background=background,
    )
    return background or run.writer.wait()


def require_space(run: FitRun, folder: Path, *, on_each_node: bool) -> None:
    """See, before the first update, that a checkpoint will fit on the disk; collective.

    What the optimizers will keep is not known yet: too little for twice the trained parameters,
    Adam's moments, is told in the log.

    Raises:
        CheckpointError: On all processes alike, if not even what there is by now would fit.
    """
    state = PartialState()

    def check() -> None:
        if not disk.keeps(state, on_each_node):
            return
        kept = [optimizer.state_dict() for optimizer in run.optimizers]
        now = weights_portion(run.module.state_dict()).size + tree_portion(kept, OPTIMIZER).size
        later = now + 2 * sum(p.nbytes for p in run.parameters if p.requires_grad)
        disk.require_space(folder, now)
        try:
            disk.require_space(folder, later)
        except CheckpointError as error:
            logger.warning("The space for checkpoints may be too little: %s.", error)

    disk.together(f"Looking for space in {folder}", check, state)


def save_weights_alone(run: FitRun, target: Path, configuration: Mapping[str, Any]) -> Path:
    """Save the weights as this process has them; not collective, for one that has failed.

    Raises:
        CheckpointError: The target is something else than a checkpoint.
        OSError: The disk refuses.
    """
    staging = disk.open_staging(target)
    disk.save_weights(run.module.state_dict(), staging)
    return disk.commit(staging, target, _manifest_of(run, configuration) | {"weights_only": True})


def _weights_of(
    run: FitRun, trainer: Any, callbacks: Sequence[Callback]
) -> tuple[Mapping[str, object], Mapping[str, object] | None]:
    """The weights for others, and those for going on where they differ.

    Raises:
        ValueError: Two callbacks have some to save.
    """
    asked = [(callback, callback.weights_to_save(trainer, run.module)) for callback in callbacks]
    given = [(callback.state_key, weights) for callback, weights in asked if weights is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(key for key, _ in given)} both return weights_to_save; a checkpoint "
            "has room for those of one. Leave out the others."
        )
    return given[0][1] if given else (run.module.state_dict(), None)


def _extra_of(run: FitRun, trainer: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What the callbacks and the module add by their hooks."""
    extra: dict[str, Any] = {"epoch": run.counters.epoch, "global_step": run.counters.global_step}
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, run.module, extra)
    run.module.on_save_checkpoint(extra)
    return extra


def _manifest_of(run: FitRun, configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": run.counters.global_step,
        "epoch": run.counters.epoch,
        "world_size": run.world_size,
        "run_id": run.run_id,
        "metrics": {  # of these very weights, not of earlier ones
            name: value
            for name, value in run.recorder.latest.items()
            if run.recorder.updates[name] == run.counters.global_step
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "configuration": dict(configuration),
        "hyper_parameters": to_manifest(run.module),
    }


def _state_of(run: FitRun, callbacks: Sequence[Callback]) -> dict[str, Any]:
    counters = asdict(run.counters) | {"seconds": run.progress.seconds}
    del counters["rounds"]  # they are those of so many processes
    return {
        "run_id": run.run_id,
        "counters": counters,
        "items_seen": run.agreement.items_seen,
        "reference": run.weighting.reference,
        "data_seed": run.feed.seed,
        "data": _data_of(run),
        "should_stop": run.stop_now,
        "unfinished": run.unfinished,
        "last_logged": run.last_logged,
        "latest": run.recorder.latest,
        "updates": run.recorder.updates,
        "schedules": {
            name: [str(schedule.interval), asdict(schedule.before)]
            for name, schedule in (("val", run.val_schedule), ("log", run.log_schedule))
        },
        "groups": [names_of_groups(optimizer, run.module) for optimizer in run.optimizers],
        "schedulers": [entry.scheduler.state_dict() for entry in run.schedulers],
        "scaler": run.precision.state_dict(),
        "guard": None if run.guard is None else run.guard.state_dict(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in callbacks},
    }


def _state_of_data(datamodule: Any) -> dict[str, Any]:
    """What a datamodule says of itself, under its class's name; nothing if it says nothing."""
    state = datamodule.state_dict() if _has_state(datamodule) else None
    return {type(datamodule).__qualname__: state} if state else {}


def _has_state(datamodule: Any) -> bool:
    return hasattr(datamodule, "state_dict") and hasattr(datamodule, "load_state_dict")


def load_datamodule(datamodule: Any, path: Path) -> None:
    """Put a datamodule back to a checkpoint, if that has a state for it; collective.

    Raises:
        CheckpointError: On all processes alike: it cannot be read, or the datamodule refused it.
    """
    path = disk.locate(path)

    def load() -> None:
        if f"{DATA}.json" not in disk.read_manifest(path)["files"]:
            return
        state = disk.load_tree(path, DATA)
        if type(datamodule).__qualname__ in state:
            datamodule.load_state_dict(state[type(datamodule).__qualname__])
        else:
            logger.warning("%s holds the state of a datamodule %s, not used.", path, *state)

    if _has_state(datamodule):
        disk.together(f"Restoring the datamodule from {path}", load, PartialState())


def load_run(
    run: FitRun, path: Path, *, trainer: Any, callbacks: Sequence[Callback], stays_stopped: bool
) -> int | None:
    """Put a fit back to a checkpoint.

    Args:
        run: The fit.
        path: The checkpoint.
        trainer: Passed to the callbacks' ``on_load_checkpoint``.
        callbacks: Their state is restored.
        stays_stopped: A run that had decided to stop does not go on.

    Returns:
        Where the local record ended then; None if it was not known.

    Raises:
        CheckpointError: The checkpoint is damaged or does not fit the module, the optimizers or
            the number of processes.
    """
    path = disk.locate(path)
    if disk.verify(path).get("weights_only"):
        raise CheckpointError(
            f"{path} holds weights alone, which no run can go on from. Begin a new one with them: "
            "load them with load_from_checkpoint, and fit without ckpt_path."
        )
    disk.load_into(run.module, disk.load_weights(path), where=path / disk.WEIGHTS_NAME)
    state: dict[str, Any] = disk.load_tree(path, TRAINER)
    _same_number(path, "optimizers", run.optimizers, optimizers := disk.load_tree(path, OPTIMIZER))
    schedulers = [entry.scheduler for entry in run.schedulers]
    for optimizer, groups in zip(run.optimizers, state["groups"], strict=True):
        restore_groups(optimizer, groups, run.module, schedulers=schedulers)
    for optimizer, saved in zip(run.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(saved)
    _same_number(path, "schedulers", run.schedulers, state["schedulers"])
    for entry, saved in zip(run.schedulers, state["schedulers"], strict=True):
        entry.scheduler.load_state_dict(saved)
    run.precision.load_state_dict(state["scaler"])
    _restore_counters(run, state)
    for callback in callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    if (trained := path / TRAINED_NAME).exists():
        disk.load_into(run.module, disk.load_weights(trained), where=trained)
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, run.module, state["extra"])
    run.module.on_load_checkpoint(state["extra"])
    saved_ranks = range(disk.read_manifest(path)["world_size"])
    ranks = [disk.load_tree(path, disk.rank_stem(rank)) for rank in saved_ranks]
    run.feed.resume_at(ranks[0]["stream"])  # it is the same for all
    taken_in = [rank["metrics"] for rank in ranks]
    if len(ranks) == run.world_size:
        restore_accumulators(run.metrics, run.module, [taken_in[run.rank]])
    elif run.rank == 0:
        restore_accumulators(run.metrics, run.module, taken_in)
    if run.rank < len(ranks):
        run.saved_rng = ranks[run.rank]["rng"]
    else:
        logger.warning(
            "%s was saved by fewer processes: rank %d begins with generators of its own.",
            path,
            run.rank,
        )
        with isolated_rng(mix(run.feed.seed, run.rank, run.counters.global_step) % 2**32):
            run.saved_rng = rng_state()
    run.stop_now = stays_stopped and state["should_stop"]
    run.unfinished = state["unfinished"]
    run.last_logged = state["last_logged"]
    run.run_id = state["run_id"]
    offset: int | None = disk.load_tree(path, RECORD)["offset"]
    return offset


def _restore_counters(run: FitRun, state: dict[str, Any]) -> None:
    counters = Counters(**state["counters"])
    counters.rounds = -(-counters.epoch_batches // run.world_size)
    run.counters.__dict__.update(vars(counters))
    run.agreement.items_seen = state["items_seen"]
    run.agreement.latest = replace(run.agreement.latest, seconds=counters.seconds)
    _refuse_other_data(run, state["data"])
    if run.guard is not None and state["guard"] is not None:
        run.guard.load_state_dict(state["guard"])
    run.weighting.reference = state["reference"]
    for feed in (run.feed, *run.val_feeds):
        feed.reseed(state["data_seed"])
    run.recorder.latest.update(state["latest"])
    run.recorder.updates.update(state["updates"])
    for name, schedule in (("val", run.val_schedule), ("log", run.log_schedule)):
        interval, before = state["schedules"][name]
        _restore_schedule(schedule, Interval.parse(interval), Progress(**before), run)


def _data_of(run: FitRun) -> list[int | None]:
    """What the place inside an epoch is counted by: the batch size and the number of samples."""
    sampler = run.feed.sampler
    if sampler is None:
        return [None, None]
    data = run.feed.loader.dataset
    return [sampler.batch_size, len(data) if hasattr(data, "__len__") else None]


def _refuse_other_data(run: FitRun, saved: list[int | None]) -> None:
    """Refuse to go on inside an epoch of other batches: samples would be left out or seen twice.

    Raises:
        CheckpointError: The batch size or the number of samples is another.
    """
    inside = run.counters.epoch_batches > 0 and not run.counters.epoch_complete
    if inside and (here := _data_of(run)) != saved:
        raise CheckpointError(
            f"The checkpoint lies inside an epoch of {saved[1]} samples in batches of {saved[0]}, "
            f"but the training loader has {here[1]} in batches of {here[0]}. Go on with the same, "
            "also where the number of processes is another, or from a checkpoint at the end of an "
            "epoch."
        )


def _restore_schedule(schedule: Schedule, saved: Interval, before: Progress, run: FitRun) -> None:
    """A schedule whose interval was changed since counts from where the run stands."""
    schedule.before = before if schedule.interval == saved else run.progress


def _same_number(path: Path, what: str, here: Sequence[Any], saved: Sequence[Any]) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"{path} holds {len(saved)} {what}, but configure_optimizers returned {len(here)}."
        )


def load_weights(module: TrainModule, path: Path) -> None:
    """Put a module's weights back to a checkpoint's.

    Raises:
        CheckpointError: The checkpoint is damaged or does not fit the module.
    """
    path = disk.locate(path)
    disk.verify(path)
    disk.load_into(module, disk.load_weights(path), where=path / disk.WEIGHTS_NAME)
