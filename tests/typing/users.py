"""What type checkers see in a user's program; `make lint` checks it with mypy and pyright."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from trainer import Accelerator


class Net(nn.Module):
    """A model whose type is to be kept."""

    width: int = 8


def prepared(accelerator: Accelerator, net: Net, loader: DataLoader[Tensor]) -> None:
    optimizer = Adam(net.parameters())
    scheduler = StepLR(optimizer, 1)
    assert_type(accelerator.prepare(net), Net)
    assert_type(accelerator.prepare(net, optimizer), tuple[Net, Adam])
    assert_type(accelerator.prepare(net, optimizer, loader), tuple[Net, Adam, DataLoader[Tensor]])
    assert_type(
        accelerator.prepare(net, optimizer, loader, scheduler),
        tuple[Net, Adam, DataLoader[Tensor], StepLR],
    )
    second = SGD(net.parameters())
    assert_type(
        accelerator.prepare(net, optimizer, loader, scheduler, second),
        tuple[Net, Adam, DataLoader[Tensor], StepLR, SGD],
    )
    six: Any = accelerator.prepare(net, optimizer, loader, scheduler, second, loader)
    assert_type(accelerator.prepare(net, device_placement=[True]), Net)
    print(six)


def results(accelerator: Accelerator, net: Net) -> None:
    loss = torch.zeros(())
    assert_type(accelerator.unwrap_model(net), Net)
    assert_type(accelerator.gather(loss), Tensor)
    assert_type(accelerator.gather({"loss": loss}), dict[str, Tensor])
    assert_type(accelerator.reduce(loss, "mean"), Tensor)
