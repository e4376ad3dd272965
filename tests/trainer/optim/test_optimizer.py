"""The prepared optimizer: the wrapped one's own state, and updates at the end of windows only."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainer.configuration import GradScalerKwargs
from trainer.optim.finite import find_non_finite
from trainer.optim.optimizer import AcceleratedOptimizer, ParameterLists, parameters_of
from trainer.precision import Precision
from trainer.state import GradientState

CPU = torch.device("cpu")


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.tensor([1.0]))


@pytest.fixture
def inner(parameter):
    return torch.optim.SGD([parameter], lr=0.5, momentum=0.9)


@pytest.fixture
def optimizer(inner):
    return AcceleratedOptimizer(inner, precision=Precision("no", CPU))


def accumulate(sync: bool) -> None:
    GradientState().sync_gradients = sync


def test_state_and_groups_are_the_wrapped_ones(optimizer, inner, parameter):
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(inner.param_groups) == 2


def test_a_state_dict_goes_through(optimizer, inner, parameter):
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state == inner.state_dict()
    other = torch.optim.SGD([torch.nn.Parameter(torch.tensor([1.0]))], lr=9.0, momentum=0.9)
    AcceleratedOptimizer(other, precision=Precision("no", CPU)).load_state_dict(state)
    assert other.state_dict() == state
    assert other.param_groups[0]["lr"] == 0.5


def test_only_the_end_of_a_window_updates_and_clears(optimizer, parameter):
    parameter.grad = torch.tensor([2.0])
    accumulate(sync=False)
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.item() == 1.0
    assert parameter.grad.item() == 2.0
    assert optimizer.steps == 0
    accumulate(sync=True)
    optimizer.step()
    assert parameter.item() == 0.0
    assert optimizer.steps == 1
    optimizer.zero_grad()
    assert parameter.grad is None


def test_gradients_are_kept_as_zeros_where_asked(optimizer, parameter):
    parameter.grad = torch.tensor([2.0])
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.item() == 0.0


def test_zero_grad_without_set_to_none_is_supported(parameter):
    class Plain(torch.optim.SGD):
        def zero_grad(self):
            parameter.grad = None

    optimizer = AcceleratedOptimizer(Plain([parameter], lr=1.0), precision=Precision("no", CPU))
    parameter.grad = torch.tensor([2.0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'set_to_none'"):
        optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    optimizer.zero_grad()
    assert parameter.grad is None


def test_zero_grad_sets_to_none_by_default(parameter):
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            super().zero_grad(set_to_none)

    optimizer = AcceleratedOptimizer(Keeps([parameter], lr=1.0), precision=Precision("no", CPU))
    parameter.grad = torch.tensor([2.0])
    optimizer.zero_grad()
    assert parameter.grad is None


def test_state_groups_and_defaults_may_be_replaced(optimizer, inner):
    for name in ("state", "param_groups", "defaults"):
        value = copy.copy(getattr(inner, name))
        setattr(optimizer, name, value)
        assert getattr(inner, name) is value


@pytest.mark.parametrize("place", [True, False])
def test_state_goes_where_the_parameters_have_gone(place):
    # As after a step on the host; meta is the one other device that every machine has.
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    inner = torch.optim.Adam([parameter])
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    inner.state[parameter] = {"step": torch.tensor(1.0), **moments}
    AcceleratedOptimizer(inner, place, precision=Precision("no", CPU))
    state = inner.state[parameter]
    expected = "meta" if place else "cpu"
    assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == expected
    assert state["step"].device.type == "cpu"  # a counter that the host reads
    assert state["step"].item() == 1


def test_state_in_place_is_left_alone():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    inner = torch.optim.Adam([parameter])
    moments = {name: torch.ones(2, device="meta") for name in ("exp_avg", "exp_avg_sq")}
    inner.state[parameter] = {"step": torch.tensor(1.0), **moments}  # a counter of the host's
    loads = []
    inner.register_load_state_dict_pre_hook(lambda *_: loads.append(1))
    AcceleratedOptimizer(inner, precision=Precision("no", CPU))
    assert loads == []


def test_a_closure_in_the_middle_of_a_window_is_refused(optimizer, parameter):
    accumulate(sync=False)
    with pytest.raises(ValueError, match=r"closure inside a .*gradient_accumulation_steps=1"):
        optimizer.step(lambda: parameter.sum())
    accumulate(sync=True)
    parameter.grad = torch.tensor([2.0])
    optimizer.step(lambda: parameter.sum())
    assert parameter.item() == 0.0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_fused_optimizer_reports_what_it_skipped(parameter, kind):
    precision = Precision("fp16", CPU, scaler=GradScalerKwargs(init_scale=4.0))
    inner = kind([parameter], lr=0.5, fused=True)
    optimizer = AcceleratedOptimizer(inner, precision=precision)
    for factor, skipped in ((float("inf"), True), (1.0, False)):
        before = parameter.item()
        precision.scale(parameter.sum() * factor).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is skipped
        assert (parameter.item() == before) is skipped
        optimizer.zero_grad()
    assert precision.state_dict()["scale"] == 2.0


def test_a_closure_reaches_the_wrapped_optimizer(parameter):
    inner = torch.optim.LBFGS([parameter], lr=1.0, max_iter=10)
    optimizer = AcceleratedOptimizer(inner, precision=Precision("no", CPU))

    def closure():
        inner.zero_grad()
        loss = (parameter - 3).square().sum()
        loss.backward()
        return loss

    before = (parameter.item() - 3) ** 2
    assert optimizer.step(closure).item() == pytest.approx(before)  # LBFGS returns the first one
    assert parameter.item() == pytest.approx(3.0)


def test_a_skipped_update_is_reported_until_the_next(parameter, inner):
    precision = Precision("fp16", CPU, scaler=GradScalerKwargs(init_scale=4.0))
    optimizer = AcceleratedOptimizer(inner, precision=precision)
    precision.scale(parameter.sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert parameter.item() == 1.0
    optimizer.zero_grad()
    precision.scale(parameter.sum()).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert parameter.item() == 0.5


def test_gradients_are_reduced_once_an_update(parameter, inner):
    reduced = []

    def reduce(given):
        reduced.append(given)
        parameter.grad *= 2

    optimizer = AcceleratedOptimizer(inner, precision=Precision("no", CPU), reduce=reduce)
    for expected in (0.0, -0.9 - 1.0):  # momentum 0.9, so the second moves by (0.9 + 1) × 2 × 0.5
        optimizer.zero_grad()
        parameter.grad = torch.tensor([1.0])
        optimizer.synchronize()  # as clipping does
        optimizer.synchronize()
        assert parameter.grad.item() == 2.0
        optimizer.step()
        assert parameter.item() == pytest.approx(expected)
    assert reduced == [inner, inner]


def test_a_step_reduces_what_nobody_reduced_before(parameter, inner):
    reduced = []
    optimizer = AcceleratedOptimizer(inner, precision=Precision("no", CPU), reduce=reduced.append)
    parameter.grad = torch.tensor([1.0])
    accumulate(sync=False)
    optimizer.step()
    assert reduced == []
    accumulate(sync=True)
    optimizer.step()
    optimizer.step()
    assert reduced == [inner, inner]


def test_gradients_dropped_after_reducing_are_reduced_anew(parameter, inner):
    reduced = []
    optimizer = AcceleratedOptimizer(inner, precision=Precision("no", CPU), reduce=reduced.append)
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert len(reduced) == 2


def test_hooks_are_called_around_the_wrapped_step(optimizer, parameter):
    order = []
    optimizer.register_step_pre_hook(lambda *_: order.append(("before", parameter.item())))
    optimizer.register_step_post_hook(lambda *_: order.append(("after", parameter.item())))
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    assert order == [("before", 1.0), ("after", 0.0)]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_works_on_its_own(optimizer, parameter, duplicate, scheduled):
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts its own step before the class's
    other = duplicate(optimizer)
    (theirs,) = parameters_of([other])
    theirs.grad = torch.tensor([2.0])
    other.step()
    assert (theirs.item(), parameter.item()) == (0.0, 1.0)


def test_schedule_free_optimizers_are_switched(optimizer, inner):
    optimizer.train()  # an optimizer without a switch is left alone
    calls = []
    inner.train, inner.eval = lambda: calls.append("train"), lambda: calls.append("eval")
    optimizer.train()
    optimizer.eval()
    assert calls == ["train", "eval"]


def test_other_attributes_are_the_wrapped_ones(optimizer, inner):
    inner.rank_of_projection = 4
    assert optimizer.rank_of_projection == 4
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'nothing'"):
        optimizer.nothing


def test_it_shows_what_it_wraps(optimizer):
    assert repr(optimizer).startswith("AcceleratedOptimizer(SGD")


def test_parameters_are_listed_once_in_order():
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    first = torch.optim.SGD([{"params": [b]}, {"params": [a]}], lr=1)
    second = torch.optim.SGD([a, c], lr=1)
    assert [id(p) for p in parameters_of([first, second])] == [id(b), id(a), id(c)]


def test_a_zero_grad_of_the_optimizers_own_is_called():
    called = []

    class Noting(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            called.append("class")
            super().zero_grad(set_to_none)

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Noting([parameter], lr=0.1)
    prepared = AcceleratedOptimizer(optimizer, precision=Precision("no", torch.device("cpu")))
    prepared.zero_grad()
    assert (called, parameter.grad) == (["class"], None)
    optimizer.zero_grad = lambda set_to_none=True: called.append("instance")
    prepared.zero_grad()
    assert called == ["class", "instance"]


def test_a_step_need_not_take_a_closure(parameter):
    class Plain(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            parameter.sub_(parameter.grad)

    parameter.grad = torch.ones(1)
    AcceleratedOptimizer(Plain([parameter], lr=0.1), precision=Precision("no", CPU)).step()
    assert parameter.item() == 0.0


@pytest.mark.parametrize("way", ["in place", "another group"])
def test_parameters_that_are_replaced_inside_an_epoch_are_noticed(way):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    inner = torch.optim.SGD(module.parameters(), lr=0.5)
    lists = ParameterLists(module, [AcceleratedOptimizer(inner, precision=Precision("no", CPU))])
    assert lists.refresh(epoch=0)
    assert not lists.refresh(epoch=0)
    module[1] = torch.nn.Linear(3, 1)
    if way == "in place":
        inner.param_groups[0]["params"][2:] = module[1].parameters()
    else:
        inner.param_groups.clear()  # Python may put the new list where the old one was
        inner.add_param_group({"params": list(module.parameters())})
    assert lists.refresh(epoch=0)
    assert all(any(p is q for q in lists.all) for p in module.parameters())


def test_the_check_for_nan_works_after_a_first_one_in_inference_mode():
    bad = torch.tensor([float("nan")])

    def check() -> object:
        with torch.inference_mode():
            first = find_non_finite([torch.ones(1)])
        return first, find_non_finite([bad]), find_non_finite([torch.ones(1)])

    with ThreadPoolExecutor(1) as thread:  # in which no check has run yet
        assert thread.submit(check).result() == (False, True, False)
