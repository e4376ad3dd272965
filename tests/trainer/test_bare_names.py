"""No name that torch's wrappers add leaves a run, wherever the wrapper sits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, BaseFinetuning, GradientNormMonitor, ModelCheckpoint, ModelSummary
from trainer import Accelerator, Trainer, TrainModule
from trainer.names import bare_names, bare_state_dict

WRAPPERS = {
    "compile": lambda part: torch.compile(part, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda part: torch.compile(nn.DataParallel(part), backend="eager"),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


class Net(TrainModule):
    def __init__(self, wrap=lambda part: part):
        super().__init__()
        self.body = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
        self.module = nn.Linear(4, 1)  # a user's own name, although DDP's too
        self.body.get_parameter(next(n for n, _ in self.body.named_parameters())).requires_grad_(
            False
        )

    def training_step(self, batch, batch_idx):
        loss = self.module(self.body(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.named_parameters(), lr=0.1)


def data():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4)


def fit(wrap, folder, max_steps, ckpt_path=None):
    trainer = Trainer(
        max_steps=max_steps,
        seed=0,
        log_every=1,
        cpu=True,
        progress_bar=False,
        project_dir=folder,
        callbacks=[
            EMA(decay=0.5),
            GradientNormMonitor(per="parameter"),
            ModelCheckpoint(every=1),
            ModelSummary(max_depth=-1),
        ],
    )
    module = Net() if wrap is None else Net(wrap)
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return module


@wrapped
def test_a_run_and_its_files_are_those_of_the_bare_module(wrap, capsys):
    fit(None, "plain", 2)
    messages = capsys.readouterr().out
    fit(wrap, "wrapped", 2)
    assert capsys.readouterr().out == messages
    (plain,), (other,) = (
        sorted(Path(one, "checkpoints").glob("step-*2")) for one in ("plain", "wrapped")
    )
    files = sorted(file.name for file in plain.iterdir())
    assert sorted(file.name for file in other.iterdir()) == files
    for name in files:
        if name.endswith(".safetensors"):
            one, two = load_file(plain / name), load_file(other / name)
            assert one.keys() == two.keys()
            assert all(torch.equal(one[key], two[key]) for key in one)
    for file in Path("wrapped").rglob("*.json*"):
        text = file.read_text()
        assert "_orig_mod" not in text
        assert "body.module" not in text
    # Each goes on from the other, as if nothing had been wrapped.
    resumed = fit(None, "wrapped", 4, "auto"), fit(wrap, "plain", 4, "auto")
    expected = bare_state_dict(fit(None, "whole", 4))
    for module in resumed:
        state = bare_state_dict(module)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


class Freeze(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.body)


@wrapped
def test_frozen_parameters_are_saved_under_bare_names(wrap):
    callback = Freeze()
    trainer = Trainer(
        max_steps=1, cpu=True, progress_bar=False, project_dir="run", callbacks=callback
    )
    trainer.fit(Net(wrap), data())
    state = callback.state_dict()
    assert state["norms"] == ["body.1"]
    assert state["frozen"] == [f"body.{n}.{name}" for n in (0, 1) for name in ("weight", "bias")]


@wrapped
def test_errors_name_the_users_own_parameters(wrap):
    module = Net(wrap)
    with torch.no_grad():
        module.body(torch.ones(2, 3))
        module.module.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"of: body\.0\.bias, body\.1\.weight"):
        Trainer(max_steps=1, cpu=True, progress_bar=False, checkpointing=False).fit(module, data())


@wrapped
def test_state_dicts_have_bare_names_and_the_versions_of_their_parts(wrap):
    plain, other = Net(), Net(wrap)
    state, expected = bare_state_dict(other), plain.state_dict()
    assert list(state) == list(expected)
    assert state._metadata["body.1"] == expected._metadata["body.1"] == {"version": 2}
    assert "module" in dict(bare_names(other, other.named_modules()))
    assert other.state_dict().keys() == other.state_dict().keys()
    plain.load_state_dict(state)


@wrapped
def test_an_accelerator_saves_bare_names_of_optimizers_too(wrap):
    accelerator = Accelerator(cpu=True)
    model = Net(wrap)
    named = [(f"mine.{n}", p) for n, p in model.module.named_parameters()]
    optimizers = [
        torch.optim.SGD(model.body.named_parameters(prefix="body")),
        torch.optim.SGD(named),
    ]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    seen = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.extend(weights))
    folder = Path(accelerator.save_state("state"))
    assert seen[0].keys() == load_file(folder / "model.safetensors").keys()
    assert list(seen[0]) == list(Net().state_dict())
    first, second = (folder.joinpath(f"optimizer{n}.json").read_text() for n in ("", "_1"))
    assert '"body.1.weight"' in first
    assert '"mine.weight"' in second
    other = Accelerator(cpu=True)
    other.prepare(Net())
    other.load_state("state")
