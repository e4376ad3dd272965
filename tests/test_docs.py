"""What README.md and docs/ say is true: their code runs, their links lead somewhere.

The Python blocks of a page share a namespace and a temporary folder, in which its shell commands
run too, in the order of the page; the examples are there as well. A block with a title
(```python title="train.py") is also a file of that name. Commands run in this process, and scripts
that they launch on live ranks; docs/launching.md launches its first processes as users do. What
sets up an environment is not run; it must exist. `make docs` builds the site of these pages, runs
the notebooks of docs/tutorials and checks the links and the tables of contents.

``python tests/test_docs.py`` writes docs/reference.md anew.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from glob import glob
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

import pytest

import trainer.configuration
import trainer.utils
from tests.helpers.programs import forget_modules_in, run_command
from tests.helpers.ranks import RankError
from trainer.cli import COMMANDS
from trainer.configuration.fields import settings_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = ROOT / "docs" / "reference.md"
LANGUAGES = {"python", "bash", "console", "text", "yaml"}

LAUNCHING = ROOT / "docs" / "launching.md"
PLAIN = re.compile(r"(trainer|python) [^$|>]*")  # needs no shell, but for patterns of files

PEFT = "ignore:`is_gradient_checkpointing` is deprecated"  # of transformers, which peft causes
# It calls names that torch has renamed, and imports inductor.
DEEPSPEED = "ignore::FutureWarning,ignore::DeprecationWarning:torch.jit._script"
TORCHAO = "ignore:Importing :DeprecationWarning"  # its 0.16, which fits torch 2.9

FENCE = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]+\]\(([^)\s]+)\)")

TUTORIALS = ROOT / "docs" / "tutorials"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).removesuffix(".md")


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    options: str
    text: str
    line: int  # of its first line of text

    @property
    def commands(self) -> list[str]:
        """The shell commands in it, without comments; in a console what follows the prompt."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        words = [shlex.split(line, comments=True) for line in lines]
        return [line for line, any_words in zip(lines, words, strict=True) if any_words]


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match[1], match[2], match[3], text[: match.start(3)].count("\n") + 1)
        for match in FENCE.finditer(text)
    ]


def sets_up(command: str) -> bool:
    """Whether a command sets up an environment; if so, check that there is such a thing."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"the Makefile has no such target: {command}"
        return True
    if words[:2] == ["pip", "install"]:
        (what,) = [word for word in words[2:] if word != "-e"]
        path, extras = re.fullmatch(r"([^\[]+)(?:\[(.*)\])?", what).groups()
        known = metadata.metadata("cadence-trainer").get_all("Provides-Extra")
        assert (ROOT / path / "pyproject.toml").is_file()
        assert set((extras or known[0]).split(",")) <= set(known), f"no such extra: {command}"
        return True
    return False


def run_shell(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a hanging one ends with its children
        env={
            **os.environ,
            "PATH": path,
            "PYTHONWARNINGS": f"error,{PEFT},{DEEPSPEED},{TORCHAO}",
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        output, _ = started.communicate(timeout=600)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
    skip_if_old(output)
    assert started.returncode == 0, f"{command}\n{output}"


def skip_if_old(output: str) -> None:
    """Skip the rest of a page if what was printed refuses an older torch by name."""
    lacks = re.search(r"needs torch (\d+)\.(\d+); this is torch (\d+)\.(\d+)", output)
    if lacks and tuple(map(int, lacks.groups()[2:])) < tuple(map(int, lacks.groups()[:2])):
        pytest.skip(lacks[0])


def run_plain(command: str, ranks: object) -> None:
    """Run a command without a shell, and without a new process."""
    words = shlex.split(command, comments=True)
    paths = [sorted(glob(word)) or [word] for word in words]
    try:
        run_command(ranks, [path for found in paths for path in found])
    except RankError as error:
        skip_if_old(str(error))
        raise


# Packages that are not in the extra `test`.
NEEDED = {"data-libraries.md": ("datasets", "webdataset", "polars")}


# Of torch, while it compiles; the second one it hides by other means than filters.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings(PEFT, *DEEPSPEED.split(","))
@pytest.mark.filterwarnings("ignore:TorchDistributedTrial is experimental")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of webdataset
@pytest.mark.timeout(900)  # a page may start many processes, each of which imports torch
@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != TUTORIALS], ids=name_of)
def test_every_block_runs(page, ranks, tmp_path, monkeypatch):
    for package in NEEDED.get(page.name, ()):
        pytest.importorskip(package, reason=f"needs the extra libraries: {package}")
    monkeypatch.setenv("HF_HOME", "hf")  # where `trainer config` writes
    monkeypatch.syspath_prepend(tmp_path)  # blocks import the files of others
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page.read_text()):
        if title := re.search(r'title="(.*?)"', block.options):
            (tmp_path / title[1]).write_text(block.text)
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.text  # errors then give the page's lines
            exec(compile(source, str(page), "exec"), namespace)
        elif block.language in ("bash", "console"):
            for command in block.commands:
                launches = page == LAUNCHING and command.startswith("trainer launch --cpu")
                if sets_up(command):
                    continue
                if PLAIN.fullmatch(command) and not launches:
                    run_plain(command, ranks)
                else:
                    run_shell(command)
    forget_modules_in(tmp_path)


def test_the_source_distribution_has_what_the_readme_and_make_need():
    settings = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^include = \[(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    packed = {"LICENSE", "pyproject.toml", *re.findall(r'"/([^"]+)"', listed)}  # those two always
    links = LINK.findall((ROOT / "README.md").read_text())
    linked = {link.split("/")[0] for link in links if "://" not in link}
    assert {"docs", "CONTRIBUTING.md"} <= linked
    assert linked | {"Makefile", "constraints.txt", "tests"} <= packed


def test_the_promises_are_held_by_tests_that_exist():
    page = ROOT / "docs" / "promises.md"
    for section in page.read_text().split("\n## "):
        files = {page.parent / link for link in LINK.findall(section) if link.endswith(".py")}
        there = Counter(n for f in files for n in re.findall(r"def (test_\w+)", f.read_text()))
        for name in re.findall(r"`(test_\w+)`", section):
            assert there[name] == 1, f"{name}: in {there[name]} of the section's files"
    rows = re.findall(r"^\| P(\d+) \| \*\*.*\.\./tests/", page.read_text(), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 16)]


@each_page
def test_every_block_says_what_it_is(page):
    blocks = [
        b for b in blocks_of(page.read_text()) if not re.fullmatch(r"\{[a-z-]+\}", b.language)
    ]
    assert [b.line for b in blocks if b.language not in LANGUAGES] == []


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *(
            ROOT / name
            for name in (
                "CONTRIBUTING.md",
                "CHANGELOG.md",
                "SECURITY.md",
                "examples/README.md",
                "benchmarks/README.md",
            )
        ),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    assert broken == []


def test_every_picture_is_shown_and_small():
    shown = {
        (page.parent / at).resolve() for page in PAGES for at in IMAGE.findall(page.read_text())
    }
    pictures = set((ROOT / "docs" / "images").iterdir())
    assert pictures == shown != set()
    assert [path.name for path in pictures if path.stat().st_size > 120_000] == []


def test_every_command_is_in_the_table_of_its_page():
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", page.partition("\n## ")[0], re.MULTILINE)[1:]  # no heading
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)", row)} == set(COMMANDS)


# -- the reference ---------------------------------------------------------------------------------


REFERENCE_HEAD = """# Reference

Every public name, by package. The pages below have the signatures, arguments, errors, units and
examples.

```{toctree}
:maxdepth: 1

reference/training
reference/accelerator
reference/callbacks
reference/trackers
reference/configuration
reference/large-models
reference/launching
reference/state
reference/errors
reference/commands
reference/environment
```"""


def summary_of(thing: object) -> str:
    """The first paragraph of a docstring, on one line; of a constant its value."""
    if isinstance(thing, str):
        return f"`{thing}`"
    summary = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`", "`", summary)  # roles are for Sphinx


def make_reference() -> str:
    """The text of docs/reference.md."""
    parts = [REFERENCE_HEAD]
    for name in ("trainer", "callbacks", "trackers"):
        package = import_module(name)
        rows = [f"| `{each}` | {summary_of(getattr(package, each))} |" for each in package.__all__]
        parts.append("\n".join([f"## {name}\n", "| name | what it is |", "|---|---|", *rows]))
    return "\n\n".join([*parts, utils_table(), settings_table()]) + "\n"


def utils_table() -> str:
    """What only `trainer.utils` has."""
    names = [name for name in trainer.utils.__all__ if name not in trainer.__all__]
    rows = [f"| `{name}` | {summary_of(getattr(trainer.utils, name))} |" for name in names]
    head = [
        "## trainer.utils\n",
        "The names of `accelerate.utils`; those that `trainer` has too are above.\n",
        "| name | what it is |",
    ]
    return "\n".join([*head, "|---|---|", *rows])


def settings_table() -> str:
    """The fields of configurations that are options of `trainer launch` and variables."""
    rows = [
        f"| `--{each.option}` | {' '.join(f'`{name}`' for name in each.env)} "
        f"| `{kind}.{field}` | {each.help} |"
        for kind in trainer.configuration.__all__
        if inspect.isclass(getattr(trainer.configuration, kind))
        for field, each in settings_of(getattr(trainer.configuration, kind)).items()
        if each.help
    ]
    head = [
        "## Options of `trainer launch` that are fields of configurations\n",
        "A field that is None takes the environment variable.\n",
        "| option and key of the file | environment variable | field | what it is |",
    ]
    return "\n".join([*head, "|---|---|---|---|", *rows])


def test_the_reference_is_up_to_date():
    assert REFERENCE.read_text() == make_reference(), "run python tests/test_docs.py"


def test_the_site_documents_every_public_name_once():
    listed = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.rst")
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    packages = ("trainer", "callbacks", "trackers")
    public = [f"{name}.{each}" for name in packages for each in import_module(name).__all__]
    assert sorted(listed) == sorted(public)


# -- the checks themselves -------------------------------------------------------------------------


def test_what_is_not_there_is_noticed():
    assert sets_up("make demo    # trains")
    assert sets_up("pip install -e .")
    assert not sets_up("python train.py")
    with pytest.raises(AssertionError, match="no such target"):
        sets_up("make coffee")
    with pytest.raises(AssertionError, match="no such extra"):
        sets_up("pip install -e '.[none]'")


if __name__ == "__main__":
    REFERENCE.write_text(make_reference())
