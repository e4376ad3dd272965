"""Communication hooks of DDP, under the Accelerator and under the Trainer, against arithmetic."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from tests.helpers.engines import options, started
from trainer import (
    Accelerator,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    Trainer,
    TrainModule,
)
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.choose import choose_engine
from trainer.engines.ddp import DataParallel, communication_of
from trainer.state import PartialState

CPU = torch.device("cpu")
CLOCK = 123457.0  # seconds, more than fp16 has a number for
BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(TrainModule):
    """Two branches, of which a batch may leave one out, and one that no batch reaches."""

    def __init__(self, *, never: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.left, self.right = nn.Linear(24, 16), nn.Linear(24, 16)
        if never:
            self.never = nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        out = self.left(x).tanh()
        return (out + self.right(x).sin() if both else out).square().mean()

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return self(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def rows(rank: int, number: int) -> torch.Tensor:
    """What this rank has in its micro-batch of that number; shape [4, 24]."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 24, generator=generator)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def local(rank: int, numbers: list[int], **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of these micro-batches, summed."""
    model = Net(**kwargs)
    for number in numbers:
        model(rows(rank, number)).backward()
    return gradients(model)


def averaged(hook: str, of_ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Each in 16 bits, divided by the number of ranks there, and added there."""
    kind, size = BITS[hook], len(of_ranks)
    return [sum(g.to(kind) / size for g in each).float() for each in zip(*of_ranks, strict=True)]


@contextlib.contextmanager
def sends_bfloat16(hook: str) -> Iterator[None]:
    """torch refuses bfloat16 without NCCL by the hook's name, though gloo can add it up."""
    check = DistributedDataParallel._check_comm_hook
    if hook == "bf16":
        DistributedDataParallel._check_comm_hook = lambda *_: None
    try:
        yield
    finally:
        DistributedDataParallel._check_comm_hook = check


def engine(module: nn.Module, **kwargs: Any) -> tuple[DataParallel, StepSync]:
    step_sync = StepSync(CPU, whole_items=True)
    handler = DistributedDataParallelKwargs(**kwargs)
    return started(DataParallel, module, step_sync, handler), step_sync


def window(own: DataParallel, batches: list[Any], items: float = 1.0) -> Any:
    """One window of these micro-batches; None is one of which this rank has nothing."""
    for batch in batches[:-1]:
        own.begin_micro_batch(sync=False)
        own.backward(own.forward("training_step", batch))
    own.begin_micro_batch(sync=True)
    loss = None if batches[-1] is None else own.forward("training_step", batches[-1])
    first = float(dist.get_rank() == 0)
    return own.backward(loss, StepStats(items, 0, 0, seconds=first * CLOCK, ended=0))


# -- 16 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
@pytest.mark.parametrize("views", [False, True])
def test_the_accelerator_averages_in_sixteen_bits(ranks2, hook, views):
    def run() -> list[Any]:
        handler = DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType(hook), gradient_as_bucket_view=views
        )
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        rank, found = dist.get_rank(), []
        with sends_bfloat16(hook):
            model = accelerator.prepare(Net())
        for _ in range(2):
            model.zero_grad()
            with accelerator.no_sync(model):
                accelerator.backward(model(rows(rank, 0)))
            accelerator.backward(model(rows(rank, 1)))
            found.append(gradients(model))
        return found

    expected = averaged(hook, [local(rank, [0, 1]) for rank in (0, 1)])
    assert any((e - p).abs().max() > 1e-5 for e, p in zip(expected, local(0, [0]), strict=True))
    for found in ranks2(run):
        for each in found:
            assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
@pytest.mark.parametrize("searches", [False, True])
def test_the_trainer_averages_in_sixteen_bits(ranks2, hook, searches):
    items = 0x7FFDFBF7EFDF  # of which 16 bits would not be enough

    def run() -> list[Any]:
        rank, model = dist.get_rank(), Net(never=searches)
        with sends_bfloat16(hook):
            own, step_sync = engine(model, comm_hook=hook, find_unused_parameters=searches)
        totals, found = [], []
        for batches in (
            [(rows(rank, 0),), (rows(rank, 1),)],
            [(rows(rank, 0),) if rank == 0 else None],
            *([[(rows(rank, 0), rank == 0)]] if searches else []),
        ):
            model.zero_grad()
            totals.append(window(own, batches, items + rank))
            found.append(gradients(model))
        return [set(totals), step_sync.latest.seconds, found]

    zero = [torch.zeros_like(gradient) for gradient in local(0, [0])]
    parts = [[local(0, [0, 1]), local(1, [0, 1])], [local(0, [0]), zero]]
    if searches:  # and a batch of the second process that leaves a branch out
        model = Net()
        model(rows(1, 0), both=False).backward()
        parts.append([local(0, [0]), [*gradients(model)[:2], *zero[2:]]])
    for totals, seconds, windows in ranks2(run):
        assert (totals, seconds) == ({2.0 * items + 1}, CLOCK)
        for found, of_ranks in zip(windows, parts, strict=True):
            assert found[4:] == [None, None] * searches
            expected = averaged(hook, of_ranks)
            assert all(torch.equal(a, b) for a, b in zip(found[:4], expected, strict=True))


class Wide(Net):
    """With gradients for several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 9000), nn.Linear(9000, 24)
        for parameter in (*self.first.parameters(), *self.last.parameters()):
            nn.init.constant_(parameter, 0.01)

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return self(self.last(self.first(batch[0]).sin()))


def test_powersgd_over_gloo_is_refused_where_it_would_hang(ranks2):
    def refused(model: nn.Module, **kwargs: Any) -> str:
        PartialState(cpu=True)
        handler = DistributedDataParallelKwargs(comm_hook="power_sgd", **kwargs)
        with pytest.raises(ValueError, match="PowerSGD over gloo") as caught:
            Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(model)
        return str(caught.value)

    def run() -> list[str]:
        mixed = Net()
        mixed.left.double()
        return [refused(Wide()), refused(mixed), refused(Net(), find_unused_parameters=True)]

    for wide, mixed, searching in ranks2(run):
        assert "one bucket holds 1048576 bytes of one type. Use NCCL" in wide
        assert "of 2 types" in mixed
        assert "fails inside torch with find_unused_parameters=True" in searching


def test_hooks_are_refused_for_sparse_gradients(ranks2):
    """torch's fp16 hook fails on them in backward, PowerSGD leaves each process its own."""

    def run() -> None:
        for hook in ("fp16", "power_sgd"):
            handler = DistributedDataParallelKwargs(comm_hook=hook)
            accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
            with pytest.raises(ValueError, match=f"comm_hook='{hook}' cannot send the sparse"):
                accelerator.prepare(nn.Embedding(4, 2, sparse=True))
            frozen = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
            frozen[0].weight.requires_grad_(False)
            accelerator.prepare(frozen)

    ranks2(run)


@pytest.mark.parametrize(
    "kwargs", [{"comm_hook": "bf16"}, {"comm_hook": "power_sgd", "comm_wrapper": "bf16"}]
)
def test_bf16_hooks_are_refused_without_nccl(ranks2, kwargs):
    def refused() -> str:
        handler = DistributedDataParallelKwargs(**kwargs)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.version, "cuda", None)  # all that torch looks at
            with pytest.raises(ValueError, match="cannot be sent in bfloat16") as caught:
                accelerator.prepare(Net())
        return str(caught.value)

    for text in ranks2(refused):
        assert "only with NCCL or XCCL. Use 'fp16'" in text


# -- PowerSGD ----------------------------------------------------------------------------------


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24 * 24).reshape(24, 24))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh().square().sum()


@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_powersgd_feeds_back_its_error(ranks2, wrapper):
    def run() -> list[Any]:
        model, rank = Matrix(), dist.get_rank()
        own, _ = engine(
            model,
            comm_hook="power_sgd",
            comm_wrapper=wrapper,
            comm_state_option={"start_powerSGD_iter": 2, "matrix_approximation_rank": 2},
        )
        found = []
        for number in range(6):
            model.zero_grad()
            window(own, [rows(rank, number)])
            found.append(model.weight.grad.clone())
        (error,) = own.state_dict()["communication"]["error_dict"].values()
        return [found, error[-24 * 24 :].reshape(24, 24).float()]

    def exact(number: int) -> torch.Tensor:
        model = Matrix()
        for rank in (0, 1):
            (model.training_step(rows(rank, number)) / 2).backward()
        return model.weight.grad

    (first, left_0), (second, left_1) = ranks2(run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if wrapper == "no" else {"rtol": 0.01, "atol": 0.05}
    for number in (0, 1):  # not yet; with the fourth the low rank is plain to see
        torch.testing.assert_close(first[number], exact(number), **tolerance)
    assert torch.linalg.matrix_rank(exact(3), rtol=1e-3) > 2
    assert torch.linalg.matrix_rank(first[3], rtol=1e-3) == 2
    given = sum(first) + (left_0 + left_1) / 2
    torch.testing.assert_close(given, sum(exact(n) for n in range(6)), **tolerance)


@pytest.mark.parametrize(
    ("precision", "policy", "warm"), [(None, "skip", True), ("fp16", "stop", False)]
)
def test_powersgd_trains_on_after_a_non_finite_update(ranks2, tmp_path, precision, policy, warm):
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            is_bad = self.trainer.global_step == 5 and dist.get_rank() == 1
            return loss * float("inf") if is_bad else loss

    def skipped(hook: str) -> tuple[int, int, bool]:
        options = {"start_powerSGD_iter": 2, "warm_start": warm} if hook == "power_sgd" else {}
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
        trainer = Trainer(
            max_epochs=1,
            cpu=True,
            progress_bar=False,
            checkpointing=False,
            kwargs_handlers=[handler],
            mixed_precision=precision,
            non_finite=policy,
            project_dir=tmp_path / hook,
        )
        module = Bad()
        trainer.fit(module, DataLoader(TensorDataset(torch.cat([rows(0, n) for n in range(8)])), 1))
        finite = all(bool(p.isfinite().all()) for p in module.parameters())
        return trainer.global_step, trainer.skipped_updates, finite

    for (steps, without, _), with_it in zip(
        ranks2(skipped, "fp16"), ranks2(skipped, "power_sgd"), strict=True
    ):
        assert steps > 10
        assert with_it == (steps, without, True)


def test_powersgd_refuses_scalar_parameters(ranks2):
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    def run() -> None:
        handler = DistributedDataParallelKwargs(comm_hook="power_sgd")
        with pytest.raises(ValueError, match=r"without a dimension: scale\. Give"):
            Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(Scaled())
        with pytest.raises(ValueError, match=r"without a dimension: scale\. Give"):
            started(DataParallel, Scaled(), StepSync(CPU), handler)

    ranks2(run)


def test_powersgd_state_of_other_options_is_dropped_with_a_warning(ranks2):
    def run() -> list[str]:
        own, _ = engine(Net(), comm_hook="power_sgd")
        other, _ = engine(
            Net(), comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}
        )
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger = logging.getLogger("trainer.engines.comm_hooks")
        logger.addHandler(handler)
        try:
            other.load_state_dicts([own.state_dict()] * 2)
            other.begin_epoch()
        finally:
            logger.removeHandler(handler)
        return lines

    for (line,) in ranks2(run):
        assert line.startswith("PowerSGD starts with a new state")


# -- the Trainer -------------------------------------------------------------------------------


class Parted(Net):
    """The first process leaves out what the others use."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return self(*batch, both=dist.get_rank() > 0)


def fit(
    hook: str,
    steps: int,
    *,
    warm: bool = True,
    static: bool = False,
    kind: type[Net] = Net,
    **settings: Any,
) -> list[torch.Tensor]:
    options = {"start_powerSGD_iter": 2, "warm_start": warm} if hook == "power_sgd" else {}
    handler = DistributedDataParallelKwargs(
        comm_hook=hook, comm_state_option=options, static_graph=static
    )
    module = kind()
    data = DataLoader(TensorDataset(torch.cat([rows(0, n) for n in range(12)])), 4, shuffle=True)
    trainer = Trainer(
        max_epochs=4,
        max_steps=steps,
        gradient_accumulation_steps=2,
        cpu=True,
        progress_bar=False,
        kwargs_handlers=[handler],
        callbacks=[ModelCheckpoint(every=5)],
        **settings,
    )
    with sends_bfloat16(hook):
        trainer.fit(module, data, ckpt_path="auto")
    return [parameter.detach().clone() for parameter in module.parameters()]


def resumes_identically(
    ranks: Any, folder: Any, hook: str, **settings: Any
) -> list[list[torch.Tensor]]:
    """The weights of an uninterrupted run, which one that was interrupted has come to as well."""
    whole = ranks(lambda: fit(hook, 9, project_dir=folder / "whole", **settings))
    ranks(lambda: fit(hook, 5, project_dir=folder / "parts", **settings))
    resumed = ranks(lambda: fit(hook, 9, project_dir=folder / "parts", **settings))
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one, whole[0], strict=True))
    return whole


@pytest.mark.parametrize(
    ("hook", "warm"), [("fp16", True), ("bf16", True), ("power_sgd", True), ("power_sgd", False)]
)
def test_resume_with_a_comm_hook_is_bit_identical(ranks2, tmp_path, hook, warm):
    assert resumes_identically(ranks2, tmp_path, hook, warm=warm)


@pytest.mark.parametrize("hook", ["no", "fp16", "power_sgd"])
def test_resume_with_a_static_graph_is_bit_identical(ranks3, tmp_path, hook):
    assert resumes_identically(ranks3, tmp_path, hook, static=True)


class Late(Net):
    """Trains nothing before its first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.requires_grad_(True)


class Swap(Net):
    """Trains one of two parts of one size in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.left.requires_grad_(self.current_epoch % 2 == 0)
        self.right.requires_grad_(self.current_epoch % 2 == 1)

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        part = self.left if self.current_epoch % 2 == 0 else self.right
        return part(*batch).square().mean()


@pytest.mark.parametrize(
    ("kind", "hook", "static"),
    [(Late, "power_sgd", True), (Swap, "power_sgd", False), (Parted, "no", True)],
)
def test_resume_where_the_trained_parameters_change(ranks2, tmp_path, kind, hook, static):
    assert resumes_identically(ranks2, tmp_path, hook, static=static, kind=kind)


@pytest.mark.parametrize(("hook", "static"), [("no", True), ("power_sgd", False)])
def test_resume_on_another_number_of_processes(ranks2, ranks3, tmp_path, hook, static):
    ranks2(lambda: fit(hook, 5, static=static, project_dir=tmp_path))
    found = ranks3(lambda: fit(hook, 9, static=static, project_dir=tmp_path))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))


# -- the Accelerator ---------------------------------------------------------------------------


def loop(
    first: int, last: int, load: Any = None, save: Any = None, steps: int = 2, **kwargs: Any
) -> list[Any]:
    """Updates by a loop of one's own, the weights and the hook's residual behind them."""
    handler = DistributedDataParallelKwargs(
        comm_hook="power_sgd",
        comm_state_option={"start_powerSGD_iter": 2, "matrix_approximation_rank": 1},
        **kwargs,
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[handler]
    )
    model = Net()
    model, optimizer = accelerator.prepare(model, model.configure_optimizers())
    if load is not None:
        accelerator.load_state(load)
    rank = accelerator.process_index
    for number in range(2 * first, 2 * last):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows(rank, number)))
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    hook = communication_of(model)
    errors = {} if hook is None else hook.state_dict()["error_dict"]
    return [*(p.detach().clone() for p in model.parameters()), *errors.values()]


def test_the_accelerator_resumes_powersgd_bit_identically(ranks2, tmp_path):
    whole = ranks2(lambda: loop(0, 9, save=tmp_path / "whole"))
    ranks2(lambda: loop(0, 5, save=tmp_path / "half"))
    resumed = ranks2(lambda: loop(5, 9, load=tmp_path / "half"))
    for one, other in zip(whole, resumed, strict=True):
        assert len(one) == 5  # four parameters, and what was left out
        assert one[-1].any()
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_accelerator_restarts_powersgd_with_a_static_graph(ranks2, tmp_path):
    def run(*args: Any, **kwargs: Any) -> list[list[Any]]:
        return ranks2(lambda: loop(*args, **kwargs, steps=1, static_graph=True))

    run(0, 5, save=tmp_path / "half")
    first, second = run(5, 9, load=tmp_path / "half")
    assert len(first) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_accelerator_resumes_powersgd_on_another_number_of_processes(ranks2, ranks3, tmp_path):
    saved = ranks2(lambda: loop(0, 5, save=tmp_path / "half"))
    given = ranks3(lambda: loop(5, 5, load=tmp_path / "half"))
    for each in given:
        assert torch.equal(each[-1], (saved[0][-1] + saved[1][-1]) / 2)
    on = ranks3(lambda: loop(5, 7, load=tmp_path / "half"))
    for each in on:
        assert all(torch.equal(a, b) for a, b in zip(each[:4], on[0][:4], strict=True))
    # One process averages nothing: it leaves what was saved where it is.
    assert len(loop(5, 6, load=tmp_path / "half")) == 4


def test_hooks_that_cannot_work_are_refused(ranks2):
    def run() -> list[str]:
        PartialState(cpu=True)
        texts = []
        for hook, automatic in (("batched_power_sgd", True), ("fp16", False)):
            handler = DistributedDataParallelKwargs(comm_hook=hook)
            engine = choose_engine(options(handler), automatic=automatic)
            with pytest.raises(ValueError, match="comm_hook") as caught:
                engine.start(Net(), StepSync(CPU))
            texts.append(str(caught.value))
        return texts

    for batched, manual in ranks2(run):
        assert "fails as soon as it compresses" in batched
        assert "comm_hook='fp16') cannot be used in manual optimisation" in manual


def test_comm_hooks_do_nothing_on_one_process():
    handler = DistributedDataParallelKwargs(comm_hook="bf16")
    model = Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(Net())
    model(rows(0, 0)).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), local(0, [0]), strict=True))


def test_hook_state_that_is_not_restored_yet_is_saved_again(ranks2):
    """At a boundary that a resumed run finishes before its next epoch begins, for example."""

    def saved() -> bool:
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
        own, _ = engine(Net(), comm_hook="power_sgd", comm_state_option=options)
        begun = own.state_dict()["communication"]
        again, _ = engine(Net(), comm_hook="power_sgd", comm_state_option=options)
        other = begun | {"iter": 7}
        again.load_state_dicts([{"communication": other}] * 2)
        return begun != {} and again.state_dict() == {"communication": other}

    assert ranks2(saved) == [True, True]
