"""A Trainer that compiles: the values of one that does not, and few words about many compilations.

What a plain run gives is the reference everywhere. ``aot_eager`` runs torch's own kernels, so that
equal means to the last bit.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import shutil
from typing import Any

import pytest
import torch
import tqdm
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.helpers import isolation
from tests.numerics.running import assert_same, copy_of, on_processes, quiet_trainer
from trainer import Accelerator, Trainer, TrainModule
from trainer.configuration import TorchDynamoPlugin
from trainer.engines.compile import compiled_steps, is_compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    # While it compiles torch hides this one by other means than filters.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
LOGGER = "trainer.engines.compile"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(TrainModule):
    """Dropout, and everything of a run that a step may use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Busy(Net):
    """Logs in the middle of the step, and computes with every counter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted = self.net(batch[0])
        self.log_dict({"mean": predicted.mean()})
        weight = 1 + batch_idx + self.global_step + self.trainer.current_epoch
        loss = mse_loss(predicted, batch[1]) * (2 + weight % 3)
        self.log("loss", loss, prog_bar=True)
        return loss


class Moody(Net):
    """A text that a step depends on changes with every batch."""

    mood = "0"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mood = str(batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (2 if self.mood == "0" else 3)


class Opaque(Net):
    """Nothing of the training step can be compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @torch.compiler.disable
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch)


def data(samples: int = 22, **kwargs: Any) -> DataLoader:
    """Batches of 4, the last one of 2."""
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(samples, width, generator=generator) for width in (4, 2)]
    return DataLoader(TensorDataset(*tensors), **({"batch_size": 4, "shuffle": True} | kwargs))


class Losses(Callback):
    """What every update recorded."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_boundary(self, trainer: Any, module: Any) -> None:
        metrics = dict(trainer.callback_metrics)
        metrics.pop("recompilations", None)
        self.seen.append(metrics)


def trained(
    module: TrainModule, backend: str | None = None, *, validates: bool = False, **kwargs: Any
) -> tuple[dict[str, Tensor], list[dict[str, float]], Trainer]:
    """The weights after a fit, what each update recorded, and the Trainer."""
    isolation.reset_trainer_state()
    losses = Losses()
    defaults = {"max_epochs": 2, "seed": 0, "callbacks": [losses], "dynamo_backend": backend}
    trainer = quiet_trainer(**(defaults | kwargs))
    trainer.fit(module, data(), data(shuffle=False) if validates else None)
    return copy_of(module), losses.seen, trainer


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Net, Busy])
def test_a_compiled_run_has_the_values_of_a_plain_one(kind, backend):
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "validates": True}
    weights, losses, _ = trained(kind(), **options)
    before = graphs()
    compiled, seen, _ = trained(kind(), backend, **options)
    assert graphs() > before
    assert_same(compiled, weights)  # the names too
    assert seen == losses


def test_a_compiled_run_under_autocast_has_the_values_of_a_plain_one():
    weights, losses, _ = trained(Net(), mixed_precision="bf16")
    compiled, seen, _ = trained(Net(), "eager", mixed_precision="bf16")
    assert_same(compiled, weights)
    assert seen == losses
    torch._dynamo.reset()
    compiled, *_ = trained(Net(), "aot_eager", mixed_precision="bf16")  # it casts elsewhere
    torch.testing.assert_close(compiled, weights, rtol=1e-2, atol=1e-3)


def compiled_on_a_rank(backend: str | None) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    tqdm.tqdm.monitor_interval = 0  # torch makes bars that it does not show
    try:
        weights, seen, trainer = trained(Net(), backend, gradient_accumulation_steps=2, max_steps=3)
        expected = {"recompilations"} if backend else set()
        assert expected == {"recompilations"} & set(trainer.callback_metrics)
        return weights, seen
    finally:
        if backend:
            torch._dynamo.reset()


def test_several_processes_compile_inside_ddp(ranks):
    plain = on_processes(ranks, 2, compiled_on_a_rank, None)
    compiled = on_processes(ranks, 2, compiled_on_a_rank, "aot_eager")
    assert_same(compiled, plain)
    assert_same(compiled[0][0], compiled[1][0])


class Deep(Net):
    """Three blocks of one class."""

    def __init__(self) -> None:
        super().__init__()
        block = self.net
        self.net = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([block, *(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))])

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return mse_loss(self.net(x), batch[1])


def regional(backend: Any) -> TorchDynamoPlugin:
    return TorchDynamoPlugin(backend=backend, use_regional_compilation=True)


def test_blocks_are_compiled_by_themselves_in_a_fit_and_in_a_loop_of_ones_own():
    weights, losses, _ = trained(Deep(), validates=True)
    before, module = graphs(), Deep()
    options = {"dynamo_backend": None, "dynamo_plugin": regional("aot_eager")}
    compiled, seen, _ = trained(module, validates=True, **options)
    assert graphs() > before
    assert_same(compiled, weights)
    assert seen == losses
    assert not any(is_compiled(part) for part in module.modules())  # after the fit
    module = Deep()
    for block in module.blocks:
        block.compile(backend="aot_eager")  # by the user: it is neither refused nor undone
    assert_same(trained(module, validates=True, **options)[0], weights)
    assert all(map(is_compiled, module.blocks))
    with pytest.raises(ValueError, match=r"use_regional_compilation .* and Net has none"):
        trained(Net(), **options)
    isolation.reset_trainer_state()
    module = Deep().blocks
    own = nn.Sequential(module[0], nn.ModuleList(module[1:]))
    prepared = Accelerator(cpu=True, dynamo_plugin=regional("aot_eager")).prepare(own)
    assert [is_compiled(part) for part in (prepared, own[0], *own[1])] == [False, True, True, True]


def test_one_graph_serves_every_batch_of_every_epoch():
    """Sizes of batches, their numbers and the counters of the run are variables from the start."""
    before = graphs()
    *_, trainer = trained(Busy(), "aot_eager", max_epochs=3, validates=True)
    assert graphs() - before == 3  # the training step before and after it logs, and validation
    assert trainer.callback_metrics["recompilations"] == 0


def test_recompilations_are_counted_and_logged_with_their_cause(caplog):
    caplog.set_level(logging.WARNING, LOGGER)
    *_, trainer = trained(Moody(), "eager", max_steps=2)
    assert trainer.callback_metrics["recompilations"] == 1
    (text,) = [record.message for record in caplog.records if record.name == LOGGER]
    assert "recompiled training_step in training_step (recompilation 1)" in text
    assert "self.mood == '0'" in text


def test_the_recompilation_limit_is_logged_as_an_error(caplog):
    caplog.set_level(logging.WARNING, LOGGER)
    with torch._dynamo.config.patch(recompile_limit=1):
        weights, *_ = trained(Moody(), "eager", max_epochs=1)
    errors = [r.message for r in caplog.records if (r.name, r.levelname) == (LOGGER, "ERROR")]
    assert len(errors) == 1
    assert "reached its recompilation limit in training_step" in errors[0]
    assert "self.mood == '0'" in errors[0]
    assert "recompile_limit, which is 1." in errors[0]
    assert_same(weights, trained(Moody(), max_epochs=1)[0])


def test_a_training_step_of_which_nothing_compiles_is_an_error():
    for _ in range(2):  # that it was tried before does not make it right
        with pytest.raises(
            RuntimeError, match=r"no part of Opaque.training_step was compiled.*dis"
        ):
            trained(Opaque(), "eager")
        torch._dynamo.reset()


def test_an_evaluation_of_which_nothing_compiles_is_warned_of(caplog):
    class Blind(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validate(batch)

        @torch.compiler.disable
        def validate(self, batch: Any) -> None:
            self.log("val", self.loss(batch))

    weights, *_ = trained(Blind(), "eager", validates=True)
    texts = [record.message for record in caplog.records if record.name == LOGGER]
    assert len(texts) == 1
    assert "no part of Blind.validation_step was compiled" in texts[0]
    assert_same(weights, trained(Blind(), validates=True)[0])


def test_a_resumed_run_is_the_uninterrupted_one_compiled_or_not():
    expected, losses, _ = trained(Busy(), "aot_eager")
    torch._dynamo.reset()
    cut = [Losses(), ModelCheckpoint(background=False)]
    trained(Busy(), "aot_eager", callbacks=cut, project_dir="cut", max_steps=5)
    for then in ("aot_eager", None):  # the first batch is the smaller one
        torch._dynamo.reset()
        isolation.reset_trainer_state()
        shutil.copytree("cut", f"then {then}")
        options = {"callbacks": [rest := Losses()], "project_dir": f"then {then}"}
        trainer = quiet_trainer(max_epochs=2, seed=0, dynamo_backend=then, **options)
        trainer.fit(module := Busy(), data(), ckpt_path="last")
        assert_same(copy_of(module), expected)
        whole = [each["loss"] for each in losses]
        assert [each["loss"] for each in cut[0].seen + rest.seen] == whole


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_compiles_and_a_run_that_it_compiles_is_resumed_exactly():
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

    def fit(**kwargs: Any) -> dict[str, Tensor]:
        isolation.reset_trainer_state()
        module, path = Plain(), kwargs.pop("ckpt_path", None)
        trainer = quiet_trainer(max_epochs=2, seed=0, **kwargs)
        trainer.fit(module, data(), ckpt_path=path)
        return copy_of(module)

    whole = fit(dynamo_backend="inductor")
    torch.testing.assert_close(whole, fit())
    torch._dynamo.reset()
    saver = [ModelCheckpoint(background=False)]
    fit(dynamo_backend="inductor", project_dir="cut", max_steps=5, callbacks=saver)
    torch._dynamo.reset()
    # Its first batch is the one of another size.
    assert_same(fit(dynamo_backend="inductor", project_dir="cut", ckpt_path="last"), whole)


def test_evaluations_and_predictions_are_compiled():
    class Whole(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch[0])

    def answers(backend: str | None) -> list[Any]:
        isolation.reset_trainer_state()
        trainer, module, loader = quiet_trainer(dynamo_backend=backend), Whole(), data()
        return [
            trainer.validate(module, loader),
            trainer.test(module, loader),
            trainer.predict(module, data(shuffle=False)),
        ]

    expected = answers(None)
    before = graphs()
    assert_same(answers("eager"), expected)
    assert graphs() - before == 3


def test_a_step_compiled_by_the_user_is_left_alone():
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    class Own(Net):
        training_step = torch.compile(Net.training_step, backend=backend)

    trained(Own(), "eager", max_steps=2)
    assert calls


def test_nothing_is_left_on_the_module_and_in_torch():
    class Looks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.sources = torch.compiler.config.dynamic_sources
            self.twin = copy.deepcopy({"module": module}, {id(trainer): None})["module"]

    module, looks = Net(), Looks()
    kept = module.log_dict = lambda metrics: None
    with torch.compiler.config.patch(dynamic_sources="L['mine']"):
        trained(module, "eager", callbacks=[looks], max_steps=1)
        assert torch.compiler.config.dynamic_sources == "L['mine']"
    assert looks.sources.startswith("L['mine'],")
    assert torch._dynamo.config.allow_unspec_int_on_nn_module is False
    assert not {"training_step", "validation_step", "log"} & set(vars(module))
    assert vars(module)["log_dict"] is kept  # what the user had put there
    assert looks.twin.training_step.__self__ is looks.twin  # and not what runs this module


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "save"])
def test_a_duplicate_made_during_a_run_is_not_compiled_and_goes_its_own_way(duplicate):
    def made(module: Any) -> Any:
        if duplicate == "deepcopy":
            return copy.deepcopy(module)
        if duplicate == "pickle":
            return pickle.loads(pickle.dumps(module))
        torch.save(module, file := io.BytesIO())
        # What is read back was written here.
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    class Duplicates(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.step_of_mine = module.training_step  # compiled

        def on_boundary(self, trainer: Any, module: Any) -> None:
            self.twin, self.weights = made(module), copy_of(module)

    module, seen = Net(), Duplicates()
    kept = module.log_dict = len
    trained(module, "eager", callbacks=[seen], max_steps=2)
    twin = seen.twin
    assert_same(copy_of(twin), seen.weights)
    assert not {"training_step", "validation_step", "log", "_compiled_for_run"} & set(vars(twin))
    assert vars(twin)["log_dict"] is kept  # what the user had put there
    assert twin.step_of_mine == twin.training_step
    assert twin.log.__self__ is twin
    before = graphs()
    expected = trained(copy.deepcopy(module))[:2]
    assert graphs() == before  # no compiled code runs in a copy
    continued = trained(twin)
    assert_same(continued[0], expected[0])
    assert continued[1] == expected[1]


@pytest.mark.parametrize("how", ["plugin", "disabled", "variable", "accelerator"])
def test_other_ways_to_ask_for_compilation(monkeypatch, how):
    options = {"max_steps": 1}
    if how == "variable":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    elif how == "accelerator":
        isolation.reset_trainer_state()
        options["accelerator"] = Accelerator(cpu=True, dynamo_backend="eager")
    else:
        disable = how == "disabled"
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", disable=disable)
    before = graphs()
    Trainer(progress_bar=False, checkpointing=False, **options).fit(Net(), data())
    assert (graphs() > before) == (how != "disabled")


def test_static_shapes_are_compiled_one_by_one():
    plugin = TorchDynamoPlugin(backend="eager", dynamic=False)
    *_, trainer = trained(Net(), dynamo_plugin=plugin)
    assert trainer.callback_metrics["recompilations"] == 1  # the smaller batch


def test_one_graph_is_asked_for_and_logging_breaks_it():
    class Silent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    isolation.reset_trainer_state()
    quiet_trainer(max_steps=1, dynamo_plugin=plugin).fit(Silent(), data())
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"self\.log works outside the compiled"
    ):
        trained(Net(), dynamo_plugin=plugin)


def test_manual_optimisation_is_refused():
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(ValueError, match=r"'eager', but in manual optimisation.*self.net.compile"):
        trained(Manual(), "eager")
    isolation.reset_trainer_state()
    quiet_trainer(dynamo_backend="eager").validate(Manual(), data())


def test_inductor_without_a_compiler_is_refused_before_anything_runs():
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(RuntimeError, match=r"found no compiler.*nowhere.*such as g\+\+"),
    ):
        trained(Net(), "inductor")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
)
def test_cuda_graphs_are_refused_where_there_are_any(options):
    plugin = TorchDynamoPlugin(**({"backend": "inductor"} | options))
    with (
        pytest.raises(ValueError, match="replays CUDA graphs"),
        compiled_steps(Net(), ["training_step"], plugin, torch.device("cuda")),
    ):
        pass
    if plugin.backend == "INDUCTOR" and shutil.which("g++"):
        with compiled_steps(Net(), ["training_step"], plugin, CPU):
            pass
