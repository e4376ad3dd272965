"""HTML elements. Strings, such as the names of metrics, are escaped; `Markup` is not."""

from __future__ import annotations

import math
from html import escape
from typing import Any

_LARGE = 1e9  # from which on numbers are shown with an exponent


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: Any) -> Markup:
    """Return an element with children: strings, elements, and lists of them; None is left out.

    Args:
        tag: Its name.
        children: Its content.
        attributes: ``class_`` for ``class``, ``data_x`` for ``data-x``; True writes the name alone,
            None and False omit the attribute.
    """
    given = "".join(
        f" {name.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in ("input", "img", "meta"):
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{together(*children)}</{tag}>")


def together(*children: object) -> Markup:
    """Return children without an element around them."""
    texts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            texts.append(together(*child))
        elif child is not None:
            texts.append(child if isinstance(child, Markup) else escape(str(child)))
    return Markup("".join(texts))


def table(head: list[object], rows: list[list[object]], **attributes: Any) -> Markup:
    """Return a table that scrolls sideways if too wide; cells may be ``td`` or ``th`` elements."""

    def row(cells: list[object], tag: str) -> Markup:
        return element(
            "tr",
            [
                cell
                if isinstance(cell, Markup) and cell.startswith(("<td", "<th"))
                else element(tag, cell)
                for cell in cells
            ],
        )

    return element(
        "div",
        element(
            "table",
            element("thead", row(head, "th")),
            element("tbody", [row(each, "td") for each in rows]),
            **attributes,
        ),
        class_="scroll",
    )


def number(value: float, digits: int = 5) -> Markup:
    """Return a rounded number, with all its digits as the value of the element."""
    if not math.isfinite(value):
        text = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return element("data", text, value=text, class_="bad")
    exact, large = repr(value), abs(value) >= 10**digits
    if isinstance(value, int) or (large and abs(value) < _LARGE):
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.{digits}g}"
    return element("data", shown, value=exact, title=exact if exact != shown else None)
