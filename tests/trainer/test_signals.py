"""Signals are noted while a run is watched; before and after they do what they did."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest

from tests.helpers.notebook import outputs_of
from trainer.loops.preemption import exit_code, watch_signals

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def heard():
    """What the test's own handlers heard of; theirs are the handlers before the watch."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: seen.append(number)) for number in WATCHED
    }
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", WATCHED)
def test_signal_is_recorded_and_previous_handler_called(heard, number, capfd):
    with watch_signals() as watch:
        assert watch.received is None
        signal.raise_signal(number)
        assert watch.received == number
        watch.answered = True
    assert heard == [number]
    assert f"{signal.Signals(number).name}: stopping after this update" in capfd.readouterr().err
    assert exit_code(number) == 128 + number


def test_broken_stderr_does_not_prevent_the_save(heard):
    reader, writer = os.pipe()
    os.close(reader)  # as `tee` ends by the same Ctrl-C
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        with watch_signals() as watch:
            signal.raise_signal(signal.SIGINT)
            watch.answered = True
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    assert watch.received == signal.SIGINT


def test_handlers_are_restored_after_an_error(heard):
    before = [signal.getsignal(number) for number in WATCHED]

    def fail() -> None:
        with watch_signals():
            assert [signal.getsignal(number) for number in WATCHED] != before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [signal.getsignal(number) for number in WATCHED] == before


def test_first_signal_is_recorded_and_announced(heard, capfd):
    with watch_signals() as watch:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        watch.answered = True
    assert watch.received == signal.SIGUSR1
    assert heard == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    assert capfd.readouterr().err == "\nSIGUSR1: stopping after this update.\n"


def test_one_process_of_a_machine_announces_a_signal_that_reaches_all(heard, capfd):
    with watch_signals(announces=False) as watch:
        signal.raise_signal(signal.SIGTERM)
        watch.answered = True
    assert watch.received == signal.SIGTERM
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_after_another_signal_raises_at_once(heard, first):
    with watch_signals() as watch:
        watch.answered = True
        signal.raise_signal(first)
        assert watch.received == first
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_unhandled_signal_is_raised_again_on_exit(heard):
    with watch_signals():
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    assert heard == [signal.SIGTERM] * 2


def test_default_interrupt_handler_is_not_called():
    with watch_signals() as watch:
        watch.answered = True
        signal.raise_signal(signal.SIGINT)
        assert watch.received == signal.SIGINT  # and no exception


def test_an_ignored_signal_stays_ignored(heard):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what runs in the background
    with watch_signals() as watch:
        signal.raise_signal(signal.SIGINT)
        assert watch.received is None


def test_other_threads_install_no_handlers(heard):
    found = []

    def run() -> None:
        with watch_signals() as watch:
            signal.raise_signal(signal.SIGUSR1)
            found.append(watch.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]
    assert heard == [signal.SIGUSR1]


def test_forked_process_has_the_previous_handlers(heard):
    with watch_signals() as watch:
        child = os.fork()
        if child == 0:  # no assertion leaves this block: there would be two test runs
            signal.raise_signal(signal.SIGTERM)
            os._exit(7 if heard == [signal.SIGTERM] and watch.received is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        signal.raise_signal(signal.SIGTERM)
        assert watch.received == signal.SIGTERM
        watch.answered = True


CELL = """
import os, signal, tempfile
from tests.helpers.line import Line, loader
from trainer import Trainer
class Interrupted(Line):
    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)
folder = tempfile.TemporaryDirectory()
Trainer(max_epochs=1, cpu=True, progress_bar=False, project_dir=folder.name).fit(
    Interrupted(), loader(), loader()
)
"""


def test_an_interrupted_cell_shows_how_the_run_ended_and_no_advice():
    pytest.importorskip("nbclient")
    *said, error = outputs_of(CELL)
    assert (error["output_type"], error["ename"]) == ("error", "Preempted")
    assert error["evalue"] == "the run was ended by SIGINT (exit code 130)"
    text = "".join(output["text"] for output in said)
    assert "interrupt again to stop at once" in text
    assert re.search("ckpt_path='auto' with project_dir='.+' resumes from there", text)
    assert "Warning" not in text
