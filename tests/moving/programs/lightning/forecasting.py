"""The shape of a forecasting library: a base class with many hooks that read the Trainer."""

from copy import deepcopy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset


class TimeSeries(Dataset):
    def __init__(self, size, encoder_length=6, prediction_length=3):
        time = torch.arange(size + encoder_length + prediction_length) * 0.4
        self.values = time.sin() + 0.01 * time
        self.encoder_length, self.prediction_length = encoder_length, prediction_length

    def __len__(self):
        return len(self.values) - self.encoder_length - self.prediction_length

    def __getitem__(self, index):
        split = index + self.encoder_length
        x = {"encoder_cont": self.values[index:split], "group": torch.tensor(index % 2)}
        return x, (self.values[split : split + self.prediction_length], None)

    def to_dataloader(self, batch_size):
        return DataLoader(self, batch_size=batch_size, collate_fn=self._collate_fn)

    @staticmethod
    def _collate_fn(batches):
        x = {name: torch.stack([each[0][name] for each in batches]) for name in batches[0][0]}
        return x, (torch.stack([each[1][0] for each in batches]), None)


class PredictCallback(BasePredictionWriter):
    def __init__(self, write_interval="batch"):
        super().__init__(write_interval=write_interval)
        self._reset_data()

    def _reset_data(self, result=True):
        self._output = []
        if result:
            self._result = None

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ):
        self._output.append((prediction["prediction"], batch[0]["group"]))

    def on_predict_epoch_end(self, trainer, pl_module):
        self._result = tuple(torch.cat(column) for column in zip(*self._output, strict=True))
        self._reset_data(result=False)

    @property
    def result(self):
        return self._result


class BaseModel(pl.LightningModule):
    def __init__(
        self,
        log_interval=4,
        learning_rate=1e-2,
        loss=None,
        reduce_on_plateau_patience=0,
        optimizer="adam",
        log_gradient_flow=False,
        **kwargs,
    ):
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])
        assert all(name in self.hparams for name in kwargs)
        self.loss = nn.L1Loss() if loss is None else loss
        self.training_step_outputs = []
        self.validation_step_outputs = []

    @property
    def current_stage(self):
        if self.trainer.training:
            return "train"
        if self.trainer.sanity_checking:
            return "sanity_check"
        if self.trainer.validating:
            return "val"
        return "test" if self.trainer.testing else "predict"

    @property
    def predicting(self):
        return self.current_stage == "predict"

    @property
    def log_interval(self):
        if self.predicting:
            return -1
        return self.hparams.log_interval

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        x, (target, weight) = batch
        return {name: value.to(device) for name, value in x.items()}, (target.to(device), weight)

    def step(self, x, y, batch_idx, **kwargs):
        out = self(x, **kwargs)
        loss = self.loss(out["prediction"], y[0])
        self.log(
            f"{self.current_stage}_loss",
            loss,
            on_step=self.training,
            on_epoch=True,
            prog_bar=True,
            batch_size=len(y[0]),
        )
        log = {"loss": loss, "n_samples": len(y[0])}
        return log, out

    def training_step(self, batch, batch_idx):
        x, y = batch
        log, _ = self.step(x, y, batch_idx)
        self.training_step_outputs.append(log["n_samples"])
        return log

    def on_train_epoch_end(self):
        self.log("seen", float(sum(self.training_step_outputs)))
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx) -> STEP_OUTPUT:
        x, y = batch
        log, out = self.step(x, y, batch_idx)
        mae = (out["prediction"] - y[0]).abs().mean()
        self.log("val_MAE", mae, on_step=False, on_epoch=True, batch_size=len(y[0]))
        self.validation_step_outputs.append(log)
        return log

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            assert len(self.validation_step_outputs) == sum(self.trainer.num_val_batches)
        self.validation_step_outputs.clear()

    def test_step(self, batch, batch_idx):
        x, y = batch
        log, _ = self.step(x, y, batch_idx)
        return log

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer):
        if self.hparams.log_gradient_flow and self.log_interval > 0:
            flow = [p.grad.abs().mean() for p in self.parameters() if p.grad is not None]
            self.log("flow", torch.stack(flow).mean())

    def on_fit_start(self):
        self.epochs_planned = self.trainer.max_epochs

    def on_fit_end(self):
        if self.trainer.is_global_zero and self.trainer.logger is not None:
            self.ended = self.trainer.global_step

    def configure_optimizers(self):
        lrs = self.hparams.learning_rate
        optimizer = torch.optim.Adam(self.parameters(), lr=lrs)
        if self.trainer.limit_train_batches is not None and self.trainer.fast_dev_run:
            return optimizer
        scheduler_config = {
            "scheduler": ReduceLROnPlateau(
                optimizer,
                mode="min",
                factor=0.5,
                patience=self.hparams.reduce_on_plateau_patience,
            ),
            "monitor": "val_loss",
            "interval": "epoch",
            "frequency": 1,
            "strict": False,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler_config}

    @classmethod
    def from_dataset(cls, dataset, **kwargs):
        net = cls(
            encoder_length=dataset.encoder_length,
            prediction_length=dataset.prediction_length,
            **kwargs,
        )
        net.dataset_parameters = {"encoder_length": dataset.encoder_length}
        return net

    def on_save_checkpoint(self, checkpoint):
        checkpoint["dataset_parameters"] = getattr(self, "dataset_parameters", None)

    def on_load_checkpoint(self, checkpoint):
        self.dataset_parameters = checkpoint.get("dataset_parameters", None)

    def predict(self, dataloader, trainer_kwargs=None):
        predict_callback = PredictCallback()
        kwargs = deepcopy(trainer_kwargs or {})
        kwargs["callbacks"] = [*kwargs.get("callbacks", []), predict_callback]
        kwargs.setdefault("enable_progress_bar", False)
        kwargs.setdefault("inference_mode", False)
        trainer = pl.Trainer(**kwargs)
        trainer.predict(self, dataloader, return_predictions=False)
        return predict_callback.result


class MLP(BaseModel):
    def __init__(self, encoder_length=6, prediction_length=3, hidden_size=8, **kwargs):
        self.early = True
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.mlp = nn.Sequential(
            nn.Linear(encoder_length, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, prediction_length),
        )

    def forward(self, x):
        return {"prediction": self.mlp(x["encoder_cont"])}


def main(folder):
    pl.seed_everything(42)
    training, validation = TimeSeries(64), TimeSeries(24)
    early = EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=3, verbose=False, mode="min")
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        enable_model_summary=True,
        gradient_clip_val=0.1,
        limit_train_batches=7,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(), early],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = MLP.from_dataset(training, learning_rate=0.02, log_gradient_flow=True)
    trainer.fit(
        model,
        train_dataloaders=training.to_dataloader(8),
        val_dataloaders=validation.to_dataloader(8),
    )
    best = MLP.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    quiet = {"accelerator": "cpu", "logger": False, "default_root_dir": folder}
    predicted, group = best.predict(validation.to_dataloader(10), trainer_kwargs=quiet)
    return model, {
        "predicted": predicted.tolist(),
        "group": group.tolist(),
        "kept": best.dataset_parameters,
        "planned": model.epochs_planned,
        "ended": model.ended,
        "stopped": early.stopped_epoch,
    }
