"""Runs on several processes that are killed and started again; started by `test_kill_sharded.py`.

Python and torch are imported once; the processes of each start are forks of that process. When one
is killed, the others are killed too, as a launcher does. Prints one line of JSON: how many starts
were killed, which runs ended with something else than an uninterrupted one, and of each start its
layout, its kill, and the update from which it went on (None: it was killed before).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, ModelCheckpoint, WeightAveraging
from tests.faults.kill_sweep import KILLED, Killer, kill_at_call, without_time
from tests.helpers.megatron import cuda_on_cpu, gpt
from tests.helpers.promises import losses
from trackers import read_metrics
from trainer import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.storage import committed, verify
from trainer.engines.deepspeed import import_deepspeed
from trainer.engines.megatron import import_megatron

TOLERANCE = 1e-5
LIMIT = 120  # seconds for a start on a busy machine; more is a hang


def fsdp(**sizes: int) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    return {
        "fsdp_plugin": plugin,
        "parallelism_config": ParallelismConfig(**sizes) if sizes else None,
    }


def zero(stage: int) -> dict[str, Any]:
    options = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={"zero_optimization": options})}


def stages(**options: Any) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(pp_size=2, **options)}


def megatron(**degrees: int) -> dict[str, Any]:
    return {"megatron_lm_plugin": MegatronLMPlugin(gradient_clipping=0.0, **degrees)}


# The processes, the shares of the data, and the options of the Trainer.
LAYOUTS: dict[str, tuple[int, int, Callable[[], dict[str, Any]]]] = {
    "one": (1, 1, dict),
    "ddp": (2, 2, dict),
    "fsdp": (2, 2, fsdp),
    "fsdp_4": (4, 4, fsdp),
    "hsdp": (4, 4, lambda: fsdp(dp_replicate_size=2, dp_shard_size=2)),
    "tp": (2, 1, lambda: fsdp(tp_size=2)),
    "fsdp_tp": (4, 2, lambda: fsdp(dp_shard_size=2, tp_size=2)),
    "pp": (2, 1, lambda: stages(pp_microbatches=2)),
    "pp_dp": (4, 2, lambda: stages(dp_replicate_size=2, pp_schedule="gpipe")),
    "pp_fsdp": (4, 2, lambda: stages(dp_shard_size=2, pp_microbatches=2)),
    "pp_tp": (4, 1, lambda: stages(tp_size=2, pp_microbatches=2)),
    "zero0": (2, 2, lambda: zero(0)),
    "zero1": (2, 2, lambda: zero(1)),
    "zero2": (2, 2, lambda: zero(2)),
    "zero3": (2, 2, lambda: zero(3)),
    "megatron_tp": (2, 1, lambda: megatron(tp_degree=2)),
    "megatron_pp": (2, 1, lambda: megatron(pp_degree=2, num_micro_batches=2)),
}


class Noisy(Dataset[Any]):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> Any:
        noise = self.scale * torch.randn(8)
        return noise + torch.arange(8).sin() * index / 52, torch.tensor(index % 3)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(torch.relu(self.first(self.norm(x)))))


class Net(TrainModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.tp_plan = {"blocks.*.first": ColwiseParallel(), "blocks.*.second": RowwiseParallel()}

    def loss(self, batch: Any) -> Tensor:
        outputs = self.last(self.blocks(self.first(batch[0])))
        return nn.functional.cross_entropy(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Language(Net):
    """A GPT of megatron-core, whose tokens are made of the numbers."""

    def __init__(self, dropout: float, plugin: MegatronLMPlugin) -> None:
        TrainModule.__init__(self)
        self.dropout, self.plugin = dropout, plugin

    def configure_model(self) -> None:
        arguments = self.plugin.transformer_arguments("no")
        drops = {"hidden_dropout": self.dropout, "attention_dropout": self.dropout}
        self.model = gpt(arguments, **drops)

    def loss(self, batch: Any) -> Tensor:
        tokens = (batch[0].abs() * 9).long() % 32
        return losses(self.model, torch.cat([tokens, tokens[:, :1]], 1), is_gpt=True).mean()


class Moments(Callback):
    """Reports the update from which a start goes on, and kills the process at a moment.

    Args:
        report: The file of the report.
        phase: ``between`` updates, after the first ``batch`` of a window, in the ``update`` itself,
            when all gradients are there, or in a ``save``.
        update: The number of the update; between, that of the one before.
        call: In a save, the number of the call that puts something on the disk.
    """

    def __init__(self, report: Path, phase: str = "", update: int = -1, call: int = 1) -> None:
        self.report, self.moment, self.call = report, (phase, update), call

    def reach(self, phase: str, update: int) -> None:
        if (phase, update) == self.moment:
            if phase == "save":
                kill_at_call(self.call)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.report.write_text(str(trainer.global_step))

    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        self.reach("between", trainer.global_step)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.reach("batch", trainer.global_step + 1)  # the first one

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.reach("update", trainer.global_step + 1)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.reach("save", trainer.global_step)


def fit(folder: Path, layout: str, *, noisy: bool, averages: bool, kill: dict[str, Any]) -> None:
    step = int(kill["when"]) if kill["kind"] == "step" else -1
    at = (kill["kind"], int(kill["when"]), kill["call"]) if "call" in kill else ()
    _, shares, options_of = LAYOUTS[layout]
    options, dropout = options_of(), 0.3 if noisy else 0.0
    trainer = Trainer(
        max_epochs=2,
        cpu=True,
        project_dir=folder,
        progress_bar=False,
        log_every=2,
        val_every=3,
        gradient_accumulation_steps=2,  # seven batches over all processes: a short last window
        max_grad_norm=0.5,
        callbacks=[
            Killer(step),
            Moments(report_of(folder), *at),
            *([WeightAveraging(0.9)] if averages else []),
            ModelCheckpoint(monitor="val/loss", every=1, save_top_k=2),
        ],
        seed=5,
        **options,
    )
    train = DataLoader(Noisy(1.0 if noisy else 0.0), 8 // shares, shuffle=True)
    validation = DataLoader(Noisy(0.0), 8 // shares)
    plugin = options.get("megatron_lm_plugin")
    module = Net(dropout) if plugin is None else Language(dropout, plugin)
    trainer.fit(module, train, validation, ckpt_path="auto")


def start(folder: Path, kill: dict[str, Any], **how: bool) -> int:
    """Start the run once; return the exit code of the first process that failed, else 0.

    Args:
        folder: The run's project folder.
        kill: ``layout``; ``kind``: none, step, call, time, or a phase of `Moments` with its
            ``call``; ``when``; the ``rank`` to be killed.
        **how: ``noisy``, whether the data and the module draw random numbers, and ``averages``,
            whether weights are averaged.
    """
    processes, *_ = LAYOUTS[kill["layout"]]
    rendezvous = folder.with_suffix(".rendezvous")
    for file in (rendezvous, report_of(folder)):
        file.unlink(missing_ok=True)
    children = {
        _fork(rank, processes, rendezvous, folder, kill, how): rank for rank in range(processes)
    }
    deadline = time.monotonic() + LIMIT
    due = time.monotonic() + kill["when"] if kill["kind"] == "time" else deadline
    code = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.pop(pid)
            code = code or os.waitstatus_to_exitcode(status)
        if code or time.monotonic() > min(due, deadline):
            code = code or (KILLED if due < deadline else signal.SIGALRM)
            for each in children:
                os.kill(each, signal.SIGKILL)
            for each in list(children):
                os.waitpid(each, 0)
                children.pop(each)
        time.sleep(0.005)
    return code


def _fork(
    rank: int,
    processes: int,
    rendezvous: Path,
    folder: Path,
    kill: dict[str, Any],
    how: dict[str, bool],
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.manual_seed(random.randrange(2**32))  # nothing may depend on it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if processes > 1:
            for name, value in (("RANK", rank), ("WORLD_SIZE", processes)):
                os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes
            )
        victim = rank == kill.get("rank", 0) % processes
        if kill["kind"] == "call" and victim:
            kill_at_call(int(kill["when"]))
        own = kill if victim else {"kind": "none"}
        with cuda_on_cpu() if kill["layout"].startswith("megatron") else nullcontext():
            fit(folder, kill["layout"], kill=own, **how)
        code = 0
    except Exception:  # noqa: BLE001 - the parent judges the exit code
        traceback.print_exc()
        # Where a process was killed, the others see their connection end.
        code = 1 if kill["kind"] == "none" else KILLED % 256
    finally:
        sys.stderr.flush()
        os._exit(code)


def report_of(folder: Path) -> Path:
    return folder.with_suffix(".report")


def end_of(folder: Path) -> dict[str, Any]:
    """Return what a finished run leaves: records, kept checkpoints, weights, and files by hash."""
    checkpoints = committed(folder / "checkpoints")
    for checkpoint in checkpoints:
        verify(checkpoint)
    records = [without_time(record) for record in read_metrics(folder / "metrics.jsonl")]
    for record in records:
        record.pop("time")
    merged = folder / "merged.safetensors"
    merge_weights(checkpoints[-1], merged)
    files = sorted(checkpoints[-1].glob("*.safetensors"))
    return {
        "kept": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "records": records,
        "weights": load_file(merged),
        "tensors": {f"{file.name}:{k}": v for file in files for k, v in load_file(file).items()},
    }


def differences(found: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> list[str]:
    """Return what differs: bit for bit, or by more than rounding on another layout."""
    if exact:
        pairs = found["tensors"], expected["tensors"]
        same = pairs[0].keys() == pairs[1].keys() and all(
            map(torch.equal, *map(dict.values, pairs))
        )
        wrong = [key for key in ("kept", "records") if found[key] != expected[key]]
        return wrong if same else [*wrong, "tensors"]
    wrong = ["kept"] if found["kept"] != expected["kept"] else []
    largest = max(
        float((found["weights"][name] - value).abs().max())
        for name, value in expected["weights"].items()
    )
    wrong += [f"weights differ by {largest}"] if not largest <= TOLERANCE else []
    for one, other in zip(found["records"], expected["records"], strict=True):
        same = one.keys() == other.keys() and all(
            one[k] == v or abs(one[k] - v) <= TOLERANCE for k, v in other.items()
        )
        wrong += [] if same else [f"record {one} instead of {other}"]
    return wrong


def main() -> None:
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    used = {kill["layout"] for run in runs for kill in run}
    if any(layout.startswith("zero") for layout in used):
        import_deepspeed(torch.device("cpu"))
        for name in ("deepspeed.module_inject", "torch._inductor.compile_fx"):  # each fork needs
            importlib.import_module(name)
    if any(layout.startswith("megatron") for layout in used):
        with cuda_on_cpu():
            import_megatron(torch.device("cpu"))
    whole: dict[Any, dict[str, Any]] = {}

    def uninterrupted(layout: str, **how: bool) -> dict[str, Any]:
        key = layout, *how.items()
        if key not in whole:
            here = folder / f"whole-{len(whole)}"
            assert start(here, {"layout": layout, "kind": "none"}, **how) == 0
            whole[key] = end_of(here)
        return whole[key]

    kills, different, starts = 0, [], []
    for number, run in enumerate(runs):
        here, last = folder / str(number), run[-1]["layout"]
        layouts = {kill["layout"] for kill in run}
        exact = layouts == {last}
        averages = not any(layout.startswith(("pp", "zero", "megatron")) for layout in layouts)
        how = {"noisy": exact, "averages": averages}
        for kill in run:
            code = start(here, kill, **how)
            report = report_of(here)
            starts.append([kill, int(report.read_text()) if report.exists() else None])
            kills += code == KILLED or code == KILLED % 256
            if code not in (0, KILLED, KILLED % 256):
                different.append([run, f"exit code {code}"])
        if (code := start(here, {"layout": last, "kind": "none"}, **how)) != 0:
            different.append([run, f"exit code {code}"])
            continue
        expected = uninterrupted(last if exact else "one", **how)
        wrong = differences(end_of(here), expected, exact=exact)
        different += [[run, wrong]] if wrong else []
        shutil.rmtree(here)
    print(json.dumps({"kills": kills, "different": different, "starts": starts}))


if __name__ == "__main__":
    main()
