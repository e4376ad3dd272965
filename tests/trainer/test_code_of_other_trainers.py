"""What code written for Lightning brings along is called, translated, or refused with a hint."""

import copy
import inspect
import logging
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import callbacks
from callbacks import Callback
from tests.helpers.line import Line
from trackers import GeneralTracker, read_metrics
from trainer import DataModule, Trainer, TrainModule, hints
from trainer.cli import main
from trainer.lightning import LightningModule
from trainer.migration import refusals, table
from trainer.migration.values import instead_of

cloudpickle = pytest.importorskip("cloudpickle")


def words(text):
    return text.split()


# Every hook of Lightning 1.5 to 2.5, by who has it.
MODULE_HOOKS = words("""
    on_fit_start on_fit_end on_train_start on_train_end on_validation_start on_validation_end
    on_test_start on_test_end on_predict_start on_predict_end on_train_batch_start
    on_train_batch_end on_validation_batch_start on_validation_batch_end on_test_batch_start
    on_test_batch_end on_predict_batch_start on_predict_batch_end on_validation_model_zero_grad
    on_validation_model_eval on_validation_model_train on_test_model_eval on_test_model_train
    on_predict_model_eval on_predict_model_train on_train_epoch_start on_train_epoch_end
    on_validation_epoch_start on_validation_epoch_end on_test_epoch_start on_test_epoch_end
    on_predict_epoch_start on_predict_epoch_end on_before_zero_grad on_before_backward
    on_after_backward on_before_optimizer_step configure_sharded_model configure_model prepare_data
    setup teardown train_dataloader val_dataloader test_dataloader predict_dataloader
    transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer on_load_checkpoint
    on_save_checkpoint training_step validation_step test_step predict_step training_step_end
    validation_step_end test_step_end training_epoch_end validation_epoch_end test_epoch_end
    configure_callbacks configure_optimizers configure_gradient_clipping backward optimizer_step
    optimizer_zero_grad lr_scheduler_step tbptt_split_batch log_grad_norm on_epoch_start
    on_epoch_end on_pretrain_routine_start on_pretrain_routine_end on_train_dataloader
    on_val_dataloader on_test_dataloader on_predict_dataloader on_post_move_to_device on_hpc_save
    on_hpc_load
""")
CALLBACK_HOOKS = words("""
    setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end
    on_train_batch_start on_train_batch_end on_train_epoch_start on_train_epoch_end
    on_validation_epoch_start on_validation_epoch_end on_test_epoch_start on_test_epoch_end
    on_predict_epoch_start on_predict_epoch_end on_validation_batch_start on_validation_batch_end
    on_test_batch_start on_test_batch_end on_predict_batch_start on_predict_batch_end on_train_start
    on_train_end on_validation_start on_validation_end on_test_start on_test_end on_predict_start
    on_predict_end on_exception state_dict load_state_dict on_save_checkpoint on_load_checkpoint
    on_before_backward on_after_backward on_before_optimizer_step on_before_zero_grad
    on_configure_sharded_model on_before_accelerator_backend_setup on_init_start on_init_end
    on_epoch_start on_epoch_end on_batch_start on_batch_end on_pretrain_routine_start
    on_pretrain_routine_end on_keyboard_interrupt
""")
DATA_HOOKS = words("""
    prepare_data setup teardown train_dataloader val_dataloader test_dataloader predict_dataloader
    transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer state_dict
    load_state_dict on_exception
""")


class Net(Line):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).mean())

    test_step = validation_step


def loader(samples=4):
    return DataLoader(TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2)), batch_size=2)


def make(**arguments):
    arguments = {"max_epochs": 1, "num_sanity_val_steps": 0, "checkpointing": False} | arguments
    return Trainer(progress_bar=False, project_dir="run", **arguments)


def with_method(base, name, method):
    """An instance of a class with one method more."""
    return type("Ported", (base,), {name: method})()


def nothing(self, *args, **kwargs):
    """A hook."""


# -- hooks -----------------------------------------------------------------------------------------


def known_and_refused(base, refused):
    known = {name for name in dir(base) if not name.startswith("_")}
    assert not known & set(refused), "a hook is called and refused"
    return known | set(refused)


def test_every_hook_of_lightning_is_called_or_refused():
    assert set(MODULE_HOOKS) <= known_and_refused(TrainModule, refusals.UNCALLED["module"])
    assert set(CALLBACK_HOOKS) <= known_and_refused(Callback, refusals.UNCALLED["callback"])
    assert set(DATA_HOOKS) <= known_and_refused(DataModule, hints.HOOKS)


def test_hooks_that_both_have_are_called_with_the_same_arguments():
    """Those of Lightning 2, written out: a ported method must not be called with fewer."""
    signatures = {
        "on_train_batch_start": "batch batch_idx",
        "on_train_batch_end": "outputs batch batch_idx",
        "on_validation_batch_start": "batch batch_idx dataloader_idx",
        "on_validation_batch_end": "outputs batch batch_idx dataloader_idx",
        "on_test_batch_start": "batch batch_idx dataloader_idx",
        "on_test_batch_end": "outputs batch batch_idx dataloader_idx",
        "on_predict_batch_start": "batch batch_idx dataloader_idx",
        "on_predict_batch_end": "outputs batch batch_idx dataloader_idx",
        "on_before_zero_grad": "optimizer",
        "on_before_backward": "loss",
        "on_before_optimizer_step": "optimizer",
    }
    for name in (name for name in MODULE_HOOKS if name.startswith("on_")):
        if (
            name not in refusals.UNCALLED["module"]
            and "transfer" not in name
            and "checkpoint" not in name
        ):
            takes = list(inspect.signature(getattr(TrainModule, name)).parameters)[1:]
            assert takes == signatures.get(name, "").split(), name
    for name in (name for name in CALLBACK_HOOKS if name in signatures):
        takes = list(inspect.signature(getattr(Callback, name)).parameters)[3:]
        assert takes == signatures[name].split(), name


def test_all_findings_of_a_run_come_in_one_error():
    class Old(Net):
        def training_step(self, batch, batch_idx, optimizer_idx):
            pass

        def training_epoch_end(self, outputs):
            pass

        def on_train_batch_end(self, outputs):
            pass

        def setup(self, this, much):
            pass

        def state_dict(self):
            pass

        configure_optimizers = TrainModule.configure_optimizers

    class Listener(Callback):
        def on_epoch_end(self, trainer, module):
            pass

    trainer = make(callbacks=[Listener()])
    with pytest.raises(TypeError) as error:
        trainer.fit(Old(), loader(), datamodule=None)
    lines = str(error.value).splitlines()
    assert [line.partition("(")[0] for line in lines[1:3]] == [
        "Old.setup",
        "Old.on_train_batch_end",
    ]
    assert "Old defines training_epoch_end" in lines[0]
    assert "Listener defines on_epoch_end" in lines[3]
    assert "Old.training_step takes optimizer_idx" in lines[4]
    assert "Old does not define configure_optimizers" in lines[5]
    assert "Old.state_dict()" in lines[6]
    assert len(lines) == 7


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_refused_hook_is_named_before_anything_runs(stage):
    called = []

    class Old(Net):
        def prepare_data(self):
            called.append("prepare_data")

        def validation_epoch_end(self, outputs):
            pass

    with pytest.raises(TypeError, match=r"Old defines validation_epoch_end.*never called.*on_val"):
        getattr(make(), stage)(Old(), loader())
    assert called == []


def test_each_hook_that_many_write_by_habit_is_refused():
    of_module = hints.HOOKS | hints.MODULE_HOOKS
    of_callback = hints.HOOKS | hints.CALLBACK_HOOKS
    module = type("Ported", (Net,), dict.fromkeys(of_module, nothing))()
    callback = type("Listener", (Callback,), dict.fromkeys(of_callback, nothing))()
    with pytest.raises(TypeError) as error:
        make(callbacks=[callback]).fit(module, loader())
    said = str(error.value)
    for owner, names in (("Ported", of_module), ("Listener", of_callback)):
        for name, use in names.items():
            assert f"{owner} defines {name}, which is never called here: {use}. (If" in said
    assert len(said.splitlines()) == len(of_module) + len(of_callback)


@pytest.mark.parametrize(
    ("base", "name", "instead"),
    [(*path.split("."), instead) for path, instead in table.HOOKS_OF_CALLBACKS.items()],
)
def test_what_only_one_kind_of_callback_would_be_asked_is_refused_there(base, name, instead):
    base = getattr(callbacks, base)
    assert not hasattr(base, name)
    callback = with_method(base, name, nothing)
    (said,) = refusals.uncalled(callback, "callback")
    assert said.startswith(f"Ported defines {name}, which is never called here: {instead}. ")
    assert refusals.uncalled(with_method(Callback, name, nothing), "callback") == []


def test_a_module_of_lightning_may_be_trained_but_not_with_a_hook_that_its_trainer_calls():
    class Ported(Net, LightningModule):
        pass

    make().fit(Ported(), loader())
    with pytest.raises(TypeError, match="defines configure_callbacks, which is never called here"):
        make().fit(with_method(Ported, "configure_callbacks", nothing), loader())


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_state_dict_that_torch_could_not_call_is_refused_before_training(name):
    class Own(Net):
        pass

    setattr(Own, name, lambda self: {})
    text = rf"Own.{name}\(\) cannot be called as torch's .*: def {name}\(self, \*args, \*\*kwargs\)"
    with pytest.raises(TypeError, match=text):
        make().fit(Own(), loader())
    setattr(Own, name, lambda self, *args, **kwargs: getattr(Net, name)(self, *args, **kwargs))
    make().fit(Own(), loader())


def test_a_callback_written_for_lightning_names_its_state_by_its_arguments():
    class Counter(Callback):
        def __init__(self, what):
            self.what = what

        @property
        def state_key(self):
            return self._generate_state_key(what=self.what)

    keys = {Counter(what).state_key for what in ("epochs", "batches")}
    assert len(keys) == 2
    assert all("Counter{'what': '" in key for key in keys)


def test_a_datamodule_may_have_refused_hooks_too():
    data = with_method(DataModule, "on_epoch_end", nothing)
    with pytest.raises(TypeError, match="Ported defines on_epoch_end"):
        make().fit(Net(), datamodule=data)


def test_a_function_that_a_callback_keeps_is_no_hook(caplog):
    class Telling(Callback):
        def __init__(self, on_save):
            self.on_save = on_save

    make(callbacks=[Telling(nothing)]).fit(Net(), loader())
    assert "on_save" not in caplog.text


def test_what_a_refused_hook_recommends_exists():
    import callbacks
    import trainer

    places = (TrainModule, Callback, DataModule, callbacks, trainer)
    known = {name for place in places for name in dir(place)}
    known |= {*inspect.signature(Trainer).parameters, "set_to_none", "dataloader_idx"}
    for texts in (
        refusals.UNCALLED["module"],
        refusals.UNCALLED["callback"],
        table.TRAINER_METHODS,
        refusals.ATTRIBUTES,
    ):
        for name, hint in texts.items():
            for word in hint.replace("(", " ").replace(",", " ").replace(";", " ").split():
                if word.startswith(("on_", "self.", "configure_", "trainer.")):
                    found = word.strip(".:").removeprefix("self.").removeprefix("trainer.")
                    assert found in known or hasattr(Trainer, found) or found in vars(make()), (
                        name,
                        word,
                    )


def test_what_is_recommended_for_them_are_arguments():
    known = inspect.signature(Trainer).parameters
    for ported, general in refusals.ARGUMENTS.items():
        assert ported not in known
        for value in (..., 2, 0.5, True, False, "no"):
            text = instead_of(ported, general, value)
            name = text.partition("=")[0]
            if name.isidentifier() and "=" in text:
                assert name in known


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("devices", 1, "leave it out: one process is the default"),
        ("devices", 4, "use trainer launch --num_processes 4 script.py"),
        ("devices", "2", "use trainer launch --num_processes 2 script.py"),
        ("devices", ..., "use trainer launch --num_processes N script.py"),
        ("devices", "auto", "use trainer launch script.py"),
        ("gpus", -1, "use trainer launch script.py"),
        ("gpus", 0, "use cpu=True."),
        ("gpus", None, "leave it out"),
        ("gpus", [0], "leave it out: one process is the default"),
        ("gpus", [1], "use trainer launch --gpu_ids 1 script.py"),
        ("devices", "1,", "use trainer launch --gpu_ids 1 script.py"),
        ("devices", "0, 2", "use trainer launch --gpu_ids 0,2 script.py"),
        ("num_nodes", 1, "leave it out"),
        ("num_nodes", 3, "use trainer launch --num_machines 3 --machine_rank R "),
        ("tpu_cores", 8, "use trainer launch --tpu script.py"),
        ("precision", 32, "leave it out: float32"),
        ("precision", "32-true", "leave it out: float32"),
        ("precision", "bf16-mixed", "use mixed_precision='bf16'"),
        ("precision", "16-mixed", "use mixed_precision='fp16'"),
        ("precision", "bf16-true", "use dtype='bfloat16'"),
        ("precision", "64", "use dtype='float64'"),
        ("precision", ..., "use mixed_precision='bf16' or 'fp16'"),
        ("precision", None, "leave it out"),
        ("strategy", "ddp", "several processes train with DDP"),
        ("strategy", "fsdp", "use fsdp_plugin=FullyShardedDataParallelPlugin"),
        ("strategy", "deepspeed_stage_2", "use deepspeed_plugin=DeepSpeedPlugin"),
        ("strategy", "auto", "leave it out"),
        ("val_check_interval", 0.25, "val_every='0.25 epochs'"),
        ("val_check_interval", 1.0, "val_every='1 epoch'"),
        ("val_check_interval", 100, "val_every='100 steps', where a step is an update"),
        ("val_check_interval", {"minutes": 30}, "val_every='30 minutes'"),
        ("check_val_every_n_epoch", 5, "val_every='5 epochs'"),
        ("check_val_every_n_epoch", None, "val_every='500 steps', which counts across epochs"),
        ("eval_steps", 20, "val_every='20 steps'"),
        ("eval_steps", 20.0, "val_every='20 steps'"),
        ("eval_steps", 0.1, "val_every='N steps'"),  # a part of the run
        ("eval_steps", True, "val_every='N steps'"),
        ("eval_strategy", "epoch", "leave it out: val_every='1 epoch' is the default"),
        ("save_strategy", "no", "use checkpointing=False."),
        ("save_total_limit", None, "ModelCheckpoint(save_top_k=-1)"),
        ("num_train_epochs", 3.0, "use max_epochs=3."),
        ("num_train_epochs", 0.5, "use max_steps"),
        ("greater_is_better", False, "mode='min'"),
        ("gradient_clip_algorithm", "value", "use max_grad_value."),
        ("accumulate_grad_batches", {0: 2}, "callbacks=[GradientAccumulationScheduler({0: 2})]"),
        ("terminate_on_nan", False, "use non_finite='ignore'."),
        ("epochs", 3, "use max_epochs."),
        ("gradient_clip_val", 1.0, "max_grad_norm"),
        ("logger", True, "log_with"),
        ("auto_lr_find", True, "Tuner(...).lr_find"),
        ("output_dir", "runs", "use project_dir"),
        ("train_dataset", [1], "fit(module, DataLoader("),
        ("even_batches", True, "leave it out: each process reads separate whole batches"),
        ("ddp_backend", "gloo", "InitProcessGroupKwargs(backend=...)"),
        # what is on by default
        ("enable_checkpointing", True, "leave it out: checkpointing=True is the default"),
        ("enable_checkpointing", False, "use checkpointing=False."),
        ("progress_bar_refresh_rate", 0, "use progress_bar=False."),
        ("disable_tqdm", True, "use progress_bar=False."),
        ("use_distributed_sampler", False, "DataLoaderConfiguration(presharded=True)"),
        # what is off by default
        ("logger", False, "leave it out: False asks for nothing"),
        ("profiler", None, "leave it out: None asks for nothing"),
        ("torch_compile", False, "leave it out: False asks for nothing"),
        ("deepspeed", None, "leave it out: None asks for nothing"),
        ("fsdp", "", "leave it out: '' asks for nothing"),
        ("report_to", "none", "leave it out: 'none' asks for nothing"),
        ("weight_decay", 0.0, "use configure_optimizers"),  # torch's default is another
    ],
)
def test_what_to_pass_depends_on_the_value(argument, value, said):
    text = refused(argument, value)
    assert f"no argument '{argument}'" in text
    assert said in text


def refused(argument, value):
    """What `trainer migrate` says of an argument."""
    known = inspect.signature(Trainer).parameters
    return refusals.argument_refusals({argument: value}, known)[argument]


HINTED = [  # each hint is code
    {"check_val_every_n_epoch": 5},
    {"eval_steps": 500.0},
    {"gpus": 0},
    {"precision": "bf16-mixed"},
    {"num_train_epochs": 3.0},
    {"save_steps": 500},
    {"save_total_limit": None},
    {"save_total_limit": 2},
    {"save_only_model": True},
    {"save_strategy": "steps"},
    {"enable_checkpointing": False},
    {"enable_model_summary": True},
    {"track_grad_norm": 2},
    {"log_gpu_memory": "all"},
    {"accumulate_grad_batches": {0: 2, 4: 1}},
    {"terminate_on_nan": False},
    {"torch_compile": True},
]


@pytest.mark.parametrize("ported", HINTED, ids=str)
def test_what_to_pass_is_taken(ported):
    hint = refused(*ported.popitem()).partition("; use ")[2].removesuffix(".")
    eval(f"Trainer(progress_bar=False, {hint})", vars(callbacks) | {"Trainer": Trainer})


@pytest.mark.parametrize(
    ("ported", "started", "machines"),
    [({"devices": 3}, 3, 1), ({"devices": "auto"}, 1, 1), ({"num_nodes": 2}, 4, 2)],
)
def test_the_command_to_use_starts_the_processes(ported, started, machines, capsys):
    Path("script.py").touch()
    command = re.search(r"use trainer (launch.* script\.py)", refused(*ported.popitem()))[1]
    words = [{"R": "0", "HOST": "localhost", "N": "4"}.get(each, each) for each in command.split()]
    assert main([words[0], "--cpu", "--dry_run", *words[1:]]) == 0
    messages = capsys.readouterr().out
    assert f"processes on this machine  {started}," in messages
    assert re.search(rf"machines +{machines}\n", messages)


def test_all_arguments_of_another_trainer_are_answered_at_once():
    with pytest.raises(TypeError) as error:
        Trainer(gpus=1, epoch_limit=2, precision=16, max_epoch=3)
    assert str(error.value).splitlines() == [
        "Trainer has no argument 'gpus'; use trainer launch --num_processes N script.py.",
        "Trainer has no argument 'epoch_limit'; it has "
        f"{', '.join(inspect.signature(Trainer).parameters)}.",
        "Trainer has no argument 'precision'; use mixed_precision='bf16' or 'fp16', or "
        "dtype='bfloat16'.",
        "Trainer has no argument 'max_epoch'. Did you mean 'max_epochs'?",
    ]


def test_a_text_for_an_argument_that_another_trainer_has_too_is_answered_with_the_others():
    with pytest.raises(TypeError) as error:
        Trainer(gradient_clip_val=1.0, accelerator="gpu", devices=2)
    assert str(error.value).splitlines() == [
        "Trainer has no argument 'gradient_clip_val'; use max_grad_norm=N, or max_grad_value=N if "
        "the algorithm is 'value'.",
        "Trainer got accelerator='gpu'; use an Accelerator, or leave it out: the device is "
        "selected automatically, and cpu=True forces the CPU.",
        "Trainer has no argument 'devices'; use trainer launch --num_processes N script.py.",
    ]


@pytest.mark.parametrize("name", ["eval_delay", "fp16_backend"])
def test_a_name_that_resembles_none_is_answered_by_all(name):
    assert re.search(rf"'{name}'; it must be one of .*'val_every'\.$", refused(name, 1))


def test_methods_that_subclasses_of_the_hugging_face_trainer_override_are_not_ours():
    assert not any(hasattr(Trainer, name) for name in table.TRAINER_METHODS)


def test_subclasses_with_methods_of_their_own_train():
    class MyTrainer(Trainer):
        def evaluate(self, module, loader):
            return self.validate(module, loader)

    trainer = MyTrainer(max_epochs=1, checkpointing=False, progress_bar=False, project_dir="run")
    trainer.fit(Net(), loader())
    assert trainer.global_step == 2
    assert len(trainer.evaluate(Net(), loader())) == 1


def test_methods_of_the_hugging_face_trainer_are_hinted_at():
    for name, use in (("train", "fit"), ("evaluate", "validate")):
        with pytest.raises(AttributeError, match=rf"'{name}': use trainer\.{use}\(module, loader"):
            getattr(make(), name)


def test_the_type_of_a_module_is_that_of_its_parameters():
    class Whole(TrainModule):
        pass

    assert Net().dtype == torch.float32
    assert Net().double().dtype == torch.float64
    assert Whole().dtype == torch.get_default_dtype()
    own = Whole()
    own.dtype = "of its own"
    assert own.dtype == "of its own"


def test_a_layer_or_flag_with_the_name_of_a_refused_hook_is_no_hook():
    module = Net()
    module.on_epoch_end = torch.nn.Linear(2, 1)
    module.configure_callbacks = True
    trainer = make()
    trainer.fit(module, loader())
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("on_before_optimizer_step", lambda self, optimizer, optimizer_idx: None),
        ("on_predict_epoch_end", lambda self, results: None),
        ("on_train_batch_end", lambda self, outputs: None),
        ("on_train_start", lambda self, trainer: None),
        ("optimizer_step", lambda self, epoch, batch_idx, optimizer, idx, closure: None),
        ("configure_gradient_clipping", lambda self, optimizer, idx, value, kind: None),
        ("lr_scheduler_step", lambda self, scheduler, idx, metric: None),
    ],
)
def test_a_hook_with_other_arguments_is_refused_before_anything_runs(name, method):
    module = with_method(Net, name, method)
    with pytest.raises(TypeError, match=rf"Ported\.{name}.*other arguments.*def {name}\(self"):
        make().predict(module, loader())
    with pytest.raises(RuntimeError, match="no trainer"):
        module.trainer


def test_hooks_that_insist_on_a_loaders_number_get_0_with_one():
    seen = []

    class Old(Net):
        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx):
            seen.append(("start", batch_idx, dataloader_idx))

    class Listener(Callback):
        def on_validation_batch_end(
            self, trainer, module, outputs, batch, batch_idx, dataloader_idx
        ):
            seen.append(("end", batch_idx, dataloader_idx))

    make(callbacks=[Listener()]).validate(Old(), loader())
    assert seen == [("start", 0, 0), ("end", 0, 0), ("start", 1, 0), ("end", 1, 0)]


# -- steps -----------------------------------------------------------------------------------------


def test_steps_may_leave_out_the_number_of_the_batch():
    seen = []

    class Short(Net):
        def training_step(self, batch):
            seen.append("training")
            return super().training_step(batch, 0)

        def validation_step(self, batch, dataloader_idx=0):
            seen.append(("validation", dataloader_idx))

        def predict_step(self, batch, **options):
            return len(batch[0])

    module = Short()
    make().fit(module, loader(2), [loader(2), loader(2)])
    assert seen == ["training", ("validation", 0), ("validation", 1)]
    assert make().predict(module, loader()) == [2, 2]
    assert make().predict(module, [loader(), loader(2)]) == [[2, 2], [2]]
    assert not {name for name in vars(module) if name.endswith("_step")}


def test_the_number_of_the_loader_must_fit_their_number():
    class Insists(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            pass

    with pytest.raises(TypeError, match=r"validation_step.*does not fit 1 loader:.*=0\)"):
        make().validate(Insists(), loader())
    with pytest.raises(TypeError, match=r"does not fit 1 loader"):
        make().fit(Insists(), loader(), loader())
    with pytest.raises(TypeError, match=r"does not fit 2 loaders:.*dataloader_idx=0\)"):
        make().test(Net(), [loader(), loader()])
    make().validate(Insists(), [loader(), loader()])


def test_a_training_step_with_other_arguments_is_refused_before_anything_runs():
    def three(self, batch, batch_idx, more):
        pass

    def none(self):
        pass

    for step in (three, none):
        with pytest.raises(
            TypeError, match=r"training_step\(.*is called with batch, batch_idx\. D"
        ):
            make(max_epochs=0).fit(with_method(Net, "training_step", step), loader())


@pytest.mark.parametrize("name", ["setup", "prepare_data", "on_save_checkpoint"])
def test_what_is_called_once_a_run_is_refused_with_other_arguments(name):
    def wrong(self, this, and_that, too, much):
        pass

    bases = [Net, DataModule] if name == "prepare_data" else [Net, DataModule, Callback]
    for base in bases if name != "on_save_checkpoint" else [Net, Callback]:
        owner = with_method(base, name, wrong)
        module = owner if base is Net else Net()
        trainer = make(callbacks=[owner] if base is Callback else [])
        data = {"datamodule": owner} if base is DataModule else {"dataloaders": loader()}
        with pytest.raises(
            TypeError, match=rf"{name}\(.*called with other arguments.*def {name}\("
        ):
            trainer.validate(module, **data)


def test_the_module_is_called_on_the_batches_of_several_loaders():
    class Doubled(TrainModule):
        def forward(self, batch):
            return batch[0].sum() * 2

    assert make().predict(Doubled(), [loader(2), loader(2)]) == [[12.0], [12.0]]


@pytest.mark.parametrize(
    ("argument", "hint"), [("optimizer_idx", "optimizers"), ("hiddens", "truncated")]
)
def test_a_step_with_arguments_of_old_is_refused(argument, hint):
    scope: dict = {}
    exec(f"def training_step(self, batch, batch_idx, {argument}): pass", scope)
    module = with_method(Net, "training_step", scope["training_step"])
    with pytest.raises(TypeError, match=rf"takes {argument}.*{hint}"):
        make().fit(module, loader())


# -- log -------------------------------------------------------------------------------------------


class Logging(Net):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def training_step(self, batch, batch_idx):
        self.log("value", float(batch_idx + 1), on_step=False, on_epoch=True, **self.arguments)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"sync_dist": True}, 1.5),
        ({"sync_dist": False, "rank_zero_only": False, "enable_graph": False}, 1.5),
        ({"sync_dist_group": None, "metric_attribute": "metric", "logger": None}, 1.5),
        ({"reduce_fx": "mean"}, 1.5),
        ({"reduce_fx": torch.mean}, 1.5),
        ({"reduce_fx": "max"}, 2.0),
        ({"reduce_fx": torch.max}, 2.0),
        ({"reduce_fx": min}, 1.0),
        ({"reduce_fx": sum}, 3.0),
        ({"reduce_fx": torch.sum, "prog_bar": True}, 3.0),
    ],
)
def test_arguments_of_log_that_mean_the_same(arguments, value):
    trainer = make()
    trainer.fit(Logging(**arguments), loader())
    assert trainer.callback_metrics["value"] == value
    assert trainer.logged_metrics == trainer.callback_metrics


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"rank_zero_only": True}, ValueError, "Call log on all of them"),
        ({"enable_graph": True}, ValueError, "detached"),
        ({"sync_dist_group": "some"}, ValueError, "over all processes"),
        ({"reduce_fx": torch.median}, ValueError, "'mean', 'sum'"),
        ({"reduce_fx": "median"}, ValueError, "one of 'max'"),
        ({"on_epochs": True}, TypeError, "Did you mean 'on_epoch'"),
    ],
)
def test_arguments_of_log_that_cannot_be_kept(arguments, kind, part):
    with pytest.raises(kind, match=part):
        make().fit(Logging(**arguments), loader())


def test_prog_bar_may_be_passed_by_position():
    class Positional(Net):
        def training_step(self, batch, batch_idx):
            self.log("one", 1.0, True)
            self.log_dict({"two": 2.0}, True, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    seen = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(trainer.progress_bar_metrics)

    make(callbacks=[Watch()]).fit(Positional(), loader(2))
    assert seen == [{"one": 1.0, "two": 2.0}]


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.messages = []

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.configuration = values

    def log(self, values, step, **kwargs):
        self.messages.append(values)


def test_what_is_kept_from_the_loggers_is_in_the_local_record():
    class Private(Net):
        def training_step(self, batch, batch_idx):
            self.log("hidden", 1.0, on_step=True, on_epoch=True, logger=False)
            if batch_idx:
                self.log("shown", 2.0, logger=True)
            return super().training_step(batch, batch_idx)

    memory = Memory()
    trainer = make(log_with=memory, log_every=1)
    trainer.fit(Private(), loader())
    assert memory.messages == [{"shown": 2.0}]
    names = {name for record in read_metrics(trainer.metrics_path) for name in record}
    assert {"hidden_step", "hidden_epoch", "shown"} <= names
    assert trainer.callback_metrics["hidden_epoch"] == 1.0


def test_the_number_of_the_loader_may_be_left_out_of_a_name():
    class Several(Net):
        same = False

        def validation_step(self, batch, batch_idx, dataloader_idx):
            name = "same" if self.same else f"of {dataloader_idx}"
            self.log(name, float(batch_idx), add_dataloader_idx=False, prog_bar=True)
            self.log("usual", 1.0)

        def on_validation_epoch_end(self):
            self.log("all", 3.0)

    module, trainer = Several(), make()
    assert trainer.validate(module, [loader(), loader(2)]) == [
        {"of 0": 0.5, "usual/dataloader_idx_0": 1.0, "all": 3.0},
        {"of 1": 0.0, "usual/dataloader_idx_1": 1.0, "all": 3.0},
    ]
    assert trainer.callback_metrics == {
        "of 0": 0.5,
        "of 1": 0.0,
        "usual/dataloader_idx_0": 1.0,
        "usual/dataloader_idx_1": 1.0,
        "all": 3.0,
    }
    module.same = True
    with pytest.raises(ValueError, match=r"Several loaders logged 'same'.*different name"):
        make().validate(module, [loader(), loader(2)])


def log_under_own_names():
    class Several(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log(f"of {dataloader_idx}", 1.0 + batch_idx, add_dataloader_idx=False)

    trainer = make(cpu=True)
    return trainer.validate(Several(), [loader(8), loader(2)])


def test_a_process_without_a_batch_of_a_loader_owes_none_of_its_names(ranks2):
    assert ranks2(log_under_own_names) == [[{"of 0": 1.5}, {"of 1": 1.0}]] * 2


# -- manual optimisation ---------------------------------------------------------------------------


class Manual(Net):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(2, 1)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.layer.parameters(), lr=0.1),
            torch.optim.SGD(self.other.parameters(), lr=0.1),
        ]


def test_toggling_lets_one_optimizers_parameters_alone_require_gradients():
    seen = []

    class Toggling(Manual):
        def training_step(self, batch, batch_idx):
            self.layer.bias.requires_grad_(False)
            first, second = self.optimizers(use_pl_optimizer=True)
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                seen.append([name for name, p in self.named_parameters() if p.requires_grad])
                self.manual_backward((self.layer(batch[0]) * self.other(batch[0])).mean())
                seen.append([name for name, p in self.named_parameters() if p.grad is not None])
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
            first.step()
            seen.append([name for name, p in self.named_parameters() if p.requires_grad])

    make().fit(Toggling(), loader(2))
    other = ["other.weight", "other.bias"]
    assert seen == [
        ["layer.weight"],
        ["layer.weight"],
        other,
        other,
        ["layer.weight", *other],
    ]


def test_optimizers_are_toggled_for_a_block():
    seen = []

    class Toggling(Manual):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            with self.toggled_optimizer(second):
                seen.append([name for name, p in self.named_parameters() if p.requires_grad])
            seen.append([name for name, p in self.named_parameters() if p.requires_grad])
            first.step()

    make().fit(Toggling(), loader(1))
    other = ["other.weight", "other.bias"]
    assert seen == [other, ["layer.weight", "layer.bias", *other]]


def test_toggling_twice_is_refused():
    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)

    with pytest.raises(RuntimeError, match="without untoggle_optimizer"):
        make().fit(Twice(), loader())


def test_manual_backward_passes_on_what_backward_takes():
    gradients = []

    class Twice(Manual):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            loss = self.layer(batch[0]).square()
            weights = torch.ones_like(loss)
            self.manual_backward(loss, weights, retain_graph=True)
            once = self.layer.weight.grad.clone()
            self.manual_backward(loss, gradient=weights, inputs=[self.layer.weight])
            gradients.append((once, self.layer.weight.grad.clone()))
            first.step()
            first.zero_grad()

    make().fit(Twice(), loader(2))
    ((once, twice),) = gradients
    assert once.any()
    torch.testing.assert_close(twice, 2 * once)


def test_bare_optimizers_are_refused():
    class Bare(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers(use_pl_optimizer=False)

    with pytest.raises(ValueError, match="neither counted nor averaged"):
        make().fit(Bare(), loader())


def clipped(**arguments):
    """The gradients after `clip_gradients`, which were 3 and 4 before."""
    seen = []

    class Clips(Manual):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.manual_backward((self.layer.weight * torch.tensor([3.0, 4.0])).sum())
            norm = self.clip_gradients(first, **arguments)
            seen.append((norm, self.layer.weight.grad.flatten()))
            first.step()

    make().fit(Clips(), loader(2))
    return seen[0]


def test_gradients_are_clipped_as_lightnings_arguments_say():
    for algorithm in ({}, {"gradient_clip_algorithm": "norm"}):
        norm, gradients = clipped(gradient_clip_val=1.0, **algorithm)
        assert norm == 5.0
        torch.testing.assert_close(gradients, torch.tensor([0.6, 0.8]), rtol=1e-4, atol=0)
    norm, gradients = clipped(gradient_clip_val=3.5, gradient_clip_algorithm="value")
    assert norm is None
    assert gradients.tolist() == [3.0, 3.5]
    with pytest.raises(ValueError, match="gradient_clip_algorithm is 'norms'"):
        clipped(gradient_clip_val=1.0, gradient_clip_algorithm="norms")
    with pytest.raises(ValueError, match="pass one of them"):
        clipped(gradient_clip_val=1.0, max_grad_norm=1.0)


def test_optimizers_of_automatic_optimisation_all_step_and_share_no_parameter():
    class Both(Manual):
        automatic_optimization = True

        def training_step(self, batch, batch_idx):
            return (self.layer(batch[0]) + self.other(batch[0])).square().mean()

    module = Both()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make()
    trainer.fit(module, loader(2))
    assert trainer.global_step == 1
    assert not any(torch.equal(before[name], p) for name, p in module.named_parameters())

    class Shared(Both):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), super().configure_optimizers()[1]]

    with pytest.raises(ValueError, match=r"'SGD' and 'SGD-1'.*'other\.weight'.*automatic_opt"):
        make().fit(Shared(), loader(2))


# -- what else a body calls ------------------------------------------------------------------------


def test_freezing_a_module():
    module = Net()
    assert module.freeze() is module
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert module.unfreeze() is module
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_attributes_of_the_run_and_outside_it(capsys):
    module = Net()
    assert (module.global_rank, module.local_rank) == (0, 0)
    module.print("outside", "a run")
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            seen.append((trainer.is_global_zero, trainer.global_rank, trainer.local_rank))
            seen.append((trainer.world_size, trainer.datamodule, trainer.training))
            module.print("inside")
            tensor = torch.ones(2)
            seen.append(module.all_gather(tensor) is tensor)

    make(callbacks=[Watch()]).fit(module, loader(2))
    assert seen == [(True, 0, 0), (1, None, True), True]
    assert capsys.readouterr().out.splitlines() == ["outside a run", "inside"]


def copies_in_a_run(duplicate):
    made = []

    class Averaged(Net):
        def on_train_start(self):
            made.append(duplicate(self))

    module = Averaged()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    make().fit(module, loader(2))
    return made[0], weights


def test_a_deep_copy_made_in_a_run_is_a_module_outside_it():
    twin, weights = copies_in_a_run(copy.deepcopy)
    torch.testing.assert_close(twin.state_dict(), weights, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="has no trainer"):
        twin.trainer


def test_a_module_is_pickled_in_a_run_without_it():
    pickled, weights = copies_in_a_run(cloudpickle.dumps)
    twin = cloudpickle.loads(pickled)
    torch.testing.assert_close(twin.state_dict(), weights, rtol=0, atol=0)
    make().fit(twin, loader(2))
    assert twin.layer.weight.ne(weights["layer.weight"]).any()


def gather_all():
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            rank = module.global_rank
            seen.append((rank, module.local_rank, trainer.is_global_zero, trainer.world_size))
            gathered = module.all_gather({"a": torch.full((2,), float(rank)), "b": rank})
            seen.append((gathered["a"].tolist(), gathered["b"].tolist()))
            module.print("once")

    make(cpu=True, callbacks=[Watch()]).fit(Net(), loader())
    return seen


def test_tensors_of_all_processes_are_stacked(ranks2):
    first, second = ranks2(gather_all)
    assert first[0] == (0, 0, True, 2)
    assert second[0] == (1, 1, False, 2)
    assert first[1] == second[1] == ([[0.0, 0.0], [1.0, 1.0]], [0, 1])


@pytest.mark.parametrize("arguments", [{"group": "some"}, {"sync_grads": True}])
def test_gathering_what_is_not_done_is_refused(arguments):
    with pytest.raises(ValueError, match="all_gather was called with"):
        Net().all_gather(torch.ones(1), **arguments)


@pytest.mark.parametrize("name", ["logger", "loggers"])
def test_loggers_are_refused_with_what_to_use(name):
    module = Net()
    assert hasattr(module, name)
    with pytest.raises(AttributeError, match=r"no 'experiment': trackers run.*log_with"):
        getattr(module, name).experiment
    with pytest.raises(TypeError, match=r"no loggers: trackers run.*log_with"):
        list(getattr(module, name))
    with pytest.raises(AttributeError, match=rf"Trainer has no attribute '{name}': trackers"):
        getattr(make(), name)
    setattr(module, name, mine := logging.getLogger("mine"))
    assert getattr(module, name) is mine


def test_attributes_that_a_trainer_does_not_have_are_hinted_at():
    trainer = make()
    with pytest.raises(AttributeError, match=r"'log_dir': use trainer\.logs_dir"):
        trainer.log_dir
    with pytest.raises(AttributeError, match=r"'is_last_batch': .*num_training_batches") as error:
        trainer.is_last_batch
    assert "epoch_complete" not in str(error.value)  # which a training_step never sees true
    with pytest.raises(AttributeError, match=r"no attribute 'anything'\.$"):
        trainer.anything
    assert not hasattr(trainer, "num_nodes")


def test_a_trainer_is_training_in_a_fit_but_not_in_its_validations():
    seen = {}

    class Watch(Callback):
        def setup(self, trainer, module, stage):
            seen["setup"] = trainer.training

        def on_validation_start(self, trainer, module):
            seen["validation"] = trainer.training

        def on_boundary(self, trainer, module):
            seen["boundary"] = trainer.training

    trainer = make(callbacks=[Watch()])
    trainer.fit(Net(), loader(2), loader(2))
    assert seen == {"setup": False, "validation": False, "boundary": True}
    assert not trainer.training


def test_a_schedule_may_have_the_keys_of_lightnings_example(caplog):
    class Scheduled(Net):
        strict, monitor = True, "val"

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                    "interval": "epoch",
                    "frequency": 1,
                    "monitor": self.monitor,
                    "strict": self.strict,
                    "name": None,
                    "reduce_on_plateau": True,
                },
            }

    module, trainer = Scheduled(), make()
    trainer.fit(module, loader(), loader())
    assert trainer.schedulers[0].scheduler.last_epoch == 1
    module.monitor = "vla"
    with pytest.raises(ValueError, match=r"'vla'. Did you mean 'val'"):
        make().fit(module, loader(), loader())
    module.strict = False
    trainer = make(max_epochs=2)
    trainer.fit(module, loader(), loader())
    assert trainer.schedulers[0].scheduler.last_epoch == 0
    assert sum("while its monitor 'vla' has not" in line for line in caplog.messages) == 1


def test_another_trainer_in_a_hook_leaves_the_module_to_its_own():
    class Points(DataModule):
        def train_dataloader(self):
            return loader(8)

        val_dataloader = train_dataloader

    class Looks(Net):
        looks = True

        def on_train_epoch_end(self):
            if self.looks:
                other = Trainer(progress_bar=False, project_dir="other", checkpointing=False)
                other.validate(self, datamodule=self.trainer.datamodule)
            seen.append((self.trainer, self.trainer.datamodule.trainer))

    fits = []
    for looks in (True, False):
        seen = []
        torch.manual_seed(0)
        module, points, trainer = Looks(), Points(), make(max_epochs=2)
        module.looks = looks
        trainer.fit(module, datamodule=points)
        assert seen == [(trainer, trainer)] * 2
        assert points.trainer is None
        fits.append([*module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*fits, strict=True))


def test_a_copy_of_a_compiled_module_computes_with_its_own_weights():
    class Called(Net):
        def forward(self, x):
            return self.layer(x)

    module = Called()
    module.compile(backend="eager")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.zero_()
    assert not twin(torch.ones(1, twin.layer.in_features)).any()
    assert cloudpickle.loads(cloudpickle.dumps(module)).layer.weight.equal(module.layer.weight)
