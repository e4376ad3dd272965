"""Train the digits in fp8 (torchao) and in bfloat16, and compare.

It needs ``pip install -e ".[fp8,examples]"``. On the CPU fp8 is emulated, which shows its rounding
and not its speed. ``torchrun --nproc-per-node 2 examples/fp8.py --fsdp`` shards the model, whose
converted weights are then gathered in 8 bits.
"""

import argparse
import itertools
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer import FullyShardedDataParallelPlugin, Trainer, TrainModule


class Digits(TrainModule):
    """A perceptron of four layers, of which the inner two are converted."""

    def __init__(self, width=128):
        super().__init__()
        sizes = [64, width, width, width, 10]
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def train(precision, arguments):
    """Return the trained module's last loss and accuracy, and the classes of its layers."""
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap") if arguments.fsdp else None
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=0,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        project_dir=arguments.project_dir / precision,
        checkpointing=False,
    )
    train_set, val_set = load_data()
    module = Digits()
    trainer.fit(
        module,
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=256),
    )
    kinds = [type(layer).__name__.removeprefix("FSDP") for layer in module.layers]
    metrics = trainer.callback_metrics
    trainer.accelerator.print(
        f"{precision:4}  loss {metrics['train/loss']:.4f}  accuracy {metrics['val/accuracy']:.4f}  "
        f"layers {' '.join(kinds)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the processes")
    arguments = parser.parse_args()
    for precision in ("bf16", "fp8"):
        train(precision, arguments)


if __name__ == "__main__":
    main()
