"""The processes of one machine, started and watched by torch's elastic agent.

In addition to torch's agent: a second signal also reaches the processes, a run that ended after a
signal is no failure, the first exception is shown last, and machines learn of each other's
failures.

Each launcher watches its own processes. If the processes of one machine fail before all machines
have met, the others would wait until torch gives up, after half an hour. So a launcher that gives
up reports this in the store of the launchers' rendezvous, and the others end their processes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous

from trainer.environment import patch_environment
from trainer.errors import echo, module_logger
from trainer.launch import LaunchError
from trainer.launch.entry import ENDED, LAUNCHER, PATIENCE, SHUTDOWN_TIMEOUT
from trainer.launch.failure import Failure, failures_of, first_of, report, summary
from trainer.launch.rendezvous import BACKEND, private_variables
from trainer.state.network import reachable_from
from trainer.torch_compat import ElasticAgent

logger = module_logger(__name__)

_PATIENCE = 10  # seconds from a second signal until the processes are killed
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null")
_FAILED, _LEFT = "cadence/failed", "cadence/left"
_LOOK = 1.0  # seconds between two reads of the store
_GRACE = 30.0  # seconds for processes to notice a failure themselves
_LONGEST = 300.0  # maximum seconds to wait until the others have ended
# Seconds of waiting before a message is logged. If the number of machines is a range, the last call
# for more of them takes 30.
_NOTICE = 45.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """The settings of one machine's agent.

    Attributes:
        command: The program of each process, and its arguments.
        processes: The number of processes on this machine.
        machines: The minimum and maximum number of machines.
        backend: The rendezvous backend: ``"static"`` or ``"c10d"``, or ``"loopback"`` on one
            machine.
        endpoint: The rendezvous address, ``"host:port"``.
        job: The name of the job; the same on all machines.
        rendezvous: More settings of the rendezvous.
        max_restarts: The maximum number of restarts of all processes.
        monitor_interval: Seconds between two checks.
        shutdown_timeout: Seconds for processes to save after a signal.
        log_dir: The folder for the output of the processes; None for no files.
        tee: The output that also goes to the terminal, as in torch: ``"1"`` stdout, ``"2"`` stderr,
            ``"3"`` both.
        prefix: The prefix of each line of the processes' output.
    """

    command: Sequence[str]
    processes: int
    machines: tuple[int, int] = (1, 1)
    backend: str = BACKEND
    endpoint: str = "127.0.0.1:0"  # a free port
    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    rendezvous: dict[str, Any] = field(default_factory=dict)
    max_restarts: int = 0
    monitor_interval: float = 0.1
    shutdown_timeout: int = SHUTDOWN_TIMEOUT
    log_dir: str | None = None
    tee: str = "0"
    prefix: str | None = None

    @contextmanager
    def environment(self, folder: str, **variables: object) -> Iterator[None]:
        """Inside, set the environment of the processes, and silence torch's launcher.

        Args:
            folder: The launcher's private folder.
            **variables: More variables.
        """
        if self.machines[1] > 1:
            # The store of machine 0's agent still has the addresses of processes that are gone.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        else:
            variables |= private_variables(folder)
        with patch_environment(**variables), _quiet_agent():
            yield


class AnotherFailed(Exception):
    """The processes of another machine have failed, and this machine's have not noticed."""


class PeerLaunchers:
    """The launchers of the other machines.

    Args:
        store: Returns the store of the last rendezvous; None before the first.
        all_needed: Whether the run needs all of them to continue.
    """

    def __init__(self, store: Callable[[], Any], *, all_needed: bool) -> None:
        self._store, self._all_needed = store, all_needed
        self._failure: tuple[str, float] | None = None
        self._ended = threading.Event()

    def report(self, failure: str) -> None:
        """Report that the processes of this machine have failed, and let the others read it."""
        store = self._store()
        if store is None or not self._all_needed:
            return
        try:
            store.set(_FAILED, failure)
        except RuntimeError as error:  # error of the store: machine 0 is gone
            logger.debug("The failure could not be reported to the other machines: %s", error)
            return
        time.sleep(2 * _LOOK)  # the store may end with this process

    def raise_if_failed(self) -> None:
        """Raise if another machine has failed and this machine's processes had time to notice.

        Raises:
            AnotherFailed: Another machine reported a failure more than 30 seconds ago.
        """
        if self._failure is not None and time.monotonic() > self._failure[1] + _GRACE:
            raise AnotherFailed(
                f"{self._failure[0].rstrip('.')}. The processes of this machine were still running "
                f"{_GRACE:g} seconds later and were terminated."
            )

    def mark_done(self, machine: int) -> None:
        """Report that the processes of this machine have ended, for machines in `wait`."""
        try:
            self._store().set(f"{_LEFT}/{machine}", "")
        except RuntimeError as error:  # machine 0 is gone, and nobody waits
            logger.debug("The end could not be reported to the other machines: %s", error)

    def wait(self, machines: int) -> None:
        """Wait until all machines have left, since this process may host the store."""
        keys = [f"{_LEFT}/{machine}" for machine in range(machines)]
        end = time.monotonic() + _LONGEST
        try:
            while not self._store().check(keys) and time.monotonic() < end:
                time.sleep(_LOOK / 10)
        except RuntimeError as error:
            logger.debug("Waiting for the other machines failed: %s", error)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, watch for failures that the others report.

        It runs in a thread, since a store on a lost machine may not answer, and the launcher has to
        watch its processes.
        """
        thread = threading.Thread(target=self._listen, name="cadence-machines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(_LOOK)

    def _listen(self) -> None:
        store = clone = None
        while self._all_needed and not self._ended.wait(_LOOK) and self._failure is None:
            try:
                if self._store() is not store:
                    store = self._store()
                    clone = store.clone()  # waiting in the launcher's own store would block it
                if clone is not None and clone.check([_FAILED]):
                    self._failure = clone.get(_FAILED).decode(), time.monotonic()
            except RuntimeError as error:  # machine 0 is gone, or a new rendezvous has begun
                logger.debug("Reports of the other machines could not be read: %s", error)


class _Agent(ElasticAgent, LocalElasticAgent):
    """Torch's agent, which also forwards a second signal and reports why it restarts."""

    _seen: RunResult
    peers: PeerLaunchers | None = None  # launchers on other machines
    waits_for: str | None = None  # printed if the other machines take long to join

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the processes; see torch's agent."""
        with self.peers.watch() if self.peers else nullcontext():
            try:
                result: RunResult = super().run(role)
                return result
            except OSError as error:  # for example a missing program
                if self.peers is not None:
                    self.peers.report(f"The launcher on {socket.gethostname()} failed: {error}")
                raise
            finally:
                self._leave()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        text = self.waits_for
        timer = threading.Timer(_NOTICE, lambda: echo(text, error=True))
        timer.daemon = True
        if text is not None:
            timer.start()
        try:
            super()._rendezvous(worker_group)
        finally:
            timer.cancel()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._seen = result
        if result.is_failed() and any(failure.refused for failure in failures_of(result.failures)):
            self._remaining_restarts = 0
        if self.peers is not None and result.state == WorkerState.HEALTHY:
            self.peers.raise_if_failed()
        elif self.peers is not None and result.is_failed() and self._remaining_restarts == 0:
            first = self._first_failure()
            self.peers.report(f"{first.who} failed first: {summary(first)}")
        return result

    def _first_failure(self) -> Failure:
        interval = self._worker_group.spec.monitor_interval
        return first_of(failures_of(self._seen.failures), interval)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._seen.is_failed():  # otherwise a machine has joined or left
            first, most = self._first_failure(), worker_group.spec.max_restarts
            how = f"with {first.kind}" if first.text and first.kind else summary(first)
            echo(
                f"{first.who} failed first, {how.rstrip('.')}. All processes are restarted "
                f"({most - self._remaining_restarts} of {most}).",
                error=True,
            )
        super()._restart_workers(worker_group)

    def _leave(self) -> None:
        if self.peers is not None and self._store is not None:
            self.peers.mark_done(self._worker_group.group_rank)

    def _exit_barrier(self) -> None:
        """Replace torch's barrier, which also waits for machines that failed or got a signal."""
        self._leave()
        machines = self._worker_group.group_world_size
        if self.peers is not None and machines is not None:
            self.peers.wait(machines)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        hurried = False
        while True:
            try:
                super()._shutdown(death_sig, timeout)
                return
            except SignalException as again:
                # A second Ctrl-C requests to end now, a third one to kill the processes.
                death_sig = signal.SIGKILL if hurried else again.sigval
                timeout, hurried = _PATIENCE, True


class _Logs(DefaultLogsSpecs):
    """Torch's log settings, which keep the paths of the records of the last attempt's processes."""

    _files: Mapping[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        self._files = destination.error_files
        return destination

    def ends(self) -> list[int]:
        """Return the exit codes of the processes that ended after a signal and saved."""
        notes = [Path(file).with_name(ENDED) for file in self._files.values()]
        return [json.loads(note.read_text())["code"] for note in notes if note.exists()]

    def failures(self) -> list[Failure]:
        """Return the exceptions of the processes that did not end this way."""
        noted = {
            rank: ProcessFailure(local_rank=rank, pid=0, exitcode=1, error_file=file)
            for rank, file in self._files.items()
            if Path(file).is_file()
        }
        return [
            failure for failure in failures_of(noted) if not (failure.chosen or failure.follows)
        ]


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence torch's launcher inside: it raises the failure, which is reported once."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [each.propagate for each in loggers]
    nowhere = logging.NullHandler()
    for each in loggers:
        each.addHandler(nowhere)
        each.propagate = False
    try:
        yield
    finally:
        for each, propagate in zip(loggers, before, strict=True):
            each.propagate = propagate
            each.removeHandler(nowhere)


def run_group(group: Group) -> int:
    """Start the processes of this machine and wait until they have ended.

    Returns:
        0; the code of a run that ended after a signal and saved; or the code of the process that
        failed first on this machine, 128 plus the signal's number if a signal ended it. A run that
        failed while ending after a signal gives 1.

    Raises:
        LaunchError: The rendezvous of the machines failed.
        OSError: The program cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="cadence-launch-") as folder:
        names = [name for name in _SIGNALS if hasattr(signal, name) and not _is_deaf_to(name)]
        variables = {
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(names),
            LAUNCHER: str(os.getpid()),
            PATIENCE: str(group.shutdown_timeout),
        }
        numbers = [signal.Signals[name] for name in names]
        before = {number: signal.getsignal(number) for number in numbers}
        with group.environment(folder, **variables):
            logs = _Logs(
                log_dir=group.log_dir or folder,
                redirects=Std.ALL if group.log_dir and group.tee == "0" else Std.NONE,
                tee=Std.from_str(group.tee),
            )
            try:
                result = run_agent(group, logs, signals=names)
            except SignalException as end:
                failed = logs.failures()
                return _report_failures(failed, group) if failed else 128 + end.sigval
            except AnotherFailed as error:
                raise LaunchError(str(error)) from error
            except (RendezvousError, DistError, ValueError) as error:
                raise LaunchError(_not_met(group, error)) from error
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        if result.is_failed():
            return _report_failures(failures_of(result.failures), group)
        return max(logs.ends(), default=0)


def _not_met(group: Group, error: BaseException | None) -> str:
    if group.machines[1] == 1:
        return str(error)
    if isinstance(error, RendezvousConnectionError):
        error = error.__cause__  # it adds no information
    reason = str(error).rstrip(".")
    return f"the rendezvous of the launchers at {group.endpoint} failed: {reason}. {_where(group)}"


def _where(group: Group) -> str:
    """Return the rendezvous settings that the machines need."""
    host, _, port = group.endpoint.rpartition(":")
    numbered = group.backend == "static" or "is_host" in group.rendezvous
    return (
        "The same program must be launched on all machines; "
        f"{'machine 0' if numbered else 'one of them'} must be {host}, and all must reach its port "
        f"{port}."
    )


def _report_failures(failures: list[Failure], group: Group) -> int:
    text, code = report(failures, group.monitor_interval)
    echo(text, error=True)
    return code


def _is_deaf_to(name: str) -> bool:
    """Return whether the signal is ignored, as SIGHUP is under ``nohup``."""
    return name == "SIGHUP" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _worker_spec(group: Group, role: str) -> WorkerSpec:
    """Return the settings of torch's agent: the rendezvous, and the processes to start."""
    host, _, port = group.endpoint.rpartition(":")
    address = reachable_from(host)  # others may not resolve this one's host name
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend=group.backend,
            endpoint=group.endpoint,
            run_id=group.job,
            min_nodes=group.machines[0],
            max_nodes=group.machines[1],
            local_addr=address,
            **group.rendezvous,
        )
    )
    static = group.backend == "static"
    return WorkerSpec(
        role=role,
        local_world_size=group.processes,
        entrypoint=group.command[0],
        args=tuple(group.command[1:]),
        rdzv_handler=handler,
        max_restarts=group.max_restarts,
        monitor_interval=group.monitor_interval,
        master_addr=host if static else None,
        master_port=int(port) if static else None,
        local_addr=address,
    )


def run_agent(
    group: Group, logs: DefaultLogsSpecs, *, signals: Sequence[str], role: str = DEFAULT_ROLE
) -> RunResult:
    """Start the processes of this machine and watch them until they have ended.

    Args:
        group: The settings.
        logs: The destination of their output.
        signals: The names of the signals that end the processes.
        role: Torch's name for the group.

    Raises:
        AnotherFailed: Only the processes of another machine have failed.
    """
    spec = _worker_spec(group, role)
    agent = _Agent(
        spec,
        logs_specs=logs,
        log_line_prefix_template=group.prefix,
        shutdown_timeout=group.shutdown_timeout,
        signals=signals,
    )
    least, most = group.machines
    if most > 1:
        number = most if least == most else f"{least} to {most}"
        agent.waits_for = f"The launcher is still waiting for {number} machines. {_where(group)}"
        agent.peers = PeerLaunchers(lambda: agent._store, all_needed=least == most)
    try:
        result = agent.run()
    except SignalException:
        # Other machines may continue without this one, so the rendezvous stays open.
        raise
    except BaseException:
        spec.rdzv_handler.shutdown()
        raise
    spec.rdzv_handler.shutdown()
    return result
