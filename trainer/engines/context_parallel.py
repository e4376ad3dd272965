"""Context parallelism: processes share each sequence, so that longer sequences fit.

Each process computes a contiguous part of the sequence. Only attention communicates: it gathers the
keys and values of all processes, and reduce-scatters their gradients (Llama Team, "The Llama 3 Herd
of Models", 2024, section 3.3.2). So a process holds the keys and values of whole sequences for one
layer at a time, and all other activations only for its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_active: list[_GatheringAttention] = []


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    no_restore_buffers: Collection[Tensor] = (),
) -> Iterator[None]:
    """Split sequences over the processes of a mesh; attention inside sees whole ones.

    Args:
        mesh: The processes that share each sequence, in one dimension.
        buffers: Tensors with the same values on these processes, such as token ids, labels and
            positions. Inside the context each is this process's part of it.
        dims: The dimension of each that runs along the sequence.
        no_restore_buffers: Buffers that stay sharded afterwards.

    Raises:
        ValueError: The numbers of buffers and dimensions differ, or a length is no multiple of the
            number of processes.
    """
    if len(buffers) != len(dims):
        raise ValueError(f"There are {len(buffers)} buffers, but {len(dims)} buffer_seq_dims.")
    size, rank = mesh.size(), mesh.get_local_rank()
    not_restored = {id(buffer) for buffer in no_restore_buffers}
    whole: list[tuple[Tensor, Tensor]] = []
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.shape[dim] % size:
            raise ValueError(
                f"A buffer of shape {tuple(buffer.shape)} has {buffer.shape[dim]} positions along "
                f"dimension {dim}, which cp_size={size} does not divide: pad the sequences."
            )
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            if id(buffer) not in not_restored:
                whole.append((buffer, buffer.detach()))
            buffer.set_(buffer.detach().chunk(size, dim)[rank].contiguous())  # type: ignore[call-overload] # torch's stubs lack set_(Tensor)
    try:
        with attention_over(mesh):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in whole:
                buffer.set_(before)  # type: ignore[call-overload] # as above


@contextmanager
def attention_over(mesh: DeviceMesh) -> Iterator[None]:
    """Gather the keys and values of the processes of a mesh in each attention."""
    mode = _GatheringAttention(mesh)
    _active.append(mode)
    try:
        with mode:
            yield
    finally:
        _active.pop()


def checkpoint_options() -> dict[str, Any]:
    """Return options of ``torch.utils.checkpoint`` that recompute attention as it ran."""
    if not _active:
        return {}
    mesh = _active[-1].mesh
    return {"context_fn": lambda: (nullcontext(), attention_over(mesh))}


class _GatheringAttention(TorchFunctionMode):
    """Makes ``scaled_dot_product_attention`` see the keys and values of all processes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Attend from this process's positions; shapes are (..., heads, positions, width).

        Raises:
            ValueError: There is a mask, or keys of other positions than the queries.
        """
        length = query.shape[-2]
        if attn_mask is not None or key.shape[-2] != length:
            raise ValueError(
                "Under context parallelism (cp_size > 1) attention is over whole sequences: pass "
                "is_causal, not attn_mask, and keys of the same positions as the queries."
            )
        gather: Any = _Gather.apply
        key, value = (gather(part, self.mesh.get_group()) for part in (key, value))
        mask = None
        if is_causal:
            seen = (self.mesh.get_local_rank() + 1) * length
            key, value = key[..., :seen, :], value[..., :seen, :]
            mask = causal_lower_right(length, seen)  # the last query sees all keys
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all processes along the positions, the last dimension but one."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        chunks = gradients[0].chunk(dist.get_world_size(ctx.group), dim=-2)
        parts = [chunk.contiguous() for chunk in chunks]
        gradient = torch.empty_like(parts[0])
        dist.reduce_scatter(gradient, parts, group=ctx.group)
        return gradient, None
