"""Settings of DeepSpeed, as options, keys of ``deepspeed_config`` and environment variables.

A name is the same as an option and as a key: ``--zero_stage`` and ``zero_stage``. The processes
read the settings from the environment; see `trainer.deepspeed_plugin.DeepSpeedPlugin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checks import choice_error

# By name: the kind of value, and what it says.
DEEPSPEED: dict[str, tuple[str, str]] = {
    "deepspeed_config_file": ("text", "a JSON file with a configuration, in place of the rest"),
    "zero_stage": ("stage", "1 partitions the optimizer's state, 2 gradients, 3 parameters (2)"),
    "offload_optimizer_device": ("device", "where the optimizer's state is: none or cpu (none)"),
    "offload_param_device": ("device", "where parameters of stage 3 are: none or cpu (none)"),
    "offload_optimizer_nvme_path": ("text", "not used: nvme is not supported"),
    "offload_param_nvme_path": ("text", "not used: nvme is not supported"),
    "gradient_clipping": ("limit", "the maximum norm of gradients, or auto: as the script says"),
    "zero3_init_flag": ("bool", "stage 3 partitions models of transformers on loading (true)"),
    "zero3_save_16bit_model": ("bool", "save_model writes the weights in 16 bits (false)"),
    "deepspeed_moe_layer_cls_names": ("text", "experts that stage 3 gathers together"),
}
# Options of DeepSpeed's own launcher for several machines, and the values that mean ours.
LAUNCHER = {
    "deepspeed_multinode_launcher": ("standard", "nossh"),
    "deepspeed_hostfile": (),
    "deepspeed_exclusion_filter": (),
    "deepspeed_inclusion_filter": (),
}
_USE = "ACCELERATE_USE_DEEPSPEED"
_OTHER_NAMES = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
# What a configuration of DeepSpeed says itself.
_IN_FILE = [name for name in DEEPSPEED if not name.startswith(("deepspeed_", "zero3_init"))]


def _variable(name: str) -> str:
    return _OTHER_NAMES.get(name, f"ACCELERATE_DEEPSPEED_{name.upper()}")


VARIABLES = (_USE, *map(_variable, DEEPSPEED))


def limit(text: str) -> float | str:
    """Return ``"auto"``, or a number.

    Raises:
        ValueError: It is neither.
    """
    return text if text == "auto" else float(text)


def normalised(settings: Mapping[str, Any] | None, *, alone: bool) -> dict[str, Any] | None:
    """Return the settings that are set, without those of a launcher like ours.

    Args:
        settings: The settings; None does not ask for DeepSpeed.
        alone: Whether nothing else divides the model.

    Raises:
        ValueError: A name is unknown, belongs to DeepSpeed's own launcher, or is also in the
            configuration's file; or something else divides the model.
    """
    if settings is None:
        return None
    if not alone:
        raise ValueError(
            "DeepSpeed (--use_deepspeed, deepspeed_config) cannot be combined with --use_fsdp "
            "(fsdp_config), --use_parallelism_config (parallelism_config) or --use_megatron_lm "
            "(megatron_lm_config): each divides the model. Choose one."
        )
    found = {name: value for name, value in settings.items() if value is not None}
    for name in found.keys() & LAUNCHER.keys():
        if (value := found.pop(name)) not in LAUNCHER[name]:
            raise ValueError(
                f"{name} is {value!r}, of DeepSpeed's own launcher, which is not used: remove it, "
                "and run trainer launch on each machine, with --machine_rank and "
                "--main_process_ip, or with --slurm."
            )
    for name in found.keys() - DEEPSPEED.keys():
        raise ValueError(choice_error("a key of deepspeed_config", name, DEEPSPEED))
    if "deepspeed_config_file" in found and (beside := [n for n in _IN_FILE if n in found]):
        raise ValueError(
            f"{', '.join(beside)} cannot be set beside deepspeed_config_file, which says the same: "
            "write it there, or leave the file out."
        )
    return found


def variables_of(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process; None asks nothing."""
    if settings is None:
        return {}
    return {_USE: True, **{_variable(name): value for name, value in settings.items()}}
