"""Estimate an accuracy and its uncertainty: k-fold cross-validation on handwritten digits.

The 1,797 images that come with scikit-learn are split into k parts with equal shares of each digit.
Each part serves once as the validation set of a model trained on the others, so every image is
classified by a model that has never seen it. Each fold is a separate run with its own folder: when
the script is started again after an interruption, finished folds are not trained again, and the
fold that was in progress resumes. It runs unchanged under ``torchrun --nproc-per-node 2``.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainer import PartialState, Trainer, TrainModule


class Digits(TrainModule):
    """A multilayer perceptron for images of 8 × 8 pixels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/accuracy", (self.net(x).argmax(-1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def run_fold(folder, train, val, arguments):
    """Train on all parts but one, or resume that run; return the accuracy on the remaining part.

    The accuracy is that of the last epoch. The best epoch, or the one that `EarlyStopping` would
    choose, would be selected on the validation images, which biases the estimate upwards.
    """
    trainer = Trainer(  # before the module, whose initial weights depend on the Trainer's seed
        max_epochs=arguments.max_epochs, seed=arguments.seed, log_every=20, project_dir=folder
    )
    trainer.fit(
        Digits(),
        DataLoader(train, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val, batch_size=256),
        ckpt_path="auto",
    )
    accuracy = trainer.callback_metrics["val/accuracy"]
    trainer.accelerator.print(f"{folder.name}  {accuracy:.4f}")
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/cross-validation"))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    folds = StratifiedKFold(arguments.folds, shuffle=True, random_state=arguments.seed)
    accuracies = [
        run_fold(
            arguments.project_dir / f"fold-{number}",
            Subset(dataset, train),
            Subset(dataset, val),
            arguments,
        )
        for number, (train, val) in enumerate(folds.split(images, labels), 1)
    ]
    PartialState().print(
        f"accuracy  {mean(accuracies):.4f} ± {stdev(accuracies):.4f} over {len(accuracies)} folds"
    )


if __name__ == "__main__":
    main()
