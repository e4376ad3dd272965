"""Map-style data that end on one process before the others: an error on all, and no hang."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from callbacks import ModelCheckpoint
from tests.helpers.ranks import RankError
from trainer import PartialState, Trainer, TrainModule
from trainer.distributed.step_sync import StepSync
from trainer.loops import preemption, setup

ENDED = "ended on 1 of 2 processes, on rank 1, before all batches of the epoch"
EARLY = "A map-style dataset that raises StopIteration"


class Short(Dataset):
    """Ends an epoch by StopIteration at these samples, from the n-th pass over them on."""

    def __init__(self, ends, samples=12, passes=0):
        self.ends, self.samples, self.passes = ends, samples, passes

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index in self.ends:
            self.passes -= 1
            if self.passes < 0:
                raise StopIteration
        return torch.full((2,), float(index))


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("score", self.layer(batch).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ByHand(Line):
    """Steps at every second batch; its last update here comes before rank 1's end."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.layer(batch).square().mean())
        if batch_idx % 2:
            self.optimizers().step()


def trainer_for(**kwargs):
    return Trainer(
        **({"max_epochs": 2, "cpu": True, "progress_bar": False, "checkpointing": False} | kwargs)
    )


def failed(ranks, *args):
    """What each rank says, not only the first."""
    with pytest.raises(RankError) as caught:
        ranks(*args, timeout=30)
    return caught.value.failures


def train(ends, module=Line, workers=0, **kwargs):
    passes = kwargs.pop("passes", 0)
    trainer = trainer_for(**kwargs)
    loader = DataLoader(Short(ends, passes=passes), batch_size=1, num_workers=workers)
    trainer.fit(module(), loader)
    return trainer.global_step, trainer.samples_seen


@pytest.mark.parametrize(
    ("kwargs", "epoch"),
    [
        ({}, 0),
        ({"passes": 1}, 1),  # the first epoch passes
        ({"gradient_accumulation_steps": 2}, 0),
        ({"gradient_accumulation_steps": 4}, 0),  # rank 1 ends inside a window
        ({"workers": 1}, 0),
        ({"module": ByHand}, 0),  # rank 0 makes no update where rank 1 ends
    ],
)
def test_training_data_ending_early_on_one_rank_raises_on_all(ranks2, kwargs, epoch):
    messages = failed(ranks2, lambda: train({7}, **kwargs))  # the fourth batch of rank 1
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert f"ValueError: In epoch {epoch} the training data {ENDED}" in text
        assert EARLY in text


def test_rank_0_is_named_too(ranks2):
    messages = failed(ranks2, lambda: train({6}))
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert "ended on 1 of 2 processes, on rank 0, before all batches" in text


def test_the_rank_is_not_guessed_where_several_ended(ranks3):
    messages = failed(ranks3, lambda: train({4, 5}))
    assert sorted(messages) == [0, 1, 2]
    for text in messages.values():
        assert "the training data ended on 2 of 3 processes before all batches" in text


@pytest.mark.parametrize(
    ("ends", "kwargs"),
    [
        ({11}, {}),  # the last one of all
        ({1}, {}),  # rank 1 has none
        ({3}, {"gradient_accumulation_steps": 8}),  # one update, and both come to its end
        ({11}, {"gradient_accumulation_steps": 2}),
        ({9}, {"gradient_accumulation_steps": 2, "workers": 1}),
        ({3}, {"val_every": 1}),
        ({11}, {"max_epochs": 1}),
    ],
)
def test_no_end_is_overlooked_and_nobody_is_left_waiting(ranks2, ends, kwargs):
    messages = failed(ranks2, lambda: train(ends, **kwargs))
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert f"ValueError: In epoch 0 the training data {ENDED}" in text


class Late(StepSync):
    """Knows the sums an update later, as on an accelerator."""

    def count(self, total):
        self.settle()
        now = StepSync(torch.device("cpu"), whole_items=self._whole_items)
        self._pending = SimpleNamespace(read=total.clone)
        items = now.count(total)
        self.bad_losses = now.bad_losses
        return items


def train_late(ends, folder, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "StepSync", Late)
        loader = DataLoader(Short(ends), batch_size=1)
        callbacks = [ModelCheckpoint(every=1)]
        trainer = trainer_for(
            callbacks=callbacks, checkpointing=True, project_dir=folder, val_every=1, **kwargs
        )
        trainer.fit(Line(), loader, DataLoader(Short(set(), 4), batch_size=1))


@pytest.mark.parametrize("kwargs", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("ends", [{7}, {9}, {11}, {1}])
def test_where_sums_come_an_update_later_all_go_on_until_then(ranks2, tmp_path, ends, kwargs):
    messages = failed(ranks2, lambda: train_late(ends, tmp_path, **kwargs))
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert f"ValueError: In epoch 0 the training data {ENDED}" in text


@pytest.mark.parametrize("kwargs", [{}, {"gradient_accumulation_steps": 4}])
@pytest.mark.parametrize("ends", [{0, 1}, {6, 7}, {2, 5}])
def test_an_end_on_all_processes_is_refused_too(ranks2, ends, kwargs):
    messages = failed(ranks2, lambda: train(ends, **kwargs))
    assert sorted(messages) == [0, 1]
    together = ends != {2, 5} or kwargs
    where = "2 of 2 processes before" if together else "1 of 2 processes, on rank 0, before"
    for text in messages.values():
        assert f"ValueError: In epoch 0 the training data ended on {where} all batches" in text


def test_in_manual_optimisation_who_has_nothing_to_stand_in_with_says_so(ranks2):
    messages = failed(ranks2, lambda: train({1}, module=ByHand))
    assert (
        "ValueError: In epoch 0 the training data ended before the first batch, on rank 1"
        in (messages[1])
    )


def test_on_one_process_it_is_the_end_of_the_epoch():
    assert train({6}) == (12, 12)


def test_loader_lengths_that_differ_between_ranks_raise(ranks2):
    def fit():
        samples = 80 if PartialState(cpu=True).is_main_process else 40
        trainer_for().fit(Line(), DataLoader(Short(set(), samples), batch_size=4))

    messages = failed(ranks2, fit)
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert "different number of batches on each process: rank 0: 20, rank 1: 10" in text


def evaluated(name, ends, samples, *, in_fit=False):
    good, bad = (DataLoader(Short(each, samples), batch_size=1) for each in (set(), ends))
    trainer = trainer_for(num_sanity_val_steps=0)
    if in_fit:
        trainer.fit(Line(), good, [good, bad])
        return trainer.callback_metrics
    return getattr(trainer, name)(Line(), [good, bad])


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
@pytest.mark.parametrize("ends", [{7}, {1}, {11}])
def test_evaluation_data_ending_early_on_one_rank_raises_on_all(ranks2, name, ends):
    messages = failed(ranks2, evaluated, name, ends, 12)
    assert sorted(messages) == [0, 1]
    kind = "validation" if name == "validate" else name
    for text in messages.values():
        assert f"The {kind} loader number 1 ended in epoch 0 on rank 1 before the others" in text
        assert EARLY in text


def test_so_is_a_validation_inside_a_fit_in_which_the_others_still_ask_who_was_told_to_end(ranks2):
    messages = failed(
        ranks2, lambda: evaluated("fit", {7}, 80, in_fit=True)
    )  # they ask now and then
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert "The validation loader number 1 ended in epoch 0 on rank 1 before the others" in text


def test_evaluations_that_end_alike_or_have_no_batch_for_some_pass(ranks2):
    def each():
        metrics = evaluated("validate", {6, 7}, 12)[1]
        few = trainer_for().validate(Line(), DataLoader(Short(set(), 5), batch_size=1))
        rank = PartialState(cpu=True).process_index
        entries = evaluated("predict", {6, 7}, 12)
        return set(metrics), len(few), rank, entries and [len(each) for each in entries]

    (names, few, *first), (same, _, *second) = ranks2(each, timeout=30)
    assert names == same == {"score/dataloader_idx_1"}
    assert few == 1
    assert (first, second) == ([0, [12, 6]], [1, None])


class Uneven(IterableDataset):
    """Has half as many samples on rank 1."""

    def __iter__(self):
        return iter(torch.ones(4 if PartialState().process_index else 8, 2))


def test_a_stream_that_ends_apart_in_a_validation_is_refused_however_long_its_batches_take(ranks2):
    def fit():
        with pytest.MonkeyPatch.context() as patch:
            clock = count(step=5.0)  # seconds for each question
            patch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: next(clock)))
            good = DataLoader(Short(set(), 8), batch_size=1)
            trainer = trainer_for(num_sanity_val_steps=0)
            trainer.fit(Line(), good, DataLoader(Uneven(), batch_size=1))

    messages = failed(ranks2, fit)
    assert sorted(messages) == [0, 1]
    for text in messages.values():
        assert "The validation loader number 0 ended in epoch 0 on rank 1 before the others" in text
