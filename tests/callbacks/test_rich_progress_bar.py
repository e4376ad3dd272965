import io
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import (
    Callback,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    progress_board,
    rich_progress_bar,
)
from tests.helpers.notebook import outputs_of
from tests.helpers.stand_in import AcceleratorStandIn
from tests.helpers.terminal import COLUMNS, Loop
from trainer import Trainer, TrainModule

ROOT = Path(__file__).resolve().parents[2]
BAR = "[━╸╺ ]+"


def rich_loop(terminal, *, columns=COLUMNS, **arguments):
    # rich asks the process's own streams, which are pytest's
    terminal.monkeypatch.setenv("COLUMNS", str(columns))
    return terminal.loop(kind=RichProgressBar, **arguments)


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


def test_finished_epochs_stay_and_validations_go(terminal):
    rich_loop(terminal, max_epochs=2).fit(epochs=2)
    first, second, *rest = terminal.screen()
    assert re.fullmatch(rf"epoch 1/2 {BAR} 10/10 \S+ batch/s 00:00 loss=0\.3333", first)
    assert re.fullmatch(rf"epoch 2/2 {BAR} 10/10 \S+ batch/s 00:00 loss=0\.25", second)
    assert rest == [""]
    assert re.search("validate.*4/4", terminal.written)


def test_a_validation_is_shown_below_the_epoch(terminal):
    loop = rich_loop(terminal)
    loop.call("on_train_epoch_start")
    loop.trainer.bar_values = {"loss": 0.5}
    loop.batches(range(4))
    loop.evaluate("validation", [3, 5])
    above, below = terminal.screen()
    assert re.search(r"^epoch 1 .* 4/10 .*loss=0\.5$", above)
    assert re.search(r"^validate .* 8/8 ", below)
    assert "loss" not in below
    loop.call("on_validation_end")
    above, *rest = terminal.screen()
    assert re.search(r"^epoch 1 .* 4/10 ", above)
    assert set(rest) <= {""}
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
    loop = rich_loop(terminal, stage=kind, sanity_checking=sanity_checking)
    loop.trainer.bar_values = {"accuracy": 0.5}
    loop.evaluate(kind, [2, 4])
    assert re.search(rf"^{name} .* 6/6 ", terminal.screen()[0])
    loop.call(f"on_{kind}_end")
    last, *rest = terminal.screen()
    assert bool(re.search(rf"^{name} .* 6/6 .*accuracy=0\.5$", last)) is stays
    assert set(rest) <= {""}
    assert stays or last == ""


def test_lengths_that_nobody_knows(terminal):
    loop = rich_loop(terminal, num_training_batches=None)
    loop.call("on_train_epoch_start")
    loop.batches(range(6))
    loop.evaluate("validation", [2, None])
    above, below = terminal.screen()
    assert re.search(rf"^epoch 1 +{BAR} 6 \S+ batch/s 00:00$", above)
    assert re.search(rf"^validate {BAR} 5 \S+ batch/s 00:00$", below)
    loop.call("teardown", "fit")


def test_speed_and_time(terminal, clock):
    loop = rich_loop(terminal)
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


@pytest.mark.parametrize("columns", [40, 46])
def test_a_narrow_terminal_shows_the_numbers_without_a_bar(terminal, clock, columns):
    loop = rich_loop(terminal, columns=columns)
    loop.trainer.bar_values = {"loss": 0.5}
    loop.call("on_train_epoch_start")
    for index in range(4):
        clock.now += 1.0
        loop.batches([index])
    assert terminal.screen() == ["epoch 1  4/10 1.0 batch/s 00:04<00:06", "loss=0.5"]
    loop.call("teardown", "fit")


def test_a_validation_takes_no_time_of_the_epoch(terminal, clock):
    loop = rich_loop(terminal)
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


def test_a_resumed_epoch_goes_on_where_it_was(terminal, clock):
    loop = rich_loop(terminal)
    loop.call("on_train_epoch_start")
    for index in (6, 7):
        clock.now += 1.0
        loop.batches([index])
    assert terminal.screen()[0].endswith("8/10 1.0 batch/s 00:02<00:02")
    loop.call("on_train_end")
    assert terminal.screen()[0].endswith("8/10 1.0 batch/s 00:02<00:02")


def test_metrics_without_room_go_below(terminal):
    loop = rich_loop(terminal)
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
    loop = rich_loop(terminal, stdout=True)
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
        loop = rich_loop(terminal)
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
    loop = rich_loop(terminal, stdout=True)
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


@pytest.mark.parametrize("batches", [0, 4])
def test_a_terminal_that_is_closed_ends_the_bar_and_nothing_else(terminal, caplog, batches):
    loop = rich_loop(terminal, stdout=True)
    loop.call("on_train_epoch_start")
    loop.batches(range(batches))
    if not batches:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), terminal.master)
        loop.call("on_validation_start")
    else:
        loop.evaluate("validation", [3])
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), terminal.master)
    loop.fit(epochs=2)
    assert "cannot be shown any more: OSError(5, 'Input/output error')" in caplog.text
    assert len(caplog.records) == 1
    assert sys.stdout is sys.stderr is terminal.stderr
    with pytest.raises(OSError, match="Input/output error"):
        terminal.stderr.close()
    terminal.stderr = io.StringIO()


def test_the_cursor_is_visible_all_the_time(terminal):
    loop = rich_loop(terminal)
    loop.call("on_train_epoch_start")
    written = terminal.read()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")
    loop.batches(range(4))
    assert "\x1b[?25l" not in terminal.read()  # and at a kill it still is
    loop.call("teardown", "fit")


def test_metrics_are_read_only_when_the_bar_is_redrawn(terminal):
    loop = rich_loop(terminal, refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(10))
    assert loop.trainer.bar_values_read == 1
    loop.call("on_train_epoch_end")
    assert loop.trainer.bar_values_read == 2
    assert "10/10" in terminal.screen()[0]


@pytest.mark.parametrize(
    "arguments",
    [{"refresh_rate": 0}, {"accelerator": AcceleratorStandIn(is_main_process=False)}],
)
def test_quiet_where_asked_and_on_other_processes(terminal, arguments):
    loop = rich_loop(terminal, **arguments)
    loop.fit(epochs=1)
    assert terminal.read() == ""
    assert loop.trainer.bar_values_read == 0


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
    rich_loop(terminal).fit(epochs=1)
    assert re.fullmatch(r"epoch 1: 10/10, \S+ batch/s, 00:00, loss=0\.3333\r\n", terminal.read())


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 4:
            raise KeyError("stop")


def make(*callbacks, **options):
    defaults = {"cpu": True, "max_epochs": 2, "project_dir": "run", "checkpointing": False}
    return Trainer(callbacks=list(callbacks), **(defaults | options))


def test_a_whole_run(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    data = DataLoader(TensorDataset(torch.ones(12, 3)), 2)
    save = ModelCheckpoint(every="1 steps", save_last=9, background=False)
    with pytest.raises(KeyError):
        make(RichProgressBar(), save, Stop()).fit(Line(), data, data)
    trainer = make(RichProgressBar(), save)
    trainer.fit(Line(), data, data, ckpt_path="auto")
    trainer.predict(Line(), data)
    messages = [re.sub(rf" {BAR} ", " ", line) for line in terminal.screen() if line]
    patterns = ["epoch 1/2 5/6 ", "epoch 1/2 6/6 .*val=", "epoch 2/2 6/6 .*val=", "predict 6/6 "]
    assert len(messages) == len(patterns)
    for pattern, line in zip(patterns, messages, strict=True):
        assert re.match(pattern, line)


def test_a_log_file_has_the_metrics_of_each_epoch(log):
    loop, lines = log
    loop()  # standard error is the file from here on
    data = DataLoader(TensorDataset(torch.zeros(12, 3)), 2)
    make().fit(Line(), data, data)
    first, second = lines()
    assert re.fullmatch(r"epoch 1/2: 6/6, .*, loss=\S+, val=\S+", first)
    assert re.fullmatch(r"epoch 2/2: 6/6, .*, loss=\S+, val=\S+", second)


@pytest.mark.parametrize("wrong", ["closed", "encoding"])
def test_a_log_that_cannot_be_written_ends_the_lines_and_nothing_else(
    wrong, tmp_path, monkeypatch, caplog
):
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        loop = Loop(kind=ProgressBar)
        monkeypatch.setattr(sys, "stderr", file)
        loop.call("setup", "fit")
        if wrong == "encoding":
            loop.trainer.progress_values = lambda wait: {"\u0394": 1.0}
        loop.call("on_train_epoch_start")
        loop.batches([0])
        if wrong == "closed":
            file.close()
        loop.call("on_train_epoch_end")
    assert "The progress bar cannot be shown any more" in caplog.text


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


def test_wrong_rate_is_refused():
    with pytest.raises(ValueError, match="-1"):
        RichProgressBar(refresh_rate=-1)


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
