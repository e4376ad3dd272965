"""Programs in the shape of other libraries' examples, each run with another import line."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def real(library: str) -> Any:
    """Return another library to compare with, or skip the test."""
    return pytest.importorskip(library, reason=f"{library} is missing: pip install -e '.[peers]'")


def load(name: str, text: str) -> dict[str, Any]:
    """Execute the text of a program; return its names."""
    script: dict[str, Any] = {"__name__": name}
    exec(compile(text, f"{name}.py", "exec"), script)
    return script


def run_lightning(name: str, library: str, folder: Path) -> tuple[Any, Any, dict[str, list[float]]]:
    """Run a program that was written for Lightning.

    Args:
        name: The program.
        library: ``"lightning"`` runs it as it is. ``"trainer.lightning"`` and
            ``"tests.moving.plain"`` change where it imports ``L`` or ``pl`` from; other names are
            those of ``trainer.lightning``.
        folder: Where it writes.

    Returns:
        The trained module, what else the program returns, and the logged values by name.
    """
    text = (PROGRAMS / "lightning" / f"{name}.py").read_text()
    if library != "lightning":
        if library == "tests.moving.plain":
            text = re.sub(r"^import lightning\S* ", f"import {library} ", text, flags=re.M)
            text = re.sub(r"^from lightning import", f"from {library} import", text, flags=re.M)
        text = re.sub(r"^(import|from) lightning\b", r"\1 trainer.lightning", text, flags=re.M)
    folder.mkdir()
    module, found = load(name, text)["main"](str(folder))
    values: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("metrics.csv")):
        for row in csv.DictReader(path.read_text().splitlines()):
            for key, value in row.items():
                if value and key not in ("step", "epoch", "time"):
                    values.setdefault(key, []).append(float(value))
    return module, found, values
