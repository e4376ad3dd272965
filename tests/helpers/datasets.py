"""Datasets of the numbers from 0 on."""

from __future__ import annotations

from collections.abc import Iterator

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
