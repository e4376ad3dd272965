"""Settings of DeepSpeed, and the configuration passed to it."""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import environment
from trainer.checks import (
    check_bool_fields,
    check_choice,
    check_counts,
    check_positive,
    check_type,
    explains_itself,
)
from trainer.configuration.fields import fill, setting

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
# The places of the plugin's fields in a DeepSpeed configuration.
_PLACES = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# Options that would change the loop, the data or the gradients in unsupported ways.
_REFUSED = {
    "amp": "use mixed_precision",
    "torch_autocast": "use mixed_precision",
    "elasticity": "a run resumes on any number of processes without it",
    "autotuning": "use the Tuner",
    "curriculum_learning": "choose batches in the data loader",
    "data_efficiency": "choose batches in the data loader",
    "progressive_layer_drop": "drop layers in the module",
    "eigenvalue": "it belongs to compression",
    "compression_training": "compress the trained weights",
    "hybrid_engine": "generate with the module itself",
    "tensor_parallel": "use ParallelismConfig(tp_size=...) without DeepSpeed",
    "sequence_parallel_size": "it is not supported yet",
    "expert_parallel": "it is not supported yet",
    "sparse_gradients": "make embeddings without sparse=True",
    "zero_optimization.zenflow": "it changes when parameters are updated",
    "zero_optimization.mics_shard_size": "it is not supported yet",
    "zero_optimization.zero_hpz_partition_size": "it is not supported yet",
    "zero_optimization.zero_quantized_gradients": "it is not supported yet",
    "zero_optimization.zero_quantized_weights": "it is not supported yet",
}


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, whose values are looked up by dotted keys.

    Args:
        config_file_or_dict: A mapping, which is copied; the path of a JSON file; or the JSON text,
            which may be encoded as base64.

    Raises:
        ValueError: The argument is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HfDeepSpeedConfig) and self.config == other.config

    def __repr__(self) -> str:
        return f"HfDeepSpeedConfig({self.config})"

    def set_stage_and_offload(self) -> None:
        """Determine the ZeRO stage, and whether anything is offloaded."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device")
            for what in ("optimizer", "param")
        }
        self._offload = self._stage in (2, 3) and not devices.isdisjoint(("cpu", "nvme"))

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the mapping that would hold a dotted key, or None, and the key's last part."""
        *path, key = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part)
            if node is None:
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and its subtree.

        Raises:
            ValueError: `must_exist` is True, and the key does not exist.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long}: {self.config}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether the optimizer's state or parameters are offloaded."""
        return bool(self._offload)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the active plugin of an `AcceleratorState`.

    Raises:
        ValueError: DeepSpeed is not used.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "DeepSpeed is not used, so there is no active DeepSpeedPlugin: pass deepspeed_plugin "
            "to the Accelerator, or start the script with `trainer launch --use_deepspeed`."
        )
    return plugin


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    wrong = ValueError(
        f"hf_ds_config is {given!r}; it must be a mapping, the path of a JSON file, or JSON text, "
        "which may be encoded as base64."
    )
    if not isinstance(given, (str, PathLike)):
        raise wrong
    text = str(given)
    if not text.lstrip().startswith("{"):
        try:
            text = _file_or_decoded(text)
        except (OSError, ValueError) as error:
            raise wrong from error
    try:
        read: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong from error
    return read


def _file_or_decoded(text: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except ValueError:
        return Path(text).read_text(encoding="utf-8")


@explains_itself
@dataclass(kw_only=True)
class DeepSpeedPlugin:
    """Settings of DeepSpeed.

    Example::

        plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")
        trainer = Trainer(max_epochs=10, deepspeed_plugin=plugin)

    Attributes:
        hf_ds_config: A DeepSpeed configuration, as a mapping, the path of its JSON file or a
            `HfDeepSpeedConfig`; stored as a `HfDeepSpeedConfig`. None takes
            ``ACCELERATE_DEEPSPEED_CONFIG_FILE``, else builds one from the other fields. The run
            fills in values that are ``"auto"``. Its values override the other fields.
        gradient_accumulation_steps: Micro-batches per update or ``"auto"``; None takes
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else ``"auto"``, the run's value.
        gradient_clipping: The maximum gradient norm or ``"auto"``; None takes
            ``ACCELERATE_GRADIENT_CLIPPING``, else ``"auto"``, the run's value.
        zero_stage: ZeRO stage, 0 to 3; None takes ``ACCELERATE_DEEPSPEED_ZERO_STAGE``, else 2.
        is_train_batch_min: With several loaders, take the smallest batch size.
        offload_optimizer_device: ``"none"`` or ``"cpu"``.
        offload_param_device: The same for parameters, in stage 3.
        offload_optimizer_nvme_path: Not used: ``"nvme"`` is not supported.
        offload_param_nvme_path: The same for parameters.
        zero3_init_flag: Let ``from_pretrained`` of transformers partition a model while it is
            loaded; None takes ``ACCELERATE_DEEPSPEED_ZERO3_INIT``, else True, in stage 3.
        zero3_save_16bit_model: `Accelerator.get_state_dict` and `save_model` use the 16-bit weights
            of the forward pass instead of the float32 copies.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, separated by commas, whose
            parameters stage 3 gathers together; None takes
            ``ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES``.
        enable_msamp: Must not be True: MS-AMP is no longer distributed.
        msamp_opt_level: Not used.

    Raises:
        ValueError: A value is invalid, or the configuration has no ZeRO stage.
        TypeError: A value has the wrong type.
        NotImplementedError: An option is not supported.
    """

    _env_prefix = "ACCELERATE_DEEPSPEED_"

    hf_ds_config: Any = setting(
        "text",
        "a DeepSpeed JSON file, in place of the other options",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        question="a JSON file with its configuration (none: by these questions)",
    )
    gradient_accumulation_steps: int | str | None = setting(
        "text", fallback="auto", env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    )
    zero_stage: int | None = setting(
        "stage",
        "1 partitions the optimizer's state, 2 gradients, 3 parameters (2)",
        2,
        option="zero_stage",
        question="ZeRO stage (1 partitions the optimizer's state, 2 also gradients, "
        "3 also parameters)",
    )
    offload_optimizer_device: str | None = setting(
        "device",
        "where the optimizer's state is: none or cpu (none)",
        "none",
        option="offload_optimizer_device",
        question="keep the optimizer's state in host memory",
    )
    offload_param_device: str | None = setting(
        "device",
        "where parameters of stage 3 are: none or cpu (none)",
        "none",
        option="offload_param_device",
        question="keep parameters in host memory",
    )
    offload_optimizer_nvme_path: str | None = setting(
        "text", "not used: nvme is not supported", "none", option="offload_optimizer_nvme_path"
    )
    offload_param_nvme_path: str | None = setting(
        "text", "not used: nvme is not supported", "none", option="offload_param_nvme_path"
    )
    gradient_clipping: float | str | None = setting(
        "limit",
        "the maximum norm of gradients; auto takes the script's value",
        "auto",
        env="ACCELERATE_GRADIENT_CLIPPING",
    )
    zero3_init_flag: bool | None = setting(
        "bool",
        "stage 3 partitions models of transformers on loading (true)",
        True,
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        option="zero3_init_flag",
        question="partition models of transformers while they are loaded",
    )
    zero3_save_16bit_model: bool | None = setting(
        "bool",
        "save_model writes the weights in 16 bits (false)",
        False,
        option="zero3_save_16bit_model",
        question="save weights in 16 bits",
    )
    transformer_moe_cls_names: str | None = setting(
        "text",
        "classes of experts that stage 3 gathers together",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    )
    is_train_batch_min: bool = True
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        """Fill in missing values from the environment and validate all."""
        wants_init = self.zero3_init_flag
        fill(self, "hf_ds_config")
        given = self._configured()
        fill(self)
        self._validate()
        self.hf_ds_config = given or HfDeepSpeedConfig(self._made())
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        is_zero3 = self.hf_ds_config.is_zero3()
        if wants_init is None and not is_zero3:  # the variable is also set for other stages
            self.zero3_init_flag = False
        if self.zero3_init_flag and not is_zero3:
            raise ValueError(
                f"zero3_init_flag is True, but zero_stage is {self.stage}: only stage 3 partitions "
                "parameters. Leave it out, or use zero_stage=3."
            )
        check_bool_fields(self)
        if self.enable_msamp:
            raise NotImplementedError(
                "enable_msamp=True needs MS-AMP, which is no longer distributed: leave it out, "
                "and use mixed_precision='bf16'."
            )
        self.run_values: dict[str, Any] = {}
        enabled = (n for n in ("fp16", "bf16") if self.get_value(f"{n}.enabled") is True)
        self._own_precision = next(enabled, None)
        self._selected = False

    def _configured(self) -> HfDeepSpeedConfig | None:
        """Return the given configuration completed by the fields, and set fields from it."""
        if self.hf_ds_config in (None, "none"):
            return None
        given = self.hf_ds_config
        if not isinstance(given, HfDeepSpeedConfig):
            given = HfDeepSpeedConfig(given)
        if "zero_optimization" not in given.config:
            raise ValueError(
                f"hf_ds_config has the keys {sorted(given.config)}; name the ZeRO stage under "
                "'zero_optimization'."
            )
        for name, place in _PLACES.items():
            node, key = given.find_config_node(place)
            value = None if node is None else node.get(key)
            if node is not None and value == "auto" and getattr(self, name) is not None:
                node[key] = getattr(self, name)
            elif value not in (None, "auto"):
                setattr(self, name, value)
        given.set_stage_and_offload()
        return given

    def _validate(self) -> None:
        if self.gradient_accumulation_steps != "auto":
            self.gradient_accumulation_steps = int(self.gradient_accumulation_steps or 0)
            check_counts(1, gradient_accumulation_steps=self.gradient_accumulation_steps)
        if self.gradient_clipping != "auto":
            self.gradient_clipping = float(self.gradient_clipping or 0)
            check_positive(gradient_clipping=self.gradient_clipping)
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage is {self.zero_stage!r}; it must be 0, 1, 2 or 3.")
        for name in ("offload_optimizer_device", "offload_param_device"):
            value = getattr(self, name)
            check_choice(name, value, _OFFLOAD_DEVICES)
            if value == "nvme":
                raise NotImplementedError(
                    f"{name} is 'nvme', which is not supported: use 'cpu' or 'none'."
                )
        if self.offload_optimizer_device != "none" and not self.zero_stage:
            raise ValueError(
                "offload_optimizer_device needs a ZeRO stage that partitions the optimizer's "
                "state: use zero_stage=1, 2 or 3."
            )
        if self.offload_param_device != "none" and self.zero_stage != 3:
            raise ValueError(
                f"offload_param_device is {self.offload_param_device!r}, but zero_stage is "
                f"{self.zero_stage}: only stage 3 partitions parameters."
            )

    def _made(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for what in ("optimizer", "param"):
            device = getattr(self, f"offload_{what}_device")
            if device != "none":
                zero[f"offload_{what}"] = {"device": device}
        zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization": zero,
        }

    @classmethod
    def requested(cls, given: Any, several: Any = None) -> dict[str, DeepSpeedPlugin] | None:
        """Return the plugins by name; a new one if ``ACCELERATE_USE_DEEPSPEED`` is set.

        Args:
            given: A plugin, or plugins by name.
            several: The same as `given`.

        Raises:
            ValueError: Both arguments are passed, or the mapping is empty.
            TypeError: An argument has another type.
        """
        if given is not None and several is not None:
            raise ValueError("Pass deepspeed_plugin or deepspeed_plugins, not both.")
        given = several if given is None else given
        if given is None:
            return {"": cls()} if environment.read_flag("ACCELERATE_USE_DEEPSPEED") else None
        if not isinstance(given, Mapping):
            check_type("deepspeed_plugin", given, cls)
            return {"": given}
        if not given:
            raise ValueError("deepspeed_plugins is empty; it must map names to DeepSpeedPlugin.")
        for name, plugin in given.items():
            check_type(f"deepspeed_plugins[{name!r}]", plugin, cls)
        return dict(given)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.zero_stage or 0)

    @property
    def clips_at(self) -> float:
        """The maximum gradient norm if the run sets none; 0 if there is no limit."""
        return 0.0 if isinstance(self.gradient_clipping, str) else self.gradient_clipping or 0.0

    # -- the configuration -------------------------------------------------------------------------

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace ``"auto"`` at a dotted key by the value of the keyword argument of that name.

        Args:
            ds_key_long: The key.
            mismatches: A line is appended if the configuration has a different value.
            must_match: Whether to compare.
            **kwargs: Values by dotted key.

        Raises:
            ValueError: The value is ``"auto"``, and there is no keyword argument for it.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(_cannot_fill(ds_key_long))
            node[key] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and ds_key_long in kwargs:
            here, asked = node.get(key), kwargs[ds_key_long]
            if here is not None and here != asked:
                mismatches.append(f"{ds_key_long} is {here!r}, but the run has {asked!r}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value of a dotted key is ``"auto"``."""
        return bool(self.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace every ``"auto"`` by the keyword argument of its dotted key; see `fill_match`.

        Raises:
            ValueError: A value is missing, or with `must_match` differs.
        """
        mismatches = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(
                    f"{prefix}{key}.", mismatches, value, must_match, **kwargs
                )
            else:
                self.fill_match(prefix + key, mismatches, must_match, **kwargs)
        if mismatches and not prefix:
            raise ValueError(
                f"The DeepSpeed configuration differs from the run: {'; '.join(mismatches)}. Set "
                "these values to 'auto'."
            )

    @staticmethod
    def precision_of(
        plugins: Mapping[str, DeepSpeedPlugin] | None, asked: str | None
    ) -> str | None:
        """Return the precision of the configurations, or else the requested one.

        Raises:
            ValueError: The precisions differ.
        """
        for plugin in (plugins or {}).values():
            own = plugin._own_precision
            if own is not None and asked not in (None, own):
                raise ValueError(
                    f"mixed_precision is {asked!r}, but the DeepSpeed configuration enables {own}: "
                    "set its 'enabled' to 'auto'."
                )
            asked = own or asked
        return asked

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable a precision in the configuration: ``"no"``, ``"fp16"`` or ``"bf16"``.

        Raises:
            ValueError: The configuration enables another precision.
        """
        self.precision_of({"": self}, mixed_precision)
        for name in ("fp16", "bf16"):
            self.deepspeed_config.setdefault(name, {})["enabled"] = mixed_precision == name

    def final_config(
        self, module: nn.Module, optimizer: Optimizer | None, *, bf16: bool
    ) -> dict[str, Any]:
        """Return the configuration for ``deepspeed.initialize``.

        The engine handles accumulation and clipping, and the loop handles schedules, so these are
        left out of the configuration.

        Args:
            module: The user's module.
            optimizer: Its optimizer; None to evaluate only.
            bf16: Whether the module computes in bfloat16.

        Raises:
            ValueError: A value cannot be filled in, or there are two optimizers, or none.
            NotImplementedError: The configuration has an unsupported option.
        """
        from trainer.configuration.dummy_optimizers import DummyOptim

        self._check_supported(bf16)
        self.set_moe_leaf_modules(module)
        config = copy.deepcopy(self.deepspeed_config)
        for key in ("train_batch_size", "scheduler", "fp16"):
            config.pop(key, None)
        config |= {
            "train_micro_batch_size_per_gpu": self.run_values.get(
                "train_micro_batch_size_per_gpu", 1
            ),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": config.get("zero_force_ds_cpu_optimizer", False),
            "steps_per_print": config.get("steps_per_print", sys.maxsize),
            "bf16": {**config.get("bf16", {}), "enabled": bf16},
        }
        values: dict[str, Any] = {
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False
        }
        values |= _hidden_size_values(module)
        _check_optimizer(config, optimizer, dummy=isinstance(optimizer, DummyOptim))
        if "optimizer" in config and optimizer is None:
            del config["optimizer"]
        elif isinstance(optimizer, DummyOptim):
            options = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
            values |= {
                f"optimizer.params.{key}": value
                for key, value in {**options, **optimizer.kwargs}.items()
            }
            if config["optimizer"].get("type", "").lower() in ("adam", "adamw"):
                # DeepSpeed's own kernel would be compiled at the first start.
                config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
        fill_auto(config, values)
        return config

    def _check_supported(self, bf16: bool) -> None:
        for key, instead in _REFUSED.items():
            value = self.get_value(key)
            if isinstance(value, Mapping):
                value = value.get("enabled", True)
            if value is True or (value and value not in (1, -1, "auto")):
                raise NotImplementedError(
                    f"The DeepSpeed configuration sets {key}, which is not supported: remove it "
                    f"({instead})."
                )
        if bf16 and self.stage == 1 and self.get_value("data_types.grad_accum_dtype") == "fp32":
            raise NotImplementedError(
                "data_types.grad_accum_dtype is 'fp32' with bf16 in ZeRO stage 1, for which "
                "DeepSpeed takes its BF16_Optimizer, whose gradients cannot be rescaled: use "
                "stage 2, or leave it out."
            )

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Mark layers whose parameters stage 3 gathers together, for mixtures of experts.

        Raises:
            ValueError: The model has no layer of a class in `transformer_moe_cls_names`.
        """
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        here = {type(part).__name__: type(part) for part in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        for name in names:
            check_choice("A class of transformer_moe_cls_names", name, here)
        set_z3_leaf_modules(model, [here[name] for name in names])

    # -- transformers ------------------------------------------------------------------------------

    def set_deepspeed_weakref(self) -> None:
        """Make ``from_pretrained`` of transformers partition a model over several processes."""
        import torch.distributed as dist

        partitions = self.zero3_init_flag and dist.is_initialized() and dist.get_world_size() > 1
        if find_spec("transformers") is None or not (partitions or "transformers" in sys.modules):
            return
        from transformers.integrations.deepspeed import (
            set_hf_deepspeed_config,
            unset_hf_deepspeed_config,
        )

        unset_hf_deepspeed_config()
        self.dschf = None
        if partitions:
            config = HfDeepSpeedConfig(self.deepspeed_config)
            config.del_config_sub_tree("train_batch_size")
            for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
                if config.get_value(key) in (None, "auto"):
                    config.config[key] = 1
            self.dschf = config  # transformers holds a weak reference
            set_hf_deepspeed_config(config)

    def is_zero3_init_enabled(self) -> bool:
        """Return whether ``from_pretrained`` partitions a model while it is loaded."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Enable or disable `zero3_init_flag` in the block."""
        before = self.zero3_init_flag
        try:
            self.zero3_init_flag = enable
            self.set_deepspeed_weakref()
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    # -- one of several ----------------------------------------------------------------------------

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the active plugin; call `AcceleratorState.select_deepspeed_plugin` instead.

        Raises:
            ValueError: Called directly.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "A DeepSpeedPlugin is selected with "
                "accelerator.state.select_deepspeed_plugin(name), which unselects the others."
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    @property
    def selected(self) -> bool:
        """Whether this is the plugin in use."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise AttributeError(
            f"selected = {value!r} cannot be set: call "
            "accelerator.state.select_deepspeed_plugin(name)."
        )


def _cannot_fill(key: str) -> str:
    return (
        f"{key} is 'auto' in the DeepSpeed configuration, and the run has no value for it: set it "
        "to a value."
    )


def fill_auto(config: dict[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Replace each ``"auto"`` by the value of its dotted key."""
    for key, value in config.items():
        if isinstance(value, dict):
            fill_auto(value, values, f"{prefix}{key}.")
        elif value == "auto":
            if prefix + key not in values:
                raise ValueError(_cannot_fill(prefix + key))
            config[key] = values[prefix + key]


def _hidden_size_values(module: nn.Module) -> dict[str, int]:
    """Return the values that depend on the width of a model of transformers."""
    config = next((c for p in module.modules() if (c := getattr(p, "config", None))), None)
    size = getattr(config, "hidden_size", None) or max(
        getattr(config, "hidden_sizes", ()), default=None
    )
    if size is None:
        return {}
    return {
        "zero_optimization.reduce_bucket_size": size * size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * size * size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * size,
    }


def _check_optimizer(
    config: Mapping[str, Any], optimizer: Optimizer | None, *, dummy: bool
) -> None:
    if "optimizer" in config and optimizer is not None and not dummy:
        raise ValueError(
            f"The DeepSpeed configuration has an optimizer, and the script has a "
            f"{type(optimizer).__name__}: remove one of them. DummyOptim(parameters) stands for "
            "the configuration's."
        )
    if dummy and "optimizer" not in config:
        raise ValueError(
            "DummyOptim stands for the optimizer of a DeepSpeed configuration, which has none: "
            "add 'optimizer' to hf_ds_config, or use an optimizer of torch."
        )
