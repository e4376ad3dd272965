"""Plan this machine's processes from options, file and environment, and start them.

A single process that needs no watching is replaced by the script. So is each process that `srun` or
`mpirun` has started, whose environment has all that `trainer` needs. Other processes are started by
torch's elastic agent, see `trainer.launch.group`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer import environment
from trainer.enums import PrecisionType
from trainer.errors import echo
from trainer.launch import LaunchError, sigint_default
from trainer.launch.configuration import (
    LaunchConfiguration,
    accelerators,
    default_path,
    device_count,
    load_settings,
    tpu_chips,
)
from trainer.launch.entry import SHUTDOWN_TIMEOUT
from trainer.launch.options import REFUSED, add_options
from trainer.launch.settings import FP8, LAUNCHER, SECTIONS

_AS_LIGHTNING = Path(__file__).parents[1] / "lightning" / "as_lightning"
_SLURM_GRACE = 120  # seconds before its time limit at which a job gets a signal


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes to start.

    Attributes:
        here: Replace this process by the script, without watching it.
        processes: The number of processes on this machine.
        machines: The minimum and maximum number of machines.
        variables: Environment variables to set.
        command: The command of each process.
    """

    here: bool
    processes: int
    machines: tuple[int, int]
    variables: dict[str, str]
    command: list[str]


def run(arguments: argparse.Namespace, *, replace: bool = True) -> int:
    """Start the run described by arguments, file and environment, and wait until it ends.

    Args:
        arguments: The result of a parser with `add_options`.
        replace: Let a single process replace this one.

    Returns:
        0, or the exit code of the run.

    Raises:
        argparse.ArgumentTypeError: The arguments are invalid; nothing was started.
        LaunchError: The configuration file is invalid, or the script or program does not exist.
        OSError: A program cannot be started.
    """
    words = arguments.words
    arguments.words = words = words[words[0] == "--" :]
    _check(arguments)
    configuration = configure(arguments)
    if arguments.slurm:
        sys.stdout.write(_batch_script(arguments, configuration))
        return 0
    plan = make_plan(arguments, configuration)
    if arguments.dry_run:
        echo(_description(plan))
        return 0
    if arguments.no_python and shutil.which(words[0]) is None:
        raise LaunchError(f"there is no executable program {words[0]!r}.", 2)
    with environment.patch_environment(**plan.variables):
        if plan.here:
            sys.stdout.flush()
            if not replace:
                return subprocess.call(plan.command)
            os.execvp(plan.command[0], plan.command)
        return _start_group(arguments, configuration, plan)


def _description(plan: Plan) -> str:
    least, most = plan.machines
    how = "replaced by the command" if plan.here else "watched by torch's elastic agent"
    rows = {
        "processes on this machine": f"{plan.processes}, {how}",
        "machines": str(least if least == most else f"{least} to {most}"),
        **dict(sorted(plan.variables.items())),
        "command": shlex.join(plan.command),
    }
    return "\n".join(f"{name:<26} {value}" for name, value in rows.items())


def launch_command_parser() -> argparse.ArgumentParser:
    """Return the parser of `trainer launch`, for programs that call `launch_command`."""
    parser = argparse.ArgumentParser(prog="trainer launch", allow_abbrev=False)
    add_options(parser)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run `trainer launch` with parsed arguments, and return when it has ended.

    Raises:
        SystemExit: The run failed; the code is that of `trainer launch`.
        Exception: See `run`.
    """
    if code := run(args, replace=False):
        raise SystemExit(code)


def _check(arguments: argparse.Namespace) -> None:
    given = {name for name, value in vars(arguments).items() if value not in (None, False)}
    problem = None
    for name in given & REFUSED.keys():
        problem = f"--{name} is not supported: {REFUSED[name]}."
    if not arguments.words:
        problem = "the script is missing."
    elif arguments.cpu and (arguments.multi_gpu or arguments.gpu_ids):
        problem = "--cpu uses no device: omit --multi_gpu and --gpu_ids."
    elif arguments.tpu and (arguments.cpu or arguments.multi_gpu or arguments.gpu_ids):
        problem = "--tpu uses neither the CPU nor GPUs: omit --cpu, --multi_gpu and --gpu_ids."
    elif {"num_processes", "nproc_per_node"} <= given:
        problem = (
            "--num_processes counts the processes of all machines, --nproc_per_node those of this "
            "one: pass one of them."
        )
    elif arguments.tee not in (None, "0") and not arguments.log_dir:
        problem = "--tee needs --log_dir."
    elif arguments.sbatch and not arguments.slurm:
        problem = "--sbatch needs --slurm."
    elif arguments.slurm and (arguments.nnodes or arguments.max_restarts):
        problem = (
            "--slurm takes --num_machines instead of --nnodes, and no --max_restarts: SLURM itself "
            "requeues a job."
        )
    elif "nnodes" in given and given & {"num_processes", "num_machines"}:
        problem = (
            "--nnodes replaces --num_machines, and needs --nproc_per_node: the number of "
            "processes on all machines is not known in advance."
        )
    if problem:
        raise argparse.ArgumentTypeError(problem)
    script = arguments.words[0]
    if not (arguments.module or arguments.no_python) and not Path(script).exists():
        raise LaunchError(f"there is no script {script!r} in {Path.cwd()}.", 2)


def configure(arguments: argparse.Namespace) -> LaunchConfiguration:
    """Return the configuration of the command line and the file; the command line wins.

    Raises:
        argparse.ArgumentTypeError: An argument is invalid.
        LaunchError: The file is invalid.
    """
    place = arguments.config_file or default_path()
    from_file: dict[str, Any] = {}
    if arguments.config_file or place.exists():
        from_file = load_settings(place, quiet=arguments.quiet)
    argument_names = {field.name for field in fields(LaunchConfiguration)}
    from_command_line = {
        name: value
        for name, value in vars(arguments).items()
        if name in argument_names and value is not None and value is not False  # 0 counts as given
    }
    if arguments.nnodes and arguments.nnodes[0] == arguments.nnodes[1]:  # torchrun's --nnodes 2
        from_command_line["num_machines"] = arguments.nnodes[0]
    if arguments.cpu:
        from_command_line |= {"use_cpu": True, "gpu_ids": None, "tpu": None}
    if arguments.tpu:
        from_command_line |= {"use_cpu": None, "gpu_ids": None}
    if arguments.multi_gpu or arguments.gpu_ids:
        from_command_line |= {"use_cpu": False, "tpu": None}
    if arguments.nproc_per_node:
        machines = from_command_line.get("num_machines", from_file.get("num_machines", 1))
        from_command_line["num_processes"] = arguments.nproc_per_node * machines
    elif "num_processes" not in from_command_line and (
        arguments.multi_gpu
        or arguments.tpu
        or "num_machines" in from_command_line
        or "gpu_ids" in from_command_line
    ):
        from_file.pop("num_processes", None)  # it was meant for other machines or devices
    _take_sharding(arguments, from_file, from_command_line)
    chosen = {name: value for name in FP8 if (value := getattr(arguments, name)) is not None}
    if from_command_line.get("mixed_precision", PrecisionType.FP8) != PrecisionType.FP8:
        from_file.pop("fp8_config", None)
    if chosen:
        from_command_line["fp8_config"] = {**from_file.get("fp8_config", {}), **chosen}
    if from_command_line.get("num_machines") == 1:
        from_file.pop("machine_rank", None)
    try:
        return LaunchConfiguration(**(from_file | from_command_line))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _take_sharding(
    arguments: argparse.Namespace, from_file: dict[str, Any], from_command_line: dict[str, Any]
) -> None:
    """Override the file's settings of FSDP, DeepSpeed, Megatron-LM and the mesh by the options.

    Raises:
        argparse.ArgumentTypeError: An option is given whose engine is not requested.
    """
    engines = {asks: key for key, (asks, _) in SECTIONS.items() if key != "parallelism_config"}
    if any(getattr(arguments, engine) for engine in engines):  # these replace the file's
        for engine, section in engines.items():
            if not getattr(arguments, engine):
                from_file.pop(section, None)
    for key, (asks, settings) in SECTIONS.items():
        names = [*settings, *(LAUNCHER if key == "deepspeed_config" else ())]
        chosen = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        if chosen and key not in from_file and not getattr(arguments, asks):
            raise argparse.ArgumentTypeError(f"--{next(iter(chosen))} needs --{asks}.")
        if chosen or getattr(arguments, asks):
            from_command_line[key] = {**from_file.get(key, {}), **chosen}


def make_plan(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> Plan:
    """Return the plan for this machine.

    Raises:
        argparse.ArgumentTypeError: The machine lacks requested devices, or the rendezvous address
            is missing.
    """
    machines = arguments.nnodes or (configuration.num_machines, configuration.num_machines)
    _check_devices(arguments, configuration)
    processes = 1 if _is_started(arguments) else _processes(arguments, configuration)
    here = _is_started(arguments) or (
        machines == (1, 1)
        and processes == 1
        and configuration.max_restarts == 0
        and arguments.log_dir is None
    )
    variables = _variables(arguments, configuration)
    if not here:
        if machines[1] > 1 and not (configuration.main_process_ip or arguments.rdzv_endpoint):
            raise argparse.ArgumentTypeError(
                f"{machines[1]} machines need a rendezvous address: pass --main_process_ip HOST, "
                "the name or address of machine 0."
            )
        if processes > 1 and environment.read("OMP_NUM_THREADS") is None:
            # Otherwise each process would start as many threads as there are cores.
            variables.setdefault("OMP_NUM_THREADS", str(environment.share_of_cores(processes)))
    return Plan(
        here=here,
        processes=processes,
        machines=machines,
        variables=variables,
        command=_command(arguments, noted=not here),
    )


def _is_started(arguments: argparse.Namespace) -> bool:
    """Return whether another launcher started this process as one of the run's processes."""
    try:
        launch = environment.detect_launch()
    except ValueError as error:  # the variables contradict each other
        raise LaunchError(str(error)) from error
    if launch.world_size == 1 or arguments.num_machines or arguments.nnodes:
        return False
    return arguments.nproc_per_node is None and arguments.num_processes in (None, launch.world_size)


def _processes(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> int:
    """Return the number of processes on this machine: as requested, else one per device."""
    if arguments.nproc_per_node:
        return int(arguments.nproc_per_node)
    if configuration.num_processes is not None:
        count = configuration.num_processes // configuration.num_machines
    elif configuration.gpu_ids not in (None, "all"):
        count = len(str(configuration.gpu_ids).split(","))
    elif configuration.tpu:
        count = tpu_chips()
        if not count:
            raise argparse.ArgumentTypeError(
                "--tpu starts a process for each chip, but this machine has no TPU chips, or "
                "torch_xla is not installed: pass --num_processes."
            )
    else:
        count = 1 if _on_cpu(configuration) else max(1, device_count())
    if arguments.multi_gpu and count < 2:
        raise argparse.ArgumentTypeError(
            f"--multi_gpu needs at least two devices, but {count} would be used. Leave it out."
        )
    return count


def _on_cpu(configuration: LaunchConfiguration) -> bool:
    cpu = configuration.use_cpu
    return environment.read_flag("ACCELERATE_USE_CPU") if cpu is None else cpu


def _check_devices(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> None:
    """Raise if requested devices do not exist, since the run would silently use the CPU.

    ``gpu_ids: all`` in a file does not count, since files have it on any machine. Names such as
    ``GPU-8932f937`` are left to CUDA.
    """
    ids = configuration.gpu_ids
    names = [] if ids in (None, "all") else str(ids).split(",")
    if not (names or arguments.gpu_ids or arguments.multi_gpu) or _on_cpu(configuration):
        return
    # Numbers replace the shell's variable, and refer to all devices of the machine.
    with environment.without("CUDA_VISIBLE_DEVICES") if names else nullcontext():
        there = accelerators()
    existing = {str(number) for number in range(there)}
    numbers = [name for name in names if name.lstrip("+-").isdecimal()]
    if there and set(numbers) <= existing and len(set(names)) == len(names):
        return
    option = f"gpu_ids is {ids!r}" if ids else "--multi_gpu needs accelerators"
    devices = f"accelerators {', '.join(sorted(existing, key=int))}" if there else "no accelerator"
    count = f" --num_processes {len(names)}" if len(names) > 1 else ""
    more = "" if configuration.num_processes else count
    raise argparse.ArgumentTypeError(
        f"{option}, but this machine has {devices}. Name existing devices, each once, or leave it "
        f"out and pass --cpu{more} to use the CPU."
    )


def _variables(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> dict[str, str]:
    """Return the environment variables to set."""
    if not arguments.as_lightning:
        return configuration.variables
    paths = filter(None, [str(_AS_LIGHTNING), environment.read("PYTHONPATH")])
    return configuration.variables | {"PYTHONPATH": os.pathsep.join(paths)}


def _command(arguments: argparse.Namespace, *, noted: bool) -> list[str]:
    """Return the command of a process, run by `entry.py` if the launcher reads its record."""
    if arguments.no_python:
        return list(arguments.words)
    entry = [str(Path(__file__).with_name("entry.py"))] if noted else []
    module = ["-m"] if arguments.module else []
    flags, _ = environment.interpreter_command(sys.orig_argv)  # options such as -W error
    flags = [*(flag for flag in flags if flag != "-u"), "-u"]
    return [sys.executable, *flags, *entry, *module, *arguments.words]


def _start_group(
    arguments: argparse.Namespace, configuration: LaunchConfiguration, plan: Plan
) -> int:
    with sigint_default():
        from trainer.launch.group import Group, run_group  # imports torch, not needed for a dry run

    elastic = plan.machines[0] != plan.machines[1] or configuration.max_restarts > 0
    backend = configuration.rdzv_backend or (
        "c10d" if elastic or arguments.rdzv_endpoint else "static"
    )
    more = _pairs(configuration.rdzv_conf)
    meeting: dict[str, Any] = {}
    if plan.machines[1] > 1:
        # Machine 0 hosts the rendezvous, whatever its name is on the others.
        if arguments.nnodes is None and backend == "c10d":
            more.setdefault("is_host", str(configuration.machine_rank == 0))
        if backend == "static":
            more["rank"] = configuration.machine_rank
        endpoint = arguments.rdzv_endpoint or configuration.main_process_ip
        if ":" not in (arguments.rdzv_endpoint or ""):
            endpoint = f"{endpoint}:{configuration.main_process_port or environment.DEFAULT_PORT}"
        job = arguments.rdzv_id or "cadence"
        meeting = {"endpoint": endpoint, "backend": backend, "job": job, "rendezvous": more}
    elif configuration.main_process_port:
        meeting["endpoint"] = f"127.0.0.1:{configuration.main_process_port}"
    return run_group(
        Group(
            command=plan.command,
            processes=plan.processes,
            machines=plan.machines,
            max_restarts=configuration.max_restarts,
            monitor_interval=configuration.monitor_interval,
            shutdown_timeout=arguments.shutdown_timeout or SHUTDOWN_TIMEOUT,
            log_dir=arguments.log_dir,
            tee=arguments.tee or "0",
            prefix="[rank ${rank}] " if arguments.tee not in (None, "0") else None,
            **meeting,
        )
    )


def _pairs(text: str) -> dict[str, Any]:
    """Return ``"a=1,b=2"`` as a mapping."""
    try:
        pairs = dict(each.split("=", 1) for each in text.split(",") if each)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"--rdzv_conf is {text!r}; it must be like timeout=600,keep_alive_interval=5."
        ) from None
    return {name.strip(): value.strip() for name, value in pairs.items()}


def _batch_script(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> str:
    """Return a batch script for SLURM: one task for each process, started by `srun`.

    SLURM sets each task's rank, without another launcher. Shortly before its time limit the job
    gets SIGUSR1: the run is saved. With ``Trainer(slurm_requeue=True)`` the job is requeued and
    later resumes.
    """
    processes, threads = (
        _processes(arguments, configuration),
        configuration.num_cpu_threads_per_process,
    )
    options = [f"--nodes={configuration.num_machines}", f"--ntasks-per-node={processes}"]
    if not _on_cpu(configuration):
        options.append(f"--gpus-per-node={processes}")
    variables = _variables(arguments, configuration)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # SLURM sets it
    if threads:
        options.append(f"--cpus-per-task={threads}")
        variables["SRUN_CPUS_PER_TASK"] = str(threads)  # srun does not inherit it from sbatch
    options += [f"--signal=USR1@{_SLURM_GRACE}", "--requeue", "--open-mode=append"]
    command = _command(arguments, noted=False)
    if not arguments.no_python:
        command[0] = "python"  # use the interpreter in the nodes' environment
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {each}" for each in options + (arguments.sbatch or [])),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        "",
        "# A task that has ended must not end the others, which may still be saving.",
        f"exec srun --kill-on-bad-exit=0 {shlex.join(command)}",
        "",
    ]
    return "\n".join(lines)
