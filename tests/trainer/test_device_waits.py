"""The loop never waits for the device of its own accord, with everything on (P9).

On a device whose waits are counted, see `tests.helpers.device`.
"""

import io
import sys
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    GradientNormMonitor,
    LearningRateMonitor,
    Monitor,
    ProgressBar,
    ThroughputMonitor,
)
from callbacks import progress_bar as bars
from tests.helpers.device import DEVICE, OnDevice, counted_reads, counted_waits
from trainer import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.engines.ddp import DataParallel, Replicas
from trainer.engines.fsdp import FullyShard
from trainer.metrics import MetricStore
from trainer.tree import gathered


class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("host", torch.tensor(2.0))
        for kind in ("sum", "min", "max"):
            self.log(kind, loss, reduce=kind)
            self.log(f"{kind}_of_numbers", 1.0, reduce=kind)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}


class Count(Callback):
    """Notes the waits at each boundary, the last of all callbacks."""

    runs_last = True

    def __init__(self, waits):
        self.waits, self.totals = waits, []

    def on_boundary(self, trainer, module):
        assert isinstance(module.net.weight, OnDevice)
        assert trainer.accelerator.device == DEVICE
        self.totals.append(self.waits.total)
        self.waits.updates = trainer.global_step


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen_that_is_drawn(monkeypatch):
    """A terminal, on which there is always time to draw."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(bars, "monotonic", iter(range(100_000)).__next__)
    return screen


def everything(*callbacks, recorded=False):
    """The settings of a run with everything on, these callbacks the last."""
    return {
        "checkpointing": False,
        "project_dir": "run",
        "val_every": "1000 steps",
        "log_every": 1 if recorded else 1000,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "max_grad_value": 5.0,
        "callbacks": [
            EMA(),
            GradientNormMonitor(per="module"),
            LearningRateMonitor(log_momentum=True, log_weight_decay=True),
            ThroughputMonitor(flops_per_batch=1e3),
            ProgressBar(),
            *([EarlyStopping("loss_step", patience=1000)] if recorded else []),
            *callbacks,
        ],
    }


def waits_between_updates(
    monkeypatch, *, module=None, callbacks=(), updates=8, recorded=False, **kwargs
):
    """What was waited for in a run with everything on, from its second update to the last."""
    screen = screen_that_is_drawn(monkeypatch)
    data = [[torch.randn(4, 3)] for _ in range(2 * updates + 2)]
    with counted_waits(monkeypatch) as waits:
        count = Count(waits)
        settings = everything(*callbacks, count, recorded=recorded)
        trainer = Trainer(cpu=True, max_steps=updates, **(settings | kwargs))
        trainer.fit(module or Module(), data, data[:2])
    assert "loss" in screen.getvalue()
    assert len(count.totals) == updates
    assert waits.total >= count.totals[-1]
    first, last = count.totals[0], count.totals[-1]
    return last - first, waits


@pytest.mark.parametrize("updates", [4, 12])
def test_between_log_intervals_nothing_waits_for_the_device(monkeypatch, updates):
    found, waits = waits_between_updates(monkeypatch, updates=updates)
    assert found == 0, waits.places


def test_recording_every_update_reads_only_what_arrived_before(monkeypatch):
    found, waits = waits_between_updates(monkeypatch, recorded=True)
    assert found == 0, waits.places


class Judge(Callback):
    """Judges a metric of steps every four updates, and reads none in between."""

    monitor = "loss_step"
    metric = Monitor(monitor, "min")

    def monitor_due(self, trainer):
        return trainer.global_step % 4 == 0

    def on_boundary(self, trainer, module):
        assert (self.metric.read(trainer) is not None) == self.monitor_due(trainer)


def test_a_decision_waits_once_where_it_is_due(monkeypatch):
    found, waits = waits_between_updates(monkeypatch, updates=9, callbacks=[Judge()])
    assert found == 2, waits.places


def test_a_validation_waits_once_for_all_of_its_values(monkeypatch):
    """It is asked for: its metrics are read as it ends. Not by the batch."""
    few, _ = waits_between_updates(monkeypatch, val_every=2)

    class More(Module):
        def validation_step(self, batch, batch_idx):
            for _ in range(5):
                super().validation_step(batch, batch_idx)

    more, _ = waits_between_updates(monkeypatch, module=More(), val_every=2)
    assert 0 < few == more <= 2 * 4  # the values, and the flag of the update before


class ReadsInStep(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class ReadsInHook(Callback):
    def on_train_step_end(self, trainer, module):
        float(module.net.weight.detach().sum())


class CopiesInHook(Callback):
    def on_train_step_end(self, trainer, module):
        module.net.weight.detach().cpu()


class PutsANumberThere(Callback):
    def on_train_step_end(self, trainer, module):
        torch.tensor(1.0, device=module.net.weight.device)


class WaitsForAnEvent(Callback):
    def on_train_step_end(self, trainer, module):
        event = torch.Event(module.net.weight.device)
        event.record()
        event.synchronize()


@pytest.mark.parametrize(
    "callback",
    [
        ReadsInHook,
        CopiesInHook,
        PutsANumberThere,
        WaitsForAnEvent,
    ],
)
def test_a_wait_in_a_callback_is_seen(monkeypatch, callback):
    found, waits = waits_between_updates(monkeypatch, callbacks=[callback()])
    assert found == 7
    assert any("test_device_waits.py" in place for place in waits.places)


READS = {
    "what a mask selects": lambda x: x[x > 0],
    "what a mask of bytes selects": lambda x: x[(x > 0).byte()],
    "a value put where a mask is": lambda x: x.__setitem__(x > 0, x.sum()),
    "a number put at a place": lambda x: x.__setitem__(0, 1),
    "indices of the host": lambda x: x[[0, 1]],
    "an index": lambda x: x[x[0]],
    "allclose": lambda x: torch.allclose(x, x),
    "equal": lambda x: torch.equal(x, x),
    "bincount": torch.bincount,
    "one_hot": torch.nn.functional.one_hot,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "unique": torch.unique,
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "nonzero": torch.nonzero,
    "where": lambda x: torch.where(x > 0),
    "linalg.inv": lambda x: torch.linalg.inv(x.double().diag() + 1),
}
NO_READS = {
    "what indices select": lambda x: x[x],
    "what a mask of the host selects": lambda x: x[torch.tensor([True, False, True])],
    "a number put where a mask is": lambda x: x.__setitem__(x > 0, 1),
    "a value put at indices": lambda x: x.__setitem__(x.clone(), x.sum()),
    "a number put in a slice": lambda x: x.__setitem__(slice(2), 1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "where": lambda x: torch.where(x > 0, x, 0),
    "one_hot of a size": lambda x: torch.nn.functional.one_hot(x, 3),
    "repeat_interleave of a size": lambda x: torch.repeat_interleave(x, x, output_size=3),
}


def waits_of(monkeypatch, operation):
    with counted_waits(monkeypatch) as waits:
        x = torch.tensor([0, 1, 2], device=DEVICE)
        waits.places.clear()  # of making the tensor
        operation(x)
    return waits


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("operation", READS.values(), ids=READS)
def test_an_operation_that_waits_on_cuda_is_seen(monkeypatch, operation):
    """Torch's own ``test_sync_warning`` has some of these, and some of those below, on CUDA."""
    waits = waits_of(monkeypatch, operation)
    assert waits.total == 1
    assert "test_device_waits.py" in next(iter(waits.places))


@pytest.mark.parametrize("operation", NO_READS.values(), ids=NO_READS)
def test_an_operation_that_does_not_is_not(monkeypatch, operation):
    assert not waits_of(monkeypatch, operation).places


def test_a_wait_in_the_step_is_seen_for_each_micro_batch(monkeypatch):
    found, _ = waits_between_updates(monkeypatch, module=ReadsInStep())
    assert found == 14


def test_the_stand_in_device_computes_what_the_host_does(monkeypatch, tmp_path):
    """The stand-in computes: the weights are those of the same run on the host."""

    def weights():
        torch.manual_seed(0)
        module = Module()
        generator = torch.Generator().manual_seed(1)
        data = [[torch.randn(4, 3, generator=generator)] for _ in range(12)]
        trainer = Trainer(
            cpu=True,
            max_epochs=1,
            gradient_accumulation_steps=2,
            max_grad_norm=0.1,
            progress_bar=False,
            checkpointing=False,
            project_dir=tmp_path / f"run{len(list(tmp_path.iterdir()))}",
        )
        trainer.fit(module, data)
        values = [getattr(each, "host", each).detach().clone() for each in module.parameters()]
        return values, trainer.callback_metrics

    expected, metrics = weights()
    with counted_waits(monkeypatch):
        found, same = weights()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert same == pytest.approx(metrics)


def test_the_bar_shows_what_has_arrived_and_waits_for_nothing(monkeypatch):
    with counted_waits(monkeypatch) as waits:
        metrics = MetricStore(DEVICE)
        metrics.begin_window()
        metrics.begin_batch(1.0)
        metrics.log("loss", torch.tensor(2.0, device=DEVICE), prog_bar=True)
        waits.places.clear()  # of making the tensor
        assert [metrics.progress_values(), metrics.progress_values()] == [{}, {}]
        waits.updates += 1
        assert metrics.progress_values() == {"loss": 2.0}
        assert not waits.places
        metrics.log("loss", torch.tensor(3.0, device=DEVICE), prog_bar=True)
        assert metrics.progress_values() == {"loss": 2.0}
        assert metrics.progress_values(wait=True) == {"loss": 3.0}


def test_the_final_progress_line_is_up_to_date(monkeypatch):
    class Numbered(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("number", loss * 0 + batch_idx, prog_bar=True)
            return loss

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    settings = {"checkpointing": False, "project_dir": "run"}
    with counted_waits(monkeypatch):
        trainer = Trainer(cpu=True, max_epochs=2, **settings)
        trainer.fit(Numbered(), [[torch.randn(4, 3)] for _ in range(5)])
        assert trainer.progress_values()["number"] == 4.0
    _, first, second = screen.getvalue().split("\n")[:3]
    for epoch in (first, second):
        assert epoch.rpartition("number=")[2].startswith("4")


# -- all engines -------------------------------------------------------------------------------


class Split(Module):
    """With layers that tensor parallelism splits, and one that it does not."""

    tp_plan = {"net.0": "colwise", "net.1": "rowwise"}

    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
        self.net = torch.nn.Sequential(*layers, torch.nn.Tanh())

    def forward(self, rows):
        return self.net(rows).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {"optimizer": optimizer, "scheduler": scheduler, "interval": "step"}


class ByHand(Split):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()


class Stream(IterableDataset):
    def __iter__(self):
        return ((row,) for row in torch.ones(80, 3))


ROWS = TensorDataset(torch.ones(80, 3))
ENGINES = {
    "one process": {},
    "DDP": {},
    "FSDP": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tensor parallel": {"parallelism_config": ParallelismConfig(tp_size=2)},
}

NAMES = "the processes agree on the names, and on whether anybody has logged a mean"
RANKS = "the processes exchange it, by the device where the group is NCCL's alone"
UNREAD = "what the host has not read yet of the update before: whether it was bad, who has ended"
# Nothing else may wait for the device: neither an update nor a batch of an evaluation.
WAITS = {
    "update": {},
    "batch of an evaluation": {},
    "update with non_finite='skip'": {
        "optim/finite.py: should_step": "an optimizer that is not fused cannot skip on the device",
    },
    "update whose values are logged": {
        "metrics/reduction.py: _all_reduce": NAMES,
    },
    "validation": {
        "engines/ddp.py: broadcast_buffers": RANKS,
        "engines/fsdp.py: _check_units": UNREAD,
        "engines/fsdp.py: _compare": "whether all processes ran the same units",
        "engines/fsdp.py: broadcast_buffers": RANKS,
        "loops/buffers.py: sync": "frozen weights are compared by their hashes",
        "loops/evaluate.py: check_all_have_batches": RANKS,
        "loops/pending_saves.py: _of_all": "whether a process has asked for a save",
        "loops/preemption.py: any_rank": "once a second: whether a process shall exit",
        "loops/recorder.py: record": "its values are asked for, in one transfer",
        "metrics/reduction.py: _share_names": NAMES,
        "metrics/reduction.py: _all_reduce": NAMES,
        "optim/finite.py: read_pending": UNREAD,
    },
    "save": {
        "checkpoint/save.py: run_on_all_ranks": "all processes know of an error of any",
        "checkpoint/serialization.py: write_tensors": "the weights are written",
        "checkpoint/serialization.py: stream_tensors": "the weights are written",
        "engines/ddp.py: broadcast_buffers": RANKS,
        "engines/fsdp.py: _check_units": UNREAD,
        "engines/fsdp.py: broadcast_buffers": RANKS,
        "loops/buffers.py: sync": "frozen weights are compared by their hashes",
        "loops/fit_state.py: _settle": UNREAD,
        "loops/preflight.py: check_checkpoint_names": RANKS,
        "optim/finite.py: read_pending": UNREAD,
        "trainer.py: save_checkpoint": "whether all processes save",
    },
    "end of an epoch": {
        "loops/fit.py: check_data_ends_together": UNREAD,
        "loops/recorder.py: _arriving": "the values of the last update are recorded",
        "loops/recorder.py: record": "its values are asked for, in one transfer",
        "loops/update.py: reduce_step_metrics": "the values of the last update are asked for",
        "metrics/reduction.py: _share_names": NAMES,
        "metrics/reduction.py: _all_reduce": NAMES,
    },
}
WAITS["save in the background"] = {
    place: reason for place, reason in WAITS["save"].items() if reason != "the weights are written"
}


class Phases(Callback):
    """Says what is going on, from the third update on; the last of all callbacks."""

    runs_last = True

    def __init__(self, reads, update, between, saves, last):
        self.reads, self.update, self.between, self.saves = reads, update, between, saves
        self.last = last

    def on_train_step_start(self, trainer, module):
        self.reads.updates = trainer.global_step
        self.reads.operation = self.update if trainer.global_step >= 2 else None

    def on_train_step_end(self, trainer, module):
        if self.reads.operation is not None:
            ends = trainer.global_step == self.last
            self.reads.operation = "end of an epoch" if ends else self.between

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self.between, self.reads.operation = self.reads.operation, "batch of an evaluation"

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.reads.operation = self.between

    def on_train_epoch_end(self, trainer, module):
        self.reads.operation = None

    def on_boundary(self, trainer, module):
        if self.saves and trainer.global_step == 3:
            trainer.save_checkpoint("saved", background="background" in self.between)


def waits_by_operation(folder, module, data, engine, operation):
    """What a fit waits for, by what it does."""
    settings = {}
    several = engine != "one process"
    automatic = module.automatic_optimization
    updates = 20 // (2 if several and engine != "tensor parallel" else 1)
    if automatic:
        updates //= 2
        settings = {"max_grad_norm": 1.0, "max_grad_value": 5.0, "gradient_accumulation_steps": 2}
    alone = operation in ("validation", "save", "save in the background")
    with counted_reads() as reads:
        phases = Phases(
            reads, "update" if alone else operation, operation, "save" in operation, updates
        )
        monitors = [GradientNormMonitor()] if automatic else []
        trainer = Trainer(
            cpu=True,
            max_epochs=1,
            progress_bar=False,
            checkpointing=False,
            num_sanity_val_steps=0,
            project_dir=folder,
            callbacks=[EMA(), *monitors, LearningRateMonitor(), ThroughputMonitor(), phases],
            **{"log_every": 1000, **OPERATIONS[operation], **ENGINES[engine], **settings},
        )
        validation = DataLoader(ROWS, 4) if operation == "validation" else None
        trainer.fit(module(), DataLoader(data, 4), validation)
    assert trainer.global_step == updates
    return reads.places


OPERATIONS = {
    "update": {},
    "update with non_finite='skip'": {"non_finite": "skip"},
    "update whose values are logged": {"log_every": 1},
    "validation": {"val_every": "4 steps"},  # not at the end of the epoch
    "save": {},
    "save in the background": {},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_waits_for_the_device_but_what_the_table_names(ranks2, tmp_path, operation):
    """On CUDA each would make the host wait until the device has done all that was queued."""
    found = set()
    kinds = [(Split, ROWS)]
    if operation == "update":
        kinds += [(Split, Stream()), (ByHand, ROWS), (ByHand, Stream())]
    for number, (engine, (module, data)) in enumerate(product(ENGINES, kinds)):
        folder = tmp_path / str(number)
        run = partial(waits_by_operation, folder, module, data, engine, operation)
        of_ranks = [run()] if engine == "one process" else ranks2(run)
        found |= {(engine, *place) for places in of_ranks for place in places}
    surprises = [each for each in sorted(found) if each[2] not in WAITS[each[1]]]
    assert not surprises, "repair these, or give the reason in the table"
    assert WAITS[operation].keys() == {place for _, what, place in found if what == operation}


def own_loop(engine):
    """What a loop of one's own waits for."""
    with counted_reads() as reads:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(non_blocking=True),
            **ENGINES[engine],
        )
        model = Split()
        made = model.configure_optimizers()
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, made["optimizer"], made["scheduler"], DataLoader(ROWS, 4)
        )
        for number, (rows,) in enumerate(loader):
            reads.updates, reads.operation = number // 2, "update" if number >= 4 else None
            with accelerator.accumulate(model):
                accelerator.backward(model(rows))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        reads.operation = None
    return number + 1, reads.places


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_of_ones_own_waits_for_nothing(ranks2, engine):
    if engine == "one process":
        found = [own_loop(engine)] * 2
    else:
        found = ranks2(own_loop, engine)
    assert found == [(10 if engine in ("DDP", "FSDP") else 20, Counter())] * 2


# -- on a real device: torch raises at each wait ---------------------------------------------------


def raise_at_waits(device, on):
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error" if on else "default")


class Strict(Callback):
    """Lets torch raise at each wait from the third update to the last, and in evaluations.

    Not in what is due at the end of an epoch. Waits for events are allowed, see the table above.
    """

    runs_last = True

    def __init__(self, device, last, saves=False):
        self.device, self.last, self.saves = device, last, saves

    def on_train_step_start(self, trainer, module):
        if trainer.global_step == 2:
            raise_at_waits(self.device, on=True)

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.last:
            raise_at_waits(self.device, on=False)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        raise_at_waits(self.device, on=True)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise_at_waits(self.device, on=False)

    def on_boundary(self, trainer, module):
        if self.saves and trainer.global_step in (1, 3):  # the first allocates host memory
            trainer.save_checkpoint(f"step-{trainer.global_step:08}", background=True)


class Fused(Split):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU shows that these runs work; nothing is waited for there."""
    yield request.param
    raise_at_waits(request.param, on=False)


@pytest.fixture
def group_of_one(device):
    """A process group with which the engines of several processes run on one."""
    on_cuda = device == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    yield
    dist.destroy_process_group()


def alone(engine, *, by_hand=False):
    """The settings with which an engine runs on one process."""
    if engine == "FSDP":
        return {"engine": FullyShard, "fsdp_plugin": FullyShardedDataParallelPlugin()}
    return {"engine": Replicas if by_hand else DataParallel} if engine == "DDP" else {}


on_each_engine = pytest.mark.parametrize("engine", ["one process", "DDP", "FSDP"])
no_prototype_warning = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode is a prototype"
)


def fit_strictly(folder, device, module, *, data=ROWS, validation=None, saves=False, **settings):
    updates = 20
    if module.automatic_optimization:
        updates //= 2
        settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, **settings}
    trainer = Trainer(
        cpu=device == "cpu",
        max_epochs=1,
        progress_bar=False,
        checkpointing=False,
        num_sanity_val_steps=0,
        project_dir=folder,
        callbacks=[EMA(), LearningRateMonitor(), Strict(device, updates, saves)],
        **{"log_every": 1, **settings},
    )
    trainer.fit(module, DataLoader(data, 4, pin_memory=device == "cuda"), validation)
    assert trainer.global_step == updates
    weights = [gathered(each).detach().cpu() for each in module.parameters()]
    assert all(weight.isfinite().all() for weight in weights)
    return weights


@no_prototype_warning
@pytest.mark.parametrize("make", [Split, ByHand, Fused])
@pytest.mark.parametrize("data", [ROWS, Stream()], ids=["map", "stream"])
@on_each_engine
def test_no_update_synchronises_a_gpu(tmp_path, device, group_of_one, engine, data, make):
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(0)
    same = make()
    settings = alone(engine, by_hand=make is ByHand)
    found = fit_strictly(tmp_path / "run", device, module, data=data, **settings)
    expected = fit_strictly(tmp_path / "other", device, same, data=data)
    torch.testing.assert_close(found, expected)


@no_prototype_warning
@pytest.mark.parametrize("settings", [{"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}])
@on_each_engine
def test_no_update_in_mixed_precision_synchronises_a_gpu(
    tmp_path, device, group_of_one, engine, settings
):
    fit_strictly(tmp_path, device, Fused(), **alone(engine), **settings)


@no_prototype_warning
def test_skipping_updates_on_the_device_does_not_synchronise_it(tmp_path, device):
    fit_strictly(tmp_path, device, Fused(), non_finite="skip")


@no_prototype_warning
@on_each_engine
def test_no_batch_of_an_evaluation_synchronises_a_gpu(tmp_path, device, group_of_one, engine):
    validation = DataLoader(ROWS, 4, pin_memory=device == "cuda")
    fit_strictly(tmp_path, device, Split(), validation=validation, **alone(engine))


@no_prototype_warning
@on_each_engine
def test_no_background_save_synchronises_a_gpu(tmp_path, device, group_of_one, engine):
    fit_strictly(tmp_path, device, Split(), saves=True, **alone(engine))


@no_prototype_warning
@on_each_engine
def test_no_loop_of_ones_own_synchronises_a_gpu(device, group_of_one, engine):
    accelerator = Accelerator(
        cpu=device == "cpu",
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        **alone(engine, by_hand=True),
    )
    model = Split()
    made = model.configure_optimizers()
    model, optimizer, scheduler, loader = accelerator.prepare(
        model,
        made["optimizer"],
        made["scheduler"],
        DataLoader(ROWS, 4, pin_memory=device == "cuda"),
    )
    for number, (rows,) in enumerate(loader):
        if number == 4:
            raise_at_waits(device, on=True)
        with accelerator.accumulate(model):
            accelerator.backward(model(rows))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    raise_at_waits(device, on=False)
    assert number == 19
