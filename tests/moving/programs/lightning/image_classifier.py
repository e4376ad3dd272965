"""The shape of Lightning's image classifier: a backbone, a module around it and a data module."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class Backbone(torch.nn.Module):
    def __init__(self, hidden_dim=16):
        super().__init__()
        self.l1 = torch.nn.Linear(8 * 8, hidden_dim)
        self.l2 = torch.nn.Linear(hidden_dim, 3)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.flatten(1))))


class LitClassifier(L.LightningModule):
    def __init__(self, backbone=None, learning_rate=0.01):
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = Backbone() if backbone is None else backbone

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y), on_step=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict(
            {
                "test_loss": F.cross_entropy(self(x), y),
                "test_acc": (self(x).argmax(1) == y).float().mean(),
            }
        )

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class MyDataModule(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        draw = torch.Generator().manual_seed(0)
        x = torch.rand(140, 1, 8, 8, generator=draw)
        whole = TensorDataset(x, x.mean((1, 2, 3)).argsort().argsort() // 47)
        self.train, self.val, self.test = random_split(whole, [90, 25, 25], generator=draw)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


def main(folder):
    L.seed_everything(1234)
    module, data = LitClassifier(Backbone(hidden_dim=12)), MyDataModule()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(monitor="valid_loss", save_top_k=1)],
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data)
    [tested] = trainer.test(ckpt_path="best", datamodule=data)
    predictions = trainer.predict(ckpt_path="best", datamodule=data)
    best = LitClassifier.load_from_checkpoint(
        trainer.checkpoint_callback.best_model_path, backbone=Backbone(hidden_dim=12)
    )
    best.eval()
    x = torch.stack([sample[0] for sample in data.test])
    again = torch.equal(best(x).argmax(1), torch.cat(predictions))
    return module, {
        "test": tested,
        "predictions": torch.cat(predictions).tolist(),
        "again": again,
        "rate": best.hparams.learning_rate,
        "score": trainer.checkpoint_callback.best_model_score.item(),
    }
