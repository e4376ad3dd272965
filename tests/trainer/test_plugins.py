"""The plugins check what they are given; engines that are not there are refused, not ignored."""

from __future__ import annotations

import json
from math import nan

import pytest

from trainer.enums import DynamoBackend
from trainer.plugins import (
    DeepSpeedPlugin,
    MegatronLMPlugin,
    TorchDynamoPlugin,
    check_engine,
)


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_backend_name_ignores_case(backend):
    plugin = TorchDynamoPlugin(backend=backend)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "inductor"}
    assert plugin.to_dict()["backend"] == "inductor"
    assert TorchDynamoPlugin().backend == DynamoBackend.NO  # nothing is compiled unasked


def test_only_non_default_arguments_reach_torch_compile():
    plugin = TorchDynamoPlugin(
        backend="aot_eager", mode="reduce-overhead", fullgraph=True, dynamic=False, disable=True
    )
    assert plugin.to_kwargs() == {
        "backend": "aot_eager",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": False,
        "disable": True,
    }
    options = {"max_autotune": True}
    plugin = TorchDynamoPlugin(backend="inductor", options=options)
    assert plugin.to_kwargs() == {"backend": "inductor", "options": options}


def test_regional_compilation_is_refused(monkeypatch):
    assert TorchDynamoPlugin(use_regional_compilation=False).use_regional_compilation is False
    for arguments in ({"use_regional_compilation": True}, {}):
        with pytest.raises(NotImplementedError, match=r"use_regional_compilation=True.*block\.com"):
            TorchDynamoPlugin(backend="eager", **arguments)
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")


def test_missing_arguments_come_from_the_environment(monkeypatch):
    for name, value in (
        ("BACKEND", "aot_eager"),
        ("MODE", "max-autotune"),
        ("USE_FULLGRAPH", "true"),
        ("USE_DYNAMIC", "false"),
    ):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    named = TorchDynamoPlugin()
    assert named.backend == DynamoBackend.AOT_EAGER
    assert (named.mode, named.fullgraph, named.dynamic) == ("max-autotune", True, False)
    given = TorchDynamoPlugin(backend="eager", mode="default", fullgraph=False, dynamic=True)
    assert given.backend == DynamoBackend.EAGER
    assert (given.mode, given.fullgraph, given.dynamic) == ("default", False, True)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductr")
    with pytest.raises(ValueError, match=r"ACCELERATE_DYNAMO_BACKEND is 'inductr'.*'inductor'\?"):
        TorchDynamoPlugin()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "inductr"}, ValueError, r"dynamo backend is 'inductr'.*'eager'.*'inductor'\?"),
        ({"mode": "fast"}, ValueError, "mode of torch.compile is 'fast'.*'reduce-overhead'"),
        ({"fullgraph": "yes"}, TypeError, "fullgraph is 'yes'; it must be True or False"),
        ({"dynamic": 1}, TypeError, "dynamic is 1; it must be True or False"),
        ({"disable": None}, TypeError, "disable is None; it must be True or False"),
        ({"mode": "max-autotune", "options": {}}, ValueError, "mode='max-autotune' and options={}"),
    ],
)
def test_invalid_torch_compile_arguments_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        TorchDynamoPlugin(**arguments)


def test_a_deepspeed_plugin_has_its_defaults_and_reads_the_environment(monkeypatch):
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.gradient_accumulation_steps == plugin.gradient_clipping == "auto"
    assert plugin.offload_optimizer_device == plugin.offload_param_device == "none"
    assert plugin.zero3_init_flag is plugin.zero3_save_16bit_model is False
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT_FLAG", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    named = DeepSpeedPlugin()
    assert (named.zero_stage, named.offload_param_device) == (3, "cpu")
    assert (named.gradient_accumulation_steps, named.gradient_clipping) == (4, 0.5)
    assert named.zero3_init_flag is True
    assert DeepSpeedPlugin(zero_stage=0).zero_stage == 0


def test_deepspeed_configuration_needs_a_zero_stage(tmp_path):
    sound = {"zero_optimization": {"stage": 3}}
    assert DeepSpeedPlugin(hf_ds_config=sound).hf_ds_config is sound
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(sound))
    DeepSpeedPlugin(hf_ds_config=path)
    path.write_text(json.dumps({"fp16": {}}))
    with pytest.raises(ValueError, match=r"\['fp16'\].*'zero_optimization'"):
        DeepSpeedPlugin(hf_ds_config=str(path))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"zero_stage": 4}, ValueError, "zero_stage is 4; it must be 0, 1, 2 or 3"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps is 0"),
        ({"gradient_clipping": nan}, ValueError, "gradient_clipping is nan; it must be a number"),
        ({"gradient_clipping": "much"}, ValueError, "'much'"),
        ({"offload_param_device": "gpu"}, ValueError, "offload_param_device is 'gpu'.*'nvme'"),
        ({"zero3_init_flag": "no"}, TypeError, "zero3_init_flag is 'no'"),
    ],
)
def test_invalid_deepspeed_arguments_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        DeepSpeedPlugin(**arguments)


def test_a_megatron_plugin_has_its_defaults_and_reads_the_environment(monkeypatch):
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (1, 1, 1)
    assert plugin.gradient_clipping == 1.0
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "0.5")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "true")
    named = MegatronLMPlugin(pp_degree=2)
    assert (named.tp_degree, named.pp_degree, named.gradient_clipping) == (4, 2, 0.5)
    assert named.sequence_parallelism is True
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "much")
    with pytest.raises(ValueError, match="'much'"):
        MegatronLMPlugin()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lr_decay_style": "steep"}, ValueError, "lr_decay_style is 'steep'.*'cosine'"),
        ({"recompute_activations": 1}, TypeError, "recompute_activations is 1"),
        ({"return_logits": "no"}, TypeError, "return_logits is 'no'"),
    ],
)
def test_invalid_megatron_arguments_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        MegatronLMPlugin(**arguments)


ENGINES = [
    ("deepspeed_plugin", DeepSpeedPlugin, "ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    ("megatron_lm_plugin", MegatronLMPlugin, "ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
]


@pytest.mark.parametrize(("argument", "kind", "variable", "engine"), ENGINES)
def test_unsupported_engine_error_names_the_alternatives(
    argument, kind, variable, engine, monkeypatch
):
    check_engine()
    text = f"{argument} asks for {engine}, which is not supported yet.*DDP.*leave {argument} out"
    with pytest.raises(NotImplementedError, match=text):
        check_engine(**{argument: kind()})
    with pytest.raises(TypeError, match=f"{argument} is 'zero'; it must be a {kind.__name__}"):
        check_engine(**{argument: "zero"})
    monkeypatch.setenv(variable, "false")
    check_engine()
    monkeypatch.setenv(variable, "true")
    text = f"{variable}=true asks for {engine}.*dynamo_backend: unset {variable}"
    with pytest.raises(NotImplementedError, match=text):
        check_engine()
