"""The state of Lightning's Trainer, under Lightning's names."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.enums import Choice


class TrainerStatus(Choice):
    """The status of the Trainer; `RUNNING` while one of its methods runs."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the latest method has ended."""
        return self in (self.FINISHED, self.INTERRUPTED)


class TrainerFn(Choice):
    """The method that was called last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(Choice):
    """The running stage; in a fit it may be a validation or the sanity check."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether metrics are computed without training."""
        return self in (self.VALIDATING, self.TESTING, self.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The prefix of hooks and arguments of this stage."""
        return "val" if self in (self.VALIDATING, self.SANITY_CHECKING) else str(self)


@dataclass(frozen=True)
class TrainerState:
    """The result of `Trainer.state`; `fn` is kept after the method has ended."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the latest method has ended without an error."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the latest method has ended."""
        return self.status.stopped
