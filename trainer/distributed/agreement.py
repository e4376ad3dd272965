"""Joint decisions that cost no round trip of their own.

What every process must know alike at each update (how many items the window had, whether anybody
wants to stop or to save or could not, rank 0's clock, whose data have ended) is a vector of a few
numbers. Its sum over the processes rides with the gradient reduction and is read once it has
reached the host: at once on the CPU, one update later on an accelerator, where reading earlier
would make the host wait.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

FIELDS = 8


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the processes.

    Attributes:
        items: Items of the window.
        stop_votes: How many processes want to stop.
        signals: How many were told to end, by a signal or the clock.
        seconds: Rank 0's clock.
        ended: How many processes have no further round in this epoch.
        witness: 1 from rank 0 alone; another sum says that nothing was reduced.
        failed_saves: How many know of a save in the background that failed.
        asked_saves: Saves that were asked for in the window.
    """

    items: float
    stop_votes: float
    signals: float
    seconds: float
    ended: float
    witness: float
    failed_saves: float = 0.0
    asked_saves: float = 0.0


class Agreement:
    """The ballots of one process and the tallies of all.

    Args:
        device: Where the sums are formed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: Tensor | None = None
        self._pending: tuple[Tensor, Any] | None = None
        self.items_seen = 0.0
        self.latest = Tally(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)

    def count_alone(self, tally: Tally) -> None:
        """The tally of a process that has no peers: its own ballot."""
        self.latest = tally
        self.items_seen += tally.items

    def ballot(self, own: Tally) -> Tensor:
        """This process's numbers, on the device."""
        return torch.tensor(astuple(own), dtype=torch.float64).to(self._device, non_blocking=True)

    def count(self, total: Tensor) -> None:
        """Take the sums over all processes; `latest` has them now, or after the next update."""
        if self._device.type == "cpu":
            self._take(total)
            return
        self.settle()
        if self._host is None:
            self._host = torch.empty(FIELDS, dtype=torch.float64, pin_memory=True)
        self._host.copy_(total, non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._pending = (self._host, event)

    def settle(self) -> None:
        """Wait for sums that are still on their way; before saving, for example."""
        if self._pending is not None:
            host, event = self._pending
            self._pending = None
            event.synchronize()
            self._take(host)

    def _take(self, total: Tensor) -> None:
        self.count_alone(Tally(*total.tolist()))
