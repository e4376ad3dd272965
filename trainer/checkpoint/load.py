"""Load weights in any common checkpoint layout into a model, placed by a device map."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.fitting import Misfits, compare, renames
from trainer.checkpoint.offload import offload_weight, save_offload_index
from trainer.checkpoint.weightfiles import find_weight_files, read_each, read_shapes
from trainer.checkpoint.weights import own_names
from trainer.errors import CheckpointError, printable
from trainer.names import bare_names

logger = logging.getLogger(__name__)

_DISK = "disk"


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
    misfits = _check(model, files, checkpoint, strict=strict)
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
    _tell(found.bare(model) if renames(model) else misfits, checkpoint, strict=strict)


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

    def load(self, model: torch.nn.Module, files: Iterable[Path]) -> Misfits:
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


def _fill(model: torch.nn.Module, files: Iterable[Path]) -> Misfits:
    return _combined(
        [
            model.load_state_dict(own_names(model, dict(read_each(file))), strict=False)
            for file in files
        ]
    )


def _combined(results: list[Any]) -> Misfits:
    """Return the names missing from every file, and the names that the model does not have."""
    missing = set.intersection(*(set(result.missing_keys) for result in results))
    unexpected = set().union(*(set(result.unexpected_keys) for result in results))
    return Misfits(sorted(missing), sorted(unexpected))


def _check(
    model: torch.nn.Module, files: Iterable[Path], checkpoint: object, *, strict: bool
) -> Misfits:
    if renames(model):
        return Misfits()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= own_names(model, read_shapes(file))
    misfits = compare(model, shapes).bare(model)
    for name, (saved, here) in misfits.misshaped.items():
        raise ValueError(
            f"The weight {name!r} has shape {saved} in {checkpoint} and {here} in the model; "
            "create the model as it was when it was saved."
        )
    if strict and misfits:
        raise CheckpointError(_strictly(checkpoint, misfits))
    return misfits


def _tell(misfits: Misfits, checkpoint: object, *, strict: bool) -> None:
    if strict and misfits:
        raise CheckpointError(_strictly(checkpoint, misfits))
    if misfits.unexpected:
        logger.warning(
            "%s holds weights that the model does not have: %s.",
            checkpoint,
            printable(", ".join(misfits.unexpected)),
        )
    if misfits.missing:
        logger.warning(
            "%s lacks weights of the model, which keep their values: %s.",
            checkpoint,
            ", ".join(misfits.missing),
        )


def _strictly(checkpoint: object, misfits: Misfits) -> str:
    return (
        f"{checkpoint} does not fit the model: {misfits}. Create the model as it was when it was "
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
    places = {module: _parse_place(module, place) for module, place in device_map.items()}
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


def _parse_place(module: str, place: int | str | torch.device) -> str | torch.device:
    if place == _DISK:
        return _DISK
    try:
        device = torch.device(place)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(
            f"device_map puts {module!r} on {place!r}, which does not exist; it must be a device "
            "of this machine, the index of an accelerator, 'cpu' or 'disk'."
        ) from error
    return device
