"""Device maps: the assignment of modules to accelerators, the CPU and the disk.

A device map is a dict from the names of modules (or single tensors) to devices: an accelerator's
index or any ``torch.device``, ``"cpu"`` or ``"disk"``. The longest matching name wins; ``""`` names
the whole model. Sizes are computed from shapes and dtypes, so the model may be on the meta device.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trainer.big_models.tensors import (
    CustomDtype,
    Device,
    find_tied_parameters,
    longest_prefix,
    named_module_tensors,
    non_persistent_buffers,
    parse_dtype,
)
from trainer.checkpoint.weights import parse_size
from trainer.torch_compat import free_device_memory

Memory: TypeAlias = Mapping[int | str, int | str]
Dtypes: TypeAlias = Mapping[str, str | torch.dtype | CustomDtype]
Block: TypeAlias = tuple[str, nn.Module | Tensor]

HOSTS = ("cpu", "disk")  # the devices that are not accelerators
CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")
_ORDER = ("mps", *HOSTS)  # after the accelerators with an index


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Dtypes | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the size in bytes of each tensor and of each module with its submodules, by name.

    A tied weight counts once, under its first name. Names without tensors have size 0.

    Args:
        model: The model; its own size has the name ``""``.
        dtype: The dtype that floating-point tensors will be converted to; None means their own.
        special_dtypes: The dtypes of some tensors, by name.
        buffers_only: Whether only buffers count.
    """
    tensors: Iterable[tuple[str, Tensor]] = (
        model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    )
    wanted = None if dtype is None else parse_dtype(dtype)
    special = {
        name: special if isinstance(special, CustomDtype) else parse_dtype(special)
        for name, special in (special_dtypes or {}).items()
    }
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        converted = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        size = int(tensor.numel() * special.get(name, converted).itemsize)
        for part in ("", *_containers(name), name):
            sizes[part] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Dtypes | None = None,
) -> int:
    """Return the total bytes of a model's buffers; see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[Block],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer is a module (or tensor) without submodules, or a module of a class that is not split.

    Args:
        modules: Named modules and tensors to search for layers.
        module_sizes: The result of `compute_module_sizes`.
        no_split_module_classes: Names of classes.
    """
    largest, names = 0, []
    for name, _ in _layers(modules, no_split_module_classes):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, the bytes of its largest layer, and all layers of that size.

    Args:
        model: The model; classes in its ``_no_split_modules`` are layers.
    """
    return maximum_sizes(model, compute_module_sizes(model))


def maximum_sizes(model: nn.Module, sizes: Mapping[str, int]) -> tuple[int, tuple[int, list[str]]]:
    """Return the result of `calculate_maximum_sizes`, given `compute_module_sizes`'s."""
    blocks: list[Block] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    unsplit = getattr(model, "_no_split_modules", None) or ()
    return sizes.get("", 0), get_max_layer_size(blocks, sizes, unsplit)


def _layers(blocks: Iterable[Block], unsplit: Collection[str]) -> Iterator[Block]:
    for name, part in blocks:
        below = _submodules(name, part)
        if not below or type(part).__name__ in unsplit:
            yield name, part
        else:
            yield from _layers(below, unsplit)


def _submodules(name: str, part: nn.Module | Tensor) -> list[Block]:
    children = part.named_children() if isinstance(part, nn.Module) else ()
    return [(f"{name}.{child}".removeprefix("."), module) for child, module in children]


def _containers(name: str) -> list[str]:
    """Return the names of the modules that contain a module or tensor, except the model itself."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def get_max_memory(max_memory: Memory | None = None) -> dict[int | str, int]:
    """Return the bytes that each device may hold, accelerators first.

    Args:
        max_memory: Bytes, or a size such as ``"10GiB"``, for each accelerator's index, ``"mps"``,
            ``"cpu"`` and ``"disk"``. Devices that are missing in it are not used, except the disk.
            None uses the free memory; on Linux the CPU's is limited by the control group, for
            example in a container.

    Raises:
        ValueError: A device or a size is not one of these.
    """
    if max_memory is None:
        return _free_memory()
    for device in max_memory:
        if device not in _ORDER and (isinstance(device, bool) or not isinstance(device, int)):
            raise ValueError(
                f"Device {device!r} is not recognized, available devices are integers (for an "
                f"accelerator's index), {', '.join(map(repr, _ORDER))}."
            )
    indexed: list[int | str] = sorted(device for device in max_memory if isinstance(device, int))
    order = [*indexed, *(device for device in _ORDER if device in max_memory)]
    return {device: _bytes(device, max_memory[device]) for device in order}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: an int, or a text such as ``"5GB"`` (powers of 1000) or ``"5GiB"``.

    Raises:
        ValueError: The size is neither, or is not above 0.
    """
    return parse_size(size, "size")


def _bytes(device: int | str, size: int | str) -> int:
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(size)  # 0 leaves the device out
    return parse_size(size, f"max_memory[{device!r}]")


def _free_memory() -> dict[int | str, int]:
    free: dict[int | str, int] = {}
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type == "mps":
        return {"mps": _free_on_host()}  # Apple's GPU shares the CPU's memory
    for index in range(torch.accelerator.device_count()):
        free[index] = free_device_memory(index)
    return {**free, "cpu": _free_on_host()}


def _free_on_host() -> int:
    """Return the bytes that the system and the control group let this process still allocate."""
    free = [_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with suppress(OSError, ValueError):  # no such group, or "max"
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(free))


def _available() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            "The free memory is read with psutil on this system: pip install "
            "'cadence-trainer[psutil]', or give max_memory={'cpu': …}."
        ) from error
    return int(psutil.virtual_memory().available)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Dtypes | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return memory limits with which `infer_auto_device_map` fills accelerators about equally.

    Each accelerator but the last gets its share of the model and room for one more layer. Without
    accelerators the limits are those of `get_max_memory`.

    Args:
        model: The model.
        max_memory: See `get_max_memory`. If it is None and there is one accelerator, a tenth of
            its memory stays free for activations.
        no_split_module_classes: See `infer_auto_device_map`.
        dtype: See `infer_auto_device_map`.
        special_dtypes: See `infer_auto_device_map`.
        low_zero: Put as little as possible on accelerator 0, to leave it free for other work.
    """
    limits = get_max_memory(max_memory)
    used = [device for device in limits if device not in HOSTS and limits[device] > 0]
    if not used:
        return limits
    if len(used) == 1:
        if max_memory is None:
            limits[used[0]] = int(limits[used[0]] * 0.9)
        low_zero = False
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    unsplit = _classes(no_split_module_classes)
    blocks = [
        sizes.get(n, 0) for n, part in model.named_modules() if type(part).__name__ in unsplit
    ]
    leaves = [
        sizes[name]
        for name, part in model.named_modules()
        if name and sizes.get(name) and not _submodules(name, part)
    ]
    room = int(1.25 * max(*blocks, sum(leaves) // max(len(leaves), 1), 0))
    share = sizes[""] // (len(used) - low_zero) + room
    for device in used[low_zero:-1]:
        limits[device] = min(limits[device], share)
    if low_zero and 0 in limits:
        others = sum(limits[device] for device in used if device != 0)
        limits[0] = min(limits[0], max(0, sizes[""] - others))
    return limits


def _classes(names: str | Collection[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Dtypes | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device map that fills the accelerators, then the CPU, then the disk.

    Modules are placed in order. A module that does not fit is split into its submodules; a module
    that cannot be split goes to the next device, with everything after it. The first accelerator
    and the CPU keep room for the largest layer that is not placed yet, because it may be loaded
    there for its forward pass. Modules with tied weights go to the same device.

    Example::

        device_map = infer_auto_device_map(
            model, max_memory={0: "20GiB", "cpu": "60GiB"}, no_split_module_classes=["Block"]
        )

    Args:
        model: The model, perhaps on the meta device.
        max_memory: See `get_max_memory`; `get_balanced_memory` spreads a model evenly.
        no_split_module_classes: Names of classes that are never split, such as blocks with a
            residual connection.
        dtype: The dtype that floating-point weights will be converted to; None means their own.
        special_dtypes: The dtypes of some weights, by name.
        verbose: Whether to print each decision.
        clean_result: Merge the entries of a module's parts if all have the same device.
        offload_buffers: Also offload the buffers of modules on the CPU and the disk. Otherwise they
            need room on an accelerator; a warning is logged if there is none.
        fallback_allocation: If a device would stay empty, search for a later module that fits.
    """
    plan = _DeviceMapBuilder(
        model,
        get_max_memory(max_memory),
        _classes(no_split_module_classes),
        compute_module_sizes(model, dtype, special_dtypes),
        verbose,
        fallback_allocation,
    )
    device_map = plan.run()
    if not offload_buffers:
        buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        plan.check_room_for_buffers(buffers)
    return clean_device_map(device_map) if clean_result else device_map


class _DeviceMapBuilder:
    """One run of `infer_auto_device_map`.

    Attributes:
        device_map: The device map so far.
        waiting: The modules and tensors that have no device yet, in order.
        used: The bytes that each device holds.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: dict[int | str, int],
        unsplit: list[str],
        sizes: dict[str, int],
        verbose: bool,
        fallback: bool,
    ) -> None:
        self._sizes, self._unsplit = sizes, unsplit
        self._limits, self._verbose, self._fallback = limits, verbose, fallback
        self._ties = find_tied_parameters(model)
        self._non_persistent = non_persistent_buffers(model)
        self._order = [*(device for device in limits if device != "disk"), "disk"]
        accelerators = [device for device in self._order if device not in HOSTS]
        self._keeps_room = {*accelerators[:1], *(() if "mps" in accelerators else ("cpu",))}
        self.waiting = self._parts("", model)
        layers = [(sizes.get(name, 0), name) for name, _ in _layers(self.waiting, unsplit)]
        self._layers = sorted(layers, key=lambda layer: -layer[0])
        self.device_map: dict[str, int | str] = {}
        self.used: dict[int | str, int] = dict.fromkeys(self._order, 0)

    def run(self) -> dict[str, int | str]:
        for device in self._order:
            self._fill(device)
        return self.device_map

    def _fill(self, device: int | str) -> None:
        """Place modules in order until one does not fit and cannot be split."""
        searched = False
        while self.waiting:
            name, part = self.waiting[0]
            tied = self._tied_to(name)
            size = self._sizes.get(name, 0)
            together = size + sum(self._sizes.get(tied_name, 0) for tied_name, _ in tied)
            room = self._room(device)
            if room is None or together <= room:
                self._assign([name, *(tied_name for tied_name, _ in tied)], device, together)
            elif self._split_first(tied if size <= room else [(name, part)]):
                continue
            elif self._fallback and not searched and not self.used[device]:
                searched = True  # only once, since the module found may not fit after all
                if not self._bring_forward(device):
                    return
            else:
                self._log(f"{name!r} ({together} bytes) does not fit on {device} ({room} left).")
                return

    def _room(self, device: int | str, reserve: int = 0) -> int | None:
        """Return the bytes left on a device; None if unlimited."""
        if device == "disk":
            return None
        reserved = max(self._largest_layer(), reserve) if device in self._keeps_room else 0
        return self._limits[device] - self.used[device] - reserved

    def _largest_layer(self) -> int:
        """Return the bytes of the largest waiting layer outside the first module."""
        while self._layers and longest_prefix(self._layers[0][1], self.device_map) is not None:
            del self._layers[0]
        first = self.waiting[0][0]
        for size, name in self._layers:
            if not _is_in(name, first) and longest_prefix(name, self.device_map) is None:
                return size
        return 0

    def _tied_to(self, name: str) -> list[Block]:
        """Return the waiting modules outside a module that share a weight with it."""
        groups = [group for group in self._ties if any(_is_in(tied, name) for tied in group)]
        others = [tied for group in groups for tied in group if not _is_in(tied, name)]
        return [
            block for block in self.waiting[1:] if any(_is_in(tied, block[0]) for tied in others)
        ]

    def _assign(self, names: list[str], device: int | str, size: int) -> None:
        self._log(f"{', '.join(map(repr, names))} ({size} bytes) goes to {device}.")
        self.used[device] += size
        self.device_map.update(dict.fromkeys(names, device))
        self.waiting = [block for block in self.waiting if block[0] not in names]

    def _split_first(self, blocks: Iterable[Block]) -> bool:
        """Among some waiting modules, replace the first one that can be split by its parts."""
        for name, part in blocks:
            if parts := self._split(name, part):
                self._log(f"{name!r} is split.")
                where = [block for block, _ in self.waiting].index(name)
                self.waiting[where : where + 1] = parts
                return True
        return False

    def _split(self, name: str, part: nn.Module | Tensor) -> list[Block]:
        if not _submodules(name, part) or type(part).__name__ in self._unsplit:
            return []
        assert isinstance(part, nn.Module)  # it has submodules
        return self._parts(name, part)

    def _parts(self, name: str, module: nn.Module) -> list[Block]:
        """Return a module's own parameters, its submodules and its own buffers."""
        tensors: list[tuple[str, Any]] = [
            *module.named_parameters(recurse=False),
            *module.named_children(),
            *module.named_buffers(recurse=False),
        ]
        named = [(f"{name}.{leaf}".removeprefix("."), part) for leaf, part in tensors]
        return [(full, part) for full, part in named if full not in self._non_persistent]

    def _bring_forward(self, device: int | str) -> bool:
        """Move the first module that fits an empty device before all others."""
        room = self._room(device, reserve=self._sizes.get(self.waiting[0][0], 0))
        block = self._first_fitting(self.waiting[1:], room or 0)
        if block is None:
            return False
        for container in _containers(block[0]):
            waiting = dict(self.waiting)
            if container in waiting:
                self._split_first([(container, waiting[container])])
        self.waiting.remove(block)
        self.waiting.insert(0, block)
        return True

    def _first_fitting(self, blocks: Iterable[Block], room: int) -> Block | None:
        for name, part in blocks:
            size = self._sizes.get(name, 0)
            tied = sum(self._sizes.get(tied_name, 0) for tied_name, _ in self._tied_to(name))
            if 0 < size + tied <= room:
                return name, part
            if block := self._first_fitting(self._split(name, part), room):
                return block
        return None

    def check_room_for_buffers(self, buffers: Mapping[str, int]) -> None:
        """Warn if the buffers of offloaded modules do not fit on any accelerator."""
        offloaded = sum(buffers.get(n, 0) for n, d in self.device_map.items() if d in HOSTS)
        accelerators = [device for device in self._order if device not in HOSTS]
        free = [self._limits[device] - self.used[device] for device in accelerators]
        if offloaded and free and offloaded > max(free):
            warnings.warn(
                f"Buffers of offloaded modules need {offloaded} bytes on an accelerator, but none "
                "has that much left. Pass offload_buffers=True here and where the model is "
                "dispatched, or raise max_memory.",
                stacklevel=3,
            )

    def _log(self, text: str) -> None:
        if self._verbose:
            print(text)  # noqa: T201  # the user asked for it


def _is_in(name: str, module: str) -> bool:
    """Return whether a name is a module's or that of something inside the module."""
    return not module or f"{name}.".startswith(f"{module}.")


def clean_device_map(device_map: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge a device map's entries for the parts of a module that are all on one device.

    Args:
        device_map: The map, in which no name contains another.
        module_name: The module below which names are joined; others are kept.
    """
    inside = [name for name in device_map if _is_in(name, module_name)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        joined: dict[str, Any] = {}
        for name, device in device_map.items():
            joined[module_name if name in inside else name] = device
        return joined
    depth = len(module_name.split(".")) if module_name else 0
    children = {".".join(n.split(".")[: depth + 1]): 0 for n in inside if n != module_name}
    cleaned = dict(device_map)
    for child in children:
        cleaned = clean_device_map(cleaned, child)
    return cleaned


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Raise if a device map gives no device to a weight, and warn of names that the model lacks.

    Raises:
        ValueError: Names in the model's state dict have no device; the message lists them.
    """
    names = {"", *(name for name, _ in model.named_modules(remove_duplicate=False))}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if unknown := [name for name in device_map if name not in names]:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}",
            UserWarning,
            stacklevel=2,
        )
    if missing := [name for name in model.state_dict() if longest_prefix(name, device_map) is None]:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: "
            f"{', '.join(missing)}. It names {', '.join(map(repr, device_map))}; add their "
            "modules, or '' for all others."
        )


def as_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device],
    max_memory: Memory | None,
    no_split_module_classes: str | Collection[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
    special_dtypes: Dtypes | None = None,
) -> Mapping[str, Device]:
    """Return a device map, which is inferred if a choice such as ``"auto"`` is given.

    Raises:
        ValueError: The argument is neither a map nor one of the choices.
    """
    if not isinstance(device_map, str):
        return device_map
    if device_map not in CHOICES:
        raise ValueError(
            f"device_map is {device_map!r}; please choose 'auto', 'balanced', 'balanced_low_0' or "
            "'sequential', or give a dict from modules' names to devices, such as {'': 'cpu'}."
        )
    unsplit = no_split_module_classes
    if device_map != "sequential":
        low = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, unsplit, dtype, special_dtypes, low)
    return infer_auto_device_map(
        model, max_memory, unsplit, dtype, special_dtypes, offload_buffers=offload_buffers
    )
