"""The paths that users give, as absolute ones: hooks may leave the working directory."""

from __future__ import annotations

import os
from pathlib import Path


def given_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return a given path as an absolute one; ``~`` is the home.

    Args:
        name: The argument's name, for errors.
        path: Its value.

    Raises:
        ValueError: There is no such home, or the working directory was deleted.
    """
    shown = f"{name} is {os.fspath(path)!r}"
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"{shown}, but the home that it begins with is not known here. Give the whole path, or "
            "./~… for a folder of that name."
        ) from error
    except FileNotFoundError as error:
        raise ValueError(
            f"{shown}, relative to the working directory, which no longer exists. Give an absolute "
            "path, or start again in a folder that exists."
        ) from error


def given_folder(dirpath: str | os.PathLike[str] | None) -> Path | None:
    """Return a callback's ``dirpath`` by `given_path`; None if none, or an empty one, is given."""
    return given_path("dirpath", dirpath) if dirpath else None
