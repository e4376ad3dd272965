"""A terminal for progress bars, its screen, and the hooks called in the order of the loop."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

from callbacks import ProgressBar
from tests.helpers.stand_in import TrainerStandIn

COLUMNS = 100
TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\r\n]|[^\r\n\x1b]+")


def screen(written):
    """Return the screen of a terminal after ``written``; colours are ignored, other codes fail."""
    rows, row, column = [""], 0, 0
    for token in TOKENS.finditer(written):
        number, code = token[1], token[2]
        if code == "A":
            row -= int(number or 1)
        elif code == "K":
            assert number == "2"
            rows[row] = ""
        elif code:
            assert code in "mhl", token[0]
        elif token[0] == "\r":
            column = 0
        elif token[0] == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        else:
            line = rows[row].ljust(column)
            rows[row] = line[:column] + token[0] + line[column + len(token[0]) :]
            column += len(token[0])
    return [line.rstrip() for line in rows]


class Terminal:
    """A pseudo-terminal that replaces standard error, and standard output if requested."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.master, slave = pty.openpty()
        size = struct.pack("HHHH", 24, COLUMNS, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        os.set_blocking(self.master, False)
        self.stderr = os.fdopen(slave, "w")
        self.written = ""

    def loop(self, *, stdout=False, columns=COLUMNS, **arguments):
        # not in the fixture: pytest sets its own standard error after fixtures have run
        self.monkeypatch.setattr(sys, "stderr", self.stderr)
        self.monkeypatch.setenv("COLUMNS", str(columns))  # rich would ask pytest's own streams
        if stdout:
            self.monkeypatch.setattr(sys, "stdout", self.stderr)
        return Loop(**arguments)

    def read(self):
        """Return what was written since the last call."""
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

    def close(self):
        self.stderr.close()
        os.close(self.master)


class Loop:
    """Call the hooks of a progress bar in the order of the loop."""

    def __init__(self, *, kind=ProgressBar, stage="fit", refresh_rate=1e9, **trainer):
        self.trainer = TrainerStandIn(**trainer)
        self.bar = kind(refresh_rate=refresh_rate)
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


def without_gloo(output: str) -> str:
    """Return what processes printed without the line of gloo, which has one up to torch 2.11."""
    return "".join(line for line in output.splitlines(True) if not line.startswith("[Gloo]"))


def run_in_terminal(command, columns=COLUMNS):
    """Run a shell command in a terminal, and return the lines of its screen.

    Raises:
        AssertionError: The command failed.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm"},
    ) as process:
        os.close(slave)
        written = b""
        # Linux raises EIO when the command has ended.
        with os.fdopen(master, "rb", buffering=0) as terminal, suppress(OSError):
            while part := terminal.read(65536):
                written += part
    shown = screen(written.decode().replace("\r\n", "\n\r"))
    assert process.returncode == 0, "\n".join(shown)
    return shown
