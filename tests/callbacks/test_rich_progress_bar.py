import io
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from callbacks import (
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    progress_board,
    rich_progress_bar,
)
from tests.helpers.line import Line, loader
from tests.helpers.notebook import outputs_of
from tests.helpers.terminal import COLUMNS, Loop
from trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
BAR = "[━╸╺ ]+"


class Clock:
    """Time that does not depend on the machine: a little at each look, and what a test adds."""

    def __init__(self, tick):
        self.now = 100.0
        self.tick = tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.fixture(autouse=True)
def ticking(monkeypatch):
    monkeypatch.setattr(progress_board, "monotonic", Clock(tick=0.001))


@pytest.fixture
def clock(ticking, monkeypatch):
    clock = Clock(tick=0.0)
    monkeypatch.setattr(progress_board, "monotonic", clock)
    return clock


def test_speed_and_time(terminal, clock):
    loop = terminal.loop(kind=RichProgressBar)
    loop.call("on_train_epoch_start")
    for index in range(4):
        clock.now += 2.0
        loop.batches([index])
    assert terminal.screen()[0].endswith("4/10 2.0 s/batch 00:08<00:12")
    for index in range(4, 9):
        clock.now += 10.0
        loop.batches([index])
    # of the last half minute, not of all
    assert terminal.screen()[0].endswith("9/10 10.0 s/batch 00:58<00:10")
    loop.batches([9])
    clock.now += 100.0
    loop.call("on_train_epoch_end")  # drawn where it stands
    assert terminal.screen()[0].endswith("10/10 15.8 s/batch 02:38")


def test_a_narrow_terminal_shows_the_numbers_without_a_bar(terminal, clock):
    loop = terminal.loop(kind=RichProgressBar, columns=40)
    loop.trainer.bar_values = {"loss": 0.5}
    loop.call("on_train_epoch_start")
    for index in range(4):
        clock.now += 1.0
        loop.batches([index])
    assert terminal.screen() == ["epoch 1  4/10 1.0 batch/s 00:04<00:06", "loss=0.5"]
    loop.call("teardown", "fit")


def test_a_validation_takes_no_time_of_the_epoch(terminal, clock):
    loop = terminal.loop(kind=RichProgressBar)
    loop.call("on_train_epoch_start")
    for index in range(4):
        clock.now += 0.5
        loop.batches([index])
    loop.call("on_validation_start")
    clock.now += 50.0
    loop.call("on_validation_batch_end", None, None, 0)
    loop.call("on_validation_end")
    clock.now += 0.5
    loop.batches([4])
    assert terminal.screen()[0].endswith("5/10 2.0 batch/s 00:02<00:02")
    loop.call("teardown", "fit")


def test_metrics_without_room_go_below(terminal):
    loop = terminal.loop(kind=RichProgressBar)
    loop.trainer.bar_values = {f"metric_{i}[red]": float(i) for i in range(12)}
    loop.call("on_train_epoch_start")
    loop.batches(range(10))
    lines = terminal.screen()
    assert len(lines) == 4
    assert max(map(len, lines)) <= COLUMNS
    shown = ", ".join(f"metric_{i}[red]={i}" for i in range(12))
    assert " ".join(lines[1:]) == shown
    loop.call("on_train_epoch_end")
    assert " ".join(terminal.screen()[1:]).rstrip() == shown


def test_what_is_printed_and_logged_appears_above(terminal):
    loop = terminal.loop(kind=RichProgressBar, stdout=True)
    logger = logging.getLogger("somebody.else")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    loop.call("on_train_epoch_start")
    loop.batches(range(2))
    print("one [bold]line[/nothing] :smile: 12")
    sys.stderr.write("error\n")
    logger.warning("logged")
    print("[i]unfinished[/]", end="")
    loop.batches(range(2, 10))
    loop.call("on_train_epoch_end")
    logger.removeHandler(handler)
    print("after")
    *above, bar, last, _ = terminal.screen()
    assert above == [
        "one [bold]line[/nothing] :smile: 12",
        "error",
        "logged",
        "[i]unfinished[/]",
    ]
    assert re.search("^epoch 1 .* 10/10 ", bar)
    assert last == "after"
    assert handler.stream is sys.stderr is sys.stdout is terminal.stderr


def test_standard_output_in_a_file_is_left_alone(terminal, tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as out:
        loop = terminal.loop(kind=RichProgressBar)
        monkeypatch.setattr(sys, "stdout", out)
        loop.call("on_train_epoch_start")
        print("result")
        loop.call("teardown", "fit")
    assert (tmp_path / "out").read_text() == "result\n"
    assert "result" not in terminal.screen()


@pytest.mark.parametrize(
    "ending",
    [
        ("on_exception", RuntimeError("lost the device")),
        ("on_exception", KeyboardInterrupt()),
        ("teardown", "fit"),
    ],
)
def test_an_error_leaves_the_terminal_sound(terminal, ending):
    loop = terminal.loop(kind=RichProgressBar, stdout=True)
    before = threading.enumerate()
    loop.call("on_train_epoch_start")
    loop.batches(range(4))
    loop.evaluate("validation", [3])
    assert threading.enumerate() == before
    read = loop.trainer.bar_values_read
    loop.call(*ending)
    assert loop.trainer.bar_values_read == read
    assert sys.stdout is sys.stderr is terminal.stderr
    print("Traceback")
    epoch, *rest = [line for line in terminal.screen() if line]
    assert re.search("^epoch 1 .* 4/10 ", epoch)
    assert rest == ["Traceback"]
    loop.call("teardown", "fit")
    assert terminal.read() == ""


def test_a_terminal_that_is_closed_ends_the_bar_and_nothing_else(terminal, caplog):
    loop = terminal.loop(kind=RichProgressBar, stdout=True)
    loop.call("on_train_epoch_start")
    loop.batches(range(4))
    loop.evaluate("validation", [3])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), terminal.master)
    loop.fit(epochs=2)
    assert "progress bar has stopped: OSError(5, 'Input/output error')" in caplog.text
    assert len(caplog.records) == 1
    assert sys.stdout is sys.stderr is terminal.stderr
    with pytest.raises(OSError, match="Input/output error"):
        terminal.stderr.close()
    terminal.stderr = io.StringIO()


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A function that makes a loop whose standard error is a file, and one that reads it."""
    path = tmp_path / "log"
    with path.open("w") as file:

        def loop(kind=RichProgressBar, **arguments):
            monkeypatch.setattr(sys, "stderr", file)  # here: pytest sets its own before the call
            return Loop(kind=kind, **arguments)

        yield loop, lambda: path.read_text().splitlines()


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
def test_plain_lines_where_there_is_no_terminal(log, monkeypatch, kind):
    monkeypatch.setenv("FORCE_COLOR", "1")
    loop, lines = log
    loop(kind, max_epochs=2).fit(epochs=2)
    assert [re.sub(r"[\d.]+ batch", "N batch", line) for line in lines()] == [
        "epoch 1/2: 10/10, N batch/s, 00:00, loss=0.3333",
        "epoch 2/2: 10/10, N batch/s, 00:00, loss=0.25",
    ]


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
@pytest.mark.parametrize("sanity_checking", [False, True])
def test_a_long_validation_has_a_line_a_minute(log, clock, kind, sanity_checking):
    loop, lines = log
    loop = loop(kind, sanity_checking=sanity_checking)
    if not sanity_checking:
        loop.call("on_train_epoch_start")
        clock.now += 70.0
        loop.batches(range(10))
    loop.trainer.num_eval_batches = [180]
    loop.call("on_validation_start")
    for index in range(180):
        clock.now += 1.0
        loop.call("on_validation_batch_end", None, None, index)
    loop.call("on_validation_end")
    name = "sanity check" if sanity_checking else "validate"
    expected = [
        f"{name}: 60/180, 1.0 batch/s, 01:00<02:00",
        f"{name}: 120/180, 1.0 batch/s, 02:00<01:00",
        f"{name}: 180/180, 1.0 batch/s, 03:00",
    ]
    if not sanity_checking:
        loop.call("on_train_epoch_end")
        expected.insert(0, "epoch 1: 1/10, 70.0 s/batch, 01:10<10:30")
        expected.append("epoch 1: 10/10, 7.0 s/batch, 01:10")
    assert lines() == expected


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
def test_a_line_a_minute_and_where_it_stopped(log, clock, kind):
    loop, lines = log
    loop = loop(kind, sanity_checking=True)
    loop.evaluate("validation", [2])
    loop.call("on_validation_end")
    loop.trainer.sanity_checking = False
    loop.call("on_train_epoch_start")
    for index in range(5):
        clock.now += 25.0
        loop.batches([index])
    loop.call("on_exception", KeyboardInterrupt())
    loop.call("teardown", "fit")
    assert lines() == [
        "epoch 1: 3/10, 25.0 s/batch, 01:15<02:55",
        "epoch 1: 5/10, 25.0 s/batch, 02:05<02:05",
    ]


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal.loop(kind=RichProgressBar).fit(epochs=1)
    assert re.fullmatch(r"epoch 1: 10/10, \S+ batch/s, 00:00, loss=0\.3333\r\n", terminal.read())


class Logging(Line):
    stops = False

    def training_step(self, batch, batch_idx):
        if self.stops and batch_idx == 5:
            raise KeyError("stop")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).mean(), prog_bar=True)


def make(*callbacks, **options):
    defaults = {"cpu": True, "max_epochs": 2, "project_dir": "run", "checkpointing": False}
    return Trainer(callbacks=list(callbacks), **(defaults | options))


def test_a_whole_run(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    data, module = loader(12), Logging()
    save = ModelCheckpoint(every="1 steps", save_last=9, background=False)
    module.stops = True
    with pytest.raises(KeyError):
        make(RichProgressBar(), save).fit(module, data, data)
    trainer = make(RichProgressBar(), save)
    trainer.fit(Logging(), data, data, ckpt_path="auto")
    trainer.predict(Logging(), data)
    messages = [re.sub(rf" {BAR} ", " ", line) for line in terminal.screen() if line]
    begin = r"Training Logging \(3 parameters\) on cpu, fp32, files in run"
    end = [
        "Finished 2 epochs, 12 updates, ",
        "  last  run/checkpoints/step-00000012$",
        "  next  ",
        " *trainer report run ",
    ]
    patterns = [
        *(begin, "epoch 1/2 5/6 "),
        *(begin, "epoch 1/2 6/6 .*val=", "epoch 2/2 6/6 .*val=", *end),
        "predict 6/6 ",
    ]
    assert len(messages) == len(patterns)
    for pattern, line in zip(patterns, messages, strict=True):
        assert re.match(pattern, line)


def test_a_log_file_has_the_metrics_of_each_epoch(log):
    loop, lines = log
    loop()  # standard error is the file from here on
    make().fit(Logging(), loader(12), loader(12))
    _, first, second, _ = lines()
    assert re.fullmatch(r"epoch 1/2: 6/6, .*, loss=\S+, val=\S+", first)
    assert re.fullmatch(r"epoch 2/2: 6/6, .*, loss=\S+, val=\S+", second)


def test_a_given_bar_replaces_the_default():
    for bar in (RichProgressBar(), ProgressBar(1.0)):
        bars = [one for one in make(bar).callbacks if isinstance(one, ProgressBar)]
        assert bars == [bar]
    assert [type(one) for one in make().callbacks] == [ProgressBar]


def test_without_rich_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(rich_progress_bar, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"cadence-trainer\[rich\]"):
        RichProgressBar()


def test_rich_is_not_imported_before_it_is_used():
    script = "import sys, callbacks; callbacks.RichProgressBar(); assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


CELL = """
from tests.helpers.terminal import Loop
from callbacks import RichProgressBar
loop = Loop(kind=RichProgressBar, sanity_checking=True)
loop.evaluate("validation", [2])
loop.call("on_validation_end")
loop.trainer.sanity_checking = False
loop.fit(epochs=1)
"""


def test_a_notebook():
    pytest.importorskip("nbclient")
    sanity, epoch = outputs_of(CELL)
    assert sanity["output_type"] == epoch["output_type"] == "display_data"  # nothing was printed
    sanity, epoch = sanity["data"], epoch["data"]
    assert sanity == {"text/plain": "", "text/html": ""}
    assert re.fullmatch(rf"epoch 1 {BAR} 10/10 \S+ \S+ [\d:]+ loss=0\.3333\s*", epoch["text/plain"])
    assert epoch["text/html"].startswith("<pre")
