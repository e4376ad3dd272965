"""The tracker for SwanLab."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from trackers.media import plain, to_pil
from trackers.registry import register_tracker
from trackers.service import MediaTracker, file_name

_STATES = {"failed": "crashed", "preempted": "aborted"}  # all other statuses are "success"


@register_tracker
class SwanLabTracker(MediaTracker):
    """A run at SwanLab or, with ``mode="offline"``, in a folder on disk.

    A run that resumes continues the same run. Offline, each start of a run has its own folder,
    which ``swanlab sync <folder>`` uploads to the run with its id.

    A run that the script has opened before (``swanlab.init``) is joined, and stays open at the end.

    Example::

        trainer = Trainer(max_epochs=10, log_with=SwanLabTracker("digits", mode="offline"))

    Args:
        run_name: the name of the project.
        **kwargs: for `swanlab.init`, for example `name`, `mode`, `log_dir`, `workspace`, `tags`.

    Raises:
        ImportError: swanlab is not installed.
    """

    name = "swanlab"
    requires_package = "swanlab"

    def _find_open(self) -> Any:
        import swanlab

        return swanlab.get_run() if swanlab.has_run() else None

    def _begin(self, previous: str | None, step: int | None) -> Any:  # noqa: ARG002  # an interface
        import swanlab

        identity = previous or self._choose_id()
        options = {"project": self.run_name, "id": identity, "resume": "allow", **self.init_kwargs}
        folder = self._folder("swanlog")
        if folder is not None and swanlab.Settings().log_dir == Path.cwd() / "swanlog":
            os.makedirs(folder, exist_ok=True)
            options.setdefault("log_dir", folder)
        return swanlab.init(**options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration in the run's `config`."""
        self.tracker.config.update(plain(values))

    def _log_scalars(
        self, numbers: dict[str, float], texts: dict[str, str], step: int | None, **kwargs: Any
    ) -> None:
        import swanlab

        shown = {name: swanlab.Text(text) for name, text in texts.items()}
        self.tracker.log({**numbers, **shown}, step=step, **kwargs)

    def _log_pictures(
        self, name: str, pictures: list[Any], step: int | None, **kwargs: Any
    ) -> None:
        import swanlab

        images = [
            each if isinstance(each, swanlab.Image) else swanlab.Image(to_pil(each))
            for each in pictures
        ]
        self.tracker.log({name: images}, step=step, **kwargs)

    def _log_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        import swanlab

        table = swanlab.echarts.Table()
        table.add(columns, plain(rows))
        self.tracker.log({name: table}, step=step, **kwargs)

    def _log_text(self, name: str, text: str, step: int | None, **kwargs: Any) -> None:
        self._log_scalars({}, {name: text}, step, **kwargs)

    def _log_file(
        self, path: Path, name: str | None, kind: str, step: int | None, **kwargs: Any
    ) -> None:
        label = file_name(name or path.name)
        if kind == "model" and step is not None:
            label = f"{label}/step-{step}"
        # Copied, because SwanLab only links to files that it uploads later.
        base = Path(self.tracker.dir, "copies")
        copy = base / label
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, dirs_exist_ok=True)
        else:
            copy = Path(shutil.copy(path, copy.with_name(copy.name)))
        pattern = f"{copy}/**" if path.is_dir() else copy
        self.tracker.save(pattern, **{"base_path": base, "policy": "now", **kwargs})

    def _end(self, run: Any) -> None:
        state = _STATES.get(self.status, "success")
        run.finish(state=state, error=None if state == "success" else self.status)
