"""The command `trainer checkpoints`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from callbacks import EarlyStopping, ModelCheckpoint
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer
from trainer.checkpoint import storage
from trainer.checkpoint.accelerator_state import Prepared, save_state
from trainer.checkpoint.storage import MANIFEST, files_in, open_staging, write_manifest
from trainer.cli import main
from trainer.configuration import ProjectConfiguration

ROOT = Path("run/checkpoints")
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
    for line, step, epoch in zip(lines[3:5], (8, 16), (0, 1), strict=True):
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
        save_state(None, Prepared(), ALONE, project)
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


def test_leftovers_are_listed(report, table):
    make(1)
    staging = storage.open_staging(ROOT / "step-00000002")
    (staging / "model.safetensors").write_text("half")
    for kind, step in (("replaced", 1), ("trash", 0), ("staging", 3)):  # the last but not renamed
        shutil.copytree(ROOT / "step-00000001", ROOT / f".cadence-{kind}-step-0000000{step}")
    found = report("run")
    assert [each["name"] for each in found["checkpoints"]] == ["step-00000001"]
    assert [Path(each["path"]).name for each in found["leftovers"]] == [
        ".cadence-replaced-step-00000001",
        ".cadence-staging-step-00000002",
        ".cadence-staging-step-00000003",
        ".cadence-trash-step-00000000",
    ]
    assert table("run")[-3].split() == [".cadence-staging-step-00000002", "4", "B"]


def test_quarantined_checkpoints_are_listed_and_stay(report, states):
    for step in (1, 2, 3):
        make(step)
    (ROOT / "step-00000001" / "notes.txt").touch()
    make(1)
    (ROOT / "step-00000002" / MANIFEST).unlink()
    make(2)
    storage.quarantine(ROOT / "step-00000003", "abandoned")
    aside = ["abandoned-step-00000003", "damaged-step-00000002", "replaced-step-00000001"]
    found = report("run")
    assert [Path(each["path"]).name for each in found["leftovers"]] == aside
    assert [each["step"] for each in found["checkpoints"]] == [1, 2]
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
    assert report("run")["leftovers"] == []
    assert names(ROOT / "checkpoint_0") == [".cadence-staging", "notes.txt"]


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["file"], "file is a file"),
    ],
)
def test_wrong_usage_is_an_error_and_changes_nothing(arguments, error, usage_error):
    for step in (1, 2):
        make(step)
    Path("file").touch()
    assert error in usage_error(*arguments)
    assert steps() == [1, 2]
