"""``torch.compile``: for prepared models, and for the steps of a module that the Trainer runs.

In the Trainer, the module's steps (``training_step``, …) are compiled.

The bound method is compiled, not the module, because the Trainer does not call ``forward``; the
names of the parameters stay the same. Batch sizes are dynamic from the start, so the compiled code
does not depend on earlier batches, and a resumed run has the same code as the original run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trainer.checks import choice_error
from trainer.configuration import TorchDynamoPlugin
from trainer.distributed.process_control import on_all
from trainer.enums import DynamoBackend
from trainer.errors import module_logger
from trainer.names import COMPILED, is_compile_wrapper
from trainer.tree import leaves


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin | None) -> None:
    """Compile a model's ``__call__`` in place.

    The model keeps its class and parameter names. ``torch.compile(model)`` would return a wrapper
    with other parameter names, which would get into checkpoints. Copies and pickles of the model
    are not compiled.

    Args:
        model: The model; nothing happens if it is compiled already.
        plugin: Arguments of ``torch.compile``. Nothing is compiled if it is None or has no backend.

    Raises:
        ValueError: This torch does not have the backend.
    """
    if plugin is None or plugin.backend == DynamoBackend.NO or is_compiled(model):
        return
    arguments = torch_arguments(plugin)
    if plugin.use_regional_compilation:
        compile_regions(model, **arguments)
    else:
        _compile_call(model, arguments)


def _compile_call(model: nn.Module, arguments: dict[str, Any]) -> None:
    call: Callable[..., Any] = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # Like `model.compile()`, but that compiles nothing of an nn.Sequential: dynamo skips frames of
    # torch's own code. It does not skip code that is called by a function outside torch.
    model._compiled_call_impl = torch.compile(run, **arguments)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a ``ModuleList`` of blocks of one class, as of a transformer."""
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block separately, and the remaining modules, in place.

    Blocks of one class share compiled code, so compiling takes only the time of one block. See
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.

    Args:
        module: The module, which keeps its class and the names of its weights.
        **compile_kwargs: Arguments of ``torch.compile``.

    Returns:
        The module.
    """
    _compile_each(_regions(module), compile_kwargs)
    return module


def _compile_each(blocks: Iterable[nn.Module], arguments: dict[str, Any]) -> list[nn.Module]:
    """Compile modules, sharing code between equal structures; return the newly compiled ones."""
    # The module is an argument: in a closure it would be a constant of its own code.
    call = torch.compile(_call, **arguments)
    new = [block for block in blocks if not is_compiled(block)]
    for block in new:
        block._compiled_call_impl = functools.partial(call, block)
    return new


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _regions(module: nn.Module) -> Iterator[nn.Module]:
    if is_repeated_blocks(module):
        yield from module.children()
    elif any(map(is_repeated_blocks, module.modules())):
        for child in module.children():
            yield from _regions(child)
    else:
        yield module


def compile_blocks(module: nn.Module, plugin: TorchDynamoPlugin) -> list[nn.Module]:
    """Compile the repeated blocks of a module, whose steps call them, in place.

    Returns:
        The blocks that were not compiled yet; `release_blocks` undoes it.

    Raises:
        ValueError: There are none, or see `torch_arguments`.
    """
    arguments, blocks = torch_arguments(plugin), list(_repeated_blocks(module))
    if not blocks:
        raise ValueError(
            "use_regional_compilation compiles the blocks of nn.ModuleLists, of one class each, "
            f"and {type(module).__name__} has none: leave it out to compile whole steps."
        )
    return _compile_each(blocks, arguments)


def release_blocks(blocks: list[nn.Module]) -> None:
    """Forget the compiled code of blocks, in the list and in the blocks."""
    while blocks:
        blocks.pop()._compiled_call_impl = None


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    if is_repeated_blocks(module):
        yield from module.children()
    else:
        for child in module.children():
            yield from _repeated_blocks(child)


def torch_arguments(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the arguments for ``torch.compile``.

    Args:
        plugin: The user's settings.

    Raises:
        ValueError: This torch does not have the backend, or inductor does not have an option.
    """
    arguments = plugin.to_kwargs()
    dynamo = importlib.import_module("torch._dynamo")  # takes seconds, so only if needed
    backends = dynamo.list_backends(exclude_tags=())
    if arguments["backend"] not in backends:
        raise ValueError(choice_error("The dynamo backend", arguments["backend"], backends))
    if plugin.backend == DynamoBackend.INDUCTOR and plugin.options:
        _check_options(plugin.options, arguments)
    return arguments


def _check_options(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    valid = importlib.import_module("torch._inductor").list_options()
    for name in options:
        if str(name).replace("-", "_") not in valid:  # too many to list
            near = get_close_matches(str(name), valid, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"TorchDynamoPlugin has options={options!r}, but inductor has no {name!r}.{hint} "
                "torch._inductor.list_options() returns its options."
            )
    try:
        torch.compile(lambda: None, **arguments)  # compiles nothing before it is called
    except RuntimeError as error:
        raise ValueError(f"TorchDynamoPlugin has options={options!r}. {error}.") from error


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled: by ``model.compile()`` or ``torch.compile(model)``."""
    return model._compiled_call_impl is not None or uncompiled(model) is not model


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside a ``torch.compile(model)`` wrapper, or the model without one."""
    return model.get_submodule(COMPILED) if is_compile_wrapper(model) else model


logger = module_logger(__name__)

# Methods of the module that call the Trainer. They are excluded from compilation; otherwise torch
# would trace into the Trainer.
_OUTSIDE = ("all_gather", "log", "log_dict", "lr_schedulers", "optimizers", "print")
_GRAPH_MODES = ("max-autotune", "reduce-overhead")

# For each module class, the steps of which torch has compiled a part. A later run in this process
# may reuse that code from torch's cache, and then compiles nothing.
_proven: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


@contextmanager
def compiled_steps(
    module: nn.Module,
    names: Iterable[str],
    plugin: TorchDynamoPlugin,
    device: torch.device,
) -> Iterator[None]:
    """Compile the named steps of a module for the duration of the block; a collective call.

    Steps that the user has compiled are not compiled again. Every call of ``training_step`` logs
    ``recompilations``, the number of recompilations of all steps so far.

    Args:
        module: The user's module.
        names: The names of the steps, such as ``"training_step"``.
        plugin: Arguments of ``torch.compile``; without a backend nothing is compiled.
        device: The device on which the steps run.

    Raises:
        ValueError: The module uses manual optimisation in a step to be compiled, this torch does
            not have the backend, or the mode cannot be used here.
        RuntimeError: A process lacks the compiler that the backend needs. Or, raised by the first
            ``training_step``, no part of the step could be compiled.
    """
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        yield
        return

    def check() -> dict[str, Any]:
        arguments = torch_arguments(plugin)
        _refuse(module, names, plugin, device)
        return arguments

    arguments = on_all(check, "compiling the steps")
    steps = {name: step for name in names if not _has_own(step := getattr(module, name))}
    tally = _CompileCounts()
    ours: dict[str, Any] = {
        name: _CompiledStep(module, name, step, arguments, tally) for name, step in steps.items()
    }
    for name in _OUTSIDE:
        reason = f"self.{name} works outside the compiled code"
        ours[name] = torch.compiler.disable(getattr(module, name), reason=reason)
    before = {name: module.__dict__[name] for name in ours if name in module.__dict__}
    with ExitStack() as settings:
        for patch in _settings(steps.values()):
            settings.enter_context(patch)
        # `_compiled_for_run` tells the module which attributes its copies and pickles must leave
        # out.
        module.__dict__.update(ours, _compiled_for_run=(tuple(ours), before))
        try:
            yield
        finally:
            for name in (*ours, "_compiled_for_run"):
                module.__dict__.pop(name, None)
            module.__dict__.update(before)


def _refuse(
    module: nn.Module, names: Iterable[str], plugin: TorchDynamoPlugin, device: torch.device
) -> None:
    """Raise for settings that would fail later, or give wrong results silently."""
    backend = str(plugin.backend).lower()
    if "training_step" in names and not module.automatic_optimization:
        raise ValueError(
            f"dynamo_backend is {backend!r}, but in manual optimisation training_step runs "
            "backward and steps the optimizers itself, so it cannot be compiled as a whole. "
            "Leave dynamo_backend out and compile parts of the module in configure_model: "
            "self.net.compile()."
        )
    options = plugin.options or {}
    graphs = plugin.mode in _GRAPH_MODES or options.get("triton.cudagraphs")
    if device.type == "cuda" and (graphs or plugin.backend == DynamoBackend.CUDAGRAPHS):
        raise ValueError(
            f"TorchDynamoPlugin(backend={backend!r}, mode={plugin.mode!r}, options="
            f"{plugin.options!r}) replays CUDA graphs, whose outputs the next step overwrites, "
            "but the loss and logged values must outlive the step. Use mode='default' or "
            "'max-autotune-no-cudagraphs'."
        )
    if plugin.backend == DynamoBackend.INDUCTOR and device.type == "cpu":
        _require_compiler()


def _require_compiler() -> None:
    builder = importlib.import_module("torch._inductor.cpp_builder")
    try:
        builder.get_cpp_compiler()
    except RuntimeError as error:
        raise RuntimeError(
            f"dynamo_backend='inductor' generates C++ for the CPU and found no compiler: {error}. "
            "Install one, such as g++, or name it in the environment variable CXX; "
            "dynamo_backend='aot_eager' needs none, but is no faster than not compiling."
        ) from error


def _has_own(step: Callable[..., Any]) -> bool:
    """Return whether the user has compiled this step with ``torch.compile``."""
    return hasattr(step, "_torchdynamo_orig_callable") and not hasattr(step, "_torchdynamo_disable")


def _settings(steps: Iterable[Callable[..., Any]]) -> list[Any]:
    """Return patches of torch's settings that make frequently changing integers dynamic.

    These are the batch index, the run's counters, and integers that are attributes of modules. By
    default, torch treats each one as a constant and recompiles for every new value.
    """
    config = importlib.import_module("torch.compiler.config")
    dynamo = importlib.import_module("torch._dynamo.config")
    numbers = [list(inspect.signature(step).parameters)[1:2] for step in steps]
    sources = [config.dynamic_sources] if config.dynamic_sources else []
    sources += [f"L['{name}']" for name in chain.from_iterable(numbers)]
    sources.append(r".*\._counters\.")
    return [
        config.patch(dynamic_sources=",".join(sources)),
        dynamo.patch(allow_unspec_int_on_nn_module=True),
    ]


@dataclass
class _CompileCounts:
    """Counters that all compiled steps of a run share.

    Attributes:
        recompilations: The number of recompilations after the first call of each step.
    """

    recompilations: int = 0


class _CompiledStep:
    """A compiled step that logs when and why torch recompiles it.

    Args:
        module: The user's module, which has a `log` method.
        name: The step's name.
        step: The user's bound method.
        arguments: Arguments of ``torch.compile``.
        tally: The counters that all steps of the run share.
    """

    __wrapped__: Callable[..., Any]  # set by `update_wrapper`

    def __init__(
        self,
        module: Any,
        name: str,
        step: Callable[..., Any],
        arguments: dict[str, Any],
        tally: _CompileCounts,
    ) -> None:
        functools.update_wrapper(self, step)
        self._module, self._name, self._tally = module, name, tally
        self._log = module.log  # taken now: it is wrapped in torch.compiler.disable later
        self._run = torch.compile(step, **arguments)
        self._marks = "dynamic" not in arguments
        self._called = False
        self._dynamo = importlib.import_module("torch._dynamo")
        self._records = importlib.import_module("torch._dynamo.utils")

    def __reduce__(self) -> tuple[Any, ...]:
        # In copies and pickles, the user's uncompiled step takes this object's place.
        return _itself, (self.__wrapped__,)

    def __call__(self, batch: Any, *where: int) -> Any:
        if self._marks:
            self._mark(batch)
        latest = self._records.get_compilation_metrics()[-1:]
        breaks = None if self._called else self._breaks()
        output = self._run(batch, *where)
        now = self._records.get_compilation_metrics()
        if now[-1:] != latest:
            made = now[now.index(latest[0]) + 1 :] if latest and latest[0] in now else now
            if breaks is None:
                for compilation in made:
                    self._tell(compilation)
            else:
                self._judge(made, breaks)
        self._called = True
        if self._name == "training_step":
            self._log("recompilations", self._tally.recompilations, reduce="max")
        return output

    def _mark(self, batch: Any) -> None:
        """Mark the batch size as dynamic from the start.

        Otherwise torch recompiles at the shorter last batch of an epoch, and then runs different
        code for full batches than before.
        """
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dim():
                self._dynamo.maybe_mark_dynamic(leaf, 0)

    def _breaks(self) -> Counter[str]:
        return Counter(self._records.counters["graph_break"])

    def _judge(self, made: list[Any], breaks_before: Counter[str]) -> None:
        """Check that torch has compiled a part of the step, in the first call or an earlier run.

        If not, ``training_step`` raises an error and other steps log a warning.

        Raises:
            RuntimeError: No part of ``training_step`` was compiled.
        """
        proven = _proven.setdefault(type(self._module), set())
        if any(compilation.graph_op_count for compilation in made):
            proven.add(self._name)
        if self._name in proven:
            return
        failures = {compilation.fail_reason for compilation in made if compilation.fail_reason}
        reasons = failures | set(self._breaks() - breaks_before)
        text = (
            f"dynamo_backend is set, but no part of {type(self._module).__name__}.{self._name} "
            "was compiled. Torch reports: "
            f"{' / '.join(map(_first_lines, sorted(reasons))) or 'nothing'}. Change the step so "
            "that torch can trace it (TORCH_LOGS=graph_breaks shows where it cannot), compile "
            "parts of the module in configure_model with self.net.compile(), or leave "
            "dynamo_backend out."
        )
        if self._name == "training_step":
            raise RuntimeError(text)
        logger.warning(text)

    def _tell(self, record: Any) -> None:
        """Count and log a recompilation after the first call."""
        if record.recompile_reason is None:
            return  # new code for a branch that was not taken before
        cause = " ".join(record.recompile_reason.partition("\n")[0].split())
        cause = cause.partition(" (user code shown")[0]
        if record.has_guarded_code:
            self._tally.recompilations += 1
            logger.warning(
                "Torch recompiled %s in %s (recompilation %d), because this guard failed: %s",
                record.co_name,
                self._name,
                self._tally.recompilations,
                cause,
            )
            return
        logger.error(
            "Torch has reached its recompilation limit in %s: for inputs that match no compiled "
            "code, that part now runs uncompiled, and slower. Last cause: %s. Keep shapes "
            "and numbers to a few values (pad batches; use tensors for numbers that change), "
            "pass dynamo_plugin=TorchDynamoPlugin(dynamic=True), or raise "
            "torch._dynamo.config.recompile_limit, which is %d.",
            self._name,
            cause,
            self._dynamo.config.recompile_limit,
        )


def _itself(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


def _first_lines(reason: str) -> str:
    return " ".join(reason.split("\n\n")[0].split())
