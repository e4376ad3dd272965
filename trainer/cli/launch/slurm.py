"""A batch script for SLURM: one task for each process, started by `srun`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_GRACE = 120  # seconds before its time limit that a job is signalled


def batch_script(
    command: Sequence[str],
    *,
    machines: int,
    processes: int,
    cpu: bool,
    threads: int | None,
    variables: Mapping[str, str],
    options: Sequence[str] = (),
) -> str:
    """Return the text of the script.

    SLURM tells each task its rank; there is no other launcher in between. Shortly before its time
    limit the job gets SIGUSR1: the run is saved and, with ``Trainer(slurm_requeue=True)``, requeued
    and later resumed.

    Args:
        command: The command of each task.
        machines: The number of nodes.
        processes: The number of processes on each node.
        cpu: Request no GPUs.
        threads: Cores for each process; None for the cluster's default.
        variables: Environment variables to export.
        options: More options of ``sbatch``, such as ``"--time=04:00:00"``.
    """
    asked = [
        f"--nodes={machines}",
        f"--ntasks-per-node={processes}",
        *([] if cpu else [f"--gpus-per-node={processes}"]),
        *([f"--cpus-per-task={threads}"] if threads else []),
        f"--signal=USR1@{_GRACE}",
        "--requeue",
        "--open-mode=append",
        *options,
    ]
    exported = dict(variables)
    if threads:
        exported["SRUN_CPUS_PER_TASK"] = str(threads)  # srun does not inherit it from sbatch
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {each}" for each in asked),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())),
            "",
            "# A task that has ended must not end the others, which may still be saving.",
            f"exec srun --kill-on-bad-exit=0 {shlex.join(command)}",
            "",
        ]
    )
