"""The base class of service trackers: shared code, and the calls that each subclass translates."""

from __future__ import annotations

import os
import re
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from trackers.base import ServiceTracker, isolate_random_generator
from trackers.media import pixels, render_figure, require_path, scalars_and_texts, table_of


def _pictures(name: str, images: Any) -> list[Any]:
    if isinstance(images, (list, tuple)):
        return [picture for item in images for picture in _pictures(name, item)]
    converted = hasattr(images, "shape") or hasattr(images, "getbands")  # arrays and PIL images
    return pixels(name, images) if converted else [images]


def file_name(name: str) -> str:
    """Return a name with dashes in place of characters that services do not allow in names."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


class MediaTracker(ServiceTracker):
    """A tracker for a service that stores numbers, texts, images, tables and files.

    It opens or joins the run, and splits logged values by type. A subclass records each type: it
    defines `_begin`, `_end`, `store_init_configuration`, `_log_scalars`, `_log_image` (or
    `_log_pictures`), `_log_table`, `_log_text` and `_log_file`.

    Args:
        run_name: the name of the project.
        **kwargs: for the service's own start function.
    """

    requires_logging_directory = False
    has_projects = True
    imports_early = "rich.style"  # imported by many SDKs; its import draws from Python's generator

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self.run_name: str | None = run_name
        self.init_kwargs = kwargs
        self._previous: tuple[str | None, int | None] = (None, None)
        self._new_id: str | None = None  # the id of a run that has not begun yet

    @property
    def run(self) -> Any:
        """The SDK's object, under the name that accelerate's trackers use."""
        return self.tracker

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Continue a run, unless the arguments name another one."""
        self._previous = (run_id, step)

    def start(self) -> None:
        """Begin the run, continue it, or join one that the script has open."""
        (previous, step), self._previous = self._previous, (None, None)
        self.run_id = previous
        assert self.requires_package is not None
        import_module(self.requires_package)
        # With the global generator, runs with the same seed would also get the same name.
        isolate_random_generator(self.requires_package)
        running = self._find_open()
        self._joined = running is not None
        self._opened = self._begin(previous, step) if running is None else running
        self.run_id, self._new_id = self._id_of(self._opened), None

    def _find_open(self) -> Any:
        """Return the run to join that the script has open, if any."""
        return None

    def _begin(self, previous: str | None, step: int | None) -> Any:
        """Open the run and return the SDK's object.

        Args:
            previous: the `run_id` of the run to continue, if any.
            step: the update from which it resumes.
        """
        raise NotImplementedError

    def _id_of(self, run: Any) -> str | None:
        return str(run.id)

    def _choose_id(self) -> str:
        """Return the id of a new run, the same in each attempt to start it.

        It is chosen here, because the first checkpoint stores it, perhaps before the service
        responds, and because the run may have begun although the call failed.
        """
        self._new_id = self._new_id or secrets.token_hex(4)
        self.run_id = self._new_id
        return self._new_id

    def _folder(self, name: str) -> str | None:
        """Return a folder for the package's files, which need not exist; None for its default."""
        return None if self.service_dir is None else os.path.join(self.service_dir, name)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and texts, and dicts of these under names "outer/inner".

        Args:
            values: names, with numbers, one-element tensors or arrays, texts, or dicts of these.
            step: the number of optimizer updates so far.
            **kwargs: for the service's method for numbers.

        Raises:
            TypeError: a value has another type. The other values are recorded.
        """
        numbers, texts, error = scalars_and_texts(values)
        self._log_scalars(numbers, texts, step, **kwargs)
        if error is not None:
            raise error

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: names and tensors or arrays of one image or a batch, with the channels first or
                last: floats in [0, 1] or bytes; PIL images; the service's own image types; or lists
                of these.
            step: the number of optimizer updates so far.
            **kwargs: for the service's method for images.

        Raises:
            ValueError: a shape is not that of an image.
        """
        for name, images in values.items():
            self._log_pictures(name, _pictures(name, images), step, **kwargs)

    def _log_pictures(
        self, name: str, pictures: list[Any], step: int | None, **kwargs: Any
    ) -> None:
        """Record the images of a name, as "name/0" and so on if the service takes one at a time.

        Args:
            name: the name.
            pictures: uint8 arrays of shape `(H, W)` or `(H, W, C)`, or the service's own image
                types.
            step: the number of optimizer updates so far.
            **kwargs: for the service's method.
        """
        for number, picture in enumerate(pictures):
            label = name if len(pictures) == 1 else f"{name}/{number}"
            self._log_image(label, picture, step, **kwargs)

    def _log_image(self, name: str, picture: Any, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as an image, see `GeneralTracker.log_figure`."""
        for name, value in values.items():
            self._log_pictures(name, [render_figure(value)], step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table, see `GeneralTracker.log_table`; `kwargs` for the service's method."""
        names, rows = table_of(table_name, columns, data, dataframe)
        self._log_table(table_name, [str(name) for name in names], rows, step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Record texts, see `GeneralTracker.log_text`; `kwargs` for the service's method."""
        for name, value in values.items():
            self._log_text(name, value, step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        kind: str = "artifact",
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a file or a folder, see `GeneralTracker.log_artifact`."""
        self._log_file(require_path(path), name, kind, step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record weights or a checkpoint, by default as ``model``; see `GeneralTracker.log_model`.

        Raises:
            FileNotFoundError: the path does not exist.
        """
        self.log_artifact(path, name or "model", "model", step, **kwargs)

    def finish(self) -> None:
        """Record how the run ended, and close it unless the script opened it."""
        run, self._opened = self._opened, None
        self._new_id = None
        if run is not None and not self._joined:
            self._end(run)

    def _end(self, run: Any) -> None:
        """Close the run with `status`, which is "running" if the outcome is unknown."""
        raise NotImplementedError
