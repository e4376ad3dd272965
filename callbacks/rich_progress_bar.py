"""Show the progress of a run on the screen, drawn by rich."""

from __future__ import annotations

import io
import logging
import sys
from collections import deque
from collections.abc import Iterator
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from callbacks.progress_bar import CellOutput, OpenView, ProgressBar, in_notebook

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live

_SPEED_OVER = 30.0  # seconds: long enough to be steady, short enough to follow the run
_LINE_EVERY = 60.0  # seconds between the lines of one bar where there is no terminal
_BAR = (10, 40)  # the least and the most columns of the moving part
_NOTEBOOK_COLUMNS = 100


class _Row:
    """The contents of one bar."""

    def __init__(self, name: str, total: int | None, leave: bool) -> None:
        self.name = name
        self.total = total
        self.leave = leave
        self.done = 0
        self.text = ""
        self.seconds = 0.0
        self._began = monotonic()
        self._first = 0  # batches done before the bar was opened, in a resumed epoch
        self._marks: deque[tuple[float, int]] = deque()

    def update(self, done: int, text: str) -> None:
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
        """Freeze the bar, with the speed over all of its batches."""
        if done:
            self.done = done
            self._marks = deque([(0.0, self._first), (self.seconds, done)])

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on another bar."""
        self._began += seconds

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The name, how much is done, the speed, and the elapsed and remaining time."""
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


def _taken(widths: list[int]) -> int:
    """Return the columns that the texts of a row take, with the spaces beside the bar."""
    return sum(widths) + len(widths) + 1


class _Picture:
    """Bars one below the other, with the metrics beside them, or below if there is no room."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.cells import cell_len
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        cells = [row.cells for row in self._rows]
        text = next((row.text for row in self._rows if row.text), "")
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        while len(widths) > 2 and _taken(widths) > options.max_width:  # the count matters most
            widths.pop()
        room = options.max_width - _taken(widths)
        beside = bool(text) and room - cell_len(text) >= _BAR[0]
        width = min(_BAR[1], room - cell_len(text) if beside else room)
        grid = Table.grid(padding=(0, 1))
        for style in ("bold", "", *("green", "cyan", "dim")[: len(widths) - 1], ""):
            grid.add_column(style=style, no_wrap=True, overflow="crop")
        for row, (name, *others) in zip(self._rows, cells, strict=True):
            bar = Bar(
                total=row.total,
                completed=row.done,
                width=width,
                pulse=row.total is None,
                animation_time=row.seconds,
            )
            moving = bar if width >= _BAR[0] else ""
            last = row.text if beside else ""
            grid.add_row(Text(name), moving, *map(Text, others[: len(widths) - 1]), Text(last))
        yield grid
        if text and not beside:
            yield Text(text)


class _Canvas(Protocol):
    """Where bars are drawn."""

    def draw(self, rows: list[_Row]) -> None:
        """Draw these rows in place of the last drawing."""

    def end(self, *, leave: bool) -> None:
        """Leave the last drawing or remove it; the next one goes to a new place."""


class _Terminal:
    """The last lines of a terminal; what is printed meanwhile appears above them.

    No thread redraws them, so that a debugger's prompt stays in place. The cursor is never hidden,
    so that a killed process leaves the terminal intact.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._replaced: list[tuple[str, Any, Any]] = []

    def draw(self, rows: list[_Row]) -> None:
        if self._live is None:
            self._live = self._start()
        self._live.update(_Picture(rows), refresh=True)

    def _start(self) -> Live:
        from rich.live import Live

        live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="visible",
        )
        live.start()
        self._console.show_cursor(True)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():  # a redirected stream stays as it is
                self._replaced.append((name, stream, _above(self._console, stream)))
        for name, old, new in self._replaced:
            setattr(sys, name, new)
            _move_handlers(old, new)
        return live

    def end(self, *, leave: bool) -> None:
        if self._live is None:
            return
        live, self._live = self._live, None
        live.transient = not leave
        replaced, self._replaced = self._replaced, []
        try:
            for _, _, new in replaced:
                new.flush()  # an unfinished line
        finally:
            for name, old, new in replaced:
                if getattr(sys, name) is new:
                    setattr(sys, name, old)
                _move_handlers(new, old)
            live.stop()


def _above(console: Console, stream: Any) -> Any:
    """Return a stream that writes what is meant for ``stream`` above the bars."""
    from rich.file_proxy import FileProxy

    class Above(FileProxy):
        @property
        def rich_proxied_file(self) -> Any:
            """The stream itself, which other consoles of rich must not bypass."""
            return self

    return Above(console, stream)


def _move_handlers(old: Any, new: Any) -> None:
    """Make log handlers write to ``new``: they keep the stream that they were created with."""
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    handlers = {one for log in loggers if isinstance(log, logging.Logger) for one in log.handlers}
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


class _Notebook:
    """A cell output that is replaced; it needs no widgets and is saved with the notebook."""

    def __init__(self) -> None:
        self._output = CellOutput()

    def draw(self, rows: list[_Row]) -> None:
        from rich.console import Console

        console = Console(
            file=io.StringIO(),
            record=True,
            width=_NOTEBOOK_COLUMNS,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
        )
        console.print(_Picture(rows))
        text = console.export_text(clear=False)
        html = console.export_html(
            inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>'
        )
        self._output.show({"text/plain": text, "text/html": html})

    def end(self, *, leave: bool) -> None:
        if not leave:
            self._output.show({"text/plain": "", "text/html": ""})
        self._output = CellOutput()


class _Lines:
    """Plain lines where there is no terminal: one now and then, and one for each finished bar."""

    def __init__(self) -> None:
        self._row: _Row | None = None
        self._next = monotonic() + _LINE_EVERY

    def draw(self, rows: list[_Row]) -> None:
        self._row = rows[0]
        if self._row.leave and monotonic() >= self._next:
            self._print(self._row)

    def end(self, *, leave: bool) -> None:
        if leave and self._row is not None:
            self._print(self._row)

    def _print(self, row: _Row) -> None:
        if row.done:
            name, *others = row.cells
            said = ", ".join(part for part in (*others, row.text) if part)
            print(f"{name}: {said}", file=sys.stderr, flush=True)  # noqa: T201 - that is its purpose
        self._next = monotonic() + _LINE_EVERY


class _Board:
    """The open bars; the clock of a bar is paused while another one is open below it."""

    def __init__(self, canvas: _Canvas) -> None:
        self._canvas = canvas
        self._rows: list[_Row] = []

    def open(self, name: str, total: int | None, leave: bool) -> _BoardView:
        row = _Row(name, total, leave)
        self._rows.append(row)
        try:
            self.draw()
        except OSError:  # the caller has no view to close
            self._rows.remove(row)
            raise
        return _BoardView(row, self)

    def draw(self) -> None:
        self._canvas.draw(list(self._rows))

    def close(self, row: _Row, seconds: float) -> None:
        if len(self._rows) == 1:
            try:
                self.draw()
            finally:  # restore the streams even if the terminal is gone
                self._rows.clear()
                self._canvas.end(leave=row.leave)
            return
        self._rows.remove(row)
        for other in self._rows:
            other.pause(seconds)
        self.draw()


class _BoardView:
    """One bar of a board."""

    def __init__(self, row: _Row, board: _Board) -> None:
        self._row = row
        self._board = board
        self._began = monotonic()

    def show(self, done: int, text: str) -> None:
        self._row.update(done, text)
        self._board.draw()

    def close(self, done: int) -> None:
        self._row.finish(done)
        self._board.close(self._row, monotonic() - self._began)


class RichProgressBar(ProgressBar):
    """Show what :class:`ProgressBar` shows, drawn by rich.

    Besides colours: metrics that do not fit beside the bar get lines of their own, what is printed
    or logged meanwhile appears above the bars, the clock of an epoch is paused during validations,
    and a notebook needs no widgets. Where standard error is not a terminal (a log file, CI), a
    plain line is written for each finished bar, and one a minute. Needs the package rich.

    Args:
        refresh_rate: The maximum number of redraws per second; 0 shows nothing.

    Raises:
        ValueError: If ``refresh_rate`` is negative.
        ImportError: If rich is not installed.
    """

    def __init__(self, refresh_rate: float = 10.0) -> None:
        super().__init__(refresh_rate)
        if find_spec("rich") is None:
            raise ImportError(
                "RichProgressBar needs the package rich. Install it with "
                "pip install 'cadence-trainer[rich]', or use ProgressBar."
            )

    def choose_view(self) -> OpenView | None:
        """Return the function that opens a bar here; None if nothing can be shown."""
        from rich.console import Console

        if in_notebook():
            return _Board(_Notebook()).open
        if sys.stderr is None:  # as in a service, or where it was closed
            return None
        console = Console(
            file=sys.stderr,
            force_terminal=sys.stderr.isatty(),  # whatever environment variables say
            force_interactive=True,
            force_jupyter=False,
            markup=False,
            emoji=False,
            highlight=False,
        )
        if not console.is_terminal or console.is_dumb_terminal:
            return _Board(_Lines()).open
        return _Board(_Terminal(console)).open
