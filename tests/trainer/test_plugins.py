"""The plugins check what they are given; engines that are not there are refused, not ignored."""

from __future__ import annotations

import base64
import json
from functools import partial
from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.accelerator import Accelerator
from trainer.configuration import DeepSpeedPlugin, MegatronLMPlugin, TorchDynamoPlugin
from trainer.configuration.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin
from trainer.configuration.dummy_optimizers import DummyOptim, DummyScheduler
from trainer.enums import DynamoBackend
from trainer.state import AcceleratorState


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


def test_regional_compilation_is_no_argument_of_torch(monkeypatch):
    assert not TorchDynamoPlugin(backend="eager").compiles_regions
    for arguments in ({"use_regional_compilation": True}, {}):
        plugin = TorchDynamoPlugin(backend="eager", **arguments)
        assert plugin.compiles_regions
        assert plugin.to_kwargs() == {"backend": "eager"}
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    assert not TorchDynamoPlugin().compiles_regions


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
        ({"backend": "inductr"}, ValueError, r"dynamo backend is 'inductr'.*'inductor'\?.*'eager'"),
        ({"mode": "fast"}, ValueError, "mode of torch.compile is 'fast'.*'reduce-overhead'"),
        ({"fullgraph": "yes"}, TypeError, "fullgraph is 'yes'; it must be True or False"),
        ({"dynamic": 2}, TypeError, "dynamic is 2; it must be True or False"),
        ({"disable": None}, TypeError, "disable is None; it must be True or False"),
        ({"mode": "max-autotune", "options": {}}, ValueError, "mode='max-autotune' and options={}"),
    ],
)
def test_invalid_torch_compile_arguments_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        TorchDynamoPlugin(**arguments)


def test_a_deepspeed_plugin_has_its_defaults_and_reads_the_environment(monkeypatch, tmp_path):
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.gradient_accumulation_steps == plugin.gradient_clipping == "auto"
    assert plugin.offload_optimizer_device == plugin.offload_param_device == "none"
    assert plugin.zero3_init_flag is plugin.zero3_save_16bit_model is False
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 2
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    assert DeepSpeedPlugin().zero3_init_flag is True
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Experts")
    named = DeepSpeedPlugin()
    assert (named.zero_stage, named.offload_param_device) == (3, "cpu")
    assert (named.gradient_accumulation_steps, named.gradient_clipping) == (4, 0.5)
    assert named.zero3_init_flag is False
    assert named.transformer_moe_cls_names == "Experts"
    assert named.get_value("zero_optimization.offload_param.device") == "cpu"
    assert DeepSpeedPlugin(zero_stage=0, offload_param_device="none").zero_stage == 0
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    assert DeepSpeedPlugin().zero_stage == 1
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert DeepSpeedPlugin.requested(None)[""].zero_stage == 1
    first = Accelerator(cpu=True).deepspeed_plugin
    assert Accelerator().deepspeed_plugin is first  # a further one is for another model
    assert get_active_deepspeed_plugin(AcceleratorState()) is first
    AcceleratorState._reset_state()
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    Accelerator()
    with pytest.raises(ValueError, match="DeepSpeed is not used"):
        get_active_deepspeed_plugin(AcceleratorState())


CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
}


def test_a_deepspeed_configuration_is_read_in_each_form_and_keeps_the_given_one(tmp_path):
    path = tmp_path / "ds.json"
    text = json.dumps(CONFIG)
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for given in (CONFIG, path, str(path), text, encoded, HfDeepSpeedConfig(CONFIG)):
        plugin = DeepSpeedPlugin(hf_ds_config=given)
        assert plugin.deepspeed_config == CONFIG
        assert plugin.zero_stage == 3
    plugin.deepspeed_config_process(
        must_match=False,
        **{
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "zero_optimization.reduce_bucket_size": 100,
            "optimizer.params.lr": 0.1,
            "optimizer.params.weight_decay": 0.0,
        },
    )
    assert plugin.get_value("optimizer.params.lr") == 0.1
    assert not plugin.is_auto("gradient_clipping")
    assert CONFIG["gradient_clipping"] == "auto"
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu is 4, but the run has 8"):
        plugin.deepspeed_config_process(train_micro_batch_size_per_gpu=8)
    with pytest.raises(
        ValueError, match=r"train_micro_batch_size_per_gpu is 'auto'.*no value for it"
    ):
        DeepSpeedPlugin(hf_ds_config=CONFIG).deepspeed_config_process()
    with pytest.raises(ValueError, match=r"hf_ds_config is 'no.json'; it must be"):
        DeepSpeedPlugin(hf_ds_config="no.json")
    with pytest.raises(ValueError, match=r"\['fp16'\].*'zero_optimization'"):
        DeepSpeedPlugin(hf_ds_config={"fp16": {}})


def test_a_deepspeed_configuration_answers_by_dotted_keys():
    config = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "a": False}
    )
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, True)
    assert (config.is_true("a"), config.is_false("a"), config.is_false("b")) == (False, True, False)
    assert config.find_config_node("no.such") == (None, "such")
    config.del_config_sub_tree("zero_optimization.offload_optimizer")
    assert config.config["zero_optimization"] == {"stage": 2}
    config.del_config_sub_tree("zero_optimization.c")
    with pytest.raises(ValueError, match=r"has no zero_optimization\.c"):
        config.del_config_sub_tree("zero_optimization.c", must_exist=True)


def test_the_final_configuration_has_the_values_of_the_run():
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(hidden_size=10)
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.run_values["train_micro_batch_size_per_gpu"] = 4
    optimizer = DummyOptim(model.parameters(), lr=0.3, weight_decay=0.2)
    config = plugin.final_config(model, optimizer, bf16=True)
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["optimizer"]["params"] == {"lr": 0.3, "weight_decay": 0.2, "torch_adam": True}
    assert config["zero_optimization"]["reduce_bucket_size"] == 100
    assert config["bf16"]["enabled"] is True
    assert "optimizer" not in plugin.final_config(model, None, bf16=False)
    with pytest.raises(ValueError, match=r"has an optimizer, and the script has a SGD"):
        plugin.final_config(model, torch.optim.SGD(model.parameters(), 0.1), bf16=False)
    bare = DeepSpeedPlugin()
    with pytest.raises(ValueError, match=r"DummyOptim stands for.*which has none"):
        bare.final_config(model, optimizer, bf16=False)
    with pytest.raises(ValueError, match=r"reduce_bucket_size is 'auto'.*no value"):
        plugin.final_config(nn.Linear(2, 2), optimizer, bf16=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("curriculum_learning", {"enabled": True}),
        ("tensor_parallel", {"autotp_size": 2}),
        ("sparse_gradients", True),
    ],
)
def test_what_deepspeed_would_do_beside_the_loop_is_refused_by_name(key, value):
    config = {"zero_optimization": {"stage": 1}, key: value}
    with pytest.raises(NotImplementedError, match=f"sets {key}, which is not supported"):
        DeepSpeedPlugin(hf_ds_config=config).final_config(nn.Linear(1, 1), None, bf16=False)


def test_the_optimizer_that_cannot_rescale_gradients_is_refused_by_name():
    config = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(NotImplementedError, match=r"BF16_Optimizer"):
        DeepSpeedPlugin(hf_ds_config=config).final_config(nn.Linear(1, 1), None, bf16=True)


def test_a_precision_of_the_configuration_counts_and_must_not_differ():
    own = {"": DeepSpeedPlugin(hf_ds_config={"zero_optimization": {}, "bf16": {"enabled": True}})}
    assert DeepSpeedPlugin.precision_of(own, None) == "bf16"
    with pytest.raises(ValueError, match=r"mixed_precision is 'fp16', but .* enables bf16"):
        DeepSpeedPlugin.precision_of(own, "fp16")


def test_stand_ins_do_nothing_by_themselves():
    optimizer = DummyOptim(nn.Linear(1, 1).parameters())
    with pytest.raises(RuntimeError, match=r"DummyOptim stands for"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"DummyScheduler stands for"):
        DummyScheduler(optimizer).step()
    with pytest.raises(ValueError, match=r"which has none: add 'scheduler'"):
        DummyScheduler(optimizer).make(DeepSpeedPlugin(), optimizer)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"zero_stage": 4}, ValueError, "zero_stage is 4; it must be 0, 1, 2 or 3"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps is 0"),
        ({"gradient_clipping": nan}, ValueError, "gradient_clipping is nan; it must be a number"),
        ({"gradient_clipping": "much"}, ValueError, "'much'"),
        ({"offload_param_device": "gpu"}, ValueError, "offload_param_device is 'gpu'.*'nvme'"),
        ({"zero3_init_flag": "no", "zero_stage": 3}, TypeError, "zero3_init_flag is 'no'"),
        ({"zero3_init_flag": True}, ValueError, "only stage 3 partitions"),
        ({"offload_param_device": "nvme", "zero_stage": 3}, NotImplementedError, "'nvme'"),
        ({"offload_param_device": "cpu"}, ValueError, "only stage 3 partitions"),
        ({"offload_optimizer_device": "cpu", "zero_stage": 0}, ValueError, "needs a ZeRO stage"),
        ({"enable_msamp": True}, NotImplementedError, "MS-AMP"),
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
    monkeypatch.setenv("MEGATRON_LM_HIDDEN_DROPOUT", "0.5")
    monkeypatch.setenv("MEGATRON_LM_EOD_MASK_LOSS", "true")
    named = MegatronLMPlugin(pp_degree=2)
    assert (plugin.hidden_dropout, named.hidden_dropout) == (None, 0.5)
    assert (plugin.eod_mask_loss, named.eod_mask_loss) == (None, True)
    assert (named.tp_degree, named.pp_degree, named.gradient_clipping) == (4, 2, 0.5)
    assert named.sequence_parallelism is True
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "much")
    with pytest.raises(ValueError, match=r"'much'"):
        MegatronLMPlugin()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tp_degree": 0}, ValueError, "tp_degree is 0"),
        ({"sequence_parallelism": True}, ValueError, "but tp_degree is 1"),
        (
            {"recompute_activations": True, "recompute_granularity": "full"},
            ValueError,
            "leave one of them out",
        ),
        ({"lr_decay_style": "steep"}, ValueError, "lr_decay_style is 'steep'.*'cosine'"),
        ({"recompute_activations": 2}, TypeError, "recompute_activations is 2"),
        ({"return_logits": "no"}, TypeError, "return_logits is 'no'"),
    ],
)
def test_invalid_megatron_arguments_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        MegatronLMPlugin(**arguments)


def test_all_that_the_engine_cannot_do_is_named_at_once():
    MegatronLMPlugin(context_parallel_size=1, use_custom_fsdp=False).check_supported()
    plugin = MegatronLMPlugin(context_parallel_size=2, eval_iters=5, lr_mult=2.0)
    text = r"context_parallel_size=2 \(use Para.*lr_mult=2.0 .*; eval_iters=5 \(use limit_val_"
    with pytest.raises(NotImplementedError, match=text):
        plugin.check_supported()
    with pytest.raises(TypeError, match=r"megatron_lm_plugin is 'zero'; it must be a Megatron"):
        MegatronLMPlugin.requested("zero")


def test_the_models_configuration_gets_what_the_plugin_says():
    plugin = MegatronLMPlugin(tp_degree=2, recompute_activations=True, hidden_dropout=0.2)
    assert plugin.transformer_arguments("bf16") == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "recompute_granularity": "selective",
        "hidden_dropout": 0.2,
    }


def test_a_plugin_of_deepspeed_is_selected_by_name_and_given_once():
    one, two = DeepSpeedPlugin(zero_stage=1), DeepSpeedPlugin(zero_stage=2)
    assert DeepSpeedPlugin.requested({"a": one, "b": two}) == {"a": one, "b": two}
    for given, several, message in (
        (one, {"b": two}, "not both"),
        ({}, None, "deepspeed_plugins is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            DeepSpeedPlugin.requested(given, several)
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        one.select()
    with pytest.raises(AttributeError, match="selected = True cannot be set"):
        one.selected = True


def partitions() -> list[bool]:
    from transformers.integrations import is_deepspeed_zero3_enabled

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    with plugin.zero3_init_context_manager(enable=True):
        inside = [plugin.is_zero3_init_enabled(), is_deepspeed_zero3_enabled()]
    return [*inside, plugin.is_zero3_init_enabled(), is_deepspeed_zero3_enabled()]


def test_models_are_partitioned_while_they_are_loaded_inside_the_context_alone(ranks2):
    assert ranks2(partitions) == [[True, True, False, False]] * 2


def test_a_scheduler_stands_for_a_callable_or_for_that_of_the_configuration():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    dummy = DummyScheduler(optimizer, lr_scheduler_callable=step)
    assert dummy.make(DeepSpeedPlugin(), optimizer).step_size == 3
    config = {"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmUpLR", "params": {}}}
    with pytest.raises(ValueError, match="Did you mean 'WarmupLR'"):
        DummyScheduler(optimizer).make(DeepSpeedPlugin(hf_ds_config=config), optimizer)
    plugin = DeepSpeedPlugin(transformer_moe_cls_names="Linear, Expert")
    with pytest.raises(ValueError, match="'Expert'"):
        plugin.set_moe_leaf_modules(nn.Sequential(nn.Linear(1, 1)))


def test_a_later_accelerator_may_have_an_equal_deepspeed_plugin():
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    first = Accelerator(
        cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    first.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2  # as scripts do
    again = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert again.deepspeed_plugin is first.deepspeed_plugin
    with pytest.raises(ValueError, match=r"'stage': 1.*cannot be changed.*'stage': 2"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
