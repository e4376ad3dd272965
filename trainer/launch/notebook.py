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

    With one process, the function runs in the notebook's process. Several processes are newly
    started, as by ``torchrun``, so the state of the notebook does not matter: CUDA may be in use,
    and an `Accelerator` may exist. The function, its arguments and everything they use from the
    notebook are copied to the processes. Changes to the copies are not copied back; only the return
    value of rank 0 is. The output of the processes appears below the cell. If the cell is
    interrupted or the notebook ends, the processes end after their `Trainer`, if any, has saved.

    Example::

        def train(max_epochs):
            trainer = Trainer(max_epochs=max_epochs)
            trainer.fit(module, train_loader)
            return trainer.callback_metrics["train/loss"]

        loss = notebook_launcher(train, args=(10,))  # one process for each GPU

    Args:
        function: The whole training. It creates its own `Accelerator` or `Trainer`.
        args: Its arguments.
        num_processes: The number of processes on this machine; by default one per accelerator or,
            with ``PJRT_DEVICE=TPU``, chip; or one if there is none.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``, unless the function's `Accelerator`
            sets it.
        use_port: The rendezvous port; by default a free one, or 29500 with several machines. Anyone
            who can reach it can run code in the processes, so use a private network. With a single
            machine, it can only be reached from that machine.
        master_addr: The address of the first machine.
        node_rank: The rank of this machine.
        num_nodes: The number of machines that run the same cell, each with the same number of
            processes.
        rdzv_backend: The rendezvous backend for several machines, as for ``torchrun``.
        rdzv_endpoint: The rendezvous address; by default `master_addr` and `use_port`.
        rdzv_conf: Settings of the rendezvous backend.
        rdzv_id: The name of the job, the same on all machines.
        max_restarts: The maximum number of restarts of all processes after one has failed.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: The prefix of each line of the processes' output, as for
            ``torchrun``, such as ``"[rank ${rank}] "``.

    Returns:
        The return value of rank 0; None if it cannot be pickled (with a warning), if ``max_time``
        of a `Trainer` has ended the processes, and on the other machines.

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
    """Run a function in several processes on the CPU, to test code for several devices.

    New processes are started, as in `notebook_launcher`.

    Example::

        def train():
            return Accelerator().num_processes

        num_processes = debug_launcher(train, num_processes=2)

    Args:
        function: The function that each process runs.
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
    # The function may create an `Accelerator` that differs from that of the last launch.
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
    """On exit, restore the state of an `Accelerator` that existed before.

    The state of one created inside is kept until the next launch, since the notebook continues with
    the function's result, such as its `Trainer`.
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
