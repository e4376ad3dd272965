"""The names of ``lightning.pytorch.utilities``."""

from trainer.data.combined import CombinedLoader
from trainer.lightning.missing import getter
from trainer.lightning.pytorch.utilities import combined_loader, rank_zero, types
from trainer.lightning.pytorch.utilities.rank_zero import (
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainer.rng import set_seed

__all__ = [
    "CombinedLoader",
    "combined_loader",
    "rank_zero",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
    "types",
]

__getattr__ = getter(__name__)


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed Python, numpy and torch.

    Args:
        seed: The seed; None is 0.
        workers: Has no effect: workers are always seeded, by the batch.
        verbose: Has no effect.

    Returns:
        The seed.
    """
    seed = 0 if seed is None else int(seed)
    set_seed(seed)
    return seed
