"""The tracker for Aim."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trackers.media import finite_values, plain, to_csv, to_pil
from trackers.registry import register_tracker
from trackers.service import MediaTracker


@register_tracker
class AimTracker(MediaTracker):
    """A run in an Aim repository: a folder, or a server with ``repo="aim://host:port"``.

    ``aim up --repo <folder>`` shows the repository. A run that resumes continues the same run;
    values that are logged again replace the killed run's values. Files are stored in the folder
    ``artifacts`` next to the repository, unless `artifacts_uri` names another place.

    Example::

        trainer = Trainer(max_epochs=10, log_with=AimTracker("digits", "runs", name="baseline"))

    Args:
        run_name: the name of the Aim experiment, which is the project.
        logging_dir: the folder of the repository ``.aim``.
        name: the name of the run; by default the project's name.
        artifacts_uri: where to store files, for example ``s3://bucket/path``.
        **kwargs: for `aim.Run`, for example `system_tracking_interval`, `log_system_params`.

    Raises:
        ImportError: aim is not installed.
    """

    name = "aim"
    requires_logging_directory = True
    requires_package = "aim"

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str] = ".",
        *,
        name: str | None = None,
        artifacts_uri: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.logging_dir = os.path.abspath(logging_dir)
        self.artifacts_uri = artifacts_uri or Path(self.logging_dir, "artifacts").as_uri()
        self.display_name = name or run_name
        super().__init__(run_name, **kwargs)

    @property
    def writer(self) -> Any:
        """The `aim.Run`, under the name that accelerate's tracker uses."""
        return self.tracker

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        import aim

        options = {"repo": self.logging_dir, "experiment": self.run_name, **self.init_kwargs}
        if previous is not None:
            # A killed process has left its lock behind.
            options = {"run_hash": previous, "force_resume": True, **options}
        if options["repo"] == self.logging_dir:
            os.makedirs(self.logging_dir, exist_ok=True)
        run = aim.Run(**options)
        run.name = self.display_name
        run.set_artifacts_uri(self.artifacts_uri)
        return run

    def _id_of(self, run: Any) -> str:
        return str(run.hash)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as the run's parameters ``hparams``."""
        self.tracker["hparams"] = plain(values)

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        for name, number in numbers.items():
            self.tracker.track(number, name=name, step=step, **kwargs)
        self.log_text(texts, step, **kwargs)

    def _log_pictures(
        self, name: str, pictures: list[Any], step: int | None, **kwargs: Any
    ) -> None:
        import aim

        images = [
            each if isinstance(each, aim.Image) else aim.Image(to_pil(each)) for each in pictures
        ]
        self.tracker.track(images, name=name, step=step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        self._log_text(name, to_csv(columns, rows), step, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as an `aim.Distribution`, see `GeneralTracker.log_histogram`."""
        import aim

        for name, value in values.items():
            distribution = aim.Distribution(finite_values(name, value))
            self.tracker.track(distribution, name=name, step=step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        import aim

        self.tracker.track(aim.Text(text), name=name, step=step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        label = name or path.name
        if kind == "model" and step is not None:
            label = f"{label}/step-{step}"
        log = self.tracker.log_artifacts if path.is_dir() else self.tracker.log_artifact
        log(str(path), name=label, block=True, **kwargs)

    def _end(self, run: Any) -> None:
        if self.status != "running":
            run["status"] = self.status
        if self.status == "finished":
            run.report_successful_finish()
        run.close()
