"""The tracker for MLflow."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from time import time
from typing import Any

from trackers.base import isolate_random_generator
from trackers.media import flatten, plain, render_figure, to_csv
from trackers.registry import register_tracker
from trackers.service import MediaTracker
from trainer import environment
from trainer.errors import module_logger

_logger = module_logger("trackers")

_STATES = {"failed": "FAILED", "preempted": "KILLED"}  # all other statuses are FINISHED
_METRICS, _PARAMS = 1000, 100  # limits of one request
_REFUSED = re.compile(r"[^\w/. -]")  # characters that MLflow rejects in names
_LENGTH = 250  # MLflow's limit on the characters of a name


def _name(name: str) -> str:
    """Return a name that MLflow accepts: a relative path without empty parts."""
    parts = _REFUSED.sub("_", name)[:_LENGTH].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _tags(tags: dict[str, Any] | str | None) -> dict[str, Any]:
    tags = environment.read("MLFLOW_TAGS") or tags
    return dict(json.loads(tags) if isinstance(tags, str) else tags or {})


def _open_run() -> str | None:
    """Return the id of the run that the script has open on this thread, if any."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    return None if run is None else str(run.info.run_id)


@register_tracker
class MLflowTracker(MediaTracker):
    """An MLflow run, on a server or in the local database.

    The tracking URI is taken from ``MLFLOW_TRACKING_URI`` or ``mlflow.set_tracking_uri``. Without
    either, it is the SQLite database ``mlflow.db`` in the folder of the run's logs, which
    ``mlflow ui --backend-store-uri sqlite:///<path>`` shows. A run that resumes continues the same
    run, and does not log values again that MLflow already has.

    A run that the script has open when the tracker is created (``mlflow.start_run``) is joined, and
    stays open at the end, unless the arguments name another URI or run. Any other run is not the
    active run of the script: functions such as ``mlflow.log_metric`` do not see it. Use `client`
    with `run_id`.

    Example::

        tracker = MLflowTracker("digits", tracking_uri="http://localhost:5000")
        trainer = Trainer(max_epochs=10, log_with=tracker)

    Args:
        experiment_name: the experiment, that is, the project; created if missing.
            ``MLFLOW_EXPERIMENT_NAME`` takes precedence.
        logging_dir: the folder or URI for the files of a newly created experiment.
        run_id: a run to continue. ``MLFLOW_RUN_ID`` takes precedence.
        tags: tags of the run, as a dict or as JSON. ``MLFLOW_TAGS`` takes precedence.
        nested_run: whether the run belongs to the run that the script has open when the tracker is
            created. ``MLFLOW_NESTED_RUN`` takes precedence.
        run_name: the name of a new run.
        description: a text about the run.
        tracking_uri: the server or the database, instead of the environment's.
        name: the same as `run_name`, as `log_with` passes it.

    Attributes:
        client: the `mlflow.MlflowClient` of the run; None before `start`.

    Raises:
        ImportError: mlflow is not installed.
    """

    name = "mlflow"
    requires_package = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
    ) -> None:
        self.experiment_name = environment.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        super().__init__(self.experiment_name or "")
        self.logging_dir = logging_dir
        self.tags = _tags(tags)
        self.run_name = run_name or name
        self.tracking_uri = tracking_uri
        self.client: Any = None
        self._requested_run_id = environment.read("MLFLOW_RUN_ID") or run_id
        self._created_run_id: str | None = None  # a run whose start failed after its creation
        self._resume_step: int | None = None  # the step from which it resumes
        self._logged_steps: dict[str, set[int]] = {}  # later steps that MLflow already has, by name
        if description is not None:
            self.tags["mlflow.note.content"] = description
        nested = environment.read_flag("MLFLOW_NESTED_RUN", nested_run)
        open_run = _open_run()
        if nested and open_run is not None:
            self.tags["mlflow.parentRunId"] = open_run
        if self._requested_run_id is None and tracking_uri is None and not nested:
            self._requested_run_id = open_run
        self._joined = self._requested_run_id is not None and self._requested_run_id == open_run

    def start(self) -> None:
        """Begin the run, or continue it."""
        previous, self._resume_step = self._previous
        self._logged_steps = {}
        self.run_id = self._requested_run_id or previous or self._created_run_id
        import mlflow

        isolate_random_generator("mlflow")
        self.client = mlflow.MlflowClient(self._uri(mlflow))
        run = None if self.run_id is None else self._continue_run(self.run_id)
        if run is None:
            run = self._create_run()
        self.run_id = self._created_run_id = run.info.run_id
        self._opened = run
        self._previous, self._created_run_id = (None, None), None

    def _uri(self, mlflow: Any) -> str | None:
        """Return the tracking URI of the run; None lets MLflow choose."""
        if self.tracking_uri is not None or self.service_dir is None or self._joined:
            return self.tracking_uri
        if mlflow.is_tracking_uri_set():
            return None
        os.makedirs(self.service_dir, exist_ok=True)
        if self.logging_dir is None:  # MLflow's default would be in the working directory
            self.logging_dir = Path(self.service_dir, "mlartifacts").as_uri()
        return f"sqlite:///{Path(self.service_dir, 'mlflow.db')}"

    def _continue_run(self, run_id: str) -> Any:
        """Continue an earlier run; return None if MLflow no longer has it."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST" or run_id == self._requested_run_id:
                raise
            _logger.warning("MLflow has no run %s; a new run is started.", run_id)
            return None
        for name, value in self.tags.items():
            self.client.set_tag(run_id, name, value)
        return self.client.get_run(run_id)

    def _create_run(self) -> Any:
        from mlflow.tracking.context.registry import resolve_tags

        identity = "0"  # MLflow's default experiment
        if self.experiment_name is not None:
            experiment = self.client.get_experiment_by_name(self.experiment_name)
            location = None if self.logging_dir is None else os.fspath(self.logging_dir)
            identity = (
                self.client.create_experiment(self.experiment_name, artifact_location=location)
                if experiment is None
                else experiment.experiment_id
            )
        tags = resolve_tags({name: str(value) for name, value in self.tags.items()})
        return self.client.create_run(identity, tags=tags, run_name=self.run_name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters, and as the file ``configuration.yaml``.

        In MLflow a parameter keeps its first value, even if a run resumes with another one; the
        file has the latest.

        Args:
            values: names and values; nested names are joined by slashes.
        """
        import yaml
        from mlflow.entities import Param

        values = plain(values)
        existing = self.client.get_run(self.tracker.info.run_id).data.params
        flat = {_name(name): str(value) for name, value in flatten(values).items()}
        new = [Param(name, value) for name, value in flat.items() if name not in existing]
        for first in range(0, len(new), _PARAMS):
            self.client.log_batch(self.run_id, params=new[first : first + _PARAMS])
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        self.client.log_text(self.run_id, text, "configuration.yaml")

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        """Record numbers as metrics, and texts as tags.

        Characters in names that MLflow does not accept become underscores, and empty parts, as in
        "a//b", are left out; names are cut to 250 characters.
        """
        from mlflow.entities import Metric

        run, now = self.tracker.info.run_id, int(1000 * time())
        metrics = [
            Metric(_name(name), float(number), now, step or 0)
            for name, number in numbers.items()
            if not self._has(_name(name), step)
        ]
        for first in range(0, len(metrics), _METRICS):
            self.client.log_batch(run, metrics=metrics[first : first + _METRICS], **kwargs)
        for name, text in texts.items():
            self.client.set_tag(run, _name(name), text)

    def _has(self, name: str, step: int | None) -> bool:
        """Return whether MLflow has a value that a killed run logged after its last checkpoint."""
        if step is None or self._resume_step is None or step <= self._resume_step:
            return False
        if name not in self._logged_steps:
            history = self.client.get_metric_history(self.run_id, name)
            self._logged_steps[name] = {
                metric.step for metric in history if metric.step > self._resume_step
            }
        return step in self._logged_steps[name]

    def _log_image(self, name: str, picture: Any, step: int | None, **kwargs: Any) -> None:
        run = self.tracker.info.run_id
        self.client.log_image(run, picture, key=_name(name), step=step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **_: Any
    ) -> None:
        self._log_as_file(to_csv(columns, rows), "tables", name, step, "csv")

    def log_figure(
        self,
        values: Any = None,
        step: Any = None,
        *,
        figure: Any = None,
        artifact_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Record each value as an image, see `GeneralTracker.log_figure`.

        With one figure and a path, save it as a file, like MLflow:
        ``log_figure(figure, "plots/loss.png")``.
        """
        if isinstance(values, dict):
            super().log_figure(values, step, **kwargs)
            return
        pixels = render_figure(values if figure is None else figure)
        path = step if artifact_file is None else artifact_file
        self.client.log_image(self.tracker.info.run_id, pixels, artifact_file=path, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **_: Any) -> None:
        self._log_as_file(text, "texts", name, step, "txt")

    def _log_as_file(self, text: str, folder: str, name: str, step: int | None, kind: str) -> None:
        at = "" if step is None else f"-{step}"
        path = f"{folder}/{_name(name)}{at}.{kind}"
        self.client.log_text(self.tracker.info.run_id, text, path)

    def log_artifact(
        self,
        path: str | os.PathLike[str] | None = None,
        name: str | None = None,
        kind: str = "artifact",
        step: int | None = None,
        *,
        local_path: str | os.PathLike[str] | None = None,
        artifact_path: str | None = None,
        **kwargs: Any,  # noqa: ARG002  # an interface
    ) -> None:
        """Record a file or the files of a folder.

        Args:
            path: the file or the folder.
            name: the folder for the files within the run. By default a file goes to the root, and a
                folder keeps its name. "" is the root.
            kind: "model" adds ``step-100`` to the folder.
            step: the step, used by `kind`.
            local_path: MLflow's name for `path`.
            artifact_path: MLflow's name for `name`.
            **kwargs: has no effect.

        Raises:
            FileNotFoundError: the path does not exist.
            TypeError: no path is given.
        """
        source = local_path if path is None else path
        if source is None:
            raise TypeError("log_artifact needs path, the file or the folder.")
        super().log_artifact(source, artifact_path if name is None else name, kind, step)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **_: Any
    ) -> None:
        folder, run = name, self.tracker.info.run_id
        if kind == "model" and step is not None:
            folder = f"{name}/step-{step}"
        if path.is_dir():
            self.client.log_artifacts(run, str(path), path.name if folder is None else folder)
        else:
            self.client.log_artifact(run, str(path), folder or None)

    def log_artifacts(
        self, local_dir: str | os.PathLike[str], artifact_path: str | None = None
    ) -> None:
        """Record the files of a folder, by default at the root of the run's files."""
        self.log_artifact(local_dir, artifact_path or "")

    def _end(self, run: Any) -> None:
        self.client.set_terminated(run.info.run_id, _STATES.get(self.status, "FINISHED"))
