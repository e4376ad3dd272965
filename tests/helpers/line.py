"""The smallest module that can be trained, validated, tested and used to predict, and its data."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import TrainModule


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("score", self.layer(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples=6):
    """Batches of two samples."""
    values = torch.arange(2.0 * samples).reshape(samples, 2) / 10
    return DataLoader(TensorDataset(values), batch_size=2)
