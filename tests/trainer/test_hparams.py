"""The arguments that a module keeps, as they were given and as they come back from JSON."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from argparse import Namespace
from collections import OrderedDict, UserList, namedtuple
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer import Trainer, TrainModule
from trainer.errors import CheckpointError
from trainer.hparams import HyperParameters, logged, make, to_manifest


class Net(TrainModule):
    def __init__(self, width, depth=2, *, betas=(0.9, 0.99), path=None):
        super().__init__()
        self.save_hyperparameters()
        self.given = (width, depth, betas, path)


def through_json(module):
    return json.loads(json.dumps(to_manifest(module), allow_nan=False))


def again(module, **given):
    return make(type(module), through_json(module), given, "here")


# -- what is kept ----------------------------------------------------------------------------------


def test_all_arguments_are_kept_with_defaults_and_read_as_items_or_attributes():
    net = Net(8, path="data")
    assert net.hparams == {"width": 8, "depth": 2, "betas": (0.9, 0.99), "path": "data"}
    assert list(net.hparams) == ["width", "depth", "betas", "path"]
    assert net.hparams.width == net.hparams["width"] == 8


def test_only_the_names_given_are_kept():
    class Some(TrainModule):
        def __init__(self, a, b, c):
            super().__init__()
            self.save_hyperparameters("c", "a")

    assert Some(1, 2, 3).hparams == {"a": 1, "c": 3}


@pytest.mark.parametrize("ignore", ["encoder", ["encoder"], ("encoder", "not there"), {"encoder"}])
def test_ignored_arguments_are_left_out(ignore):
    class Some(TrainModule):
        def __init__(self, encoder, lr):
            super().__init__()
            self.save_hyperparameters(ignore=ignore)

    assert Some(torch.nn.Linear(1, 1), 0.1).hparams == {"lr": 0.1}


def test_later_calls_add_and_replace_values():
    class Some(TrainModule):
        def __init__(self, a, b):
            super().__init__()
            self.save_hyperparameters("a")
            a, b = a + 6, b + 5
            self.save_hyperparameters("b", "a")
            self.save_hyperparameters({"note": "x"})

    some = Some(1, 2)
    assert some.hparams == {"a": 7, "b": 7, "note": "x"}
    assert through_json(some)["arguments"] == {"a": 7, "b": 7}
    assert through_json(some)["others"] == {"note": "x"}


def test_arguments_passed_on_by_keyword_are_kept_one_by_one():
    class Open(TrainModule):
        def __init__(self, a, **rest):
            super().__init__()
            self.save_hyperparameters(ignore="c")
            self.rest = rest

    module = Open(1, b=2, c=3)
    assert module.hparams == {"a": 1, "b": 2}
    assert again(module, d=4).rest == {"b": 2, "d": 4}


def test_hyper_parameters_are_copied():
    sizes = {"inner": [1, 2]}
    net = Net(sizes)
    sizes["inner"].append(3)
    assert net.hparams.width == {"inner": [1, 2]}


def test_hparams_without_save_hyperparameters():
    module = TrainModule()
    assert module.hparams == {}
    assert to_manifest(module) == {}
    with pytest.raises(AttributeError, match=r"no hyper-parameter 'lr'.*call save_hyperparameters"):
        module.hparams.lr
    module.hparams.lr = 0.1
    assert module.hparams["lr"] == 0.1


def test_missing_hyper_parameters_raise_with_the_known_names():
    hparams = Net(8).hparams
    with pytest.raises(AttributeError, match=r"no hyper-parameter 'wdth'.*'width', 'depth'"):
        hparams.wdth
    with pytest.raises(AttributeError, match="no hyper-parameter 'wdth'"):
        del hparams.wdth
    assert not hasattr(hparams, "wdth")
    del hparams.width
    assert "width" not in hparams


def test_copies_of_a_module_have_hyper_parameters_of_their_own():
    net = Net([1])
    for twin in (copy.deepcopy(net), copy.copy(copy.deepcopy(net))):
        assert twin.hparams == net.hparams
        assert type(twin.hparams) is HyperParameters
        twin.hparams.width.append(2)
    assert net.hparams.width == [1]
    assert pickle.loads(pickle.dumps(net.hparams)) == net.hparams


# -- subclasses ------------------------------------------------------------------------------------


class Base(TrainModule):
    def __init__(self, width, lr=0.1):
        super().__init__()
        self.save_hyperparameters()


class Child(Base):
    def __init__(self, factor, lr=0.2, **rest):
        super().__init__(factor * 10, lr=lr / 2, **rest)
        self.built = (factor, lr)


def test_a_base_class_keeps_the_arguments_of_its_subclass_too():
    child = Child(3)
    assert child.hparams == {"width": 30, "lr": 0.2, "factor": 3}  # lr as the class itself got it
    assert through_json(child)["arguments"] == {"lr": 0.2, "factor": 3}
    assert through_json(child)["others"] == {"width": 30}
    twin = again(child)
    assert twin.built == child.built
    assert twin.hparams == child.hparams


def test_each_class_may_call_it():
    class Third(Base):
        def __init__(self, name):
            super().__init__(5)
            self.save_hyperparameters()

    third = Third("x")
    assert third.hparams == {"width": 5, "lr": 0.1, "name": "x"}
    assert again(third).hparams == third.hparams


def test_a_module_made_inside_another_ones_init_keeps_its_own():
    class Outer(TrainModule):
        def __init__(self, size):
            super().__init__()
            self.inner = Net(size + 1)
            self.save_hyperparameters()

    outer = Outer(1)
    assert outer.hparams == {"size": 1}
    assert outer.inner.hparams.width == 2
    assert "size" not in outer.inner.hparams


def test_a_decorated_init_and_a_helper_are_seen_through():
    def decorate(init):
        @functools.wraps(init)
        def wrapped(*args, **kwargs):
            return init(*args, **kwargs)

        return wrapped

    class Decorated(Base):
        @decorate
        def __init__(self, a):
            super().__init__(a)
            self.keep_them()

        def keep_them(self):
            self.save_hyperparameters("a")

    decorated = Decorated(2)
    assert decorated.hparams == {"width": 2, "lr": 0.1, "a": 2}
    assert again(decorated).hparams == decorated.hparams


def test_a_dataclass_keeps_its_fields():
    @dataclass(eq=False)
    class Data(TrainModule):
        width: int
        lr: float = 0.5

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    assert again(Data(3)).hparams == {"width": 3, "lr": 0.5}


# -- one dict of values ----------------------------------------------------------------------------


class Configured(TrainModule):
    def __init__(self, config, extra=None):
        super().__init__()
        self.save_hyperparameters(config)
        self.config = config


@pytest.mark.parametrize("kind", [dict, Namespace, OrderedDict])
def test_a_dict_that_was_the_argument_is_passed_as_such(kind):
    module = Configured(kind(lr=0.1, sizes=(1, 2)))
    assert module.hparams == {"lr": 0.1, "sizes": (1, 2)}
    module.hparams.lr = 0.2
    twin = again(module)
    values = twin.config if kind is not Namespace else vars(twin.config)
    assert values == {"lr": 0.2, "sizes": (1, 2)}
    assert isinstance(twin.config, Namespace if kind is Namespace else dict)
    assert again(module, config={"lr": 5}).hparams == {"lr": 5}


def test_a_dict_of_arguments_is_passed_one_by_one_and_other_items_are_not():
    class Some(TrainModule):
        def __init__(self, a, b=1):
            super().__init__()
            self.save_hyperparameters({"a": a, "note": "n", "skipped": object}, ignore="skipped")

    some = Some(4)
    assert some.hparams == {"a": 4, "note": "n"}
    assert again(some).hparams.a == 4


def test_a_dict_that_the_base_class_was_given_is_not_an_argument_of_the_subclass():
    class Sub(Configured):
        def __init__(self, lr):
            super().__init__({"lr": lr, "more": 1})

    sub = Sub(0.3)
    assert through_json(sub)["arguments"] == {"lr": 0.3}
    assert again(sub).hparams == {"lr": 0.3, "more": 1}


# -- values ----------------------------------------------------------------------------------------


class Colour(str, Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Opaque(Enum):
    A = 1


Pair = namedtuple("Pair", "left right")
Odd = namedtuple("Odd", "class left", rename=True)

PLAIN = [
    *(None, True, 0, -7, 2**80, 0.1, "text", "", b"\x00", float("inf")),
    *([1, [2, (3, [])]], (1,), {}, {"a": {"b": (1, 2)}}, {1: "one", (2, 3): None, "$": 1}),
    *({1, 2}, frozenset({"a"}), torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])),
]


def typed(value):
    """The value with the types in it, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(item) for item in value]
    return type(value), value


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_equal(value):
    net = Net(value)
    assert typed(net.hparams.width) == typed(value)
    assert typed(again(net).given[0]) == typed(value)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (Path("a") / "b", "a/b"),
        ([Path("a")], ["a"]),
        (Colour.RED, "red"),
        ({Level.HIGH: Colour.RED}, {3: "red"}),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (OrderedDict(a=1), {"a": 1}),
        (HyperParameters(a=Path("x")), {"a": "x"}),
        (Pair(1, Path("x")), Pair(1, "x")),
        (Odd(1, 2), Odd(1, 2)),  # its first field is named `_0`
        (UserList([1, Path("x")]), [1, "x"]),  # as OmegaConf's lists are
    ],
    ids=repr,
)
def test_values_with_a_plain_form_are_kept_in_it(value, kept):
    net = Net(value)
    assert typed(net.hparams.width) == typed(kept)
    assert typed(again(net).hparams.width) == typed(kept)


@pytest.mark.parametrize(
    "value",
    [*(torch.nn.Linear(1, 1), torch.ones(2), np.ones(2), Opaque.A, len, int, Namespace(a=1))],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_name_with_the_fix(value):
    with pytest.raises(TypeError) as caught:
        Net(value)
    text = str(caught.value)
    assert f"but width is of type {type(value).__qualname__}. " in text
    assert "save_hyperparameters(ignore=['width'])" in text
    assert "load_from_checkpoint(…, width=…)" in text
    assert ("save_hyperparameters(width)." in text) == isinstance(value, Namespace)


def test_all_that_is_not_plain_data_is_named_at_once():
    class Model(TrainModule):
        def __init__(self, encoder, width, loss, config):
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(TypeError) as caught:
        Model(torch.nn.Linear(1, 1), 3, object(), {"table": [torch.ones(1)], "lr": 1, "f": len})
    assert (
        "encoder is of type Linear, loss is of type object, config['table'][0] is of type Tensor, "
        "config['f'] is of type builtin_function_or_method. "
    ) in str(caught.value)
    assert "ignore=['encoder', 'loss', 'config'])" in str(caught.value)
    assert "load_from_checkpoint(…, encoder=…, loss=…, config=…)" in str(caught.value)


def test_hyper_parameters_that_cannot_be_saved_are_refused_before_the_first_step():
    class Late(Net):
        def setup(self, stage):
            self.hparams.update(one=object(), two=len)

        def training_step(self, batch, batch_idx):
            raise AssertionError("a step")

        def configure_optimizers(self):
            return None

    data = torch.utils.data.DataLoader(torch.ones(2, 1))
    with pytest.raises(TypeError, match=r"plain data .* one is of type .*, two is of"):
        Trainer(max_epochs=1, cpu=True, progress_bar=False).fit(Late(1), data)


def test_a_value_set_later_is_checked_when_it_is_saved():
    net = Net(1)
    net.hparams.width = Path("x")
    assert again(net).given[0] == "x"
    net.hparams.width = object()
    with pytest.raises(TypeError, match="width is of type object"):
        to_manifest(net)


# -- wrong calls -----------------------------------------------------------------------------------


def module_whose_init(body):
    class Wrong(TrainModule):
        def __init__(self, width, *sizes, **rest):
            super().__init__()
            body(self)

    return Wrong


def test_a_name_that_is_no_argument_is_refused_with_the_nearest():
    wrong = module_whose_init(lambda self: None)

    class Sub(wrong):
        def __init__(self, width):
            super().__init__(width)
            self.save_hyperparameters("widht")

    with pytest.raises(ValueError, match=r"argument of Sub is 'widht'.*Did you mean 'width'"):
        Sub(1)


def test_save_hyperparameters_outside_init_needs_values():
    with pytest.raises(RuntimeError, match=r"Base.__init__, which is not running"):
        Base(1).save_hyperparameters()
    with pytest.raises(TypeError, match="named 1; names must be strings"):
        Base(1).save_hyperparameters({1: 2})


def test_arguments_by_position_without_a_name_are_refused_unless_ignored():
    class Sizes(TrainModule):
        def __init__(self, *sizes, ignore=None, lr=1):
            super().__init__()
            self.save_hyperparameters(*(["lr"] if ignore == "named" else []), ignore=ignore)

    with pytest.raises(TypeError, match=r"Sizes was given.*\*sizes.*ignore='sizes'"):
        Sizes(1, 2)
    assert Sizes().hparams == {"ignore": None, "lr": 1}
    assert Sizes(1, 2, ignore="sizes").hparams == {"ignore": "sizes", "lr": 1}
    assert Sizes(1, 2, ignore="named").hparams == {"lr": 1}


# -- made again ------------------------------------------------------------------------------------


def test_a_missing_argument_is_named_with_the_fix():
    class Needs(TrainModule):
        def __init__(self, lr, encoder, head):
            super().__init__()
            self.save_hyperparameters("lr")

    needs = Needs(1, 2, 3)
    with pytest.raises(TypeError) as caught:
        again(needs)
    assert str(caught.value).startswith(
        "Needs cannot be created: here does not hold its arguments encoder, head. Pass "
        "load_from_checkpoint(…, encoder=…, head=…), or call self.save_hyperparameters()"
    )
    with pytest.raises(TypeError, match=r"its argument head\. Pass"):
        again(needs, encoder=1)
    assert again(needs, encoder=1, head=1).hparams == {"lr": 1}


def test_another_class_is_refused_with_both_lists():
    text = "arguments width, depth, betas, path.*Configured does not take: it takes config, extra"
    with pytest.raises(CheckpointError, match=text):
        make(Configured, through_json(Net(1)), {"config": 1}, "here")


@pytest.mark.parametrize(
    "saved",
    [[], {"arguments": 3}, {"arguments": {"width": {"$": "nothing"}}}, {"namespaces": ["x"]}],
    ids=repr,
)
def test_malformed_hyper_parameters_raise_a_checkpoint_error(saved):
    with pytest.raises(CheckpointError, match="hyper-parameters in here cannot be read"):
        make(Net, saved, {"width": 1}, "here")


# -- trackers --------------------------------------------------------------------------------------


def test_logger_false_keeps_values_from_trackers():
    class Private(TrainModule):
        def __init__(self, a, b, c):
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.save_hyperparameters("b")

    private = Private(1, 2, 3)
    assert private.hparams == {"a": 1, "b": 2, "c": 3}
    assert logged(private) == {"b": 2}
    assert logged(Net(1)) == dict(Net(1).hparams)
    assert again(private).hparams == private.hparams
