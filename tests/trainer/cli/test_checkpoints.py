"""The command `trainer checkpoints`."""

from __future__ import annotations

import json
import os
import pty
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from callbacks import EarlyStopping, ModelCheckpoint
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer
from trainer.checkpoint import storage
from trainer.checkpoint.accelerator_state import PreparedObjects, save_state
from trainer.checkpoint.lock import LOCK, alone_in
from trainer.checkpoint.storage import MANIFEST, files_in, open_staging, write_manifest
from trainer.cli import main
from trainer.configuration import ProjectConfiguration

ROOT = Path("run/checkpoints")
OLD = time.time() - 2 * 3600
ALONE = SimpleNamespace(
    is_main_process=True,
    is_local_main_process=True,
    num_processes=1,
    process_index=0,
    local_process_index=0,
)


def make(name: str | int, *, root: Path = ROOT, content: str = "weights", **fields: object) -> Path:
    target = root / (name if isinstance(name, str) else storage.checkpoint_name(name))
    staging = storage.open_staging(target)
    (staging / "model.safetensors").write_text(content)
    (staging / "shards").mkdir()
    (staging / "shards" / "0.bin").write_text(content * 2)
    step = {} if isinstance(name, str) else {"step": name}
    return storage.commit(staging, target, {"world_size": 2, **step, **fields})


def age(folder: Path, when: float = OLD) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when, when))


def flip_bit(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def truncate(path: Path) -> None:
    (path / "model.safetensors").write_text("wei")


def interrupt_a_shared_save(folder: Path) -> None:
    """Leave a folder as a save into it does that is killed when it is committed, but not moved."""
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    staging = open_staging(folder, shared=True)
    (staging / "model.safetensors").touch()
    write_manifest(staging, {"kind": "accelerator", "world_size": 2})


def names(root: Path = ROOT) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def steps() -> list[int]:
    return [step for name in names() if (step := storage.step_of(name)) is not None]


def call(*arguments: object) -> int:
    """The exit code, whichever way the command ends."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["checkpoints", *map(str, arguments)]))
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def report(capsys):
    def report(*arguments: object, code: int = 0) -> dict:
        capsys.readouterr()
        assert call(*arguments, "--json") == code
        return json.loads(capsys.readouterr().out, parse_constant=lambda name: 1 / 0)

    return report


@pytest.fixture
def states(report):
    def states(*arguments: object, code: int) -> dict[str, str]:
        found = report(*arguments, code=code)["checkpoints"]
        return {each["name"]: each["state"] for each in found}

    return states


@pytest.fixture
def table(capsys):
    def table(*arguments: object, code: int = 0) -> list[str]:
        assert call(*arguments) == code
        return capsys.readouterr().out.splitlines()

    return table


@pytest.fixture
def usage_error(capsys):
    def usage_error(*arguments: object) -> str:
        assert call(*arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("usage: trainer checkpoints")
        return error.partition("error: ")[2].strip()

    return usage_error


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> Iterator[None]:
    """A terminal on which somebody has typed `answer`."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(ours, answer)
        yield
    os.close(ours)


# -- what is there ---------------------------------------------------------------------------------


def test_the_table_of_a_run(table):
    class Measured(Line):
        def validation_step(self, batch, batch_idx):
            for name in ("a", "b", "c", "d"):
                self.log(name, float("nan") if name == "b" else 0.5)

    watch_c = [EarlyStopping("c"), ModelCheckpoint(monitor="c", save_top_k=-1)]
    trainer = quiet_trainer(max_epochs=2, callbacks=watch_c)
    trainer.fit(Measured(), loader(16), loader(16))
    lines = table("run")
    assert lines[0] == str(ROOT.absolute())
    assert " ".join(lines[2].split()) == "name step epoch metrics size age processes state"
    metrics = "c=0.5 a=0.5 b=nan +1"  # the monitored first
    for line, step, epoch in zip(lines[3:5], (8, 16), (1, 2), strict=True):
        size = sum(file.stat().st_size for file in (ROOT / f"step-{step:08d}").iterdir())
        start = f"step-{step:08d} {step} {epoch} {metrics} {size / 1000:.3g} kB"
        row = line.split()
        assert " ".join(row[:-4]) == start
        assert row[-3:] == ["s", "1", "sound"]
    assert lines[5:] == ["", "Checked: manifests and sizes; --verify reads the files too."]
    assert table("run", "--verify")[-1] == "Checked: manifests, sizes and hashes."


def test_names_cannot_command_the_terminal(capsys):
    make(1, metrics={"\x1b]0;owned\x07loss": 1.0})
    make("named \x1b[31m\x9b2J")
    assert call("run") == 0
    assert call("none \x1b[2J") == 2
    said = "".join(capsys.readouterr())
    assert not set(said) & {"\x1b", "\x07", "\x9b"}
    for shown in (r"\x1b]0;owned\x07loss=1", r"named \x1b[31m\x9b2J", r"none \x1b[2J"):
        assert shown in said


def test_json_holds_the_same_for_machines(report):
    make(7, epoch=1, metrics={"loss": 0.25, "nan": float("nan"), "inf": float("inf"), "x": None})
    os.utime(ROOT / "step-00000007/manifest.json", (86400, 86400))
    found = report("run")
    path = ROOT.absolute() / "step-00000007"
    assert found == {
        "root": str(ROOT.absolute()),
        "checkpoints": [
            {
                "name": "step-00000007",
                "path": str(path),
                "kind": "trainer",
                "state": "sound",
                "note": None,
                "hashed": False,
                "step": 7,
                "epoch": 1,
                "metrics": {"loss": 0.25, "nan": None, "inf": None},
                "size": sum(file.stat().st_size for file in files_in(path)),
                "saved": "1970-01-02T00:00:00+00:00",
                "processes": 2,
            }
        ],
        "leftovers": [],
    }
    assert report("run", "--verify")["checkpoints"][0]["hashed"] is True


def test_a_project_its_checkpoints_or_one_of_them(report):
    for step in (1, 2):
        make(step)
    one = ROOT / "step-00000002"
    for folder in ("run", ROOT, ROOT.absolute(), "run/../run"):
        assert [each["step"] for each in report(folder)["checkpoints"]] == [1, 2]
    assert [each["step"] for each in report(one)["checkpoints"]] == [2]
    os.chdir(one)
    assert [each["step"] for each in report(".")["checkpoints"]] == [2]


def test_checkpoints_of_the_accelerator_and_of_the_user(states, report):
    project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
    for _ in range(11):
        save_state(None, PreparedObjects(), ALONE, project)
    make("final", step=3)
    make(5)
    (ROOT / "notes").mkdir()
    (ROOT / "checkpoint_99").touch()
    (ROOT / "web").mkdir()
    (ROOT / "web/manifest.json").write_text('{"name": "an app", "files": []}')
    expected = ["step-00000005", *(f"checkpoint_{number}" for number in range(11)), "final"]
    assert list(states("run", code=0)) == expected  # by number, not by name
    kinds = [each["kind"] for each in report("run", "--verify")["checkpoints"]]
    assert kinds == ["trainer", *["accelerator"] * 11, "trainer"]


def test_a_folder_of_accelerate_is_foreign_and_no_error(states, table):
    (ROOT / "checkpoint_0").mkdir(parents=True)
    (ROOT / "checkpoint_0/optimizer.bin").touch()
    assert states("run", "--verify", code=0) == {"checkpoint_0": "foreign"}
    assert "checkpoint_0: has no manifest" in table("run")[-1]


def test_a_folder_without_checkpoints(table, report):
    Path("empty").mkdir()
    assert table("empty")[-1] == "No checkpoints."
    assert report("empty")["checkpoints"] == []


def test_a_folder_of_runs_names_them(table):
    for run in ("sweep/1", "sweep/0"):
        Path(run, "checkpoints").mkdir(parents=True)
    assert table("sweep")[-1] == "Runs in that folder: 0, 1."


# -- damage ----------------------------------------------------------------------------------------


def tear_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format_vers')


def edit_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"world_size": 2', '"world_size": 1'))


DAMAGES = {
    lambda path: (path / MANIFEST).write_text("{}"): "manifest.json",
    truncate: "model.safetensors is damaged: it has 3 bytes, but the manifest says 7.",
    lambda path: (path / "shards/0.bin").unlink(): "0.bin is missing from the checkpoint.",
    lambda path: (path / "manifest.json").unlink(): "manifest.json is missing",
    tear_manifest: "manifest.json is damaged",
    edit_manifest: "manifest.json is damaged: its hash differs",
}


@pytest.mark.parametrize("verify", [[], ["--verify"]], ids=["sizes", "hashes"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_shown_with_the_file(damage, verify, states, table):
    make(1)
    damage(make(2))
    assert states("run", *verify, code=1) == {"step-00000001": "sound", "step-00000002": "damaged"}
    assert states(ROOT / "step-00000001", *verify, code=0) == {"step-00000001": "sound"}
    assert states(ROOT / "step-00000002", *verify, code=1) == {"step-00000002": "damaged"}
    (line,) = [line for line in table("run", *verify, code=1) if line.startswith("step-00000002: ")]
    assert str(ROOT.absolute() / "step-00000002") in line
    assert DAMAGES[damage] in line


def test_a_flipped_bit_is_found_by_the_hashes(states):
    flip_bit(make(1))
    assert states("run", code=0) == {"step-00000001": "sound"}
    assert states("run", "--verify", code=1) == {"step-00000001": "damaged"}


def test_a_later_format_is_not_called_damaged(states, monkeypatch, table):
    monkeypatch.setattr("trainer.checkpoint.storage.FORMAT_VERSION", 2)
    make(1)
    monkeypatch.undo()
    assert states("run", code=1) == {"step-00000001": "unreadable"}
    assert "format version 2" in table("run", code=1)[-1]


# -- leftovers -------------------------------------------------------------------------------------


def test_leftovers_are_listed_as_what_they_are(report, table):
    make(1)
    staging = storage.open_staging(ROOT / "step-00000002")
    (staging / "model.safetensors").write_text("half")
    for kind, step in (("replaced", 1), ("trash", 0), ("staging", 3)):  # the last but not renamed
        shutil.copytree(ROOT / "step-00000001", ROOT / f".cadence-{kind}-step-0000000{step}")
    found = report("run")
    assert [each["name"] for each in found["checkpoints"]] == ["step-00000001"]
    meanings = {Path(each["path"]).name: each["meaning"] for each in found["leftovers"]}
    assert meanings == {
        ".cadence-replaced-step-00000001": "replaced by a later save",
        ".cadence-staging-step-00000002": "a running or killed save",
        ".cadence-staging-step-00000003": "a running or killed save",
        ".cadence-trash-step-00000000": "a running or killed removal",
    }
    lines = table("run")
    assert lines[-5] == "Leftovers:"
    name, size, unit, *_, meaning = lines[-3].split(maxsplit=5)
    assert (name, size, unit) == (".cadence-staging-step-00000002", "4", "B")
    assert meaning == "a running or killed save"


def test_quarantined_checkpoints_are_listed_and_stay(report, states):
    for step in (1, 2, 3):
        make(step)
    (ROOT / "step-00000001" / "notes.txt").touch()
    make(1)
    (ROOT / "step-00000002" / MANIFEST).unlink()
    make(2)
    storage.quarantine(ROOT / "step-00000003", "abandoned")
    kept = "never removed automatically"
    aside = {
        "abandoned-step-00000003": f"the run resumed from an earlier one; {kept}",
        "damaged-step-00000002": f"damaged, renamed by a save of that step; {kept}",
        "replaced-step-00000001": f"replaced, but contains other files; {kept}",
    }
    age(ROOT)
    found = report("run")
    assert {Path(each["path"]).name: each["meaning"] for each in found["leftovers"]} == aside
    assert [each["step"] for each in found["checkpoints"]] == [1, 2]
    report("run", "--prune", "--keep-last", 1, "--yes")
    assert names() == [*aside, "step-00000002"]
    assert states(ROOT / "abandoned-step-00000003", code=0) == {"abandoned-step-00000003": "sound"}


def test_a_checkpoint_renamed_by_a_killed_save_is_listed(report, table):
    make(1).rename(ROOT / ".cadence-replaced-step-00000001")
    for folder in ("run", ROOT / "step-00000001"):
        (found,) = report(folder)["checkpoints"]
        assert (found["name"], found["state"]) == ("step-00000001", "sound")
        assert Path(found["path"]).is_dir()
    assert report("run")["leftovers"] == []
    assert "the next start restores it" in table("run")[-1]


def test_a_committed_save_that_is_not_moved_yet_is_unfinished(states, report):
    interrupt_a_shared_save(ROOT / "checkpoint_0")
    assert states("run", "--verify", code=0) == {"checkpoint_0": "unfinished"}
    age(ROOT)
    found = report("run", "--prune", "--keep-last", 1, "--yes")
    assert found["leftovers"] == found["prune"]["swept"] == []
    assert names(ROOT / "checkpoint_0") == [".cadence-staging", "notes.txt"]


# -- pruning ---------------------------------------------------------------------------------------


def test_prune_keeps_the_last(report):
    for step in (1, 2, 10, 100):
        make(step)
    done = report("run", "--prune", "--keep-last", 2, "--yes")["prune"]
    assert steps() == [10, 100]
    assert names() == ["step-00000010", "step-00000100"]
    assert done == {
        "done": True,
        "kept": {"step-00000100": "among the last", "step-00000010": "among the last"},
        "untouched": {},
        "removed": ["step-00000001", "step-00000002"],
        "swept": [],
        "failed": {},
    }


@pytest.mark.parametrize(("mode", "kept"), [("min", [3, 7]), ("max", [4, 7])])
def test_prune_keeps_the_best(mode, kept):
    nan, inf = float("nan"), float("inf")
    for step, loss in enumerate((nan, inf, -inf, 0.0, 1.0, 0.0, 1.0)):  # ties keep the older
        make(step, metrics={"loss": loss})
    make(7, metrics={})
    arguments = ("--prune", "--keep-last", 1, "--keep-best", "loss", "--mode", mode, "--yes")
    assert call("run", *arguments) == 0
    assert steps() == kept


def test_a_metric_that_no_checkpoint_has_removes_nothing(usage_error):
    for step in (1, 2):
        make(step, metrics={"val/loss": 1.0, "loss": float("nan")})
    for metric in ("val_loss", "loss"):
        error = usage_error(
            *("run", "--prune", "--keep-last", 1, "--keep-best", metric, "--mode", "min", "--yes")
        )
        assert error.startswith(f"--keep-best {metric}: ")
        assert "loss, val/loss" in error
    assert steps() == [1, 2]


def test_both_kinds_are_counted_by_themselves_and_named_ones_stay():
    for name in (1, 2, "checkpoint_8", "checkpoint_9", "checkpoint_10", "final", "exception-step"):
        make(name)
    assert call("run", "--prune", "--keep-last", 1, "--yes") == 0
    assert names() == ["checkpoint_10", "exception-step", "final", "step-00000002"]


def test_weights_alone_are_counted_by_themselves_since_no_run_goes_on_from_them():
    for step in (1, 2, 3, 4):
        make(step, weights_only=step > 2)
    assert call("run", "--prune", "--keep-last", 1, "--yes") == 0
    assert steps() == [2, 4]


def test_what_is_kept_is_read_first_and_must_be_sound(report):
    for step in (1, 2, 3, 4, 5):
        make(step, metrics={"loss": float(step)})
    flip_bit(ROOT / "step-00000005")  # sizes alone do not tell
    flip_bit(ROOT / "step-00000001")
    truncate(ROOT / "step-00000003")
    arguments = ("--prune", "--keep-last", 1, "--keep-best", "loss", "--mode", "min")
    shown = report("run", *arguments, "--dry-run", code=1)
    states = {each["step"]: (each["state"], each["hashed"]) for each in shown["checkpoints"]}
    assert states == {
        1: ("damaged", True),
        2: ("sound", True),
        3: ("damaged", False),
        4: ("sound", True),
        5: ("damaged", True),
    }
    assert call("run", *arguments, "--yes") == 0  # what is left is sound
    assert steps() == [2, 4]


@pytest.mark.parametrize("best", [[], ["--keep-best", "loss", "--mode", "min"]])
def test_nothing_goes_if_nothing_sound_would_be_left(best, report):
    for step in (1, 2, 3):
        flip_bit(make(step, metrics={"loss": 0.0}))
    if best:
        make(4)  # sound, but not one with the metric
    done = report("run", "--prune", "--keep-last", 1, *best, "--yes", code=1)["prune"]
    assert done["removed"] == []
    assert steps()[:3] == [1, 2, 3]


def test_prune_leaves_what_is_not_ours_with_the_reason(report):
    (make(1) / "notes.txt").touch()
    tear_manifest(make(2))
    make(3)
    Path(ROOT / "best").symlink_to("step-00000003")
    make(4).rename(ROOT / ".cadence-replaced-step-00000004")
    make(5)
    make(6)
    (ROOT / "checkpoint_0").mkdir()
    interrupt_a_shared_save(ROOT / "checkpoint_1")
    make("checkpoint_2")
    before = {path: path.lstat().st_ino for path in Path().rglob("*")}
    done = report("run", "--prune", "--keep-last", 1, "--yes", code=1)["prune"]
    gone = {path for path in before if not os.path.lexists(path)}
    assert gone == {path for path in before if ROOT / "step-00000005" in (path, *path.parents)}
    assert done["removed"] == ["step-00000005"]
    unclear = "it is unknown which of its files belong to the checkpoint"
    assert done["untouched"] == {
        "step-00000001": "it contains notes.txt, which is not part of the checkpoint",
        "step-00000002": unclear,
        "step-00000003": "it is a link or the target of one",
        "step-00000004": "renamed by a killed save; the next start restores it",
        "checkpoint_0": unclear,
        "checkpoint_1": unclear,
        "best": "you named it",
    }


def test_leftovers_of_an_hour_ago_are_swept_younger_ones_are_not(report):
    make(1)
    for step in (2, 3):
        (storage.open_staging(ROOT / f"step-0000000{step}") / "model.safetensors").touch()
    (ROOT / ".cadence-trash-step-00000000").mkdir()
    shutil.copytree(ROOT / "step-00000001", ROOT / ".cadence-replaced-step-00000001")
    (make("checkpoint_0") / ".cadence-staging").mkdir()
    for name in names():
        age(ROOT / name)
    running = ROOT / ".cadence-staging-step-00000003"
    os.utime(running / "model.safetensors")  # the folder is old, a file in it is not
    done = report("run", "--prune", "--keep-last", 1, "--yes")["prune"]
    assert done["swept"] == [
        ".cadence-replaced-step-00000001",
        ".cadence-staging-step-00000002",
        ".cadence-trash-step-00000000",
        "checkpoint_0/.cadence-staging",
    ]
    assert names() == [running.name, "checkpoint_0", "step-00000001"]
    assert names(ROOT / "checkpoint_0") == ["manifest.json", "model.safetensors", "shards"]
    assert names(running) == ["model.safetensors"]


def test_a_dry_run_shows_and_changes_nothing(table):
    for step in (1, 2):
        make(step)
    age(storage.open_staging(ROOT / "step-00000003"))
    before = names()
    lines = table("run", "--prune", "--keep-last", 1, "--dry-run")
    assert names() == before
    plan = [line.split(maxsplit=2) for line in lines[-5:-2]]
    assert plan == [
        ["sweep", ".cadence-staging-step-00000003", "a running or killed save"],
        ["remove", "step-00000001", "sound"],
        ["keep", "step-00000002", "among the last"],
    ]
    size = sum(file.stat().st_size for file in files_in(ROOT / "step-00000001"))
    assert lines[-1] == f"To remove: 1 checkpoint and 1 leftover, {size} B."


@pytest.mark.parametrize(
    ("answer", "left"),
    [(b"Yes\n", [2]), (b"\n", [1, 2]), (b"\x04", [1, 2])],
)
def test_prune_asks_on_a_terminal(answer, left, monkeypatch, capsys):
    for step in (1, 2):
        make(step)
    with terminal(monkeypatch, answer):
        assert call("run", "--prune", "--keep-last", 1) == 0
    assert steps() == left
    out = capsys.readouterr().out
    assert out.index("remove  step-00000001") < out.index("Remove 1 checkpoint, ")
    assert ("Nothing was removed." in out) == (left == [1, 2])


def test_without_a_terminal_prune_removes_nothing(usage_error, monkeypatch):
    for step in (1, 2):
        make(step)
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        error = usage_error("run", "--prune", "--keep-last", 1)
        assert "no terminal" in error
        assert "--yes" in error
        assert steps() == [1, 2]
        assert call("run", "--prune", "--keep-last", 2) == 0  # there is nothing to ask about


class Answers:
    """A terminal on which something happens before the user answers."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def isatty(self):
        return True

    def readline(self):
        self.meanwhile()
        return "y\n"


def test_prune_stops_if_a_kept_checkpoint_disappears(monkeypatch, capsys):
    for step in (1, 2):
        make(step)
    monkeypatch.setattr(sys, "stdin", Answers(lambda: storage.remove(ROOT / "step-00000002")))
    assert call("run", "--prune", "--keep-last", 1) == 1
    assert steps() == [1]
    assert "step-00000002: was removed by another process" in capsys.readouterr().err


def test_a_failed_removal_is_reported_and_the_rest_goes(report, capsys, monkeypatch):
    for step in (1, 2, 3):
        make(step)
    (ROOT / ".cadence-trash-step-00000001").touch()  # in the way
    done = report("run", "--prune", "--keep-last", 1, "--yes", code=1)["prune"]
    assert done["removed"] == ["step-00000002"]
    assert list(done["failed"]) == ["step-00000001"]
    assert steps() == [1, 3]
    assert report("run")["leftovers"] == []  # a file is none of ours


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run", "--keep-last", "1"], "--keep-last needs --prune"),
        (["run", "--dry-run"], "--dry-run needs --prune"),
        (["run", "--prune", "--yes"], "--prune needs --keep-last N"),
        (["run", "--prune", "--keep-last", "0", "--yes"], "'0' must be a number of 1 or more"),
        (["run", "--prune", "--keep-last", "1", "--keep-best", "x"], "must be passed together"),
        (["run", "--prune", "--keep-last", "1", "--mode", "min"], "must be passed together"),
        (["run", "--prune", "--keep-last", "1", "--json"], "--json cannot ask"),
        (["run/checkpoints/step-00000001", "--prune", "--keep-last", "1"], "is one checkpoint"),
    ],
)
def test_wrong_usage_is_an_error_and_changes_nothing(arguments, error, usage_error):
    for step in (1, 2):
        make(step)
    Path("file").touch()
    assert error in usage_error(*arguments)
    assert steps() == [1, 2]


@pytest.mark.parametrize(("path", "what"), [("nowhere", "does not exist"), ("file", "is a file")])
def test_a_path_that_is_no_folder_is_named_in_one_line(path, what, capsys):
    Path("file").touch()
    assert call(path) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"trainer checkpoints: {Path(path).absolute()} {what}.")


@pytest.mark.parametrize("folder", [ROOT, ROOT.parent])
def test_nothing_is_pruned_under_a_run(folder, capsys):
    for step in (1, 2):
        make(step)
    before = sorted(ROOT.iterdir())
    arguments = ["checkpoints", str(ROOT), "--prune", "--keep-last", "1", "--yes"]
    with alone_in(folder):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert f"{folder.resolve()} is in use by process {os.getpid()}" in told
        main([*arguments[:-1], "--dry-run"])
        assert sorted(path for path in ROOT.iterdir() if path.name != LOCK) == before
    main(arguments)
    assert len(list(ROOT.iterdir())) == 1
