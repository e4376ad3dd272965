"""Resolve ``ckpt_path``: which checkpoint a run resumes from, or an evaluation loads."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainer import checkpoint as disk
from trainer.checkpoint.manifest import MANIFEST, metrics_of, run_id_of
from trainer.errors import CheckpointError, LaterReleaseError, choose
from trainer.loops.resume import read_saved
from trainer.state import PartialState

logger = logging.getLogger(__name__)

WORDS = ("auto", "best", "last")


def choose_checkpoint(
    ckpt_path: str | os.PathLike[str] | None,
    roots: Sequence[Path],
    monitors: Sequence[tuple[str, str]],
    *,
    on_each_node: bool,
    instead: str,
) -> Path | None:
    """Resolve ``ckpt_path`` to a checkpoint, the same on all ranks; collective.

    Args:
        ckpt_path: None, a path, ``"last"``, ``"best"`` or ``"auto"``.
        roots: The folders to search; the same on all ranks unless `on_each_node`.
        monitors: Metric and mode of each callback that ranks checkpoints.
        on_each_node: Whether each machine has its own checkpoints, since they share no disk.
        instead: The advice of the error if there are only weights-only checkpoints.

    Returns:
        The checkpoint's folder; None if `ckpt_path` is None, or "auto" finds none.

    Raises:
        CheckpointError: The path is no checkpoint, ``"last"`` or ``"best"`` finds none, a word
            finds only weights-only checkpoints, or the machines' checkpoints at the path are from
            different runs.
        ValueError: ``"best"`` without a metric to rank by.
    """
    if ckpt_path is None:
        return None
    if ckpt_path not in WORDS:
        return _of_one_run(lambda: _existing(ckpt_path), on_each_node)
    if ckpt_path == "best":
        best = _best(roots, monitors, on_each_node)
        return _of_one_run(lambda: best, on_each_node)
    newest = _newest(roots, on_each_node)
    if newest is None:
        disk.refuse_weights_alone(roots, PartialState(), instead=instead, on_each_node=on_each_node)
    if newest is None and ckpt_path == "last":
        raise CheckpointError(f"ckpt_path='last', but there is no checkpoint in {_all(roots)}.")
    return newest


def _of_one_run(choose_here: Callable[[], Path], on_each_node: bool) -> Path:
    """Return the chosen checkpoint, checked to be of the same run on all machines.

    Args:
        choose_here: Returns this rank's choice.
        on_each_node: Whether each machine has its own checkpoints.

    Raises:
        CheckpointError: The machines have it from different runs, or a rank does not find it;
            raised on all ranks.
    """
    state = PartialState()
    if state.num_processes == 1:
        return choose_here()

    def look() -> tuple[Path, str | None]:
        path = choose_here()
        return path, run_id_of(path) if disk.keeps(state, on_each_node) else None

    found = disk.together("Choosing a checkpoint", look, state)
    runs = {rank: run_id for rank, (_, run_id) in enumerate(found) if run_id is not None}
    path = found[state.process_index][0]
    if len(set(runs.values())) > 1:
        told = ", ".join(f"that of rank {rank} from {run_id}" for rank, run_id in runs.items())
        raise CheckpointError(
            f"The machines have {path} from different runs ({told}). Copy one of them to all."
        )
    return path


def _newest(roots: Sequence[Path], on_each_node: bool) -> Path | None:
    newest, refused = [], []
    for root in roots:
        try:
            found = disk.newest_sound(
                root,
                PartialState(),
                on_each_node=on_each_node,
                check=partial(read_saved, copy=False),
            )
        except LaterReleaseError:  # do not fall back to a checkpoint that may be older
            raise
        except CheckpointError as error:  # raised on all ranks
            refused.append(error)
        else:
            newest += [] if found is None else [found]
    if not newest and refused:
        raise refused[0]
    for each in refused:
        logger.warning("%s A checkpoint of another folder is used.", each)
    return max(newest, key=lambda path: disk.step_of(path) or 0, default=None)


def _best(roots: Sequence[Path], monitors: Sequence[tuple[str, str]], on_each_node: bool) -> Path:
    if not monitors:
        raise ValueError(
            "ckpt_path='best', but no ModelCheckpoint says what is best: give it a monitor."
        )
    monitor, mode = monitors[0]
    state = PartialState()
    keeper = disk.keeps(state, on_each_node)
    found = disk.together(
        "Choosing the best checkpoint",
        lambda: [scores_of(root, monitor) for root in roots] if keeper else None,
        state,
    )
    machines = [each for each in found if each is not None]
    scores = {
        root / name: value
        for root, first, *others in zip(roots, *machines, strict=True)
        for name, value in first.items()
        if all(name in each for each in others)
    }
    best = best_of(scores, mode)
    if best is None:
        raise CheckpointError(
            f"ckpt_path='best', but no checkpoint in {_all(roots)} has a value of {monitor!r}."
        )
    return best


def _existing(ckpt_path: str | os.PathLike[str]) -> Path:
    path = Path(ckpt_path)
    if path.is_file() and not (path.parent / MANIFEST).exists():
        raise CheckpointError(
            f"ckpt_path is the file {path}; a checkpoint is a folder. Files such as .ckpt and .pt "
            "are pickles, which are never loaded: read their weights with the library that wrote "
            "them, and load them with module.load_state_dict."
        )
    if path.is_file():
        raise CheckpointError(f"ckpt_path is the file {path}; give its folder, {path.parent}.")
    if newest := disk.committed(path) or disk.committed(path / "checkpoints"):
        what = "a folder of checkpoints" if newest[-1].parent == path else "the folder of a run"
        raise CheckpointError(
            f"ckpt_path is {path}, {what}; give one of its checkpoints, such as {newest[-1]}, or "
            "ckpt_path='auto' with its project_dir."
        )
    if not disk.locate(path).exists():
        hint = choose("As a word it", path.name, WORDS) if path.parent == Path.cwd() else ""
        raise CheckpointError(
            f"There is no checkpoint at {path}. ckpt_path is None, the folder of a checkpoint, or "
            f"a word ({', '.join(WORDS)}). {hint}".rstrip()
        )
    return disk.locate(path)


def _all(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


def scores_of(root: Path, monitor: str) -> dict[str, float]:
    """Return a metric's value for each checkpoint in a folder whose manifest has a finite one.

    Checkpoints with a damaged manifest are skipped with a warning.

    Args:
        root: The folder of the checkpoints.
        monitor: The metric.

    Returns:
        The values by the checkpoint's folder name.
    """
    scores = {}
    for path in disk.committed(root):
        try:
            value = metrics_of(disk.read_manifest(path)).get(monitor)
        except CheckpointError as error:
            logger.warning("%s is not used: %s", path, error)
            continue
        if value is not None and math.isfinite(value):
            scores[path.name] = value
    return scores


def best_of(scores: Mapping[Path, float], mode: str) -> Path | None:
    """Return the checkpoint with the best value, of equal ones the oldest; None without any."""
    by_age = sorted(scores, key=lambda path: disk.step_of(path) or 0)
    sign = 1 if mode == "min" else -1
    return min(by_age, key=lambda path: sign * scores[path], default=None)
