"""Mixed precision through the Trainer, on the CPU, which does all of it."""

import copy
import logging
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from trainer import (
    Accelerator,
    AcceleratorState,
    DataModule,
    PartialState,
    Trainer,
    TrainModule,
    notebook_launcher,
)
from trainer.configuration import GradScalerKwargs


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.computed_in, self.losses, self.scales = set(), [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layer(x)
        self.computed_in.add(("train", out.dtype))
        loss = torch.nn.functional.mse_loss(out.float(), y.float())
        self.losses.append(loss.item())
        return loss * self.scales[batch_idx] if self.scales else loss

    def validation_step(self, batch, batch_idx):
        self.computed_in.add(("validation", self.layer(batch[0]).dtype))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


def loader(batches=8):
    x = torch.randn(4 * batches, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + 1), batch_size=4)


def make(precision, *callbacks, scale=None, **arguments):
    handlers = None if scale is None else [GradScalerKwargs(init_scale=scale)]
    return Trainer(
        mixed_precision=precision,
        cpu=True,
        kwargs_handlers=handlers,
        callbacks=list(callbacks),
        progress_bar=False,
        **{"max_epochs": 1, "checkpointing": False, "project_dir": "run"} | arguments,
    )


def fit(precision, module=None, *callbacks, batches=8, **arguments):
    module = module or Net()
    trainer = make(precision, *callbacks, **arguments)
    trainer.fit(module, loader(batches), loader(1))
    return module, trainer


DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
def test_each_precision_trains_with_its_type_and_float32_weights(precision):
    module, trainer = fit(precision, max_epochs=4, num_sanity_val_steps=1)
    dtype = DTYPES[precision]
    assert module.computed_in == {("train", dtype), ("validation", dtype)}
    assert module.layer.weight.dtype == torch.float32
    assert trainer.global_step == 32
    assert sum(module.losses[-8:]) < 0.1 * sum(module.losses[:8])
    (prediction,) = make(precision).predict(module, loader(1))
    assert prediction.dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_a_dtype_trains_as_a_converted_module_on_converted_batches(dtype):
    kind = torch.bfloat16 if dtype == "bfloat16" else dtype

    class Moving(DataModule):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [each.to(device) for each in batch]

        def train_dataloader(self):
            return loader()

    torch.manual_seed(0)
    module, by_hand = Net(), Net().to(kind)
    by_hand.load_state_dict(module.state_dict())
    converted = [TensorDataset(*(each.to(kind) for each in loader().dataset.tensors))]
    make(None, dtype=dtype).fit(module, datamodule=Moving())
    make(None).fit(by_hand, DataLoader(*converted, batch_size=4))
    assert module.computed_in == {("train", kind)}
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict(), rtol=0, atol=0)
    (prediction,) = make(None, dtype=dtype).predict(module, loader(1))
    assert prediction.dtype == kind


def test_a_dtype_excludes_mixed_precision_and_a_ready_accelerator():
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of"):
        make(None, dtype=torch.int8)
    with pytest.raises(ValueError, match="mixed_precision is 'fp16': leave one"):
        make("fp16", dtype="bfloat16")
    with pytest.raises(ValueError, match="Pass accelerator, or dtype for the Trainer"):
        Trainer(dtype="bfloat16", accelerator=Accelerator(cpu=True))


def test_low_precision_follows_float32():
    weights = {}
    for precision in DTYPES:
        torch.manual_seed(0)
        module, _ = fit(precision, max_grad_norm=0.5, scale=256.0)
        weights[precision] = module.layer.weight.detach()
    torch.testing.assert_close(weights["fp16"], weights["no"], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(weights["bf16"], weights["no"], rtol=5e-2, atol=5e-2)
    assert not torch.equal(weights["fp16"], weights["no"])


@pytest.mark.gpu
def test_fp16_on_a_gpu_is_the_loop_with_torchs_scaler():
    torch.manual_seed(0)
    ours, theirs = Net(), torch.nn.Linear(2, 1, device="cuda")
    theirs.load_state_dict(ours.layer.state_dict())
    Trainer(mixed_precision="fp16", max_epochs=1, checkpointing=False, progress_bar=False).fit(
        ours, loader()
    )
    optimizer, scaler = torch.optim.SGD(theirs.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    for x, y in loader():
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(theirs(x.cuda()).float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert ours.computed_in == {("train", torch.float16)}
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.layer.state_dict()[name].cuda(), value)


def test_fp16_on_the_cpu_warns_of_the_gradient_scaler(caplog):
    with caplog.at_level(logging.WARNING):
        make("bf16")
        assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        make("fp16")
    assert "mixed_precision='fp16' on the CPU" in caplog.text
    assert "gradient scaler" in caplog.text
    assert "'bf16'" in caplog.text


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_weights_that_the_scaler_cannot_train_are_refused_with_the_remedy(max_grad_norm):
    module = Net().half()
    module.training_step = lambda batch, _: module.layer(batch[0].half()).float().square().mean()
    with pytest.raises(ValueError, match=r"but some .* are torch\.float16 .*module\.float\(\)"):
        fit("fp16", module, max_grad_norm=max_grad_norm)


def test_errors_of_the_scaler_are_explained_and_others_passed_on():
    def train(lr):
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        module = torch.nn.Linear(2, 1).half()
        module, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr))
        accelerator.backward(module(torch.ones(1, 2)).sum())
        optimizer.step()

    with pytest.raises(ValueError, match=r"some .* are torch\.float16 \(Attempting"):
        train(0.1)
    for text in ("out of memory", "state is missing"):
        with (
            mock.patch.object(torch.amp.GradScaler, "step", side_effect=RuntimeError(text)),
            pytest.raises(RuntimeError, match=f"^{text}$"),
        ):
            train(0.1)


class Watch(Callback):
    """What each update left behind, and the scale that its gradients had."""

    def __init__(self):
        self.updates = []

    def on_after_backward(self, trainer, module):
        self.scale = trainer.accelerator.precision.scaler.get_scale()

    def on_train_step_end(self, trainer, module):
        self.updates.append(
            (
                trainer.global_step,
                self.scale,
                trainer.optimizers[0].param_groups[0]["lr"],
                module.layer.weight.detach().clone(),
            )
        )


def test_the_scaler_leaves_out_an_update_that_overflows_and_counts_it():
    module, watch = Scheduled(), Watch()
    module.scales = [1.0, float("inf"), 1.0]
    fit("fp16", module, watch, batches=3, scale=1024.0)
    steps, scales, rates, weights = zip(*watch.updates, strict=True)
    assert steps == (1, 2, 3)
    assert scales == (1024.0, 1024.0, 512.0)
    assert rates == pytest.approx((0.1 / 2, 0.1 / 3, 0.1 / 4))  # the schedule goes on
    assert torch.equal(weights[0], weights[1])  # left out
    assert not torch.equal(weights[1], weights[2])
    assert all(weight.isfinite().all() for weight in weights)


def test_gradients_are_unscaled_before_hooks_and_clipping():
    norms = []

    class Norms(Callback):
        def norm(self, module):
            norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.norm(module)

        def on_before_zero_grad(self, trainer, module, optimizer):
            self.norm(module)

    arguments = {"max_grad_norm": 0.01, "max_steps": 1}
    for precision in ("no", "fp16"):
        torch.manual_seed(0)
        fit(precision, None, Norms(), **arguments)
    (whole, clipped), (whole16, clipped16) = norms[:2], norms[2:]
    assert clipped == pytest.approx(0.01, rel=1e-3)
    assert clipped16 == pytest.approx(0.01, rel=1e-3)
    assert whole16 == pytest.approx(whole, rel=1e-2)


def test_the_scale_is_saved_and_restored():
    first = Net()
    first.scales = [1.0, float("inf")]
    fit("fp16", first, batches=2, scale=1024.0, checkpointing=True)
    watch, second = Watch(), Net()
    trainer = make("fp16", watch, scale=1024.0, max_epochs=2)
    trainer.fit(second, loader(2), ckpt_path="last")
    assert watch.updates[0][1] == 512.0


def test_manual_optimisation_is_scaled_too():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, max_grad_norm=10.0)
            optimizer.step()

    weights = []
    for precision in ("no", "fp16"):
        torch.manual_seed(0)
        module, trainer = fit(precision, Manual(), scale=256.0)
        assert trainer.global_step == 8
        weights.append(module.layer.weight.detach())
    torch.testing.assert_close(*weights, rtol=5e-3, atol=5e-3)


def test_two_ranks_leave_the_same_update_out(ranks2):
    """The gradients of rank 1 alone overflow: both leave the update out."""

    def run():
        torch.manual_seed(0)
        module = Net()
        watch = Watch()
        trainer = make("fp16", watch, scale=256.0)
        bad = trainer.accelerator.process_index == 1
        module.scales = [1.0, float("inf") if bad else 1.0, 1.0]
        trainer.fit(module, loader(6))
        return watch.updates

    first, second = ranks2(run)
    for one, other in zip(first, second, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one[3], other[3])
    assert [scale for _, scale, *_ in first] == [256.0, 256.0, 128.0]
    assert torch.equal(first[0][3], first[1][3])
    assert not torch.equal(first[1][3], first[2][3])


# -- whose precision ---------------------------------------------------------------------------


def test_each_trainer_has_its_own_precision(monkeypatch):
    trainers = {name: make(name, barebones=True) for name in ("no", "bf16")}
    for name, dtype in [("bf16", torch.bfloat16), ("no", torch.float32), ("bf16", torch.bfloat16)]:
        module = Net()
        trainers[name].fit(module, loader())
        assert module.computed_in == {("train", dtype)}
        assert trainers[name].accelerator.mixed_precision == name
    assert make(None).accelerator.mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make(None).accelerator.mixed_precision == "bf16"


class Asking(Callback):
    """What hooks find of the state of the run."""

    def __init__(self):
        self.found = []

    def on_train_start(self, trainer, module):
        for asked in (AcceleratorState(), PartialState(), Accelerator(), copy.copy(Accelerator())):
            self.found.append(asked.mixed_precision)
        inner = make("fp16", barebones=True)
        inner.fit(Net(), loader())
        self.found.append(AcceleratorState().mixed_precision)
        self.found.append(inner.accelerator.mixed_precision)


def test_hooks_find_the_precision_of_their_own_trainer():
    first, second = Asking(), Asking()
    trainers = [make("bf16", first), make("no", second, project_dir="other")]
    for trainer in trainers:
        trainer.fit(Net(), loader())
    assert first.found == ["bf16"] * 5 + ["fp16"]
    assert second.found == ["no"] * 5 + ["fp16"]
    assert AcceleratorState().mixed_precision == "no"  # of the one that was made last


def test_an_accelerator_made_after_a_trainer_has_its_own_precision():
    trainer = make("bf16")
    assert Accelerator().mixed_precision == "no"
    assert trainer.accelerator.mixed_precision == "bf16"
    with pytest.raises(ValueError, match="already been initialised with mixed_precision='no'"):
        Accelerator(mixed_precision="bf16")
    with pytest.raises(ValueError, match="already been initialised with mixed_precision='no'"):
        make("fp16")
    assert make(None).accelerator.mixed_precision == "no"


@pytest.mark.parametrize("kind", [Accelerator, Trainer])
def test_one_that_is_refused_leaves_the_state_of_a_trainer(kind):
    make("bf16")
    with pytest.raises(ValueError, match="mixed_precision is 'bf61'"):
        kind(mixed_precision="bf61")
    assert AcceleratorState().mixed_precision == "bf16"


def test_a_function_of_a_notebook_does_not_ask_for_the_precision_of_a_trainer():
    make("bf16")

    def train():
        return make("fp16").accelerator.mixed_precision, make(None).accelerator.mixed_precision

    assert notebook_launcher(lambda: 1, num_processes=1) == 1
    assert AcceleratorState().mixed_precision == "bf16"
    assert notebook_launcher(train, num_processes=1, mixed_precision="no") == ("fp16", "no")
