"""Create a Trainer, a module and its data from configuration files and options.

The options are the arguments of the classes, read from their signatures and docstrings. All values
are checked against the annotations before anything is created.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from callbacks import Callback, PredictionWriter
from trackers.redaction import is_redacted
from trainer.checkpoint.storage import read_manifest
from trainer.cli.fit.loaders import Loaders  # noqa: F401 - so that its class path may be short
from trainer.cli.fit.parser_errors import BASES, explain
from trainer.cli.parsing import CommandError
from trainer.configuration import KwargsHandler
from trainer.datamodule import DataModule
from trainer.errors import module_logger
from trainer.hparams import SavedConfiguration, saved_arguments
from trainer.module import TrainModule
from trainer.trainer import Trainer

logger = module_logger(__name__)

_PURPOSES = {
    "fit": "Train the module of a configuration.",
    "validate": "Validate the module of a configuration, and print its metrics.",
    "test-model": "Test the module of a configuration, and print its metrics.",
    "predict": "Write the predictions of the module of a configuration to files.",
}
_EXPLANATION = """\
{purpose}

A configuration is a YAML file. Its sections are the arguments of the Trainer, and the class path
and arguments of the module and of the data:

  seed: 0
  trainer:
    max_epochs: 20
    project_dir: runs/digits
    callbacks:
      - class_path: callbacks.EarlyStopping
        init_args: {{monitor: val/loss}}
  model:
    class_path: digits.Digits     # a TrainModule in digits.py, in the current folder
    init_args: {{width: 64}}
  data:
    class_path: digits.DigitsData # a DataModule; or Loaders, with a DataLoader for each stage
  links:                          # values that one part takes from another
    model.init_args.classes: data.classes                  # an attribute of the created object
    model.init_args.batch_size: data.init_args.batch_size  # a value of the configuration

Files come first, or each after --config. Later files override earlier ones, and options override
all files."""
_EXAMPLES = """\
examples:
  # a file, but with another width and no checkpoints
  {prog} digits.yaml --model.width 128 --trainer.checkpointing false
  # one file overriding another
  {prog} digits.yaml quick.yaml
  # without any file
  {prog} --model digits.Digits --data digits.DigitsData --trainer.max_epochs 3
  # one more callback
  {prog} digits.yaml --trainer.callbacks+=Timer
  # the arguments of a class
  {prog} --model.help digits.Digits
  # all settings, as a file to start from
  {prog} --model digits.Digits --print_config > digits.yaml
  # on four processes
  trainer launch --num_processes 4 -m {module} digits.yaml

exit codes:
  0    done
  1    an error in the run; 2 in the configuration
  124  max_time is over; 130 Ctrl-C; 143 SIGTERM: the run is saved, and --ckpt_path auto
       resumes it"""


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows types and defaults of the options, and does not reformat the description."""


@dataclass(kw_only=True)
class Made:
    """The objects that a configuration describes.

    Attributes:
        trainer: Created first, so that `seed` is set when the others are created.
        module: Created next, unless a link takes one of its arguments from the data.
        data: Created last; None if the module has its own loaders.
        ckpt_path: See `Trainer.fit`.
    """

    trainer: Trainer
    module: TrainModule
    data: DataModule | None
    ckpt_path: str | None


class ConfiguredLine:
    """A command line with configuration files.

    Args:
        prog: The command as typed, such as ``"trainer fit"``.
        stage: The command.
    """

    def __init__(self, prog: str, stage: str) -> None:
        self._prog, self._stage = prog, stage
        self._words: list[str] = []
        set_parsing_settings(subclasses_enabled=[KwargsHandler])  # otherwise not for dataclasses

    def _make_parser(self, links: Mapping[str, str]) -> ArgumentParser:
        parser = ArgumentParser(
            prog=self._prog,
            usage=f"{self._prog} [CONFIG.yaml ...] [--KEY VALUE ...]",
            description=_EXPLANATION.format(purpose=_PURPOSES[self._stage]),
            epilog=_EXAMPLES.format(prog=self._prog, module=self._prog),
            formatter_class=_Formatter,
            exit_on_error=False,
            allow_abbrev=False,
        )
        add = parser.add_argument
        add("--config", action="config", help="a configuration file; may be repeated")
        add("--seed", type=int | None, help="the Trainer's argument; seeds all generators")
        add("--ckpt_path", type=str | None, help="a checkpoint's folder; or last, best or auto")
        text = "in files: a key, and the value that it copies"
        add("--links", type=dict[str, str] | None, help=text)
        _add_trainer(parser)
        parser.add_subclass_arguments(TrainModule, "model", required=True)
        parser.add_subclass_arguments(DataModule, "data", required=False)
        for target, source in links.items():
            part, _, name = source.partition(".")
            try:
                if _is_attribute(source):  # by function: the parser ignores a missing one
                    get = _getter(name, f"links: {target}: {source}")
                    parser.link_arguments(part, target, get, apply_on="instantiate")
                else:
                    parser.link_arguments(source, target)
            except ValueError as error:
                raise CommandError(f"links: {target}: {source}: {error}", code=2) from None
        return parser

    def parse(self, words: Sequence[str]) -> Namespace:
        """Return the configuration given by the arguments of a command line.

        Raises:
            CommandError: The arguments do not match the classes that they name.
            SystemExit: ``--help`` or ``--print_config`` was given.
        """
        self._words = _files_first(words)
        links = _links_in(_files(self._words))
        self._parser = self._make_parser(links)
        # For an evaluation, the checkpoint may supply arguments that are missing here.
        config = self._parsed(_skip_validation=self._stage != "fit")
        if (config.links or {}) != links:
            raise CommandError("links must be in a configuration file; they cannot be options.", 2)
        for target, source in links.items() if config.model else ():
            for key in (target,) if _is_attribute(source) else (target, source):
                if key not in config:  # jsonargparse would ignore it
                    raise CommandError(f"links: {target}: {source}: there is no {key}.", code=2)
        return config

    def _parsed(self, **options: Any) -> Namespace:
        try:
            config = self._parser.parse_args(self._words, **options)
        except argparse.ArgumentError as error:
            keys = {action.dest for action in self._parser._actions}  # argparse has no public list
            more = f"`{self._prog} --help` explains the configuration."
            raise CommandError(f"{explain(str(error), keys)}\n{more}", code=2) from None
        _check(config)
        return config

    def make(self, config: Namespace) -> Made:
        """Create the objects of a configuration.

        Raises:
            Exception: Any error of their classes.
        """
        # With a separate parser: a parser with links needs the module and the data, which are
        # created later.
        part = _add_trainer(ArgumentParser()).instantiate(
            Namespace(trainer=config.trainer), instantiate_groups=False
        )
        settings = dict(vars(part.trainer))
        settings["callbacks"] = self._callbacks(settings, config)
        trainer = Trainer(seed=config.seed, **settings)
        if self._stage != "fit":
            config = self._complete(config, trainer)
        rest = Namespace(model=config.model, data=config.data)
        try:
            made = self._parser.instantiate(rest, instantiate_groups=False)
        except ValueError as error:
            if isinstance(error.__cause__, CommandError):  # raised by a link's function
                raise error.__cause__ from None
            raise
        return Made(trainer=trainer, module=made.model, data=made.data, ckpt_path=config.ckpt_path)

    def _complete(self, config: Namespace, trainer: Trainer) -> Namespace:
        """Return the configuration, with the module's arguments from the checkpoint; collective.

        Values equal to the configuration's are left out, since it may have them in another type.

        Raises:
            CommandError: A value in the checkpoint, which may be untrusted, names a class or a
                function.
        """
        folders = trainer._context.folders
        chosen = folders.choose(folders.given(config.ckpt_path))
        if chosen is None or not config.model:
            return self._parsed()
        saved = saved_arguments(read_manifest(chosen).get("hyper_parameters", {}), chosen)
        takes = vars(config.model.get("init_args", Namespace()))
        links = {
            name: value for name, value in saved.items() if name in takes and takes[name] != value
        }
        module = Namespace(class_path=config.model.class_path, init_args=Namespace(**links))
        complete = self._parsed(namespace=Namespace(model=module))
        for name in links:
            if not _is_data(complete.model.init_args[name]):
                raise CommandError(
                    f"model.init_args.{name}: the value in {chosen} names a class or a function. "
                    "Write it into a configuration file if you trust it."
                )
        return complete

    def _callbacks(self, settings: dict[str, Any], config: Namespace) -> list[Callback]:
        callbacks = settings["callbacks"] or []
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        if settings["fast_dev_run"] or settings["barebones"]:  # these write no files
            return callbacks
        if self._stage == "fit":
            callbacks.append(SavedConfiguration(self._parser.dump(config).rstrip() + "\n"))
        if self._stage == "predict" and not any(
            isinstance(one, PredictionWriter) for one in callbacks
        ):
            callbacks.append(PredictionWriter())
        return callbacks


def _add_trainer(parser: ArgumentParser) -> ArgumentParser:
    parser.add_class_arguments(Trainer, "trainer", skip={"accelerator", "seed"})
    return parser


def _links_in(files: Sequence[str]) -> dict[str, str]:
    """Return the links in configuration files; the parser needs links before it reads the files.

    Raises:
        CommandError: A file cannot be read, is not YAML or has no sections.
    """
    links: dict[str, str] = {}
    for file in files:
        if file.endswith(".py"):
            raise CommandError(f"{file} is a script: use `trainer launch {file}`.", code=2)
        try:
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            if _is_content(file):
                continue
            raise CommandError(f"{file}: {error.strerror}", code=2) from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            what = str(error).replace("<unicode string>", file)
            raise CommandError(f"{file} cannot be read as YAML: {what}", code=2) from None
        if not isinstance(content, dict):
            what = "is empty" if content is None else "has no sections"
            raise CommandError(f"{file} {what}: write `trainer:`, `model:` and `data:`.", code=2)
        found = content.get("links")
        if isinstance(found, dict) and all(isinstance(target, str) for target in found.values()):
            links = found  # the last file's replaces the others, as for any dict
    return links


def _is_content(text: str) -> bool:
    """Return whether ``--config`` was given a configuration itself, as the parser also accepts."""
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False


def _is_data(value: Any) -> bool:
    """Return whether a parsed value contains no class and no function."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_data, value))
    return not (callable(value) or isinstance(value, Namespace))


def _is_attribute(source: str) -> bool:
    """Return whether a link's source is an attribute of the created module or data."""
    part, _, name = source.partition(".")
    return part in ("model", "data") and bool(name) and not name.startswith("init_args.")


def _getter(name: str, link: str) -> Callable[[Any], Any]:
    """Return a function that gets an attribute, or raises an error about the link if missing."""

    def get(made: Any) -> Any:
        try:
            return attrgetter(name)(made)
        except AttributeError as error:
            raise CommandError(f"{link}: {error}", code=2) from error

    return get


def _files_first(words: Sequence[str]) -> list[str]:
    """Return the arguments with files before options, since later ones override earlier ones."""
    files: list[str] = []
    options: list[str] = []
    left = list(words)
    while left and not left[0].startswith("-"):
        files += ["--config", left.pop(0)]
    while left:
        word = left.pop(0)
        if word == "--config" and left:
            files += [word, left.pop(0)]
        else:
            (files if word.startswith("--config=") else options).append(word)
    return files + options


def _files(words: Sequence[str]) -> list[str]:
    """Return the configuration files among the arguments, each passed with ``--config``."""
    separate = [file for option, file in pairwise(words) if option == "--config"]
    return separate + [word[len("--config=") :] for word in words if word.startswith("--config=")]


def _check(config: Namespace) -> None:
    """Raise if a section has no class path, or a value is the mask of a redacted secret.

    Without a class path the parser would use the base class. A mask comes from the ``config.yaml``
    of another run.

    Raises:
        CommandError: A section has no class path, or a secret is masked.
    """
    for section, base in BASES.items():
        if (described := config.get(section)) and described.class_path == base:
            raise CommandError(
                f"{section} has no class_path: write it into a configuration file, with the "
                f"arguments in init_args, or pass --{section} module.Class.",
                code=2,
            )
    for key, value in config.items():
        if is_redacted(value):
            raise CommandError(
                f"{key} is redacted in the configuration: secrets are not saved. Pass it again: "
                f"--{key} ...",
                code=2,
            )
