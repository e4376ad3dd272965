"""The trackers of a loop of one's own: what the `Accelerator` does with `log_with`."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
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
from trackers.registry import TrackerChoice
from trainer.state import PartialState

__all__ = ["GeneralTracker", "RunTrackers", "on_main_process"]

logger = getLogger(__name__)
_T = TypeVar("_T")
_numbers = itertools.count()  # every process makes its Accelerators in the same order
_Options = Mapping[str, Mapping[str, Any]]


def on_main_process(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """Decorate a method of a tracker: where `main_process_only`, it runs on the main process alone.

    Elsewhere it returns None. Trackers here need it only around a constructor whose instances a
    script makes on every process.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> _T | None:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return method(self, *args, **kwargs)

    return guarded


class RunTrackers:
    """The trackers that `log_with` names, from `init_trackers` to `end_training`.

    Each works on a thread of its own, see `trackers.BackgroundTracker`: no call here waits for a
    disk or a network, and what a tracker raises is reported once and does not end the run. A
    tracker runs on the main process, or on each if its `main_process_only` is False; the others
    have a `NullTracker` in its place.

    Trackers that nobody ended are finished when the interpreter ends, or the object is collected:
    as failed if an error ended the script.

    Args:
        log_with: See `trackers.select_trackers`.
        logging_dir: The directory for trackers that write files.

    Attributes:
        log_with: The instances and classes chosen.
        logging_dir: As given; it may be changed until `init_trackers`.

    Raises:
        TypeError: An entry of `log_with` is no tracker.
        ValueError: An unknown name, or a tracker that needs a directory and has none.
        ImportError: The package of a tracker is not installed.
    """

    def __init__(
        self,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None,
        logging_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.log_with = select_trackers(log_with, logging_dir=logging_dir)
        self.logging_dir = logging_dir
        if not self.log_with and log_with:  # "all" of none
            warnings.warn(
                f"log_with={log_with!r} was passed, but no supported tracker is installed: nothing "
                "will be recorded.",
                stacklevel=2,
            )
        self._trackers: list[GeneralTracker] = []
        self._end: weakref.finalize[Any, RunTrackers] | None = None
        self._warned = False
        self._number = next(_numbers)
        self._starts = itertools.count()

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, in the order of `log_with`; none before `init_trackers`."""
        return list(self._trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: _Options | None = None,
    ) -> None:
        """Make the trackers and start them; every process may call it, or the main process alone.

        Args:
            project_name: The name of the run.
            config: Stored by the trackers; may be nested.
            init_kwargs: Further constructor arguments for each tracker name, such as
                ``{"tensorboard": {"flush_secs": 10}}``.

        Raises:
            RuntimeError: There are trackers already that are not ended; or, on another process, the
                main one failed here.
            TypeError: An argument is of another type.
            ValueError: The logging directory cannot be made.
            Exception: What the constructor of a tracker raised.
        """
        if not isinstance(project_name, str):
            raise TypeError(f"project_name is {project_name!r}; it must be a text.")
        if not isinstance(config, (Mapping, type(None))):
            raise TypeError(f"config is {config!r}; it must be a dict, such as {{'lr': 0.001}}.")
        _check_options("init_kwargs", init_kwargs)
        if self._end is not None and self._end.alive:
            raise RuntimeError(
                "init_trackers was called again while its trackers run. Call end_training() first."
            )
        self._trackers = _main_first(
            lambda: self._make(project_name, init_kwargs),
            key=f"cadence/trackers/{self._number}/{next(self._starts)}",
        )
        self._end = weakref.finalize(self, _end_unasked, self._trackers, os.getpid())
        self._warned = False
        if config is not None:
            for tracker in self._trackers:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, which has the attributes of your own class too.

        Args:
            name: Its `name`.
            unwrap: Give the SDK's own object. This waits until the tracker has started.

        Returns:
            The tracker or the object; on processes without it, and where there is no `log_with`,
            one that does nothing.

        Raises:
            ValueError: There is no such tracker.
            RuntimeError: `init_trackers` was not called.
            Exception: Unwrapping, what the tracker's start raised.
        """
        names = [tracker.name for tracker in self.log_with]
        if names and name not in names:
            raise ValueError(f"There is no tracker {name!r}; there are {names}.")
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
        """Record values with all trackers; the loop may write to its tensors afterwards.

        Args:
            values: Names and numbers, tensors or arrays of one element, texts, or dicts of these;
                what else `method` takes.
            step: The number of optimizer updates so far.
            log_kwargs: Further arguments of the method for each tracker name.
            method: Of the trackers; another one, such as "log_images", is left out where a tracker
                has none.

        Raises:
            RuntimeError: `init_trackers` was not called.
            TypeError: An argument is of another type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{method} takes a dict of names and values, not {values!r}: for example "
                f'accelerator.{method}({{"train/loss": loss}}, step=step).'
            )
        self.record(method, dict(values), _as_step(step), log_kwargs=log_kwargs)

    def record(
        self, method: str, *arguments: Any, log_kwargs: _Options | None = None, **named: Any
    ) -> None:
        """Call a method of all trackers that have it.

        Args:
            method: Its name.
            *arguments: What it takes.
            log_kwargs: Further arguments for each tracker name.
            **named: Arguments by their names; `step` is the number of optimizer updates so far.

        Raises:
            RuntimeError: `init_trackers` was not called.
            TypeError: `step` or `log_kwargs` is of another type.
        """
        if "step" in named:
            named["step"] = _as_step(named["step"])
        _check_options("log_kwargs", log_kwargs)
        for tracker in self._begun(method):
            options = (log_kwargs or {}).get(tracker.name, {})
            getattr(tracker, method)(*arguments, **named, **options)

    def end_training(self) -> None:
        """Wait until all is recorded, within each tracker's limit, and close the runs.

        Calling it again, or without trackers, does nothing.
        """
        if self._end is not None and self._end.detach():
            finish_all(self._trackers, "finished")

    def _make(self, project_name: str, init_kwargs: _Options | None) -> list[GeneralTracker]:
        made: list[GeneralTracker] = []
        main = PartialState().is_main_process
        folder = self.logging_dir and _with_home(self.logging_dir)
        try:
            for one in self.log_with:
                if one.main_process_only and not main:
                    made.append(NullTracker(one.name))
                    continue
                if one.requires_logging_directory:
                    _make_directory(folder)
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

    def _begun(self, what: str) -> list[GeneralTracker]:
        """The trackers that run here."""
        if self._end is None:
            # Other processes need not have called it, and without log_with nobody need.
            if self.log_with and PartialState().is_main_process:
                raise RuntimeError(
                    f"{what} needs trackers: call init_trackers(project_name) first."
                )
        elif self._end.alive:
            return self._trackers
        elif self.log_with and not self._warned:
            self._warned = True
            logger.warning("%s was called after end_training: nothing is recorded any more.", what)
        return []


def _as_step(step: Any) -> int | None:
    try:
        return None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(
            f"step is {step!r}; it must be an integer, the number of optimizer updates so far."
        ) from None


def _check_options(what: str, options: Any) -> None:
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(one, Mapping) for one in options.values())
    ):
        raise TypeError(
            f"{what} is {options!r}; it must be a dict of each tracker's name and its arguments, "
            "such as {'tensorboard': {…}}."
        )


def _with_home(path: str | os.PathLike[str]) -> str | Path:
    """The path with the home for ``~``; text stays text, as a tracker may want it."""
    known = os.path.expanduser(path)
    return known if isinstance(path, str) else Path(known)


def _make_directory(logging_dir: str | os.PathLike[str] | None) -> None:
    """Find out now, not on a thread when the run is under way, that it cannot be made."""
    try:
        Path(logging_dir or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"logging_dir is {str(logging_dir)!r}, which cannot be used as a folder: {error}."
        ) from error


def _main_first(make: Callable[[], _T], *, key: str) -> _T:
    """Call `make` on the main process, then on the others, who raise if it failed there.

    The others hear of it through the store of the process group and not by a collective: some
    scripts begin their trackers on the main process alone, where a collective would never end.

    Raises:
        RuntimeError: On the others; it gives the error.
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


def _end_unasked(trackers: list[GeneralTracker], process: int) -> None:
    """Close trackers that nobody ended; not in a fork of their process, where no thread runs."""
    if os.getpid() == process:
        # Python sets it when an error ends the script.
        failed = getattr(sys, "last_value", None) is not None
        finish_all(trackers, "failed" if failed else "finished")
