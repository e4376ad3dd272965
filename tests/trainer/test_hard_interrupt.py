"""A process whose handlers do not run is ended by a second SIGINT all the same."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer.loops import preemption
from trainer.loops.preemption import hard_interrupt, watch_signals

LIMIT = 60  # seconds until a thread that waits in vain gives up
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def deaf():
    """Handlers that do nothing, as of a process that never comes to them."""
    before = {number: signal.signal(number, lambda *_: None) for number in WATCHED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", WATCHED)
def test_second_interrupt_ends_a_blocked_process(monkeypatch, first):
    monkeypatch.setattr(preemption, "_PATIENCE", 0.01)
    ended = threading.Event()
    with hard_interrupt(WATCHED, threading.Event(), ended.set):
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)
        assert ended.wait(LIMIT)


class Never(threading.Event):
    """Also when the watch is over nothing was heard."""

    def set(self) -> None:
        pass


def test_handled_or_first_interrupt_does_not_end_the_process(monkeypatch):
    monkeypatch.setattr(preemption, "_PATIENCE", 0.0)
    ended, heard = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno())
    for numbers in (
        [signal.SIGINT],
        [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1],
    ):
        with hard_interrupt(WATCHED, Never(), ended.set):  # the end waits for the thread
            for number in numbers:
                signal.raise_signal(number)
                assert reader.recv(1) == bytes([number])  # the thread has read it
        assert not ended.is_set()
    heard.set()
    with hard_interrupt(WATCHED, heard, ended.set):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert reader.recv(1) == bytes([signal.SIGINT])
    assert not ended.is_set()
    assert signal.set_wakeup_fd(before) == writer.fileno()
    reader.close()
    writer.close()


def test_previous_wakeup_descriptor_is_served_and_restored():
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            with hard_interrupt(WATCHED, threading.Event(), lambda: None):
                signal.raise_signal(signal.SIGUSR1)
                assert reader.recv(1) == bytes([signal.SIGUSR1])
            signal.raise_signal(signal.SIGTERM)
            assert reader.recv(1) == bytes([signal.SIGTERM])
        finally:
            assert signal.set_wakeup_fd(before) == writer.fileno()


def place_of_wakeup() -> int:
    """The descriptor that signals are written to now."""
    here = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(here)
    return here


def test_forked_process_does_not_reach_the_watching_thread():
    with watch_signals():
        assert place_of_wakeup() != -1
        child = os.fork()
        if child == 0:  # no assertion leaves this block: there would be two test runs
            os._exit(7 if place_of_wakeup() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert place_of_wakeup() != -1
    assert place_of_wakeup() == -1


def test_interactive_session_is_never_ended(monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with watch_signals() as watch:
        assert place_of_wakeup() == -1
        watch.answered = True
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_third_interrupt_uses_the_default_handler():
    with watch_signals() as watch:
        watch.answered = True
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert watch.interrupted.is_set()  # so that nobody else ends the process
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, None)


def test_watching_thread_ends_after_an_error(monkeypatch):
    def fail() -> Any:
        with watch_signals():
            assert "cadence-signals" in {thread.name for thread in threading.enumerate()}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "cadence-signals" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("shell", "expected"), [(None, False), (object(), True)])
def test_a_session_is_interactive_only_if_ipython_has_a_shell(shell, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert preemption.interactive() is expected
