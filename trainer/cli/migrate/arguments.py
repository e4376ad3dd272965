"""What takes the place of the arguments of Lightning's Trainer: all of a call's, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import libcst as cst

from trackers.base import is_installed
from trackers.tensorboard import TensorBoardTracker
from trainer.cli.migrate.names import dotted, literal, path_of
from trainer.interval import Interval
from trainer.lightning.pytorch.trainer import Trainer as LightningTrainer
from trainer.lightning.pytorch.trainer import interval_of
from trainer.migration.refusals import argument_refusals
from trainer.migration.values import PRECISIONS
from trainer.trainer import Trainer

_NATIVE = {*signature(Trainer).parameters}
_LIGHTNING = {*signature(LightningTrainer).parameters} - {"others"}
_ARGUMENTS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "default_root_dir": "project_dir",
    "enable_checkpointing": "checkpointing",
    "enable_progress_bar": "progress_bar",
    "log_every_n_steps": "log_every",
}
_DEFAULTS: dict[str, tuple[Any, ...]] = {  # values of Trainer's arguments that ask for nothing
    "accelerator": ("auto", "gpu", "cuda", "mps"),
    "accumulate_grad_batches": (1,),
    "devices": (1, "1", "auto"),
    "enable_checkpointing": (True,),
    "enable_progress_bar": (True,),
    "gradient_clip_val": (0, 0.0),
    "inference_mode": (True,),
    "max_steps": (-1,),
    "num_nodes": (1,),
    "overfit_batches": (0, 0.0),
    "plugins": ([], ()),
    "precision": (32, "32", "32-true"),
    "strategy": ("auto", "single_device"),
    "sync_batchnorm": (False,),
    "use_distributed_sampler": (True,),
}
_IN_FOLDER = {"save_dir": "project_dir"}
_LOGGERS = {
    "CSVLogger": ("csv", _IN_FOLDER),
    "TensorBoardLogger": ("tensorboard", _IN_FOLDER),
    "WandbLogger": ("wandb", {**_IN_FOLDER, "project": "project_name", "name": "run_name"}),
}
_INTERVAL = ("val_check_interval", "check_val_every_n_epoch")
_CLIPPING = {None: "max_grad_norm", "norm": "max_grad_norm", "value": "max_grad_value"}
_ENDLESS = "10**9"  # epochs

Changed = Sequence[tuple[str, str | None]] | None
"""Arguments in place of one, each with its text; None as text keeps it, None alone keeps all."""


class Translation(NamedTuple):
    """What takes the place of a call's arguments.

    Attributes:
        changes: For each argument.
        added: Arguments for what Lightning does by default, each with its text.
        left: What has no translation, with what to do; then the call has to stay as it is.
        summary: Whether a ``ModelSummary`` joins the callbacks.
    """

    changes: list[Changed]
    added: list[tuple[str, str]]
    left: list[tuple[cst.CSTNode, str]]
    summary: bool


def named(args: Sequence[cst.Arg], takes: Sequence[str]) -> list[str | None]:
    """Return the name of each argument; None for one that has none."""
    return [
        arg.keyword.value
        if arg.keyword is not None
        else takes[number]
        if not arg.star and number < len(takes)
        else None
        for number, arg in enumerate(args)
    ]


def translated(visitor: Any, call: cst.Call) -> Translation:
    """Return the arguments of our Trainer for a call of Lightning's.

    Args:
        visitor: It has libcst's ``QualifiedNameProvider``.
        call: The call.
    """
    names = named(call.args, ())
    given = {name: literal(arg.value) for name, arg in zip(names, call.args, strict=True) if name}
    changes: list[Changed] = []
    left: list[tuple[cst.CSTNode, str]] = []
    for name, arg in zip(names, call.args, strict=True):
        changed: Changed = None
        if name == "logger" and isinstance(arg.value, cst.Call):
            changed = _of_logger(visitor, arg.value, "default_root_dir" in given)
        elif name is not None:
            changed = _of_argument(name, given)
        changes.append(changed)
        if changed is None and name not in _NATIVE:
            left.append((arg, _why_left(name, given)))
    added: list[tuple[str, str]] = []
    if given.get("max_epochs") is None and not _is_limited(given):
        added.append(("max_epochs", "1000"))
    dry = bool(given.get("barebones"))
    if given.get("logger") is None and not dry:
        added.append(("log_with", _default_tracker()))
    summary = given.get("enable_model_summary") is not False and not dry
    callbacks = dict(zip(names, call.args, strict=True)).get("callbacks")
    if summary and callbacks is not None and given["callbacks"] is not None:
        if not isinstance(callbacks.value, cst.List):
            left.append((callbacks, "write its callbacks as a list, or enable_model_summary=False"))
        else:
            paths = (path_of(visitor, _called(each.value)) for each in callbacks.value.elements)
            summary = not any((path or "").endswith("ModelSummary") for path in paths)
    for name, times in Counter(_resulting(names, changes, added)).items():
        if times > 1:
            left.append((call, f"{name} would be given {times} times"))
    return Translation(changes, added, left, summary)


def _resulting(
    names: Sequence[str | None], changes: Sequence[Changed], added: Sequence[tuple[str, str]]
) -> list[str]:
    kept = [name for name, each in zip(names, changes, strict=True) if name and each is None]
    new = [name for each in changes for name, _ in each or ()]
    return [*kept, *new, *(name for name, _ in added)]


def _called(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.func if isinstance(node, cst.Call) else node


def _is_limited(given: Mapping[str, Any]) -> bool:
    """Whether something else than the epochs ends the run."""
    return given.get("max_steps") not in (None, -1) or given.get("max_time") is not None


def _default_tracker() -> str:
    """Return what Lightning's Trainer logs with where nothing is said."""
    return '"tensorboard"' if is_installed(TensorBoardTracker) else '"csv"'


def _why_left(name: str | None, given: Mapping[str, Any]) -> str:
    if name is None:
        return "its arguments are not all written out"
    if name in _INTERVAL and isinstance(told := _interval(given), ValueError):
        return str(told)
    return argument_refusals({name: given[name]}, _NATIVE)[name]


def _of_argument(name: str, given: Mapping[str, Any]) -> Changed:
    """Return what takes the place of an argument of Lightning's Trainer."""
    value = given[name]
    if name in _INTERVAL:
        return _of_interval(name, given)
    if (value is None and name in _LIGHTNING) or _is_default(name, value):
        return []
    changed: Changed = None
    if name == "accumulate_grad_batches" and isinstance(value, dict):
        pass
    elif name in _ARGUMENTS:
        changed = [(_ARGUMENTS[name], None)]
    elif name == "max_epochs" and value == -1:
        changed = [] if _is_limited(given) else [("max_epochs", _ENDLESS)]
    elif name == "accelerator" and value == "cpu":
        changed = [("cpu", "True")]
    elif name == "precision" and str(value) in PRECISIONS:
        changed = [(native, f'"{text}"') for native, text in PRECISIONS[str(value)].items()]
    elif name == "profiler" and value == "simple":
        changed = [("profile", None)]
    elif name == "logger" and isinstance(value, bool):
        changed = [("log_with", _default_tracker())] if value else []
    elif name == "enable_model_summary" and isinstance(value, bool):
        changed = []
    elif name in ("gradient_clip_val", "gradient_clip_algorithm"):
        native = _CLIPPING.get(given.get("gradient_clip_algorithm"))
        changed = None if native is None else [(native, None)] if name in _DEFAULTS else []
    return changed


def _is_default(name: str, value: Any) -> bool:
    return any(value == each and type(value) is type(each) for each in _DEFAULTS.get(name, ()))


def _of_interval(name: str, given: Mapping[str, Any]) -> Changed:
    """Return one interval in place of both arguments, where the first of them stands."""
    made = _interval(given)
    if made is None or isinstance(made, ValueError):
        return None
    if not made or name != next(each for each in given if each in _INTERVAL):
        return []
    return [("val_every", made)]


def _interval(given: Mapping[str, Any]) -> str | ValueError | None:
    """Return the text of the interval: empty for the default, None where it is not known."""
    interval, epochs = given.get("val_check_interval"), given.get("check_val_every_n_epoch", 1)
    windows = given.get("accumulate_grad_batches", 1)
    if ... in (interval, epochs) or (isinstance(interval, int) and windows is ...):
        return None
    try:
        made = interval_of(interval, epochs, windows or 1)
    except ValueError as error:
        return error
    if made is None:
        return ""
    return str(made) if isinstance(made, int) else f'"{Interval.parse(made)}"'


def _of_logger(visitor: Any, call: cst.Call, has_folder: bool) -> Changed:
    """Return the Trainer's arguments for a logger that is made in its call."""
    path = path_of(visitor, call.func) or ""
    kind, names = _LOGGERS.get(path.rpartition(".")[2], (None, dict[str, str]()))
    given = named(call.args, ("save_dir",) if names is _IN_FOLDER else ())
    if kind is None or any(name not in names for name in given):
        return None
    changed: list[tuple[str, str | None]] = [("log_with", f'"{kind}"')]
    for name, arg in zip(given, call.args, strict=True):
        if name is not None and not (has_folder and name == "save_dir"):
            changed.append((names[name], dotted(arg.value)))
    return changed
