"""The checks that `trainer test` runs in every process, as ``torchrun -m trainer.cli.selftest``.

Each check first does everything that is collective, then compares the result with a reference that
each process computes alone, so a process that finds a difference leaves no other waiting.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer.accelerator import Accelerator
from trainer.module import TrainModule
from trainer.trainer import Trainer

SAMPLES, BATCH = 53, 4  # no number of processes divides the batches evenly


class CheckError(Exception):
    """A check found a difference; the message describes it."""


def main() -> int:
    """Run all checks and print a line for each; return 1 on rank 0 if one has failed, else 0."""
    warnings.filterwarnings("ignore", module="torch")
    accelerator = Accelerator(mixed_precision="no")
    state = accelerator.state
    where = f"{state.device.type}, {state.backend}" if state.backend else state.device.type
    accelerator.print(f"{accelerator.num_processes} process(es) on {where}")
    own = tempfile.mkdtemp(prefix="cadence-test-") if accelerator.is_main_process else ""
    folder = Path(accelerator.gather_for_metrics([own], use_gather_object=True)[0])
    folder.mkdir(exist_ok=True)  # for machines that do not share rank 0's disk
    failed = 0
    for name, check in CHECKS.items():
        try:
            said, wrong = check(accelerator, folder), None
        except CheckError as error:
            said, wrong = "", f"rank {accelerator.process_index}: {error}"
        verdicts = accelerator.gather_for_metrics([wrong], use_gather_object=True)
        found = "\n".join(verdict for verdict in verdicts if verdict)
        accelerator.print(f"{name:<14} " + (f"FAILED  {found}" if found else f"ok  {said}"))
        failed += bool(found)
    if accelerator.is_local_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # maybe by several machines at once
    accelerator.print(f"{failed} of {len(CHECKS)} checks failed." if failed else "All is well.")
    accelerator.wait_for_everyone()
    return 1 if failed and accelerator.is_main_process else 0  # one process is enough


# -- the checks ----------------------------------------------------------------------------------


def collectives(accelerator: Accelerator, _: Path) -> str:
    """Collectives return the right values."""
    rank, size = accelerator.process_index, accelerator.num_processes
    own = torch.arange(3.0, device=accelerator.device) + rank
    whole = torch.cat([torch.arange(3.0) + other for other in range(size)])
    gathered = accelerator.gather(own)
    summed, mean = accelerator.reduce(own, "sum"), accelerator.reduce(own, "mean")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    _same("gather", gathered, whole)
    _same("the sum", summed, whole.reshape(size, 3).sum(0))
    _same("the mean", mean, whole.reshape(size, 3).mean(0))
    _same("padding", padded, (torch.arange(size) <= rank).float())
    return "gather, sum, mean, padding"


def data_order(accelerator: Accelerator, folder: Path) -> str:
    """Every sample is trained on once, whatever the number of processes."""
    module = _Line()
    trainer = _trainer(accelerator, folder / "order", limit_val_batches=0)
    trainer.fit(module, _loader(shuffle=True))
    seen = accelerator.gather_for_metrics(module.seen, use_gather_object=True)
    if wrong := [each for each in range(SAMPLES) if seen.count(each) != 1]:
        times = {each: seen.count(each) for each in wrong}
        raise CheckError(f"of {SAMPLES} samples, these were not seen once but so often: {times}")
    if accelerator.num_processes == 1 and seen == sorted(seen):
        raise CheckError("the samples were not shuffled")
    return f"each of {SAMPLES} shuffled samples once"


def accumulation(accelerator: Accelerator, folder: Path) -> str:
    """An update over micro-batches and processes equals that of the whole batch."""
    module = _Line()
    reference = nn.Linear(2, 1)
    reference.load_state_dict(module.line.state_dict())
    options = {"gradient_accumulation_steps": 2, "limit_val_batches": 0}
    _trainer(accelerator, folder / "accumulation", **options).fit(module, _loader())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    big = BATCH * 2 * accelerator.num_processes
    for start in range(0, SAMPLES, big):
        x, y = (each[start : start + big] for each in _data().tensors[1:])
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x).squeeze(1), y).backward()
        optimizer.step()
    _same("the weight", module.line.weight, reference.weight)
    _same("the bias", module.line.bias, reference.bias)
    return f"2 micro-batches of {BATCH} on each process as one of {big}"


def checkpoint(accelerator: Accelerator, folder: Path) -> str:
    """The saved state is restored, on every process."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 2, device=accelerator.device)

    def step() -> Tensor:
        optimizer.zero_grad()
        accelerator.backward(model(x * torch.rand((), device=x.device)).sum())
        optimizer.step()
        return torch.cat([value.detach().flatten().clone() for value in model.parameters()])

    step()
    accelerator.save_state(folder / "state")
    expected = [step(), step()]
    accelerator.load_state(folder / "state")
    found = [step(), step()]
    for number in (0, 1):
        _same(f"update {number + 1} after loading", found[number], expected[number], exact=True)
    return "model, optimizer and random numbers are restored"


def metrics(accelerator: Accelerator, folder: Path) -> str:
    """A metric equals that of one process, without the samples that pad the last batches."""
    module = _Line()
    (found,) = _trainer(accelerator, folder / "metrics").validate(module, _loader())
    _, x, y = _data().tensors
    with torch.no_grad():
        line = module.line.cpu()
        expected = nn.functional.mse_loss(line(x).squeeze(1), y)
    _same("the validation loss", torch.tensor(found["loss"]), expected)
    return f"exact over {SAMPLES} samples"


CHECKS: dict[str, Callable[[Accelerator, Path], str]] = {
    "collectives": collectives,
    "data order": data_order,
    "accumulation": accumulation,
    "checkpoint": checkpoint,
    "metrics": metrics,
}


# -- shared by the checks ------------------------------------------------------------------------


class _Line(TrainModule):
    """A linear model that records the samples it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every process
        self.line = nn.Linear(2, 1)
        self.seen: list[int] = []

    def _loss(self, batch: list[Tensor]) -> Tensor:
        _, x, y = batch
        return nn.functional.mse_loss(self.line(x).squeeze(1), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 - a hook
        self.seen += batch[0].tolist()
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002 - a hook
        self.log("loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> TensorDataset:
    numbers = torch.arange(SAMPLES)
    x = torch.stack([numbers / SAMPLES, (numbers % 7) / 7], 1)
    return TensorDataset(numbers, x, x[:, 0] - x[:, 1])


def _trainer(accelerator: Accelerator, folder: Path, **options: Any) -> Trainer:
    given = {"project_dir": folder, "checkpointing": False, "progress_bar": False, **options}
    return Trainer(accelerator=accelerator, max_epochs=1, **given)


def _loader(*, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=BATCH, shuffle=shuffle)


def _same(what: str, found: Tensor, expected: Tensor, *, exact: bool = False) -> None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    close = torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-5)
    if not close:
        raise CheckError(f"{what} is {found.tolist()} and should be {expected.tolist()}")


if __name__ == "__main__":
    sys.exit(main())
