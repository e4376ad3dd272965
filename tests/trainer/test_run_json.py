"""`run.json`: what a run is, how it ended, what was warned of."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint, PredictionWriter
from trackers import read_metrics
from trainer import Preempted, Trainer, TrainModule
from trainer.loops.run_metadata import Listener, RunMetadata, name_of

RUN = Path("run/run.json")


class Net(TrainModule):
    def __init__(self, width=3, note="s", scale=float("inf")):
        super().__init__()
        self.save_hyperparameters("width", "scale")
        self.save_hyperparameters("note", logger=False)
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class At(Callback):
    """Does something behind an update."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            self.what(trainer)


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)


def fit(*callbacks, ckpt_path=None, max_epochs=2, **arguments):
    trainer = Trainer(
        max_epochs=max_epochs,
        cpu=True,
        seed=3,
        progress_bar=False,
        project_dir="run",
        callbacks=[*callbacks, ModelCheckpoint(every=2, background=False)],
        **arguments,
    )
    trainer.fit(Net(), loader(), ckpt_path=ckpt_path)
    return trainer


def about(path=RUN):
    return json.loads(Path(path).read_text())


def fail(_):
    raise ZeroDivisionError("on purpose")


def test_run_json_says_what_the_run_is():
    before = time.time()
    fit()
    messages = about()
    (checkpoint, *_) = sorted(Path("run/checkpoints").iterdir())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert messages["run_id"] == manifest["run_id"]
    assert messages["configuration"] == manifest["configuration"]
    assert messages["versions"] == manifest["versions"]
    assert messages["versions"] == {"torch": torch.__version__, "python": platform.python_version()}
    assert messages["hyper_parameters"] == {"width": 3, "scale": "Infinity"}  # and not the note
    assert (messages["module"], messages["world_size"], messages["device"]) == ("Net", 1, "cpu")
    (start,) = messages["starts"]
    assert before <= start["begin"] <= start["end"] <= time.time()
    assert (start["step"], start["status"], start["error"]) == (0, "finished", None)
    assert messages["warnings"] == []


def test_the_code_is_the_commit_of_the_working_folder():
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init"], ["commit", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    fit()
    assert about()["code"] == head.strip()


class FailsLate(Callback):
    def teardown(self, trainer, module, stage):
        raise KeyError("late")


@pytest.mark.parametrize(
    ("callback", "error"),
    [(At(3, fail), "ZeroDivisionError: on purpose"), (FailsLate(), "KeyError: 'late'")],
)
def test_a_failed_run_records_its_error(callback, error):
    with pytest.raises((ZeroDivisionError, KeyError)):
        fit(callback)
    (start,) = about()["starts"]
    assert (start["status"], start["error"]) == ("failed", error)


def test_a_preempted_run_and_its_resume_are_two_starts():
    with pytest.raises(Preempted):
        fit(At(3, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    first = about()
    assert [start["status"] for start in first["starts"]] == ["preempted"]
    fit(ckpt_path="auto")
    messages = about()
    assert messages["run_id"] == first["run_id"]
    assert messages["starts"][0] == first["starts"][0]
    assert [start["status"] for start in messages["starts"]] == ["preempted", "finished"]
    assert messages["starts"][1]["step"] in (3, 4)


def test_a_run_under_way_or_killed_is_running():
    seen = []

    def look(trainer):
        trainer._recorder.sync()()  # the file is written on the thread of the record, before that
        seen.append(about()["starts"])

    fit(At(3, look))
    ((start,),) = seen
    assert (start["status"], start["end"]) == ("running", None)


def test_warnings_of_the_log_are_kept_and_those_of_others_and_of_later_are_not():
    def warn(_):
        logging.getLogger("trainer.some").warning("a %s one", "first")
        logging.getLogger("callbacks").error("worse")
        logging.getLogger("trackers.x").info("nothing")
        logging.getLogger("others").warning("not ours")

    fit(At(2, warn))
    logging.getLogger("trainer").warning("behind the run")
    kept = [(each["logger"], each["text"]) for each in about()["warnings"]]
    assert kept == [("trainer.some", "a first one"), ("callbacks", "worse")]
    assert all(logging.getLogger(n).handlers == [] for n in ("trainer", "callbacks", "trackers"))


def test_warnings_reach_stderr_without_a_logging_configuration(monkeypatch, capsys):
    """Python writes them there only as long as there is no handler, as `run.json` has one."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def warn(trainer):
        logging.getLogger("trainer.some").warning("at %d", trainer.global_step)
        if trainer.global_step == 2:
            logging.getLogger("trainer").addHandler(handler)

    handler = logging.StreamHandler(sys.stdout)
    nested = Listener(lambda _: None)  # of a second run in the first one
    nested.listen()
    try:
        fit(At(1, warn), At(2, warn), At(3, warn))
    finally:
        nested.close()
        logging.getLogger("trainer").removeHandler(handler)
    messages = capsys.readouterr()
    assert messages.err == "at 1\nat 2\n"
    assert messages.out == "at 3\n"
    assert len(about()["warnings"]) == 3


def test_a_resumed_run_keeps_its_warnings():
    def warn(trainer):
        logging.getLogger("trainer").warning("at %d", trainer.global_step)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(At(3, warn))
    fit(At(5, lambda trainer: logging.getLogger("trainer").warning("later")), ckpt_path="auto")
    assert [each["text"] for each in about()["warnings"]] == ["at 3", "later"]


def test_a_hundred_warnings_are_kept_and_the_others_counted(tmp_path):
    file = RunMetadata(tmp_path / "run.json")
    file.begin({"run_id": "1"}, 0)
    for number in range(130):
        file.warn(logging.LogRecord("trainer", 30, "", 0, "number %d", (number,), None))
    file.end("finished", None)
    messages = about(tmp_path / "run.json")
    assert (len(messages["warnings"]), messages["more_warnings"]) == (100, 30)
    assert messages["warnings"][-1]["text"] == "number 99"


def test_another_run_in_the_folder_begins_its_own_and_keeps_the_earlier():
    trainer = Trainer(max_epochs=1, cpu=True, project_dir="run", checkpointing=False)
    trainer.fit(Net(), loader())
    first = about()
    trainer = Trainer(max_epochs=1, cpu=True, project_dir="run", checkpointing=False)
    trainer.fit(Net(), loader())
    assert about("run/run.1.json") == first
    assert about()["run_id"] != first["run_id"]
    assert len(about()["starts"]) == 1


def test_evaluations_and_trials_leave_run_json_alone():
    trainer = fit()
    before = RUN.read_bytes()
    trainer.predict(Net(), loader())
    assert RUN.read_bytes() == before
    Trainer(max_epochs=1, cpu=True, project_dir="quick", fast_dev_run=True).fit(Net(), loader())
    assert not Path("quick").exists()


def test_a_full_disk_is_warned_of_and_does_not_stop_the_run(caplog):
    def block(trainer):
        trainer._recorder.sync()()
        RUN.unlink()
        RUN.mkdir()
        (RUN / "full").touch()

    fit(At(2, block))
    messages = [
        r.getMessage() for r in caplog.records if "run.json could not be written" in r.getMessage()
    ]
    assert len(messages) == 1
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) > 0


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": []}'])
def test_a_damaged_file_is_begun_anew(content, caplog):
    with pytest.raises(ZeroDivisionError):
        fit(At(3, fail))
    RUN.write_text(content)
    fit(ckpt_path="auto")
    assert [start["status"] for start in about()["starts"]] == ["finished"]
    assert "cannot be read and is recreated" in caplog.text


def test_a_forked_worker_records_no_warnings():
    """There no thread would take it, and a lock that one held at the fork is never released."""
    messages = []
    listener = Listener(messages.append)
    listener.listen()
    try:
        child = os.fork()
        if child == 0:
            logging.getLogger("trainer.test").error("in a worker")
            os._exit(len(messages))
        logging.getLogger("trainer.test").error("in the run")
        assert os.waitpid(child, 0)[1] == 0
        assert [record.getMessage() for record in messages] == ["in the run"]
    finally:
        listener.close()


def test_every_change_replaces_the_file_whole(tmp_path):
    file = RunMetadata(tmp_path / "run.json")
    file.begin({"run_id": "1"}, 0)
    opened = (tmp_path / "run.json").open()
    file.end("finished", None)
    with opened:
        assert json.load(opened)["starts"][0]["status"] == "running"
    assert about(tmp_path / "run.json")["starts"][0]["status"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def _on_a_rank():
    state = fit().accelerator.state
    state.wait_for_everyone()  # rank 0 has written its end
    names = {path.name for path in Path("run").iterdir()} - {".cadence-lock"}
    state.wait_for_everyone()
    return sorted(names), about()["world_size"]


def test_of_several_processes_one_writes_run_json(ranks2):
    names = ["checkpoints", "metrics.jsonl", "run.json"]
    assert ranks2(_on_a_rank) == [(names, 2)] * 2


def test_a_start_clears_what_killed_ones_have_left(tmp_path):
    left = tmp_path / f".cadence-writing-{os.getpid()}9-run.json"
    left.write_text("half")
    other = tmp_path / ".cadence-writing-7-metrics.json"
    other.touch()
    RunMetadata(tmp_path / "run.json").begin({"run_id": "1"}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "run.json"]


NAN, INF, BAD_NAME, HUGE = float("nan"), float("inf"), "caf\udce9/\ud800", -(10**40)
STRANGE = {
    "numbers": (NAN, INF, -INF, HUGE, 2**64 - 1, True, None),
    "texts": ["NaN", "Infinity", BAD_NAME, "\x00"],
    "keys": {1: "int", "1": "str", None: 0, (2, NAN): 2},
    BAD_NAME: {"$": BAD_NAME},
}


class Strange(Net):
    """Logs, keeps and predicts what JSON cannot represent."""

    def __init__(self, strange=None, number=np.float32(2.5)):  # noqa: B008 - not mutable
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.log_dict({"nan": NAN, "inf": -INF, "none": torch.tensor([INF]), "ok": 1.5})
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        rows = len(batch[0])
        return {"score": [NAN] * rows, "name": [BAD_NAME] * rows, 1: [np.float32(INF)] * rows}


class Remembers(Callback):
    """Has a state with tensors under the same names."""

    def __init__(self):
        self.seen = STRANGE | {"tensors": {BAD_NAME: torch.tensor([INF])}}

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state_dict):
        self.seen = state_dict


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def unique(pairs):
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_every_file_of_a_run_is_json_for_strict_parsers():
    trainer = Trainer(
        max_epochs=1,
        cpu=True,
        progress_bar=False,
        project_dir="run",
        log_every=1,
        profile="simple",
        callbacks=[
            Remembers(),
            ModelCheckpoint(every=2, background=False),
            PredictionWriter("run/joined"),
        ],
    )
    module = Strange({**STRANGE, "path": Path(BAD_NAME)})
    trainer.fit(module, loader())
    trainer.predict(module, loader(), return_predictions=False)
    trainer.accelerator.save_state("run/state")
    trainer.accelerator.save_model(module, "run/model", max_shard_size=12)

    files = sorted(Path("run").rglob("*.json*"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
            read = json.loads(line, parse_constant=refuse, object_pairs_hook=unique)
            json.dumps(read, ensure_ascii=False).encode()  # no lone surrogates
    assert {file.name for file in files} >= {
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors.index.json",
        "predictions.jsonl",
        "profile-fit.json",
        "run.json",
        "trainer.json",
    }
    (record, *_) = read_metrics("run/metrics.jsonl")
    assert np.isnan(record["nan"])
    assert (record["inf"], record["none"], record["ok"]) == (-INF, INF, 1.5)


def test_what_json_cannot_represent_is_restored_exactly():
    fit(Remembers(), max_epochs=1)
    again = Remembers()
    again.seen = None
    trainer = Trainer(
        max_epochs=1, cpu=True, progress_bar=False, project_dir="run", callbacks=[again]
    )
    trainer.fit(Net(), loader(), ckpt_path="last")
    tensors = again.seen.pop("tensors")
    assert repr(again.seen) == repr(STRANGE)  # NaN is not equal to itself
    assert torch.equal(tensors[BAD_NAME], torch.tensor([INF]))

    trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False, project_dir="strange")
    trainer.fit(Strange(STRANGE), loader())
    loaded = Strange.load_from_checkpoint("strange/checkpoints/step-00000004")
    assert repr(loaded.hparams["strange"]) == repr(STRANGE)
    assert loaded.hparams["number"] == 2.5


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_gpu_is_named(monkeypatch, kind):
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "get_device_name", lambda device: f"GPU {device.index}")
    assert name_of(torch.device(kind, 1)) == "GPU 1"
    assert name_of(torch.device("cpu")) == "cpu"
