"""The tracker for TensorBoard, based on torch's ``SummaryWriter``."""

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from trackers.base import ServiceTracker
from trackers.code import git_commit
from trackers.jsonl import unused_name
from trackers.media import (
    finite_values,
    flatten,
    image_bytes,
    pixels,
    plain,
    render_figure,
    scalars_and_texts,
    table_of,
)
from trackers.registry import register_tracker


def _markdown(columns: list[Any], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = str(value)
    return text.replace("|", "\\|").replace("\r\n", "\n").replace("\n", "<br>")


def _images_by_name(name: str, value: Any) -> dict[str, Any]:
    """Return the images to write, by name; a batch of images of equal size is one entry."""
    import numpy as np

    images = [np.atleast_3d(image) for image in pixels(name, value)]
    if len(images) == 1:
        return {name: images[0]}
    if len({image.shape for image in images}) == 1 and images[0].shape[-1] != 4:
        return {name: np.stack(images)}
    return {f"{name}/{number}": image for number, image in enumerate(images)}


def _quarantine(folder: Path) -> None:
    """Rename a folder's event files: TensorBoard reads all files with "tfevents" in their names."""
    for path in sorted(folder.glob("*tfevents*")):
        renamed = path.with_name(path.name.replace("tfevents", "earlier"))
        path.rename(unused_name(renamed) if renamed.exists() else renamed)


@register_tracker
class TensorBoardTracker(ServiceTracker):
    """Writes event files for TensorBoard to `logging_dir/run_name`.

    A fit of the `Trainer` that does not resume renames existing event files
    (``events.out.earlier.…``), unless a `purge_step` is given. Other starts add to them.

    Example::

        trainer = Trainer(max_epochs=10, log_with=TensorBoardTracker("digits", "runs"))

    Args:
        run_name: the name of the run and of its folder.
        logging_dir: the folder of all runs.
        purge_step: for a run that resumes, the first step that it logs again. TensorBoard hides
            values that were logged earlier for this step and later ones.
        **writer_options: for `torch.utils.tensorboard.SummaryWriter`; `max_queue` and `flush_secs`
            have no effect, since each event is written at once.

    Raises:
        ImportError: tensorboard is not installed.
    """

    name = "tensorboard"
    requires_logging_directory = True
    requires_package = "tensorboard"
    # TensorBoard's packages have circular imports, so two threads that import them may deadlock.
    imports_early = "trackers.event_file"

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        *,
        purge_step: int | None = None,
        **writer_options: Any,
    ) -> None:
        # Absolute, because a new file may be created after the working directory has changed.
        self.log_dir = Path(os.path.expanduser(logging_dir)).absolute() / run_name
        self.writer_options = {"purge_step": purge_step, **writer_options}
        self._purge_step: int | None = None
        self._renames_existing = False
        self._file: Any = None  # set with the writer
        self._success: Any = None
        self._commit = git_commit(".")  # not on the tracker's thread, see there

    @property
    def writer(self) -> Any:
        """The `SummaryWriter`, under the name that accelerate's tracker uses."""
        return self.tracker

    def resume(self, run_id: str | None, step: int | None) -> None:  # noqa: ARG002  # an interface
        """Hide values logged after `step`, unless the arguments give a `purge_step`."""
        if step is not None and self.writer_options["purge_step"] is None:
            self._purge_step = step + 1

    def begin_anew(self) -> None:
        """Let `start` rename existing event files, unless a `purge_step` is given."""
        self._renames_existing = self.writer_options["purge_step"] is None

    def start(self) -> None:
        """Create the folder, the writer and an event file."""
        from trackers.event_file import EventFile, Writer

        anew, self._renames_existing = self._renames_existing, False
        if anew:
            _quarantine(self.log_dir)
        options = dict(self.writer_options)
        if self._purge_step is not None:
            options["purge_step"] = self._purge_step
        suffix = options.get("filename_suffix", "")
        file = EventFile(self.log_dir, suffix=suffix, purge_step=options["purge_step"])
        writer = Writer(file, **options)
        file.begin()
        self._opened, self._file = writer, file
        self._success = self._purge_step = None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, and as YAML text in "configuration".

        If the working folder is in a git repository, the commit is stored as the text "code".

        Args:
            values: names and values. In the table of hyperparameters, nested names are joined by
                dots, and values that are not numbers are stored as their `str`.
        """
        import yaml
        from torch.utils.tensorboard.summary import hparams

        writer, values = self.tracker, plain(values)
        # The writer's add_hparams would open a separate run in a folder named after the time. The
        # experiment summary is left out, because TensorBoard would use one run's summary for all
        # runs and show no metrics. Without it, TensorBoard finds the names itself.
        table = flatten(values, ".")
        shown = {k: v if type(v) in (int, float) else str(v) for k, v in table.items()}
        _, begun, self._success = hparams(shown, {})
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        writer._get_file_writer().add_summary(begun)
        writer.add_text("configuration", f"```yaml\n{text}```")
        if self._commit is not None:
            writer.add_text("code", self._commit)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, texts as texts, and a dict as scalars named "outer/inner".

        Args:
            values: names, with numbers, one-element tensors or arrays, texts, or dicts of these.
            step: the number of optimizer updates so far.
            **kwargs: for `add_scalar` and `add_text`, for example `walltime` in seconds since 1970.

        Raises:
            TypeError: a value has another type. The other values are recorded.
            OSError: the disk failed.
        """
        from trackers.event_file import scalars

        writer = self.tracker
        numbers, texts, error = scalars_and_texts(values)
        for name, text in texts.items():
            writer.add_text(name, text, global_step=step, **kwargs)
        if kwargs.keys() <= {"walltime"} and numbers:  # in one event
            writer._get_file_writer().add_summary(scalars(numbers), step, **kwargs)
        else:
            for name, number in numbers.items():
                writer.add_scalar(name, number, global_step=step, **kwargs)
        if error is not None:
            raise error

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images; a batch as one picture, or as "name/0", "name/1" if sizes differ.

        Args:
            values: names and tensors or arrays of shape (height, width), (channels, height, width)
                or (batch, channels, height, width), or the same with the channels last: floats in
                [0, 1], integers up to 255 or boolean masks; or lists of these.
            step: the number of optimizer updates so far.
            **kwargs: for `add_image` or `add_images`, for example `dataformats="HWC"`.

        Raises:
            ValueError: a shape is not that of an image.
        """
        writer, dataformats = self.tracker, kwargs.get("dataformats")
        for name, value in values.items():
            # Always uint8: torch's writer multiplies other integers by 255.
            shown = {name: image_bytes(value)} if dataformats else _images_by_name(name, value)
            for label, images in shown.items():
                layout = dataformats or ("HWC" if images.ndim == 3 else "NHWC")
                add = writer.add_images if "N" in layout else writer.add_image
                add(label, images, global_step=step, **{**kwargs, "dataformats": layout})

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table in Markdown, see `GeneralTracker.log_table`; `kwargs` for `add_text`."""
        text = _markdown(*table_of(table_name, columns, data, dataframe))
        self.tracker.add_text(table_name, text, global_step=step, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record histograms, see `GeneralTracker.log_histogram`; `kwargs` for `add_histogram`."""
        writer = self.tracker
        for name, value in values.items():
            writer.add_histogram(name, finite_values(name, value), global_step=step, **kwargs)

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record figures as images, see `GeneralTracker.log_figure`; `kwargs` for `add_image`."""
        writer, options = self.tracker, {"dataformats": "HWC", **kwargs}
        for name, value in values.items():
            writer.add_image(name, render_figure(value), global_step=step, **options)

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Record texts, which TensorBoard reads as Markdown; `kwargs` for `add_text`."""
        writer = self.tracker
        for name, value in values.items():
            writer.add_text(name, value, global_step=step, **kwargs)

    def log_graph(self, model: Any, example: Any) -> None:
        """Record the graph of a model, which is traced in the calling thread.

        Args:
            model: a `torch.nn.Module`, in the mode to be shown. Batch norms in training mode update
                their statistics with the example.
            example: its argument, or a tuple of them.

        Raises:
            Exception: tracing failed; for example, a model that branches on values cannot be
                traced.
        """
        with warnings.catch_warnings():
            # torch's writer can only trace a graph.
            warnings.filterwarnings("ignore", r"`torch\.jit\.trace")
            self.tracker.add_graph(model, example)

    def finish(self) -> None:
        """Write pending events and `status` as a text, and close the files."""
        if self._opened is None:
            return
        try:
            with contextlib.closing(self._file) as file, contextlib.closing(self.tracker):
                if file.exists:  # do not create a new file now
                    self._write_end(self.tracker)
        finally:  # even if the disk fails
            self._opened = self._file = None

    def _write_end(self, writer: Any) -> None:
        if self.status != "running":  # "running": it is unknown how the run ended
            writer.add_text("status", self.status)
        # TensorBoard reads only the first end marker, so write none for a run that may continue.
        if self.status == "finished" and self._success is not None:
            writer._get_file_writer().add_summary(self._success)
