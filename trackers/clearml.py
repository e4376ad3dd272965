"""The tracker for ClearML."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from trackers.media import finite_values, plain
from trackers.registry import register_tracker
from trackers.service import MediaTracker

_PHASE = re.compile(r"(train|val|eval|test)[_/](.+)")


def _title_and_series(name: str) -> tuple[str, str]:
    """Return the names of chart and curve; training and validation share a metric's chart."""
    found = _PHASE.fullmatch(name)
    return (found[2], found[1]) if found else (name, "train")


@register_tracker
class ClearMLTracker(MediaTracker):
    """A task at ClearML or, with ``CLEARML_OFFLINE_MODE=1``, in a folder on disk.

    "train/loss" and "val/loss" are two curves of the chart "loss". A run that resumes continues the
    same task. Offline, each start of a run is a session with the tag "continues <id of the first>";
    ``Task.import_offline_session(folder, previous_task_id=…)`` joins them.

    A task that the script has open is joined, and stays open at the end. ClearML's hooks into torch
    and argparse are disabled unless `kwargs` enable them.

    Example::

        trainer = Trainer(max_epochs=10, log_with=ClearMLTracker("digits", tags=["baseline"]))

    Args:
        run_name: the name of the project.
        name: the name of the task; by default the project's name.
        **kwargs: for `clearml.Task.init`, for example `tags`, `output_uri`, `reuse_last_task_id`.

    Raises:
        ImportError: clearml is not installed.
    """

    name = "clearml"
    requires_package = "clearml"

    def __init__(self, run_name: str, *, name: str | None = None, **kwargs: Any) -> None:
        names = {"project_name": run_name, "task_name": name or run_name}
        super().__init__(run_name, **{**names, **kwargs})

    @property
    def task(self) -> Any:
        """The `clearml.Task`, under the name that accelerate's tracker uses."""
        return self.tracker

    def _find_open(self) -> Any:
        from clearml import Task

        return Task.current_task()

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        from clearml import Task
        from clearml.config import config_obj

        if config_obj.get("sdk.development.report_use_subprocess", None) is None:
            # By default ClearML forks a process for its reports. A fork is unsafe while training
            # runs in other threads, and while ClearML's own thread starts git, which may then never
            # return.
            threads = {"sdk": {"development": {"report_use_subprocess": False}}}
            config_obj.set_overrides(threads)
        Task.set_random_seed(None)  # it would seed NumPy and torch in the middle of training
        options: dict[str, Any] = {"reuse_last_task_id": False}
        options.update(auto_connect_frameworks=False, auto_connect_arg_parser=False)
        offline = Task.is_offline()
        if previous is not None and not offline:
            # 0: ClearML does not offset the steps.
            options.update(reuse_last_task_id=previous, continue_last_task=0)
        task = Task.init(**{**options, **self.init_kwargs})
        if previous is not None and offline:
            task.add_tags([f"continues {previous}"])
        return task

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters and as the configuration object "General"."""
        self.tracker.set_parameters_as_dict(plain(values))
        self.tracker.connect_configuration(plain(values))

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        logger = self.tracker.get_logger()
        for name, number in numbers.items():
            if step is None:
                logger.report_single_value(name, number, **kwargs)
            else:
                logger.report_scalar(*_title_and_series(name), number, step, **kwargs)
        self.log_text(texts, step)

    def _log_image(self, name: str, picture: Any, step: int | None, **kwargs: Any) -> None:
        logger = self.tracker.get_logger()
        logger.report_image(*_title_and_series(name), step, image=picture, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        table = [columns, *plain(rows)]
        logger = self.tracker.get_logger()
        logger.report_table(*_title_and_series(name), step, table_plot=table, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as a bar chart with 64 bins, see `GeneralTracker.log_histogram`."""
        import numpy as np

        for name, value in values.items():
            counts, edges = np.histogram(finite_values(name, value), bins=64)
            labels = [f"{edge:.4g}" for edge in edges[:-1]]
            title = _title_and_series(name)
            logger = self.tracker.get_logger()
            logger.report_histogram(*title, counts, step, xlabels=labels, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        stream = io.StringIO(text)
        logger, title = self.tracker.get_logger(), _title_and_series(name)
        logger.report_media(*title, step, stream=stream, file_extension=".txt", **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        label = name or path.name
        if kind == "model" and step is not None:
            label = f"{label}/step-{step}"
        # Waits, because the file may be deleted afterwards.
        options = {"metadata": {"type": kind, "step": step}, "wait_on_upload": True, **kwargs}
        if not self.tracker.upload_artifact(label, path, **options):
            raise ConnectionError(
                f"ClearML has not stored {path}; see ClearML's log for the reason."
            )

    def _end(self, run: Any) -> None:
        if self.status == "failed":
            run.mark_failed(status_reason=self.status)
        elif self.status == "preempted":
            run.mark_stopped(status_message=self.status)
        run.close()
