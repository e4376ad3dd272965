"""Linear layers in 8 and 4 bits: those that bitsandbytes makes of the same weights."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tests.helpers.requires import requires_bitsandbytes
from trainer import Accelerator
from trainer.big_models import (
    BnbQuantizationConfig,
    init_empty_weights,
    load_and_quantize_model,
)
from trainer.checkpoint.weights import save_model

BITS = {
    "8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}
X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
        self.gate = nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        x = self.norm(x)
        return self.head(self.body(x) + self.gate(x))


def make():
    torch.manual_seed(0)
    return Net().eval()


def reference(bits):
    """The layers as the documentation of bitsandbytes makes them."""
    import bitsandbytes

    net = make()
    for name in ("body.0", "body.2"):
        old = net.get_submodule(name)
        sizes = old.in_features, old.out_features, old.bias is not None
        if bits == "8":
            new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        else:
            kind = {
                "nf4": {"quant_type": "nf4", "compute_dtype": torch.float32},
                "fp4": {"quant_type": "fp4", "compute_dtype": torch.float16},
            }
            new = bitsandbytes.nn.Linear4bit(
                *sizes, compress_statistics=bits == "fp4", **kind[bits]
            )
        new.load_state_dict(old.state_dict())
        net.set_submodule(name, new.to("cpu"))
    return net.eval()  # in training bitsandbytes multiplies in another way


@requires_bitsandbytes
@pytest.mark.parametrize("source", ["checkpoint", "shards", "model"])
@pytest.mark.parametrize("bits", BITS)
def test_layers_are_those_of_bitsandbytes(bits, source):
    config = BnbQuantizationConfig(**BITS[bits], skip_modules=["gate", "head"])
    if source == "model":
        net = load_and_quantize_model(make(), config)
    else:
        save_model(make(), "saved", max_shard_size="10GB" if source == "checkpoint" else "8KB")
        with init_empty_weights():
            net = Net().eval()
        net = load_and_quantize_model(net, config, "saved", device_map={"": "cpu"})
    assert net.body[0].weight.dtype == (torch.int8 if bits == "8" else torch.uint8)
    assert net.gate.weight.dtype == torch.float32
    prepared = Accelerator(cpu=True).prepare(net)  # which does not move it
    with torch.no_grad():
        expected = reference(bits)(X)
        assert torch.equal(prepared(X), expected)
        assert not torch.equal(make()(X), expected)
        assert torch.allclose(make()(X), expected, atol=0.2)


@requires_bitsandbytes
def test_what_is_left_out_and_on_disk():
    save_model(make(), "saved")
    config = BnbQuantizationConfig(
        load_in_8bit=True, torch_dtype=torch.bfloat16, keep_in_fp32_modules=["norm"]
    )
    with init_empty_weights():
        net = Net().eval()
    places = {"": "cpu", "gate": "disk"}
    with pytest.raises(ValueError, match="give an offload_folder"):
        load_and_quantize_model(net, config, "saved", places)
    net = load_and_quantize_model(net, config, "saved", places, offload_folder="off")
    dtypes = {name: parameter.dtype for name, parameter in net.named_parameters()}
    assert dtypes["norm.weight"] == torch.float32
    assert dtypes["body.0.weight"] == dtypes["body.2.weight"] == torch.int8
    assert dtypes["head.weight"] == dtypes["gate.weight"] == dtypes["body.0.bias"] == torch.bfloat16
    assert net.gate.weight.is_meta
    with torch.no_grad():
        x = net.body(make().norm(X).bfloat16())
        assert x.dtype == torch.bfloat16
        assert torch.equal(net.gate(x), make().gate.bfloat16()(x))
    with pytest.raises(ValueError, match="No linear layer of Linear is quantised"):
        load_and_quantize_model(nn.Linear(2, 2), config)
    with init_empty_weights():
        net = Net()
    with pytest.raises(ValueError, match="as weights_location"):
        load_and_quantize_model(net, config)


@requires_bitsandbytes
def test_weights_that_are_used_without_their_layer_keep_their_bits():
    save_model(make().half(), "saved")
    with init_empty_weights():
        net = Net().half()
    config = BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["norm", "gate"])
    net = load_and_quantize_model(net, config, "saved")
    assert net.norm.weight.dtype == net.gate.weight.dtype == torch.float32
    assert net.head.weight.dtype == torch.float16
    plain = nn.Sequential(nn.TransformerEncoderLayer(64, 2, 64), nn.Linear(64, 64), nn.ReLU())
    x, plain = X[None], plain.eval()
    with torch.no_grad():
        expected = plain(x)
        net = load_and_quantize_model(plain, BnbQuantizationConfig(load_in_8bit=True))
        assert torch.allclose(net(x), expected, atol=0.1)
    assert net[0].self_attn.out_proj.weight.dtype == torch.float32
    assert net[1].weight.dtype == torch.int8


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"needs bitsandbytes: pip install .*\[bnb\]"):
        load_and_quantize_model(make(), BnbQuantizationConfig(load_in_8bit=True))


def test_wrong_configurations_raise():
    for wrong, message in (
        ({}, "exactly one"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exactly one"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "half"}, "compute_dtype is 'half'"),
        ({"load_in_8bit": True, "llm_int8_threshold": -1}, "llm_int8_threshold is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            BnbQuantizationConfig(**wrong)
    with pytest.raises(TypeError, match="skip_modules is 'head'"):
        BnbQuantizationConfig(load_in_8bit=True, skip_modules="head")
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
