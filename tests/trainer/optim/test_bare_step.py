"""The step of an optimizer without what torch puts around it: the same, and all that is asked."""

import contextlib
import functools
import json
from unittest import mock

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.optim import lr_scheduler
from torch.optim import optimizer as module

from trainer import Accelerator, Trainer, TrainModule
from trainer.optim import bare_step
from trainer.optim.bare_step import step

MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
}


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def backward(net):
    net.zero_grad()
    net(torch.ones(4, 3)).square().mean().backward()


@pytest.fixture
def sections(monkeypatch):
    """How often torch's own wrapper was gone through."""
    entered = []
    original = torch.autograd.profiler.record_function

    def record_function(name, *args):
        entered.append(name)
        return original(name, *args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", record_function)
    return entered


@pytest.mark.parametrize("kind", MAKERS)
def test_the_update_is_the_same(kind, sections):
    ours, torchs = network(), network()
    mine, other = MAKERS[kind](ours.parameters()), MAKERS[kind](torchs.parameters())
    for _ in range(3):
        backward(ours)
        step(mine)
    assert sections == []
    for _ in range(3):
        backward(torchs)
        other.step()
    assert len(sections) == 3
    for one, two in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(one, two)
    assert mine.state_dict().keys() == other.state_dict().keys()


def test_a_closure_is_called_with_gradients(sections):
    def stepped(take):
        net = network()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

        def closure():
            backward(net)
            return net(torch.ones(4, 3)).square().mean()

        return take(optimizer, closure).item(), net

    ours, mine = stepped(step)
    assert sections == []
    torchs, other = stepped(lambda optimizer, closure: optimizer.step(closure))
    assert ours == torchs
    assert torch.equal(mine.weight, other.weight)
    assert not torch.equal(mine.weight, network().weight)


def test_hooks_are_called(sections):
    net, called = network(), []
    optimizer = MAKERS["sgd"](net.parameters())
    backward(net)
    for register, name in (
        (optimizer.register_step_pre_hook, "pre"),
        (optimizer.register_step_post_hook, "post"),
        (module.register_optimizer_step_pre_hook, "global pre"),
        (module.register_optimizer_step_post_hook, "global post"),
    ):
        handle = register(lambda *_, name=name: called.append(name))
        step(optimizer)
        handle.remove()
        step(optimizer)
    assert called == ["pre", "post", "global pre", "global post"]
    assert len(sections) == 4


def test_a_profile_has_its_section():
    net = network()
    optimizer = MAKERS["sgd"](net.parameters())
    backward(net)
    step(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_an_observer_of_execution_alone_sees_the_section_of_an_optimizer_with_a_hook(tmp_path):
    """As the speed guide says: torch does not tell that one listens."""
    optimizer = MAKERS["sgd"](network().parameters())

    def observed(name, profiled):
        path = tmp_path / f"{name}.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        with contextlib.ExitStack() as stack:
            if profiled:
                cpu = [torch.profiler.ProfilerActivity.CPU]
                profile = torch.profiler.profile(activities=cpu, execution_trace_observer=observer)
                stack.enter_context(profile)
            else:
                observer.start()
                stack.callback(observer.unregister_callback)
            step(optimizer)
        return "Optimizer.step#SGD.step" in {
            n["name"] for n in json.loads(path.read_text())["nodes"]
        }

    assert not observed("alone", profiled=False)
    assert observed("profiled", profiled=True)
    optimizer.register_step_post_hook(lambda *_: None)
    assert observed("hooked", profiled=False)


def test_steps_of_ones_own_are_called(monkeypatch):
    called = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            called.append("subclass")
            return super().step(closure)

    net = network()
    backward(net)
    step(Own(net.parameters(), 0.1))
    assert called == ["subclass"]

    optimizer = MAKERS["sgd"](net.parameters())
    optimizer.step = lambda closure=None: called.append("object")
    step(optimizer)
    assert called[1:] == ["object"]

    other = MAKERS["sgd"](net.parameters())
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: called.append("class"))
    step(other)
    assert called[2:] == ["class"]


def test_what_is_wrapped_around_torchs_own_step_is_called(monkeypatch):
    """By `functools.wraps`, which makes it look like torch's wrapper."""
    called = []
    net = network()
    backward(net)
    original = MAKERS["sgd"](net.parameters()).step.__func__

    class Clamped(torch.optim.SGD):
        @functools.wraps(original)
        def step(self, closure=None):
            called.append("subclass")
            return super().step(closure)

    step(Clamped(net.parameters(), 0.1))
    assert called == ["subclass"]
    other = MAKERS["sgd"](net.parameters())

    @functools.wraps(original)
    def traced(self, closure=None):
        called.append("class")
        return original(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", traced)
    step(other)
    assert called == ["subclass", "class"]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_a_test_has_replaced_is_called(scheduled):
    optimizer = MAKERS["sgd"](network().parameters())
    if scheduled:
        optimizer.step = mock.MagicMock()
        replaced = contextlib.nullcontext(optimizer.step)
    else:
        replaced = mock.patch.object(torch.optim.SGD, "step")
    with replaced as fake:
        step(optimizer)
    assert fake.call_count == 1


def test_the_profiler_of_earlier_torch_has_its_section_too():
    net = network()
    optimizer = MAKERS["sgd"](net.parameters())
    backward(net)
    with profiler_legacy.profile() as profile:
        step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.function_events}


def test_a_schedule_does_not_stand_in_the_way(sections):
    net = network()
    optimizer = MAKERS["sgd"](net.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    sections.clear()
    backward(net)
    step(optimizer)
    assert sections == []
    accelerated = Accelerator(cpu=True).prepare_optimizer(optimizer)
    accelerated.step()
    scheduler.step()  # which would warn of a step that it has not seen
    assert sections == []


def test_a_step_that_was_replaced_before_the_schedule_came_is_called():
    net, called = network(), []
    optimizer = MAKERS["sgd"](net.parameters())

    def replaced(self, closure=None):
        called.append(self)

    optimizer.step = replaced.__get__(optimizer)
    lr_scheduler.StepLR(optimizer, 1)
    step(optimizer)
    assert called == [optimizer]


def test_another_torch_is_asked_as_usual(sections, monkeypatch):
    """One that names its hooks otherwise, so that nobody can see that there are none."""
    net = network()
    optimizer = MAKERS["sgd"](net.parameters())
    backward(net)
    monkeypatch.setattr(bare_step, "_KNOWN", False)
    step(optimizer)
    monkeypatch.undo()
    del optimizer._optimizer_step_pre_hooks
    assert bare_step._bare_step(optimizer) is None
    assert len(sections) == 1


@pytest.mark.parametrize("loop", ["trainer", "accelerator"])
@pytest.mark.parametrize("takes", ["none", "required"])
@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "hooked"])
def test_a_step_need_not_take_a_closure_and_may_require_one(loop, takes, hooked):
    called = []

    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})
            if hooked:  # torch's wrapper, which calls the hook, is then not left out
                self.register_step_post_hook(lambda *_: called.append(True))

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad

    if takes == "required":
        without = Plain.step

        def step(self, closure):
            assert closure is None  # as a loop by hand would pass it
            without(self)

        Plain.step = step

    class Net(TrainModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch, batch_idx):
            return (self.weight * batch).sum()

        def configure_optimizers(self):
            return Plain(self.parameters())

    module = Net()
    if loop == "trainer":
        Trainer(max_epochs=1, cpu=True, barebones=True).fit(module, [torch.ones(1)])
    else:
        accelerator = Accelerator(cpu=True)
        optimizer = accelerator.prepare(Plain(module.parameters()))
        accelerator.backward(module.training_step(torch.ones(1), 0))
        optimizer.step()
    assert module.weight.item() == 0.5
    assert len(called) == hooked


class Named(torch.optim.SGD):
    def step(self, *, closure):
        loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Named])
def test_an_optimizer_that_calls_its_closure_is_told_to_lack_one(kind):
    optimizer = Accelerator(cpu=True).prepare(kind(network().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=rf"step of {kind.__name__} .*optimizer.step\(closure\)"):
        optimizer.step()


def test_other_errors_of_a_step_are_its_own():
    class Failing(torch.optim.SGD):
        def step(self, closure):
            raise TypeError("unsupported")

    with pytest.raises(TypeError, match=r"^unsupported$"):
        step(Failing(network().parameters(), lr=0.1))


@pytest.mark.parametrize("required", [False, True])
def test_a_closure_that_is_taken_by_name_is_called(required):
    class Optional(Named):
        def step(self, *, closure=None):
            return super().step(closure=closure)

    net = network()
    optimizer = (Named if required else Optional)(net.parameters(), lr=0.1)

    def closure():
        backward(net)
        return 3.0

    assert Accelerator(cpu=True).prepare(optimizer).step(closure) == 3.0
    assert not torch.equal(net.weight, network().weight)


def test_a_closure_that_is_required_by_name_may_be_none():
    class Indifferent(torch.optim.SGD):
        def step(self, *, closure):
            assert closure is None
            return super().step()

    net = network()
    backward(net)
    step(Indifferent(net.parameters(), lr=0.1))
    assert not torch.equal(net.weight, network().weight)
