"""A table of a model's submodules with their parameter counts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from tqdm import tqdm

from callbacks.base import Callback
from callbacks.flops import Flops, flops_of
from trainer.checks import check_counts
from trainer.names import bare_names
from trainer.tree import is_sharded, part_here

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


def numel(parameter: nn.Parameter) -> int:
    """Return a parameter's number of elements; 0 for an uninitialised lazy parameter."""
    if is_lazy(parameter):
        return 0
    # DeepSpeed's ZeRO stage 3 leaves an empty tensor, and the whole size in ds_numel
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _count(parameters: Iterable[nn.Parameter]) -> str:
    parameters = list(parameters)
    total = f"{sum(map(numel, parameters)):,}"
    lazy = sum(map(is_lazy, parameters))
    return f"{total} + {lazy} uninitialised" if lazy else total


def _trainable(parameters: Iterable[nn.Parameter]) -> str:
    flags = {parameter.requires_grad for parameter in parameters}
    return {(): "-", (True,): "yes", (False,): "no"}.get(tuple(flags), "partly")


Row = tuple[str, ...]


def _row(name: str, kind: str, parameters: list[nn.Parameter], flops: Flops | None) -> Row:
    row = (name, kind, _count(parameters), _trainable(parameters))
    if flops is None:
        return row
    return *row, f"{flops.by_module[name]:,}" if name in flops.by_module else "-"


def _rows(module: nn.Module, max_depth: int, flops: Flops | None) -> Iterator[Row]:
    # parameters directly in the module are in none of its children's rows
    for name, parameter in module.named_parameters(recurse=False):
        yield _row(name, type(parameter).__name__, [parameter], flops)
    for name, child in dict(bare_names(module, module.named_modules())).items():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            yield _row(name, type(child).__name__, list(child.parameters()), flops)


def _table(rows: list[Row]) -> list[str]:
    """Return lines with aligned columns; numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = "<<><>"
    columns = list(zip(signs, widths, strict=False))  # without FLOPs the last sign is unused
    lines = [
        "  ".join(f"{cell:{sign}{width}}" for cell, (sign, width) in zip(row, columns, strict=True))
        for row in rows
    ]
    return [line.rstrip() for line in lines]


def summarize(module: nn.Module, max_depth: int = 1, flops: Flops | None = None) -> str:
    """Return a table of the submodules of ``module`` with their parameter counts, and the totals.

    A row includes all of its submodules. A parameter that several submodules share (tied weights)
    is counted in the row of each, but only once in the totals. Counts are those of the whole model;
    if it is sharded, a line shows how much of it this process holds.

    Args:
        module: Any module.
        max_depth: Levels of nesting to show; 0 shows only the totals, -1 every level.
        flops: The result of :func:`callbacks.flops.flops_of`. It adds a column with the FLOPs of
            each submodule that was called; a multiply-add counts as two.

    Raises:
        ValueError: If ``max_depth`` is less than -1.
    """
    check_counts(-1, max_depth=max_depth)
    lines: list[str] = []
    if max_depth != 0:
        head = ("Name", "Type", "Parameters", "Trainable", *(() if flops is None else ("FLOPs",)))
        lines = _table([head, *_rows(module, max_depth, flops)])
        rule = "-" * max(map(len, lines))
        lines = [lines[0], rule, *lines[1:], rule]
    parameters = list(module.parameters())  # each once, however often it is used
    size = sum(numel(parameter) * parameter.dtype.itemsize for parameter in parameters) / 1e6
    lines += [
        f"{_count(p for p in parameters if p.requires_grad)} trainable parameters",
        f"{_count(p for p in parameters if not p.requires_grad)} frozen parameters",
        f"{_count(parameters)} parameters, {size:,.3f} MB",
    ]
    if any(map(is_sharded, parameters)):
        parts: list[Any] = [part_here(parameter) for parameter in parameters]
        held = sum(part.nbytes for part in parts) / 1e6
        lines.append(f"{_count(parts)} of them on this process, {held:,.3f} MB")
    if flops is not None:
        lines.append(f"{flops.total:,} FLOPs in the forward pass of one batch")
        if flops.uncounted:
            lines.append(f"not counted: {', '.join(flops.uncounted)}")
    return "\n".join(lines)


class ModelSummary(Callback):
    """Print a table of the model's submodules when ``fit`` begins, see :func:`summarize`.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[ModelSummary(max_depth=2, flops=True)])

    Args:
        max_depth: Levels of nesting to show; 0 shows only the totals, -1 every level.
        flops: Count the FLOPs of the first batch's forward pass, up to its first backward, in total
            and by module, and print the table after this batch. Nothing runs twice and no result
            changes, but this batch runs without ``torch.compile``. Each process counts its own
            batch; the main process prints. Custom kernels are listed, but not counted. An operation
            outside any module's call counts only in the total.

    Attributes:
        flops: The counts, a :class:`callbacks.flops.Flops`; None before that.

    Raises:
        ValueError: If ``max_depth`` is less than -1.
    """

    def __init__(self, max_depth: int = 1, *, flops: bool = False) -> None:
        check_counts(-1, max_depth=max_depth)
        self.max_depth = max_depth
        self.flops: Flops | None = None
        self._count_flops = flops
        self._due = False
        self._contexts = ExitStack()
        self._counting: Flops | None = None

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Print the table on the main process, unless it waits for FLOPs."""
        self.flops = None
        self._due = self._count_flops
        if not self._due:
            trainer.accelerator.print(summarize(module, self.max_depth))

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting in the first batch."""
        if self._due and self._counting is None:
            self._counting = self._contexts.enter_context(flops_of(module))

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Stop counting: the forward pass is over."""
        self._stop()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the table; sharded parameters are no longer gathered."""
        self._stop()
        if self._due:
            self._print(trainer, module)

    def _stop(self) -> None:
        if self._counting is not None:
            self._contexts.close()
            self.flops, self._counting = self._counting, None

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Print the table without FLOPs if the first batch failed or there was none."""
        self._contexts.close()
        self._counting = None
        if self._due:
            self._print(trainer, module)

    def _print(self, trainer: Trainer, module: TrainModule) -> None:
        self._due = False
        if trainer.accelerator.is_main_process:
            # a progress bar may be on the line
            tqdm.write(summarize(module, self.max_depth, self.flops), file=sys.stdout)
