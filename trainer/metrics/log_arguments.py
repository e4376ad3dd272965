"""Arguments of Lightning's ``self.log``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.checks import choice_error
from trainer.hints import LOG_ARGUMENTS

_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}
_LOG_KNOWN = (
    "on_step",
    "on_epoch",
    "prog_bar",
    "reduce",
    "batch_size",
    "logger",
    "add_dataloader_idx",
    "sync_dist",
    "sync_dist_group",
    "reduce_fx",
    "enable_graph",
    "metric_attribute",
    "rank_zero_only",
)


def log_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Lightning's arguments of ``self.log`` to those of `MetricStore.log`.

    Raises:
        ValueError: An argument requests something unsupported; the message names the alternative.
        TypeError: There is no such argument.
    """
    taken: dict[str, Any] = {}
    for argument, value in arguments.items():
        refused = False
        if argument == "reduce_fx":
            kind = value if isinstance(value, str) else _reduction(value)
            refused = kind is None
            taken["reduce"] = kind
        elif argument == "sync_dist_group":
            refused = value is not None
        elif argument in LOG_ARGUMENTS:
            refused = bool(value)
        elif argument not in ("sync_dist", "metric_attribute"):
            raise TypeError(choice_error(f"An argument of log({name!r})", argument, _LOG_KNOWN))
        if refused:
            raise ValueError(f"log({name!r}, {argument}={value!r}): {LOG_ARGUMENTS[argument]}.")
    return taken


def _reduction(function: Any) -> str | None:
    return _REDUCTIONS.get(function) if callable(function) else None
