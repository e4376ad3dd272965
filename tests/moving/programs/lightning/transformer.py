"""The shape of the attention tutorial: a warm-up that is stepped with each update, and clipping."""

import math

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class CosineWarmupScheduler(optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, warmup, max_iters):
        self.warmup = warmup
        self.max_num_iters = max_iters
        super().__init__(optimizer)

    def get_lr(self):
        factor = self.get_lr_factor(epoch=self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def get_lr_factor(self, epoch):
        factor = 0.5 * (1 + math.cos(math.pi * epoch / self.max_num_iters))
        return factor * min(1.0, (epoch + 1) / self.warmup)


class Reversed(Dataset):
    """Sequences to be told backwards."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.data = torch.randint(7, (size, 8), generator=draw)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index].flip(0)


class TransformerPredictor(L.LightningModule):
    def __init__(self, model_dim, num_classes, num_heads, lr, warmup, max_iters):
        super().__init__()
        self.save_hyperparameters()
        self._create_model()

    def _create_model(self):
        width = self.hparams.model_dim
        self.embedding = nn.Embedding(self.hparams.num_classes, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        self.attention = nn.MultiheadAttention(width, self.hparams.num_heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, self.hparams.num_classes)

    def forward(self, x):
        x = self.embedding(x) + self.position
        return self.output(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))

    def configure_optimizers(self):
        optimizer = optim.Adam(self.parameters(), lr=self.hparams.lr)
        self.lr_scheduler = CosineWarmupScheduler(
            optimizer, warmup=self.hparams.warmup, max_iters=self.hparams.max_iters
        )
        return optimizer

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()

    def _calculate_loss(self, batch, mode="train"):
        inputs, labels = batch
        preds = self(inputs)
        loss = F.cross_entropy(preds.view(-1, preds.size(-1)), labels.view(-1))
        self.log(f"{mode}_loss", loss)
        self.log(f"{mode}_acc", (preds.argmax(-1) == labels).float().mean())
        return loss

    def training_step(self, batch, batch_idx):
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="val")

    def test_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="test")


def main(folder):
    L.seed_everything(42)
    train, val = DataLoader(Reversed(48, 0), 8), DataLoader(Reversed(24, 1), 8)
    trainer = L.Trainer(
        default_root_dir=folder,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc"),
            LearningRateMonitor("step"),
        ],
        accelerator="auto",
        devices=1,
        max_epochs=3,
        gradient_clip_val=0.3,
        enable_progress_bar=False,
    )
    trainer.logger._log_graph = False
    trainer.logger._default_hp_metric = None
    model = TransformerPredictor(
        model_dim=16,
        num_classes=7,
        num_heads=2,
        lr=2e-2,
        warmup=5,
        max_iters=trainer.max_epochs * len(train),
    )
    trainer.fit(model, train, val)
    path = trainer.checkpoint_callback.best_model_path
    best = TransformerPredictor.load_from_checkpoint(path)
    [validated] = trainer.test(best, dataloaders=val, verbose=False)
    return model, {"val": validated, "iters": best.hparams.max_iters}
