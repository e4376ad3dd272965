"""The shape of the SimCLR tutorial: two views of each sample, then a classifier on the features."""

from copy import deepcopy

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Views(Dataset):
    """Two views of each sample, always the same ones."""

    def __init__(self, size):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(size, 6, generator=draw)
        self.views = [x + 0.1 * torch.randn(size, 6, generator=draw) for _ in range(2)]
        self.labels = (x[:, 0] > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return [view[index] for view in self.views], self.labels[index]


class SimCLR(L.LightningModule):
    def __init__(self, hidden_dim, lr, temperature, weight_decay, max_epochs=500):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.temperature > 0.0, "The temperature must be a positive float!"
        self.convnet = nn.Sequential(nn.Linear(6, 4 * hidden_dim), nn.ReLU())
        self.convnet.fc = nn.Linear(4 * hidden_dim, hidden_dim)

    def configure_optimizers(self):
        optimizer = optim.AdamW(
            self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
        lr_scheduler = optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.hparams.max_epochs, eta_min=self.hparams.lr / 50
        )
        return [optimizer], [lr_scheduler]

    def info_nce_loss(self, batch, mode="train"):
        imgs, _ = batch
        feats = self.convnet(torch.cat(imgs, dim=0))
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / self.hparams.temperature
        nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
        self.log(mode + "_loss", nll)
        comb_sim = torch.cat(
            [cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1
        )
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        self.log(mode + "_acc_top1", (sim_argsort == 0).float().mean())
        self.log(mode + "_acc_mean_pos", 1 + sim_argsort.float().mean())
        return nll

    def training_step(self, batch, batch_idx):
        return self.info_nce_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self.info_nce_loss(batch, mode="val")


class LogisticRegression(L.LightningModule):
    def __init__(self, feature_dim, num_classes, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Linear(feature_dim, num_classes)

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=self.hparams.lr)
        lr_scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
        return [optimizer], [lr_scheduler]

    def _calculate_loss(self, batch, mode="train"):
        feats, labels = batch
        preds = self.model(feats)
        loss = F.cross_entropy(preds, labels)
        self.log(mode + "_loss", loss)
        self.log(mode + "_acc", (preds.argmax(dim=-1) == labels).float().mean())
        return loss

    def training_step(self, batch, batch_idx):
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="val")

    def test_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="test")


@torch.no_grad()
def prepare_data_features(model, dataset):
    network = deepcopy(model.convnet)
    network.fc = nn.Identity()
    network.eval()
    feats = [network(views[0]) for views, _ in DataLoader(dataset, batch_size=16)]
    return TensorDataset(torch.cat(feats), dataset.labels)


def main(folder):
    L.seed_everything(42)
    views = Views(48)
    options = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 1}
    trainer = L.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        logger=CSVLogger(folder),
        callbacks=[
            ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc_mean_pos"),
            LearningRateMonitor("epoch"),
        ],
        **options,
    )
    model = SimCLR(hidden_dim=5, lr=5e-3, temperature=0.1, weight_decay=1e-4, max_epochs=3)
    trainer.fit(model, DataLoader(views, 16, drop_last=True), DataLoader(views, 16))
    best = SimCLR.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    L.seed_everything(43)
    features = prepare_data_features(best, views)
    second = L.Trainer(
        default_root_dir=f"{folder}/second",
        max_epochs=3,
        callbacks=[ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc")],
        check_val_every_n_epoch=3,
        logger=False,
        **options,
    )
    classifier = LogisticRegression(feature_dim=20, num_classes=2, lr=1e-2)
    loader = DataLoader(features, 16)
    second.fit(classifier, loader, loader)
    found = second.test(classifier, dataloaders=loader, verbose=False)
    return model, {"classified": found, "weights": classifier.model.weight.tolist()}
