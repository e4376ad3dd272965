"""Joint decisions without a round trip of their own.

What all processes must agree on at each update (the items of the window, whether any process wants
to stop or save or failed to, rank 0's clock, whose data have ended) is a vector of a few numbers.
Its sum over the processes travels with the gradient reduction and is read once it has reached the
host: immediately on the CPU, one update later on an accelerator, where reading it earlier would
make the host wait.

DDP reduces tensors of one dtype together, so a float32 vector needs no all-reduce of its own beside
float32 gradients. Its sums are exact nevertheless: item counts travel as base-256 digits, and the
result is rounded. DDP multiplies each contribution by 1/W, for W processes, so contributions are
multiplied by W beforehand. (Gradients that are exchanged are divided, which is exact.) With u =
2**-24, the unit roundoff of float32, a digit x < 2**8 becomes x(1 + d), where |d| <= 2u from
rounding 1/W and the product; the sum of W such terms, in any order, is off by at most (W - 1)u
times itself (Higham, "Accuracy and Stability of Numerical Algorithms", 4.2). The total error is
below W(W + 1) * 2**-16, and rounding corrects errors below 1/2: W <= 180. If W is a power of two
nothing is rounded, as long as sums stay below 2**24. Otherwise, and where items need not be whole
numbers, the vector is float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Of 8 bits each. With them the vector has 64 bytes, so that the gradients behind it in a bucket are
# aligned as they would be without it.
_DIGITS = 8


class Tally(NamedTuple):
    """Sums over the processes.

    Attributes:
        items: Items of the window.
        stop_votes: Processes that want to stop.
        signals: Processes that a signal or the time budget told to end.
        seconds: Rank 0's clock; in float32 accurate to 0.06 s after 12 days.
        ended: Processes without a further batch in this epoch; see `trainer.loops.run.FitRun`.
        ended_ranks: The sum of their ranks, which identifies a single one.
        failed_saves: Processes that know of a failed background save.
        asked_saves: Saves requested in the window.
        bad_losses: Processes with a NaN or infinite loss in the window; in one process's own tally
            a tensor of shape () if the loss is on an accelerator.
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
    """Return whether float32 digits survive DDP's averaging over so many processes; see above."""
    if world_size.bit_count() == 1:
        return world_size <= 2**16
    return world_size * (world_size + 1) < 2**15


class Agreement:
    """Makes the ballots of this process and keeps the tallies over all.

    Args:
        device: The device that sums them.
        whole_items: Items are whole numbers, not a user's own count.

    Attributes:
        items_seen: Items of the run, over all processes.
        latest: The latest sums that have reached the host.
        bad_losses: This sum for the current window; on an accelerator an unread tensor.
    """

    def __init__(self, device: torch.device, *, whole_items: bool = False) -> None:
        self._device = device
        self._whole_items = whole_items
        self._places: Tensor | None = None  # the weights of the digits, on an accelerator
        self._host: Tensor | None = None
        self._pending: tuple[Tensor, Any] | None = None
        self.items_seen = 0.0
        self.bad_losses: float | Tensor = 0.0
        self.latest = NOTHING

    def count_alone(self, tally: Tally) -> None:
        """Take the only process's own counts as the tally."""
        self.bad_losses = tally.bad_losses
        self.latest = tally
        self.items_seen += tally.items

    def dtype_beside(self, parameters: Iterable[nn.Parameter], world_size: int) -> torch.dtype:
        """Return a dtype in which a ballot is exact and, if possible, shares a bucket."""
        types = {parameter.dtype for parameter in parameters}
        shares = torch.float32 in types and torch.float64 not in types
        exact = self._whole_items and exact_in_float32(world_size)
        return torch.float32 if shares and exact else torch.float64

    def ballot(self, own: Tally, dtype: torch.dtype = torch.float64, *, times: int = 1) -> Tensor:
        """Return this process's counts as a vector on the device.

        Args:
            own: The counts.
            dtype: In float32 the items are base-256 digits, the lowest first.
            times: A factor for each number.
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
            The number of items; on an accelerator a float64 tensor of shape ().
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
        """Wait for sums still being copied to the host, before saving for example."""
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
