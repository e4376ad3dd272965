"""The checks that `trainer test` runs in every process, as ``torchrun -m trainer.cli.selftest``.

They train as configured: sharded, with split layers, with DeepSpeed, compiled. All but one compute
in full precision, for comparison with a single process. Each check first does everything that is
collective, then compares the result with a reference that each process computes alone, so a process
that finds a difference leaves no other waiting.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from trainer import environment
from trainer.accelerator import Accelerator
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.weights import load_weights
from trainer.module import TrainModule
from trainer.state import AcceleratorState
from trainer.trainer import Trainer

SAMPLES, BATCH = 53, 4  # the batches divide evenly over no number of processes


class CheckError(Exception):
    """A check found a difference; the message describes it."""


def main() -> int:
    """Run all checks and print a line for each; return 1 on rank 0 if one has failed, else 0."""
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
    # The layer names in the configuration are those of the user's model.
    patched = environment.patch_environment(FSDP_TRANSFORMER_CLS_TO_WRAP="Linear")
    with patched, environment.without("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"):
        return _run()


def _run() -> int:
    accelerator = Accelerator(mixed_precision="no")
    accelerator.print(f"{accelerator.num_processes} process(es) on {_where(accelerator)}")
    checks = CHECKS
    if accelerator.state.megatron_lm_plugin is not None:
        accelerator.print("without training: Megatron-LM divides only models of megatron-core")
        checks = {"collectives": collectives}
    path = tempfile.mkdtemp(prefix="cadence-test-") if accelerator.is_main_process else ""
    folder = Path(accelerator.gather_for_metrics([path], use_gather_object=True)[0])
    folder.mkdir(exist_ok=True)  # for machines that do not share rank 0's disk
    failed = 0
    for name, check in checks.items():
        try:
            detail, wrong = check(accelerator, folder), None
        except CheckError as error:
            detail, wrong = "", f"rank {accelerator.process_index}: {error}"
        verdicts = accelerator.gather_for_metrics([wrong], use_gather_object=True)
        failures = "\n".join(verdict for verdict in verdicts if verdict)
        accelerator.print(f"{name:<14} " + (f"FAILED  {failures}" if failures else f"ok  {detail}"))
        failed += bool(failures)
    if accelerator.is_local_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # maybe on several machines at once
    accelerator.print(f"{failed} of {len(checks)} checks failed." if failed else "All is well.")
    accelerator.wait_for_everyone()
    return 1 if failed and accelerator.is_main_process else 0  # one is enough


# -- the checks ----------------------------------------------------------------------------------


def collectives(accelerator: Accelerator, _: Path) -> str:
    """Collectives return the right values."""
    rank, size = accelerator.process_index, accelerator.num_processes
    local = torch.arange(3.0, device=accelerator.device) + rank
    whole = torch.cat([torch.arange(3.0) + other for other in range(size)])
    gathered = accelerator.gather(local)
    summed, mean = accelerator.reduce(local, "sum"), accelerator.reduce(local, "mean")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    _same("gather", gathered, whole)
    _same("the sum", summed, whole.reshape(size, 3).sum(0))
    _same("the mean", mean, whole.reshape(size, 3).mean(0))
    _same("padding", padded, (torch.arange(size) <= rank).float())
    return "gather, sum, mean, padding"


def data_order(accelerator: Accelerator, folder: Path) -> str:
    """Every sample is trained on once, whatever the number of processes."""
    module = _Regression()
    trainer = _trainer(accelerator, folder / "order", limit_val_batches=0)
    trainer.fit(module, _loader(shuffle=True))
    samples = accelerator.gather_for_metrics(module.seen, use_gather_object=True)
    if wrong := [sample for sample in range(SAMPLES) if samples.count(sample) != 1]:
        times = {sample: samples.count(sample) for sample in wrong}
        raise CheckError(
            f"of {SAMPLES} samples, these were not seen exactly once (sample: count): {times}"
        )
    if accelerator.num_processes == 1 and samples == sorted(samples):
        raise CheckError("the samples were not shuffled")
    return f"each of {SAMPLES} shuffled samples once"


def accumulation(accelerator: Accelerator, folder: Path) -> str:
    """An update over micro-batches and processes equals that of the whole batch."""
    module, reference = _Regression(), _Regression()
    plugin = accelerator.deepspeed_plugin
    steps = accelerator.gradient_accumulation_steps
    if plugin is None or plugin.gradient_accumulation_steps == "auto":
        steps = max(2, steps)
    options = {"gradient_accumulation_steps": steps, "limit_val_batches": 0}
    trainer = _trainer(accelerator, folder / "accumulation", **options)
    trainer.fit(module, _loader())
    trainer.save_checkpoint(folder / "weights", weights_only=True)
    optimizer = reference.configure_optimizers()
    big = BATCH * steps * accelerator.engine.parallel.dp_size
    for start in range(0, SAMPLES, big):
        batch = [tensor[start : start + big] for tensor in _data().tensors]
        optimizer.zero_grad()
        reference.loss(batch).backward()
        optimizer.step()
    if accelerator.is_main_process:  # only its disk has the file
        merge_weights(folder / "weights", folder / "whole.safetensors")
        weights = load_weights(folder / "whole.safetensors")
        for name, expected in reference.state_dict().items():
            _same(name, weights[name], expected)
    return f"{steps} micro-batches of {BATCH} as one of {big} on all processes"


def checkpoint(accelerator: Accelerator, folder: Path) -> str:
    """The saved state is restored, on every process."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 2, device=accelerator.device)

    def step() -> Tensor:
        optimizer.zero_grad()
        accelerator.backward(model(x * torch.rand((), device=x.device)).sum())
        optimizer.step()
        state = accelerator.get_state_dict(model)  # if sharded, on the main process only
        values = [value.detach().flatten().cpu() for value in state.values()]
        return torch.cat(values) if values else torch.zeros(0)

    step()
    accelerator.save_state(folder / "state")
    expected = [step(), step()]
    accelerator.load_state(folder / "state")
    losses = [step(), step()]
    for number in (0, 1):
        _same(f"update {number + 1} after loading", losses[number], expected[number], exact=True)
    return "model, optimizer and random numbers are restored"


def metrics(accelerator: Accelerator, folder: Path) -> str:
    """A metric equals that of one process, without the samples that pad the last batches."""
    (values,) = _trainer(accelerator, folder / "metrics").validate(_Regression(), _loader())
    with torch.no_grad():
        expected = _Regression().loss(_data().tensors)
    _same("the validation loss", torch.tensor(values["loss"]), expected)
    return f"exact over {SAMPLES} samples"


def precision(accelerator: Accelerator, folder: Path) -> str:
    """Training in the configured precision decreases the loss."""
    del accelerator
    AcceleratorState._reset_state()  # it has another precision
    chosen = environment.read("ACCELERATE_MIXED_PRECISION") or "no"
    module = _Regression()
    options: dict[str, Any] = {"mixed_precision": chosen, "max_epochs": 3}
    trainer = _trainer(None, folder / "precision", **options)
    (before,) = trainer.validate(module, _loader())
    trainer.fit(module, _loader(shuffle=True), _loader())
    after = float(trainer.callback_metrics["loss"])
    if not math.isfinite(after) or after >= before["loss"]:
        raise CheckError(f"in {chosen!r} the loss was {before['loss']:.3g} and is {after:.3g}")
    return f"{chosen!r}: the loss was {before['loss']:.3g} and is {after:.3g}"


CHECKS: dict[str, Callable[[Accelerator, Path], str]] = {
    "collectives": collectives,
    "data order": data_order,
    "accumulation": accumulation,
    "checkpoint": checkpoint,
    "metrics": metrics,
    "precision": precision,
}


# -- shared by the checks ------------------------------------------------------------------------


def _net() -> nn.Module:
    """Return a network in which tensor parallelism splits two layers and fp8 converts one.

    Its weights are the same on every process.
    """
    torch.manual_seed(0)
    hidden = 16 * environment.detect_launch().world_size  # a multiple of every tp_size
    net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 16), nn.Linear(16, 1))
    net.tp_plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # type: ignore[assignment]  # torch expects tensors and modules
    return net


class _Regression(TrainModule):
    """A network that records the samples it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.seen: list[int] = []

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        _, x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 - a hook
        self.seen += batch[0].tolist()
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002 - a hook
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> TensorDataset:
    numbers = torch.arange(SAMPLES)
    x = torch.stack([numbers / SAMPLES, (numbers % 7) / 7], 1)
    return TensorDataset(numbers, x, x[:, 0] - x[:, 1])


def _where(accelerator: Accelerator) -> str:
    """Return the device, the backend, and how the configuration divides models."""
    state = accelerator.state
    words = [state.device.type, *filter(None, [state.backend])]
    mesh = accelerator.parallelism_config
    sizes = mesh.to_json() if mesh is not None else {}
    words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if accelerator.deepspeed_plugin is not None:
        words.append(f"DeepSpeed, stage {accelerator.deepspeed_plugin.zero_stage}")
    elif state.fsdp_plugin is not None:
        words.append("FSDP")
    return ", ".join(words)


def _trainer(accelerator: Accelerator | None, folder: Path, **options: Any) -> Trainer:
    arguments = {"project_dir": folder, "checkpointing": False, "progress_bar": False, **options}
    return Trainer(accelerator=accelerator, **{"max_epochs": 1, **arguments})


def _loader(*, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=BATCH, shuffle=shuffle)


def _same(name: str, value: Tensor, expected: Tensor, *, exact: bool = False) -> None:
    value, expected = value.detach().cpu(), expected.detach().cpu()
    close = torch.equal(value, expected) if exact else torch.allclose(value, expected, atol=1e-5)
    if not close:
        raise CheckError(f"{name} is {value.tolist()} and should be {expected.tolist()}")


if __name__ == "__main__":
    sys.exit(main())
