"""One run at a time in a folder: a lock that ends with its process, however that ends.

The lock is the kernel's (``flock``), on a file that says who holds it and goes with it::

    runs/digits/.cadence-lock       {"host": …, "pid": …, "since": …, "run_id": …}

A file that a killed process has left locks nothing. Such a lock belongs to the opened file, which
forked children share: a worker that outlives its killed run would hold it on. (``lockf`` has no
such heirs, but there the lock is lost as soon as anything in the process, a backup for example,
opens and closes the file.) So children close it when they begin.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

LOCK = ".cadence-lock"

_ATTEMPTS = 10  # whoever only looks whether a folder is in use holds the lock for a moment
_PAUSE = 0.05  # seconds between them

_open: set[int] = set()  # descriptors of lock files, for children to close

logger = logging.getLogger(__name__)


@contextmanager
def alone_in(folder: Path) -> Iterator[Callable[[str], None]]:
    """Inside, no other run may begin in a folder; it is made, and goes if nothing was put into it.

    Where the folder or its file system cannot be locked a warning of the log says so.

    Args:
        folder: The folder.

    Yields:
        A function to tell the id of the run, for whoever is refused.

    Raises:
        ValueError: Another run is in it, perhaps of this very process. The text names it.
    """
    descriptor, made = None, [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take(folder / LOCK)
    except OSError as error:
        logger.warning("%s cannot be locked against other runs: %s.", folder, error)
    try:
        _tell(descriptor, None)
        yield partial(_tell, descriptor)
    finally:
        if descriptor in _open:  # else this is a child, where it is closed
            _give_up(descriptor, folder / LOCK)
        for each in made:
            try:
                each.rmdir()
            except OSError:  # it is not empty, which is as it should be, or was never made
                break


def holder_of(folder: Path) -> str | None:
    """Who runs in a folder, for a message; None where nobody does, or it cannot be told."""
    try:
        descriptor = _opened(folder / LOCK, os.O_RDONLY)
    except OSError:  # as a rule there is no such file
        return None
    try:
        _lock(descriptor, exclusive=False)
    except BlockingIOError:
        return _named(folder / LOCK)
    except OSError:  # there are no locks here, as the run itself has told
        return None
    finally:
        _close(descriptor)
    return None


def _take(file: Path) -> int:
    """Lock a file.

    Returns:
        Its descriptor.

    Raises:
        ValueError: Somebody else holds it.
        OSError: It cannot be made, or there are no locks.
    """
    for _ in range(_ATTEMPTS):
        descriptor = _opened(file, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor, exclusive=True)
            if _is(file, descriptor):
                return descriptor  # and not what a run that has just ended removed
        except BlockingIOError:
            pass
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)
        time.sleep(_PAUSE)
    raise ValueError(
        f"{file.parent} is in use by {_named(file)}. Wait for its end, or give this run another "
        f"project_dir. (If its machine died and the lock stays, delete {file}.)"
    )


def _give_up(descriptor: int, file: Path) -> None:
    try:
        if _is(file, descriptor):  # else it was deleted, and this one is another run's
            file.unlink()  # while it is locked: whoever opened it before sees that it is gone
    except OSError as error:
        logger.warning("%s is not needed any more but could not be deleted: %s", file, error)
    finally:
        _close(descriptor)


def _tell(descriptor: int | None, run_id: str | None) -> None:
    if descriptor is None:
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    told = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "run_id": run_id}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(told).encode(), 0)
    except OSError as error:  # the lock holds all the same
        logger.warning("The lock does not say who holds it: %s.", error)


def _named(file: Path) -> str:
    try:
        told = json.loads(file.read_bytes())
        run = f", run {told['run_id']}" if told["run_id"] else ""
        return f"process {told['pid']} on {told['host']} (since {told['since']}{run})"
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or ends just now
        return "another process"


def _lock(descriptor: int, *, exclusive: bool) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "this system has no locks on files") from error
    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def _is(file: Path, descriptor: int) -> bool:
    """Whether a file that was opened still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _opened(file: Path, flags: int) -> int:
    descriptor = os.open(file, flags, 0o666)
    _open.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    _open.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
