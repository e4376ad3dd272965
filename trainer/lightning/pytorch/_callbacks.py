"""Lightning's callbacks by their names and arguments: Cadence's own, translated.

The module is private so that jsonargparse, which finds subclasses by their bare names, takes
``EarlyStopping`` in a file of `trainer fit` for Cadence's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import callbacks
from callbacks import Callback, ModelSummary, WeightAveraging


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """`callbacks.ModelCheckpoint` with Lightning's arguments.

    A checkpoint is a folder that is named after its update; its manifest has the metrics.

    Args:
        dirpath: The folder of the checkpoints; None is the run's.
        filename: Has no effect.
        monitor: The metric that ranks checkpoints.
        verbose: Has no effect.
        save_last: Whether to keep the newest one too; always True without a monitor.
        save_top_k: How many of the best to keep; -1 for all.
        save_weights_only: Whether to save the weights alone.
        mode: Whether ``"min"`` or ``"max"`` is best.
        auto_insert_metric_name: Has no effect.
        every_n_train_steps: Save after so many updates.
        train_time_interval: Save after this time.
        every_n_epochs: Save after so many epochs.
        save_on_train_epoch_end: Has no effect: saves follow the validation.
        save_on_exception: Whether to save when an exception ends the run.
        enable_version_counter: Has no effect.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_on_exception: bool = False,
        enable_version_counter: bool = True,
    ) -> None:
        every: Any = f"{every_n_epochs or 1} epoch{'s' * ((every_n_epochs or 1) > 1)}"
        if every_n_train_steps:
            every = every_n_train_steps
        elif train_time_interval is not None:
            every = f"{train_time_interval.total_seconds():g} seconds"
        super().__init__(
            monitor=monitor,
            mode=mode,
            every=every,
            save_top_k=save_top_k,
            save_last=bool(save_last) or (monitor is None and save_top_k != -1),
            on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            dirpath=dirpath,
        )


class EarlyStopping(callbacks.EarlyStopping):
    """`callbacks.EarlyStopping` with Lightning's arguments.

    `strict`, `check_on_train_epoch_end` and `log_rank_zero_only` have no effect.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__(
            monitor,
            mode=mode,
            min_delta=abs(min_delta),
            patience=patience,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            verbose=verbose,
        )


class LearningRateMonitor(callbacks.LearningRateMonitor):
    """`callbacks.LearningRateMonitor`; the interval is that of the records."""

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        super().__init__(log_momentum=log_momentum, log_weight_decay=log_weight_decay)


class TQDMProgressBar(callbacks.ProgressBar):
    """`callbacks.ProgressBar`, which is refreshed by time; the arguments have no effect."""

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False
    ) -> None:
        super().__init__()


class RichProgressBar(callbacks.RichProgressBar):
    """`callbacks.RichProgressBar`, which is refreshed by time; the arguments have no effect."""

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None, **_: Any
    ) -> None:
        super().__init__()


class RichModelSummary(ModelSummary):
    """`callbacks.ModelSummary`."""

    def __init__(self, max_depth: int = 1, **_: Any) -> None:
        super().__init__(max_depth)


class DeviceStatsMonitor(callbacks.DeviceStatsMonitor):
    """`callbacks.DeviceStatsMonitor`."""


class EMAWeightAveraging(WeightAveraging):
    """`callbacks.WeightAveraging`, an exponential moving average of the weights."""


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions.

    Args:
        write_interval: ``"batch"`` calls `write_on_batch_end` after each batch; ``"epoch"`` calls
            `write_on_epoch_end` at the end with all outputs of this process, ``"batch_and_epoch"``
            both.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(
                f"write_interval is {write_interval!r}; it must be 'batch', 'epoch' or "
                "'batch_and_epoch'."
            )
        self.interval = write_interval
        self._outputs: dict[int, list[Any]] = {}
        self._indices: dict[int, list[Any]] = {}

    def on_predict_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write or keep the outputs of a batch."""
        if "batch" in self.interval:
            self.write_on_batch_end(
                trainer, module, outputs, None, batch, batch_idx, dataloader_idx
            )
        if "epoch" in self.interval:
            self._outputs.setdefault(dataloader_idx, []).append(outputs)
            self._indices.setdefault(dataloader_idx, []).append(batch_idx)

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        """Write all outputs of this process."""
        if "epoch" in self.interval:
            outputs, indices = list(self._outputs.values()), list(self._indices.values())
            one = len(outputs) == 1
            self.write_on_epoch_end(
                trainer, module, outputs[0] if one else outputs, indices[0] if one else indices
            )
            self._outputs.clear()
            self._indices.clear()

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the outputs of a batch; `batch_indices` is None."""

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        """Write all outputs of this process."""
