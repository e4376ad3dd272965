"""The command `trainer`."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch

import callbacks
import trackers
import trainer
from trainer import environment
from trainer.cli import COMMANDS, main, program
from trainer.cli.env import VARIABLES
from trainer.cli.parsing import sigint_default
from trainer.launch import entry

ROOT = Path(trainer.__file__).parents[1]


def rows(text: str) -> dict[str, str]:
    """Return the lines of a two-column table."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line)


def test_version_is_that_of_the_distribution(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cadence {metadata.version('cadence-trainer')}\n"
    assert trainer.__version__ == metadata.version("cadence-trainer")


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


@pytest.mark.parametrize(("word", "nearest"), [("lanch", "'launch'"), ("--hlep", "--help")])
def test_an_unknown_word_names_the_nearest(capsys, word, nearest):
    assert main([word]) == 2
    assert f" Did you mean {nearest}?" in capsys.readouterr().err


def test_a_closed_pipe_ends_a_command_silently(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setattr("sys.argv", ["trainer", "completion", "bash"])
        assert program() == 141
    assert capfd.readouterr().err == ""


def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    monkeypatch.setattr("sys.argv", ["trainer", "launch", "--help"])
    with pytest.raises(SystemExit, match="0"):
        program()
    assert b"KEY=VALUE,\\u2026" in shown.getvalue()


def test_a_deleted_current_folder_is_an_error(monkeypatch, tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["env"]) == 1
    assert "trainer env: the current folder no longer exists" in capsys.readouterr().err


# Ctrl-C comes while torch is loaded, by code that catches what it raises and goes on.
LOADING = """
import importlib.abc, os, signal, sys

class Loading(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass
            except BaseException:
                pass
            print("it went on")
            os._exit(7)

sys.meta_path.insert(0, Loading())
from trainer.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", ["fit base.yaml", "launch --cpu --num_processes 2 train.py"])
def test_ctrl_c_while_torch_is_loaded_ends_a_command(words):
    Path("train.py").touch()
    run = subprocess.run(
        [sys.executable, "-c", LOADING, *words.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


def test_the_users_handler_of_ctrl_c_is_kept(monkeypatch):
    def own(*_: object) -> None:
        """A handler of the user's."""

    for handler in (signal.SIG_IGN, own):  # the first one is that of a job in the background
        before = signal.signal(signal.SIGINT, handler)
        with sigint_default():
            assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, before)
    with sigint_default():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with suppress(ZeroDivisionError), sigint_default():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_exit_codes_are_listed_in_order(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    codes = capsys.readouterr().out.partition("exit codes:\n")[2].splitlines()
    assert [line.split()[0] for line in codes] == ["0", "1", "2", "124", "130", "138", "143"]


def test_env_names_versions_devices_files_and_packages(capsys):
    assert main(["env"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["cadence"] == metadata.version("cadence-trainer")
    assert shown["python"].startswith(sys.version.split()[0])
    assert shown["torch"] == torch.__version__
    assert "cpu" in shown["devices"]
    for package in (callbacks, trackers, trainer):
        assert shown[package.__name__] == package.__file__
    packages = shown["packages"].split(", ")
    assert f"safetensors {metadata.version('safetensors')}" in packages
    names = {package.split()[0] for package in packages}
    assert {"numpy", "tqdm"} <= names
    assert not {"torch", "pytest", "ruff", "cadence-trainer"} & names


def test_env_shows_the_configuration_and_where_it_was_read(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    place = tmp_path / "accelerate" / "default_config.yaml"
    main(["env"])
    assert rows(capsys.readouterr().out)["configuration"] == f"{place} (does not exist)"
    place.parent.mkdir()
    place.write_text("num_processes: 3\nmixed_precision: bf16\n")
    main(["env"])
    shown = rows(capsys.readouterr().out)
    assert shown["configuration"] == f"{place}: num_processes=3, mixed_precision=bf16"
    assert shown["HF_HOME"] == str(tmp_path)
    (tmp_path / "other.yaml").write_text("num_process: 3\n")
    assert main(["env", "--config_file", "other.yaml"]) == 0
    shown = rows(capsys.readouterr().out)["configuration"]
    assert shown.startswith("other.yaml: ")
    assert "Did you mean 'num_processes'?" in shown
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["env", "--config_file=~/other.yaml"]) == 0
    assert f"{tmp_path}/other.yaml: " in rows(capsys.readouterr().out)["configuration"]


def test_env_shows_the_libraries_and_the_variables_of_engines(capsys, monkeypatch):
    of_extras = {"deepspeed": "deepspeed", "megatron": "megatron-core", "fp8": "torchao"}
    required = [f'{name}>=0.1; extra == "{extra}"' for extra, name in of_extras.items()]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    monkeypatch.setattr(metadata, "version", lambda name: f"of {name}")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_DGRAD", "true")
    main(["env"])
    shown = rows(capsys.readouterr().out)
    others = {"peft", "transformer-engine", "transformers"}
    names = {entry.partition(" of ")[0] for entry in shown["packages"].split(", ")}
    assert names == {*of_extras.values(), *others}
    assert shown["ACCELERATE_FP8_BACKEND"] == "AO"
    assert shown["ACCELERATE_FP8_OVERRIDE_DGRAD"] == "true"


def test_env_names_the_launcher_and_the_variables_that_are_read(capsys, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    main(["env"])
    assert rows(capsys.readouterr().out)["launcher"] == "none"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_TOKEN_OF_MINE", "a secret")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    main(["env"])
    text = capsys.readouterr().out
    assert rows(text)["launcher"] == "torchrun: rank 1 of 4"
    assert rows(text)["ACCELERATE_USE_CPU"] == "true"
    assert "secret" not in text
    monkeypatch.setenv("RANK", "4")
    main(["env"])
    assert "rank 4 of 4" in rows(capsys.readouterr().out)["launcher"]


def test_env_knows_every_variable_that_is_read():
    named = r"""environment\.read(?:_int|_flag)?\(\s*"([A-Z_\d]+)\""""
    sources = [path for path in (ROOT / "trainer").rglob("*.py") if path.name != "environment.py"]
    read = {name for path in sources for name in re.findall(named, path.read_text())}
    # These two read them themselves, by names in constants too.
    own = {
        name
        for module in (environment, entry)
        for name in re.findall(
            r'"([A-Z][A-Z\d]*_[A-Z_\d]+|RANK)"', Path(module.__file__).read_text()
        )
    }
    assert len(read) > 10
    assert len(own) > 20
    assert entry.ERROR_PID in own
    assert (read | own) - set(VARIABLES) == set()


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


# Completes its arguments as the words of a command line; the last one is being typed.
OFFER = """
source words.bash
offer() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    $(complete -p trainer | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    echo "${COMPREPLY[@]}"
}
offer trainer ""
offer trainer check
offer trainer launch --mixed_pre
offer trainer launch --mixed_precision b
offer trainer launch tra
offer trainer env --config_file fo
offer trainer completion ""
"""


def test_bash_completes_commands_options_choices_and_files(capsys, tmp_path):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "words.bash").write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    (tmp_path / "four.yaml").touch()
    subprocess.run(["bash", "-n", "words.bash"], check=True, timeout=60)
    run = subprocess.run(["bash", "-c", OFFER], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    commands, check, option, choice, script, file, shells = run.stdout.splitlines()
    assert set(COMMANDS) <= set(commands.split())
    assert check == "checkpoints"
    assert "--mixed_precision" in option.split()
    assert choice == "bf16"
    assert script == "train.py"
    assert file == "four.yaml"
    assert shells.split() == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(capsys, shell):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in (*COMMANDS, "mixed_precision", "bf16") if name not in script] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_completion_without_shtab_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'cadence-trainer[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_how_it_is_used(capsys, name):
    """Its help has examples, and is one that `COMMANDS` can load."""
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "exit codes:" in capsys.readouterr().out
