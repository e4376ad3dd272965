"""Find code that will not work unchanged, with libcst, which resolves imported names."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from callbacks import Callback
from trainer.cli.migrate import IMPORTS, Finding
from trainer.cli.migrate.names import (
    class_of,
    dotted,
    is_module,
    is_of_a_library,
    literal,
    moved,
    name_in,
    original,
    package_of,
    path_of,
    value_of,
)
from trainer.datamodule import DataModule
from trainer.hints import EVALUATION_ARGUMENTS, LOG_ARGUMENTS, NO_LOGGER, STEP_ARGUMENTS
from trainer.lightning.missing import refusal
from trainer.lightning.pytorch.loggers import Logger
from trainer.lightning.pytorch.trainer import Trainer as LightningTrainer
from trainer.metrics.log_arguments import log_arguments
from trainer.migration.refusals import ATTRIBUTES, argument_refusals, refused_hooks
from trainer.migration.table import (
    ACCELERATE_CALLS,
    AS_LIGHTNING,
    CHECKPOINT_CALLS,
    CHECKPOINT_ENTRIES,
    HUGGING_FACE_NAMES,
    LIGHTNING_CALLS,
    LOADED_ENTRIES,
    SECOND_FIT,
    TORCH_NAMES,
)
from trainer.migration.values import WRONG_VALUES
from trainer.module import TrainModule
from trainer.trainer import Trainer

_PAGE = "see docs/coming-from"
_LISTED = ("transformers",)  # its imports are not changed
_KINDS = (
    ("module", TrainModule),
    ("datamodule", DataModule),
    ("callback", Callback),
    ("logger", Logger),
)
_OF_TRANSFORMERS = {"TrainerCallback": "callback", "Trainer": "trainer"}
# For attributes that are true on one process only: the methods that all processes must call.
_ON_ONE = {
    "is_main_process": ACCELERATE_CALLS,
    "is_local_main_process": ACCELERATE_CALLS,
    "is_global_zero": LIGHTNING_CALLS,
}
_STEPS = ("training", "validation", "test", "predict")
_OF_MODULES = {"training_step", "train_dataloader"}  # which identify a class
_EVALUATIONS = ("validate", "test", "predict")
_OF_CHECKPOINTS = ("on_save_checkpoint", "on_load_checkpoint")
_CHECKPOINTS = ("best_model_path", "last_model_path")


def find(module: cst.Module, path: Path, *, imports: bool) -> list[Finding]:
    """Return the findings in a program, by line.

    Args:
        module: The program.
        path: Its file.
        imports: Whether import lines that `--write` would change are also findings.
    """
    finder = _Finder(path, imports)
    program = MetadataWrapper(module)
    program.visit(finder)
    places = program.resolve(PositionProvider)
    fits = _SecondFits()
    program.visit(fits)
    finder.findings += [
        Finding(places[node].start.line, message, message) for node, message in fits.found
    ]
    return sorted(set(finder.findings)) if finder.is_known else []


class _Base(NamedTuple):
    """The bases of a class of the program: its kind for `refused_hooks`, and our base classes."""

    kind: str
    classes: tuple[type, ...]


class _Scope(NamedTuple):
    """A class or function of the program.

    Attributes:
        kind: The kind of this class or of the enclosing one; None if it is not based on ours.
        trainers: The parameters that are Trainers.
        native: Whether the class is a TrainModule rather than Lightning's module.
        checkpoint: In a hook that receives the checkpoint's dict, the name of that argument.
    """

    kind: str | None
    trainers: frozenset[str]
    native: bool = False
    checkpoint: str | None = None


class _Finder(cst.CSTVisitor):
    """Collects findings.

    Attributes:
        findings: The findings so far.
        is_known: Whether the program imports anything of another library, or of ours.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider, ParentNodeProvider)

    def __init__(self, path: Path, imports: bool) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.is_known = False
        self._of_lightning = False  # whether it imports anything from Lightning
        self._path = path
        self._imports = imports
        self._classes: dict[str, _Base] = {}  # by qualified name
        self._trainers: set[str] = set()  # names of variables that hold a Trainer
        self._objects: dict[str, str] = {}  # class of a library's object, by variable
        self._paths: set[str] = set()  # variables with the path of a checkpoint
        self._loaded: set[str] = set()  # variables with a checkpoint's content
        self._scopes = [_Scope(None, frozenset())]  # the enclosing classes and functions
        self._native: set[str] = set()  # subset of `_trainers`: trainer.Trainer
        self._one: list[tuple[cst.CSTNode, str, Mapping[str, str]]] = []  # blocks of one process

    def _add(self, node: cst.CSTNode, text: str, cause: str | None = None) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.findings.append(Finding(line, text, cause or text))

    # -- imports -----------------------------------------------------------------------------------

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            path = dotted(alias.name)
            self._see_import(alias, path, path)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        path = dotted(node.module)
        if node.relative:
            return
        if isinstance(node.names, cst.ImportStar):
            if package_of(path):
                self.is_known = True
                self._add(node, f"from {path} import *: import names one by one, to be examined")
            return
        for number, alias in enumerate(node.names):
            new = "" if number else f"from {path}"
            self._see_import(alias, f"{path}.{dotted(alias.name)}", new)

    def _see_import(self, alias: cst.ImportAlias, path: str, line: str) -> None:
        top = path.partition(".")[0]
        if top in ("trainer", "callbacks"):
            self.is_known = True
        if not package_of(path) and top not in _LISTED:
            return
        self.is_known = True
        self._of_lightning |= package_of(path) not in (None, "accelerate")
        package, _, module = line.rpartition(" ")
        if self._imports and line and (new := moved(module)) != module and is_module(new):
            instead = f"{package} {new}".strip()
            self._add(alias, f"write {instead!r} for {line!r}, or pass --write", IMPORTS)
        self._check(alias, path)

    def _check(self, node: cst.CSTNode, path: str) -> None:
        """Add a finding for a module, or a name in one, that does not exist here."""
        owner, _, name = path.rpartition(".")
        if owner.partition(".")[0] == "transformers":
            if instead := HUGGING_FACE_NAMES.get(name):
                self._add(node, f"{path}: {instead} ({_PAGE}).")
            return
        try:
            value_of(moved(path))
        except (ImportError, AttributeError) as error:
            problem = str(error) if "not in Cadence" in str(error) else refusal(name_in(path))
            self._add(node, problem or f"{original(path)} is not in Cadence; {_PAGE}.")

    # -- names -------------------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> None:
        path = path_of(self, node)
        parent = self.get_metadata(ParentNodeProvider, node)
        if path is not None and package_of(path):
            if not (isinstance(parent, cst.Attribute) and parent.value is node):
                self._check(node, path)
            return
        owner, name = dotted(node.value), node.attr.value
        if owner == "self" and name in ("logger", "loggers") and self._scopes[-1].native:
            self._add(node, f"A module's {name} cannot be used: {NO_LOGGER}.")
        if self._is_trainer(owner):
            owner_class = Trainer if owner in self._native else LightningTrainer
            if name in ATTRIBUTES and not hasattr(owner_class, name):
                self._add(node, f"Trainer has no attribute {name!r}: {ATTRIBUTES[name]}.")

    def visit_Subscript(self, node: cst.Subscript) -> None:
        scope, index = self._scopes[-1], node.slice[0].slice
        key = literal(index.value) if isinstance(index, cst.Index) else None
        if not isinstance(key, str):
            return
        if scope.checkpoint is not None and dotted(node.value) == scope.checkpoint:
            if key in CHECKPOINT_ENTRIES and (scope.native or key != "state_dict"):
                message = f"{scope.checkpoint}[{key!r}] is not there: {CHECKPOINT_ENTRIES[key]}."
                self._add(node, message)
        elif key in LOADED_ENTRIES and self._is_loaded(node.value):
            self._add(
                node,
                f"{key!r} of what torch.load reads: a checkpoint of the Trainer is a folder, so "
                f"{LOADED_ENTRIES[key]}.",
            )

    def _is_loaded(self, node: cst.BaseExpression) -> bool:
        """Return whether a value is ``torch.load``'s result, except for other libraries' files."""
        if not self._of_lightning or not isinstance(node, cst.Call):
            return dotted(node) in self._loaded
        if path_of(self, node.func) != "torch.load" or not node.args:
            return False
        file = literal(node.args[0].value)
        of_others = isinstance(file, str) and not file.endswith(".ckpt")
        return not of_others and self._reads_file("torch.load", node) is None  # else listed

    def _is_trainer(self, owner: str) -> bool:
        if owner == "self.trainer":
            return self._scopes[-1].kind is not None
        return owner in self._trainers or owner in self._scopes[-1].trainers

    # -- classes -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        bases = [*filter(None, (self._base(part.value) for part in node.bases))]
        native = any(TrainModule in part.classes and not _of_lightning(part) for part in bases)
        self._scopes.append(_Scope(bases[0].kind if bases else None, frozenset(), native))
        for base in bases:
            for qualified in self.get_metadata(QualifiedNameProvider, node, set()):
                self._classes.setdefault(qualified.name, base)
            if native:
                self._native.add("self.trainer")
            refused = refused_hooks(base.kind, base.classes)
            for part in node.body.body:
                if not isinstance(part, cst.FunctionDef):
                    continue
                name = part.name.value
                if name in refused:
                    message = f"{name} is never called: {refused[name]}"
                    self._add(part.name, f"{node.name.value}.{message}", message)
                elif base.kind == "module":
                    self._see_parameters(node, part)
        methods = {part.name.value for part in node.body.body if isinstance(part, cst.FunctionDef)}
        if not bases and methods & _OF_MODULES:
            for base_class in node.bases:
                self._see_library(base_class.value, "module or data module")

    def _see_parameters(self, owner: cst.ClassDef, method: cst.FunctionDef) -> None:
        """Add findings for parameters of Lightning 1's steps and hooks."""
        name = method.name.value
        for parameter in method.params.params:
            argument = parameter.name.value
            if argument not in STEP_ARGUMENTS or not hasattr(TrainModule, name):
                continue
            if name.endswith("_step") and name.partition("_")[0] in _STEPS:
                message = (
                    f"{argument}, which no step receives in Cadence: {STEP_ARGUMENTS[argument]}."
                )
            else:
                takes = ", ".join(signature(getattr(TrainModule, name)).parameters)
                message = f"{argument}, which no hook receives in Cadence: def {name}({takes})."
            self._add(
                parameter, f"{owner.name.value}.{name} takes {message}", f"{name} takes {message}"
            )

    def _see_library(self, node: cst.BaseExpression, use: str) -> None:
        """Add a finding for a library's class that inherits from Lightning."""
        called = node.func if isinstance(node, cst.Call) else node
        path = path_of(self, called) or self._objects.get(dotted(node), "")
        is_class = any(part[:1].isupper() for part in path.split(".")[-2:])
        if is_class and is_of_a_library(path, self._path):
            problem = f"of a library: {AS_LIGHTNING}."
            self._add(node, f"{path} is a {use} {problem}", f"a {use} {problem}")

    def _base(self, node: cst.BaseExpression) -> _Base | None:
        for name in self.get_metadata(QualifiedNameProvider, node, set()):
            if name.source is QualifiedNameSource.LOCAL and name.name in self._classes:
                return self._classes[name.name]
        path = path_of(self, node) or ""
        if path.startswith("transformers."):
            kind = _OF_TRANSFORMERS.get(path.rpartition(".")[2].removeprefix("Seq2Seq"))
            return _Base(kind, ()) if kind else None
        cls = class_of(path)
        for kind, owner in _KINDS:
            if cls is not None and issubclass(cls, owner):
                return _Base(kind, cls.__mro__)
        return None

    # -- calls -------------------------------------------------------------------------------------

    def visit_Assign(self, node: cst.Assign) -> None:
        value = node.value
        for target in (assigned.target for assigned in node.targets):
            if isinstance(value, cst.Call):
                self._see_variable(target, value.func)
            for names, is_so in ((self._loaded, self._is_loaded), (self._paths, self._is_path)):
                (names.add if is_so(value) else names.discard)(dotted(target))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._see_variable(node.target, node.annotation.annotation)

    def _see_variable(self, target: cst.BaseExpression, of: cst.BaseExpression) -> None:
        path = path_of(self, of)
        if path is not None and not package_of(path):
            self._objects[dotted(target)] = path
        made = class_of(path)
        if made is not None and issubclass(made, Trainer):
            self._trainers.add(dotted(target))
            if not issubclass(made, LightningTrainer):
                self._native.add(dotted(target))

    def visit_Call(self, node: cst.Call) -> None:
        keywords = {
            argument.keyword.value: argument
            for argument in node.args
            if argument.keyword is not None
        }
        path = path_of(self, node.func) or ""
        made = class_of(path)
        if path.startswith("transformers.") and path.rpartition(".")[2] in HUGGING_FACE_NAMES:
            self._see_trainer(keywords, set())
        elif made is not None and issubclass(made, Trainer):
            parameters = {*signature(made).parameters} - {"others"}
            self._see_trainer(keywords, parameters | {*signature(Trainer).parameters})
            if issubclass(made, LightningTrainer):
                self._see_values(keywords)
            if "callbacks" in keywords:
                value = keywords["callbacks"].value
                listed = (
                    [e.value for e in value.elements] if isinstance(value, cst.List) else [value]
                )
                for argument in listed:
                    self._see_library(argument, "callback")
        elif made is not None:
            self._see_arguments(made, path, keywords)
        elif path in TORCH_NAMES:
            self._add(node, f"{path.rpartition('.')[2]}: {TORCH_NAMES[path]}.")
        elif (call := self._reads_file(path, node)) is not None:
            problem = f"is given a checkpoint, which is a folder: {CHECKPOINT_CALLS[call]}."
            self._add(node, f"{call} {problem}")
        elif isinstance(node.func, cst.Attribute):
            self._see_method(node, node.func, keywords)

    def _reads_file(self, path: str, node: cst.Call) -> str | None:
        """Return the table's name of a call that treats a checkpoint's path as a file."""
        names = (path, dotted(node.func), dotted(node.func).rpartition(".")[2])
        name = next((call for call in names if call in CHECKPOINT_CALLS), None)
        return name if node.args and self._is_path(node.args[0].value) else None

    def _is_path(self, node: cst.BaseExpression) -> bool:
        """Return whether a value is the path of a checkpoint."""
        return dotted(node) in self._paths or dotted(node).rpartition(".")[2] in _CHECKPOINTS

    def _see_trainer(self, keywords: dict[str, cst.Arg], parameters: set[str]) -> None:
        unknown = {
            n: literal(argument.value) for n, argument in keywords.items() if n not in parameters
        }
        names = {*signature(Trainer).parameters}
        for name, problem in argument_refusals(unknown, names).items():
            if problem != f"Trainer has no argument {name!r}." or parameters:
                self._add(keywords[name], problem)

    def _see_values(self, keywords: dict[str, cst.Arg]) -> None:
        """Add findings for values that `trainer.lightning`'s Trainer does not support."""
        values = {name: literal(argument.value) for name, argument in keywords.items()}
        for name, check in WRONG_VALUES.items():
            if values.get(name, ...) is not ... and (wrong := check(values)) is not None:
                self._add(keywords[name], wrong)
        if "plugins" in keywords and (value := values["plugins"]):
            refusals = argument_refusals({"plugins": value}, signature(Trainer).parameters)
            self._add(keywords["plugins"], refusals["plugins"])

    def _see_arguments(self, made: type, path: str, keywords: dict[str, cst.Arg]) -> None:
        """Add findings for arguments that a class of ours does not support."""
        try:
            takes = signature(made).parameters
        except ValueError:  # a built-in class, such as an exception
            return
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.values()):
            return
        for name in keywords.keys() - takes.keys():
            names = ", ".join(takes)
            message = f"{original(path)} has no argument {name!r}; it has {names}."
            self._add(keywords[name], message)

    def _see_method(
        self, node: cst.Call, func: cst.Attribute, keywords: dict[str, cst.Arg]
    ) -> None:
        owner, name = dotted(func.value), func.attr.value
        if owner == "self" and name in ("log", "log_dict"):
            for argument, each in keywords.items():
                value = literal(each.value)
                if argument in LOG_ARGUMENTS and value is not ...:
                    try:
                        log_arguments("...", {argument: value})
                    except ValueError as error:
                        self._add(each, str(error))
        for _, holder, methods in self._one[-1:]:
            of_run = owner in ("self", "pl_module") or self._is_trainer(owner)
            if name in methods and (owner == holder or (methods is LIGHTNING_CALLS and of_run)):
                message = f"{name} in a block of one process: {methods[name]}."
                self._add(node, f"{owner}.{message}", message)
        if self._is_trainer(owner) and name in ("fit", *_EVALUATIONS):
            for number, each in enumerate(node.args):
                argument = each.keyword.value if each.keyword is not None else ""
                if argument in ("model", "datamodule") or (not argument and number < 2):
                    self._see_library(each.value, "module or data module")
        if owner in self._native and name in _EVALUATIONS:
            self._see_evaluation(node, owner, name, keywords)

    def _see_evaluation(
        self, node: cst.Call, owner: str, name: str, keywords: dict[str, cst.Arg]
    ) -> None:
        if "model" not in keywords and "module" not in keywords and len(node.args) == len(keywords):
            self._add(node, f"{owner}.{name} needs the module: {owner}.{name}(module, ...).")
        for argument in keywords.keys() & EVALUATION_ARGUMENTS.keys():
            self._add(keywords[argument], f"Trainer.{name} has no argument {argument!r}.")

    # -- blocks of one process ---------------------------------------------------------------------

    def visit_If(self, node: cst.If) -> None:
        self._enter(node.body, node.test)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        kind, outer, native, checkpoint = self._scopes[-1]
        inner = set(outer)
        for parameter in (
            *node.params.posonly_params,
            *node.params.params,
            *node.params.kwonly_params,
        ):
            annotation = parameter.annotation and parameter.annotation.annotation
            made = class_of(path_of(self, annotation)) if annotation is not None else None
            if made is not None and issubclass(made, Trainer):
                inner.add(parameter.name.value)
            elif annotation is None and parameter.name.value == "trainer" and kind is not None:
                inner.add("trainer")  # in a callback's hook
            else:
                inner.discard(parameter.name.value)
        if kind in ("module", "callback") and node.name.value in _OF_CHECKPOINTS:
            checkpoint = node.params.params[-1].name.value if node.params.params else None
        self._scopes.append(_Scope(kind, frozenset(inner), native, checkpoint))
        for decorator in node.decorators:
            if (path_of(self, decorator.decorator) or "").endswith(".rank_zero_only"):
                self._one.append((node.body, "", LIGHTNING_CALLS))
            if dotted(decorator.decorator).endswith((".on_main_process", ".on_local_main_process")):
                holder = dotted(decorator.decorator).rpartition(".")[0]
                self._one.append((node.body, holder, ACCELERATE_CALLS))

    def _enter(self, block: cst.CSTNode, test: cst.BaseExpression) -> None:
        parts = [test]
        while parts:
            part = parts.pop()
            if isinstance(part, cst.BooleanOperation) and isinstance(part.operator, cst.And):
                parts += [part.left, part.right]
            elif isinstance(part, cst.Attribute) and part.attr.value in _ON_ONE:
                self._one.append((block, dotted(part.value), _ON_ONE[part.attr.value]))
                return

    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        if self._one and self._one[-1][0] is original_node:
            self._one.pop()
        if isinstance(original_node, (cst.ClassDef, cst.FunctionDef)):
            self._scopes.pop()


def _of_lightning(base: _Base) -> bool:
    return any(cls.__module__.startswith("trainer.lightning.") for cls in base.classes)


class _SecondFits(cst.CSTVisitor):
    """Collects the calls of ``fit`` after the first one of the same `trainer.Trainer`."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, str]] = []
        self._made: dict[str, set[cst.CSTNode]] = {}  # Trainer's name: enclosing loops
        self._fitted: set[tuple[str, cst.CSTNode]] = set()  # its name, and a block that calls fit

    def visit_Assign(self, node: cst.Assign) -> None:
        if not isinstance(node.value, cst.Call):
            return
        if class_of(path_of(self, node.value.func)) is Trainer:
            for name in (dotted(fitted.target) for fitted in node.targets):
                self._made[name] = self._around(node)[1]
                self._fitted = {fitted for fitted in self._fitted if fitted[0] != name}

    def visit_Call(self, node: cst.Call) -> None:
        owner, _, method = dotted(node.func).rpartition(".")
        if method != "fit" or owner not in self._made:
            return
        block, loops = self._around(node)
        if (owner, block) in self._fitted or loops - self._made[owner]:
            self.found.append((node, f"{owner}.fit is called a second time: {SECOND_FIT}."))
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
