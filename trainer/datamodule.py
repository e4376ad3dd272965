"""The base class for data and its preparation, separate from the model."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer.hparams import HyperParameters, keep, kept_by
from trainer.tree import to_device

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class DataModule:
    """The loaders of each phase and their setup; pass it as ``datamodule``.

    Any object with some of these methods works too. For loaders and batch hooks that it does not
    define, the module's are used.

    Example::

        class Digits(DataModule):
            def train_dataloader(self):
                return DataLoader(train_set, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(val_set, batch_size=32)

        trainer.fit(module, datamodule=Digits())

    Attributes:
        trainer: The Trainer of the current run; None outside a run.
    """

    trainer: Trainer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy, such as one sent to a spawned worker, does not belong to the run.
        return {**self.__dict__, "trainer": None}

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Iterable[str] | None = None,
        logger: bool = True,
    ) -> None:
        """Record the arguments of ``__init__``; see `TrainModule.save_hyperparameters`.

        Trackers log them at the beginning of a fit. Checkpoints do not hold them; return anything
        that a resumed run needs from `state_dict`.
        """
        keep(self, names, sys._getframe(1), ignore=ignore, private=not logger)

    @property
    def hparams(self) -> HyperParameters:
        """The arguments kept by `save_hyperparameters`: a dict whose items are also attributes."""
        return kept_by(self).values

    def prepare_data(self) -> None:
        """Download and prepare; the first process of each machine runs it before the others."""

    def setup(self, stage: str) -> None:
        """Called before the module's `setup`; `stage` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a run, even after an error."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""

    def val_dataloader(self) -> Any:
        """Return the validation loader or a list of them."""

    def test_dataloader(self) -> Any:
        """Return the test loader or a list of them."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader or a list of them."""

    def on_before_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Change a batch before it goes to the device; see `TrainModule`."""
        return batch

    def transfer_batch_to_device(
        self,
        batch: Any,
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Copy a batch to the device; override it for types that have no ``.to``."""
        return to_device(batch, device, non_blocking=True)

    def on_after_batch_transfer(
        self,
        batch: Any,
        dataloader_idx: int,  # noqa: ARG002 - an interface
    ) -> Any:
        """Change a batch on the device; see `TrainModule`."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run failed, before `exception` is re-raised; other ranks may be down."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the loaders depend on, such as a vocabulary: tensors, plain values.

        A checkpoint stores rank 0's result; every process must return the same. Leave out the
        position in the data and its order, which the run saves itself.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; called after ``setup``, before the loaders are created."""
