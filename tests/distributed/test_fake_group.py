"""Layouts of many processes, simulated one at a time, are those of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from trainer import TrainModule
from trainer.checkpoint.sharded_state import ShardReader, Shards
from trainer.cli.estimate_memory import footprint, sharding
from trainer.cli.estimate_memory.sharding import Layout, fake_group
from trainer.state import PartialState

SIZES = {"hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2, "vocab_size": 99}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
BATCH, TOKENS = 3, 7


def llama(**sizes: int) -> nn.Module:
    torch.manual_seed(0)
    # Other attention leaves masks out, but not of tensors without data.
    config = LlamaConfig(
        **{**SIZES, **HEADS, **sizes}, use_cache=False, attn_implementation="eager"
    )
    return LlamaForCausalLM(config)


class Language(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Any) -> int:
    return sum(local(tensor.detach()).nbytes for tensor in tensors)


@contextmanager
def saved_tensors() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that are saved for a backward pass inside, by their address."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor.detach()).untyped_storage()
        found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def real(layout: Layout, precision: str) -> dict[str, int]:
    """Train a step on this rank, and return what it then holds in bytes."""
    engine = layout.engine(dist.get_rank(), precision)
    module = Language()
    engine.start(module, None)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(module.parameters()))
    tokens = torch.randint(99, (BATCH, TOKENS))
    casting = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with saved_tensors() as saved, casting:
        loss = engine.forward("training_step", tokens, 0)
    held = [*module.parameters(), *module.buffers()]
    own = {local(each.detach()).untyped_storage()._cdata for each in held}
    activations = sum(each.nbytes() for at, each in saved.items() if at not in own)
    engine.backward(loss)
    optimizer.step()
    return {
        "parameters": nbytes(module.parameters()),
        "gradients": nbytes(p.grad for p in module.parameters()),
        "optimizer": nbytes(t for state in optimizer.state.values() for t in state.values()),
        "buffers": nbytes(module.buffers()),
        "activations": activations,
    }


CASES = [
    (Layout(shard=2), "no"),
    (Layout(shard=2, activation_checkpointing=True), "bf16"),
    (Layout(tp=2), "bf16"),
    (Layout(shard=4), "bf16"),
    (Layout(shard=2, replicate=2), "no"),
    (Layout(shard=2, tp=2), "bf16"),
]


@pytest.mark.parametrize(("layout", "precision"), CASES, ids=str)
def test_the_estimate_is_what_real_processes_hold(ranks, layout, precision):
    found = ranks(layout.processes)(real, layout, precision)
    ids = {"shape": (TOKENS,), "dtype": torch.int64}
    for rank in (0, layout.processes - 1):
        estimate = sharding.measure(
            llama,
            layout=layout,
            precision=precision,
            make_optimizer=torch.optim.AdamW,
            inputs=[footprint.Input(name=name, **ids) for name in ("input_ids", "labels")],
            batch=BATCH,
            rank=rank,
        )
        assert {name: getattr(estimate, name) for name in found[rank]} == found[rank]
        assert estimate.total == sum(found[rank].values()) + estimate.gathered


def test_what_is_gathered_is_the_root_and_two_blocks():
    measured = {"precision": "bf16", "make_optimizer": torch.optim.AdamW}
    model = llama()
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - 2 * block
    for layers in (2, 3):
        make = partial(llama, num_hidden_layers=layers)
        estimate = sharding.measure(make, layout=Layout(shard=4), **measured)
        assert estimate.gathered == 2 * (root + 2 * block)


def test_a_fake_group_leaves_nothing_behind():
    before = dict(PartialState._shared_state)
    with fake_group(5, 8):
        assert (PartialState().process_index, PartialState().num_processes) == (5, 8)
    assert PartialState._shared_state == before
    assert not dist.is_initialized()


MANY = {
    "FSDP": Layout(shard=64),
    "HSDP": Layout(replicate=8, shard=8),
    "FSDP and TP": Layout(shard=8, tp=8),
}


@pytest.mark.parametrize("name", MANY)
def test_the_shards_of_64_processes_cover_each_weight_once(name, tmp_path):
    layout = MANY[name]
    whole = llama().state_dict()
    for rank in range(64):
        with fake_group(rank, 64):
            engine = layout.engine(rank, "no")
            module = Language()
            engine.start(module, None)
            shards = Shards(rank, engine.parallel.mesh)
            shards.add_weights(module.model.state_dict())
            shards.write(shards.tensors, tmp_path)
    files = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert 64 // layout.replicate - len(files) in range(13)  # 99 rows are 50 parts of 2
    times = {key: torch.zeros(value.shape, dtype=torch.int64) for key, value in whole.items()}
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for key in opened.keys():  # noqa: SIM118 - no dict
                shape, offsets = opened.get_slice(key).get_shape(), places[key]["saved_offsets"]
                where = tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
                times[key][where] += 1
    assert all(bool((each == 1).all()) for each in times.values())
    if layout.tp > 1:  # the values of others come through collectives
        return
    reader = ShardReader(tmp_path, files)
    assert all(torch.equal(reader.tensor(key).whole(), value) for key, value in whole.items())
