"""What users of Lightning and Accelerate expect beyond names: order, reach, refusals."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from callbacks import Callback, EarlyStopping, ModelCheckpoint, ProgressBar
from trainer import Accelerator, DataModule, Trainer, TrainModule, load_checkpoint_in_model
from trainer.errors import CheckpointError


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batches=3):
    return DataLoader(torch.ones(2 * batches, 2), 2)


def make(*callbacks, **arguments):
    settings = {"max_epochs": 1, "cpu": True, "progress_bar": False, "project_dir": "run"}
    return Trainer(callbacks=list(callbacks), **{**settings, **arguments})


# -- modules within modules, and what `setup` adds -------------------------------------------------


def test_a_module_within_a_module_knows_the_run_while_it_lasts():
    class Inner(Net):
        def forward(self, batch):
            self.log("inner", float(self.global_step))
            seen.append((self.current_epoch, self.global_step, self.trainer is trainer))
            return self.layer(batch)

    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Inner()])

        def setup(self, stage):
            self.parts.append(Inner())  # later than the run has begun

        def training_step(self, batch, batch_idx):
            return sum(part(batch).mean() for part in self.parts)

    seen, module, trainer = [], Outer(), make(max_epochs=2, log_every=1)
    trainer.fit(module, data(2))
    assert seen == [
        each
        for epoch, step in ((0, 0), (0, 1), (1, 2), (1, 3))
        for each in [(epoch, step, True)] * 2
    ]
    assert trainer.callback_metrics["inner"] == 3.0
    for part in module.parts:
        with pytest.raises(RuntimeError, match="Inner has no trainer"):
            _ = part.trainer


def test_a_submodule_created_after_setup_is_refused_when_it_logs():
    class Inner(TrainModule):
        def forward(self, batch):
            self.log("inner", 1.0)

    class Late(Net):
        def on_train_start(self):
            self.inner = Inner()

        def training_step(self, batch, batch_idx):
            return self.inner(batch)

    with pytest.raises(RuntimeError, match="only if it was created in __init__, setup or confi"):
        make().fit(Late(), data())


def test_callbacks_and_hooks_that_setup_adds_are_called_and_those_that_save_stay_last():
    class Added(Callback):
        def setup(self, trainer, module, stage):
            called.append(stage)

        def on_train_start(self, trainer, module):
            called.append("added")

    class Adding(Net):
        def setup(self, stage):
            self.trainer.callbacks += [ModelCheckpoint(every=2, dirpath="own"), Added()]
            self.on_train_end = lambda: called.append("assigned")

    called, trainer = [], make()
    trainer.fit(Adding(), data())
    assert called == ["fit", "added", "assigned"]
    assert [type(each) for each in trainer.callbacks] == [Added, ModelCheckpoint]
    assert [path.name for path in Path("own").iterdir()] == ["step-00000003"]
    assert not Path("run/checkpoints").exists()


@pytest.mark.parametrize("where", ["setup", "configure_model", "datamodule"])
def test_a_default_callback_makes_way_for_one_that_setup_adds(where):
    class Bar(ProgressBar):
        pass

    def add(stage=None):
        trainer.callbacks += [Bar(), ModelCheckpoint(every=2, save_top_k=-1)]

    module, trainer, datamodule = Net(), make(progress_bar=True), DataModule()
    datamodule.train_dataloader = data
    if where == "datamodule":
        datamodule.setup = add
    else:
        setattr(module, where, add)
    trainer.fit(module, datamodule=datamodule)
    assert [type(each) for each in trainer.callbacks] == [Bar, ModelCheckpoint]
    saved = sorted(path.name for path in trainer.checkpoint_dir.iterdir())
    assert saved == ["step-00000002", "step-00000003"]


# -- what would have no effect is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("max_grad_norm", r"pass Trainer\(max_grad_norm=...\)"),
        ("val_every", r"pass Trainer\(val_every=...\)"),
        ("limit_val_batches", r"pass Trainer\(limit_val_batches=...\)"),
        ("accumulate_grad_batches", "use trainer.gradient_accumulation_steps; setting it has no"),
        ("max_epochs", "no setter|can't set"),
    ],
)
def test_an_argument_that_is_set_later_is_refused(name, messages):
    trainer = make()
    with pytest.raises(AttributeError, match=messages):
        setattr(trainer, name, 3)
    trainer.mine = 3  # an attribute of one's own
    assert trainer.mine == 3


def test_a_class_method_on_an_instance_is_refused():
    make().fit(Net(), data())
    path = "run/checkpoints/step-00000003"
    module = Net()
    with pytest.raises(TypeError, match=r"Call it on the class: module = Net.load_from_checkpoint"):
        module.load_from_checkpoint(path)
    assert type(Net.load_from_checkpoint(path)) is Net


class Counts:
    def compute(self):
        return 1.0

    def reset(self):
        pass


@pytest.mark.parametrize(
    ("hook", "value", "given", "fix"),
    [
        ("training_step", 1.0, {"on_step": False}, "leave on_epoch out, or pass on_step=True."),
        ("training_step", Counts(), {}, "leave on_epoch out, or pass on_step=True."),
        ("validation_step", 1.0, {}, "leave on_epoch out."),
        ("on_train_epoch_end", 1.0, {}, "leave on_epoch out."),
    ],
)
def test_a_value_that_nothing_would_record_is_refused(hook, value, given, fix):
    def log(self, *_):
        self.log("lost", value, on_epoch=False, **given)

    said = "".join(f"{name}={choice}, " for name, choice in given.items())
    with pytest.raises(ValueError, match=rf"^log\('lost', {said}on_epoch=False\) .*; {fix}$"):
        make().fit(type("Logs", (Net,), {hook: log})(), data(), data())


# -- data, modes, loading --------------------------------------------------------------------------


@pytest.mark.parametrize("none", [None, lambda self: None, lambda self: []])
def test_a_fit_without_validation_data(none):
    module = type("NoValidation", (Net,), {"val_dataloader": none})()
    trainer = make()
    trainer.fit(module, data())
    assert trainer.global_step == 3
    assert trainer.validations == 0


def append_batch_norm(module):  # as BackboneFinetuning(train_bn=True) does
    module.model.requires_grad_(False).append(nn.BatchNorm1d(2))


def no_dropout(module):
    module.model[1][0].p = 0.0


@pytest.mark.parametrize(
    ("change", "hook", "warned"),
    [
        (lambda module: None, "", True),
        (lambda module: module.model.requires_grad_(False), "", False),
        (append_batch_norm, "", False),
        (no_dropout, "", False),
        (lambda module: module.model[1][0].train(), "", False),
        (lambda module: module.eval(), "", False),  # which `fit` undoes
        (lambda module: None, "on_train_start", False),
        (lambda module: None, "on_train_batch_start", False),
    ],
)
def test_dropout_in_evaluation_mode_is_warned_of(change, hook, warned, caplog):
    class Pretrained(Net):
        def __init__(self):
            super().__init__()
            dropout = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
            self.model = nn.Sequential(nn.Linear(2, 2), dropout).eval()

    module, callback = Pretrained(), Callback()
    change(module)
    if hook:
        setattr(callback, hook, lambda trainer, module, *_: module.model.train())
    make(callback).fit(module, data())
    texts = [each.getMessage() for each in caplog.records if "dropout" in each.getMessage()]
    expected = ["model is in evaluation mode"] if warned else []
    assert [text.partition(",")[0] for text in texts] == expected


def test_on_load_checkpoint_may_resize_what_the_weights_are_loaded_into():
    class Bank(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(0))

        def training_step(self, batch, batch_idx):
            self.bank = torch.cat([self.bank, torch.ones(1)])
            return super().training_step(batch, batch_idx)

        def test_step(self, batch, batch_idx):
            self.log("size", len(self.bank))

        def on_save_checkpoint(self, checkpoint):
            checkpoint["size"] = len(self.bank)

        def on_load_checkpoint(self, checkpoint):
            self.bank = torch.zeros(checkpoint["size"])

    make().fit(Bank(), data())
    loaded = Bank.load_from_checkpoint("run/checkpoints/step-00000003")
    assert loaded.bank.tolist() == [1.0] * 3
    assert make().test(Bank(), data(), ckpt_path="last") == [{"size": 3.0}]
    resumed = Bank()
    make(max_epochs=2).fit(resumed, data(), ckpt_path="auto")
    assert resumed.bank.tolist() == [1.0] * 6


def test_an_error_while_an_optimizer_is_toggled_freezes_nothing_for_good():
    class Two(Net):
        fails = True

        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 1)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.toggle_optimizer(first)
            if self.fails:
                raise ZeroDivisionError
            self.manual_backward(self.layer(batch).mean() + self.other(batch).mean())
            assert self.other.weight.grad is None
            first.step()
            self.untoggle_optimizer(first)

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.layer, self.other)]

    module = Two()
    with pytest.raises(ZeroDivisionError):
        make().fit(module, data())
    assert all(parameter.requires_grad for parameter in module.parameters())
    module.fails = False
    make().fit(module, data())


# -- the Accelerator -------------------------------------------------------------------------------


def test_the_signature_of_a_prepared_model_is_its_own():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, input_ids, attention_mask=None):
            return self.layer(input_ids)

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(Named())
    for each in (model, accelerator.unwrap_model(model), copy.deepcopy(model)):
        assert list(inspect.signature(each.forward).parameters) == ["input_ids", "attention_mask"]
        assert each(input_ids=torch.ones(1, 2)).dtype == torch.float32


def test_load_state_refuses_a_folder_of_weights():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_model(model, "weights")
    with pytest.raises(CheckpointError, match=r"holds weights.*load_checkpoint_in_model\(model"):
        accelerator.load_state("weights")


def test_an_index_of_weights_may_be_the_mapping_alone(tmp_path):
    from safetensors.torch import save_file

    model = nn.Linear(2, 1)
    save_file(dict(model.state_dict()), tmp_path / "part.safetensors")
    (tmp_path / "index.json").write_text(
        json.dumps(dict.fromkeys(model.state_dict(), "part.safetensors"))
    )
    other = nn.Linear(2, 1)
    load_checkpoint_in_model(other, tmp_path / "index.json")
    assert torch.equal(other.weight, model.weight)


class Counting(Callback):
    """Counts updates, and what it was called for."""

    def __init__(self, key="Counting", adds=()):
        self.updates, self.key, self.adds, self.set_up = 0, key, list(adds), 0

    @property
    def state_key(self):
        return self.key

    def setup(self, trainer, module, stage):
        self.set_up += 1
        while self.adds:
            trainer.callbacks.insert(0, self.adds.pop())

    def on_train_step_end(self, trainer, module):
        self.updates += 1

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


@pytest.mark.parametrize("how", ["set", "inserted", "from setup", "in configure_model"])
def test_callbacks_that_come_later_are_set_up_once_and_restored(how):
    def start(epochs):
        counting = Counting()
        module = Net()
        trainer = make(max_epochs=epochs, checkpointing=True)
        if how == "set":
            trainer.callbacks = [*trainer.callbacks, counting]
        elif how == "inserted":
            module.setup = lambda stage: trainer.callbacks.insert(0, counting)
        elif how == "from setup":
            module.setup = lambda stage: trainer.callbacks.append(Counting("adds", [counting]))
        else:
            module.configure_model = lambda: trainer.callbacks.append(counting)
        trainer.fit(module, data(), ckpt_path="auto")
        assert counting.set_up == 1
        assert counting.updates == trainer.global_step > 0
        return trainer.global_step

    first = start(1)
    assert start(2) == 2 * first


def test_callbacks_added_in_setup_are_checked_like_those_given():
    class Twice(Net):
        def setup(self, stage):
            self.trainer.callbacks += [Counting(), Counting()]

    with pytest.raises(ValueError, match="Two callbacks have the state_key 'Counting'"):
        make().fit(Twice(), data())


def test_callbacks_that_setup_adds_in_every_stage_are_there_once():
    kept = EarlyStopping("loss", patience=9)

    class Adds(Net):
        def setup(self, stage):
            self.trainer.callbacks += [Counting(), kept]

        def test_step(self, batch, batch_idx):
            self.log("loss", self.layer(batch).mean())

        validation_step = test_step

    module, trainer = Adds(), make(max_epochs=1)
    trainer.fit(module, data(), data())
    added = list(trainer.callbacks)
    trainer.test(module, data())
    assert trainer.callbacks == added
    assert added.count(kept) == 1
    assert [type(each) for each in added].count(Counting) == 1


def test_callbacks_may_be_set_as_they_are_given():
    trainer, counting = make(), Counting()
    trainer.callbacks = counting
    assert trainer.callbacks == [counting]
    trainer.callbacks = None
    assert trainer.callbacks == []
    with pytest.raises(TypeError, match="must be a callback or a list of them"):
        trainer.callbacks = 3


def adding(callback):
    """Return a module whose `setup` adds a callback."""
    module = Net()
    module.setup = lambda stage: module.trainer.callbacks.append(callback)
    return module


def test_hooks_of_callbacks_added_in_setup_are_checked_like_those_given(caplog):
    class Lightning(Callback):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            pass

    class Wrong(Callback):
        def setup(self, trainer):
            pass

    class Misspelt(Callback):
        def on_train_strat(self, trainer, module):
            pass

    def messages(fit):
        caplog.clear()
        try:
            fit()
        except TypeError as error:
            return str(error)
        return [record.getMessage() for record in caplog.records]

    for callback in (Lightning(), Wrong(), "x", Misspelt()):
        given = messages(lambda each=callback: make(each, fast_dev_run=True).fit(Net(), data()))
        added = messages(lambda each=callback: make(fast_dev_run=True).fit(adding(each), data()))
        assert given == added
        assert given


def test_a_module_within_another_stays_that_of_its_own_run():
    class Around(TrainModule):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def validation_step(self, batch, batch_idx):
            self.log("around", self.inner.layer(batch).mean())

    class Evaluates(Callback):
        def on_train_epoch_start(self, trainer, module):
            make(project_dir="other").validate(Around(module), data())
            assert module.trainer is trainer

    trainer = make(Evaluates())
    trainer.fit(Net(), data())
    assert trainer.global_step > 0


def test_attributes_that_a_subclass_of_the_trainer_has_may_be_set():
    class Mine(Trainer):
        strategy = None

    trainer = Mine(project_dir="run")
    trainer.strategy = "own"
    assert trainer.strategy == "own"


def test_a_parameter_replaced_by_on_load_checkpoint_is_refused():
    class Replaces(Net):
        def on_load_checkpoint(self, checkpoint):
            self.layer = torch.nn.Linear(2, 1)

    make(max_epochs=1, checkpointing=True).fit(Net(), data())
    with pytest.raises(
        RuntimeError,
        match=r"Replaces has replaced parameters that are trained.*hold the old parameters",
    ):
        make(max_epochs=2, checkpointing=True).fit(Replaces(), data(), ckpt_path="auto")


def test_a_frozen_part_may_be_made_anew_in_on_load_checkpoint():
    class Teaches(Net):
        def __init__(self):
            super().__init__()
            self.teacher = torch.nn.Linear(2, 1).requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), 0.1)

    class Anew(Teaches):
        def on_load_checkpoint(self, checkpoint):
            self.teacher = torch.nn.Linear(2, 1).requires_grad_(False)

    saved, module = Teaches(), Anew()
    make(max_epochs=1, checkpointing=True).fit(saved, data())
    make(max_epochs=2, checkpointing=True).fit(module, data(), ckpt_path="auto")
    assert torch.equal(module.teacher.weight, saved.teacher.weight)
    assert not torch.equal(module.layer.weight, saved.layer.weight)
