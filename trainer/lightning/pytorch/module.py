"""LightningModule and LightningDataModule."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainer.datamodule import DataModule
from trainer.errors import module_logger
from trainer.hparams import HyperParameters, keep, kept_by
from trainer.loops.fit_state import apply_edits
from trainer.migration.table import CHECKPOINT_ENTRIES
from trainer.module import TrainModule, Weights
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.tree import detach

M = TypeVar("M", bound="LightningModule")
LightningOptimizer = AcceleratedOptimizer

logger = module_logger(__name__)


@cache
def _warn_of_step() -> None:
    logger.warning(
        'log("step", ...) has no effect: the x axis of every curve is the update. Each record has '
        "its epoch too."
    )


@cache
def _warn_of_global_step() -> None:
    logger.warning(
        "global_step counts the batches in which an optimizer has stepped; Lightning counts the "
        "steps of all optimizers. A condition on global_step becomes true later than in "
        "Lightning."
    )


class HyperparametersMixin:
    """`save_hyperparameters` and the recorded values."""

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Record the arguments of ``__init__``; see `TrainModule.save_hyperparameters`.

        Values that are not plain data, such as a network or a ``functools.partial``, are in
        `hparams` too, but not in checkpoints: pass them to `load_from_checkpoint` again.
        """
        caller = frame or sys._getframe(1)
        keep(self, names, caller, ignore=ignore, private=not logger, plain_only=False)

    @property
    def hparams_initial(self) -> HyperParameters:
        """The values of `hparams` after `save_hyperparameters`; plain data is copied."""
        return HyperParameters(kept_by(self).initial)

    @property
    def hparams(self) -> HyperParameters:
        """The recorded arguments: a dict whose items are also attributes."""
        return kept_by(self).values

    @property
    def _hparams(self) -> HyperParameters:  # pytorch-forecasting removes values from both
        return kept_by(self).values

    @property
    def _hparams_initial(self) -> HyperParameters:
        return kept_by(self).initial


class _Checkpoint(dict[str, Any]):
    """A dict whose error, for an entry that only Lightning has, names the alternative."""

    def __missing__(self, key: str) -> Any:
        if key not in CHECKPOINT_ENTRIES:
            raise KeyError(key)
        raise KeyError(f"This checkpoint has no {key!r} for hooks: {CHECKPOINT_ENTRIES[key]}.")


class LightningModule(HyperparametersMixin, TrainModule):
    """A `TrainModule` with the attributes that programs for Lightning use.

    Changes that `on_save_checkpoint` and `on_load_checkpoint` make to ``checkpoint["state_dict"]``,
    under the module's own names, apply to the saved and loaded weights. `strict_loading` also
    applies when a run resumes. With FSDP, DeepSpeed and Megatron the state dict has shards; while
    loading, ``torch.clone(value)`` reads a whole weight.

    Attributes:
        example_input_array: An example input of ``forward``, for `to_onnx` and `to_torchscript`;
            None without one.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    example_input_array: Any = None
    _needs_trainer = TrainModule._needs_trainer | {"logger", "loggers", "device_mesh"}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's name of the path
        cls: type[M],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> M:
        """Create a module from a checkpoint; see `TrainModule.load_from_checkpoint`.

        Raises:
            ValueError: An `hparams_file` is passed.
        """
        if hparams_file is not None:
            raise ValueError(
                f"hparams_file is {hparams_file!r}, but a checkpoint has the hyperparameters "
                "itself: pass others by keyword."
            )
        load: Any = super().load_from_checkpoint
        made: M = load(checkpoint_path, map_location=map_location, strict=strict, **kwargs)
        return made

    def _call_on_save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        hooks: Callable[[dict[str, Any]], None],
        weights: Callable[[], Weights],
        *,
        weights_only: bool,
    ) -> tuple[dict[str, Any], Weights | None]:
        checkpoint = _Checkpoint(checkpoint)
        before, trained = weights()
        checkpoint["state_dict"] = dict(before)
        hooks(checkpoint)
        edited = checkpoint.pop("state_dict", {})
        others = None if trained is None else apply_edits(edited, before, trained)
        return dict(checkpoint), (edited, others)

    def _call_on_load_checkpoint(
        self, saved: Mapping[str, Any], weights: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        checkpoint = _Checkpoint(saved, state_dict=dict(weights))
        self.on_load_checkpoint(checkpoint)
        return checkpoint, checkpoint.get("state_dict", {})

    @property
    def _resumes_strictly(self) -> bool:
        return self.strict_loading

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
        **others: Any,
    ) -> None:
        """Log a value; see `TrainModule.log`.

        In `training_step`, metric objects are by default logged on the step, like numbers. If a
        value is logged on both the step and the epoch, its epoch value also has the plain name, for
        monitors and `callback_metrics`, but not for trackers.

        A value called ``"step"`` is dropped with a warning: Lightning's loggers would use it as the
        horizontal axis, and ours use the update.
        """
        if name == "step":
            _warn_of_step()
            return
        if not isinstance(reduce_fx, str) or reduce_fx != "mean":
            others["reduce_fx"] = reduce_fx
        if enable_graph or rank_zero_only or sync_dist_group is not None:
            others |= {
                "enable_graph": enable_graph,
                "rank_zero_only": rank_zero_only,
                "sync_dist_group": sync_dist_group,
            }
        if logger is False or not add_dataloader_idx:
            others |= {"logger": logger, "add_dataloader_idx": add_dataloader_idx}
        if batch_size is not None:
            others["batch_size"] = batch_size
        metrics = self.trainer.metrics
        scope = metrics.scope
        if scope is not None:
            trains = scope.phase == "train"
            if on_step is None and trains and hasattr(value, "compute"):
                on_step = bool(scope.on_step)
            each_step = (trains and scope.on_step) if on_step is None else on_step
            if each_step and (on_epoch or (on_epoch is None and not trains)):
                metrics.private.add(name + metrics.loader_suffix)
                super().log(name, value, on_step=False, on_epoch=True, **others)
        super().log(name, value, prog_bar, on_step=on_step, on_epoch=on_epoch, **others)

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        rank_zero_only: bool = False,
        **others: Any,
    ) -> None:
        """Call `log` for each item, with the same further arguments."""
        for name, value in dictionary.items():
            self.log(
                name,
                value,
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                enable_graph,
                sync_dist,
                sync_dist_group,
                add_dataloader_idx,
                batch_size,
                rank_zero_only=rank_zero_only,
                **others,
            )

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the prepared optimizers; see `TrainModule.optimizers`.

        With several in manual optimisation, a warning is logged once, since Lightning counts the
        steps of each.
        """
        optimizers = super().optimizers(use_pl_optimizer)
        if isinstance(optimizers, list) and not self.automatic_optimization:
            _warn_of_global_step()
        return optimizers

    def _outputs_of_step(self, outputs: Any, micro_batches: int) -> dict[str, Any]:
        """Return Lightning's dict, with the loss divided by the batches of an update."""
        outputs = detach(outputs)
        if outputs is None:
            return {}
        result = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        if micro_batches > 1:
            result["loss"] = result["loss"] / micro_batches
        return result

    @property
    def logger(self) -> Any:
        """The run's first logger; None without any."""
        return self.trainer.logger  # type: ignore[attr-defined]  # of trainer.lightning's Trainer

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers."""
        return list(self.trainer.loggers)  # type: ignore[attr-defined]  # as above

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The mesh that splits the model over processes; None on one device and with DDP."""
        return self.trainer.accelerator.engine.parallel.mesh

    def configure_callbacks(self) -> Any:
        """Return further callbacks, which replace the Trainer's callbacks of the same class."""
        return []

    def to_onnx(
        self, file_path: str | Path | None = None, input_sample: Any = None, **kwargs: Any
    ) -> Any:
        """Export the module with ``torch.onnx.export``.

        Args:
            file_path: The file; None writes no file and returns the program.
            input_sample: The input of ``forward``; None takes `example_input_array`.
            **kwargs: Arguments of ``torch.onnx.export``.

        Raises:
            ValueError: There is no example.
        """
        sample = self._example(input_sample, "to_onnx")
        with torch.no_grad(), _evaluating(self):
            path = None if file_path is None else str(file_path)
            return torch.onnx.export(self, sample, path, **kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compile the module with ``torch.jit.trace``, and save it if there is a path.

        Raises:
            ValueError: The method is ``"script"``, which cannot compile a trainer's module, or
                there is no example.
        """
        if method != "trace":
            raise ValueError(
                f"to_torchscript was called with method={method!r}; only 'trace' can compile a "
                "module of a trainer. torch.export.export is torch's way today."
            )
        sample = self._example(example_inputs, "to_torchscript")
        with torch.no_grad(), _evaluating(self):
            traced = torch.jit.trace(self, sample, **kwargs)
        if file_path is not None:
            traced.save(str(file_path))
        return traced

    def _example(self, example: Any, method: str) -> tuple[Any, ...]:
        sample = self.example_input_array if example is None else example
        if sample is None:
            raise ValueError(
                f"{method} needs an example of what forward takes: pass it, or set "
                "self.example_input_array."
            )
        return sample if isinstance(sample, tuple) else (sample,)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode, and restore each submodule's mode on exit."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class LightningDataModule(HyperparametersMixin, DataModule):
    """A `DataModule` that can be created from datasets."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> LightningDataModule:
        """Return a data module with a loader for each dataset; the training loader is shuffled.

        Args:
            train_dataset: For training, a dataset or a list of them, like the following.
            val_dataset: For validation.
            test_dataset: For tests.
            predict_dataset: For predictions.
            batch_size: The number of samples per batch.
            num_workers: The number of worker processes of each loader.
            **kwargs: Arguments of the data module.
        """
        made = cls(**kwargs)

        def loader(dataset: Any, *, shuffle: bool = False) -> Any:
            if isinstance(dataset, (list, tuple)):
                return [loader(part, shuffle=shuffle) for part in dataset]
            shuffles = shuffle and not isinstance(dataset, torch.utils.data.IterableDataset)
            return DataLoader(dataset, batch_size, shuffle=shuffles, num_workers=num_workers)

        for name, dataset in (
            ("train", train_dataset),
            ("val", val_dataset),
            ("test", test_dataset),
            ("predict", predict_dataset),
        ):
            if dataset is not None:
                made_loader = loader(dataset, shuffle=name == "train")
                setattr(made, f"{name}_dataloader", lambda made_loader=made_loader: made_loader)
        return made
