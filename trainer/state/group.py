"""Choose the device of a process, and initialize the process group."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import platform
import re
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer import environment, xla
from trainer.enums import DistributedType
from trainer.errors import module_logger
from trainer.state.network import choose_interface

logger = module_logger(__name__)

_groups = itertools.count()  # for a new file per group, since an old one has stale addresses

# Variables that request XLA devices, or configure them.
XLA_VARIABLES = ("PJRT_DEVICE", "TPU_NAME", "XLA_USE_BF16", "XLA_DOWNCAST_BF16")

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
_DISTRIBUTED = {
    "cuda": DistributedType.MULTI_GPU,
    "xpu": DistributedType.MULTI_XPU,
    "cpu": DistributedType.MULTI_CPU,
}


def distributed_type(device: torch.device, world_size: int) -> DistributedType:
    """Return the kind of distributed run for a device type and a number of processes."""
    if device.type == "xla":
        return DistributedType.XLA
    if world_size == 1:
        return DistributedType.NO
    return _DISTRIBUTED.get(device.type, DistributedType.MULTI_CPU)


def default_device() -> torch.device:
    """Return the device type that a process uses by default, without an index."""
    if xla.is_available():
        return torch.device("xla")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type)


def check_not_xla() -> None:
    """Raise if the environment requests XLA devices (TPUs) but this process would use others.

    It is no error if ``PJRT_DEVICE`` names the device type that the process uses anyway.

    Raises:
        NotImplementedError: The environment does, or configures torch_xla to change the dtype of
            all tensors.
    """
    if xla.is_available():
        for name in XLA_VARIABLES[2:]:
            if (environment.read(name) or "").lower() not in environment.FALSE:
                raise NotImplementedError(
                    f"{name}={environment.read(name)} changes the dtype of all tensors: unset it, "
                    "and pass mixed_precision='bf16' or Trainer(precision='bf16-true')."
                )
        return
    harmless = {*environment.FALSE, default_device().type}
    read = ((name, environment.read(name) or "") for name in XLA_VARIABLES)
    harmful = [f"{name}={value}" for name, value in read if value.lower() not in harmless]
    if harmful:
        names = ", ".join(setting.partition("=")[0] for setting in harmful)
        raise NotImplementedError(
            f"{', '.join(harmful)}: torch_xla's devices are not supported. This process would "
            f"train on {default_device().type}: unset {names} if that is intended, or pass "
            "cpu=True."
        )


def pick_device(launch: environment.Launch, *, cpu: bool) -> torch.device:
    """Return the device of this process: the accelerator of its local rank, or the CPU.

    Args:
        launch: The rank and world size of this process.
        cpu: Use the CPU even if there is an accelerator.

    Raises:
        ValueError: There are more processes than devices, MPS is named for several processes, or
            see `xla.start`.
        RuntimeError: ``ACCELERATE_TORCH_DEVICE`` is not a torch device.
        NotImplementedError: See `check_not_xla`.
    """
    if not cpu:
        check_not_xla()
    named = environment.read("ACCELERATE_TORCH_DEVICE")
    if named and not cpu:
        return _named_device(named, launch)
    kind = torch.device("cpu") if cpu else default_device()
    if kind.type == "cpu":
        return kind
    if kind.type == "xla":
        if launch.world_size > 1 and dist.is_initialized() and dist.get_backend() == "xla":
            raise ValueError(
                "The process group has the backend 'xla', which sends nothing from the host. Leave "
                "out init_process_group: the Trainer and the Accelerator call it."
            )
        return xla.start(launch)
    if kind.type == "mps":
        # There is only one MPS device, and it has no collectives. Several processes use the CPU.
        return torch.device("mps" if launch.world_size == 1 else "cpu")
    if launch.world_size == 1:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    if launch.local_rank >= count:
        raise ValueError(
            f"Local rank {launch.local_rank} has no device: this machine has {count} {kind.type} "
            f"device(s). Start at most {count} process(es) here, or pass cpu=True."
        )
    return torch.device(kind.type, launch.local_rank)


def _named_device(named: str, launch: environment.Launch) -> torch.device:
    device = torch.device(named)
    if device.type == "mps" and launch.world_size > 1:
        raise ValueError(
            "The environment variable ACCELERATE_TORCH_DEVICE is 'mps', which has no collectives "
            f"for {launch.world_size} processes. Start one process, or name cpu."
        )
    if device.type in ("cpu", "mps") or device.index is not None:
        return device
    if launch.world_size == 1:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device(device.type, launch.local_rank)


def detect_launch(*, cpu: bool) -> environment.Launch:
    """Return the launch of this process; ``torch_xla.launch`` is detected unless `cpu`.

    Raises:
        ValueError: See `environment.detect_launch`.
    """
    launch = environment.detect_launch()
    if launch.launcher == "none" and not cpu and xla.is_available():
        launch = xla.launched() or launch
    return _adopt_group(launch)


def _adopt_group(launch: environment.Launch) -> environment.Launch:
    """Return the rank and world size of an existing process group, if there is one.

    The script may have created the group without a launcher, so the launcher's environment
    variables may be missing.
    """
    if not dist.is_initialized():
        return launch
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (launch.rank, launch.world_size) == (rank, world_size):
        return launch
    return environment.Launch(
        launcher="process group",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
    )


def join_group(launch: environment.Launch, device: torch.device, kwargs: dict[str, Any]) -> None:
    """Initialize the process group, by default with the backend for the device.

    Args:
        launch: The rank, world size and rendezvous address from the launcher.
        device: The device of this process.
        kwargs: The user's arguments of ``init_process_group``.

    Raises:
        ValueError: This build of torch lacks the backend, or there is no rendezvous address.
        RuntimeError: This is a spawned process that is importing the script.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "A spawned process, for example a loader's worker, which imports the script for its "
            "classes, would join the process group again. Create the Trainer or the Accelerator "
            "below `if __name__ == '__main__':`."
        )
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    backend = chosen.pop("backend", None)
    if backend in (None, "xla") or (backend == "nccl" and device.type != "cuda"):
        # "nccl" is the default of the documented API, so scripts pass it on any device. "xla"
        # cannot send host tensors; see `trainer.distributed.transport.all_reduce`.
        backend = _BACKENDS.get(device.type, "gloo")
    for part in str(backend).split(","):  # such as cpu:gloo,cuda:nccl
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            raise ValueError(
                f"The backend {name!r} is not available in this build of torch. Leave it out: "
                "the device determines the backend."
            )
    if chosen.get("init_method") is None and chosen.get("store") is None:
        chosen |= _rendezvous(launch, chosen.get("timeout"))
    choose_interface(launch)  # with any backend, because background saves use a gloo group
    dist.init_process_group(
        backend,
        rank=launch.rank,
        world_size=launch.world_size,
        **chosen,
    )
    atexit.register(_let_threads_finish)


def _rendezvous(launch: environment.Launch, timeout: timedelta | None) -> dict[str, str | Store]:
    """Return the rendezvous argument (``init_method`` or ``store``) of ``init_process_group``.

    When torchrun restarts the processes, they get the same store from its agent. That store still
    has the addresses of the previous attempt, and the new processes would wait for those. So each
    attempt gets its own key prefix. With agents on several machines this is not done, because their
    restart counts may differ.

    Raises:
        ValueError: ``MASTER_ADDR`` or ``MASTER_PORT`` is not set.
    """
    if launch.launcher == "torch_xla":  # which knows the machine of rank 0
        return {"init_method": "xla://"}
    if launch.master_addr is None or launch.master_port is None:
        raise ValueError(
            f"{launch.launcher} started {launch.world_size} processes, but MASTER_ADDR and "
            "MASTER_PORT are not both set. Start the script with torchrun, or export both: rank "
            "0's host name and a free port."
        )
    if launch.store is not None:
        return {"init_method": f"file://{launch.store}/{next(_groups)}"}
    if launch.launcher != "torchrun":
        return {"init_method": f"tcp://{launch.master_addr}:{launch.master_port}"}
    attempt = environment.read_int("TORCHELASTIC_RESTART_COUNT")
    if not attempt or environment.read_int("GROUP_WORLD_SIZE") != 1:
        return {"init_method": "env://"}
    limit = {} if timeout is None else {"timeout": timeout}
    store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size, **limit)))
    return {"store": PrefixStore(f"attempt-{attempt}", store)}


def warn_of_old_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, where distributed runs may hang."""
    if platform.system() != "Linux":
        return
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    if match is not None and tuple(map(int, match.groups())) < (5, 5):
        logger.warning(
            "The kernel of this machine is %s, below 5.5, on which the processes of a run may "
            "hang. Use a newer kernel.",
            platform.release(),
        )


def limit_threads(launch: environment.Launch) -> None:
    """Limit the threads of each CPU process to its share of the machine's cores.

    Otherwise each process would start as many threads as the machine has cores. Nothing is changed
    if ``OMP_NUM_THREADS`` is set.
    """
    if environment.read("OMP_NUM_THREADS") is not None:
        return
    share = environment.share_of_cores(launch.local_world_size)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)
        logger.warning(
            "OMP_NUM_THREADS is not set: each of the %d processes of this machine uses %d "
            "thread(s). Set the variable to choose another number.",
            launch.local_world_size,
            share,
        )


def _let_threads_finish() -> None:
    """Release the GIL for 0.1 seconds before the interpreter exits.

    A gloo thread that has just finished a collective needs the GIL to release Python objects. If it
    waits for the GIL while the interpreter exits, it is terminated inside C++ code that cannot
    unwind, and the process aborts. A finished run would then be reported as failed.
    """
    with suppress(KeyboardInterrupt):  # the process is ending already
        time.sleep(0.1)
