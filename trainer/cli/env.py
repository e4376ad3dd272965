"""The command `trainer env`: information about the machine for a bug report."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from trainer import environment
from trainer._siblings import DISTRIBUTION, PACKAGES, conflicts, locate, shadows, version
from trainer.cli.parsing import aligned, command_parser, echo, sigint_default
from trainer.launch.settings import DYNAMO, FP8, SECTIONS

_SETTINGS = [
    *DYNAMO.values(),
    *(each for _, settings in SECTIONS.values() for each in settings.values()),
    *FP8.values(),
]
_LAUNCH = "set by the launcher"
_SLURM = "set by SLURM"
_MPI = "set by the MPI launcher"

# Only the variables that Cadence reads, each with a description. Others may contain secrets.
VARIABLES: Mapping[str, str] = {
    "ACCELERATE_USE_CPU": "use the CPU even if there is an accelerator",
    "ACCELERATE_TORCH_DEVICE": "the device to use, such as `cuda:1`",
    "ACCELERATE_MIXED_PRECISION": "the default of `mixed_precision`",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "the default of `gradient_accumulation_steps`",
    "ACCELERATE_DEBUG_MODE": "compare shapes on all ranks before a collective",
    **{f"ACCELERATE_{asks.upper()}": f"use `{section}`" for section, (asks, _) in SECTIONS.items()},
    **{variable: each.help for each in _SETTINGS for variable in each.env},
    "MEGATRON_LM_SEQ_LENGTH": "the sequence length of Megatron-LM's schedule",
    "ACCELERATE_BYPASS_DEVICE_MAP": "train a model that has a device map",
    "ACCELERATE_CPU_AFFINITY": "bind each process to the cores near its GPU",
    "ACCELERATE_ENABLE_RICH": "`is_rich_available()` is true",
    "ACCELERATE_USE_SAGEMAKER": "refused: SageMaker's libraries are not supported",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "`init_empty_weights` leaves buffers empty too",
    "FORK_LAUNCHED": "a notebook launcher has forked this process",
    "RANK": f"{_LAUNCH}: the number of this process",
    "WORLD_SIZE": f"{_LAUNCH}: how many processes there are",
    "LOCAL_RANK": f"{_LAUNCH}: the number of this process on its machine",
    "LOCAL_WORLD_SIZE": f"{_LAUNCH}: how many processes this machine has",
    "GROUP_WORLD_SIZE": f"{_LAUNCH}: how many machines there are",
    "MASTER_ADDR": f"{_LAUNCH}: the address of the machine of rank 0",
    "MASTER_PORT": f"{_LAUNCH}: its port",
    "TORCHELASTIC_RESTART_COUNT": f"{_LAUNCH}: how often the processes were restarted",
    "TORCHELASTIC_MAX_RESTARTS": f"{_LAUNCH}: how often the processes may be restarted",
    "TORCHELASTIC_ERROR_FILE": f"{_LAUNCH}: where a process reports its error",
    "TORCHELASTIC_USE_AGENT_STORE": f"{_LAUNCH}: rank 0 connects to an existing store",
    "CADENCE_ERROR_PID": f"{_LAUNCH}: the process whose error file is read",
    "CADENCE_LAUNCHER": f"{_LAUNCH}: its process id",
    "CADENCE_STORE": f"{_LAUNCH}: the folder of its rendezvous files",
    "CADENCE_SHUTDOWN_TIMEOUT": "seconds in which a run may save when its launcher is gone",
    "CADENCE_FULL_TRACEBACK": "1 shows the frames of Cadence and torch in tracebacks",
    "PYTHONPATH": "where Python looks for modules first",
    "SLURM_JOB_ID": f"{_SLURM}: the job, for `slurm_requeue`",
    "SLURM_ARRAY_JOB_ID": f"{_SLURM}: the job of an array",
    "SLURM_ARRAY_TASK_ID": f"{_SLURM}: the task of an array",
    "SLURM_PROCID": f"{_SLURM}: the rank",
    "SLURM_LOCALID": f"{_SLURM}: the rank on this machine",
    "SLURM_STEP_NUM_TASKS": f"{_SLURM}: the number of processes",
    "SLURM_STEP_TASKS_PER_NODE": f"{_SLURM}: the processes of each machine",
    "SLURM_STEP_NODELIST": f"{_SLURM}: the machines",
    "SLURM_LAUNCH_NODE_IPADDR": f"{_SLURM}: the address of the machine that launched the step",
    "SLURM_PTY_PORT": f"{_SLURM}: an interactive shell, which is not a launch",
    "OMPI_COMM_WORLD_RANK": f"{_MPI}: the rank",
    "OMPI_COMM_WORLD_SIZE": f"{_MPI}: the number of processes",
    "OMPI_COMM_WORLD_LOCAL_RANK": f"{_MPI}: the rank on this machine",
    "OMPI_COMM_WORLD_LOCAL_SIZE": f"{_MPI}: the processes of this machine",
    "MV2_COMM_WORLD_RANK": f"{_MPI}: the rank",
    "MV2_COMM_WORLD_SIZE": f"{_MPI}: the number of processes",
    "MV2_COMM_WORLD_LOCAL_RANK": f"{_MPI}: the rank on this machine",
    "MV2_COMM_WORLD_LOCAL_SIZE": f"{_MPI}: the processes of this machine",
    "PMI_RANK": f"{_MPI}: the rank",
    "PMI_SIZE": f"{_MPI}: the number of processes",
    "MPI_LOCALRANKID": f"{_MPI}: the rank on this machine",
    "MPI_LOCALNRANKS": f"{_MPI}: the processes of this machine",
    "PJRT_DEVICE": "torch_xla: the kind of device, such as `TPU`",
    "PJRT_LOCAL_PROCESS_RANK": "torch_xla: the rank on this machine",
    "PJRT_LOCAL_PROCESS_COUNT": "torch_xla: the processes of this machine",
    "TPU_NAME": "torch_xla: the TPU to use",
    "XLA_USE_BF16": "refused: it would change the dtype of all tensors",
    "XLA_DOWNCAST_BF16": "refused: it would change the dtype of all tensors",
    "XLA_USE_SPMD": "torch_xla: set by `torch_xla.runtime.use_spmd()`",
    # not MLFLOW_TAGS, which may be secret
    "MLFLOW_EXPERIMENT_NAME": "MLflow: the experiment of new runs",
    "MLFLOW_RUN_ID": "MLflow: the run to log to",
    "MLFLOW_NESTED_RUN": "MLflow: make the run a child of the active one",
    "OMP_NUM_THREADS": "threads of torch on the CPU in each process",
    "CUDA_VISIBLE_DEVICES": "the CUDA devices that a process sees",
    "HF_HOME": "the folder with the file of `trainer config`",
    "XDG_CACHE_HOME": "the parent of that folder if `HF_HOME` is not set",
}

# Packages that Cadence can use but no extra for users installs.
_WITHOUT_EXTRA = ("peft", "transformer-engine", "transformers")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer env`."""
    made = command_parser(
        prog,
        "Show the versions, the devices, the configuration and the files in use.",
        examples=[
            ("what a bug report should contain", ""),
            ("with another file", "--config_file four.yaml"),
        ],
        codes={0: "done", 1: "other files are imported instead of Cadence's packages"},
    )
    text = "the file of `trainer config`, if not the default one"
    made.add_argument("--config_file", "--config-file", type=Path, metavar="FILE", help=text)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return 1 if other files shadow or overwrite our packages."""
    with sigint_default():
        import torch

    rows = [
        ("cadence", version()),
        ("python", f"{platform.python_version()} ({platform.platform()})"),
        ("torch", torch.__version__),
        ("packages", ", ".join(_packages())),
        ("devices", ", ".join(_devices())),
        ("launcher", _launch()),
        ("configuration", _configuration(arguments.config_file)),
        *((name, value) for name in VARIABLES if (value := environment.read(name)) is not None),
        *((name, str(locate(name) or "missing")) for name in PACKAGES),
    ]
    echo(aligned(rows))
    in_the_way = shadows(Path.cwd())
    for path in in_the_way:
        echo(f"\n{path} is imported instead of Cadence's package by scripts in this folder.")
    for conflict in (known := conflicts()):
        echo(f"\n{conflict}")
    return 1 if in_the_way or known else 0


def _packages() -> list[str]:
    """Return the installed packages that Cadence can use, with versions."""
    wanted: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        wanted = metadata.requires(DISTRIBUTION) or []
    used = [
        requirement
        for requirement in wanted
        if not re.search(r"extra == .(test|dev|docs|examples)\b", requirement)
    ]
    names = dict.fromkeys(
        [*_WITHOUT_EXTRA, *(re.split(r"[^\w.-]", requirement)[0] for requirement in used)]
    )
    versions = []
    for name in names.keys() - {DISTRIBUTION, "torch"}:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return sorted(versions)


def _launch() -> str:
    """Return the launcher that a run in this process would detect, with its rank."""
    try:
        launch = environment.detect_launch()
    except ValueError as error:
        return str(error)
    if launch.launcher == "none":
        return "none"
    return f"{launch.launcher}: rank {launch.rank} of {launch.world_size}"


def _configuration(path: Path | None) -> str:
    """Return the path of the configuration file of `trainer launch`, and its settings."""
    from trainer.launch.configuration import LaunchConfiguration, default_path, read_file

    place = (path or default_path()).expanduser()
    try:
        settings, notes = read_file(place)
        LaunchConfiguration(**settings)
    except FileNotFoundError:
        return f"{place} (does not exist)"
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        return f"{place}: {error}"
    settings_text = [f"{name}={value}" for name, value in settings.items()]
    return f"{place}: {', '.join(settings_text) or 'empty'}" + "".join(
        f"; {note}" for note in notes
    )


def _devices() -> list[str]:
    """Return the name of each device that a run could use, the CPU last."""
    import torch

    from trainer.loops.run_metadata import name_of

    names = []
    for index in range(torch.accelerator.device_count()):
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        device = torch.device(kind.type, index)
        names.append(f"{device} ({name_of(device)})")
    return [*names, f"cpu ({torch.get_num_threads()} threads)"]
