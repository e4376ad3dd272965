"""Iterable datasets: resumed where a checkpoint left them, or read again.

For a resume inside an epoch, a stream is read from a position in one of three ways.

- A dataset with ``state_dict`` and ``load_state_dict`` is read by a `StreamReader`, in the main
  process or in workers. Each batch comes with the dataset's state after that batch. So batches that
  were prefetched but not used never count as used.
- A loader that has these methods itself (torchdata's ``StatefulDataLoader``) gives its
  ``state_dict`` after every batch.
- For any other stream, the batches are counted, and a resume reads them again. This includes
  streams of Hugging Face `datasets` with a shuffle buffer, whose state lacks the samples in the
  buffer.

Workers take turns: with W workers, worker *w* answers the requests *w*, *w + W*, *w + 2W*, …. A
worker whose data have ended returns an empty reply. The order of the batches is the same as that of
a ``DataLoader``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, get_worker_info

from trainer.data.libraries import (
    drop_iterator_of_state,
    has_shuffle_buffer,
    resumes_by_replay,
)
from trainer.data.seeding import (
    LazyGenerators,
    NamedGenerators,
    generators_in,
    group_equal,
    identity_collate,
    isolated_generators,
)
from trainer.data.workers import SignalSafeLoader, SignalSafeWorker, reading_kwargs
from trainer.distributed.objects import all_gather_object
from trainer.errors import CheckpointError, module_logger
from trainer.rng import isolated_rng, mix, seed_generators, seeded_iteration
from trainer.tree import leaves

logger = module_logger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
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


Item = tuple[Any, Position]  # a batch and the position after it


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
        self._equal_generators = group_equal(_collate_generators(self))
        self._own: NamedGenerators = {}
        self._lazy = LazyGenerators("The collate_fn")

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
        self._own = _collate_generators(self)
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
        with isolated_generators(self._own, mix(request.seed, 1), self._equal_generators):
            batch = self.collate_fn(items if self.batch_size is not None else items[0])
        if self._lazy.is_pending:
            self._own = self._lazy.search(partial(_collate_generators, self), self._own)
        return Reply(batch, pickled_state(self.dataset), self._ended)


def _collate_generators(loader: Any) -> NamedGenerators:
    """Find the generators of a ``collate_fn`` that its dataset does not have too."""
    saved = set(map(id, generators_in(dataset=loader.dataset).values()))
    generators = generators_in([loader.dataset], collate_fn=loader.collate_fn)
    return {path: generator for path, generator in generators.items() if id(generator) not in saved}


def pickled_state(owner: Any) -> bytes:
    """Pickle ``owner.state_dict()`` immediately, because later reads may change its objects.

    Raises:
        RuntimeError: ``state_dict`` raised an error, or its result cannot be pickled.
    """
    try:
        return pickle.dumps(owner.state_dict())
    except Exception as error:
        raise RuntimeError(
            "The position in the training stream cannot be saved: "
            f"{type(owner).__name__}.state_dict() raised {type(error).__name__}: {error}. It "
            "must be callable at any time and return a tree of tensors, numbers and strings. "
            "Without it, a resume reads the stream again from its beginning."
        ) from error


def stateful_source(source: Any) -> Any:
    """Return the object with a state that keeps its position after a partial read.

    It is an iterable of batches, or an iterable dataset without workers (workers read copies); None
    if there is none.
    """
    owner = source
    if isinstance(source, DataLoader):
        owner = None if source.num_workers else source.dataset
        if not isinstance(owner, IterableDataset) or isinstance(owner, IterDataPipe):
            return None
    return owner if _has_state(owner) else None


def initial_state(owner: Any) -> bytes | None:
    """Pickle the state of an unread stream; None if it has none before a pass begins."""
    if owner is None:
        return None
    with suppress(RuntimeError):
        state = pickled_state(owner)
        drop_iterator_of_state(owner)
        return state
    return None


class _Requests:
    """A sampler that yields the requests of a pass, without end."""

    def __init__(self, position: Position, seed: int, workers: int) -> None:
        self.position, self.seed, self.workers = position, seed, workers

    def __iter__(self) -> Iterator[Request]:
        position, workers = self.position, self.workers
        first = position.number
        for number in count(first - first % workers):
            if number < first:
                yield Request(None)
                continue
            # Requests do not end: it is unknown in advance which worker's data end first.
            request = Request(mix(self.seed, number))
            if number < first + workers:
                worker = number % workers
                state = position.states[worker] if position.states else None
                ended = bool(position.ended) and position.ended[worker]
                request = Request(request.seed, self.seed, state, ended)
            yield request


class DatasetReading:
    """Reads a loader whose dataset has ``state_dict`` and ``load_state_dict``.

    Attributes:
        kind: The kind of position that is saved: ``"dataset"``, ``"loader"`` or ``"none"``.
        name: The class name of the object that has the state.
        workers: The number of data-loader workers.
    """

    kind = "dataset"

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator) -> None:
        self.name, self.workers = type(loader.dataset).__name__, loader.num_workers
        self._reader = StreamReader(loader)
        self._kwargs = reading_kwargs(loader) | {
            "dataset": self._reader,
            "collate_fn": identity_collate,
            "batch_size": None,
            "generator": generator,
            "worker_init_fn": SignalSafeWorker(loader.worker_init_fn, wrapped=True),
            # No checkpoint holds the state of a worker, and set_epoch would not reach it.
            "persistent_workers": False,
        }

    def start(self, *, first: bool) -> Position:
        """Return the position at which a pass begins.

        Args:
            first: Whether it is the first pass, before which nothing was read.
        """
        if first or self.workers:  # unread, or read only by copies in workers
            return Position()
        return Position(states=(pickled_state(self._reader.dataset),))

    def read(self, position: Position, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """Yield the batches from a position on, each with the position after it.

        Args:
            position: The position to read from.
            seed: The seed of the pass.
            load: Restore the state of the position first. If False, the stream is already at the
                position.
        """
        workers = self.workers or 1
        begin = position.number - position.number % workers
        states = list(position.states or [None] * workers)
        ended = list(position.ended or [False] * workers)
        requests = _Requests(position if load else replace(position, states=()), seed, workers)
        loader = SignalSafeLoader(**self._kwargs, sampler=requests)
        try:
            for number, reply in enumerate(loader, begin):
                if number < position.number:
                    continue
                worker = number % workers
                ended[worker] = reply.ended
                if reply.state is None:
                    if all(ended):
                        return
                    continue
                states[worker] = reply.state
                position = Position(position.batches + 1, number + 1, tuple(states), tuple(ended))
                yield reply.batch, position
        finally:
            self._reader.leave()


class SourceReading:
    """Reads a loader, or iterable of batches, that has ``state_dict`` and ``load_state_dict``."""

    kind = "loader"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        self._equal_generators = group_equal(self._without_state())
        self._lazy = LazyGenerators(f"The loader ({self.name})")

    def _without_state(self) -> NamedGenerators:
        """Find the generators that this process draws from and that the loader's state lacks."""
        if not isinstance(self._source, DataLoader) or self.workers:
            return {}
        dataset, generators = self._source.dataset, _collate_generators(self._source)
        # Leave out generators of an iterable dataset, whose order may continue from them, and of a
        # dataset with a state, which may hold them.
        if not (isinstance(dataset, IterableDataset) or hasattr(dataset, "load_state_dict")):
            generators |= generators_in(dataset=dataset)
        return generators

    def start(self, *, first: bool) -> Position:
        """See `DatasetReading`."""
        return Position() if first else Position(states=(pickled_state(self._source),))

    def read(self, position: Position, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `DatasetReading`."""
        with isolated_rng(seed):
            if load and position.states and position.states[0] is not None:
                self._source.load_state_dict(pickle.loads(position.states[0]))  # noqa: S301 - made here
            batches = iter(self._source)
        generators = self._without_state()
        for number in count(position.number):
            drawn = mix(seed, number)
            with (
                isolated_rng(drawn),
                isolated_generators(generators, mix(drawn, 1), self._equal_generators),
            ):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if self._lazy.is_pending:
                generators = self._lazy.search(self._without_state, generators)
            position = Position(
                position.batches + 1, number + 1, (pickled_state(self._source),), (False,)
            )
            yield batch, position


class PlainReading:
    """Reads a stream that has no state, and counts its batches."""

    kind = "none"

    def __init__(self, source: Any) -> None:
        self.name, self.workers = type(source).__name__, getattr(source, "num_workers", 0)
        self._source = source
        data = getattr(source, "dataset", None)  # on other iterables it may be, say, a string
        stream = data if isinstance(source, DataLoader) or isinstance(data, Dataset) else source
        owner = f"The stream ({type(stream).__name__}) or its collate_fn"
        self._lazy = LazyGenerators(owner, "pass")

    def start(self, *, first: bool) -> Position:
        """See `DatasetReading`."""
        del first
        return Position()

    def read(self, position: Position, seed: int, *, load: bool) -> Generator[Item, None, None]:
        """See `DatasetReading`."""
        del position, load
        find = partial(generators_in, loader=self._source)
        generators = find() if self._lazy.is_pending and not self.workers else {}
        batches = seeded_iteration(self._source, seed)
        for number, batch in enumerate(batches, 1):
            # Search once per pass. A generator that the stream creates again in each pass is no
            # problem: its seed depends on the stream's own data.
            if number == 1 and self._lazy.is_pending and not self.workers:
                self._lazy.search(find, generators)
            yield batch, Position(number, number)


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
        shown: Whether this process logs a replay.
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
        self._used: Position | None = None
        self._over = ""
        owner = stateful_source(source)
        saved = self._reading.kind == "dataset" or owner is source
        self._continues = owner if saved and self._reading.kind != "none" else None
        self._initial: bytes | None = None  # its state before the first pass
        self._before_last = Position()
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
        self._initial = initial_state(self._continues) if self._fresh else self._initial
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
        position, has_state = Position(), False
        if pending is not None and pending["over"]:
            self._finish(pending, seed)
            self._set_epoch(epoch)
        elif pending is not None:
            position = _position_of(pending)
            has_state = pending["epoch"] == epoch
        unknown = self._resumed and self._fresh and not has_state and epoch
        if unknown and self._iterator is not None and self._shown:
            logger.warning(
                "The training loader is an iterator (%s) without state_dict and load_state_dict: "
                "unless its __iter__ restarts, epoch %d does not continue where the run ended.",
                self._iterator,
                epoch + 1,  # as progress bars print it
            )
        if not has_state:
            position = self._reading.start(first=self._fresh)
        self._fresh = False
        # 3. Read, discarding batches that were used after the position.
        batches = self._reading.read(position, mix(seed, epoch, 2), load=has_state)
        if again := skip - (position.batches if has_state else 0):
            if self._shown:
                self.warn_of_replay(again)
            for _, position in islice(batches, again):
                self._before_last = position
        self._before_last, self._cut = position, limit is not None and position.batches >= limit
        while not self._cut:
            following = next(batches, None)
            if following is None:
                return
            self._before_last, position = position, following[1]
            self._cut = position.batches == limit
            yield following

    def _finish(self, saved: dict[str, Any], seed: int) -> None:
        """Bring the stream to the end of a saved pass, by reading the last batch of the pass again.

        Loading the state after the last batch would be wrong for some datasets: they would continue
        from it in the next pass, although they would have restarted without the interruption. If
        the pass has only one batch, the state before it is that of the previous pass's end, from
        which such datasets yield nothing. The pass is then read without loading a state.
        """
        self._set_epoch(saved["epoch"])
        position, pass_seed = _position_of(saved), mix(seed, saved["epoch"], 2)
        most = 1 if saved["over"] == "cut" else None
        for load in (True, False):
            with closing(self._reading.read(position, pass_seed, load=load)) as batches:
                if sum(1 for _ in islice(batches, most)):
                    break
        self._fresh = False

    def _beginning(self, epoch: int) -> dict[str, Any] | None:
        """Return the position at the beginning of the pass after the latest one."""
        if self._over:
            return self.position()
        position = self._reading.start(first=self._reading.kind != "dataset")
        return self._saved(position, epoch, "")

    def warn_of_replay(self, batches: int) -> None:
        """Warn that batches of a stream are read again and discarded."""
        hint = (
            " To avoid this, give the dataset state_dict and load_state_dict, which include its "
            "buffers."
        )
        logger.warning(
            "Resuming inside an epoch of a stream: %d batches are read again and discarded.%s",
            batches,
            hint if self._reading.kind == "none" else "",
        )

    def used(self, position: Position, *, last: bool) -> None:
        """Record that the run has used the batches up to a position.

        Args:
            position: The position after the used batches.
            last: Whether the epoch ends there.
        """
        self._used = position
        self._over = "" if not last else "cut" if self._cut else "end"

    def leave(self) -> None:
        """Record that the run has left the pass; the next one begins as the first one did.

        Without workers the stream itself is inside the pass, so its first state is restored.
        """
        self._used = self._pending = None
        if self._initial is not None:
            self._pending = self._saved(Position(states=(self._initial,)), self._epoch + 1, "")
        self._position = self._pending

    def position(self) -> dict[str, Any] | None:
        """Return the run's position in the stream, as a tree for a checkpoint.

        It is None if there is nothing to save: nothing has been used yet, or the pass is finished
        and the next one does not depend on a state.
        """
        reading, position = self._reading, self._used
        if self._rereads and reading.kind == "none":
            return None
        if position is None:
            return self._position or (self._beginning(self._epoch) if self._rereads else None)
        if self._over:
            if reading.kind == "none" or (reading.kind == "dataset" and reading.workers):
                return None
            position = self._before_last
        saved = self._saved(position, self._epoch, self._over)
        if self._rereads and self._begin is not None:
            saved["begin"] = {**self._begin, "begin": None}
        return saved

    def _saved(self, position: Position, epoch: int, over: str) -> dict[str, Any]:
        reading = self._reading
        return {
            "kind": reading.kind,
            "workers": reading.workers,
            "epoch": epoch,
            "over": over,
            "batches": position.batches,
            "number": position.number,
            # Keyed by the class name, which then appears in the error if a state cannot be saved.
            "states": [
                None if state is None else {reading.name: pickle.loads(state)}  # noqa: S301 - made here
                for state in position.states
            ],
            "ended": list(position.ended),
        }

    def resume_at(self, position: dict[str, Any] | None) -> None:
        """Begin the next pass at a saved position.

        Args:
            position: The result of `position`, or None.

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
                f"The checkpoint was saved inside an epoch of a stream that {saved} workers "
                f"read, but this loader has {here}. The number of workers determines the next "
                f"samples: set num_workers={saved}, or resume from a checkpoint at the end of an "
                "epoch."
            )
        self._position = position
        if position["kind"] == kind != "none" and not (other and position["over"]):
            self._pending = position


def _position_of(saved: dict[str, Any]) -> Position:
    return Position(
        saved["batches"],
        saved["number"],
        tuple(
            None if state is None else pickle.dumps(next(iter(state.values())))
            for state in saved["states"]
        ),
        tuple(saved["ended"]),
    )


def _choose_reading(
    source: Any, loader: Any, generator: torch.Generator, *, remember: bool
) -> DatasetReading | SourceReading | PlainReading:
    if not remember:
        return PlainReading(loader)
    if loader is source:
        return SourceReading(source) if _has_state(source) else PlainReading(source)
    data = loader.dataset
    plain = not _has_state(data) or isinstance(data, IterDataPipe)
    return PlainReading(loader) if plain else DatasetReading(source, generator)


def has_stream_state(source: Any) -> bool:
    """Return whether a source or its dataset has a state, which then covers its generators."""
    return _has_state(source) or _has_state(getattr(source, "dataset", None))


def _has_state(source: Any) -> bool:
    """Return whether an object has a ``state_dict`` that holds its position in the data."""
    names = ("state_dict", "load_state_dict")
    if getattr(source, "_is_accelerate_prepared", False) or resumes_by_replay(source, _has_state):
        return False  # the state of a prepared loader names the pass, not the position inside it
    return all(callable(getattr(source, name, None)) for name in names) and not has_shuffle_buffer(
        source
    )


def check_same_stream(stream: Iterator[Item]) -> Iterator[Item]:
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
    if len({repr(checksum) for checksum in all_gather_object(sums)}) > 1:
        raise ValueError(
            "The stream starts with a different batch on each process. Every process reads the "
            "whole stream and keeps its share of the batches: give all processes the same "
            "stream. If each is meant to read a different part of the data, set "
            "dataloader_config=DataLoaderConfiguration(presharded=True)."
        )
    return chain(first, stream)
