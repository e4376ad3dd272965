"""The output of `trainer checkpoints`: tables for people, plain data for programs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from trainer.cli.inventory import Entry, Leftover

_METRICS_SHOWN = 3
_COLUMNS = ("name", "step", "epoch", "metrics", "size", "age", "processes", "state")


@dataclass
class Plan:
    """What a prune does with each checkpoint.

    Attributes:
        kept: Name -> reason, of those that the user asked to keep.
        untouched: Name -> reason, of those that are not ours to remove.
        removed: The others.
        swept: Leftovers of killed saves.
        failed: Name -> error; filled when the plan is carried out.
    """

    kept: dict[str, str] = field(default_factory=dict)
    untouched: dict[str, str] = field(default_factory=dict)
    removed: list[Entry] = field(default_factory=list)
    swept: list[Leftover] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def listing(
    entries: Sequence[Entry], leftovers: Sequence[Leftover], first: Sequence[str], *, hashes: bool
) -> str:
    """Return the checkpoints of a folder as a table; metrics in ``first`` come first."""
    now = time.time()
    parts = []
    if entries:
        parts.append(_aligned([_COLUMNS, *(_row(entry, first, now) for entry in entries)]))
        what = "manifests, sizes and hashes" if hashes else "manifests and sizes"
        more = "" if hashes else "; --verify reads the files too"
        parts.append(f"Checked: {what}{more}.")
    else:
        parts.append("No checkpoints.")
    if notes := [f"{entry.name}: {entry.note}" for entry in entries if entry.note]:
        parts.append("\n".join(notes))
    if leftovers:
        rows = [
            (each.name, size_text(each.size), _age(now - each.touched), each.meaning)
            for each in leftovers
        ]
        parts.append("Leftovers:\n" + _aligned(rows))
    return "\n\n".join(parts)


def _row(entry: Entry, first: Sequence[str], now: float) -> tuple[str, ...]:
    def text(key: str) -> str:
        return str(entry.manifest.get(key, "-"))

    metrics = entry.metrics
    ordered = [*(name for name in first if name in metrics), *sorted(metrics)]
    names = list(dict.fromkeys(ordered))  # several callbacks may watch one metric
    shown = [f"{name}={metrics[name]:.4g}" for name in names[:_METRICS_SHOWN]]
    if len(names) > _METRICS_SHOWN:
        shown.append(f"+{len(names) - _METRICS_SHOWN}")
    return (
        entry.name,
        text("step"),
        text("epoch"),
        " ".join(shown) or "-",
        size_text(entry.size),
        _age(now - entry.saved),
        text("world_size"),
        entry.state,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """Return what a prune would do, one line per checkpoint."""
    lines = [("keep", name, reason) for name, reason in plan.kept.items()]
    lines += [("leave", name, reason) for name, reason in plan.untouched.items()]
    lines += [("remove", entry.name, entry.state) for entry in plan.removed]
    lines += [("sweep", each.name, each.meaning) for each in plan.swept]
    table = _aligned(sorted(lines, key=lambda line: line[1])) if lines else ""
    return f"\n{table}\n\nTo remove: {amount(plan)}."


def amount(plan: Plan) -> str:
    """Return how much a prune would remove."""
    size = sum(entry.size for entry in plan.removed) + sum(each.size for each in plan.swept)
    what = f"{len(plan.removed)} checkpoint{'' if len(plan.removed) == 1 else 's'}"
    if plan.swept:
        what += f" and {len(plan.swept)} leftover{'' if len(plan.swept) == 1 else 's'}"
    return f"{what}, {size_text(size)}"


def size_text(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _age(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def report(entries: Sequence[Entry], leftovers: Sequence[Leftover]) -> dict[str, Any]:
    """Return what `--json` prints: bytes, ISO 8601 times, null for missing or non-finite values."""
    return {
        "checkpoints": [
            {
                "name": entry.name,
                "path": str(entry.path),
                "kind": entry.kind,
                "state": entry.state,
                "note": entry.note,
                "hashed": entry.hashed,
                "step": entry.manifest.get("step"),
                "epoch": entry.manifest.get("epoch"),
                "metrics": {
                    name: value if math.isfinite(value) else None
                    for name, value in entry.metrics.items()
                },
                "size": entry.size,
                "saved": _time(entry.saved),
                "processes": entry.manifest.get("world_size"),
            }
            for entry in entries
        ],
        "leftovers": [
            {
                "path": str(each.path),
                "meaning": each.meaning,
                "size": each.size,
                "touched": _time(each.touched),
            }
            for each in leftovers
        ],
    }


def plan_report(plan: Plan) -> dict[str, Any]:
    """Return what a prune does, as `--json` prints it."""
    return {
        "kept": plan.kept,
        "untouched": plan.untouched,
        "removed": [entry.name for entry in plan.removed if entry.name not in plan.failed],
        "swept": [each.name for each in plan.swept if each.name not in plan.failed],
        "failed": plan.failed,
    }


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # infinite, or of a year that Python does not have
        return None
