"""Ways to read a stream from a place on: by the state of its dataset, by its own, or by counting.

A dataset that has ``state_dict`` and ``load_state_dict`` is read by a `StreamReader`, in the main
process or in workers: each batch comes with the state that the dataset had once it was read. What
is read ahead is thus never counted as used. A source with these two methods of its own (torchdata's
``StatefulDataLoader``) is asked after every batch. Of every other stream only the batches are
counted.

Workers take turns: of *W* workers, worker *w* answers the requests *w*, *w + W*, *w + 2W*, …; one
whose data have ended answers with nothing. The order of the batches is that of a ``DataLoader``.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer.data.rebuild import LastingLoader, LastingWorker, users_kwargs
from trainer.data.seeding import as_fetched
from trainer.rng import isolated_rng, mix, seed_generators, seeded_iteration


@dataclass(frozen=True, slots=True)
class Place:
    """Where the reading of an epoch stands.

    Attributes:
        batches: Batches before it.
        number: The request that comes next.
        states: Pickled, of each worker or of the source; None where there is none yet.
        ended: The data of which worker have ended.
    """

    batches: int = 0
    number: int = 0
    states: tuple[bytes | None, ...] = ()
    ended: tuple[bool, ...] = ()


Item = tuple[Any, Place]  # a batch and where the reading stands after it


class Request(NamedTuple):
    """What a `StreamReader` is asked for.

    Attributes:
        seed: Of the batch; None asks for nothing, from a worker that has had its turn.
        begins: The seed of the pass, in its first request.
        state: From where the pass goes on, in its first request.
        ended: The data had ended there.
    """

    seed: int | None
    begins: int | None = None
    state: bytes | None = None
    ended: bool = False


class Reply(NamedTuple):
    """A batch, the dataset's state after it, and whether its data ended in reading it.

    Without a batch there is no state either.
    """

    batch: Any
    state: bytes | None
    ended: bool


class StreamReader(Dataset[Reply]):
    """A stream's dataset, read batch by batch as it is requested.

    Args:
        loader: The user's loader of it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self._iterator: Iterator[Any] = iter(())
        self._ended = False

    def __getitem__(self, request: Request) -> Reply:
        if request.seed is None:
            return Reply(None, None, False)
        if get_worker_info() is not None:  # a worker's generators serve nothing else
            return self._read(request)
        with isolated_rng():
            return self._read(request)

    def begin(self, request: Request) -> None:
        """Take up the dataset where the request says."""
        assert request.begins is not None
        seed_generators(request.begins)
        self.leave()
        if request.state is not None:
            self.dataset.load_state_dict(pickle.loads(request.state))  # type: ignore[attr-defined]  # noqa: S301 - made here
        self._ended = False
        if not request.ended:
            self._iterator = iter(self.dataset)

    def leave(self) -> None:
        """Close what an unfinished pass holds open."""
        self._iterator = iter(())

    def _read(self, request: Request) -> Reply:
        if request.begins is not None:
            self.begin(request)
        assert request.seed is not None
        seed_generators(request.seed)
        size = self.batch_size or 1
        items = [] if self._ended else list(islice(self._iterator, size))
        # Too few: it has ended, and is not asked again, since some datasets would begin anew.
        self._ended = len(items) < size
        if not items or (self._ended and self.drop_last):
            return Reply(None, None, True)
        batch = self.collate_fn(items if self.batch_size is not None else items[0])
        return Reply(batch, pickled_state(self.dataset), self._ended)


def pickled_state(owner: Any) -> bytes:
    """What ``owner.state_dict()`` returns, as it is now: it may hold what goes on changing.

    Raises:
        RuntimeError: It raised, or returned what cannot be copied.
    """
    try:
        return pickle.dumps(owner.state_dict())
    except Exception as error:
        raise RuntimeError(
            f"Where the training stream stands cannot be saved: {type(owner).__name__}.state_dict()"
            f" gave {type(error).__name__}: {error}. It must return a tree of tensors, numbers and "
            "texts at any time; without the method the stream would be read again on a resume."
        ) from error


class _Requests:
    """The sampler that makes the requests of a pass, without end."""

    def __init__(self, place: Place, seed: int, workers: int) -> None:
        self.place, self.seed, self.workers = place, seed, workers

    def __iter__(self) -> Iterator[Request]:
        place, workers = self.place, self.workers
        first = place.number
        for number in count(first - first % workers):
            if number < first:
                yield Request(None)
                continue
            # Of W workers each numbers its batches by itself: nobody knows which end before others.
            request = Request(mix(self.seed, number))
            if number < first + workers:
                worker = number % workers
                state = place.states[worker] if place.states else None
                ended = bool(place.ended) and place.ended[worker]
                request = Request(request.seed, self.seed, state, ended)
            yield request


class Reading(Protocol):
    """A way to read a stream from a place on.

    Attributes:
        kind: What a saved place is one of.
        name: The class of what has the state.
        workers: How many read.
    """

    kind: str
    name: str
    workers: int

    def start(self, *, first: bool) -> Place:
        """Where a pass begins, the first one or another."""

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """The batches from a place on, each with the place after it.

        Args:
            place: The place.
            seed: Of the pass.
            load: Put the stream there first; else that is where it stands.
        """


class DatasetReading:
    """Reads the dataset of a loader that has a state."""

    kind = "dataset"

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator) -> None:
        self.name, self.workers = type(loader.dataset).__name__, loader.num_workers
        self._reader = StreamReader(loader)
        self._kwargs = users_kwargs(loader) | {
            "dataset": self._reader,
            "collate_fn": as_fetched,
            "batch_size": None,
            "generator": generator,
            "worker_init_fn": LastingWorker(loader.worker_init_fn, wrapped=True),
            # What a pass leaves in a worker no checkpoint knows, nor would it hear of an epoch.
            "persistent_workers": False,
        }

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        if first or self.workers:  # as it was given; workers begin with a copy of that
            return Place()
        return Place(states=(pickled_state(self._reader.dataset),))

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `Reading`."""
        workers = self.workers or 1
        begin = place.number - place.number % workers
        states = list(place.states or [None] * workers)
        ended = list(place.ended or [False] * workers)
        requests = _Requests(place if load else replace(place, states=()), seed, workers)
        loader = LastingLoader(**self._kwargs, sampler=requests)
        try:
            for number, reply in enumerate(loader, begin):
                if number < place.number:
                    continue
                worker = number % workers
                ended[worker] = reply.ended
                if reply.state is None:
                    if all(ended):
                        return
                    continue
                states[worker] = reply.state
                place = Place(place.batches + 1, number + 1, tuple(states), tuple(ended))
                yield reply.batch, place
        finally:
            self._reader.leave()


class SourceReading:
    """Reads an iterable of batches that has a state itself."""

    kind = "loader"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        return Place() if first else Place(states=(pickled_state(self._source),))

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `Reading`."""
        with isolated_rng(seed):
            if load and place.states and place.states[0] is not None:
                self._source.load_state_dict(pickle.loads(place.states[0]))  # noqa: S301 - made here
            batches = iter(self._source)
        for number in count(place.number):
            with isolated_rng(mix(seed, number)):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            place = Place(place.batches + 1, number + 1, (pickled_state(self._source),), (False,))
            yield batch, place


class PlainReading:
    """Reads a stream of which nothing but the number of batches is known."""

    kind = "none"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        del first
        return Place()

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `Reading`."""
        del place, load
        batches = seeded_iteration(self._source, seed)
        for number, batch in enumerate(batches, 1):
            yield batch, Place(number, number)
