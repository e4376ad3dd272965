"""Placeholders for optimizers and schedules that DeepSpeed or Megatron-LM create."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.checks import choice_error
from trainer.configuration.deepspeed import DeepSpeedPlugin, fill_auto
from trainer.configuration.megatron import MegatronLMPlugin


class DummyOptim(Optimizer):
    """A placeholder for the optimizer of a DeepSpeed configuration.

    Args:
        params: The parameters, or groups of them with options.
        lr: The learning rate, used where the configuration has ``"auto"``.
        weight_decay: The weight decay, used in the same case.
        **kwargs: Other parameters of the optimizer, used in the same case.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = list(params)
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        given = [dict(p) for p in self.params if isinstance(p, Mapping)]
        self.given = given or [{"params": self.params}]
        super().__init__(self.params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - of torch
        """Raise an error, since DeepSpeed makes the update.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "DummyOptim stands for the optimizer of a DeepSpeed configuration: pass "
            "deepspeed_plugin (--use_deepspeed), and prepare it together with its model."
        )


class DummyScheduler:
    """A placeholder for the scheduler of a DeepSpeed configuration.

    Args:
        optimizer: The optimizer.
        total_num_steps: The length of the schedule, used where the configuration has ``"auto"``: in
            updates, or, for an `Accelerator` with ``scheduler_tick="process"``, in batches of all
            processes, as in scripts for Accelerate.
        warmup_num_steps: The length of the warm-up, in updates, used in the same case.
        lr_scheduler_callable: Returns a scheduler for an optimizer, instead of the configuration's.
        **kwargs: Not used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self) -> None:
        """Raise an error: `prepare` replaces this by the configuration's scheduler.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "DummyScheduler stands for the scheduler of a DeepSpeed configuration: pass "
            "deepspeed_plugin (--use_deepspeed), and prepare it together with its optimizer."
        )

    def per_update(self, processes: int) -> DummyScheduler:
        """Return a copy whose length counts updates instead of batches of all processes.

        As in Accelerate, the warm-up counts updates in either case.
        """
        own = copy.copy(self)
        if own.total_num_steps is not None:
            own.total_num_steps = math.ceil(own.total_num_steps / processes)
        return own

    def make(self, plugin: DeepSpeedPlugin, optimizer: Optimizer) -> Any:
        """Return the scheduler.

        Args:
            plugin: The plugin with the configuration.
            optimizer: The optimizer, with its options.

        Raises:
            ValueError: The configuration has no scheduler, or its values cannot be filled in.
        """
        if self.lr_scheduler_callable is not None:
            return self.lr_scheduler_callable(optimizer)
        named = plugin.deepspeed_config.get("scheduler")
        if named is None:
            raise ValueError(
                "DummyScheduler stands for the scheduler of a DeepSpeed configuration, which has "
                "none: add 'scheduler' to hf_ds_config, or pass lr_scheduler_callable."
            )
        from deepspeed.runtime import lr_schedules

        kind = getattr(lr_schedules, named["type"], None) or getattr(
            torch.optim.lr_scheduler, named["type"], None
        )
        if kind is None:
            names = lr_schedules.VALID_LR_SCHEDULES
            raise ValueError(choice_error("The scheduler's type", named["type"], names))
        params = {"scheduler": {"params": dict(named.get("params", {}))}}
        values = {
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": optimizer.param_groups[0]["lr"],
            # DeepSpeed rejects 0.
            "scheduler.params.warmup_num_steps": max(1, self.warmup_num_steps),
        }
        if self.total_num_steps is not None:
            values["scheduler.params.total_num_steps"] = self.total_num_steps
        fill_auto(params, values)
        return kind(optimizer, **params["scheduler"]["params"])


def is_deepspeed_schedule(scheduler: Any) -> bool:
    """Return whether a scheduler is of a DeepSpeed class, not a torch class."""
    return type(scheduler).__module__ == "deepspeed.runtime.lr_schedules"


class MegatronLMDummyScheduler:
    """A placeholder for the schedule that a `MegatronLMPlugin` describes.

    Args:
        optimizer: The optimizer.
        total_num_steps: The length of the schedule, where the plugin has no `train_iters`: in
            updates, or for an `Accelerator` with ``scheduler_tick="process"``, in batches of all
            replicas, as in scripts for Accelerate.
        warmup_num_steps: The length of the warm-up, used where the plugin has no `lr_warmup_iters`.
        **kwargs: Not used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs

    def step(self) -> None:
        """Raise an error: `prepare` replaces this by the plugin's schedule.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "MegatronLMDummyScheduler stands for the schedule of a MegatronLMPlugin: pass "
            "megatron_lm_plugin, and prepare it together with its optimizer."
        )

    def per_update(self, processes: int) -> MegatronLMDummyScheduler:
        """Return a copy whose length counts updates instead of batches of all replicas."""
        total = self.total_num_steps and self.total_num_steps // processes
        warmup = self.warmup_num_steps // processes
        return MegatronLMDummyScheduler(self.optimizer, total, warmup, **self.kwargs)

    def make(self, plugin: MegatronLMPlugin, optimizer: Optimizer) -> Any:
        """Return the schedule.

        Args:
            plugin: The plugin that describes the schedule.
            optimizer: The optimizer, whose groups keep their own peak learning rates, and their
                weight decay unless the plugin has one.

        Raises:
            ValueError: The length of the schedule is unknown.
        """
        updates = plugin.train_iters or self.total_num_steps
        decay = plugin.lr_decay_iters or updates
        if decay is None:
            raise ValueError(
                "MegatronLMDummyScheduler has no length: pass total_num_steps, or "
                "MegatronLMPlugin(train_iters=...)."
            )
        if plugin.lr_warmup_fraction is not None:
            warmup = plugin.lr_warmup_fraction * decay
        else:
            warmup = float(plugin.lr_warmup_iters or self.warmup_num_steps)
        decays = (plugin.start_weight_decay, plugin.end_weight_decay) != (None, None)
        for group in optimizer.param_groups:
            group.setdefault("max_lr", group["lr"])
            own = group.get("weight_decay", 0.0)
            group.setdefault("wd_mult", float(own != 0) if decays else own)
        start, end = plugin.start_weight_decay, plugin.end_weight_decay
        return _Schedule(
            optimizer,
            init_lr=0.0,
            max_lr=optimizer.param_groups[0]["max_lr"],
            min_lr=plugin.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=plugin.lr_decay_style,
            start_wd=(end if start is None else start) if decays else 1.0,
            end_wd=(start if end is None else end) if decays else 1.0,
            wd_incr_steps=updates or decay,
            wd_incr_style=plugin.weight_decay_incr_style if decays else "constant",
        )


class _Schedule:
    """The schedule of megatron-core, which counts updates."""

    def __init__(self, optimizer: Optimizer, **arguments: Any) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.optimizer = optimizer
        self._schedule: Any = OptimizerParamScheduler(optimizer, **arguments)

    def step(self) -> None:
        """Advance by one update."""
        self._schedule.step(increment=1)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the arguments of the schedule."""
        return dict(self._schedule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved update."""
        self._schedule.num_steps = 0  # loading adds to it
        self._schedule.load_state_dict(state)
