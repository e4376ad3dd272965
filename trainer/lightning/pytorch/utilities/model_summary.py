"""The table of a model's submodules, without a Trainer."""

from __future__ import annotations

from torch import nn

from callbacks.model_summary import numel
from callbacks.model_summary import summarize as table_of
from trainer.lightning.missing import getter

__all__ = ["ModelSummary", "summarize"]

__getattr__ = getter(__name__)


class ModelSummary:
    """A model whose ``str`` is the table of `callbacks.ModelSummary`.

    Args:
        model: The model.
        max_depth: The depth of the submodules in the table; -1 for all.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self._model = model
        self._max_depth = max_depth

    def __str__(self) -> str:
        return table_of(self._model, self._max_depth)

    __repr__ = __str__

    @property
    def total_parameters(self) -> int:
        """The number of elements of all parameters; lazy parameters count as none."""
        return sum(map(numel, self._model.parameters()))

    @property
    def trainable_parameters(self) -> int:
        """The number of elements of the parameters that are trained."""
        return sum(numel(each) for each in self._model.parameters() if each.requires_grad)


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the `ModelSummary` of a model."""
    return ModelSummary(lightning_module, max_depth)
