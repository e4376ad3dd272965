"""The interface of experiment trackers."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

# Attributes that a tracker class must define, with an example for the error message.
_REQUIRED = {
    "name": 'name = "my_tracker"  # its name in log_with and init_kwargs',
    "requires_logging_directory": "requires_logging_directory = False  # True if it writes files",
    "tracker": "tracker = property(lambda self: self.run)  # the underlying SDK object",
}

_Instance = TypeVar("_Instance", bound="GeneralTracker")
Status: TypeAlias = Literal["running", "finished", "failed", "preempted"]


class GeneralTracker:
    """The interface of every experiment tracker.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides the methods
    that it supports. Creating an instance without these attributes raises an error that shows how
    to define them.

    `log_with` creates a tracker as `cls(run_name, **init_kwargs)`, or
    `cls(run_name, logging_dir, **init_kwargs)` if it requires a directory. A constructor should
    only store its arguments. Files and connections should be opened in `start`, which runs on a
    background thread.

    Example::

        @register_tracker
        class Printer(GeneralTracker):
            name = "printer"
            requires_logging_directory = False
            tracker = property(lambda self: self)

            def log(self, values, step, **kwargs):
                print(step, values)

        trainer = Trainer(max_epochs=10, log_with="printer")

    Attributes:
        name: the tracker's name in `log_with`, `init_kwargs` and `get_tracker`.
        requires_logging_directory: whether the tracker writes files, and so takes a directory.
        main_process_only: whether only the main process starts a run.
        requires_package: the import name of the package that it needs, or None.
        has_projects: whether the service groups runs into projects. The first argument is then the
            project's name, and the run's name is passed as `name`.
        status: "running" during the run. Before `finish` is called, the caller sets it to
            "finished", "failed" (an error ended the run) or "preempted" (a signal ended it, after a
            save). `finish` closes the service's run accordingly.
        run_id: the service's identifier of the run; `start` sets it and checkpoints store it.
        service_dir: the folder for files of the service's package, such as offline runs; the caller
            may set it before `start`. None takes the package's default.

    Raises:
        NotImplementedError: a required attribute is missing.
        ImportError: `requires_package` is not installed.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    requires_package: str | None = None
    has_projects: bool = False
    status: Status = "running"
    run_id: str | None = None
    service_dir: str | None = None

    # Not in `__init__`, because subclasses need not call it.
    def __new__(cls: type[_Instance], *_args: Any, **_kwargs: Any) -> _Instance:
        """Check the class before its constructor runs."""
        check_complete(cls)
        check_installed(cls)
        return super().__new__(cls)

    @property
    def tracker(self) -> Any:
        """The underlying SDK object, for features that this interface does not have."""
        raise NotImplementedError

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Prepare to continue an earlier run; called before `start`.

        Args:
            run_id: the `run_id` of the earlier run; None if it is not known, for example in an
                evaluation in a separate process.
            step: the update from which the run resumes. Values that a killed run logged for later
                updates will be logged again. None if nothing is logged again, for example in an
                evaluation.
        """

    def begin_anew(self) -> None:
        """Prepare for training that does not resume; called before `start`.

        Files that exist in the same place belong to another run, for example one that was killed
        before its first checkpoint.
        """

    def start(self) -> None:
        """Open the run; called after `resume` or `begin_anew`, before logging; may be retried."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: names and values; may be nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: names, with numbers or texts.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError(f"The tracker {self.name!r} has no `log`.")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: names and tensors or arrays: one image, or a batch of them. They are floats in
                [0, 1], integers up to 255 or boolean masks, with 1, 3 or 4 channels, first or last.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support images.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support images.")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table, given as columns and rows or as a data frame.

        Args:
            table_name: the table's name.
            columns: the names of the columns; numbers from 1 by default.
            data: the rows, all of the same length.
            dataframe: a data frame of pandas or polars, instead of `columns` and `data`.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support tables.
            ValueError: neither `data` nor `dataframe` is given, or a row is not as long as
                `columns`.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support tables.")

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record the distributions of numbers.

        Args:
            values: names and tensors or arrays of any shape; non-finite numbers are left out.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support histograms.
            ValueError: the values include no finite number.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support histograms.")

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record figures as images.

        Args:
            values: names and matplotlib figures, or their pixels: uint8 arrays of shape `(height,
                width, channels)`. `BackgroundTracker` draws figures when called, and passes on the
                pixels.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support figures.
            TypeError: a value is not a figure.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support figures.")

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Record texts for people to read, such as samples of a language model.

        Args:
            values: names and texts.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support texts.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support texts.")

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        kind: str = "artifact",
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a file or a folder, such as a checkpoint.

        Args:
            path: the file or the folder. It is read later, on the tracker's own thread, so keep it
                for a while.
            name: the name used by the service, the same for all versions; by default the path's
                name.
            kind: its type, such as "dataset".
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support files.
            FileNotFoundError: the path does not exist.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support files.")

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the weights of a model, or a whole checkpoint, as a new version of the model.

        Args:
            path: the file or the folder, see `log_artifact`.
            name: the model's name used by the service, by default one for this run.
            step: the number of optimizer updates so far.
            **kwargs: passed to the underlying SDK.

        Raises:
            NotImplementedError: this tracker does not support models.
            FileNotFoundError: the path does not exist.
        """
        raise NotImplementedError(f"The tracker {self.name!r} does not support models.")

    def finish(self) -> None:
        """Write pending records and close the run. Called once, last; see `status`."""


class ServiceTracker(GeneralTracker):
    """A tracker with one SDK object, `_opened`, from `start` to `finish`.

    If the program has already opened a run, the tracker logs to it, and `finish` leaves it open.
    """

    _opened: Any = None
    _joined = False  # whether the program itself has opened the run
    imports_early: ClassVar[str | None] = None  # a module to import before the thread starts

    @property
    def tracker(self) -> Any:
        """The underlying SDK object.

        Raises:
            RuntimeError: the tracker is not started, or is finished.
        """
        if self._opened is None:
            raise RuntimeError(f"The run of {self.name!r} is not open: call `start` first.")
        return self._opened


def isolate_random_generator(package: str) -> None:
    """Give an SDK its own random generator, so that it does not draw from the training's."""
    generator = random.SystemRandom()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and vars(module).get("random") is random:
            vars(module)["random"] = generator


def is_installed(cls: type[GeneralTracker]) -> bool:
    """Return whether the package that a tracker needs is installed, without importing it."""
    if cls.requires_package is None:
        return True
    # A folder of that name is not the package: wandb creates one in the working directory.
    spec = importlib.util.find_spec(cls.requires_package)
    return spec is not None and spec.origin is not None


def check_installed(cls: type[GeneralTracker]) -> None:
    """Raise an ImportError that says what to install, if `is_installed` is False."""
    if not is_installed(cls):
        # Each tracker of this package has an extra of the same name.
        ours = cls.__module__.partition(".")[0] == __package__
        what = f"'cadence-trainer[{cls.name}]'" if ours else f"{cls.requires_package}"
        raise ImportError(
            f"Logging with {cls.name!r} needs the package {cls.requires_package!r}, which is not "
            f"installed: pip install {what}",
            name=cls.requires_package,
        )


def check_complete(cls: type[GeneralTracker]) -> None:
    """Raise a NotImplementedError if a tracker class lacks a required attribute."""
    inherited = object()
    missing = [
        how
        for attribute, how in _REQUIRED.items()
        if getattr(cls, attribute, inherited) is getattr(GeneralTracker, attribute, inherited)
    ]
    if missing:
        raise NotImplementedError(
            f"The tracker class {cls.__qualname__} lacks required attributes. "
            f"Define them in the class body:\n    " + "\n    ".join(missing)
        )
