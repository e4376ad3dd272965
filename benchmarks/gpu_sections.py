"""The sections of ``python -m benchmarks gpu``, by value; each has a process of its own.

All run on the CPU too, small, to check that they work: see ``--dry-run``.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import batch_norm, cross_entropy
from torch.nn.modules._functions import SyncBatchNorm as SyncedStatistics
from torch.utils.data import DataLoader

from benchmarks import contestants, overhead, peers, task, transformer
from benchmarks.checkpoint import WAYS, AtTheBoundary
from benchmarks.checkpoint import turn as save_once
from benchmarks.gpt import TINY, Block, Gpt, Size
from benchmarks.gpt import Task as GptTask
from benchmarks.report import Column, Result, Row, Unavailable, say
from benchmarks.timing import MICROSECONDS, Clock, Contender, Lap, quartiles, unseen
from callbacks import Callback
from trainer import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    Trainer,
    TrainModule,
)
from trainer.configuration import TorchDynamoPlugin
from trainer.engines.ddp import DataParallel, Replicas
from trainer.engines.fsdp import FullyShard
from trainer.state import AcceleratorState

NO_TIME = "not measured: the time was over"
LEAST = 10.0  # seconds, below which no turn is begun
NEEDS_CUDA = "Device memory is measured on CUDA alone."


@dataclass(kw_only=True)
class Run:
    """One run of a section.

    Attributes:
        device: ``"cuda"``; ``"cpu"`` to check that it works.
        tiny: Take small sizes and few steps.
        ends: When it must have ended, by `time.time`.
        keep: Keeps a result that is not whole yet, in case the process is ended.
        folder: Where it may write large files.
    """

    device: str
    tiny: bool
    ends: float
    keep: Callable[[Result], object]
    folder: Path

    @property
    def left(self) -> float:
        """Seconds until it must have ended."""
        return self.ends - time.time()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def of(self, full: int, tiny: int) -> int:
        """Return a number of steps."""
        return tiny if self.tiny else full

    def size(self) -> Size:
        """Return the size of the transformer."""
        return TINY if self.tiny else Size()


def first_line(error: BaseException) -> str:
    """Return an error in a line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next(iter(str(error).strip().splitlines()), "")
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {line[:300]}{where}"


def attempt(row: Row, measure: Callable[[], dict[str, Any]]) -> Row:
    """Fill in a row; an error of one becomes its text, since the other rows are to be measured.

    Raises:
        torch.OutOfMemoryError: See `halving`.
    """
    try:
        row.values = measure()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of a peer, of CUDA, of a compiler: anything
        traceback.print_exc()
        row.void = first_line(error)
    return row


def halving(run: Run, measure: Callable[[Size, list[str]], Result]) -> Result:
    """Measure with the transformer's batch, and where that is too large, with half of it."""
    size, notes = run.size(), list[str]()
    while True:
        try:
            return measure(size, notes)
        except torch.OutOfMemoryError as error:
            if size.batch == 1:
                raise
            say(first_line(error))
        size = replace(size, batch=size.batch // 2)
        notes.append(f"Out of memory: the batch was halved to {size.batch}.")
        clean(run)


def clean(run: Run) -> None:
    """Free what earlier turns have left."""
    gc.collect()
    if run.device == "cuda":
        torch.cuda.empty_cache()


def rounds(
    run: Run,
    contenders: Sequence[Contender],
    repeats: int,
    finish: Callable[[list[Row]], Result],
    *,
    warm_up: int = 0,
    unit: float = 1e-3,
    agree: Callable[[Any, Any], bool],
) -> Result:
    """Run the contenders in rounds, as `take_turns`; one that fails, or the time, stops no other.

    Each turn's steps before the clock are its warm-up, so that by default all rounds count.

    Args:
        run: The run of the section.
        contenders: The first one is the reference. If it fails, the others are not run.
        repeats: The number of rounds.
        finish: Makes the result of the rows; it is kept after each turn.
        warm_up: How many of the rounds do not count, but where the time suffices for no more.
        unit: The unit of the figures, in seconds.
        agree: Returns whether two outcomes are the same.
    """
    laps: dict[str, list[Lap]] = {each.name: [] for each in contenders}
    latest: dict[str, float] = {}
    errors = {
        each.name: f"not installed: {', '.join(each.missing)}"
        for each in contenders
        if each.missing
    }
    result = finish(_rows(contenders, laps, errors, warm_up, unit, agree))
    for number in range(repeats):
        at = number % len(contenders)
        for contender in (*contenders[at:], *contenders[:at]):
            name = contender.name
            # The first turns compile; what they have compiled later ones find in the cache.
            usual = min(latest[name], statistics.median(latest.values())) if name in latest else 0.0
            if name in errors or max(1.2 * usual, LEAST) > run.left:
                continue
            clean(run)
            begin = time.monotonic()
            try:
                with unseen():
                    laps[name].append(contender.run())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - of a peer, of CUDA, of a compiler: anything
                say(traceback.format_exc())
                errors[name] = first_line(error)
            latest[name] = time.monotonic() - begin
            say(f"{name}: {errors.get(name, '')} {latest[name]:.1f} s")
            result = finish(_rows(contenders, laps, errors, warm_up, unit, agree))
            run.keep(result)
            if contenders[0].name in errors:
                return result
    return result


def _rows(
    contenders: Sequence[Contender],
    laps: dict[str, list[Lap]],
    errors: dict[str, str],
    warm_up: int,
    unit: float,
    agree: Callable[[Any, Any], bool],
) -> list[Row]:
    reference = laps[contenders[0].name]
    found = []
    for contender in contenders:
        row = Row(name=contender.name)
        found.append(row)
        mine = laps[contender.name]
        if contender.name in errors:
            row.void = errors[contender.name]
        elif not mine:
            row.void = NO_TIME
        elif not all(agree(lap.outcome, reference[0].outcome) for lap in mine if reference):
            row.void = "void: its outcome differs from the reference"
        else:
            begin = min(warm_up, len(mine) - 1)  # better the warm-up than nothing
            counted = mine[begin:]
            for key in ("cpu", "wall"):
                row.samples[key] = [getattr(lap, key) / unit for lap in counted]
                pairs = zip(counted, reference[begin:], strict=False)
                ratios = [getattr(a, key) / max(getattr(b, key), 1e-9) for a, b in pairs]
                if ratios:
                    row.samples[f"{key}_ratio"] = ratios
            row.values = {key: quartiles(values) for key, values in row.samples.items()}
    return found


# -- 1: tokens per second --------------------------------------------------------------------------

# Of a large model Lightning saves nothing at the end either, which is not timed anyway.
LARGE = {peer.name: peer for peer in peers.PEERS}
LARGE["Lightning, defaults"] = replace(
    LARGE["Lightning, defaults"], train=partial(peers.lightning, enable_checkpointing=False)
)


def contenders_of(
    turn: Callable[..., Lap],
    ours: dict[str, Callable[[Any], None]],
    others: Sequence[peers.Peer] = (),
) -> list[Contender]:
    """Return rows: ours, and then the peers.

    Args:
        turn: Makes a turn, given what trains and the row's name.
        ours: By name, what trains.
        others: The peers.
    """
    return [
        Contender(name=name, run=partial(turn, train, name)) for name, train in ours.items()
    ] + [
        Contender(name=peer.name, run=partial(turn, peer.train, peer.name), needs=peer.needs)
        for peer in others
    ]


def tokens(run: Run) -> Result:
    """Tokens per second and MFU of a compiled transformer in bf16."""
    return halving(run, partial(_tokens, run))


def _tokens(run: Run, size: Size, notes: list[str]) -> Result:
    backend = "eager" if run.tiny else "inductor"
    steps, peaks = run.of(40, 5), dict[str, float]()
    ours: dict[str, Callable[[Any], None]] = {
        "PyTorch loop by hand": transformer.by_hand,
        "Cadence Trainer, everything off": contestants.barebones,
        "Cadence Trainer, defaults": transformer.with_trainer,
        "Cadence Accelerator": contestants.own_loop,
    }
    others = ("Lightning, defaults", "Accelerate", "Hugging Face Trainer", "Lightning, barebones")

    def measure(backend: str) -> Result:
        make = partial(GptTask, steps, size, device=run.device, backend=backend)

        def turn(train: Callable[[Any], None], name: str) -> Lap:
            return transformer.turn(make, train, name, peaks)

        def finish(rows: list[Row]) -> Result:
            return Result(
                benchmark="tokens",
                title=f"A transformer of {_millions(size)} million parameters in bf16, compiled, "
                f"{size.batch} × {size.context} tokens",
                columns=transformer.COLUMNS,
                rows=[transformer.in_tokens(row, size, run.device, peaks) for row in rows],
                settings={"steps": steps, "repeats": 2, "backend": backend},
                notes=[*notes, "All rows with figures reached the same loss within 2 %."],
            )

        agree = partial(math.isclose, rel_tol=0.02)
        contenders = contenders_of(turn, ours, [LARGE[name] for name in others])
        return rounds(run, contenders, run.of(2, 1), finish, agree=agree)

    result = measure(backend)
    why = result.rows[0].void
    if why is not None and backend != "eager":
        notes.append(f"Compiled with eager, since inductor failed: {why}.")
        result = measure("eager")
    return result


def _millions(size: Size) -> str:
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in Gpt(size).parameters())
    return f"{number / 1e6:.3g}"


# -- 2: microseconds of the host -------------------------------------------------------------------


class SmallTask(task.Task):
    """The small perceptron on a device."""

    def __init__(self, steps: int, device: str, **settings: Any) -> None:
        super().__init__(steps, **settings)
        self.device = device
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.clock = Clock(steps, wait=wait)
        self.model.clock = self.clock
        self.bare.to(device)

    def lap(self) -> Lap:
        """Return the time per step, with the final weights, on the host."""
        return self.clock.lap(task.weights(self.bare).cpu())


def by_hand(trained: Any) -> None:
    """Train as `contestants.by_hand`, with batches that are moved to the device."""
    model, optimizer = trained.model, trained.optimizer()
    model.train()
    for batch in trained.loader:
        moved = [each.to(trained.device, non_blocking=True) for each in batch]
        loss = trained.loss(model, moved)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def host(run: Run) -> Result:
    """Microseconds of a small step, whose kernels take less time than the host."""
    torch.set_num_threads(1)
    steps, repeats = run.of(300, 8), run.of(3, 2)

    def turn(train: Callable[[Any], None], _: str) -> Lap:
        trained = SmallTask(steps, run.device)
        train(trained)
        return trained.lap()

    def finish(rows: list[Row]) -> Result:
        return Result(
            benchmark="host",
            title="Time of a step: perceptron of 2,762 parameters, 8 samples, copied to the device",
            columns=MICROSECONDS,
            rows=rows,
            settings={"steps": steps, "repeats": repeats - 1},
            notes=["All rows with figures reached the same weights, to 0.001."],
        )

    ours = overhead.OURS | {"PyTorch loop by hand": by_hand}
    contenders = contenders_of(turn, ours, peers.PEERS)
    return rounds(run, contenders, repeats, finish, warm_up=1, unit=1e-6, agree=task.nearly_equal)


# -- 3: what synchronises --------------------------------------------------------------------------


@contextmanager
def process_group(run: Run) -> Iterator[None]:
    """A process group of this process alone: NCCL on CUDA, else gloo."""
    device = torch.device("cuda", torch.cuda.current_device()) if run.device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if device is None else "nccl",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
            device_id=device,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


class Strict(Callback):
    """Sets torch's mode for what synchronises, from the third update to the twelfth."""

    runs_last = True

    def __init__(self, set_mode: Callable[[str], object], mode: str) -> None:
        self.set_mode, self.mode = set_mode, mode

    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        """Set it."""
        if trainer.global_step == 2:
            self.set_mode(self.mode)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        """Put it back."""
        if trainer.global_step == 12:
            self.set_mode("default")


def sharding(units: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """Return the settings that shard a model on one process, which else needs no engine."""
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=units)
    return {"engine": FullyShard, "fsdp_plugin": plugin}


def is_layer(part: nn.Module) -> bool:
    """Return whether a layer of the perceptron is a unit: all but the last one."""
    return isinstance(part, nn.Linear) and part.out_features > 10


def waits(loop: Callable[[str], None], set_mode: Callable[[str], object]) -> Counter[str]:
    """Return where a loop waits for the device, and how often; nowhere if torch raises nothing.

    Args:
        loop: Trains with a mode of ``torch.cuda.set_sync_debug_mode``.
        set_mode: Sets it.
    """
    try:
        with unseen():
            loop("error")
        return Counter()
    except Exception as error:  # noqa: BLE001 - what a wait breaks may raise something else
        first = error
    finally:
        set_mode("default")
    with warnings.catch_warnings(record=True) as caught, unseen():
        warnings.simplefilter("always")
        try:
            loop("warn")
        finally:
            set_mode("default")
    found = [each for each in caught if "called a synchronizing" in str(each.message)]
    if not found:
        raise first
    return Counter(f"{'/'.join(Path(e.filename).parts[-3:])}:{e.lineno}" for e in found)


def syncs(run: Run) -> Result:
    """What waits for the device in ten steps of each engine, which is to be nothing."""
    notes: list[str] = []
    set_mode = torch.cuda.set_sync_debug_mode if run.device == "cuda" else len

    def trainer(mode: str, **settings: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            contestants.defaults(
                _bf16_task(run, 16),
                callbacks=[Strict(set_mode, mode)],
                max_grad_norm=1.0,
                log_every=4,
                checkpointing=False,
                project_dir=f"{folder}/run",
                **settings,
            )

    def own_loop(mode: str, **settings: Any) -> None:
        AcceleratorState._reset_state()
        trained = _bf16_task(run, 16)
        accelerator = Accelerator(
            cpu=run.device == "cpu",
            mixed_precision="bf16",
            dataloader_config=DataLoaderConfiguration(non_blocking=True),
            **settings,
        )
        model, optimizer, loader = accelerator.prepare(
            trained.model, trained.optimizer(), trained.whole
        )
        for step, batch in enumerate(loader):
            if step in (2, 12):
                set_mode(mode if step == 2 else "default")
            with accelerator.autocast():
                loss = trained.loss(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def measure(loop: Callable[..., None], settings: dict[str, Any], name: str) -> dict[str, Any]:
        places = waits(partial(loop, **settings), set_mode)
        listed = ", ".join(f"{place} ({number})" for place, number in places.most_common(20))
        if places:
            notes.append(f"{name} waits at {listed}.")
        return {"waits": places.total()}

    shards = sharding(is_layer)
    kinds: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
        "Trainer": (trainer, {}),
        "Trainer, DDP": (trainer, {"engine": DataParallel}),
        "Trainer, FSDP2": (trainer, shards),
        "Accelerator": (own_loop, {}),
        "Accelerator, DDP": (own_loop, {"engine": Replicas}),
        "Accelerator, FSDP2": (own_loop, shards),
    }
    result = Result(
        benchmark="syncs",
        title="Calls that wait for the device in ten steps in bf16, clipped, with records",
        columns=[Column("waits", "waits", 0)],
        rows=[],
        settings={"device": run.device},
        notes=notes,
    )
    with process_group(run):
        for name, (loop, settings) in kinds.items():
            row = attempt(Row(name=name), partial(measure, loop, settings, name))
            result.rows.append(row)
            run.keep(result)
    if run.device == "cpu":
        notes.append("Waits are found on CUDA alone.")
    return result


def _bf16_task(run: Run, steps: int) -> SmallTask:
    trained = SmallTask(steps, run.device, optimizer="adamw", hidden=(256, 256))
    trained.precision = "bf16"
    trained.whole = DataLoader(trained.dataset, task.BATCH, pin_memory=run.device == "cuda")
    return trained


# -- 4: copies behind kernels ----------------------------------------------------------------------

WIDTH = 2048


class Wide(nn.Module):
    """One layer many times, so that a step takes longer than reading and copying its batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.times = run.of(10, 2)
        self.layer = nn.Linear(run.of(WIDTH, 32), run.of(WIDTH, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for _ in range(self.times):
            x = self.layer(x)
        return x.square().mean()


class WideTask:
    """Batches of 64 MB, read by workers into pinned memory."""

    precision, backend = "no", None

    def __init__(self, run: Run, steps: int, workers: int) -> None:
        self.device = run.device
        self.clock = Clock(steps, skip=steps // 3, wait=run.wait)
        rows = run.of(8192, 8)
        torch.manual_seed(0)
        self.bare = Wide(run).to(run.device)
        self.model = task.Ticking(self.bare, self.clock)
        data = torch.ones(1, run.of(WIDTH, 32)).expand(steps * rows, -1)  # takes no memory itself
        self.loader = self.whole = DataLoader(
            task.BatchedTensors(data),
            batch_size=rows,
            num_workers=workers,
            pin_memory=run.device == "cuda",
            collate_fn=task.as_it_is,
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.bare.parameters(), lr=1e-6)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss; the model may be wrapped."""
        return model(batch[0])


def _copied_by_hand(trained: Any, trace: Any = None) -> None:
    """Train by hand; a trace has the steps that it has of the Trainer."""
    steps, inner = iter(range(trained.clock.steps)), trained.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        step = next(steps)
        if trace is not None and step == trace.first:
            trace.profiler.start()
        elif trace is not None and step == trace.last:
            trace.end()
        return inner(model, batch)

    trained.loss = loss
    by_hand(trained)


def _copied_ahead(trained: Any, trace: Any = None) -> None:
    callbacks = [] if trace is None else [trace]
    contestants.defaults(trained, log_with=None, checkpointing=False, callbacks=callbacks)


def _workers(run: Run) -> int:
    """Return the number of workers, whose batches are in shared memory; 0 where that is small."""
    shared = Path("/dev/shm")
    if run.tiny:
        return 1
    return 4 if shared.exists() and shutil.disk_usage(shared).free > 2e9 else 0


def copies(run: Run) -> Result:
    """Share of the copies to the device that kernels hide, and the time of a step."""
    steps, workers = run.of(24, 6), _workers(run)
    result = Result(
        benchmark="copies",
        title=f"Batches of 64 MB, read by {workers} workers into pinned memory",
        columns=[Column("step", "step, ms", 2), Column("hidden", "copies behind kernels, %", 0)],
        rows=[],
        settings={"steps": steps, "workers": workers},
    )

    def measure(train: Callable[..., None]) -> dict[str, Any]:
        trained, traced = (WideTask(run, steps, workers) for _ in range(2))
        path, number = run.folder / "copies-trace.json", run.of(10, 2)
        with unseen():
            train(trained)
            train(traced, transformer.Trace(path, steps - number - 2, number))
        share = transformer.overlap(json.loads(path.read_text()))
        hidden = {} if share is None else {"hidden": 100 * share}
        return {"step": 1e3 * trained.clock.lap().wall} | hidden

    kinds = {
        "by hand, on the stream that computes": _copied_by_hand,
        "Cadence Trainer": _copied_ahead,
    }
    for name, train in kinds.items():
        result.rows.append(attempt(Row(name=name), partial(measure, train)))
        run.keep(result)
    if not any("hidden" in row.values for row in result.rows):
        result.notes = ["The trace has no copies to a device."]
    return result


# -- 5: memory -------------------------------------------------------------------------------------


def memory(run: Run) -> Result:
    """Peak of device memory against the loop by hand, uncompiled."""
    return halving(run, partial(_memory, run))


def _memory(run: Run, size: Size, notes: list[str]) -> Result:
    steps = run.of(6, 3)
    ours: dict[str, Callable[[Any], None]] = {
        "PyTorch loop by hand": transformer.by_hand,
        "Cadence Trainer, everything off": contestants.barebones,
        "Cadence Trainer, defaults": transformer.with_trainer,
        "Cadence Accelerator": contestants.own_loop,
    }
    peaks: dict[str, float] = {}

    def turn(train: Callable[[Any], None], name: str) -> Lap:
        make = partial(GptTask, steps, size, device=run.device, backend=None)
        return transformer.turn(make, train, name, peaks)

    def finish(rows: list[Row]) -> Result:
        for row in rows:
            row.samples, row.values = {}, {}
            if row.void is None and row.name in peaks:
                peak = peaks[row.name]
                row.values = {"peak": peak, "ratio": peak / peaks[rows[0].name]}
        return Result(
            benchmark="memory",
            title=f"Peak of device memory, {size.batch} × {size.context} tokens in bf16, "
            "uncompiled",
            columns=[Column("peak", "peak, MB"), Column("ratio", "×", 4)],
            rows=rows,
            settings={"steps": steps},
            notes=notes if run.device == "cuda" else [*notes, NEEDS_CUDA],
        )

    others = ("Lightning, defaults", "Accelerate", "Hugging Face Trainer")
    contenders = contenders_of(turn, ours, [LARGE[name] for name in others])
    turn(transformer.by_hand, "workspaces of cuBLAS, which stay")
    return rounds(run, contenders, 1, finish, agree=partial(math.isclose, rel_tol=0.02))


# -- 6: saving -------------------------------------------------------------------------------------


class Watch(Callback):
    """Saves once in the background, and notes the end of each step and whether the save is there.

    Args:
        run: The run of the section.
        path: Where it is saved.
        at: The update after which it is.
    """

    def __init__(self, run: Run, path: Path, at: int) -> None:
        self.run, self.path, self.at = run, path, at
        self.ends: list[tuple[float, bool]] = []

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Note the time; save if it is due."""
        self.run.wait()
        self.ends.append((time.perf_counter(), self.path.exists()))
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path, background=True)
            self.run.wait()
            self.saved = time.perf_counter()

    def values(self) -> dict[str, float]:
        """Return the times of steps before the save and beside it, in ms."""
        before = [at for at, _ in self.ends[: self.at]]
        found = {"step": _step(before[len(before) // 2 :])}
        beside = [self.saved, *(at for at, there in self.ends[self.at :] if not there)]
        if len(beside) > 1:
            found["beside"] = _step(beside)
        return found


def _step(ends: Sequence[float]) -> float:
    return 1e3 * (ends[-1] - ends[0]) / max(1, len(ends) - 1)


class Saves:
    """What is measured of saves.

    Args:
        run: The run of the section.
        size: The size of the transformer.
        repeats: How many saves; the first one allocates what later ones reuse, and does not count.
    """

    WAYS = ("torch.save", "torch.save, synced", "Cadence, waiting", "Cadence, in the background")

    def __init__(self, run: Run, size: Size, repeats: int) -> None:
        self.run, self.size, self.repeats = run, size, repeats
        self.times: dict[str, list[dict[str, float]]] = {name: [] for name in self.WAYS}
        self.beside: dict[str, float] = {}
        self.peer = Row(name="Lightning, Trainer.save_checkpoint", void=NO_TIME)

    def fit(self, steps: int, folder: Path, callback: Callback) -> None:
        """Train with a callback that saves."""
        with unseen():
            contestants.defaults(
                GptTask(steps, self.size, device=self.run.device, backend=None),
                callbacks=[callback],
                checkpointing=False,
                log_with=None,
                project_dir=folder,
            )

    def save(self, folder: Path, trainer: Trainer) -> None:
        """Save in all ways, after the second update."""
        if trainer.global_step != 2:
            return
        ways = {name: WAYS[name](trainer) for name in self.WAYS}
        for number in range(self.repeats):
            for name, way in ways.items():
                if self.run.left > 15:
                    self.run.wait()
                    self.times[name].append(save_once(way, folder / f"save-{number}"))
            self.run.keep(self.result())

    def rows(self) -> list[Row]:
        """Return the rows of what was measured so far."""
        rows = []
        for name, turns in self.times.items():
            row = Row(name=name)
            rows.append(row)
            if not turns:
                row.void = NO_TIME
                continue
            for key in ("stall",) if name == "torch.save" else ("stall", "total"):
                row.samples[key] = [each[key] for each in turns[1:] or turns]
            row.values = {key: quartiles(values) for key, values in row.samples.items()}
        if rows[-1].void is None:
            rows[-1].values |= self.beside
        return [*rows, self.peer]

    def result(self) -> Result:
        """Return what was measured so far."""
        size = 3 * 4 * float(_millions(self.size))
        return Result(
            benchmark="saving",
            title=f"A save of {size:,.0f} MB: the weights of a transformer, and AdamW's state",
            columns=[
                Column("stall", "training waits, ms"),
                Column("total", "until on disk, ms"),
                Column("step", "step, ms", 2),
                Column("beside", "step beside the save, ms", 2),
            ],
            rows=self.rows(),
            settings={"repeats": self.repeats - 1},
            notes=[
                "Plain torch.save returns before anything is on disk; Cadence syncs and hashes.",
                "Lightning's ModelCheckpoint calls save_checkpoint of its Trainer, without a sync.",
            ],
        )


def saving(run: Run) -> Result:
    """How long training waits for a save of the transformer with AdamW, and what it takes."""
    size = TINY if run.tiny else replace(Size(), batch=8)
    saves = Saves(run, size, run.of(3, 2))
    with tempfile.TemporaryDirectory(dir=run.folder) as made:
        folder = Path(made)
        saves.fit(4, folder / "run", AtTheBoundary(partial(saves.save, folder)))
        clean(run)
        watch = Watch(run, folder / "beside", run.of(8, 3))
        saves.fit(run.of(80, 8), folder / "run-beside", watch)
        saves.beside = watch.values()
        shutil.rmtree(folder / "beside")
        run.keep(saves.result())
        clean(run)
        if find_spec("lightning") is None:
            saves.peer.void = "not installed: lightning"
        else:
            saves.peer.void = None
            attempt(saves.peer, partial(_lightnings_save, run, size, folder))
    return saves.result()


def _lightnings_save(run: Run, size: Size, folder: Path) -> dict[str, Any]:
    from lightning.pytorch.callbacks import Callback as TheirCallback

    found: list[float] = []

    class Timer(TheirCallback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            run.wait()
            begin = time.perf_counter()
            trainer.save_checkpoint(folder / "lightning.ckpt")
            found.append(1e3 * (time.perf_counter() - begin))

    with unseen():
        peers.lightning(
            GptTask(4, size, device=run.device, backend=None),
            callbacks=[Timer()],
            enable_checkpointing=False,
        )
    return {"stall": quartiles(found[1:])}


# -- 7: FSDP2 on one device ------------------------------------------------------------------------


class ShardedTask(SmallTask):
    """The perceptron, sharded in place by whoever trains it."""

    def lap(self) -> Lap:
        """Return the time per step, with the whole final weights, on the host."""
        parts = [_whole(each.detach()).flatten().cpu() for each in self.bare.parameters()]
        return self.clock.lap(torch.cat(parts))


class ShardedGpt(GptTask):
    """The transformer, sharded in place by whoever trains it."""

    def __init__(self, steps: int, size: Size, **settings: Any) -> None:
        super().__init__(steps, size, **settings)
        self.size = size

    def trained(self) -> nn.Module:
        """Return a model with the whole final weights."""
        with torch.device(self.device):
            model = Gpt(self.size)
        model.load_state_dict({name: _whole(each) for name, each in self.bare.state_dict().items()})
        return model


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_block(part: nn.Module) -> bool:
    """Return whether a part of the transformer is a unit."""
    return isinstance(part, Block)


def sharded_by_hand(trained: Any) -> None:
    """Train with the loop of PyTorch's FSDP2 tutorial, in bf16."""
    policy = FullyShardedDataParallelPlugin().policy("bf16")
    mesh = init_device_mesh(trained.device, (1,))
    for block in trained.bare.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model = fully_shard(trained.model, mesh=mesh, mp_policy=policy)
    optimizer = trained.optimizer()
    model.train()
    for batch in trained.loader:
        moved = [each.to(trained.device, non_blocking=True) for each in batch]
        with torch.autocast(trained.device, torch.bfloat16):
            loss = trained.loss(model, moved)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Resumed(TrainModule):
    """A perceptron with dropout, whose runs are compared bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(task.perceptron((256, 256)))
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        self.calls += 1
        return cross_entropy(self.net(self.dropout(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def resumed_weights(
    run: Run, steps: int, folder: Path, *, before: int = 0, **settings: Any
) -> Tensor:
    """Train to a step, from the checkpoint in the folder if steps were made before."""
    AcceleratorState._reset_state()
    torch.manual_seed(3)
    module, data = Resumed(), task.Task(16).dataset
    trainer = Trainer(
        max_steps=steps,
        max_epochs=10,
        seed=4,
        deterministic=True,
        cpu=run.device == "cpu",
        mixed_precision="bf16",
        progress_bar=False,
        project_dir=folder,
        **settings,
    )
    with unseen():
        trainer.fit(module, DataLoader(data, task.BATCH, shuffle=True), ckpt_path="auto")
    if module.calls != steps - before:
        raise RuntimeError(f"{module.calls} steps were made, but not the last {steps - before}.")
    return torch.cat([_whole(each.detach()).flatten().cpu() for each in module.parameters()])


def fsdp(run: Run) -> Result:
    """FSDP2 on one device: equal numbers, resumed bit for bit, tokens per second and memory."""
    notes, failed = list[str](), list[Row]()

    def compare(what: str, measure: Callable[[], dict[str, Any]], within: float) -> None:
        row = attempt(Row(name=what), measure)
        if row.void is None:
            differing, largest = row.values["differing"], row.values["largest"]
            text = f"{differing} weights differ, by at most {largest:.1e}"
            notes.append(f"{what}: {text if differing else 'the same bits'}.")
            if largest <= within:
                return
            row.void, row.values = text, {}
        failed.append(row)

    with process_group(run):
        # First what is deterministic: torch reads the setting of cuBLAS at its first product.
        for name, settings in (("One device", {}), ("FSDP2", sharding(is_layer))):
            compare(f"{name}, resumed and uninterrupted", partial(_resumes, run, settings), 0.0)
        for name, settings in (("DDP", {"engine": DataParallel}), ("FSDP2", sharding(is_layer))):
            compare(f"{name} and one device", partial(_equal, run, settings), 1e-3)
        result = halving(run, partial(_sharded, run, notes))
    result.rows += failed
    return result


def _compared(one: Tensor, other: Tensor) -> dict[str, Any]:
    differing = int((one != other).sum())
    return {"differing": differing, "largest": float((one - other).abs().max())}


def _equal(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    found = []
    for each in ({}, settings):
        trained = ShardedTask(12, run.device, optimizer="adamw", hidden=(256, 256))
        with unseen():
            contestants.barebones(trained, **each)
        found.append(trained.lap().outcome)
    return _compared(*found)


def _resumes(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        whole = resumed_weights(run, 20, Path(folder) / "whole", **settings)
        resumed_weights(run, 9, Path(folder) / "halted", **settings)
        again = resumed_weights(run, 20, Path(folder) / "halted", before=9, **settings)
    return _compared(whole, again)


def _sharded(run: Run, told: list[str], size: Size, notes: list[str]) -> Result:
    steps, peaks = run.of(20, 4), dict[str, float]()
    shards = sharding(is_block)
    ours: dict[str, Callable[[Any], None]] = {
        "PyTorch loop by hand, one device": transformer.by_hand,
        "FSDP2 loop by hand": sharded_by_hand,
        "Cadence Trainer, FSDP2": partial(contestants.barebones, **shards),
        "Cadence Accelerator, FSDP2": partial(contestants.own_loop, **shards),
        "Cadence Trainer, DDP": partial(contestants.barebones, engine=DataParallel),
    }

    def turn(train: Callable[[Any], None], name: str) -> Lap:
        make = partial(ShardedGpt, steps, size, device=run.device, backend=None)
        return transformer.turn(make, train, name, peaks)

    def finish(rows: list[Row]) -> Result:
        return Result(
            benchmark="fsdp",
            title=f"FSDP2 on one device, {size.batch} × {size.context} tokens in bf16, uncompiled",
            columns=transformer.COLUMNS,
            rows=[transformer.in_tokens(row, size, run.device, peaks) for row in rows],
            settings={"steps": steps},
            notes=[*told, *notes, "The losses agree within 5 %."],
        )

    return rounds(
        run,
        contenders_of(turn, ours),
        run.of(2, 1),
        finish,
        agree=partial(math.isclose, rel_tol=0.05),
    )


# -- 8: fp8 ----------------------------------------------------------------------------------------


def fp8(run: Run) -> Result:
    """fp8 of torchao against bf16.

    Raises:
        Unavailable: torchao is not installed, or the device has no fp8.
    """
    if find_spec("torchao") is None:
        raise Unavailable("torchao is not installed")
    if run.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise Unavailable("the device has no fp8")
    return halving(run, partial(_fp8, run))


def _fp8(run: Run, size: Size, notes: list[str]) -> Result:
    steps, peaks = run.of(30, 5), dict[str, float]()
    backend = "eager" if run.tiny else "inductor"

    def turn(train: Callable[[Any], None], name: str) -> Lap:
        def make() -> GptTask:
            made = GptTask(steps, size, device=run.device, backend=backend)
            made.precision = "fp8" if "fp8" in name else "bf16"
            return made

        return transformer.turn(make, train, name, peaks)

    def finish(rows: list[Row]) -> Result:
        return Result(
            benchmark="fp8",
            title=f"fp8 of torchao, {size.batch} × {size.context} tokens, compiled",
            columns=transformer.COLUMNS,
            rows=[transformer.in_tokens(row, size, run.device, peaks) for row in rows],
            settings={"steps": steps, "backend": backend},
            notes=[*notes, "MFU is relative to the peak in bf16. The losses agree within 2 %."],
        )

    ours = {"Cadence Trainer, bf16": contestants.barebones}
    ours |= {"Cadence Trainer, fp8": contestants.barebones}
    return rounds(
        run,
        contenders_of(turn, ours),
        run.of(2, 1),
        finish,
        agree=partial(math.isclose, rel_tol=0.02),
    )


# -- 9: the rest -----------------------------------------------------------------------------------


class Synced(nn.BatchNorm1d):
    """`SyncBatchNorm`, which torch skips on one process, with its kernels and its exchange."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (batch, features)."""
        statistics = self.running_mean, self.running_var
        if not x.is_cuda:
            return batch_norm(x, *statistics, self.weight, self.bias, True, 0.1, self.eps)
        return SyncedStatistics.apply(
            x, self.weight, self.bias, *statistics, self.eps, 0.1, dist.group.WORLD, 1
        )


def others(run: Run) -> Result:
    """SyncBatchNorm, fp16 with the scaler, and CUDA graphs, against the same without."""
    result = Result(
        benchmark="others",
        title="The same training in another way",
        columns=[
            Column("largest", "largest difference of a weight", 7),
            Column("step", "step, µs"),
        ],
        rows=[],
        settings={"steps": run.of(300, 6)},
        notes=[],
    )
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "SyncBatchNorm in the Trainer, to batch_norm by hand": partial(_sync_batch_norm, run),
        "fp16 in the Trainer, to GradScaler by hand": partial(_scaled, run, contestants.barebones),
        # A prepared model returns float32.
        "fp16 in the Accelerator, to GradScaler by hand with float32 outputs": partial(
            _scaled, run, contestants.own_loop, outputs=torch.float32
        ),
        "by hand, uncompiled": partial(_graphs, run, by_hand, mode=None),
        "by hand, reduce-overhead": partial(_graphs, run, by_hand),
        "Cadence Trainer, whose model is compiled with reduce-overhead": partial(
            _graphs, run, contestants.barebones
        ),
        "Cadence Accelerator, dynamo_plugin with reduce-overhead": partial(
            _graphs, run, partial(_graphs_of_accelerator, run), mode=None
        ),
    }
    with process_group(run):
        for name, measure in kinds.items():
            result.rows.append(attempt(Row(name=name), measure))
            run.keep(result)
    if run.device == "cpu":
        result.notes = ["SyncBatchNorm and CUDA graphs need CUDA: others stood for them."]
    return result


def _sync_batch_norm(run: Run) -> dict[str, Any]:
    found = []
    for norm, train in ((nn.BatchNorm1d, by_hand), (Synced, contestants.barebones)):
        trained = SmallTask(20, run.device)
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))
        trained.bare = model.to(run.device)
        trained.model = task.Ticking(trained.bare, trained.clock)
        with unseen():
            train(trained)
        found.append(trained.lap().outcome)
    return {"largest": _compared(*found)["largest"]}


def _scaled(
    run: Run, train: Callable[[Any], None], *, outputs: torch.dtype = torch.float16
) -> dict[str, Any]:
    steps = run.of(300, 6)
    trained = SmallTask(steps, run.device)
    scaler = torch.amp.GradScaler(run.device)
    model, optimizer = trained.model, trained.optimizer()
    for batch in trained.loader:
        moved = [each.to(run.device, non_blocking=True) for each in batch]
        with torch.autocast(run.device, torch.float16):
            loss = trained.loss(lambda x: model(x).to(outputs), moved)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    expected = trained.lap()
    trained = SmallTask(steps, run.device)
    trained.precision = "fp16"
    with unseen():
        train(trained)
    lap = trained.lap()
    return {
        "largest": _compared(lap.outcome, expected.outcome)["largest"],
        "step": 1e6 * lap.wall,
    }


class Marked(nn.Module):
    """A model compiled to CUDA graphs, each of whose steps is told from the one before."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.model, self.clock = model, clock

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model does."""
        self.clock.tick()
        torch.compiler.cudagraph_mark_step_begin()
        return self.model(x)


def _compiler(run: Run, mode: str | None) -> dict[str, Any]:
    return {"backend": "eager"} if run.tiny else {"mode": mode}


def _graphs(
    run: Run, train: Callable[[Any], None], *, mode: str | None = "reduce-overhead"
) -> dict[str, Any]:
    torch.compiler.reset()
    steps = run.of(300, 6)
    reference, trained = SmallTask(steps, run.device), SmallTask(steps, run.device)
    by_hand(reference)
    if mode is not None:
        compiled = torch.compile(trained.bare, **_compiler(run, mode))
        trained.model = Marked(compiled, trained.clock)
    with unseen():
        train(trained)
    lap = trained.lap()
    largest = _compared(lap.outcome, reference.lap().outcome)["largest"]
    return {"largest": largest, "step": 1e6 * lap.wall}


def _graphs_of_accelerator(run: Run, trained: Any) -> None:
    AcceleratorState._reset_state()
    plugin = TorchDynamoPlugin(**{"backend": "inductor"} | _compiler(run, "reduce-overhead"))
    accelerator = Accelerator(cpu=run.device == "cpu", dynamo_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(trained.bare, trained.optimizer(), trained.whole)
    for batch in loader:
        trained.clock.tick()
        torch.compiler.cudagraph_mark_step_begin()
        accelerator.backward(trained.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section.

    Attributes:
        measure: Measures it.
        seconds: The most that it may take.
    """

    measure: Callable[[Run], Result]
    seconds: float


SECTIONS = {  # by value: what the budget does not suffice for stands at the end
    "tokens": Section(measure=tokens, seconds=240),
    "syncs": Section(measure=syncs, seconds=45),
    "fsdp": Section(measure=fsdp, seconds=65),
    "host": Section(measure=host, seconds=65),
    "copies": Section(measure=copies, seconds=45),
    "memory": Section(measure=memory, seconds=50),
    "saving": Section(measure=saving, seconds=100),
    "others": Section(measure=others, seconds=75),
    "fp8": Section(measure=fp8, seconds=150),
}
