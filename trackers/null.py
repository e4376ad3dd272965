"""A tracker that does nothing, for processes without a tracker run (all but rank 0)."""

from collections.abc import Iterator
from typing import Any

from trackers.base import GeneralTracker


class NullObject:
    """Null object instead of an SDK's object: false, empty; attributes and calls return it.

    A script may then use a run's object on every process, as in `get_tracker("wandb",
    unwrap=True).summary["best"] = 1`. It has an effect only on processes with a run.
    """

    def __getattr__(self, name: str) -> "NullObject":
        # Python protocols, such as copying and conversion to an array, must not find an attribute.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Do nothing."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> "NullObject":
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> "NullObject":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> "NullObject":
        return self

    def __exit__(self, *_error: object) -> None:
        """Do not suppress errors."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<no tracker on this process>"


class NullTracker(GeneralTracker):
    """A tracker that does nothing, for the processes that have no run.

    Example::

        if accelerator.is_main_process:
            tracker = TensorBoardTracker("digits", "runs")
        else:
            tracker = NullTracker("tensorboard")

    Args:
        name: the name of the tracker that it replaces.
    """

    name = "none"
    requires_logging_directory = False

    def __init__(self, name: str = "none") -> None:
        self.name = name

    @property
    def tracker(self) -> Any:
        """The null object, because there is no run."""
        return NullObject()

    def __getattr__(self, name: str) -> Any:
        """Return the null object for attributes that the replaced tracker may have."""
        return getattr(NullObject(), name)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log_images = log_table = log_histogram = log_figure = log_text = log
    log_artifact = log_artifacts = log_model = log
