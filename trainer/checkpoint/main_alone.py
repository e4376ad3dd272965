"""Let the main process save replicated state alone, if the other processes do not call the save.

Many scripts call ``save_state`` inside ``if accelerator.is_main_process:``. A process cannot know
whether the others will call it too, so they coordinate through the store of the process group:

- A process other than the main one records that it has called; the save is then joint.
- The main process saves alone if no other has called by the time that all others wait elsewhere or
  have begun another backward pass, or after some seconds. It remembers the outcome for the line of
  the program that called it. Later calls from that line wait longer, or save alone at once.
- A process that calls after such a save adds its own files to the committed folder.

The whole state is one value of the store, which is changed only by compare-and-set::

    ""                                                nobody has come
    "joint"                                           a process has come: all meet in collectives
    {"number": 1, "progress": [0, 8, [8]], "calls": 1,     the latest save of the main process alone
     "path": "/runs/state", "status": "saved", "added": [2]}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.distributed import guards
from trainer.errors import CheckpointError, DistributedOperationException
from trainer.state import PartialState

_KEY = "cadence/save_state"
_JOINT = "joint"
_PATIENCE = 3.0  # seconds to wait for other processes, at a line that has not saved before
_MEETING = 30.0  # seconds in which all processes should arrive
_PAUSE = 0.01  # seconds between polls of the store


@dataclass(frozen=True, kw_only=True)
class MainProcess:
    """The main process, as if it were the only one; see `trainer.checkpoint.save.Ranks`."""

    is_main_process: bool = True
    is_local_main_process: bool = True
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1

    def set_device(self) -> None:
        """Do nothing: the save is not in the background."""


@dataclass(frozen=True, kw_only=True)
class SaveAlone:
    """A save that the main process made alone.

    Attributes:
        number: The number of such saves so far.
        progress: The main process's progress; see `join_or_find`.
        calls: The number of them with the same progress.
        path: The committed folder.
        status: ``"saving"``, ``"saved"``, ``"failed"``, or ``"adding"`` while a process adds files.
        added: The ranks that have added their files.
    """

    number: int
    progress: Any
    calls: int = 1
    path: str = ""
    status: str = "saving"
    added: list[int] = field(default_factory=list)


@dataclass
class _Memory:
    """A process's memory of earlier saves.

    Attributes:
        joint: On the main process, whether the save was joint, by calling line of the program.
        line: On the main process, the line of its latest save alone.
        number: The number of that save.
        progress: On other processes, the progress at the latest call.
        calls: On other processes, the number of calls with that progress.
    """

    joint: dict[Any, bool] = field(default_factory=dict)
    line: Any = None
    number: int = 0
    progress: Any = None
    calls: int = 0


def _memory() -> _Memory:
    memory: _Memory = PartialState().__dict__.setdefault("_saves", _Memory())
    return memory


def _line_of_caller() -> Any:
    """Return a key for the line of the program that called, including its call stack."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return tuple(lines)


def save_alone(progress: Any) -> bool:
    """Decide on the main process whether it saves alone; if not, the save is joint.

    Args:
        progress: See `join_or_find`.
    """
    memory = _memory()
    line, number, latest = _line_of_caller(), memory.number + 1, _parsed(_read())
    if latest is not None and latest.number == memory.number and latest.added:
        memory.joint[memory.line] = True  # the others were only late
    is_joint, begun = memory.joint.get(line), time.monotonic()
    patience = 0.0 if is_joint is False else _MEETING if is_joint else _PATIENCE
    with guards.waiting:
        while (value := _read()) != _JOINT:
            latest, waited = _parsed(value), time.monotonic() - begun
            calls = latest.calls + 1 if latest and latest.progress == progress else 1
            alone = SaveAlone(number=number, progress=progress, calls=calls)
            adds = latest is not None and latest.status == "adding"
            if adds or (waited < patience and not _others_are_elsewhere()):
                time.sleep(_PAUSE)
            elif is_joint and waited >= patience:
                _swap(value, _JOINT)  # the collective reports which rank is missing
            elif _swap(value, _text(alone)):
                memory.joint[line], memory.line, memory.number = False, line, number
                return True
    memory.joint[line] = True
    return False


def end_alone(path: Path | None) -> None:
    """On the main process, announce that it saved alone to a folder; None if that failed."""
    latest = _parsed(value := _read())
    assert latest is not None
    status = "failed" if path is None else "saved"
    _swap(value, _text(replace(latest, path=str(path or ""), status=status)))


def join_or_find(progress: Any) -> SaveAlone | None:
    """On another process, record its call; return the save that it came too late for, if any.

    Args:
        progress: The progress of the program, which is equal on all processes at the same call.

    Raises:
        CheckpointError: The main process failed to make this save.
    """
    memory = _memory()
    memory.calls = memory.calls + 1 if memory.progress == progress else 1
    memory.progress = progress
    with guards.waiting:
        while True:
            latest = _parsed(value := _read())
            if latest is None or latest.progress != progress or latest.calls < memory.calls:
                if value == _JOINT or _swap(value, _JOINT):
                    return None
            elif latest.status == "failed":
                raise CheckpointError("save_state failed on the main process, see its error.")
            elif latest.status == "saved":
                return replace(latest, number=latest.number - latest.calls + memory.calls)
            time.sleep(_PAUSE)


def add(save: SaveAlone, rank: int, work: Callable[[], object]) -> bool:
    """Run a function that adds a process's files to a save, one process at a time.

    Returns:
        Whether it was run. It is not if the main process has saved again meanwhile.
    """
    while (latest := _parsed(value := _read())) and latest.number == save.number:
        if latest.status == "saved" and _swap(value, _text(replace(latest, status="adding"))):
            try:
                work()
            finally:
                added = replace(latest, added=[*latest.added, rank])
                _swap(_text(replace(latest, status="adding")), _text(added))
            return True
        time.sleep(_PAUSE)
    return False


def forget() -> None:
    """Reset for the next save: all processes have joined this one, or it has failed."""
    if (value := _read()) == _JOINT:
        _swap(value, "")


def wait_for_all_ranks(rank: int, size: int) -> None:
    """Wait in the store for all processes, for a save that no process may make alone.

    This comes before the first collective of the save. A process that has moved on may be in a
    collective of the models, which could be mistaken for one of the save.

    Raises:
        DistributedOperationException: A process has gone on to the next forward pass.
    """
    store = guards.store_of(None)
    store.set(f"{_KEY}/{rank}", str(guards.call_counts.joint))
    keys = {peer: f"{_KEY}/{peer}" for peer in range(size)} if rank == 0 else {}
    until = time.monotonic() + _MEETING  # then the collective reports which rank is missing
    with guards.waiting:
        while missing := [n for n, key in keys.items() if not _has_come(store, key)]:
            if gone := [peer for peer in guards.call_counts.ahead("forward") if peer in missing]:
                raise DistributedOperationException(
                    "save_state was called by the main process, but rank "
                    f"{', '.join(map(str, gone))} has already started the next forward pass. "
                    "Each process holds a part of the state: call save_state on all of them, "
                    "outside of `if accelerator.is_main_process:`."
                )
            if time.monotonic() > until or {*missing} <= {*guards.waiting_ranks()}:
                break
            time.sleep(_PAUSE)


def _others_are_elsewhere() -> bool:
    elsewhere = {*guards.waiting_ranks(), *guards.call_counts.ahead("backward")}
    return len(elsewhere - {0}) == PartialState().num_processes - 1


def _has_come(store: Any, key: str) -> bool:
    return store.check([key]) and int(store.get(key)) >= guards.call_counts.joint


def _read() -> str:
    store = guards.store_of(None)
    return store.get(_KEY).decode() if store.check([_KEY]) else ""


def _swap(seen: str, new: str) -> bool:
    stored: bytes = guards.store_of(None).compare_set(_KEY, seen, new)
    return stored.decode() == new


def _text(save: SaveAlone) -> str:
    return json.dumps(asdict(save))


def _parsed(value: str) -> SaveAlone | None:
    return SaveAlone(**json.loads(value)) if value not in ("", _JOINT) else None
