"""Training on DeepSpeed's ZeRO equals that of one process on the whole batches, and resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM

from callbacks import (
    Callback,
    GradientNormMonitor,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
)
from tests.distributed.test_fsdp import X, Y
from tests.distributed.test_fsdp_promises import (
    Net,
    optimized,
    rank,
)
from tests.distributed.test_transformers_models import llama
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ParallelismConfig,
    Trainer,
    TrainModule,
    load_checkpoint_in_model,
    tree,
)
from trainer.checkpoint.serialization import read_tensors
from trainer.checkpoint.weights import load_weights, save_model
from trainer.cli import main
from trainer.state import AcceleratorState
from trainer.utils import DummyOptim, DummyScheduler, patch_environment

DATA = TensorDataset(X, Y)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plugin(stage: int, **options: Any) -> DeepSpeedPlugin:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # else the parameters of a model so small stay whole
        zero |= {"stage3_param_persistence_threshold": 0}
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {**zero, **options}})


class State(Callback):
    """Keeps whole weights, and the optimizer's whole state, of the end of a fit on rank 0."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.optimizer: dict[str, Any] = {}

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.weights = trainer.accelerator.get_state_dict(module)
        state = tree.map_tree(tree.gathered, trainer.optimizers[0].state_dict()["state"])
        self.optimizer = state if trainer.global_rank == 0 else {}


def fit(
    folder: Path,
    stage: int | None = None,
    module: type[Net] = Net,
    data: Any = DATA,
    **options: Any,
) -> Any:
    """Train on batches that are as large over all processes; return rank 0's state."""
    given = options.pop("plugin", None if stage is None else plugin(stage))
    batch, resumes = options.pop("batch", 8), options.pop("ckpt_path", None)
    shuffle = options.pop("shuffle", False)
    options = {"max_epochs": 1, "checkpointing": False, "log_every": 1, "seed": 3, **options}
    state, model = State(), module()
    own = Trainer(
        cpu=True,
        progress_bar=False,
        project_dir=folder,
        deepspeed_plugin=given,
        callbacks=[state, *options.pop("callbacks", ())],
        **options,
    )
    own.fit(
        model,
        DataLoader(data, batch // world(), shuffle=shuffle),
        DataLoader(data, batch // world()),
        ckpt_path=resumes,
    )
    metrics = {name: float(value) for name, value in own.callback_metrics.items()}
    return state.weights, metrics, state.optimizer, own.skipped_updates


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Assert that rank 0 has these weights, and all ranks these metrics."""
    torch.testing.assert_close(found[0][0], expected[0], rtol=0, atol=tolerance)
    for each in found:
        assert each[1] == pytest.approx(expected[1], abs=tolerance)
        assert each[3] == expected[3]


class Clamped(Net):
    """Clamps its weights after each update; they are gathered where they are partitioned."""

    def on_train_step_end(self) -> None:
        parameters = list(self.parameters())
        with gathered(parameters), torch.no_grad():
            for parameter in parameters:
                parameter.data.clamp_(-0.1, 0.1)


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


STAGES = [0, 1, 2, 3]


def test_a_hook_can_clamp_the_weights(ranks2, tmp_path):
    options = {"gradient_accumulation_steps": 2}
    expected = fit(tmp_path / "one", None, Clamped, **options)

    def run() -> list[Any]:
        return [fit(tmp_path / str(stage), stage, Clamped, **options) for stage in STAGES]

    for found in zip(*ranks2(run), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("stage", "offloaded"), [(1, ["optimizer"]), (2, ["optimizer"]), (3, ["optimizer", "param"])]
)
def test_state_and_parameters_can_be_offloaded_to_host_memory(ranks2, stage, offloaded, tmp_path):
    options = {"max_grad_norm": 0.2, "gradient_accumulation_steps": 2}
    options |= {"callbacks": [GradientNormMonitor(per="parameter")]}
    expected = fit(tmp_path / "one", **options)
    given = plugin(stage, **{f"offload_{what}": {"device": "cpu"} for what in offloaded})
    found = ranks2(lambda: fit(tmp_path / "two", plugin=given, **options))
    assert_equal(found, expected)


class Adam(Net):
    """With dropout, groups and a schedule, so that a resumed run needs all of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        others = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_resumed_bfloat16_run_is_bit_identical(ranks2, stage, tmp_path):
    options = {"checkpointing": True, "shuffle": True, "mixed_precision": "bf16"}
    options |= {"max_epochs": None, "num_sanity_val_steps": 0}

    def run(name: str, steps: int, **more: Any) -> Any:
        return ranks2(lambda: fit(tmp_path / name, stage, Adam, max_steps=steps, **options, **more))

    whole, _ = run("whole", 8)
    run("cut", 3)
    found, _ = run("cut", 8, ckpt_path="auto")
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    files = {file.suffix for file in (tmp_path / "cut").rglob("step-*/*")}
    assert files == {".json", ".safetensors"}


class Plain(Adam):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


# -- experts, and models of transformers ----------------------------------------------------------


class Experts(nn.Module):
    """Each sample goes to the expert that the sign of its first number names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        own, out = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number in own.unique().tolist():  # which differ between the processes
            out[own == number] = self.experts[number](x[own == number])
        return out


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 16))


def test_stage_3_gathers_experts_together(ranks2, tmp_path):
    order = X[:42, 0].argsort()
    data = TensorDataset(X[order], Y[order])
    given = DeepSpeedPlugin(
        hf_ds_config=plugin(3).hf_ds_config, transformer_moe_cls_names="Experts"
    )
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_epochs": 2}
    expected = fit(tmp_path / "one", None, Mixture, data, batch=4, **options)
    found = ranks2(
        lambda: fit(tmp_path / "two", None, Mixture, data, batch=4, plugin=given, **options)
    )
    assert_equal(found, expected)


TOKENS = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))


class Pretrained(TrainModule):
    """Loaded when DeepSpeed is known, which then partitions it while it is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.model = LlamaForCausalLM.from_pretrained(self.folder)
        self.is_partitioned = all(hasattr(p, "ds_id") for p in self.model.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train/loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_is_partitioned_while_it_is_loaded(ranks2, tied, tmp_path):
    torch.manual_seed(0)
    llama(tied).save_pretrained(tmp_path / "model")

    def run(name: str) -> Any:
        given = DeepSpeedPlugin(zero_stage=3) if world() > 1 else None
        model = Pretrained(tmp_path / "model")
        found = fit(
            tmp_path / name,
            module=lambda: model,
            data=TensorDataset(TOKENS),
            plugin=given,
            max_grad_norm=0.5,
        )
        return *found, model.is_partitioned, patched()

    expected, found = run("one"), ranks2(lambda: run("two"))
    assert_equal(found, expected, 2e-6)
    assert [each[4:] for each in [expected, *found]] == [(False, []), (True, []), (True, [])]


# -- an own loop --------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def grouped(model: Net, kind: str) -> torch.optim.Optimizer:
    """Return an optimizer with three groups, and a frozen parameter in the second."""
    first, frozen, *others = model.parameters()
    frozen.requires_grad_(False)
    groups = [{"params": [first]}, {"params": [frozen, *others[:-1]], "weight_decay": 0.3}]
    return OPTIMIZERS[kind]([*groups, {"params": others[-1:], "lr": 0.02}])


def updated(model: Any, optimizer: Any, steps: Iterable[int], accelerator: Any = None) -> None:
    """Make updates with batches of 8 over all processes."""
    rank, size = (0, 8) if accelerator is None else (accelerator.process_index, 8 // world())
    for step in steps:
        own = slice(8 * step + size * rank, 8 * step + size * (rank + 1))
        loss = nn.functional.cross_entropy(model(X[own]), Y[own])
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 2, 3])  # 1 has the optimizer of 2
def test_the_state_of_every_group_is_saved_and_resumed(ranks2, stage, tmp_path):
    def run() -> Any:
        found = []
        for kind in OPTIMIZERS:
            for saved_at in (0, 2):
                accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(stage))
                model = Net()
                model, optimizer = accelerator.prepare(model, grouped(model, kind))
                folder = tmp_path / kind / str(saved_at)
                updated(model, optimizer, range(saved_at), accelerator)
                accelerator.save_state(folder)
                updated(model, optimizer, range(saved_at, 5), accelerator)
                whole = accelerator.get_state_dict(model)
                accelerator.load_state(folder)
                updated(model, optimizer, range(saved_at, 5), accelerator)
                found.append((kind, whole, accelerator.get_state_dict(model)))
                accelerator.free_memory()
        return found

    for kind, whole, again in ranks2(run)[0]:
        model = Net()
        updated(model, grouped(model, kind), range(5))
        torch.testing.assert_close(again, whole, rtol=0, atol=0)
        torch.testing.assert_close(whole, dict(model.state_dict()), rtol=0, atol=2e-6)


class Shapes(nn.Module):
    """Odd sizes, four dimensions, tied weights, a frozen layer and a buffer."""

    tp_plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, (2, 3))
        self.wide, self.narrow = nn.Linear(6, 14), nn.Linear(14, 5)
        self.first, self.tied = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.view(-1, 1, 2, 4)).flatten(1)
        hidden = self.narrow(torch.relu(self.wide(hidden)))
        return self.frozen(self.first(hidden) + self.tied(hidden)) + self.seen


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"zero{n}": lambda n=n: {"deepspeed_plugin": plugin(n)} for n in STAGES},
    "zero3, small ones whole": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
    "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "ddp": dict,
    "one": dict,
}


class Loop:
    """A loop of one's own on a layout."""

    def __init__(self, layout: str, precision: str) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, **LAYOUTS[layout]())
        model = Shapes()
        wide = [p for p in model.parameters() if p.ndim > 1]
        other = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": other}, {"params": wide, "weight_decay": 0.3, "lr": 0.02}]
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(groups))

    def train(self, *steps: int) -> Loop:
        updated(self.model, self.optimizer, steps, self.accelerator)
        return self

    def state(self) -> Any:
        """Return all tensors whole, on rank 0."""
        weights = self.accelerator.get_state_dict(self.model)
        state = tree.map_tree(tree.gathered, self.optimizer.state_dict()["state"])
        rate = self.optimizer.param_groups[1]["lr"]
        return deepcopy(({name: value.float() for name, value in weights.items()}, state, rate))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_tensor_is_the_same_on_any_engine(ranks, precision, tmp_path):
    def on(layout: str, job: Callable[[Loop], Any]) -> Any:
        def run() -> Any:
            return job(Loop(layout, precision))

        return ranks({"one": 1, "zero2": 3}.get(layout, 2))(run)[0]

    def trained(loop: Loop) -> Any:
        loop.train(0, 1).accelerator.save_state(tmp_path / "0")
        return loop.state(), loop.train(2).state()

    def moved(number: int) -> Callable[[Loop], Any]:
        def job(loop: Loop) -> Any:
            loop.accelerator.load_state(tmp_path / str(number))
            loop.accelerator.save_state(tmp_path / str(number + 1))
            return loop.state()

        return job

    expected, further = on("zero3", trained)
    read = {name: torch.empty_like(v) for name, v in expected[0].items() if name != "tied.weight"}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(tmp_path / "0"), no_dist=True)
    torch.testing.assert_close(read, {name: expected[0][name] for name in read}, rtol=0, atol=0)
    ways = ["fsdp", "one", "tp", "zero1", "ddp", "zero2", "zero3, small ones whole", "zero0"]
    for number, layout in enumerate(ways):
        found = on(layout, moved(number))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{layout}: {m}")  # noqa: B023 - at once

    def back(loop: Loop) -> Any:
        loop.train(3).accelerator.load_state(tmp_path / str(len(ways)))
        return loop.train(2).state()

    torch.testing.assert_close(on("zero3", back), further, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_stage_0_divides_nothing_and_is_saved_as_ddp_is(ranks2, precision, tmp_path):
    def save(layout: str) -> Any:
        loop = Loop(layout, precision).train(0, 1)
        main = loop.accelerator.is_main_process
        loop.accelerator.save_state(tmp_path / layout)
        if main:  # where processes have the same, one may save alone
            loop.accelerator.save_state(tmp_path / f"{layout}, alone")
        weights = loop.accelerator.get_state_dict(loop.model)
        loop.train(2).accelerator.load_state(tmp_path / layout)
        fit(tmp_path / f"{layout}, fit", 0 if layout == "zero0" else None, checkpointing=True)
        return deepcopy(weights), loop.accelerator.get_state_dict(loop.model)

    of_zero, of_ddp = ranks2(save, "zero0"), ranks2(save, "ddp")
    for (found, loaded), (expected, _) in zip(of_zero, of_ddp, strict=True):
        torch.testing.assert_close(loaded, found, rtol=0, atol=0)
        if precision == "no":
            torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)
    for name in ("", ", alone", ", fit"):
        zero, ddp = (files_in(tmp_path / f"{layout}{name}") for layout in ("zero0", "ddp"))
        assert zero.keys() == ddp.keys()
        assert {"model.safetensors", "optimizer.safetensors"} <= {Path(key).name for key in zero}
        assert not any("shard" in key for key in zero)
        for key, tensors in zero.items():
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            assert shapes == {name: tensor.shape for name, tensor in ddp[key].items()}


class Fails(Callback):
    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError("on purpose")


def test_callbacks_that_need_whole_weights_work_in_stage_0(ranks2, tmp_path):
    def pruned(stage: int | None) -> Any:
        pruning = ModelPruning("l1_unstructured", amount=0.5)
        return dict(fit(tmp_path / f"{stage}", stage, callbacks=[pruning])[0])

    torch.testing.assert_close(ranks2(pruned, 0), ranks2(pruned, None), rtol=0, atol=0)

    def fail() -> None:
        saving = [ModelCheckpoint(on_exception=True), Fails()]
        with pytest.raises(ArithmeticError):
            fit(tmp_path / "failed", 0, callbacks=saving, mixed_precision="bf16")
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(0))
        model = nn.Linear(1, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(NotImplementedError, match="DEEPSPEED updates all processes together"):
            LocalSGD(accelerator, model, 2)

    ranks2(fail)
    saved = [load_file(each) for each in (tmp_path / "failed").rglob("exception-*/*.safetensors")]
    assert len(saved) == 2
    for weights in saved:  # those that the optimizer updates
        assert {each.dtype for each in weights.values()} == {torch.float32}


def files_in(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, by its path in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): load_file(path) if path.suffix == ".safetensors" else {}
        for path in files
    }


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3", "fsdp", "ddp"])
def test_a_model_is_saved_in_files_of_a_size(ranks2, layout, tmp_path):
    def save() -> Any:
        loop = Loop(layout, "no").train(0)
        save = loop.accelerator.save_model
        save(loop.model, tmp_path / "model", max_shard_size=300)
        save(loop.model, tmp_path / "bin", safe_serialization=False)
        return deepcopy(dict(loop.accelerator.get_state_dict(loop.model)))

    expected = ranks2(save)[0]
    for name in ("model", "bin"):
        model = Shapes()
        load_checkpoint_in_model(model, tmp_path / name)
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    save_model(model, tmp_path / "plain", max_shard_size=300)  # of one process
    files = [sorted((tmp_path / name).iterdir()) for name in ("model", "plain")]
    assert len(files[1]) == 6
    for found, plain in zip(*files, strict=True):
        assert found.name == plain.name
        if plain.suffix == ".json":
            assert found.read_text() == plain.read_text()
            continue
        (tensors, tied), (wanted, wanted_tied) = map(read_tensors, (found, plain))
        torch.testing.assert_close(tensors, wanted, rtol=0, atol=0)
        assert tied == wanted_tied


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2"])
def test_a_state_takes_the_place_of_weights_that_are_not_finite(ranks2, layout, tmp_path):
    def recovered() -> Any:
        loop = Loop(layout, "bf16").train(0)
        loop.accelerator.save_state(tmp_path)
        expected = loop.state()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.flatten()[0] = torch.nan
        loop.accelerator.load_state(tmp_path)
        return expected, loop.state()

    expected, found = ranks2(recovered)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16"), (1, "no"), (2, "bf16"), (3, "no"), (3, "bf16")]
)
def test_weights_that_are_set_by_hand_are_exported_and_trained(ranks2, stage, precision, tmp_path):
    other = {name: value / 2 for name, value in Net().state_dict().items()}
    flat = torch.linspace(-0.1, 0.1, sum(value.numel() for value in other.values()))

    def set_and_train(model: nn.Module, own: nn.Module, export: Any, step: Any) -> Any:
        """Return what is exported after weights were set in each way, and after an update."""
        averages = [parameter.detach().clone() for parameter in own.parameters()]
        yield step(0)
        before = export()
        kept = [parameter.detach().clone() for parameter in own.parameters()]
        for parameter, average in zip(own.parameters(), averages, strict=True):
            parameter.data.copy_(average)
        yield export()
        for parameter, value in zip(own.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        torch.testing.assert_close(export(), before, rtol=0, atol=0)
        own.load_state_dict(other)
        yield export()
        yield step(1)
        for parameter in own.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        yield export()
        if precision == "no":  # it makes the parameters those parts of the vector, in float32
            nn.utils.vector_to_parameters(flat.clone(), own.parameters())
            yield export()
        yield step(2)

    def zero() -> Any:
        given = DeepSpeedPlugin(zero_stage=stage)  # stage 3 leaves small parameters whole
        accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=given)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def export() -> Any:
            return deepcopy(accelerator.get_state_dict(model))

        def step(number: int) -> Any:
            updated(model, optimizer, [number], accelerator)
            accelerator.save_model(model, tmp_path / "model")
            accelerator.wait_for_everyone()  # in stage 0 the main process writes, as with DDP
            assert bool(export()) == (accelerator.is_main_process or stage == 0)
            saved = load_weights(tmp_path / "model")
            torch.testing.assert_close(export() or saved, saved, rtol=0, atol=0)
            return export()

        return list(set_and_train(model, accelerator.unwrap_model(model), export, step))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def export() -> Any:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def step(number: int) -> Any:
        updated(model, optimizer, [number])
        return export()

    expected = list(set_and_train(model, model, export, step))
    for found, right in zip(ranks2(zero)[0], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if precision == "no" else 4e-3)


def test_partitioned_weights_are_loaded_whole_and_never_exported_empty(ranks2):
    other = {name: value / 2 for name, value in Net().state_dict().items()}

    def run() -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin(3))
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = accelerator.unwrap_model(model)
        with pytest.raises(RuntimeError, match=r"empty tensors for first\.weight.*get_state_dict"):
            own.state_dict()
        own.load_state_dict(other)
        loaded = accelerator.get_state_dict(model)
        parameters = list(own.parameters())
        with gathered(parameters), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2)
            assert own.state_dict().keys() == other.keys()
        updated(model, optimizer, [0], accelerator)
        return loaded, accelerator.get_state_dict(model)

    loaded, trained = ranks2(run)[0]
    expected = {name: value.bfloat16().float() for name, value in other.items()}
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    model = Net()
    updated(model, torch.optim.SGD(model.parameters(), lr=0.1), [0])
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=4e-3)


def test_the_plugin_exports_weights_in_16_bits(ranks2, tmp_path):
    def run() -> Any:
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        given = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=given, mixed_precision="bf16")
        model = Plain()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        updated(model, optimizer, range(2), accelerator)
        accelerator.save_state(tmp_path)
        accelerator.save_model(model, tmp_path / "model")
        return accelerator.get_state_dict(model)

    exported, nothing = ranks2(run)
    assert nothing == {}
    assert main(["merge-weights", str(tmp_path), str(tmp_path / "merged.safetensors")]) == 0
    saved = load_file(tmp_path / "merged.safetensors")  # those that the optimizer updates
    assert {each.dtype for each in saved.values()} == {torch.float32}
    expected = {name: value.bfloat16() for name, value in saved.items()}
    torch.testing.assert_close(exported, expected, rtol=0, atol=0)
    torch.testing.assert_close(load_weights(tmp_path / "model"), expected, rtol=0, atol=0)


def test_nothing_is_compiled_and_one_process_will_do(ranks, tmp_path):
    def built() -> list[str]:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
        try:
            for stage in STAGES:
                fit(tmp_path / str(stage), stage, max_epochs=None, max_steps=1)
        finally:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        return os.listdir(tmp_path)

    assert "extensions" not in ranks(1)(built)[0]


# -- what it leaves in the process ----------------------------------------------------------------


class Recomputed(Net):
    """Backward calls the linear layers again; each call notes which function they are."""

    called: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.noting, x, use_reentrant=False)

    def noting(self, x: Tensor) -> Tensor:
        self.called.add(nn.functional.linear)
        return super().forward(x)


class Unable(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no step")  # DeepSpeed makes one while it initialises


def patched() -> list[str]:
    """Return what of torch is not its own."""
    linear = nn.functional.linear is not torch._C._nn.linear
    subclassing = "__init_subclass__" in vars(nn.Module)
    return ["linear"] * linear + ["__init_subclass__"] * subclassing


def test_torch_is_as_before_outside_of_the_steps_of_stage_3(ranks2, tmp_path):
    def run() -> Any:
        import deepspeed

        found = fit(tmp_path / "two", 3, Recomputed)
        outside, inside = patched(), {each.__module__ for each in Recomputed.called}
        with pytest.raises(RuntimeError, match="no step"):
            fit(tmp_path / "two", 3, optimized(Unable))
        outside += patched()
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(3))
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=config):  # leaves more than preparing does
            model = Net()
        assert patched() == ["linear", "__init_subclass__"]
        model, _ = accelerator.prepare(model, model.configure_optimizers())
        accelerator.backward(model(X).sum())
        return *found, inside, outside + patched()

    found = ranks2(run)
    assert_equal(found, fit(tmp_path / "one", None, Recomputed))
    assert [each[4:] for each in found] == [({"deepspeed.runtime.zero.linear"}, [])] * 2


# -- the configuration ---------------------------------------------------------------------------

CONFIG = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


class Configured(Plain):
    """The optimizer and the schedule are those of the configuration."""

    def configure_optimizers(self) -> Any:
        optimizer = DummyOptim(self.parameters(), lr=2e-2, weight_decay=0.1)
        schedule = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Written(Plain):
    """The same, written with torch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2, weight_decay=0.1)
        rates = [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25]  # DeepSpeed counts its first step as 0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


def test_the_optimizer_and_the_schedule_can_come_from_the_configuration(ranks2, tmp_path):
    expected = fit(tmp_path / "one", None, Written)
    found = ranks2(
        lambda: fit(tmp_path / "two", None, Configured, plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    )
    assert_equal(found, expected, 2e-5)


def scheduled(kind: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"warmup_min_lr": 0, "warmup_type": "linear", **values}}


AUTO = {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
WARM = {"warmup_max_lr": 3e-3, "warmup_num_steps": 3}


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)


def warmup(optimizer: Any) -> Any:
    from deepspeed.runtime.lr_schedules import WarmupLR

    return WarmupLR(optimizer, **WARM, warmup_type="linear")


def alone(world: int) -> dict[str, Any]:
    return {"scheduler": scheduled("WarmupDecayLR", **WARM, total_num_steps=10 // world)}


# The schedule of the configuration, that of the script, and both for DeepSpeed alone, whose counts
# are updates, where those of a script are batches of all processes.
SCHEDULES: dict[str, Any] = {
    "configuration": (
        scheduled("WarmupLR", **WARM),
        DummyScheduler,
        lambda _: {"scheduler": scheduled("WarmupLR", **WARM)},
    ),
    "auto": (
        scheduled("WarmupDecayLR", **AUTO),
        partial(DummyScheduler, total_num_steps=10, warmup_num_steps=3),
        alone,
    ),
    "callable": (
        None,
        partial(DummyScheduler, lr_scheduler_callable=decay),
        lambda _: {"lr_scheduler": decay},
    ),
    "class of DeepSpeed": (None, warmup, lambda _: {"lr_scheduler": warmup}),
}


def rates_of_deepspeed(stage: int, given: dict[str, Any]) -> list[float]:
    """Return the rate of each of 7 updates of DeepSpeed alone."""
    import deepspeed

    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if "scheduler" in given:
        config["scheduler"] = given["scheduler"]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config=config,
        lr_scheduler=given.get("lr_scheduler"),
    )
    rates = []
    for _ in range(7):
        rates += engine.get_lr()
        engine.backward(engine(X[:2]).square().mean())
        engine.step()
    engine.destroy()
    return rates


def rates_of(stage: int, config: Any, make: Any, **options: Any) -> Any:
    """Return the rates of 7 updates of two micro-batches, and the last."""
    given = {"zero_optimization": {"stage": stage}} | ({"scheduler": config} if config else {})
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given),
        gradient_accumulation_steps=2,
        **options,
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, make(optimizer))
    rates = []
    for _ in range(14):
        with accelerator.accumulate(model):
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            accelerator.backward(model(X[:2]).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    accelerator.free_memory()
    return rates


@pytest.mark.parametrize(("processes", "stage"), [(1, 3), (2, 2)])
def test_the_rate_of_each_update_is_that_of_deepspeed_alone(ranks, processes, stage):
    def run() -> Any:
        found = [rates_of(stage, *given[:2]) for given in SCHEDULES.values()]
        found.append(rates_of(stage, *SCHEDULES["auto"][:2], scheduler_tick="update"))
        found.append(rates_of(stage, None, decay)[:3])  # of torch: by the default of the tick
        with patch_environment(local_rank=rank()):
            right = [rates_of_deepspeed(stage, each[2](world())) for each in SCHEDULES.values()]
            right.append(rates_of_deepspeed(stage, alone(1)))
        ticks = [min(update * world(), 6) for update in range(3)]
        return found, [*right, [3e-3 * (1 - 0.9 * tick / 6) for tick in ticks]]

    for found, right in ranks(processes)(run):
        for own, each in zip(found, right, strict=True):
            assert own == pytest.approx(each, rel=1e-12)


def test_one_of_several_plugins_is_selected(ranks2):
    def select() -> list[Any]:
        plugins = {"student": plugin(1), "teacher": plugin(3)}
        accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
        found = [accelerator.deepspeed_plugin is plugins["student"]]
        assert accelerator.state.get_deepspeed_plugin("teacher") is plugins["teacher"]
        model = Net()
        model, _ = accelerator.prepare(model, model.configure_optimizers())
        found.append(hasattr(next(model.parameters()), "ds_id"))
        accelerator.state.select_deepspeed_plugin("teacher")
        other, teacher = Accelerator(), Net()
        teacher = other.prepare_model(teacher, evaluation_mode=True)
        found.append(hasattr(next(teacher.parameters()), "ds_id"))
        with torch.no_grad():
            same = torch.allclose(teacher(X), Net()(X))
        with pytest.raises(ValueError, match=r"'pupil'.*'student', 'teacher'"):
            other.state.select_deepspeed_plugin("pupil")
        return [*found, same, str(other.distributed_type)]

    assert ranks2(select) == [[True, False, True, True, "DistributedType.DEEPSPEED"]] * 2


# -- what cannot work is refused ----------------------------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Net):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], 0.1), torch.optim.SGD(others, 0.1)


class Unfreezes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.last.requires_grad_(self.trainer.current_epoch > 0)


class Switching(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class Clips(Net):
    def configure_gradient_clipping(self, optimizer: Any, *limits: Any) -> None:
        self.clip_gradients(optimizer, 0.1)


class ReadsEarly(Net):
    def on_after_backward(self) -> None:
        self.trainer.gradient(self.last.bias)


REFUSED: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "manual": (Manual, {}, "automatic_optimization = False, but DeepSpeed"),
    "optimizers": (Two, {}, "DeepSpeed takes one optimizer"),
    "Adafactor": (optimized(torch.optim.Adafactor), {}, "Adafactor cannot update the parts"),
    "schedule-free": (optimized(Switching), {}, "Switching uses different weights for evaluation"),
    "values": (
        Net,
        {"max_grad_value": 0.1, "plugin": plugin(2, offload_optimizer={"device": "cpu"})},
        "offload_optimizer_device is 'cpu': use max_grad_norm",
    ),
    "hooks": (Clips, {}, "Clips overrides configure_gradient_clipping, but DEEPSPEED"),
    "window": (ReadsEarly, {"gradient_accumulation_steps": 2}, "read inside a window"),
    "unfrozen": (Unfreezes, {"max_epochs": 2}, "last.weight, last.bias were added, frozen or"),
    "averages": (Net, {"callbacks": [WeightAveraging()]}, "WeightAveraging replaces the trained"),
    "fp16": (Net, {"mixed_precision": "fp16"}, "does not support mixed_precision='fp16'"),
    "communication hook": (
        Net,
        {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]},
        "does not support comm_hook='bf16': leave it out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_features_are_refused_by_name(ranks2, what, tmp_path):
    module, options, message = REFUSED[what]
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path, 2, module, **options))


def test_the_state_inside_a_window_is_refused(ranks2, tmp_path):
    def save() -> None:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(2))
        model = Net()
        model, _ = accelerator.prepare(model, model.configure_optimizers())
        accelerator.backward(model(X).sum())
        accelerator.save_state(tmp_path / "state")

    with pytest.raises(RankError, match="that no update has used yet"):
        ranks2(save)
