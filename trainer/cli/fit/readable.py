"""Shorten the errors of jsonargparse about a configuration, and add the nearest valid name."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise

from jsonargparse import ArgumentParser, Namespace

import callbacks
from trackers.redaction import is_redacted
from trainer.cli.parsing import CommandError
from trainer.migration.refusals import argument_refusals
from trainer.trainer import Trainer

_NOISE = re.compile(
    r"\s*(-? ?Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|"
    r"- Expected a <class 'NoneType'>.*|Given value type: .*|"
    r"Given value: (NestedArg|Namespace|[\[{]).*|"
    r"- Expected a path but .*|- Not a valid subclass of .*|Subclass types expect one of:|"
    r"- a (class path|dict) .*|)"
)
_WORDS = [  # jsonargparse's words, and ours
    (re.compile(r'Parser key "([^"]+)":'), r"\1:"),
    (re.compile(r"Expected an? <class '([\w.]+)'>"), r"must be of type \1"),
    (re.compile(r"Expected a typing\.Literal\[(.*)\]\. Got value:"), r"must be one of \1, not"),
    (re.compile(r"Problem with given class_path"), "class_path"),
]
_PROBLEM = re.compile(r"given class_path '([\w.]+)'|Option '([\w.]+)' is not accepted")
_IN_GROUP = re.compile(r"Group '([\w.]+)' does not accept option '([^']+)'")
_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_BARE_WORD = re.compile(r"<class 'str'>(?s:.*)Given value: (True|False)$")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_UNKNOWN = re.compile(r"unrecognized arguments: --([\w.]+)")
_FILE = re.compile(r"unrecognized arguments: (?:[^-]\S*\.ya?ml)\b")
_NO_MAPPING = re.compile(r"Unexpected config: (?s:.*)")  # followed by the whole file
_REQUIRED = re.compile(r"required: (.*)")
_SECTIONS = ("seed", "ckpt_path", "trainer", "model", "data", "links")
_BASES = {"model": "trainer.TrainModule", "data": "trainer.DataModule"}


def explained(message: str, parser: ArgumentParser, words: Sequence[str]) -> CommandError:
    """Return the error to show to the user, with exit code 2.

    Args:
        message: The message of jsonargparse.
        parser: The parser that raised it.
        words: The command line.
    """
    if "Problems parsing config" in message or "can't decode" in message:
        message += f"\nThe files are: {', '.join(files(words))}."
    for script in (each for each in files(words) if each.endswith(".py")):
        return CommandError(
            f"{script} is not a configuration: that is a YAML file with the sections "
            f"{', '.join(_SECTIONS)}. To run a script, use `trainer launch {script}`.",
            code=2,
        )
    for section, base in _BASES.items():
        if f"given class_path '{base}'" in message:
            return _without_class(section)
    message = _NO_MAPPING.sub(f"A file must have the sections {', '.join(_SECTIONS)}.", message)
    lines = [line for line in message.splitlines() if not _NOISE.fullmatch(line)]
    for pattern, replacement in _WORDS:
        lines = [pattern.sub(replacement, line) for line in lines]
    hints = [hint.strip() for hint in _hints(message, parser)]
    lines += [*hints, f"`{parser.prog} --help` explains the configuration."]
    return CommandError("\n".join(dict.fromkeys(lines)), code=2)


def check(config: Namespace) -> None:
    """Raise if a section names no class of the user's, or a value is the mask of a secret.

    Without a class path the parser takes the base class. A mask comes from the ``config.yaml`` of
    another run.

    Raises:
        CommandError: A section has no class path, or a secret is missing.
    """
    for section, base in _BASES.items():
        if (described := config.get(section)) and described.class_path == base:
            raise _without_class(section)
    for key, value in config.items():
        if is_redacted(value):
            raise CommandError(
                f"{key} is redacted in the configuration: secrets are not saved. Pass it again: "
                f"--{key} ...",
                code=2,
            )


def _without_class(section: str) -> CommandError:
    return CommandError(
        f"{section} has no class_path. Name its class, with the arguments in init_args:\n"
        f"  {section}:\n    class_path: module.Class\n    init_args: {{...}}\n"
        f"or on the command line: --{section} module.Class",
        code=2,
    )


def files(words: Sequence[str]) -> list[str]:
    """Return the configuration files among the words, each given by ``--config``."""
    separate = [file for option, file in pairwise(words) if option == "--config"]
    return separate + [word[len("--config=") :] for word in words if word.startswith("--config=")]


def _hints(message: str, parser: ArgumentParser) -> Iterator[str]:
    path = ""
    for problem in _PROBLEM.finditer(message):
        if problem[2]:  # the first option that is not accepted, of the class named before it
            option = problem[2]
            yield _of_class(path, option.split(".")[0]) if path else _of_parser(option, parser)
            break
        path = problem[1]
    for group, key in _IN_GROUP.findall(message):
        yield _of_parser(f"{group}.{key}", parser)
    for key in _UNKNOWN.findall(message):
        yield _of_parser(key, parser)
    if _FILE.search(message):
        yield "Configuration files come before all options, or each after --config."
    for module, name in _ATTRIBUTE.findall(message):
        there = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
        yield _nearest(name, there) or f"{module} has: {', '.join(there)}."
    for name in _NO_PATH.findall(message):
        known = {each: f"callbacks.{each}" for each in callbacks.__all__} | {"Loaders": "Loaders"}
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        yield f"A class path is module.Class.{hint}"
    if _BARE_WORD.search(message):
        yield "YAML reads a bare no, off, yes or on as false or true: write it in quotes, 'no'."
    if _MODULE.search(message):
        yield f"Modules must be installed or in the current folder, {os.getcwd()}."
    for names in _REQUIRED.findall(message):
        of_class = re.match(r'Parser key "([\w.]+)":', message)
        first = f"{of_class[1]}.{names}" if of_class else names
        yield f"Write {names} into a configuration file, or pass --{first.split(',')[0]} ..."


def _of_class(path: str, name: str) -> str:
    """Return a hint at what the class of a class path accepts instead of an argument."""
    module, _, attribute = path.rpartition(".")
    made = getattr(sys.modules.get(module), attribute, None)
    if made is None:
        return ""
    takes = [each for each in inspect.signature(made).parameters if each not in ("args", "kwargs")]
    if name in takes:  # how jsonargparse handles the type Dataset[T]
        return "To describe the dataset of a DataLoader, write class_path: Loader instead."
    near = _nearest(name, takes)
    return f"{path} takes: {', '.join(takes) or 'nothing'}.{near}"


def _of_parser(key: str, parser: ArgumentParser) -> str:
    """Return a hint at what the command accepts instead of a key."""
    section, _, name = key.partition(".")
    if section == "trainer" and name:
        return _of_trainer(name.partition(".")[0])
    keys = [str(action.dest) for action in parser._actions]
    last = [each for each in keys if each.rpartition(".")[2] == key]
    last += [each for each in _SECTIONS if section.startswith(f"{each}_")]  # seed_everything
    near = f" Did you mean {last[0]!r}?" if last else _nearest(section, _SECTIONS)
    return f"The sections are: {', '.join(_SECTIONS)}.{near}"


def _of_trainer(name: str) -> str:
    if name == "seed":
        return "The seed is a key at the top level: seed, not trainer.seed."
    if name == "accelerator":
        return "The device is selected automatically; set trainer.cpu: true to use the CPU."
    text = argument_refusals({name: ...}, inspect.signature(Trainer).parameters)[name]
    listed = "it must be one of" in text  # more than forty names; --help has them
    return f"Trainer has no argument {name!r}." if listed else text


def _nearest(name: str, choices: Iterable[str]) -> str:
    near = get_close_matches(name, list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
