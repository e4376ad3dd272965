"""When a run is saved, and which of its checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from callbacks.base import Callback
from callbacks.interval import Interval, Progress
from callbacks.monitor import Mode, Monitor

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


def _name_at(step: int) -> str:
    return f"step-{step:08d}"


class ModelCheckpoint(Callback):
    """Save when due; keep the best, the last, and nothing else that it wrote.

    It acts in ``on_boundary`` and decides only; the Trainer writes. A checkpoint is ranked if the
    metric was reduced at the very update that it holds (let ``every`` be a multiple of
    ``val_every``); otherwise, and where the value is not finite, it is saved as the last one only.
    What a save displaces is removed after the save is committed. The final update is saved by the
    same rules even where it is not due.

    Args:
        monitor: Name of the metric that ranks the checkpoints. None ranks the newest first.
        mode: ``min`` if smaller is better, ``max`` if larger is.
        every: How often to save, an interval such as ``"1 epoch"``, ``500`` or ``"30 minutes"``.
        save_top_k: How many of the best to keep; -1 keeps every checkpoint, 0 none for its rank.
        save_last: Save whenever due, whatever the rank, and keep the newest.
        on_preemption: Save when a signal ends the run. Such a checkpoint is not ranked: the run
            that goes on from it ranks the update itself, and removes it if it would not be kept.
        dirpath: Folder of the checkpoints, by default the Trainer's. Two instances in one run need
            two folders.

    Attributes:
        directory: The folder in use, None before ``fit``.

    Raises:
        ValueError: If an argument makes no sense, if two instances share a folder, and during
            ``fit`` if the metric is never logged.
    """

    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        *,
        monitor: str | None = None,
        mode: Mode = "min",
        every: Interval | str | int = "1 epoch",
        save_top_k: int = 1,
        save_last: bool = True,
        on_preemption: bool = True,
        dirpath: str | Path | None = None,
    ) -> None:
        if save_top_k < -1 or save_top_k != int(save_top_k):
            raise ValueError(f"save_top_k must be -1 (all), 0 or a count, got {save_top_k!r}.")
        if save_top_k == 0 and not save_last:
            raise ValueError(
                "save_top_k=0 with save_last=False would never save. "
                "To train without checkpoints use Trainer(checkpointing=False)."
            )
        ranking = Monitor("step" if monitor is None else monitor, mode)
        self.monitor = None if monitor is None else ranking
        self.every = Interval.parse(every)
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.saves_on_preemption = on_preemption
        self.dirpath = dirpath
        self.directory: Path | None = None
        # All names are relative to the directory, so that a project may move.
        self._scores: dict[str, float] = {}  # the k best, best first
        self._last: str | None = None
        self._displaced: list[str] = []  # not wanted any more, but perhaps still there
        self._handled: Progress | None = None  # the last boundary that was looked at
        self._restored = False

    @property
    def best_k_models(self) -> dict[Path, float]:
        """The ranked checkpoints that are kept, best first, with their scores (or steps)."""
        return {self._path(name): score for name, score in self._scores.items()}

    @property
    def best_model_path(self) -> Path | None:
        """The best checkpoint; without ``monitor`` the newest."""
        return next(iter(self.best_k_models), None)

    @property
    def best_model_score(self) -> float | None:
        """The monitored value of the best checkpoint; None without ``monitor``."""
        return next(iter(self._scores.values()), None) if self.monitor else None

    @property
    def last_model_path(self) -> Path | None:
        """The newest checkpoint."""
        return None if self._last is None else self._path(self._last)

    @property
    def state_key(self) -> str:
        """The class with what tells two of a run apart."""
        ranked = f"{self.monitor.name}, {self.monitor.mode}" if self.monitor else "newest"
        return f"{super().state_key}({ranked}, every {self.every})"

    def state_dict(self) -> dict[str, Any]:
        """The decisions so far, with names relative to the directory."""
        # Only the unit that counts: the clock of other runs differs, their decisions must not.
        unit = self.every.unit
        return {
            "scores": dict(self._scores),
            "last": self._last,
            "displaced": list(self._displaced),
            "handled": {unit: getattr(self._handled, unit)} if self._handled else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the decisions in ``state``."""
        self._scores = self._rank(state["scores"])
        self._last = state["last"]
        self._displaced = list(state["displaced"])
        handled = state["handled"] or {}
        same_unit = self.every.unit in handled
        self._handled = Progress(**handled) if same_unit else None
        self._restored = True

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Settle the folder."""
        if stage != "fit":
            return
        self.directory = Path(self.dirpath or trainer.checkpoint_dir)
        for other in trainer.callbacks:
            if (
                isinstance(other, ModelCheckpoint)
                and other is not self
                and other.directory == self.directory
            ):
                raise ValueError(
                    f"Two ModelCheckpoints write to {self.directory}, where each would remove what "
                    "the other keeps. Give one of them its own dirpath=..."
                )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Take up the decisions of the run that goes on, or begin anew."""
        if trainer.global_step == 0:
            self._scores, self._last, self._displaced, self._handled = {}, None, [], None
        elif self._restored:
            self._forget_missing(trainer)
            # A run that died between a commit and the removal of what it displaced; but never the
            # checkpoint that this one goes on from.
            self._remove_displaced(trainer, keep=_name_at(trainer.global_step))
        self._restored = False
        self._handled = self._handled or trainer.progress

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Save if due."""
        before, self._handled = self._handled or Progress(), trainer.progress
        score = self._score(trainer)  # also where nothing is due: a wrong name shows early
        if self.every.due(before, self._handled):
            self._save(trainer, score)

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """Save, for the next start alone."""
        if not self.saves_on_preemption or trainer.fast_dev_run:
            return
        name = _name_at(trainer.global_step)
        if name != self._last and name not in self._scores:
            self._displaced = sorted({*self._displaced, name})
        path = trainer.save_checkpoint(self._path(name))
        trainer.accelerator.print(f"Saved to {path}; fit(ckpt_path='auto') goes on from there.")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Save the final update if it was not saved."""
        if trainer.global_step > 0 and self._last != _name_at(trainer.global_step):
            self._save(trainer, self._score(trainer))

    def _path(self, name: str) -> Path:
        if self.directory is None:
            raise RuntimeError("ModelCheckpoint has no directory before fit.")
        return self.directory / name

    def _rank(self, scores: dict[str, float]) -> dict[str, float]:
        """Sorted best first; of equals the older one, which is the one already on disk."""
        by_age = sorted(scores.items())
        falling = self.monitor is None or self.monitor.mode == "max"
        return dict(sorted(by_age, key=lambda entry: entry[1], reverse=falling))

    def _score(self, trainer: Trainer) -> float | None:
        """What ranks a checkpoint of this update; None if it cannot be ranked."""
        if self.monitor is None:
            return float(trainer.global_step)
        value = self.monitor.read(trainer)
        return value if value is not None and math.isfinite(value) else None

    def _save(self, trainer: Trainer, score: float | None) -> None:
        """Save this update if it is worth keeping, then remove what it displaced."""
        name, keep_all = _name_at(trainer.global_step), self.save_top_k == -1
        scores = self._scores
        if score is not None:
            ranked = self._rank(scores | {name: score})
            scores = ranked if keep_all else dict(list(ranked.items())[: self.save_top_k])
        if trainer.fast_dev_run or not (self.save_last or keep_all or name in scores):
            return
        # Decide first: the checkpoint must hold its own decisions, and if the run dies between the
        # commit and the removal, the next one knows what is left to remove.
        if not keep_all:
            ours = {*self._scores, *self._displaced, *([self._last] if self._last else [])}
            self._displaced = sorted(ours - {*scores, name})
        self._scores, self._last = scores, name
        trainer.save_checkpoint(self._path(name))
        self._remove_displaced(trainer)

    def _remove_displaced(self, trainer: Trainer, keep: str | None = None) -> None:
        for displaced in self._displaced:
            if displaced != keep:
                trainer.remove_checkpoint(self._path(displaced))
        self._displaced = [name for name in self._displaced if name == keep]

    def _forget_missing(self, trainer: Trainer) -> None:
        """Forget checkpoints that are not there: the run may go on in another folder.

        A folder counts as missing if any rank lacks it, so that all ranks go on deciding alike.
        """
        names = sorted({*self._scores, *self._displaced, *([self._last] if self._last else [])})
        if not names:
            return
        lacking = torch.tensor([float(not self._path(name).is_dir()) for name in names])
        lacking = trainer.accelerator.reduce(lacking.to(trainer.accelerator.device), "sum")
        missing = {name for name, ranks in zip(names, lacking.tolist(), strict=True) if ranks}
        self._scores = {name: s for name, s in self._scores.items() if name not in missing}
        self._displaced = [name for name in self._displaced if name not in missing]
        self._last = None if self._last in missing else self._last
