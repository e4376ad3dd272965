"""`PartialState`: the device, rank and world size of the process."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from trainer import environment
from trainer.checks import check_bools
from trainer.distributed.guards import check_collective
from trainer.distributed.process_control import going_first, run_where, split
from trainer.enums import DistributedType
from trainer.state import group as joining
from trainer.state.affinity import set_affinity
from trainer.state.shared import Shared

P = ParamSpec("P")
R = TypeVar("R")


class PartialState(Shared):
    """The device, rank and world size of this process, without any settings of the training.

    The first instance detects the launcher (see `trainer.environment`), picks the device and
    initializes the process group. With a single process, no group is created.

    Example::

        state = PartialState()
        with state.split_between_processes(["a.png", "b.png", "c.png"]) as files:
            print(state.process_index, state.device, files)

    Args:
        cpu: Use the CPU even if an accelerator is available, as ``ACCELERATE_USE_CPU=true`` does.
        **kwargs: Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        device: The device of this process.
        distributed_type: The kind of device of the processes if there are several; else ``NO``, or
            ``XLA`` on an XLA device.
        backend: The backend of the process group; None with one process.
        num_processes: The number of processes (world size).
        process_index: The global rank of this process.
        local_process_index: The rank of this process on its machine.
        debug: Whether ``ACCELERATE_DEBUG_MODE`` is true: all ranks then compare the shapes and
            dtypes of tensors before each collective.

    Raises:
        ValueError: The launcher's variables contradict each other; there are more processes than
            devices on this machine, or more XLA devices than one for each of several processes; or
            `cpu` is requested after an accelerator was chosen.
        NotImplementedError: The environment asks for XLA devices, for example by ``PJRT_DEVICE``,
            and torch_xla is not installed.
        AttributeError: An attribute is assigned to, or is read after ``_reset_state``.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _key: ClassVar[str] = "device"
    _how_to_change: ClassVar[str] = (
        "It describes the running process: start the process differently, or pass cpu=True or "
        "arguments of init_process_group when the state is first created."
    )

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool
    _local_world_size: int

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = PartialState._shared_state
        if self.initialized:
            if cpu and self.device.type != "cpu":
                raise ValueError(
                    f"cpu=True was passed, but this process already uses {self.device}. Restart "
                    "it and pass cpu=True the first time."
                )
            return
        if environment.read_flag("ACCELERATE_USE_SAGEMAKER"):
            raise NotImplementedError(
                "ACCELERATE_USE_SAGEMAKER is set, but SageMaker's libraries are not supported: "
                "unset it, and let SageMaker start the script with torchrun (torch_distributed)."
            )
        cpu = cpu or environment.read_flag("ACCELERATE_USE_CPU")
        debug = environment.read_flag("ACCELERATE_DEBUG_MODE")
        launch = joining.detect_launch(cpu=cpu)
        device = joining.pick_device(launch, cpu=cpu)
        _make_current(device)
        if environment.read_flag("ACCELERATE_CPU_AFFINITY"):
            set_affinity(launch.local_rank, verbose=debug)
        if launch.world_size > 1 and not dist.is_initialized():
            joining.join_group(launch, device, kwargs)
        if launch.world_size > 1 and device.type == "cpu":
            joining.limit_threads(launch)
        self.__dict__.update(
            device=device,
            distributed_type=joining.distributed_type(device, launch.world_size),
            backend=dist.get_backend() if launch.world_size > 1 else None,
            num_processes=launch.world_size,
            process_index=launch.rank,
            local_process_index=launch.local_rank,
            debug=debug,
            _local_world_size=launch.local_world_size,
        )

    # -- properties of this process ------------------------------------------------------------

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process is global rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is rank 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process is the highest global rank."""
        return self.process_index == self.num_processes - 1

    @property
    def mixed_precision(self) -> str:
        """The precision of the `Accelerator`; ``"no"`` before an `Accelerator` is created."""
        from trainer.state.accelerator import AcceleratorState  # a subclass of this class

        return str(AcceleratorState._shared_state.get("_mixed_precision", "no"))

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher forked this process (``FORK_LAUNCHED`` is set)."""
        return environment.read_flag("FORK_LAUNCHED")

    @property
    def default_device(self) -> torch.device:
        """The device type that a process uses by default, without an index."""
        return joining.default_device()

    def set_device(self) -> None:
        """Make `device` the current device of this thread; call it in every new thread."""
        _make_current(self.device)

    # -- running code on some ranks, or in order -----------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method; a no-op with one process.

        Raises:
            DistributedOperationException: On all processes, if one is in another collective.
        """
        if self.num_processes > 1:
            check_collective("wait_for_everyone")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager: rank 0 runs the block first, then the other ranks run it.

        Raises:
            RuntimeError: On the other processes, if rank 0 failed in the block; they do not run it.
        """
        return going_first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager: local rank 0 of each machine runs the block before the others.

        Raises:
            RuntimeError: On all other processes, if a local rank 0 failed in the block.
        """
        return going_first(self.is_local_main_process, "local_main_process_first")

    def on_main_process(self, function: Callable[P, R] | None = None) -> Callable[P, R | None]:
        """Decorator: the function runs only on rank 0, and returns None on other ranks.

        Args:
            function: The function to decorate.

        Raises:
            ValueError: There is no function, or the state was reset.
        """
        return self._where(lambda: self.is_main_process, function, "on_main_process")

    def on_local_main_process(
        self, function: Callable[P, R] | None = None
    ) -> Callable[P, R | None]:
        """Decorator: the function runs only on local rank 0 of each machine, else returns None.

        Args:
            function: The function to decorate.

        Raises:
            ValueError: There is no function, or the state was reset.
        """
        return self._where(lambda: self.is_local_main_process, function, "on_local_main_process")

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: the function runs only on the highest rank, and returns None on other ranks.

        Args:
            function: The function to decorate.

        Raises:
            ValueError: There is no function, or the state was reset.
        """
        return self._where(lambda: self.is_last_process, function, "on_last_process")

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: the function runs only on one global rank; with one process it always runs.

        Args:
            function: The function to decorate. If omitted, a decorator is returned:
                ``@state.on_process(process_index=1)``.
            process_index: The global rank; required.

        Raises:
            ValueError: There is no such rank, or the state was reset.
        """
        return self._on_rank("process_index", function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: the function runs only on one local rank; with one process it always runs.

        Args:
            function: The function to decorate. If omitted, a decorator is returned.
            local_process_index: The rank on the machine; required.

        Raises:
            ValueError: This machine has no such rank, or the state was reset.
            TypeError: `local_process_index` is not an int, or `function` is not callable.
        """
        return self._on_rank("local_process_index", function, local_process_index)

    def _on_rank(
        self, name: str, function: Callable[..., Any] | None, index: int | None
    ) -> Callable[..., Any]:
        """Decorator: the function runs only on processes whose attribute `name` equals `index`.

        A rank that does not exist raises an error, because the function would silently never run.
        With one process any rank is accepted, so that a script can be tried without a launcher.
        """
        method = f"on_{name.removesuffix('_index')}"
        self._require(method)
        count = self.num_processes if name == "process_index" else self._local_world_size
        if index is None:
            raise ValueError(f"{name} is missing; pass the rank that runs the function.")
        if index < 0 or (self.use_distributed and index >= count):
            raise ValueError(f"{name} is {index}; it must be at least 0 and below {count}.")
        if function is None:
            return partial(self._on_rank, name, index=index)
        return self._where(
            lambda: not self.use_distributed or getattr(self, name) == index, function, method
        )

    def _require(self, name: str) -> None:
        if not self.initialized:
            raise ValueError(
                f"`{name}` needs to know which process this is: create an `Accelerator` or a "
                "`PartialState` first."
            )

    def _where(
        self, due: Callable[[], bool], function: Callable[P, R] | None, name: str
    ) -> Callable[P, R | None]:
        self._require(name)
        if function is None:
            raise ValueError(
                f"`{name}` was called without a function; write `@state.{name}` above a "
                "function, without parentheses."
            )
        return run_where(due, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a context manager that yields this process's part of `inputs`.

        See `trainer.distributed.process_control.split`.

        Args:
            inputs: An object with a length and an index, such as a list, a tensor, an array or a
                map-style dataset; or a dictionary of these.
            apply_padding: Repeat the last item so that every process has the same number of items,
                for example to gather the results; drop the repeated items afterwards. Tensors are
                then moved to `device`. Default False.

        Raises:
            ValueError: The values of a dictionary have different numbers of items.
            TypeError: The inputs have no length or no index, or `apply_padding` is not a bool.
        """
        check_bools(apply_padding=apply_padding)
        yield split(
            inputs,
            rank=self.process_index,
            world_size=self.num_processes,
            padding=apply_padding,
            device=self.device,
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the local main process of each machine only.

        Characters that the output's encoding cannot represent are printed as escapes, so that an
        unusual folder name, for example, does not stop a run.
        """
        if self.is_local_main_process:
            file = kwargs.get("file") or sys.stdout
            texts = [_printable(str(arg), file) for arg in args]
            for name in {"sep", "end"} & kwargs.keys():
                if isinstance(kwargs[name], str):
                    kwargs[name] = _printable(kwargs[name], file)
            builtins.print(*texts, **kwargs)  # noqa: T201 - printing is what this method is for

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy the process group, if there is one.

        Args:
            group: The group; None means the default group. If `fork_launched` is true, the default
                group belongs to the launcher and is kept.
        """
        if group is None and self.fork_launched:
            return
        if dist.is_initialized():
            dist.destroy_process_group(group)

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()

    def __repr__(self) -> str:
        if not self.initialized:
            return f"{type(self).__name__}(reset)"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def _make_current(device: torch.device) -> None:
    if device.type not in ("cpu", "mps", "xla"):
        torch.accelerator.set_device_index(device.index or 0)


def _printable(text: str, file: Any) -> str:
    """Return the text with escapes for characters that the file's encoding cannot represent."""
    encoding = getattr(file, "encoding", None)
    if encoding is None or getattr(file, "errors", "strict") != "strict":
        return text
    return str(text.encode(encoding, "backslashreplace").decode(encoding))
