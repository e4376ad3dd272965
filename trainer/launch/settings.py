"""Settings of FSDP, DeepSpeed, Megatron-LM, the mesh and fp8: options, keys and variables.

A name is the same as an option and as a key: ``--fsdp_offload_params`` and ``fsdp_offload_params``.
The processes read them from the environment; see `trainer.parallelism`,
`trainer.deepspeed_plugin`, `trainer.megatron_plugin` and `trainer.configuration.recipe_of`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from trainer.checks import check_counts, choice_error
from trainer.enums import FP8BackendType
from trainer.environment import FALSE, TRUE

# By name: the kind of value, and what it says.
FSDP: dict[str, tuple[str, str]] = {
    "fsdp_version": ("version", "whose names the settings have: 1 or 2 (default 2)"),
    "fsdp_sharding_strategy": ("text", "FSDP 1's name for --fsdp_reshard_after_forward"),
    "fsdp_reshard_after_forward": ("bool", "release gathered parameters after forward (true)"),
    "fsdp_auto_wrap_policy": ("text", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": ("text", "classes of submodules to shard by themselves"),
    "fsdp_min_num_params": ("count", "the least parameters of such a submodule, by size"),
    "fsdp_offload_params": ("bool", "keep shards in host memory (false)"),
    "fsdp_activation_checkpointing": ("bool", "recompute activations in backward (false)"),
    "fsdp_activation_checkpointing_offload": ("bool", "keep their inputs in host memory (false)"),
    "fsdp_state_dict_type": ("text", "SHARDED_STATE_DICT or FULL_STATE_DICT"),
    "fsdp_forward_prefetch": ("bool", "gather the next submodule during forward (false)"),
    "fsdp_backward_prefetch": ("text", "FSDP 1's: BACKWARD_PRE or NO_PREFETCH"),
    "fsdp_use_orig_params": ("bool", "FSDP 1's: true"),
    "fsdp_cpu_ram_efficient_loading": ("bool", "only rank 0 reads pretrained weights (false)"),
    "fsdp_sync_module_states": ("bool", "FSDP 1's: true"),
    "fsdp_ignored_modules": ("text", "a regular expression for names of modules not to shard"),
}
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
MESH: dict[str, tuple[str, str]] = {
    "parallelism_config_dp_replicate_size": ("count", "replicas of the model (1)"),
    "parallelism_config_dp_shard_size": ("count", "processes that shard a replica (1)"),
    "parallelism_config_tp_size": ("count", "processes that share each layer (1)"),
    "parallelism_config_cp_size": ("count", "processes that share each sequence (1)"),
    "parallelism_config_sp_size": ("count", "the same by DeepSpeed (1)"),
    "parallelism_config_cp_backend": ("text", "how sequences are shared: torch"),
    "parallelism_config_cp_comm_strategy": ("text", "and sent: allgather"),
    "parallelism_config_sp_backend": ("text", "not used while sp_size is 1: deepspeed"),
    "parallelism_config_sp_seq_length": ("count", "not used while sp_size is 1"),
    "parallelism_config_sp_seq_length_is_variable": ("bool", "not used while sp_size is 1"),
    "parallelism_config_sp_attn_implementation": ("text", "not used while sp_size is 1"),
}
MEGATRON: dict[str, tuple[str, str]] = {
    "megatron_lm_tp_degree": ("count", "processes that share each layer (1)"),
    "megatron_lm_pp_degree": ("count", "stages of layers, one after the other (1)"),
    "megatron_lm_num_micro_batches": ("count", "parts of each batch, for the stages (1)"),
    "megatron_lm_gradient_clipping": ("float", "maximum norm, if the script has none (1.0)"),
    "megatron_lm_sequence_parallelism": ("bool", "divide sequences where layers are (false)"),
    "megatron_lm_recompute_activations": ("bool", "recompute those of the attention (false)"),
    "megatron_lm_recompute_granularity": ("text", "full or selective"),
    "megatron_lm_recompute_method": ("text", "uniform or block"),
    "megatron_lm_recompute_num_layers": ("count", "layers to recompute"),
    "megatron_lm_decoder_last_pipeline_num_layers": ("count", "layers of the last stage"),
    "megatron_lm_attention_dropout": ("float", "dropout of the attention"),
    "megatron_lm_hidden_dropout": ("float", "dropout of hidden states"),
    "megatron_lm_attention_softmax_in_fp32": ("bool", "the softmax in float32"),
    "megatron_lm_use_rotary_position_embeddings": ("bool", "whether the model has them"),
    **dict.fromkeys(
        [
            *("megatron_lm_use_distributed_optimizer", "megatron_lm_use_custom_fsdp"),
            *("megatron_lm_no_load_optim", "megatron_lm_no_save_optim"),
            *("megatron_lm_eod_mask_loss", "megatron_lm_optimizer_cpu_offload"),
            "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
            "megatron_lm_use_precision_aware_optimizer",
            *("megatron_lm_attention_backend", "megatron_lm_calculate_per_token_loss"),
        ],
        ("bool", "not supported: the error says what to use"),
    ),
    **dict.fromkeys(
        [
            "megatron_lm_expert_model_parallel_size",
            "megatron_lm_expert_tensor_parallel_size",
            "megatron_lm_context_parallel_size",
        ],
        ("count", "only 1 is supported"),
    ),
}
# A key of ``fp8_config`` may also be written without ``fp8_``.
FP8: dict[str, tuple[str, str]] = {
    "fp8_backend": ("text", "the library of fp8: AO (torchao, the default) or TE"),
    "fp8_enable_fsdp_float8_all_gather": ("bool", "AO: FSDP gathers weights in 8 bits (true)"),
    "fp8_pad_inner_dim": ("bool", "AO: pad inner dimensions to multiples of 16 (true)"),
    "fp8_use_autocast_during_eval": ("bool", "TE: 8 bits in evaluations too (false)"),
    "fp8_margin": ("int", "TE: margin of the scale in powers of two (0)"),
    "fp8_interval": ("count", "TE: steps between updates of the scale (1)"),
    "fp8_format": ("text", "TE: HYBRID (the default), E4M3 or E5M2"),
    "fp8_amax_history_len": ("count", "TE: length of the history of largest values (1024)"),
    "fp8_amax_compute_algo": ("text", "TE: most_recent (the default) or max"),
    "fp8_override_linear_precision": ("bools", "TE: a higher precision in forward, dgrad, wgrad"),
    "fp8_use_mxfp8_block_scaling": ("bool", "TE: scale blocks of values (false)"),
    "fp8_opt_level": ("text", "MS-AMP's, which cannot be installed any more"),
}
# By section of the file: the option that asks for it, and its settings.
SECTIONS = {
    "fsdp_config": ("use_fsdp", FSDP),
    "deepspeed_config": ("use_deepspeed", DEEPSPEED),
    "parallelism_config": ("use_parallelism_config", MESH),
    "megatron_lm_config": ("use_megatron_lm", MEGATRON),
}
# Options of DeepSpeed's own launcher for several machines, and the values that mean ours.
LAUNCHER = {
    "deepspeed_multinode_launcher": ("standard", "nossh"),
    "deepspeed_hostfile": (),
    "deepspeed_exclusion_filter": (),
    "deepspeed_inclusion_filter": (),
}
# What a configuration of DeepSpeed says itself.
_IN_FILE = [name for name in DEEPSPEED if not name.startswith(("deepspeed_", "zero3_init"))]
# The variables that do not have the names of the settings.
_OTHER_NAMES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    **{name: f"ACCELERATE_DEEPSPEED_{name.upper()}" for name in DEEPSPEED},
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}


_FP8_OVERRIDES = ("FPROP", "DGRAD", "WGRAD")
_OTHER_FP8_NAMES = {"fp8_amax_compute_algorithm": "fp8_amax_compute_algo"}


def _variable(name: str) -> str:
    return _OTHER_NAMES.get(name, name.upper())


VARIABLES = (
    *(
        variable
        for asks, names in SECTIONS.values()
        for variable in (f"ACCELERATE_{asks.upper()}", *map(_variable, names))
    ),
    *(f"ACCELERATE_{name.upper()}" for name in FP8 if name != "fp8_override_linear_precision"),
    *(f"ACCELERATE_FP8_OVERRIDE_{what}" for what in _FP8_OVERRIDES),
)


def count(text: str) -> int:
    """Return the value of an option as a number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)


def truth(text: str) -> bool:
    """Return the value of an option or an answer as a bool.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if text.lower() not in TRUE | FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} must be yes or no")
    return text.lower() in TRUE


def limit(text: str) -> float | str:
    """Return ``"auto"``, or a number.

    Raises:
        ValueError: It is neither.
    """
    return text if text == "auto" else float(text)


def three_bools(text: str) -> tuple[bool, ...]:
    """Return ``"false,true,true"`` as a tuple.

    Raises:
        ValueError: There are not three, or one is no bool.
    """
    found = tuple(truth(each.strip()) for each in text.strip("()[]").split(","))
    if len(found) != len(_FP8_OVERRIDES):
        raise ValueError(f"{text!r} must be three bools, such as false,false,true")
    return found


def settings_of_deepspeed(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of ``deepspeed_config`` without those of a launcher like ours.

    Raises:
        ValueError: One belongs to DeepSpeed's own launcher, or is also in the configuration's file.
    """
    if settings is None:
        return None
    found = {name: value for name, value in settings.items() if value is not None}
    for name in found.keys() & LAUNCHER.keys():
        if (value := found.pop(name)) not in LAUNCHER[name]:
            raise ValueError(
                f"{name} is {value!r}, of DeepSpeed's own launcher, which is not used: remove it, "
                "and run trainer launch on each machine, with --machine_rank and "
                "--main_process_ip, or with --slurm."
            )
    if "deepspeed_config_file" in found and (beside := [n for n in _IN_FILE if n in found]):
        raise ValueError(
            f"{', '.join(beside)} cannot be set beside deepspeed_config_file, which says the same: "
            "write it there, or leave the file out."
        )
    return found


def check_settings(
    sections: Mapping[str, Mapping[str, Any] | None], processes: int | None, *, cpu: bool
) -> None:
    """Check the names of settings, and that the sizes fit the number of processes.

    Args:
        sections: Settings by section; None does not ask for it.
        processes: The number of processes; None if it is not known.
        cpu: Whether they use the CPU.

    Raises:
        ValueError: A name is unknown, the product of the sizes differs, several sections divide the
            model, or Megatron-LM is to use the CPU.
        TypeError: A size is not an int.
    """
    given = {name: settings for name, settings in sections.items() if settings is not None}
    for section, settings in given.items():
        known = SECTIONS[section][1]
        for key in settings.keys() - known.keys():
            raise ValueError(choice_error(f"a key of {section}", key, known))
    options = {section: f"--{SECTIONS[section][0]} ({section})" for section in given}
    for section in ("deepspeed_config", "megatron_lm_config"):
        if section in given and len(given) > 1:
            alone = options.pop(section)
            raise ValueError(
                f"{alone} cannot be combined with {' and '.join(options.values())}: each divides "
                "the model. Choose one."
            )
    if "megatron_lm_config" in given and cpu:
        raise ValueError(
            "Megatron-LM (--use_megatron_lm, megatron_lm_config) trains on CUDA devices: leave "
            "out --cpu (use_cpu), or shard with --use_fsdp (fsdp_config) instead."
        )
    mesh = given.get("parallelism_config", {})
    sizes_of = {n: size for n, size in mesh.items() if n.endswith("_size") and size is not None}
    check_counts(1, **sizes_of)
    product = math.prod(sizes_of.values())
    if "parallelism_config" in given and processes is not None and product != processes:
        sizes = ", ".join(f"{name} {size}" for name, size in sizes_of.items())
        raise ValueError(
            f"The sizes of parallelism_config multiply to {product} ({sizes or 'none is given'}); "
            f"the number of processes is {processes}."
        )


def variables_of(sections: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process."""
    found: dict[str, Any] = {}
    for section, settings in sections.items():
        if settings is not None:
            found[f"ACCELERATE_{SECTIONS[section][0].upper()}"] = True
            found |= {_variable(name): _text(value) for name, value in settings.items()}
    return found


def _text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value  # of classes


def fp8_settings(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of ``fp8_config`` under their names as options; None without any.

    Raises:
        ValueError: A name or the backend is unknown.
    """
    if not settings:
        return None
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = key if key.startswith("fp8_") else f"fp8_{key}"
        name = _OTHER_FP8_NAMES.get(name, name)
        if name not in FP8:
            raise ValueError(choice_error("a key of fp8_config", key, FP8))
        if value is not None:
            found[name] = value
    if (backend := found.get("fp8_backend")) is not None:
        found["fp8_backend"] = FP8BackendType.parse(str(backend).upper(), "fp8_backend")
    return found


def fp8_variables(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process."""
    found: dict[str, Any] = {}
    for name, value in (settings or {}).items():
        if name == "fp8_override_linear_precision":
            flags = three_bools(value) if isinstance(value, str) else value
            for what, flag in zip(_FP8_OVERRIDES, flags, strict=True):
                found[f"ACCELERATE_FP8_OVERRIDE_{what}"] = flag
        else:
            found[f"ACCELERATE_{name.upper()}"] = value
    return found
