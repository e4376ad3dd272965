"""Loaders described by a configuration file, for data without a `DataModule`."""

# The annotations are unparametrised. For ``Dataset[Any]``, jsonargparse only accepts arguments of
# ``Dataset`` itself, not those of its subclasses.
# mypy: disable-error-code="type-arg"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainer.datamodule import DataModule


def _itself(loaders: Any) -> Any:
    return loaders


class Loader(DataLoader[Any]):
    """A ``DataLoader`` whose dataset can be given by a class path and its arguments.

    Args:
        dataset: The dataset to read.
        **options: Arguments of ``torch.utils.data.DataLoader``.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        super().__init__(dataset, **options)


class Loaders(DataModule):
    """One loader for each stage: a `Loader`, or a function annotated ``-> DataLoader``.

    Args:
        train: Read by `fit`.
        val: Read by `fit` and `validate`; may be a list.
        test: Read by `test-model`; may be a list.
        predict: Read by `predict`; may be a list.
    """

    def __init__(
        self,
        train: DataLoader | None = None,
        val: DataLoader | Sequence[DataLoader] | None = None,
        test: DataLoader | Sequence[DataLoader] | None = None,
        predict: DataLoader | Sequence[DataLoader] | None = None,
    ) -> None:
        given = {"train": train, "val": val, "test": test, "predict": predict}
        for stage, loaders in given.items():
            if loaders is not None:  # a method of the class would imply loaders for all stages
                setattr(self, f"{stage}_dataloader", partial(_itself, loaders))
