"""A decoder-only transformer, and the task of training it on random tokens.

The architecture is that of GPT-2 small (Radford et al., 2019, "Language Models are Unsupervised
Multitask Learners") without dropout and biases: 124 million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.task import Ticking
from benchmarks.timing import Clock, Lap


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model and its batches; by default 124 million parameters.

    Attributes:
        vocabulary: The number of distinct tokens.
        context: Tokens per sequence.
        depth: The number of blocks.
        heads: Attention heads per block.
        width: The dimension of the residual stream.
        batch: Sequences per batch.
    """

    vocabulary: int = 50304
    context: int = 1024
    depth: int = 12
    heads: int = 12
    width: int = 768
    batch: int = 16


TINY = Size(vocabulary=64, context=16, depth=1, heads=2, width=32, batch=2)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Gpt(nn.Module):
    """A language model that returns its loss, so that compiling it includes the loss.

    The token embedding and the last layer share their weights.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the mean loss over all tokens, in nats, for codes of shape (batch, tokens + 1)."""
        seen, following = codes[:, :-1], codes[:, 1:]
        places = torch.arange(seen.shape[1], device=codes.device)
        scores = self.head(self.norm(self.blocks(self.tokens(seen) + self.places(places))))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


class Task:
    """The task of training the transformer on a device in bf16; see `benchmarks.task.Task`.

    Args:
        steps: The number of steps.
        size: The size of the model and its batches.
        device: ``"cuda"`` or ``"cpu"``.
        backend: The backend of ``torch.compile``; None trains uncompiled.
    """

    precision = "bf16"

    def __init__(self, steps: int, size: Size, *, device: str, backend: str | None) -> None:
        wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        self.clock = Clock(steps, skip=max(1, steps // 5), wait=wait)
        self.device, self.backend = device, backend
        generator = torch.Generator().manual_seed(1)
        shape = (
            min(steps, 8) * size.batch,
            size.context + 1,
        )  # repeated, so that the model learns them
        self.dataset = TensorDataset(
            torch.randint(size.vocabulary, shape, generator=generator).repeat(-(-steps // 8), 1)[
                : steps * size.batch
            ]
        )
        self.whole = self.loader = DataLoader(
            self.dataset, batch_size=size.batch, pin_memory=device == "cuda"
        )
        torch.manual_seed(2)
        with torch.device(device):
            self.bare = Gpt(size)
        forward = torch.compile(self.bare, backend=backend) if backend else self.bare
        self.model = Ticking(forward, self.clock)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW, fused on CUDA."""
        return torch.optim.AdamW(
            self.bare.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=self.device == "cuda"
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the tokens of a batch; the model may be wrapped."""
        return model(batch[0])

    def lap(self) -> Lap:
        """Return the time per step, and the loss of the first batch with the final weights."""
        model = self.trained().to(self.device)  # Lightning leaves it on the host
        batch = [codes.to(self.device) for codes in next(iter(self.whole))]
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16):
            outcome = self.loss(model, batch).item()
        return self.clock.lap(outcome)

    def trained(self) -> nn.Module:
        """Return the model with its final weights."""
        return self.bare


def flops_per_token(model: Gpt, size: Size) -> float:
    """Return the FLOPs of the forward and backward pass per token.

    Six per weight of a matrix product, and twelve per attended token, dimension and block
    (Chowdhery et al., 2022, "PaLM", appendix B). As is customary, all tokens of the context count,
    although a causal model attends to half of them on average. The position embedding is only
    looked up, so it does not count.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= model.places.weight.numel()
    return 6.0 * weights + 12.0 * size.depth * size.width * size.context
