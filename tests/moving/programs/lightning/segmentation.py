"""The shape of Lightning's semantic segmentation, whose length is a number of steps."""

from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, size, offset=0):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index + self.offset)
        mask = torch.zeros(8, 8, dtype=torch.long)
        row, column = torch.randint(5, (2,), generator=draw).tolist()
        mask[row : row + 3, column : column + 3] = 1
        return mask[None] + 0.3 * torch.randn(1, 8, 8, generator=draw), mask


class UNet(nn.Module):
    def __init__(self, features=4):
        super().__init__()
        self.down = nn.Conv2d(1, features, 3, padding=1)
        self.middle = nn.Conv2d(features, features, 3, padding=1)
        self.up = nn.ConvTranspose2d(features, features, 2, stride=2)
        self.out = nn.Conv2d(2 * features, 2, 1)

    def forward(self, x):
        high = F.relu(self.down(x))
        low = F.relu(self.middle(F.max_pool2d(high, 2)))
        return self.out(torch.cat([high, self.up(low)], dim=1))


class SegModel(L.LightningModule):
    def __init__(self, batch_size=4, lr=1e-2):
        super().__init__()
        self.batch_size = batch_size
        self.lr = lr
        self.net = UNet()
        self.trainset, self.validset = Shapes(48), Shapes(8, offset=100)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        img, mask = batch
        loss = F.cross_entropy(self(img.float()), mask)
        return {"loss": loss, "log": {"train_loss": loss.detach()}}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log_dict(outputs["log"])

    def validation_step(self, batch, batch_idx):
        img, mask = batch
        out = self(img.float())
        self.log(
            "val_iou",
            ((out.argmax(1) & mask).sum() / (out.argmax(1) | mask).sum()),
            batch_size=len(img),
        )
        self.log("val_loss", F.cross_entropy(out, mask), batch_size=len(img))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.lr)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
        return [opt], [sch]

    def train_dataloader(self):
        return DataLoader(self.trainset, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.validset, batch_size=self.batch_size)


def main(folder):
    L.seed_everything(11)
    model = SegModel()
    timer = Timer(duration=timedelta(hours=1))
    checkpoint = ModelCheckpoint(monitor="val_loss", every_n_train_steps=5, save_top_k=2)
    trainer = L.Trainer(
        max_steps=18,
        max_epochs=-1,
        val_check_interval=0.5,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[GradientAccumulationScheduler({0: 2, 1: 1}), timer, checkpoint],
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model)
    return model, {
        "updates": trainer.global_step,
        "epochs": trainer.current_epoch,
        "timed": timer.time_elapsed("train") > 0,
        "limit": trainer.max_steps,
    }
