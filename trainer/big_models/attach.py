"""Attach hooks to all modules of a model, depending on their weights and the placement of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.big_models.hooks import AlignDevicesHook, LayerwiseCastingHook, add_hook_to_module
from trainer.big_models.offload import PrefixedDataset
from trainer.big_models.tensors import Device, TiedCopies, longest_prefix

# Modules that use the weights of their submodules without calling the submodules.
PRELOADED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
CASTABLE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each submodule that has weights and no hook yet.

    Args:
        module: The module; changed in place.
        execution_device: The device of inputs and weights.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Names of classes whose submodules get no hook.
        tied_params_map: See `AlignDevicesHook`.
    """
    classes = preload_module_classes or ()
    for _, part, _ in _walk(module, lambda _, part: type(part).__name__ in classes):
        if "_hf_hook" not in vars(part) and _has_tensors(part):
            hook = AlignDevicesHook(
                execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
            )
            add_hook_to_module(part, hook)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each submodule that has weights of its own.

    Args:
        module: The module; changed in place.
        execution_device: See `AlignDevicesHook`.
        offload: See `AlignDevicesHook`.
        weights_map: See `AlignDevicesHook`; the names begin with `module_name`.
        offload_buffers: See `AlignDevicesHook`.
        module_name: The module's name in the model.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Names of classes that use a submodule's weights without calling it.
            All weights below such a module are loaded for its forward pass.
        tied_params_map: See `AlignDevicesHook`.
    """

    def handles_submodules(_: str, part: nn.Module) -> bool:
        return offload and _is_preloaded(part, preload_module_classes)

    for name, part, block in _walk(module, handles_submodules):
        if not (block or _has_tensors(part, recurse=False)):
            continue
        prefix = ".".join(filter(None, (module_name, name)))
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=_below(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=block,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(part, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each submodule, with the device of its block.

    Args:
        module: The module; changed in place. Its output is moved to the device of its input.
        execution_device: One device, or a device for each block's name; the longest matching name
            wins.
        offload: Whether to offload weights, or a bool for each block's name. Only weights in
            `weights_map` are offloaded.
        weights_map: See `attach_align_device_hook`.
        offload_buffers: See `AlignDevicesHook`.
        module_name: See `attach_align_device_hook`.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: See `attach_align_device_hook`.
        tied_params_map: See `AlignDevicesHook`.
    """
    devices: Mapping[str, Device | None] = (
        execution_device if isinstance(execution_device, Mapping) else {"": execution_device}
    )
    offloads: Mapping[str, bool] = offload if isinstance(offload, Mapping) else {"": offload}

    def is_away(name: str) -> bool:
        return offloads.get(longest_prefix(name, offloads) or "", False)

    def handles_submodules(name: str, part: nn.Module) -> bool:
        full = ".".join(filter(None, (module_name, name)))
        names = (f"{full}.{leaf}".removeprefix(".") for leaf, _ in part.named_parameters())
        return _is_preloaded(part, preload_module_classes) and any(map(is_away, names))

    for name, part, block in _walk(module, handles_submodules):
        full = ".".join(filter(None, (module_name, name)))
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        away = block or any(is_away(f"{full}.{leaf}".removeprefix(".")) for leaf, _ in tensors)
        named = full in devices or full in offloads
        if not (name == "" or named or _has_tensors(part)):
            continue
        hook = AlignDevicesHook(
            devices.get(longest_prefix(full, devices) or ""),
            away,
            io_same_device=name == "",
            weights_map=_below(weights_map, full) if away else None,
            offload_buffers=offload_buffers,
            place_submodules=block,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(part, hook, append=True)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in a small dtype.

    Layers with weights tied to another kind of module, such as an embedding, are skipped. See
    `LayerwiseCastingHook`.

    Args:
        module: The module; changed in place.
        storage_dtype: The dtype between forward passes.
        compute_dtype: The dtype during forward passes.
        skip_modules_pattern: Regular expressions; modules whose names match one are skipped, with
            their submodules.
        skip_modules_classes: Classes of modules to skip, with their submodules.
        non_blocking: Convert asynchronously.
    """
    pattern = skip_modules_pattern
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern or ())

    def chosen(part: nn.Module, name: str) -> Iterator[nn.Module]:
        if isinstance(part, skip_modules_classes or ()):
            return
        if any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, CASTABLE):
            yield part
            return
        for child, below in part.named_children():
            yield from chosen(below, f"{name}.{child}".removeprefix("."))

    layers = list(chosen(module, ""))
    others = {
        id(parameter)
        for part in module.modules()
        if not any(part is layer for layer in layers)
        for parameter in part.parameters(recurse=False)
    }
    for layer in layers:
        if not any(id(parameter) in others for parameter in layer.parameters(recurse=False)):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)


def _below(weights_map: Mapping[str, Tensor] | None, name: str) -> Mapping[str, Tensor] | None:
    return None if weights_map is None else PrefixedDataset(weights_map, f"{name}." if name else "")


def _walk(
    module: nn.Module, handles_submodules: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield a module and its submodules, except those below one that handles its submodules.

    Yields:
        The name, the module, and whether it handles its submodules.
    """
    handlers: list[str] = []
    for name, part in module.named_modules():
        if any(not block or name.startswith(f"{block}.") for block in handlers):
            continue
        if is_block := handles_submodules(name, part):
            handlers.append(name)
        yield name, part, is_block


def _is_preloaded(module: nn.Module, classes: Sequence[str] | None) -> bool:
    return isinstance(module, PRELOADED) or type(module).__name__ in (classes or ())


def _has_tensors(module: nn.Module, recurse: bool = True) -> bool:
    sources = module.parameters(recurse=recurse), module.buffers(recurse=recurse)
    return any(True for source in sources for _ in source)
