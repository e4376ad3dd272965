"""Datasets of the numbers from 0 on, and a stand-in for streams of `datasets`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """Each index is its own sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


# A stand-in for streams of Hugging Face's `datasets`, with the names in its module
# ``datasets.iterable_dataset`` by which they are known.


class BufferShuffledExamplesIterable:
    """Yields samples in the order of a buffer, which no state holds."""

    def __init__(self, samples: list[int], buffer_size: int) -> None:
        self.samples, self.buffer_size = samples, buffer_size
        self.begin = self.read = 0

    def __iter__(self) -> Iterator[int]:
        generator = random.Random(3)
        buffer: list[int] = []
        begin, self.begin = self.begin, 0
        for sample in self.samples[begin:]:
            begin = self.read = begin + 1
            buffer.append(sample)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(generator.randrange(self.buffer_size))
        yield from buffer


@dataclass
class DistributedConfig:
    rank: int
    world_size: int


class HuggingFaceStream(IterableDataset[int]):
    """The numbers from 0 on, all or every n-th of them, shuffled or in order."""

    def __init__(self, size: int, buffer_size: int = 1, split: tuple[int, int] | None = None):
        self._distributed = None if split is None else DistributedConfig(*split)
        samples = list(range(size) if split is None else range(split[0], size, split[1]))
        self._ex_iterable = BufferShuffledExamplesIterable(samples, buffer_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ex_iterable)

    def state_dict(self) -> dict[str, int]:
        return {"read": self._ex_iterable.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._ex_iterable.begin = state["read"]


def hugging_face(patch: pytest.MonkeyPatch) -> None:
    """Make the program find the stand-in where it would find `datasets`."""
    patch.setitem(sys.modules, "datasets.iterable_dataset", sys.modules[__name__])
