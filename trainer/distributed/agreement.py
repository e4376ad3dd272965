"""Joint decisions that cost no round trip of their own.

What every process must know alike at each update (how many items the window had, whether anybody
wants to stop or to save or could not, rank 0's clock, whose data have ended) is a vector of a few
numbers. Its sum over the processes rides with the gradient reduction and is read once it has
reached the host: at once on the CPU, one update later on an accelerator, where reading earlier
would make the host wait.

DDP reduces tensors of one type together, so a vector in float32 costs no reduction of its own
beside float32 gradients. Its sums are exact all the same: items travel as the digits of a whole
number in base 256, and what is read is rounded. DDP multiplies what a process gives by 1/W, for W
processes, so that it is multiplied by W first. With u = 2**-24, the unit roundoff of float32, a
digit x < 2**8 becomes x(1 + d), where |d| <= 2u from rounding 1/W and the product; W such
summands, added in any order, are off by (W - 1)u times their sum at most (Higham, "Accuracy and
Stability of Numerical Algorithms", 4.2). Together that is below W(W + 1) * 2**-16, and 1/2 is what
rounding undoes: W <= 180. Where W is a power of two nothing is rounded at all, as long as sums are
below 2**24. For others the numbers are float64, as they are where items need not be whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_DIGITS = 6  # of 8 bits: more items than any window has


class Tally(NamedTuple):
    """Sums over the processes.

    Attributes:
        items: Items of the window.
        stop_votes: How many processes want to stop.
        signals: How many were told to end, by a signal or the clock.
        seconds: Rank 0's clock; to 0.06 s after 12 days where it came in float32.
        ended: How many have no further batch in this epoch; see `trainer.loops.run.FitRun`.
        ended_ranks: The sum of their ranks: where it is one alone, which.
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
    failed_saves: float = 0.0
    asked_saves: float = 0.0
    ended_ranks: float = 0.0
    bad_losses: float | Tensor = 0.0


NOTHING = Tally(0.0, 0.0, 0.0, 0.0, 0.0)


def exact_in_float32(world_size: int) -> bool:
    """Whether digits come through DDP's averaging in float32 for so many processes; see above."""
    if world_size.bit_count() == 1:
        return world_size <= 2**16
    return world_size * (world_size + 1) < 2**15


class Agreement:
    """The ballots of one process and the tallies of all.

    Args:
        device: Where the sums are formed.
        whole_items: Items are whole numbers, not what the user counts.

    Attributes:
        items_seen: Items of the run, over all processes.
        latest: The sums that are known.
        bad_losses: That sum of the very latest window; on an accelerator it is not read.
    """

    def __init__(self, device: torch.device, *, whole_items: bool = False) -> None:
        self._device = device
        self._whole_items = whole_items
        self._places: Tensor | None = None  # what the digits are worth, on an accelerator
        self._host: Tensor | None = None
        self._pending: tuple[Tensor, Any] | None = None
        self.items_seen = 0.0
        self.bad_losses: float | Tensor = 0.0
        self.latest = NOTHING

    def count_alone(self, tally: Tally) -> None:
        """The tally of a process that has no peers: its own ballot."""
        self.bad_losses = tally.bad_losses
        self.latest = tally
        self.items_seen += tally.items

    def dtype_beside(self, parameters: Iterable[nn.Parameter], world_size: int) -> torch.dtype:
        """The type in which a ballot is exact and, if it can, shares a bucket with gradients."""
        types = {parameter.dtype for parameter in parameters}
        shares = torch.float32 in types and torch.float64 not in types
        exact = self._whole_items and exact_in_float32(world_size)
        return torch.float32 if shares and exact else torch.float64

    def ballot(self, own: Tally, dtype: torch.dtype = torch.float64, *, times: int = 1) -> Tensor:
        """This process's numbers, on the device.

        Args:
            own: The numbers.
            dtype: float32 has the items as digits, the lowest first.
            times: What each is multiplied by.
        """
        items, *others, bad = own
        first = int(items).to_bytes(_DIGITS, "little") if dtype == torch.float32 else [items]
        known = 0.0 if isinstance(bad, Tensor) else bad
        ballot = torch.tensor([times * n for n in (*first, *others, known)], dtype=dtype)
        if self._device.type != "cpu":
            ballot = ballot.to(self._device, non_blocking=True)
        if isinstance(bad, Tensor):
            ballot[-1] = bad * times
        return ballot

    def count(self, total: Tensor) -> float | Tensor:
        """Take the sums over all processes; `latest` has them now, or after the next update.

        Returns:
            The items; on an accelerator a tensor of shape () there, float64.
        """
        if self._device.type == "cpu":
            self._take(total)
            self.bad_losses = self.latest.bad_losses
            return self.latest.items
        self.settle()
        self._read_later(total)
        self.bad_losses = total[-1].round()
        if total.dtype == torch.float64:
            return total[0].round() if self._whole_items else total[0]
        if self._places is None:
            self._places = 256.0 ** torch.arange(_DIGITS, device=total.device).double()
        return total[:_DIGITS].round().double().dot(self._places)

    def _read_later(self, total: Tensor) -> None:
        if self._host is None or self._host.dtype != total.dtype:
            self._host = torch.empty_like(total, device="cpu", pin_memory=True)
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
        numbers = total.tolist()
        digits = _DIGITS if total.dtype == torch.float32 else 1
        items = numbers[0]
        if self._whole_items:
            items = 0.0
            for digit in reversed(numbers[:digits]):
                items = items * 256 + round(digit)
        stop_votes, signals, seconds, *others = numbers[digits:]
        self.latest = Tally(items, round(stop_votes), round(signals), seconds, *map(round, others))
        self.items_seen += items
