"""Count floating-point operations as they run: matrix products, convolutions, attention."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.names import bare_names

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

# Names of torch operators that are as expensive as the ones with a FLOP formula, for the warning
# about uncounted operators. Elementwise operators, copies and reductions never count.
_HEAVY = re.compile(
    r"^(?!_linalg_check)(.*_)?(mm|bmm|addmm|addbmm|baddbmm|mv|addmv|dot|vdot|addr|linear|transformer"
    r"|convolution|attention|rnn|lstm|gru|fft|linalg|cholesky|lu|triangular|cdist|trilinear)(_|$)"
)
_LIGHT_NAMESPACES = frozenset({"prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"})


@dataclass
class Flops:
    """The number of floating-point operations that ran; a multiply-add counts as two.

    Attributes:
        total: All operations.
        by_module: Operations of each submodule that was called, by name; its own submodules count
            too.
        uncounted: Operators without a formula, which are not in the counts.
    """

    total: int = 0
    by_module: dict[str, int] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)


class _NoModules:
    """Replaces the counter's module tracker, whose global hooks make compiled modules warn."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Uncounted(TorchDispatchMode):
    """Records the operators for which the counter has no formula."""

    supports_higher_order_operators = True

    def __init__(self, formulas: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._formulas = formulas
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, OpOverload) and func.overloadpacket not in self._formulas:
            heavy = func.namespace not in _LIGHT_NAMESPACES
            if func.namespace == "aten":
                heavy = _HEAVY.search(func.overloadpacket.__name__) is not None
            if heavy:
                self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


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
        # Entered before the counter, which decomposes composite operators.
        uncounted = contexts.enter_context(_Uncounted({}))
        counter = contexts.enter_context(counting_flops())
        uncounted._formulas = counter.flop_registry
        for name, part in dict(bare_names(module, module.named_modules())).items():
            before, after = _hooks(seen, name, counter)
            contexts.callback(part.register_forward_pre_hook(before).remove)
            contexts.callback(part.register_forward_hook(after).remove)
        yield flops
        flops.total = counter.get_total_flops()
    flops.by_module = dict(seen)
    flops.uncounted = sorted(uncounted.names)


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
