"""Members of the `Accelerator` that hand their work on: each does so, with all its arguments.

What the work consists of is tested where it is done; `tests/accelerator_members.md` says where.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from trackers import GeneralTracker
from trainer import Accelerator, Trainer
from trainer.big_models import load_checkpoint_in_model
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.engines.single import SingleDevice
from trainer.errors import CheckpointError
from trainer.state import AcceleratorState, GradientState, PartialState


def accelerate(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def pretend(**what: Any) -> None:
    """Let this process take itself for another; nothing may be exchanged then."""
    PartialState().__dict__.update(what)


def loader(items: int = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(items).float().unsqueeze(1)), **kwargs)


def network(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def read(data: DataLoader) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in data]


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


# -- what it was told --------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones():
    accelerator = accelerate()
    assert accelerator.device_placement
    assert accelerator.step_scheduler_with_optimizer
    assert accelerator.scheduler_tick == "process"
    assert accelerator.rng_types == ["generator"]
    assert accelerate(rng_types="torch").rng_types == ["torch"]
    assert accelerator.dataloader_config == DataLoaderConfiguration()
    assert accelerator.project_configuration == ProjectConfiguration()
    assert (accelerator.project_dir, accelerator.logging_dir) == (None, None)
    assert (accelerator.log_with, accelerator.trackers) == ([], [])
    assert (accelerator.scaler, accelerator.ddp_kwargs) == (None, None)
    assert (accelerator.save_iteration, accelerator.step) == (0, 0)
    assert accelerator.dynamo_plugin.backend == "NO"
    assert type(accelerator.engine) is SingleDevice
    assert accelerator.parallelism_config is None
    assert accelerator.state.__dict__ is AcceleratorState().__dict__
    assert accelerator.gradient_state.__dict__ is GradientState().__dict__


def test_the_accumulation_window_is_the_last_one_that_was_asked_for():
    plugin = GradientAccumulationPlugin(num_steps=3)
    state = accelerate(gradient_accumulation_plugin=plugin).gradient_state
    assert state.initialized
    assert state.plugin is plugin
    assert accelerate(gradient_accumulation_steps=2).gradient_state.num_steps == 2
    assert state.num_steps == 2
    GradientState._reset_state()
    assert not state.initialized


def test_options_of_the_constructor_win_over_those_of_a_configuration():
    options = {"dispatch_batches": True, "non_blocking": True, "use_stateful_dataloader": True}
    config = DataLoaderConfiguration(**options)
    accelerator = accelerate(
        dataloader_config=config, dispatch_batches=False, even_batches=False, split_batches=True
    )
    assert config == DataLoaderConfiguration(**options)
    assert accelerator.use_stateful_dataloader
    assert accelerator.split_batches
    assert accelerator.dispatch_batches is False
    assert not accelerator.even_batches
    assert not accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    accelerator.even_batches = True
    assert accelerator.dataloader_config.even_batches


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"project_dir": "a"}, ("a", "a")),
        ({"project_config": ProjectConfiguration(logging_dir="logs")}, (None, "logs")),
        (
            {"project_dir": "a", "project_config": ProjectConfiguration(logging_dir="logs")},
            ("a", "logs"),
        ),
        ({"project_dir": "a", "project_config": ProjectConfiguration(project_dir="b")}, ("b", "b")),
    ],
)
def test_the_folder_is_the_configurations_or_else_the_arguments(given, expected):
    accelerator = accelerate(**given)
    assert (accelerator.project_dir, accelerator.logging_dir) == expected


def test_rng_types_reach_the_loaders():
    accelerator = accelerate(rng_types=["torch", "generator"])
    read(accelerator.prepare(loader()))
    with pytest.raises(ValueError, match="rng_types is 'cuda'"):  # said by the pass
        read(accelerate(rng_types=["cuda"]).prepare(loader()))
    with pytest.raises(ValueError, match="rng_types is 'dice'"):  # said at once
        accelerate(rng_types=["dice"])


def test_two_engines_at_once_are_refused(monkeypatch):
    shards = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    with pytest.raises(ValueError, match=r"megatron_lm_plugin .* cannot be combined with fsdp"):
        accelerate(megatron_lm_plugin=MegatronLMPlugin(), **shards)
    with pytest.raises(TypeError, match="megatron_lm_plugin is 3"):
        accelerate(megatron_lm_plugin=3)
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ValueError, match=r"megatron_lm_plugin .* cannot be combined"):
        accelerate(**shards)


def test_dynamo_settings_are_those_of_each_accelerator_or_of_the_environment(monkeypatch):
    def compiles(accelerator: Accelerator) -> bool:
        return accelerator.prepare(network())._compiled_call_impl is not None

    plugin = TorchDynamoPlugin(backend="eager")
    for arguments in ({"dynamo_backend": "eager"}, {"dynamo_plugin": plugin}):
        first = accelerate(**arguments)
        assert first.dynamo_plugin.backend == "EAGER"
        assert compiles(first)
    for backend, compiled in ((None, False), ("no", False), ("aot_eager", True)):
        other = accelerate(dynamo_backend=backend)
        assert other.dynamo_plugin.backend == (backend or "no").upper()
        assert compiles(other) == compiled
    assert compiles(first)
    assert AcceleratorState().dynamo_plugin.backend == "EAGER"  # what the first was made with
    with pytest.raises(ValueError, match="dynamo_backend or dynamo_plugin, not both"):
        accelerate(dynamo_backend="eager", dynamo_plugin=plugin)
    with pytest.raises(ValueError, match="backend is 'eagre'"):
        accelerate(dynamo_backend="eagre")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")  # that of a launcher is for all
    assert accelerate().dynamo_plugin.backend == "AOT_EAGER"
    assert compiles(accelerate())


def test_a_trainer_that_compiles_leaves_others_as_they_are(tmp_path):
    compiling = Trainer(dynamo_backend="eager", project_dir=tmp_path, max_steps=1)
    plain = Trainer(project_dir=tmp_path, max_steps=1)
    assert compiling.accelerator.dynamo_plugin.backend == "EAGER"
    assert plain.accelerator.dynamo_plugin.backend == "NO"
    assert accelerate().prepare(network())._compiled_call_impl is None


def test_an_accelerator_that_failed_to_start_leaves_no_state(monkeypatch):
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no bfloat16 here")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", refuse)  # a device that cannot
        for precision in ("bf16", "fp16"):
            with pytest.raises(ValueError, match=f"'{precision}' cannot be used on cpu"):
                accelerate(mixed_precision=precision)
    first = accelerate()
    with pytest.raises(ValueError, match="already been initialised with mixed_precision"):
        accelerate(mixed_precision="bf16")
    assert first.mixed_precision == AcceleratorState().mixed_precision == "no"


def test_kwargs_handlers_are_kept_by_their_names():
    handlers = [
        AutocastKwargs(),
        DistributedDataParallelKwargs(),
        GradScalerKwargs(),
        InitProcessGroupKwargs(backend="nccl"),
    ]
    accelerator = accelerate(kwargs_handlers=handlers)
    assert [
        accelerator.autocast_handler,
        accelerator.ddp_handler,
        accelerator.scaler_handler,
        accelerator.init_handler,
    ] == handlers
    assert accelerator.ddp_kwargs is accelerator.ddp_handler
    assert accelerate().init_handler is None
    with pytest.raises(TypeError, match=r"must be a list: \[AutocastKwargs\(\.\.\.\)\]"):
        accelerate(kwargs_handlers=AutocastKwargs())


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_earlier_names_of_the_precision(precision):
    accelerator = accelerate(mixed_precision=precision)
    optimizer = accelerator.prepare(torch.optim.SGD(network().parameters()))
    assert accelerator.native_amp == (precision != "no")
    with pytest.warns(FutureWarning, match="compare mixed_precision == 'fp16'"):
        assert accelerator.use_fp16 == (precision == "fp16")
    assert optimizer.scaler is accelerator.scaler
    with pytest.warns(FutureWarning, match="is_overflow is the earlier name"):
        assert optimizer.is_overflow is False


def test_native_amp_turns_mixed_precision_off_and_on():
    accelerator = accelerate(mixed_precision="bf16")
    x, exact = torch.ones(1, 1), network(1 / 3)(torch.ones(1, 1))
    before = accelerator.prepare(network(1 / 3))
    assert not torch.equal(before(x), exact)  # rounded to bf16
    accelerator.native_amp = False
    assert torch.equal(before(x), exact)
    assert torch.equal(accelerator.prepare(network(1 / 3))(x), exact)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.native_amp = True
    assert not torch.equal(before(x), exact)
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
    AcceleratorState._reset_state()
    plain = accelerate(mixed_precision="no")
    plain.native_amp = False  # as scripts say for MPS, whatever the precision
    with pytest.raises(ValueError, match="native_amp=True needs a precision"):
        plain.native_amp = True


# -- who runs what -----------------------------------------------------------------------------


def test_each_decorator_runs_its_function_on_its_process():
    accelerator = accelerate()
    ran: list[str] = []
    functions = {
        "main": accelerator.on_main_process(lambda: ran.append("main")),
        "local main": accelerator.on_local_main_process(lambda: ran.append("local main")),
        "last": accelerator.on_last_process(lambda: ran.append("last")),
    }

    def run(**where: int) -> list[str]:
        pretend(num_processes=4, _local_world_size=2, **where)
        indexed = {
            "third": accelerator.on_process(lambda: ran.append("third"), 2),
            "local second": accelerator.on_local_process(lambda: ran.append("local second"), 1),
        }
        ran.clear()
        for function in (functions | indexed).values():
            function()
        return list(ran)

    assert run(process_index=0, local_process_index=0) == ["main", "local main"]
    assert run(process_index=1, local_process_index=1) == ["local second"]
    assert run(process_index=2, local_process_index=0) == ["local main", "third"]
    assert run(process_index=3, local_process_index=1) == ["last", "local second"]


def test_going_first_and_splitting_inputs_are_those_of_the_state():
    accelerator = accelerate()
    for turn in (accelerator.main_process_first, accelerator.local_main_process_first):
        with pytest.raises(KeyError, match="missing"), turn():
            raise KeyError("missing")
    pretend(num_processes=2, process_index=1)
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        assert part == ["c"]
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        assert part == ["c", "c"]


def test_print_is_silent_beside_the_first_of_a_machine(capsys):
    accelerator = accelerate()
    pretend(num_processes=4, process_index=3, local_process_index=1)
    accelerator.print("hello")
    pretend(process_index=2, local_process_index=0)
    accelerator.print("here", "we are", sep=", ")
    assert capsys.readouterr().out == "here, we are\n"


# -- one kind at a time ------------------------------------------------------------------------


def test_each_kind_can_be_prepared_by_itself():
    accelerator = accelerate(step_scheduler_with_optimizer=False)
    model = accelerator.prepare_model(network())
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = accelerator.prepare_scheduler(StepLR(optimizer, 1, gamma=0.5))
    data = accelerator.prepare_data_loader(loader(batch_size=2))
    assert accelerator.prepare(model, optimizer, scheduler, data) == (
        model,
        optimizer,
        scheduler,
        data,
    )
    assert accelerator.prepare_model(model) is model
    assert accelerator.prepare_optimizer(optimizer.optimizer) is optimizer
    assert accelerator.prepare_scheduler(scheduler.scheduler) is scheduler
    assert accelerator.prepare_data_loader(data) is data
    assert read(data) == [[0, 1], [2, 3]]
    optimizer.step()
    accelerator.sync_gradients = False
    scheduler.step()  # not with the optimizer, so in the middle of a window too
    assert scheduler.get_last_lr() == [0.5]
    with pytest.raises(TypeError, match="AcceleratedOptimizer as its scheduler; it must be"):
        accelerator.prepare_scheduler(optimizer)


def test_device_placement_false_leaves_objects_where_they_are():
    accelerator = accelerate()
    pretend(device=torch.device("meta"))
    assert accelerator.device.type == "meta"
    left, taken = network(), network()
    assert accelerator.prepare_model(left, device_placement=False).weight.device.type == "cpu"
    assert accelerator.prepare_model(taken).weight.device.type == "meta"
    data = accelerator.prepare_data_loader(loader(), device_placement=False)
    assert next(iter(data))[0].device.type == "cpu"
    assert next(iter(accelerator.prepare_data_loader(loader())))[0].device.type == "meta"

    def momentum(place: bool | None) -> str:
        parameter = nn.Parameter(torch.ones(1, device="meta"))  # moved after a step on the host
        sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        sgd.state[parameter] = {"momentum_buffer": torch.ones(1)}
        optimizer = accelerator.prepare_optimizer(sgd, device_placement=place)
        return optimizer.state[parameter]["momentum_buffer"].device.type

    assert (momentum(None), momentum(True), momentum(False)) == ("meta", "meta", "cpu")


def test_slice_fn_for_dispatch_cuts_what_is_dispatched():
    def cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return [tensor + 100 for tensor in batch]

    accelerator = accelerate(dispatch_batches=True)
    data = accelerator.prepare_data_loader(loader(batch_size=2), slice_fn_for_dispatch=cut)
    assert isinstance(data, DataLoaderDispatcher)
    assert read(data) == [[100, 101], [102, 103]]


def test_skip_first_batches():
    accelerator = accelerate()
    data = accelerator.prepare(loader())
    assert read(accelerator.skip_first_batches(data, num_batches=3)) == [[3]]
    assert read(accelerator.skip_first_batches(data)) == [[0], [1], [2], [3]]


def test_deepspeed_splits_no_sequences():
    loader = DataLoader(range(4))
    accelerator = Accelerator(cpu=True)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, nn.Linear(1, 1)) is loader


def test_verify_device_map_knows_a_model_over_several_devices():
    accelerator = accelerate()
    model = nn.Sequential(network())
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"weight": 0, "bias": 1}
    assert accelerator.verify_device_map(model)


def test_unwrap_model_removes_every_wrapper():
    accelerator = accelerate(mixed_precision="bf16")
    own = network()
    plain = own.forward
    model = accelerator.prepare(own)
    wrapped = nn.DataParallel(model)
    assert accelerator.unwrap_model(wrapped) is own
    assert own.forward != plain  # in bf16 still
    assert list(accelerator.get_state_dict(wrapped)) == ["weight", "bias"]
    assert list(accelerator.get_state_dict(wrapped, unwrap=False)) == [
        "module.weight",
        "module.bias",
    ]
    assert accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False).forward == plain
    own.compile(backend="eager")
    assert accelerator.unwrap_model(wrapped)._compiled_call_impl is not None
    assert accelerator.unwrap_model(wrapped, keep_torch_compile=False)._compiled_call_impl is None


# -- the step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["model", [nn.Linear(1, 1)]])
def test_accumulate_and_no_sync_take_models_alone(wrong: Any) -> None:
    accelerator = accelerate(gradient_accumulation_steps=2)
    order = "accumulate was given .*; prepare returns objects in the order of its arguments"
    with pytest.raises(TypeError, match=order), accelerator.accumulate(wrong):
        pass
    with pytest.raises(TypeError, match="no_sync was given"), accelerator.no_sync(wrong):
        pass


def test_trigger_sync_in_backward_on_one_process():
    accelerator = accelerate()
    model = accelerator.prepare(network())
    loss = model(torch.ones(1, 1)).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert model.weight.grad.item() == 1


def test_lomo_needs_a_rate_and_an_optimizer_of_its_kind():
    accelerator = accelerate()
    loss = accelerator.prepare(network())(torch.ones(1, 1)).sum()
    with pytest.raises(ValueError, match="learning rate"):
        accelerator.lomo_backward(loss, None)
    accelerator.prepare(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises((ValueError, ImportError), match="LOMO"):  # or the package, if it is absent
        accelerator.lomo_backward(loss, learning_rate=0.1)


# -- together ----------------------------------------------------------------------------------


# -- saving ------------------------------------------------------------------------------------


def test_an_object_is_saved_by_the_main_process_or_that_of_each_machine():
    accelerator = accelerate()
    accelerator.save({"a": torch.ones(2)}, "a.pt")
    accelerator.save({"a": torch.ones(2)}, "a.safetensors", safe_serialization=True)
    assert torch.load("a.pt", weights_only=True)["a"].tolist() == [1, 1]
    assert load_file("a.safetensors")["a"].tolist() == [1, 1]
    pretend(num_processes=2, process_index=1, local_process_index=0)
    accelerator.save({}, "other.pt")
    accelerator.save_model(network(), "model")
    assert not Path("other.pt").exists()
    assert not Path("model").exists()
    accelerator = accelerate(project_config=ProjectConfiguration(save_on_each_node=True))
    accelerator.save({}, "other.pt")
    assert Path("other.pt").exists()


@pytest.mark.parametrize("given", ["a", 3, nn.Linear, None])
@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler"])
def test_prepare_methods_refuse_other_objects(kind, given):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=rf"^prepare_{kind} was given .* as its {kind}; .*torch\."):
        getattr(accelerator, f"prepare_{kind}")(given)
    assert accelerator._models == accelerator._optimizers == accelerator._schedulers == []


@pytest.mark.parametrize("model", [b"bytes", "folder", None])
def test_only_a_module_is_saved_as_a_model(model):
    with pytest.raises(TypeError, match=r"its model; it must be a torch\.nn\.Module"):
        Accelerator(cpu=True).save_model(model, "weights")
    assert not Path("weights").exists()


def test_a_model_is_saved_under_its_own_names_in_files_of_the_size_asked_for():
    accelerator = accelerate(dynamo_backend="eager")
    model = accelerator.prepare(network(2.0))
    accelerator.save_model(model, "whole")
    assert load_file("whole/model.safetensors").keys() == {"weight", "bias"}
    accelerator.save_model(model, "parts", max_shard_size=4)
    assert len(list(Path("parts").glob("model-*-of-00002.safetensors"))) == 2
    accelerator.save_model(model, "torch", safe_serialization=False)
    weights = torch.load("torch/pytorch_model.bin", weights_only=True)
    assert weights["weight"].item() == 2


def trained(**kwargs: Any) -> tuple[Accelerator, tuple[Any, ...], Counter]:
    """A run of every kind of object, and what it registered."""
    torch.manual_seed(kwargs.pop("seed", 0))
    accelerator = accelerate(gradient_accumulation_steps=2, **kwargs)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = loader(6, batch_size=2, shuffle=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, accelerator.prepare(model, sgd, StepLR(sgd, 1, gamma=0.5), data), counter


def epoch(accelerator: Accelerator, prepared: tuple[Any, ...]) -> list[Any]:
    model, optimizer, scheduler, data = prepared
    seen = []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward((model(batch[0]) * torch.rand(2, 1)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append((batch[0].flatten().tolist(), model.weight.item(), scheduler.get_last_lr()[0]))
    return seen


@pytest.mark.parametrize("safe", [True, False])
def test_load_state_resumes_exactly(safe, caplog):
    accelerator, prepared, counter = trained()
    epoch(accelerator, prepared)
    counter.count = 7
    caplog.set_level("INFO")
    assert accelerator.save_state("saved", safe_serialization=safe) == Path("saved")
    assert "The state was saved to saved." in caplog.text
    name = "model.safetensors" if safe else "pytorch_model.bin"
    assert Path("saved", name).exists()
    expected = [epoch(accelerator, prepared) for _ in range(2)]

    accelerator, prepared, counter = trained(seed=1)
    accelerator.load_state("saved", map_location="cpu", strict=True)
    assert "/saved was loaded." in caplog.text
    assert [epoch(accelerator, prepared) for _ in range(2)] == expected
    assert counter.count == 7


def micro_batches(
    accelerator: Accelerator, prepared: tuple[Any, ...], first: int, last: int
) -> list[Any]:
    """What the weights and the rate are behind each micro-batch of a stretch, in windows of 3."""
    model, optimizer, scheduler = prepared
    seen = []
    for number in range(first, last):
        # As many scripts have it, outside of the window's block: inside a window it does nothing.
        optimizer.zero_grad()
        with accelerator.accumulate(model):
            loss = (model(torch.tensor([[float(number)]])) - 1).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if accelerator.sync_gradients:
                optimizer.zero_grad()
        seen.append((model.weight.item(), model.bias.item(), scheduler.get_last_lr()[0]))
    return seen


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_state_may_be_saved_inside_a_window(at, precision):
    def make() -> tuple[Accelerator, tuple[Any, ...]]:
        accelerator = accelerate(gradient_accumulation_steps=3, mixed_precision=precision)
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return accelerator, accelerator.prepare(model, sgd, StepLR(sgd, 1, gamma=0.5))

    accelerator, prepared = make()
    micro_batches(accelerator, prepared, 0, at)
    accelerator.save_state("saved")
    gathered = "gradients" in Path("saved/random_states_0.safetensors").read_bytes().decode("latin")
    assert gathered == (at % 3 != 0)  # they cost nothing at the end of a window
    expected = micro_batches(accelerator, prepared, at, 9)

    again, prepared = make()
    micro_batches(again, prepared, 0, 7)  # another window, whose gradients do not count
    again.load_state("saved")
    assert (again.step, again.sync_gradients) == (at, at % 3 == 0)
    assert (prepared[0].weight.grad is None) == (at % 3 == 0)
    assert micro_batches(again, prepared, at, 9) == expected


@pytest.mark.parametrize("by_hand", [True, False])
def test_gradients_that_an_optimizer_has_not_used_yet_are_saved_without_a_window(by_hand):
    def make() -> Any:
        accelerator, nets = accelerate(), [network(), network()]
        return accelerator, *accelerator.prepare(
            *nets, *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        )

    def run(accelerator: Any, net: Any, other: Any, sgd: Any, more: Any, numbers: range) -> Any:
        for number in numbers:
            loss = net(torch.full((1, 1), number / 7)).square().sum()
            if by_hand:  # two backward passes to an update
                with accelerator.no_sync(net) if number % 2 == 0 else contextlib.nullcontext():
                    accelerator.backward(loss)
            else:  # one optimizer steps more often than the other
                accelerator.backward(loss + other(torch.ones(1, 1)).square().sum())
                more.step()
                more.zero_grad()
            if number % 2:
                sgd.step()
                sgd.zero_grad()
        return [each.clone() for each in net.state_dict().values()]

    whole = make()
    run(*whole, range(3))
    whole[0].save_state("saved")
    expected = run(*whole, range(3, 8))
    parts = make()
    parts[0].load_state("saved")
    parts[0].save_state("again")
    parts[0].load_state("again")
    assert all(map(torch.equal, run(*parts, range(3, 8)), expected))
    parts[0].save_state("idle")
    assert b"gradients" not in Path("idle/random_states_0.safetensors").read_bytes()


def test_gradients_outside_a_window_do_not_hinder_another_precision(caplog):
    def make(precision: str) -> Any:
        accelerator, nets = accelerate(mixed_precision=precision), [network(), network()]
        return accelerator, *accelerator.prepare(
            *nets, *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        )

    accelerator, first, second, one, two = make("no")
    for net, optimizer in ((first, one), (second, two)):  # zeroed at the start, as many loops do
        optimizer.zero_grad()
        accelerator.backward((first(torch.ones(1, 1)) + net(torch.ones(1, 1))).sum())
        optimizer.step()
    accelerator.save_state("saved")
    AcceleratorState._reset_state()
    again, first, *_ = make("fp16")
    again.load_state("saved", strict=False)
    assert "has not used yet are not scaled as in fp16, and are left out" in caplog.text
    assert first.weight.grad is None
    again.save_state("again")
    assert b"gradients" not in Path("again/random_states_0.safetensors").read_bytes()


def test_gradients_of_a_window_belong_to_parameters_of_models_and_of_optimizers():
    def make() -> tuple[Accelerator, nn.Parameter, nn.Module, torch.optim.Optimizer]:
        accelerator = accelerate(gradient_accumulation_steps=2)
        model, loose = network(), nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([*model.parameters(), loose], lr=1.0)
        return accelerator, loose, *accelerator.prepare(model, sgd)

    accelerator, loose, model, _ = make()
    with accelerator.accumulate(model):
        accelerator.backward(2 * loose.sum() + model.weight.sum())
    accelerator.save_state("saved")
    again, loose, model, _ = make()
    again.load_state("saved")
    assert loose.grad.tolist() == [1, 1]
    assert model.weight.grad.tolist() == [[0.5]]
    assert model.bias.grad is None
    other = accelerate(gradient_accumulation_steps=2)
    bigger, short = network(), nn.Parameter(torch.ones(1))
    other.prepare(bigger, torch.optim.SGD([*bigger.parameters(), short], lr=1.0))
    with pytest.raises(CheckpointError, match=r"gradient of optimizer.0 has the shape \(2,\)"):
        other.load_state("saved")


def test_gradients_outside_of_a_window_are_no_part_of_a_state():
    accelerator = accelerate()
    model = accelerator.prepare(network())
    accelerator.backward(model.weight.sum())
    accelerator.save_state("saved")
    accelerator.load_state("saved")
    assert model.weight.grad.item() == 1  # they are as they were
    model.weight.grad = None
    accelerator.load_state("saved")
    assert model.weight.grad is None


def test_gradients_of_a_window_need_the_precision_they_were_saved_in():
    accelerator = accelerate(gradient_accumulation_steps=2)
    model, _ = accelerator.prepare(model := network(), torch.optim.SGD(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(model.weight.sum())
    accelerator.save_state("saved")
    AcceleratorState._reset_state()
    again = accelerate(gradient_accumulation_steps=2, mixed_precision="fp16")
    again.prepare(model := network(), torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="gradients are not scaled as in fp16"):
        again.load_state("saved", strict=False)


def test_checkpoint_numbers_of_another_run_are_refused_and_nothing_is_deleted():
    def make(**kwargs: Any) -> Accelerator:
        project = {"project_dir": "run", "automatic_checkpoint_naming": True, "total_limit": 2}
        return accelerate(project_config=ProjectConfiguration(**project, **kwargs))

    def names() -> list[str]:
        return sorted(path.name for path in Path("run/checkpoints").iterdir())

    first = make()
    for _ in range(3):
        first.save_state()
    second = make()
    with pytest.raises(ValueError, match=r"checkpoint_1, checkpoint_2 of another run exist.* 3 "):
        second.save_state()
    assert names() == ["checkpoint_1", "checkpoint_2"]
    second.load_state()
    second.save_state()
    assert names() == ["checkpoint_2", "checkpoint_3"]
    make(iteration=4).save_state()
    assert names() == ["checkpoint_3", "checkpoint_4"]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("compiled_then", [True, False])
def test_compiled_submodules_leave_no_trace_in_names(compiled_then, safe):
    def make(compiled: bool) -> nn.Module:
        inner = network(2.0 if compiled == compiled_then else 1.0)
        return nn.Sequential(torch.compile(inner, backend="eager") if compiled else inner)

    accelerator = accelerate()
    model = accelerator.prepare(make(compiled_then))
    file = Path(accelerator.save_state("state", safe_serialization=safe)) / (
        "model.safetensors" if safe else "pytorch_model.bin"
    )
    accelerator.save_model(model, "weights", safe_serialization=safe)
    for each in (file, Path("weights", file.name)):
        weights = load_file(each) if safe else torch.load(each, weights_only=True)
        assert weights.keys() == {"0.weight", "0.bias"}
    other = accelerate()
    model = other.prepare(make(not compiled_then))
    other.load_state("state")
    assert [value.item() for value in model.state_dict().values()] == [2, 2]
    for arguments in ({}, {"dtype": torch.float64}, {"device_map": {"": "cpu"}}):
        fresh = make(not compiled_then)
        load_checkpoint_in_model(fresh, "weights", strict=True, **arguments)
        assert [value.item() for value in fresh.state_dict().values()] == [2, 2]


def test_state_hooks_take_part_in_saving_and_loading_until_they_are_removed():
    accelerator, prepared, _ = trained()
    seen: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append(("save", len(models), sorted(weights.pop())))
        Path(output_dir, "mine.txt").write_text("mine")

    def before_load(models: list[Any], input_dir: str) -> None:
        seen.append(("load", models.pop() is prepared[0], Path(input_dir, "mine.txt").read_text()))

    saving = accelerator.register_save_state_pre_hook(before_save)
    loading = accelerator.register_load_state_pre_hook(before_load)
    accelerator.save_state("saved")
    accelerator.load_state("saved")
    assert not Path("saved/model.safetensors").exists()
    saving.remove()
    loading.remove()
    accelerator.save_state("saved")
    accelerator.load_state("saved")
    assert seen == [("save", 1, ["bias", "weight"]), ("load", True, "mine")]
    assert Path("saved/model.safetensors").exists()


def test_states_that_cannot_be_saved_or_loaded():
    accelerator, _, _ = trained()
    with pytest.raises(ValueError, match="these lack one: number 1, a int; number 2, a dict"):
        accelerator.register_for_checkpointing(Counter(), 3, {})
    with pytest.raises(TypeError, match="save_state got exclude_frozen"):
        accelerator.save_state("saved", exclude_frozen=True)
    with pytest.raises(ValueError, match="output_dir is None"):
        accelerator.save_state()
    with pytest.raises(ValueError, match="input_dir is None"):
        accelerator.load_state()
    with pytest.raises(ValueError, match="nowhere"):
        accelerator.load_state("nowhere")
    accelerator.save_state("saved")
    with pytest.raises(TypeError, match="map_location"):
        accelerator.load_state("saved", map_location="moon")
    accelerator.prepare(network())  # a second model, of which nothing was saved
    with pytest.raises(CheckpointError, match="model"):
        accelerator.load_state("saved")


# -- tracking ----------------------------------------------------------------------------------


def keeping(kind: str) -> Any:
    def method(self: Any, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append((kind, values, step, kwargs))

    return method


class Listed(GeneralTracker):
    """Keeps what it is told."""

    name = "listed"
    requires_logging_directory = False
    log, log_images, log_histogram = keeping("log"), keeping("images"), keeping("histogram")
    log_figure, log_text = keeping("figure"), keeping("text")

    def __init__(self, run_name: str, colour: str = "none") -> None:
        super().__init__()
        self.seen: list[Any] = [(run_name, colour)]

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    def store_init_configuration(self, values: Any) -> None:
        self.seen.append(values)

    def log_table(
        self, table_name: Any, columns: Any, data: Any, dataframe: Any, step: Any, **kwargs: Any
    ) -> None:
        self.seen.append(("table", table_name, columns, data, dataframe, step, kwargs))

    def log_artifact(
        self, path: Any, name: Any = None, kind: Any = "file", step: Any = None, **kwargs: Any
    ) -> None:
        self.seen.append(("artifact", path, name, kind, step, kwargs))

    def log_model(self, path: Any, name: Any = None, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("model", path, name, step, kwargs))

    def finish(self) -> None:
        self.seen.append("finished")


def test_tracking_methods_pass_all_arguments_to_trackers():
    accelerator = accelerate(log_with=Listed)
    assert accelerator.log_with == [Listed]
    accelerator.init_trackers("digits", {"lr": 0.1}, {"listed": {"colour": "red"}})
    options = {"listed": {"wide": True}}
    accelerator.log({"loss": 0.5}, step=3, log_kwargs=options)
    accelerator.log_images({"x": [1]}, step=4, log_kwargs=options)
    accelerator.log_table("t", ["a"], [[1]], step=5, log_kwargs=options)
    accelerator.log_table("f", dataframe="frame")
    accelerator.log_histogram({"w": [1]}, 6, options)
    accelerator.log_figure({"f": "pixels"}, 6, options)
    accelerator.log_text({"t": "text"}, 6, options)
    accelerator.log_artifact(Path("data"), "digits", "dataset", 7, options)
    accelerator.log_artifact("notes.txt")
    accelerator.log_model(Path("step-8"), "best", 8, options)
    accelerator.log({"loss": 0.25})
    (tracker,) = accelerator.trackers
    assert accelerator.get_tracker("listed") is tracker
    seen = accelerator.get_tracker("listed", unwrap=True)
    accelerator.end_training()
    assert seen == [
        ("digits", "red"),
        {"lr": 0.1},
        ("log", {"loss": 0.5}, 3, {"wide": True}),
        ("images", {"x": [1]}, 4, {"wide": True}),
        ("table", "t", ["a"], [[1]], None, 5, {"wide": True}),
        ("table", "f", None, None, "frame", None, {}),
        ("histogram", {"w": [1]}, 6, {"wide": True}),
        ("figure", {"f": "pixels"}, 6, {"wide": True}),
        ("text", {"t": "text"}, 6, {"wide": True}),
        ("artifact", "data", "digits", "dataset", 7, {"wide": True}),
        ("artifact", "notes.txt", None, "artifact", None, {}),
        ("model", "step-8", "best", 8, {"wide": True}),
        ("log", {"loss": 0.25}, None, {}),
        "finished",
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: a.log_table("t", columns=["a"]), ValueError, r"log_table\('t'\) has no rows"),
        (lambda a: a.log_histogram([1]), TypeError, "log_histogram takes a dict of names"),
        (lambda a: a.log_model(3), TypeError, "PathLike"),
        (lambda a: a.log_artifact("x", step=0.5), TypeError, "cannot be interpreted as an integer"),
    ],
)
def test_rich_values_are_checked_at_once(call, error, message):
    accelerator = accelerate(log_with=Listed)
    accelerator.init_trackers("digits")
    with pytest.raises(error, match=message):
        call(accelerator)
    accelerator.end_training()


# -- the object --------------------------------------------------------------------------------


def test_a_copy_is_the_accelerator_itself():
    accelerator = accelerate()
    assert copy.deepcopy({"a": accelerator})["a"] is accelerator
