"""Features that torch releases back to 2.9 lack; each function says which release has it.

No other module compares torch versions. Features that cannot be emulated raise an error where they
are used.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.agent.server.local_elastic_agent import (
        LocalElasticAgent as _Agent,
    )
    from torch.distributed.tensor.parallel import ParallelStyle
else:
    _Agent = object  # torch's launcher imports many modules that only launchers need

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # handled by torch's agent by default


def ddp_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of DDP, with the name of `broadcast_buffers` since torch 2.13."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    if "forward_sync_buffers" not in known:
        return arguments
    renamed = dict(arguments)
    renamed["forward_sync_buffers"] = renamed.pop("broadcast_buffers", True)
    return renamed


def fsdp_groups(unit: Any) -> list[Any]:
    """Return torch's records of an FSDP2 unit; there may be several since torch 2.12."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused_parameters(unit: Any) -> None:
    """Make an FSDP2 unit reduce zeros for parameters without a gradient.

    Processes that take different branches then reduce the same tensors. Since torch 2.12,
    ``set_reduce_scatter_unused_params`` does this.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True)
        return
    for group in fsdp_groups(unit):
        group.post_backward = _PostBackward(group)


class _PostBackward:
    """``FSDPParamGroup.post_backward``, which first gives unused parameters a zero gradient."""

    def __init__(self, group: Any) -> None:
        self._group, self._reduce = group, group.post_backward

    def __call__(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            for held in self._group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)
                if whole is None or not whole.requires_grad:
                    continue
                if whole.grad is None and held.unsharded_accumulated_grad is None:
                    held.unsharded_accumulated_grad = torch.zeros_like(whole)
        self._reduce(*unused)


def parallelize_module(layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Split a layer; frozen parameters stay frozen, unlike in torch 2.9."""
    from torch.distributed.tensor import parallel

    frozen = [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]
    parallel.parallelize_module(layer, mesh, style)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)


def check_pipelining() -> None:
    """Check that torch can split a model into pipeline stages.

    Raises:
        NotImplementedError: torch is older than 2.12; its ``torch.export`` fails for models'
            buffers.
    """
    if TorchVersion(torch.__version__) < "2.12":
        raise NotImplementedError(
            f"A pipeline of several processes needs torch 2.12; this is torch {torch.__version__}."
        )


def free_device_memory(index: int) -> int:
    """Return the free bytes of an accelerator; ``torch.accelerator`` has this since torch 2.10."""
    if hasattr(torch.accelerator, "get_memory_info"):
        return int(torch.accelerator.get_memory_info(index)[0])
    return int(torch.get_device_module().mem_get_info(index)[0])


def register_fake_collectives() -> None:
    """Make collectives run on tensors without values; torch does this itself since 2.10."""
    if TorchVersion(torch.__version__) < "2.10":
        import_module("torch.distributed._tools.fake_collectives")


def clear_sharding_cache() -> None:
    """Clear results that DTensor caches by mesh equality; there is no public function."""
    from torch.distributed.tensor import debug

    if hasattr(debug, "_clear_sharding_prop_cache"):  # since torch 2.10
        debug._clear_sharding_prop_cache()
        return
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


class ElasticAgent(_Agent):
    """Base of a ``LocalElasticAgent`` with ``shutdown_timeout``, which torch has since 2.12.

    Earlier agents kill the processes 30 seconds after a signal, even while they save. Before 2.10
    they do not read ``TORCHELASTIC_SIGNALS_TO_HANDLE`` either.

    Args:
        *args: Arguments of torch's agent.
        shutdown_timeout: Seconds for processes to save after a signal.
        signals: The names of the signals that end the processes, as in
            ``TORCHELASTIC_SIGNALS_TO_HANDLE``.
        **kwargs: Arguments of torch's agent.
    """

    def __init__(
        self, *args: Any, shutdown_timeout: int, signals: Sequence[str], **kwargs: Any
    ) -> None:
        self._signals = signals
        self._takes_timeout = "shutdown_timeout" in inspect.signature(super().__init__).parameters
        if self._takes_timeout:
            kwargs["shutdown_timeout"] = shutdown_timeout
        super().__init__(*args, **kwargs)
        self._shutdown_timeout = shutdown_timeout

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        """Start the processes, and handle the signals."""
        before = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
        started: dict[int, Any] = super()._start_workers(worker_group)
        if not self._takes_timeout and threading.current_thread() is threading.main_thread():
            _handle_signals(self._signals, before)
        return started

    def _stop_workers(self, worker_group: Any) -> None:  # noqa: ARG002 - torch's interface
        self._shutdown(timeout=30)  # for a restart; the agent's own shutdown waits longer

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        timeout = self._shutdown_timeout if timeout is None else timeout
        if self._takes_timeout:
            super()._shutdown(death_sig, timeout)
            return
        processes = self._pcontext
        try:
            self._pcontext = None  # torch would kill its processes after 30 seconds
            super()._shutdown(death_sig)
        finally:
            self._pcontext = processes
        if processes is not None:
            processes.close(death_sig, timeout)


def _handle_signals(names: Sequence[str], before: dict[str, Any]) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    def end(number: int, _: Any) -> None:
        found = signal.Signals(number)
        raise SignalException(f"The launcher got {found.name}", sigval=found)

    for name, handler in before.items():
        if handler is not None:  # None: not installed from Python
            signal.signal(getattr(signal, name), handler)
    for name in names:
        signal.signal(getattr(signal, name), end)
