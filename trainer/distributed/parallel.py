"""Which share of the data a process reads, and what it counts for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The place of this process among all processes of a run, as the engine arranges them.

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
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_data_primary: bool = True
    is_log_primary: bool = True
    mesh: Any = None
