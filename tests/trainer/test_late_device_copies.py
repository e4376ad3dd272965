"""What a run sends from its device to the host is not read before it has arrived (P9).

On the device of `tests.helpers.device`, whose copies to the host that nobody waits for come late:
until an event behind them has been waited for they hold nonsense.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.device import DEVICE, OnDevice, counted_waits
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.optim.finite import FiniteGuard, find_non_finite

DATA = [[torch.arange(1.0, 13.0).reshape(4, 3) * number] for number in range(1, 9)]


class LateCopies(TorchDispatchMode):
    """Copies to the host have their values when an event behind them has been waited for."""

    def __init__(self):
        super().__init__()
        self.late = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            target, source, *asynchronous = args
            if isinstance(source, OnDevice) and not isinstance(target, OnDevice):
                assert asynchronous == [True]
                self.late.append((target, target.clone()))
                target.fill_(torch.nan if target.is_floating_point() else -1)
        return result

    def event(self, device, enable_timing):
        """In place of ``torch.Event``."""
        return _Event(self)


class _Event:
    def __init__(self, copies):
        self.copies = copies

    def record(self, stream=None):
        self.behind, self.copies.late = self.copies.late, []

    def synchronize(self):
        for target, values in self.behind:
            target.copy_(values)


class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def count_items(self, batch):
        return (batch[0] > 4).sum()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        self.log("largest", loss, reduce="max")
        return loss * (math.nan if batch_idx in self.bad else 1.0)

    bad: tuple[int, ...] = ()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def records(folder, module=None, **settings):
    """What a run has recorded."""
    torch.manual_seed(1)
    trainer = Trainer(
        cpu=True,
        max_epochs=1,
        gradient_accumulation_steps=2,
        log_every=1,
        checkpointing=False,
        progress_bar=False,
        project_dir=folder,
        **settings,
    )
    trainer.fit(module or Module(), DATA)
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


@pytest.fixture
def late(monkeypatch):
    with counted_waits(monkeypatch), LateCopies() as copies:
        monkeypatch.setattr(torch, "Event", copies.event)
        yield


def test_metrics_are_read_after_their_copies_have_arrived(tmp_path, request):
    expected = records(tmp_path / "host")
    request.getfixturevalue("late")
    assert records(tmp_path / "device") == [pytest.approx(each) for each in expected]
    assert [each["step"] for each in expected] == [1, 2, 3, 4]


def test_an_update_is_bad_only_if_its_gradients_are(tmp_path, late):
    module = Module()
    module.bad = (3,)
    with pytest.raises(FloatingPointError, match=r"update 2 .*its weights are lost"):
        records(tmp_path / "run", module)
    assert len(records(tmp_path / "other")) == 4


class KernelOfCuda(TorchDispatchMode):
    """The kernel of gradient scalers takes on the device what it takes on CUDA."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            kinds = {gradient.dtype for gradient in args[0]}
            assert kinds <= {torch.float16, torch.float32, torch.float64}, "not implemented"
        return func(*args, **(kwargs or {}))


def test_the_gradients_of_bfloat16_weights_are_looked_at_without_a_kernel_for_them(late):
    def gradient(*values, dtype=torch.bfloat16):
        return torch.tensor(values, dtype=dtype).to(DEVICE)

    def found(*gradients):
        with KernelOfCuda():
            return find_non_finite(gradients).tolist()

    fine = [gradient(), gradient(3e38, -3e38), gradient(1.0, dtype=torch.float32)]
    assert found(*fine) == found(*fine[:2]) == found(fine[0]) == 0.0
    for number in (math.nan, math.inf, -math.inf):
        assert found(*fine, gradient(1.0, number, 2.0)) == 1.0
        assert found(*fine, gradient(number, dtype=torch.float16)) == 1.0


def test_only_where_all_optimizers_skip_on_the_device_is_an_update_begun_unread(late):
    weight = [torch.nn.Parameter(torch.ones(1))]
    fused, plain = (torch.optim.SGD(weight, lr=1.0, fused=each) for each in (True, False))
    found = find_non_finite([torch.tensor([1.0, math.nan], device=DEVICE)])
    guard = FiniteGuard("skip", 5, optimizers=[fused], named_parameters=list)
    assert guard.should_step(found, 1, None)
    assert fused.found_inf is found  # by which its step leaves the weights as they are
    guard.read_pending()
    assert guard.skipped == 1
    assert not hasattr(fused, "found_inf")
    guard = FiniteGuard("skip", 5, optimizers=[fused, plain], named_parameters=list)
    assert not guard.should_step(found, 1, None)
    assert guard.skipped == 1


def test_an_answer_comes_to_the_host_whatever_the_default_device(late):
    guard = FiniteGuard("stop", 5, optimizers=[], named_parameters=list)
    found = find_non_finite([torch.tensor([1.0, math.nan], device=DEVICE)])
    torch.set_default_device(DEVICE)
    assert guard.should_step(found, 7, None)
    assert guard._pending[0]._host.device.type == "cpu"
    with pytest.raises(FloatingPointError, match="update 7"):
        guard.read_pending()
