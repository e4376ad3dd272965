"""What `on_save_checkpoint` and `on_load_checkpoint` are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.migration.table import CHECKPOINT_ENTRIES


class HookArgument(dict[str, Any]):
    """A dict that says what to do instead where a hook reads an entry that only Lightning has."""

    def __missing__(self, key: str) -> Any:
        if key not in CHECKPOINT_ENTRIES:
            raise KeyError(key)
        raise KeyError(f"This checkpoint has no {key!r} for hooks: {CHECKPOINT_ENTRIES[key]}.")


def call_on_load_checkpoint(
    module: Any, extra: Mapping[str, Any], weights: dict[str, Any]
) -> tuple[HookArgument, dict[str, Any]]:
    """Call a module's `on_load_checkpoint`; return what it was given, and the weights to load.

    Args:
        module: The module. It may change the weights if its `_hooks_have_weights`.
        extra: What the ``on_save_checkpoint`` hooks have added.
        weights: The weights that will be loaded.
    """
    checkpoint = HookArgument(extra)
    if module._hooks_have_weights:
        checkpoint["state_dict"] = dict(weights)
    module.on_load_checkpoint(checkpoint)
    return checkpoint, checkpoint.get("state_dict", {}) if module._hooks_have_weights else weights


def apply_edits(
    edited: Mapping[str, Any], before: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the changes of a hook to other weights of the same names.

    Args:
        edited: Weights after the hook.
        before: The same before it.
        others: What is left out or renamed there is so here; what is new there is taken. A copy
            under its name counts as the same weight.
    """
    names = {id(value): name for name, value in before.items()}
    return {name: others.get(names.get(id(value), name), value) for name, value in edited.items()}
