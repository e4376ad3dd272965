"""Determine which process failed first, and report it."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.launch.entry import REFUSED

_TRACEBACK = "Traceback (most recent call last):"
# Patterns of a lost peer in the first or last line of a communication backend's exception.
_PEER_GONE = re.compile(r"gloo/transport|NCCL|ncclRemoteError|DistBackendError")
_PEER_FAILED = re.compile(r"Rank \d+ failed while the others waited for it")  # of our watchdog
_PATIENCE = 30  # seconds that torch's agent waits for the others before it kills them


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a failed process.

    Attributes:
        rank: Its rank among all processes.
        code: Its exit code; if negative, the signal that ended it.
        seen: The time when the launcher noticed, in whole seconds.
        raised: The time when the process recorded its exception, in seconds; None if it could not.
        kind: The exception's type; "SystemExit" if the script chose its exit code.
        text: The traceback, or the message if there is none.
        who: The process, such as "rank 1 of 3 on gpu7".
        meant: The exit code that the process intended when it recorded its exception.
    """

    rank: int
    code: int
    seen: float
    raised: float | None
    kind: str
    text: str
    who: str
    meant: int = 1

    @property
    def exit_code(self) -> int:
        """The launcher's exit code for this failure, as a shell reports it."""
        if self.raised is not None and self.code < 0:
            return self.meant  # its exception came before the signal
        return self.code if self.code > 0 else 128 - self.code

    @property
    def chosen(self) -> bool:
        """Whether the process ended on purpose: it was interrupted or chose its exit code."""
        return self.kind == "KeyboardInterrupt" or self.text.startswith("it exited with code")

    @property
    def refused(self) -> bool:
        """Whether a command rejected its arguments, so that a retry would fail again."""
        return self.kind == REFUSED

    @property
    def follows(self) -> bool:
        """Whether a collective failed, as it does in processes whose peer has ended."""
        lines = _message(self.text)
        ends = (*lines[:1], *lines[-1:])
        return any(map(_PEER_GONE.search, ends)) or _PEER_FAILED.search(self.text) is not None

    @property
    def ended_by_launcher(self) -> bool:
        """Whether the launcher ended it because another process had failed."""
        return self.raised is None and self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)


def failures_of(by_rank: Mapping[int, Any]) -> list[Failure]:
    """Return the failures that torch reports, with the records of our processes.

    Args:
        by_rank: The ``ProcessFailure`` of each rank, such as ``RunResult.failures``.
    """
    failures = []
    for rank, failure in by_rank.items():
        noted = failure.message if isinstance(failure.message, dict) else {}
        more: Mapping[str, Any] = noted.get("extraInfo", {})
        size = f" of {more['world_size']}" if more.get("world_size") else ""
        number = str(more.get("rank", ""))
        global_rank = int(number) if number.isdecimal() else rank
        host = more.get("host") or socket.gethostname()
        text = str(more.get("py_callstack") or noted.get("message") or "").rstrip()
        failures.append(
            Failure(
                rank=global_rank,
                code=failure.exitcode,
                seen=failure.timestamp,
                raised=float(more["time"]) if "time" in more else None,
                kind=str(more.get("kind", "")),
                text=text,
                who=f"rank {global_rank}{size} on {host}",
                meant=int(more.get("code", 1)),
            )
        )
    return failures


def first_of(failures: list[Failure], interval: float) -> Failure:
    """Return the failure that caused the others.

    It is the failure whose exception was recorded first, unless a process was ended by a signal
    that the launcher did not send. Such a process records nothing; its peers fail because it is
    gone, and the launcher notices it at its next check. If a process leaves its group before its
    own exception is recorded, the others fail a moment earlier, so failed collectives do not count
    if there is any other failure.

    Args:
        failures: The failures; at least one.
        interval: Seconds between two checks.
    """
    earliest = min(failure.seen for failure in failures)
    candidates = [
        failure
        for failure in failures
        if not failure.ended_by_launcher
        and not (_killed(failure) and failure.seen >= earliest + _PATIENCE)
    ] or failures
    killed = [
        failure
        for failure in candidates
        if failure.raised is None and failure.code < 0 and failure.seen <= earliest + interval + 1
    ]
    return min(
        killed or [failure for failure in candidates if not failure.follows] or candidates,
        key=lambda failure: failure.seen if failure.raised is None else failure.raised,
    )


def report(failures: list[Failure], interval: float) -> tuple[str, int]:
    """Return the final message and the exit code."""
    first = first_of(failures, interval)
    others = [
        failure
        for failure in sorted(failures, key=lambda failure: failure.rank)
        if failure is not first and not failure.ended_by_launcher
    ]
    alike = [failure for failure in others if failure.text and failure.text == first.text]
    lines = [f"{failure.who} {_then(failure, first)}" for failure in others if failure not in alike]
    if alike:
        ranks = "ranks" if len(alike) > 1 else "rank"
        lines.append(
            f"{ranks} {', '.join(str(failure.rank) for failure in alike)} failed the same way."
        )
    lines.append(f"{first.who} failed first:")
    lines.append(first.text if first.text else summary(first))
    return "\n".join(lines), first.exit_code


def _killed(failure: Failure) -> bool:
    return failure.raised is None and failure.code == -signal.SIGKILL


def _then(failure: Failure, first: Failure) -> str:
    if _killed(failure) and failure.seen >= first.seen + _PATIENCE:
        return f"did not end within {_PATIENCE} seconds after that, and was killed."
    return f"failed after that: {summary(failure)}"


def _message(text: str) -> list[str]:
    """Return the lines of a traceback's exception, with its notes; all lines if there is none."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else lines
    ends = (number for number, line in enumerate(after) if line and line[0] != " ")
    return after[next(ends, 0) :] or lines


def summary(failure: Failure) -> str:
    """Describe the end of a process in one line."""
    if failure.text:
        lines = failure.text.splitlines()
        return lines[-1] if _TRACEBACK not in lines else _message(failure.text)[0]
    if failure.code < 0:
        names = {int(each): each.name for each in signal.Signals}
        name = names.get(-failure.code, f"signal {-failure.code}")  # some have only a number
        hint = ", as when the machine runs out of memory" if name == "SIGKILL" else ""
        return f"it was ended by {name}{hint}."
    return f"it exited with code {failure.code}."
