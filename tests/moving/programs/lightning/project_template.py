"""The shape of the best-known template of projects: everything is made from one configuration."""

import csv
import logging
from functools import partial

import lightning as L
import torch
import yaml
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_only
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy


class RankedLogger(logging.LoggerAdapter):
    def __init__(self, name=__name__, rank_zero_only=False):
        super().__init__(logger=logging.getLogger(name), extra=None)
        self.rank_zero_only = rank_zero_only

    def log(self, level, msg, rank=None, *args, **kwargs):
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)
            current_rank = getattr(rank_zero_only, "rank", None)
            if current_rank is None:
                raise RuntimeError("The `rank_zero_only.rank` needs to be set before use")
            msg = rank_prefixed_message(msg, current_rank)
            if not self.rank_zero_only or current_rank == 0:
                self.logger.log(level, msg, *args, **kwargs)


log = RankedLogger("template", rank_zero_only=True)


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size=8, lin1_size=16, output_size=3):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_size, lin1_size),
            nn.BatchNorm1d(lin1_size),
            nn.ReLU(),
            nn.Linear(lin1_size, output_size),
        )

    def forward(self, x):
        return self.model(x)


class LitModule(LightningModule):
    def __init__(self, net, optimizer, scheduler, compile):  # noqa: A002 - the template's
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=3)
        self.val_acc = Accuracy(task="multiclass", num_classes=3)
        self.test_acc = Accuracy(task="multiclass", num_classes=3)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        pass

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": scheduler,
                    "monitor": "val/loss",
                    "interval": "epoch",
                    "frequency": 1,
                },
            }
        return {"optimizer": optimizer}


class Points(LightningDataModule):
    def __init__(self, data_dir="data/", train_val_test_split=(60, 20, 20), batch_size=8):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self):
        return 3

    def setup(self, stage=None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("Batch size is not divisible by the number of devices.")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train:
            draw = torch.Generator().manual_seed(42)
            x = torch.randn(100, 8, generator=draw)
            y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
            parts = [TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])]
            self.data_train, self.data_val, self.data_test = random_split(
                ConcatDataset(parts), self.hparams.train_val_test_split, generator=draw
            )

    def train_dataloader(self):
        return DataLoader(self.data_train, batch_size=self.batch_size_per_device)

    def val_dataloader(self):
        return DataLoader(self.data_val, batch_size=self.batch_size_per_device)

    def test_dataloader(self):
        return DataLoader(self.data_test, batch_size=self.batch_size_per_device)

    def teardown(self, stage=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


@rank_zero_only
def log_hyperparameters(object_dict):
    model, trainer = object_dict["model"], object_dict["trainer"]
    if not trainer.logger:
        log.warning("Logger not found! Skipping hyperparameter logging...")
        return
    hparams = {"seed": object_dict["cfg"]["seed"]}
    hparams["model/params/total"] = sum(p.numel() for p in model.parameters())
    for logger in trainer.loggers:
        logger.log_hyperparams(hparams)


def train(cfg):
    if cfg.get("seed"):
        L.seed_everything(cfg["seed"], workers=True)
    datamodule: LightningDataModule = cfg["data"]()
    model: LightningModule = cfg["model"]()
    callbacks: list[Callback] = [make() for make in cfg["callbacks"]]
    logger: list[Logger] = [make() for make in cfg["logger"]]
    trainer: Trainer = cfg["trainer"](callbacks=callbacks, logger=logger)
    object_dict = {"cfg": cfg, "model": model, "trainer": trainer}
    if logger:
        log_hyperparameters(object_dict)
    trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    train_metrics = dict(trainer.callback_metrics)
    ckpt_path = trainer.checkpoint_callback.best_model_path
    if ckpt_path == "":
        log.warning("Best ckpt not found! Using current weights for testing...")
        ckpt_path = None
    trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
    log.info(f"Best ckpt path: {ckpt_path}")
    return {**train_metrics, **trainer.callback_metrics, **written(trainer)}, model


def written(trainer):
    """What a notebook reads of the logger's files afterwards."""
    logger = trainer.logger
    assert logger.log_dir == f"{logger.save_dir}/{logger.name}/version_{logger.version}"
    with open(f"{logger.log_dir}/hparams.yaml") as file:
        hparams = yaml.safe_load(file)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    epochs = {int(row["epoch"]) for row in rows if row["val/acc"]}
    return {name: hparams[name] for name in ("seed", "model/params/total")} | {
        f"epoch {epoch}": 1 for epoch in epochs
    }


def main(folder):
    cfg = {
        "seed": 12345,
        "data": partial(Points, data_dir=folder),
        "model": lambda: LitModule(
            net=SimpleDenseNet(),
            optimizer=partial(torch.optim.Adam, lr=0.01, weight_decay=0.0),
            scheduler=partial(
                torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1
            ),
            compile=False,
        ),
        "callbacks": [
            lambda: ModelCheckpoint(
                dirpath=f"{folder}/checkpoints",
                filename="epoch_{epoch:03d}",
                monitor="val/acc",
                mode="max",
                save_last=True,
                auto_insert_metric_name=False,
            ),
            lambda: EarlyStopping(monitor="val/acc", patience=100, mode="max"),
            lambda: RichModelSummary(max_depth=-1),
        ],
        "logger": [lambda: CSVLogger(save_dir=folder, name="csv", prefix="")],
        "trainer": partial(
            Trainer,
            default_root_dir=folder,
            min_epochs=1,
            max_epochs=4,
            accelerator="cpu",
            devices=1,
            check_val_every_n_epoch=1,
            deterministic=False,
            log_every_n_steps=1,
            enable_progress_bar=False,
        ),
    }
    metrics, model = train(cfg)
    return model, {name: float(value) for name, value in metrics.items()}
