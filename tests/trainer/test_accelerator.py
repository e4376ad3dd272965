"""The `Accelerator` on one process, in a loop of the user's own."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainer import Accelerator
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from trainer.data.dataloader import DataLoaderShard
from trainer.distributed.parallel import Parallel
from trainer.enums import DistributedType
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.scheduler import AcceleratedScheduler
from trainer.state import AcceleratorState, GradientState
from trainer.utils import load

META = torch.device("meta")


def accelerate(**kwargs) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def model_and_optimizer(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def loader(items: int = 4, batch_size: int = 1, **kwargs) -> DataLoader:
    x = torch.randn(items, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, **kwargs)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# -- the constructor ---------------------------------------------------------------------------


def test_an_accelerator_has_the_members_of_its_state():
    accelerator = accelerate()
    for name in [
        "device",
        "distributed_type",
        "num_processes",
        "process_index",
        "local_process_index",
        "is_main_process",
        "is_local_main_process",
        "is_last_process",
        "use_distributed",
        "mixed_precision",
    ]:
        assert getattr(accelerator, name) == getattr(accelerator.state, name), name
    assert accelerator.distributed_type is DistributedType.NO
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.sync_gradients
    assert repr(accelerator).startswith("Accelerator(\nDistributed environment: DistributedType.NO")


def test_variables_are_the_defaults_of_arguments(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = accelerate()
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.mixed_precision == "bf16"
    assert "from the launcher" not in caplog.text
    assert accelerate(gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    assert "gradient_accumulation_steps=2 from the script is used, not ACCEL" in caplog.text
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "four")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'four'"):
        accelerate()


def test_a_window_comes_from_the_argument_or_from_the_plugin():
    assert accelerate(gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = accelerate(gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_accumulation_steps == 2
    assert not accelerator.gradient_state.sync_with_dataloader
    with pytest.raises(ValueError, match="not both; the plugin has num_steps=2, the argument is 3"):
        accelerate(gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin)
    assert not accelerate(
        gradient_accumulation_steps=1, gradient_accumulation_plugin=plugin
    ).gradient_state.sync_with_dataloader


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precision": "bf61"}, ValueError, r"mixed_precision is 'bf61'.*'bf16'\?"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps is 0"),
        ({"gradient_accumulation_steps": 1.5}, ValueError, "gradient_accumulation_steps is 1.5"),
        ({"scheduler_tick": "batch"}, ValueError, "scheduler_tick is 'batch'; .* 'update'"),
        ({"kwargs_handlers": [3]}, TypeError, r"kwargs_handlers holds 3; it takes AutocastKwargs"),
        ({"kwargs_handlers": [KwargsHandler()]}, TypeError, r"kwargs_handlers holds KwargsHandler"),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            ValueError,
            "holds two AutocastKwargs; give one",
        ),
        (
            {"dataloader_config": {"split_batches": True}},
            TypeError,
            "dataloader_config is {'split_batches': True}; it must be a DataLoaderConfiguration",
        ),
        ({"project_config": "x"}, TypeError, "project_config is 'x'; .* ProjectConfiguration"),
        ({"dynamo_plugin": "eager"}, TypeError, "TorchDynamoPlugin. Pass dynamo_backend='eager'"),
        (
            {"gradient_accumulation_plugin": 2, "gradient_accumulation_steps": 2},
            TypeError,
            "gradient_accumulation_plugin is 2; it must be a GradientAccumulationPlugin",
        ),
        *[
            ({name: "no"}, TypeError, f"{name} is 'no'; it must be True or False")
            for name in (
                "cpu",
                "device_placement",
                "step_scheduler_with_optimizer",
                "split_batches",
                "dispatch_batches",
                "even_batches",
                "use_seedable_sampler",
            )
        ],
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Accelerator(**{"cpu": True} | arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, m: a.prepare(), ValueError, "without anything to prepare"),
        (
            lambda a, m: a.prepare(m, 2, device_placement=[True]),
            ValueError,
            "device_placement has 1 elements for 2 objects",
        ),
        (lambda a, m: a.autocast("fp16"), TypeError, "autocast_handler is 'fp16'; .*AutocastKw"),
        (lambda a, m: a.verify_device_map(3), TypeError, "was given 3 .*its model; .*nn.Module"),
        (lambda a, m: a.save(1, 5), TypeError, "f is 5; it must be a path or a file"),
        (lambda a, m: a.prepare(m, device_placement=True), TypeError, r"is True; .*list.*\[True\]"),
        (
            lambda a, m: a.prepare(nn.ReLU(), m, device_placement=[True, "b"]),
            TypeError,
            r"device_placement\[1\] is 'b'; it must be True or False",
        ),
        (lambda a, m: a.prepare_model(m, "cpu"), TypeError, "device_placement is 'cpu'; .* True"),
        (lambda a, m: a.unscale_gradients(m), TypeError, "given Linear.*its optimizer; it must be"),
        (lambda a, m: a.unscale_gradients("x"), TypeError, "given 'x' .*its optimizer; it must be"),
        (lambda a, m: a.unscale_gradients([3]), TypeError, "given 3 .*its optimizer; it must be"),
        (lambda a, m: a.save(1, "f", "no"), TypeError, "safe_serialization is 'no'; .* True or"),
        (lambda a, m: a.save_model(m, "f", "1GB", "no"), TypeError, "safe_serialization is 'no'"),
        (lambda a, m: a.save_state("f", "no"), TypeError, "safe_serialization is 'no'"),
        (lambda a, m: a.save_state(""), ValueError, "output_dir is ''; .*Pass '.'"),
        (lambda a, m: a.register_save_state_pre_hook(3), TypeError, "given 3 .*hook; .*a function"),
        (lambda a, m: a.register_load_state_pre_hook(3), TypeError, "given 3 .*hook; .*a function"),
        (
            lambda a, m: setattr(a, "sync_gradients", "x"),
            TypeError,
            "sync_gradients is 'x'; .*True",
        ),
        (
            lambda a, m: a.split_between_processes([1], "x").__enter__(),
            TypeError,
            "apply_padding is 'x'; it must be True or False",
        ),
        (
            lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0, norm_type=0),
            ValueError,
            "norm_type is 0, which counts",
        ),
        (lambda a, m: a.join_uneven_inputs([m], "x"), TypeError, "even_batches is 'x'; .*True or"),
        (lambda a, m: a.join_uneven_inputs([m, 3]), TypeError, "given 3 .*joinable; .*a model or"),
        (lambda a, m: a.join_uneven_inputs(m), TypeError, r"joinables is Linear.*inputs\(\[model"),
    ],
)
def test_wrong_arguments_of_methods_are_refused(call, error, message):
    accelerator, model = accelerate(), nn.Linear(1, 1)
    with pytest.raises(error, match=message):
        call(accelerator, model)
    assert accelerator.sync_gradients is True
    assert accelerator._models == []  # nothing was prepared by halves


def test_arguments_of_methods_may_be_of_any_fitting_type(tmp_path):
    accelerator, (model, optimizer) = accelerate(), model_and_optimizer()
    accelerator.unscale_gradients(iter([optimizer]))
    with accelerator.join_uneven_inputs((model, optimizer), even_batches=False):
        pass
    assert accelerator.reduce(torch.ones(1), scale=torch.tensor(2.0)).item() == 2
    with open(tmp_path / "f", "wb") as file:
        accelerator.save([3], file)
    assert load(tmp_path / "f") == [3]
    model, _ = accelerator.prepare(model, optimizer, device_placement=(None, False))
    (model(torch.ones(1, 3)) ** 2).sum().backward()
    gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
    # Torch takes orders below 0 too: they are no norms, but gradients are scaled to the limit.
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=-1)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(gradients, -1))


def test_a_second_accelerator_shares_the_state_and_cannot_change_it():
    first = accelerate(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    assert Accelerator().state.__dict__ is first.state.__dict__
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' and cannot be changed.*'fp16'"):
        Accelerator(mixed_precision="fp16")


def test_kwargs_handlers_reach_their_objects():
    accelerator = accelerate(
        mixed_precision="fp16",
        kwargs_handlers=[
            GradScalerKwargs(init_scale=8.0),
            AutocastKwargs(enabled=False),
            DistributedDataParallelKwargs(find_unused_parameters=True),
            InitProcessGroupKwargs(backend="gloo"),
        ],
    )
    assert accelerator.precision.scale(torch.ones(())).item() == 8
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert accelerator.ddp_kwargs.find_unused_parameters


# -- prepare -----------------------------------------------------------------------------------


def test_prepare_takes_any_order_and_number():
    objects = {}
    objects["model"], objects["optimizer"] = model_and_optimizer()
    objects["scheduler"] = StepLR(objects["optimizer"], 1)
    objects["loader"] = loader()
    objects["other"] = object()
    kinds = {
        "model": nn.Linear,
        "optimizer": AcceleratedOptimizer,
        "scheduler": AcceleratedScheduler,
        "loader": DataLoaderShard,
        "other": object,
    }
    names = list(objects)
    for seed in range(6):
        random.Random(seed).shuffle(names)
        accelerator = accelerate()
        prepared = accelerator.prepare(*(objects[name] for name in names))
        assert [type(each) for each in prepared] == [kinds[name] for name in names]
        found = dict(zip(names, prepared, strict=True))
        assert found["model"] is objects["model"]
        assert found["other"] is objects["other"]
        assert found["optimizer"].optimizer is objects["optimizer"]
        assert found["scheduler"].optimizers == [found["optimizer"]]


def test_prepare_of_one_object_returns_no_tuple():
    accelerator = accelerate()
    assert type(accelerator.prepare(loader())) is DataLoaderShard
    assert accelerator.prepare(None) is None
    assert accelerator.prepare(nn.Linear(3, 1), None)[1] is None


def test_preparing_twice_returns_the_same():
    accelerator = accelerate(mixed_precision="bf16")
    model, optimizer = model_and_optimizer()
    first = accelerator.prepare(model, optimizer, loader(), StepLR(optimizer, 1))
    forward = model.forward
    assert accelerator.prepare(*first) == first
    assert Accelerator().prepare(first[1]) is first[1]  # another accelerator's too
    assert model.forward is forward
    assert [len(kept) for kept in (accelerator._models, accelerator._optimizers)] == [1, 1]
    assert [len(kept) for kept in (accelerator._dataloaders, accelerator._schedulers)] == [1, 1]


def test_a_scheduler_is_linked_to_its_own_optimizer():
    accelerator = accelerate()
    first, second = model_and_optimizer()[1], model_and_optimizer()[1]
    one, two = accelerator.prepare(first, second)
    assert accelerator.prepare(StepLR(second, 1)).optimizers == [two]
    assert accelerator.prepare(StepLR(one, 1)).optimizers == [one]  # made for the prepared one
    _, stranger = model_and_optimizer()
    assert accelerator.prepare(StepLR(stranger, 1)).optimizers == [one, two]


def test_device_placement_is_the_constructors_or_each_objects_own():
    def prepared(*placement: bool, **kwargs):
        accelerator = accelerate(**kwargs)
        accelerator.state.__dict__["device"] = META
        given = list(placement) if placement else None
        model, data = accelerator.prepare(nn.Linear(3, 1), loader(), device_placement=given)
        found = [model.weight.device.type, next(iter(data))[0].device.type]
        AcceleratorState._reset_state(reset_partial_state=True)
        return found

    assert prepared() == ["meta", "meta"]
    assert prepared(device_placement=False) == ["cpu", "cpu"]
    assert prepared(True, False) == ["meta", "cpu"]
    assert prepared(False, True) == ["cpu", "meta"]
    assert prepared(True, True, device_placement=False) == ["meta", "meta"]


def test_data_loader_configuration_reaches_the_loader():
    accelerator = accelerate(
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True)
    )
    assert accelerator.prepare(loader()).non_blocking
    accelerator.engine.parallel = Parallel(dp_size=2)
    assert [len(batch[0]) for batch in accelerator.prepare(loader(3, 2))] == [2]


def test_the_order_follows_the_seed_of_the_process():
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        data = DataLoader(TensorDataset(torch.arange(20)), 20, shuffle=True)
        return next(iter(accelerate().prepare(data)))[0].tolist()

    assert order(1) == order(1) != order(2)


# -- accumulation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "with_data", "syncs"),
    [
        (4, True, [False, False, True, True] * 2),  # the second epoch starts afresh
        (4, False, [False, False, True, False, False, True, False, False]),
        (None, True, [False, False, True, False]),  # without a prepared loader
    ],
)
def test_a_window_ends_with_its_steps_and_with_the_data_if_sync_with_dataloader(
    batches, with_data, syncs
):
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=with_data)
    accelerator = accelerate(gradient_accumulation_plugin=plugin)
    data = accelerator.prepare(loader(batches)) if batches else range(2)
    seen = []
    for _ in range(2):
        for _ in data:
            with accelerator.accumulate():
                seen.append(accelerator.sync_gradients)
    assert seen == syncs


def test_a_loop_left_by_break_leaves_the_next_window_alone():
    accelerator = accelerate(gradient_accumulation_steps=2)
    data = accelerator.prepare(loader(1))
    for _ in data:
        assert accelerator.gradient_state.end_of_dataloader
        break
    assert not accelerator.gradient_state.end_of_dataloader
    with accelerator.accumulate():
        assert not accelerator.sync_gradients


def test_a_validation_inside_the_loop_does_not_end_a_window():
    accelerator = accelerate(gradient_accumulation_steps=2)
    data, held_out = accelerator.prepare(loader(4), loader(1))
    seen = []
    for _ in data:
        for _ in held_out:
            pass
        with accelerator.accumulate():
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]


def test_the_window_may_change_during_training():
    accelerator = accelerate(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1, sync_with_dataloader=False
        )
    )
    accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_accumulation_steps == GradientState().num_steps == 2
    assert not accelerator.gradient_state.sync_with_dataloader
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 0"):
        accelerator.gradient_accumulation_steps = 0


def test_accumulated_micro_batches_update_like_the_whole_batch():
    model, optimizer = model_and_optimizer()
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in loader(8, 4):
        plain.zero_grad()
        loss_of(reference, batch).backward()
        plain.step()

    accelerator = accelerate(gradient_accumulation_steps=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(8, 1))
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.steps == 2
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-6, atol=1e-7)


def test_no_sync_of_the_models_is_entered_in_open_windows():
    class Recording(nn.Linear):
        inside = 0

        @contextlib.contextmanager
        def no_sync(self):
            self.inside += 1
            yield
            self.inside -= 1

    accelerator = accelerate(gradient_accumulation_steps=2)
    models = accelerator.prepare(Recording(1, 1), Recording(1, 1))

    def inside() -> list[int]:
        return [model.inside for model in models]

    for expected in (1, 0):
        with accelerator.accumulate(*models):
            assert inside() == [expected] * 2
        assert inside() == [0, 0]
    with accelerator.no_sync():  # every prepared model
        assert inside() == [1, 1]
    with accelerator.no_sync(models[1]):
        assert inside() == [0, 1]
    with accelerator.no_sync(nn.Linear(1, 1)):
        assert inside() == [0, 0]  # a model without peers has nothing to hold back


# -- precision, clipping, steps ----------------------------------------------------------------


def test_autocast_computes_in_the_precision_unless_a_handler_forbids():
    accelerator = accelerate(mixed_precision="bf16")
    x = torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype == torch.float32


def test_a_prepared_model_computes_narrow_and_returns_float32():
    accelerator = accelerate(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(64, 1))
    x = torch.randn(4, 64)
    wide = nn.functional.linear(x, model.weight, model.bias)
    assert model(x).dtype == torch.float32
    assert not torch.equal(model(x), wide)
    torch.testing.assert_close(model(x), wide, rtol=0.05, atol=0.05)


def test_backward_divides_by_the_window_and_passes_arguments_on():
    accelerator = accelerate(gradient_accumulation_steps=4)
    weight = torch.ones(1, requires_grad=True)
    loss = weight.sum() * 2
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert weight.grad.item() == 1.0


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("loss", [3.0, None, "loss"])
def test_only_a_tensor_is_a_loss(loss, precision, arguments):
    accelerator = accelerate(mixed_precision=precision, **arguments)
    with pytest.raises(TypeError, match=f"backward was given {loss!r} of .*its loss; .* a tensor"):
        accelerator.backward(loss)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_works_on_real_gradients(precision):
    accelerator = accelerate(
        mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward((weight * torch.tensor([3.0, 4.0])).sum())
    assert accelerator.clip_grad_norm_((p for p in [weight]), 1.0).item() == 5.0
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.4, 0.2], rel=1e-5)
    optimizer.zero_grad()
    accelerator.backward((weight * torch.tensor([3.0, -4.0])).sum())
    assert accelerator.clip_grad_value_([weight], 0.5) is None
    assert weight.grad.tolist() == [0.5, -0.5]
    assert accelerator.clip_grad_norm_([weight], 100.0, norm_type=1).item() == 1.0


def test_unscale_gradients_of_one_of_some_and_of_all_optimizers():
    accelerator = accelerate(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)]
    )
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    prepared = accelerator.prepare(*(torch.optim.SGD([w], lr=1.0) for w in weights))
    accelerator.backward(sum(w.sum() for w in weights))
    accelerator.unscale_gradients(prepared[0])
    assert [w.grad.item() for w in weights] == [1, 16, 16]
    accelerator.unscale_gradients([prepared[1].optimizer])
    assert [w.grad.item() for w in weights] == [1, 1, 16]
    accelerator.unscale_gradients()
    assert [w.grad.item() for w in weights] == [1, 1, 1]


def pair(**scaler) -> tuple[Accelerator, list[nn.Module], list[torch.optim.Optimizer]]:
    """Two models of one weight 0 each, whose gradients are 1, and their optimizers; fp16."""
    handlers = [GradScalerKwargs(init_scale=1024.0, **scaler)]
    accelerator = accelerate(mixed_precision="fp16", kwargs_handlers=handlers)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    return accelerator, list(accelerator.prepare(*models)), list(accelerator.prepare(*optimizers))


@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_one_model_leaves_the_others_gradients_alone(by_value):
    accelerator, models, optimizers = pair()
    for model in models:
        accelerator.backward(model(torch.ones(1, 1)).sum())
    for model, optimizer in zip(models, optimizers, strict=True):
        if by_value:
            accelerator.clip_grad_value_(model.parameters(), 10.0)
        else:
            assert accelerator.clip_grad_norm_(model.parameters(), 10.0) == 1
        if model is models[0]:
            assert models[1].weight.grad.item() == 1024  # as scaled as what may be added to it
        optimizer.step()
        assert model.weight.item() == -1
    accelerator.unscale_gradients()  # all have stepped: nothing hangs on the scale
    assert [model.weight.grad.item() for model in models] == [1, 1]


def test_an_optimizer_that_steps_less_often_uses_gradients_of_one_scale():
    accelerator, models, optimizers = pair(growth_interval=1)
    for _ in range(2):
        accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
        accelerator.clip_grad_norm_(models[0].parameters(), 10.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
    optimizers[1].step()
    assert [model.weight.item() for model in models] == [-2, -2]


@pytest.mark.parametrize("is_set", [False, True])
def test_the_scaler_has_the_scale_of_torchs_own_after_each_step(is_set):
    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    settings = {"init_scale": 1024.0, "growth_interval": 2}
    handlers = [GradScalerKwargs(**settings)]
    if is_set:
        accelerator = accelerate()
        with pytest.raises(TypeError, match="scaler is 'fp16'"):
            accelerator.scaler = "fp16"
        accelerator.scaler = given = torch.amp.GradScaler("cpu", **settings)
        assert accelerator.scaler is given
    else:
        accelerator = accelerate(mixed_precision="fp16", kwargs_handlers=handlers)
    ours, optimizer = accelerator.prepare(*prepared())
    scaler = accelerator.scaler
    torchs, (model, sgd) = torch.amp.GradScaler("cpu", **settings), prepared()
    for size in (1.0, 1.0, 1e37, 1.0, 1e37, 1.0, 1.0):
        x = torch.ones(1, 2)
        before = scaler.get_scale()
        accelerator.backward(ours(x).sum() * size)
        if size == 1.0:
            accelerator.clip_grad_norm_(ours.parameters(), 1.0)
            assert scaler.get_scale() == before  # no update has been made
        optimizer.step()
        torchs.scale(model(x).sum() * size).backward()
        torchs.step(sgd)
        torchs.update()
        for _ in range(2):  # reading changes nothing
            assert scaler.get_scale() == accelerator.scaler.get_scale() == torchs.get_scale()
            assert scaler.state_dict() == torchs.state_dict()
        assert (scaler.get_scale() < before) == accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        sgd.zero_grad()
    accelerator.scaler = None
    accelerator.backward(ours(torch.ones(1, 2)).sum())
    assert ours.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_scaler_that_is_switched_off_is_saved_and_loaded():
    handlers = [GradScalerKwargs(enabled=False)]
    accelerator = accelerate(mixed_precision="fp16", kwargs_handlers=handlers)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert (accelerator.scaler.get_scale(), accelerator.scaler.state_dict()) == (1.0, {})
    accelerator.save_state("saved")
    accelerator.load_state("saved")


def test_reading_the_scale_between_two_optimizers_changes_no_update():
    def train(*, reads: bool) -> list[object]:
        AcceleratorState._reset_state()
        accelerator, models, optimizers = pair(growth_interval=1)
        found = []
        for sizes in ((1.0, 1.0), (1e30, 1.0), (1.0, 1e30), (1e30, 1e30), (1.0, 1.0)):
            x = torch.ones(1, 1)
            losses = [model(x).sum() * each for model, each in zip(models, sizes, strict=True)]
            accelerator.backward(sum(losses))
            if sizes == (1e30, 1.0):  # its flag is there before the other has stepped
                accelerator.clip_grad_norm_(models[1].parameters(), 10.0)
            for optimizer in optimizers:
                optimizer.step()
                if reads:
                    accelerator.scaler.get_scale(), accelerator.scaler.state_dict()
                optimizer.zero_grad()
            found += [model.weight.item() for model in models]
            found += [optimizer.step_was_skipped for optimizer in optimizers]
        return [*found, accelerator.precision.state_dict()]

    assert train(reads=True) == train(reads=False)


def test_clipping_takes_parameters_and_not_a_model():
    accelerator = accelerate()
    for model in (nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))):
        for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(TypeError, match=r"parameters is a .*model.parameters\(\)"):
                clip(model, 1.0)


def test_an_update_that_overflowed_is_skipped_with_its_tick():
    accelerator = accelerate(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.5)
    optimizer, scheduler = accelerator.prepare(sgd, StepLR(sgd, 1, gamma=0.5))
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        accelerator.backward(weight.sum() * factor)
        optimizer.step()
        scheduler.step()
        seen.append(
            (accelerator.optimizer_step_was_skipped, weight.item(), *scheduler.get_last_lr())
        )
    assert seen == [(False, 0.5, 0.25), (True, 0.5, 0.25), (False, 0.25, 0.125)]


@pytest.mark.parametrize(
    ("arguments", "rates"),
    [
        ({}, [1.0, 1.0, 0.5, 0.25]),
        ({"scheduler_tick": "update"}, [1.0, 1.0, 0.5, 0.25]),
        ({"step_scheduler_with_optimizer": False}, [0.5, 0.25, 0.125, 0.0625]),
    ],
)
@pytest.mark.parametrize("on_prepared", [False, True])
def test_a_scheduler_ticks_with_the_updates_of_its_optimizer(arguments, rates, on_prepared):
    accelerator = accelerate(gradient_accumulation_steps=3, **arguments)
    model, sgd = model_and_optimizer(lr=1.0)
    model, optimizer, data = accelerator.prepare(model, sgd, loader(4))
    chosen = optimizer if on_prepared else sgd
    scheduler = accelerator.prepare(StepLR(chosen, 1, gamma=0.5))
    chosen.step()  # a schedule that ticks before any update is torch's warning
    seen = []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append(scheduler.get_last_lr()[0])
    assert seen == rates


def test_a_plateau_scheduler_is_prepared_like_the_others():
    accelerator = accelerate()
    _, sgd = model_and_optimizer(lr=1.0)
    scheduler = accelerator.prepare(ReduceLROnPlateau(sgd, factor=0.5, patience=0))
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert scheduler.get_last_lr() == [0.5]


# -- together ----------------------------------------------------------------------------------


def test_collectives_of_one_process_answer_at_once():
    accelerator = accelerate()
    tree = {"a": torch.ones(2), "b": "text"}
    assert accelerator.gather(tree) is tree
    tensor = torch.tensor([2.0])
    reduced = accelerator.reduce({"x": tensor}, "mean", scale=3.0)["x"]
    assert (reduced.item(), tensor.item()) == (6.0, 2.0)
    assert accelerator.reduce(tensor) is not tensor
    with pytest.raises(ValueError, match="reduction is 'max'; it must be one of 'mean', 'none'"):
        accelerator.reduce(tensor, "max")
    assert accelerator.pad_across_processes(tensor, dim=0, pad_index=7, pad_first=True) is tensor
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    pair = (torch.ones(1), torch.ones(2))
    assert accelerator.gather_for_metrics(pair, use_gather_object=True) == list(pair)
    accelerator.wait_for_everyone()
