"""What code written for Lightning brings along: hooks that are not called, arguments, attributes.

A method that a user has written and nobody calls is a silent mistake. Each hook of LightningModule,
LightningDataModule and Lightning's Callback, of its releases 1.5 to 2.x, is therefore either called
here too or refused before anything runs, with what to use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import choose

_MANUAL = "set automatic_optimization = False and do it in training_step"
_EPOCH_END = (
    "outputs are not collected: keep what you need in a list of your own in {0}_step, and use and "
    "clear it in on_{1}_epoch_end(self); metrics need only self.log in {0}_step"
)
_STEP_END = "do it at the end of {0}_step: every process runs the whole step on its own batch"
_MODE = (
    "the whole module is put in evaluation mode and each part back into its own afterwards; parts "
    "that you set to eval() stay so"
)

_EVERYWHERE = {
    "on_epoch_start": "use on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "use on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_hpc_save": "use on_save_checkpoint",
    "on_hpc_load": "use on_load_checkpoint",
}
_MODULE = _EVERYWHERE | {
    "training_epoch_end": _EPOCH_END.format("training", "train"),
    "validation_epoch_end": _EPOCH_END.format("validation", "validation"),
    "test_epoch_end": _EPOCH_END.format("test", "test"),
    "training_step_end": _STEP_END.format("training"),
    "validation_step_end": _STEP_END.format("validation"),
    "test_step_end": _STEP_END.format("test"),
    "backward": f"{_MANUAL}, with self.manual_backward(loss, ...)",
    "optimizer_step": (
        "use on_before_optimizer_step for what comes before an update and a scheduler with "
        f"'interval': 'step' for a warm-up; to decide about updates, {_MANUAL}"
    ),
    "optimizer_zero_grad": (
        f"gradients are set to None after each update; for something else {_MANUAL}"
    ),
    "configure_gradient_clipping": (
        "pass Trainer(max_grad_norm=...) or Trainer(max_grad_value=...); for limits of each "
        f"optimizer's own {_MANUAL}, with self.clip_gradients"
    ),
    "lr_scheduler_step": (
        "return a scheduler whose step() takes no argument, or the metric of its 'monitor': wrap "
        "one that takes others in an object with step, state_dict and load_state_dict"
    ),
    "configure_callbacks": "pass them to Trainer(callbacks=[...])",
    "configure_sharded_model": "rename it to configure_model",
    "tbptt_split_batch": f"{_MANUAL}, splitting the batch there",
    "log_grad_norm": "log the norms in on_before_optimizer_step",
    "on_validation_model_zero_grad": "gradients are dropped before each validation",
    **{
        f"on_{phase}_model_{mode}": _MODE
        for phase in ("validation", "test", "predict")
        for mode in ("eval", "train")
    },
    **{
        f"on{reset}_{phase}_dataloader": f"do it in {phase}_dataloader"
        for reset in ("", "_reset")
        for phase in ("train", "val", "test", "predict")
    },
    "on_post_move_to_device": "use on_fit_start; tie weights in __init__ or configure_model",
    **dict.fromkeys(
        (
            "on_sanity_check_start",
            "on_sanity_check_end",
            "on_boundary",
            "on_preemption",
            "on_exception",
        ),
        "only callbacks have this hook: put it in a callbacks.Callback",
    ),
}
_CALLBACK = _EVERYWHERE | {
    "on_init_start": "use setup",
    "on_init_end": "use setup",
    "on_before_accelerator_backend_setup": "use setup",
    "on_configure_sharded_model": "use setup",
    "on_keyboard_interrupt": "use on_exception, which is told a KeyboardInterrupt too",
}


def refuse_uncalled(owner: object, kind: str) -> None:
    """Refuse a hook of Lightning that nobody would call.

    Args:
        owner: The user's module, callback or datamodule.
        kind: ``"module"``, ``"callback"`` or ``"datamodule"``.

    Raises:
        TypeError: It has one; the text says what to use.
    """
    refused = {
        "module": _MODULE,
        "callback": _CALLBACK,
        "datamodule": _EVERYWHERE,
    }[kind]
    for name in sorted(refused):
        # Not getattr of the owner: a layer may have such a name, and it is no method.
        if callable(getattr(type(owner), name, None)) or callable(vars(owner).get(name)):
            raise TypeError(
                f"{type(owner).__name__} defines {name}, which is never called here: "
                f"{refused[name]}."
            )


def refuse_signature(call: Callable[..., Any], name: str, like: Callable[..., Any]) -> None:
    """Refuse a hook that cannot be called as it will be, before anything runs.

    Args:
        call: The user's method, bound.
        name: Its name.
        like: The hook of the base class, unbound, which says what it is called with.

    Raises:
        TypeError: Its arguments are others.
    """
    given = list(inspect.signature(like).parameters.values())[1:]
    takes = _signature(call)
    if takes is None or any(each.kind is each.VAR_POSITIONAL for each in given):
        return
    try:
        takes.bind(*[each.name for each in given if each.default is each.empty])
    except TypeError as error:
        owner = type(getattr(call, "__self__", call)).__name__
        names = ", ".join(["self", *(each.name for each in given)])
        raise TypeError(
            f"{owner}.{name}{takes} is called with other arguments here ({error}): "
            f"def {name}({names})."
        ) from None


def with_loader_number(call: Callable[..., Any]) -> Callable[..., Any]:
    """A batch hook that insists on a ``dataloader_idx`` gets 0 with a single loader."""
    takes = _signature(call)
    number = None if takes is None else takes.parameters.get("dataloader_idx")
    if takes is None or number is None or number.default is not number.empty:
        return call
    return partial(_call_with_number, call, len(takes.parameters))


def _call_with_number(call: Callable[..., Any], takes: int, *args: Any) -> None:
    call(*args, *([0] if len(args) < takes else []))


def without_batch_idx(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Those of the module's steps that do not take the batch's number, as functions that do.

    Raises:
        TypeError: A step takes what no step is given any more.
    """
    adapted: dict[str, Callable[..., Any]] = {}
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        takes = _signature(step)
        if takes is None:
            continue
        for argument, hint in (
            ("optimizer_idx", f"for several optimizers {_MANUAL}: self.optimizers()"),
            ("hiddens", f"to go back through a sequence in parts, {_MANUAL}"),
        ):
            if argument in takes.parameters:
                raise TypeError(
                    f"{type(module).__name__}.{name} takes {argument}, which no step is given "
                    f"here: {hint}."
                )
        kinds = [each.kind for each in takes.parameters.values()]
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        several = [kind for kind in kinds if kind in by_place]
        if inspect.Parameter.VAR_POSITIONAL in kinds or "batch_idx" in takes.parameters:
            continue
        if len(several) == 1 or list(takes.parameters)[1:2] == ["dataloader_idx"]:
            adapted[name] = partial(_call_without_number, step, len(several) > 1)
    return adapted


def _call_without_number(
    step: Callable[..., Any], several: bool, batch: Any, _: int, dataloader_idx: int = 0
) -> Any:
    return step(batch, dataloader_idx) if several else step(batch)


def refuse_step_signature(module: nn.Module, name: str, loaders: int) -> None:
    """Refuse a step that does not fit the number of loaders, before anything runs.

    Raises:
        TypeError: It lacks ``dataloader_idx`` with several, or insists on it with one.
    """
    step = getattr(module, name)
    takes = _signature(step)
    if takes is None or isinstance(step, partial):
        return
    arguments = ["batch", "batch_idx"] + ["dataloader_idx"] * (loaders > 1)
    try:
        takes.bind(*arguments)
    except TypeError:
        if name == "training_step":
            fitting, fix = "", f"{name}(self, batch, batch_idx)."
        else:
            fitting = f" does not fit {loaders} loader{'s' * (loaders > 1)}: it"
            fix = f"{name}(self, batch, batch_idx, dataloader_idx=0) to take one or several."
        raise TypeError(
            f"{type(module).__name__}.{name}{takes}{fitting} is called with "
            f"{', '.join(arguments)}. Define {fix}"
        ) from None


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):  # of something built in, which does not say
        return None


# -- arguments -------------------------------------------------------------------------------------

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
    "move_metrics_to_cpu": "nothing in its place: totals are numbers of one element",
    "multiple_trainloader_mode": "one loader, of torch.utils.data.StackDataset or ConcatDataset",
    "num_nodes": "trainer launch --num_machines 2 script.py",
    "num_processes": "trainer launch --num_processes 2 script.py",
    "plugins": "mixed_precision, kwargs_handlers or fsdp_plugin",
    "precision": "mixed_precision='bf16' or 'fp16'",
    "profiler": "profile='simple', or callbacks=[Profiler()] for a trace",
    "progress_bar_refresh_rate": "progress_bar",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "nothing in its place: the Trainer shares the loaders out",
    "resume_from_checkpoint": "fit(ckpt_path=...)",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
    "strategy": "trainer launch --num_processes 2 script.py, or fsdp_plugin",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "terminate_on_nan": "non_finite='stop', which it is unless given",
    "tpu_cores": "trainer launch --num_processes 2 script.py",
    "track_grad_norm": "callbacks=[GradientNormMonitor()]",
    "truncated_bptt_steps": f"nothing in its place: {_MANUAL}, splitting the batch there",
    "use_distributed_sampler": "nothing in its place: the Trainer shares the loaders out",
    "val_check_interval": "val_every='500 steps'",
    "weights_save_path": "project_dir",
    "weights_summary": "callbacks=[ModelSummary()]",
}


def refuse_trainer_arguments(given: Iterable[str], known: Iterable[str]) -> None:
    """Say what to pass in place of arguments that the Trainer does not have.

    Raises:
        TypeError: If any is given.
    """
    for name in given:
        instead = _TRAINER_ARGUMENTS.get(name)
        if instead is not None:
            raise TypeError(f"Trainer has no argument {name!r}; use {instead}.")
        raise TypeError(choose("An argument of Trainer", name, set(known) - {"self", "unknown"}))


# -- attributes ------------------------------------------------------------------------------------

NO_LOGGER = (
    "trackers run on a thread of their own, so that none can slow or stop the training. Values go "
    "to them through self.log; name them in Trainer(log_with=...), and give one of your own for "
    "images and tables (see register_tracker)"
)
_LOOK_UP = "look it up in trainer.callbacks"
_LOADER = "keep it where you make it; trainer.datamodule is the datamodule, trainer.{} the lengths"
_STAGE = (
    "steps and hooks are named after what runs, setup is told it, and trainer.training is true "
    "between the validations of a fit"
)
_ARGUMENT = "arguments are no attributes, but for max_epochs and max_steps: keep the value yourself"
_TRAINER_ATTRIBUTES = {
    **dict.fromkeys(
        (
            "check_val_every_n_epoch",
            "gradient_clip_algorithm",
            "gradient_clip_val",
            "limit_predict_batches",
            "limit_test_batches",
            "limit_train_batches",
            "limit_val_batches",
            "log_every_n_steps",
            "min_epochs",
            "min_steps",
            "num_sanity_val_steps",
            "overfit_batches",
            "reload_dataloaders_every_n_epochs",
            "val_check_interval",
        ),
        _ARGUMENT,
    ),
    "accumulate_grad_batches": "use trainer.gradient_accumulation_steps",
    "checkpoint_callback": _LOOK_UP,
    "checkpoint_callbacks": _LOOK_UP,
    "current_step": "use trainer.global_step",
    "default_root_dir": "use trainer.project_dir",
    "early_stopping_callback": _LOOK_UP,
    "early_stopping_callbacks": _LOOK_UP,
    "evaluating": _STAGE,
    "fit_loop": "for a longer run make another Trainer, whose fit goes on by ckpt_path",
    "interrupted": "a callback's on_preemption is called",
    "is_last_batch": "trainer.epoch_complete is true after the last update of an epoch",
    "lightning_module": "use trainer.module",
    "log_dir": "use trainer.logs_dir",
    "logger": NO_LOGGER,
    "loggers": NO_LOGGER,
    "lr_scheduler_configs": "use trainer.schedulers",
    "lr_schedulers": "use trainer.schedulers",
    "model": "use trainer.module",
    "num_devices": "use trainer.world_size",
    "num_predict_batches": "use trainer.num_eval_batches",
    "num_sanity_val_batches": "use trainer.num_eval_batches",
    "num_test_batches": "use trainer.num_eval_batches",
    "num_val_batches": "use trainer.num_eval_batches",
    "precision": "use mixed_precision of trainer.accelerator",
    "predict_dataloaders": _LOADER.format("num_eval_batches"),
    "predicting": _STAGE,
    "print": "use print of trainer.accelerator",
    "progress_bar_callback": _LOOK_UP,
    "received_sigterm": "a callback's on_preemption is called",
    "scaler": "use scaler of trainer.accelerator",
    "state": _STAGE,
    "strategy": "use trainer.accelerator",
    "test_dataloaders": _LOADER.format("num_eval_batches"),
    "testing": _STAGE,
    "train_dataloader": _LOADER.format("num_training_batches"),
    "val_dataloaders": _LOADER.format("num_eval_batches"),
    "validating": _STAGE,
}


def trainer_attribute_hint(name: str) -> str:
    """What an error says about an attribute that the Trainer does not have."""
    hint = _TRAINER_ATTRIBUTES.get(name)
    return f"Trainer has no attribute {name!r}" + (f": {hint}." if hint else ".")


class Refused:
    """An attribute of a LightningModule that a module does not have; it may be set to another.

    Args:
        hint: What to use.
    """

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise RuntimeError(f"{type(instance).__name__} has no {self._name}: {self._hint}.")
