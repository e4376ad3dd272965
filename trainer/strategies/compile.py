"""``torch.compile`` for models that `Accelerator.prepare` returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from trainer.choices import DynamoBackend
from trainer.errors import choose
from trainer.names import COMPILED, is_compile_wrapper
from trainer.plugins import TorchDynamoPlugin


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
    call: Callable[..., Any] = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # Like `model.compile()`, but that compiles nothing of an nn.Sequential: dynamo skips frames of
    # torch's own code. It does not skip code that is called by a function outside torch.
    model._compiled_call_impl = torch.compile(run, **arguments)


def torch_arguments(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the arguments for ``torch.compile``.

    Args:
        plugin: The user's settings.

    Raises:
        ValueError: This torch does not have the backend, or inductor does not have an option.
    """
    arguments = plugin.to_kwargs()
    dynamo = importlib.import_module("torch._dynamo")  # takes seconds, so only if needed
    known = dynamo.list_backends(exclude_tags=())
    if arguments["backend"] not in known:
        raise ValueError(choose("The dynamo backend", arguments["backend"], known))
    if plugin.backend == DynamoBackend.INDUCTOR and plugin.options:
        _check_options(plugin.options, arguments)
    return arguments


def _check_options(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    known = importlib.import_module("torch._inductor").list_options()
    for name in options:
        if str(name).replace("-", "_") not in known:  # too many to list
            near = get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"TorchDynamoPlugin has options={options!r}, but inductor has no {name!r}.{hint} "
                "torch._inductor.list_options() returns those that it has."
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
