"""The shape of the meta-learning tutorial: a loop inside the step adapts copies of the model."""

from copy import deepcopy

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Tasks(Dataset):
    """Lines of random slope: a few points to adapt to, and a few to be judged by."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 8, 1, generator=draw)
        self.y = self.x * torch.randn(size, 1, 1, generator=draw) + 0.1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class MAML(L.LightningModule):
    def __init__(self, lr, lr_inner, num_inner_steps):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)
        return [optimizer], [scheduler]

    def adapt_few_shot(self, x, y):
        local_model = deepcopy(self.model)
        local_model.train()
        local_optim = optim.SGD(local_model.parameters(), lr=self.hparams.lr_inner)
        local_optim.zero_grad()
        for _ in range(self.hparams.num_inner_steps):
            loss = F.mse_loss(local_model(x), y)
            loss.backward()
            local_optim.step()
            local_optim.zero_grad()
        return local_model

    def outer_loop(self, batch, mode="train"):
        losses = []
        self.model.zero_grad()
        for x, y in zip(*batch, strict=True):
            local_model = self.adapt_few_shot(x[:4], y[:4])
            loss = F.mse_loss(local_model(x[4:]), y[4:])
            if mode == "train":
                loss.backward()
                pairs = zip(self.model.parameters(), local_model.parameters(), strict=True)
                for p_global, p_local in pairs:
                    p_global.grad = (
                        p_local.grad if p_global.grad is None else p_global.grad + p_local.grad
                    )
            losses.append(loss.detach())
        if mode == "train":
            opt = self.optimizers()
            opt.step()
            opt.zero_grad()
        self.log(f"{mode}_loss", sum(losses) / len(losses))

    def training_step(self, batch, batch_idx):
        self.outer_loop(batch, mode="train")
        return

    def validation_step(self, batch, batch_idx):
        torch.set_grad_enabled(True)
        self.outer_loop(batch, mode="val")
        torch.set_grad_enabled(False)

    @property
    def automatic_optimization(self):
        return False


def main(folder):
    L.seed_everything(42)
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="auto",
        devices=1,
        max_epochs=2,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(save_weights_only=True, mode="min", monitor="val_loss")],
        enable_progress_bar=False,
        inference_mode=False,
    )
    model = MAML(lr=1e-2, lr_inner=0.1, num_inner_steps=2)
    trainer.fit(model, DataLoader(Tasks(32, 0), 8), DataLoader(Tasks(16, 1), 8))
    best = MAML.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, num_inner_steps=3)
    return model, {"steps": best.hparams.num_inner_steps, "updates": trainer.global_step}
