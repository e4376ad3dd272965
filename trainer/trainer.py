"""The `Trainer`: its arguments and entry points `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn

from callbacks import (
    Callback,
    GradientAccumulationScheduler,
    Interval,
    PredictionWriter,
    Progress,
)
from trackers import GeneralTracker
from trackers.base import Status
from trackers.registry import TrackerChoice
from trainer.accelerator import Accelerator
from trainer.checkpoint.resolve import WORDS
from trainer.checkpoint.save import SaveRequest, is_writer_rank, remove_or_warn
from trainer.checks import check_arguments, check_bools, suggest_arguments
from trainer.configuration import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from trainer.data.epoch_iterator import EpochIterator
from trainer.distributed.guards import check_collective
from trainer.distributed.watchdog import watched
from trainer.engines.base import Engine, EngineOptions
from trainer.errors import Preempted, module_logger
from trainer.files import absolute_path
from trainer.hints import EVALUATION_ARGUMENTS, FIT_ARGUMENTS, TRAINER_ARGUMENTS, TRAINER_ATTRIBUTES
from trainer.loops import setup
from trainer.loops.buffers import require_readable, update_batch_norm
from trainer.loops.config import (
    Limit,
    Profile,
    Settings,
    accelerator_for_trainer,
    callback_list,
    check_barebones,
    project_dir_of,
    with_default_callbacks,
)
from trainer.loops.dataloaders import FitLoaders, are_empty, take_datamodule
from trainer.loops.evaluate import TEST, VALIDATION, evaluate
from trainer.loops.fit import fit, should_end
from trainer.loops.fit_state import require_space, save_run, save_weights_alone
from trainer.loops.lifecycle import (
    RunContext,
    Stage,
    one_module,
    stage_of,
    steps_of,
    warn_of_concurrent_runs,
)
from trainer.loops.predict import PredictionFiles, predict
from trainer.loops.preemption import Stopping, requeue, watch_signals
from trainer.loops.preflight import check_checkpoint_names
from trainer.loops.profiler import SAVING, Begin, profiling
from trainer.loops.recorder import Recorder
from trainer.loops.run_directory import Project
from trainer.loops.state import Counters, FitRun, Run
from trainer.metrics import MetricStore, to_floats
from trainer.module import TrainModule
from trainer.optim.clipping import validate_limits
from trainer.optim.configure import SchedulerEntry
from trainer.optim.finite import Policy
from trainer.optim.groups import add_group, scale_group
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.rng import deterministic, set_seed
from trainer.tracebacks import HiddenFrames

logger = module_logger(__name__)
_OF_THE_ACCELERATOR = (  # arguments for a new accelerator
    "mixed_precision",
    "cpu",
    "dataloader_config",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "dynamo_backend",
    "dynamo_plugin",
    "kwargs_handlers",
    "parallelism_config",
    "engine",
)
_NOT_IN_A_TRIAL = {"reload_dataloaders_every_n_epochs": 0, "profile": None, "barebones": False}


@cache
def _defaults() -> dict[str, Any]:
    """Return the arguments of the `Trainer` with their defaults."""
    return {
        name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()
    }


class Trainer:
    """Trains, validates, tests and predicts with a `TrainModule`.

    Example::

        trainer = Trainer(max_epochs=10, log_with="tensorboard", project_dir="runs/digits")
        trainer.fit(module, train_loader, val_loader)
        metrics = trainer.test(module, test_loader)
        predictions = trainer.predict(module, test_loader)

    Args:
        max_epochs: Stop after this many epochs. `fit` needs one of `max_epochs`, `max_steps` and
            `max_time`.
        min_epochs: Do not stop before this many epochs, even if a callback requests it.
        max_steps: Stop after this many updates.
        min_steps: Do not stop before this many updates, even if a callback requests it.
        max_time: Stop at the first update after this time: ``"30 minutes"``, ``"00:12:00:00"``
            (days, hours, minutes, seconds), a ``timedelta``, or its arguments as a dict. Without
            `max_epochs` and `max_steps`, it is the length of the whole run, added up over restarts.
            With one of them, it limits each start, including set-up. An unfinished run is then
            saved and ends as after a signal (`Preempted`, exit code 124), and the next start
            resumes it.
        val_every: When to validate: an interval such as ``"1 epoch"``, ``"500 steps"``,
            ``"30 minutes"``, ``"1e9 items"``, or an int meaning steps.
        num_sanity_val_steps: Batches of each validation loader to run before training, rounded up
            to the same number on each process; 0 for none, -1 for all.
        limit_train_batches: Batches per epoch, over all processes; a float is a fraction of all.
        limit_val_batches: The same for each validation loader; 0 disables validation.
        limit_test_batches: The same for each test loader.
        limit_predict_batches: The same for each prediction loader.
        overfit_batches: Train and validate on only this many batches of each loader: the first,
            unshuffled.
        reload_dataloaders_every_n_epochs: Request new training and validation loaders from the
            module or the `DataModule` at the beginning of every n-th epoch; 0 for never. A run that
            resumes inside an epoch creates them again, with the `current_epoch`, `global_step` and
            RNG states of the original call and the datamodule's state from the checkpoint.
        fast_dev_run: Run this many batches (True is 1) of every loader on each process and write no
            files.
        gradient_accumulation_steps: Micro-batches per update, on each process. The gradient is that
            of the whole global batch, however it is split. None takes the value of `accelerator`,
            else ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, which the launcher sets, else 1.
        max_grad_norm: Clip the total norm of the gradients. Optimizers for which
            `configure_optimizers` sets a limit are excluded.
        max_grad_value: Clip each element of the gradients, with the same exception.
        non_finite: What to do if the loss or gradients of an update hold NaN or infinity:
            ``"stop"`` ends the run with a ``FloatingPointError`` that names the parameters,
            ``"skip"`` skips the update and counts it, ``"ignore"`` does not check. All processes
            decide the same. Overflows that the fp16 scaler handles are counted as skipped. In
            manual optimisation only gradients are checked, and ``"skip"`` raises an error.
        max_skipped_in_row: End the run after this many skipped updates in a row.
        deterministic: Call ``torch.use_deterministic_algorithms`` for each run: operations without
            a deterministic implementation raise; with ``"warn"`` they warn. On CUDA they need the
            environment variable ``CUBLAS_WORKSPACE_CONFIG``. The Trainer sets it; set it yourself
            if the script multiplies matrices on the GPU before creating the Trainer.
        detect_anomaly: Make autograd report the forward operation whose gradient is NaN; slow.
        sync_batchnorm: Convert batch normalisation to ``torch.nn.SyncBatchNorm`` if there are
            several processes.
        seed: Seeds Python, numpy and torch now, and again when `fit` begins; it also determines the
            order of the data. Without it, the order is derived from torch's seed.
        log_with: Trackers: a name, class or instance, or a list of them, or ``"all"``.
        log_every: When to log the values of an update, an interval such as ``"50 steps"``.
        project_name: The project name for trackers; by default the project folder's name.
        run_name: The name of the run for trackers.
        project_dir: The folder of checkpoints, ``metrics.jsonl`` and trackers' files. A relative
            path is resolved against the working directory when the Trainer is created. None creates
            a new folder under ``runs/`` for each Trainer.
        progress_bar: Show a progress bar on the main process. In a log file, it is one line per
            epoch.
        callbacks: Called in this order, except that callbacks that save checkpoints come last.
        profile: ``"simple"`` prints a table at the end of a fit, validation, test or prediction:
            the times of all parts, which add up to the total, and advice for the largest part. It
            is also written to ``profile-<stage>.json`` in `project_dir`. Times are rank 0's. On
            CUDA they are measured with events in the device's stream, without synchronising;
            elsewhere with the host's clock. `ProfileKwargs` profiles each process with torch's
            profiler, as `Accelerator.profile` does. A step of its schedule is an update, or a batch
            of an evaluation. Without `output_trace_dir` or `on_trace_ready`, traces are written to
            ``profile-<stage>`` in `project_dir`.
        barebones: Disable everything optional, to measure training alone: progress bar,
            checkpoints, trackers, ``metrics.jsonl``, the sanity check, the check of `non_finite`,
            and `self.log` in training. No files are written. The trained weights are the same as
            without it. Arguments that enable or configure these parts raise an error: `callbacks`,
            `log_with`, `project_name`, `run_name`, `log_every`, `num_sanity_val_steps`,
            `non_finite`, `max_skipped_in_row`, `profile`, `fast_dev_run`, `detect_anomaly`,
            `slurm_requeue`. Their defaults and values that disable a part are accepted, as are
            `progress_bar` and `checkpointing`; `project_dir` is only used to find `ckpt_path`.
        slurm_requeue: Requeue the SLURM job when SIGUSR1 (``sbatch --signal=USR1@120``) or
            `max_time` has ended the run.
        checkpointing: Keep the last checkpoint. A `ModelCheckpoint` among the callbacks replaces
            this rule.
        accelerator: An existing `Accelerator`, which replaces the arguments below. Its
            `project_configuration` replaces `project_config`. An `Accelerator` with settings for
            custom loops, such as trackers, raises an error.
        dtype: Convert the module and the floating-point tensors of its batches to ``"bfloat16"``,
            ``"float64"`` or another type of torch, and create tensors in steps and
            `configure_model` in this type. `mixed_precision` instead keeps the weights in float32.
        mixed_precision: See `Accelerator`.
        cpu: See `Accelerator`.
        dataloader_config: See `Accelerator`. The Trainer gives each process whole batches, reads on
            every process and never repeats samples; options that contradict this raise an error.
        deepspeed_plugin: See `Accelerator`.
        fsdp_plugin: See `Accelerator`.
        torch_tp_plugin: See `Accelerator`.
        megatron_lm_plugin: See `Accelerator`.
        dynamo_backend: See `Accelerator`. The Trainer compiles the module's `training_step` and
            other steps, and logs the metric ``recompilations``.
        dynamo_plugin: See `Accelerator`; replaces `dynamo_backend`, with more options.
        kwargs_handlers: See `Accelerator`.
        parallelism_config: See `Accelerator`.
        engine: See `Accelerator`.
        project_config: Its `project_dir` is the default of `project_dir`. With `save_on_each_node`,
            each machine keeps complete checkpoints, for machines that share no disk.
            `ModelCheckpoint` decides how many are kept.

    Attributes:
        callbacks: In the order in which they are called.
        accelerator: The `Accelerator`: this process's device and the process group.

    Raises:
        ValueError: An argument has an invalid value.
        TypeError: An argument has the wrong type.
        NotImplementedError: An engine or option is not supported yet.
    """

    _attribute_hints: ClassVar[Mapping[str, str]] = TRAINER_ATTRIBUTES
    _takes_project_dir: ClassVar[bool] = True

    @suggest_arguments(
        **TRAINER_ARGUMENTS,
        accelerator="an Accelerator, or leave it out: the device is selected automatically, and "
        "cpu=True forces the CPU",
    )
    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, float] | None = None,
        val_every: Interval | int | str = "1 epoch",
        num_sanity_val_steps: int = 2,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        overfit_batches: Limit = None,
        reload_dataloaders_every_n_epochs: int = 0,
        fast_dev_run: bool | int = False,
        gradient_accumulation_steps: int | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        non_finite: Policy = "stop",
        max_skipped_in_row: int = 50,
        deterministic: bool | Literal["warn"] = False,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        seed: int | None = None,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None = None,
        log_every: Interval | int | str = "50 steps",
        project_name: str | None = None,
        run_name: str | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        progress_bar: bool = True,
        callbacks: Sequence[Callback] | Callback | None = None,
        checkpointing: bool = True,
        profile: Profile | None = None,
        barebones: bool = False,
        slurm_requeue: bool = False,
        accelerator: Accelerator | None = None,
        dtype: str | torch.dtype | None = None,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        engine: Callable[[EngineOptions], Engine] | None = None,
        project_config: ProjectConfiguration | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        check_bools(
            progress_bar=progress_bar, checkpointing=checkpointing, slurm_requeue=slurm_requeue
        )
        if not isinstance(accelerator, (Accelerator, type(None))):
            raise TypeError(
                f"accelerator is {accelerator!r}; it must be an Accelerator. The device is "
                "selected automatically; cpu=True forces the CPU."
            )
        if project_config is None:
            project_config = (
                ProjectConfiguration() if accelerator is None else accelerator.project_configuration
            )
        project_dir = project_dir_of(project_config, project_dir)
        settings = Settings.from_arguments(arguments)
        if barebones:
            check_barebones(arguments, _defaults())
        if seed is not None:
            set_seed(seed)
        self.accelerator = accelerator_for_trainer(
            accelerator,
            settings.gradient_accumulation_steps,
            settings.dtype,
            **{name: arguments[name] for name in _OF_THE_ACCELERATOR},
        )
        self.callbacks = with_default_callbacks(
            callbacks,
            progress_bar=progress_bar and not barebones,
            checkpointing=checkpointing and settings.writes,
        )
        self._context = RunContext(
            settings=settings,
            accelerator=self.accelerator,
            project=Project(
                project_dir,
                name=project_name,
                run_name=run_name,
                log_with=log_with,
                writes=settings.writes,
                on_each_node=project_config.save_on_each_node,
            ),
            callbacks=self.callbacks,
            trainer=self,
        )
        self._slurm_requeue = slurm_requeue
        self._begin()

    def __repr__(self) -> str:
        accelerator, folder = self.accelerator, self._context.project.folder
        return (
            f"<{type(self).__name__} on {accelerator.num_processes} x {accelerator.device.type}, "
            f"{self.global_step} updates done, in {folder}>"
        )

    def _begin(self) -> None:
        """Initialise the state without a run."""
        self._counters = Counters()
        self._run: Run | None = None  # the current run
        self._fit: FitRun | None = None  # the latest fit, perhaps finished
        self._fit_loaders: FitLoaders | None = None  # of the latest fit
        self._recorder: Recorder | None = None
        self._stop_requested = False
        self._failed_in = ""  # the position at which a fit failed
        self._datamodule: Any = None
        self._module: TrainModule | None = None

    if not TYPE_CHECKING:  # so that a type checker still reports missing attributes

        def __getattr__(self, name: str) -> Any:
            hint = self._attribute_hints.get(name)
            raise AttributeError(
                f"Trainer has no attribute {name!r}" + (f": {hint}." if hint else ".")
            )

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "callbacks" and name in vars(self):  # all parts share this list
                self.callbacks[:] = callback_list(value)
                return
            if not hasattr(type(self), name):
                if hint := self._attribute_hints.get(name):
                    raise AttributeError(
                        f"Trainer has no attribute {name!r}: {hint}; setting it has no effect."
                    )
                if name in _defaults() and name not in ("accelerator", "callbacks"):
                    raise AttributeError(
                        f"Trainer.{name} cannot be set after the Trainer is created: pass "
                        f"Trainer({name}=...)."
                    )
            super().__setattr__(name, value)

    def _trial(
        self, accelerator: Any, callbacks: list[Callback], steps: int, **settings: Any
    ) -> Trainer:
        """Return a copy of this Trainer that writes nothing, for `trainer.tuning`.

        Args:
            accelerator: Replaces this Trainer's.
            callbacks: Replace this Trainer's.
            steps: Updates of a fit.
            **settings: Fields of `Settings` to replace.
        """
        trial = object.__new__(type(self))
        vars(trial).update(vars(self), accelerator=accelerator, callbacks=callbacks)
        trial._context = replace(
            self._context,
            settings=replace(self._context.settings, **(_NOT_IN_A_TRIAL | settings)),
            accelerator=accelerator,
            project=self._context.project.unwritten(),
            callbacks=callbacks,
            trainer=trial,
            trial_steps=steps,
            added=[],
        )
        trial._slurm_requeue = False
        trial._begin()
        return trial

    # -- entry points --------------------------------------------------------------------------

    # Without `suggest_arguments`, whose wrapper would be one more frame around each step.
    def fit(
        self,
        module: TrainModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainModule | None = None,
        **unknown: NoReturn,
    ) -> None:
        """Train a module.

        Args:
            module: Defines `training_step` and `configure_optimizers`.
            train_dataloaders: The training loader, written as for one process; the Trainer shards
                the data over the ranks. A list or dict of loaders gives joint batches, see
                `CombinedLoader`. A `DataModule` may be passed instead.
            val_dataloaders: The validation loader or a list of them; optional.
            datamodule: A `DataModule`, or any object with some of its methods, instead of the
                loaders.
            ckpt_path: The checkpoint to resume from: None for a new run, a path, ``"last"`` or
                ``"best"`` of this `project_dir`, or ``"auto"``: the last one if there is one.
                Checkpoints later than this one are renamed to ``abandoned-…``. A weights-only
                checkpoint starts a new run from its weights (all must match unless the module's
                `strict_loading` is False).
            model: Another name of `module`.
            **unknown: Any other argument is an error, which names the closest one.

        Raises:
            ValueError: The arguments, the module or the data are not valid for a run; or another
                run uses `project_dir` or has checkpoints in it.
            TypeError: The module lacks a method, a method returned a wrong type, or an argument is
                unknown.
            CheckpointError: The requested checkpoint is missing, damaged or does not match.
            Preempted: SIGTERM, SIGINT or SIGUSR1 arrived, or `max_time` has passed, and the run was
                saved. It is a subclass of ``SystemExit``.
        """
        if unknown:
            names = [*inspect.signature(Trainer.fit).parameters][1:-1]  # without self and unknown
            check_arguments("Trainer.fit", names, FIT_ARGUMENTS, unknown)
        if self._context.settings.length.endless:
            raise ValueError(
                "Nothing ends this run: max_epochs and max_steps are both None. Pass one of them "
                "to the Trainer, or max_time."
            )
        self._check_idle("fit")
        module = one_module("fit", module, model)
        ckpt_path = self._given_checkpoint(ckpt_path, ("last", "best"))
        train_dataloaders, datamodule = take_datamodule(
            "train_dataloaders", train_dataloaders, datamodule
        )
        self._fit_loaders, self._failed_in = None, "set-up"
        loaders = FitLoaders(self._context, module, train_dataloaders, val_dataloaders, datamodule)
        with (
            HiddenFrames(lambda: self._failed_in),
            watch_signals(
                announces=self.accelerator.is_local_main_process,
                budget=self._context.settings.budget,
            ) as watch,
            self._context.project.alone(lambda: self._context.folders.of_callbacks) as (
                lock_added,
                tell_run_id,
            ),
            self._profiling("fit") as begin_profile,
            self._stage("fit", module, datamodule) as stage,
        ):
            lock_added()
            chosen, weights = setup.choose_start(stage, ckpt_path)
            begun = self._begin_counters() if chosen is None else Counters()
            origin = loaders.begin(chosen, begun)
            # Set for the hooks.
            self._counters = replace(begun, epoch=origin.epoch, global_step=origin.step)
            val_iterators = loaders.make()
            self._fit_loaders = loaders
            if are_empty([loaders.epoch_iterator]):
                return
            run = setup.make_fit_run(
                stage, loaders, val_iterators, chosen, begun, Stopping(watch.exit_code)
            )
            setup.start_fit(run, chosen, weights, ckpt_path)
            self._run = self._fit = run
            run.stopping.request(self._stop_requested)
            self._recorder, self._counters = run.recorder, run.counters
            tell_run_id(run.saving.run_id)
            begin_profile(run, [loaders.epoch_iterator])
            self.accelerator._run_engine = run.engine
            try:
                try:
                    fit(run)
                    run.saving.writer.wait()
                except Preempted as ended:
                    watch.answered = True
                    if self._slurm_requeue and self.accelerator.is_main_process:
                        requeue(int(ended.code or 0))
                    run.saving.wait_for_uploads()
                    raise
                run.saving.wait_for_uploads()
            except KeyboardInterrupt:
                run.saving.abandon()
                raise
            finally:
                self.accelerator._run_engine = None
                run.engine.close()

    @suggest_arguments(**EVALUATION_ARGUMENTS)
    def validate(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate a module; see `test`."""
        module = one_module("validate", module, model)
        with self._evaluation("validate", module, dataloaders, datamodule, ckpt_path) as run:
            return [] if are_empty(run.eval_iterators) else evaluate(run, VALIDATION)

    @suggest_arguments(**EVALUATION_ARGUMENTS)
    def test(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainModule | None = None,
    ) -> list[dict[str, float]]:
        """Test a module on every sample exactly once.

        Args:
            module: Defines the step.
            dataloaders: A loader or a list of them.
            datamodule: Replaces the loaders; see `fit`.
            ckpt_path: Load these weights first; see `fit`.
            model: Another name of `module`.

        Returns:
            The logged metrics of each loader, the same for any number of processes.
        """
        module = one_module("test", module, model)
        with self._evaluation("test", module, dataloaders, datamodule, ckpt_path) as run:
            return [] if are_empty(run.eval_iterators) else evaluate(run, TEST)

    @suggest_arguments(**EVALUATION_ARGUMENTS)
    def predict(
        self,
        module: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        return_predictions: bool | None = None,
        *,
        model: TrainModule | None = None,
    ) -> list[Any] | None:
        """Return the outputs of `predict_step` for all batches, in the order of the loader.

        Args:
            module: Defines `predict_step`, or is called on each batch.
            dataloaders: A loader or a list of them.
            datamodule: Replaces the loaders; see `fit`.
            ckpt_path: Load these weights first; see `fit`.
            return_predictions: Keep and gather the outputs. False leaves them to the hooks, so that
                only one batch is held in memory. None means False if a `PredictionWriter` is among
                the callbacks, and True otherwise.
            model: Another name of `module`.

        Returns:
            On rank 0 a list with one entry per batch, tensors on the host; for several loaders a
            list of such lists. None on other ranks, and without `return_predictions`.
        """
        if return_predictions is None:
            return_predictions = not any(isinstance(c, PredictionWriter) for c in self.callbacks)
        module = one_module("predict", module, model)
        with self._evaluation("predict", module, dataloaders, datamodule, ckpt_path) as run:
            if are_empty(run.eval_iterators):
                return []
            outputs = predict(run, keep=return_predictions)
        return outputs[0] if outputs is not None and len(outputs) == 1 else outputs

    def save_checkpoint(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        filepath: str | os.PathLike[str] | None = None,
        weights_only: bool = False,
        background: bool = False,
        required: bool = True,
        links: Mapping[Path, bool] | None = None,
        displaces: Sequence[Path] = (),
    ) -> Path | None:
        """Save a checkpoint of the latest fit; call it on every process.

        At a boundary (``on_boundary`` of a callback) and after the fit, it is saved at once. Inside
        a gradient accumulation window, and before the first one, the run has no complete state to
        save. The request is then pending until the next boundary, and the checkpoint is saved after
        the callbacks of that boundary: on all processes if any of them requested it, and once per
        path. (With several processes, a request made after the window's all-reduce, as in
        ``on_train_batch_end``, reaches the others at the next validation or update, and is saved at
        that boundary; on an accelerator it may take one more update.) If the fit fails first,
        pending saves are logged.

        Args:
            path: The checkpoint's folder. An existing checkpoint at this path is replaced.
            filepath: Another name of `path`.
            weights_only: Save only the weights; a run cannot resume from them.
            background: Return once the state is copied to host memory, and write it while training
                continues. One save runs at a time; the next save and the end of `fit` wait for it.
            required: If True, a failure to write ends the run. If False, it is logged.
            links: Symlinks by path. True points the link to the checkpoint once it is committed;
                False removes the link if its target no longer exists.
            displaces: Checkpoints to remove after the commit.

        Returns:
            The checkpoint's folder. It is committed, unless the save is in the background, is
            pending, or this is a trial of a `Tuner`, which saves nothing. None if a save that is
            not required failed.

        Raises:
            CheckpointError: On all processes; the message says what failed and where. A background
                save that fails ends the run at the next update.
            RuntimeError: There was no fit, or it failed inside a window.
            ValueError: At a boundary or after the fit, the processes pass different folder names.
        """
        run = self._fit
        if run is None:
            raise RuntimeError("save_checkpoint has nothing to save before the first fit.")
        # Absolute, because the working directory may change before a pending save is made.
        given: Any = path if filepath is None else filepath
        target = absolute_path("path", given)
        if self._context.trial_steps is not None:
            return target  # a trial of a `Tuner` must not replace the user's checkpoint
        if run.boundary_thread is None:
            if self._run is not run:
                raise RuntimeError(
                    "save_checkpoint has nothing to save: the latest fit failed inside an "
                    "accumulation window, so the state is incomplete. "
                    "ModelCheckpoint(on_exception=True) saves the weights at the exception; to "
                    "resume, use an earlier checkpoint."
                )
            run.saving.pending_saves.add(
                target,
                weights_only=weights_only,
                background=background,
                required=required,
                links=links,
                displaces=displaces,
            )
            return target
        if run.world_size > 1:
            check_collective("save_checkpoint")
            if not self._context.project.on_each_node:  # machines may use different paths
                check_checkpoint_names(target.name)
        with run.timing.part(SAVING):
            saved = save_run(
                run,
                SaveRequest(
                    target=target,
                    on_each_node=self._context.project.on_each_node,
                    links=links or {},
                    displaces=displaces,
                    mirror=run.saving.mirrors.get(target.parent),
                ),
                weights_only=weights_only,
                background=background and self._run is run,  # nothing waits for it after the fit
                required=required,
            )
        return target if saved else None

    def require_space(self, folder: Path) -> None:
        """Check that the disk has space for a checkpoint of the current fit; collective.

        Raises:
            CheckpointError: There is too little space; raised on all processes.
        """
        run = self._fit_run("require_space")
        require_space(run, folder, on_each_node=self._context.project.on_each_node)

    def wait_for_save(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Wait for the running save, if any; collective.

        Args:
            path: The checkpoint to wait for, as given to `save_checkpoint`; by default the latest.

        Returns:
            True if its latest save succeeded or there was none, else False.

        Raises:
            CheckpointError: A required save failed; raised on all processes.
        """
        name = None if path is None else absolute_path("path", path)
        return self._fit is None or self._fit.saving.writer.wait(name)

    def save_own_weights(self, path: str | os.PathLike[str]) -> Path:
        """Save this process's weights without collectives.

        It is for a process that has failed while the others may wait for it in a collective. The
        weights may be in the middle of an update.

        Raises:
            RuntimeError: No fit is running.
            CheckpointError: `path` exists and is not a checkpoint.
            OSError: Writing failed.
        """
        run = self._fit_run("save_own_weights")
        return save_weights_alone(run, Path(path))

    def open_predictions(self, folder: Path, *, merge: bool, overwrite: bool) -> PredictionFiles:
        """Open files to stream predictions to; call it on every process, inside `predict`.

        Args:
            folder: The folder of the files.
            merge: Merge all batches into one file at the end, in the order of the loader; otherwise
                one file per batch.
            overwrite: Remove existing predictions.

        Raises:
            ValueError: Predictions exist and `overwrite` is False; on rank 0. Other ranks raise a
                ``RuntimeError`` with its message.
        """
        engine = self.accelerator.engine
        return PredictionFiles(
            folder,
            rank=engine.parallel.dp_rank,
            world_size=engine.parallel.dp_size,
            counts=engine.parallel.is_data_primary,
            merge=merge,
            overwrite=overwrite,
        )

    # -- for callbacks -------------------------------------------------------------------------

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers to all processes; collective."""
        self._fit_run("broadcast_buffers").engine.broadcast_buffers()

    def pause_schedulers(self) -> None:
        """Stop stepping all schedulers for the rest of the fit; the caller sets learning rates."""
        self._fit_run("pause_schedulers").optim.pause_schedulers()

    def update_batch_norm(self) -> None:
        """Recompute batch normalisation statistics over an epoch of the training data; collective.

        Use it for weights that training did not produce directly, such as averaged weights. Call it
        on every process at a boundary. See `trainer.loops.buffers`.

        Raises:
            ValueError: See `check_batch_norm`.
        """
        update_batch_norm(self._fit_run("update_batch_norm"))

    def check_batch_norm(self) -> None:
        """Check that `update_batch_norm` is possible.

        Raises:
            ValueError: The module has batch normalisation, and the training data is a stream or
                optimisation is manual.
        """
        require_readable(self._fit_run("check_batch_norm"))

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether this is a writer rank: one process per disk finds and removes checkpoints."""
        return is_writer_rank(self.accelerator.state, self._context.project.on_each_node)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint. Every process may call it; only the writer rank removes it.

        A failure is logged and not raised, because it must not end the run, and an error here would
        not reach the other processes.
        """
        if self.keeps_checkpoints:
            remove_or_warn(Path(path))
        if self._fit is not None and (mirror := self._fit.saving.mirrors.get(Path(path).parent)):
            mirror.remove([Path(path)])

    # -- state of the run ----------------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """The constructor's argument `max_epochs`."""
        return self._context.settings.max_epochs

    @property
    def max_steps(self) -> int | None:
        """The constructor's argument `max_steps`."""
        return self._context.settings.max_steps

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is global rank 0."""
        return self.accelerator.is_main_process

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.accelerator.num_processes

    @property
    def training(self) -> bool:
        """Whether a fit is running and is not validating."""
        return self._fitting is not None and self._fitting.module.training

    @property
    def datamodule(self) -> Any:
        """The datamodule of the latest run; None if it had none."""
        return self._datamodule

    @property
    def fast_dev_run(self) -> bool:
        """Whether this is a dry run of a few batches that writes no files."""
        return self._context.settings.fast_dev_run

    @property
    def global_step(self) -> int:
        """The number of optimizer steps (updates) so far."""
        return self._counters.global_step

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._counters.epoch

    @property
    def epoch_complete(self) -> bool:
        """Whether the latest update was the last of its epoch."""
        return self._counters.epoch_complete

    @property
    def batches_seen(self) -> int:
        """The number of micro-batches trained on, over all processes."""
        return self._counters.batches_seen

    @property
    def samples_seen(self) -> int:
        """The number of samples trained on, over all processes.

        For a map-style dataset this includes samples that the user's `collate_fn` dropped. If the
        dataset yields whole batches (``batch_size=None``), each process assumes that all batches of
        a global batch have the size of its batch.
        """
        return self._counters.samples_seen

    @property
    def items_seen(self) -> float:
        """The number of items trained on, over all processes; see `TrainModule.count_items`."""
        return 0.0 if self._fit is None else self._fit.step_sync.items_seen

    @property
    def skipped_updates(self) -> int:
        """The number of updates of the fit that were skipped for non-finite gradients."""
        guard = None if self._fit is None else self._fit.optim.guard
        return 0 if guard is None else guard.skipped

    @property
    def validations(self) -> int:
        """The number of validations in this fit, not counting the sanity check."""
        return self._counters.validations

    @property
    def progress(self) -> Progress:
        """The progress of the fit, the same on all processes."""
        return self._fit_run("progress").progress()

    @property
    def callback_metrics(self) -> dict[str, float]:
        """A copy of the latest value of every logged metric, by name.

        Values are reduced over all processes when an update is logged (`log_every`), at the end of
        an epoch before the callbacks' ``on_train_epoch_end``, and at a boundary where a callback or
        scheduler uses its `monitor`. Until then, a value is this process's own; the value of an
        epoch is its value so far. In ``on_boundary`` with several processes, the last reduced value
        is returned instead, so that all processes make the same decision. Reading never
        communicates.
        """
        latest = {} if self._recorder is None else self._recorder.latest_values()
        run, fit = self._run, self._fitting
        shared = fit is not None and fit.deciding and fit.world_size > 1
        return latest if run is None or shared else latest | to_floats(run.metrics.own_values())

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The part of `callback_metrics` sent to trackers, without values with ``logger=False``."""
        private: set[str] = set() if self._recorder is None else self._recorder.private
        return {name: value for name, value in self.callback_metrics.items() if name not in private}

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers of the run, each on its own thread; empty on processes without trackers.

        Use them for what `log` cannot record, such as images: ``for tracker in trainer.trackers:
        tracker.log_images({"samples": images}, trainer.global_step)``.
        """
        return [] if self._recorder is None else self._recorder.trackers

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The same as `progress_values`, under Lightning's name."""
        return self.progress_values()

    @property
    def metric_updates(self) -> dict[str, int]:
        """The update at which each of the `callback_metrics` was last reduced, by name."""
        return {} if self._recorder is None else self._recorder.updates

    def monitored_metric(self, name: str) -> tuple[float, int] | None:
        """Return a metric's latest reduced value and the update of its reduction, for decisions.

        If training and validation log the same name, it is the validation's value. Before the names
        that validation logs are known (from the sanity check or a validation), it is None except at
        the end of an epoch.
        """
        run = self._fit
        if run is None:
            return None
        unknown = run.intervals.validates and not (self.validations or run.recorder.validated)
        return None if unknown and not self.epoch_complete else run.recorder.monitored(name)

    @property
    def logged_names(self) -> set[str]:
        """All metric names logged in the current run, reduced or not."""
        return self.metrics.names

    @property
    def metrics(self) -> MetricStore:
        """The store of logged values that are not yet reduced."""
        if self._run is None:  # a store whose `log` raises: there is no run
            return MetricStore(self.accelerator.device)
        return self._run.metrics

    def __reduce__(self) -> NoReturn:
        """Raise an error, since a Trainer cannot be pickled or copied.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "A Trainer cannot be pickled or copied: it holds threads, files and process groups. "
            "Pickle the module (without its trainer), save a checkpoint with "
            "trainer.save_checkpoint(path), or create another Trainer with the same arguments."
        )

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested; the request reaches all processes within two updates.

        If all processes set it in ``on_boundary``, they stop there. If only some do, these wait up
        to half a minute for the others.
        """
        run = self._fitting
        return self._stop_requested or (run is not None and run.stopping.decided())

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._stop_requested = stop
        run = self._fitting
        if run is None:
            return
        run.stopping.request(stop)
        if run.deciding or run.world_size == 1:
            run.stopping.decide_at_boundary(
                stop, step=run.counters.global_step, world_size=run.world_size
            )

    @property
    def ending(self) -> bool:
        """Whether this is the last boundary of the fit, as known so far; the same on all processes.

        In ``on_train_start`` it refers to the boundary whose checkpoint the run resumes from, if it
        was saved at one. The time limit may still be reached between this check and the end of the
        boundary.
        """
        run = self._fitting
        if run is None:
            return False
        at_boundary = run.boundary_thread is not None or run.hooks.boundary.remaining_callbacks
        return bool(at_boundary) and should_end(run)

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The prepared optimizers of the latest fit."""
        return [] if self._fit is None else self._fit.optim.optimizers

    @property
    def optimizer_names(self) -> list[str]:
        """The names of `optimizers`: each ``"name"``, else the class name, numbered if needed.

        Checkpoints and logged metrics identify optimizers by these names.
        """
        return [] if self._fit is None else self._fit.optim.states.names

    @property
    def schedulers(self) -> list[SchedulerEntry]:
        """The schedulers of the latest fit, with interval and frequency."""
        return [] if self._fit is None else self._fit.optim.schedulers

    def add_param_group(
        self, optimizer: Any, parameters: Mapping[str, nn.Parameter], *, ratio: float = 1.0
    ) -> None:
        """Add parameters to an optimizer of the current fit, as a new parameter group.

        The group has the first group's options and follows its schedule, at `ratio` times its
        learning rate. Checkpoints store its parameters by name, so that a resumed run has it too.

        Args:
            optimizer: One of `optimizers`.
            parameters: The parameters by their names in the module.
            ratio: The group's learning rate relative to the first group's.

        Raises:
            RuntimeError: No fit is running.
            ValueError: The optimizer already has one of the parameters.
        """
        run = self._fit_run("add_param_group")
        schedulers = [entry.scheduler for entry in run.optim.schedulers]
        add_group(optimizer, parameters, ratio=ratio, schedulers=schedulers)

    def scale_learning_rate(self, optimizer: Any, group: int, factor: float) -> None:
        """Multiply the learning rate of one parameter group, now and in its schedule.

        Raises:
            RuntimeError: No fit is running.
        """
        run = self._fit_run("scale_learning_rate")
        schedulers = [entry.scheduler for entry in run.optim.schedulers]
        scale_group(optimizer, group, factor, schedulers=schedulers)

    @property
    def module(self) -> TrainModule | None:
        """The module of the current run, or of the latest fit."""
        return self._module

    @property
    def has_validation(self) -> bool:
        """Whether the fit has validation data and, as far as known, will reach a validation."""
        return self._fitting is not None and self._fitting.intervals.validates

    @property
    def num_training_batches(self) -> int | None:
        """The number of micro-batches of this process per epoch of the fit; None if unknown."""
        iterator = self._training_data
        return None if iterator is None else iterator.num_own_batches

    @property
    def estimated_stepping_batches(self) -> int | None:
        """The number of optimizer steps of the whole fit; None if unknown before reading data."""
        iterator = self._training_data
        global_batches = None if iterator is None else iterator.num_global_batches
        settings = self._context.settings
        limits = [settings.max_steps]
        if global_batches is not None and settings.max_epochs is not None:
            epochs = range(settings.max_epochs)
            windows = (-(-global_batches // self.accumulation_in(epoch)) for epoch in epochs)
            limits.append(sum(windows))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update, on each process.

        A callback may set it while `fit` runs, to the same value on all processes; the value then
        holds from the next window until this `fit` ends.

        Raises:
            RuntimeError: It is set while no fit runs, or in manual optimisation.
            ValueError: It is set to less than 1.
            TypeError: It is set to a value that is not an int.
        """
        if self._fitting is not None:
            return self._fitting.optim.accumulation
        return self._context.settings.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        run = self._fit_run("setting gradient_accumulation_steps")
        if not run.module.automatic_optimization:
            raise RuntimeError(
                "gradient_accumulation_steps cannot be set in manual optimisation, where "
                "training_step decides when to step."
            )
        replace(self._context.settings, gradient_accumulation_steps=steps)  # validates the value
        run.optim.accumulate(steps)

    def accumulation_in(self, epoch: int) -> int:
        """Return the micro-batches per update in `epoch`, for a run that is not resumed."""
        steps = self._context.settings.gradient_accumulation_steps
        for callback in self.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                steps = callback.steps_in(epoch, steps)
        return steps

    @property
    def num_eval_batches(self) -> list[int | None]:
        """This process's number of batches of each loader in the current evaluation.

        In a fit these are the batches of the validation or of the sanity check.
        """
        return [] if self._run is None else self._run.num_eval_batches

    @property
    def sanity_checking(self) -> bool:
        """Whether the current validation is the sanity check before training."""
        return self._run is not None and self._run.recorder.sanity_checking

    @property
    def log_due(self) -> bool:
        """Whether the values of this update will be logged (`log_every`)."""
        run = self._run  # progress bars ask at each batch
        return isinstance(run, FitRun) and run.intervals.log_due

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter in `on_before_optimizer_step`; None without one.

        On every engine it is the averaged, unscaled gradient before clipping. Do not modify it.
        DeepSpeed partitions gradients, so there it is gathered: call this on all processes for the
        same parameters.

        Raises:
            RuntimeError: With DeepSpeed, inside a window of micro-batches.
            ValueError: There is no fit.
        """
        if not isinstance(self._run, FitRun):
            raise ValueError("gradient was called outside of fit: there are no gradients.")
        return self._run.engine.gradients.of(parameter)

    def progress_values(self, *, wait: bool = False) -> dict[str, float]:
        """Return the latest values logged with ``prog_bar=True``; also after a fit.

        Values of an update are this process's own. Values of an epoch are available once it has
        ended.

        Args:
            wait: Wait for values that are still being copied from the accelerator. False returns
                the values of the previous call instead.
        """
        run = self._run or self._fit
        return {} if run is None else run.metrics.progress_values(wait=wait or self._run is None)

    @property
    def project_dir(self) -> Path:
        """The folder of this Trainer's files, as an absolute path."""
        return self._context.project.folder

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of this Trainer's checkpoints."""
        return self._context.project.checkpoints

    @property
    def metrics_path(self) -> Path:
        """The file ``metrics.jsonl``, one JSON object per line; see `trackers.read_metrics`."""
        return self._context.project.record

    @property
    def logs_dir(self) -> Path:
        """The folder of trackers that write files."""
        return self._context.project.logs

    # -- manual optimisation -------------------------------------------------------------------

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """See `TrainModule.manual_backward`."""
        run = self._fit_run("manual_backward")
        if run.manual is None:
            raise RuntimeError(
                "manual_backward was called in automatic optimisation, which runs backward itself: "
                "return the loss, or set automatic_optimization = False."
            )
        if loss is None:
            raise TypeError("manual_backward got None; pass the loss, a tensor.")
        run.manual.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        *,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> Tensor | None:
        """See `TrainModule.clip_gradients`."""
        validate_limits(max_grad_norm, max_grad_value)
        optimizer.synchronize()
        run = self._fit_run("clip_gradients")
        run.precision.unscale(optimizer.optimizer)
        parameters = parameters_of([optimizer])
        if max_grad_value is not None:
            run.engine.gradients.clip_grad_value_(parameters, max_grad_value)
        if max_grad_norm is None:
            return None
        return run.engine.gradients.clip_grad_norm_(parameters, max_grad_norm)

    # -- internal ------------------------------------------------------------------------------

    @property
    def _fitting(self) -> FitRun | None:
        return self._run if isinstance(self._run, FitRun) else None

    def _fit_run(self, name: str) -> FitRun:
        if self._fitting is None:
            raise RuntimeError(f"{name} is available only while fit runs.")
        return self._fitting

    @property
    def _training_data(self) -> EpochIterator | None:
        return None if self._fit_loaders is None else self._fit_loaders.epoch_iterator

    def _given_checkpoint(self, ckpt_path: Any, words: Sequence[str]) -> Any:
        """Return the checked `ckpt_path`; a dry run has no checkpoints, so `words` give None."""
        if self.fast_dev_run and ckpt_path in words:
            if self.accelerator.is_main_process:
                logger.warning(
                    "fast_dev_run saves no checkpoint, so ckpt_path=%r is ignored: the module's "
                    "current weights are used.",
                    ckpt_path,
                )
            ckpt_path = None
        return self._context.folders.given(ckpt_path)

    def _begin_counters(self) -> Counters:
        """Return the progress with which a new run begins."""
        return Counters()

    def _check_idle(self, name: str) -> None:
        """Raise if a run is in progress, since this Trainer keeps the state of one run.

        Raises:
            RuntimeError: A run is in progress.
        """
        if self._run is not None:
            raise RuntimeError(
                f"{name} was called inside another run of the same Trainer, by a hook or a step. "
                "To validate more often during a fit set val_every; for other data or another "
                "module call it after the run, or create a second Trainer."
            )

    @contextmanager
    def _stage(self, name: str, module: TrainModule, datamodule: Any) -> Iterator[Stage]:
        self._stop_requested = False
        self._datamodule, self._module = datamodule, module
        settings = self._context.settings
        detects_anomaly = settings.detect_anomaly and name == "fit"
        with (
            self.accelerator.state._in_force(),
            watched(partial(self._place, name)) as note_place,
            warn_of_concurrent_runs(),
            deterministic(settings.deterministic),
            torch.autograd.set_detect_anomaly(True) if detects_anomaly else nullcontext(),
            stage_of(self._context, name, module, datamodule, finish=self._finish) as stage,
            self.accelerator.engine.compiled_steps(module, steps_of(name, module)),
        ):
            try:
                yield stage
                self._failed_in = "teardown"
            except BaseException:
                note_place()  # before teardown, which loses the position
                if self._run is not None:
                    self._failed_in = self._run.place(name)
                raise

    def _place(self, stage: str) -> str:
        run = self._run
        return f"{stage}, outside its loop" if run is None else run.place(stage)

    def _profiling(self, stage: str) -> AbstractContextManager[Begin]:
        """Return the profiling context. Enter it first, so that its table is printed last."""
        settings, project = self._context.settings, self._context.project
        folder = project.folder if settings.writes else None
        return profiling(settings.profile, stage, folder=folder, accelerator=self.accelerator)

    def _finish(self, status: Status, error: BaseException | None) -> None:
        run, self._run = self._run, None
        self._module = None if self._fit is None else self._fit.module
        try:
            if isinstance(run, FitRun):
                run.saving.pending_saves.give_up()
                run.saving.close()
                run.step_sync.read_pending()
                for epoch_iterator in (run.data.epoch_iterator, *run.eval_iterators):
                    epoch_iterator.close()
        except BaseException as late:
            status, error = "failed", error or late
            raise
        finally:
            if self._recorder is not None:
                self._recorder.finish(status, error)

    @contextmanager
    def _evaluation(
        self, name: str, module: TrainModule, dataloaders: Any, datamodule: Any, ckpt_path: Any
    ) -> Iterator[Run]:
        """Set up an evaluation, yield the run, then tear it down."""
        self._check_idle(name)
        ckpt_path = self._given_checkpoint(ckpt_path, WORDS)
        dataloaders, datamodule = take_datamodule("dataloaders", dataloaders, datamodule)
        with (
            self._profiling(name) as begin_profile,
            self._stage(name, module, datamodule) as stage,
        ):
            run = self._run = setup.prepare_evaluation(
                stage, dataloaders, ckpt_path, self._counters
            )
            self._recorder = run.recorder
            begin_profile(run, run.eval_iterators)
            self.accelerator._run_engine = run.engine
            try:
                yield run
            finally:
                self.accelerator._run_engine = None
                run.engine.close()
