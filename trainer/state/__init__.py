"""Process state: `PartialState`, `AcceleratorState` and `GradientState`.

`PartialState` has the device, rank and world size. `AcceleratorState` adds the settings of the
`Accelerator`, such as the precision. `GradientState` has the position in the gradient accumulation
window. All instances of one class share one state, which the first instance creates. The state is
read-only; to change a value, start another process (tests call ``_reset_state``).
"""

from trainer.enums import DistributedType
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
