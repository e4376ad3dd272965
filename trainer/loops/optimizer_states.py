"""The optimizers and schedulers of a fit in a checkpoint, matched by names and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.checkpoint.state import PlacedState
from trainer.errors import CheckpointError
from trainer.module import TrainModule
from trainer.optim.configure import SchedulerEntry
from trainer.optim.fingerprint import check_schedules, keep_options, options_of
from trainer.optim.groups import names_of_groups, restore_groups
from trainer.optim.optimizer import AcceleratedOptimizer


class OptimizerStates:
    """The state of optimizers, their groups, schedulers and fingerprint.

    Args:
        optimizers: The prepared optimizers.
        names: Their names, see `trainer.optim.configure.names_of`.
        schedulers: The schedulers.
        module: The user's module.
        fingerprint: Their options as text, see `trainer.optim.fingerprint.options_of`.
        warns: Whether to warn of options that the script has changed since the save.

    Attributes:
        names: The argument.
    """

    def __init__(
        self,
        optimizers: Sequence[AcceleratedOptimizer],
        names: list[str],
        schedulers: Sequence[SchedulerEntry],
        module: TrainModule,
        fingerprint: dict[str, str],
        *,
        warns: bool,
    ) -> None:
        self._optimizers, self.names, self._schedulers = optimizers, names, schedulers
        self._module, self._warns = module, warns
        self._fingerprint = fingerprint
        self._collected: list[Any] | None = None

    def collect(self) -> None:
        """Collect the optimizers' states now, while a collective call is allowed."""
        self._collected = self._states()

    def _states(self) -> list[Any]:
        return [PlacedState(each, [self._module]).state_dict() for each in self._optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Return the states; those of the optimizers under ``"optimizer"``."""
        states, self._collected = self._collected, None
        return {
            "options": self._fingerprint,
            "optimizers": self.names,
            "groups": [names_of_groups(optimizer, self._module) for optimizer in self._optimizers],
            "schedulers": [entry.scheduler.state_dict() for entry in self._schedulers],
            "optimizer": self._states() if states is None else states,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], dtypes: Mapping[int, torch.dtype] | None = None
    ) -> None:
        """Restore the groups, then the optimizers, then the schedulers.

        Args:
            state: What `state_dict` returned.
            dtypes: See `trainer.optim.state.load_state`.

        Raises:
            CheckpointError: `configure_optimizers` returned other optimizers than were saved.
        """
        options, fingerprint = state.get("options", {}), self._fingerprint
        self._check(state)
        schedulers = [entry.scheduler for entry in self._schedulers]
        for optimizer, groups in zip(self._optimizers, state["groups"], strict=True):
            restore_groups(optimizer, groups, self._module, schedulers=schedulers)
        for optimizer, saved, groups in zip(
            self._optimizers, state["optimizer"], state["groups"], strict=True
        ):
            try:
                PlacedState(optimizer, [self._module], dtypes).load_state_dict(saved)
            except ValueError:
                _check_parameters(groups, names_of_groups(optimizer, self._module))
                raise
        _check_number("schedulers", schedulers, state["schedulers"])
        check_schedules(fingerprint, options, len(schedulers))
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        restored = options_of(self.names, self._optimizers, self._schedulers)
        keep_options(fingerprint, options, restored, tell=self._warns)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise if the saved optimizers' number, names or order differ from the present ones."""
        names, saved = self.names, state["optimizers"]
        _check_number("optimizers", names, state["optimizer"])
        if saved is not None and names != saved:  # unknown in a checkpoint of another library
            raise CheckpointError(
                f"it holds the state of the optimizers {', '.join(map(repr, saved))}, but "
                f"configure_optimizers returned {', '.join(map(repr, names))}. Return the same "
                "optimizers in that order; an optimizer's name is the 'name' in its dict, by "
                "default its class."
            )


def _check_number(what: str, here: list[Any], saved: list[Any]) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"it holds {len(saved)} {what}, but configure_optimizers returned {len(here)}."
        )


def _check_parameters(
    saved: Sequence[Sequence[str | None]], here: Sequence[Sequence[str | None]]
) -> None:
    """Raise if an optimizer has other parameters or groups than the saved one, naming them."""
    before, now = ({name for group in groups for name in group if name} for groups in (saved, here))
    differences = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (("now also has", now - before), ("no longer has", before - now))
        if names
    ]
    if differences:
        raise CheckpointError(
            f"an optimizer {' and '.join(differences)}. Give it the same parameters as when the "
            "run began: also those of layers that are frozen for some epochs."
        )
    there, present = ([len(group) for group in groups] for groups in (saved, here))
    if there != present:
        raise CheckpointError(
            f"an optimizer had {_sizes(there)}, and now has {_sizes(present)}. Return the same "
            "parameter groups from configure_optimizers as when the run began."
        )


def _sizes(groups: Sequence[int]) -> str:
    one = "1 parameter group" if len(groups) == 1 else f"{len(groups)} parameter groups"
    return f"{one} ({', '.join(map(str, groups))} parameters)"
