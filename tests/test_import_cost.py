"""`import trainer` costs little more than `import torch` and touches no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Features that not everybody has installed, and what takes long to import.
OPTIONAL = [
    "IPython",
    "aim",
    "clearml",
    "comet_ml",
    "deepspeed",
    "dvclive",
    "matplotlib",
    "mlflow",
    "pandas",
    "rich",
    "sklearn",
    "swanlab",
    "tensorboard",
    "torch.utils.tensorboard",
    "torchmetrics",
    "trackio",
    "wandb",
]

SCRIPT = """
import json, random, sys, threading
import torch
state, python_state = torch.get_rng_state(), random.getstate()
before = set(sys.modules)
found = {}
for statement in sys.argv[1:]:
    exec(statement)
    new = set(sys.modules) - before
    found[statement] = {
        "new": sorted(new),
        "cuda": torch.cuda.is_initialized(),
        "group": torch.distributed.is_initialized(),
        "threads": threading.active_count(),
        "untouched": torch.equal(torch.get_rng_state(), state)
        and random.getstate() == python_state,
    }
print(json.dumps(found))
"""

# In this order, in one process: what an earlier one loads counts for the later ones too.
STATEMENTS = ["import trainer", "import trainer.accelerate", "from trainer import *"]


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory) -> dict[str, Any]:
    """What a fresh process has loaded beyond torch after each statement, and has started."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *STATEMENTS],
        cwd=tmp_path_factory.mktemp("import"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=STATEMENTS)
def loaded(request, fresh_process) -> dict[str, Any]:
    found: dict[str, Any] = fresh_process[request.param]
    found["statement"] = request.param
    found["foreign"] = [
        name
        for name in found["new"]
        if name.partition(".")[0] not in ("callbacks", "trackers", "trainer")
    ]
    return found


def test_few_modules_are_imported_beyond_torch(loaded):
    foreign = loaded["foreign"]
    print(
        f"{loaded['statement']}: {len(loaded['new'])} modules, {len(foreign)} not ours: {foreign}"
    )
    assert len(loaded["new"]) < (240 if "*" in loaded["statement"] else 10)
    assert len(foreign) < 20, foreign


def test_nothing_optional_is_imported(loaded):
    assert [name for name in OPTIONAL if name in loaded["new"]] == []


def test_no_device_group_or_thread_is_started(loaded):
    assert not loaded["cuda"]
    assert not loaded["group"]
    assert loaded["threads"] == 1


def test_no_generator_is_seeded_or_drawn_from(loaded):
    assert loaded["untouched"]
