"""The command `trainer checkpoints`: list and verify checkpoints; nothing is changed."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainer.cli.inventory import (
    Entry,
    Leftover,
    find_root,
    ranked_by,
    read_entry,
    read_folder,
    size_text,
)
from trainer.cli.parsing import aligned, command_parser, echo
from trainer.strict_json import dumps

_METRICS_SHOWN = 3
_COLUMNS = ("name", "step", "epoch", "metrics", "size", "age", "processes", "state")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer checkpoints`."""
    made = command_parser(
        prog,
        "List the checkpoints in a folder, and verify them.",
        examples=[
            ("list the checkpoints of a project", "runs/digits"),
            ("read every file and compare its hash", "runs/digits --verify"),
        ],
        codes={0: "all are sound", 1: "one is damaged"},
    )
    add = made.add_argument
    what = "the folder of a project, its 'checkpoints' folder, or one checkpoint"
    add("directory", type=Path, metavar="DIR", help=what)
    add("--verify", action="store_true", help="read files and compare hashes")
    add("--json", action="store_true", help="print JSON")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0 if every checkpoint is sound, 1 if one is damaged.

    Raises:
        OSError: A folder or file cannot be read.
    """
    root, single = find_root(Path(os.path.abspath(os.path.expanduser(arguments.directory))))
    if single:
        entry = read_entry(root, hashes=arguments.verify)
        entries, leftovers = [entry] if entry else [], list[Leftover]()
    else:
        entries, leftovers = read_folder(root, hashes=arguments.verify)
    if arguments.json:
        echo(dumps({"root": str(root), **_report(entries, leftovers)}, indent=1))
    else:
        first = [name for name, _ in ranked_by(entries)]
        echo(f"{root}\n\n{_listing(entries, leftovers, first, hashes=arguments.verify)}")
    return int(any(entry.is_bad for entry in entries))


def _listing(
    entries: Sequence[Entry], leftovers: Sequence[Leftover], first: Sequence[str], *, hashes: bool
) -> str:
    """Return the checkpoints of a folder as a table; metrics in ``first`` come first."""
    now = time.time()
    parts = ["No checkpoints."]
    if entries:
        what = "manifests, sizes and hashes" if hashes else "manifests and sizes"
        more = "" if hashes else "; --verify reads the files too"
        table = aligned([_COLUMNS, *(_row(entry, first, now) for entry in entries)])
        parts = [table, f"Checked: {what}{more}."]
    if notes := [f"{entry.name}: {entry.note}" for entry in entries if entry.note]:
        parts.append("\n".join(notes))
    if leftovers:
        rows = [(each.name, size_text(each.size)) for each in leftovers]
        parts.append("Not checkpoints of the run, or not any more:\n" + aligned(rows))
    return "\n\n".join(parts)


def _row(entry: Entry, first: Sequence[str], now: float) -> tuple[str, ...]:
    metrics = entry.metrics
    names = list(dict.fromkeys([*(name for name in first if name in metrics), *sorted(metrics)]))
    shown = [f"{name}={metrics[name]:.4g}" for name in names[:_METRICS_SHOWN]]
    if len(names) > _METRICS_SHOWN:
        shown.append(f"+{len(names) - _METRICS_SHOWN}")
    step, epoch, processes = (
        str(entry.manifest.get(key, "-")) for key in ("step", "epoch", "world_size")
    )
    size, age = size_text(entry.size), _age(now - entry.saved)
    return entry.name, step, epoch, " ".join(shown) or "-", size, age, processes, entry.state


def _age(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _report(entries: Sequence[Entry], leftovers: Sequence[Leftover]) -> dict[str, Any]:
    """Return what `--json` prints: bytes, ISO 8601 times, null for missing or non-finite values."""
    return {
        "checkpoints": [
            {
                "name": entry.name,
                "path": str(entry.path),
                "kind": entry.kind,
                "state": entry.state,
                "note": entry.note,
                "step": entry.manifest.get("step"),
                "epoch": entry.manifest.get("epoch"),
                "metrics": {k: v if math.isfinite(v) else None for k, v in entry.metrics.items()},
                "size": entry.size,
                "saved": _time(entry.saved),
                "processes": entry.manifest.get("world_size"),
            }
            for entry in entries
        ],
        "leftovers": [{"path": str(each.path), "size": each.size} for each in leftovers],
    }


def _time(seconds: float) -> str | None:
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
