"""Spread a model over accelerators, the CPU and the disk; it runs as if on one device."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.big_models.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from trainer.big_models.device_map import HOSTS, check_device_map
from trainer.big_models.hooks import (
    MOVE_METHODS,
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from trainer.big_models.offload import (
    INDEX,
    Folder,
    Index,
    OffloadedWeightsLoader,
    offload_state_dict,
    read_offload_index,
)
from trainer.big_models.tensors import (
    Device,
    TiedCopies,
    as_device,
    find_tensor,
    find_tied_parameters,
    longest_prefix,
    memory_of,
    non_persistent_buffers,
    set_module_tensor_to_device,
    set_tensor,
)
from trainer.errors import module_logger
from trainer.names import hooks_of, with_offloaded

logger = module_logger(__name__)

DISK = "disk"


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model on the CPU, each on the device only while its module runs.

    Example::

        model = cpu_offload(model, execution_device=accelerator.device)
        outputs = model(inputs)

    Args:
        model: The model; changed in place.
        execution_device: The device of the forward pass; None takes the first parameter's.
        offload_buffers: Whether buffers are offloaded too.
        state_dict: The weights, on the CPU; None takes the model's.
        preload_module_classes: See `attach_align_device_hook`.

    Returns:
        The model.
    """
    weights = state_dict
    if weights is None:
        full = model.state_dict(keep_vars=True)
        tensors = {id(value): value for value in full.values() if isinstance(value, Tensor)}
        copies = {key: value.detach().to("cpu") for key, value in tensors.items()}  # of ties, one
        weights = {name: copies[id(value)] for name, value in full.items() if id(value) in copies}
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model on disk, each in memory only while its module runs.

    Example::

        model = disk_offload(model, "offload", execution_device=accelerator.device)
        outputs = model(inputs)

    Args:
        model: The model; changed in place. Weights that have values are written to the folder.
        offload_dir: The offload folder, created if needed. It must contain the weights that are on
            the meta device.
        execution_device: The device of the forward pass; None takes the first parameter's, or the
            CPU if that is the meta device.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: See `attach_align_device_hook`.

    Returns:
        The model.

    Raises:
        ValueError: A weight has values neither in the model nor in the folder.
    """
    index = _write_to_disk(model, _offloadable(model, offload_buffers), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload(
    model: nn.Module,
    execution_device: Device | None,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    if execution_device is None:
        device = next(model.parameters()).device
        execution_device = torch.device("cpu") if device.type == "meta" else device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it runs; it then stays on the device until `offload`.

    For models that run one after another: with `prev_module_hook`, the previous model moves to the
    CPU when this one runs.

    Example::

        encoder, encoder_hook = cpu_offload_with_hook(encoder)
        decoder, decoder_hook = cpu_offload_with_hook(decoder, prev_module_hook=encoder_hook)
        outputs = decoder(encoder(inputs))
        decoder_hook.offload()

    Args:
        model: The model; changed in place.
        execution_device: The device of the forward pass; None is the accelerator if there is one.
        prev_module_hook: The hook that was returned for the previous model.

    Returns:
        The model, and an object whose ``offload()`` moves it to the CPU.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place the modules of a model by a device map; its outputs do not change.

    Modules placed on the CPU or the disk run on the main device (the CPU without an accelerator);
    their weights are moved there only for their forward pass. ``model.hf_device_map`` is the map. A
    map of one device moves the model there, without hooks.

    Example::

        device_map = infer_auto_device_map(model, no_split_module_classes=["Block"])
        model = dispatch_model(model, device_map, offload_dir="offload")

    Args:
        model: The model; changed in place.
        device_map: The devices of modules by name; see `infer_auto_device_map`.
        main_device: The device on which modules placed on the CPU and the disk run. None takes the
            first device of the map that is neither, else the CPU.
        state_dict: The weights of modules on the CPU; None takes the model's.
        offload_dir: The folder of the weights on disk, see `disk_offload`.
        offload_index: Entries of an offload index; None reads that of the folder.
        offload_buffers: Whether buffers of modules on the CPU and the disk are offloaded too.
        skip_keys: Names of keyword arguments, and keys in outputs, that are not moved between
            devices.
        preload_module_classes: See `attach_align_device_hook`.
        force_hooks: Whether to attach hooks even for a map of one device.

    Returns:
        The model.

    Raises:
        ValueError: A weight has no device, or no values; a device does not exist; or modules are on
            the disk without a folder or an index.
    """
    check_device_map(model, device_map)
    cpu = torch.device("cpu")
    device_map = {name: "cpu" if device == cpu else device for name, device in device_map.items()}
    _remove_hooks(model)
    devices = dict.fromkeys(device_map.values())
    if len(devices) == 1 and DISK not in devices and not force_hooks:
        check_values(model)
        model.to(as_device(next(iter(devices))))
    else:
        main = main_device
        if main is None:
            main = next((device for device in devices if device not in HOSTS), "cpu")
        host = as_device(main).type in ("cpu", "mps")  # these use the CPU's memory
        offloaded_to = HOSTS[1:] if host else HOSTS
        offloads = {name: device in offloaded_to for name, device in device_map.items()}
        run_on = {"": main, **{n: main if p in HOSTS else p for n, p in device_map.items()}}
        tensors = _TensorLocations(model, device_map, offloads, run_on, offload_buffers)
        attach_align_device_hook_on_blocks(
            model,
            run_on,
            {"": False, **offloads},
            weights_map=tensors.weights(state_dict, offload_dir, offload_index),
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tensors.tied,
        )
        for name in MOVE_METHODS:
            if hasattr(type(model), name):
                method = functools.partial(_checked_move, model, name)
                model.__dict__[name] = functools.update_wrapper(method, getattr(type(model), name))
    model.__dict__["hf_device_map"] = dict(device_map)  # the name that other libraries look for
    return model


def _remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier map, ours or accelerate's, and restore all weights."""
    hooks = [(part, hook) for part in model.modules() for hook in hooks_of(part)]
    others = [(part, hook) for part, hook in hooks if not hasattr(hook, "execution_device")]
    if len(others) == len(hooks):
        return
    state = with_offloaded(model, model.state_dict())
    tensors = dict(model.named_parameters(remove_duplicate=False))
    offloaded = [name for name, tensor in tensors.items() if tensor.is_meta]
    offloaded += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    remove_hook_from_submodules(model)
    tied: dict[Any, Tensor] = {}  # to tie tied weights again
    for name in offloaded:
        value = state.get(name)
        if value is None or value.is_meta:
            continue
        if (existing := tied.get(memory_of(value))) is None:
            set_module_tensor_to_device(model, name, "cpu", value)
            tied[memory_of(value)] = find_tensor(model, name)
        else:
            set_tensor(model, name, existing)
    for part, hook in others:
        add_hook_to_module(part, hook, append=True)


class _TensorLocations:
    """The places where `dispatch_model` keeps tensors.

    Attributes:
        tied: See `AlignDevicesHook`.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device],
        offloads: Mapping[str, bool],
        run_on: Mapping[str, Device],
        offload_buffers: bool,
    ) -> None:
        self._model, self._map = model, device_map
        self.tied: TiedCopies = {}
        names = _offloadable(model, offload_buffers)
        offloaded = [name for name in names if offloads[longest_prefix(name, device_map) or ""]]
        self._offloaded_to = {name: str(self._device_of(name)) for name in offloaded}
        check_values(model, self._offloaded_to)
        self._in_memory: dict[str, Tensor] = {}
        self._originals: list[Tensor] = []  # keeps the addresses in `tied` from being reused
        for group in find_tied_parameters(model):
            self._keep_tied(group, run_on)

    def _device_of(self, name: str) -> Device:
        return self._map[longest_prefix(name, self._map) or ""]

    def _keep_tied(self, group: list[str], run_on: Mapping[str, Device]) -> None:
        """Keep a tied weight once per device; offload it only if all of its names are offloaded."""
        value = find_tensor(self._model, group[0])
        resident = [name for name in group if name not in self._offloaded_to]
        offloaded = [name for name in group if name in self._offloaded_to]
        on_cpu = any(self._offloaded_to[name] != DISK for name in offloaded)
        if value.is_meta or not (resident or on_cpu):
            return  # read from the disk by any of its names
        self.tied[value.data_ptr()] = {}
        self._originals.append(value.detach())
        if len({str(self._device_of(name)) for name in resident}) > 1:
            logger.warning(
                "The tied weights %s are on several devices, and become separate weights.",
                ", ".join(resident),
            )
        for name in resident:
            device = run_on[longest_prefix(name, run_on) or ""]
            set_module_tensor_to_device(
                self._model, name, device, tied_params_map=self.tied, clear_cache=False
            )
        if resident:
            tensor = find_tensor(self._model, resident[0]).detach()
            self._in_memory.update(dict.fromkeys(offloaded, tensor))
        else:
            self._in_memory.update(dict.fromkeys(offloaded, value.detach().to("cpu")))

    def weights(
        self,
        state_dict: Mapping[str, Tensor] | None,
        folder: Folder | None,
        index: Index | None,
    ) -> OffloadedWeightsLoader:
        """Return the offloaded weights by name; write weights for the disk that have values."""
        memory = self._in_memory
        state = self._model.state_dict() if state_dict is None else state_dict
        for name, device in self._offloaded_to.items():
            if device != DISK and name not in memory:
                if state[name].is_meta:
                    raise ValueError(_no_values([name], "state_dict"))
                memory[name] = state[name].to("cpu")
        on_disk = [name for name in self._offloaded_to if name not in memory]
        if on_disk and folder is None and index is None:
            raise ValueError(
                "We need an `offload_dir` to dispatch this model according to this `device_map`, "
                f"the following weights need to be offloaded: {', '.join(on_disk)}."
            )
        offloaded: Index = {}
        if on_disk and index is not None:
            offloaded = {name: index[name] for name in on_disk if name in index}
        elif on_disk and folder is not None:
            offloaded = _write_to_disk(self._model, on_disk, folder)
        return OffloadedWeightsLoader(memory, folder, offloaded)


def _write_to_disk(model: nn.Module, names: Sequence[str], folder: Folder) -> Index:
    """Write the weights that have values to an offload folder; return the index entries of all."""
    current = model.state_dict()
    offload_state_dict(folder, {name: current[name] for name in names if not current[name].is_meta})
    index = read_offload_index(folder) if os.path.exists(Path(folder) / INDEX) else {}
    if missing := [name for name in names if name not in index]:
        raise ValueError(_no_values(missing, os.fspath(folder)))
    return {name: index[name] for name in names}


def _offloadable(model: nn.Module, buffers: bool) -> list[str]:
    """Return the names of the parameters, and if requested of the persistent buffers."""
    transient = non_persistent_buffers(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if buffers:
        names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    return [name for name in names if name not in transient]


def check_values(model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """Check that all parameters and buffers have values, in the model or elsewhere.

    Raises:
        ValueError: Some have no values; the message lists them.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = chain(parameters, model.named_buffers(remove_duplicate=False))
    if missing := [name for name, tensor in tensors if tensor.is_meta and name not in elsewhere]:
        raise ValueError(_no_values(missing, "the model"))


def _no_values(names: list[str], where: str) -> str:
    return (
        f"{', '.join(names)} are on the meta device and have no values in {where}: load a "
        "checkpoint that has them, for example with load_checkpoint_and_dispatch, or make the "
        "model without init_empty_weights, so that they have initial values."
    )


def _checked_move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Call a method that moves a dispatched model, unless parts of it are offloaded."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError(
            "You can't move a model that has some modules offloaded to cpu or disk. Its outputs "
            "return to the device of the inputs, so leave it where it is."
        )
    logger.warning("You shouldn't move a dispatched model: its hooks still use the old devices.")
    moved: nn.Module = getattr(type(model), method)(model, *args, **kwargs)
    return moved
