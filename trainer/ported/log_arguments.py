"""Arguments of Lightning's ``self.log``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.checks import choice_error

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


LOG_TRANSLATED = ("rank_zero_only", "reduce_fx", "enable_graph", "sync_dist_group")
"""Arguments of Lightning's ``self.log`` of which some values do not carry over."""


def log_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's arguments of ``self.log`` in the words of `MetricStore.log`.

    Raises:
        ValueError: One asks for what is not done; the text says what to do.
        TypeError: There is no such argument.
    """
    taken: dict[str, Any] = {}
    for argument, value in given.items():
        where = f"log({name!r}, {argument}={value!r})"
        if argument == "reduce_fx":
            kind = value if isinstance(value, str) else _reduction(value)
            if kind is None:
                raise ValueError(
                    f"{where}: a function cannot be reduced over processes; give 'mean', 'sum', "
                    "'min' or 'max', or log an object with update, compute and reset."
                )
            taken["reduce"] = kind
        elif argument == "rank_zero_only":
            if value:
                raise ValueError(
                    f"{where}: the other processes would wait for this one's value. Call log on "
                    "all of them: values are reduced over the processes, and one of them records."
                )
        elif argument == "enable_graph":
            if value:
                raise ValueError(
                    f"{where}: logged values are detached, so that they hold no graph alive. Keep "
                    "the tensor yourself."
                )
        elif argument == "sync_dist_group":
            if value is not None:
                raise ValueError(f"{where}: values are reduced over all processes; leave it out.")
        elif argument not in ("sync_dist", "metric_attribute"):
            raise TypeError(choice_error(f"An argument of log({name!r})", argument, _LOG_KNOWN))
    return taken


def _reduction(function: Any) -> str | None:
    return _REDUCTIONS.get(function) if callable(function) else None
