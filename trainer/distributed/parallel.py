"""The position of a process in the data and model parallelism of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.enums import DistributedType


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The position of this process among all processes of a run, as arranged by the engine.

    With a `mesh`, `divides_state` is True, and `distributed_type` is FSDP by default.

    "World size" in code about data, loss weights and metrics means `dp_size`.

    Attributes:
        dp_rank: The index of the data share that this process reads; its rank if all processes read
            different data.
        dp_size: The number of data shares.
        is_data_primary: Whether the items and predictions of this process count. False if another
            process reads the same data, for another part of the same layers or sequences.
        is_log_primary: Whether the logged values of this process count. False if another process
            logs the same values, with another part of the same layers.
        mesh: The device mesh of all processes, if tensors of modules are sharded over it.
        is_model_parallel: Whether processes hold different layers, or parts of layers, as plain
            tensors. A ``DTensor`` does not count, since it knows that it is a part.
        divides_state: Whether no process has the whole state of the model and its optimizer.
        forward_is_collective: Whether a forward pass is known to wait for the other processes.
        distributed_type: `Accelerator.distributed_type`; None derives it from the number of
            processes.
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_data_primary: bool = True
    is_log_primary: bool = True
    mesh: Any = None
    is_model_parallel: bool = False
    divides_state: bool = False
    forward_is_collective: bool = False
    distributed_type: DistributedType | None = None

    def __post_init__(self) -> None:
        """Set the fields that a mesh implies."""
        if self.mesh is not None:
            object.__setattr__(self, "divides_state", True)
            kind = self.distributed_type or DistributedType.FSDP
            object.__setattr__(self, "distributed_type", kind)
