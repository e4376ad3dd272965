"""Reading a stream from a position: by its dataset's state, by its own state, or by counting.

A dataset that has ``state_dict`` and ``load_state_dict`` is read by a `StreamReader`, in the main
process or in workers: each batch comes with the state of the dataset after reading it, so that
prefetched batches never count as used. A source with these methods itself (torchdata's
``StatefulDataLoader``) is asked for its state after every batch. For any other stream only the
batches are counted.

Workers take turns: with *W* workers, worker *w* answers the requests *w*, *w + W*, *w + 2W*, …; one
whose data have ended answers with nothing. The order of the batches is that of a ``DataLoader``.
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
        batches: The number of batches before it.
        number: The next request.
        states: The pickled state of each worker or of the source; None if there is none yet.
        ended: For each worker, whether its data have ended.
    """

    batches: int = 0
    number: int = 0
    states: tuple[bytes | None, ...] = ()
    ended: tuple[bool, ...] = ()


Item = tuple[Any, Place]  # a batch and the position after it


class Request(NamedTuple):
    """A request to a `StreamReader`.

    Attributes:
        seed: The batch's seed; None requests nothing, from a worker that has had its turn.
        begins: The seed of the pass, in its first request.
        state: The state to resume the pass from, in its first request.
        ended: Whether the data had ended there.
    """

    seed: int | None
    begins: int | None = None
    state: bytes | None = None
    ended: bool = False


class Reply(NamedTuple):
    """A batch, the dataset's state after it, and whether the data ended in reading it.

    Without a batch there is no state either.
    """

    batch: Any
    state: bytes | None
    ended: bool


class StreamReader(Dataset[Reply]):
    """A stream's dataset, read batch by batch as it is requested.

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
        """Position the dataset as the request says."""
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
        """Drop the iterator of an unfinished pass, and what it holds open."""
        self._iterator = iter(())

    def _read(self, request: Request) -> Reply:
        if request.begins is not None:
            self.begin(request)
        assert request.seed is not None
        seed_generators(request.seed)
        size = self.batch_size or 1
        items = [] if self._ended else list(islice(self._iterator, size))
        # Too few items: the data have ended; some datasets would start over if asked again.
        self._ended = len(items) < size
        if not items or (self._ended and self.drop_last):
            return Reply(None, None, True)
        with set_aside(self._own, mix(request.seed, 1), self._alike):
            batch = self.collate_fn(items if self.batch_size is not None else items[0])
        if self._latecomers.awaited:
            self._own = self._latecomers.look(partial(_of_collate, self), self._own)
        return Reply(batch, pickled_state(self.dataset), self._ended)


def _of_collate(loader: Any) -> Found:
    """Find the generators of a ``collate_fn``, but for those that its dataset has too."""
    saved = set(map(id, held_by(dataset=loader.dataset).values()))
    found = held_by([loader.dataset], collate_fn=loader.collate_fn)
    return {path: each for path, each in found.items() if id(each) not in saved}


def pickled_state(owner: Any) -> bytes:
    """Pickle ``owner.state_dict()`` at once, since what it holds may change later.

    Raises:
        RuntimeError: It raised, or returned something that cannot be pickled.
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
    """The sampler that yields the requests of a pass, endlessly."""

    def __init__(self, place: Place, seed: int, workers: int) -> None:
        self.place, self.seed, self.workers = place, seed, workers

    def __iter__(self) -> Iterator[Request]:
        place, workers = self.place, self.workers
        first = place.number
        for number in count(first - first % workers):
            if number < first:
                yield Request(None)
                continue
            # Requests have no end: no process knows in advance which workers' data end first.
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
        kind: The kind of the saved position.
        name: The class of the object that has the state.
        workers: The number of workers that read.
    """

    kind: str
    name: str
    workers: int

    def start(self, *, first: bool) -> Place:
        """Return where a pass begins, the first one or another."""

    def read(self, place: Place, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """Yield the batches from a position on, each with the position after it.

        Args:
            place: The position.
            seed: The seed of the pass.
            load: Restore the position first; otherwise the stream is there already.
        """


class DatasetReading:
    """Reads a loader's dataset that has a state."""

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
            # No checkpoint holds a worker's state, and it would not be notified of an epoch.
            "persistent_workers": False,
        }

    def start(self, *, first: bool) -> Place:
        """See `Reading`."""
        if first or self.workers:  # the dataset as given, of which workers have a copy
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
    """Reads an iterable of batches that itself has a state."""

    kind = "loader"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        self._alike = alike(self._without_state())
        self._latecomers = Latecomers(f"The loader ({self.name})")

    def _without_state(self) -> Found:
        """Find the generators that a loader's state lacks and that this process draws from."""
        if not isinstance(self._source, DataLoader) or self.workers:
            return {}
        dataset, found = self._source.dataset, _of_collate(self._source)
        # A stream's order may go on from them; a state may hold them.
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
    """Reads a stream without a state, counting its batches."""

    kind = "none"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        data = getattr(source, "dataset", None)  # of an iterable of batches it may be a name
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
            # Once a pass: one made anew in each depends on what the stream knows, as it should.
            if number == 1 and self._latecomers.awaited and not self.workers:
                self._latecomers.look(find, own)
            yield batch, Place(number, number)
