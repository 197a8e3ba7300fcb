"""The definition, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.quantized_linear.matrix import QuantizedMatrix


def quantized_linear_reference(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """The definition: x @ weight.T + bias in float32."""
    return F.linear(x, weight.expanded(), bias)
