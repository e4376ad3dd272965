"""The optimizer fingerprint: the choices of ``configure_optimizers``, as text.

It is compared between processes, and between a resumed run and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from trainer.errors import CheckpointError, module_logger
from trainer.optim.configure import SchedulerEntry
from trainer.optim.optimizer import AcceleratedOptimizer

logger = module_logger(__name__)

NUMBER = "the number of parameters of"  # prefix of the name of an option
_OF_SPEED = ("foreach", "fused", "capturable", "differentiable")  # do not change the result
_NOT_CHOSEN = ("params", "initial_lr")  # keys of a parameter group that are not options
_OF_SCHEDULES = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # keys of a group
_NOT_OF_A_SCHEDULE = ("last_epoch", "verbose", "base_lrs", "optimizer", "lr_lambdas")


def options_of(
    names: Sequence[str],
    optimizers: Sequence[AcceleratedOptimizer],
    schedulers: Sequence[SchedulerEntry],
) -> dict[str, str]:
    """Return the options of optimizers and schedulers as strings, by their name in messages.

    For an optimizer, these are its class and options, with initial learning rates; for a torch
    scheduler, the numbers that it was created with; for any other scheduler, its class and
    interval.

    Args:
        names: The names of the optimizers.
        optimizers: The prepared optimizers, in the user's order.
        schedulers: The schedulers, in the user's order.
    """
    options = {"optimizers": ", ".join(names) or "none"}
    for name, prepared in zip(names, optimizers, strict=True):
        optimizer = prepared.optimizer
        groups = optimizer.param_groups
        options[f"the class of {name}"] = type(optimizer).__name__
        for number, group in enumerate(groups):
            place = name if len(groups) == 1 else f"{name}, group {number}"
            options[f"{NUMBER} {place}"] = str(len(group["params"]))
            chosen = [*getattr(optimizer, "defaults", group)]  # a user's class may have none
            chosen += [option for option in _OF_SCHEDULES if option in group]
            values = group | {"lr": group.get("initial_lr", group.get("lr"))}
            options |= {
                f"{option} of {place}": _plain(values.get(option))
                for option in chosen
                if option not in (*_OF_SPEED, *_NOT_CHOSEN)
            }
    for number, entry in enumerate(schedulers):
        kind = type(entry.scheduler).__name__
        ticks = f"{kind}, every {entry.frequency} {entry.interval}, monitor={entry.monitor!r}"
        options[f"scheduler {number}"] = ticks
        options[_class_of(number)] = kind
        options |= dict(_numbers(entry.scheduler, f"scheduler {number} ({kind})"))
    return options


def _class_of(scheduler: int) -> str:
    return f"the class of scheduler {scheduler}"


def _numbers(schedule: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments that torch's schedulers were created with, including nested schedulers.

    Counters are left out. Other classes, including subclasses of torch's, are not compared, since
    they may have attributes of any kind.
    """
    is_of_torch = type(schedule).__module__.startswith("torch.optim.")
    for key, value in vars(schedule).items() if is_of_torch else ():
        if key in _NOT_OF_A_SCHEDULE:
            continue
        if key == "_schedulers":
            for number, inner in enumerate(value):
                yield from _numbers(inner, f"{place}, part {number}")
        elif not key.startswith("_"):
            yield f"{key} of {place}", _plain(value)


def _plain(value: Any) -> str:
    """Format numbers and strings, also in nested tuples; other objects as their type's name."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate on the device
        value = value.item()
    if isinstance(value, Mapping):  # MultiStepLR keeps its milestones in a Counter
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Real) and not isinstance(value, bool):  # also numpy's numbers
        number = float(value)  # so that 1 equals 1.0, and a float32 its original float
        whole = number.is_integer() and abs(number) < 2**53  # keep all digits of counts
        return str(int(number)) if whole else f"{number:.6g}"
    plain = value is None or isinstance(value, (bool, str))
    return repr(value) if plain else type(value).__name__


def keep_options(
    options: MutableMapping[str, str],
    saved: Mapping[str, str],
    restored: Mapping[str, str],
    *,
    tell: bool,
) -> None:
    """Warn that a resumed run keeps the checkpoint's options where the script has changed them.

    Args:
        options: The options that `configure_optimizers` returned at this start; replaced in place
            by the checkpoint's options where they differ.
        saved: The options in the checkpoint, as they were at the save, without changes by hooks.
        restored: The options of the restored optimizers and schedulers, which schedulers and hooks
            may have changed during the run.
        tell: Whether to log the warning.
    """
    changed = [
        name
        for name, value in options.items()
        if " of " in name
        and not name.startswith("the ")
        and value not in (saved.get(name, value), restored.get(name))
    ]
    if changed and tell:
        logger.warning(
            "Optimizer options and schedules come from the checkpoint, although "
            "configure_optimizers has changed: %s%s. To change a value within a run, set "
            "it in on_train_start; for a learning rate, call trainer.scale_learning_rate there "
            "once, which also scales its schedule.",
            "; ".join(
                f"{n} stays {restored.get(n, saved[n])}, not {options[n]}" for n in changed[:3]
            ),
            "; …" if changed[3:] else "",
        )
    options.update((name, saved[name]) for name in changed)


def check_schedules(options: Mapping[str, str], saved: Mapping[str, str], schedulers: int) -> None:
    """Raise if a scheduler's class differs from the checkpoint's: the state cannot be loaded.

    Args:
        options: The options at this start.
        saved: The options in the checkpoint.
        schedulers: The number of schedulers.

    Raises:
        CheckpointError: A class differs.
    """
    for name in map(_class_of, range(schedulers)):
        if options[name] != saved.get(name, options[name]):
            raise CheckpointError(
                f"configure_optimizers returns a {options[name]}, but {name} in the checkpoint is "
                f"{saved[name]}, whose state it cannot continue. Return the same one, or start a "
                "new run with the weights: load_from_checkpoint, and fit without ckpt_path."
            )
