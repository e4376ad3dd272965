"""The `Accelerator` in a loop of the user's own, on 1, 2 and 4 processes.

Accumulation and the update itself are in tests/numerics/test_accumulate.py.
"""

from __future__ import annotations

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
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.numerics.running import on_processes
from trainer import (
    Accelerator,
    DataLoaderConfiguration,
    DynamoBackend,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    load_checkpoint_in_model,
    set_seed,
)

WORLDS = (1, 2, 4)


def accelerate(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# -- collectives -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dispatch", [False, True])
def test_gather_for_metrics_with_a_sampler_and_skipped_batches(ranks, world, dispatch):
    def evaluate() -> list[list[int]]:
        accelerator = accelerate(dispatch_batches=dispatch)

        def gathered(loader: Any) -> list[int]:
            return [i for batch in loader for i in accelerator.gather_for_metrics(batch).tolist()]

        even = accelerator.prepare(DataLoader(range(23), sampler=range(0, 23, 2), batch_size=1))
        every = accelerator.prepare(DataLoader(range(23), batch_size=2))
        return [gathered(even), gathered(accelerator.skip_first_batches(every, 1))]

    expected = [list(range(0, 23, 2)), list(range(2 * world, 23))]
    assert on_processes(ranks, world, evaluate) == [expected] * world


def test_values_are_gathered_reduced_and_padded(ranks2):
    def values() -> tuple[Any, ...]:
        accelerator = accelerate()
        own = torch.tensor([accelerator.process_index + 1.0])
        padded = accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index))
        return (
            accelerator.gather({"a": own})["a"].tolist(),
            accelerator.reduce(own).item(),
            accelerator.reduce(own, "mean", 10.0).item(),
            padded.tolist(),
        )

    both = [1.0, 2.0], 3.0, 15.0
    assert ranks2(values) == [(*both, [1.0, 0.0]), (*both, [1.0, 1.0])]


@pytest.mark.parametrize("world", WORLDS)
def test_a_trigger_of_one_rank_fires_once_on_all(ranks, world):
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
def test_load_state_resumes_bit_identically(ranks, world, precision, place):
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


def test_load_state_resumes_dispatched_data(ranks2):
    options = {"dispatch_batches": True, "use_seedable_sampler": True, "count": 24}
    whole = ranks2(lambda: run("no", save=4, **options))
    rest = ranks2(lambda: run("no", seed=5, resume=True, **options))
    for own, found in zip(whole, rest, strict=True):
        assert len(own) == 12
        assert found == own[4:]


def test_automatic_checkpoint_naming_and_total_limit(ranks2):
    def save_and_load() -> tuple[Any, ...]:
        def make() -> tuple[Accelerator, nn.Module]:
            config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
            accelerator = accelerate(project_config=config, project_dir="project")
            return accelerator, accelerator.prepare(nn.Linear(1, 1, bias=False))

        accelerator, model = make()
        names = []
        for number in range(4):
            nn.init.constant_(next(model.parameters()), number)
            names.append(accelerator.save_state("ignored").name)
        accelerator.wait_for_everyone()
        left = sorted(path.name for path in Path("project/checkpoints").iterdir())
        again, model = make()
        again.load_state()
        return names, left, next(model.parameters()).item(), again.save_iteration

    names = [f"checkpoint_{number}" for number in range(4)]
    assert ranks2(save_and_load) == [(names, names[2:], 3.0, 4)] * 2
    assert not Path("ignored").exists()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", ["no", DynamoBackend.EAGER])
def test_saved_weights_have_bare_names(ranks, world, backend):
    def save() -> list[bool]:
        accelerator = accelerate(dynamo_backend=backend)
        model = network()
        names = sorted(model.state_dict())
        prepared = accelerator.prepare(model)
        with torch.no_grad():
            outputs = prepared(torch.ones(2, 3))
        accelerator.save_state("state")
        with pytest.raises(ValueError, match="max_shard_size is '70B'"):  # on every process
            accelerator.save_model(prepared, "weights", max_shard_size="70B")
        accelerator.save_model(prepared, "weights", max_shard_size=70)
        accelerator.save_model(prepared, "pickled", safe_serialization=False)
        accelerator.save(accelerator.get_state_dict(prepared), "by_hand.safetensors", True)
        accelerator.wait_for_everyone()
        index = json.loads(Path("weights/model.safetensors.index.json").read_text())
        files = ("state/model.safetensors", "by_hand.safetensors")
        found = [sorted(load_file(file)) == names for file in files]
        found.append(sorted(index["weight_map"]) == names)
        for folder in ("weights", "pickled", "state"):
            plain = network(9)
            load_checkpoint_in_model(plain, folder)
            with torch.no_grad():
                found.append(torch.equal(plain(torch.ones(2, 3)), outputs))
        torch.compiler.reset()
        return found

    assert on_processes(ranks, world, save) == [[True] * 6] * world


def test_init_process_group_kwargs(ranks2):
    def backend() -> str:
        handler = InitProcessGroupKwargs(backend="gloo")
        accelerator = accelerate(kwargs_handlers=[handler])
        return str(accelerator.state.backend)

    assert ranks2(backend) == ["gloo", "gloo"]


# -- memory, copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", ["free_memory", "clear"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_free_memory_releases_everything(ranks, world, method, precision):
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


def test_free_memory_forgets_unscaled_gradients():
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
def test_clipping_scaled_gradients_inside_a_window_raises(method, precision):
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


def test_free_memory_resets_the_accumulation_window():
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


def test_resume_where_one_rank_has_no_batch_left(ranks2):
    options = {"uneven": True, "count": 5, "drop_last": False}
    whole = ranks2(lambda: passes("saved", save=1, **options))
    rest = ranks2(lambda: passes("saved", skip=1, **options))
    assert [len(own[0]) for own in rest] == [1, 0]
    for own, found in zip(whole, rest, strict=True):
        assert found == [own[0][2:], *own[1:]]
    assert of_all(rest)[1:] == [list(range(5))] * 2


def test_resume_after_a_finished_pass_on_another_number_of_processes(ranks):
    options = {"uneven": False, "count": 9, "drop_last": True}
    on_three = on_processes(ranks, 3, lambda: passes("saved", save=1, **options))
    (alone,) = on_processes(ranks, 1, lambda: passes("saved", skip=3, **options))
    (whole,) = on_processes(ranks, 1, lambda: passes("other", save=4, **options))
    assert [i for own in on_three for i in own[0]] == whole[0][:6]
    assert alone == [whole[0][6:], *whole[1:]]  # the batch that made no round of three
    on_three_again = on_processes(ranks, 3, lambda: passes("other", skip=2, **options))
    assert of_all(on_three_again) == [[], *of_all(on_three)[1:]]


def test_parameters_unfrozen_after_prepare_are_refused(ranks2):
    def body():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        frozen, half = nn.Linear(1, 1), nn.Linear(1, 1)
        frozen.requires_grad_(False)
        half.bias.requires_grad_(False)
        frozen, half = accelerator.prepare(frozen, half)
        judged = accelerator.prepare_model(nn.Linear(1, 1).requires_grad_(False), None, True)
        judged.requires_grad_(True)  # evaluated only, so it may
        accelerator.backward(half(torch.ones(1, 1)).sum())
        messages = []
        for parameters in (frozen.parameters(), [half.module.bias]):
            for parameter in parameters:
                parameter.requires_grad_(True)
            with accelerator.accumulate(frozen, half):
                accelerator.backward(frozen(torch.ones(1, 1)).sum() + half(torch.ones(1, 1)).sum())
            try:
                with accelerator.accumulate(frozen, half):
                    loss = frozen(torch.ones(1, 1)).sum() + half(torch.ones(1, 1)).sum()
                    accelerator.backward(loss)
            except RuntimeError as error:
                messages.append(str(error).partition(" that ")[0])
            for parameter in (*frozen.parameters(), half.module.bias):
                parameter.requires_grad_(False)
        accelerator.free_memory()
        frozen.requires_grad_(True)
        accelerator.backward(frozen(torch.ones(1, 1)).sum())
        return messages

    assert ranks2(body) == [["2 parameter(s)", "1 parameter(s)"]] * 2


def test_objects_without_a_state_dict_cannot_be_registered():
    with pytest.raises(ValueError, match=r"number 1, a int; number 3, a str"):
        accelerate().register_for_checkpointing(Progress(), 3, network(), "text")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_objects_can_be_pickled(ranks, world, precision):
    def roundtrip() -> list[bool]:
        accelerator = accelerate(mixed_precision=precision)
        bare = network()
        plain = torch.optim.AdamW(bare.parameters())
        data = DataLoader(torch.arange(8), 2, shuffle=True)
        model, optimizer, scheduler, loader = accelerator.prepare(
            bare, plain, StepLR(plain, 1, gamma=0.5), data
        )
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        scheduler.step()
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        model, optimizer, same, order = (
            pickle.loads(pickle.dumps(each)) for each in (unwrapped, optimizer, scheduler, loader)
        )
        return [
            torch.equal(model(torch.ones(1, 3)), unwrapped(torch.ones(1, 3))),
            optimizer.state_dict()["state"][0]["step"] == 1,
            same.get_last_lr() == scheduler.get_last_lr(),
            [batch.tolist() for batch in order] == [batch.tolist() for batch in loader],
            len(pickle.loads(pickle.dumps(accelerator))._models) == 1,
        ]

    assert on_processes(ranks, world, roundtrip) == [[True] * 5] * world
