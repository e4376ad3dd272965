"""Makes the modules of accelerate importable below `trainer.accelerate`."""

from __future__ import annotations

from functools import partial

from trainer.accelerate.table import FUNCTION, PLACES, value_of, why_not
from trainer.migration.modules import ModuleFinder


def _refusal(module: str) -> str | None:
    reason = why_not(module)
    return reason and f"accelerate.{module} is not in Cadence: {reason}."


def install() -> None:
    """Make the modules importable."""
    names = {module: partial(value_of, module) for module in PLACES if module}
    ModuleFinder("trainer.accelerate", names, _refusal, functions=(FUNCTION,)).install()
