"""A user's file in the place of one of the three packages is named, whatever imports first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_script(
    folder: Path, source: str, *, name: str = "script.py"
) -> subprocess.CompletedProcess[str]:
    """Run a script that lies in `folder`, as its user would."""
    (folder / name).write_text(source)
    return subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def put(folder: Path, name: str) -> Path:
    """Put a user's own file into the folder; running it would show."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("print('the file of the user ran')\n")
    return path


@pytest.mark.parametrize("name", ["callbacks.py", "trackers/__init__.py"])
@pytest.mark.parametrize("source", ["import trainer", "from trainer import Trainer"])
def test_import_of_trainer_names_the_file_in_the_way(tmp_path, name, source):
    path = put(tmp_path, name)
    run = run_script(tmp_path, source)
    assert run.returncode == 1
    error = run.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {path} shadows the package")
    assert str(ROOT / name.removesuffix(".py").removesuffix("/__init__")) in error
    assert "rename" in error
    assert "the file of the user ran" not in run.stdout


def test_a_file_that_was_imported_before_is_named_too(tmp_path):
    path = put(tmp_path, "callbacks.py")
    run = run_script(tmp_path, "import callbacks\nimport trainer")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"ImportError: {path} shadows")


def test_another_folder_may_have_such_files(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    put(tmp_path, "callbacks.py")
    run = run_script(inner, "import trainer")
    assert run.returncode == 0, run.stderr


def test_a_script_called_trainer_that_imports_itself_is_named_by_python(tmp_path):
    # Nothing of ours runs here; the error that the user sees must still lead to the file.
    path = tmp_path / "trainer.py"
    run = run_script(tmp_path, "from trainer import Trainer\n", name="trainer.py")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: cannot import name 'Trainer'")
    assert str(path) in run.stderr.splitlines()[-1]


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder into which only the check of `trainer` is installed, so that it runs at once."""
    site = tmp_path / "site"
    (site / "trainer").mkdir(parents=True)
    shutil.copy(ROOT / "trainer" / "_siblings.py", site / "trainer")
    (site / "trainer" / "__init__.py").write_text(
        "from trainer._siblings import check_siblings\ncheck_siblings()\n"
    )
    for name in ("callbacks", "trackers"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    return site


def import_from(site: Path, source: str = "import trainer") -> subprocess.CompletedProcess[str]:
    # -S: the packages of the environment are out of sight
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[0] = {str(site)!r}\n{source}"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_three_packages_side_by_side_are_accepted(installed):
    run = import_from(installed)
    assert run.returncode == 0, run.stderr


def test_packages_that_are_links_are_accepted(installed, tmp_path):
    store = tmp_path / "store"
    for name in ("callbacks", "trackers", "trainer"):
        (store / name).mkdir(parents=True)
        shutil.move(installed / name, store / name / name)
        (installed / name).symlink_to(store / name / name)
    run = import_from(installed)
    assert run.returncode == 0, run.stderr


def test_packages_found_through_a_link_are_accepted(installed, tmp_path):
    (tmp_path / "link").symlink_to(installed)
    run = import_from(
        installed, f"import callbacks; sys.path[0] = {str(tmp_path / 'link')!r}\nimport trainer"
    )
    assert run.returncode == 0, run.stderr


def test_a_folder_in_the_place_of_a_missing_package_is_named(installed):
    (installed / "callbacks" / "__init__.py").unlink()
    run = import_from(installed)
    assert run.returncode == 1
    assert f"ImportError: {installed / 'callbacks'} shadows" in run.stderr


def test_a_distribution_that_has_overwritten_a_package_is_named(tmp_path):
    """As pip leaves it: `trackers` of another distribution, installed over ours."""
    for name in ("trainer", "callbacks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    put(tmp_path, "trackers/__init__.py").write_text("")
    for distribution in ("computer_vision", "cadence_trainer"):
        information = tmp_path / f"{distribution}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
        (information / "top_level.txt").write_text("trackers\n")
    run = run_script(tmp_path, "from trainer import Trainer")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(
        "ImportError: The distribution computer_vision also installs a package 'trackers'"
    )
