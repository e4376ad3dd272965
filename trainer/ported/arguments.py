"""Arguments of Lightning's Trainer and of its ``log``, and of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.errors import choose
from trainer.ported.hooks import MANUAL

_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}
_LOG_KNOWN = (
    "on_step",
    "on_epoch",
    "prog_bar",
    "reduce",
    "batch_size",
    "logger",
    "add_dataloader_idx",
    "sync_dist",
    "sync_dist_group",
    "reduce_fx",
    "enable_graph",
    "metric_attribute",
    "rank_zero_only",
)


def log_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's arguments of ``self.log`` in the words of `MetricStore.log`.

    Raises:
        ValueError: One asks for what is not done; the text says what to do.
        TypeError: There is no such argument.
    """
    taken: dict[str, Any] = {}
    for argument, value in given.items():
        where = f"log({name!r}, {argument}={value!r})"
        if argument == "reduce_fx":
            kind = value if isinstance(value, str) else _reduction(value)
            if kind is None:
                raise ValueError(
                    f"{where}: a function cannot be reduced over processes; give 'mean', 'sum', "
                    "'min' or 'max', or log an object with update, compute and reset."
                )
            taken["reduce"] = kind
        elif argument == "rank_zero_only":
            if value:
                raise ValueError(
                    f"{where}: the other processes would wait for this one's value. Call log on "
                    "all of them: values are reduced over the processes, and one of them records."
                )
        elif argument == "enable_graph":
            if value:
                raise ValueError(
                    f"{where}: logged values are detached, so that they hold no graph alive. Keep "
                    "the tensor yourself."
                )
        elif argument == "sync_dist_group":
            if value is not None:
                raise ValueError(f"{where}: values are reduced over all processes; leave it out.")
        elif argument not in ("sync_dist", "metric_attribute"):
            raise TypeError(choose(f"An argument of log({name!r})", argument, _LOG_KNOWN))
    return taken


def _reduction(function: Any) -> str | None:
    return _REDUCTIONS.get(function) if callable(function) else None


_TRAINER_ARGUMENTS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "amp_backend": "mixed_precision",
    "auto_lr_find": "Tuner(...).lr_find(module, loader)",
    "auto_scale_batch_size": "Tuner(...).scale_batch_size(module, loader)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "check_val_every_n_epoch": "val_every='2 epochs'",
    "checkpoint_callback": "checkpointing",
    "default_root_dir": "project_dir",
    "devices": "trainer launch --num_processes 2 script.py",
    "enable_autolog_hparams": "self.save_hyperparameters(logger=False)",
    "enable_checkpointing": "checkpointing",
    "enable_model_summary": "callbacks=[ModelSummary()]",
    "enable_progress_bar": "progress_bar",
    "gpus": "trainer launch --num_processes 2 script.py",
    "gradient_clip_algorithm": "max_grad_norm or max_grad_value",
    "gradient_clip_val": "max_grad_norm or max_grad_value",
    "ipus": "trainer launch --num_processes 2 script.py",
    "inference_mode": "nothing in its place: evaluations record no gradients",
    "log_every_n_steps": "log_every",
    "logger": "log_with",
    "move_metrics_to_cpu": "nothing in its place: running totals are single numbers",
    "multiple_trainloader_mode": "one loader, of torch.utils.data.StackDataset or ConcatDataset",
    "num_nodes": "trainer launch --num_machines 2 script.py",
    "num_processes": "trainer launch --num_processes 2 script.py",
    "plugins": "mixed_precision, kwargs_handlers or fsdp_plugin",
    "precision": "mixed_precision='bf16' or 'fp16'",
    "profiler": "profile='simple', or callbacks=[Profiler()] for a trace",
    "progress_bar_refresh_rate": "progress_bar",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "nothing in its place: the Trainer shards the loaders",
    "resume_from_checkpoint": "fit(ckpt_path=...)",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
    "strategy": "trainer launch --num_processes 2 script.py, or fsdp_plugin",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "terminate_on_nan": "non_finite='stop', the default",
    "tpu_cores": "trainer launch --num_processes 2 script.py",
    "track_grad_norm": "callbacks=[GradientNormMonitor()]",
    "truncated_bptt_steps": f"nothing in its place: {MANUAL}, splitting the batch there",
    "use_distributed_sampler": "nothing in its place: the Trainer shards the loaders",
    "val_check_interval": "val_every='500 steps'",
    "weights_save_path": "project_dir",
    "weights_summary": "callbacks=[ModelSummary()]",
}
_SAVES = "callbacks=[ModelCheckpoint(every=500, save_last=2)]"
_LOADER = "fit(module, DataLoader(dataset, batch_size=8)), with the DataLoader of torch.utils.data"
_RATE = "configure_optimizers of the module"
_OF_HUGGING_FACE = {
    "args": "the arguments of TrainingArguments that docs/migrating.md lists, as the Trainer's own",
    "bf16": "mixed_precision='bf16'",
    "compute_metrics": "self.log in validation_step",
    "data_collator": "collate_fn of the DataLoader",
    "eval_dataset": _LOADER,
    "eval_steps": "val_every='500 steps'",
    "eval_strategy": "val_every='500 steps' or '1 epoch'",
    "fp16": "mixed_precision='fp16'",
    "learning_rate": _RATE,
    "load_best_model_at_end": "fit or validate with ckpt_path='best'",
    "logging_steps": "log_every",
    "lr_scheduler_type": _RATE,
    "model": "fit(module, ...)",
    "num_train_epochs": "max_epochs",
    "optimizers": _RATE,
    "output_dir": "project_dir",
    "per_device_eval_batch_size": _LOADER,
    "per_device_train_batch_size": _LOADER,
    "report_to": "log_with",
    "save_steps": _SAVES,
    "save_strategy": _SAVES,
    "save_total_limit": _SAVES,
    "train_dataset": _LOADER,
    "use_cpu": "cpu",
    "warmup_ratio": _RATE,
    "warmup_steps": _RATE,
    "weight_decay": _RATE,
}


def refuse_trainer_arguments(given: Iterable[str], known: Iterable[str]) -> None:
    """Say what to pass in place of arguments that the Trainer does not have.

    Raises:
        TypeError: If any is given.
    """
    for name in given:
        instead = _TRAINER_ARGUMENTS.get(name) or _OF_HUGGING_FACE.get(name)
        if instead is not None:
            raise TypeError(f"Trainer has no argument {name!r}; use {instead}.")
        raise TypeError(choose("An argument of Trainer", name, set(known) - {"self", "unknown"}))
