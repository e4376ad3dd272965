"""The backward pass without torch's treatment of arguments: the same, unless somebody looks."""

import sys
from contextlib import nullcontext
from importlib import reload

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from trainer import Accelerator, Trainer, TrainModule
from trainer.optim import bare_backward
from trainer.optim.bare_backward import backward


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loss_of(model, dtype=torch.float32):
    x = torch.linspace(-1, 1, 20, dtype=dtype).reshape(5, 4)
    return torch.nn.functional.cross_entropy(model(x), torch.arange(5) % 3)


def passes_through_torch(function, *args):
    """Whether torch's own `Tensor.backward` runs in the call."""
    seen = []

    def look(frame, event, _):
        if event == "call" and frame.f_code is Tensor.backward.__code__:
            seen.append(frame)

    sys.setprofile(look)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return bool(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_torch(dtype):
    ours, theirs = network().to(dtype), network().to(dtype)
    for _ in range(2):  # they are added up, too
        assert not passes_through_torch(backward, loss_of(ours, dtype))
        loss_of(theirs, dtype).backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_hooks_are_called_and_the_graph_is_freed():
    model, called = network(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: called.append("leaf"))
    loss = loss_of(model)
    loss.register_hook(lambda gradient: called.append(gradient.item()))
    loss.grad_fn.register_hook(lambda *_: called.append("node"))
    backward(loss)
    assert called == [1.0, "node", "leaf"]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward(loss)


def test_a_function_that_changes_its_gradient_in_place_changes_no_other_pass():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(2)

    x = torch.ones((), requires_grad=True)
    for _ in range(3):
        x.grad = None
        backward(Doubled.apply(x))
        assert x.grad == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "only for scalar outputs"),
        (lambda: torch.ones(()), "does not require grad"),
        (lambda: torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, "real"),
    ],
)
def test_errors_are_those_of_torch(make, message):
    with pytest.raises(RuntimeError, match=message):
        backward(make())


def test_a_tensor_of_another_class_keeps_its_own_way():
    called = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            called.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    weight = torch.ones((), requires_grad=True)
    backward((weight * 3).as_subclass(Own))
    assert Tensor.backward in called
    assert weight.grad == 3


def test_a_mode_sees_the_call():
    called = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    weight = torch.ones((), requires_grad=True)
    loss = weight * 3
    with Mode():
        backward(loss)
    assert Tensor.backward in called
    assert weight.grad == 3


@pytest.mark.parametrize("owner", [Tensor, torch.autograd])
def test_a_replacement_is_called(monkeypatch, owner):
    original, called = owner.backward, []

    def replaced(*args, **kwargs):
        called.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, "backward", replaced)
    loss = torch.ones((), requires_grad=True) * 3
    backward(loss)
    assert called[0] is loss


def test_a_backward_pass_inside_a_transform_is_torchs_error():
    def inside(x):
        backward(x * 2)
        return x

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(inside)(torch.ones(()))


class Seeing(TorchFunctionMode):
    """Sends a call torch's own way, unchanged."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [nullcontext, Seeing])
def test_one_pass_may_start_from_other_tensors_too(around):
    leaf, inner = (torch.ones(3, requires_grad=True) for _ in range(2))
    model, plain = network(), network()
    called = []
    model[0].weight.register_hook(lambda _: called.append("model"))
    leaf.register_hook(lambda _: called.append("leaf"))
    loss, gradients = loss_of(model), [torch.arange(3.0), torch.full((3,), 2.0)]
    with around():
        backward(loss, roots=[leaf, inner * 5], gradients=gradients)
    assert called == ["leaf", "model"]  # nothing lies between a leaf and its own gradient
    assert leaf.grad.tolist() == [0, 1, 2]
    assert inner.grad.tolist() == [10, 10, 10]
    loss_of(plain).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_the_loops_use_it():
    class Module(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = DataLoader(TensorDataset(torch.ones(4, 4)), 2)
    trainer = Trainer(cpu=True, max_epochs=1, barebones=True)
    assert not passes_through_torch(trainer.fit, Module(), loader)
    accelerator, model = Accelerator(cpu=True), network()
    assert not passes_through_torch(accelerator.backward, loss_of(model))
    assert passes_through_torch(lambda: accelerator.backward(loss_of(model), retain_graph=True))


def test_a_backward_of_the_loss_itself_is_called():
    called = []
    loss = torch.ones((), requires_grad=True) * 3
    loss.backward = lambda: called.append("own")
    backward(loss)
    assert called == ["own"]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="torch cannot trace it"
)
def test_a_compiled_step_may_hold_the_backward_pass():
    accelerator, model = Accelerator(cpu=True), network()

    def step():
        loss = loss_of(model)
        accelerator.backward(loss)
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(step, backend="eager", fullgraph=True)()
    compiled = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss_of(model).backward()
    for own, parameter in zip(compiled, model.parameters(), strict=True):
        assert torch.equal(own, parameter.grad)


def test_a_replacement_from_before_the_import_is_called(monkeypatch):
    original, called = Tensor.backward, []

    def replaced(*args, **kwargs):
        called.append(args[0])
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "backward", replaced)
        reload(bare_backward).backward(loss_of(network()))
    reload(bare_backward)
    assert len(called) == 1


def test_arguments_reach_torch():
    model = network()
    loss = loss_of(model)
    backward(loss, inputs=[model[0].weight], retain_graph=True)
    assert model[0].weight.grad is not None
    assert model[0].bias.grad is None
    backward(loss)
