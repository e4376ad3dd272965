"""Rank consistency: check that arguments, optimizers and checkpoint names agree on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from callbacks import Callback, EarlyStopping, Interval, ModelCheckpoint, SpikeDetection, Timer
from callbacks.monitor import Monitor
from trainer.distributed.objects import all_gather_object
from trainer.loops.settings import Settings

# Arguments that may differ between ranks: they affect neither decisions nor numbers of a fit.
_OF_A_PROCESS = {
    "deterministic",
    "detect_anomaly",
    "profile",
    "limit_test_batches",
    "limit_predict_batches",
}
_OF_THE_CLOCK = (
    " Times computed on each process differ slightly: use rank 0's, seconds = "
    "trainer.utils.broadcast_object_list([seconds])[0]."
)
_Decider = EarlyStopping | ModelCheckpoint | SpikeDetection | Timer


def refuse_differing(
    settings: Settings, callbacks: Iterable[Callback], ckpt_path: str | os.PathLike[str] | None
) -> None:
    """Raise if the arguments of a fit differ between ranks, before they deadlock; collective.

    Only arguments that decide how the loop proceeds are compared.

    Args:
        settings: The Trainer's arguments.
        callbacks: The callbacks, whose settings are compared if they save or stop.
        ckpt_path: The argument of `Trainer.fit`.

    Raises:
        ValueError: An argument differs; raised on all ranks, with the value on each rank.
    """
    own = {name: repr(value) for name, value in settings.describe().items()}
    for name in _OF_A_PROCESS if settings.budget is None else {*_OF_A_PROCESS, "max_time"}:
        own.pop(name, None)
    deciders = [each for each in callbacks if isinstance(each, _Decider) and each.decides_by]
    own["callbacks that save or stop"] = ", ".join(map(_decides_by, deciders)) or "none"
    word = ckpt_path in (None, "auto", "best", "last")  # paths may differ between machines
    own["ckpt_path"] = repr(ckpt_path) if word else "a path"
    by_clock = {name for name, value in vars(settings).items() if _is_of_the_clock(name, value)}
    if any(_is_of_the_clock(name, value) for each in deciders for name, value in _decided(each)):
        by_clock.add("callbacks that save or stop")
    told = all_gather_object((own, by_clock))
    for name, shown in _differing([values for values, _ in told]):
        hint = _OF_THE_CLOCK if any(name in names for _, names in told) else ""
        raise ValueError(
            f"The processes called fit with different values of {name}: {shown}. Pass the same "
            "on all processes; the Trainer itself does on one process what only one should do, "
            f"such as writing.{hint}"
        )


def refuse_differing_options(options: Mapping[str, str]) -> None:
    """Raise if optimizer options differ between ranks, so that weights would diverge; collective.

    Args:
        options: What `trainer.loops.options.options_of` returned.

    Raises:
        ValueError: An option differs; raised on all ranks, with the value on each rank.
    """
    for name, shown in _differing(all_gather_object(options)):
        raise ValueError(
            f"configure_optimizers returned different values of {name}: {shown}. The weights would "
            "differ from the first update on. Draw or read a value once and share it: value = "
            "trainer.utils.broadcast_object_list([value])[0] is rank 0's on all processes."
        )


def refuse_differing_names(target: str) -> None:
    """Raise if ranks give a checkpoint different names; collective.

    Otherwise only the checkpoint of rank 0's name would exist.

    Args:
        target: The name of the checkpoint.

    Raises:
        ValueError: The names differ; raised on all ranks, with the name on each rank.
    """
    for _, shown in _differing(all_gather_object({"target": target})):
        raise ValueError(
            f"save_checkpoint was called with different names: {shown}. All processes write one "
            "checkpoint. Choose its name once and share it: name = "
            "trainer.utils.broadcast_object_list([name])[0] is rank 0's on all processes."
        )


def _differing(told: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the names whose values differ between ranks, each with the values of all ranks."""
    for name in dict.fromkeys(name for values in told for name in values):
        values = [each.get(name, "None") for each in told]
        if any(value != values[0] for value in values):
            yield name, "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _is_of_the_clock(name: str, value: Any) -> bool:
    if isinstance(value, Interval):
        return value.unit == "seconds"
    return name in ("max_time", "duration") and value is not None


def _decided(callback: _Decider) -> list[tuple[str, Any]]:
    """Return the settings that decide when the callback acts."""
    named = [(name, getattr(callback, name)) for name in callback.decides_by]
    return [(name, value) for name, value in named if value is not None]


def _decides_by(callback: _Decider) -> str:
    """Format the callback's class with the settings that decide when it acts."""
    parts = [
        f"{name}={f'{value.name} {value.mode}' if isinstance(value, Monitor) else value}"
        for name, value in _decided(callback)
    ]
    return f"{type(callback).__name__}({', '.join(parts)})"
