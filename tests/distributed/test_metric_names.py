"""Metrics whose names differ over the processes are an error that says whose and which, at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, EarlyStopping
from tests.numerics.running import quiet_trainer
from trainer import MetricError, TrainModule


class Logs(TrainModule):
    """Calls `log` in one place: `where(module)` is what it logs there."""

    def __init__(self, place: str, name: Callable[[int], str | None], **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.place, self.name, self.options = place, name, options

    def at(self, place: str) -> None:
        name = self.name(self.trainer.global_rank)
        if place == self.place and name is not None:
            self.log(name, 1.0, **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def outcome(place: str, name: Callable[[int], str | None], options: dict[str, Any]) -> str:
    data = DataLoader(torch.zeros(4, 1))
    try:
        quiet_trainer(max_epochs=1).fit(Logs(place, name, **options), data, data)
    except MetricError as error:
        return str(error)
    return "nothing"


def alone(rank: int) -> str | None:
    return "lonely" if rank == 1 else None


def own(rank: int) -> str:
    return f"of_{rank}"


PLACES = [
    ("training_step", {}),
    ("training_step", {"on_step": False, "on_epoch": True}),
    ("on_train_batch_end", {}),
    ("on_train_epoch_end", {}),
    ("validation_step", {}),
    ("on_validation_epoch_end", {}),
]


@pytest.mark.parametrize(("place", "options"), PLACES)
def test_a_name_of_one_rank_alone_is_told_on_all(ranks2, place, options):
    for messages in ranks2(outcome, place, alone, options, timeout=30):
        assert "Rank 0 did not log 'lonely'" in messages
        assert "rank 1 did" in messages


@pytest.mark.parametrize(("place", "options"), PLACES)
def test_other_names_on_each_rank_are_told_on_all(ranks2, place, options):
    for messages in ranks2(outcome, place, own, options, timeout=30):
        assert re.search(r"Rank [01] did not log 'of_[01]'", messages)


@pytest.mark.parametrize(("place", "options"), PLACES)
def test_the_same_name_on_all_is_fine(ranks2, place, options):
    assert ranks2(outcome, place, lambda rank: "shared", options) == ["nothing", "nothing"]


def epochs_with_a_decision(batches: int, logged_in: str, max_epochs: int, folder: str) -> Any:
    """Train while a callback waits for a value that is logged and not reduced yet."""
    module = Logs(logged_in, lambda _: "waited/for", batch_size=0.0)
    data = DataLoader(torch.zeros(batches, 1))
    trainer = quiet_trainer(
        project_dir=folder,
        max_epochs=max_epochs,
        log_every=50,
        checkpointing=True,
        callbacks=[EarlyStopping("waited/for")],
    )
    trainer.fit(module, data, data, ckpt_path="auto")
    return trainer.global_step


@pytest.mark.parametrize("place", ["training_step", "validation_step"])
def test_a_process_without_a_batch_knows_what_the_others_have_logged(ranks2, tmp_path, place):
    found = ranks2(epochs_with_a_decision, 1, place, 2, str(tmp_path / "run"))
    assert found == [2] * 2


def test_more_processes_know_what_was_logged_before_the_resume(ranks2, ranks4, tmp_path):
    place, folder = "training_step", str(tmp_path / "run")
    ranks2(epochs_with_a_decision, 2, place, 1, folder)
    found = ranks4(epochs_with_a_decision, 2, place, 2, folder)
    assert found == [2] * 4


class Notes(Callback):
    """What the process knows to be logged before it has trained."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.known = set(trainer.logged_names)


def fitted(name: Callable[[int], str | None], max_epochs: int, folder: str) -> Any:
    """Train in epochs in which the first process alone has a batch."""
    notes = Notes()
    module = Logs("training_step", name, on_step=False, on_epoch=True)
    trainer = quiet_trainer(
        project_dir=folder, max_epochs=max_epochs, checkpointing=True, callbacks=[notes]
    )
    trainer.fit(module, DataLoader(torch.zeros(1, 1)), ckpt_path="auto")
    return notes.known


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_resumed_run_knows_on_all_processes_what_was_logged(request, tmp_path, processes):
    ranks2, folder = request.getfixturevalue("ranks2"), str(tmp_path / "run")
    assert ranks2(fitted, lambda _: "loss", 1, folder) == [set(), set()]
    args = (fitted, lambda _: "loss", 2, folder)
    if processes == 1:
        assert fitted(*args[1:]) == {"loss"}
    else:
        again = request.getfixturevalue(f"ranks{processes}")
        assert again(*args) == [{"loss"}] * processes
