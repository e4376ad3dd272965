"""A GPT of megatron-core, divided over processes, trains as one process does, and resumes."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import signal
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, GradientNormMonitor, ModelCheckpoint
from tests.helpers.megatron import cuda_on_cpu, gpt
from tests.helpers.ranks import RankError
from trainer import Accelerator, MegatronLMPlugin, Preempted, Trainer, TrainModule
from trainer.checkpoint.serialization import read_tensors
from trainer.checkpoint.sharded_state import TensorFile
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.weights import load_weights
from trainer.errors import CheckpointError
from trainer.tree import gathered, map_tree
from trainer.utils import MegatronLMDummyScheduler, patch_environment

generator = torch.Generator().manual_seed(0)
FIRST = torch.randint(0, 32, (44, 1), generator=generator)
TOKENS = (FIRST + 3 * torch.arange(9)) % 32  # sequences that can be learnt
DATA = TensorDataset(TOKENS)
MASK = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
PLACES = torch.arange(8)

# By name: processes and what the plugin gets.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_degree": 2}),
    "tp2, cut": (2, {"tp_degree": 2, "num_micro_batches": 3}),
    "dp2": (2, {}),
    "pp2": (2, {"pp_degree": 2, "num_micro_batches": 3}),
    "pp2, dp2": (4, {"pp_degree": 2, "num_micro_batches": 2, "seq_length": 8}),
    "tp2, pp2": (4, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_this_file(ranks):
    """megatron-core never frees its groups, whose threads would slow all later tests."""
    yield
    for size in (2, 4):
        ranks(size).kill()


class Net(TrainModule):
    """A language model whose loss is a mean over the tokens above 3."""

    options: dict[str, Any] = {}
    plugin: MegatronLMPlugin | None = None
    precision = "no"

    def configure_model(self) -> None:
        if not hasattr(self, "model"):  # it is called before predict too
            arguments = self.plugin.transformer_arguments(self.precision) if self.plugin else {}
            self.model = gpt(arguments, **self.options)

    def losses(self, tokens: Tensor) -> Tensor:
        places = PLACES.expand(len(tokens), -1)
        given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return self.model(given, places, MASK, labels=wanted)

    def count_items(self, batch: Any) -> Tensor:
        return (batch[0][:, 1:] > 3).sum()

    def mean(self, tokens: Tensor) -> Tensor:
        kept = tokens[:, 1:] > 3
        return (self.losses(tokens) * kept).sum() / kept.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch[0])
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/epoch_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.mean(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.losses(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class State(Callback):
    """Keeps the whole weights at the end of a fit; rank 0's alone."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = trainer.accelerator.get_state_dict(module)
        self.weights = {name: each for name, each in whole.items() if each is not None}


def fit(
    folder: Path,
    layout: dict[str, Any] | None = None,
    kind: type[Net] = Net,
    data: Any = DATA,
    batch: int = 8,
    returns_module: bool = False,
    **options: Any,
) -> Any:
    """Train on batches that are as large over all replicas; without a layout on one process."""
    from megatron.core import parallel_state, tensor_parallel

    given = None
    if layout is None:  # the engine of one device
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        given = MegatronLMPlugin(**{"gradient_clipping": 0.0, **layout})
    state, resumes = State(), options.pop("ckpt_path", None)
    shuffle, more = options.pop("shuffle", False), options.pop("callbacks", ())
    options = {"max_epochs": 1, "checkpointing": False, "log_every": 1, "seed": 3, **options}
    own = Trainer(
        cpu=True,
        progress_bar=False,
        project_dir=folder,
        megatron_lm_plugin=given,
        callbacks=[state, *more],
        **options,
    )
    model = kind()
    model.plugin, model.precision = given, options.get("mixed_precision", "no")
    each = batch // own.accelerator.engine.parallel.dp_size
    loaders = DataLoader(data, each, shuffle=shuffle), DataLoader(data, each)
    own.fit(model, *loaders, ckpt_path=resumes)
    if returns_module:
        return model
    metrics = {name: float(value) for name, value in own.callback_metrics.items()}
    predicted = None
    if options.get("max_steps") is None:
        predicted = own.predict(model, DataLoader(TensorDataset(TOKENS[:5]), each))
        predicted = predicted and torch.cat(predicted)
    return state.weights, metrics, predicted, own.skipped_updates


def run(*args: Any, **kwargs: Any) -> Any:
    with cuda_on_cpu():
        return fit(*args, **kwargs)


def assert_equal(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Assert that rank 0 has these weights and predictions, and all ranks these metrics."""
    torch.testing.assert_close(found[0][0], expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[0][2], expected[2], rtol=0, atol=10 * tolerance)
    for each in found:
        assert each[1] == pytest.approx(expected[1], abs=tolerance, nan_ok=True)
        assert each[3] == expected[3]


@pytest.mark.parametrize("layout", ["tp2", "tp2, cut", "pp2, dp2"])
def test_training_equals_one_process_on_whole_batches(ranks, layout, tmp_path):
    processes, given = LAYOUTS[layout]
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    (expected,) = ranks(1)(lambda: run(tmp_path / "one", **options))
    found = ranks(processes)(lambda: run(tmp_path / "many", given, **options))
    assert_equal(found, expected)


class Tied(Net):
    """The output shares the embedding's weights; gated layers; a buffer outside the model."""

    options = {"tied": True, "gated_linear_unit": True, "add_bias_linear": False}

    def configure_model(self) -> None:
        super().configure_model()
        self.register_buffer("scale", torch.tensor([0.75, 1.25]))

    def losses(self, tokens: Tensor) -> Tensor:
        return super().losses(tokens) * self.scale.mean()


class Nan(Net):
    """The second update's loss is NaN, on the second replica or everywhere."""

    def mean(self, tokens: Tensor) -> Tensor:
        loss = super().mean(tokens)
        return loss * float("nan") if (tokens[:, 0] == TOKENS[12, 0]).any() else loss


class Plain(Net):
    """A mean over sequences, as the loop weighs batches by default."""

    count_items = TrainModule.count_items

    def mean(self, tokens: Tensor) -> Tensor:
        return self.losses(tokens).mean()


class Changing(Net):
    """A buffer that each step replaces, a second name of the layers, and gradients of a hook.

    Weights that are frozen at first are trained, and a hook changes the gradients of an update.
    """

    def configure_model(self) -> None:
        super().configure_model()
        self.layers = self.model.decoder
        self.register_buffer("calls", torch.zeros(()))
        for parameter in self.layers.parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.requires_grad_(True)
        return super().configure_optimizers()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        sum(parameter.sum() for parameter in self.parameters()).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            getattr(parameter, "main_grad", parameter.grad).mul_(0.5)

    def on_train_step_end(self) -> None:
        self.calls = self.calls + 1


class Skips(Net):
    """The second and third batches are skipped, which one update is made of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (2, 3) else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        (Changing, "pp2", {}),
        (Skips, "tp2", {"gradient_accumulation_steps": 2}),
        (Tied, "tp2, pp2", {"gradient_accumulation_steps": 5}),
        (Plain, "pp2", {"max_grad_norm": 0.1}),
        (Nan, "pp2", {"non_finite": "skip"}),
    ],
)
def test_other_models_and_losses_equal_one_process(ranks, kind, layout, options, tmp_path):
    processes, given = LAYOUTS[layout]
    (expected,) = ranks(1)(lambda: run(tmp_path / "one", kind=kind, **options))
    found = ranks(processes)(lambda: run(tmp_path / "many", given, kind, **options))
    assert_equal(found, expected)


class Sensitive(Net):
    """A layer that computes otherwise under autocast, as some do on CUDA alone."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(self.changed)

    @staticmethod
    def changed(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * 2, output[1]) if torch.is_autocast_enabled("cpu") else output


def test_bfloat16_training_updates_float32_weights(ranks2, ranks, tmp_path):
    (expected,) = ranks(1)(lambda: run(tmp_path / "one"))
    layout = LAYOUTS["pp2"][1]
    half = {"kind": Sensitive, "mixed_precision": "bf16"}
    found = ranks2(lambda: run(tmp_path / "many", layout, **half))
    torch.testing.assert_close(found[0][0], expected[0], rtol=0, atol=3e-2)
    assert {each.dtype for each in found[0][0].values()} == {torch.float32}
    again = {"recompute_granularity": "full", "recompute_method": "uniform"}
    layout = {**layout, **again, "recompute_num_layers": 1}
    same = ranks2(lambda: run(tmp_path / "again", layout, **half))
    torch.testing.assert_close(same[0][0], found[0][0], rtol=0, atol=0)


class Draws(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.drawn = float(torch.rand(()))
        return super().training_step(batch, batch_idx)


class Drawn(Callback):
    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.numbers.append(trainer.drawn)


def test_stages_draw_the_same_numbers_without_a_seed(ranks2, tmp_path):
    def numbers() -> list[float]:
        torch.manual_seed(dist.get_rank())
        drawn, layout = Drawn(), LAYOUTS["pp2"][1]
        run(tmp_path, layout, Draws, callbacks=[drawn], seed=None, max_steps=1)
        return drawn.numbers

    first, second = ranks2(numbers)
    assert first == second
    assert len(first) == 1


# -- checkpoints --------------------------------------------------------------------------------


class Dropout(Tied):
    """With dropout and AdamW, so that a resumed run needs all of its state."""

    options = {**Tied.options, "hidden_dropout": 0.1, "attention_dropout": 0.1}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_resumed_bfloat16_run_is_bit_identical(ranks, layout, tmp_path):
    processes, given = LAYOUTS[layout]
    options = {"checkpointing": True, "shuffle": True, "mixed_precision": "bf16"}
    options |= {"max_epochs": None, "num_sanity_val_steps": 0}

    def train(name: str, steps: int, **more: Any) -> Any:
        where = tmp_path / name
        return ranks(processes)(
            lambda: run(where, given, Dropout, max_steps=steps, **options, **more)
        )

    whole = train("whole", 8)[0]
    train("cut", 3)
    found = train("cut", 8, ckpt_path="auto")[0]
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    files = {file.suffix for file in (tmp_path / "cut").rglob("step-*/*")}
    assert files == {".json", ".safetensors"}


class GeneratorStates(Callback):
    """Notes the states of the generator that megatron-core draws dropout from."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def note(self, *_: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self.states.append(get_cuda_rng_tracker().get_states()["model-parallel-rng"])

    on_train_start = on_train_batch_end = on_train_epoch_end = note


def test_a_dummy_batch_draws_nothing_from_the_generators_of_megatron_core(ranks2, tmp_path):
    def generators() -> list[Tensor]:
        states, data = GeneratorStates(), TensorDataset(TOKENS[:9])
        run(tmp_path, LAYOUTS["dp2"][1], Dropout, data=data, callbacks=[states])
        return states.states

    first, second = ranks2(generators)
    assert (len(first), len(second)) == (4, 3)  # rank 1 has no second batch
    begun, after_its_batch, after_epoch = second
    assert not torch.equal(begun, after_its_batch)
    assert torch.equal(after_its_batch, after_epoch)


class Terminated(Dropout):
    """One process receives SIGTERM in the fourth update."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 1 and self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_process_saves_and_stops_all(ranks2, tmp_path):
    layout, options = LAYOUTS["pp2"][1], {"checkpointing": True, "shuffle": True}

    def preempted() -> Any:
        whole = run(tmp_path / "whole", layout, Dropout, **options)
        with pytest.raises(Preempted) as ended:
            run(tmp_path / "cut", layout, Terminated, **options)
        saved = [path.name for path in (tmp_path / "cut" / "checkpoints").glob("step-*")]
        again = run(tmp_path / "cut", layout, Dropout, ckpt_path="auto", **options)
        return ended.value.code, saved, whole, again

    for code, saved, whole, again in ranks2(preempted):
        assert (code, saved) == (143, ["step-00000004"])
        torch.testing.assert_close(again, whole, rtol=0, atol=0)


class Adam(Tied):
    configure_optimizers = Dropout.configure_optimizers


def test_a_run_resumes_on_other_layouts(ranks, ranks2, tmp_path):
    def train(name: str, epochs: int, layout: Any, **more: Any) -> Any:
        options = {"max_epochs": epochs, "checkpointing": True, **more}
        return run(tmp_path / name, layout, Adam, **options)

    tp2, pp2, dp2 = (LAYOUTS[name][1] for name in ("tp2", "pp2", "dp2"))
    ranks2(lambda: train("tp2", 1, tp2))
    ranks(1)(lambda: train("one", 1, {}))
    (expected,) = ranks(1)(lambda: train("whole", 2, {}))
    for name, layout in [("tp2", pp2), ("one", tp2), ("tp2", dp2)]:
        copy = f"{name} on {layout}"
        shutil.copytree(tmp_path / name, tmp_path / copy)
        found = ranks2(lambda: train(copy, 2, layout, ckpt_path="auto"))  # noqa: B023 - at once
        assert_equal(found, expected, 1e-4)


class Whole(Callback):
    """Gathers all tensors at the start and at the end."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        weights = trainer.accelerator.get_state_dict(module)
        state = map_tree(gathered, trainer.optimizers[0].state_dict()["state"])
        self.tensors.append(deepcopy([weights, state]))

    on_train_end = on_train_start


def test_every_tensor_is_equal_on_another_layout(ranks, tmp_path):
    def tensors(layout: str, name: str, **more: Any) -> Any:
        processes, options = LAYOUTS.get(layout, (1, {}))

        def fit() -> Any:
            whole = Whole()
            precision = {"mixed_precision": "bf16"}
            run(tmp_path / name, options, Adam, callbacks=[whole], **precision, **more)
            return whole.tensors

        return ranks(processes)(fit)[0]

    ways = ("tp2", "pp2"), ("one", "tp2, pp2"), ("tp2, pp2", "dp2")
    for number, (saved, loaded) in enumerate(ways):
        name = f"{number}"
        _, expected = tensors(saved, name, max_steps=2, checkpointing=True)
        batch = 16 if loaded == "dp2" else 8  # of both replicas
        found, _ = tensors(loaded, name, batch=batch, max_steps=3, ckpt_path="auto")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        dtypes = {value.dtype for value in found[0].values() if value is not None}
        assert dtypes == {torch.float32}


def test_saved_weights_are_evaluated_on_another_layout(ranks, ranks2, tmp_path):
    def trainer(layout: dict[str, Any]) -> tuple[Trainer, Net]:
        plugin = MegatronLMPlugin(**layout)
        own = Trainer(
            cpu=True,
            progress_bar=False,
            project_dir=tmp_path,
            max_epochs=1,
            seed=3,
            megatron_lm_plugin=plugin,
        )
        model = Tied()
        model.plugin = plugin
        return own, model

    def train() -> float:
        with cuda_on_cpu():
            own, model = trainer(LAYOUTS["tp2"][1])
            own.fit(model, DataLoader(DATA, 8), DataLoader(DATA, 8))
        return float(own.callback_metrics["val/loss"])

    def validate() -> float:
        with cuda_on_cpu():
            own, model = trainer(LAYOUTS["pp2"][1])
            path = next((tmp_path / "checkpoints").glob("step-*"))
            return own.validate(model, DataLoader(DATA, 8), ckpt_path=path)[0]["val/loss"]

    trained = ranks2(train)
    assert ranks2(validate) == pytest.approx(trained, abs=1e-6)


def test_a_run_starts_with_saved_weights_on_another_layout(ranks2, tmp_path):
    def weights(layout: str, **options: Any) -> Any:
        return run(tmp_path / layout, LAYOUTS[layout][1], Tied, mixed_precision="bf16", **options)

    saving = ModelCheckpoint(save_weights_only=True)
    trained = ranks2(lambda: weights("tp2", callbacks=[saving]))[0][0]
    (path,) = (tmp_path / "tp2" / "checkpoints").glob("step-*")
    started = ranks2(lambda: weights("pp2", ckpt_path=path, max_epochs=0))[0][0]
    torch.testing.assert_close(started, trained, rtol=0, atol=0)


class Late(Changing):
    """Registers a buffer when training starts; a resumed run has it before its weights."""

    def on_train_start(self) -> None:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.tensor([0.0, 1.0, 2.0]))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.register_buffer("late", torch.zeros(3))

    def on_train_step_end(self) -> None:
        super().on_train_step_end()
        self.late += 0.5


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_checkpoints_have_late_buffers_and_each_weight_once(ranks, ranks2, layout, tmp_path):
    given = LAYOUTS[layout][1]

    def train(name: str, layout: Any, steps: int, **more: Any) -> Any:
        options = {"checkpointing": True, "max_epochs": None, "max_steps": steps, **more}
        return run(tmp_path / name, layout, Late, **options)

    ranks(1)(lambda: train("one", None, 3))
    ranks2(lambda: train("cut", given, 3))
    (one,) = (tmp_path / "one" / "checkpoints").glob("step-*")
    (cut,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
    merged = tmp_path / "merged.safetensors"
    merge_weights(cut, merged)
    expected, found = (read_tensors(path) for path in (one / "model.safetensors", merged))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    assert found[1] == expected[1]  # the other names of the layers
    assert any(name.startswith("layers.") for name in found[1])
    torch.testing.assert_close(found[0]["late"], torch.tensor([1.5, 2.5, 3.5]), rtol=0, atol=0)
    stored = [name for file in cut.glob("shard-*") for name in TensorFile(file).parts]
    again = [name for name in stored if name.startswith("layers.")]
    assert all(name.endswith("_extra_state") for name in again)

    whole = ranks2(lambda: train("whole", given, 5))[0]
    again = ranks2(lambda: train("cut", given, 5, ckpt_path="auto"))[0]
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


class Counts(torch.nn.Module):
    """Has an extra state and a buffer, which are not divided."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.number, self.steps = first, 0
        self.register_buffer("total", torch.tensor(1.0 + first))

    def get_extra_state(self) -> Any:
        return {"number": self.number, "steps": self.steps, "tensor": torch.arange(self.steps)}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.number = state["steps"], state["number"]


class WithExtraStates(Net):
    """Modules with extra states: outside the model, in all stages, and in each layer."""

    first = 0  # what they begin with, as a run that goes on has it

    def configure_model(self) -> None:
        super().configure_model()
        self.counts, self.model.counts = Counts(self.first), Counts(self.first + 10)
        for layer in self.model.decoder.layers:
            layer.counts = Counts(self.first + 100 * layer.layer_number)

    def count(self) -> None:
        for part in self.modules():
            if isinstance(part, Counts):
                part.steps, part.total = part.steps + 1, part.total * 2

    def on_train_step_end(self) -> None:
        self.count()


class OtherExtraStates(WithExtraStates):
    first = 1000


def extra_states(module: Any) -> dict[str, Any]:
    """The numbers of the modules by their names in the whole model."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, Counts):
            parent = module.get_submodule(name.rpartition(".")[0])
            number = getattr(parent, "layer_number", None)
            found[name if number is None else f"layer {number}"] = (part.number, part.steps)
    return found


def test_extra_states_and_buffers_come_back_on_another_layout(ranks, tmp_path):
    def states(layout: str, name: str, kind: type[Net], **more: Any) -> Any:
        processes, given = LAYOUTS.get(layout, (1, None))
        steps = {"max_epochs": None, "checkpointing": True, **more}

        def body() -> Any:
            with cuda_on_cpu():
                module = fit(tmp_path / name, given, kind, returns_module=True, **steps)
                return extra_states(module)

        return ranks(processes)(body)

    numbers = {"counts": 0, "model.counts": 10, **{f"layer {n}": 100 * n for n in range(1, 5)}}
    for number, (saved, loaded) in enumerate(
        [("pp2", "tp2"), ("tp2", "pp2"), ("one", "tp2, pp2"), ("tp2, pp2", "one")]
    ):
        name = str(number)
        states(saved, name, WithExtraStates, max_steps=2)
        merged = tmp_path / f"{name}.safetensors"
        merge_weights(next((tmp_path / name / "checkpoints").glob("step-*")), merged)
        written = load_weights(merged)
        batch = 16 if loaded == "dp2" else 8
        found = states(loaded, name, OtherExtraStates, batch=batch, max_steps=3, ckpt_path="auto")
        for of_rank in found:
            assert of_rank == {name: (numbers[name], 3) for name in of_rank}
        assert {name for of_rank in found for name in of_rank} == numbers.keys()
        extra = {n: each for n, each in written.items() if n.endswith("counts._extra_state")}
        assert len(extra) == 6
        for key, value in extra.items():
            assert value["steps"] == 2
            torch.testing.assert_close(value["tensor"], torch.arange(2))
            total = written[key.replace("_extra_state", "total")]
            torch.testing.assert_close(total, torch.tensor(4.0 * (1 + value["number"])))
        assert {each["number"] for each in extra.values()} == set(numbers.values())


def test_whole_weights_have_what_several_stages_have_once(ranks2, tmp_path):
    found, *_ = ranks2(lambda: run(tmp_path, LAYOUTS["pp2"][1], WithExtraStates, max_steps=2))[0]
    totals = {name: float(each) for name, each in found.items() if name.endswith("total")}
    assert totals == {
        "counts.total": 4.0,
        "model.counts.total": 44.0,
        **{f"model.decoder.layers.{n}.counts.total": 4.0 + 400 * (n + 1) for n in range(4)},
    }
    assert found["model.counts._extra_state"]["number"] == 10


def test_extra_states_come_back_in_an_own_loop(ranks2, tmp_path):
    def numbers() -> Any:
        with cuda_on_cpu():
            plugin = MegatronLMPlugin(tp_degree=2)
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
            model = gpt(plugin.transformer_arguments())
            model.counts = Counts(5)
            model.counts.steps = 7
            prepared = accelerator.prepare(model)
            accelerator.save_state(tmp_path / "state")
            accelerator.save_model(prepared, tmp_path / "model")
            model.counts.steps = 0
            accelerator.load_state(tmp_path / "state")
            return model.counts.steps, load_weights(tmp_path / "model")["counts._extra_state"]

    for steps, written in ranks2(numbers):
        assert (steps, written["number"], written["steps"]) == (7, 5, 7)


class PartlyFrozen(Net):
    """Frozen weights in groups, of which the second stage has none of the first; other buffers."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.decoder.layers:
            layer.requires_grad_(layer.layer_number != 1)
            if layer.layer_number != 4:  # so that the stages have different numbers of them
                layer.register_buffer("mask", torch.ones(layer.layer_number), persistent=False)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        embeddings = [parameter for name, parameter in named if "embedding" in name]
        others = [parameter for name, parameter in named if "embedding" not in name]
        groups = [{"params": embeddings, "lr": 0.1}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


@pytest.mark.parametrize(("saved", "loaded"), [("one", "pp2"), ("pp2", "one"), ("pp2", "tp2")])
def test_frozen_weights_keep_the_numbers_that_one_process_gives(ranks, saved, loaded, tmp_path):
    def train(layout: str, name: str, steps: int, **more: Any) -> Any:
        processes, given = LAYOUTS.get(layout, (1, None))
        options = {"max_epochs": None, "checkpointing": True, "max_steps": steps, **more}
        return ranks(processes)(lambda: run(tmp_path / name, given, PartlyFrozen, **options))[0][0]

    train(saved, "cut", 3)
    expected = train(saved, "whole", 6)
    found = train(loaded, "cut", 6, ckpt_path="auto")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Unsavable(WithExtraStates):
    """Rank 1 cannot give an extra state."""

    def get_extra_state(self) -> None:
        if dist.get_rank() == 1 and self.trainer.global_step == 2:
            raise OSError("no extra state")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_an_extra_state_that_fails_on_one_process_stops_all(ranks2, layout, tmp_path):
    def stopped() -> str:
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path, LAYOUTS[layout][1], Unsavable, max_steps=2, checkpointing=True)
        return str(caught.value)

    for message in ranks2(stopped):
        assert "on rank 1: OSError('no extra state')" in message


class Averaged(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), 1e-3)  # a state without dimensions


class Moves(Callback):
    """Loads the optimizer's state where the weights are on another device."""

    devices: Any = None

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        engine, (optimizer,) = trainer._fit.engine, trainer.optimizers
        state, masters = optimizer.state_dict(), engine._masters
        engine._masters = {key: each.to("meta") for key, each in engine._masters.items()}
        engine.load_optimizer_state_dict(optimizer.optimizer, state)
        (self.devices,) = {
            (values["step"].device.type, values["mu_product"].device.type)
            for values in engine._twin.state.values()
        }
        engine._masters = masters


def test_a_loaded_state_goes_to_its_weights_and_the_model_is_left_as_it_was(ranks, tmp_path):
    def devices() -> Any:
        moves = Moves()
        module = run(tmp_path, {}, Averaged, callbacks=[moves], max_steps=1, returns_module=True)
        with cuda_on_cpu():
            module.losses(TOKENS[:2]).mean().backward()
        parameters = list(module.parameters())
        assert not any(hasattr(each, "main_grad") for each in parameters)
        assert all(each.grad is not None for each in parameters)
        return moves.devices

    assert ranks(1)(devices) == [("cpu", "meta")]


# -- bad numbers, schedules, loops of your own --------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_nan_loss_stops_all_ranks(ranks2, layout, tmp_path):
    def stopped() -> str:
        with pytest.raises(FloatingPointError) as caught:
            run(tmp_path, LAYOUTS[layout][1], Nan)
        return str(caught.value)

    for message in ranks2(stopped):
        assert "step 2" in message or "update 2" in message


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters()), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}

    def on_train_step_end(self) -> None:
        group = self.optimizers().param_groups[0]
        self.seen = [*getattr(self, "seen", ()), (group["lr"], group["weight_decay"])]


def test_the_plugin_schedule_ticks_once_per_update(ranks2, tmp_path):
    def rates() -> Any:
        kept: list[Any] = []

        class Kept(Scheduled):
            def on_train_end(self) -> None:
                kept.extend(self.seen)

        plugin = {
            "pp_degree": 2,
            "num_micro_batches": 2,
            "min_lr": 0.02,
            "end_weight_decay": 0.3,
            "start_weight_decay": 0.1,
            "weight_decay_incr_style": "linear",
        }
        run(tmp_path, plugin, Kept)
        return kept

    # Linear to 0.1 in 2 updates, then linear to 0.02 at the 6th.
    lrs = [0.05, 0.1, 0.08, 0.06, 0.04, 0.02]
    decays = [0.1 + 0.2 * step / 6 for step in range(1, 7)]
    for found in ranks2(rates):
        assert [lr for lr, _ in found] == pytest.approx(lrs)
        assert [decay for _, decay in found] == pytest.approx(decays)


def test_in_an_own_loop_each_update_advances_the_plugins_schedule(ranks2):
    def rates() -> list[float]:
        with cuda_on_cpu():
            plugin = MegatronLMPlugin(min_lr=0.02)
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
            model = gpt(plugin.transformer_arguments())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            # As scripts for Accelerate count: batches of both processes.
            schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            found = []
            for _ in range(6):
                places = PLACES.expand(2, -1)
                labels = TOKENS[:2, 1:].contiguous()
                losses = model(TOKENS[:2, :-1].contiguous(), places, MASK, labels=labels)
                accelerator.backward(losses.mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                found += schedule.get_last_lr()
            return found

    for found in ranks2(rates):
        assert found == pytest.approx([0.05, 0.1, 0.08, 0.06, 0.04, 0.02])


def train_by_hand(layout: dict[str, Any], folder: Path, steps: range) -> Any:
    """Train with an Accelerator, in windows of two batches."""
    with cuda_on_cpu():
        plugin = MegatronLMPlugin(**{"gradient_clipping": 0.0, **layout})
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            scheduler_tick="update",
            megatron_lm_plugin=plugin,
        )
        model = gpt(plugin.transformer_arguments())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
        loader = DataLoader(TensorDataset(TOKENS[:40]), 4 // accelerator.engine.parallel.dp_size)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if steps.start:
            accelerator.load_state(folder)
        norms = []
        for step, (tokens,) in enumerate(loader):
            if step not in steps:
                continue
            with accelerator.accumulate(model):
                places = PLACES.expand(len(tokens), -1)
                losses = model(
                    tokens[:, :-1].contiguous(), places, MASK, labels=tokens[:, 1:].contiguous()
                )
                accelerator.backward(losses.mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        accelerator.save_model(model, folder / "model", max_shard_size=4000)
        return accelerator.get_state_dict(model), norms, str(accelerator.distributed_type)


def test_a_custom_loop_with_tensor_parallelism_trains_saves_and_resumes(ranks2, ranks, tmp_path):
    given = LAYOUTS["tp2"][1]
    (expected,) = ranks(1)(lambda: train_by_hand({}, tmp_path / "one", range(10)))
    found = ranks2(lambda: train_by_hand(given, tmp_path / "two", range(10)))
    for folder, (weights, *_) in (("one", expected), ("two", found[0])):
        files = sorted((tmp_path / folder / "model").glob("*.safetensors"))
        assert len(files) > 5
        saved = {name: each for file in files for name, each in load_weights(file).items()}
        torch.testing.assert_close(saved, weights, rtol=0, atol=0)
    torch.testing.assert_close(found[0][0], expected[0], rtol=0, atol=2e-5)
    assert found[0][1] == pytest.approx(expected[1], abs=1e-6)
    assert found[0][2] == "DistributedType.MEGATRON_LM"
    ranks2(lambda: train_by_hand(given, tmp_path / "cut", range(4)))
    again = ranks2(lambda: train_by_hand(given, tmp_path / "cut", range(4, 10)))
    torch.testing.assert_close(again[0][0], found[0][0], rtol=0, atol=0)


def test_the_example_trains_and_resumes_on_another_layout(ranks2, tmp_path):
    path = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"
    words = ["--project-dir", str(tmp_path / "run"), "--save-every", "2", "--max-steps"]

    def example(steps: int, **variables: str) -> None:
        namespace = runpy.run_path(str(path))
        texts = (torch.arange(65) + torch.arange(64)[:, None]) % 96 + 32
        data = TensorDataset(texts), TensorDataset(texts[:8])
        namespace["main"].__globals__["load_data"] = lambda: data
        make = namespace["main"].__globals__["Trainer"]
        quiet = partial(make, cpu=True, progress_bar=False)
        namespace["main"].__globals__["Trainer"] = quiet
        with cuda_on_cpu(), patch_environment(**variables):
            namespace["main"]([*words, str(steps)])

    stages = {"MEGATRON_LM_PP_DEGREE": "2", "MEGATRON_LM_NUM_MICRO_BATCHES": "4"}
    ranks2(lambda: example(2, **stages))
    ranks2(lambda: example(4, MEGATRON_LM_TP_DEGREE="2"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "val/loss" in record]
    assert [record["step"] for record in records] == [2, 4]
    first, second = (record["val/loss"] for record in records)
    assert second < first < 1.05 * math.log(128)  # that of guesses is log(128)


# -- what cannot work is refused ----------------------------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Outside(Net):
    def configure_model(self) -> None:
        super().configure_model()
        self.head = torch.nn.Linear(2, 2)


class Two(Net):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], 0.1), torch.optim.SGD(others, 0.1)


class Adafactor(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Twice(Net):
    def mean(self, tokens: Tensor) -> Tensor:
        return super().mean(tokens) + super().mean(tokens)


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


class Free(Net):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), 0.1)


class Gathers(Net):
    def mean(self, tokens: Tensor) -> Tensor:
        return self.trainer.accelerator.gather(super().mean(tokens)).mean()


class Fails(Net):
    """On one stage alone."""

    last = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.last:
            self.mean(batch[0])
        if self.last or self.model.pre_process:
            raise KeyError("of one stage")
        return self.mean(batch[0])


class FailsFirst(Fails):
    last = False


class FailsEvaluation(Net):
    """In the layers of the first stage."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.model.pre_process:
            self.model.embedding.forward = None
        super().validation_step(batch, batch_idx)


class Rounds(Net):
    def count_items(self, batch: Any) -> int:
        return len(batch[0]) // 3


class Shares(Net):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.ones(3)]


class Without(Net):
    def configure_model(self) -> None:
        self.model = torch.nn.Linear(2, 2)


REFUSED: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], str]] = {
    "manual": (Manual, {}, {}, "automatic_optimization = False, but megatron-core"),
    "parameters outside": (Outside, {}, {}, "head.weight, head.bias are trained, but are outside"),
    "no model": (Without, {}, {}, "Without has none of the models of megatron-core"),
    "optimizers": (Two, {}, {}, "megatron-core takes one optimizer"),
    "Adafactor": (Adafactor, {}, {}, "Adafactor cannot update the parts"),
    "schedule-free": (Free, {}, {}, "ScheduleFree uses different weights for evaluation"),
    "collectives": (
        Gathers,
        LAYOUTS["pp2"][1],
        {},
        "gather is called in training_step, but with pp_degree above 1",
    ),
    "an error of the last stage": (
        Fails,
        LAYOUTS["pp2"][1],
        {},
        "Rank 1 failed while the others waited for it: KeyError: 'of one stage'",
    ),
    "an error of the first stage": (
        FailsFirst,
        LAYOUTS["pp2"][1],
        {},
        "Rank 0 failed while the others waited for it: KeyError: 'of one stage'",
    ),
    "an error of a stage in an evaluation": (
        FailsEvaluation,
        LAYOUTS["pp2"][1],
        {},
        "Rank 0 failed while the others waited for it: TypeError: 'NoneType' object is not call",
    ),
    "sequence length": (
        Net,
        {"pp_degree": 2, "seq_length": 4},
        {},
        "seq_length of megatron_lm_plugin is 4, but a micro-batch goes",
    ),
    "items": (Rounds, {"num_micro_batches": 2}, {}, "count_items gave 1 for a batch, but 0, 0"),
    "shared tensors": (Shares, {"num_micro_batches": 2}, {}, "which must be the same for all"),
    "schedule": (Net, {"lr_decay_iters": 5}, {}, "has lr_decay_iters, but there is no scheduler"),
    "gradients read": (
        Net,
        {},
        {"callbacks": [GradientNormMonitor()]},
        "GradientNormMonitor reads",
    ),
    "fp16": (Net, {}, {"mixed_precision": "fp16"}, "does not support mixed_precision='fp16'"),
    "the model's sizes": (
        type("Small", (Net,), {"options": {"tensor_model_parallel_size": 1}}),
        {"tp_degree": 2},
        {},
        "tensor_model_parallel_size is 1, not 2",
    ),
    "sizes": (Net, {"tp_degree": 3}, {}, "whose product must divide the number of processes"),
    "two calls": (Twice, {"num_micro_batches": 2}, {}, "called the GPTModel 2 times"),
    "fields": (
        Net,
        {"use_distributed_optimizer": True, "eval_iters": 5, "lr_mult": 2.0},
        {},
        re.escape("use_distributed_optimizer=True (use fsdp_plugin")
        + ".*lr_mult=2.0.*eval_iters=5 .use limit_val_batches",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_features_are_refused_by_name(ranks2, what, tmp_path):
    kind, layout, options, message = REFUSED[what]
    if what == "the model's sizes":
        layout = {"tp_degree": 2}
    with pytest.raises(RankError, match=message) as caught:
        ranks2(lambda: run(tmp_path, layout, kind, **options))
    assert "still waiting" not in str(caught.value)


def test_it_needs_cuda(ranks2):
    with pytest.raises(RankError, match=r"trains on CUDA devices, but this run uses 'cpu'"):
        ranks2(lambda: Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()) and None)
