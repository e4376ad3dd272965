"""Helpers for scripts that perform the steps of FSDP themselves.

`Accelerator.prepare`, `Accelerator.save_state` and `Accelerator.load_state` do all of this.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer import environment
from trainer.accelerator import Accelerator
from trainer.checkpoint.loading import find_weight_files, load_into, read_each
from trainer.checkpoint.objects import load, save
from trainer.checkpoint.sharded_state import state_like
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.weights import BIN_NAME, WEIGHTS_NAME, load_weights
from trainer.configuration import FullyShardedDataParallelPlugin
from trainer.distributed.collectives import broadcast
from trainer.distributed.process_control import on_main
from trainer.names import bare_names
from trainer.tree import fill_, gathered, is_sharded, map_tree
from trainer.utils.modules import is_peft_model


def enable_fsdp_ram_efficient_loading() -> None:
    """Make ``from_pretrained`` of transformers read weights on one process per machine only.

    It sets ``ACCELERATE_USE_FSDP``, unless that is set, and ``FSDP_CPU_RAM_EFFICIENT_LOADING``.
    """
    if environment.read("ACCELERATE_USE_FSDP") is None:
        environment.export(ACCELERATE_USE_FSDP=True)
    environment.export(FSDP_CPU_RAM_EFFICIENT_LOADING=True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Make ``from_pretrained`` read weights on every process."""
    environment.export(FSDP_CPU_RAM_EFFICIENT_LOADING=False)


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place; `Accelerator.prepare` also does the rest. Collective."""
    return accelerator.engine.prepare_module(model, device=accelerator.device)


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool]:
    """Return a predicate that says whether a submodule is a separate FSDP unit."""
    from trainer.engines.fsdp import units_of

    units = set(units_of(model, fsdp2_plugin))
    return lambda module: module in units


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Recompute the activations of the submodules that the plugin wraps, in place."""
    from trainer.engines.fsdp import checkpoint_activations, units_of

    plugin = accelerator.engine.options.fsdp_plugin or FullyShardedDataParallelPlugin()
    for unit in units_of(model, plugin):
        checkpoint_activations(unit, offload=bool(plugin.activation_checkpointing_offload))
    return model


def fsdp2_switch_optimizer_parameters(
    optimizer: Optimizer, mapping: Mapping[int, nn.Parameter]
) -> None:
    """Replace the parameters of an optimizer.

    Args:
        optimizer: The optimizer.
        mapping: The new parameters by the ``data_ptr()`` of the old ones.

    Raises:
        KeyError: A parameter is not in the mapping.
    """
    for group in optimizer.param_groups:
        group["params"] = [mapping[parameter.data_ptr()] for parameter in group["params"]]


@torch.no_grad()
def fsdp2_load_full_state_dict(
    accelerator: Accelerator,
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    cpu_offload: bool = False,
) -> None:
    """Load the full weights of rank 0 into a sharded model, one tensor at a time; collective.

    Args:
        accelerator: The `Accelerator`.
        model: The sharded model.
        full_sd: The weights on rank 0; other ranks may pass an empty dict.
        cpu_offload: Not used: shards stay where they are.

    Raises:
        KeyError: Rank 0 lacks a name of the model.
    """
    del cpu_offload
    for name, shard in bare_names(model, model.state_dict(keep_vars=True).items()):
        full = torch.empty(shard.shape, dtype=shard.dtype, device=accelerator.device)
        if accelerator.is_main_process:
            full.copy_(full_sd[name])
        broadcast(full)
        fill_(shard, full)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save the weights of a sharded model as safetensors; collective.

    Args:
        fsdp_plugin: Not used: the format is the same for all of its settings.
        accelerator: The `Accelerator` that has prepared the model.
        model: The model.
        output_dir: The folder in which ``pytorch_model_fsdp_<index>`` is written.
        model_index: The number of the model.
        adapter_only: For a ``PeftModel``, save only the trained weights.
        use_dcp: Not used.
    """
    del fsdp_plugin, use_dcp
    folder = _model_folder(output_dir, model_index)
    if not (adapter_only and is_peft_model(model)):
        accelerator.save_model(model, folder)
        return
    parameters = bare_names(model, model.named_parameters())
    trained_names = {name for name, p in parameters if p.requires_grad}
    state = accelerator.get_state_dict(model)
    trained_state = {name: value for name, value in state.items() if name in trained_names}
    _save_on_main(trained_state, folder / WEIGHTS_NAME, safe_serialization=True)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load weights of `save_fsdp_model`; each process loads its part, on any number of processes.

    The arguments are those of `save_fsdp_model`.

    Raises:
        ValueError: There are no weights.
        CheckpointError: The model and the files have different names or shapes.
    """
    del fsdp_plugin, use_dcp, accelerator
    targets = model.state_dict(keep_vars=True)
    if adapter_only and is_peft_model(model):
        targets = {name: tensor for name, tensor in targets.items() if tensor.requires_grad}
    folder = _model_folder(input_dir, model_index)
    weights = dict(chain.from_iterable(map(read_each, find_weight_files(folder))))
    load_into(model, weights, where=folder, here=targets)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the whole state of an optimizer of a sharded model; collective.

    `Accelerator.save_state` saves shards instead, which needs no extra memory on rank 0.

    Args:
        fsdp_plugin: Not used.
        accelerator: The `Accelerator` that has prepared the optimizer.
        optimizer: The optimizer.
        model: Not used.
        output_dir: The folder in which ``optimizer_<index>.bin`` is written.
        optimizer_index: The number of the optimizer.
        use_dcp: Not used.
    """
    del fsdp_plugin, accelerator, model, use_dcp
    state = map_tree(_on_host, optimizer.state_dict())
    _save_on_main(state, _optimizer_file(output_dir, optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a state of `save_fsdp_optimizer`, on any number of processes.

    The arguments are those of `save_fsdp_optimizer`; `adapter_only` is not used.
    """
    del fsdp_plugin, accelerator, model, adapter_only, use_dcp
    inner = getattr(optimizer, "optimizer", optimizer)
    state = load(_optimizer_file(input_dir, optimizer_index))
    inner.load_state_dict(dict(state_like(inner, state)))


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the shards of a model's weights into one file, as ``trainer merge-weights`` does.

    Collective: rank 0 merges, and its error is raised on all processes.

    Args:
        checkpoint_dir: The folder with the shards.
        output_path: The folder of ``model.safetensors``.
        safe_serialization: False writes ``pytorch_model.bin`` instead.
        remove_checkpoint_dir: Delete `checkpoint_dir` afterwards.

    Raises:
        CheckpointError: The weights are missing or damaged.
        ValueError: The weights have another format.
    """
    folder = Path(output_path)

    def merge() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        merge_weights(checkpoint_dir, folder / WEIGHTS_NAME)
        if not safe_serialization:
            save(load_weights(folder / WEIGHTS_NAME), folder / BIN_NAME)
            (folder / WEIGHTS_NAME).unlink()
        if remove_checkpoint_dir:
            shutil.rmtree(checkpoint_dir)

    on_main(merge)


def _save_on_main(
    state: Mapping[str, Any], file: Path, *, safe_serialization: bool = False
) -> None:
    """Write a file and its folder on rank 0; its error is raised on all processes."""

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(state, file, safe_serialization=safe_serialization)

    on_main(write)


def _model_folder(folder: str | os.PathLike[str], index: int) -> Path:
    return Path(folder) / f"pytorch_model_fsdp_{index}"


def _optimizer_file(folder: str | os.PathLike[str], index: int) -> Path:
    return Path(folder) / f"optimizer_{index}.bin"


def _on_host(leaf: Any) -> Any:
    sharded = isinstance(leaf, torch.Tensor) or is_sharded(leaf)
    return gathered(leaf).detach().cpu() if sharded else leaf
