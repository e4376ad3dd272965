"""Settings of fully sharded data parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer import environment
from trainer.checks import (
    check_bool_fields,
    check_choice,
    check_type,
    choice_error,
    explains_itself,
)
from trainer.configuration.fields import fill, setting

if TYPE_CHECKING:
    import torch

_STRATEGIES = {  # FSDP 1: whether to reshard after forward (None: replicated)
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": None,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


@explains_itself
@dataclass(kw_only=True)
class FullyShardedDataParallelPlugin:
    """Settings of fully sharded data parallelism by torch's ``fully_shard`` (FSDP 2).

    Settings of FSDP 1 are accepted if FSDP 2 has an equivalent, and raise an error otherwise.
    Choices may be members of torch's enumerations or their names in upper or lower case; they are
    stored as names.

    Example::

        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
        trainer = Trainer(max_epochs=10, mixed_precision="bf16", fsdp_plugin=plugin)

    Attributes:
        fsdp_version: The version of FSDP whose setting names are used, 1 or 2; None takes
            ``FSDP_VERSION``, else 2.
        reshard_after_forward: Release gathered parameters after forward, and gather them again for
            backward. False needs more memory and communicates less. None takes
            ``FSDP_RESHARD_AFTER_FORWARD``, else follows `sharding_strategy`.
        sharding_strategy: FSDP 1's name for `reshard_after_forward`: ``"FULL_SHARD"`` or
            ``"SHARD_GRAD_OP"``. With the prefix ``HYBRID_`` it shards within each machine and
            replicates over machines. None takes ``FSDP_SHARDING_STRATEGY``, else ``"FULL_SHARD"``.
        auto_wrap_policy: Which submodules are units that gather their parameters separately: a
            function of a module, ``"transformer_based_wrap"`` (classes), ``"size_based_wrap"``
            (number of parameters) or ``"no_wrap"``. None takes ``FSDP_AUTO_WRAP_POLICY``, else the
            classes.
        transformer_cls_names_to_wrap: The names of these classes; None takes
            ``FSDP_TRANSFORMER_CLS_TO_WRAP`` (separated by commas), else the model's own
            ``_no_split_modules``.
        min_num_params: The minimum number of parameters of a unit; None takes
            ``FSDP_MIN_NUM_PARAMS``, else 100 million.
        mixed_precision_policy: Torch's ``MixedPrecisionPolicy``, a dict of its arguments or a name
            such as ``"bf16"``. None follows the `Accelerator`.
        cpu_offload: Keep shards in host memory: a bool, or torch's ``CPUOffloadPolicy``; None takes
            ``FSDP_OFFLOAD_PARAMS``, else False.
        ignored_modules: Submodules that are not sharded, or a regular expression for their names.
        state_dict_type: ``"SHARDED_STATE_DICT"`` or ``"FULL_STATE_DICT"``, with the same effect:
            states are saved as shards, which load on any number of processes. `save_model` and
            ``trainer merge-weights`` write whole weights. None takes ``FSDP_STATE_DICT_TYPE``, else
            ``"SHARDED_STATE_DICT"``.
        state_dict_config: For FSDP 1; has no effect.
        optim_state_dict_config: For FSDP 1; has no effect.
        activation_checkpointing: Recompute the activations of the units in backward; None takes
            ``FSDP_ACTIVATION_CHECKPOINTING``, else False.
        activation_checkpointing_offload: Keep the inputs of recomputed units in host memory until
            backward; None takes ``FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD``, else False.
        cpu_ram_efficient_loading: Only the first process of each machine reads weights in
            ``from_pretrained`` of transformers: creating the Trainer or `Accelerator` sets this
            variable and ``ACCELERATE_USE_FSDP``. All processes always receive rank 0's weights, so
            the model may be on the meta device on other ranks. None takes
            ``FSDP_CPU_RAM_EFFICIENT_LOADING``, else False.
        param_init_fn: Initialises a module that is on the meta device, on rank 0; None calls its
            ``reset_parameters``.
        backward_prefetch: For FSDP 1; must not be ``"BACKWARD_POST"``.
        limit_all_gathers: For FSDP 1; must be True.
        use_orig_params: For FSDP 1; must not be False.
        sync_module_states: For FSDP 1; must not be False.
        forward_prefetch: Gather the next submodule's parameters during forward; None takes
            ``FSDP_FORWARD_PREFETCH``, else False.

    Raises:
        ValueError: A name is unknown, or FSDP 2 lacks the setting.
        TypeError: A value has another type.
    """

    _env_prefix = "FSDP_"

    fsdp_version: int | None = setting(
        "version",
        "version of FSDP whose setting names are used: 1 or 2 (default 2)",
        2,
        env="FSDP_VERSION",
    )
    sharding_strategy: Any = setting(
        "text", "FSDP 1's name for --fsdp_reshard_after_forward", "FULL_SHARD"
    )
    reshard_after_forward: Any = setting(
        "bool_or_name",
        "release gathered parameters after forward (true)",
        question="release gathered parameters after forward",
    )
    auto_wrap_policy: Any = setting(
        "text", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP", "TRANSFORMER_BASED_WRAP"
    )
    transformer_cls_names_to_wrap: list[str] | None = setting(
        "names",
        "classes of submodules to shard as separate units",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        option="fsdp_transformer_layer_cls_to_wrap",
        question="classes to shard as separate units, such as Block (default: the model's "
        "_no_split_modules)",
    )
    min_num_params: int | None = setting(
        "count", "minimum number of parameters of a unit, for SIZE_BASED_WRAP", 100_000_000
    )
    cpu_offload: Any = setting(
        "bool",
        "keep shards in host memory (false)",
        False,
        env="FSDP_OFFLOAD_PARAMS",
        question="keep shards in host memory",
    )
    activation_checkpointing: bool | None = setting(
        "bool",
        "recompute activations in backward (false)",
        False,
        question="recompute activations in backward",
    )
    activation_checkpointing_offload: bool | None = setting(
        "bool", "keep the inputs of recomputed blocks in host memory (false)", False
    )
    state_dict_type: Any = setting(
        "text", "SHARDED_STATE_DICT or FULL_STATE_DICT", "SHARDED_STATE_DICT"
    )
    forward_prefetch: bool | None = setting(
        "bool", "gather the next submodule during forward (false)", False
    )
    backward_prefetch: Any = setting(
        "text", "FSDP 1 only: BACKWARD_PRE or NO_PREFETCH", "BACKWARD_PRE"
    )
    use_orig_params: bool | None = setting("bool", "FSDP 1 only: true", True)
    cpu_ram_efficient_loading: bool | None = setting(
        "bool", "only rank 0 reads pretrained weights (false)", False
    )
    sync_module_states: bool | None = setting("bool", "FSDP 1 only: true", True)
    ignored_modules: Iterable[Any] | str | None = setting(
        "text", "a regular expression for names of modules not to shard"
    )
    mixed_precision_policy: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    param_init_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        fill(self)
        self.sharding_strategy = self._choice("sharding_strategy", tuple(_STRATEGIES))
        self.reshard_after_forward = self._reshard()
        self.backward_prefetch = self._choice("backward_prefetch", _PREFETCH)
        self.state_dict_type = self._choice("state_dict_type", _STATE_DICTS)
        if not callable(self.auto_wrap_policy):
            self.auto_wrap_policy = self._choice("auto_wrap_policy", _WRAP_POLICIES)
        check_bool_fields(self)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing_offload is True, but activation_checkpointing is False: "
                "set that to True, or leave this out."
            )
        self._check_version_2()

    def _check_version_2(self) -> None:
        """Raise for settings that only FSDP 1 has."""
        if self.fsdp_version not in (1, 2):
            raise ValueError(f"fsdp_version is {self.fsdp_version!r}; it must be 1 or 2.")
        if self.sharding_strategy == "NO_SHARD":
            raise ValueError(
                "sharding_strategy is 'NO_SHARD', which is plain data parallelism: leave the FSDP "
                "plugin out, and several processes train with DDP."
            )
        for name, value in (
            ("use_orig_params", False),
            ("sync_module_states", False),
            ("limit_all_gathers", False),
            ("backward_prefetch", "BACKWARD_POST"),
            ("state_dict_type", "LOCAL_STATE_DICT"),
        ):
            if getattr(self, name) == value:
                raise ValueError(
                    f"{name} is {value!r}, which FSDP 2 does not have: leave it out. (FSDP 2 "
                    "shards the model here.)"
                )

    @classmethod
    def requested(
        cls, given: FullyShardedDataParallelPlugin | None
    ) -> FullyShardedDataParallelPlugin | None:
        """Return the given plugin, or a new one if ``ACCELERATE_USE_FSDP`` is set."""
        check_type("fsdp_plugin", given, cls)
        return cls() if given is None and environment.read_flag("ACCELERATE_USE_FSDP") else given

    def _choice(self, name: str, choices: Sequence[str]) -> str:
        given = getattr(self, name)
        # The numbers of torch's enumeration, as in accelerate's configuration files.
        numbered = str(given).isdigit() and 1 <= int(given) <= len(choices)
        chosen = choices[int(given) - 1] if numbered else getattr(given, "name", str(given)).upper()
        if chosen not in choices:
            raise ValueError(choice_error(name, given, choices))
        return chosen

    def _reshard(self) -> bool | int:
        given = self.reshard_after_forward
        if given is None:
            return bool(_STRATEGIES[self.sharding_strategy])
        if isinstance(given, str) and given.isdigit():
            given = int(given)
        if isinstance(given, int):
            return given
        name = getattr(given, "name", str(given)).upper()
        known = {"TRUE": True, "FALSE": False, **_STRATEGIES}
        if known.get(name) is None:
            raise ValueError(choice_error("reshard_after_forward", given, known))
        return bool(known[name])

    @property
    def hybrid(self) -> bool:
        """Whether the model is sharded within machines and replicated over them."""
        return str(self.sharding_strategy).startswith("HYBRID")

    def tell_transformers(self) -> None:
        """Set the variables that let ``from_pretrained`` read only on the first process."""
        if self.cpu_ram_efficient_loading:
            environment.export(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Take the classes to wrap from a model's ``_no_split_modules``, unless they are given."""
        if self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", ()) or ())

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`; None leaves it unchanged.

        Raises:
            ValueError: The name is unknown, or FSDP 2 does not support it.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        self.state_dict_type = self._choice("state_dict_type", _STATE_DICTS)
        self._check_version_2()

    def set_cpu_offload(self) -> None:
        """Replace a bool by torch's policy."""
        import torch

        self.cpu_offload = self.offload(torch.device("cpu"))

    def validate_cpu_offload(self) -> None:
        """Raise a ``TypeError`` unless `cpu_offload` is a bool or a policy of torch."""
        from torch.distributed.fsdp import OffloadPolicy

        given = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        if not isinstance(self.cpu_offload, OffloadPolicy) and not isinstance(given, bool):
            raise TypeError(
                f"cpu_offload is {self.cpu_offload!r}; it must be True, False or torch's "
                "CPUOffloadPolicy."
            )

    def validate_mixed_precision_policy(self) -> None:
        """Raise unless `mixed_precision_policy` is a valid policy; see `policy`."""
        self.policy()

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the policy of a precision: ``"fp16"``, ``"bf16"`` or ``"no"``.

        Args:
            mixed_precision: The precision of gathered parameters and of the computation; gradients
                are reduced in float32.
            buffer_autocast: For FSDP 1; FSDP 2 does not convert buffers.
            override: Replace a policy that is already set.
        """
        del buffer_autocast
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _policy(mixed_precision)

    def policy(self, mixed_precision: str = "no") -> Any:
        """Return torch's ``MixedPrecisionPolicy``.

        Args:
            mixed_precision: The precision of the `Accelerator`, if the plugin has no policy. Its
                autocast converts inputs, as for models that are not sharded.

        Raises:
            TypeError: `mixed_precision_policy` has another type, such as FSDP 1's policy.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = self.mixed_precision_policy
        if given is None:
            return replace(_policy(mixed_precision), cast_forward_inputs=mixed_precision == "no")
        if isinstance(given, str):
            return _policy(given)
        if isinstance(given, dict):
            return MixedPrecisionPolicy(**given)
        if isinstance(given, MixedPrecisionPolicy):
            return given
        return MixedPrecisionPolicy(  # FSDP 1's MixedPrecision also has these two
            param_dtype=given.param_dtype, reduce_dtype=given.reduce_dtype
        )

    def offload(self, device: torch.device) -> Any:
        """Return torch's offload policy for shards."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        given = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        pinned = device.type in ("cuda", "xpu")
        return CPUOffloadPolicy(pin_memory=pinned) if given else OffloadPolicy()

    def ignores(self, name: str, module: Any) -> bool:
        """Return whether a submodule is not sharded."""
        if isinstance(self.ignored_modules, str):
            return re.fullmatch(self.ignored_modules, name) is not None
        return any(module is each for each in self.ignored_modules or ())


def _policy(mixed_precision: str) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {"no": None, "fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtypes["fp8"] = torch.bfloat16  # used around the layers that compute in fp8
    check_choice("mixed_precision_policy", mixed_precision, dtypes)
    dtype = dtypes[mixed_precision]
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
    )
