"""Requeueing of a SLURM job whose time is over."""

from __future__ import annotations

import logging
import signal
import subprocess

from trainer.environment import slurm_job
from trainer.loops.signals import OUT_OF_TIME, exit_code

logger = logging.getLogger(__name__)

_LIMIT = 60.0  # seconds; the controller may be busy


def requeue(code: int) -> None:
    """Ask SLURM to requeue this job if the run ended because its time was over.

    That means SIGUSR1, which ``sbatch --signal=USR1@120`` sends that many seconds early, or the end
    of ``max_time``. Ctrl-C and SIGTERM (``scancel``) mean that somebody wants the job to end; when
    SLURM preempts the job for another one, it requeues it by itself. Outside SLURM nothing is done;
    a failure is logged.

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
