"""The command `trainer launch`: run a script in one or more processes, on one or more machines.

A single process that needs no watching is replaced by the script, and so is each that `srun` or
`mpirun` has started: the variables that these set say what `trainer` needs to know. Other processes
are started by torch's elastic agent, see `trainer.cli.launch.group`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer import environment
from trainer.cli.config import accelerators, device_count, known_of
from trainer.cli.config.file import LaunchConfiguration, default_place
from trainer.cli.launch.options import parser as parser
from trainer.cli.launch.slurm import batch_script
from trainer.cli.parsing import CommandError, echo, ended_at_once

_LEAST_MEMORY = 4 << 20  # bytes of a process; Python alone takes more


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is about to be started.

    Attributes:
        here: This process is replaced by the script and not watched.
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


def run(arguments: argparse.Namespace) -> int:
    """Start what the arguments, the file and the environment describe, and wait until it ends.

    Returns:
        0, or the exit code of what was started.

    Raises:
        argparse.ArgumentTypeError: The arguments are invalid; nothing was started.
        CommandError: The configuration file is invalid, or the script or program does not exist.
        OSError: A program cannot be started.
    """
    _check(arguments)
    configuration = configure(arguments)
    if arguments.slurm:
        sys.stdout.write(_slurm(arguments, configuration))
        return 0
    plan = make_plan(arguments, configuration)
    if arguments.dry_run:
        _show(plan)
        return 0
    if arguments.no_python and shutil.which(arguments.script) is None:
        raise CommandError(f"there is no executable program {arguments.script!r}.", 2)
    with environment.patch_environment(**plan.variables):
        if plan.here:
            sys.stdout.flush()
            os.execvp(plan.command[0], plan.command)
        return _start_group(arguments, configuration, plan)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.module and arguments.no_python:
        raise argparse.ArgumentTypeError("--module and --no_python exclude each other.")
    if arguments.cpu and (arguments.multi_gpu or arguments.gpu_ids):
        raise argparse.ArgumentTypeError("--cpu uses no device: omit --multi_gpu and --gpu_ids.")
    if arguments.num_processes and arguments.nproc_per_node:
        raise argparse.ArgumentTypeError(
            "--num_processes counts the processes of all machines, --nproc_per_node those of this "
            "one: pass one of them."
        )
    if arguments.tee not in (None, "0") and not arguments.log_dir:
        raise argparse.ArgumentTypeError("--tee belongs to --log_dir, which is not given.")
    if arguments.sbatch and not arguments.slurm:
        raise argparse.ArgumentTypeError("--sbatch belongs to --slurm, which is not given.")
    if arguments.nnodes is not None:
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", arguments.nnodes):
            raise argparse.ArgumentTypeError(
                f"--nnodes is {arguments.nnodes!r}; it must be a number, or two such as 1:4."
            )
        if arguments.num_processes or arguments.num_machines:
            raise argparse.ArgumentTypeError(
                "--nnodes replaces --num_machines, and needs --nproc_per_node: the number of "
                "processes on all machines is not known in advance."
            )
    if not (arguments.module or arguments.no_python) and not Path(arguments.script).exists():
        raise CommandError(f"there is no script {arguments.script!r} in {Path.cwd()}.", 2)


def configure(arguments: argparse.Namespace) -> LaunchConfiguration:
    """Return the configuration of the command line and the file; the command line wins.

    Raises:
        argparse.ArgumentTypeError: An argument is invalid.
        CommandError: The file is invalid.
    """
    place = arguments.config_file or default_place()
    known: dict[str, Any] = {}
    if arguments.config_file or place.exists():
        known = known_of(place, quiet=arguments.quiet)
    own = {field.name for field in fields(LaunchConfiguration)}
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in own and value is not None and value is not False  # 0 counts as given
    }
    if arguments.nnodes and arguments.nnodes.isdecimal():  # torchrun's --nnodes 2 --node_rank 1
        given["num_machines"] = int(arguments.nnodes)
    if arguments.cpu:
        given |= {"use_cpu": True, "gpu_ids": None}
    if arguments.multi_gpu or arguments.gpu_ids:
        given["use_cpu"] = False
    if arguments.nproc_per_node:
        machines = given.get("num_machines", known.get("num_machines", 1))
        given["num_processes"] = arguments.nproc_per_node * machines
    elif "num_processes" not in given and (
        arguments.multi_gpu or "num_machines" in given or "gpu_ids" in given
    ):
        known.pop("num_processes", None)  # it was meant for other machines or devices
    if given.get("num_machines") == 1:
        known.pop("machine_rank", None)
    try:
        return LaunchConfiguration(**(known | given))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_plan(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> Plan:
    """Return the plan for this machine.

    Raises:
        argparse.ArgumentTypeError: The machine lacks requested devices, or nothing says where
            machines meet.
    """
    machines = _machines(arguments, configuration)
    _check_devices(arguments, configuration)
    here = _is_started(arguments) or (
        machines == (1, 1)
        and configuration.max_restarts == 0
        and arguments.log_dir is None
        and _processes(arguments, configuration) == 1
    )
    processes = 1 if here else _processes(arguments, configuration)
    if processes > (most := _most_processes()):
        raise argparse.ArgumentTypeError(
            f"{processes} processes on this machine are too many: it can start at most {most}, by "
            "its memory and the user's limit. Pass a smaller --num_processes."
        )
    if (
        not here
        and machines[1] > 1
        and not (configuration.main_process_ip or arguments.rdzv_endpoint)
    ):
        raise argparse.ArgumentTypeError(
            f"{machines[1]} machines must know where to meet: pass --main_process_ip HOST, the "
            "name or address of machine 0."
        )
    variables = configuration.variables
    if (
        not here
        and processes > 1
        and "OMP_NUM_THREADS" not in variables
        and environment.read("OMP_NUM_THREADS") is None
    ):
        # Otherwise each would start as many threads as there are cores.
        variables["OMP_NUM_THREADS"] = str(environment.share_of_cores(processes))
    return Plan(
        here=here,
        processes=processes,
        machines=machines,
        variables=variables,
        command=_command(arguments, noted=not here),
    )


def _machines(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> tuple[int, int]:
    if arguments.nnodes is None:
        return configuration.num_machines, configuration.num_machines
    least, _, most = arguments.nnodes.partition(":")
    if int(most or least) < int(least):
        raise argparse.ArgumentTypeError(
            f"--nnodes is {arguments.nnodes}: at most {most} machines are fewer than at least "
            f"{least}."
        )
    return int(least), int(most or least)


def _is_started(arguments: argparse.Namespace) -> bool:
    """Return whether another launcher has started this process as one of those to be used."""
    try:
        launch = environment.detect_launch()
    except ValueError as error:  # the variables contradict each other
        raise CommandError(str(error)) from error
    if launch.world_size == 1 or arguments.num_machines or arguments.nnodes:
        return False
    return arguments.nproc_per_node is None and arguments.num_processes in (None, launch.world_size)


def _processes(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> int:
    """Return the number of processes on this machine: as requested, else one per device."""
    if arguments.nproc_per_node:
        return int(arguments.nproc_per_node)
    if configuration.num_processes is not None:
        wanted = configuration.num_processes // configuration.num_machines
    elif configuration.gpu_ids not in (None, "all"):
        wanted = len(str(configuration.gpu_ids).split(","))
    else:
        wanted = 1 if _on_cpu(configuration) else max(1, device_count())
    if arguments.multi_gpu and wanted < 2:
        raise argparse.ArgumentTypeError(
            f"--multi_gpu needs at least two devices, but {wanted} would be used. Leave it out."
        )
    return wanted


def _most_processes() -> float:
    """Return the number of processes above which this machine starts none, whatever they do."""
    try:
        import resource
    except ImportError:  # Windows, where neither is known
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = memory // _LEAST_MEMORY
    return most if limit == resource.RLIM_INFINITY else min(most, limit)


def _on_cpu(configuration: LaunchConfiguration) -> bool:
    cpu = configuration.use_cpu
    return environment.read_flag("ACCELERATE_USE_CPU") if cpu is None else cpu


def _check_devices(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> None:
    """Raise if requested devices do not exist: the CPU would silently do their work.

    ``gpu_ids: all`` in a file requests none, since files contain it on any machine.
    """
    ids = configuration.gpu_ids
    named = ids not in (None, "all")
    asked = named or arguments.gpu_ids or arguments.multi_gpu
    if not asked or _on_cpu(configuration):
        return
    if not named:
        there, wanted = accelerators(), 1
        found_all = there > 0
    else:
        wanted = len(str(ids).split(","))
        with environment.without("CUDA_VISIBLE_DEVICES"):  # the shell's, which ids replace
            there = accelerators()
        found_all = _are_there(str(ids), there)
    if found_all:
        return
    option = f"gpu_ids is {ids!r}" if ids else "--multi_gpu asks for accelerators"
    found = f"accelerators {', '.join(map(str, range(there)))}" if there else "no accelerator"
    more = f" --num_processes {wanted}" if wanted > 1 and not configuration.num_processes else ""
    raise argparse.ArgumentTypeError(
        f"{option}, but this machine has {found}. Name existing devices, each once, or leave it "
        f"out and pass --cpu{more} to use the CPU."
    )


def _are_there(ids: str, count: int) -> bool:
    """Return whether a machine with `count` accelerators has these, each named once.

    Numbers are compared with the count, since CUDA may repeat what it has found before. Other
    names, such as ``GPU-8932f937``, are known only to CUDA, which may then find too many.
    """
    names = ids.split(",")
    if all(re.fullmatch(r"[+-]?\d+", each) for each in names):
        numbers = {int(each) for each in names}
        return len(numbers) == len(names) and numbers <= set(range(count))
    with environment.patch_environment(CUDA_VISIBLE_DEVICES=ids):
        return accelerators() >= len(names)


def _command(arguments: argparse.Namespace, *, noted: bool) -> list[str]:
    """Return the command of a process, through `entry.py` if the launcher reads its note."""
    own = [arguments.script, *arguments.script_arguments]
    if arguments.no_python:
        return own
    entry = [str(Path(__file__).with_name("entry.py"))] if noted else []
    return [sys.executable, "-u", *entry, *(["-m"] if arguments.module else []), *own]


def _start_group(
    arguments: argparse.Namespace, configuration: LaunchConfiguration, plan: Plan
) -> int:
    with ended_at_once():
        from trainer.cli.launch.group import Group, run_group  # torch: not for a dry run

    elastic = plan.machines[0] != plan.machines[1] or configuration.max_restarts > 0
    backend = configuration.rdzv_backend or (
        "c10d" if elastic or arguments.rdzv_endpoint else "static"
    )
    more = _pairs(configuration.rdzv_conf)
    meeting: dict[str, Any] = {}
    if plan.machines[1] > 1:
        # Machine 0 hosts the rendezvous, under whatever name the others know it.
        if arguments.nnodes is None and backend == "c10d":
            more.setdefault("is_host", str(configuration.machine_rank == 0))
        if backend == "static":
            more["rank"] = configuration.machine_rank
        endpoint = arguments.rdzv_endpoint or configuration.main_process_ip
        if ":" not in (arguments.rdzv_endpoint or ""):
            endpoint = f"{endpoint}:{configuration.main_process_port or environment.DEFAULT_PORT}"
        meeting = {
            "endpoint": endpoint,
            "backend": backend,
            "job": arguments.rdzv_id or "cadence",
            "rendezvous": more,
        }
    elif configuration.main_process_port:
        meeting["endpoint"] = f"127.0.0.1:{configuration.main_process_port}"
    return run_group(
        Group(
            command=plan.command,
            processes=plan.processes,
            machines=plan.machines,
            max_restarts=configuration.max_restarts,
            monitor_interval=configuration.monitor_interval,
            shutdown_timeout=arguments.shutdown_timeout or 300,
            log_dir=arguments.log_dir,
            tee=arguments.tee or "0",
            **meeting,
        )
    )


def _pairs(text: str) -> dict[str, Any]:
    """Return ``"a=1,b=2"`` as a mapping."""
    pairs = [each.partition("=") for each in text.split(",") if each]
    for _, equals, _ in pairs:
        if not equals:
            raise argparse.ArgumentTypeError(
                f"--rdzv_conf is {text!r}; it must be like timeout=600,keep_alive_interval=5."
            )
    return {name.strip(): value.strip() for name, _, value in pairs}


def _slurm(arguments: argparse.Namespace, configuration: LaunchConfiguration) -> str:
    if arguments.nnodes is not None:
        raise argparse.ArgumentTypeError("--slurm takes --num_machines, not --nnodes.")
    if configuration.max_restarts:
        raise argparse.ArgumentTypeError(
            "--slurm takes no --max_restarts: SLURM itself requeues a job."
        )
    variables = configuration.variables
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # SLURM sets it
    command = _command(arguments, noted=False)
    if not arguments.no_python:
        command[0] = "python"  # the one in the environment of the nodes
    return batch_script(
        command,
        machines=configuration.num_machines,
        processes=_processes(arguments, configuration),
        cpu=_on_cpu(configuration),
        threads=configuration.num_cpu_threads_per_process,
        variables=variables,
        options=arguments.sbatch or (),
    )


def _show(plan: Plan) -> None:
    least, most = plan.machines
    machines = str(least) if least == most else f"{least} to {most}"
    how = "replaced by the command" if plan.here else "watched by torch's elastic agent"
    echo(f"processes on this machine  {plan.processes}, {how}")
    echo(f"machines                   {machines}")
    for name, value in sorted(plan.variables.items()):
        echo(f"{name:<26} {value}")
    echo(f"command                    {shlex.join(plan.command)}")
