"""The wheel, built from the source distribution, in an environment with its requirements alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.terminal import run_in_terminal

pytest.importorskip("build")
pytest.importorskip("hatchling")
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """An environment in which pip has installed the wheel and found nothing missing."""
    folder = tmp_path_factory.mktemp("distribution")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    venv.create(folder / "venv", symlinks=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    for distribution in requirements(wheel):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel)
    return folder / "venv"


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def requirements(wheel: Path) -> list[metadata.Distribution]:
    """Return what a wheel requires, without extras, and what this requires in turn."""
    (about,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    found: dict[str, metadata.Distribution] = {}
    left = metadata.PathDistribution(about).requires or []
    while left:
        wanted = Requirement(left.pop())
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[wanted.name] = metadata.distribution(wanted.name)
        left += found[wanted.name].requires or []
    return list(found.values())


def shape_of(line: str) -> str:
    """Return a line without what differs between runs: numbers, times, folders and padding."""
    line = re.sub(r"\[[^\]]*?, (?=\w+/)", "[", line)
    line = re.sub(r"/\S*/(?=runs/)", "/", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "N", line).split())


def test_the_readme_shows_what_its_example_prints(environment, tmp_path, monkeypatch):
    (source,) = re.findall(r'^```python title="train.py"\n(.*?)^```', README, re.M | re.S)
    Path("train.py").write_text(source)
    monkeypatch.setenv("PATH", f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (session,) = re.findall(r"^```text\n(\$ python train.py\n.*?)^```", README, re.M | re.S)
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.M)
    assert [command for command, _ in commands] == [
        "python train.py",
        "trainer checkpoints runs/ring",
    ]
    for command, shown in commands:
        printed = run_in_terminal(command, columns=80)
        of_run = iter([shape_of(line) for line in printed])
        for line in shown.splitlines():  # in this order
            assert line == "..." or shape_of(line) in of_run, (line, printed)
