"""The command `trainer checkpoints`: list, verify and remove checkpoints.

`--prune` reads the checkpoints that it keeps in full before it removes any other. It never touches
one that the user named, the target of a link, a folder with other files in it, or what it cannot
read.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainer.checkpoint import storage
from trainer.checkpoint.lock import holder_of
from trainer.checkpoint.storage import unknown_files
from trainer.cli.inventory import (
    SET_ASIDE,
    Entry,
    Leftover,
    find_root,
    is_dead,
    is_step,
    monitored,
    read_entry,
    read_folder,
)
from trainer.cli.listing import Plan, amount, listing, plan_report, plan_text, report
from trainer.cli.parsing import command_parser, count, echo
from trainer.errors import CheckpointError
from trainer.strict_json import dumps


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
        codes={0: "all are sound", 1: "one is damaged or could not be removed"},
    )
    made.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="the folder of a project, its 'checkpoints' folder, or one checkpoint",
    )
    made.add_argument("--verify", action="store_true", help="read files and compare hashes")
    made.add_argument("--json", action="store_true", help="print JSON")
    prune = made.add_argument_group("removing")
    prune.add_argument(
        "--prune",
        action="store_true",
        help="remove all but the last, and leftovers of killed saves older than an hour",
    )
    prune.add_argument("--keep-last", type=count, metavar="N", help="keep the N newest sound ones")
    prune.add_argument("--keep-best", metavar="METRIC", help="also keep the best by this metric")
    prune.add_argument("--mode", choices=("min", "max"), help="which value of METRIC is best")
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0 if every checkpoint is sound, 1 if one is damaged or could not be removed.

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
        for folder in (root, root.parent):  # where `project_dir` or a `dirpath` may be locked
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
    first = [arguments.keep_best] if arguments.keep_best else monitored(entries)
    plan = _plan(entries, leftovers, arguments) if arguments.prune else None
    shown = report(entries, leftovers)
    if not arguments.json:
        echo(f"{root}\n")
        echo(listing(entries, leftovers, first, hashes=arguments.verify))
    if plan is not None:
        done = _prune(plan, root, arguments)
        shown["prune"] = {"done": done, **plan_report(plan)}
        if done:
            gone = [entry for entry in plan.removed if entry.name not in plan.failed]
            entries = [entry for entry in entries if entry not in gone]
    if arguments.json:
        echo(dumps({"root": str(root), **shown}, indent=1))
    failed = plan is not None and bool(plan.failed)
    return int(failed or any(entry.is_bad for entry in entries))


def _check(arguments: argparse.Namespace) -> None:
    options = {
        "--keep-last": arguments.keep_last,
        "--keep-best": arguments.keep_best,
        "--mode": arguments.mode,
        "--dry-run": arguments.dry_run,
        "--yes": arguments.yes,
    }
    given = [name for name, value in options.items() if value]
    if given and not arguments.prune:
        raise argparse.ArgumentTypeError(f"{given[0]} belongs to --prune, which is not given.")
    if arguments.prune and arguments.keep_last is None:
        raise argparse.ArgumentTypeError(
            "--prune needs --keep-last N: how many of the newest to keep."
        )
    if (arguments.keep_best is None) != (arguments.mode is None):
        raise argparse.ArgumentTypeError("--keep-best METRIC and --mode min|max go together.")
    if arguments.prune and arguments.json and not (arguments.yes or arguments.dry_run):
        raise argparse.ArgumentTypeError("--json cannot ask; pass --yes or --dry-run too.")


# -- pruning ---------------------------------------------------------------------------------------


def _plan(entries: list[Entry], leftovers: list[Leftover], arguments: argparse.Namespace) -> Plan:
    """Return the plan; read in full what is to be kept, and update ``entries`` with what is found.

    Raises:
        argparse.ArgumentTypeError: No checkpoint has a value of the metric.
    """
    plan = Plan()
    hopeless: dict[str, str] = {}
    reason: str | None
    steps = [entry for entry in entries if is_step(entry)]
    weights = [entry for entry in steps if entry.manifest.get("weights_only")]
    whole = [entry for entry in steps if entry not in weights]  # from which a run can resume
    numbered = [entry for entry in entries if entry.number is not None and not is_step(entry)]
    for ours in (whole, weights, numbered):
        last = _first_sound(reversed(ours), entries, arguments.keep_last)
        plan.kept |= dict.fromkeys(last, "among the last")
        if not last:
            hopeless |= {entry.name: "no sound one would remain" for entry in ours}
    if arguments.keep_best is not None:
        metric = arguments.keep_best
        best = _first_sound(_ranked(entries, metric, arguments.mode), entries, 1)
        plan.kept |= dict.fromkeys(best, f"the best {metric}")
        if not best:
            hopeless |= {entry.name: f"no sound one has a value of {metric}" for entry in entries}
    links = {path.resolve() for path in _links(entries)}
    for entry in entries:
        if entry.name in plan.kept:
            continue
        reason = _not_ours(entry, linked=entry.path.resolve() in links)
        reason = reason or hopeless.get(entry.name)
        if reason is None:
            plan.removed.append(entry)
        else:
            plan.untouched[entry.name] = reason
    plan.swept = [leftover for leftover in leftovers if is_dead(leftover)]
    return plan


def _first_sound(candidates: Iterable[Entry], entries: list[Entry], count: int) -> list[str]:
    """Return the names of the first `count` candidates of which every byte is sound."""
    found: list[str] = []
    for entry in candidates:
        if len(found) == count:
            break
        current = next(each for each in entries if each.name == entry.name)
        if current.state == "sound" and not current.hashed:
            current = read_entry(current.path, hashes=True) or current
            entries[:] = [current if each.name == entry.name else each for each in entries]
        if current.state == "sound" and current.hashed:
            found.append(entry.name)
    return found


def _ranked(entries: Sequence[Entry], metric: str, mode: str) -> list[Entry]:
    """Return those with a finite value of a metric, the best first; of equal ones the oldest."""
    scored = [entry for entry in entries if math.isfinite(entry.metrics.get(metric, math.nan))]
    if not scored:
        known = sorted({name for entry in entries for name in entry.metrics})
        raise argparse.ArgumentTypeError(
            f"--keep-best {metric}: no checkpoint has a finite value of it. "
            f"There are: {', '.join(known) or 'none'}."
        )
    sign = 1 if mode == "min" else -1
    return sorted(scored, key=lambda entry: sign * entry.metrics[metric])


def _links(entries: Iterable[Entry]) -> Iterator[Path]:
    for root in {entry.path.parent for entry in entries}:
        yield from (path for path in root.iterdir() if path.is_symlink())


def _not_ours(entry: Entry, *, linked: bool) -> str | None:
    """Return why a checkpoint must not be removed; None if it may be."""
    if entry.number is None:
        return "you named it"
    if linked:
        return "it is a link or the target of one"
    if entry.name != entry.path.name:
        return SET_ASIDE
    if entry.state not in ("sound", "damaged") or not entry.manifest:
        return "it is unknown which of its files are ours"
    if others := unknown_files(entry.path, entry.manifest):
        return f"it contains {others[0]}, which is not part of the checkpoint"
    return None


def _prune(plan: Plan, root: Path, arguments: argparse.Namespace) -> bool:
    """Show a plan, ask, and carry it out; return whether that was done."""
    if not arguments.json:
        echo(plan_text(plan))
    if arguments.dry_run:
        return False
    if (plan.removed or plan.swept) and not arguments.yes and not _agreed(plan):
        echo("Nothing was removed.")
        return False
    lost = [name for name in plan.kept if not storage.locate(root / name).is_dir()]
    if lost:  # to a run that rotates its checkpoints, while this was reading or asking
        plan.failed = dict.fromkeys(lost, "was removed by another process; nothing else was.")
    else:
        _remove(plan)
    for name, error in plan.failed.items():
        echo(f"{name}: {error}", error=True)
    return not lost


def _remove(plan: Plan) -> None:
    for entry in plan.removed:
        try:
            storage.remove(entry.path)
        except (CheckpointError, OSError) as error:
            plan.failed[entry.name] = str(error)
    for leftover in plan.swept:
        if is_dead(leftover):  # checked again: a save may have begun
            storage.discard(leftover.path)
        if leftover.path.exists():
            plan.failed[leftover.name] = f"{leftover.path} is in use, or could not be deleted."


def _agreed(plan: Plan) -> bool:
    if not sys.stdin.isatty():
        raise argparse.ArgumentTypeError(
            "--prune asks before it removes anything, but there is no terminal to ask on. Pass "
            "--yes, or --dry-run to see what it would do."
        )
    question = f"Remove {amount(plan)}? [y/N] "
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False
