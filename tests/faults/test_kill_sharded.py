"""Sharded runs are killed at any moment and go on, on the same layout or another (P1, P2, P3)."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from tests.faults.test_kill import sweep

UPDATES = 8  # two epochs of four
CALLS = 160  # about as many as rank 0 makes of those that put files on the disk
SHARDED = ("fsdp", "hsdp", "tp", "fsdp_tp")
STAGES = ("pp", "pp_dp", "pp_fsdp", "pp_tp")
DRIVEN = ("zero0", "zero1", "zero2", "zero3", "megatron_tp", "megatron_pp")
PHASES = ("between", "batch", "update", "save", "save")  # see `kill_sharded.Moments`
# Layouts with as many shares of the data: a run may change between them within an epoch.
ALIKE = (("one", "tp"), ("ddp", "fsdp", "fsdp_tp"), ("fsdp_4", "hsdp"))


def kill(layout: str, draw: random.Random, calls: int = CALLS, ranks: int = 4) -> dict[str, Any]:
    """Return a kill of one process: at an update, while saving, or of all by the clock."""
    kind = draw.choice(["step", "call", "call", "time"])
    when: float = draw.randrange(1, UPDATES)
    if kind == "call":
        when = draw.randrange(1, calls)
    if kind == "time":
        when = draw.uniform(0.2, 4.0)
    return {"layout": layout, "kind": kind, "when": when, "rank": draw.randrange(ranks)}


def kills_at_phases(layout: str, draw: random.Random, number: int = 4) -> list[dict[str, Any]]:
    """Return kills of one process in a run, each in a later update than the one before."""
    kills = []
    for update in sorted(draw.sample(range(1, UPDATES), number)):
        kind = draw.choice(PHASES)
        rank = 0 if kind == "batch" else draw.randrange(2)  # 1 has none in a last window
        call = draw.randrange(1, 4 if rank else 11)  # rank 1 writes its own files alone
        kills.append({"layout": layout, "kind": kind, "when": update, "call": call, "rank": rank})
    return kills


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
    in_pieces = [
        {"layout": "zero3", "kind": "step", "when": 3, "rank": 1},
        {"layout": "zero3", "kind": "call", "when": 60, "rank": 0},
    ]
    in_stages = [
        {"layout": "pp", "kind": "step", "when": 3, "rank": 1},
        {"layout": "pp", "kind": "call", "when": 60, "rank": 0},
    ]
    runs = [on_shards, to_another, in_pieces, in_stages]
    assert sweep(tmp_path, runs, 540, "kill_sharded") == 8


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_runs_killed_on_all_layouts_equal_uninterrupted_ones(tmp_path):
    draw = random.Random(3)
    runs = [[kill(layout, draw) for _ in range(2)] for layout in SHARDED for _ in range(8)]
    runs += [[kill(draw.choice(alike), draw) for _ in range(4)] for alike in ALIKE * 9]
    assert sweep(tmp_path, runs, 3500, "kill_sharded") >= 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_runs_of_deepspeed_and_megatron_killed_anywhere_equal_uninterrupted_ones(tmp_path):
    draw = random.Random(4)
    hits = partial(kill, draw=draw, calls=CALLS // 2, ranks=2)
    runs = [[hits(layout) for _ in range(5)] for layout in (*STAGES, *DRIVEN) for _ in range(4)]
    alike = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
    runs += [[hits(draw.choice(alike)) for _ in range(5)] for _ in range(4)]
    assert sweep(tmp_path, runs, 3500, "kill_sharded") >= 60


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_runs_of_deepspeed_and_megatron_killed_in_each_phase_equal_uninterrupted_ones(tmp_path):
    draw = random.Random(5)
    runs = [kills_at_phases(layout, draw) for layout in DRIVEN for _ in range(4)]
    assert sweep(tmp_path, runs, 3500, "kill_sharded") == len(runs) * 4
