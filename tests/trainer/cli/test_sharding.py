"""FSDP, DeepSpeed and meshes by options, files and questions: each equals its argument."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    TrainModule,
)
from trainer.cli import env, main
from trainer.environment import patch_environment
from trainer.launch.configuration import LaunchConfiguration, read_file, write_file
from trainer.launch.settings import DEEPSPEED, FSDP, MEGATRON, MESH

# Name: the value as an option, and the argument that it equals.
EQUALS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp_version": ("1", {"fsdp_version": 1}),
    "fsdp_sharding_strategy": ("HYBRID_SHARD", {"sharding_strategy": "HYBRID_SHARD"}),
    "fsdp_reshard_after_forward": ("false", {"reshard_after_forward": False}),
    "fsdp_auto_wrap_policy": ("NO_WRAP", {"auto_wrap_policy": "no_wrap"}),
    "fsdp_transformer_layer_cls_to_wrap": ("A,B", {"transformer_cls_names_to_wrap": ["A", "B"]}),
    "fsdp_min_num_params": ("300", {"min_num_params": 300}),
    "fsdp_offload_params": ("true", {"cpu_offload": True}),
    "fsdp_activation_checkpointing": ("true", {"activation_checkpointing": True}),
    "fsdp_activation_checkpointing_offload": (
        "true",
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    ),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", {"state_dict_type": "FULL_STATE_DICT"}),
    "fsdp_forward_prefetch": ("true", {"forward_prefetch": True}),
    "fsdp_backward_prefetch": ("NO_PREFETCH", {"backward_prefetch": "NO_PREFETCH"}),
    "fsdp_use_orig_params": ("true", {"use_orig_params": True}),
    "fsdp_cpu_ram_efficient_loading": ("true", {"cpu_ram_efficient_loading": True}),
    "fsdp_sync_module_states": ("true", {"sync_module_states": True}),
    "fsdp_ignored_modules": ("head", {"ignored_modules": "head"}),
    "parallelism_config_dp_replicate_size": ("2", {"dp_replicate_size": 2}),
    "parallelism_config_dp_shard_size": ("2", {"dp_shard_size": 2}),
    "parallelism_config_tp_size": ("2", {"tp_size": 2}),
    "parallelism_config_pp_size": ("2", {"pp_size": 2}),
    "parallelism_config_pp_schedule": ("gpipe", {"pp_schedule": "gpipe"}),
    "parallelism_config_pp_microbatches": ("8", {"pp_microbatches": 8}),
    "parallelism_config_pp_stages_per_rank": ("1", {"pp_stages_per_rank": 1}),
    "parallelism_config_cp_size": ("1", {"cp_size": 1}),
    "parallelism_config_sp_size": ("1", {"sp_size": 1}),
    "parallelism_config_cp_backend": ("torch", {"cp_backend": "torch"}),
    "parallelism_config_cp_comm_strategy": ("allgather", {}),
    "parallelism_config_sp_backend": ("deepspeed", {"sp_backend": "deepspeed"}),
    "parallelism_config_sp_seq_length": ("128", {}),
    "parallelism_config_sp_seq_length_is_variable": ("false", {}),
    "parallelism_config_sp_attn_implementation": ("sdpa", {}),
    "deepspeed_config_file": ("ds.json", {"hf_ds_config": "ds.json"}),
    "zero_stage": ("1", {"zero_stage": 1}),
    "offload_optimizer_device": ("cpu", {"offload_optimizer_device": "cpu"}),
    "offload_param_device": ("cpu", {"offload_param_device": "cpu"}),
    "offload_optimizer_nvme_path": ("/a", {"offload_optimizer_nvme_path": "/a"}),
    "offload_param_nvme_path": ("/b", {"offload_param_nvme_path": "/b"}),
    "gradient_accumulation_steps": ("4", {"gradient_accumulation_steps": 4}),
    "gradient_clipping": ("0.5", {"gradient_clipping": 0.5}),
    "zero3_init_flag": ("false", {"zero3_init_flag": False}),
    "zero3_save_16bit_model": ("true", {"zero3_save_16bit_model": True}),
    "deepspeed_moe_layer_cls_names": ("A,B", {"transformer_moe_cls_names": "A,B"}),
    "megatron_lm_recompute_granularity": ("selective", {"recompute_granularity": "selective"}),
    "megatron_lm_recompute_method": ("block", {"recompute_method": "block"}),
    **{
        f"megatron_lm_{name}": (value, {name: yaml.safe_load(value)})
        for name, value in [
            *(("tp_degree", "2"), ("pp_degree", "2"), ("num_micro_batches", "4")),
            *(("gradient_clipping", "0.5"), ("recompute_activations", "true")),
            *(("recompute_num_layers", "2"), ("decoder_last_pipeline_num_layers", "2")),
            *(("attention_dropout", "0.5"), ("hidden_dropout", "0.5")),
            *(("attention_softmax_in_fp32", "true"), ("sequence_parallelism", "false")),
            *(("use_rotary_position_embeddings", "true"), ("use_custom_fsdp", "true")),
            *(("use_distributed_optimizer", "true"), ("no_load_optim", "true")),
            *(("no_save_optim", "true"), ("eod_mask_loss", "true")),
            *(("optimizer_cpu_offload", "true"), ("overlap_cpu_optimizer_d2h_h2d", "true")),
            *(("use_precision_aware_optimizer", "true"), ("attention_backend", "true")),
            *(("calculate_per_token_loss", "true"), ("context_parallel_size", "2")),
            *(("expert_model_parallel_size", "2"), ("expert_tensor_parallel_size", "2")),
        ]
    },
}
KINDS: dict[str, tuple[str, str, Any]] = {
    "use_fsdp": ("fsdp_config", "FSDP", FullyShardedDataParallelPlugin),
    "use_parallelism_config": ("parallelism_config", "MULTI_CPU", ParallelismConfig),
    "use_deepspeed": ("deepspeed_config", "DEEPSPEED", DeepSpeedPlugin),
    "use_megatron_lm": ("megatron_lm_config", "MEGATRON_LM", MegatronLMPlugin),
}
OF_DEEPSPEED = [*DEEPSPEED, "gradient_accumulation_steps"]
CASES = [(name, "use_fsdp") for name in FSDP]
CASES += [(name, "use_parallelism_config") for name in MESH]
CASES += [(name, "use_deepspeed") for name in OF_DEEPSPEED]
CASES += [(name, "use_megatron_lm") for name in MEGATRON]


class Nothing(TrainModule):
    pass


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return tmp_path / "hf" / "accelerate" / "default_config.yaml"


def launched(capsys: Any, *words: str, cpu: bool = True) -> dict[str, str]:
    """Return the variables that `trainer launch` would set."""
    words = ("--cpu", *words) if cpu else words
    assert main(["launch", "--dry_run", *words, "train.py"]) == 0, capsys.readouterr().err
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    return {name: value for name, value in lines if name.isupper()}


def shown(made: Any) -> dict[str, Any]:
    """Return the values of a plugin or a mesh, without what cannot be compared."""
    return {name: value for name, value in vars(made).items() if name != "hf_ds_config"}


@pytest.mark.parametrize("by", ["option", "file"])
@pytest.mark.parametrize(("name", "asks"), CASES)
def test_each_option_and_each_key_equals_its_argument(capsys, name, asks, by):
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    text, arguments = EQUALS[name]
    values = {name: text}
    if asks == "use_deepspeed" and name not in ("zero_stage", "deepspeed_config_file"):
        values["zero_stage"] = "3"
        arguments = {**arguments, "zero_stage": 3}
    if name == "fsdp_activation_checkpointing_offload":
        values["fsdp_activation_checkpointing"] = "true"
    section, kind, made = KINDS[asks]
    cpu = asks != "use_megatron_lm"  # which is refused there
    if by == "option":
        options = [f"--{n}={value}" for n, value in values.items()]
        found = launched(capsys, f"--{asks}", *options, cpu=cpu)
    else:
        settings = {n: yaml.safe_load(value) for n, value in values.items()}
        Path("own.yaml").write_text(yaml.safe_dump({"distributed_type": kind, section: settings}))
        found = launched(capsys, "--config_file", "own.yaml", cpu=cpu)
    assert found.pop(f"ACCELERATE_{asks.upper()}") == "true"
    assert found.keys() <= set(env.VARIABLES)
    with patch_environment(**found):
        assert made.requested(None) is None
        assert shown(made()) == shown(made(**arguments))


def test_what_asks_for_sharding_is_heard_by_the_processes(capsys):
    with patch_environment(**launched(capsys, "--use_fsdp", "--use_parallelism_config")):
        assert FullyShardedDataParallelPlugin.requested(None) == FullyShardedDataParallelPlugin()
        assert ParallelismConfig.requested(None) == ParallelismConfig()
    with patch_environment(**launched(capsys, "--use_deepspeed")):
        assert shown(DeepSpeedPlugin.requested(None)[""]) == shown(DeepSpeedPlugin())
    with patch_environment(**launched(capsys, "--use_megatron_lm", cpu=False)):
        assert MegatronLMPlugin.requested(None) == MegatronLMPlugin()
    names = "".join(launched(capsys))
    assert not any(part in names for part in ("FSDP", "PARALLEL", "DEEPSPEED", "MEGATRON"))


# As accelerate writes them.
OF_ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
 deepspeed_multinode_launcher: standard
 gradient_accumulation_steps: 2
 gradient_clipping: 1.0
 offload_optimizer_device: none
 offload_param_device: none
 zero3_init_flag: true
 zero_stage: 2
distributed_type: DEEPSPEED
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


def test_a_file_of_accelerate_partitions_by_deepspeed(capsys):
    Path("own.yaml").write_text(OF_ACCELERATE)
    with patch_environment(**launched(capsys, "--config_file", "own.yaml")):
        made = DeepSpeedPlugin.requested(None)[""]
    same = {"offload_optimizer_device": "none", "offload_param_device": "none"}
    steps = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    assert shown(made) == shown(DeepSpeedPlugin(zero_stage=2, **same, **steps))
    sharded = launched(capsys, "--config_file", "own.yaml", "--use_fsdp")
    assert sharded["ACCELERATE_USE_FSDP"] == "true"
    assert "ACCELERATE_USE_DEEPSPEED" not in sharded


def test_options_win_over_the_keys_of_the_file(capsys):
    Path("own.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    words = ("--config_file", "own.yaml", "--fsdp-offload-params", "no")
    found = launched(capsys, *words)
    assert (found["FSDP_VERSION"], found["FSDP_OFFLOAD_PARAMS"]) == ("2", "false")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fsdp_version 2", "--fsdp_version needs --use_fsdp"),
        (
            "--parallelism_config_tp_size 2",
            "--parallelism_config_tp_size needs --use_parallelism_config",
        ),
        ("--megatron_lm_tp_degree 2", "--megatron_lm_tp_degree needs --use_megatron_lm"),
        (
            "--use_fsdp --use_megatron_lm",
            "--use_megatron_lm (megatron_lm_config) cannot be combined with --use_fsdp",
        ),
        ("--use_megatron_lm", "trains on CUDA devices: leave out --cpu (use_cpu)"),
        ("--use_fsdp --fsdp_offload_params maybe", "'maybe' must be yes or no"),
        ("--use_fsdp --fsdp_version 3", "invalid choice: 3"),
        (
            "--num_processes 4 --use_parallelism_config --parallelism_config_tp_size 2",
            "multiply to 2 (parallelism_config_tp_size 2); the number of processes is 4",
        ),
        ("--zero_stage 3", "--zero_stage needs --use_deepspeed"),
        ("--use_deepspeed --zero_stage 4", "invalid choice: 4"),
        ("--use_deepspeed --use_fsdp", "cannot be combined with --use_fsdp (fsdp_config)"),
        (
            "--use_deepspeed --deepspeed_config_file ds.json --zero_stage 3",
            "zero_stage cannot be combined with deepspeed_config_file",
        ),
        (
            "--use_deepspeed --deepspeed_multinode_launcher pdsh",
            "deepspeed_multinode_launcher is 'pdsh', for DeepSpeed's launcher",
        ),
        ("--use_deepspeed --deepspeed_hostfile hosts", "run trainer launch on each machine"),
    ],
)
def test_options_that_would_do_nothing_are_refused(capsys, words, said):
    assert main(["launch", "--dry_run", "--cpu", *words.split(), "train.py"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ofload_params: 1}", "'fsdp_offload_params'"),
        ("megatron_lm_config: {megatron_lm_tp_degree: 2}", "write MEGATRON_LM, or remove"),
        ("parallelism_config: {tp_size: 2}", "a key of parallelism_config is 'tp_size'"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {stage: 1}", "'zero_stage'"),
        ("deepspeed_config: {zero_stage: 1}", "deepspeed_config has settings, but distributed"),
    ],
)
def test_unknown_keys_are_refused(text, said):
    Path("own.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        LaunchConfiguration(**read_file(Path("own.yaml"))[0])


def test_a_file_is_written_as_the_documented_api_reads_it(home):
    settings = {"fsdp_version": 2, "fsdp_offload_params": True}
    sizes = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}
    known = LaunchConfiguration(
        num_processes=4, use_cpu=True, fsdp_config=settings, parallelism_config=sizes
    )
    write_file(home, known)
    found = yaml.safe_load(home.read_text())
    assert found["distributed_type"] == "FSDP"
    assert (found["fsdp_config"], found["parallelism_config"]) == (settings, sizes)
    again = LaunchConfiguration(**read_file(home)[0])
    assert (again.fsdp_config, again.parallelism_config) == (settings, sizes)


def test_a_file_with_deepspeed_is_written_as_the_documented_api_reads_it(home):
    settings = {"zero_stage": 3, "offload_optimizer_device": "cpu"}
    known = LaunchConfiguration(deepspeed_config=settings, gradient_accumulation_steps=4)
    write_file(home, known)
    found = yaml.safe_load(home.read_text())
    assert found["distributed_type"] == "DEEPSPEED"
    assert found["deepspeed_config"] == {**settings, "gradient_accumulation_steps": 4}
    assert LaunchConfiguration(**read_file(home)[0]).variables.items() >= known.variables.items()


def answer(monkeypatch: Any, keys: bytes) -> None:
    """Answer the questions of `trainer config`, on a machine without accelerators."""
    monkeypatch.setattr("trainer.launch.configuration.accelerators", lambda: 0)
    master, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(master, "wb") as keyboard:
        monkeypatch.setattr("sys.stdin", stdin)
        keyboard.write(keys)
        keyboard.flush()
        assert main(["config"]) == 0


def test_questions_lead_to_deepspeed(monkeypatch, home):
    write_file(home, LaunchConfiguration(num_processes=2, use_cpu=True))
    answer(monkeypatch, b"\n\n\n\nyes\n\n3\nyes\n\nno\n\n\n\n")
    assert LaunchConfiguration(**read_file(home)[0]).deepspeed_config == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": False,
    }
    answer(monkeypatch, b"\n\n\n\n\nds.json\n\n\n")
    chosen = {"zero3_init_flag": False, "deepspeed_config_file": "ds.json"}
    assert LaunchConfiguration(**read_file(home)[0]).deepspeed_config == chosen


def test_questions_lead_to_shards_and_split_layers(monkeypatch, home):
    write_file(home, LaunchConfiguration(num_processes=4, use_cpu=True))
    answer(monkeypatch, b"\n\n\nyes\n\nyes\n\nBlock\n2\n\n\n")
    found = LaunchConfiguration(**read_file(home)[0])
    assert found.fsdp_config == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": False,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
    }
    assert found.parallelism_config == {
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    }


def test_questions_keep_the_strategy_of_fsdp_1(monkeypatch, home):
    settings = {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}
    write_file(home, LaunchConfiguration(num_processes=2, use_cpu=True, fsdp_config=settings))
    answer(monkeypatch, b"\n\n\n\n\n\n\n\n\n\n\n")
    found = LaunchConfiguration(**read_file(home)[0]).fsdp_config
    assert found["fsdp_reshard_after_forward"] == "SHARD_GRAD_OP"
    answer(monkeypatch, b"\n\n\n\nyes\n\n\n\n\n\n\n")
    found = LaunchConfiguration(**read_file(home)[0]).fsdp_config
    assert found["fsdp_reshard_after_forward"] is True


def test_questions_lead_to_megatron(monkeypatch, home):
    write_file(home, LaunchConfiguration(num_processes=4, use_cpu=False))
    monkeypatch.setattr("trainer.launch.configuration.accelerators", lambda: 4)
    master, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(master, "wb") as keyboard:
        monkeypatch.setattr("sys.stdin", stdin)
        # machines, CPU, processes, devices, precision; then the engines; then compilation, debug
        keyboard.write(b"\n\n\n\n\nno\nno\nyes\n2\n2\n4\n\n\n")
        keyboard.flush()
        assert main(["config"]) == 0
    text = yaml.safe_load(home.read_text())
    assert text["distributed_type"] == "MEGATRON_LM"
    assert LaunchConfiguration(**read_file(home)[0]).megatron_lm_config == {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_num_micro_batches": 4,
    }


def test_a_configuration_of_trainer_fit_equals_the_arguments():
    from jsonargparse import ArgumentParser, Namespace

    from trainer.cli.fit.configured import ConfiguredLine, _add_trainer

    Path("own.yaml").write_text(
        "trainer: {cpu: true, max_epochs: 1, fsdp_plugin: {cpu_offload: true},\n"
        "  torch_tp_plugin: {tp_size: 2}, parallelism_config: {dp_replicate_size: 2},\n"
        "  deepspeed_plugin: {zero_stage: 3, gradient_clipping: 0.5}}\n"
        "model: {class_path: tests.trainer.cli.test_sharding.Nothing}\n"
    )
    config = ConfiguredLine("trainer fit", "fit").parse(["own.yaml"])
    parser = _add_trainer(ArgumentParser())
    made = parser.instantiate(Namespace(trainer=config.trainer), instantiate_groups=False).trainer
    assert made.fsdp_plugin == FullyShardedDataParallelPlugin(cpu_offload=True)
    assert made.torch_tp_plugin == TorchTensorParallelPlugin(tp_size=2)
    assert made.parallelism_config == ParallelismConfig(dp_replicate_size=2)
    same = DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5)
    assert shown(made.deepspeed_plugin) == shown(same)
