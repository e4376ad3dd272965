"""State that hooks set on a module besides its weights: module flags and plain attributes.

Module flags are: which parameters are frozen and which submodules are in eval mode. A
``state_dict`` holds neither, and a resumed run may not repeat the update at which a hook set them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.errors import module_logger
from trainer.loops.state import Optimization
from trainer.module import TrainModule
from trainer.names import bare_names

logger = module_logger(__name__)


def frozen_and_eval_flags(module: nn.Module) -> dict[str, list[str]]:
    """Return the module flags: names of frozen parameters and of submodules in eval mode."""
    return {
        "frozen": [
            n
            for n, parameter in bare_names(module, module.named_parameters())
            if not parameter.requires_grad
        ],
        "evaluating": [
            n for n, part in bare_names(module, module.named_modules()) if not part.training
        ],
    }


def warn_of_dropout_off(module: nn.Module) -> None:
    """Warn of submodules that are trained in eval mode, so that their dropout is off.

    ``from_pretrained`` of transformers returns models in eval mode.
    """
    if not module.training:  # `fit` calls train() on the module, so a hook chose eval mode
        return
    parts = [
        name
        for name, part in bare_names(module, module.named_modules())
        if not part.training
        and any(
            parameter.requires_grad
            for each in part.modules()
            if not isinstance(each, _BatchNorm)  # trained alone in a frozen backbone
            for parameter in each.parameters(recurse=False)
        )
        and any(
            isinstance(each, _DropoutNd) and each.p and not each.training for each in part.modules()
        )
    ]
    outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
    if outermost:
        logger.warning(
            "%s is in evaluation mode, so its dropout is off during training (from_pretrained "
            "returns models in this mode). Call its train() before fit, or freeze its parameters.",
            ", ".join(outermost),
        )


class ModuleState:
    """State that hooks have set on a module besides its weights: flags and plain attributes.

    Args:
        module: The user's module.
        optim: Holds the accumulation, which ``on_train_epoch_start`` may set.
        warns: Whether to log differences from the checkpoint.
    """

    def __init__(self, module: TrainModule, optim: Optimization, *, warns: bool) -> None:
        self._module, self._optim, self._warns = module, optim, warns
        self._begun = frozen_and_eval_flags(module)
        self._ended: dict[str, list[str]] | None = None
        self._accumulation = optim.accumulation
        # Set by on_train_epoch_start, which a run resumed inside the epoch does not call again.
        self._of_epoch: dict[str, Any] | None = None

    def end(self) -> None:
        """End the fit: later changes to the module are not part of it."""
        self._ended = frozen_and_eval_flags(self._module)

    @property
    def ended(self) -> bool:
        """Whether the fit has reached its end."""
        return self._ended is not None

    def flags(self) -> dict[str, Any]:
        """Return the module flags at the start of the program and now."""
        return {"begun": self._begun, "now": self._ended or frozen_and_eval_flags(self._module)}

    def load_flags(self, state: Mapping[str, Any]) -> None:
        """Set the flags that the hooks of the saved program had set.

        If a flag list differs between the starts of the two programs, the script has changed, and
        its present flags are kept.
        """
        begun, before, now = self._begun, state["begun"], state["now"]
        if begun["frozen"] == before["frozen"]:
            frozen = set(now["frozen"])
            for name, parameter in bare_names(self._module, self._module.named_parameters()):
                parameter.requires_grad = name not in frozen  # an assignment: it may be lazy
        elif self._warns and (others := set(begun["frozen"]) ^ set(now["frozen"])):
            logger.warning(
                "The script freezes different parameters than when the checkpoint was saved; the "
                "script's choice is used: %s.",
                ", ".join(sorted(others)),
            )
        # At a save the root module is in training mode, unless user code has called eval() on it.
        if begun["evaluating"] == before["evaluating"] and "" not in now["evaluating"]:
            evaluating = set(now["evaluating"])
            for name, part in bare_names(self._module, self._module.named_modules()):
                part.training = name not in evaluating

    @contextmanager
    def epoch_starts(self) -> Iterator[None]:
        """Record the attributes that ``on_train_epoch_start`` sets inside the block."""
        before = plain_attributes(self._module)
        yield
        self._of_epoch = (self._of_epoch or {}) | changed_attributes(self._module, before)

    @property
    def lacks_epoch_start(self) -> bool:
        """Whether the checkpoint, of an earlier release, lacks the hook's attributes."""
        return self._of_epoch is None

    def epoch_start(self) -> dict[str, Any]:
        """Return the accumulation, and present values of the attributes set by the hook."""
        attributes = plain_attributes(self._module) if self._of_epoch else {}
        return {
            "attributes": {
                name: attributes.get(name, value)  # may hold tensors by now, such as outputs
                for name, value in (self._of_epoch or {}).items()
            },
            "accumulation": [self._accumulation, self._optim.accumulation],
        }

    def load_epoch_start(self, state: Mapping[str, Any]) -> None:
        """Set them again."""
        set_attributes(self._module, state["attributes"])
        self._of_epoch = dict(state["attributes"])
        begun, now = state.get("accumulation", (None, None))
        if begun == self._accumulation:  # else the script now requests another number
            self._optim.accumulate(now)


_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = vars(nn.Module())


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return copies of the attributes of a module and its submodules that are plain data, by path.

    Plain data are numbers, strings, small tensors, and short lists or dicts of numbers and strings.
    """
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        of_base = vars(TrainModule()) if part is module else _OF_TORCH
        for name, value in vars(part).items():
            if name not in of_base and _is_plain(value):
                place = f"{path}.{name}" if path else name
                found[place] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
    return found


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set attributes that `plain_attributes` returned, on submodules that still exist."""
    parts = dict(module.named_modules())
    for place, value in attributes.items():
        path, _, name = place.rpartition(".")
        if path not in parts:
            continue
        own: dict[str, Any] = parts[path].__dict__
        own[name] = value.to(own[name]) if isinstance(own.get(name), Tensor) else value


def _is_plain(value: Any) -> bool:
    if type(value) is Tensor:
        return value.numel() <= 1000 and not value.requires_grad and not value.is_sparse
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return False
        value = list(value.values())
    if type(value) is list:
        return len(value) <= 100 and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def changed_attributes(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain attributes that differ from those before."""
    now = plain_attributes(module).items()
    return {n: value for n, value in now if n not in before or _differ(before[n], value)}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return type(one) is not type(other) or bool(one != other)
