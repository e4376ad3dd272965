"""Tokens per second of a compiled transformer of 124 million parameters in bf16, on one device."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import contestants, peers
from benchmarks.arguments import BACKEND, backend
from benchmarks.gpt import TINY, Gpt, Size, Task, flops_per_token
from benchmarks.report import Column, Result, Row, Unavailable
from benchmarks.timing import Contender, Lap, chosen, quartiles, take_turns, unseen
from callbacks import Callback
from callbacks.device_peaks import peak_flops

STEPS, REPEATS = 60, 3
TRACE = Path("runs/transformer-trace.json")  # too large to be kept beside the results
TRACED = 10  # steps in the trace
COLUMNS = (
    Column("tokens", "tokens/s", 0),
    Column("ratio", "×", 3),
    Column("mfu", "MFU, %"),
    Column("step", "step, ms", 2),
    Column("peak", "device memory, MB", 0),
)
PEERS = ("Accelerate", "Lightning Fabric", "Lightning, defaults")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="train a small model on the CPU, to check that everything works",
    )
    parser.add_argument(
        "--backend", type=backend, default=BACKEND, help="the backend of torch.compile"
    )


def by_hand(task: Task) -> None:
    """Train with PyTorch alone, in bf16, from pinned memory."""
    model, optimizer = task.model, task.optimizer()
    model.train()
    for batch in task.loader:
        moved = [each.to(task.device, non_blocking=True) for each in batch]
        with torch.autocast(task.device, torch.bfloat16):
            loss = task.loss(model, moved)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(task: Task, *, callbacks: tuple[Callback, ...] = ()) -> None:
    """Train with a default `Trainer`, without the final checkpoint, which is not timed anyway."""
    contestants.defaults(task, checkpointing=False, callbacks=callbacks)


def turn(
    make: Callable[[], Task], train: Callable[[Task], None], name: str, peaks: dict[str, float]
) -> Lap:
    """Make one turn, and record by how many MB it raised the device memory at its peak."""
    torch.compiler.reset()  # torch stops recompiling code that it has compiled a few times
    before = 0
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    task = make()
    train(task)
    if torch.cuda.is_initialized():
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return task.lap()


def rows(make: Callable[..., Task], peaks: dict[str, float]) -> list[Contender]:
    """Return the contenders, the reference first; each records its peak device memory."""
    ours: dict[str, Callable[[Task], None]] = {
        "PyTorch loop by hand": by_hand,
        "Cadence Trainer": with_trainer,
        "Cadence Accelerator": contestants.own_loop,
    }
    return [
        Contender(name=name, run=partial(turn, make, train, name, peaks))
        for name, train in ours.items()
    ] + [
        Contender(
            name=peer.name, run=partial(turn, make, peer.train, peer.name, peaks), needs=peer.needs
        )
        for peer in peers.PEERS
        if peer.name in PEERS
    ]


def names() -> list[str]:
    """Return the names of all rows."""
    return [contender.name for contender in rows(Task, {})]


class Trace(Callback):
    """Trace some steps after the first ones.

    Args:
        path: The file to write.
        first: The update after which the trace begins.
        steps: The number of steps to trace.
    """

    def __init__(self, path: Path, first: int, steps: int) -> None:
        self.path, self.first, self.last = path, first, first + steps
        self.profiler = torch.profiler.profile(acc_events=True)  # without, torch warns

    def on_boundary(self, trainer: Any, module: Any) -> None:
        """Begin or end the trace if due."""
        if trainer.global_step == self.first:
            self.profiler.start()
        elif trainer.global_step == self.last:
            self.end()

    def end(self) -> None:
        """End the trace, and write it."""
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.path))


def overlap(trace: dict[str, Any]) -> float | None:
    """Return the share of host-to-device copy time overlapped by kernels; None without copies.

    Args:
        trace: A trace as exported by torch.profiler.
    """

    def spans(category: str, text: str) -> list[tuple[float, float]]:
        return [
            (event["ts"], event["ts"] + event["dur"])
            for event in trace["traceEvents"]
            if event.get("cat") == category and text in event.get("name", "")
        ]

    copies, kernels = spans("gpu_memcpy", "HtoD"), merged(spans("kernel", ""))
    whole = sum(end - begin for begin, end in copies)
    if not whole:
        return None
    covered = sum(
        max(0.0, min(end, kernel_end) - max(begin, kernel_begin))
        for begin, end in copies
        for kernel_begin, kernel_end in kernels
    )
    return covered / whole


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping and touching spans: kernels may run in parallel."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def trace_of(make: Callable[..., Task], path: Path, steps: int) -> dict[str, Any]:
    """Train, trace the last steps but one, and return the trace."""
    number = min(TRACED, steps - 2)
    torch.compiler.reset()
    path.parent.mkdir(parents=True, exist_ok=True)
    with unseen():
        with_trainer(make(), callbacks=(Trace(path, steps - 1 - number, number),))
    return json.loads(path.read_text())


def run(options: Namespace) -> Result:
    """Run the benchmark.

    Raises:
        Unavailable: There is no CUDA device, and the tiny model was not asked for.
    """
    if not (options.tiny or torch.cuda.is_available()):
        raise Unavailable(
            "The transformer of 124 million parameters needs a CUDA device, and torch finds none. "
            "--tiny trains a small one on the CPU, to check that everything works."
        )
    device = "cpu" if options.tiny else "cuda"
    size = TINY if options.tiny else Size()
    make = partial(Task, options.steps, size, device=device, backend=options.backend)
    peaks: dict[str, float] = {}
    contenders = chosen(rows(make, peaks), options.rows)
    # kernels differ in rounding, so the losses are compared and not the bits of the weights
    agree = partial(math.isclose, rel_tol=0.02)
    found = take_turns(contenders, options.repeats, unit=1e-3, agree=agree)
    share = overlap(trace_of(make, TRACE, options.steps))
    notes = ["All rows with figures reached the same loss within 2 %."]
    if share is not None:
        notes.append(
            f"Kernels ran during {share:.0%} of the time of Cadence's copies to the device."
        )
    return Result(
        benchmark="transformer" if not options.tiny else "transformer-tiny",
        title=f"Training a transformer in bf16, compiled, {size.batch} × {size.context} tokens",
        columns=COLUMNS,
        rows=[in_tokens(row, size, device, peaks) for row in found],
        settings={
            "steps": options.steps,
            "repeats": options.repeats,
            "parameters": sum(p.numel() for p in Gpt(size).parameters()),
            "backend": options.backend,
        },
        notes=notes,
    )


def in_tokens(row: Row, size: Size, device: str, peaks: dict[str, float]) -> Row:
    """Convert a row of times to a row of speeds."""
    if row.void is not None:
        return row
    with torch.device("meta"):
        per_token = flops_per_token(Gpt(size), size)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = peak_flops(name, torch.bfloat16)
    tokens = [1e3 * size.batch * size.context / each for each in row.samples["wall"]]
    samples = {
        "tokens": tokens,
        "ratio": [1 / each for each in row.samples["wall_ratio"]],
        "step": row.samples["wall"],
    }
    if peak is not None:
        samples["mfu"] = [100 * each * per_token / peak for each in tokens]
    values: dict[str, Any] = {key: quartiles(each) for key, each in samples.items()}
    if row.name in peaks:
        values["peak"] = peaks[row.name]
    return Row(name=row.name, values=values, samples=samples)
