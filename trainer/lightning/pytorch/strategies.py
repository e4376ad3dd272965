"""Lightning's strategies, translated to arguments of Cadence's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from trainer.checks import given
from trainer.configuration import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from trainer.lightning.missing import getter
from trainer.migration.values import STRATEGIES, wrong_strategy

_ELSEWHERE = {
    "accelerator": "pass accelerator= to the Trainer",
    "parallel_devices": "pass devices= to the Trainer",
    "cluster_environment": "the launcher places the processes: use trainer launch or torchrun",
    "checkpoint_io": "checkpoints have Cadence's format",
    "precision_plugin": "pass precision= to the Trainer",
    "device_mesh": "pass parallelism_config=trainer.ParallelismConfig(...) to the Trainer",
    "model_averaging_period": "for periodic averaging use trainer.LocalSGD, in a custom loop",
}
"""Lightning's arguments that no strategy has here: what to do instead."""
_IN_ZERO = (
    *("contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size"),
)
"""Arguments of `DeepSpeedStrategy` that DeepSpeed has below ``zero_optimization``."""
_AT_TOP = ("zero_allow_untested_optimizer",)
_IN_CONFIG = {
    name: f"write it into the section {section!r} of config=, a configuration of DeepSpeed"
    for section, names in {
        "fp16": "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
        "activation_checkpointing": "partition_activations cpu_checkpointing "
        "contiguous_memory_optimization synchronize_checkpoint_boundary",
        "zero_optimization": "params_buffer_count params_buffer_size max_in_cpu pin_memory "
        "optimizer_buffer_count",
        "aio": "block_size queue_depth single_submit overlap_events thread_count",
    }.items()
    for name in names.split()
} | {
    "remote_device": "parameters begin on the device of the process",
    "nvme_path": "memory on NVMe is not supported",
    "logging_batch_size_per_gpu": "DeepSpeed logs no throughput here",
    "logging_level": "use logging.getLogger('DeepSpeed').setLevel",
    "exclude_frozen_parameters": "checkpoints have all parameters",
}


@dataclass
class Strategy:
    """Arguments of `trainer.Trainer`.

    Attributes:
        arguments: The arguments by name.
    """

    arguments: dict[str, Any] = field(default_factory=dict)


class SingleDeviceStrategy(Strategy):
    """One device."""

    def __init__(self, device: Any = None, **others: Any) -> None:
        _refuse(self, others, _ELSEWHERE, all_=True)
        super().__init__({} if device is None or str(device) != "cpu" else {"cpu": True})


class ParallelStrategy(Strategy):
    """The base of strategies for several processes, for ``isinstance``."""


class DDPStrategy(ParallelStrategy):
    """Data parallelism.

    Args:
        ddp_comm_hook: A torch communication hook that compresses gradients.
        ddp_comm_state: The ``PowerSGDState`` of such a hook.
        ddp_comm_wrapper: Torch's 16-bit wrapper of such a hook.
        process_group_backend: ``"nccl"`` or ``"gloo"``; None chooses by the device.
        timeout: The time limit of a collective.
        start_method: Has no effect, since ``trainer launch`` starts the processes.
        **kwargs: Arguments of `DistributedDataParallelKwargs`, such as ``find_unused_parameters``.
    """

    def __init__(
        self,
        *,
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        _refuse(self, kwargs, _ELSEWHERE)
        if ddp_comm_hook is not None:
            kwargs["comm_hook"] = _hook(ddp_comm_hook)
        if ddp_comm_wrapper is not None:
            kwargs["comm_wrapper"] = _hook(ddp_comm_wrapper)
        if ddp_comm_state is not None:
            names = inspect.signature(type(ddp_comm_state)).parameters
            kwargs["comm_state_option"] = {
                name: getattr(ddp_comm_state, name)
                for name in names
                if name != "process_group" and hasattr(ddp_comm_state, name)
            }
        handlers = [DistributedDataParallelKwargs(**kwargs)] if kwargs else []
        super().__init__(_with_group({}, process_group_backend, timeout, handlers))


class FSDPStrategy(ParallelStrategy):
    """Sharded models, by FSDP 2.

    Args:
        cpu_offload: Keep shards in host memory: a bool or torch's ``CPUOffload``.
        mixed_precision: The dtypes, as in torch's ``MixedPrecision``.
        auto_wrap_policy: Which submodules gather their parameters separately: a set of classes or a
            torch policy. None takes the model's ``_no_split_modules``.
        activation_checkpointing_policy: Which submodules recompute their activations. They must be
            the same as for `auto_wrap_policy`, which defaults to this argument.
        activation_checkpointing: An earlier name of this argument, with a class or a list of
            classes.
        sharding_strategy: Such as ``"SHARD_GRAD_OP"`` or torch's ``ShardingStrategy``.
        state_dict_type: ``"full"`` or ``"sharded"``, with the same effect: states are saved as
            shards, which load on any number of processes.
        process_group_backend: ``"nccl"`` or ``"gloo"``; None chooses by the device.
        timeout: The time limit of a collective.
        **kwargs: Arguments of `FullyShardedDataParallelPlugin`.

    Raises:
        ValueError: A setting is unknown, or FSDP 2 lacks it.
    """

    def __init__(
        self,
        *,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        activation_checkpointing: Any = None,
        sharding_strategy: Any = None,
        state_dict_type: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse(self, kwargs, _ELSEWHERE)
        if not isinstance(activation_checkpointing, (bool, type(None))):
            several = isinstance(activation_checkpointing, (list, tuple, set))
            classes = set(activation_checkpointing) if several else {activation_checkpointing}
            activation_checkpointing_policy = activation_checkpointing_policy or classes
            activation_checkpointing = None
        if activation_checkpointing_policy is not None:
            if auto_wrap_policy is None:
                auto_wrap_policy = activation_checkpointing_policy
            elif auto_wrap_policy != activation_checkpointing_policy:
                raise ValueError(
                    f"activation_checkpointing_policy is {activation_checkpointing_policy!r}, but "
                    f"auto_wrap_policy is {auto_wrap_policy!r}: activations are recomputed in the "
                    "submodules that gather their parameters by themselves. Give both the same."
                )
            activation_checkpointing = True
        if str(state_dict_type).lower() in ("full", "sharded"):
            state_dict_type = f"{state_dict_type}_state_dict"
        kwargs |= given(
            cpu_offload=cpu_offload,
            mixed_precision_policy=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            sharding_strategy=sharding_strategy,
            state_dict_type=state_dict_type,
        )
        plugin = FullyShardedDataParallelPlugin(**_wrapped(auto_wrap_policy), **kwargs)
        super().__init__(_with_group({"fsdp_plugin": plugin}, process_group_backend, timeout))


class DeepSpeedStrategy(ParallelStrategy):
    """DeepSpeed's ZeRO.

    Args:
        stage: The stage, 0 to 3.
        zero_optimization: False means stage 0.
        offload_optimizer: Whether the optimizer's state is in host memory.
        offload_parameters: Whether parameters are in host memory, in stage 3.
        offload_optimizer_device: ``"cpu"``.
        offload_params_device: ``"cpu"``.
        config: A configuration of DeepSpeed instead, as a path or a dict.
        process_group_backend: ``"nccl"`` or ``"gloo"``; None chooses by the device.
        timeout: The time limit of a collective.
        **others: Lightning's names of keys below ``zero_optimization``, such as
            ``allgather_bucket_size``; the defaults are DeepSpeed's. Other arguments of Lightning
            raise an error.

    Raises:
        ValueError: An argument is not supported; the message names the alternative.
    """

    def __init__(
        self,
        *,
        stage: int = 2,
        zero_optimization: bool = True,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_optimizer_device: str = "cpu",
        offload_params_device: str = "cpu",
        config: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **others: Any,
    ) -> None:
        others.pop("load_full_weights", None)  # obsolete, since each stage loads weights
        in_zero = {name: others.pop(name) for name in _IN_ZERO if name in others}
        at_top = {name: others.pop(name) for name in _AT_TOP if name in others}
        _refuse(self, others, _ELSEWHERE | _IN_CONFIG, all_=True)
        if config is not None:
            plugin = DeepSpeedPlugin(hf_ds_config=config)
        else:
            plugin = DeepSpeedPlugin(
                zero_stage=stage if zero_optimization else 0,
                offload_optimizer_device=offload_optimizer_device if offload_optimizer else "none",
                offload_param_device=offload_params_device if offload_parameters else "none",
            )
            plugin.deepspeed_config["zero_optimization"].update(in_zero)
            plugin.deepspeed_config.update(at_top)
        super().__init__(_with_group({"deepspeed_plugin": plugin}, process_group_backend, timeout))


def _refuse(
    strategy: Strategy, others: dict[str, Any], reasons: Mapping[str, str], *, all_: bool = False
) -> None:
    """Raise a ValueError for unsupported arguments, and remove those that request nothing.

    Args:
        strategy: The strategy.
        others: Its further arguments.
        reasons: The alternative for each argument, by name.
        all_: Also raise a TypeError for names without a reason.
    """
    for name, value in list(others.items()):
        if name in reasons:
            if not (value is None or value is False or value == "auto"):
                shown = f"{type(strategy).__name__}({name}={value!r})"
                raise ValueError(f"{shown} does not carry over: {reasons[name]}.")
            del others[name]
        elif all_:
            raise TypeError(f"{type(strategy).__name__} has no argument {name!r}.")


def _with_group(
    arguments: dict[str, Any],
    backend: str | None,
    timeout: timedelta | None,
    handlers: list[Any] | None = None,
) -> dict[str, Any]:
    """Add the handlers, and one for the process group if it has settings."""
    handlers = handlers or []
    if backend is not None or timeout is not None:
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timeout))
    return arguments | ({"kwargs_handlers": handlers} if handlers else {})


def _hook(function: Any) -> str:
    """Return our name for a torch communication hook, or for a wrapper of one."""
    hooks = {"allreduce_hook": "no", "powerSGD_hook": "power_sgd"}
    hooks |= {"batched_powerSGD_hook": "batched_power_sgd"}
    for dtype in ("fp16", "bf16"):
        hooks |= dict.fromkeys((f"{dtype}_compress_hook", f"{dtype}_compress_wrapper"), dtype)
    name = getattr(function, "__name__", str(function))
    if name not in hooks:
        raise ValueError(f"The communication hook is {name}; it must be one of {', '.join(hooks)}.")
    return hooks[name]


def _wrapped(policy: Any) -> dict[str, Any]:
    """Return the arguments of `FullyShardedDataParallelPlugin` for a policy of FSDP 1.

    Raises:
        TypeError: The policy is neither a set of classes nor a function.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    if policy is None:
        return {}
    if isinstance(policy, (set, frozenset, list, tuple)):
        classes = tuple(policy)
        return {"auto_wrap_policy": lambda module: isinstance(module, classes)}
    if policy is size_based_auto_wrap_policy or (
        isinstance(policy, partial) and policy.func is size_based_auto_wrap_policy
    ):
        least = getattr(policy, "keywords", {}).get("min_num_params")
        return {"auto_wrap_policy": "size_based_wrap", **given(min_num_params=least)}
    if isinstance(policy, str):
        return {"auto_wrap_policy": policy}
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy is {policy!r}; it must be a set of classes, or a function that "
            "takes a module, recurse and nonwrapped_numel."
        )
    takes = inspect.signature(policy).parameters
    return {"auto_wrap_policy": _of_module(policy) if "recurse" in takes else policy}


def _of_module(policy: Callable[..., bool]) -> Callable[[nn.Module], bool]:
    """Convert a policy of FSDP 1 to a function of a module."""

    def wraps(module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return policy(module=module, recurse=False, nonwrapped_numel=size)

    return wraps


def strategy_of(strategy: Any) -> Strategy:
    """Return a strategy object from Lightning's name for it.

    Raises:
        ValueError: There is no such strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if (wrong := wrong_strategy({"strategy": str(strategy)})) is not None:
        raise ValueError(wrong)
    kinds = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "deepspeed": DeepSpeedStrategy}
    kind: type[Strategy] = kinds.get(strategy.partition("_")[0], Strategy)
    return kind(**STRATEGIES[strategy])


__getattr__ = getter(__name__)
