"""Trees go to disk and come back bit for bit; what cannot is refused with its place."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.helpers import layouts
from trainer.big_models import OffloadedWeightsLoader, offload_weight
from trainer.checkpoint.serialization import DTYPES, load_tree, save_tree
from trainer.checkpoint.weights import load_weights, save_weights
from trainer.errors import CheckpointError


def round_trip(tree: object) -> object:
    save_tree(tree, Path.cwd(), "tree")
    return load_tree(Path.cwd(), "tree")


def bits(value: object) -> object:
    """What two values share exactly where they are the same: types, order and every bit."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return kind, value.dtype, value.shape, value.stride(), raw.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, dict):
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, map(bits, value)))
    if isinstance(value, (list, tuple)):
        return kind, [bits(item) for item in value]
    return kind, value


PLAIN = {
    "none": None,
    "bools": [True, False, 1, 0],
    "big integers": [2**127, -(2**64), 10**400],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
    "signed nan": struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
    "strings": ["", "ß → \ud800", "$"],
    "bytes": [b"", bytes(range(256))],
    "keys": {1: "a", "1": "b", False: "c", None: "d", (0, "x"): "e", 2.5: "f"},
    "tag as a key": {"$": "tensor", "name": "x"},
    "empty": [[], (), {}, set(), frozenset()],
    "sets": [{1, "a", (2, 3)}, frozenset({b"x"})],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter({30: 2, 10: 1}),
    "torch": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 0])],
    "numpy scalars": [np.float32(0.1), np.int64(-1), np.bool_(True), np.float64("nan")],
    "numpy text": [np.str_("é"), np.datetime64("2024-02-29T12")],
    "numpy arrays": [
        *(np.arange(6, dtype=">i2").reshape(2, 3), np.array(3.5), np.zeros((0, 3), np.uint64)),
        *(np.array(["a", "bcd"]), np.array([1 + 2j]), np.array(["2024"], "M8[ns]")),
        np.array([math.nan, -0.0], np.float16),
    ],
    "tensor": torch.arange(6.0).reshape(2, 3),
    "scalar tensor": torch.tensor(2.5, dtype=torch.float64),
    "empty tensors": [torch.zeros(0), torch.zeros(3, 0, dtype=torch.int8)],
    "names that collide": {0: torch.zeros(1), "0": torch.ones(1), "0#1": torch.ones(2)},
    "names made apart that collide": {"0#2": torch.ones(3), 0: torch.zeros(1), "0": torch.ones(1)},
    "nested names that collide": {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)},
    "channels last": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).reshape(2, 3).t(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_comes_back_with_its_type_and_bits(name):
    assert bits(round_trip(PLAIN[name])) == bits(PLAIN[name])


def can_copy(dtype: torch.dtype) -> bool:
    """Whether this torch copies such tensors at all: 2.9 has no copies of 4-bit floats."""
    try:
        torch.empty(1, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("dtype", sorted(filter(can_copy, DTYPES), key=str))
def test_every_dtype_comes_back(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.arange(1, 1 + 2 * size, dtype=torch.uint8)
    tensor = raw.bool() if dtype == torch.bool else raw.view(dtype)
    assert bits(round_trip({"x": tensor, "twice": tensor})["x"]) == bits(tensor)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_tensors_of_any_memory_layout_come_back(layout):
    tensors, expected = layouts.tensors(layout, 0), layouts.bits(layout, 0)
    save_weights(tensors, Path.cwd())
    for loaded in (round_trip(tensors), load_weights(Path.cwd())):
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert torch.equal(layouts.bits_of(tensor), expected[name]), name
    for name, tensor in tensors.items():
        index = offload_weight(tensor, name, Path.cwd(), {})
        offloaded = OffloadedWeightsLoader(save_folder=Path.cwd(), index=index)[name]
        assert torch.equal(layouts.bits_of(offloaded), expected[name]), name


def test_a_root_tensor_and_the_key_of_the_metadata():
    assert bits(round_trip(torch.ones(2))) == bits(torch.ones(2))
    tree = {"__metadata__": torch.ones(2)}
    assert bits(round_trip(tree)) == bits(tree)


def test_defaultdict():
    tree = defaultdict(list, {3: [torch.ones(1)]})
    loaded = round_trip(tree)
    assert bits(loaded) == bits(tree)
    assert loaded["new"] == []
    assert round_trip(defaultdict(None, {1: 2})).default_factory is None


def test_named_tuple():
    point = namedtuple("Point", "x y")(torch.ones(1), 2)
    loaded = round_trip([point])[0]
    assert (type(loaded).__name__, loaded._fields, loaded.y) == ("Point", ("x", "y"), 2)
    assert torch.equal(loaded.x, point.x)


def test_views_of_one_memory_are_loaded_apart():
    base = torch.arange(10.0)
    tree = [base, base, base[2:5], base[::2], base[:0], base.expand(2, 10)]
    loaded = round_trip(tree)
    assert all(torch.equal(a, b) for a, b in zip(loaded, tree, strict=True))
    loaded[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(loaded[1:], tree[1:], strict=True))


def test_parameters_and_lazy_views_are_loaded_as_plain_tensors():
    parameter = torch.nn.Parameter(torch.ones(2))
    conjugate = torch.tensor([1 + 2j]).conj()
    loaded = round_trip({"p": parameter, "c": conjugate, "n": conjugate.imag})
    assert type(loaded["p"]) is torch.Tensor
    assert not loaded["p"].requires_grad
    assert loaded["c"].tolist() == [1 - 2j]
    assert loaded["n"].tolist() == [-2.0]


def test_loaded_tensors_do_not_depend_on_the_file():
    loaded = round_trip(torch.ones(100))
    with open("tree.safetensors", "r+b") as stream:  # in place, as a mapping would show
        stream.write(bytes(Path("tree.safetensors").stat().st_size))
    assert loaded.sum() == 100


def test_the_same_tree_makes_the_same_files():
    tree = {"set": set(map(str, range(50))), "x": torch.ones(3)}
    save_tree(tree, Path.cwd(), "a")
    save_tree({**tree, "set": set(map(str, reversed(range(50))))}, Path.cwd(), "b")
    a, b = (json.loads(Path(f"{stem}.json").read_text())["tree"] for stem in "ab")
    assert a == b


def test_no_tensor_file_without_tensors():
    save_tree({"x": 1}, Path.cwd(), "tree")
    assert not Path("tree.safetensors").exists()


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Sub(torch.Tensor):
    pass


class Stateful:
    def state_dict(self):
        return {}


REFUSED = {
    "function": (
        {"state": {"0": [print]}},
        r"tree\['state'\]\['0'\]\[0\] is a builtins\.builtin_f",
    ),
    "object": ([object()], r"tree\[0\] is a builtins\.object.*Save plain values"),
    "enum": ({"a": Colour.RED}, r"tree\['a'\] is a .*Colour.*plain values"),
    "int enum": ({"a": Level.LOW}, r"tree\['a'\] is a .*Level.*Save int\(…\) of it"),
    "stateful": ({1: Stateful()}, r"tree\[1\] is a .*Stateful.*its state_dict\(\)"),
    "subclass": (torch.torch_version.TorchVersion("2.0"), r"TorchVersion.*Save str\(…\) of it"),
    "factory": ({"d": defaultdict(lambda: 0)}, r"tree\['d'\] is a defaultdict of .*Save dict\(…\)"),
    "key": ({Colour.RED: 1}, r"tree\[<Colour.RED: 1>\]"),
    "objects": (np.array([None]), r"tree is a numpy\.ndarray"),
    "path": (Path("x"), r"pathlib"),
    "tensor subclass": ({"t": torch.ones(1).as_subclass(Sub)}, r"tree\['t'\] cannot .*full_tensor"),
    "sparse": (torch.eye(2).to_sparse(), r"tree cannot be saved: .*to_dense"),
    "meta": (torch.empty(1, device="meta"), r"on meta.*to_empty"),
    "wide complex": (torch.ones(1, dtype=torch.complex128), r"complex128.*view_as_real"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_objects_raise_with_their_place(name):
    tree, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        save_tree(tree, Path.cwd(), "tree")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tree.json", None),
        ("tree.json", lambda data: data[:-3]),
        ("tree.json", lambda data: b"[]"),
        ("tree.json", lambda data: data.replace(b'"tensor"', b'"hologram"')),
        ("tree.json", lambda data: data.replace(b'"name": "x"', b'"name": "y"')),
        ("tree.safetensors", None),
        ("tree.safetensors", lambda data: data[:-3]),
        ("tree.safetensors", lambda data: b""),
    ],
)
def test_a_damaged_file_raises(file, change):
    save_tree({"x": torch.ones(2)}, Path.cwd(), "tree")
    if change is None:
        Path(file).unlink()
    else:
        Path(file).write_bytes(change(Path(file).read_bytes()))
    with pytest.raises(CheckpointError, match=file):
        load_tree(Path.cwd(), "tree")


def states() -> dict[str, object]:
    """State dicts as optimizers, schedulers, scalers and generators make them."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizers = {
        "AdamW": torch.optim.AdamW([weight], lr=1e-2, amsgrad=True),
        "SGD": torch.optim.SGD([weight], lr=torch.tensor(1e-2), momentum=0.9),
        "LBFGS": torch.optim.LBFGS([weight], max_iter=3, history_size=4),
    }
    for optimizer in optimizers.values():

        def loss(optimizer=optimizer):
            optimizer.zero_grad()
            value = weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    schedulers = {
        "MultiStepLR": MultiStepLR(sgd, [2, 5, 5]),
        "OneCycleLR": OneCycleLR(sgd, 0.1, total_steps=12),
        "SequentialLR": SequentialLR(sgd, [LinearLR(sgd), ExponentialLR(sgd, 0.9)], [4]),
        "ReduceLROnPlateau": ReduceLROnPlateau(sgd, patience=1),
    }
    python, legacy = random.Random(7), np.random.RandomState(7)
    python.gauss(0, 1)  # leaves the second of a pair for the next call
    legacy.randn()
    return {
        **{name: each.state_dict() for name, each in (optimizers | schedulers).items()},
        "GradScaler": torch.amp.GradScaler("cpu", init_scale=8.0).state_dict(),
        "random": python.getstate(),
        "numpy": legacy.get_state(),
        "numpy generator": np.random.Generator(np.random.MT19937(7)).bit_generator.state,
        "torch": torch.Generator().manual_seed(7).get_state(),
    }


@pytest.mark.parametrize("name", states())
def test_state_dicts_come_back_with_their_types_and_bits(name):
    state = states()[name]
    assert bits(round_trip(state)) == bits(state)
