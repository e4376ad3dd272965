"""Lightning's callbacks and loggers: searches, pruning, versions, and when nothing is saved."""

from __future__ import annotations

import importlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import callbacks
import trainer.lightning as L
from tests.helpers.services import mlflow_runs, mlflow_store
from tests.moving.running import real
from tests.numerics.running import copy_of
from trainer.lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from trainer.lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from trainer.lightning.pytorch.profilers import PyTorchProfiler
from trainer.lightning.pytorch.tuner import Tuner as LightningTuner
from trainer.tuning import Tuner

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def make_net(library: Any = L) -> type:
    class Net(library.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 1e-4, batch_size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.lr, self.sizes = lr, []
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sizes.append(len(batch[0]))
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(X, Y), self.hparams.batch_size)

        val_dataloader = train_dataloader

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    return Net


def fit(
    callbacks: Any, make: Any = None, library: Any = L, ckpt_path: Any = None, **options: Any
) -> Any:
    library.seed_everything(3)
    module = (make or make_net(library))()
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(**{**defaults, **quiet, "callbacks": callbacks, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def test_a_learning_rate_is_found_before_the_optimizers_are_made(tmp_path):
    finder = LearningRateFinder(num_training_steps=40, min_lr=1e-4, max_lr=10)
    trainer = fit([finder])
    L.seed_everything(3)
    module = make_net()()
    alone = L.Trainer(accelerator="cpu", max_epochs=2, logger=False)
    expected = Tuner(alone).lr_find(module, num_training=40, min_lr=1e-4, max_lr=10)
    rate = finder.optimal_lr.suggestion()
    assert rate == expected.suggestion() == trainer.model.lr
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate
    torch.testing.assert_close(
        copy_of(trainer.model), copy_of(fit([], lambda: make_net()(lr=rate)).model), rtol=0, atol=0
    )


def test_a_learning_rate_is_found_again_where_a_subclass_asks_for_it(tmp_path):
    class Later(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.before = copy_of(pl_module)
                self.lr_find(trainer, pl_module)
                torch.testing.assert_close(copy_of(pl_module), self.before, rtol=0, atol=0)

    finder = Later(num_training_steps=40, min_lr=1e-4, max_lr=10)
    trainer = fit([finder])
    rate = finder.optimal_lr.suggestion()
    assert rate is not None
    assert trainer.optimizers[0].param_groups[0]["lr"] == trainer.model.lr == rate


def test_the_largest_batch_is_found_before_the_loaders_are_made(tmp_path):
    finder = BatchSizeFinder(max_val=32)
    trainer = fit([finder])
    assert finder.optimal_batch_size == trainer.model.hparams.batch_size == 32
    assert trainer.model.sizes == [32] * 4
    finder = BatchSizeFinder(max_val=16)
    quiet = {"enable_progress_bar": False, "callbacks": [finder]}
    module = make_net()()
    L.Trainer(accelerator="cpu", logger=False, **quiet).validate(module)
    assert finder.optimal_batch_size == module.hparams.batch_size == 16
    with pytest.raises(ValueError, match="loaders that are passed"):
        L.Trainer(accelerator="cpu", logger=False, **quiet).fit(module, module.train_dataloader())


def test_the_weights_at_an_exception_have_the_name_that_was_given(tmp_path):
    class Fails(make_net()):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            raise ArithmeticError("the user's own")

    for _ in range(2):  # a later one replaces the link
        module = Fails()
        with pytest.raises(ArithmeticError):
            fit([OnExceptionCheckpoint(tmp_path, "failed")], lambda module=module: module)
    found = make_net().load_from_checkpoint(tmp_path / "failed.ckpt")
    torch.testing.assert_close(copy_of(found), copy_of(module), rtol=0, atol=0)
    with pytest.raises(ValueError, match="needs a filename"):
        OnExceptionCheckpoint(tmp_path, "")


def test_defaults_are_lightnings():
    class Frozen(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append([each.requires_grad for each in module.net.parameters()])

    class Normed(make_net()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
            self.backbone, self.head = self.net, nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(self.net(batch[0])).square().mean()

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.SGD(trained, 0.1)

    seen: list[Any] = []

    class Backbone(BackboneFinetuning):
        on_train_start = Frozen.on_train_start

    for callback in (Frozen(), Backbone()):
        model = fit([callback], Normed, max_epochs=1, limit_val_batches=0).model
        assert seen.pop() == [False, False, True, True]
        assert model.net[1].running_mean.abs().sum() > 0
    assert TQDMProgressBar(refresh_rate=0).refresh_rate == 0
    assert EMAWeightAveraging("cpu", False).decay == 0.999
    assert ThroughputMonitor(len, available_flops=1e12).peak_flops == 1e12
    with pytest.raises(ValueError, match=r"min_delta is -0.1; it must be a number of at least 0"):
        EarlyStopping("val", min_delta=-0.1)


PRUNING = [
    # Once: on the CPU, Lightning's first values are trained along from then on.
    {
        "pruning_fn": "l1_unstructured",
        "amount": 0.3,
        "use_lottery_ticket_hypothesis": lambda epoch: epoch == 0,
    },
    {
        "pruning_fn": "l1_unstructured",
        "amount": lambda epoch: 0.2 + 0.1 * epoch,
        "use_lottery_ticket_hypothesis": lambda epoch: epoch == 1,
        "parameter_names": ["weight"],
        "prune_on_train_epoch_end": False,
    },
    {
        "pruning_fn": "ln_structured",
        "amount": 1,
        "use_global_unstructured": False,
        "use_lottery_ticket_hypothesis": False,
        "pruning_dim": 0,
        "pruning_norm": 1,
        "parameter_names": ["weight"],
    },
]


@pytest.fixture
def lightnings_variables(monkeypatch):
    """Put back what `seed_everything` of Lightning sets."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "1")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.usefixtures("lightnings_variables")
@pytest.mark.parametrize("options", PRUNING, ids=["lottery", "functions", "structured"])
def test_pruned_as_under_lightning(options, tmp_path):
    theirs = real("lightning")
    ours = fit([ModelPruning(**options)]).model
    other = fit([theirs.pytorch.callbacks.ModelPruning(**options)], library=theirs).model
    assert copy_of(ours).keys() == copy_of(other).keys()
    torch.testing.assert_close(copy_of(ours), copy_of(other), rtol=0, atol=0)


@pytest.mark.parametrize("lottery", [False, True])
def test_pruned_weights_are_zero_and_a_run_that_resumes_prunes_on(lottery, tmp_path):
    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)

    whole = fit([pruning()], max_epochs=3, default_root_dir=tmp_path / "whole")
    fit([pruning()], max_epochs=2, default_root_dir=tmp_path / "parts")
    [first] = (tmp_path / "parts").rglob("checkpoints")

    def other_weights() -> Any:
        torch.rand(1)
        return make_net()()

    resumed = fit([pruning()], other_weights, max_epochs=3, ckpt_path=first / "step-00000016",
                  default_root_dir=tmp_path / "parts")  # fmt: skip
    torch.testing.assert_close(copy_of(resumed.model), copy_of(whole.model), rtol=0, atol=0)
    zeros = sum(int((each == 0).sum()) for each in whole.model.parameters())
    sizes = sum(each.numel() for each in whole.model.parameters())
    left = sizes
    for _ in range(3):
        left -= round(0.3 * left)
    assert zeros == sizes - left
    assert not [name for name, _ in whole.model.named_buffers() if "mask" in name]
    before = copy_of(whole.model)
    whole.validate()  # of the last checkpoint, which has masks
    torch.testing.assert_close(copy_of(whole.model), before, rtol=0, atol=0)


class Normalised(make_net()):  # type: ignore[misc]
    """Keeps what it is after each update and in each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.updated: dict[int, Any] = {}
        self.validated: dict[int, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.updated[self.global_step] = copy_of(self)

    def on_validation_batch_start(self, *_: Any) -> None:
        self.validated[self.global_step] = copy_of(self)


class AtEpochs(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx == 2 or epoch_idx is not None


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(
    ("make", "updates", "options"),
    [
        (WeightAveraging, range(1, 25), {}),
        (partial(WeightAveraging, "cpu", False), range(1, 25), {"use_buffers": False}),
        (
            partial(WeightAveraging, avg_fn=swa_utils.get_ema_avg_fn(0.5)),
            range(1, 25),
            {"avg_fn": swa_utils.get_ema_avg_fn(0.5)},
        ),
        (
            partial(WeightAveraging, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)),
            range(1, 25),
            {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
        ),
        (
            partial(EMAWeightAveraging, None, False, 0.9, 3, 5, 1),
            [7, 10, 13, 16, 16.5, 19, 22, 24.5],  # an update, or the end of its epoch
            {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": False},
        ),
        (AtEpochs, [3, 8.5, 16.5, 24.5], {}),
    ],
    ids=["default", "buffers", "avg_fn", "multi_avg_fn", "ema", "should_update"],
)
def test_averaged_weights_are_those_of_torchs_averaged_model(
    make, updates, options, resumes, tmp_path
):
    saver = {"dirpath": tmp_path, "every_n_train_steps": 11, "save_top_k": -1}
    trainer = fit([make(), ModelCheckpoint(**saver)], Normalised, max_epochs=3)
    module = trainer.model
    if resumes:
        path = tmp_path / "step-00000011"
        last = fit([make(), ModelCheckpoint(**saver)], Normalised, ckpt_path=path, max_epochs=3)
        module.updated |= last.model.updated
        module.validated |= last.model.validated
        torch.testing.assert_close(copy_of(last.model), copy_of(module), rtol=0, atol=0)

    reference = Normalised()
    average = swa_utils.AveragedModel(reference, **{"use_buffers": True, **options})
    expected = {}
    for step, weights in sorted(module.updated.items()):
        reference.load_state_dict(weights)
        for moment in (step, step + 0.5):
            if moment in updates:
                average.update_parameters(reference)
            expected[moment] = copy_of(average.module)
    seen = {step: each for step, each in module.validated.items() if step >= min(updates)}
    assert seen.keys() >= {8, 16, 24}
    seen[24.5] = copy_of(module)  # after the fit
    for step, weights in seen.items():
        for name, value in weights.items():
            if "num_batches" not in name:  # a count is no average
                torch.testing.assert_close(value, expected[step][name], rtol=0, atol=0)


def test_a_mean_of_epochs_takes_lightnings_function():
    def largest(average: Any, weight: Any, number: Any) -> Any:
        assert number in (1, 2)
        return torch.maximum(average, weight)

    ends = {}

    class Net(make_net()):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            ends[self.current_epoch] = copy_of(self)

    swa = StochasticWeightAveraging(0.05, 1, 1, "linear", largest, "cpu")
    found = copy_of(fit([swa], Net, max_epochs=3).model)
    for name, value in found.items():
        torch.testing.assert_close(value, torch.stack([e[name] for e in ends.values()]).amax(0))
    with pytest.raises(ValueError, match="Both avg_fn and multi_avg_fn"):
        WeightAveraging(avg_fn=largest, multi_avg_fn=largest)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_top_k": 0}, []),
        ({"save_top_k": 0, "monitor": "val"}, []),
        ({"every_n_epochs": 0}, []),
        ({"every_n_train_steps": 0, "monitor": "val"}, []),
        ({"save_top_k": 0, "save_last": True}, [16]),
        ({"every_n_epochs": 0, "save_last": True}, [16]),
        ({"every_n_epochs": 0, "every_n_train_steps": 4, "save_top_k": -1}, [4, 8, 12, 16]),
        ({"every_n_epochs": 1, "save_top_k": -1}, [8, 16]),
        ({}, [16]),
    ],
    ids=str,
)
def test_checkpoints_are_saved_when_lightning_saves_them(options, steps, tmp_path):
    fit([ModelCheckpoint(tmp_path / "saved", **options)])
    saved = [path.name for path in (tmp_path / "saved").glob("step-*")]
    assert sorted(saved) == [f"step-{step:08d}" for step in steps]


BY_EPOCH = ["epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt"]


SAVERS: list[Any] = [
    ([{}], BY_EPOCH[1:], {}),
    ([{"save_top_k": -1}], [BY_EPOCH[0], "epoch=1-step=11.ckpt"], {"max_steps": 11}),
    ([{"save_top_k": 0, "save_last": True}], ["last.ckpt"], {}),
    ([{"monitor": "val", "filename": "best", "save_last": True}], ["best.ckpt", "last.ckpt"], {}),
    (
        [{"monitor": "val", "filename": "{epoch:02d}-{val:.1f}", "save_weights_only": True}],
        ["epoch=01-val=0.5.ckpt"],
        {},
    ),
    (
        [{"monitor": "val", "filename": "{epoch}_{no}", "auto_insert_metric_name": False}],
        ["1_0.ckpt"],
        {},
    ),
    ([{"every_n_train_steps": 100}], [], {}),
    (
        [{"monitor": "val", "save_top_k": -1, "filename": "{step}"}],
        ["step=12.ckpt", "step=16.ckpt", "step=4.ckpt", "step=8.ckpt"],
        {"val_check_interval": 0.5},
    ),
    (
        [{"every_n_epochs": 1}, {"every_n_train_steps": 6, "filename": "{step}", "save_top_k": -1}],
        ["epoch=1-step=16.ckpt", "step=12.ckpt", "step=6.ckpt"],
        {},
    ),
]


@pytest.mark.parametrize(("savers", "files", "options"), SAVERS, ids=str)
@pytest.mark.parametrize("library", ["trainer.lightning", "lightning"])
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.usefixtures("lightnings_variables")
def test_checkpoints_have_the_names_that_lightning_gives_them(
    library, savers, files, options, tmp_path
):
    other = real(library)
    paths = []
    for _ in range(2):  # the second run keeps what the first has saved
        kind = other.pytorch.callbacks.ModelCheckpoint
        made = [kind(tmp_path / "saved", **each) for each in savers]
        fit(made, lambda: make_net(other)(lr=0.01), other, default_root_dir=tmp_path, **options)
        paths += [Path(each.best_model_path).name for each in made if each.best_model_path]
    second = [f"{name.removesuffix('.ckpt')}-v1.ckpt" for name in files]
    found = sorted(path.name for path in (tmp_path / "saved").glob("*.ckpt"))
    assert found == sorted(files + second)
    assert set(paths) <= set(found)


def test_a_run_goes_on_from_the_name_of_a_checkpoint_and_keeps_its_folder(tmp_path):
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "saved", monitor="val", filename="best", save_last=True)

    whole = fit([saver()], max_epochs=4, default_root_dir=tmp_path / "whole")
    fit([saver()], max_epochs=2, default_root_dir=tmp_path / "parts")
    last = tmp_path / "saved" / "last-v1.ckpt"
    assert last.resolve() == tmp_path / "saved" / "version_1" / "step-00000016"
    again = saver()
    parts = fit([again], max_epochs=4, ckpt_path=str(last), default_root_dir=tmp_path / "parts")
    torch.testing.assert_close(copy_of(parts.model), copy_of(whole.model), rtol=0, atol=0)
    names = {path.name: os.readlink(path) for path in (tmp_path / "saved").glob("*.ckpt")}
    ends = {"best.ckpt": "step-00000032", "last.ckpt": "step-00000032"}
    later = {"best-v1.ckpt": "version_1/step-00000032", "last-v1.ckpt": "version_1/step-00000032"}
    assert names == ends | later
    assert (again.best_model_path, again.last_model_path) == (
        str(tmp_path / "saved" / "best-v1.ckpt"),
        str(last),
    )
    [found] = parts.validate(ckpt_path="best")
    assert found["val"] == pytest.approx(again.best_model_score)


def test_a_resumed_run_mends_links_whatever_the_order_of_its_callbacks(tmp_path):
    def savers() -> list[ModelCheckpoint]:
        best = ModelCheckpoint("saved", monitor="val", filename="best", save_last=True)
        return [best, ModelCheckpoint("saved", every_n_train_steps=8, save_top_k=-1)]

    folder = tmp_path / "saved"
    fit(savers(), default_root_dir=tmp_path)
    before = sorted(path.name for path in folder.glob("*.ckpt"))
    (folder / "best.ckpt").unlink()  # as if killed before it was made
    (folder / "last.ckpt").unlink()
    (folder / "old.ckpt").symlink_to("val-min-every-1-epoch/step-00000008")  # … or removed
    (folder / "users.ckpt").symlink_to("elsewhere")
    [best, every] = savers()
    fit([every, best], max_epochs=2, ckpt_path="last", default_root_dir=tmp_path)
    assert sorted(path.name for path in folder.glob("*.ckpt")) == sorted([*before, "users.ckpt"])
    assert best.best_model_path == str(folder / "best.ckpt")
    assert best.best_model_score is not None
    assert [path.name for path in folder.glob("*/*16")] == ["step-00000016"] * 2


def test_a_damaged_checkpoint_is_passed_over_and_the_run_goes_on_in_its_folder(tmp_path, caplog):
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "saved", save_top_k=2)

    fit([saver()], default_root_dir=tmp_path)
    (tmp_path / "saved" / "step-00000016" / "manifest.json").write_text("{")
    trainer = fit([saver()], max_epochs=3, ckpt_path="last", default_root_dir=tmp_path)
    assert trainer.global_step == 24
    assert "step-00000016 is not used" in caplog.text
    assert not (tmp_path / "saved" / "version_1").exists()


def test_arguments_by_position_mean_what_they_do_under_lightning():
    saver = ModelCheckpoint("saved", "{step}", "val", False, True, 2, True, False, "max")
    assert (saver.saves_on_exception, saver.save_weights_only) == (True, False)
    assert saver.mode == "max"
    stops = EarlyStopping("val", 0.1, 5, False, "max")
    assert (stops.min_delta, stops.patience, stops.mode) == (0.1, 5, "max")
    timer = Timer("00:00:01:00", "epoch", False)
    assert timer.time_remaining("validate") == 60.0


def test_layers_are_frozen_and_trained_by_methods_of_the_class_too():
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    BaseFinetuning.freeze(layers, train_bn=False)
    assert list(BaseFinetuning.filter_params(layers)) == []
    assert len(list(BaseFinetuning.filter_params([layers], requires_grad=False))) == 4
    before = layers[1].running_mean.clone()
    layers(torch.ones(4, 2))
    assert torch.equal(layers[1].running_mean, before)
    BaseFinetuning.make_trainable(layers)
    assert len(list(BaseFinetuning.filter_params(layers, train_bn=False))) == 2
    layers(torch.ones(4, 2))
    assert not torch.equal(layers[1].running_mean, before)
    assert BaseFinetuning.flatten_modules(nn.ModuleDict({"all": layers})) == list(layers)


def test_a_trace_has_the_name_and_the_table_that_lightnings_arguments_ask_for(tmp_path, capsys):
    def profiled(**options: Any) -> list[str]:
        profiler = PyTorchProfiler(
            tmp_path / "traces", "perf", wait=0, warmup=1, active=1, **options
        )
        fit([], profiler=profiler, default_root_dir=tmp_path, max_epochs=1)
        return sorted(each.name for each in (tmp_path / "traces").iterdir())

    table = "perf-operators-step-00000002-rank-00000.txt"
    options: Any = {"export_to_chrome": False, "sort_by_key": "count", "row_limit": 3}
    assert profiled(**options, table_kwargs={"header": "from here"}) == [table]
    text = (tmp_path / "traces" / table).read_text()
    assert "from here" in text
    counts = [int(line.split()[-1]) for line in text.splitlines() if line.strip()[:1].isalpha()
              and line.split()[-1].isdigit()]  # fmt: skip
    assert len(counts) == 3
    assert counts == sorted(counts, reverse=True)
    assert profiled() == [table, "perf-trace-step-00000002-rank-00000.json.gz"]


def test_two_intervals_are_an_error():
    with pytest.raises(ValueError, match="every_n_train_steps=3 and every_n_epochs=1"):
        ModelCheckpoint(every_n_train_steps=3, every_n_epochs=1)


def test_all_processes_take_the_version_of_the_first(ranks2, tmp_path):
    def run() -> Any:
        rank = int(os.environ.get("RANK", 0))
        if rank:  # it counts when the other's folder is there already
            while not list(tmp_path.glob("lightning_logs/version_0/*")):
                time.sleep(0.01)
        logger = CSVLogger(tmp_path)
        counted = logger.version
        if not rank:
            (tmp_path / "lightning_logs/version_0").mkdir(parents=True)
            (tmp_path / "lightning_logs/version_0/mark").touch()
        saver = ModelCheckpoint(filename="{loss:.6f}", every_n_train_steps=1)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, logger=logger, max_epochs=1, callbacks=[saver]
        )
        trainer.fit(make_net()())
        [name] = Path(trainer.log_dir, "checkpoints").glob("*.ckpt")
        assert saver.best_model_path == str(name)  # although each has a loss of its own
        return counted, logger.version, trainer.log_dir, str(logger.path)

    folder = tmp_path / "lightning_logs" / "version_0"
    found = ranks2(run)
    assert [counted for counted, *_ in found] == [0, 1]
    assert [rest for _, *rest in found] == [[0, str(folder), str(folder / "metrics.csv")]] * 2


def test_wrong_checkpoints_are_an_error_on_all_processes(ranks2, tmp_path):
    def run(case: str) -> str:
        first = int(os.environ.get("RANK", 0)) == 0
        savers = [ModelCheckpoint(tmp_path / "a")]
        if case == "numbers" and first:
            savers.append(ModelCheckpoint(tmp_path / "b", every_n_train_steps=2))
        with pytest.raises((ValueError, TypeError)) as caught:
            fit(
                savers,
                devices=2,
                ckpt_path=5 if case == "type" else None,
                default_root_dir=tmp_path,
            )
        return str(caught.value)

    for case, text in (("type", "ckpt_path is 5"), ("numbers", "ModelCheckpoint")):
        for message in ranks2(run, case):
            assert text in message


def test_a_logger_of_mlflow_is_its_client_and_run(tmp_path):
    class Logs(make_net()):  # type: ignore[misc]
        def on_train_end(self) -> None:
            client, run = self.logger.experiment, self.logger.run_id
            client.set_tag(run, "own", "tag")
            self.seen = self.logger.version, client.get_run(run).info.experiment_id

    uri = mlflow_store(tmp_path)
    logger = MLFlowLogger("project", "name", uri, artifact_location=str(tmp_path))
    trainer = fit([], Logs, logger=logger, log_every_n_steps=4, default_root_dir=tmp_path / "r")
    [run] = mlflow_runs(tmp_path)
    assert (run.experiment, run.name, run.tags["own"]) == ("project", "name", "tag")
    assert [step for step, _ in run.metrics["loss"]] == [4, 8, 12, 16]
    assert trainer.model.seen[0] == run.id == logger.version
    assert Path(trainer.log_dir).parent == tmp_path / "r" / "lightning_logs"
    with pytest.raises(ValueError, match="log_model=True; leave it out"):
        MLFlowLogger(log_model=True)


def test_lightnings_tuner_sets_what_it_finds_and_returns_the_size():
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, logger=False)
    tuner, module = LightningTuner(trainer), make_net()()
    assert tuner.scale_batch_size(module, max_val=16) == module.hparams.batch_size == 16
    found = tuner.lr_find(module, num_training=40, min_lr=1e-4, max_lr=10)
    assert module.lr == found.suggestion()
    with pytest.raises(ValueError, match="found by training"):
        tuner.lr_find(module, method="validate")


def test_the_table_of_a_model_needs_no_trainer():
    from trainer.lightning.pytorch.utilities.model_summary.model_summary import summarize as same

    from trainer.lightning.pytorch.utilities.model_summary import ModelSummary, summarize

    assert summarize is same
    model = make_net()()
    model.net[0].requires_grad_(False)
    summary = summarize(model, max_depth=-1)
    assert isinstance(summary, ModelSummary)
    assert "net.0" in str(summary)
    assert "net.0" not in str(ModelSummary(model))
    assert (summary.total_parameters, summary.trainable_parameters) == (178, 34)


def test_modules_without_a_file_have_the_names_of_another_and_refused_ones_say_why():
    from trainer.lightning.fabric.utilities.rank_zero import rank_zero_only
    from trainer.lightning.fabric.utilities.seed import seed_everything
    from trainer.lightning.fabric.utilities.types import _PATH
    from trainer.lightning.pytorch.callbacks.early_stopping import EarlyStopping
    from trainer.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
    from trainer.lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar
    from trainer.lightning.pytorch.core.module import LightningModule
    from trainer.lightning.pytorch.core.optimizer import LightningOptimizer
    from trainer.lightning.pytorch.loggers.wandb import WandbLogger
    from trainer.lightning.pytorch.utilities.exceptions import MisconfigurationException
    from trainer.lightning.pytorch.utilities.grads import grad_norm
    from trainer.lightning.pytorch.utilities.parsing import AttributeDict

    asked: list[Any] = []

    class Asking(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            asked.append(module.optimizers())

    assert rank_zero_only is L.pytorch.utilities.rank_zero_only
    assert seed_everything is L.seed_everything is L.fabric.seed_everything
    assert AttributeDict is L.pytorch.utilities.AttributeDict
    assert _PATH is Any
    assert AttributeDict(a=1).a == 1
    fit([Asking()], max_epochs=1)
    assert isinstance(asked.pop(), LightningOptimizer)
    with pytest.raises(ImportError, match=r"lightning\.Fabric is not in Cadence: use trainer.Acc"):
        from trainer.lightning.fabric import Fabric  # noqa: F401 - there is none
    assert EarlyStopping is L.pytorch.callbacks.EarlyStopping
    assert TQDMProgressBar is L.pytorch.callbacks.TQDMProgressBar
    assert WandbLogger is L.pytorch.loggers.WandbLogger
    assert LightningModule is L.pytorch.core.LightningModule is L.LightningModule
    assert L.pytorch.callbacks.RichProgressBar(theme=RichProgressBarTheme(time="red"))
    with pytest.raises(MisconfigurationException):
        ModelPruning("l2")
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    norms = {name: value.item() for name, value in grad_norm(layer, 2).items()}
    expected = {"grad_2.0_norm/weight": 2**0.5, "grad_2.0_norm/bias": 1}
    assert norms == pytest.approx({**expected, "grad_2.0_norm_total": 3**0.5})
    with pytest.raises(
        ImportError, match=r"lightning\.pytorch\.loops is not in Cadence: read the loop"
    ):
        importlib.import_module("trainer.lightning.pytorch.loops")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from trainer.lightning.pytorch.callbacks import Nothing  # noqa: F401 - there is none


def test_a_run_names_the_links_of_its_checkpoints(tmp_path, monkeypatch, capsys):
    """With a progress bar, and `save_last`, whose path is a string."""
    monkeypatch.chdir(tmp_path)
    save = ModelCheckpoint("saved", monitor="val", filename="best", save_last=True)
    options = {"accelerator": "cpu", "logger": False}
    L.Trainer(max_epochs=2, callbacks=[save], **options).fit(make_net()())
    shown = capsys.readouterr().err
    assert "  best  saved/best.ckpt  val=" in shown
    assert "  last  saved/last.ckpt\n" in shown
    assert "  next  ckpt_path='saved/last.ckpt' and a larger max_epochs continues the run" in shown

    module = make_net()()
    L.Trainer(max_epochs=3, **options).fit(module, ckpt_path="saved/last.ckpt")
    assert len(module.sizes) == 8  # of the third epoch alone


def test_a_run_names_its_checkpoint_where_there_are_no_links(tmp_path, monkeypatch, capsys):
    """Lightning's Trainer has no project_dir to name, whosever callback saves."""
    monkeypatch.chdir(tmp_path)
    save = callbacks.ModelCheckpoint(dirpath="saved")
    options = {"accelerator": "cpu", "logger": False}
    L.Trainer(max_epochs=2, callbacks=[save], **options).fit(make_net()())
    path = os.path.relpath(save.last_model_path)
    shown = capsys.readouterr().err
    assert f"  next  ckpt_path={path!r} and a larger max_epochs continues the run" in shown

    module = make_net()()
    L.Trainer(max_epochs=3, **options).fit(module, ckpt_path=path)
    assert len(module.sizes) == 8  # of the third epoch alone
