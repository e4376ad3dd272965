"""Configurations validate themselves; enumerations are their values."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from datetime import timedelta

import pytest
import torch

import trainer.configuration
from trainer.checks import choice_error
from trainer.cli import env
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TERecipeKwargs,
    recipe_of,
)
from trainer.configuration.fields import settings_of
from trainer.enums import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SchedulerTick,
)
from trainer.utils import ComputeEnvironment, SageMakerDistributedType

CHOICES = [
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SchedulerTick,
]
HANDLERS = [
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    FP8RecipeKwargs,
]
CONFIGURATIONS = [
    *HANDLERS,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
]


@pytest.mark.parametrize("value", ["updates", None, 1])
def test_invalid_choice_error_lists_the_choices(value):
    with pytest.raises(ValueError, match=rf"tick is {value!r}[;.] .* 'process', 'update'"):
        SchedulerTick.parse(value, "tick")


def test_choice_error_suggests_only_close_names():
    assert (
        choice_error("x", "stpe", ["step", "epoch"])
        == "x is 'stpe'. Did you mean 'step'? It must be one of 'epoch', 'step'."
    )
    assert (
        choice_error("x", "zzz", ["step", "epoch"])
        == "x is 'zzz'; it must be one of 'epoch', 'step'."
    )


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_take_keywords_only(kind):
    kinds = {parameter.kind for parameter in inspect.signature(kind).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_data_loader_configuration_defaults():
    assert vars(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "non_blocking": False,
        "use_stateful_dataloader": False,
        "data_seed": None,
        "presharded": False,
    }
    with pytest.raises(TypeError, match="data_seed is '1'; it must be a int"):
        DataLoaderConfiguration(data_seed="1")


@pytest.mark.parametrize("kind", HANDLERS)
def test_default_handlers_pass_no_arguments(kind):
    assert kind().to_kwargs() == {}


def test_handlers_pass_non_default_arguments():
    assert AutocastKwargs(enabled=False).to_kwargs() == {"enabled": False}
    assert GradScalerKwargs(init_scale=8.0, growth_factor=2.0).to_kwargs() == {"init_scale": 8.0}
    limit = timedelta(seconds=5)
    assert InitProcessGroupKwargs(timeout=limit).to_kwargs() == {"timeout": limit}
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=True, sync_each_batch=True)
    assert plugin.to_kwargs() == {"num_steps": 2, "sync_each_batch": True}
    assert isinstance(plugin, KwargsHandler)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (AutocastKwargs, torch.autocast),
        (GradScalerKwargs, torch.amp.GradScaler),
    ],
)
def test_handler_defaults_equal_those_of_torch(kind, target):
    # What equals its default is not passed on, so the two defaults must agree.
    theirs = inspect.signature(target.__init__).parameters
    for name, parameter in inspect.signature(kind).parameters.items():
        assert parameter.default == theirs[name].default, name


# -- choices -------------------------------------------------------------------------------------


def repr_of(member):
    return f"{type(member).__name__}.{member.name}"


@pytest.mark.parametrize("kind", CHOICES)
def test_values_and_members_are_in_a_choice(kind):
    for member in kind:
        assert member in kind
        assert member.value in kind
        assert member == member.value == kind(member.value)
        assert str(member) == (repr_of(member) if kind is DistributedType else member.value)
    assert kind.list() == [member.value for member in kind]
    for other in ("half", None, 3, [], {}):
        assert other not in kind


def test_choices_have_the_documented_members():
    assert DistributedType.list() == [
        *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
        *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"),
        *("DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"),
    ]
    assert {"torch", "cuda", "mlu", "npu", "xla", "xpu", "generator"} < set(RNGType.list())
    assert LoggerType.list() == [
        *("all", "aim", "tensorboard", "wandb", "comet_ml", "mlflow", "clearml", "dvclive"),
        *("swanlab", "trackio"),
    ]
    assert ComputeEnvironment.list() == ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]
    assert SageMakerDistributedType.list() == ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"]
    assert {"NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS"} < set(DynamoBackend.list())


# -- values of the wrong kind --------------------------------------------------------------------


def switches() -> list[tuple[type, str]]:
    """Every field of every configuration that is on or off."""
    return [
        (kind, parameter.name)
        for kind in CONFIGURATIONS
        for parameter in inspect.signature(kind).parameters.values()
        if isinstance(parameter.default, bool)
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *switches(),
        (DataLoaderConfiguration, "dispatch_batches"),
        (AutocastKwargs, "cache_enabled"),
    ],
)
def test_bool_fields_accept_only_bools(kind, name):
    for value in (True, False, 1):  # 1 is True, as everywhere in Python
        assert getattr(kind(**{name: value}), name) == value
    for value in ("yes", 2):
        with pytest.raises(TypeError, match=f"{name} is {value!r}; it must be True or False"):
            kind(**{name: value})


DDP = DistributedDataParallelKwargs
POWER_SGD = {"comm_hook": "power_sgd"}


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (GradientAccumulationPlugin, {"num_steps": 0}, ValueError, "num_steps is 0; .* at least 1"),
        (GradientAccumulationPlugin, {"num_steps": 2.5}, ValueError, "num_steps is .* a whole"),
        (GradientAccumulationPlugin, {"num_steps": True}, TypeError, "num_steps is .* a whole"),
        (ProjectConfiguration, {"total_limit": 0}, ValueError, "total_limit is 0; .* at least 1"),
        (ProjectConfiguration, {"total_limit": "3"}, TypeError, "total_limit is '3'"),
        (ProjectConfiguration, {"iteration": -1}, ValueError, "iteration is -1; .* at least 0"),
        (ProjectConfiguration, {"project_dir": 3}, TypeError, "project_dir is 3; .* a path"),
        (ProjectConfiguration, {"logging_dir": 3}, TypeError, "logging_dir is 3; .* a path"),
        (DDP, {"comm_hook": "powersgd"}, ValueError, "is 'powersgd'.* Did you mean 'power_sgd'"),
        (
            DDP,
            {"comm_hook": "fp16", "comm_wrapper": "power_sgd"},
            ValueError,
            "comm_wrapper is .*; it must be one of 'bf16', 'fp16', 'no'",
        ),
        (DDP, {"comm_wrapper": "fp16"}, ValueError, "but comm_hook is not set.* comm_hook='fp16'"),
        (
            DDP,
            {"comm_hook": "fp16", "comm_state_option": {"matrix_approximation_rank": 2}},
            ValueError,
            "comm_hook='fp16' has no state",
        ),
        (DDP, POWER_SGD | {"comm_state_option": {"rank": 2}}, TypeError, "argument 'rank'"),
        (
            DDP,
            POWER_SGD | {"comm_state_option": {"start_powerSGD_iter": 1}},
            ValueError,
            "start_powerSGD_iter",
        ),
        (GradScalerKwargs, {"init_scale": 0.0}, ValueError, "init_scale is 0.0; .* above 0"),
        (GradScalerKwargs, {"growth_interval": 0}, ValueError, "growth_interval is 0"),
        (FP8RecipeKwargs, {"backend": "TF"}, ValueError, "backend is 'TF'; .* 'MSAMP', 'TE'"),
        (
            FP8RecipeKwargs,
            {"fp8_format": "E4M4"},
            ValueError,
            "fp8_format is 'E4M4'. Did you mean 'E4M3'",
        ),
    ],
)
def test_invalid_configuration_values_raise(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**arguments)


# -- one by one ----------------------------------------------------------------------------------


def test_logging_dir_defaults_to_project_dir(tmp_path):
    assert (ProjectConfiguration().project_dir, ProjectConfiguration().logging_dir) == (None, None)
    assert ProjectConfiguration(project_dir="run").logging_dir == "run"
    apart = ProjectConfiguration(project_dir=tmp_path, logging_dir="logs")
    assert (apart.project_dir, apart.logging_dir) == (tmp_path, "logs")
    later = ProjectConfiguration()
    later.set_directories("first")
    assert (later.project_dir, later.logging_dir) == ("first", "first")
    later.set_directories("second")
    assert (later.project_dir, later.logging_dir) == ("second", "first")
    defaults = ProjectConfiguration()
    assert (defaults.automatic_checkpoint_naming, defaults.save_on_each_node) == (False, False)
    assert (defaults.total_limit, defaults.iteration) == (None, 0)


def test_whole_numbers_may_be_written_as_floats():
    project = ProjectConfiguration(total_limit=2.0, iteration=1e1)
    assert (
        repr([GradientAccumulationPlugin(num_steps=4.0).num_steps, project.iteration]) == "[4, 10]"
    )
    assert repr(project.total_limit) == "2"


def test_accumulation_steps_default_to_the_environment(monkeypatch):
    assert vars(GradientAccumulationPlugin()) == {
        "num_steps": 1,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert GradientAccumulationPlugin().num_steps == 4
    assert GradientAccumulationPlugin(num_steps=2).num_steps == 2
    for text in ("0", "four"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", text)
        with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is"):
            GradientAccumulationPlugin()


def test_handler_to_dict_returns_a_deep_copy():
    handler = AutocastKwargs(enabled=False)
    assert handler.to_dict() == {"enabled": False, "cache_enabled": None}
    recipe = FP8RecipeKwargs()
    recipe.override_linear_precision = [True, False, False]
    recipe.to_dict()["override_linear_precision"].append(True)
    assert recipe.override_linear_precision == [True, False, False]


def test_ddp_defaults_equal_those_of_torch():
    # What equals its default is not passed on, so the two defaults must agree; None means 25.
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallelKwargs).parameters
    for name, parameter in ours.items():
        if name.startswith("comm_"):  # hooks are registered, not passed
            continue
        default = theirs[name].default
        assert default in (None, parameter.default), name


def test_an_earlier_fp8_recipe_is_that_of_transformer_engine():
    assert FP8RecipeKwargs(backend="te", fp8_format="hybrid").to_kwargs() == {
        "backend": "TE",
        "fp8_format": "HYBRID",
    }
    found = recipe_of([FP8RecipeKwargs(backend="TE", margin=2, use_autocast_during_eval=True)])
    assert found == TERecipeKwargs(margin=2, fp8_format="E4M3", use_autocast_during_eval=True)
    assert FP8RecipeKwargs(opt_level="O1").optimization_level == "O1"


# -- fields with an environment variable -----------------------------------------------------------


def with_variables() -> dict[str, list[str]]:
    """The environment variables of each configuration that has any."""
    kinds = (getattr(trainer.configuration, name) for name in trainer.configuration.__all__)
    found = {
        kind.__name__: [variable for each in settings_of(kind).values() for variable in each.env]
        for kind in kinds
        if is_dataclass(kind)
    }
    return {name: variables for name, variables in found.items() if variables}


def test_trainer_env_shows_the_variable_of_every_field():
    found = with_variables()
    assert len(found) == 11
    assert {name for names in found.values() for name in names} <= set(env.VARIABLES)
    assert all(env.VARIABLES.values())


@pytest.mark.parametrize("name", with_variables())
def test_an_empty_variable_counts_as_not_set(monkeypatch, name):
    kind = getattr(trainer.configuration, name)
    usual = {each.name: getattr(kind(), each.name) for each in fields(kind)}
    for variable in with_variables()[name]:
        monkeypatch.setenv(variable, "")
    assert {each.name: getattr(kind(), each.name) for each in fields(kind)} == usual


def test_an_argument_comes_before_its_variable(monkeypatch):
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "7")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B")
    made = FullyShardedDataParallelPlugin(min_num_params=3)
    assert (made.min_num_params, made.transformer_cls_names_to_wrap) == (3, ["A", "B"])
    assert FullyShardedDataParallelPlugin().min_num_params == 7
