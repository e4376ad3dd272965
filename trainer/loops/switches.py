"""Module flags: which parameters are frozen and which submodules are in eval mode.

A ``state_dict`` does not hold these flags, so checkpoints save them separately. A hook may have
set them once, at an update that a resumed run does not repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.names import bare_names

logger = logging.getLogger(__name__)


def switches_of(module: nn.Module) -> dict[str, list[str]]:
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


def tell_of_dropout_that_is_off(module: nn.Module) -> None:
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
            "%s is in evaluation mode, so its dropout is off while it is trained (from_pretrained "
            "returns models so). Call its train() before fit, or freeze its parameters.",
            ", ".join(outermost),
        )


def load_switches(
    module: nn.Module, begun: Mapping[str, Any], saved: Mapping[str, Any], *, tell: bool
) -> None:
    """Restore the module flags that hooks had set.

    If a flag list already differs between the starts of the two programs, the script was changed
    in between. Its present flags are then kept.

    Args:
        module: The user's module.
        begun: The module flags at this start of the program.
        saved: The module flags of the program that saved: ``"begun"`` at its start, ``"now"`` at
            the save.
        tell: Whether to log differences from the checkpoint.
    """
    before, now = saved["begun"], saved["now"]
    if begun["frozen"] == before["frozen"]:
        frozen = set(now["frozen"])
        for name, parameter in bare_names(module, module.named_parameters()):
            parameter.requires_grad = name not in frozen  # an assignment: it may be lazy
    elif tell and (others := set(begun["frozen"]) ^ set(now["frozen"])):
        logger.warning(
            "The script freezes different parameters than when the checkpoint was saved, and its "
            "choice is kept: %s.",
            ", ".join(sorted(others)),
        )
    # At a save the root module is in training mode, unless the user's code has called eval() on it.
    if begun["evaluating"] == before["evaluating"] and "" not in now["evaluating"]:
        evaluating = set(now["evaluating"])
        for name, part in bare_names(module, module.named_modules()):
            part.training = name not in evaluating
