"""Learn the digits 0 to 4, then 5 to 9 from a few images each: freeze, train the head, unfreeze.

A small convolutional network learns five of the digits that come with scikit-learn. A second run
trains its backbone on 5 images of each of the other five: frozen at first, while the new head is
trained, then with a smaller learning rate after a third of the epochs. For comparison, a third run
trains on the same images from scratch.

Run it as it is, or with ``torchrun --nproc-per-node 2 examples/transfer_learning.py``. Run it again
to resume from the last checkpoints.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import BackboneFinetuning, LearningRateMonitor
from trainer import Trainer, TrainModule


class Digits(TrainModule):
    """A convolutional backbone with batch normalisation, and a linear head."""

    def __init__(self, backbone=None):
        super().__init__()
        self.backbone = backbone or nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 4 * 4, 5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        accuracy = (self.head(self.backbone(x)).argmax(-1) == y).float().mean()
        self.log("val/accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        # BackboneFinetuning adds the backbone when it unfreezes it.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-3)


def load_data():
    """Return (training, validation) of digits 0 to 4 and of 5 to 9; labels are 0 to 4."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    parts = []
    for chosen in (y < 5, y >= 5):
        dataset = TensorDataset(x[chosen], y[chosen] % 5)
        parts.append(random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0)))
    first, (train, val) = parts
    few = torch.cat([(y[y >= 5][train.indices] == digit).nonzero()[:5] for digit in range(5, 10)])
    return first, (torch.utils.data.Subset(train, few.flatten().tolist()), val)


def run(name, module, data, arguments, callbacks=()):
    """Train in a separate folder and print the final accuracy."""
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=arguments.seed,
        log_every=5,
        project_dir=arguments.project_dir / name,
        callbacks=[*callbacks, LearningRateMonitor()],
    )
    train, val = data
    trainer.fit(
        module,
        DataLoader(train, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val, batch_size=256),
        ckpt_path="auto",
    )
    trainer.accelerator.print(f"{name:<10}  {trainer.callback_metrics['val/accuracy']:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--max-epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    first, second = load_data()
    torch.manual_seed(arguments.seed)
    teacher = Digits()
    run("first", teacher, first, arguments)
    finetuning = BackboneFinetuning(arguments.max_epochs // 3)
    run("transfer", Digits(teacher.backbone), second, arguments, [finetuning])
    torch.manual_seed(arguments.seed)
    run("scratch", Digits(), second, arguments)


if __name__ == "__main__":
    main()
