"""Rewrites programs: their import lines, or also their names where ours mean the same.

Everything else stays as it is, with comments and formatting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

import callbacks
from trainer.cli.migrate.names import (
    dotted,
    literal,
    moved,
    name_in,
    package_of,
    path_of,
    value_of,
)

# -- what is called what ---------------------------------------------------------------------------

_RENAMED = {
    "LightningModule": "trainer.TrainModule",
    "LightningDataModule": "trainer.DataModule",
    "Trainer": "trainer.Trainer",
    "seed_everything": "trainer.set_seed",
    "callbacks.DeviceStatsMonitor": "callbacks.DeviceStatsMonitor",
    "callbacks.EarlyStopping": "callbacks.EarlyStopping",
    "callbacks.LearningRateMonitor": "callbacks.LearningRateMonitor",
    "callbacks.ModelCheckpoint": "callbacks.ModelCheckpoint",
    "callbacks.RichModelSummary": "callbacks.ModelSummary",
    "callbacks.RichProgressBar": "callbacks.RichProgressBar",
    "callbacks.TQDMProgressBar": "callbacks.ProgressBar",
}
_PLACES = ("trainer", "callbacks", "trainer.utils")  # where a name may be the very same object
_DROPPED = {  # arguments of callbacks that have no effect here
    "ModelCheckpoint": (
        *("filename", "verbose", "auto_insert_metric_name", "save_on_train_epoch_end"),
        "enable_version_counter",
    ),
    "EarlyStopping": ("strict", "check_on_train_epoch_end", "log_rank_zero_only"),
    "LearningRateMonitor": ("logging_interval",),
    "ProgressBar": ("refresh_rate", "process_position", "leave"),
    "RichProgressBar": ("refresh_rate", "leave", "theme", "console_kwargs"),
    "set_seed": ("workers", "verbose"),
}
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
    "check_val_every_n_epoch": (1,),
    "devices": (1, "1", "auto"),
    "enable_checkpointing": (True, None),
    "enable_model_summary": (False,),
    "enable_progress_bar": (True, None),
    "gradient_clip_val": (None, 0, 0.0),
    "inference_mode": (True,),
    "logger": (False,),
    "max_steps": (-1,),
    "num_nodes": (1,),
    "overfit_batches": (0, 0.0),
    "precision": (None, 32, "32", "32-true"),
    "profiler": (None,),
    "strategy": ("auto", "single_device"),
    "sync_batchnorm": (False,),
    "use_distributed_sampler": (True,),
    "val_check_interval": (None, 1.0),
}
_PRECISIONS = {"16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
_IN_FOLDER = {"save_dir": "project_dir"}
_LOGGERS = {
    "CSVLogger": ("csv", _IN_FOLDER),
    "TensorBoardLogger": ("tensorboard", _IN_FOLDER),
    "WandbLogger": ("wandb", {**_IN_FOLDER, "project": "project_name", "name": "run_name"}),
}

Changed = Sequence[tuple[str, str | None]] | None
"""Arguments in place of one, each with its text; None as text keeps it, None alone keeps all."""


def native_name(path: str) -> str | None:
    """Return our own name for a name of another library that means the same; None without one."""
    if package_of(path) is None:
        return None
    if package_of(path) != "accelerate":
        short = name_in(path).removeprefix("pytorch.")
        if short in _RENAMED:
            return _RENAMED[short]
    name = path.rpartition(".")[2]
    try:
        value = value_of(moved(path))
    except (ImportError, AttributeError):
        return None
    for place in _PLACES:
        if getattr(import_module(place), name, None) is value and callable(value):
            return f"{place}.{name}"
    return None


# -- arguments -------------------------------------------------------------------------------------


def _is_default(name: str, value: Any) -> bool:
    return any(value == each and type(value) is type(each) for each in _DEFAULTS.get(name, ()))


def _of_trainer(name: str, value: Any, given: Mapping[str, Any]) -> Changed:
    """Return what takes the place of an argument of Lightning's Trainer."""
    windows = given.get("accumulate_grad_batches", 1)
    changed: Changed = None
    if _is_default(name, value):
        changed = []
    elif name in _ARGUMENTS:
        changed = [(_ARGUMENTS[name], None)]
    elif name == "accelerator" and value == "cpu":
        changed = [("cpu", "True")]
    elif name == "precision" and str(value) in _PRECISIONS:
        changed = [("mixed_precision", f'"{_PRECISIONS[str(value)]}"')]
    elif name == "profiler" and value == "simple":
        changed = [("profile", None)]
    elif name == "logger" and value is True:
        changed = [("log_with", '"tensorboard"')]
    elif name == "gradient_clip_val":
        by_value = given.get("gradient_clip_algorithm", "norm")
        changed = {"norm": [("max_grad_norm", None)], "value": [("max_grad_value", None)]}.get(
            by_value
        )
    elif name == "gradient_clip_algorithm" and value in ("norm", "value"):
        changed = []
    elif name == "check_val_every_n_epoch" and _is_count(value):
        changed = [("val_every", f'"{value} epochs"')]
    elif name == "val_check_interval" and isinstance(value, float):
        changed = [("val_every", f'"{value:g} epoch"')]
    elif name == "val_check_interval" and _is_count(value) and _is_count(windows):
        changed = [("val_every", str(value // windows))] if value % windows == 0 else None
    return changed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of_checkpoint(name: str, value: Any) -> Changed:
    """Return what takes the place of an argument of ModelCheckpoint."""
    changed: Changed = None
    if name == "save_on_exception":
        changed = [("on_exception", None)]
    elif name == "every_n_train_steps":
        changed = [("every", None)] if value else []
    elif name == "every_n_epochs" and (value in (None, 1) or _is_count(value)):
        changed = [("every", f'"{value} epochs"')] if value not in (None, 1) else []
    elif name == "save_last" and value in (True, None, "link"):
        changed = []
    return changed


def _named(args: Sequence[cst.Arg], takes: Sequence[str]) -> list[str | None]:
    """Return the name of each argument; None for one that has none."""
    return [
        arg.keyword.value
        if arg.keyword is not None
        else takes[number]
        if not arg.star and number < len(takes)
        else None
        for number, arg in enumerate(args)
    ]


def _edited(call: cst.Call, changes: Sequence[Changed]) -> cst.Call:
    """Return a call with other arguments; the last one ends as the last one did."""
    args: list[cst.Arg] = []
    for arg, change in zip(call.args, changes, strict=True):
        if change is None:
            args.append(arg)
            continue
        for name, text in change:
            equal = arg.equal
            if arg.keyword is None:
                equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            new = arg.with_changes(keyword=cst.Name(name), equal=equal)
            args.append(new if text is None else new.with_changes(value=cst.parse_expression(text)))
    if not args:
        return call.with_changes(args=[], whitespace_before_args=cst.SimpleWhitespace(""))
    for number, arg in enumerate(args[:-1]):  # several for one, or the last one has moved up
        if isinstance(arg.comma, cst.MaybeSentinel):
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            args[number] = arg.with_changes(comma=comma)
    last = call.args[-1]
    args[-1] = args[-1].with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    return call.with_changes(args=args)


# -- names -----------------------------------------------------------------------------------------


class _Names(cst.CSTTransformer):
    """Writes our own names in place of those of another library.

    Attributes:
        needed: For each name that an import binds: our names that are used through it.
        consumed: The names whose last uses may be gone.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, taken: set[str]) -> None:
        super().__init__()
        self.needed: dict[str, set[str]] = defaultdict(set)
        self.consumed: set[str] = set()
        self._taken = taken  # names of the program's own
        self._statements: set[cst.CSTNode] = set()  # calls whose value nobody uses

    def native(self, path: str | None) -> str | None:
        """Return our own name for a path, unless the program has another thing of that name."""
        native = None if path is None else native_name(path)
        return None if native is None or native.rpartition(".")[2] in self._taken else native

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: ARG002 - as libcst calls it
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: ARG002 - as above
        return False

    def visit_Expr(self, node: cst.Expr) -> None:
        if isinstance(node.value, cst.Call):
            self._statements.add(node.value.func)

    def _renamed(self, original: cst.Name | cst.Attribute) -> str | None:
        native = self.native(path_of(self, original))
        if native == "trainer.set_seed" and original not in self._statements:
            return None  # it returns no seed
        return native

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        path, native = path_of(self, original_node), self._renamed(original_node)
        if native is None or path is None or original_node.value != path.rpartition(".")[2]:
            return updated_node
        self.consumed.add(original_node.value)
        return cst.Name(native.rpartition(".")[2], updated_node.lpar, updated_node.rpar)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        native = self._renamed(original_node)
        if native is None:
            return updated_node
        root = dotted(original_node).partition(".")[0]
        self.needed[root].add(native)
        self.consumed.add(root)
        return cst.Name(native.rpartition(".")[2], updated_node.lpar, updated_node.rpar)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        func = original_node.func
        if isinstance(func, cst.Attribute) and func.attr.value == "item" and not original_node.args:
            value = updated_node.func
            of = dotted(original_node.func).partition("[")[0]
            if of.endswith("trainer.callback_metrics"):  # floats
                return value.value if isinstance(value, cst.Attribute) else updated_node
        if not isinstance(func, (cst.Name, cst.Attribute)) or self._renamed(func) is None:
            return updated_node
        path = path_of(self, func) or ""
        native = (native_name(path) or "").rpartition(".")[2]
        if package_of(path) == "accelerate":
            return updated_node  # the very same object
        if native == "Trainer":
            return _edited(updated_node, self._of_trainer(original_node))
        if native == "set_seed":
            return _seeded(updated_node)
        if (made := getattr(callbacks, native, None)) is not None and native in _DROPPED:
            takes = [*signature(value_of(moved(path))).parameters]
            return _edited(updated_node, _of_callback(made, updated_node.args, takes))
        return updated_node

    def _of_trainer(self, call: cst.Call) -> list[Changed]:
        names = _named(call.args, ())
        given = {
            name: literal(arg.value) for name, arg in zip(names, call.args, strict=True) if name
        }
        changes: list[Changed] = []
        for name, arg in zip(names, call.args, strict=True):
            changed = None if name is None else _of_trainer(name, given[name], given)
            if name == "logger" and isinstance(arg.value, cst.Call):
                changed = self._of_logger(arg.value, "default_root_dir" in given)
            changes.append(changed)
        return changes

    def _of_logger(self, call: cst.Call, has_folder: bool) -> Changed:
        """Return the Trainer's arguments for a logger that is made in its call."""
        path = path_of(self, call.func) or ""
        kind, names = _LOGGERS.get(path.rpartition(".")[2], (None, dict[str, str]()))
        given = _named(call.args, ("save_dir",) if names is _IN_FOLDER else ())
        if kind is None or any(name not in names for name in given):
            return None
        changed: list[tuple[str, str | None]] = [("log_with", f'"{kind}"')]
        for name, arg in zip(given, call.args, strict=True):
            if name is not None and not (has_folder and name == "save_dir"):
                changed.append((names[name], dotted(arg.value)))
        self.consumed.add(dotted(call.func).partition(".")[0])
        return changed


def _seeded(call: cst.Call) -> cst.Call:
    names = _named(call.args, ("seed",))
    dropped: list[Changed] = [[] if name in _DROPPED["set_seed"] else None for name in names]
    if "seed" in names:
        return _edited(call, dropped)
    return call.with_changes(args=[cst.Arg(cst.Integer("0"))])


def _of_callback(made: type, args: Sequence[cst.Arg], takes: Sequence[str]) -> list[Changed]:
    """Return what takes the place of the arguments of a callback."""
    native = signature(made).parameters
    changes: list[Changed] = []
    for arg, name in zip(args, _named(args, takes), strict=True):
        changed: Changed = None
        if name is not None:
            if name in _DROPPED[made.__name__]:
                changed = []
            elif made is callbacks.ModelCheckpoint:
                changed = _of_checkpoint(name, literal(arg.value))
            by_name = name in native and native[name].kind is Parameter.KEYWORD_ONLY
            if changed is None and arg.keyword is None and by_name:
                changed = [(name, None)]
        changes.append(changed)
    return changes


# -- imports ---------------------------------------------------------------------------------------


class _Used(cst.CSTVisitor):
    """Collects the names that are used outside imports, and those that the program defines."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.defined: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        self.defined.update(
            _bound(alias) for alias in node.names if not package_of(dotted(alias.name))
        )
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        path = dotted(node.module)
        ours = package_of(path) or path in _PLACES
        if not isinstance(node.names, cst.ImportStar) and not ours:
            self.defined.update(map(_bound, node.names))
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.used.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.defined.add(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.defined.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self.defined.add(dotted(node.target))


def _bound(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    if alias.asname is not None:
        return dotted(alias.asname.name)
    return dotted(alias.name).partition(".")[0]


class _Imports(cst.CSTTransformer):
    """Changes the import lines to those of `trainer.lightning` and `trainer.accelerate`.

    Args:
        names: What has written our own names, whose imports then take the place of the old ones.
        used: The names that the program uses.
    """

    def __init__(self, names: _Names | None = None, used: Iterable[str] = ()) -> None:
        super().__init__()
        self._names = names
        self._used = set(used)

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,  # noqa: ARG002 - as above
        updated_node: cst.SimpleStatementLine,
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        [*others, statement] = updated_node.body
        if others or not isinstance(statement, (cst.Import, cst.ImportFrom)):
            return updated_node.with_changes(body=[*map(self._moved, updated_node.body)])
        lines = [*self._lines(statement)]
        if len(lines) == 1:
            return updated_node.with_changes(body=lines)
        made = [cst.SimpleStatementLine([each]) for each in lines]
        made[0] = made[0].with_changes(leading_lines=updated_node.leading_lines)
        made[-1] = made[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(made)

    def _lines(self, statement: cst.Import | cst.ImportFrom) -> Iterator[cst.BaseSmallStatement]:
        if self._names is None or isinstance(statement.names, cst.ImportStar):
            yield self._moved(statement)
            return
        kept: list[cst.ImportAlias] = []
        ours: dict[str, list[cst.ImportAlias]] = defaultdict(list)
        for alias in statement.names:
            found = self._own(statement, alias)
            if not found and not self._is_left(statement, alias):
                kept.append(alias)
            for native, asname in found:
                place, _, name = native.rpartition(".")
                ours[place].append(cst.ImportAlias(cst.Name(name), asname))
        if not ours and len(kept) == len(statement.names):
            yield self._moved(statement)
            return
        for place in sorted(ours):
            names = sorted(ours[place], key=dotted_alias)
            same = len(ours) == 1 and not kept and len(names) == len(statement.names)
            if same and isinstance(statement, cst.ImportFrom):  # in its own format
                same_names = [
                    old.with_changes(name=new.name)
                    for old, new in zip(statement.names, ours[place], strict=True)
                ]
                yield statement.with_changes(module=_name(place), names=same_names)
            else:
                yield cst.ImportFrom(module=_name(place), names=_separated(names))
        if kept or not ours:
            rest = kept or [*statement.names]
            rest[-1] = rest[-1].with_changes(comma=statement.names[-1].comma)
            yield self._moved(statement.with_changes(names=rest))

    def _own(
        self, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias
    ) -> list[tuple[str, cst.AsName | None]]:
        """Return our own names that take the place of an imported one."""
        assert self._names is not None
        if isinstance(statement, cst.Import):
            bound = _bound(alias)
            if bound in self._used or not package_of(dotted(alias.name)):
                return []
            return [(native, None) for native in sorted(self._names.needed.get(bound, ()))]
        path = f"{dotted(statement.module)}.{dotted(alias.name)}"
        native = None if statement.relative else self._names.native(path)
        if native is None or (_bound(alias) in self._used and _keeps_name(alias, native)):
            return []
        return [(native, alias.asname)]

    def _is_left(self, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
        """Whether all uses of the imported name have been rewritten."""
        assert self._names is not None
        if not isinstance(statement, cst.ImportFrom) or not package_of(dotted(statement.module)):
            return False
        return _bound(alias) in self._names.consumed and _bound(alias) not in self._used

    def _moved(self, statement: cst.BaseSmallStatement) -> cst.BaseSmallStatement:
        """Return an import with the new place of its names."""
        if isinstance(statement, cst.ImportFrom) and not statement.relative:
            path = dotted(statement.module)
            return statement.with_changes(module=_name(moved(path)) if path else None)
        if isinstance(statement, cst.Import):
            return statement.with_changes(names=[*map(_moved_alias, statement.names)])
        return statement


def _keeps_name(alias: cst.ImportAlias, native: str) -> bool:
    """Whether uses keep an old name that ours, imported instead, would not have."""
    return alias.asname is None and native.rpartition(".")[2] != dotted(alias.name)


def _moved_alias(alias: cst.ImportAlias) -> cst.ImportAlias:
    path = dotted(alias.name)
    package = package_of(path)
    if package is None or (new := moved(path)) == path:
        return alias
    if alias.asname is not None:
        return alias.with_changes(name=_name(new))
    return alias.with_changes(name=_name(moved(package)), asname=cst.AsName(cst.Name(package)))


def _name(path: str) -> Any:
    return cst.parse_expression(path)


def dotted_alias(alias: cst.ImportAlias) -> str:
    """Return the imported name, for sorting."""
    return dotted(alias.name)


def _separated(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*(each.with_changes(comma=comma) for each in aliases[:-1]), aliases[-1]]


def with_imports(module: cst.Module) -> cst.Module:
    """Return a program with its import lines changed."""
    return module.visit(_Imports())


def with_native_names(module: cst.Module) -> cst.Module:
    """Return a program with our own names where they mean the same, and its imports changed."""
    before = _Used()
    module.visit(before)
    names = _Names(before.defined)
    changed = MetadataWrapper(module).visit(names)
    after = _Used()
    changed.visit(after)
    return changed.visit(_Imports(names, after.used))
