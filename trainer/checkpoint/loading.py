"""Load weights from any common form into a module, placed by a device map.

The form is found out first: one file or several, safetensors or ``torch.save`` (read as data, never
as code). The weights are compared with the module's before any is changed.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.sharded_state import INDEX as SHARDS
from trainer.checkpoint.sharded_state import ShardedTensor, like, whole
from trainer.checkpoint.storage import check_file, is_portable, reading
from trainer.checkpoint.weights import (
    BIN_NAME,
    INDEX_SUFFIX,
    WEIGHTS_NAME,
    offload_weight,
    own_names,
    save_offload_index,
    tied_names,
)
from trainer.errors import CheckpointError, module_logger, printable
from trainer.files import read_json
from trainer.names import bare_names
from trainer.tree import own_memory

logger = module_logger(__name__)
_SHOWN = 20  # names of each kind listed in an error
_DISK = "disk"
_OF_FSDP = "torch.distributed.fsdp"  # whose load hooks rename nothing
_EXTRA_STATE = "_extra_state"  # the last part of the key of what set_extra_state gets


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
            "values, and creating those would run whatever code the file names. Load it where it "
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
    """Yield the name and tensor of each weight of a file, tied names included.

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
                for each in (name, *(other for other, first in tied.items() if first == name)):
                    yield each, tensor
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
        places = content.get("weight_map", content)  # some files are only the map
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
    if isinstance(weights, dict) and list(weights) == ["model"]:  # what accelerate's FSDP saves
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


def compare(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> KeyMismatch:
    """Compare the names and shapes of weights with a model's.

    Two kinds of names do not count as missing: a tied weight whose other name was saved, and a
    weight of a lazy module that was never called.
    """
    here = model.state_dict(keep_vars=True)
    saved = {id(here[name]) for name in shapes if name in here}
    return KeyMismatch(
        [
            name
            for name, value in here.items()
            if name not in shapes and id(value) not in saved and not is_lazy(value)
        ],
        [name for name in shapes if name not in here],
        {
            name: (shapes[name], whole_shape(value))
            for name, value in here.items()
            if isinstance(value, torch.Tensor)
            and not is_lazy(value)
            and tuple(shapes.get(name, whole_shape(value))) != whole_shape(value)
        },
    )


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the one of which DeepSpeed has left nothing here."""
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
    load: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], None] | None = None,
) -> None:
    """Load weights into a module, whether its submodules are compiled or not.

    Args:
        module: The module.
        weights: Tensors by the module's own names, perhaps saved from a compiled module.
        where: The file that they came from, for the error.
        strict: All names and shapes must match. False loads the weights that match and logs a
            warning that lists the others.
        load: Copies whole weights into the module, where only an engine can.

    Raises:
        CheckpointError: Names or shapes do not match. The message lists the missing and unexpected
            names and the differing shapes. The module is then unchanged, except if load hooks
            rename keys: for such modules only loading shows what matches.
    """
    own_memory(module)
    weights = own_names(module, weights)
    mismatch = compare(module, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if (translates := _translates(module)) and load is None:
        mismatch = _load_translated(module, weights, mismatch, where)
    named = printable(str(mismatch.bare(module)))
    if mismatch and strict:
        raise CheckpointError(
            f"{os.fspath(where)} does not fit the module, a {type(module).__name__}:\n"
            f"{named}\nCreate the module as it was when the file was saved, or load what fits: "
            "load_from_checkpoint(…, strict=False), or strict_loading = False in the module, which "
            "does not count where fit resumes a run."
        )
    if load is not None:
        fitting = _without(weights, (*mismatch.misshaped, *mismatch.unexpected))
        load(module, {name: whole(value) for name, value in fitting.items()})
    elif not translates:
        _load(module, _without(weights, mismatch.misshaped), where)
    if mismatch:
        logger.warning(
            "%s does not fit %s completely; only what fits was loaded.\n%s",
            os.fspath(where),
            type(module).__name__,
            named,
        )


def _translates(module: torch.nn.Module) -> bool:
    """Return whether a module's loading may change the names or shapes of weights."""
    loaders = (type(each)._load_from_state_dict for each in module.modules())
    return renames(module) or any(not each.__module__.startswith("torch.nn.") for each in loaders)


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
    """Return weights for ``load_state_dict``, sharded as the module's are.

    Those of a sharded checkpoint are read when they are copied, one at a time, unless the module's
    own code takes them.

    Args:
        module: The module.
        weights: The weights by the module's own names.
        assign: They take the place of the module's tensors.
    """
    here = module.state_dict(keep_vars=True)
    copied = not (assign or _translates(module))
    return {
        name: value
        if copied and isinstance(value, ShardedTensor) and not name.endswith(_EXTRA_STATE)
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
        found, shapes = _load(module, weights, where), {}
    except CheckpointError:
        if not shapes:
            raise
        found = _load(module, _without(weights, shapes), where)
    # A name tied to a saved one is not missing.
    missing = [name for name in found.missing_keys if name in mismatch.missing]
    return KeyMismatch(missing, list(found.unexpected_keys), shapes)


def _without(weights: Mapping[str, torch.Tensor], names: Container[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  # of the documented API; see its description
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
) -> None:
    """Load weights into a model, perhaps on the meta device, one checkpoint file at a time.

    Names and shapes are compared before anything is loaded. Without ``device_map`` and ``dtype``
    the values are copied into the model's existing tensors. Otherwise, or if the model is on the
    meta device, the parameters are replaced by new ones, so create the optimizers afterwards. Tied
    weights stay tied.

    Args:
        model: The model.
        checkpoint: A file of weights (safetensors, or ``torch.save`` of a state dict), an index, or
            a folder that holds one; `model.safetensors` is preferred to `pytorch_model.bin`.
        device_map: The placement of modules by name (``""`` is the whole model; the longest
            matching name counts): a device, the index of an accelerator, or ``"disk"``. None leaves
            weights on their devices (on the CPU for the meta device).
        offload_folder: The folder for weights placed on ``"disk"``; their tensors in the model are
            then on the meta device.
        dtype: The dtype to convert floating-point weights to, for example ``"float16"``; None means
            the model's.
        offload_state_dict: Has no effect: weights are read from the file one by one in any case.
        offload_buffers: Also offload buffers of modules placed on disk; otherwise they go to the
            CPU.
        keep_in_fp32_modules: Names of modules kept in float32 if ``dtype`` is float16.
        offload_8bit_bnb: Not supported.
        strict: The names in the checkpoint and the model must be the same.

    Raises:
        ValueError: If there is no such checkpoint, a shape differs, a weight has no device, or an
            argument is outside its choices.
        CheckpointError: If a file is damaged or, with ``strict``, names differ.
    """
    if offload_8bit_bnb:
        raise ValueError("offload_8bit_bnb=True is not supported; load unquantised weights.")
    files = find_weight_files(checkpoint)
    wanted = _parse_dtype(dtype)
    devices = None if device_map is None else _devices(model, device_map)
    on_disk = devices is not None and _DISK in devices.values()
    if on_disk and offload_folder is None:
        raise ValueError("device_map puts weights on 'disk': give an offload_folder to write to.")
    here = model.state_dict(keep_vars=True)
    mismatch = _check(model, files, checkpoint, strict=strict)
    empty = any(isinstance(value, torch.Tensor) and value.is_meta for value in here.values())
    if devices is None and wanted is None and not empty:
        found = _fill(model, files)
    else:
        place = _Placement(
            here=here,
            devices=devices,
            folder=None if offload_folder is None else Path(offload_folder),
            dtype=wanted,
            fp32=keep_in_fp32_modules or [] if wanted == torch.float16 else [],
            disk_buffers=offload_buffers,
        )
        found = place.load(model, files)
    _tell(found.bare(model) if renames(model) else mismatch, checkpoint, strict=strict)


@dataclass(kw_only=True)
class _Placement:
    """Creates the new tensors of a model, each only once if it has several names."""

    here: Mapping[str, Any]
    devices: Mapping[str, str | torch.device] | None
    folder: Path | None
    dtype: torch.dtype | None
    fp32: list[str]
    disk_buffers: bool
    index: dict[str, Any] = field(default_factory=dict)

    def load(self, model: torch.nn.Module, files: Iterable[Path]) -> KeyMismatch:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        made: set[int] = set()
        names: dict[int, list[str]] = {}
        for name, value in self.here.items():
            names.setdefault(id(value), []).append(name)
        seen: list[Any] = []
        for file in files:
            part: dict[str, torch.Tensor] = {}
            for name, tensor in own_names(model, dict(read_each(file))).items():
                if name not in self.here:
                    part[name] = tensor.clone()  # for modules whose load hooks rename keys
                elif (key := id(self.here[name])) not in made:
                    made.add(key)
                    part.update(dict.fromkeys(names[key], self._make(name, tensor)))
            seen.append(model.load_state_dict(part, strict=False, assign=True))
        if self.folder is not None:
            save_offload_index(self.index, self.folder)
        return _combined(seen)

    def _make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        old = self.here[name]
        if not isinstance(old, torch.Tensor):
            return tensor.clone()  # passed to set_extra_state
        dtype = old.dtype
        if self.dtype is not None and tensor.is_floating_point():
            dtype = torch.float32 if self._is_kept(name) else self.dtype
        device = old.device if self.devices is None else self.devices[name]
        if device == _DISK and not isinstance(old, torch.nn.Parameter) and not self.disk_buffers:
            device = torch.device("cpu")
        if device == _DISK:
            assert self.folder is not None  # checked by load_checkpoint_in_model
            value = tensor.to(dtype)
            offload_weight(value, name, self.folder, self.index)
            value = torch.empty_like(value, device="meta")
        else:
            device = torch.device("cpu") if torch.device(device).type == "meta" else device
            value = tensor.to(device, dtype, copy=True)  # a view would keep the file memory-mapped
        if isinstance(old, torch.nn.Parameter):
            return torch.nn.Parameter(value, requires_grad=old.requires_grad)
        return value

    def _is_kept(self, name: str) -> bool:
        return any(f".{module}." in f".{name}" for module in self.fp32)


def _fill(model: torch.nn.Module, files: Iterable[Path]) -> KeyMismatch:
    return _combined(
        [
            model.load_state_dict(own_names(model, dict(read_each(file))), strict=False)
            for file in files
        ]
    )


def _combined(results: list[Any]) -> KeyMismatch:
    """Return the names missing from every file, and the names that the model does not have."""
    missing = set.intersection(*(set(result.missing_keys) for result in results))
    unexpected = set().union(*(set(result.unexpected_keys) for result in results))
    return KeyMismatch(sorted(missing), sorted(unexpected))


def _check(
    model: torch.nn.Module, files: Iterable[Path], checkpoint: object, *, strict: bool
) -> KeyMismatch:
    if renames(model):
        return KeyMismatch()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= own_names(model, read_shapes(file))
    mismatch = compare(model, shapes).bare(model)
    for name, (saved, here) in mismatch.misshaped.items():
        raise ValueError(
            f"The weight {name!r} has shape {saved} in {checkpoint} and {here} in the model; "
            "create the model as it was when it was saved."
        )
    if strict and mismatch:
        raise CheckpointError(_strictly(checkpoint, mismatch))
    return mismatch


def _tell(mismatch: KeyMismatch, checkpoint: object, *, strict: bool) -> None:
    if strict and mismatch:
        raise CheckpointError(_strictly(checkpoint, mismatch))
    if mismatch.unexpected:
        logger.warning(
            "%s holds weights that the model does not have: %s.",
            checkpoint,
            printable(", ".join(mismatch.unexpected)),
        )
    if mismatch.missing:
        logger.warning(
            "%s lacks weights of the model, which keep their values: %s.",
            checkpoint,
            ", ".join(mismatch.missing),
        )


def _strictly(checkpoint: object, mismatch: KeyMismatch) -> str:
    return (
        f"{checkpoint} does not fit the model:\n{mismatch}\nCreate the model as it was when it was "
        "saved, or load what fits with strict=False."
    )


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    named = getattr(torch, dtype.removeprefix("torch."), 0) if isinstance(dtype, str) else dtype
    if named is not None and not isinstance(named, torch.dtype):
        raise ValueError(
            f"dtype is {dtype!r}; it must be a torch.dtype or its name, for example 'float16'."
        )
    return named


def _devices(
    model: torch.nn.Module, device_map: Mapping[str, int | str | torch.device]
) -> dict[str, str | torch.device]:
    """Return the device or ``"disk"`` of every weight, by name."""
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map is {device_map!r}; it must be a dict from modules' names to devices, for "
            "example {'': 'cpu'}."
        )
    places = {
        module: place if place == _DISK else torch.device(place)
        for module, place in device_map.items()
    }
    devices: dict[str, str | torch.device] = {}
    names = model.state_dict().keys()
    for bare, name in bare_names(model, zip(names, names, strict=True)):
        fitting = [module for module in places if not module or f"{bare}.".startswith(f"{module}.")]
        if not fitting:
            raise ValueError(
                f"{bare} doesn't have any device set: device_map names {sorted(places)}. Add its "
                "module, or '' for all others."
            )
        devices[name] = places[max(fitting, key=len)]
    return devices
