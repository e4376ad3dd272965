"""A model prepared in one process, compiled or not, and what comes out of it again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.helpers.engines import no_sync, options, prepare, trigger_sync
from trainer.configuration import TorchDynamoPlugin
from trainer.engines.choose import choose_engine
from trainer.engines.compile import compile_model, is_compiled, torch_arguments, uncompiled
from trainer.engines.ddp import find_ddp
from trainer.engines.model import prepare_model, unwrap_model, verify_device_map
from trainer.names import bare_state_dict
from trainer.precision import Precision

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
EAGER = TorchDynamoPlugin(backend="eager")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batch() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(7))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(batch()).square().sum().backward()
    return [parameter.grad for parameter in unwrap_model(model).parameters()]


def compiles(model: nn.Module, plugin: TorchDynamoPlugin | None = None) -> int:
    """How often a backend was asked to compile something while the model ran."""
    torch._dynamo.utils.counters.clear()
    model(batch())
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_one_process_returns_the_model_itself():
    model = network()
    assert prepare(model) is model
    assert unwrap_model(model) is model
    assert "forward" not in vars(model)
    assert find_ddp(model) is None


@pytest.mark.parametrize("device", [None, torch.device("meta")])
def test_a_model_moves_only_where_the_arguments_ask_for_it(device):
    model = prepare_model(
        network(), choose_engine(options()), precision=Precision("no", CPU), device=device
    )
    assert model[0].weight.device.type == ("cpu" if device is None else "meta")


@pytest.mark.parametrize("quantised", ["is_loaded_in_8bit", "is_loaded_in_4bit"])
def test_a_quantised_model_stays_where_it_is(quantised):
    model = network()
    setattr(model, quantised, True)
    prepare_model(
        model, choose_engine(options()), precision=Precision("no", CPU), device=torch.device("meta")
    )
    assert model[0].weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("device_map", "spread"), [(None, False), ({"": 0}, False), ({"0": 0, "3": "cpu"}, True)]
)
def test_a_model_that_a_device_map_spread_stays_where_it_is(device_map, spread):
    model = network()
    model[3].hf_device_map = device_map  # a part of it
    assert verify_device_map(model) is spread
    prepare_model(
        model, choose_engine(options()), precision=Precision("no", CPU), device=torch.device("meta")
    )
    assert model[0].weight.device.type == ("cpu" if spread else "meta")


@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_the_forward_pass_computes_in_the_precision(evaluation_mode):
    model, seen = network(), []
    model[3].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    prepared = prepare(model, "bf16", evaluation_mode=evaluation_mode)
    assert prepared(batch()).dtype == torch.float32
    assert seen == [torch.bfloat16]
    assert unwrap_model(prepared)(batch()).dtype == torch.float32
    assert unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)
    model(batch())
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("mode", ["no", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_the_same(backend, mode):
    plain = prepare(network(), mode)
    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True)
    compiled = prepare(network(), mode, dynamo_plugin=plugin)
    assert compiles(plain) == 0
    assert compiles(compiled) == 1
    plain[1].reset_running_stats()
    compiled[1].reset_running_stats()
    for expected, found in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(found, expected)
    for expected, found in zip(plain.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_inductor_compiles_too():
    plain, compiled = (prepare(nn.Linear(4, 2), dynamo_plugin=plugin) for plugin in (None, EAGER))
    compiled.load_state_dict(plain.state_dict())
    compile_model(compiled, TorchDynamoPlugin(backend="inductor"))  # a second time: left as it is
    fast = copy.deepcopy(plain)
    compile_model(fast, TorchDynamoPlugin(backend="inductor"))
    assert compiles(fast) == 1
    torch.testing.assert_close(fast(batch()), plain(batch()))
    torch.testing.assert_close(compiled(batch()), plain(batch()))


def test_a_compiled_model_keeps_its_class_and_its_names():
    names = list(network().state_dict())
    model = prepare(network(), "bf16", dynamo_plugin=EAGER)
    assert type(unwrap_model(model)) is type(model) is nn.Sequential
    assert list(model.state_dict()) == list(bare_state_dict(model)) == names
    assert is_compiled(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_not_compiled_and_has_weights_of_its_own(duplicate):
    model = prepare(network(), dynamo_plugin=EAGER)
    other = duplicate(model)
    assert not is_compiled(other)
    assert compiles(other) == 0
    torch.testing.assert_close(other(batch()), model(batch()))
    assert other[0].weight is not model[0].weight


@pytest.mark.parametrize(
    "plugin",
    [None, TorchDynamoPlugin(backend="no"), TorchDynamoPlugin(backend="eager", disable=True)],
)
def test_nothing_is_compiled_unasked(plugin):
    assert compiles(prepare(network(), dynamo_plugin=plugin)) == 0


def test_an_unknown_dynamo_backend_raises_with_the_known_ones():
    with pytest.raises(ValueError, match=r"dynamo backend is 'fx2trt'; .*'aot_eager'.*'inductor'"):
        prepare(network(), dynamo_plugin=TorchDynamoPlugin(backend="fx2trt"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nonsense": 1}, r"options={'nonsense': 1}, but inductor has no 'nonsense'\. torch\._ind"),
        ({"max_autotun": True}, r"no 'max_autotun'\. Did you mean 'max_autotune'\?"),
        ({"max_autotune": "x"}, r"Unexpected type of attr max_autotune, got str should be bool\."),
    ],
)
def test_an_option_that_inductor_lacks_is_refused_before_anything_compiles(options, text):
    plugin = TorchDynamoPlugin(backend="inductor", options=options)
    with pytest.raises(ValueError, match=text):
        prepare(network(), dynamo_plugin=plugin)
    known = {"max-autotune": True}  # torch takes both spellings
    assert torch_arguments(TorchDynamoPlugin(backend="inductor", options=known))["options"] == known


def test_a_model_that_the_user_compiled_is_not_compiled_again_and_has_bare_names():
    inner = network()
    own = torch.compile(inner, backend="eager")
    prepared = prepare(own, "bf16", dynamo_plugin=EAGER)
    assert prepared is own
    assert own._compiled_call_impl is None
    assert prepared(batch()).dtype == torch.float32
    assert hasattr(inner, "_original_forward")  # autocast is inside the compiled code
    assert uncompiled(own) is unwrap_model(own) is inner
    assert list(bare_state_dict(own)) == list(inner.state_dict())
    assert next(iter(own.state_dict())) == "_orig_mod.0.weight"


def test_data_parallel_is_unwrapped():
    inner = network()
    assert unwrap_model(nn.DataParallel(inner)) is inner
    assert unwrap_model(torch.compile(nn.DataParallel(inner), backend="eager")) is inner


def test_one_process_synchronises_nothing():
    expected = gradients(network())
    model = prepare(network())
    with no_sync(model), trigger_sync(model):
        found = gradients(model)
    torch.testing.assert_close(found, expected)
