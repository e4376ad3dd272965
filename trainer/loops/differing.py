"""Whether all processes of a fit were told the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from callbacks import Callback, EarlyStopping, Interval, ModelCheckpoint, SpikeDetection, Timer
from callbacks.monitor import Monitor
from trainer.distributed.collectives import all_gather_object
from trainer.loops.settings import Settings

# what each process may have for itself: it neither decides nor changes a number of a fit
_OF_A_PROCESS = {
    "deterministic",
    "detect_anomaly",
    "profile",
    "limit_test_batches",
    "limit_predict_batches",
}
_OF_THE_CLOCK = (
    " Times that each works out for itself are never quite the same: take rank 0's, seconds = "
    "trainer.utils.broadcast_object_list([seconds])[0]."
)
_Decider = EarlyStopping | ModelCheckpoint | SpikeDetection | Timer


def refuse_differing(
    settings: Settings, callbacks: Iterable[Callback], ckpt_path: str | os.PathLike[str] | None
) -> None:
    """Refuse a fit that processes are told differently, before one waits for the others in vain.

    Compared is what decides how the loop goes; collective.

    Raises:
        ValueError: On all processes alike; it names the argument and what each process has.
    """
    own = {name: repr(value) for name, value in settings.describe().items()}
    for name in _OF_A_PROCESS if settings.budget is None else {*_OF_A_PROCESS, "max_time"}:
        own.pop(name, None)
    deciders = [each for each in callbacks if isinstance(each, _Decider) and each.decides_by]
    own["callbacks that save or stop"] = ", ".join(map(_decides_by, deciders)) or "none"
    word = ckpt_path in (None, "auto", "best", "last")  # paths may lie on disks of their own
    own["ckpt_path"] = repr(ckpt_path) if word else "a path"
    by_clock = {name for name, value in vars(settings).items() if _is_of_the_clock(name, value)}
    if any(_is_of_the_clock(name, value) for each in deciders for name, value in _decided(each)):
        by_clock.add("callbacks that save or stop")
    told = all_gather_object((own, by_clock))
    for name in dict.fromkeys(name for values, _ in told for name in values):
        values = [each.get(name, "None") for each, _ in told]
        if any(value != values[0] for value in values):
            shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            hint = _OF_THE_CLOCK if any(name in names for _, names in told) else ""
            raise ValueError(
                f"fit was told something else on each process, {name}: {shown}. Give all the same; "
                f"what one process has to do alone, such as writing, it does by itself.{hint}"
            )


def _is_of_the_clock(name: str, value: Any) -> bool:
    if isinstance(value, Interval):
        return value.unit == "seconds"
    return name in ("max_time", "duration") and value is not None


def _decided(callback: _Decider) -> list[tuple[str, Any]]:
    """What decides when it acts."""
    named = [(name, getattr(callback, name)) for name in callback.decides_by]
    return [(name, value) for name, value in named if value is not None]


def _decides_by(callback: _Decider) -> str:
    """The class, with what decides when it acts."""
    parts = [
        f"{name}={f'{value.name} {value.mode}' if isinstance(value, Monitor) else value}"
        for name, value in _decided(callback)
    ]
    return f"{type(callback).__name__}({', '.join(parts)})"
