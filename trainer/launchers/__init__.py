"""Several processes from one: from the cell of a notebook, or from a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer import environment
from trainer.configuration import PrecisionType
from trainer.state import AcceleratorState, GradientState, PartialState
from trainer.state.shared import Shared

_STATES: tuple[type[Shared], ...] = (AcceleratorState, GradientState, PartialState)
_OF_LAUNCH = "_of_launch"  # in the state that a launch in this process has left


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
) -> Any:
    """Run a function of a notebook in several processes that train together.

    One process is the notebook's own. Several are new ones, as ``torchrun`` starts them, so it does
    not matter what the notebook has done before: CUDA may be in use, an `Accelerator` may exist.
    The function, its arguments and what they use of the notebook are copied there; what
    they change there stays there, except for what rank 0 returns. What the processes print
    appears below the cell. Interrupting the cell ends them, after a `Trainer` in them has saved;
    the end of the notebook does too.

    Args:
        function: Does the whole training. It makes its own `Accelerator` or `Trainer`.
        args: Its arguments.
        num_processes: How many, on this machine; by default one for each accelerator, and one
            where there is none.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``, where the function's `Accelerator` does
            not say.
        use_port: Where the processes meet. By default a free one, and with several machines 29500.
        master_addr: The address of the first machine.
        node_rank: Which machine this is.
        num_nodes: On how many machines the same cell is run, with as many processes each.
        rdzv_backend: How several machines meet, as ``torchrun`` takes it.
        rdzv_endpoint: Where; by default `master_addr` and `use_port`.
        rdzv_conf: More for the backend.
        rdzv_id: The name of the job, the same on all machines.
        max_restarts: How often all processes are started again after one has failed.
        monitor_interval: Seconds between two looks at the processes.

    Returns:
        What rank 0 returned, or None if it cannot be pickled (with a warning), and on the other
        machines.

    Raises:
        TypeError: `function` cannot be called, or `args` is no sequence.
        ValueError: An argument makes no sense, the port is taken, or the function uses something
            that cannot be sent to another process, such as an `Accelerator` that was made outside.
        RankFailed: A process failed; the message ends with the traceback of the first one.
        ImportError: cloudpickle is not installed.
    """
    if num_processes is None:
        num_processes = max(torch.accelerator.device_count(), 1)
    _check(function, args, num_processes, num_nodes, node_rank)
    precision = PrecisionType.parse(mixed_precision, "mixed_precision")
    if num_processes == num_nodes == 1:
        return _run_here(function, args, precision)
    from trainer.launchers.group import machines, start

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
        "nproc_per_node": num_processes,
        "run_id": rdzv_id,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
    }
    return start(function, args, config, ACCELERATE_MIXED_PRECISION=precision)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Any:
    """Run a function in several processes on the CPU, to try code for several devices.

    They are new ones, as for `notebook_launcher`.

    Args:
        function: What each process runs.
        args: Its arguments.
        num_processes: How many.

    Returns:
        What rank 0 returned, or None if it cannot be pickled (with a warning).

    Raises:
        TypeError: `function` cannot be called, or `args` is no sequence.
        ValueError: An argument makes no sense, or the function uses something that cannot be sent
            to another process.
        RankFailed: A process failed; the message ends with the traceback of the first one.
        ImportError: cloudpickle is not installed.
    """
    _check(function, args, num_processes, 1, 0)
    from trainer.launchers.group import one_machine, start

    config = one_machine()
    config |= {"nproc_per_node": num_processes, "run_id": "none", "max_restarts": 0}
    return start(function, args, config, ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU=True)


def _check(
    function: object, args: object, num_processes: object, num_nodes: int, node_rank: int
) -> None:
    if not callable(function):
        raise TypeError(
            f"function is {function!r}; give the function itself, and its arguments in args."
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args is {args!r}; give a tuple of arguments, for one of them (value,).")
    if not isinstance(num_processes, int) or num_processes < 1:
        raise ValueError(f"num_processes is {num_processes!r}; it must be 1 or more.")
    if not 0 <= node_rank < num_nodes:
        raise ValueError(
            f"The node_rank must be less than the number of nodes: node_rank is {node_rank} and "
            f"num_nodes {num_nodes}; machines are counted from 0."
        )


def _run_here(function: Callable[..., Any], args: Sequence[Any], precision: str) -> Any:
    _forget_last_launch()
    before = AcceleratorState._leave_to_trainer(shares=False)
    made = AcceleratorState._shared_state.get("_mixed_precision", precision)
    if precision not in ("no", made):
        raise ValueError(
            f"mixed_precision is {precision!r}, but this process has an `Accelerator` with "
            f"{made!r}. Restart the notebook, and make none outside of the function."
        )
    variable = environment.patch_environment(ACCELERATE_MIXED_PRECISION=precision)
    try:
        with _state_of_launch(), variable:
            return function(*args)
    finally:
        if not AcceleratorState._shared_state:
            AcceleratorState._shared_state = before


def _forget_last_launch() -> None:
    """Let the function make another `Accelerator` than that of the last launch."""
    for kind in _STATES:
        if _OF_LAUNCH in kind._shared_state:
            kind._shared_state = {}


@contextmanager
def _state_of_launch() -> Iterator[None]:
    """Afterwards an `Accelerator` that was there before is what it was.

    One that is made inside stays until the next launch: the notebook goes on with what the function
    returned, such as its `Trainer`.
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
