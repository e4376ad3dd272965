"""Attributes of Lightning's Trainer and of its module, and methods of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

NO_LOGGER = (
    "trackers run on their own threads, so that none can slow or stop the training. Log values "
    "with self.log; name trackers in Trainer(log_with=...), and use trainer.trackers for images "
    "and tables"
)
_LOOK_UP = "look it up in trainer.callbacks"
_LOADER = "keep the loader where you create it; see trainer.datamodule, and trainer.{} for lengths"
_STAGE = (
    "steps and hooks are named after the stage, setup receives it, and trainer.training is true "
    "outside the validations of a fit"
)
_ARGUMENT = "it is an argument only, so keep the value yourself"
_TRAINER_ATTRIBUTES = {
    **dict.fromkeys(
        (
            "check_val_every_n_epoch",
            "gradient_clip_algorithm",
            "gradient_clip_val",
            "limit_predict_batches",
            "limit_test_batches",
            "limit_train_batches",
            "limit_val_batches",
            "log_every_n_steps",
            "min_epochs",
            "min_steps",
            "num_sanity_val_steps",
            "overfit_batches",
            "reload_dataloaders_every_n_epochs",
            "val_check_interval",
        ),
        _ARGUMENT,
    ),
    "accumulate_grad_batches": "use trainer.gradient_accumulation_steps",
    "checkpoint_callback": _LOOK_UP,
    "checkpoint_callbacks": _LOOK_UP,
    "current_step": "use trainer.global_step",
    "default_root_dir": "use trainer.project_dir",
    "early_stopping_callback": _LOOK_UP,
    "early_stopping_callbacks": _LOOK_UP,
    "evaluate": "use trainer.validate(module, loader)",
    "evaluating": _STAGE,
    "fit_loop": "for a longer run create another Trainer, and resume with ckpt_path",
    "interrupted": "a callback's on_preemption is called",
    "is_last_batch": "step schedules in on_train_epoch_end; inside training_step the last batch of "
    "an epoch is that of batch_idx + 1 == trainer.num_training_batches",
    "lightning_module": "use trainer.module",
    "log_dir": "use trainer.logs_dir",
    "logger": NO_LOGGER,
    "loggers": NO_LOGGER,
    "lr_scheduler_configs": "use trainer.schedulers",
    "lr_schedulers": "use trainer.schedulers",
    "model": "use trainer.module",
    "num_devices": "use trainer.world_size",
    "num_predict_batches": "use trainer.num_eval_batches",
    "num_sanity_val_batches": "use trainer.num_eval_batches",
    "num_test_batches": "use trainer.num_eval_batches",
    "num_val_batches": "use trainer.num_eval_batches",
    "precision": "use mixed_precision of trainer.accelerator",
    "predict_dataloaders": _LOADER.format("num_eval_batches"),
    "predicting": _STAGE,
    "print": "use print of trainer.accelerator",
    "progress_bar_callback": _LOOK_UP,
    "received_sigterm": "a callback's on_preemption is called",
    "save_model": "call your model's save_pretrained; a checkpoint has a model.safetensors too",
    "scaler": "use scaler of trainer.accelerator",
    "state": _STAGE,
    "strategy": "use trainer.accelerator",
    "test_dataloaders": _LOADER.format("num_eval_batches"),
    "testing": _STAGE,
    "train": "use trainer.fit(module, loader)",
    "train_dataloader": _LOADER.format("num_training_batches"),
    "val_dataloaders": _LOADER.format("num_eval_batches"),
    "validating": _STAGE,
}


def trainer_attribute_hint(name: str) -> str:
    """What an error says about an attribute that the Trainer does not have."""
    hint = _TRAINER_ATTRIBUTES.get(name)
    return f"Trainer has no attribute {name!r}" + (f": {hint}." if hint else ".")


def check_settable(name: str, arguments: Iterable[str]) -> None:
    """Raise an error if the Trainer would not look at an attribute that somebody sets.

    Args:
        name: The attribute.
        arguments: The Trainer's, which are looked at when it is made.

    Raises:
        AttributeError: It is one of them, or an attribute that Lightning's Trainer has.
    """
    if name in _TRAINER_ATTRIBUTES:
        raise AttributeError(f"{trainer_attribute_hint(name)[:-1]}; setting it has no effect.")
    if name in arguments and name not in ("accelerator", "callbacks"):
        raise AttributeError(
            f"Trainer.{name} cannot be set later: pass it to Trainer({name}=...) when it is made."
        )


class NoLogger:
    """In place of the loggers of a LightningModule: an error as soon as it is used as one."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A module's logger has no {name!r}: {NO_LOGGER}.")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"A module has no loggers: {NO_LOGGER}.")


class TypeOfParameters:
    """The `dtype` of a module: of its first parameter or buffer that is no integer.

    Without any it is torch's default. A module may set an attribute of this name to something else.
    """

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is None:
            return self
        found = (tensor.dtype for tensor in chain(instance.parameters(), instance.buffers()))
        others = (dtype for dtype in found if dtype.is_floating_point or dtype.is_complex)
        return next(others, torch.get_default_dtype())
