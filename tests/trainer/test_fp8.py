"""`mixed_precision="fp8"`, emulated on the CPU: near float32, plain on disk, refused by name."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import (
    Accelerator,
    AORecipeKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    Trainer,
    TrainModule,
)
from trainer.cli.launch import parser
from trainer.configuration import recipe_of
from trainer.environment import patch_environment
from trainer.fp8 import (
    TransformerEngineLayers,
    convert_model_to_fp8_ao,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from trainer.launch.configuration import LaunchConfiguration, read_file, write_file
from trainer.launch.plan import configure

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
LOOSE = 2e-2
MISSING = importlib.util.find_spec("torchao") is None
needs_torchao = pytest.mark.skipif(MISSING, reason="needs the extra fp8")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 30)
        self.even = nn.Linear(30, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.blocks(x + self.even(self.odd(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


INNER = {f"blocks.{block}.{name}" for block in (0, 1) for name in ("first", "second")}


def converted(module: nn.Module) -> set[str]:
    parts = module.named_modules()
    return {name for name, part in parts if type(part).__name__ == "Float8Linear"}


def fit(folder: Path, precision: str = "fp8", ckpt_path: Any = None, **options: Any) -> Trainer:
    options = {"max_epochs": 3, "checkpointing": False, **options}
    trainer = Trainer(
        cpu=True,
        seed=3,
        progress_bar=False,
        project_dir=folder,
        mixed_precision=precision,
        **options,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(X, Y), 8, shuffle=True), ckpt_path=ckpt_path)
    return trainer


@needs_torchao
def test_training_is_near_float32_and_converts_inner_layers(tmp_path):
    plain = fit(tmp_path / "plain", "no").callback_metrics["train/loss"]
    trainer = fit(tmp_path / "fp8")
    assert trainer.callback_metrics["train/loss"] == pytest.approx(float(plain), abs=LOOSE)
    assert trainer.callback_metrics["train/loss"] != plain
    assert converted(trainer.module) == INNER


def by_hand(steps: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    """Train with torchao's own functions."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(
        Net(),
        config=Float8LinearConfig(emulate=True, pad_inner_dim=True),
        module_filter_fn=lambda _, name: name in INNER,
    )
    return train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps, autocast=True)


def train(
    model: Any, optimizer: Any, steps: int = 6, accelerator: Any = None, autocast: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for x, y in zip(X.split(8)[:steps], Y.split(8), strict=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: each.detach().clone() for name, each in model.state_dict().items()}


@needs_torchao
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_steps_equal_uncompiled_ones(tmp_path):
    options = {"max_epochs": 1, "limit_train_batches": 3, "log_every": 1}
    expected = fit(tmp_path / "plain", **options)
    torch._dynamo.reset()
    found = fit(tmp_path / "compiled", **options, dynamo_backend="aot_eager")
    torch._dynamo.reset()
    assert converted(found.module) == INNER
    for name, value in expected.module.state_dict().items():
        torch.testing.assert_close(found.module.state_dict()[name], value, rtol=0, atol=1e-6)
    assert found.callback_metrics["train/loss"] == pytest.approx(
        float(expected.callback_metrics["train/loss"]), abs=1e-6
    )


@needs_torchao
def test_an_own_loop_equals_torchao_by_hand(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before the conversion
    model, optimizer = accelerator.prepare(model, optimizer)
    seen: list[torch.dtype] = []
    model.odd.register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
    losses, weights = train(model, optimizer, accelerator=accelerator)
    expected, others = by_hand()
    assert losses == expected
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert set(seen) == {torch.bfloat16}  # autocast outside of the converted layers
    assert model(X).dtype == torch.float32
    assert accelerator.fp8_backend == FP8BackendType.AO
    assert accelerator.ao_recipe_handler == AORecipeKwargs()
    assert accelerator.te_recipe_handler is None
    assert accelerator.fp8_recipe_handler is accelerator.ao_recipe_handler
    accelerator.save_model(model, tmp_path)
    Net().load_state_dict(load_file(tmp_path / "model.safetensors"))  # strict


@needs_torchao
def test_a_resumed_run_is_bit_identical_and_plain_on_disk(tmp_path):
    straight = fit(tmp_path / "straight", checkpointing=True)
    fit(tmp_path / "cut", checkpointing=True, max_steps=11)
    (saved,) = (tmp_path / "cut").rglob("model.safetensors")
    tensors = load_file(saved)
    plain = Net()
    plain.load_state_dict(tensors)  # strict: bare names
    assert converted(plain) == set()
    resumed = fit(tmp_path / "cut", checkpointing=True, ckpt_path="last")
    for name, value in straight.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], value), name
    assert not torch.equal(tensors["first.weight"], straight.module.first.weight)
    assert resumed.callback_metrics == straight.callback_metrics


@needs_torchao
def test_the_recipe_chooses_layers_and_their_configuration(caplog):
    from torchao.float8 import Float8LinearConfig

    def prepared(recipe: AORecipeKwargs) -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
        return accelerator.prepare(accelerator.prepare(Net()))

    chosen = prepared(AORecipeKwargs(module_filter_func=lambda part, name: "d" in name))
    assert converted(chosen) == {"odd"} | {name for name in INNER if "second" in name}
    assert chosen.odd.config.pad_inner_dim
    assert not chosen.odd.config.enable_fsdp_float8_all_gather  # there are no shards
    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    own = prepared(AORecipeKwargs(config=config)).blocks[0].first.config
    assert own.round_scales_to_power_of_2
    assert own.emulate
    assert not own.pad_inner_dim
    with caplog.at_level(logging.WARNING):
        none = prepared(AORecipeKwargs(module_filter_func=lambda part, name: False))
    assert converted(none) == set()
    assert "finds no layer of Net to convert" in caplog.text


def test_a_model_is_converted_by_hand():
    from torchao.float8 import Float8LinearConfig

    left = find_first_last_linear_layers(Net())
    every = [name for name, part in Net().named_modules() if isinstance(part, nn.Linear)]
    assert left == (every[0], every[-1])
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    model, config = Net(), Float8LinearConfig(emulate=True)
    assert not has_ao_layers(model)
    chosen = partial(filter_linear_layers, layers_to_filter=[*left, min(INNER)])
    convert_model_to_fp8_ao(model, config, chosen)
    assert converted(model) == INNER - {min(INNER)}
    assert has_ao_layers(model)
    model = Net()
    convert_model_to_fp8_ao(model, config)
    assert converted(model) == INNER


# -- the environment, the launcher and its file ----------------------------------------------------

SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "ao": (
        {"backend": "AO", "pad_inner_dim": False, "enable_fsdp_float8_all_gather": False},
        AORecipeKwargs(pad_inner_dim=False, enable_fsdp_float8_all_gather=False),
    ),
    "te": (
        {
            "backend": "TE",
            "use_autocast_during_eval": True,
            "margin": 2,
            "interval": 3,
            "format": "E4M3",
            "amax_history_len": 16,
            "amax_compute_algo": "max",
            "override_linear_precision": [False, True, True],
            "use_mxfp8_block_scaling": True,
        },
        TERecipeKwargs(
            use_autocast_during_eval=True,
            margin=2,
            interval=3,
            fp8_format="E4M3",
            amax_history_len=16,
            amax_compute_algo="max",
            override_linear_precision=(False, True, True),
            use_mxfp8_block_scaling=True,
        ),
    ),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_file_options_and_variables_equal_arguments(kind, tmp_path):
    settings, expected = SETTINGS[kind]
    assert recipe_of([]) == AORecipeKwargs(pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
    of_file = LaunchConfiguration(mixed_precision="fp8", fp8_config=settings)
    words = ["--mixed_precision", "fp8"]
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--fp8_{name}", text.lower() if name == "backend" else text]
    place = tmp_path / "own.yaml"
    place.write_text("{}")
    arguments = parser("launch").parse_args(["--config_file", str(place), *words, "train.py"])
    of_options = configure(arguments)
    assert of_options.variables == of_file.variables
    write_file(place, of_file)
    again, _ = read_file(place)
    assert LaunchConfiguration(**again).fp8_config == of_file.fp8_config
    with patch_environment(**of_file.variables):
        assert recipe_of([]) == expected
    other = parser("launch").parse_args(
        ["--config_file", str(place), "--mixed_precision", "bf16", "train.py"]
    )
    assert configure(other).fp8_config is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fp8_config": {"backend": "torch"}}, "fp8_backend is 'TORCH'"),
        ({"fp8_config": {"fp8_pad": True}}, "Did you mean|fp8_pad_inner_dim"),
        ({"fp8_config": {"backend": "AO"}, "mixed_precision": "bf16"}, "must be 'fp8'"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        LaunchConfiguration(**settings)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "said"),
    [
        (TERecipeKwargs, {"fp8_format": "E4M4"}, ValueError, "fp8_format is 'E4M4'"),
        (TERecipeKwargs, {"amax_compute_algo": "min"}, ValueError, "'max', 'most_recent'"),
        (TERecipeKwargs, {"interval": 0}, ValueError, "interval is 0"),
        (TERecipeKwargs, {"override_linear_precision": (True,)}, TypeError, "three bools"),
        (AORecipeKwargs, {"config": {"emulate": True}}, TypeError, "Float8LinearConfig"),
        (AORecipeKwargs, {"module_filter_func": "head"}, TypeError, "must be a function"),
        (AORecipeKwargs, {"pad_inner_dim": "no"}, TypeError, "True or False"),
        (MSAMPRecipeKwargs, {"opt_level": "O3"}, ValueError, "opt_level is 'O3'"),
    ],
)
def test_recipes_check_themselves(kind, arguments, error, said):
    with pytest.raises(error, match=said):
        kind(**arguments)


def test_ms_amp_is_refused_by_name(monkeypatch):
    for recipe in (MSAMPRecipeKwargs(), FP8RecipeKwargs()):
        with pytest.raises(NotImplementedError, match=f"{type(recipe).__name__} needs MS-AMP"):
            Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(NotImplementedError, match="ACCELERATE_FP8_BACKEND=MSAMP needs MS-AMP"):
        Accelerator(cpu=True, mixed_precision="fp8")


def test_recipes_that_contradict_are_refused():
    with pytest.raises(ValueError, match="AORecipeKwargs and TERecipeKwargs; give one"):
        Accelerator(
            cpu=True,
            mixed_precision="fp8",
            kwargs_handlers=[AORecipeKwargs(), TERecipeKwargs()],
        )
    with pytest.raises(ValueError, match=r"holds AORecipeKwargs, but mixed_precision is 'bf16'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    for name in ("torchao", "torchao.float8", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"torchao, .*: pip install 'cadence-trainer\[fp8\]'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(ImportError, match=r"transformer_engine, which cannot be imported: .*CUDA"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    assert Accelerator(cpu=True).mixed_precision == "no"


# -- TransformerEngine, up to the calls of the library ---------------------------------------------


class _Library:
    """Records the calls that TransformerEngine gets, which needs CUDA to be built.

    Its recipes have the fields of the library's: later releases have fewer, and another autocast.
    """

    def __init__(self, monkeypatch: Any, release: int) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        package, common = ModuleType("transformer_engine"), ModuleType("common")
        scaling: Any = ModuleType("recipe")
        engine: Any = ModuleType("pytorch")
        package.__path__ = common.__path__ = []  # type: ignore[attr-defined] # as packages have
        scaling.Format = type("Format", (), {"HYBRID": "hybrid", "E4M3": "e4m3"})
        fields = ["margin", "fp8_format", "amax_history_len", "amax_compute_algo"]
        removed = ["interval", "override_linear_precision"] if release == 1 else []
        scaling.DelayedScaling = make_dataclass("DelayedScaling", [*fields, *removed])
        scaling.MXFP8BlockScaling = make_dataclass("MXFP8BlockScaling", fields[:2])
        engine.Linear = type("Linear", (nn.Linear,), {"__init__": _linear})
        name = "fp8_autocast" if release == 1 else "autocast"
        setattr(engine, name, lambda **kwargs: self.autocast(name, kwargs))
        for name_of, module in (
            ("", package),
            (".common", common),
            (".common.recipe", scaling),
            (".pytorch", engine),
        ):
            monkeypatch.setitem(sys.modules, f"transformer_engine{name_of}", module)
        package.common, package.pytorch = common, engine  # type: ignore[attr-defined] # submodules
        common.recipe = scaling  # type: ignore[attr-defined] # a submodule
        self.scaling = scaling

    def autocast(self, name: str, kwargs: dict[str, Any]) -> Any:
        self.calls.append((name, kwargs))
        return torch.autograd.profiler.record_function("fp8")


def _linear(self: Any, inside: int, outside: int, bias: bool, params_dtype: Any) -> None:
    nn.Linear.__init__(self, inside, outside, bias, dtype=params_dtype)


@pytest.mark.parametrize(
    ("release", "autocast", "argument"),
    [(1, "fp8_autocast", "fp8_recipe"), (2, "autocast", "recipe")],
)
def test_transformer_engine_gets_the_recipe_and_the_layers(
    monkeypatch, release, autocast, argument
):
    library = _Library(monkeypatch, release)
    recipe = TERecipeKwargs(amax_history_len=16)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.fp8_backend == FP8BackendType.TE
    assert accelerator.te_recipe_handler is recipe
    assert accelerator.ao_recipe_handler is None
    model = Net()
    weight = model.blocks[0].first.weight
    model = accelerator.prepare(model)
    model(X)
    with torch.no_grad():
        model(X)
    further = (1, (False, False, False)) if release == 1 else ()
    expected = library.scaling.DelayedScaling(0, "hybrid", 16, "most_recent", *further)
    assert library.calls == [
        (autocast, {"enabled": True, argument: expected}),
        (autocast, {"enabled": False, argument: expected}),
    ]
    linear = sys.modules["transformer_engine.pytorch"].Linear
    found = {name for name, part in model.named_modules() if type(part) is linear}
    assert found == INNER | {"first"}
    assert model.blocks[0].first.weight is weight


def test_transformer_engine_scales_blocks_and_refuses_options_that_it_has_removed(monkeypatch):
    library = _Library(monkeypatch, release=2)
    blocks = TERecipeKwargs(use_mxfp8_block_scaling=True, use_autocast_during_eval=True)
    layers = TransformerEngineLayers(blocks)
    with torch.no_grad(), layers.context():
        pass
    expected = library.scaling.MXFP8BlockScaling(0, "hybrid")
    assert library.calls == [("autocast", {"enabled": True, "recipe": expected})]
    with pytest.raises(ValueError, match="interval is 2, but the installed transformer_engine"):
        TransformerEngineLayers(TERecipeKwargs(interval=2))
    with pytest.raises(NotImplementedError, match="recipe 'TE' is not supported with FSDP"):
        layers.gather_in_fp8(Net())
