"""Ranks that stay alive across tests.

Starting a process that imports torch takes seconds, a call to a running one milliseconds:

    def total(value):
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(ranks2):
        assert ranks2(total, 1) == [3, 3]

The function runs on every rank, in the caller's working folder, with an initialised process group
(gloo on the CPU, rendezvous through a file, so no ports) and the environment that torchrun sets.
The warning filters of the calling test also apply on the ranks, so warnings are errors there.
Functions and arguments are pickled by value: lambdas, closures and classes of the test module work.
Assert in the test, on what the ranks return. Afterwards each rank restores its state.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
import tqdm

from tests.helpers import isolation
from trainer.launch.remote_call import with_files

with contextlib.suppress(ImportError):  # the tests of one process run without it
    import cloudpickle

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0  # seconds for all ranks to import torch and form the group
GRACE = 5.0  # seconds that the other ranks get once one has failed
TEST_MODULE = re.compile(r"[/\\](test_[^/\\]*|conftest)\.py$")
STOP_TIMEOUT = 10.0  # seconds for a rank to exit when asked to


class RankError(RuntimeError):
    """At least one rank failed.

    Attributes:
        failures: rank -> its report, in the order in which the ranks failed.
    """

    def __init__(self, failures: dict[int, str], size: int) -> None:
        self.failures = failures
        first = next(iter(failures))
        parts = [f"{len(failures)} of {size} ranks failed, rank {first} first"]
        parts += [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class Reply:
    """What a rank sends back from one call."""

    value: bytes = b""  # pickled
    failure: str | None = None
    # Ranks whose marks differ have run different collectives, so their group is unusable.
    mark: tuple[object, ...] = ()


@dataclass
class Rank:
    """One process of a pool, seen from the caller."""

    process: subprocess.Popen[bytes]
    connection: Connection
    stacks: Path

    def receive(self) -> Reply:
        try:
            reply = cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return Reply(failure=self.obituary())
        assert isinstance(reply, Reply)
        return reply

    def obituary(self) -> str:
        code = self.process.wait(STOP_TIMEOUT)
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process died: {cause}\n{self.python_stacks()}"

    def python_stacks(self) -> str:
        text = self.stacks.read_text() if self.stacks.exists() else ""
        return text.partition("Extension modules:")[0]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        # Kill the rank's session, which includes its data-loader workers.
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)


class RankPool:
    """`size` processes that run the functions passed to a call, as the ranks of a process group.

    They start at the first call. After a hang, a death, or a failure that left the ranks out of
    sync, they are killed and the next call starts new ones.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, got size={size}")
        self.size = size
        self._ranks: list[Rank] = []
        self._folder: Path | None = None
        atexit.register(self.kill)  # for pools that are not closed

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Run `function(*args)` on every rank and return the results, ordered by rank.

        Raises:
            RankError: A rank raised or died. The message contains every traceback.
            TimeoutError: Ranks did not reply within `timeout` seconds. The message names them and
                shows the stacks of their threads.
        """
        __tracebackhide__ = True
        message = _pack_by_value((function, args, Path.cwd(), _portable(warnings.filters)))
        if not self.alive:
            self.kill()
            self._start()
        try:
            for rank in self._ranks:
                rank.connection.send_bytes(message)
            replies = self._collect(timeout)
        except BaseException:  # also an interrupt: no later call may read this call's replies
            self.kill()
            raise
        marks = {reply.mark for reply in replies.values()}
        if len(marks) > 1 or () in marks:
            self.kill()
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        if failures:
            raise RankError(failures, self.size)
        return [cloudpickle.loads(replies[rank].value) for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        """Whether all processes are running."""
        return bool(self._ranks) and all(rank.process.poll() is None for rank in self._ranks)

    @property
    def pids(self) -> list[int]:
        """The process ids, ordered by rank; empty before the first call."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """Let the ranks exit by themselves; kill those that do not."""
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.connection.send_bytes(b"")
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(STOP_TIMEOUT)
        self.kill()

    def kill(self) -> None:
        """Kill all processes at once and remove their shared folder."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
            isolation.SESSION_PROCESSES.discard(rank.process.pid)
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for index in range(self.size):
            self._ranks.append(self._spawn(index, self._folder))
        try:
            replies = self._collect(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        if failures:
            self.kill()
            raise RankError(failures, self.size)

    def _spawn(self, index: int, folder: Path) -> Rank:
        ours, theirs = Pipe()
        environ = {
            **os.environ,
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_RANK": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if sys.platform == "linux":
            environ["GLOO_SOCKET_IFNAME"] = "lo"  # avoids a look-up of the host's name
        start = f"import sys; sys.path[0] = {str(ROOT)!r}; from {__name__} import serve; serve()"
        process = subprocess.Popen(
            [sys.executable, "-c", start, str(theirs.fileno()), str(folder), str(os.getpid())],
            env=environ,
            cwd=folder,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        isolation.SESSION_PROCESSES.add(process.pid)
        return Rank(process, ours, folder / f"stacks-{index}.txt")

    def _collect(self, timeout: float) -> dict[int, Reply]:
        deadline = time.monotonic() + timeout
        silent = {rank.connection: index for index, rank in enumerate(self._ranks)}
        replies: dict[int, Reply] = {}
        failed = False
        while silent:
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                index = silent.pop(connection)
                replies[index] = self._ranks[index].receive()
                if replies[index].failure and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                self._report_silence(sorted(silent.values()), replies, timeout)
        return replies

    def _report_silence(self, silent: list[int], replies: dict[int, Reply], timeout: float) -> None:
        """Raise an error that names the silent ranks and shows their stacks."""
        # faulthandler writes the stacks of all threads when the process aborts.
        for index in silent:
            self._ranks[index].kill(signal.SIGABRT)
        for index in silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ranks[index].process.wait(STOP_TIMEOUT)
        stacks = {index: self._ranks[index].python_stacks() for index in silent}
        failures = {index: reply.failure for index, reply in replies.items() if reply.failure}
        if failures:
            for index in silent:
                failures[index] = f"still waiting {GRACE:g} s later:\n{stacks[index]}"
            raise RankError(failures, self.size)
        names = ", ".join(f"rank {index}" for index in silent)
        shown = "\n".join(f"--- rank {index} ---\n{text}" for index, text in stacks.items())
        raise TimeoutError(
            f"{len(silent)} of {self.size} ranks were silent for {timeout:g} s: {names}\n{shown}"
        )


def _pack_by_value(value: object) -> bytes:
    """Pickle `value` and what it uses from test modules, which ranks cannot import, by value."""
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and TEST_MODULE.search(file) and "site-packages" not in file:
            cloudpickle.register_pickle_by_value(module)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = with_files(cloudpickle.Pickler.dispatch_table)  # read when one is made

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _portable(filters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return warning filters, in order of precedence, as arguments of `filterwarnings`."""

    def pattern(expression: Any) -> str:
        return getattr(expression, "pattern", expression) or ""

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in filters
    ]


# The functions below run in the ranks.


def serve() -> None:
    """Run as one rank: form the group, then answer calls until the caller disconnects."""
    descriptor, folder, parent = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    tqdm.tqdm.monitor_interval = 0  # the monitor is a thread that never ends
    connection = Connection(descriptor)
    # Data-loader workers must not keep the connection open when this process has died.
    os.register_at_fork(after_in_child=connection.close)
    with (folder / f"stacks-{os.environ['RANK']}.txt").open("w") as stacks:
        faulthandler.enable(stacks, all_threads=True)
        connection.send_bytes(cloudpickle.dumps(_join(folder)))
        gc.collect()
        modules = 0
        while message := _next(connection):
            if len(sys.modules) > modules:  # collections skip what was imported, which takes long
                gc.freeze()
                modules = len(sys.modules)
            faulthandler.enable(stacks, all_threads=True)  # a call may have turned it off
            reply = cloudpickle.dumps(_answer(message, folder))
            _save_coverage()
            connection.send_bytes(reply)
    isolation.destroy_process_group()


def _save_coverage() -> None:
    """Write what was covered so far, if it is measured: a rank may be killed after any call."""
    if "coverage" in sys.modules:
        current = sys.modules["coverage"].Coverage.current()
        if current is not None:
            current.save()


def _die_with(parent: int) -> None:
    """Make this process end when its parent does, however that happens."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the caller has gone")


def _join(folder: Path) -> Reply:
    try:
        isolation.reset_torch()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    except Exception:  # noqa: BLE001  # the caller raises it
        return Reply(failure=traceback.format_exc())
    return Reply(mark=_mark())


def _next(connection: Connection) -> bytes:
    """Return the next call, or no bytes when the caller closes the pool or is gone."""
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _answer(message: bytes, home: Path) -> Reply:
    """Run one call and restore the state of this process."""
    before = isolation.Snapshot()
    with _collected_crashes() as crashes:
        reply, folder = _run(message)
        # The last references to what the call made are gone: let it clean up after itself.
        isolation.reset_trainer_state()
        gc.collect()
    os.chdir(home)
    isolation.reset_torch()
    isolation.leaked_environment(before)  # a call may set variables: they are reset after it
    leaks = isolation.leaks(before, folder)
    if reply.failure is None and (crashes or leaks):
        lines = [*crashes, *(f"left behind: {leak}" for leak in leaks)]
        reply = Reply(failure="\n".join(lines))
    return replace(reply, mark=() if leaks else _mark())


def _run(message: bytes) -> tuple[Reply, Path | None]:
    folder = None
    try:
        function, args, folder, filters = cloudpickle.loads(message)
        os.chdir(folder)
        isolation.reset_torch()
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for arguments in filters:
                warnings.filterwarnings(*arguments, append=True)
            return Reply(value=cloudpickle.dumps(function(*args))), folder
    except BaseException:  # noqa: BLE001  # an exit or interrupt of the call must not end the rank
        return Reply(failure=traceback.format_exc()), folder


@contextlib.contextmanager
def _collected_crashes() -> Iterator[list[str]]:
    """Collect the errors of threads and destructors, which would otherwise go unnoticed."""
    crashes: list[str] = []

    def in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "unknown"
        crashes.append(f"thread {name!r} crashed:\n{_text(args.exc_value)}")

    def in_destructor(args: sys.UnraisableHookArgs) -> None:
        crashes.append(f"ignored in {args.object!r}:\n{_text(args.exc_value)}")

    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, in_destructor
    try:
        yield crashes
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else "no details"


def _mark() -> tuple[object, ...]:
    """Return a value that is equal on ranks after the same collectives; empty without a group."""
    if not dist.is_initialized():
        return ()
    group = dist.distributed_c10d._get_default_group()
    return (group._get_sequence_number_for_group(), dist.distributed_c10d._world.group_count)
