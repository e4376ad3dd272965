"""Hooks around the forward pass, and tensors of modules one by one."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from trainer.big_models import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    has_offloaded_params,
    init_empty_weights,
    init_on_device,
    named_module_tensors,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Plus(ModelHook):
    def __init__(self, before=0.0, after=0.0):
        self.before, self.after, self.seen = before, after, []

    def init_hook(self, module):
        self.seen.append("init")
        return module

    def pre_forward(self, module, x, **kwargs):
        return (x + self.before,), kwargs

    def post_forward(self, module, output):
        return output + self.after

    def detach_hook(self, module):
        self.seen.append("detach")
        return module


def test_hooks_change_inputs_and_outputs_and_leave_without_a_trace():
    net = nn.Linear(4, 4)
    plain, before = net.forward(X), dict(vars(net))
    first, second = Plus(before=1), Plus(after=2)
    assert add_hook_to_module(net, first) is net
    assert torch.equal(net(X), net._old_forward(X + 1))
    assert inspect.signature(net.forward) == inspect.signature(nn.Linear(4, 4).forward)
    add_hook_to_module(net, second, append=True)
    assert isinstance(net._hf_hook, SequentialHook)
    assert torch.equal(net(X), net._old_forward(X + 1) + 2)
    assert first.seen == ["init"]
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(other(X), (other.bias + 2).expand(3, 4))
    add_hook_to_module(net, Plus(after=3))  # in place of the others
    assert torch.equal(net(X), plain + 3)
    assert first.seen == second.seen == ["init", "detach"]
    assert remove_hook_from_module(net) is net
    assert vars(net) == before
    assert torch.equal(net(X), plain)


def test_hooks_of_submodules_are_removed():
    for remove in (lambda n: remove_hook_from_module(n, recurse=True), remove_hook_from_submodules):
        net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
        attach_execution_device_hook(net, "cpu")
        assert [hasattr(part, "_hf_hook") for part in net.modules()] == [True, True, False, False]
        remove(net)
        assert not any(hasattr(part, "_hf_hook") for part in net.modules())


def test_a_hook_without_gradients_and_a_forward_of_the_instance():
    class Quiet(ModelHook):
        no_grad = True

    net = nn.Linear(4, 4)
    own = net.forward = lambda x: nn.functional.linear(x, net.weight) * 2
    add_hook_to_module(net, Quiet())
    assert not net(X).requires_grad
    remove_hook_from_module(net)
    assert net.forward is own
    assert net(X).requires_grad


def test_inputs_on_the_device_stay_the_callers_objects():
    class Keeps(nn.Module):
        def forward(self, cache, *, table):
            cache.append(1)
            table["seen"] = True

    net = add_hook_to_module(Keeps(), AlignDevicesHook("cpu"))
    cache, table = [torch.ones(1)], {}
    net(cache, table=table)
    assert (len(cache), table) == (2, {"seen": True})


def test_inputs_are_moved_and_outputs_return():
    class Where(nn.Module):
        def forward(self, x, *, past, skipped):
            return {"found": (x["a"][0].device.type, past.device.type), "skipped": skipped}

    hook = AlignDevicesHook("meta", io_same_device=True, skip_keys="skipped")
    net = add_hook_to_module(Where(), hook)
    out = net({"a": (X,)}, past=X, skipped=X)
    assert out["found"] == ("meta", "meta")
    assert out["skipped"] is X
    assert "execution_device='meta'" in repr(hook)
    add_hook_to_module(net, AlignDevicesHook(io_same_device=True))
    out = net({"a": (X.to("meta"),)}, past=X, skipped=X)
    assert out["found"] == ("meta", "cpu")
    assert out["skipped"].is_meta


@pytest.mark.parametrize("own", [True, False])
def test_weights_are_there_during_the_forward_pass_alone(own):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    plain, state = net(X), {k: v.clone() for k, v in net.state_dict().items()}
    attach_align_device_hook(
        net, "cpu", offload=True, offload_buffers=True, weights_map=None if own else state
    )
    assert all(tensor.is_meta for _, tensor in named_module_tensors(net, recurse=True))
    assert torch.equal(net(X), plain)
    assert [has_offloaded_params(part) for part in net.modules()] == [False, True, True]
    with align_module_device(net[0]):
        assert torch.equal(net[0].weight, state["0.weight"])
    with align_module_device(net[1], torch.device("cpu")):
        assert torch.equal(net[1].running_var, state["1.running_var"])
    assert net[0].weight.is_meta
    assert net[1].running_var.is_meta
    remove_hook_from_submodules(net)
    assert torch.equal(net(X), plain)
    weight = net[0].weight
    for device in (None, torch.device("cpu")):
        with align_module_device(net[0], device):
            assert net[0].weight is weight
    with align_module_device(nn.Linear(2, 2).to("meta"), torch.device("meta")):
        pass


@pytest.mark.parametrize("offload", [False, True, {"": False, "2": True}])
@pytest.mark.parametrize("device", ["cpu", {"": "cpu"}])
def test_blocks_by_one_place_or_by_name(device, offload):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = net(X)
    attach_align_device_hook_on_blocks(net, device, offload, weights_map=dict(net.state_dict()))
    assert torch.equal(net(X), plain)
    away = [net[0].weight.is_meta, net[2].weight.is_meta]
    assert away == ([False, True] if isinstance(offload, dict) else [offload, offload])


def test_offloaded_models_without_a_device_of_their_own():
    hook = CpuOffload("cpu")
    net = add_hook_to_module(nn.Linear(4, 4), hook)
    handle = UserCpuOffloadHook(net, hook)
    net(X)
    handle.offload()
    handle.remove()
    assert CpuOffload().execution_device.type in ("cpu", "cuda", "mps", "xpu")
    assert not hasattr(net, "_hf_hook")


def test_layers_are_kept_in_a_small_dtype():
    net = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 9))
    net[3].weight = net[0].weight  # tied
    first = copy.deepcopy(net)
    ids = torch.arange(9)
    attach_layerwise_casting_hooks(net, torch.float8_e4m3fn, torch.float32)
    assert [net[n].weight.dtype for n in range(4)] == [
        *(torch.float32, torch.float32, torch.float8_e4m3fn, torch.float32)
    ]
    rounded = copy.deepcopy(first)
    rounded[2].to(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(net(ids), rounded(ids))
    assert net[2].weight.dtype == torch.float8_e4m3fn
    for skip in ({"skip_modules_pattern": "2"}, {"skip_modules_classes": (nn.Linear,)}):
        net = copy.deepcopy(first)
        attach_layerwise_casting_hooks(net, torch.float8_e4m3fn, torch.float32, **skip)
        assert torch.equal(net(ids), first(ids))
    layer = add_hook_to_module(
        nn.Linear(4, 4), LayerwiseCastingHook(torch.half, torch.float, False)
    )
    assert layer(X).dtype == torch.float32
    assert layer.weight.dtype == torch.half


@pytest.mark.parametrize("buffers", [False, True])
def test_modules_are_made_without_memory(buffers, monkeypatch):
    if buffers:
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        net = nn.Sequential(nn.Linear(10**4, 10**4), nn.BatchNorm1d(4), nn.LazyLinear(3))
        net.tied = nn.Linear(10**4, 10**4)
        net.tied.weight = net[0].weight
        net[0].weight.requires_grad_(False)
    assert net.tied.weight is net[0].weight
    assert all(parameter.is_meta for parameter in [*net[:2].parameters(), *net.tied.parameters()])
    assert net[1].running_mean.is_meta is buffers
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        1 / 0
    assert not nn.Linear(2, 2).weight.is_meta
    with init_on_device(torch.device("cpu:0")):  # tensors there say "cpu"
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight = net[0].weight
    assert not net[0].weight.is_meta
    assert net[1].weight is net[0].weight


def test_single_tensors_are_set():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3)).to("meta")
    net[0].weight.requires_grad_(False)
    net[0].weight.note = "kept"
    value = torch.rand(3, 2)
    set_module_tensor_to_device(net, "0.weight", "cpu", value)
    assert torch.equal(net[0].weight, value)
    assert not net[0].weight.requires_grad
    assert net[0].weight.note == "kept"
    set_module_tensor_to_device(net, "0.weight", "cpu", dtype="float16")
    assert net[0].weight.dtype == torch.float16
    set_module_tensor_to_device(net, "1.running_mean", "cpu", torch.ones(3, dtype=torch.double))
    assert torch.equal(net[1].running_mean, torch.ones(3))
    assert isinstance(net[1].running_mean, torch.Tensor)
    copies = {value.data_ptr(): {}}
    set_module_tensor_to_device(net, "0.weight", "cpu", value, tied_params_map=copies)
    shared = net[0].weight
    set_module_tensor_to_device(net, "0.weight", "meta")
    set_module_tensor_to_device(net, "0.weight", "cpu", value, tied_params_map=copies)
    assert net[0].weight is shared
    for wrong, message in (
        (("0.wait", "cpu"), "does not have a parameter or a buffer named '0.wait'"),
        (("9.weight", "cpu"), "has no '9.weight'"),
        (("0.bias", "cpu"), "meta device, we need a `value`"),
        (("0.bias", "cpu", torch.ones(4)), r"shape \(4,\) in '0.bias' \(which has shape \(3,\)\)"),
    ):
        with pytest.raises(ValueError, match=message):
            set_module_tensor_to_device(net, *wrong)
