"""The command `trainer watch`."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

import trainer
from tests.trainer.cli.test_checkpoints import make as make_checkpoint
from trackers import JsonlTracker, read_metrics
from trainer.checkpoint.lock import alone_in
from trainer.cli import main
from trainer.cli.runs import Run
from trainer.cli.watch.frame import frame

RECORD = Path("run/metrics.jsonl")
BRAILLE = re.compile("[\u2801-\u28ff]")


def line(step: object, when: float = 0.0, **values: object) -> str:
    return json.dumps({"step": step, "epoch": 0, "time": when, **values}) + "\n"


def write(*lines: str, path: Path = RECORD, mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(lines)


def of(run: Run) -> dict[str, dict[float, float]]:
    return {
        name: dict(zip(one.steps[one.finite], one.values[one.finite], strict=True))
        for name, one in run.record.series().items()
    }


def reference() -> dict[str, dict[float, float]]:
    """The same by the reader of whole records."""
    found: dict[str, dict[float, float]] = {}
    for record in read_metrics(RECORD):
        for name in record.keys() - {"step", "epoch", "time"}:
            found.setdefault(name, {})[record["step"]] = record[name]
    return found


def shown(*paths: str, width: int = 100, height: int | None = None, metrics=None) -> list[str]:
    """The lines of a picture."""
    runs = [Run(Path(path).absolute(), path) for path in paths]
    for run in runs:
        run.read()
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(frame(runs, metrics, console, height=height))
    return console.file.getvalue().splitlines()


def call(*arguments: object) -> int:
    """The exit code, whichever way the command ends."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["watch", *map(str, arguments)]))
    code = ended.value.code
    assert isinstance(code, int)
    return code


# -- following -------------------------------------------------------------------------------------


def test_appended_lines_are_read_once_they_are_complete():
    run = Run(Path("run"), "run")
    assert not run.read()
    assert run.status == "waiting"
    write(line(1, 5.0, loss=2), line(2, 6.0, loss=1, rate=0.5))
    assert run.read()
    assert of(run) == reference() == {"loss": {1: 2, 2: 1}, "rate": {2: 0.5}}
    assert not run.read()
    whole = line(3, 8.0, loss=3)
    write(whole[:20], mode="a")
    assert not run.read()
    write(whole[20:], mode="a")
    assert run.read()
    assert of(run) == reference()
    assert [column.tolist() for column in run.record.columns()] == [[1, 2, 3], [5, 6, 8], [0] * 3]
    loss = run.record.series()["loss"]
    assert (loss.at(-1), loss.extreme("min"), loss.extreme("max")) == ((3, 3), (1, 2), (3, 3))


@pytest.mark.parametrize("after", [0, 1, 2, 5], ids="grown by {}".format)
def test_a_record_that_a_resumed_run_has_cut_is_read_anew(after):
    record = JsonlTracker(RECORD)
    record.start()
    for step in range(1, 5):
        record.log({"loss": step, **({"late": 1} if step == 4 else {})}, step, time=float(step))
    run = Run(Path("run"), "run")
    run.read()
    record.truncate(record.offset_behind(2))
    for step in range(3, 3 + after):  # also to the same length, with the same steps
        record.log({"loss": step, **({"late": 1} if step == 4 else {})}, step, time=step + 4.0)
    assert run.read()
    record.finish()
    assert of(run) == reference()
    assert list(run.record.series()["loss"].steps) == list(range(1, 3 + after))


def test_a_replaced_or_deleted_record_is_read_anew():
    write(line(1, loss=2), line(2, loss=2))
    run = Run(Path("run"), "run")
    run.read()
    write(line(1, loss=9), line(2, loss=2), line(3, loss=7), path=Path("run/new"))
    os.replace("run/new", RECORD)
    assert run.read()
    assert of(run) == {"loss": {1: 9, 2: 2, 3: 7}}  # its second line is that of the other
    RECORD.unlink()
    assert run.read()
    assert (of(run), run.status) == ({}, "waiting")
    assert not run.read()


def test_non_finite_values_are_counted_and_damaged_lines_reported():
    write(
        line(1, loss=2, note="text", flag=True, nest={"a": 1}, none=None, big=10**400),
        "torn in the midst\n",
        line(2, loss="NaN"),
        "[3]\n",
        line(3, loss="Infinity"),
        line(None, loss=1),
    )
    run = Run(Path("run"), "run")
    run.read()
    assert list(run.record.series()) == ["loss"]
    assert of(run)["loss"] == {1: 2, 6: 1}  # without a step it is where its line is
    assert list(run.record.damaged) == [2, 4]
    text = " ".join(shown("run"))
    assert "2 not finite" in text
    assert "2 lines are no records: 2, 4. " in text
    assert "metrics.jsonl, line 2 is not JSON" in text


def test_the_rate_is_that_of_the_last_records_whatever_lies_between_two_starts():
    steps = range(10, 620, 10)
    when = [step / 5 if step < 500 else step / 50 + 86400 for step in steps]
    write(*(line(s, t, loss=1) for s, t in zip(steps[:49], when[:49], strict=True)))
    run = Run(Path("run"), "run")
    run.read()
    assert run.record.speed(20) == pytest.approx(5)
    write(*(line(s, t, loss=1) for s, t in zip(steps[49:], when[49:], strict=True)), mode="a")
    run.read()
    assert run.record.speed(20) == pytest.approx(50)


def test_the_time_of_a_run_leaves_out_what_lies_between_its_starts():
    write(line(1, 10.0, loss=1), line(2, 86400.0, loss=1), line(3, 86490.0, loss=1))
    starts = [{"begin": 0, "end": 30, "status": "finished"}, {"begin": 86400, "status": "running"}]
    Path("run/run.json").write_text(json.dumps({"starts": starts}))
    assert ", ran for 2 min 00 s, last record " in shown("run", width=200)[0]


def test_the_state_and_the_newest_checkpoint():
    folder = Path("run")
    run = Run(folder, "run")
    write(line(1, loss=1))
    run.read()
    assert (run.status, run.checkpoint) == ("not running", None)
    with alone_in(folder):
        assert run.read()
        assert run.status == "running"
        make_checkpoint(90)
        make_checkpoint(100)
        assert run.read()
        assert run.checkpoint == "step-00000100"
    for start, state in (
        ({"begin": 1, "status": "running", "error": None}, "killed"),
        ({"begin": 1, "status": "failed", "error": "Traceback\nValueError: no number\n"}, "failed"),
    ):
        (folder / "run.json").write_text(
            json.dumps({"starts": [{"begin": 0, "status": "finished"}, start]})
        )
        assert run.read()
        assert run.status == state
        assert not run.read()
    assert "failed  step 1" in shown("run")[0]
    assert any("  ValueError: no number" in text for text in shown("run"))
    (folder / "run.json").write_text("torn {")
    assert run.read()
    assert "not running  step 1" in shown("run")[0]
    assert "checkpoint step-00000100" in shown("run")[0]


# -- the picture -----------------------------------------------------------------------------------


def curve_of(lines: list[str]) -> list[str]:
    """The lines of the only chart that have the curve, without the frame and the scale."""
    return [
        text.split("│", 1)[1][:-1].split("┤")[-1].split("│")[-1]
        for text in lines
        if "┤" in text or re.match(r"│ +│", text)
    ]


def test_a_picture_has_the_values_and_the_curve_goes_where_they_go():
    write(*(line(10 * n, loss=n**2 / 8) for n in range(1, 9)))
    lines = shown("run", width=60)
    assert any("8  ↓ 0.125 @10  ↑ 8 @80" in text for text in lines)
    assert [text.split("┤")[0].strip("│ ") for text in lines if "┤" in text] == [
        "8",
        "4.062",
        "0.125",
    ]
    assert re.search(r"10 +45 +80", "\n".join(lines))
    rows = [
        (y, found.start())
        for y, text in enumerate(curve_of(lines))
        for found in BRAILLE.finditer(text)
    ]
    by_column = [min(y for y, x in rows if x == column) for column in sorted({x for _, x in rows})]
    assert by_column == sorted(by_column, reverse=True)  # it only rises
    assert (by_column[0], by_column[-1]) == (len(curve_of(lines)) - 1, 0)
    half = by_column[len(by_column) // 2]
    assert half > len(curve_of(lines)) / 2  # and more so behind the half


@pytest.mark.parametrize("values", [[1], [3, 3, 3], [1e308, -1e308, 0], ["NaN"], []])
def test_pictures_of_odd_values(values):
    write(*(line(n, loss=value) for n, value in enumerate(values)))
    for width in (12, 30, 100):
        lines = shown("run", width=width)
        assert max(map(len, lines)) <= width
    last = f"{float(values[-1]):.5g}" if values else "nothing recorded yet"
    assert any(last in text for text in lines)


def test_several_runs_are_in_the_same_charts_each_with_its_colour():
    write(line(1, loss=1), line(2, loss=2, only=1), path=Path("a/metrics.jsonl"))
    write(line(1, loss=3), line(5, loss=0), path=Path("b/metrics.jsonl"))
    runs = [Run(Path(name), name) for name in "ab"]
    for run in runs:
        run.read()
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system="standard")
    console.print(frame(runs, None, console))
    text = console.file.getvalue()
    cyan, yellow = "\x1b[36m", "\x1b[33m"
    assert f"{cyan}● " in text
    assert f"{yellow}● " in text
    for name, colour, values in (("a", cyan, "↓ 1 @1  ↑ 2 @2"), ("b", yellow, "↓ 0 @5  ↑ 3 @1")):
        assert re.search(rf"{re.escape(colour)}{name}  .*{values}", text)
        assert re.search(rf"{re.escape(colour)}[\u2801-\u28ff]", text)
    assert sum("only" in row for row in text.splitlines()) == 1
    assert re.search(rf"{re.escape(yellow)}b  \x1b\[0m\x1b\[2m- ?", text)  # which has none


@pytest.mark.parametrize(("width", "height"), [(160, 50), (60, 24), (30, 12)])
def test_a_picture_for_a_screen_fills_it_and_names_what_has_no_room(width, height):
    names = [f"m{n:02}" for n in range(12)]
    write(*(line(n, **dict.fromkeys(names, n)) for n in range(5)))
    lines = shown("run", width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    charts = re.findall(r"─ (m\d\d) ─", "\n".join(lines))
    assert len(charts) >= 1
    if width >= 60:
        left = re.findall(r"m\d\d", lines[-1]) if "No room for" in lines[-1] else []
        assert left == names[len(charts) :][: len(left)]
        assert bool(left) == (len(charts) < 12)
    assert ("No room" in lines[-1]) == (len(charts) < 12)


def test_metrics_are_chosen_by_name_and_pattern():
    write(line(1, **{"val/a": 1, "train/a": 1, "val/b": 1, "lr": 1}))
    text = "\n".join(shown("run", metrics=["lr", "val/*", "foo"]))
    assert re.findall(r"─ (\S+) ─", text) == ["lr", "val/a", "val/b"]
    assert "Not recorded so far: foo. There are: val/a, train/a, val/b, lr." in text


# -- the command -----------------------------------------------------------------------------------


def test_without_a_terminal_one_picture_is_printed(capsys):
    write(line(1, loss=0.25))
    assert call("run") == call("run", "--once") == 0
    out = capsys.readouterr().out
    assert out.count("● run") == 2
    assert "\x1b" not in out
    assert "0.25" in out


def test_names_and_errors_cannot_command_the_terminal(capsys):
    write(line(1, **{"\x1b[2Jloss": 0.25}))
    start = {"begin": 1, "status": "failed\x1b[31m", "error": "ValueError: \x1b]0;owned\x07"}
    Path("run/run.json").write_text(json.dumps({"starts": [start]}))
    call("run", "--metrics", "\x1b[2Jloss,\x9bnone")
    said = capsys.readouterr().out
    assert not set(said) & {"\x1b", "\x07", "\x9b"}
    for shown in (r"failed\x1b[31m", r"\x1b]0;owned\x07", r"\x1b[2Jloss", r"\x9bnone"):
        assert shown in said


def test_a_run_that_has_not_begun_is_waited_for_and_with_once_it_is_an_error(capsys):
    write(line(1, loss=0.25))
    assert call("run", "later", "--once") == 1
    out = capsys.readouterr().out
    assert "● later  waiting" in out
    assert "● run" in out


def test_the_folder_of_several_runs_names_them(capsys):
    for path in ("runs/b", "runs/a"):
        write(line(1, loss=1), path=Path(path, "metrics.jsonl"))
    assert call("runs", "--once") == 1
    assert "Runs in that folder: a, b." in capsys.readouterr().out


def test_runs_of_one_name_are_named_by_their_paths(capsys):
    for path in ("x/run", "y/run"):
        write(line(1, loss=1), path=Path(path, "metrics.jsonl"))
    assert call("x/run", "y/run", "x/run/", "--once") == 0
    out = capsys.readouterr().out
    assert out.count("● ") == 2
    assert "● x/run" in out


def test_of_a_record_alone_the_status_is_unknown(capsys):
    write(line(1, loss=1), path=Path("own.jsonl"))
    assert call("own.jsonl", "--once") == 0
    assert (
        "● own.jsonl  unknown  step 1, epoch 1, last record 1970-01-01" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["notes.txt"], "notes.txt is a file; give the folder of a run, or its metrics.jsonl"),
        (["run", "--interval", "0"], "'0' must be a number of seconds from 0.05 to 3600"),
        (["run", "--interval", "soon"], "'soon' must be"),
        ([], "RUN_DIR"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    Path("notes.txt").touch()
    assert call(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotext", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "plotext" else 1)
    assert call("run") == 1
    error = capsys.readouterr().err
    assert "needs plotext: pip install 'cadence-trainer[watch]'" in error


class Screen:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.written = ""
        root = Path(trainer.__file__).parents[1]
        # Those two, which a runner of tests may have set, are over the terminal's own size.
        variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "watch", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**variables, "PYTHONPATH": str(root), "TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str) -> str:
        """All that is written up to a text, from where the last call ended."""
        limit = time.monotonic() + 120
        while text not in self.written:
            assert time.monotonic() < limit, self.written
            if select.select([self.master], [], [], 1)[0]:
                self.written += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.written = self.written.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_on_a_terminal_it_follows_until_ctrl_c():
    screen = Screen("run", "--interval", "0.05")
    try:
        screen.wait_for("waiting")
        write(line(1, loss=0.125))
        screen.wait_for("step 1,")
        screen.wait_for("0.125")
        write(line(2, loss=0.0625), mode="a")
        screen.wait_for("step 2,")
        wide = screen.wait_for("╯")
        screen.resize(24, 40)
        screen.wait_for("step 2,")
        narrow = screen.wait_for("╯")
        assert (wide.count("─"), narrow.count("─")) > (100, 0)
        assert max(len(row) for row in narrow.splitlines()) <= 40 + len("\x1b[0m") * 2
        os.write(screen.master, b"\x03")
        screen.wait_for("\x1b[?1049l")  # the screen that was there before is back
        screen.wait_for("step 2,")  # with what was seen last
        assert screen.process.wait(60) == 130
    finally:
        screen.close()


@pytest.mark.parametrize("time", [1.7e12, 1e300, -1e15, 10**400])  # the first is in milliseconds
def test_times_that_are_no_dates_are_unknown(time):
    write(*(json.dumps({"step": i, "time": time, "loss": i}) + "\n" for i in (1, 2)))
    run = Run(Path("run"), "run")
    run.read()
    assert run.record.speed() is None
    assert of(run)["loss"] == {1: 1, 2: 2}
    assert any("nothing recorded yet" in text for text in shown("run"))
