"""The process's environment variables; no other module of Cadence reads them.

The launcher decides which variables describe a process: ``torchrun`` (and every launcher that sets
the same names), SLURM's ``srun``, an MPI, or none. `detect_launch` returns a `Launch` for each.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

TRUE = frozenset({"1", "true", "yes", "y", "on", "t"})
FALSE = frozenset({"0", "false", "no", "n", "off", "f", ""})

# name of the launcher: (rank, world size, local rank, local world size)
_MPI_VARIABLES = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
DEFAULT_PORT = 29500  # torchrun's own default
STORE = "CADENCE_STORE"  # the variable with the launcher's private folder


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The position of this process among the processes that one launcher started.

    The processes meet at the address and port, or in files in the folder `store` if there is one.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    store: Path | None = None

    def __post_init__(self) -> None:
        """Check that the rank fits the number of processes."""
        if not (self.world_size >= 1 and 0 <= self.rank < self.world_size):
            raise ValueError(
                f"{self.launcher} sets rank {self.rank} of {self.world_size} processes; the rank "
                "must be at least 0 and below the number of processes. Check the launcher's "
                "environment variables."
            )


def read(name: str) -> str | None:
    """Return the variable's text; None if it is not set."""
    return os.environ.get(name)


def read_int(name: str) -> int | None:
    """Return the variable as an integer; None if it is not set or empty.

    Raises:
        ValueError: The variable is not an integer.
    """
    text = os.environ.get(name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} is {text!r}; it must be an integer."
        ) from None


def read_flag(name: str, default: bool = False) -> bool:
    """Return the variable as a bool; `default` if it is not set.

    Raises:
        ValueError: The variable is neither a true nor a false value.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"The environment variable {name} is {text!r}; it must be true or false.")


def share_of_cores(processes: int) -> int:
    """Return each local process's share of the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables in the block, and restore them afterwards.

    Args:
        **kwargs: Names, which are upper-cased, and values, which are converted with ``str``.
    """
    before = {name.upper(): os.environ.get(name.upper()) for name in kwargs}
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export(**kwargs: Any) -> None:
    """Set environment variables for the rest of the process, for other libraries to read."""
    os.environ.update({name: str(value) for name, value in kwargs.items()})


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""Return ``NAME=value\n`` for each variable, as in a settings file.

    Those with a character that such a file cannot hold (one of ``; < > |``, a space or a line
    break) are left out.
    """
    lines = [f"{name}={value}" for name, value in current_env.items()]
    return [f"{line}\n" for line in lines if not re.search(r"[;\n<>| ]", line)]


@contextmanager
def clear_environment() -> Iterator[None]:
    """Clear the environment in the block, and restore exactly the previous one afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


T = TypeVar("T")


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorator: undo changes of ``ACCELERATE_`` variables after each call of a function.

    Args:
        func_or_cls: A function; or a test class, whose methods that begin with ``test``, including
            those of subclasses, are decorated in place.
    """
    decorated: Any = func_or_cls
    if not isinstance(decorated, type):
        return cast("T", _purged(decorated))

    def purge_tests(cls: type) -> None:
        for name in dir(cls):
            if name.startswith("test") and callable(method := getattr(cls, name)):
                setattr(cls, name, _purged(method))

    purge_tests(decorated)
    setattr(decorated, "__init_subclass__", classmethod(lambda cls, **_: purge_tests(cls)))  # noqa: B010 - mypy refuses to assign it
    return func_or_cls


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            for name in _accelerate_variables():
                del os.environ[name]
            os.environ.update(before)

    return call


def _accelerate_variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}


@contextmanager
def defaulting(name: str, value: str) -> Iterator[None]:
    """Set a variable in the block unless it is set already."""
    with nullcontext() if name in os.environ else patch_environment(**{name: value}):
        yield


@contextmanager
def without(name: str) -> Iterator[None]:
    """Unset a variable in the block."""
    with patch_environment(**{name: ""}):
        del os.environ[name]
        yield


def detect_launch() -> Launch:
    """Return the launch of this process: torchrun's variables first, then SLURM, MPI, none.

    torchrun's names take precedence so that users of other launchers can set them.

    Raises:
        ValueError: The variables contradict each other, or the address is missing for several
            nodes.
    """
    return _torchrun() or _slurm() or _mpi() or Launch(launcher="none")


def _torchrun() -> Launch | None:
    world_size, rank = read_int("WORLD_SIZE"), read_int("RANK")
    if world_size is None or rank is None:
        return None
    local_rank = read_int("LOCAL_RANK")
    local_world_size = read_int("LOCAL_WORLD_SIZE")
    return Launch(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_world_size is None else local_world_size,
        master_addr=read("MASTER_ADDR"),
        master_port=read_int("MASTER_PORT"),
        store=_store(),
    )


def interpreter_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command of a Python process, as in ``sys.orig_argv``.

    Returns:
        The interpreter's options; and the program, such as a script or ``-m`` and a module, with
        its arguments.
    """
    options: list[str] = []
    at = 1
    while argv[at : at + 1] and argv[at].startswith("-") and argv[at] != "-":
        match = re.fullmatch(r"-(\w*?)([cmWX])(.*)", argv[at], re.DOTALL)
        if match and match[2] in "cm":
            options += [f"-{match[1]}"] * bool(match[1])
            return options, [f"-{match[2]}", *filter(None, [match[3]]), *argv[at + 1 :]]
        takes_next = match[3] == "" if match else argv[at] == "--check-hash-based-pycs"
        options += argv[at : at + 1 + takes_next]
        at += 1 + takes_next
    return options, list(argv[at:])


def store_path(port: int | None, attempt: int | None) -> Path:
    """Return the folder for the stores of an attempt whose ``MASTER_PORT`` is `port`."""
    return Path(os.environ[STORE], f"store-{port}-{attempt}")


def _store() -> Path | None:
    if STORE not in os.environ:
        return None
    path = store_path(read_int("MASTER_PORT"), read_int("TORCHELASTIC_RESTART_COUNT"))
    # A launcher started by the script inherits the variable, but has another port.
    return path if path.is_dir() else None


def _slurm() -> Launch | None:
    # Only processes started by srun have a meaningful step and PROCID; the batch script itself is
    # a single process.
    rank, world_size = read_int("SLURM_PROCID"), read_int("SLURM_STEP_NUM_TASKS")
    if rank is None or world_size is None or _in_a_shell():
        return None
    tasks_per_node = read("SLURM_STEP_TASKS_PER_NODE") or str(world_size)
    local_world_size = int(re.match(r"\d*", tasks_per_node)[0] or 1)  # type: ignore[index]  # \d* matches
    nodes = read("SLURM_STEP_NODELIST")
    address = (
        read("MASTER_ADDR") or read("SLURM_LAUNCH_NODE_IPADDR") or (nodes and first_node(nodes))
    )
    if address is None and local_world_size < world_size:
        raise _no_address("slurm", world_size)
    job = read_int("SLURM_JOB_ID") or 0
    return Launch(
        launcher="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=read_int("SLURM_LOCALID") or 0,
        local_world_size=local_world_size,
        master_addr=address or "localhost",
        # Derived from the job id: the same port on all its nodes, different ports for other jobs.
        master_port=read_int("MASTER_PORT") or 15000 + job % 10000,
    )


def slurm_job() -> str | None:
    """Return this process's SLURM job id in ``scontrol``'s form; None outside a job."""
    array, task = read("SLURM_ARRAY_JOB_ID"), read("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else read("SLURM_JOB_ID")


def _in_a_shell() -> bool:
    """Return whether the process was started interactively in a shell of `srun --pty`.

    The shell is a task of a step, perhaps one of several, but a command typed into it runs alone.
    The job name cannot tell: srun called in such a shell starts a step of several tasks in a job of
    the same name. Those tasks inherit SLURM_PTY_PORT too, but only the shell has a terminal.
    """
    return read("SLURM_PTY_PORT") is not None and os.isatty(0)


def _no_address(launcher: str, world_size: int) -> ValueError:
    return ValueError(
        f"{launcher} started {world_size} processes on several nodes, but MASTER_ADDR is not set. "
        "Export rank 0's host name as MASTER_ADDR on every node."
    )


def first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``"gpu003"`` for ``"gpu[003-005,9],cpu1"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if match is None:
        raise ValueError(f"The SLURM node list {nodes!r} names no host.")
    return match[1] + (match[2] or "")


def _mpi() -> Launch | None:
    for launcher, names in _MPI_VARIABLES.items():
        rank, world_size, local_rank, local_size = map(read_int, names)
        if rank is None or world_size is None:
            continue
        local_world_size = world_size if local_size is None else local_size
        address = read("MASTER_ADDR")
        if address is None and local_world_size < world_size:
            raise _no_address(launcher, world_size)
        return Launch(
            launcher=launcher,
            rank=rank,
            world_size=world_size,
            local_rank=rank if local_rank is None else local_rank,
            local_world_size=local_world_size,
            master_addr=address or "127.0.0.1",
            master_port=read_int("MASTER_PORT") or DEFAULT_PORT,
        )
    return None
