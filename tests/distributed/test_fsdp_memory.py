"""Memory and bytes of a sharded state: a process holds, copies and reads its own share alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from tests.helpers.megatron import cuda_on_cpu, gpt
from tests.helpers.ranks import RankPool
from trainer import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    Trainer,
    TrainModule,
)
from trainer.checkpoint.shards import merge_weights
from trainer.loops import setup

WIDTH, LAYERS = 1024, 8
TENSOR = 4 * WIDTH**2  # bytes of a whole weight
MODEL = LAYERS * TENSOR
STATE = 3 * MODEL  # with the two moments of AdamW
SLACK = TENSOR // 2  # of Python's objects, buffers of files, and headers

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel's counters are Linux's"
)


class Wide(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Language(Wide):
    """A GPT of megatron-core, whose largest weight has as many bytes."""

    def __init__(self, plugin: MegatronLMPlugin) -> None:
        TrainModule.__init__(self)
        heads = {"hidden_size": WIDTH // 2, "num_attention_heads": 4}
        self.model = gpt(plugin.transformer_arguments("no"), **heads)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :8].long()
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
        places = torch.arange(8).expand(len(x), -1)
        return self.model(tokens, places, mask, labels=tokens)


def fsdp() -> dict[str, Any]:
    wraps = FullyShardedDataParallelPlugin(
        auto_wrap_policy=lambda part: isinstance(part, nn.Linear)
    )
    return {"fsdp_plugin": wraps}


def zero(stage: int, precision: str = "no") -> Callable[[], dict[str, Any]]:
    return lambda: {
        "deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage),
        "mixed_precision": precision,
    }


def megatron() -> dict[str, Any]:
    return {"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2)}


def around(layout: str) -> AbstractContextManager[None]:
    return cuda_on_cpu() if layout == "megatron" else nullcontext()


def model_for(plugin: MegatronLMPlugin | None) -> Wide:
    return Wide() if plugin is None else Language(plugin)


def share_of(model: nn.Module) -> int:
    """The bytes of the state that a process of two has."""
    held = sum(each.nbytes for each in model.parameters())
    return 3 * held if isinstance(model, Language) else STATE // 2


@pytest.fixture(scope="module")
def exact() -> Iterator[RankPool]:
    """Two processes that give each tensor pages of its own, and give them back with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
        pool = RankPool(2)
        pool(dist.barrier)
    yield pool
    pool.close()


def counter(file: str, name: str) -> int:
    """A number of the kernel about this process, in bytes."""
    lines = Path("/proc/self", file).read_text().splitlines()
    words = next(line for line in lines if line.startswith(f"{name}:")).split()
    return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)


def peak(work: Callable[[], Any]) -> int:
    """By how many bytes the resident memory rose at most."""
    gc.collect()
    before = counter("status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    work()
    return counter("status", "VmHWM") - before


def read(work: Callable[[], Any]) -> int:
    """How many bytes were read of files."""
    before = counter("io", "rchar")
    work()
    return counter("io", "rchar") - before


def loop(
    *, steps: int, layout: Callable[[], dict[str, Any]] = fsdp
) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **layout())
    model = model_for(accelerator.state.megatron_lm_plugin)
    prepared, optimizer = accelerator.prepare(model, model.configure_optimizers())
    for _ in range(steps):
        accelerator.backward(prepared(torch.ones(1, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, prepared, optimizer


def local_bytes(tensors: Any) -> int:
    return sum(each.to_local().nbytes for each in tensors if isinstance(each, DTensor))


def test_a_process_holds_its_share(exact):
    def look() -> list[int]:
        accelerator, model, optimizer = loop(steps=1)
        accelerator.backward(model(torch.ones(1, WIDTH)).square().mean())
        moments = [each for state in optimizer.state.values() for each in state.values()]
        parameters = list(model.parameters())
        kinds = parameters, [each.grad for each in parameters], moments
        return [local_bytes(kind) for kind in kinds]

    assert exact(look) == [[MODEL // 2, MODEL // 2, MODEL]] * 2


LAYOUTS = {
    "fsdp": fsdp,
    "zero1": zero(1),
    "zero2": zero(2, "bf16"),
    "zero3": zero(3, "bf16"),
    "megatron": megatron,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_waits_with_nothing_twice_and_in_the_background_with_a_copy(exact, layout, tmp_path):
    def save() -> list[int]:
        accelerator, model, _ = loop(steps=1, layout=LAYOUTS[layout])
        peaks = [share_of(accelerator.unwrap_model(model))]
        peaks += [peak(lambda: accelerator.save_state(tmp_path / "state"))]

        class Save(Callback):
            def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
                def save() -> None:
                    trainer.save_checkpoint(tmp_path / str(trainer.global_step), background=True)
                    trainer.wait_for_save()

                peaks.append(peak(save))

        fit(tmp_path, max_steps=2, callbacks=[Save()], layout=LAYOUTS[layout])
        return peaks

    def run() -> list[int]:
        with around(layout):
            return save()

    for share, waiting, first, second in exact(run):
        assert waiting < TENSOR + SLACK
        assert share <= first < share + TENSOR + SLACK
        assert second < TENSOR + SLACK  # the memory of the first is used again


def fit(folder: Path, **options: Any) -> None:
    options = {"checkpointing": False, "progress_bar": False, "project_dir": folder, **options}
    ckpt_path, layout = options.pop("ckpt_path", None), options.pop("layout", fsdp)
    trainer = Trainer(cpu=True, **layout(), **options)
    batches = DataLoader(TensorDataset(torch.ones(8, WIDTH)), 1)
    model = model_for(trainer.accelerator.state.megatron_lm_plugin)
    trainer.fit(model, batches, ckpt_path=ckpt_path)


@pytest.mark.parametrize("steps", [0, 1])
def test_loading_fills_what_there_is_a_tensor_at_a_time(exact, steps, tmp_path):
    exact(lambda: loop(steps=1)[0].save_state(tmp_path / "state"))

    def load() -> int:
        accelerator, *_ = loop(steps=steps)
        return peak(lambda: accelerator.load_state(tmp_path / "state"))

    grows = 0 if steps else MODEL  # the moments, which the first step else makes
    assert all(grows <= found < grows + TENSOR + SLACK for found in exact(load))


def test_a_run_resumes_within_its_own_memory(exact, tmp_path):
    def resume() -> dict[str, int]:
        load, found, result = setup.load_run, dict[str, int](), list[Any]()

        def measured(*arguments: Any, **options: Any) -> Any:
            def work() -> None:
                result.append(load(*arguments, **options))

            found["read"] = read(lambda: found.update(peak=peak(work)))
            return result[0]

        with mock.patch.object(setup, "load_run", measured):
            fit(tmp_path, max_steps=2, checkpointing=True, ckpt_path="auto")
        return found

    exact(lambda: fit(tmp_path, max_steps=1, checkpointing=True))
    for each in exact(resume):
        assert MODEL <= each["peak"] < MODEL + TENSOR + SLACK
        assert STATE // 2 <= each["read"] < STATE // 2 + SLACK


@pytest.mark.parametrize("processes", [2, 4])
def test_only_the_bytes_of_its_share_are_read(ranks, ranks2, processes, tmp_path):
    saving = ranks2 if processes == 2 else ranks(4)
    saving(lambda: loop(steps=1)[0].save_state(tmp_path / "state"))

    def load() -> tuple[int, Any]:
        accelerator, model, optimizer = loop(steps=0)
        number = read(lambda: accelerator.load_state(tmp_path / "state"))
        first = next(model.parameters())
        return number, [
            t.full_tensor() for t in (first.detach(), optimizer.state[first]["exp_avg"])
        ]

    expected = STATE // 2 + STATE // 2  # each hashes a half, and reads its share
    numbers, values = zip(*ranks2(load), strict=True)
    assert all(expected <= number < expected + SLACK for number in numbers)

    def uninterrupted() -> Any:
        _, model, optimizer = loop(steps=1)
        first = next(model.parameters())
        return [t.full_tensor() for t in (first.detach(), optimizer.state[first]["exp_avg"])]

    for one, other in zip(values[0], saving(uninterrupted)[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_weights_are_written_a_tensor_at_a_time(exact, layout, tmp_path):
    def save() -> tuple[int, int]:
        accelerator, model, _ = loop(steps=1, layout=LAYOUTS[layout])
        accelerator.save_state(tmp_path / "state")
        written = peak(lambda: accelerator.save_model(model, tmp_path / "whole"))
        target = tmp_path / f"merged-{dist.get_rank()}.safetensors"
        return written, peak(lambda: merge_weights(tmp_path / "state", target))

    def run() -> tuple[int, int]:
        with around(layout):
            return save()

    for written, merged in exact(run):
        assert written < 3 * TENSOR + SLACK  # gathering one takes its parts, too
        assert merged < 2 * TENSOR + SLACK
