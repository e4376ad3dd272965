"""Show the progress of a run on the screen, drawn with the package rich."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from callbacks.progress_bar import CellOutput, OpenView, ProgressBar, in_notebook
from callbacks.progress_board import Board, Lines, Row
from trainer.checks import suggest_arguments

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live

_BAR = (10, 40)  # minimum and maximum width of the bar, in columns
_NOTEBOOK_COLUMNS = 100


class _Bars:
    """All bars, with the metrics to the right of each bar, or below it if there is no room."""

    def __init__(self, rows: list[Row]) -> None:
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
        taken = sum(max(map(cell_len, column)) + 1 for column in zip(*cells, strict=True))
        room = options.max_width - taken - 1
        beside = room - cell_len(text) >= _BAR[0]
        width = min(_BAR[1], room - cell_len(text) if beside else room)
        grid = Table.grid(padding=(0, 1))
        for style in ("bold", "", "green", "cyan", "dim", ""):
            grid.add_column(style=style, no_wrap=True, overflow="crop")
        for row, (name, *others) in zip(self._rows, cells, strict=True):
            endless = row.total is None
            bar = Bar(row.total, row.done, width, pulse=endless, animation_time=row.seconds)
            moving = bar if width >= _BAR[0] else ""  # without room, only the numbers
            metrics = row.text if beside else ""
            grid.add_row(Text(name), moving, *map(Text, others), Text(metrics))
        yield grid
        if text and not beside:
            yield Text(text)


class _Terminal:
    """The last lines of a terminal; other output appears above them.

    There is no redraw thread, so that a debugger's prompt stays in place. The cursor is never
    hidden, so that a killed process leaves the terminal intact.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._streams: list[tuple[Any, Any]] = []  # replaced by the live display: (old, new)

    def draw(self, rows: list[Row]) -> None:
        from rich.live import Live

        if self._live is None:
            before = sys.stdout, sys.stderr
            live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),  # a redirected stream stays as it is
                redirect_stderr=sys.stderr.isatty(),
                vertical_overflow="visible",
            )
            live.start()
            self._console.show_cursor(True)
            self._live = live
            self._streams = list(zip(before, (sys.stdout, sys.stderr), strict=True))
            for old, new in self._streams:
                _move_handlers(old, new)
        self._live.update(_Bars(rows), refresh=True)

    def end(self, *, leave: bool) -> None:
        if self._live is None:
            return
        live, self._live = self._live, None
        live.transient = not leave
        try:
            for _, new in self._streams:
                new.flush()  # an unfinished line
        finally:
            for old, new in self._streams:
                _move_handlers(new, old)
            live.stop()


def _move_handlers(old: Any, new: Any) -> None:
    """Make log handlers that hold the stream ``old`` write to ``new``."""
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    handlers = {h for log in loggers if isinstance(log, logging.Logger) for h in log.handlers}
    for handler in handlers:
        # Other handlers look up sys.stderr at each record, such as logging's own, which dill
        # installs.
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is old:
            handler.setStream(new)


class _Notebook:
    """A notebook output that is replaced; it needs no widgets and is saved in the notebook."""

    def __init__(self) -> None:
        self._output = CellOutput()

    def draw(self, rows: list[Row]) -> None:
        from rich.console import Console

        console = Console(
            file=io.StringIO(),
            record=True,
            width=_NOTEBOOK_COLUMNS,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
        )
        console.print(_Bars(rows))
        text = console.export_text(clear=False)
        html = console.export_html(
            inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>'
        )
        self._output.show({"text/plain": text, "text/html": html})

    def end(self, *, leave: bool) -> None:
        if not leave:
            self._output.show({"text/plain": "", "text/html": ""})
        self._output = CellOutput()


class RichProgressBar(ProgressBar):
    """Show the same progress as :class:`ProgressBar`, drawn with the package rich.

    Differences: colours; metrics that do not fit beside the bar have their own lines; printed and
    logged text appears above the bars; the clock of an epoch is paused during validations; and a
    notebook needs no widgets.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[RichProgressBar()])

    Args:
        refresh_rate: The maximum number of redraws per second; 0 shows nothing.

    Raises:
        ValueError: If ``refresh_rate`` is negative.
        TypeError: If it is not a number.
        ImportError: If rich is not installed.
    """

    @suggest_arguments(
        leave="nothing: the last state of each bar stays",
        theme="nothing: rich takes the terminal's colours",
        console_kwargs="nothing: it writes to stderr",
    )
    def __init__(self, refresh_rate: float = 10.0) -> None:
        super().__init__(refresh_rate)
        if find_spec("rich") is None:
            raise ImportError(
                "RichProgressBar needs the package rich. Install it with "
                "pip install 'cadence-trainer[rich]', or use ProgressBar."
            )

    def choose_view(self) -> OpenView | None:
        """Return the function that opens a bar in this terminal or notebook; None if impossible."""
        from rich.console import Console

        if in_notebook():
            return Board(_Notebook()).open
        if sys.stderr is None:  # for example in a service, or if it was closed
            return None
        console = Console(
            file=sys.stderr,
            force_terminal=sys.stderr.isatty(),  # ignore environment variables
            force_interactive=True,
            force_jupyter=False,
            markup=False,
            emoji=False,
            highlight=False,
        )
        if not console.is_terminal or console.is_dumb_terminal:
            return Board(Lines()).open
        return Board(_Terminal(console)).open
