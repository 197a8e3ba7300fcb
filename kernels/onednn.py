"""oneDNN's linear, by names that torch keeps to itself: the one file that follows them from version to version."""

from __future__ import annotations

import torch
from torch import Tensor


def available() -> bool:
    """Whether this build of torch has it."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def takes_bfloat16() -> bool:
    """Whether it takes bfloat16 on this processor, be it by way of float32 instructions."""
    return available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(weight: Tensor) -> Tensor:
    """[N, K] in oneDNN's own blocked layout, opaque to torch."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return result


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight.T of a `packed` weight, in their common dtype."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result
