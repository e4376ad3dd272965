"""Find slow ranks (stragglers), for which all other ranks wait."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from callbacks.base import Callback
from trainer.checks import check_counts, check_numbers
from trainer.errors import module_logger
from trainer.tree import record_event, start_copy_to_host

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

_WORK = ("data", "forward")
_HOST_BYTES = 64


class Slow(NamedTuple):
    """A process that is slower than the others.

    Attributes:
        rank: Its rank.
        host: The name of its machine.
        work: The slow part, ``"data"`` or ``"forward"``.
        seconds: Its mean time per update for this part, in seconds.
        others: The median of the other processes' times, in seconds.
    """

    rank: int
    host: str
    work: str
    seconds: float
    others: float

    def __str__(self) -> str:
        what = "waiting for data" if self.work == "data" else "in the forward pass"
        return (
            f"rank {self.rank} on {self.host} spends {self.seconds * 1e3:.1f} ms per update "
            f"{what}, the others {self.others * 1e3:.1f} ms"
        )


class _Stopwatch:
    """Adds up time intervals, with the host's clock or with events of the accelerator.

    On an accelerator, two events are recorded for each interval and read once they are complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type in ("cuda", "xpu")
        self._device = device
        self._started: Any = None
        self._unfinished: list[tuple[Any, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.seconds, self.count = 0.0, 0

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        return record_event(self._device, enable_timing=True)

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        self._unfinished.append((started, self._now()))
        self._collect()

    def _collect(self) -> None:
        """Add the intervals whose events are complete, without waiting for the others."""
        while self._unfinished:
            started, ended = self._unfinished[0]
            if not self._events:
                self.seconds += ended - started
            elif ended.query():
                self.seconds += started.elapsed_time(ended) / 1e3
            else:
                break
            self.count += 1
            self._unfinished.pop(0)


class SlowRankDetector(Callback):
    """Compare the times of all processes, and warn about a slow one (a straggler).

    All processes wait for the slowest one in each all-reduce. Their updates take equally long, so
    the speed does not show which process is slow. So this callback compares the time before the
    all-reduce: the wait for data, and the forward pass (the backward pass ends in the all-reduce).
    On an accelerator, the forward pass is timed with events.

    Whenever an update's values are logged (``log_every``), all processes gather their mean times
    per update since the last time. ``slow_rank/data`` and ``slow_rank/forward`` are logged: the
    slowest process's time ÷ the median of the others. If a process is slow ``patience`` times in a
    row, a warning names it, its machine and the part. With one process it does nothing. On an
    accelerator, the times are compared one log interval later, so that nothing waits for them.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[SlowRankDetector(threshold=1.5)])

    Args:
        threshold: A process is slow if its time exceeds this multiple of the others' median.
        min_share: The difference must also exceed this fraction of the time of an update.
        patience: The number of slow comparisons in a row before the warning. It is repeated only
            after the process has recovered.

    Attributes:
        slow: The slow processes in the latest comparison, the same on all processes.

    Raises:
        ValueError: If an argument is invalid.
    """

    def __init__(
        self, threshold: float = 1.5, *, min_share: float = 0.05, patience: int = 2
    ) -> None:
        check_numbers(1, threshold=threshold)
        check_numbers(0, 1, min_share=min_share)
        check_counts(1, patience=patience)
        self.threshold, self.min_share, self.patience = threshold, min_share, int(patience)
        self.slow: list[Slow] = []
        self._active = False

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Exchange the names of the machines."""
        accelerator = trainer.accelerator
        self._active = accelerator.num_processes > 1
        self.slow = []
        if not self._active:
            return
        self._watches = {
            "data": _Stopwatch(torch.device("cpu")),
            "forward": _Stopwatch(accelerator.device),
        }
        self._pending: tuple[Tensor, Any] | None = None
        self._slow_in_a_row: dict[tuple[int, str], int] = {}
        name = socket.gethostname().encode()[:_HOST_BYTES]
        padded = torch.tensor([*name.ljust(_HOST_BYTES, b"\0")], device=accelerator.device)
        gathered = accelerator.gather(padded).reshape(-1, _HOST_BYTES).tolist()
        self._hosts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered]
        self._since = time.perf_counter(), trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Exclude the wait for an epoch's first batch, in which workers start."""
        if self._active:
            self._watches["data"]._started = None

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Exclude the time of a save from the wait for data."""
        if self._active:
            self._watches["data"]._started = None

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop timing the wait for data, and start timing the forward pass."""
        if self._active:
            self._watches["data"].stop()
            self._watches["forward"].start()

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Stop timing the forward pass."""
        if self._active:
            self._watches["forward"].stop()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start timing the wait for the next batch of the window."""
        if self._active:
            self._watches["data"].start()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Compare the processes if this update's values will be logged."""
        if not self._active or not trainer.log_due:
            return
        on_host = trainer.accelerator.device.type == "cpu"
        if not on_host:
            self._compare(trainer, module)
        self._gather_times(trainer)
        if on_host:
            self._compare(trainer, module)

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Start timing the wait for the next window's first batch."""
        if self._active:
            self._watches["data"].start()

    def _gather_times(self, trainer: Trainer) -> None:
        """Start the all-gather of the mean times of all processes."""
        accelerator = trainer.accelerator
        now, step = time.perf_counter(), trainer.global_step
        updates = max(step - self._since[1], 1)
        values = [(now - self._since[0]) / updates]
        self._since = now, step
        micro_batches = self._watches["forward"].count / updates
        for work in _WORK:
            watch = self._watches[work]
            values.append(micro_batches * watch.seconds / max(watch.count, 1))
            watch.reset()
        local = torch.tensor(values, dtype=torch.float32).to(accelerator.device, non_blocking=True)
        shared = accelerator.gather(local)
        if shared.device.type == "cpu":
            self._pending = shared, None
            return
        self._pending = start_copy_to_host(shared)

    def _compare(self, trainer: Trainer, module: TrainModule) -> None:
        """Compare the times that were gathered."""
        if self._pending is None:
            return
        (shared, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()  # from the previous log interval, so it is complete
        rows = shared.reshape(-1, 1 + len(_WORK)).tolist()
        update = max(row[0] for row in rows)
        self.slow = []
        for column, work in enumerate(_WORK, 1):
            times = [row[column] for row in rows]
            slowest = max(range(len(times)), key=times.__getitem__)
            others = _median([*times[:slowest], *times[slowest + 1 :]])
            ratio = times[slowest] / others if others > 0 else 1.0
            module.log(f"slow_rank/{work}", ratio, on_step=True, on_epoch=False, batch_size=1)
            self._find_slow_ranks(work, times, update)
        if trainer.accelerator.is_main_process:
            for slow in self.slow:
                if self._slow_in_a_row[slow.rank, slow.work] == self.patience:
                    logger.warning("Step %d: %s.", trainer.global_step, slow)

    def _find_slow_ranks(self, work: str, times: list[float], update: float) -> None:
        for rank, seconds in enumerate(times):
            others = _median([*times[:rank], *times[rank + 1 :]])
            slow = seconds > self.threshold * others and seconds - others > self.min_share * update
            count = self._slow_in_a_row.get((rank, work), 0)
            self._slow_in_a_row[rank, work] = count + 1 if slow else 0
            if slow:
                self.slow.append(Slow(rank, self._hosts[rank], work, seconds, others))


def _median(values: list[float]) -> float:
    from statistics import median  # imported here to keep `import trainer` fast

    return median(values)
