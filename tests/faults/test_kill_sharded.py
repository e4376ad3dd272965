"""Sharded runs are killed at any moment and go on, on the same layout or another (P1, P2, P3)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 8  # two epochs of four
CALLS = 160  # about as many as rank 0 makes of those that put files on the disk
SHARDED = ("fsdp", "hsdp", "tp", "fsdp_tp")
# Layouts with as many shares of the data: a run may change between them within an epoch.
ALIKE = (("one", "tp"), ("ddp", "fsdp", "fsdp_tp"), ("fsdp_4", "hsdp"))


def sweep(folder: Path, runs: list[list[dict[str, Any]]], limit: int) -> int:
    """Run the sweep; return the number of kills, none of which made a difference."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_sharded", str(folder), json.dumps(runs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["different"] == [], process.stderr
    return int(result["kills"])


def kill(layout: str, draw: random.Random) -> dict[str, Any]:
    """Return a kill of one process: at an update, while saving, or of all by the clock."""
    kind = draw.choice(["step", "call", "call", "time"])
    when: float = draw.randrange(1, UPDATES)
    if kind == "call":
        when = draw.randrange(1, CALLS)
    if kind == "time":
        when = draw.uniform(0.2, 4.0)
    return {"layout": layout, "kind": kind, "when": when, "rank": draw.randrange(4)}


@pytest.mark.timeout(600)
def test_killed_sharded_runs_equal_uninterrupted_ones(tmp_path):
    on_shards = [
        {"layout": "fsdp", "kind": "step", "when": 3, "rank": 1},
        {"layout": "fsdp", "kind": "call", "when": 60, "rank": 0},
    ]
    to_another = [
        {"layout": "fsdp", "kind": "step", "when": 3},
        {"layout": "ddp", "kind": "step", "when": 6},
    ]
    assert sweep(tmp_path, [on_shards, to_another], limit=540) == 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_runs_killed_on_all_layouts_equal_uninterrupted_ones(tmp_path):
    draw = random.Random(3)
    runs = [[kill(layout, draw) for _ in range(2)] for layout in SHARDED for _ in range(8)]
    runs += [[kill(draw.choice(alike), draw) for _ in range(4)] for alike in ALIKE * 9]
    assert sweep(tmp_path, runs, limit=3500) >= 100
