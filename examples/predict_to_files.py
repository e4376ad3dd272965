"""Predict the digits into files, on one process or several: no process holds all predictions.

The network is trained for a few epochs first; then `PredictionWriter` streams what `predict_step`
returns to the disk. Run it as it is, or with
``torchrun --nproc-per-node 2 examples/predict_to_files.py``: either way there is one set of files,
with rows in the order of the dataset, which any tool can read. (The predictions differ a little:
the batch size of the training is per process.)
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from callbacks import PredictionWriter
from trainer import Trainer, TrainModule


class Digits(TrainModule):
    """A multilayer perceptron that predicts probabilities, the digit and its English name."""

    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        probabilities = self.net(batch[0]).softmax(-1)
        digits = probabilities.argmax(-1)
        return {
            "probabilities": probabilities,  # to predictions.safetensors, like every tensor
            "digit": digits,
            "word": [self.words[digit] for digit in digits.tolist()],  # to predictions.jsonl
        }

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/predict_to_files"))
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    writer = PredictionWriter(overwrite=True)  # into <project dir>/predictions
    trainer = Trainer(
        max_epochs=arguments.max_epochs,
        seed=arguments.seed,
        project_dir=arguments.project_dir,
        callbacks=writer,
        checkpointing=False,
    )
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = Digits()
    trainer.fit(model, DataLoader(dataset, batch_size=arguments.batch_size, shuffle=True))
    trainer.predict(model, DataLoader(dataset, batch_size=arguments.batch_size))

    if trainer.accelerator.is_main_process:
        (folder,) = writer.directories
        predicted = load_file(folder / "predictions.safetensors")
        with (folder / "predictions.jsonl").open() as file:
            words = [json.loads(line)["word"] for line in file]
        accuracy = (predicted["digit"] == dataset.tensors[1]).float().mean()
        print(
            f"files     {folder}\n"
            f"columns   probabilities {list(predicted['probabilities'].shape)}, "
            f"digit {list(predicted['digit'].shape)}, word [{len(words)}]\n"
            f"first     {', '.join(words[:5])}\n"
            f"accuracy  {accuracy:.4f}"
        )


if __name__ == "__main__":
    main()
