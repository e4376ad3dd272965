"""A file lock that lets one run at a time use a folder.

It is a kernel lock (``flock``) on a file that describes the holder. The kernel releases it when the
process ends, even if it is killed. The file is deleted when the lock is released normally::

    runs/digits/.cadence-lock       {"host": …, "pid": …, "since": …, "run_id": …}

A file left by a killed process locks nothing. The lock belongs to the open file description, which
forked children share. A ``DataLoader`` worker that outlives its killed run would therefore keep the
lock, so children close the file when they start. (A ``lockf`` lock is not inherited, but it is lost
as soon as any code in the process opens and closes the file.)
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from trainer.errors import module_logger, printable
from trainer.files import read_json, regular
from trainer.strict_json import dumps

LOCK = ".cadence-lock"

_ATTEMPTS = 10  # another process's `holder_of` holds the lock briefly
_PAUSE = 0.05  # seconds between attempts

_open: set[int] = set()  # descriptors of lock files, for children to close

logger = module_logger(__name__)


@contextmanager
def alone_in(folder: Path) -> Iterator[Callable[[str], None]]:
    """Lock a folder for this run. It is created if needed, and removed at the end if empty.

    If the file system has no locks, a warning is logged. There is no warning if ``folder`` is a
    file.

    Args:
        folder: The folder.

    Yields:
        A function that records the run's id, which other runs show if they cannot start.

    Raises:
        ValueError: Another run, perhaps of this process, uses the folder (the message names it); or
            the user may not create the folder or write to it.
    """
    descriptor, made = None, [p for p in (folder, *folder.parents) if not os.path.exists(p)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(folder / LOCK)
    except (FileExistsError, NotADirectoryError):
        pass  # it is a file: the first write into it raises a clear error
    except OSError as error:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(
                f"{folder} cannot be created or written to: {error.strerror}. Give a project_dir "
                "or dirpath that this user can write to."
            ) from error
        logger.warning("%s cannot be locked against other runs: %s.", folder, error)
    try:
        _write_holder(descriptor, None)
        yield partial(_write_holder, descriptor)
    finally:
        if descriptor in _open:  # a forked child has closed it
            _release(descriptor, folder / LOCK)
        for directory in made:
            try:
                directory.rmdir()
            except OSError:  # usually it is not empty, or it was never created
                break


def holder_of(folder: Path) -> str | None:
    """Return a description of the run that has locked a folder; None if there is none."""
    try:
        descriptor = _open_file(folder / LOCK, os.O_RDONLY)
    except OSError:  # usually the file does not exist
        return None
    try:
        _lock(descriptor, exclusive=False)
    except BlockingIOError:
        return _named(folder / LOCK)
    except OSError:  # no locks on this file system; the run logs it
        return None
    finally:
        _close(descriptor)
    return None


def _acquire(file: Path) -> int:
    """Lock a file.

    Returns:
        The descriptor of the locked file.

    Raises:
        ValueError: Another run holds the lock.
        OSError: The file cannot be created, or the file system has no locks.
    """
    for _ in range(_ATTEMPTS):
        descriptor = _open_file(file, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor, exclusive=True)
            if _is_same_file(file, descriptor):
                return descriptor  # not deleted in between by a run that ended
        except BlockingIOError:
            pass
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)
        time.sleep(_PAUSE)
    raise ValueError(
        f"{file.parent} is in use by {_named(file)}. Wait until it ends, or give this run "
        f"another project_dir. (If its machine failed and the lock remains, delete {file}.)"
    )


def _release(descriptor: int, file: Path) -> None:
    try:
        if _is_same_file(file, descriptor):  # otherwise the path is another run's file
            file.unlink()  # while locked, so that a process waiting for the lock sees it is gone
    except OSError as error:
        logger.warning("%s is no longer needed but could not be deleted: %s", file, error)
    finally:
        _close(descriptor)


def _write_holder(descriptor: int | None, run_id: str | None) -> None:
    if descriptor is None:
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "run_id": run_id}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, dumps(owner).encode(), 0)
    except OSError as error:  # the lock is held nevertheless
        logger.warning("The holder could not be written to the lock file: %s.", error)


def _named(file: Path) -> str:
    try:
        owner = read_json(file)
        run = f", run {owner['run_id']}" if owner["run_id"] else ""
        return printable(f"process {owner['pid']} on {owner['host']} (since {owner['since']}{run})")
    except (OSError, ValueError, KeyError, TypeError):  # it is being written or deleted
        return "another process"


def _lock(descriptor: int, *, exclusive: bool) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "this system has no file locks") from error
    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def _is_same_file(file: Path, descriptor: int) -> bool:
    """Return whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _open_file(file: Path, flags: int) -> int:
    descriptor = regular(file, flags)
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
