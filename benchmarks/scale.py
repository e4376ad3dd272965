"""A Llama of 7 billion parameters on 8 to 1,024 processes, of which one runs without data.

Torch's fake process group stands for the other processes, and fake tensors for the values. The
engine, the update and the plan of a save are those of a run. Pipelines run on processes of this
machine, see `benchmarks.pipeline`.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import pipeline
from benchmarks.ddp import run_on_processes
from benchmarks.report import Column, Result, Row, Unavailable, say
from benchmarks.timing import is_chosen, quartiles
from trainer import TrainModule
from trainer.checkpoint.parts import StatePart, shards_part, tree_part
from trainer.checkpoint.sharded_state import Shards
from trainer.cli.estimate_memory.footprint import bytes_of
from trainer.cli.estimate_memory.sharding import (
    Layout,
    fake_group,
    fake_tensors,
    give_fake_tensors,
)
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.base import Engine
from trainer.optim.state import state_of
from trainer.tree import map_tree

REPEATS = 5
TOKENS = 4096  # of one sequence on each data-parallel rank
LLAMA: dict[
    str, int
] = {}  # the sizes of transformers' configuration, whose defaults have 7 billion
PROCESSES = (8, 64, 256, 1024)
WIDE = 8  # processes of a machine
COLUMNS = (
    Column("parameters", "parameters, GB", 3),
    Column("gradients", "gradients, GB", 3),
    Column("optimizer", "AdamW, GB", 3),
    Column("file", "file, GB", 3),
    Column("files", "files", 0),
    Column("all-gather", "all-gathers", 0),
    Column("reduce-scatter", "reduce-scatters", 0),
    Column("all-reduce", "all-reduces", 0),
    Column("sent", "messages, GB"),
    Column("plan", "plan, CPU ms"),
    *pipeline.COLUMNS,
)
# In an operator's name without underscores; the first that is found counts.
_KINDS = re.compile("allgather|reducescatter|allreduce|alltoall|broadcast|gather|scatter|reduce")
_NAMES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}


def layouts() -> dict[str, list[Layout]]:
    """Return the layouts by group, in the order of the number of processes."""
    return {
        "FSDP": [Layout(shard=size) for size in PROCESSES],
        f"HSDP, {WIDE} processes to a replica": [
            Layout(replicate=size // WIDE, shard=WIDE) for size in PROCESSES if size > WIDE
        ],
        f"FSDP, and layers split over {WIDE} processes": [
            Layout(shard=size // WIDE, tp=WIDE) for size in PROCESSES
        ],
    }


def _name(layout: Layout, rank: int) -> str:
    return f"{layout.processes:,} processes, rank {rank:,}"


def names() -> list[str]:
    """Return the names of all rows."""
    found = [_name(one, rank) for each in layouts().values() for one in each for rank in _ends(one)]
    return [*dict.fromkeys(found), *pipeline.names()]


def _ends(layout: Layout) -> tuple[int, int]:
    return 0, layout.processes - 1


class Messages(TorchDispatchMode):
    """Counts the collectives inside, and the bytes of the largest buffer of each.

    Attributes:
        number: The number of collectives by kind.
        bytes: The bytes by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators of local tensors, and collectives, first
        result = func(*args, **(kwargs or {}))
        known = _KINDS.search(func.name().replace("_", ""))
        if func.namespace in ("c10d", "_c10d_functional") and known is not None:
            kind = _NAMES.get(known[0], known[0])
            self.number[kind] += 1
            self.bytes[kind] += max(map(_nbytes, (*args, result)))
        return result


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0


class Language(TrainModule):
    """A language model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of the tokens."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


def train(engine: Engine, fake: Any) -> tuple[TrainModule, torch.optim.Optimizer, Messages]:
    """Run the first update, as the Trainer does in ``mixed_precision="bf16"`` with clipping."""
    with torch.device("meta"):
        module = Language()
    give_fake_tensors(module, fake)
    engine.start(module, StepSync(engine.options.device))
    optimizer = engine.prepare_optimizer(module.configure_optimizers())
    engine.begin_epoch()
    messages = Messages()
    with fake, messages:
        engine.begin_micro_batch(sync=True)
        batch = torch.zeros(1, TOKENS, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine.forward("training_step", batch, 0)
        engine.backward(loss)
        engine.gradients.clip_grad_norm_(module.parameters(), 1.0)
    with messages:  # of values that the host reads
        engine.sync_stats(StepStats(TOKENS, 0.0, 0.0, 0.0, 0.0))
    optimizer.step()
    return module, optimizer, messages


def plan(weights: Mapping[str, Tensor], state: Any, engine: Engine) -> StatePart:
    """Return this process's file of a checkpoint, not yet written."""
    shards = Shards(engine.options.rank, engine.parallel.mesh)
    shards.add_weights(weights)
    tree_part(state, "optimizer", shards)
    return shards_part(shards)


def _with_memory(tensor: Any) -> Any:
    """Return a sharded tensor whose part has memory, of which no page is ever used."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = torch.empty(tensor.to_local().shape, dtype=tensor.dtype)
    how = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, **how)


def measure(layout: Layout, rank: int, repeats: int) -> Row:
    """Return the figures of one process."""
    with fake_group(rank, layout.processes):
        engine = layout.engine(rank, "bf16")
        module, optimizer, messages = train(engine, fake_tensors())
        trained = [p for p in module.parameters() if p.grad is not None]
        moments = [t for s in optimizer.state.values() for t in s.values()]
        weights = map_tree(_with_memory, module.state_dict())
        state = map_tree(_with_memory, [state_of(optimizer, [module])])
        seconds = []
        for _ in range(repeats):
            begin = time.process_time()
            part = plan(weights, state, engine)
            seconds.append(1e3 * (time.process_time() - begin))
        sizes = {
            "parameters": bytes_of(module.parameters()),
            "gradients": bytes_of(p.grad for p in trained if p.grad is not None),
            "optimizer": bytes_of(moments),
            "file": part.size,
            "sent": messages.bytes.total(),
        }
        return Row(
            name=_name(layout, rank),
            values={
                **dict.fromkeys(_NAMES.values(), 0.0),
                **{kind: float(number) for kind, number in messages.number.items()},
                **{f"{kind}, GB": size / 1e9 for kind, size in messages.bytes.items()},
                **{key: size / 1e9 for key, size in sizes.items()},
                "files": float(layout.processes // layout.replicate),
                "plan": quartiles(seconds),
            },
            samples={"plan": seconds},
        )


def run(options: Namespace) -> Result:
    """Run the benchmark.

    Raises:
        Unavailable: Transformers is not installed.
    """
    try:
        from transformers import LlamaConfig
    except ImportError:
        raise Unavailable("scale needs the model: pip install transformers") from None
    rows = []
    for group, each in layouts().items():
        for layout in each:
            for rank in _ends(layout):
                if is_chosen(_name(layout, rank), options.rows):
                    say(f"{group}: {_name(layout, rank)}")
                    rows.append(measure(layout, rank, options.repeats))
                    rows[-1].group = group
    if any(is_chosen(name, options.rows) for name in pipeline.names()):
        processes = {"processes": pipeline.PROCESSES, "steps": 1}
        rows += run_on_processes("pipeline", Namespace(**{**vars(options), **processes})).rows
    with torch.device("meta"):
        number = sum(p.numel() for p in Language().parameters())
    return Result(
        benchmark="scale",
        title=(
            f"One process of many: a Llama of {number / 1e9:.3g} billion parameters in float32, "
            f"computed in bfloat16, AdamW, one sequence of {TOKENS:,} tokens"
        ),
        columns=COLUMNS,
        rows=rows,
        settings={"repeats": options.repeats, "layers": LlamaConfig(**LLAMA).num_hidden_layers},
        notes=[
            "GB are 1e9 bytes. Files are those with sharded tensors, of one size on the processes "
            "of a replica that write; 0 GB: this process writes none. Messages are those of an "
            "update, each with the bytes of its largest buffer.",
            f"Stages of layers are those of {pipeline.PROCESSES} processes of this machine, with a "
            f"model of {pipeline.LAYERS} layers that wait {1e3 * pipeline.SECONDS:g} ms in forward "
            "and twice that in backward. Idle is the share of a step in which no layer of a "
            "process runs, its messages included; bubble is (p - 1) / (v m + p - 1), for p "
            "processes, m micro-batches and v stages a process, what a schedule cannot avoid. "
            "Activations are the most that the layers of a process have kept for backward.",
        ],
    )
