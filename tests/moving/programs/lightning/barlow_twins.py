"""The shape of the Barlow Twins tutorial: a custom schedule, and a callback that trains a probe."""

from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __init__(self, size):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(size, 6, generator=draw)
        self.views = [x + 0.1 * torch.randn(size, 6, generator=draw) for _ in range(3)]
        self.labels = (x[:, 0] > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return tuple(view[index] for view in self.views), self.labels[index]


class BarlowTwinsLoss(nn.Module):
    def __init__(self, z_dim, lambda_coeff=5e-2):
        super().__init__()
        self.z_dim = z_dim
        self.lambda_coeff = lambda_coeff

    def forward(self, z1, z2):
        z1 = (z1 - z1.mean(0)) / z1.std(0)
        z2 = (z2 - z2.mean(0)) / z2.std(0)
        cross = z1.T @ z2 / len(z1)
        on_diag = torch.diagonal(cross).add(-1).pow(2).sum()
        off_diag = (cross - torch.diag(torch.diagonal(cross))).pow(2).sum()
        return on_diag + self.lambda_coeff * off_diag


def linear_warmup_decay(warmup_steps, step):
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0 / (1 + step - warmup_steps)


class DoubledSchedule:
    """A schedule that is none of torch's: it is told the step."""

    def __init__(self, optimizer, factor):
        self.optimizer = optimizer
        self.factor = factor
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.at(0)

    def at(self, number):
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * self.factor(number)

    def step(self, metrics=None, epoch=None):
        raise NotImplementedError("lr_scheduler_step calls at")

    def state_dict(self):
        return {"base": self.base}

    def load_state_dict(self, state):
        self.base = state["base"]


class BarlowTwins(L.LightningModule):
    def __init__(self, z_dim=6, learning_rate=2e-2, warmup_steps=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.ReLU())
        self.projection_head = nn.Sequential(
            nn.Linear(10, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, z_dim, bias=False)
        )
        self.loss_fn = BarlowTwinsLoss(z_dim=z_dim)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps

    def forward(self, x):
        return self.encoder(x)

    def shared_step(self, batch):
        (x1, x2, _), _ = batch
        z1, z2 = (self.projection_head(self.encoder(x)) for x in (x1, x2))
        return self.loss_fn(z1, z2)

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch), on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        scheduler = DoubledSchedule(optimizer, partial(linear_warmup_decay, self.warmup_steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.at(self.global_step)


class OnlineFineTuner(Callback):
    def __init__(self, encoder_output_dim, num_classes):
        super().__init__()
        self.encoder_output_dim = encoder_output_dim
        self.num_classes = num_classes

    def on_fit_start(self, trainer, pl_module):
        probe = nn.Linear(self.encoder_output_dim, self.num_classes)
        with torch.no_grad():
            probe.weight.zero_(), probe.bias.zero_()
        pl_module.online_finetuner = probe.to(pl_module.device)
        self.optimizer = torch.optim.SGD(pl_module.online_finetuner.parameters(), lr=0.5)

    def extract_online_finetuning_view(self, batch, device):
        (_, _, view), y = batch
        return view.to(device), y.to(device)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = self.extract_online_finetuning_view(batch, pl_module.device)
        with torch.no_grad():
            feats = pl_module(x)
        loss = F.cross_entropy(pl_module.online_finetuner(feats.detach()), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("online_train_loss", loss, on_step=True, on_epoch=False)

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        x, y = self.extract_online_finetuning_view(batch, pl_module.device)
        with torch.no_grad():
            preds = pl_module.online_finetuner(pl_module(x))
        acc = (preds.argmax(1) == y).float().mean()
        pl_module.log("online_val_acc", acc, on_step=False, on_epoch=True, sync_dist=True)


def main(folder):
    L.seed_everything(6)
    views = Views(48)
    module = BarlowTwins()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[OnlineFineTuner(encoder_output_dim=10, num_classes=2)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(views, 12, drop_last=True), DataLoader(views, 12))
    return module, {"rate": trainer.optimizers[0].param_groups[0]["lr"]}
