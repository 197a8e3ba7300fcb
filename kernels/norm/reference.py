"""The definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition: x / sqrt(mean(x^2) + eps) * weight, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
