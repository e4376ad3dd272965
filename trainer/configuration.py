"""Configurations: keyword-only dataclasses that validate their values."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from trainer import environment
from trainer.checks import choice_error, suggest_arguments
from trainer.enums import DDPCommunicationHookType, FP8BackendType
from trainer.errors import module_logger

logger = module_logger(__name__)

_T = TypeVar("_T")


def explains_itself(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass so that an unknown argument's error lists the valid arguments."""
    made: Any = cls
    made.__init__ = suggest_arguments()(made.__init__)
    return cls


def at_least(minimum: int, what: str, value: object, hint: str = "") -> None:
    """Raise if a value is not an int of at least `minimum`; `hint` ends the message."""
    end = f" ({hint})." if hint else "."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is {value!r}; it must be an int{end}")
    if value < minimum:
        raise ValueError(f"{what} is {value}; it must be at least {minimum}{end}")


def check_bool_fields(configuration: Any) -> None:
    """Raise if a field annotated as a bool has another type: a text such as "no" would be true."""
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        optional = field.type == "bool | None"
        if optional and value is None:
            continue
        if (field.type == "bool" or optional) and not isinstance(value, bool):
            owner = type(configuration).__name__
            raise TypeError(f"{owner}: {field.name} is {value!r}; it must be True or False.")


def recipe_of(handlers: Sequence[object]) -> AORecipeKwargs | TERecipeKwargs:
    """Return the recipe of fp8 training among an `Accelerator`'s handlers, or its default.

    The default is that of ``ACCELERATE_FP8_BACKEND``, else torchao's.

    Raises:
        ValueError: There are several recipes, or the variable names none.
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
        variable = "ACCELERATE_FP8_BACKEND"
        named = FP8BackendType.parse((environment.read(variable) or "NO").upper(), variable)
        if named == FP8BackendType.TE:
            return TERecipeKwargs()
        if named != FP8BackendType.MSAMP:
            return AORecipeKwargs()
        what = f"{variable}={named}"
    raise NotImplementedError(
        f"{what} asks for MS-AMP, which has no distribution that can be installed any more. Use "
        "torchao: kwargs_handlers=[AORecipeKwargs()], or ACCELERATE_FP8_BACKEND=AO."
    )


@explains_itself
@dataclass(kw_only=True)
class DataLoaderConfiguration:
    """How prepared data loaders divide the data among processes.

    Attributes:
        split_batches: Divide each batch of the user's loader among the processes, so that its size
            is the global batch size; False gives each process whole batches.
        dispatch_batches: The main process reads all batches and sends the other processes theirs.
            None does so for iterable datasets only.
        even_batches: Give every process the same number of full batches by repeating samples from
            the beginning of the data; `gather_for_metrics` drops these duplicates. The `Trainer`
            ignores this option and never repeats samples.
        use_seedable_sampler: The order of a shuffling loader depends only on a seed and the epoch.
        non_blocking: Copy batches to the device asynchronously, one batch ahead and overlapping
            with computation; useful with pinned memory.
        use_stateful_dataloader: After `load_state`, or a prepared loader's ``load_state_dict``, the
            next pass continues after the last batch that was handed out, without
            `skip_first_batches`. It works for any loader and does not need torchdata.
        data_seed: The seed of the order; None takes the seed that ``set_seed`` set.
        presharded: The streams of the processes are different parts of the data already, and each
            reads all of its own. Those that ``datasets.distributed.split_dataset_by_node`` or
            webdataset's ``split_by_node`` has split are known without this.

    Raises:
        TypeError: A value is not a bool (or, for `dispatch_batches`, None), or `data_seed` no int.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    data_seed: int | None = None
    presharded: bool = False

    def __post_init__(self) -> None:
        """Check the types."""
        check_bool_fields(self)
        if isinstance(self.data_seed, bool) or not isinstance(self.data_seed, int | None):
            raise TypeError(f"data_seed is {self.data_seed!r}; it must be an int or None.")


@explains_itself
@dataclass(kw_only=True)
class ProjectConfiguration:
    """Where a run writes its files.

    Attributes:
        project_dir: The folder of the run, or None.
        logging_dir: The folder of the trackers that write files; None is `project_dir`.
        automatic_checkpoint_naming: `save_state` saves to numbered folders,
            ``<project_dir>/checkpoints/checkpoint_<number>``.
        total_limit: The number of numbered checkpoints to keep; None keeps all.
        iteration: The number of the next numbered checkpoint.
        save_on_each_node: Local rank 0 of every machine writes, not only global rank 0; for
            machines that do not share a disk.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: `total_limit` is below 1, or `iteration` below 0.
    """

    project_dir: str | PathLike[str] | None = None
    logging_dir: str | PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges, and fill in `logging_dir`."""
        check_bool_fields(self)
        if self.total_limit is not None:
            at_least(1, "total_limit", self.total_limit)
        at_least(0, "iteration", self.iteration)
        for name in ("project_dir", "logging_dir"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, (str, PathLike))):
                raise TypeError(f"{name} is {value!r}; it must be a path or None.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` too if it is None."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@explains_itself
@dataclass(kw_only=True)
class KwargsHandler:
    """Arguments for an object that `Accelerator` creates itself."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all arguments."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        given = self.to_dict()
        return {
            field.name: given[field.name]
            for field in dataclasses.fields(self)
            if field.name in given and given[field.name] != field.default
        }


@explains_itself
@dataclass(kw_only=True)
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Attributes:
        num_steps: Micro-batches per update; None takes
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else 1.
        adjust_scheduler: A prepared scheduler also counts the calls of its ``step`` inside a
            window, in which the learning rate does not change.
        sync_with_dataloader: The end of a prepared loader ends the window, even a shorter one.
        sync_each_batch: All-reduce gradients after every micro-batch. This saves the memory of
            unreduced gradients in engines that keep them separately.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: `num_steps` is below 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        """Resolve `num_steps`, and check types and ranges."""
        what = "num_steps"
        if self.num_steps is None:
            what = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
            named = environment.read_int(what)
            self.num_steps = 1 if named is None else named
        at_least(1, what, self.num_steps)
        check_bool_fields(self)

    def warn_of_variable(self) -> None:
        """Log a warning if the launcher asks for another number of steps than is used."""
        variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        if (named := environment.read_int(variable)) not in (None, self.num_steps):
            logger.warning(
                f"gradient_accumulation_steps={self.num_steps} of the script is used, not "
                f"{variable}={named} of the launcher. To use that, leave the argument out."
            )


@explains_itself
@dataclass(kw_only=True)
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``.

    Attributes:
        enabled: False disables autocast: operations run in full precision.
        cache_enabled: Keep the cast weights within one context; None leaves it to torch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        """Check the types."""
        check_bool_fields(self)


@explains_itself
@dataclass(kw_only=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's ``DistributedDataParallel``; its documentation explains them.

    Attributes:
        comm_hook: The DDP communication hook that compresses gradients for the all-reduce, a
            `DDPCommunicationHookType` or its value. For float32 gradients, ``"fp16"`` and
            ``"bf16"`` send half the bytes and ``"power_sgd"`` far fewer; the averaged gradient is
            then rounded or approximated. ``"bf16"`` needs NCCL or XCCL. No effect with one process.
        comm_wrapper: ``"fp16"`` or ``"bf16"``: the dtype in which PowerSGD sends and keeps its
            tensors.
        comm_state_option: Arguments of torch's ``PowerSGDState``, such as
            ``matrix_approximation_rank`` (1) and ``start_powerSGD_iter``, the number of updates
            before compression begins (1000).

    Raises:
        TypeError: A value has the wrong type, or an option is unknown.
        ValueError: A hook is unknown, or a wrapper or option is given without its hook.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check types and the combination of hooks."""
        check_bool_fields(self)
        kind = DDPCommunicationHookType
        self.comm_hook = kind(kind.parse(self.comm_hook, "comm_hook"))
        if self.comm_wrapper not in (wrappers := ("no", "fp16", "bf16")):
            raise ValueError(choice_error("comm_wrapper", self.comm_wrapper, wrappers))
        self.comm_wrapper = kind(self.comm_wrapper)
        if self.comm_wrapper != kind.NO and self.comm_hook == kind.NO:
            raise ValueError(
                f"comm_wrapper is {self.comm_wrapper.value!r} without a comm_hook to wrap. To send "
                f"gradients in 16 bits pass comm_hook={self.comm_wrapper.value!r}."
            )
        if self.comm_hook.endswith("power_sgd"):
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

            PowerSGDState(None, **self.comm_state_option)  # torch raises for invalid options
        elif self.comm_state_option:
            raise ValueError(
                f"comm_state_option is {self.comm_state_option}, but "
                f"comm_hook={self.comm_hook.value!r} has no state; only 'power_sgd' and "
                "'batched_power_sgd' have one."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the arguments of DDP's constructor, without the hook arguments."""
        hooks = ("comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in super().to_dict().items() if name not in hooks}


@explains_itself
@dataclass(kw_only=True)
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, used with ``mixed_precision="fp16"``.

    Raises:
        ValueError: A factor would keep the scale from growing or shrinking, or is infinite.
        TypeError: A value has the wrong type.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_bool_fields(self)
        for name, low, high, range_ in (
            ("init_scale", 0, math.inf, "above 0 and finite"),
            ("growth_factor", 1, math.inf, "above 1 and finite"),
            ("backoff_factor", 0, 1, "between 0 and 1"),
        ):
            if not low < (value := getattr(self, name)) < high:
                raise ValueError(f"{name} is {value}; it must be {range_}.")
        at_least(1, "growth_interval", self.growth_interval)


TRACE_NAME = "profile_{suffix}.json"
_ACTIVITIES = ("cpu", "cuda", "hpu", "mtia", "xpu")


@explains_itself
@dataclass(kw_only=True)
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``, whose documentation explains them.

    Attributes:
        activities: What is recorded: ``"cpu"`` and the kinds of device that this machine has. None
            records all of them.
        schedule_option: Arguments of ``torch.profiler.schedule``, in steps: ``wait``, ``warmup``
            and ``active``, and optionally ``repeat`` and ``skip_first``. The loop calls ``step()``.
            None records everything.
        on_trace_ready: Called with the profiler at the end of each recording.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record the memory that operators allocate.
        with_stack: Record source lines; slow.
        with_flops: Estimate the FLOPs of matrix products and convolutions.
        with_modules: Record the modules that called the operators.
        output_trace_dir: A folder for ``profile_<rank>.json``, the last recording of each process,
            for https://ui.perfetto.dev or ``chrome://tracing``. None writes nothing.

    Raises:
        ValueError: An activity or an option of the schedule is unknown, or the schedule lacks one.
        TypeError: A value has the wrong type.
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the types and names."""
        check_bool_fields(self)
        if isinstance(self.activities, str):
            raise TypeError(f"activities is {self.activities!r}; it must be a list of names.")
        for name in self.activities or ():
            if name not in _ACTIVITIES:
                raise ValueError(choice_error("activities", name, _ACTIVITIES))
        self._schedule()

    def _schedule(self) -> Any:
        if self.schedule_option is None:
            return None
        from torch.profiler import schedule

        try:
            return schedule(**self.schedule_option)
        except (AssertionError, TypeError) as error:
            raise ValueError(
                f"schedule_option is {self.schedule_option!r}: {error} It takes the steps to wait, "
                "warmup and be active, and optionally repeat and skip_first."
            ) from None

    def build(self, rank: int = 0) -> Any:
        """Return a ``torch.profiler.profile``, which is not started.

        Args:
            rank: The number in the trace's name.

        Raises:
            ValueError: This torch cannot record one of the activities.
        """
        from torch.profiler import profile, supported_activities

        known = {kind.name.lower(): kind for kind in supported_activities()}
        for name in self.activities or ():
            if name not in known:
                raise ValueError(
                    f"activities has {name!r}, which this torch cannot record here; it can record "
                    f"{', '.join(sorted(known))}."
                )
        return profile(
            activities=None if self.activities is None else [known[n] for n in self.activities],
            schedule=self._schedule(),
            on_trace_ready=partial(self._finish, rank),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _finish(self, rank: int, profiler: Any) -> None:
        """Use a recording that is complete."""
        if self.on_trace_ready is not None:
            self.on_trace_ready(profiler)
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / TRACE_NAME.format(suffix=rank)))


@explains_itself
@dataclass(kw_only=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        backend: The backend; None chooses nccl, xccl or gloo by the device.
        init_method: The rendezvous URL; None means the launcher's address.
        timeout: The time limit of a collective; None is torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@explains_itself
@dataclass(kw_only=True)
class AORecipeKwargs(KwargsHandler):
    """Options of ``mixed_precision="fp8"`` with torchao.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``; None takes its defaults with the two
            options below.
        module_filter_func: A function ``(module, name) -> bool`` that chooses the linear layers to
            convert. None takes every ``nn.Linear`` but the first and the last of the model, and but
            those with a dimension that is no multiple of 16.
        pad_inner_dim: Pad inner dimensions to a multiple of 16, as the hardware needs it. None
            leaves it to `config`, else to ``ACCELERATE_FP8_PAD_INNER_DIM``, else True.
        enable_fsdp_float8_all_gather: FSDP gathers the converted weights in 8 bits. None leaves it
            to `config`, else to ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``, else True. No
            effect without FSDP.

    Raises:
        TypeError: A value has the wrong type.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check the types."""
        if self.config is None:
            fill(self, "ACCELERATE_FP8_", pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
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

    Attributes:
        use_autocast_during_eval: Compute in 8 bits in evaluations too (default False).
        margin: Margin of the scale below the largest representable number, in powers of two
            (default 0).
        interval: Steps between updates of the scale (default 1).
        fp8_format: ``"HYBRID"``, E4M3 with E5M2 for gradients (default), ``"E4M3"`` or ``"E5M2"``.
        amax_history_len: Length of the history of largest values, in steps (default 1024).
        amax_compute_algo: Value taken from it: ``"most_recent"`` (default) or ``"max"``.
        override_linear_precision: Which of forward, input gradient and weight gradient run in a
            higher precision (default none).
        use_mxfp8_block_scaling: Scale blocks of values instead of tensors (default False).

    Raises:
        ValueError: A name is unknown, or a number too small.
        TypeError: A value has the wrong type.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and check all."""
        prefix = "ACCELERATE_FP8_"
        fill(
            self,
            prefix,
            use_autocast_during_eval=False,
            margin=0,
            interval=1,
            amax_history_len=1024,
            amax_compute_algo="most_recent",
            use_mxfp8_block_scaling=False,
        )
        if self.fp8_format is None:
            self.fp8_format = environment.read(prefix + "FORMAT") or "HYBRID"
        self.fp8_format = str(self.fp8_format).upper()
        if self.override_linear_precision is None:
            fprop, dgrad, wgrad = (
                environment.read_flag(f"{prefix}OVERRIDE_{name}")
                for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = fprop, dgrad, wgrad
        check_bool_fields(self)
        at_least(0, "margin", self.margin)
        at_least(1, "interval", self.interval)
        at_least(1, "amax_history_len", self.amax_history_len)
        for name, choices in (
            ("fp8_format", ("HYBRID", "E4M3", "E5M2")),
            ("amax_compute_algo", ("max", "most_recent")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(choice_error(name, value, choices))
        flags = self.override_linear_precision
        if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
            raise TypeError(
                f"override_linear_precision is {flags!r}; it must be three bools, of forward, "
                "input gradient and weight gradient."
            )


@explains_itself
@dataclass(kw_only=True)
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 training with MS-AMP. `Accelerator` raises for them: it cannot be installed.

    Attributes:
        opt_level: ``"O1"`` or ``"O2"``; None takes ``ACCELERATE_FP8_OPT_LEVEL``, else ``"O2"``.

    Raises:
        ValueError: The level is unknown.
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        """Fill in the level and check it."""
        fill(self, "ACCELERATE_FP8_", opt_level="O2")
        if self.opt_level not in ("O1", "O2"):
            raise ValueError(choice_error("opt_level", self.opt_level, ("O1", "O2")))


@explains_itself
@dataclass(kw_only=True)
class FP8RecipeKwargs(KwargsHandler):
    """Options of fp8 training under an earlier name; use `AORecipeKwargs` or `TERecipeKwargs`.

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
        opt_level: Another name of `optimization_level`, which it replaces.
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
            if (value := getattr(self, name)) not in choices:
                raise ValueError(choice_error(name, value, choices))


def fill(plugin: object, prefix: str, **defaults: Any) -> None:
    """Set each of these attributes that is None to its environment variable, else to its default.

    Args:
        plugin: The plugin.
        prefix: The variables' names before the attributes' names, or the whole name of the only
            one. Texts are converted to the type of the default.
        **defaults: The defaults by attribute.
    """
    for name, default in defaults.items():
        if getattr(plugin, name) is None:
            variable = prefix + name.upper() if prefix.endswith("_") else prefix
            setattr(plugin, name, _read(variable, default))


def _read(variable: str, default: Any) -> Any:
    text = environment.read(variable)
    if text is None:
        return default
    if isinstance(default, bool):
        return environment.read_flag(variable)
    if isinstance(default, int):
        return environment.read_int(variable)
    return float(text) if isinstance(default, float) else text
