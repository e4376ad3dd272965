"""Replacements of another Trainer's arguments that depend on the value, and invalid values.

The invalid values are values of Lightning's arguments that `trainer.lightning` does not support.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from trainer.checks import choice_error
from trainer.migration.table import (
    BEST,
    LIGHTNING_NAMES,
    NOTHING,
    SAVES,
    SHARDED,
    SHARDED_BY_US,
    ZERO,
)

_FIND_UNUSED = "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"


def _devices(value: Any) -> str:
    """Replace a number of devices, or device indices in a list or separated by commas."""
    if isinstance(value, str) and "," in value:
        value = [index.strip() for index in value.split(",") if index.strip()]
    indices = isinstance(value, (list, tuple))
    number = ",".join(map(str, value)) if indices else str(value)
    if number == ("" if indices else "0"):
        return "cpu=True"
    if number == ("0" if indices else "1"):
        return f"{NOTHING}: one process is the default, on the fastest device or with cpu=True"
    if indices:
        return f"trainer launch --gpu_ids {number} script.py"
    if number in ("auto", "-1"):
        return "trainer launch script.py, which starts a process for each device"
    return f"trainer launch --num_processes {number if number.isdigit() else 'N'} script.py"


def _num_nodes(value: Any) -> str:
    if value == 1:
        return f"{NOTHING}: one machine is the default"
    return (
        f"trainer launch --num_machines {_integer(value)} --machine_rank R --main_process_ip HOST "
        "--nproc_per_node N script.py on each machine: R counts them from 0, HOST is the first, N "
        "its processes"
    )


def _strategy(value: Any) -> str:
    words = str(value).lower()
    if words in ("auto", "single_device"):
        return f"{NOTHING}: the number of processes decides"
    if "fsdp" in words:
        return SHARDED
    if "deepspeed" in words:
        return ZERO
    if "notebook" in words:
        return "notebook_launcher(function, num_processes=N): several processes train with DDP"
    unused = f", with {_FIND_UNUSED}" if "find_unused_parameters_true" in words else ""
    return f"trainer launch --num_processes N script.py: several processes train with DDP{unused}"


def _precision(value: Any) -> str:
    words = str(value).lower()
    if "32" in words:
        return f"{NOTHING}: float32 is the default"
    arguments = PRECISIONS.get(words, {"mixed_precision": "bf16' or 'fp16"})
    return next(f"{name}='{choice}'" for name, choice in arguments.items())


def _every_batches(value: Any) -> str:
    """Replace an interval in batches (int), as a fraction of an epoch (float), or in time."""
    if isinstance(value, float):
        return _every_epochs(value)
    if isinstance(value, (str, timedelta, Mapping)):
        return "val_every='30 minutes' or another time"
    return (
        f"val_every='{_number(value)} steps', where a step is an update: divide a number of "
        "batches by gradient_accumulation_steps"
    )


def _every_epochs(value: Any) -> str:
    if value is None:
        return "an interval such as val_every='500 steps', which counts across epochs"
    return f"val_every='{_number(value)} epoch{'' if value == 1 else 's'}'"


def _every_steps(value: Any) -> str:
    """Replace an interval in updates or, if below 1, as a fraction of the run."""
    return f"val_every='{_integer(value)} steps'"


def _eval_strategy(value: Any) -> str:
    kind = _choice_name(value)
    if kind == "no":
        return "limit_val_batches=0, or fit without a validation loader"
    if kind == "epoch":
        return f"{NOTHING}: val_every='1 epoch' is the default"
    return "val_every='500 steps' or '1 epoch'"


def _save_strategy(value: Any) -> str:
    kind = _choice_name(value)
    if kind == "no":
        return "checkpointing=False"
    if kind == "epoch":
        return f"{NOTHING}: a checkpoint is saved every epoch by default"
    return BEST if kind == "best" else SAVES.format("every=500, save_last=2")


def _choice_name(value: Any) -> str:
    """Return the name of a Hugging Face choice, given as a text or an enum member."""
    return str(getattr(value, "value", value)).lower()


def _num_epochs(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return "max_steps, which may end within an epoch"
    return f"max_epochs={_number(value)}" if isinstance(value, float) else "max_epochs"


def _on_by_default(name: str) -> Callable[[Any], str]:
    """Replace a switch that is on by default, like our argument ``name``."""

    def instead(value: Any) -> str:
        off = isinstance(value, int) and not value
        return f"{name}=False" if off else f"{NOTHING}: {name}=True is the default"

    return instead


def _clip_value(value: Any) -> str:
    if value == 0:
        return f"{NOTHING}: nothing is clipped by default"
    limit = _number(value)
    return f"max_grad_norm={limit}, or max_grad_value={limit} if the algorithm is 'value'"


def _accumulation(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"callbacks=[GradientAccumulationScheduler({dict(value)})]"
    return "gradient_accumulation_steps"


def _number(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, (int, float)) else "N"


def _integer(value: Any) -> str:
    count = isinstance(value, (int, float)) and value is not True and value % 1 == 0
    return _number(value if count else ...)


BY_VALUE: dict[str, Callable[[Any], str]] = {
    "accumulate_grad_batches": _accumulation,
    "check_val_every_n_epoch": _every_epochs,
    "checkpoint_callback": _on_by_default("checkpointing"),
    "devices": _devices,
    "distributed_backend": _strategy,
    "enable_autolog_hparams": lambda value: (
        f"{NOTHING}: save_hyperparameters decides"
        if value
        else "save_hyperparameters(logger=False)"
    ),
    "enable_checkpointing": _on_by_default("checkpointing"),
    "enable_progress_bar": _on_by_default("progress_bar"),
    "eval_steps": _every_steps,
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
    "gpus": _devices,
    "gradient_clip_algorithm": lambda value: (
        "max_grad_value" if _choice_name(value) == "value" else "max_grad_norm"
    ),
    "gradient_clip_val": _clip_value,
    "greater_is_better": lambda value: SAVES.format(
        f"monitor=..., mode={'max' if value else 'min'!r}"
    ),
    "num_nodes": _num_nodes,
    "num_processes": _devices,
    "num_train_epochs": _num_epochs,
    "precision": _precision,
    "progress_bar_refresh_rate": _on_by_default("progress_bar"),
    "save_steps": lambda value: SAVES.format(f"every={_integer(value)}"),
    "save_strategy": _save_strategy,
    "save_total_limit": lambda value: SAVES.format(
        "save_top_k=-1" if value is None else f"save_last={_integer(value)}"
    ),
    "strategy": _strategy,
    "terminate_on_nan": lambda value: (
        "non_finite='ignore'" if value is False else f"{NOTHING}: non_finite='stop' is the default"
    ),
    "track_grad_norm": lambda value: (
        f"{NOTHING}: no norm is logged by default"
        if str(value) == "-1"
        else "callbacks=[GradientNormMonitor()]"
    ),
    "val_check_interval": _every_batches,
}
"""Argument: what to use for a value."""
_NONE_IS_A_VALUE = ("check_val_every_n_epoch", "save_total_limit")  # else None is unset


def instead_of(name: str, general: str, value: Any) -> str:
    """Return the replacement of an argument.

    Args:
        name: The argument.
        general: The replacement in the table.
        value: Its value; ``...`` if unknown.
    """
    if value is ...:
        return general
    if _asks_for_nothing(name, general, value):
        return f"{NOTHING}: {value!r} asks for nothing"
    return BY_VALUE[name](value) if name in BY_VALUE else general


def _asks_for_nothing(name: str, general: str, value: Any) -> bool:
    """Return whether the value turns the feature off, so that the argument can be left out."""
    if value is None:
        return name not in _NONE_IS_A_VALUE
    if name in BY_VALUE:
        return False
    if isinstance(value, (str, list, tuple, dict)):
        return not value or value in ("none", "no")
    return value is False and not general.startswith(NOTHING)


# -- values that trainer.lightning cannot take -----------------------------------------------------

PRECISIONS: dict[str, dict[str, str]] = {
    **{name: {"mixed_precision": "no"} for name in ("32-true", "32")},
    **{name: {"mixed_precision": "fp16"} for name in ("16-mixed", "16")},
    **{name: {"mixed_precision": "bf16"} for name in ("bf16-mixed", "bf16")},
    **{name: {"dtype": "float64"} for name in ("64-true", "64")},
    "16-true": {"dtype": "float16"},
    "bf16-true": {"dtype": "bfloat16"},
}
"""Lightning's precisions, as arguments of our Trainer; the first name of several is its own."""
_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("auto", "single_device", "fsdp", "deepspeed")},
    **{
        f"ddp{start}{end}": arguments
        for start in ("", "_spawn", "_fork", "_notebook")
        for end, arguments in _UNUSED.items()
    },
    "fsdp_cpu_offload": {"cpu_offload": True},
    **{f"deepspeed_stage_{stage}": {"stage": stage} for stage in (1, 2, 3)},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3_offload": {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
    },
}
"""Lightning's strategies, with the arguments of the class that the first word names."""
_PROFILERS = {"advanced": "AdvancedProfiler", "xla": "XLAProfiler"}
Arguments = Mapping[str, Any]
_OBJECT = " An object of trainer.lightning.pytorch.{} is also accepted."


def _one_of(name: str, value: Any, choices: Iterable[str], further: str = "") -> str | None:
    return None if value in choices else choice_error(name, value, choices) + further


def wrong_accelerator(arguments: Arguments) -> str | None:
    """Return the error of an unknown device type; None if it is valid."""
    name = str(arguments.get("accelerator", "auto")).lower()
    return _one_of("accelerator", name, ("auto", "cpu", "gpu", "cuda", "mps"))


def wrong_strategy(arguments: Arguments) -> str | None:
    """Return the error of an unknown strategy name. Strategy objects check themselves."""
    name = arguments.get("strategy", "auto")
    further = _OBJECT.format("strategies")
    return _one_of("strategy", name, STRATEGIES, further) if isinstance(name, str) else None


def wrong_devices(arguments: Arguments) -> str | None:
    """Return the error of `devices`: an empty list, a repeated device, or not a number."""
    devices = arguments.get("devices", "auto")
    numbers = device_numbers(devices)
    if numbers is not None:
        fine = numbers and len(set(numbers)) == len(numbers) and all(map(str.isdigit, numbers))
        return None if fine else f"devices={devices!r} must name devices, each once."
    if devices is None or devices == "auto" or re.fullmatch(r"-1|\d+", str(devices)):
        return None
    return f"devices is {devices!r}; it must be a number, a list of numbers or 'auto'."


def device_numbers(devices: Any) -> list[str] | None:
    """Return the devices in a list or a comma-separated string; None for a number of devices."""
    if isinstance(devices, str) and "," in devices:
        devices = [device.strip() for device in devices.split(",") if device.strip()]
    several = isinstance(devices, Sequence) and not isinstance(devices, str)
    return [str(device) for device in devices] if several else None


def wrong_precision(arguments: Arguments) -> str | None:
    """Return the error of an unknown precision."""
    precision = arguments.get("precision")
    return None if precision is None else _one_of("precision", str(precision), PRECISIONS)


def wrong_profiler(arguments: Arguments) -> str | None:
    """Return the error of an unknown profiler name."""
    profiler = arguments.get("profiler")
    if profiler in ("advanced", "xla"):
        use = LIGHTNING_NAMES[f"pytorch.profilers.{_PROFILERS[profiler]}"]
        return f"profiler={profiler!r} is not in Cadence: {use}."
    further = _OBJECT.format("profilers")
    text = isinstance(profiler, str)
    return _one_of("profiler", profiler, ("simple", "pytorch"), further) if text else None


def wrong_clipping(arguments: Arguments) -> str | None:
    """Return the error of an unknown clipping algorithm."""
    algorithm = arguments.get("gradient_clip_algorithm") or "norm"
    return _one_of("gradient_clip_algorithm", algorithm, ("norm", "value"))


def wrong_interval(arguments: Arguments) -> str | None:
    """Return the error of a validation interval that contradicts the arguments it depends on."""
    interval = arguments.get("val_check_interval")
    epochs = arguments.get("check_val_every_n_epoch", 1)
    windows = arguments.get("accumulate_grad_batches", 1)
    if isinstance(interval, str) and not re.fullmatch(r"\d+(:\d+){3}", interval):
        return f"val_check_interval is {interval!r}; a text must be a time as DD:HH:MM:SS."
    if isinstance(interval, (str, timedelta, Mapping)):
        return None
    if epochs is None and interval is None:
        return (
            "check_val_every_n_epoch=None counts batches across epochs: give val_check_interval an "
            "int, or a time."
        )
    if isinstance(interval, int) and not isinstance(interval, bool):
        if isinstance(windows, int) and windows > 0 and interval % windows:
            return (
                f"val_check_interval is {interval} batches, which is no multiple of "
                f"accumulate_grad_batches={windows}: a validation follows an update."
            )
    elif epochs is None:
        return (
            f"val_check_interval is {interval}, a part of an epoch, and check_val_every_n_epoch is "
            "None: give an int, a number of batches across epochs."
        )
    return None


def wrong_sampler(arguments: Arguments) -> str | None:
    """Return the error of `use_distributed_sampler=False` on several processes."""
    devices, nodes = arguments.get("devices", "auto"), arguments.get("num_nodes", 1)
    numbers = device_numbers(devices)
    number = str(devices if numbers is None else len(numbers))
    if arguments.get("use_distributed_sampler", True) or (nodes == 1 and number == "1"):
        return None
    return f"use_distributed_sampler=False has no effect on several processes; {SHARDED_BY_US}."


WRONG_VALUES: dict[str, Callable[[Arguments], str | None]] = {
    "accelerator": wrong_accelerator,
    "devices": wrong_devices,
    "gradient_clip_algorithm": wrong_clipping,
    "precision": wrong_precision,
    "profiler": wrong_profiler,
    "strategy": wrong_strategy,
    "use_distributed_sampler": wrong_sampler,
    "val_check_interval": wrong_interval,
}
"""Argument of Lightning's Trainer: what is wrong with its value, in one sentence; None if nothing.

Each function takes all arguments that were given, by name.
"""


def wrong_values(arguments: Arguments) -> list[str]:
    """Return a sentence for each value that `trainer.lightning`'s Trainer does not support."""
    messages = (check(arguments) for check in WRONG_VALUES.values())
    return [message for message in messages if message is not None]
