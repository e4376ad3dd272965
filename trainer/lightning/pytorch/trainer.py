"""Lightning's Trainer: its arguments and attributes, translated to those of `trainer.Trainer`."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import callbacks as ours
from callbacks import Callback, GradientAccumulationScheduler, ModelSummary
from trackers.base import GeneralTracker, is_installed
from trainer import environment
from trainer.checkpoint.resolve import WORDS, holds_weights_only
from trainer.checkpoint.storage import committed
from trainer.checks import raise_findings
from trainer.distributed.objects import broadcast_object
from trainer.enums import DistributedType
from trainer.errors import CheckpointError, module_logger
from trainer.lightning.pytorch._model_checkpoint import (
    ModelCheckpoint,
    as_tensor,
    choose_folders,
)
from trainer.lightning.pytorch.launch import launch
from trainer.lightning.pytorch.loggers import (
    CSVLogger,
    DummyLogger,
    InFolder,
    Logger,
    LoggerTracker,
    TensorBoardLogger,
    next_version,
)
from trainer.lightning.pytorch.profilers import (
    PassThroughProfiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from trainer.lightning.pytorch.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from trainer.lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    strategy_of,
)
from trainer.loops.config import Settings
from trainer.loops.state import Counters
from trainer.migration.refusals import ATTRIBUTES, argument_refusals, uncalled
from trainer.migration.values import (
    PRECISIONS,
    device_numbers,
    wrong_interval,
    wrong_values,
)
from trainer.state import PartialState
from trainer.trainer import Trainer as NativeTrainer

_logger = module_logger(__name__)

_WORDS = {
    "checkpointing": "enable_checkpointing",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "log_every": "log_every_n_steps",
    "log_with": "logger",
    "max_grad_norm": "gradient_clip_val",
    "max_grad_value": "gradient_clip_val",
    "mixed_precision": "precision",
    "progress_bar": "enable_progress_bar",
    "project_dir": "default_root_dir",
    "val_every": "val_check_interval",
}
"""Arguments of `trainer.Trainer`, and what they are in Lightning."""


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Make errors of Cadence's own code name the arguments of Lightning's Trainer."""
    try:
        yield
    except (TypeError, ValueError, CheckpointError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_in = frame.f_globals.get("__name__", "").partition(".")[0]
        if raised_in in ("trainer", "callbacks") and error.args:
            translated = re.sub(
                r"\w+", lambda word: _WORDS.get(word[0], word[0]), str(error.args[0])
            )
            error.args = (translated, *error.args[1:])
        raise


class _Argument:
    """An argument of the Trainer that can be read later, but not set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else trainer._arguments[self.name]

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(
            f"Trainer.{self.name} cannot be set after the Trainer is created: pass "
            f"Trainer({self.name}=...)."
        )


class Trainer(NativeTrainer):
    """`trainer.Trainer` with Lightning's arguments; see its documentation for what they mean.

    With several devices, the program is restarted under ``trainer launch``, unless a launcher has
    started it. Several machines require a launcher, whose settings must match `devices` and
    `num_nodes`.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``.
        strategy: A name such as ``"ddp"``, ``"fsdp"`` or ``"deepspeed_stage_2"``, or an object of
            `trainer.lightning.pytorch.strategies`.
        devices: The number of processes, or a list of the CUDA devices to use, as indices into
            ``CUDA_VISIBLE_DEVICES``. ``"auto"`` takes the launcher's processes, else one for each
            CUDA device, or one on the CPU.
        num_nodes: The number of machines.
        precision: ``"32"``, ``"16-mixed"``, ``"bf16-mixed"``, or ``"64-true"``, ``"16-true"`` and
            ``"bf16-true"``, which convert the module and its batches.
        logger: True for TensorBoard, or CSV if it is not installed; False for none; or loggers.
        callbacks: The callbacks.
        fast_dev_run: See `trainer.Trainer`.
        max_epochs: The number of epochs; -1 for no limit. If no limit of any kind is given, 1000.
        min_epochs: The minimum number of epochs.
        max_steps: The number of updates; -1 for no limit.
        min_steps: The minimum number of updates.
        max_time: The maximum duration.
        limit_train_batches: The number of batches per epoch; a float is a fraction.
        limit_val_batches: The same for each validation loader.
        limit_test_batches: The same for each test loader.
        limit_predict_batches: The same for each prediction loader.
        overfit_batches: Train and validate on only this many batches.
        val_check_interval: A float is a fraction of an epoch. An int is a number of batches,
            counted anew in each epoch, and must be a multiple of `accumulate_grad_batches`. It may
            also be a time.
        check_val_every_n_epoch: Validate in every n-th epoch only; None counts the batches of
            `val_check_interval` across epochs.
        num_sanity_val_steps: The number of validation batches before training.
        log_every_n_steps: The number of updates between records; 0 records only values of epochs.
        enable_checkpointing: Whether to keep the last checkpoint.
        enable_progress_bar: Whether to show a progress bar.
        enable_model_summary: Whether to print the model's parameters.
        accumulate_grad_batches: The number of batches per update, or a dict of it by epoch, as in
            Lightning 1.
        gradient_clip_val: The limit of the gradients.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        deterministic: See `trainer.Trainer`.
        benchmark: ``torch.backends.cudnn.benchmark``.
        inference_mode: Has no effect, since evaluations never record gradients.
        use_distributed_sampler: Must be True on several processes, since the Trainer shards the
            data.
        profiler: ``"simple"``, ``"pytorch"``, or one of `trainer.lightning.pytorch.profilers`.
        detect_anomaly: See `trainer.Trainer`.
        barebones: See `trainer.Trainer`.
        sync_batchnorm: See `trainer.Trainer`.
        reload_dataloaders_every_n_epochs: See `trainer.Trainer`.
        default_root_dir: The folder that contains the run's ``lightning_logs/version_N``.
        plugins: None, or an empty list.
        enable_autolog_hparams: Must be True; `save_hyperparameters` has an argument for it.
        model_registry: Must be None.
        **others: Arguments of `trainer.Trainer` that Lightning's Trainer does not have.

    Raises:
        ValueError: An argument has an unsupported value.
        TypeError: There is no such argument.
    """

    _attribute_hints = ATTRIBUTES
    _takes_project_dir = False  # each start has a folder of its own

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: str | Strategy = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        fast_dev_run: bool | int = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: Any = None,
        limit_val_batches: Any = None,
        limit_test_batches: Any = None,
        limit_predict_batches: Any = None,
        overfit_batches: Any = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | Mapping[int, int] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: Any = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: Any = None,
        plugins: Any = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        **others: Any,
    ) -> None:
        added = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        if isinstance(logger, Iterable) and not isinstance(logger, str):
            logger = list(logger)  # configuration libraries have their own list types
        checked = {
            "accelerator": accelerator,
            "strategy": strategy,
            "devices": devices,
            "num_nodes": num_nodes,
            "precision": precision,
            "profiler": profiler,
            "gradient_clip_algorithm": gradient_clip_algorithm,
            "val_check_interval": val_check_interval,
            "check_val_every_n_epoch": check_val_every_n_epoch,
            "accumulate_grad_batches": accumulate_grad_batches,
            "use_distributed_sampler": use_distributed_sampler,
        }
        windows = accumulate_grad_batches
        if isinstance(windows, Mapping):
            added.append(GradientAccumulationScheduler(windows))
            windows = 1
        by_value = gradient_clip_algorithm == "value"
        settings: dict[str, Any] = {
            "sync_batchnorm": sync_batchnorm,
            "max_epochs": _epochs_of(max_epochs, limited=max_steps != -1 or max_time is not None),
            "min_epochs": min_epochs,
            "max_steps": None if max_steps == -1 else max_steps,
            "min_steps": min_steps,
            "max_time": max_time,
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches or None,
            "num_sanity_val_steps": num_sanity_val_steps,
            "log_every": sys.maxsize if log_every_n_steps == 0 else log_every_n_steps,
            "gradient_accumulation_steps": windows,
            "max_grad_value" if by_value else "max_grad_norm": gradient_clip_val or None,
            "deterministic": deterministic,
            "detect_anomaly": detect_anomaly,
            "barebones": barebones,
            "reload_dataloaders_every_n_epochs": reload_dataloaders_every_n_epochs,
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        with _translate_errors():
            without = _given_of(plugins, model_registry, enable_autolog_hparams)
            self._refuse(checked, settings, others | without, added, logger)
        cpu = str(accelerator).lower() == "cpu"
        _check_devices(devices, num_nodes, cpu=cpu)
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark
        self._nodes, self._ckpt_path = num_nodes, None
        dry = bool(fast_dev_run) or barebones
        self._loggers = [] if barebones else _loggers_of(logger, default_root_dir, dry=dry)
        if enable_model_summary is not False and not barebones:
            added += [] if _has(added, ModelSummary) else [ModelSummary()]
        if enable_checkpointing is not False and not dry and not _has(added, ours.ModelCheckpoint):
            added.append(ModelCheckpoint())
            added[-1]._is_default = True
        self.profiler = _profiler_of(profiler)
        if isinstance(self.profiler, PyTorchProfiler):
            added.append(self.profiler)
        passed: dict[str, Any] = settings | {
            "cpu": cpu,
            "callbacks": added,
            "fast_dev_run": fast_dev_run,
            "val_every": interval_of(val_check_interval, check_val_every_n_epoch, windows),
            "checkpointing": enable_checkpointing,
            "progress_bar": enable_progress_bar,
            "profile": "simple" if isinstance(self.profiler, SimpleProfiler) else None,
            "log_with": list(map(_tracker_of, [] if dry else self._loggers)) or None,
            "project_dir": self._run_dir(default_root_dir, dry=dry),
        }
        if precision is not None:
            passed |= {"mixed_precision": "no"} | PRECISIONS[str(precision)]
        passed = {name: value for name, value in passed.items() if value is not None}
        of_strategy = strategy_of(strategy).arguments
        handlers: list[Any] = list(of_strategy.get("kwargs_handlers", []))
        handlers += others.get("kwargs_handlers") or []
        both = {"kwargs_handlers": handlers} if handlers else {}
        with _translate_errors():
            super().__init__(**(passed | of_strategy | others | both))
        self._context = replace(self._context, may_be_empty=True, uncalled=uncalled)
        for each in self._loggers:
            each.trainer = self
        # The latest model, and the model whose configure_callbacks was called last.
        self._model = self._configured_model = None
        self._loaders: dict[str, Any] = {}
        self._status = TrainerStatus.INITIALIZING
        self._fn: TrainerFn | None = None
        self._root = os.path.normpath(os.path.expanduser(default_root_dir or Path.cwd()))
        self._checkpoints = None if self._loggers else Path(self._root, "checkpoints").absolute()
        self._arguments = {
            "check_val_every_n_epoch": check_val_every_n_epoch,
            "fast_dev_run": fast_dev_run,
            "gradient_clip_algorithm": gradient_clip_algorithm,
            "gradient_clip_val": gradient_clip_val,
            "limit_predict_batches": 1.0
            if limit_predict_batches is None
            else limit_predict_batches,
            "limit_test_batches": 1.0 if limit_test_batches is None else limit_test_batches,
            "limit_train_batches": 1.0 if limit_train_batches is None else limit_train_batches,
            "limit_val_batches": 1.0 if limit_val_batches is None else limit_val_batches,
            "log_every_n_steps": 50 if log_every_n_steps is None else log_every_n_steps,
            "max_steps": max_steps,
            "min_epochs": min_epochs or 0,
            "min_steps": min_steps,
            "num_sanity_val_steps": 2 if num_sanity_val_steps is None else num_sanity_val_steps,
            "overfit_batches": overfit_batches,
            "reload_dataloaders_every_n_epochs": reload_dataloaders_every_n_epochs,
            "val_check_interval": 1.0 if val_check_interval is None else val_check_interval,
        }

    check_val_every_n_epoch = _Argument()
    fast_dev_run: Any = _Argument()
    gradient_clip_algorithm = _Argument()
    gradient_clip_val = _Argument()
    limit_predict_batches = _Argument()
    limit_test_batches = _Argument()
    limit_train_batches = _Argument()
    limit_val_batches = _Argument()
    log_every_n_steps = _Argument()
    max_steps: Any = _Argument()
    min_epochs = _Argument()
    min_steps = _Argument()
    num_sanity_val_steps = _Argument()
    overfit_batches = _Argument()
    reload_dataloaders_every_n_epochs = _Argument()
    val_check_interval = _Argument()

    def _refuse(
        self,
        arguments: dict[str, Any],
        settings: dict[str, Any],
        others: dict[str, Any],
        callbacks: Sequence[Any],
        loggers: Any,
    ) -> None:
        """Raise one error for all unsupported arguments, hooks and values.

        Args:
            arguments: Arguments with values of Lightning's own.
            settings: Arguments of `trainer.Trainer`, translated.
            others: Arguments that Lightning's Trainer does not have, or that are not translated.
            callbacks: The callbacks.
            loggers: The argument `logger`.

        Raises:
            TypeError: An argument is unknown, a hook would never be called, or a value has a wrong
                type.
            ValueError: There are only unsupported values.
        """
        parameters = inspect.signature(NativeTrainer).parameters
        unknown = {name: value for name, value in others.items() if name not in parameters}
        wrong = [
            *argument_refusals(unknown, parameters).values(),
            *_of_lightning([*callbacks, arguments["strategy"], arguments["profiler"]]),
            *(text for each in callbacks for text in uncalled(each, "callback")),
            *(
                text
                for each in _listed(loggers)
                if isinstance(each, Logger)
                for text in uncalled(each, "logger")
            ),
            *_wrong_objects(arguments["profiler"], loggers),
        ]
        if arguments["devices"] in ("auto", -1, "-1", None):
            arguments["devices"] = _all_devices(arguments["accelerator"])
        values = wrong_values(arguments)
        if (
            str(arguments["accelerator"]).lower() in ("gpu", "cuda")
            and not torch.cuda.is_available()
        ):
            values.append(
                f"accelerator is {arguments['accelerator']!r}, but there is no CUDA device."
            )
        for error in _wrong_settings(settings):
            (wrong if isinstance(error, TypeError) else values).append(str(error))
        if wrong:
            raise_findings(wrong + values)
        if values:
            raise ValueError("\n".join(values))

    @property
    def stage_name(self) -> str | None:
        """``"fit"``, ``"validate"``, ``"test"`` or ``"predict"`` while it is running, else None."""
        return self._fn if self._status == "running" else None

    @property
    def state(self) -> TrainerState:
        """The running stage and the latest method."""
        stage = None
        if self.sanity_checking:
            stage = RunningStage.SANITY_CHECKING
        elif self.validating:
            stage = RunningStage.VALIDATING
        elif self.stage_name is not None:
            stage = RunningStage(self.stage_name.replace("fit", "train"))
        return TrainerState(self._status, self._fn, stage)

    @contextmanager
    def _stage(self, name: str, module: Any, datamodule: Any) -> Iterator[Any]:
        self._status, self._fn = TrainerStatus.RUNNING, TrainerFn(name)
        for logger in self._loggers:
            if not isinstance(logger, GeneralTracker):
                # Created before another thread uses it, as in Lightning.
                getattr(logger, "experiment", None)
        try:
            with super()._stage(name, module, datamodule) as stage:
                yield stage
        except BaseException:
            self._status = TrainerStatus.INTERRUPTED
            raise
        self._status = TrainerStatus.FINISHED

    def keep_indices(self) -> None:
        """Make an evaluation's samplers record the indices that they draw, for `indices_of`."""
        assert self._run is not None
        for epoch_iterator in self._run.eval_iterators:
            if epoch_iterator.sampler is not None:
                epoch_iterator.sampler.drawn = []

    def indices_of(self, batch_idx: int, dataloader_idx: int) -> list[Any]:
        """Return the dataset indices of a batch's samples; empty for a stream."""
        assert self._run is not None
        sampler = self._run.eval_iterators[dataloader_idx].sampler
        return sampler.drawn[batch_idx] if sampler is not None and sampler.drawn else []

    def _run_dir(self, root: Any, *, dry: bool) -> Path | None:
        """Return the folder of the run: that of the first file-based logger, or a new version."""
        for logger in self._loggers:
            folder: Path | None = getattr(logger, "run_dir", None)
            if folder is not None:
                return folder
        if dry:
            return None if root is None else Path(root)
        folder = Path(root or ".").expanduser().absolute() / "lightning_logs"
        return folder / f"version_{broadcast_object(next_version(folder))}"

    # -- entry points ------------------------------------------------------------------------------

    def fit(  # type: ignore[override]  # Lightning's names of arguments
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a model; see `trainer.Trainer.fit`.

        A second call without `ckpt_path` continues from the model's current weights, with new
        optimizers, in the next ``version_N``. Epochs and updates are counted on. If `max_epochs` or
        `max_steps` is already reached, it does nothing; raise ``trainer.fit_loop.max_epochs``
        first.
        """
        self._attach(model, datamodule)
        self._ckpt_path = ckpt_path
        self._loaders.update(train=train_dataloaders, val=val_dataloaders)
        with _translate_errors():
            if not self.fast_dev_run:
                if ckpt_path is None and self._fit is not None and not self._fits_again():
                    return
                ckpt_path = self._given_checkpoint(ckpt_path, WORDS)
                choose_folders(self, ckpt_path)
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def _begin_counters(self) -> Counters:
        if self._fit is None or self.fast_dev_run:
            return Counters()
        before, ended = self._fit.counters, self._fit.saving.module_state.ended
        return Counters(
            global_step=before.global_step,
            epoch=before.epoch,
            # An epoch cut by `max_steps` or a stop is over; an epoch cut by an error begins anew.
            epoch_complete=before.epoch_complete or ended,
            validations=before.validations,
        )

    def _fits_again(self) -> bool:
        """Prepare a second fit, in a separate folder; return False if nothing is left to do."""
        counters, length = self._begin_counters(), self._context.settings.length
        epochs = counters.epoch + counters.epoch_complete
        by_steps = replace(length, max_epochs=None, max_seconds=None)
        for limit in (by_steps, replace(length, max_steps=None, max_seconds=None)):
            if limit.reached(counters, lambda: 0.0):
                name = "epoch_loop.max_steps" if limit is by_steps else "max_epochs"
                if self.is_global_zero:
                    _logger.warning(
                        "fit trains nothing: this Trainer has trained %s epochs and %s updates, "
                        "and reached its %s. To train further, set trainer.fit_loop.%s before "
                        "fit; for a new run, create another Trainer.",
                        epochs,
                        counters.global_step,
                        name.rpartition(".")[2],
                        name,
                    )
                return False
        for logger in self._loggers:
            if isinstance(logger, InFolder):
                logger.next_version()
        folder = self._run_dir(self._root, dry=False) or self.project_dir
        self._context = replace(self._context, project=self._context.project.moved(folder))
        return True

    @property
    def fit_loop(self) -> _FitLoop:
        """The limits of a fit, which may be set for the next one."""
        return _FitLoop(self)

    def validate(  # type: ignore[override]  # Lightning's order of arguments
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate a model, by default that of the latest fit; see `trainer.Trainer.test`."""
        taken = self._evaluated(model, dataloaders, datamodule, ckpt_path, "val")
        with _translate_errors():
            metrics = super().validate(*taken)
        return self._printed(metrics, verbose=verbose)

    def test(  # type: ignore[override]  # Lightning's order of arguments
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Test a model, by default that of the latest fit; see `trainer.Trainer.test`."""
        taken = self._evaluated(model, dataloaders, datamodule, ckpt_path, "test")
        with _translate_errors():
            metrics = super().test(*taken)
        return self._printed(metrics, verbose=verbose)

    def predict(  # type: ignore[override]  # Lightning's order of arguments
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Return a model's predictions, all of them on rank 0; see `trainer.Trainer.predict`."""
        taken = self._evaluated(model, dataloaders, datamodule, ckpt_path, "predict")
        with _translate_errors():
            outputs = super().predict(
                taken[0], taken[1], taken[2], taken[3], return_predictions=return_predictions
            )
        keeps = return_predictions is not False
        return [] if outputs is None and keeps and not self.is_global_zero else outputs

    def _attach(self, model: Any, datamodule: Any) -> None:
        """Store the model, and add its callbacks.

        Raises:
            TypeError: A callback is from Lightning itself.
        """
        raise_findings([*_of_lightning([model, datamodule])])
        self._model = model
        # New ones would lose their state, for example which checkpoint is the best.
        if model is not self._configured_model:
            self._configured_model = model
            configured: Any = getattr(model, "configure_callbacks", list)() or []
            of_module = [configured] if isinstance(configured, Callback) else list(configured)
            kinds = tuple({type(callback) for callback in self.callbacks} - {Callback})
            replaced = tuple(
                kind for kind in kinds if any(isinstance(callback, kind) for callback in of_module)
            )
            others = [callback for callback in self.callbacks if type(callback) not in replaced]
            self.callbacks = others + of_module  # each stage moves callbacks that save to the end
        for callback in self.callbacks:
            callback.log, callback.log_dict = model.log, model.log_dict  # type: ignore[attr-defined]  # as under Lightning

    def _evaluated(
        self, model: Any, dataloaders: Any, datamodule: Any, ckpt_path: Any, stage: str
    ) -> tuple[Any, ...]:
        """Return the arguments of an evaluation, by default of the latest fit's best checkpoint."""
        module = model
        if model is None:
            model = self._model
            if model is None:
                raise TypeError(
                    "No model was passed, and this Trainer has not fitted one: pass model=."
                )
        self._attach(model, datamodule)
        if dataloaders is None and datamodule is None:
            datamodule = self.datamodule
            if datamodule is None and stage == "val":
                dataloaders = self._loaders.get("val")
        self._loaders[stage] = dataloaders
        if module is None and ckpt_path is None and not self.fast_dev_run:
            ckpt_path = "best" if self.checkpoint_callback is not None else None
        saver = self.checkpoint_callback
        if ckpt_path in WORDS and saver is not None and not self.fast_dev_run:
            if self._fit is None:
                choose_folders(self, ckpt_path)
            elif ckpt_path == "best" and saver.best_model_path:
                ckpt_path = saver.best_model_path
            if ckpt_path == "best" and saver.monitor is None:
                ckpt_path = "last"
        self._ckpt_path = ckpt_path
        return model, dataloaders, datamodule, ckpt_path

    def _given_checkpoint(self, ckpt_path: Any, words: Sequence[str]) -> Any:
        """Return the checked `ckpt_path`; collective.

        Each start has its own folder ``version_N``. So while it has no checkpoint, ``"last"`` and
        ``"auto"`` mean the newest checkpoint of earlier starts.
        """
        given = super()._given_checkpoint(ckpt_path, words)
        if given not in ("last", "auto"):
            return given
        if self._checkpoints is not None:
            return given  # `choose_folders` finds the newest one
        folders = self._context.folders.all_roots()
        folder = self.project_dir.parent
        versions = folder.glob("version_*/checkpoints")
        earlier = sorted(versions, key=lambda each: (len(each.parts[-2]), each.parts[-2]))
        newest = [
            path for root in earlier for path in committed(root) if not holds_weights_only(path)
        ]
        return broadcast_object(given if any(map(committed, folders)) or not newest else newest[-1])

    def _printed(self, metrics: list[dict[str, float]], *, verbose: bool) -> list[dict[str, float]]:
        if verbose and metrics:
            self.print(json.dumps(metrics, indent=2, default=float))
        return metrics

    def save_checkpoint(  # type: ignore[override]  # Lightning's name of the path
        self,
        filepath: Any = None,
        weights_only: bool | None = False,
        storage_options: Any = None,
        *,
        path: Any = None,
        **options: Any,
    ) -> Path | None:
        """Save a checkpoint of the latest fit; see `trainer.Trainer.save_checkpoint`.

        Raises:
            ValueError: `storage_options` are passed.
        """
        if storage_options is not None:
            raise ValueError(
                f"storage_options is {storage_options!r}, but a checkpoint is a folder of a file "
                "system: leave it out."
            )
        target = path if filepath is None else filepath
        return super().save_checkpoint(target, weights_only=bool(weights_only), **options)

    # -- attributes that programs read -------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0; after a fit the number of epochs."""
        epoch = super().current_epoch
        return epoch + 1 if self._fitting is None and self.epoch_complete else epoch

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The latest values, as tensors of shape () on the CPU."""
        return {name: as_tensor(value) for name, value in super().callback_metrics.items()}

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self._loggers

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self._loggers[0] if self._loggers else None

    @property
    def log_dir(self) -> str:
        """The folder of the first logger, or of the run; without loggers `default_root_dir`."""
        if not self._loggers:
            return self._root
        return str(getattr(self.logger, "run_dir", None) or self.project_dir)

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of checkpoints: without loggers ``checkpoints`` in `default_root_dir`."""
        return self._checkpoints or super().checkpoint_dir

    @property
    def default_root_dir(self) -> str:
        """The argument, or the working directory when the Trainer was created."""
        return self._root

    @property
    def num_devices(self) -> int:
        """The number of processes on this machine."""
        return self.accelerator.num_processes // self.num_nodes

    @property
    def device_ids(self) -> list[int]:
        """The device indices of this machine's processes."""
        number = self.num_devices
        return list(range(number)) if number > 1 else [self.accelerator.device.index or 0]

    @property
    def node_rank(self) -> int:
        """The rank of this machine."""
        return self.global_rank // self.num_devices

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return max(self._nodes, environment.read_int("GROUP_WORLD_SIZE") or 1)

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    lightning_module = model

    @property
    def strategy(self) -> _Strategy:
        """The object for programs that use Lightning's strategy."""
        return _Strategy(self)

    _accelerator_connector = strategy  # callbacks of optuna and darts read its `is_distributed`

    @property
    def train_dataloader(self) -> Any:
        """The loaders passed to `fit`."""
        return self._loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The loaders passed to `fit` or `validate`."""
        return self._loaders.get("val")

    @property
    def test_dataloaders(self) -> Any:
        """The loaders passed to `test`."""
        return self._loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loaders passed to `predict`."""
        return self._loaders.get("predict")

    @property
    def ckpt_path(self) -> Any:
        """The `ckpt_path` passed to the latest `fit`, `validate`, `test` or `predict`."""
        return self._ckpt_path

    @property
    def training(self) -> bool:
        """Whether a fit is running or being set up, and is not validating."""
        fits = self.stage_name == "fit" and not self.sanity_checking
        return fits and (self._fitting is None or super().training)

    @property
    def validating(self) -> bool:
        """Whether a validation is running, other than the sanity check."""
        within = self.stage_name == "fit" and self._fitting is not None and not self.training
        return self.stage_name == "validate" or (within and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self.stage_name == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self.stage_name == "predict"

    @property
    def interrupted(self) -> bool:
        """Whether an exception or a signal has ended the latest stage."""
        return self._status == TrainerStatus.INTERRUPTED

    @property
    def evaluating(self) -> bool:
        """Whether a validation, a sanity check or a test is running."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last one of its epoch."""
        run = self._fitting
        if run is None:
            return False
        return self.epoch_complete or run.batch_idx + 1 == self.num_training_batches

    @property
    def num_val_batches(self) -> list[int | None]:
        """This process's number of batches of each loader in the current evaluation.

        During and after a fit, those of validation.
        """
        fit = self._fit
        return (
            fit.num_eval_batches if self._run is None and fit is not None else self.num_eval_batches
        )

    num_sanity_val_batches = num_test_batches = num_predict_batches = num_val_batches

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints."""
        return [
            callback for callback in self.callbacks if isinstance(callback, ours.ModelCheckpoint)
        ]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop early."""
        return [callback for callback in self.callbacks if isinstance(callback, ours.EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that stops early."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar."""
        bars = (ours.ProgressBar, ours.RichProgressBar)
        return next((callback for callback in self.callbacks if isinstance(callback, bars)), None)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches per update; callbacks may set it during a fit, for the next update."""
        return self.gradient_accumulation_steps

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self.gradient_accumulation_steps = batches

    @property
    def precision(self) -> str:
        """The precision, under Lightning's name."""
        mixed, dtype = self.accelerator.mixed_precision, self.accelerator.precision.dtype
        options = {"mixed_precision": mixed} if dtype is None else {"dtype": str(dtype)[6:]}
        return next((name for name, arguments in PRECISIONS.items() if arguments == options), mixed)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with their intervals."""
        return self.schedulers

    @property
    def scaler(self) -> Any:
        """The gradient scaler of ``"16-mixed"``, else None."""
        return self.accelerator.scaler

    @property
    def enable_validation(self) -> bool:
        """Whether the fit has validation data and, as far as known, will reach a validation."""
        return self.has_validation

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments of a custom distributed sampler; None with one process."""
        if self.world_size == 1:
            return None
        engine = self.accelerator.engine
        return {"num_replicas": engine.parallel.dp_size, "rank": engine.parallel.dp_rank}

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Inside the block, create tensors on the device, with the dtype of ``"…-true"``.

        Args:
            empty_init: Has no effect; parameters are always initialised.
        """
        with self.accelerator.device, self.accelerator.precision.new_tensors():
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the main process."""
        self.accelerator.print(*args, **kwargs)


class _FitLoop:
    """The attributes of Lightning's ``fit_loop`` that programs use: the limits of the next fit.

    Attributes:
        max_epochs: The number of epochs, including earlier fits, after which it ends; -1 for no
            limit.
        epoch_loop: An object with `max_steps`, the same in updates.
    """

    def __init__(self, trainer: Trainer) -> None:
        vars(self).update(_trainer=trainer, epoch_loop=self)

    def __getattr__(self, name: str) -> Any:
        if name not in ("max_epochs", "max_steps"):
            raise AttributeError(f"trainer.fit_loop has no {name!r}: only max_epochs can be set.")
        limit = getattr(self._trainer._context.settings, name)
        return -1 if limit in (None, sys.maxsize) else int(limit)

    def __setattr__(self, name: str, limit: int | None) -> None:
        getattr(self, name)
        context = self._trainer._context
        if self._trainer.stage_name is not None:
            raise AttributeError(f"trainer.fit_loop.{name} cannot be set while the Trainer runs.")
        endless = sys.maxsize if name == "max_epochs" else None
        limits: Any = {name: endless if limit == -1 else limit}
        self._trainer._context = replace(context, settings=replace(context.settings, **limits))


class _Strategy:
    """The attributes of Lightning's strategies that programs use; ``isinstance`` works too."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.root_device = trainer.accelerator.device
        self.world_size = trainer.world_size
        self.is_distributed = trainer.world_size > 1
        self.global_rank = trainer.global_rank
        self.local_rank = trainer.local_rank
        self.is_global_zero = trainer.is_global_zero
        self.model = trainer.model

    @property  # type: ignore[misc]  # it can be set elsewhere
    def __class__(self) -> Any:
        kinds = {
            DistributedType.NO: SingleDeviceStrategy,
            DistributedType.XLA: SingleDeviceStrategy,
            DistributedType.FSDP: FSDPStrategy,
            DistributedType.DEEPSPEED: DeepSpeedStrategy,
        }
        return kinds.get(self._trainer.accelerator.distributed_type, DDPStrategy)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._trainer.accelerator.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one process's object on all processes."""
        return broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return the mean or the sum of a tensor over the processes."""
        return self._trainer.accelerator.reduce(tensor, reduce_op)


def _of_lightning(objects: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each object of Lightning's own classes."""
    for owner in objects:
        for base in type(owner).__mro__:
            if base.__module__.startswith(("lightning.", "pytorch_lightning.")):
                yield (
                    f"{type(owner).__name__} is of {base.__module__}.{base.__name__}: import that "
                    "from trainer.lightning, as `trainer migrate FILE --write` does. Where the "
                    "class is a library's, start the program with `trainer launch --as_lightning`, "
                    'or call trainer.lightning.enter_as("lightning") before the library is '
                    "imported."
                )
                break


def _given_of(plugins: Any, model_registry: Any, autolog: bool) -> dict[str, Any]:
    """Return the untranslated arguments that request something."""
    arguments = {"plugins": plugins, "model_registry": model_registry}
    arguments = {name: value for name, value in arguments.items() if value}
    return arguments if autolog else {**arguments, "enable_autolog_hparams": autolog}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _has(callbacks: Sequence[Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _epochs_of(epochs: int | None, *, limited: bool) -> int | None:
    """Return `max_epochs` of our Trainer; `limited` is whether something else ends the run."""
    if epochs == -1:
        return None if limited else sys.maxsize
    return 1000 if epochs is None and not limited else epochs


def _wrong_objects(profiler: Any, loggers: Any) -> Iterator[str]:
    """Yield a sentence for a profiler and for each logger of an unsupported type."""
    if not isinstance(profiler, (PassThroughProfiler, str, type(None))):
        yield (
            f"profiler is {profiler!r}; it must be 'simple', 'pytorch' or an object of "
            "trainer.lightning.pytorch.profilers."
        )
    for logger in _listed(loggers):
        valid = isinstance(logger, (Logger, bool, type(None)))
        if not valid and not callable(getattr(logger, "log_metrics", None)):
            yield (
                f"logger is {logger!r}; it must be a bool, a logger of "
                "trainer.lightning.pytorch.loggers, a subclass of its Logger, or a list of these."
            )


def _wrong_settings(settings: Mapping[str, Any]) -> Iterator[Exception]:
    """Yield the error of each argument of `trainer.Trainer` that is invalid by itself."""
    for name, value in settings.items():
        try:
            Settings(**{name: value})
        except (TypeError, ValueError) as error:
            yield error


def _check_devices(devices: Any, nodes: int, *, cpu: bool) -> None:
    """Check that the requested number of processes is running, or start them.

    Without a launcher, this process becomes ``trainer launch`` for the same program, which then
    runs from its beginning in each process.

    Raises:
        ValueError: The number differs, or the program cannot be restarted.
    """
    launched = environment.detect_launch()
    single = launched.launcher == "none" and not dist.is_initialized()
    numbers = device_numbers(devices)
    chosen = None if numbers is None else [int(each) for each in numbers]
    if devices in ("auto", -1, "-1", None):
        number = torch.cuda.device_count() if single and not cpu else 0
    elif chosen is not None:
        number = len(chosen)
    else:
        number = int(devices)
    on_cuda = not cpu and torch.cuda.is_available()
    visible = environment.read("CUDA_VISIBLE_DEVICES")
    if chosen is not None and on_cuda and single and max(chosen) >= torch.cuda.device_count():
        raise ValueError(
            f"devices={devices!r}, but {torch.cuda.device_count()} CUDA devices are visible: name "
            "them by their numbers from 0."
        )
    if single and nodes == 1 and number > 1:
        launch(number, cpu=cpu, gpu_ids=_visible(chosen, visible) if on_cuda else None)
    name = None
    if chosen is not None and on_cuda and nodes == 1:
        name = _device_of(chosen, launched.local_rank, visible, launched=not single)
    with environment.patch_environment(**({"ACCELERATE_TORCH_DEVICE": name} if name else {})):
        running = PartialState(cpu=cpu).num_processes
    device = PartialState().device
    if name is not None and str(device) != name:
        raise ValueError(
            f"devices={devices!r} selects {name}, but this process has already used {device}: "
            "create the Trainer first, or start the program with CUDA_VISIBLE_DEVICES."
        )
    if number and number * nodes != running:
        raise ValueError(
            f"devices={devices!r} and num_nodes={nodes} ask for {number * nodes} processes, but "
            f"{running} {'is' if running == 1 else 'are'} running: start the program with "
            f"`trainer launch --num_processes {number * nodes} script.py`."
        )


def _all_devices(accelerator: Any) -> int:
    """Return the number of processes for ``devices="auto"``."""
    launched = environment.detect_launch()
    if launched.launcher == "none" and not dist.is_initialized():
        return 1 if str(accelerator).lower() == "cpu" else max(torch.cuda.device_count(), 1)
    return dist.get_world_size() if dist.is_initialized() else launched.world_size


def _visible(chosen: Sequence[int] | None, visible: str | None) -> list[str] | None:
    """Return the names of devices for ``CUDA_VISIBLE_DEVICES``, given its present value."""
    if chosen is None:
        return None
    names = visible.split(",") if visible else None
    return [str(index) if names is None else names[index].strip() for index in chosen]


def _device_of(
    chosen: Sequence[int], local_rank: int, visible: str | None, *, launched: bool
) -> str | None:
    """Return the device of a process; None if it is the default one.

    Args:
        chosen: The indices of all devices.
        local_rank: The local rank of this process.
        visible: ``CUDA_VISIBLE_DEVICES``, which a launcher may already have set to these devices.
        launched: Whether a launcher has started the process.
    """
    selected = visible is not None and len(visible.split(",")) == len(chosen)
    if (launched and selected) or local_rank >= len(chosen):
        return None
    return f"cuda:{chosen[local_rank]}"


def interval_of(interval: Any, epochs: int | None, windows: Any) -> str | int | None:
    """Combine Lightning's two arguments to one interval.

    Raises:
        ValueError: They contradict each other.
    """
    wrong = wrong_interval(
        {
            "val_check_interval": interval,
            "check_val_every_n_epoch": epochs,
            "accumulate_grad_batches": windows,
        }
    )
    if wrong is not None:
        raise ValueError(wrong)
    if isinstance(interval, (str, timedelta, Mapping)):
        if isinstance(interval, Mapping):
            interval = timedelta(**interval)
        if isinstance(interval, str):
            days, hours, minutes, seconds = map(int, interval.split(":"))
            interval = timedelta(days, seconds, 0, 0, minutes, hours)
        return f"{interval.total_seconds():g} seconds"
    anew = f"of every {epochs} epochs"
    if isinstance(interval, int) and not isinstance(interval, bool):
        size = windows if isinstance(windows, int) else 1
        return interval // size if epochs is None else f"{interval} batches {anew}"
    if interval is not None and not math.isclose(interval, 1.0):
        return f"{interval!r} epochs {anew}"
    return None if epochs == 1 else f"{epochs} epochs"


def _profiler_of(profiler: Any) -> PassThroughProfiler:
    kinds = {None: PassThroughProfiler, "simple": SimpleProfiler, "pytorch": PyTorchProfiler}
    return kinds[profiler]() if profiler in kinds else profiler


def _tracker_of(logger: Logger) -> GeneralTracker:
    return logger if isinstance(logger, GeneralTracker) else LoggerTracker(logger)


def _loggers_of(argument: Any, root: Any, *, dry: bool) -> list[Any]:
    """Return the loggers given by an argument, or in a trial run one that does nothing."""
    if argument is False or argument == []:
        return []
    if dry:
        return [DummyLogger()]
    if argument is None or argument is True:
        folder = Path(root or ".").expanduser().absolute()
        version = broadcast_object(next_version(folder / "lightning_logs"))
        kind: Any = TensorBoardLogger if is_installed(TensorBoardLogger) else CSVLogger
        return [kind(folder, version=version)]
    for logger in (loggers := _listed(argument)):
        if isinstance(logger, Logger):
            logger.share_version()
    return loggers
