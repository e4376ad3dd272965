"""Who runs what, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from trainer.distributed.collectives import all_gather_object
from trainer.state import PartialState


def local_main_first(function: Callable[[], None]) -> None:
    """Call `function` on the first process of each machine, then on the others.

    An error in a first process is raised on every process: nobody waits for it in vain.

    Raises:
        RuntimeError: On the other processes, when a first one failed; it names rank and error.
    """
    state = PartialState()
    if state.num_processes == 1:
        function()
        return
    error: BaseException | None = None
    if state.is_local_main_process:
        try:
            function()
        except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
    reports = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"Rank {rank} failed while the others waited for it: {report}")
    if not state.is_local_main_process:
        function()
