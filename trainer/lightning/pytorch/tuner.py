"""Lightning's Tuner."""

from trainer.lightning.missing import getter
from trainer.tuning import Tuner

__all__ = ["Tuner"]

__getattr__ = getter(__name__)
