"""A loop of plain PyTorch, under the names that a program for Lightning imports.

Its Trainer runs one `fit` and raises `Trained`: callbacks of the program are called, those of the
library, which have no part in the numbers, are not.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import trainer.lightning as moved
from trainer.lightning import Callback, LightningDataModule, seed_everything

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]


class Trained(Exception):
    """The training is over; the arguments are the module and the logged values by name."""


class LightningModule(moved.LightningModule):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.trainer.log(name, value, **kwargs)

    def log_dict(self, values: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.trainer.log(name, value, **kwargs)


class Trainer:
    def __init__(self, **given: Any) -> None:
        callbacks = given.get("callbacks") or []
        self.given = given
        self.max_epochs, self.max_steps = given.get("max_epochs"), given.get("max_steps")
        self.callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        self.logger = given["logger"]
        self.default_root_dir = given["default_root_dir"]
        self.limit_train_batches = given.get("limit_train_batches")
        self.global_step = self.current_epoch = 0
        self.world_size, self.fast_dev_run, self.sanity_checking = 1, False, False
        self.training = self.validating = self.testing = False
        self.values: dict[str, list[float]] = {}
        self.sums: dict[str, Any] = {}  # of an epoch: (sum, weight), or a metric object
        self.scope = ""
        self.suffix = ""

    @property
    def loggers(self) -> list[Any]:
        return self.logger if isinstance(self.logger, list) else [self.logger]

    @property
    def num_val_batches(self) -> list[int]:
        return [len(loader) for loader in self.val]

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_epochs * self.updates(self.max_batches)

    def updates(self, batches: int) -> int:
        return batches // self.window

    @property
    def window(self) -> int:
        """Batches of an update in this epoch."""
        size = self.given.get("accumulate_grad_batches", 1)
        for callback in self.callbacks:
            for at, steps in getattr(callback, "scheduling", {}).items():
                size = steps if self.current_epoch >= at else size
        return size

    # -- what the module asks for ------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        on_step = self.scope == "training_step" if on_step is None else on_step
        on_epoch = not (on_step and self.training) if on_epoch is None else on_epoch
        both = on_step and on_epoch
        value = value.detach() if torch.is_tensor(value) else value
        if on_step and self.training:
            step = value._forward_cache if hasattr(value, "compute") else value
            key = f"{name}_step" if both else name
            self.values.setdefault(key, []).append(float(step))
        if on_epoch:
            key = (f"{name}_epoch" if both else name) + self.suffix
            if hasattr(value, "compute"):
                self.sums[key] = value
            else:
                leaves = [leaf for leaf in tree_leaves(self.batch) if torch.is_tensor(leaf)]
                weight = batch_size or (leaves[0].shape[0] if leaves[0].ndim else 1)
                total, weights = self.sums.get(key, (0.0, 0))
                self.sums[key] = total + float(value) * weight, weights + weight

    def record(self) -> None:
        """End the epoch of all values that were logged in it."""
        for name, kept in self.sums.items():
            if isinstance(kept, tuple):
                value = kept[0] / kept[1]
            else:
                value = float(kept.compute())
                kept.reset()
            self.values.setdefault(name, []).append(value)
        self.sums = {}

    def manual_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_gradients(self, optimizer: Any, max_grad_norm: float, max_grad_value: None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)

    def add_param_group(self, optimizer: Any, parameters: dict[str, Any], ratio: float) -> None:
        rate = optimizer.param_groups[0]["lr"] * ratio
        optimizer.add_param_group({"params": list(parameters.values()), "lr": rate})

    # -- the loop ----------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of the program's own callbacks."""
        for callback in self.callbacks:
            own = type(callback).__module__.partition(".")[0] not in ("callbacks", "trainer")
            if own and hasattr(callback, name):
                getattr(callback, name)(self, self.model, *args)

    def optimize(self, configured: Any) -> None:
        """Take what `configure_optimizers` has returned."""
        schedules: list[Any] = []
        if isinstance(configured, dict):
            optimizers = [configured["optimizer"]]
            schedules = [configured["lr_scheduler"]] if "lr_scheduler" in configured else []
        elif isinstance(configured, tuple) and isinstance(configured[0], list):
            optimizers, schedules = configured
        else:
            optimizers = configured if isinstance(configured, (list, tuple)) else [configured]
        self.optimizers = list(optimizers)
        self.schedulers = [
            SimpleNamespace(**{"interval": "epoch", "monitor": None, **each})
            if isinstance(each, dict)
            else SimpleNamespace(scheduler=each, interval="epoch", monitor=None)
            for each in schedules
        ]

    def tick(self, interval: str) -> None:
        for each in self.schedulers:
            if each.interval == interval and self.model.automatic_optimization:
                metric = each.monitor and self.values[each.monitor][-1]
                self.model.lr_scheduler_step(each.scheduler, metric)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: None = None,
    ) -> None:
        if isinstance(train_dataloaders, LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        self.model, self.datamodule = model, datamodule
        vars(model)["_trainer"] = self
        self.call("setup", "fit")
        if datamodule is not None:
            datamodule.trainer = self
            datamodule.prepare_data()
            datamodule.setup("fit")
        model.setup("fit")
        source = datamodule or model
        train = train_dataloaders or source.train_dataloader()
        val = val_dataloaders or source.val_dataloader()
        self.val = [val] if isinstance(val, DataLoader) else val or []
        sized = hasattr(train.dataset, "__len__")
        self.max_batches = self.limit_train_batches or (len(train) if sized else None)
        self.optimize(model.configure_optimizers())
        self.call("on_fit_start")
        model.on_fit_start()
        model.train()
        model.on_train_start()
        while not self.over():
            self.epoch(train)
            self.current_epoch += 1
        raise Trained(model, self.values)

    def over(self) -> bool:
        if self.max_steps is not None:
            return self.global_step == self.max_steps
        return self.current_epoch == self.max_epochs

    def epoch(self, train: DataLoader[Any]) -> None:
        self.training = True
        self.call("on_train_epoch_start")
        interval = self.given.get("val_check_interval", 1.0)
        window = self.window
        for index, batch in enumerate(train):
            if index == self.max_batches:
                break
            self.batch, self.scope = batch, "training_step"
            takes = len(inspect.signature(self.model.training_step).parameters)
            outputs = self.model.training_step(*(batch, index)[:takes])
            outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
            if not self.model.automatic_optimization:
                self.global_step += 1
            else:
                (outputs["loss"] / window).backward()
                if (index + 1) % window == 0:
                    self.update(index, outputs["loss"].detach())
            outputs = {name: value for name, value in outputs.items() if value is not None}
            if window > 1:
                outputs["loss"] = outputs["loss"] / window
            self.model.on_train_batch_end(outputs, batch, index)
            self.call("on_train_batch_end", outputs, batch, index)
            if interval < 1 and (index + 1) % int(self.max_batches * interval) == 0:
                self.validate_all()
        if interval == 1:
            self.validate_all()
        self.scope = "on_train_epoch_end"
        self.model.on_train_epoch_end()
        self.record()
        self.call("on_train_epoch_end")
        self.tick("epoch")

    def update(self, index: int, loss: torch.Tensor) -> None:
        (optimizer,) = self.optimizers
        self.model.on_before_optimizer_step(optimizer)
        if limit := self.given.get("gradient_clip_val"):
            self.clip_gradients(optimizer, limit, None)
        self.model.optimizer_step(self.current_epoch, index, optimizer, lambda: loss)
        self.global_step += 1
        self.tick("step")
        optimizer.zero_grad()

    @torch.no_grad()
    def validate_all(self) -> None:
        if not self.val:
            return
        of_training, self.sums = self.sums, {}
        self.model.eval()
        self.training, self.validating, self.scope = False, True, "validation_step"
        for number, loader in enumerate(self.val):
            several = len(self.val) > 1
            self.suffix = f"/dataloader_idx_{number}" if several else ""
            for index, batch in enumerate(loader):
                self.batch = batch
                outputs = self.model.validation_step(batch, index, *[number] * several)
                self.call("on_validation_batch_end", outputs, batch, index)
        self.suffix = ""
        self.model.on_validation_epoch_end()
        self.record()
        self.model.train()
        self.training, self.validating, self.sums = True, False, of_training
