"""The program of each `trainer launch` process: run the user's script, then record how it ended.

When all processes have ended, the launcher reads these records and shows the first exception. Only
the standard library is imported, and this file is run by its path, so the script can import the
same modules as under plain ``python``, including its own `trainer.py`.

    python entry.py script.py arguments
    python entry.py -m module arguments
"""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import redirect_stderr
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

ERROR_PID = "CADENCE_ERROR_PID"  # the variable with the id of the process whose error file is read
LAUNCHER = "CADENCE_LAUNCHER"  # the variable with the id of the launcher
PATIENCE = "CADENCE_SHUTDOWN_TIMEOUT"  # the variable with the seconds to save in without it
SHUTDOWN_TIMEOUT = 300  # seconds for processes to save after a signal
REFUSED = "Refusal"  # the kind of a failure that would recur after a retry
ENDED = "ended.json"  # the record of a run that ended after a signal, next to torch's error file
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_OURS = (__file__, runpy.__file__, "<frozen runpy>")


class _Main(ModuleType):
    """The module that `multiprocessing` calls ``__mp_main__``: the script once it is ``__main__``.

    Processes that the script spawns import it by this name, and send back objects of its classes.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(sys.modules["__main__"], name)


def main() -> None:
    """Run the script as ``__main__``, with its arguments, importing from its folder."""
    arguments = sys.argv[1:]
    os.environ[ERROR_PID] = str(os.getpid())
    launcher = int(os.environ.pop(LAUNCHER, os.getppid()))
    end_with_the_launcher(launcher, int(os.environ.pop(PATIENCE, SHUTDOWN_TIMEOUT)))
    if "__mp_main__" in sys.modules:  # set by tools that Python loads at startup, such as coverage
        sys.modules["__mp_main__"] = _Main("__mp_main__")
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            _import_from(os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            path = os.path.abspath(arguments[0])
            if pkgutil.get_importer(path):  # a folder or an archive with a __main__.py
                _import_from(path)
                runpy.run_path(path, run_name="__main__")
            else:
                _import_from(os.path.dirname(os.path.realpath(path)))
                _run_file(path)
    except SystemExit as end:
        if _is_preempted(end):
            # Not a failure, since torch would then end the others in their tear-down, or restart
            # all. The launcher exits with the code.
            _write(ENDED, {"code": end.code, **_who()})
            sys.exit(0)
        if end.code and not getattr(end, "reported", False):  # as our own commands report it
            is_text = isinstance(end.code, str)
            text = str(end.code) if is_text else f"it exited with code {end.code}."
            code = end.code if isinstance(end.code, int) else 1
            if write_error_file("SystemExit", text, code) and is_text and not is_started_again():
                sys.exit(1)  # the launcher prints it
        raise
    except BaseException as error:  # noqa: BLE001  # whatever ends a script
        _fail(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def end_with_the_launcher(launcher: int, patience: int = SHUTDOWN_TIMEOUT) -> None:
    """End this process some time after the launcher, since nothing else would.

    SIGTERM asks the program to save and end. Its handler never runs in a process that is stuck, for
    example in a collective, so a thread ends such a process.

    Args:
        launcher: The launcher's process id. If it is already gone, this process exits at once.
        patience: The number of seconds in which to save.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != launcher:
            sys.exit("The parent process has exited.")
    threading.Thread(target=_outlive, args=(launcher, patience), daemon=True).start()


def _outlive(launcher: int, patience: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    time.sleep(patience)
    try:
        sys.stderr.write(
            f"rank {os.environ.get('RANK', '?')} did not end within {patience} seconds after its "
            "launcher, and is stopped.\n"
        )
    finally:  # the terminal may also be gone
        os._exit(1)


def _import_from(folder: str) -> None:
    """Replace this file's folder in ``sys.path``, unless ``-P`` has left it out."""
    if not getattr(sys.flags, "safe_path", False):  # new in 3.11
        sys.path[0] = folder


def _run_file(path: str) -> None:
    # Not runpy.run_path: it changes argv, and removes the module before threads and exit
    # functions that use it have ended.
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=path, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = main_module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102  # the user's script


def _fail(error: BaseException) -> None:
    """Record the exception for the launcher; show it here if the launcher will not."""
    kind, own = type(error), _own(error.__traceback__)
    error.__traceback__ = own
    text = "".join(traceback.format_exception(error))
    if not write_error_file(kind.__name__, text, message=message_of(error)) or is_started_again():
        sys.excepthook(kind, error, own)
        return
    # A library's hook may report the exception. The launcher prints the hook's output.
    with redirect_stderr(io.StringIO()):
        sys.excepthook(kind, error, own)
    rank = os.environ.get("RANK", "?")
    # In one write: print writes the line end separately, so lines of several processes would mix.
    sys.stderr.write(f"rank {rank} has failed: {kind.__name__}\n")
    sys.stderr.flush()


def message_of(error: BaseException) -> str:
    """Return the type and message of an exception without a traceback, even if `str` fails."""
    return "".join(traceback.format_exception_only(type(error), error)).rstrip()


def _own(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback, starting at the user's code."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    return frames


def _is_preempted(end: SystemExit) -> bool:
    """Return whether it is our `Preempted`, which this file must not import."""
    own = ("trainer.errors", "Preempted")
    return any((each.__module__, each.__name__) == own for each in type(end).__mro__)


def _who() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "rank": os.environ.get("RANK", "?"),
        "world_size": os.environ.get("WORLD_SIZE", "?"),
    }


def write_error_file(kind: str, text: str, code: int = 1, *, message: str | None = None) -> bool:
    """Write torch's error file, with additional fields; return whether there is such a file.

    Args:
        kind: The kind of the failure, such as the exception's type.
        text: The text that the launcher prints about it.
        code: The intended exit code of this process, in case it is ended before it exits.
        message: The end of `text` without the traceback, by default all of it.
    """
    now = time.time()
    more = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "kind": kind, **_who()}
    more["code"] = code
    error = {"message": {"message": message or text, "extraInfo": more}}
    return _write(None, error)


def _write(name: str | None, content: object) -> bool:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or file == os.devnull:
        return False
    path = file if name is None else os.path.join(os.path.dirname(file), name)
    aside = f"{path}.writing"  # atomic, since the launcher may end this process at any time
    with open(aside, "w", encoding="utf-8") as opened:
        json.dump(content, opened)
    os.replace(aside, path)
    return True


def is_started_again() -> bool:
    """Return whether all processes will be restarted after this one has failed."""
    return _number("TORCHELASTIC_RESTART_COUNT") < _number("TORCHELASTIC_MAX_RESTARTS")


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))


if __name__ == "__main__":
    main()
