"""The user's names of a module's parts, without the prefixes that torch wrappers add.

A wrapper may sit anywhere: ``self.net = torch.compile(net)`` makes ``net.weight`` known to torch as
``net._orig_mod.weight``, and `DistributedDataParallel` as ``net.module.weight``.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

EXTRA_STATE = "_extra_state"  # last part of the key of a `get_extra_state` result
COMPILED = "_orig_mod"  # the child under which torch.compile(module) holds the module
WRAPPED_AS = (COMPILED, "module")  # all names of such children; the latter may be a user's too

T = TypeVar("T")


def is_compile_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a result of ``torch.compile(module)``."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")  # imported once anything is compiled
    return loaded is not None and isinstance(module, loaded.OptimizedModule)


def wrapped_child(module: nn.Module) -> str | None:
    """Return the name under which a wrapper holds the user's module; None for other modules."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    own: str | None = getattr(type(module), "wrapped_child", None)  # an engine's wrapper
    if own is not None:
        return own
    return COMPILED if is_compile_wrapper(module) else None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module from inside all wrappers."""
    while child := wrapped_child(module):
        module = getattr(module, child)
    return module


def bare_names(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Rename items named by torch, by their place in a module, to the user's own names.

    Args:
        module: The user's module, which may contain wrappers or be one.
        named: Names and values, for example of ``module.named_parameters()``, ``named_modules()``
            (where a wrapper and what it wraps get the same name) or ``state_dict().items()``.

    Yields:
        The names and values.
    """
    modules = module.named_modules(remove_duplicate=False)
    children = ((path, wrapped_child(part)) for path, part in modules)
    added = {f"{path}.{child}".removeprefix(".") for path, child in children if child}
    for name, value in named:
        parts = name.split(".") if added else []
        paths = accumulate(parts, "{}.{}".format)
        kept = [part for part, path in zip(parts, paths, strict=True) if path not in added]
        yield ".".join(kept) if added else name, value


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module, ours or accelerate's, in order; see `add_hook_to_module`."""

    def single(hook: Any) -> list[Any]:
        inside = getattr(hook, "hooks", None)  # accelerate's hook sequences can be nested
        return [hook] if inside is None else [each for part in inside for each in single(part)]

    hook = vars(module).get("_hf_hook")
    return [] if hook is None else single(hook)


def with_offloaded(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Replace entries on the meta device by the values that offloading hooks keep elsewhere.

    Args:
        module: A module of which parts may be offloaded, for example by ``from_pretrained``.
        state: Its ``state_dict()``; changed in place.

    Returns:
        `state`.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for hook in hooks_of(part):
            values: Any = getattr(hook, "weights_map", None)
            for name in part.state_dict(keep_vars=True) if values is not None else ():
                key = f"{path}.{name}".removeprefix(".")
                if getattr(state.get(key), "is_meta", False) and name in values:
                    state[key] = values[name]
    return state


def bare_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` under the user's own names."""
    state = with_offloaded(module, module.state_dict())
    bare = OrderedDict(bare_names(module, state.items()))
    # Keep the metadata for `load_state_dict`: the version of each part's format.
    versions = getattr(state, "_metadata", {})
    vars(bare)["_metadata"] = OrderedDict(bare_names(module, versions.items()))
    return bare
