"""The lines that a run prints before its first epoch and after its last one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.model_checkpoint import ModelCheckpoint, short_path
from callbacks.model_summary import numel
from trainer.enums import DistributedType
from trainer.errors import printable

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU)


def begin_line(trainer: Trainer, module: TrainModule) -> str:
    """Return a line with the model's size, the devices, the precision and the folder."""
    accelerator = trainer.accelerator
    total = f"{sum(map(numel, module.parameters())):,}"
    devices = accelerator.device.type
    if accelerator.num_processes > 1:
        devices = f"{accelerator.num_processes} processes, {devices}"
    if accelerator.distributed_type not in _PLAIN:
        devices += f", {accelerator.distributed_type.value}"
    precision = accelerator.mixed_precision
    precision = "fp32" if precision == "no" else str(precision)
    where = f", files in {short_path(trainer.project_dir)}" if trainer.project_dir.is_dir() else ""
    return printable(
        f"Training {type(module).__name__} ({total} parameters) on {devices}, {precision}{where}"
    )


def end_lines(trainer: Trainer) -> str:
    """Return lines with the run's length, its best and last checkpoint, and how to continue."""
    progress = trainer.progress
    lines = [
        f"Finished {_count(progress.epochs, 'epoch')}, {_count(progress.steps, 'update')}, "
        f"{progress.seconds:.1f} s"
    ]
    lines += [f"  best  {line}" for line in _best(trainer)]
    # Lightning's callback has strings, which are links to the checkpoints.
    saved = (Path(saver.last_model_path) for saver in _savers(trainer) if saver.last_model_path)
    newest = max(saved, key=lambda path: path.resolve().name, default=None)
    if newest is not None:
        lines.append(f"  last  {short_path(newest)}")
        lines.append(f"  next  {_continuation(trainer, newest)} continues the run,")
        lines.append(f"        trainer report {short_path(trainer.project_dir)} shows it")
    return printable("\n".join(lines))


def _continuation(trainer: Trainer, newest: Path) -> str:
    if trainer.should_stop:  # by a callback: under "auto" the run stays stopped
        return f"ckpt_path={short_path(newest)!r}"
    if not trainer._takes_project_dir:
        return f"ckpt_path={short_path(newest)!r} and a larger max_epochs"
    # The command includes the folder, since a Trainer without project_dir creates a new one.
    folder = short_path(trainer.project_dir)
    return f"ckpt_path='auto' with project_dir={folder!r} and a larger max_epochs"


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]


def _best(trainer: Trainer) -> Iterator[str]:
    for callback in _savers(trainer):
        path, score = callback.best_model_path, callback.best_model_score
        if path and score is not None:
            yield f"{short_path(path)}  {callback.monitor}={score:.4g}"


def _count(number: float, noun: str) -> str:
    shown = f"{number:,.4g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {noun}{'' if number == 1 else 's'}"
