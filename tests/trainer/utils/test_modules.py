"""Helpers for modules and their weights, by the names that scripts have for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer import Accelerator, AutocastKwargs, utils


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COMPILERS = (utils.compile_regions, utils.compile_regions_fsdp2, utils.compile_regions_deepspeed)


@pytest.mark.parametrize("compile_regions", COMPILERS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_regions_are_compiled_in_place(compile_regions):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, x = Blocks(), torch.ones(2, 3)
    names, expected = list(model.state_dict()), model(x)
    assert not utils.has_compiled_regions(model)
    assert compile_regions(model, backend=backend) is model
    assert utils.has_compiled_regions(model)
    assert not utils.is_compiled_module(model)
    assert utils.is_compiled_module(model.blocks[1])
    assert torch.equal(model(x), expected)
    assert len(graphs) == 3  # embed, one of three blocks, head
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


def test_repeated_blocks():
    model = Blocks()
    assert utils.has_repeated_blocks(model)
    assert utils.is_repeated_blocks(model.blocks)
    assert not utils.is_repeated_blocks(model)
    assert not utils.has_repeated_blocks(model.head)
    assert not utils.has_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.Tanh()]))


def test_a_model_comes_out_of_what_wraps_it():
    model = nn.Linear(1, 1)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert utils.extract_model_from_parallel(nn.DataParallel(prepared)) is model
    assert "forward" in vars(model)
    utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    assert "forward" not in vars(model)
    inside = nn.Sequential(nn.DataParallel(model), nn.Sequential(torch.compile(nn.Tanh())))
    found = utils.extract_model_from_parallel(nn.DataParallel(inside), recursive=True)
    assert found is inside
    assert found[0] is model
    assert type(found[1][0]) is nn.Tanh


def test_parts_come_before_what_holds_them():
    model = Blocks()
    ordered = utils.get_module_children_bottom_up(model)
    assert ordered[-1] is model
    place = {id(module): number for number, module in enumerate(ordered)}
    assert all(
        place[id(child)] < place[id(part)] for part in model.modules() for child in part.children()
    )
    named = utils.get_module_children_bottom_up(model, return_fqns=True)
    assert dict(named) == dict(model.named_modules())
    assert utils.recursive_getattr(model, "blocks.1") is model.blocks[1]


def test_pretty_names():
    assert utils.get_pretty_name(Blocks) == utils.get_pretty_name(Blocks()) == "Blocks"
    assert utils.get_pretty_name(test_pretty_names) == "test_pretty_names"


def test_tensors_that_share_memory_are_kept_once(caplog):
    weight = torch.ones(2, 3)
    kept = utils.clean_state_dict_for_safetensors({"a": weight.t(), "b": weight.t(), "c": "text"})
    assert kept.keys() == {"a", "c"}
    assert kept["a"].is_contiguous()
    assert "Left out b" in caplog.text


def test_parameters_of_modules_by_name_or_as_they_are():
    model = Blocks()
    found = utils.get_parameters_from_modules(r"blocks\.[01]", model, "cpu")
    assert found == {*model.blocks[0].parameters(), *model.blocks[1].parameters()}
    assert utils.get_parameters_from_modules([model.head], model, "cpu") == {
        *model.head.parameters()
    }
    assert utils.get_parameters_from_modules(None, model, "cpu") == set()


def test_tied_weights_are_tied_again():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    model[1].weight = model[0].weight
    model._tied_weights_keys = ["1.weight"]

    def give_memory(module):
        return module.to_empty(device="cpu", recurse=False)

    assert utils.ensure_weights_retied(give_memory, nn.Linear(1, 1), "cpu") is give_memory
    initialise = utils.ensure_weights_retied(give_memory, model, "cpu")
    for module in model.modules():
        initialise(module)
    assert model[0].weight is model[1].weight
    assert not model[0].weight.is_meta
    assert model[0].bias is not model[1].bias


def test_names_without_those_of_wrappers():
    names = ["_orig_mod.a", "b._orig_mod.c", "d._checkpoint_wrapped_module.e", "plain.weight"]
    found = utils.fsdp2_canonicalize_names(dict.fromkeys(names, 1))
    assert list(found) == ["a", "b.c", "d.e", "plain.weight"]


def test_models_of_other_libraries():
    from peft import LoraConfig, get_peft_model

    assert not utils.is_peft_model(Blocks())
    assert utils.is_peft_model(get_peft_model(Blocks(), LoraConfig(target_modules=["head"])))
    assert not utils.model_has_dtensor(Blocks())
    assert utils.get_model_tp_size(Blocks()) is None
    for model, size in (
        (SimpleNamespace(tp_size=2), 2),
        (SimpleNamespace(config=SimpleNamespace(distributed_config={"tp_size": 4})), 4),
    ):
        assert utils.get_model_tp_size(model) == size


def test_contexts_and_scalers_are_those_of_the_precision():
    Accelerator(cpu=True, mixed_precision="bf16")
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    for handler, native, dtype in (
        (None, True, torch.bfloat16),
        (None, False, torch.float32),
        (AutocastKwargs(enabled=False), True, torch.float32),
    ):
        with utils.get_mixed_precision_context_manager(native, handler):
            assert linear(x).dtype == dtype
    for make in (utils.get_grad_scaler, utils.get_fsdp2_grad_scaler):
        assert make(init_scale=4.0).state_dict()["scale"] == 4.0


def test_ram_efficient_loading_sets_the_variables_of_transformers(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    utils.enable_fsdp_ram_efficient_loading()
    read = utils.parse_flag_from_env
    assert (read("ACCELERATE_USE_FSDP"), read("FSDP_CPU_RAM_EFFICIENT_LOADING")) == (True, True)
    utils.disable_fsdp_ram_efficient_loading()
    assert (read("ACCELERATE_USE_FSDP"), read("FSDP_CPU_RAM_EFFICIENT_LOADING")) == (True, False)
