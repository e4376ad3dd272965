"""Several progress bars drawn together, or as plain lines in a log file."""

from __future__ import annotations

import sys
from collections import deque
from time import monotonic
from typing import Protocol

from tqdm import tqdm

_SPEED_OVER = 30.0  # seconds over which the speed is averaged
_LINE_EVERY = 60.0  # seconds between the lines of one bar


class Row:
    """The contents of one bar."""

    def __init__(self, name: str, total: int | None, leave: bool) -> None:
        self.name = name
        self.total = total
        self.leave = leave
        self.done = 0
        self.text = ""
        self.seconds = 0.0
        self.printed: tuple[int, str] | None = None  # the content of its last plain line
        self._began = monotonic()
        self._first = 0  # batches done before the bar was opened, in a resumed epoch
        self._marks: deque[tuple[float, int]] = deque()

    def update(self, done: int, text: str) -> None:
        """Set the number of batches done and the metrics text."""
        self.seconds = monotonic() - self._began
        if not self.done:
            self._first = done - 1
            self._marks.append((0.0, self._first))
        if done > self._marks[-1][1]:  # it may be redrawn without progress
            self._marks.append((self.seconds, done))
        self.done, self.text = done, text
        while len(self._marks) > 2 and self._marks[1][0] < self.seconds - _SPEED_OVER:
            self._marks.popleft()

    def finish(self, done: int) -> None:
        """Set the final state, with the speed over all batches of the bar."""
        if done:
            self.done = done
            self._marks = deque([(0.0, self._first), (self.seconds, done)])

    def pause(self, seconds: float) -> None:
        """Exclude time that was spent on another bar."""
        self._began += seconds

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The texts for name, batches done, speed, and elapsed and remaining time."""
        count = str(self.done) if self.total is None else f"{self.done}/{self.total}"
        time = tqdm.format_interval(self.seconds)
        speed = ""
        if self._marks and self.seconds > self._marks[0][0]:
            start, before = self._marks[0]
            rate = (self.done - before) / (self.seconds - start)
            speed = f"{rate:.1f} batch/s" if rate >= 1 else f"{1 / rate:.1f} s/batch"
            if self.total is not None and self.done < self.total:
                time += f"<{tqdm.format_interval((self.total - self.done) / rate)}"
        return self.name, count, speed, time


class Canvas(Protocol):
    """Where bars are drawn."""

    def draw(self, rows: list[Row]) -> None:
        """Draw these rows, replacing the last drawing."""

    def end(self, *, leave: bool) -> None:
        """Keep or remove the last drawing; the next drawing is a new one."""


class Lines:
    """Plain lines for a log file: one every minute, and one for each finished bar that stays."""

    def __init__(self) -> None:
        self._row: Row | None = None
        self._next = monotonic() + _LINE_EVERY

    def draw(self, rows: list[Row]) -> None:
        """Print a line for the innermost bar (the active one) if it is due."""
        self._row = rows[0]
        if monotonic() >= self._next:
            self._print(rows[-1])

    def end(self, *, leave: bool) -> None:
        """Print the last line of a bar that stays."""
        if leave and self._row is not None:
            self._print(self._row)

    def _print(self, row: Row) -> None:
        if not row.done or row.printed == (row.done, row.text):
            return
        name, *cells = row.cells
        content = ", ".join(part for part in (*cells, row.text) if part)
        try:
            print(f"{name}: {content}", file=sys.stderr, flush=True)  # noqa: T201 - its purpose
        except ValueError as error:  # closed stream, or a name that it cannot encode
            raise OSError(str(error)) from error
        row.printed = row.done, row.text
        self._next = monotonic() + _LINE_EVERY


class Board:
    """The open bars; the clock of a bar is paused while another one is open below it."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas
        self._rows: list[Row] = []

    def open(self, name: str, total: int | None, leave: bool) -> BoardView:
        """Open a bar below those that are open, as `OpenView` of the progress bar."""
        row = Row(name, total, leave)
        self._rows.append(row)
        try:
            self.draw()
        except OSError:  # the caller has no view to close
            self._rows.remove(row)
            raise
        return BoardView(row, self)

    def draw(self) -> None:
        """Draw all open bars."""
        self._canvas.draw(list(self._rows))

    def close(self, row: Row, seconds: float) -> None:
        """Close a bar that was open for this long."""
        if len(self._rows) == 1:
            try:
                self.draw()
            finally:  # restore the streams even if the terminal was closed
                self._rows.clear()
                self._canvas.end(leave=row.leave)
            return
        self._rows.remove(row)
        for other in self._rows:
            other.pause(seconds)
        self.draw()


class BoardView:
    """One bar of a board."""

    def __init__(self, row: Row, board: Board) -> None:
        self._row = row
        self._board = board
        self._began = monotonic()

    def show(self, done: int, text: str) -> None:
        """Show how many batches are done, and the metrics."""
        self._row.update(done, text)
        self._board.draw()

    def close(self, done: int) -> None:
        """Close the bar, after this many batches."""
        self._row.finish(done)
        self._board.close(self._row, monotonic() - self._began)
