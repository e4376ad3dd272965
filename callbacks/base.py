"""The interface of a callback: what it may do, and when in the loop it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from trainer import Trainer, TrainModule


class Callback:
    """Something that happens beside the training: override the hooks that you need.

    Only overridden hooks are called. ``[m]`` is the module, which has the same hooks, ``[c]`` are
    the callbacks in the order given; where both are called the line says in which order::

        setup("fit") [c m] · prepare the model, the optimizers and the schedules
        load a checkpoint: load_state_dict, on_load_checkpoint [c]
        on_fit_start [c m]
        on_sanity_check_start [c] · a validation of a few batches · on_sanity_check_end [c]
        on_train_start [c m]
        for each epoch:
            on_train_epoch_start [c m]
            for each window of gradient_accumulation_steps micro-batches:
                on_train_step_start [c m]                # a step is one optimizer update
                for each micro-batch:
                    on_train_batch_start [c m]
                    loss = training_step(batch, batch_idx)
                    on_before_backward [c m] · backward · on_after_backward [m c]
                    the last one of the window:
                        on_before_optimizer_step [c m] · clip · update · global_step += 1
                    on_train_batch_end [m c]
                on_train_step_end [m c] · on_before_zero_grad [c m] · zero_grad
                log if due · validate if due (below)
                the last window of the epoch:
                    on_train_epoch_end [m] · metrics reduced · on_train_epoch_end [c]
                on_boundary [c]                          # save or stop here
                  or on_preemption [c] after an update, if a signal came: save, the run ends here
        on_train_end [m c] · on_fit_end [m c] · teardown("fit")

        validate, and likewise test and predict under their own names:
            on_validation_start [c m] · on_validation_epoch_start [c m]
            for each batch:
                on_validation_batch_start [c m] · validation_step · on_validation_batch_end [m c]
            on_validation_epoch_end [m] · metrics reduced · on_validation_epoch_end [c]
            on_validation_end [m c]

        save: state_dict, on_save_checkpoint [c]
        error: on_exception [c] · teardown · the error itself

    Every hook runs on every rank. What a callback decides must follow from values that all ranks
    share (``trainer.callback_metrics``, ``trainer.progress``), or the ranks wait for each other.

    Attributes:
        runs_last: Whether the Trainer calls this callback after those that do not say so. One that
            saves must, so that a checkpoint holds what the others decided.
    """

    runs_last: ClassVar[bool] = False

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint holds this callback's state.

        A class of which a run may have several instances adds what tells them apart.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on deciding alike: tensors and JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Before the model is prepared; ``stage`` is fit, validate, test or predict."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """After everything, also after an error; release what ``setup`` took."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """After a checkpoint was loaded, before the sanity check."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last update and ``on_train_end``."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the sanity check's validation batches."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the sanity check's validation batches."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first epoch of this ``fit``."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last epoch of this ``fit``; a collective may run here."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first batch of an epoch, or of its rest after a resume.

        So it is called again in an epoch that a run goes on with. What changes weights here should
        note the epoch in the state that is saved.

        Among several processes, parameters are added, frozen and unfrozen here or before the
        training: elsewhere in an epoch the processes could not average their gradients.
        """

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the metrics of the epoch were reduced."""

    def on_train_step_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first micro-batch of an update."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last micro-batch of an update; gradients are still alive."""

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Before ``training_step``; ``batch_idx`` counts this rank's micro-batches in the epoch."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After ``training_step``, backward and, at the end of a window, the update.

        ``outputs`` is what ``training_step`` returned, detached.
        """

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Before backward of one micro-batch."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """After backward of one micro-batch; gradients may still be scaled."""

    def on_before_optimizer_step(
        self, trainer: Trainer, module: TrainModule, optimizer: Optimizer
    ) -> None:
        """Before clipping and the update; gradients are unscaled."""

    def on_before_zero_grad(
        self, trainer: Trainer, module: TrainModule, optimizer: Optimizer
    ) -> None:
        """After the update, before its gradients go."""

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Once an update, when everything due at it is done: the place to save or to stop.

        Both are for all processes alike: one that saves or stops here alone waits for the others.
        A run that goes on from what one callback saves here calls those behind it first.
        """

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """A signal ends the run after this update; what is due at it is done by the next start."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before a validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After a validation."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last batch of a validation and the reduction of its metrics."""

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        module: TrainModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Before ``validation_step``."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After ``validation_step``."""

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before a test."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After a test."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first batch of a test."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last batch of a test and the reduction of its metrics."""

    def on_test_batch_start(
        self,
        trainer: Trainer,
        module: TrainModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Before ``test_step``."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After ``test_step``."""

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before a prediction."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After a prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first batch of a prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        module: TrainModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Before ``predict_step``."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After ``predict_step``."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """After an error, which is raised afterwards; other ranks may be gone: no collectives."""

    def weights_to_save(
        self, trainer: Trainer, module: TrainModule
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Two ``state_dict()`` for a checkpoint to hold in place of the module's, if wanted.

        The first is what others load, averages for example; the second is what a run goes on with.
        `load_state_dict` is called while the module holds the first. One callback of a run may
        return some; every process must.
        """
        return None

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add tensors and plain values to what is about to be saved."""

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take back what ``on_save_checkpoint`` added."""
