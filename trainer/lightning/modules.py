"""Makes the modules of Lightning that have no file here importable below `trainer.lightning`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PREFIX = "trainer.lightning."
_MODULES = {
    "pytorch.callbacks": """
        batch_size_finder callback device_stats_monitor early_stopping finetuning lambda_function
        gradient_accumulation_scheduler lr_finder lr_monitor model_checkpoint model_summary
        on_exception_checkpoint prediction_writer progress progress.progress_bar
        progress.rich_progress progress.tqdm_progress pruning rich_model_summary
        stochastic_weight_avg throughput_monitor timer weight_averaging""",
    "pytorch.loggers": "comet csv_logs logger mlflow tensorboard wandb",
    "pytorch.profilers": "pytorch simple",
    "pytorch.strategies": "ddp deepspeed fsdp single_device strategy",
    "pytorch.utilities": "exceptions grads seed",
}
_PARENTS = {
    f"{parent}.{name}": parent for parent, names in _MODULES.items() for name in names.split()
}
"""Module of Lightning that has no file here: the one that has its names."""


class Modules(MetaPathFinder, Loader):
    """Finds and makes the modules that have no file; each looks its names up in another."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of such a module."""
        name = fullname.removeprefix(_PREFIX)
        if name == fullname or name not in _PARENTS:
            return None
        package = any(each.startswith(f"{name}.") for each in _PARENTS)
        return ModuleSpec(fullname, self, is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        """Make the module look its names up."""
        name = module.__name__.removeprefix(_PREFIX)
        parent = import_module(_PREFIX + _PARENTS[name])
        module.__getattr__ = partial(getattr, parent)  # type: ignore[method-assign]  # PEP 562


def install_modules() -> None:
    """Make the modules importable."""
    if any(isinstance(finder, Modules) for finder in sys.meta_path):
        return
    sys.meta_path.append(Modules())
    for name in _MODULES:  # to Python, only a module with a path has others below it
        module = import_module(_PREFIX + name)
        if not hasattr(module, "__path__"):
            module.__path__ = []
