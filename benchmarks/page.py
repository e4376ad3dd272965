"""The figures in the README, written from the JSON: none is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.report import Result, Unavailable

README = Path(__file__).with_name("README.md")
_PLACE = re.compile(r"(<!-- results of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def section(path: Path) -> str:
    """What the page says about one result."""
    if not path.exists():
        return f"*Not measured yet: `python -m benchmarks {path.stem}`.*\n"
    result = Result.load(path)
    notes = "".join(f"{note} " for note in result.notes)
    return f"{result.title}:\n\n{result.table()}\n\n{notes}<br>\n<sub>{result.about()}</sub>\n"


def written(text: str, folder: Path) -> str:
    """The page with the results of a folder between its marks."""
    return _PLACE.sub(
        lambda found: found[1] + section(folder / f"{found[2]}.json") + found[3], text
    )


def write(folder: Path) -> Path:
    """Bring the README up to date.

    Raises:
        Unavailable: There is no result in the folder, and the page would lose its figures.
    """
    if not any(folder.glob("*.json")):
        raise Unavailable(f"There are no results in {folder}: run python -m benchmarks all first.")
    README.write_text(written(README.read_text(), folder))
    return README
