import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest
from tqdm import tqdm

from callbacks import ProgressBar
from tests.helpers.stand_in import AcceleratorStandIn, TrainerStandIn

COLUMNS = 100


def screen(written):
    """What a terminal shows after ``written``: carriage returns and cursor-up are obeyed."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", written):
        if token == "\x1b[A":
            row -= 1
        elif token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        else:
            line = rows[row].ljust(column)
            rows[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in rows]


class Terminal:
    """A pseudo-terminal in the place of standard error."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.master, slave = pty.openpty()
        size = struct.pack("HHHH", 24, COLUMNS, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        os.set_blocking(self.master, False)
        self.stderr = os.fdopen(slave, "w")
        self.written = ""

    def loop(self, **arguments):
        # here and not in the fixture: pytest sets its own standard error between the two
        self.monkeypatch.setattr(sys, "stderr", self.stderr)
        return Loop(**arguments)

    def read(self):
        """What was written since the last call."""
        self.stderr.flush()
        new = b""
        try:
            while chunk := os.read(self.master, 65536):
                new += chunk
        except BlockingIOError:
            pass
        self.written += new.decode()
        return new.decode()

    def screen(self):
        self.read()
        return screen(self.written)


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.stderr.close()
    os.close(terminal.master)


class Loop:
    """The hooks of the bar in the order of the loop."""

    def __init__(self, *, stage="fit", refresh_rate=1e9, **trainer):
        self.trainer = TrainerStandIn(**trainer)
        self.bar = ProgressBar(refresh_rate=refresh_rate)
        self.bar.setup(self.trainer, self.trainer.module, stage)

    def call(self, hook, *arguments):
        getattr(self.bar, hook)(self.trainer, self.trainer.module, *arguments)

    def batches(self, indices):
        for index in indices:
            self.call("on_train_batch_end", None, None, index)

    def evaluate(self, kind, sizes):
        self.trainer.num_eval_batches = sizes
        self.call(f"on_{kind}_start")
        for loader, size in enumerate(sizes):
            for index in range(size or 3):
                self.call(f"on_{kind}_batch_end", None, None, index, loader)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.trainer.global_step = epoch * 10 + 1
            self.call("on_train_epoch_start")
            self.batches(range(10))
            self.trainer.bar_values = {"loss": 1 / (epoch + 3)}
            self.evaluate("validation", [2, 2])
            self.call("on_validation_end")
            self.call("on_train_epoch_end")
        self.call("on_train_end")
        self.call("teardown", "fit")


def test_finished_epochs_stay_and_validations_go(terminal):
    terminal.loop(max_epochs=2).fit(epochs=2)
    first, second, *rest = terminal.screen()
    assert re.fullmatch(r"epoch 1/2: 100%\|█+\| 10/10 \[.*batch/s, loss=0\.3333\]", first)
    assert re.fullmatch(r"epoch 2/2: 100%\|█+\| 10/10 \[.*batch/s, loss=0\.25\]", second)
    assert rest == [""]
    assert max(len(first), len(second)) <= COLUMNS
    assert "validate: 100%" in terminal.written


def test_a_validation_is_shown_below_the_epoch(terminal):
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    loop.trainer.bar_values = {"loss": 0.5}
    loop.batches(range(4))
    loop.evaluate("validation", [3, 5])
    above, below = terminal.screen()
    assert above.startswith("epoch 1:  40%")
    assert above.endswith("loss=0.5]")
    assert below.startswith("validate: 100%")
    assert " 8/8 " in below
    assert "loss" not in below
    loop.call("on_validation_end")
    above, below = terminal.screen()
    assert above.startswith("epoch 1:  40%")
    assert below == ""
    loop.call("teardown", "fit")


def test_an_error_ends_the_line_and_asks_for_no_metrics(terminal):
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    loop.batches(range(4))
    loop.evaluate("validation", [3])
    read = loop.trainer.bar_values_read
    loop.call("on_exception", RuntimeError("lost the device"))
    assert loop.trainer.bar_values_read == read
    epoch, *rest = terminal.screen()
    assert epoch.startswith("epoch 1:  40%")
    assert set(rest) == {""}
    terminal.read()
    loop.call("teardown", "fit")
    assert terminal.read() == ""


@pytest.mark.parametrize("ending", [("on_train_end",), ("on_exception", KeyboardInterrupt())])
def test_an_interrupted_epoch_shows_where_it_stopped(terminal, ending):
    loop = terminal.loop(refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(7))
    loop.call(*ending)
    assert terminal.screen()[0].startswith("epoch 1:  70%")


def test_an_epoch_of_unknown_length(terminal):
    loop = terminal.loop(num_training_batches=None)
    loop.call("on_train_epoch_start")
    loop.batches(range(6))
    loop.evaluate("validation", [2, None])
    above, below = terminal.screen()
    assert above.startswith("epoch 1: 6batch [")
    assert below.startswith("validate: 5batch [")
    loop.call("on_validation_end")
    loop.call("on_train_epoch_end")
    assert terminal.screen()[0].startswith("epoch 1: 6batch [")


def test_a_resumed_epoch_goes_on_where_it_was(terminal):
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    loop.batches(range(6, 8))
    assert terminal.screen()[0].startswith("epoch 1:  80%")
    (bar,) = tqdm._instances
    assert bar.format_dict["initial"] == 6  # the speed is that of the other two
    loop.call("teardown", "fit")


@pytest.mark.parametrize(
    ("kind", "sanity_checking", "name", "stays"),
    [
        ("validation", True, "sanity check", False),
        ("validation", False, "validate", True),
        ("test", False, "test", True),
        ("predict", False, "predict", True),
    ],
)
def test_evaluations_by_themselves(terminal, kind, sanity_checking, name, stays):
    loop = terminal.loop(stage=kind, sanity_checking=sanity_checking)
    loop.trainer.bar_values = {"accuracy": 0.5}
    loop.evaluate(kind, [2, 4])
    assert terminal.screen()[0].startswith(f"{name}: 100%")
    loop.call(f"on_{kind}_end")
    last = terminal.screen()[0]
    assert last.startswith(f"{name}: 100%") is stays
    assert ("accuracy=0.5" in last) is stays
    assert terminal.screen()[1:] == ([""] if stays else [])


def test_metrics_are_read_only_when_the_bar_is_redrawn(terminal):
    loop = terminal.loop(refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(10))
    assert loop.trainer.bar_values_read == 1
    loop.call("on_train_epoch_end")
    assert loop.trainer.bar_values_read == 2
    assert terminal.screen()[0].startswith("epoch 1: 100%")


def test_no_bar_and_no_thread_is_left(terminal, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # tqdm's own default: start a thread
    monkeypatch.setattr(tqdm, "monitor", None)  # if there is none yet
    before = threading.active_count()
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    assert threading.active_count() == before
    loop.call("teardown", "fit")
    assert not tqdm._instances


@pytest.mark.parametrize(
    "arguments",
    [{"refresh_rate": 0}, {"accelerator": AcceleratorStandIn(is_main_process=False)}],
)
def test_quiet_where_asked_and_on_other_processes(terminal, arguments):
    loop = terminal.loop(**arguments)
    loop.fit(epochs=1)
    assert terminal.read() == ""
    assert loop.trainer.bar_values_read == 0


def test_quiet_where_there_is_no_terminal(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        Loop().fit(epochs=1)
    assert (tmp_path / "log").read_text() == ""


def test_wrong_rate_is_refused():
    with pytest.raises(ValueError, match="-1"):
        ProgressBar(refresh_rate=-1)
