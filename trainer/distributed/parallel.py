"""What a process has of the data and of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.enums import DistributedType


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The place of this process among all processes of a run, as the engine arranges them.

    With a `mesh`, `divides_state` is True and `distributed_type` FSDP, if nothing else is given.

    "World size" in code about data, loss weights and metrics means `dp_size`.

    Attributes:
        dp_rank: Which share of the data this process reads; its rank where all read different
            data.
        dp_size: How many shares of the data there are.
        is_data_primary: Whether the items and predictions of this process count. False if another
            process, with another part of the same layers or sequences, reads the same data.
        is_log_primary: Whether the logged values of this process count. False if another process,
            with another part of the same layers, logs the same values.
        mesh: The device mesh of all processes, if tensors of modules are sharded over it.
        is_model_parallel: Whether processes hold different layers, or parts of layers, as plain
            tensors: those of a ``DTensor`` know that they are parts.
        divides_state: Whether no process has the whole state of the model and its optimizer.
        forward_is_collective: Whether a forward pass is known to wait for the other processes.
        distributed_type: `Accelerator.distributed_type`; None: by the number of processes.
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
        """Fill in what a mesh implies."""
        if self.mesh is not None:
            object.__setattr__(self, "divides_state", True)
            kind = self.distributed_type or DistributedType.FSDP
            object.__setattr__(self, "distributed_type", kind)
