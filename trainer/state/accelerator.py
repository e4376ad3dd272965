"""`AcceleratorState`: the process state with the settings of the `Accelerator`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from trainer import environment
from trainer.checks import check_choice
from trainer.configuration import DeepSpeedPlugin, TorchDynamoPlugin
from trainer.enums import DistributedType, PrecisionType
from trainer.state.partial import PartialState

_PLUGINS = (
    "dynamo_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class AcceleratorState(PartialState):
    """The process state (see `PartialState`) and the settings of the `Accelerator`.

    Users only read it; the `Accelerator` creates it.

    Example::

        accelerator = Accelerator(mixed_precision="bf16")
        state = AcceleratorState()  # the same anywhere in the program
        print(state.device, state.num_processes, state.mixed_precision)

    Args:
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``. None takes
            ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        cpu: See `PartialState`.
        dynamo_plugin: The settings of ``torch.compile`` of the first `Accelerator`; each later one
            has its own. None takes the settings from the environment.
        deepspeed_plugin: The settings of DeepSpeed, or several by name; the first is in use.
        fsdp_plugin: The settings of the FSDP engine.
        torch_tp_plugin: The settings of tensor parallelism.
        megatron_lm_plugin: The division of a megatron-core model over the processes.
        parallelism_config: The sizes of the device mesh over which models are sharded and split.
        _from_accelerator: Whether the caller is the `Accelerator`.
        **kwargs: See `PartialState`.

    Raises:
        ValueError: There is no `Accelerator` yet; the precision is unknown; or the precision or a
            plugin differs from that of the first instance.
        AttributeError: An attribute is assigned to, or is read after ``_reset_state``.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _key: ClassVar[str] = "_mixed_precision"
    _how_to_change: ClassVar[str] = (
        "It describes how the `Accelerator` was created: restart the process and pass the "
        "arguments that you want to the first one."
    )

    dynamo_plugin: Any
    deepspeed_plugins: dict[str, DeepSpeedPlugin] | None
    fsdp_plugin: Any
    torch_tp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: Any
    _mixed_precision: str
    _deepspeed_plugins_at_first: dict[str, DeepSpeedPlugin] | None
    _of_trainer: bool = False  # whether a `Trainer` without an `accelerator=` argument created it
    _runs: bool = False  # whether a `Trainer` with this state is running

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = AcceleratorState._shared_state
        if _from_accelerator:  # so that its loaders get the same seeds as in a new process
            PartialState._shared_state.pop("_seeds_taken", None)
        by_name = deepspeed_plugin
        if isinstance(deepspeed_plugin, DeepSpeedPlugin):
            by_name = {"": deepspeed_plugin}
        arguments = (
            dynamo_plugin,
            by_name,
            fsdp_plugin,
            torch_tp_plugin,
            megatron_lm_plugin,
            parallelism_config,
        )
        plugins = dict(zip(_PLUGINS, arguments, strict=True))
        if mixed_precision is not None:
            mixed_precision = PrecisionType.parse(mixed_precision, "mixed_precision")
        if self.initialized:
            self._check_same(mixed_precision, plugins)
            PartialState(cpu)
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState holds the settings of an `Accelerator`, but no `Accelerator` "
                "exists yet. Create one first: accelerator = Accelerator()."
            )
        if mixed_precision is None:
            named = environment.read("ACCELERATE_MIXED_PRECISION") or "no"
            mixed_precision = PrecisionType.parse(named, "ACCELERATE_MIXED_PRECISION")
        PartialState(cpu, **kwargs)
        plugins["dynamo_plugin"] = dynamo_plugin or TorchDynamoPlugin()  # reads the environment
        self.__dict__.update(plugins, _mixed_precision=mixed_precision)
        if self.is_fsdp2:  # `PartialState` has the kind of device
            self.__dict__["distributed_type"] = DistributedType.FSDP
        if self.deepspeed_plugins:
            self.__dict__["distributed_type"] = DistributedType.DEEPSPEED
        if self.megatron_lm_plugin is not None:
            self.__dict__["distributed_type"] = DistributedType.MEGATRON_LM
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin.set_mixed_precision(mixed_precision)
        # Scripts and runs fill in values afterwards, which are not passed to later instances.
        self.__dict__["_deepspeed_plugins_at_first"] = copy.deepcopy(self.deepspeed_plugins)
        if self.deepspeed_plugins:
            self.select_deepspeed_plugin(next(iter(self.deepspeed_plugins)))

    def _check_same(self, mixed_precision: str | None, plugins: dict[str, Any]) -> None:
        """Raise if a later instance asks for settings that differ from the first one's."""
        requested = {"mixed_precision": mixed_precision, **plugins}
        for name, value in requested.items():
            same = value is None or value == getattr(self, name)
            if not same and name == "deepspeed_plugins":
                again = copy.deepcopy(value)
                for plugin in again.values():
                    plugin.set_mixed_precision(self.mixed_precision)
                same = again == self._deepspeed_plugins_at_first
            if not same:
                raise ValueError(
                    f"AcceleratorState has already been initialised with {name}="
                    f"{getattr(self, name)!r} and cannot be changed. Restart the process and pass "
                    f"{name}={value!r} the first time."
                )

    def __getattr__(self, name: str) -> Any:
        # Attributes of PartialState are read from it, so that they are stored only once.
        if self._key in self.__dict__ and name in PartialState._shared_state:
            return PartialState._shared_state[name]
        return super().__getattr__(name)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether the first `Accelerator` shards models over several processes."""
        config = self.parallelism_config
        sharded = self.fsdp_plugin is not None or (config is not None and not config.pp_enabled)
        return sharded and self.use_distributed

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The settings of DeepSpeed in use; None without DeepSpeed."""
        return next(
            (plugin for plugin in (self.deepspeed_plugins or {}).values() if plugin.selected), None
        )

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return one of several plugins, by its name in `deepspeed_plugins`.

        Raises:
            ValueError: There is no plugin of that name.
        """
        plugins = self.deepspeed_plugins or {}
        check_choice("The name of a DeepSpeedPlugin", name, plugins)
        return plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use one of several plugins for the models that are prepared next."""
        chosen = self.get_deepspeed_plugin(name)
        for other in (self.deepspeed_plugins or {}).values():
            other._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def use_ipex(self) -> bool:
        """Whether Intel's extension for PyTorch is used: always False, since torch includes it."""
        return False

    def _picklable(self) -> dict[str, Any]:
        return {**PartialState._shared_state, **self.__dict__}

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """Make this the shared state while a `Trainer` runs, for code in its hooks."""
        before, state = AcceleratorState._shared_state, self.__dict__
        AcceleratorState._shared_state, state["_runs"] = state, True
        try:
            yield
        finally:
            state["_runs"] = False
            if AcceleratorState._shared_state is state:
                AcceleratorState._shared_state = before

    @staticmethod
    def _leave_to_trainer(precision: str | None = None, *, shares: bool = True) -> dict[str, Any]:
        """Start a new shared state for the next instance, if a `Trainer` owns the current one.

        The `Trainer` keeps its own state.

        Args:
            precision: The precision requested for the next instance; None if any is acceptable.
            shares: Whether the next instance may share the state of a running `Trainer`, inside one
                of its hooks.

        Returns:
            The state that was shared until now.
        """
        before = AcceleratorState._shared_state
        same = shares and before.get("_runs") and precision in (None, before["_mixed_precision"])
        if before.get("_of_trainer") and not same:
            AcceleratorState._shared_state = {}
        return before

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        if not self.initialized:
            return "AcceleratorState(reset)"
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"
