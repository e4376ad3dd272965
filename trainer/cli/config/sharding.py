"""Settings of FSDP, of the device mesh and of Megatron-LM: options, keys and variables.

A name is the same as an option and as a key: ``--fsdp_offload_params`` and ``fsdp_offload_params``.
The processes read them from the environment; see `trainer.parallelism` and
`trainer.megatron_plugin`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.checks import check_counts, choice_error

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
_OTHER_NAMES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
_USE_FSDP, _USE_MESH = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
_USE_MEGATRON = "ACCELERATE_USE_MEGATRON_LM"


def _variable(name: str) -> str:
    return _OTHER_NAMES.get(name, name.upper())


VARIABLES = (
    *(_USE_FSDP, _USE_MESH, _USE_MEGATRON),
    *map(_variable, [*FSDP, *MESH, *MEGATRON]),
)


def check_settings(
    fsdp: Mapping[str, Any] | None,
    mesh: Mapping[str, Any] | None,
    megatron: Mapping[str, Any] | None,
    processes: int | None,
    *,
    cpu: bool,
) -> None:
    """Check the names of settings, and that the sizes fit the number of processes.

    Args:
        fsdp: Settings of FSDP; None does not shard.
        mesh: Sizes of the device mesh; None has none.
        megatron: Settings of Megatron-LM; None does not use it.
        processes: The number of processes; None if it is not known.
        cpu: Whether they use the CPU.

    Raises:
        ValueError: A name is unknown, the product of the sizes differs, or Megatron-LM is to be
            used together with the others, or on the CPU.
        TypeError: A size is not an int.
    """
    for what, given, known in (
        ("fsdp_config", fsdp, FSDP),
        ("parallelism_config", mesh, MESH),
        ("megatron_lm_config", megatron, MEGATRON),
    ):
        for key in (given or {}).keys() - known.keys():
            raise ValueError(choice_error(f"a key of {what}", key, known))
    if megatron is not None and (fsdp is not None or mesh is not None):
        raise ValueError(
            "Megatron-LM (--use_megatron_lm, megatron_lm_config) divides models by itself: leave "
            "out --use_fsdp (fsdp_config) and --use_parallelism_config (parallelism_config)."
        )
    if megatron is not None and cpu:
        raise ValueError(
            "Megatron-LM (--use_megatron_lm, megatron_lm_config) trains on CUDA devices: leave "
            "out --cpu (use_cpu), or shard with --use_fsdp (fsdp_config) instead."
        )
    sizes_of = {name: size for name, size in (mesh or {}).items() if name.endswith("_size")}
    check_counts(1, **{name: size for name, size in sizes_of.items() if size is not None})
    product = math.prod(size or 1 for size in sizes_of.values())
    if mesh is not None and processes is not None and product != processes:
        sizes = ", ".join(f"{name} {size}" for name, size in sizes_of.items())
        raise ValueError(
            f"The sizes of parallelism_config multiply to {product} ({sizes or 'none is given'}); "
            f"the number of processes is {processes}."
        )


def variables_of(
    fsdp: Mapping[str, Any] | None,
    mesh: Mapping[str, Any] | None,
    megatron: Mapping[str, Any] | None,
) -> dict[str, bool | str]:
    """Return the environment variables that pass the settings to a process."""
    found: dict[str, bool | str] = {}
    if fsdp is not None:
        found[_USE_FSDP] = True
    if mesh is not None:
        found[_USE_MESH] = True
    if megatron is not None:
        found[_USE_MEGATRON] = True
    for name, value in {**(fsdp or {}), **(mesh or {}), **(megatron or {})}.items():
        if value is not None:
            found[_variable(name)] = _text(value)
    return found


def _text(value: Any) -> bool | str:
    if isinstance(value, (list, tuple)):  # of class names
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)
