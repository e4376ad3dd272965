"""What a model consists of and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from callbacks.base import Callback

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


def _numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter; 0 as long as a lazy module has not seen its input."""
    if is_lazy(parameter):
        return 0
    # DeepSpeed's stage 3 leaves an empty tensor here and the whole size in ds_numel
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _count(parameters: Iterable[nn.Parameter]) -> str:
    parameters = list(parameters)
    total = f"{sum(map(_numel, parameters)):,}"
    lazy = sum(map(is_lazy, parameters))
    return f"{total} + {lazy} uninitialised" if lazy else total


def _trainable(parameters: Iterable[nn.Parameter]) -> str:
    flags = {parameter.requires_grad for parameter in parameters}
    return {(): "-", (True,): "yes", (False,): "no"}.get(tuple(flags), "partly")


def _row(name: str, kind: str, parameters: list[nn.Parameter]) -> tuple[str, str, str, str]:
    return name, kind, _count(parameters), _trainable(parameters)


def _rows(module: nn.Module, max_depth: int) -> Iterator[tuple[str, str, str, str]]:
    # what the module holds itself is in none of its children's rows
    for name, parameter in module.named_parameters(recurse=False):
        yield _row(name, type(parameter).__name__, [parameter])
    for name, child in module.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            yield _row(name, type(child).__name__, list(child.parameters()))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """A table of the parts of ``module`` with their numbers of parameters, and the totals.

    A row counts everything below it. A parameter that several parts share (tied weights) is in the
    row of each but once in the totals.

    Args:
        module: Any module.
        max_depth: Levels of nesting to show; 0 shows the totals alone, -1 every level.

    Raises:
        ValueError: If ``max_depth`` is less than -1.
    """
    if max_depth < -1:
        raise ValueError(f"max_depth must be -1 (all levels), 0 or a number, got {max_depth!r}.")
    lines: list[str] = []
    if max_depth != 0:
        table = [("Name", "Type", "Parameters", "Trainable"), *_rows(module, max_depth)]
        name, kind, count, _ = (max(map(len, column)) for column in zip(*table, strict=True))
        lines = [f"{a:<{name}}  {b:<{kind}}  {c:>{count}}  {d}" for a, b, c, d in table]
        rule = "-" * max(map(len, lines))
        lines = [lines[0], rule, *lines[1:], rule]
    parameters = list(module.parameters())  # each once, however often it is used
    size = sum(_numel(parameter) * parameter.dtype.itemsize for parameter in parameters) / 1e6
    return "\n".join(
        [
            *lines,
            f"{_count(p for p in parameters if p.requires_grad)} trainable parameters",
            f"{_count(p for p in parameters if not p.requires_grad)} frozen parameters",
            f"{_count(parameters)} parameters, {size:,.3f} MB",
        ]
    )


class ModelSummary(Callback):
    """Print what the model consists of when ``fit`` begins, see :func:`summarize`.

    Args:
        max_depth: Levels of nesting to show; 0 shows the totals alone, -1 every level.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ValueError(f"max_depth must be -1 (all), 0 or a number, got {max_depth!r}.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Print the table on the main process."""
        trainer.accelerator.print(summarize(module, self.max_depth))
