"""Step sync: all processes share their step stats at each update, inside the gradient all-reduce.

The step stats are the few numbers on which all processes must agree at each update: the items of
the accumulation window, whether any process wants to stop or save or has failed to save, rank 0's
clock, and which processes have run out of data. They form the sync vector. Its sum over the
processes is computed by the same all-reduce as the gradients, so it needs no communication of its
own. The host reads the sum immediately on the CPU. On an accelerator it reads the sum one update
later, because an earlier read would make the host wait for the device.

DDP reduces tensors of one dtype together, so the sync vector is float32 if the gradients are. The
sums are exact nevertheless: an item count is sent as base-256 digits, and each sum is rounded. DDP
multiplies each contribution by 1/W, for W processes, so contributions are multiplied by W
beforehand. (The all-to-all exchange in `trainer.engines.exchange` divides, which is exact.)

Error bound: let u = 2**-24 be the unit roundoff of float32. A digit x < 2**8 becomes x(1 + d), with
|d| <= 2u from rounding 1/W and the product. The sum of W such terms, in any order, has a relative
error of at most (W - 1)u (Higham, "Accuracy and Stability of Numerical Algorithms", 4.2). The total
error is below W(W + 1) * 2**-16. Rounding corrects errors below 1/2, so W <= 180. If W is a power
of two, nothing is rounded as long as sums stay below 2**24. For any other W, and if items need not
be whole numbers, the sync vector is float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.distributed.transport import HostCopy

# The number of base-256 digits of an item count. With 7 digits, the float32 vector has 64 bytes, so
# the gradients behind it in a DDP bucket keep their alignment.
_DIGITS = 7


class StepStats(NamedTuple):
    """Step stats of one accumulation window, of one process or summed over all processes.

    Attributes:
        items: The number of items in the window.
        stop_votes: The number of processes that want to stop.
        signals: The number of processes that got a signal to exit or reached the time budget.
        seconds: Rank 0's clock, in seconds. In float32 it is accurate to 0.06 s after 12 days.
        ended: The number of processes without a further batch in this epoch; see
            `trainer.loops.state.FitRun`.
        failed_saves: The number of processes that know of a failed background save.
        requested_saves: The number of pending saves, requested in the window.
        ended_ranks: The sum of the ranks counted in `ended`; it identifies a single rank.
        epoch_votes: The number of processes where ``on_train_batch_start`` returned -1 in the
            window, which ends the epoch.
        bad_losses: The number of processes with a NaN or infinite loss in the window. In one
            process's own step stats it is a tensor of shape () if the loss is on an accelerator.
    """

    items: float
    stop_votes: float
    signals: float
    seconds: float
    ended: float
    failed_saves: float = 0.0
    requested_saves: float = 0.0
    ended_ranks: float = 0.0
    epoch_votes: float = 0.0
    bad_losses: float | Tensor = 0.0


NOTHING = StepStats(0.0, 0.0, 0.0, 0.0, 0.0)


def exact_in_float32(world_size: int) -> bool:
    """Return whether a float32 sync vector is exact with this many processes; see the module."""
    if world_size.bit_count() == 1:
        return world_size <= 2**16
    return world_size * (world_size + 1) < 2**15


class StepSync:
    """Step sync: creates this process's sync vectors and keeps the step stats of all processes.

    Args:
        device: The device on which sync vectors are summed.
        whole_items: Whether item counts are whole numbers; the user's own `count_items` may return
            others.

    Attributes:
        items_seen: The number of items so far in the run, over all processes.
        latest: The latest step stats, summed over the processes, that have reached the host.
        bad_losses: The number of processes with a bad loss in the current window; on an accelerator
            a tensor that has not been read.
    """

    def __init__(self, device: torch.device, *, whole_items: bool = False) -> None:
        self._device = device
        self._whole_items = whole_items
        self._digit_values: Tensor | None = None  # the powers of 256, on an accelerator
        self._pending: HostCopy | None = None
        self.items_seen = 0.0
        self.bad_losses: float | Tensor = 0.0
        self.latest = NOTHING

    def count_alone(self, stats: StepStats) -> None:
        """Record the step stats of a run with one process."""
        self.bad_losses = stats.bad_losses
        self.latest = stats
        self.items_seen += stats.items

    def state_dict(self) -> dict[str, float]:
        """Return the state from which a resumed run continues."""
        return {"items_seen": self.items_seen, "epoch_votes": self.latest.epoch_votes}

    def load_state_dict(self, state: Mapping[str, Any], seconds: float) -> None:
        """Restore a state; `seconds` is the training time so far."""
        self.items_seen = state["items_seen"]
        votes = state.get("epoch_votes", 0.0)  # missing in checkpoints of earlier releases
        self.latest = self.latest._replace(seconds=seconds, epoch_votes=votes)

    def dtype_beside(self, parameters: Iterable[nn.Parameter], world_size: int) -> torch.dtype:
        """Return the dtype of the sync vector: exact and, if possible, that of the gradients."""
        types = {parameter.dtype for parameter in parameters}
        shares = torch.float32 in types and torch.float64 not in types
        exact = self._whole_items and exact_in_float32(world_size)
        return torch.float32 if shares and exact else torch.float64

    def sync_vector(
        self, stats: StepStats, dtype: torch.dtype = torch.float64, *, times: int = 1
    ) -> Tensor:
        """Return this process's step stats as a sync vector, a 1-d tensor on the device.

        Args:
            stats: The step stats of this process.
            dtype: The dtype of the vector. In float32 the items are base-256 digits, the lowest
                first.
            times: A factor for every entry.
        """
        items, *others, bad = stats
        first = int(items).to_bytes(_DIGITS, "little") if dtype == torch.float32 else [items]
        ready = 0.0 if isinstance(bad, Tensor) else bad
        sync_vector = torch.tensor([times * n for n in (*first, *others, ready)], dtype=dtype)
        if self._device.type != "cpu":
            sync_vector = sync_vector.to(self._device, non_blocking=True)
        if isinstance(bad, Tensor):
            sync_vector[-1] = bad * times
        return sync_vector

    def count(self, total: Tensor) -> float | Tensor:
        """Record a summed sync vector; `latest` is updated, on an accelerator one update later.

        Args:
            total: The sum of the sync vectors of all processes.

        Returns:
            The number of items in the window; on an accelerator a float64 tensor of shape ().
        """
        if self._device.type == "cpu":
            self._record(total)
            self.bad_losses = self.latest.bad_losses
            return self.latest.items
        self.read_pending()
        self._pending = HostCopy(total)
        self.bad_losses = total[-1].round()
        if total.dtype == torch.float64:
            return total[0].round() if self._whole_items else total[0]
        if self._digit_values is None:
            self._digit_values = 256.0 ** torch.arange(_DIGITS, device=total.device).double()
        return total[:_DIGITS].round().double().dot(self._digit_values)

    def read_pending(self) -> None:
        """Wait for step stats that are being copied to the host; before saving, for example."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending.read())

    def peek(self) -> StepStats:
        """Return the newest sums without recording them; waits for the device.

        It may be called on some processes only, since `latest` stays the same on all.
        """
        return self.latest if self._pending is None else self._read(self._pending.read())

    def no_batch_ran(self) -> bool:
        """Return whether a window has no items because hooks ended the epoch; waits for the device.

        It may be called on some processes only. If it returns True on a process without items of
        its own, it does so on all, since none has any.
        """
        now = self.peek()
        return now.epoch_votes > 0 and not now.items

    def _record(self, total: Tensor) -> None:
        self.latest = self._read(total)
        self.items_seen += self.latest.items

    def _read(self, total: Tensor) -> StepStats:
        numbers = total.tolist()
        digits = _DIGITS if total.dtype == torch.float32 else 1
        items = numbers[0]
        if self._whole_items:
            items = 0.0
            for digit in reversed(numbers[:digits]):
                items = items * 256 + round(digit)
        stop_votes, signals, seconds, *others = numbers[digits:]
        return StepStats(items, round(stop_votes), round(signals), seconds, *map(round, others))
