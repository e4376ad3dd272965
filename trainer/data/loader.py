"""The loaders that `Accelerator.prepare` returns, reading on every process."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.feed import Feed
from trainer.data.own_generators import of_order
from trainer.data.prefetch import Streams, send, streams_for
from trainer.data.rebuild import users_kwargs, what_kwargs
from trainer.data.rounds import ahead
from trainer.rng import synchronize_rng_states
from trainer.state import GradientState
from trainer.tree import to_device


class PreparedLoader(DataLoader[Any]):
    """What the prepared loaders share: the user's loader, its place among processes, its passes.

    It is a ``DataLoader`` with the user's dataset and settings, so that those who ask for its
    attributes find them. Reading is up to `_batches`.

    Args:
        source: The user's loader; it is not changed.
        rank: This process.
        world_size: How many there are.
        seed: The same on all processes.
        even_batches: Every process gets as many batches, the same size each, where samples of the
            beginning are repeated at the end for that.
        device: Where batches are put; None leaves them where they are.
        non_blocking: Copy asynchronously, by a stream beside the one that computes; see
            `trainer.data.prefetch`.
        split_batches: A batch of the user's loader is shared out; else each process gets whole
            ones.
        rng_types: Generators that take rank 0's state when a pass begins; see `synchronized`.
        skip_batches: Batches of this process that each pass leaves out at its beginning.

    Attributes:
        iteration: The pass that comes next or is being read, counted from 0; it decides the order.
            A pass that was left by ``break`` counts when the next one begins.
        end_of_dataloader: The batch at hand is the last one of this process.
        remainder: With the last batch at hand: samples in the last global batch that are not
            repeated ones; 0 if that batch is a full one; -1 before, and with ``drop_last``.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        source: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        even_batches: bool,
        device: torch.device | None,
        non_blocking: bool,
        split_batches: bool = False,
        rng_types: Sequence[str] | None = None,
        skip_batches: int = 0,
    ) -> None:
        self.settings: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "seed": seed,
            "even_batches": even_batches,
            "device": device,
            "non_blocking": non_blocking,
            "split_batches": split_batches,
            "rng_types": None if rng_types is None else list(rng_types),
            "skip_batches": skip_batches,
        }
        self.rank, self.world_size = rank, world_size
        self.device, self.non_blocking = device, non_blocking
        self.split_batches, self.skip_batches = split_batches, skip_batches
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self._unfinished = False
        self._reader: PreparedLoader | None = None  # who reads the pass now: this one or a rest
        self._loaded = False  # its pass was loaded and has not begun
        self._rest_of: PreparedLoader | None = None  # whose pass this one goes on with
        self._take(source)
        super().__init__(**users_kwargs(source), **what_kwargs(source, self.feed.sampler))

    def _take(self, source: DataLoader[Any]) -> None:
        self.source = source
        batches = source.batch_sampler
        self._drops_last = bool(source.drop_last or getattr(batches, "drop_last", False))
        self.feed = self._make_feed(source)

    @abstractmethod
    def _make_feed(self, source: DataLoader[Any]) -> Feed:
        """What reads the user's loader on this process."""

    @abstractmethod
    def _batches(self) -> Iterator[tuple[Any, bool, int | None]]:
        """This process's batches; whether each is its last one; real samples in its round."""

    def __iter__(self) -> Any:
        """The batches of this process."""
        self._synchronize()
        self._tell(self.iteration + self._unfinished, unfinished=True)
        self._read_by(self)
        self.feed.set_epoch(self.iteration)
        self.end_of_dataloader, self.remainder = False, -1
        state = self.gradient_state
        state._add_dataloader(self)
        try:
            for batch, last, real in self._batches():
                self.end_of_dataloader = last
                if last and real is not None and not self._drops_last:
                    self.remainder = 0 if real == self.total_batch_size else real
                yield batch
            self._tell(self.iteration + 1, unfinished=False)
        except GeneratorExit:  # the caller's loop was left by break
            state._keep_end(self)
            raise
        finally:
            self._read_by(None)
            state._remove_dataloader(self)

    def _wholes(self) -> Iterator[PreparedLoader]:
        """This loader and those that it is the rest of: its pass counts as theirs."""
        loader: PreparedLoader | None = self
        while loader is not None:
            yield loader
            loader = loader._rest_of

    def _tell(self, iteration: int, *, unfinished: bool) -> None:
        for loader in self._wholes():
            loader.iteration, loader._unfinished, loader._loaded = iteration, unfinished, False

    def _read_by(self, reader: PreparedLoader | None) -> None:
        for loader in self._wholes():
            if reader is not None or loader._reader is self:
                loader._reader = reader

    def _synchronize(self) -> None:
        generator = self.synchronized
        types = self.settings["rng_types"] or []
        if generator is None:
            types = [kind for kind in types if str(kind) != "generator"]
        synchronize_rng_states(types, generator)

    @property
    def synchronized(self) -> torch.Generator | None:
        """What ``"generator"`` in `rng_types` means: that of the sampler, or of the stream."""
        if isinstance(self.source.dataset, IterableDataset):
            return getattr(self.source.dataset, "generator", None)
        return of_order(self.source)

    @property
    def _streams(self) -> Streams | None:
        """What batches go to the device by, where that is not the stream that computes."""
        if self.device is None or not self.non_blocking:
            return None
        return streams_for(torch.device(self.device))

    def _transfer(self, streams: Streams | None) -> Callable[[Any], Any] | None:
        """What puts a batch on the device, or sends it there if there are streams."""
        if self.device is None:
            return None
        move = partial(to_device, device=self.device, non_blocking=self.non_blocking)
        return move if streams is None else partial(send, move=move, streams=streams)

    @property
    def gradient_state(self) -> GradientState:
        """The state that hears which loader is being read."""
        return GradientState()

    @property
    def even_batches(self) -> bool:
        """Every process gets as many batches; may be set between passes."""
        return bool(self.settings["even_batches"])

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.settings["even_batches"] = even
        self.feed.even = even and self.feed.world_size > 1

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch over all processes; None for batches of no size in particular."""
        size = self.source.batch_size
        if size is None:
            size = getattr(self.source.batch_sampler, "batch_size", None)
        return size if size is None or self.split_batches else size * self.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all processes."""
        return len(self.source.dataset)  # type: ignore[arg-type]  # a stream may have no length

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; without a call each pass takes the next one.

        The sampler, the batch sampler and the dataset hear of it if they have a ``set_epoch``.
        """
        self.iteration = epoch
        self._unfinished = self._loaded = False
        self.feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The pass to be read after a restart, and the seed of the order.

        Inside a pass it is that one, since `skip_first_batches` goes on in it; with its last batch
        at hand and after it, also if it was left by ``break``, the next.
        """
        inside = self._reader is not None and not self._reader.end_of_dataloader
        over = self._unfinished and not inside
        return {"iteration": self.iteration + over, "seed": self.settings["seed"]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the pass and the order of the loader that `state` is of."""
        self.settings["seed"] = state["seed"]
        self.feed.reseed(state["seed"])
        self.set_epoch(state["iteration"])
        self._loaded = True

    def get_sampler(self) -> Any:
        """The user's sampler."""
        batches = self.source.batch_sampler
        return getattr(batches, "sampler", batches) if batches is not None else self.source.sampler

    def set_sampler(self, sampler: Any) -> None:
        """Read in another sampler's order from the next pass on.

        Raises:
            ValueError: The loader's own batch sampler makes its batches without a sampler.
        """
        batches = self.source.batch_sampler
        if isinstance(self.source.dataset, IterableDataset):
            raise ValueError("A stream has no sampler that could be replaced; it yields in order.")
        if batches is not None:
            if not hasattr(batches, "sampler"):
                raise ValueError(
                    f"A {type(batches).__name__} makes its batches without a sampler that could be "
                    "replaced; prepare a loader with the batches that you want."
                )
            batches = copy.copy(batches)
            batches.sampler = sampler
        what = what_kwargs(self.source, sampler if batches is None else batches)
        self._take(DataLoader(**users_kwargs(self.source), **what))
        self.feed.set_epoch(self.iteration)
        # DataLoader itself lets nobody set it twice; reading is the feed's, this is for lookers.
        self.__dict__["sampler" if batches is None else "batch_sampler"] = self.feed.sampler

    def skipping(self, num_batches: int) -> PreparedLoader:
        """A loader as this one, in the same pass, without so many more batches at the beginning.

        Reading it counts as this loader's pass: this one then begins the next.
        """
        skip = self.skip_batches + num_batches
        skipped = type(self)(self.source, **(self.settings | {"skip_batches": skip}))
        skipped.iteration = self.iteration
        skipped._rest_of, skipped._loaded = self, self._loaded
        if self._loaded and num_batches and self.iteration and skipped._is_empty():
            # A state that was saved with the last batch at hand is of the next pass already, but a
            # script may leave out all batches of the one before.
            skipped.iteration, skipped._loaded = self.iteration - 1, False
        return skipped

    def _is_empty(self) -> bool:
        try:
            return len(self) == 0
        except TypeError:  # only reading can tell
            return False

    def __len__(self) -> int:
        own = self.feed.num_own_batches
        if own is None:
            raise TypeError("The loader reads a stream that has no length.")
        return max(0, own - self.skip_batches)


class DataLoaderShard(PreparedLoader):
    """The loader that `Accelerator.prepare` returns: this process's part of the user's loader.

    Batches come on the device, read one ahead so that ``end_of_dataloader`` is true while the last
    one is at hand. The order of a shuffling loader is a function of the seed and the pass, alike
    on all processes and on any number of them; it changes with every pass.

    Which batches a process gets: of *N* processes, process *i* gets batch *i* of every *N*; with
    `split_batches` the *i*-th part of every batch. A stream is read whole by every process, each
    keeping its part. With `even_batches`, the last round is filled with samples of the first one
    until every process has a full batch; ``gather_for_metrics`` drops them again. A loader with
    ``drop_last`` leaves an unfinished round out.
    """

    def _make_feed(self, source: DataLoader[Any]) -> Feed:
        options = self.settings
        feed = Feed(
            source,
            rank=self.rank,
            world_size=self.world_size,
            seed=options["seed"],
            even=options["even_batches"] and self.world_size > 1,
            split=self.split_batches and self.world_size > 1,
            drop_last=self._drops_last and self.world_size > 1,
        )
        feed.start_round = self.skip_batches
        return feed

    def _batches(self) -> Iterator[tuple[Any, bool, int | None]]:
        streams = self._streams
        for current, following in ahead(self.feed.read(self._transfer(streams))):
            if current.present:
                last = following is None or not following.present
                batch = current.batch if streams is None else current.batch.arrive()
                yield batch, last, current.real_samples
