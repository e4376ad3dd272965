"""One folder and its runs: damage in the way, two at once, evaluations beside, going back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trackers import JsonlTracker, read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint import storage
from trainer.checkpoint.lock import LOCK, alone_in, holder_of
from trainer.checkpoint.storage import checkpoint_name, verify
from trainer.checkpoint.weights import load_weights
from trainer.errors import CheckpointError, LaterReleaseError
from trainer.rng import isolated_rng
from trainer.state import PartialState

CHECKPOINTS = Path("run/checkpoints")
MANIFEST = "manifest.json"


class Net(TrainModule):
    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, width)
        self.head = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(torch.dropout(self.net(batch[0]), 0.2, True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", -abs(self.trainer.global_step - 4.0))  # the best at update 4

    def test_step(self, batch, batch_idx):
        self.log("weight", self.head.weight.sum())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class At(Callback):
    """Calls functions at the boundaries of some updates, each as another process would run it."""

    def __init__(self, calls):
        self.calls = calls

    def on_boundary(self, trainer, module):
        with isolated_rng():
            self.calls.get(trainer.global_step, lambda: None)()


def loader(batches=12):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * batches, 3, generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True)


def make(folder, *callbacks, **arguments):
    defaults = {"max_epochs": 1, "log_every": 1, "val_every": 2, "seed": 3, "progress_bar": False}
    saver = ModelCheckpoint(every=4, save_top_k=-1)
    return Trainer(
        callbacks=list(callbacks or [saver]),
        project_dir=folder,
        cpu=True,
        **defaults | arguments,
    )


def fit(folder, *callbacks, module=None, ckpt_path=None, **arguments):
    trainer = make(folder, *callbacks, **arguments)
    trainer.fit(module or Net(), loader(), loader(1), ckpt_path=ckpt_path)
    return trainer


def names(folder=CHECKPOINTS):
    return sorted(path.name for path in Path(folder).iterdir())


def step(number, root=CHECKPOINTS):
    return root.absolute() / checkpoint_name(number)


def contents(folder):
    """Every file below a folder with its bytes."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def records(file="run/metrics.jsonl"):
    return [{k: v for k, v in record.items() if k != "time"} for record in read_metrics(file)]


def same_weights(one, other):
    one, other = load_weights(one), load_weights(other)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder / "run")
    return folder / "run"


@pytest.fixture
def run(whole):
    shutil.copytree(whole, "run")


def rewritten(change):
    def damage(path):
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps(change(manifest)))

    return damage


DAMAGES = {
    "missing": lambda path: (path / MANIFEST).unlink(),
    "torn": lambda path: (path / MANIFEST).write_text("{"),
    "version": rewritten(lambda manifest: manifest | {"format_version": 0}),
    "files": rewritten(lambda manifest: {k: v for k, v in manifest.items() if k != "files"}),
    "altered": rewritten(lambda manifest: manifest | {"step": 11}),
}


# -- damage in the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_when_its_step_is_saved_again(run, whole, kind, caplog):
    DAMAGES[kind](step(12))
    (step(12) / "notes.txt").write_text("mine")
    before = contents(step(12))
    trainer = make("run")
    assert trainer._context.folders.choose("auto") == step(8)
    assert f"{step(12)} is not used" in caplog.text
    fit("run", ckpt_path="auto")
    aside = CHECKPOINTS / "damaged-step-00000012"
    assert names() == [aside.name, *(step(number).name for number in (4, 8, 12))]
    assert contents(aside) == before
    assert str(aside) in caplog.text
    assert same_weights(step(12), whole / "checkpoints/step-00000012")
    fit("run", ckpt_path="auto")  # the next start has nothing to do with it
    assert contents(aside) == before


def test_a_checkpoint_of_a_later_release_is_neither_damaged_nor_passed_over(run):
    rewritten(lambda manifest: manifest | {"format_version": 2})(step(12))
    before = contents(CHECKPOINTS)
    for word in ("auto", "last"):
        with pytest.raises(CheckpointError, match=r"format version 2; .* pass its path"):
            fit("run", ckpt_path=word)
    assert contents(CHECKPOINTS) == before
    fit("run", ckpt_path=step(8))
    assert (CHECKPOINTS / "abandoned-step-00000012" / MANIFEST).is_file()
    verify(step(12))


# -- two at once -----------------------------------------------------------------------------------


def refused(start):
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*, run [0-9a-f]+"):
        start()


def test_a_second_fit_in_the_folder_is_refused_and_leaves_the_first_alone():
    beside = {
        2: lambda: refused(lambda: fit("run", ckpt_path="auto")),
        6: lambda: refused(lambda: fit("elsewhere/../run")),
        7: lambda: fit("run", fast_dev_run=True),  # writes nothing and needs no lock
    }
    fit("run", At(beside), ModelCheckpoint(every=4, save_top_k=-1))
    trainer = fit("whole")
    assert same_weights(step(12), trainer.checkpoint_dir / "step-00000012")
    assert LOCK not in names("run")
    with pytest.raises(ZeroDivisionError):
        fit("run", At({14: lambda: 1 / 0}), ckpt_path="auto", max_epochs=2)
    assert holder_of(Path("run")) is None  # freed by a failure too
    fit("run", ckpt_path="auto", max_epochs=2)


def test_two_projects_may_share_a_checkpoint_folder_one_after_the_other():
    def saver():
        return ModelCheckpoint(every=4, dirpath="shared")

    fit("run", At({2: lambda: refused(lambda: fit("other", saver()))}), saver())
    assert names("shared") == ["step-00000012"]
    assert not Path("other").exists()


def adding(*folders):
    """Return a module whose `setup` adds callbacks that save to these folders."""
    module = Net()
    savers = [ModelCheckpoint(every=4, dirpath=folder) for folder in folders]
    module.setup = lambda stage: module.trainer.callbacks.extend(savers)
    return module


def test_folders_of_callbacks_added_in_setup_are_the_runs_own_too():
    def holders():
        return [holder_of(Path(name)) is not None for name in ("run", "shared", "shared/best")]

    def beside():
        assert holders() == [True] * 3
        for taken in ("shared/best", "run/best"):
            refused(lambda each=taken: fit("other", module=adding(each)))

    shared = ModelCheckpoint(dirpath="shared")
    fit("run", At({2: beside}), shared, module=adding("shared/best"))
    assert holders() == [False] * 3
    assert names("shared/best") == ["step-00000012"]
    assert not Path("other").exists()


def test_a_new_run_clears_what_a_run_without_checkpoints_has_left():
    leftover = CHECKPOINTS / ".cadence-staging-step-00000005"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half of it")
    fit("run", max_steps=4)
    assert names() == [step(4).name]


def test_a_folder_in_use_is_refused_on_all_ranks(ranks2):
    def attempt():
        try:
            fit("run")
        except ValueError as error:
            return str(error)
        return "done"

    with alone_in(Path("run")) as tell:
        tell("abc")
        first, second = ranks2(attempt, timeout=60)
    assert first == second
    assert f"run is in use by process {os.getpid()} on" in first
    assert "run abc" in first
    assert ranks2(attempt, timeout=60) == ["done", "done"]
    assert LOCK not in names("run")


# -- an evaluation beside --------------------------------------------------------------------------


def evaluate(stage, ckpt_path=None, **arguments):
    return getattr(make("run", **arguments), stage)(Net(), loader(1), ckpt_path=ckpt_path)


def test_an_evaluation_beside_a_training_has_a_record_of_its_own(caplog):
    beside = {6: lambda: evaluate("validate"), 7: lambda: evaluate("test", ckpt_path="last")}
    fit("run", At(beside), ModelCheckpoint(every=4, save_top_k=-1, background=False))
    fit("whole")
    assert records() == records("whole/metrics.jsonl")
    validated, tested = records("run/evaluations.jsonl")
    assert validated["score"] == -4.0
    assert (tested["step"], "weight" in tested) == (4, True)


def test_evaluations_before_and_behind_a_training_are_kept_when_it_goes_on():
    evaluate("validate")
    trainer = make("run", ModelCheckpoint(every=4), max_epochs=1)
    trainer.fit(Net(), loader(), loader(1))
    trainer.test(Net(), loader(1))
    assert LOCK not in names("run")
    longer = make("run", ModelCheckpoint(every=4), max_epochs=2)
    longer.fit(Net(), loader(), loader(1), ckpt_path="auto")
    assert [record["step"] for record in records("run/evaluations.jsonl")] == [
        0,
        trainer.global_step,
    ]
    assert not Path("run/metrics.1.jsonl").exists()
    steps = [record["step"] for record in records() if "loss" in record]
    assert steps == list(range(1, longer.global_step + 1))


def test_another_run_in_the_folder_has_evaluations_of_its_own():
    evaluate("validate")  # before it, and of it
    for width in (5, 6):
        trainer = make("run", At({}), checkpointing=False, max_epochs=None, max_steps=width)
        trainer.fit(Net(width), loader())
        trainer.test(Net(width), loader(1))
    steps = [
        [record["step"] for record in records(f"run/evaluations{n}.jsonl")] for n in (".1", "")
    ]
    assert steps == [[0, 5], [6]]


def test_an_evaluation_by_itself_leaves_the_tables_of_the_training_alone():
    tables = []
    for folder in ("whole", "run"):
        for epochs in (1, 2):
            trainer = make(folder, ModelCheckpoint(every=4), max_epochs=epochs, log_with="csv")
            trainer.fit(Net(), loader(), loader(1), ckpt_path="auto")
            if folder == "run":
                evaluate("validate", ckpt_path="last", log_with="csv")
        tables += [path.read_text() for path in Path(folder, "logs", folder).glob("*.csv")]
    assert tables[0] == tables[1]
    assert len(tables) == 2
    assert "score" in Path("run/logs/evaluations/run/metrics.csv").read_text()


def interrupted():
    raise KeyboardInterrupt


def test_a_record_of_unknown_length_is_cut_by_its_steps(monkeypatch):
    def refused(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JsonlTracker, "sync", refused)
        with pytest.raises(KeyboardInterrupt):
            fit("run", At({7: interrupted}), ModelCheckpoint(every=4, background=False))
    assert [record["step"] for record in records()][-1] > 4
    fit("run", ModelCheckpoint(every=4), ckpt_path="auto")
    fit("whole", ModelCheckpoint(every=4))
    assert records() == records("whole/metrics.jsonl")


# -- going back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [True, False])
def test_resuming_an_earlier_checkpoint_sets_the_later_ones_aside(run, whole, relative, caplog):
    before = {number: contents(step(number)) for number in (8, 12)}
    trainer = fit("run", ckpt_path=step(4) if relative else step(4).absolute(), max_steps=6)
    aside = [f"abandoned-step-{number:08d}" for number in (8, 12)]
    assert names() == [*aside, step(4).name, step(6).name]
    assert [contents(CHECKPOINTS / name) for name in aside] == list(before.values())
    assert all(str(CHECKPOINTS / name) in caplog.text for name in aside)
    assert records() == [each for each in records(whole / "metrics.jsonl") if each["step"] <= 6]
    assert records("run/metrics.1.jsonl") == records(whole / "metrics.jsonl")
    (saver,) = (each for each in trainer.callbacks if isinstance(each, ModelCheckpoint))
    assert set(saver.best_k_models) == {step(4), step(6)}
    assert fit("run", ckpt_path="auto", max_steps=7).global_step == 7
    fit("run", ckpt_path="auto")
    assert same_weights(step(12), whole / "checkpoints/step-00000012")
    assert records() == records(whole / "metrics.jsonl")


def test_a_kill_while_later_checkpoints_are_set_aside_loses_no_record(run, whole, monkeypatch):
    real, moved = storage.os.rename, []

    def rename(source, target):  # killed behind the last checkpoint that is set aside
        real(source, target)
        moved.append(target)
        if len(moved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            fit("run", ckpt_path=step(4), max_steps=6)
    assert names() == [*(f"abandoned-step-{number:08d}" for number in (8, 12)), step(4).name]
    fit("run", ckpt_path=step(4), max_steps=6)
    assert records("run/metrics.1.jsonl") == records(whole / "metrics.jsonl")


def test_scores_of_checkpoints_that_were_set_aside_are_forgotten():
    best = ModelCheckpoint(monitor="score", mode="max", every=2, save_top_k=2)
    trainer = make("run", best)
    trainer.fit(Net(), loader(), loader(1))
    assert list(best.best_k_models) == [step(4), step(2)]
    trainer.fit(Net(), loader(), loader(1), ckpt_path=step(2))  # the very same callback
    assert list(best.best_k_models) == [step(4), step(2)]
    assert all((path / MANIFEST).is_file() for path in best.best_k_models)
    joined = ModelCheckpoint(every=4, save_top_k=-1)
    trainer.callbacks[trainer.callbacks.index(best)] = joined
    joined._scores, joined._newest = {step(4).name: 9.0}, [step(4).name]  # of another fit
    trainer.fit(Net(), loader(), loader(1), ckpt_path=step(4))
    assert set(joined.best_k_models) == {step(8), step(12)}


def test_a_checkpoint_that_a_killed_save_had_replaced_does_not_come_back(run):
    step(12).rename(CHECKPOINTS / ".cadence-replaced-step-00000012")
    fit("run", ckpt_path=step(4), max_steps=6)
    assert fit("run", ckpt_path="auto", max_steps=7).global_step == 7
    assert "abandoned-step-00000012" in names()


def test_later_checkpoints_are_set_aside_in_every_folder_of_the_run():
    savers = [ModelCheckpoint(every=4, save_top_k=-1, dirpath=name) for name in ("a", "b")]
    fit("run", savers[0])
    shutil.copytree("a", "b")
    savers[1].every = ModelCheckpoint(every=2).every
    fit("run", *savers, ckpt_path="a/step-00000008", max_steps=9)
    for folder in ("a", "b"):
        assert "abandoned-step-00000012" in names(folder)
        assert "step-00000012" not in names(folder)


def test_a_checkpoint_of_another_folder_changes_nothing_there(run):
    before = contents("run")
    fit("other", ckpt_path=step(4))
    assert names("other/checkpoints") == ["step-00000008", "step-00000012"]
    for _ in range(2):  # the same command once more
        fit("other", ckpt_path=step(4), max_steps=8)
    aside = [name for name in names("other/checkpoints") if name.startswith("abandoned")]
    assert aside == [f"abandoned-step-{name}" for name in ("00000008", "00000008-2", "00000012")]
    assert contents("run") == before


def test_going_on_where_another_run_has_its_checkpoints_is_refused(run):
    fit("other")
    before = contents("run"), contents("other")
    with pytest.raises(ValueError, match=r"other/.*step-00000004 belongs to a different run"):
        fit("other", ckpt_path=step(8))
    assert (contents("run"), contents("other")) == before


def test_a_start_that_fails_before_its_first_update_sets_nothing_aside(run):
    before = contents("run/checkpoints")
    with pytest.raises(CheckpointError, match="does not fit"):
        fit("run", module=Net(width=7), ckpt_path=step(4))
    for stage in ("validate", "test"):
        evaluate(stage, ckpt_path=step(4))
    with pytest.raises(ValueError, match=r"and fast_dev_run; an iterator"):
        fit("run", ckpt_path=step(4), fast_dev_run=True)
    assert contents("run/checkpoints") == before
    assert not Path("run/metrics.1.jsonl").exists()


def test_two_ranks_set_later_checkpoints_aside_together(ranks2):
    def body(ckpt_path=None, **arguments):
        fit("run", ckpt_path=ckpt_path, **arguments)
        return names()

    ranks2(body)
    first, second = ranks2(lambda: body(step(4), max_steps=5), timeout=120)
    assert first == second == ["abandoned-step-00000006", "step-00000004", "step-00000005"]


class FailsOnOne(Net):
    def on_load_checkpoint(self, checkpoint):
        if self.trainer.global_rank == 1:
            raise ArithmeticError("here alone")


@pytest.mark.parametrize("entry", ["fit", "test"])
def test_a_failed_load_on_one_rank_raises_on_all(ranks2, entry):
    def body():
        try:
            if entry == "fit":
                fit("run", module=FailsOnOne(), ckpt_path="auto", max_steps=5)
            else:
                make("run").test(FailsOnOne(), loader(), ckpt_path="last")
        except (ArithmeticError, RuntimeError) as error:
            return str(error)

    fit("run", max_steps=4)
    first, second = ranks2(body, timeout=30)
    assert second == "here alone"
    assert "Rank 1 failed" in first
    assert "here alone" in first


@pytest.mark.parametrize("entry", ["fit", "test"])
def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(ranks2, entry):
    fit("run")

    def body():
        with pytest.MonkeyPatch.context() as patch:
            if not PartialState().is_main_process:  # whose disk is another one
                patch.setattr("trainer.checkpoint.resolve.locate", lambda path: Path("nothing"))
            try:
                if entry == "fit":
                    fit("other", ckpt_path=step(4))
                else:
                    make("other").test(Net(), loader(), ckpt_path=step(4))
            except CheckpointError as error:
                return str(error)

    first, second = ranks2(body, timeout=30)
    assert first == second
    assert f"failed on rank 1: There is no checkpoint at {step(4)}" in first


class StopsInAStep(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def test_a_stop_that_a_step_asked_for_holds_when_the_run_is_started_again(ranks2):
    def body(module):
        return fit("run", module=module, ckpt_path="auto").global_step

    stopped = ranks2(lambda: body(StopsInAStep()))
    assert stopped[0] < 6
    assert ranks2(lambda: body(Net())) == stopped


# -- weights alone ---------------------------------------------------------------------------------


def weights_only():
    return ModelCheckpoint(every=4, save_weights_only=True)


def test_a_run_of_weights_alone_does_not_begin_anew_over_them():
    fit("run", weights_only())
    before = contents("run")
    for word in ("auto", "last"):
        with pytest.raises(CheckpointError, match=r"step-00000012 holds only weights .* project_"):
            fit("run", weights_only(), ckpt_path=word)
    with pytest.raises(CheckpointError, match=r"holds only weights .* pass the path of one"):
        evaluate("validate", ckpt_path="auto")
    assert contents("run") == before
    assert evaluate("test", ckpt_path=step(12))


def test_weights_beside_whole_checkpoints_are_passed_over():
    savers = [weights_only(), ModelCheckpoint(every=4, dirpath="whole")]
    fit("run", *savers)
    assert fit("run", *savers, ckpt_path="auto", max_epochs=2).global_step == 24


def test_a_later_releases_checkpoint_is_not_gone_back_behind_in_another_folder():
    best = {"every": 2, "save_top_k": -1, "dirpath": "best"}
    fit("run", ModelCheckpoint(every=4, save_top_k=-1), ModelCheckpoint(**best))
    for path in CHECKPOINTS.iterdir():
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps(manifest | {"format_version": 99}))
    for later in Path("best").glob("step-000000[01][0268]"):
        if later.name > "step-00000004":
            shutil.rmtree(later)
    with pytest.raises(LaterReleaseError, match=r"format version 99.*pass its path"):
        make("run", ModelCheckpoint(every=4), ModelCheckpoint(**best))._context.folders.choose(
            "auto"
        )


@pytest.mark.parametrize("first", ["run", "other"])
def test_a_run_may_not_save_into_the_folder_of_one_that_runs(first):
    inside = ModelCheckpoint(every=4, dirpath=CHECKPOINTS)

    def start(folder, *callbacks):
        fit(folder, *callbacks, *([inside] if folder == "other" else []))

    second = "other" if first == "run" else "run"
    with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()}"):
        start(first, At({6: lambda: start(second)}))


WITHOUT_GUARD = """
import torch
from torch.utils.data import DataLoader
from trainer import Trainer, TrainModule

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(max_epochs=1, cpu=True, progress_bar=False, project_dir="run")
data = DataLoader(torch.ones(4, 1), num_workers=1, multiprocessing_context="spawn")
trainer.fit(Line(), data)
"""


def test_a_worker_that_imports_a_script_without_a_guard_says_what_is_missing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_GUARD)
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "the script's code under `if __name__ == '__main__':`" in ended.stderr
    assert "is in use by" not in ended.stderr
