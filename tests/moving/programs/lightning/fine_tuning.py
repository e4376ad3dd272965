"""The shape of Lightning's fine tuning: a frozen backbone that thaws at milestones."""

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 3), train_bn=True):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-2:],
                optimizer=optimizer,
                train_bn=self.train_bn,
            )
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[:-2],
                optimizer=optimizer,
                train_bn=self.train_bn,
            )


class TransferLearningModel(L.LightningModule):
    def __init__(self, milestones=(1, 3), lr=1e-2, lr_scheduler_gamma=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.feature_extractor = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()
        )
        self.fc = nn.Linear(8, 1)
        self.train_acc = Accuracy(task="binary")
        self.valid_acc = Accuracy(task="binary")

    def forward(self, x):
        return self.fc(self.feature_extractor(x)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.binary_cross_entropy_with_logits(logits, y.float())
        self.train_acc(logits.sigmoid(), y)
        self.log("train_acc", self.train_acc, prog_bar=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.valid_acc(self(x).sigmoid(), y)
        self.log("val_acc", self.valid_acc, prog_bar=True)

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = optim.Adam(trainable, lr=self.hparams.lr)
        gamma = self.hparams.lr_scheduler_gamma
        return [optimizer], [MultiStepLR(optimizer, self.hparams.milestones, gamma)]


def main(folder):
    L.seed_everything(5)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = TransferLearningModel()
    finetuning = MilestonesFinetuning(milestones=model.hparams.milestones)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=5,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[finetuning, LearningRateMonitor()],
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    trainer.fit(model, DataLoader(train, 8), DataLoader(val, 8))
    groups = trainer.optimizers[0].param_groups
    return model, {
        "groups": [(len(group["params"]), group["lr"]) for group in groups],
        "val_acc": trainer.callback_metrics["val_acc"].item(),
    }
