"""What hooks of Lightning's programs change of ``checkpoint["state_dict"]`` counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainer.lightning as L
from tests.moving.running import real
from tests.numerics.running import copy_of
from trainer import CheckpointError
from trainer.lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from trainer.migration.table import CHECKPOINT_ENTRIES

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


def make_student(library: Any) -> Any:
    """Return a class whose checkpoints have no teacher, and another name for the student."""

    class Student(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.student(batch[0]) - self.teacher(batch[0])).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.student.parameters()], 0.1, momentum=0.9)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            weights = checkpoint["state_dict"]
            for name in list(weights):
                if name.startswith("teacher."):
                    del weights[name]
            checkpoint["state_dict"] = {f"net.{name}": weights[name] for name in weights}

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            weights = checkpoint["state_dict"]
            for name in list(weights):
                weights[name.removeprefix("net.")] = weights.pop(name)
            for name, value in self.teacher.state_dict().items():
                weights[f"teacher.{name}"] = value

    return Student


class Lenient(make_student(L)):  # type: ignore[misc]
    """Loads what its checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        for name in [each for each in checkpoint["state_dict"] if each.startswith("teacher.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        assert set(checkpoint["state_dict"]) == {"student.weight", "student.bias"}


def made(kind: Any) -> Any:
    torch.manual_seed(3)
    return kind()


def fit(folder: Path, module: Any, epochs: int, *, library: Any = L, **options: Any) -> Any:
    ckpt_path = options.pop("ckpt_path", None)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet, **options
    )
    trainer.fit(module, DataLoader(TensorDataset(X), 8), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_edits_of_the_weights_count_as_they_do_under_lightning(tmp_path):
    library = real("lightning")
    trainer = fit(tmp_path / "theirs", made(make_student(library)), 1, library=library)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    expected = torch.load(tmp_path / "theirs.ckpt", weights_only=True)["state_dict"]
    trainer = fit(tmp_path / "ours", made(make_student(L)), 1)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    found = load_file(tmp_path / "ours.ckpt" / "model.safetensors")
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


class Copies(Lenient):
    """Its hooks make copies of all weights, as ``.cpu()`` does on a GPU."""

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        super().on_save_checkpoint(checkpoint)
        self.on_load_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {
            name: value.clone() for name, value in checkpoint["state_dict"].items()
        }


@pytest.mark.parametrize("kind", [make_student(L), Lenient, Copies])
@pytest.mark.parametrize("averages", [False, True])
def test_a_run_resumes_from_weights_that_hooks_have_edited(tmp_path, kind, averages):
    def options() -> Any:
        return {"callbacks": [EMAWeightAveraging(decay=0.5)] if averages else []}

    whole = fit(tmp_path / "whole", made(kind), 2, **options())
    fit(tmp_path / "half", made(kind), 1, **options()).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(tmp_path / "rest", made(kind), 2, ckpt_path=tmp_path / "half.ckpt", **options())
    torch.testing.assert_close(copy_of(resumed.model), copy_of(whole.model), rtol=0, atol=0)
    names = ["model.safetensors", *["trained.safetensors"] * averages]
    for weights in [load_file(tmp_path / "half.ckpt" / name) for name in names]:
        assert len(weights) == 2
        assert not any("teacher" in name for name in weights)


@pytest.mark.parametrize("kind", [make_student(L), Lenient])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_module_is_made_from_weights_that_hooks_have_edited(tmp_path, kind, weights_only):
    trainer = fit(tmp_path, made(kind), 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
    again = kind.load_from_checkpoint(tmp_path / "a.ckpt")
    expected = copy_of(trainer.model.student)
    torch.testing.assert_close(copy_of(again.student), expected, rtol=0, atol=0)
    again = kind()
    trainer.validate(again, DataLoader(TensorDataset(X), 8), ckpt_path=tmp_path / "a.ckpt")
    torch.testing.assert_close(copy_of(again.student), expected, rtol=0, atol=0)


def test_a_callback_edits_the_weights_and_a_strict_module_needs_all(tmp_path):
    class Drops(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            del checkpoint["state_dict"]["net.bias"]

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    checkpoints = ModelCheckpoint(dirpath=tmp_path / "kept")
    fit(tmp_path, Net(), 1, callbacks=[Drops(), checkpoints])
    folder = Path(checkpoints.best_model_path)
    assert list(load_file(folder / "model.safetensors")) == ["net.weight"]
    with pytest.raises(CheckpointError, match=r"missing from the file \(1\): net.bias"):
        Net.load_from_checkpoint(folder)
    with pytest.raises(CheckpointError, match="missing"):
        fit(tmp_path / "more", Net(), 2, ckpt_path=folder)
    Net.load_from_checkpoint(folder, strict=False)


def test_entries_that_are_not_there_say_what_to_use(tmp_path):
    entry = "optimizer_states"

    class Reads(make_student(L)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint[entry]

    with pytest.raises(KeyError, match=f"{entry}.*: {CHECKPOINT_ENTRIES[entry][:20]}"):
        fit(tmp_path, Reads(), 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_leave_out_what_hooks_delete(ranks2, tmp_path, strategy):
    def run() -> Any:
        options = {"devices": 2, "strategy": strategy}
        trainer = fit(tmp_path / "a", made(Lenient), 1, **options)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        whole = fit(tmp_path / "b", made(Lenient), 2, **options)
        resumed = fit(tmp_path / "c", made(Lenient), 2, ckpt_path=tmp_path / "a.ckpt", **options)
        torch.testing.assert_close(whole_weights(resumed), whole_weights(whole), rtol=0, atol=0)
        return True

    def whole_weights(trainer: Any) -> dict[str, Tensor]:
        weights = copy_of(trainer.model).items()
        return {name: getattr(each, "full_tensor", each.clone)() for name, each in weights}

    assert ranks2(run, timeout=120) == [True, True]
    Lenient.load_from_checkpoint(tmp_path / "a.ckpt")  # its hook looks at the names


class DropsOnRank0(make_student(L)):  # type: ignore[misc]
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if torch.distributed.get_rank() == 0:
            del checkpoint["state_dict"]["teacher.bias"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_writer_edits_whole_weights_and_all_processes_those_in_shards(
    ranks2, tmp_path, strategy
):
    def run() -> str:
        checkpointing = {"enable_checkpointing": False}
        options = {"devices": 2, "strategy": strategy, **checkpointing}
        trainer = fit(tmp_path / "a", made(DropsOnRank0), 1, **options)
        try:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        except CheckpointError as error:
            return str(error)
        return "saved"

    for said in ranks2(run, timeout=120):
        if strategy == "ddp":
            assert said == "saved"
        else:
            assert "different names" in said
    assert (tmp_path / "a.ckpt").exists() == (strategy == "ddp")
    if strategy == "ddp":
        assert "teacher.bias" not in load_file(tmp_path / "a.ckpt" / "model.safetensors")
