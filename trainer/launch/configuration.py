"""The configuration of `trainer launch`, and the file that stores it.

The file has the path and the keys of the documented API: accelerate and Cadence can read each
other's files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from trainer import environment
from trainer.checks import check_bools, check_choice, check_counts, check_numbers, choice_error
from trainer.enums import DynamoBackend, PrecisionType
from trainer.errors import echo
from trainer.launch import LaunchError, sigint_default
from trainer.launch.settings import (
    DYNAMO,
    SECTIONS,
    check_settings,
    fp8_settings,
    fp8_variables,
    settings_of_deepspeed,
    variables_of,
)
from trainer.strict_json import dumps

_SUPPORTED = (
    "This release trains on one device, data parallel on several CPU processes, CUDA, XPU or XLA "
    "devices, or divided over them by FSDP, DeepSpeed or Megatron-LM"
)
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "XLA", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_REFUSED_TYPES = ("MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
_OF_TYPES = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DEEPSPEED",
    "megatron_lm_config": "MEGATRON_LM",
}
_FLAG_OF_TYPES = {"MULTI_CPU": "use_cpu", "XLA": "tpu", "TPU": "tpu"}
STARTED_ON_EACH = "start the command on each machine of a TPU"
# Keys that have no effect here, with the reason.
_TPU = "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env"
_UNUSED = {
    **dict.fromkeys([*_TPU.split(), "commands", "command_file"], STARTED_ON_EACH),
    "mpirun_config": "to start processes with MPI, run `mpirun -np 4 trainer launch script.py`",
    "ipex_config": "its functions are now part of torch",
}
_SILENT = ("main_training_function", "same_network")  # no effect either, but in every file
_OFF: tuple[Any, ...] = (None, False, "no", "NO", "", [], {})
_FLAGS = (
    *("use_cpu", "tpu", "debug", "enable_cpu_affinity"),
    *(name for name, each in DYNAMO.items() if each.kind == "flag"),
)
SUFFIXES = (".yaml", ".yml", ".json")
_COUNTS = {  # with their minimum
    "num_processes": 1,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "gradient_accumulation_steps": 1,
    "num_cpu_threads_per_process": 1,
    "max_restarts": 0,
}


@dataclass(frozen=True, kw_only=True)
class LaunchConfiguration:
    """The settings for starting a script; None leaves one to the machine, environment or script.

    Attributes:
        num_processes: The total number of processes on all machines.
        num_machines: The number of machines.
        machine_rank: The rank of this machine, from 0.
        main_process_ip: The name or address of machine 0.
        main_process_port: A free port of machine 0; 0 finds one if there is a single machine.
        use_cpu: Use the CPU even if there is an accelerator.
        tpu: Use the TPU, ``PJRT_DEVICE=TPU``, unless that variable names another device.
        gpu_ids: The devices of this machine to use, ``"0,1"``, or ``"all"``.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        gradient_accumulation_steps: Micro-batches per update.
        dynamo_backend: The backend of ``torch.compile``; ``"no"`` compiles nothing.
        dynamo_mode: The mode of ``torch.compile``.
        dynamo_use_fullgraph: Raise an error if a part cannot be compiled.
        dynamo_use_dynamic: Compile for dynamic shapes from the start.
        dynamo_use_regional_compilation: Compile repeated blocks separately.
        num_cpu_threads_per_process: CPU threads of each process.
        enable_cpu_affinity: Bind each process to the cores near its GPU.
        fsdp_config: Shards models over the processes with these FSDP settings, such as
            ``{"fsdp_offload_params": True}``; None does not shard.
        deepspeed_config: Partitions models and optimizers with these DeepSpeed settings, such as
            ``{"zero_stage": 3}``; None does not use DeepSpeed.
        parallelism_config: The sizes of the device mesh, such as
            ``{"parallelism_config_tp_size": 2}``.
        megatron_lm_config: Splits a megatron-core model with these settings, such as
            ``{"megatron_lm_tp_degree": 2}``; None does not use Megatron-LM.
        fp8_config: Settings of ``mixed_precision="fp8"``, such as ``{"backend": "AO"}``.
        debug: Compare shapes before collectives start.
        rdzv_backend: The rendezvous of machines, ``"static"`` or ``"c10d"``; None means
            ``"static"``, or ``"c10d"`` if processes may be restarted.
        rdzv_conf: Options of the rendezvous, such as ``"timeout=600,keep_alive_interval=5"``.
        max_restarts: The maximum number of restarts of all processes after one has failed.
        monitor_interval: Seconds between two checks of the processes.

    Raises:
        ValueError: A value is outside its choices, or values contradict each other.
        TypeError: A value has the wrong type.
    """

    num_processes: int | None = None
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    use_cpu: bool | None = None
    tpu: bool | None = None
    gpu_ids: str | None = None
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    num_cpu_threads_per_process: int | None = None
    enable_cpu_affinity: bool | None = None
    fsdp_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    fp8_config: dict[str, Any] | None = None
    debug: bool | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str = ""
    max_restarts: int = 0
    monitor_interval: float = 0.1

    def __post_init__(self) -> None:
        """Check each value and their combination."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_bools(**{name: given[name] for name in _FLAGS if name in given})
        for name, least in _COUNTS.items():
            if name in given:
                check_counts(least, **{name: given[name]})
        check_numbers(monitor_interval=self.monitor_interval)
        if not 0 < self.monitor_interval < math.inf:
            raise ValueError(
                f"monitor_interval is {self.monitor_interval}; it must be above 0 seconds."
            )
        if "mixed_precision" in given:
            PrecisionType.parse(self.mixed_precision, "mixed_precision")
        if self.dynamo_backend is not None:
            DynamoBackend.parse(self.dynamo_backend.upper(), "dynamo_backend")
        if self.rdzv_backend is not None:
            check_choice("rdzv_backend", self.rdzv_backend, ("static", "c10d"))
        if self.gpu_ids is not None and not re.fullmatch(r"all|[^,\s]+(,[^,\s]+)*", self.gpu_ids):
            raise ValueError(f"gpu_ids is {self.gpu_ids!r}; it must be like '0,1', or 'all'.")
        if self.machine_rank >= self.num_machines:
            raise ValueError(
                f"machine_rank is {self.machine_rank}, of {self.num_machines} machine(s); it must "
                f"be from 0 to {self.num_machines - 1}."
            )
        if (self.num_processes or 0) % self.num_machines:
            raise ValueError(
                f"num_processes is {self.num_processes}, of all machines together; it must be a "
                f"multiple of num_machines, which is {self.num_machines}."
            )
        object.__setattr__(self, "fp8_config", fp8_settings(self.fp8_config))
        if self.fp8_config and self.mixed_precision not in (None, PrecisionType.FP8):
            raise ValueError(
                f"fp8_config has settings, but mixed_precision is {self.mixed_precision!r}: it "
                "must be 'fp8', or remove fp8_config."
            )
        of_deepspeed = settings_of_deepspeed(self.deepspeed_config)
        object.__setattr__(self, "deepspeed_config", of_deepspeed)
        check_settings(self._sections, self.num_processes, cpu=bool(self.use_cpu))
        if self.num_machines > 1 and self.main_process_port == 0:
            raise ValueError(
                "main_process_port is 0, which finds a free port on a single machine; several "
                "machines need the same port."
            )

    @property
    def _sections(self) -> dict[str, dict[str, Any] | None]:
        return {name: getattr(self, name) for name in SECTIONS}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pass these settings to a process."""
        named = {
            "ACCELERATE_USE_CPU": self.use_cpu,
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": self.gradient_accumulation_steps,
            **{each.env[0]: getattr(self, name) for name, each in DYNAMO.items()},
            "ACCELERATE_CPU_AFFINITY": self.enable_cpu_affinity,
            "ACCELERATE_DEBUG_MODE": self.debug,
            "OMP_NUM_THREADS": self.num_cpu_threads_per_process,
            **variables_of(self._sections),
            **fp8_variables(self.fp8_config),
            "PJRT_DEVICE": environment.read("PJRT_DEVICE") or "TPU" if self.tpu else None,
            "CUDA_VISIBLE_DEVICES": None if self.gpu_ids == "all" else self.gpu_ids,
        }
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in named.items()
            if value is not None
        }


def default_path() -> Path:
    """Return the default path of the file.

    It is ``accelerate/default_config.yaml`` in ``HF_HOME``, else in ``huggingface`` below
    ``XDG_CACHE_HOME``, else in ``~/.cache/huggingface``.
    """
    home = environment.read("HF_HOME")
    if not home:
        home = str(Path(environment.read("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `LaunchConfiguration` in a file, and notes about unused keys.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a YAML or JSON mapping, has an unknown key, or requests
            something unsupported.
    """
    settings = read_mapping(path)
    try:
        return parse_settings(settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a YAML or JSON mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # JSON without tabs is also YAML.
        loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path} is not {kind}: {error}") from error
    if not isinstance(loaded, (Mapping, type(None))):
        raise ValueError(f"{path} is a {type(loaded).__name__}; it must be a mapping of settings.")
    return {str(key): value for key, value in (loaded or {}).items()}


def parse_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `LaunchConfiguration` in a file's keys; see `read_file`.

    Raises:
        ValueError: A key is unknown, or requests something unsupported.
    """
    argument_names = {field.name for field in fields(LaunchConfiguration)}
    allowed = {*argument_names, *_UNUSED, *_SILENT, "compute_environment"}
    allowed |= {"distributed_type", "dynamo_config", "fp16"}
    for key in settings.keys() - allowed:
        raise ValueError(choice_error("a key", key, allowed))
    _check_supported(settings)
    notes = [
        f"{key} is not used: {why}."
        for key, why in _UNUSED.items()
        if settings.get(key) not in _OFF
    ]
    dynamo = settings.get("dynamo_config") or {}
    for key in dict(dynamo).keys() - set(DYNAMO):
        raise ValueError(choice_error("a key of dynamo_config", key, DYNAMO))
    values = {**settings} | {key: dynamo[key] for key in DYNAMO if key in dynamo}
    arguments = {
        key: value for key, value in values.items() if key in argument_names and value is not None
    }
    if settings.get("fp16"):  # the former name of mixed_precision
        arguments.setdefault("mixed_precision", "fp16")
    for name in {"mixed_precision", "dynamo_backend"} & arguments.keys():
        arguments[name] = str(arguments[name] or "no")  # YAML reads a bare `no` as False
    for name in {"gpu_ids", "main_process_ip", "dynamo_mode", "rdzv_conf"} & arguments.keys():
        arguments[name] = str(arguments[name])  # YAML reads a bare 0 as a number
    for name in (*_OF_TYPES, "parallelism_config", "fp8_config"):
        if not arguments.get(name):
            arguments.pop(name, None)
    for name, kind in _OF_TYPES.items():
        if settings.get("distributed_type") == kind:
            arguments.setdefault(name, {})
    _take_accumulation(arguments)
    if settings.get("distributed_type") in _FLAG_OF_TYPES:
        arguments[_FLAG_OF_TYPES[settings["distributed_type"]]] = True
    if arguments.get("num_processes") == -1:  # means that each command line gives it
        del arguments["num_processes"]
    return arguments, notes


def _take_accumulation(arguments: dict[str, Any]) -> None:
    """Take the micro-batches per update out of ``deepspeed_config``, where accelerate puts them."""
    of_deepspeed = dict(arguments.get("deepspeed_config", {}))
    steps = of_deepspeed.pop("gradient_accumulation_steps", "auto")
    if "deepspeed_config" in arguments:
        arguments["deepspeed_config"] = of_deepspeed
    if steps != "auto":
        arguments["gradient_accumulation_steps"] = int(steps)


def _check_supported(settings: Mapping[str, Any]) -> None:
    where = settings.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        raise ValueError(
            f"compute_environment is {where!r}; it must be 'LOCAL_MACHINE'. For Amazon SageMaker "
            "use its own launcher, which starts the processes as torchrun does."
        )
    kind = str(settings.get("distributed_type") or "NO")
    if kind in _REFUSED_TYPES:
        raise ValueError(
            f"distributed_type is {kind!r}, which is not supported yet. {_SUPPORTED}: "
            f"distributed_type may be {', '.join(_TYPES)}."
        )
    if kind != "TPU":  # the earlier name of XLA
        check_choice("distributed_type", kind, _TYPES)
    for name, its_kind in _OF_TYPES.items():
        if settings.get(name) and kind != its_kind:
            raise ValueError(
                f"{name} has settings, but distributed_type is {kind!r}: write {its_kind}, or "
                f"remove {name}."
            )


def write_file(path: Path, configuration: LaunchConfiguration) -> None:
    """Write a configuration: the keys of the documented API, and our own if they are set.

    Raises:
        OSError: The file cannot be written.
    """
    several = (configuration.num_processes or 1) > 1 or configuration.num_machines > 1
    kind = "MULTI_CPU" if configuration.use_cpu else "MULTI_GPU"
    for name, its_kind in _OF_TYPES.items():
        if getattr(configuration, name) is not None:
            kind, several = its_kind, True
    if configuration.tpu:
        kind, several = "XLA", True
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": bool(configuration.debug),
        "distributed_type": kind if several else "NO",
        "gpu_ids": configuration.gpu_ids,
        "machine_rank": configuration.machine_rank,
        "main_process_ip": configuration.main_process_ip,
        "main_process_port": configuration.main_process_port,
        "mixed_precision": configuration.mixed_precision or "no",
        "num_machines": configuration.num_machines,
        "num_processes": configuration.num_processes or -1,
        "rdzv_backend": configuration.rdzv_backend or "static",
        "use_cpu": bool(configuration.use_cpu),
    }
    dynamo = {name: value for name in DYNAMO if (value := getattr(configuration, name)) is not None}
    values["dynamo_config"] = dynamo or None
    written = {key: value for key, value in values.items() if value is not None}
    for field in fields(configuration):  # our own keys if needed, since accelerate rejects them
        value = getattr(configuration, field.name)
        if field.name not in (*values, *DYNAMO, "tpu") and value != field.default:
            written[field.name] = value
    if configuration.deepspeed_config is not None and "gradient_accumulation_steps" in written:
        steps = written.pop("gradient_accumulation_steps")  # accelerate stores it there
        written["deepspeed_config"] = {
            **configuration.deepspeed_config,
            "gradient_accumulation_steps": steps,
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    is_json = path.suffix == ".json"
    text = dumps(written, indent=2) + "\n" if is_json else yaml.safe_dump(written)
    path.write_text(text, encoding="utf-8")


def machine_configuration() -> LaunchConfiguration:
    """Return a configuration with one process per accelerator, or one on the CPU."""
    devices = device_count()
    return LaunchConfiguration(
        num_processes=max(1, devices), use_cpu=devices == 0, mixed_precision="no"
    )


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write a configuration for this machine, as ``trainer config --default`` does.

    Args:
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        save_location: The file, ``.yaml`` or ``.json``; None is the default path of
            `trainer launch`.

    Returns:
        The file; False if it already exists, in which case it is not changed.

    Raises:
        ValueError: The precision or the suffix is unknown.
        OSError: The file cannot be written.
    """
    place = (default_path() if save_location is None else Path(save_location)).expanduser()
    if place.suffix not in SUFFIXES:
        raise ValueError(f"save_location is {str(place)!r}; it must end in {', '.join(SUFFIXES)}.")
    precision = PrecisionType.parse(mixed_precision.lower(), "mixed_precision")
    if place.exists():
        echo(f"{place} already exists and was not changed; use `trainer config` to change it.")
        return False
    write_file(place, replace(machine_configuration(), mixed_precision=precision))
    return place


def device_count() -> int:
    """Return the number of accelerators that can be assigned to separate processes."""
    with sigint_default():
        import torch

    # MPS has no collectives, so its only device serves a single process.
    return 0 if torch.backends.mps.is_available() else accelerators()


def accelerators() -> int:
    """Return the number of accelerators that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    with sigint_default():
        import torch

    return torch.accelerator.device_count()


def tpu_chips() -> int:
    """Return the number of TPU chips of this machine."""
    with sigint_default():
        from trainer import xla

    return xla.chip_count()


def load_settings(place: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Return a file's settings as arguments of `LaunchConfiguration`; print notes to stderr.

    Raises:
        LaunchError: The file does not exist or is invalid.
    """
    try:
        arguments, notes = read_file(place.expanduser())
        LaunchConfiguration(**arguments)
    except FileNotFoundError as error:
        raise LaunchError(f"there is no configuration file {place}.") from error
    except OSError as error:
        raise LaunchError(f"{place} cannot be read: {error}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise LaunchError(f"{error} (read from {place})") from error
    for note in [] if quiet else notes:
        echo(f"{place}: {note}", error=True)
    return arguments
