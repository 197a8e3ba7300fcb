"""Rotary position embedding, rotate-half (NeoX) layout, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import native
from kernels.layout import is_dense_rows


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition: the pair (x[i], x[i + D/2]) turns by the angle of frequency i. In place; returns x."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    low, high = x[..., :half], x[..., half:]
    turned_low = low * cos - high * sin
    turned_high = high * cos + low * sin
    x[..., :half] = turned_low
    x[..., half:] = turned_high
    return x


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every head of every token by its position. **In place**; returns x.

    x    float32 [T, n, D]; tokens may lie apart (a slice of a wider projection), heads are dense
    cos  float32 [T, D/2], the rows of the tokens' positions
    sin  float32 [T, D/2]
    """
    library = native.shared_object()
    if library is None or x.is_cuda:
        return apply_rotary_reference(x, cos, sin)
    assert x.dtype == cos.dtype == sin.dtype == torch.float32, (x.dtype, cos.dtype, sin.dtype)
    assert is_dense_rows(x) and cos.is_contiguous() and sin.is_contiguous(), (x.stride(), cos.stride(), sin.stride())
    tokens, heads, head_size = x.shape
    elements = tokens * heads * head_size
    library.moorage_rotary(
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        tokens,
        heads,
        head_size // 2,
        torch.get_num_threads() if elements > native.PARALLEL_ELEMENTS else 1,
    )
    return x
