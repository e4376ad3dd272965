"""A batch script for SLURM: one task for each process, started by `srun`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_GRACE = 120  # seconds before the end of its time that a job is told


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
    """The text of the script.

    SLURM tells each task its rank, and the script takes it from there: there is no other launcher
    in between. Shortly before its time is over the job is told by SIGUSR1; the run is saved
    and, with ``Trainer(slurm_requeue=True)``, put back into the queue, from where it goes on.

    Args:
        command: What each task runs.
        machines: How many nodes.
        processes: How many processes on each.
        cpu: No GPUs are asked for.
        threads: Cores for each process; None for what the cluster gives.
        variables: To be exported.
        options: More for ``sbatch``, such as ``"--time=04:00:00"``.
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
        exported["SRUN_CPUS_PER_TASK"] = str(threads)  # srun does not take it from sbatch
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {each}" for each in asked),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())),
            "",
            "# A task that is done must not end the others, which may still be saving.",
            f"exec srun --kill-on-bad-exit=0 {shlex.join(command)}",
            "",
        ]
    )
