"""Linear layers that multiply in 8 bits (fp8): torchao's or TransformerEngine's.

Weights, gradients and optimizer state keep their dtype: each layer scales its inputs, weights and
gradients to the range of fp8 and rounds them, right before it multiplies (Micikevicius et al., "FP8
Formats for Deep Learning", 2022).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.configuration import AORecipeKwargs, TERecipeKwargs
from trainer.errors import module_logger

logger = module_logger(__name__)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last ``nn.Linear`` of a model; None without any."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]
) -> bool:
    """Return whether a layer can compute in fp8: dimensions divisible by 16, and not excluded.

    Args:
        module: The layer.
        fqn: Its name in the model.
        layers_to_filter: The names of layers to exclude.
    """
    if not isinstance(module, nn.Linear) or fqn in layers_to_filter:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has torchao's fp8 layers."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(part, Float8Linear) for part in model.modules())


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replace linear layers of a model by torchao's, as ``mixed_precision="fp8"`` does.

    Args:
        model: The model, on its device.
        config: torchao's ``Float8LinearConfig``; None takes the default.
        module_filter_func: Selects layers by module and name; see `AORecipeKwargs`.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    recipe = AORecipeKwargs(config=config, module_filter_func=module_filter_func)
    TorchAOLayers(recipe, device).convert(model)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Drop messages at torchao's import about unused kernels and future changes."""
    text = str(record.msg)
    return not ("Failed to load" in text or "natively supported by torch.compile" in text)


class TorchAOLayers:
    """Replaces linear layers by torchao's ``Float8Linear``, which has the same parameters.

    Args:
        recipe: The settings, and which layers to replace.
        device: The device of the layers. The CPU rounds to fp8 and multiplies in a higher
            precision.

    Raises:
        ImportError: torchao is not installed.
    """

    def __init__(self, recipe: AORecipeKwargs, device: torch.device) -> None:
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).addFilter(_is_of_use)
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise ImportError(
                "mixed_precision='fp8' with the recipe 'AO' needs torchao, in a release for torch "
                f"{torch.__version__}: pip install 'cadence-trainer[fp8]' ({error})."
            ) from error
        given = {"enable_fsdp_float8_all_gather": recipe.enable_fsdp_float8_all_gather}
        given["pad_inner_dim"] = recipe.pad_inner_dim
        config = replace(
            recipe.config or Float8LinearConfig(),
            **{name: value for name, value in given.items() if value is not None},
        )
        if device.type == "cpu" and not config.emulate:
            config = replace(config, emulate=True)
            logger.warning(
                "mixed_precision='fp8' on the CPU: fp8 is emulated, which shows its rounding but "
                "is slower than 'no'."
            )
        self._gathering = config if config.enable_fsdp_float8_all_gather else None
        self._config = replace(config, enable_fsdp_float8_all_gather=False)
        self._filter = recipe.module_filter_func

    def convert(self, module: nn.Module) -> None:
        """Replace the layers that the recipe chooses; the parameters stay the same objects."""
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        ends = {*find_first_last_linear_layers(module)}
        found: list[str] = []

        def is_chosen(part: nn.Module, name: str) -> bool:
            if isinstance(part, Float8Linear):
                found.append(name)
                return False
            if self._filter is not None:
                chosen = bool(self._filter(part, name))
            else:  # a subclass may have its own forward
                chosen = type(part) is nn.Linear and filter_linear_layers(part, name, ends)
            if chosen:
                found.append(name)
            return chosen

        if isinstance(module, nn.Linear):  # torchao would return another module
            ends.add("")
        else:
            convert_to_float8_training(module, config=self._config, module_filter_fn=is_chosen)
        if not found:
            logger.warning(
                f"mixed_precision='fp8' finds no layer of {type(module).__name__} to convert, "
                "so it runs in bfloat16. By default, nn.Linear layers are converted, except the "
                "first, the last, and those with dimensions that are not multiples of 16. Choose "
                "others with AORecipeKwargs(module_filter_func=...)."
            )

    def gather_in_fp8(self, module: nn.Module) -> None:
        """Wrap the converted layers' weights so that FSDP gathers them in fp8, if configured."""
        if self._gathering is None:
            return
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        convert_to_float8_training(
            module,
            config=self._gathering,
            module_filter_fn=lambda part, _: isinstance(part, Float8Linear),
        )

    def context(self) -> AbstractContextManager[Any]:
        """Return an empty context: the layers themselves compute in fp8."""
        return nullcontext()


class TransformerEngineLayers:
    """Replaces linear layers by TransformerEngine's, and runs forward under its ``fp8_autocast``.

    Args:
        recipe: The options of the scaling.

    Raises:
        ImportError: TransformerEngine cannot be imported.
        ValueError: The recipe sets an option that the installed release no longer has.
    """

    def __init__(self, recipe: TERecipeKwargs) -> None:
        try:
            import transformer_engine.common.recipe as scaling
            import transformer_engine.pytorch as engine
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # a missing CUDA library is an OSError
            raise ImportError(
                "mixed_precision='fp8' with the recipe 'TE' needs transformer_engine, which "
                f"cannot be imported: {error}. Its installation needs CUDA and cuDNN: see "
                "NVIDIA's instructions. The recipe 'AO' (torchao) needs neither: "
                "kwargs_handlers=[AORecipeKwargs()] or ACCELERATE_FP8_BACKEND=AO."
            ) from error
        self._engine = engine
        self._evaluates = bool(recipe.use_autocast_during_eval)
        options: dict[str, Any] = {
            "margin": recipe.margin,
            "fp8_format": getattr(scaling.Format, str(recipe.fp8_format)),
        }
        if recipe.use_mxfp8_block_scaling:
            self._scaling = scaling.MXFP8BlockScaling(**options)
            return
        options |= {
            "amax_history_len": recipe.amax_history_len,
            "amax_compute_algo": recipe.amax_compute_algo,
        }
        # Later releases of version 2 have removed these.
        removed = {"interval": 1, "override_linear_precision": (False, False, False)}
        known = inspect.signature(scaling.DelayedScaling).parameters
        for name, default in removed.items():
            value = getattr(recipe, name)
            if name in known:
                options[name] = value
            elif value != default:
                raise ValueError(
                    f"{name} is {value!r}, but the installed transformer_engine no longer has "
                    f"this option: leave it at {default!r}."
                )
        self._scaling = scaling.DelayedScaling(**options)

    def convert(self, module: nn.Module) -> None:
        """Replace the linear layers inside whose dimensions are multiples of 16."""
        linear: Any = self._engine.Linear
        for name, child in list(module.named_children()):
            self.convert(child)
            if type(child) is not nn.Linear:
                continue
            if child.in_features % 16 or child.out_features % 16:
                continue
            made = linear(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                params_dtype=child.weight.dtype,
            )
            made.weight = child.weight
            if child.bias is not None:
                made.bias = child.bias
            setattr(module, name, made)

    def gather_in_fp8(self, module: nn.Module) -> None:
        """Raise an error, since TransformerEngine's layers cannot be sharded here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "mixed_precision='fp8' with the recipe 'TE' is not supported with FSDP: use the recipe "
            "'AO', kwargs_handlers=[AORecipeKwargs()] (--fp8_backend AO), or train without "
            "fsdp_plugin (--use_fsdp)."
        )

    def context(self) -> AbstractContextManager[Any]:
        """Return TransformerEngine's context: fp8 in training, and in evaluation if configured."""
        enabled = self._evaluates or torch.is_grad_enabled()
        autocast = getattr(self._engine, "autocast", None)  # the newer name
        context: AbstractContextManager[Any]
        if autocast is None:
            context = self._engine.fp8_autocast(enabled=enabled, fp8_recipe=self._scaling)
        else:
            context = autocast(enabled=enabled, recipe=self._scaling)
        return context
