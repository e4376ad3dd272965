"""What an experiment tracker is, and how `log_with` finds one."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeAlias, TypeVar

_logger = logging.getLogger("trackers")
_REGISTRY: dict[str, type[GeneralTracker]] = {}
_ALL = "all"
_GROUP = "cadence.trackers"
# Services that scripts name and that no tracker here speaks to.
_ELSEWHERE = ("aim", "clearml", "dvclive", "mlflow")

# What a tracker class must define, and how.
_REQUIRED = {
    "name": 'name = "my_tracker"  # what log_with and init_kwargs call it',
    "requires_logging_directory": "requires_logging_directory = False  # True if it writes files",
    "tracker": "tracker = property(lambda self: self.run)  # the object of the SDK underneath",
}

_Class = TypeVar("_Class", bound="type[GeneralTracker]")
_Instance = TypeVar("_Instance", bound="GeneralTracker")
Status: TypeAlias = Literal["running", "finished", "failed", "preempted"]


def register_tracker(cls: _Class) -> _Class:
    """Make a tracker class known to `log_with` by its `name`; usable as a decorator.

    Registering a class again replaces it, so that the cell of a notebook can be run twice.

    Args:
        cls: a subclass of `GeneralTracker`.

    Returns:
        The class itself.

    Raises:
        TypeError: `cls` is not a subclass of `GeneralTracker`.
        NotImplementedError: a required attribute is missing.
        ValueError: the name is reserved, or another class has it.
    """
    if not (isinstance(cls, type) and issubclass(cls, GeneralTracker)):
        raise TypeError(f"register_tracker takes a subclass of GeneralTracker, got {cls!r}.")
    _check_complete(cls)
    if cls.name == _ALL:
        raise ValueError(f"{cls.__qualname__}.name is {_ALL!r}, which stands for every tracker.")
    other = _REGISTRY.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"The tracker name {cls.name!r} of {cls.__module__}.{cls.__qualname__} is taken by "
            f"{other.__module__}.{other.__qualname__}. Give the class another `name`."
        )
    _REGISTRY[cls.name] = cls
    return cls


def available_trackers() -> list[str]:
    """The sorted names of the registered trackers whose package is installed.

    Other packages' trackers are among them: those that their entry points name in the group
    "cadence.trackers". One that cannot be loaded, or whose name is taken, is told in the log.
    """
    for entry in _entries():
        taken = _REGISTRY.get(entry.name)
        if taken is not None and entry.value != f"{taken.__module__}:{taken.__qualname__}":
            _logger.warning(
                "The tracker %r of %s is not used: %s.%s has the name.",
                entry.name,
                _package_of(entry),
                taken.__module__,
                taken.__qualname__,
            )
        elif taken is None:
            try:
                _load(entry)
            except ImportError as error:
                _logger.warning("%s", error)
    return sorted(name for name, cls in _REGISTRY.items() if _is_installed(cls))


def select_trackers(
    log_with: TrackerChoice | Sequence[TrackerChoice] | None,
    *,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[GeneralTracker | type[GeneralTracker]]:
    """Check `log_with` and turn it into tracker instances and classes; makes no tracker.

    Args:
        log_with: None, a registered name, "all" (every registered tracker whose package is
            installed), a tracker class, a tracker instance, or a list of these. A class is dropped
            where an instance of it is given as well, and so are repetitions.
        logging_dir: the directory for trackers that write files.

    Returns:
        Instances as they were given and classes, in the order given.

    Raises:
        TypeError: an entry is none of the above.
        ValueError: an unknown name, or a tracker that needs a directory and has none.
        ImportError: the package of a tracker is not installed.
    """
    if log_with is None:
        return []
    entries = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    found = [one for entry in entries for one in _lookup(entry)]
    instantiated = [type(one) for one in found if isinstance(one, GeneralTracker)]
    # By identity: a tracker that is a dataclass can be compared, but not hashed.
    unique = {id(one): one for one in found}.values()
    chosen = [one for one in unique if not (isinstance(one, type) and one in instantiated)]
    for one in chosen:
        if isinstance(one, GeneralTracker):
            continue
        _check_complete(one)
        _check_installed(one)
        if one.requires_logging_directory and logging_dir is None:
            raise ValueError(
                f"Logging with {one.name!r} writes files, but logging_dir is None. "
                f"Pass `logging_dir` (for the Trainer and the Accelerator: `project_dir`)."
            )
    return chosen


def resolve_trackers(
    log_with: TrackerChoice | Sequence[TrackerChoice] | None,
    *,
    project_name: str,
    run_name: str | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[GeneralTracker]:
    """Make the trackers that `log_with` asks for. The caller starts them.

    A class is called as `cls(run_name, logging_dir, **init_kwargs[cls.name])`, without the
    directory if it requires none. If it `has_projects`, it is called with the name of the project,
    and with `name=run_name` where there is one. Instances are taken as they are.

    Args:
        log_with: see `select_trackers`.
        project_name: the name of the run where `run_name` is None.
        run_name: the name of the run.
        logging_dir: the directory for trackers that write files.
        init_kwargs: further constructor arguments for each tracker name. Those for trackers that
            are not in use are ignored, so that one script serves several trackers.

    Returns:
        The trackers, not started, in the order given.

    Raises:
        TypeError: see `select_trackers`.
        ValueError: see `select_trackers`.
        ImportError: see `select_trackers`.
    """
    trackers = []
    for one in select_trackers(log_with, logging_dir=logging_dir):
        if isinstance(one, type):
            directory = [logging_dir] if one.requires_logging_directory else []
            options = dict((init_kwargs or {}).get(one.name, {}))
            if one.has_projects and run_name is not None:
                options.setdefault("name", run_name)
            first = project_name if one.has_projects else run_name or project_name
            one = one(first, *directory, **options)
        trackers.append(one)
    return trackers


def python_number(value: Any) -> Any:
    """The Python number in a tensor or an array of one element; anything else as it is."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 else value


def _lookup(entry: Any) -> Sequence[GeneralTracker | type[GeneralTracker]]:
    if isinstance(entry, GeneralTracker) or (
        isinstance(entry, type) and issubclass(entry, GeneralTracker)
    ):
        return [entry]
    if not isinstance(entry, str):
        raise TypeError(
            f"log_with takes the name of a tracker, a subclass or an instance of GeneralTracker, "
            f"or a list of these; got {entry!r} of type {type(entry).__name__}."
        )
    if entry == _ALL:
        return [_REGISTRY[name] for name in available_trackers()]
    others = {} if entry in _REGISTRY else {each.name: each for each in _entries()}
    if entry in others:
        _load(others[entry])
    if entry not in _REGISTRY:
        choices = [_ALL, *sorted({*_REGISTRY, *others})]
        if entry in _ELSEWHERE:
            raise ValueError(
                f"log_with={str(entry)!r}: none of {', '.join(_ELSEWHERE)} is part of Cadence. "
                f"Choose from {choices}, or pass a subclass of GeneralTracker that logs there, see "
                "docs/trackers.md."
            )
        nearest = difflib.get_close_matches(entry, choices, n=1)
        raise ValueError(
            f"log_with={str(entry)!r} is not a known tracker. Choose from {choices}"
            + (f"; did you mean {nearest[0]!r}?" if nearest else ".")
            + " register_tracker adds a class of your own."
        )
    return [_REGISTRY[entry]]


def _entries() -> Sequence[EntryPoint]:
    """The trackers that other packages say they have; none of them is imported."""
    return sorted(entry_points(group=_GROUP), key=lambda entry: entry.name)


def _package_of(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name!r}" if entry.dist else f"{entry.value!r}"


def _load(entry: EntryPoint) -> None:
    """Register the tracker of another package.

    Raises:
        ImportError: it cannot be loaded or is no tracker of that name.
    """
    where = f"The tracker {entry.name!r} of {_package_of(entry)} cannot be used"
    try:
        cls = register_tracker(entry.load())
    # Whatever a foreign module raises; the others are none the worse for it.
    except Exception as error:
        raise ImportError(f"{where}: {type(error).__name__}: {error}") from error
    if cls.name != entry.name:
        raise ImportError(f"{where}: {cls.__qualname__}.name is {cls.name!r}.")


def _is_installed(cls: type[GeneralTracker]) -> bool:
    if cls.requires_package is None:
        return True
    # A mere folder of that name is no package: wandb makes one where it runs.
    spec = importlib.util.find_spec(cls.requires_package)
    return spec is not None and spec.origin is not None


def _check_installed(cls: type[GeneralTracker]) -> None:
    if not _is_installed(cls):
        # Each tracker of this package has an extra of its own name.
        ours = cls.__module__.partition(".")[0] == __package__
        what = f"'cadence-trainer[{cls.name}]'" if ours else f"{cls.requires_package}"
        raise ImportError(
            f"Logging with {cls.name!r} needs the package {cls.requires_package!r}, which is not "
            f"installed: pip install {what}",
            name=cls.requires_package,
        )


def _check_complete(cls: type[GeneralTracker]) -> None:
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
        _check_complete(cls)
        _check_installed(cls)
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
            columns: the names of the columns.
            data: the rows.
            dataframe: a data frame instead of `columns` and `data`.
            step: the number of optimizer updates so far.
            **kwargs: for the SDK underneath.

        Raises:
            NotImplementedError: this tracker takes no tables.
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


# Names last: what reads a configuration tries the first that fits, and a class path is a text too.
TrackerChoice: TypeAlias = GeneralTracker | type[GeneralTracker] | str
