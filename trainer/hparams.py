"""Hyper-parameters: record a module's constructor arguments, save them, recreate the module.

`keep` reads the arguments from the frames of the running ``__init__`` methods. The values must be
plain data. A checkpoint's manifest stores them as::

    "hyper_parameters": {
        "arguments": {"width": 64, "betas": {"$": "tuple", "items": [0.9, 0.99]}},
        "others": {"lr": 0.1},       # recorded, but not arguments of the class itself
        "namespaces": [],            # arguments that were an argparse.Namespace
        "masked": []                 # arguments with a redacted secret, see trackers.redaction
        "unsaved": []                # arguments that are not plain data, where these are allowed
    }

Only the ``arguments`` are passed to the class when a module is recreated. The ``others`` include
values that a class computes and passes to a base class that records its arguments.
"""

from __future__ import annotations

import inspect
import json
import os
from argparse import Namespace
from collections import UserList
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from callbacks import Callback
from trackers.jsonl import unused_name
from trackers.redaction import redact, redacted_paths
from trainer.checkpoint.serialization import decode_tree, encode_tree
from trainer.checkpoint.storage import write_whole
from trainer.checks import check_choice
from trainer.distributed.process_control import on_main
from trainer.errors import CheckpointError, module_logger

_KEY = "_hyper_parameters"
_SAVE_THEM = ", or call self.save_hyperparameters() in __init__ before checkpoints are saved."
_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)

logger = module_logger(__name__)

T = TypeVar("T")


class HyperParameters(dict[str, Any]):
    """A dict whose items are also attributes: ``hparams.width`` is ``hparams["width"]``.

    Names of dict methods (``items``, ``copy``) can be read only as items.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            there = ", ".join(map(repr, self)) or "none; call save_hyperparameters in __init__"
            raise AttributeError(
                f"There is no hyper-parameter {name!r}. Available: {there}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]


@dataclass(kw_only=True)
class Kept:
    """The recorded arguments of one object.

    Attributes:
        values: The values by name.
        initial: The values at the end of the latest `keep`; plain data is copied.
        places: For each value, the constructor argument that held it: the argument of that name, or
            a dict argument that contains it. A value without an entry was not passed to the class.
        namespaces: Names of arguments that were an ``argparse.Namespace``.
        private: Names that are not logged to trackers.
        plain_only: Whether values that are not plain data are an error. Otherwise they are kept,
            but neither saved nor logged.
    """

    values: HyperParameters = field(default_factory=HyperParameters)
    initial: HyperParameters = field(default_factory=HyperParameters)
    places: dict[str, str] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    plain_only: bool = True


def kept_by(owner: object) -> Kept:
    """Return the recorded arguments of an object; empty if there are none."""
    kept: Kept = owner.__dict__.setdefault(_KEY, Kept())
    return kept


def keep(
    owner: object,
    given: tuple[str | Mapping[str, Any] | Namespace, ...],
    caller: FrameType,
    *,
    ignore: str | Iterable[str] | None,
    private: bool,
    plain_only: bool = True,
) -> None:
    """Record the arguments of the running ``__init__`` and of the subclasses that called it.

    Args:
        owner: The object under construction.
        given: Names of arguments; or one dict or namespace of values; empty for all arguments.
        caller: The frame of the caller.
        ignore: Names to leave out; they need not be arguments.
        private: Do not log them to trackers.
        plain_only: See `Kept`.

    Raises:
        RuntimeError: No ``__init__`` of the owner is running, and no values were given.
        ValueError: There is no argument of that name.
        TypeError: A value is not plain data though it must be, or has no name.
    """
    calls = [_arguments(frame) for frame in _inits(owner, caller)]
    outermost = calls[-1] if calls else {}
    skipped = {ignore} if isinstance(ignore, str) else set(ignore or ())
    kept = kept_by(owner)
    kept.plain_only = plain_only
    if len(given) == 1 and isinstance(given[0], (Mapping, Namespace)):
        values = dict(vars(given[0]) if isinstance(given[0], Namespace) else given[0])
        if wrong := [name for name in values if not isinstance(name, str)]:
            raise TypeError(f"A hyper-parameter is named {wrong[0]!r}; names must be strings.")
        whole = [name for name, value in outermost.items() if value is given[0]]
        if isinstance(given[0], Namespace):
            kept.namespaces.update(whole)
        taken = outermost if calls else _parameters(type(owner))
        places = {name: whole[0] if whole else name for name in values if whole or name in taken}
    else:
        values = _chosen(owner, given, calls, skipped)
        places = {name: name for name in values if name in outermost}
    chosen = {name: value for name, value in values.items() if name not in skipped}
    kept.values.update(_all_plain(chosen) if plain_only else chosen | _plain_of(chosen))
    kept.initial = HyperParameters(kept.values | _plain_of(kept.values))
    kept.private.difference_update(chosen)
    kept.places.update({name: place for name, place in places.items() if name in chosen})
    if private:
        kept.private.update(chosen)


def logged(owner: object) -> dict[str, Any]:
    """Return the hyper-parameters of an object that are logged to trackers."""
    kept = kept_by(owner)
    values = kept.values if kept.plain_only else _plain_of(kept.values)
    return {name: value for name, value in values.items() if name not in kept.private}


def to_manifest(owner: object) -> dict[str, Any]:
    """Return an object's current hyper-parameters in JSON form; an empty dict if it has none.

    Secrets are redacted if their names leave no doubt; the object is recreated from the others.

    Raises:
        TypeError: A value that was set later is not plain data.
    """
    kept = kept_by(owner)
    if not kept.values:
        return {}
    parts: dict[str, Any] = {"arguments": {}, "others": {}}
    saved = _all_plain(kept.values) if kept.plain_only else _plain_of(kept.values)
    for name, value in saved.items():
        place = kept.places.get(name)
        part = parts["others" if place is None else "arguments"]
        if place not in (None, name):
            part = part.setdefault(place, {})
        part[name] = value
    arguments = parts["arguments"]
    lost = {kept.places[name] for name in kept.places.keys() - saved.keys()}
    for name in lost:
        arguments.pop(name, None)  # a dict with a part that is not saved
    parts |= {"namespaces": sorted(kept.namespaces - lost), "unsaved": sorted(lost)}
    hidden = redact(arguments, certain=True)
    parts |= {"arguments": hidden, "others": redact(parts["others"], certain=True)}
    parts["masked"] = [name for name in arguments if hidden[name] is not arguments[name]]
    tree: dict[str, Any] = json.loads(encode_tree(parts, "hyper_parameters")[0])["tree"]
    return tree


def saved_arguments(saved: Any, where: object) -> dict[str, Any]:
    """Return the saved constructor arguments by name, without redacted secrets.

    Args:
        saved: The result of `to_manifest`.
        where: The checkpoint, for the error message.

    Raises:
        CheckpointError: The arguments cannot be read.
    """
    try:
        arguments: dict[str, Any] = dict(decode_tree(saved.get("arguments", {}), {}))
        for name in saved.get("namespaces", ()):
            arguments[name] = Namespace(**arguments[name])
        for name in saved.get("masked", ()):
            del arguments[name]
        set(saved.get("unsaved", ()))  # read by `make`
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The hyper-parameters in {where} cannot be read: {error!r}."
        ) from error
    return arguments


def make(
    cls: type[T], saved: Any, given: Mapping[str, Any], where: object, *, strict: bool = True
) -> T:
    """Construct an object from saved arguments.

    Args:
        cls: The class to construct.
        saved: The result of `to_manifest`.
        given: Arguments that override saved ones.
        where: The checkpoint, for error messages.
        strict: Raise if the class does not take a saved argument, unless `given` and the saved
            arguments cover all of the class's arguments. False leaves such arguments out with a
            warning.

    Raises:
        TypeError: An argument is missing, or was redacted as a secret and is not given.
        CheckpointError: The class does not take a saved argument, or the arguments cannot be read.
    """
    arguments = saved_arguments(saved, where)
    redacted_names = set(saved.get("masked", ()))
    hidden = redacted_names | set(saved.get("unsaved", ()))
    parameters = inspect.signature(cls).parameters
    takes = _parameters(cls)
    variadic = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    foreign = [] if variadic else [name for name in arguments if name not in takes]
    if foreign:
        text = (
            f"{where} was saved by a class with the {_listed(foreign)}, which {cls.__name__} does "
            f"not take: it takes {', '.join(takes) or 'none'}."
        )
        # If an argument of the class is not given, a saved one may have been renamed to it.
        if strict and not (given and arguments.keys() | given.keys() >= set(takes)):
            raise CheckpointError(
                f"{text} Load it with the class that saved it; or leave them out, by giving the "
                "class's other arguments or strict=False."
            )
        logger.warning("%s They are left out.", text)
        arguments = {name: value for name, value in arguments.items() if name in takes}
    arguments |= given
    needed = {n for n in takes if parameters[n].default is inspect.Parameter.empty} | hidden
    wanted = takes + sorted(hidden.difference(takes)) * variadic
    if missing := [name for name in wanted if name in needed and name not in arguments]:
        secrets = [name for name in missing if name in redacted_names]
        masked = decode_tree(saved.get("arguments", {}), {})
        places = [each for name in secrets for each in redacted_paths(masked[name], name)]
        raise TypeError(
            f"{cls.__name__} cannot be created: {where} does not hold its {_listed(missing)}. "
            + f"Secrets, by their names, are not saved ({', '.join(places)}). " * bool(secrets)
            + f"Pass load_from_checkpoint(…, {', '.join(f'{name}=…' for name in missing)})"
            + ("." if missing == secrets else _SAVE_THEM)
        )
    return cls(**arguments)


def _inits(owner: object, frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the owner's running ``__init__`` methods, base classes first."""
    while frame is not None:
        code = frame.f_code
        own = code.co_varnames[0] if code.co_name == "__init__" and code.co_argcount else None
        if own is not None and frame.f_locals.get(own) is owner:
            yield frame
        frame = frame.f_back


def _arguments(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of an ``__init__`` by name; variadic ones under the name ``*args``."""
    info = inspect.getargvalues(frame)
    values = {name: info.locals[name] for name in info.args[1:] if name in info.locals}
    if info.varargs and info.locals.get(info.varargs):
        values[f"*{info.varargs}"] = info.locals[info.varargs]
    return values | (info.locals.get(info.keywords, {}) if info.keywords else {})


def _chosen(
    owner: object, names: tuple[Any, ...], calls: list[dict[str, Any]], skipped: set[str]
) -> dict[str, Any]:
    """Return the arguments of these names, or all arguments."""
    cls = type(owner).__name__
    if not calls:
        raise RuntimeError(
            f"save_hyperparameters reads the arguments of {cls}.__init__, which is not running. "
            "Call it there, or pass the values as a dict."
        )
    values: dict[str, Any] = {}
    for call in calls:
        values |= {name: value for name, value in call.items() if not name.startswith("*")}
    for name in names:
        check_choice(f"The name of an argument of {cls}", name, values)
    unnamed = [name for name in calls[-1] if name.startswith("*") and name[1:] not in skipped]
    if unnamed and not names:
        raise TypeError(
            f"{cls} was given positional arguments in {unnamed[0]}, which have no names to save "
            f"them under. Pass them by name, or exclude them: ignore={unnamed[0][1:]!r}."
        )
    return {name: values[name] for name in names or values}


def _parameters(cls: type) -> list[str]:
    """Return the names of a class's arguments, without variadic ones."""
    return [
        name
        for name, each in inspect.signature(cls).parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _listed(names: list[str]) -> str:
    return f"argument{'s' * (len(names) > 1)} {', '.join(names)}"


def _all_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of all values as plain data, as they are read back from a manifest.

    Raises:
        TypeError: Some values are not plain data; the message names all of them.
    """
    wrong: dict[str, Any] = {}
    plain = {name: _plain(value, name, wrong) for name, value in values.items()}
    if not wrong:
        return plain
    text = ", ".join(
        f"{place} is of type {type(value).__qualname__}" for place, value in wrong.items()
    )
    names = list(dict.fromkeys(place.partition("[")[0] for place in wrong))
    spaces = [name for name in names if isinstance(wrong.get(name), Namespace)]
    raise TypeError(
        "Hyper-parameters are plain data (numbers, strings, None, paths, and lists, tuples, sets "
        f"and dicts of them), but {text}. "
        + "".join(f"Save what is in it: save_hyperparameters({name}). " for name in spaces)
        + f"Leave out what is not: save_hyperparameters(ignore={names}), and pass it again to "
        f"load_from_checkpoint(…, {', '.join(f'{name}=…' for name in names)})."
    )


def _plain_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the values that are plain data."""
    plain = {}
    for name, value in values.items():
        wrong: dict[str, Any] = {}
        copied = _plain(value, name, wrong)
        if not wrong:
            plain[name] = copied
    return plain


def _plain(value: Any, place: str, wrong: dict[str, Any]) -> Any:
    """Return a copy of a value; add its parts that are not plain data to `wrong`, by place."""
    import numpy as np

    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, np.generic) and type(value.item()) in _LEAVES:
        return value.item()
    if isinstance(value, Enum) and isinstance(value, (str, int, float)):
        return _plain(value.value, place, wrong)  # a member compares equal to its value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, f"{place}[{key!r}]", wrong): _plain(item, f"{place}[{key!r}]", wrong)
            for key, item in value.items()
        }
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    # Other sequences are not converted, since a dataset may be a sequence of its samples.
    listed = isinstance(value, (list, UserList)) or kind.__module__.startswith("omegaconf.")
    if named or listed or kind in (tuple, set, frozenset):
        items = [_plain(item, f"{place}[{index}]", wrong) for index, item in enumerate(value)]
        return items if listed else kind(*items) if named else kind(items)
    wrong[place] = value
    return None


class SavedConfiguration(Callback):
    """Writes the configuration of a fit to ``config.yaml`` in `project_dir`.

    The file is that of the latest start. A run may resume with another configuration, so a
    different file of an earlier start is kept as ``config.1.yaml`` and so on.

    Args:
        text: The configuration, as YAML. Secrets in it are redacted.
    """

    def __init__(self, text: str) -> None:
        import yaml  # not needed for `import trainer`

        config = yaml.safe_load(text)
        if (shown := redact(config)) is not config:
            text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        self._text = text

    def on_fit_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - a hook
        """Write the file, after the run has passed all checks and before training begins."""
        on_main(lambda: self._write(trainer.project_dir / "config.yaml"))

    def _write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and _resolved(_text_of(file)) != _resolved(self._text):
            aside = unused_name(file)
            os.replace(file, aside)
            logger.info("%s differs from the previous start's, which is now %s.", file, aside.name)
        write_whole(file, lambda path: path.write_text(self._text, encoding="utf-8"))


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")  # it may have been edited


def _resolved(text: str) -> Any:
    """Return the settings of a configuration, except ``ckpt_path``."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:  # it was edited: compare the text
        return text
    return {k: v for k, v in found.items() if k != "ckpt_path"} if isinstance(found, dict) else text
