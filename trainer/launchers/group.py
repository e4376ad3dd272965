"""Start and watch the processes of a launcher, with torch's elastic agent.

It is imported at the first launch, since torch's launcher has many modules.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer import environment
from trainer.cli.launch.entry import SHUTDOWN_TIMEOUT
from trainer.cli.launch.failure import failures_of, report
from trainer.cli.launch.group import quiet_agent
from trainer.cli.launch.rendezvous import BACKEND, private_variables
from trainer.launchers import rank

_ROLE = "notebook"


class RankFailed(ChildFailedError):
    """A process of a launcher failed.

    The message ends with the traceback of the rank that failed first.

    Attributes:
        failures: rank -> what torch knows about each process that failed.
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
    """Return where the processes of a launch meet, as arguments of torch's `LaunchConfig`."""
    nodes = {"min_nodes": num_nodes, "max_nodes": num_nodes}
    if num_nodes == 1:
        return {**nodes, "rdzv_backend": BACKEND, "rdzv_endpoint": f"127.0.0.1:{port or 0}"}
    port = environment.DEFAULT_PORT if port is None else port
    return {
        **nodes,
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint or f"{address}:{port}",
        "rdzv_configs": {"rank": node_rank, **(conf or {})},
    }


def start(
    function: Callable[..., Any], args: Sequence[Any], config: dict[str, Any], **variables: object
) -> Any:
    """Run the call on all ranks, with these environment variables; return rank 0's value."""
    with tempfile.TemporaryDirectory(prefix="cadence-launch-") as name:
        folder = Path(name)
        rank.write_call(folder, function, tuple(args))
        launch_config = LaunchConfig(
            role=_ROLE,
            logs_specs=DefaultLogsSpecs(log_dir=name),
            # The notebook handles signals: Ctrl-C raises KeyboardInterrupt, which ends the ranks.
            signals_to_handle="",
            shutdown_timeout=SHUTDOWN_TIMEOUT,
            **config,
        )
        if environment.read("OMP_NUM_THREADS") is None:
            share = environment.share_of_cores(launch_config.nproc_per_node)
            variables["OMP_NUM_THREADS"] = share
        # torch would set this one for good; here it is restored after the launch.
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        if launch_config.max_nodes > 1:
            # The store of the first machine still has the addresses of processes that are gone.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        else:
            variables |= private_variables(name)
        with environment.patch_environment(**variables), quiet_agent():
            # What was printed before the launch precedes the processes' output.
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                elastic_launch(launch_config, sys.executable)(*rank.command(folder))
            except ChildFailedError as error:
                failures = failures_of(error.failures)
                text, _ = report(failures, launch_config.monitor_interval)
                raise RankFailed(text, error.failures) from None
            except KeyboardInterrupt:  # without torch's frames
                raise KeyboardInterrupt("The processes have been ended.") from None
        return rank.read_value(folder)
