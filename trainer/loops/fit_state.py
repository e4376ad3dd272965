"""Saving a fit in a checkpoint, and restoring it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from callbacks import Callback
from trackers.redaction import redact
from trainer.checkpoint import gradients
from trainer.checkpoint.loading import load_into
from trainer.checkpoint.parts import (
    TRAINED_NAME,
    Encoded,
    Reader,
    StatePart,
    encoded_part,
    shards_part,
    state_parts,
    write_parts,
)
from trainer.checkpoint.save import (
    SaveRequest,
    check_space,
    is_writer_rank,
    run_on_all_ranks,
    save_checkpoint,
)
from trainer.checkpoint.serialization import check_weight, encode_tree, save_tree
from trainer.checkpoint.sharded_state import ShardedTensor, Shards, resharded
from trainer.checkpoint.state import (
    Parts,
    RankStates,
    Stateful,
    StateFunctions,
    collect,
    dtypes_of,
    restore,
)
from trainer.checkpoint.storage import (
    commit,
    open_staging,
    rank_stem,
    read_manifest,
    reading,
)
from trainer.checkpoint.weights import WEIGHTS_NAME, own_names, save_weights
from trainer.data.epoch_iterator import EpochIterator
from trainer.engines.base import Engine
from trainer.errors import CheckpointError, module_logger
from trainer.hparams import to_manifest
from trainer.loops.buffers import sync_buffers
from trainer.loops.run_metadata import versions
from trainer.loops.state import FitRun
from trainer.metrics.accumulators import MetricAccumulators
from trainer.module import TrainModule, Weights
from trainer.names import bare_names, bare_state_dict
from trainer.optim.optimizer import parameters_of
from trainer.optim.schedule_free import evaluation_weights, schedule_free
from trainer.rng import isolated_rng, mix, rng_state
from trainer.state import PartialState
from trainer.tree import leaves

logger = module_logger(__name__)

OPTIMIZER, TRAINER, RECORD, DATA = "optimizer", "trainer", "record", "datamodule"
_ADDED_LATER = ("switches", "epoch_start", "boundary")  # missing in earlier releases
_OPTIMIZERS = ("options", "optimizers", "groups", "schedulers", OPTIMIZER)


def parts_before_hooks(run: FitRun, dtypes: Mapping[int, torch.dtype] | None = None) -> Parts:
    """Return the state that is equal on all ranks and restored before the callbacks' hooks.

    The module's weights are restored before it. The keys are those of ``trainer.json``, except for
    the optimizers' tensors, which are in ``optimizer.json``. They are in the order of restoring.

    Args:
        run: The fit.
        dtypes: See `OptimizerStates.load_state_dict`.
    """
    optimizers, module_state = run.optim.states, run.saving.module_state
    return {
        "switches": StateFunctions(module_state.flags, module_state.load_flags),
        _OPTIMIZERS: StateFunctions(
            optimizers.state_dict, partial(optimizers.load_state_dict, dtypes=dtypes)
        ),
        "scaler": run.precision,
        ("counters", "items_seen", "epoch_votes"): run,
        "guard": run.optim.guard,
        ("reference",): run.optim.weighting,
        ("latest", "updates", "validated"): run.recorder,
        "callbacks": CallbackStates(run.module, run.hooks.callbacks),
    }


def shared_trees(
    run: FitRun,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state that is equal on all ranks, by file stem.

    Args:
        run: The fit.
        extra: The values that ``on_save_checkpoint`` hooks have added.
    """
    tree = collect({**parts_before_hooks(run), **parts_after_hooks(run)})
    trees = {OPTIMIZER: tree.pop(OPTIMIZER), TRAINER: tree | {"extra": extra}}
    datamodule = run.stage.datamodule
    if has_state(datamodule) and (data := datamodule.state_dict()):
        trees[DATA] = {type(datamodule).__qualname__: data}
    return trees


def parts_of_rank(run: FitRun) -> Parts:
    """Return the state that differs between ranks, restored in order after the callbacks' hooks."""
    parts: dict[Any, Stateful] = {
        "rng": _generators(run),
        ("metrics", "counts_values"): _metrics(run),
        "stream": _stream(run.data.epoch_iterator),
        (): _engine(run.engine),
    }
    if not run.module.automatic_optimization:  # otherwise there are no gradients at a boundary
        parts["gradients"] = _gradients(run)
    return parts


def _generators(run: FitRun) -> Stateful:
    generators = run.saving.generators

    def load(saved: RankStates) -> None:
        if saved.own is not None:
            generators.restore_later(saved.own)
        else:
            if not run.context.length.reached(run.counters, run.seconds):
                logger.warning(
                    "The checkpoint was saved by fewer processes: rank %d starts with freshly "
                    "seeded generators.",
                    run.rank,
                )
            seed = mix(run.data.epoch_iterator.seed, run.dp_rank, run.counters.global_step)
            with isolated_rng(seed % 2**32):
                generators.restore_later(rng_state())

    return StateFunctions(generators.state_dict, load)


def _metrics(run: FitRun) -> Stateful:
    parallel, metrics = run.engine.parallel, MetricAccumulators(run.metrics, run.module)

    def save() -> dict[str, Any]:
        return {"metrics": metrics.state_dict(), "counts_values": parallel.is_log_primary}

    def load(saved: RankStates) -> None:
        # Decisions depend on the logged names, so they must be equal on all ranks.
        run.metrics.names.update(*(state["metrics"]["names"] for state in saved.states))
        same_shares = saved.data_size == saved.dp_size
        holds = saved.same or (parallel.is_data_primary if same_shares else run.rank == 0)
        counted = [s for s in saved.to_merge if saved.same or s.get("counts_values", True)]
        metrics.load_state_dicts([state["metrics"] for state in counted], holds=holds)

    return StateFunctions(save, load)


def _stream(epoch_iterator: EpochIterator) -> Stateful:
    def load(saved: RankStates) -> None:
        # Equal on all ranks, except for presharded streams.
        own = saved.own if saved.data_size == saved.dp_size else saved.states[0]
        epoch_iterator.resume_at(own)

    return StateFunctions(epoch_iterator.position, load)


def _engine(engine: Engine) -> Stateful:
    def load(saved: RankStates) -> None:
        # The remaining state, perhaps of another engine, including gradients of manual
        # optimisation.
        states = [{k: v for k, v in state.items() if k != "gradients"} for state in saved.states]
        values = [value for state in states for value in state.values()]
        if any(not isinstance(value, dict) or value for value in values):
            engine.load_state_dicts(states)

    return StateFunctions(engine.state_dict, load)


def _gradients(run: FitRun) -> Stateful:
    named = partial(gradients.named_parameters, [run.module], run.optim.optimizers)

    def save() -> dict[str, Any]:
        run.precision.state_dict()  # rescales the gradients to the saved loss scale
        return gradients.collect(named())

    def load(saved: RankStates) -> None:
        of_this_rank = gradients.for_rank(saved.states, run.rank, run.world_size)
        for note in gradients.check(named(), of_this_rank):
            logger.warning(note)
        gradients.put(named(), of_this_rank)

    return StateFunctions(save, load)


def parts_after_hooks(run: FitRun) -> Parts:
    """Return the state that is equal on all ranks and restored last, in order.

    The callbacks' hooks run before it, and may restore the data.
    """
    epoch_iterator, stopping = run.data.epoch_iterator, run.stopping
    module_state = run.saving.module_state

    def resume_epoch(state: Mapping[str, Any]) -> None:
        if run.counters.epoch_batches and not run.counters.epoch_complete:
            epoch_iterator.resume_epoch(run.counters.epoch, state)

    return {
        "epoch_start": StateFunctions(module_state.epoch_start, module_state.load_epoch_start),
        "should_stop": StateFunctions(
            lambda: stopping.decided() or run.step_sync.latest.stop_votes > 0, stopping.decide
        ),
        ("run_id", "unfinished"): run.saving,
        "boundary": run.hooks.boundary,
        ("data", "order", "length"): StateFunctions(epoch_iterator.state_dict, resume_epoch),
        ("last_logged", "schedules"): StateFunctions(
            run.intervals.state_dict,
            lambda state: run.intervals.load_state_dict(state, run.progress()),
        ),
    }


class CallbackStates:
    """The states of the callbacks, by their keys.

    Args:
        module: The user's module; averages of its parameters are sharded like them.
        callbacks: The callbacks.
    """

    def __init__(self, module: TrainModule, callbacks: Sequence[Callback]) -> None:
        self._module, self._callbacks = module, callbacks

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        return {callback.state_key: callback.state_dict() for callback in self._callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of callbacks that are in the checkpoint."""
        for callback in self._callbacks:
            key = callback.state_key
            if key in state:
                with reading(f"the state of {key}", "cannot be restored"):
                    self._load(callback, state[key])

    def _load(self, callback: Callback, state: dict[str, Any]) -> None:
        if any(isinstance(leaf, ShardedTensor) for leaf in leaves(state)):
            named = dict(bare_names(self._module, self._module.named_parameters()))
            state = resharded(state, callback.state_dict(), named)
        callback.load_state_dict(state)


def save_run(
    run: FitRun,
    request: SaveRequest,
    *,
    weights_only: bool = False,
    background: bool = False,
    required: bool = True,
) -> bool:
    """Save the state of a fit at an update boundary; collective.

    Args:
        run: The fit.
        request: Where it is saved.
        weights_only: Save only the weights, from which no run can resume.
        background: Copy the state to host memory, return, and write it on another thread while
            training continues.
        required: Whether to raise if the checkpoint cannot be written; otherwise the error is
            logged.

    Returns:
        Whether the checkpoint is committed, or being written in the background.

    Raises:
        CheckpointError: The state of some rank cannot be saved, or the files cannot be written.
            Raised on all ranks. An error of a background save is raised at the next update.
    """
    _settle(run)
    parts, needs = _parts_to_save(run, request, weights_only)
    state, writer = PartialState(), run.saving.writer
    write_state = writer.copies.hold(parts) if background else write_parts(parts)
    write_record = None if weights_only else _writer_of_record(run)

    def write(folder: Path) -> Sequence[str]:
        files = write_state(folder)
        if write_record is not None and is_writer_rank(state, request.on_each_node):
            write_record(folder)
        return files

    manifest = _manifest_of(run) | {"weights_only": weights_only}
    save = partial(
        save_checkpoint,
        request.absolute(),
        write,
        manifest=lambda: manifest,
        state=state,
        needs=needs,
    )
    writer.start(save, name=request.target, required=required, background=background)
    return background or writer.wait()


def _parts_to_save(
    run: FitRun, request: SaveRequest, weights_only: bool
) -> tuple[list[StatePart], int]:
    """Return the parts that this process writes, and the disk space in bytes they need; collective.

    Raises:
        CheckpointError: The state of some rank cannot be saved; raised on all ranks.
    """
    extra, edited = _state_from_hooks(run, request.target, weights_only)
    if run.engine.driver is not None and not weights_only:
        run.optim.states.collect()
    state, parallel = PartialState(), run.engine.parallel
    is_writer = is_writer_rank(state, request.on_each_node)
    shards = Shards(run.rank, parallel.mesh) if parallel.divides_state else None
    of_all_ranks: list[StatePart] = []
    of_this_rank: list[Encoded] = []

    def encode() -> Encoded | None:
        exported, trained = edited or _weights_of(run)
        if is_writer or shards is not None:
            weights, trees = {WEIGHTS_NAME: exported}, {TRAINER: {"extra": extra}} if extra else {}
            if not weights_only:
                weights |= {} if trained is None else {TRAINED_NAME: trained}
                trees = shared_trees(run, extra)
            parts = state_parts(weights, trees, shards)
            of_all_ranks.extend(parts if is_writer else ())
        if weights_only:
            return None
        encoded = encode_tree(collect(parts_of_rank(run)), rank_stem(run.rank))
        of_this_rank.append(encoded)
        return encoded if request.on_each_node else None

    sent = run_on_all_ranks(f"Saving {request.target}", encode, state, run.saving.writer.group)
    rank_trees = [(run.rank, tree) for tree in of_this_rank]
    if request.on_each_node:  # each machine's writer rank writes those of all ranks
        rank_trees = [(rank, t) for rank, t in enumerate(sent) if t is not None and is_writer]
    of_ranks = [encoded_part(*tree, rank_stem(rank)) for rank, tree in rank_trees]
    if shards is not None:
        of_ranks.append(shards_part(shards))
    parts = [*of_all_ranks, *of_ranks]
    needs = here = sum(part.size for part in of_ranks)
    if not request.on_each_node:  # all write to the same disk
        group = run.saving.writer.group
        needs = sum(run_on_all_ranks(f"Saving {request.target}", lambda: here, state, group))
    return parts, needs + sum(part.size for part in of_all_ranks)


def _settle(run: FitRun) -> None:
    """Wait for pending work, so that the state belongs to the same update on all ranks."""
    run.saving.writer.wait()
    if run.optim.guard is not None:
        run.optim.guard.read_pending()  # never save weights that non-finite gradients have updated
    sync_buffers(run)
    run.step_sync.read_pending()
    run.recorder.flush()


def _state_from_hooks(
    run: FitRun, target: Path, weights_only: bool
) -> tuple[dict[str, Any], Weights | None]:
    """Return what the ``on_save_checkpoint`` hooks add to the checkpoint; collective.

    If they have changed the weights, return these too; see `_weights_of`.

    Raises:
        CheckpointError: A hook failed on one of several ranks; raised on all ranks. With a single
            process, the hook's own error is raised.
    """
    extra: dict[str, Any] = {}
    edited: Weights | None = None

    def call_hooks(checkpoint: dict[str, Any]) -> None:
        for callback in () if weights_only else run.hooks.callbacks:
            callback.on_save_checkpoint(run.context.trainer, run.module, checkpoint)
        run.module.on_save_checkpoint(checkpoint)

    def ask() -> list[str]:
        nonlocal extra, edited
        extra, edited = run.module._call_on_save_checkpoint(
            {"epoch": run.counters.epoch, "global_step": run.counters.global_step},
            call_hooks,
            partial(_weights_of, run),
            weights_only=weights_only,
        )
        return [] if edited is None else sorted(edited[0])

    if run.world_size == 1:
        ask()
    else:
        group = run.saving.writer.group
        names = run_on_all_ranks(f"Saving {target}", ask, PartialState(), group)
        # Unsharded weights are taken from the writer rank only, since a hook may be rank_zero_only.
        if run.engine.parallel.divides_state and any(each != names[0] for each in names):
            raise CheckpointError(
                f"Saving {target} failed: on_save_checkpoint left different names in "
                'checkpoint["state_dict"] on some processes. Make the same changes on all '
                "processes."
            )
    return extra, edited


def apply_edits(
    edited: Mapping[str, Any], before: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply a hook's changes to other weights of the same names.

    Args:
        edited: Weights after the hook.
        before: The weights before the hook.
        others: The weights to change: entries that the hook removed, renamed or added are removed,
            renamed or added here. A copy under the same name counts as unchanged.
    """
    names = {id(value): name for name, value in before.items()}
    return {name: others.get(names.get(id(value), name), value) for name, value in edited.items()}


def _writer_of_record(run: FitRun) -> Callable[[Path], None]:
    """Start to sync the local record to disk; return a function that waits and saves its length.

    The function also saves the trackers' run ids, so that a resumed run continues the same tracker
    runs.
    """
    offset = run.recorder.sync()

    def write(folder: Path) -> None:
        record = {"offset": offset(), "trackers": run.recorder.run_ids}
        save_tree(record, folder, RECORD)

    return write


def require_space(run: FitRun, folder: Path, *, on_each_node: bool) -> None:
    """Check before the first update that the weights can be saved and fit on the disk; collective.

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
        if run.engine.driver is None:  # with a driver, this may be collective
            tensors += leaves([optimizer.state_dict() for optimizer in run.optim.optimizers])
        now = _bytes_of(tensors)
        later = now + 2 * _bytes_of(p for p in run.optim.parameters.all if p.requires_grad)
        check_space(folder, now)
        if masked := to_manifest(run.module).get("masked"):
            logger.warning(
                "Checkpoints do not hold the secrets among the arguments of %s: %s. Pass them to "
                "load_from_checkpoint. If a name is not a secret, call trackers.name_secrets(…, "
                "secret=False).",
                type(run.module).__name__,
                ", ".join(masked),
            )
        try:
            check_space(folder, later)
        except CheckpointError as error:
            logger.warning("There may not be enough space for checkpoints: %s.", error)

    run_on_all_ranks(f"Checking what checkpoints in {folder} need", check, state)


def _bytes_of(values: Iterable[object]) -> int:
    """Return the bytes of the tensors among the values, over all processes if sharded."""
    tensors = (v for v in values if isinstance(v, Tensor) and not is_lazy(v))
    # DeepSpeed leaves an empty tensor in place of a partitioned parameter.
    return sum(getattr(v, "ds_numel", v.numel()) * v.element_size() for v in tensors)


def save_weights_alone(run: FitRun, target: Path) -> Path:
    """Save the weights of this rank alone; not collective, for use after an error.

    Args:
        run: The fit.
        target: The checkpoint's folder.

    Returns:
        The path of the committed checkpoint.

    Raises:
        CheckpointError: The target exists and is not a checkpoint.
        OSError: The weights cannot be written.
    """
    if any(hasattr(each, "ds_id") for each in run.module.parameters()):
        raise CheckpointError(
            f"{target} is not written: stage 3 of DeepSpeed has partitioned the weights, and one "
            "process cannot gather them after an error."
        )
    # Of sharded weights, one process can save only its own part.
    parts = None if run.engine.parallel.divides_state else run.engine.weights.parts(run.module)
    weights = (
        bare_state_dict(run.module) if parts is None else bare_names(run.module, parts.items())
    )
    staging = open_staging(target)
    save_weights(dict(weights), staging)
    return commit(staging, target, _manifest_of(run) | {"weights_only": True})


def _weights_of(run: FitRun) -> Weights:
    """Return the weights of the model's file and, if they differ, the trained weights.

    A callback such as weight averaging, or a schedule-free optimizer, may provide other weights for
    use outside this run. The trained weights are then saved as well, for resuming.

    Raises:
        ValueError: More than one callback returns weights from `weights_to_save`.
    """
    from_callbacks = [
        (callback.state_key, weights)
        for callback in run.hooks.callbacks
        if (weights := callback.weights_to_save(run.context.trainer, run.module)) is not None
    ]
    if len(from_callbacks) > 1:
        raise ValueError(
            f"{' and '.join(key for key, _ in from_callbacks)} both return weights_to_save; "
            "a checkpoint can hold those of only one. Leave out the others."
        )
    parts = run.engine.weights.parts(run.module)
    current = run.module.state_dict() if parts is None else parts
    exported, trained = from_callbacks[0][1] if from_callbacks else (current, None)
    if not from_callbacks and (free := schedule_free(run.optim.optimizers)):
        trained = dict(current)
        with evaluation_weights(free):
            exported = {name: _copied(value) for name, value in current.items()}
    bare = dict(bare_names(run.module, exported.items()))
    return bare, None if trained is None else dict(bare_names(run.module, trained.items()))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _manifest_of(run: FitRun) -> dict[str, Any]:
    return {
        "step": run.counters.global_step,
        "epoch": run.counters.epoch,
        "world_size": run.world_size,
        "data_size": run.dp_size,
        "run_id": run.saving.run_id,
        "loaders": run.data.describe(),
        "metrics": {  # only metrics of these weights, from the latest update
            name: value
            for name in run.recorder.latest
            for value, update in (run.recorder.monitored(name) or (0.0, -1),)
            if update == run.counters.global_step
        },
        "versions": versions(),
        "configuration": redact(run.context.settings.describe()),
        "hyper_parameters": to_manifest(run.module),
    }


def has_state(datamodule: Any) -> bool:
    """Return whether a datamodule's state can be saved and restored."""
    return hasattr(datamodule, "state_dict") and hasattr(datamodule, "load_state_dict")


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


def load_run(run: FitRun, path: Path, *, stays_stopped: bool) -> int | None:
    """Restore a fit from a checkpoint, and print where it resumes.

    Args:
        run: The fit at its start.
        path: The checkpoint.
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
            f"{path} holds only weights, so no run can resume from it. To start a new run with "
            "these weights, pass its path as ckpt_path, with another project_dir."
        )
    epoch, step = reader.manifest["epoch"] + 1, reader.manifest["step"]  # from 1, as everywhere
    # Before the warnings about what differs from it.
    run.context.accelerator.print(
        f"Resuming from {path} (epoch {epoch}, update {step}).", flush=True
    )
    state, record = reader.tree(TRAINER), reader.tree(RECORD)
    # Each process needs its share of files that hold whole tensors.
    later = run.engine.parallel.divides_state
    state[OPTIMIZER] = reader.tree(OPTIMIZER, later=later)
    ranks = [reader.tree(rank_stem(rank)) for rank in range(reader.manifest["world_size"])]
    of_ranks = RankStates(
        ranks,
        reader.manifest.get("data_size", len(ranks)),
        rank=run.rank,
        world_size=run.world_size,
        dp_rank=run.dp_rank,
        dp_size=run.dp_size,
    )
    trained = set(map(id, parameters_of(run.optim.optimizers)))
    trained &= set(map(id, run.module.parameters()))
    saved = reader.weights(WEIGHTS_NAME, later=later)
    # Called before the weights are loaded, since it may resize buffers.
    checkpoint, weights = run.module._call_on_load_checkpoint(state["extra"], saved)
    if not trained <= set(map(id, run.module.parameters())):
        raise CheckpointError(
            f"on_load_checkpoint of {type(run.module).__name__} has replaced parameters that are "
            "trained, but the optimizers hold the old parameters: create parameters in __init__ "
            "or configure_model. Buffers and frozen parameters may be replaced."
        )
    strict = run.module._resumes_strictly
    load = partial(load_into, run.module, strict=strict, engine_weights=run.engine.weights)
    load(weights, where=path / WEIGHTS_NAME)
    if differs := reader.has_weights(TRAINED_NAME):
        weights = apply_edits(weights, saved, reader.weights(TRAINED_NAME, later=later))
    dtypes = dtypes_of(run.module, own_names(run.module, weights))
    before_hooks = parts_before_hooks(run, dtypes)
    restore(before_hooks, state, path, optional=_ADDED_LATER)
    if differs:
        load(weights, where=path / TRAINED_NAME)
    for callback in run.hooks.callbacks:
        callback.on_load_checkpoint(run.context.trainer, run.module, checkpoint)
    restore(parts_of_rank(run), of_ranks, path, optional=["gradients"])
    restore(parts_after_hooks(run), state, path, optional=_ADDED_LATER)
    if not stays_stopped:
        run.stopping.decide(False)
    run.recorder.resume(record.get("trackers", {}), run.counters.global_step)
    offset: int | None = record["offset"]
    return offset


def _open(path: Path) -> Reader:
    """Return the reader of a checkpoint that `CheckpointFolders.choose` has verified.

    Raises:
        CheckpointError: A file is missing or has the wrong size, or it is not a checkpoint of a
            fit.
    """
    reader = Reader.open(path, hashes=False)
    if "step" not in reader.manifest:
        raise CheckpointError(
            f"{path} was not saved by a Trainer. A state of Accelerator.save_state is loaded with "
            "Accelerator.load_state."
        )
    return reader


def load_weights(module: TrainModule, path: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Load a module's weights from a checkpoint, and call its `on_load_checkpoint` first.

    Args:
        module: The user's module.
        path: The checkpoint.
        engine: The engine that was started with the module, if layers are split; else None.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the module.
    """
    reader = _open(path)
    weights, file = reader.weights(WEIGHTS_NAME), reader.path / WEIGHTS_NAME
    if f"{TRAINER}.json" in reader.files:  # missing in a weights-only checkpoint
        _, weights = module._call_on_load_checkpoint(reader.tree(TRAINER)["extra"], weights)
    engine_weights = None if engine is None else engine.weights
    load_into(
        module, weights, where=file, strict=module.strict_loading, engine_weights=engine_weights
    )
    return dict(reader.manifest)
