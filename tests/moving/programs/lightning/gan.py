"""The shape of Lightning's GAN: two optimizers, stepped by hand in turn."""

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self, latent_dim=4, lr=1e-2, b1=0.5, b2=0.9, batch_size=8, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 12), nn.ReLU(), nn.Linear(12, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        self.noise = torch.Generator().manual_seed(3)
        self.validation_z = torch.randn(6, latent_dim, generator=self.noise)
        self.samples = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], self.hparams.latent_dim, generator=self.noise)
        z = z.type_as(real)

        self.toggle_optimizer(optimizer_g)
        frozen = [each.requires_grad for each in self.discriminator.parameters()]
        self.generated = self(z)
        valid = torch.ones(real.size(0), 1).type_as(real)
        g_loss = self.adversarial_loss(self.discriminator(self.generated), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        assert not any(frozen)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        fake = torch.zeros(real.size(0), 1).type_as(real)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        z = self.validation_z.type_as(self.generator[0].weight)
        self.samples.append((self.current_epoch, self(z).mean().item()))

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        rate, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=rate, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=rate, betas=betas)
        halving = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (opt_g, opt_d)]
        return [opt_g, opt_d], halving


def main(folder):
    L.seed_everything(3)
    module = GAN(unused=1)
    real = torch.rand(44, 5, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=3,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    train = DataLoader(TensorDataset(real), batch_size=module.hparams.batch_size)
    trainer.fit(module, train, DataLoader(TensorDataset(real[:8]), batch_size=4))
    rates = [each.param_groups[0]["lr"] for each in trainer.optimizers]
    return module, {"samples": module.samples, "rates": rates, "betas": module.hparams.b2}
