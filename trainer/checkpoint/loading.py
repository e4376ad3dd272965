"""Read weights in any common form, and load them into a module.

The form is detected: one file or several, safetensors or ``torch.save`` (read as data, never as
code). The weights are compared with the module's before any is changed.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.serialization import extra_state
from trainer.checkpoint.sharded_state import INDEX as SHARDS
from trainer.checkpoint.sharded_state import ShardedTensor, like, materialize
from trainer.checkpoint.storage import check_file, is_portable, reading
from trainer.checkpoint.weights import (
    BIN_NAME,
    INDEX_SUFFIX,
    WEIGHTS_NAME,
    own_names,
    tied_names,
)
from trainer.distributed.process_control import on_all
from trainer.engines.base import Weights
from trainer.errors import CheckpointError, module_logger, printable
from trainer.files import read_json
from trainer.names import EXTRA_STATE, bare_names
from trainer.tree import fill_, is_sharded, own_memory

logger = module_logger(__name__)
_SHOWN = 20  # names of each kind listed in an error
_OF_FSDP = "torch.distributed.fsdp"  # modules whose load hooks do not rename keys


def read_torch_file(file: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` that holds tensors, arrays, plain values and containers.

    Args:
        file: The file.
        map_location: The device of the tensors, as for ``torch.load``.
        mmap: Memory-map the tensors; they must be copied before the file is deleted.

    Raises:
        CheckpointError: If the file is missing or damaged, or holds anything else; the message
            names it.
    """
    check_file(file)
    try:
        mmap = mmap and zipfile.is_zipfile(file)  # files of torch before 1.6 cannot be mapped
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(  # noqa: TID251  # for files of other tools, with weights_only
                file, map_location=map_location, weights_only=True, mmap=mmap
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is not read: it is damaged, or holds objects besides tensors and plain "
            "values, and unpickling those can run any code. Load it where it "
            f"was written and save plain values instead. ({_first_lines(error)}.)"
        ) from error
    except Exception as error:  # damaged bytes can raise anything
        raise CheckpointError(f"{file} cannot be read: {_first_lines(error)}.") from error


def _first_lines(error: Exception) -> str:
    """Return the part of torch's message that names the problem, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Unsupported" in line or "GLOBAL" in line] or lines[:1]
    text = " ".join(named[:1]).partition(" was not an allowed")[0].rstrip(".")
    return text or type(error).__name__


def _numpy_globals() -> list[Any]:
    """Return the safe globals for unpickling numpy arrays, by their names in numpy 1 and 2."""
    import _codecs

    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQfd"}
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *dtypes, _codecs.encode]


def find_weight_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a checkpoint's weights, in order.

    Args:
        checkpoint: A file of weights, an index (``.index.json``), or a folder with either. In a
            folder ``model.safetensors`` is preferred to ``pytorch_model.bin``, and both to shards.

    Raises:
        ValueError: If there are no weights, or more than one index.
        CheckpointError: If an index is damaged, or a file that it lists is missing.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _indexed(path) if path.name.endswith(".json") else [path]
    if not path.is_dir():
        raise ValueError(
            f"checkpoint is {os.fspath(checkpoint)!r}; it must be a file of weights, an index that "
            "ends in .index.json, or a folder with one of these."
        )
    for name in (WEIGHTS_NAME, BIN_NAME):
        if (path / name).is_file():
            return [path / name]
    if (path / SHARDS).is_file():
        raise ValueError(
            f"{path} holds a sharded model ({SHARDS}). Write its whole weights to one file, which "
            f"can be loaded here: trainer merge-weights {path} NAME.safetensors."
        )
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not indexes:
        raise ValueError(
            f"{path} holds neither {WEIGHTS_NAME} nor {BIN_NAME} nor an index that ends in "
            f"{INDEX_SUFFIX}; give the folder or the file that the weights were saved to."
        )
    if len(indexes) > 1:
        raise ValueError(
            f"{path} holds {len(indexes)} indexes: {', '.join(index.name for index in indexes)}. "
            "Give the path of the one to load, or delete the others."
        )
    return _indexed(indexes[0])


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in a file, tied names included, without reading weights.

    Raises:
        CheckpointError: If the file cannot be read, or is not a file of weights.
    """
    if file.suffix == ".safetensors":
        with open_safetensors(file) as opened:
            names = opened.keys()
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            tied = tied_names(opened.metadata() or {}, shapes)
            return shapes | {name: shapes[first] for name, first in tied.items()}
    return {name: tuple(tensor.shape) for name, tensor in _torch_weights(file).items()}


def read_each(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each weight in a file, tied names included.

    The tensors may be views of the memory-mapped file: copy the ones that you keep.

    Raises:
        CheckpointError: If the file cannot be read, or is not a file of weights.
    """
    if file.suffix == ".safetensors":
        with open_safetensors(file) as opened:
            names = list(opened.keys())
            tied = tied_names(opened.metadata() or {}, set(names))
            for name in names:
                tensor = opened.get_tensor(name)
                for alias in (name, *(other for other, first in tied.items() if first == name)):
                    yield alias, tensor
        return
    yield from _torch_weights(file).items()


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(read_index(index).values()))
    if not names:
        raise CheckpointError(f"{index} lists no file of weights.")
    if outside := [name for name in names if "/" in name or not is_portable(name)]:
        raise CheckpointError(f"{index} lists files outside its folder: {', '.join(outside)}.")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index} lists files that are missing: {', '.join(missing)}.")
    return [index.parent / name for name in names]


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each weight, as an index lists them.

    Raises:
        CheckpointError: The file cannot be read, or is not an index.
    """
    with reading(index, "is not an index of weights"):
        content = read_json(os.path.realpath(index))  # files in a hub cache are symlinks
        places = content.get("weight_map", content)  # some files consist of the map only
        if not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError(f"{index} is not an index of weights.")
        return dict(places)


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file, whose tensors are memory-mapped; any error is a CheckpointError."""
    from safetensors import safe_open

    check_file(file)
    with reading(file), safe_open(file, framework="pt") as opened:
        yield opened


def _torch_weights(file: Path) -> dict[str, torch.Tensor]:
    weights = read_torch_file(file, mmap=True)
    if isinstance(weights, dict) and list(weights) == ["model"]:  # as accelerate's FSDP saves them
        weights = weights["model"]
    if not isinstance(weights, dict) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise CheckpointError(
            f"{file} is not a file of weights: it must hold a dict of tensors by name, as "
            "torch.save(model.state_dict(), …) writes it."
        )
    return weights


@dataclass
class KeyMismatch:
    """Key mismatch: how saved weights differ from a model.

    Lists missing and unexpected names, and differing shapes as ``(saved, model's)``.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        shapes = [
            f"{name} ({list(saved)} in the file, {list(here)} in the module)"
            for name, (saved, here) in self.misshaped.items()
        ]
        kinds = {
            "missing from the file": self.missing,
            "unexpected in the file": self.unexpected,
            "of another shape": shapes,
        }
        return "\n".join(
            f"  {kind} ({len(names)}): {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}"
            for kind, names in kinds.items()
            if names
        )

    def bare(self, model: torch.nn.Module) -> KeyMismatch:
        """Return the mismatch with wrapper prefixes removed from all names, for messages."""
        missing, unexpected = (
            [name for name, _ in bare_names(model, zip(names, names, strict=True))]
            for names in (self.missing, self.unexpected)
        )
        return KeyMismatch(missing, unexpected, dict(bare_names(model, self.misshaped.items())))


def compare(
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    here: Mapping[str, Any] | None = None,
) -> KeyMismatch:
    """Compare the names and shapes of weights with a model's.

    `here` gives the model's weights if its own state dict does not have them.

    Three kinds of names do not count as missing: a tied weight whose other name was saved, a weight
    of a lazy module that was never called, and an extra state that is None, as in megatron-core.
    """
    here = model.state_dict(keep_vars=True) if here is None else here
    saved = {id(here[name]) for name in shapes if name in here}
    return KeyMismatch(
        [
            name
            for name, value in here.items()
            if not (name in shapes or value is None or id(value) in saved or is_lazy(value))
        ],
        [name for name in shapes if name not in here],
        {
            name: (shapes[name], full_shape(value))
            for name, value in here.items()
            if (isinstance(value, torch.Tensor) or is_sharded(value))
            and not is_lazy(value)
            and tuple(shapes.get(name, full_shape(value))) != full_shape(value)
        },
    )


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's full shape, even if it is a partitioned ZeRO-3 parameter."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def renames(model: torch.nn.Module) -> bool:
    """Return whether load hooks may rename keys, so that only loading shows which keys match."""
    hooks = (hook for part in model.modules() for hook in part._load_state_dict_pre_hooks.values())
    return not all(_OF_FSDP in getattr(hook, "__module__", "") for hook in hooks)


def load_into(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    where: str | os.PathLike[str],
    strict: bool = True,
    here: Mapping[str, Any] | None = None,
    engine_weights: Weights | None = None,
) -> None:
    """Load weights into a module, whether its submodules are compiled or not.

    Args:
        module: The module.
        weights: Tensors by the module's own names, perhaps saved from a compiled module.
        where: The file that they came from, for the error.
        strict: All names and shapes must match. False loads the weights that match and logs a
            warning that lists the others.
        here: See `compare`.
        engine_weights: The engine's view of the module's weights, if there is an engine.

    Raises:
        CheckpointError: Names or shapes do not match. The message lists the missing and unexpected
            names and the differing shapes. The module is then unchanged, except if load hooks
            rename keys: for such modules only loading shows what matches.
    """
    own_memory(module)
    weights = own_names(module, weights)
    parts = None if engine_weights is None else engine_weights.parts(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    mismatch = compare(module, shapes, here if parts is None else parts)
    if (translates := _translates(module)) and parts is None:
        mismatch = _load_translated(module, weights, mismatch, where)
    named = printable(str(mismatch.bare(module)))
    if mismatch and strict:
        raise CheckpointError(
            f"{os.fspath(where)} does not fit the module, a {type(module).__name__}:\n"
            f"{named}\nCreate the module as it was when the file was saved. To train another one, "
            "give a new project_dir; load_from_checkpoint(…, strict=False) loads the weights that "
            "fit."
        )
    if engine_weights is not None and parts is not None:
        load_parts(
            module, _without(weights, (*mismatch.misshaped, *mismatch.unexpected)), engine_weights
        )
    elif not translates:
        _load(module, _without(weights, mismatch.misshaped), where)
    if mismatch:
        logger.warning(
            "%s does not fit %s completely; only what fits was loaded.\n%s",
            os.fspath(where),
            type(module).__name__,
            named,
        )


@torch.no_grad()
def load_parts(
    module: torch.nn.Module, weights: Mapping[str, Any], engine_weights: Weights
) -> bool:
    """Copy weights into this process's parts of them, see `Weights.parts`; collective.

    Returns:
        False if nothing was done, because the module's ``load_state_dict`` must load them.
    """
    parts = engine_weights.parts(module, to_fill=True)
    if parts is None:
        return False
    extra = {n: materialize(w) for n, w in weights.items() if n.endswith(EXTRA_STATE)}
    to_fill = [(parts[n], weights[n]) for n in weights.keys() & parts.keys() - extra.keys()]

    def fill() -> None:
        for part, value in to_fill:
            fill_(part, value)

    # Each process reads different bytes. If that fails on one, the others must not continue.
    on_all(fill, "loading the weights")
    engine_weights.refresh(module)
    if extra:
        states = {name: extra_state(tensor) for name, tensor in extra.items()}
        engine_weights.load_extra_states(module, states)
    return True


def _translates(module: torch.nn.Module) -> bool:
    """Return whether loading into a module may change names or shapes of weights."""
    loaders = (type(part)._load_from_state_dict for part in module.modules())
    return renames(module) or any(not part.__module__.startswith("torch.nn.") for part in loaders)


def _load(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], where: str | os.PathLike[str]
) -> Any:
    try:
        return module.load_state_dict(placed(module, weights), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(where)} cannot be loaded: {error}") from error


def placed(
    module: torch.nn.Module, weights: Mapping[str, Any], *, assign: bool = False
) -> dict[str, Any]:
    """Return weights for ``load_state_dict``, sharded like the module's.

    Tensors of a sharded checkpoint are read one at a time, when they are copied, unless the
    module's own code handles them.

    Args:
        module: The module.
        weights: The weights by the module's own names.
        assign: They replace the module's tensors instead of being copied into them.
    """
    here = module.state_dict(keep_vars=True)
    copied = not (assign or _translates(module))
    return {
        name: value
        if copied and isinstance(value, ShardedTensor) and not name.endswith(EXTRA_STATE)
        else extra_state(materialize(value))
        if name.endswith(EXTRA_STATE)
        else like(value, here.get(name))
        for name, value in weights.items()
    }


def _load_translated(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    mismatch: KeyMismatch,
    where: str | os.PathLike[str],
) -> KeyMismatch:
    """Load, and return the key mismatch that remains after the load hooks renamed keys."""
    shapes = mismatch.misshaped
    try:
        keys, shapes = _load(module, weights, where), {}
    except CheckpointError:
        if not shapes:
            raise
        keys = _load(module, _without(weights, shapes), where)
    # A name tied to a saved one is not missing.
    missing = [name for name in keys.missing_keys if name in mismatch.missing]
    return KeyMismatch(missing, list(keys.unexpected_keys), shapes)


def _without(weights: Mapping[str, torch.Tensor], names: Container[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}
