"""RMS norm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import native
from kernels.layout import dense_rows


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition: x / sqrt(mean(x^2) + eps) * weight, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises each vector of the last dimension to root mean square 1, then scales it.

    x       float32 [T, H] or [T, n, D]; rows may lie apart (a slice of a wider projection), the rest is dense
    weight  float32 [H] or [D]
    Returns a new dense float32 tensor of x's shape.
    """
    library = native.shared_object()
    if library is None or x.is_cuda:
        return rms_norm_reference(x, weight, eps)
    assert x.dtype == weight.dtype == torch.float32, (x.dtype, weight.dtype)
    x = dense_rows(x)
    y = torch.empty(x.shape)
    elements = y.numel()
    library.moorage_rms_norm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        x.shape[0],
        x.shape[1] if x.dim() == 3 else 1,
        x.shape[-1],
        torch.get_num_threads() if elements > native.PARALLEL_ELEMENTS else 1,
    )
    return y
