"""Settings of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import environment
from trainer.checks import (
    check_bool_fields,
    check_choice,
    check_counts,
    check_numbers,
    check_type,
    explains_itself,
)
from trainer.configuration.fields import fill, setting

_REFUSED = ("bool", "not supported; the error message names the replacement")
_ONLY_ONE = ("count", "only 1 is supported")
_CHOICES = {
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
}
# Options of the Megatron-LM repository rather than of the package megatron-core, or that would
# change the loop, with the alternative. A field at its default requests nothing.
_INSTEAD = {
    "use_custom_fsdp": "use fsdp_plugin",
    "use_distributed_optimizer": "use fsdp_plugin, or deepspeed_plugin with stage 1",
    "optimizer_cpu_offload": "use deepspeed_plugin with offload_optimizer_device='cpu'",
    "overlap_cpu_optimizer_d2h_h2d": "it belongs to optimizer_cpu_offload",
    "use_precision_aware_optimizer": "it needs the optimizer of TransformerEngine",
    "no_load_optim": "pass the path of a weights-only checkpoint as ckpt_path",
    "no_save_optim": "ModelCheckpoint(save_weights_only=True) saves only weights",
    "eod_mask_loss": "mask the loss in training_step",
    "attention_backend": "set attention_backend of the model's TransformerConfig",
    "calculate_per_token_loss": "return the number of tokens from count_items",
    "expert_model_parallel_size": "experts are not supported yet",
    "expert_tensor_parallel_size": "experts are not supported yet",
    "context_parallel_size": "use ParallelismConfig(cp_size=...) without megatron_lm_plugin",
    "num_layers_per_virtual_pipeline_stage": "leave it out: each process has one stage",
    "pipeline_model_parallel_split_rank": "it is for encoder-decoder models (T5)",
    "encoder_seq_length": "it is for encoder-decoder models (T5)",
    "decoder_seq_length": "it is for encoder-decoder models (T5)",
    "train_samples": "count in updates: train_iters",
    "lr_decay_samples": "count in updates: lr_decay_iters",
    "lr_warmup_samples": "count in updates: lr_warmup_iters",
    "consumed_samples": "a run resumes its data with ckpt_path='auto'",
    "no_wd_decay_cond": "make parameter groups in configure_optimizers",
    "scale_lr_cond": "make parameter groups in configure_optimizers",
    "lr_mult": "make parameter groups in configure_optimizers",
    "megatron_dataset_flag": "pass a DataLoader; Megatron-LM has these data sets in its repository",
    "custom_megatron_datasets_provider_function": "pass a DataLoader",
    "tensorboard_dir": "use log_with='tensorboard'",
    "set_all_logging_options": "use log_with='tensorboard'",
    "eval_iters": "use limit_val_batches",
    "eval_interval": "use val_every",
    "return_logits": "the steps of the module have the model's output",
    "custom_train_step_class": "write training_step",
    "custom_train_step_kwargs": "write training_step",
    "custom_model_provider_function": "build the model in configure_model",
    "custom_prepare_model_function": "build the model in configure_model",
    "custom_get_batch_function": "write training_step",
    "custom_loss_function": "write training_step",
    "other_megatron_args": "pass the settings to the model's TransformerConfig; the argument "
    "parser is part of the Megatron-LM repository",
}
_OF_SCHEDULE = (  # used only by MegatronLMDummyScheduler
    "train_iters",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "min_lr",
)
_NEUTRAL = {  # other values that request nothing
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (1,),
    "context_parallel_size": (1,),
}


@explains_itself
@dataclass(kw_only=True)
class MegatronLMPlugin:
    """The division of a megatron-core model over the processes.

    Fields from `tp_degree` to `use_distributed_optimizer`, and those that describe the model, take
    the environment variable ``MEGATRON_LM_<NAME>`` if they are None. Pass the fields that describe
    the model to its configuration: ``TransformerConfig(…, **plugin.transformer_arguments())``.
    Fields that are not listed belong to Megatron-LM's own programs and must keep their defaults;
    the error says what to use instead.

    Example::

        plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=4, sequence_parallelism=True)
        trainer = Trainer(max_steps=1000, megatron_lm_plugin=plugin)

    Attributes:
        tp_degree: The number of processes that share each layer; default 1.
        pp_degree: The number of consecutive pipeline stages of layers; default 1.
        num_micro_batches: The number of micro-batches into which the Trainer splits each batch
            along its first dimension, so that the stages work in parallel; default 1.
        gradient_clipping: The maximum gradient norm if the run sets none with ``max_grad_norm`` or
            ``clip_grad_norm_``; default 1.0; 0 disables clipping.
        sequence_parallelism: Whether processes that share layers divide the sequence between them.
        recompute_activations: Whether to recompute the activations of the attention in backward.
        recompute_granularity: ``"full"`` or ``"selective"``.
        recompute_method: ``"uniform"`` or ``"block"``.
        recompute_num_layers: See megatron-core.
        decoder_last_pipeline_num_layers: The number of layers in the last stage.
        attention_dropout: The dropout of the attention.
        hidden_dropout: The dropout of hidden states.
        attention_softmax_in_fp32: Whether the softmax of the attention is in float32.
        use_rotary_position_embeddings: Whether the model has rotary position embeddings; checked
            against the model.
        seq_length: The length of all sequences. With it, stages need not exchange shapes.
        train_iters: The number of updates of the schedule of `MegatronLMDummyScheduler`; the
            following fields belong to this schedule too.
        weight_decay_incr_style: The course of the weight decay from `start_weight_decay` to
            `end_weight_decay`: ``"constant"``, ``"linear"`` or ``"cosine"``.
        start_weight_decay: The first weight decay; None takes the optimizer's.
        end_weight_decay: The last weight decay; None takes the optimizer's.
        lr_decay_style: The shape of the learning rate decay: ``"constant"``, ``"linear"`` or
            ``"cosine"``.
        lr_decay_iters: The number of updates of the decay; None takes `train_iters`.
        lr_warmup_iters: The number of warm-up updates.
        lr_warmup_fraction: The warm-up as a fraction of the schedule.
        min_lr: The last learning rate.
        is_train_batch_min: Has no effect: batches of any size are split.

    Raises:
        ValueError: A name is unknown, a size is below 1, or values contradict each other.
        TypeError: A value has the wrong type.
    """

    _env_prefix = "MEGATRON_LM_"

    tp_degree: int | None = setting(
        "count",
        "processes that share each layer, tensor parallel (1)",
        1,
        question="processes that share each layer, tensor parallel",
    )
    pp_degree: int | None = setting(
        "count",
        "pipeline stages (1)",
        1,
        question="pipeline stages",
    )
    num_micro_batches: int | None = setting(
        "count",
        "micro-batches of each batch, for the stages (1)",
        1,
        question="micro-batches of each batch, for the stages",
    )
    gradient_clipping: float | None = setting(
        "float", "maximum norm, if the script has none (1.0)", 1.0
    )
    sequence_parallelism: bool | None = setting(
        "bool", "sequence parallelism, with tensor parallelism (false)", False
    )
    recompute_activations: bool | None = setting(
        "bool", "recompute attention activations in backward (false)", False
    )
    recompute_granularity: str | None = setting("text", "full or selective")
    recompute_method: str | None = setting("text", "uniform or block")
    recompute_num_layers: int | None = setting("count", "layers to recompute")
    decoder_last_pipeline_num_layers: int | None = setting("count", "layers of the last stage")
    attention_dropout: float | None = setting("float", "dropout of the attention")
    hidden_dropout: float | None = setting("float", "dropout of hidden states")
    attention_softmax_in_fp32: bool | None = setting("bool", "the softmax in float32")
    use_rotary_position_embeddings: bool | None = setting("bool", "whether the model has them")
    use_distributed_optimizer: bool | None = setting(*_REFUSED, False)
    use_custom_fsdp: bool | None = setting(*_REFUSED)
    no_load_optim: bool | None = setting(*_REFUSED)
    no_save_optim: bool | None = setting(*_REFUSED)
    eod_mask_loss: bool | None = setting(*_REFUSED)
    optimizer_cpu_offload: bool | None = setting(*_REFUSED)
    overlap_cpu_optimizer_d2h_h2d: bool | None = setting(*_REFUSED)
    use_precision_aware_optimizer: bool | None = setting(*_REFUSED)
    attention_backend: bool | None = setting(*_REFUSED)
    calculate_per_token_loss: bool | None = setting(*_REFUSED)
    expert_model_parallel_size: int | None = setting(*_ONLY_ONE)
    expert_tensor_parallel_size: int | None = setting(*_ONLY_ONE)
    context_parallel_size: int | None = setting(*_ONLY_ONE)
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
    seq_length: int | None = setting("count")
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
        fill(self)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) is not None:
                check_choice(name, value, choices)
        check_bool_fields(self)
        check_counts(
            1,
            tp_degree=self.tp_degree,
            pp_degree=self.pp_degree,
            num_micro_batches=self.num_micro_batches,
        )
        check_numbers(0.0, gradient_clipping=self.gradient_clipping)
        if self.sequence_parallelism and self.tp_degree == 1:
            raise ValueError(
                "sequence_parallelism=True divides sequences between the processes that share "
                "layers, but tp_degree is 1: raise it, or leave sequence_parallelism out."
            )
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ValueError(
                "recompute_activations=True is recompute_granularity='selective', but "
                "recompute_granularity is 'full': leave one of them out."
            )

    @classmethod
    def requested(cls, given: Any) -> MegatronLMPlugin | None:
        """Return the plugin; a new one if ``ACCELERATE_USE_MEGATRON_LM`` is set, else None.

        Raises:
            TypeError: An argument has another type.
        """
        if given is None:
            return cls() if environment.read_flag("ACCELERATE_USE_MEGATRON_LM") else None
        check_type("megatron_lm_plugin", given, cls)
        plugin: MegatronLMPlugin = given
        return plugin

    def check_supported(self) -> None:
        """Check that the engine supports all settings.

        Raises:
            NotImplementedError: A setting is not supported; the message names all of them.
        """
        plain = {name: field.default for name, field in self.__dataclass_fields__.items()}
        asked = [
            f"{name}={value!r} ({instead})"
            for name, instead in _INSTEAD.items()
            if (value := getattr(self, name)) not in (None, False, *_NEUTRAL.get(name, ()))
            and value != plain[name]
        ]
        if asked:
            raise NotImplementedError(
                f"megatron_lm_plugin sets {'; '.join(asked)}. The engine trains megatron-core "
                "models with Cadence's loop, which does not support these options."
            )

    def of_schedule(self) -> list[str]:
        """Return the fields of `MegatronLMDummyScheduler` that are not at their defaults."""
        fields = self.__dataclass_fields__
        return [n for n in _OF_SCHEDULE if getattr(self, n) != fields[n].default]

    @property
    def has_pipeline(self) -> bool:
        """Whether the model has several stages."""
        return self.pp_degree != 1

    def transformer_arguments(self, mixed_precision: str = "no") -> dict[str, Any]:
        """Return arguments of megatron-core's ``TransformerConfig``.

        Args:
            mixed_precision: The precision of the run. With ``"bf16"`` the model has bfloat16
                weights, and the optimizer updates float32 copies.
        """
        import torch

        half = mixed_precision == "bf16"
        dtype = torch.bfloat16 if half else torch.float32
        granularity = "selective" if self.recompute_activations else self.recompute_granularity
        arguments = {
            "tensor_model_parallel_size": self.tp_degree,
            "pipeline_model_parallel_size": self.pp_degree,
            "sequence_parallel": self.sequence_parallelism,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": half,
            "recompute_granularity": granularity,
            "recompute_method": self.recompute_method,
            "recompute_num_layers": self.recompute_num_layers,
            "num_layers_in_last_pipeline_stage": self.decoder_last_pipeline_num_layers,
            "attention_dropout": self.attention_dropout,
            "hidden_dropout": self.hidden_dropout,
            "attention_softmax_in_fp32": self.attention_softmax_in_fp32,
        }
        return {name: value for name, value in arguments.items() if value is not None}
