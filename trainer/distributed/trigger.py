"""A flag that any process sets and all see."""

from __future__ import annotations

import torch

from trainer.distributed.collectives import reduce
from trainer.state import PartialState


class Trigger:
    """Lets one process tell all others to do something, to leave the loop for example.

    It is seen when all processes look, not before.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set it on this process."""
        self._is_set = True

    def check(self) -> bool:
        """Whether any process has set it since the last look; resets it. Collective."""
        votes = torch.tensor(int(self._is_set), device=PartialState().device)
        self._is_set = False
        return bool(reduce(votes).item())
