"""A flag that any process can set and all processes see."""

from __future__ import annotations

import torch

from trainer.distributed.collectives import reduce
from trainer.state import PartialState


class Trigger:
    """Lets one process tell all others to do something, such as leaving the loop.

    The others see it when all processes call `check`.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set it on this process."""
        self._is_set = True

    def check(self) -> bool:
        """Return whether any process has set it since the last check, and reset it; collective."""
        votes = torch.tensor(int(self._is_set), device=PartialState().device)
        self._is_set = False
        return bool(reduce(votes).item())
