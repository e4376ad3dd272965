"""Save the state of an `Accelerator` to a folder, and load it.

The file names are those of accelerate, with safetensors and JSON instead of pickles::

    manifest.json                     the number of objects of each kind, every file's hash
    model.safetensors                 the first model's weights; then model_1.safetensors, …
    optimizer.json, .safetensors      the first optimizer's state; then optimizer_1, …
    scheduler.json                    the first scheduler's state; then scheduler_1, …
    sampler.json                      the prepared loaders' epochs
    scaler.json                       the gradient scaler's state, if there is one
    custom_checkpoint_0.json          the registered objects' state dicts
    random_states_0.json              one per rank: RNG states, gradients of an incomplete
                                      accumulation window, states of DDP communication hooks
                                      and of an engine of the user's

For sharded models (FSDP), each rank writes its own part of the weights, optimizer states and
gradients (see :mod:`trainer.checkpoint.sharded_state`). Any number of processes, sharded or not,
can read them::

    shards.json, shard-00000.safetensors, …
    gradients.json                    reduced gradients that no optimizer has used yet

The folder may hold other files; see :mod:`trainer.checkpoint.storage`. With automatic naming it is
``<project_dir>/checkpoints/checkpoint_<number>``. Everything is read and checked before any object
is changed.

Loading is collective. So is saving, except that the main process may save replicated state alone.
The folder then has only its own ``random_states_0``; see :mod:`trainer.checkpoint.main_alone`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.checkpoint import accelerate_format, gradients, main_alone
from trainer.checkpoint.loading import compare, load_parts, placed, renames
from trainer.checkpoint.parts import (
    Reader,
    StatePart,
    shards_part,
    state_parts,
    tree_part,
    write_parts,
)
from trainer.checkpoint.resolve import choose_state, displaced_by, number_of, numbered_root
from trainer.checkpoint.save import (
    Ranks,
    SaveRequest,
    is_writer_rank,
    raise_on_all_ranks,
    run_on_all_ranks,
    save_checkpoint,
    share_of,
    writer_rank_of,
)
from trainer.checkpoint.sharded_state import (
    ShardedTensor,
    Shards,
    like,
)
from trainer.checkpoint.state import (
    Parts,
    PlacedState,
    Stateful,
    StateFunctions,
    collect,
    dtypes_of,
    restore,
)
from trainer.checkpoint.storage import (
    MANIFEST,
    STAGING,
    add_files,
    clear,
    discard,
    locate,
    staging_path,
    sweep,
)
from trainer.checkpoint.weights import BIN_NAME, INDEX_SUFFIX, WEIGHTS_NAME, own_names
from trainer.configuration import ProjectConfiguration
from trainer.distributed.guards import call_counts, forbid_collectives
from trainer.distributed.objects import all_gather_object
from trainer.engines.base import Engine
from trainer.engines.comm_hooks import for_processes
from trainer.errors import CheckpointError, module_logger
from trainer.files import with_home
from trainer.names import bare_names, bare_state_dict
from trainer.optim.optimizer import parameters_of
from trainer.rng import load_rng_state, mix, rng_state, seed_generators
from trainer.tree import is_sharded

logger = module_logger(__name__)

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], object]
LoadHook = Callable[[list[nn.Module], str], object]
T = TypeVar("T")

_WEIGHTS = (WEIGHTS_NAME, f"{WEIGHTS_NAME}{INDEX_SUFFIX}", BIN_NAME)
_KIND = "accelerator"
_GRADIENTS, _LOADERS = "gradients", "sampler"
_RANK_FILE = re.compile(r"random_states_(\d+)\.json")
_MAP_LOCATIONS = (None, "cpu", "on_device")


@dataclass(kw_only=True)
class PreparedObjects:
    """The objects that an `Accelerator` saves and loads.

    Attributes:
        models: The bare modules.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The prepared loaders.
        custom_objects: The objects that the user registered.
        scaler: The gradient scaler, if there is one.
        step: The `Accelerator`'s count of micro-batches.
        window_open: Whether a gradient accumulation window is incomplete: gradients have been
            accumulated, but the optimizer has not stepped.
        waiting: The optimizers that have not stepped since the last backward pass.
        communication: DDP communication hooks with state on this process, such as PowerSGD's error
            feedback.
        engine: The engine that prepared the models.
    """

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Stateful] = ()
    dataloaders: Sequence[Stateful] = ()
    custom_objects: Sequence[Stateful] = ()
    scaler: Stateful | None = None
    step: int = 0
    window_open: bool = False
    waiting: Sequence[Any] = ()
    communication: Sequence[Stateful] = ()
    engine: Engine | None = None

    @property
    def sharded(self) -> bool:
        """Whether models are sharded over the processes."""
        return self.engine is not None and self.engine.parallel.divides_state

    @property
    def replicated(self) -> bool:
        """Whether every process holds the same state, apart from state that can be derived."""
        if self.engine is None:
            return True
        return not self.sharded and not any(self.engine.state_dict().values())

    def weights_of(self, model: nn.Module) -> dict[str, Any]:
        """Return this process's part of a model's weights, by the user's names."""
        parts = None if self.engine is None else self.engine.weights.parts(model)
        return bare_state_dict(model) if parts is None else dict(bare_names(model, parts.items()))

    @property
    def progress(self) -> list[Any]:
        """The progress of the program, which is equal on all processes at the same call."""
        steps = [getattr(optimizer, "steps", 0) for optimizer in self.optimizers]
        return [call_counts.joint, self.step, steps]

    def reshard(self, *, drops_gradients: bool = False) -> None:
        """See `trainer.engines.base.Weights.reshard`."""
        if self.engine is not None:
            for model in self.models:
                self.engine.weights.reshard(model, drops_gradients=drops_gradients)

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects of each kind whose states have numbered files."""
        kinds = self.optimizers, self.schedulers, self.custom_objects
        return dict(zip(_STEMS, map(len, kinds), strict=True))

    def parts(self, dtypes: Mapping[int, torch.dtype] | None = None) -> dict[str, Stateful]:
        """Return the parts that are the same on all processes, by file stem, in loading order.

        Args:
            dtypes: See `trainer.optim.state.load_state`.
        """
        owners = {
            **{_STEMS["optimizers"](n): owner for n, owner in enumerate(self.optimizers)},
            **{_STEMS["schedulers"](n): owner for n, owner in enumerate(self.schedulers)},
            **({} if self.scaler is None else {"scaler": self.scaler}),
            **{_STEMS["custom_objects"](n): owner for n, owner in enumerate(self.custom_objects)},
        }
        parts = {stem: PlacedState(owner, self.models, dtypes) for stem, owner in owners.items()}
        return {**parts, _LOADERS: StateFunctions(self._loaders, self._load_loaders)}

    def _loaders(self) -> list[Any]:
        return [{"state": loader.state_dict()} for loader in self.dataloaders]

    def _load_loaders(self, saved: Sequence[Any]) -> None:
        for loader, state in zip(self.dataloaders, saved, strict=False):
            loader.load_state_dict(state["state"])

    def parts_of_rank(self) -> Parts:
        """Return the parts that differ between processes, in loading order."""
        parts: dict[Any, Stateful] = {
            "step": StateFunctions(lambda: self.step, partial(setattr, self, "step")),
            "communication": StateFunctions(
                lambda: [hook.state_dict() for hook in self.communication], self._load_hooks
            ),
            ("gradients", "window_open"): StateFunctions(self._gradients, self._load_gradients),
            "rng": StateFunctions(rng_state, load_rng_state),
        }
        if self.engine is None:
            return parts
        of_engine = StateFunctions(self.engine.state_dict, self.engine.load_state_dicts)
        return {"engine": of_engine, **parts}

    def _load_hooks(self, saved: Sequence[Any]) -> None:
        # Empty if no states were saved (see `_check_rest`); otherwise the lengths are equal.
        for hook, state in zip(self.communication, saved, strict=False):
            hook.load_state_dict(state)

    def _gradients(self) -> dict[str, Any]:
        """Gradients of an open window (perhaps none), or of optimizers yet to step."""
        named = self.named_parameters()
        if not self.window_open:
            ours = set(map(id, parameters_of(self.waiting)))
            named = {name: parameter for name, parameter in named.items() if id(parameter) in ours}
        saved = gradients.collect(named)
        some = saved if saved or self.window_open else None
        return {"gradients": some, "window_open": self.window_open}

    def _load_gradients(self, state: Mapping[str, Any]) -> None:
        if state["gradients"] is None and not self.window_open:
            return
        named = self.named_parameters()
        saved: dict[str, Any] = {
            name: grad if isinstance(grad, ShardedTensor) else like(grad, named.get(name))
            for name, grad in (state["gradients"] or {}).items()
        }
        gradients.put(named, saved)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters; see `gradients.named_parameters`."""
        return gradients.named_parameters(self.models, self.optimizers)


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


_STEMS: dict[str, Callable[[int], str]] = {
    "optimizers": partial(_numbered, "optimizer"),
    "schedulers": partial(_numbered, "scheduler"),
    "custom_objects": "custom_checkpoint_{}".format,
}


def _weights_names(number: int) -> tuple[str, str]:
    return f"{_numbered('model', number)}.safetensors", f"{_numbered('pytorch_model', number)}.bin"


def _rank_stem(rank: int) -> str:
    return f"random_states_{rank}"


def save_state(
    output_dir: str | os.PathLike[str] | None,
    prepared: PreparedObjects,
    processes: Ranks,
    project: ProjectConfiguration | None = None,
    *,
    safe_serialization: bool = True,
    hooks: Iterable[SaveHook] = (),
) -> Path:
    """Save all prepared objects to ``output_dir``, or to the next numbered checkpoint.

    All processes call it. If the state is replicated, the main process may call it alone; see
    :mod:`trainer.checkpoint.main_alone`. An earlier checkpoint in the folder is replaced; other
    files there stay. The save increments ``project.iteration``. With automatic naming and a
    ``total_limit``, the checkpoints with the lowest numbers are then deleted, except those that
    also hold other files.

    Args:
        output_dir: The folder; rank 0's value is used on all ranks. ``~`` is the home directory.
            Ignored with automatic naming.
        prepared: The objects to save.
        processes: The ranks.
        project: Naming, limit and iteration; None for the defaults.
        safe_serialization: Save weights as safetensors; otherwise with ``torch.save``.
        hooks: Called on every rank with the models, their state dicts and the staging folder,
            before anything is written. If a hook on the writing process removes state dicts from
            its list, they are not saved. Files written to the staging folder become part of the
            checkpoint.

    Returns:
        The folder, once everything is on disk.

    Raises:
        ValueError: If there is no ``output_dir`` and no automatic naming, if the home directory for
            ``~`` is not known, or if the next checkpoint or one with a higher number exists
            already. Nothing is changed then. Also for sharded models with `save_on_each_node`, or
            with ``safe_serialization=False``.
        CheckpointError: If any rank failed or an object's state cannot be saved; raised on every
            rank, and the message names it. The previous contents of the folder are then unchanged.
    """
    project = project or ProjectConfiguration()
    alone = False
    several = processes.num_processes > 1
    if may_be_alone := several and prepared.replicated and not project.save_on_each_node:
        rank, where = processes.process_index, prepared.progress
        if processes.is_main_process:
            alone = main_alone.save_alone(where)
        elif late := main_alone.join_or_find(where):
            return _add_to(late, prepared, rank, project, hooks)
    elif several and not prepared.replicated:
        main_alone.wait_for_all_ranks(processes.process_index, processes.num_processes)
    save = partial(
        _save, output_dir, prepared, project, safe_serialization, hooks, processes.num_processes
    )
    if not alone:
        try:
            return save(processes)
        except BaseException:
            if may_be_alone:
                main_alone.forget()
            raise
    if prepared.window_open:
        logger.warning(
            "The main process saves its state alone, inside a window of micro-batches: the "
            "other processes' gradients are saved only if they call save_state too. Save when "
            "accelerator.sync_gradients is true, after the update."
        )
    saved = None
    try:
        with forbid_collectives(
            "was called by a hook or a state_dict of save_state, which the main process called "
            "alone. Call save_state on all processes, outside of `if accelerator.is_main_process:`."
        ):
            saved = save(main_alone.MainProcess())
    finally:
        main_alone.end_alone(saved and saved.absolute())
    return saved


def _save(
    output_dir: str | os.PathLike[str] | None,
    prepared: PreparedObjects,
    project: ProjectConfiguration,
    safe_serialization: bool,
    hooks: Iterable[SaveHook],
    world_size: int,
    processes: Ranks,
) -> Path:
    """See `save_state`; collective over `processes`."""
    if prepared.sharded:
        check_shared_disk(project.save_on_each_node)
    if prepared.sharded and not safe_serialization:
        raise ValueError(
            "safe_serialization is False, but each process writes its part of a sharded model "
            "as safetensors: leave it out."
        )
    target, displaces = _target_of(output_dir, project, processes)
    is_writer = is_writer_rank(processes, project.save_on_each_node)
    models = list(prepared.models)
    of_all_models: list[dict[str, Any]] = []
    weights: list[dict[str, Any]] = []  # of the models that hooks have left in their lists

    def take(_: Path) -> None:
        if processes.num_processes > 1 and processes.is_main_process:
            main_alone.forget()  # all processes joined
        prepared.reshard()
        of_all_models.extend(map(prepared.weights_of, models))
        weights.extend(of_all_models)

    def write(staging: Path) -> Sequence[str]:
        if prepared.sharded:
            _check_same_models(of_all_models, weights)
        parts = _parts(prepared, weights, processes, is_writer, safe_serialization)
        return write_parts(parts)(staging)

    saved = save_checkpoint(
        SaveRequest(
            target=target,
            on_each_node=project.save_on_each_node,
            shared=True,
            displaces=displaces,
            operation="save_state",
        ),
        write,
        manifest=lambda: {
            "kind": _KIND,
            "world_size": world_size,
            "models": len(weights),
            **prepared.counts,
            "scaler": prepared.scaler is not None,
            "main_process_alone": processes.num_processes < world_size,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        },
        state=processes,
        before=[take, *(partial(_call_hook, hook, models, weights) for hook in hooks)],
    )
    _count_save(project, saved)
    if is_writer:
        logger.info("The state was saved to %s.", saved)
    return saved


def _target_of(
    output_dir: str | os.PathLike[str] | None, project: ProjectConfiguration, processes: Ranks
) -> tuple[Path, list[Path]]:
    """Return the folder of a save, and the checkpoints that it will remove; collective.

    Raises:
        ValueError: See `save_state`; raised on all ranks.
    """
    if project.automatic_checkpoint_naming:
        target = numbered_root(project) / f"checkpoint_{project.iteration}"
        displaces: list[Path] = []

        def check() -> None:
            sweep(target.parent)  # a killed process may have left a deletion unfinished
            displaces.extend(displaced_by(target, project.total_limit))

        is_writer = is_writer_rank(processes, project.save_on_each_node)
        raise_on_all_ranks(check, processes, here=is_writer, operation="save_state (arguments)")
        return target, displaces
    if output_dir is None:
        raise ValueError(
            "output_dir is None and automatic checkpoint naming is off. Pass a folder, or "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    return Path(with_home("output_dir", output_dir)), []


def _count_save(project: ProjectConfiguration, saved: Path) -> None:
    """Set the number of the next save."""
    if project.automatic_checkpoint_naming:
        project.iteration = number_of(saved)  # the main process may have saved more often
    project.iteration += 1


def _add_to(
    late: main_alone.SaveAlone,
    prepared: PreparedObjects,
    rank: int,
    project: ProjectConfiguration,
    hooks: Iterable[SaveHook],
) -> Path:
    """Add this process's files to a checkpoint that the main process saved earlier, alone."""
    target, models = Path(late.path), list(prepared.models)
    staging = staging_path(target).with_name(f"{staging_path(target).name}-{rank}")

    def work() -> None:
        clear(staging)
        staging.mkdir()
        try:
            weights = list(map(bare_state_dict, models))
            for hook in hooks:
                _call_hook(hook, models, weights, staging)
            write_parts([tree_part(_own_state(prepared), _rank_stem(rank))])(staging)
            add_files(staging, target)
        finally:
            discard(staging)

    with forbid_collectives(
        "was called by a hook of save_state, which the main process called long before this one. "
        "Call accelerator.wait_for_everyone() before save_state."
    ):
        if not main_alone.add(late, rank, work):
            logger.warning(
                "Rank %d called save_state too late: its random states are missing from a "
                "checkpoint before %s.",
                rank,
                target,
            )
    _count_save(project, target)
    return target


def check_shared_disk(on_each_node: bool) -> None:
    """Raise a ValueError if machines share no disk: each would have only parts of the tensors."""
    if on_each_node:
        raise ValueError(
            "save_on_each_node=True is for machines that share no disk, but then no machine could "
            "read the other machines' parts of a sharded model: leave save_on_each_node out, and "
            "give a folder that all machines share."
        )


def _check_same_models(states: list[dict[str, Any]], remaining: list[dict[str, Any]]) -> None:
    """Check that hooks have left the same models to save on all processes; collective."""
    numbers = [next(n for n, s in enumerate(states) if s is state) for state in remaining]
    of_all = all_gather_object(numbers)
    if any(rank_numbers != numbers for rank_numbers in of_all):
        raise CheckpointError(
            f"The hooks of save_state left the models {of_all} on the processes: each process "
            "writes its part of a sharded model, so remove the same ones on all"
        )


def _call_hook(
    hook: Callable[..., object], models: list[nn.Module], weights: Any, folder: Path
) -> None:
    hook(models, weights, str(folder))


def _parts(
    prepared: PreparedObjects,
    weights: list[dict[str, Any]],
    processes: Ranks,
    is_writer: bool,
    safe_serialization: bool,
) -> list[StatePart]:
    """Return this process's parts of the checkpoint."""
    shards = None
    if prepared.sharded and prepared.engine is not None:
        shards = Shards(processes.process_index, prepared.engine.parallel.mesh)
    shared = prepared.parts()
    # On all processes, since reading the scaler's state may rescale the gradients.
    trees, rank_state = collect(shared), _own_state(prepared)
    if shards is not None and rank_state["gradients"] is not None:
        rank_state["gradients"], reduced = _separated(rank_state["gradients"])
        trees |= {_GRADIENTS: reduced} if reduced else {}
    shared_parts: list[StatePart] = []
    if is_writer or shards is not None:
        files = [_weights_names(number)[not safe_serialization] for number in range(len(weights))]
        names = {file: f"Model {number}" for number, file in enumerate(files)}
        for stem, part in shared.items():
            of_class = f" ({part.kind})" if isinstance(part, PlacedState) else ""
            what = "the prepared loaders" if stem == _LOADERS else stem
            names[stem] = f"The state of {what}{of_class}"
        models = dict(zip(files, weights, strict=True))
        shared_parts = state_parts(models, trees, shards, names)
    of_rank = [tree_part(rank_state, _rank_stem(processes.process_index))]
    if shards is not None:
        of_rank.append(shards_part(shards))
    return [*(shared_parts if is_writer else ()), *of_rank]


def _separated(gradients_: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split gradients into this process's own, and sharded ones, which are already reduced."""
    sharded = {name: gradient for name, gradient in gradients_.items() if is_sharded(gradient)}
    return {n: gradient for n, gradient in gradients_.items() if n not in sharded}, sharded


def _own_state(prepared: PreparedObjects) -> dict[str, Any]:
    """Return the per-rank state of this process."""
    state = collect(prepared.parts_of_rank())
    if not any(state.get("engine", {}).values()):
        state.pop("engine", None)
    loaders = {
        str(number): loader.state_dict()
        for number, loader in enumerate(prepared.dataloaders)
        if getattr(loader, "state_is_own", False)
    }
    return state | ({"loaders": loaders} if loaders else {})


@dataclass(kw_only=True)
class Stored:
    """The contents of a folder, read into memory.

    Attributes:
        path: The folder.
        weights: The models' state dicts.
        trees: The states that are the same on all processes, by file stem, see
            `PreparedObjects.parts`; "sampler" is missing if the folder's format does not store it.
        counts: The number of saved optimizers, schedulers and custom objects.
        own: The values that this process restores into `PreparedObjects.parts_of_rank`: ``"rng"``
            is missing if this rank saved none, ``"engine"`` has the states of all ranks.
        first_rng: The first rank's RNG states.
        lost: Warnings about state in the folder that cannot be restored.
    """

    path: Path
    weights: list[dict[str, torch.Tensor]]
    trees: dict[str, Any]
    counts: Mapping[str, int]
    own: dict[str, Any]
    first_rng: dict[str, Any] | None
    lost: list[str] = field(default_factory=list)

    @property
    def gradients(self) -> dict[str, torch.Tensor] | None:
        """The gradients of an incomplete window or of optimizers that had not stepped, or None."""
        return self.own.get("gradients")


def load_state(
    input_dir: str | os.PathLike[str] | None,
    prepared: PreparedObjects,
    processes: Ranks,
    project: ProjectConfiguration | None = None,
    *,
    map_location: str | None = None,
    hooks: Iterable[LoadHook] = (),
    **load_model_func_kwargs: Any,
) -> int:
    """Restore all prepared objects from ``input_dir``, or the newest intact checkpoint; collective.

    Loads folders of :func:`save_state` and of accelerate's ``save_state`` (0.31 to 1.x). The order
    is: check the hashes (a folder of accelerate has none), run the hooks, read everything and check
    on every rank that it matches, and then change the objects. The state of objects that are not
    prepared is skipped with a warning; registered objects must be the same.

    After loading one of the project's own checkpoints, ``project.iteration`` is the number of the
    next save. If newer checkpoints were skipped as damaged, it is above their numbers too.

    Args:
        input_dir: The folder; rank 0's value is used on all ranks. ``~`` is the home directory.
            None takes the intact checkpoint of the project with the highest number. If each machine
            saves its own, it must be intact on all machines.
        prepared: The objects to load into.
        processes: The ranks.
        project: The project whose checkpoints these are; None for the defaults.
        map_location: None, ``"cpu"`` or ``"on_device"``. All have the same effect: state is moved
            to the device of its parameters.
        hooks: Called on every rank with the models and the folder. Models that a hook removes from
            its list are not loaded.
        **load_model_func_kwargs: Arguments of the models' ``load_state_dict``. ``strict=False``
            allows names of weights to differ, and the scaler's and RNG states to be missing.

    Returns:
        The `Accelerator`'s count of micro-batches.

    Raises:
        TypeError: If ``map_location`` has another value.
        ValueError: If there is no ``input_dir`` and no automatic naming, or no such folder.
        CheckpointError: If anything is damaged, missing or does not match; raised on every rank.
    """
    project = project or ProjectConfiguration()
    target, following = choose_state(input_dir, project, processes, check=find_state)
    if map_location not in _MAP_LOCATIONS:
        raise TypeError(
            f"map_location is {map_location!r}; it must be one of None, 'cpu' and 'on_device'."
        )
    what, rank = f"Loading {target}", processes.process_index
    is_writer = is_writer_rank(processes, project.save_on_each_node)
    path, manifest = _examine_on_all(target, processes, project.save_on_each_node)
    models, model_kwargs = list(prepared.models), {"strict": True, **load_model_func_kwargs}
    hooks = list(hooks)
    for number in range(max(_step(what, "hooks", lambda: len(hooks), processes))):
        _step(
            what,
            f"hook {number + 1}",  # hooks may be registered on some processes only
            lambda: _call_load_hook(hooks[number : number + 1], models, path),  # noqa: B023 - called at once
            processes,
        )

    def read_and_check() -> Stored:
        if manifest is None:
            fields = accelerate_format.read(path, rank, processes.local_process_index)
            stored = Stored(path=path, **fields)
        else:
            stored = _read(Reader(path, manifest), rank, processes.num_processes, prepared)
        notes = _check(stored, models, prepared, model_kwargs)
        for note in notes if is_writer else ():
            logger.warning("Loading %s: %s", path, note)
        return stored

    read: list[Stored] = []  # not a result of `_step`, which sends results to all processes
    _step(what, "read", lambda: read.append(read_and_check()), processes)
    _step(
        f"{what}, which is partly done,",
        "load",
        lambda: _apply(read[0], models, prepared, rank, model_kwargs),
        processes,
    )
    if is_writer:
        logger.info("The state of %s was loaded.", path)
    if following is not None:
        project.iteration = following
    return prepared.step


def _step(what: str, name: str, work: Callable[[], T], processes: Ranks) -> list[T]:
    return run_on_all_ranks(what, work, processes, operation=f"load_state ({name})")


def _examine_on_all(
    target: Path, processes: Ranks, on_each_node: bool
) -> tuple[Path, dict[str, Any] | None]:
    """Return the writer rank's result of `find_state` after all ranks checked it; collective."""
    is_writer = is_writer_rank(processes, on_each_node)
    raise_on_all_ranks(
        lambda: _check_folder(target), processes, here=is_writer, operation="load_state (arguments)"
    )
    writer_rank = writer_rank_of(processes, on_each_node, operation="load_state (machines)")
    what = f"Loading {target}"
    paths = _step(what, "folder", lambda: os.path.abspath(target) if is_writer else "", processes)
    path, share = Path(paths[writer_rank]), share_of(processes, on_each_node)
    examined = _step(what, "files", lambda: share and find_state(path, share=share), processes)
    of_writer = examined[writer_rank]
    assert of_writer is not None
    return of_writer


def _call_load_hook(hooks: Sequence[LoadHook], models: list[nn.Module], path: Path) -> None:
    for hook in hooks:
        hook(models, str(path))


def find_state(
    target: Path, *, share: tuple[int, int] = (0, 1)
) -> tuple[Path, dict[str, Any] | None]:
    """Check that a folder holds an intact state.

    Args:
        target: The folder.
        share: See `trainer.checkpoint.verify`.

    Returns:
        The folder to read, see :func:`trainer.checkpoint.storage.examine`, and its manifest, which
        is None for a folder of accelerate.

    Raises:
        CheckpointError: If the folder is damaged, or does not hold a state of an `Accelerator`.
    """
    path = locate(Path(os.path.abspath(target)))
    manifests = [folder for folder in (path, path / STAGING) if (folder / MANIFEST).exists()]
    if not manifests and accelerate_format.recognised(path):
        return path, None
    weights = [name for name in _WEIGHTS if (path / name).exists()]
    if weights and not manifests and not any(path.glob("random_states_*.json")):
        raise CheckpointError(
            f"{path} holds weights ({weights[0]}), but no state of save_state: there is no "
            f"{MANIFEST}. Load them with load_checkpoint_in_model(model, folder)."
        )
    reader = Reader.open(path, share=share)
    if reader.manifest.get("kind") != _KIND:
        raise CheckpointError(
            f"{path} was not saved by Accelerator.save_state. A Trainer's checkpoint is resumed "
            "with Trainer.fit(…, ckpt_path=…)."
        )
    return reader.path, dict(reader.manifest)


def _check_folder(target: Path) -> None:
    if not locate(target).is_dir():
        if target.is_file():
            raise ValueError(
                f"{target} is a file; give the path of a folder that save_state wrote."
            )
        raise ValueError(
            f"There is no folder {os.fspath(target)!r}; give the path of a folder that save_state "
            "wrote."
        )


def _ranks_in(reader: Reader) -> list[int]:
    ranks = sorted(int(match[1]) for name in reader.files if (match := _RANK_FILE.fullmatch(name)))
    if not ranks:
        raise CheckpointError("The manifest lists no state of a process.")
    return ranks


class _SavedProcesses:
    """The states of the saving processes that this process needs.

    Args:
        reader: Reads the checkpoint.
        rank: The rank of this process.
        world_size: The number of processes that load.
        prepared: The objects to load into.

    Attributes:
        states: The states that were read, by rank.
        first: This rank's state, else the first one.
        is_own: Whether `first` is this rank's own state: the number of processes is unchanged.
    """

    def __init__(
        self, reader: Reader, rank: int, world_size: int, prepared: PreparedObjects
    ) -> None:
        self._reader, self._rank, self._world_size = reader, rank, world_size
        self._prepared = prepared
        self._saved_by = reader.manifest["world_size"]
        self._as_many = self._saved_by == world_size
        numbers = _ranks_in(reader)
        own_state = reader.tree(_rank_stem(rank)) if rank in numbers and self._as_many else {}
        # Sharded gradients are already reduced. An engine gets the states of all ranks.
        needs_all = (prepared.sharded and own_state.get("gradients")) or own_state.get("engine")
        ranks_to_read = [rank] if own_state and not needs_all else numbers
        self.states = {number: reader.tree(_rank_stem(number)) for number in ranks_to_read}
        self.first = self.states.get(rank) or self.states[min(self.states)]
        self.is_own = bool(own_state)

    def _of_all(self, how: str, what: str) -> list[dict[str, Any]]:
        # The other states are on another machine's disk, unless the main process saved alone.
        missing = len(self.states) < self._saved_by
        if missing and not self._reader.manifest.get("main_process_alone"):
            raise CheckpointError(
                f"{self._reader.path} was saved {how} by {self._saved_by} processes, and {what} "
                f"was found for only {len(self.states)} of them. Load it with {self._saved_by} "
                "processes."
            )
        return list(self.states.values())

    def gradients(self) -> dict[str, Any] | None:
        """Return the gradients that this process restores."""
        # Earlier releases saved no gradients.
        saved: dict[str, Any] | None = self.first.get("gradients")
        if saved is not None and self._as_many and not self._prepared.sharded:
            saved = gradients.for_rank([saved], 0, 1)
        elif saved is not None:
            of_ranks = self._of_all("before an update", "the gradients")
            by_rank = [state["gradients"] or {} for state in of_ranks]
            saved = gradients.for_rank(by_rank, self._rank, 0)  # the mean over ranks
            if self._as_many:  # gradients that are not sharded are each rank's own
                named = self._prepared.named_parameters()
                sharded = {name for name, parameter in named.items() if is_sharded(parameter)}
                own = gradients.for_rank(by_rank, self._rank, self._world_size)
                saved |= {name: value for name, value in own.items() if name not in sharded}
        if f"{_GRADIENTS}.json" in self._reader.files:
            saved = {**(saved or {}), **self._reader.tree(_GRADIENTS)}
        return saved

    def communication(self) -> list[Any]:
        """Return the states of this process's communication hooks."""
        saved: list[Any] = self.first.get("communication", [])  # earlier releases saved no states
        if not self._prepared.communication or not saved or self._as_many:
            return saved if self._prepared.communication else []
        of_ranks = self._of_all("with a communication hook", "its state")
        by_hook = zip(*(state["communication"] for state in of_ranks), strict=True)
        return [for_processes(states, self._rank, self._world_size) for states in by_hook]

    def loaders(self) -> dict[int, Any]:
        """Return the states of stream loaders whose data was split by process, by loader number."""
        loaders = {}
        for number, state in self.first.get("loaders", {}).items():
            if not self.is_own and state["batches"]:
                raise CheckpointError(
                    f"{self._reader.path} was saved inside a pass of a stream that was split over "
                    f"{self._saved_by} processes. Load it with {self._saved_by} processes, or save "
                    "at the end of a pass."
                )
            loaders[int(number)] = {"state": state if self.is_own else {**state, "stream": None}}
        return loaders


def _read(reader: Reader, rank: int, world_size: int, prepared: PreparedObjects) -> Stored:
    saved, manifest = _SavedProcesses(reader, rank, world_size, prepared), reader.manifest
    later = prepared.sharded  # each process needs its share of files that hold whole tensors
    first = saved.first
    own = {
        "step": first["step"],
        "gradients": saved.gradients(),
        "window_open": first.get("window_open", True),
        "communication": saved.communication(),
    }
    if rank in saved.states:
        own["rng"] = saved.states[rank]["rng"]
    if "engine" in first:
        own["engine"] = [state.get("engine", {}) for state in saved.states.values()]
    stems = [stem for kind in _STEMS for stem in map(_STEMS[kind], range(manifest[kind]))]
    trees = {
        stem: reader.tree(stem, later=later and stem.startswith("optimizer"))
        for stem in (*stems, *(["scaler"] if manifest["scaler"] else []), _LOADERS)
    }
    for number, state in saved.loaders().items():
        trees[_LOADERS][number] = state
    return Stored(
        path=reader.path,
        weights=[
            reader.weights(*_weights_names(number), later=later)
            for number in range(manifest["models"])
        ],
        trees=trees,
        counts=manifest,
        own=own,
        first_rng=first["rng"],
    )


def _check(
    stored: Stored,
    models: Sequence[nn.Module],
    prepared: PreparedObjects,
    model_kwargs: Mapping[str, Any],
) -> list[str]:
    """Check that the stored state matches the prepared objects; add names of tied weights.

    Returns:
        Warnings about state that will not be restored.

    Raises:
        CheckpointError: If the state of a prepared object is missing, or does not match. If
            ``model_kwargs["strict"]`` is False, names of weights may differ, and the scaler and RNG
            states may be missing.
        TypeError: If a model's ``load_state_dict`` does not take ``model_kwargs``.
    """
    notes, strict = list(stored.lost), model_kwargs["strict"]
    saved_counts = {"models": len(stored.weights)} | {k: stored.counts[k] for k in _STEMS}
    for kind, here in ({"models": len(models)} | prepared.counts).items():
        saved, registered = saved_counts[kind], kind == "custom_objects"
        what = kind.replace("_", " ")
        if saved < here or (registered and saved != here):
            raise CheckpointError(
                f"{stored.path} holds the state of {saved} {what}, but {here} are "
                f"{'registered' if registered else 'prepared'} here. Prepare and register the same "
                "objects, in the same order, as when it was saved."
            )
        if saved > here:
            notes.append(
                f"The last {saved - here} of {saved} {what} are not loaded: only {here} are "
                "prepared."
            )
    notes += _check_rest(stored, prepared, strict=strict)
    for number, (model, weights) in enumerate(zip(models, stored.weights, strict=False)):
        stored.weights[number] = weights = own_names(model, weights)
        parts = None if prepared.engine is None else prepared.engine.weights.parts(model)
        _check_model(f"Model {number} of {stored.path}", model, weights, parts, strict=strict)
        inspect.signature(model.load_state_dict).bind(weights, **model_kwargs)
    for number, optimizer in enumerate(prepared.optimizers):
        state = stored.trees[_STEMS["optimizers"](number)]
        _check_optimizer(f"Optimizer {number} of {stored.path}", optimizer, state)
    if stored.gradients is not None:
        notes += _check_gradients(stored, prepared)
    return notes


def _check_rest(stored: Stored, prepared: PreparedObjects, *, strict: bool) -> list[str]:
    notes = []
    if prepared.scaler is not None and "scaler" not in stored.trees:
        text = f"{stored.path} holds no state of a gradient scaler."
        if strict:
            raise CheckpointError(
                f"{text} Load it with the precision it was saved with, or pass strict=False to "
                "start with a new scaler."
            )
        notes.append(text)
    if prepared.scaler is None and "scaler" in stored.trees:
        notes.append("The gradient scaler's state is not loaded: this precision uses no scaler.")
    communication = stored.own.get("communication", [])
    if prepared.communication and len(communication) != len(prepared.communication):
        notes.append(
            f"It holds the state of {len(communication)} communication hooks, but "
            f"{len(prepared.communication)} are registered: the registered hooks keep their "
            "current state."
        )
        stored.own["communication"] = []
    loaders = stored.trees.get(_LOADERS)
    if loaders is not None and len(loaders) != len(prepared.dataloaders):
        notes.append(
            f"It holds the epochs of {len(loaders)} loaders, but {len(prepared.dataloaders)} are "
            "prepared; they are matched by their order."
        )
    if stored.first_rng is None:
        if strict:
            raise CheckpointError(
                f"{stored.path} holds no random states. Pass strict=False to leave the generators "
                "unchanged."
            )
        notes.append("It holds no random states: the generators are left unchanged.")
    return notes


def _check_model(
    what: str,
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    parts: Mapping[str, Any] | None = None,
    *,
    strict: bool,
) -> None:
    here = model.state_dict(keep_vars=True) if parts is None else parts
    by_value = {id(here[name]): weights[name] for name in weights if name in here}
    # A tied weight may be saved under its other name. A lazy module has nothing to save.
    for name, value in here.items():
        if name not in weights and (id(value) in by_value or is_lazy(value)):
            weights[name] = by_value.get(id(value), value)
    if renames(model):
        return
    shapes = {
        name: tuple(value.shape) for name, value in weights.items() if hasattr(value, "shape")
    }
    mismatch = compare(model, shapes, parts)
    if not strict:
        mismatch.missing, mismatch.unexpected = [], []
    if mismatch:
        raise CheckpointError(
            f"{what} does not fit the one prepared:\n{mismatch.bare(model)}\nRecreate it as it was "
            "when saved."
        )


def _check_optimizer(what: str, optimizer: Any, state: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not isinstance(state, dict) or "param_groups" not in state:
        return
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        raise CheckpointError(
            f"{what} has groups of {saved} parameters, but the one prepared has {here}. Recreate "
            "it as it was when saved."
        )


def _check_gradients(stored: Stored, prepared: PreparedObjects) -> list[str]:
    scaled = "scaler" in stored.trees
    if scaled != (prepared.scaler is not None):
        how = f"{'' if scaled else 'not '}scaled as in fp16"
        if not stored.own["window_open"]:  # not needed if the next call is zero_grad
            stored.own["gradients"] = None
            return [f"the gradients that an optimizer has not used yet are {how}, and are left out"]
        raise CheckpointError(
            f"{stored.path} was saved inside a window of micro-batches, whose gradients are {how}. "
            "Load it with the precision it was saved with."
        )
    return gradients.check(prepared.named_parameters(), stored.gradients or {})


def _apply(
    stored: Stored,
    models: Sequence[nn.Module],
    prepared: PreparedObjects,
    rank: int,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Restore everything, and the RNG states last."""
    dtypes: dict[int, torch.dtype] = {}
    for model, weights in zip(models, stored.weights, strict=False):
        dtypes |= dtypes_of(model, weights)
    prepared.reshard(drops_gradients=True)
    for model, weights in zip(models, stored.weights, strict=False):
        if prepared.engine is not None and load_parts(model, weights, prepared.engine.weights):
            continue
        values = placed(model, weights, assign=model_kwargs.get("assign", False))
        model.load_state_dict(values, **model_kwargs)
    restore(prepared.parts(dtypes), stored.trees, optional=("scaler", _LOADERS))
    parts_of_rank = prepared.parts_of_rank()
    restore(parts_of_rank, stored.own, optional=parts_of_rank.keys())
    if stored.first_rng is not None and "rng" not in stored.own:
        logger.warning(
            "%s was saved by fewer processes, or by the main process alone: rank %d starts with "
            "random states derived from rank 0's, and with rank 0's part of an incomplete window.",
            stored.path,
            rank,
        )
        digest = hashlib.sha256(stored.first_rng["torch"].numpy().tobytes()).digest()
        seed_generators(mix(int.from_bytes(digest[:7], "big"), rank))
