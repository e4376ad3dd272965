"""Load checkpoints into models that may be larger than memory, placed by a device map.

The names and shapes in a checkpoint are compared with the model's before anything is loaded. Then
the weights are read, converted and placed one by one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.big_models.device_map import Memory, as_device_map
from trainer.big_models.dispatch import DISK, check_values, dispatch_model
from trainer.big_models.offload import (
    Folder,
    Index,
    entry,
    link_weights,
    offload_weight,
    save_offload_index,
)
from trainer.big_models.tensors import Device, as_device, as_parameter, longest_prefix, parse_dtype
from trainer.checkpoint.loading import (
    KeyMismatch,
    compare,
    find_weight_files,
    read_each,
    read_shapes,
    renames,
)
from trainer.checkpoint.sharded_state import ShardedTensor, TensorFile, materialize
from trainer.checkpoint.storage import reading
from trainer.checkpoint.weights import as_given, own_names, tied_names
from trainer.errors import CheckpointError, module_logger, printable
from trainer.names import bare_names

logger = module_logger(__name__)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model and place its modules by a device map.

    Example::

        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(
            model, "checkpoint", device_map="auto", offload_folder="offload",
            no_split_module_classes=["Block"],
        )

    Args:
        model: The model, usually created under `init_empty_weights`; changed in place.
        checkpoint: See `load_checkpoint_in_model`.
        device_map: A device map, or how to infer one: ``"auto"`` and ``"balanced"`` spread the
            model evenly over the accelerators, ``"balanced_low_0"`` leaves the first one as free as
            possible, ``"sequential"`` fills them one after another. None only loads.
        max_memory: See `get_max_memory`; used if the map is inferred.
        no_split_module_classes: See `infer_auto_device_map`; used if the map is inferred.
        offload_folder: The folder for weights on disk; required if there are any.
        offload_buffers: See `dispatch_model`.
        dtype: The dtype to convert floating-point weights to; None means the model's.
        offload_state_dict: Has no effect: weights are read one by one in any case.
        skip_keys: See `dispatch_model`.
        preload_module_classes: See `dispatch_model`.
        force_hooks: See `dispatch_model`.
        strict: See `load_checkpoint_in_model`.
        full_state_dict: See `load_checkpoint_in_model`.
        broadcast_from_rank0: See `load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        ValueError: See `load_checkpoint_in_model` and `dispatch_model`; or `device_map` is neither
            a map nor one of the choices.
        CheckpointError: See `load_checkpoint_in_model`.
    """
    resolved = None
    if device_map is not None:
        unsplit = no_split_module_classes
        resolved = as_device_map(model, device_map, max_memory, unsplit, dtype, offload_buffers)
    load_checkpoint_in_model(
        model,
        checkpoint,
        resolved,
        offload_folder,
        dtype,
        bool(offload_state_dict),
        offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if resolved is None:
        check_values(model)
        return model
    return dispatch_model(
        model,
        resolved,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, Tensor]:
    """Return the weights in one file by name, tied names included.

    Args:
        checkpoint_file: A file of safetensors, or of ``torch.save`` with nothing but tensors.
        device_map: The devices of modules; weights without a device, or on the disk, are loaded to
            the CPU. None loads all to the CPU.

    Raises:
        CheckpointError: The file cannot be read, or is not a file of weights.
    """
    devices = device_map or {}
    loaded: dict[str, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    for name, (source, _) in _weights_of_file(Path(checkpoint_file)).items():
        target = devices.get(longest_prefix(name, devices) or "", "cpu")
        if id(source) not in tensors:
            tensor = materialize(source)
            device = as_device("cpu" if target == DISK else target)
            tensors[id(source)] = tensor.to(device, copy=tensor is source)
        loaded[name] = tensors[id(source)]
    return loaded


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  # of the documented API; see its description
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, perhaps on the meta device, one at a time.

    Names and shapes are compared before anything is loaded. Without ``device_map`` and ``dtype``
    the values are copied into the model's existing tensors. Otherwise, or if the model is on the
    meta device, the parameters are replaced by new ones, so create the optimizers afterwards. Tied
    weights stay tied; they are placed on disk only if all of their names are.

    A model with weights on disk runs after `dispatch_model`.

    Example::

        with init_empty_weights():
            model = Model(config)
        load_checkpoint_in_model(model, "checkpoint", dtype="bfloat16")

    Args:
        model: The model.
        checkpoint: A file of weights (safetensors, or ``torch.save`` of a state dict), an index, or
            a folder that holds one; `model.safetensors` is preferred to `pytorch_model.bin`.
        device_map: The placement of modules by name (``""`` is the whole model; the longest
            matching name wins): a device, the index of an accelerator, or ``"disk"``. None leaves
            weights on their devices (on the CPU for the meta device).
        offload_folder: The folder for weights placed on ``"disk"``; their tensors in the model are
            then on the meta device. Safetensors files on the same disk are linked into it, so that
            weights are not copied unless they are converted.
        dtype: The dtype to convert floating-point weights to, for example ``"float16"``; None means
            the model's.
        offload_state_dict: Has no effect: weights are read from the file one by one in any case.
        offload_buffers: Also offload buffers of modules placed on disk; otherwise they go to the
            CPU.
        keep_in_fp32_modules: Names of modules kept in float32 if ``dtype`` is float16.
        offload_8bit_bnb: Not supported.
        strict: Require the same names in the checkpoint and the model.
        full_state_dict: False, for sharded tensors in the checkpoint, is not supported.
        broadcast_from_rank0: Not supported: each process reads the checkpoint.

    Raises:
        ValueError: If there is no such checkpoint, a shape differs, a weight has no device, or an
            argument is outside its choices.
        CheckpointError: If a file is damaged or, with ``strict``, names differ.
    """
    if offload_8bit_bnb:
        raise ValueError("offload_8bit_bnb=True is not supported; load unquantised weights.")
    if not full_state_dict or broadcast_from_rank0:
        raise ValueError(
            f"full_state_dict={full_state_dict} and broadcast_from_rank0={broadcast_from_rank0} "
            "are not supported; leave them out: every process reads the whole weights. A model "
            "sharded by FSDP reads its own part with Accelerator.load_state."
        )
    files = find_weight_files(checkpoint)
    target_dtype = None if dtype is None else parse_dtype(dtype)
    devices = None if device_map is None else devices_of(model, device_map)
    check_folder(devices or {}, offload_folder)
    current = model.state_dict(keep_vars=True)
    mismatch = check_checkpoint(model, files, checkpoint)
    check_strict(mismatch, checkpoint, strict)
    empty = any(isinstance(value, Tensor) and value.is_meta for value in current.values())
    if devices is None and target_dtype is None and not empty:
        named_mismatch = _copy_weights(model, files)
    else:
        placement = Placement(
            current=current,
            devices=devices,
            folder=None if offload_folder is None else Path(offload_folder),
            dtype=target_dtype,
            fp32=keep_in_fp32_modules or [] if target_dtype == torch.float16 else [],
            disk_buffers=offload_buffers,
        )
        named_mismatch = placement.load(model, files)
    if renames(model):
        mismatch = named_mismatch.bare(model)
        check_strict(mismatch, checkpoint, strict)
    warn_of_mismatch(mismatch, checkpoint)


def _weights_of_file(file: Path) -> dict[str, tuple[Tensor | ShardedTensor, str]]:
    """Return the weights of a file by all their names, each with its stored name."""
    if file.suffix != ".safetensors":
        return {name: (tensor, name) for name, tensor in read_each(file)}
    # Read rather than memory-mapped, since mapped pages would count as memory in addition to the
    # weights.
    opened = TensorFile(file)
    with reading(file):
        tensors = opened.tensors()
    stored = {name: name for name in tensors} | tied_names(opened.metadata, tensors)
    return {name: (tensors[first], first) for name, first in stored.items()}


@dataclass(kw_only=True)
class Placement:
    """Creates the new tensors of a model, each only once if it has several names.

    Attributes:
        current: The model's state dict, with its variables.
        devices: The device or ``"disk"`` of each weight; None keeps its device.
        folder: The offload folder.
        dtype: The dtype of floating-point weights; None means that of the model.
        fp32: Names of modules that stay in 32 bits.
        disk_buffers: Whether buffers may go to the disk.
        index: The index of the offload folder.
    """

    current: Mapping[str, Any]
    devices: Mapping[str, str | torch.device] | None
    folder: Path | None
    dtype: torch.dtype | None
    fp32: list[str]
    disk_buffers: bool
    index: Index = field(default_factory=dict)

    def load(self, model: nn.Module, files: Iterable[Path]) -> KeyMismatch:
        """Load the weights of files, and return the key mismatch."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        loaded: set[int] = set()
        names: dict[int, list[str]] = {}
        for name, value in self.current.items():
            names.setdefault(id(value), []).append(name)
        results: list[Any] = []
        for file in files:
            part: dict[str, Tensor] = {}
            for name, (source, stored) in own_names(model, _weights_of_file(file)).items():
                # For set_extra_state, and for modules whose load hooks rename keys.
                if not isinstance(self.current.get(name), Tensor):
                    part[name] = as_given(name, _materialized(source))
                elif (key := id(self.current[name])) not in loaded:
                    loaded.add(key)
                    value = self.make_tensor(names[key], source, file, stored)
                    if value is not None:
                        part.update(dict.fromkeys(names[key], value))
            results.append(model.load_state_dict(part, strict=False, assign=True))
        if self.folder is not None:
            save_offload_index(self.index, self.folder)
        return _combine_mismatches(results)

    def make_tensor(
        self, names: list[str], source: Tensor | ShardedTensor, file: Path, stored: str
    ) -> Tensor | None:
        """Return the new tensor for all names of an old one; None if it is already in place."""
        old = self.current[names[0]]
        dtype = old.dtype
        if source.dtype.is_floating_point:
            dtype = torch.float32 if self.stays_in_fp32(names) else self.dtype or old.dtype
        device = self.device(names)
        if device == DISK:
            self._offload(names, source, dtype, file, stored)
            value = torch.empty(source.shape, dtype=dtype, device="meta")
        else:
            device = torch.device("cpu") if torch.device(device).type == "meta" else device
            value = _materialized(source).to(device, dtype)
        return as_parameter(value, old) if isinstance(old, nn.Parameter) else value

    def device(self, names: list[str]) -> str | torch.device:
        """Return the device or ``"disk"`` of a weight with these names."""
        old = self.current[names[0]]
        if self.devices is None:
            return torch.device(old.device)
        devices = [self.devices[name] for name in names]
        chosen = next((device for device in devices if device != DISK), DISK)
        keeps = chosen == DISK and not (isinstance(old, nn.Parameter) or self.disk_buffers)
        return torch.device("cpu") if keeps else chosen

    def _offload(
        self,
        names: list[str],
        source: Tensor | ShardedTensor,
        dtype: torch.dtype,
        file: Path,
        stored: str,
    ) -> None:
        assert self.folder is not None  # checked by load_checkpoint_in_model
        unchanged = file.suffix == ".safetensors" and dtype == source.dtype
        if unchanged and (link := link_weights(file, self.folder)) is not None:
            self.index[names[0]] = entry(link, stored, source)
        else:
            offload_weight(materialize(source).to(dtype), names[0], self.folder, self.index)
        self.index.update(dict.fromkeys(names, self.index[names[0]]))

    def stays_in_fp32(self, names: Iterable[str]) -> bool:
        """Return whether a weight with these names stays in 32 bits."""
        return any(f".{module}." in f".{name}" for module in self.fp32 for name in names)


def _materialized(source: Tensor | ShardedTensor) -> Tensor:
    """Return a copy of a weight, since a view would keep the file memory-mapped."""
    return source.whole() if isinstance(source, ShardedTensor) else source.clone()


def _copy_weights(model: nn.Module, files: Iterable[Path]) -> KeyMismatch:
    return _combine_mismatches(
        [
            model.load_state_dict(
                own_names(model, {name: as_given(name, value) for name, value in read_each(file)}),
                strict=False,
            )
            for file in files
        ]
    )


def _combine_mismatches(results: list[Any]) -> KeyMismatch:
    """Return the names missing from every file, and the names that the model does not have."""
    missing = set.intersection(*(set(result.missing_keys) for result in results))
    unexpected = set().union(*(set(result.unexpected_keys) for result in results))
    return KeyMismatch(sorted(missing), sorted(unexpected))


def check_checkpoint(model: nn.Module, files: Iterable[Path], checkpoint: object) -> KeyMismatch:
    """Return the key mismatch of a checkpoint and a model; see `load_checkpoint_in_model`.

    It is unknown for models with load hooks that rename keys.
    """
    if renames(model):
        return KeyMismatch()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= own_names(model, read_shapes(file))
    mismatch = compare(model, shapes).bare(model)
    for name, (saved, expected) in mismatch.misshaped.items():
        raise ValueError(
            f"The weight {name!r} has shape {saved} in {checkpoint} and {expected} in the model; "
            "create the model as it was when it was saved."
        )
    return mismatch


def check_strict(mismatch: KeyMismatch, checkpoint: object, strict: bool) -> None:
    """Raise a CheckpointError if names differ, with `strict`."""
    if strict and mismatch:
        raise CheckpointError(
            f"{checkpoint} does not fit the model:\n{mismatch}\nCreate the model as it was when "
            "it was saved, or load what fits with strict=False."
        )


def warn_of_mismatch(mismatch: KeyMismatch, checkpoint: object) -> None:
    """Log a warning about differing names."""
    if mismatch.unexpected:
        logger.warning(
            "%s holds weights that the model does not have: %s.",
            checkpoint,
            printable(", ".join(mismatch.unexpected)),
        )
    if mismatch.missing:
        logger.warning(
            "%s lacks weights of the model, which keep their values (none on the meta device): %s.",
            checkpoint,
            ", ".join(mismatch.missing),
        )


def check_folder(devices: Mapping[str, object], offload_folder: Folder | None) -> None:
    """Raise if weights are on the disk but there is no folder for them."""
    if DISK in devices.values() and offload_folder is None:
        raise ValueError("device_map puts weights on 'disk': give an offload_folder to write to.")


def devices_of(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, str | torch.device]:
    """Return the device or ``"disk"`` of every weight, by name."""
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map is {device_map!r}; it must be a dict from modules' names to devices, for "
            "example {'': 'cpu'}."
        )
    devices: dict[str, str | torch.device] = {}
    names = model.state_dict(keep_vars=True).keys()
    for bare, name in bare_names(model, zip(names, names, strict=True)):
        key = longest_prefix(bare, device_map)
        if key is None:
            raise ValueError(
                f"{bare} doesn't have any device set: device_map names {sorted(device_map)}. Add "
                "its module, or '' for all others."
            )
        device = device_map[key]
        devices[name] = DISK if device == DISK else as_device(device)
    return devices
