"""Loaders of a configuration file, for data that has no `DataModule`.

The annotations are bare classes: where one is ``Dataset[Any]``, jsonargparse takes the arguments of
``Dataset`` itself and no other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainer.datamodule import DataModule


def _itself(loaders: Any) -> Any:
    return loaders


class Loader(DataLoader[Any]):
    """A ``DataLoader`` whose dataset may be described too, by a class path and its arguments.

    Args:
        dataset: What it reads.
        **options: Of ``torch.utils.data.DataLoader``.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:  # type: ignore[type-arg]
        super().__init__(dataset, **options)


class Loaders(DataModule):
    """Ready loaders, one for each stage: a `Loader`, or a function annotated ``-> DataLoader``.

    Args:
        train: Read by `fit`.
        val: Read by `fit` and `validate`; a list of them is fine.
        test: Likewise by `test-model`.
        predict: Likewise by `predict`.
    """

    def __init__(
        self,
        train: DataLoader | None = None,  # type: ignore[type-arg]
        val: DataLoader | Sequence[DataLoader] | None = None,  # type: ignore[type-arg]
        test: DataLoader | Sequence[DataLoader] | None = None,  # type: ignore[type-arg]
        predict: DataLoader | Sequence[DataLoader] | None = None,  # type: ignore[type-arg]
    ) -> None:
        given = {"train": train, "val": val, "test": test, "predict": predict}
        for stage, loaders in given.items():
            if loaders is not None:  # a method of the class would promise loaders of this stage too
                setattr(self, f"{stage}_dataloader", partial(_itself, loaders))
