"""Train the digits with layers on different processes (pipeline parallelism), and classify them.

``trainer launch --num_processes 2 examples/pipeline.py`` gives each process half of the layers; as
``python examples/pipeline.py`` one process runs the same micro-batches, to the same losses. At the
end plain PyTorch loads the weights that the processes have written.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer import PartialState, PipelineParallel, set_seed


class Block(nn.Module):
    """A two-layer perceptron with a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.net(x)


class Digits(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/pipeline"))
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    arguments = parser.parse_args()

    set_seed(0)
    state = PartialState()
    train_set, val_set = load_data()
    # Every process reads the same batches; those of rank 0 count.
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train_set, arguments.batch_size, shuffle=True, generator=order)
    model = Digits()
    pipeline = PipelineParallel(
        model,
        nn.functional.cross_entropy,
        example_args=(torch.zeros(arguments.batch_size // 4, 64),),
        no_split_module_classes=["Block"],
        num_microbatches=4,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for epoch in range(arguments.max_epochs):
        for x, y in loader:
            loss = pipeline.step(x, target=y)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        state.print(f"epoch {epoch}  loss {loss:.4f}")

    folder = arguments.project_dir / "model"
    pipeline.save_model(folder)
    if state.is_main_process:
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():  # one file a process
            names = set(json.loads(index.read_text())["weight_map"].values())
        whole = Digits()
        whole.load_state_dict({k: v for n in names for k, v in load_file(folder / n).items()})
        images, labels = next(iter(DataLoader(val_set, len(val_set))))
        with torch.no_grad():
            accuracy = (whole(images).argmax(-1) == labels).float().mean()
        print(f"files       {' '.join(sorted(names))}\naccuracy    {accuracy:.4f}")


if __name__ == "__main__":
    main()
