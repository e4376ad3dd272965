"""The table of what does not carry over is true, and the pages of docs/coming-from show it.

``python tests/moving/test_migrate_table.py`` writes those pages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from tests.moving.running import real
from trainer.lightning.pytorch.strategies import strategy_of
from trainer.migration.table import LIGHTNING_MODULES, LIGHTNING_NAMES, TABLES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
PAGES = {
    "Lightning": FOLDER / "lightning-names.md",
    "Accelerate": FOLDER / "accelerate-names.md",
    "Hugging Face Trainer": FOLDER / "transformers-names.md",
}
MARK = "<!-- written by `python tests/moving/test_migrate_table.py` -->"


def rendered(library: str) -> str:
    """Return the page of a library; names with the same replacement share a row."""
    lines = [MARK, "", f"# {library}: names that do not carry over"]
    for table in TABLES:
        if table.library != library:
            continue
        by_use: dict[str, list[str]] = defaultdict(list)
        for name, use in sorted(table.entries.items()):
            by_use[use].append(f"`{name}`")
        lines += ["", f"## {table.what[0].upper()}{table.what[1:]}", "", "| name | what to use |"]
        lines += ["|---|---|", *(f"| {', '.join(each)} | {use} |" for use, each in by_use.items())]
    return "\n".join([*lines, ""])


def test_the_pages_show_the_table():
    assert {table.library for table in TABLES} == set(PAGES)
    for library, page in PAGES.items():
        assert page.read_text() == rendered(library), __doc__


def test_each_strategy_that_the_page_names_carries_over():
    page = (FOLDER / "lightning-details.md").read_text()
    text = re.search(r"\*\*Strategies\*\*.*?;", page, re.DOTALL)[0]
    names = re.findall(r"`([a-z_0-9]+)`", text)
    assert {"ddp", "fsdp", "deepspeed_stage_2"} <= set(names)
    assert strategy_of("fsdp").arguments
    for name in names:
        with suppress(ImportError):  # of deepspeed
            strategy_of(name)


@pytest.mark.parametrize("name", LIGHTNING_NAMES)
def test_a_name_in_the_table_of_lightning_is_not_here_and_its_import_says_what_to_use(name):
    module, _, attribute = f"trainer.lightning.{name}".rpartition(".")
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {attribute}", {})
    assert str(error.value) == f"lightning.{name} is not in Cadence: {LIGHTNING_NAMES[name]}."


@pytest.mark.parametrize("name", LIGHTNING_MODULES)
def test_a_module_in_one_of_lightnings_is_refused_with_what_to_use(name):
    said = f"lightning.{name}.other is not in Cadence: {LIGHTNING_MODULES[name]}."
    with pytest.raises(ImportError) as error:
        import_module(f"trainer.lightning.{name}.other")
    assert str(error.value) in (said, said.replace(".other", ""))  # or what it is in is refused


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_each_public_name_of_lightning_is_here_or_in_the_table():
    real("lightning")
    missing, seen = [], 0
    for module in ("", *(name for name in PUBLIC.split())):
        theirs = import_module(f"lightning.{module}".rstrip("."))
        for name in getattr(theirs, "__all__", ()):
            seen += 1
            path = f"{module}.{name}".strip(".")
            try:
                exec(f"from trainer.lightning{'.' * bool(module)}{module} import {name}", {})
            except ImportError as error:
                if "not in Cadence" not in str(error):
                    missing.append(path)
    assert missing == []
    assert seen > 90


def test_each_module_of_lightning_is_here_or_its_import_says_what_to_use():
    folder = Path(real("lightning").__file__).parent
    files = (file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py"))
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    names = {name for name in names if not any(each[0] == "_" for each in name.split("."))}
    unsaid = []
    for name in sorted(names):
        try:
            import_module(f"trainer.lightning.{name}")
        except ImportError as error:
            if "is not in Cadence: " not in str(error):
                unsaid.append((name, str(error)))
    assert unsaid == []
    assert {"pytorch.trainer.states", "pytorch.tuner.tuning", "fabric.fabric"} <= names


PUBLIC = """
    pytorch pytorch.accelerators pytorch.callbacks pytorch.core pytorch.loggers pytorch.plugins
    pytorch.profilers pytorch.strategies pytorch.utilities
"""


if __name__ == "__main__":
    for each, path in PAGES.items():
        path.write_text(rendered(each))
