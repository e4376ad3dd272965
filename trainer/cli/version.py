"""The version of the installed distribution."""

from __future__ import annotations

from importlib import metadata

from trainer._siblings import DISTRIBUTION


def version() -> str:
    """Return the version of Cadence, or a text that says that it is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
