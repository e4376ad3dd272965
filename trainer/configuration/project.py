"""The folders of a run's files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from trainer.checks import check_bool_fields, check_counts, explains_itself


@explains_itself
@dataclass(kw_only=True)
class ProjectConfiguration:
    """The folders of a run's files, and the naming of its checkpoints.

    Example::

        project_config = ProjectConfiguration(
            project_dir="runs/digits", automatic_checkpoint_naming=True, total_limit=3
        )
        accelerator = Accelerator(project_config=project_config)
        accelerator.save_state()  # to runs/digits/checkpoints/checkpoint_0

    Attributes:
        project_dir: The folder of the run, or None.
        logging_dir: The folder of the trackers that write files; None is `project_dir`.
        automatic_checkpoint_naming: `save_state` saves to numbered folders,
            ``<project_dir>/checkpoints/checkpoint_<number>``.
        total_limit: The number of numbered checkpoints to keep; None keeps all.
        iteration: The number of the next numbered checkpoint.
        save_on_each_node: Local rank 0 of every machine writes, not only global rank 0; for
            machines that do not share a disk.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: `total_limit` is below 1, or `iteration` below 0.
    """

    project_dir: str | PathLike[str] | None = None
    logging_dir: str | PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges, and fill in `logging_dir`."""
        check_bool_fields(self)
        check_counts(0, iteration=self.iteration)
        self.iteration = int(self.iteration)
        if self.total_limit is not None:
            check_counts(1, total_limit=self.total_limit)
            self.total_limit = int(self.total_limit)
        for name in ("project_dir", "logging_dir"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, (str, PathLike))):
                raise TypeError(f"{name} is {value!r}; it must be a path or None.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` too if it is None."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
