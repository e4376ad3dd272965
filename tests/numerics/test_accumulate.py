"""`Accelerator.accumulate` trains like plain PyTorch, on 1, 2 and 4 processes.

The reference is one model, one process and one backward for each update: the sum of the losses of
all micro-batches of the window and of all processes, divided as the documentation says. Which batch
each process reads, and which of them end a window, is written down by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.running import on_processes
from trainer import Accelerator, GradientAccumulationPlugin
from trainer.configuration import DataLoaderConfiguration, GradScalerKwargs

WORLDS = (1, 2, 4)
SIZE = 2  # samples in a micro-batch
Batches = list[list[list[int]]]  # of each process, in the order in which it reads them


def network(seed: int = 1, *, middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), middle or nn.Tanh(), nn.Linear(4, 2)).double()


def rows(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    shapes = ((samples, 3), (samples, 2))
    return TensorDataset(
        *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    )


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(0) if t is None else t.detach().flatten() for t in tensors])


def weights(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


def gradients(model: nn.Module) -> Tensor:
    return flat([parameter.grad for parameter in model.parameters()])


def sharded(samples: int, world: int, epochs: int = 1) -> Batches:
    """The rows of each batch that each process reads: every `world`-th, the last round filled."""
    order = list(range(samples))
    if world > 1:
        order += [i % samples for i in range(-samples % (SIZE * world))]
    whole = [order[start : start + SIZE] for start in range(0, len(order), SIZE)]
    return [whole[rank::world] * epochs for rank in range(world)]


def windows(marks: str) -> list[list[int]]:
    """The micro-batches of each update, where "!" ends a window; an open one is left out."""
    found, start = [], 0
    for end, mark in enumerate(marks):
        if mark == "!":
            found.append(list(range(start, end + 1)))
            start = end + 1
    return found


def plain(
    data: TensorDataset,
    batches: Batches,
    marks: str,
    steps: int,
    *,
    clip: float | None = None,
) -> dict[str, list[Any]]:
    """The weights after each update and the gradients before it."""
    world = len(batches)
    model = network()
    optimizer = momentum(model)
    trace: dict[str, list[Any]] = {"gradients": [], "norms": [], "weights": []}
    for window in windows(marks):
        total = sum(
            loss_of(model, data[batches[rank][at]]) / (steps * world)
            for rank in range(world)
            for at in window
        )
        optimizer.zero_grad()
        total.backward()
        found = gradients(model)
        trace["gradients"].append(found)
        trace["norms"].append(found.square().sum().sqrt().item())
        if clip is not None:
            factor = min(1.0, clip / (trace["norms"][-1] + 1e-6))  # as torch's own
            for parameter in model.parameters():
                parameter.grad *= factor
        optimizer.step()
        trace["weights"].append(weights(model))
    return trace


def accumulated(
    samples: int,
    *,
    epochs: int = 2,
    clip: float | None = None,
    plugin: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The documented loop, written as users write it, and what it saw."""
    if plugin is not None:
        kwargs["gradient_accumulation_plugin"] = GradientAccumulationPlugin(**plugin)
    accelerator = Accelerator(cpu=True, **kwargs)
    model = network()
    optimizer = momentum(model)
    loader = DataLoader(rows(samples), SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    trace: dict[str, Any] = {"marks": "", "gradients": [], "norms": [], "weights": [], "own": []}
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                trace["marks"] += "!" if accelerator.sync_gradients else "."
                if accelerator.sync_gradients and clip is not None:
                    trace["norms"].append(
                        accelerator.clip_grad_norm_(model.parameters(), clip).item()
                    )
                trace["own"].append(gradients(model))
                optimizer.step()
                if accelerator.sync_gradients:
                    trace["gradients"].append(gradients(model))
                    trace["weights"].append(weights(model))
                optimizer.zero_grad()
    return trace


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def two_models(blocks: str, steps: int, samples: int) -> dict[str, Any]:
    """Two models, each with its optimizer, in one block of `accumulate` a batch or in two."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    loader = accelerator.prepare(DataLoader(rows(samples), SIZE))
    models = [accelerator.prepare(network(seed)) for seed in (1, 2)]
    optimizers = [accelerator.prepare(momentum(model)) for model in models]
    trace: dict[str, Any] = {"marks": "", "weights": []}

    def train(batch: Sequence[Tensor], *which: int) -> None:
        for i in which:
            accelerator.backward(loss_of(models[i], batch))
            optimizers[i].step()
            optimizers[i].zero_grad()

    for _ in range(2):
        for batch in loader:
            if blocks == "one":
                with accelerator.accumulate(*models):
                    train(batch, 0, 1)
            elif blocks == "nested":
                with accelerator.accumulate(models[0]), accelerator.accumulate(models[1]):
                    train(batch, 0, 1)
            elif blocks == "again":  # a helper that has a block of its own
                with accelerator.accumulate(*models), accelerator.accumulate(models[1]):
                    train(batch, 0, 1)
            else:
                for i, model in enumerate(models):
                    with accelerator.accumulate(model):
                        train(batch, i)
            trace["marks"] += "!" if accelerator.sync_gradients else "."
            trace["weights"].append([weights(model) for model in models])
    return trace


# -- the window --------------------------------------------------------------------------------

TABLE = [  # micro-batches of a process in an epoch, arguments, divisor of the loss, marks
    (4, {"gradient_accumulation_steps": 3}, 3, "..!!..!!"),
    (4, {"gradient_accumulation_steps": 2}, 2, ".!.!.!.!"),
    (3, {}, 1, "!!!!!!"),
    (2, {"gradient_accumulation_steps": 5}, 5, ".!.!"),
    (1, {"gradient_accumulation_steps": 2}, 2, "!!"),
    (4, {"plugin": {"num_steps": 3, "sync_with_dataloader": False}}, 3, "..!..!.."),
    (4, {"plugin": {"num_steps": 3, "sync_each_batch": True}}, 3, "..!!..!!"),
    (4, {"plugin": {"num_steps": 3, "adjust_scheduler": False}}, 3, "..!!..!!"),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("missing", [0, 1], ids=["full", "uneven"])
@pytest.mark.parametrize(("count", "kwargs", "steps", "marks"), TABLE)
def test_every_window_is_one_update(ranks, world, missing, count, kwargs, steps, marks):
    samples = count * SIZE * world - missing
    expected = plain(rows(samples), sharded(samples, world, epochs=2), marks, steps)
    for found in on_processes(ranks, world, lambda: accumulated(samples, **kwargs)):
        assert found["marks"] == marks
        assert_close(found["gradients"], expected["gradients"])
        assert_close(found["weights"], expected["weights"])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("blocks", ["nested", "again", "after one another"])
def test_two_blocks_of_a_batch_are_one_micro_batch(ranks, world, blocks):
    samples = 5 * SIZE * world
    one = on_processes(ranks, world, two_models, "one", 2, samples)
    two = on_processes(ranks, world, two_models, blocks, 2, samples)
    for expected, found in zip(one, two, strict=True):
        assert found["marks"] == expected["marks"] == ".!.!!" * 2
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    torch.testing.assert_close(two[0]["weights"][-1], two[-1]["weights"][-1], rtol=0, atol=0)
    reference = plain(rows(samples), sharded(samples, world, epochs=2), ".!.!!" * 2, 2)
    assert_close(two[0]["weights"][-1][0], reference["weights"][-1])


def test_a_model_used_again_begins_a_new_micro_batch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    first, second = network(), network()
    marks = ""
    for models in [(first,), (first,), (second,), (first, second), (), (), ()]:
        with accelerator.accumulate(*models):
            marks += "!" if accelerator.sync_gradients else "."
    assert marks == "...!..!"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("each", [False, True])
def test_gradients_in_an_open_window_are_not_averaged(ranks, world, each):
    samples, marks, steps = 4 * SIZE * world, "..!!", 3
    data, batches = rows(samples), sharded(samples, world)
    plugin = {"num_steps": steps, "sync_each_batch": each}
    found = on_processes(ranks, world, lambda: accumulated(samples, epochs=1, plugin=plugin))
    model = network()
    for window, after in zip(windows(marks), [None, *found[0]["weights"]], strict=False):
        if after is not None:
            torch.nn.utils.vector_to_parameters(after, model.parameters())
        sums = [torch.zeros_like(weights(model)) for _ in range(world)]
        for at in window:
            for rank in range(world):
                own = torch.autograd.grad(
                    loss_of(model, data[batches[rank][at]]), list(model.parameters())
                )
                sums[rank] += flat(own) / steps
            shared = each or marks[at] == "!"
            for rank in range(world):
                expected = sum(sums) / world if shared else sums[rank]
                assert_close(found[rank]["own"][at], expected)


# -- loops that are not simple -----------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("lengths", "marks"),
    # Of two loaders read in turn the one begun last is the active one.
    [((3, 3), ".!!"), ((5, 3), ".!!"), ((3, 5), ".!.")],
)
def test_the_loader_begun_last_ends_the_window(ranks, world, lengths, marks):
    def loop() -> str:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        first, second = accelerator.prepare(
            *(DataLoader(rows(length * SIZE * world), SIZE) for length in lengths)
        )
        marks = ""
        for _ in zip(first, second, strict=False):
            with accelerator.accumulate():
                marks += "!" if accelerator.sync_gradients else "."
        assert not accelerator.gradient_state.in_dataloader
        return marks

    assert on_processes(ranks, world, loop) == [marks] * world


# -- synchronising by hand ---------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_no_sync_and_trigger_sync_in_backward(ranks, world):
    samples = 3 * SIZE * world
    data = rows(samples)

    def loop(named: bool) -> tuple[Tensor, Tensor]:
        accelerator = Accelerator(cpu=True)
        model = network()
        model, optimizer, loader = accelerator.prepare(
            model, momentum(model), DataLoader(data, SIZE)
        )
        with accelerator.no_sync(model) if named else accelerator.no_sync():
            losses = [loss_of(model, batch) for batch in loader]
            for loss in losses[:-1]:
                accelerator.backward(loss)
            own = gradients(model)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(losses[-1])
        optimizer.step()
        return own, weights(model)

    batches = sharded(samples, world)
    expected = plain(data, batches, "..!", 1)["weights"][-1]
    for named in (True, False):
        for rank, (own, found) in enumerate(on_processes(ranks, world, loop, named)):
            assert_close(own, plain(data, [batches[rank]], ".!", 1)["gradients"][0])
            assert_close(found, expected)


# -- the optimisation --------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_clipping_accumulated_gradients(ranks, world, precision):
    # Autocast leaves float64 alone, so that scaling and clipping alone are at work.
    samples, clip = 4 * SIZE * world, 0.4
    expected = plain(rows(samples), sharded(samples, world, 2), "..!!..!!", 3, clip=clip)
    assert max(expected["norms"]) > clip > min(expected["norms"])
    kwargs = {
        "mixed_precision": precision,
        "gradient_accumulation_steps": 3,
        "clip": clip,
        "kwargs_handlers": [GradScalerKwargs(init_scale=1024.0, growth_interval=2)],
    }
    for found in on_processes(ranks, world, lambda: accumulated(samples, **kwargs)):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert_close(found["weights"], expected["weights"])


@pytest.mark.parametrize("world", WORLDS)
def test_an_overflow_on_one_rank_skips_update_and_tick_on_all(ranks, world):
    def loop() -> list[tuple[bool, float, float, float]]:
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            gradient_accumulation_steps=2,
            scheduler_tick="update",
            kwargs_handlers=[GradScalerKwargs(init_scale=4.0)],
        )
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, scheduler = accelerator.prepare(model, sgd, StepLR(sgd, 1, gamma=0.5))
        seen = []
        for number in range(6):
            bad = number == 2 and accelerator.is_last_process  # in the second of three windows
            x = torch.full((1, 1), torch.inf if bad else 1.0, dtype=torch.float64)
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped = accelerator.optimizer_step_was_skipped
                rate = scheduler.get_last_lr()[0]
                seen.append((skipped, weights(model).item(), rate, accelerator.scaler.get_scale()))
        return seen

    expected = [(False, 0.5, 0.25, 4.0), (True, 0.5, 0.25, 2.0), (False, 0.25, 0.125, 2.0)]
    assert on_processes(ranks, world, loop) == [expected] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("tick", "split", "follows"),
    [
        ("process", False, True),
        ("update", False, True),
        ("process", True, True),
        ("process", False, False),
    ],
)
def test_scheduler_ticks_follow_the_updates(ranks, world, tick, split, follows):
    def loop() -> list[float]:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=3,
            scheduler_tick=tick,
            step_scheduler_with_optimizer=follows,
            dataloader_config=DataLoaderConfiguration(split_batches=split),
        )
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        size = 4 if split else SIZE
        data = DataLoader(rows(size * 4 if split else size * 4 * world), size)
        scheduler = StepLR(sgd, 1, gamma=0.5)
        scheduler, data, model, optimizer = accelerator.prepare(scheduler, data, model, sgd)
        optimizer.optimizer._opt_called = True  # the schedule that does not follow begins at once
        seen = []
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append(scheduler.get_last_lr()[0])
        return seen

    ticks = world if tick == "process" and not split else 1
    counts = [0, 0, ticks, 2 * ticks] if follows else [1, 2, 3, 4]
    assert on_processes(ranks, world, loop) == [[0.5**count for count in counts]] * world
