"""The lock of a folder: who is refused, whom it outlives, and where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from trainer.checkpoint import lock
from trainer.checkpoint.lock import LOCK, alone_in, holder_of

ROOT = Path(__file__).resolve().parents[3]
RUN = Path("runs/digits")
ME = rf"process {os.getpid()} on {socket.gethostname()} \(since \d{{4}}-"


def test_a_second_run_in_the_folder_raises():
    with alone_in(RUN) as tell:
        with pytest.raises(ValueError, match=rf"runs/digits is in use by {ME}.* another project_d"):
            alone_in(RUN).__enter__()
        tell("abc")
        with pytest.raises(ValueError, match=rf"{ME}.*, run abc\)"), alone_in(RUN):
            pass
        assert holder_of(RUN)
        with alone_in(Path("runs/other")):
            pass
    with alone_in(RUN):
        pass


def test_the_lock_file_is_removed():
    Path("runs").mkdir()
    with alone_in(RUN / "deep"):
        assert [path.name for path in (RUN / "deep").iterdir()] == [LOCK]
    assert list(Path("runs").iterdir()) == []
    with alone_in(RUN):
        (RUN / "metrics.jsonl").touch()
    assert [path.name for path in RUN.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ArithmeticError), alone_in(RUN):
        raise ArithmeticError
    assert [path.name for path in RUN.iterdir()] == ["metrics.jsonl"]


def test_holder_of_changes_nothing():
    assert holder_of(RUN) is None
    assert not RUN.exists()
    with alone_in(RUN):
        assert str(os.getpid()) in (holder_of(RUN) or "")
    RUN.mkdir(parents=True)
    (RUN / LOCK).write_text("left by one that was killed")
    assert holder_of(RUN) is None
    with alone_in(RUN):
        assert json.loads((RUN / LOCK).read_text())["pid"] == os.getpid()
        (RUN / LOCK).write_text("")  # as while it is being written
        assert holder_of(RUN) == "another process"


def test_holder_of_does_not_block_a_run(monkeypatch):
    RUN.mkdir(parents=True)
    (RUN / LOCK).touch()
    with ExitStack() as looking:
        file = looking.enter_context((RUN / LOCK).open())
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: looking.close())  # has looked
        with alone_in(RUN):
            assert holder_of(RUN)


def test_a_lock_file_removed_before_it_was_locked(monkeypatch):
    real, calls = fcntl.flock, []

    def flock(descriptor, operation):  # the run before ends between the opening and the locking
        calls.append(operation)
        if len(calls) == 1:
            (RUN / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with alone_in(RUN):
        assert holder_of(RUN)
        with pytest.raises(ValueError, match="in use"), alone_in(RUN):
            pass


def test_a_lock_file_deleted_by_hand():
    with ExitStack() as second:
        with alone_in(RUN):
            (RUN / LOCK).unlink()
            second.enter_context(alone_in(RUN))
        with pytest.raises(ValueError, match="in use"), alone_in(RUN):
            pass
    assert not (RUN / LOCK).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_warns(monkeypatch, caplog, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with alone_in(RUN) as tell:
            tell("abc")
            assert holder_of(RUN) is None
    assert f"{RUN} cannot be locked against other runs: " in caplog.text
    assert os.strerror(number) in caplog.text


def test_a_file_in_place_of_the_folder_is_ignored(caplog):
    Path("runs").write_text("a file")
    for folder in (RUN, Path("runs")):
        with alone_in(folder):
            pass
    assert caplog.text == ""
    assert Path("runs").read_text() == "a file"


def test_a_forked_child_does_not_hold_the_lock():
    with alone_in(RUN):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(not holder_of(RUN))  # the parent still does
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert holder_of(RUN)


SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from trainer import Trainer, TrainModule

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 9:
            print(os.getpid(), flush=True)
            signal.pause()
        return torch.ones(2)

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.line(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(Data(), 2, num_workers=2, multiprocessing_context="fork")
Trainer(max_epochs=1, cpu=True, project_dir=sys.argv[1], progress_bar=False).fit(Line(), loader)
"""


def test_kill_9_frees_the_folder_while_a_worker_lives_on():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(RUN)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    worker = None
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert worker != process.pid
        with pytest.raises(ValueError, match=f"in use by process {process.pid} on .*, run "):
            alone_in(RUN).__enter__()
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is there
        with alone_in(RUN):
            assert holder_of(RUN)
        os.kill(worker, 0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if worker is not None:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_in_place_of_the_lock(tmp_path, caplog, kind):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    plant = partial(os.symlink, victim) if kind == "link" else os.mkfifo
    plant(tmp_path / ".cadence-lock")
    with alone_in(tmp_path) as tell:
        tell("run")
        assert holder_of(tmp_path) is None
    assert "cannot be locked against other runs" in caplog.text
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("folder", ["kept", "kept/inner/run"])
def test_a_folder_that_may_not_be_written_is_refused(tmp_path, folder):
    Path("kept").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    text = f"^{folder} cannot be created or written to: Permission denied. Give a project_dir"
    with without_root(), pytest.raises(ValueError, match=text):
        alone_in(Path(folder)).__enter__()
    assert list(Path("kept").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_folder_that_the_file_system_refuses_is_not_said_to_lack_permissions():
    with pytest.raises(ValueError, match="created or written to: No such file or dir") as info:
        alone_in(Path("/proc/run")).__enter__()
    assert "permissions" not in str(info.value)


@contextmanager
def without_root() -> Iterator[None]:
    """Be another user if this is root, who may write to any folder."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)  # the last lets it be undone
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
