"""Start and watch the processes of a launcher, with torch's elastic agent.

It is imported at the first launch, since torch's launcher imports many modules.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainer import environment
from trainer.launch import LaunchError, remote_call
from trainer.launch.failure import failures_of, report
from trainer.launch.group import AnotherFailed, Group, run_agent
from trainer.launch.rendezvous import BACKEND

_ROLE = "notebook"
_TO_MEET = 900  # seconds that machines wait for each other, as in torch's launcher


class RankFailed(ChildFailedError):
    """A process of a launcher failed.

    The message ends with the traceback of the rank that failed first.

    Attributes:
        failures: rank -> torch's record of each process that failed.
    """

    def __init__(self, message: str, failures: dict[int, ProcessFailure]) -> None:
        self._message = message
        super().__init__(_ROLE, failures)

    def format_msg(self, *_: Any) -> str:
        """Return the message."""
        return self._message


def machines(
    *,
    num_nodes: int,
    node_rank: int = 0,
    backend: str = BACKEND,
    endpoint: str = "",
    address: str = "127.0.0.1",
    port: str | int | None = None,
    conf: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the rendezvous of a launch, as arguments of a `Group`."""
    nodes = {"machines": (num_nodes, num_nodes)}
    if num_nodes == 1:
        return {**nodes, "backend": BACKEND, "endpoint": f"127.0.0.1:{port or 0}"}
    port = environment.DEFAULT_PORT if port is None else port
    return {
        **nodes,
        "backend": backend,
        "endpoint": endpoint or f"{address}:{port}",
        "rendezvous": {"rank": node_rank, "timeout": _TO_MEET, **(conf or {})},
    }


def start(
    function: Callable[..., Any],
    args: Sequence[Any],
    config: dict[str, Any],
    **variables: object,
) -> Any:
    """Run the call on all ranks; return rank 0's value.

    Args:
        function: The function.
        args: Its arguments.
        config: Arguments of a `Group`.
        **variables: Environment variables of the processes.

    Raises:
        RankFailed: A process of this machine failed.
        LaunchError: Only the processes of another machine failed.
    """
    with tempfile.TemporaryDirectory(prefix="cadence-launch-") as name:
        folder = Path(name)
        remote_call.write_call(folder, function, tuple(args))
        group = Group(command=[sys.executable, *remote_call.command(folder)], **config)
        if environment.read("OMP_NUM_THREADS") is None:
            variables["OMP_NUM_THREADS"] = environment.share_of_cores(group.processes)
        # The notebook handles signals: Ctrl-C raises KeyboardInterrupt here, which ends the ranks.
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        with group.environment(name, **variables):
            # Earlier output must precede the output of the processes.
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                result = run_agent(group, DefaultLogsSpecs(log_dir=name), signals=(), role=_ROLE)
            except KeyboardInterrupt:  # without torch's frames
                raise KeyboardInterrupt("The processes have been ended.") from None
            except AnotherFailed as error:
                raise LaunchError(str(error)) from error
            if result.is_failed():
                text, _ = report(failures_of(result.failures), group.monitor_interval)
                raise RankFailed(text, result.failures)
        return remote_call.read_value(folder)
