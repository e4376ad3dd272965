"""Parse and check the return value of ``configure_optimizers``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from trainer.checks import check_choice, check_counts, choice_error
from trainer.errors import module_logger
from trainer.names import bare_names
from trainer.optim.clipping import CLIP_IN_STEP, NO_LIMITS, Limits, validate_limits
from trainer.optim.optimizer import parameters_of
from trainer.optim.scheduler import is_at_end

logger = module_logger(__name__)

_TICKS = ("scheduler", "interval", "frequency", "monitor", "strict")
_SCHEDULER_KEYS = (*_TICKS, "name")
_OWN_KEYS = ("name", "max_grad_norm", "max_grad_value")  # Cadence's options of an optimizer
_PORTED_KEY = "reduce_on_plateau"  # Lightning's key, redundant with the scheduler's class
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", *_TICKS, *_OWN_KEYS)
_SHAPES = (
    "Return an optimizer, a pair (optimizer, scheduler), a dict with 'optimizer' and optionally "
    "'scheduler', 'interval', 'frequency', 'monitor', 'strict', 'name', 'max_grad_norm' and "
    "'max_grad_value', or a list of these."
)


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer that ``configure_optimizers`` returned, with its options.

    Attributes:
        optimizer: The user's optimizer.
        name: Its name in records and checkpoints; None means its class name.
        max_grad_norm: The maximum norm of its gradients, which are then clipped separately from
            those of other optimizers; None means the Trainer's limit.
        max_grad_value: The maximum magnitude of each element of its gradients; None means the
            Trainer's limit.

    Raises:
        TypeError: `optimizer` is not an optimizer, or a limit is not a number.
        ValueError: A limit is not positive.
    """

    optimizer: Optimizer
    name: str | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(_unreadable(self.optimizer))
        validate_limits(self.max_grad_norm, self.max_grad_value)

    @property
    def limits(self) -> Limits:
        """The clipping limits of its gradients."""
        return Limits(max_norm=self.max_grad_norm, max_value=self.max_grad_value)


def names_of(entries: Sequence[OptimizerEntry]) -> list[str]:
    """Return a unique name for each optimizer.

    It is the given name, or the class name, with ``-1``, ``-2`` … appended if that is taken.

    Raises:
        ValueError: Two optimizers were given the same name.
    """
    chosen = [entry.name for entry in entries if entry.name is not None]
    names: list[str] = []
    for entry in entries:
        name = entry.name or type(entry.optimizer).__name__
        if entry.name is not None and chosen.count(name) > 1:
            raise ValueError(
                f"configure_optimizers returned two optimizers with the name {name!r}; give each a "
                "different 'name'."
            )
        further = 0
        called = name
        while entry.name is None and called in (*names, *chosen):
            further += 1
            called = f"{name}-{further}"
        names.append(called)
    return names


@dataclass(frozen=True, kw_only=True)
class SchedulerEntry:
    """A scheduler that ``configure_optimizers`` returned, with the interval at which it advances.

    Attributes:
        scheduler: A torch scheduler or any object with ``step``, ``state_dict`` and
            ``load_state_dict``. A timm scheduler, which also has ``step_update``, is passed the
            number of the update or epoch.
        interval: The unit of `frequency`: ``"step"`` (an optimizer update) or ``"epoch"``.
        frequency: The number of updates or epochs per step of the scheduler.
        monitor: The metric passed to ``step`` of ``ReduceLROnPlateau``, or of a scheduler that is
            not torch's. Other torch schedulers take no metric.
        name: The name under which its learning rate is logged.
        strict: Whether a missing `monitor` is an error. If False, a warning is logged once, and the
            scheduler does not step.

    Raises:
        ValueError: A unit is unknown, a number is not positive, or ``ReduceLROnPlateau`` has no
            metric.
        TypeError: The scheduler has no ``step``.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(
                f"configure_optimizers returned the scheduler {self.scheduler!r} of type "
                f"{type(self.scheduler).__name__}; it must have a step method."
            )
        check_choice("A scheduler's interval", self.interval, ("step", "epoch"))
        check_counts(1, **{"A scheduler's frequency": self.frequency})
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.monitor is None:
            raise ValueError(
                "ReduceLROnPlateau needs a metric to monitor: return {'optimizer': …, "
                "'scheduler': …, 'monitor': 'val/loss'}."
            )

    def check_unit(self) -> None:
        """Check that a timm scheduler counts in units of `interval`; otherwise it never advances.

        Raises:
            ValueError: The scheduler counts in the other unit.
        """
        in_epochs = getattr(self.scheduler, "t_in_epochs", None)
        unit = "epoch" if in_epochs else "step"
        if in_epochs is not None and unit != self.interval:
            raise ValueError(
                f"{type(self.scheduler).__name__} has t_in_epochs={in_epochs}, and with "
                f"'interval': {self.interval!r} would not change its learning rate: return "
                f"{{'optimizer': …, 'lr_scheduler': {{'scheduler': …, 'interval': {unit!r}}}}}."
            )

    def step_to(self, number: int) -> Callable[[Any, float | None], Any] | None:
        """Return a function that sets a timm scheduler to an update or epoch number, from 1.

        Timm schedulers have a method for each of the two units. Returns None for other schedulers,
        which count themselves.
        """
        if not callable(getattr(self.scheduler, "step_update", None)):
            return None
        name = "step" if self.interval == "epoch" else "step_update"
        return lambda scheduler, metric: getattr(scheduler, name)(number, metric)

    def step(
        self,
        metrics: Mapping[str, float],
        step: Callable[[Any, float | None], Any] | None = None,
        *,
        warns: bool = True,
    ) -> None:
        """Advance the scheduler by one step; at its end, a ``OneCycleLR`` keeps its learning rate.

        Args:
            metrics: The latest value of every metric.
            step: Called with the scheduler and its metric, or None, in place of its ``step``.
            warns: Whether to warn if the run is longer than the schedule.

        Raises:
            ValueError: The monitored metric has not been logged, and the scheduler is strict; the
                message lists the logged metrics.
        """
        if isinstance(self.scheduler, OneCycleLR) and is_at_end(self.scheduler):
            self._stay_at_end(self.scheduler, warns=warns)
        elif self.monitor is None or not self.takes_metric:
            if step is not None:
                step(self.scheduler, None)
                return
            if getattr(self.scheduler, "_step_count", 0) > 1:
                self.scheduler.step()
                return
            with warnings.catch_warnings():
                # If the first update was skipped for overflow, torch warns that `step` was called
                # in the wrong order. The warning is suppressed only at the first step, because
                # `catch_warnings` resets Python's registry of warnings already shown.
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step", UserWarning
                )
                self.scheduler.step()
        elif self.monitor in metrics:
            if step is None:
                self.scheduler.step(metrics[self.monitor])
            else:
                step(self.scheduler, metrics[self.monitor])
        elif not self.strict:
            if warns and not vars(self).setdefault("_warned", False):
                vars(self)["_warned"] = True
                logger.warning(
                    "The schedule %s does not advance while its monitor %r has not been logged; "
                    "logged metrics: %s.",
                    self.name or type(self.scheduler).__name__,
                    self.monitor,
                    ", ".join(metrics) or "none",
                )
        else:
            problem = (
                choice_error("A scheduler's monitor", self.monitor, metrics)
                if metrics
                else f"A scheduler's monitor is {self.monitor!r}, but nothing was recorded yet: "
                "barebones=True records only validations."
            )
            multiple = "val_every" if self.interval == "epoch" else "log_every or val_every"
            raise ValueError(
                f"{problem} Log it before the scheduler ticks: with interval={self.interval!r}, "
                f"make its frequency a multiple of {multiple}."
            )

    def _stay_at_end(self, schedule: OneCycleLR, *, warns: bool) -> None:
        """Keep the last learning rate, and warn at the step at which torch would raise.

        Steps are counted like in torch. Checkpoints hold the count, so a run warns once.
        """
        schedule._step_count += 1
        if warns and schedule._step_count == schedule.total_steps + 2:
            logger.warning(
                "The schedule %s was made for total_steps=%d, but the run continues: its "
                "learning rate stays at the last value. Create it with "
                "total_steps=trainer.estimated_stepping_batches; after a resume on fewer "
                "processes, raise gradient_accumulation_steps to keep the number of updates.",
                self.name or type(schedule).__name__,
                schedule.total_steps,
            )

    @cached_property
    def takes_metric(self) -> bool:
        """Whether the value of `monitor` is passed to ``step``."""
        plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        return self.monitor is not None and (plateau or not isinstance(self.scheduler, LRScheduler))


def read_optimizers(returned: Any) -> tuple[list[OptimizerEntry], list[SchedulerEntry]]:
    """Return the optimizers and schedulers in the return value of ``configure_optimizers``.

    Args:
        returned: An optimizer, a pair (optimizer, scheduler), a dict, or a list of these; or
            Lightning's pair of lists (optimizers, schedulers).

    Raises:
        TypeError: The value has another form, or contains no optimizer.
        ValueError: A key or a unit is unknown.
    """
    if isinstance(returned, tuple) and all(isinstance(part, Optimizer) for part in returned):
        optimizers, entries = [OptimizerEntry(optimizer=optimizer) for optimizer in returned], []
    elif isinstance(returned, (list, tuple)) and len(returned) == 2 and _two_lists(returned):
        optimizers = [OptimizerEntry(optimizer=optimizer) for optimizer in returned[0]]
        entries = [_scheduler_entry(scheduler) for scheduler in returned[1]]
    elif isinstance(returned, list) or _dicts(returned):
        parts = [_read_optimizer(part) for part in returned]
        optimizers = [optimizer for optimizer, _ in parts]
        entries = [entry for _, entry in parts if entry is not None]
    else:
        optimizer, entry = _read_optimizer(returned)
        optimizers, entries = [optimizer], [] if entry is None else [entry]
    if not optimizers:
        raise TypeError(_unreadable(returned))
    return optimizers, entries


def check_optimizers(
    entries: Sequence[OptimizerEntry],
    schedulers: Sequence[SchedulerEntry],
    module: nn.Module,
    *,
    automatic: bool,
) -> None:
    """Check that a loop can train a module with the result of ``configure_optimizers``.

    Args:
        entries: The optimizers.
        schedulers: The schedulers.
        module: The user's module.
        automatic: Whether the loop clips and steps; if not, ``training_step`` does.

    Raises:
        ValueError: An optimizer has none of the module's parameters, two optimizers share one, a
            scheduler belongs to another optimizer, or an optimizer does not support this mode.
    """
    optimizers = [entry.optimizer for entry in entries]
    trainable = set(map(id, module.parameters()))
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and automatic:
            raise ValueError(
                "configure_optimizers returned LBFGS, which evaluates the loss several times per "
                "update; set automatic_optimization = False and call optimizer.step(closure)."
            )
        if trainable.isdisjoint(map(id, parameters_of([optimizer]))):
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer).__name__} that has none of the "
                f"parameters of {type(module).__name__}; pass it self.parameters()."
            )
    _check_attached(schedulers, optimizers)
    names = names_of(entries)
    if automatic:
        _check_separate(optimizers, names, module)
        return
    for entry, name in zip(entries, names, strict=True):
        if entry.limits != NO_LIMITS:
            raise ValueError(
                f"configure_optimizers returned limits on the gradients of {name!r}. {CLIP_IN_STEP}"
            )


def _check_attached(schedulers: Sequence[SchedulerEntry], optimizers: Sequence[Optimizer]) -> None:
    """Raise if a scheduler has no effect, since its optimizer was not returned.

    If a returned optimizer is not torch's, it may wrap an optimizer, which then counts as returned.
    The wrapper may have its own groups, so parameters are compared.

    Raises:
        ValueError: There is such a scheduler.
    """
    trained = set(map(id, parameters_of(optimizers)))
    wrapped = any(
        not type(optimizer).__module__.startswith("torch.optim.") for optimizer in optimizers
    )
    for entry in schedulers:
        scheduled = getattr(entry.scheduler, "optimizer", None)
        if not isinstance(scheduled, Optimizer) or any(
            scheduled is optimizer for optimizer in optimizers
        ):
            continue
        if not wrapped or trained.isdisjoint(map(id, parameters_of([scheduled]))):
            raise ValueError(
                f"configure_optimizers returned a {type(entry.scheduler).__name__} for a "
                f"{type(scheduled).__name__} that it did not return, so it has no effect: create "
                "the scheduler with the optimizer that you return."
            )


def _check_separate(
    optimizers: Sequence[Optimizer], names: Sequence[str], module: nn.Module
) -> None:
    """Raise if two optimizers share a parameter, which each update would change twice.

    Raises:
        ValueError: There is such a parameter.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of([optimizer]):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                named = bare_names(module, module.named_parameters())
                name = next((n for n, p in named if p is parameter), "?")
                raise ValueError(
                    f"The optimizers {names[other]!r} and {names[number]!r} that "
                    f"configure_optimizers returned both have the parameter {name!r}, and every "
                    "optimizer steps at every update: give each its own parameters. To alternate "
                    "between losses set automatic_optimization = False."
                )


def _dicts(returned: Any) -> bool:
    """Return whether a value is a tuple of dicts, which is no (optimizer, scheduler) pair."""
    return isinstance(returned, tuple) and all(isinstance(part, Mapping) for part in returned)


def _two_lists(pair: Sequence[Any]) -> bool:
    return all(isinstance(part, (list, tuple)) for part in pair)


def _read_optimizer(part: Any) -> tuple[OptimizerEntry, SchedulerEntry | None]:
    if isinstance(part, Optimizer):
        return OptimizerEntry(optimizer=part), None
    if isinstance(part, tuple) and len(part) == 2:
        return OptimizerEntry(optimizer=part[0]), _scheduler_entry(part[1])
    if not isinstance(part, Mapping):
        raise TypeError(_unreadable(part))
    _check_keys(part, _OPTIMIZER_KEYS)
    if "optimizer" not in part:
        raise ValueError(f"configure_optimizers returned a dict without 'optimizer': {part!r}.")
    options = {key: part[key] for key in ("optimizer", *_OWN_KEYS) if key in part}
    return OptimizerEntry(**options), _read_scheduler(part)


def _read_scheduler(part: Mapping[str, Any]) -> SchedulerEntry | None:
    options = {key: value for key, value in part.items() if key in _TICKS}
    if "lr_scheduler" in part:  # Lightning's key: a scheduler, or a dict of its options
        if "scheduler" in part:
            raise ValueError("Pass a scheduler as 'scheduler' or as 'lr_scheduler', not both.")
        nested = part["lr_scheduler"]
        entry = nested if isinstance(nested, Mapping) else {"scheduler": nested}
        return _scheduler_entry({**options, **entry})
    return _scheduler_entry(options) if options else None


def _scheduler_entry(scheduler: Any) -> SchedulerEntry:
    if isinstance(scheduler, Mapping):
        options = dict(scheduler)
        options.pop(_PORTED_KEY, None)
        _check_keys(options, _SCHEDULER_KEYS)
        if "scheduler" not in options:
            keys = ", ".join(map(repr, options)) or "a dict"
            raise ValueError(f"configure_optimizers returned {keys} but no 'scheduler'.")
        return SchedulerEntry(**options)
    return SchedulerEntry(scheduler=scheduler)


def _check_keys(part: Mapping[Any, Any], valid: Sequence[str]) -> None:
    for key in part:
        check_choice("A key that configure_optimizers returned", key, valid)


def _unreadable(value: Any) -> str:
    what = "no optimizer" if value is None else f"{value!r} of type {type(value).__name__}"
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        what = f"a scheduler, {type(value).__name__}, where an optimizer belongs"
    return f"configure_optimizers returned {what}. {_SHAPES}"
