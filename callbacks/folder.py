"""The folder that a callback is given to write to."""

from __future__ import annotations

import os
from pathlib import Path


def given_folder(dirpath: str | os.PathLike[str] | None) -> Path | None:
    """Return a callback's ``dirpath`` as an absolute path; None if none, or an empty one, is given.

    Hooks may leave the working directory in which the callback was made.
    """
    return Path(dirpath).expanduser().absolute() if dirpath else None
