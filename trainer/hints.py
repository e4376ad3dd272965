"""Names of other trainers that users often type out of habit, with replacements.

Each text follows "use" in a sentence, or is a separate instruction. This module contains only data.
"""

MANUAL = "set automatic_optimization = False and do it in training_step"
NO_LOGGER = (
    "trackers run on background threads, so they cannot slow or stop the training. Log values "
    "with self.log; name trackers in Trainer(log_with=...), and use trainer.trackers for images "
    "and tables"
)

# -- hooks that nobody would call ------------------------------------------------------------------

HOOKS = {
    "on_epoch_start": "use on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "use on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_hpc_save": "use on_save_checkpoint",
    "on_hpc_load": "use on_load_checkpoint",
}
"""Of modules, data modules and callbacks."""

_EPOCH_END = (
    "outputs are not collected: append what you need to a list in {0}_step, and use and clear it "
    "in on_{1}_epoch_end(self); metrics need only self.log in {0}_step"
)
_STEP_END = "do it at the end of {0}_step: every process runs the whole step on its own batch"
_MODE = (
    "the whole module is put in evaluation mode, and afterwards each submodule back into the mode "
    "it had"
)
_IN_LOADER = "do it in {}_dataloader"
MODULE_HOOKS = {
    "training_epoch_end": _EPOCH_END.format("training", "train"),
    "validation_epoch_end": _EPOCH_END.format("validation", "validation"),
    "test_epoch_end": _EPOCH_END.format("test", "test"),
    "training_step_end": _STEP_END.format("training"),
    "validation_step_end": _STEP_END.format("validation"),
    "test_step_end": _STEP_END.format("test"),
    "configure_callbacks": "pass them to Trainer(callbacks=[...])",
    "configure_sharded_model": "rename it to configure_model",
    "tbptt_split_batch": f"{MANUAL}, splitting the batch there",
    "log_grad_norm": "log the norms in on_before_optimizer_step",
    "on_train_dataloader": _IN_LOADER.format("train"),
    "on_reset_train_dataloader": _IN_LOADER.format("train"),
    "on_val_dataloader": _IN_LOADER.format("val"),
    "on_reset_val_dataloader": _IN_LOADER.format("val"),
    "on_test_dataloader": _IN_LOADER.format("test"),
    "on_reset_test_dataloader": _IN_LOADER.format("test"),
    "on_predict_dataloader": _IN_LOADER.format("predict"),
    "on_reset_predict_dataloader": _IN_LOADER.format("predict"),
    "on_post_move_to_device": "use on_fit_start; tie weights in __init__ or configure_model",
    "on_validation_model_zero_grad": "gradients are dropped before each validation",
    "on_validation_model_eval": _MODE,
    "on_validation_model_train": _MODE,
    "on_test_model_eval": _MODE,
    "on_test_model_train": _MODE,
    "on_predict_model_eval": _MODE,
    "on_predict_model_train": _MODE,
} | dict.fromkeys(
    (
        *("on_sanity_check_start", "on_sanity_check_end", "on_boundary"),
        *("on_preemption", "on_exception"),
    ),
    "only callbacks have this hook: put it in a callbacks.Callback",
)
CALLBACK_HOOKS = {
    "on_epoch_begin": "use on_train_epoch_start",
    "on_evaluate": "use on_validation_end, unless trainer.sanity_checking",
    "on_log": "use on_boundary, which finds the values in trainer.callback_metrics",
    "on_save": (
        "use on_boundary with trainer.wait_for_save(), after which the folder exists; "
        "on_save_checkpoint adds to what is saved"
    ),
    "on_step_begin": "use on_train_step_start",
    "on_step_end": "use on_train_step_end",
}

# -- arguments -------------------------------------------------------------------------------------

_DEVICES = "trainer launch --num_processes N script.py"
_LOADER = "fit(module, DataLoader(dataset, batch_size=8, shuffle=True)), of torch.utils.data"
_VAL_LOADER = "fit(module, train_loader, DataLoader(dataset, batch_size=8)), of torch.utils.data"
_OPTIMIZERS = "configure_optimizers of the module"
TRAINER_ARGUMENTS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "bf16": "mixed_precision='bf16'",
    "check_val_every_n_epoch": "val_every='N epochs'",
    "default_root_dir": "project_dir",
    "devices": _DEVICES,
    "enable_checkpointing": "checkpointing",
    "enable_progress_bar": "progress_bar",
    "epochs": "max_epochs",
    "eval_dataset": _VAL_LOADER,
    "fp16": "mixed_precision='fp16'",
    "gpus": _DEVICES,
    "gradient_clip_val": "max_grad_norm=N, or max_grad_value=N if the algorithm is 'value'",
    "learning_rate": _OPTIMIZERS,
    "log_every_n_steps": "log_every",
    "logger": "log_with, such as log_with='tensorboard'",
    "lr": _OPTIMIZERS,
    "model": "fit(module, ...)",
    "num_train_epochs": "max_epochs",
    "optimizers": _OPTIMIZERS,
    "output_dir": "project_dir",
    "precision": "mixed_precision='bf16' or 'fp16', or dtype='bfloat16'",
    "profiler": "profile='simple', or callbacks=[Profiler()] for a trace",
    "resume_from_checkpoint": "fit(ckpt_path=...), where 'auto' is the newest if there is one",
    "strategy": f"{_DEVICES}: several processes train with DDP",
    "train_dataset": _LOADER,
    "val_check_interval": (
        "val_every='N steps', where a step is an update: divide a number of batches by "
        "gradient_accumulation_steps"
    ),
}
EVALUATION_ARGUMENTS = {
    "resume_from_checkpoint": 'ckpt_path="auto"',
    "verbose": "nothing: results are returned, not printed",
    "weights_only": "nothing: loading never unpickles",
    **dict.fromkeys(("loader", "val_loader", "test_loader"), "dataloaders"),
    **dict.fromkeys(("val_dataloaders", "test_dataloaders"), "dataloaders"),
}
"""Of validate, test and predict."""
FIT_ARGUMENTS = {
    "resume_from_checkpoint": EVALUATION_ARGUMENTS["resume_from_checkpoint"],
    "weights_only": EVALUATION_ARGUMENTS["weights_only"],
    **dict.fromkeys(("dataloaders", "loader"), "train_dataloaders"),
}
"""Of fit."""
STEP_ARGUMENTS = {
    "optimizer_idx": f"for several optimizers {MANUAL}: self.optimizers()",
    "hiddens": f"for truncated backpropagation through time, {MANUAL}",
}
"""No step is given them."""
LOG_ARGUMENTS = {
    "rank_zero_only": (
        "the other processes would wait for this one's value. Call log on all of them: values are "
        "reduced over the processes, and one of them records"
    ),
    "reduce_fx": (
        "a function cannot be reduced over processes; give 'mean', 'sum', 'min' or 'max', or log "
        "an object with update, compute and reset"
    ),
    "enable_graph": (
        "logged values are detached, so that they hold no graph alive. Keep the tensor yourself"
    ),
    "sync_dist_group": "values are reduced over all processes; leave it out",
}
"""Of which only some values are taken; see `trainer.metrics.log_arguments`."""

# -- attributes ------------------------------------------------------------------------------------

_KEEP_LOADER = (
    "keep the loader where you create it; see trainer.datamodule, and trainer.{} for lengths"
)
TRAINER_ATTRIBUTES = {
    "accumulate_grad_batches": "use trainer.gradient_accumulation_steps",
    "check_val_every_n_epoch": "pass Trainer(val_every='N epochs')",
    "checkpoint_callback": "look it up in trainer.callbacks",
    "default_root_dir": "use trainer.project_dir",
    "evaluate": "use trainer.validate(module, loader)",
    "gradient_clip_val": "pass Trainer(max_grad_norm=...)",
    "is_last_batch": (
        "step schedules in on_train_epoch_end; inside training_step the last batch of an epoch "
        "has batch_idx + 1 == trainer.num_training_batches"
    ),
    "log_dir": "use trainer.logs_dir",
    "log_every_n_steps": "pass Trainer(log_every=...)",
    "logger": NO_LOGGER,
    "loggers": NO_LOGGER,
    "lr_scheduler_configs": "use trainer.schedulers",
    "model": "use trainer.module",
    "strategy": "use trainer.accelerator",
    "train": "use trainer.fit(module, loader)",
    "train_dataloader": _KEEP_LOADER.format("num_training_batches"),
    "val_check_interval": "pass Trainer(val_every='N steps')",
    "val_dataloaders": _KEEP_LOADER.format("num_eval_batches"),
}
