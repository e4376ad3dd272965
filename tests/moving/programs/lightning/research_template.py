"""The shape of a research template: arguments of a command line make the Trainer and the module."""

from argparse import ArgumentParser, Namespace

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitRegressor(pl.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters(args)
        self.net = nn.Sequential(
            nn.Linear(4, self.hparams.hidden_dim), nn.Tanh(), nn.Linear(self.hparams.hidden_dim, 1)
        )
        self.validation_step_outputs = []

    @staticmethod
    def add_model_specific_args(parent_parser):
        parser = parent_parser.add_argument_group("LitRegressor")
        parser.add_argument("--hidden_dim", type=int, default=8)
        parser.add_argument("--learning_rate", type=float, default=0.05)
        return parent_parser

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        return {"loss": loss, "size": len(x)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("train/root", outputs["loss"] ** 0.5)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        errors = (self(x) - y).abs()
        self.validation_step_outputs.append(errors)
        self.log("val/loss", (errors**2).mean())
        return errors

    def on_validation_epoch_end(self):
        errors = torch.cat(self.validation_step_outputs)
        self.log("val/worst", errors.max())
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.9)
        steps = self.planned = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.learning_rate, total_steps=steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "one_cycle"}]


def main(folder):
    parser = ArgumentParser()
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--gradient_clip_val", type=float, default=None)
    parser.add_argument("--precision", default="32")
    parser = LitRegressor.add_model_specific_args(parser)
    args = parser.parse_args(
        ["--gradient_clip_val", "0.5", "--hidden_dim", "6", "--accumulate_grad_batches", "2"]
    )
    pl.seed_everything(args.seed)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    model = LitRegressor(args)
    checkpoint = ModelCheckpoint(
        monitor="val/loss", mode="min", save_top_k=2, save_last=True, filename="{epoch:02d}"
    )
    trainer = pl.Trainer(
        max_epochs=args.max_epochs,
        accumulate_grad_batches=args.accumulate_grad_batches,
        gradient_clip_val=args.gradient_clip_val,
        precision=args.precision,
        accelerator="cpu",
        callbacks=[checkpoint, EarlyStopping("val/loss", patience=5), LearningRateMonitor("step")],
        logger=CSVLogger(folder, name="research"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(train, args.batch_size), DataLoader(val, args.batch_size))
    [tested] = trainer.validate(dataloaders=DataLoader(val, 5), ckpt_path="best")
    again = LitRegressor.load_from_checkpoint(checkpoint.best_model_path)
    return model, {
        "validated": tested,
        "again": isinstance(again.hparams.args, Namespace)
        if "args" in again.hparams
        else again.hparams.hidden_dim,
        "best": len(checkpoint.best_k_models),
        "updates": (trainer.global_step, model.planned),
    }
