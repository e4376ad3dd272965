"""The `Tuner`: a Trainer's learning rate and batch size, found by trying."""

from __future__ import annotations

import logging
from typing import Any

from trainer.errors import choose
from trainer.loops.loaders import check_module
from trainer.module import TrainModule
from trainer.trainer import Trainer
from trainer.tuning.batch_size import (
    METHODS,
    BatchSizeSearch,
    Search,
    Subject,
    check_effective,
    search_batch_size,
)
from trainer.tuning.learning_rate import Groups, LearningRateTest, Sweep, range_test
from trainer.tuning.trial import holders, set_all

logger = logging.getLogger(__name__)


class Tuner:
    """Finds a learning rate and a batch size for a Trainer by short trials.

    Trials run on copies of the module, its loaders and its datamodule, without the Trainer's
    callbacks and trackers, and write nothing: weights, generators, the position in the data, the
    Trainer's counters and its files stay as they are to the last bit, and a following `fit` is the
    one that it would have been. Tensors and arrays of datasets are shared with the copies, not
    copied; ``prepare_data`` and ``setup`` are called again for each trial.

    Every process calls the methods alike and gets the same answers.

    Args:
        trainer: Whose settings and devices the trials have.

    Raises:
        TypeError: It is no Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer is {trainer!r}; it must be a Trainer.")
        self.trainer = trainer

    def lr_find(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        datamodule: Any = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        smoothing: float = 0.98,
        groups: Groups = "scaled",
        update_attr: bool = False,
        attr_name: str = "",
    ) -> LearningRateTest:
        """Train while the learning rate rises from update to update, and watch the loss.

        This is the range test of L. N. Smith, "Cyclical Learning Rates for Training Neural
        Networks", WACV 2017. Schedules are left out, or overruled in manual optimisation, where the
        loss is what `training_step` returns or, without that, the sum of what it goes back from.
        The losses are means over the items of each update, of all its micro-batches and processes.

        Args:
            module: The module; a copy is trained.
            train_dataloaders: As for `Trainer.fit`. Epochs follow each other until `num_training`
                updates are made.
            datamodule: Likewise.
            min_lr: The first rate.
            max_lr: The last rate.
            num_training: How many rates, one for each update.
            mode: ``"exponential"`` or ``"linear"``: how the rates rise.
            early_stop_threshold: Stop when the smoothed loss is so many times its lowest value
                before, the first ten updates apart, or when the loss is not finite; None stops at
                the latter alone. Losses below zero are compared by their distance.
            smoothing: The weight of the past in the moving average of the losses, whose bias
                towards zero is corrected.
            groups: ``"scaled"`` keeps the ratios of the parameter groups' rates and gives the
                largest the tested one, ``"same"`` gives it to all, a number to that group alone,
                counted from 0 over all optimizers.
            update_attr: Set the module's attribute to the suggestion, if there is one.
            attr_name: That attribute, of the module or its ``hparams``; ``lr`` or
                ``learning_rate`` unless given.

        Returns:
            The rates and losses, with a `suggestion` and a `plot`.

        Raises:
            ValueError: An argument is outside its range, the data can be read only once, or there
                is no such attribute.
            TypeError: The module cannot be copied, or an argument is of another type.
            Preempted: A signal came; nothing had to be saved.
        """
        check_module(module, "fit")
        sweep = Sweep(
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            smoothing=smoothing,
            groups=groups,
        )
        names = [attr_name] if attr_name else ["lr", "learning_rate"]
        name = next((each for each in names if holders(each, module)), None)
        if update_attr and name is None:
            raise ValueError(
                f"update_attr=True, but neither {type(module).__name__} nor its hparams has an "
                f"attribute {' or '.join(map(repr, names))}. Name it with attr_name."
            )
        result = range_test(self.trainer, module, train_dataloaders, datamodule, sweep)
        if update_attr and name is not None:
            suggestion = result.suggestion()
            if suggestion is None:
                logger.warning("%s stays as it is.", name)
            else:
                set_all(holders(name, module), name, suggestion)
        return result

    def scale_batch_size(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        *,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int | None = None,
        effective_batch_size: int | None = None,
        update_attr: bool = False,
    ) -> BatchSizeSearch:
        """Find the largest batch with which a few updates, or batches, do not run out of memory.

        Loaders that are passed are made anew with other batch sizes. Where the module or the
        datamodule makes them, it must do so from an attribute. A fit that has validation data
        validates too, its loaders being as they are. Each process tries by itself, with what the
        reduction of gradients needs set aside; the smallest size of all processes counts. A step
        that talks to the others by itself, as ``SyncBatchNorm`` does, may wait in vain for one that
        ran out of memory.

        Args:
            module: The module; copies are tried out.
            train_dataloaders: As for `Trainer.fit`.
            val_dataloaders: Likewise.
            dataloaders: For the other methods, as for `Trainer.validate`.
            datamodule: In place of loaders.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode: ``"power"`` doubles the size until it does not fit; ``"binsearch"`` goes on
                between the last two sizes.
            steps_per_trial: Updates of each trial, or batches of each loader. The second has the
                optimizer's state in memory, so 2 is the least for a fit.
            init_val: The first size; halved if it does not fit.
            max_trials: Sizes to try at most.
            batch_arg_name: The attribute of the module, its ``hparams`` or the datamodule.
            margin: Of the size that ``"binsearch"`` found at the edge of the memory, the part that
                is given back, since memory is fragmented in a long run.
            max_val: Try no larger size. The number of samples in the data limits it too.
            effective_batch_size: Samples of an update over all processes. The size is then one of
                which a whole number of micro-batches makes such an update; give the Trainer both.
            update_attr: Set the attribute to the size that was found.

        Returns:
            The size for each process, the accumulation that goes with it, and what was tried.

        Raises:
            ValueError: An argument is outside its range, the loaders have no batch size to change,
                there is no such attribute, or the data can be read only once.
            TypeError: The module cannot be copied, or an argument is of another type.
            RuntimeError: Not even one sample fits. On all processes alike, as is every error.
        """
        search = Search(
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            margin=margin,
            max_val=max_val,
        )
        if method not in METHODS:
            raise ValueError(choose("method", method, METHODS))
        check_module(module, method)
        world_size = self.trainer.accelerator.num_processes
        check_effective(effective_batch_size, method, module, world_size)
        fits = method == "fit"
        unused = {"dataloaders": dataloaders} if fits else {"train_dataloaders": train_dataloaders}
        for name, given in unused.items():
            if given is not None:
                raise ValueError(f"{name} was given, which method={method!r} does not use.")
        steps = self.trainer._parts.settings.gradient_accumulation_steps
        subject = Subject(
            trainer=self.trainer,
            module=module,
            loaders=train_dataloaders if fits else dataloaders,
            val_loaders=val_dataloaders,
            datamodule=datamodule,
            method=method,
            attribute=batch_arg_name,
            accumulates=steps > 1 or effective_batch_size is not None,
        )
        if update_attr and not holders(batch_arg_name, module, datamodule):
            raise ValueError(f"update_attr=True, but there is no attribute {batch_arg_name!r}.")
        result = search_batch_size(subject, search, effective=effective_batch_size)
        if update_attr:
            set_all(holders(batch_arg_name, module, datamodule), batch_arg_name, result.batch_size)
        return result
