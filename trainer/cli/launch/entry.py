"""What each process of `trainer launch` runs: the user's script, and a note of how it ended.

The launcher reads the note, and shows the exception that came first when all have ended. Nothing
but the standard library is imported, and this file is run by its path: what the script may import,
such as a `trainer.py` of its own, is what it may import under plain ``python``.

    python entry.py script.py arguments
    python entry.py -m module arguments
"""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import redirect_stderr
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

MARK = "CADENCE_NOTED"  # the variable with the number of the process whose notes are read
REFUSED = "Refusal"  # the kind of a failure that another attempt would end with too
ENDED = "ended.json"  # the note of a run that was told to end, beside torch's file for errors
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_OURS = (__file__, runpy.__file__, "<frozen runpy>")


class _Main(ModuleType):
    """What `multiprocessing` takes for ``__main__``: the script, from when on it is that.

    Processes that the script spawns know it by this name, and send back objects of its classes.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(sys.modules["__main__"], name)


def main() -> None:
    """Run the script as ``__main__``, with its own arguments and its own folder to import from."""
    arguments = sys.argv[1:]
    os.environ[MARK] = str(os.getpid())
    end_with_the_launcher()
    if "__mp_main__" in sys.modules:  # of tools that are loaded as Python starts: coverage, say
        sys.modules["__mp_main__"] = _Main("__mp_main__")
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            _import_from(os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            _import_from(os.path.dirname(os.path.realpath(arguments[0])))
            _run_file(os.path.abspath(arguments[0]))
    except SystemExit as end:
        if _is_a(end, "trainer.errors", "Preempted"):
            # Not a failure, after which torch would end the others in their tear-down, or start
            # all again. The launcher exits with the code.
            _write(ENDED, {"code": end.code, **_who()})
            sys.exit(0)
        told = _is_a(end, "trainer.cli.telling", "Told")  # as commands of ours end
        if end.code not in (None, 0) and not told:
            text = str(end.code)
            code = 1
            if not isinstance(end.code, str):
                text = f"it exited with code {text}."
                code = end.code if isinstance(end.code, int) else 1
            if note("SystemExit", text, code) and text == end.code and not is_started_again():
                sys.exit(1)  # the launcher says it
        raise
    except BaseException as error:  # noqa: BLE001  # whatever ends a script
        _fail(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def end_with_the_launcher() -> None:
    """Have SIGTERM sent when the launcher is gone: nobody else would end this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _import_from(folder: str) -> None:
    """Put the folder in the place of this file's, which is missing under ``-P``."""
    if not getattr(sys.flags, "safe_path", False):  # new in 3.11
        sys.path[0] = folder


def _run_file(path: str) -> None:
    # Not runpy.run_path: it changes argv, and takes the module away before threads and exit
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
    """Leave the exception to the launcher; show it here where the launcher does not come to it."""
    kind, own = type(error), _own(error.__traceback__)
    error.__traceback__ = own
    text = "".join(traceback.format_exception(error))
    if not note(kind.__name__, text) or is_started_again():
        sys.excepthook(kind, error, own)
        return
    # A service may have a hook that sends the exception home. What hooks print, the launcher says.
    with redirect_stderr(io.StringIO()):
        sys.excepthook(kind, error, own)
    rank = os.environ.get("RANK", "?")
    print(f"rank {rank} has failed: {kind.__name__}", file=sys.stderr, flush=True)


def _own(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from where the user's code begins."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    return frames


def _is_a(end: SystemExit, module: str, name: str) -> bool:
    """Whether it is of a class that this file must not import."""
    return any((each.__module__, each.__name__) == (module, name) for each in type(end).__mro__)


def _who() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "rank": os.environ.get("RANK", "?"),
        "world_size": os.environ.get("WORLD_SIZE", "?"),
    }


def note(kind: str, text: str, code: int = 1) -> bool:
    """Write torch's file for errors, with what it has no place for; whether there is one.

    Args:
        kind: Of the failure, such as the exception's type.
        text: What the launcher says of it.
        code: What this process is about to exit with, should it be ended before.
    """
    now = time.time()
    more = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "kind": kind, **_who()}
    more["code"] = code
    error = {"message": {"message": text, "extraInfo": more}}
    return _write(None, error)


def _write(name: str | None, content: object) -> bool:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or file == os.devnull:
        return False
    path = file if name is None else os.path.join(os.path.dirname(file), name)
    aside = f"{path}.writing"  # the launcher may end this process meanwhile, and read half of it
    with open(aside, "w", encoding="utf-8") as opened:
        json.dump(content, opened)
    os.replace(aside, path)
    return True


def is_started_again() -> bool:
    """All processes will be, after this one has failed."""
    return _number("TORCHELASTIC_RESTART_COUNT") < _number("TORCHELASTIC_MAX_RESTARTS")


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))


if __name__ == "__main__":
    main()
