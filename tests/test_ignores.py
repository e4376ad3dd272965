"""Each comment that silences a check of the three packages says why, on its line or above it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("callbacks", "trackers", "trainer")

CODES = r"(: [A-Z]+\d+(, [A-Z]+\d+)*)?"
IGNORE = re.compile(
    rf"# (ruff: )?noqa{CODES}|# type: ignore(\[.*?\])?|# pragma: no cover|# fmt: \w+|# mypy: .*"
)


def without_reason(text: str) -> list[int]:
    """Return the numbers of the lines with an ignore that nothing is said of."""
    lines = text.splitlines()
    above = ["", *(line if line.lstrip().startswith("#") else "" for line in lines)]
    return [
        number
        for number, line in enumerate(lines, 1)
        if (first := IGNORE.search(line))
        and not re.search(r"\w", IGNORE.sub("", f"{line[first.start() :]}\n{above[number - 1]}"))
    ]


def test_every_ignore_has_a_reason():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for number in without_reason(path.read_text())
    ]
    assert found == []


def test_an_ignore_without_a_reason_is_found():
    text = """\
a = 1  # noqa: B018, ARG002
b = 1  # noqa: B018, ARG002  # why
# of another line

c = 1  # type: ignore[misc, arg-type]  # noqa: S301
# why
d = 1  # type: ignore
# noqa: B018
e = 1  # pragma: no cover
f = 1  # fmt: skip  # why
# mypy: disable-error-code="type-arg"
g = 1  # said of this line only
h = 1  # noqa
i = 1  # ruff: noqa: B018 - why
"""
    assert without_reason(text) == [1, 5, 8, 9, 11, 13]
