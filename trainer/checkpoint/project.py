"""Numbered checkpoints of an `Accelerator`: ``<project_dir>/checkpoints/checkpoint_<number>``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoint import accelerator_state
from trainer.checkpoint.accelerator_state import LoadHook, SaveHook, check_readable, find_state
from trainer.checkpoint.restore import Prepared, logger
from trainer.checkpoint.save import Ranks, is_writer_rank, raise_on_all_ranks, run_on_all_ranks
from trainer.checkpoint.storage import NUMBERED, is_ours, is_shared, remove, sweep
from trainer.configuration import ProjectConfiguration
from trainer.errors import CheckpointError
from trainer.files import with_home

T = TypeVar("T")


def save_state(
    output_dir: str | os.PathLike[str] | None,
    prepared: Prepared,
    processes: Ranks,
    project: ProjectConfiguration,
    *,
    safe_serialization: bool = True,
    hooks: Iterable[SaveHook] = (),
) -> Path:
    """Save to ``output_dir``, or with automatic naming to the next checkpoint; collective.

    The save increments ``project.iteration``. With automatic naming and a ``total_limit``, the
    checkpoints with the lowest numbers are then deleted. Folders that are not checkpoints, or that
    also hold other files, are never deleted.

    Args:
        output_dir: The folder to save to; ``~`` is the home directory. Ignored with automatic
            naming.
        prepared: The objects to save.
        processes: The ranks.
        project: Naming, limit and iteration.
        safe_serialization: See :func:`trainer.checkpoint.accelerator_state.save_state`.
        hooks: See :func:`trainer.checkpoint.accelerator_state.save_state`.

    Returns:
        The folder.

    Raises:
        ValueError: If there is no ``output_dir`` and no automatic naming, if the home directory for
            ``~`` is not known, or if the next checkpoint or one with a higher number exists
            already. Nothing is changed then.
        CheckpointError: If any rank failed; raised on every rank. If only deleting old checkpoints
            failed, the save itself is complete.
    """
    naming, each = project.automatic_checkpoint_naming, project.save_on_each_node
    main = is_writer_rank(processes, each)
    if naming:
        target = _root(project) / f"checkpoint_{project.iteration}"
        raise_on_all_ranks(
            lambda: _check_number(target),
            processes,
            here=main,
            operation="save_state (arguments)",
        )
    elif output_dir is None:
        raise ValueError(
            "output_dir is None and automatic checkpoint naming is off. Pass a folder, or "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    else:
        target = Path(with_home("output_dir", output_dir))
    saved = accelerator_state.save_state(
        target,
        prepared,
        processes,
        safe_serialization=safe_serialization,
        hooks=hooks,
        save_on_each_node=each,
    )
    project.iteration += 1
    limit = project.total_limit
    if naming and limit is not None:
        what = f"{saved} is saved, but deleting older checkpoints"
        run_on_all_ranks(
            what,
            lambda: _rotate(saved, limit) if main else None,
            processes,
            operation="save_state (delete)",
        )
    return saved


def load_state(
    input_dir: str | os.PathLike[str] | None,
    prepared: Prepared,
    processes: Ranks,
    project: ProjectConfiguration,
    *,
    hooks: Iterable[LoadHook] = (),
    **kwargs: Any,
) -> int:
    """Load ``input_dir``, or the project's newest intact checkpoint; collective.

    After loading one of the project's own checkpoints, ``project.iteration`` is the number of the
    next save. If newer checkpoints were skipped as damaged, it is above their numbers too.

    Args:
        input_dir: The folder; ``~`` is the home directory. None takes the intact checkpoint with
            the highest number. If each machine saves its own, it must be intact on all machines.
            Damaged checkpoints are skipped with a warning.
        prepared: The objects to load into.
        processes: The ranks.
        project: The project whose checkpoints these are.
        hooks: See :func:`trainer.checkpoint.accelerator_state.load_state`.
        **kwargs: ``map_location``, ``strict`` and other arguments of that function.

    Returns:
        The `Accelerator`'s count of micro-batches.

    Raises:
        ValueError: If there is no ``input_dir`` and no automatic naming, or no such folder.
        CheckpointError: If there is no intact checkpoint or it does not fit; raised on every rank.
    """
    naming, following = project.automatic_checkpoint_naming, None
    if input_dir is not None:
        source = Path(with_home("input_dir", input_dir))
    elif naming:
        source, following = _newest(project, processes)
    else:
        raise ValueError(
            "input_dir is None and automatic checkpoint naming is off. Pass the folder that "
            "save_state returned."
        )
    each = project.save_on_each_node
    step = accelerator_state.load_state(
        source, prepared, processes, hooks=hooks, save_on_each_node=each, **kwargs
    )
    number = _number(source)
    root = _root(project).absolute() if naming and project.project_dir is not None else None
    if following is not None:
        project.iteration = following
    elif number is not None and source.absolute().parent == root:
        project.iteration = number + 1
    return step


def _root(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ValueError(
            "Automatic checkpoint naming needs a project_dir; pass one to the Accelerator or to "
            "ProjectConfiguration."
        )
    return Path(with_home("project_dir", project.project_dir)) / "checkpoints"


def _number(path: Path) -> int | None:
    match = NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else None


def _numbered(root: Path) -> dict[int, Path]:
    folders = root.iterdir() if root.is_dir() else ()
    return {number: path for path in folders if (number := _number(path)) is not None}


def _check_number(target: Path) -> None:
    """Raise if this number or a higher one exists: such checkpoints are another run's."""
    number, taken = _number(target), _numbered(target.parent)
    later = [path for other, path in sorted(taken.items()) if number is None or other >= number]
    if later:
        raise ValueError(
            f"{target} is the next checkpoint, but {', '.join(path.name for path in later)} of "
            "another run exist already; nothing was saved or deleted. Call load_state() first to "
            "resume from them, set accelerator.project_configuration.iteration to "
            f"{max(taken) + 1} to continue their numbering, or choose another project_dir."
        )


def _rotate(saved: Path, limit: int) -> None:
    sweep(saved.parent)  # an earlier deletion may have been killed
    ours = [path for _, path in sorted(_numbered(saved.parent).items()) if is_ours(path)]
    others = [path for path in ours if path.name != saved.name]
    for path in others[: max(len(ours) - limit, 0)]:
        if is_shared(path):
            logger.warning("%s is not deleted: it holds files that are not the checkpoint's.", path)
        else:
            remove(path)


def _newest(project: ProjectConfiguration, processes: Ranks) -> tuple[Path, int]:
    """Return the checkpoint with the highest number that is intact on all machines.

    Returns:
        The checkpoint, and the highest existing number plus 1.
    """
    root, each = _root(project), project.save_on_each_node
    main = is_writer_rank(processes, each)
    what = f"Choosing a checkpoint in {root}"

    def step(work: Callable[[], T]) -> list[T]:
        return run_on_all_ranks(what, work, processes, operation="load_state (choose)")

    found = step(lambda: set(_numbered(root)) if main else None)
    listed = [numbers for numbers in found if numbers is not None]
    common = set.intersection(*listed)
    for number in sorted(common, reverse=True):
        path = root / f"checkpoint_{number}"
        if all(step(lambda: not main or _is_sound(path))):  # noqa: B023  # called at once
            return path, max(set.union(*listed)) + 1
    none = f"no intact checkpoint among {len(common)}" if common else "no checkpoint_<number>"
    raise CheckpointError(
        f"{root} holds {none}. Start without load_state(), or pass the folder to load."
    )


def _is_sound(path: Path) -> bool:
    try:
        folder, manifest = find_state(path)
        if manifest is not None:  # None for a folder of accelerate
            check_readable(folder, manifest)
    except CheckpointError as error:
        logger.warning("%s is not used: %s", path, error)
        return False
    return True
