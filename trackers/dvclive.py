"""The tracker for DVCLive."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

from trackers.media import flatten, plain, to_pil
from trackers.registry import register_tracker
from trackers.service import MediaTracker

_SYNC = 10.0  # seconds between reports; for each, DVCLive reads all its files


@register_tracker
class DVCLiveTracker(MediaTracker):
    """Writes DVCLive's files, and a DVC experiment if the repository uses Git and DVC.

    The files are in ``dvclive`` in the folder of the run's logs, with their own ``dvc.yaml``. A run
    that resumes continues them, without values that a killed run logged after its last checkpoint.
    Any other run of the `Trainer` replaces them, like DVCLive itself.

    Example::

        trainer = Trainer(max_epochs=10, log_with=DVCLiveTracker(name="baseline", report="html"))

    Args:
        run_name: has no effect, since DVC names experiments itself.
        live: a `dvclive.Live` of the script, which stays open at the end.
        name: the name of the experiment.
        **kwargs: for `dvclive.Live`, for example `dir`, `save_dvc_exp`, `report`.

    Raises:
        ImportError: dvclive is not installed.
    """

    name = "dvclive"
    requires_package = "dvclive"

    def __init__(
        self, run_name: str = "", live: Any = None, *, name: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(run_name, exp_name=name, **kwargs)
        self._live = live
        self._resumes = False
        self._reported = 0.0  # time of the latest report
        self._labels: dict[str, str] = {}  # labels of numbers and texts, by name

    @property
    def live(self) -> Any:
        """The `dvclive.Live`, under the name that accelerate's tracker uses."""
        return self.tracker

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Continue the files in the folder."""
        super().resume(run_id, step)
        self._resumes = True

    def _find_open(self) -> Any:
        return self._live

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        import dvclive

        options = dict(self.init_kwargs)
        folder = self._folder("dvclive")
        if folder is not None and "dir" not in options:
            os.makedirs(folder, exist_ok=True)
            options = {"dir": folder, "dvcyaml": os.path.join(folder, "dvc.yaml"), **options}
        options.setdefault("resume", self._resumes)
        live = dvclive.Live(**options)
        if options["resume"] and step is not None:
            _cut(Path(live.plots_dir, "metrics"), step)
        return live

    def _id_of(self, run: Any) -> str:
        return str(run.dir)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration in ``params.yaml``."""
        self.tracker.log_params(plain(values))

    def _at(self, step: int | None) -> Any:
        """Return the SDK's object, set to a step."""
        if step is not None:
            self.tracker.step = step
        return self.tracker

    def _label(self, name: str) -> str:
        """Return the name in the summary, where "loss" and "loss/box" cannot both be numbers."""
        label, taken = _inside(name), () if name in self._labels else flatten(self.tracker.summary)
        if any(label.startswith(f"{other}/") for other in taken):
            label = label.replace("/", ".")
        elif any(other.startswith(f"{label}/") for other in taken):
            label = f"{label}/value"
        return self._labels.setdefault(name, label)

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        live = self._at(step)
        for name, number in numbers.items():
            live.log_metric(self._label(name), number, **kwargs)
        for name, text in texts.items():
            live.log_metric(self._label(name), text, plot=False)
        live.make_summary()
        if monotonic() - self._reported > _SYNC:
            live.sync()
            self._reported = monotonic()

    def _log_image(self, name: str, picture: Any, step: int | None, **kwargs: Any) -> None:
        label = _inside(name)
        file = f"{label}.png" if step is None else f"{label}/{step}.png"
        self._at(step).log_image(file, to_pil(picture), **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        data = [dict(zip(columns, plain(row), strict=True)) for row in rows]
        axes = {"x": columns[0], "y": columns[1:] or columns}
        self._at(step).log_plot(_inside(name), data, **{**axes, **kwargs})

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        self._log_scalars({}, {name: text}, step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        options = {"type": kind, "name": name, "copy": True, **kwargs}
        self._at(step).log_artifact(path, **options)

    def _end(self, run: Any) -> None:
        if self.status != "running":
            run.summary["status"] = self.status
        run.end()


def _inside(name: str) -> str:
    """Return a name as the path of a file inside DVCLive's folder."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", "..")) or "_"


def _cut(folder: Path, step: int) -> None:
    """Drop later steps, and lines cut off by a kill, from DVCLive's tables of metrics."""
    for file in folder.rglob("*.tsv"):
        rows = [row for row in file.read_text().splitlines(keepends=True) if row.endswith("\n")]
        if not rows:  # DVCLive writes no header to an existing file
            file.unlink()
            continue
        at = rows[0].split("\t").index("step")
        kept = [row for row in rows[1:] if int(row.split("\t")[at]) <= step]
        file.write_text("".join([rows[0], *kept]))
