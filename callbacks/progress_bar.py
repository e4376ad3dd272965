"""Show the progress of a run on the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from callbacks.base import Callback
from callbacks.fit_summary import begin_line, end_lines
from callbacks.progress_board import Board, Lines
from trainer.checks import check_numbers
from trainer.errors import module_logger, printable

if TYPE_CHECKING:
    from tqdm import tqdm

    from trainer import Trainer, TrainModule

logger = module_logger(__name__)


class _FittingBar:
    """Makes a tqdm bar fit its line by dropping first the bar, then the times."""

    _SHORTER = (
        "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        "{desc}: {n_fmt}/{total_fmt}{postfix}",
    )

    @classmethod
    def format_meter(
        cls, n: float, total: float | None, elapsed: float, ncols: int | None = None, **options: Any
    ) -> str:
        """Return the text of a bar for a line of `ncols` columns."""
        from tqdm import tqdm

        meter: Any = tqdm.format_meter  # its total may be None
        if ncols is None:
            return str(meter(n, total, elapsed, **options))
        for bar_format in (None, *cls._SHORTER):
            options["bar_format"] = bar_format
            if len(meter(n, total, elapsed, **options)) <= ncols:  # with a bar of ten columns
                break
        return str(meter(n, total, elapsed, ncols=ncols, **options))


class View(Protocol):
    """One bar on the screen; :class:`ProgressBar` decides its content and when to update it."""

    def show(self, done: int, text: str) -> None:
        """Show how many batches are done, and the metrics."""

    def close(self, done: int) -> None:
        """Close the bar, after this many batches."""


# Arguments: the bar's name, the number of batches if known, and whether it stays when closed.
OpenView = Callable[[str, int | None, bool], View]


def in_notebook() -> bool:
    """Return whether output goes to the cells of a notebook."""
    # do not import IPython: in a notebook it is already imported
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    return shell is not None and "IPKernelApp" in shell.config


class CellOutput:
    """An output of a notebook cell whose content is replaced at each call of `show`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: Any) -> None:
        """Show a widget, or a dict of texts by MIME type."""
        from IPython.display import display

        raw = isinstance(content, dict)
        if self._handle is None:
            self._handle = display(content, raw=raw, display_id=True)
        else:
            self._handle.update(content, raw=raw)


def _choose_tqdm(*, notebook: bool) -> tuple[type[tqdm[Any]], dict[str, Any]]:
    """Return the bar class to use here, and arguments specific to it.

    ``tqdm.auto`` makes the same choice, with warnings in a notebook.
    """
    from tqdm import tqdm

    # Disable tqdm's monitor thread, which redraws unchanged bars and outlives them.
    ours: dict[str, Any] = {"monitor_interval": 0}
    if not notebook:
        return type("Bar", (_FittingBar, tqdm), ours), {}
    from tqdm import notebook as widgets

    # `_CellView` displays the bar
    if getattr(widgets, "IProgress", None) is not None:  # ipywidgets is installed
        return type("Bar", (widgets.tqdm_notebook,), ours), {"display": False}
    return type("Bar", (tqdm,), ours | {"display": lambda *_: None}), {"gui": True}


class _TqdmView:
    """A tqdm bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._fresh = True

    def show(self, done: int, text: str) -> None:
        if self._fresh and done > 1:
            # in a resumed epoch, batches of the earlier run must not count for the speed
            self._bar.initial = self._bar.n = self._bar.last_print_n = done - 1
        self._fresh = False
        self._bar.set_postfix_str(text, refresh=False)
        if not self._bar.update(done - self._bar.n):
            self._bar.refresh()

    def close(self, done: int) -> None:
        self._bar.n = max(self._bar.n, done)
        self._bar.close()


class _CellView(_TqdmView):
    """A tqdm bar in a notebook: a widget if ipywidgets is installed, else text.

    A finished bar becomes text, because a widget lives in the kernel: a notebook that is reopened
    or shown elsewhere has an error in its place. The cell's standard error is not used, because two
    alternating bars would add a new line at each change.
    """

    def __init__(self, bar: tqdm[Any]) -> None:
        super().__init__(bar)
        self._widget = getattr(bar, "container", None)
        self._output = CellOutput()
        if self._widget is None:
            self._write()
        else:
            self._output.show(self._widget)

    def show(self, done: int, text: str) -> None:
        super().show(done, text)
        if self._widget is None:
            self._write()

    def close(self, done: int) -> None:
        super().close(done)
        self._write(gone=not self._bar.leave)

    def _write(self, *, gone: bool = False) -> None:
        # regardless of the terminal in which the server runs
        text = self._bar.format_meter(**{**self._bar.format_dict, "ncols": None, "ascii": False})
        self._output.show({"text/plain": "" if gone else text})


def _text(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _NoBar:
    """A bar that shows nothing."""

    done = 0

    def advance(self, done: int) -> None:
        pass

    def draw(self, *, last: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar(_NoBar):
    """One bar, redrawn at most once every ``seconds``; the metrics are read only then.

    If the bar can no longer be shown, ``on_error`` is called with the error: a closed terminal must
    not end the run.
    """

    def __init__(
        self,
        view: View,
        values: Callable[..., dict[str, Any]],
        seconds: float,
        on_error: Callable[[OSError], None],
    ) -> None:
        self._view = view
        self._values = values
        self._seconds = seconds
        self._on_error = on_error
        self._next_draw = 0.0

    def advance(self, done: int) -> None:
        self.done = done
        if monotonic() >= self._next_draw:
            self.draw()

    def draw(self, *, last: bool = False) -> None:
        if not self.done:
            return
        values = self._values(wait=last)
        text = printable(", ".join(f"{name}={_text(value)}" for name, value in values.items()))
        try:
            self._view.show(self.done, text)
        except OSError as error:
            self._on_error(error)
        self._next_draw = monotonic() + self._seconds

    def close(self) -> None:
        # do not read metrics: after an error their device may not respond
        try:
            self._view.close(self.done)
        except OSError as error:
            self._on_error(error)


class ProgressBar(Callback):
    """Show a progress bar for each epoch, with metrics, speed and remaining time.

    A line before the first epoch names the model, the devices, the precision and the folder; lines
    after the last epoch name the checkpoints and how to continue. Each validation, test and
    prediction has its own bar. It shows the values of `get_metrics`. The bar of a finished epoch
    stays on the screen; the bar of a validation inside an epoch is removed. Only the main process
    shows bars. In a notebook a finished bar becomes text. If standard error is not a terminal (a
    log file, CI), each finished bar that stays is a line of plain text, and an unfinished bar
    prints a line every minute.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[ProgressBar(refresh_rate=1)])

    Args:
        refresh_rate: The maximum number of redraws per second; 0 shows nothing.

    Raises:
        ValueError: If ``refresh_rate`` is negative.
        TypeError: If it is not a number.
    """

    def __init__(self, refresh_rate: float = 10.0) -> None:
        check_numbers(0, refresh_rate=refresh_rate)
        self.refresh_rate = refresh_rate
        self._open_view: OpenView | None = None
        self._idle = False  # whether the fit has begun no epoch: perhaps nothing is left to do
        self._wait = False  # whether the next text is a bar's last, which shows up-to-date values
        self._train = _NoBar()
        self._evaluation = _NoBar()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Choose the kind of bar, once."""
        show = self.refresh_rate > 0 and trainer.accelerator.is_main_process
        self._open_view = self.choose_view() if show else None

    def choose_view(self) -> OpenView | None:
        """Return the function that opens a bar in this terminal or notebook; None if impossible.

        Override it to draw bars differently: return a function that takes a bar's name, its number
        of batches (None if unknown) and whether the finished bar stays on the screen, and returns
        an object with ``show(done, text)`` and ``close(done)``.
        """
        notebook = in_notebook()
        if not notebook and sys.stderr is None:  # in a service, or if it was closed
            return None
        if not notebook and not sys.stderr.isatty():
            return Board(Lines()).open
        kind, options = _choose_tqdm(notebook=notebook)
        view = _CellView if notebook else _TqdmView
        return lambda name, total, leave: view(
            kind(
                total=total,
                desc=name,
                leave=leave,
                unit="batch",
                dynamic_ncols=True,
                mininterval=0,
                miniters=1,
                **options,
            )
        )

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the values that the bar shows: those logged with ``prog_bar=True``.

        It is called when a bar is redrawn, only on the main process. Override it to show other
        values: floats are shown with four digits, everything else as its ``str``.
        """
        return dict(trainer.progress_values(wait=self._wait))

    def _print(self, text: Callable[[], str]) -> None:
        if self._open_view is not None:
            try:
                print(text(), file=None if in_notebook() else sys.stderr, flush=True)
            except (OSError, ValueError) as error:  # closed, or a name that it cannot encode
                self._stop_drawing(OSError(str(error)))

    def _open(
        self, trainer: Trainer, module: TrainModule, name: str, total: int | None, *, leave: bool
    ) -> _NoBar:
        if self._open_view is None:
            return _NoBar()
        try:
            view = self._open_view(name, total, leave)
        except OSError as error:
            self._stop_drawing(error)
            return _NoBar()

        def values(*, wait: bool) -> dict[str, Any]:
            self._wait = wait
            # the bar of an evaluation inside an epoch does not show the training metrics
            return self.get_metrics(trainer, module) if leave else {}

        return _Bar(view, values, 1 / self.refresh_rate, self._stop_drawing)

    def _open_evaluation(
        self, trainer: Trainer, module: TrainModule, name: str, *, leave: bool
    ) -> None:
        self._train.draw()  # show its current position, since it stops meanwhile
        totals = trainer.num_eval_batches
        sized = [total for total in totals if total is not None]
        total = sum(sized) if len(sized) == len(totals) else None
        self._evaluation = self._open(trainer, module, name, total, leave=leave)

    def _close(self) -> None:
        """Close the open bars, innermost first."""
        bars = (self._evaluation, self._train)
        self._evaluation = self._train = _NoBar()
        for bar in bars:
            bar.close()

    def _stop_drawing(self, error: OSError) -> None:
        """Show no bars from now on."""
        shown, self._open_view = self._open_view, None
        self._close()
        if shown is not None:
            logger.warning("The progress bar has stopped: %r.", error)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Open the bar of an epoch inside which the run resumes."""
        self._idle = True
        progress = trainer.progress
        if progress.batch not in (0, progress.batches):
            self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Print the first line, and open the bar of the epoch."""
        self._close()
        if self._idle:
            self._print(lambda: begin_line(trainer, module))
        self._idle = False
        of = "" if trainer.max_epochs is None else f"/{trainer.max_epochs}"
        name = f"epoch {trainer.current_epoch + 1}{of}"
        self._train = self._open(trainer, module, name, trainer.num_training_batches, leave=True)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar of the epoch."""
        self._train.advance(batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Close the bar of the epoch, which stays on the screen."""
        self._train.draw(last=True)
        self._close()

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Print the checkpoints and how to continue, unless nothing was left to do."""
        if not self._idle:
            self._print(lambda: end_lines(trainer))

    on_train_end = on_train_epoch_end  # the epoch may not be finished
    on_preemption = on_train_epoch_end  # so that messages of a save begin on a new line

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Close the bars, so that the error begins on a new line."""
        self._close()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Close all open bars."""
        self._close()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Open the bar of the validation, below the epoch's if there is one."""
        if trainer.sanity_checking:
            self._open_evaluation(trainer, module, "sanity check", leave=False)
        else:
            inside = isinstance(self._train, _Bar)
            self._open_evaluation(trainer, module, "validate", leave=not inside)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Open the bar of the test."""
        self._open_evaluation(trainer, module, "test", leave=True)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Open the bar of the prediction."""
        self._open_evaluation(trainer, module, "predict", leave=True)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Advance the bar; it counts the batches of all loaders."""
        self._evaluation.advance(self._evaluation.done + 1)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Close the bar."""
        bar, self._evaluation = self._evaluation, _NoBar()
        bar.draw(last=True)
        bar.close()

    on_test_end = on_validation_end
    on_predict_end = on_validation_end
