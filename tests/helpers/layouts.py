"""Tensors of many dtypes in every memory layout, whose bytes are known in another way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (
    *(torch.bool, torch.int8, torch.uint16, torch.int64, torch.bfloat16, torch.float32),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu),
)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # views of a tensor of shape [4, 6]
    "whole": lambda t: t,
    "column of one row": lambda t: t[:1, 0],
    "one element": lambda t: t[2:3, 3:4],
    "row of a transpose": lambda t: t.t()[1:2],
    "transpose": lambda t: t.t(),
    "steps": lambda t: t[::2, ::3],
    "channels last": lambda t: t.view(2, 2, 3, 2).permute(0, 3, 1, 2),
    "scalar": lambda t: t[1, 2],
    "expanded scalar": lambda t: t[1, 2].expand(3),
    "expanded rows": lambda t: t[1:2].expand(3, 6),
    "expanded columns": lambda t: t[:, 2:3].expand(4, 3),
    "overlapping windows": lambda t: t[0].unfold(0, 3, 1),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[1:, 2:2],
    "no rows of a transpose": lambda t: t.t()[3:3, ::2],
}


def tensors(layout: str, seed: int) -> dict[str, Tensor]:
    """Return views of random bits, NaN among them; some are to be conjugated or negated lazily."""
    view = LAYOUTS[layout]
    found = {str(dtype): view(_bits(dtype, seed).view(dtype).view(4, 6)) for dtype in DTYPES}
    conjugated = found[str(torch.complex64)].conj()
    return {**found, "conjugated": conjugated, "negated": conjugated.imag}


def bits(layout: str, seed: int) -> dict[str, Tensor]:
    """Return the bytes of these tensors, found by their places; each of shape [..., bytes]."""
    places = LAYOUTS[layout](torch.arange(24).view(4, 6))
    found = {str(dtype): _bits(dtype, seed)[places] for dtype in DTYPES}
    conjugated = found[str(torch.complex64)].clone()
    conjugated[..., -1] ^= 128  # the sign of the imaginary part
    return {**found, "conjugated": conjugated, "negated": conjugated[..., 4:]}


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of any tensor; shape [..., bytes]."""
    copied = torch.empty((*tensor.shape, 1), dtype=tensor.dtype)
    return copied.copy_(tensor.detach().unsqueeze(-1)).view(torch.uint8)


def _bits(dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype == torch.bool else 256
    shape = 24, dtype.itemsize
    return torch.randint(highest, shape, generator=generator, dtype=torch.uint8)
