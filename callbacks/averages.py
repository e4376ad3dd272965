"""Running averages of a module's weights, which can be swapped with the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.names import bare_names
from trainer.tree import fill_, is_sharded, part_here

_NARROW = (torch.float16, torch.bfloat16)


class Averages:
    """The average of each trained weight of a module, stored by name.

    Frozen weights need no average. A weight that is trained later is averaged from then on, and so
    is one with a new name or shape, such as a pruned weight or a lazy weight after its first use.
    The average of a removed tensor is dropped. Averages of 16-bit weights are kept in float32,
    because a small step would be rounded away in 16 bits.

    Args:
        use_buffers: Average floating-point buffers that are part of the ``state_dict`` too, for
            example batch normalisation statistics. ``"copy"`` keeps their values at the latest
            update.
        device: The device of the averages; None keeps each on the device of its weight. Averages of
            sharded weights are always on the device of the weights.

    Attributes:
        values: The averages by name. Between `swap_in` and `swap_out`, an entry with the weight's
            own dtype holds the trained weight instead.
        swapped_in: Whether the module currently holds the averages.
    """

    def __init__(
        self, *, use_buffers: bool | Literal["copy"], device: torch.device | None = None
    ) -> None:
        self.use_buffers = use_buffers
        self.device = device
        self.values: dict[str, Tensor] = {}
        self.swapped_in = False
        # Tensors that `swap_out` restores and that `values` cannot hold.
        self._trained: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(
        self, module: nn.Module, weight: float | Callable[[list[Tensor], list[Tensor]], None]
    ) -> None:
        """Update each average: ``average += weight * (value - average)``; new ones are copies.

        Args:
            module: The module.
            weight: A number, or a function that is passed a list of averages and a list of values,
                and updates the averages in place.
        """
        named = self._matched(self._averaged(module))
        names = [name for name in named if name in self.values]
        if self.use_buffers == "copy":
            for name in [name for name, _ in module.named_buffers() if name in names]:
                self.values[name].copy_(named[name])
                names.remove(name)
        averages = [part_here(self.values[name]) for name in names]
        targets = [
            part_here(named[name]).to(average)
            for name, average in zip(names, averages, strict=True)
        ]
        if callable(weight):
            weight(averages, targets)
        elif averages:
            torch._foreach_lerp_(averages, targets, weight)
        self._begin(named, [name for name in named if name not in self.values])

    @torch.no_grad()
    def begin_at(
        self, module: nn.Module, names: Iterable[str], values: Mapping[str, Tensor]
    ) -> None:
        """Set the averages of ``names`` to ``values``, or else to the module's current weights.

        Names are the user's own, without wrapper prefixes, as in `full_precision`.
        """
        named = _named(module)
        bare = dict(bare_names(module, zip(named, named, strict=True)))
        self._begin(named, [bare[name] for name in names if name in bare])
        for name, value in values.items():
            key = bare.get(name)
            if key in self.values and value.shape == named[key].shape:
                fill_(self.values[key], value)

    @torch.no_grad()
    def swap_in(self, module: nn.Module, *, keep_buffers: bool = False) -> None:
        """Put the averages into the module, one tensor at a time.

        Args:
            module: The module.
            keep_buffers: Save the other buffers too, so that `swap_out` restores them.
        """
        named = self._matched(_named(module))
        if keep_buffers:
            self._trained = {
                name: buffer.clone()
                for name, buffer in module.named_buffers()
                if name not in self.values and not is_lazy(buffer)
            }
        for name, average in self.values.items():
            tensor = named[name]
            trained = tensor.detach().clone()
            tensor.copy_(average)
            if average.dtype == tensor.dtype:
                average.copy_(trained)
            else:
                self._trained[name] = trained
        self.swapped_in = True

    @torch.no_grad()
    def swap_out(self, module: nn.Module) -> None:
        """Put the trained weights back."""
        named = self._matched(_named(module))
        for name, average in self.values.items():
            if name not in self._trained:
                in_module = named[name].detach().clone()
                named[name].copy_(average)
                average.copy_(in_module)
        for name, trained in self._trained.items():
            named[name].copy_(trained)
        self._trained = {}
        self.swapped_in = False

    def full_precision(self, module: nn.Module, *, only_narrow: bool = False) -> dict[str, Tensor]:
        """Return the averages in full precision, whether in the module or not.

        Args:
            module: The module.
            only_narrow: Return only averages of 16-bit weights, which are more precise than the
                weights.
        """
        named = self._matched(_named(module))
        full_precision = (
            (name, named[name].detach() if self.swapped_in and name not in self._trained else value)
            for name, value in self.values.items()
            if not only_narrow or value.dtype != named[name].dtype
        )
        return dict(bare_names(module, full_precision))

    def state_dicts(self, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two ``state_dict()``s: one with the averages, one with the trained weights."""
        names = {id(tensor): name for name, tensor in self._matched(_named(module)).items()}
        state = module.state_dict(keep_vars=True)
        current = {key: _detached(value) for key, value in state.items()}
        swapped: dict[str, Tensor] = {}  # by name: a tied weight is cast once
        for tensor in state.values():
            name = names.get(id(tensor))
            value = None if name is None else self._trained.get(name, self.values.get(name))
            if name is not None and value is not None and name not in swapped:
                swapped[name] = value.to(tensor.dtype)
        other = {key: swapped.get(names.get(id(state[key]), ""), current[key]) for key in state}
        return (current, other) if self.swapped_in else (other, current)

    def _begin(self, named: Mapping[str, Tensor], names: Iterable[str]) -> None:
        for name in names:
            narrow = named[name].dtype in _NARROW
            dtype = torch.float32 if narrow else named[name].dtype
            device = None if is_sharded(named[name]) else self.device
            self.values[name] = named[name].detach().to(device, dtype, copy=True)

    def _matched(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Drop averages that are not in ``named`` or differ in shape; return ``named``."""
        for averages in (self.values, self._trained):
            for name, tensor in list(averages.items()):
                if name not in named or named[name].shape != tensor.shape:
                    del averages[name]
        return named

    def _averaged(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors to average: weights that are or were trained, and optional buffers."""
        named: dict[str, Tensor] = {
            name: parameter.detach()
            for name, parameter in module.named_parameters()
            if (parameter.requires_grad or name in self.values) and not is_lazy(parameter)
        }
        buffers = dict(module.named_buffers()) if self.use_buffers else {}
        floating = {
            name: buffer
            for name, buffer in buffers.items()
            if not is_lazy(buffer) and buffer.is_floating_point()
        }
        if floating:  # building a `state_dict` is the slowest part
            held = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
            named |= {name: buffer for name, buffer in floating.items() if id(buffer) in held}
        return named


def _named(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in named.items() if not is_lazy(tensor)}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and not is_lazy(value) else value
