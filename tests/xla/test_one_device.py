"""One XLA device: equal to the CPU, compiled once for each shape, and exact when resumed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as counted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from tests.helpers import isolation
from trainer import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    Trainer,
    TrainModule,
    set_seed,
    xla,
)
from trainer.engines.base import EngineOptions
from trainer.engines.choose import choose_engine
from trainer.environment import Launch
from trainer.rng import isolated_rng, load_rng_state, rng_state
from trainer.state.group import pick_device

EXACT = 1e-6
xla.start()  # before the first backward pass, at which autograd counts the devices


def data(samples: int = 44) -> DataLoader:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4)


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 32), nn.Linear(32, 1))


class Model(TrainModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = network(dropout)
        self.dtypes: set[torch.dtype] = set()
        self.compiled: list[int] = []
        self.executed: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def loss(self, batch):
        outputs = self(batch[0])
        self.dtypes.add(outputs.dtype)
        return (outputs - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return {"outputs": self(batch[0]), "inputs": batch[0]}

    def on_train_step_start(self) -> None:
        new, known = map(counted.counter_value, ("UncachedCompile", "CachedCompile"))
        self.compiled.append(new or 0)
        self.executed.append((new or 0) + (known or 0))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture
def on_cpu(monkeypatch):
    """Return a function that says whether the next processes' state is of the CPU."""

    def choose(cpu: bool) -> None:
        isolation.reset_trainer_state()
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(cpu))

    return choose


def fit(
    folder: str, *, model: Model | None = None, ckpt_path: str | None = None, **kwargs
) -> Model:
    model = Model() if model is None else model
    set_seed(3)
    settings = {"max_epochs": 2, "log_every": 1, "progress_bar": False, "max_grad_norm": 1.0}
    trainer = Trainer(project_dir=folder, **settings | kwargs)
    trainer.fit(model, data(), data(), ckpt_path=ckpt_path)
    return model


def recorded(folder: str) -> list[float]:
    (file,) = Path(folder).rglob("metrics.jsonl")
    rows = map(json.loads, file.read_text().splitlines())
    return [row[name] for row in rows for name in ("loss", "val_loss") if name in row]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_fit_on_xla_equals_one_on_the_cpu(on_cpu, accumulation):
    of_device = {}
    for name in ("cpu", "xla"):
        on_cpu(name == "cpu")
        model = fit(name, gradient_accumulation_steps=accumulation)
        assert {p.device.type for p in model.parameters()} == {name}
        of_device[name] = weights(model)
    losses = recorded("cpu")
    assert len(losses) == 2 * (-(-11 // accumulation) + 1)
    assert recorded("xla") == pytest.approx(losses, abs=EXACT)
    torch.testing.assert_close(of_device["xla"], of_device["cpu"], atol=1e-5, rtol=0)


def test_updates_and_evaluation_batches_compile_once_and_run_once(on_cpu):
    on_cpu(False)
    model = fit("run", gradient_accumulation_steps=3, max_epochs=4)
    updates = 4  # of 3, 3, 3 and 2 batches
    # In the second epoch no state of the optimizer is new, and in the third no shape.
    assert len(set(model.compiled[2 * updates + 1 :])) == 1
    ran = [
        after - before for before, after in zip(model.executed, model.executed[1:], strict=False)
    ]
    assert ran[2 * updates : 3 * updates - 1] == [1] * (updates - 1)
    # The last update, 11 batches of the validation, its result, the copies of a save.
    assert 13 <= ran[3 * updates - 1] <= 15


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_with_dropout_is_bit_identical(on_cpu, background):
    on_cpu(False)
    saves = partial(ModelCheckpoint, background=background)
    whole = weights(fit("whole", model=Model(0.3), max_epochs=4, callbacks=saves()))
    fit("parts", model=Model(0.3), max_epochs=2, callbacks=saves())
    resumed = weights(fit("parts", model=Model(0.3), max_epochs=4, ckpt_path="auto"))
    assert torch.equal(resumed, whole)
    assert not torch.equal(weights(fit("other", max_epochs=4)), whole)


def test_a_run_resumes_on_the_cpu_after_xla_and_back(on_cpu):
    on_cpu(True)
    expected = weights(fit("cpu", max_epochs=3))
    for epochs, cpu in ((1, False), (2, True), (3, False)):
        on_cpu(cpu)
        model = fit("moves", max_epochs=epochs, ckpt_path="auto")
    torch.testing.assert_close(weights(model), expected, atol=1e-5, rtol=0)
    assert recorded("moves") == pytest.approx(recorded("cpu"), abs=EXACT)


def test_bf16_equals_the_cpu_and_other_precisions_are_refused(on_cpu):
    for cpu in (True, False):
        on_cpu(cpu)
        model = fit(str(cpu), mixed_precision="bf16")
        assert model.dtypes == {torch.bfloat16}
    assert recorded("False") == pytest.approx(recorded("True"), abs=0.05)
    isolation.reset_trainer_state()
    with pytest.raises(
        ValueError, match=r"mixed_precision='fp16' cannot be used on xla:0: use 'bf"
    ):
        Accelerator(mixed_precision="fp16")


def test_compiling_is_left_to_the_device(on_cpu):
    on_cpu(False)
    with pytest.raises(
        ValueError, match=r"dynamo_backend is 'inductor'.*XLA device already compiles"
    ):
        Trainer(dynamo_backend="inductor")


def test_a_nan_stops_the_run_before_it_is_saved(on_cpu):
    class Bad(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 4 else 1.0)

    on_cpu(False)
    with pytest.raises(FloatingPointError, match="The gradients of update 5 hold NaN"):
        fit("bad", model=Bad())
    on_cpu(False)
    fit("skipped", model=(model := Bad()), non_finite="skip")
    assert weights(model).isfinite().all()


def test_predictions_equal_those_of_the_cpu(on_cpu):
    outputs = []
    for cpu in (True, False):
        on_cpu(cpu)
        batches = Trainer(progress_bar=False).predict(Model(), data())
        assert {value.device.type for batch in batches for value in batch.values()} == {"cpu"}
        outputs.append(torch.cat([batch["outputs"] for batch in batches]))
    torch.testing.assert_close(outputs[1], outputs[0], atol=EXACT, rtol=0)


def test_random_numbers_depend_on_the_seed_alone(on_cpu):
    on_cpu(False)
    device = PartialState().device

    def draw() -> list[float]:
        return torch.rand(3, device=device).tolist()

    set_seed(5)
    first, state, second = draw(), rng_state(), draw()
    set_seed(5)
    xla.sync()
    assert draw() == first
    xla.sync()
    with isolated_rng(7):
        inside = draw()
    assert draw() == second != inside
    load_rng_state(state)
    assert draw() == second
    with isolated_rng(7):
        assert draw() == inside


def own_loop(folder: str, resumes: bool = False) -> tuple[list[float], torch.Tensor]:
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    model[5].weight = model[3].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # before the model is moved
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    assert model[5].weight is model[3].weight
    if resumes:
        accelerator.load_state(folder)
    losses = []
    for _ in range(1 if resumes else 2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
        if not resumes and not Path(folder).exists():
            accelerator.save_state(folder)
    assert accelerator.gather_for_metrics(targets).shape == targets.shape
    return torch.stack(losses).tolist(), weights(accelerator.unwrap_model(model))


def test_a_loop_of_ones_own_equals_that_on_the_cpu_and_resumes(on_cpu):
    results = {}
    for cpu in (True, False):
        on_cpu(cpu)
        results[cpu] = own_loop(f"state-{cpu}")
    assert results[False][0] == pytest.approx(results[True][0], abs=EXACT)
    torch.testing.assert_close(results[False][1], results[True][1], atol=1e-5, rtol=0)
    on_cpu(False)
    losses, resumed = own_loop("state-False", resumes=True)
    assert losses == results[False][0][11:]
    assert torch.equal(resumed, results[False][1])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "fsdp_plugin cannot be used on xla:0"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "parallelism_config cannot be used"),
        ({"ddp_kwargs": DistributedDataParallelKwargs(comm_hook="fp16")}, "comm_hook cannot be"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(asked, said):
    options = EngineOptions(device=torch.device("xla:0"), rank=0, world_size=2, **asked)
    with pytest.raises(NotImplementedError, match=said):
        choose_engine(options)


def test_a_process_group_that_sends_nothing_from_the_host_is_refused():
    dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="Leave out init_process_group"):
            pick_device(Launch(launcher="torchrun", world_size=2), cpu=False)
    finally:
        dist.destroy_process_group()


def test_the_state_names_the_device_and_unsupported_options_are_refused(on_cpu, monkeypatch):
    on_cpu(False)
    state = PartialState()
    assert (str(state.device), state.distributed_type) == ("xla:0", DistributedType.XLA)
    assert not state.use_distributed
    isolation.reset_trainer_state()
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.raises(NotImplementedError, match="XLA_USE_BF16=1 changes the dtype of all"):
        PartialState()
