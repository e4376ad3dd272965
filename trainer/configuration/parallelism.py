"""The split of a model and its data over processes: the dimensions of the device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer import environment
from trainer.checks import (
    check_bool_fields,
    check_choice,
    check_counts,
    check_type,
    explains_itself,
)
from trainer.configuration.fields import fill, nested, setting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# From outermost to innermost; processes of the innermost dimension are closest to each other.
_DIMENSIONS = ("dp_replicate", "dp_shard", "pp", "cp", "sp", "tp")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved")

# Settings that cannot be combined with a pipeline, with the reason.
_NOT_IN_PIPELINES = {
    "cp": "stages pass on whole sequences: leave cp_size out.",
}


@explains_itself
@dataclass(kw_only=True)
class TorchContextParallelConfig:
    """Settings of ``cp_size`` above 1.

    Attributes:
        cp_comm_strategy: ``"allgather"``: each process gathers the keys and values of all
            processes. None takes ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, else ``"allgather"``.

    Raises:
        ValueError: The strategy is unknown.
        NotImplementedError: The strategy is ``"alltoall"``.
    """

    _env_prefix = "PARALLELISM_CONFIG_"

    cp_comm_strategy: str | None = setting(
        "text", "how keys and values are exchanged: allgather", "allgather"
    )

    def __post_init__(self) -> None:
        """Fill in the strategy and check it."""
        fill(self)
        if self.cp_comm_strategy == "alltoall":
            raise NotImplementedError(
                "cp_comm_strategy='alltoall' is not supported: use 'allgather', which gathers all "
                "keys and values for attention."
            )
        check_choice("cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall"))


@explains_itself
@dataclass(kw_only=True)
class DeepSpeedSequenceParallelConfig:
    """Settings of ``sp_size`` above 1, which is not supported yet.

    Attributes:
        sp_seq_length: The number of positions, if all batches have the same number; None takes
            ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``.
        sp_seq_length_is_variable: Whether the number of positions differs between batches; None
            takes ``PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE``, else True.
        sp_attn_implementation: The attention of transformers; None takes
            ``PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION``.

    Raises:
        ValueError: The length is not positive, or is missing although all batches have the same
            length.
        TypeError: A value has another type.
    """

    _env_prefix = "PARALLELISM_CONFIG_"

    sp_seq_length: int | None = setting("count", "not used while sp_size is 1")
    sp_seq_length_is_variable: bool | None = setting("bool", "not used while sp_size is 1", True)
    sp_attn_implementation: str | None = setting("text", "not used while sp_size is 1")

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check them."""
        fill(self)
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
        enable_async_tp: Must be False, since layers wait for their communication.

    Raises:
        NotImplementedError: The value is True.
        TypeError: The value is not a bool.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        """Check the value."""
        check_bool_fields(self)
        if self.enable_async_tp:
            raise NotImplementedError("enable_async_tp=True is not supported: leave it out.")


@explains_itself
@dataclass(kw_only=True)
class ParallelismConfig:
    """The dimensions of the device mesh: their sizes multiply to the number of processes.

    Example::

        config = ParallelismConfig(dp_shard_size=2, tp_size=2)  # 4 processes
        trainer = Trainer(max_epochs=10, parallelism_config=config)

    Attributes:
        dp_replicate_size: Replicas of the model, which read different data; None takes
            ``PARALLELISM_CONFIG_DP_REPLICATE_SIZE``, else 1.
        dp_shard_size: Processes over which one replica is sharded and which read different data
            (FSDP); None takes ``PARALLELISM_CONFIG_DP_SHARD_SIZE``, else 1.
        tp_size: Processes that share each layer and read the same data (tensor parallel); None
            takes ``PARALLELISM_CONFIG_TP_SIZE``, else 1.
        cp_size: Processes that share each sequence (context parallel); the forward pass must run
            inside `Accelerator.maybe_context_parallel`. None takes ``PARALLELISM_CONFIG_CP_SIZE``,
            else 1.
        pp_size: Processes that have consecutive layers of one replica and read the same data
            (pipeline parallel), in the `Trainer`. None takes ``PARALLELISM_CONFIG_PP_SIZE``, else
            1.
        pp_schedule: The order of forward and backward passes: ``"gpipe"`` runs all forward passes
            first, ``"1f1b"`` alternates them and keeps the activations of at most `pp_size`
            micro-batches, ``"interleaved"`` does the same with several stages on each process. None
            takes ``PARALLELISM_CONFIG_PP_SCHEDULE``, else ``"1f1b"``.
        pp_microbatches: The number of micro-batches into which each batch of the loader is split;
            None takes ``PARALLELISM_CONFIG_PP_MICROBATCHES``, else 4 for each process of a
            pipeline.
        pp_stages_per_rank: The stages of each process, with ``"interleaved"``; None takes
            ``PARALLELISM_CONFIG_PP_STAGES_PER_RANK``, else 2 with ``"interleaved"`` and 1
            otherwise.
        pp_split: The layers with which the second and later stages begin, by their names in the
            module, such as ``["model.layers.8"]``. They must be children of one module that runs
            them in order. None takes the module's ``pp_plan``, a list of the same form, else
            divides the blocks of the model into stages of about equal numbers of parameters.
        cp_backend: ``"torch"``; None takes ``PARALLELISM_CONFIG_CP_BACKEND``, else ``"torch"``.
        sp_size: Processes that share each sequence by DeepSpeed's Ulysses; not supported yet. None
            takes ``PARALLELISM_CONFIG_SP_SIZE``, else 1.
        sp_backend: ``"deepspeed"``; None takes ``PARALLELISM_CONFIG_SP_BACKEND``, else
            ``"deepspeed"``.
        tp_handler: Settings of tensor parallelism; None takes the defaults.
        cp_handler: Settings of context parallelism; None takes the defaults if `cp_size` is above
            1.
        sp_handler: Settings of `sp_size`, which have no effect while it is 1.

    Raises:
        ValueError: A size is below 1, or a backend is unknown.
        TypeError: A handler has another type.
        NotImplementedError: `sp_size` is above 1.
    """

    _env_prefix = "PARALLELISM_CONFIG_"

    dp_replicate_size: int | None = setting("count", "replicas of the model (1)", 1)
    dp_shard_size: int | None = setting("count", "processes that shard a replica (1)", 1)
    tp_size: int | None = setting(
        "count",
        "processes that share each layer, tensor parallel (1)",
        1,
        question="processes that share each layer, tensor parallel",
    )
    pp_size: int | None = setting("count", "pipeline stages (1)", 1)
    pp_schedule: str | None = setting("text", "gpipe, 1f1b or interleaved (1f1b)", "1f1b")
    pp_microbatches: int | None = setting("count", "micro-batches of each batch (4 for each stage)")
    pp_stages_per_rank: int | None = setting("count", "stages of each process (interleaved: 2)")
    pp_split: Sequence[str] | None = None
    cp_size: int | None = setting(
        "count", "processes that share each sequence, context parallel (1)", 1
    )
    sp_size: int | None = setting(
        "count", "processes that share each sequence, by DeepSpeed (1)", 1
    )
    cp_backend: str | None = setting("text", "how sequences are shared: torch", "torch")
    cp_handler: TorchContextParallelConfig | None = nested(TorchContextParallelConfig)
    sp_backend: str | None = setting("text", "not used while sp_size is 1: deepspeed", "deepspeed")
    sp_handler: DeepSpeedSequenceParallelConfig | None = nested(DeepSpeedSequenceParallelConfig)
    tp_handler: TorchTensorParallelConfig | None = None

    def __post_init__(self) -> None:
        """Fill in missing sizes from the environment."""
        self.device_mesh: DeviceMesh | None = None
        fill(self)
        check_counts(1, **self._sizes("{}_size"))
        self._check_pipeline()
        check_choice("cp_backend", self.cp_backend, ("torch",))
        check_choice("sp_backend", self.sp_backend, ("deepspeed",))
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

    def _check_pipeline(self) -> None:
        check_choice("pp_schedule", self.pp_schedule, PIPELINE_SCHEDULES)
        several = self.pp_schedule == "interleaved"
        if self.pp_stages_per_rank is None:
            self.pp_stages_per_rank = 2 if several else 1
        if self.pp_microbatches is not None:
            check_counts(1, pp_microbatches=self.pp_microbatches)
        check_counts(1, pp_stages_per_rank=self.pp_stages_per_rank)
        if several != (self.pp_stages_per_rank > 1):
            raise ValueError(
                f"pp_stages_per_rank is {self.pp_stages_per_rank} and pp_schedule "
                f"{self.pp_schedule!r}: several stages on each process need 'interleaved', which "
                "needs at least 2."
            )
        if not self.pp_enabled:
            return
        if isinstance(self.pp_split, str):
            raise TypeError(f"pp_split is a string, {self.pp_split!r}: pass a list of names.")
        assert self.pp_size is not None
        stages = self.pp_size * self.pp_stages_per_rank
        if self.pp_split is not None and len(self.pp_split) != stages - 1:
            raise ValueError(
                f"pp_split has {len(self.pp_split)} names, but pp_size={self.pp_size} with "
                f"pp_stages_per_rank={self.pp_stages_per_rank} makes {stages} stages: name the "
                f"layers with which the last {stages - 1} of them begin."
            )
        for name, why in _NOT_IN_PIPELINES.items():
            if self._enabled(name):
                raise NotImplementedError(
                    f"pp_size={self.pp_size} does not work with {name}_size="
                    f"{getattr(self, name + '_size')}: {why}"
                )

    @classmethod
    def requested(
        cls, given: ParallelismConfig | None, plugin: TorchTensorParallelPlugin | None = None
    ) -> ParallelismConfig | None:
        """Return the configuration, the plugin's, or a new one if a variable requests it.

        The variable is ``ACCELERATE_USE_PARALLELISM_CONFIG``.

        Raises:
            ValueError: Both arguments are passed.
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
        """The number of data shards."""
        assert self.dp_replicate_size is not None
        assert self.dp_shard_size is not None
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that read the same data."""
        assert self.tp_size is not None
        assert self.cp_size is not None
        assert self.sp_size is not None
        assert self.pp_size is not None
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size

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
    def pp_enabled(self) -> bool:
        """Whether layers are in stages on different processes."""
        return self._enabled("pp")

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
        return self._active("pp", "cp", "sp", "tp")

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
        """Return the mesh; the first call builds it.

        Raises:
            ValueError: The mesh has not been built, and `device_type` was not passed.
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

    Example::

        accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))

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


_made: tuple[Any, dict[Any, DeviceMesh]] = (None, {})  # (default group, its meshes by layout)


def device_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of all processes; collective for the first mesh of a layout.

    The process groups of a mesh are never freed, and each has a communicator or polling threads, so
    a second run with the same layout reuses the mesh of the first.

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
