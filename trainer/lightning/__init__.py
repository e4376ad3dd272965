"""Lightning's names: a program moves in with ``import trainer.lightning as L``.

Everything here is translated into Cadence's own classes. What does not carry over raises an error
that says what to use.
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
