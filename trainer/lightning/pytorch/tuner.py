"""Lightning's Tuner."""

from __future__ import annotations

from typing import Any

from trainer.lightning.missing import getter
from trainer.tuning import LearningRateTest
from trainer.tuning import Tuner as _Tuner

__all__ = ["Tuner"]

__getattr__ = getter(__name__)


class Tuner(_Tuner):
    """`trainer.tuning.Tuner` with Lightning's arguments, defaults and results."""

    def lr_find(  # type: ignore[override]  # Lightning's order of arguments
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateTest:
        """Find a learning rate, and set the attribute; see `trainer.tuning.Tuner.lr_find`.

        Raises:
            ValueError: The method is not ``"fit"``, or `dataloaders` are passed.
        """
        if method != "fit" or dataloaders is not None:
            raise ValueError("A learning rate is found by training: pass train_dataloaders.")
        return super().lr_find(
            model,
            train_dataloaders,
            val_dataloaders,
            datamodule,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            update_attr=update_attr,
            attr_name=attr_name,
        )

    def scale_batch_size(  # type: ignore[override]  # Lightning's order of arguments, and its result
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int:
        """Find the largest batch size, set the attribute and return it.

        See `trainer.tuning.Tuner.scale_batch_size`.
        """
        found = super().scale_batch_size(
            model,
            train_dataloaders,
            val_dataloaders,
            datamodule,
            dataloaders=dataloaders,
            method=method,
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            batch_arg_name=batch_arg_name,
            margin=margin,
            max_val=max_val,
            update_attr=True,
        )
        return found.batch_size
