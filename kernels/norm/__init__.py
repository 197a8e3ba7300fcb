"""RMS norm over the last dimension."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import ByDevice
from kernels.norm import cpu
from kernels.norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]

_RMS_NORM = ByDevice[cpu.RmsNorm](rms_norm_reference, cpu.bind)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises each vector of the last dimension to root mean square 1, then scales it.

    x       float32 [T, H] or [T, n, D]; rows may lie apart (a slice of a wider projection), the rest is dense
    weight  float32 [H] or [D]
    Returns a new dense float32 tensor of x's shape.
    """
    return _RMS_NORM[x.is_cuda](x, weight, eps)
