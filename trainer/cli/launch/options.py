"""The arguments of `trainer launch`, under the names that users of other launchers know."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from trainer.cli.parsing import command_parser, count
from trainer.configuration import DynamoBackend, PrecisionType

# Options of the documented API that ask for what is not there, and what that is.
_REFUSED = {
    "--use_deepspeed": "DeepSpeed",
    "--use_fsdp": "FSDP",
    "--use_megatron_lm": "Megatron-LM",
    "--use_parallelism_config": "model parallelism",
    "--tpu": "a TPU",
}


class _OneSpelling(argparse.RawDescriptionHelpFormatter):
    """Shows an option with ``_`` alone, though ``-`` is taken too."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [
            name for name in action.option_strings if "-" not in name[2:]
        ] or action.option_strings
        return super()._format_action_invocation(shown)


class _Refuse(argparse.Action):
    """Says that an engine is not there, where it is asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002  # argparse's signature
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string} asks for {self.const}, which is not supported yet: this release "
            "trains on one device, or data parallel on several"
        )


class _Script(argparse.Action):
    """Tells the script from its arguments."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        words = values[values[0] == "--" :]
        if not words:
            parser.error("the script is missing")
        namespace.script, namespace.script_arguments = words[0], words[1:]


def parser(prog: str) -> argparse.ArgumentParser:
    """The arguments of `trainer launch`, None or False where not given, but for the script's."""
    made = command_parser(
        prog,
        "Start a script on one or more processes, on one or more machines. What is not given here "
        "comes from the file of `trainer config`, then from the environment.",
        examples=[
            ("with what the file or the machine says", "train.py --epochs 3"),
            ("two processes on the CPU", "--cpu --num_processes 2 train.py"),
            ("a module of a package", "--num_processes 2 -m mypackage.train --epochs 3"),
            (
                "on the second of two machines with four devices each",
                "--num_machines 2 --machine_rank 1 --num_processes 8 --main_process_ip node0 "
                "train.py",
            ),
            ("start all again up to three times after one has failed", "--max_restarts 3 train.py"),
            ("a batch script for SLURM", "--slurm --num_machines 2 --num_processes 8 train.py"),
            ("look at what would be started", "--dry_run --cpu --num_processes 2 train.py"),
        ],
        codes={
            0: "done",
            1: "the script failed, or the code that the first failing process exited with",
            124: "the run's max_time was over: it is saved",
            138: "SIGUSR1: it is saved",
            143: "SIGTERM: it is saved",
        },
    )
    made.formatter_class = _OneSpelling
    made.usage = "%(prog)s [OPTION ...] script.py [ARGUMENT ...]"  # there are more than thirty
    _processes(made)
    _training(made)
    _meeting(made)
    _output(made)
    refused = made.add_argument_group("not supported yet")
    for name, engine in _REFUSED.items():
        _add(refused, name, action=_Refuse, nargs=0, const=engine, help=argparse.SUPPRESS)
    refused.description = ", ".join(_REFUSED)
    made.add_argument(
        "script",
        nargs=argparse.PARSER,  # one word and all that follow, a -- among them too
        action=_Script,
        metavar="script.py",
        help="what to run, with -m a module; and its own arguments",
    )
    return made


def _add(group: argparse._ActionsContainer, *names: str, **kwargs: Any) -> None:
    """Add an option under each name with ``_`` and with ``-``."""
    kwargs.setdefault("dest", names[0].lstrip("-"))
    spellings = [each for name in names for each in (name, "--" + name[2:].replace("_", "-"))]
    group.add_argument(*dict.fromkeys(spellings), **kwargs)


def _processes(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("processes")
    _add(group, "--config_file", type=Path, metavar="FILE", help="not that of `trainer config`")
    _add(group, "--num_processes", type=count, metavar="N", help="of all machines together")
    _add(
        group,
        "--nproc_per_node",
        type=count,
        metavar="N",
        help="of this machine alone, in place of --num_processes",
    )
    _add(group, "--cpu", action="store_true", help="use the CPU though an accelerator is there")
    _add(
        group,
        "--multi_gpu",
        action="store_true",
        help="use every accelerator of this machine, whatever the file says",
    )
    _add(group, "--gpu_ids", metavar="IDS", help="the devices to use: 0,1 or all")
    group.add_argument("-m", "--module", action="store_true", help="run a module, as python -m")
    _add(group, "--no_python", action="store_true", help="run a program that is no Python script")
    _add(
        group,
        "--num_cpu_threads_per_process",
        type=count,
        metavar="N",
        help="OMP_NUM_THREADS; by default the cores are shared out",
    )


def _training(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("training")
    _add(group, "--mixed_precision", choices=PrecisionType.list(), help="of the Accelerator")
    _add(
        group,
        "--gradient_accumulation_steps",
        type=count,
        metavar="N",
        help="micro-batches for one update",
    )
    _add(
        group,
        "--dynamo_backend",
        type=str.lower,
        choices=[name.lower() for name in DynamoBackend.list()],
        metavar="NAME",
        help="compile the steps, with inductor for example",
    )
    _add(group, "--dynamo_mode", metavar="MODE", help="what torch.compile optimises for")
    _add(group, "--dynamo_use_fullgraph", action="store_true", help="no graph breaks")
    _add(group, "--dynamo_use_dynamic", action="store_true", help="for changing shapes")
    _add(group, "--debug", action="store_true", help="compare shapes before collectives")


def _meeting(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("machines and restarts")
    _add(group, "--num_machines", type=count, metavar="N", help="how many take part")
    _add(
        group,
        "--nnodes",
        metavar="MIN:MAX",
        help="as many as are there, with --nproc_per_node and --rdzv_endpoint",
    )
    _add(group, "--machine_rank", "--node_rank", type=int, metavar="N", help="this one, from 0")
    _add(group, "--main_process_ip", "--master_addr", metavar="HOST", help="machine 0")
    _add(
        group,
        "--main_process_port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="0: a free one",
    )
    _add(group, "--max_restarts", type=int, metavar="N", help="start all again after a failure")
    _add(group, "--monitor_interval", type=float, metavar="SECONDS", help="between two looks")
    _add(group, "--rdzv_backend", choices=("static", "c10d"), help="how machines meet")
    _add(group, "--rdzv_endpoint", metavar="HOST[:PORT]", help="where, for c10d")
    _add(group, "--rdzv_id", metavar="NAME", help="of this job, the same on all machines")
    _add(group, "--rdzv_conf", metavar="KEY=VALUE,…", help="more for it, such as timeout=600")
    _add(
        group,
        "--shutdown_timeout",
        type=count,
        metavar="SECONDS",
        help="how long processes may save after a signal (default 300)",
    )
    for name in ("--same_network", "--enable_cpu_affinity", "--downcast_bf16"):  # mean nothing here
        _add(group, name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--main_training_function", "--role"):
        _add(group, name, help=argparse.SUPPRESS)


def _output(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("output")
    _add(group, "--log_dir", metavar="DIR", help="keep what each process says in files there")
    _add(
        group,
        "--tee",
        choices="0123",
        help="to files and to the terminal: 1 is stdout, 2 stderr, 3 both",
    )
    group.add_argument(
        "-q", "--quiet", action="store_true", help="no notes about the configuration file"
    )
    _add(group, "--dry_run", action="store_true", help="show what would be started, and stop")
    _add(group, "--slurm", action="store_true", help="print a batch script for SLURM, and stop")
    _add(
        group,
        "--sbatch",
        action="append",
        metavar="OPTION",
        help="a line for that script, such as --sbatch=--time=04:00:00; may be repeated",
    )
