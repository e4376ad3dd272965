"""Three ways to read a stream from a position, for a resume inside an epoch.

- A dataset with ``state_dict`` and ``load_state_dict`` is read by a `StreamReader`, in the main
  process or in workers. Each batch comes with the dataset's state after that batch. So batches that
  were prefetched but not used never count as used.
- A loader that has these methods itself (torchdata's ``StatefulDataLoader``) is asked for its
  ``state_dict`` after every batch.
- For any other stream, the batches are counted, and a resume reads them again.

Workers take turns: with W workers, worker *w* answers the requests *w*, *w + W*, *w + 2W*, …. A
worker whose data have ended returns an empty reply. The order of the batches is the same as that of
a ``DataLoader``.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainer.data.latecomers import Latecomers
from trainer.data.own_generators import Found, alike, held_by, set_aside
from trainer.data.rebuild import LastingLoader, LastingWorker, users_kwargs
from trainer.data.seeding import as_fetched
from trainer.rng import isolated_rng, mix, seed_generators, seeded_iteration


@dataclass(frozen=True, slots=True)
class Place:
    """A position in an epoch of a stream.

    Attributes:
        batches: The number of batches in the epoch before this position.
        number: The number of the next request.
        states: The pickled state dict of each worker's dataset, or of the loader; None before the
            first batch.
        ended: For each worker, whether its data have ended.
    """

    batches: int = 0
    number: int = 0
    states: tuple[bytes | None, ...] = ()
    ended: tuple[bool, ...] = ()


Item = tuple[Any, Place]  # a batch and the position after it


class Request(NamedTuple):
    """A request for one batch, sent to a `StreamReader`.

    Attributes:
        seed: The seed of the batch. None requests nothing: it goes to a worker that had its turn
            before the position from which the pass resumes.
        begins: The seed of the pass, in a worker's first request of the pass; else None.
        state: The pickled state to resume from, in a worker's first request; else None.
        ended: Whether the worker's data had ended in that state.
    """

    seed: int | None
    begins: int | None = None
    state: bytes | None = None
    ended: bool = False


class Reply(NamedTuple):
    """The answer of a `StreamReader`.

    Attributes:
        batch: The batch; None if there is none.
        state: The dataset's pickled state after the batch; None without a batch.
        ended: Whether the data ended while this batch was read.
    """

    batch: Any
    state: bytes | None
    ended: bool


class StreamReader(Dataset[Reply]):
    """Reads an iterable dataset one batch per request, and returns its state with each batch.

    Args:
        loader: The user's loader of the stream.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self._iterator: Iterator[Any] = iter(())
        self._ended = False
        self._alike = alike(_of_collate(self))
        self._own: Found = {}
        self._latecomers = Latecomers("The collate_fn")

    def __getitem__(self, request: Request) -> Reply:
        if request.seed is None:
            return Reply(None, None, False)
        if get_worker_info() is not None:  # in a worker nothing else uses the generators
            return self._read(request)
        with isolated_rng():
            return self._read(request)

    def begin(self, request: Request) -> None:
        """Start a pass: restore the dataset's state from the request and create its iterator."""
        assert request.begins is not None
        seed_generators(request.begins)
        self.leave()
        if request.state is not None:
            self.dataset.load_state_dict(pickle.loads(request.state))  # type: ignore[attr-defined]  # noqa: S301 - made here
        self._ended = False
        self._own = _of_collate(self)
        if not request.ended:
            self._iterator = iter(self.dataset)

    def leave(self) -> None:
        """Drop the iterator of an unfinished pass, which may hold files open."""
        self._iterator = iter(())

    def _read(self, request: Request) -> Reply:
        if request.begins is not None:
            self.begin(request)
        assert request.seed is not None
        seed_generators(request.seed)
        size = self.batch_size or 1
        items = [] if self._ended else list(islice(self._iterator, size))
        # Too few items mean that the data have ended. Do not ask again: some datasets restart.
        self._ended = len(items) < size
        if not items or (self._ended and self.drop_last):
            return Reply(None, None, True)
        with set_aside(self._own, mix(request.seed, 1), self._alike):
            batch = self.collate_fn(items if self.batch_size is not None else items[0])
        if self._latecomers.awaited:
            self._own = self._latecomers.look(partial(_of_collate, self), self._own)
        return Reply(batch, pickled_state(self.dataset), self._ended)


def _of_collate(loader: Any) -> Found:
    """Find the generators of a ``collate_fn`` that its dataset does not have too."""
    saved = set(map(id, held_by(dataset=loader.dataset).values()))
    found = held_by([loader.dataset], collate_fn=loader.collate_fn)
    return {path: each for path, each in found.items() if id(each) not in saved}


def pickled_state(owner: Any) -> bytes:
    """Pickle ``owner.state_dict()`` immediately, because later reads may change its objects.

    Raises:
        RuntimeError: ``state_dict`` raised an error, or its result cannot be pickled.
    """
    try:
        return pickle.dumps(owner.state_dict())
    except Exception as error:
        raise RuntimeError(
            f"The position in the training stream cannot be saved: {type(owner).__name__}"
            f".state_dict() gave {type(error).__name__}: {error}. It must return a tree of "
            "tensors, numbers and strings at any time; otherwise a resume reads the stream again."
        ) from error


class _Requests:
    """A sampler that yields the requests of a pass, without end."""

    def __init__(self, place: Place, seed: int, workers: int) -> None:
        self.place, self.seed, self.workers = place, seed, workers

    def __iter__(self) -> Iterator[Request]:
        place, workers = self.place, self.workers
        first = place.number
        for number in count(first - first % workers):
            if number < first:
                yield Request(None)
                continue
            # Requests do not end: it is unknown in advance which worker's data end first.
            request = Request(mix(self.seed, number))
            if number < first + workers:
                worker = number % workers
                state = place.states[worker] if place.states else None
                ended = bool(place.ended) and place.ended[worker]
                request = Request(request.seed, self.seed, state, ended)
            yield request


class Reading(Protocol):
    """A way to read a stream from a position.

    Attributes:
        kind: The kind of position that is saved: ``"dataset"``, ``"loader"`` or ``"none"``.
        name: The class name of the object that has the state.
        workers: The number of data-loader workers.
    """

    kind: str
    name: str
    workers: int

    def start(self, *, first: bool) -> Place:
        """Return the position at which a pass begins.

        Args:
            first: Whether it is the first pass, before which nothing was read.
        """

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """Yield the batches from a position on, each with the position after it.

        Args:
            place: The position to read from.
            seed: The seed of the pass.
            load: Restore the state of the position first. If False, the stream is there already.
        """


class DatasetReading:
    """Reads a loader whose dataset has ``state_dict`` and ``load_state_dict``."""

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
            # No checkpoint holds the state of a worker, and set_epoch would not reach it.
            "persistent_workers": False,
        }

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        if first or self.workers:  # unread, or read only by copies in workers
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
    """Reads a loader, or iterable of batches, that has ``state_dict`` and ``load_state_dict``."""

    kind = "loader"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        self._alike = alike(self._without_state())
        self._latecomers = Latecomers(f"The loader ({self.name})")

    def _without_state(self) -> Found:
        """Find the generators that this process draws from and that the loader's state lacks."""
        if not isinstance(self._source, DataLoader) or self.workers:
            return {}
        dataset, found = self._source.dataset, _of_collate(self._source)
        # Leave out generators of an iterable dataset, whose order may continue from them, and of a
        # dataset with a state, which may hold them.
        if not (isinstance(dataset, IterableDataset) or hasattr(dataset, "load_state_dict")):
            found |= held_by(dataset=dataset)
        return found

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        return Place() if first else Place(states=(pickled_state(self._source),))

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `Reading`."""
        with isolated_rng(seed):
            if load and place.states and place.states[0] is not None:
                self._source.load_state_dict(pickle.loads(place.states[0]))  # noqa: S301 - made here
            batches = iter(self._source)
        own = self._without_state()
        for number in count(place.number):
            drawn = mix(seed, number)
            with isolated_rng(drawn), set_aside(own, mix(drawn, 1), self._alike):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if self._latecomers.awaited:
                own = self._latecomers.look(self._without_state, own)
            place = Place(place.batches + 1, number + 1, (pickled_state(self._source),), (False,))
            yield batch, place


class PlainReading:
    """Reads a stream that has no state, and counts its batches."""

    kind = "none"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        data = getattr(source, "dataset", None)  # on other iterables it may be, say, a string
        stream = data if isinstance(source, DataLoader) or isinstance(data, Dataset) else source
        owner = f"The stream ({type(stream).__name__}) or its collate_fn"
        self._latecomers = Latecomers(owner, "pass")

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        del first
        return Place()

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `Reading`."""
        del place, load
        find = partial(held_by, loader=self._source)
        own = find() if self._latecomers.awaited and not self.workers else {}
        batches = seeded_iteration(self._source, seed)
        for number, batch in enumerate(batches, 1):
            # Search once per pass. A generator that the stream creates again in each pass is no
            # problem: its seed depends on the stream's own data.
            if number == 1 and self._latecomers.awaited and not self.workers:
                self._latecomers.look(find, own)
            yield batch, Place(number, number)
