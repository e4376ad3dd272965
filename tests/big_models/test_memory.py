"""A model that is larger than the memory it may use runs within that memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Loads a model of LAYERS matrices, with room for LIMIT bytes, and prints the growth of its memory.
CODE = """
import ctypes, json, re, sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from trainer import init_empty_weights, load_checkpoint_and_dispatch

layers, width, limit, shards = map(int, sys.argv[1:])
torch.set_num_threads(1)

def memory(key):  # bytes
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def weight(n):
    return torch.randn(width, width, generator=torch.Generator().manual_seed(n)) / width**0.5

Path("saved").mkdir()
places = {}
for shard in range(shards):
    mine = range(shard, layers, shards)
    save_file({f"{n}.weight": weight(n) for n in mine}, f"saved/{shard}.safetensors")
    places |= {f"{n}.weight": f"{shard}.safetensors" for n in mine}
Path("saved/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

def make():
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

x = torch.ones(1, width)
with torch.no_grad():
    expected = x
    for n in range(layers):
        with safe_open(f"saved/{n % shards}.safetensors", "pt") as opened:
            expected = nn.functional.linear(expected, opened.get_tensor(f"{n}.weight").clone())
# whatever the first model that is loaded, and its first product, import and allocate
save_file({"0.weight": torch.ones(8, 8)}, "small.safetensors")
with init_empty_weights():
    small = nn.Sequential(nn.Linear(8, 8, bias=False))
load_checkpoint_and_dispatch(small, "small.safetensors", "auto", {"cpu": limit})(torch.ones(1, 8))
ctypes.CDLL(None).malloc_trim(0)  # nothing that is free counts
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = memory("VmRSS")
with init_empty_weights():
    net = make()
load_checkpoint_and_dispatch(net, "saved", "auto", {"cpu": limit}, offload_folder="off")
loaded = memory("VmHWM") - before
with torch.no_grad():
    same = all(torch.equal(net(x), expected) for _ in range(2))
used = memory("VmHWM") - before
resident = sum(p.nbytes for p in net.parameters() if not p.is_meta)
print(json.dumps({"loaded": loaded, "used": used, "same": same, "resident": resident}))
"""


def run(folder, layers, width, limit, shards):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, (layers, width, limit, shards))],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("layers", "width", "limit", "shards"),
    [
        (50, 1024, 50 * 10**6, 3),
        pytest.param(120, 2048, 500 * 10**6, 8, marks=pytest.mark.long),
    ],
    ids=["200MB", "2GB"],
)
def test_memory_stays_below_what_is_allowed(tmp_path, layers, width, limit, shards):
    layer = width * width * 4
    assert layers * layer > 4 * limit
    found = run(tmp_path, layers, width, limit, shards)
    assert found["same"]
    assert 0 < found["resident"] <= limit - layer
    assert found["loaded"] < limit + 2 * layer
    assert found["used"] < limit + 2 * layer
