"""A flag that any process can set, and that all processes then see."""

from __future__ import annotations

import torch

from trainer.distributed.collectives import reduce
from trainer.state import PartialState


class Trigger:
    """A distributed flag: one process sets it, for example to leave the loop, and all see it.

    The processes see it when all of them call `check`.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set the flag on this process."""
        self._is_set = True

    def check(self) -> bool:
        """Return whether any process has set the flag since the last check, and reset the flag.

        It is a collective: every process must call it.
        """
        votes = torch.tensor(int(self._is_set), device=PartialState().device)
        self._is_set = False
        return bool(reduce(votes).item())
