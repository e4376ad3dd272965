"""Knowledge about the data of other libraries: `datasets`, webdataset and torchdata.

None of these libraries is imported here. Their classes are looked up if the program has imported
them.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

from torch.utils.data import IterableDataset, Subset

from trainer.data.seeding import reachable

_COMPARED = 1_000  # indices of a subset that are compared


def user_shard(source: Any) -> tuple[int, int] | None:
    """Return (part, number of parts) of a stream that its user split by process.

    This is known for streams of `datasets` (``split_dataset_by_node``) and webdataset
    (``split_by_node``, ``resampled=True``); None for all others.
    """
    config = _imported("datasets.iterable_dataset", "DistributedConfig")
    splitter = _imported("webdataset.shardlists", "split_by_node")
    resampled = _imported("webdataset.shardlists", "ResampledShards")
    if config is None and splitter is None:
        return None
    for _, thing in reachable(source=source):
        if type(thing) is config:
            return thing.rank, thing.world_size
        if thing is splitter or type(thing) is resampled:
            rank, world_size, *_ = sys.modules["webdataset.utils"].pytorch_worker_info()
            return rank, world_size
    return None


def has_shuffle_buffer(source: Any) -> bool:
    """Return whether a stream has a shuffle buffer of `datasets`, which its state does not hold.

    After ``load_state_dict`` the samples in the buffer would be missing; `datasets` warns of this.
    """
    kind = _imported("datasets.iterable_dataset", "BufferShuffledExamplesIterable")
    return kind is not None and any(type(thing) is kind for _, thing in reachable(source=source))


def resumes_by_replay(source: Any, has_state: Callable[[Any], bool]) -> bool:
    """Return whether torchdata's loader resumes this stream only by reading it again.

    Such a replay would not repeat the random numbers that were drawn.
    """
    data = getattr(source, "dataset", None)
    return (
        type(source).__module__.startswith("torchdata.")
        and isinstance(data, IterableDataset)
        and not has_state(data)
        and inspect.isgeneratorfunction(type(data).__iter__)  # other iterators may have a state
    )


def drop_iterator_of_state(source: Any) -> None:
    """Make the next iterator of a torchdata nodes loader begin at the state loaded before it.

    After a ``state_dict`` outside a pass, the next iterator is one that ``state_dict`` created,
    which ignores states loaded since.
    """
    if type(source) is _imported("torchdata.nodes.loader", "Loader"):
        iter(source)


def seed_shuffles(source: Any, seed: int) -> None:
    """Make webdataset's shuffles a function of the seed and the epoch.

    Without ``rng`` or ``seed``, sample shuffles draw from the clock, and shard shuffles from a seed
    that the dataset drew at its creation, so a pass could not be read again. Such stages are given
    generators, which are seeded in each epoch like all generators of a stream.

    Args:
        source: The user's loader or stream.
        seed: The seed of the stages that count their epochs themselves.
    """
    of_shards = [data.seed for data in _instances(source, "webdataset.compat", "WebDataset")]
    shuffle = _imported("webdataset.filters", "_shuffle")
    for number, stage in enumerate(_instances(source, "webdataset.filters", "FilterFunction")):
        options = stage.kw
        if stage.f is not shuffle or len(stage.args) > 2 or options.get("rng") is not None:
            continue  # its positional arguments are bufsize, initial and rng
        if options.get("seed") is None or options["seed"] in of_shards:
            stage.kw = {**options, "seed": None, "rng": random.Random(number)}
    for stage in _instances(source, "webdataset.filters", "detshuffle"):
        stage.seed = seed if stage.seed in of_shards else stage.seed
    for shards in _instances(source, "webdataset.shardlists", "ResampledShards"):
        shards.deterministic = True


def set_epoch_of_shuffles(source: Any, epoch: int) -> None:
    """Set the next pass of webdataset's epoch-based shuffles, which count passes themselves."""
    for module, name in (("filters", "detshuffle"), ("shardlists", "ResampledShards")):
        for stage in _instances(source, f"webdataset.{module}", name):
            stage.epoch = epoch - 1


def samples_mark(dataset: Any) -> list[int]:
    """Return numbers that differ if processes hold different parts of map-style data.

    They are known for a ``Subset``, from its indices, and for `datasets`, from the first sample.
    """
    marks = []
    table = _imported("datasets.arrow_dataset", "Dataset")
    for _, thing in reachable(dataset=dataset):
        if type(thing) is Subset:
            marks.append(crc32(repr(list(thing.indices[:_COMPARED])).encode()))
        elif type(thing) is table and len(thing):
            first = thing.with_format("arrow")[0]  # in stored form, without decoding
            marks.append(crc32(repr(first.to_pylist()).encode()))
    return marks


def _instances(source: Any, module: str, name: str) -> Iterator[Any]:
    kind = _imported(module, name)
    if kind is not None:
        yield from (thing for _, thing in reachable(source=source) if type(thing) is kind)


def _imported(module: str, name: str) -> Any:
    """Return an object of a library; None if the program has not imported it."""
    return getattr(sys.modules.get(module), name, None)
