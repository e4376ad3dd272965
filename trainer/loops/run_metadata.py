"""Run metadata: what a run is and how it ended, in ``run.json`` in the project folder.

::

    {"format_version": 1, "run_id": …, "module": "Digits", "world_size": 1, "device": "cpu",
     "code": the git commit of the working folder, or null,
     "versions": {"torch": …, "python": …},
     "configuration": {…},             the Trainer's arguments
     "hyper_parameters": {…},          of the module and the datamodule, except private ones
     "starts": [{"begin": …, "step": 0, "end": …, "status": "finished", "error": null}],
     "warnings": [{"time": …, "logger": "trainer.loops.fit", "text": …}], "more_warnings": 0}

Times are seconds since 1970. Each start that resumes the run is added to ``starts``. A start that
was killed has no end and stays ``"running"``. Resuming a run needs nothing from this file. Secrets
are redacted, see `trackers.redaction`.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trackers.base import Status
from trackers.code import git_commit
from trackers.redaction import redact
from trainer.checkpoint.storage import write_whole
from trainer.errors import module_logger
from trainer.files import read_json, sweep_hidden
from trainer.strict_json import dumps, to_json

logger = module_logger(__name__)

FORMAT_VERSION = 1
_OURS = ("trainer", "callbacks", "trackers")  # the loggers whose warnings are recorded
_MOST = 100  # warnings in the file; more are only counted, to limit the writes
_LONGEST = 4000  # characters of a warning or an error


class RunMetadata:
    """Writes ``run.json``; every change rewrites the whole file, on the caller's thread.

    A failed write is logged once; the run continues.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._document: dict[str, Any] = {}
        self._failed = False
        self._commit = git_commit(".")  # not on the record's thread; `git_commit` says why

    def begin(self, description: dict[str, Any], step: int) -> None:
        """Append a start to the earlier starts of the same run.

        Args:
            description: The run metadata, with its ``run_id``. Values that JSON cannot hold are
                converted by `str`.
            step: The number of updates before this start.
        """
        earlier = self._earlier(description["run_id"])
        start = {"begin": time.time(), "step": step, "end": None, "status": "running"}
        self._document = {
            "format_version": FORMAT_VERSION,
            **to_json(description, str),
            "code": self._commit,
            "starts": [*earlier.get("starts", ()), {**start, "error": None}],
            "warnings": earlier.get("warnings", []),
            "more_warnings": earlier.get("more_warnings", 0),
        }
        self._write(sweeps=True)

    def warn(self, record: logging.LogRecord) -> None:
        """Record a logged warning."""
        if len(self._document["warnings"]) >= _MOST:
            self._document["more_warnings"] += 1  # written with the next start or end
            return
        text = record.getMessage()[:_LONGEST]
        line = {"time": record.created, "logger": record.name, "text": text}
        self._document["warnings"].append(line)
        self._write()

    def end(self, status: Status, error: str | None) -> None:
        """Record how the current start ended."""
        self._document["starts"][-1] |= {"end": time.time(), "status": status, "error": error}
        self._write()

    def _earlier(self, run_id: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = read_json(self._path)
            return document if document["run_id"] == run_id else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read and is recreated: %r.", self._path, error)
            return {}

    def _write(self, *, sweeps: bool = False) -> None:
        text = dumps(redact(self._document), indent=1)
        try:
            if sweeps:
                sweep_hidden(self._path)
            write_whole(self._path, lambda file: file.write_text(f"{text}\n", encoding="utf-8"))
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("%s could not be written: %s. The run continues.", self._path, error)


class Listener(logging.Handler):
    """A logging handler that passes on warnings and errors of Cadence's loggers.

    It is attached from `listen` until `close`. If the user has not configured logging, Python
    writes warnings to stderr (`logging.lastResort`), but only while a logger has no handler. This
    handler would suppress that, so it calls `logging.lastResort` itself.

    Args:
        tell: Called with each log record, on the thread that logged it.

    Attributes:
        began: Whether `listen` was ever called.
    """

    def __init__(self, tell: Callable[[logging.LogRecord], object]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._process = os.getpid()
        self.began = False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a log record on, except in a forked process such as a DataLoader worker.

        A forked process has no thread to write it, and a lock held at the fork is never released.
        """
        handlers = _handlers_of(record.name)
        listeners = [handler for handler in handlers if isinstance(handler, Listener)]
        # `listeners` is empty after a concurrent `close`, or for a record of another process.
        speaks = handlers == listeners and (not listeners or self is listeners[0])
        if speaks and (last := logging.lastResort) and record.levelno >= last.level:
            last.handle(record)
        if os.getpid() == self._process:
            self._tell(record)

    def listen(self) -> None:
        """Attach the handler to the loggers."""
        self.began = True
        for name in _OURS:
            logging.getLogger(name).addHandler(self)

    def close(self) -> None:
        """Detach the handler from the loggers."""
        for name in _OURS:
            logging.getLogger(name).removeHandler(self)
        super().close()


def _handlers_of(name: str) -> list[logging.Handler]:
    """Return all handlers that a record of this logger reaches."""
    handlers: list[logging.Handler] = []
    at: logging.Logger | None = logging.getLogger(name)
    while at is not None:
        handlers += at.handlers
        at = at.parent if at.propagate else None
    return handlers


def text_of(error: BaseException | None) -> str | None:
    """Return an error's type and message, at most 4000 characters; None without an error."""
    return None if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]


def versions() -> dict[str, str]:
    """Return the versions of torch and Python, which results may depend on."""
    return {"torch": torch.__version__, "python": platform.python_version()}


def name_of(device: torch.device) -> str:
    """Return the name of a device's model if it is a GPU, else its type."""
    if device.type not in ("cuda", "xpu"):
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))
