"""Write the tables in the README from the JSON."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import gpu
from benchmarks.report import Result, Unavailable

README = Path(__file__).with_name("README.md")
_PLACE = re.compile(r"(<!-- results of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def section(path: Path) -> str:
    """Return the text of the README about one result."""
    if not path.exists():
        return f"*Not measured yet: `python -m benchmarks {path.stem}`.*\n"
    if path.stem == "gpu":
        return gpu.page(path)
    result = Result.load(path)
    notes = "".join(f"{note} " for note in result.notes)
    return f"{result.title}:\n\n{result.table()}\n\n{notes}<br>\n<sub>{result.about()}</sub>\n"


def written(text: str, folder: Path) -> str:
    """Return the text with the results of a folder inserted between its markers."""
    return _PLACE.sub(
        lambda found: found[1] + section(folder / f"{found[2]}.json") + found[3], text
    )


def write(folder: Path) -> Path:
    """Update the README.

    Raises:
        Unavailable: There is no result in the folder, so the README would lose its figures.
    """
    if not any(folder.glob("*.json")):
        raise Unavailable(f"There are no results in {folder}: run python -m benchmarks all first.")
    README.write_text(written(README.read_text(), folder))
    return README
