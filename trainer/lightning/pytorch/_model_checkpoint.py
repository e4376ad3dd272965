"""Cadence's `ModelCheckpoint` with Lightning's arguments and file names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import torch

import callbacks
from trainer.checkpoint.lock import holder_of
from trainer.checkpoint.resolve import WORDS, holds_weights_only
from trainer.checkpoint.save import link_or_warn, run_on_all_ranks
from trainer.checkpoint.storage import MANIFEST, committed, run_id_of
from trainer.distributed.objects import all_gather_object, broadcast_object


def as_tensor(value: float) -> torch.Tensor:
    """Return a metric's value as the tensor that Lightning programs expect, in full precision."""
    return torch.tensor(value, dtype=torch.float64)


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """`callbacks.ModelCheckpoint` with Lightning's arguments.

    A checkpoint is a folder such as ``step-00000100``, with links in `dirpath` under Lightning's
    file names. The folders are in `dirpath` too. If `dirpath` has checkpoints of an earlier run,
    they are in ``dirpath/version_1``, and so on. Several callbacks with the same `dirpath` each
    have their own folder in it.

    Args:
        dirpath: The folder of the checkpoints; None takes the run's.
        filename: A template for the names, with metrics, such as ``"{epoch}-{val_loss:.2f}"``; None
            is ``"{epoch}-{step}"``. A "/" becomes "_".
        monitor: The metric that ranks checkpoints.
        verbose: Has no effect.
        save_last: Whether to also keep the newest checkpoint, as ``last.ckpt``.
        save_top_k: The number of best checkpoints to keep; -1 for all. With 0 and without
            `save_last`, nothing is saved.
        save_on_exception: Whether to save when an exception ends the run.
        save_weights_only: Whether to save only the weights.
        mode: Whether ``"min"`` or ``"max"`` is best.
        auto_insert_metric_name: Whether ``{name}`` becomes ``name=value``, else ``value``.
        every_n_train_steps: Save after every so many updates.
        train_time_interval: Save after this time.
        every_n_epochs: Save in every n-th epoch, by default in each. If all three intervals are 0,
            only `save_last` saves, at the end.
        save_on_train_epoch_end: Whether `every_n_epochs` saves at the end of the epoch, after its
            validation, instead of after each validation. None is True if there is no validation,
            or one at the end of each epoch.
        enable_version_counter: Whether a name that another checkpoint already has gets ``-v1`` and
            so on. If False, the new checkpoint takes over the name.
        background: Whether to write while the training continues; see `callbacks.ModelCheckpoint`.
            The links are created once it is written.

    Attributes:
        current_score: The monitored value at the latest save; None before it.

    Raises:
        ValueError: More than one of the three intervals is given.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        background: bool = False,
    ) -> None:
        intervals = {
            "every_n_train_steps": every_n_train_steps,
            "every_n_epochs": every_n_epochs,
            "train_time_interval": train_time_interval,
        }
        chosen = {name: value for name, value in intervals.items() if value}
        if len(chosen) > 1:
            several = " and ".join(f"{name}={value}" for name, value in chosen.items())
            raise ValueError(f"{several}: give one of them, or a ModelCheckpoint for each.")
        every: Any = every_n_train_steps or f"{every_n_epochs or 1} epochs"
        if train_time_interval is not None:
            every = f"{train_time_interval.total_seconds():g} seconds"
        at_end = not chosen and any(value is not None for value in intervals.values())
        never = not save_last and (save_top_k == 0 or at_end)
        super().__init__(
            monitor=monitor,
            mode=mode,
            every=sys.maxsize if at_end else every,
            save_top_k=save_top_k,
            save_last=never or bool(save_last) or (monitor is None and save_top_k != -1),
            on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            background=background,
            dirpath=dirpath,
        )
        self.filename, self.verbose = filename, verbose
        self.current_score: torch.Tensor | None = None
        self._given_every = self.every
        by_epoch = not (at_end or every_n_train_steps or train_time_interval)
        self._epochs = (every_n_epochs or 1) if by_epoch else 0
        self._at_epoch_end = save_on_train_epoch_end
        self.auto_insert_metric_name = auto_insert_metric_name
        self._counts_versions = enable_version_counter
        self._has_last = bool(save_last)
        self._top: Path | None = None  # the folder of the links in a fit
        self._names: dict[str, str] = {}  # names of links to ranked checkpoints
        self._last = ""  # the name of the link to the newest
        if never:
            hooks = ("on_train_start", "on_boundary", "on_preemption", "on_train_end")
            vars(self).update(dict.fromkeys(hooks, _nothing), monitor_due=_no)

    # -- the folder --------------------------------------------------------------------------------

    @property
    def dirpath(self) -> Path | None:
        """The folder of the links, and of the checkpoints of the first run; None before a fit."""
        return self._dirpath or self._top

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        callbacks.ModelCheckpoint.dirpath.fset(self, dirpath)  # type: ignore[attr-defined]  # a property
        self._root: Path | None = None

    @property
    def root(self) -> Path | None:
        """The folder of the checkpoints; see `choose_folders`."""
        return self._root or self._dirpath

    @property
    def state_key(self) -> str:
        """The identifier of the callback, which includes its interval."""
        return f"{super().state_key}, every {self._given_every}"

    def top(self, trainer: Any) -> Path:
        """Return the folder of the links."""
        folder: Path = self._dirpath or trainer.checkpoint_dir
        return folder

    def own_name(self) -> str:
        """Return the name of its folder, to distinguish callbacks with the same `dirpath`."""
        ranked = "newest" if self.monitor is None else f"{self.monitor}-{self.mode}"
        return re.sub(r"\W+", "-", f"{ranked}-every-{self._given_every}")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Choose the folder."""
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._top = self.top(trainer)

    # -- what is saved, and when -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far, with names relative to the directory."""
        return super().state_dict() | {"links": self._names, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the decisions in ``state``."""
        super().load_state_dict(state)
        self._names, self._last = dict(state.get("links", {})), state.get("last", "")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Continue with the decisions from the checkpoint; for a new run, reset them."""
        if trainer.batches_seen == 0 or not self._restored:
            self._names, self._last = {}, ""
        if trainer.keeps_checkpoints and not trainer.fast_dev_run:
            self._mend_links()
        validates = any(batches != 0 for batches in trainer.num_eval_batches)
        by_validation = self._epochs == 1 and validates and not self._at_epoch_end
        self.every = trainer._context.settings.val_every if by_validation else self._given_every
        super().on_train_start(trainer, module)

    def _save(self, trainer: Any, score: float | None) -> None:
        judged = None if self.monitor is None else score
        self.current_score = None if judged is None else as_tensor(judged)
        super()._save(trainer, score)

    def _due_at_end(self, trainer: Any) -> bool:
        """Return whether to save the final update, as Lightning does after a partial epoch."""
        within = self._epochs and self.every == self._given_every and not trainer.epoch_complete
        due = within and (trainer.current_epoch + 1) % self._epochs == 0
        return (due or (self._has_last and not self._newest)) and super()._due_at_end(trainer)

    # -- the names ---------------------------------------------------------------------------------

    def _links(self, trainer: Any, name: str) -> dict[Path, bool]:
        trainer.wait_for_save()  # its links then exist
        gone = [self._names.pop(each, "") for each in self._displaced]
        values = {**trainer.callback_metrics, "epoch": trainer.current_epoch}
        values["step"] = trainer.global_step
        wanted = {}
        if name in self._scores:
            default = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
            wanted["ranked"] = self._format(self.filename or default, values)
        if self._has_last:
            wanted["last"] = self._format(self.CHECKPOINT_NAME_LAST, values)
            gone.append(self._last)
        # Decided by rank 0, since other ranks may have other working directories and values.
        free = {
            which: self._free(file, None if which == "last" else {name, *self._displaced})
            for which, file in (wanted.items() if trainer.is_global_zero else ())
        }
        free = broadcast_object(free)
        if "ranked" in free:
            self._names = {k: link for k, link in self._names.items() if link != free["ranked"]}
            self._names[name] = free["ranked"]
        self._last = free.get("last", "")
        top = self._links_folder
        return {top / each: False for each in gone if each} | {
            top / each: True for each in free.values()
        }

    def _format(self, filename: str, values: Mapping[str, Any]) -> str:
        def value(field: re.Match[str]) -> str:
            text = format(values.get(field[1], 0), field[2] or "")
            inserted = f"{field[1]}{self.CHECKPOINT_EQUALS_CHAR}"
            return f"{inserted}{text}" if self.auto_insert_metric_name else text

        return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", value, filename).replace("/", "_")

    def _free(self, file: str, replaced: set[str] | None) -> str:
        """Return a name that no other checkpoint has, with a version added if needed.

        Args:
            file: The name without its extension.
            replaced: This callback's checkpoints whose name may be taken over; None for any.
        """
        versions = (f"{self.CHECKPOINT_JOIN_CHAR}v{n}" for n in count(self.STARTING_VERSION))
        for version in chain([""], versions):
            path = self._links_folder / f"{file}{version}{self.FILE_EXTENSION}"
            target = self._target(path)
            ours = target is not None and (
                replaced is None or target.name in replaced or not target.exists()
            )
            if ours or not os.path.lexists(path):
                break
            if path.is_symlink() and not self._counts_versions:
                break
        return path.name

    def _target(self, link: Path) -> Path | None:
        """Return this callback's checkpoint to which a link points, even if it no longer exists."""
        try:
            target = Path(os.path.abspath(link.parent / os.readlink(link)))
        except OSError:  # it is not a link
            return None
        return target if target.parent == self.directory else None

    def _mend_links(self) -> None:
        """Create links that are missing after a kill, and remove dangling ones."""
        top, links = self._links_folder, list(self._names.items())
        if self._last and self._newest:
            links.append((self._newest[-1], self._last))
        for name, link in links:
            path = top / link
            if self._path(name).is_dir() and (self._target(path) or not os.path.lexists(path)):
                link_or_warn(self._path(name), path)
        for path in top.glob(f"*{self.FILE_EXTENSION}"):
            if self._target(path) is not None and not path.exists():
                path.unlink(missing_ok=True)

    @property
    def _links_folder(self) -> Path:
        return self._top or self._path("")

    def _named(self, path: Path | None) -> str:
        """Return the path of a checkpoint, by its link if there is one."""
        if path is None:
            return ""
        link = self._links_folder / self._names.get(path.name, path.name)
        return str(link if link.is_symlink() else path)

    @property
    def best_k_models(self) -> dict[Any, Any]:
        """The ranked checkpoints by path, best first, with their scores."""
        ranked = super().best_k_models
        return {self._named(path): as_tensor(score) for path, score in ranked.items()}

    @property
    def best_model_path(self) -> Any:
        """The path of the best checkpoint, empty before there is one."""
        return next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> Any:
        """The monitored value of the best checkpoint; None without ``monitor``."""
        score = super().best_model_score
        return None if score is None else as_tensor(score)

    @property
    def kth_best_model_path(self) -> str:
        """The path of the worst checkpoint that `save_top_k` keeps; empty before there is one."""
        return next(reversed(self.best_k_models), "")

    @property
    def kth_value(self) -> Any:
        """The monitored value of `kth_best_model_path`; None without ``monitor``."""
        ranked = self.best_k_models if self.monitor is not None else {}
        return ranked.get(self.kth_best_model_path)

    @property
    def last_model_path(self) -> Any:
        """The newest checkpoint; empty without `save_last`, and before there is one."""
        newest = super().last_model_path if self._has_last else None
        link = self._links_folder / self._last
        return str(link) if newest is not None and link.is_symlink() else self._named(newest)


def choose_folders(trainer: Any, ckpt_path: Any) -> None:
    """Give each `ModelCheckpoint` a folder without checkpoints of other runs; collective.

    Args:
        trainer: The Trainer.
        ckpt_path: The checked checkpoint from which the run starts; folders of its run are reused.

    Raises:
        CheckpointError: A folder cannot be read; raised on all processes.
    """
    savers = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    tops = [callback.top(trainer) for callback in savers]
    if len({len(callback) for callback in all_gather_object(tops)}) > 1:
        return  # `fit` raises this error
    others = [callback for callback in trainer.checkpoint_callbacks if callback not in savers]
    used = [*tops, *(callback.root or trainer.checkpoint_dir for callback in others)]

    def choose() -> list[Path]:
        start = None if ckpt_path is None else Path(ckpt_path)
        if ckpt_path in WORDS:
            paths = [path for top in tops for base in _versions(top) for path in _saved(base)]
            identified = [path for path in paths if run_id_of(path) is not None]
            start = max(identified, key=_time, default=None)
        elif start is not None and holds_weights_only(start):
            start = None
        run_id = None if start is None else run_id_of(start)
        folders = []
        for saver, top in zip(savers, tops, strict=True):
            base, name = _base(top, run_id), saver.own_name()
            if saver._dirpath is None and holder_of(top):  # another run is using the folder
                base = trainer.project_dir / "checkpoints"
            shared = used.count(top) > 1 or committed(base / name)
            folders.append(base / name if shared else base)
        return folders

    state = trainer.accelerator.state
    chosen = run_on_all_ranks(
        "Choosing the folders of checkpoints",
        lambda: choose() if state.is_main_process else None,
        state,
    )
    for saver, folder in zip(savers, chosen[0] or [], strict=True):
        saver._root = folder


def _versions(top: Path) -> Iterator[Path]:
    yield top
    yield from sorted(top.glob("version_*"))


def _saved(base: Path) -> list[Path]:
    """Return the checkpoints in a folder and in its callbacks' folders."""
    parts = [each for each in base.glob("*-every-*") if each.is_dir()]
    return [path for folder in (base, *parts) for path in committed(folder)]


def _base(top: Path, run_id: str | None) -> Path:
    """Return the version of a folder with a run's checkpoints, else one without checkpoints."""
    for base in _versions(top) if run_id is not None else ():
        if run_id in map(run_id_of, _saved(base)):
            return base
    numbers = count(1)
    base = top
    while _saved(base):
        base = top / f"version_{next(numbers)}"
    return base


def _time(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _nothing(*_: Any) -> None:
    """Replaces a hook of a callback that never does anything."""


def _no(*_: Any) -> bool:
    return False
