"""The command `trainer launch`: run a script in one or more processes, on one or more machines."""

from __future__ import annotations

import argparse

from trainer.cli.parsing import command_parser
from trainer.launch.options import add_options
from trainer.launch.plan import run as run


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer launch`; options that are not given are None or False."""
    made = command_parser(
        prog,
        "Run a script in one or more processes, on one or more machines. Settings that are not "
        "given here come from the file of `trainer config`, then from the environment.",
        examples=[
            ("with the settings of the file or the machine", "train.py --epochs 3"),
            ("two processes on the CPU", "--cpu --num_processes 2 train.py"),
            (
                "a model sharded over four processes",
                "--num_processes 4 --use_fsdp --fsdp_offload_params true train.py",
            ),
            (
                "a model and its optimizer partitioned by DeepSpeed",
                "--num_processes 4 --use_deepspeed --zero_stage 3 train.py",
            ),
            ("a module of a package", "--num_processes 2 -m mypackage.train --epochs 3"),
            (
                "on the second of two machines with four devices each",
                "--num_machines 2 --machine_rank 1 --num_processes 8 --main_process_ip node0 "
                "train.py",
            ),
            ("restart all processes up to three times after failures", "--max_restarts 3 train.py"),
            ("an unchanged program for Lightning", "--as_lightning train.py"),
            ("a batch script for SLURM", "--slurm --num_machines 2 --num_processes 8 train.py"),
            ("show what would be started", "--dry_run --cpu --num_processes 2 train.py"),
        ],
        codes={
            0: "done",
            1: "the script failed; or the exit code of the process that failed first",
            124: "max_time reached: the run is saved",
            138: "SIGUSR1: the run is saved",
            143: "SIGTERM: the run is saved",
        },
    )
    add_options(made)
    return made
