"""Save the state of an `Accelerator` to a folder, and load it; collective.

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

The folder may hold other files; see :mod:`trainer.checkpoint.storage`.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch

from trainer.checkpoint import accelerate_format, gradients
from trainer.checkpoint.loading import read_shapes, read_torch_file
from trainer.checkpoint.restore import OPTIMIZER_FORM, Prepared, Stored, apply, check, logger
from trainer.checkpoint.save import (
    Ranks,
    is_writer_rank,
    raise_on_all_ranks,
    run_on_all_ranks,
    writer_rank_of,
)
from trainer.checkpoint.serialization import load_tree, save_tree
from trainer.checkpoint.storage import (
    MANIFEST,
    STAGING,
    abandon,
    check_form,
    commit_folder,
    count,
    examine,
    locate,
    open_folder,
)
from trainer.checkpoint.weights import (
    BIN_NAME,
    INDEX_SUFFIX,
    WEIGHTS_NAME,
    load_weights,
    separate_tied,
    write_weights_file,
)
from trainer.engines.comm_hooks import for_processes
from trainer.errors import CheckpointError, DistributedOperationException
from trainer.names import bare_state_dict
from trainer.optim.optimizer import parameters_of
from trainer.optim.state import state_of
from trainer.rng import is_rng_state, rng_state

FILE = re.compile(r"random_states_\d+\.json")


def name_of(rank: int) -> str:
    """Return the stem of a rank's own file."""
    return f"random_states_{rank}"


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A rank that loads a state, and the per-rank state that it has read.

    Attributes:
        path: The checkpoint.
        files: The names of its files.
        own: The state saved by the same rank or, if fewer ranks saved, by another rank. Earlier
            releases saved neither gradients nor states of communication hooks.
        rank: The rank.
        saved_by: The number of processes that saved.
        here: The number of processes that load.
    """

    path: Path
    files: Container[str]
    own: dict[str, Any]
    rank: int
    saved_by: int
    here: int


def gradients_of(it: Loading) -> dict[str, torch.Tensor] | None:
    """Return this rank's gradients; with a changed number of processes, the mean of all ranks'."""
    if it.own.get("gradients") is None:
        return None
    if it.saved_by == it.here:
        return gradients.given([it.own["gradients"]], 0, 1)
    ranks = _every_rank(it, "before an update", "their gradients")
    return gradients.given([each["gradients"] or {} for each in ranks], it.rank, it.here)


def communication_of(it: Loading) -> list[dict[str, Any]]:
    """Return this rank's communication hook states, converted for the number of processes."""
    own: list[dict[str, Any]] = it.own.get("communication", [])
    if it.saved_by == it.here or not own:
        return own
    ranks = _every_rank(it, "with a communication hook", "its state on each")
    by_hook = zip(*(each["communication"] for each in ranks), strict=True)
    return [for_processes(states, it.rank, it.here) for states in by_hook]


def _every_rank(it: Loading, how: str, what: str) -> list[dict[str, Any]]:
    """Return the per-rank state of every rank that saved."""
    path, saved_by = it.path, it.saved_by
    stems = [name_of(rank) for rank in range(saved_by)]
    missing = [f"{stem}.json" for stem in stems if f"{stem}.json" not in it.files]
    if missing:  # they are on another machine's disk
        raise CheckpointError(
            f"{path} was saved {how} by {saved_by} processes, and {', '.join(missing)} with {what} "
            f"are missing here. Load it with {saved_by} processes."
        )
    return [load_tree(path, stem, it.files) for stem in stems]


SaveHook = Callable[[list[torch.nn.Module], list[dict[str, Any]], str], object]
LoadHook = Callable[[list[torch.nn.Module], str], object]
T = TypeVar("T")

_WEIGHTS = (WEIGHTS_NAME, f"{WEIGHTS_NAME}{INDEX_SUFFIX}", BIN_NAME)
_KIND = "accelerator"
_FORM = {
    **dict.fromkeys(("world_size", "models", "optimizers", "schedulers", "custom_objects"), count),
    "scaler": bool,
}
_RANK_FORM = {
    "rng": is_rng_state,
    "step": count,
    "gradients?": (dict, NoneType),
    "window_open?": bool,
    "communication?": list,
}
_MAP_LOCATIONS = (None, "cpu", "on_device")


def save_state(
    folder: str | os.PathLike[str],
    prepared: Prepared,
    processes: Ranks,
    *,
    safe_serialization: bool = True,
    hooks: Iterable[SaveHook] = (),
    save_on_each_node: bool = False,
) -> Path:
    """Save all prepared objects to a folder; collective.

    An earlier checkpoint of this format in ``folder`` is replaced; other files there stay.

    Args:
        folder: The folder to save to. Rank 0's is used by all ranks.
        prepared: The objects to save.
        processes: The ranks.
        safe_serialization: Save weights as safetensors; otherwise with ``torch.save``.
        hooks: Called on every rank with the models, their state dicts and the staging folder,
            before anything is written. State dicts that a hook removes from its list (on the
            process that writes) are not saved. Files written to the staging folder become part of
            the checkpoint.
        save_on_each_node: The machines share no disk, so local rank 0 of each writes.

    Returns:
        The folder, once everything is on disk.

    Raises:
        CheckpointError: If any rank failed or an object's state cannot be saved; raised on every
            rank, and the message names it. The previous contents of ``folder`` are then unchanged.
    """
    target = Path(folder)
    what = f"Saving {target}"
    writes = is_writer_rank(processes, save_on_each_node)
    hooks, models = list(hooks), list(prepared.models)
    weights: list[dict[str, Any]] = []

    def step(name: str, work: Callable[[], T]) -> list[T]:
        return run_on_all_ranks(what, work, processes, operation=f"save_state ({name})")

    def begin() -> int:
        weights.extend(map(bare_state_dict, models))
        return len(hooks)

    def open_() -> tuple[Path, Path, Path] | None:
        place = Path(os.path.abspath(target))
        return (open_folder(place), place, target) if writes else None

    most_hooks = max(step("begin", begin))
    writer_rank = writer_rank_of(processes, save_on_each_node, operation="save_state (machines)")
    opened = step("folder", open_)[writer_rank]
    assert opened is not None  # it is the writer rank's
    staging, place, target = opened

    def write() -> int:
        trees = _trees(prepared)
        if writes:
            _write_all(weights, trees, staging, safe=safe_serialization)
        # After reading the scaler's state, which may rescale the gradients.
        save_tree(_own_state(prepared), staging, name_of(processes.process_index))
        return len(weights)

    def commit() -> None:
        if writes:
            commit_folder(staging, place, manifest)

    try:
        for number in range(most_hooks):  # one step each, since a hook may call collectives
            step(
                f"hook {number + 1}",
                partial(_call_hook, hooks, number, models, weights, str(staging)),
            )
        count = step("write", write)[writer_rank]
        manifest = _manifest_of(prepared) | {"world_size": processes.num_processes, "models": count}
        step("commit", commit)
    except (CheckpointError, DistributedOperationException):
        if writes:
            abandon(staging)
        raise
    if writes:
        logger.info("The state was saved to %s.", target)
    return target


def load_state(
    folder: str | os.PathLike[str],
    prepared: Prepared,
    processes: Ranks,
    *,
    map_location: str | None = None,
    strict: bool = True,
    hooks: Iterable[LoadHook] = (),
    save_on_each_node: bool = False,
    **load_model_func_kwargs: Any,
) -> int:
    """Restore all prepared objects from a folder; collective.

    Loads folders of :func:`save_state` and of accelerate's ``save_state`` (0.31 to 1.x). The order
    is: check the hashes (a folder of accelerate has none), run the hooks, read everything and check
    on every rank that it matches, and then change the objects. The state of objects that are not
    prepared is skipped with a warning; registered objects must be the same.

    Args:
        folder: The folder. Rank 0's is used by all ranks.
        prepared: The objects to load into.
        processes: The ranks.
        map_location: None, ``"cpu"`` or ``"on_device"``. All have the same effect: state is moved
            to the device of its parameters.
        strict: False allows names of weights to differ, and the scaler's and RNG states to be
            missing.
        hooks: Called on every rank with the models and the folder. Models that a hook removes from
            its list are not loaded.
        save_on_each_node: The machines share no disk.
        **load_model_func_kwargs: Arguments of the models' ``load_state_dict``.

    Returns:
        The `Accelerator`'s count of micro-batches.

    Raises:
        TypeError: If ``map_location`` has another value.
        ValueError: If the folder does not exist.
        CheckpointError: If anything is damaged, missing or does not match; raised on every rank.
    """
    if map_location not in _MAP_LOCATIONS:
        raise TypeError(
            f"map_location is {map_location!r}; it must be one of None, 'cpu' and 'on_device'."
        )
    target = Path(folder)
    main = is_writer_rank(processes, save_on_each_node)
    what = f"Loading {target}"
    hooks, models = list(hooks), list(prepared.models)

    def step(name: str, work: Callable[[], T], what: str = what) -> list[T]:
        return run_on_all_ranks(what, work, processes, operation=f"load_state ({name})")

    raise_on_all_ranks(
        lambda: _check_folder(target), processes, here=main, operation="load_state (arguments)"
    )
    writer_rank = writer_rank_of(processes, save_on_each_node, operation="load_state (machines)")
    examined = step("folder", lambda: find_state(target) if main else None)[writer_rank]
    assert examined is not None  # it is the writer rank's
    path, manifest = examined
    for number in range(max(step("hooks", lambda: len(hooks)))):
        step(f"hook {number + 1}", partial(_call_hook, hooks, number, models, str(path)))
    stored = None

    def read() -> None:
        nonlocal stored
        rank = processes.process_index
        if manifest is None:
            stored = accelerate_format.read(path, rank, processes.local_process_index)
        else:
            hooked = bool(prepared.communication)
            stored = _read(path, manifest, rank, processes.num_processes, hooked=hooked)
        notes = check(stored, models, prepared, strict=strict, model_kwargs=load_model_func_kwargs)
        if stored.gradients is not None:
            notes += _check_gradients(stored, prepared)
        for note in notes if main else ():
            logger.warning("Loading %s: %s", path, note)

    def load() -> None:
        assert stored is not None  # read() succeeded
        apply(
            stored,
            models,
            prepared,
            rank=processes.process_index,
            strict=strict,
            model_kwargs=load_model_func_kwargs,
        )
        if stored.gradients is not None or prepared.window_open:
            gradients.put(_named(prepared), stored.gradients or {})

    step("read", read)
    step("load", load, f"{what}, which is partly done,")
    assert isinstance(stored, Stored)
    if main:
        logger.info("The state of %s was loaded.", path)
    return stored.step


def find_state(target: Path) -> tuple[Path, dict[str, Any] | None]:
    """Check that a folder holds an intact state.

    Returns:
        The folder to read, see :func:`trainer.checkpoint.storage.examine`, and its manifest, which
        is None for a folder of accelerate.

    Raises:
        CheckpointError: If the folder is damaged, or does not hold a state of an `Accelerator`.
    """
    path = locate(Path(os.path.abspath(target)))
    manifests = [each for each in (path, path / STAGING) if (each / MANIFEST).exists()]
    if not manifests and accelerate_format.recognised(path):
        return path, None
    weights = [each for each in _WEIGHTS if (path / each).exists()]
    if weights and not manifests and not any(path.glob("random_states_*.json")):
        raise CheckpointError(
            f"{path} holds weights ({weights[0]}), but no state of save_state: there is no "
            f"{MANIFEST}. Load them with load_checkpoint_in_model(model, folder)."
        )
    path, manifest = examine(path)
    if manifest.get("kind") != _KIND:
        raise CheckpointError(
            f"{path} was not saved by Accelerator.save_state. A Trainer's checkpoint is resumed "
            "with Trainer.fit(…, ckpt_path=…)."
        )
    check_form(manifest, _FORM, path / MANIFEST)
    return path, manifest


def _check_folder(target: Path) -> None:
    if not locate(target).is_dir():
        if target.is_file():
            raise ValueError(
                f"{target} is a file; give the path of a folder that save_state wrote."
            )
        raise ValueError(
            f"Tried to find {target} but folder does not exist. Give the path of a folder that "
            "save_state wrote."
        )


def _call_hook(hooks: Sequence[Callable[..., object]], number: int, *args: Any) -> None:
    if number < len(hooks):  # hooks may be registered on some processes only
        hooks[number](*args)  # its result is dropped: it may not be picklable


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


def _manifest_of(prepared: Prepared) -> dict[str, Any]:
    return {
        "kind": _KIND,
        "optimizers": len(prepared.optimizers),
        "schedulers": len(prepared.schedulers),
        "custom_objects": len(prepared.custom_objects),
        "scaler": prepared.scaler is not None,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _own_state(prepared: Prepared) -> dict[str, Any]:
    """Return the per-rank state of this process."""
    return {
        "step": prepared.step,
        "rng": rng_state(),
        "gradients": _gradients_of(prepared),
        "window_open": prepared.window_open,
        "communication": [hook.state_dict() for hook in prepared.communication],
    }


def _trees(prepared: Prepared) -> dict[str, tuple[str, Any]]:
    """Return the trees to save by file stem, each with its owner's type."""
    owners: dict[str, Any] = {}
    for name, objects in (("optimizer", prepared.optimizers), ("scheduler", prepared.schedulers)):
        owners |= {_numbered(name, number): obj for number, obj in enumerate(objects)}
    for number, obj in enumerate(prepared.custom_objects):
        owners[f"custom_checkpoint_{number}"] = obj
    if prepared.scaler is not None:
        owners["scaler"] = prepared.scaler
    trees = {
        stem: (type(obj).__name__, state_of(obj, prepared.models)) for stem, obj in owners.items()
    }
    loaders = [{"state": loader.state_dict()} for loader in prepared.dataloaders]
    return {**trees, "sampler": ("prepared loaders", loaders)}


def _write_all(
    weights: list[dict[str, Any]],
    trees: dict[str, tuple[str, Any]],
    staging: Path,
    *,
    safe: bool,
) -> None:
    name, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    for number, state in enumerate(weights):
        with _refused_as(f"Model {number}"):
            tensors, tied = separate_tied(state)
            write_weights_file(tensors, tied, staging / f"{_numbered(name, number)}.{suffix}")
    for stem, (owner, tree) in trees.items():
        with _refused_as(f"The state of {stem} ({owner})"):
            save_tree(tree, staging, stem)


@contextmanager
def _refused_as(what: str) -> Iterator[None]:
    """Turn a TypeError into a CheckpointError that names the object which cannot be saved."""
    try:
        yield
    except TypeError as error:
        raise CheckpointError(f"{what} cannot be saved. {error}") from error


def _gradients_of(prepared: Prepared) -> dict[str, Any] | None:
    """Return gradients of an open window (even if there are none) or of optimizers yet to step."""
    named = _named(prepared)
    if prepared.window_open:
        return gradients.take(named)
    ours = set(map(id, parameters_of(prepared.waiting)))
    return gradients.take({name: p for name, p in named.items() if id(p) in ours}) or None


def _check_gradients(stored: Stored, prepared: Prepared) -> list[str]:
    if (stored.scaler is None) != (prepared.scaler is None):
        how = f"{'not ' if stored.scaler is None else ''}scaled as in fp16"
        if not stored.window_open:  # they may not be needed: the next call may be zero_grad
            stored.gradients = None
            return [f"the gradients that an optimizer has not used yet are {how}, and are left out"]
        raise CheckpointError(
            f"{stored.path} was saved inside a window of micro-batches, whose gradients are {how}. "
            "Load it with the precision it was saved with."
        )
    return gradients.check(_named(prepared), stored.gradients or {})


def _named(prepared: Prepared) -> dict[str, torch.nn.Parameter]:
    return gradients.named_parameters(prepared.models, prepared.optimizers)


def check_readable(path: Path, manifest: dict[str, Any]) -> None:
    """Check the form of everything in a folder; of weight files, only the headers are read.

    Raises:
        CheckpointError: A file is malformed.
    """
    for number in range(manifest["models"]):
        file = path / _weights_file(manifest["files"], number)
        if file.suffix == ".safetensors":
            read_shapes(file)
    _read_shared(path, manifest, copy=False)
    for stem in _rank_stems(manifest["files"]):
        load_tree(path, stem, manifest["files"], _RANK_FORM, copy=False)


def _rank_stems(listed: Iterable[str]) -> list[str]:
    stems = sorted(name[: -len(".json")] for name in listed if FILE.fullmatch(name))
    if not stems:
        raise CheckpointError("The manifest lists no state of a process.")
    return stems


def _weights_file(listed: Container[str], number: int) -> str:
    """Return the name of the weights file of model `number`, as the manifest lists it."""
    names = f"{_numbered('model', number)}.safetensors", f"{_numbered('pytorch_model', number)}.bin"
    for name in names:
        if name in listed:
            return name
    raise CheckpointError(f"The manifest lists neither {names[0]} nor {names[1]}.")


def _read_shared(path: Path, manifest: dict[str, Any], *, copy: bool = True) -> dict[str, Any]:
    """Return the fields of `Stored` that are the same on all processes, except the weights."""

    def tree(stem: str, form: Any = object) -> Any:
        return load_tree(path, stem, manifest["files"], form, copy=copy)

    def trees(name: str, key: str, form: Any) -> list[Any]:
        return [tree(_numbered(name, number), form) for number in range(manifest[key])]

    numbers = range(manifest["custom_objects"])
    return {
        "optimizers": trees("optimizer", "optimizers", OPTIMIZER_FORM),
        "schedulers": trees("scheduler", "schedulers", dict),
        "loaders": tree("sampler", [{"state": object}]),
        "custom_objects": [tree(f"custom_checkpoint_{number}") for number in numbers],
        "scaler": tree("scaler", dict) if manifest["scaler"] else None,
    }


def _read(
    path: Path, manifest: dict[str, Any], rank: int, processes: int, *, hooked: bool
) -> Stored:
    saved_by, files = manifest["world_size"], manifest["files"]
    stem = name_of(rank)
    own = load_tree(path, stem, files, _RANK_FORM) if rank < saved_by else None
    first = own or load_tree(path, _rank_stems(files)[0], files, _RANK_FORM)
    loading = Loading(
        path=path, files=files, own=first, rank=rank, saved_by=saved_by, here=processes
    )
    weights = [path / _weights_file(files, number) for number in range(manifest["models"])]
    return Stored(
        path=path,
        weights=[
            load_weights(file) if file.suffix == ".safetensors" else read_torch_file(file)
            for file in weights
        ],
        rng=None if own is None else own["rng"],
        first_rng=first["rng"],
        step=first["step"],
        gradients=gradients_of(loading),
        window_open=first.get("window_open", True),
        communication=communication_of(loading) if hooked else [],
        **_read_shared(path, manifest),
    )
