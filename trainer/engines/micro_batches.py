"""Batches that go through stages in micro-batches: cut, and agreed on with the last stage.

Both engines with stages use it: one runs the schedules of torch, the other those of megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.batch import samples_in, take
from trainer.distributed.guards import read_back
from trainer.optim.weighting import loss_of
from trainer.tree import find_batch_size


def split_batch(
    module: nn.Module, batch: Any, number: int, option: str
) -> list[tuple[int, Any, float]]:
    """Cut a batch into micro-batches, and leave out those without items.

    Args:
        module: The user's module, whose ``count_items`` counts.
        batch: The batch.
        number: How many micro-batches there are at most.
        option: The name of the user's option for it.

    Returns:
        Of each its number, its data and its items.

    Raises:
        ValueError: The batch cannot be cut, or its parts have other items than the whole.
    """
    size = samples_in(batch)
    if not size:
        raise ValueError(
            "A batch is cut into micro-batches along the first dimension of its tensors, which "
            "must be the same for all: return only such tensors from collate_fn, and create what "
            "all samples share, such as a mask, in training_step."
        )
    each = -(-size // min(number, size))
    parts = [take(batch, at, at + each) for at in range(0, size, each)]
    count: Any = getattr(module, "count_items", find_batch_size)
    counts = [count(part) for part in (*parts, batch)]
    if all(isinstance(each, Tensor) for each in counts):  # one wait for the device
        counts = read_back(torch.stack([each.reshape(()) for each in counts])).tolist()
    *items, whole = map(float, counts)
    if not isclose(sum(items), whole, rel_tol=1e-5):
        raise ValueError(
            f"count_items gave {whole:g} for a batch, but {', '.join(f'{n:g}' for n in items)} "
            "for its micro-batches, whose sum must be the same: count items per sample, or set "
            f"{option} to 1."
        )
    pairs = enumerate(zip(parts, items, strict=True))
    return [(number, part, own) for number, (part, own) in pairs if own]


def required_loss(outputs: Any) -> Tensor:
    """Return the loss in what ``training_step`` has returned for a micro-batch.

    Raises:
        TypeError: It has returned None.
    """
    if outputs is None:
        raise TypeError(
            "training_step returned None, which would skip one of the micro-batches that a "
            "schedule needs: define count_items, and return 0 from it for batches that must not "
            "count."
        )
    return loss_of(outputs)


def gather_outcomes(group: Any, value: Any, error: Exception | None) -> list[Any]:
    """Return what each process of a group gives, if none has failed; collective.

    Args:
        group: The process group of a pipeline, its ranks in the order of their stages.
        value: What this process gives.
        error: The error of this process.

    Raises:
        Exception: The error of this process, if it is that of the first one that has failed.
        RuntimeError: Another one has failed first.
    """
    report = None if error is None else f"{type(error).__name__}: {error}"
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (report, value), group=group)
    failed = next((rank for rank, (text, _) in enumerate(outcomes) if text is not None), None)
    if failed is None:
        return [value for _, value in outcomes]
    # Those after it have got nothing that they could use, and may fail because of that.
    if error is not None and report == outcomes[failed][0]:
        raise error
    raise RuntimeError(
        f"Rank {dist.get_global_rank(group, failed)} failed while the others "
        f"waited for it: {outcomes[failed][0]}"
    )


class StageLogs:
    """What the last stage logs in one batch, which the others log after it.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._logged: list[tuple[Any, ...]] = []

    def record(self, items: float, is_last: Callable[[], bool], *, shared: bool) -> None:
        """Let ``log`` act on the last stage alone, for values with the items as their weight.

        Args:
            items: Those of the micro-batch that runs.
            is_last: Whether the last stage runs.
            shared: Whether there are others.
        """
        module, log = self._module, type(self._module).log

        def record(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not is_last():
                return
            if kwargs.get("batch_size") is None:
                kwargs["batch_size"] = items
            recording = vars(module).pop("log")  # it may call itself
            try:
                log(module, name, value, *args, **kwargs)
            finally:
                vars(module)["log"] = recording
            if shared:
                self._logged.append((name, self._path_of(name, value), value, args, kwargs))

        vars(module)["log"] = record

    def to_send(self) -> list[tuple[Any, ...]]:
        """Return what was logged, with numbers alone; each stage has its metric objects."""

        def number(value: Any) -> Any:
            if hasattr(value, "compute"):
                return None
            return value.item() if isinstance(value, Tensor) else value

        return [(*place, number(value), args, kw) for *place, value, args, kw in self._logged]

    def repeat(self, logged: list[tuple[Any, ...]]) -> None:
        """Log what the last stage has sent."""
        for name, path, value, args, kwargs in logged:
            shown = value if path is None else self._module.get_submodule(path)
            self._module.log(name, shown, *args, **kwargs)

    def _path_of(self, name: str, value: Any) -> str | None:
        """Return the place of a logged metric object in the module; None for a number.

        Raises:
            TypeError: It is an object that is not part of the module.
        """
        if not hasattr(value, "compute"):
            return None
        for path, part in self._module.named_modules():
            if part is value:
                return str(path)
        raise TypeError(
            f"The metric {name!r} is a {type(value).__name__} that is not an attribute of the "
            "module, so the other stages cannot find their copy: assign it in __init__."
        )
