"""What ``configure_optimizers`` chose, in words that processes and starts of a run can compare."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.configure import OptimizerEntry, SchedulerEntry, names_of

logger = logging.getLogger(__name__)

_SHOWN = 3  # of the options that have changed


def options_of(
    entries: Sequence[OptimizerEntry], schedulers: Iterable[SchedulerEntry]
) -> dict[str, str]:
    """Return the options of the optimizers and schedules, by what they are called in messages."""
    names = names_of(entries)
    options = {"optimizers": ", ".join(names) or "none"}
    for name, entry in zip(names, entries, strict=True):
        groups = entry.optimizer.param_groups
        options[f"the class of {name}"] = type(entry.optimizer).__name__
        for number, group in enumerate(groups):
            place = name if len(groups) == 1 else f"{name}, group {number}"
            options[f"the number of parameters of {place}"] = str(len(group["params"]))
            chosen = {option: value for option, value in group.items() if option != "params"}
            options |= {f"{option} of {place}": _plain(value) for option, value in chosen.items()}
    for number, each in enumerate(schedulers):
        kind = type(each.scheduler).__name__
        name = f"scheduler {number} ({kind})"
        options[name] = f"{kind}, every {each.frequency} {each.interval}, monitor={each.monitor!r}"
        if isinstance(each.scheduler, LRScheduler):
            state = each.scheduler.state_dict()
            options |= {f"{key.lstrip('_')} of {name}": _plain(state[key]) for key in state}
    return options


def _plain(value: Any) -> str:
    """Format numbers and words, also in containers; of other objects the type alone."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate on the device
        return repr(value.item())
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_plain(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else type(value).__name__


def tell_of_changed(options: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Warn that a resumed run keeps options which the script has changed since the last start.

    Args:
        options: Of this start.
        saved: Of the start that saved the checkpoint. What only one of them has is not compared:
            another release of torch may have added it.
    """
    changed = [name for name in options if options[name] != saved.get(name, options[name])]
    if changed:
        logger.warning(
            "The checkpoint's optimizers and schedules are kept, although configure_optimizers has "
            "changed: %s%s. To change a value within a run, set it in on_train_start.",
            "; ".join(f"{name} was {saved[name]}, is {options[name]}" for name in changed[:_SHOWN]),
            "; …" if changed[_SHOWN:] else "",
        )
