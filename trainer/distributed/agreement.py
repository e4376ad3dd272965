"""Joint decisions that cost no round trip of their own.

What every process must know alike at each update (how many items the window had, whether anybody
wants to stop or to save or could not, rank 0's clock, whose data have ended) is a vector of a few
numbers. Its sum over the processes rides with the gradient reduction and is read once it has
reached the host: at once on the CPU, one update later on an accelerator, where reading earlier
would make the host wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tally(NamedTuple):
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
        bad_losses: How many had a loss in it that is NaN or infinite; of one process, a tensor of
            shape () where it is on an accelerator.
    """

    items: float
    stop_votes: float
    signals: float
    seconds: float
    ended: float
    witness: float
    failed_saves: float = 0.0
    asked_saves: float = 0.0
    bad_losses: float | Tensor = 0.0


FIELDS = len(Tally._fields)


class Agreement:
    """The ballots of one process and the tallies of all.

    Args:
        device: Where the sums are formed.

    Attributes:
        items_seen: Items of the run, over all processes.
        latest: The sums that are known.
        bad_losses: That sum of the very latest window; on an accelerator it is not read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: Tensor | None = None
        self._pending: tuple[Tensor, Any] | None = None
        self.items_seen = 0.0
        self.bad_losses: float | Tensor = 0.0
        self.latest = Tally(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)

    def count_alone(self, tally: Tally) -> None:
        """The tally of a process that has no peers: its own ballot."""
        self.bad_losses = tally.bad_losses
        self._keep(tally)

    def _keep(self, tally: Tally) -> None:
        self.latest = tally
        self.items_seen += tally.items

    def ballot(self, own: Tally) -> Tensor:
        """This process's numbers, on the device."""
        *numbers, bad = own
        known = 0.0 if isinstance(bad, Tensor) else bad
        ballot = torch.tensor([*numbers, known], dtype=torch.float64)
        ballot = ballot.to(self._device, non_blocking=True)
        if isinstance(bad, Tensor):
            ballot[-1] = bad
        return ballot

    def count(self, total: Tensor) -> None:
        """Take the sums over all processes; `latest` has them now, or after the next update."""
        if self._device.type == "cpu":
            self._take(total)
            self.bad_losses = self.latest.bad_losses
            return
        self.bad_losses = total[-1]
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
        self._keep(Tally(*total.tolist()))
