"""The tracker for Weights & Biases (wandb)."""

from __future__ import annotations

import html
import os
from datetime import date
from pathlib import Path
from typing import Any

from trackers.media import finite_values, plain
from trackers.registry import register_tracker
from trackers.service import MediaTracker, file_name
from trainer.strict_json import python_number


class Rows:
    """Assigns each record to a row (W&B's ``step``) of a W&B history.

    Rows can only be appended, and W&B drops values for an earlier row. A row's number is the
    record's step, and consecutive records of a step share a row. Values that arrive late, for an
    earlier step, get a separate row at the end, whose ``global_step`` is their step. Later rows are
    shifted by one until a gap in the steps makes up for it.

    Args:
        num_rows: the number of rows that the service already has.
        step: the update from which the run resumes, if any.
        reported_step: the last update that the service reports, if known. The number of rows may be
            larger, since late values also have rows.
        current_row: the row that this program has reached; it may be incomplete.
    """

    def __init__(
        self,
        num_rows: int = 0,
        step: int | None = None,
        reported_step: int | None = None,
        current_row: int = 0,
    ) -> None:
        self._last = max(num_rows - 1, current_row or -1)
        self._step: int | None = None
        # Steps that a killed run logged after its last checkpoint. Its last row may be incomplete.
        end = num_rows - 1 if reported_step is None else min(num_rows - 1, reported_step)
        self._logged_steps = range(0) if step is None else range(step + 1, end)

    def row_of(self, step: int | None, current_row: int = 0) -> int | None:
        """Return the row for a record of a step; None if the service already has it.

        Args:
            step: The step.
            current_row: The row that the run has reached, perhaps by values that the program logged
                itself.
        """
        if step in self._logged_steps:
            return None
        if step is None or step != self._step:
            self._last = max(self._last + 1, step or 0)
            self._step = step
        self._last = max(self._last, current_row)
        return self._last


def _cell(value: Any) -> Any:
    """Return a value for a cell of a W&B table; types that W&B does not support become strings."""
    is_native = hasattr(value, "shape") or isinstance(value, date)
    is_native = is_native or type(value).__module__.partition(".")[0] == "wandb"
    return value if is_native else plain(value)


def _reset_service() -> bool:
    """End W&B's service process, which cannot reuse the id of a run that failed to start.

    Returns:
        Whether the process was ended. It is not ended while it serves another run.
    """
    import wandb

    if wandb.setup().most_recent_active_run is not None:
        return False
    wandb.teardown()
    return True


@register_tracker
class WandBTracker(MediaTracker):
    """A run at Weights & Biases or, with ``mode="offline"``, on disk.

    Every value is recorded with its ``global_step``, which is the horizontal axis of the charts. A
    run that resumes continues the same W&B run, and does not log steps again that W&B already has.
    W&B itself records the version of the code, the output and the machine.

    If the script has a W&B run open, it is joined, and stays open at the end; pass
    `reinit="create_new"` for a separate run.

    Example::

        trainer = Trainer(max_epochs=10, log_with=WandBTracker("digits", tags=["baseline"]))

    Args:
        run_name: the name of the project.
        **kwargs: for `wandb.init`, for example `entity`, `name`, `mode`, `dir`, `tags`, `settings`.

    Raises:
        ImportError: wandb is not installed.
    """

    name = "wandb"
    requires_package = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._start_failed = False  # whether `start` failed before
        self._rows = Rows()

    def start(self) -> None:
        """Begin the run, or continue it."""
        (previous, step), self._previous = self._previous, (None, None)
        self.run_id = previous
        import wandb

        if self._start_failed and not _reset_service():
            self._new_id = None
        options = {"project": self.run_name, **self.init_kwargs}
        settings = wandb.setup().settings.model_fields_set  # set by the environment, for example
        if self.service_dir is not None and "dir" not in options and "root_dir" not in settings:
            os.makedirs(self.service_dir, exist_ok=True)  # otherwise W&B would use another folder
            options["dir"] = self.service_dir
        if previous is not None:
            options = {"id": previous, "resume": "allow", **options}
        elif "run_id" not in settings:
            options.setdefault("id", self._choose_id())
        self.run_id = options.get("id")
        self._start_failed = True
        run: Any
        open_run = wandb.run
        joins = open_run is not None and "reinit" not in settings | options.keys()
        self._opened = run = open_run if joins else wandb.init(**options)
        self._joined = run is open_run  # true with reinit="return_previous" as well
        self.run_id, self._new_id, self._start_failed = run.id, None, False
        reported_step = self._opened.summary.get("global_step")
        self._rows = Rows(
            run.starting_step,
            step,
            reported_step if isinstance(reported_step, int) else None,
            current_row=run.step if self._joined else 0,
        )
        run.define_metric("global_step", hidden=True)
        run.define_metric("*", step_metric="global_step", step_sync=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration in the run's `config`.

        Args:
            values: names and values. Values other than numbers, strings, bools and dicts or lists
                of these are stored as their `str`.
        """
        self.tracker.config.update(plain(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: names and values that `wandb.Run.log` accepts: numbers, texts, wandb objects,
                dicts of these.
            step: the number of optimizer updates so far.
            **kwargs: for `wandb.Run.log`, for example `commit`.
        """
        row = self._rows.row_of(step, self.tracker.step)
        if row is None:
            return
        numbers = {name: python_number(value) for name, value in values.items()}
        if step is not None:
            numbers["global_step"] = step
        self.tracker.log(numbers, step=row, **kwargs)

    def _log_pictures(
        self, name: str, pictures: list[Any], step: int | None, **kwargs: Any
    ) -> None:
        import wandb

        made = [each if isinstance(each, wandb.Image) else wandb.Image(each) for each in pictures]
        self.log({name: made}, step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        import wandb

        headers: list[Any] = [*columns]
        cells = [[_cell(value) for value in row] for row in rows]
        try:
            table = wandb.Table(columns=headers, data=cells)
        except TypeError:  # W&B does not allow a column of mixed types
            table = wandb.Table(columns=headers, data=cells, allow_mixed_types=True)
        self.log({name: table}, step, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as a `wandb.Histogram`, see `GeneralTracker.log_histogram`."""
        import wandb

        histograms = {n: wandb.Histogram(finite_values(n, value)) for n, value in values.items()}
        self.log(histograms, step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        import wandb

        page = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self.log({name: page}, step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        import wandb

        artifact = wandb.Artifact(name or file_name(path.name), type=kind, **kwargs)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        aliases = ["latest", *([] if step is None else [f"step-{step}"])]
        self.tracker.log_artifact(artifact, aliases=aliases)

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record weights or a checkpoint as a version of a model, ``model-<run id>`` by default."""
        super().log_model(path, name or f"model-{self.tracker.id}", step, **kwargs)

    def _end(self, run: Any) -> None:
        if self.status == "preempted":
            run.mark_preempting()  # with a non-zero exit code, W&B then shows it as preempted
        if self.status != "running":
            run.summary["status"] = self.status
        run.finish(exit_code=0 if self.status in ("running", "finished") else 1)
