"""How long a run is, how much of the data it sees, and when something is due."""

import random
import time
from collections import UserList
from datetime import timedelta

import numpy
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, IterableDataset

from callbacks import Callback, ModelCheckpoint
from trackers import read_metrics
from trainer import Trainer, TrainModule


class Net(TrainModule):
    """Remembers the samples of every batch that it sees."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = {"train": [], "validation": [], "test": [], "predict": []}

    def see(self, phase, batch):
        self.seen[phase].append(batch.flatten().tolist())

    def training_step(self, batch, batch_idx):
        self.see("train", batch)
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.see("validation", batch)
        self.log("val", batch.mean())

    def test_step(self, batch, batch_idx):
        self.see("test", batch)
        self.log("test", batch.mean())

    def predict_step(self, batch, batch_idx):
        self.see("predict", batch)
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class When(Callback):
    """Remembers the updates at which validations began."""

    def __init__(self):
        self.validations = []

    def on_validation_start(self, trainer, module):
        self.validations.append(trainer.global_step)


class Stop(Callback):
    """Asks for the end in one hook, at one update."""

    def __init__(self, hook, at=0):
        def stop(trainer, module, *args):
            if trainer.global_step >= at:
                trainer.should_stop = True

        setattr(self, hook, stop)


class Slow(Net):
    """Lets the clock of a test go on with every batch."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch, batch_idx):
        self.clock[0] += self.seconds
        return super().training_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch):
    """The time that has passed, in seconds: it stands still but for what tests add to it."""
    passed, start = [0.0], time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: start + passed[0])
    return passed


def loader(batches, **options):
    return DataLoader(torch.arange(2.0 * batches).reshape(-1, 1), batch_size=2, **options)


def make(**arguments):
    arguments = {"num_sanity_val_steps": 0, "checkpointing": False} | arguments
    return Trainer(progress_bar=False, project_dir="run", **arguments)


def fit(*data, module=None, **arguments):
    module, trainer = module or Net(), make(**arguments)
    trainer.fit(module, *data)
    return module, trainer


FOUR = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


# -- the end of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "steps", "epoch"),
    [
        ({"max_epochs": 3}, 12, 2),
        ({"max_steps": 6}, 6, 1),
        ({"max_steps": 4}, 4, 0),
        ({"max_epochs": 2, "max_steps": 5}, 5, 1),
        ({"max_epochs": 1, "max_steps": 99}, 4, 0),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
    ],
)
def test_the_first_maximum_ends_the_run(lengths, steps, epoch):
    module, trainer = fit(loader(4), **lengths)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epoch)
    assert len(module.seen["train"]) == steps


def test_accumulation_counts_updates_not_batches():
    module, trainer = fit(loader(5), max_steps=4, gradient_accumulation_steps=2)
    assert trainer.global_step == 4  # two full windows and a short one, then one more
    assert len(module.seen["train"]) == 5 + 2
    assert (trainer.batches_seen, trainer.samples_seen, trainer.items_seen) == (7, 14, 14.0)


def test_a_run_of_no_epochs_trains_nothing_and_saves_nothing(tmp_path, capsys):
    weights = torch.nn.Linear(1, 1).state_dict()
    module = Net()
    module.layer.load_state_dict(weights)
    trainer = Trainer(max_epochs=0, project_dir="run", progress_bar=False)
    trainer.fit(module, loader(2))
    assert trainer.global_step == 0
    assert "nothing to do: max_epochs or max_steps is 0" in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoints").exists()
    torch.testing.assert_close(module.layer.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    "max_time",
    ["3 minutes", "00:00:03:00", timedelta(minutes=3), {"minutes": 2, "seconds": 60}],
)
def test_max_time_ends_the_run_at_the_next_update(clock, max_time):
    _, trainer = fit(loader(3), module=Slow(clock, 50.0), max_time=max_time)
    assert trainer.global_step == 4  # 150 seconds are not enough, 200 are


def test_max_time_counts_the_time_before_a_resume(clock):
    fit(loader(2), module=Slow(clock, 61.0), max_epochs=1, checkpointing=True)
    clock[0] = 0.0  # another process, whose clock begins anew
    trainer = make(max_time="5 minutes")
    trainer.fit(Slow(clock, 61.0), loader(2), ckpt_path="last")
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("on_train_batch_start", 2, 3),
        ("on_train_step_end", 2, 2),
        ("on_boundary", 2, 2),
        ("on_validation_epoch_end", 1, 3),  # that of its update
    ],
)
def test_should_stop_ends_the_run_at_the_next_boundary(hook, at, steps):
    options = {"max_epochs": 3, "val_every": 3, "callbacks": Stop(hook, at)}
    _, trainer = fit(loader(4), loader(1), **options)
    assert trainer.global_step == steps


def test_should_stop_in_the_step_of_the_module_ends_the_run():
    class Impatient(Net):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = self.global_step == 1
            return super().training_step(batch, batch_idx)

    _, trainer = fit(loader(4), module=Impatient(), max_epochs=3)
    assert trainer.global_step == 2
    assert trainer.should_stop


@pytest.mark.parametrize(
    ("minimum", "steps"),
    [({"min_steps": 3}, 3), ({"min_steps": 6}, 6), ({"min_epochs": 1}, 4), ({"min_epochs": 2}, 8)],
)
def test_min_steps_and_min_epochs_hold_against_should_stop(minimum, steps):
    stop = Stop("on_boundary", at=1)
    _, trainer = fit(loader(4), max_epochs=3, callbacks=stop, **minimum)
    assert trainer.global_step == steps


def test_a_request_to_stop_ends_with_its_run():
    trainer = make(max_epochs=2, callbacks=Stop("on_train_batch_start"))
    trainer.fit(Net(), loader(2))
    assert trainer.global_step == 1
    trainer.callbacks[:] = []
    trainer.fit(Net(), loader(2))
    assert trainer.global_step == 4


# -- what is due -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "validations"),
    [
        ("1 epoch", [5, 10]),
        ("2 epochs", [10]),
        ("0.4 epochs", [2, 4, 6, 8, 10]),
        ("4 steps", [4, 8]),
        (3, [3, 6, 9]),
        ("8 items", [4, 8]),
        ("6e0 items", [3, 6, 9]),
        ("1 minute", [3, 6, 9]),
        ("150 seconds", [8]),
    ],
)
def test_validation_is_due_in_every_unit(clock, every, validations):
    when, module = When(), Slow(clock, 21.0)
    fit(loader(5), loader(1), module=module, max_epochs=2, val_every=every, callbacks=when)
    assert when.validations == validations


def test_intervals_count_updates_when_micro_batches_are_accumulated():
    when = When()
    arguments = {"max_epochs": 2, "gradient_accumulation_steps": 2, "callbacks": when}
    fit(loader(6), loader(1), val_every=2, **arguments)
    assert when.validations == [2, 4, 6]
    when.validations.clear()
    fit(loader(6), loader(1), val_every="0.5 epochs", **arguments)
    assert when.validations == [2, 3, 5, 6]  # at the first update behind each half


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), ("4 steps", [3, 4, 6]), ("1 epoch", [3, 6])]
)
def test_log_every_chooses_the_updates_that_are_recorded(every, steps):
    """The last one of each epoch is recorded too."""
    _, trainer = fit(loader(3), max_epochs=2, log_every=every)
    assert [record["step"] for record in read_metrics(trainer.metrics_path)] == steps


# -- how much of the data --------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, 0.5, 0.74])
def test_limits_keep_the_first_batches(limit):
    kinds = ("train", "val", "test", "predict")
    trainer = make(max_epochs=2, **{f"limit_{kind}_batches": limit for kind in kinds})
    module = Net()
    trainer.fit(module, loader(4), loader(4))
    (tested,) = trainer.test(module, loader(4))
    predicted = trainer.predict(module, loader(4))
    assert trainer.global_step == 4
    first = FOUR[:2]
    assert list(module.seen.values()) == [first * 2, first * 2, first, first]
    assert tested["test"] == 1.5
    assert [batch.flatten().tolist() for batch in predicted] == first


@pytest.mark.parametrize(
    ("limit", "batches", "kept"),
    [(None, 4, 4), (1.0, 4, 4), (4, 4, 4), (99, 4, 4), (0.58, 50, 29)],  # 0.58 × 50 is 28.99…
)
def test_a_limit_is_rounded_and_cut_to_the_data(limit, batches, kept):
    options = {"limit_train_batches": limit, "limit_val_batches": limit}
    module, trainer = fit(loader(batches), loader(batches), max_epochs=1, **options)
    assert len(module.seen["train"]) == len(module.seen["validation"]) == kept
    assert trainer.global_step == kept


@pytest.mark.parametrize("zero", [0, 0.0])
def test_a_limit_of_zero_switches_validation_off(zero):
    class NoValidation(Net):
        def val_dataloader(self):
            raise AssertionError("not asked for")

    module, trainer = fit(
        loader(2), module=NoValidation(), max_epochs=1, limit_val_batches=zero, val_every=1
    )
    assert trainer.validations == 0
    module, trainer = fit(loader(2), loader(2), max_epochs=1, limit_val_batches=zero)
    assert module.seen["validation"] == []
    assert not trainer.has_validation


def test_each_of_several_validation_loaders_is_limited():
    class Several(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.see("validation", batch)

    module, _ = fit(
        loader(1), [loader(3), loader(4)], module=Several(), max_epochs=1, limit_val_batches=2
    )
    assert module.seen["validation"] == FOUR[:2] * 2


def test_overfit_batches_repeats_the_first_ones_unshuffled():
    shuffled = loader(4, shuffle=True)
    module, _ = fit(shuffled, loader(4, shuffle=True), max_epochs=3, overfit_batches=2)
    assert module.seen["train"] == module.seen["validation"] == FOUR[:2] * 3
    module, _ = fit(shuffled, max_epochs=2, overfit_batches=0.25)
    assert module.seen["train"] == FOUR[:1] * 2


def test_a_shuffled_loader_has_another_order_each_epoch_with_the_same_samples():
    module, _ = fit(loader(8, shuffle=True), max_epochs=2, seed=1)
    first, second = module.seen["train"][:8], module.seen["train"][8:]
    assert first != second
    for epoch in (first, second):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(16))
    assert first != sorted(first)
    again, _ = fit(loader(8, shuffle=True), max_epochs=2, seed=1)
    assert again.seen == module.seen


@pytest.mark.parametrize(("run", "batches"), [(True, 1), (3, 3)])
def test_fast_dev_run_tries_everything_and_writes_nothing(tmp_path, run, batches):
    trainer = Trainer(
        max_epochs=50,
        min_steps=100,
        fast_dev_run=run,
        log_with="tensorboard",
        log_every=1,
        project_dir="run",
        progress_bar=False,
        callbacks=ModelCheckpoint(monitor="val", every=1),
    )
    module = Net()
    trainer.fit(module, loader(4), loader(4))
    assert trainer.global_step == batches
    assert {"loss", "val"} <= trainer.callback_metrics.keys()
    for method in (trainer.validate, trainer.test, trainer.predict):
        method(module, loader(4))
    lengths = {"train": 1, "validation": 2, "test": 1, "predict": 1}
    assert {name: len(seen) / batches for name, seen in module.seen.items()} == lengths
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"project_dir": "run"}])
@pytest.mark.parametrize("word", ["best", "last"])
def test_fast_dev_run_ignores_ckpt_path_with_a_warning(caplog, word, options):
    saves = ModelCheckpoint(monitor="val")
    trainer = Trainer(fast_dev_run=True, progress_bar=False, callbacks=saves, **options)
    module, copy = Net(), Net()
    trainer.fit(module, loader(4), loader(4), ckpt_path=word)
    copy.load_state_dict(module.state_dict())
    for entry in (trainer.validate, trainer.test, trainer.predict):
        entry(module, loader(4), ckpt_path=word)
    assert (
        caplog.text.count(f"ckpt_path='{word}' is ignored: the module's current weights are used")
        == 4
    )
    assert all(map(torch.equal, module.parameters(), copy.parameters()))
    assert trainer.global_step == 1


def test_fast_dev_run_is_as_short_where_a_few_batches_are_overfitted():
    module, _ = fit(loader(4, shuffle=True), loader(4), fast_dev_run=2, overfit_batches=3)
    assert module.seen["train"] == module.seen["validation"] == FOUR[:2]


# -- the sanity check ------------------------------------------------------------------------------


class Draws(Net):
    """Draws from all generators in training and in validation."""

    def __init__(self):
        super().__init__()
        self.draws = []

    @staticmethod
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    def training_step(self, batch, batch_idx):
        self.draws.append(self.draw())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.draw()
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (2, 2), (9, 3), (-1, 3)])
def test_num_sanity_val_steps_batches_are_tried(steps, batches):
    module, trainer = fit(loader(1), loader(3), max_epochs=0, num_sanity_val_steps=steps)
    assert len(module.seen["validation"]) == batches
    assert trainer.validations == 0


def test_the_sanity_check_leaves_generators_order_metrics_and_limits_alone():
    class Counts(Draws):
        def __init__(self):
            super().__init__()
            self.count = torchmetrics.SumMetric()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.count.update(1.0)
            self.log("count", self.count)

        def on_train_start(self):
            assert self.trainer.callback_metrics == {}
            assert not self.trainer.sanity_checking

    runs = []
    for steps in (0, 2):
        torch.manual_seed(0)
        module = Counts()
        loaders = loader(4, shuffle=True), loader(3, shuffle=True)
        options = {"max_epochs": 2, "seed": 3, "num_sanity_val_steps": steps, "log_every": 1}
        _, trainer = fit(*loaders, module=module, **options)
        records = read_metrics(trainer.metrics_path)
        for record in records:
            del record["time"]
        assert trainer.callback_metrics["count"] == 3.0
        runs.append((module.draws, module.seen["train"], records))
    assert runs[0] == runs[1]


def test_an_error_in_validation_shows_before_training():
    class Broken(Net):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    module = Broken()
    with pytest.raises(ZeroDivisionError):
        fit(loader(2), loader(2), module=module, max_epochs=1, num_sanity_val_steps=1)
    assert module.seen["train"] == []


# -- kinds of loaders ------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for number in range(self.samples):
            yield torch.tensor([float(number)])


class Batches:
    """An iterable of ready batches that does not know its length."""

    def __init__(self, batches=None):
        pass

    def __iter__(self):
        yield from (torch.tensor(batch).reshape(-1, 1) for batch in FOUR)


def test_a_stream_without_length_has_epochs_and_short_windows():
    when = When()
    module, trainer = fit(
        DataLoader(Stream(7), batch_size=2),
        DataLoader(Stream(3), batch_size=2),
        max_epochs=2,
        gradient_accumulation_steps=3,
        callbacks=when,
    )
    assert trainer.global_step == 4
    assert when.validations == [2, 4]
    assert module.seen["train"] == [[0, 1], [2, 3], [4, 5], [6]] * 2
    assert module.seen["validation"] == [[0, 1], [2]] * 2
    assert trainer.callback_metrics["val"] == 1.0  # over samples: not the mean of 0.5 and 2


def test_a_stream_can_be_limited_by_a_number_but_not_by_a_fraction():
    module, _ = fit(DataLoader(Stream(8), batch_size=2), max_epochs=2, limit_train_batches=3)
    assert module.seen["train"] == FOUR[:3] * 2
    with pytest.raises(ValueError, match=r"limit_train_batches is 0\.5.*with a length.*an int"):
        fit(DataLoader(Stream(8), batch_size=2), max_epochs=2, limit_train_batches=0.5)


@pytest.mark.parametrize("kind", [list, tuple, Batches, "nested", DataLoader])
def test_plain_iterables_of_batches_are_loaders(kind):
    class Flat(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(torch.as_tensor(batch[0]).reshape(-1, 1), batch_idx)

    batches = list(Batches())
    data = [[each] for each in batches] if kind == "nested" else kind(batches)
    one_more = kind in ("nested", DataLoader)  # a dimension
    module, trainer = fit(data, module=Flat() if one_more else Net(), max_epochs=2)
    assert module.seen["train"] == FOUR * 2
    assert trainer.global_step == 8


def test_a_list_of_dicts_is_one_loader_and_a_list_of_loaders_several():
    class Dicts(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["x"], batch_idx)

        def validation_step(self, batch, batch_idx, dataloader_idx=None):
            self.seen["validation"].append(dataloader_idx)

    data = [{"x": batch} for batch in Batches()]
    module, _ = fit(data, data, module=Dicts(), max_epochs=1)
    assert module.seen["train"] == FOUR
    assert module.seen["validation"] == [None] * 4
    for kind in (list, tuple, UserList):  # the last is a sequence as Hydra's lists are
        module, _ = fit(data, kind([loader(1), Batches()]), module=Dicts(), max_epochs=1)
        assert module.seen["validation"] == [0, 1, 1, 1, 1]


def test_a_loader_of_ready_made_batches_weighs_them_by_their_size():
    sizes = [torch.zeros(1, 1), torch.ones(3, 1)]

    class Mean(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", batch.mean(), on_step=False, on_epoch=True)
            return loss

    _, trainer = fit(DataLoader(sizes, batch_size=None), module=Mean(), max_epochs=1)
    assert trainer.callback_metrics["mean"] == 0.75
    assert (trainer.batches_seen, trainer.samples_seen) == (2, 4)


def test_the_module_may_have_the_loaders():
    class Own(Net):
        def train_dataloader(self):
            return loader(2)

        def val_dataloader(self):
            return [loader(1)]

        def test_dataloader(self):
            return loader(3)

        def predict_dataloader(self):
            return loader(4)

    module, trainer = Own(), make(max_epochs=1)
    for method in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        method(module)
    lengths = {"train": 2, "validation": 2, "test": 3, "predict": 4}
    assert {name: len(seen) for name, seen in module.seen.items()} == lengths


def test_estimated_stepping_batches_is_known_in_configure_optimizers():
    known = []

    class Asks(Net):
        def configure_optimizers(self):
            known.append(
                (self.trainer.estimated_stepping_batches, self.trainer.num_training_batches)
            )
            return super().configure_optimizers()

    _, trainer = fit(loader(5), module=Asks(), max_epochs=3, gradient_accumulation_steps=2)
    assert trainer.global_step == 9
    trainer.validate(Net(), loader(2))
    after = trainer.estimated_stepping_batches, trainer.num_training_batches
    assert after == (9, 5)  # of the fit
    fit(loader(5), module=Asks(), max_epochs=3, max_steps=4)
    fit(DataLoader(Stream(4), batch_size=2), module=Asks(), max_epochs=3)
    assert known == [(9, 5), (4, 5), (None, None)]


def test_validate_and_test_return_the_metrics_of_each_loader():
    class Several(Net):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("test", batch.mean())

        def on_test_epoch_end(self):
            self.log("shared", 5.0)

    returned = make().test(Several(), [loader(1), loader(2)])
    assert returned == [
        {"test/dataloader_idx_0": 0.5, "shared": 5.0},
        {"test/dataloader_idx_1": 1.5, "shared": 5.0},
    ]
    assert make().validate(Net(), loader(2)) == [{"val": 1.5}]
    assert make().validate(Net(), loader(3)) == [{"val": pytest.approx(2.5)}]


def test_a_whole_number_may_be_written_as_a_float():
    arguments = {"max_steps": 2e0, "gradient_accumulation_steps": 2.0, "seed": 1e1}
    module, trainer = fit(loader(8), **arguments)
    assert trainer.global_step == 2
    assert len(module.seen["train"]) == 4
    assert isinstance(trainer.max_steps, int)
