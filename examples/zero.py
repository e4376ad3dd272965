"""Train with DeepSpeed's ZeRO, chosen on the command line, and use the weights without it.

The script does not mention DeepSpeed. Run as it is, it trains on one process without it. With
``trainer launch --num_processes 2 --use_deepspeed --zero_stage 3 examples/zero.py`` each process
has a part of every parameter, gradient and optimizer state; ``--offload_optimizer_device cpu``
keeps that state in host memory. It needs ``pip install -e ".[deepspeed]"``.

Run it again, also with other options or another number of processes, to resume from its last
checkpoint. At the end the parts of its weights are merged, and a plain module classifies with them.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import GradientNormMonitor, ModelCheckpoint
from trainer import Trainer, TrainModule
from trainer.checkpoint.shards import merge_weights


def make_net(width=256, depth=3):
    """Return a perceptron for images of 8 × 8 pixels, of about 230,000 parameters."""
    layers = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


class Digits(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/accuracy", (self.net(x).argmax(-1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def accuracy_of(file, dataset):
    """Return the accuracy of a plain module with the weights in a file."""
    net = make_net()
    net.load_state_dict({name.removeprefix("net."): w for name, w in load_file(file).items()})
    x, y = dataset[:]
    return (net(x).argmax(-1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/zero"))
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    arguments = parser.parse_args()

    saving = ModelCheckpoint()
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=0,
        max_grad_norm=1.0,
        log_every=10,
        project_dir=arguments.project_dir,
        callbacks=[saving, GradientNormMonitor()],
    )
    train_set, val_set = load_data()
    trainer.fit(
        Digits(),
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=64),
        ckpt_path="auto",
    )
    if trainer.is_global_zero:
        weights = arguments.project_dir / "weights.safetensors"
        merge_weights(saving.last_model_path, weights)
        print(f"trained by  {trainer.accelerator.distributed_type.value}")
        print(f"accuracy    {trainer.callback_metrics['val/accuracy']:.4f}")
        print(f"plain       {accuracy_of(weights, val_set):.4f} with {weights}")


if __name__ == "__main__":
    main()
