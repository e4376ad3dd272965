"""The tracker for Trackio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trackers.media import finite_values, plain, to_pil
from trackers.registry import register_tracker
from trackers.service import MediaTracker, file_name


@register_tracker
class TrackioTracker(MediaTracker):
    """A Trackio run in the local database, on a server, or in a Hugging Face Space.

    The database is in the folder ``TRACKIO_DIR``, which Trackio shares among all projects;
    ``trackio show`` shows it. A run that resumes continues the same run; updates after the last
    checkpoint appear twice.

    A run that the script has opened before (``trackio.init``) is joined, and stays open at the end.

    Example::

        trainer = Trainer(max_epochs=10, log_with=TrackioTracker("digits", name="baseline"))

    Args:
        run_name: the name of the project.
        **kwargs: for `trackio.init`, for example `name`, `group`, `space_id`, `server_url`.

    Raises:
        ImportError: trackio is not installed.
    """

    name = "trackio"
    requires_package = "trackio"

    def _find_open(self) -> Any:
        from trackio.context_vars import current_run

        return current_run.get()

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        import trackio

        options = {"project": self.run_name, "embed": False, **self.init_kwargs}
        run_id, _, name = (previous or "").partition(":")
        if name:
            options.setdefault("name", name)
        run = trackio.init(**options)
        if name == run.name:
            run.id = run_id  # Trackio itself resumes the newest run of a name
        return run

    def _id_of(self, run: Any) -> str:
        return f"{run.id}:{run.name}"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration in the run's `config`, which Trackio writes with a record."""
        self.tracker.config.update(plain(values))

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        self.tracker.log({**numbers, **texts}, step=step, **kwargs)

    def _log_pictures(
        self, name: str, pictures: list[Any], step: int | None, **kwargs: Any
    ) -> None:
        import trackio

        images = [
            each if isinstance(each, trackio.Image) else trackio.Image(to_pil(each))
            for each in pictures
        ]
        labels = [name] if len(images) == 1 else [f"{name}/{n}" for n in range(len(images))]
        self.tracker.log(dict(zip(labels, images, strict=True)), step=step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        import trackio

        table = trackio.Table(columns=columns, data=plain(rows))
        self.tracker.log({name: table}, step=step, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as a `trackio.Histogram`, see `GeneralTracker.log_histogram`."""
        import trackio

        each = {n: trackio.Histogram(finite_values(n, value)) for n, value in values.items()}
        self.tracker.log(each, step=step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        import trackio

        self.tracker.log({name: trackio.Markdown(text)}, step=step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        aliases = [] if step is None else [f"step-{step}"]
        options = {"name": file_name(name or path.name), "type": kind, "aliases": aliases}
        self.tracker.log_artifact(path, **{**options, **kwargs})

    def _end(self, run: Any) -> None:
        if self.status != "running":
            run.log({"status": self.status})
        run.finish()
