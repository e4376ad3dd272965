"""The names of Lightning, Accelerate and Hugging Face that do not exist here, with replacements.

Each table maps an old name to its replacement, worded to follow "use" in a sentence, or to a
separate instruction. `TABLES` says where each table applies. `trainer.hints` has the names that
users often type out of habit. This module contains only data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer import hints
from trainer.hints import EVALUATION_ARGUMENTS, LOG_ARGUMENTS, MANUAL, STEP_ARGUMENTS


class Table(NamedTuple):
    """Names that do not exist here.

    Attributes:
        library: The library of the names.
        what: The kind of thing that is named.
        entries: The replacement of each name.
    """

    library: str
    what: str
    entries: Mapping[str, str]


def _of(table: Mapping[str, str], names: str) -> dict[str, str]:
    return {name: table[name] for name in names.split()}


NOTHING = "leave it out"
AS_LIGHTNING = (
    "start the program with `trainer launch --as_lightning`, so that it inherits ours where the "
    "library derives it from Lightning's"
)
SECOND_FIT = (
    "each fit is a separate run: create another Trainer for it, with a separate project_dir, or "
    "one with more epochs that continues with ckpt_path='auto'"
)
SHARDED_BY_US = (
    f"{NOTHING}: loaders are sharded already. Give every process the same dataset and the same "
    "sampler, over the whole data; each reads its own batches, and no sample is repeated. Where an "
    "IterableDataset gives each process its own part, pass "
    "dataloader_config=DataLoaderConfiguration(presharded=True)"
)
_ALL_DEVICES = hints.TRAINER_ARGUMENTS["devices"]

# -- hooks that nobody would call ------------------------------------------------------------------


CALLBACK_HOOKS = {
    "on_init_start": "use setup",
    "on_init_end": "use setup",
    "on_before_accelerator_backend_setup": "use setup",
    "on_configure_sharded_model": "use setup",
    "on_keyboard_interrupt": (
        "use on_preemption, called where the first Ctrl-C ends a fit; a second one, or one in "
        "validate or test, is a KeyboardInterrupt for on_exception"
    ),
    "write_on_batch_end": "use on_predict_batch_end",
    "write_on_epoch_end": (
        "use on_predict_batch_end, which gets the outputs of each batch, or read the files of a "
        "PredictionWriter after predict"
    ),
}
LOGGER_METHODS = {
    "after_save_checkpoint": (
        "write a Callback whose on_boundary calls trainer.wait_for_save(), after which the folder "
        "exists"
    ),
}
_BAR = "the bar shows values logged with prog_bar=True"
HOOKS_OF_CALLBACKS = {
    "ModelCheckpoint.format_checkpoint_name": (
        "a folder is named after its update, and its manifest.json has the metrics"
    ),
    "ProgressBar.init_sanity_tqdm": _BAR,
    "ProgressBar.init_train_tqdm": _BAR,
    "ProgressBar.init_validation_tqdm": _BAR,
    "ProgressBar.init_test_tqdm": _BAR,
    "ProgressBar.init_predict_tqdm": _BAR,
    "WeightAveraging.should_update": (
        "pass update_every_n_steps=, update_starting_at_step= or update_starting_at_epoch="
    ),
}
"""Methods of subclasses of one callback, after its name."""

# -- arguments -------------------------------------------------------------------------------------

SHARDED = "fsdp_plugin=FullyShardedDataParallelPlugin(...), under trainer launch"
ZERO = "deepspeed_plugin=DeepSpeedPlugin(zero_stage=...), under trainer launch"
SAVES = "callbacks=[ModelCheckpoint({})]"
BEST = "callbacks=[ModelCheckpoint(monitor=..., mode='min' or 'max')]"
_DDP = hints.TRAINER_ARGUMENTS["strategy"]
_SUMMARY = "callbacks=[ModelSummary()]"

LIGHTNING_ARGUMENTS = _of(
    hints.TRAINER_ARGUMENTS,
    """
        accumulate_grad_batches check_val_every_n_epoch default_root_dir devices
        enable_checkpointing enable_progress_bar gpus gradient_clip_val log_every_n_steps
        logger precision profiler resume_from_checkpoint strategy val_check_interval""",
) | {
    "amp_backend": "mixed_precision",
    "auto_lr_find": "Tuner(...).lr_find(module, loader)",
    "auto_scale_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "checkpoint_callback": "checkpointing",
    "ckpt_path": "fit(ckpt_path=...)",
    "distributed_backend": _DDP,
    "enable_autolog_hparams": "save_hyperparameters(logger=...)",
    "enable_model_summary": _SUMMARY,
    "gradient_clip_algorithm": "max_grad_norm or max_grad_value",
    "ipus": f"{NOTHING}: IPUs are not supported",
    "inference_mode": f"{NOTHING}: evaluations record no gradients",
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "model_registry": f"{NOTHING}: it is a service of Lightning's makers",
    "move_metrics_to_cpu": f"{NOTHING}: running totals are single numbers",
    "multiple_trainloader_mode": "trainer.CombinedLoader(loaders, mode=...)",
    "num_nodes": (
        "trainer launch --num_machines N --machine_rank R --main_process_ip HOST --nproc_per_node "
        "N script.py on each machine: R counts them from 0, HOST is the first, N its processes"
    ),
    "num_processes": _ALL_DEVICES,
    "plugins": "mixed_precision or kwargs_handlers",
    "prepare_data_per_node": f"{NOTHING}: one process of each machine calls prepare_data first",
    "progress_bar_refresh_rate": "progress_bar",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": SHARDED_BY_US,
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "terminate_on_nan": f"{NOTHING}: non_finite='stop' is the default",
    "tpu_cores": "trainer launch --tpu script.py",
    "track_grad_norm": "callbacks=[GradientNormMonitor()]",
    "truncated_bptt_steps": f"{NOTHING}; for parts of a sequence, {MANUAL}",
    "use_distributed_sampler": SHARDED_BY_US,
    "weights_save_path": "project_dir",
    "weights_summary": _SUMMARY,
}
"""Those that `trainer.lightning` translates are names only of `trainer.Trainer`'s errors."""

_LOADER = hints.TRAINER_ARGUMENTS["train_dataset"]
_VAL_LOADER = hints.TRAINER_ARGUMENTS["eval_dataset"]
_OF_LOADER = "{} of the DataLoader"
_LAUNCHED = "kwargs_handlers=[DistributedDataParallelKwargs({}=...)]"
_MET = "kwargs_handlers=[InitProcessGroupKwargs({}=...)]"
_RATE = hints.TRAINER_ARGUMENTS["lr"]
_STEP = "training_step of the module"
_METRIC = "self.log in validation_step of the module"
_OF_MODEL = "your model's own {}"
_AS_TRAINED = f"{NOTHING}: evaluations have the precision of the training"

HUGGING_FACE_ARGUMENTS = _of(
    hints.TRAINER_ARGUMENTS,
    """
        bf16 epochs eval_dataset fp16 learning_rate lr model num_train_epochs optimizers
        output_dir train_dataset""",
) | {
    "adafactor": _RATE,
    "adam_beta1": _RATE,
    "adam_beta2": _RATE,
    "adam_epsilon": _RATE,
    "args": "the arguments of TrainingArguments under the Trainer's own names (docs/coming-from)",
    "auto_find_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "batch_size": _LOADER,
    "bf16_full_eval": _AS_TRAINED,
    "compute_loss_func": _STEP,
    "compute_metrics": _METRIC,
    "data_collator": "collate_fn of the DataLoader",
    "data_seed": "seed",
    "dataloader_drop_last": _OF_LOADER.format("drop_last"),
    "dataloader_num_workers": _OF_LOADER.format("num_workers"),
    "dataloader_persistent_workers": _OF_LOADER.format("persistent_workers"),
    "dataloader_pin_memory": _OF_LOADER.format("pin_memory"),
    "dataloader_prefetch_factor": _OF_LOADER.format("prefetch_factor"),
    "ddp_backend": _MET.format("backend"),
    "ddp_bucket_cap_mb": _LAUNCHED.format("bucket_cap_mb"),
    "ddp_find_unused_parameters": _LAUNCHED.format("find_unused_parameters"),
    "ddp_timeout": _MET.format("timeout"),
    "deepspeed": ZERO,
    "device": f"{NOTHING} for the fastest, or pass cpu=True",
    "disable_tqdm": "progress_bar=False",
    "do_eval": "fit or validate",
    "do_predict": "predict",
    "do_train": "fit",
    "eval_accumulation_steps": f"{NOTHING}: outputs of steps are not collected",
    "eval_on_start": "validate(module, loader) before fit",
    "eval_steps": "val_every='N steps'",
    "eval_strategy": "val_every='500 steps' or '1 epoch'",
    "evaluation_strategy": "val_every='500 steps' or '1 epoch'",
    "fp16_full_eval": _AS_TRAINED,
    "fsdp": SHARDED,
    "fsdp_config": SHARDED,
    "full_determinism": "deterministic=True and seed",
    "gradient_checkpointing": _OF_MODEL.format("gradient_checkpointing_enable()"),
    "gradient_checkpointing_kwargs": _OF_MODEL.format("gradient_checkpointing_enable(...)"),
    "greater_is_better": BEST,
    "group_by_length": _OF_LOADER.format("batch_sampler"),
    "ignore_data_skip": f"{NOTHING}: a resume reads and discards nothing",
    "label_smoothing_factor": f"label_smoothing of the loss in {_STEP}",
    "load_best_model_at_end": "validate or test(ckpt_path='best'), or load_from_checkpoint",
    "local_rank": f"{NOTHING}: the launcher sets it for each process",
    "log_level": "logging.basicConfig(level=...)",
    "logging_dir": "project_dir",
    "logging_steps": "log_every",
    "logging_strategy": "log_every, such as log_every='1 epoch'",
    "lr_scheduler_type": _RATE,
    "metric_for_best_model": BEST,
    "lr_scheduler_kwargs": _RATE,
    "model_init": "fit(module, ...)",
    "no_cuda": "cpu=True",
    "optim": _RATE,
    "optim_args": _RATE,
    "optim_target_modules": _RATE,
    "optimizer_cls_and_kwargs": _RATE,
    "overwrite_output_dir": "another project_dir, or fit(ckpt_path='auto') to resume",
    "per_device_eval_batch_size": _VAL_LOADER,
    "per_device_train_batch_size": _LOADER,
    "preprocess_logits_for_metrics": _METRIC,
    "processing_class": "collate_fn of the DataLoader",
    "project": "project_name",
    "push_to_hub": _OF_MODEL.format("push_to_hub after fit"),
    "remove_unused_columns": f"{NOTHING}: the step gets what the DataLoader yields",
    "report_to": "log_with",
    "save_safetensors": f"{NOTHING}: weights are safetensors",
    "save_only_model": SAVES.format("save_weights_only=True"),
    "save_steps": SAVES.format("every=N"),
    "save_strategy": SAVES.format("every=500, save_last=2"),
    "save_total_limit": SAVES.format("save_last=N"),
    "steps": "max_steps",
    "tokenizer": "collate_fn of the DataLoader",
    "tf32": "torch.set_float32_matmul_precision('high')",
    "torch_compile": "dynamo_backend='inductor'",
    "torch_compile_backend": "dynamo_backend",
    "torch_compile_mode": "dynamo_plugin=TorchDynamoPlugin(backend='inductor', mode=...)",
    "tpu_num_cores": "trainer launch --tpu script.py",
    "train_batch_size": _LOADER,
    "use_cpu": "cpu=True",
    "warmup_ratio": _RATE,
    "warmup_steps": _RATE,
    "weight_decay": _RATE,
}
_OWN = f"{NOTHING}: the Trainer decides that itself"
_DATA = f"{NOTHING}: each process reads separate whole batches, and no sample is repeated"
ACCELERATE_ARGUMENTS = {
    "accelerator_config": _DATA,
    "device_placement": _OWN,
    "dispatch_batches": _DATA,
    "even_batches": _DATA,
    "gradient_accumulation_plugin": "gradient_accumulation_steps",
    "rng_types": _OWN,
    "scheduler_tick": _OWN,
    "split_batches": f"{_DATA}; divide a batch size for all processes by their number",
    "step_scheduler_with_optimizer": _OWN,
    "use_seedable_sampler": _OWN,
}
_LENGTH = "Trainer(max_epochs=...)"
RUN_ARGUMENTS = {
    "resume_from_checkpoint": 'ckpt_path="auto"',
    "epochs": _LENGTH,
    "max_epochs": _LENGTH,
}

# -- attributes ------------------------------------------------------------------------------------

_LOOK_UP = hints.TRAINER_ATTRIBUTES["checkpoint_callback"]
_KEEP_LOADER = (
    "keep the loader where you create it; see trainer.datamodule, and trainer.{} for lengths"
)
_STAGE = (
    "steps and hooks are named after the stage, setup receives it, and trainer.training is true "
    "outside the validations of a fit"
)
_ARGUMENT = "it is an argument only, so keep the value yourself"
TRAINER_ATTRIBUTES = _of(
    hints.TRAINER_ATTRIBUTES,
    """
        accumulate_grad_batches checkpoint_callback default_root_dir is_last_batch log_dir
        logger loggers lr_scheduler_configs model strategy train_dataloader val_dataloaders""",
) | {
    "check_val_every_n_epoch": _ARGUMENT,
    "checkpoint_callbacks": _LOOK_UP,
    "current_step": "use trainer.global_step",
    "early_stopping_callback": _LOOK_UP,
    "early_stopping_callbacks": _LOOK_UP,
    "evaluating": _STAGE,
    "fit_loop": "for a longer run create another Trainer, and resume with ckpt_path",
    "gradient_clip_algorithm": _ARGUMENT,
    "gradient_clip_val": _ARGUMENT,
    "interrupted": "a callback's on_preemption is called",
    "lightning_module": "use trainer.module",
    "limit_predict_batches": _ARGUMENT,
    "limit_test_batches": _ARGUMENT,
    "limit_train_batches": _ARGUMENT,
    "limit_val_batches": _ARGUMENT,
    "log_every_n_steps": _ARGUMENT,
    "lr_schedulers": "use trainer.schedulers",
    "min_epochs": _ARGUMENT,
    "min_steps": _ARGUMENT,
    "num_devices": "use trainer.world_size",
    "num_predict_batches": "use trainer.num_eval_batches",
    "num_sanity_val_batches": "use trainer.num_eval_batches",
    "num_sanity_val_steps": _ARGUMENT,
    "num_test_batches": "use trainer.num_eval_batches",
    "num_val_batches": "use trainer.num_eval_batches",
    "overfit_batches": _ARGUMENT,
    "precision": "use mixed_precision of trainer.accelerator",
    "predict_dataloaders": _KEEP_LOADER.format("num_eval_batches"),
    "predicting": _STAGE,
    "print": "use print of trainer.accelerator",
    "progress_bar_callback": _LOOK_UP,
    "received_sigterm": "a callback's on_preemption is called",
    "reload_dataloaders_every_n_epochs": _ARGUMENT,
    "scaler": "use scaler of trainer.accelerator",
    "state": _STAGE,
    "test_dataloaders": _KEEP_LOADER.format("num_eval_batches"),
    "testing": _STAGE,
    "val_check_interval": _ARGUMENT,
    "validating": _STAGE,
}
HUGGING_FACE_ATTRIBUTES = _of(
    hints.TRAINER_ATTRIBUTES,
    "evaluate train",
) | {
    "save_model": "call your model's save_pretrained; a checkpoint has a model.safetensors too",
}

# -- names of Lightning ----------------------------------------------------------------------------

_FABRIC = "use trainer.Accelerator, for a custom loop"
_PLUGIN = "pass precision=, strategy= or kwargs_handlers= to the Trainer"
_DEVICE = "the device is selected automatically; accelerator='cpu' uses the CPU"
_LOOPS = "read the loop's state from the Trainer's attributes, and change it in hooks"
_TRACKER = "such a tracker is not built in; write a trackers.GeneralTracker"
_MEASURED = "use profiler='simple', or PyTorchProfiler"
_INTERNAL = "it is internal to Lightning; write it yourself if you need it"
LIGHTNING_NAMES = {
    "Fabric": _FABRIC,
    "app": "Lightning's apps are not part of training; keep that import",
    "data": "import litdata itself",
    "pytorch.accelerators": _DEVICE,
    "pytorch.callbacks.Checkpoint": "use ModelCheckpoint",
    "pytorch.callbacks.ProgressBar": "inherit from TQDMProgressBar",
    "pytorch.callbacks.SpikeDetection": (
        "use non_finite= and EarlyStopping(divergence_threshold=...)"
    ),
    "pytorch.loggers.LitLogger": "use another logger, such as CSVLogger",
    "pytorch.loggers.NeptuneLogger": _TRACKER,
    "pytorch.loops": _LOOPS,
    "pytorch.overrides": _INTERNAL,
    "pytorch.plugins": _PLUGIN,
    "pytorch.profilers.AdvancedProfiler": _MEASURED,
    "pytorch.profilers.Profiler": _MEASURED,
    "pytorch.profilers.XLAProfiler": "not needed for XLA devices: set PJRT_DEVICE",
    "pytorch.serve": "export the model with torch.export or to_onnx",
    "pytorch.strategies.ModelParallelStrategy": "use trainer.Trainer(parallelism_config=...)",
    "pytorch.strategies.XLAStrategy": "not needed for XLA devices: set PJRT_DEVICE",
    "pytorch.utilities.GradClipAlgorithmType": "write 'norm' or 'value'",
    "pytorch.utilities.LightningEnum": "use enum.Enum",
    "pytorch.utilities.disable_possible_user_warnings": "use warnings.filterwarnings",
    "pytorch.utilities.find_shared_parameters": (
        "use Module.named_parameters(remove_duplicate=False)"
    ),
    "pytorch.utilities.is_picklable": _INTERNAL,
    "pytorch.utilities.is_shared_filesystem": _INTERNAL,
    "pytorch.utilities.measure_flops": "use torch.utils.flop_counter.FlopCounterMode",
    "pytorch.utilities.move_data_to_device": "use trainer.utils.send_to_device",
    "pytorch.utilities.set_shared_parameters": _INTERNAL,
    "pytorch.utilities.suggested_max_num_workers": "use os.cpu_count",
}
LIGHTNING_MODULES = {
    "fabric": _FABRIC,
    "fabric.utilities": _INTERNAL,
    "fabric.utilities.apply_func": "use trainer.utils.send_to_device",
    "fabric.utilities.cloud_io": "use fsspec and torch.load",
    "fabric.utilities.throughput": "use the callback ThroughputMonitor",
    "pytorch": _INTERNAL,
    "pytorch.callbacks": "write a Callback with its hooks",
    "pytorch.loggers": "use a logger of lightning.pytorch.loggers",
    "pytorch.profilers": _MEASURED,
    "pytorch.strategies": "use DDPStrategy, FSDPStrategy or DeepSpeedStrategy",
    "pytorch.strategies.launchers": "processes are started by devices=, or by `trainer launch`",
    "pytorch.trainer": "ask the Trainer's attributes and methods",
    "pytorch.tuner": "use lightning.pytorch.tuner.Tuner",
    "pytorch.utilities.consolidate_checkpoint": "use `trainer merge-weights`",
    "pytorch.utilities.deepspeed": "use `trainer merge-weights`",
    "pytorch.utilities.memory": "use trainer.utils.find_executable_batch_size and release_memory",
    "pytorch.utilities.migration": "`trainer migrate last.ckpt` converts a checkpoint",
    "pytorch.utilities.model_summary": "use the callback ModelSummary",
    "pytorch.utilities.upgrade_checkpoint": "`trainer migrate last.ckpt` converts a checkpoint",
}
"""Of modules that are not here: what to use, also for those below; see `LIGHTNING_NAMES` first."""

# -- names of torch --------------------------------------------------------------------------------

TORCH_NAMES = dict.fromkeys(
    ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"),
    SHARDED_BY_US,
)
"""Classes whose objects the Trainer and the Accelerator do not take."""

_WEIGHTS = (
    "use MyModule.load_from_checkpoint(path), or load_file(f'{path}/model.safetensors') of "
    "safetensors.torch"
)
CHECKPOINT_CALLS = {
    "torch.load": _WEIGHTS,
    "open": "its files are manifest.json, model.safetensors and others",
    "os.path.isfile": "use os.path.exists",
    "shutil.copy": "use shutil.copytree",
    "shutil.copy2": "use shutil.copytree",
    "shutil.copyfile": "use shutil.copytree",
    "add_file": "use add_dir of the artifact",
}
"""What reads a file, and is given `best_model_path` or `last_model_path`, which is a folder."""
LOADED_ENTRIES = {
    "state_dict": _WEIGHTS,
    "hyper_parameters": "use MyModule.load_from_checkpoint(path).hparams",
}
"""What programs take of a checkpoint that they read with `torch.load`."""

# -- names of accelerate ---------------------------------------------------------------------------

_MEGATRON = "a model of megatron-core is prepared and stepped as any other, with megatron_lm_plugin"
_LAUNCH = "`trainer launch` sets the environment of processes"
_SAGEMAKER = "SageMaker is not supported"
ACCELERATE_MODULES = {
    "commands": "the command is `trainer` (trainer launch, trainer config, trainer env)",
    "commands.config.sagemaker": _SAGEMAKER,
    "test_utils": "these are the tests of accelerate itself; start processes with debug_launcher",
    "utils.launch": _LAUNCH,
    "utils.megatron_lm": _MEGATRON,
    "utils.megatron_lm.prepare_data_loader": _MEGATRON,
}
_SAVED = "use Accelerator.save_state and load_state"
_STEPPED = "the prepared optimizer does it in step()"
_OPTIONS = "the choices are in the errors and docstrings of the plugins; write the value"
_FILES = "save_state chooses the file names; pass folders to it and to load_state"
_QUANTIZED = "load_and_quantize_model does it"
_DEVICE_MAP = "infer_auto_device_map and dispatch_model do it"
_PIPELINE = "prepare_pippy does it"
_CONVERTED = "mixed_precision='fp8' of the Accelerator converts the model"
_SENT = "gather, reduce and broadcast do it, and check shapes with ACCELERATE_DEBUG_MODE=1"
_TENSORS = "compare with torch.Tensor"
_ENGINE = "prepare returns the module, optimizer and scheduler with their usual methods"

_REASONS: dict[str, str] = {
    _SAVED: """
        save_accelerator_state load_accelerator_state save_custom_state load_custom_state""",
    _STEPPED: "move_to_device patch_optimizer_step",
    "prepared loaders are those of prepare_data_loader": """
        DataLoaderStateMixin DataLoaderAdapter get_sampler""",
    "not needed for XLA devices: set PJRT_DEVICE": """
        MpDeviceLoaderWrapper USE_TORCH_XLA install_xla prepare_tpu""",
    _PIPELINE: "generate_device_map find_pippy_batch_size build_pipeline pippy_forward",
    "start processes with debug_launcher": "test_launch",
    "states are singletons of a process, which its threads share": """
        do_nothing ThreadLocalSharedDict SharedDict""",
    "name trackers in log_with": "LOGGER_TYPE_TO_CLASS filter_trackers",
    _CONVERTED: """
        convert_model has_transformer_engine_layers contextual_fp8_autocast apply_fp8_autowrap""",
    "use filter_linear_layers with the names of find_first_last_linear_layers": """
        filter_first_and_last_linear_layers""",
    _FILES: """
        SCALER_NAME RNG_STATE_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME FSDP_MODEL_NAME""",
    _SAGEMAKER: """
        SAGEMAKER_PYTORCH_VERSION SAGEMAKER_PYTHON_VERSION SAGEMAKER_TRANSFORMERS_VERSION
        SAGEMAKER_PARALLEL_EC2_INSTANCES SageMakerConfig prepare_sagemager_args_inputs""",
    _OPTIONS: """
        FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE
        FSDP2_STATE_DICT_TYPE DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES STR_OPERATION_TO_FUNC
        TORCH_LAUNCH_PARAMS CUDA_DISTRIBUTED_TYPES TORCH_DISTRIBUTED_OPERATION_TYPES
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING Backend OptLevel FP8Format AmaxComputeAlgorithm
        EnumWithContains BaseEnum""",
    "torch 2.9 or later is required, which has it": """
        FSDP_PYTORCH_VERSION FSDP2_PYTORCH_VERSION DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION BETA_CP_AVAILABLE_PYTORCH_VERSION
        BETA_SP_AVAILABLE_DEEPSPEED_VERSION torch_version""",
    "use torch.profiler.ProfilerActivity, or Accelerator.profile": "ProfilerActivity",
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
        map_pytorch_optim_to_deepspeed""",
    "use deepspeed.zero.GatheredParameters": "GatheredParameters",
    _LAUNCH: """
        PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env
        prepare_simple_launcher_cmd_env""",
    "find_executable_batch_size and release_memory do it": """
        clear_device_cache should_reduce_batch_size""",
    _DEVICE_MAP: """
        check_device_same get_non_persistent_buffers get_module_leaves fallback_allocate
        check_tied_parameters_in_config check_tied_parameters_on_same_device
        get_module_size_with_ties""",
    "Accelerator.get_state_dict and save_model read offloaded weights": """
        get_state_dict_offloaded_model get_state_dict_from_offload""",
    _TENSORS: "is_torch_xpu_tensor",
    _SENT: """
        get_shape gather_tensor_shape verify_operation chained_operation TENSOR_TYPE_TO_INT
        TENSOR_INT_TO_DTYPE ConvertOutputsToFp32""",
    "loading never unpickles": "np_core TORCH_SAFE_GLOBALS",
    "use logging.getLogger": "logger",
    "use importlib.util.find_spec": """
        is_torch_distributed_available is_tqdm_available is_numpy_available""",
    "import rich itself": "rich",
}
ACCELERATE_NAMES = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Those that are in `trainer.accelerate` all the same are not refused."""

_ON_ALL = "call it on every process, outside of the block"
ACCELERATE_CALLS = dict.fromkeys(
    (
        *("save_model", "load_state", "get_state_dict", "wait_for_everyone", "gather"),
        *("gather_for_metrics", "reduce", "pad_across_processes"),
    ),
    _ON_ALL,
)
"""Methods that may not stand below ``if accelerator.is_main_process:``."""
LIGHTNING_CALLS = dict.fromkeys(("log", "log_dict", "save_checkpoint", "all_gather"), _ON_ALL)
"""Methods that may not stand below ``if trainer.is_global_zero:``."""

CHECKPOINT_ENTRIES = {
    "state_dict": "leave weights out in state_dict() of the module, and take what is missing in "
    "load_state_dict(); a LightningModule of trainer.lightning has it here",
    "callbacks": "a callback gives its state in state_dict() and takes it in load_state_dict()",
    "hyper_parameters": "use self.hparams",
    "loops": 'use "epoch" and "global_step"',
    "lr_schedulers": "use trainer.schedulers",
    "optimizer_states": "use trainer.optimizers, on loading in on_train_start",
}
"""Entries of Lightning that the dict of `on_save_checkpoint` and `on_load_checkpoint` lacks."""

# -- names of Hugging Face -------------------------------------------------------------------------

_TRAIN_MODULE = "write a trainer.TrainModule with a training_step, and use trainer.Trainer"
_HF_ARGUMENTS = "pass its arguments to trainer.Trainer, under the Trainer's names"
HUGGING_FACE_NAMES = {
    "Trainer": _TRAIN_MODULE,
    "Seq2SeqTrainer": _TRAIN_MODULE,
    "TrainingArguments": _HF_ARGUMENTS,
    "Seq2SeqTrainingArguments": _HF_ARGUMENTS,
    "TrainerCallback": "inherit from callbacks.Callback",
    "EarlyStoppingCallback": "use callbacks.EarlyStopping",
}
"""Names in ``transformers``."""

HUGGING_FACE_CALLBACK_HOOKS = hints.CALLBACK_HOOKS | {
    "on_optimizer_step": "use on_train_step_end",
    "on_pre_optimizer_step": "use on_before_optimizer_step",
    "on_predict": "use on_predict_end",
    "on_prediction_step": "use on_validation_batch_end",
    "on_push_begin": "use the files in trainer.project_dir, after fit",
    "on_substep_end": "use on_train_batch_end",
    "on_train_begin": "use on_train_start",
}
_MODULES_OWN = "define {} in the module, a trainer.TrainModule"
_LOADERS = "pass the loader to fit, or " + _MODULES_OWN
TRAINER_METHODS = {
    "_get_eval_sampler": _LOADERS.format("val_dataloader"),
    "_get_train_sampler": _LOADERS.format("train_dataloader"),
    "compute_loss": "the loss is what training_step of the module returns",
    "create_optimizer": _MODULES_OWN.format("configure_optimizers"),
    "create_optimizer_and_scheduler": _MODULES_OWN.format("configure_optimizers"),
    "create_scheduler": _MODULES_OWN.format("configure_optimizers"),
    "evaluation_loop": _MODULES_OWN.format("validation_step"),
    "prediction_step": _MODULES_OWN.format("validation_step or predict_step"),
    "training_step": _MODULES_OWN.format("training_step"),
}
"""Methods that subclasses of Hugging Face's Trainer define."""

TABLES = (
    Table("Lightning", "methods of a module, a data module or a callback", hints.HOOKS),
    Table("Lightning", "methods of a module", hints.MODULE_HOOKS),
    Table("Lightning", "methods of a callback", CALLBACK_HOOKS),
    Table("Lightning", "methods of a subclass of one callback", HOOKS_OF_CALLBACKS),
    Table("Lightning", "methods of a logger", LOGGER_METHODS),
    Table("Lightning", "arguments of steps", STEP_ARGUMENTS),
    Table("Lightning", "arguments of self.log", LOG_ARGUMENTS),
    Table("Lightning", "methods below if trainer.is_global_zero:", LIGHTNING_CALLS),
    Table(
        "Lightning",
        "entries of the dict of on_save_checkpoint and on_load_checkpoint",
        CHECKPOINT_ENTRIES,
    ),
    Table("Lightning", "calls with best_model_path or last_model_path", CHECKPOINT_CALLS),
    Table("Lightning", "entries of what torch.load reads of a checkpoint", LOADED_ENTRIES),
    Table("Lightning", "classes of torch", TORCH_NAMES),
    Table("Lightning", "names in lightning", LIGHTNING_NAMES),
    Table("Lightning", "other modules in these of lightning", LIGHTNING_MODULES),
    Table("Lightning", "arguments of trainer.Trainer", LIGHTNING_ARGUMENTS),
    Table("Lightning", "attributes of trainer.Trainer", TRAINER_ATTRIBUTES),
    Table("Lightning", "arguments of fit, validate, test and predict", RUN_ARGUMENTS),
    Table("Lightning", "arguments of validate, test and predict", EVALUATION_ARGUMENTS),
    Table("Accelerate", "modules of accelerate", ACCELERATE_MODULES),
    Table("Accelerate", "names in accelerate", ACCELERATE_NAMES),
    Table("Accelerate", "methods below if accelerator.is_main_process:", ACCELERATE_CALLS),
    Table("Accelerate", "arguments of trainer.Trainer", ACCELERATE_ARGUMENTS),
    Table("Hugging Face Trainer", "names in transformers", HUGGING_FACE_NAMES),
    Table("Hugging Face Trainer", "arguments of TrainingArguments", HUGGING_FACE_ARGUMENTS),
    Table("Hugging Face Trainer", "methods of a callback", HUGGING_FACE_CALLBACK_HOOKS),
    Table("Hugging Face Trainer", "methods of a subclass of Trainer", TRAINER_METHODS),
    Table("Hugging Face Trainer", "methods and attributes of Trainer", HUGGING_FACE_ATTRIBUTES),
)
