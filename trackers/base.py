"""What an experiment tracker is."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any, Literal, TypeAlias, TypeVar

# What a tracker class must define, and how.
_REQUIRED = {
    "name": 'name = "my_tracker"  # what log_with and init_kwargs call it',
    "requires_logging_directory": "requires_logging_directory = False  # True if it writes files",
    "tracker": "tracker = property(lambda self: self.run)  # the object of the SDK underneath",
}

_Instance = TypeVar("_Instance", bound="GeneralTracker")
Status: TypeAlias = Literal["running", "finished", "failed", "preempted"]


def python_number(value: Any) -> Any:
    """The Python number in a tensor or an array of one element; anything else as it is."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 else value


class GeneralTracker:
    """The interface of every experiment tracker.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides what it can
    do; making an instance without them is an error that says how to define them.

    ```python
    @register_tracker
    class Printer(GeneralTracker):
        name = "printer"
        requires_logging_directory = False
        tracker = property(lambda self: self)

        def log(self, values, step, **kwargs):
            print(step, values)
    ```

    `log_with` makes one as `cls(run_name, **init_kwargs)`, or `cls(run_name, logging_dir,
    **init_kwargs)` if it requires a directory. A constructor should only remember its arguments:
    files and connections are opened in `start`, which runs where no one waits for it.

    Attributes:
        name: what `log_with`, `init_kwargs` and `get_tracker` call it.
        requires_logging_directory: whether it writes files, and so takes a directory.
        main_process_only: whether only the main process has a run of it.
        requires_package: the import name of the package that it needs, or None.
        has_projects: whether its service keeps runs in projects: the first argument is then the
            name of the project, and the run's own name is given as `name`.
        status: "running" until `finish` is called, which finds "finished" here, "failed" if an
            error ended the run, or "preempted" if a signal did, after a save. It is set from
            outside: read it in `finish` to close the run at the service accordingly.
        run_id: what the service knows the run by; `start` sets it, checkpoints keep it.

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

    # Not in `__init__`, which subclasses need not call.
    def __new__(cls: type[_Instance], *_args: Any, **_kwargs: Any) -> _Instance:
        """Check the class before its constructor runs."""
        check_complete(cls)
        check_installed(cls)
        return super().__new__(cls)

    @property
    def tracker(self) -> Any:
        """The object of the SDK underneath, for what this interface does not cover."""
        raise NotImplementedError

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Be told, before `start`, that the run goes on from an earlier one.

        Args:
            run_id: what `run_id` was then; None if it was not known, as to an evaluation in a
                process of its own.
            step: the update that it goes on from; what was logged for later ones by a run that was
                killed is logged again. None if nothing is: an evaluation of what was trained.
        """

    def begin_anew(self) -> None:
        """Be told, before `start`, that a training begins that goes on from none.

        What an earlier one left at the same place, such as one that was killed before its first
        checkpoint, is of another run.
        """

    def start(self) -> None:
        """Open the run: after `resume` or `begin_anew`, before all else; again where it raised."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: names and values; may be nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: names and numbers or texts.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError(f"The tracker {self.name!r} has no `log`.")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: names and tensors or arrays: one image, or a batch of them.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no images.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no images.")

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
            table_name: its name.
            columns: the names of the columns; numbers from 1 by default.
            data: the rows, each as long as the others.
            dataframe: of pandas or polars, instead of `columns` and `data`.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no tables.
            ValueError: there is neither `data` nor `dataframe`, or a row is of another length.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no tables.")

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record how numbers are distributed.

        Args:
            values: names and tensors or arrays of any shape; what is not finite is left out.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no histograms.
            ValueError: there is no finite value.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no histograms.")

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record figures as images.

        Args:
            values: names and figures of matplotlib, or their pixels: bytes of shape (height, width,
                channels). `BackgroundTracker` draws a figure when it is called, and hands on those.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no figures.
            TypeError: a value is no figure.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no figures.")

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Record texts to be read, such as samples of a language model.

        Args:
            values: names and texts.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no texts.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no texts.")

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
            path: the file or the folder. It is read on the tracker's own thread: leave it there
                for a while.
            name: what the service calls it, over its versions; that of the path by default.
            kind: what sort of thing it is, such as "dataset".
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no files.
            FileNotFoundError: there is nothing at the path.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no files.")

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the weights of a model, or a whole checkpoint, as a version of it.

        Args:
            path: the file or the folder, see `log_artifact`.
            name: of the model at the service, which has one for the run by default.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no models.
            FileNotFoundError: there is nothing at the path.
        """
        raise NotImplementedError(f"The tracker {self.name!r} takes no models.")

    def finish(self) -> None:
        """Write what is pending and close the run. Called once, last; see `status`."""


def is_installed(cls: type[GeneralTracker]) -> bool:
    """Whether the package that a tracker needs is there; it is not imported."""
    if cls.requires_package is None:
        return True
    # A mere folder of that name is no package: wandb makes one where it runs.
    spec = importlib.util.find_spec(cls.requires_package)
    return spec is not None and spec.origin is not None


def check_installed(cls: type[GeneralTracker]) -> None:
    """Raise an ImportError that says what to install, if `is_installed` is False."""
    if not is_installed(cls):
        # Each tracker of this package has an extra of its own name.
        ours = cls.__module__.partition(".")[0] == __package__
        what = f"'cadence-trainer[{cls.name}]'" if ours else f"{cls.requires_package}"
        raise ImportError(
            f"Logging with {cls.name!r} needs the package {cls.requires_package!r}, which is not "
            f"installed: pip install {what}",
            name=cls.requires_package,
        )


def check_complete(cls: type[GeneralTracker]) -> None:
    """Raise a NotImplementedError that says what a tracker class lacks, if it does."""
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
