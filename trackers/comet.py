"""The tracker for Comet (comet_ml)."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from trackers.media import finite_values, plain, to_csv, to_pil
from trackers.registry import register_tracker
from trackers.service import MediaTracker

# Disable Comet's automatic logging, which patches torch and runs inside training calls.
_QUIET = {"auto_metric_logging": False, "auto_param_logging": False, "log_graph": False}


@register_tracker
class CometMLTracker(MediaTracker):
    """An experiment at Comet or, with ``online=False``, in an archive on disk.

    An experiment that the script has open is joined, and stays open at the end, unless `kwargs`
    have an `experiment_key`. A run that resumes continues the same experiment. Comet itself records
    the version of the code, the output and the machine. Comet's hooks into torch are disabled
    unless `kwargs` enable them.

    Example::

        trainer = Trainer(max_epochs=10, log_with=CometMLTracker("digits", tags=["baseline"]))

    Args:
        run_name: the name of the project.
        **kwargs: arguments of `comet_ml.start`, for example `workspace`, `experiment_key`,
            `online`; other arguments go to `comet_ml.ExperimentConfig`, for example `name`, `tags`,
            `offline_directory`.

    Raises:
        ImportError: comet_ml is not installed.
    """

    name = "comet_ml"
    requires_package = "comet_ml"

    @property
    def writer(self) -> Any:
        """The experiment, under the name that accelerate's tracker uses."""
        return self.tracker

    def _find_open(self) -> Any:
        import comet_ml

        running = comet_ml.get_running_experiment()
        joins = running is not None and not running.ended
        return running if joins and "experiment_key" not in self.init_kwargs else None

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        """Begin the experiment, or continue it.

        Raises:
            ConnectionError: Comet did not begin the experiment; Comet's own log says why.
        """
        import comet_ml
        from comet_ml.config.config_api import get_config

        options = {"project_name": self.run_name, **self.init_kwargs}
        if previous is not None:
            options = {"experiment_key": previous, "mode": "get_or_create", **options}
        of_start = inspect.signature(comet_ml.start).parameters
        if self.service_dir is not None and "experiment_config" not in options:
            name: Any = get_config("comet.offline_directory")  # the variable may be absolute
            os.makedirs(self.service_dir, exist_ok=True)  # Comet creates only the last folder
            options.setdefault("offline_directory", os.path.join(self.service_dir, name))
        direct = {name: options.pop(name) for name in list(options) if name in of_start}
        if options or "experiment_config" not in direct:
            direct["experiment_config"] = comet_ml.ExperimentConfig(**{**_QUIET, **options})
        experiment: Any = comet_ml.start(**direct)
        # An experiment that failed to connect would silently drop all values.
        if not (experiment.alive or experiment.disabled):
            experiment.end()
            raise ConnectionError(
                "Comet did not start the experiment; see Comet's log for the reason."
            )
        return experiment

    def _id_of(self, run: Any) -> str:
        return str(run.get_key())

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters.

        Args:
            values: names and values. Values other than numbers, strings, bools and dicts or lists
                of these are stored as their `str`.
        """
        self.tracker.log_parameters(plain(values))

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        for name, number in numbers.items():
            self.tracker.log_metric(name, number, step=step, **kwargs)
        for name, text in texts.items():
            self.tracker.log_other(name, text)

    def _log_image(self, name: str, picture: Any, step: int | None, **kwargs: Any) -> None:
        self.tracker.log_image(to_pil(picture), name=name, step=step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        # Comet's log_table would upload a file of this name from the working directory.
        options = {"name": f"{name}.csv", "step": step, **kwargs}
        self.tracker.log_asset_data(to_csv(columns, rows), **options)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as a histogram over the steps, see `GeneralTracker.log_histogram`."""
        for name, value in values.items():
            numbers = finite_values(name, value)
            self.tracker.log_histogram_3d(numbers, name=name, step=step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        about = {"name": name, **kwargs.get("metadata", {})}
        self.tracker.log_text(text, step=step, **{**kwargs, "metadata": about})

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        import comet_ml

        if kind == "model":
            about = {**({} if step is None else {"step": step}), **kwargs.pop("metadata", {})}
            self.tracker.log_model(name, str(path), metadata=about, **kwargs)
            return
        if not isinstance(self.tracker, comet_ml.OfflineExperiment):
            artifact = comet_ml.Artifact(name or path.name, kind, **kwargs)
            artifact.add(str(path))
            self.tracker.log_artifact(artifact)
            return
        # An offline archive has no artifacts, so the files are added as assets. They are copied,
        # because they may be deleted before the archive is written.
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                label = f"{name or path.name}/{file.relative_to(path)}" if file != path else name
                self.tracker.log_asset(str(file), label or path.name, step=step, copy_to_tmp=True)

    def _end(self, run: Any) -> None:
        if self.status != "running":
            run.log_other("status", self.status)
        run.end()
