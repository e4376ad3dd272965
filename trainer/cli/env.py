"""The command `trainer env`: what a bug report should say about the machine."""

from __future__ import annotations

import argparse
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from trainer import environment
from trainer._siblings import DISTRIBUTION, PACKAGES, locate, shadows, version
from trainer.cli.parsing import aligned, command_parser, echo, sigint_default
from trainer.launch.settings import DYNAMO, FP8, SECTIONS

# Only the variables that Cadence reads: others may contain secrets.
VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_DEBUG_MODE"),
    *(f"ACCELERATE_{asks.upper()}" for asks, _ in SECTIONS.values()),
    *(
        variable
        for settings in (DYNAMO, *(settings for _, settings in SECTIONS.values()), FP8)
        for each in settings.values()
        for variable in each.env
    ),
    "MEGATRON_LM_SEQ_LENGTH",
    *("ACCELERATE_BYPASS_DEVICE_MAP", "FORK_LAUNCHED", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_USE_SAGEMAKER"),
    "ACCELERATE_INIT_INCLUDE_BUFFERS",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS", "CADENCE_ERROR_PID"),
    *("CADENCE_SHUTDOWN_TIMEOUT", "PYTHONPATH"),
    *("CADENCE_LAUNCHER", "CADENCE_STORE"),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_LAUNCH_NODE_IPADDR", "SLURM_PTY_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("PJRT_DEVICE", "TPU_NAME", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_SPMD"),
    *("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN"),  # MLFLOW_TAGS may be secret
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "XDG_CACHE_HOME"),
)

# Packages that Cadence can use, and that no extra for users has.
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
        codes={0: "done", 1: "a file in this folder is imported instead of our packages"},
    )
    text = "the file of `trainer config`, if not the default one"
    made.add_argument("--config_file", "--config-file", type=Path, metavar="FILE", help=text)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return 1 if a file in this folder shadows one of our packages."""
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
    return 1 if in_the_way else 0


def _packages() -> list[str]:
    """Return the installed packages that Cadence can use, with versions."""
    wanted: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        wanted = metadata.requires(DISTRIBUTION) or []
    used = [
        requirement
        for requirement in wanted
        if not re.search(r"extra == .(test|dev|examples)\b", requirement)
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
    said = [f"{name}={value}" for name, value in settings.items()]
    return f"{place}: {', '.join(said) or 'empty'}" + "".join(f"; {note}" for note in notes)


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
