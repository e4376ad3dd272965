"""Learn to write documentation with a small character-level transformer.

The text comes with every Python, the docstrings of the standard library and the licence, so
nothing is downloaded. Documents have unequal lengths: batches are padded, and the loss is a mean
over characters, however they are spread over batches, micro-batches and processes.

Run it as it is, which takes a few minutes on two CPU cores, or with
``torchrun --nproc-per-node 2 examples/language_model.py --batch-size 16``, which makes the same
updates. Run it again to resume from its last checkpoint.
"""

import argparse
import ast
import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from callbacks import EMA, LearningRateMonitor, ModelCheckpoint
from trainer import Trainer, TrainModule

VOCABULARY = 128  # ASCII; code 0 marks the beginning and the end of each document
CONTEXT = 128  # characters that the model sees
PADDING = -100  # the `ignore_index` of `cross_entropy`


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.attention(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, characters, width of a head)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(TrainModule):
    """A decoder-only transformer over ASCII characters."""

    def __init__(self, width=128, depth=4, heads=4, lr=3e-3, warmup=50):
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes):
        """Return next-character scores, (batch, characters, 128), for (batch, characters) codes."""
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.blocks(self.characters(codes) + self.positions(places)))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch):
        """Return the mean loss over the characters of a batch, in nats."""
        scores = self(batch[:, :-1].clamp(min=0))
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def count_items(self, batch):
        """Return how many characters the loss averages, by which batches are weighted."""
        return (batch[:, 1:] != PADDING).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        total = self.trainer.estimated_stepping_batches
        warmup = min(self.hparams.warmup, total // 4)

        def rate(update):
            """Return the factor of the learning rate: linear warm-up, then cosine decay."""
            if update < warmup:
                return (update + 1) / warmup
            return 0.5 + 0.5 * math.cos(math.pi * (update - warmup) / (total - warmup))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}


def load_texts():
    """Return training and validation documents, split by the first module with each text."""
    first_seen = {}  # the number of the first module with each text; repeats are dropped
    for number, documents in enumerate(read_modules()):
        for text in documents:
            first_seen.setdefault(text, number)
    train = [text for text, number in first_seen.items() if text and number % 20]
    val = [text for text, number in first_seen.items() if text and number % 20 == 0]
    return train, val


def read_modules():
    """Yield the docstrings of each module of the standard library, then the licence's paragraphs.

    Only files that every installation of a Python version has, in the same order everywhere.
    """
    root = Path(sysconfig.get_path("stdlib"))
    optional = {"ensurepip", "idlelib", "lib2to3", "test", "tests", "tkinter", "turtledemo"}
    for name in sorted(sys.stdlib_module_names - optional):
        for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))):
            if path.is_file() and optional.isdisjoint(path.relative_to(root).parts):
                yield docstrings(path)
    licence = root / "LICENSE.txt"
    if licence.is_file():
        yield licence.read_text(encoding="utf-8").split("\n\n")


def docstrings(path):
    """Return the docstrings of a source file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in nodes]


def encode(documents):
    """Encode documents; long ones are cut into pieces so that each character is predicted once."""
    pieces = []
    for text in documents:
        codes = torch.tensor([0, *text.encode("ascii", "replace"), 0])
        starts = range(0, len(codes) - 1, CONTEXT)
        pieces += [codes[start : start + CONTEXT + 1] for start in starts]
    return pieces


def collate(pieces):
    """Return one tensor of shape (pieces, characters + 1), short pieces padded."""
    return pad_sequence(pieces, batch_first=True, padding_value=PADDING)


def baselines(train, val):
    """Return the bits per character of `val` under a unigram and a bigram model of `train`."""

    def pairs(pieces):
        return torch.cat([p[:-1] for p in pieces]), torch.cat([p[1:] for p in pieces])

    before, after = pairs(train)
    counts = torch.bincount(before * VOCABULARY + after, minlength=VOCABULARY**2)
    counts = (
        counts.reshape(VOCABULARY, VOCABULARY).double() + 0.01
    )  # so that no pair has probability 0
    before, after = pairs(val)
    unigram, bigram = counts.sum(0) / counts.sum(), counts / counts.sum(1, keepdim=True)
    return -unigram[after].log2().mean().item(), -bigram[before, after].log2().mean().item()


@torch.no_grad()
def generate(module, samples=3, length=200, temperature=0.7, seed=0):
    """Return documents that the model generates, cut after `length` characters."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.zeros(samples, 1, dtype=torch.long)
    module.eval()
    for _ in range(length):
        scores = module(codes[:, -CONTEXT:].to(module.device))[:, -1].float().cpu()
        chances = (scores / temperature).softmax(-1)
        codes = torch.cat([codes, torch.multinomial(chances, 1, generator=generator)], dim=1)
    texts = [bytes(row[1:].tolist()).decode("ascii") for row in codes]
    return [text.partition("\0")[0] for text in texts]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/language-model"))
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--accumulation", type=int, default=2, help="batches per update")
    parser.add_argument("--precision", choices=["no", "bf16"], default="bf16")
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    every = max(1, arguments.max_steps // 4)
    trainer = Trainer(
        max_steps=arguments.max_steps,
        val_every=every,
        seed=arguments.seed,
        mixed_precision=arguments.precision,
        dynamo_backend="inductor" if arguments.compile else None,
        gradient_accumulation_steps=arguments.accumulation,
        max_grad_norm=1.0,
        log_every=20,
        project_dir=arguments.project_dir,
        callbacks=[
            EMA(0.99, decay_warmup=True),
            ModelCheckpoint(monitor="val/loss", every=every),
            LearningRateMonitor(),
        ],
    )
    evaluator = Trainer(  # separate, so that it has its own record
        project_dir=arguments.project_dir / "untrained", mixed_precision=arguments.precision
    )
    train, val = map(encode, load_texts())
    module = LanguageModel()
    train_loader = DataLoader(
        train, batch_size=arguments.batch_size, shuffle=True, collate_fn=collate
    )
    val_loader = DataLoader(val, batch_size=64, collate_fn=collate)
    (before,) = evaluator.validate(module, val_loader)
    trainer.fit(module, train_loader, val_loader, ckpt_path="auto")
    (after,) = trainer.validate(module, val_loader)

    unigram, bigram = baselines(train, val)
    trainer.accelerator.print(
        f"unigram     {unigram:.3f} bits per character on {len(val)} unseen pieces\n"
        f"bigram      {bigram:.3f}\n"
        f"untrained   {before['val/loss'] / math.log(2):.3f}\n"
        f"trained     {after['val/loss'] / math.log(2):.3f}\n"
        f"metrics     {trainer.metrics_path}"
    )
    for text in generate(module, seed=arguments.seed):
        trainer.accelerator.print(f"{'-' * 80}\n{text}")


if __name__ == "__main__":
    main()
