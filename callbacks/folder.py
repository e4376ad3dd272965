"""Resolve paths that users pass, such as ``~/runs``."""

from __future__ import annotations

import os
from pathlib import Path


def with_home(name: str, path: str | os.PathLike[str]) -> str:
    """Return a path with ``~`` replaced by the home directory.

    Args:
        name: The argument's name, for errors.
        path: Its value.

    Raises:
        TypeError: The value is not a path.
        ValueError: The home directory is not known.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is {path!r}; it must be a path.")
    known = os.path.expanduser(path)  # Path.expanduser would also expand ./~
    if known.startswith("~"):
        raise ValueError(
            f"{name} is {known!r}, but the home that it begins with is not known here. Give the "
            "whole path, or ./~… for a folder of that name."
        )
    return known


def given_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return `with_home` as an absolute path, because hooks may change the working directory.

    Raises:
        ValueError: The home directory is not known, or the working directory was deleted.
    """
    try:
        return Path(with_home(name, path)).absolute()
    except FileNotFoundError as error:
        raise ValueError(
            f"{name} is {os.fspath(path)!r}, relative to the working directory, which no longer "
            "exists. Give an absolute path, or start again in a folder that exists."
        ) from error


def given_folder(dirpath: str | os.PathLike[str] | None) -> Path | None:
    """Return a callback's ``dirpath`` as an absolute path; None if it is None or empty."""
    return None if dirpath is None or dirpath == "" else given_path("dirpath", dirpath)
