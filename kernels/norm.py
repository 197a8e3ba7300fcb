"""RMS norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition: x / sqrt(mean(x^2) + eps) * weight, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises each vector of the last dimension to root mean square 1, then scales it.

    x       float32 [T, H] or [T, n, D]; rows may lie apart (a slice of a wider projection), the rest is dense
    weight  float32 [H] or [D]
    Returns a new dense float32 tensor of x's shape.
    """
    return rms_norm_reference(x, weight, eps)
