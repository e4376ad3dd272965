"""What Lightning's Trainer is doing, in its words."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.enums import Choice


class TrainerStatus(Choice):
    """How far it is; `RUNNING` while one of its methods runs."""

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
    """What is running: also in a fit the validations and the sanity check."""

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
        """What hooks and arguments of this stage begin with."""
        return "val" if self in (self.VALIDATING, self.SANITY_CHECKING) else str(self)


@dataclass(frozen=True)
class TrainerState:
    """What `Trainer.state` returns; `fn` stays when the method has ended."""

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
