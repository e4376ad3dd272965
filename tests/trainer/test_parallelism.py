"""Device meshes and settings of FSDP: defaults, the environment, names, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from trainer import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from trainer.configuration import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

CPU = torch.device("cpu")


def test_an_fsdp_plugin_shards_blocks_and_releases_them_after_forward_by_default():
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"
    assert plugin.transformer_cls_names_to_wrap is None
    assert plugin.min_num_params == 100_000_000
    assert not plugin.activation_checkpointing
    assert not plugin.hybrid
    assert plugin.policy() == MixedPrecisionPolicy()
    assert type(plugin.offload(CPU)) is OffloadPolicy


@pytest.mark.parametrize(
    ("strategy", "reshard", "hybrid"),
    [
        ("FULL_SHARD", True, False),
        ("shard_grad_op", False, False),
        ("HYBRID_SHARD", True, True),
        ("HYBRID_SHARD_ZERO2", False, True),
        (2, False, False),
    ],
)
def test_strategies_of_fsdp_1_say_when_parameters_are_released(strategy, reshard, hybrid):
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=strategy)
    assert (plugin.reshard_after_forward, plugin.hybrid) == (reshard, hybrid)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("FSDP_VERSION", "1", "fsdp_version", 1),
        ("FSDP_SHARDING_STRATEGY", "2", "sharding_strategy", "SHARD_GRAD_OP"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "reshard_after_forward", False),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B", "transformer_cls_names_to_wrap", ["A", "B"]),
        ("FSDP_MIN_NUM_PARAMS", "7", "min_num_params", 7),
        ("FSDP_OFFLOAD_PARAMS", "true", "cpu_offload", True),
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", "state_dict_type", "FULL_STATE_DICT"),
        ("FSDP_BACKWARD_PREFETCH", "NO_PREFETCH", "backward_prefetch", "NO_PREFETCH"),
        ("FSDP_FORWARD_PREFETCH", "true", "forward_prefetch", True),
        ("FSDP_USE_ORIG_PARAMS", "true", "use_orig_params", True),
        ("FSDP_SYNC_MODULE_STATES", "true", "sync_module_states", True),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "activation_checkpointing", True),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "cpu_ram_efficient_loading", True),
        ("FSDP_IGNORED_MODULES", "head.*", "ignored_modules", "head.*"),
    ],
)
def test_each_variable_equals_its_argument(variable, text, name, value, monkeypatch):
    monkeypatch.setenv(variable, text)
    read = FullyShardedDataParallelPlugin()
    assert getattr(read, name) == value
    monkeypatch.delenv(variable)
    assert read == FullyShardedDataParallelPlugin(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sharding_strategy": "FULL"}, ValueError, "sharding_strategy is 'FULL'.*'FULL_SHARD'"),
        ({"sharding_strategy": "NO_SHARD"}, ValueError, "leave the FSDP plugin out"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, ValueError, "FSDP 2 does not have"),
        ({"backward_prefetch": "BACKWARD_POST"}, ValueError, "FSDP 2 does not have"),
        ({"use_orig_params": False}, ValueError, "use_orig_params is False"),
        ({"sync_module_states": False}, ValueError, "sync_module_states is False"),
        ({"limit_all_gathers": False}, ValueError, "limit_all_gathers is False"),
        ({"reshard_after_forward": "maybe"}, ValueError, "reshard_after_forward is 'maybe'"),
        ({"auto_wrap_policy": "size"}, ValueError, "auto_wrap_policy is 'size'; .*SIZE_BASED"),
        ({"fsdp_version": 3}, ValueError, "fsdp_version is 3; it must be 1 or 2"),
        (
            {"activation_checkpointing_offload": True},
            ValueError,
            "offload is True, but activation_checkpointing is False",
        ),
        ({"activation_checkpointing": 2}, TypeError, "activation_checkpointing is 2"),
    ],
)
def test_what_fsdp_2_does_not_have_is_refused_by_name(arguments, error, text):
    with pytest.raises(error, match=text):
        FullyShardedDataParallelPlugin(**arguments)


def test_a_mixed_precision_policy_may_be_a_name_a_dict_or_torchs():
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.policy() == bf16
    plugin.set_mixed_precision("fp16")
    assert plugin.policy() == bf16  # only `override` replaces it
    for given in ("bf16", bf16, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
        assert FullyShardedDataParallelPlugin(mixed_precision_policy=given).policy() == bf16
    offloading = FullyShardedDataParallelPlugin(cpu_offload=True)
    assert isinstance(offloading.offload(CPU), CPUOffloadPolicy)
    for kind, pinned in {"cpu": False, "cuda": True, "xpu": True}.items():
        assert offloading.offload(torch.device(kind)).pin_memory is pinned


def test_parallelism_config_has_the_documented_sizes_and_names(monkeypatch):
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4)
    assert (config.total_size, config.data_parallel_size) == (24, 6)
    assert config.non_data_parallel_size == 4
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert config.dp_dim_names == config.fsdp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.dp_replicate_enabled
    assert config.dp_shard_enabled
    assert config.tp_enabled
    assert not config.cp_enabled
    assert not config.sp_enabled
    assert config.to_json()["tp_size"] == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert ParallelismConfig() == config


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="dp_shard_size is 0"):
        ParallelismConfig(dp_shard_size=0)
    with pytest.raises(NotImplementedError, match=r"sp_size=2.* is not supported yet"):
        ParallelismConfig(sp_size=2)
    with pytest.raises(ValueError, match="device mesh is not built yet"):
        ParallelismConfig().get_device_mesh()


def test_sizes_multiply_to_the_number_of_processes():
    with pytest.raises(ValueError, match=r"parallelism_config has .* product is 2; .* is 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def test_a_tensor_parallel_plugin_is_a_size():
    config = ParallelismConfig.requested(None, TorchTensorParallelPlugin(tp_size=4))
    assert config == ParallelismConfig(tp_size=4)
    with pytest.raises(ValueError, match="tp_size is 1; it must be a whole number of at least 2"):
        TorchTensorParallelPlugin()
    with pytest.raises(ValueError, match="parallelism_config or torch_tp_plugin, not both"):
        ParallelismConfig.requested(config, TorchTensorParallelPlugin(tp_size=4))


def test_handlers_of_dimensions(monkeypatch):
    config = ParallelismConfig(tp_size=2, cp_size=2)
    assert config.cp_handler == TorchContextParallelConfig(cp_comm_strategy="allgather")
    assert config.tp_handler == TorchTensorParallelConfig(enable_async_tp=False)
    assert config.cp_backend == "torch"
    for make, error, said in (
        (lambda: ParallelismConfig(cp_backend="ring"), ValueError, "cp_backend is 'ring'"),
        (lambda: ParallelismConfig(sp_backend="ring"), ValueError, "sp_backend is 'ring'"),
        (lambda: ParallelismConfig(sp_handler="all"), TypeError, "sp_handler is 'all'"),
        (
            lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
            ValueError,
            "sp_seq_length is not given",
        ),
        (lambda: ParallelismConfig(cp_handler="all"), TypeError, "cp_handler is 'all'"),
        (lambda: ParallelismConfig(tp_handler=1), TypeError, "tp_handler is 1"),
        (lambda: TorchContextParallelConfig(cp_comm_strategy="a"), ValueError, "strategy is 'a'"),
        (lambda: TorchTensorParallelConfig(enable_async_tp=True), NotImplementedError, "async"),
    ):
        with pytest.raises(error, match=said):
            make()
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa")
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=128, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    config = ParallelismConfig(sp_handler=DeepSpeedSequenceParallelConfig())
    assert (config.sp_handler, config.sp_backend) == (handler, "deepspeed")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    with pytest.raises(NotImplementedError, match="cp_comm_strategy='alltoall'"):
        ParallelismConfig(cp_size=2)


def test_settings_of_fsdp_may_be_changed_and_checked_later():
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    plugin.set_state_dict_type("full_state_dict")
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    for wrong, said in (("LOCAL_STATE_DICT", "FSDP 2 does not have"), ("whole", "is 'whole'")):
        with pytest.raises(ValueError, match=said):
            FullyShardedDataParallelPlugin().set_state_dict_type(wrong)
    plugin.validate_mixed_precision_policy()
    plugin.validate_cpu_offload()
    plugin.set_cpu_offload()
    assert type(plugin.cpu_offload) is OffloadPolicy
    plugin.validate_cpu_offload()
    plugin.cpu_offload = "yes"
    with pytest.raises(TypeError, match="cpu_offload is 'yes'"):
        plugin.validate_cpu_offload()
    plugin.mixed_precision_policy = "int4"
    with pytest.raises(ValueError, match="mixed_precision_policy is 'int4'"):
        plugin.validate_mixed_precision_policy()
