"""Mask secrets, such as API keys, in files about a run and in values for trackers.

Secrets are redacted in `run.json`, the manifests of checkpoints, reports and tracker data, because
others may read them. A value is a secret if its name suggests it, see `is_secret`. Passwords and
tokens in URLs are redacted in every text. A manifest's constructor arguments, from which a module
is recreated, are redacted only if their name leaves no doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trackers.media import named_values

MASK = "***"

# A name whose last word ends in one of these names a secret: "password", "dbpassword".
_SECRETS = ("password", "passwd", "pwd", "passphrase", "secret", "credential", "authorization")
# These words have other meanings too ("image_key", "pad_token"). They name a secret if they stand
# alone or follow one of the words below, or if the value looks random.
_OFTEN = ("key", "token")
_WHOSE = re.compile(
    "access|account|admin|api|app|auth|aws|azure|bearer|bot|client|comet|deploy|encryption|gcp|git|"
    "github|gitlab|google|hf|hub|huggingface|jwt|license|login|mlflow|neptune|oauth|openai|"
    "personal|private|refresh|sas|secret|security|service|session|signing|slack|ssh|ssl|storage|"
    "telegram|tls|wandb|webhook"
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w.+/=:-]{20,}|[\da-f]{20,}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER_INFO = re.compile(r"\b([A-Za-z][\w+.-]*)://([^\s/?#'\"<>]*)@")
_QUERY = re.compile(r"([?&;])([\w.-]+)=([^\s&;#'\"<>]+)")

_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)

_named: dict[str, bool] = {}


def name_secrets(*names: str, secret: bool = True) -> None:
    """Mark additional names as secrets, so that their values are redacted.

    Call it before the run begins.

    Example::

        name_secrets("dsn", "pin")
        name_secrets("primary_key", secret=False)

    Args:
        names: Names of hyper-parameters and configuration keys, in upper or lower case.
        secret: False marks the names as not secret, although they look like names of secrets.
    """
    _named.update((name.lower(), secret) for name in names)


def is_secret(name: str, value: Any, *, certain: bool = False) -> bool:
    """Return whether a value is a secret, by its name.

    The last word of the name decides: ``db_password`` is a secret; ``num_keys``, ``key_dim`` and
    ``tokenizer`` are not. None, booleans and empty texts are never secrets.

    Args:
        name: The name.
        value: The value.
        certain: Return True only if the name leaves no doubt, so not for ``key`` and ``token``
            alone, nor because a value looks random.
    """
    is_text = isinstance(value, (str, bytes))
    if value is None or isinstance(value, bool) or (is_text and not value):
        return False
    if name.lower() in _named:
        return _named[name.lower()]
    words = re.findall(r"[a-z]+", _CAMEL.sub("_", name).lower())
    if not words:
        return False
    last = words[-1].removesuffix("s")
    if last.endswith(_SECRETS):
        return True
    kind = next((ending for ending in _OFTEN if last.endswith(ending)), None)
    if kind is None or not is_text:
        return False
    alone = words == [kind] and not certain
    whose = last.removesuffix(kind) or (words[-2] if len(words) > 1 else "")
    random = last == kind and isinstance(value, str) and _RANDOM.fullmatch(value)
    return bool(alone or _WHOSE.fullmatch(whose) or (random and not certain))


def redact(value: Any, name: str = "", *, certain: bool = False) -> Any:
    """Return a value with `MASK` in place of secrets; the object itself if there are none.

    In lists and tuples of command-line arguments, an option's name decides whether its value is a
    secret: ``["--password", "x"]``, ``["--password=x"]``.

    Args:
        value: Plain values in mappings, namespaces, dataclasses, lists, tuples and sets. A mapping,
            namespace or dataclass that contains a secret is copied as a dict.
        name: The name of the value.
        certain: See `is_secret`.
    """
    if (named := named_values(value)) is not None:
        # All values inside a secret container such as `credentials` are secrets.
        secret = is_secret(name, MASK, certain=certain)
        items = {
            key: redact(item, name if secret else str(key), certain=certain)
            for key, item in named.items()
        }
        return items if any(items[key] is not named[key] for key in named) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [redact(item, name, certain=certain) for item in value]
        if isinstance(value, (list, tuple)):
            parts = _redacted_options(parts, certain)
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_secret(name, value, certain=certain):
        return MASK
    return _without_credentials(value) if isinstance(value, str) else value


def _redacted_options(parts: list[Any], certain: bool) -> list[Any]:
    """Mask secret values of command-line options; other values stay the same objects."""
    masked, option = [], ""
    for part in parts:
        match = _OPTION.fullmatch(part) if isinstance(part, str) else None
        if match is None:
            masked.append(MASK if option and is_secret(option, part, certain=certain) else part)
            option = ""
            continue
        option, inline = match["name"], match["value"]
        if inline is not None and is_secret(option, inline, certain=certain):
            masked.append(f"{part[: match.start('value')]}{MASK}")
        else:
            masked.append(part)
        option = "" if inline is not None else option
    return masked


def redacted_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values to be logged, with secrets in texts redacted; numbers are not redacted."""
    return {
        name: redact(value, name) if isinstance(value, str) else value
        for name, value in values.items()
    }


def is_redacted(value: Any) -> bool:
    """Return whether a value is, or contains, a secret that `redact` has replaced."""
    if isinstance(value, str):
        return value == MASK or ("://" in value and MASK in value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(is_redacted, value))


def redacted_paths(value: Any, path: str) -> Iterator[str]:
    """Yield the paths at which `redact` replaced secrets in a value, e.g. ``options.login[0]``.

    Args:
        value: The result of `redact`.
        path: The name of the value.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from redacted_paths(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield from redacted_paths(item, f"{path}[{index}]")
    elif isinstance(value, str) and MASK in value:
        yield path


def _without_credentials(text: str) -> str:
    """Mask the passwords and tokens of the URLs in a text."""
    if "://" not in text:
        return text
    masked = _QUERY.sub(_mask_query, _USER_INFO.sub(_mask_user_info, text))
    return text if masked == text else masked


def _mask_user_info(match: re.Match[str]) -> str:
    scheme, info = match.groups()
    user, colon, _ = info.partition(":")
    if colon:
        return f"{scheme}://{user}:{MASK}@"
    return f"{scheme}://{MASK}@" if scheme.endswith(("http", "https")) else match[0]


def _mask_query(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    secret = is_secret(name, value) or name.lower().endswith(("sig", "signature"))
    return f"{mark}{name}={MASK}" if secret else match[0]
