"""The loaders that `Accelerator.prepare` returns, reading on every process."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.feed import Feed
from trainer.data.own_generators import of_order
from trainer.data.prefetch import Streams, send, streams_for
from trainer.data.rebuild import users_kwargs, what_kwargs
from trainer.data.rounds import ahead
from trainer.data.sampling import EpochLength
from trainer.rng import as_types, synchronize_rng_states
from trainer.state import GradientState
from trainer.tree import children, to_device

Given: TypeAlias = "tuple[Any, bool, bool, int | None, int | None]"
"""A batch of this process, and what is known of its round.

Whether it is the last one here, and whether it is of the last round of all processes; the samples
in the round that are not repeated, None if unknown; and how many processes, from rank 0 on, have a
batch that is not repeated whole, if others have one that is and the samples are unknown.
"""


class PreparedLoader(DataLoader[Any]):
    """What the prepared loaders share: the user's loader, its share of the data, its passes.

    It is a ``DataLoader`` with the user's dataset and settings, so that code which inspects these
    attributes finds them. Subclasses read in `_batches`.

    Args:
        source: The user's loader; it is not changed.
        rank: This process.
        world_size: The number of processes.
        seed: The same on all processes.
        even_batches: Every process gets the same number of batches of the same size, for which
            samples from the beginning are repeated at the end.
        device: The device for batches; None leaves them where they are.
        non_blocking: Copy asynchronously, on a stream beside the one that computes; see
            `trainer.data.prefetch`.
        split_batches: Each batch of the user's loader is split between the processes; otherwise
            each process gets whole batches.
        rng_types: Generators that take rank 0's state when a pass begins; see `synchronized`.
        skip_batches: Batches of this process that each pass skips at its beginning.
        stateful: The pass after `load_state_dict` continues after the last batch handed out.

    Attributes:
        iteration: The current or next pass, counted from 0; it determines the order. A pass that
            was left by ``break`` counts once the next one begins.
        end_of_dataloader: Whether the current batch is the last one of this process.
        remainder: At the last batch: the samples in the last global batch that are not repeated; 0
            if it is full; -1 before, and with ``drop_last``.
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
        stateful: bool = False,
    ) -> None:
        self.settings: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "seed": seed,
            "even_batches": even_batches,
            "device": device,
            "non_blocking": non_blocking,
            "split_batches": split_batches,
            "rng_types": None if rng_types is None else as_types(rng_types),
            "skip_batches": skip_batches,
            "stateful": stateful,
        }
        self.rank, self.world_size = rank, world_size
        self.device, self.non_blocking = device, non_blocking
        self.split_batches, self.skip_batches = split_batches, skip_batches
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self._real_batches: int | None = None  # at the last batch, see `Given`
        self._all_end = False  # whether the current batch is of the last round of all processes
        self._unfinished = False
        self._resume_at = 0  # batches of the next pass, over all processes, read before a restart
        self._read_rounds = [0]  # of the current pass; a DataLoader is slow to set
        self._reader: PreparedLoader | None = (
            None  # which loader reads the pass: this one or one that skips
        )
        self._ended = False  # whether the latest pass was read to its last batch
        self._loaded = False  # whether its pass was loaded and has not begun
        self._rest_of: PreparedLoader | None = None  # the loader whose pass this one continues
        self._take(source)
        super().__init__(**users_kwargs(source), **what_kwargs(source, self.feed.sampler))

    def _take(self, source: DataLoader[Any]) -> None:
        self.source = source
        batches = source.batch_sampler
        self._drops_last = bool(source.drop_last or getattr(batches, "drop_last", False))
        self.feed = self._make_feed(source)

    @abstractmethod
    def _make_feed(self, source: DataLoader[Any]) -> Feed:
        """Create the feed that reads the user's loader on this process."""

    @abstractmethod
    def _batches(self) -> Iterator[Given]:
        """Yield this process's batches."""

    def __iter__(self) -> Any:
        """Yield the batches of this process."""
        self._synchronize()
        self._tell(self.iteration + self._unfinished, unfinished=True)
        self._read_by(self)
        self.feed.set_epoch(self.iteration)
        for loader in self._wholes():
            loader.feed.length = self.feed.length_now
        self.end_of_dataloader, self.remainder, self._real_batches = False, -1, None
        self._all_end = False
        resume_at = self._resume_at if self.settings["stateful"] else 0
        self.first_round, self._resume_at = self.skip_batches + resume_at // self._per_round, 0
        rounds = self._read_rounds = [self.first_round]
        state = self.gradient_state
        state._add_dataloader(self)
        try:
            for batch, last, over, real, real_batches in self._batches():
                rounds[0] += 1
                self.end_of_dataloader = last
                if over is not self._all_end:  # a DataLoader is slow to set
                    self._all_end = over
                if real_batches is not self._real_batches:
                    self._real_batches = real_batches
                if last and real is not None and not self._drops_last:
                    self.remainder = 0 if real == self.total_batch_size else real
                self.__dict__["_batch"] = batch  # a DataLoader is slow to set
                yield batch
            self._tell(self.iteration + 1, unfinished=False)
        except GeneratorExit:  # the caller's loop was left by break
            state._keep_end(self)
            for loader in self._wholes():
                if loader._reader is self:
                    loader._ended = self.end_of_dataloader
            raise
        finally:
            self.__dict__["_batch"] = None
            self._read_by(None)
            state._remove_dataloader(self)

    def _wholes(self) -> Iterator[PreparedLoader]:
        """Yield this loader and those whose pass it continues."""
        loader: PreparedLoader | None = self
        while loader is not None:
            yield loader
            loader = loader._rest_of

    def _tell(self, iteration: int, *, unfinished: bool) -> None:
        for loader in self._wholes():
            loader.iteration, loader._unfinished, loader._loaded = iteration, unfinished, False
            loader._ended = not unfinished
            if not unfinished:
                loader.feed.resume_length(iteration, None)

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
        """The generator meant by ``"generator"`` in `rng_types`: the sampler's or the stream's."""
        if isinstance(self.source.dataset, IterableDataset):
            return getattr(self.source.dataset, "generator", None)
        return of_order(self.source)

    @property
    def _streams(self) -> Streams | None:
        """The streams that copy batches; None if the computing stream does."""
        if self.device is None or not self.non_blocking:
            return None
        return streams_for(torch.device(self.device))

    def _transfer(self, streams: Streams | None) -> Callable[[Any], Any] | None:
        """Return a function that puts a batch on the device, or begins to if there are streams."""
        if self.device is None:
            return None
        move = partial(to_device, device=self.device, non_blocking=self.non_blocking)
        return move if streams is None else partial(send, move=move, streams=streams)

    @property
    def gradient_state(self) -> GradientState:
        """The state that tracks which loader is being read."""
        return GradientState()

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of batches; may be set between passes."""
        return bool(self.settings["even_batches"])

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.settings["even_batches"] = even
        self.feed.even = even and self.feed.world_size > 1

    @property
    def total_batch_size(self) -> int | None:
        """The samples in a batch over all processes; None for batches without a fixed size."""
        size = self.source.batch_size
        if size is None:
            size = getattr(self.source.batch_sampler, "batch_size", None)
        return size if size is None or self.split_batches else size * self.world_size

    @property
    def _batch_sizes(self) -> frozenset[int]:
        """The numbers that may count the samples in this process's current batch."""
        batch = self.__dict__.get("_batch")
        columns = [batch, *(value for _, value in children(batch) or ())]
        found = {len(each) for each in columns if isinstance(each, (list, tuple))}
        found |= {len(each) for each in columns if isinstance(each, Tensor) and each.ndim}
        nominal = self.total_batch_size
        return frozenset(found if nominal is None else found | {nominal // self.world_size})

    @property
    def total_dataset_length(self) -> int:
        """The samples in the dataset, over all processes."""
        return len(self.source.dataset)  # type: ignore[arg-type]  # a stream may have no length

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; by default each pass takes the next one.

        The ``set_epoch`` of the sampler, the batch sampler and the dataset is called, if any.
        """
        if epoch != self.iteration:  # or else a loaded pass goes on
            self._resume_at, self.feed.resumed = 0, None
        self.iteration = epoch
        self._unfinished = self._loaded = self._ended = False
        self.feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the pass to read after a restart, the seed, and whether one has just ended.

        Inside a pass it is that pass, which `skip_first_batches` continues, and how much data there
        was when it began; from its last batch on, or after a ``break``, it is the next one.
        """
        ended = self._ended if self._reader is None else self._reader.end_of_dataloader
        over = self._unfinished and (ended or self._reader is None)
        resumed = self.feed.resumed and self.feed.resumed[1]
        length = resumed if self._reader is None else self.feed.length
        batches = self._resume_at
        if self._reader is not None:
            batches = self._reader._read_rounds[0] * self._per_round
        return {
            "iteration": self.iteration + over,
            "seed": self.settings["seed"],
            "ended": int(ended),
            "length": None if over or length is None else list(length),
            "stream": self.feed.position(),
            "batches": 0 if over else batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the pass and the order from a saved state."""
        self.settings["seed"] = state["seed"]
        self.feed.reseed(state["seed"])
        self.set_epoch(state["iteration"])
        # An earlier release saved neither a length nor batches.
        length = state.get("length")
        self.feed.resume_length(self.iteration, None if length is None else EpochLength(*length))
        self._resume_at = state.get("batches", 0)
        if self.settings["stateful"] and self._resume_at % self._per_round:
            raise ValueError(
                f"The loader was saved after {self._resume_at} batches of a pass, which are no "
                f"whole number for each of {self.world_size} processes. Resume with another "
                "number of processes, or save at the end of a pass."
            )
        self._loaded, self._ended = True, bool(state.get("ended"))
        self.feed.resume_at(state.get("stream"))

    @property
    def _per_round(self) -> int:
        """The number of the user's batches in a round."""
        return 1 if self.split_batches else self.world_size

    def get_sampler(self) -> Any:
        """Return the user's sampler."""
        batches = self.source.batch_sampler
        return getattr(batches, "sampler", batches) if batches is not None else self.source.sampler

    def set_sampler(self, sampler: Any) -> None:
        """Use another sampler from the next pass on.

        Raises:
            ValueError: The loader's own batch sampler does not use a sampler.
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
        # A DataLoader's attribute cannot be set twice. The feed reads; this is for inspection only.
        self.__dict__["sampler" if batches is None else "batch_sampler"] = self.feed.sampler

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one, in the same pass, that skips more batches at its start.

        Reading it counts as this loader's pass: this one then continues with the next.
        """
        skip = self.skip_batches + num_batches
        skipped = type(self)(self.source, **(self.settings | {"skip_batches": skip}))
        skipped.iteration = self.iteration
        # A pass that was left may go on although the dataset has grown.
        length = (
            self.feed.length if self._unfinished else self.feed.resumed and self.feed.resumed[1]
        )
        skipped.feed.resume_length(self.iteration, length)
        if self.feed.sampler is None:
            skipped.feed.share_stream(self.feed)
        skipped._rest_of, skipped._loaded, skipped._ended = self, self._loaded, self._ended
        if self._loaded and self._ended and num_batches and self.iteration:
            # A state saved at the last batch names the next pass already, but a script may skip all
            # batches of the previous one. Its own length would tell each process something else,
            # and another number of processes may leave out more or fewer with drop_last.
            skipped.iteration, skipped._loaded = self.iteration - 1, False
        return skipped

    def __len__(self) -> int:
        own = self.feed.num_own_batches
        if own is None:
            raise TypeError("The loader reads a stream that has no length.")
        return max(0, own - self.skip_batches)


class DataLoaderShard(PreparedLoader):
    """The loader that `Accelerator.prepare` returns: this process's part of the user's loader.

    Batches arrive on the device and are read one ahead, so that ``end_of_dataloader`` is true at
    the last one. The order of a shuffling loader is a function of the seed and the pass, the same
    on all processes and for any number of them; it changes with every pass.

    With *N* processes, process *i* gets batch *i* of every *N*; with `split_batches` the *i*-th
    part of every batch. A stream is read whole by every process, each keeping its part. With
    `even_batches`, the last round is filled with samples of the first one until every process has a
    full batch; ``gather_for_metrics`` drops them again. With ``drop_last`` an incomplete round is
    left out.
    """

    def _make_feed(self, source: DataLoader[Any]) -> Feed:
        options = self.settings
        return Feed(
            source,
            rank=self.rank,
            world_size=self.world_size,
            seed=options["seed"],
            even=options["even_batches"] and self.world_size > 1,
            split=self.split_batches and self.world_size > 1,
            drop_last=self._drops_last and self.world_size > 1,
            remember=True,
            rereads=True,
        )

    def _batches(self) -> Iterator[Given]:
        streams = self._streams
        self.feed.start_round = self.first_round
        for current, following in ahead(self.feed.read(self._transfer(streams))):
            if current.place is not None:
                self.feed.used(current.place, last=following is None)
            if current.present:
                last = following is None or not following.present
                batch = current.batch if streams is None else current.batch.arrive()
                real, whole = current.real_samples, current.real_batches
                repeats = real is None and whole is not None and whole < current.batches
                over = following is None
                yield batch, last, over, real, whole if repeats else None
