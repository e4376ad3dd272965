from trainer.big_models import BnbQuantizationConfig as BnbQuantizationConfig
from trainer.big_models import CustomDtype as CustomDtype
from trainer.big_models import OffloadedWeightsLoader as OffloadedWeightsLoader
from trainer.big_models import PrefixedDataset as PrefixedDataset
from trainer.big_models import align_module_device as align_module_device
from trainer.big_models import calculate_maximum_sizes as calculate_maximum_sizes
from trainer.big_models import check_device_map as check_device_map
from trainer.big_models import compute_module_sizes as compute_module_sizes
from trainer.big_models import convert_file_size_to_int as convert_file_size_to_int
from trainer.big_models import dtype_byte_size as dtype_byte_size
from trainer.big_models import extract_submodules_state_dict as extract_submodules_state_dict
from trainer.big_models import find_tied_parameters as find_tied_parameters
from trainer.big_models import get_balanced_memory as get_balanced_memory
from trainer.big_models import get_max_layer_size as get_max_layer_size
from trainer.big_models import get_max_memory as get_max_memory
from trainer.big_models import has_offloaded_params as has_offloaded_params
from trainer.big_models import id_tensor_storage as id_tensor_storage
from trainer.big_models import infer_auto_device_map as infer_auto_device_map
from trainer.big_models import load_and_quantize_model as load_and_quantize_model
from trainer.big_models import load_checkpoint_in_model as load_checkpoint_in_model
from trainer.big_models import load_offloaded_weight as load_offloaded_weight
from trainer.big_models import load_offloaded_weights as load_offloaded_weights
from trainer.big_models import load_state_dict as load_state_dict
from trainer.big_models import named_module_tensors as named_module_tensors
from trainer.big_models import offload_state_dict as offload_state_dict
from trainer.big_models import offload_weight as offload_weight
from trainer.big_models import retie_parameters as retie_parameters
from trainer.big_models import save_offload_index as save_offload_index
from trainer.big_models import set_module_tensor_to_device as set_module_tensor_to_device
from trainer.checkpoint.objects import load as load
from trainer.checkpoint.objects import save as save
from trainer.configuration import AORecipeKwargs as AORecipeKwargs
from trainer.configuration import AutocastKwargs as AutocastKwargs
from trainer.configuration import DataLoaderConfiguration as DataLoaderConfiguration
from trainer.configuration import DeepSpeedPlugin as DeepSpeedPlugin
from trainer.configuration import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from trainer.configuration import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from trainer.configuration import FP8RecipeKwargs as FP8RecipeKwargs
from trainer.configuration import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from trainer.configuration import GradientAccumulationPlugin as GradientAccumulationPlugin
from trainer.configuration import GradScalerKwargs as GradScalerKwargs
from trainer.configuration import InitProcessGroupKwargs as InitProcessGroupKwargs
from trainer.configuration import KwargsHandler as KwargsHandler
from trainer.configuration import MegatronLMPlugin as MegatronLMPlugin
from trainer.configuration import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from trainer.configuration import ParallelismConfig as ParallelismConfig
from trainer.configuration import ProfileKwargs as ProfileKwargs
from trainer.configuration import ProjectConfiguration as ProjectConfiguration
from trainer.configuration import TERecipeKwargs as TERecipeKwargs
from trainer.configuration import TorchContextParallelConfig as TorchContextParallelConfig
from trainer.configuration import TorchDynamoPlugin as TorchDynamoPlugin
from trainer.configuration import TorchTensorParallelConfig as TorchTensorParallelConfig
from trainer.configuration import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from trainer.configuration.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
from trainer.configuration.deepspeed import (
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from trainer.configuration.dummy_optimizers import DummyOptim as DummyOptim
from trainer.configuration.dummy_optimizers import DummyScheduler as DummyScheduler
from trainer.configuration.dummy_optimizers import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from trainer.distributed.collectives import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
)
from trainer.distributed.collectives import broadcast as broadcast
from trainer.distributed.collectives import gather as gather
from trainer.distributed.collectives import pad_across_processes as pad_across_processes
from trainer.distributed.objects import broadcast_object_list as broadcast_object_list
from trainer.distributed.objects import gather_object as gather_object
from trainer.engines.compile import compile_regions as compile_regions
from trainer.engines.compile import is_repeated_blocks as is_repeated_blocks
from trainer.enums import DDPCommunicationHookType as DDPCommunicationHookType
from trainer.enums import DistributedType as DistributedType
from trainer.enums import DynamoBackend as DynamoBackend
from trainer.enums import FP8BackendType as FP8BackendType
from trainer.enums import LoggerType as LoggerType
from trainer.enums import PrecisionType as PrecisionType
from trainer.enums import RNGType as RNGType
from trainer.environment import clear_environment as clear_environment
from trainer.environment import convert_dict_to_env_variables as convert_dict_to_env_variables
from trainer.environment import patch_environment as patch_environment
from trainer.environment import purge_accelerate_environment as purge_accelerate_environment
from trainer.errors import DistributedOperationException as DistributedOperationException
from trainer.fp8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from trainer.fp8 import filter_linear_layers as filter_linear_layers
from trainer.fp8 import find_first_last_linear_layers as find_first_last_linear_layers
from trainer.fp8 import has_ao_layers as has_ao_layers
from trainer.launch.configuration import write_basic_config as write_basic_config
from trainer.launchers import debug_launcher as debug_launcher
from trainer.launchers import notebook_launcher as notebook_launcher
from trainer.memory import find_executable_batch_size as find_executable_batch_size
from trainer.memory import release_memory as release_memory
from trainer.rng import set_seed as set_seed
from trainer.rng import synchronize_rng_states as synchronize_rng_states
from trainer.tree import concatenate as concatenate
from trainer.tree import convert_to_fp32 as convert_to_fp32
from trainer.tree import send_to_device as send_to_device
from trainer.tree import slice_tensors as slice_tensors
from trainer.utils.availability import are_libraries_initialized as are_libraries_initialized
from trainer.utils.availability import compare_versions as compare_versions
from trainer.utils.availability import deepspeed_required as deepspeed_required
from trainer.utils.availability import get_int_from_env as get_int_from_env
from trainer.utils.availability import is_4bit_bnb_available as is_4bit_bnb_available
from trainer.utils.availability import is_8bit_bnb_available as is_8bit_bnb_available
from trainer.utils.availability import is_aim_available as is_aim_available
from trainer.utils.availability import is_amdsmi_available as is_amdsmi_available
from trainer.utils.availability import is_bf16_available as is_bf16_available
from trainer.utils.availability import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from trainer.utils.availability import is_bnb_available as is_bnb_available
from trainer.utils.availability import is_boto3_available as is_boto3_available
from trainer.utils.availability import is_clearml_available as is_clearml_available
from trainer.utils.availability import is_comet_ml_available as is_comet_ml_available
from trainer.utils.availability import is_cuda_available as is_cuda_available
from trainer.utils.availability import is_datasets_available as is_datasets_available
from trainer.utils.availability import is_deepspeed_available as is_deepspeed_available
from trainer.utils.availability import is_dvclive_available as is_dvclive_available
from trainer.utils.availability import is_fp8_available as is_fp8_available
from trainer.utils.availability import is_fp16_available as is_fp16_available
from trainer.utils.availability import is_habana_gaudi1 as is_habana_gaudi1
from trainer.utils.availability import is_hpu_available as is_hpu_available
from trainer.utils.availability import is_import_timer_available as is_import_timer_available
from trainer.utils.availability import is_lomo_available as is_lomo_available
from trainer.utils.availability import is_matplotlib_available as is_matplotlib_available
from trainer.utils.availability import is_megatron_lm_available as is_megatron_lm_available
from trainer.utils.availability import is_mlflow_available as is_mlflow_available
from trainer.utils.availability import is_mlu_available as is_mlu_available
from trainer.utils.availability import is_mps_available as is_mps_available
from trainer.utils.availability import is_msamp_available as is_msamp_available
from trainer.utils.availability import is_musa_available as is_musa_available
from trainer.utils.availability import is_neuron_available as is_neuron_available
from trainer.utils.availability import is_npu_available as is_npu_available
from trainer.utils.availability import is_pandas_available as is_pandas_available
from trainer.utils.availability import is_peft_available as is_peft_available
from trainer.utils.availability import is_pippy_available as is_pippy_available
from trainer.utils.availability import is_pynvml_available as is_pynvml_available
from trainer.utils.availability import is_pytest_available as is_pytest_available
from trainer.utils.availability import is_rich_available as is_rich_available
from trainer.utils.availability import is_rocm_available as is_rocm_available
from trainer.utils.availability import is_sagemaker_available as is_sagemaker_available
from trainer.utils.availability import is_schedulefree_available as is_schedulefree_available
from trainer.utils.availability import is_sdaa_available as is_sdaa_available
from trainer.utils.availability import is_swanlab_available as is_swanlab_available
from trainer.utils.availability import is_tensorboard_available as is_tensorboard_available
from trainer.utils.availability import is_timm_available as is_timm_available
from trainer.utils.availability import is_torch_version as is_torch_version
from trainer.utils.availability import is_torch_xla_available as is_torch_xla_available
from trainer.utils.availability import is_torchao_available as is_torchao_available
from trainer.utils.availability import is_torchdata_available as is_torchdata_available
from trainer.utils.availability import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from trainer.utils.availability import is_torchvision_available as is_torchvision_available
from trainer.utils.availability import is_trackio_available as is_trackio_available
from trainer.utils.availability import (
    is_transformer_engine_available as is_transformer_engine_available,
)
from trainer.utils.availability import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from trainer.utils.availability import is_transformers_available as is_transformers_available
from trainer.utils.availability import is_triton_available as is_triton_available
from trainer.utils.availability import is_wandb_available as is_wandb_available
from trainer.utils.availability import is_weights_only_available as is_weights_only_available
from trainer.utils.availability import is_xccl_available as is_xccl_available
from trainer.utils.availability import is_xpu_available as is_xpu_available
from trainer.utils.availability import parse_choice_from_env as parse_choice_from_env
from trainer.utils.availability import parse_flag_from_env as parse_flag_from_env
from trainer.utils.availability import str_to_bool as str_to_bool
from trainer.utils.availability import torchao_required as torchao_required
from trainer.utils.containers import TensorInformation as TensorInformation
from trainer.utils.containers import convert_outputs_to_fp32 as convert_outputs_to_fp32
from trainer.utils.containers import copy_tensor_to_devices as copy_tensor_to_devices
from trainer.utils.containers import find_device as find_device
from trainer.utils.containers import get_data_structure as get_data_structure
from trainer.utils.containers import honor_type as honor_type
from trainer.utils.containers import initialize_tensors as initialize_tensors
from trainer.utils.containers import is_namedtuple as is_namedtuple
from trainer.utils.containers import is_tensor_information as is_tensor_information
from trainer.utils.containers import is_torch_tensor as is_torch_tensor
from trainer.utils.containers import listify as listify
from trainer.utils.containers import merge_dicts as merge_dicts
from trainer.utils.containers import pad_input_tensors as pad_input_tensors
from trainer.utils.containers import recursively_apply as recursively_apply
from trainer.utils.machine import CPUInformation as CPUInformation
from trainer.utils.machine import check_cuda_fp8_capability as check_cuda_fp8_capability
from trainer.utils.machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from trainer.utils.machine import check_os_kernel as check_os_kernel
from trainer.utils.machine import convert_bytes as convert_bytes
from trainer.utils.machine import get_cpu_distributed_information as get_cpu_distributed_information
from trainer.utils.machine import get_current_device_type as get_current_device_type
from trainer.utils.machine import get_driver_version as get_driver_version
from trainer.utils.machine import get_free_port as get_free_port
from trainer.utils.machine import get_gpu_info as get_gpu_info
from trainer.utils.machine import is_port_in_use as is_port_in_use
from trainer.utils.machine import override_numa_affinity as override_numa_affinity
from trainer.utils.machine import set_numa_affinity as set_numa_affinity
from trainer.utils.modules import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from trainer.utils.modules import compile_regions_deepspeed as compile_regions_deepspeed
from trainer.utils.modules import compile_regions_fsdp2 as compile_regions_fsdp2
from trainer.utils.modules import ensure_weights_retied as ensure_weights_retied
from trainer.utils.modules import extract_model_from_parallel as extract_model_from_parallel
from trainer.utils.modules import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from trainer.utils.modules import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from trainer.utils.modules import get_grad_scaler as get_grad_scaler
from trainer.utils.modules import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from trainer.utils.modules import get_model_tp_size as get_model_tp_size
from trainer.utils.modules import get_module_children_bottom_up as get_module_children_bottom_up
from trainer.utils.modules import get_parameters_from_modules as get_parameters_from_modules
from trainer.utils.modules import get_pretty_name as get_pretty_name
from trainer.utils.modules import has_compiled_regions as has_compiled_regions
from trainer.utils.modules import has_repeated_blocks as has_repeated_blocks
from trainer.utils.modules import is_compiled_module as is_compiled_module
from trainer.utils.modules import is_peft_model as is_peft_model
from trainer.utils.modules import model_has_dtensor as model_has_dtensor
from trainer.utils.modules import recursive_getattr as recursive_getattr
from trainer.utils.names import MODEL_NAME as MODEL_NAME
from trainer.utils.names import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from trainer.utils.names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from trainer.utils.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from trainer.utils.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from trainer.utils.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from trainer.utils.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from trainer.utils.names import WEIGHTS_NAME as WEIGHTS_NAME
from trainer.utils.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from trainer.utils.names import ComputeEnvironment as ComputeEnvironment
from trainer.utils.names import SageMakerDistributedType as SageMakerDistributedType
from trainer.utils.names import find_batch_size as find_batch_size
from trainer.utils.names import ignorant_find_batch_size as ignorant_find_batch_size
from trainer.utils.names import reduce as reduce
from trainer.utils.names import synchronize_rng_state as synchronize_rng_state
from trainer.utils.names import tqdm as tqdm
from trainer.utils.names import wait_for_everyone as wait_for_everyone
from trainer.utils.sharded import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from trainer.utils.sharded import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from trainer.utils.sharded import fsdp2_apply_ac as fsdp2_apply_ac
from trainer.utils.sharded import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from trainer.utils.sharded import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from trainer.utils.sharded import fsdp2_prepare_model as fsdp2_prepare_model
from trainer.utils.sharded import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from trainer.utils.sharded import load_fsdp_model as load_fsdp_model
from trainer.utils.sharded import load_fsdp_optimizer as load_fsdp_optimizer
from trainer.utils.sharded import merge_fsdp_weights as merge_fsdp_weights
from trainer.utils.sharded import save_fsdp_model as save_fsdp_model
from trainer.utils.sharded import save_fsdp_optimizer as save_fsdp_optimizer
