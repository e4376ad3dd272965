"""What this process knows of the run: its device, its peers, its precision, its window.

Three singletons. Every instance of a class shares one state, made by the first. They are for
reading; whoever needs other values starts another process (tests call ``_reset_state``).
"""

from __future__ import annotations

import atexit
import builtins
import time
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from trainer import environment
from trainer.configuration import (
    DistributedType,
    GradientAccumulationPlugin,
    PrecisionType,
)

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
_DISTRIBUTED = {
    "cuda": DistributedType.MULTI_GPU,
    "xpu": DistributedType.MULTI_XPU,
    "cpu": DistributedType.MULTI_CPU,
}


def _pick_device(launch: environment.Launch, *, cpu: bool) -> torch.device:
    """The device of this process: the accelerator with its local rank, else the CPU."""
    named = environment.read("ACCELERATE_TORCH_DEVICE")
    if named and not cpu:
        return torch.device(named)
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    if kind.type == "mps":
        # There is one, and it has no collectives: several processes meet on the CPU.
        return torch.device("mps" if launch.world_size == 1 else "cpu")
    if launch.world_size == 1:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    if launch.local_rank >= count:
        raise ValueError(
            f"Local rank {launch.local_rank} has no device of its own: this machine has {count} "
            f"{kind.type} device(s). Start at most {count} process(es) here, or pass cpu=True."
        )
    return torch.device(kind.type, launch.local_rank)


class PartialState:
    """The process and its peers, without anything of the training.

    The first instance finds out who started the process (see `trainer.environment`), picks its
    device and joins the process group. One process never starts a group.

    Args:
        cpu: Use the CPU though an accelerator is there. ``ACCELERATE_USE_CPU=true`` says the same.
        **kwargs: Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        device: The device of this process.
        distributed_type: The kind of processes that work together.
        backend: The process group's backend; None without a group.
        num_processes: How many processes there are.
        process_index: The rank of this one among all.
        local_process_index: Its rank on this machine.
        debug: ``ACCELERATE_DEBUG_MODE`` is true.

    Raises:
        ValueError: The launcher's variables contradict each other; there are more processes than
            devices on this machine; or `cpu` is asked for after an accelerator was taken.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            if cpu and self.device.type != "cpu":
                raise ValueError(
                    f"cpu=True was asked for, but this process already uses {self.device}. "
                    "Restart it and pass cpu=True the first time."
                )
            return
        cpu = cpu or environment.read_flag("ACCELERATE_USE_CPU")
        launch = _adopt_group(environment.detect_launch())
        device = _pick_device(launch, cpu=cpu)
        if device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(device.index or 0)
        if launch.world_size > 1 and not dist.is_initialized():
            _join_group(launch, device, kwargs)
        self.__dict__.update(
            device=device,
            distributed_type=(
                _DISTRIBUTED.get(device.type, DistributedType.MULTI_CPU)
                if launch.world_size > 1
                else DistributedType.NO
            ),
            backend=dist.get_backend() if launch.world_size > 1 else None,
            num_processes=launch.world_size,
            process_index=launch.rank,
            local_process_index=launch.local_rank,
            debug=environment.read_flag("ACCELERATE_DEBUG_MODE"),
        )

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not there.
        if name in type(self).__annotations__ or name in PartialState.__annotations__:
            owner = type(self).__name__
            raise AttributeError(
                f"`{owner}` object has no attribute `{name}`. This happens if "
                f"`{owner}._reset_state()` was called and an `Accelerator` or `PartialState` was "
                "not initialised again."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """The shared state has been made."""
        return "device" in self.__dict__

    @property
    def use_distributed(self) -> bool:
        """Several processes work together."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """This is rank 0 of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """This is rank 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """This is the highest rank of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here; nothing with one process."""
        if self.num_processes > 1:
            devices = [self.device.index or 0] if self.device.type == "cuda" else None
            dist.barrier(device_ids=devices)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once a machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201 - printing is what this method is for

    def destroy_process_group(self) -> None:
        """Leave the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()

    def __repr__(self) -> str:
        if not self.initialized:
            return "PartialState(reset)"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def _adopt_group(launch: environment.Launch) -> environment.Launch:
    """A group that somebody already started says who we are; the launcher's names may be absent."""
    if not dist.is_initialized():
        return launch
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (launch.rank, launch.world_size) == (rank, world_size):
        return launch
    return environment.Launch(
        launcher="process group", rank=rank, world_size=world_size, local_rank=rank
    )


def _join_group(launch: environment.Launch, device: torch.device, kwargs: dict[str, Any]) -> None:
    """Start the process group with the launcher's address and the device's backend."""
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    backend = chosen.pop("backend", None) or _BACKENDS.get(device.type, "gloo")
    init_method = chosen.pop("init_method", None)
    if init_method is None:
        if launch.master_addr is None or launch.master_port is None:
            raise ValueError(
                f"{launch.launcher} started {launch.world_size} processes, but MASTER_ADDR and "
                "MASTER_PORT do not say where they meet. Start the script with torchrun, or export "
                "both: rank 0's host name and a free port."
            )
        if launch.launcher == "torchrun":
            init_method = "env://"
        else:
            init_method = f"tcp://{launch.master_addr}:{launch.master_port}"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=launch.rank,
        world_size=launch.world_size,
        **chosen,
    )
    if backend == "gloo":
        atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    """Give up the interpreter's lock for a moment before the interpreter ends.

    A thread of gloo that has just ended a collective still has to release Python objects, for which
    it takes that lock. One that waits for it while the interpreter ends is killed in C++ code that
    must not be left so, and the whole process aborts: a finished run would be reported as failed.
    """
    time.sleep(0.1)


class AcceleratorState(PartialState):
    """The process, its peers, and the precision that the `Accelerator` was made with.

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; None takes
            ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        cpu: See `PartialState`.
        **kwargs: See `PartialState`.

    Raises:
        ValueError: The precision is unknown, or differs from that of the first instance.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    mixed_precision: str

    def __init__(
        self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any
    ) -> None:
        if mixed_precision is not None:
            mixed_precision = PrecisionType.parse(mixed_precision, "mixed_precision")
        self.__dict__ = AcceleratorState._shared_state
        if self.initialized:
            if mixed_precision not in (None, self.mixed_precision):
                raise ValueError(
                    "AcceleratorState has already been initialised with "
                    f"mixed_precision={self.mixed_precision!r} and cannot be changed. Restart the "
                    f"process and pass mixed_precision={mixed_precision!r} the first time."
                )
            PartialState(cpu)
            return
        if mixed_precision is None:
            named = environment.read("ACCELERATE_MIXED_PRECISION") or "no"
            mixed_precision = PrecisionType.parse(named, "ACCELERATE_MIXED_PRECISION")
        self.__dict__.update(PartialState(cpu, **kwargs).__dict__)
        self.__dict__["mixed_precision"] = mixed_precision

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        if not self.initialized:
            return "AcceleratorState(reset)"
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Where the run stands in its window of accumulated micro-batches.

    Args:
        gradient_accumulation_plugin: The window; a later one replaces it.

    Attributes:
        sync_gradients: This micro-batch ends its window: gradients are synchronised and used.
        plugin: The window's configuration.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    _loaders: list[weakref.ref[Any]]

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._loaders = []
            self.plugin = GradientAccumulationPlugin(num_steps=1)
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """The shared state has been made."""
        return "plugin" in self.__dict__

    @property
    def num_steps(self) -> int:
        """Micro-batches for one update."""
        return self.plugin.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """The end of a prepared loader ends the window."""
        return self.plugin.sync_with_dataloader

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader that is being read; the innermost of nested ones; None outside."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    @property
    def in_dataloader(self) -> bool:
        """A prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """The batch at hand is the last one of its loader; False outside."""
        loader = self.active_dataloader
        return bool(loader is not None and loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last global batch that are not repeated ones; -1 where unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _add_dataloader(self, loader: Any) -> None:
        self._loaders.append(weakref.ref(loader))

    def _remove_dataloader(self, loader: Any) -> None:
        self._loaders = [ref for ref in self._loaders if ref() is not None and ref() is not loader]

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of current dataloader: "
            f"{self.end_of_dataloader}\nExtra samples added: {self.remainder}\n"
            f"Gradient accumulation: {self.plugin}\n"
        )
