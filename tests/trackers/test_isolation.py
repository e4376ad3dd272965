"""Whatever a tracker does, the training is the one without it, and nothing is lost (P8)."""

from __future__ import annotations

import csv
import json
import logging
import resource
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from trackers import BackgroundTracker, GeneralTracker, read_metrics
from trainer import Trainer, TrainModule

STEPS = 16  # two epochs of eight


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        self.log("train/rank", 1.0, logger=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch[0]).abs().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class At(Callback):
    """Calls functions, each when its update is done, or at the "end" of the fit."""

    def __init__(self, actions):
        self.actions = actions

    def on_train_step_end(self, trainer, *_):
        if action := self.actions.get(trainer.global_step):
            action()

    def on_fit_end(self, *_):
        if action := self.actions.get("end"):
            action()


def fit(name, tracker=None, actions=None):
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    trainer = Trainer(
        max_epochs=2,
        log_every=1,
        seed=3,
        project_dir=name,
        log_with=tracker,
        checkpointing=False,
        progress_bar=False,
        callbacks=[At(actions or {})],
    )
    module = Net()
    trainer.fit(module, loader, loader)
    records = read_metrics(trainer.metrics_path)
    for record in records:
        del record["time"]
    return dict(module.net.state_dict()), records


@pytest.fixture
def check():
    """Compares a run with the one without trackers; gives what its trackers should have."""
    weights, records = fit("without")
    assert len(records) == STEPS + 2

    def same(run):
        assert run[1] == records
        assert all(torch.equal(run[0][name], weights[name]) for name in weights)
        own = ("step", "epoch", "train/rank")
        values = [{name: one[name] for name in one if name not in own} for one in records]
        return [
            (one["step"], messages)
            for one, messages in zip(records, values, strict=True)
            if messages
        ]

    return same


@pytest.fixture
def options(monkeypatch):
    """Sets the defaults of what stands before each tracker of a `Trainer`."""
    defaults = BackgroundTracker.__init__.__kwdefaults__
    return lambda **values: [monkeypatch.setitem(defaults, *item) for item in values.items()]


class Listed(GeneralTracker):
    name = "listed"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        self.messages = []

    def log(self, values, step):
        self.messages.append((step, values))


def test_training_is_unaffected_by_a_tracker_that_raises(check, options, caplog):
    class Raising(Listed):
        def log(self, values, step):
            raise RuntimeError("an error of its own")

    options(finish_timeout=0.2)
    check(fit("run", [Raising(), well := Listed()]))
    assert len(well.messages) == STEPS + 2
    kept = Path("run/metrics.jsonl").absolute()
    assert f"lost 18 records, which are in {kept}, and failed in" in caplog.text


@pytest.mark.parametrize("capacity", [3, 10_000])
def test_training_is_unaffected_by_a_slow_tracker(check, options, capacity):
    class Sleeping(Listed):
        def log(self, values, step):
            time.sleep(0.01)
            super().log(values, step)

    options(capacity=capacity)
    assert check(fit("run", tracker := Sleeping())) == tracker.messages


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_waits_for_a_lock_of_the_main_thread_does_not_hang_the_run(
    check, options, method, caplog
):
    lock = threading.Lock()

    def wait(self, *_):
        with lock:
            pass

    tracker = type("Deadlock", (Listed,), {method: wait})()
    options(finish_timeout=0.2)
    with lock:
        run = fit("run", tracker)
    check(run)
    assert f"abandoned in `{method}` after 0.2 seconds" in caplog.text
    for thread in threading.enumerate():
        if thread.name.startswith("tracker-"):
            thread.join()


SCRIPT = """
import sys, threading
sys.path[:0] = [{root!r}]
from tests.trackers.test_isolation import Listed, fit
from trackers import BackgroundTracker

class Hanging(Listed):
    def log(self, values, step):
        threading.Event().wait()

BackgroundTracker.__init__.__kwdefaults__["finish_timeout"] = 0.2
weights, records = fit("run", Hanging())
print(len(records), flush=True)
sys.exit(3)
"""


def test_a_process_exits_although_a_tracker_hangs():
    script = SCRIPT.format(root=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["18"]
    assert "abandoned in `log`" in done.stderr


# -- a server --------------------------------------------------------------------------------------


class Service:
    """A server on this machine: its port is taken from the beginning, and refuses until `open`."""

    def __init__(self):
        self.messages, self.refuses = [], 0
        self.asked = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.asked.set()
                if service.refuses:
                    service.refuses -= 1
                    self.send_error(503)
                    return
                service.messages.append(tuple(json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server.server_bind()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def open(self):
        self.server.server_activate()
        self.thread.start()

    def close(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
        self.server.server_close()


class Posting(GeneralTracker):
    name = "posting"
    requires_logging_directory = False
    tracker = None

    def __init__(self, url):
        self.url = url
        self.failed = threading.Event()

    def log(self, values, step):
        body = json.dumps([step, values]).encode()
        request = urllib.request.Request(self.url, data=body)
        try:
            urllib.request.urlopen(request, timeout=20).close()
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it is an answer too
            self.failed.set()
            raise


@pytest.fixture
def service():
    made = Service()
    yield made
    made.close()


@pytest.mark.parametrize(("when", "capacity"), [(5, 3), (5, 10_000), ("end", 3)])
def test_records_arrive_after_a_server_was_down_at_the_start(
    check, options, service, when, capacity, caplog
):
    options(capacity=capacity)
    tracker = Posting(service.url)

    def back():
        tracker.failed.wait(20)  # it was away indeed
        service.open()

    assert check(fit("run", tracker, {when: back})) == service.messages
    assert "lost 0 records and failed in" in caplog.text


@pytest.mark.parametrize("refused", [2, 9])
@pytest.mark.parametrize("capacity", [3, 10_000])
def test_records_arrive_after_an_outage_during_the_run(check, options, service, capacity, refused):
    options(capacity=capacity, first_pause=0.001, longest_pause=0.1)
    service.open()
    tracker = Posting(service.url)

    def outage():
        service.refuses = refused

    expected = check(fit("run", tracker, {3: outage, 9: outage}))
    assert sorted(service.messages, key=str) == sorted(expected, key=str)
    # Another record is tried ahead of one that was refused often.
    assert service.messages == expected or refused > 2
    assert tracker.failed.is_set()


# -- a disk ----------------------------------------------------------------------------------------


class Told(logging.Handler):
    """Waits until each of several trackers has failed."""

    def __init__(self, *names):
        super().__init__()
        self.events = {name: threading.Event() for name in names}

    def emit(self, record):
        for name, event in self.events.items():
            if f"{name!r} failed in `log`" in record.getMessage():
                event.set()

    def wait(self):
        assert all(event.wait(20) for event in self.events.values())


def test_a_disk_that_fills_under_the_local_record_and_a_table(check):
    """Files may grow to 300 bytes for a while: the last write is cut, as on a full disk."""
    messages = Told("jsonl", "csv")
    logging.getLogger("trackers").addHandler(messages)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def clear():
        messages.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))

    try:
        expected = check(fit("run", "csv", {1: fill, STEPS: clear}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        logging.getLogger("trackers").removeHandler(messages)
    (path,) = Path("run/logs").rglob("metrics.csv")
    with open(path, newline="") as text:
        table = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(text)]
    rows = {}
    for step, values in expected:
        rows.setdefault(step, {"step": step}).update(values)
    assert table == list(rows.values())
