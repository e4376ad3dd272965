"""Load models with the weights of linear layers in 8 or 4 bits, using bitsandbytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.big_models.attach import PRELOADED
from trainer.big_models.device_map import HOSTS, Memory, as_device_map
from trainer.big_models.dispatch import DISK, dispatch_model
from trainer.big_models.loading import (
    Placement,
    check_checkpoint,
    check_folder,
    devices_of,
    warn_of_mismatch,
)
from trainer.big_models.offload import Folder
from trainer.big_models.tensors import (
    CustomDtype,
    Device,
    find_tied_parameters,
    init_empty_weights,
    longest_prefix,
)
from trainer.checkpoint.loading import find_weight_files
from trainer.checkpoint.sharded_state import ShardedTensor, materialize
from trainer.checks import check_bools, check_choice, check_numbers, check_type

_COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Settings of `load_and_quantize_model`.

    Attributes:
        load_in_8bit: Whether weights have 8 bits.
        llm_int8_threshold: For 8-bit weights, inputs above it are computed in 16 bits.
        load_in_4bit: Whether weights have 4 bits.
        bnb_4bit_quant_type: The type of 4-bit weights, ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: Whether the constants of 4-bit weights are quantised too.
        bnb_4bit_compute_dtype: The dtype of products with 4-bit weights: ``"fp32"``, ``"fp16"``,
            ``"bf16"`` or a torch dtype; stored as a torch dtype.
        torch_dtype: The dtype of the other weights; None means the model's.
        skip_modules: Names of modules that are not quantised. None means those with tied weights
            and the last one, which is usually the head.
        keep_in_fp32_modules: Names of modules that are not quantised and stay in float32.

    Raises:
        ValueError: Not exactly one of 8 and 4 bits is chosen, or an argument is invalid.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_bools(
            load_in_8bit=self.load_in_8bit,
            load_in_4bit=self.load_in_4bit,
            bnb_4bit_use_double_quant=self.bnb_4bit_use_double_quant,
        )
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}; exactly one of them "
                "must be True."
            )
        check_numbers(0, llm_int8_threshold=self.llm_int8_threshold)
        check_choice("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4"))
        dtype = self.bnb_4bit_compute_dtype
        if isinstance(dtype, str):
            check_choice("bnb_4bit_compute_dtype", dtype, _COMPUTE)
            self.bnb_4bit_compute_dtype = _COMPUTE[dtype]
        for name in ("skip_modules", "keep_in_fp32_modules"):
            check_type(name, getattr(self, name), list, "It is a list of modules' names.")

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The dtype of quantised weights."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Memory | None = None,
    offload_folder: Folder | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  # of the documented API; see its description
) -> nn.Module:
    """Quantise a model's linear layers, with its own weights or with those of a checkpoint.

    Weights are quantised one at a time, as they are read. Layers that the device map puts on the
    disk, or on the CPU while there is an accelerator, are not quantised. Neither are linear layers
    inside torch's attention and encoder layers, which use the weights without calling the layers.

    Args:
        model: The model, usually created under `init_empty_weights`; changed in place.
        bnb_quantization_config: The settings.
        weights_location: A checkpoint, see `load_checkpoint_in_model`. None takes the model's own
            weights.
        device_map: See `load_checkpoint_and_dispatch`. None uses the accelerator, or the CPU if
            there is none.
        no_split_module_classes: See `load_checkpoint_and_dispatch`.
        max_memory: See `load_checkpoint_and_dispatch`.
        offload_folder: See `load_checkpoint_and_dispatch`.
        offload_state_dict: Has no effect: weights are read one by one in any case.

    Returns:
        The model.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: There is no layer to quantise, or a weight has no values.
        CheckpointError: A file is damaged.
    """
    bnb = _bitsandbytes()
    config = bnb_quantization_config
    empty = any(parameter.is_meta for parameter in model.parameters())
    if empty and weights_location is None:
        raise ValueError(
            "The model is on the meta device: pass its checkpoint as weights_location."
        )
    skipped = [*(config.keep_in_fp32_modules or ())]
    skipped += [name for name, part in model.named_modules() if isinstance(part, PRELOADED)]
    skipped += _default_skipped(model) if config.skip_modules is None else config.skip_modules
    linear = _linear_layers(model, skipped)
    sizes = {f"{name}.weight": config.target_dtype for name in linear}
    if device_map is None:
        available = torch.accelerator.is_available()  # a CUDA build may find no driver
        device_map = {"": torch.accelerator.current_device_index() if available else "cpu"}
    resolved = as_device_map(
        model, device_map, max_memory, no_split_module_classes, config.torch_dtype, False, sizes
    )
    on_device = any(device not in HOSTS for device in resolved.values())
    skipped_on = HOSTS if on_device else (DISK,)
    placed = {name: resolved[longest_prefix(name, resolved) or ""] for name in linear}
    chosen = [name for name, device in placed.items() if device not in skipped_on]
    if not chosen:
        raise ValueError(
            f"No linear layer of {type(model).__name__} is quantised: skip_modules and "
            f"keep_in_fp32_modules leave out {', '.join(skipped) or 'none'}, the device map those "
            f"on {' and '.join(skipped_on)}."
        )
    files = [] if weights_location is None else find_weight_files(weights_location)
    mismatch = check_checkpoint(model, files, weights_location)
    devices = devices_of(model, resolved)
    check_folder(devices, offload_folder)
    modules = {name: model.get_submodule(name) for name in chosen}
    layers = {name: _quantized_layer(bnb, config, modules[name]) for name in chosen}
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    load = _QuantizedPlacement(
        current=model.state_dict(keep_vars=True),
        devices=devices,
        folder=None if offload_folder is None else Path(offload_folder),
        dtype=config.torch_dtype,
        fp32=config.keep_in_fp32_modules or [],
        disk_buffers=False,
        bnb=bnb,
        layers=layers,
    )
    if files:
        load.load(model, files)
        warn_of_mismatch(mismatch, weights_location)
    else:
        load.quantize_in_place(model, modules)
    vars(model).update(
        {"is_loaded_in_4bit": config.load_in_4bit, "is_loaded_in_8bit": config.load_in_8bit}
    )
    return dispatch_model(model, resolved, offload_dir=offload_folder)


def _bitsandbytes() -> Any:
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise ImportError(
            "load_and_quantize_model needs bitsandbytes: pip install 'cadence-trainer[bnb]'."
        ) from error


def _default_skipped(model: nn.Module) -> list[str]:
    """Return the names of modules with tied weights, and of the last module."""
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    children = [name for name, _ in model.named_children()]
    return [*tied, *children[-1:]]


def _linear_layers(model: nn.Module, skipped: Sequence[str]) -> list[str]:
    return [
        name
        for name, part in model.named_modules()
        if name
        and isinstance(part, nn.Linear)
        and not any(f".{skip}." in f".{name}." for skip in skipped)
    ]


def _quantized_layer(bnb: Any, config: BnbQuantizationConfig, old: nn.Module) -> Any:
    """Return the quantised form of a linear layer, without values."""
    assert isinstance(old, nn.Linear)  # only linear layers are selected
    bias = old.bias is not None
    with init_empty_weights():
        if config.load_in_8bit:
            layer = bnb.nn.Linear8bitLt(
                old.in_features,
                old.out_features,
                bias,
                has_fp16_weights=False,
                threshold=config.llm_int8_threshold,
            )
        else:
            layer = bnb.nn.Linear4bit(
                old.in_features,
                old.out_features,
                bias,
                config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
    layer.train(old.training)
    layer.requires_grad_(False)
    if bias:
        layer.bias = old.bias
    return layer


@dataclass(kw_only=True)
class _QuantizedPlacement(Placement):
    """Quantises the weights of some layers, and places the others."""

    bnb: Any
    layers: Mapping[str, Any] = field(default_factory=dict)

    def make_tensor(
        self, names: list[str], source: Tensor | ShardedTensor, file: Path, stored: str
    ) -> Tensor | None:
        owner, _, leaf = names[0].rpartition(".")
        if owner not in self.layers or leaf != "weight":
            return super().make_tensor(names, source, file, stored)
        self.quantize(owner, materialize(source))
        return None  # the quantised shape differs from the checkpoint's

    def quantize(self, name: str, weight: Tensor) -> None:
        """Quantise a weight and set it in its layer."""
        layer, device = self.layers[name], self.device([f"{name}.weight"])
        value = weight.detach().to("cpu", self.dtype or weight.dtype)
        old = layer.weight
        if isinstance(old, self.bnb.nn.Int8Params):
            made = self.bnb.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
        else:
            made = self.bnb.nn.Params4bit(
                value,
                requires_grad=False,
                compress_statistics=old.compress_statistics,
                quant_type=old.quant_type,
                module=layer,
            )
        layer.weight = made.to(device)  # the move quantises it

    def quantize_in_place(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Quantise the weights of a model's old layers, and convert its other weights."""
        for name, layer in modules.items():
            weight = layer.weight
            assert isinstance(weight, Tensor)
            self.quantize(name, weight)
        quantized = {id(layer.weight) for layer in self.layers.values()}
        for name, parameter in model.named_parameters():
            if id(parameter) not in quantized and parameter.is_floating_point():
                dtype = torch.float32 if self.stays_in_fp32([name]) else self.dtype
                parameter.data = parameter.data.to(dtype or parameter.dtype)
