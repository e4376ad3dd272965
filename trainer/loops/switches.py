"""What of a module is frozen and what in evaluation mode: state that its ``state_dict`` leaves out.

A hook may have switched it once, at an update that a run which goes on does not come to again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def switches_of(module: nn.Module) -> dict[str, list[str]]:
    """The names of what is frozen and of what is in evaluation mode, as a tree to be saved."""
    return {
        "frozen": [n for n, parameter in module.named_parameters() if not parameter.requires_grad],
        "evaluating": [n for n, part in module.named_modules() if not part.training],
    }


def load_switches(
    module: nn.Module, begun: Mapping[str, Any], saved: Mapping[str, Any], *, tell: bool
) -> None:
    """Put a module back to where hooks had brought it.

    What it began otherwise with than the run that was saved is left as it is now: its script says
    something else than then.

    Args:
        module: The user's.
        begun: What `switches_of` returned when this start began.
        saved: ``"begun"``, the same of the start that saved, and ``"now"``, as it was saved.
        tell: Say in the log what is not as it was saved.
    """
    before, now = saved["begun"], saved["now"]
    if begun["frozen"] == before["frozen"]:
        frozen = set(now["frozen"])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
    elif tell and (others := set(begun["frozen"]) ^ set(now["frozen"])):
        logger.warning(
            "Frozen or not otherwise than when the checkpoint was saved, since the script says so "
            "now: %s.",
            ", ".join(sorted(others)),
        )
    # As a whole it trains whenever a run is saved, unless somebody has switched it since.
    if begun["evaluating"] == before["evaluating"] and "" not in now["evaluating"]:
        evaluating = set(now["evaluating"])
        for name, part in module.named_modules():
            part.training = name not in evaluating
