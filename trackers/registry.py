"""The registry of trackers that `log_with` uses, and entry points of other packages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, TypeVar

from trackers.base import GeneralTracker, check_complete, check_installed, is_installed
from trackers.jsonl import JsonlTracker
from trainer.checks import choice_error
from trainer.errors import module_logger

_logger = module_logger("trackers")
_REGISTRY: dict[str, type[GeneralTracker]] = {}
_ALL = "all"
_GROUP = "cadence.trackers"

_Class = TypeVar("_Class", bound="type[GeneralTracker]")
# str last: configuration readers try the types in order, and a class path is a string too.
TrackerChoice: TypeAlias = GeneralTracker | type[GeneralTracker] | str


def register_tracker(cls: _Class) -> _Class:
    """Register a tracker class for `log_with` under its `name`; usable as a decorator.

    Registering a class again replaces it, so that a notebook cell can be run twice.

    Example::

        @register_tracker
        class Table(CSVTracker):
            name = "table"

        trainer = Trainer(max_epochs=10, log_with="table")

    Args:
        cls: a subclass of `GeneralTracker`.

    Returns:
        The class itself.

    Raises:
        TypeError: `cls` is not a subclass of `GeneralTracker`.
        NotImplementedError: a required attribute is missing.
        ValueError: another class is registered under its name.
    """
    if not (isinstance(cls, type) and issubclass(cls, GeneralTracker)):
        raise TypeError(f"register_tracker takes a subclass of GeneralTracker, got {cls!r}.")
    check_complete(cls)
    other = _REGISTRY.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"The tracker name {cls.name!r} is taken by {other.__module__}.{other.__qualname__}."
        )
    _REGISTRY[cls.name] = cls
    return cls


def available_trackers() -> list[str]:
    """Return the sorted names of the registered trackers whose package is installed.

    They include trackers of other packages, declared as entry points in the group
    "cadence.trackers" under names that are not registered. A warning is logged for each that cannot
    be loaded.

    Example::

        log_with = "wandb" if "wandb" in available_trackers() else "tensorboard"
        trainer = Trainer(max_epochs=10, log_with=log_with)
    """
    for entry in _entries().values():
        try:
            _load(entry)
        except ImportError as error:
            _logger.warning("%s", error)
    return sorted(name for name, cls in _REGISTRY.items() if is_installed(cls))


def select_trackers(
    log_with: TrackerChoice | Sequence[TrackerChoice] | None,
    *,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[GeneralTracker | type[GeneralTracker]]:
    """Check `log_with` and convert it to tracker instances and classes; create no tracker.

    Example::

        select_trackers(["csv", "tensorboard"], logging_dir="runs")  # their classes

    Args:
        log_with: None, a registered name, "all" (every registered tracker whose package is
            installed), a tracker class, a tracker instance, or a list of these. Duplicates are
            dropped, and so is a class if an instance of it is also given.
        logging_dir: the directory for trackers that write files.

    Returns:
        The given instances, and classes, in the order given.

    Raises:
        TypeError: an entry is none of the above, or a class that takes the path of its file.
        ValueError: a name is unknown, or a tracker needs a directory and `logging_dir` is None.
        ImportError: the package of a tracker is not installed.
    """
    if log_with is None:
        return []
    if not isinstance(log_with, Sequence) or isinstance(log_with, str):
        log_with = [log_with]
    requested = [tracker for entry in log_with for tracker in _lookup(entry)]
    instantiated = [type(tracker) for tracker in requested if isinstance(tracker, GeneralTracker)]
    # By identity, because a tracker that is a dataclass cannot be hashed.
    unique = {id(tracker): tracker for tracker in requested}.values()
    chosen = [t for t in unique if not (isinstance(t, type) and t in instantiated)]
    for tracker in chosen:
        if isinstance(tracker, GeneralTracker):
            continue
        check_installed(tracker)
        made_by: Any = tracker.__init__
        if made_by is JsonlTracker.__init__:  # it would take the run's name as its path
            raise TypeError(
                f"log_with got the class {tracker.__name__}; pass an instance with a path, "
                f"{tracker.__name__}(path)."
            )
        if tracker.requires_logging_directory and logging_dir is None:
            raise ValueError(
                f"Logging with {tracker.name!r} writes files, but logging_dir is None. Pass "
                "`logging_dir` (for the Trainer and the Accelerator: `project_dir`)."
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
    """Create the trackers given by `log_with`; the caller starts them.

    A class is called as `cls(run_name, logging_dir, **init_kwargs[cls.name])`, without the
    directory if the class requires none. If it `has_projects`, the first argument is the project's
    name, and `name=run_name` is passed if there is a run name. For given instances, only
    `service_dir` is set.

    Example::

        for tracker in resolve_trackers("tensorboard", project_name="digits", logging_dir="runs"):
            tracker.start()
            tracker.log({"train/loss": 0.25}, step=1)
            tracker.finish()

    Args:
        log_with: see `select_trackers`.
        project_name: the run's name if `run_name` is None.
        run_name: the name of the run.
        logging_dir: the directory for trackers that write files.
        init_kwargs: further constructor arguments by tracker name. Entries for trackers that are
            not in use are ignored, so that one script can be used with several trackers.

    Returns:
        The trackers, not started, in the order given.

    Raises:
        TypeError: see `select_trackers`.
        ValueError: see `select_trackers`.
        ImportError: see `select_trackers`.
    """
    trackers = []
    for tracker in select_trackers(log_with, logging_dir=logging_dir):
        if isinstance(tracker, type):
            directory = [logging_dir] if tracker.requires_logging_directory else []
            options = dict((init_kwargs or {}).get(tracker.name, {}))
            if tracker.has_projects and run_name is not None:
                options.setdefault("name", run_name)
            first = project_name if tracker.has_projects else run_name or project_name
            tracker = tracker(first, *directory, **options)
        if logging_dir is not None:
            tracker.service_dir = os.path.abspath(logging_dir)  # the working directory may change
        trackers.append(tracker)
    return trackers


def _lookup(entry: Any) -> Sequence[GeneralTracker | type[GeneralTracker]]:
    if isinstance(entry, GeneralTracker) or (
        isinstance(entry, type) and issubclass(entry, GeneralTracker)
    ):
        return [entry]
    if not isinstance(entry, str):
        raise TypeError(
            f"log_with takes trackers: names, subclasses or instances of GeneralTracker, not "
            f"{entry!r}."
        )
    if entry == _ALL:
        return [_REGISTRY[name] for name in available_trackers()]
    if entry not in _REGISTRY and entry in (others := _entries()):
        _load(others[entry])
    if entry not in _REGISTRY:
        choices = choice_error("log_with", entry, [_ALL, *_REGISTRY, *others])
        raise ValueError(f"{choices} Register a custom class with register_tracker.")
    return [_REGISTRY[entry]]


def _entries() -> dict[str, EntryPoint]:
    """Return trackers that only other packages declare, by name, without importing them."""
    entries = entry_points(group=_GROUP)
    return {entry.name: entry for entry in entries if entry.name not in _REGISTRY}


def _load(entry: EntryPoint) -> None:
    """Register the tracker of another package.

    Raises:
        ImportError: the entry point cannot be loaded, or is not a tracker of that name.
    """
    where = f"The tracker {entry.name!r}, {entry.value}, cannot be used"
    try:
        cls = register_tracker(entry.load())
    # Another package may raise anything; it must not affect the other trackers.
    except Exception as error:
        raise ImportError(f"{where}: {type(error).__name__}: {error}") from error
    if cls.name != entry.name:
        raise ImportError(f"{where}: {cls.__qualname__}.name is {cls.name!r}.")
