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


class AtEnds(Callback):
    """Makes the module log in the callbacks' epoch-end hooks."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.at("callback.on_train_epoch_end")

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.at("callback.on_validation_epoch_end")


def outcome(place: str, name: Callable[[int], str | None], options: dict[str, Any]) -> str:
    data = DataLoader(torch.zeros(4, 1))
    try:
        trainer = quiet_trainer(max_epochs=1, callbacks=[AtEnds()])
        trainer.fit(Logs(place, name, **options), data, data)
    except MetricError as error:
        return str(error)
    return "nothing"


NAMES = {  # of ranks 0 and 1
    "on one rank alone": ((None, "lonely"), "Rank 0 did not log 'lonely'.*rank 1 did"),
    "different on each rank": (("of_0", "of_1"), "Rank [01] did not log 'of_[01]'"),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("training_step", {}),
        ("training_step", {"on_step": False, "on_epoch": True}),
        ("on_train_batch_end", {}),
        ("on_train_epoch_end", {}),
        ("validation_step", {}),
        ("on_validation_epoch_end", {}),
        ("callback.on_train_epoch_end", {}),
        ("callback.on_validation_epoch_end", {}),
    ],
)
def test_names_that_differ_between_ranks_raise_on_all(ranks2, place, options, kind):
    names, message = NAMES[kind]
    for text in ranks2(outcome, place, lambda rank: names[rank], options, timeout=30):
        assert re.search(message, text, re.DOTALL)


@pytest.mark.parametrize("place", ["training_step", "validation_step"])
def test_early_stopping_finds_a_metric_that_only_ranks_with_a_batch_logged(ranks2, place):
    def updates() -> int:
        module = Logs(place, lambda _: "monitored", batch_size=0.0)  # no value is reduced
        data = DataLoader(torch.zeros(1, 1))
        callbacks = [EarlyStopping("monitored")]
        trainer = quiet_trainer(max_epochs=2, log_every=50, callbacks=callbacks)
        trainer.fit(module, data, data)
        return trainer.global_step

    assert ranks2(updates) == [2, 2]


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
def test_logged_names_are_known_on_all_ranks_after_a_resume(request, tmp_path, processes):
    ranks2, folder = request.getfixturevalue("ranks2"), str(tmp_path / "run")
    assert ranks2(fitted, lambda _: "loss", 1, folder) == [set(), set()]
    args = (fitted, lambda _: "loss", 2, folder)
    if processes == 1:
        assert fitted(*args[1:]) == {"loss"}
    else:
        again = request.getfixturevalue(f"ranks{processes}")
        assert again(*args) == [{"loss"}] * processes
