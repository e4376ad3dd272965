"""What ``configure_optimizers`` chose, in words that processes and starts of a run can compare."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from trainer.optim.configure import OptimizerEntry, SchedulerEntry, names_of

logger = logging.getLogger(__name__)

_OF_SPEED = ("foreach", "fused", "capturable", "differentiable")


def options_of(
    entries: Sequence[OptimizerEntry], schedulers: Iterable[SchedulerEntry]
) -> dict[str, str]:
    """Return what the updates depend on, by what it is called in messages.

    Of an optimizer these are its options; of a schedule, which may keep anything, only its class
    and when it ticks.
    """
    names = names_of(entries)
    options = {"optimizers": ", ".join(names) or "none"}
    for name, entry in zip(names, entries, strict=True):
        groups = entry.optimizer.param_groups
        chosen = [option for option in entry.optimizer.defaults if option not in _OF_SPEED]
        options[f"the class of {name}"] = type(entry.optimizer).__name__
        for number, group in enumerate(groups):
            place = name if len(groups) == 1 else f"{name}, group {number}"
            options[f"the number of parameters of {place}"] = str(len(group["params"]))
            options |= {f"{each} of {place}": _plain(group.get(each)) for each in chosen}
    for number, each in enumerate(schedulers):
        kind = type(each.scheduler).__name__
        ticks = f"{kind}, every {each.frequency} {each.interval}, monitor={each.monitor!r}"
        options[f"scheduler {number}"] = ticks
    return options


def _plain(value: Any) -> str:
    """Format numbers and words, also in tuples; of other objects the type alone."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate on the device
        value = value.item()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{float(value):.6g}"  # 1 is 1.0, and a float32 as its number was written
    plain = value is None or isinstance(value, (bool, str))
    return repr(value) if plain else type(value).__name__


def keep_options(
    options: MutableMapping[str, str], saved: MutableMapping[str, str], *, tell: bool
) -> None:
    """Note that a resumed run has the options of its checkpoint, and warn of those it was given.

    Args:
        options: Of this start, changed to those in effect.
        saved: Those that were in effect when the checkpoint was saved.
        tell: Whether to warn.
    """
    of_groups = [name for name in options if " of " in name and not name.startswith("the ")]
    changed = [name for name in of_groups if options[name] != saved.get(name, options[name])]
    if changed and tell:
        logger.warning(
            "The optimizers are the checkpoint's, although configure_optimizers has changed: %s%s. "
            "To change a value within a run, set it in on_train_start.",
            "; ".join(f"{name} stays {saved[name]}, not {options[name]}" for name in changed[:3]),
            "; …" if changed[3:] else "",
        )
    options.update((name, saved[name]) for name in changed)
