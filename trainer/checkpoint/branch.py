"""Going back: a run that goes on from an earlier checkpoint leaves the later ones behind.

They are set aside, never deleted: under their names the next start would take them for the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from trainer.checkpoint.layout import committed, peek, read_manifest, set_aside, step_of

logger = logging.getLogger(__name__)


def refuse_other_runs(chosen: Path, roots: Iterable[Path]) -> None:
    """See that the folders which a run will save to hold checkpoints of no other one.

    Args:
        chosen: The checkpoint that it goes on from, wherever it is.
        roots: The folders.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ValueError: There are some.
    """
    run_id = read_manifest(chosen).get("run_id")
    for path in (path for root in roots for path in committed(root)):
        other = peek(path).get("run_id")
        if None not in (run_id, other) and run_id != other:
            raise ValueError(
                f"{path} is a checkpoint of another run than {chosen}, from which this one is to "
                "go on. Give another project_dir, or move it away."
            )


def later_than(chosen: Path, roots: Iterable[Path]) -> list[Path]:
    """The checkpoints behind the one that a run goes on from, the newest first.

    Args:
        chosen: That one, wherever it is.
        roots: The folders that the run saves to.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    step = read_manifest(chosen)["step"]
    later = [path for root in roots for path in committed(root) if (step_of(path) or 0) > step]
    return sorted(later, key=lambda path: step_of(path) or 0, reverse=True)


def leave_branch(chosen: Path, later: Iterable[Path]) -> None:
    """Set these aside, which :func:`later_than` gave; the log tells it.

    Raises:
        OSError: The disk refuses. The older ones have their names then, so the run that is started
            again finds them.
    """
    step = read_manifest(chosen)["step"]
    for path in later:
        aside = set_aside(path, "abandoned")
        logger.warning("The run goes back to update %d. %s is now %s.", step, path, aside)
