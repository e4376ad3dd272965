"""The shape of accelerate's complete_cv_example: numbered saves, a logger, files of weights."""

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration, gather_object
from accelerate.utils.random import set_seed
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def data(size, seed):
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 6, 6, generator=draw)
    return TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())


def main(folder):
    if accelerate.__version__ < "1.0":
        raise RuntimeError("This program needs accelerate 1.0 or later.")
    accelerator = accelerate.Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    logger.info(accelerator.state, main_process_only=True)
    set_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 2),
    )
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    train = DataLoader(data(40, 0), 5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, epochs=4, steps_per_epoch=len(train)
    )
    evaluate = DataLoader(data(13, 1), 5)
    model, optimizer, train, evaluate, schedule = accelerator.prepare(
        model, optimizer, train, evaluate, schedule
    )
    losses, metrics = [], []
    for _ in range(2):
        model.train()
        for images, labels in train:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_state()
        model.eval()
        outcomes = []
        for images, labels in evaluate:
            with torch.inference_mode():
                guesses = model(images).argmax(-1)
            outcomes += accelerator.gather_for_metrics((guesses == labels).int()).tolist()
        metrics.append(outcomes)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, f"{folder}/exported")
    whole = accelerator.unwrap_model(model)
    return {
        "losses": losses,
        "metrics": metrics,
        "objects": gather_object([f"rank {PartialState().process_index}"]),
        "weights": {name: value.tolist() for name, value in whole.state_dict().items()},
    }
