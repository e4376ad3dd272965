"""The command `trainer`.

trainer --version    the version of Cadence
trainer env          what a report of a problem should say about the machine
trainer checkpoints  what a folder of checkpoints holds, whether it is sound; remove old ones
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from trainer._siblings import DISTRIBUTION, PACKAGES, locate, shadows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 1
    code: int = arguments.command(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="Cadence, a PyTorch trainer.")
    parser.add_argument("--version", action="version", version=f"cadence {_version()}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands")
    env = commands.add_parser("env", help="show the versions, the devices and the files in use")
    env.set_defaults(command=_env)
    _add_checkpoints(commands)
    return parser


def _add_checkpoints(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "checkpoints",
        help="list the checkpoints in a folder, verify them, remove old ones",
        description="List the checkpoints in a folder. Exit codes: 0 all are sound, 1 one is "
        "damaged or was not removed, 2 wrong usage.",
    )
    parser.set_defaults(command=_checkpoints, error=parser.error)
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="the folder of a project, its 'checkpoints' folder, or one checkpoint",
    )
    parser.add_argument("--verify", action="store_true", help="read every file, compare its hash")
    parser.add_argument("--json", action="store_true", help="print JSON")
    prune = parser.add_argument_group("removing")
    prune.add_argument(
        "--prune",
        action="store_true",
        help="remove all but the last, and what killed saves left more than an hour ago",
    )
    prune.add_argument("--keep-last", type=_count, metavar="N", help="keep the N newest sound ones")
    prune.add_argument("--keep-best", metavar="METRIC", help="keep also the best by this metric")
    prune.add_argument("--mode", choices=("min", "max"), help="which value of it is best")
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)


def _checkpoints(arguments: argparse.Namespace) -> int:
    """List, verify and prune checkpoints."""
    from trainer.cli.checkpoints import run

    try:
        return run(arguments)
    except (argparse.ArgumentTypeError, OSError) as error:
        arguments.error(str(error))
        raise  # not reached: the line before ends the process


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _env(_: argparse.Namespace) -> int:
    """Print what a report of a problem should say about the machine."""
    import torch  # the one command that pays for it

    rows = [
        ("cadence", _version()),
        ("python", f"{platform.python_version()} ({platform.platform()})"),
        ("torch", torch.__version__),
        ("devices", ", ".join(_devices())),
        *((name, str(locate(name) or "missing")) for name in PACKAGES),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    in_the_way = shadows(Path.cwd())
    for path in in_the_way:
        print(f"\n{path} is imported instead of Cadence's package by scripts in this folder.")
    return 1 if in_the_way else 0


def _devices() -> list[str]:
    """Return the name of each device that a run could use, the CPU last."""
    import torch

    names = []
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        for index in range(torch.accelerator.device_count()):
            label = torch.cuda.get_device_name(index) if kind.type == "cuda" else kind.type
            names.append(f"{kind.type}:{index} ({label})")
    return [*names, f"cpu ({torch.get_num_threads()} threads)"]
