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
    _in_turn(function, now=state.is_local_main_process)
    if not state.is_local_main_process:
        function()


def on_main(function: Callable[[], None]) -> None:
    """Call `function` on rank 0; its error is raised on every process.

    Raises:
        RuntimeError: On the other processes, when it failed; it names rank and error.
    """
    _in_turn(function, now=PartialState().is_main_process)


def _in_turn(function: Callable[[], None], *, now: bool) -> None:
    """Call `function` where it is due; nobody goes on before all of those calls have ended well."""
    error: BaseException | None = None
    if now:
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
