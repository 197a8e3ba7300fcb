"""Rotary position embedding, rotate-half (NeoX) layout, in place."""

from __future__ import annotations

from torch import Tensor


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
    return apply_rotary_reference(x, cos, sin)
