"""The `Tuner`: find a Trainer's learning rate and batch size by short trials."""

from __future__ import annotations

import os
from typing import Any

from trainer.checks import check_choice
from trainer.errors import module_logger
from trainer.loops.fit_state import load_weights
from trainer.loops.lifecycle import check_module, one_module
from trainer.module import TrainModule
from trainer.trainer import Trainer
from trainer.tuning.batch_size import (
    METHODS,
    BatchSizeSearch,
    SizeSearch,
    TrialTarget,
    check_effective,
    search_batch_size,
)
from trainer.tuning.learning_rate import Groups, LearningRateTest, RangeTest, Sweep
from trainer.tuning.trial import copy_for_trial, isolate, make_trial, owners_of, set_attribute

logger = module_logger(__name__)


class Tuner:
    """Finds a learning rate and a batch size for a Trainer by short trials.

    Trials run on copies of the module, its loaders and its datamodule, without the Trainer's
    callbacks and trackers, and write nothing: weights, generators, the position in the data, the
    Trainer's counters and its files are bit-identical afterwards, and a later `fit` runs as if
    there had been no trial. Tensors and arrays of datasets are shared with the copies, not copied;
    ``prepare_data`` and ``setup`` are called again for each trial.

    All processes call the methods with the same arguments and get the same results.

    Example::

        tuner = Tuner(Trainer(max_epochs=10))
        batch_sizes = tuner.scale_batch_size(module, train_loader)
        rates = tuner.lr_find(module, train_loader)
        print(batch_sizes.batch_size, rates.suggestion())

    Args:
        trainer: The Trainer whose settings and devices the trials use.

    Raises:
        TypeError: `trainer` is not a Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer is {trainer!r}; it must be a Trainer.")
        self.trainer = trainer

    def lr_find(
        self,
        module: TrainModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,  # noqa: ARG002 - as `fit` takes it
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainModule | None = None,
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
        """Train while the learning rate rises from update to update, and record the loss.

        This is the range test of L. N. Smith, "Cyclical Learning Rates for Training Neural
        Networks", WACV 2017. Schedulers are paused; in manual optimisation the rates that they set
        are overwritten, and the loss is the one that `training_step` returns, else the sum of the
        losses passed to `manual_backward`. Losses are means over the items of each update, in all
        its micro-batches and processes.

        Args:
            module: The module; a copy is trained.
            train_dataloaders: As for `Trainer.fit`. Epochs are repeated until `num_training`
                updates are made.
            val_dataloaders: As for `Trainer.fit`; not read, since nothing is validated.
            datamodule: As for `Trainer.fit`.
            ckpt_path: As for `Trainer.fit`; the test begins with these weights.
            model: Another name of `module`.
            min_lr: The first rate.
            max_lr: The last rate.
            num_training: The number of rates, one for each update.
            mode: ``"exponential"`` or ``"linear"``: the spacing of the rates.
            early_stop_threshold: Stop when the smoothed loss exceeds this multiple of its lowest
                value so far, not counting the first ten updates, or when the loss is not finite;
                None stops only for the latter. If the lowest value is below zero, the allowed rise
                is a multiple of its absolute value.
            smoothing: The weight of the past in the moving average of the losses, which is
                bias-corrected.
            groups: ``"scaled"`` keeps the ratios of the parameter groups' rates, and sets the
                largest to the tested rate; ``"same"`` sets all to the tested rate; a number sets
                only that group, counted from 0 over all optimizers.
            update_attr: Set the module's attribute to the suggestion, if there is one.
            attr_name: The name of that attribute of the module or its ``hparams``; by default
                ``lr`` or ``learning_rate``.

        Returns:
            The rates and losses, with a `suggestion` and a `plot`.

        Raises:
            ValueError: An argument is outside its range, the data can be read only once, or the
                attribute does not exist.
            TypeError: The module cannot be copied, or an argument has the wrong type.
            Preempted: A signal arrived; there was nothing to save.
        """
        module = one_module("fit", module, model)
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
        name = next((attr for attr in names if owners_of(attr, module)), None)
        if update_attr and name is None:
            raise ValueError(
                f"update_attr=True, but neither {type(module).__name__} nor its hparams has an "
                f"attribute {' or '.join(map(repr, names))}. Name it with attr_name."
            )
        test = RangeTest(sweep)
        trainer = self.trainer
        weights = trainer._context.folders.choose(
            trainer._given_checkpoint(ckpt_path, ("last", "best"))
        )
        with isolate(module):
            settings = {"log_every": 1, "limit_val_batches": 0}
            trial = make_trial(trainer, test, sweep.num_training, alone=False, **settings)
            shared = [trainer, trainer.accelerator]
            data = (train_dataloaders, datamodule)
            module_copy, (loaders, datamodule) = copy_for_trial(module, data, shared)
            if weights is not None:
                load_weights(module_copy, weights)
            trial.fit(module_copy, loaders, datamodule=datamodule)
        result = test.result()
        if update_attr and name is not None:
            suggestion = result.suggestion()
            if suggestion is None:
                logger.warning("%s is left unchanged.", name)
            else:
                set_attribute(owners_of(name, module), name, suggestion)
        return result

    def scale_batch_size(
        self,
        module: TrainModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,  # noqa: ARG002 - as `fit` takes it
        *,
        model: TrainModule | None = None,
        dataloaders: Any = None,
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
        """Find the largest batch size with which a few updates, or batches, fit into memory.

        Loaders that are passed are recreated with other batch sizes. If the module or the
        datamodule creates them, it must read the size from an attribute. A fit that has validation
        data also validates, with unchanged validation loaders. Each process tries sizes separately,
        with memory reserved for the reduction of gradients; the smallest result of all processes is
        used. A step that runs collectives, for example in ``SyncBatchNorm``, may hang if another
        process runs out of memory.

        Args:
            module: The module; copies are used for trials.
            train_dataloaders: As for `Trainer.fit`.
            val_dataloaders: As for `Trainer.fit`.
            datamodule: A datamodule, instead of loaders.
            ckpt_path: As for `Trainer.fit`; not read, since weights do not affect memory use.
            model: Another name of `module`.
            dataloaders: For the other methods, as for `Trainer.validate`.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode: ``"power"`` doubles the size until it does not fit; ``"binsearch"`` then also
                searches between the last two sizes.
            steps_per_trial: Updates of each trial, or batches of each loader. Only the second
                update has the optimizer's state in memory, so use at least 2 for a fit.
            init_val: The first size; halved if it does not fit.
            max_trials: The maximum number of sizes to try.
            batch_arg_name: The attribute of the module, its ``hparams`` or the datamodule.
            margin: The fraction by which a size that ``"binsearch"`` finds at the memory limit is
                reduced, since memory is fragmented in a long run.
            max_val: The largest size to try. It is also limited by the number of samples in the
                data.
            effective_batch_size: The number of samples per update over all processes. The size
                found then divides it into a whole number of micro-batches; use both results in the
                run.
            update_attr: Set the attribute to the size that was found.

        Returns:
            The size for each process, the matching accumulation, and the sizes that were tried.

        Raises:
            ValueError: An argument is outside its range, the loaders have no batch size to change,
                the attribute does not exist, or the data can be read only once.
            TypeError: The module cannot be copied, or an argument has the wrong type.
            RuntimeError: Not even one sample fits. Like every error, it is raised on all processes.
        """
        search = SizeSearch(
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            margin=margin,
            max_val=max_val,
        )
        check_choice("method", method, METHODS)
        module = one_module(method, module, model)
        check_module(module, method)
        world_size = self.trainer.accelerator.engine.parallel.dp_size
        if effective_batch_size is not None:
            check_effective(effective_batch_size, method, module, world_size)
            effective_batch_size = int(effective_batch_size)
        is_fit = method == "fit"
        unused = "dataloaders" if is_fit else "train_dataloaders"
        if (dataloaders if is_fit else train_dataloaders) is not None:
            raise ValueError(f"{unused} was passed, which method={method!r} does not use.")
        steps = self.trainer._context.settings.gradient_accumulation_steps
        target = TrialTarget(
            trainer=self.trainer,
            module=module,
            loaders=train_dataloaders if is_fit else dataloaders,
            val_loaders=val_dataloaders,
            datamodule=datamodule,
            method=method,
            attribute=batch_arg_name,
            accumulates=steps > 1 or effective_batch_size is not None,
        )
        owners = owners_of(batch_arg_name, module, datamodule)
        if update_attr and not owners:
            raise ValueError(f"update_attr=True, but there is no attribute {batch_arg_name!r}.")
        result = search_batch_size(target, search, effective=effective_batch_size)
        if update_attr:
            set_attribute(owners, batch_arg_name, result.batch_size)
        elif owners and self.trainer.accelerator.is_main_process:
            logger.warning(
                "The largest %s is %d, and the attribute is unchanged: pass update_attr=True to "
                "set it.",
                batch_arg_name,
                result.batch_size,
            )
        return result
