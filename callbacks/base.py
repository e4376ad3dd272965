"""`Callback`, the base class of callbacks: its hooks, and when the loop calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from trainer import Trainer, TrainModule


def refuse_manual_optimization(callback: Callback, module: TrainModule) -> None:
    """Raise if a callback cannot work because the module uses manual optimisation."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(callback).__name__} does not support manual optimisation, where training_step "
            "decides when to step."
        )


class Callback:
    """The base class of all callbacks; override the hooks that you need.

    Only overridden hooks are called. In the loop below, ``[m]`` is the module, which has the same
    hooks, and ``[c]`` are the callbacks, in the order given. ``[c m]`` means callbacks first::

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
                    on_train_epoch_end [m] · metrics reduced · on_train_epoch_end [c] ·
                    metrics reduced again
                on_boundary [c]                          # save or stop here
                  or on_preemption [c] after an update, if a signal came: save, the run ends here
        on_train_end [m c] · on_fit_end [m c] · teardown("fit")

        validate; test and predict have the same shape, under their own names:
            on_validation_start [c m] · on_validation_epoch_start [c m]
            for each batch:
                on_validation_batch_start [c m] · validation_step · on_validation_batch_end [m c]
            on_validation_epoch_end [m] · metrics reduced · on_validation_epoch_end [c] ·
            metrics reduced again
            on_validation_end [m c]

        save: state_dict, on_save_checkpoint [c]
        on an error: on_exception [c] · teardown · the error is raised

    Every hook runs on every rank. A callback must base its decisions on values that are the same on
    all ranks (``trainer.progress``; ``trainer.callback_metrics`` at a boundary). Otherwise the
    ranks deadlock.

    Example::

        class PrintLoss(Callback):
            def on_validation_end(self, trainer, module):
                print(trainer.current_epoch, trainer.callback_metrics["val/loss"])

        trainer = Trainer(max_epochs=10, callbacks=[PrintLoss()])

    Attributes:
        runs_last: Whether the Trainer calls this callback after all callbacks without this flag. A
            callback that saves checkpoints must set it, so that a checkpoint includes the decisions
            of the others.
        requires_unsharded: Whether it reads the whole module on one process. A fit on a sharded
            model (FSDP) raises an error for such a callback.
    """

    runs_last: ClassVar[bool] = False
    requires_unsharded: bool = False
    _is_default: bool = False  # added by the Trainer; removed if the user adds one of its class

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint stores this callback's state.

        If a run may use several instances of the class, each must return a different key.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **arguments: Any) -> str:
        """Return a `state_key` that names these arguments, for callbacks written for Lightning."""
        return f"{type(self).__qualname__}{arguments!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Before the model is prepared; ``stage`` is fit, validate, test or predict."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """After everything else, even after an error; release what ``setup`` acquired."""

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
        """Before the first batch of an epoch.

        It is not called again when a run resumes inside the epoch. The checkpoint restores its
        changes to weights, buffers, optimizers, the number of micro-batches per update, and
        attributes of the module and its submodules that are numbers, strings, small tensors, or
        short lists or dicts. Return the callback's own state from its ``state_dict``. Code that
        must run at each start of the program belongs in ``on_train_start``.

        With several processes, add, freeze and unfreeze parameters only here or before training, so
        that all processes all-reduce the same gradients.
        """

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the epoch's metrics are reduced; metrics logged here are reduced afterwards."""

    def on_train_step_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first micro-batch of a gradient accumulation window."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the optimizer step at the end of a window; gradients are not zeroed yet."""

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Before ``training_step``; ``batch_idx`` counts this rank's micro-batches in the epoch.

        Returning -1 skips this rank's batch and ends the epoch with this update.
        """

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After ``training_step``, backward and, at the end of a window, the optimizer step.

        ``outputs`` is what ``training_step`` returned, detached.
        """

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Before backward of one micro-batch."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """After backward of one micro-batch; gradients may still be scaled."""

    def on_before_optimizer_step(
        self, trainer: Trainer, module: TrainModule, optimizer: Optimizer
    ) -> None:
        """Before clipping and the optimizer step; gradients are unscaled and all-reduced."""

    def on_before_zero_grad(
        self, trainer: Trainer, module: TrainModule, optimizer: Optimizer
    ) -> None:
        """After the optimizer step, before the gradients are zeroed."""

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Once per optimizer step, after logging and validation: the place to save or to stop.

        All processes must make the same decision; a process that saves alone waits for the others
        forever. If a callback saved a checkpoint here, a run that resumes from it first calls this
        hook of the callbacks after that callback.
        """

    def monitor_due(self, trainer: Trainer) -> bool:
        """Return whether ``on_boundary`` will use ``self.monitor`` now; the same on all ranks.

        If so, the values of this update are reduced first, even if they are not due by
        ``log_every``. It is called only on callbacks with a ``monitor``, the name of a metric.
        """
        return False

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """After the update at which a signal ends the run; ``on_boundary`` is called on resume."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before a validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After a validation."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last batch of a validation and the reduction of its metrics.

        Metrics logged here are reduced afterwards.
        """

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
        """After the last batch of a test and the reduction of its metrics.

        Metrics logged here are reduced afterwards.
        """

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
        """After an error, before it is raised. Run no collectives: other ranks may have exited."""

    def weights_to_save(
        self, trainer: Trainer, module: TrainModule
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return two state dicts to save instead of the module's, or None.

        The first is for other tools and evaluation, such as averaged weights. The second is for a
        run that resumes, such as the trained weights. `load_state_dict` is called while the module
        holds the first. Only one callback of a run may return them, and it must return them on
        every process.
        """
        return None

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add tensors and plain values to the checkpoint that is about to be saved."""

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the values that ``on_save_checkpoint`` added."""
