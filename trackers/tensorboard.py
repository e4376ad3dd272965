"""TensorBoard, through torch's own writer."""

import os
from pathlib import Path
from typing import Any

from trackers.base import GeneralTracker, python_number, register_tracker


def _plain(value: Any) -> Any:
    """A nest of dicts, lists and primitive values; everything else as its text."""
    value = python_number(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    # The exact types: YAML's safe writer knows no subclasses.
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """One level of "outer.inner" names, as the table of hyperparameters needs them."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, (bool, int, float)) else str(value)
    return flat


def _markdown(name: str, columns: list[Any] | None, rows: Any) -> str:
    if rows is None:
        raise ValueError(
            f"The table {name!r} is empty: give `data`, a list of rows, or a data frame."
        )
    if columns is None:
        columns = list(range(1, len(rows[0]) + 1)) if rows else []
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"Row {number} of the table {name!r} has {len(row)} cells, but there are "
                f"{len(columns)} columns: {columns}."
            )
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = str(python_number(value))
    return text.replace("|", "\\|").replace("\r\n", "\n").replace("\n", "<br>")


@register_tracker
class TensorBoardTracker(GeneralTracker):
    """Writes event files for TensorBoard to `logging_dir/run_name`.

    Args:
        run_name: the name of the run and of its folder.
        logging_dir: the folder of all runs.
        purge_step: for a run that resumes, the first step that it logs again: TensorBoard hides
            what was logged before at this step and behind it.
        **writer_options: for `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        ImportError: tensorboard is not installed.
    """

    name = "tensorboard"
    requires_logging_directory = True
    requires_package = "tensorboard"

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        *,
        purge_step: int | None = None,
        **writer_options: Any,
    ) -> None:
        self.log_dir = Path(logging_dir) / run_name
        self.writer_options = {"purge_step": purge_step, **writer_options}
        self._writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`.

        Raises:
            RuntimeError: the tracker is not started, or finished.
        """
        if self._writer is None:
            raise RuntimeError(
                f"The TensorBoard run {self.log_dir} is not open: call `start` first."
            )
        return self._writer

    @property
    def writer(self) -> Any:
        """The `SummaryWriter`, by the name that scripts of the documented API use."""
        return self.tracker

    def start(self) -> None:
        """Make the folder and the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.log_dir), **self.writer_options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, and as YAML text in "configuration".

        Args:
            values: names and values. Nested names are joined by dots in the table of
                hyperparameters; what is neither a number nor a truth value is stored as its text.
        """
        import yaml
        from torch.utils.tensorboard.summary import hparams

        values = _plain(values)
        # The writer's own add_hparams opens a run of its own, in a folder named by the time.
        for summary in hparams(_flat(values), {}):
            self.tracker.file_writer.add_summary(summary)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        self.tracker.add_text("configuration", f"```yaml\n{text}```")
        self.tracker.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, texts as texts, and a dict as scalars named "outer/inner".

        Args:
            values: names and numbers, tensors or arrays of one element, texts, or dicts of these.
            step: the number of optimizer updates so far.
            **kwargs: for `add_scalar` and `add_text`, for example `walltime` in seconds since 1970.

        Raises:
            TypeError: a value is none of these. The others are recorded.
        """
        rejected = self._add(values, step, kwargs)
        self.tracker.flush()
        if rejected:
            raise TypeError(
                f"TensorBoard takes numbers, tensors of one element, texts and dicts of these, "
                f"which these values are not: {', '.join(rejected)}. Use log_images for images."
            )

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: names and tensors or arrays of shape (height, width), (channels, height, width)
                or (batch, channels, height, width): floats in [0, 1] or bytes.
            step: the number of optimizer updates so far.
            **kwargs: for `add_image` or `add_images`, for example `dataformats="HWC"`.
        """
        for name, images in values.items():
            add = self.tracker.add_images if images.ndim == 4 else self.tracker.add_image
            layout = {"dataformats": "HW"} if images.ndim == 2 else {}
            add(name, images, global_step=step, **{**layout, **kwargs})
        self.tracker.flush()

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table as a text in Markdown.

        Args:
            table_name: its name.
            columns: the names of the columns; numbers from 1 by default.
            data: the rows, each as long as the others.
            dataframe: of pandas or polars, instead of `columns` and `data`.
            step: the number of optimizer updates so far.
            **kwargs: for `add_text`, for example `walltime` in seconds since 1970.

        Raises:
            ValueError: there is neither `data` nor `dataframe`, or a row is of another length.
        """
        if dataframe is not None:
            columns = list(dataframe.columns)
            rows = dataframe.rows() if hasattr(dataframe, "rows") else dataframe.to_numpy().tolist()
        else:
            rows = data
        text = _markdown(table_name, columns, rows)
        self.tracker.add_text(table_name, text, global_step=step, **kwargs)
        self.tracker.flush()

    def finish(self) -> None:
        """Write what is pending, with `status` as a text, and close the files."""
        if self._writer is not None:
            if self.status != "running":  # nobody says how it ended
                self._writer.add_text("status", self.status)
            self._writer.close()
            self._writer = None

    def _add(self, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> list[str]:
        rejected = []
        for name, value in values.items():
            value = python_number(value)
            if isinstance(value, dict):
                # Not add_scalars, which opens a run of its own for each name.
                inner = {f"{name}/{key}": item for key, item in value.items()}
                rejected += self._add(inner, step, options)
            elif isinstance(value, str):
                self.tracker.add_text(name, value, global_step=step, **options)
            elif isinstance(value, (int, float)):
                self.tracker.add_scalar(name, float(value), global_step=step, **options)
            else:
                rejected.append(f"{name} ({type(value).__name__})")
        return rejected
