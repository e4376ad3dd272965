"""The tracker for Comet (comet_ml)."""

from __future__ import annotations

import inspect
import os
from typing import Any

from trackers.base import ServiceTracker, isolate_random_generator
from trackers.media import (
    finite_values,
    pixels,
    plain,
    render_figure,
    require_path,
    scalars_and_texts,
    to_csv,
)
from trackers.registry import register_tracker

# Disable Comet's automatic logging, which patches torch and runs inside training calls.
_QUIET = {"auto_metric_logging": False, "auto_param_logging": False, "log_graph": False}


def _picture(image: Any) -> Any:
    """Return an array as a PIL image, because comet_ml first treats an array as a file name."""
    from PIL import Image

    return Image.fromarray(image.squeeze()) if hasattr(image, "shape") else image


@register_tracker
class CometMLTracker(ServiceTracker):
    """An experiment at Comet, or in an archive on disk with ``online=False``.

    An experiment that the script has open is joined, and stays open at the end, unless `kwargs`
    have an `experiment_key`. A run that resumes continues the same experiment. Comet itself records
    the version of the code, the output and the machine. Its hooks into torch are disabled unless
    `kwargs` enable them.

    Args:
        run_name: the name of the project.
        **kwargs: arguments of `comet_ml.start`, for example `workspace`, `experiment_key`,
            `online`; all others of `comet_ml.ExperimentConfig`, for example `name`, `tags`,
            `offline_directory`.

    Raises:
        ImportError: comet_ml is not installed.
    """

    name = "comet_ml"
    requires_logging_directory = False
    requires_package = "comet_ml"
    has_projects = True

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._previous: str | None = None

    @property
    def writer(self) -> Any:
        """The experiment, under the name that accelerate's tracker has for it."""
        return self.tracker

    def resume(self, run_id: str | None, step: int | None) -> None:  # noqa: ARG002  # an interface
        """Continue an experiment, unless the arguments name another one."""
        self._previous = run_id

    def start(self) -> None:
        """Begin the experiment, or continue it.

        Raises:
            ConnectionError: Comet did not begin the experiment; Comet's own log says why.
        """
        previous, self._previous = self._previous, None
        self.run_id = previous
        import comet_ml
        from comet_ml.config.config_api import get_config

        # Also because a run and its resumed run, begun with the same seed, would give their offline
        # archives the same name, so that the second replaces the first.
        isolate_random_generator("comet_ml")
        options = {"project_name": self.run_name, **self.init_kwargs}
        if previous is not None:
            options = {"experiment_key": previous, "mode": "get_or_create", **options}
        of_start = inspect.signature(comet_ml.start).parameters
        if self.service_dir is not None and "experiment_config" not in options:
            name: Any = get_config("comet.offline_directory")  # the environment's may be absolute
            os.makedirs(self.service_dir, exist_ok=True)  # Comet makes the last folder only
            options.setdefault("offline_directory", os.path.join(self.service_dir, name))
        direct = {name: options.pop(name) for name in list(options) if name in of_start}
        if options or "experiment_config" not in direct:
            direct["experiment_config"] = comet_ml.ExperimentConfig(**{**_QUIET, **options})
        running = comet_ml.get_running_experiment()
        named = "experiment_key" in self.init_kwargs
        self._joined = running is not None and not running.ended and not named
        experiment: Any = running if self._joined else comet_ml.start(**direct)
        # An experiment that failed to connect would silently drop all values.
        if not (experiment.alive or experiment.disabled):
            experiment.end()
            raise ConnectionError("Comet did not begin the experiment; its own log says why.")
        self._opened = experiment
        self.run_id = experiment.get_key()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters.

        Args:
            values: names and values. Values other than numbers, strings, bools and dicts or lists
                of these are stored as their `str`.
        """
        self.tracker.log_parameters(plain(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics, texts by `log_other`, and dicts under names "outer/inner".

        Args:
            values: names and numbers, tensors or arrays of one element, texts, or dicts of these.
            step: the number of optimizer updates so far.
            **kwargs: for `log_metric` of the experiment, for example `epoch`.

        Raises:
            TypeError: a value is none of these. The others are recorded.
        """
        numbers, texts, error = scalars_and_texts(values)
        for name, number in numbers.items():
            self.tracker.log_metric(name, number, step=step, **kwargs)
        for name, text in texts.items():
            self.tracker.log_other(name, text)
        if error is not None:
            raise error

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images; those of a batch are named "name/0", "name/1" and so on.

        Args:
            values: names and tensors or arrays of one image or a batch, with the channels first or
                last: floats in [0, 1] or bytes; or what the experiment's `log_image` takes.
            step: the number of optimizer updates so far.
            **kwargs: for `log_image` of the experiment.

        Raises:
            ValueError: a shape is not that of an image.
        """
        for name, images in values.items():
            arrays = hasattr(images, "shape") or isinstance(images, (list, tuple))
            pictures = pixels(name, images) if arrays else [images]
            for number, image in enumerate(pictures):
                label = name if len(pictures) == 1 else f"{name}/{number}"
                self.tracker.log_image(_picture(image), name=label, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table as CSV, see `GeneralTracker.log_table`; `kwargs` for `log_asset_data`."""
        text = to_csv(table_name, columns, data, dataframe)
        # Not Comet's log_table, which would upload a file of that name in the working directory.
        options = {"name": f"{table_name}.csv", "step": step, **kwargs}
        self.tracker.log_asset_data(text, **options)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each as a histogram over the steps, see `GeneralTracker.log_histogram`."""
        for name, value in values.items():
            numbers = finite_values(name, value)
            self.tracker.log_histogram_3d(numbers, name=name, step=step, **kwargs)

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each as an image, see `GeneralTracker.log_figure`."""
        for name, value in values.items():
            self.tracker.log_image(_picture(render_figure(value)), name=name, step=step, **kwargs)

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Record each as a text with its name, see `GeneralTracker.log_text`."""
        for name, value in values.items():
            about = {"name": name, **kwargs.get("metadata", {})}
            self.tracker.log_text(value, step=step, **{**kwargs, "metadata": about})

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        kind: str = "artifact",
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a file or a folder as a version of an artifact; offline, as files of the archive.

        Args:
            path: the file or the folder.
            name: the name of the artifact; by default the path's name.
            kind: the artifact's type at Comet.
            step: the number of optimizer updates so far.
            **kwargs: for `comet_ml.Artifact`, for example `aliases`.

        Raises:
            FileNotFoundError: there is nothing at the path.
        """
        import comet_ml

        path = require_path(path)
        if not isinstance(self.tracker, comet_ml.OfflineExperiment):
            artifact = comet_ml.Artifact(name or path.name, kind, **kwargs)
            artifact.add(str(path))
            self.tracker.log_artifact(artifact)
            return
        # An offline archive has no artifacts, so add the files as assets. They are copied, because
        # they may be deleted before the archive is written.
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                label = f"{name or path.name}/{file.relative_to(path)}" if file != path else name
                self.tracker.log_asset(str(file), label or path.name, step=step, copy_to_tmp=True)

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record weights or a checkpoint as a model, ``model`` by default.

        Raises:
            FileNotFoundError: there is nothing at the path.
        """
        path = require_path(path)
        about = {**({} if step is None else {"step": step}), **kwargs.pop("metadata", {})}
        self.tracker.log_model(name or "model", str(path), metadata=about, **kwargs)

    def finish(self) -> None:
        """Record how the run ended as the experiment's "status", and close it.

        An experiment that the script has opened stays open.
        """
        experiment, self._opened = self._opened, None
        if experiment is None or self._joined:
            return
        if self.status != "running":  # "running": it is unknown how the run ended
            experiment.log_other("status", self.status)
        experiment.end()
