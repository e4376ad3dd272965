"""The shape of the energy model tutorial: the step samples with gradients of the inputs."""

import random

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Sampler:
    def __init__(self, model, sample_size, max_len=64):
        self.model = model
        self.sample_size = sample_size
        self.max_len = max_len
        self.draw = torch.Generator().manual_seed(8)
        self.choose = random.Random(8)
        self.examples = list(torch.rand(sample_size, 1, 3, generator=self.draw) * 2 - 1)

    def sample_new_exmps(self, steps=5, step_size=0.5):
        fresh = torch.rand(2, 3, generator=self.draw) * 2 - 1
        old = torch.cat(self.choose.choices(self.examples, k=self.sample_size - 2), dim=0)
        inputs = torch.cat([fresh, old], dim=0).detach()
        inputs = Sampler.generate_samples(self.model, inputs, self.draw, steps, step_size)
        self.examples = list(inputs.chunk(self.sample_size, dim=0)) + self.examples
        self.examples = self.examples[: self.max_len]
        return inputs

    @staticmethod
    def generate_samples(model, inputs, draw, steps=5, step_size=0.5):
        is_training = model.training
        model.eval()
        for p in model.parameters():
            p.requires_grad = False
        inputs.requires_grad = True
        had_gradients_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        for _ in range(steps):
            noise = torch.randn(inputs.shape, generator=draw) * 0.01
            inputs.data.add_(noise)
            inputs.data.clamp_(min=-1.0, max=1.0)
            out = -model(inputs)
            out.sum().backward()
            inputs.grad.data.clamp_(-0.03, 0.03)
            inputs.data.add_(-step_size * inputs.grad.data)
            inputs.grad.detach_()
            inputs.grad.zero_()
        for p in model.parameters():
            p.requires_grad = True
        model.train(is_training)
        torch.set_grad_enabled(had_gradients_enabled)
        return inputs.detach()


class DeepEnergyModel(L.LightningModule):
    def __init__(self, batch_size, alpha=0.1, lr=1e-2, beta1=0.0, **net_args):
        super().__init__()
        self.save_hyperparameters()
        self.cnn = nn.Sequential(
            nn.Linear(3, net_args["width"]), nn.SiLU(), nn.Linear(net_args["width"], 1)
        )
        self.sampler = Sampler(self.cnn, sample_size=batch_size)
        self.noise = torch.Generator().manual_seed(9)

    def forward(self, x):
        return self.cnn(x).squeeze(dim=-1)

    def configure_optimizers(self):
        betas = (self.hparams.beta1, 0.999)
        optimizer = optim.Adam(self.parameters(), lr=self.hparams.lr, betas=betas)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)]

    def training_step(self, batch, batch_idx):
        real_imgs, _ = batch
        small_noise = torch.randn(real_imgs.shape, generator=self.noise) * 0.005
        real_imgs.add_(small_noise).clamp_(min=-1.0, max=1.0)
        fake_imgs = self.sampler.sample_new_exmps()
        real_out, fake_out = self.cnn(torch.cat([real_imgs, fake_imgs], dim=0)).chunk(2, dim=0)
        reg_loss = self.hparams.alpha * (real_out**2 + fake_out**2).mean()
        cdiv_loss = fake_out.mean() - real_out.mean()
        loss = reg_loss + cdiv_loss
        self.log("loss", loss)
        self.log("loss_regularization", reg_loss)
        self.log("metrics_avg_fake", fake_out.mean())
        return loss

    def validation_step(self, batch, batch_idx):
        real_imgs, _ = batch
        fake_imgs = torch.rand(real_imgs.shape, generator=self.noise) * 2 - 1
        real_out, fake_out = self.cnn(torch.cat([real_imgs, fake_imgs], dim=0)).chunk(2, dim=0)
        self.log("val_contrastive_divergence", fake_out.mean() - real_out.mean())


class GenerateCallback(Callback):
    def __init__(self, every_n_epochs=2):
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self.energies = []

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch % self.every_n_epochs == 0:
            draw = torch.Generator().manual_seed(0)
            start = torch.rand(3, 3, generator=draw) * 2 - 1
            pl_module.eval()
            with torch.set_grad_enabled(True):
                samples = Sampler.generate_samples(pl_module.cnn, start, draw)
            pl_module.train()
            self.energies.append(pl_module(samples).tolist())


def main(folder):
    L.seed_everything(42)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).mul(0.1).add(0.5)
    loader = DataLoader(TensorDataset(x, torch.zeros(40)), batch_size=8)
    generate = GenerateCallback()
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="auto",
        devices=1,
        max_epochs=3,
        gradient_clip_val=0.1,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[generate, LearningRateMonitor("epoch")],
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    model = DeepEnergyModel(batch_size=8, width=12)
    trainer.fit(model, loader, loader)
    return model, {"energies": generate.energies}
