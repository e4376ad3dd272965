"""Settings of fp8 training, as options, keys of ``fp8_config`` and environment variables.

A key may be written with or without ``fp8_``: ``backend`` and ``fp8_backend``. The processes read
the settings from the environment; see `trainer.configuration.recipe_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checks import choice_error
from trainer.cli.parsing import truth
from trainer.enums import FP8BackendType

# By name: the kind of value, and what it says.
FP8: dict[str, tuple[str, str]] = {
    "fp8_backend": ("text", "the library of fp8: AO (torchao, the default) or TE"),
    "fp8_enable_fsdp_float8_all_gather": ("bool", "AO: FSDP gathers weights in 8 bits (true)"),
    "fp8_pad_inner_dim": ("bool", "AO: pad inner dimensions to multiples of 16 (true)"),
    "fp8_use_autocast_during_eval": ("bool", "TE: 8 bits in evaluations too (false)"),
    "fp8_margin": ("int", "TE: margin of the scale in powers of two (0)"),
    "fp8_interval": ("count", "TE: steps between updates of the scale (1)"),
    "fp8_format": ("text", "TE: HYBRID (the default), E4M3 or E5M2"),
    "fp8_amax_history_len": ("count", "TE: length of the history of largest values (1024)"),
    "fp8_amax_compute_algo": ("text", "TE: most_recent (the default) or max"),
    "fp8_override_linear_precision": ("bools", "TE: a higher precision in forward, dgrad, wgrad"),
    "fp8_use_mxfp8_block_scaling": ("bool", "TE: scale blocks of values (false)"),
    "fp8_opt_level": ("text", "MS-AMP's, which cannot be installed any more"),
}
_OVERRIDES = ("FPROP", "DGRAD", "WGRAD")
VARIABLES = (
    *(f"ACCELERATE_{name.upper()}" for name in FP8 if name != "fp8_override_linear_precision"),
    *(f"ACCELERATE_FP8_OVERRIDE_{what}" for what in _OVERRIDES),
)
_OTHER_NAMES = {"fp8_amax_compute_algorithm": "fp8_amax_compute_algo"}


def three_bools(text: str) -> tuple[bool, ...]:
    """Return ``"false,true,true"`` as a tuple.

    Raises:
        ValueError: There are not three, or one is no bool.
    """
    found = tuple(truth(each.strip()) for each in text.strip("()[]").split(","))
    if len(found) != len(_OVERRIDES):
        raise ValueError(f"{text!r} must be three bools, such as false,false,true")
    return found


def normalised(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of ``fp8_config`` under their names as options; None without any.

    Raises:
        ValueError: A name or the backend is unknown.
    """
    if not settings:
        return None
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = key if key.startswith("fp8_") else f"fp8_{key}"
        name = _OTHER_NAMES.get(name, name)
        if name not in FP8:
            raise ValueError(choice_error("a key of fp8_config", key, FP8))
        if value is not None:
            found[name] = value
    if (backend := found.get("fp8_backend")) is not None:
        found["fp8_backend"] = FP8BackendType.parse(str(backend).upper(), "fp8_backend")
    return found


def fp8_variables(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the environment variables that pass the settings to a process."""
    found: dict[str, Any] = {}
    for name, value in (settings or {}).items():
        if name == "fp8_override_linear_precision":
            flags = three_bools(value) if isinstance(value, str) else value
            for what, flag in zip(_OVERRIDES, flags, strict=True):
                found[f"ACCELERATE_FP8_OVERRIDE_{what}"] = flag
        else:
            found[f"ACCELERATE_{name.upper()}"] = value
    return found
