"""The command `trainer config` and its file."""

from __future__ import annotations

import json
import os
import pty
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trainer.cli import main
from trainer.launch.cluster import ClusterConfig, load_config_from_file
from trainer.launch.configuration import LaunchConfiguration, default_path, read_file, write_file

# What `accelerate config` and `accelerate config default` write.
ANSWERED = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: reduce-overhead
  dynamo_use_dynamic: true
  dynamo_use_fullgraph: false
  dynamo_use_regional_compilation: false
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 1
main_process_ip: node0
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
DEFAULT = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": False,
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": False,
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "accelerate" / "default_config.yaml"


@pytest.fixture
def answer(monkeypatch):
    """Give `trainer config` these answers, on a machine without devices; the code it ends with."""

    def answered(keys: bytes) -> int:
        monkeypatch.setattr("trainer.launch.configuration.accelerators", lambda: 0)
        master, terminal = pty.openpty()
        with os.fdopen(terminal) as stdin, os.fdopen(master, "wb") as keyboard:
            monkeypatch.setattr("sys.stdin", stdin)
            keyboard.write(keys)
            keyboard.flush()
            return main(["config"])

    return answered


def read(text: str) -> tuple[LaunchConfiguration, list[str]]:
    Path("own.yaml").write_text(text)
    given, notes = read_file(Path("own.yaml"))
    return LaunchConfiguration(**given), notes


def test_the_place_is_that_of_the_documented_api(monkeypatch, home):
    assert default_path() == home
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_path() == Path("/cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    expected = "/somebody/.cache/huggingface/accelerate/default_config.yaml"
    assert default_path() == Path(expected)


def test_a_file_of_the_documented_api_is_understood():
    found, notes = read(ANSWERED)
    assert notes == []
    assert found == LaunchConfiguration(
        num_processes=4,
        num_machines=2,
        machine_rank=1,
        main_process_ip="node0",
        main_process_port=29501,
        use_cpu=False,
        gpu_ids="0,1",
        mixed_precision="bf16",
        dynamo_backend="INDUCTOR",
        dynamo_mode="reduce-overhead",
        dynamo_use_dynamic=True,
        dynamo_use_fullgraph=False,
        dynamo_use_regional_compilation=False,
        enable_cpu_affinity=False,
        debug=True,
        rdzv_backend="static",
    )


def test_its_default_file_is_json_under_a_yaml_name():
    found, notes = read(json.dumps(DEFAULT))
    assert (found.num_processes, found.use_cpu, notes) == (1, True, [])


def test_old_and_bare_spellings_are_understood():
    found, _ = read("fp16: true\ngpu_ids: 0\nnum_processes: -1\ndynamo_backend: 'NO'\n")
    assert (found.mixed_precision, found.gpu_ids, found.num_processes) == ("fp16", "0", None)
    found, _ = read("mixed_precision: no\ndistributed_type: MULTI_CPU\n")  # False, for YAML
    assert (found.mixed_precision, found.use_cpu) == ("no", True)
    assert read("")[0] == LaunchConfiguration()
    for key in ("dynamo_backend: NO", "dynamo_config: {dynamo_backend: no}"):
        assert read(key)[0].variables == {"ACCELERATE_DYNAMO_BACKEND": "no"}


def test_keys_without_effect_are_noted():
    _, notes = read("tpu_name: mine\nmpirun_config: {mpirun_ccl: '1'}")
    assert [note.partition(" ")[0] for note in notes] == ["tpu_name", "mpirun_config"]


def test_settings_of_later_releases_are_variables():
    text = "enable_cpu_affinity: true\ndynamo_config: {dynamo_use_regional_compilation: true}"
    assert read(text)[0].variables == {
        "ACCELERATE_CPU_AFFINITY": "true",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    }


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_a_file_may_ask_for_a_tpu(monkeypatch, kind):
    found, notes = read(f"distributed_type: {kind}\nnum_processes: 8\ntpu_use_cluster: true\n")
    assert found == LaunchConfiguration(num_processes=8, tpu=True)
    assert notes == ["tpu_use_cluster is not used: start the command on each machine of a TPU."]
    assert found.variables == {"PJRT_DEVICE": "TPU"}
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert found.variables == {"PJRT_DEVICE": "CPU"}  # to try it
    write_file(Path("written.yaml"), found)
    assert yaml.safe_load(Path("written.yaml").read_text())["distributed_type"] == "XLA"
    assert read(Path("written.yaml").read_text())[0].tpu


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_procesess: 2", "a key is 'num_procesess'.*Did you mean 'num_processes'"),
        ("dynamo_config: {backend: no}", "a key of dynamo_config is 'backend'"),
        ("distributed_type: MULTI_NPU", "not supported yet.*may be NO, MULTI_CPU"),
        ("distributed_type: MULTI_CPUS", "Did you mean 'MULTI_CPU'"),
        (
            "fsdp_config: {fsdp_version: 2}",
            "fsdp_config has settings, but distributed_type is .NO.",
        ),
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ("- 1", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("distributed_type: [NO]", "Did you mean|it must be one of"),
    ],
)
def test_invalid_files_are_refused_by_name(text, said):
    with pytest.raises(ValueError, match=f"(?s)own.yaml.*{said}"):
        read(text)


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"num_processes": 0}, ValueError, "at least 1"),
        ({"num_processes": "2"}, TypeError, "whole number"),
        ({"num_processes": 3, "num_machines": 2}, ValueError, "multiple of num_machines"),
        ({"machine_rank": 1}, ValueError, "from 0 to 0"),
        ({"main_process_port": 0, "num_machines": 2}, ValueError, "need the same port"),
        ({"mixed_precision": "bf1"}, ValueError, "Did you mean 'bf16'"),
        ({"dynamo_backend": "indctor"}, ValueError, "Did you mean 'INDUCTOR'"),
        ({"rdzv_backend": "etcd"}, ValueError, "'c10d', 'static'"),
        ({"gpu_ids": "0,,1"}, ValueError, "like '0,1'"),
        ({"use_cpu": "yes"}, TypeError, "True or False"),
        ({"monitor_interval": 0}, ValueError, "above 0"),
        ({"monitor_interval": "1"}, TypeError, "a number"),
    ],
)
def test_a_configuration_checks_itself(wrong, kind, said):
    with pytest.raises(kind, match=said):
        LaunchConfiguration(**wrong)


@pytest.mark.parametrize("name", ["a/own.yaml", "own.json"])
def test_what_is_written_is_read_again(name):
    configuration = LaunchConfiguration(
        num_processes=4,
        num_machines=2,
        main_process_ip="node0",
        main_process_port=1234,
        use_cpu=True,
        mixed_precision="bf16",
        dynamo_backend="inductor",
        dynamo_use_dynamic=False,
        debug=True,
        rdzv_backend="c10d",
        max_restarts=3,
        num_cpu_threads_per_process=2,
    )
    write_file(Path(name), configuration)
    given, notes = read_file(Path(name))
    assert notes == []
    assert LaunchConfiguration(**given) == configuration
    assert name.endswith("yaml") or json.loads(Path(name).read_text())


def test_the_default_is_written_with_keys_that_the_documented_api_knows(monkeypatch, home, capsys):
    monkeypatch.setattr("trainer.launch.configuration.accelerators", lambda: 0)
    assert main(["config", "--default"]) == 0
    assert capsys.readouterr().out == f"Saved to {home}.\n"
    assert main(["config", "--default"]) == 0
    assert capsys.readouterr().out == f"Saved to {home}, replacing the earlier answers.\n"
    found = yaml.safe_load(home.read_text())
    assert {key: DEFAULT[key] for key in found} == found
    monkeypatch.setattr("trainer.launch.configuration.accelerators", lambda: 4)
    assert main(["config", "default", "--config_file", "g.yaml", "--mixed_precision=bf16"]) == 0
    found = yaml.safe_load(Path("g.yaml").read_text())
    assert found["distributed_type"] == "MULTI_GPU"
    assert (found["num_processes"], found["use_cpu"]) == (4, False)
    assert found["mixed_precision"] == "bf16"


def test_update_writes_todays_keys_and_loses_none_of_ours(capsys):
    Path("own.yaml").write_text("fp16: true\nmax_restarts: 2\ndowncast_bf16: true\n")
    assert main(["config", "update", "--config-file", "own.yaml"]) == 0
    assert "downcast_bf16 is not used" in capsys.readouterr().err
    found = yaml.safe_load(Path("own.yaml").read_text())
    assert (found["mixed_precision"], found["max_restarts"]) == ("fp16", 2)
    assert "fp16" not in found


SECTIONS = [
    ("FSDP", {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}),
    ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4}}),
    ("MEGATRON_LM", {"megatron_lm_config": {"megatron_lm_tp_degree": 2}}),
    ("MULTI_GPU", {"parallelism_config": {"parallelism_config_tp_size": 2}}),
    ("NO", {"mixed_precision": "fp8", "fp8_config": {"fp8_backend": "AO"}}),
    ("NO", {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": True}}),
]


@pytest.mark.parametrize(("kind", "sections"), SECTIONS)
def test_each_section_is_kept_by_an_update_and_by_an_object(kind, sections):
    processes = 1 if kind == "NO" else 2
    given = {"distributed_type": kind, "num_processes": processes, **sections}
    Path("own.yaml").write_text(yaml.safe_dump(given))
    before, _ = read_file(Path("own.yaml"))
    made = load_config_from_file("own.yaml")
    assert made == ClusterConfig(**given)
    expected = LaunchConfiguration(**before).variables
    assert made.launch_configuration().variables.items() >= expected.items()
    assert main(["config", "update", "--config-file", "own.yaml"]) == 0
    found = yaml.safe_load(Path("own.yaml").read_text())
    assert {key: found[key] for key in given} == given
    made.to_json_file("made.json")
    again = ClusterConfig.from_json_file("made.json").launch_configuration()
    assert again == replace(made.launch_configuration(), mixed_precision=again.mixed_precision)
    assert {key: json.loads(Path("made.json").read_text())[key] for key in given} == given


def test_an_object_checks_its_keys():
    with pytest.raises(ValueError, match="SageMaker"):
        ClusterConfig(compute_environment="AMAZON_SAGEMAKER")
    with pytest.raises(ValueError, match="num_processes is 3"):
        ClusterConfig(num_processes=3, num_machines=2)
    with pytest.raises(TypeError, match="num_proceses"):
        ClusterConfig(num_proceses=3)
    Path("old.yaml").write_text("fp16: true\ndynamo_backend: INDUCTOR\n")
    found = load_config_from_file("old.yaml")
    assert (found.mixed_precision, found.dynamo_config) == (
        "fp16",
        {"dynamo_backend": "INDUCTOR"},
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["update"], 1, "there is no configuration file"),
        (["update", "--config_file", "folder.yaml"], 1, "folder.yaml cannot be read"),
        (["--default", "--config_file", "folder.yaml"], 1, "folder.yaml cannot be written"),
        (["--default", "--config_file", "four.toml"], 2, "must end in .yaml or .yml or .json"),
        (["--default", "--mixed_precison=bf16"], 2, "Did you mean --mixed_precision?"),
        (["--mixed_precision", "bf16"], 2, "needs --default"),
        ([], 2, "no terminal to ask questions on"),
        (["update", "--default"], 2, "without questions; it changes no settings"),
        (["update", "--config_file", "bad.yaml"], 1, "of at least 1"),
    ],
)
def test_wrong_usage_is_refused(capsys, monkeypatch, words, code, said):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115  # closed below
    Path("bad.yaml").write_text("num_processes: 0")
    Path("folder.yaml").mkdir()
    try:
        found = main(["config", *words])
    finally:
        sys.stdin.close()
    assert found == code
    assert said in capsys.readouterr().err


def test_the_library_of_fp8_is_asked_for(home, answer):
    assert answer(b"\n1\nfp8\nTE\n\n\n") == 0
    found = LaunchConfiguration(**read_file(home)[0])
    assert found.mixed_precision == "fp8"
    assert found.fp8_config == {"fp8_backend": "TE"}


def test_questions_are_asked_with_what_is_known_as_the_answer(home, answer, capsys):
    """Two machines, three wrong answers, and the rest as it is known."""
    write_file(home, LaunchConfiguration(num_processes=2, use_cpu=True, mixed_precision="bf16"))
    assert answer(b"two\n2\n1\nnode0\n\nc10d\n4\nfp32\n\n\n\n\nindctor\ninductor\nyes\n") == 0
    shown = capsys.readouterr().out
    assert "machines [1]: " in shown
    assert "'two' must be a number of 1 or more" in shown
    assert "precision (no, fp8, fp16, bf16) [bf16]: " in shown
    assert "Did you mean 'INDUCTOR'?" in shown
    given, _ = read_file(home)
    assert LaunchConfiguration(**given) == LaunchConfiguration(
        num_machines=2,
        machine_rank=1,
        main_process_ip="node0",
        main_process_port=29500,
        rdzv_backend="c10d",
        use_cpu=True,
        num_processes=4,
        mixed_precision="bf16",
        dynamo_backend="inductor",
        debug=True,
    )


def test_what_is_not_asked_stays_unless_it_is_of_several_machines(home, answer):
    known = LaunchConfiguration(
        num_processes=2,
        use_cpu=True,
        max_restarts=3,
        dynamo_mode="max-autotune",
        mixed_precision="no",
        dynamo_backend="no",
        debug=False,
    )
    meeting = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "a", "rdzv_backend": "c10d"}
    write_file(home, replace(known, **meeting, main_process_port=1))
    assert answer(b"1\n\n\n\n\n\n\n\n") == 0
    given, _ = read_file(home)
    assert LaunchConfiguration(**given) == replace(known, rdzv_backend="static")


def test_the_end_of_the_answers_writes_nothing(home, answer, capsys):
    assert answer(b"1\n\x04") == 1
    assert capsys.readouterr().err.endswith(
        "the input ended before all questions were answered; no answer is saved.\n"
    )
    assert not home.exists()
