"""The memory of one process of many, with the model sharded by the real engine.

Torch's ``fake`` backend simulates the other processes: a collective returns at once, without their
values. Fake tensors have shapes and a device, but no data. So one process can shard, run and step a
model of any size, as on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.cli.estimate_memory.footprint import (
    PRECISIONS,
    Footprint,
    Input,
    arguments_of,
    bytes_of,
    kept_for_backward,
    optimizer_state,
)
from trainer.configuration import FullyShardedDataParallelPlugin, ParallelismConfig
from trainer.engines.base import Engine, EngineOptions
from trainer.engines.choose import choose_engine
from trainer.engines.fsdp import own_parameters
from trainer.environment import patch_environment
from trainer.module import TrainModule
from trainer.state import PartialState
from trainer.torch_compat import clear_sharding_cache, register_fake_collectives


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How processes share a model.

    Attributes:
        shard: Processes that share one replica (FSDP).
        tp: Processes that share each layer (tensor parallel).
        replicate: Replicas of the model.
        wrap: The classes of the submodules that gather their parameters separately; None takes the
            model's ``_no_split_modules``.
        activation_checkpointing: Whether these submodules recompute their activations in backward.
    """

    shard: int = 1
    tp: int = 1
    replicate: int = 1
    wrap: tuple[str, ...] | None = None
    activation_checkpointing: bool = False

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.replicate * self.shard * self.tp

    def __str__(self) -> str:
        """Return the kinds of sharing with their numbers of processes."""
        sizes = {"HSDP": self.replicate, "FSDP": self.shard, "TP": self.tp}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "-"

    def engine(self, rank: int, mixed_precision: str) -> Engine:
        """Return the engine of one of the processes."""
        wrap = None if self.wrap is None else list(self.wrap)
        plugin = FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=wrap,
            activation_checkpointing=self.activation_checkpointing,
        )
        config = ParallelismConfig(
            dp_replicate_size=self.replicate,
            dp_shard_size=self.shard,
            tp_size=self.tp,
            cp_size=1,
            sp_size=1,
        )
        return choose_engine(
            EngineOptions(
                device=torch.device("cpu"),
                rank=rank,
                world_size=self.processes,
                fsdp_plugin=plugin,
                parallelism_config=config,
                mixed_precision=mixed_precision,
            ),
            automatic=True,
        )


class Forward(TrainModule):
    """Calls a module's ``forward`` as its training step, so that the engine gathers around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def training_step(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:  # type: ignore[override]  # not of a batch
        """Call the module; its result is not used."""
        self.wrapped(*arguments, **keywords)


def fake_tensors() -> Any:
    """Return a mode in which new tensors have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # no public name

    return FakeTensorMode(allow_non_fake_inputs=True)


def give_fake_tensors(module: nn.Module, fake: Any) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU.

    Args:
        module: The module; tied parameters stay tied.
        fake: The mode of `fake_tensors`.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        named = chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, old in list(named):
            if old not in made:
                with fake:
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
                trained = old.requires_grad
                made[old] = nn.Parameter(new, trained) if isinstance(old, nn.Parameter) else new
            setattr(part, name, made[old])


@contextmanager
def fake_group(rank: int, processes: int) -> Iterator[None]:
    """Inside the block, make this process one of many; the others are simulated."""
    shared = PartialState._shared_state
    before = dict(shared)
    shared.clear()
    register_fake_collectives()
    dist.init_process_group("fake", rank=rank, world_size=processes)
    try:
        with patch_environment(OMP_NUM_THREADS="1"):  # no other process uses a core
            PartialState(cpu=True)
        yield
    finally:
        clear_sharding_cache()  # it holds the process groups of equal meshes
        dist.destroy_process_group()
        shared.clear()
        shared.update(before)


def measure(
    make: Callable[[], nn.Module],
    *,
    layout: Layout,
    precision: str,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    inputs: Sequence[Input] = (),
    batch: int = 1,
    rank: int = 0,
) -> Footprint:
    """Return the memory that training a module needs on one of several processes.

    Args:
        make: Creates the module; called with the meta device as the default.
        layout: How the processes share the module.
        precision: A key of `PRECISIONS`.
        make_optimizer: Creates an optimizer of a list of parameters.
        inputs: The arguments of ``forward``; without any, activations are unknown.
        batch: Samples in each input, on this process.
        rank: The rank of the process. Rank 0 needs the most, since parameters are split into equal
            parts, of which the last ones are shorter.

    Raises:
        CommandError: The optimizer rejects the parameters, or cannot step on them.
        Exception: Any error of the module or the engine.
    """
    weights, computed = PRECISIONS[precision]
    fake = fake_tensors()
    with torch.device("meta"):
        module = Forward(make().to(weights)).train()
    give_fake_tensors(module, fake)
    with fake_group(rank, layout.processes):
        engine = layout.engine(rank, precision if computed else "no")
        engine.start(module, None)
        with fake:
            gathered = _gathered(module)
            activations = None
            if inputs:
                forward = partial(
                    engine.forward, "training_step", *arguments_of(inputs, batch, weights)
                )
                activations = kept_for_backward(forward, partial(_held, module), computed)
        engine.weights.reshard(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        return Footprint(
            parameters=bytes_of(module.parameters()),
            gradients=bytes_of(trained),
            optimizer=optimizer_state(trained, make_optimizer, engine.prepare_optimizer),
            buffers=bytes_of(module.buffers()),
            gathered=gathered,
            activations=activations,
        )


def _gathered(module: nn.Module) -> int:
    """Return the bytes of the parameters that are gathered at once.

    These are the root's own parameters and those of two units, since the next unit is gathered
    while one runs.
    """
    sizes = []
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            sizes.append(bytes_of(set(own_parameters(unit))))  # tied parameters count once
            unit.reshard()
    root, *others = sizes
    return root + sum(sorted(others)[-2:])


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())
