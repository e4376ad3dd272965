"""The shape of accelerate's local_sgd and profiler examples."""

import torch
from accelerate import Accelerator, ProfileKwargs
from accelerate.local_sgd import LocalSGD
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    kept = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0},
        on_trace_ready=lambda profiler: kept.append(
            {event.key for event in profiler.key_averages()}
        ),
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    torch.manual_seed(3)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(32, 5, generator=draw)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    with (
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local,
        accelerator.profile() as profiler,
    ):
        for _ in range(2):
            for features, target in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(features), target)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
                    profiler.step()
                losses.append(accelerator.gather(loss.detach()).tolist())
    return {
        "losses": losses,
        "weights": [value.tolist() for value in accelerator.unwrap_model(model).parameters()],
        "profiled": ["aten::addmm" in names for names in kept],
    }
