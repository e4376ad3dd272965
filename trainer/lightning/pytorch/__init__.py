"""The names of ``lightning.pytorch``; see `trainer.lightning`."""

from callbacks import Callback
from trainer.lightning.missing import getter
from trainer.lightning.pytorch import (
    callbacks,
    demos,
    loggers,
    profilers,
    strategies,
    tuner,
    utilities,
)
from trainer.lightning.pytorch.module import LightningDataModule, LightningModule
from trainer.lightning.pytorch.trainer import Trainer
from trainer.lightning.pytorch.utilities import seed_everything

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "callbacks",
    "cli_lightning_logo",
    "demos",
    "loggers",
    "profilers",
    "seed_everything",
    "strategies",
    "tuner",
    "utilities",
]

__version__ = "2.6.6"
"""The version of Lightning whose names these are."""


def cli_lightning_logo() -> None:
    """Do nothing; Lightning's examples print a logo here."""


__getattr__ = getter(__name__)
