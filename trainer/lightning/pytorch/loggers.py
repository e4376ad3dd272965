"""Lightning's loggers: Cadence's trackers, with Lightning's arguments and attributes."""

from __future__ import annotations

import atexit
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from trackers.base import GeneralTracker
from trackers.comet import CometMLTracker
from trackers.csv import CSVTracker
from trackers.mlflow import MLflowTracker
from trackers.redaction import redact
from trackers.tensorboard import TensorBoardTracker
from trackers.wandb import WandBTracker
from trainer import environment
from trainer.distributed.objects import broadcast_object
from trainer.errors import module_logger
from trainer.hparams import logged
from trainer.lightning.missing import getter
from trainer.lightning.pytorch.utilities.rank_zero import rank_zero_only

__all__ = [
    "CSVLogger",
    "CometLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]

_logger = module_logger(__name__)
__getattr__ = getter(__name__)


class _NoExperiment:
    """Replaces an SDK's object on processes without a tracker; calls do nothing."""

    def __getattr__(self, name: str) -> _NoExperiment:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a function for the property `experiment`, so that it does nothing except on rank 0."""
    return rank_zero_only(fn, default=_NoExperiment())


class Logger:
    """The common base of Lightning's loggers, and of custom loggers.

    A custom logger overrides `name`, `version`, `log_metrics` and `log_hyperparams`, and may
    override `experiment`, `save`, `finalize`, `save_dir` and `root_dir`. They are called on rank 0,
    on a separate thread, with the same metrics and steps as in Lightning.

    Attributes:
        name: The name of the project, or of the folder of all runs.
        version: The name or the number of this run.
        save_dir: The folder of all projects; None for a service.
        log_dir: The folder of this run; None for a service.
        trainer: The Trainer that has this logger; None before it has one.
    """

    save_dir: Path | None = None
    log_dir: Any = None
    version: Any = None
    trainer: Any = None
    logs_epoch = True  # next to the other values, as in Lightning
    _thread: int | None = None  # the tracker's thread
    _used = False  # whether the tracker has been opened

    @cached_property
    def _early(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """The calls made before a run: methods of the tracker with their arguments."""
        return []

    @property
    def name(self) -> str:
        """See the attributes."""
        return self.project

    @name.setter
    def name(self, name: str) -> None:
        self.project = name

    @property
    def kind(self) -> str:
        """The tracker's own name, under which a checkpoint stores the run's id."""
        names = (vars(cls).get("name") for cls in type(self).__mro__)
        return next(name for name in names if isinstance(name, str))

    @property
    def experiment(self) -> Any:
        """The SDK's own object on rank 0, until the program ends; on other ranks calls do nothing.

        The first access opens the run. During a fit, it waits until the tracker has started. Calls
        on the object run on the calling thread.
        """
        if self._is_within:
            return self._sdk_object
        if rank_zero_only.rank != 0:
            return _NoExperiment()
        running = self._running if self._in_stage else None
        if running is None or not running.started:
            self._open()
        else:
            running.tracker  # noqa: B018 - waits, and raises the error of the start
        return self._sdk_object

    @property
    def _sdk_object(self) -> Any:
        return self.tracker  # type: ignore[attr-defined]  # of the tracker, the next base

    @property
    def _in_stage(self) -> bool:
        """Whether a fit or an evaluation, which uses the tracker, is running."""
        return self.trainer is not None and self.trainer.stage_name is not None

    @property
    def _is_open(self) -> bool:
        """Whether the SDK's object exists; it may also exist after a fit."""
        return vars(self).get("_opened") is not None

    def _open(self) -> None:
        """Start the tracker outside of a fit, unless it is open, and send values logged before."""
        if not self._is_open:
            if self._used:
                self.resume(self.run_id, None)  # type: ignore[attr-defined]  # as above
            super().start()  # type: ignore[misc]  # of the tracker, the next base
        self._thread = threading.get_ident()
        try:
            self._send_early()
        finally:
            self._thread = None
        if not self._is_open:  # a table, which is closed after each use
            super().finish()  # type: ignore[misc]  # of the tracker, the next base

    def _send_early(self) -> None:
        self._used = True
        early, self._early = self._early, []
        for method, args, options in early:
            getattr(self, method)(*args, **options)

    def _send_at_exit(self) -> None:
        if self._early and rank_zero_only.rank == 0:
            self._open()
            super().finish()  # type: ignore[misc]  # of the tracker, the next base

    @property
    def _is_within(self) -> bool:
        """Whether this is the tracker's own thread, on which `log` calls `log_metrics`."""
        return threading.get_ident() == self._thread

    @property
    def _running(self) -> Any:
        """The run's background tracker; None on processes without one."""
        trackers = [] if self.trainer is None else self.trainer.trackers
        return next((tracker for tracker in trackers if tracker.wrapped is self), None)

    @property
    def root_dir(self) -> Path | None:
        """The folder of this project's runs."""
        return None if self.save_dir is None else Path(self.save_dir) / (self.name or "")

    @property
    def run_dir(self) -> Path | None:
        """The folder of this run, which the Trainer uses too."""
        root, version = self.root_dir, self.version
        if root is None:
            return None
        return Path(root, f"version_{version}" if isinstance(version, int) else str(version))

    project: str = "lightning_logs"

    def share_version(self) -> None:
        """Give all processes rank 0's run; collective, called when a Trainer is created."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values if the tracker runs here; before a run, they are sent at its start."""
        self._call("log", dict(metrics), step, direct=True)

    def log_hyperparams(
        self,
        params: Mapping[str, Any] | Namespace,
        metrics: Mapping[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Store hyperparameters if the tracker runs here; before a run, they are sent at its start.

        Args:
            params: The hyperparameters.
            metrics: Values to log with them; a single number is logged as ``"hp_metric"``.
            step: The step of the metrics; None is 0.
        """
        values = vars(params) if isinstance(params, Namespace) else params
        self._call("store_init_configuration", dict(values))
        if metrics is not None:
            named = metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}
            self.log_metrics(named, step or 0)

    def log(
        self, values: dict[str, Any], step: int | None = None, direct: bool = False, **kwargs: Any
    ) -> None:
        """Record values, on the tracker's thread.

        Values from the Trainer go through `log_metrics`, which a subclass may override.
        """
        if direct or kwargs:
            super().log(values, step, **kwargs)  # type: ignore[misc]  # of the tracker, the next base
        else:
            self.log_metrics(values, step)

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        if self._is_within:
            getattr(self, method)(*args, **options)
        elif self._in_stage:
            if (running := self._running) is not None:
                getattr(running, method)(*args, **options)
        elif rank_zero_only.rank == 0:
            if not self._early:
                atexit.register(self._send_at_exit)
            self._early.append((method, redact(args), options))
            if self._used:
                self._open()

    def start(self) -> None:
        """Start the tracker or continue its open run, and send values logged before."""
        self._thread = threading.get_ident()
        if not self._is_open:
            super().start()  # type: ignore[misc]  # of the tracker, the next base
        self._send_early()

    def finish(self) -> None:
        """Write pending values; the run stays open for `experiment`."""
        self._thread, opened = None, vars(self).get("_opened")
        super().finish()  # type: ignore[misc]  # of the tracker, the next base
        if opened is not None:
            self._opened = opened

    def watch(self, *_: Any, **__: Any) -> None:
        """Raise an error, since a callback logs gradient norms instead.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "logger.watch is not available: pass callbacks=[GradientNormMonitor()] of the package "
            "callbacks to the Trainer, which logs the norms of the gradients."
        )

    def save(self) -> None:
        """Do nothing, since every record is written at once."""

    def finalize(self, status: str) -> None:
        """Save; the Trainer closes the tracker."""
        self.save()


class DummyLogger(Logger):
    """Replaces loggers in a trial run; calls do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _NoExperiment()


class LoggerTracker(GeneralTracker):
    """Calls the methods of a custom logger, with Lightning's step numbers.

    Args:
        logger: The logger.
    """

    name = "logger"
    requires_logging_directory = False
    logs_epoch = True

    def __init__(self, logger: Logger) -> None:
        self.logger, self.name = logger, type(logger).__name__
        self._first = 1

    @property
    def tracker(self) -> Any:
        """The object that the logger writes to."""
        return self.logger.experiment

    def begin_anew(self) -> None:
        """Number the first update 0."""
        self._first = 1

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Continue the numbering of updates; in an evaluation, use the total number of updates."""
        self._first = 0 if step is None else 1

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the hyperparameters of the module and its data, if there are any."""
        trainer = self.logger.trainer
        owners = [each for each in (trainer.model, trainer.datamodule) if each is not None]
        names = {name for owner in owners for name in logged(owner)}
        if hparams := {name: value for name, value in values.items() if name in names}:
            self.logger.log_hyperparams(hparams)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.logger.log_metrics(values, None if step is None else step - self._first, **kwargs)
        self.logger.save()

    def finish(self) -> None:
        """Finalize the logger."""
        self.logger.finalize("success" if self.status == "finished" else "failed")


def next_version(folder: Path) -> int:
    """Return the number after the highest ``version_N`` in a folder."""
    numbers = [path.name.removeprefix("version_") for path in folder.glob("version_*")]
    return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1


_INSTEAD = {
    "prefix": "log under longer names",
    "sub_dir": "give a longer name or version",
    "log_graph": "call self.logger.log_graph(self) in on_fit_start",
    "log_model": "pass callbacks.ModelCheckpoint(log_model=True)",
    "experiment": "give the arguments of wandb.init",
}


def _check_unused(options: dict[str, Any], *names: str) -> None:
    """Remove Lightning's logger arguments that must be empty.

    Raises:
        ValueError: An argument is not empty.
    """
    for name in names:
        if value := options.pop(name, None):
            raise ValueError(f"A logger has {name}={value!r}; leave it out, and {_INSTEAD[name]}.")


class InFolder(Logger):
    """A logger whose files are in ``save_dir/name/version``."""

    def _place(self, save_dir: Any, name: str | None, version: Any) -> tuple[str, Path]:
        self.save_dir = Path(save_dir).expanduser().absolute()
        self.project = "" if name is None else str(name)
        root = self.save_dir / self.project
        self.version = next_version(root) if version is None else version
        return self._folder.name, root

    @property
    def _folder(self) -> Path:
        folder = self.run_dir
        assert folder is not None
        return folder

    def share_version(self) -> None:
        """Take rank 0's version, since a process that counts later may find another number."""
        self.version = broadcast_object(self.version)
        self._move()

    def next_version(self) -> None:
        """Take the next version for another run: the next number, or ``name-v1`` for a name."""
        if isinstance(self.version, int):
            self.version = next_version(self._folder.parent)
        else:
            names = (f"{self.version}-v{number}" for number in count(1))
            self.version = next(name for name in names if not (self._folder.parent / name).exists())
        self.share_version()

    def _move(self) -> None:
        """Make the tracker write to `run_dir`."""
        raise NotImplementedError


class TensorBoardLogger(InFolder, TensorBoardTracker):
    """`trackers.tensorboard.TensorBoardTracker` in ``save_dir/name/version_N``.

    Args:
        save_dir: The folder of all projects.
        name: The folder of this project's runs.
        version: The run's name or number; None is the next number.
        log_graph: Must be False; call `log_graph` instead.
        default_hp_metric: Has no effect.
        prefix: Must be empty.
        sub_dir: Must be empty.
        **options: Arguments of torch's ``SummaryWriter``.
    """

    def __init__(
        self,
        save_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: Any = None,
        **options: Any,
    ) -> None:
        unused = {"prefix": prefix, "sub_dir": sub_dir, "log_graph": log_graph}
        _check_unused(unused, *unused)
        run, root = self._place(save_dir, name, version)
        TensorBoardTracker.__init__(self, run, root, **options)

    def _move(self) -> None:
        self.log_dir = self._folder

    @property
    def _is_open(self) -> bool:
        # Not if the next fit has another folder, or hides values of a killed run.
        if not super()._is_open or self._purge_step is not None:
            return False
        return bool(self.tracker.get_logdir() == str(self.log_dir))

    def start(self) -> None:
        """Start the tracker; the files of an open run are kept."""
        self._renames_existing = self._renames_existing and not self._is_open
        super().start()

    def finish(self) -> None:
        """Write pending values; a later event opens the file again."""
        file = self._file
        super().finish()
        self._file = file

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of a model; see `TensorBoardTracker.log_graph`.

        Args:
            model: The model.
            input_array: The model's input; None takes its `example_input_array`.

        Raises:
            ValueError: There is no example.
        """
        example = model.example_input_array if input_array is None else input_array
        if example is None:
            raise ValueError(
                "log_graph needs an example of what forward takes: pass it, or set "
                "self.example_input_array."
            )
        if not isinstance(self.experiment, _NoExperiment):  # waits until the tracker has started
            super().log_graph(model, example)


class CSVLogger(InFolder, CSVTracker):
    """`trackers.csv.CSVTracker`: ``metrics.csv`` in ``save_dir/name/version_N``.

    ``hparams.yaml`` next to it has the hyperparameters and the Trainer's arguments.

    Args:
        save_dir: The folder of all projects.
        name: The folder of this project's runs.
        version: The run's name or number; None is the next number.
        prefix: Must be empty.
        flush_logs_every_n_steps: Has no effect, since every record is written at once.
    """

    def __init__(
        self,
        save_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        _check_unused({"prefix": prefix}, "prefix")
        run, root = self._place(save_dir, name, version)
        self.hparams: dict[str, Any] = {}
        CSVTracker.__init__(self, run, root)

    def _move(self) -> None:
        self.path = self._folder / self.path.name

    @property
    def log_dir(self) -> str:
        """The folder of this run."""
        return str(self._folder)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``hparams.yaml``; values that are not plain data are written as text."""
        self.hparams.update(json.loads(json.dumps(values, default=str)))
        (self._folder / "hparams.yaml").write_text(yaml.safe_dump(self.hparams))


class WandbLogger(Logger, WandBTracker):
    """`trackers.wandb.WandBTracker`.

    Args:
        name: The run's name.
        save_dir: The folder of wandb's files, also as `dir`.
        version: The run's id, also as `id`.
        offline: Whether to send nothing to the server.
        dir: See `save_dir`.
        id: See `version`.
        anonymous: Has no effect.
        project: The project.
        log_model: Must be False.
        experiment: Must be None.
        prefix: Must be empty.
        checkpoint_name: Has no effect, since `log_model` is False.
        add_file_policy: Has no effect, since `log_model` is False.
        **kwargs: Arguments of ``wandb.init``.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: Any = ".",
        version: str | None = None,
        offline: bool = False,
        dir: Any = None,  # noqa: A002 - Lightning's name
        id: str | None = None,  # noqa: A002 - Lightning's name
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Any = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        unused = {"log_model": log_model, "prefix": prefix, "experiment": experiment}
        _check_unused(unused, *unused)
        identity = id or version
        options = {
            "name": name,
            "dir": str(save_dir if dir is None else dir),
            "id": identity,
            "mode": "offline" if offline else None,
        }
        kwargs.update({key: value for key, value in options.items() if value is not None})
        self.project, self.version = project or "lightning_logs", identity
        WandBTracker.__init__(self, self.project, **kwargs)

    @property
    def _is_open(self) -> bool:
        import wandb

        separate = self.init_kwargs.get("reinit") == "create_new"
        return super()._is_open and (separate or wandb.run is not None)  # it may be finished

    def finish(self) -> None:
        """Record how the fit ended; ``wandb.finish()`` or the end of the program closes the run."""
        self._thread = None
        if self._opened is None or self._joined:
            return
        if self.status == "preempted":
            self._opened.mark_preempting()
        self._opened.summary["status"] = self.status

    def log_image(
        self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]
    ) -> None:
        """Log images; each keyword, such as `caption`, is a list with an item for each image."""
        import wandb

        self._call("log_images", {key: _made(wandb.Image, images, kwargs)}, step)

    def log_audio(
        self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]
    ) -> None:
        """Log audio; each keyword, such as `sample_rate`, is a list with an item for each clip."""
        import wandb

        self._call("log", {key: _made(wandb.Audio, audios, kwargs)}, step, direct=True)

    def log_video(
        self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]
    ) -> None:
        """Log videos; each keyword, such as `fps`, is a list with an item for each video."""
        import wandb

        self._call("log", {key: _made(wandb.Video, videos, kwargs)}, step, direct=True)

    def log_text(  # type: ignore[override]  # Lightning logs a table
        self,
        key: Any,
        columns: Any = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log texts as a table; see `log_table`."""
        if isinstance(key, dict):  # called like any tracker, with the step as second argument
            super().log_text(key, columns, **kwargs)
        else:
            self.log_table(key, columns, data, dataframe, step, **kwargs)

    def log_table(  # type: ignore[override]  # Lightning's name of the first argument
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; see `GeneralTracker.log_table`."""
        if self._is_within:
            super().log_table(key, columns, data, dataframe, step, **kwargs)
        else:
            self._call("log_table", key, columns, data, dataframe, step, **kwargs)


def _made(kind: Any, items: Sequence[Any], options: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return W&B objects for items, each with its own options."""
    each = [dict(zip(options, one, strict=True)) for one in zip(*options.values(), strict=True)]
    pairs = zip(items, each or [{} for _ in items], strict=True)
    return [kind(item, **own) for item, own in pairs]


class CometLogger(Logger, CometMLTracker):
    """`trackers.comet.CometMLTracker`.

    Args:
        project: The project.
        name: The experiment's name.
        prefix: Must be empty.
        **kwargs: Arguments of ``comet_ml``, such as `api_key`, `workspace`, `experiment_key`,
            `mode` and `online`.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_unused({"prefix": prefix}, "prefix")
        self.project, self.version = project or "lightning_logs", name
        CometMLTracker.__init__(self, self.project, **kwargs, **({"name": name} if name else {}))

    def finish(self) -> None:
        """Record how the fit ended; the end of the program closes the experiment."""
        self._thread = None
        if self._opened is not None and not self._joined:
            self._opened.log_other("status", self.status)
            self._opened.flush()


class MLFlowLogger(Logger, MLflowTracker):
    """`trackers.mlflow.MLflowTracker`.

    Args:
        experiment_name: The experiment.
        run_name: The run's name.
        tracking_uri: The server or the database; None takes `save_dir`, ``MLFLOW_TRACKING_URI``, or
            the database ``mlflow.db`` in the folder of the run's logs.
        tags: Tags of the run.
        save_dir: A folder of files; MLflow 3.17 accepts it with ``MLFLOW_ALLOW_FILE_STORE=true``.
        log_model: Must be False.
        prefix: Must be empty.
        artifact_location: The folder or URI for the files of a newly created experiment.
        run_id: A run to continue.
        synchronous: Has no effect, since a thread waits instead of the training.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: Any = None,
        log_model: Any = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        _check_unused({"log_model": log_model, "prefix": prefix}, "log_model", "prefix")
        if save_dir is not None:
            tracking_uri = tracking_uri or f"file:{save_dir}"
        self.project = experiment_name
        MLflowTracker.__init__(
            self,
            experiment_name,
            artifact_location,
            run_id,
            tags,
            run_name=run_name,
            tracking_uri=tracking_uri,
        )

        if run_id is None:  # as in Lightning, not in the script's open run
            self._requested_run_id, self._joined = environment.read("MLFLOW_RUN_ID"), False

    def start(self) -> None:
        """Begin or continue the run, since a fit sets the run's state at its end."""
        if self._is_open and self._previous[0] is None:
            self.resume(self.run_id, None)
        self._opened = None
        super().start()

    @property
    def _sdk_object(self) -> Any:
        """The ``MlflowClient``."""
        return self.client

    @property
    def experiment_id(self) -> Any:
        """The experiment's id, on rank 0."""
        run = self.experiment
        return None if isinstance(run, _NoExperiment) else self.tracker.info.experiment_id

    @property
    def version(self) -> Any:
        """The run's id, once it has started."""
        return self.run_id
