"""megatron-core on the CPU: what its code calls of CUDA is answered by the CPU; and a small GPT.

The functions of CUDA that are replaced hold no numerics: the device, streams, and generators.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.trace_rules
from torch import Tensor, nn

CPU = torch.device("cpu")


class _Stream:
    cuda_stream = 0

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return made


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Make megatron-core run on the CPU inside the block."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # it lists the functions that are replaced
    cuda = torch.cuda
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda, cuda.random):
            patch.setattr(module, "get_rng_state", lambda *_, **__: torch.get_rng_state())
            patch.setattr(
                module, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
            )
            patch.setattr(module, "manual_seed", torch.manual_seed)
        patch.setattr(cuda, "current_device", lambda: CPU)
        for name in ("set_device", "synchronize", "_lazy_init", "_lazy_call"):
            patch.setattr(cuda, name, lambda *_, **__: None)
        patch.setattr(cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(cuda, "default_generators", (torch.default_generator,))
        patch.setattr(cuda, "current_stream", lambda *_: _Stream())
        patch.setattr(cuda, "Stream", lambda *_, **__: _Stream())
        patch.setattr(cuda, "stream", lambda _: contextlib.nullcontext())
        for owner in (Tensor, nn.Module):
            patch.setattr(owner, "cuda", lambda self, *_, **__: self)
        for name in ("tensor", "zeros", "empty", "ones", "arange", "full", "rand"):
            patch.setattr(torch, name, _on_cpu(getattr(torch, name)))
        with warnings.catch_warnings():
            # Of kernels that are not installed, and of its own defaults.
            warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
            from megatron.core.tensor_parallel import random

            # By which its generators take the place of the global one for a while.
            patch.setattr(
                random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
            )
            yield


def gpt(arguments: dict[str, Any], **options: Any) -> Any:
    """Return this process's part of a GPT of 4 layers, whose weights depend on names alone.

    Args:
        arguments: Those of ``TransformerConfig`` that a plugin gives.
        **options: More of them, and ``tied``: whether embedding and output share weights.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tied = options.pop("tied", False)
    defaults: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    config = TransformerConfig(**{**defaults, **arguments, **options})
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() * len(model.decoder.layers)
    for name, parameter in model.named_parameters():
        whole = name
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            whole = f"decoder.layers.{int(number) + first}.{rest}"
        if tied and name == "output_layer.weight":
            whole = "embedding.word_embeddings.weight"
        with torch.no_grad():
            parameter.copy_(_part(parameter, whole))
    return model


def _part(parameter: Any, name: str) -> Tensor:
    """Return a process's part of the weight of a name."""
    from megatron.core import parallel_state

    size, rank = 1, 0
    if getattr(parameter, "tensor_model_parallel", False):
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    shape = list(parameter.shape)
    dim, pieces = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
    dim = max(dim, 0)
    shape[dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.1
    if "layernorm" in name and name.endswith("weight"):
        whole += 1
    if size == 1:
        return whole
    rows = whole.unflatten(dim, (pieces, size, -1)).select(dim + 1, rank)
    return rows.flatten(dim, dim + 1)
