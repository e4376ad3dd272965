"""Detect user files that shadow the packages `callbacks` and `trackers`.

Cadence is three packages with everyday names, and Python searches the folder of the user's script
first. A `callbacks.py` there is imported instead of ours, and the error comes much later, about a
missing name. `check_siblings` detects this when `trainer` is imported.

It cannot detect a user's own `trainer.py`: `import trainer` then runs that file, and none of our
code. Python's error at least names the file (`cannot import name 'Trainer' from ...
/trainer.py`). `trainer env` lists such files in the current folder: the command is started by its
own path, so they do not shadow it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DISTRIBUTION = "cadence-trainer"
PACKAGES = ("callbacks", "trackers", "trainer")


def check_siblings() -> None:
    """Raise if `callbacks` or `trackers` is not the package installed next to `trainer`.

    Nothing is imported for the check.

    Raises:
        ImportError: A file or folder shadows a package.
    """
    for name in PACKAGES:
        if name == __package__:
            continue
        expected = Path(__file__).parent.parent / name / "__init__.py"
        found = locate(name)
        if found is not None and not _same(found, expected):  # None: Python reports it
            raise ImportError(
                f"{found} shadows the package {name!r} of {DISTRIBUTION}, which is at "
                f"{expected.parent}. Python searches the script's folder and PYTHONPATH first: "
                f"rename {found.name if found.name != '__init__.py' else found.parent.name!r}, or "
                "start the script from a folder where it is not on the search path.",
                name=name,
                path=str(found),
            )


def conflicts() -> list[str]:
    """Return a sentence for each other distribution that installed files in one of our packages.

    With pip, the distribution installed later overwrites files of the other, and removing either
    deletes the folder.
    """
    from importlib import metadata

    owners = metadata.packages_distributions()
    return [
        f"The distribution {owner} also installs a package {name!r}, and may have overwritten "
        f"files of {DISTRIBUTION}. Keep them in separate environments: uninstall {owner}, then "
        f"reinstall {DISTRIBUTION} with `pip install --force-reinstall --no-deps`."
        for name in PACKAGES
        for owner in dict.fromkeys(owners.get(name, ()))
        if owner.lower().replace("_", "-") != DISTRIBUTION
    ]


def version() -> str:
    """Return the version of Cadence, or a text saying that it is not installed."""
    from importlib import metadata  # here, since it costs more than the rest of the import

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def locate(name: str) -> Path | None:
    """Return the file that `import name` would run, without running it.

    For a folder without an `__init__.py`, return the folder; for a name that is not found, None.
    """
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is not None and spec.has_location and spec.origin is not None:
        return Path(spec.origin)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    file = getattr(module, "__file__", None)
    return Path(file) if file is not None else None


def shadows(folder: Path) -> list[Path]:
    """Return the files in `folder` that would be imported instead of one of the three packages."""
    here = Path(__file__).parent.parent
    candidates = [
        candidate
        for name in PACKAGES
        for candidate in (folder / name / "__init__.py", folder / f"{name}.py")
    ]
    return [path for path in candidates if path.is_file() and not _same(path.parents[1], here)]


def _same(one: Path, other: Path) -> bool:
    # Unresolved paths first: each package may be a symlink to a different location.
    return one.absolute() == other.absolute() or one.resolve() == other.resolve()
