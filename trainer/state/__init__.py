"""The state of the process: its device, its peers, its precision, its accumulation window.

These are three singletons: all instances of a class share one state, created by the first instance.
They are read-only; for other values start another process (tests call ``_reset_state``).
"""

from trainer.choices import DistributedType
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
    """Return whether an `Accelerator` has been created in this process."""
    return bool(AcceleratorState._shared_state)
