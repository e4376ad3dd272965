"""XLA devices (TPUs) with torch_xla; no other module imports it.

An XLA device runs nothing until a graph ends: operations are recorded, and `sync` compiles and
starts the recorded graph. A graph of the same operations and shapes is compiled only once. Reading
a value earlier cuts the graph at that point, and a graph cut elsewhere is compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from trainer import environment

_graphs = 0  # the number of graphs that `sync` has ended
_device: torch.device | None = None  # set once it is in use
_connected = False  # whether the runtime knows the devices of all processes
_mesh: Any = None  # mesh of all devices, once a batch was divided over them


def is_installed() -> bool:
    """Return whether torch_xla is installed."""
    return find_spec("torch_xla") is not None


def is_available() -> bool:
    """Return whether torch_xla is installed, and ``PJRT_DEVICE`` names a kind of device."""
    named = environment.read("PJRT_DEVICE") or ""
    return named.lower() not in environment.FALSE and is_installed()


def chip_count() -> int:
    """Return the number of TPU chips of this machine; 0 if torch_xla is not installed."""
    if not is_installed():
        return 0
    with environment.defaulting("PJRT_DEVICE", "TPU"):  # otherwise the import selects one
        return int(import_module("torch_xla._internal.tpu").num_available_chips())


def is_initialized() -> bool:
    """Return whether this process uses an XLA device."""
    return _device is not None


def launched() -> environment.Launch | None:
    """Return this process's rank and world size under ``torch_xla.launch``; None without it."""
    processes = environment.read_int("PJRT_LOCAL_PROCESS_COUNT")
    runtime = import_module("torch_xla.runtime")
    if processes is None or runtime.world_size() == 1:
        return None
    return environment.Launch(
        launcher="torch_xla",
        rank=runtime.global_ordinal(),
        world_size=runtime.world_size(),
        local_rank=environment.read_int("PJRT_LOCAL_PROCESS_RANK") or 0,
        local_world_size=processes,
    )


def start(launch: environment.Launch | None = None) -> torch.device:
    """Return the XLA device of this process, with its generator set to torch's seed.

    Args:
        launch: The rank of this process and the world size; None for one process.

    Raises:
        ValueError: There are several processes, and one has more than one device.
    """
    global _device, _connected
    if _device is None:
        if launch is not None and launch.world_size > 1:
            _connected = _connect(launch)
        _device = import_module("torch_xla").device()
        manual_seed(torch.initial_seed())
    assert _device is not None
    return _device


def _connect(launch: environment.Launch) -> bool:
    """Assign this process its device; return whether the devices of all processes are connected.

    TPU devices are. With ``PJRT_DEVICE=CPU`` each process has a separate runtime.
    """
    if launch.launcher != "torch_xla":
        # This is what torch_xla.launch does in each of its processes; no public function does only
        # this.
        processes = import_module("torch_xla._internal.pjrt")
        processes.initialize_multiprocess(launch.local_rank, launch.local_world_size)
    runtime = import_module("torch_xla.runtime")
    devices, everywhere = runtime.addressable_device_count(), runtime.world_size()
    if environment.read_flag("XLA_USE_SPMD") or devices > 1:
        raise ValueError(
            f"There are several processes, and this one uses {devices} XLA device(s), with SPMD or "
            "in threads; each must have one. Start one process that calls "
            "torch_xla.runtime.use_spmd(), or one for each device without it; on "
            "PJRT_DEVICE=CPU unset CPU_NUM_DEVICES."
        )
    if everywhere not in (1, launch.world_size):
        raise ValueError(
            f"There are {launch.world_size} processes, but the XLA runtime has {everywhere} "
            "devices: start one process for each device of all machines."
        )
    return bool(everywhere > 1)


def reduces(dtype: torch.dtype) -> bool:
    """Return whether `all_reduce` reaches all processes, and supports a dtype.

    The TPU compiler does not support an all-reduce of 64-bit numbers (pytorch/xla, issue 1952).
    """
    return _connected and dtype in (torch.float32, torch.bfloat16, torch.float16)


def all_reduce(tensor: Tensor, operation: str = "sum") -> None:
    """All-reduce a tensor over the devices of all processes, in place.

    It is a separate graph. Processes that wait for each other must run equal programs, and the
    operations recorded before may differ, for example if one process has a shorter batch or none.

    Args:
        tensor: The tensor, without an autograd graph.
        operation: ``"sum"``, ``"min"`` or ``"max"``.
    """
    sync()
    _xla_model().all_reduce(operation, [tensor], pin_layout=False)
    sync()


def sync() -> None:
    """End the graph: compile and start operations recorded since the last call, without waiting.

    torch_xla would also advance the generator. This is undone, so that random numbers depend only
    on earlier draws, and not on how often graphs end.
    """
    global _graphs
    generator = _xla_model()
    state = generator.get_rng_state()
    sys.modules["torch_xla"].sync()
    generator.set_rng_state(state)
    _graphs += 1


def spmd() -> bool:
    """Return whether the program has called ``torch_xla.runtime.use_spmd()``.

    The process's device then represents all devices of the machine. `shard` divides batches over
    them, and the compiler inserts their communication.
    """
    return is_initialized() and environment.read_flag("XLA_USE_SPMD")


def shard(tensor: Tensor) -> Tensor:
    """Divide a tensor over the devices along its first dimension, the samples.

    Tensors without dimensions, or whose number of samples is not divisible by the number of
    devices, are replicated.
    """
    global _mesh
    sharding = import_module("torch_xla.distributed.spmd")
    if _mesh is None:
        devices = import_module("torch_xla.runtime").global_runtime_device_count()
        _mesh = sharding.Mesh(list(range(devices)), (devices,), ("data",))
    if tensor.ndim and tensor.shape[0] % _mesh.size() == 0:
        sharding.mark_sharding(tensor, _mesh, ("data", *(None,) * (tensor.ndim - 1)))
    return tensor


def marker(device: torch.device | str | int | None) -> Callable[[], object]:
    """Return `sync` for an XLA device, and a function that does nothing for others."""
    of_xla = device is not None and torch.device(device).type == "xla"
    return sync if of_xla else _nothing


def _nothing() -> None:
    """Do nothing, since the device runs each operation at once."""


def start_copy_to_host(tensor: Tensor) -> tuple[Tensor, Arrival]:
    """Like `trainer.tree.start_copy_to_host`: return the copy, and a substitute for an event."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return host, Arrival(host, tensor)


class Arrival:
    """A copy to host memory that is made when it is waited for, since XLA has no events.

    It has the methods of a ``torch.Event``.

    Args:
        host: The host memory.
        tensor: The tensor; it may change afterwards.
    """

    def __init__(self, host: Tensor, tensor: Tensor) -> None:
        self._host, self._tensor, self._graph = host, tensor.detach().clone(), _graphs

    def query(self) -> bool:
        """Return whether the graph with the value has ended, so that reading does not cut one."""
        return self._graph < _graphs

    def synchronize(self) -> None:
        """End the graph with the value if it has not ended yet, and wait for the copy."""
        if not self.query():
            sync()
        self._host.copy_(self._tensor)


def move(module: nn.Module, device: torch.device) -> None:
    """Put a module on an XLA device; its parameters stay the same objects.

    Torch would replace them, which would untie tied parameters and leave optimizers with the old
    ones.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# -- the generator of the device, with the functions of ``torch.cuda`` -----------------------------


def device_count() -> int:
    """Return the number of devices with their own generator in this process."""
    return 1


def current_device() -> int:
    """Return the index of the current device."""
    return 0


def get_rng_state(device: int = 0) -> Tensor:  # noqa: ARG001 - there is one
    """Return the state of the generator: a number, as 8 bytes."""
    number = int(_xla_model().get_rng_state())
    return torch.tensor(list(number.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")


def set_rng_state(state: Tensor, device: int = 0) -> None:  # noqa: ARG001 - there is one
    """Restore the state of the generator, if the process uses the device."""
    if is_initialized():
        manual_seed(int.from_bytes(bytes(state.tolist()), "little"))


def manual_seed(seed: int) -> None:
    """Seed the generator."""
    _xla_model().set_rng_state(seed % 2**64)


manual_seed_all = manual_seed


def _xla_model() -> Any:
    return import_module("torch_xla.core.xla_model")
