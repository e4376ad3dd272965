"""Rewrites programs: their import lines, or also their names where ours mean the same.

Everything else stays as it is, with comments and formatting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, QualifiedNameProvider

import callbacks
from trainer.cli.migrate.arguments import Changed, named, translated
from trainer.cli.migrate.names import (
    class_of,
    dotted,
    is_module,
    literal,
    moved,
    name_in,
    package_of,
    path_of,
    value_of,
)
from trainer.lightning.pytorch.trainer import Trainer as LightningTrainer
from trainer.migration.table import SECOND_FIT

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


def _of_checkpoint(name: str, value: Any) -> Changed:
    """Return what takes the place of an argument of ModelCheckpoint."""
    changed: Changed = None
    if name == "save_on_exception":
        changed = [("on_exception", None)]
    elif name == "every_n_train_steps":
        changed = [("every", None)] if value else []
    elif name == "every_n_epochs" and (
        value in (None, 1) or (isinstance(value, int) and value > 0)
    ):
        changed = [("every", f'"{value} epochs"')] if value not in (None, 1) else []
    elif name == "save_last" and value in (True, None, "link"):
        changed = []
    return changed


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


class _StayingTrainers(cst.CSTVisitor):
    """Collects why Lightning's Trainer keeps its name: one that has no translation keeps all.

    Attributes:
        left: What has none, each with what to do.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[cst.CSTNode, str]] = []

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: ARG002 - as libcst calls it
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: ARG002 - as above
        return False

    def visit_Annotation(self, node: cst.Annotation) -> bool:  # noqa: ARG002 - as above
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        if not self._is_trainer(node.func):
            return dotted(node.func) != "isinstance"
        self.left += translated(self, node).left
        for arg in node.args:
            arg.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        if self._is_trainer(node):
            self.left.append((node, "only calls of it are rewritten"))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if self._is_trainer(node):
            self.left.append((node, "only calls of it are rewritten"))

    def _is_trainer(self, node: cst.CSTNode) -> bool:
        path = path_of(self, node)
        return path is not None and native_name(path) == "trainer.Trainer"


class _Names(cst.CSTTransformer):
    """Writes our own names in place of those of another library.

    Attributes:
        needed: For each name that an import binds: our names that are used through it.
        consumed: The names whose last uses may be gone.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, taken: set[str], *, trainer: bool) -> None:
        super().__init__()
        self.needed: dict[str, set[str]] = defaultdict(set)
        self.consumed: set[str] = set()
        self._taken = taken  # names of the program's own
        self._trainer = trainer  # whether the Trainer is renamed
        self._statements: set[cst.CSTNode] = set()  # calls whose value nobody uses

    def native(self, path: str | None) -> str | None:
        """Return our own name for a path, unless the program has another thing of that name."""
        native = None if path is None else native_name(path)
        if native is None or native.rpartition(".")[2] in self._taken:
            return None
        # Ours has no `filename`: with Lightning's Trainer, Lightning's ModelCheckpoint stays.
        stays = native in ("trainer.Trainer", "callbacks.ModelCheckpoint") and not self._trainer
        return None if stays else native

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
        self.needed[original_node.value].add(native)
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
            if of.endswith("trainer.callback_metrics") and self._trainer:  # floats
                return value.value if isinstance(value, cst.Attribute) else updated_node
        if not isinstance(func, (cst.Name, cst.Attribute)) or self._renamed(func) is None:
            return updated_node
        path = path_of(self, func) or ""
        native = (native_name(path) or "").rpartition(".")[2]
        if package_of(path) == "accelerate":
            return updated_node  # the very same object
        if native == "Trainer":
            return self._of_trainer(original_node, updated_node)
        if native == "set_seed":
            return _seeded(updated_node)
        if (made := getattr(callbacks, native, None)) is not None and native in _DROPPED:
            takes = [*signature(value_of(moved(path))).parameters]
            return _edited(updated_node, _of_callback(made, updated_node.args, takes))
        return updated_node

    def _of_trainer(self, original: cst.Call, call: cst.Call) -> cst.Call:
        made = translated(self, original)
        changed = _edited(call, made.changes)
        root = dotted(original.func).partition(".")[0]
        for arg in original.args:
            if isinstance(arg.value, cst.Call):  # a logger
                self.consumed.add(dotted(arg.value.func).partition(".")[0])
        added = [(name, cst.parse_expression(text)) for name, text in made.added]
        if made.summary:
            self.needed[root].add("callbacks.ModelSummary")
            args = [*changed.args]
            of_callbacks = [
                each.keyword is not None and each.keyword.value == "callbacks" for each in args
            ]
            if any(of_callbacks):
                at = of_callbacks.index(True)
                args[at] = args[at].with_changes(value=_with_summary(args[at].value))
                changed = changed.with_changes(args=args)
            else:
                added.append(("callbacks", cst.parse_expression("[ModelSummary()]")))
        return _with_arguments(changed, added)


def _with_summary(value: cst.BaseExpression) -> cst.BaseExpression:
    """Return a list of callbacks with a ModelSummary first, which keeps comments in their place."""
    call = cst.parse_expression("ModelSummary()")
    assert isinstance(value, cst.List)
    comma = _comma(value.lbracket.whitespace_after, value.elements)
    return value.with_changes(elements=[cst.Element(call, comma), *value.elements])


def _with_arguments(call: cst.Call, added: Sequence[tuple[str, cst.BaseExpression]]) -> cst.Call:
    """Return a call with further arguments, which come first."""
    args = [*call.args]
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    for name, value in reversed(added):
        comma = _comma(call.whitespace_before_args, args)
        args.insert(0, cst.Arg(value, cst.Name(name), equal, comma))
    return call.with_changes(args=args)


def _comma(space: cst.BaseParenthesizableWhitespace, following: Sequence[cst.CSTNode]) -> Any:
    """Return the comma of a new first element: what follows is on a line of its own, if it was."""
    if not following:
        return cst.MaybeSentinel.DEFAULT
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    line = space.first_line.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    return cst.Comma(whitespace_after=space.with_changes(first_line=line, empty_lines=[]))


def _seeded(call: cst.Call) -> cst.Call:
    names = named(call.args, ("seed",))
    dropped: list[Changed] = [[] if name in _DROPPED["set_seed"] else None for name in names]
    if "seed" in names:
        return _edited(call, dropped)
    return call.with_changes(args=[cst.Arg(cst.Integer("0"))])


def _of_callback(made: type, args: Sequence[cst.Arg], takes: Sequence[str]) -> list[Changed]:
    """Return what takes the place of the arguments of a callback."""
    native = signature(made).parameters
    changes: list[Changed] = []
    for arg, name in zip(args, named(args, takes), strict=True):
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
            native, stays = self._own(statement, alias)
            if stays:
                kept.append(alias)
            found: dict[str, cst.AsName | None] = dict.fromkeys(
                sorted(self._names.needed.get(_bound(alias), ()))
            )
            if native is not None:
                found[native] = alias.asname
            for each, asname in found.items():
                place, _, name = each.rpartition(".")
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
    ) -> tuple[str | None, bool]:
        """Return our own name that is imported instead, and whether the old import stays."""
        assert self._names is not None
        bound = _bound(alias)
        if isinstance(statement, cst.Import):
            return None, bound in self._used or not self._names.needed.get(bound)
        if statement.relative or not package_of(dotted(statement.module)):
            return None, True
        native = self._names.native(f"{dotted(statement.module)}.{dotted(alias.name)}")
        if native is not None and not (bound in self._used and _keeps_name(alias, native)):
            return native, False
        return None, bound in self._used or bound not in self._names.consumed

    def _moved(self, statement: cst.BaseSmallStatement) -> cst.BaseSmallStatement:
        """Return an import with the new place of its names."""
        if isinstance(statement, cst.ImportFrom) and not statement.relative:
            new = moved(dotted(statement.module))
            return statement.with_changes(module=_name(new)) if is_module(new) else statement
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
        return alias.with_changes(name=_name(new)) if is_module(new) else alias
    if "." in package:
        return alias  # its uses would have to change too
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
    program = MetadataWrapper(module)
    names = _Names(before.defined, trainer=not staying_trainers(program))
    changed = program.visit(names)
    after = _Used()
    changed.visit(after)
    return changed.visit(_Imports(names, after.used))


def staying_trainers(program: MetadataWrapper) -> list[tuple[cst.CSTNode, str]]:
    """Return what keeps Lightning's Trainer in a program, each with what to do."""
    stays = _StayingTrainers()
    program.visit(stays)
    return stays.left + second_fits(program, LightningTrainer)


class _SecondFits(cst.CSTVisitor):
    """Collects the calls of ``fit`` that follow another one of the same Trainer.

    Args:
        kind: The class of the Trainers.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ParentNodeProvider)

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, str]] = []
        self._kind = kind
        self._made: dict[str, set[cst.CSTNode]] = {}  # a Trainer's name: the loops around it
        self._fitted: set[tuple[str, cst.CSTNode]] = set()  # its name and a block that fits it

    def visit_Assign(self, node: cst.Assign) -> None:
        if not isinstance(node.value, cst.Call):
            return
        if class_of(path_of(self, node.value.func)) is self._kind:
            for name in (dotted(each.target) for each in node.targets):
                self._made[name] = self._around(node)[1]
                self._fitted = {each for each in self._fitted if each[0] != name}

    def visit_Call(self, node: cst.Call) -> None:
        owner, _, method = dotted(node.func).rpartition(".")
        if method != "fit" or owner not in self._made:
            return
        block, loops = self._around(node)
        if (owner, block) in self._fitted or loops - self._made[owner]:
            self.found.append((node, f"{owner}.fit is called a second time: {SECOND_FIT}"))
        self._fitted.add((owner, block))

    def _around(self, node: cst.CSTNode) -> tuple[cst.CSTNode, set[cst.CSTNode]]:
        """Return the block that a node is in, and the loops around it."""
        blocks: list[cst.CSTNode] = []
        loops: set[cst.CSTNode] = set()
        while not isinstance(node, cst.Module):
            node = self.get_metadata(ParentNodeProvider, node)
            if isinstance(node, (cst.BaseSuite, cst.Module)):
                blocks.append(node)
            elif isinstance(node, (cst.For, cst.While)):
                loops.add(node)
        return blocks[0], loops


def second_fits(program: MetadataWrapper, kind: type) -> list[tuple[cst.CSTNode, str]]:
    """Return the calls of ``fit`` that follow another one, each with what to do."""
    fits = _SecondFits(kind)
    program.visit(fits)
    return fits.found
