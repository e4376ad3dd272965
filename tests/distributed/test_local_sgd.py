"""Local SGD among two processes, against two models that are averaged by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer import Accelerator, FullyShardedDataParallelPlugin, LocalSGD

BATCHES, RATE = 5, 0.1


def make():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank, number):
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(6, 3, generator=generator, dtype=torch.float64)


def train(steps, enabled):
    accelerator, model = Accelerator(cpu=True), make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    during = []
    with LocalSGD(accelerator, model, steps, enabled=enabled) as local_sgd:
        for number in range(BATCHES):
            with accelerator.accumulate(model):
                rows = batch(accelerator.process_index, number)
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            during.append([p.detach().clone() for p in model.parameters()])
    return during, [p.detach() for p in model.parameters()]


def by_hand(steps):
    """The weights of both processes after each batch, and at the end."""
    models = [make(), make()]

    def average():
        for both in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(both) / 2
            for parameter in both:
                parameter.copy_(mean)

    during = []
    for number in range(BATCHES):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
        with torch.no_grad():
            if (number + 1) % steps == 0:
                average()
        during.append(copy.deepcopy([list(model.parameters()) for model in models]))
    with torch.no_grad():
        average()
    return during, [list(model.parameters()) for model in models]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_weights_are_averaged_every_few_steps_and_at_the_end(ranks2, steps):
    during, after = by_hand(steps)
    for rank, (seen, end) in enumerate(ranks2(train, steps, True)):
        for number in range(BATCHES):
            torch.testing.assert_close(seen[number], during[number][rank])
        torch.testing.assert_close(end, after[rank])


def test_without_it_gradients_are_averaged(ranks2):
    found = ranks2(train, 2, False)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    during, _ = by_hand(1)  # averaged weights are those of averaged gradients, for plain SGD
    torch.testing.assert_close(found[0][0][-1], during[-1][0])


def test_one_process_trains_as_ever():
    assert not LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), 2).enabled
    with pytest.raises(ValueError, match="local_sgd_steps"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), 0)


def test_an_error_inside_is_raised_without_a_collective(ranks2):
    def both():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(KeyError, match="mine"), LocalSGD(accelerator, model, 2):
            raise KeyError("mine")
        return model.require_backward_grad_sync

    assert ranks2(both) == [True, True]


def test_a_sharded_model_is_refused(ranks2):
    def body():
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        with pytest.raises(NotImplementedError, match="LocalSGD needs the whole model"):
            LocalSGD(accelerator, accelerator.prepare(nn.Linear(2, 2)), 2)

    ranks2(body)
