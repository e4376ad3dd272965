"""Save the configuration of a run in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from callbacks import Callback
from trackers.jsonl import unused_name
from trackers.masking import masked
from trainer.checkpoint.storage import write_whole
from trainer.cli.parsing import check_yaml
from trainer.distributed.process_control import on_main
from trainer.errors import module_logger

logger = module_logger(__name__)

NAME = "config.yaml"


class SavedConfiguration(Callback):
    """Writes the configuration of a fit to ``config.yaml`` in `project_dir`.

    The file is that of the latest start. A different one of an earlier start is kept as
    ``config.1.yaml`` and so on: a run may resume with another configuration.

    Args:
        text: The configuration, as YAML. Secrets in it are masked.
    """

    def __init__(self, text: str) -> None:
        config = yaml.safe_load(text)
        if (shown := masked(config)) is not config:
            text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        self._text = text

    def on_fit_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - a hook
        """Write the file: the run has passed all checks, and nothing is trained yet."""
        on_main(lambda: self._write(trainer.project_dir / NAME))

    def _write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and _content(_text_of(file)) != _content(self._text):
            aside = unused_name(file)
            os.replace(file, aside)
            logger.info("%s differs from the previous start's, which is now %s.", file, aside.name)
        write_whole(file, lambda path: path.write_text(self._text, encoding="utf-8"))


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")  # it may have been edited


def _content(text: str) -> Any:
    """Return the settings of a configuration, except ``ckpt_path``."""
    try:
        found = yaml.safe_load(check_yaml(text))
    except yaml.YAMLError:  # it was edited: compare the text
        return text
    return {k: v for k, v in found.items() if k != "ckpt_path"} if isinstance(found, dict) else text
