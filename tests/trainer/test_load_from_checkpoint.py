"""Modules made from a checkpoint; weights that fit in part; wrappers that come and go."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer, TrainModule
from trainer.checkpoint.loading import load_into
from trainer.checkpoint.storage import checkpoint_name, commit, open_staging
from trainer.checkpoint.weights import load_weights, save_weights
from trainer.errors import CheckpointError
from trainer.hparams import to_manifest
from trainer.names import bare_state_dict

# Torch's own, while it compiles.
SCRIPT = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiles(test):
    return SCRIPT(GRAD(test))


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


class Net(TrainModule):
    """Tied weights, buffers, a part that it is given, state of its own."""

    def __init__(self, encoder, width, betas=(0.9, 0.99), *, lr=0.1):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.tail = nn.Linear(width, width, bias=False)
        self.tail.weight = self.head.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.betas = betas
        self.seen = None

    def training_step(self, batch, batch_idx):
        self.count += 1
        return self.tail(self.head(self.norm(self.encoder(batch[0])))).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"seen": torch.arange(3), "pair": (1, 2)}

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["mine"], float(self.head.weight.detach().sum())


def encoder():
    return nn.Linear(2, 4)


def loader():
    return DataLoader(
        TensorDataset(torch.randn(12, 2, generator=torch.Generator().manual_seed(3))), batch_size=2
    )


def trainer_of(**arguments):
    arguments = {"max_steps": 2, "progress_bar": False, "cpu": True, "seed": 5} | arguments
    return Trainer(**arguments)


def trained(folder="run", module=None, **arguments):
    module = module or Net(encoder(), 4, (0.5, 0.6), lr=0.01)
    trainer_of(project_dir=folder, **arguments).fit(module, loader())
    return module, Path(folder, "checkpoints", "step-00000002")


def assert_equal(one, other):
    assert list(one) == list(other)
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)


def weights_only(module, folder="alone"):
    """A folder that holds a module's weights and nothing that a run needs."""
    staging = open_staging(Path(folder))
    save_weights(module.state_dict(), staging)
    return commit(staging, Path(folder), {"hyper_parameters": to_manifest(module)})


# -- a module as it was saved ----------------------------------------------------------------------


def test_a_module_is_made_of_what_the_checkpoint_holds():
    module, path = trained()
    again = Net.load_from_checkpoint(path, encoder=encoder())
    assert again.hparams == {"width": 4, "betas": (0.5, 0.6), "lr": 0.01}
    assert again.betas == (0.5, 0.6)
    assert_equal(again.state_dict(), module.state_dict())
    assert again.count == 2
    assert again.tail.weight is again.head.weight
    mine, total = again.seen
    assert mine["pair"] == (1, 2)
    assert mine["seen"].tolist() == [0, 1, 2]
    assert total != float(module.head.weight.detach().sum())  # the weights come afterwards
    assert again.training
    assert all(part.training for part in again.modules())
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_the_manifest_holds_the_hyper_parameters_at_the_time_of_the_save():
    module = Net(encoder(), 4)
    trainer = trainer_of(project_dir="run")
    trainer.fit(module, loader())
    module.hparams.lr = 0.7
    trainer.save_checkpoint("later")
    manifest = json.loads(Path("run/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["hyper_parameters"]["arguments"]["lr"] == 0.1
    assert Net.load_from_checkpoint("later", encoder=encoder()).hparams.lr == 0.7


def test_given_arguments_win():
    _, path = trained()
    given = Net.load_from_checkpoint(path, encoder=encoder(), lr=3.0, betas=[1])
    assert (given.hparams.lr, given.betas) == (3.0, [1])
    assert given.hparams.width == 4


def test_lightnings_names_of_arguments_are_taken():
    module = Net(encoder(), 4)
    trainer = trainer_of(project_dir="run")
    trainer.fit(model=module, train_dataloaders=loader())
    saved = trainer.save_checkpoint(filepath="saved")
    again = Net.load_from_checkpoint(checkpoint_path=saved, encoder=encoder())
    assert_equal(again.state_dict(), module.state_dict())
    again.forward = lambda batch: batch[0]
    assert len(trainer.predict(model=again, dataloaders=loader())) == len(loader())
    with pytest.raises(TypeError, match="fit got both module= and model="):
        trainer.fit(module, model=again)
    with pytest.raises(TypeError, match="fit got None"):
        trainer.fit()

    class Pretrained(Net):
        def __init__(self, encoder, width, checkpoint_path=None, **kwargs):
            super().__init__(encoder, width, **kwargs)
            self.pretrained = checkpoint_path

    of_class = Pretrained.load_from_checkpoint(saved, encoder=encoder(), checkpoint_path="other")
    assert of_class.pretrained == "other"


def test_a_folder_with_the_weights_alone_is_enough():
    module = Net(encoder(), 4)
    again = Net.load_from_checkpoint(str(weights_only(module)), encoder=encoder())
    assert_equal(again.state_dict(), module.state_dict())
    assert again.seen is None


def test_layers_of_configure_model_are_loaded():
    class Late(TrainModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = nn.Linear(self.hparams.width, 1)

    module = Late(3)
    module.configure_model()
    assert_equal(Late.load_from_checkpoint(weights_only(module)).state_dict(), module.state_dict())


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_map_location_puts_the_module_on_a_device(device):
    class Empty(TrainModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    path = weights_only(Empty())
    assert Empty.load_from_checkpoint(path, map_location=device).scratch.device.type == "meta"
    assert Empty.load_from_checkpoint(path).scratch.device.type == "cpu"
    assert Empty.load_from_checkpoint(path, map_location="cpu").device.type == "cpu"


# -- wrong paths and classes -----------------------------------------------------------------------


def test_a_folder_of_checkpoints_names_the_newest():
    newest = Path("run/checkpoints/step-00000200")
    for step in (10, 200, 30):
        weights_only(Net(encoder(), 4), newest.with_name(checkpoint_name(step)))
    for folder in ("run", newest.parent):
        with pytest.raises(CheckpointError, match=f"folder of checkpoints.*the newest, {newest}"):
            Net.load_from_checkpoint(folder, encoder=encoder())


def test_other_paths_are_refused_with_what_to_give():
    path = weights_only(Net(encoder(), 4))
    with pytest.raises(CheckpointError, match=r"is a file; give the checkpoint's folder, alone\."):
        Net.load_from_checkpoint(path / "model.safetensors", encoder=encoder())
    Path("epoch=1.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"epoch=1\.ckpt is a file; a check.*\.ckpt.*pickles"):
        Net.load_from_checkpoint("epoch=1.ckpt", encoder=encoder())
    with pytest.raises(CheckpointError, match=r"no checkpoint at nowhere: no such folder"):
        Net.load_from_checkpoint("nowhere", encoder=encoder())
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty/manifest\.json is missing"):
        Net.load_from_checkpoint("empty", encoder=encoder())


def test_damage_is_found_before_the_module_is_made():
    _, path = trained()
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Net.load_from_checkpoint(path)  # without the argument that it needs


def test_a_missing_argument_and_another_class_are_refused():
    class Other(TrainModule):
        def __init__(self, width):
            super().__init__()

    path = weights_only(Net(encoder(), 4))
    with pytest.raises(TypeError, match=r"its argument encoder\. Pass .*encoder=…"):
        Net.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"alone was saved.*betas, lr, which Other does not"):
        Other.load_from_checkpoint(path)


# -- weights that do not fit -----------------------------------------------------------------------


def saved_and_other():
    """A file's weights, and a module that misses some, has others, and one of another shape."""
    weights = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()
    return weights, nn.ModuleDict({"0": nn.Linear(4, 3), "extra": nn.Linear(1, 1)})


def test_names_are_listed_in_groups_and_nothing_is_loaded():
    weights, other = saved_and_other()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(other, weights, where="file")
    first, *groups, fix = str(caught.value).splitlines()
    assert first == "file does not fit the module, a ModuleDict:"
    assert groups == [
        "  missing from the file (2): extra.weight, extra.bias",
        "  unexpected in the file (2): 1.weight, 1.bias",
        "  of another shape (1): 0.weight ([3, 2] in the file, [3, 4] in the module)",
    ]
    assert "strict=False" in fix
    assert_equal(other.state_dict(), before)
    many = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(25))
    with pytest.raises(CheckpointError, match=r"missing from the file \(25\): .* 19\.weight, …\n"):
        load_into(many, {}, where="file")


def test_without_strict_what_fits_is_loaded_and_the_rest_warned_of(caplog):
    weights, other = saved_and_other()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with caplog.at_level(logging.WARNING, "trainer"):
        load_into(other, weights, where=Path("file"), strict=False)
        load_into(other, other.state_dict(), where="fitting", strict=False)
    assert_equal(other.state_dict(), before | {"0.bias": weights["0.bias"]})
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "file does not fit ModuleDict completely; only what fits was loaded.",
        "  missing from the file (2): extra.weight, extra.bias",
        "  unexpected in the file (2): 1.weight, 1.bias",
        "  of another shape (1): 0.weight ([3, 2] in the file, [3, 4] in the module)",
    ]


def test_a_module_is_loaded_in_part_from_a_checkpoint(caplog):
    class Bigger(Net):
        def __init__(self, encoder, width, **rest):
            super().__init__(encoder, width, **rest)
            self.more = nn.Linear(1, 1)

    module = Net(encoder(), 4)
    path = weights_only(module)
    with pytest.raises(CheckpointError, match=r"missing from the file \(2\): more\.weight"):
        Bigger.load_from_checkpoint(path, encoder=encoder())
    bigger = Bigger.load_from_checkpoint(path, encoder=encoder(), strict=False)
    assert torch.equal(bigger.head.weight, module.head.weight)
    assert "missing from the file (2): more.weight, more.bias" in caplog.text


class Classifier(TrainModule):
    """A backbone, and a head for some classes."""

    def __init__(self, width, classes):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Linear(2, width)
        self.head = nn.Linear(width, classes)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneClass(Classifier):
    """Has fewer arguments."""

    def __init__(self, width, scale=1.0):
        super().__init__(width, 1)
        self.scale = scale


class Lenient(Classifier):
    strict_loading = False


def with_backbone_of(source, kind, path, **arguments):
    """Return a module made from the source's checkpoint, with the same backbone."""
    module = kind.load_from_checkpoint(path, **arguments)
    assert torch.equal(module.backbone.weight, source.backbone.weight)
    return module


def test_a_changed_head_is_left_out_with_a_warning_unless_strict(caplog):
    source = Classifier(4, 3)
    path = weights_only(source)
    with pytest.raises(CheckpointError, match=r"head\.weight \(\[3, 4\] in the file, \[5, 4\]"):
        Classifier.load_from_checkpoint(path, classes=5)
    for kind, more in ((Classifier, {"strict": False}), (Lenient, {})):
        caplog.clear()
        made = with_backbone_of(source, kind, path, classes=5, **more)
        assert made.head.weight.shape == (5, 4)
        assert "of another shape (2): head.weight" in caplog.text
        assert "head.bias ([3] in the file, [5] in the module)" in caplog.text


def test_a_class_with_fewer_arguments_leaves_the_others_out(caplog):
    source = Classifier(4, 1)
    path = weights_only(source)
    for arguments in ({}, {"width": 4}):  # `scale` could be what `classes` was
        with pytest.raises(CheckpointError, match=r"OneClass does not take: it takes width, scale"):
            OneClass.load_from_checkpoint(path, **arguments)
    given = with_backbone_of(source, OneClass, path, scale=2.0)
    assert (given.scale, given.head.weight.shape) == (2.0, (1, 4))
    assert "the argument classes, which OneClass does not take" in caplog.text
    assert with_backbone_of(source, OneClass, path, strict=False).scale == 1.0


def started_with(kind, path, folder):
    """The weights of the backbone with which a fit begins, and its updates."""
    seen = []
    torch.manual_seed(1)
    module = kind(4, 5)
    module.on_fit_start = lambda: seen.append(module.backbone.weight.clone())
    trainer = trainer_of(project_dir=folder)
    trainer.fit(module, loader(), ckpt_path=path)
    return seen[0], trainer.global_step


def test_a_fit_begins_with_the_weights_of_a_checkpoint_without_a_state(ranks2, caplog):
    source = Classifier(4, 3)
    fit = trainer_of(project_dir="source")
    fit.fit(source, loader())
    fit.save_checkpoint("source/alone", weights_only=True)
    path = Path("source/alone").absolute()
    with pytest.raises(CheckpointError, match=r"head\.weight \(\[3, 4\] in the file"):
        started_with(Classifier, path, "strict")
    of_ranks = ranks2(started_with, Lenient, path, "of-ranks")
    for weight, steps in (started_with(Lenient, path, "alone"), *of_ranks):
        assert torch.equal(weight, source.backbone.weight)
        assert steps == 2
    assert "of another shape (2): head.weight" in caplog.text


class Renamed(nn.Module):
    """Knows the names that its weights once had, and a shape."""

    def __init__(self):
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.translate)

    @staticmethod
    def translate(module, state_dict, prefix, *rest):
        for kind in ("weight", "bias"):
            if f"{prefix}old.{kind}" in state_dict:
                state_dict[f"{prefix}new.{kind}"] = state_dict.pop(f"{prefix}old.{kind}")
        if f"{prefix}flat" in state_dict:
            state_dict[f"{prefix}new.weight"] = state_dict.pop(f"{prefix}flat").reshape(2, 2)
        shaped = state_dict.get(f"{prefix}new.bias")
        if shaped is not None and shaped.dim() == 2:
            state_dict[f"{prefix}new.bias"] = shaped[0]


class Overriding(Renamed):
    """The same by a method."""

    def __init__(self):
        super().__init__()
        self._load_state_dict_pre_hooks.clear()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.translate(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("kind", [Renamed, Overriding])
def test_modules_may_translate_old_names(kind):
    source = nn.Linear(2, 2)
    old = {"0.old.weight": source.weight, "0.old.bias": source.bias}
    flat = {"0.flat": source.weight.detach().flatten(), "0.new.bias": source.bias[None]}
    for weights in (old, flat):
        module = nn.Sequential(kind())
        load_into(module, weights, where="file")
        assert torch.equal(module[0].new.weight, source.weight)
        assert torch.equal(module[0].new.bias, source.bias)


@pytest.mark.parametrize("strict", [True, False])
def test_modules_that_translate_names_report_what_remains(strict, caplog):
    module = nn.Sequential(Renamed(), nn.Linear(1, 1, bias=False))
    weights = {"0.old.weight": torch.ones(2, 2), "0.new.bias": torch.ones(2), "much": torch.ones(1)}
    text = "  missing from the file (1): 1.weight\n  unexpected in the file (1): much"
    if strict:
        with pytest.raises(CheckpointError) as caught:
            load_into(module, weights, where="file")
        assert text in str(caught.value)
    else:
        load_into(module, weights, where="file", strict=False)
        assert text in caplog.text
        assert torch.equal(module[0].new.weight, weights["0.old.weight"])


def test_an_error_of_a_module_itself_names_the_file():
    class Odd(nn.Linear):
        def _load_from_state_dict(self, *args):
            args[-1].append("nobody knows")

    with pytest.raises(CheckpointError, match=r"(?s)file cannot be loaded: .*nobody knows"):
        load_into(Odd(1, 1), {}, where="file")


def test_lazy_modules_take_their_shape_from_the_file():
    source = nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lazy modules are new
        lazy = nn.LazyLinear(2)
    load_into(lazy, source.state_dict(), where="file")
    assert_equal(lazy.state_dict(), source.state_dict())


def test_tied_weights_saved_under_one_name_fill_the_other():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.two = nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

    for name in ("one.weight", "two.weight"):
        tied = Tied()
        load_into(tied, {name: torch.full((2, 2), 5.0)}, where="file")
        assert torch.equal(tied.one.weight, torch.full((2, 2), 5.0))


# -- wrappers --------------------------------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


@compiles
def test_names_on_the_disk_are_those_without_compile():
    plain, wrapped = Net(encoder(), 4), Net(encoder(), 4)
    for name in ("encoder", "head", "tail"):
        setattr(wrapped, name, compiled(getattr(wrapped, name)))
    assert "head._orig_mod.weight" in wrapped.state_dict()
    save_weights(wrapped.state_dict(), Path.cwd())
    save_weights(plain.state_dict(), "plain.safetensors")
    assert set(load_file("model.safetensors")) == set(load_file("plain.safetensors"))
    assert list(bare_state_dict(wrapped)) == list(plain.state_dict())
    plain.load_state_dict(load_weights(Path.cwd()))
    assert_equal(plain.state_dict(), bare_state_dict(wrapped))


@compiles
@pytest.mark.parametrize("whole", [False, True])
def test_a_file_with_the_names_of_compile_is_read_by_all(whole):
    source, plain, wrapped = encoder(), nn.Sequential(encoder()), nn.Sequential(encoder())
    weights = {f"0._orig_mod.{name}": value for name, value in source.state_dict().items()}
    wrapped[0] = compiled(wrapped[0])
    for model in (plain, wrapped):
        load_into(compiled(model) if whole else model, weights, where="file")
        assert_equal(bare_state_dict(model), nn.Sequential(source).state_dict())


@compiles
@pytest.mark.parametrize("strict", [True, False])
def test_mismatches_of_a_compiled_module_have_bare_names(strict, caplog):
    model = nn.Sequential(compiled(nn.Linear(3, 3)))
    with pytest.raises(CheckpointError) if strict else nullcontext() as caught:
        load_into(model, nn.Sequential(encoder()).state_dict(), where="file", strict=strict)
    messages = str(caught.value) if strict else caplog.text
    assert " 0.weight ([4, 2] in the file" in messages


class Wrapped(Net):
    """The same, compiled: its own forward, and parts of it."""

    def __init__(self, encoder, width, betas=(0.9, 0.99), *, lr=0.1):
        super().__init__(encoder, width, betas, lr=lr)
        self.encoder = compiled(self.encoder)
        self.norm.compile(backend="eager")
        self.head = compiled(self.head)
        self.compile(backend="eager")


KINDS = ["plain", "compiled", "DDP"]


def run_as(kind, pool, work, *args):
    """What `work` returns for the module's class, alone or on each of two ranks."""
    cls = Wrapped if kind == "compiled" else Net
    return pool(work, cls, *args)[0] if kind == "DDP" else work(cls, *args)


def saved_by(cls):
    torch.manual_seed(7)
    module, path = trained("source", cls(encoder(), 4, lr=0.01))
    return bare_state_dict(module), str(path)


def seen_by(cls, path):
    """The weights that a module and a run begin with."""
    torch.manual_seed(8)
    made = bare_state_dict(cls.load_from_checkpoint(path, encoder=encoder()))
    seen = {}

    class Watched(cls):
        def on_fit_start(self):
            seen.update({name: value.clone() for name, value in bare_state_dict(self).items()})

    trainer = trainer_of(project_dir="target", max_steps=3)
    trainer.fit(Watched(encoder(), 4, lr=0.01), loader(), ckpt_path=path)
    assert trainer.global_step == 3
    return made, seen


@compiles
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_a_checkpoint_of_each_kind_is_loaded_by_each(ranks2, source, target):
    weights, path = run_as(source, ranks2, saved_by)
    assert weights["count"] == 2
    for seen in run_as(target, ranks2, seen_by, path):
        assert_equal(seen, weights)
