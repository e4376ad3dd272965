"""The options of `trainer launch`, under the names used by other launchers."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.configuration.fields import Setting
from trainer.enums import DynamoBackend, PrecisionType
from trainer.launch.configuration import STARTED_ON_EACH
from trainer.launch.settings import (
    DYNAMO,
    FP8,
    LAUNCHER,
    SECTIONS,
    count,
    limit,
    three_bools,
    truth,
)

_TPU = f"{STARTED_ON_EACH}, such as by gcloud compute tpus tpu-vm ssh NAME --worker=all"
_SAGEMAKER = "use Amazon SageMaker's launcher, which starts processes like torchrun"
# Options of the documented API that are not supported, with the reason.
REFUSED = {
    **dict.fromkeys(["tpu_cluster", "tpu_use_sudo", "vm", "env"], _TPU),
    **dict.fromkeys(["aws_access_key_id", "aws_secret_access_key"], _SAGEMAKER),
    "mpirun_hostfile": "call MPI: mpirun -hostfile FILE -np 4 trainer launch script.py",
}
_REFUSED_FLAGS = ("tpu_cluster", "tpu_use_sudo")


class _OneSpelling(argparse.RawDescriptionHelpFormatter):
    """Shows an option only with ``_``, though ``-`` is accepted too."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown, names = copy.copy(action), action.option_strings
        shown.option_strings = [name for name in names if "-" not in name[2:]] or names
        return super()._format_action_invocation(shown)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options, and the script with its arguments; omitted options are None or False."""
    parser.formatter_class = _OneSpelling
    parser.usage = "%(prog)s [OPTION ...] script.py [ARGUMENT ...]"  # there are more than thirty
    for add_group in (_processes, _training, _fp8, _sharding, _machines, _output):
        add_group(parser)
    what = "the script, or with -m a module; and its own arguments"
    # One word and all words after it, including a --.
    parser.add_argument("words", nargs=argparse.PARSER, metavar="script.py", help=what)


def _add(group: argparse._ActionsContainer, *names: str, **kwargs: Any) -> None:
    """Add an option under each name, with ``_`` and with ``-``; a flag if only `help` is given."""
    if kwargs.keys() == {"help"}:
        kwargs["action"] = "store_true"
    spellings = [
        spelling for name in names for spelling in (name, name[:2] + name[2:].replace("_", "-"))
    ]
    dest = names[0].lstrip("-")
    group.add_argument(*dict.fromkeys(spellings), dest=dest, **kwargs)


def _nodes(text: str) -> tuple[int, int]:
    """Return "2" as (2, 2) and "1:4" as (1, 4)."""
    match = re.fullmatch(r"([1-9]\d*)(?::(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, or a range such as 1:4")
    return int(match[1]), int(match[2] or match[1])


def _processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    _add(group, "--config_file", type=Path, metavar="FILE", help="the configuration file to use")
    _add(group, "--num_processes", type=count, metavar="N", help="processes on all machines")
    what = "processes on this machine, instead of --num_processes"
    _add(group, "--nproc_per_node", type=count, metavar="N", help=what)
    _add(group, "--cpu", help="use the CPU even if there is an accelerator")
    _add(group, "--multi_gpu", help="use every accelerator of this machine, overriding the file")
    _add(group, "--tpu", help="use the TPU (PJRT_DEVICE), by default a process for each chip")
    _add(group, "--gpu_ids", metavar="IDS", help="the devices to use: 0,1 or all")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--module", action="store_true", help="run a module, as python -m")
    _add(kinds, "--no_python", help="run a program, not a Python script")
    what = "let `import lightning` find trainer.lightning, in the script and in libraries"
    _add(group, "--as_lightning", help=what)
    what = "OMP_NUM_THREADS; by default an equal share of the cores"
    _add(group, "--num_cpu_threads_per_process", type=count, metavar="N", help=what)
    _add(group, "--enable_cpu_affinity", help="bind each process to the cores near its GPU")


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(group, "--mixed_precision", choices=PrecisionType.list(), help="the Accelerator's default")
    what = "micro-batches per update"
    _add(group, "--gradient_accumulation_steps", type=count, metavar="N", help=what)
    _add_settings(group, DYNAMO)
    _add(group, "--debug", help="compare shapes before collectives")


_KINDS: dict[str, dict[str, Any]] = {
    "backend": {
        "type": str.lower,
        "choices": [name.lower() for name in DynamoBackend.list()],
        "metavar": "NAME",
    },
    "bool": {"type": truth, "metavar": "BOOL"},
    "bool_or_name": {"type": truth, "metavar": "BOOL"},
    "bools": {"type": three_bools, "metavar": "BOOL,BOOL,BOOL"},
    "count": {"type": count, "metavar": "N"},
    "device": {"choices": ("none", "cpu", "nvme"), "metavar": "NAME"},
    "flag": {},
    "float": {"type": float, "metavar": "X"},
    "int": {"type": int, "metavar": "N"},
    "limit": {"type": limit, "metavar": "NORM"},
    "mode": {"metavar": "MODE"},
    "names": {"metavar": "NAME"},
    "stage": {"type": int, "choices": range(4)},
    "text": {"metavar": "NAME"},
    "version": {"type": int, "choices": (1, 2)},
}


def _add_settings(group: argparse._ActionsContainer, settings: Mapping[str, Setting]) -> None:
    for name, each in settings.items():
        _add(group, f"--{name}", **_KINDS[each.kind], help=each.help)


def _fp8(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of --mixed_precision fp8")
    _add_settings(group, FP8)


def _sharding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models larger than one device")
    _add(group, "--use_fsdp", help="shard models over the processes; see docs/launching.md")
    _add(group, "--use_deepspeed", help="partition models and optimizers with DeepSpeed's ZeRO")
    _add(group, "--use_parallelism_config", help="combine kinds of parallelism in a mesh")
    _add(group, "--use_megatron_lm", help="divide a model of megatron-core over the processes")
    for _, settings in SECTIONS.values():
        _add_settings(group, settings)


def _machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "machines and restarts",
        "Several machines need a private network: whoever reaches their ports can run code in the "
        "processes. Processes of one machine can be reached from that machine only.",
    )
    _add(group, "--num_machines", type=count, metavar="N", help="number of machines")
    what = "range of the number of machines, with --nproc_per_node and --rdzv_endpoint"
    _add(group, "--nnodes", type=_nodes, metavar="MIN:MAX", help=what)
    _add(
        group,
        "--machine_rank",
        "--node_rank",
        type=int,
        metavar="N",
        help="rank of this machine, from 0",
    )
    _add(group, "--main_process_ip", "--master_addr", metavar="HOST", help="address of machine 0")
    what = "port of machine 0; 0 finds a free one"
    _add(group, "--main_process_port", "--master_port", type=int, metavar="PORT", help=what)
    _add(
        group,
        "--max_restarts",
        type=int,
        metavar="N",
        help="restart all processes after up to N failures",
    )
    _add(group, "--monitor_interval", type=float, metavar="SECONDS", help="time between checks")
    _add(group, "--rdzv_backend", choices=("static", "c10d"), help="rendezvous backend")
    _add(
        group,
        "--rdzv_endpoint",
        metavar="HOST[:PORT]",
        help="rendezvous address of the launchers, for c10d",
    )
    _add(group, "--rdzv_id", metavar="NAME", help="name of the job, the same on all machines")
    _add(group, "--rdzv_conf", metavar="KEY=VALUE,…", help="its settings, such as timeout=600")
    what = "how long processes may save after a signal (default 300)"
    _add(group, "--shutdown_timeout", type=count, metavar="SECONDS", help=what)
    # Options without effect, or rejected ones.
    for name in ("same_network", "downcast_bf16", "no_tpu_cluster", *_REFUSED_FLAGS):
        _add(group, f"--{name}", help=argparse.SUPPRESS)
    for name in ("main_training_function", "role", *LAUNCHER, *REFUSED.keys() - _REFUSED_FLAGS):
        _add(group, f"--{name}", metavar="NAME", help=argparse.SUPPRESS)


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    _add(group, "--log_dir", metavar="DIR", help="write each process's output to files in it")
    what = "also write the output to the terminal: 1 is stdout, 2 stderr, 3 both"
    _add(group, "--tee", "-t", choices="0123", help=what)
    what = "no notes about the configuration file"
    group.add_argument("-q", "--quiet", action="store_true", help=what)
    _add(group, "--dry_run", help="show what would be started, and exit")
    _add(group, "--slurm", help="print a batch script for SLURM, and exit")
    what = "an option for that script, such as --sbatch=--time=04:00:00; may be repeated"
    _add(group, "--sbatch", action="append", metavar="OPTION", help=what)
