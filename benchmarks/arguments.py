"""What the command line checks before anything is measured."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.timing import is_chosen
from trainer import DynamoBackend

BACKEND = "inductor"


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number, with its smallest value."""

    def number(text: str) -> int:
        found = int(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{found} is too few; at least {least}.")
        return found

    return number


def backend(text: str) -> str:
    """Return the name of a backend that both torch and the `Trainer` know; an option's type."""
    if text == BACKEND:  # the default: listing all would take a second of every start
        return text
    ours = {name.lower() for name in DynamoBackend.list()}
    known = sorted(ours.intersection(torch.compiler.list_backends(exclude_tags=())))
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is no backend; one of {', '.join(known)}.")
    return text


def folder_at(text: str) -> Path:
    """Return a path where a folder is or can be made; the type of an option."""
    path = Path(text)
    first = next(each for each in (path, *path.parents) if each.exists())
    if not first.is_dir():
        raise argparse.ArgumentTypeError(f"{first} is a file, where a folder is needed.")
    return path


def make(folder: Path) -> None:
    """Make a folder, and try whether files can be written there, which a later save will do.

    Raises:
        OSError: It cannot be made, or nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def part_of_one(names: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """Return the type of an option that chooses rows by a part of their names."""

    def part(text: str) -> str:
        rows = names()
        if not any(is_chosen(row, [text]) for row in rows):
            listed = "\n  ".join(rows)
            raise argparse.ArgumentTypeError(f"{text!r} is in no row's name. The rows:\n  {listed}")
        return text

    return part
