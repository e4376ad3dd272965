"""Experiment trackers of the `Accelerator` (its `log_with` argument), for custom loops."""

from __future__ import annotations

import difflib
import functools
import itertools
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from trackers import (
    BackgroundTracker,
    GeneralTracker,
    NullTracker,
    resolve_trackers,
    select_trackers,
)
from trackers.background import finish_all
from trackers.media import named_values
from trackers.registry import TrackerChoice
from trainer.errors import module_logger
from trainer.files import with_home
from trainer.state import PartialState

__all__ = ["GeneralTracker", "RunTrackers", "on_main_process"]

logger = module_logger(__name__)
_T = TypeVar("_T")
_numbers = itertools.count()  # every process creates its Accelerators in the same order
_Options = Mapping[str, Mapping[str, Any]]


def on_main_process(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """Decorator: a tracker's method runs on the main process only, if `main_process_only` is True.

    On other processes the method returns None. It is needed only for a tracker whose constructor a
    script calls on every process.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> _T | None:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return method(self, *args, **kwargs)

    return guarded


class RunTrackers:
    """The trackers given by `log_with`, from `init_trackers` to `end_training`.

    Each tracker runs on a separate thread (see `trackers.BackgroundTracker`). So no call here waits
    for a disk or a network, and an error of a tracker is logged once and does not stop the run. A
    tracker runs on the main process, or on every process if its `main_process_only` is False. Other
    processes have a `NullTracker` instead.

    Trackers that are still running when the interpreter exits, or when this object is
    garbage-collected, are finished then. Their runs are marked as failed if an error ended the
    script.

    Args:
        log_with: See `trackers.select_trackers`.
        logging_dir: The directory for trackers that write files.

    Attributes:
        log_with: The selected trackers, as instances and classes.
        logging_dir: The directory; it may be changed until `init_trackers`.

    Raises:
        TypeError: An entry of `log_with` is not a tracker.
        ValueError: A name is unknown, or a tracker needs a directory and there is none.
        ImportError: The package of a tracker is not installed.
    """

    def __init__(
        self,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None,
        logging_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.log_with = select_trackers(log_with, logging_dir=logging_dir)
        self.logging_dir = logging_dir
        if not self.log_with and log_with:  # "all", but none is installed
            warnings.warn(
                f"log_with={log_with!r} was passed, but no supported tracker is installed: nothing "
                "will be recorded.",
                stacklevel=2,
            )
        self._trackers: list[GeneralTracker] = []
        self._end: weakref.finalize[Any, RunTrackers] | None = None
        self._warned = False
        self._number = next(_numbers)
        self._starts = 0

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, in the order of `log_with`; none before `init_trackers`."""
        return list(self._trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: _Options | None = None,
    ) -> None:
        """Create and start the trackers; call it on every process, or only on the main process.

        Args:
            project_name: The name of the run.
            config: The configuration that the trackers store: a dict, a namespace or a dataclass,
                which may be nested.
            init_kwargs: Further constructor arguments by tracker name, such as
                ``{"tensorboard": {"filename_suffix": ".mine"}}``.

        Raises:
            RuntimeError: Trackers are still running; or, on another process, the main process
                failed in this call.
            TypeError: An argument has the wrong type.
            ValueError: `project_name` points outside the logging directory.
            OSError: The logging directory cannot be created.
            Exception: The constructor of a tracker failed; its error is raised unchanged.
        """
        check_name("project_name", project_name, self.log_with)
        configuration = named_values(config)
        if configuration is None and config is not None:
            raise TypeError(f"config is {config!r}; it must be a dict, a namespace or a dataclass.")
        self._warn_of_unknown(init_kwargs or {})
        if self._end is not None and self._end.alive:
            raise RuntimeError("The trackers are already running. Call end_training() first.")
        self._starts += 1
        self._trackers = _main_first(
            lambda: self._make(project_name, init_kwargs),
            key=f"cadence/trackers/{self._number}/{self._starts}",
        )
        self._end = weakref.finalize(self, _end_at_exit, self._trackers, os.getpid())
        for tracker in self._trackers:
            if isinstance(tracker, BackgroundTracker):
                tracker.call_at_exit(self._end)
        self._warned = False
        if configuration is not None:
            for tracker in self._trackers:
                tracker.store_init_configuration(configuration)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with this name; attributes of a custom tracker class are available.

        Args:
            name: The `name` of the tracker.
            unwrap: Return the tracker's underlying SDK object, such as a run. This waits until the
                tracker has started and has recorded everything up to this call.

        Returns:
            The tracker or its SDK object. On processes that do not run the tracker, and without
            `log_with`, an object that does nothing.

        Raises:
            ValueError: There is no tracker with this name.
            RuntimeError: `init_trackers` was not called.
            Exception: With `unwrap`, the tracker failed to start; its error is raised unchanged.
        """
        names = [tracker.name for tracker in self.log_with]
        if names and name not in names:
            raise ValueError(f"There is no tracker {name!r}; the trackers are {names}.")
        if not names or (self._end is None and not self._begun("get_tracker")):
            return NullTracker(name).tracker if unwrap else NullTracker(name)
        tracker = self._trackers[names.index(name)]
        return tracker.tracker if unwrap else tracker

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: _Options | None = None,
        *,
        method: str = "log",
    ) -> None:
        """Log values to all trackers; the loop may change its tensors afterwards.

        Args:
            values: Names mapped to numbers, tensors or arrays of one element, strings, or dicts of
                these. For another `method`, names mapped to the values that it takes.
            step: The number of optimizer updates so far.
            log_kwargs: Further arguments of the method by tracker name.
            method: The trackers' method to call. A method such as "log_images" is skipped for
                trackers that do not have it.

        Raises:
            RuntimeError: `init_trackers` was not called.
            TypeError: An argument has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{method} takes a dict of names and values, not {values!r}.")
        self.record(method, dict(values), step=step, log_kwargs=log_kwargs)

    def record(
        self, method: str, *arguments: Any, log_kwargs: _Options | None = None, **named: Any
    ) -> None:
        """Call a method of all trackers that have it.

        Args:
            method: The name of the method.
            *arguments: The positional arguments of the method.
            log_kwargs: Further keyword arguments by tracker name.
            **named: The keyword arguments of the method; `step` is the number of optimizer updates
                so far.

        Raises:
            RuntimeError: `init_trackers` was not called.
            TypeError: `step` is not an integer.
        """
        if named.get("step") is not None:
            named["step"] = operator.index(named["step"])
        for tracker in self._begun(method):
            options = (log_kwargs or {}).get(tracker.name, {})
            getattr(tracker, method)(*arguments, **named, **options)

    def end_training(self) -> None:
        """Wait until everything is recorded, at most each tracker's timeout, and close the runs.

        Calling it again, or without trackers, does nothing.
        """
        if self._end is not None and self._end.detach():
            finish_all(self._trackers, "finished")

    def _make(self, project_name: str, init_kwargs: _Options | None) -> list[GeneralTracker]:
        made: list[GeneralTracker] = []
        main = PartialState().is_main_process
        folder: Any = self.logging_dir
        if folder:
            folder = type(folder)(with_home("logging_dir", folder))
        try:
            for one in self.log_with:
                if one.main_process_only and not main:
                    made.append(NullTracker(one.name))
                    continue
                if one.requires_logging_directory:  # here, where an error reaches the caller
                    Path(folder or ".").mkdir(parents=True, exist_ok=True)
                (tracker,) = resolve_trackers(
                    one,
                    project_name=project_name,
                    logging_dir=folder,
                    init_kwargs=init_kwargs,
                )
                made.append(background := BackgroundTracker(tracker))
                background.start()
        except BaseException:
            finish_all(made, "failed")
            raise
        return made

    def _warn_of_unknown(self, options: _Options) -> None:
        """Warn of options for an unknown tracker name that is similar to a known one."""
        names = [tracker.name for tracker in self.log_with]
        for name in options.keys() - set(names):
            if near := difflib.get_close_matches(str(name), names, n=1):
                logger.warning(
                    "init_kwargs has options for %r, which are not used. Did you mean %r?",
                    name,
                    near[0],
                )

    def _begun(self, what: str) -> list[GeneralTracker]:
        """Return the trackers that run on this process.

        Raises:
            RuntimeError: `init_trackers` was not called; after `end_training` there is a warning.
        """
        if self._end is None:
            # Only the main process must have called init_trackers, and only with log_with.
            if self.log_with and PartialState().is_main_process:
                raise RuntimeError(
                    f"{what} needs trackers: call init_trackers(project_name) first."
                )
        elif self._end.alive:
            return self._trackers
        elif self.log_with and not self._warned:
            self._warned = True
            logger.warning("%s was called after end_training: nothing is recorded.", what)
        return []


def check_name(
    what: str, name: object, trackers: Sequence[GeneralTracker | type[GeneralTracker]]
) -> None:
    """Check the name of a run or project.

    Args:
        what: The argument's name, for the error.
        name: The name to check.
        trackers: The selected trackers.

    Raises:
        TypeError: The name is not a string.
        ValueError: A tracker uses the name as a subfolder, but it is absolute or contains "..".
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} is {name!r}; it must be a string.")
    leads_out = Path(name).is_absolute() or ".." in Path(name).parts
    # Only classes: an instance was created by the user, so the name is not passed to it.
    named = [tracker for tracker in trackers if isinstance(tracker, type)]
    if leads_out and any(tracker.requires_logging_directory for tracker in named):
        raise ValueError(
            f"{what} is {name!r}; as the name of a folder it must not be absolute or contain '..'."
        )


def _main_first(make: Callable[[], _T], *, key: str) -> _T:
    """Call `make` on the main process first, then on the others if it did not fail.

    The result is passed through the process group's store, not by a collective, because some
    scripts start their trackers only on the main process, where a collective would hang.

    Args:
        make: The function to call.
        key: The key in the store, different for each call.

    Raises:
        RuntimeError: On the other processes, if `make` failed on the main process; the message
            contains its error.
    """
    state = PartialState()
    if not state.use_distributed:
        return make()
    store = dist.distributed_c10d._get_default_store()
    if not state.is_main_process:
        if report := store.get(key).decode():
            raise RuntimeError(f"Rank 0 failed while the others waited for it: {report}")
        return make()
    try:
        made = make()
    except BaseException as error:
        store.set(key, f"{type(error).__name__}: {error}")
        raise
    store.set(key, "")
    return made


def _end_at_exit(trackers: list[GeneralTracker], process: int) -> None:
    """Finish trackers at exit, but not in a forked child, which does not have their threads."""
    if os.getpid() == process:
        # Python sets sys.last_value when an error ends the script.
        failed = getattr(sys, "last_value", None) is not None
        finish_all(trackers, "failed" if failed else "finished")
