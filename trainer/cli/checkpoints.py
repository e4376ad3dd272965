"""The command `trainer checkpoints`: list, verify and remove checkpoints.

`--prune` fully verifies the checkpoints that it keeps before it removes any other. It never removes
a checkpoint that the user named, the target of a link, a folder with other files in it, or one that
it cannot read.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainer.checkpoint import storage
from trainer.checkpoint.lock import holder_of
from trainer.cli.inventory import (
    SET_ASIDE,
    Entry,
    Leftover,
    find_root,
    is_dead,
    ranked_by,
    read_entry,
    read_folder,
    size_text,
)
from trainer.cli.parsing import aligned, command_parser, count, echo
from trainer.errors import CheckpointError
from trainer.strict_json import dumps

_METRICS_SHOWN = 3
_COLUMNS = ("name", "step", "epoch", "metrics", "size", "age", "processes", "state")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer checkpoints`."""
    made = command_parser(
        prog,
        "List the checkpoints in a folder, verify them or remove old ones.",
        examples=[
            ("list the checkpoints of a project", "runs/digits"),
            ("read every file and compare its hash", "runs/digits --verify"),
            ("show what would be removed", "runs/digits --prune --keep-last 2 --dry-run"),
        ],
        codes={0: "all are sound", 1: "a checkpoint is damaged or could not be removed"},
    )
    add = made.add_argument
    text = "a run's folder (project_dir), its 'checkpoints' folder, or one checkpoint"
    add("directory", type=Path, metavar="DIR", help=text)
    add("--verify", action="store_true", help="read files and compare hashes")
    add("--json", action="store_true", help="print JSON")
    add = made.add_argument_group("removing").add_argument
    text = "remove all but the last, and leftovers of killed saves older than an hour"
    add("--prune", action="store_true", help=text)
    add("--keep-last", type=count, metavar="N", help="keep the N newest intact checkpoints")
    add("--keep-best", metavar="METRIC", help="also keep the best checkpoint by this metric")
    add("--mode", choices=("min", "max"), help="which value of METRIC is best")
    add("--dry-run", action="store_true", help="only show what would be removed")
    add("--yes", action="store_true", help="do not ask")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0 if every checkpoint is intact, 1 if one is damaged or could not be removed.

    Raises:
        argparse.ArgumentTypeError: The arguments are invalid; nothing was changed.
        OSError: A folder or file cannot be read.
    """
    _check(arguments)
    root, single = find_root(Path(os.path.abspath(os.path.expanduser(arguments.directory))))
    if single and arguments.prune:
        raise argparse.ArgumentTypeError(
            f"{root} is one checkpoint; --prune needs the folder that contains it."
        )
    if arguments.prune and not arguments.dry_run:
        for folder in (root, root.parent):  # either may be a locked `project_dir` or `dirpath`
            if holder := holder_of(folder):
                raise argparse.ArgumentTypeError(
                    f"{folder} is in use by {holder}, which removes old checkpoints itself. Prune "
                    "after it has ended; --dry-run shows what would be removed."
                )
    if single:
        entry = read_entry(root, hashes=arguments.verify)
        entries, leftovers = [entry] if entry else [], list[Leftover]()
    else:
        entries, leftovers = read_folder(root, hashes=arguments.verify)
    plan = _plan(entries, leftovers, arguments) if arguments.prune else None
    shown = _report(entries, leftovers)
    if not arguments.json:
        first = [arguments.keep_best] if arguments.keep_best else dict(ranked_by(entries))
        text = _listing(entries, leftovers, list(first), hashes=arguments.verify)
        if not entries and (runs := sorted(p.parent.name for p in root.glob("*/checkpoints"))):
            text += f"\n\nRuns in that folder: {', '.join(runs)}."
        echo(f"{root}\n\n{text}")
    failed: dict[str, str] = {}
    if plan is not None:
        done = _prune(plan, root, arguments)
        failed = plan.failed
        shown["prune"] = {
            "done": done,
            "kept": plan.kept,
            "untouched": plan.untouched,
            "removed": [entry.name for entry in plan.removed if entry.name not in failed],
            "swept": [each.name for each in plan.swept if each.name not in failed],
            "failed": failed,
        }
        if done:
            gone = [entry for entry in plan.removed if entry.name not in failed]
            entries = [entry for entry in entries if entry not in gone]
    if arguments.json:
        echo(dumps({"root": str(root), **shown}, indent=1))
    return int(bool(failed) or any(entry.is_bad for entry in entries))


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.prune:
        for name in ("keep_last", "keep_best", "mode", "dry_run", "yes"):
            if getattr(arguments, name):
                option = f"--{name.replace('_', '-')}"
                raise argparse.ArgumentTypeError(f"{option} needs --prune.")
        return
    if arguments.keep_last is None:
        raise argparse.ArgumentTypeError(
            "--prune needs --keep-last N: how many of the newest to keep."
        )
    if (arguments.keep_best is None) != (arguments.mode is None):
        raise argparse.ArgumentTypeError(
            "--keep-best METRIC and --mode min|max must be passed together."
        )
    if arguments.json and not (arguments.yes or arguments.dry_run):
        raise argparse.ArgumentTypeError(
            "--json cannot ask for confirmation; pass --yes or --dry-run too."
        )


# -- output ----------------------------------------------------------------------------------------


def _listing(
    entries: Sequence[Entry], leftovers: Sequence[Leftover], first: Sequence[str], *, hashes: bool
) -> str:
    """Return the checkpoints of a folder as a table; metrics in ``first`` come first."""
    now = time.time()
    parts = ["No checkpoints."]
    if entries:
        checked = "manifests, sizes and hashes" if hashes else "manifests and sizes"
        more = "" if hashes else "; --verify reads the files too"
        table = aligned([_COLUMNS, *(_row(entry, first, now) for entry in entries)])
        parts = [table, f"Checked: {checked}{more}."]
    if notes := [f"{entry.name}: {entry.note}" for entry in entries if entry.note]:
        parts.append("\n".join(notes))
    if leftovers:
        rows = [
            (
                leftover.name,
                size_text(leftover.size),
                _age(now - leftover.touched),
                leftover.meaning,
            )
            for leftover in leftovers
        ]
        parts.append("Leftovers:\n" + aligned(rows))
    return "\n\n".join(parts)


def _row(entry: Entry, first: Sequence[str], now: float) -> tuple[str, ...]:
    metrics = entry.metrics
    names = list(dict.fromkeys([*(name for name in first if name in metrics), *sorted(metrics)]))
    shown = [f"{name}={metrics[name]:.4g}" for name in names[:_METRICS_SHOWN]]
    if len(names) > _METRICS_SHOWN:
        shown.append(f"+{len(names) - _METRICS_SHOWN}")
    step, processes = (str(entry.manifest.get(key, "-")) for key in ("step", "world_size"))
    epoch = entry.manifest.get("epoch")
    shown_epoch = "-" if epoch is None else str(epoch + 1)  # from 1, as progress bars print it
    size, age = size_text(entry.size), _age(now - entry.saved)
    return entry.name, step, shown_epoch, " ".join(shown) or "-", size, age, processes, entry.state


def _age(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _report(entries: Sequence[Entry], leftovers: Sequence[Leftover]) -> dict[str, Any]:
    """Return the `--json` output: bytes, ISO 8601 times, null for missing or non-finite values."""
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
                "metrics": {k: v if math.isfinite(v) else None for k, v in entry.metrics.items()},
                "size": entry.size,
                "saved": _time(entry.saved),
                "processes": entry.manifest.get("world_size"),
            }
            for entry in entries
        ],
        "leftovers": [
            {
                "path": str(leftover.path),
                "meaning": leftover.meaning,
                "size": leftover.size,
                "touched": _time(leftover.touched),
            }
            for leftover in leftovers
        ],
    }


def _time(seconds: float) -> str | None:
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


# -- pruning ---------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """The action of a prune for each checkpoint.

    Attributes:
        kept: Name -> reason, for checkpoints that the user asked to keep.
        untouched: Name -> reason, for checkpoints that must not be removed.
        removed: The other checkpoints.
        swept: Leftovers of killed saves.
        failed: Name -> error; filled when the plan is carried out.
    """

    kept: dict[str, str] = field(default_factory=dict)
    untouched: dict[str, str] = field(default_factory=dict)
    removed: list[Entry] = field(default_factory=list)
    swept: list[Leftover] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def amount(self) -> str:
        """Return the amount that would be removed, as text."""
        size = sum(entry.size for entry in self.removed) + sum(each.size for each in self.swept)
        text = f"{len(self.removed)} checkpoint{'' if len(self.removed) == 1 else 's'}"
        if self.swept:
            text += f" and {len(self.swept)} leftover{'' if len(self.swept) == 1 else 's'}"
        return f"{text}, {size_text(size)}"

    def text(self) -> str:
        """Return the planned actions, one line per checkpoint."""
        lines = [("keep", name, reason) for name, reason in self.kept.items()]
        lines += [("leave", name, reason) for name, reason in self.untouched.items()]
        lines += [("remove", entry.name, entry.state) for entry in self.removed]
        lines += [("sweep", leftover.name, leftover.meaning) for leftover in self.swept]
        table = aligned(sorted(lines, key=lambda line: line[1])) if lines else ""
        return f"\n{table}\n\nTo remove: {self.amount()}."


def _plan(entries: list[Entry], leftovers: list[Leftover], arguments: argparse.Namespace) -> _Plan:
    """Return the plan; fully verify the checkpoints to keep, and update their ``entries``.

    Raises:
        argparse.ArgumentTypeError: No checkpoint has a value of the metric.
    """
    plan = _Plan()
    hopeless: dict[str, str] = {}  # kept, since no intact one would remain
    steps = [entry for entry in entries if entry.is_step]
    weights = [entry for entry in steps if entry.manifest.get("weights_only")]
    whole = [entry for entry in steps if entry not in weights]  # from which a run can resume
    numbered = [entry for entry in entries if entry.number is not None and not entry.is_step]
    for ours in (whole, weights, numbered):
        last = _first_sound(reversed(ours), entries, arguments.keep_last)
        plan.kept |= dict.fromkeys(last, "among the last")
        if not last:
            hopeless |= {entry.name: "no intact checkpoint would remain" for entry in ours}
    if (metric := arguments.keep_best) is not None:
        best = _first_sound(_ranked(entries, metric, arguments.mode), entries, 1)
        plan.kept |= dict.fromkeys(best, f"the best {metric}")
        if not best:
            hopeless |= {
                entry.name: f"no intact checkpoint has a value of {metric}" for entry in entries
            }
    roots = {entry.path.parent for entry in entries}
    links = {path.resolve() for root in roots for path in root.iterdir() if path.is_symlink()}
    for entry in entries:
        if entry.name in plan.kept:
            continue
        reason = _not_ours(entry, linked=entry.path.resolve() in links)
        if reason := reason or hopeless.get(entry.name):
            plan.untouched[entry.name] = reason
        else:
            plan.removed.append(entry)
    plan.swept = [leftover for leftover in leftovers if is_dead(leftover)]
    return plan


def _first_sound(candidates: Iterable[Entry], entries: list[Entry], count: int) -> list[str]:
    """Return the names of the first `count` candidates that are fully verified as intact."""
    damaged: list[str] = []
    for entry in candidates:
        if len(damaged) == count:
            break
        current = next(other for other in entries if other.name == entry.name)
        if current.state == "sound" and not current.hashed:
            current = read_entry(current.path, hashes=True) or current
            entries[:] = [current if other.name == entry.name else other for other in entries]
        if current.state == "sound" and current.hashed:
            damaged.append(entry.name)
    return damaged


def _ranked(entries: Sequence[Entry], metric: str, mode: str) -> list[Entry]:
    """Return the entries with a finite value of a metric, best first; of equal ones the oldest."""
    scored = [entry for entry in entries if math.isfinite(entry.metrics.get(metric, math.nan))]
    if not scored:
        metrics = sorted({name for entry in entries for name in entry.metrics})
        raise argparse.ArgumentTypeError(
            f"--keep-best {metric}: no checkpoint has a finite value of it. "
            f"There are: {', '.join(metrics) or 'none'}."
        )
    sign = 1 if mode == "min" else -1
    return sorted(scored, key=lambda entry: sign * entry.metrics[metric])


def _not_ours(entry: Entry, *, linked: bool) -> str | None:
    """Return the reason why a checkpoint must not be removed; None if it may be."""
    if entry.number is None:
        return "you named it"
    if linked:
        return "it is a link or the target of one"
    if entry.name != entry.path.name:
        return SET_ASIDE
    if entry.state not in ("sound", "damaged") or not entry.manifest:
        return "it is unknown which of its files belong to the checkpoint"
    if others := storage.unknown_files(entry.path, entry.manifest):
        return f"it contains {others[0]}, which is not part of the checkpoint"
    return None


def _prune(plan: _Plan, root: Path, arguments: argparse.Namespace) -> bool:
    """Show a plan, ask, and carry it out; return whether that was done."""
    if not arguments.json:
        echo(plan.text())
    if arguments.dry_run:
        return False
    if (plan.removed or plan.swept) and not arguments.yes and not _agreed(plan):
        echo("Nothing was removed.")
        return False
    # A run that rotates its checkpoints may have removed some in the meantime.
    lost = [name for name in plan.kept if not storage.locate(root / name).is_dir()]
    if lost:
        plan.failed = dict.fromkeys(
            lost, "was removed by another process; nothing else was removed."
        )
    else:
        _remove(plan)
    for name, error in plan.failed.items():
        echo(f"{name}: {error}", error=True)
    return not lost


def _remove(plan: _Plan) -> None:
    for entry in plan.removed:
        try:
            storage.remove(entry.path)
        except (CheckpointError, OSError) as error:
            plan.failed[entry.name] = str(error)
    for leftover in plan.swept:
        if is_dead(leftover):  # checked again, since a save may have begun
            storage.discard(leftover.path)
        if leftover.path.exists():
            plan.failed[leftover.name] = f"{leftover.path} is in use, or could not be deleted."


def _agreed(plan: _Plan) -> bool:
    if not sys.stdin.isatty():
        raise argparse.ArgumentTypeError(
            "--prune asks before it removes anything, but there is no terminal to ask on. Pass "
            "--yes, or --dry-run to see what it would do."
        )
    try:
        return input(f"Remove {plan.amount()}? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False
