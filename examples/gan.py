"""Generate digits: two optimizers, stepped by hand in ``training_step``.

Run it as it is, or with ``torchrun --nproc-per-node 2 examples/gan.py``. It writes a grid of
generated digits as a PGM image.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer, TrainModule

LATENT = 16


class GAN(TrainModule):
    """A generator and a discriminator for images of 8 × 8 pixels with values in [-1, 1]."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
        )

    def forward(self, noise):
        """Return images of shape (batch, 64) for noise of shape (batch, LATENT)."""
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        fake = self(torch.randn(len(real), LATENT, device=self.device))

        discriminator_loss = self.judge(real, 1.0) + self.judge(fake.detach(), 0.0)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()

        generator_loss = self.judge(fake, 1.0)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()

        self.log("loss/discriminator", discriminator_loss, prog_bar=True)
        self.log("loss/generator", generator_loss, prog_bar=True)

    def judge(self, images, label):
        """Return the discriminator's loss when all the images have this label."""
        scores = self.discriminator(images)
        return nn.functional.binary_cross_entropy_with_logits(
            scores, torch.full_like(scores, label)
        )

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]


@torch.no_grad()
def save_samples(module, path, rows=8):
    """Write a grid of rows × rows samples as a PGM image, each with a border of one pixel."""
    noise = torch.randn(rows * rows, LATENT, generator=torch.Generator().manual_seed(0))
    images = module.eval()(noise.to(module.device)).cpu().reshape(rows, rows, 8, 8)
    tiles = nn.functional.pad(images, (1, 1, 1, 1), value=-1.0).transpose(1, 2)
    pixels = ((tiles.reshape(10 * rows, 10 * rows) + 1) * 127.5).round().byte()
    path.write_bytes(b"P5 %d %d 255\n" % (10 * rows, 10 * rows) + pixels.numpy().tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/gan"))
    parser.add_argument("--max-epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    images, _ = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 8 - 1)
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=arguments.seed,
        log_with="tensorboard",
        log_every=20,
        project_dir=arguments.project_dir,
    )
    module = GAN()
    trainer.fit(
        module, DataLoader(dataset, batch_size=arguments.batch_size, shuffle=True), ckpt_path="auto"
    )
    if trainer.accelerator.is_main_process:
        save_samples(module, trainer.project_dir / "samples.pgm")
    trainer.accelerator.print(
        f"discriminator  {trainer.callback_metrics['loss/discriminator']:.4f}\n"
        f"generator      {trainer.callback_metrics['loss/generator']:.4f}\n"
        f"samples        {trainer.project_dir / 'samples.pgm'}"
    )


if __name__ == "__main__":
    main()
