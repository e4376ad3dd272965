"""Models larger than memory: empty models, device maps, and weights on the CPU or on disk.

::

    from trainer.big_models import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = Model(config)
    model = load_checkpoint_and_dispatch(
        model, "checkpoint", device_map="auto", offload_folder="offload"
    )

`device_map` assigns modules to devices, `dispatch` places the modules of a model, `loading` reads a
checkpoint to those devices, `quantization` does so in 8 or 4 bits, `offload` keeps weights on disk,
`hooks` bring inputs and weights together for each forward pass, and `attach` attaches hooks to a
model.
"""

from trainer.big_models.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
)
from trainer.big_models.device_map import (
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    infer_auto_device_map,
)
from trainer.big_models.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from trainer.big_models.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from trainer.big_models.loading import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
)
from trainer.big_models.offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from trainer.big_models.quantization import BnbQuantizationConfig, load_and_quantize_model
from trainer.big_models.tensors import (
    CustomDtype,
    dtype_byte_size,
    find_tied_parameters,
    id_tensor_storage,
    init_empty_weights,
    init_on_device,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)

__all__ = [
    "AlignDevicesHook",
    "BnbQuantizationConfig",
    "CpuOffload",
    "CustomDtype",
    "LayerwiseCastingHook",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]
