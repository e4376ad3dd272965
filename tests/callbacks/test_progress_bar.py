import re
import sys
import threading

import pytest
import torch
from tqdm import tqdm

from callbacks import ProgressBar, RichProgressBar
from callbacks.progress_bar import _choose_tqdm
from tests.helpers.notebook import outputs_of
from tests.helpers.stand_in import AcceleratorStandIn
from tests.helpers.terminal import COLUMNS, Loop

both_kinds = pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])


def shows(line, name, count, values=""):
    """Whether a line is that of a bar of either kind."""
    return re.fullmatch(rf"{name}\b.* {count} ?.*batch.*{re.escape(values)}\]?", line) is not None


@both_kinds
def test_finished_epochs_stay_and_validations_go(terminal, kind):
    terminal.loop(kind=kind, max_epochs=2).fit(epochs=2)
    first, second, *rest = terminal.screen()
    assert shows(first, "epoch 1/2", "10/10", "loss=0.3333")
    assert shows(second, "epoch 2/2", "10/10", "loss=0.25")
    assert rest == [""]
    assert max(len(first), len(second)) <= COLUMNS
    assert re.search("validate.*4/4", terminal.written)


@both_kinds
def test_a_validation_is_shown_below_the_epoch(terminal, kind):
    loop = terminal.loop(kind=kind)
    loop.call("on_train_epoch_start")
    loop.trainer.bar_values = {"loss": 0.5}
    loop.batches(range(4))
    loop.evaluate("validation", [3, 5])
    above, below = terminal.screen()
    assert shows(above, "epoch 1", "4/10", "loss=0.5")
    assert shows(below, "validate", "8/8")
    assert "loss" not in below
    loop.call("on_validation_end")
    above, *rest = terminal.screen()
    assert shows(above, "epoch 1", "4/10")
    assert set(rest) <= {""}
    loop.call("teardown", "fit")


@both_kinds
@pytest.mark.parametrize(
    ("stage", "sanity_checking", "name", "stays"),
    [
        ("validation", True, "sanity check", False),
        ("validation", False, "validate", True),
        ("test", False, "test", True),
        ("predict", False, "predict", True),
    ],
)
def test_evaluations_by_themselves(terminal, kind, stage, sanity_checking, name, stays):
    loop = terminal.loop(kind=kind, stage=stage, sanity_checking=sanity_checking)
    loop.trainer.bar_values = {"accuracy": 0.5}
    loop.evaluate(stage, [2, 4])
    assert shows(terminal.screen()[0], name, "6/6")
    loop.call(f"on_{stage}_end")
    last, *rest = terminal.screen()
    assert shows(last, name, "6/6", "accuracy=0.5") is stays
    assert stays or last == ""
    assert set(rest) <= {""}


def test_a_narrow_line_keeps_the_metrics_and_drops_the_rest_first():
    kind, _ = _choose_tqdm(notebook=False)
    metrics = "train_loss=56.83, val_loss=0.8123"
    texts = {
        width: kind.format_meter(
            n=20, total=50, elapsed=1.0, ncols=width, prefix="epoch 3/60", postfix=metrics
        )
        for width in (60, 75, 90, 120)
    }
    assert all(metrics in text and len(text) <= width for width, text in texts.items())
    assert texts[60] == f"epoch 3/60: 20/50, {metrics}"
    assert ["it/s" in texts[width] for width in (60, 75, 90)] == [False, False, True]
    assert ["%" in texts[width] for width in (90, 120)] == [False, True]


@both_kinds
def test_unknown_lengths(terminal, kind):
    loop = terminal.loop(kind=kind, num_training_batches=None)
    loop.call("on_train_epoch_start")
    loop.batches(range(6))
    loop.evaluate("validation", [2, None])
    above, below = terminal.screen()
    assert shows(above, "epoch 1", "6")
    assert shows(below, "validate", "5")
    loop.call("teardown", "fit")


@both_kinds
def test_a_resumed_epoch_goes_on_where_it_was(terminal, kind):
    loop = terminal.loop(kind=kind)
    loop.call("on_train_epoch_start")
    loop.batches(range(6, 8))
    assert shows(terminal.screen()[0], "epoch 1", "8/10")
    for bar in tqdm._instances:
        assert bar.format_dict["initial"] == 6  # the speed is that of the other two
    loop.call("teardown", "fit")


@both_kinds
def test_metrics_are_read_only_when_the_bar_is_redrawn(terminal, kind):
    loop = terminal.loop(kind=kind, refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(10))
    assert loop.trainer.bar_values_read == 1
    loop.call("on_train_epoch_end")
    assert loop.trainer.bar_values_read == 2
    assert shows(terminal.screen()[0], "epoch 1", "10/10")


@both_kinds
def test_the_bar_shows_what_an_override_of_get_metrics_returns(terminal, kind):
    class Own(kind):
        def get_metrics(self, trainer, pl_module):
            items = super().get_metrics(trainer, pl_module)
            del items["loss"]
            return {**items, "run": 12345, "name": "a", "lr": torch.tensor(1 / 3)}

    loop = terminal.loop(kind=Own)
    loop.trainer.bar_values = {"loss": 0.5, "acc": 0.2}
    loop.call("on_train_epoch_start")
    loop.batches(range(10))
    loop.call("on_train_epoch_end")
    values = "acc=0.2, run=12345, name=a, lr=0.3333"
    assert shows(terminal.screen()[0], "epoch 1", "10/10", values)
    assert loop.trainer.bar_values == {"loss": 0.5, "acc": 0.2}


@both_kinds
@pytest.mark.parametrize(
    "arguments",
    [{"refresh_rate": 0}, {"accelerator": AcceleratorStandIn(is_main_process=False)}],
)
def test_quiet_where_asked_and_on_other_processes(terminal, kind, arguments):
    loop = terminal.loop(kind=kind, **arguments)
    loop.fit(epochs=1)
    assert terminal.read() == ""
    assert loop.trainer.bar_values_read == 0


@both_kinds
def test_quiet_where_there_is_no_standard_error(capsys, monkeypatch, kind):
    monkeypatch.setattr(sys, "stderr", None)  # Python's own choice for a service
    Loop(kind=kind).fit(epochs=1)
    assert capsys.readouterr().out == ""


def test_names_of_metrics_cannot_command_the_terminal(terminal):
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    loop.trainer.bar_values = {"\x1b]0;owned\x07loss": 0.5}
    loop.batches(range(4))
    loop.call("teardown", "fit")
    terminal.screen()
    assert r"\x1b]0;owned\x07loss=0.5" in terminal.written
    assert "\x1b]" not in terminal.written


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


def test_messages_of_a_save_on_a_signal_have_their_own_line(terminal):
    loop = terminal.loop(refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(4))
    loop.call("on_preemption")
    sys.stderr.write("Saved\n")
    epoch, said, *rest = terminal.screen()
    assert epoch.startswith("epoch 1:  40%")
    assert said == "Saved"
    assert set(rest) == {""}
    loop.call("teardown", "fit")


@pytest.mark.parametrize("ending", [("on_train_end",), ("on_exception", KeyboardInterrupt())])
def test_an_interrupted_epoch_shows_where_it_stopped(terminal, ending):
    loop = terminal.loop(refresh_rate=1e-9)
    loop.call("on_train_epoch_start")
    loop.batches(range(7))
    loop.call(*ending)
    assert terminal.screen()[0].startswith("epoch 1:  70%")


def test_no_bar_and_no_thread_is_left(terminal, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # tqdm's own default: start a thread
    monkeypatch.setattr(tqdm, "monitor", None)  # if there is none yet
    before = threading.active_count()
    loop = terminal.loop()
    loop.call("on_train_epoch_start")
    assert threading.active_count() == before
    loop.call("teardown", "fit")
    assert not tqdm._instances


@pytest.mark.parametrize("when", ["open", "show", "close"])
def test_a_bar_that_cannot_be_shown_warns_once_and_ends_nothing(terminal, caplog, when):
    class Gone:
        def __init__(self, name, total, leave):
            self.fail("open")

        def fail(self, what):
            if what == when:
                raise BrokenPipeError("nobody reads it")

        def show(self, done, text):
            self.fail("show")

        def close(self, done):
            self.fail("close")

    class Bar(ProgressBar):
        def choose_view(self):
            return Gone

    loop = terminal.loop(kind=Bar)
    loop.fit(epochs=2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "BrokenPipeError('nobody reads it')" in caplog.text


CELL = """
from tests.helpers.terminal import Loop
loop = Loop(sanity_checking=True)
loop.evaluate("validation", [2])
loop.call("on_validation_end")
loop.trainer.sanity_checking = False
loop.fit(epochs=1)
loop.call("on_train_epoch_start")
loop.batches(range(4))
loop.call("on_train_end")
loop = Loop()
loop.call("on_train_epoch_start")
loop.batches(range(7))
"""
WITHOUT_WIDGETS = "import sys; sys.modules['ipywidgets'] = None"


@pytest.mark.parametrize("before", ["", WITHOUT_WIDGETS])
def test_a_notebook_keeps_finished_bars(before):
    pytest.importorskip("nbclient")
    outputs = outputs_of(before + CELL)
    assert {output["output_type"] for output in outputs} == {"display_data"}  # nothing printed
    *stay, moving = [output["data"] for output in outputs]
    sanity, epoch, validation, stopped = stay
    assert sanity == validation == {"text/plain": ""}
    assert epoch.keys() == stopped.keys() == {"text/plain"}  # widgets go with the kernel
    pattern = r"epoch 1: 100%\|█+\| 10/10 \[.*batch/s, loss=0\.3333\]"
    assert re.fullmatch(pattern, epoch["text/plain"])
    assert stopped["text/plain"].startswith("epoch 1:  40%|")
    if before:
        assert moving["text/plain"].startswith("epoch 1:  70%|")
    else:
        assert "application/vnd.jupyter.widget-view+json" in moving
