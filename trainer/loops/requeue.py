"""Requeue a SLURM job that has reached its time limit."""

from __future__ import annotations

import logging
import signal
import subprocess

from trainer.environment import slurm_job
from trainer.loops.signals import OUT_OF_TIME, exit_code

logger = logging.getLogger(__name__)

_LIMIT = 60.0  # seconds; the controller may be busy


def requeue(code: int) -> None:
    """Ask SLURM to requeue this job if the run ended because of its time limit.

    That is: after SIGUSR1, which ``sbatch --signal=USR1@120`` sends 120 seconds before the limit,
    or after ``max_time``. After Ctrl-C and SIGTERM (``scancel``) the job is not requeued, since
    somebody wants it to end. A job that SLURM preempts for another one is requeued by SLURM itself.
    Outside SLURM nothing is done. A failure is logged.

    Args:
        code: The run's exit code.
    """
    job = slurm_job()
    if job is None or code not in (OUT_OF_TIME, exit_code(signal.SIGUSR1)):
        return
    try:
        subprocess.run(
            ["scontrol", "requeue", job],
            check=True,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
        )
    except subprocess.CalledProcessError as error:
        logger.error("SLURM did not requeue job %s: %s", job, error.stderr.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("SLURM did not requeue job %s: %s", job, error)
    else:
        logger.warning("SLURM has put job %s back into its queue.", job)
