"""When a run is saved, and which of its checkpoints stay."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from callbacks.base import Callback
from callbacks.interval import Interval, Progress
from callbacks.monitor import Mode, Monitor
from callbacks.on_exception_checkpoint import save_weights_at

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


logger = logging.getLogger(__name__)

# The names that are ranked with their scores, the newest, and those not wanted any more.
_Decisions = tuple[dict[str, float], list[str], list[str]]


def _name_at(step: int) -> str:
    return f"step-{step:08d}"


class ModelCheckpoint(Callback):
    """Save when due; keep the best, the newest, and nothing else that it wrote.

    It acts in ``on_boundary`` and decides only; the Trainer writes. A checkpoint is ranked if the
    metric was reduced at the very update that it holds (let ``every`` be a multiple of
    ``val_every``); otherwise, and where the value is not finite, it is only among the newest. Of
    equal ones the earlier stays. What a save displaces is removed after the save is committed. The
    final update is saved by the same rules even where it is not due.

    Args:
        monitor: Name of the metric that ranks the checkpoints. None ranks the newest first.
        mode: ``min`` if smaller is better, ``max`` if larger is.
        every: When to save, an interval such as ``"1 epoch"``, ``500`` or ``"30 minutes"``.
        save_top_k: How many of the best to keep; -1 keeps every checkpoint, 0 none for its rank.
        save_last: Save whenever due, whatever the rank, and keep so many of the newest; True is 1.
        on_preemption: Save when a signal ends the run. Such a checkpoint is not ranked: the run
            that goes on from it ranks the update itself, and removes it if it would not be kept.
        on_exception: Save the weights of a process that fails, for a look at them, as
            ``exception-<step>-rank-<rank>``. No run goes on from them.
        save_weights_only: Leave out what a run needs to go on; ``ckpt_path="auto"`` and ``"last"``
            pass such checkpoints over, and are an error where there are no others.
        background: Write while the training goes on: the update that saves waits only until the
            state is copied to memory of the host. The checkpoint is there a little later, at the
            latest when the next is due or `fit` ends.
        on_save_error: What a save that fails does, a full disk for example: ``raise`` ends the run,
            ``warn`` tells it in the log and keeps what an earlier save has left.
        dirpath: Folder of the checkpoints, by default the Trainer's. Two instances in one run need
            two folders.

    Attributes:
        directory: The folder in use, None before ``fit``.

    Raises:
        ValueError: If an argument makes no sense, if two instances share a folder, and during
            ``fit`` if the metric is never logged.
    """

    runs_last: ClassVar[bool] = True
    decides_by: ClassVar[tuple[str, ...]] = (  # what all processes must have alike
        "monitor",
        "every",
        "save_top_k",
        "save_last",
        "saves_on_preemption",
        "save_weights_only",
        "background",
        "on_save_error",
    )

    def __init__(
        self,
        *,
        monitor: str | None = None,
        mode: Mode = "min",
        every: Interval | int | str = "1 epoch",
        save_top_k: int = 1,
        save_last: bool | int = True,
        on_preemption: bool = True,
        on_exception: bool = False,
        save_weights_only: bool = False,
        background: bool = True,
        on_save_error: Literal["raise", "warn"] = "raise",
        dirpath: str | Path | None = None,
    ) -> None:
        for name, value in (("save_top_k", save_top_k), ("save_last", save_last)):
            if not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r}; it must be an int.")
        if save_top_k < -1 or save_top_k % 1:
            raise ValueError(f"save_top_k must be -1 (all), 0 or a count, got {save_top_k!r}.")
        if save_last < 0 or save_last % 1:
            raise ValueError(f"save_last must be True, False or a count, got {save_last!r}.")
        if save_top_k == 0 and not save_last:
            raise ValueError(
                "save_top_k=0 with save_last=False would never save. "
                "To train without checkpoints use Trainer(checkpointing=False)."
            )
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"on_save_error must be 'raise' or 'warn', got {on_save_error!r}.")
        ranking = Monitor("step" if monitor is None else monitor, mode)
        self.monitor = None if monitor is None else ranking
        self.every = Interval.parse(every)
        self.save_top_k = int(save_top_k)
        self.save_last = int(save_last)
        self.saves_on_preemption = on_preemption
        self.saves_on_exception = on_exception
        self.save_weights_only = save_weights_only
        self.background = background
        self.on_save_error = on_save_error
        self.dirpath = dirpath
        self.directory: Path | None = None
        # All names are relative to the directory, so that a project may move.
        self._scores: dict[str, float] = {}  # the k best, best first
        self._newest: list[str] = []  # oldest first
        self._displaced: list[str] = []  # not wanted any more, but perhaps still there
        self._before: _Decisions | None = None  # until the latest save is known to have succeeded
        self._saving: Path | None = None  # that save
        self._handled: Progress | None = None  # the last boundary that was looked at
        self._restored = False
        self._training = False

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
        return self._path(self._newest[-1]) if self._newest else None

    @property
    def state_key(self) -> str:
        """The class with what tells two of a run apart; a resumed run may change the rest."""
        ranked = f"{self.monitor.name}, {self.monitor.mode}" if self.monitor else "newest"
        # Not the folder's whole path: a project may move.
        folder = "" if self.dirpath is None else f", in {Path(self.dirpath).name}"
        return f"{super().state_key}({ranked}{folder})"

    def state_dict(self) -> dict[str, Any]:
        """The decisions so far, with names relative to the directory."""
        # Only the unit that counts: the clock of other runs differs, their decisions must not.
        unit = self.every.unit
        return {
            "scores": dict(self._scores),
            "newest": list(self._newest),
            "displaced": list(self._displaced),
            "handled": {unit: getattr(self._handled, unit)} if self._handled else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the decisions in ``state``."""
        self._scores = self._rank(state["scores"])
        self._newest = list(state["newest"])
        self._displaced = list(state["displaced"])
        handled = state["handled"] or {}
        same_unit = self.every.unit in handled
        self._handled = Progress(**handled) if same_unit else None
        self._restored = True

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Settle the folder."""
        if stage != "fit":
            return
        self.directory = Path(self.dirpath or trainer.checkpoint_dir).expanduser()
        for other in trainer.callbacks:
            if (
                isinstance(other, ModelCheckpoint)
                and other is not self
                and other.directory is not None
                and other.directory.resolve() == self.directory.resolve()
            ):
                raise ValueError(
                    f"Two ModelCheckpoints write to {self.directory}, where each would remove what "
                    "the other keeps. Give one of them its own dirpath=..."
                )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Take up the decisions of the run that goes on, or begin anew."""
        if trainer.batches_seen == 0 or not self._restored:
            self._scores, self._newest, self._displaced, self._handled = {}, [], [], None
        else:
            here = _name_at(trainer.global_step)
            if here not in self._newest and here not in self._scores:
                # Saved at a signal, behind the save of another callback that is gone on from.
                self._displaced = sorted({*self._displaced, here})
            self._forget_missing(trainer)
            # A run that died between a commit and the removal of what it displaced; but never the
            # checkpoint that this one goes on from.
            for displaced in self._displaced:
                if displaced != here:
                    trainer.remove_checkpoint(self._path(displaced))
            self._displaced = [name for name in self._displaced if name == here]
        self._restored = False
        self._before = None
        self._training = True
        if self.on_save_error == "raise" and not trainer.fast_dev_run:
            assert self.directory is not None  # since `setup`
            trainer.require_space(self.directory)
        self._handled = self._handled or trainer.progress

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Save if due."""
        before, self._handled = self._handled or Progress(), trainer.progress
        if self.monitor is not None:  # also where nothing is due: a wrong name shows early
            self.monitor.read(trainer)
        if self.every.due(before, self._handled):
            self._save(trainer, self._score(trainer))

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """Save, for the next start alone."""
        self._settle(trainer)
        if not self.saves_on_preemption or self.save_weights_only or trainer.fast_dev_run:
            return
        name = _name_at(trainer.global_step)
        if name not in self._newest and name not in self._scores:
            self._displaced = sorted({*self._displaced, name})
        path = trainer.save_checkpoint(self._path(name), required=self.on_save_error == "raise")
        if path is not None:
            with suppress(OSError):  # whoever read it may have ended by the same Ctrl-C
                trainer.accelerator.print(
                    f"Saved to {path}; fit(ckpt_path='auto') goes on from there."
                )

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Save this process's weights, if asked for; not where somebody wants the end at once."""
        if self.saves_on_exception and self._training:
            save_weights_at(exception, trainer, self._path(""))

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """The stage is over."""
        self._training = False

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Save the final update if it was not saved, and wait until all is written."""
        if trainer.global_step > 0 and _name_at(trainer.global_step) not in self._newest[-1:]:
            self._save(trainer, self._score(trainer))
        self._settle(trainer)
        if self.monitor and self.save_top_k and not self._scores and trainer.global_step > 0:
            logger.warning(
                "No checkpoint was ranked by %r: at no update was it reduced and a save due (every "
                "%s), or it was not finite. Let every be a multiple of val_every.",
                self.monitor.name,
                self.every,
            )

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
        """Save this update if it is worth keeping, and remove what it displaces."""
        self._settle(trainer)
        name, keep_all = _name_at(trainer.global_step), self.save_top_k == -1
        scores = self._scores
        if score is not None:
            ranked = self._rank(scores | {name: score})
            scores = ranked if keep_all else dict(list(ranked.items())[: self.save_top_k])
        if trainer.fast_dev_run or not (self.save_last or keep_all or name in scores):
            return
        # Decide first: the checkpoint must hold its own decisions, and if the run dies between the
        # commit and the removal, the next one knows what is left to remove.
        self._before = self._scores, self._newest, self._displaced
        newest = [*(each for each in self._newest if each != name), name][-max(self.save_last, 1) :]
        if not keep_all:
            ours = {*self._scores, *self._newest, *self._displaced}
            kept = {*scores, name, *(newest if self.save_last else [])}
            self._displaced = sorted(ours - kept)
        else:  # what a signal saved at this very update is now saved to stay
            self._displaced = [each for each in self._displaced if each != name]
        self._scores, self._newest = scores, newest
        self._saving = self._path(name)
        trainer.save_checkpoint(
            self._saving,
            weights_only=self.save_weights_only,
            background=self.background,
            required=self.on_save_error == "raise",
            displaces=[self._path(displaced) for displaced in self._displaced],
        )
        if not self.background:
            self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        """Wait for the latest save; one that failed decides nothing."""
        before, self._before = self._before, None
        if before is None:
            return
        if trainer.wait_for_save(self._saving):  # others may have saved since
            self._displaced = []
        else:
            self._scores, self._newest, self._displaced = before

    def _forget_missing(self, trainer: Trainer) -> None:
        """Forget checkpoints that are not there: the run may go on in another folder.

        A folder counts as missing if any rank lacks it, so that all ranks go on deciding alike.
        """
        names = sorted({*self._scores, *self._newest, *self._displaced})
        lacking = torch.tensor([float(not self._path(name).is_dir()) for name in names])
        lacking = trainer.accelerator.reduce(lacking.to(trainer.accelerator.device), "sum")
        missing = {name for name, ranks in zip(names, lacking.tolist(), strict=True) if ranks}
        self._scores = {name: s for name, s in self._scores.items() if name not in missing}
        self._displaced = [name for name in self._displaced if name not in missing]
        self._newest = [name for name in self._newest if name not in missing]
