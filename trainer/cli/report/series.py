"""The values of a metric: smoothing, thinning for a chart, and non-finite values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COLUMNS = 300  # of a chart: a pixel or two each
STRENGTHS = (0.6, 0.9, 0.99)  # of smoothing, for up to so many values:
_USUAL = 1000
ENOUGH = 20  # minimum of values, and maximum per turn, for which smoothing makes sense


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """All values of a metric, in the order recorded; the arrays have shape (values,).

    Attributes:
        steps: Updates.
        times: In seconds since 1970; NaN where the record has none.
        epochs: From 0; NaN where the record has none.
        values: As recorded, including NaN and infinity.
    """

    steps: Floats
    times: Floats
    epochs: Floats
    values: Floats

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which values are finite."""
        return np.isfinite(self.values)

    @cached_property
    def curves(self) -> dict[float, Floats]:
        """The smoothed values by strength; empty where smoothing would not help."""
        if not is_noisy(self.values):
            return {}
        # Charts of long and short runs are equally wide: average over the same share of the width.
        share = min(1.0, _USUAL / len(self.values))
        return {strength: smoothed(self.values, strength**share) for strength in STRENGTHS}

    def at(self, index: int) -> tuple[float, int]:
        """Return a value and its step."""
        return float(self.values[index]), int(self.steps[index])

    def extreme(self, mode: str) -> tuple[float, int] | None:
        """Return the smallest or largest finite value and its step; of equal ones the first."""
        if not self.finite.any():
            return None
        values = np.where(self.finite, self.values, np.inf if mode == "min" else -np.inf)
        return self.at(int(values.argmin() if mode == "min" else values.argmax()))


def smoothed(values: Floats, strength: float) -> Floats:
    """Return an exponential moving average, without the bias towards its start.

    With weight w: s = w·s + (1 − w)·x from s = 0, divided by 1 − wⁿ after n values. That is the
    smoothing of TensorBoard's scalars (tensorboard pull request 639), over all values rather than
    those that a chart shows. Non-finite values are kept and not averaged.

    Args:
        values: Shape (values,).
        strength: w, from 0 to below 1.
    """
    finite = np.isfinite(values)
    weight = float(strength)

    def step(average: float, value: float) -> float:
        return average * weight + (1 - weight) * value

    kept = values[finite]
    averages = np.fromiter(accumulate(kept.tolist(), step, initial=0.0), float, len(kept) + 1)[1:]
    result: Floats = values.copy()
    result[finite] = averages / (1 - np.power(weight, np.arange(1, len(kept) + 1)))
    return result


def is_noisy(values: Floats) -> bool:
    """Return whether smoothing helps: there are enough values, and they often change direction."""
    kept = values[np.isfinite(values)]
    ways = np.sign(np.diff(kept / 2))  # in halves: a difference may overflow
    ways = ways[ways != 0]
    turns = int((ways[1:] != ways[:-1]).sum())
    return len(kept) >= ENOUGH and turns * ENOUGH >= len(kept)


def thinned(x: Floats, y: Floats, columns: int = COLUMNS) -> tuple[Floats, Floats]:
    """Return the points that a chart needs: the smallest and largest value of each column.

    The first and the last value are kept, and the first non-finite value of each column, as NaN:
    the line has a gap there.

    Returns:
        At most 3 · `columns` + 2 points.
    """
    if len(x) <= 2 * columns:
        return x, np.where(np.isfinite(y), y, np.nan)
    column, finite = _column_of(x, columns), np.isfinite(y)
    # In each column, finite points come first, sorted by value, then the others in their order.
    order = np.lexsort((np.where(finite, y, 0.0), ~finite, column))
    first = np.flatnonzero(np.diff(column, prepend=-1))
    numbers = np.add.reduceat(finite, first)
    size = np.diff(np.append(first, len(x)))
    lowest, highest = first[numbers > 0], (first + numbers - 1)[numbers > 0]
    gaps = (first + numbers)[numbers < size]
    ends = [[0], [len(x) - 1]]
    chosen = np.unique(np.concatenate([*ends, order[lowest], order[highest], order[gaps]]))
    return x[chosen], np.where(np.isfinite(y[chosen]), y[chosen], np.nan)


def _column_of(x: Floats, columns: int) -> NDArray[np.intp]:
    """Return the column number of each point; where a curve goes back, new columns begin."""
    low, high = np.nanmin(x), np.nanmax(x)
    place = np.floor((x - low) / max(high - low, 1e-300) * columns)
    return np.cumsum(np.diff(place, prepend=place[0]) != 0)


class Stretch(NamedTuple):
    """Consecutive values that are not finite.

    Attributes:
        first: The step of the first.
        last: The step of the last.
        size: How many there are.
        kinds: Which of NaN, Infinity and -Infinity are among them.
    """

    first: int
    last: int
    size: int
    kinds: tuple[str, ...]


def stretches(series: Series) -> Iterator[Stretch]:
    """Yield the stretches of values that are not finite."""
    bad = np.flatnonzero(~series.finite)
    for indices in np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1):
        if len(indices):
            first, last = series.steps[indices[[0, -1]]]
            kinds = tuple(dict.fromkeys(map(name_of, series.values[indices])))
            yield Stretch(int(first), int(last), len(indices), kinds)


def name_of(value: float) -> str:
    """Return NaN, Infinity or -Infinity, as the record writes them."""
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
