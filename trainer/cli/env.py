"""The command `trainer env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from trainer._siblings import PACKAGES, locate, shadows
from trainer.cli.parsing import command_parser
from trainer.cli.version import version


def parser(prog: str) -> argparse.ArgumentParser:
    """The arguments of `trainer env`."""
    return command_parser(
        prog,
        "Show the versions, the devices and the files in use.",
        codes={0: "done", 1: "a file of yours is imported instead of one of our packages"},
    )


def run(_: argparse.Namespace) -> int:
    """Print the table; return 1 if a file in this folder is in the way of our packages."""
    import torch  # the one command that pays for it

    rows = [
        ("cadence", version()),
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
