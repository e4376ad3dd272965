"""Users of torchmetrics: collections, several validation loaders, and metrics of an epoch."""

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 2)
        metrics = MetricCollection(
            {"acc": MulticlassAccuracy(2, average="micro"), "f1": MulticlassF1Score(2)}
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.valid_metrics = nn.ModuleList(
            [metrics.clone(prefix="first_"), metrics.clone(prefix="second_")]
        )
        self.auroc = BinaryAUROC()
        self.train_f1 = MulticlassF1Score(2)
        self.confusion = MulticlassConfusionMatrix(2)
        self.brier = nn.ModuleList([MeanSquaredError(), MeanSquaredError()])
        self.tables = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.log_dict(self.train_metrics(scores, y))
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss)
        self.train_f1(scores, y)
        self.log("f1", self.train_f1, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        values = self.train_metrics.compute()
        self.log_dict({f"{name}_whole": value for name, value in values.items()})
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores = self.net(x)
        self.valid_metrics[dataloader_idx].update(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.brier[dataloader_idx](scores.softmax(1)[:, 1], y.float())
        self.log("brier", self.brier[dataloader_idx], on_epoch=True)
        self.auroc.update(scores[:, 1] - scores[:, 0], y)
        self.confusion.update(scores, y)

    def on_validation_epoch_end(self):
        for metrics in self.valid_metrics:
            self.log_dict(metrics.compute())
            metrics.reset()
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()
        self.tables.append(self.confusion.compute().tolist())
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)


def main(folder):
    L.seed_everything(7)
    x = torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    loaders = [
        DataLoader(TensorDataset(x[a:b], y[a:b]), 7) for a, b in ((0, 50), (50, 60), (60, 90))
    ]
    module = Classifier()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loaders[0], loaders[1:])
    validated = trainer.validate(module, loaders[1:], verbose=False)
    return module, {"tables": module.tables, "validated": validated}
