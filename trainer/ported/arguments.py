"""Arguments of the Trainers of Lightning and Hugging Face, and what takes their place here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from trainer.ported.hooks import MANUAL

_NOTHING = "leave it out"
_NO_ENGINE = "deepspeed_plugin=DeepSpeedPlugin(zero_stage=...), under trainer launch"
_SHARDED = "fsdp_plugin=FullyShardedDataParallelPlugin(...), under trainer launch"
_NO_SUCH_DEVICE = f"{_NOTHING}: such devices are not supported"
_FIND_UNUSED = "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"


def _devices(given: Any) -> str:
    """In place of a number of devices, or of their indices in a list or between commas."""
    if isinstance(given, str) and "," in given:
        given = [each.strip() for each in given.split(",") if each.strip()]
    indices = isinstance(given, (list, tuple))
    number = ",".join(map(str, given)) if indices else str(given)
    if number == ("" if indices else "0"):
        return "cpu=True"
    if number == ("0" if indices else "1"):
        return f"{_NOTHING}: one process is the default, on the fastest device or with cpu=True"
    if indices:
        return f"trainer launch --gpu_ids {number} script.py"
    if number in ("auto", "-1"):
        return "trainer launch script.py, which starts a process for each device"
    return f"trainer launch --num_processes {number if number.isdigit() else 'N'} script.py"


def _machines(given: Any) -> str:
    if given == 1:
        return f"{_NOTHING}: one machine is the default"
    return (
        f"trainer launch --num_machines {_whole(given)} --machine_rank R --main_process_ip HOST "
        "--nproc_per_node N script.py on each machine: R counts them from 0, HOST is the first, N "
        "its processes"
    )


def _strategy(given: Any) -> str:
    words = str(given).lower()
    if words in ("auto", "single_device"):
        return f"{_NOTHING}: the number of processes decides"
    if "fsdp" in words:
        return _SHARDED
    if "deepspeed" in words:
        return _NO_ENGINE
    if "notebook" in words:
        return "notebook_launcher(function, num_processes=N): several processes train with DDP"
    unused = f", with {_FIND_UNUSED}" if "find_unused_parameters_true" in words else ""
    return f"trainer launch --num_processes N script.py: several processes train with DDP{unused}"


def _precision(given: Any) -> str:
    words = str(given).lower()
    if "32" in words:
        return f"{_NOTHING}: float32 is the default"
    if words in ("64", "64-true", "16-true", "bf16-true"):
        kind = {"64": "float64", "16": "float16", "bf": "bfloat16"}[words[:2]]
        return f"self.to(torch.{kind}) in __init__ of the module, and batches of that type"
    if "16" in words:
        return f"mixed_precision={'bf16' if 'bf16' in words else 'fp16'!r}"
    return "mixed_precision='bf16' or 'fp16'"


def _every_batches(given: Any) -> str:
    """In place of an interval in batches, in a part of an epoch if a float, or in time."""
    if isinstance(given, float):
        return _every_epochs(given)
    if isinstance(given, (str, timedelta, Mapping)):
        return "val_every='30 minutes' or another time"
    return (
        f"val_every='{_number(given)} steps', where a step is an update: divide a number of "
        "batches by gradient_accumulation_steps"
    )


def _every_epochs(given: Any) -> str:
    if given is None:
        return "an interval such as val_every='500 steps', which counts across epochs"
    return f"val_every='{_number(given)} epoch{'' if given == 1 else 's'}'"


def _every_steps(given: Any) -> str:
    """In place of an interval in updates, or, if it is below 1, in a part of the run."""
    return f"val_every='{_whole(given)} steps'"


def _evaluates(given: Any) -> str:
    kind = _kind(given)
    if kind == "no":
        return "limit_val_batches=0, or fit without a validation loader"
    if kind == "epoch":
        return f"{_NOTHING}: val_every='1 epoch' is the default"
    return "val_every='500 steps' or '1 epoch'"


def _saves(given: Any) -> str:
    kind = _kind(given)
    if kind == "no":
        return "checkpointing=False"
    if kind == "epoch":
        return f"{_NOTHING}: a checkpoint is saved every epoch by default"
    return _BEST if kind == "best" else _SAVES.format("every=500, save_last=2")


def _kind(given: Any) -> str:
    """A choice of Hugging Face's, which may be a member of its enumerations."""
    return str(getattr(given, "value", given)).lower()


def _epochs(given: Any) -> str:
    if isinstance(given, float) and not given.is_integer():
        return "max_steps, which may end within an epoch"
    return f"max_epochs={_number(given)}" if isinstance(given, float) else "max_epochs"


def _switch(name: str) -> Callable[[Any], str]:
    """In place of a switch that is on by default, as is the argument ``name``."""

    def instead(given: Any) -> str:
        if given is ...:
            return name
        off = isinstance(given, int) and not given
        return f"{name}=False" if off else f"{_NOTHING}: {name}=True is the default"

    return instead


def _clips(given: Any) -> str:
    if given == 0:
        return f"{_NOTHING}: nothing is clipped by default"
    value = _number(given)
    return f"max_grad_norm={value}, or max_grad_value={value} if the algorithm is 'value'"


def _windows(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"callbacks=[GradientAccumulationScheduler({dict(given)})]"
    return "gradient_accumulation_steps"


def _number(given: Any) -> str:
    return f"{given:.12g}" if isinstance(given, (int, float)) else "N"


def _whole(given: Any) -> str:
    count = isinstance(given, (int, float)) and given is not True and given % 1 == 0
    return _number(given if count else ...)


_OF_LIGHTNING: dict[str, str | Callable[[Any], str]] = {
    "accumulate_grad_batches": _windows,
    "amp_backend": "mixed_precision",
    "auto_lr_find": "Tuner(...).lr_find(module, loader)",
    "auto_scale_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "check_val_every_n_epoch": _every_epochs,
    "checkpoint_callback": _switch("checkpointing"),
    "ckpt_path": "fit(ckpt_path=...)",
    "default_root_dir": "project_dir",
    "devices": _devices,
    "distributed_backend": _strategy,
    "enable_autolog_hparams": lambda given: (
        f"{_NOTHING}: save_hyperparameters decides"
        if given
        else "save_hyperparameters(logger=False)"
    ),
    "enable_checkpointing": _switch("checkpointing"),
    "enable_model_summary": "callbacks=[ModelSummary()]",
    "enable_progress_bar": _switch("progress_bar"),
    "gpus": _devices,
    "gradient_clip_algorithm": lambda given: (
        "max_grad_value" if _kind(given) == "value" else "max_grad_norm"
    ),
    "gradient_clip_val": _clips,
    "ipus": _NO_SUCH_DEVICE,
    "inference_mode": f"{_NOTHING}: evaluations record no gradients",
    "log_every_n_steps": "log_every",
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "logger": "log_with, such as log_with='tensorboard'",
    "move_metrics_to_cpu": f"{_NOTHING}: running totals are single numbers",
    "multiple_trainloader_mode": "one loader, of torch.utils.data.StackDataset or ConcatDataset",
    "num_nodes": _machines,
    "num_processes": _devices,
    "plugins": "mixed_precision or kwargs_handlers",
    "precision": _precision,
    "profiler": "profile='simple', or callbacks=[Profiler()] for a trace",
    "prepare_data_per_node": f"{_NOTHING}: one process of each machine calls prepare_data first",
    "progress_bar_refresh_rate": _switch("progress_bar"),
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": f"{_NOTHING}: the Trainer shards the loaders",
    "resume_from_checkpoint": "fit(ckpt_path=...), where 'auto' is the newest if there is one",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "strategy": _strategy,
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm in the module's __init__",
    "terminate_on_nan": lambda given: (
        "non_finite='ignore'" if given is False else f"{_NOTHING}: non_finite='stop' is the default"
    ),
    "tpu_cores": _NO_SUCH_DEVICE,
    "track_grad_norm": lambda given: (
        f"{_NOTHING}: no norm is logged by default"
        if str(given) == "-1"
        else "callbacks=[GradientNormMonitor()]"
    ),
    "truncated_bptt_steps": f"{_NOTHING}; for parts of a sequence, {MANUAL}",
    "use_distributed_sampler": f"{_NOTHING}: the Trainer shards the loaders",
    "val_check_interval": _every_batches,
    "weights_save_path": "project_dir",
    "weights_summary": "callbacks=[ModelSummary()]",
}
_SAVES = "callbacks=[ModelCheckpoint({})]"
_BEST = "callbacks=[ModelCheckpoint(monitor=..., mode='min' or 'max')]"
_LOADER = "fit(module, DataLoader(dataset, batch_size=8, shuffle=True)), of torch.utils.data"
_VAL_LOADER = "fit(module, train_loader, DataLoader(dataset, batch_size=8)), of torch.utils.data"
_OF_LOADER = "{} of the DataLoader"
_LAUNCHED = "kwargs_handlers=[DistributedDataParallelKwargs({}=...)]"
_MET = "kwargs_handlers=[InitProcessGroupKwargs({}=...)]"
_RATE = "configure_optimizers of the module"
_STEP = "training_step of the module"
_METRIC = "self.log in validation_step of the module"
_OF_MODEL = "your model's own {}"
_OF_HUGGING_FACE: dict[str, str | Callable[[Any], str]] = {
    "adafactor": _RATE,
    "adam_beta1": _RATE,
    "adam_beta2": _RATE,
    "adam_epsilon": _RATE,
    "args": "the arguments of TrainingArguments under the Trainer's own names (docs/migrating.md)",
    "auto_find_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "batch_size": _LOADER,
    "bf16": "mixed_precision='bf16'",
    "bf16_full_eval": f"{_NOTHING}: evaluations have the precision of the training",
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
    "deepspeed": _NO_ENGINE,
    "device": f"{_NOTHING} for the fastest, or pass cpu=True",
    "disable_tqdm": "progress_bar=False",
    "do_eval": "fit or validate",
    "do_predict": "predict",
    "do_train": "fit",
    "epochs": "max_epochs",
    "eval_accumulation_steps": f"{_NOTHING}: outputs of steps are not collected",
    "eval_dataset": _VAL_LOADER,
    "eval_on_start": "validate(module, loader) before fit",
    "eval_steps": _every_steps,
    "eval_strategy": _evaluates,
    "evaluation_strategy": _evaluates,
    "fp16": "mixed_precision='fp16'",
    "fp16_full_eval": f"{_NOTHING}: evaluations have the precision of the training",
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "full_determinism": "deterministic=True and seed",
    "gradient_checkpointing": _OF_MODEL.format("gradient_checkpointing_enable()"),
    "gradient_checkpointing_kwargs": _OF_MODEL.format("gradient_checkpointing_enable(...)"),
    "greater_is_better": lambda given: _SAVES.format(
        f"monitor=..., mode={'max' if given else 'min'!r}"
    ),
    "group_by_length": _OF_LOADER.format("batch_sampler"),
    "ignore_data_skip": f"{_NOTHING}: a resume reads and discards nothing",
    "label_smoothing_factor": f"label_smoothing of the loss in {_STEP}",
    "learning_rate": _RATE,
    "load_best_model_at_end": "validate or test(ckpt_path='best'), or load_from_checkpoint",
    "local_rank": f"{_NOTHING}: the launcher tells each process its own",
    "log_level": "logging.basicConfig(level=...)",
    "logging_dir": "project_dir",
    "logging_steps": "log_every",
    "logging_strategy": "log_every, such as log_every='1 epoch'",
    "lr": _RATE,
    "lr_scheduler_type": _RATE,
    "metric_for_best_model": _BEST,
    "lr_scheduler_kwargs": _RATE,
    "model": "fit(module, ...)",
    "model_init": "fit(module, ...)",
    "no_cuda": "cpu=True",
    "num_train_epochs": _epochs,
    "optim": _RATE,
    "optim_args": _RATE,
    "optim_target_modules": _RATE,
    "optimizer_cls_and_kwargs": _RATE,
    "optimizers": _RATE,
    "output_dir": "project_dir",
    "overwrite_output_dir": "another project_dir, or fit(ckpt_path='auto') to resume",
    "per_device_eval_batch_size": _VAL_LOADER,
    "per_device_train_batch_size": _LOADER,
    "preprocess_logits_for_metrics": _METRIC,
    "processing_class": "collate_fn of the DataLoader",
    "project": "project_name",
    "push_to_hub": _OF_MODEL.format("push_to_hub after fit"),
    "remove_unused_columns": f"{_NOTHING}: the step gets what the DataLoader yields",
    "report_to": "log_with",
    "save_safetensors": f"{_NOTHING}: weights are safetensors",
    "save_only_model": _SAVES.format("save_weights_only=True"),
    "save_steps": lambda given: _SAVES.format(f"every={_whole(given)}"),
    "save_strategy": _saves,
    "save_total_limit": lambda given: _SAVES.format(
        "save_top_k=-1" if given is None else f"save_last={_whole(given)}"
    ),
    "steps": "max_steps",
    "tokenizer": "collate_fn of the DataLoader",
    "tf32": "torch.set_float32_matmul_precision('high')",
    "torch_compile": "dynamo_backend='inductor'",
    "torch_compile_backend": "dynamo_backend",
    "torch_compile_mode": "dynamo_plugin=TorchDynamoPlugin(backend='inductor', mode=...)",
    "tpu_num_cores": _NO_SUCH_DEVICE,
    "train_batch_size": _LOADER,
    "train_dataset": _LOADER,
    "use_cpu": "cpu=True",
    "warmup_ratio": _RATE,
    "warmup_steps": _RATE,
    "weight_decay": _RATE,
}
_OWN = f"{_NOTHING}: the Trainer decides that itself"
_DATA = f"{_NOTHING}: each process reads whole batches of its own, and no sample is repeated"
_OF_ACCELERATE = {
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
IN_A_RUN = {
    "model": "module",
    "resume_from_checkpoint": 'ckpt_path="auto"',
    "epochs": "Trainer(max_epochs=...)",
    "max_epochs": "Trainer(max_epochs=...)",
    "verbose": "nothing: results are returned, not printed",
    "weights_only": "nothing: loading never unpickles",
}
"""Arguments of other trainers' ``fit``, ``test`` and the like, and what to write in their place."""
_OF_LOADERS = ["loader", "val_loader", "test_loader", "val_dataloaders", "test_dataloaders"]
IN_AN_EVALUATION = IN_A_RUN | dict.fromkeys(_OF_LOADERS, "dataloaders")
_SAID_BY_NONE = ("check_val_every_n_epoch", "save_total_limit")  # elsewhere it asks for nothing
_INSTEAD = _OF_LIGHTNING | _OF_HUGGING_FACE | _OF_ACCELERATE


def check_trainer_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say what to pass in place of arguments that the Trainer does not have.

    Args:
        given: The arguments with their values, which may be ``...`` if unknown.
        known: The arguments that it has.

    Raises:
        TypeError: If any is given.
    """
    raise TypeError("\n".join(argument_refusals(given, known).values()))


def argument_refusals(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, str]:
    """Return for each argument that the Trainer does not have a sentence that says what to pass.

    Args:
        given: As for `check_trainer_arguments`.
        known: The arguments that it has.
    """
    names = sorted(set(known) - {"self", "unknown"})
    refusals = {name: _refusal(name, value, names) for name, value in given.items()}
    if not any(refusals.values()):
        refusals[next(reversed(refusals))] = f"; it must be one of {', '.join(map(repr, names))}."
    return {
        name: f"Trainer has no argument {name!r}{said or '.'}" for name, said in refusals.items()
    }


def _refusal(name: str, value: Any, names: list[str]) -> str:
    """What follows after the statement that there is no such argument; nothing if empty."""
    if instead := _INSTEAD.get(name):
        if _asks_for_nothing(name, value, instead):
            instead = f"{_NOTHING}: {value!r} asks for nothing"
        elif not isinstance(instead, str):
            instead = instead(value)
        return f"; {'' if instead.startswith(_NOTHING) else 'use '}{instead}."
    near = get_close_matches(name, names, n=1, cutoff=0.7)
    return f". Did you mean {near[0]!r}?" if near else ""


def _asks_for_nothing(name: str, value: Any, instead: str | Callable[[Any], str]) -> bool:
    """Whether the value switches the argument's part off, where nothing but that is to be said."""
    if value is None:
        return name not in _SAID_BY_NONE
    if not isinstance(instead, str):
        return False
    if isinstance(value, (str, list, tuple, dict)):
        return not value or value in ("none", "no")
    return value is False and not instead.startswith(_NOTHING)
