"""Lightning's Tuner."""

from trainer.tuning import Tuner

__all__ = ["Tuner"]
