"""Saving a fit in a checkpoint, and restoring it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from callbacks import Callback, Interval, Progress
from trackers.redaction import redact
from trainer.checkpoint import gradients
from trainer.checkpoint.accelerator_state import dtypes_of
from trainer.checkpoint.loading import load_into
from trainer.checkpoint.parts import (
    TRAINED_NAME,
    Encoded,
    Reader,
    StatePart,
    encoded_part,
    section_of,
    shards_part,
    tree_part,
    weights_part,
    write_parts,
)
from trainer.checkpoint.save import (
    check_space,
    is_writer_rank,
    run_on_all_ranks,
    save_checkpoint,
)
from trainer.checkpoint.serialization import check_weight, encode_tree, save_tree
from trainer.checkpoint.sharded_state import ShardedTensor, Shards, resharded, state_like
from trainer.checkpoint.storage import (
    commit,
    open_staging,
    rank_stem,
    read_manifest,
    reading,
)
from trainer.checkpoint.weights import WEIGHTS_NAME, own_names, save_weights
from trainer.data.sampler import EpochLength
from trainer.engines.base import Engine
from trainer.errors import CheckpointError, module_logger
from trainer.hparams import to_manifest
from trainer.loops.buffers import sync_buffers
from trainer.loops.config import Schedule
from trainer.loops.module_state import (
    accumulators_of,
    frozen_and_eval_flags,
    generators_of,
    load_switches,
    plain_attributes,
    restore_accumulators,
    set_attributes,
)
from trainer.loops.run_metadata import versions
from trainer.loops.state import Counters, FitRun
from trainer.module import TrainModule, Weights
from trainer.names import bare_names, bare_state_dict
from trainer.optim.fingerprint import check_schedules, keep_options, options_of
from trainer.optim.groups import names_of_groups, restore_groups
from trainer.optim.optimizer import parameters_of
from trainer.optim.schedule_free import evaluation_weights, schedule_free
from trainer.optim.state import load_state, state_of
from trainer.rng import isolated_rng, mix, rng_state
from trainer.state import PartialState
from trainer.tree import leaves

logger = module_logger(__name__)

OPTIMIZER, TRAINER, RECORD, DATA = "optimizer", "trainer", "record", "datamodule"


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
    links: Mapping[Path, bool] | None = None,
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
        links: Symlinks to make (True), or to remove (False), once the checkpoint is committed.
        displaces: Checkpoints to delete then.
        on_each_node: Whether each machine keeps a complete checkpoint, since they share no disk.

    Returns:
        Whether the checkpoint is committed, or being written in the background.

    Raises:
        CheckpointError: The state of some rank cannot be saved, or the files cannot be written.
            Raised on all ranks. An error of a background save is raised at the next update.
    """
    _settle(run)
    state = PartialState()
    extra, edited = _state_from_hooks(run, trainer, callbacks, target, weights_only)
    shared: list[StatePart] = []
    own: list[Encoded] = []
    is_writer = is_writer_rank(state, on_each_node)
    mesh = run.engine.parallel.mesh
    shards = None if mesh is None else Shards(run.rank, mesh)
    gathered, optimizers = _gathered(run, weights_only)

    def capture() -> Encoded | None:
        others, trained = edited or _weights_of(run, trainer, callbacks, gathered)
        if shards is not None:
            shards.add_weights(others)
        elif is_writer:
            shared.append(weights_part(others))
        if weights_only:
            if extra:
                part = tree_part({"extra": extra}, TRAINER, shards)
                shared.extend([part] if is_writer else [])
            return None
        if is_writer or shards is not None:
            parts = _shared_parts(run, callbacks, trained, extra, shards, optimizers)
            shared.extend(parts if is_writer else ())
        own.append(encode_tree(_state_of_rank(run), rank_stem(run.rank)))
        return own[0] if on_each_node else None

    of_all = run_on_all_ranks(f"Saving {target}", capture, state, run.saving.writer.group)
    if on_each_node:
        ranks = [(rank, each) for rank, each in enumerate(of_all) if each is not None and is_writer]
    else:
        ranks = [(run.rank, each) for each in own]
    of_ranks = [encoded_part(*each, rank_stem(rank)) for rank, each in ranks]
    if shards is not None:
        of_ranks.append(shards_part(shards))
    parts = [*shared, *of_ranks]
    needs = sum(part.size for part in parts)
    if not on_each_node:  # each other rank writes about as many bytes to the same disk
        needs += (run.world_size - 1) * sum(part.size for part in of_ranks)
    write = run.saving.writer.copies.hold(parts) if background else write_parts(parts)
    write_record = None if weights_only else _writer_of_record(run)

    def write_own(folder: Path) -> Sequence[str]:
        files = write(folder)
        if is_writer and write_record is not None:
            write_record(folder)
        return files

    manifest = _manifest_of(run, configuration) | {"weights_only": weights_only}
    run.saving.writer.start(
        partial(
            save_checkpoint,
            target.absolute(),  # hooks may change the working directory while it is written
            write_own,
            manifest=lambda: manifest,
            state=state,
            on_each_node=on_each_node,
            needs=needs,
            links={path.absolute(): wanted for path, wanted in (links or {}).items()},
            displaces=[path.absolute() for path in displaces],
        ),
        name=target,
        required=required,
        background=background,
    )
    return background or run.saving.writer.wait()


def _gathered(run: FitRun, weights_only: bool) -> tuple[Mapping[str, Any] | None, list[Any] | None]:
    """Return the weights and the optimizers' states if the engine gathers them; collective."""
    if not run.engine.full_state_on_rank0:
        return None, None
    optimizers = [] if weights_only else run.optim.optimizers
    states = [state_of(each, [run.module]) for each in optimizers]
    return run.engine.full_state_dict(run.module), states


def _settle(run: FitRun) -> None:
    """Wait for pending work, so that the state is consistent: of one update, on all ranks."""
    run.saving.writer.wait()
    if run.optim.guard is not None:
        run.optim.guard.read_pending()  # never save weights that non-finite gradients have updated
    sync_buffers(run)
    run.step_sync.read_pending()
    run.recorder.flush()


def _state_from_hooks(
    run: FitRun,
    trainer: Any,
    callbacks: Sequence[Callback],
    target: Path,
    weights_only: bool,
) -> tuple[dict[str, Any], Weights | None]:
    """Return what the ``on_save_checkpoint`` hooks add to the checkpoint; collective.

    Where they have changed the weights, return these too; see `_weights_of`.

    Raises:
        CheckpointError: A hook failed on one of several ranks; raised on all ranks. With a single
            process, the hook's own error is raised.
    """
    extra: dict[str, Any] = {}
    edited: Weights | None = None

    def call_hooks(checkpoint: dict[str, Any]) -> None:
        for callback in () if weights_only else callbacks:
            callback.on_save_checkpoint(trainer, run.module, checkpoint)
        run.module.on_save_checkpoint(checkpoint)

    def ask() -> list[str]:
        nonlocal extra, edited
        extra, edited = run.module._call_on_save_checkpoint(
            {"epoch": run.counters.epoch, "global_step": run.counters.global_step},
            call_hooks,
            None
            if run.engine.full_state_on_rank0
            else partial(_weights_of, run, trainer, callbacks, None),
            weights_only=weights_only,
        )
        return [] if edited is None else sorted(edited[0])

    if run.world_size == 1:
        ask()
    else:
        group = run.saving.writer.group
        names = run_on_all_ranks(f"Saving {target}", ask, PartialState(), group)
        # Of whole weights only the writer's count; rank_zero_only may stand above a hook.
        if run.engine.parallel.mesh is not None and any(each != names[0] for each in names):
            raise CheckpointError(
                f"Saving {target} failed: on_save_checkpoint left other names in "
                'checkpoint["state_dict"] on some processes. Make the same changes on all.'
            )
    return extra, edited


def apply_edits(
    edited: Mapping[str, Any], before: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the changes of a hook to other weights of the same names.

    Args:
        edited: Weights after the hook.
        before: The same before it.
        others: What is left out or renamed there is so here; what is new there is taken. A copy
            under its name counts as the same weight.
    """
    names = {id(value): name for name, value in before.items()}
    return {name: others.get(names.get(id(value), name), value) for name, value in edited.items()}


def _shared_parts(
    run: FitRun,
    callbacks: Sequence[Callback],
    trained: Mapping[str, object] | None,
    extra: Mapping[str, Any],
    shards: Shards | None,
    optimizers: list[Any] | None,
) -> list[StatePart]:
    """Return the state parts that are equal on all ranks, except the file of the model's weights.

    Args:
        run: The fit.
        callbacks: The callbacks, whose states are saved.
        trained: The trained weights if the model's file holds other ones, else None.
        extra: What the ``on_save_checkpoint`` hooks have added.
        shards: Takes sharded tensors.
        optimizers: The optimizers' states, if the engine has gathered them.
    """
    if optimizers is None:
        optimizers = [state_of(optimizer, [run.module]) for optimizer in run.optim.optimizers]
    parts = [tree_part(optimizers, OPTIMIZER, shards)]
    if trained is not None and shards is not None:
        shards.add_weights(trained, section_of(TRAINED_NAME))
    elif trained is not None:
        parts.append(weights_part(trained, TRAINED_NAME))
    parts.append(tree_part(_state_of(run, callbacks) | {"extra": extra}, TRAINER, shards))
    if data := _state_of_data(run.datamodule):
        parts.append(tree_part(data, DATA))
    return parts


def _state_of_rank(run: FitRun) -> dict[str, Any]:
    """Return the state that differs between ranks: RNG, metrics, stream position and more."""
    state = {
        "rng": generators_of(run),
        "metrics": accumulators_of(run.metrics, run.module),
        "counts_values": run.engine.parallel.is_log_primary,
        "stream": run.data.epoch_iterator.position(),
        **run.engine.state_dict(),
    }
    if not run.module.automatic_optimization:
        run.precision.state_dict()  # rescales the gradients to the saved loss scale
        state["gradients"] = gradients.collect(named_gradients(run))
    return state


def named_gradients(run: FitRun) -> dict[str, nn.Parameter]:
    """Return the parameters that may have gradients at a boundary in manual optimisation."""
    return gradients.named_parameters([run.module], run.optim.optimizers)


def _writer_of_record(run: FitRun) -> Callable[[Path], None]:
    """Start to sync the local record to disk; return a function that waits, then saves its length.

    The function also saves the trackers' run ids, so that a resumed run continues the same tracker
    runs.
    """
    offset = run.recorder.sync()

    def write(folder: Path) -> None:
        record = {"offset": offset(), "trackers": run.recorder.run_ids}
        save_tree(record, folder, RECORD)

    return write


def require_space(run: FitRun, folder: Path, *, on_each_node: bool) -> None:
    """Check before the first update that weights can be saved, and have space; collective.

    The size of the optimizers' state is not known yet. A warning is logged if there is no space for
    twice the bytes of the trained parameters, which Adam's moments need. Uninitialised parameters
    of lazy modules are not counted.

    Args:
        run: The fit.
        folder: The folder of the checkpoints.
        on_each_node: Whether each machine keeps a complete checkpoint.

    Raises:
        CheckpointError: There is no space for the present state, or a weight cannot be saved;
            raised on all ranks.
    """
    state = PartialState()

    def check() -> None:
        if not is_writer_rank(state, on_each_node):
            return
        weights = run.module.state_dict(keep_vars=True)
        for name, value in weights.items():
            check_weight(name, value)
        tensors = [*weights.values()]
        if not run.engine.full_state_on_rank0:  # which is collective
            tensors += leaves([optimizer.state_dict() for optimizer in run.optim.optimizers])
        now = _bytes_of(tensors)
        later = now + 2 * _bytes_of(p for p in run.optim.parameters if p.requires_grad)
        check_space(folder, now)
        if masked := to_manifest(run.module).get("masked"):
            logger.warning(
                "Checkpoints do not hold the secrets among the arguments of %s: %s. "
                "load_from_checkpoint asks for them; trackers.name_secrets(…, secret=False) tells "
                "that a name is none of a secret.",
                type(run.module).__name__,
                ", ".join(masked),
            )
        try:
            check_space(folder, later)
        except CheckpointError as error:
            logger.warning("There may not be enough space for checkpoints: %s.", error)

    run_on_all_ranks(f"Checking what checkpoints in {folder} need", check, state)


def _bytes_of(values: Iterable[object]) -> int:
    """Return the bytes of the tensors among some values, of all processes if they are sharded."""
    tensors = (v for v in values if isinstance(v, Tensor) and not is_lazy(v))
    # DeepSpeed partitions a parameter into parts, and leaves an empty tensor.
    return sum(getattr(v, "ds_numel", v.numel()) * v.element_size() for v in tensors)


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
    if any(hasattr(each, "ds_id") for each in run.module.parameters()):
        raise CheckpointError(
            f"{target} is not written: stage 3 of DeepSpeed has left the weights in parts, which "
            "one process cannot gather after an error."
        )
    staging = open_staging(target)
    save_weights(bare_state_dict(run.module), staging)
    return commit(staging, target, _manifest_of(run, configuration) | {"weights_only": True})


def _weights_of(
    run: FitRun,
    trainer: Any,
    callbacks: Sequence[Callback],
    gathered: Mapping[str, Any] | None,
) -> Weights:
    """Return the weights of the model's file and, if they differ, the trained weights.

    A callback such as weight averaging, or a schedule-free optimizer, may give the weights for use
    outside this run. The trained weights are then saved beside them, to resume with.

    Raises:
        ValueError: More than one callback returns weights from `weights_to_save`.
    """
    pending_saves = [
        (callback, callback.weights_to_save(trainer, run.module)) for callback in callbacks
    ]
    given = [
        (callback.state_key, weights) for callback, weights in pending_saves if weights is not None
    ]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(key for key, _ in given)} both return weights_to_save; a checkpoint "
            "can hold those of only one. Leave out the others."
        )
    own = run.module.state_dict() if gathered is None else gathered
    others, trained = given[0][1] if given else (own, None)
    if not given and (free := schedule_free(run.optim.optimizers)):
        with evaluation_weights(free):
            others, trained = {name: _copied(value) for name, value in own.items()}, dict(own)
    bare = dict(bare_names(run.module, others.items()))
    return bare, None if trained is None else dict(bare_names(run.module, trained.items()))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _manifest_of(run: FitRun, configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": run.counters.global_step,
        "epoch": run.counters.epoch,
        "world_size": run.world_size,
        "data_size": run.dp_size,
        "run_id": run.saving.run_id,
        "loaders": run.data.origin.describe(),
        "metrics": {  # only metrics of these weights, that is, of the latest update
            name: value
            for name in run.recorder.latest
            for value, update in (run.recorder.monitored(name) or (0.0, -1),)
            if update == run.counters.global_step
        },
        "versions": versions(),
        "configuration": redact(dict(configuration)),
        "hyper_parameters": to_manifest(run.module),
    }


def _state_of(run: FitRun, callbacks: Sequence[Callback]) -> dict[str, Any]:
    counters = asdict(run.counters) | {"seconds": run.progress.seconds}
    del counters["global_batches"]  # depends on the number of processes
    attributes = plain_attributes(run.module) if run.saving.epoch_attributes else {}
    return {
        "run_id": run.saving.run_id,
        "counters": counters,
        "items_seen": run.step_sync.items_seen,
        "reference": run.optim.weighting.reference,
        "data": data_of(run),
        "order": run.data.epoch_iterator.mark,
        "length": list(run.data.epoch_iterator.length),
        "options": run.optim.fingerprint,
        "switches": {
            "begun": run.saving.begun,
            "now": run.saving.ended or frozen_and_eval_flags(run.module),
        },
        "epoch_start": {
            "attributes": {
                name: attributes.get(name, value)  # which may hold tensors now, as outputs
                for name, value in run.saving.epoch_attributes.items()
            },
            "accumulation": [run.optim.first_accumulation, run.optim.accumulation],
        },
        "should_stop": run.stopping.now or run.step_sync.latest.stop_votes > 0,
        "epoch_votes": run.step_sync.latest.epoch_votes,
        "unfinished": run.saving.unfinished,
        "boundary": run.hooks.boundary.remaining_callbacks,
        "last_logged": run.plan.last_logged,
        "latest": run.recorder.latest,
        "updates": run.recorder.updates,
        "validated": run.recorder.validated,
        "schedules": {
            name: [str(schedule.interval), schedule.before._asdict()]
            for name, schedule in (("val", run.plan.val_schedule), ("log", run.plan.log_schedule))
        },
        "optimizers": run.optim.names,
        "groups": [names_of_groups(optimizer, run.module) for optimizer in run.optim.optimizers],
        "schedulers": [entry.scheduler.state_dict() for entry in run.optim.schedulers],
        "scaler": run.precision.state_dict(),
        "guard": None if run.optim.guard is None else run.optim.guard.state_dict(),
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
    sampler = run.data.epoch_iterator.sampler
    if sampler is None:
        size = getattr(run.data.epoch_iterator.loader, "batch_size", None)
        return [size if isinstance(size, int) else None, None, None]
    data, size = run.data.epoch_iterator.dataset, sampler.batch_size
    samples = len(data) if hasattr(data, "__len__") else None
    return [size, samples, run.data.epoch_iterator.num_all_batches if size is None else None]


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
        reader = Reader(path, read_manifest(path))
        if f"{DATA}.json" not in reader.files:
            return
        state = reader.tree(DATA)
        if type(datamodule).__qualname__ in state:
            datamodule.load_state_dict(state[type(datamodule).__qualname__])
        else:
            logger.warning(
                "%s holds the state of a datamodule %s, which is not used.", path, *state
            )

    if has_state(datamodule):
        run_on_all_ranks(f"Restoring the datamodule from {path}", load, PartialState())


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
    reader = _open(path)
    path = reader.path
    if reader.manifest.get("weights_only"):
        raise CheckpointError(
            f"{path} holds only weights, from which no run can resume. Start a new run with them: "
            "pass its path as ckpt_path, in another project_dir."
        )
    state, record = reader.tree(TRAINER), reader.tree(RECORD)
    later = (
        run.engine.parallel.mesh is not None
    )  # each process needs a share of what whole files hold
    optimizers = reader.tree(OPTIMIZER, later=later)
    ranks = [reader.tree(rank_stem(rank)) for rank in range(reader.manifest["world_size"])]
    trained = set(map(id, parameters_of(run.optim.optimizers)))
    trained &= set(map(id, run.module.parameters()))
    saved = reader.weights(WEIGHTS_NAME, later=later)
    # Before the weights are loaded: it may resize buffers.
    checkpoint, weights = run.module._call_on_load_checkpoint(state["extra"], saved)
    if not trained <= set(map(id, run.module.parameters())):
        raise CheckpointError(
            f"on_load_checkpoint of {type(run.module).__name__} has replaced parameters that are "
            "trained, but the optimizers have the old ones: create them in __init__ or "
            "configure_model. Buffers and frozen parameters may be replaced."
        )
    load = partial(_load, run.engine, run.module, strict=run.module._resumes_strictly)
    load(weights, path / WEIGHTS_NAME)
    if "switches" in state:  # checkpoints of earlier releases do not have it
        load_switches(run.module, run.saving.begun, state["switches"], tell=run.rank == 0)
    if differs := reader.has_weights(TRAINED_NAME):
        weights = apply_edits(weights, saved, reader.weights(TRAINED_NAME, later=later))
    with reading(path / f"{OPTIMIZER}.json", _UNFIT):
        _restore_optimizers(run, path, state, optimizers, weights)
    restored = options_of(run.optim.names, run.optim.optimizers, run.optim.schedulers)
    keep_options(run.optim.fingerprint, state.get("options", {}), restored, tell=run.rank == 0)
    with reading(path / f"{TRAINER}.json", _UNFIT):
        run.precision.load_state_dict(state["scaler"])
        _restore_counters(run, state)
    for callback in callbacks:
        if callback.state_key in state["callbacks"]:
            with reading(f"The state of {callback.state_key} in {path}", _UNFIT):
                _restore_callback(run, callback, state["callbacks"][callback.state_key])
    if differs:
        load(weights, path / TRAINED_NAME)
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, run.module, checkpoint)
    with reading(f"The states of the processes in {path}", _UNFIT):
        _restore_ranks(run, path, ranks, reader.manifest.get("data_size", len(ranks)))
    _restore_epoch_start(run, state.get("epoch_start", {}))  # missing in earlier releases
    run.stopping.now = stays_stopped and state["should_stop"]
    run.saving.unfinished = state["unfinished"]
    run.hooks.boundary.remaining_callbacks = state.get("boundary", [])
    run.plan.last_logged = state["last_logged"]
    run.saving.run_id = state["run_id"]
    _restore_epoch(run, state)  # after the callbacks' hooks, which may restore the data
    with reading(path / f"{TRAINER}.json", _UNFIT):
        for name, schedule in (("val", run.plan.val_schedule), ("log", run.plan.log_schedule)):
            interval, before = state["schedules"][name]
            _restore_schedule(schedule, Interval.parse(interval), Progress(**before), run)
    run.recorder.resume(record.get("trackers", {}), run.counters.global_step)
    offset: int | None = record["offset"]
    return offset


def _load(
    engine: Engine,
    module: TrainModule,
    weights: Mapping[str, Any],
    where: Path,
    *,
    strict: bool = True,
) -> None:
    """Load weights into a module, through its engine if only that can."""
    if not engine.full_state_on_rank0:
        load_into(module, weights, where=where, strict=strict)
        return
    here = engine.described_weights(module)
    load_into(module, weights, where=where, strict=strict, load=engine.load_weights, here=here)


def _restore_callback(run: FitRun, callback: Callback, state: dict[str, Any]) -> None:
    """Load the state of a callback; tensors that were sharded are as they or parameters are now."""
    if any(isinstance(leaf, ShardedTensor) for leaf in leaves(state)):
        named = dict(bare_names(run.module, run.module.named_parameters()))
        state = resharded(state, callback.state_dict(), named)
    callback.load_state_dict(state)


def _open(path: Path) -> Reader:
    """Return the reader of a checkpoint that `choose_checkpoint` has verified.

    Raises:
        CheckpointError: A file is missing or has another size, or it is not one of a fit.
    """
    reader = Reader.open(path, hashes=False)
    if "step" not in reader.manifest:
        raise CheckpointError(
            f"{path} was not saved by a Trainer. A state of Accelerator.save_state is loaded with "
            "Accelerator.load_state."
        )
    return reader


def _restore_optimizers(
    run: FitRun,
    path: Path,
    state: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Restore the optimizers and the schedulers.

    Args:
        run: The fit.
        path: The checkpoint, for errors.
        state: The state that is equal on all ranks.
        optimizers: The optimizers' state dicts.
        weights: The saved trained weights by name, whose dtypes the optimizer states refer to.
    """
    _same_number(path, "optimizers", run.optim.optimizers, optimizers)
    if state["optimizers"] is not None:  # unknown in a checkpoint of another library
        _same_names(path, run.optim.names, state["optimizers"])
    schedulers = [entry.scheduler for entry in run.optim.schedulers]
    for optimizer, groups in zip(run.optim.optimizers, state["groups"], strict=True):
        restore_groups(optimizer, groups, run.module, schedulers=schedulers)
    dtypes = dtypes_of(run.module, own_names(run.module, weights))
    for optimizer, saved in zip(run.optim.optimizers, optimizers, strict=True):
        load_state(optimizer, state_like(optimizer, saved), dtypes)
    _same_number(path, "schedulers", run.optim.schedulers, state["schedulers"])
    check_schedules(run.optim.fingerprint, state.get("options", {}), len(run.optim.schedulers))
    for entry, saved in zip(run.optim.schedulers, state["schedulers"], strict=True):
        entry.scheduler.load_state_dict(saved)


def _restore_ranks(
    run: FitRun, path: Path, ranks: Sequence[dict[str, Any]], data_size: int
) -> None:
    """Restore this rank's state; if the number of processes has changed, redistribute the states.

    Args:
        run: The fit.
        path: The checkpoint, for warnings.
        ranks: The saved state of each rank.
        data_size: Of how many shares of the data they are; the others read the same data again.
    """
    each = len(ranks) // data_size
    shares = ranks[::each]
    same = len(ranks) == run.world_size and data_size == run.dp_size
    # Equal on all ranks, but in presharded streams.
    own = shares[run.dp_rank] if data_size == run.dp_size else ranks[0]
    run.data.epoch_iterator.resume_at(own["stream"])
    for rank in ranks:  # decisions depend on which names were logged: equal on all ranks
        run.metrics.names.update(rank["metrics"]["names"])
    if same:
        taken_in, holds = ranks[run.rank : run.rank + 1], True
    elif data_size == run.dp_size:
        first = run.dp_rank * each
        taken_in, holds = ranks[first : first + each], run.engine.parallel.is_data_primary
    else:
        taken_in, holds = ranks, run.rank == 0
    counted = [rank["metrics"] for rank in taken_in if same or rank.get("counts_values", True)]
    restore_accumulators(run.metrics, run.module, counted, holds=holds)
    _restore_gradients(run, [rank.get("gradients", {}) for rank in ranks])
    run.engine.load_state_dicts(ranks)
    if same:
        run.saving.saved_rng = ranks[run.rank]["rng"]
    elif run.dp_rank < data_size:
        run.saving.saved_rng = shares[run.dp_rank]["rng"]
    else:
        logger.warning(
            "%s was saved by fewer processes: rank %d starts with freshly seeded generators.",
            path,
            run.rank,
        )
        with isolated_rng(
            mix(run.data.epoch_iterator.seed, run.dp_rank, run.counters.global_step) % 2**32
        ):
            run.saving.saved_rng = rng_state()


def _restore_gradients(run: FitRun, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore accumulated gradients, which only manual optimisation has at an update boundary."""
    if run.module.automatic_optimization:
        return
    named = named_gradients(run)
    here = gradients.for_rank(ranks, run.rank, run.world_size)
    for note in gradients.check(named, here):
        logger.warning(note)
    gradients.put(named, here)


def _restore_counters(run: FitRun, state: dict[str, Any]) -> None:
    counters = Counters(**state["counters"])
    counters.global_batches = -(-counters.epoch_batches // run.dp_size)
    run.counters.__dict__.update(vars(counters))
    run.step_sync.items_seen = state["items_seen"]
    run.step_sync.latest = run.step_sync.latest._replace(
        seconds=counters.seconds, epoch_votes=state.get("epoch_votes", 0.0)
    )
    if run.optim.guard is not None and state["guard"] is not None:
        run.optim.guard.load_state_dict(state["guard"])
    run.optim.weighting.reference = state["reference"]
    run.recorder.latest.update(state["latest"])
    run.recorder.updates.update((name, state["updates"].get(name, 0)) for name in state["latest"])
    run.recorder.validated.update(state.get("validated", {}))  # missing in earlier releases


def _restore_epoch_start(run: FitRun, state: Mapping[str, Any]) -> None:
    """Restore what ``on_train_epoch_start`` has set: it is not called again inside its epoch."""
    attributes = state.get("attributes", {})
    set_attributes(run.module, attributes)
    run.saving.epoch_attributes = dict(attributes)
    run.saving.starts_epoch_again = not state  # a checkpoint of an earlier release
    begun, now = state.get("accumulation", (None, None))
    if begun == run.optim.first_accumulation:  # else the script now asks for another number
        run.optim.accumulation = now


def _restore_epoch(run: FitRun, state: Mapping[str, Any]) -> None:
    """Continue the saved epoch, with the length that it had when it began.

    Raises:
        CheckpointError: The batch size, the number of samples or the number of batches differs from
            the saved one: samples would be skipped or seen twice.
    """
    if run.counters.epoch_batches == 0 or run.counters.epoch_complete:
        return
    if state["data"] is None:  # unknown in a checkpoint of another library
        return
    run.data.epoch_iterator.mark = state.get("order")  # missing in checkpoints of earlier releases
    if "length" in state:  # likewise
        run.data.epoch_iterator.resume_length(run.counters.epoch, EpochLength(*state["length"]))
    saved = [*state["data"], None][:3]  # an earlier release did not save the number of batches
    with run.data.epoch_iterator.isolated_epoch(
        run.counters.epoch
    ):  # the length of the data may depend on the epoch
        here = data_of(run)
        if None in (saved[2], here[2]):
            here[2] = saved[2]
        elif here != saved and run.data.epoch_iterator.sampler is not None:
            next(
                iter(run.data.epoch_iterator.sampler), None
            )  # it may count its batches when iteration starts
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


def load_weights(module: TrainModule, path: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Load a module's weights from a checkpoint, and call its `on_load_checkpoint` first.

    Args:
        module: The user's module.
        path: The checkpoint.
        engine: The engine that was started with the module, if it divides layers; else None.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the module.
    """
    reader = _open(path)
    weights, file = reader.weights(WEIGHTS_NAME), reader.path / WEIGHTS_NAME
    if f"{TRAINER}.json" in reader.files:  # missing in a weights-only checkpoint
        _, weights = module._call_on_load_checkpoint(reader.tree(TRAINER)["extra"], weights)
    if engine is None:
        load_into(module, weights, where=file, strict=module.strict_loading)
    else:
        _load(engine, module, weights, file, strict=module.strict_loading)
    return dict(reader.manifest)
