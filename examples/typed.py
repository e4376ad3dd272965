"""The digits as a typed program, which passes mypy and pyright in strict mode.

The first part trains with the `Trainer`, the second with `Accelerator` in a custom loop, whose
`prepare` returns objects of the types that it was given. Run it as it is, or with
``torchrun --nproc-per-node 2 examples/typed.py``.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, ModelCheckpoint
from trainer import Accelerator, Trainer, TrainModule

Batch = tuple[Tensor, Tensor]


class Digits(TrainModule):
    """A multilayer perceptron for images of 8 × 8 pixels."""

    def __init__(self, hidden: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.forward(images), labels)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class EpochLosses(Callback):
    """Collects the mean loss of each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))


class Images(Dataset[Batch]):
    """The images as rows of 64 values in [0, 1], with their labels."""

    def __init__(self) -> None:
        digits = cast(Any, load_digits())  # it has no types
        self.images = torch.tensor(digits["data"], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits["target"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]


def train_with_trainer(dataset: Images, epochs: int, project_dir: Path) -> list[float]:
    losses = EpochLosses()
    trainer = Trainer(
        max_epochs=epochs, seed=0, project_dir=project_dir, callbacks=[losses, ModelCheckpoint()]
    )
    trainer.fit(Digits(hidden=64), DataLoader(dataset, batch_size=32, shuffle=True))
    return losses.values


def train_with_accelerator(dataset: Images, epochs: int) -> float:
    accelerator = Accelerator()
    net = Digits()
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=2e-3),
        DataLoader(dataset, batch_size=32, shuffle=True),
    )
    loss = torch.zeros(())
    for _ in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/typed"))
    parser.add_argument("--max-epochs", type=int, default=3)
    arguments = parser.parse_args()

    dataset = Images()
    losses = train_with_trainer(dataset, arguments.max_epochs, arguments.project_dir)
    last = train_with_accelerator(dataset, arguments.max_epochs)
    if Accelerator().is_main_process:
        print("epoch losses", [round(value, 4) for value in losses])
        print(f"last loss of the custom loop {last:.4f}")


if __name__ == "__main__":
    main()
