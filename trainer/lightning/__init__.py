"""Lightning's names, for programs that migrate with ``import trainer.lightning as L``.

All classes here are Cadence's own with translated arguments. Unsupported names and arguments raise
an error with the replacement.
"""

from trainer.lightning import pytorch
from trainer.lightning.checkpoint import convert_checkpoint
from trainer.lightning.entering import enter_as
from trainer.lightning.missing import getter
from trainer.lightning.modules import install
from trainer.lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    __version__,
    seed_everything,
)

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "convert_checkpoint",
    "enter_as",
    "pytorch",
    "seed_everything",
]

__getattr__ = getter(__name__)
install()
