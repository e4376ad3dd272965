"""What the documented members of `Accelerator` do together, on 1, 2 and 4 processes.

Accumulation and the update itself are in tests/numerics/test_accumulate.py.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.helpers.ranks import RankError
from tests.numerics.running import on_processes
from trackers import GeneralTracker
from trainer import (
    Accelerator,
    CheckpointError,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DynamoBackend,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
    PrecisionType,
    ProjectConfiguration,
    TorchDynamoPlugin,
    load_checkpoint_in_model,
    set_seed,
)
from trainer.data.dataloader import DataLoaderShard
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.scheduler import AcceleratedScheduler
from trainer.parallelism import ParallelismConfig

WORLDS = (1, 2, 4)


def accelerate(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def digits(count: int, batch_size: int = 1, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size, **kwargs)


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


# -- prepare -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("order", range(3))
def test_several_of_each_are_prepared_in_any_order(ranks, world, order):
    def prepare() -> list[str]:
        accelerator = accelerate()
        model = DistributedDataParallel if world > 1 else nn.Sequential
        objects: dict[str, Any] = {"m0": network(), "m1": network()}
        expected: dict[str, Any] = {"m0": model, "m1": model}
        for name in ("0", "1"):
            objects["o" + name] = sgd(objects["m" + name])
            objects["s" + name] = StepLR(objects["o" + name], 1)
            objects["d" + name] = digits(4)
            expected["o" + name] = AcceleratedOptimizer
            expected["s" + name] = AcceleratedScheduler
            expected["d" + name] = DataLoaderShard
        objects["stream"] = DataLoader(Stream(4))
        expected["stream"] = DataLoaderDispatcher
        others = {"text": "text", "none": None, "list": [1], "call": len, "tensor": torch.ones(1)}
        objects |= others
        names = list(objects)
        random.Random(order).shuffle(names)
        prepared = accelerator.prepare(*(objects[name] for name in names))
        assert isinstance(prepared, tuple)
        found = dict(zip(names, prepared, strict=True))
        wrong = [name for name, kind in expected.items() if type(found[name]) is not kind]
        wrong += [name for name, other in others.items() if found[name] is not other]
        for name in ("0", "1"):
            assert accelerator.unwrap_model(found["m" + name]) is objects["m" + name]
            assert found["o" + name].optimizer is objects["o" + name]
            assert found["s" + name].scheduler is objects["s" + name]
            assert found["s" + name].optimizers == [found["o" + name]]
        assert all(a is b for a, b in zip(accelerator.prepare(*prepared), prepared, strict=True))
        raw = [name for name in objects if name[0] in "mo" or name in ("s0", "s1")]
        again = accelerator.prepare(*(objects[name] for name in raw))
        assert all(each is found[name] for each, name in zip(again, raw, strict=True))
        groups = (accelerator._models, accelerator._optimizers, accelerator._schedulers)
        assert [len(group) for group in (*groups, accelerator._dataloaders)] == [2, 2, 2, 3]
        return wrong

    assert on_processes(ranks, world, prepare) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_a_schedule_waits_for_its_own_optimizer_only(ranks, world):
    def rates() -> list[list[float]]:
        accelerator = accelerate(
            mixed_precision="fp16",
            scheduler_tick="update",
            kwargs_handlers=[GradScalerKwargs(init_scale=4.0)],
        )
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        plain = [sgd(model, lr=1.0) for model in models]
        *models, one, two, first, second, both = accelerator.prepare(
            *models,
            *plain,
            *(StepLR(each, 1, gamma=0.5) for each in plain),
            StepLR(sgd(network()), 1),
        )
        assert both.optimizers == [one, two]  # of an optimizer that was not prepared: all
        found = []
        for bad in (False, True):
            x = torch.ones(1, 1)
            factor = torch.inf if bad and accelerator.is_last_process else 1.0
            accelerator.backward(models[0](x).sum() * factor + models[1](x).sum())
            for each in (one, two, first, second):
                each.step()
            for each in (one, two):
                each.zero_grad()
            found.append([*first.get_last_lr(), *second.get_last_lr()])
            assert accelerator.optimizer_step_was_skipped == bad
            assert [one.step_was_skipped, two.step_was_skipped] == [bad, False]
        return found

    assert on_processes(ranks, world, rates) == [[[0.5, 0.5], [0.5, 0.25]]] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("precision", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_precisions_compute_narrow_and_train_wide(ranks, world, precision, narrow):
    def train() -> dict[str, Any]:
        accelerator = accelerate(
            mixed_precision=PrecisionType(precision),
            kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        )
        inside = []

        class Watched(nn.Linear):
            def forward(self, x: Tensor) -> dict[str, Tensor]:
                out = super().forward(x)
                inside.append(out.dtype)
                return {"out": out}

        torch.manual_seed(0)
        model = Watched(8, 1)
        before = model.weight.detach().clone()
        model, optimizer = accelerator.prepare(model, sgd(model))
        with accelerator.autocast():
            inside.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
        x = torch.randn(4, 8)
        accelerator.backward(model(x)["out"].sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e6).item()
        optimizer.step()
        own = accelerator.unwrap_model(model)
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert plain is own
        wide = plain(x)["out"].dtype
        moved = (before - own.weight).detach()
        return {
            "inside": inside,
            "outputs": [model(x)["out"].dtype, wide],
            "weight": own.weight.dtype,
            "norm": norm,
            "error": (moved - 0.1 * x.sum(0)).abs().max().item(),
            "expected": torch.cat([x.sum(0), torch.tensor([4.0])]).norm().item(),
            "scaled": accelerator.scaler is not None,
        }

    for found in on_processes(ranks, world, train):
        assert found["inside"] == [narrow, narrow, torch.float32, torch.float32]
        assert found["outputs"] == [torch.float32, torch.float32]
        assert found["weight"] == torch.float32
        assert found["norm"] == pytest.approx(found["expected"], rel=0.02)
        assert found["error"] < 0.02
        assert found["scaled"] == (precision == "fp16")


# -- collectives -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_is_gathered_once_whatever_the_loader(ranks, world):
    options: list[dict[str, Any]] = [
        {},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"dispatch_batches": True, "split_batches": True},
        {"use_seedable_sampler": True},
    ]

    def evaluate() -> list[Any]:
        wrong = []
        for option in options:
            accelerator = accelerate(**option)
            for count in (1, 4, 7, 9, 16):
                sources = [TensorDataset(torch.arange(count)), Stream(count)]
                loaders = [accelerator.prepare(DataLoader(each, 4)) for each in sources]
                for loader in loaders:
                    numbers: list[int] = []
                    names: list[str] = []
                    for batch in loader:
                        own = batch if isinstance(batch, Tensor) else batch[0]
                        found = accelerator.gather_for_metrics({"a": own, "b": (own * 2,)})
                        assert torch.equal(found["a"] * 2, found["b"][0])
                        numbers += found["a"].tolist()
                        names += accelerator.gather_for_metrics([str(i) for i in own.tolist()])
                        lists = accelerator.gather_for_metrics(list(own), use_gather_object=True)
                        assert [int(i) for i in lists] == found["a"].tolist()
                    if numbers != list(range(count)) or names != [str(i) for i in range(count)]:
                        wrong.append((option, count, type(loader).__name__, numbers, names))
        return wrong

    assert on_processes(ranks, world, evaluate) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_values_are_exchanged(ranks, world):
    def exchange() -> dict[str, Any]:
        accelerator = accelerate()
        rank = accelerator.process_index
        own = torch.arange(rank + 1) + 10 * rank
        padded = accelerator.pad_across_processes({"a": own}, pad_index=-1)["a"]
        first = accelerator.pad_across_processes(own, pad_first=True)
        weight = torch.tensor([float(rank)])
        return {
            "padded": accelerator.gather(padded).tolist(),
            "first": first.tolist(),
            "sum": accelerator.reduce([weight])[0].item(),
            "mean": accelerator.reduce(weight, reduction="mean").item(),
            "none": accelerator.reduce(weight, reduction="none").item(),
            "scalar": accelerator.gather(torch.tensor(rank)).tolist(),
            "kept": weight.item(),
            "graphs": [
                accelerator.reduce(weight.clone().requires_grad_(), how).requires_grad
                for how in ("sum", "mean", "none")
            ],
        }

    ranks_ = range(world)
    rows = [[10 * r + i if i <= r else -1 for i in ranks_] for r in ranks_]
    for rank, found in enumerate(on_processes(ranks, world, exchange)):
        assert found == {
            "padded": [value for row in rows for value in row],
            "first": [0] * (world - rank - 1) + [10 * rank + i for i in range(rank + 1)],
            "sum": sum(ranks_),
            "mean": sum(ranks_) / world,
            "none": rank,
            "scalar": list(ranks_) if world > 1 else 0,  # alone, what was given
            "kept": rank,
            "graphs": [False] * 3,  # backward would know this process's own value alone
        }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dispatch", [False, True])
def test_what_is_cut_follows_the_sampler_and_what_was_skipped(ranks, world, dispatch):
    def evaluate() -> list[list[int]]:
        accelerator = accelerate(dispatch_batches=dispatch)

        def gathered(loader: Any) -> list[int]:
            return [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]

        even = accelerator.prepare(DataLoader(range(23), sampler=range(0, 23, 2), batch_size=1))
        every = accelerator.prepare(DataLoader(range(23), batch_size=2))
        return [gathered(even), gathered(accelerator.skip_first_batches(every, 1))]

    expected = [list(range(0, 23, 2)), list(range(2 * world, 23))]
    assert on_processes(ranks, world, evaluate) == [expected] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_no_sample_is_repeated_where_batches_need_not_be_even(ranks, world, dispatch, stream):
    def read() -> list[list[int]]:
        accelerator = accelerate(dispatch_batches=dispatch, even_batches=False)
        data: Any = Stream(9) if stream else range(9)
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        return [batch.tolist() for batch in loader]

    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert on_processes(ranks, world, read) == [batches[rank::world] for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_trigger_of_one_is_seen_by_all_and_only_once(ranks, world):
    def look() -> list[bool]:
        accelerator = accelerate()
        seen = [accelerator.check_trigger()]
        if accelerator.is_last_process:
            accelerator.set_trigger()
            accelerator.set_trigger()
        seen += [accelerator.check_trigger(), accelerator.check_trigger()]
        accelerator.set_trigger()
        return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]

    assert on_processes(ranks, world, look) == [[False, True, False, True, False]] * world


# -- who runs what -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_functions_run_where_they_are_to(ranks, world):
    def run() -> dict[str, Any]:
        accelerator = accelerate()
        last = accelerator.num_processes - 1

        def where(number: int = 0) -> int:
            return accelerator.process_index * 10 + number

        @accelerator.on_process(process_index=last)
        def decorated(number: int) -> int:
            return where(number)

        return {
            "main": accelerator.on_main_process(where)(1),
            "local": accelerator.on_local_main_process(where)(number=2),
            "last": accelerator.on_last_process(where)(3),
            "process": decorated(4),
            "same": accelerator.on_process(where, process_index=last)(4),
            "local process": accelerator.on_local_process(where, local_process_index=0)(5),
        }

    for rank, found in enumerate(on_processes(ranks, world, run)):
        first, last = rank == 0, rank == world - 1
        assert found == {
            "main": 1 if first else None,
            "local": 2 if first else None,
            "last": 10 * rank + 3 if last else None,
            "process": 10 * rank + 4 if last else None,
            "same": 10 * rank + 4 if last else None,
            "local process": 5 if first else None,
        }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
def test_the_first_process_prepares_what_the_others_read(ranks, world, method):
    def read() -> str:
        accelerator = accelerate()
        with getattr(accelerator, method)():
            if accelerator.is_main_process:
                Path("cache.txt").write_text("ready")
            found = Path("cache.txt").read_text()
        accelerator.wait_for_everyone()
        return found

    assert on_processes(ranks, world, read) == ["ready"] * world


def test_what_fails_in_the_first_process_is_raised_on_all(ranks2):
    def fail() -> None:
        accelerator = accelerate()
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise OSError("the disk is full")

    with pytest.raises(RankError) as caught:
        ranks2(fail)
    assert sorted(caught.value.failures) == [0, 1]
    assert all("the disk is full" in text for text in caught.value.failures.values())


def test_print_is_heard_once(ranks2):
    def heard() -> str:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as text:
            accelerate().print("loss", 1, sep="=")
        return text.getvalue()

    assert ranks2(heard) == ["loss=1\n", ""]


@pytest.mark.parametrize("world", WORLDS)
def test_inputs_are_split_and_come_together_again(ranks, world):
    def split(count: int) -> tuple[Any, ...]:
        accelerator = accelerate()
        prompts = {"text": [f"p{i}" for i in range(count)], "number": torch.arange(count)}
        before = copy.deepcopy(prompts)
        with accelerator.split_between_processes(prompts) as own:
            parts = own["text"], own["number"].tolist()
        with accelerator.split_between_processes(prompts["number"], apply_padding=True) as own:
            together = accelerator.gather(own)[:count].tolist()
        with accelerator.split_between_processes(prompts["text"], apply_padding=True) as own:
            length = len(own)
        assert prompts["text"] == before["text"]
        assert torch.equal(prompts["number"], before["number"])
        return parts, together, length

    for count in (5, 8):
        found = on_processes(ranks, world, split, count)
        numbers = [number for (_, own), _, _ in found for number in own]
        texts = [text for (own, _), _, _ in found for text in own]
        assert numbers == list(range(count))
        assert texts == [f"p{i}" for i in range(count)]
        sizes = [len(own) for (own, _), _, _ in found]
        assert sizes == [count // world + (rank < count % world) for rank in range(world)]
        padded = -(-count // world)
        assert [length for _, _, length in found] == [padded] * world
        if world in (1, 2) or count == 8:  # else padding lies between the parts
            assert [len(together) for _, together, _ in found] == [count] * world


# -- saving ------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Augments at random, so that the generators of each batch matter."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 22, random.random(), 0.0]) + torch.rand(3)


class Progress:
    """What a script keeps for itself."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.seen = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def run(
    precision: str,
    *,
    seed: int = 1,
    save: int | None = None,
    resume: bool = False,
    count: int = 22,
    **options: Any,
) -> list[Any]:
    """Two epochs of a script that may save after some batch, and may go on from there."""
    accelerator = accelerate(
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**30 / seed, growth_interval=2)],
        **options,
    )
    set_seed(seed, device_specific=True)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1)
    )
    critic = nn.Linear(3, 1)
    optimizers = torch.optim.AdamW(model.parameters(), lr=0.01 * seed), sgd(critic)
    schedules = CosineAnnealingLR(optimizers[0], 40), StepLR(optimizers[1], 3)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    model, critic, one, two, slow, steep, loader = accelerator.prepare(
        model, critic, *optimizers, *schedules, DataLoader(Noisy(count), 2, shuffle=True)
    )
    if resume:
        accelerator.load_state("saved")
    trace: list[Any] = []
    number = 0
    while progress.epoch < 2:
        data = accelerator.skip_first_batches(loader, progress.batch)
        for batch in data if progress.batch else loader:
            with accelerator.accumulate(model, critic):
                jitter = random.random() + numpy.random.rand()
                loss = (model(batch) - critic(batch) + jitter).square().mean()
                accelerator.backward(loss)
                for each in (one, two, slow, steep):
                    each.step()
                for each in (one, two):
                    each.zero_grad()
            progress.batch += 1
            progress.seen += accelerator.reduce(batch[:, 0].sum())
            number += 1
            own = [
                p.detach().double().sum().item()
                for p in [*model.parameters(), *critic.parameters()]
            ]
            scale = 0.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
            trace.append((loss.item(), own, slow.get_last_lr(), steep.get_last_lr(), scale))
            trace[-1] += (progress.seen.item(), progress.epoch, progress.batch)
            if number == save:
                assert accelerator.save_state("saved") == Path("saved")
        progress.epoch, progress.batch = progress.epoch + 1, 0
    return trace


def flat(trace: Any) -> list[Any]:
    """The numbers of a nest of lists and tuples."""
    return (
        [x for each in trace for x in flat(each)] if isinstance(trace, (list, tuple)) else [trace]
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("place", ["within", "last", "second"])
def test_a_new_script_goes_on_bit_identically(ranks, world, precision, place):
    batches = {1: 11, 2: 6, 4: 3}[world]  # of a process in an epoch
    save = {"within": 2, "last": batches, "second": batches + 2}[place]
    whole = on_processes(ranks, world, lambda: run(precision, save=save))
    rest = on_processes(ranks, world, lambda: run(precision, seed=5, resume=True))
    for own, found in zip(whole, rest, strict=True):
        assert len(own) == 2 * batches
        if world <= 2:
            assert found == own[save:]
        else:  # torch's DDP sums three numbers or more in another order after its first update
            for one, other in zip(flat(found), flat(own[save:]), strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    if precision == "fp16":  # there were updates that overflowed, and the scale came down
        assert whole[0][0][4] > whole[0][-1][4]
    assert len({tuple(each[0] for each in own) for own in whole}) == world  # each its own data


def test_dispatched_data_go_on_too(ranks2):
    options = {"dispatch_batches": True, "use_seedable_sampler": True, "count": 24}
    whole = ranks2(lambda: run("no", save=4, **options))
    rest = ranks2(lambda: run("no", seed=5, resume=True, **options))
    for own, found in zip(whole, rest, strict=True):
        assert len(own) == 12
        assert found == own[4:]


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_are_numbered_limited_and_found(ranks, world):
    def save_and_load() -> tuple[Any, ...]:
        def make() -> tuple[Accelerator, nn.Module]:
            config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
            accelerator = accelerate(project_config=config, project_dir="project")
            return accelerator, accelerator.prepare(nn.Linear(1, 1, bias=False))

        def value(model: nn.Module, new: float | None = None) -> float:
            weight = next(model.parameters())
            if new is not None:
                nn.init.constant_(weight, new)
            return weight.item()

        accelerator, model = make()
        names = []
        for number in range(4):
            value(model, number)
            names.append(accelerator.save_state("ignored").name)
        accelerator.project_configuration.iteration = 3
        with pytest.raises(ValueError, match="checkpoint_3 of another run exist"):
            accelerator.save_state()
        again, model = make()
        again.load_state()
        numbers = [value(model), again.save_iteration]
        again.load_state("project/checkpoints/checkpoint_2")
        numbers.append(value(model))
        again.wait_for_everyone()
        return names, sorted(path.name for path in Path("project/checkpoints").iterdir()), numbers

    names = [f"checkpoint_{number}" for number in range(4)]
    expected = (names, names[2:], [3.0, 4, 2.0])
    assert on_processes(ranks, world, save_and_load) == [expected] * world
    assert not Path("ignored").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_choose_what_is_saved_and_loaded(ranks, world):
    def hooked() -> dict[str, Any]:
        accelerator = accelerate()
        first, second = accelerator.prepare(network(), network(1))
        called: list[Any] = []

        def on_save(models: list[Any], weights: list[Any], folder: str) -> None:
            assert models == [accelerator.unwrap_model(each) for each in (first, second)]
            called.append(("save", len(weights)))
            weights.pop()
            if accelerator.is_main_process:
                (Path(folder) / "own.json").write_text("7")

        def on_load(models: list[Any], folder: str) -> None:
            called.append(
                ("load", len(models), json.loads((Path(folder) / "own.json").read_text()))
            )
            models.pop()

        handles = [
            accelerator.register_save_state_pre_hook(on_save),
            accelerator.register_load_state_pre_hook(on_load),
        ]
        accelerator.save_state("saved")
        for model in (first, second):
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        accelerator.load_state("saved")
        sums = [sum(p.abs().sum().item() for p in each.parameters()) for each in (first, second)]
        files = sorted(path.name for path in Path("saved").glob("model*"))
        for handle in handles:
            handle.remove()
        with pytest.raises(CheckpointError, match="model"):  # one was not saved
            accelerator.load_state("saved")
        accelerator.save_state("whole")
        whole = sorted(path.name for path in Path("whole").glob("model*"))
        return {"called": called, "files": [files, whole], "loaded": [one > 0 for one in sums]}

    expected = {
        "called": [("save", 2), ("load", 2, 7)],
        "files": [["model.safetensors"], ["model.safetensors", "model_1.safetensors"]],
        "loaded": [True, False],
    }
    assert on_processes(ranks, world, hooked) == [expected] * world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", ["no", "eager", DynamoBackend.EAGER])
def test_names_on_disk_are_the_users_own(ranks, world, backend):
    def save() -> list[bool]:
        accelerator = accelerate(dynamo_backend=backend)
        model = network()
        names = list(model.state_dict())
        prepared = accelerator.prepare(model)
        with torch.no_grad():
            outputs = prepared(torch.ones(2, 3))
        accelerator.save_state("state")
        with pytest.raises(ValueError, match="max_shard_size is '70B'"):  # on every process
            accelerator.save_model(prepared, "weights", max_shard_size="70B")
        accelerator.save_model(prepared, "weights", max_shard_size=70)
        accelerator.save_model(prepared, "pickled", safe_serialization=False)
        accelerator.save(accelerator.get_state_dict(prepared), "by_hand.safetensors", True)
        accelerator.save({"epoch": 3}, "progress.pt")
        accelerator.wait_for_everyone()
        index = json.loads(Path("weights/model.safetensors.index.json").read_text())
        found = [
            accelerator.unwrap_model(prepared) is model,
            list(accelerator.get_state_dict(prepared)) == names,
            sorted(load_file("state/model.safetensors")) == sorted(names),
            sorted(load_file("by_hand.safetensors")) == sorted(names),
            sorted(index["weight_map"]) == sorted(names),
            len(set(index["weight_map"].values())) > 1,
            torch.load("progress.pt", weights_only=True) == {"epoch": 3},
            accelerator.verify_device_map(model),
        ]
        for folder in ("weights", "pickled", "state"):
            plain = network(9)
            load_checkpoint_in_model(plain, folder)
            with torch.no_grad():
                found.append(torch.equal(plain(torch.ones(2, 3)), outputs))
        torch.compiler.reset()
        return found

    expected = [*[True] * 7, False, True, True, True]
    assert on_processes(ranks, world, save) == [expected] * world


@pytest.mark.parametrize("world", [1, 2])
def test_objects_that_cannot_be_saved_are_refused_by_their_place(ranks, world):
    def register() -> str:
        with pytest.raises(ValueError, match="state_dict") as caught:
            accelerate().register_for_checkpointing(Progress(), 3, network(), "text")
        return str(caught.value)

    for text in on_processes(ranks, world, register):
        assert "number 1, a int; number 3, a str" in text


# -- trackers ----------------------------------------------------------------------------------


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    def __init__(self, project: str, colour: str = "white") -> None:
        self.pages: list[Any] = [project, colour]

    @property
    def tracker(self) -> list[Any]:
        return self.pages

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.pages.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.pages.append((values, step, kwargs))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.pages.append((sorted(values), step, kwargs))

    def log_table(self, table_name: str, *args: Any, **kwargs: Any) -> None:
        self.pages.append((table_name, kwargs.get("data")))

    def finish(self) -> None:
        self.pages.append("finished")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_logged_can_be_read_back(ranks, world):
    def log() -> Any:
        accelerator = accelerate(log_with=["tensorboard", Notebook], project_dir="runs")
        accelerator.init_trackers(
            "mine",
            config={"lr": 0.1, "net": {"depth": 2}},
            init_kwargs={"notebook": {"colour": "red"}},
        )
        for step in range(3):
            mean = accelerator.reduce(torch.tensor(step + accelerator.process_index), "sum")
            accelerator.log({"sum": mean}, step, log_kwargs={"notebook": {"mood": "good"}})
        accelerator.log_images({"image": numpy.zeros((1, 4, 4, 3), numpy.uint8)}, 2)
        accelerator.log_table("table", columns=["a"], data=[[1]], step=2)
        assert [each.name for each in accelerator.trackers] == ["tensorboard", "notebook"]
        assert accelerator.get_tracker("tensorboard").name == "tensorboard"
        accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("direct", 5.0, 0)
        pages = accelerator.get_tracker("notebook", unwrap=True)
        with pytest.raises(ValueError, match="no tracker 'wandb'"):
            accelerator.get_tracker("wandb")
        accelerator.end_training()
        assert accelerator.reduce(torch.ones(1)).item() == accelerator.num_processes
        return pages if accelerator.is_main_process else None

    pages = on_processes(ranks, world, log)
    extra = 0 if world == 1 else 1
    sums = [step * world + extra for step in range(3)]
    assert pages[0] == [
        "mine",
        "red",
        {"lr": 0.1, "net": {"depth": 2}},
        *(({"sum": total}, step, {"mood": "good"}) for step, total in enumerate(sums)),
        (["image"], 2, {}),
        ("table", [[1]]),
        "finished",
    ]
    events = EventAccumulator("runs/mine").Reload()
    assert [(e.step, e.value) for e in events.Scalars("sum")] == list(enumerate(sums))
    assert [event.value for event in events.Scalars("direct")] == [5.0]
    assert len(list(Path("runs/mine").glob("events*"))) == 1  # of the main process alone


@pytest.mark.parametrize("world", [1, 2])
def test_without_trackers_logging_is_no_error(ranks, world):
    def log() -> bool:
        accelerator = accelerate()
        accelerator.init_trackers("mine", {"lr": 1})
        accelerator.log({"a": 1.0}, 0)
        accelerator.end_training()
        return accelerator.trackers == []

    assert on_processes(ranks, world, log) == [True] * world


# -- refusals ----------------------------------------------------------------------------------

REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: {"parallelism_config": ParallelismConfig(tp_size=3)}, ValueError, "product is 3"),
    (lambda: {"deepspeed_plugin": DeepSpeedPlugin()}, NotImplementedError, "DeepSpeed"),
    (lambda: {"megatron_lm_plugin": MegatronLMPlugin()}, NotImplementedError, "Megatron"),
    (lambda: {"fsdp_plugin": DeepSpeedPlugin()}, TypeError, "fsdp_plugin is DeepSpeedPlugin"),
    (lambda: {"mixed_precision": "fp8"}, NotImplementedError, "8-bit"),
    (lambda: {"kwargs_handlers": [FP8RecipeKwargs()]}, NotImplementedError, "FP8RecipeKwargs"),
    (lambda: {"mixed_precision": "fp32"}, ValueError, "mixed_precision is 'fp32'"),
    (lambda: {"kwargs_handlers": ["ddp"]}, TypeError, "kwargs_handlers holds 'ddp'"),
    (
        lambda: {"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs(init_scale=2.0)]},
        ValueError,
        "two GradScalerKwargs",
    ),
    (
        lambda: {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")},
        ValueError,
        "dynamo_backend or dynamo_plugin, not both",
    ),
    (
        lambda: {
            "gradient_accumulation_steps": 2,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2),
        },
        ValueError,
        "not both",
    ),
    (lambda: {"dynamo_backend": "fast"}, ValueError, "(?i)'fast'"),
    (lambda: {"log_with": "foo"}, ValueError, "'foo'"),
    (lambda: {"log_with": "tensorboard"}, ValueError, "logging_dir|project_dir"),
    (lambda: {"rng_types": ["dice"]}, ValueError, "rng_types is 'dice'"),
    (lambda: {"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps is 0"),
    (lambda: {"split_batches": "yes"}, TypeError, "split_batches is 'yes'"),
]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_there_or_contradicts_is_refused(ranks, world):
    def refuse() -> list[str]:
        wrong = []
        for arguments, kind, text in REFUSED:
            try:
                with pytest.raises(kind, match=text):
                    accelerate(**arguments())
            except (ValueError, TypeError, RuntimeError, pytest.fail.Exception) as error:
                wrong.append(f"{kind.__name__} {text}: {error!r}")
        accelerate()  # nothing that was refused stands in its way
        return wrong

    assert on_processes(ranks, world, refuse) == [[]] * world


@pytest.mark.parametrize("variable", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_the_environment_asks_for_are_refused_too(monkeypatch, variable):
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "true")
    with pytest.raises(NotImplementedError, match=f"ACCELERATE_USE_{variable}=true asks for"):
        accelerate()


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_accelerator_shares_the_state_or_is_refused(ranks, world):
    def second() -> list[Any]:
        first = accelerate(mixed_precision="bf16", gradient_accumulation_steps=2)
        other = Accelerator(gradient_accumulation_steps=3)
        found = [other.mixed_precision, first.gradient_accumulation_steps]
        found += [other.state.device == first.device, other.num_processes]
        with pytest.raises(ValueError, match="cannot be changed"):
            Accelerator(mixed_precision="no")
        return found

    expected = ["bf16", 3, True, world]
    assert on_processes(ranks, world, second) == [expected] * world


def test_arguments_of_the_process_group_reach_it(ranks2):
    def backend() -> str:
        handler = InitProcessGroupKwargs(backend="gloo")
        accelerator = accelerate(kwargs_handlers=[handler])
        return str(accelerator.state.backend)

    assert ranks2(backend) == ["gloo", "gloo"]


# -- memory, copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", ["free_memory", "clear"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_nothing_prepared_outlives_its_release(ranks, world, method, precision):
    def release() -> tuple[list[bool], list[Any], bool]:
        accelerator = accelerate(gradient_accumulation_steps=4, mixed_precision=precision)
        kept = Progress()
        accelerator.register_for_checkpointing(kept)
        bare = network()
        plain = sgd(bare)
        objects = [bare, plain, StepLR(plain, 1), DataLoader(torch.ones(8, 3), 1)]
        model, optimizer, scheduler, loader = accelerator.prepare(*objects)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            break
        refs = [weakref.ref(each) for each in (*objects, model, optimizer, scheduler, loader)]
        refs += [weakref.ref(parameter) for parameter in bare.parameters()]
        del bare, plain, objects, batch
        assert accelerator.step == 1
        model, optimizer, scheduler, loader = found = getattr(accelerator, method)(
            model, optimizer, scheduler, loader
        )
        gc.collect()  # while it was released, the script had names for it
        kept.seen += 3
        accelerator.save_state("saved")
        kept.seen += 4
        accelerator.load_state("saved")
        state = [found, accelerator.step, accelerator.optimizer_step_was_skipped]
        return [ref() is None for ref in refs], state, kept.seen.item() == 3

    for gone, state, restored in on_processes(ranks, world, release):
        assert gone == [True] * len(gone)
        assert state == [[None] * 4, 0, False]
        assert restored


def test_gradients_of_an_update_that_was_given_up_are_forgotten():
    accelerator = accelerate(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):  # as a script that tries a smaller batch when memory runs out
        optimizer = accelerator.prepare(plain)
        optimizer.zero_grad()
        accelerator.backward(weight.sum() * 3)
        assert accelerator.clip_grad_norm_([weight], 10.0).item() == 3.0
        (optimizer,) = accelerator.free_memory(optimizer)


@pytest.mark.parametrize("method", ["clip_grad_norm_", "clip_grad_value_", "unscale_gradients"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_scaled_gradients_of_an_open_window_cannot_be_clipped(method, precision):
    accelerator = accelerate(mixed_precision=precision, gradient_accumulation_steps=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    arguments = () if method == "unscale_gradients" else ([weight], 10.0)
    with accelerator.accumulate():
        accelerator.backward(weight.sum() * 3)
        if precision == "fp16":
            with pytest.raises(ValueError, match=r"under `if accelerator.sync_gradients:`"):
                getattr(accelerator, method)(*arguments)
        else:
            getattr(accelerator, method)(*arguments)
    with accelerator.accumulate():
        accelerator.backward(weight.sum() * 3)
        getattr(accelerator, method)(*arguments)
        optimizer.step()
    assert weight.item() == -2.0


def test_after_a_window_that_was_given_up_updates_are_made_again():
    accelerator = accelerate(gradient_accumulation_steps=2)
    weight = nn.Parameter(torch.ones(1))
    with accelerator.accumulate():
        accelerator.backward(weight.sum())
    accelerator.free_memory()
    weight.grad = None
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.gradient_accumulation_steps = 1
    accelerator.backward(weight.sum())
    optimizer.step()
    assert weight.item() == 0.0


def test_releasing_is_not_the_end():
    accelerator = accelerate()
    assert accelerator.free_memory() == []
    model, optimizer = accelerator.prepare(*(lambda m: (m, sgd(m)))(network()))
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    other = network()
    assert accelerator.prepare(other) is other
    assert accelerator._models == [other]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_objects_are_pickled(ranks, world, precision):
    def roundtrip() -> list[bool]:
        accelerator = accelerate(mixed_precision=precision)
        bare = network()
        plain = torch.optim.AdamW(bare.parameters())
        data = digits(8, 2, shuffle=True)
        model, optimizer, scheduler, loader = accelerator.prepare(
            bare, plain, StepLR(plain, 1, gamma=0.5), data
        )
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        scheduler.step()
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        copies = [pickle.loads(pickle.dumps(each)) for each in (unwrapped, optimizer, scheduler)]
        order = pickle.loads(pickle.dumps(loader))
        return [
            torch.equal(copies[0](torch.ones(1, 3)), unwrapped(torch.ones(1, 3))),
            copies[1].state_dict()["state"][0]["step"] == 1,
            copies[2].get_last_lr() == scheduler.get_last_lr(),
            [batch[0].tolist() for batch in order] == [batch[0].tolist() for batch in loader],
            len(pickle.loads(pickle.dumps(accelerator))._models) == 1,
            copy.deepcopy(accelerator) is accelerator,
            copy.deepcopy({"a": [accelerator]})["a"][0] is accelerator,
        ]

    assert on_processes(ranks, world, roundtrip) == [[True] * 7] * world


def passes(folder: str, *, save: int = 0, skip: int = 0, **config: Any) -> list[list[int]]:
    """The samples of this process in passes 1 to 3, up to a save in pass 1 or from one on."""
    accelerator = accelerate(
        dataloader_config=DataLoaderConfiguration(even_batches=not config["uneven"])
    )
    set_seed(5)
    data = TensorDataset(torch.arange(config["count"]))
    source = DataLoader(data, 2, shuffle=True, drop_last=config["drop_last"])
    loader = accelerator.prepare(source)
    if skip:
        accelerator.load_state(folder)
    else:
        list(loader)
    found: list[list[int]] = []
    for number in range(3):
        found.append([])
        rest = accelerator.skip_first_batches(loader, skip) if skip and not number else loader
        for batch, (ids,) in enumerate(rest, 1):
            found[-1] += ids.tolist()
            if batch == save and not number:
                accelerator.save_state(folder)
    return found


def of_all(found: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(chain.from_iterable(parts)) for parts in zip(*found, strict=True)]


def test_a_process_without_batches_in_the_rest_of_a_pass_goes_on_with_the_others(ranks2):
    options = {"uneven": True, "count": 5, "drop_last": False}
    whole = ranks2(lambda: passes("saved", save=1, **options))
    rest = ranks2(lambda: passes("saved", skip=1, **options))
    assert [len(own[0]) for own in rest] == [1, 0]
    for own, found in zip(whole, rest, strict=True):
        assert found == [own[0][2:], *own[1:]]
    assert of_all(rest)[1:] == [list(range(5))] * 2


def test_a_pass_that_has_ended_is_not_begun_again_where_it_has_more_batches(ranks):
    options = {"uneven": False, "count": 9, "drop_last": True}
    on_three = on_processes(ranks, 3, lambda: passes("saved", save=1, **options))
    (alone,) = on_processes(ranks, 1, lambda: passes("saved", skip=3, **options))
    (whole,) = on_processes(ranks, 1, lambda: passes("other", save=4, **options))
    assert [i for own in on_three for i in own[0]] == whole[0][:6]
    assert alone == [whole[0][6:], *whole[1:]]  # the batch that made no round of three
    on_three_again = on_processes(ranks, 3, lambda: passes("other", skip=2, **options))
    assert of_all(on_three_again) == [[], *of_all(on_three)[1:]]
