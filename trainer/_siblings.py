"""Is another file in the place of `callbacks` or `trackers`? Found out before it does harm.

Cadence is three packages with everyday names, and Python looks for a name in the folder of the
user's script first. A `callbacks.py` there is imported instead of ours, and the error comes much
later, about a name that it lacks. `check_siblings` notices it when `trainer` is imported.

What it cannot notice is a user's own `trainer.py`: then `import trainer` is that file, and nothing
of ours runs. Python's error at least names the file (`cannot import name 'Trainer' from ...
/trainer.py`). `trainer env` lists such files in the current folder before they are met: the command
itself is found by its own path, not by the folder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DISTRIBUTION = "cadence-trainer"
PACKAGES = ("callbacks", "trackers", "trainer")


def check_siblings() -> None:
    """Raise if `callbacks` or `trackers` is not the package that lies beside `trainer`.

    Nothing is imported to find out.

    Raises:
        ImportError: naming the file or folder that is in the way, or the package that is missing,
            and what to do about it.
    """
    for name in PACKAGES:
        if name == __package__:
            continue
        expected = Path(__file__).parent.parent / name / "__init__.py"
        found = locate(name)
        if found is None:
            raise ImportError(
                f"The package {name!r} of {DISTRIBUTION} is missing: there is no {expected}. "
                f"Install it again: pip install --force-reinstall --no-deps {DISTRIBUTION}",
                name=name,
            )
        if not _same(found, expected):
            raise ImportError(
                f"{found} is in the place of the package {name!r} of {DISTRIBUTION}, which is at "
                f"{expected.parent}. Python searches the script's folder and PYTHONPATH first: "
                f"rename {found.name if found.name != '__init__.py' else found.parent.name!r}, or "
                "start the script from where it is not found.",
                name=name,
                path=str(found),
            )


def locate(name: str) -> Path | None:
    """Return the file that `import name` runs, without running it.

    A folder with no `__init__.py` is returned itself; None stands for a name that is nowhere.
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
    """Return what in `folder` would be imported in place of one of the three packages."""
    here = Path(__file__).parent.parent
    candidates = [
        candidate
        for name in PACKAGES
        for candidate in (folder / name / "__init__.py", folder / f"{name}.py")
    ]
    return [path for path in candidates if path.is_file() and not _same(path.parents[1], here)]


def _same(one: Path, other: Path) -> bool:
    # First as they are spelt: each package may be a link to a place of its own.
    return one.absolute() == other.absolute() or one.resolve() == other.resolve()
