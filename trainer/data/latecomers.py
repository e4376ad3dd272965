"""Lazy generators: random generators that a dataset creates on first use, not in ``__init__``."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.utils.data import get_worker_info

from trainer.data.own_generators import Found

logger = logging.getLogger(__name__)

_LOOKS = 2  # searches: after each of the first two batches of a process, or of its first passes


class Latecomers:
    """Finds random generators that a process creates while it reads its first batch or pass.

    They can be seeded from the second batch on, but not for the first one, so a warning is logged.

    Args:
        owner: What creates the generators, for the warning.
        part: The unit between two searches: ``"batch"`` or ``"pass"``.

    Attributes:
        awaited: Whether to call `look` after the next batch or pass.
    """

    def __init__(self, owner: str, part: str = "batch") -> None:
        self._owner, self._part = owner, part
        self.awaited = True
        self._looks = 0
        self._late: Found = {}

    def look(self, find: Callable[[], Found], own: Found) -> Found:
        """Search after a batch or pass; return the known generators and the new ones.

        Args:
            find: Searches for the generators.
            own: The generators that were known before the batch or pass.
        """
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
