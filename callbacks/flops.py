"""Count floating-point operations as they run: matrix products, convolutions, attention."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.names import bare_names

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Flops:
    """The number of floating-point operations that ran; a multiply-add counts as two.

    Attributes:
        total: All operations.
        by_module: Operations of each submodule that was called, by its name, including those of its
            own submodules.
    """

    total: int = 0
    by_module: dict[str, int] = field(default_factory=dict)


class _NoModules:
    """Replaces the counter's module tracker, whose global hooks make compiled modules warn."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def counting_flops() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of this thread in the block with torch's ``FlopCounterMode``.

    ``torch.compile`` is disabled in the block, because operators inside a compiled graph cannot be
    counted. Counting changes no result.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    gpu = torch.ops.aten._scaled_dot_product_flash_attention
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter.flop_registry.setdefault(cpu, counter.flop_registry[gpu])  # torch has none for the CPU
    gpu = torch.ops.aten._scaled_dot_product_flash_attention_backward
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    counter.flop_registry.setdefault(cpu, counter.flop_registry[gpu])
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # has what is used of it
    with ExitStack() as contexts:
        if "torch._dynamo" in sys.modules:
            # With the counter active, Dynamo would permanently skip compiling some functions.
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        yield contexts.enter_context(counter)


@contextmanager
def flops_of(module: nn.Module) -> Iterator[Flops]:
    """Count the FLOPs in the block, in total and for each submodule of ``module`` that is called.

    Counting runs no extra operations and changes no result::

        with flops_of(net) as flops:
            net(batch)
        print(flops.total)

    Yields:
        The counts, which are filled in when the block ends without an error.
    """
    flops = Flops()
    seen: dict[str, int] = defaultdict(int)
    with ExitStack() as contexts:
        counter = contexts.enter_context(counting_flops())
        for name, part in dict(bare_names(module, module.named_modules())).items():
            before, after = _hooks(seen, name, counter)
            contexts.callback(part.register_forward_pre_hook(before).remove)
            contexts.callback(part.register_forward_hook(after).remove)
        yield flops
        flops.total = counter.get_total_flops()
    flops.by_module = dict(seen)


def _hooks(seen: dict[str, int], name: str, counter: FlopCounterMode) -> tuple[Any, Any]:
    """Return two forward hooks that add the operations between them to ``seen[name]``."""
    begun: list[int] = []  # one for each call in progress: a module may call itself

    def before(*_: Any) -> None:
        begun.append(counter.get_total_flops())

    def after(*_: Any) -> None:
        first = begun.pop()
        if not begun:
            seen[name] += counter.get_total_flops() - first

    return before, after
