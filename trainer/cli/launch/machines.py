"""What the launchers of several machines say of each other.

Each watches its own processes. Where those of one machine fail before all have met, the others wait
for them until torch gives up, which takes half an hour: so a launcher that gives up says so in the
store by which the launchers have met, and the others end theirs, as on one machine.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_FAILED, _LEFT = "cadence/failed", "cadence/left"
_LOOK = 1.0  # seconds between two looks at what others have said
_GRACE = 30.0  # seconds that processes have to notice it by themselves
_LONGEST = 300.0  # seconds of waiting for the others' ends
_PATIENCE = 45.0  # seconds until it is said what is waited for; where machines come and go, the
# last call for more of them takes 30


class AnotherFailed(Exception):
    """Another machine's processes have failed, and those of this one have not noticed."""


class Others:
    """The launchers of the other machines.

    Args:
        store: Gives the one by which they have met last; None before that.
        all_needed: The run cannot go on without one of them.
    """

    def __init__(self, store: Callable[[], Any], *, all_needed: bool) -> None:
        self._store, self._all_needed = store, all_needed
        self._told: tuple[str, float] | None = None
        self._ended = threading.Event()

    def tell(self, failure: str) -> None:
        """Say that the processes of this machine have failed, and let all hear it."""
        store = self._store()
        if store is None or not self._all_needed:
            return
        try:
            store.set(_FAILED, failure)
        except RuntimeError as error:  # of the store: machine 0 has gone, and nobody can be told
            logger.debug("The other machines could not be told: %s", error)
            return
        time.sleep(2 * _LOOK)  # with this process the store may end

    def heed(self) -> None:
        """End where others have failed, unless the processes of this machine had time to notice.

        Raises:
            AnotherFailed: It was told some time ago.
        """
        if self._told is not None and time.monotonic() > self._told[1] + _GRACE:
            raise AnotherFailed(
                f"{self._told[0].rstrip('.')}. The processes of this machine had not ended "
                f"{_GRACE:g} seconds after that, and were ended."
            )

    def leave(self, machine: int) -> None:
        """Say that the processes of this machine have ended: those who wait at the end go on."""
        try:
            self._store().set(f"{_LEFT}/{machine}", "")
        except RuntimeError as error:  # machine 0 has gone, and nobody waits
            logger.debug("The other machines could not be told of the end: %s", error)

    def wait(self, machines: int) -> None:
        """Keep the store, which may be in this process, until all machines have left."""
        left = [f"{_LEFT}/{machine}" for machine in range(machines)]
        end = time.monotonic() + _LONGEST
        try:
            while not self._store().check(left) and time.monotonic() < end:
                time.sleep(_LOOK / 10)
        except RuntimeError as error:
            logger.debug("The other machines could not be waited for: %s", error)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, what the others say is heard.

        By a thread: a store on a machine that is gone may not answer, and the launcher has to see
        to its processes.
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
        while self._all_needed and not self._ended.wait(_LOOK) and self._told is None:
            try:
                if self._store() is not known:
                    known = self._store()
                    own = known.clone()  # the launcher's would be held as long as this one waits
                if own is not None and own.check([_FAILED]):
                    self._told = own.get(_FAILED).decode(), time.monotonic()
            except RuntimeError as error:  # machine 0 has gone, or all meet anew
                logger.debug("The other machines could not be asked: %s", error)


@contextmanager
def told_of_waiting(text: str) -> Iterator[None]:
    """Inside, the terminal is told what is waited for, if that lasts long."""

    def tell() -> None:
        print(text, file=sys.stderr, flush=True)

    timer = threading.Timer(_PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
