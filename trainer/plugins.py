"""Plugins that configure compilation and other training engines of an `Accelerator`.

`TorchDynamoPlugin` configures ``torch.compile``. The other two describe engines that are not
supported yet. They validate their arguments, and `check_engine` raises an error, so that no run
trains without the requested engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from trainer import environment
from trainer.checks import check_positive, check_type, choice_error
from trainer.configuration import at_least, check_bool_fields, explains_itself, fill
from trainer.enums import DynamoBackend

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")
_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
_SUPPORTED = (
    "This release trains on one device, data parallel with DDP, or sharded with fsdp_plugin, and "
    "compiles with dynamo_backend"
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
        use_regional_compilation: Must not be True; None takes
            ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION``, else False.

    Raises:
        NotImplementedError: Regional compilation is requested.
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
        regional = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environment.read_flag(regional)
        if self.use_regional_compilation:
            raise NotImplementedError(
                f"use_regional_compilation=True (or {regional}) asks to compile repeated blocks "
                "one by one, which is not supported. Leave it out, and dynamo_backend too, and "
                "compile the blocks yourself: for block in self.blocks: block.compile()."
            )
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

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, with the backend's name in lower case as torch spells it."""
        return {**vars(self), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults of ``torch.compile``."""
        plain = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None}
        return {k: v for k, v in self.to_dict().items() if v != plain.get(k, False)}


@explains_itself
@dataclass(kw_only=True)
class DeepSpeedPlugin:
    """Arguments of DeepSpeed.

    Attributes:
        hf_ds_config: A DeepSpeed configuration, as a mapping or the path of its JSON file; None
            takes ``ACCELERATE_DEEPSPEED_CONFIG_FILE``.
        gradient_accumulation_steps: Micro-batches per update or ``"auto"``; None takes
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else ``"auto"``.
        gradient_clipping: The maximum norm or ``"auto"``; None takes
            ``ACCELERATE_GRADIENT_CLIPPING``, else ``"auto"``.
        zero_stage: ZeRO stage, 0 to 3; None takes ``ACCELERATE_DEEPSPEED_ZERO_STAGE``, else 2.
        is_train_batch_min: With several loaders, take the smallest batch size.
        offload_optimizer_device: ``"none"``, ``"cpu"`` or ``"nvme"``.
        offload_param_device: The same for parameters.
        offload_optimizer_nvme_path: The path for ``"nvme"``.
        offload_param_nvme_path: The same for parameters.
        zero3_init_flag: Shard the model while it is constructed.
        zero3_save_16bit_model: Gather 16-bit weights to save them.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, separated by commas.

    Raises:
        ValueError: A value is outside its choices, or the configuration names no ZeRO stage.
        TypeError: A value has the wrong type.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        fill(self, "ACCELERATE_DEEPSPEED_CONFIG_FILE", hf_ds_config=None)
        fill(
            self,
            "ACCELERATE_DEEPSPEED_",
            zero_stage=2,
            offload_optimizer_device="none",
            offload_param_device="none",
            offload_optimizer_nvme_path="none",
            offload_param_nvme_path="none",
            zero3_init_flag=False,
            zero3_save_16bit_model=False,
        )
        fill(self, "ACCELERATE_", gradient_accumulation_steps="auto", gradient_clipping="auto")
        if self.gradient_accumulation_steps != "auto":
            self.gradient_accumulation_steps = int(self.gradient_accumulation_steps or 0)
            at_least(1, "gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.gradient_clipping != "auto":
            self.gradient_clipping = float(self.gradient_clipping or 0)
            check_positive(gradient_clipping=self.gradient_clipping)
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage is {self.zero_stage!r}; it must be 0, 1, 2 or 3.")
        for name in ("offload_optimizer_device", "offload_param_device"):
            if (value := getattr(self, name)) not in _OFFLOAD_DEVICES:
                raise ValueError(choice_error(name, value, _OFFLOAD_DEVICES))
        check_bool_fields(self)
        config = self.hf_ds_config
        if isinstance(config, (str, PathLike)):
            config = json.loads(Path(config).read_text())
        if config is not None and "zero_optimization" not in config:
            raise ValueError(
                f"hf_ds_config has the keys {sorted(config)}; name the ZeRO stage under "
                "'zero_optimization'."
            )


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


def check_engine(
    deepspeed_plugin: object | None = None,
    megatron_lm_plugin: object | None = None,
) -> None:
    """Raise if an argument or the environment requests an engine that is not supported yet.

    The variables are ``ACCELERATE_USE_DEEPSPEED`` and ``ACCELERATE_USE_MEGATRON_LM``.

    Raises:
        TypeError: An argument is not an instance of its plugin class.
        NotImplementedError: An engine is requested.
    """
    for argument, plugin, kind, engine, variable in (
        ("deepspeed_plugin", deepspeed_plugin, DeepSpeedPlugin, "DeepSpeed", "DEEPSPEED"),
        (
            "megatron_lm_plugin",
            megatron_lm_plugin,
            MegatronLMPlugin,
            "Megatron-LM",
            "MEGATRON_LM",
        ),
    ):
        check_type(argument, plugin, kind)
        variable = f"ACCELERATE_USE_{variable}"
        if plugin is not None:
            asked, fix = argument, f"leave {argument} out"
        elif environment.read_flag(variable):
            asked, fix = f"{variable}={environment.read(variable)}", f"unset {variable}"
        else:
            continue
        raise NotImplementedError(
            f"{asked} asks for {engine}, which is not supported yet. {_SUPPORTED}: {fix}."
        )
