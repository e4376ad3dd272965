"""The shape of Lightning's autoencoder: stages that share a step, and a callback that samples."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, random_split


class ImageSampler(Callback):
    def __init__(self, num_samples=3):
        super().__init__()
        self.num_samples = num_samples
        self.steps = []

    def _to_grid(self, images):
        return torch.cat(list(images.view(-1, 6, 6)), dim=1)

    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        images, _ = next(iter(DataLoader(trainer.datamodule.val, batch_size=self.num_samples)))
        with torch.no_grad():
            pl_module.eval()
            images = pl_module(images.to(pl_module.device).flatten(1))
            pl_module.train()
        folder = Path(trainer.default_root_dir) / "sampled"
        folder.mkdir(exist_ok=True)
        torch.save(self._to_grid(images), folder / f"epoch-{trainer.current_epoch}.pt")
        self.steps.append(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.logger.log_metrics({"first": outputs["loss"].item()}, step=trainer.global_step)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden_dim=8, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(36, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 36))
        self.example_input_array = torch.zeros(2, 36)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "val")

    def test_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(self._prepare_batch(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _prepare_batch(self, batch):
        x, _ = batch
        return x.view(x.size(0), -1)

    def _common_step(self, batch, batch_idx, stage):
        x = self._prepare_batch(batch)
        loss = nn.functional.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=stage == "train")
        return loss


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        image = torch.zeros(6, 6)
        image[index % 5 : index % 5 + 2, index % 4 : index % 4 + 2] = 1
        return image, index % 4


class Images(L.LightningDataModule):
    def __init__(self, batch_size=10):
        super().__init__()
        self.save_hyperparameters()
        whole = Squares()
        draw = torch.Generator().manual_seed(1)
        self.train, self.val, self.test = random_split(whole, [40, 10, 10], generator=draw)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.hparams.batch_size)

    predict_dataloader = test_dataloader


def main(folder):
    L.seed_everything(2)
    module, sampler = LitAutoEncoder(), ImageSampler()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=sampler,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    data = Images()
    trainer.fit(module, data)
    tested = trainer.test(module, datamodule=data)
    predicted = trainer.predict(module, datamodule=data)
    grids = sorted((Path(folder) / "sampled").iterdir())
    return module, {
        "test": tested,
        "predicted": torch.cat(predicted).tolist(),
        "files": [each.name for each in grids],
        "grids": [torch.load(each, weights_only=True).tolist() for each in grids],
        "steps": sampler.steps,
        "batch_size": trainer.datamodule.hparams.batch_size,
    }
