"""Preflight checks: settings that differ between ranks, and events that would never be due.

Ranks must agree on arguments, optimizers and checkpoint names. Before training, these checks also
find validations that would never run, monitored metrics that would never be logged, and loaders
that cannot be iterated twice.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from callbacks import (
    Callback,
    EarlyStopping,
    GradientNormMonitor,
    Interval,
    ModelCheckpoint,
    SpikeDetection,
    Timer,
)
from callbacks.monitor import MonitorCallback, suggested
from trainer.data.epoch_iterator import EpochIterator
from trainer.datamodule import DataModule
from trainer.distributed.objects import all_gather_object
from trainer.engines.base import Engine
from trainer.errors import module_logger
from trainer.hooks import HookTable, hook_typo, is_overridden
from trainer.loops.config import Length, Settings
from trainer.loops.state import FitRun
from trainer.module import TrainModule
from trainer.optim.clipping import CLIP_IN_STEP
from trainer.optim.fingerprint import NUMBER

logger = module_logger(__name__)

# Arguments that may differ between ranks: they affect neither decisions nor numbers of a fit.
_OF_A_PROCESS = {
    "deterministic",
    "detect_anomaly",
    "profile",
    "limit_test_batches",
    "limit_predict_batches",
}
_SHARED = (
    "Choose a value once and share it: trainer.utils.broadcast_object_list([value])[0] is rank 0's."
)
_OF_VALIDATION = re.compile(r"val(id(ation)?)?(?![a-z])")  # begins names of its metrics
_Decider = EarlyStopping | ModelCheckpoint | SpikeDetection | Timer


def check_rank_consistency(
    settings: Settings, callbacks: Iterable[Callback], ckpt_path: str | os.PathLike[str] | None
) -> None:
    """Raise if the arguments of a fit differ between ranks, before they deadlock; collective.

    Only arguments that decide how the loop proceeds are compared.

    Args:
        settings: The Trainer's arguments.
        callbacks: The callbacks, whose settings are compared if they save or stop.
        ckpt_path: The argument of `Trainer.fit`.

    Raises:
        ValueError: An argument differs; raised on all ranks, with the value on each rank.
    """
    arguments = {name: repr(value) for name, value in settings.describe().items()}
    for name in _OF_A_PROCESS if settings.budget is None else {*_OF_A_PROCESS, "max_time"}:
        arguments.pop(name, None)
    deciders = [
        callback for callback in callbacks if isinstance(callback, _Decider) and callback.decides_by
    ]
    arguments["callbacks that save or stop"] = ", ".join(map(_decides_by, deciders)) or "none"
    word = ckpt_path in (None, "auto", "best", "last")  # paths may differ between machines
    arguments["ckpt_path"] = repr(ckpt_path) if word else "a path"
    for name, shown in _differences(all_gather_object(arguments)):
        raise ValueError(
            f"The processes called fit with different values of {name}: {shown}. Pass the same on "
            f"all processes. {_SHARED}"
        )


def check_optimizer_fingerprints(options: Mapping[str, str], *, alike: bool = True) -> None:
    """Raise if optimizer options differ between ranks, so that weights would diverge; collective.

    Args:
        options: What `trainer.optim.fingerprint.options_of` returned.
        alike: Whether all ranks have parameters of the same number.

    Raises:
        ValueError: An option differs; raised on all ranks, with the value on each rank.
    """
    compared = {n: value for n, value in options.items() if alike or not n.startswith(NUMBER)}
    for name, shown in _differences(all_gather_object(compared)):
        raise ValueError(
            f"configure_optimizers returned different values of {name}: {shown}. The weights would "
            f"differ from the first update on. {_SHARED}"
        )


def check_callbacks_of(engine: Engine, callbacks: Iterable[Callback]) -> None:
    """Raise for callbacks that need whole weights or averages, if the engine shards them.

    Raises:
        ValueError: There is such a callback.
    """
    kind = _kind_of(engine)
    for callback in callbacks:
        if callback.requires_unsharded and engine.parallel.divides_state:
            raise ValueError(
                f"{type(callback).__name__} cannot be used with a sharded model: it needs the "
                "whole weights on each process, but each process has only its shard. Leave it "
                "out (with ModelCheckpoint, leave out on_exception=True and resume from the last "
                "checkpoint)."
            )
        if engine.parallel.is_model_parallel and isinstance(callback, GradientNormMonitor):
            raise ValueError(
                "GradientNormMonitor reads the gradient of each parameter, but the processes of "
                f"{kind} have different layers or parts of layers: leave it out."
            )
        if engine.driver is not None and is_overridden(callback, "weights_to_save", Callback):
            raise ValueError(
                f"{type(callback).__name__} replaces the trained weights by averaged ones, but "
                f"{kind} keeps its own partitioned weights: leave it out, or train without that "
                "plugin."
            )


def check_overrides(engine: Engine, module: TrainModule, hooks: HookTable) -> None:
    """Raise if a module overrides a part of the update that its engine performs itself.

    Raises:
        NotImplementedError: It overrides such a part.
    """
    overrides = hooks.module_overrides.keys() - {"lr_scheduler_step"}
    if engine.driver is not None and overrides:
        kind = engine.parallel.distributed_type
        asks = "pp_size" if kind is None else f"the plugin (--use_{kind.value.lower()})"
        raise NotImplementedError(
            f"{type(module).__name__} overrides {', '.join(sorted(overrides))}, but "
            f"{_kind_of(engine)} reduces, clips and updates in one step: remove these "
            f"overrides, or leave out {asks}."
        )


def _kind_of(engine: Engine) -> str:
    kind = engine.parallel.distributed_type
    return "a pipeline" if kind is None else str(kind.value)


def check_manual(settings: Settings) -> None:
    """Raise for settings that have no effect in manual optimisation.

    Raises:
        ValueError: Accumulation, clipping, or skipping of non-finite updates is configured.
    """
    findings = []
    steps = settings.gradient_accumulation_steps
    if steps > 1:
        findings.append(
            f"gradient_accumulation_steps is {steps}, but in manual optimisation training_step "
            "decides when to step; pass gradient_accumulation_steps=1. (The value may come from "
            "the launcher, by ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or from a ready Accelerator.)"
        )
    if settings.non_finite == "skip":
        findings.append(
            "non_finite is 'skip', but in manual optimisation training_step decides about updates: "
            "check the loss there, or leave non_finite at 'stop'."
        )
    limits = ("max_grad_norm", "max_grad_value")
    findings += [f"{name} is set. {CLIP_IN_STEP}" for name in limits if getattr(settings, name)]
    if findings:
        raise ValueError("\n".join(findings))


def check_checkpoint_names(target: str) -> None:
    """Raise if ranks give a checkpoint different names; collective.

    Otherwise, only a checkpoint with rank 0's name would exist.

    Args:
        target: The name of the checkpoint.

    Raises:
        ValueError: The names differ; raised on all ranks, with the name on each rank.
    """
    for _, shown in _differences(all_gather_object({"target": target})):
        raise ValueError(
            f"save_checkpoint was called with different names: {shown}. All processes write one "
            f"checkpoint. {_SHARED}"
        )


def _differences(gathered: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the names whose values differ between ranks, each with the values of all ranks."""
    for name in dict.fromkeys(name for values in gathered for name in values):
        values = [of_rank.get(name, "None") for of_rank in gathered]
        if any(value != values[0] for value in values):
            yield name, "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _decides_by(callback: _Decider) -> str:
    """Format the callback's class with the settings that decide when it acts."""
    named = [(name, getattr(callback, name)) for name in callback.decides_by]
    parts = [f"{name}={value}" for name, value in named if value is not None]
    return f"{type(callback).__name__}({', '.join(parts)})"


def can_be_due(
    interval: Interval,
    length: Length,
    *,
    updates: int | None,
    epoch_iterator: EpochIterator | None,
    accumulation: Callable[[int], int],
) -> bool:
    """Return whether a run is at least one interval long; True if that is unknown.

    Args:
        interval: How often something is due.
        length: The maximum length of the run.
        updates: The number of updates in the run; None if unknown.
        epoch_iterator: The training data; None if epochs have different loaders.
        accumulation: Returns the number of micro-batches per window in a given epoch.
    """
    every = interval.every
    if interval.of_epochs:
        batches = None if epoch_iterator is None else epoch_iterator.num_global_batches
        if length.max_epochs is not None and length.max_epochs < interval.of_epochs:
            return False
        return interval.unit != "batches" or batches is None or every <= batches
    if interval.unit == "steps":
        return updates is None or updates >= every
    if interval.unit == "seconds":
        return length.max_seconds is None or length.max_seconds >= every
    if interval.unit == "items":
        return True
    if length.max_epochs is not None and length.max_epochs < every:
        return False
    # The length that an iterable dataset reports may be wrong.
    if length.max_steps is None or epoch_iterator is None or epoch_iterator.sampler is None:
        return True
    global_batches = epoch_iterator.num_global_batches or 0
    whole, part = int(every), every % 1
    needed = sum(-(-global_batches // accumulation(epoch)) for epoch in range(whole))
    rest = math.ceil(round(part * (epoch_iterator.num_batches or 0) / epoch_iterator.world_size, 6))
    return length.max_steps >= needed + -(-rest // accumulation(whole))


def reaches_validation(settings: Settings, trainer: Any, epoch_iterator: EpochIterator) -> bool:
    """Return whether a run is long enough for a validation; True if that is unknown.

    Args:
        settings: The Trainer's arguments.
        trainer: The Trainer, which knows the number of updates.
        epoch_iterator: The training data.
    """
    reloads = settings.reload_dataloaders_every_n_epochs > 0
    return can_be_due(
        Interval.parse(settings.val_every),
        settings.length,
        updates=settings.max_steps if reloads else trainer.estimated_stepping_batches,
        epoch_iterator=None if reloads else epoch_iterator,
        accumulation=trainer.accumulation_in,
    )


def monitors_of(run: FitRun) -> list[tuple[str, str]]:
    """Return the monitored metrics: pairs (class name of the callback or scheduler, metric)."""
    monitoring: list[Any] = [
        callback
        for callback in run.hooks.callbacks
        if isinstance(callback, MonitorCallback) or is_overridden(callback, "monitor_due", Callback)
    ]
    monitors = [(callback, getattr(callback, "monitor", None)) for callback in monitoring]
    monitors += [(entry.scheduler, entry.monitor) for entry in run.optim.schedulers if entry.strict]
    return [(type(owner).__name__, name) for owner, name in monitors if name]


def warn_of_no_validation(run: FitRun) -> None:
    """Warn if no validation will run although the module or the arguments suggest one."""
    settings = run.context.settings
    if settings.limit_val_batches == 0:
        return
    name, hint = type(run.module).__name__, ""
    owners: list[tuple[Any, type]] = [
        (run.module, TrainModule),
        (run.stage.datamodule, DataModule),
    ]
    data = any(is_overridden(owner, "val_dataloader", base) for owner, base in owners)
    if run.eval_iterators:
        if run.intervals.validates:
            return
        text = f"val_every is {settings.val_every}, but the run ends before that"
    elif is_overridden(run.module, "validation_step", TrainModule):
        text = f"{name} defines validation_step, but there is no validation data (val_dataloaders)"
    elif data:
        text = f"there is a val_dataloader, but {name} does not define validation_step"
        hint = hook_typo(run.module, "validation_step", TrainModule)
    elif hint := hook_typo(run.module, "validation_step", TrainModule):
        text = f"{name} does not define validation_step, and there is no validation data"
    elif settings.val_every != Interval.parse("1 epoch"):
        text = f"val_every is {settings.val_every}, but there is no validation data"
    else:
        return
    logger.warning(
        "No validation will run: %s.%s To disable validation, pass limit_val_batches=0.", text, hint
    )


def warn_of_unregistered_layers(run: FitRun) -> None:
    """Warn of layers in a plain list, which are not registered in the module."""
    known = set(run.module.modules())
    hidden = [
        f"{name}.{attribute}" if name else attribute
        for name, part in run.module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, (list, tuple))
        and any(isinstance(item, nn.Module) and item not in known for item in value)
    ]
    if hidden:
        logger.warning(
            "%s: layers in a list are neither trained, moved to the device nor saved. Use "
            "torch.nn.ModuleList.",
            ", ".join(hidden),
        )


def check_units(run: FitRun) -> None:
    """Check the units of schedulers, unless the module advances them itself.

    Raises:
        ValueError: See `SchedulerEntry.check_unit`.
    """
    if run.module.automatic_optimization and "lr_scheduler_step" not in run.hooks.module_overrides:
        for entry in run.optim.schedulers:
            entry.check_unit()


def check_one_pass_loaders(run: FitRun) -> None:
    """Raise if a loader is a one-pass iterator that the run would read more than once.

    It is allowed with a limit on batches, where the next epoch continues reading, and in a run that
    ends by steps or time, which may need only one pass.

    Args:
        run: The fit, after the checkpoint is restored.

    Raises:
        ValueError: There is such a loader.
    """
    counters, length, settings = run.counters, run.context.length, run.context.settings
    epochs = 1
    if length.max_epochs and length.max_steps is None and length.max_seconds is None:
        epochs = length.max_epochs - counters.epoch - counters.epoch_complete
    epochs = min(epochs, settings.reload_dataloaders_every_n_epochs or epochs)
    sanity_check = settings.num_sanity_val_steps != 0 and counters.batches_seen == 0
    reads = [("train", run.data.epoch_iterator, epochs)]
    reads += [
        ("val", epoch_iterator, epochs + sanity_check) for epoch_iterator in run.eval_iterators
    ]
    for which, epoch_iterator, passes in reads:
        if epoch_iterator.reads_once and epoch_iterator.limit is None and passes > 1:
            raise ValueError(
                f"The {which} loader, a {type(epoch_iterator.loader).__name__}, can be read once, "
                f"but this run reads it {passes} times. Pass an object that can be "
                f"iterated again, such as a DataLoader or a list, or set limit_{which}_batches to "
                "read on where the last epoch ended."
            )


def check_reachable(run: FitRun, logged: Iterable[str]) -> None:
    """Raise if a monitored metric is logged by validation, but no validation will be due.

    Args:
        run: The fit.
        logged: The names that validation logged in the sanity check.

    Raises:
        ValueError: A callback or scheduler monitors such a metric.
    """
    if run.intervals.validates:
        return
    for who, name in monitors_of(run):
        if name in logged:
            raise ValueError(
                f"{who} monitors {name!r}, which validation_step logs, but the run ends before a "
                f"validation is due: val_every is {run.context.settings.val_every}. Choose a "
                "shorter interval, a longer run, or another metric."
            )


def warn_of_unlogged_metrics(run: FitRun, logged: Collection[str]) -> None:
    """Warn on rank 0 of monitored metrics of validation that resemble one that it logs.

    It is no error, since the metric may still be logged later. Only names such as val_loss and
    valid/loss are compared: others, such as train_loss and value_loss, may be of training.

    Args:
        run: The fit.
        logged: The names that validation logged in the sanity check.
    """
    for name in sorted({name for _, name in monitors_of(run)} - run.metrics.names):
        if not (run.context.warns and _OF_VALIDATION.match(name)):
            continue
        if hint := suggested(name, logged):
            logger.warning(
                "The monitored metric %r was not logged in the sanity check.%s", name, hint
            )


def warn_of_shared_names(run: FitRun) -> None:
    """Warn on rank 0 of monitored metrics that both training and validation log."""
    trained = dict(run.metrics.step.names() + run.metrics.epoch("train").names())
    for name in sorted({name for _, name in monitors_of(run) if name in trained}):
        if name in run.recorder.validated and run.context.warns:
            logger.warning(
                "training and validation both log %r: monitors use the value of the validation. "
                "Use different names to separate the two in records and trackers.",
                name,
            )


def warn_of_missed(run: FitRun) -> None:
    """Warn on rank 0 at the end of the fit if an expected validation was never due."""
    if run.intervals.validates and run.counters.validations == 0 and run.rank == 0:
        logger.warning(
            "The run ended before a validation was due: val_every is %s.",
            run.context.settings.val_every,
        )
