"""Train a transformer whose parameters are sharded over the processes (FSDP2), then merge them.

The model is small, so that it runs anywhere, but trained like one that no device could hold: each
process has a part of every parameter, gradient and optimizer state, and recomputes activations in
backward.

``trainer launch --num_processes 2 examples/large_language_model.py`` takes half a minute on two CPU
cores. Run it again, also with another number of processes, to resume from its last checkpoint. At
the end it prints the commands that merge the parts into one file and generate text from it with
plain PyTorch.
"""

import argparse
import ast
import math
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from trainer import FullyShardedDataParallelPlugin, Trainer, TrainModule

VOCABULARY = 128  # ASCII
CONTEXT = 64  # characters that the model sees


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


class Transformer(nn.Module):
    """A decoder-only transformer over ASCII characters; plain PyTorch."""

    def __init__(self, width=96, depth=3, heads=4):
        super().__init__()
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


class LanguageModel(TrainModule):
    def __init__(self, lr=3e-3, warmup=20):
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch):
        """Return the mean loss over the characters of a batch, in nats."""
        (codes,) = batch
        scores = self.model(codes[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), codes[:, 1:].flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches
        warmup = min(self.hparams.warmup, total // 4)

        def rate(update):
            """Return the factor of the learning rate: linear warm-up, then cosine decay."""
            if update < warmup:
                return (update + 1) / warmup
            return 0.5 + 0.5 * math.cos(math.pi * (update - warmup) / (total - warmup))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}


def load_data():
    """Return training and validation samples: the docstrings of Python's modules, cut to length."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    text = "\n\n".join(each for file in files if file.is_file() for each in docstrings(file))
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    samples = codes.unfold(0, CONTEXT + 1, CONTEXT)  # the last character is the next one's first
    for_validation = torch.arange(len(samples)) % 20 == 0
    return TensorDataset(samples[~for_validation]), TensorDataset(samples[for_validation])


def docstrings(path):
    """Return the docstrings of a source file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


@torch.no_grad()
def generate(file, prompt, length=200, temperature=0.6, seed=0):
    """Return what a plain module with the merged weights writes after a prompt."""
    weights = load_file(file)
    model = Transformer()
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor([list(prompt.encode("ascii"))])
    for _ in range(length):
        chances = (model(codes[:, -CONTEXT:])[:, -1] / temperature).softmax(-1)
        codes = torch.cat([codes, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return bytes(codes[0].tolist()).decode("ascii")


def train(arguments):
    saving = ModelCheckpoint(every=arguments.save_every)
    trainer = Trainer(
        max_steps=arguments.max_steps,
        val_every=arguments.save_every,
        seed=0,
        mixed_precision=arguments.precision,
        max_grad_norm=1.0,
        log_every=20,
        project_dir=arguments.project_dir,
        fsdp_plugin=FullyShardedDataParallelPlugin(  # this shards the model
            transformer_cls_names_to_wrap=["Block"], activation_checkpointing=True
        ),
        callbacks=saving,
    )
    train_set, val_set = load_data()
    module = LanguageModel()
    trainer.fit(
        module,
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=64),
        ckpt_path="auto",
    )
    (last,) = trainer.validate(module, DataLoader(val_set, batch_size=64))
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    whole, here = (sum(p.numel() for p in some) for some in (module.parameters(), parts))
    merged = arguments.project_dir / "merged.safetensors"
    trainer.accelerator.print(
        f"parameters  {whole:,}, of which this process holds {here:,}\n"
        f"loss        {last['val/loss'] / math.log(2):.3f} bits per character on unseen text\n"
        f"metrics     {trainer.metrics_path}\n"
        f"merge       trainer merge-weights {saving.last_model_path} {merged}\n"
        f"generate    python {Path(sys.argv[0])} --generate {merged}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/large-language-model"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100, help="updates; also evaluates")
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--generate", type=Path, metavar="FILE", help="merged weights to use")
    parser.add_argument("--prompt", default="Return ")
    arguments = parser.parse_args()

    if arguments.generate:
        print(generate(arguments.generate, arguments.prompt))
    else:
        train(arguments)


if __name__ == "__main__":
    main()
