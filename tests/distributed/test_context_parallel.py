"""Processes that share each sequence train as one process on whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_tensor_parallel import assert_close, whole
from trainer import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.engines.context_parallel import attention_over

VOCABULARY, LENGTH, WIDTH = 17, 12, 16
TOKENS = torch.randint(VOCABULARY, (22, LENGTH + 1), generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.last(self.blocks(self.tokens(tokens) + self.places(places)).flatten(0, 1))

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        split = [tokens, labels, torch.arange(LENGTH)]
        with self.trainer.accelerator.maybe_context_parallel(split, [1, 1, 0], set(split)):
            outputs = self(tokens, split[2])
            return nn.functional.cross_entropy(outputs, labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder: Path, *, shares: int = 1, **options: Any) -> Any:
    """Train on batches that are as large over all shares of the data; 22 samples, 4 a batch."""
    ckpt_path = options.pop("ckpt_path", None)
    options = {"max_epochs": 2, "max_grad_norm": 0.5, "checkpointing": False, **options}
    trainer = Trainer(cpu=True, seed=3, progress_bar=False, project_dir=folder, **options)
    model = Model()
    loaders = [DataLoader(DATA, 4 // shares, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return whole(model), metrics, trainer.samples_seen, trainer.items_seen


def sharing(**sizes: int) -> dict[str, Any]:
    return {
        "parallelism_config": ParallelismConfig(cp_size=2, **sizes),
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=["Block"], activation_checkpointing=True
        ),
    }


@pytest.mark.parametrize("sizes", [{}, {"dp_shard_size": 2}, {"dp_replicate_size": 2}])
def test_context_parallel_training_equals_one_process(ranks, sizes, tmp_path):
    expected = fit(tmp_path / "one")
    shares = 2 if sizes else 1
    found = ranks(2 * shares)(lambda: fit(tmp_path / "cp", shares=shares, **sharing(**sizes)))
    assert_close(found, expected, 1e-5)
    assert {each[3] for each in found} == {expected[3]}  # a sequence is one item, not two


def test_a_run_resumes_inside_an_epoch_with_and_without_context_parallelism(ranks2, tmp_path):
    whole_run = fit(tmp_path / "one")
    uninterrupted = ranks2(lambda: fit(tmp_path / "two", **sharing()))
    folder = tmp_path / "killed"
    options = {"max_steps": 9, "checkpointing": True, **sharing()}
    ranks2(lambda: fit(folder, **options))
    again = ranks2(lambda: fit(folder, ckpt_path="last", **sharing()))
    for found, expected in zip(again, uninterrupted, strict=True):
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
        assert found[1:] == expected[1:]
    alone = fit(folder, ckpt_path=folder / "checkpoints" / "step-00000009")
    assert_close([alone], whole_run, 1e-5)


def test_a_loop_of_ones_own_gets_whole_buffers_back_after_backward(ranks2):
    def train() -> Any:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
        model = accelerator.prepare(Model())
        tokens, labels = (part.clone() for part in DATA[:4])
        places = torch.arange(LENGTH)
        with accelerator.maybe_context_parallel([tokens, labels, places], [1, 1, 0]):
            assert tokens.shape == (4, LENGTH // 2)
            logits = model(tokens, places)
            accelerator.backward(nn.functional.cross_entropy(logits, labels.flatten()))
        assert torch.equal(tokens, DATA[:4][0])
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        return gradients, accelerator.context_parallel_rank, accelerator.torch_device_mesh.shape

    model = Model()
    tokens, labels = DATA[:4]
    logits = model(tokens, torch.arange(LENGTH))
    nn.functional.cross_entropy(logits, labels.flatten()).backward()
    for rank, (gradients, place, shape) in enumerate(ranks2(train)):
        assert (place, shape) == (rank, (2,))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-6)


def test_a_llama_on_parts_of_sequences_equals_the_whole(ranks2):
    transformers = pytest.importorskip("transformers")

    def gradients(accelerator: Accelerator) -> dict[str, Tensor]:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        model = accelerator.prepare(transformers.LlamaForCausalLM(config))
        tokens, labels = (part.clone() for part in DATA[:4])
        places = torch.arange(LENGTH).repeat(4, 1)
        with accelerator.maybe_context_parallel([tokens, labels, places], [1, 1, 1]):
            logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
            accelerator.backward(
                nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            )
        return {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for name, p in model.named_parameters()
        }

    expected = gradients(Accelerator(cpu=True))
    config = ParallelismConfig(cp_size=2)
    for found in ranks2(lambda: gradients(Accelerator(cpu=True, parallelism_config=config))):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_unsupported_inputs_raise(ranks2):
    def run() -> None:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
        with pytest.raises(ValueError, match="cp_size=2 does not divide"):
            accelerator.maybe_context_parallel([torch.zeros(2, 5)], [1]).__enter__()
        with pytest.raises(ValueError, match="1 buffers, but 0 buffer_seq_dims"):
            accelerator.maybe_context_parallel([torch.zeros(2, 4)]).__enter__()
        query, mask = torch.zeros(1, 1, 2, 4), torch.ones(2, 2, dtype=torch.bool)
        attention = attention_over(accelerator.torch_device_mesh["cp"])
        with attention, pytest.raises(ValueError, match="pass is_causal, not attn_mask"):
            nn.functional.scaled_dot_product_attention(query, query, query, mask)

    ranks2(run)
