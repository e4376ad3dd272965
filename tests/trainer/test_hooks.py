"""Every hook, in the order of the loop: who is called, when, with what, and in which state."""

import inspect
import signal
from collections import UserList

import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, ModelCheckpoint
from trainer import DataModule, Preempted, Trainer, TrainModule
from trainer.errors import CheckpointError

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
SHARED = [name for name in HOOKS if hasattr(TrainModule, name)]


def recorder(name, who, calls):
    def hook(*args):
        calls.append((f"{who} {name}", args))

    return hook


class Net(TrainModule):
    """Records its own steps and definitions; its hooks are added by `listening`."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.calls = []

    def note(self, name):
        self.calls.append((f"m {name}", ()))

    def prepare_data(self):
        self.note("prepare_data")

    def configure_model(self):
        self.note("configure_model")

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        return {"loss": self.layer(batch).square().mean(), "extra": batch_idx}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("validation_step")
        return self.layer(batch).square().mean()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("test_step")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("predict_step")
        return self.layer(batch)

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Quiet(Net):
    def note(self, name):
        pass


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        self.note("configure_optimizers")
        parts = (self.layer.weight, self.layer.bias)
        return tuple(torch.optim.SGD([part], lr=0.1) for part in parts)


class Data:
    """A datamodule that records its set-up."""

    def __init__(self, calls, train=3):
        for name in ("prepare_data", "setup", "teardown"):
            setattr(self, name, recorder(name, "d", calls))
        self.train = train

    def train_dataloader(self):
        return loader(self.train)

    def val_dataloader(self):
        return loader(1)


def loader(batches):
    return DataLoader(torch.arange(2.0 * batches).reshape(-1, 1), batch_size=2)


def listening(cls=Net):
    """A module and two callbacks, `a` and `b`, that override every hook and write into one list."""
    module = cls()
    methods = [*HOOKS, "setup", "teardown", "load_state_dict"]
    heard = []
    for who in "ab":
        callback = type(f"Listener{who}", (Callback,), {})()
        for name in methods:
            setattr(callback, name, recorder(name, who, module.calls))
        heard.append(callback)
    for name in [*SHARED, "setup", "teardown"]:
        setattr(module, name, recorder(name, "m", module.calls))
    return module, heard


def trainer_for(callbacks, **arguments):
    arguments = {"max_epochs": 1, "num_sanity_val_steps": 0, "checkpointing": False} | arguments
    return Trainer(callbacks=callbacks, progress_bar=False, project_dir="run", **arguments)


def names(module):
    return [name for name, _ in module.calls]


# What is expected, in the words of the loop.


def c(name):
    return [f"a {name}", f"b {name}"]


def cm(name):
    return [*c(name), f"m {name}"]


def mc(name):
    return [f"m {name}", *c(name)]


def begin(stage_calls=("m configure_optimizers",), data=False):
    d = ["d prepare_data"] if data else []
    s = ["d setup"] if data else []
    return [*d, "m prepare_data", *s, *cm("setup"), "m configure_model", *stage_calls]


def end(data=False):
    return [*(["d teardown"] if data else []), *cm("teardown")]


def micro_batch(last):
    return [
        *cm("on_train_batch_start"),
        "m training_step",
        *cm("on_before_backward"),
        *mc("on_after_backward"),
        *(cm("on_before_optimizer_step") if last else []),
        *mc("on_train_batch_end"),
    ]


def window(size):
    return [
        *cm("on_train_step_start"),
        *[call for number in range(size) for call in micro_batch(number == size - 1)],
        *mc("on_train_step_end"),
        *cm("on_before_zero_grad"),
    ]


def evaluation(phase, batches):
    step = "validation_step" if phase == "validation" else f"{phase}_step"
    one = [*cm(f"on_{phase}_batch_start"), f"m {step}", *mc(f"on_{phase}_batch_end")]
    return [
        *cm(f"on_{phase}_start"),
        *cm(f"on_{phase}_epoch_start"),
        *one * batches,
        *mc(f"on_{phase}_epoch_end"),
        *mc(f"on_{phase}_end"),
    ]


def whole_fit(*calls, resumed=False, ended=True, data=False):
    """The calls of a fit around those of its epochs."""
    return [
        *begin(data=data),
        *(["m on_load_checkpoint"] if resumed else []),
        *([*c("load_state_dict"), *c("on_load_checkpoint")] if resumed else []),
        *cm("on_fit_start"),
        *cm("on_train_start"),
        *calls,
        *([*mc("on_train_end"), *mc("on_fit_end")] if ended else []),
        *end(data=data),
    ]


def test_fit_calls_the_hooks_of_two_epochs_in_the_order_of_the_loop():
    module, heard = listening()
    trainer = trainer_for(heard, max_epochs=2, gradient_accumulation_steps=2)
    trainer.fit(module, datamodule=Data(module.calls))
    epoch = [
        *cm("on_train_epoch_start"),
        *window(2),
        *c("on_boundary"),
        *window(1),  # the data end inside a window
        *evaluation("validation", 1),
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
    ]
    assert names(module) == whole_fit(*epoch * 2, data=True)


def test_the_sanity_check_is_a_validation_between_fit_start_and_train_start():
    module, heard = listening()
    trainer_for(heard, num_sanity_val_steps=2, max_epochs=0).fit(module, loader(1), loader(3))
    assert names(module) == [
        *begin(),
        *cm("on_fit_start"),
        *c("on_sanity_check_start"),
        *evaluation("validation", 2),
        *c("on_sanity_check_end"),
        *cm("on_train_start"),
        *mc("on_train_end"),
        *mc("on_fit_end"),
        *end(),
    ]


def test_setup_and_teardown_receive_the_stage():
    for stage in ("fit", "validate", "test", "predict"):
        module, heard = listening()
        getattr(trainer_for(heard), stage)(module, loader(1))
        stages = [
            args[-1] for name, args in module.calls if name.split()[1] in ("setup", "teardown")
        ]
        assert stages == [stage] * 6


def test_manual_optimisation_leaves_the_update_to_the_step():
    module, heard = listening(Manual)
    trainer_for(heard).fit(module, loader(2))
    update = [
        *cm("on_before_backward"),
        *mc("on_after_backward"),
        *cm("on_before_optimizer_step"),
    ]
    batch = [
        *cm("on_train_step_start"),
        *cm("on_train_batch_start"),
        "m training_step",
        *update * 2,
        *mc("on_train_batch_end"),
        *mc("on_train_step_end"),
    ]
    assert names(module) == whole_fit(
        *cm("on_train_epoch_start"),
        *batch,
        *c("on_boundary"),
        *batch,
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
    )


@pytest.mark.parametrize("closure", [False, True])
def test_manual_hooks_see_the_averaged_gradients_before_the_step(ranks2, closure):
    def body():
        class ByHand(Quiet):
            automatic_optimization = False

            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                optimizer.zero_grad()

                def evaluate():
                    loss = self.layer(batch).square().mean()
                    self.manual_backward(loss)
                    return loss

                if closure:
                    optimizer.step(evaluate)
                else:
                    evaluate()
                    optimizer.step()

            def on_before_optimizer_step(self, optimizer):
                assert optimizer is self.optimizers()
                seen.append([self.layer.weight.grad.tolist(), self.layer.weight.tolist()])

        seen = []
        torch.manual_seed(0)
        trainer_for([]).fit(ByHand(), loader(3))  # of which the last is one process's alone
        return seen

    seen, other = ranks2(body)
    assert len(seen) == 2
    assert other == seen[:1]  # for the other process it is no update of a batch of its own
    assert seen[0] != seen[1]
    assert len(body()) == 3


def test_a_manual_batch_without_a_step_is_no_update_and_has_no_boundary():
    class EveryOther(Manual):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.manual_backward(self.layer(batch).square().mean())
            if batch_idx % 2:
                first.step()
                first.zero_grad()

    module, heard = listening(EveryOther)
    trainer = trainer_for(heard)
    trainer.fit(module, loader(4))
    assert trainer.global_step == 2
    assert names(module).count("a on_boundary") == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), KeyboardInterrupt()])
def test_an_error_in_a_step_reaches_on_exception_and_is_raised_after_teardown(error):
    module, heard = listening()

    def training_step(batch, batch_idx):
        raise error

    module.training_step = training_step
    with pytest.raises(type(error)) as raised:
        trainer_for(heard).fit(module, datamodule=Data(module.calls))
    assert raised.value is error
    assert names(module) == whole_fit(
        *cm("on_train_epoch_start"),
        *cm("on_train_step_start"),
        *cm("on_train_batch_start"),
        *c("on_exception"),
        ended=False,
        data=True,
    )
    messages = [args for name, args in module.calls if name.endswith("on_exception")]
    assert [args[2] for args in messages] == [error, error]


@pytest.mark.parametrize("first", [OSError("first"), KeyboardInterrupt()])
def test_the_first_error_of_a_teardown_is_raised_and_the_others_are_logged(caplog, first):
    class Failing(Callback):
        def __init__(self, error):
            self.error = error

        def teardown(self, trainer, module, stage):
            raise self.error

    second = OSError("second")
    trainer = trainer_for([Failing(first), Failing(second)])
    for _ in range(2):  # the first run is over, whatever has ended it
        caplog.clear()
        with pytest.raises(type(first)) as raised:
            trainer.validate(listening()[0], Data([]).val_dataloader())
        assert raised.value is first
        assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [second]


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_error_is_not_hidden_by_one_in_the_clean_up_after_it(caplog, hook):
    class Failing(Callback):
        def on_train_start(self, trainer, module):
            raise ZeroDivisionError

    def fail(*args):
        raise CheckpointError("A background save failed: OSError(28)")

    failing = Failing()
    setattr(failing, hook, fail)
    with pytest.raises(ZeroDivisionError):
        trainer_for([failing]).fit(Quiet(), loader(1))
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert isinstance(record.exc_info[1], CheckpointError)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_an_error_in_setup_tears_down_too(stage):
    module, heard = listening()

    def setup(stage):
        raise ZeroDivisionError

    module.setup = setup
    with pytest.raises(ZeroDivisionError):
        getattr(trainer_for(heard), stage)(module, loader(1))
    assert names(module) == ["m prepare_data", *c("setup"), *c("on_exception"), *end()]


def test_a_module_is_usable_again_after_an_error():
    module = Quiet()
    trainer = trainer_for([])
    bad = torch.zeros(2, 7)
    with pytest.raises(RuntimeError, match="shape"):
        trainer.fit(module, [bad])
    trainer.fit(module, loader(2))
    assert trainer.global_step == 2
    with pytest.raises(RuntimeError, match="no trainer"):
        module.trainer


def test_hooks_that_nobody_overrides_are_never_called(monkeypatch):
    def called(self, *args):
        raise AssertionError("a hook that nobody overrides was called")

    batch_hooks = (
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
    )
    for owner, names_of in (
        (Callback, HOOKS),
        (TrainModule, [*SHARED, *batch_hooks]),
        (DataModule, batch_hooks),
    ):
        for name in names_of:
            monkeypatch.setattr(owner, name, called)

    class One(Callback):
        steps = 0

        def on_train_step_end(self, trainer, module):
            self.steps += 1

    class Loaders(DataModule):
        train_dataloader = val_dataloader = lambda self: loader(2)

    one = One()
    trainer = trainer_for([one], num_sanity_val_steps=1)
    trainer.fit(Quiet(), datamodule=Loaders())
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(Quiet(), loader(1))
    assert one.steps == 2


def test_hooks_get_the_arguments_that_their_signatures_name():
    module, heard = listening()
    data = loader(1)
    (batch,) = data
    trainer = trainer_for(heard)
    trainer.fit(module, data, [loader(1), loader(1)])
    optimizers = []
    for name, args in module.calls:
        who, hook = name.split()
        if hook not in HOOKS:
            continue
        if who in "ab":
            assert args[:2] == (trainer, module), name
            args = args[2:]
            expected = list(inspect.signature(getattr(Callback, hook)).parameters)[3:]
        else:
            expected = list(inspect.signature(getattr(TrainModule, hook)).parameters)[1:]
        assert len(args) == len(expected), name
        for argument, value in zip(expected, args, strict=True):
            if argument == "batch":
                torch.testing.assert_close(value, batch, rtol=0, atol=0)
            elif argument == "optimizer":
                optimizers.append(value)
            elif argument == "loss":
                assert value.shape == ()
                assert value.requires_grad
            elif argument == "batch_idx":
                assert value == 0
    assert {type(one.optimizer) for one in optimizers} == {torch.optim.SGD}
    ends = [args for name, args in module.calls if name == "a on_train_batch_end"]
    assert [args[2]["extra"] for args in ends] == [0]
    assert not any(args[2]["loss"].requires_grad for args in ends)
    loaders = [args[-1] for name, args in module.calls if name == "a on_validation_batch_end"]
    assert loaders == [0, 1]


def test_with_one_loader_evaluation_hooks_and_steps_get_no_dataloader_idx():
    seen = []

    class Plain(Quiet):
        def validation_step(self, batch, batch_idx):
            seen.append(batch_idx)

        def on_validation_batch_start(self, batch, batch_idx):
            seen.append(f"start {batch_idx}")

    trainer_for([]).validate(Plain(), loader(2))
    assert seen == ["start 0", 0, "start 1", 1]


def test_the_state_that_each_hook_finds():
    """Where the counters, the gradients, the mode and the metrics stand."""
    states = {}

    def watching(name):
        def method(trainer, module, *args):
            gradients = module.layer.weight.grad is not None
            mode = module.training and torch.is_grad_enabled()
            state = (trainer.global_step, gradients, mode, sorted(trainer.callback_metrics))
            states.setdefault(name, []).append(state)

        return method

    watch = Callback()
    for hook in HOOKS:
        setattr(watch, hook, watching(hook))

    class Logging(Quiet):
        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("train", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", 1.0)

        def on_train_epoch_end(self):
            states["module"] = sorted(self.trainer.callback_metrics)

    trainer_for([watch]).fit(Logging(), loader(1), loader(1))
    train, both = ["train"], ["train", "val"]  # this process's, then reduced
    expected = {
        "on_train_start": (0, False, True, []),
        "on_train_batch_start": (0, False, True, []),
        "on_before_backward": (0, False, True, train),
        "on_after_backward": (0, True, True, train),
        "on_before_optimizer_step": (0, True, True, train),
        "on_train_batch_end": (1, True, True, train),
        "on_train_step_end": (1, True, True, train),
        "on_before_zero_grad": (1, True, True, train),
        "on_validation_start": (1, False, False, train),
        "on_validation_batch_end": (1, False, False, both),
        "on_validation_epoch_end": (1, False, False, both),
        "on_validation_end": (1, False, False, both),
        "on_train_epoch_end": (1, False, True, both),
        "on_boundary": (1, False, True, both),
        "on_train_end": (1, False, True, both),
    }
    assert {name: states[name] for name in expected} == {k: [v] for k, v in expected.items()}
    assert states["module"] == both


def test_evaluation_puts_back_the_mode_of_every_submodule():
    module = Quiet()
    module.frozen = torch.nn.Dropout().eval()
    modes = []

    class Watch(Callback):
        def on_boundary(self, trainer, module):
            modes.append((module.training, module.layer.training, module.frozen.training))

        def on_train_start(self, trainer, module):
            module.frozen.eval()

    trainer_for([Watch()]).fit(module, loader(1), loader(1))
    assert modes == [(True, True, False)]
    module.train()
    module.layer.eval()
    for method in ("validate", "test", "predict"):
        getattr(trainer_for([]), method)(module, loader(1))
        assert (module.training, module.layer.training) == (True, False)


def test_gradients_are_clipped_after_on_before_optimizer_step():
    norms = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            norms.append(module.layer.weight.grad.norm().item())

        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = torch.cat([p.grad.flatten() for p in module.parameters()])
            norms.append(grads.norm().item())

    module = Quiet()
    torch.nn.init.constant_(module.layer.weight, 10.0)
    trainer_for([Watch()], max_grad_norm=0.5).fit(module, loader(1))
    assert norms[0] > 1.0
    assert norms[1] == pytest.approx(0.5, rel=1e-4)


def test_callbacks_that_save_run_after_those_that_do_not():
    order = []

    class Last(Callback):
        runs_last = True

        def on_boundary(self, trainer, module):
            order.append("last")

    class First(Callback):
        def on_boundary(self, trainer, module):
            order.append("first")

    for kind in (list, tuple, UserList):  # the last is a sequence as Hydra's lists are
        trainer_for(kind([Last(), First()])).fit(Quiet(), loader(2))
    assert order == ["first", "last"] * 6


def test_a_hook_set_on_the_instance_counts_as_overridden():
    module, callback, seen = Quiet(), Callback(), []
    module.on_train_start = lambda: seen.append("train start")
    callback.on_train_end = lambda trainer, module: seen.append("train end")
    trainer_for([callback]).fit(module, loader(1))
    assert seen == ["train start", "train end"]


@pytest.mark.parametrize(
    ("method", "phase"), [("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_evaluations_call_their_own_hooks_for_one_loader_after_another(method, phase):
    module, heard = listening()
    getattr(trainer_for(heard), method)(module, [loader(2), loader(1)])
    assert names(module) == [*begin(()), *evaluation(phase, 3), *end()]
    numbers = [args[-2:] for name, args in module.calls if name == f"m on_{phase}_batch_start"]
    assert numbers == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("method", "phase"), [("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_an_error_in_an_evaluation_reaches_on_exception_and_is_raised_after_teardown(method, phase):
    module, heard = listening()

    def step(batch, batch_idx):
        raise ZeroDivisionError

    setattr(module, "predict_step" if phase == "predict" else f"{phase}_step", step)
    data = Data(module.calls)
    data.test_dataloader = data.predict_dataloader = data.val_dataloader
    with pytest.raises(ZeroDivisionError):
        getattr(trainer_for(heard), method)(module, datamodule=data)
    assert names(module) == [
        *begin((), data=True),
        *cm(f"on_{phase}_start"),
        *cm(f"on_{phase}_epoch_start"),
        *cm(f"on_{phase}_batch_start"),
        *c("on_exception"),
        *end(data=True),
    ]
    assert module.training


def test_validations_inside_an_epoch_under_accumulation():
    module, heard = listening()
    trainer = trainer_for(heard, val_every=2, gradient_accumulation_steps=2)
    trainer.fit(module, loader(5), loader(1))
    assert names(module) == whole_fit(
        *cm("on_train_epoch_start"),
        *window(2),
        *c("on_boundary"),
        *window(2),
        *evaluation("validation", 1),
        *c("on_boundary"),
        *window(1),
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
    )


def test_a_run_that_is_stopped_ends_after_the_boundary_and_not_with_an_epoch():
    module, heard = listening()

    class Stop(Callback):
        def on_boundary(self, trainer, module):
            trainer.should_stop = True

    trainer_for([Stop(), *heard], max_epochs=2).fit(module, loader(3))
    assert names(module) == whole_fit(*cm("on_train_epoch_start"), *window(1), *c("on_boundary"))


def test_a_fit_resumed_inside_an_epoch_goes_on_with_the_next_window():
    def start(**arguments):
        module, heard = listening()
        saving = ModelCheckpoint(every=1)
        trainer = trainer_for(
            [*heard, saving], gradient_accumulation_steps=2, num_sanity_val_steps=2, **arguments
        )
        trainer.fit(module, loader(5), loader(1), ckpt_path="auto")
        return names(module)

    start(max_steps=1)
    boundary = [*c("on_boundary"), *cm("on_save_checkpoint")]
    assert start() == whole_fit(
        *window(2),
        *boundary,
        *window(1),
        *evaluation("validation", 1),
        *mc("on_train_epoch_end"),
        *boundary,
        resumed=True,
    )


class Signal(Callback):
    """Sends a signal to its own process in one hook, once."""

    def __init__(self, hook):
        self.sent = False
        setattr(self, hook, self.send)

    def send(self, *args):
        if not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGTERM)


def preempted_and_resumed(hook, data):
    """The calls of a fit that a signal ended, and of the one that goes on."""
    module, heard = listening()
    with pytest.raises(Preempted):
        trainer_for([Signal(hook), *heard, ModelCheckpoint()]).fit(module, *data, ckpt_path="auto")
    resumed, heard = listening()
    trainer_for([*heard, ModelCheckpoint()]).fit(resumed, *data, ckpt_path="auto")
    return names(module), names(resumed)


def test_a_signal_ends_the_fit_after_its_update_and_the_rest_of_it_is_done_by_the_next_start():
    first, second = preempted_and_resumed("on_train_batch_start", (loader(1), loader(1)))
    assert first == whole_fit(
        *cm("on_train_epoch_start"),
        *window(1),
        *c("on_preemption"),
        *cm("on_save_checkpoint"),
        ended=False,
    )
    assert second == whole_fit(
        *evaluation("validation", 1),
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
        *cm("on_save_checkpoint"),
        resumed=True,
    )


def test_a_validation_that_a_signal_interrupts_is_repeated_whole():
    first, second = preempted_and_resumed("on_validation_batch_start", (loader(1), loader(2)))
    one = [*cm("on_validation_batch_start"), "m validation_step", *mc("on_validation_batch_end")]
    assert first == whole_fit(
        *cm("on_train_epoch_start"),
        *window(1),
        *cm("on_validation_start"),
        *cm("on_validation_epoch_start"),
        *one,
        *c("on_preemption"),
        *cm("on_save_checkpoint"),
        ended=False,
    )
    assert second == whole_fit(
        *evaluation("validation", 2),
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
        *cm("on_save_checkpoint"),
        resumed=True,
    )


def test_batches_are_moved_one_ahead_of_their_use():
    module, heard = listening()

    def traced(name):
        def hook(batch, *args):
            module.calls.append((f"m {name}", args))
            return batch

        return hook

    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    for name in hooks:
        setattr(module, name, traced(name))
    moved = [f"m {name}" for name in hooks]
    trainer = trainer_for(heard)
    trainer.fit(module, loader(2))
    assert names(module) == whole_fit(
        *cm("on_train_epoch_start"),
        *moved * 2,
        *window(1),
        *c("on_boundary"),
        *window(1),
        *mc("on_train_epoch_end"),
        *c("on_boundary"),
    )
    module.calls.clear()
    trainer.predict(module, [loader(1), loader(1)])
    messages = [args for name, args in module.calls if name in moved]
    device = torch.device("cpu")
    assert messages == [(0,), (device, 0), (0,), (1,), (device, 1), (1,)]
