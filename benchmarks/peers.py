"""The same training with other trainers, written as in their documentation.

Defaults that do more than the other trainers (clip gradients, save during training) are switched
off, so that all do the same work.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another trainer.

    Attributes:
        name: Its name in the table.
        train: Trains a task to its end.
        needs: The packages that must be installed.
    """

    name: str
    train: Callable[[Any], None]
    needs: tuple[str, ...]


@contextmanager
def _folder() -> Any:
    """Yield a folder for their files; their warnings, not actionable here, are ignored."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield folder


def accelerate(task: Any) -> None:
    """Train with the loop of Accelerate's documentation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(True)  # each turn begins like a new process
    accelerator = Accelerator(
        cpu=task.device == "cpu",
        mixed_precision=task.precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=task.device != "cpu"),
    )
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer(), task.whole)
    model.train()
    for batch in loader:
        with accelerator.autocast():
            loss = task.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def fabric(task: Any) -> None:
    """Train with the loop of Lightning Fabric's documentation."""
    from lightning.fabric import Fabric

    with _folder():
        lightning_fabric = Fabric(
            accelerator=task.device, devices=1, precision=_lightning_precision(task)
        )
        model, optimizer = lightning_fabric.setup(task.model, task.optimizer())
        loader = lightning_fabric.setup_dataloaders(task.whole)
        model.train()
        for batch in loader:
            loss = task.loss(model, batch)
            lightning_fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def _lightning_precision(task: Any) -> str:
    return "bf16-mixed" if task.precision == "bf16" else "32-true"


def lightning(task: Any, *, logs: bool = False, **settings: Any) -> None:
    """Train with Lightning's `Trainer`.

    Args:
        task: The task to train.
        logs: Log the loss in each step, and show it in the progress bar.
        **settings: Arguments of its `Trainer`.
    """
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = task.loss(self.model, batch)
            if logs:
                self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return task.optimizer()

    with _folder() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator=task.device,
            devices=1,
            precision=_lightning_precision(task),
            default_root_dir=folder,
            **settings,
        )
        trainer.fit(Module(), task.whole)


def transformers(task: Any) -> None:
    """Train with the `Trainer` of Hugging Face transformers."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    class Ours(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(task.whole)  # the same batches as all others

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return task.loss(model, inputs)

    AcceleratorState._reset_state(True)
    with _folder() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            use_cpu=task.device == "cpu",
            bf16=task.precision == "bf16",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
        )
        Ours(
            model=task.model,
            args=arguments,
            train_dataset=task.dataset,
            optimizers=(task.optimizer(), None),
        ).train()


def ignite(task: Any) -> None:
    """Train with Ignite's supervised trainer."""
    import torch
    from ignite.engine import create_supervised_trainer

    engine = create_supervised_trainer(
        task.model, task.optimizer(), torch.nn.functional.cross_entropy, device=task.device
    )
    engine.run(task.whole, max_epochs=1)


PEERS = (
    Peer(name="Ignite", train=ignite, needs=("ignite",)),
    Peer(name="Lightning Fabric", train=fabric, needs=("lightning",)),
    Peer(name="Accelerate", train=accelerate, needs=("accelerate",)),
    Peer(name="Hugging Face Trainer", train=transformers, needs=("transformers", "accelerate")),
    Peer(
        name="Lightning, barebones",
        train=partial(lightning, barebones=True),
        needs=("lightning",),
    ),
    Peer(name="Lightning, defaults", train=lightning, needs=("lightning",)),
    Peer(
        name="Lightning, defaults and log",
        train=partial(lightning, logs=True),
        needs=("lightning",),
    ),
)
