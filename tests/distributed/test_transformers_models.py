"""Models of transformers train on shards and split layers as in one process, and load as theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)

TOKENS = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))


def llama(tied: bool = False) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def qwen3() -> nn.Module:
    """Return a model with norms of each head."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def mixtral() -> nn.Module:
    """Return a mixture of experts: which of them a process uses depends on its tokens."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))


MODELS: dict[str, Any] = {
    "GPT-2, tied": gpt2,
    "Llama": llama,
    "Llama, tied": lambda: llama(tied=True),
    "Qwen3": qwen3,
    "Mixtral": mixtral,
}
LAYOUTS: dict[str, tuple[list[str], Any]] = {
    "shards": (
        ["GPT-2, tied", "Llama", "Llama, tied", "Mixtral"],
        lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    ),
    "split layers": (
        ["Llama", "Llama, tied", "Qwen3"],
        lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    ),
    "shards of split layers": (
        [],  # four processes
        lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)},
    ),
}
CASES = [(model, layout) for layout, (names, _) in LAYOUTS.items() for model in names]


class Language(TrainModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's are taken
        self.model = MODELS[model]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Not Adam: it inflates rounding in the bias of the keys, whose true gradient is 0.
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class SplitVocabulary(Language):
    """GPT-2 by a plan of the user's; its blocks stay whole."""

    tp_plan = {
        "model.transformer.wte": "embedding_rowwise",
        "model.lm_head": "colwise_gather_output",
    }


class SplitBlocks(Language):
    tp_plan = {"model.transformer.h.*.mlp.c_fc": "colwise"}


class OnMeta(Language):
    """Rank 0 alone has weights, as where it alone has read them."""

    def __init__(self, model: str) -> None:
        with torch.device("meta" if dist.is_initialized() and dist.get_rank() else "cpu"):
            super().__init__(model)


def fit(
    folder: Path, model: str, layout: str | None = None, kind: type[Language] = Language
) -> dict[str, Tensor]:
    options = {} if layout is None else LAYOUTS[layout][1]()
    trainer = Trainer(
        cpu=True, max_epochs=2, seed=3, progress_bar=False, project_dir=folder, **options
    )
    module = kind(model)
    size = 8 // trainer.accelerator.engine.parallel.dp_size
    trainer.fit(module, DataLoader(TOKENS, size))  # type: ignore[arg-type]
    return trainer.accelerator.get_state_dict(module.model)


def loop(model: str, layout: str | None = None) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, **({} if layout is None else LAYOUTS[layout][1]()))
    net = Language(model).model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(TOKENS, 8 // accelerator.engine.parallel.dp_size)  # type: ignore[arg-type]
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        accelerator.backward(net(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(net)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_fit_equals_one_process_and_loads_into_transformers(ranks2, model, layout, tmp_path):
    expected = fit(tmp_path / "one", model)
    found, other = ranks2(lambda: fit(tmp_path / "two", model, layout))
    assert other == {}
    plain = MODELS[model]()
    plain.load_state_dict(found)
    plain.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved").state_dict()
    assert_close(again, expected)


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # the logits
def test_an_own_loop_equals_one_process(ranks2, model, layout):
    expected, found = loop(model), ranks2(lambda: loop(model, layout))[0]
    assert_close(found, expected)


def test_shards_of_split_layers_equal_one_process(ranks, tmp_path):
    expected = fit(tmp_path / "one", "Llama, tied")
    found = ranks(4)(lambda: fit(tmp_path / "four", "Llama, tied", "shards of split layers"))[0]
    assert_close(found, expected)


@pytest.mark.parametrize("layout", ["shards", "split layers"])
@pytest.mark.parametrize("model", ["Llama", "Llama, tied"])
def test_processes_without_weights_receive_rank_0s(ranks2, model, layout, tmp_path):
    expected = fit(tmp_path / "one", model)
    found = ranks2(lambda: fit(tmp_path / "two", model, layout, OnMeta))[0]
    assert_close(found, expected)


def test_gpt_2_is_split_by_a_plan_of_the_users(ranks2, tmp_path):
    expected = fit(tmp_path / "one", "GPT-2, tied")
    options = "GPT-2, tied", "split layers", SplitVocabulary
    found = ranks2(lambda: fit(tmp_path / "two", *options))[0]
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Language, "Language does not say which layers to split"),
        (SplitBlocks, "splits model.transformer.h.0.mlp.c_fc, a Conv1D, with ColwiseParallel"),
    ],
)
def test_what_gpt_2_cannot_split_is_refused(ranks2, kind, message, tmp_path):
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path, "GPT-2, tied", "split layers", kind))


def test_splitting_experts_is_refused(ranks2, tmp_path):
    with pytest.raises(RankError, match=r"splits its experts \('.*'\), which is not supported"):
        ranks2(lambda: fit(tmp_path / "two", "Mixtral", "split layers"))


def test_tied_weights_are_in_a_checkpoint_once(ranks2, tmp_path):
    def save() -> list[str]:
        import json

        trainer = Trainer(
            cpu=True,
            max_steps=1,
            progress_bar=False,
            project_dir=tmp_path,
            **LAYOUTS["shards"][1](),
        )
        trainer.fit(Language("Llama, tied"), DataLoader(TOKENS, 4))  # type: ignore[arg-type]
        (index,) = tmp_path.rglob("shards.json")
        tensors = json.loads(index.read_text())["tensors"]
        return [name for name, known in tensors.items() if "tied" in known]

    assert ranks2(save)[0] == ["model.lm_head.weight"]


class Writing(Language):
    """Continues the beginnings of the validation's samples."""

    def __init__(self) -> None:
        super().__init__("Llama")
        self.written: list[list[int]] = []

    def on_validation_start(self) -> None:
        self.written = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        length = 5 + batch_idx  # and as many forward passes, of which all are collective
        beginning = {"input_ids": batch[:, :3], "attention_mask": torch.ones_like(batch[:, :3])}
        written = self.model.generate(**beginning, do_sample=False, max_length=length)
        self.written += written.tolist()


@pytest.mark.parametrize("engine", ["DDP", "FSDP", "ZeRO-3"])
def test_a_validation_generates_on_shards_what_one_process_does(ranks2, engine, tmp_path):
    def write(folder: Path, size: int, options: Any = dict) -> list[list[int]]:
        trainer = Trainer(
            cpu=True, max_epochs=2, seed=3, progress_bar=False, project_dir=folder, **options()
        )
        module = Writing()
        train: Any = DataLoader(TOKENS, 2 * size)
        beginnings: Any = DataLoader(TOKENS[:10], size)
        trainer.fit(module, train, beginnings)
        return module.written

    plugins = {
        "DDP": dict,
        "FSDP": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "ZeRO-3": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
    }
    expected = write(tmp_path / "one", 4)
    found = ranks2(lambda: write(tmp_path / "two", 2, plugins[engine]))
    assert [len(found[0]), len(found[1])] == [6, 4]
    rows = {tuple(row[:3]): row for row in expected}
    for row in (*found[0], *found[1]):
        common = min(len(row), len(rows[tuple(row[:3])]))
        assert row[:common] == rows[tuple(row[:3])][:common]
