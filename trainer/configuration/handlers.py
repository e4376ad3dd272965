"""Arguments of objects that the `Accelerator` creates itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from trainer import environment
from trainer.checks import (
    check_bool_fields,
    check_choice,
    check_counts,
    check_positive,
    explains_itself,
)
from trainer.configuration.fields import fill, setting
from trainer.enums import DDPCommunicationHookType
from trainer.errors import module_logger

logger = module_logger(__name__)

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


@explains_itself
@dataclass(kw_only=True)
class KwargsHandler:
    """Arguments for an object that `Accelerator` creates itself.

    Example::

        handler = DistributedDataParallelKwargs(bucket_cap_mb=50)
        handler.to_kwargs()  # {"bucket_cap_mb": 50}
    """

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
    """Settings of gradient accumulation.

    Example::

        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)

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

    num_steps: int | None = setting("count", fallback=1, env=_STEPS)
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        """Resolve `num_steps`, and check types and ranges."""
        what = _STEPS if self.num_steps is None else "num_steps"
        fill(self)
        check_counts(1, **{what: self.num_steps})
        self.num_steps = int(self.num_steps or 1)
        check_bool_fields(self)

    def warn_of_variable(self) -> None:
        """Log a warning if the launcher's number of steps is not in use."""
        if (named := environment.read_int(_STEPS)) not in (None, self.num_steps):
            logger.warning(
                f"gradient_accumulation_steps={self.num_steps} from the script is used, not "
                f"{_STEPS}={named} from the launcher. To use the launcher's value, leave the "
                "argument out."
            )


@explains_itself
@dataclass(kw_only=True)
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``.

    Example::

        with accelerator.autocast(AutocastKwargs(enabled=False)):
            outputs = model(inputs)  # in float32

    Attributes:
        enabled: False disables autocast: operations run in full precision.
        cache_enabled: Keep the cast weights within one context; None takes torch's default.
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

    Example::

        handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")
        trainer = Trainer(max_epochs=10, kwargs_handlers=[handler])

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
        check_choice("comm_wrapper", self.comm_wrapper, ("no", "fp16", "bf16"))
        self.comm_wrapper = kind(self.comm_wrapper)
        if self.comm_wrapper != kind.NO and self.comm_hook == kind.NO:
            raise ValueError(
                f"comm_wrapper is {self.comm_wrapper.value!r} but comm_hook is not set. To send "
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

    Example::

        handler = GradScalerKwargs(init_scale=1024)
        trainer = Trainer(max_epochs=10, mixed_precision="fp16", kwargs_handlers=[handler])

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
        check_positive(init_scale=self.init_scale)
        check_counts(1, growth_interval=self.growth_interval)


TRACE_NAME = "profile_{suffix}.json"
_ACTIVITIES = ("cpu", "cuda", "hpu", "mtia", "xpu")


@explains_itself
@dataclass(kw_only=True)
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``, whose documentation explains them.

    Example::

        handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir="profile")
        with accelerator.profile(handler):
            model(inputs)

    Attributes:
        activities: The activities to record: ``"cpu"`` and the kinds of device that this machine
            has. None records all of them.
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
            check_choice("activities", name, _ACTIVITIES)
        self._schedule()

    def _schedule(self) -> Any:
        if self.schedule_option is None:
            return None
        from torch.profiler import schedule

        try:
            return schedule(**self.schedule_option)
        except (AssertionError, TypeError) as error:
            raise ValueError(
                f"schedule_option is {self.schedule_option!r}: {error} Its keys are wait, warmup "
                "and active, and optionally repeat and skip_first, counted in steps."
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
            # A single recording has all events, but torch up to 2.11 warns about earlier ones.
            acc_events=self.schedule_option is None,
        )

    def _finish(self, rank: int, profiler: Any) -> None:
        """Process a complete recording."""
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

    Example::

        from datetime import timedelta

        handler = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
        trainer = Trainer(max_epochs=10, kwargs_handlers=[handler])

    Attributes:
        backend: The backend; None chooses nccl, xccl or gloo by the device.
        init_method: The rendezvous URL; None means the launcher's address.
        timeout: The time limit of a collective; None is torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
