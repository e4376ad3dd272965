"""Defects that users or trials have found: each stays repaired."""

from __future__ import annotations

import contextlib
import copy
import io
import signal
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.errors import Preempted


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.seen.append(x[:, 0].tolist())
        loss = self.layer(x).square().mean() * 1e-3
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/score", float(self.trainer.global_step))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2))


def make(**arguments) -> Trainer:
    return Trainer(**{"max_epochs": 1, "cpu": True, "progress_bar": False, **arguments})


def scalars(folder) -> dict[str, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}


def test_a_test_in_a_new_process_leaves_the_curves_of_the_training_alone(tmp_path):
    checkpoint = ModelCheckpoint(monitor="val/score", mode="max")
    arguments = {"project_dir": "run", "log_with": "tensorboard", "log_every": 1}
    make(callbacks=checkpoint, **arguments).fit(
        Line(), DataLoader(data(), batch_size=2), DataLoader(data(2))
    )
    before = scalars("run/logs/run")
    trainer = make(callbacks=ModelCheckpoint(monitor="val/score", mode="max"), **arguments)
    trainer.test(Line(), DataLoader(data(2)), ckpt_path="best")
    assert before == {"train/loss": 4, "val/score": 1}
    assert scalars("run/logs/run")["train/loss"] == 4
    assert read_metrics(trainer.metrics_path)[-1]["step"] == 4  # that of the weights


def keep_even(samples):
    return (torch.stack([x for (x,) in samples if x[0] % 4 == 0]),)


def test_samples_that_a_collate_fn_leaves_out_do_not_count():
    """The gradient is that of the samples that are there, not of the indices."""
    module = Line()
    batches = [[0, 1, 2, 3], [4, 6, 8, 9]]  # two and three samples stay
    loader = DataLoader(data(10), batch_sampler=batches, collate_fn=keep_even)
    gradients = []
    module.on_before_optimizer_step = lambda optimizer: gradients.append(
        module.layer.weight.grad.clone()
    )
    module.double()
    module.training_step = lambda batch, i: module.layer(batch[0].double()).square().mean()
    twin = copy.deepcopy(module.layer)
    make(gradient_accumulation_steps=2, checkpointing=False).fit(module, loader)
    kept = torch.stack([data(10)[i][0] for b in batches for i in b if data(10)[i][0][0] % 4 == 0])
    twin(kept.double()).square().mean().backward()
    torch.testing.assert_close(gradients, [twin.weight.grad], rtol=1e-12, atol=0)


def test_a_stopped_run_is_resumed_by_path():
    class Budget(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = self.trainer.global_step == 2

    arguments = {"project_dir": "run", "callbacks": ModelCheckpoint(every=1)}
    first = make(**arguments)
    first.fit(Budget(), DataLoader(data(), batch_size=2))
    assert first.global_step == 2
    again = make(project_dir="run", callbacks=ModelCheckpoint(every=1))
    again.fit(Line(), DataLoader(data(), batch_size=2), ckpt_path="auto")
    assert again.global_step == 2
    on = make(project_dir="run", callbacks=ModelCheckpoint(every=1))
    on.fit(Line(), DataLoader(data(), batch_size=2), ckpt_path="run/checkpoints/step-00000002")
    assert on.global_step == 4


def test_a_resumed_run_prints_its_checkpoint(capsys):
    arguments = {"project_dir": "run"}
    make(**arguments).fit(Line(), DataLoader(data(), batch_size=2))
    make(max_epochs=2, **arguments).fit(Line(), DataLoader(data(), batch_size=2), ckpt_path="auto")
    assert f"Resuming from {Path.cwd()}/run/checkpoints/step-00000004 (epoch 1, update 4)." in (
        capsys.readouterr().out
    )
    make(max_epochs=2, **arguments).fit(Line(), DataLoader(data(), batch_size=2), ckpt_path="auto")
    assert "Nothing is left to do: the Trainer's max_epochs" in capsys.readouterr().out


class Interrupted(Line):
    def validation_step(self, batch, batch_idx):
        signal.raise_signal(signal.SIGTERM)


def test_a_run_that_resumes_for_its_last_validation_has_something_left_to_do(capsys):
    arguments = {"project_dir": "run", "num_sanity_val_steps": 0}
    loaders = DataLoader(data(), batch_size=2), DataLoader(data(), batch_size=2)
    with pytest.raises(Preempted):
        make(**arguments).fit(Interrupted(), *loaders)
    trainer = make(**arguments)
    trainer.fit(Line(), *loaders, ckpt_path="auto")
    assert (trainer.global_step, trainer.validations) == (4, 1)
    said = capsys.readouterr().out
    assert "(epoch 1, update 4)." in said
    assert "Nothing is left to do" not in said


class LineOfAnotherRate(Line):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def test_a_resumed_run_names_its_checkpoint_before_what_differs_from_it(caplog, monkeypatch):
    make(project_dir="run").fit(Line(), DataLoader(data(), batch_size=2))
    said = io.StringIO()
    monkeypatch.setattr(caplog.handler, "stream", said)
    with contextlib.redirect_stdout(said):
        make(max_epochs=2, project_dir="run").fit(
            LineOfAnotherRate(), DataLoader(data(), batch_size=2), ckpt_path="auto"
        )
    text = said.getvalue()
    assert 0 <= text.index("Resuming from ") < text.index("lr of SGD stays 0.1, not 0.2")


def test_a_sampler_with_its_own_generator_is_resumed():
    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        sampler = WeightedRandomSampler([1.0] * 8, 8, generator=generator)
        return DataLoader(data(), batch_size=2, sampler=sampler)

    whole, first, rest = Line(), Line(), Line()
    make(max_epochs=2, project_dir="whole", seed=1).fit(whole, loader())
    make(max_epochs=1, project_dir="parts", seed=1).fit(first, loader())
    make(max_epochs=2, project_dir="parts", seed=1).fit(rest, loader(), ckpt_path="auto")
    assert first.seen + rest.seen == whole.seen
    assert first.seen != rest.seen


def test_gradients_of_an_interrupted_fit_do_not_hang_on_the_next_scale():
    class Interrupted(Line):
        def on_before_optimizer_step(self, optimizer):
            raise KeyboardInterrupt

    trainer = make(mixed_precision="fp16", checkpointing=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Interrupted(), DataLoader(data(), batch_size=2))
    assert trainer.accelerator.precision._unscaled
    trainer.fit(Line(), DataLoader(data(), batch_size=2))
    assert trainer.global_step == 4


def test_best_is_chosen_by_values_of_the_very_weights():
    checkpoint = ModelCheckpoint(every=3, save_top_k=-1, monitor="val/score", mode="max")
    trainer = make(max_steps=9, max_epochs=None, val_every=2, callbacks=checkpoint)
    trainer.fit(Line(), DataLoader(data(), batch_size=2), DataLoader(data(2)))
    from trainer.checkpoint.storage import committed, read_manifest

    values = {
        path.name: read_manifest(path)["metrics"].get("val/score")
        for path in committed(trainer.checkpoint_dir)
    }
    assert values == {"step-00000003": None, "step-00000006": 6.0, "step-00000009": None}


def test_a_metric_of_the_step_may_be_monitored_before_it_is_due():
    stopping = EarlyStopping("train/loss", patience=99)
    trainer = make(max_epochs=3, log_every=10, callbacks=stopping)
    trainer.fit(Line(), DataLoader(data(), batch_size=2))
    assert stopping.best_score is not None  # from update 10
    assert trainer.global_step == 12


def test_predict_asks_for_no_items():
    class Unlabelled(Line):
        def count_items(self, batch):
            raise KeyError("labels")

        def predict_step(self, batch, batch_idx):
            return self.layer(batch[0])

    assert len(make().predict(Unlabelled(), DataLoader(data(), batch_size=2))) == 4


def test_a_schedule_does_not_repeat_warnings():
    class Warning_(Line):
        def training_step(self, batch, batch_idx):
            warnings.warn("once", UserWarning, stacklevel=1)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        make(max_epochs=4).fit(Warning_(), DataLoader(data(), batch_size=2))
    assert len([each for each in caught if str(each.message) == "once"]) <= 2


def test_save_checkpoint_after_the_fit():
    trainer = make(max_epochs=1, checkpointing=False)
    module = Line()
    trainer.fit(module, DataLoader(data(), batch_size=2))
    assert trainer.module is module
    assert len(trainer.optimizers) == 1
    assert (trainer.save_checkpoint("final") / "model.safetensors").exists()


def test_the_trainer_has_the_module_from_the_beginning():
    seen = []

    class Asks(Line):
        def setup(self, stage):
            seen.append(self.trainer.module is self)

        def configure_optimizers(self):
            return torch.optim.SGD(self.trainer.module.parameters(), lr=0.1)

    trainer, first, second = make(max_epochs=1, checkpointing=False), Asks(), Asks()
    trainer.fit(first, DataLoader(data(), batch_size=2))
    trainer.fit(second, DataLoader(data(), batch_size=2), ckpt_path=None)
    assert seen == [True, True]
    assert trainer.module is second


def test_a_trial_validates_whatever_the_interval():
    module = Line()
    calls = []
    module.on_validation_end = lambda: calls.append(1)
    make(fast_dev_run=True, val_every="500 steps").fit(
        module, DataLoader(data(), batch_size=2), DataLoader(data(2))
    )
    assert calls == [1]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "run/checkpoints/step-00000004/model.safetensors",
            "is the file .*; give its folder, .*run/ch",
        ),
        ("run/checkpoints", "a folder of checkpoints; .* such as .*step-00000004"),
        ("run", "the folder of a run; .* such as .*step-00000004.*auto"),
        ("", "ckpt_path is ''; it is None, the folder of a checkpoint"),
        ("nowhere", r"^(?!.*rank )There is no checkpoint at "),
    ],
)
def test_a_path_beside_the_checkpoint_is_refused_with_the_right_one(path, text):
    make(project_dir="run").fit(Line(), DataLoader(data(), batch_size=2))
    trainer = make(max_epochs=2, project_dir="run")
    with pytest.raises((RuntimeError, ValueError), match=text):
        trainer.fit(Line(), DataLoader(data(), batch_size=2), ckpt_path=path)


@pytest.mark.parametrize("path", ["taken", "taken/run"])
def test_a_project_dir_that_is_a_file_is_refused_before_training(path, tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    module, refusal = Line(), rf"project_dir is '.*/{path}', which cannot be used as a folder: "
    with pytest.raises(ValueError, match=refusal) as caught:
        make(project_dir=path).fit(module, DataLoader(data(), batch_size=2))
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert module.seen == []
    assert "cannot be locked" not in caplog.text  # the error says what is wrong


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_no_optimizer_uses_do_not_shrink_the_update(accumulation):
    """They were zeroed by nobody and grew, and the norm of all grew with them."""

    class HeadOnly(Line):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.layer = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(self.body(batch[0])).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    class Unfreeze(Callback):
        """The body joins at the fifth update."""

        def on_boundary(self, trainer, module):
            if trainer.global_step == 4:
                module.optimizers().add_param_group({"params": list(module.body.parameters())})

    module, plain = HeadOnly(), HeadOnly()
    trainer = make(
        max_grad_norm=0.5,
        callbacks=[Unfreeze()],
        checkpointing=False,
        max_epochs=2,
        gradient_accumulation_steps=accumulation,
    )
    trainer.fit(module, DataLoader(data(12), batch_size=2 // accumulation))
    trained = list(plain.layer.parameters())
    for number in range(12):
        if number == 4:
            trained += plain.body.parameters()
        (x,) = data(12)[number % 6 * 2 : number % 6 * 2 + 2]
        plain.layer(plain.body(x)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        with torch.no_grad():
            for parameter in trained:
                parameter -= 0.1 * parameter.grad
        plain.zero_grad()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_run_inside_a_run_is_refused():
    class Nested(Callback):
        def on_train_epoch_end(self, trainer, module):
            with pytest.raises(RuntimeError, match="validate was called inside another run"):
                trainer.validate(module, DataLoader(data(), batch_size=2))
            with pytest.raises(RuntimeError, match="fit was called inside another run"):
                trainer.fit(module, DataLoader(data(), batch_size=2))

    trainer = make(callbacks=[Nested()], max_epochs=2)
    trainer.fit(Line(), DataLoader(data(), batch_size=2))  # goes on
    assert trainer.global_step == 8
    assert trainer.validate(Line(), DataLoader(data(), batch_size=2))


def test_values_logged_before_a_window_are_weighted_alike_and_logged_once_after_a_resume(tmp_path):
    """It had the weight of the batch before, and a resumed start logged it a second time."""

    class Early(Line):
        def on_train_start(self):
            self.log("starts", 1.0, reduce="sum", on_epoch=True)

        def on_train_epoch_start(self):
            self.log("epochs", 1.0, reduce="sum")

        def on_train_step_start(self):
            self.log("update", float(self.global_step), on_step=False, on_epoch=True)

    def run(folder, ckpt_path=None, **arguments):
        trainer = make(
            project_dir=tmp_path / folder,
            max_epochs=2,
            log_every=1,
            callbacks=[ModelCheckpoint(every=1)],
            **arguments,
        )
        trainer.fit(
            Early(),
            DataLoader(data(7), batch_size=2),
            DataLoader(data(), batch_size=4),
            ckpt_path=ckpt_path,
        )
        lines = read_metrics(trainer.metrics_path)
        return [{k: v for k, v in line.items() if k != "time"} for line in lines]

    whole = run("whole")
    ends = [line for line in whole if "update" in line]
    assert [line["update"] for line in ends] == [1.5, 5.5]  # of updates 0 to 3, and 4 to 7
    assert [line["epochs"] for line in ends] == [1.0, 1.0]
    assert [line.get("starts") for line in ends] == [1.0, None]
    for stop in (2, 4, 6):
        run(f"at-{stop}", max_steps=stop)
        resumed = run(f"at-{stop}", ckpt_path="auto")
        assert [set(line) for line in resumed] == [set(line) for line in whole]
        names = ("update", "epochs", "starts")
        assert [[line.get(n) for n in names] for line in resumed] == [
            [line.get(n) for n in names] for line in whole
        ]
