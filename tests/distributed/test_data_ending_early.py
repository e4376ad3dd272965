"""Map-style data that end on one process before the others: an error on all, and no hang."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from callbacks import ModelCheckpoint
from tests.helpers.ranks import RankError
from trainer import FullyShardedDataParallelPlugin, PartialState, Trainer, TrainModule
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
    """Return the message of each rank, all of which must fail."""
    with pytest.raises(RankError) as caught:
        ranks(*args, timeout=30)
    assert sorted(caught.value.failures) == list(range(ranks.size))
    return list(caught.value.failures.values())


def train(ends, module=Line, workers=0, **kwargs):
    passes = kwargs.pop("passes", 0)
    trainer = trainer_for(**kwargs)
    loader = DataLoader(Short(ends, passes=passes), batch_size=1, num_workers=workers)
    trainer.fit(module(), loader)
    return trainer.global_step, trainer.samples_seen


@pytest.mark.parametrize(
    ("ends", "kwargs", "epoch"),
    [
        ({7}, {}, 0),  # the fourth batch of rank 1
        ({1}, {}, 0),  # its first
        ({11}, {"max_epochs": 1}, 0),  # its last
        ({7}, {"passes": 1}, 1),  # the first epoch passes
        ({7}, {"gradient_accumulation_steps": 2}, 0),
        ({7}, {"gradient_accumulation_steps": 4}, 0),  # rank 1 ends inside a window
        ({3}, {"gradient_accumulation_steps": 8}, 0),  # one update, and both come to its end
        ({9}, {"gradient_accumulation_steps": 2, "workers": 1}, 0),
        ({7}, {"module": ByHand}, 0),  # rank 0 makes no update where rank 1 ends
        ({3}, {"val_every": 1}, 0),
    ],
)
def test_training_data_ending_early_on_one_rank_raises_on_all(ranks2, ends, kwargs, epoch):
    for text in failed(ranks2, lambda: train(ends, **kwargs)):
        assert f"ValueError: In epoch {epoch + 1} the training data {ENDED}" in text
        assert EARLY in text


@pytest.mark.parametrize(
    ("ends", "kwargs", "where"),
    [
        ({6}, {}, "1 of 3 processes, on rank 0, before"),
        ({4, 5}, {}, "2 of 3 processes before"),
        ({0, 1, 2}, {"gradient_accumulation_steps": 4}, "3 of 3 processes before"),
    ],
)
def test_the_rank_is_named_where_one_alone_ended(ranks3, ends, kwargs, where):
    for text in failed(ranks3, lambda: train(ends, **kwargs)):
        assert f"In epoch 1 the training data ended on {where} all batches" in text


class Late(StepSync):
    """Knows the sums an update later, as on an accelerator."""

    def count(self, total):
        self.read_pending()
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
@pytest.mark.parametrize("ends", [{7}, {11}, {1}])
def test_data_ending_early_raise_where_sums_are_known_an_update_later(
    ranks2, tmp_path, ends, kwargs
):
    for text in failed(ranks2, lambda: train_late(ends, tmp_path, **kwargs)):
        assert f"ValueError: In epoch 1 the training data {ENDED}" in text


class Stream(IterableDataset):
    """Ends after so many samples, which may differ between the ranks."""

    def __init__(self, *samples):
        self.samples = samples

    def __iter__(self):
        rank = PartialState().process_index
        return iter(torch.arange(2.0 * self.samples[rank % len(self.samples)]).view(-1, 2))


def train_stream(kind, samples, folder, module=Line, **kwargs):
    """Train on a stream, and return what it read and its number of updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "StepSync", kind)
        loader = DataLoader(Stream(*samples), batch_size=1)
        trainer = trainer_for(
            callbacks=[ModelCheckpoint(every=1)],
            checkpointing=True,
            project_dir=folder,
            val_every=1,
            log_every=1,
            **kwargs,
        )
        trainer.fit(module(), loader, DataLoader(Short(set(), 4), batch_size=1))
    return trainer.global_step, trainer.samples_seen


@pytest.mark.parametrize("kind", [StepSync, Late])
@pytest.mark.parametrize(
    ("samples", "kwargs"),
    [
        ((8, 5), {}),
        ((5, 8), {}),
        ((8, 3), {}),  # rank 1 has no batch in its last global batch
        ((12, 4), {"gradient_accumulation_steps": 2}),
        ((8, 4), {"module": ByHand}),
        ((6, 8), {"max_epochs": 1}),  # the other ends an update later
    ],
)
def test_streams_of_unequal_lengths_raise_on_all_ranks(ranks2, tmp_path, kind, samples, kwargs):
    for text in failed(ranks2, lambda: train_stream(kind, samples, tmp_path, **kwargs)):
        assert "In epoch 1 the training stream ended on 1 of 2 processes, on rank" in text


class Lags(Late):
    """Counts how many updates later the sums are read."""

    seen = ()

    def count(self, total):
        updates = self.updates = getattr(self, "updates", 0) + 1
        items = super().count(total)
        read = self._pending.read

        def counted():
            Lags.seen += (self.updates - updates,)
            return read()

        self._pending = SimpleNamespace(read=counted)
        return items


def lags_of(folder, kwargs):
    Lags.seen = ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "StepSync", Lags)
        loader = DataLoader(Stream(20), batch_size=1)
        trainer = trainer_for(project_dir=folder, log_every=1, max_grad_norm=1.0, **kwargs)
        trainer.fit(kwargs.pop("module", Line)(), loader)
    return trainer.global_step, trainer.samples_seen, Lags.seen


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"gradient_accumulation_steps": 2}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}],
)
def test_a_stream_waits_for_the_device_only_where_an_epoch_ends(ranks2, tmp_path, kwargs):
    """Elsewhere the sums of an update are read in the next one, when they have arrived."""
    updates = 5 if "gradient_accumulation_steps" in kwargs else 10
    for steps, samples, lags in ranks2(lambda: lags_of(tmp_path, kwargs)):
        assert (steps, samples) == (2 * updates, 40)
        assert lags.count(0) == 2 * 2  # seen, and recorded, at the end of each epoch
        assert lags.count(1) == len(lags) - 4 == 2 * (updates - 1)


def test_manual_optimisation_without_a_first_batch_raises(ranks2):
    messages = failed(ranks2, lambda: train({1}, module=ByHand))
    start = "In epoch 1 the training data ended before the first batch, on rank 1"
    assert any(start in text for text in messages)


def test_on_one_process_the_epoch_ends():
    assert train({6}) == (12, 12)


def test_loader_lengths_that_differ_between_ranks_raise(ranks2):
    def fit():
        samples = 80 if PartialState(cpu=True).is_main_process else 40
        trainer_for().fit(Line(), DataLoader(Short(set(), samples), batch_size=4))

    for text in failed(ranks2, fit):
        assert "different number of batches on each process: rank 0: 20, rank 1: 10" in text


def evaluated(name, ends, samples, *, in_fit=False):
    good, bad = (DataLoader(Short(each, samples), batch_size=1) for each in (set(), ends))
    trainer = trainer_for(num_sanity_val_steps=0)
    if in_fit:
        trainer.fit(Line(), good, [good, bad])
        return trainer.callback_metrics
    return getattr(trainer, name)(Line(), [good, bad])


@pytest.mark.parametrize(
    ("name", "ends", "samples", "in_fit"),
    [
        ("validate", {7}, 12, False),
        ("validate", {1}, 12, False),
        ("validate", {11}, 12, False),
        ("test", {7}, 12, False),
        ("predict", {7}, 12, False),
        ("validate", {7}, 80, True),  # where the ranks exchange exit signals now and then
    ],
)
def test_evaluation_data_ending_early_on_one_rank_raises_on_all(
    ranks2, name, ends, samples, in_fit
):
    kind = "validation" if name == "validate" else name
    for text in failed(ranks2, lambda: evaluated(name, ends, samples, in_fit=in_fit)):
        assert f"The {kind} loader number 1 ended in epoch 1 on rank 1 before the others" in text
        assert EARLY in text


def test_evaluation_passes_where_all_ranks_end_alike_or_one_has_no_batch(ranks2):
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


def test_a_validation_stream_of_unequal_lengths_raises_however_slow_its_batches(ranks2):
    def fit():
        with pytest.MonkeyPatch.context() as patch:
            clock = count(step=5.0)  # seconds for each question
            patch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: next(clock)))
            good = DataLoader(Short(set(), 8), batch_size=1)
            trainer = trainer_for(num_sanity_val_steps=0)
            trainer.fit(Line(), good, DataLoader(Uneven(), batch_size=1))

    for text in failed(ranks2, fit):
        assert "The validation loader number 0 ended in epoch 1 on rank 1 before the others" in text
