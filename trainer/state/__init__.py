"""What this process knows of the run: its device, its peers, its precision, its window.

Three singletons. Every instance of a class shares one state, made by the first. They are for
reading; whoever needs other values starts another process (tests call ``_reset_state``).
"""

from trainer.configuration import DistributedType
from trainer.state.accelerator import AcceleratorState
from trainer.state.gradient import GradientState
from trainer.state.partial import PartialState

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "is_initialized",
]


def is_initialized() -> bool:
    """Whether there has been an `Accelerator` in this process."""
    return bool(AcceleratorState._shared_state)
