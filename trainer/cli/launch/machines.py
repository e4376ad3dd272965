"""How the launchers of several machines report failures to each other.

Each watches its own processes. If those of one machine fail before all have met, the others wait
for them until torch gives up, after half an hour. So a launcher that gives up reports it in the
store of the launchers' rendezvous, and the others end their processes, as on one machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.cli.parsing import echo
from trainer.errors import module_logger

logger = module_logger(__name__)

_FAILED, _LEFT = "cadence/failed", "cadence/left"
_LOOK = 1.0  # seconds between two looks into the store
_GRACE = 30.0  # seconds that processes have to notice a failure themselves
_LONGEST = 300.0  # seconds of waiting until the others have ended
_PATIENCE = 45.0  # seconds of waiting before it is reported; if the number of machines is a range,
# the last call for more of them takes 30


class AnotherFailed(Exception):
    """The processes of another machine have failed, and those of this one have not noticed."""


class Others:
    """The launchers of the other machines.

    Args:
        store: Returns the store of the last rendezvous; None before the first.
        all_needed: The run cannot continue without any one of them.
    """

    def __init__(self, store: Callable[[], Any], *, all_needed: bool) -> None:
        self._store, self._all_needed = store, all_needed
        self._failure: tuple[str, float] | None = None
        self._ended = threading.Event()

    def report(self, failure: str) -> None:
        """Report that the processes of this machine have failed, and let the others read it."""
        store = self._store()
        if store is None or not self._all_needed:
            return
        try:
            store.set(_FAILED, failure)
        except RuntimeError as error:  # of the store: machine 0 is gone
            logger.debug("The failure could not be reported to the other machines: %s", error)
            return
        time.sleep(2 * _LOOK)  # the store may end with this process

    def heed(self) -> None:
        """Raise if another machine has failed and those of this one had time to notice.

        Raises:
            AnotherFailed: Another machine reported a failure more than 30 seconds ago.
        """
        if self._failure is not None and time.monotonic() > self._failure[1] + _GRACE:
            raise AnotherFailed(
                f"{self._failure[0].rstrip('.')}. The processes of this machine were still running "
                f"{_GRACE:g} seconds later and were terminated."
            )

    def leave(self, machine: int) -> None:
        """Report that the processes of this machine have ended, for those in `wait`."""
        try:
            self._store().set(f"{_LEFT}/{machine}", "")
        except RuntimeError as error:  # machine 0 is gone, and nobody waits
            logger.debug("The end could not be reported to the other machines: %s", error)

    def wait(self, machines: int) -> None:
        """Wait until all machines have left: the store may be in this process."""
        left = [f"{_LEFT}/{machine}" for machine in range(machines)]
        end = time.monotonic() + _LONGEST
        try:
            while not self._store().check(left) and time.monotonic() < end:
                time.sleep(_LOOK / 10)
        except RuntimeError as error:
            logger.debug("Waiting for the other machines failed: %s", error)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, watch for failures that the others report.

        A thread does it, since a store on a lost machine may not answer, and the launcher has to
        watch its processes.
        """
        thread = threading.Thread(target=self._listen, name="cadence-machines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(_LOOK)

    def _listen(self) -> None:
        known = own = None
        while self._all_needed and not self._ended.wait(_LOOK) and self._failure is None:
            try:
                if self._store() is not known:
                    known = self._store()
                    own = known.clone()  # a wait on the launcher's own would block it
                if own is not None and own.check([_FAILED]):
                    self._failure = own.get(_FAILED).decode(), time.monotonic()
            except RuntimeError as error:  # machine 0 is gone, or all are meeting again
                logger.debug("Reports of the other machines could not be read: %s", error)


@contextmanager
def notice_if_waiting(text: str) -> Iterator[None]:
    """Inside, print `text` to stderr if the wait is long."""

    def report() -> None:
        echo(text, error=True)

    timer = threading.Timer(_PATIENCE, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
