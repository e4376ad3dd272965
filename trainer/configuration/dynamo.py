"""The plugin that configures ``torch.compile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.checks import check_bool_fields, check_choice, choice_error, explains_itself
from trainer.configuration.fields import fill, setting
from trainer.enums import DynamoBackend

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")


@explains_itself
@dataclass(kw_only=True)
class TorchDynamoPlugin:
    """Arguments of ``torch.compile``.

    Example::

        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        trainer = Trainer(max_epochs=10, dynamo_plugin=plugin)

    Attributes:
        backend: A `DynamoBackend` or its name in either case; ``"no"`` compiles nothing. None takes
            ``ACCELERATE_DYNAMO_BACKEND``, else ``"no"``.
        mode: Inductor's optimisation mode; None takes ``ACCELERATE_DYNAMO_MODE``, else
            ``"default"``.
        fullgraph: Raise if a part cannot be compiled; None takes
            ``ACCELERATE_DYNAMO_USE_FULLGRAPH``, else False.
        dynamic: True compiles for dynamic shapes from the start, False never does; None takes
            ``ACCELERATE_DYNAMO_USE_DYNAMIC``, else torch decides when a shape changes.
        options: Arguments of the backend, instead of a mode.
        disable: Turn compilation into a no-op, for tests.
        use_regional_compilation: Compile each block of an ``nn.ModuleList`` separately, so that all
            blocks share the compiled code; None takes
            ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION``, else False.

    Raises:
        ValueError: A name is unknown, or mode and options are both given.
        TypeError: A value has the wrong type.
    """

    _env_prefix = "ACCELERATE_DYNAMO_"

    backend: str | None = setting(
        "backend",
        "compile the steps with this backend, such as inductor",
        "no",
        question="backend of torch.compile (no, inductor, …)",
    )
    mode: str | None = setting("mode", "mode of torch.compile", "default")
    fullgraph: bool | None = setting(
        "flag", "allow no graph breaks", False, env="ACCELERATE_DYNAMO_USE_FULLGRAPH"
    )
    dynamic: bool | None = setting(
        "flag", "compile for dynamic shapes", env="ACCELERATE_DYNAMO_USE_DYNAMIC"
    )
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = setting(
        "flag", "compile repeated blocks separately", False
    )

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        what = "ACCELERATE_DYNAMO_BACKEND" if self.backend is None else "The dynamo backend"
        fill(self)
        named = str(self.backend)
        backends = [name.lower() for name in DynamoBackend.list()]
        if named.lower() not in backends:
            raise ValueError(choice_error(what, named, backends))
        # An enumeration member, which is also a string.
        self.backend = DynamoBackend(named.upper())
        check_choice("The mode of torch.compile", self.mode, _MODES)
        check_bool_fields(self)
        if self.options is not None and self.mode != "default":
            raise ValueError(
                f"TorchDynamoPlugin has mode={self.mode!r} and options={self.options!r}; torch "
                "takes only one of them: a mode is a preset of options."
            )

    @property
    def compiles_regions(self) -> bool:
        """Whether blocks are compiled separately."""
        compiles = self.backend != DynamoBackend.NO and not self.disable
        return compiles and bool(self.use_regional_compilation)

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, with the backend's name in lower case as torch spells it."""
        return {**vars(self), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults of ``torch.compile``."""
        plain = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None}
        given = self.to_dict()
        del given["use_regional_compilation"]
        return {k: v for k, v in given.items() if v != plain.get(k, False)}
