"""What is to be known of a GPU, in one run of nine minutes, from a plain checkout.

The sections are in `gpu_sections.py`. Each has a process of its own, which is ended with its
children at its limit. ``gpu.json`` is written anew after each of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least
from benchmarks.gpu_sections import NO_TIME, SECTIONS, Run
from benchmarks.report import Result, Unavailable, rounded, say, versions
from trainer.environment import defaulting

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "gpu"  # for what is large: compiled code, saves and traces
BUDGET = 540
LEAST = 20.0  # seconds, below which no section is begun
LINES = 15  # of the output of a section that failed


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--budget",
        type=at_least(1),
        default=BUDGET,
        help="seconds; what does not fit is left out",
    )
    parser.add_argument(
        "--only",
        type=_sections,
        default=[*SECTIONS],
        metavar="A,B",
        help=f"some of the sections {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run every section small on the CPU, to check that it works",
    )


def _sections(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in SECTIONS:
            raise ArgumentTypeError(f"{name!r} is no section; some of {','.join(SECTIONS)}.")
    return [name for name in SECTIONS if name in found]


def run(options: Namespace) -> int:
    """Run the sections; return how many failed.

    Raises:
        Unavailable: There is no CUDA device, and no dry run was asked for.
    """
    if not (options.dry_run or torch.cuda.is_available()):
        raise Unavailable(
            "The sections need a CUDA device, and torch finds none. --dry-run runs them small on "
            "the CPU, to check that they work."
        )
    folder = options.output
    report: dict[str, Any] = {
        "made": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "dry_run": options.dry_run,
        "budget": options.budget,
        "device": _device(),
        "versions": versions(),
        "sections": {},
    }
    path = folder / "gpu.json"
    if len(options.only) < len(SECTIONS) and path.exists():  # the others stay as they were
        earlier = json.loads(path.read_text())
        if earlier["dry_run"] == options.dry_run:
            report["sections"] = earlier["sections"]
    (folder / "gpu.log").unlink(missing_ok=True)
    ends = time.monotonic() + options.budget
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a section ends with us
    try:
        failed = sum(_run_one(name, ends, report, options) for name in options.only)
    finally:
        signal.signal(signal.SIGTERM, before)
    say(f"Written: {folder / 'gpu.json'}")
    return failed


def _run_one(name: str, ends: float, report: dict[str, Any], options: Namespace) -> bool:
    """Run a section if the budget suffices, add it to the file, and return whether it failed."""
    left = ends - time.monotonic()
    if left < LEAST:
        entry: dict[str, Any] = {"state": "skipped", "why": f"{left:.0f} s of the budget left"}
    else:
        limit = left if options.dry_run else min(SECTIONS[name].seconds, left)
        entry = _measured(name, limit, options.output, options.dry_run)
    report["sections"][name] = entry
    _write(options.output / "gpu.json", report)
    say(f"-- {name}: {entry['state']}, {ends - time.monotonic():.0f} s left")
    if entry.get("result"):
        print(f"{Result.of(entry['result']).table()}\n", flush=True)
    for text in filter(None, (entry.get("why"), entry.get("error"))):
        say(text)
    return entry["state"] == "failed"


def _device() -> str:
    """Return what the driver says of the device; this process leaves it to the sections."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = ["--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        found = subprocess.run([program, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _measured(name: str, seconds: float, folder: Path, dry_run: bool) -> dict[str, Any]:
    """Run a section in a process of its own, and return what is known of it."""
    RUNS.mkdir(parents=True, exist_ok=True)
    kept, log = RUNS / f"{name}.json", RUNS / f"{name}.log"
    kept.unlink(missing_ok=True)
    ends = time.time() + seconds - 5  # to write, and to end
    command = [sys.executable, "-m", "benchmarks.gpu", name, str(kept), str(ends)]
    begin = time.monotonic()
    with (
        defaulting("TORCHINDUCTOR_CACHE_DIR", str(RUNS / "inductor")),
        defaulting("TORCHINDUCTOR_FX_GRAPH_CACHE", "1"),
        defaulting("PYTHONUNBUFFERED", "1"),
        log.open("w") as output,
    ):
        process = subprocess.Popen(
            [*command, *(["--dry-run"] if dry_run else [])],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    with (folder / "gpu.log").open("a") as whole:
        whole.write(f"-- {name}\n{log.read_text(errors='replace')}\n")
    entry = json.loads(kept.read_text()) if kept.exists() else {"state": "begun"}
    entry["seconds"] = round(time.monotonic() - begin, 1)
    if entry["state"] == "begun":
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
        how = f"ended at its limit of {seconds:.0f} s" if code is None else f"exit code {code}"
        entry |= {"state": "failed", "error": f"{how}\n{tail}"}
    elif failures := _failures(entry.get("result") or {"rows": []}):
        entry |= {"state": "failed", "error": failures}
    return entry


def _failures(result: dict[str, Any]) -> str:
    """Return the rows that failed; those that are not installed, or out of time, did not."""
    voids = {row["name"]: row["void"] for row in result["rows"] if row["void"]}
    accepted = ("not installed", NO_TIME)
    return "\n".join(f"{n}: {why}" for n, why in voids.items() if not why.startswith(accepted))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, the workers that it may have left behind, and compilers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write a file that is there whole, or as it was before."""
    beside = path.with_suffix(".new")
    text = json.dumps(rounded(values), indent=1, ensure_ascii=False, default=str)
    beside.write_text(f"{text}\n")
    beside.replace(path)


def page(path: Path) -> str:
    """Return the text of the README about a file."""
    report = json.loads(path.read_text())
    texts = ["A dry run on the CPU, whose figures say nothing.\n"] if report["dry_run"] else []
    for name, entry in report["sections"].items():
        told = entry.get("why") or entry.get("error", "").partition("\n")[0]
        state = entry["state"] + (f": {told}" if told else "")
        if not entry.get("result"):
            texts.append(f"**{name}**: {state}.\n")
            continue
        result = Result.of(entry["result"])
        notes = [*result.notes, *([f"The section {state}."] if told else [])]
        texts += [f"**{name}**: {result.title}\n", f"{result.table()}\n", f"{' '.join(notes)}\n"]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    texts.append(f"<sub>{report['made']}; {report['device']}; {packages}.</sub>\n")
    return "\n".join(texts)


def _process() -> None:
    """Measure the section that the command line names, and write what is known of it."""
    parser = ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("kept", type=Path)
    parser.add_argument("ends", type=float)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()

    def keep(result: Result, state: str = "begun") -> None:
        _write(options.kept, {"state": state, "result": asdict(result)})

    if options.dry_run:
        torch.set_num_threads(1)
    else:
        torch.ones(1, device="cuda")  # an error of the device is told by itself
    section = SECTIONS[options.section].measure
    run = Run(
        device="cpu" if options.dry_run else "cuda",
        tiny=options.dry_run,
        ends=options.ends,
        keep=keep,
        folder=options.kept.parent,
    )
    try:
        keep(section(run), "measured")
    except Unavailable as reason:
        _write(options.kept, {"state": "skipped", "why": str(reason)})


if __name__ == "__main__":
    _process()
