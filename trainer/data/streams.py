"""Resume of streams: restore a saved position, or read the stream again and discard batches."""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from trainer.data.stateful import DatasetReading, Item, Place, PlainReading, Reading, SourceReading
from trainer.distributed.objects import all_gather_object
from trainer.errors import CheckpointError
from trainer.rng import mix
from trainer.tree import leaves

logger = logging.getLogger(__name__)


class Stream:
    """Reads the passes of a stream, each from its beginning or from a saved position.

    A resume is exact for everything that depends on the stream's state, the seed, the epoch and the
    position of the batch. This includes random numbers that the dataset draws while it reads a
    batch. It does not include an order that is drawn when a pass begins, unless the state holds it.

    Inside an epoch, the number of workers must stay the same (0 and 1 are equivalent), because it
    decides which worker reads which data. Workers begin each epoch with a copy of the original
    dataset. Without workers, the same dataset object is used in all epochs. The workers of a
    ``StatefulDataLoader`` draw from generators that its state does not hold.

    Args:
        source: The user's loader or iterable of batches.
        loader: The loader to read; it may be rebuilt from `source`.
        generator: The generator from which the workers' seeds are drawn.
        set_epoch: Sets the epoch of the data.
        remember: The caller saves the position.
        rereads: The caller may read a pass again from its beginning. A saved position then includes
            the beginning of the pass.
        shown: Whether this process logs a replay, with a progress bar if there is a terminal.
    """

    def __init__(
        self,
        source: Any,
        loader: Any,
        generator: torch.Generator,
        *,
        set_epoch: Callable[[int], None],
        remember: bool,
        rereads: bool,
        shown: bool,
    ) -> None:
        self._rereads = rereads
        self._begin: dict[str, Any] | None = None  # the position where the pass began
        self._reading = _choose_reading(source, loader, generator, remember=remember)
        # An iterator continues from epoch to epoch, and cannot restart.
        self._iterator = type(source).__name__ if hasattr(source, "__next__") else None
        self._set_epoch, self._shown = set_epoch, shown
        self._fresh = True  # nothing has been read from the stream yet
        self._resumed = False
        self._pending: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None  # the loaded position, until a batch is used
        self._epoch = 0
        self._used: Place | None = None
        self._over = ""
        self._before_last = Place()
        self._cut = False

    def read(self, seed: int, epoch: int, *, skip: int, limit: int | None) -> Iterator[Item]:
        """Yield the batches of an epoch, each with the position after it.

        Args:
            seed: The run's seed.
            epoch: The epoch.
            skip: The number of batches of the epoch that were used before; they are not yielded.
            limit: The number of batches after which the epoch ends, including the skipped ones;
                None means no limit.
        """
        # 1. Choose the saved position to start from, if there is one.
        pending, self._pending = self._pending, None
        if pending is not None and pending["epoch"] == epoch:
            # At the end of the pass, or beyond the batches to skip: start at the pass's beginning.
            behind = bool(pending["over"]) or pending["batches"] > skip
            self._begin = pending.get("begin") if pending["batches"] else pending
            pending = self._begin if behind else pending
        elif self._rereads:
            self._begin = pending or self._beginning(epoch)
        # 2. Bring the stream to it, or to the end of the pass before this one.
        self._epoch = epoch
        place, found = Place(), False
        if pending is not None and pending["over"]:
            self._finish(pending, seed)
            self._set_epoch(epoch)
        elif pending is not None:
            place = _place_of(pending)
            found = pending["epoch"] == epoch
        unknown = self._resumed and self._fresh and not found and epoch
        if unknown and self._iterator is not None and self._shown:
            _say_where_it_begins(self._iterator, epoch)
        if not found:
            place = self._reading.start(first=self._fresh)
        self._fresh = False
        # 3. Read, discarding batches that were used after the position.
        batches = self._reading.read(place, mix(seed, epoch, 2), load=found)
        if again := skip - (place.batches if found else 0):
            if self._shown:
                self.say_what_it_costs(again)
            for _, place in _progress(islice(batches, again), again, shown=self._shown):
                self._before_last = place
        self._before_last, self._cut = place, limit is not None and place.batches >= limit
        while not self._cut:
            following = next(batches, None)
            if following is None:
                return
            self._before_last, place = place, following[1]
            self._cut = place.batches == limit
            yield following

    def _finish(self, position: dict[str, Any], seed: int) -> None:
        """Bring the stream to the end of a saved pass, by reading the last batch of the pass again.

        Loading the state after the last batch would be wrong for some datasets: they would continue
        from it in the next pass, although they would have restarted without the interruption. If
        the pass has only one batch, the state before it is that of the previous pass's end, from
        which such datasets yield nothing. The pass is then read without loading a state.
        """
        self._set_epoch(position["epoch"])
        place, pass_seed = _place_of(position), mix(seed, position["epoch"], 2)
        most = 1 if position["over"] == "cut" else None
        for load in (True, False):
            with closing(self._reading.read(place, pass_seed, load=load)) as batches:
                if sum(1 for _ in islice(batches, most)):
                    break
        self._fresh = False

    def _beginning(self, epoch: int) -> dict[str, Any] | None:
        """Return the position at the beginning of the pass after the latest one."""
        if self._over:
            return self.position()
        place = self._reading.start(first=self._reading.kind != "dataset")
        return self._at(place, epoch, "")

    def say_what_it_costs(self, batches: int) -> None:
        """Warn that batches of a stream are read again and discarded."""
        hint = " A dataset with state_dict and load_state_dict resumes without that."
        logger.warning(
            "Resuming inside an epoch of a stream: %d batches are read again and discarded.%s",
            batches,
            hint if self._reading.kind == "none" else "",
        )

    def used(self, place: Place, *, last: bool) -> None:
        """Record that the run has used the batches up to a position.

        Args:
            place: The position after the used batches.
            last: Whether the epoch ends there.
        """
        self._used = place
        self._over = "" if not last else "cut" if self._cut else "end"

    def position(self) -> dict[str, Any] | None:
        """Return the run's position in the stream, as a tree for a checkpoint.

        It is None if there is nothing to save: nothing has been used yet, or the pass is finished
        and the next one does not depend on a state.
        """
        reading, place = self._reading, self._used
        if self._rereads and reading.kind == "none":
            return None
        if place is None:
            return self._position or (self._beginning(self._epoch) if self._rereads else None)
        if self._over:
            if reading.kind == "none" or (reading.kind == "dataset" and reading.workers):
                return None
            place = self._before_last
        position = self._at(place, self._epoch, self._over)
        if self._rereads and self._begin is not None:
            position["begin"] = {**self._begin, "begin": None}
        return position

    def _at(self, place: Place, epoch: int, over: str) -> dict[str, Any]:
        reading = self._reading
        return {
            "kind": reading.kind,
            "workers": reading.workers,
            "epoch": epoch,
            "over": over,
            "batches": place.batches,
            "number": place.number,
            # Keyed by the class name, which then appears in the error if a state cannot be saved.
            "states": [
                None if state is None else {reading.name: pickle.loads(state)}  # noqa: S301 - made here
                for state in place.states
            ],
            "ended": list(place.ended),
        }

    def resume_at(self, position: dict[str, Any] | None) -> None:
        """Begin the next pass at a saved position.

        Args:
            position: What `position` returned, or None.

        Raises:
            CheckpointError: The position is inside an epoch that a different number of workers
                read.
        """
        self._pending = self._position = None
        self._used, self._resumed = None, True
        if position is None:
            return
        here, saved, kind = self._reading.workers, position["workers"], self._reading.kind
        other = here != saved
        if other and not position["over"] and (kind == "loader" or max(here, saved) > 1):
            raise CheckpointError(
                f"The checkpoint was saved inside an epoch of a stream that {saved} workers read, "
                f"and this loader has {here}. The number of workers decides what comes next: set "
                f"num_workers={saved}, or resume from a checkpoint at the end of an epoch."
            )
        self._position = position
        if position["kind"] == kind != "none" and not (other and position["over"]):
            self._pending = position


def _place_of(position: dict[str, Any]) -> Place:
    return Place(
        position["batches"],
        position["number"],
        tuple(
            None if state is None else pickle.dumps(next(iter(state.values())))
            for state in position["states"]
        ),
        tuple(position["ended"]),
    )


def _choose_reading(
    source: Any, loader: Any, generator: torch.Generator, *, remember: bool
) -> Reading:
    if not remember:
        return PlainReading(loader)
    if loader is source:
        return SourceReading(source) if _has_state(source) else PlainReading(source)
    data = loader.dataset
    plain = not _has_state(data) or isinstance(data, IterDataPipe)
    return PlainReading(loader) if plain else DatasetReading(source, generator)


def knows_where_it_is(source: Any) -> bool:
    """Return whether a source or its dataset has a state, which then covers its generators."""
    return _has_state(source) or _has_state(getattr(source, "dataset", None))


def _has_state(source: Any) -> bool:
    """Return whether an object has a ``state_dict`` that holds its position in the data."""
    names = ("state_dict", "load_state_dict")
    if getattr(source, "_is_accelerate_prepared", False) or _only_counts(source):
        return False  # the state of a prepared loader names the pass, not the position inside it
    return all(callable(getattr(source, name, None)) for name in names)


def _only_counts(source: Any) -> bool:
    """Return whether torchdata's loader resumes this stream only by reading it again.

    Such a replay would not repeat the random numbers that were drawn.
    """
    data = getattr(source, "dataset", None)
    return (
        type(source).__module__.startswith("torchdata.")
        and isinstance(data, IterableDataset)
        and not _has_state(data)
        and inspect.isgeneratorfunction(type(data).__iter__)  # other iterators may have a state
    )


def _say_where_it_begins(iterator: str, epoch: int) -> None:
    logger.warning(
        "The training loader is an iterator (%s): if its __iter__ does not restart, its position "
        "after earlier epochs is unknown, and epoch %d is read from its current position. Give it "
        "state_dict and load_state_dict to save the position.",
        iterator,
        epoch,
    )


def _progress(batches: Iterator[Any], total: int, *, shown: bool) -> Iterator[Any]:
    """Yield the batches, with a progress bar if standard error is a terminal."""
    if not (shown and sys.stderr and sys.stderr.isatty()):  # a service may have no stderr
        yield from batches
        return
    from tqdm import tqdm

    # Without this, tqdm's monitor thread would outlive the progress bar.
    kind = type("Bar", (tqdm,), {"monitor_interval": 0})
    yield from kind(batches, total=total, desc="replay", unit="batch", leave=False)


def refuse_different(stream: Iterator[Item]) -> Iterator[Item]:
    """Check that a stream starts with the same batch on all processes; a collective call.

    Every process reads the whole stream and keeps only its own batches. If each process had its own
    part of the data, most batches would be lost.

    Returns:
        The stream, with its first batch.

    Raises:
        ValueError: On all processes, if the first batches differ.
    """
    first = list(islice(stream, 1))
    batches = [batch for batch, _ in first]
    seen = [leaf.detach().cpu() for leaf in leaves(batches) if isinstance(leaf, torch.Tensor)]
    sums = [float(leaf.double().sum()) for leaf in seen if not leaf.is_complex()]
    if len({repr(each) for each in all_gather_object(sums)}) > 1:
        raise ValueError(
            "The stream starts with a different batch on each process. Every process reads the "
            "whole stream and keeps its own batches: give all the same stream, not a part of it."
        )
    return chain(first, stream)
