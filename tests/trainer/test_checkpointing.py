"""Callbacks that save, stop, measure and show, with the real Trainer; and going on from a save."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    PredictionWriter,
    Profiler,
    ProgressBar,
)
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.storage import step_of, verify
from trainer.errors import CheckpointError, Preempted


class Net(TrainModule):
    """Its validation metric takes given values, one a validation."""

    def __init__(self, scores=()):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 1)
        self.scores = list(scores)

    def training_step(self, batch, batch_idx):
        loss = self.head(torch.dropout(self.net(batch[0]), 0.2, True)).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", float(self.scores[self.trainer.validations]))

    def test_step(self, batch, batch_idx):
        self.log("weight", self.head.weight.sum())

    def predict_step(self, batch, batch_idx):
        return self.head.weight.sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


def loader(batches=2, **options):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * batches, 2, generator=generator))
    return DataLoader(data, batch_size=4, **options)


def make(*callbacks, **arguments):
    arguments = {"num_sanity_val_steps": 0, "progress_bar": False, "project_dir": "run"} | arguments
    return Trainer(callbacks=list(callbacks), **arguments)


def fit(module, *callbacks, ckpt_path=None, val=True, **arguments):
    trainer = make(*callbacks, **arguments)
    trainer.fit(module, loader(shuffle=True), loader(1) if val else None, ckpt_path=ckpt_path)
    return trainer


def on_disk(folder="run/checkpoints"):
    return [step_of(path) for path in sorted(Path(folder).iterdir())]


def manifest(step):
    return json.loads(Path(f"run/checkpoints/step-{step:08d}/manifest.json").read_text())


# -- ModelCheckpoint -------------------------------------------------------------------------------


def test_the_best_and_the_last_stay():
    best = ModelCheckpoint(monitor="score", mode="max", save_top_k=2)
    fit(Net([1.0, 5.0, 3.0, 4.0, 2.0]), best, max_epochs=5)
    assert on_disk() == [4, 8, 10]  # scores 5 and 4, and the last
    assert best.best_model_path == Path("run/checkpoints/step-00000004").absolute()
    assert best.best_model_score == 5.0
    assert best.last_model_path == Path("run/checkpoints/step-00000010").absolute()
    assert manifest(4)["metrics"]["score"] == 5.0
    assert manifest(4)["epoch"] == 1


@pytest.mark.parametrize(
    ("callbacks", "steps"),
    [((), [8]), ([ModelCheckpoint(every=3, save_top_k=-1)], [3, 6, 8])],  # the end is always saved
)
def test_which_checkpoints_stay(callbacks, steps):
    fit(Net([0.0] * 4), *callbacks, max_epochs=4)
    assert on_disk() == steps


def test_checkpointing_can_be_switched_off():
    fit(Net([0.0]), max_epochs=1, checkpointing=False)
    assert not Path("run/checkpoints").exists()


def test_scores_that_are_not_finite_are_never_the_best():
    scores = [float("nan"), float("inf"), 3.0, float("-inf")]
    best = ModelCheckpoint(monitor="score", save_top_k=-1)
    trainer = fit(Net(scores), best, max_epochs=4)
    assert on_disk() == [2, 4, 6, 8]
    assert (
        trainer._context.folders.choose("best") == Path("run/checkpoints/step-00000006").absolute()
    )


def test_the_manifest_of_a_checkpoint():
    fit(Net([0.5]), max_epochs=1, seed=3)
    messages = manifest(2)
    assert (messages["step"], messages["epoch"], messages["world_size"]) == (2, 0, 1)
    assert messages["configuration"]["max_epochs"] == 1
    assert messages["configuration"]["seed"] == 3
    assert messages["metrics"].keys() == {"score", "loss_step", "loss_epoch"}
    folder = Path("run/checkpoints/step-00000002")
    assert {Path(name).suffix for name in messages["files"]} == {".safetensors", ".json"}
    for name, entry in messages["files"].items():
        assert entry["size"] == (folder / name).stat().st_size


# -- weights on disk -------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """The same model without Cadence."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 1)


def assert_equal(one, other):
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)


def test_weights_of_two_ranks_load_into_a_plain_module(ranks2):
    def run():
        torch.manual_seed(0)
        module = Net([0.0, 0.0])
        fit(module, max_epochs=2)
        return module.state_dict()

    first, second = ranks2(run)
    assert on_disk() == [2]  # 2 batches are one round of 2 ranks
    weights = safetensors.torch.load_file("run/checkpoints/step-00000002/model.safetensors")
    model = Plain()
    model.load_state_dict(weights)
    assert_equal(model.state_dict(), first)
    trained = [name for name, _ in model.named_parameters()]
    assert_equal({n: first[n] for n in trained}, {n: second[n] for n in trained})
    assert manifest(2)["world_size"] == 2
    assert len(list(Path("run/checkpoints/step-00000002").glob("rank-*.json"))) == 2


# -- going on --------------------------------------------------------------------------------------


def losses():
    return [
        (line["step"], name, line[name])
        for line in read_metrics("run/metrics.jsonl")
        for name in ("loss_step", "loss_epoch", "score", "lr-AdamW")
        if name in line
    ]


def test_a_run_resumed_after_an_epoch_equals_one_that_was_not_interrupted(tmp_path, monkeypatch):
    results = []
    for folder, starts in (("whole", [4]), ("parts", [1, 3, 4])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for epochs in starts:
            torch.manual_seed(0)
            module = Net([3.0, 1.0, 2.0, 0.5])
            best = ModelCheckpoint(monitor="score", save_top_k=2)
            others = LearningRateMonitor(), EarlyStopping("score", patience=9)
            options = {"max_epochs": epochs, "ckpt_path": "auto", "seed": 5, "log_every": 1}
            trainer = fit(module, best, *others, **options)
        results.append(
            (
                losses(),
                on_disk(),
                {path.name: score for path, score in best.best_k_models.items()},
                (trainer.global_step, trainer.current_epoch, trainer.samples_seen),
                {name: value.tolist() for name, value in module.state_dict().items()},
            )
        )
    whole, parts = results
    assert len(whole[0]) == 8 * 2 + 4 * 2
    assert parts == whole


def test_ckpt_path_auto_starts_or_resumes():
    starts = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            starts.append(trainer.global_step)

    for epochs in (1, 3, 3):  # at last nothing is left
        trainer = fit(Net([0.0] * 9), Watch(), max_epochs=epochs, ckpt_path="auto")
        assert trainer.global_step == 2 * epochs
    assert starts == [0, 2, 6]


@pytest.mark.parametrize(
    ("ckpt_path", "step"),
    [
        ("last", 6),
        ("best", 4),
        ("run/checkpoints/step-00000004", 4),
        (Path("run/checkpoints/step-00000006"), 6),
    ],
)
def test_each_way_to_name_a_checkpoint(ckpt_path, step):
    def saver():
        return ModelCheckpoint(monitor="score")

    fit(Net([3.0, 1.0, 2.0]), saver(), max_epochs=3)
    weights = safetensors.torch.load_file(f"run/checkpoints/step-{step:08d}/model.safetensors")
    total = weights["head.weight"].sum()
    fresh = Net()
    assert make(saver()).test(fresh, loader(1), ckpt_path=ckpt_path) == [{"weight": total.item()}]
    assert_equal(fresh.state_dict(), weights)
    assert make(saver()).predict(Net(), loader(1), ckpt_path=ckpt_path) == [total]

    steps = []

    class Watch(Callback):
        def on_fit_start(self, trainer, module):
            assert_equal(module.state_dict(), weights)
            steps.append(trainer.global_step)

    fit(Net([3.0, 1.0, 2.0, 0.0]), saver(), Watch(), max_epochs=4, ckpt_path=ckpt_path)
    assert steps == [step]


def test_best_follows_the_mode():
    fit(Net([3.0, 1.0, 2.0]), ModelCheckpoint(monitor="score", save_top_k=-1), max_epochs=3)
    found = []
    for mode in ("min", "max"):

        class Watch(Callback):
            def on_fit_start(self, trainer, module):
                found.append(trainer.global_step)

        best = ModelCheckpoint(monitor="score", mode=mode, dirpath="elsewhere")
        fit(Net([0.0] * 9), best, Watch(), max_epochs=1, ckpt_path="best")
    assert found == [4, 2]


class Unmeasured(Dataset):
    """Has no length, as torch allows it: its sampler says what an epoch is."""

    def __getitem__(self, index):
        return (torch.tensor([index, -index]) / 8,)


def test_data_without_a_length_are_resumed():
    def weights(folder, *lengths):
        for steps in lengths:
            torch.manual_seed(0)
            module = Net()
            data = DataLoader(Unmeasured(), batch_size=2, sampler=[3, 1, 4, 1, 5, 9])
            trainer = make(max_steps=steps, seed=5, project_dir=folder)
            trainer.fit(module, data, ckpt_path="auto")
        return module.state_dict()

    assert_equal(weights("whole", 5), weights("parts", 2, 5))


def test_a_manual_checkpoint_is_resumed_in_another_folder(caplog):
    class Save(Callback):
        def on_boundary(self, trainer, module):
            if trainer.global_step == 2:
                path = trainer.save_checkpoint("mine/second")
                assert path == Path("mine/second").absolute()

    whole = Net([0.0] * 2)
    fit(whole, Save(), max_epochs=2, seed=1)
    resumed = Net([0.0] * 2)
    trainer = fit(resumed, max_epochs=2, seed=1, ckpt_path="mine/second", project_dir="other")
    assert trainer.global_step == 4
    assert_equal(resumed.state_dict(), whole.state_dict())
    assert {line["step"] for line in read_metrics("other/metrics.jsonl")} == {4}
    saved = Path("mine/second").absolute()
    assert "other/metrics.jsonl is a new file without the earlier records, " in caplog.text
    assert f"which are in the folder of the run that saved {saved}." in caplog.text


def test_only_callbacks_behind_the_one_that_saved_are_called_again():
    def save(trainer, module):
        if trainer.global_step == 2:
            trainer.save_checkpoint("second")

    def note(name):
        return LambdaCallback(
            on_boundary=lambda trainer, _: calls.append((name, trainer.global_step))
        )

    calls = []
    callbacks = [note("a"), LambdaCallback(on_boundary=save), note("b")]
    fit(Net([0.0] * 2), *callbacks, max_epochs=2)
    calls.clear()
    fit(Net([0.0] * 2), *callbacks, max_epochs=2, ckpt_path="second", project_dir="other")
    assert calls[:3] == [("b", 2), ("a", 3), ("b", 3)]


class Counts(Callback):
    updates, extra = 0, None

    def on_boundary(self, trainer, module):
        self.updates += 1

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["callback"] = torch.tensor([1.0, 2.0])

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.extra = checkpoint["callback"]


class Noted(Net):
    note = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["module"] = {"words": ["a", "b"], "epoch": self.current_epoch}

    def on_load_checkpoint(self, checkpoint):
        self.note = checkpoint["module"]


def test_callbacks_and_the_module_get_back_what_they_saved():
    first = Counts()
    fit(Noted([0.0]), first, max_epochs=1)
    assert first.extra is None
    second, module = Counts(), Noted([0.0] * 2)
    fit(module, second, max_epochs=2, ckpt_path="last")
    assert second.updates == 4
    assert second.extra.tolist() == [1.0, 2.0]
    assert module.note == {"words": ["a", "b"], "epoch": 0}
    for method in ("validate", "test", "predict"):  # an evaluation of a checkpoint has it too
        module = Noted([0.0])
        getattr(make(), method)(module, loader(), ckpt_path="last")
        assert module.note == {"words": ["a", "b"], "epoch": 1}
    saves = ModelCheckpoint(save_weights_only=True, dirpath="bare")
    fit(Noted([0.0]), saves, max_epochs=1, project_dir="other")
    (bare,) = Path("bare").iterdir()
    make().validate(module := Noted([0.0]), loader(), ckpt_path=bare)
    assert module.note is None


# -- EarlyStopping ---------------------------------------------------------------------------------


def test_early_stopping_ends_the_run_and_the_checkpoint_knows():
    stopping = EarlyStopping("score", patience=2)
    trainer = fit(Net([3.0, 2.0, 4.0, 5.0, 1.0]), stopping, max_epochs=9)
    assert trainer.global_step == 8
    assert (stopping.stopped_step, stopping.best_score) == (8, 2.0)
    assert on_disk() == [8]
    state = load_tree(Path("run/checkpoints/step-00000008"), "trainer")
    assert state["callbacks"][stopping.state_key]["wait_count"] == 2
    assert state["should_stop"] is True


def test_a_stopped_run_stays_stopped_after_a_resume():
    """Killed right after its last save, it must end as the run that was not killed."""
    scores = [3.0, 4.0, 5.0, 6.0, 1.0]
    fit(Net(scores), EarlyStopping("score", patience=2), max_epochs=9)
    stopping = EarlyStopping("score", patience=2)
    trainer = fit(Net(scores), stopping, max_epochs=9, ckpt_path="auto")
    assert trainer.global_step == 6


def test_early_stopping_on_two_ranks_stops_both(ranks2):
    def run():
        stopping = EarlyStopping("score", patience=1)
        trainer = fit(Net([1.0, 2.0, 3.0]), stopping, max_epochs=3)
        return trainer.global_step, stopping.reason

    one, other = ranks2(run)
    assert one == other
    assert one[0] == 2


# -- ProgressBar -----------------------------------------------------------------------------------


def test_off_a_terminal_the_bar_is_a_line_an_epoch(capsys):
    fit(Net([0.0]), ProgressBar(), max_epochs=1)
    trainer = Trainer(max_epochs=1, project_dir="other")
    trainer.fit(Net([0.0]), loader(), loader(1))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.startswith("epoch")]
    assert [line.partition(":")[0] for line in lines] == ["epoch 1/1"] * 2
    assert any(isinstance(callback, ProgressBar) for callback in trainer.callbacks)


def test_on_a_terminal_the_bars_show_epochs_metrics_and_evaluations(capsys, monkeypatch):
    class Shown(Net):
        def training_step(self, batch, batch_idx):
            self.log("quick", 0.25, prog_bar=True)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    trainer = Trainer(max_epochs=2, project_dir="run")
    module = Shown([0.0] * 9)
    trainer.fit(module, loader(), loader(1))
    trainer.test(module, loader(1))
    text = capsys.readouterr().err
    assert "sanity check" in text
    for name in ("epoch 1/2: 100%", "epoch 2/2: 100%", "validate", "test: 100%"):
        assert name in text
    assert "quick=0.25" in text
    assert "2/2 [" in text


def test_an_update_that_a_signal_saved_stays_where_all_do():
    class Signal(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

    arguments = {"val": False, "max_epochs": 2, "ckpt_path": "auto"}
    with pytest.raises(Preempted):
        fit(Net(), Signal(), ModelCheckpoint(every=2, save_top_k=-1), **arguments)
    fit(Net(), ModelCheckpoint(every=2, save_top_k=-1), **arguments)
    assert on_disk() == [2, 4]


class Worse(Net):
    """Its metric is best in the first epoch."""

    def on_train_epoch_end(self):
        self.log("worse", float(self.trainer.current_epoch))


class SignalInTheThirdEpoch(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.global_step == 2 * trainer.current_epoch == 4 and not on_disk()[1:]:
            signal.raise_signal(signal.SIGTERM)


def fit_worse(*others, **arguments):
    saver = ModelCheckpoint(monitor="worse", save_last=False, on_save_error="warn")
    arguments = {"val": False, "max_epochs": 4, "ckpt_path": "auto"} | arguments
    return fit(Worse(), SignalInTheThirdEpoch(), saver, *others, **arguments)


def test_an_update_that_a_signal_saved_goes_when_the_run_ends_without_a_better_one():
    with pytest.raises(Preempted):
        fit_worse()
    assert on_disk() == [2, 5]
    fit_worse(fast_dev_run=1, ckpt_path="run/checkpoints/step-00000005")
    assert on_disk() == [2, 5]  # a dry run removes nothing
    fit_worse()
    assert on_disk() == [2]


def test_callbacks_that_fail_as_a_signal_ends_the_run_do_not_cost_the_save(caplog):
    class Failing(Callback):
        def __init__(self, text):
            self.text = text

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if self.text == "first" and trainer.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

        def on_preemption(self, trainer, module):
            raise OSError(self.text)

    callbacks = Failing("first"), Failing("second"), ModelCheckpoint(every=20)
    with pytest.raises(OSError, match="first"):
        fit(Net(), *callbacks, val=False, max_epochs=2)
    assert on_disk() == [2]
    assert "on_preemption of a further callback failed" in caplog.text


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "on_train_start"])
def test_a_hook_may_leave_the_working_directory_for_good(hook, tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    class Leaving(Net):
        def predict_step(self, batch, batch_idx):
            return batch[0]

    setattr(Leaving, hook, lambda self, *stage: os.chdir(elsewhere))
    for epochs in (2, 3):
        os.chdir(tmp_path)
        savers = ModelCheckpoint(), ModelCheckpoint(monitor="score", dirpath="best")
        writer = PredictionWriter("outputs")
        trainer = make(*savers, writer, Profiler(dirpath="traces"), max_epochs=epochs)
        module = Leaving([3.0, 1.0, 2.0])
        trainer.fit(module, loader(), loader(1), ckpt_path="auto")
        trainer.predict(module, loader(1), ckpt_path="best", return_predictions=False)
        written = safetensors.torch.load_file(tmp_path / "outputs/predictions.safetensors")
        assert len(written["predictions"]) == 4
        assert not any(elsewhere.iterdir())
        assert trainer.project_dir == tmp_path / "run"
        assert savers[1].best_model_path == tmp_path / "best/step-00000004"
        shutil.rmtree(tmp_path / "outputs")
    assert trainer.global_step == 6
    starts = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert [(each["step"], each["status"]) for each in starts] == [(0, "finished"), (4, "finished")]


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "configure_model"])
@pytest.mark.parametrize("home", [False, True], ids=["relative", "home"])
def test_paths_are_relative_to_the_folder_of_the_call_wherever_hooks_go(
    hook, home, tmp_path, tmp_path_factory, monkeypatch
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))

    class Leaving(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.trainer.save_checkpoint("asked")  # made once the update is finished
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            os.chdir(elsewhere)

    trainer = fit(Net([0.0]), max_epochs=1)
    path = trainer.save_checkpoint("~/mine" if home else "mine")
    assert path == tmp_path / "mine"
    assert trainer.wait_for_save("~/mine" if home else "mine")
    given = "~/mine" if home else "mine"
    resumed = fit(Leaving([0.0] * 2), max_epochs=2, ckpt_path=given, project_dir="other")
    assert resumed.global_step == 4
    assert verify(tmp_path / "asked")["step"] == 3
    os.chdir(tmp_path)
    setattr(Leaving, hook, lambda self, *stage: os.chdir(elsewhere))
    assert make().validate(Leaving([2.0]), loader(1), ckpt_path=given)
    assert os.getcwd() == str(elsewhere)


def test_a_start_without_a_checkpoint_prints_where_it_looked(tmp_path, capsys):
    savers = ModelCheckpoint(), ModelCheckpoint(every=2, dirpath="best")
    fit(Net([0.0]), *savers, max_epochs=1)
    assert capsys.readouterr().out == ""
    fit(Net([0.0]), *savers, max_epochs=1, ckpt_path="auto", project_dir="other")
    assert "Resuming from" in capsys.readouterr().out  # from the best
    savers = ModelCheckpoint(), ModelCheckpoint(every=2, dirpath="others")
    fit(Net([0.0]), *savers, max_epochs=1, ckpt_path="auto", project_dir="third")
    where = f"{tmp_path}/third/checkpoints, {tmp_path}/others"
    assert capsys.readouterr().out == f"No checkpoint in {where}: starting a new run.\n"


def test_fast_dev_run_does_not_warn_of_unranked_checkpoints(caplog):
    fit(Net([1.0]), ModelCheckpoint(monitor="score", mode="max"), fast_dev_run=True)
    assert "No checkpoint was ranked" not in caplog.text


class Extra(torch.nn.Module):
    value: object = None

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def with_part(part):
    module = Net()
    module.part = part
    return module


def test_plain_extra_state_is_in_a_checkpoint():
    module = with_part(Extra())
    module.part.value = {"calls": 3, "scale": torch.ones(2)}
    fit(module, val=False, max_epochs=1)
    resumed = with_part(Extra())
    fit(resumed, val=False, max_epochs=2, ckpt_path="auto")
    assert resumed.part.value["calls"] == 3
    assert resumed.part.value["scale"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["complex128", "coo", "csr", "extra state"])
def test_what_no_checkpoint_can_hold_is_refused_before_the_first_update(kind):
    buffer = {
        "complex128": torch.zeros(2, dtype=torch.complex128),
        "coo": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
    }.get(kind)
    part = Extra() if buffer is None else torch.nn.Module()
    part.value = object()
    if buffer is not None:
        part.register_buffer("odd", buffer)
    module = with_part(part)
    module.training_step = lambda *_: pytest.fail("an update was begun")
    with pytest.raises(CheckpointError, match=r"part\.(odd|_extra_state)") as caught:
        fit(module, max_epochs=1)
    assert buffer is None or "persistent=False" in str(caught.value)
