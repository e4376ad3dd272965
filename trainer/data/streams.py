"""Streams that resume where a checkpoint left them, and those that are read again."""

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
    """A stream's passes, each from its beginning or from where a checkpoint left it.

    Whatever depends on its state, the seed, the epoch and the batch's place is resumed exactly:
    what a dataset draws while a batch is read, but not an order drawn when a pass begins, unless
    the state holds it. Inside an epoch the number of workers must stay the same (0 and 1 are
    equivalent), since it decides which worker reads what. Workers begin each epoch with a copy of
    the dataset as it was given; without workers, the dataset itself lives on from epoch to epoch.
    The workers of a ``StatefulDataLoader`` draw from generators that its state does not hold.

    Args:
        source: The user's loader or iterable of batches.
        loader: The one to read; it may be made like `source`.
        generator: Workers' seeds are drawn from it.
        set_epoch: Tells the data which epoch is read.
        remember: The position will be saved.
        rereads: A pass may be read again from its beginning, so that the position holds that too.
        shown: This process tells of a replay, with its progress if there is a terminal.
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
        # An iterator continues from epoch to epoch: it has no beginning to go back to.
        self._iterator = type(source).__name__ if hasattr(source, "__next__") else None
        self._set_epoch, self._shown = set_epoch, shown
        self._fresh = True  # nothing has been read from it yet
        self._resumed = False
        self._pending: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None  # as loaded, until a batch is used
        self._epoch = 0
        self._used: Place | None = None
        self._over = ""
        self._before_last = Place()
        self._cut = False

    def read(self, seed: int, epoch: int, *, skip: int, limit: int | None) -> Iterator[Item]:
        """Yield the batches of an epoch, each with the place after it.

        Args:
            seed: The run's seed.
            epoch: The epoch.
            skip: Batches of it that were used before.
            limit: Batches after which it ends, including the skipped ones.
        """
        pending, self._pending = self._pending, None
        if pending is not None and pending["epoch"] == epoch:
            behind = bool(pending["over"]) or pending["batches"] > skip
            self._begin = pending.get("begin") if pending["batches"] else pending
            pending = self._begin if behind else pending
        elif self._rereads:
            self._begin = pending or self._beginning(epoch)
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
        """Bring the stream to where a pass leaves it, by reading the last batch of that pass again.

        Loading the state after that batch would not do: some datasets continue from it in the next
        pass, although they would have started over. If the last batch is the only one, the state
        before it is that of the previous pass's end, from which such datasets would yield nothing;
        then the pass is read without loading it.
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
        """Return the position where a pass begins that follows the latest one."""
        if self._over:
            return self.position()
        place = self._reading.start(first=self._reading.kind != "dataset")
        return self._at(place, epoch, "")

    def say_what_it_costs(self, batches: int) -> None:
        """Warn that a stream is read again from its beginning."""
        hint = " A dataset with state_dict and load_state_dict resumes without that."
        logger.warning(
            "Resuming inside an epoch of a stream: %d batches are read again and discarded.%s",
            batches,
            hint if self._reading.kind == "none" else "",
        )

    def used(self, place: Place, *, last: bool) -> None:
        """Note that the run has used the batches up to a place, which may be the last ones."""
        self._used = place
        self._over = "" if not last else "cut" if self._cut else "end"

    def position(self) -> dict[str, Any] | None:
        """Return the run's position in the stream, as a tree to be saved.

        It is None if there is nothing to save: the run has not begun, or a finished pass leaves no
        state behind.
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
            # The name appears in the error if a state cannot be saved.
            "states": [
                None if state is None else {reading.name: pickle.loads(state)}  # noqa: S301 - made here
                for state in place.states
            ],
            "ended": list(place.ended),
        }

    def resume_at(self, position: dict[str, Any] | None) -> None:
        """Begin the next epoch that is read at `position`.

        Raises:
            CheckpointError: It is inside an epoch that another number of workers read.
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
    """Return whether it, or its dataset, has a state, which then covers its generators."""
    return _has_state(source) or _has_state(getattr(source, "dataset", None))


def _has_state(source: Any) -> bool:
    """Return whether something has a state that can be restored."""
    names = ("state_dict", "load_state_dict")
    if getattr(source, "_is_accelerate_prepared", False) or _only_counts(source):
        return False  # its state is the pass, not the position inside it
    return all(callable(getattr(source, name, None)) for name in names)


def _only_counts(source: Any) -> bool:
    """Return whether torchdata's loader would read its stream again, without the draws in it."""
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
    """Yield the batches, with a progress bar if this process has a terminal for it."""
    if not (shown and sys.stderr and sys.stderr.isatty()):  # a service may have none
        yield from batches
        return
    from tqdm import tqdm

    # tqdm's monitor thread would outlive the bar.
    kind = type("Bar", (tqdm,), {"monitor_interval": 0})
    yield from kind(batches, total=total, desc="replay", unit="batch", leave=False)


def refuse_different(stream: Iterator[Item]) -> Iterator[Item]:
    """Return the stream if it starts with the same batch on all processes; collective.

    Raises:
        ValueError: On all processes, if it does not: of streams that differ, most batches would be
            discarded.
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
