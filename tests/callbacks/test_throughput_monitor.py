import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from callbacks import Callback, ModelCheckpoint, ThroughputMonitor, throughput_monitor
from tests.numerics.running import quiet_trainer
from trackers import read_metrics
from trainer import TrainModule

PREFIX = "throughput/"
FORWARD_AND_BACKWARD = 2 * 4 * (8 * 3) * 2  # a batch of 4; of the input no gradient is wanted


class Clock:
    """Time that passes only when somebody says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput_monitor.time, "monotonic", clock)
    return clock


class Line(TrainModule):
    def __init__(self, seconds=None, items=0):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)
        self.seconds, self.items = seconds, items
        self.clock = None

    def training_step(self, batch, batch_idx):
        if self.clock is not None:
            self.clock.now += self.seconds[min(self.global_step, len(self.seconds) - 1)]
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.clock is not None:
            self.clock.now += 1000.0

    def count_items(self, batch):
        return len(batch[0]) * 10

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples=40, size=4):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(samples, 8, generator=generator)), size)


def make(*callbacks, **options):
    return quiet_trainer(**{"max_epochs": 1, "callbacks": list(callbacks)} | options)


def recorded(name, folder="run"):
    records = read_metrics(f"{folder}/metrics.jsonl")
    return {r["step"]: r[PREFIX + name] for r in records if PREFIX + name in r}


def timed(clock, seconds, monitor, *, val=None, **options):
    module = Line(seconds)
    module.clock = clock
    make(monitor, **options).fit(module, loader(), val)


def test_speeds_are_means_over_the_window(clock):
    timed(clock, [50.0, 2.0, 4.0, 2.0, 1.0, 1.0], ThroughputMonitor(2))
    # the first update is a warm-up; then 1 or 2 updates make a mean
    seconds = {2: 2, 3: 3, 4: 3, 5: 1.5, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1}
    assert recorded("updates_per_sec") == pytest.approx({n: 1 / s for n, s in seconds.items()})
    assert recorded("samples_per_sec") == pytest.approx({n: 4 / s for n, s in seconds.items()})
    assert recorded("items_per_sec") == pytest.approx({n: 40 / s for n, s in seconds.items()})


def test_only_what_is_recorded_is_logged_and_the_window_holds_all_updates(clock):
    timed(clock, [9.0] + [1.0] * 4 + [2.0] * 5, ThroughputMonitor(4), log_every=5)
    assert recorded("updates_per_sec") == {5: 1.0, 10: pytest.approx(0.5)}


def test_micro_batches_of_a_window_are_one_update(clock):
    timed(clock, [1.0], ThroughputMonitor(), gradient_accumulation_steps=2)
    assert recorded("updates_per_sec") == dict.fromkeys(range(2, 6), 0.5)
    assert recorded("samples_per_sec") == dict.fromkeys(range(2, 6), 4.0)
    flops = recorded("device/flops_per_sec")
    assert flops == {n: pytest.approx(FORWARD_AND_BACKWARD) for n in range(2, 6)}


def test_validations_take_no_time(clock):
    timed(clock, [1.0], ThroughputMonitor(), val=loader(8), val_every=3)
    assert recorded("updates_per_sec") == {n: pytest.approx(1.0) for n in range(2, 11)}


def counted_otherwise(samples=4):
    """What the counter says of the same step outside a run."""
    layer = torch.nn.Linear(8, 3)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(samples, 8)).square().mean().backward()
    return counter.get_total_flops()


def test_flops_of_one_micro_batch_are_counted():
    monitor = ThroughputMonitor()
    make(monitor).fit(Line(), loader())
    assert monitor.flops_per_batch == counted_otherwise() == FORWARD_AND_BACKWARD
    speed, flops = recorded("updates_per_sec"), recorded("device/flops_per_sec")
    assert flops == {n: pytest.approx(FORWARD_AND_BACKWARD * s) for n, s in speed.items()}
    assert recorded("device/mfu") == {}  # nobody knows the peak of a CPU


def test_mfu_is_the_share_of_the_peak(clock):
    monitor = ThroughputMonitor(flops_per_batch=300.0, peak_flops=1000.0)
    timed(clock, [2.0], monitor)
    assert recorded("device/flops_per_sec") == dict.fromkeys(range(2, 11), 150.0)
    assert recorded("device/mfu") == {n: pytest.approx(0.15) for n in range(2, 11)}
    assert monitor.flops_per_batch == 300.0


def test_flops_can_be_left_out():
    make(ThroughputMonitor(flops_per_batch=0, peak_flops=1.0)).fit(Line(), loader())
    assert len(recorded("updates_per_sec")) == 9
    assert recorded("device/flops_per_sec") == recorded("device/mfu") == {}


def test_the_counting_changes_no_number():
    weights = []
    for callbacks in ([], [ThroughputMonitor()]):
        torch.manual_seed(0)
        module = Line()
        make(*callbacks, project_dir=f"run{len(weights)}", seed=0).fit(module, loader())
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


class Fail(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.at:
            raise KeyError("stop")


def dispatch_modes():
    return torch._C._len_torch_dispatch_stack()


def test_an_error_in_the_counted_batch_leaves_no_counter_behind():
    monitor = ThroughputMonitor()
    with pytest.raises(KeyError):
        make(monitor, Fail(1)).fit(Line(), loader())
    assert dispatch_modes() == 0
    assert monitor.flops_per_batch is None
    make(monitor, project_dir="again").fit(Line(), loader())
    assert monitor.flops_per_batch == FORWARD_AND_BACKWARD


class Modes(Callback):
    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, module, loss):
        self.seen.append(dispatch_modes())


def test_only_one_micro_batch_is_counted():
    modes = Modes()
    make(modes, ThroughputMonitor()).fit(Line(), loader())
    assert modes.seen == [0, 1] + [0] * 8


def test_what_is_compiled_stays_compiled_and_is_counted():
    graphs, calls = [], []

    def backend(graph, inputs):
        def run(*arguments):
            calls.append(dispatch_modes())
            return graph(*arguments)

        graphs.append(graph)
        return run

    class Compiled(Line):
        def __init__(self):
            super().__init__()
            self.run = torch.compile(self.layer, backend=backend)

        def training_step(self, batch, batch_idx):
            return self.run(batch[0]).square().mean()

    torch._dynamo.reset()
    monitor = ThroughputMonitor()
    make(monitor).fit(Compiled(), loader())
    assert len(graphs) == 1  # by the first batch; the counting made no other
    assert calls == [0] * 9  # of ten; one ran without the graph, in which nothing can be counted
    assert monitor.flops_per_batch == FORWARD_AND_BACKWARD


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_boundary(self, trainer, module):
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


def test_a_resumed_run_counts_no_flops_again_and_its_speeds_are_its_own(clock):
    first = ThroughputMonitor()
    make(first, StopAt(4), ModelCheckpoint(every=1, background=False), max_epochs=1).fit(
        Line(), loader()
    )
    assert first.flops_per_batch == FORWARD_AND_BACKWARD
    clock.now += 1e6
    modes = Modes()
    second = ThroughputMonitor()
    module = Line([1.0])
    module.clock = clock
    trainer = make(modes, second, ModelCheckpoint(every=1), max_epochs=1)
    trainer.fit(module, loader(), ckpt_path=str(sorted(trainer.checkpoint_dir.glob("step-*"))[-1]))
    assert modes.seen == [0] * 6
    assert second.flops_per_batch == FORWARD_AND_BACKWARD
    speeds = {n: s for n, s in recorded("updates_per_sec").items() if n > 4}
    assert speeds == {n: pytest.approx(1.0) for n in range(6, 11)}  # 5 is its first update
    given = ThroughputMonitor(flops_per_batch=7)
    given.load_state_dict(second.state_dict())
    assert given.flops_per_batch == 7
    second.load_state_dict(given.state_dict())
    assert second.flops_per_batch is None  # what was given is not what was counted


def test_another_run_counts_anew():
    monitor = ThroughputMonitor()
    make(monitor).fit(Line(), loader(size=2))
    assert monitor.flops_per_batch == counted_otherwise(2)
    make(monitor, project_dir="other").fit(Line(), loader())
    assert monitor.flops_per_batch == counted_otherwise(4)


def on_ranks(samples, **options):
    monitor = ThroughputMonitor(peak_flops=1e9, window_size=3)
    trainer = make(monitor, **options)
    trainer.fit(Line(), loader(samples))
    return monitor.flops_per_batch, dict(trainer.callback_metrics)


def test_two_processes_count_the_samples_of_both(ranks2):
    (own, metrics), (other_own, other) = ranks2(on_ranks, 40)
    assert own == other_own == FORWARD_AND_BACKWARD
    assert metrics == other
    speed = {name.removeprefix(PREFIX): v for name, v in metrics.items() if PREFIX in name}
    assert set(speed) == {
        *("updates_per_sec", "samples_per_sec", "items_per_sec"),
        *("device/flops_per_sec", "device/mfu"),
    }
    # clocks differ a little between the processes, the ratios do not
    assert speed["samples_per_sec"] / speed["updates_per_sec"] == pytest.approx(8)
    assert speed["items_per_sec"] / speed["samples_per_sec"] == pytest.approx(10)
    assert speed["device/flops_per_sec"] / speed["updates_per_sec"] == pytest.approx(
        FORWARD_AND_BACKWARD
    )
    assert speed["device/mfu"] == pytest.approx(speed["device/flops_per_sec"] / 1e9)


def test_a_process_with_too_few_batches_to_count_waits_for_nobody(ranks2):
    # three batches of 4: the second process has one, and does not count
    (own, metrics), (other_own, other) = ranks2(on_ranks, 12)
    assert (own, other_own) == (FORWARD_AND_BACKWARD, None)
    assert metrics == other
    assert metrics["throughput/device/flops_per_sec"] > 0


def test_the_peak_is_that_of_the_precision_of_the_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    cuda, found = torch.device("cuda", 0), throughput_monitor._peak_of
    assert found(cuda, "bf16") == found(cuda, "fp16") == 312e12
    assert found(cuda, "no") == 19.5e12
    torch.set_float32_matmul_precision("high")
    assert found(cuda, "no") == 156e12
    assert found(torch.device("cpu"), "bf16") is None
