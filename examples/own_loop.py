"""Train on the digits in a custom loop, with `Accelerator` alone.

Run it as it is, or with ``torchrun --nproc-per-node 2 examples/own_loop.py``. The accuracy is exact
on any number of processes: each validation sample counts once.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer import Accelerator, set_seed


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return the share of correctly classified samples, over all processes."""
    model.eval()
    counts = torch.zeros(2, device=accelerator.device)
    for x, y in loader:
        correct = (model(x).argmax(-1) == y).sum()
        counts += torch.stack([correct, correct.new_tensor(len(y))])
    correct, total = accelerator.reduce(counts, "sum").tolist()
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per update")
    arguments = parser.parse_args()

    set_seed(0)
    # The schedule advances once per update, on any number of processes.
    accelerator = Accelerator(
        gradient_accumulation_steps=arguments.accumulation, scheduler_tick="update"
    )
    train_set, val_set = load_data()
    train_loader = DataLoader(
        train_set, batch_size=arguments.batch_size, shuffle=True, drop_last=True
    )
    val_loader = DataLoader(val_set, batch_size=64)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    updates = -(-len(train_loader) // arguments.accumulation) * arguments.max_epochs
    scheduler = accelerator.prepare(
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    )
    # Training needs equally many batches per process; evaluation must not repeat samples for it.
    accelerator.dataloader_config.even_batches = False
    val_loader = accelerator.prepare(val_loader)

    for epoch in range(arguments.max_epochs):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}  accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
