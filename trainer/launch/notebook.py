"""Start several processes from one: from the cell of a notebook, or from a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer import environment, xla
from trainer.checks import check_counts
from trainer.enums import PrecisionType
from trainer.state import AcceleratorState, GradientState, PartialState
from trainer.state.shared import Shared
from trainer.tracebacks import HiddenFrames

_STATES: tuple[type[Shared], ...] = (AcceleratorState, GradientState, PartialState)
_OF_LAUNCH = "_of_launch"  # marks the state that a launch in this process has left


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run a function of a notebook in several processes that train together.

    A single process is the notebook's own. Several are new processes, started as by ``torchrun``,
    so it does not matter what the notebook has done before: CUDA may be in use, an `Accelerator`
    may exist. The function, its arguments and what they use from the notebook are copied to the
    processes; changes to them stay there, and only the return value of rank 0 comes back. The
    output of the processes appears below the cell. Interrupting the cell, or ending the notebook,
    ends them after a `Trainer` in them has saved.

    Example::

        def train(max_epochs):
            trainer = Trainer(max_epochs=max_epochs)
            trainer.fit(module, train_loader)
            return trainer.callback_metrics["train/loss"]

        loss = notebook_launcher(train, args=(10,))  # one process for each GPU

    Args:
        function: Does the whole training. It creates its own `Accelerator` or `Trainer`.
        args: Its arguments.
        num_processes: The number of processes on this machine; by default one per accelerator or,
            with ``PJRT_DEVICE=TPU``, chip; or one if there is none.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``, unless the function's `Accelerator`
            sets it.
        use_port: The rendezvous port; by default a free one, or 29500 with several machines.
            Whoever reaches it on a network can run code in the processes: use a private one. On one
            machine it can be reached from there only.
        master_addr: The address of the first machine.
        node_rank: The rank of this machine.
        num_nodes: The number of machines that run the same cell, with as many processes each.
        rdzv_backend: The rendezvous backend for several machines, as for ``torchrun``.
        rdzv_endpoint: The rendezvous address; by default `master_addr` and `use_port`.
        rdzv_conf: Settings of the rendezvous backend.
        rdzv_id: The name of the job, the same on all machines.
        max_restarts: How often all processes are restarted after one has failed.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: What each line of the processes' output begins with, as for
            ``torchrun``: ``"[rank ${rank}] "``.

    Returns:
        What rank 0 returned; None if it cannot be pickled (with a warning), if ``max_time`` of a
        `Trainer` has ended the processes, and on the other machines.

    Raises:
        TypeError: `function` is not callable, or `args` is not a sequence.
        ValueError: An argument is invalid, the port is taken, or the function uses something that
            cannot be sent to another process, such as an `Accelerator` created outside of it.
        RankFailed: A process failed; the message ends with the traceback of the first one.
        LaunchError: Only processes of another machine failed.
        ImportError: cloudpickle is not installed.
    """
    if num_processes is None:
        tpu = environment.read("PJRT_DEVICE") == "TPU"
        num_processes = max(xla.chip_count() if tpu else torch.accelerator.device_count(), 1)
    _check(function, args, num_processes, num_nodes, node_rank)
    precision = PrecisionType.parse(mixed_precision, "mixed_precision")
    if num_processes == num_nodes == 1:
        return _run_here(function, args, precision)
    from trainer.launch.function_group import machines, start

    config = machines(
        num_nodes=num_nodes,
        node_rank=node_rank,
        backend=rdzv_backend,
        endpoint=rdzv_endpoint,
        address=master_addr,
        port=use_port,
        conf=dict(rdzv_conf or {}),
    )
    config |= {
        "processes": num_processes,
        "job": rdzv_id,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
        "prefix": log_line_prefix_template,
    }
    with HiddenFrames():
        return start(function, args, config, ACCELERATE_MIXED_PRECISION=precision)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Any:
    """Run a function in several processes on the CPU, to try code for several devices.

    The processes are new ones, as for `notebook_launcher`.

    Example::

        def train():
            return Accelerator().num_processes

        num_processes = debug_launcher(train, num_processes=2)

    Args:
        function: What each process runs.
        args: Its arguments.
        num_processes: The number of processes.

    Returns:
        As `notebook_launcher`.

    Raises:
        TypeError: `function` is not callable, or `args` is not a sequence.
        ValueError: An argument is invalid, or the function uses something that cannot be sent to
            another process.
        RankFailed: A process failed; the message ends with the traceback of the first one.
        ImportError: cloudpickle is not installed.
    """
    _check(function, args, num_processes, 1, 0)
    from trainer.launch.function_group import machines, start

    config = machines(num_nodes=1)
    config |= {"processes": num_processes, "job": "none"}
    variables = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": True}
    with HiddenFrames():
        return start(function, args, config, **variables)


def _check(
    function: object, args: object, num_processes: object, num_nodes: int, node_rank: int
) -> None:
    if not callable(function):
        raise TypeError(
            f"function is {function!r}; give the function itself, and its arguments in args."
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args is {args!r}; give a tuple of arguments, for one of them (value,).")
    check_counts(1, num_processes=num_processes)
    if not 0 <= node_rank < num_nodes:
        raise ValueError(
            f"node_rank is {node_rank} and num_nodes {num_nodes}; machines are counted from 0."
        )


def _run_here(function: Callable[..., Any], args: Sequence[Any], precision: str) -> Any:
    # The function may create another `Accelerator` than that of the last launch.
    for kind in _STATES:
        if _OF_LAUNCH in kind._shared_state:
            kind._shared_state = {}
    before = AcceleratorState._leave_to_trainer(shares=False)
    made = AcceleratorState._shared_state.get("_mixed_precision", precision)
    if precision not in ("no", made):
        raise ValueError(
            f"mixed_precision is {precision!r}, but this process has an `Accelerator` with "
            f"{made!r}. Restart the notebook, and create the `Accelerator` only inside the "
            "function."
        )
    variable = environment.patch_environment(ACCELERATE_MIXED_PRECISION=precision)
    try:
        with _state_of_launch(), variable:
            return function(*args)
    finally:
        if not AcceleratorState._shared_state:
            AcceleratorState._shared_state = before


@contextmanager
def _state_of_launch() -> Iterator[None]:
    """Restore the state of an `Accelerator` that existed before, on exit.

    One that is created inside stays until the next launch: the notebook continues with what the
    function returned, such as its `Trainer`.
    """
    before = [dict(kind._shared_state) for kind in _STATES]
    try:
        yield
    finally:
        for kind, state in zip(_STATES, before, strict=True):
            if before[0]:
                kind._shared_state.clear()
                kind._shared_state.update(state)
            elif kind._shared_state and not state:
                kind._shared_state[_OF_LAUNCH] = True
