"""Recognise handwritten digits: the smallest complete use of Cadence.

The 1,797 images come with scikit-learn, so nothing is downloaded. Run the script as it is, or
unchanged with ``torchrun --nproc-per-node 2 examples/digits.py``. Run it again to resume from its
last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import EarlyStopping, ModelCheckpoint
from trainer import Trainer, TrainModule


class Digits(TrainModule):
    """A multilayer perceptron for images of 8 × 8 pixels."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        accuracy = (self.net(x).argmax(-1) == y).float().mean()
        self.log("val/accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=arguments.seed,
        log_with="tensorboard",
        log_every=20,
        project_dir=arguments.project_dir,
        callbacks=[
            ModelCheckpoint(monitor="val/accuracy", mode="max"),
            EarlyStopping("val/accuracy", mode="max", patience=10),
        ],
    )
    train_set, val_set = load_data()
    trainer.fit(
        Digits(),
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=256),
        ckpt_path="auto",
    )

    best = next(one for one in trainer.callbacks if isinstance(one, ModelCheckpoint))
    trainer.accelerator.print(
        f"accuracy    {trainer.callback_metrics['val/accuracy']:.4f} "
        f"(best {best.best_model_score:.4f})\n"
        f"checkpoint  {best.best_model_path}\n"
        f"metrics     {trainer.metrics_path}\n"
        f"curves      tensorboard --logdir {trainer.project_dir / 'logs'}"
    )


if __name__ == "__main__":
    main()
