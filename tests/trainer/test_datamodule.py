"""The datamodule: its place among the hooks, its batch hooks, its state in a checkpoint."""

import json
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trackers import GeneralTracker
from trainer import CheckpointError, DataModule, Trainer, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].clone())
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.batches.append(batch[0].clone())

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(samples=4, **arguments):
    data = TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2))
    return DataLoader(data, batch_size=2, **arguments)


class Data(DataModule):
    """Its training data depend on its state."""

    def __init__(self, samples=4):
        super().__init__()
        self.save_hyperparameters()
        self.samples = samples
        self.calls = []

    def setup(self, stage):
        self.calls.append(("setup", stage, type(self.trainer)))

    def train_dataloader(self):
        self.calls.append(("train_dataloader", self.samples))
        return loader(self.samples)

    def val_dataloader(self):
        return loader(2)

    def test_dataloader(self):
        return loader(2)

    def predict_dataloader(self):
        return loader(4)

    def teardown(self, stage):
        self.calls.append(("teardown", stage, type(self.trainer)))

    def on_exception(self, exception):
        self.calls.append(("on_exception", exception))

    def state_dict(self):
        return {"samples": self.samples, "table": torch.arange(3)}

    def load_state_dict(self, state):
        assert torch.equal(state["table"], torch.arange(3))
        self.samples = state["samples"]
        self.calls.append(("load_state_dict", self.samples))


def make(**arguments):
    arguments = {
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "checkpointing": False,
        "project_dir": "run",
        "seed": 0,
    } | arguments
    return Trainer(progress_bar=False, **arguments)


def test_a_datamodule_gives_the_loaders_of_every_phase():
    data, module = Data(), Net()
    trainer = make()
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2
    assert trainer.datamodule is data
    assert trainer.validate(module, datamodule=data) == [{}]
    assert trainer.test(module, datamodule=data) == [{}]
    assert len(trainer.predict(module, datamodule=data)) == 2
    stages = [call[:2] for call in data.calls if call[0] in ("setup", "teardown")]
    names = ("fit", "validate", "test", "predict")
    assert stages == [(hook, stage) for stage in names for hook in ("setup", "teardown")]
    assert {call[2] for call in data.calls if call[0] in ("setup", "teardown")} == {Trainer}
    assert data.trainer is None


def test_a_datamodule_may_come_in_the_place_of_loaders():
    data, module = Data(), Net()
    trainer = make()
    trainer.fit(module, data)
    trainer.validate(module, data)
    assert len(trainer.predict(module, data)) == 2
    with pytest.raises(ValueError, match="train_dataloaders and datamodule are both"):
        trainer.fit(module, data, datamodule=data)
    with pytest.raises(ValueError, match="dataloaders and datamodule are both"):
        trainer.test(module, data, datamodule=data)


def test_loaders_missing_in_a_datamodule_come_from_the_module():
    class WithLoader(Net):
        def train_dataloader(self):
            return loader()

    trainer = make()
    trainer.fit(WithLoader(), datamodule=DataModule())
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match="fit has no data"):
        make().fit(Net(), datamodule=DataModule())


def test_on_exception_of_a_datamodule_does_not_hide_the_error():
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    class Worse(Data):
        def on_exception(self, exception):
            super().on_exception(exception)
            raise OSError

    data = Worse()
    with pytest.raises(ZeroDivisionError) as raised:
        make().fit(Failing(), datamodule=data)
    assert data.calls[-2:] == [("on_exception", raised.value), ("teardown", "fit", Trainer)]


def test_hyper_parameters_of_a_datamodule_reach_trackers():
    class Tracker(GeneralTracker):
        name = "told"
        requires_logging_directory = False
        tracker = None

        def store_init_configuration(self, values):
            self.configuration = values

        def log(self, values, step, **kwargs):
            pass

    data, tracker = Data(samples=6), Tracker()
    assert data.hparams.samples == 6
    make(log_with=tracker).fit(Net(), datamodule=data)
    assert tracker.configuration["samples"] == 6


# -- state -----------------------------------------------------------------------------------------


def test_its_state_is_restored_before_the_loaders_are_made():
    trainer = make(checkpointing=True)
    trainer.fit(Net(), datamodule=Data(6))
    (saved,) = trainer.checkpoint_dir.iterdir()
    assert json.loads((saved / "datamodule.json").read_text())

    data = Data(2)
    trainer = make(checkpointing=True, max_epochs=2)
    trainer.fit(Net(), datamodule=data, ckpt_path="last")
    assert trainer.global_step == 6
    assert [call[:2] for call in data.calls] == [
        ("setup", "fit"),
        ("load_state_dict", 6),
        ("train_dataloader", 6),
        ("teardown", "fit"),
    ]
    for stage in ("validate", "test", "predict"):
        data = Data(2)
        (saved,) = trainer.checkpoint_dir.iterdir()
        getattr(make(), stage)(Net(), datamodule=data, ckpt_path=saved)
        assert data.samples == 6


def test_without_a_state_nothing_is_saved_or_loaded(caplog):
    class Empty(Data):
        def state_dict(self):
            return {}

    class Other(Data):
        pass

    trainer = make(checkpointing=True)
    trainer.fit(Net(), datamodule=Empty())
    (saved,) = trainer.checkpoint_dir.iterdir()
    assert not (saved / "datamodule.json").exists()
    for epochs, data in ((2, Data()), (3, Other())):  # nothing to load; the state of another class
        trainer = make(checkpointing=True, max_epochs=epochs)
        trainer.fit(Net(), datamodule=data, ckpt_path="last")
        assert "load_state_dict" not in [call[0] for call in data.calls]
    assert "state of a datamodule Data, which is not used" in caplog.text


def restore_refused():
    from trainer import PartialState

    class Refusing(Data):
        def load_state_dict(self, state):
            if PartialState().process_index == 1:
                raise KeyError("words")

    trainer = make(cpu=True, checkpointing=True)
    trainer.fit(Net(), datamodule=Refusing(8))
    try:
        make(cpu=True, checkpointing=True).fit(Net(), datamodule=Refusing(8), ckpt_path="last")
    except CheckpointError as error:
        return str(error)


def test_a_state_that_one_process_refuses_ends_all(ranks2):
    for said in ranks2(restore_refused):
        assert "Restoring the datamodule from" in said
        assert "words" in said


# -- batch hooks -----------------------------------------------------------------------------------


class Traced:
    """Batch hooks that say in the batch who changed it."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 100 * (1 + dataloader_idx)]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device == torch.device("cpu")
        return [batch[0] * 2]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.5]


def expected(samples, index=0):
    return [[(batch[0] + 100 * (1 + index)) * 2 + 0.5] for batch in loader(samples)]


@pytest.mark.parametrize("place", ["module", "datamodule", "plain"])
def test_batches_are_changed_before_and_after_their_transfer(place):
    class Changing(Traced, Net):
        pass

    class ChangingData(Traced, Data):
        pass

    module = Changing() if place == "module" else Net()
    data = {"module": Data, "datamodule": ChangingData, "plain": ChangingData}[place]()
    if place == "plain":
        plain = type("Plain", (Traced,), {})()
        plain.train_dataloader, plain.val_dataloader = data.train_dataloader, data.val_dataloader
        plain.predict_dataloader = data.predict_dataloader
        data = plain
    trainer = make()
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data)
    torch.testing.assert_close([[b] for b in module.batches], expected(4) + expected(2) * 2)
    predicted = trainer.predict(module, datamodule=data)
    torch.testing.assert_close([[b] for b in predicted], expected(4))


def test_batch_hooks_receive_the_dataloader_idx():
    class Changing(Traced, Net):
        pass

    module = Changing()
    make().test(module, [loader(2), loader(4)])
    torch.testing.assert_close([[b] for b in module.batches], expected(2) + expected(4, 1))


def test_a_datamodules_batch_hooks_go_before_the_modules(caplog):
    class Changing(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 0]

    class ChangingData(Data):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 1]

    module = Changing()
    make().fit(module, datamodule=ChangingData(2))
    torch.testing.assert_close(module.batches[0], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert "on_after_batch_transfer of the datamodule is used" in caplog.text


def test_items_are_counted_in_the_batch_that_the_step_receives():
    counted = []

    class Counting(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0][:1]]

        def count_items(self, batch):
            counted.append(len(batch[0]))
            return len(batch[0])

    trainer = make()
    trainer.fit(Counting(), loader())
    assert counted == [1, 1]
    assert trainer.items_seen == 2


def test_a_hook_that_forgets_to_return_the_batch_is_named():
    class Forgets(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            pass

    with pytest.raises(TypeError, match="on_before_batch_transfer returned None"):
        make().fit(Forgets(), loader())


class Noisy(Net):
    """Augments its batches at random, and drops out."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.other = [[], []]

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + torch.rand(2)]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * torch.randn(())]

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].clone())
        return self.layer(self.drop(batch[0])).square().mean()


def test_random_batch_hooks_draw_the_same_in_a_resumed_run():
    def run(folder, **arguments):
        torch.manual_seed(0)
        module = Noisy()
        saving = ModelCheckpoint(every=1, save_last=True)
        trainer = make(project_dir=folder, callbacks=[saving], max_epochs=2, **arguments)
        trainer.fit(module, loader(10, shuffle=True), ckpt_path="auto")
        return module

    whole = run("whole")
    first = run("parts", max_steps=3)  # inside the first epoch
    second = run("parts", max_steps=7)  # inside the second
    third = run("parts")
    parts = first.batches + second.batches + third.batches
    torch.testing.assert_close(parts, whole.batches, rtol=0, atol=0)
    for one, other in zip(whole.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len({float(batch.sum()) for batch in whole.batches}) == 10  # each its own draw


def test_batch_hooks_leave_the_generators_of_the_training_alone():
    draws = []

    class Draws(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            draws.append(torch.rand(()).item())

    for module in (Noisy(), Net()):
        module.drop = torch.nn.Identity()
        make(callbacks=[Draws()]).fit(module, loader(4))
    assert draws[:2] == draws[2:]


def draw_on_each():
    module = Noisy()
    torch.manual_seed(0)
    make(cpu=True).fit(module, loader(8))
    return [float(batch.sum()) for batch in module.batches]


def test_each_process_draws_for_its_own_batches_what_one_process_would(ranks2):
    alone = draw_on_each()
    shared = ranks2(draw_on_each)
    assert [batch for pair in zip(*shared, strict=True) for batch in pair] == alone


def test_dummy_batches_of_manual_optimisation_are_not_changed_twice(ranks2):
    for batches in ranks2(stand_in_batches):
        assert set(batches) == {1.0}


def stand_in_batches():
    seen = []

    class Manual(TrainModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 1]

        def training_step(self, batch, batch_idx):
            seen.extend(batch[0].flatten().tolist())
            optimizer = self.optimizers()
            self.manual_backward(self.layer(batch[0]).mean())
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    zeros = DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=2)
    make(cpu=True).fit(Manual(), zeros)
    return seen


class Collating(Data):
    def train_dataloader(self):
        return loader(self.samples, collate_fn=self.collate)

    def collate(self, samples):
        self.copied = pickle.loads(pickle.dumps(self))  # as a worker that is spawned gets it
        return torch.utils.data.default_collate(samples)


def test_a_pickled_datamodule_has_no_trainer():
    data = Collating()
    make().fit(Net(), datamodule=data)
    assert data.copied.samples == data.samples
    assert data.copied.trainer is None
