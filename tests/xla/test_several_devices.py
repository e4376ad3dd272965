"""All devices of a machine in one process (SPMD): equal to one device with the same batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import torch, torch_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainer import Accelerator, Trainer, TrainModule, set_seed

devices = int(sys.argv[1])
if devices > 1:
    torch_xla.runtime.use_spmd()
inputs = torch.randn(44, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1))


def layout(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


class Model(TrainModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.layouts = network(dropout), []

    def training_step(self, batch, batch_idx):
        self.layouts.append(layout(batch[0]))
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, epochs, dropout=0.0, **kwargs):
    set_seed(3)
    model = Model(dropout)
    trainer = Trainer(max_epochs=epochs, project_dir=folder, progress_bar=False, log_every=1)
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8), **kwargs)
    return model, trainer


def weights(model):
    return [value for p in model.parameters() for value in p.detach().cpu().flatten().tolist()]


model, trainer = fit("plain", 2)
accelerator, net = Accelerator(), network()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, 8))
for x, y in loader:
    of_loop = layout(x)
    accelerator.backward((net(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
whole = weights(fit("whole", 4, 0.3)[0])
fit("parts", 2, 0.3)
print(json.dumps({
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "weights": weights(model),
    "layouts": model.layouts[:6],
    "loop": weights(net),
    "layout of the loop": of_loop,
    "resumed": weights(fit("parts", 4, 0.3, ckpt_path="auto")[0]) == whole,
}))
"""


def run(devices: int, folder: Path) -> dict:
    folder.mkdir()
    environment = {**os.environ, "CPU_NUM_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(devices)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_batches_are_divided_over_the_devices_of_a_machine(tmp_path):
    one, two = run(1, tmp_path / "one"), run(2, tmp_path / "two")
    assert two["layouts"] == ["{devices=[2,1]0,1}"] * 6  # also of the last one, of 4 samples
    assert two["layout of the loop"] == "{devices=[2,1]0,1}"
    for name in ("weights", "loop", "metrics"):
        assert two[name] == pytest.approx(one[name], abs=1e-6)
    assert one["resumed"]
    assert two["resumed"]
