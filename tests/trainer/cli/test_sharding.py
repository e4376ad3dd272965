"""FSDP and device meshes by options, files and questions: each equals its argument."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    TrainModule,
)
from trainer.cli import main
from trainer.cli.config.file import LaunchConfiguration, read_file, write_file
from trainer.cli.config.sharding import FSDP, MESH
from trainer.environment import patch_environment

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
    "parallelism_config_cp_size": ("1", {"cp_size": 1}),
    "parallelism_config_sp_size": ("1", {"sp_size": 1}),
    "parallelism_config_cp_backend": ("torch", {"cp_backend": "torch"}),
    "parallelism_config_cp_comm_strategy": ("allgather", {}),
}


class Nothing(TrainModule):
    pass


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return tmp_path / "hf" / "accelerate" / "default_config.yaml"


def launched(capsys: Any, *words: str) -> dict[str, str]:
    """Return the variables that `trainer launch` would set."""
    assert main(["launch", "--dry_run", "--cpu", *words, "train.py"]) == 0, capsys.readouterr().err
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    return {name: value for name, value in lines if name.isupper()}


@pytest.mark.parametrize("by", ["option", "file"])
@pytest.mark.parametrize("name", [*FSDP, *MESH])
def test_each_option_and_each_key_equals_its_argument(capsys, name, by):
    text, arguments = EQUALS[name]
    of_fsdp = name in FSDP
    asks = "use_fsdp" if of_fsdp else "use_parallelism_config"
    if by == "option":
        found = launched(capsys, f"--{asks}", f"--{name}", text)
    else:
        section = "fsdp_config" if of_fsdp else "parallelism_config"
        kind = "FSDP" if of_fsdp else "MULTI_CPU"
        settings = {"distributed_type": kind, section: {name: yaml.safe_load(text)}}
        Path("own.yaml").write_text(yaml.safe_dump(settings))
        found = launched(capsys, "--config_file", "own.yaml")
    assert found.pop(f"ACCELERATE_{asks.upper()}") == "true"
    made = FullyShardedDataParallelPlugin if of_fsdp else ParallelismConfig
    with patch_environment(**found):
        assert made.requested(None) is None
        assert made() == made(**arguments)


def test_what_asks_for_sharding_is_heard_by_the_processes(capsys):
    with patch_environment(**launched(capsys, "--use_fsdp", "--use_parallelism_config")):
        assert FullyShardedDataParallelPlugin.requested(None) == FullyShardedDataParallelPlugin()
        assert ParallelismConfig.requested(None) == ParallelismConfig()
    assert not any("FSDP" in name or "PARALLEL" in name for name in launched(capsys))


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
        ("--fsdp_version 2", "--fsdp_version belongs to --use_fsdp, which is not given"),
        (
            "--parallelism_config_tp_size 2",
            "--parallelism_config_tp_size belongs to --use_parallelism_config",
        ),
        ("--use_fsdp --fsdp_offload_params maybe", "'maybe' must be yes or no"),
        ("--use_fsdp --fsdp_version 3", "invalid choice: 3"),
        (
            "--num_processes 4 --use_parallelism_config --parallelism_config_tp_size 2",
            "multiply to 2 (parallelism_config_tp_size 2); the number of processes is 4",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(capsys, words, said):
    assert main(["launch", "--dry_run", "--cpu", *words.split(), "train.py"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ofload_params: 1}", "'fsdp_offload_params'"),
        ("parallelism_config: {tp_size: 2}", "a key of parallelism_config is 'tp_size'"),
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


def test_questions_lead_to_shards_and_split_layers(monkeypatch, home):
    write_file(home, LaunchConfiguration(num_processes=4, use_cpu=True))
    monkeypatch.setattr("trainer.cli.config.device_count", lambda: 0)
    master, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(master, "wb") as keyboard:
        monkeypatch.setattr("sys.stdin", stdin)
        keyboard.write(b"\n\n\nyes\n\nyes\n\nBlock\n2\n\n\n")
        keyboard.flush()
        assert main(["config"]) == 0
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


def test_a_configuration_of_trainer_fit_equals_the_arguments():
    from jsonargparse import ArgumentParser, Namespace

    from trainer.cli.fit.configured import ConfiguredLine, _add_trainer

    Path("own.yaml").write_text(
        "trainer: {cpu: true, max_epochs: 1, fsdp_plugin: {cpu_offload: true},\n"
        "  torch_tp_plugin: {tp_size: 2}, parallelism_config: {dp_replicate_size: 2}}\n"
        "model: {class_path: tests.trainer.cli.test_sharding.Nothing}\n"
    )
    config = ConfiguredLine("trainer fit", "fit").parse(["own.yaml"])
    parser = _add_trainer(ArgumentParser())
    made = parser.instantiate(Namespace(trainer=config.trainer), instantiate_groups=False).trainer
    assert made.fsdp_plugin == FullyShardedDataParallelPlugin(cpu_offload=True)
    assert made.torch_tp_plugin == TorchTensorParallelPlugin(tp_size=2)
    assert made.parallelism_config == ParallelismConfig(dp_replicate_size=2)
