import re
import sys
import threading

import pytest
from tqdm import tqdm

from callbacks import ProgressBar, RichProgressBar
from tests.helpers.notebook import outputs_of
from tests.helpers.stand_in import AcceleratorStandIn
from tests.helpers.terminal import COLUMNS, Loop


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


def test_what_a_save_on_a_signal_says_has_a_line_of_its_own(terminal):
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


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
def test_quiet_where_there_is_no_standard_error(capsys, monkeypatch, kind):
    monkeypatch.setattr(sys, "stderr", None)  # Python's own choice for a service
    Loop(kind=kind).fit(epochs=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("when", ["open", "show", "close"])
def test_what_cannot_be_shown_any_more_is_told_once_and_ends_nothing(terminal, caplog, when):
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


def test_wrong_rate_is_refused():
    with pytest.raises(ValueError, match="-1"):
        ProgressBar(refresh_rate=-1)
    with pytest.raises(TypeError, match="refresh_rate is 'often'; it must be a number"):
        ProgressBar(refresh_rate="often")


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
def test_a_notebook_keeps_texts_and_nothing_of_what_went(before):
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
