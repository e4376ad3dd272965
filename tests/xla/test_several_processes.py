"""Two processes, each with an XLA device: equal to one process with the whole batches.

On ``PJRT_DEVICE=CPU`` each process has a runtime of its own, and tensors are reduced by gloo. The
all-reduce of connected devices is run between two devices of one process, in a thread for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1200)  # the first test that needs them runs the programs
PROGRAM = """
import json, sys
import torch, torch_xla
import torch_xla.debug.metrics as counted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainer import Accelerator, Trainer, TrainModule, set_seed
from trainer.distributed.guards import call_counts


def loader(samples, processes, shuffle=True):
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    return DataLoader(data, 8 // processes, shuffle=shuffle)


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1)
    return nn.Sequential(*layers)


class Model(TrainModule):
    def __init__(self, dropout=0.0, normalized=False, unused=False):
        super().__init__()
        self.net = network(dropout)
        if normalized:
            self.net.append(nn.BatchNorm1d(1))
        if unused:
            self.unused = nn.Linear(2, 2)
        self.compiled, self.executed, self.checked = [], [], []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        errors = (self.net(batch[0]) - batch[1]).square()
        self.log("val_loss", errors.mean())
        self.log("val_max", errors.max(), reduce="max")

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_train_step_start(self):
        new, known = map(counted.counter_value, ("UncachedCompile", "CachedCompile"))
        self.compiled.append(new or 0)
        self.executed.append((new or 0) + (known or 0))
        self.checked.append(call_counts.joint)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()


def fit(folder, model, samples=44, ckpt_path=None, **settings):
    set_seed(3)
    settings = {"max_epochs": 2, "log_every": 1, **settings}
    trainer = Trainer(project_dir=folder, progress_bar=False, **settings)
    processes = trainer.accelerator.num_processes
    validation = loader(samples, processes, shuffle=False)
    trainer.fit(model, loader(samples, processes), validation, ckpt_path=ckpt_path)
    return trainer


def weights(model):
    return [value for p in model.parameters() for value in p.detach().cpu().flatten().tolist()]


def numbers(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def own_loop():
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = network()
    if accelerator.process_index:
        nn.init.zeros_(net[0].weight)  # rank 0's weights count
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = loader(48, accelerator.num_processes, shuffle=False)
    net, optimizer, data = accelerator.prepare(net, optimizer, data)
    losses, seen = [], []
    for x, y in data:
        with accelerator.accumulate(net):
            loss = (net(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        seen.append(accelerator.gather_for_metrics(y))
    try:
        with accelerator.join_uneven_inputs([net], even_batches=False):
            refused = ""
    except ValueError as error:
        refused = str(error)
    flag = torch.tensor(accelerator.process_index, device=accelerator.device)
    return {
        "losses": [*losses, float(norm)],
        "seen": torch.cat(seen).flatten().tolist(),
        "weights": weights(net),
        "sum of ranks": int(accelerator.reduce(flag)),
        "refused": refused,
    }


def main(index=0):
    plain = Model()
    trainer = fit("plain", plain)
    metrics = numbers(trainer)
    predictions = trainer.predict(plain, loader(44, trainer.accelerator.num_processes, False))
    longer = Model()
    windows = {"gradient_accumulation_steps": 3, "max_grad_norm": 1.0}
    fit("longer", longer, max_epochs=4, log_every=1000, **windows)
    uneven = Model(unused=True)
    fit("uneven", uneven, samples=46, gradient_accumulation_steps=2)
    by_hand = ByHand()
    fit("by hand", by_hand, samples=48)
    half = fit("half", Model(), mixed_precision="bf16")
    normalized = Model(normalized=True)
    fit("normalized", normalized)
    whole, resumed = Model(0.3), Model(0.3)
    fit("whole", whole, max_epochs=4)
    fit("parts", Model(0.3), max_epochs=2)
    fit("parts", resumed, max_epochs=4, ckpt_path="auto")
    accelerator = trainer.accelerator
    buffers = normalized.net[-1].running_mean.to(accelerator.device)
    found = {
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "metrics": metrics,
        "weights": {
            "plain": weights(plain),
            "accumulated": weights(longer),
            "uneven": weights(uneven),
            "by hand": weights(by_hand),
        },
        "half": numbers(half),
        "compiled": longer.compiled,
        "executed": longer.executed,
        "checked": longer.checked,
        "buffers": accelerator.gather(buffers).tolist(),
        "resumed": weights(resumed) == weights(whole),
        "loop": own_loop(),
    }
    everywhere = accelerator.gather(torch.tensor([weights(plain)], device=accelerator.device))
    if predictions is not None:
        found["predictions"] = torch.cat(predictions).flatten().tolist()
        found["equal"] = all(torch.equal(row, everywhere[0]) for row in everywhere)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch_xla.launch(main)
"""
MOVED = """
import sys
from program import Model, fit, numbers, weights
import json

model = Model()
trainer = fit(sys.argv[1], model, max_epochs=int(sys.argv[2]), ckpt_path="auto")
if trainer.accelerator.is_main_process:
    print(json.dumps([str(trainer.accelerator.device), weights(model), numbers(trainer)]))
"""
# The programs of the threads must be equal, down to the numbers of their all-reduces, which the
# process counts: the second thread finds what the first one has compiled.
IN_THREADS = """
import threading
import torch, torch_xla
from trainer import PartialState, xla

one_compiles = threading.Lock()


def main(index):
    found = []
    for operation in ("sum", "min", "max"):
        tensor = torch.tensor([index + 1.0, 5.0 - index], device=torch_xla.device())
        with one_compiles:
            xla.all_reduce(tensor, operation)
        found.append(tensor.tolist())
    assert found == [[3.0, 9.0], [1.0, 4.0], [2.0, 5.0]], found
    try:
        PartialState()
    except ValueError as error:
        print(f"{error}\\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(main)
"""


def run(folder: Path, *command: str, **variables: str) -> str:
    """Return the last line that a Python command prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CPU_NUM_DEVICES": "1", **variables},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """A folder with the program for each number of processes."""
    made = {number: tmp_path_factory.mktemp(f"processes-{number}") for number in (1, 2)}
    for folder in made.values():
        (folder / "program.py").write_text(PROGRAM)
        (folder / "moved.py").write_text(MOVED)
    return made


@pytest.fixture(scope="module")
def results(folders) -> dict[int, dict]:
    """What the program finds under ``torch_xla.launch``, on one process and on two."""
    launch = ("-m", "trainer", "launch", "--quiet", "--num_processes", "2")
    return {
        1: json.loads(run(folders[1], "program.py")),
        2: json.loads(run(folders[2], *launch, "program.py")),
    }


def test_each_process_has_a_device(results):
    for number, found in results.items():
        assert (found["device"], found["processes"]) == ("xla:0", number)


@pytest.mark.parametrize("case", ["plain", "accumulated", "uneven", "by hand"])
def test_weights_equal_those_of_one_process_on_whole_batches(results, case):
    one, two = (results[number]["weights"][case] for number in (1, 2))
    assert two == pytest.approx(one, abs=1e-5)


def test_metrics_and_predictions_equal_those_of_one_process(results):
    one, two = results[1], results[2]
    assert one["metrics"].keys() >= {"loss", "val_loss", "val_max"}
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert two["predictions"] == pytest.approx(one["predictions"], abs=1e-5)
    assert two["half"] == pytest.approx(one["half"], abs=0.05)


def test_a_loop_of_ones_own_is_that_of_one_process(results):
    one, two = ({**results[number]["loop"]} for number in (1, 2))
    assert (one.pop("sum of ranks"), two.pop("sum of ranks")) == (0, 1)
    assert one.pop("refused") == ""
    assert two.pop("refused").startswith("join_uneven_inputs needs DDP")
    for name in one:
        assert two[name] == pytest.approx(one[name], abs=1e-5)


def test_all_processes_have_the_same_weights_and_buffers(results):
    assert results[2]["equal"]
    first, second = results[2]["buffers"]
    assert first == second != 0.0


def test_a_resumed_run_of_two_processes_with_dropout_is_bit_identical(results):
    assert results[1]["resumed"]
    assert results[2]["resumed"]


def test_each_shape_is_compiled_once(results):
    # 6 global batches an epoch, the last one of rank 0 alone: 2 updates of 3.
    compiled, executed = results[2]["compiled"], results[2]["executed"]
    assert len(compiled) == 8
    assert len(set(compiled[4:])) == 1
    assert executed[5] - executed[4] == 2  # gradients, update


def test_a_window_of_a_model_without_buffers_broadcasts_nothing(results):
    checked = results[2]["checked"]
    assert [checked[at + 1] - checked[at] for at in (0, 2, 4, 6)] == [0] * 4  # within an epoch


def test_a_run_resumes_on_other_devices_and_numbers_of_processes(folders):
    launch = ("-m", "trainer", "launch", "--quiet", "--num_processes", "2")
    expected = json.loads(run(folders[1], "moved.py", "cpu", "3", ACCELERATE_USE_CPU="true"))
    assert expected[0] == "cpu"
    folder = folders[2]
    found = json.loads(run(folder, *launch, "moved.py", "moves", "1"))
    assert found[0] == "xla:0"
    assert json.loads(run(folder, "moved.py", "moves", "2", ACCELERATE_USE_CPU="true"))[0] == "cpu"
    found = json.loads(run(folder, *launch, "moved.py", "moves", "3"))
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    assert found[2] == pytest.approx(expected[2], abs=1e-5)


def test_connected_devices_are_reduced_by_themselves_and_threads_are_refused(tmp_path):
    (tmp_path / "threads.py").write_text(IN_THREADS)
    refused = run(tmp_path, "threads.py", CPU_NUM_DEVICES="2")
    assert refused.startswith("There are several processes, and this one uses 2 XLA device(s)")
