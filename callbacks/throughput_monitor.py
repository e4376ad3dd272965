"""Log the throughput of a run, its FLOP/s and the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from callbacks.base import Callback
from callbacks.device_peaks import peak_flops
from callbacks.flops import counting_flops
from trainer.checks import check_counts, check_numbers, check_positive, given, suggest_arguments
from trainer.errors import module_logger

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Mark(NamedTuple):
    """The end of one update: totals over all processes, and this process's training time."""

    seconds: float
    updates: int
    batches: int
    samples: int
    items: float


class ThroughputMonitor(Callback):
    """Log the throughput over the last updates, at updates whose values are logged.

    ====================================  =========================================================
    ``throughput/updates_per_sec``        optimizer updates
    ``throughput/samples_per_sec``        samples, over all processes
    ``throughput/items_per_sec``          what the loss averages over (tokens), over all processes
    ``throughput/device/flops_per_sec``   per process, if its FLOPs are known, see below
    ``throughput/device/mfu``             model FLOPs utilisation: this ÷ the device's dense peak
    ====================================  =========================================================

    The first update is a warm-up and is not measured. The clock is the host's and is paused during
    validations. Nothing waits for the device, so a single update may look too fast, but the mean
    over the window is correct.

    FLOPs are counted once, for the forward and backward pass of the second micro-batch of each
    process, and assumed for every micro-batch. They are counted by ``torch.utils.flop_counter``:
    matrix products, convolutions and attention; a multiply-add counts as two. This micro-batch runs
    without ``torch.compile``, since operators inside a compiled graph cannot be counted. Counting
    changes no result. Recomputation for activation checkpointing is included. Custom kernels are
    not counted. In that case pass ``flops_per_batch``, computed by a formula such as that in
    Chowdhery et al., "PaLM", 2022, appendix B. Checkpoints store the number for resumed runs.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[ThroughputMonitor(window_size=50)])

    Args:
        window_size: The number of updates over which speeds are averaged.
        flops_per_batch: FLOPs of the forward and backward pass of one micro-batch of one process.
            None counts them; 0 leaves out FLOPs and MFU.
        peak_flops: The peak of one device in FLOP/s. None looks it up by the device's name in
            :mod:`callbacks.device_peaks`; for a device that is not listed no MFU is logged.

    Raises:
        ValueError: If an argument is invalid.
    """

    @suggest_arguments(
        batch_size_fn="nothing: samples are counted, and count_items of the module counts items",
        length_fn="nothing: count_items of the module counts items",
        separator="nothing: names are joined by a slash",
        available_flops="peak_flops=...",
    )
    def __init__(
        self,
        window_size: int = 100,
        *,
        flops_per_batch: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        check_counts(1, window_size=window_size)
        check_numbers(0, **given(flops_per_batch=flops_per_batch))
        check_positive(**given(peak_flops=peak_flops))
        self.window_size = int(window_size)
        self.flops_per_batch = flops_per_batch
        self.peak_flops = peak_flops
        self._flops_given = flops_per_batch is not None
        self._contexts = ExitStack()
        self._counter: FlopCounterMode | None = None
        self._peak: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=self.window_size + 1)
        self._batches = 0  # micro-batches of this process while FLOPs are still to be counted
        self._counting = False
        self._paused = 0.0  # seconds in validations
        self._paused_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counted FLOPs; each start measures its own speeds."""
        return {"flops_per_batch": None if self._flops_given else self.flops_per_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counted FLOPs, unless `flops_per_batch` was passed."""
        if not self._flops_given:
            self.flops_per_batch = state["flops_per_batch"]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Reset, and find out whether every process knows its device's peak; collective."""
        self._begin()
        if trainer.batches_seen == 0 and not self._flops_given:
            self.flops_per_batch = None
        self._counting = self.flops_per_batch is None
        self._peak = None
        if self._flops_given and not self.flops_per_batch:
            return
        device = trainer.accelerator.device
        peak = self.peak_flops or _peak_of(device, trainer.accelerator.mixed_precision)
        # All processes must log the same names.
        unknown = torch.tensor(float(peak is None), device=device)
        if not float(trainer.accelerator.reduce(unknown, "sum")):
            self._peak = peak
        elif device.type == "cuda" and trainer.accelerator.is_main_process:
            logger.warning(
                "No MFU is logged: the peak FLOP/s of this device is unknown. Pass peak_flops "
                "from its data sheet."
            )

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the second micro-batch."""
        if not self._counting:
            return
        self._batches += 1
        if self._batches == 2:  # the first may compile, so it runs without counting
            self._counter = self._contexts.enter_context(counting_flops())

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop counting after the second micro-batch."""
        if self._counter is not None:
            self.flops_per_batch = float(self._counter.get_total_flops())
            self._stop_counting()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Record the time, and log if this update's values will be logged."""
        self._marks.append(
            _Mark(
                time.monotonic() - self._paused,
                trainer.global_step,
                trainer.batches_seen,
                trainer.samples_seen,
                trainer.items_seen,
            )
        )
        if not trainer.log_due or len(self._marks) < 2:
            return
        first, last = self._marks[0], self._marks[-1]
        seconds = max(last.seconds - first.seconds, 1e-9)
        for name, amount in (
            ("updates", last.updates - first.updates),
            ("samples", last.samples - first.samples),
            ("items", last.items - first.items),
        ):
            # The counts are the same on all processes; their clocks differ a little.
            self._log(module, f"{name}_per_sec", amount / seconds, 1)
        if self._flops_given and not self.flops_per_batch:
            return
        # A process that has had no batch yet logs with weight 0, so that all log the same names.
        flops, weight = self.flops_per_batch or 0.0, int(self.flops_per_batch is not None)
        batches = (last.batches - first.batches) / trainer.accelerator.engine.parallel.dp_size
        self._log(module, "device/flops_per_sec", flops * batches / seconds, weight)
        if self._peak is not None:
            self._log(module, "device/mfu", flops * batches / seconds / self._peak, weight)

    def _log(self, module: TrainModule, name: str, value: float, weight: int) -> None:
        name = f"throughput/{name}"
        module.log(name, value, on_step=True, on_epoch=False, batch_size=weight)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Pause the clock."""
        self._paused_at = time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Resume the clock."""
        self._paused += time.monotonic() - self._paused_at

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop counting if an error interrupted the micro-batch."""
        self._stop_counting()

    def _stop_counting(self) -> None:
        self._contexts.close()
        self._counter = None
        self._counting = False


def _peak_of(device: torch.device, mixed_precision: str) -> float | None:
    """Return the peak of this process's device in FLOP/s, or None if it is unknown."""
    if device.type != "cuda":
        return None
    return peak_flops(
        torch.cuda.get_device_name(device),
        _DTYPES.get(mixed_precision, torch.float32),
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",  # by any API that sets it
    )
