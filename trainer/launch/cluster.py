"""The configuration file as an object with the documented keys, for programs that create one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from trainer.checks import explains_itself
from trainer.launch.configuration import (
    LaunchConfiguration,
    default_path,
    parse_settings,
    read_mapping,
    write_file,
)


@explains_itself
@dataclass(kw_only=True)
class ClusterConfig:
    """The keys of the file of `trainer config`, under accelerate's names.

    `LaunchConfiguration` describes the keys that have an effect. Keys about TPU clusters, MPI and
    ``same_network`` have none, and are not written.

    Attributes:
        distributed_type: ``"NO"``, ``"MULTI_CPU"``, ``"MULTI_GPU"``, ``"MULTI_XPU"``, ``"XLA"``,
            ``"FSDP"``, ``"DEEPSPEED"`` or ``"MEGATRON_LM"``.
        num_processes: The total number on all machines; -1 leaves it to the command line.

    Raises:
        ValueError: A value is outside its choices, values contradict each other, or SageMaker is
            requested.
        TypeError: A value has the wrong type.
    """

    compute_environment: str = "LOCAL_MACHINE"
    distributed_type: str = "NO"
    mixed_precision: str | None = None
    use_cpu: bool = False
    debug: bool = False
    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check all values together."""
        self.launch_configuration()

    def launch_configuration(self) -> LaunchConfiguration:
        """Return the configuration as `trainer launch` reads it."""
        arguments, _ = parse_settings(self.to_dict())
        return LaunchConfiguration(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that are set, with enumerations as their values."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: getattr(value, "value", value)
            for name, value in named.items()
            if value is not None
        }

    @classmethod
    def from_yaml_file(cls, yaml_file: str | PathLike[str] | None = None) -> ClusterConfig:
        """Read a file; None reads the file that `trainer launch` reads.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is invalid; see also the class.
        """
        settings = read_mapping(default_path() if yaml_file is None else Path(yaml_file))
        if settings.pop("fp16", False):  # earlier name of the key
            settings.setdefault("mixed_precision", "fp16")
        if backend := settings.pop("dynamo_backend", None):
            settings.setdefault("dynamo_config", {"dynamo_backend": backend})
        return cls(**settings)

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str] | None = None) -> ClusterConfig:
        """Read a file; JSON is YAML too, see `from_yaml_file`."""
        return cls.from_yaml_file(json_file)

    def to_yaml_file(self, yaml_file: str | PathLike[str]) -> None:
        """Write a file, as JSON if its name ends in ``.json``.

        Raises:
            OSError: The file cannot be written.
        """
        write_file(Path(yaml_file), self.launch_configuration())

    def to_json_file(self, json_file: str | PathLike[str]) -> None:
        """Write a file; see `to_yaml_file`."""
        self.to_yaml_file(json_file)


def load_config_from_file(config_file: str | PathLike[str] | None) -> ClusterConfig:
    """Read a file, None for the file that `trainer launch` reads; see `ClusterConfig`."""
    return ClusterConfig.from_yaml_file(config_file)
