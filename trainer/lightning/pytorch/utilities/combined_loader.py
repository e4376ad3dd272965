"""Several loaders read together."""

from trainer.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
