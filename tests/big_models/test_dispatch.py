"""Models spread over the CPU and the disk give the outputs of the plain model, to the last bit."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.requires import requires_cuda
from trainer.big_models import (
    ModelHook,
    OffloadedWeightsLoader,
    add_hook_to_module,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    extract_submodules_state_dict,
    find_tied_parameters,
    has_offloaded_params,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
    remove_hook_from_submodules,
)
from trainer.checkpoint.weights import save_model
from trainer.errors import CheckpointError

WIDTH = 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))  # of its own
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0, persistent=False)

    def forward(self, x, *, extra):
        return {"x": x + self.net(self.norm(x)) * self.scale + self.shift * self.mask + extra[0]}


class Net(nn.Module):
    """Tied weights, buffers of both kinds, keywords, nested inputs, layers of many kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mixer = nn.ModuleDict(
            {
                "attention": nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
                "memory": nn.LSTM(WIDTH, WIDTH, batch_first=True),
                "batch": nn.BatchNorm1d(WIDTH),
            }
        )
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch, *, extra):
        x = self.embed(batch["ids"][0])
        for block in self.blocks:
            x = block(x, extra=extra)["x"]
        x = self.mixer["memory"](self.mixer["attention"](x))[0]
        x = self.mixer["batch"](x.transpose(1, 2)).transpose(1, 2)
        extra.append(x)  # seen by the caller
        return {"logits": [self.head(x)], "none": None}


MAPS = {
    "cpu": {"": "cpu"},
    "device": {"": torch.device("cpu")},
    "disk": {"": "disk"},
    "mixed": {"embed": "cpu", "blocks": "disk", "mixer": "cpu", "head": "cpu"},
    "nested": {"": "disk", "blocks": "cpu", "blocks.1": "disk", "blocks.1.net": "cpu"},
    "tied, first in memory": {"": "cpu", "head": "disk"},
    "tied, first on disk": {"": "cpu", "embed": "disk"},
    "single tensors": {"": "cpu", "blocks.0.scale": "disk", "mixer.memory.weight_hh_l0": "disk"},
}


def make():
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.mixer["batch"].running_mean.uniform_()
    return net


def outputs(net, device="cpu"):
    extra = [torch.linspace(0, 1, WIDTH, device=device)]
    batch = {"ids": (torch.arange(10, device=device).reshape(2, 5),)}
    with torch.no_grad():
        result = net(batch, extra=extra)
    assert result["none"] is None
    return [*result["logits"], *extra]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def state_is(net, expected):
    state = net.state_dict()
    assert list(state) == list(expected)
    return all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.fixture
def expected():
    net = make()
    return outputs(net), net.state_dict()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_a_dispatched_model_is_the_plain_model(places, buffers, expected):
    net = dispatch_model(make(), places, offload_dir="off", offload_buffers=buffers)
    for _ in range(2):
        assert equal(outputs(net), expected[0])
    assert net.hf_device_map == {k: "cpu" if str(v) == "cpu" else v for k, v in places.items()}
    assert state_is(net, expected[1])
    on_meta = {name for name, tensor in net.named_parameters() if tensor.is_meta}
    kept = {
        "head",
        "embed",
    } & places.keys() and "" in places  # a tied one is there by its other name
    assert bool(on_meta) == ("disk" in places.values() and not kept)
    assert bool(find_tied_parameters(net)) == ("embed.weight" not in on_meta)
    remove_hook_from_submodules(net)
    assert equal(outputs(net), expected[0])


@requires_cuda
@pytest.mark.parametrize(
    "places",
    [
        {"": 0},
        {"": "cpu"},
        {"": "disk"},
        {"": 0, "blocks": "cpu", "mixer.memory": "disk"},
        {"": "cpu", "embed": 0},
        {"": 0, "head": "disk"},
    ],
)
def test_an_accelerator_computes_with_weights_that_are_elsewhere(places):
    plain = make().to("cuda")
    net = dispatch_model(make(), places, main_device=0, offload_dir="off", force_hooks=True)
    for _ in range(2):
        assert equal(outputs(net, "cuda"), outputs(plain, "cuda"))
    state, whole = net.state_dict(), plain.state_dict()
    assert all(torch.equal(state[name].cpu(), whole[name].cpu()) for name in whole)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_a_checkpoint_is_loaded_to_its_places(places, buffers, expected):
    save_model(make(), "saved", max_shard_size="4KB")
    with init_empty_weights():
        net = Net().eval()
    load_checkpoint_and_dispatch(
        net, "saved", places, offload_folder="off", offload_buffers=buffers, strict=True
    )
    for file in Path("saved").iterdir():  # links to it are left
        file.unlink()
    assert equal(outputs(net), expected[0])
    assert state_is(net, expected[1])
    in_memory = [name for name, tensor in net.named_parameters() if not tensor.is_meta]
    assert in_memory == [] or set(places.values()) != {"disk"}


def test_every_way_of_offloading_a_whole_model(expected):
    ways = (
        lambda net: cpu_offload(net),
        lambda net: cpu_offload(net, offload_buffers=True, preload_module_classes=["Block"]),
        lambda net: cpu_offload(net, state_dict=make().state_dict()),
        lambda net: disk_offload(net, "off"),
        lambda net: disk_offload(net, "again", offload_buffers=True),
    )
    for way in ways:
        net = make()
        assert way(net) is net
        assert all(parameter.is_meta for parameter in net.parameters())
        assert has_offloaded_params(net.embed)
        assert not has_offloaded_params(net.blocks)
        for _ in range(2):
            assert equal(outputs(net), expected[0])
        assert all(parameter.is_meta for parameter in net.parameters())
        assert state_is(net, expected[1])
        remove_hook_from_submodules(net)
        assert net.head.weight is net.embed.weight
        assert equal(outputs(net), expected[0])
    empty = make().to("meta")
    for name, buffer in make().named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(empty.get_submodule(owner), leaf, buffer)
    assert equal(outputs(disk_offload(empty, "off")), expected[0])  # with what lies there


def test_a_model_that_stays_on_the_device_until_it_is_sent_away(expected):
    first, hook = cpu_offload_with_hook(make(), "cpu")
    second, last = cpu_offload_with_hook(make(), prev_module_hook=hook)
    for net in (first, second, first):
        assert equal(outputs(net), expected[0])
    last.offload()
    last.remove()
    assert not hasattr(second, "_hf_hook")
    assert equal(outputs(second), expected[0])


@pytest.mark.parametrize("how", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_device_map_is_inferred(how, expected):
    save_model(make(), "saved")
    with init_empty_weights():
        net = Net().eval()
    limits = {"cpu": 9000}
    load_checkpoint_and_dispatch(net, "saved", how, limits, ["Block", "LSTM"], offload_folder="off")
    assert net.hf_device_map == infer_auto_device_map(net, limits, ["Block", "LSTM"])
    assert set(net.hf_device_map.values()) == {"cpu", "disk"}
    assert equal(outputs(net), expected[0])
    again = load_checkpoint_and_dispatch(make(), "saved", "auto", offload_folder="off")
    assert again.hf_device_map == {"": "cpu"}
    assert not hasattr(again, "_hf_hook")
    assert load_checkpoint_and_dispatch(make(), "saved") is not None  # without a map


def test_weights_are_converted_on_the_way_to_the_disk():
    save_model(make(), "saved")
    plain = make().to(torch.bfloat16)
    extra = [torch.linspace(0, 1, WIDTH).bfloat16()]
    with init_empty_weights():
        net = Net().eval()
    for name, buffer in plain.named_buffers():  # those that no checkpoint has
        owner, _, leaf = name.rpartition(".")
        setattr(net.get_submodule(owner), leaf, buffer.clone())
    load_checkpoint_and_dispatch(net, "saved", {"": "disk"}, offload_folder="off", dtype="bfloat16")
    index = json.loads(Path("off/index.json").read_text())
    assert index["embed.weight"] == index["head.weight"]  # once
    assert index["embed.weight"]["dtype"] == "bfloat16"
    assert load_file(f"off/{index['embed.weight']['safetensors_file']}").keys() <= {
        "embed.weight",
        "head.weight",
    }
    with torch.no_grad():
        batch = {"ids": (torch.arange(10).reshape(2, 5),)}
        one, other = (each(batch, extra=[*extra])["logits"][0] for each in (net, plain))
    assert torch.equal(one, other)


def test_the_weights_on_disk_follow_the_model_and_not_an_old_folder(expected):
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    dispatch_model(other, {"": "disk"}, offload_dir="off")
    net = dispatch_model(make(), {"": "cpu", "blocks": "disk"}, offload_dir="off")
    assert equal(outputs(net), expected[0])


@pytest.mark.parametrize("dispatch", [dispatch_model, accelerate.dispatch_model])
def test_a_new_map_takes_the_place_of_an_old_one(dispatch, expected):
    class Users(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    users = Users()
    places = dict.fromkeys(["embed", "blocks", "mixer", "head"], "disk")
    net = add_hook_to_module(make(), users)
    dispatch(net, places, offload_dir="old", offload_buffers=True)
    dispatch_model(net, {"": "cpu", "blocks": "disk"}, offload_dir="new")
    assert equal(outputs(net), expected[0])
    kept = []
    if dispatch is dispatch_model:  # accelerate forgets other hooks, and that weights were tied
        kept.append(users)
        assert net.head.weight is net.embed.weight
    assert not net.embed.weight.is_meta
    assert net.blocks[0].scale.is_meta
    assert dispatch_model(net, {"": "cpu"}) is net
    assert equal(outputs(net), expected[0])
    assert [part._hf_hook for part in net.modules() if hasattr(part, "_hf_hook")] == kept
    assert users.calls == 2 * len(kept)


def test_an_offload_index_and_a_state_dict_are_used(expected):
    save_file({k: v.clone() for k, v in expected[1].items()}, "w.safetensors")
    index = {name: {"safetensors_file": "w.safetensors"} for name in expected[1]}
    net = make()
    with torch.no_grad():
        net.embed.weight.zero_()
    dispatch_model(net, {"": "disk"}, offload_index=index, force_hooks=True)
    assert equal(outputs(net), expected[0])


def test_tied_weights_are_in_memory_once():
    save_model(make(), "saved")
    with init_empty_weights():
        net = Net()
    load_checkpoint_in_model(net, "saved", {"": "cpu", "head": "disk"}, "off")
    assert net.head.weight is net.embed.weight
    assert not net.head.weight.is_meta
    dispatch_model(net, {"": "cpu", "head": "disk"}, offload_dir="off")
    assert net.head.weight is net.embed.weight
    outputs(net.eval())
    assert net.head.weight is net.embed.weight
    save_model(disk_offload(make(), "tied"), "again")
    assert "head.weight" not in load_file("again/model.safetensors")
    loader = OffloadedWeightsLoader(save_folder="tied")
    kept = loader["embed.weight"]
    assert loader["head.weight"] is kept


def test_a_copy_of_a_dispatched_model_is_its_own(expected):
    net = dispatch_model(make(), {"": "cpu", "blocks": "disk"}, offload_dir="off")
    other = copy.deepcopy(net)
    with torch.no_grad():
        net.embed.weight.zero_()
    assert equal(outputs(other), expected[0])
    assert not equal(outputs(net), expected[0])


def test_what_cannot_be_done_is_refused(caplog):
    net = make()
    with pytest.raises(ValueError, match=r"`offload_dir`.*blocks\.0"):
        dispatch_model(net, {"": "cpu", "blocks": "disk"})
    with pytest.raises(ValueError, match=r"any device for the following parameters: .*head"):
        dispatch_model(net, {"embed": "cpu", "blocks": "cpu", "mixer": "cpu"})
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['bloks'\]"):
        dispatch_model(net, {"": "cpu", "bloks": "cpu"})
    with pytest.raises(ValueError, match=r"device_map is 'best'; please choose 'auto'"):
        load_checkpoint_and_dispatch(net, "saved", "best")
    with init_empty_weights():
        empty = Net()
    with pytest.raises(ValueError, match=r"embed\.weight.* meta device .*off"):
        dispatch_model(empty, {"": "disk"}, offload_dir="off")
    with pytest.raises(ValueError, match="meta device"):
        dispatch_model(empty, {"": "cpu"}, force_hooks=True)
    lacking = make().state_dict()
    del lacking["mixer.batch.weight"]
    torch.save(lacking, "lacking.bin")
    for places in (None, {"": "cpu"}, {"": "cpu", "blocks": "disk"}):
        with init_empty_weights():
            empty = Net()
        with pytest.raises(ValueError, match=r"^mixer\.batch\.weight are on the meta device"):
            load_checkpoint_and_dispatch(empty, "lacking.bin", places, offload_folder="off")
    count = torch.accelerator.device_count()
    said = rf"There is no device {count} here: it must be one of 'cpu'"
    with pytest.raises(ValueError, match=said):
        dispatch_model(make(), {"": count})
    with pytest.raises(ValueError, match=said):
        load_checkpoint_and_dispatch(make(), "lacking.bin", {"": "cpu", "blocks": count})
    net = dispatch_model(make(), {"": "cpu", "blocks": "disk"}, offload_dir="off")
    for move in (lambda: net.to("cpu"), lambda: net.cpu(), lambda: net.cuda()):
        with pytest.raises(RuntimeError, match="can't move a model"):
            move()
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.scale.*offloaded, so no checkpoint can be loaded"
    ):
        net.load_state_dict(make().state_dict())
    caplog.set_level(logging.WARNING)
    dispatch_model(make(), {"": "cpu"}, force_hooks=True).to("cpu")
    assert "shouldn't move" in caplog.text


def test_a_gradient_of_an_offloaded_weight_is_an_error_and_adapters_train():
    plain, net = make().train(), make().train()
    for model in (plain, net):
        model.mixer.eval()  # no dropout
    dispatch_model(net, {"": "cpu", "blocks": "disk"}, offload_dir="off")
    batch = {"ids": (torch.arange(10).reshape(2, 5),)}

    def loss(model):
        return model(batch, extra=[torch.ones(WIDTH)])["logits"][0].square().mean()

    with pytest.raises(RuntimeError, match=r"gradient reached the weight '\w+' of (Linear|Block)"):
        loss(net).backward()
    for model in (plain, net):
        model.zero_grad()
        model.blocks.requires_grad_(False)
        loss(model).backward()
    assert torch.equal(plain.embed.weight.grad, net.embed.weight.grad)


def test_a_forward_pass_that_fails_leaves_no_weights_in_memory():
    net = disk_offload(make(), "off")
    with pytest.raises(TypeError, match="subscriptable"):
        net({"ids": (torch.arange(10).reshape(2, 5),)}, extra=None)
    assert all(parameter.is_meta for parameter in net.parameters())

    class Fails(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            raise MemoryError

    add_hook_to_module(net.embed, Fails(), append=True)
    with pytest.raises(MemoryError):
        outputs(net)
    assert net.embed.weight.is_meta


def test_other_state_than_tensors_stays_where_it_is():
    class Counts(nn.Linear):
        def get_extra_state(self):
            return {"count": 3}

        def set_extra_state(self, state):
            self.state = state

    net = Counts(2, 2)
    x, expected = torch.ones(1, 2), net.state_dict()
    plain = net(x)
    assert torch.equal(cpu_offload(net)(x), plain)
    assert net.state_dict().keys() == expected.keys()


def test_a_compiled_model_runs_its_hooks():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.ones(2, 4)
    with torch.no_grad():
        expected = net(x)
        dispatch_model(net, {"": "cpu", "2": "disk"}, offload_dir="off")
        compiled = torch.compile(net, backend="eager")
        assert all(torch.equal(compiled(x), expected) for _ in range(2))
    assert net[2].weight.is_meta


def test_a_missing_file_is_named():
    net = disk_offload(make(), "off")
    next(Path("off").glob("*norm*")).unlink()
    with pytest.raises(CheckpointError, match=r"off/offload-.*norm.*\.safetensors cannot be read"):
        outputs(net)


def test_two_models_in_one_folder_are_an_error():
    first = disk_offload(make(), "off")
    second = disk_offload(make(), "off")
    outputs(second)
    with pytest.raises(CheckpointError, match="another model has written to the same folder"):
        outputs(first)


def test_load_state_dict_gives_every_name(expected):
    save_model(make(), "saved")
    torch.save(expected[1], "weights.bin")
    for file in ("saved/model.safetensors", "weights.bin"):
        for places in (None, {"embed": "cpu", "blocks": "disk"}):
            loaded = load_state_dict(file, places)
            assert loaded.keys() == expected[1].keys()
            assert all(torch.equal(loaded[name], expected[1][name]) for name in loaded)
    blocks = extract_submodules_state_dict(loaded, ["blocks.1", "head.weight"])
    assert {name.rpartition(".")[0] for name in blocks} == {
        *("blocks.1", "blocks.1.norm", "blocks.1.net", "head")
    }
