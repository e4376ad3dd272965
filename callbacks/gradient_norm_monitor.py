"""Log the norms of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from callbacks.base import Callback, refuse_manual_optimization
from trainer.checks import check_counts, check_positive, choice_error
from trainer.names import bare_names

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer import Trainer, TrainModule

Per = Literal["module", "parameter", "group", "optimizer"]


class GradientNormMonitor(Callback):
    """Log the norm of the gradients, before clipping, at updates whose values are logged.

    ``grad_norm`` is the norm of all gradients as one vector, after accumulation, all-reduce and
    unscaling: the value that ``max_grad_norm`` limits. Norms of parts are named
    ``grad_norm/<part>``. Nothing is computed at other updates (``log_every``), and nothing waits
    for the device. An update that fp16 skips because of overflow has an infinite or NaN norm.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[GradientNormMonitor(per="module")])

    Args:
        per: Also log the norm of the parameters below each ``"module"``, of each ``"parameter"``,
            of each ``"optimizer"``, or of each ``"group"`` of the optimizers (its ``"name"``, or
            ``pg1``, ``pg2``, … as in `LearningRateMonitor`; with several optimizers
            ``<optimizer>/pg1``, …).
        depth: The number of path components in a module's name: 1 for ``"net"``, 2 for ``"net.0"``.
            Parameters directly in the root module have their own names.
        norm_type: The order of the norm; ``inf`` is the largest magnitude.

    Raises:
        ValueError: An argument is invalid; in ``fit``, if the module uses manual optimisation.
    """

    def __init__(
        self, per: Per | None = None, *, depth: int = 1, norm_type: float | str = 2.0
    ) -> None:
        if per is not None and per not in get_args(Per):
            raise ValueError(choice_error("per", per, get_args(Per)))
        check_counts(1, depth=depth)
        order = math.inf if norm_type == "inf" else norm_type
        check_positive(norm_type=order)
        self.per = per
        self.depth = depth
        self.norm_type = float(order)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Raise for manual optimisation, in which no hook sees all gradients of an update."""
        refuse_manual_optimization(self, module)

    def on_before_optimizer_step(
        self, trainer: Trainer, module: TrainModule, optimizer: Optimizer
    ) -> None:
        """Log the norms if this update's values will be logged; once for all optimizers."""
        if not trainer.log_due or optimizer is not trainer.optimizers[0]:
            return
        norms = _norms(module.parameters(), trainer.gradient, self.norm_type)
        if not norms:  # an optimizer that updates during backward leaves no gradients
            return
        values = {"grad_norm": self._total_norm(norms.values())}
        for part, members in self._parts(trainer, module).items():
            if part_norms := [norms[id(member)] for member in members if id(member) in norms]:
                values[f"grad_norm/{part}"] = self._total_norm(part_norms)
        for name, value in values.items():
            # All processes have the same gradients. Reduce with max, because a mean may round.
            module.log(name, value, on_step=True, on_epoch=False, reduce="max")

    def _total_norm(self, norms: Iterable[Tensor]) -> Tensor:
        """Return the norm of the concatenation of vectors, given the norm of each."""
        first, *others = norms
        stacked = torch.stack([first, *(norm.to(first) for norm in others)])
        norm: Tensor = torch.linalg.vector_norm(stacked, self.norm_type)
        return norm

    def _parts(self, trainer: Trainer, module: TrainModule) -> dict[str, list[Tensor]]:
        parts: dict[str, list[Tensor]] = {}
        if self.per in ("group", "optimizer"):
            several = len(trainer.optimizers) > 1
            for label, optimizer in zip(trainer.optimizer_names, trainer.optimizers, strict=True):
                for index, group in enumerate(optimizer.param_groups, 1):
                    name = str(group.get("name", f"pg{index}"))
                    if self.per == "optimizer":
                        name = label
                    elif several:
                        name = f"{label}/{name}"
                    parts.setdefault(name, []).extend(group["params"])
        elif self.per is not None:
            for name, parameter in bare_names(module, module.named_parameters()):
                path = name.split(".")
                depth = min(self.depth, max(len(path) - 1, 1))
                part = name if self.per == "parameter" else ".".join(path[:depth])
                parts.setdefault(part, []).append(parameter)
        return parts


def _norms(
    parameters: Iterable[nn.Parameter],
    gradient_of: Callable[[nn.Parameter], Tensor | None],
    order: float,
) -> dict[int, Tensor]:
    """Return the norm of each parameter's gradient, in at least float32, by the parameter's id."""
    norms: dict[int, Tensor] = {}
    by_kind: dict[tuple[torch.device, torch.dtype, object], list[tuple[int, Tensor]]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is None:
            continue
        if gradient is not parameter.grad:  # gathered for this call: free each in turn
            norms[id(parameter)] = torch.linalg.vector_norm(gradient, order)
            continue
        mesh = getattr(gradient, "device_mesh", None)  # of a sharded gradient
        kind = (gradient.device, gradient.dtype, mesh)
        by_kind.setdefault(kind, []).append((id(parameter), gradient))
    for (_, dtype, mesh), alike in by_kind.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        # The rows of a sparse gradient have the same norm.
        gradients = [g.coalesce().values() if g.is_sparse else g for _, g in alike]
        computed: Sequence[Any] = torch._foreach_norm(gradients, order, dtype=wide)
        if mesh is not None:
            computed = [norm.full_tensor() for norm in computed]
        norms.update((key, norm) for (key, _), norm in zip(alike, computed, strict=True))
    return norms
