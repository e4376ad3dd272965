"""LightningCLI: a program with Trainer, module and data configured by options and YAML files.

The options are parsed by jsonargparse, as for `trainer fit`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callbacks import Callback
from trainer.distributed.process_control import on_main
from trainer.lightning.modules import with_class_paths
from trainer.lightning.pytorch.module import LightningDataModule, LightningModule
from trainer.lightning.pytorch.trainer import Trainer
from trainer.lightning.pytorch.utilities import seed_everything

try:
    from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
    from jsonargparse.typing import class_from_function
except ImportError as error:
    raise ImportError(
        "LightningCLI reads options and files with jsonargparse, which is not installed: "
        "pip install 'cadence-trainer[cli]'."
    ) from error

from trainer.hparams import SavedConfiguration

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler, with the metric that it monitors.

    Args:
        optimizer: Its optimizer.
        monitor: The name of the metric.
        *args: Arguments of torch's scheduler.
        **kwargs: Arguments of torch's scheduler.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
OptimizerCallable: TypeAlias = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]  # bare for jsonargparse
LRSchedulerCallable: TypeAlias = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
ArgsType: TypeAlias = list[str] | dict[str, Any] | Namespace | None
_Registered: TypeAlias = dict[str, tuple[Any, str]]  # by key: the class or classes, and the link
_AUTOMATIC = "AUTOMATIC"


def _load(text: str) -> Any:
    return get_loader("yaml")(with_class_paths(text))


set_loader("lightning", _load, exceptions=(yaml.YAMLError,))


class LightningArgumentParser(ArgumentParser):
    """jsonargparse's ``ArgumentParser``, which adds the arguments of Lightning's classes.

    Args:
        *args: Arguments of jsonargparse's parser.
        description: A description of the program.
        env_prefix: The prefix of environment variables, which are read with ``default_env=True``.
        default_env: Whether to read environment variables.
        parser_mode: The format of files; by default YAML, in which class paths may be Lightning's.
        **kwargs: Arguments of jsonargparse's parser.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        parser_mode: str = "lightning",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args,
            description=description,
            env_prefix=env_prefix,
            default_env=default_env,
            parser_mode=parser_mode,
            **kwargs,
        )
        self.callback_keys: list[str] = []
        self._optimizers: _Registered = {}
        self._lr_schedulers: _Registered = {}

    def add_lightning_class_args(
        self,
        lightning_class: Any,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> Any:
        """Add the arguments of a Trainer, module, data module or callback under a key.

        Args:
            lightning_class: The class, or a function that returns an object of it.
            nested_key: The key.
            subclass_mode: Whether the options choose one of its subclasses.
            required: Whether they must choose one.

        Raises:
            ValueError: The class is something else.
        """
        made = lightning_class
        if callable(made) and not isinstance(made, type):
            made = class_from_function(made)
        kinds = (Trainer, LightningModule, LightningDataModule, Callback)
        if not (isinstance(made, type) and issubclass(made, kinds)):
            raise ValueError(
                f"{lightning_class!r} has no arguments to add: it must be a Trainer, "
                "LightningModule, LightningDataModule or Callback, or a function that returns one."
            )
        if issubclass(made, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(
                made, nested_key, fail_untyped=False, required=required
            )
        return self.add_class_arguments(
            made,
            nested_key,
            fail_untyped=False,
            instantiate=not issubclass(made, Trainer),
            sub_configs=True,
        )

    def add_optimizer_args(
        self,
        optimizer_class: Any = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = _AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer under a key.

        Args:
            optimizer_class: The class; a tuple allows the subclasses of several.
            nested_key: The key.
            link_to: The key that receives it; by default the CLI's `configure_optimizers` uses it.
        """
        self._add(optimizer_class, nested_key, "params")
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = _AUTOMATIC,
    ) -> None:
        """Add the arguments of a scheduler under a key; see `add_optimizer_args`."""
        self._add(lr_scheduler_class, nested_key, "optimizer")
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add(self, kinds: Any, key: str, skipped: str) -> None:
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {skipped}}
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, **options)
        else:
            self.add_class_arguments(kinds, key, sub_configs=True, **options)


class SaveConfigCallback(SavedConfiguration):
    """Writes the configuration to the folder of the run when it starts.

    A different file of an earlier start is kept next to it. Secrets are redacted.

    Args:
        parser: The parser of the configuration.
        config: The configuration.
        config_filename: The name of the file.
        overwrite: Has no effect; the file is always that of the latest start.
        multifile: Must be False; the configuration is a single file.
        save_to_log_dir: Whether to write the file; with False, override `save_config`.

    Raises:
        ValueError: `multifile` is True.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if multifile:
            raise ValueError(
                "multifile=True: the configuration is saved as one file; leave it out."
            )
        super().__init__(parser.dump(config))
        self.parser, self.config = parser, config
        self.config_filename = config_filename
        self.overwrite, self.multifile = overwrite, multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def _save(self, trainer: Any, module: Any, stage: str) -> None:
        if self.already_saved:
            return
        self.already_saved = True
        file = trainer.project_dir / self.config_filename
        if self.save_to_log_dir:
            on_main(lambda: self._write(file))
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Write the file, after the loggers have started."""
        self._save(trainer, module, "fit")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Write the file, unless the validation belongs to a fit."""
        self._save(trainer, module, "validate")

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Write the file."""
        self._save(trainer, module, "test")

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Write the file."""
        self._save(trainer, module, "predict")

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Override it to also save the configuration elsewhere; called on rank 0."""


class LightningCLI:
    """A program with Trainer, module and data configured by options and files.

    ``program.py fit --config config.yaml --model.lr 0.1`` creates the objects and calls
    `Trainer.fit`. Class paths may be Lightning's or this library's, such as
    ``trainer.lightning.pytorch.callbacks.ModelCheckpoint``.

    Args:
        model_class: The module's class, or a function that returns one; None lets ``--model`` name
            it.
        datamodule_class: The data module's class, or a function that returns one; None lets
            ``--data`` name it, if there is any.
        save_config_callback: Saves the configuration; None for none.
        save_config_kwargs: Arguments of the callback.
        trainer_class: The Trainer's class, or a function that returns one.
        trainer_defaults: Defaults of the Trainer's arguments; `callbacks` are added to the
            options'.
        seed_everything_default: The default seed; True means 0, False none.
        parser_kwargs: Arguments of the parser; under a subcommand's name, those of its parser.
        parser_class: The class of the parser.
        subclass_mode_model: Whether ``--model`` may name a subclass of `model_class`.
        subclass_mode_data: Whether ``--data`` may name a subclass of `datamodule_class`.
        args: The options as a list or dict; None reads the command line.
        run: Whether to parse and run a subcommand; False only creates the objects.
        auto_configure_optimizers: Whether to add ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: Has no effect: `save_hyperparameters` stores what ``__init__``
            receives.

    Attributes:
        config: The parsed configuration.
        config_init: The configuration with created objects.
        trainer: The Trainer.
        model: The module.
        datamodule: The data; None without any.
        subcommand: The subcommand; None with ``run=False``.

    Raises:
        SystemExit: The options are invalid, or request help.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self.auto_configure_optimizers = auto_configure_optimizers
        stages = self.subcommands()
        own = {key: value for key, value in self.parser_kwargs.items() if key not in stages}
        of_stages = {key: value for key, value in self.parser_kwargs.items() if key in stages}
        self.setup_parser(run, own, of_stages)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser --------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser with the option ``--config``."""
        parser = self.parser_class(**kwargs)
        what = "Path to a configuration file in json or yaml format."
        parser.add_argument("-c", "--config", action="config", help=what)
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create the parser, and that of each subcommand."""
        self.parser = self.init_parser(**main_kwargs)
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        made = self.trainer_class
        made = made if isinstance(made, type) else class_from_function(made)
        actions = self.parser.add_subcommands()
        for stage, skipped in self.subcommands().items():
            summary = (getattr(made, stage).__doc__ or "").strip().partition("\n")[0]
            options = {"description": summary, **subparser_kwargs.get(stage, {})}
            parser = self.init_parser(**options)
            self._add_arguments(parser)
            added = parser.add_method_arguments(made, stage, skip=set(skipped))
            self._subcommand_method_arguments[stage] = added
            self._subcommand_parsers[stage] = parser
            actions.add_subcommand(stage, parser, help=summary)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option ``--seed_everything``."""
        default, what = self.seed_everything_default, "The seed; true is 0, false for none."
        parser.add_argument("--seed_everything", type=bool | int, default=default, help=what)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer, the module and the data."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"}
        parser.set_defaults(defaults)
        model = self.model_class or LightningModule
        parser.add_lightning_class_args(model, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self.datamodule_class or LightningDataModule,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # the module may define its own loaders
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override it to add or link further arguments."""

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args()
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments of its method that are not options."""
        evaluation = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": evaluation,
            "test": evaluation,
            "predict": evaluation,
        }

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link the optimizers and schedulers that have `link_to`."""
        for key, (kinds, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to == _AUTOMATIC:
                continue
            if isinstance(kinds, tuple):
                parser.link_arguments(key, link_to)
            else:
                parser.link_arguments(key, link_to, compute_fn=partial(_described, kinds))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options into `config`."""
        if isinstance(args, (dict, Namespace)):
            self.config: Any = parser.parse_object(args)
        else:
            words = sys.argv[1:] if args is None else args
            self.config = parser.parse_args(list(map(with_class_paths, words)))

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    # -- the objects -------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Override it to run code before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create the data, the module and the Trainer."""
        self.config_init: Any = self.parser.instantiate(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override it to run code after the objects are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return the Trainer.

        Args:
            **kwargs: Arguments that override the options.
        """
        keys = self._parser(self.subcommand).callback_keys
        given = self._get(self.config_init, "trainer", {})
        return self._instantiate_trainer(
            {**given, **kwargs}, [self._get(self.config_init, key) for key in keys]
        )

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Any:
        added = _list_of(config.get("callbacks")) + callbacks
        added += _list_of(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not config.get("fast_dev_run", False):
            parser = self._parser(self.subcommand)
            of_stage = self.config.get(str(self.subcommand), self.config)
            added.append(self.save_config_callback(parser, of_stage, **self.save_config_kwargs))
        return self.trainer_class(**{**config, "callbacks": added})

    @staticmethod
    def configure_optimizers(
        lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> Any:
        """Return a result for the module's `configure_optimizers`, with the options' optimizer."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            schedule = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Use the options' optimizer for the module, if they name one.

        Raises:
            ValueError: The options name several optimizers.
        """
        parser = self._parser(subcommand)
        names = [
            [key for key, (_, link_to) in registered.items() if link_to == _AUTOMATIC]
            for registered in (parser._optimizers, parser._lr_schedulers)
        ]
        if not self.auto_configure_optimizers or not names[0]:
            return
        if several := [each for each in names if len(each) > 1]:
            raise ValueError(
                f"{' and '.join(several[0])} are both optimizers or schedulers of the module: "
                "pass link_to= for each and use them in its configure_optimizers."
            )
        described = self._description(parser._optimizers, names[0])
        schedule = self._description(parser._lr_schedulers, names[1])
        if not described:
            return

        def configure_optimizers() -> Any:  # uses the parameters that exist by then
            optimizer = instantiate_class(self.model.parameters(), described)
            made = instantiate_class(optimizer, schedule) if schedule else None
            return self.configure_optimizers(self.model, optimizer, made)

        vars(self.model)["configure_optimizers"] = configure_optimizers

    def _description(self, registered: _Registered, names: list[str]) -> Any:
        if not names:
            return None
        kinds, found = registered[names[0]][0], self._get(self.config_init, names[0])
        return found if isinstance(kinds, tuple) else _described(kinds, found)

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Return a value of the configuration, or of the subcommand's if there is one."""
        return config.get(str(self.subcommand), config).get(key, default)

    # -- the run -----------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Call ``before_<subcommand>``, the CLI's or the Trainer's method, and ``after_…``."""
        getattr(self, f"before_{subcommand}", _nothing)()
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        getattr(self, f"after_{subcommand}", _nothing)()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        names = self._subcommand_method_arguments[subcommand]
        given = {k: v for k, v in self.config_init[subcommand].items() if k in names}
        given["model"] = self.model
        if self.datamodule is not None:
            given["datamodule"] = self.datamodule
        return given

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        seed = seed_everything(None if seed is True else seed)
        self.config.get(str(self.subcommand), self.config)["seed_everything"] = seed

    @property
    def config_dump(self) -> Any:
        """The configuration of the subcommand as plain data."""
        text = self.parser.dump(self.config, skip_link_targets=False)
        found = yaml.safe_load(text)
        return found if self.subcommand is None else found[self.subcommand]


def _nothing() -> None:
    """Replaces a hook that does not exist."""


def _list_of(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _described(kind: type, given: Any = None) -> dict[str, Any]:
    """Return a class and its arguments as a class path."""
    arguments = given.as_dict() if isinstance(given, Namespace) else given
    return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments or {}}


def instantiate_class(args: Any, init: Any) -> Any:
    """Create an object from a class path.

    Args:
        args: The positional argument, or a tuple of several.
        init: ``{"class_path": …, "init_args": …}``.
    """
    module, _, name = init["class_path"].rpartition(".")
    made = getattr(importlib.import_module(module), name)
    return made(*(args if isinstance(args, tuple) else (args,)), **(init.get("init_args") or {}))
