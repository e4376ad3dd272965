"""What users subclass to keep data and its preparation apart from the model."""

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
    """The loaders of each phase, and what they need; pass it as ``datamodule``.

    Any object with some of these methods will do in its place. What a method of this class leaves
    out the module may have: its loaders and its batch hooks are used then.

    Attributes:
        trainer: The Trainer of the run at hand; None outside one.
    """

    trainer: Trainer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy for a worker, such as one that is spawned with a method of it, is in no run.
        return {**self.__dict__, "trainer": None}

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Iterable[str] | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` in `hparams`; see `TrainModule.save_hyperparameters`.

        Trackers are told at the beginning of a fit. Checkpoints do not hold them: what a resumed
        run needs goes into `state_dict`.
        """
        keep(self, names, sys._getframe(1), ignore=ignore, private=not logger)

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept: a dict whose items are attributes too."""
        return kept_by(self).values

    def prepare_data(self) -> None:
        """Download and prepare; the first process of each machine runs it before the others."""

    def setup(self, stage: str) -> None:
        """Before the module's; `stage` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """After everything, also after an error."""

    def train_dataloader(self) -> Any:
        """The training loader."""

    def val_dataloader(self) -> Any:
        """The validation loader or a list of them."""

    def test_dataloader(self) -> Any:
        """The test loader or a list of them."""

    def predict_dataloader(self) -> Any:
        """The prediction loader or a list of them."""

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
        """After an error, which is raised afterwards; other processes may be gone."""

    def state_dict(self) -> dict[str, Any]:
        """What the loaders depend on, such as a vocabulary or a split: tensors and plain values.

        A checkpoint holds what rank 0 returns; every process must return the same. The position in
        the data and the order are not part of it: the run itself knows them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned: after ``setup``, before the loaders are made."""
