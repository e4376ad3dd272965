"""Generators that a dataset or a ``collate_fn`` creates while it is first read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.utils.data import get_worker_info

from trainer.data.own_generators import Found

logger = logging.getLogger(__name__)

_LOOKS = 2  # after the first batches of a process, or those of its first passes


class Latecomers:
    """Finds the generators that a process creates in its first batch or pass, and keeps.

    They are seeded from the second look on. For the first it is too late, which is told.

    Args:
        owner: Who creates them, for the message.
        part: What lies between two looks: a batch or a pass.

    Attributes:
        awaited: Whether to `look` after the next part.
    """

    def __init__(self, owner: str, part: str = "batch") -> None:
        self._owner, self._part = owner, part
        self.awaited = True
        self._looks = 0
        self._late: Found = {}

    def look(self, find: Callable[[], Found], own: Found) -> Found:
        """Return the generators found after a part, with those that were known before it."""
        self._looks += 1
        self.awaited = self._looks < _LOOKS
        found = find()
        if self._looks == 1:
            self._late = {path: each for path, each in found.items() if path not in own}
            return {**own, **found}
        late = [path for path, each in self._late.items() if found.get(path) is each]
        worker = get_worker_info()
        if late and (worker is None or worker.id == 0):
            logger.warning(
                "%s created a random generator (%s) in its first %s. %s that %s draws from it does "
                "not depend on the seed and differs after a resume: create it in __init__.",
                self._owner,
                ", ".join(late),
                self._part,
                "What" if worker is None else "In each worker, what",
                self._part,
            )
        return own
