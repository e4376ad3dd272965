"""Settings of torch.compile, FSDP, DeepSpeed, Megatron-LM, the mesh and fp8.

They are fields of the dataclasses in `trainer.configuration`, which the processes read from the
environment. Options and keys have the same names: ``--fsdp_offload_params`` and
``fsdp_offload_params``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from trainer.checks import check_choice, check_counts, choice_error
from trainer.configuration import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from trainer.configuration.fields import options_of
from trainer.configuration.fp8 import BACKEND
from trainer.enums import FP8BackendType
from trainer.environment import FALSE, TRUE

# By option; the file's keys have the same names.
DYNAMO = options_of(TorchDynamoPlugin)
FP8 = {BACKEND.option: BACKEND, **options_of(AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)}
FSDP = options_of(FullyShardedDataParallelPlugin)
DEEPSPEED = options_of(DeepSpeedPlugin)
MESH = options_of(ParallelismConfig)
MEGATRON = options_of(MegatronLMPlugin)
# By section of the file: the option that requests it, and its settings.
SECTIONS = {
    "fsdp_config": ("use_fsdp", FSDP),
    "deepspeed_config": ("use_deepspeed", DEEPSPEED),
    "parallelism_config": ("use_parallelism_config", MESH),
    "megatron_lm_config": ("use_megatron_lm", MEGATRON),
}
# Options of DeepSpeed's own multi-node launcher, and the values that mean our launcher.
LAUNCHER = {
    "deepspeed_multinode_launcher": ("standard", "nossh"),
    "deepspeed_hostfile": (),
    "deepspeed_exclusion_filter": (),
    "deepspeed_inclusion_filter": (),
}
# Options that a DeepSpeed configuration has itself.
_IN_FILE = [name for name in DEEPSPEED if not name.startswith(("deepspeed_", "zero3_init"))]
_OTHER_FP8_NAMES = {"fp8_amax_compute_algorithm": "fp8_amax_compute_algo"}


def count(text: str) -> int:
    """Return the value of an option as a number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: The value is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)


def truth(text: str) -> bool:
    """Return the value of an option or an answer as a bool.

    Raises:
        argparse.ArgumentTypeError: The value is something else.
    """
    if text.lower() not in TRUE | FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} must be yes or no")
    return text.lower() in TRUE


def limit(text: str) -> float | str:
    """Return ``"auto"``, or a number.

    Raises:
        ValueError: The text is neither.
    """
    return text if text == "auto" else float(text)


def three_bools(text: str) -> tuple[bool, ...]:
    """Return ``"false,true,true"`` as a tuple.

    Raises:
        ValueError: There are not three values, or one is not a bool.
    """
    values = tuple(truth(word.strip()) for word in text.strip("()[]").split(","))
    if len(values) != 3:
        raise ValueError(f"{text!r} must be three bools, such as false,false,true")
    return values


def settings_of_deepspeed(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of ``deepspeed_config`` without settings that mean our launcher.

    Raises:
        ValueError: A setting belongs to DeepSpeed's own launcher, or is also in the configuration's
            file.
    """
    if settings is None:
        return None
    kept = {name: value for name, value in settings.items() if value is not None}
    for name in kept.keys() & LAUNCHER.keys():
        if (value := kept.pop(name)) not in LAUNCHER[name]:
            raise ValueError(
                f"{name} is {value!r}, for DeepSpeed's launcher, which Cadence does not use: "
                "remove it, and run trainer launch on each machine, with --machine_rank and "
                "--main_process_ip, or with --slurm."
            )
    if "deepspeed_config_file" in kept and (beside := [n for n in _IN_FILE if n in kept]):
        raise ValueError(
            f"{', '.join(beside)} cannot be combined with deepspeed_config_file: set it in that "
            "file, or leave the file out."
        )
    return kept


def check_settings(
    sections: Mapping[str, Mapping[str, Any] | None], processes: int | None, *, cpu: bool
) -> None:
    """Check the names of settings, and that the sizes fit the number of processes.

    Args:
        sections: Settings by section; None for a section that is not requested.
        processes: The number of processes; None if it is not known.
        cpu: Whether they use the CPU.

    Raises:
        ValueError: A name is unknown, the product of the sizes differs, several sections split the
            model, or Megatron-LM is requested on the CPU.
        TypeError: A size is not an int.
    """
    requested = {name: settings for name, settings in sections.items() if settings is not None}
    for section, settings in requested.items():
        allowed = SECTIONS[section][1]
        for key in settings:
            check_choice(f"a key of {section}", key, allowed)
    options = {section: f"--{SECTIONS[section][0]} ({section})" for section in requested}
    for section in ("deepspeed_config", "megatron_lm_config"):
        if section in requested and len(requested) > 1:
            alone = options.pop(section)
            raise ValueError(
                f"{alone} cannot be combined with {' and '.join(options.values())}: each divides "
                "the model. Choose one."
            )
    if "megatron_lm_config" in requested and cpu:
        raise ValueError(
            "Megatron-LM (--use_megatron_lm, megatron_lm_config) trains on CUDA devices: leave "
            "out --cpu (use_cpu), or shard with --use_fsdp (fsdp_config) instead."
        )
    mesh = requested.get("parallelism_config", {})
    sizes_of = {n: size for n, size in mesh.items() if n.endswith("_size") and size is not None}
    check_counts(1, **sizes_of)
    product = math.prod(sizes_of.values())
    if "parallelism_config" in requested and processes is not None and product != processes:
        sizes = ", ".join(f"{name} {size}" for name, size in sizes_of.items())
        raise ValueError(
            f"The sizes of parallelism_config multiply to {product} ({sizes or 'none is given'}); "
            f"the number of processes is {processes}."
        )


def variables_of(sections: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process."""
    variables: dict[str, Any] = {}
    for section, settings in sections.items():
        if settings is not None:
            option, settings_of = SECTIONS[section]
            variables[f"ACCELERATE_{option.upper()}"] = True
            for name, value in settings.items():
                variables |= settings_of[name].variables(value)
    return variables


def fp8_settings(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of ``fp8_config`` under their names as options; None without any.

    Raises:
        ValueError: A name or the backend is unknown.
    """
    if not settings:
        return None
    by_option: dict[str, Any] = {}
    for key, value in settings.items():
        name = key if key.startswith("fp8_") else f"fp8_{key}"
        name = _OTHER_FP8_NAMES.get(name, name)
        if name not in FP8:
            raise ValueError(choice_error("a key of fp8_config", key, FP8))
        if value is not None:
            by_option[name] = value
    if (backend := by_option.get("fp8_backend")) is not None:
        by_option["fp8_backend"] = FP8BackendType.parse(str(backend).upper(), "fp8_backend")
    return by_option


def fp8_variables(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process."""
    variables: dict[str, Any] = {}
    for name, value in (settings or {}).items():
        several = FP8[name].kind == "bools" and isinstance(value, str)
        variables |= FP8[name].variables(three_bools(value) if several else value)
    return variables
