"""The `Trainer`: arguments, wiring, and the four entry points."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callbacks import Callback, Interval, ModelCheckpoint, Progress, ProgressBar
from trackers import (
    BackgroundTracker,
    GeneralTracker,
    JsonlTracker,
    NullTracker,
    resolve_trackers,
    select_trackers,
)
from trainer import checkpoint as disk
from trainer.accelerator import Accelerator
from trainer.configuration import DataLoaderConfiguration, KwargsHandler
from trainer.data.loader import Feed
from trainer.distributed.agreement import Agreement
from trainer.distributed.collectives import broadcast_object
from trainer.distributed.control import local_main_first
from trainer.hooks import HookTable, is_overridden
from trainer.loops import assemble
from trainer.loops.evaluate import TEST, VALIDATION, Phase, evaluate
from trainer.loops.fit import fit
from trainer.loops.lengths import Length, Schedule, check_limit, describe, seconds_of
from trainer.loops.predict import predict
from trainer.loops.record import Recorder
from trainer.loops.run import Counters, FitRun, Run
from trainer.loops.snapshot import choose_checkpoint, load_run, load_weights, save_run
from trainer.metrics import MetricStore
from trainer.module import TrainModule
from trainer.optim.clipping import clip_, validate_limits
from trainer.optim.configure import SchedulerEntry
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.weighting import LossWeighting
from trainer.rng import mix, seed_generators, set_seed
from trainer.strategies.choose import choose_engine

_LARGE = 1_000_000  # records of the local record that may wait: it should lose none
Limit = int | float | None


class Trainer:
    """Trains, validates, tests and predicts with a `TrainModule`.

    Args:
        max_epochs: Stop after so many epochs. One of `max_epochs`, `max_steps` and `max_time` is
            needed to `fit`.
        min_epochs: Let nobody stop the run before.
        max_steps: Stop after so many updates.
        min_steps: Let nobody stop the run before.
        max_time: Stop at the first update after so long: ``"30 minutes"``, ``"00:12:00:00"`` (days,
            hours, minutes, seconds), a ``timedelta``, or its arguments as a dict.
        val_every: When to validate: an interval such as ``"1 epoch"``, ``"500 steps"``,
            ``"30 minutes"``, ``"1e9 items"``, or an int meaning steps.
        num_sanity_val_steps: Batches of each validation loader to try before training; 0 for none,
            -1 for all.
        limit_train_batches: Batches of an epoch, over all processes; a float is a fraction.
        limit_val_batches: Likewise, of each loader; 0 switches validation off.
        limit_test_batches: Likewise.
        limit_predict_batches: Likewise.
        overfit_batches: Train and validate on the first so many batches, unshuffled.
        fast_dev_run: Run so many batches (True is 1) of everything and write nothing.
        gradient_accumulation_steps: Micro-batches of each process for one update. The update is
            that of the whole batch, whatever the split.
        max_grad_norm: Clip the norm of all gradients.
        max_grad_value: Clip each element of the gradients.
        seed: Seeds Python, numpy and torch now and again when `fit` begins, and fixes the order of
            the data. Without it the order follows torch's seed.
        log_with: Trackers: a name, class or instance, or a list of them, or ``"all"``.
        log_every: When the values of an update are recorded, an interval.
        project_name: The name of the project for trackers; the project folder's name unless given.
        run_name: The name of the run for trackers.
        project_dir: Where checkpoints, ``metrics.jsonl`` and trackers' files go. None makes a new
            folder under ``runs/`` for every start.
        progress_bar: Show one, on the main process, on a terminal or in a notebook.
        callbacks: Called in this order, those that save last.
        checkpointing: Keep the last checkpoint unless a `ModelCheckpoint` is among the callbacks.
        accelerator: A ready one, in place of the arguments below.
        mixed_precision: See `Accelerator`.
        cpu: See `Accelerator`.
        dataloader_config: See `Accelerator`; of it the Trainer uses nothing that repeats samples.
        kwargs_handlers: See `Accelerator`.

    Attributes:
        callbacks: In the order in which they are called.
        accelerator: The process's devices and peers.
        max_epochs: As given.
        max_steps: As given.

    Raises:
        ValueError: An argument is outside its choices.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, float] | None = None,
        val_every: Interval | str | int = "1 epoch",
        num_sanity_val_steps: int = 2,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        overfit_batches: Limit = None,
        fast_dev_run: bool | int = False,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        seed: int | None = None,
        log_with: Any = None,
        log_every: Interval | str | int = "50 steps",
        project_name: str | None = None,
        run_name: str | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        progress_bar: bool = True,
        callbacks: Sequence[Callback] | Callback | None = None,
        checkpointing: bool = True,
        accelerator: Accelerator | None = None,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
    ) -> None:
        self.fast_dev_run = bool(fast_dev_run)
        if fast_dev_run:
            max_epochs, max_steps, min_epochs, min_steps = 1, None, None, None
            limit_train_batches = limit_val_batches = int(fast_dev_run)
            limit_test_batches = limit_predict_batches = int(fast_dev_run)
            num_sanity_val_steps, log_with, checkpointing = 0, None, False
        self._length = Length(
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            min_steps=min_steps,
            max_seconds=seconds_of(max_time),
        )
        self.max_epochs, self.max_steps = max_epochs, max_steps
        self._val_every, self._log_every = Interval.parse(val_every), Interval.parse(log_every)
        self._limits = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches,
        }
        for name, limit in self._limits.items():
            check_limit(name, limit)
        if num_sanity_val_steps < -1:
            raise ValueError(
                f"num_sanity_val_steps is {num_sanity_val_steps}; give -1 (all) or more."
            )
        self._sanity_steps = None if num_sanity_val_steps == -1 else num_sanity_val_steps
        validate_limits(max_grad_norm, max_grad_value)
        self._max_grad_norm, self._max_grad_value = max_grad_norm, max_grad_value
        self._seed = seed
        if seed is not None:
            set_seed(seed)
        self._given_project_dir = project_dir
        self._project_dir = None if project_dir is None else Path(project_dir).expanduser()
        self._project_name, self._run_name = project_name, run_name
        self._log_with = select_trackers(log_with, logging_dir=project_dir or "runs")
        if accelerator is None:
            accelerator = Accelerator(
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=gradient_accumulation_steps,
                cpu=cpu,
                dataloader_config=dataloader_config,
                kwargs_handlers=kwargs_handlers,
                scheduler_tick="update",
            )
        elif (mixed_precision, cpu, dataloader_config, kwargs_handlers) != (
            None,
            False,
            None,
            None,
        ):
            raise ValueError(
                "Pass accelerator, or mixed_precision, cpu, dataloader_config and kwargs_handlers "
                "for the Trainer to make one, not both."
            )
        elif gradient_accumulation_steps == 1:
            gradient_accumulation_steps = accelerator.gradient_accumulation_steps
        self.accelerator = accelerator
        self._accumulation = gradient_accumulation_steps
        self.callbacks = _complete(
            callbacks, progress_bar=progress_bar, checkpointing=checkpointing
        )
        self._counters = Counters()
        self._run: Run | None = None
        self._recorder: Recorder | None = None
        self._stop_requested = False
        self._run_id = ""

    # -- entry points --------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train a module.

        Args:
            module: Defines `training_step` and `configure_optimizers`.
            train_dataloaders: The training loader, as for one process: it is shared out here.
            val_dataloaders: The validation loader or a list of them; none is fine.
            datamodule: In place of both, an object with ``train_dataloader`` and
                ``val_dataloader``, and optionally ``prepare_data``, ``setup`` and ``teardown``.
            ckpt_path: Where to go on from: None for a new run, the path of a checkpoint, ``"last"``
                or ``"best"`` of this `project_dir`, or ``"auto"``: the last if there is one.

        Raises:
            ValueError: The arguments, the module's answers or the data cannot make a run; or
                another run's checkpoints lie in `project_dir`.
            TypeError: The module lacks a method, or returned something of another type.
            CheckpointError: The checkpoint asked for is missing, damaged or does not fit.
        """
        assemble.check_module(module, "fit")
        assemble.check_ckpt_path(ckpt_path, self._given_project_dir)
        if self._length.endless:
            raise ValueError(
                "Nothing ends this run: max_epochs and max_steps are both None. Pass one of them "
                "to the Trainer, or max_time."
            )
        with self._stage("fit", module, datamodule) as hooks:
            run = self._prepare_fit(
                module, hooks, train_dataloaders, val_dataloaders, datamodule, ckpt_path
            )
            fit(run)

    def validate(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[dict[str, float]]:
        """Validate a module; see `test`."""
        limit = "limit_val_batches"
        return self._evaluate(
            "validate", VALIDATION, module, dataloaders, datamodule, ckpt_path, limit
        )

    def test(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[dict[str, float]]:
        """Test a module on every sample once.

        Args:
            module: Defines the step.
            dataloaders: A loader or a list of them.
            datamodule: In place of them, see `fit`.
            ckpt_path: Load these weights first; see `fit`.

        Returns:
            For each loader the metrics that were logged, the same on any number of processes.
        """
        limit = "limit_test_batches"
        return self._evaluate("test", TEST, module, dataloaders, datamodule, ckpt_path, limit)

    def predict(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[Any] | None:
        """What `predict_step` returns for each batch, in the order of the loader.

        Args:
            module: Defines `predict_step`, or is called on each batch.
            dataloaders: A loader or a list of them.
            datamodule: In place of them, see `fit`.
            ckpt_path: Load these weights first; see `fit`.

        Returns:
            A list with one entry a batch, tensors on the host; for several loaders a list of such
            lists. On rank 0; None on the others.
        """
        with self._stage("predict", module, datamodule) as hooks:
            run, feeds = self._prepare_evaluation(
                "predict",
                module,
                hooks,
                dataloaders,
                datamodule,
                ckpt_path,
                "limit_predict_batches",
            )
            outputs = predict(run, feeds)
        return outputs[0] if outputs is not None and len(feeds) == 1 else outputs

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Save the fit at hand; every process calls it, at a boundary.

        Returns:
            The committed checkpoint.

        Raises:
            RuntimeError: No fit is running, or it is inside a window.
        """
        run = self._fit_run("save_checkpoint")
        return save_run(
            run,
            Path(path),
            trainer=self,
            callbacks=self.callbacks,
            run_id=self._run_id,
            configuration=self._configuration(),
        )

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; every process may call it, rank 0 does it."""
        if self.accelerator.is_main_process:
            disk.remove(Path(path))

    # -- where the run stands ------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Updates made."""
        return self._counters.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch at hand, from 0."""
        return self._counters.epoch

    @property
    def epoch_complete(self) -> bool:
        """The last update was the last of its epoch."""
        return self._counters.epoch_complete

    @property
    def batches_seen(self) -> int:
        """Micro-batches trained on, of all processes."""
        return self._counters.batches_seen

    @property
    def samples_seen(self) -> int:
        """Samples trained on, of all processes."""
        return self._counters.samples_seen

    @property
    def items_seen(self) -> float:
        """Items trained on, of all processes; see `TrainModule.count_items`."""
        run = self._run
        if not isinstance(run, FitRun):
            return self._items_seen
        run.agreement.settle()
        return run.agreement.items_seen

    _items_seen = 0.0

    @property
    def validations(self) -> int:
        """Validations of this fit, the sanity check excluded."""
        return self._counters.validations

    @property
    def progress(self) -> Progress:
        """How far the fit is, alike on all processes."""
        return self._fit_run("progress").progress

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The latest reduced value of every name."""
        return {} if self._recorder is None else self._recorder.latest

    @property
    def metric_updates(self) -> dict[str, int]:
        """The update at which each of them was reduced."""
        return {} if self._recorder is None else self._recorder.updates

    @property
    def metrics(self) -> MetricStore:
        """What is logged and not yet reduced."""
        assert self._run is not None
        return self._run.metrics

    @property
    def should_stop(self) -> bool:
        """Somebody asked for the end; all processes agree about it within two updates."""
        run = self._run
        return self._stop_requested or (isinstance(run, FitRun) and run.stop_now)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._stop_requested = stop
        run = self._run
        if isinstance(run, FitRun) and (run.in_boundary or run.world_size == 1):
            # At a boundary decisions follow from values that all processes share.
            run.stop_now = stop

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The prepared optimizers of the fit."""
        return self._run.optimizers if isinstance(self._run, FitRun) else []

    @property
    def schedulers(self) -> list[SchedulerEntry]:
        """The schedulers of the fit and when they tick."""
        return self._run.schedulers if isinstance(self._run, FitRun) else []

    @property
    def module(self) -> TrainModule | None:
        """The module of the run at hand."""
        return None if self._run is None else self._run.module

    @property
    def has_validation(self) -> bool:
        """The fit has validation data."""
        return isinstance(self._run, FitRun) and bool(self._run.val_feeds)

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of this process in an epoch; None if only reading can tell."""
        run = self._run
        return run.feed.num_own_batches if isinstance(run, FitRun) else None

    @property
    def estimated_stepping_batches(self) -> int | None:
        """Updates of the whole fit; None if only reading can tell."""
        rounds = self._feed.num_rounds if self._feed is not None else None
        by_epochs = None
        if rounds is not None and self.max_epochs is not None:
            by_epochs = -(-rounds // self._accumulation) * self.max_epochs
        known = [number for number in (by_epochs, self.max_steps) if number is not None]
        return min(known) if known else None

    _feed: Feed | None = None

    @property
    def num_eval_batches(self) -> list[int | None]:
        """Batches of this process for each loader of the evaluation at hand."""
        return [] if self._run is None else self._run.eval_lengths

    @property
    def sanity_checking(self) -> bool:
        """The validation at hand is the trial before training."""
        return self._run is not None and self._run.sanity_checking

    @property
    def log_due(self) -> bool:
        """The values of this update will be recorded."""
        return isinstance(self._run, FitRun) and self._run.log_due

    def progress_values(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar``, of this process."""
        return {} if self._run is None else self._run.metrics.progress_values()

    @property
    def project_dir(self) -> Path:
        """The folder of this Trainer's files."""
        if self._project_dir is None:
            name = datetime.now().astimezone().strftime("run-%Y%m%d-%H%M%S")
            unique = f"{name}-{uuid.uuid4().hex[:4]}"
            self._project_dir = Path("runs") / broadcast_object(unique)
        return self._project_dir

    @property
    def checkpoint_dir(self) -> Path:
        """Where its checkpoints are."""
        return self.project_dir / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """The local record: one JSON object a line; `trackers.read_metrics` reads it."""
        return self.project_dir / "metrics.jsonl"

    # -- manual optimisation -------------------------------------------------------------------

    def manual_backward(self, loss: Tensor) -> None:
        """See `TrainModule.manual_backward`."""
        run = self._fit_run("manual_backward")
        if run.module.automatic_optimization:
            raise RuntimeError(
                "manual_backward was called in automatic optimisation, which does backward itself: "
                "return the loss, or set automatic_optimization = False."
            )
        if run.weightless:
            run.engine.backward(run.precision.scale(loss) * 0.0)
            return
        run.hooks.on_before_backward(loss)
        run.engine.backward(run.precision.scale(loss))
        run.hooks.on_after_backward()

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
        self._fit_run("clip_gradients").precision.unscale(optimizer.optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_(parameters, max_norm=max_grad_norm, max_value=max_grad_value)

    # -- wiring --------------------------------------------------------------------------------

    def _fit_run(self, what: str) -> FitRun:
        if not isinstance(self._run, FitRun):
            raise RuntimeError(f"{what} is there only while fit runs.")
        return self._run

    @contextmanager
    def _stage(self, stage: str, module: TrainModule, datamodule: Any) -> Iterator[HookTable]:
        """What surrounds every entry point: set-up before, tear-down after, also after an error."""
        assemble.check_module(module, stage)
        module.__dict__["_trainer"] = self
        hooks = HookTable(self, module, self.callbacks, TrainModule)
        self._stop_requested = False
        try:
            local_main_first(lambda: _prepare_data(module, datamodule))
            assemble.call_if_there(datamodule, "setup", stage)
            for callback in self.callbacks:
                callback.setup(self, module, stage)
            module.setup(stage)
            module.configure_model()
            yield hooks
        except BaseException as error:
            hooks.on_exception(error)
            raise
        finally:
            self._tear_down(stage, module, datamodule)

    def _tear_down(self, stage: str, module: TrainModule, datamodule: Any) -> None:
        if isinstance(self._run, FitRun):
            self._items_seen = self._run.agreement.items_seen
        try:
            assemble.call_if_there(datamodule, "teardown", stage)
            for callback in self.callbacks:
                callback.teardown(self, module, stage)
            module.teardown(stage)
        finally:
            if self._recorder is not None:
                self._recorder.finish()
            self._run = self._feed = None
            module.__dict__["_trainer"] = None

    def _prepare_fit(
        self,
        module: TrainModule,
        hooks: HookTable,
        train_dataloaders: Any,
        val_dataloaders: Any,
        datamodule: Any,
        ckpt_path: Any,
    ) -> FitRun:
        accelerator = self.accelerator
        if not module.automatic_optimization and self._accumulation > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {self._accumulation}, but in manual optimisation "
                "training_step decides when to step; leave it at 1."
            )
        if self._seed is not None:
            set_seed(self._seed)
        accelerator.gradient_state.sync_gradients = True
        data_seed = broadcast_object(torch.initial_seed()) if self._seed is None else self._seed
        loaders = assemble.loaders_for("fit", train_dataloaders, module, datamodule)
        if len(loaders) > 1:
            raise ValueError(f"fit was given {len(loaders)} training loaders; it takes one.")
        self._feed = feed = self._feed_for("limit_train_batches", loaders[0], data_seed)
        assemble.check_same_length(feed, "training")
        if feed.num_batches == 0:
            raise ValueError(
                "The training loader is empty: check its dataset, its sampler and drop_last, and "
                "limit_train_batches."
            )
        val_feeds = self._validation_feeds(module, val_dataloaders, datamodule, data_seed)
        module.to(accelerator.device)
        agreement = Agreement(accelerator.device)
        engine = choose_engine(
            module,
            agreement,
            world_size=accelerator.num_processes,
            automatic=module.automatic_optimization,
            ddp_kwargs=accelerator.ddp_kwargs,
        )
        optimizers, schedulers = assemble.prepare_optimizers(module, accelerator)
        chosen = self._choose(ckpt_path, fresh_is_checked=ckpt_path is None)
        self._counters = Counters()
        nominal = None if feed.sampler is None else feed.sampler.batch_size
        counted = is_overridden(module, "count_items", TrainModule)
        self._run = run = FitRun(
            **self._common(module, hooks, resuming=chosen is not None),
            broadcast_buffers=engine.broadcast_buffers,
            engine=engine,
            agreement=agreement,
            weighting=LossWeighting(
                micro_batches=self._accumulation,
                world_size=accelerator.num_processes,
                reference=None if counted or nominal is None else float(nominal),
            ),
            feed=feed,
            val_feeds=val_feeds,
            optimizers=optimizers,
            schedulers=schedulers,
            parameters=list(module.parameters()),
            length=self._length,
            accumulation=self._accumulation,
            max_grad_norm=self._max_grad_norm,
            max_grad_value=self._max_grad_value,
            val_schedule=Schedule(self._val_every),
            log_schedule=Schedule(self._log_every),
            sanity_steps=self._sanity_steps,
            stop_requested=lambda: self._stop_requested,
        )
        self._run_id = broadcast_object(uuid.uuid4().hex)
        offset = None
        if chosen is not None:
            state = load_run(run, chosen, trainer=self, callbacks=self.callbacks)
            self._run_id, offset = state["run_id"], state["record_offset"]
        elif self._seed is not None and accelerator.process_index > 0:
            # Rank 0 goes on as one process would; the others must not draw the same dropout masks.
            seed_generators(mix(self._seed, accelerator.process_index) % 2**32)
        run.recorder.start(self._configuration())
        run.recorder.cut(offset)
        return run

    def _common(self, module: TrainModule, hooks: HookTable, *, resuming: bool) -> dict[str, Any]:
        """What every run has, whichever entry point it came through."""
        accelerator = self.accelerator
        self._recorder = self._make_recorder(resuming=resuming)
        return {
            "module": module,
            "hooks": hooks,
            "metrics": MetricStore(accelerator.device, world_size=accelerator.num_processes),
            "recorder": self._recorder,
            "precision": accelerator.precision,
            "device": accelerator.device,
            "world_size": accelerator.num_processes,
            "rank": accelerator.process_index,
            "counters": self._counters,
        }

    def _evaluate(
        self,
        stage: str,
        phase: Phase,
        module: TrainModule,
        dataloaders: Any,
        datamodule: Any,
        ckpt_path: Any,
        limit: str,
    ) -> list[dict[str, float]]:
        with self._stage(stage, module, datamodule) as hooks:
            run, feeds = self._prepare_evaluation(
                stage, module, hooks, dataloaders, datamodule, ckpt_path, limit
            )
            return evaluate(run, phase, feeds)

    def _prepare_evaluation(
        self,
        stage: str,
        module: TrainModule,
        hooks: HookTable,
        dataloaders: Any,
        datamodule: Any,
        ckpt_path: Any,
        limit: str,
    ) -> tuple[Run, list[Feed]]:
        loaders = assemble.loaders_for(stage, dataloaders, module, datamodule)
        feeds = [self._feed_for(limit, loader, 0) for loader in loaders]
        for number, feed in enumerate(feeds):
            assemble.check_same_length(feed, f"{stage} (number {number})")
            if feed.num_batches == 0 and self._limits[limit] != 0:
                raise ValueError(f"The {stage} loader number {number} is empty.")
        module.to(self.accelerator.device)
        chosen = self._choose(ckpt_path, fresh_is_checked=False)
        if chosen is not None:
            load_weights(module, chosen)
        self._run = run = Run(**self._common(module, hooks, resuming=True))
        run.recorder.start(self._configuration())
        return run, feeds

    def _validation_feeds(
        self, module: TrainModule, given: Any, datamodule: Any, seed: int
    ) -> list[Feed]:
        if self._limits["limit_val_batches"] == 0 or not is_overridden(
            module, "validation_step", TrainModule
        ):
            if given is not None and self._limits["limit_val_batches"] != 0:
                raise TypeError(
                    f"fit was given validation data, but {type(module).__name__} does not define "
                    "validation_step."
                )
            return []
        loaders = assemble.find_loaders(
            "val_dataloader", given, module, datamodule, "val_dataloaders"
        )
        feeds = [self._feed_for("limit_val_batches", loader, seed) for loader in loaders]
        for number, feed in enumerate(feeds):
            assemble.check_same_length(feed, f"validation (number {number})")
            if feed.num_batches == 0:
                raise ValueError(f"The validation loader number {number} is empty.")
        return feeds

    def _feed_for(self, limit: str, loader: Any, seed: int) -> Feed:
        overfit = self._limits["overfit_batches"]
        both = overfit is not None and limit in ("limit_train_batches", "limit_val_batches")
        name = "overfit_batches" if both else limit
        return assemble.make_feed(
            loader,
            self.accelerator,
            seed=seed,
            shuffle=not both,
            limit=self._limits[name],
            limit_name=name,
        )

    def _choose(self, ckpt_path: Any, *, fresh_is_checked: bool) -> Path | None:
        """The checkpoint to go on from; without one the folder must not be another run's."""
        if self.fast_dev_run and ckpt_path in ("auto", None):
            return None
        if self._given_project_dir is not None and self.accelerator.is_main_process:
            disk.sweep(self.checkpoint_dir)
        if fresh_is_checked:
            there = broadcast_object(bool(disk.committed(self.checkpoint_dir)))
            if there:
                raise ValueError(
                    f"{self.checkpoint_dir} has the checkpoints of another run. To go on with it "
                    "pass fit(ckpt_path='auto'); to start a new one give another project_dir."
                )
            return None
        monitors = [
            (callback.monitor.name, callback.monitor.mode)
            for callback in self.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
        ]
        return choose_checkpoint(ckpt_path, self.checkpoint_dir, monitors)

    def _make_recorder(self, *, resuming: bool) -> Recorder:
        """The record and the trackers on the main process, objects that do nothing elsewhere."""
        if self.fast_dev_run or not self.accelerator.is_main_process:
            return Recorder(NullTracker(), [])
        if not resuming and self.metrics_path.exists():
            _set_aside(self.metrics_path)
        record = BackgroundTracker(JsonlTracker(self.metrics_path), capacity=_LARGE)
        purge = {"tensorboard": {"purge_step": self.global_step + 1}} if resuming else None
        trackers: list[GeneralTracker] = resolve_trackers(
            self._log_with,
            project_name=self._project_name or self.project_dir.name,
            run_name=self._run_name,
            logging_dir=self.project_dir / "logs",
            init_kwargs=purge,
        )
        return Recorder(record, [BackgroundTracker(tracker) for tracker in trackers])

    def _configuration(self) -> dict[str, Any]:
        return {
            **describe(self._length),
            **{name: limit for name, limit in self._limits.items() if limit is not None},
            "val_every": str(self._val_every),
            "log_every": str(self._log_every),
            "gradient_accumulation_steps": self._accumulation,
            "max_grad_norm": self._max_grad_norm,
            "max_grad_value": self._max_grad_value,
            "mixed_precision": self.accelerator.mixed_precision,
            "num_processes": self.accelerator.num_processes,
            "seed": self._seed,
        }


def _complete(
    callbacks: Sequence[Callback] | Callback | None, *, progress_bar: bool, checkpointing: bool
) -> list[Callback]:
    """The user's callbacks with the defaults, those that save last."""
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
    for callback in given:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks holds {callback!r} of type {type(callback).__name__}; every one must "
                "be an instance of callbacks.Callback."
            )
    keys = [callback.state_key for callback in given]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(
                f"Two callbacks have the state_key {key!r}, so that a checkpoint could not tell "
                "them apart; override the property in one of them."
            )
    if progress_bar and not any(isinstance(one, ProgressBar) for one in given):
        given.insert(0, ProgressBar())
    if checkpointing and not any(isinstance(one, ModelCheckpoint) for one in given):
        given.append(ModelCheckpoint())
    return sorted(given, key=lambda callback: callback.runs_last)


def _prepare_data(module: TrainModule, datamodule: Any) -> None:
    assemble.call_if_there(datamodule, "prepare_data")
    module.prepare_data()


def _set_aside(path: Path) -> None:
    """Keep the record of a run that left no checkpoint, under another name."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
