"""`kill -9` at any moment, started again with the same command: nothing differs (P1, P3)."""

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
UPDATES = 21  # three epochs of seven
CALLS = 480  # fewer than the run makes of those that put files on the disk


def sweep(folder: Path, kinds: list[Any], limit: int, program: str = "kill_sweep") -> int:
    """Run a program of this folder; the number of kills, none of which made a difference."""
    process = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{program}", str(folder), json.dumps(kinds)],
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


def plan(seed: int, steps: list[int], calls: int, times: int) -> list[dict[str, Any]]:
    """One kill at each of the updates, some while saving, some by the clock; some many in a row."""
    draw = random.Random(seed)
    return [
        *({"kind": "step", "points": [step]} for step in steps),
        *({"kind": "call", "points": [draw.randrange(1, CALLS)]} for _ in range(calls)),
        *({"kind": "time", "points": [draw.uniform(0.05, 2.0)]} for _ in range(times)),
        {"kind": "step", "points": [2, 3, 5, 8, 8, 15, 20]},  # three of them in one epoch
        {"kind": "call", "points": [draw.randrange(1, CALLS // 4) for _ in range(5)]},
    ]


@pytest.mark.timeout(900)  # some forty starts, on a machine that may be busy with others
def test_killed_runs_equal_an_uninterrupted_one(tmp_path):
    assert sweep(tmp_path, plan(1, [0, 6, 10], calls=4, times=2), limit=840) >= 15


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_runs_killed_anywhere_equal_an_uninterrupted_one(tmp_path):
    steps = list(range(UPDATES))
    assert sweep(tmp_path, plan(2, steps, calls=150, times=100), limit=3500) >= 150
