"""Members of the `Accelerator` that hand their work on: each does so, with all its arguments.

What the work consists of is tested where it is done; `docs/accelerator.md` says where.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
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
from trainer.checkpoint.loading import load_checkpoint_in_model
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.engines.single import SingleDevice
from trainer.errors import CheckpointError
from trainer.plugins import (
    DeepSpeedPlugin,
    MegatronLMPlugin,
    TorchDynamoPlugin,
)
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


def test_the_window_is_the_last_one_that_was_asked_for():
    plugin = GradientAccumulationPlugin(num_steps=3)
    state = accelerate(gradient_accumulation_plugin=plugin).gradient_state
    assert state.initialized
    assert state.plugin is plugin
    assert accelerate(gradient_accumulation_steps=2).gradient_state.num_steps == 2
    assert state.num_steps == 2
    GradientState._reset_state()
    assert not state.initialized


def test_options_of_the_constructor_win_over_a_configuration_that_stays():
    options = {"dispatch_batches": True, "non_blocking": True, "use_stateful_dataloader": True}
    config = DataLoaderConfiguration(**options)
    accelerator = accelerate(
        dataloader_config=config,
        split_batches=True,
        dispatch_batches=False,
        even_batches=False,
        use_seedable_sampler=True,
    )
    assert config == DataLoaderConfiguration(**options)
    assert accelerator.use_stateful_dataloader
    assert accelerator.split_batches
    assert accelerator.dispatch_batches is False
    assert not accelerator.even_batches
    assert accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    accelerator.even_batches = True
    assert accelerator.dataloader_config.even_batches


def test_options_that_are_not_said_leave_the_configuration_alone():
    config = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = accelerate(dataloader_config=config, use_seedable_sampler=True)
    assert accelerator.split_batches
    assert not accelerator.even_batches


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


def test_generators_to_synchronise_reach_the_loaders():
    accelerator = accelerate(rng_types=["torch", "generator"])
    read(accelerator.prepare(loader()))
    with pytest.raises(ValueError, match="rng_types is 'cuda'"):  # said by the pass
        read(accelerate(rng_types=["cuda"]).prepare(loader()))
    with pytest.raises(ValueError, match="rng_types is 'dice'"):  # said at once
        accelerate(rng_types=["dice"])


@pytest.mark.parametrize(
    ("argument", "plugin"),
    [
        ("deepspeed_plugin", DeepSpeedPlugin()),
        ("megatron_lm_plugin", MegatronLMPlugin()),
    ],
)
def test_engines_that_are_not_there_are_refused(argument, plugin, monkeypatch):
    with pytest.raises(NotImplementedError, match=f"{argument} asks for"):
        accelerate(**{argument: plugin})
    with pytest.raises(TypeError, match=f"{argument} is 3"):
        accelerate(**{argument: 3})
    variable = f"ACCELERATE_USE_{argument.upper().removesuffix('_PLUGIN')}"
    monkeypatch.setenv(variable, "true")
    with pytest.raises(NotImplementedError, match=f"{variable}=true asks for"):
        accelerate()


@pytest.mark.parametrize(
    "arguments", [{"mixed_precision": "fp8"}, {"kwargs_handlers": [FP8RecipeKwargs()]}]
)
def test_eight_bits_are_refused(arguments):
    with pytest.raises(NotImplementedError, match="8-bit training, which this release does not"):
        accelerate(**arguments)


def test_models_are_compiled_by_the_backend_or_the_plugin(monkeypatch):
    plugin = TorchDynamoPlugin(backend="eager")
    for arguments in ({"dynamo_backend": "eager"}, {"dynamo_plugin": plugin}):
        accelerator = accelerate(**arguments)
        assert accelerator.dynamo_plugin.backend == "EAGER"
        assert accelerator.prepare(network())._compiled_call_impl is not None
    with pytest.raises(ValueError, match="dynamo_backend or dynamo_plugin, not both"):
        accelerate(dynamo_backend="eager", dynamo_plugin=plugin)
    with pytest.raises(ValueError, match="backend is 'eagre'"):
        accelerate(dynamo_backend="eagre")
    AcceleratorState._reset_state()
    assert accelerate().prepare(network())._compiled_call_impl is None
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    assert accelerate().prepare(network())._compiled_call_impl is not None
    assert AcceleratorState().dynamo_plugin.backend == "EAGER"


def test_each_accelerator_compiles_as_it_was_told_itself(monkeypatch):
    first = accelerate(dynamo_backend="eager")
    others = {backend: accelerate(dynamo_backend=backend) for backend in (None, "no", "aot_eager")}
    assert [each.dynamo_plugin.backend for each in (first, *others.values())] == [
        *("EAGER", "NO", "NO", "AOT_EAGER")
    ]
    compiled = [
        each.prepare(network())._compiled_call_impl is not None
        for each in (first, *others.values())
    ]
    assert compiled == [True, False, False, True]
    assert AcceleratorState().dynamo_plugin.backend == "EAGER"  # what the first was made with
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")  # that of a launcher is for all
    assert accelerate().dynamo_plugin.backend == "AOT_EAGER"
    with pytest.raises(ValueError, match="backend is 'eagre'"):
        accelerate(dynamo_backend="eagre")


def test_a_trainer_that_compiles_leaves_others_as_they_are(tmp_path):
    compiling = Trainer(dynamo_backend="eager", project_dir=tmp_path, max_steps=1)
    plain = Trainer(project_dir=tmp_path, max_steps=1)
    assert compiling.accelerator.dynamo_plugin.backend == "EAGER"
    assert plain.accelerator.dynamo_plugin.backend == "NO"
    assert accelerate().prepare(network())._compiled_call_impl is None


def test_an_accelerator_that_failed_leaves_the_process_to_the_next(monkeypatch):
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


def test_handlers_are_kept_by_their_names():
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
def test_names_that_scripts_ask_the_precision_by(precision):
    accelerator = accelerate(mixed_precision=precision)
    optimizer = accelerator.prepare(torch.optim.SGD(network().parameters()))
    assert accelerator.native_amp == (precision != "no")
    with pytest.warns(FutureWarning, match="compare mixed_precision == 'fp16'"):
        assert accelerator.use_fp16 == (precision == "fp16")
    assert optimizer.scaler is accelerator.scaler
    with pytest.warns(FutureWarning, match="is_overflow is the earlier name"):
        assert optimizer.is_overflow is False


def test_mixed_precision_may_be_turned_off():
    accelerator = accelerate(mixed_precision="bf16")
    x, exact = torch.ones(1, 1), network(1 / 3)(torch.ones(1, 1))
    before = accelerator.prepare(network(1 / 3))
    assert not torch.equal(before(x), exact)  # rounded to bf16
    accelerator.native_amp = False
    assert torch.equal(before(x), exact)
    after = accelerator.prepare(network(1 / 3))
    assert torch.equal(after(x), exact)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.native_amp = True
    assert not torch.equal(before(x), exact)
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")


def test_mixed_precision_needs_a_precision():
    accelerator = accelerate(mixed_precision="no")
    accelerator.native_amp = False  # as scripts say for MPS, whatever the precision
    with pytest.raises(ValueError, match="native_amp=True has no precision"):
        accelerator.native_amp = True


# -- who runs what -----------------------------------------------------------------------------


def test_each_decorator_chooses_its_process():
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


def test_indexed_decorators_take_their_function_later():
    accelerator = accelerate()

    @accelerator.on_process(process_index=0)
    def first() -> str:
        return "first"

    @accelerator.on_local_process(local_process_index=0)
    def local_first() -> str:
        return "local first"

    assert (first(), local_first()) == ("first", "local first")


def test_going_first_runs_the_block_and_passes_its_error_on():
    accelerator = accelerate()
    for turn in (accelerator.main_process_first, accelerator.local_main_process_first):
        with turn():
            pass
        with pytest.raises(KeyError, match="missing"), turn():
            raise KeyError("missing")


def test_inputs_are_split_with_and_without_padding():
    accelerator = accelerate()
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


def test_a_trigger_is_seen_once():
    accelerator = accelerate()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert not accelerate().check_trigger()  # each has one of its own
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


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


def test_each_kind_can_be_left_where_it_is():
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


def test_a_function_of_ones_own_cuts_what_is_dispatched():
    def cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return [tensor + 100 for tensor in batch]

    accelerator = accelerate(dispatch_batches=True)
    data = accelerator.prepare_data_loader(loader(batch_size=2), slice_fn_for_dispatch=cut)
    assert isinstance(data, DataLoaderDispatcher)
    assert read(data) == [[100, 101], [102, 103]]


def test_the_first_batches_can_be_skipped():
    accelerator = accelerate()
    data = accelerator.prepare(loader())
    assert read(accelerator.skip_first_batches(data, num_batches=3)) == [[3]]
    assert read(accelerator.skip_first_batches(data)) == [[0], [1], [2], [3]]


def test_nobody_is_joined_by_one_process():
    accelerator = accelerate()
    model, data = accelerator.prepare(network(), loader())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        accelerator.backward(model(next(iter(data))[0]).sum())
    assert model.weight.grad is not None


def test_a_model_that_is_spread_over_devices_is_known():
    accelerator = accelerate()
    model = nn.Sequential(network())
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"weight": 0, "bias": 1}
    assert accelerator.verify_device_map(model)


def test_a_model_comes_out_of_its_wrappers():
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


@pytest.mark.parametrize("name", ["free_memory", "clear"])
def test_what_was_prepared_is_forgotten_and_what_was_registered_is_not(name):
    accelerator = accelerate(gradient_accumulation_steps=3)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, sgd, StepLR(sgd, 1), loader())
    gone = [weakref.ref(each) for each in (model, sgd, *prepared)]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    del model, sgd
    prepared = getattr(accelerator, name)(*prepared)
    assert prepared == [None] * 4
    assert [ref() for ref in gone] == [None] * 6
    assert accelerator.step == 0
    counter.count = 3
    accelerator.save_state("saved")  # the counter alone
    counter.count = 0
    accelerator.load_state("saved")
    assert counter.count == 3


# -- the step ----------------------------------------------------------------------------------


def test_without_a_model_every_prepared_one_holds_its_gradients_back():
    class Model(nn.Linear):
        inside = 0

        def no_sync(self) -> Any:
            owner = self

            class Context:
                def __enter__(self) -> None:
                    owner.inside += 1

                def __exit__(self, *_: object) -> None:
                    owner.inside -= 1

            return Context()

    accelerator = accelerate()
    models = accelerator.prepare(Model(1, 1), Model(1, 1))
    with accelerator.no_sync():
        assert [model.inside for model in models] == [1, 1]
    with accelerator.no_sync(models[1]):
        assert [model.inside for model in models] == [0, 1]
    assert [model.inside for model in models] == [0, 0]


@pytest.mark.parametrize("wrong", ["model", [nn.Linear(1, 1)]])
def test_what_is_no_model_cannot_hold_its_gradients_back(wrong: Any) -> None:
    accelerator = accelerate(gradient_accumulation_steps=2)
    with pytest.raises(TypeError, match="accumulate was given"), accelerator.accumulate(wrong):
        pass
    with pytest.raises(TypeError, match="no_sync was given"), accelerator.no_sync(wrong):
        pass


def test_a_sync_of_one_process_may_be_triggered():
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


def test_the_scaler_is_there_in_fp16_alone():
    assert accelerate().scaler is None
    AcceleratorState._reset_state()
    assert accelerate(mixed_precision="fp16").scaler.get_scale() == 65536


# -- together ----------------------------------------------------------------------------------


def test_one_process_pads_nothing_and_gathers_its_own():
    accelerator = accelerate()
    tensor = torch.ones(2, 3)
    assert accelerator.pad_across_processes(tensor, dim=1, pad_index=7, pad_first=True) is tensor
    seen = []
    for batch in accelerator.prepare(loader(5, batch_size=2)):
        seen += accelerator.gather_for_metrics(batch)[0].flatten().tolist()
    assert seen == [0, 1, 2, 3, 4]
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    pair = (torch.ones(1), torch.ones(2))
    assert accelerator.gather_for_metrics(pair, use_gather_object=True) == list(pair)


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
def test_what_is_prepared_by_itself_is_of_its_kind(kind, given):
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


def epoch(accelerator: Accelerator, prepared: tuple[Any, ...], skip: int = 0) -> list[Any]:
    model, optimizer, scheduler, data = prepared
    seen = []
    for batch in accelerator.skip_first_batches(data, skip) if skip else data:
        with accelerator.accumulate(model):
            accelerator.backward((model(batch[0]) * torch.rand(2, 1)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append((batch[0].flatten().tolist(), model.weight.item(), scheduler.get_last_lr()[0]))
    return seen


@pytest.mark.parametrize("safe", [True, False])
def test_a_loaded_state_goes_on_as_the_one_that_was_saved(safe, caplog):
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


def test_gradients_that_nobody_may_want_do_not_hinder_another_precision(caplog):
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


def test_states_are_numbered_where_the_project_says_so():
    project = ProjectConfiguration(
        project_dir="run", automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator, _, counter = trained(project_config=project)
    for number in range(3):
        counter.count = number
        assert accelerator.save_state() == Path(f"run/checkpoints/checkpoint_{number}")
    assert accelerator.save_iteration == 3
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    counter.count = 0
    accelerator.load_state()
    assert counter.count == 2
    project.iteration = 1
    with pytest.raises(ValueError, match="checkpoint_1"):
        accelerator.save_state()


def test_another_runs_numbers_are_refused_and_nothing_is_deleted():
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


def test_a_checkpoint_with_other_files_in_it_is_not_deleted(caplog):
    project = ProjectConfiguration(
        project_dir="run", automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = accelerate(project_config=project)
    note = accelerator.save_state() / "note.txt"
    note.write_text("mine")
    for _ in range(2):
        accelerator.save_state()
    assert note.read_text() == "mine"
    assert "checkpoint_0 holds files that are not the checkpoint's" in caplog.text
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_2",
    ]


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


def test_hooks_take_part_in_saving_and_loading_until_they_are_removed():
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
    assert not Path("saved/model.safetensors").exists()
    accelerator.load_state("saved")
    assert seen == [("save", 1, ["bias", "weight"]), ("load", True, "mine")]
    saving.remove()
    loading.remove()
    accelerator.save_state("saved")
    accelerator.load_state("saved")
    assert len(seen) == 2
    assert Path("saved/model.safetensors").exists()


def test_what_has_no_state_cannot_be_registered():
    accelerator = accelerate()
    with pytest.raises(ValueError, match="these lack one: number 1, a int; number 2, a dict"):
        accelerator.register_for_checkpointing(Counter(), 3, {})


def test_states_that_cannot_be_saved_or_loaded():
    accelerator, _, _ = trained()
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


class Listed(GeneralTracker):
    """Keeps what it is told."""

    name = "listed"
    requires_logging_directory = False

    def __init__(self, run_name: str, colour: str = "none") -> None:
        super().__init__()
        self.seen: list[Any] = [(run_name, colour)]

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    def store_init_configuration(self, values: Any) -> None:
        self.seen.append(values)

    def log(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("log", values, step, kwargs))

    def log_images(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("images", values, step, kwargs))

    def log_table(
        self, table_name: Any, columns: Any, data: Any, dataframe: Any, step: Any, **kwargs: Any
    ) -> None:
        self.seen.append(("table", table_name, columns, data, dataframe, step, kwargs))

    def log_histogram(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("histogram", values, step, kwargs))

    def log_figure(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("figure", values, step, kwargs))

    def log_text(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("text", values, step, kwargs))

    def log_artifact(
        self, path: Any, name: Any = None, kind: Any = "file", step: Any = None, **kwargs: Any
    ) -> None:
        self.seen.append(("artifact", path, name, kind, step, kwargs))

    def log_model(self, path: Any, name: Any = None, step: Any = None, **kwargs: Any) -> None:
        self.seen.append(("model", path, name, step, kwargs))

    def finish(self) -> None:
        self.seen.append("finished")


def test_trackers_are_told_everything():
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


def test_trackers_that_write_files_are_given_the_logging_dir():
    accelerator = accelerate(log_with="tensorboard", project_dir="run")
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert list(Path("run").rglob("events.out.*"))


# -- the object --------------------------------------------------------------------------------


def test_a_copy_is_the_accelerator_itself():
    accelerator = accelerate()
    assert copy.deepcopy({"a": accelerator})["a"] is accelerator


def test_prepared_objects_can_be_pickled():
    accelerator, prepared, _ = trained()
    model, optimizer, scheduler, data = pickle.loads(pickle.dumps(prepared))
    assert model.weight.item() == 1
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.01
    assert sorted(x for batch in read(data) for x in batch) == [0, 1, 2, 3, 4, 5]
    assert accelerator.num_processes == 1
