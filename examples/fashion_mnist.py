"""Classify clothes with a small convolutional network: the 70,000 images of Fashion-MNIST.

The images are read from the four idx files of the data set, compressed or not. The script takes a
few minutes on two CPU cores and runs unchanged under ``torchrun``.
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import LearningRateMonitor, ModelCheckpoint
from trainer import Trainer, TrainModule

DATA_DIR = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Classifier(TrainModule):
    """Two convolutions and two linear layers for images of 28 × 28 pixels."""

    def __init__(self, max_lr):
        super().__init__()
        self.max_lr = max_lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
        )

    def forward(self, images):
        """Return ten scores per image, for uint8 images of shape (batch, 28, 28)."""
        return self.net(images.unsqueeze(1).float() / 255)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluate("val", batch)

    def test_step(self, batch, batch_idx):
        self.evaluate("test", batch)

    def evaluate(self, phase, batch):
        images, labels = batch
        scores = self(images)
        self.log(f"{phase}/loss", nn.functional.cross_entropy(scores, labels))
        accuracy = (scores.argmax(-1) == labels).float().mean()
        self.log(f"{phase}/accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.max_lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}


def read_idx(path):
    """Read the tensor of an idx file: a header with type and shape, then the bytes."""
    content = bytearray(
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    )
    dimensions = content[3]
    if content[:3] != b"\0\0\x08" or dimensions == 0:
        raise SystemExit(f"{path} is not an idx file of bytes.")
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions)
    return values.reshape(sizes)


def load_data(folder):
    """Load the training and the test set from a folder."""
    paths = [
        next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        for name in FILES
    ]
    missing = [name for name, path in zip(FILES, paths, strict=True) if path is None]
    if missing:
        raise SystemExit(
            f"{folder} lacks {', '.join(missing)} (each may end in .gz).\n"
            "On Debian, `apt install dataset-fashion-mnist` puts them into "
            f"{DATA_DIR}.\n"
            "Elsewhere, take the four files from https://github.com/zalandoresearch/fashion-mnist "
            "and pass --data-dir."
        )
    train_images, train_labels, test_images, test_labels = map(read_idx, paths)
    return (
        TensorDataset(train_images, train_labels.long()),
        TensorDataset(test_images, test_labels.long()),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/fashion-mnist"))
    parser.add_argument("--max-epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--lr", type=float, default=4e-3, help="the peak of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    train_and_val, test_set = load_data(arguments.data_dir)
    train_set, val_set = random_split(
        train_and_val, [11 / 12, 1 / 12], generator=torch.Generator().manual_seed(0)
    )
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=arguments.seed,
        log_with="tensorboard",
        project_dir=arguments.project_dir,
        callbacks=[ModelCheckpoint(monitor="val/accuracy", mode="max"), LearningRateMonitor()],
    )
    module = Classifier(arguments.lr)
    trainer.fit(
        module,
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=500),
        ckpt_path="auto",
    )
    (metrics,) = trainer.test(module, DataLoader(test_set, batch_size=500), ckpt_path="best")
    trainer.accelerator.print(
        f"test accuracy  {metrics['test/accuracy']:.4f}\n"
        f"metrics        {trainer.metrics_path}\n"
        f"curves         tensorboard --logdir {trainer.project_dir / 'logs'}"
    )


if __name__ == "__main__":
    main()
