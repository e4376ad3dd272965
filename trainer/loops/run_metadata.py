"""Run metadata: what a run is and how it ended, in ``run.json`` in the project folder.

::

    {"format_version": 1, "run_id": …, "module": "Digits", "world_size": 1, "device": "cpu",
     "code": the git commit of the working folder, or null,
     "versions": {"torch": …, "python": …},
     "configuration": {…},             the Trainer's arguments
     "hyper_parameters": {…},          of the module and the datamodule, except private ones
     "starts": [{"begin": …, "step": 0, "end": …, "status": "finished", "error": null}]}

Times are seconds since 1970. Each start that resumes the run is added to ``starts``. A start that
was killed has no end and stays ``"running"``. Resuming a run needs nothing from this file. Secrets
are redacted, see `trackers.redaction`.
"""

from __future__ import annotations

import platform
import time
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
_LONGEST = 4000  # characters of an error


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
            "code": git_commit("."),
            "starts": [*earlier.get("starts", ()), {**start, "error": None}],
        }
        self._write(sweeps=True)

    def end(self, status: Status, error: str | None) -> None:
        """Record how the current start ended."""
        self._document["starts"][-1] |= {"end": time.time(), "status": status, "error": error}
        self._write()

    def _earlier(self, run_id: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = read_json(self._path)
            return document if document["run_id"] == run_id else {}
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
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


def text_of(error: BaseException | None) -> str | None:
    """Return an error's type and message, at most 4000 characters; None without an error."""
    return None if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]


def versions() -> dict[str, str]:
    """Return the versions of torch and Python, which results may depend on."""
    return {"torch": torch.__version__, "python": platform.python_version()}


def name_of(device: torch.device) -> str:
    """Return the name of a device's model if it is a GPU, else its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
