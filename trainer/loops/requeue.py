"""A SLURM job that puts itself back into the queue when its time is over."""

from __future__ import annotations

import logging
import signal
import subprocess

from trainer.environment import slurm_job
from trainer.loops.signals import OUT_OF_TIME, exit_code

logger = logging.getLogger(__name__)

_LIMIT = 60.0  # seconds; the controller may be busy


def requeue(code: int) -> None:
    """Ask SLURM to run this job again, if it is the end of its time that ended the run.

    That is SIGUSR1, which ``sbatch --signal=USR1@120`` sends so many seconds before, and the end of
    ``max_time``. After Ctrl-C and SIGTERM (``scancel``) somebody wants the end; where SLURM takes
    the machine back for another job, it requeues by itself. Outside of SLURM nothing is done; a
    failure is told in the log.

    Args:
        code: What the run exits with.
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
