"""The places of accelerate's modules and names in Cadence, or the reason why one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trainer.migration.table import ACCELERATE_MODULES, ACCELERATE_NAMES

VERSION = "1.15.0"
"""The release of accelerate whose names these are."""

PLACES: dict[str, tuple[str, ...]] = {
    "": (),
    "accelerator": ("trainer.accelerator",),
    "big_modeling": ("trainer.big_models",),
    "commands": (),
    "commands.config": ("trainer.launch.cluster",),
    "commands.config.config_args": ("trainer.launch.cluster",),
    "commands.config.default": (),
    "commands.launch": ("trainer.launch.plan",),
    "checkpointing": ("trainer.checkpoint.accelerator_state",),
    "data_loader": ("trainer.data.prepare", "trainer.data.shards"),
    "hooks": ("trainer.big_models",),
    "inference": (),
    "launchers": ("trainer.launch.notebook",),
    "local_sgd": ("trainer.local_sgd",),
    "logging": ("trainer.logging",),
    "memory_utils": ("trainer.memory",),
    "optimizer": ("trainer.optim.optimizer",),
    "parallelism_config": ("trainer.configuration.parallelism",),
    "scheduler": ("trainer.optim.scheduler",),
    "state": ("trainer.state",),
    "tracking": ("trainer.tracking", "trackers"),
    "utils": ("trainer.big_models",),
    "utils.ao": ("trainer.fp8",),
    "utils.bnb": ("trainer.big_models",),
    "utils.constants": (),
    "utils.dataclasses": (),
    "utils.deepspeed": (
        "trainer.configuration.deepspeed",
        "trainer.configuration.dummy_optimizers",
    ),
    "utils.environment": (),
    "utils.fsdp_utils": (),
    "utils.imports": (),
    "utils.megatron_lm": (
        "trainer.configuration.megatron",
        "trainer.configuration.dummy_optimizers",
    ),
    "utils.memory": ("trainer.memory",),
    "utils.modeling": ("trainer.big_models",),
    "utils.offload": ("trainer.big_models",),
    "utils.operations": (),
    "utils.other": (),
    "utils.random": (),
    "utils.rich": (),
    "utils.torch_xla": (),
    "utils.tqdm": (),
    "utils.transformer_engine": ("trainer.fp8",),
    "utils.versions": (),
}
"""Module of accelerate: the modules that are searched for its names, in this order."""
_ELSEWHERE = (
    *("trainer", "trainer.utils", "trainer.logging", "trainer.state"),
    *("trainer.optim.optimizer", "trainer.optim.scheduler"),
    "trainer.data.prepare",
)
"""They are searched last: scripts also import names from where accelerate imports them."""

FUNCTION = "utils.tqdm"
"""A module of which the package above it has the function of the same name."""
RENAMED = {
    "get_available_trackers": ("trackers", "available_trackers"),
    "register_tracker_class": ("trackers", "register_tracker"),
}
"""Name of accelerate: the module that has it, and its name there."""


def why_not(module: str, name: str = "") -> str | None:
    """Return why accelerate's `module`, or a name in it, is missing; None if present or unknown.

    Args:
        module: The module path without ``accelerate.``; empty for the package itself.
        name: A name in it.
    """
    if module in PLACES:
        if not name or find(module, name) is not None:
            return None
        path = f"{module}.{name}".strip(".")
        if reason := ACCELERATE_MODULES.get(path, ACCELERATE_NAMES.get(name)):
            return reason
    for refused, reason in ACCELERATE_MODULES.items():
        if f"{module}.".startswith(f"{refused}."):
            return reason
    return None


def find(module: str, name: str) -> tuple[str, str] | None:
    """Return our module and name for a name of accelerate; None if there is none.

    Args:
        module: A module of accelerate, one of `PLACES`.
        name: A name in it.
    """
    if f"{module}.{name}" in ACCELERATE_MODULES:  # refused, despite another object of this name
        return None
    if name in RENAMED:
        return RENAMED[name]
    for place in (*PLACES[module], *_ELSEWHERE):
        if hasattr(import_module(place), name):
            return place, name
    return None


def value_of(module: str, name: str) -> Any:
    """Return the object that `find` locates.

    Raises:
        ImportError: accelerate has the name; the message says why Cadence does not. It is not an
            ``AttributeError``, whose message ``from … import …`` would drop.
        AttributeError: Neither library has the name.
    """
    path = ".".join(filter(None, ("accelerate", module)))
    if name.startswith("__"):  # Python looks these up in any module
        raise AttributeError(f"module 'trainer.{path}' has no attribute {name!r}")
    if (inner := f"{module}.{name}".strip(".")) in PLACES and inner != FUNCTION:
        return import_module(f"trainer.{path}.{name}")
    if found := find(module, name):
        return getattr(import_module(found[0]), found[1])
    if reason := why_not(module, name):
        raise ImportError(f"{path}.{name} is not in Cadence: {reason}.")
    raise AttributeError(f"module 'trainer.{path}' has no attribute {name!r}")
