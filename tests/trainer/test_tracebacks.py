"""Errors that leave the Trainer show the user's frames, and hide those between them."""

import contextlib
import re
import sys
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.helpers.line import Line
from trainer import Trainer
from trainer.tracebacks import FULL, HiddenFrames

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a context manager cannot replace a traceback before 3.11"
)


class Fails(Line):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("wrong shape")
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch, batch_idx):
        raise RuntimeError("wrong test")


def loader():
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def functions_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fails(call):
    with pytest.raises(Exception, match="wrong") as caught:
        call()
    return caught.value


def quiet():
    return Trainer(max_epochs=1, progress_bar=False, project_dir="run")


def test_only_the_users_frames_are_shown():
    error = fails(lambda: quiet().fit(Fails(), loader()))
    assert functions_of(error) == ["fails", "<lambda>", "training_step"]
    (note,) = error.__notes__
    assert note.startswith("fit, epoch 1, after update 1, batch 1: ")
    assert note.endswith(f"frames hidden, {FULL}=1 shows them")


class FailsInForward(Line):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)  # the batches have 2 columns

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def forward(self, inputs):
        return self.layer(inputs)


def shown_of_a_failing_forward():
    try:
        quiet().fit(FailsInForward(), loader())
    except RuntimeError as error:
        return functions_of(error)


def test_the_frames_of_ddp_are_hidden_but_not_the_operation_that_failed(ranks2):
    call = ["_wrapped_call_impl", "_call_impl"]  # of torch, below the user's frames
    shown = ["training_step", *call, "forward", *call, "forward"]
    assert ranks2(shown_of_a_failing_forward) == [["shown_of_a_failing_forward", *shown]] * 2


class FailsElsewhere(Line):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def setup(self, stage):
        self.fail_in("set-up")

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking and batch_idx == 1:
            self.fail_in("fit, sanity check, validation batch 1")
        if not self.trainer.sanity_checking:
            self.fail_in("fit, epoch 1, after update 2, validation batch 0")

    def on_train_epoch_end(self):
        self.fail_in("fit, epoch 1, after update 2, batch 1")

    def teardown(self, stage):
        self.fail_in("teardown")

    def fail_in(self, where):
        if self.where == where:
            raise RuntimeError("wrong")


@pytest.mark.parametrize(
    "where",
    [
        "set-up",
        "fit, sanity check, validation batch 1",
        "fit, epoch 1, after update 2, validation batch 0",
        "fit, epoch 1, after update 2, batch 1",
        "teardown",
    ],
)
def test_the_note_says_where_a_fit_failed(where):
    error = fails(lambda: quiet().fit(FailsElsewhere(where), loader(), loader()))
    assert error.__notes__[0].split(": ")[0] == where


class Lacks(Dataset):
    """Ten samples, one of which cannot be read."""

    def __init__(self, index):
        self.index = index

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == self.index:
            raise RuntimeError("wrong file")
        return torch.ones(2)


class FailsLater(Line):
    """Fails at the beginning of its second epoch."""

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            raise RuntimeError("wrong epoch")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lacks", [0, 3, 6, 9])
def test_the_note_names_the_batch_that_cannot_be_read(lacks, workers):
    broken = DataLoader(Lacks(lacks), batch_size=2, num_workers=workers)
    error = fails(lambda: quiet().fit(Line(), broken))
    batch = lacks // 2  # read before the update of the batch before it
    place = f"fit, epoch 1, after update {batch}, reading batch {batch}"
    assert error.__notes__[-1].split(": ")[0] == place
    error = fails(lambda: quiet().fit(Line(), loader(), broken))
    place = f"fit, sanity check, reading validation batch {batch}"
    if batch > 1:
        place = f"fit, epoch 1, after update 2, reading validation batch {batch}"
    assert error.__notes__[-1].split(": ")[0] == place


def test_the_note_names_the_batch_that_a_resumed_run_cannot_read():
    stops = Trainer(max_steps=2, progress_bar=False, project_dir="run")
    stops.fit(Line(), DataLoader(Lacks(None), batch_size=2))
    error = fails(lambda: quiet().fit(Line(), DataLoader(Lacks(7), batch_size=2), ckpt_path="auto"))
    assert error.__notes__[-1].startswith("fit, epoch 1, after update 3, reading batch 3: ")


def test_the_note_names_no_batch_of_an_earlier_epoch():
    trainer = Trainer(max_epochs=2, progress_bar=False, project_dir="run")
    error = fails(lambda: trainer.fit(FailsLater(), loader()))
    assert error.__notes__[0].startswith("fit, epoch 2, after update 2: ")


def test_evaluations_hide_frames_too():
    error = fails(lambda: quiet().test(Fails(), loader()))
    assert functions_of(error) == ["fails", "<lambda>", "test_step"]
    assert len(error.__notes__) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "bf16-mixed"}, "is 'bf16-mixed'. Did you mean 'bf16'?"),
        ({"val_every": "1 epochz"}, "Did you mean 'epochs'?"),
    ],
)
def test_a_wrong_value_of_an_argument_is_shown_without_frames_of_cadence(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Trainer(max_epochs=1, cpu=True, **arguments)
    assert len(functions_of(caught.value)) == 2  # this test, and where the error was raised


def test_all_frames_are_shown_where_asked(monkeypatch):
    monkeypatch.setenv(FULL, "1")
    error = fails(lambda: quiet().fit(Fails(), loader()))
    assert {"fit", "train_window", "training_step"} < set(functions_of(error))
    assert not hasattr(error, "__notes__")


def test_an_error_of_cadence_shows_where_it_was_raised():
    error = fails(lambda: Trainer(max_epochs=1).fit(Fails(), loader(), ckpt_path="wrong"))
    assert len(functions_of(error)) == 3
    assert not hasattr(error, "__notes__")


def test_errors_that_another_was_raised_from_are_shortened():
    def raise_from():
        with HiddenFrames():
            try:
                quiet().fit(Fails(), loader())
            except RuntimeError as cause:
                raise ValueError("wrong again") from cause

    error = fails(raise_from)
    assert functions_of(error.__cause__) == ["raise_from", "training_step"]


def test_context_managers_below_hidden_frames_are_hidden():
    class Unfit(Line):
        configure_optimizers = None

    Unfit.__name__ = "wrong"
    error = fails(lambda: quiet().fit(Unfit(), loader()))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert contextlib.__file__ not in files


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise RuntimeError("wrong file")


@pytest.mark.parametrize("batch_size", [2, None])
def test_an_error_in_a_worker_shows_no_frame_of_cadence(batch_size):
    data = DataLoader(Broken(), batch_size=batch_size, num_workers=1)
    error = fails(lambda: quiet().fit(Line(), data))
    assert "seeding.py" not in str(error)
    assert "in __getitem__" in str(error)
