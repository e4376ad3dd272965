"""Parts of pages from the code and the benchmarks.

The comments ``<!-- commands -->``, ``<!-- variables -->`` and ``<!-- overhead -->`` are replaced by
the commands with their options, the environment variables, and the overhead of trainers.
"""

import argparse
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx

from trainer.cli import COMMANDS
from trainer.cli.env import VARIABLES

OVERHEAD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "overhead.json"

# The parsers of `fit` and its like repeat every argument of the Trainer.
_REPEATED = "--trainer."


def escape(text: str) -> str:
    """Return a plain text as Markdown, with its code as code."""
    parts = re.split(r"(``.+?``|`.+?`)", " ".join(text.split()))
    return "".join(
        part if at % 2 else re.sub(r"([\\*_<>\[\]#])", r"\\\1", part)
        for at, part in enumerate(parts)
    )


def describe_option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return the lines of a definition."""
    formatter = parser._get_formatter()  # argparse has no public access to the text of one option
    if action.option_strings:
        value = (
            "" if action.nargs == 0 else f" {formatter._format_args(action, action.dest.upper())}"
        )
        head = ", ".join(f"`{name}{value}`" for name in action.option_strings[:1])
        head += "".join(f", `{name}`" for name in action.option_strings[1:])
    else:
        head = f"`{formatter._format_args(action, action.dest)}`"
    text = formatter._expand_help(action) if action.help else "\u00a0"
    return [head, f": {escape(text)}", ""]


def describe_command(name: str) -> Iterator[str]:
    """Yield the lines of a command's section."""
    parser = import_module(f"trainer.cli.{COMMANDS[name][0]}").parser(f"trainer {name}")
    yield from [f"## trainer {name}", ""]
    if name in ("validate", "test-model", "predict"):
        yield from [
            f"{COMMANDS[name][1].capitalize()}. The options are those of "
            "[`trainer fit`](#trainer-fit).",
            "",
        ]
        return
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield from ["```text", re.sub(r"\n {7}", "\n", usage), "```", ""]
    about = [text for text in (parser.description, parser.epilog) if text]
    about = [text.replace(str(Path.home()), "~") for text in about]
    if about and "\n" not in about[0]:
        yield from [escape(about.pop(0)), ""]
    for text in about[:-1]:
        yield from ["```text", text, "```", ""]
    for group in parser._action_groups:  # as above
        actions = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
            and not any(option.startswith(_REPEATED) for option in action.option_strings)
            and action.dest not in ("help", "trainer")
        ]
        if actions:
            if group.title not in ("positional arguments", "options", "optional arguments"):
                yield from [f"**{escape(group.title or '').capitalize()}**", ""]
            for action in actions:
                yield from describe_option(parser, action)
    if name == "fit":
        yield from ["`--trainer.KEY VALUE`", ": An argument of `Trainer`.", ""]
    if about:
        yield from ["```text", about[-1], "```", ""]


def commands() -> str:
    """Return the sections of all commands."""
    return "\n".join(line for name in COMMANDS for line in describe_command(name))


def variables() -> str:
    """Return the table of environment variables."""
    rows = [f"| `{name}` | {escape(what)} |" for name, what in VARIABLES.items()]
    return "\n".join(["| variable | what it does |", "|---|---|", *rows])


def overhead() -> str:
    """Return the measured overhead of trainers on the smallest model, from its JSON."""
    rows = json.loads(OVERHEAD.read_text())["rows"]
    shown = [row for row in rows if row["group"] == rows[0]["group"] and row["void"] is None]
    lines = [f"| {row['name']} | {row['values']['cpu_ratio'][0]:.2f} |" for row in shown]
    return "\n".join(["| | × |", "|---|--:|", *lines])


def fill_in(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the comments of a page."""
    for made in (commands, variables, overhead):
        comment = f"<!-- {made.__name__} -->"
        if comment in content[0]:
            content[0] = content[0].replace(comment, made())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
