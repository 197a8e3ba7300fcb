"""The definition, in plain torch."""

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
