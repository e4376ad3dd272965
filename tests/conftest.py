"""Fixtures for every test: a fresh folder and seed, a check for leaks, and pools of ranks."""

from __future__ import annotations

import gc
import os
import shutil
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

# The monitor of tqdm is a thread that never ends; with one compile thread, inductor needs no pool.
tqdm.tqdm.monitor_interval = 0
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The folders of tests are in memory where that is large: a test that saves waits for the disk for
# half of its time otherwise. A container gives 64 MB, and may run no programs from there.
MEMORY = Path("/dev/shm")
if (
    MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free > 2**31
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# A shell starts background jobs with SIGINT ignored; some tests need its default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test contacts a service, and the SDKs send no error reports, which leave threads running.
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "COMET_START_ONLINE": "false",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_DISABLE_AUTO_LOGGING": "1",  # else it makes an experiment of each mlflow.start_run
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # else its databases stay open
    # Set by importing deepspeed, as accelerate does where it is installed, and by Lightning.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = skip_reason(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def leave_no_trace(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test seeded and in its own folder; fail it if it leaves anything behind.

    The process-wide state of `trainer`, the registered trackers, torch's settings, the process
    group and the working folder are restored silently, since a test has no other way to do so.
    Leaked threads, child processes, open files, signal handlers and environment variables are
    errors.
    """
    home = Path.cwd()
    if torch.cuda.is_available():  # tests without the gpu mark run on the CPU, here too
        os.environ["ACCELERATE_USE_CPU"] = "false" if "gpu" in request.keywords else "true"
    before = isolation.Snapshot()
    registered = dict(_REGISTRY)
    os.chdir(tmp_path)
    isolation.reset_torch()

    yield

    os.chdir(home)
    _REGISTRY.clear()
    _REGISTRY.update(registered)
    if "wandb" in sys.modules:  # its service process runs until teardown
        sys.modules["wandb"].teardown()
    isolation.reset_trainer_state()
    isolation.destroy_process_group()
    isolation.reset_torch()
    leaks = isolation.leaks(before, tmp_path)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def skip_what_is_old() -> None:
    """Let collections of garbage skip what existed before the file's tests.

    A collection takes a fifth of a second otherwise, most of it for what torch consists of.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the pool of n ranks, whose processes start when the pool is first called."""
    pytest.importorskip("cloudpickle")
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
