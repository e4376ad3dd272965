"""``torch.compile`` for prepared models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.configuration import DynamoBackend
from trainer.errors import choose
from trainer.plugins import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin | None) -> None:
    """Compile what calling the model runs, in place and once.

    The model keeps its class and the names of its parameters: what ``torch.compile(model)`` returns
    has others, which would end up in checkpoints. Copies and pickles are not compiled.

    Args:
        model: One that is compiled already, either way, is left as it is.
        plugin: None, or one without a backend, compiles nothing.

    Raises:
        ValueError: This torch does not have the backend.
    """
    if plugin is None or plugin.backend == DynamoBackend.NO or is_compiled(model):
        return
    arguments = torch_arguments(plugin)
    call: Callable[..., Any] = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # As `model.compile()` does, which skips torch's own code, though, and would compile nothing of
    # an nn.Sequential: what a function of ours calls is not skipped.
    model._compiled_call_impl = torch.compile(run, **arguments)


def torch_arguments(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """What ``torch.compile`` is called with.

    Raises:
        ValueError: This torch does not have the backend.
    """
    arguments = plugin.to_kwargs()
    dynamo = importlib.import_module("torch._dynamo")  # seconds, for those who compile
    known = dynamo.list_backends(exclude_tags=())
    if arguments["backend"] not in known:
        raise ValueError(choose("The dynamo backend", arguments["backend"], known))
    return arguments


def is_compiled(model: nn.Module) -> bool:
    """Calling the model runs compiled code: through ``model.compile()`` or ``torch.compile``."""
    return model._compiled_call_impl is not None or uncompiled(model) is not model


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside what ``torch.compile(model)`` returned; another one itself."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")  # who has compiled has imported it
    if loaded is not None and isinstance(model, loaded.OptimizedModule):
        inner: nn.Module = model._orig_mod
        return inner
    return model
