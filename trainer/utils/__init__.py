"""The helpers of the documented API, under the names that scripts import.

Most are defined in other modules. Helpers that exist only for scripts are in this package, which no
other module of Cadence imports. Names are looked up on first use.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "trainer.big_models": """
        BnbQuantizationConfig CustomDtype OffloadedWeightsLoader PrefixedDataset
        align_module_device calculate_maximum_sizes check_device_map compute_module_sizes
        convert_file_size_to_int dtype_byte_size extract_submodules_state_dict
        find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
        has_offloaded_params id_tensor_storage infer_auto_device_map load_and_quantize_model
        load_checkpoint_in_model load_offloaded_weight load_offloaded_weights load_state_dict
        named_module_tensors offload_state_dict offload_weight retie_parameters
        save_offload_index set_module_tensor_to_device""",
    "trainer.checkpoint.objects": "load save",
    "trainer.configuration": """
        AORecipeKwargs AutocastKwargs DataLoaderConfiguration DeepSpeedPlugin
        DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs FP8RecipeKwargs
        FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
        InitProcessGroupKwargs KwargsHandler MSAMPRecipeKwargs MegatronLMPlugin ParallelismConfig
        ProfileKwargs ProjectConfiguration TERecipeKwargs TorchContextParallelConfig
        TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin""",
    "trainer.configuration.deepspeed": "HfDeepSpeedConfig get_active_deepspeed_plugin",
    "trainer.configuration.dummy_optimizers": """
        DummyOptim DummyScheduler MegatronLMDummyScheduler""",
    "trainer.distributed.collectives": """
        CannotPadNestedTensorWarning broadcast gather pad_across_processes""",
    "trainer.distributed.objects": "broadcast_object_list gather_object",
    "trainer.engines.compile": "compile_regions is_repeated_blocks",
    "trainer.enums": """
        DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType LoggerType
        PrecisionType RNGType""",
    "trainer.environment": """
        clear_environment convert_dict_to_env_variables patch_environment
        purge_accelerate_environment""",
    "trainer.errors": "DistributedOperationException",
    "trainer.fp8": """
        convert_model_to_fp8_ao filter_linear_layers find_first_last_linear_layers has_ao_layers""",
    "trainer.launch.configuration": "write_basic_config",
    "trainer.launchers": "debug_launcher notebook_launcher",
    "trainer.memory": "find_executable_batch_size release_memory",
    "trainer.rng": "set_seed synchronize_rng_states",
    "trainer.tree": "concatenate convert_to_fp32 send_to_device slice_tensors",
    "trainer.utils.availability": """
        are_libraries_initialized compare_versions deepspeed_required get_int_from_env
        is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available
        is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available
        is_boto3_available is_clearml_available is_comet_ml_available is_cuda_available
        is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available
        is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available
        is_lomo_available is_matplotlib_available is_megatron_lm_available is_mlflow_available
        is_mlu_available is_mps_available is_msamp_available is_musa_available
        is_neuron_available is_npu_available is_pandas_available is_peft_available
        is_pippy_available is_pynvml_available is_pytest_available is_rich_available
        is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available
        is_swanlab_available is_tensorboard_available is_timm_available is_torch_version
        is_torch_xla_available is_torchao_available is_torchdata_available
        is_torchdata_stateful_dataloader_available is_torchvision_available is_trackio_available
        is_transformer_engine_available is_transformer_engine_mxfp8_available
        is_transformers_available is_triton_available is_wandb_available
        is_weights_only_available is_xccl_available is_xpu_available parse_choice_from_env
        parse_flag_from_env str_to_bool torchao_required""",
    "trainer.utils.containers": """
        TensorInformation convert_outputs_to_fp32 copy_tensor_to_devices find_device
        get_data_structure honor_type initialize_tensors is_namedtuple is_tensor_information
        is_torch_tensor listify merge_dicts pad_input_tensors recursively_apply""",
    "trainer.utils.machine": """
        CPUInformation check_cuda_fp8_capability check_cuda_p2p_ib_support check_os_kernel
        convert_bytes get_cpu_distributed_information get_current_device_type get_driver_version
        get_free_port get_gpu_info is_port_in_use override_numa_affinity set_numa_affinity""",
    "trainer.utils.modules": """
        clean_state_dict_for_safetensors compile_regions_deepspeed compile_regions_fsdp2
        ensure_weights_retied extract_model_from_parallel fsdp2_canonicalize_names
        get_fsdp2_grad_scaler get_grad_scaler get_mixed_precision_context_manager
        get_model_tp_size get_module_children_bottom_up get_parameters_from_modules
        get_pretty_name has_compiled_regions has_repeated_blocks is_compiled_module is_peft_model
        model_has_dtensor recursive_getattr""",
    "trainer.utils.names": """
        ComputeEnvironment MODEL_NAME PROFILE_PATTERN_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME
        SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SageMakerDistributedType WEIGHTS_INDEX_NAME
        WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        find_batch_size ignorant_find_batch_size reduce synchronize_rng_state tqdm
        wait_for_everyone""",
    "trainer.utils.sharded": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading fsdp2_apply_ac
        fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model
        fsdp2_switch_optimizer_parameters load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
        save_fsdp_model save_fsdp_optimizer""",
}
"""Module: its names that are here."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if f"{__name__}.{name}" in _NAMES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
