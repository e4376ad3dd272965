"""Where each module and name of accelerate is here, or why it is not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERSION = "1.15.0"
"""The release of accelerate whose names these are."""

PLACES: dict[str, tuple[str, ...]] = {
    "": (),
    "accelerator": ("trainer.accelerator",),
    "big_modeling": ("trainer.big_models",),
    "checkpointing": ("trainer.checkpoint.accelerator_state",),
    "data_loader": ("trainer.data.prepare", "trainer.data.shards"),
    "hooks": ("trainer.big_models",),
    "inference": (),
    "launchers": ("trainer.launchers",),
    "local_sgd": ("trainer.local_sgd",),
    "logging": ("trainer.logging",),
    "memory_utils": ("trainer.memory",),
    "optimizer": ("trainer.optim.optimizer",),
    "parallelism_config": ("trainer.parallelism",),
    "scheduler": ("trainer.optim.scheduler",),
    "state": ("trainer.state",),
    "tracking": ("trainer.tracking", "trackers"),
    "utils": ("trainer.big_models",),
    "utils.ao": ("trainer.fp8",),
    "utils.bnb": ("trainer.big_models",),
    "utils.constants": (),
    "utils.dataclasses": (),
    "utils.deepspeed": ("trainer.deepspeed_plugin",),
    "utils.environment": (),
    "utils.fsdp_utils": (),
    "utils.imports": (),
    "utils.memory": ("trainer.memory",),
    "utils.modeling": ("trainer.big_models",),
    "utils.offload": ("trainer.big_models",),
    "utils.operations": (),
    "utils.other": (),
    "utils.random": (),
    "utils.rich": (),
    "utils.torch_xla": (),
    "utils.tqdm": (),
    "utils.transformer_engine": ("trainer.fp8",),
    "utils.versions": (),
}
"""Module of accelerate: the modules that are searched for its names, in this order."""
_ELSEWHERE = (
    *("trainer", "trainer.utils", "trainer.logging", "trainer.state"),
    *("trainer.optim.optimizer", "trainer.optim.scheduler"),
    "trainer.data.prepare",
)
"""They are searched last: scripts also import names from where accelerate imports them."""

RENAMED = {
    "get_available_trackers": ("trackers", "available_trackers"),
    "register_tracker_class": ("trackers", "register_tracker"),
}
"""Name of accelerate: the module that has it, and its name there."""

REFUSED_MODULES = {
    "commands": "the command is `trainer` (trainer launch, trainer config, trainer env)",
    "test_utils": "these are the tests of accelerate itself; start processes with debug_launcher",
    "utils.launch": "the environment of processes is made by `trainer launch`",
    "utils.megatron_lm": (
        "a model of megatron-core is prepared and stepped as any other, with megatron_lm_plugin"
    ),
}
"""Module of accelerate that is not here: what to use."""

_STATE = "use Accelerator.save_state and load_state, which all processes call"
_STEP = "the prepared optimizer does it in step()"
_OPTIONS = "the choices are in the errors and docstrings of the plugins; write the value"
_FILES = "the names of files are save_state's own; pass folders to it and to load_state"
_SAGEMAKER = "SageMaker is not supported"
_TRACKERS = "such a tracker is not built in; write a class, see trackers.register_tracker"
_MEGATRON = REFUSED_MODULES["utils.megatron_lm"]
_LAUNCH = REFUSED_MODULES["utils.launch"]
_QUANTIZED = "load_and_quantize_model does it"
_DEVICE_MAP = "infer_auto_device_map and dispatch_model do it"
_PIPELINE = "prepare_pippy does it"
_CONVERTED = "mixed_precision='fp8' of the Accelerator converts the model"
_SENT = "gather, reduce and broadcast do it, and check shapes with ACCELERATE_DEBUG_MODE=1"
_TYPES = "compare with torch.Tensor"
_ENGINE = "prepare returns the module, optimizer and scheduler with their usual methods"

_REASONS: dict[str, str] = {
    _STATE: """
        save_accelerator_state load_accelerator_state save_custom_state load_custom_state""",
    _STEP: "move_to_device patch_optimizer_step",
    "prepared loaders are those of prepare_data_loader": """
        DataLoaderStateMixin DataLoaderAdapter get_sampler""",
    "XLA devices are not supported": "MpDeviceLoaderWrapper USE_TORCH_XLA install_xla prepare_tpu",
    _PIPELINE: "generate_device_map find_pippy_batch_size build_pipeline pippy_forward",
    "start processes with debug_launcher": "test_launch",
    "states are singletons of a process, which its threads share": """
        do_nothing ThreadLocalSharedDict SharedDict""",
    _TRACKERS: """
        TrackioTracker AimTracker MLflowTracker ClearMLTracker DVCLiveTracker SwanLabTracker""",
    "name trackers in log_with": "LOGGER_TYPE_TO_CLASS filter_trackers",
    _CONVERTED: """
        find_first_last_linear_layers filter_linear_layers filter_first_and_last_linear_layers
        has_ao_layers convert_model_to_fp8_ao convert_model has_transformer_engine_layers
        contextual_fp8_autocast apply_fp8_autowrap""",
    _FILES: """
        SCALER_NAME RNG_STATE_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME FSDP_MODEL_NAME""",
    _SAGEMAKER: """
        SAGEMAKER_PYTORCH_VERSION SAGEMAKER_PYTHON_VERSION SAGEMAKER_TRANSFORMERS_VERSION
        SAGEMAKER_PARALLEL_EC2_INSTANCES prepare_sagemager_args_inputs""",
    _OPTIONS: """
        FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE
        FSDP2_STATE_DICT_TYPE DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES STR_OPERATION_TO_FUNC
        TORCH_LAUNCH_PARAMS CUDA_DISTRIBUTED_TYPES TORCH_DISTRIBUTED_OPERATION_TYPES
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING Backend OptLevel FP8Format AmaxComputeAlgorithm
        EnumWithContains BaseEnum""",
    "torch 2.12 or later is required, which has it": """
        FSDP_PYTORCH_VERSION FSDP2_PYTORCH_VERSION DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION BETA_CP_AVAILABLE_PYTORCH_VERSION
        BETA_SP_AVAILABLE_DEEPSPEED_VERSION torch_version""",
    "use torch.profiler.ProfilerActivity, or Accelerator.profile": "ProfilerActivity",
    "sequence parallelism of DeepSpeed is not supported; use ParallelismConfig(cp_size=...)": """
        DeepSpeedSequenceParallelConfig""",
    _MEGATRON: """
        MODEL_CONFIGS_TO_MEGATRON_PARSERS add_model_config_to_megatron_parser parse_bert_config
        parse_gpt2_config parse_t5_config parse_llama_config parse_glm4_moe_config AbstractTrainStep
        BertTrainStep GPTTrainStep MegatronLMDummyDataLoader T5TrainStep
        avg_losses_across_data_parallel_group MegatronEngine MegatronLMOptimizerWrapper
        MegatronLMSchedulerWrapper gather_across_data_parallel_groups megatron_lm_initialize
        megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
    _QUANTIZED: """
        has_4bit_bnb_layers get_quantized_model_device_map replace_with_bnb_layers
        get_keys_to_not_convert get_parameter_device quantize_and_offload_8bit""",
    "use Module.get_submodule, or transformer_cls_names_to_wrap of the plugin": """
        get_module_class_from_name""",
    _ENGINE: """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper
        map_pytorch_optim_to_deepspeed GatheredParameters""",
    "use deepspeed_plugin of the Accelerator": "get_active_deepspeed_plugin",
    _LAUNCH: """
        PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env
        prepare_simple_launcher_cmd_env""",
    "find_executable_batch_size and release_memory do it": """
        clear_device_cache should_reduce_batch_size""",
    _DEVICE_MAP: """
        check_device_same id_tensor_storage get_non_persistent_buffers
        check_tied_parameters_in_config check_tied_parameters_on_same_device get_module_leaves
        calculate_maximum_sizes get_module_size_with_ties fallback_allocate
        get_state_dict_offloaded_model get_state_dict_from_offload""",
    "pass the number of bytes": "convert_file_size_to_int",
    "use torch.dtype.itemsize": "dtype_byte_size",
    _TYPES: "is_torch_xpu_tensor",
    _SENT: """
        get_shape gather_tensor_shape verify_operation chained_operation TENSOR_TYPE_TO_INT
        TENSOR_INT_TO_DTYPE ConvertOutputsToFp32""",
    "loading never unpickles": "np_core TORCH_SAFE_GLOBALS",
    "use logging.getLogger": "logger",
    "use importlib.util.find_spec": """
        is_torch_distributed_available is_tqdm_available is_numpy_available""",
    "import rich itself": "rich",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Name of accelerate that is not here: what to use."""


def why_not(module: str, name: str = "") -> str | None:
    """Why accelerate's `module`, or the name in it, is not here; None if it is, or is not known.

    Args:
        module: Without ``accelerate.``; empty for the package itself.
        name: A name in it.
    """
    for refused, reason in REFUSED_MODULES.items():
        if f"{module}.".startswith(f"{refused}."):
            return reason
    if not name or find(module, name) is not None:
        return None
    return REFUSED_MODULES.get(f"{module}.{name}".strip("."), REFUSED.get(name))


def find(module: str, name: str) -> tuple[str, str] | None:
    """Return the module of ours that has accelerate's name, and its name there; None if none has.

    Args:
        module: Of accelerate, one of `PLACES`.
        name: A name in it.
    """
    if name in RENAMED:
        return RENAMED[name]
    for place in (*PLACES[module], *_ELSEWHERE):
        if hasattr(import_module(place), name):
            return place, name
    return None


def value_of(module: str, name: str) -> Any:
    """Return what `find` has found.

    Raises:
        ImportError: accelerate has the name; the text says why it is not here. Not an
            ``AttributeError``, of which ``from … import …`` would drop the text.
        AttributeError: Neither has it.
    """
    path = ".".join(filter(None, ("accelerate", module)))
    if name.startswith("__"):  # asked by Python itself, of any module
        raise AttributeError(f"module 'trainer.{path}' has no attribute {name!r}")
    if f"{module}.{name}".strip(".") in PLACES:
        return import_module(f"trainer.{path}.{name}")
    if found := find(module, name):
        return getattr(import_module(found[0]), found[1])
    if reason := why_not(module, name):
        raise ImportError(f"{path}.{name} is not in Cadence: {reason}.")
    raise AttributeError(f"module 'trainer.{path}' has no attribute {name!r}")
