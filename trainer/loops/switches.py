"""Which parts of a module are frozen or in evaluation mode: state that ``state_dict`` leaves out.

A hook may have switched them once, at an update that a resumed run does not repeat.
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
    """Return the names of frozen parameters and of modules in evaluation mode, as a tree."""
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
    """Warn of trained parts in evaluation mode whose dropout is off, unnoticed.

    ``from_pretrained`` of transformers returns models so.
    """
    if not module.training:  # `fit` has put the whole module into training mode, a hook has not
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
    """Restore the switches of a module as hooks had set them.

    Those that differed already when the two runs began are left as they are: the script has been
    changed since.

    Args:
        module: The user's.
        begun: What `switches_of` returned when this start began.
        saved: What it returned for the start that saved: ``"begun"`` at its beginning, and
            ``"now"`` at the save.
        tell: Whether to log what differs from the checkpoint.
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
    # The whole module is in training mode at a save, unless somebody has switched it since.
    if begun["evaluating"] == before["evaluating"] and "" not in now["evaluating"]:
        evaluating = set(now["evaluating"])
        for name, part in bare_names(module, module.named_modules()):
            part.training = name not in evaluating
