"""Makes Lightning modules without a file here importable below `trainer.lightning`."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from typing import Any

from trainer.lightning.missing import refusal
from trainer.migration.modules import ModuleFinder

_PREFIX = "trainer.lightning."
_MODULES = {
    "pytorch": "core core.datamodule core.module",
    "pytorch.callbacks": """
        batch_size_finder callback device_stats_monitor early_stopping finetuning lambda_function
        gradient_accumulation_scheduler lr_finder lr_monitor model_checkpoint model_summary
        on_exception_checkpoint prediction_writer progress progress.progress_bar
        progress.rich_progress progress.tqdm_progress pruning rich_model_summary
        stochastic_weight_avg throughput_monitor timer weight_averaging""",
    "pytorch.demos": "boring_classes lstm mnist_datamodule transformer",
    "pytorch.loggers": "comet csv_logs logger mlflow tensorboard wandb",
    "pytorch.profilers": "pytorch simple",
    "pytorch.strategies": "ddp deepspeed fsdp single_device strategy",
    "pytorch.trainer": "states trainer",
    "pytorch.tuner": "tuning",
    "pytorch.utilities": "exceptions grads imports model_helpers parsing seed",
    "pytorch.utilities.model_summary": "model_summary",
}
_PARENTS = {
    f"{parent}.{name}": parent for parent, names in _MODULES.items() for name in names.split()
} | {
    "pytorch.core.mixins": "pytorch.module",
    "pytorch.core.mixins.hparams_mixin": "pytorch.module",
    "pytorch.core.optimizer": "pytorch.module",
    "fabric": "",
    "fabric.utilities": "pytorch.utilities",
    "fabric.utilities.exceptions": "pytorch.utilities",
    "fabric.utilities.imports": "pytorch.utilities",
    "fabric.utilities.rank_zero": "pytorch.utilities.rank_zero",
    "fabric.utilities.seed": "pytorch.utilities",
    "fabric.utilities.types": "pytorch.utilities.types",
}
"""Module of Lightning that has no file here: the one that has its names."""


CLASS_PATH = re.compile(
    r"(?<![\w./-])(?:(?:trainer\.)?lightning\.pytorch|pytorch_lightning)((?:\.\w+)*\.[A-Z]\w*)(?![\w./-])"
)
"""A class of Lightning in a configuration file."""


def with_class_paths(text: str) -> str:
    """Return the text of a configuration file with Lightning's class paths replaced by ours."""
    return CLASS_PATH.sub(r"trainer.lightning.pytorch\1", text)


def _value_in(parent: str, name: str) -> Any:
    return getattr(import_module((_PREFIX + parent).rstrip(".")), name)


def _refusal(name: str) -> str | None:
    """Return the message for a module; None for a capitalised name, left to Python's own error."""
    return refusal(name) if name.islower() else None


def install() -> None:
    """Make the modules importable."""
    names = {name: partial(_value_in, parent) for name, parent in _PARENTS.items()}
    ModuleFinder("trainer.lightning", names, _refusal).install()
    for name in _MODULES:  # Python imports submodules only below a module with a path
        module = import_module(_PREFIX + name)
        if not hasattr(module, "__path__"):
            module.__path__ = []
    import_module(f"{_PREFIX}fabric.utilities.seed")  # programs use L.fabric without importing it
