from __future__ import annotations

import inspect

import pytest

from callbacks import Callback, LambdaCallback
from callbacks.lambda_callback import HOOKS
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer


class Listing(Callback):
    """A class with every hook, which lists its calls."""

    def __init__(self):
        self.calls = []
        for name in HOOKS:
            setattr(self, name, self.lister(name, self.calls))

    @staticmethod
    def lister(name, calls):
        return lambda *arguments: calls.append((name, len(arguments), type(arguments[0]).__name__))


def test_every_hook_is_called_as_that_of_a_class():
    listing, calls = Listing(), []
    functions = LambdaCallback(**{name: Listing.lister(name, calls) for name in HOOKS})
    trainer = quiet_trainer(max_epochs=2, callbacks=[functions, listing], num_sanity_val_steps=1)
    trainer.fit(Line(), loader(), loader())
    trainer.save_checkpoint("saved")
    trainer.predict(Line(), loader())
    assert calls == listing.calls
    names = {name for name, _, _ in calls}
    assert {"setup", "on_boundary", "on_save_checkpoint", "on_predict_end", "teardown"} <= names


def test_hooks_are_those_that_take_the_trainer():
    state = {"state_dict", "load_state_dict"}
    public = {n for n, m in vars(Callback).items() if inspect.isfunction(m) and n[0] != "_"}
    assert set(HOOKS) == public - state


def test_an_error_reaches_on_exception():
    def fail(trainer, module):
        raise ZeroDivisionError("here")

    messages = []
    callback = LambdaCallback(
        on_train_end=fail, on_exception=lambda trainer, module, error: messages.append(str(error))
    )
    with pytest.raises(ZeroDivisionError, match="here"):
        quiet_trainer(max_epochs=1, callbacks=callback).fit(Line(), loader())
    assert messages == ["here"]


def test_several_may_be_given_and_a_run_with_them_goes_on():
    steps = []
    count = LambdaCallback(on_boundary=lambda trainer, module: steps.append(trainer.global_step))
    again = LambdaCallback(on_boundary=lambda trainer, module: steps.append(-trainer.global_step))
    options = {"callbacks": [count, again], "checkpointing": True}
    quiet_trainer(max_epochs=1, **options).fit(Line(), loader(4))
    quiet_trainer(max_epochs=2, **options).fit(Line(), loader(4), ckpt_path="auto")
    assert steps == [1, -1, 2, -2, 3, -3, 4, -4]


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        ({"on_train_epoch_ends": print}, "Did you mean 'on_train_epoch_end'"),
        ({"state_dict": dict}, "The hook is 'state_dict'"),
    ],
)
def test_an_unknown_hook_is_refused(hooks, text):
    with pytest.raises(ValueError, match=text):
        LambdaCallback(**hooks)
