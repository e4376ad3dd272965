"""Cadence's callbacks with the names and arguments of Lightning's.

The module is private so that jsonargparse, which finds subclasses by their class names, resolves
``EarlyStopping`` in a file of `trainer fit` to Cadence's own class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

import callbacks
from callbacks import Callback, ModelSummary
from callbacks.averages import Averages
from callbacks.backbone_finetuning import multiplicative
from callbacks.on_exception_checkpoint import save_weights_at
from trainer.checkpoint.save import link_or_warn
from trainer.errors import module_logger
from trainer.lightning.pytorch._model_checkpoint import as_tensor
from trainer.tuning import LearningRateTest, Tuner

logger = module_logger(__name__)

_AverageOne = Callable[[Tensor, Tensor, Tensor], Tensor]
_AverageMany = Callable[[list[Tensor], list[Tensor], Tensor], None]


class EarlyStopping(callbacks.EarlyStopping):
    """`callbacks.EarlyStopping` with Lightning's arguments.

    `strict`, `check_on_train_epoch_end` and `log_rank_zero_only` have no effect; `min_delta` may
    not be negative.
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
            min_delta=min_delta,
            patience=patience,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            verbose=verbose,
        )

    @property
    def best_score(self) -> Any:
        """The best value so far, None before the first."""
        return None if self._best_score is None else as_tensor(self._best_score)

    @best_score.setter
    def best_score(self, score: Any) -> None:
        self._best_score = None if score is None else float(score)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the best value as a number."""
        return {**super().state_dict(), "best_score": self._best_score}

    @property
    def stopped_epoch(self) -> int:
        """The epoch in which it stopped the run; 0 if it did not."""
        return self._stopped_epoch or 0

    @stopped_epoch.setter
    def stopped_epoch(self, epoch: int | None) -> None:
        self._stopped_epoch = epoch


class LearningRateMonitor(callbacks.LearningRateMonitor):
    """`callbacks.LearningRateMonitor`; ``"epoch"`` logs at the beginning of each epoch.

    Otherwise rates are logged whenever values are recorded.
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        super().__init__(log_momentum=log_momentum, log_weight_decay=log_weight_decay)
        self.logging_interval = logging_interval

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        """Log the rates, unless they are logged once per epoch."""
        if self.logging_interval != "epoch":
            super().on_train_step_end(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Log the rates once per epoch, if configured."""
        if self.logging_interval == "epoch":
            self._log(trainer, module, on_step=False)


class TQDMProgressBar(callbacks.ProgressBar):
    """`callbacks.ProgressBar`, which refreshes by time; ``refresh_rate=0`` shows nothing.

    Other arguments have no effect.
    """

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False
    ) -> None:
        super().__init__(10.0 if refresh_rate else 0)


@dataclass
class RichProgressBarTheme:
    """Colours of a `RichProgressBar`, which have no effect."""

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(callbacks.RichProgressBar):
    """`callbacks.RichProgressBar`, which refreshes by time; ``refresh_rate=0`` shows nothing.

    Other arguments have no effect.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(10.0 if refresh_rate else 0)


class RichModelSummary(ModelSummary):
    """`callbacks.ModelSummary`."""

    def __init__(self, max_depth: int = 1, **_: Any) -> None:
        super().__init__(max_depth)


class DeviceStatsMonitor(callbacks.DeviceStatsMonitor):
    """`callbacks.DeviceStatsMonitor`."""


def _average(
    averages: list[Tensor],
    values: list[Tensor],
    number: int,
    *,
    avg_fn: _AverageOne | None,
    multi_avg_fn: _AverageMany | None,
) -> None:
    """Update averages with the values after `number` updates, as in torch's ``AveragedModel``."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in zip(averages, values, strict=True):
        group = groups.setdefault((average.device, average.dtype), ([], []))
        group[0].append(average)
        group[1].append(value)
    for (device, _), (old, new) in groups.items():
        count = torch.tensor(number, device=device)
        many = multi_avg_fn
        if many is None and avg_fn is None and device.type == "cuda":
            many = get_swa_multi_avg_fn()
        if many is not None:
            many(old, new, count)
            continue
        one = avg_fn or get_swa_avg_fn()
        for average, value in zip(old, new, strict=True):
            average.copy_(one(average, value, count))


class WeightAveraging(callbacks.WeightAveraging):
    """The equally weighted average of the weights after every update, as in Lightning.

    Evaluations during the fit, checkpoints and the final weights work as in
    `callbacks.WeightAveraging`, whose default is an exponential average. Before the first update of
    the average, the trained weights are evaluated; Lightning evaluates the initial ones.

    Args:
        device: The device of the average; None is the weights' device. Averages of shards are
            always on the weights' device.
        use_buffers: Whether floating-point buffers are averaged too. If False, the buffers are
            those of the trained model at the latest update of the average.
        avg_fn: Returns a new average from the old one, the weight and the number of previous
            updates, such as ``torch.optim.swa_utils.get_ema_avg_fn()``.
        multi_avg_fn: The same for lists of tensors, in place.

    Raises:
        ValueError: Both functions are given.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: _AverageOne | None = None,
        multi_avg_fn: _AverageMany | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("Both avg_fn and multi_avg_fn were given: pass one of them.")
        self._device = None if device is None else torch.device(device)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        super().__init__(use_buffers=use_buffers)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average; True after every update of the weights.

        Args:
            step_idx: The update of the weights, from 0; None at the end of an epoch.
            epoch_idx: The epoch that ends, from 0; None after an update.
        """
        return step_idx is not None

    def _empty(self) -> Averages:
        return Averages(use_buffers=self.use_buffers or "copy", device=self._device)

    def _is_due(self, trainer: Any) -> bool:
        return self.should_update(step_idx=trainer.global_step - 1)

    def _update(self, module: Any) -> None:
        rule = partial(
            _average,
            number=self.num_updates,
            avg_fn=self._avg_fn,
            multi_avg_fn=self._multi_avg_fn,
        )
        self._averages.update(module, rule)
        self.num_updates += 1

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Update the average if `should_update` returns True."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(module)


class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average of the weights, as in Lightning.

    Args:
        device: See `WeightAveraging`.
        use_buffers: See `WeightAveraging`.
        decay: The weight of the old average.
        update_every_n_steps: Update the average after update 0 and then after every n-th update.
        update_starting_at_step: The first update of the weights, from 0, after which to update.
        update_starting_at_epoch: From this epoch on, from 0, the average is also updated at the end
            of each epoch.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        super().__init__(device, use_buffers, avg_fn=get_ema_avg_fn(decay))
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average; see the arguments of the class."""
        if step_idx is not None:
            every = self.update_every_n_steps
            begun = step_idx >= (self.update_starting_at_step or 0)
            return begun and every > 0 and step_idx % every == 0
        start = self.update_starting_at_epoch
        return start is not None and epoch_idx is not None and epoch_idx >= start


class StochasticWeightAveraging(callbacks.StochasticWeightAveraging):
    """`callbacks.StochasticWeightAveraging` with Lightning's arguments.

    Args:
        swa_lrs: See `callbacks.StochasticWeightAveraging`.
        swa_epoch_start: The first epoch, from 1, or a fraction of the epochs.
        annealing_epochs: The number of epochs until the rates are reached.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: Returns a new average from the old one, the weight and the number of weights in it.
        device: The device of the average; None is the weights' device. Averages of shards are
            always on the weights' device.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: _AverageOne | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._avg_fn = avg_fn
        super().__init__(swa_lrs, swa_epoch_start, annealing_epochs, annealing_strategy)

    def _empty(self) -> Averages:
        return Averages(use_buffers=False, device=self._device)

    def _update(self, module: Any) -> None:
        if self._avg_fn is None:
            super()._update(module)
            return
        rule = partial(_average, number=self.num_averaged, avg_fn=self._avg_fn, multi_avg_fn=None)
        self._averages.update(module, rule)


class ThroughputMonitor(callbacks.ThroughputMonitor):
    """`callbacks.ThroughputMonitor`.

    Args:
        batch_size_fn: Has no effect, since the samples of each batch are counted.
        length_fn: Must be None; the items returned by the module's `count_items` are counted.
        window_size: The number of updates over which speeds are averaged.
        available_flops: The peak of one device in FLOP/s; None looks it up.
        **options: Further arguments.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        available_flops: float | None = None,
        **options: Any,
    ) -> None:
        if length_fn is not None:
            raise ValueError(
                f"ThroughputMonitor was given length_fn={length_fn!r}: leave it out, and define "
                "count_items(self, batch) in the module, which throughput/items_per_sec counts."
            )
        super().__init__(window_size, **{"peak_flops": available_flops, **options})


class OnExceptionCheckpoint(callbacks.OnExceptionCheckpoint):
    """`callbacks.OnExceptionCheckpoint`, with a link named `filename` to the checkpoint.

    Raises:
        ValueError: The `filename` is empty.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | Path | None = None, filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("OnExceptionCheckpoint needs a filename.")
        super().__init__(dirpath)
        self.filename = filename

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Save this process's weights, and set the link; the last failing process wins."""
        folder = self.dirpath or trainer.checkpoint_dir
        if self._training and (saved := save_weights_at(exception, trainer, folder)):
            link_or_warn(saved, folder / f"{self.filename}{self.FILE_EXTENSION}")


class _OfClass:
    """A method that can also be called on the class, like Lightning's static methods.

    Calls on the class use one shared object, so that one call can undo the freezing by another.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        return partial(self._method, _FINETUNING if owner is None else owner)


class BaseFinetuning(callbacks.BaseFinetuning):
    """`callbacks.BaseFinetuning`, but with batch normalisation trained by default."""

    def _freeze(self, modules: Any, train_bn: bool = True) -> None:
        """Freeze parameters; see `callbacks.BaseFinetuning.freeze`.

        Args:
            modules: A module, or an iterable of modules, nested to any depth.
            train_bn: False freezes batch normalisation too.
        """
        super().freeze(modules, train_bn)

    freeze = _OfClass(_freeze)
    make_trainable = _OfClass(callbacks.BaseFinetuning.make_trainable)

    @staticmethod
    def flatten_modules(modules: Any) -> list[nn.Module]:
        """Return the modules that have own parameters or no submodules."""
        if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleDict):
            flat = list(modules.modules())
        else:
            parts = modules.values() if isinstance(modules, Mapping | nn.ModuleDict) else modules
            flat = [module for part in parts for module in BaseFinetuning.flatten_modules(part)]
        return [
            module
            for module in flat
            if not list(module.children()) or list(module.parameters(False))
        ]

    @staticmethod
    def filter_params(
        modules: Any, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """Yield the trained or the frozen parameters.

        Args:
            modules: A module, or an iterable of modules, nested to any depth.
            train_bn: False leaves out parameters of batch normalisation.
            requires_grad: True for trained parameters, False for frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad:
                        yield parameter


_FINETUNING = BaseFinetuning()
vars(_FINETUNING).update(_module=nn.Module(), _norms={}, _modes={}, _trainable={})


class BackboneFinetuning(BaseFinetuning, callbacks.BackboneFinetuning):
    """`callbacks.BackboneFinetuning`, but with batch normalisation trained by default.

    `initial_denom_lr` and `rounding` have no effect.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
        **options: Any,
    ) -> None:
        super().__init__(
            unfreeze_backbone_at_epoch,
            lambda_func,
            backbone_initial_ratio_lr,
            backbone_initial_lr,
            should_align,
            train_bn=train_bn,
            verbose=verbose,
            **options,
        )


class WriteInterval(str):
    """When a `BasePredictionWriter` writes: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``."""

    __slots__ = ()

    @property
    def on_batch(self) -> bool:
        """Whether it writes after each batch."""
        return "batch" in self

    @property
    def on_epoch(self) -> bool:
        """Whether it writes at the end."""
        return "epoch" in self


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions.

    Args:
        write_interval: ``"batch"`` calls `write_on_batch_end` after each batch; ``"epoch"`` calls
            `write_on_epoch_end` at the end with all outputs of this process, ``"batch_and_epoch"``
            both. `batch_indices` are the dataset indices of a batch's samples, and at the end those
            of each batch of each loader. For a stream the lists are empty.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(
                f"write_interval is {write_interval!r}; it must be 'batch', 'epoch' or "
                "'batch_and_epoch'."
            )
        self.interval = WriteInterval(write_interval)
        self._outputs: dict[int, list[Any]] = {}
        self._indices: list[list[Any]] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Drop the outputs of a failed prediction."""
        self._outputs, self._indices = {}, []

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Make the samplers record the indices that they draw."""
        trainer.keep_indices()

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
        indices = trainer.indices_of(batch_idx, dataloader_idx)
        if self.interval.on_batch:
            self.write_on_batch_end(
                trainer, module, outputs, indices, batch, batch_idx, dataloader_idx
            )
        if self.interval.on_epoch:
            self._outputs.setdefault(dataloader_idx, []).append(outputs)
            while len(self._indices) <= dataloader_idx:
                self._indices.append([])
            self._indices[dataloader_idx] += [indices] if indices else []

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        """Write all outputs of this process."""
        if self.interval.on_epoch:
            outputs = list(self._outputs.values())
            self.write_on_epoch_end(
                trainer, module, outputs[0] if len(outputs) == 1 else outputs, self._indices
            )
            self._outputs, self._indices = {}, []

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the outputs of a batch."""

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        """Write all outputs of this process."""


def _arguments(arguments: dict[str, Any], **renamed: str) -> dict[str, Any]:
    """Return the arguments of a finder, from its locals, under `Tuner`'s names."""
    arguments = {
        renamed.get(name, name): value for name, value in arguments.items() if name != "self"
    }
    return arguments | {"mode": arguments["mode"].lower()}


class LearningRateFinder(Callback):
    """Finds a learning rate before training with `Tuner.lr_find`, and sets the attribute.

    A subclass that overrides `on_fit_start` searches when it calls `lr_find`, which then also sets
    the rates of the optimizers.

    Args:
        min_lr: The first rate.
        max_lr: The last rate.
        num_training_steps: The number of rates.
        mode: ``"exponential"`` or ``"linear"``.
        early_stop_threshold: See `Tuner.lr_find`.
        update_attr: Whether to set the attribute to the result.
        attr_name: The attribute; by default ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: The result; None before the search.
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self._options = _arguments(locals(), num_training_steps="num_training")
        self.optimal_lr: LearningRateTest | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Search before the optimizers are created."""
        overridden = type(self).on_fit_start is not LearningRateFinder.on_fit_start
        if stage == "fit" and not overridden:
            self.lr_find(trainer, module)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Do nothing; if it is overridden, `setup` does not search."""

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        """Search now."""
        if trainer.fast_dev_run:
            logger.warning("The learning rate finder is skipped with fast_dev_run.")
            return
        self.optimal_lr = Tuner(trainer).lr_find(
            pl_module, trainer.train_dataloader, datamodule=trainer.datamodule, **self._options
        )
        rate = self.optimal_lr.suggestion() if self._options["update_attr"] else None
        for optimizer in trainer.optimizers if rate is not None else ():
            for group in optimizer.param_groups:
                group["lr"] = rate


class BatchSizeFinder(Callback):
    """Finds the largest batch size that fits, with `Tuner.scale_batch_size`, and sets it.

    It searches before the loaders are created, in each of `fit`, `validate`, `test` and `predict`;
    but not in `fit` if a subclass overrides `on_fit_start`.

    Args:
        mode: ``"power"`` or ``"binsearch"``.
        steps_per_trial: The number of updates, or batches, of each trial.
        init_val: The first size.
        max_trials: The maximum number of sizes.
        batch_arg_name: The attribute of the module or the data module.
        margin: The fraction by which a size found by ``"binsearch"`` is reduced.
        max_val: The largest size.

    Attributes:
        optimal_batch_size: The result.
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self._options = _arguments(locals())
        self.optimal_batch_size: int | None = init_val
        self._stage: str | None = None  # the stage of the latest search

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Search before the loaders are created.

        Raises:
            ValueError: Loaders were passed.
        """
        self._stage = None
        overridden = type(self).on_fit_start is not BatchSizeFinder.on_fit_start
        if stage == "fit" and overridden:
            return
        hooks = {"fit": "train_dataloader", "validate": "val_dataloaders"}
        if getattr(trainer, hooks.get(stage, f"{stage}_dataloaders"), None) is not None:
            raise ValueError(
                "BatchSizeFinder cannot change the batch size of loaders that are passed: create "
                "them in the module or a LightningDataModule, from an attribute."
            )
        size = Tuner(trainer).scale_batch_size(
            module,
            datamodule=trainer.datamodule,
            method=stage,
            update_attr=True,
            **self._options,
        )
        self.optimal_batch_size, self._stage = size.batch_size, stage

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Do nothing; if it is overridden, `setup` does not search."""

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        """Check that the size for this run was found in `setup`.

        Raises:
            ValueError: There was no search, and the run has already created its loaders.
        """
        if self._stage is None:
            raise ValueError(
                "scale_batch_size was called after the loaders were created. The batch size is "
                "found at the start of a run: remove your on_fit_start."
            )
