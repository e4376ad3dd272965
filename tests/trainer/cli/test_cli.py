"""The command `trainer`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import callbacks
import trackers
import trainer
from trainer.cli import main

ROOT = Path(trainer.__file__).parents[1]


def rows(text: str) -> dict[str, str]:
    """Return the lines of a two-column table."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line)


def test_version_is_that_of_the_distribution(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cadence {metadata.version('cadence-trainer')}\n"


def test_version_imports_no_torch():
    # `trainer/__init__.py` may import what it likes; the command line itself must not.
    script = (
        "import sys, types\n"
        "package = types.ModuleType('trainer')\n"
        f"package.__path__ = [{str(ROOT / 'trainer')!r}]\n"
        "sys.modules['trainer'] = package\n"
        "from trainer.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "finally:\n"
        "    print([name for name in ('torch', 'trainer.trainer') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_without_a_command_the_help_is_shown_and_the_code_is_1(capsys):
    assert main([]) == 1
    assert "usage: trainer" in capsys.readouterr().out


def test_an_unknown_command_is_an_error_that_names_the_choices(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["environment"])
    assert caught.value.code == 2
    assert "'env'" in capsys.readouterr().err


def test_env_names_versions_devices_and_files(capsys):
    assert main(["env"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["cadence"] == metadata.version("cadence-trainer")
    assert shown["python"].startswith(sys.version.split()[0])
    assert shown["torch"] == torch.__version__
    assert "cpu" in shown["devices"]
    for package in (callbacks, trackers, trainer):
        assert shown[package.__name__] == package.__file__


@pytest.mark.gpu
def test_env_names_the_gpu(capsys):
    main(["env"])
    assert torch.cuda.get_device_name(0) in rows(capsys.readouterr().out)["devices"]


@pytest.mark.parametrize("name", ["trainer.py", "callbacks.py", "trackers/__init__.py"])
def test_env_names_a_file_in_the_way(capsys, tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert main(["env"]) == 1
    assert f"{path} is imported instead" in capsys.readouterr().out


def test_the_module_is_the_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "trainer", "env"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert rows(run.stdout)["trainer"] == trainer.__file__
