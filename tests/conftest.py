"""Fixtures for every test: a fresh folder and seed, nothing left behind, and pools of ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import tqdm

from tests.helpers import isolation
from tests.helpers.ranks import RankPool
from tests.helpers.requires import skip_reason
from trackers.registry import _REGISTRY

# The bar's monitor is a thread that never ends; compiling in place needs no pool of compilers.
tqdm.tqdm.monitor_interval = 0
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What a shell puts in the background begins with interrupts ignored; tests of them need them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test speaks to a service, nor do the SDKs tell their makers of errors, on threads that stay.
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "COMET_START_ONLINE": "false",
    "COMET_ERROR_TRACKING_ENABLE": "false",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = skip_reason(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def leave_no_trace(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test seeded and in its own folder; fail it if it leaves anything behind.

    The state that `trainer` shares over the process, the registered trackers, torch's settings, the
    process group and the working folder are put back without a word, since a test has no other way
    to do it. Threads, child processes, open files, signal handlers and environment variables are an
    error.
    """
    home = Path.cwd()
    if torch.cuda.is_available():  # what is not marked is about the CPU, here too
        os.environ["ACCELERATE_USE_CPU"] = "false" if "gpu" in request.keywords else "true"
    before = isolation.Snapshot()
    registered = dict(_REGISTRY)
    os.chdir(tmp_path)
    isolation.reset_torch()

    yield

    os.chdir(home)
    _REGISTRY.clear()
    _REGISTRY.update(registered)
    if "wandb" in sys.modules:  # its own process serves this one until it is told to end
        sys.modules["wandb"].teardown()
    isolation.reset_trainer_state()
    isolation.destroy_process_group()
    isolation.reset_torch()
    leaks = isolation.leaks(before, tmp_path)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the pool of n ranks; its processes start when it is first called."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def ranks2(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)


@pytest.fixture(scope="session")
def ranks3(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(3)


@pytest.fixture(scope="session")
def ranks4(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)
