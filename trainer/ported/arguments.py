"""Arguments of the Trainers of Lightning and Hugging Face, and what takes their place here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from trainer.errors import choose
from trainer.ported.hooks import MANUAL

_NOTHING = "leave it out"


def _processes(given: Any, option: str = "--num_processes") -> str:
    number = str(len(given) if isinstance(given, (list, tuple)) else given)
    if number in ("0", "1", "None"):
        return f"{_NOTHING}: one process is the default, on the fastest device or with cpu=True"
    return f"trainer launch {option} {number if number.isdigit() else 'N'} script.py"


def _machines(given: Any) -> str:
    return _processes(given, "--num_machines")


def _strategy(given: Any) -> str:
    if given in (None, "auto"):
        return f"{_NOTHING}: the number of processes decides"
    if any(word in str(given).lower() for word in ("fsdp", "deepspeed")):
        return f"{_NOTHING}: models that are divided over devices are not supported yet"
    return "trainer launch --num_processes N script.py: several processes train with DDP"


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


def _every_steps(given: Any) -> str:
    """In place of an interval in batches, or, if it is a float, in a part of an epoch."""
    if isinstance(given, float):
        return _every_epochs(given)
    return f"val_every='{_number(given)} steps'"


def _every_epochs(given: Any) -> str:
    return f"val_every='{_number(given)} epoch{'' if given == 1 else 's'}'"


def _number(given: Any) -> str:
    return f"{given:.12g}" if isinstance(given, (int, float)) else "N"


_OF_LIGHTNING: dict[str, str | Callable[[Any], str]] = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "amp_backend": "mixed_precision",
    "auto_lr_find": "Tuner(...).lr_find(module, loader)",
    "auto_scale_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "check_val_every_n_epoch": _every_epochs,
    "checkpoint_callback": "checkpointing",
    "ckpt_path": "fit(ckpt_path=...)",
    "default_root_dir": "project_dir",
    "devices": _processes,
    "enable_autolog_hparams": "self.save_hyperparameters(logger=False)",
    "enable_checkpointing": "checkpointing",
    "enable_model_summary": "callbacks=[ModelSummary()]",
    "enable_progress_bar": "progress_bar",
    "gpus": _processes,
    "gradient_clip_algorithm": "max_grad_norm or max_grad_value",
    "gradient_clip_val": "max_grad_norm or max_grad_value",
    "ipus": _processes,
    "inference_mode": f"{_NOTHING}: evaluations record no gradients",
    "log_every_n_steps": "log_every",
    "logger": "log_with",
    "move_metrics_to_cpu": f"{_NOTHING}: running totals are single numbers",
    "multiple_trainloader_mode": "one loader, of torch.utils.data.StackDataset or ConcatDataset",
    "num_nodes": _machines,
    "num_processes": _processes,
    "plugins": "mixed_precision or kwargs_handlers",
    "precision": _precision,
    "profiler": "profile='simple', or callbacks=[Profiler()] for a trace",
    "progress_bar_refresh_rate": "progress_bar",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": f"{_NOTHING}: the Trainer shards the loaders",
    "resume_from_checkpoint": "fit(ckpt_path=...)",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
    "strategy": _strategy,
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "terminate_on_nan": "non_finite='stop', the default",
    "tpu_cores": _processes,
    "track_grad_norm": "callbacks=[GradientNormMonitor()]",
    "truncated_bptt_steps": f"{_NOTHING}: {MANUAL}, splitting the batch there",
    "use_distributed_sampler": f"{_NOTHING}: the Trainer shards the loaders",
    "val_check_interval": _every_steps,
    "weights_save_path": "project_dir",
    "weights_summary": "callbacks=[ModelSummary()]",
}
_SAVES = "callbacks=[ModelCheckpoint(every=500, save_last=2)]"
_BEST = "callbacks=[ModelCheckpoint(monitor=..., mode='min' or 'max')]"
_LOADER = "fit(module, DataLoader(dataset, batch_size=8)), with the DataLoader of torch.utils.data"
_OF_LOADER = "{} of the DataLoader"
_LAUNCHED = "kwargs_handlers=[DistributedDataParallelKwargs({}=...)]"
_RATE = "configure_optimizers of the module"
_STEP = "training_step of the module"
_OF_HUGGING_FACE: dict[str, str | Callable[[Any], str]] = {
    "args": "the arguments of TrainingArguments under the Trainer's own names (docs/migrating.md)",
    "auto_find_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "batch_size": _LOADER,
    "bf16": "mixed_precision='bf16'",
    "compute_loss_func": _STEP,
    "compute_metrics": "self.log in validation_step",
    "data_collator": "collate_fn of the DataLoader",
    "dataloader_drop_last": _OF_LOADER.format("drop_last"),
    "dataloader_num_workers": _OF_LOADER.format("num_workers"),
    "dataloader_persistent_workers": _OF_LOADER.format("persistent_workers"),
    "dataloader_pin_memory": f"{_NOTHING}: batches for a GPU are pinned",
    "dataloader_prefetch_factor": _OF_LOADER.format("prefetch_factor"),
    "ddp_bucket_cap_mb": _LAUNCHED.format("bucket_cap_mb"),
    "ddp_find_unused_parameters": _LAUNCHED.format("find_unused_parameters"),
    "deepspeed": _strategy("deepspeed"),
    "device": f"{_NOTHING} for the fastest, or pass cpu=True",
    "disable_tqdm": "progress_bar",
    "do_eval": "fit or validate",
    "do_predict": "predict",
    "do_train": "fit",
    "epochs": "max_epochs",
    "eval_dataset": _LOADER,
    "eval_steps": lambda given: _every_steps(given if isinstance(given, int) else ...),
    "eval_strategy": "val_every='500 steps' or '1 epoch'",
    "evaluation_strategy": "val_every='500 steps' or '1 epoch'",
    "fp16": "mixed_precision='fp16'",
    "fsdp": _strategy("fsdp"),
    "gradient_checkpointing": "your model's own gradient_checkpointing_enable()",
    "greater_is_better": _BEST,
    "group_by_length": _OF_LOADER.format("batch_sampler"),
    "ignore_data_skip": f"{_NOTHING}: a resume reads and discards nothing",
    "label_smoothing_factor": f"label_smoothing of the loss in {_STEP}",
    "learning_rate": _RATE,
    "load_best_model_at_end": "validate or test(ckpt_path='best'), or load_from_checkpoint",
    "logging_dir": "project_dir",
    "logging_steps": "log_every",
    "logging_strategy": "log_every",
    "lr": _RATE,
    "lr_scheduler_type": _RATE,
    "metric_for_best_model": _BEST,
    "model": "fit(module, ...)",
    "model_init": "fit(module, ...)",
    "no_cuda": "cpu",
    "num_train_epochs": "max_epochs",
    "optim": _RATE,
    "optimizers": _RATE,
    "output_dir": "project_dir",
    "overwrite_output_dir": "another project_dir, or fit(ckpt_path='auto') to resume",
    "per_device_eval_batch_size": _LOADER,
    "per_device_train_batch_size": _LOADER,
    "processing_class": "collate_fn of the DataLoader",
    "remove_unused_columns": f"{_NOTHING}: the step gets what the DataLoader yields",
    "report_to": "log_with",
    "save_safetensors": f"{_NOTHING}: weights are safetensors",
    "save_steps": _SAVES,
    "save_strategy": _SAVES,
    "save_total_limit": _SAVES,
    "steps": "max_steps",
    "tokenizer": "collate_fn of the DataLoader",
    "torch_compile": "dynamo_backend='inductor'",
    "train_batch_size": _LOADER,
    "train_dataset": _LOADER,
    "use_cpu": "cpu",
    "warmup_ratio": _RATE,
    "warmup_steps": _RATE,
    "weight_decay": _RATE,
}
_DATA = "dataloader_config=DataLoaderConfiguration({}=...)"
_OF_ACCELERATE = {
    name: _DATA.format(name)
    for name in ("dispatch_batches", "even_batches", "split_batches", "use_seedable_sampler")
}
_INSTEAD = _OF_LIGHTNING | _OF_HUGGING_FACE | _OF_ACCELERATE


def refuse_trainer_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say what to pass in place of arguments that the Trainer does not have.

    Args:
        given: The arguments with their values, which may be ``...`` if unknown.
        known: The arguments that it has.

    Raises:
        TypeError: If any is given.
    """
    names = sorted(set(known) - {"self", "unknown"})
    for name, value in given.items():
        lacks = f"Trainer has no argument {name!r}"
        if instead := _INSTEAD.get(name):
            instead = instead if isinstance(instead, str) else instead(value)
            use = "" if instead.startswith(_NOTHING) else "use "
            raise TypeError(f"{lacks}; {use}{instead}.")
        if near := get_close_matches(name, names, n=1):
            raise TypeError(f"{lacks}. Did you mean {near[0]!r}?")
        raise TypeError(choose("An argument of Trainer", name, names))
