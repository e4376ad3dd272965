"""How a model and its data are split over processes: device meshes, and settings of FSDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer import environment
from trainer.checks import check_counts, check_type, choice_error
from trainer.configuration import check_bool_fields, explains_itself, fill

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# From the outermost dimension to the innermost, whose processes are closest to each other.
_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@explains_itself
@dataclass(kw_only=True)
class TorchContextParallelConfig:
    """Settings of ``cp_size`` above 1.

    Attributes:
        cp_comm_strategy: ``"allgather"``: each process gets the keys and values of all. None takes
            ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, else ``"allgather"``.

    Raises:
        ValueError: The strategy is unknown.
        NotImplementedError: It is ``"alltoall"``.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        """Fill in the strategy and check it."""
        fill(self, "PARALLELISM_CONFIG_CP_COMM_STRATEGY", cp_comm_strategy="allgather")
        if self.cp_comm_strategy == "alltoall":
            raise NotImplementedError(
                "cp_comm_strategy is 'alltoall', which sends keys and values from process to "
                "process; here attention gathers them all: use 'allgather'."
            )
        if self.cp_comm_strategy != "allgather":
            raise ValueError(
                choice_error("cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall"))
            )


@explains_itself
@dataclass(kw_only=True)
class DeepSpeedSequenceParallelConfig:
    """Settings of ``sp_size`` above 1, which is not supported yet.

    Attributes:
        sp_seq_length: The number of positions, if it is that of all batches; None takes
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``.
        sp_seq_length_is_variable: Whether it differs between batches; None takes
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE``, else True.
        sp_attn_implementation: The attention of transformers; None takes
            ``PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION``.

    Raises:
        ValueError: The length is not positive, or missing where it is that of all batches.
        TypeError: A value has another type.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check them."""
        if self.sp_seq_length is None:
            self.sp_seq_length = environment.read_int("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
        fill(self, "PARALLELISM_CONFIG_", sp_seq_length_is_variable=True)
        fill(self, "PARALLELISM_CONFIG_", sp_attn_implementation=None)
        check_bool_fields(self)
        if self.sp_seq_length is not None:
            check_counts(1, sp_seq_length=self.sp_seq_length)
        elif not self.sp_seq_length_is_variable:
            raise ValueError(
                "sp_seq_length_is_variable is False, but sp_seq_length is not given: pass the "
                "number of positions of all batches."
            )


@explains_itself
@dataclass(kw_only=True)
class TorchTensorParallelConfig:
    """Settings of ``tp_size`` above 1.

    Attributes:
        enable_async_tp: Must be False: layers wait for their communication.

    Raises:
        NotImplementedError: It is True.
        TypeError: It is not a bool.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        """Check the value."""
        check_bool_fields(self)
        if self.enable_async_tp:
            raise NotImplementedError(
                "enable_async_tp=True asks for asynchronous tensor parallelism, which is not "
                "supported: leave it out."
            )


@explains_itself
@dataclass(kw_only=True)
class ParallelismConfig:
    """The dimensions of the device mesh: their sizes multiply to the number of processes.

    Attributes:
        dp_replicate_size: Replicas of the model, which read different data; None takes
            ``PARALLELISM_CONFIG_DP_REPLICATE_SIZE``, else 1.
        dp_shard_size: Processes that share one replica and read different data (FSDP); None takes
            ``PARALLELISM_CONFIG_DP_SHARD_SIZE``, else 1.
        tp_size: Processes that share each layer and read the same data (tensor parallel); None
            takes ``PARALLELISM_CONFIG_TP_SIZE``, else 1.
        cp_size: Processes that share each sequence (context parallel): run forward inside
            `Accelerator.maybe_context_parallel`. None takes ``PARALLELISM_CONFIG_CP_SIZE``, else 1.
        cp_backend: ``"torch"``; None takes ``PARALLELISM_CONFIG_CP_BACKEND``, else ``"torch"``.
        sp_size: The same by DeepSpeed's Ulysses; not supported yet. None takes
            ``PARALLELISM_CONFIG_SP_SIZE``, else 1.
        sp_backend: ``"deepspeed"``; None takes ``PARALLELISM_CONFIG_SP_BACKEND``, else that.
        tp_handler: Settings of tensor parallelism; None is the default ones.
        cp_handler: Settings of context parallelism; None is the default ones, if `cp_size` is above
            1.
        sp_handler: Settings of `sp_size`, which have no effect while it is 1.

    Raises:
        ValueError: A size is below 1, or a backend is unknown.
        TypeError: A handler has another type.
        NotImplementedError: `sp_size` is above 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        """Fill in missing sizes from the environment."""
        self.device_mesh: DeviceMesh | None = None
        for name in _DIMENSIONS:
            if getattr(self, f"{name}_size") is None:
                variable = f"PARALLELISM_CONFIG_{name.upper()}_SIZE"
                size = environment.read_int(variable)
                setattr(self, f"{name}_size", 1 if size is None else size)
        check_counts(1, **self._sizes("{}_size"))
        fill(self, "PARALLELISM_CONFIG_", cp_backend="torch", sp_backend="deepspeed")
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != known:
                raise ValueError(choice_error(name, getattr(self, name), (known,)))
        check_type("tp_handler", self.tp_handler, TorchTensorParallelConfig)
        check_type("cp_handler", self.cp_handler, TorchContextParallelConfig)
        check_type("sp_handler", self.sp_handler, DeepSpeedSequenceParallelConfig)
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.sp_enabled:
            raise NotImplementedError(
                f"DeepSpeed's sequence parallelism (sp_size={self.sp_size}) is not supported yet: "
                "leave sp_size out, or use cp_size."
            )

    @classmethod
    def requested(
        cls, given: ParallelismConfig | None, plugin: TorchTensorParallelPlugin | None = None
    ) -> ParallelismConfig | None:
        """Return the given one or the plugin's, or if a variable asks for it, a new one.

        The variable is ``ACCELERATE_USE_PARALLELISM_CONFIG``.

        Raises:
            ValueError: Both are given.
        """
        check_type("parallelism_config", given, cls)
        check_type("torch_tp_plugin", plugin, TorchTensorParallelPlugin)
        if plugin is not None and given is not None:
            raise ValueError("Pass parallelism_config or torch_tp_plugin, not both.")
        if plugin is not None:
            return cls(tp_size=plugin.tp_size)
        asked = given is None and environment.read_flag("ACCELERATE_USE_PARALLELISM_CONFIG")
        return cls() if asked else given

    def _sizes(self, form: str = "{}") -> dict[str, int]:
        return {form.format(name): getattr(self, f"{name}_size") for name in _DIMENSIONS}

    @property
    def total_size(self) -> int:
        """The number of processes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """How many shares of the data there are."""
        assert self.dp_replicate_size is not None
        assert self.dp_shard_size is not None
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes read the same data."""
        assert self.tp_size is not None
        assert self.cp_size is not None
        assert self.sp_size is not None
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas."""
        return self._enabled("dp_replicate")

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a replica is sharded."""
        return self._enabled("dp_shard")

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self._enabled("tp")

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split."""
        return self._enabled("cp")

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by DeepSpeed's Ulysses."""
        return self._enabled("sp")

    def _enabled(self, name: str) -> bool:
        return bool(getattr(self, f"{name}_size") > 1)

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self._enabled(name)]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The names of the dimensions with several processes."""
        return self._active(*_DIMENSIONS)

    @property
    def dp_dim_names(self) -> list[str]:
        """The names of the data-parallel dimensions with several processes."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The names of the other dimensions with several processes."""
        return self._active("cp", "sp", "tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The names of the dimensions over which parameters are sharded."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The names of the dimensions over which the loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of the dimensions of the mesh that `fully_shard` gets."""
        return self._active("dp_replicate", "dp_shard", "cp")

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all dimensions with several processes; collective.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, …
        """
        names = tuple(self.active_mesh_dims) or ("dp_shard",)
        sizes = {name: getattr(self, f"{name}_size") for name in names}
        self.device_mesh = device_mesh(device_type, sizes)
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the mesh; it is built in the first call.

        Raises:
            ValueError: It has not been built, and `device_type` is not given.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("The device mesh is not built yet: pass device_type.")
            return self.build_device_mesh(device_type)
        return self.device_mesh

    def to_json(self) -> dict[str, int]:
        """Return the sizes by name."""
        return self._sizes("{}_size")


@explains_itself
@dataclass(kw_only=True)
class TorchTensorParallelPlugin:
    """Splits each layer over processes; the same as ``ParallelismConfig(tp_size=...)``.

    Attributes:
        tp_size: Processes that share each layer; at least 2.
        torch_device_mesh: A mesh of these processes with one dimension, ``"tp"``. The model is
            split over an equal mesh, `Accelerator.torch_device_mesh`.

    Raises:
        ValueError: `tp_size` is below 2, or the mesh has other dimensions or another size.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check both values."""
        mesh = self.torch_device_mesh
        if mesh is not None and (mesh.mesh_dim_names != ("tp",) or mesh.size() != self.tp_size):
            raise ValueError(
                f"torch_device_mesh has the dimensions {mesh.mesh_dim_names} and {mesh.size()} "
                f"processes; it must have one, 'tp', of tp_size={self.tp_size} processes."
            )
        check_counts(2, tp_size=self.tp_size)


_STRATEGIES = {  # of FSDP 1: whether parameters are released after forward, and whether replicated
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

    Settings of FSDP 1 are understood where they have a meaning in FSDP 2, and refused elsewhere.
    Choices may be members of torch's enumerations or their names in either case; they are stored as
    names.

    Attributes:
        fsdp_version: 1 or 2: whose names the settings have; None takes ``FSDP_VERSION``, else 2.
        reshard_after_forward: Release gathered parameters after forward, and gather them again for
            backward. False needs more memory and communicates less. None takes
            ``FSDP_RESHARD_AFTER_FORWARD``, else follows `sharding_strategy`.
        sharding_strategy: FSDP 1's name for it: ``"FULL_SHARD"`` or ``"SHARD_GRAD_OP"``, and with
            ``HYBRID_`` shards within each machine and replicates over machines. None takes
            ``FSDP_SHARDING_STRATEGY``, else ``"FULL_SHARD"``.
        auto_wrap_policy: Which submodules gather their parameters by themselves: a function of a
            module, ``"transformer_based_wrap"`` (classes), ``"size_based_wrap"`` (number of
            parameters) or ``"no_wrap"``. None takes ``FSDP_AUTO_WRAP_POLICY``, else the classes.
        transformer_cls_names_to_wrap: The names of these classes; None takes
            ``FSDP_TRANSFORMER_CLS_TO_WRAP`` (separated by commas), else the model's own
            ``_no_split_modules``.
        min_num_params: The least parameters of such a submodule; None takes
            ``FSDP_MIN_NUM_PARAMS``, else 100 million.
        mixed_precision_policy: Torch's ``MixedPrecisionPolicy``, a dict of its arguments or a name
            such as ``"bf16"``. None follows the `Accelerator`.
        cpu_offload: Keep shards in host memory: a bool, or torch's ``CPUOffloadPolicy``; None takes
            ``FSDP_OFFLOAD_PARAMS``, else False.
        ignored_modules: Submodules that are not sharded, or a regular expression for their names.
        state_dict_type: ``"SHARDED_STATE_DICT"`` or ``"FULL_STATE_DICT"``, which makes no
            difference: states are saved as shards, which load on any number of processes, and
            `save_model` and ``trainer merge-weights`` write whole weights. None takes
            ``FSDP_STATE_DICT_TYPE``, else ``"SHARDED_STATE_DICT"``.
        state_dict_config: FSDP 1's; makes no difference.
        optim_state_dict_config: FSDP 1's; makes no difference.
        activation_checkpointing: Recompute the activations of these submodules in backward; None
            takes ``FSDP_ACTIVATION_CHECKPOINTING``, else False.
        activation_checkpointing_offload: Keep the inputs that they are recomputed from in host
            memory until backward; None takes ``FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD``, else False.
        cpu_ram_efficient_loading: Tell transformers that only the first process of each machine
            need read weights in ``from_pretrained``, by setting this variable and
            ``ACCELERATE_USE_FSDP`` when the Trainer or `Accelerator` is made. In every case all
            processes receive rank 0's weights, and may have theirs on the meta device. None takes
            ``FSDP_CPU_RAM_EFFICIENT_LOADING``, else False.
        param_init_fn: Initialises a module of the meta device, on rank 0; None calls its
            ``reset_parameters``.
        backward_prefetch: FSDP 1's; must not be ``"BACKWARD_POST"``.
        limit_all_gathers: FSDP 1's; must be True.
        use_orig_params: FSDP 1's; must not be False.
        sync_module_states: FSDP 1's; must not be False.
        forward_prefetch: Gather the next submodule's parameters during forward; None takes
            ``FSDP_FORWARD_PREFETCH``, else False.

    Raises:
        ValueError: A name is unknown, or FSDP 2 does not have the setting.
        TypeError: A value has another type.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        self.sharding_strategy = self._choice("sharding_strategy", tuple(_STRATEGIES), "FULL_SHARD")
        self.reshard_after_forward = self._reshard()
        self.backward_prefetch = self._choice("backward_prefetch", _PREFETCH, "BACKWARD_PRE")
        self.state_dict_type = self._choice("state_dict_type", _STATE_DICTS, "SHARDED_STATE_DICT")
        if not callable(self.auto_wrap_policy):
            self.auto_wrap_policy = self._choice(
                "auto_wrap_policy", _WRAP_POLICIES, "TRANSFORMER_BASED_WRAP"
            )
        if self.transformer_cls_names_to_wrap is None:
            named = environment.read("FSDP_TRANSFORMER_CLS_TO_WRAP")
            if named:
                self.transformer_cls_names_to_wrap = [each.strip() for each in named.split(",")]
        fill(self, "FSDP_OFFLOAD_PARAMS", cpu_offload=False)
        fill(self, "FSDP_VERSION", fsdp_version=2)
        fill(
            self,
            "FSDP_",
            use_orig_params=True,
            sync_module_states=True,
            forward_prefetch=False,
            activation_checkpointing=False,
            activation_checkpointing_offload=False,
            cpu_ram_efficient_loading=False,
            min_num_params=100_000_000,
            ignored_modules=None,
        )
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
        """Return the given one, or if ``ACCELERATE_USE_FSDP`` is set, a new one."""
        check_type("fsdp_plugin", given, cls)
        return cls() if given is None and environment.read_flag("ACCELERATE_USE_FSDP") else given

    def _choice(self, name: str, choices: Sequence[str], default: str) -> str:
        given = getattr(self, name)
        if given is None:
            given = environment.read(f"FSDP_{name.upper()}") or default
        # The numbers of torch's enumeration, as accelerate's configuration files have them.
        numbered = str(given).isdigit() and 1 <= int(given) <= len(choices)
        chosen = choices[int(given) - 1] if numbered else getattr(given, "name", str(given)).upper()
        if chosen not in choices:
            raise ValueError(choice_error(name, given, choices))
        return chosen

    def _reshard(self) -> bool | int:
        given = self.reshard_after_forward
        if given is None:
            given = environment.read("FSDP_RESHARD_AFTER_FORWARD")
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
        """Whether machines have replicas, and shards are within a machine."""
        return str(self.sharding_strategy).startswith("HYBRID")

    def tell_transformers(self) -> None:
        """Set the variables by which ``from_pretrained`` reads on the first process only."""
        if self.cpu_ram_efficient_loading:
            environment.export(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Take the classes to wrap from a model's ``_no_split_modules``, unless they are given."""
        if self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", ()) or ())

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`; None leaves it as it is.

        Raises:
            ValueError: The name is unknown, or FSDP 2 does not have it.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        self.state_dict_type = self._choice("state_dict_type", _STATE_DICTS, "SHARDED_STATE_DICT")
        self._check_version_2()

    def set_cpu_offload(self) -> None:
        """Put torch's policy in the place of a bool."""
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
        """Raise unless `mixed_precision_policy` is one; see `policy`."""
        self.policy()

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the policy of a precision: ``"fp16"``, ``"bf16"`` or ``"no"``.

        Args:
            mixed_precision: The precision of gathered parameters and of the computation; gradients
                are reduced in float32.
            buffer_autocast: FSDP 1's; FSDP 2 does not convert buffers.
            override: Replace a policy that is already set.
        """
        del buffer_autocast
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _policy(mixed_precision)

    def policy(self, mixed_precision: str = "no") -> Any:
        """Return torch's ``MixedPrecisionPolicy``.

        Args:
            mixed_precision: The precision of the `Accelerator`, if the plugin has no policy. Its
                autocast converts inputs, as without shards.

        Raises:
            TypeError: `mixed_precision_policy` is something else, such as FSDP 1's.
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
        return MixedPrecisionPolicy(  # FSDP 1's MixedPrecision has these two in common
            param_dtype=given.param_dtype, reduce_dtype=given.reduce_dtype
        )

    def offload(self, device: torch.device) -> Any:
        """Return torch's policy of where shards are kept."""
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
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {"no": None, "fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtypes["fp8"] = torch.bfloat16  # around the layers that compute in fp8
    if mixed_precision not in dtypes:
        raise ValueError(choice_error("mixed_precision_policy", mixed_precision, dtypes))
    dtype = dtypes[mixed_precision]
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
    )


_made: tuple[Any, dict[Any, DeviceMesh]] = (None, {})  # the default group, and its meshes


def device_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of all processes; collective when it is the first of its kind.

    Nothing frees the process groups of a mesh, each of which has a communicator or polling threads,
    so a second run of the same layout gets the mesh of the first.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, …
        sizes: Names of the dimensions -> their sizes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    global _made
    if _made[0] is not dist.group.WORLD:
        _made = (None, {})
    layout = (device_type, *sizes.items())
    if layout not in _made[1]:
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _made = (dist.group.WORLD, _made[1] | {layout: mesh})
    return _made[1][layout]
