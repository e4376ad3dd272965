"""`ModelCheckpoint`: when to save checkpoints, and which of them to keep."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from callbacks.base import Callback
from callbacks.monitor import Mode, Monitor
from callbacks.on_exception_checkpoint import save_weights_at
from trainer.checks import check_bools, check_counts, suggest_arguments
from trainer.errors import module_logger
from trainer.files import absolute_folder
from trainer.interval import Interval, Progress

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


logger = module_logger(__name__)

# Ranked names with their scores, the newest names, and the names to remove.
_Decisions = tuple[dict[str, float], list[str], list[str]]


_NAME = re.compile(r"step-[0-9]{8,}")  # the result of `_name_at`
_WITH_SECRET = re.compile(r"://[^/]*:[^/]*@|[?&][^/]*=")  # user:password@, or a query


def short_path(path: Path) -> str:
    """Return a path in its shortest form, relative to the working directory or absolute."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _name_at(step: int) -> str:
    return f"step-{step:08d}"


def _checked_url(mirror: str) -> str:
    from fsspec import get_filesystem_class

    if "://" not in mirror:
        raise ValueError(f"mirror is {mirror!r}; it is a URL such as 's3://bucket/run'.")
    if _WITH_SECRET.search(mirror):
        raise ValueError(
            "mirror contains a password or a signature, which would be written to logs. Pass "
            "credentials in environment variables or in the service's configuration files."
        )
    for part in mirror.split("::"):
        try:
            get_filesystem_class(part.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ValueError(f"mirror={mirror!r} cannot be used: {error}") from error
    return mirror


class ModelCheckpoint(Callback):
    """Save checkpoints at an interval; keep the best and the newest, and remove the others.

    It decides in ``on_boundary``; the Trainer writes. A checkpoint is ranked if the metric is
    finite and was reduced at the same update (make ``every`` a multiple of ``val_every``).
    Otherwise it only counts among the newest. Of two checkpoints with equal values, the earlier one
    is kept. Checkpoints that are no longer kept are removed after the new one is committed. The
    final update is saved by the same rules even if no save is due.

    Example::

        checkpoint = ModelCheckpoint(monitor="val/accuracy", mode="max", save_top_k=3)
        trainer = Trainer(max_epochs=10, project_dir="runs/digits", callbacks=[checkpoint])
        trainer.fit(module, train_loader, val_loader, ckpt_path="auto")  # resumes a stopped run
        trainer.test(module, test_loader, ckpt_path="best")

    Args:
        monitor: Name of the metric that ranks the checkpoints. None ranks the newest first.
        mode: ``min`` if smaller is better, ``max`` if larger is.
        every: When to save, an interval such as ``"1 epoch"``, ``500`` (steps) or ``"30 minutes"``.
        save_top_k: The number of best checkpoints to keep (without ``monitor``, of the newest); -1
            keeps every checkpoint, 0 keeps none by rank.
        save_last: Save whenever due, whatever the rank, and keep this many newest checkpoints; True
            is 1.
        on_preemption: Save when a signal ends the run. Such a checkpoint is not ranked. The resumed
            run ranks this update, and removes the checkpoint if it is not to be kept.
        on_exception: Save the weights of a process that fails, for inspection, as
            ``exception-<step>-rank-<rank>``. No run can resume from them.
        save_weights_only: Save only weights, from which no run can resume. ``ckpt_path="auto"`` and
            ``"last"`` skip such checkpoints, and raise an error if there are no others.
        background: Write while training continues: training waits only until the state is copied to
            host memory. The checkpoint is committed at the latest when the next save is due or
            `fit` ends.
        on_save_error: What to do if a save fails, for example on a full disk: ``raise`` ends the
            run, ``warn`` logs a warning and keeps the existing checkpoints.
        dirpath: The folder of the checkpoints; None takes the Trainer's. Two instances in one run
            need different folders.
        mirror: An fsspec URL such as ``"s3://bucket/run"``, one for each run. Committed checkpoints
            are uploaded in the background, and removed from the URL when the local copy is removed.
            On a new machine, ``ckpt_path="auto"`` fetches them. Credentials come from the
            environment or the service's configuration files.
        log_model: When training ends, record the best checkpoint as a model in all trackers that
            support it (`GeneralTracker.log_model`). An upload that takes longer than the trackers'
            30 seconds at the end of the run is abandoned.

    Attributes:
        directory: The folder in use, None before ``fit``.

    Raises:
        ValueError: If an argument is invalid, if two instances share a folder, and during ``fit``
            if an epoch has ended and the metric was never logged. (A run that ends inside its first
            epoch logs a warning instead.)
        TypeError: If ``monitor``, ``save_top_k``, ``save_last`` or ``every`` is of another type.
    """

    runs_last: ClassVar[bool] = True
    decides_by: ClassVar[tuple[str, ...]] = (  # must be the same on all processes
        "monitor",
        "mode",
        "every",
        "save_top_k",
        "save_last",
        "saves_on_preemption",
        "save_weights_only",
        "background",
        "on_save_error",
        "mirror",
    )

    @suggest_arguments(
        every_n_epochs='every="2 epochs"',
        every_n_train_steps="every=500",
        train_time_interval='every="30 minutes"',
        filename="nothing: a folder is named after its update, manifest.json has the metrics",
        auto_insert_metric_name="nothing: manifest.json has the metrics",
        enable_version_counter="nothing: a folder is named after its update",
        save_on_train_epoch_end="nothing: saves follow validation",
        save_on_exception="on_exception=True",
        verbose="nothing: `trainer checkpoints` lists them",
        save_best_only="save_top_k=1",
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
        mirror: str | None = None,
        log_model: bool = False,
    ) -> None:
        check_bools(
            log_model=log_model,
            on_preemption=on_preemption,
            on_exception=on_exception,
            save_weights_only=save_weights_only,
            background=background,
        )
        check_counts(-1, save_top_k=save_top_k)
        check_counts(0, save_last=int(save_last) if isinstance(save_last, bool) else save_last)
        if save_top_k == 0 and not save_last:
            raise ValueError(
                "save_top_k=0 with save_last=False never saves a checkpoint. To train without "
                "checkpoints, pass Trainer(checkpointing=False)."
            )
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"on_save_error must be 'raise' or 'warn', got {on_save_error!r}.")
        self._monitor = Monitor("step" if monitor is None else monitor, mode)
        self._ranks_by_step = monitor is None
        self.every = Interval.given("every", every)
        self.save_top_k = int(save_top_k)
        self.save_last = int(save_last)
        self.saves_on_preemption = on_preemption
        self.saves_on_exception = self.requires_unsharded = on_exception
        self.save_weights_only = save_weights_only
        self.background = background
        self.on_save_error = on_save_error
        self.dirpath = dirpath
        self.mirror = None if mirror is None else _checked_url(mirror)
        self.log_model = log_model
        self.directory: Path | None = None
        # All names are relative to the directory, so that a project folder can be moved.
        self._scores: dict[str, float] = {}  # the k best, best first
        self._newest: list[str] = []  # oldest first
        self._displaced: list[str] = []  # to remove; perhaps still on disk
        self._before: _Decisions | None = None  # to undo, until the latest save has succeeded
        self._saving: Path | None = None  # the path of the latest save
        self._failed = False  # whether the latest save is known to have failed
        self._handled: Progress | None = None  # at the last boundary
        self._restored = False
        self._training = False

    @property
    def monitor(self) -> str | None:
        """The name of the metric that ranks checkpoints; None without one."""
        return None if self._ranks_by_step else self._monitor.name

    @property
    def mode(self) -> Mode:
        """Whether the metric's smallest (``min``) or largest (``max``) value is best."""
        return self._monitor.mode

    @property
    def dirpath(self) -> Path | None:
        """The argument `dirpath` as an absolute path; None for the Trainer's folder."""
        return self._dirpath

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        self._dirpath = absolute_folder(dirpath)
        self._folder_name = Path(dirpath).name if dirpath else None  # "" for "."

    @property
    def root(self) -> Path | None:
        """The folder of the checkpoints: `dirpath`, or one in it; None for the Trainer's folder."""
        return self._dirpath

    @property
    def best_k_models(self) -> dict[Path, float]:
        """The ranked checkpoints, best first, with their scores (steps if without ``monitor``)."""
        return {self._path(name): score for name, score in self._scores.items()}

    @property
    def best_model_path(self) -> Path | None:
        """The path of the best checkpoint; without ``monitor``, of the newest."""
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
        """The class name, the metric and the folder's name, which identify the instance."""
        ranked = f"{self.monitor}, {self.mode}" if self.monitor else "newest"
        # Not the folder's whole path, because a project folder can be moved.
        folder = "" if self._folder_name is None else f", in {self._folder_name}"
        return f"{super().state_key}({ranked}{folder})"

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far, with names relative to the directory."""
        # Only the unit of `every`, because clocks differ between runs and decisions must not.
        unit = self.every.unit
        return {
            "scores": dict(self._scores),
            "newest": list(self._newest),
            "displaced": list(self._displaced),
            "handled": {unit: getattr(self._handled, unit)} if self._handled else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the decisions in ``state``.

        Raises:
            ValueError: A name to remove is not the name of a checkpoint.
        """
        for name in (*state["scores"], *state["newest"], *state["displaced"]):
            if not _NAME.fullmatch(name):  # for example a path to another folder
                raise ValueError(f"{name!r} is not the name of a checkpoint of this callback")
        self._scores = self._rank(state["scores"])
        self._newest = list(state["newest"])
        self._displaced = list(state["displaced"])
        handled = state["handled"] or {}
        same_unit = self.every.unit in handled
        self._handled = Progress(**handled) if same_unit else None
        self._restored = True

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Choose the folder."""
        if stage != "fit":
            return
        self.directory = self.root or trainer.checkpoint_dir
        for other in trainer.callbacks:
            if (
                isinstance(other, ModelCheckpoint)
                and other is not self
                and other.directory is not None
                and other.directory.resolve() == self.directory.resolve()
            ):
                raise ValueError(
                    f"Two ModelCheckpoints write to {self.directory}; each would delete the "
                    "other's checkpoints. Pass a different dirpath=... to one of them."
                )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Continue with the decisions from the checkpoint; for a new run, reset them."""
        if trainer.batches_seen == 0 or not self._restored:
            self._scores, self._newest, self._displaced, self._handled = {}, [], [], None
        else:
            current = _name_at(trainer.global_step)
            if current not in self._newest and current not in self._scores:
                # Saved when a signal ended the run, and only needed for this start.
                self._displaced = sorted({*self._displaced, current})
            self._forget_missing(trainer)
            # The earlier run may have been killed between a commit and the removal of old
            # checkpoints. Never remove the checkpoint from which this run resumes.
            for displaced in self._displaced:
                if displaced != current and not trainer.fast_dev_run:
                    trainer.remove_checkpoint(self._path(displaced))
            self._displaced = [name for name in self._displaced if name == current]
        self._restored = self._failed = False
        self._before = None
        self._training = True
        if self.on_save_error == "raise" and not trainer.fast_dev_run:
            assert self.directory is not None  # since `setup`
            trainer.require_space(self.directory)
        if self._handled is None or self.every.of_epochs:
            self._handled = trainer.progress

    def monitor_due(self, trainer: Trainer) -> bool:
        """Return whether a save is due."""
        return self.every.due(self._handled or Progress(), trainer.progress)

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Save if due."""
        before, self._handled = self._handled or Progress(), trainer.progress
        if not self._ranks_by_step:  # even if no save is due, so that a wrong name is found early
            self._monitor.read(trainer)
        if self.every.due(before, self._handled):
            self._save(trainer, self._score(trainer))

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """Save a checkpoint from which the next start resumes."""
        self._confirm_save(trainer)
        if not self.saves_on_preemption or self.save_weights_only or trainer.fast_dev_run:
            return
        name = _name_at(trainer.global_step)
        path = trainer.save_checkpoint(
            self._path(name),
            required=self.on_save_error == "raise",
            links=self._links(trainer, name),
        )
        if path is not None:
            with suppress(OSError):  # Ctrl-C may also have ended the reader of the output
                # The message includes the folder, since a Trainer without project_dir creates a new
                # one.
                trainer.accelerator.print(
                    f"Saved to {path}; ckpt_path='auto' with project_dir="
                    f"{short_path(trainer.project_dir)!r} resumes from there."
                )

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Save this process's weights if `on_exception` is set and the run was not interrupted."""
        if self.saves_on_exception and self._training:
            save_weights_at(exception, trainer, self._path(""))

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop saving at exceptions."""
        self._training = False

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Save the final update if it was not saved, and wait for background saves."""
        if self._due_at_end(trainer):
            self._save(trainer, self._score(trainer))
        self._confirm_save(trainer)
        if not (self._failed or trainer.fast_dev_run) and (self._scores or self._newest):
            for displaced in self._displaced:  # saved at a signal, and not to be kept
                trainer.remove_checkpoint(self._path(displaced))
            self._displaced = []
        saved = trainer.global_step > 0 and not trainer.fast_dev_run
        if self.monitor and self.save_top_k and not self._scores and saved:
            why = self._monitor.never_logged(trainer) or self._monitor.never_reduced(trainer)
            why = why or (
                f"It was never reduced when a save was due (every {self.every}), or it was not "
                "finite. Make every a multiple of val_every."
            )
            logger.warning("No checkpoint was ranked by %r. %s", self.monitor, why)
        best = self.best_model_path or self.last_model_path
        if self.log_model and saved and best is not None:
            for tracker in trainer.trackers:
                tracker.log_model(best, step=int(best.name.removeprefix("step-")))

    def _due_at_end(self, trainer: Trainer) -> bool:
        return trainer.global_step > 0 and _name_at(trainer.global_step) not in self._newest[-1:]

    def _path(self, name: str) -> Path:
        if self.directory is None:
            raise RuntimeError("ModelCheckpoint has no directory before fit.")
        return self.directory / name

    def _rank(self, scores: dict[str, float]) -> dict[str, float]:
        """Return the scores sorted best first; of equal scores the older (on disk) first."""
        by_age = sorted(scores.items())
        falling = self.monitor is None or self.mode == "max"
        return dict(sorted(by_age, key=lambda entry: entry[1], reverse=falling))

    def _score(self, trainer: Trainer) -> float | None:
        """Return the score of a checkpoint of this update, or None if it cannot be ranked."""
        if self.monitor is None:
            return float(trainer.global_step)
        value = self._monitor.read(trainer)
        return value if value is not None and math.isfinite(value) else None

    def _save(self, trainer: Trainer, score: float | None) -> None:
        """Save this update if it is to be kept, and remove the checkpoints that it replaces."""
        self._confirm_save(trainer)
        name, keep_all = _name_at(trainer.global_step), self.save_top_k == -1
        scores = self._scores
        if score is not None:
            ranked = self._rank(scores | {name: score})
            scores = ranked if keep_all else dict(list(ranked.items())[: self.save_top_k])
        if trainer.fast_dev_run or not (self.save_last or keep_all or name in scores):
            return
        # Decide before saving, because the checkpoint must contain these decisions. If the run is
        # killed between the commit and the removal, the next start then knows what to remove.
        self._before = self._scores, self._newest, self._displaced
        newest = [*(n for n in self._newest if n != name), name][-max(self.save_last, 1) :]
        if not keep_all:
            ours = {*self._scores, *self._newest, *self._displaced}
            keep = {*scores, name, *(newest if self.save_last else [])}
            self._displaced = sorted(ours - keep)
        else:  # keep a checkpoint that a signal saved at this update
            self._displaced = [other for other in self._displaced if other != name]
        self._scores, self._newest = scores, newest
        self._saving = self._path(name)
        trainer.save_checkpoint(
            self._saving,
            weights_only=self.save_weights_only,
            background=self.background,
            required=self.on_save_error == "raise",
            links=self._links(trainer, name),
            displaces=[self._path(displaced) for displaced in self._displaced],
        )
        if not self.background:
            self._confirm_save(trainer)

    def _links(self, trainer: Trainer, name: str) -> dict[Path, bool]:
        """Return the ``links`` of a checkpoint that is about to be saved."""
        return {}

    def _confirm_save(self, trainer: Trainer) -> None:
        """Wait for the latest save, and undo its decisions if it failed."""
        before, self._before = self._before, None
        if before is None:
            return
        self._failed = not trainer.wait_for_save(self._saving)  # others may have saved since
        if self._failed:
            self._scores, self._newest, self._displaced = before
        else:
            self._displaced = []

    def _forget_missing(self, trainer: Trainer) -> None:
        """Drop names of checkpoints that do not exist, e.g. if a run resumes in another folder.

        A checkpoint counts as missing if no writer rank has it, so that all ranks decide the same.
        Other ranks do not check, because they may have other working directories.
        """
        looks = trainer.keeps_checkpoints
        names = sorted({*self._scores, *self._newest, *self._displaced})
        lacking = torch.tensor([float(looks and not self._path(name).is_dir()) for name in names])
        lacking = trainer.accelerator.reduce(lacking.to(trainer.accelerator.device), "sum")
        missing = {name for name, ranks in zip(names, lacking.tolist(), strict=True) if ranks}
        self._scores = {name: s for name, s in self._scores.items() if name not in missing}
        self._displaced = [name for name in self._displaced if name not in missing]
        self._newest = [name for name in self._newest if name not in missing]
