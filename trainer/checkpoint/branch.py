"""Quarantine the later checkpoints when a run resumes from an earlier one.

They are renamed to ``abandoned-…`` and never deleted. Under their old names, the next start would
choose one of them as the newest checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from trainer.checkpoint.layout import committed, set_aside, step_of
from trainer.checkpoint.manifest import read_manifest, run_id_of

logger = logging.getLogger(__name__)


def refuse_other_runs(chosen: Path, roots: Iterable[Path]) -> None:
    """Check that the folders which a run will save to hold no checkpoints of another run.

    Args:
        chosen: The checkpoint that the run resumes from, in any folder.
        roots: The folders that the run will save to.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ValueError: A folder holds a checkpoint of another run.
    """
    run_id = run_id_of(chosen)
    for path in (path for root in roots for path in committed(root)):
        other = run_id_of(path)
        if None not in (run_id, other) and run_id != other:
            raise ValueError(
                f"{path} is a checkpoint of another run than {chosen}, from which this one is to "
                "resume. Give another project_dir, or move it away."
            )


def later_than(chosen: Path, roots: Iterable[Path]) -> list[Path]:
    """Return the checkpoints later than the one that a run resumes from, newest first.

    Args:
        chosen: The checkpoint that the run resumes from, in any folder.
        roots: The folders that the run saves to.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    step = read_manifest(chosen)["step"]
    later = [path for root in roots for path in committed(root) if (step_of(path) or 0) > step]
    return sorted(later, key=lambda path: step_of(path) or 0, reverse=True)


def leave_branch(chosen: Path, later: Iterable[Path]) -> None:
    """Rename the checkpoints from :func:`later_than` to ``abandoned-…``, with a warning each.

    Raises:
        OSError: A rename failed. `later` is newest first, so the older checkpoints still have their
            names and the next start finds them.
    """
    step = read_manifest(chosen)["step"]
    for path in later:
        aside = set_aside(path, "abandoned")
        logger.warning("The run goes back to update %d. %s is now %s.", step, path, aside)
