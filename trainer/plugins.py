"""Plugins that configure compilation and other training engines of an `Accelerator`.

`TorchDynamoPlugin` configures ``torch.compile``. `MegatronLMPlugin` describes an engine that is not
supported yet. It validates its arguments, and `check_engine` raises an error, so that no run trains
without the requested engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import environment
from trainer.checks import check_type, choice_error
from trainer.configuration import check_bool_fields, explains_itself, fill
from trainer.enums import DynamoBackend

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")
_SUPPORTED = (
    "This release trains on one device, data parallel with DDP, or sharded with fsdp_plugin or "
    "deepspeed_plugin, and compiles with dynamo_backend"
)


@explains_itself
@dataclass(kw_only=True)
class TorchDynamoPlugin:
    """Arguments of ``torch.compile``.

    Attributes:
        backend: A `DynamoBackend` or its name in either case; ``"no"`` compiles nothing. None takes
            ``ACCELERATE_DYNAMO_BACKEND``, else ``"no"``.
        mode: What inductor optimises for; None takes ``ACCELERATE_DYNAMO_MODE``, else
            ``"default"``.
        fullgraph: Raise if a part cannot be compiled; None takes
            ``ACCELERATE_DYNAMO_USE_FULLGRAPH``, else False.
        dynamic: True compiles for dynamic shapes from the start, False never does; None takes
            ``ACCELERATE_DYNAMO_USE_DYNAMIC``, else torch decides when a shape changes.
        options: Arguments of the backend, instead of a mode.
        disable: Turn compilation into a no-op, for tests.
        use_regional_compilation: Compile the blocks of each ``nn.ModuleList`` by themselves, so
            that one block's code serves all of them; None takes
            ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION``, else False.

    Raises:
        ValueError: A name is unknown, or mode and options are both given.
        TypeError: A value has the wrong type.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        fill(self, "ACCELERATE_DYNAMO_", use_regional_compilation=False)
        if self.backend is None:
            what, named = "ACCELERATE_DYNAMO_BACKEND", environment.read("ACCELERATE_DYNAMO_BACKEND")
        else:
            what, named = "The dynamo backend", str(self.backend)
        backends = [name.lower() for name in DynamoBackend.list()]
        if (named or "no").lower() not in backends:
            raise ValueError(choice_error(what, named, backends))
        # An enumeration member, which is also a string.
        self.backend = DynamoBackend((named or "no").upper())
        if self.mode is None:
            self.mode = environment.read("ACCELERATE_DYNAMO_MODE") or "default"
        if self.mode not in _MODES:
            raise ValueError(choice_error("The mode of torch.compile", self.mode, _MODES))
        if self.fullgraph is None:
            self.fullgraph = environment.read_flag("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        if self.dynamic is None and environment.read("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = environment.read_flag("ACCELERATE_DYNAMO_USE_DYNAMIC")
        check_bool_fields(self)
        if self.options is not None and self.mode != "default":
            raise ValueError(
                f"TorchDynamoPlugin has mode={self.mode!r} and options={self.options!r}; torch "
                "takes one of them: the mode is a name for certain options."
            )

    @property
    def compiles_regions(self) -> bool:
        """Whether blocks are to be compiled by themselves."""
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


@explains_itself
@dataclass(kw_only=True)
class MegatronLMPlugin:
    """Arguments of Megatron-LM, which its documentation explains.

    Of the first seven, each that is None takes the environment variable ``MEGATRON_LM_<NAME>``.

    Raises:
        ValueError: A name is unknown.
        TypeError: A value that must be a bool has another type.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0.0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        fill(
            self,
            "MEGATRON_LM_",
            tp_degree=1,
            pp_degree=1,
            num_micro_batches=1,
            gradient_clipping=1.0,
            sequence_parallelism=False,
            recompute_activations=False,
            use_distributed_optimizer=False,
        )
        for name, choices in (
            ("weight_decay_incr_style", ("constant", "linear", "cosine")),
            ("lr_decay_style", ("constant", "linear", "cosine")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(choice_error(name, value, choices))
        check_bool_fields(self)


def check_engine(megatron_lm_plugin: object | None = None) -> None:
    """Raise if an argument or ``ACCELERATE_USE_MEGATRON_LM`` requests Megatron-LM.

    Raises:
        TypeError: The argument is not a `MegatronLMPlugin`.
        NotImplementedError: It is requested, and not supported yet.
    """
    check_type("megatron_lm_plugin", megatron_lm_plugin, MegatronLMPlugin)
    variable = "ACCELERATE_USE_MEGATRON_LM"
    if megatron_lm_plugin is not None:
        asked, fix = "megatron_lm_plugin", "leave megatron_lm_plugin out"
    elif environment.read_flag(variable):
        asked, fix = f"{variable}={environment.read(variable)}", f"unset {variable}"
    else:
        return
    raise NotImplementedError(
        f"{asked} asks for Megatron-LM, which is not supported yet. {_SUPPORTED}: {fix}."
    )
