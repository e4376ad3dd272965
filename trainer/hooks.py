"""The hook table: which hooks the module and the callbacks override, resolved once per run.

A hook that nobody overrides costs one call of a no-op function. Each hook has a fixed order: in
hooks before an event the callbacks run first; in hooks after an event the module runs first, so
that callbacks see what the module logged.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from callbacks import Callback
from trainer.errors import module_logger
from trainer.hints import CALLBACK_HOOKS, HOOKS, MODULE_HOOKS, STEP_ARGUMENTS

Hook = Callable[..., None]
logger = module_logger(__name__)

# Called by `trainer.loops.fit_state`, with a dict that the hooks change.
_OF_CHECKPOINTS = ("on_save_checkpoint", "on_load_checkpoint")
# Parts of an update that a module may override; see `trainer.module.TrainModule`.
PARTS_OF_UPDATE = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing; used for a hook that is not overridden."""


def _one_after_another(calls: Sequence[Hook]) -> Hook:
    """Return a function that calls the hooks in order with the same arguments."""
    if not calls:
        return _nothing
    if len(calls) == 1:
        return calls[0]

    def call_all(*args: Any) -> None:
        for call in calls:
            call(*args)

    return call_all


def _any_returned_minus_one(calls: Sequence[Hook]) -> Callable[..., Any]:
    """Return a function that calls all hooks, and returns whether any of them returned -1."""
    if not calls:
        return _nothing

    def call_all(*args: Any) -> bool:
        answers: list[Any] = [call(*args) for call in calls]
        return any(isinstance(answer, int) and answer == -1 for answer in answers)

    return call_all


class Boundary:
    """Calls ``on_boundary`` of the callbacks, and tracks which of them have not run yet.

    A checkpoint saved by one callback holds only the decisions of the callbacks before it. A run
    that resumes from the checkpoint therefore first calls the remaining callbacks.

    Args:
        hooks: The ``on_boundary`` hooks, each with the `Callback.state_key` of its callback.
    """

    def __init__(self, hooks: Sequence[tuple[str, Hook]]) -> None:
        self._hooks = hooks
        self._all = list(range(len(hooks)))
        self._due: list[int] = []

    def __call__(self) -> None:
        """Call the hooks that remain after a resume; if there are none, all hooks."""
        due = self._due = self._due or self._all.copy()
        while due:
            self._hooks[due.pop(0)][1]()

    @property
    def remaining_callbacks(self) -> list[str]:
        """The state keys of callbacks that have not run yet at this boundary."""
        return [self._hooks[number][0] for number in self._due]

    def state_dict(self) -> list[str]:
        """Return `remaining_callbacks`."""
        return self.remaining_callbacks

    def load_state_dict(self, keys: Sequence[str]) -> None:
        """Mark the callbacks with these state keys as not yet called."""
        missing, due = Counter(keys), []
        for number in reversed(self._all):  # of callbacks with the same key, the last ones remain
            key = self._hooks[number][0]
            if missing[key]:
                missing[key] -= 1
                due.append(number)
        self._due = due[::-1]


def _all_before_an_error(calls: Sequence[Hook]) -> Hook:
    """Return a function that calls all hooks, then raises the first error.

    Hooks after a failed one may still save the run.
    """
    if len(calls) < 2:
        return _one_after_another(calls)

    def call_all(*args: Any) -> None:
        errors: list[Exception] = []
        for call in calls:
            try:
                call(*args)
            except Exception as error:  # noqa: BLE001 - raised below, or logged
                errors.append(error)
        for other in errors[1:]:
            logger.error("on_preemption of a further callback failed.", exc_info=other)
        if errors:
            raise errors[0]

    return call_all


def _each_whatever_others_raise(calls: Sequence[Hook]) -> Hook:
    """Return a function that calls all hooks and logs their errors.

    It is for ``on_exception``, where the error that ended the run must be raised.
    """

    def call_each(*args: Any) -> None:
        for call in calls:
            try:
                call(*args)
            except Exception:
                logger.exception(
                    "on_exception of a callback failed; the error it was called with follows."
                )

    return call_each


def is_overridden(owner: object, name: str, base: type) -> bool:
    """Return whether `owner` overrides the method `name` of `base`."""
    method = getattr(owner, name, None)
    while method is not None:  # an engine may have wrapped it
        method = getattr(method, "__func__", method)
        if not hasattr(method, "__wrapped__"):
            break
        method = method.__wrapped__
    return method is not None and method is not getattr(base, name)


def call_if_there(owner: Any, name: str, *args: Any) -> Any:
    """Call a method of an object if it exists; otherwise return None."""
    method = getattr(owner, name, None)
    return None if method is None else method(*args)


_BEGIN_EVALUATION = "on_validation_start", "on_test_start"


class HookTable:
    """The hooks of one run as attributes: call ``hooks.on_train_batch_start(batch, batch_idx)``.

    Epoch-end hooks have two attributes, such as ``on_train_epoch_end_module`` and
    ``on_train_epoch_end_callbacks``. The epoch's metrics are reduced between the two calls. Hooks
    that begin an evaluation have two as well, since a callback may swap the weights.

    ``on_train_batch_start`` returns whether any of its hooks returned -1, which ends the epoch.

    Attributes:
        callbacks: The callbacks, in the order of calls.
        boundary: Calls the ``on_boundary`` hooks.
        may_end_epoch: Whether the user overrides ``on_train_batch_start``, which may return -1.
        takes_outputs: Whether any hook takes the outputs of `training_step`.
        module_overrides: The parts of an update that the module overrides, by name:
            ``optimizer_step`` and so on.
        monitors_due: `Callback.monitor_due` of the callbacks that monitor a metric.

    Args:
        trainer: Passed to the callbacks.
        module: The user's module; its hooks are called, and it is passed to the callbacks.
        callbacks: The callbacks, in the order of calls.
        module_base: The base class of modules, whose own hooks do nothing.
    """

    def __init__(
        self,
        trainer: object,
        module: object,
        callbacks: Sequence[Callback],
        module_base: type,
    ) -> None:
        def of(owner: object, name: str, base: type) -> list[Hook]:
            if not is_overridden(owner, name, base):
                return []
            return [with_loader_number(getattr(owner, name))]

        def of_callbacks(name: str) -> list[Hook]:
            hooks = [hook for callback in callbacks for hook in of(callback, name, Callback)]
            return [partial(hook, trainer, module) for hook in hooks]

        table: dict[str, Hook] = {}
        for name in vars(Callback):
            if not name.startswith("on_") or name in _OF_CHECKPOINTS:
                continue
            of_module = of(module, name, module_base) if hasattr(module_base, name) else []
            of_all_callbacks = of_callbacks(name)
            if name.endswith("_epoch_end") or name in _BEGIN_EVALUATION:
                table[f"{name}_module"] = _one_after_another(of_module)
                table[f"{name}_callbacks"] = _one_after_another(of_all_callbacks)
            elif name == "on_train_batch_start":
                table[name] = _any_returned_minus_one(of_all_callbacks + of_module)
            elif name.endswith("_start") or name.startswith("on_before_"):
                table[name] = _one_after_another(of_all_callbacks + of_module)
            else:
                table[name] = _one_after_another(of_module + of_all_callbacks)
        self.may_end_epoch = any(
            is_overridden(owner, "on_train_batch_start", base)
            for base, owners in ((Callback, callbacks), (module_base, [module]))
            for owner in cast("list[Any]", owners)
            if hasattr(base, "on_train_batch_start")
            # Our callbacks never return -1, except for `LambdaCallback`, which calls the user's
            # function.
            and not owner.on_train_batch_start.__module__.startswith("callbacks.")
        )
        self.module_overrides: dict[str, Callable[..., Any]] = {
            name: getattr(module, name)
            for name in PARTS_OF_UPDATE
            if hasattr(module_base, name) and is_overridden(module, name, module_base)
        }
        self.boundary = Boundary(
            [
                (callback.state_key, partial(hook, trainer, module))
                for callback in callbacks
                for hook in of(callback, "on_boundary", Callback)
            ]
        )
        self.monitors_due: list[Callable[[], Any]] = [
            partial(hook, trainer)
            for callback in callbacks
            if getattr(callback, "monitor", None) is not None
            for hook in of(callback, "monitor_due", Callback)
        ]
        if table["on_boundary"] is not _nothing:
            table["on_boundary"] = self.boundary
        table["on_preemption"] = _all_before_an_error(of_callbacks("on_preemption"))
        table["on_exception"] = _each_whatever_others_raise(of_callbacks("on_exception"))
        self.takes_outputs = table["on_train_batch_end"] is not _nothing
        self._table, self.callbacks = table, callbacks
        self.__dict__.update(table)

    def attributes_of_callbacks(self) -> Iterator[object]:
        """Return the attributes of all callbacks, such as metric objects."""
        return (value for callback in self.callbacks for value in vars(callback).values())

    def overridden(self) -> Iterator[tuple[str, Hook]]:
        """Return the name and the function of each overridden hook."""
        return ((name, hook) for name, hook in self._table.items() if hook is not _nothing)

    def __getattr__(self, name: str) -> Hook:
        raise AttributeError(f"There is no hook {name!r}; hooks are {', '.join(self._table)}.")


_UNCALLED = {
    "module": HOOKS | MODULE_HOOKS,
    "callback": HOOKS | CALLBACK_HOOKS,
    "datamodule": HOOKS,
}


def uncalled_hooks(
    owner: object,
    kind: str,
    hooks: Mapping[str, Mapping[str, str]] = _UNCALLED,
    advice: str = "(If your own code calls it, give it another name.)",
) -> list[str]:
    """Return a sentence for each hook of another trainer that the owner defines.

    Args:
        owner: The user's module, callback or datamodule.
        kind: ``"module"``, ``"callback"`` or ``"datamodule"``.
        hooks: For each kind, the hooks that are never called, with their replacements.
        advice: Ends each sentence.
    """
    # Not the owner itself: a layer may have such a name, but is not a method.
    classes = [cls for cls in type(owner).__mro__ if not cls.__module__.startswith("trainer.")]
    return [
        f"{type(owner).__name__} defines {name}, which is never called here: {use}. {advice}"
        for name, use in sorted(hooks[kind].items())
        if any(name in vars(cls) and callable(getattr(cls, name)) for cls in classes)
    ]


_HOOK = re.compile(r"on_.*|.*_step|.*_dataloader|configure_.*|prepare_data|setup|teardown")
_LOADERS = [f"{phase}_dataloader" for phase in ("train", "val", "test", "predict")]
_OTHER_WORDS = {
    r"_begin$": "_start",
    r"(?<![a-z])val_(?!dataloader)": "validation_",
    r"^train_step$": "training_step",
}
_ALIKE = 0.9  # difflib's ratio for names that differ by a letter or two


def hook_typos(owner: object, base: type) -> dict[str, str]:
    """Return the methods named almost like a hook that the user does not define.

    A method in the same class as the hook is taken for a helper, and so is one whose name begins
    with an underscore. A method in a subclass of the class that defines the hook is taken for a
    typo, unless that class has the method too.

    Args:
        owner: The user's module, callback or datamodule.
        base: The class whose hooks it may override.

    Returns:
        The name of each such method, with the name of the hook.
    """
    classes = [cls for cls in type(owner).__mro__ if cls not in base.__mro__]
    members = [getattr(owner, "__dict__", {}), *map(vars, classes)]
    methods = [
        {name for name, value in each.items() if name[0] != "_" and inspect.isroutine(value)}
        for each in members
    ]
    defined = set[str]().union(*methods)
    hooks = {*filter(_HOOK.fullmatch, dir(base)), *_LOADERS}
    typos: dict[str, str] = {}
    for name in sorted(defined.difference(dir(base), hooks)):
        spelt = name
        for others, ours in _OTHER_WORDS.items():
            spelt = re.sub(others, ours, spelt)
        beside = set[str]().union(*(each for each in methods if name in each))
        # A subclass may well implement a `val_step` that an inherited validation_step calls.
        searches = [(name, hooks - beside), (spelt, hooks - defined)]
        spellings = (difflib.get_close_matches(each, among, 1, _ALIKE) for each, among in searches)
        if near := next(filter(None, spellings), None):
            typos[name] = near[0]
    return typos


def hook_typo(owner: object, hook: str, base: type) -> str:
    """Return the end of an error about a missing method: a possible typo of its name, or ''."""
    typos = hook_typos(owner, base).items()
    return next((f" It defines {name}; did you mean {hook}?" for name, h in typos if h == hook), "")


def warn_of_hook_typos(owner: object, base: type, named: Collection[str] = ()) -> None:
    """Log a warning for each of the `hook_typos`.

    This is not an error: a method may have any name and be called by the user's own code.

    Args:
        owner: The user's module, callback or datamodule.
        base: The class whose hooks it may override.
        named: Hooks whose absence raises an error that already names the typo.
    """
    for name, hook in hook_typos(owner, base).items():
        if hook not in named:
            logger.warning(
                "%s defines %s, which is not a hook, so the Trainer never calls it; "
                "did you mean %s?",
                type(owner).__name__,
                name,
                hook,
            )


# -- signatures of hooks and steps: those that take fewer arguments are adapted ------------------


def check_signature(call: Callable[..., Any], name: str, like: Callable[..., Any]) -> None:
    """Raise an error, before anything runs, if a hook cannot be called with its arguments.

    Args:
        call: The user's method, bound.
        name: Its name.
        like: The hook of the base class, unbound, which defines the arguments. A hook may omit
            arguments with a default; a part of an update may not.

    Raises:
        TypeError: The hook takes other arguments.
    """
    expected = list(inspect.signature(like).parameters.values())[1:]
    takes = _signature(call)
    if takes is None or any(p.kind is p.VAR_POSITIONAL for p in expected):
        return
    try:
        every = name in PARTS_OF_UPDATE
        takes.bind(*[p.name for p in expected if every or p.default is p.empty])
    except TypeError as error:
        owner = type(getattr(call, "__self__", call)).__name__
        names = ", ".join(["self", *(p.name for p in expected)])
        raise TypeError(
            f"{owner}.{name}{takes} is called with other arguments ({error}). Write "
            f"def {name}({names})."
        ) from None


def check_state_dict_methods(module: nn.Module) -> None:
    """Raise if ``state_dict`` or ``load_state_dict`` cannot be called like torch's.

    Otherwise the error would appear when a checkpoint is loaded, perhaps after a crash.

    Raises:
        TypeError: A method takes other arguments.
    """
    for name, arguments in (("state_dict", ()), ("load_state_dict", ({},))):
        takes = _signature(getattr(module, name))
        option = {"keep_vars": True} if name == "state_dict" else {"strict": False}
        try:
            if takes is not None:
                takes.bind(*arguments, **option)
        except TypeError as error:
            raise TypeError(
                f"{type(module).__name__}.{name}{takes} cannot be called as torch's ({error}): "
                f"def {name}(self, *args, **kwargs), and pass them to super().{name}."
            ) from None


def with_loader_number(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a batch hook that requires a ``dataloader_idx``, to pass 0 with a single loader."""
    takes = _signature(call)
    number = None if takes is None else takes.parameters.get("dataloader_idx")
    if takes is None or number is None or number.default is not number.empty:
        return call
    return partial(_call_with_number, call, len(takes.parameters))


def _call_with_number(call: Callable[..., Any], takes: int, *args: Any) -> None:
    call(*args, *([0] if len(args) < takes else []))


def without_batch_idx(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return wrappers of the steps that do not take `batch_idx`, by name; the wrappers take it.

    Raises:
        TypeError: A step takes an argument that is no longer passed to any step.
    """
    adapted: dict[str, Callable[..., Any]] = {}
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        takes = _signature(step)
        if takes is None:
            continue
        for argument, hint in STEP_ARGUMENTS.items():
            if argument in takes.parameters:
                raise TypeError(
                    f"{type(module).__name__}.{name} takes {argument}, which no step receives in "
                    f"Cadence: {hint}."
                )
        kinds = [parameter.kind for parameter in takes.parameters.values()]
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


def check_step_signature(module: nn.Module, name: str, loaders: int) -> None:
    """Raise an error, before anything runs, if a step does not fit the number of loaders.

    Raises:
        TypeError: The step lacks ``dataloader_idx`` with several loaders, or requires it with one.
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
    except (TypeError, ValueError):  # a built-in without a signature
        return None
