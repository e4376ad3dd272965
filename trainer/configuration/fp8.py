"""Recipes for training in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checks import check_bool_fields, check_choice, check_counts, explains_itself
from trainer.configuration.fields import Setting, fill, setting
from trainer.configuration.handlers import KwargsHandler
from trainer.enums import FP8BackendType

BACKEND = Setting(
    env=("ACCELERATE_FP8_BACKEND",),
    kind="text",
    help="the library of fp8: AO (torchao, the default) or TE",
    option="fp8_backend",
    question="library of fp8 (AO, torchao; TE, TransformerEngine)",
)
"""Which recipe is the default."""


def recipe_of(handlers: Sequence[object]) -> AORecipeKwargs | TERecipeKwargs:
    """Return the recipe for fp8 training among an `Accelerator`'s handlers, or the default.

    The default is given by ``ACCELERATE_FP8_BACKEND``, else torchao's.

    Raises:
        ValueError: There are several recipes, or the variable has an unknown value.
        NotImplementedError: The recipe is MS-AMP's.
    """
    kinds = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)
    found = [handler for handler in handlers if isinstance(handler, kinds)]
    if len(found) > 1:
        raise ValueError(
            f"kwargs_handlers holds {' and '.join(type(each).__name__ for each in found)}; "
            "give one recipe of fp8."
        )
    if found:
        recipe = found[0]
        if isinstance(recipe, FP8RecipeKwargs) and recipe.backend == "TE":
            names = {field.name for field in dataclasses.fields(TERecipeKwargs)}
            own = {name: value for name, value in vars(recipe).items() if name in names}
            return TERecipeKwargs(**own)
        if isinstance(recipe, (AORecipeKwargs, TERecipeKwargs)):
            return recipe
        what = type(recipe).__name__
    else:
        (variable,) = BACKEND.env
        named = FP8BackendType.parse((BACKEND.read() or "NO").upper(), variable)
        if named == FP8BackendType.TE:
            return TERecipeKwargs()
        if named != FP8BackendType.MSAMP:
            return AORecipeKwargs()
        what = f"{variable}={named}"
    raise NotImplementedError(
        f"{what} needs MS-AMP, which can no longer be installed. Use torchao: "
        "kwargs_handlers=[AORecipeKwargs()], or ACCELERATE_FP8_BACKEND=AO."
    )


@explains_itself
@dataclass(kw_only=True)
class AORecipeKwargs(KwargsHandler):
    """Options of ``mixed_precision="fp8"`` with torchao.

    Example::

        handler = AORecipeKwargs(pad_inner_dim=True)
        trainer = Trainer(max_epochs=10, mixed_precision="fp8", kwargs_handlers=[handler])

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``; None takes its defaults with the two
            options below.
        module_filter_func: A function ``(module, name) -> bool`` that chooses the linear layers to
            convert. None takes every ``nn.Linear`` except the first and last of the model and those
            with a dimension that is not a multiple of 16.
        pad_inner_dim: Pad inner dimensions to a multiple of 16, as the hardware requires. None
            takes the value of `config`, else ``ACCELERATE_FP8_PAD_INNER_DIM``, else True.
        enable_fsdp_float8_all_gather: FSDP gathers the converted weights in 8 bits. None takes the
            value of `config`, else ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``, else True. No
            effect without FSDP.

    Raises:
        TypeError: A value has the wrong type.
    """

    _env_prefix = "ACCELERATE_FP8_"

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    enable_fsdp_float8_all_gather: bool | None = setting(
        "bool", "AO: FSDP gathers weights in 8 bits (true)", True
    )
    pad_inner_dim: bool | None = setting(
        "bool", "AO: pad inner dimensions to multiples of 16 (true)", True
    )

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check the types."""
        if self.config is None:
            fill(self)
        elif not hasattr(self.config, "cast_config_weight"):
            raise TypeError(f"config is {self.config!r}; it must be torchao's Float8LinearConfig.")
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise TypeError(
                f"module_filter_func is {self.module_filter_func!r}; it must be a function "
                "(module, name) -> bool."
            )
        check_bool_fields(self)


@explains_itself
@dataclass(kw_only=True)
class TERecipeKwargs(KwargsHandler):
    """Options of ``mixed_precision="fp8"`` with NVIDIA's TransformerEngine.

    A value that is None is read from ``ACCELERATE_FP8_`` and its name in capitals (``FORMAT`` for
    `fp8_format`; ``OVERRIDE_FPROP``, ``OVERRIDE_DGRAD`` and ``OVERRIDE_WGRAD`` for
    `override_linear_precision`).

    Example::

        handler = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=32)
        trainer = Trainer(max_epochs=10, mixed_precision="fp8", kwargs_handlers=[handler])

    Attributes:
        use_autocast_during_eval: Compute in 8 bits in evaluations too (default False).
        margin: Margin of the scale below the largest representable number, in powers of two
            (default 0).
        interval: Steps between updates of the scale (default 1).
        fp8_format: ``"HYBRID"``, E4M3 with E5M2 for gradients (default), ``"E4M3"`` or ``"E5M2"``.
        amax_history_len: Length of the history of largest values, in steps (default 1024).
        amax_compute_algo: Value taken from the history: ``"most_recent"`` (default) or ``"max"``.
        override_linear_precision: Which of forward, input gradient and weight gradient run in a
            higher precision (default none).
        use_mxfp8_block_scaling: Scale blocks of values instead of tensors (default False).

    Raises:
        ValueError: A name is unknown, or a number too small.
        TypeError: A value has the wrong type.
    """

    _env_prefix = "ACCELERATE_FP8_"

    use_autocast_during_eval: bool | None = setting(
        "bool", "TE: 8 bits in evaluations too (false)", False
    )
    margin: int | None = setting("int", "TE: margin of the scale in powers of two (0)", 0)
    interval: int | None = setting("count", "TE: steps between updates of the scale (1)", 1)
    fp8_format: str | None = setting(
        "text", "TE: HYBRID (the default), E4M3 or E5M2", "HYBRID", env="ACCELERATE_FP8_FORMAT"
    )
    amax_history_len: int | None = setting(
        "count", "TE: length of the history of largest values (1024)", 1024
    )
    amax_compute_algo: str | None = setting(
        "text", "TE: most_recent (the default) or max", "most_recent"
    )
    override_linear_precision: tuple[bool, bool, bool] | None = setting(
        "bools",
        "TE: a higher precision in forward, dgrad, wgrad",
        (False, False, False),
        env=tuple(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD")),
        option="fp8_override_linear_precision",
    )
    use_mxfp8_block_scaling: bool | None = setting(
        "bool", "TE: scale blocks of values (false)", False
    )

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check all."""
        fill(self)
        self.fp8_format = str(self.fp8_format).upper()
        check_bool_fields(self)
        check_counts(0, margin=self.margin)
        check_counts(1, interval=self.interval, amax_history_len=self.amax_history_len)
        for name, choices in (
            ("fp8_format", ("HYBRID", "E4M3", "E5M2")),
            ("amax_compute_algo", ("max", "most_recent")),
        ):
            check_choice(name, getattr(self, name), choices)
        flags = self.override_linear_precision or ()
        if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
            raise TypeError(
                f"override_linear_precision is {flags!r}; it must be three bools, of forward, "
                "input gradient and weight gradient."
            )


@explains_itself
@dataclass(kw_only=True)
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 training with MS-AMP, which `Accelerator` rejects: it cannot be installed.

    Example::

        handler = AORecipeKwargs()  # instead of MSAMPRecipeKwargs()
        trainer = Trainer(max_epochs=10, mixed_precision="fp8", kwargs_handlers=[handler])

    Attributes:
        opt_level: ``"O1"`` or ``"O2"``; None takes ``ACCELERATE_FP8_OPT_LEVEL``, else ``"O2"``.

    Raises:
        ValueError: The level is unknown.
    """

    _env_prefix = "ACCELERATE_FP8_"

    opt_level: str | None = setting("text", "for MS-AMP, which can no longer be installed", "O2")

    def __post_init__(self) -> None:
        """Fill in the level and check it."""
        fill(self)
        check_choice("opt_level", self.opt_level, ("O1", "O2"))


@explains_itself
@dataclass(kw_only=True)
class FP8RecipeKwargs(KwargsHandler):
    """Options of fp8 training under an earlier name; use `AORecipeKwargs` or `TERecipeKwargs`.

    Example::

        earlier = FP8RecipeKwargs(backend="TE", fp8_format="HYBRID")
        handler = TERecipeKwargs(fp8_format="HYBRID")  # the same

    Attributes:
        backend: ``"MSAMP"``, or ``"TE"`` for TransformerEngine.
        optimization_level: ``"O1"`` or ``"O2"``, of MS-AMP.
        margin: Margin of the scale below the largest representable number, in powers of two.
        interval: Steps between updates of the scale.
        fp8_format: ``"E4M3"``, or ``"HYBRID"`` with E5M2 for gradients.
        amax_history_len: Length of the history of largest values, in steps.
        amax_compute_algo: Value taken from the history: ``"most_recent"`` or ``"max"``.
        override_linear_precision: Which of forward, input gradient and weight gradient run in a
            higher precision.
        opt_level: Another name of `optimization_level`; takes precedence over it.
        use_autocast_during_eval: As in `TERecipeKwargs`.
        use_mxfp8_block_scaling: As in `TERecipeKwargs`.

    Raises:
        ValueError: A name is unknown.
    """

    backend: str = "MSAMP"
    optimization_level: str = "O2"
    margin: int = 0
    interval: int = 1
    fp8_format: str = "E4M3"
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    opt_level: str | None = None
    use_autocast_during_eval: bool | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        self.optimization_level = self.opt_level or self.optimization_level
        self.backend = self.backend.upper()
        self.fp8_format = self.fp8_format.upper()
        for name, choices in (
            ("backend", ("MSAMP", "TE")),
            ("optimization_level", ("O1", "O2")),
            ("fp8_format", ("E4M3", "HYBRID")),
            ("amax_compute_algo", ("max", "most_recent")),
        ):
            check_choice(name, getattr(self, name), choices)
