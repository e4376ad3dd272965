"""The optimizers and schedulers of a fit in a checkpoint, found again by names and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.checkpoint.state import PlacedState
from trainer.errors import CheckpointError
from trainer.loops.state import Optimization
from trainer.module import TrainModule
from trainer.optim.fingerprint import check_schedules, keep_options, options_of
from trainer.optim.groups import names_of_groups, restore_groups


class OptimizerStates:
    """The optimizers, their groups, schedulers and fingerprint.

    Args:
        optim: The optimizers and schedulers.
        module: The user's module.
        dtypes: See `trainer.optim.state.load_state`.
        warns: Whether to warn of options that the script has changed since the save.
    """

    def __init__(
        self,
        optim: Optimization,
        module: TrainModule,
        *,
        dtypes: Mapping[int, torch.dtype] | None = None,
        warns: bool = False,
    ) -> None:
        self._optim, self._module, self._warns = optim, module, warns
        self._parts = [PlacedState(each, [module], dtypes) for each in optim.optimizers]
        self._gathered: list[Any] | None = None

    def gather(self) -> None:
        """Take the optimizers' states now, where an engine gathers them; collective."""
        self._gathered = [each.state_dict() for each in self._parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the states; those of the optimizers under ``"optimizer"``."""
        optim, states = self._optim, self._gathered
        return {
            "options": optim.fingerprint,
            "optimizers": optim.names,
            "groups": [names_of_groups(optimizer, self._module) for optimizer in optim.optimizers],
            "schedulers": [entry.scheduler.state_dict() for entry in optim.schedulers],
            "optimizer": [each.state_dict() for each in self._parts] if states is None else states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups, then the optimizers, then the schedulers.

        Raises:
            CheckpointError: `configure_optimizers` returned others than were saved.
        """
        optim, options = self._optim, state.get("options", {})
        self._check(state)
        schedulers = [entry.scheduler for entry in optim.schedulers]
        for optimizer, groups in zip(optim.optimizers, state["groups"], strict=True):
            restore_groups(optimizer, groups, self._module, schedulers=schedulers)
        for part, saved in zip(self._parts, state["optimizer"], strict=True):
            part.load_state_dict(saved)
        _check_number("schedulers", schedulers, state["schedulers"])
        check_schedules(optim.fingerprint, options, len(schedulers))
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        restored = options_of(optim.names, optim.optimizers, optim.schedulers)
        keep_options(optim.fingerprint, options, restored, tell=self._warns)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise if the saved optimizers' number, names or order differ from the present ones."""
        names, saved = self._optim.names, state["optimizers"]
        _check_number("optimizers", names, state["optimizer"])
        if saved is not None and names != saved:  # unknown in a checkpoint of another library
            raise CheckpointError(
                "it holds the state of the optimizers "
                f"{', '.join(map(repr, saved))}, but configure_optimizers returned "
                f"{', '.join(map(repr, names))}. Return the same in that order; an optimizer is "
                "named by the 'name' beside it, else by its class."
            )


def _check_number(what: str, here: list[Any], saved: list[Any]) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"it holds {len(saved)} {what}, but configure_optimizers returned {len(here)}."
        )
